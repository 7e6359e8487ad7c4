// The packed matrix product: C [m x n] = A [m x k] B [k x n] with f32 sums. Operands and result are
// any of f32, f16, bf16. Called through gemm_packed by gemm.c; owns nothing but scratch during a
// call.
//
// k is cut into pieces of nearly equal size, at most GEMM_KC, and the columns into spans. For each
// piece and span, B is packed as f32 into panels of GEMM_NR columns (48 for avx512), so that
// widening f16 or transposing a matrix costs one pass over B, not one per use. Each thread computes
// rectangles of C. It copies its rows of A as f32, unless the micro-kernel can read them in place.
// Then it runs the micro-kernel, which holds GEMM_MR x GEMM_NR results in registers. Sums stay in
// f32 from one piece of k to the next. After the last piece, bias, GELU or the old C is applied,
// and the results are rounded and stored.
//
// For the path `pairs` (gemm.h), panels and rows of A hold pairs of bf16 instead of f32. A product
// with at most GEMM_MR rows, as when generating one token, reads a transposed B in place. Every sum
// stays within one thread. Without pairs and GELU, avx2 and avx512 agree bit for bit.
#include "gemm.h"

#include <omp.h>
#include <unistd.h>

#include "gemm_pairs.h"
#include "simd.h"

enum {
  GEMM_KC = 384,               // the longest piece of k
  // Every piece of k except the last is a multiple of this number. It is the same on every
  // instruction set, so that all of them cut k, and thus order the sums, alike.
  GEMM_K_UNIT = 16,
  GEMM_MC = 128,               // most rows in a task, before rounding up to a multiple of GEMM_MR
  GEMM_SERIAL = 1 << 17,       // multiply-adds below which threads cost more than they save
  // With a smaller k, bf16 is multiplied as f32, not as pairs. The choice depends on k alone, and
  // so does the order of the sums.
  GEMM_PAIRS_K = 128,
};

// ------------------------------------------------------------------ one rectangle of C

// The current part of a product: columns [n0, n0+n) and steps [k0, k0+k).
typedef struct part {
  const gemm_call *call;
  gemm_offset      at;        // offsets of this member of the batch
  int64_t          n0, n, k0, k, panels;
  bool             last;      // k0 + k is the end of K
  bool             pairs;     // operands are laid out as pairs of bf16
  int64_t          steps;     // steps of the micro-kernel: k, or the number of pairs in k
  const float     *packed;    // [panels][steps][GEMM_NR]
  // Sums over the earlier pieces of k, [m][panels * GEMM_NR]. NULL if there is only one piece.
  float           *carried;
} part;

// Packs one panel of B, [steps][GEMM_NR], into its place in `packed`.
static void pack_panel(const part *p, int64_t panel, float *packed)
{
  const gemm_operand *b = &p->call->b;
  int64_t j = p->n0 + panel * GEMM_NR, first = p->at.b + p->k0 * b->row + j * b->column;
  int columns = least(p->n - panel * GEMM_NR, GEMM_NR);
  lay_out_steps(p->pairs, packed + panel * p->steps * GEMM_NR, GEMM_NR, b->data, b->dtype, first,
                b->row, b->column, p->k, columns);
}

// Rows of A as the micro-kernel reads them. at[i*row + p*step] is element (i, p) or, for pairs,
// word (i, p).
typedef struct rows_of_a { const float *at; int64_t row, step; } rows_of_a;

// Returns rows [i0, i0+rows) of A. They stay in their tensor if the micro-kernel can read them
// there. Otherwise they are copied to a_copy, which has room for floats_of_a floats.
static rows_of_a read_rows(const part *p, int64_t i0, int64_t rows, float *a_copy)
{
  const gemm_operand *a = &p->call->a;
  int64_t origin = p->at.a + i0 * a->row + p->k0 * a->column;
  // The row length of a copy of A that stays transposed, [steps][rows].
  int64_t turned = (rows + VF_LANES - 1) / VF_LANES * VF_LANES;
  // The row length of any other copy, one vector more than needed, so that rows do not share a
  // cache set.
  int64_t straight = (p->steps + VF_LANES - 1) / VF_LANES * VF_LANES + VF_LANES;
  bool as_it_lies = p->pairs ? a->row % 2 == 0 && p->k % 2 == 0 : a->dtype == ENG_f32;
  if (a->column == 1 && as_it_lies) {
    const char *at = (const char *)a->data + origin * (p->pairs ? 2 : 4);
    return (rows_of_a){(const float *)(const void *)at, p->pairs ? a->row / 2 : a->row, 1};
  }
  if (a->row == 1 && a->column != 1) {
    lay_out_steps(p->pairs, a_copy, turned, a->data, a->dtype, origin, a->column, 1, p->k, rows);
    return (rows_of_a){a_copy, 1, turned};
  }
  lay_out_rows(p->pairs, a_copy, straight, a->data, a->dtype, origin, a->row, a->column, rows,
               p->k);
  return (rows_of_a){a_copy, straight, 1};
}

// Turns the sums of rows [i0, i0+rows), columns [j0, j0+columns) into C and `side`, as the call's
// bias, `add` and `after` demand, and rounds the results. `whole` means columns == GEMM_NR. after,
// whole and, if `whole`, dtype (of C and `side`) are constants where this is inlined.
VF_INLINE void finish_typed(const part *p, const int dtype, const gemm_after after,
                            const bool whole, const float *sums, int64_t ld, int64_t i0,
                            int64_t rows, int64_t j0, int columns)
{
  const gemm_call *g = p->call;
  const bool slope = after == GEMM_GELU_GRAD;
  int n[GEMM_NV];
  vf bias[GEMM_NV];
#pragma GCC unroll 4
  for (int v = 0; v < GEMM_NV; v++) {
    n[v] = whole ? VF_LANES : least(columns - v * VF_LANES, VF_LANES);
    if (!whole && n[v] < 0) n[v] = 0;
    bias[v] = vf_set1(-0.0f);           // adding -0 changes nothing
    if (g->bias) bias[v] = vf_read(g->bias, g->bias_dtype, j0 + v * VF_LANES, n[v]);
  }
  for (int64_t i = 0; i < rows; i++, sums += ld) {
    int64_t to = p->at.c + (i0 + i) * g->c_row + j0;
    vf x[GEMM_NV], y[GEMM_NV];
#pragma GCC unroll 4
    for (int v = 0; v < GEMM_NV; v++) {
      int64_t at = to + v * VF_LANES;
      x[v] = vf_add(vf_load_n(sums + v * VF_LANES, n[v]), bias[v]);
      if (slope) {
        y[v] = vf_read(g->side, dtype, at, n[v]);
      } else {
        if (after == GEMM_AS_IT_IS && g->add) x[v] = vf_add(x[v], vf_read(g->c, dtype, at, n[v]));
        vf_write(g->c, dtype, at, x[v], n[v]);
        if (after == GEMM_GELU && dtype != ENG_f32) x[v] = vf_read(g->c, dtype, at, n[v]);
      }
    }
    if (after == GEMM_AS_IT_IS) continue;
#pragma GCC unroll 4
    for (int v = 0; v < GEMM_NV; v++)   // unrolled so that the long dependency chains overlap
      y[v] = slope ? vf_mul(vf_gelu_tanh_derivative(y[v]), x[v]) : vf_gelu_tanh(x[v]);
#pragma GCC unroll 4
    for (int v = 0; v < GEMM_NV; v++)
      vf_write(slope ? g->c : g->side, dtype, to + v * VF_LANES, y[v], n[v]);
  }
}

#define FINISH(name, after)                                                                       \
  static __attribute__((noinline)) void name(const part *p, const float *sums, int64_t ld,        \
                                             int64_t i0, int64_t rows, int64_t j0, int columns)   \
  {                                                                                               \
    int dtype = p->call->c_dtype;                                                                 \
    if (columns < GEMM_NR) finish_typed(p, dtype, after, false, sums, ld, i0, rows, j0, columns); \
    else if (dtype == ENG_f32)                                                                    \
      finish_typed(p, ENG_f32, after, true, sums, ld, i0, rows, j0, columns);                     \
    else if (dtype == ENG_f16)                                                                    \
      finish_typed(p, ENG_f16, after, true, sums, ld, i0, rows, j0, columns);                     \
    else finish_typed(p, ENG_bf16, after, true, sums, ld, i0, rows, j0, columns);                 \
  }
FINISH(finish_sums, GEMM_AS_IT_IS)
FINISH(finish_with_gelu, GEMM_GELU)
FINISH(finish_with_slope, GEMM_GELU_GRAD)

static void finish(const part *p, const float *sums, int64_t ld, int64_t i0, int64_t rows,
                   int64_t j0, int columns)
{
  gemm_after after = p->call->after;
  (after == GEMM_GELU        ? finish_with_gelu
   : after == GEMM_GELU_GRAD ? finish_with_slope
                             : finish_sums)(p, sums, ld, i0, rows, j0, columns);
}

// Prefetches lines of C or of `side` while the micro-kernel computes: for writing if `writes`, else
// for reading.
VF_INLINE void announce(const void *c, const int writes, int64_t row_bytes, int rows, int bytes)
{
  for (int i = 0; i < rows; i++)
    for (int at = 0; at < bytes; at += 64)
      if (writes) __builtin_prefetch((const char *)c + i * row_bytes + at, 1);
      else __builtin_prefetch((const char *)c + i * row_bytes + at, 0);
}

// Multiplies rows [i0, i0+rows) of A by panels [first, end). `a_copy` is the buffer for read_rows.
static void multiply(const part *p, int64_t i0, int64_t rows, int64_t first, int64_t end,
                     float *a_copy)
{
  const gemm_call *g = p->call;
  rows_of_a a = read_rows(p, i0, rows, a_copy);
  // f32 results with nothing to add are stored straight into C if they fill whole vectors. Other
  // results pass through p->carried or through a tile in the first-level cache.
  bool plain = g->c_dtype == ENG_f32 && !g->add && !g->bias && g->after == GEMM_AS_IT_IS;
  float tile[GEMM_MR * GEMM_NR] __attribute__((aligned(64)));
  for (int64_t panel = first; panel < end; panel++) {
    int64_t j0 = p->n0 + panel * GEMM_NR;
    int columns = least(p->n - panel * GEMM_NR, GEMM_NR),
        vectors = (columns + VF_LANES - 1) / VF_LANES;
    bool direct = plain && columns % VF_LANES == 0;
    float *c = tile;
    int64_t ldc = GEMM_NR, step = 0;   // step: ldc, or 0 if every group of rows reuses `tile`
    if (direct) {
      c = (float *)g->c + p->at.c + i0 * g->c_row + j0;
      ldc = step = g->c_row;
    } else if (p->carried) {
      ldc = step = p->panels * GEMM_NR;
      c = p->carried + i0 * ldc + panel * GEMM_NR;
    }
    const float *b = p->packed + panel * p->steps * GEMM_NR;
    int64_t size = g->c_dtype == ENG_f32 ? 4 : 2, final_row = g->c_row * size;
    int64_t at = p->at.c + i0 * g->c_row + j0;
    const char *final = (const char *)g->c + at * size,
               *side = g->side ? (const char *)g->side + at * size : NULL;
    for (int64_t i = 0; i < rows; i += GEMM_MR) {
      int high = least(rows - i, GEMM_MR);
      if (direct || p->last)
        announce(final + i * final_row, 1, final_row, high, columns * (int)size);
      if (p->last && g->after == GEMM_GELU)
        announce(side + i * final_row, 1, final_row, high, columns * (int)size);
      if (p->last && g->after == GEMM_GELU_GRAD)
        announce(side + i * final_row, 0, final_row, high, columns * (int)size);
      kernel_of(p->pairs, high, vectors)(p->steps, a.at + i * a.row, a.row, a.step, b, c + i * step,
                                         ldc, p->k0 > 0);
      if (!direct && p->last) finish(p, c + i * step, ldc, i0 + i, high, j0, columns);
    }
  }
}

// ------------------------------------------------------------------ the complete product

// How a product is cut. Each thread has a buffer of a_floats floats for its rows of A.
typedef struct layout {
  int64_t k_span, n_span;            // numbers of steps of k and of columns packed at a time
  int64_t rows, row_blocks;          // rows of a rectangle; number of rectangles along m
  int64_t column_groups;             // number of rectangles along n, in one span
  int64_t a_floats, b_floats, carried_floats;
} layout;

// Returns whether to multiply pairs of bf16. On one machine, the choice depends on formats and k
// alone.
static bool by_pairs(const gemm_call *g)
{ return g->k >= GEMM_PAIRS_K && pairs_of(g->a.dtype, g->b.dtype); }

// Returns the most bytes of B to pack at a time: half of a core's L2 cache, but at most 1 MiB, so
// that they stay there while A streams past. If the system reports less than 512 KiB, or nothing,
// assumes a cache of 1 MiB.
static int64_t bytes_of_b(void)
{
  static int64_t known;
  if (!known) {
    int64_t cache = sysconf(_SC_LEVEL2_CACHE_SIZE);
    known = (cache < 1 << 19 ? 1 << 20 : cache > 1 << 21 ? 1 << 21 : cache) / 2;
  }
  return known;
}

// Returns the number of floats that read_rows may need for its copy of `rows` rows and `k` columns
// of A.
static int64_t floats_of_a(const gemm_call *g, int64_t rows, int64_t k)
{
  if (g->a.dtype == ENG_f32 && g->a.column == 1) return 0;
  int64_t by_rows = rows * (ceiling(k, VF_LANES) + 1) * VF_LANES;
  int64_t by_steps = ceiling(rows, VF_LANES) * VF_LANES * k;
  return larger(by_rows, by_steps);
}

static layout plan(const gemm_call *g, int threads)
{
  layout l = {0};
  // The pieces of k and the spans of columns have nearly equal sizes. The pieces of k, and thus the
  // order of the sums, depend on k alone.
  l.k_span = ceiling(ceiling(g->k, ceiling(g->k, GEMM_KC)), GEMM_K_UNIT) * GEMM_K_UNIT;
  if (l.k_span > g->k) l.k_span = g->k;
  int64_t steps = steps_of(by_pairs(g), l.k_span);
  int64_t n_most = bytes_of_b() / (int64_t)sizeof(float) / steps / GEMM_NR * GEMM_NR;
  if (n_most < GEMM_NR) n_most = GEMM_NR;
  l.n_span = ceiling(ceiling(g->n, ceiling(g->n, n_most)), GEMM_NR) * GEMM_NR;
  l.row_blocks = ceiling(g->m, GEMM_MC);
  l.column_groups = 1;
  if (l.row_blocks % threads) {
    int64_t even = ceiling(l.row_blocks, threads) * threads;
    if (g->m / even >= 2 * GEMM_MR) l.row_blocks = even;
    else if (l.row_blocks < 4 * threads) l.column_groups = threads;
  }
  int64_t panels = ceiling(l.n_span, GEMM_NR);
  if (l.column_groups > panels) l.column_groups = panels;
  l.rows = ceiling(ceiling(g->m, l.row_blocks), GEMM_MR) * GEMM_MR;
  l.row_blocks = ceiling(g->m, l.rows);
  l.a_floats = floats_of_a(g, l.rows, l.k_span);
  l.b_floats = panels * GEMM_NR * steps;
  if (l.k_span < g->k) l.carried_floats = g->m * panels * GEMM_NR;
  return l;
}

static part part_at(const gemm_call *g, const layout *l, gemm_offset at, int64_t n0, int64_t k0,
                    float *packed, float *carried)
{
  part p = {.call = g, .at = at, .n0 = n0, .k0 = k0, .packed = packed};
  p.n = g->n - n0 < l->n_span ? g->n - n0 : l->n_span;
  p.k = g->k - k0 < l->k_span ? g->k - k0 : l->k_span;
  p.panels = ceiling(p.n, GEMM_NR);
  p.pairs = by_pairs(g);
  p.steps = steps_of(p.pairs, p.k);
  p.last = k0 + p.k == g->k;
  p.carried = l->carried_floats ? carried : NULL;
  return p;
}

// Threads share one product at a time: they pack B together, then take rectangles of C.
static void run_shared(const gemm_call *g, const layout *l, int64_t members, int threads,
                       float *packed, float *carried, float *room, int64_t room_floats)
{
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    float *a_copy = room + omp_get_thread_num() * room_floats;
    for (int64_t z = 0; z < members; z++) {
      gemm_offset at = gemm_offset_of(g, z);
      for (int64_t n0 = 0; n0 < g->n; n0 += l->n_span) {
        for (int64_t k0 = 0; k0 < g->k; k0 += l->k_span) {
          part p = part_at(g, l, at, n0, k0, packed, carried);
#pragma omp for schedule(static)
          for (int64_t panel = 0; panel < p.panels; panel++) pack_panel(&p, panel, packed);
          int64_t group = ceiling(p.panels, l->column_groups);
#pragma omp for schedule(dynamic, 1)
          for (int64_t task = 0; task < l->row_blocks * l->column_groups; task++) {
            int64_t i0 = task / l->column_groups * l->rows, first = task % l->column_groups * group;
            int64_t end = first + group < p.panels ? first + group : p.panels;
            multiply(&p, i0, g->m - i0 < l->rows ? g->m - i0 : l->rows, first, end, a_copy);
          }
        }
      }
    }
  }
}

// Every thread computes whole products of the batch.
static void run_batched(const gemm_call *g, const layout *l, int64_t members, int threads,
                        float *room, int64_t room_floats)
{
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t z = 0; z < members; z++) {
    float *a_copy = room + omp_get_thread_num() * room_floats;
    float *packed = a_copy + l->a_floats, *carried = packed + l->b_floats;
    gemm_offset at = gemm_offset_of(g, z);
    for (int64_t n0 = 0; n0 < g->n; n0 += l->n_span) {
      for (int64_t k0 = 0; k0 < g->k; k0 += l->k_span) {
        part p = part_at(g, l, at, n0, k0, packed, carried);
        for (int64_t panel = 0; panel < p.panels; panel++) pack_panel(&p, panel, packed);
        for (int64_t i0 = 0; i0 < g->m; i0 += l->rows)
          multiply(&p, i0, g->m - i0 < l->rows ? g->m - i0 : l->rows, 0, p.panels, a_copy);
      }
    }
  }
}

// ------------------------------------------------------------------ few rows

// Returns whether to read a transposed B in place. With at most GEMM_MR rows of A, packing B would
// cost more than multiplying.
static bool is_thin(const gemm_call *g, int64_t members)
{ return members == 1 && g->m <= GEMM_MR && g->b.row == 1 && g->b.column != 1; }

// Computes one panel of columns of C. `all` is the part that spans all of k. The sums over k are
// computed in pieces of k_span.
static void multiply_thin(const part *all, rows_of_a a, int64_t panel, int64_t k_span)
{
  const gemm_call *g = all->call;
  float sums[GEMM_MR * GEMM_NR] __attribute__((aligned(64)));
  float piece[GEMM_MR * VF_LANES] __attribute__((aligned(64)));
  int64_t j0 = panel * GEMM_NR, size = g->b.dtype == ENG_f32 ? 4 : 2;
  int columns = least(g->n - j0, GEMM_NR);
  thin_kernel *kernel = thin_kernel_of(all->pairs, g->b.dtype);
  for (int j = 0; j < columns; j += VF_LANES) {
    int64_t first = all->at.b + (j0 + j) * g->b.column;
    for (int64_t k0 = 0; k0 < g->k; k0 += k_span) {
      kernel(smaller(g->k - k0, k_span), a.at + steps_of(all->pairs, k0) * a.step, a.row, a.step,
             g->m, (const char *)g->b.data + (first + k0) * size, g->b.column * size,
             least(columns - j, VF_LANES), piece);
      for (int64_t i = 0; i < g->m; i++) {
        float *to = sums + i * GEMM_NR + j;
        vf x = vf_load(piece + i * VF_LANES);
        vf_store(to, k0 ? vf_add(vf_load(to), x) : x);
      }
    }
  }
  finish(all, sums, GEMM_NR, 0, g->m, j0, columns);
}

// Computes a product with few rows. Threads share the panels.
static eng_status run_thin(const gemm_call *g, int threads)
{
  int64_t k_span = plan(g, threads).k_span;
  layout whole = {.k_span = g->k, .n_span = g->n};
  part all = part_at(g, &whole, gemm_offset_of(g, 0), 0, 0, NULL, NULL);
  SCRATCH(float, a_copy, floats_of_a(g, g->m, g->k));
  rows_of_a a = read_rows(&all, 0, g->m, a_copy);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t panel = 0; panel < all.panels; panel++) multiply_thin(&all, a, panel, k_span);
  return ENG_OK;
}

// Computes a product with k = 0. The sums are zero, so only the bias and the old C remain.
static void run_empty(const gemm_call *g, int64_t members)
{
  const float zero[GEMM_NR] = {0};
  for (int64_t z = 0; z < members; z++) {
    part p = {.call = g, .at = gemm_offset_of(g, z)};
    for (int64_t i = 0; i < g->m; i++)
      for (int64_t j = 0; j < g->n; j += GEMM_NR)
        finish(&p, zero, 0, i, 1, j, least(g->n - j, GEMM_NR));
  }
}

eng_status ISA_NAME(gemm_packed)(const gemm_call *g)
{
  int64_t members = 1;
  for (int d = 0; d < g->batch_dims; d++) members *= g->batch[d];
  if (members == 0 || g->m == 0 || g->n == 0) return ENG_OK;
  if (g->k == 0) {
    run_empty(g, members);
    return ENG_OK;
  }
  double work = (double)g->m * (double)g->n * (double)g->k;
  int threads = work * (double)members < GEMM_SERIAL ? 1 : omp_get_max_threads();
  if (is_thin(g, members)) return run_thin(g, threads);
  bool batched = members >= threads && members > 1 && work < 32.0 * GEMM_SERIAL;
  layout l = plan(g, batched ? 1 : threads);
  if (batched && threads > members) threads = (int)members;

  int64_t room_floats =
    ceiling(l.a_floats + (batched ? l.b_floats + l.carried_floats : 0), 16) * 16;
  int64_t shared_floats = batched ? 0 : ceiling(l.b_floats + l.carried_floats, 16) * 16;
  SCRATCH(float, scratch, threads * room_floats + shared_floats);
  float *room = scratch + shared_floats;
  if (batched) run_batched(g, &l, members, threads, room, room_floats);
  else run_shared(g, &l, members, threads, scratch, scratch + l.b_floats, room, room_floats);
  return ENG_OK;
}
