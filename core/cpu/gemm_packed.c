// Our own matrix product: C [m x n] = A [m x k] B [k x n] with f32 sums, operands and result in any of
// f32, f16, bf16. Called through gemm_packed by gemm.c; owns nothing but scratch during a call.
//
// How it goes (sizes for avx512): k is cut into even pieces of at most GEMM_KC, columns into spans. For each piece
// and span, B is packed into panels of GEMM_NR = 48 columns as f32, so that widening f16 or turning a
// transposed matrix costs one pass over B, not one per use. Threads own rectangles of C. For its
// rows a thread lays A out as f32 where it is not that already, then runs the micro-kernel:
// GEMM_MR x GEMM_NR results in registers. Sums wait in f32 for the next piece of k; with the last one
// they are scaled, get bias and old C, and are rounded on their way out.
// No sum crosses a thread, so results do not depend on the number of threads; avx2 and avx512 agree
// bit for bit, the plain build rounds products and sums apart.
#include "gemm.h"

#include <omp.h>

#include "../error.h"
#include "simd.h"

// The tile of C held in registers: MR rows of NV vectors, beside NV registers for B and one for A.
#if defined(ENG_ISA_avx512)
enum { GEMM_MR = 8, GEMM_NV = 3 };
#elif defined(ENG_ISA_avx2)
enum { GEMM_MR = 6, GEMM_NV = 2 };
#else
enum { GEMM_MR = 4, GEMM_NV = 2 };
#endif
enum {
  GEMM_NR = GEMM_NV * VF_LANES,
  GEMM_KC = 384,               // steps of k at a time, at most
  GEMM_K_UNIT = 16,            // the pieces of k are multiples of this, the same on every instruction set
  GEMM_B_FLOATS = 1 << 18,     // floats of B packed at a time, at most: 1 MiB stays near the cores
  GEMM_MC = 128,               // rows of A a thread takes at a time, at most
  GEMM_SERIAL = 1 << 17,       // multiply-adds below which threads cost more than they bring
};

// ------------------------------------------------------------------ micro-kernel

// c[mr x nv*VF_LANES] (rows ldc apart) = or += a b over k steps. a: element (i, p) at i*a_row + p*a_step,
// b: a packed panel, GEMM_NR floats a step.
VF_INLINE void micro_body(const int mr, const int nv, int64_t k, const float *a, int64_t a_row, int64_t a_step,
                          const float *b, float *c, int64_t ldc, bool resume)
{
  vf sum[GEMM_MR][GEMM_NV];
#pragma GCC unroll 16
  for (int i = 0; i < mr; i++) {
#pragma GCC unroll 4
    for (int j = 0; j < nv; j++) sum[i][j] = vf_zero();
  }
  for (int64_t p = 0; p < k; p++) {
    vf row[GEMM_NV];
#pragma GCC unroll 4
    for (int j = 0; j < nv; j++) row[j] = vf_load(b + j * VF_LANES);
#pragma GCC unroll 16
    for (int i = 0; i < mr; i++) {
      vf x = vf_set1(a[i * a_row]);
#pragma GCC unroll 4
      for (int j = 0; j < nv; j++) sum[i][j] = vf_fma(x, row[j], sum[i][j]);
    }
    a += a_step;
    b += GEMM_NR;
  }
#pragma GCC unroll 16
  for (int i = 0; i < mr; i++) {
#pragma GCC unroll 4
    for (int j = 0; j < nv; j++) {
      float *at = c + i * ldc + j * VF_LANES;
      vf_store(at, resume ? vf_add(vf_load(at), sum[i][j]) : sum[i][j]);
    }
  }
}

typedef void micro_kernel(int64_t k, const float *a, int64_t a_row, int64_t a_step, const float *b, float *c, int64_t ldc, bool resume);

#define MICRO(mr, nv)                                                                                           \
  static void micro_##mr##x##nv(int64_t k, const float *a, int64_t a_row, int64_t a_step, const float *b, float *c, \
                                int64_t ldc, bool resume)                                                       \
  { micro_body(mr, nv, k, a, a_row, a_step, b, c, ldc, resume); }
#if defined(ENG_ISA_avx512)
#define MICRO_ROW(mr) MICRO(mr, 1) MICRO(mr, 2) MICRO(mr, 3)
#define MICRO_NAMES(mr) {micro_##mr##x1, micro_##mr##x2, micro_##mr##x3}
MICRO_ROW(1) MICRO_ROW(2) MICRO_ROW(3) MICRO_ROW(4) MICRO_ROW(5) MICRO_ROW(6) MICRO_ROW(7) MICRO_ROW(8)
static micro_kernel *const micro[GEMM_MR][GEMM_NV] = {
  MICRO_NAMES(1), MICRO_NAMES(2), MICRO_NAMES(3), MICRO_NAMES(4), MICRO_NAMES(5), MICRO_NAMES(6), MICRO_NAMES(7), MICRO_NAMES(8)};
#else
#define MICRO_ROW(mr) MICRO(mr, 1) MICRO(mr, 2)
#define MICRO_NAMES(mr) {micro_##mr##x1, micro_##mr##x2}
MICRO_ROW(1) MICRO_ROW(2) MICRO_ROW(3) MICRO_ROW(4)
#if defined(ENG_ISA_avx2)
MICRO_ROW(5) MICRO_ROW(6)
#endif
static micro_kernel *const micro[GEMM_MR][GEMM_NV] = {
  MICRO_NAMES(1), MICRO_NAMES(2), MICRO_NAMES(3), MICRO_NAMES(4),
#if defined(ENG_ISA_avx2)
  MICRO_NAMES(5), MICRO_NAMES(6),
#endif
};
#endif

// ------------------------------------------------------------------ reading operands

VF_INLINE float element(const void *data, int dtype, int64_t at)
{
  if (dtype == ENG_f32) return ((const float *)data)[at];
  uint16_t half = ((const uint16_t *)data)[at];
  return dtype == ENG_f16 ? f16_to_f32(half) : bf16_to_f32(half);
}

VF_INLINE vf vector(const void *data, int dtype, int64_t at, int n)
{
  if (n == VF_LANES) {
    if (dtype == ENG_f32) return vf_load((const float *)data + at);
    if (dtype == ENG_f16) return vf_load_f16((const uint16_t *)data + at);
    return vf_load_bf16((const uint16_t *)data + at);
  }
  if (dtype == ENG_f32) return vf_load_n((const float *)data + at, n);
  if (dtype == ENG_f16) return vf_load_f16_n((const uint16_t *)data + at, n);
  return vf_load_bf16_n((const uint16_t *)data + at, n);
}

VF_INLINE int least(int64_t a, int64_t b) { return (int)(a < b ? a : b); }

// Turns VF_LANES vectors, seen as a square, about its diagonal: log2(lanes) rounds in which two rows
// `step` apart exchange their odd and even groups of `step` lanes. The patterns are literals, so that
// the compiler finds shuffle instructions for them; numbers from VF_LANES on mean the second row.
#define EXCHANGE(step, low, high)                       \
  for (int i = 0; i < VF_LANES; i++) {                  \
    if (i & step) continue;                             \
    vf x = row[i], y = row[i + step];                   \
    row[i] = __builtin_shuffle(x, y, low);      \
    row[i + step] = __builtin_shuffle(x, y, high); \
  }
VF_INLINE void turn_square(vf *row)
{
#if defined(ENG_ISA_avx512)
  EXCHANGE(1, ((vi){0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30}),
              ((vi){1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31}))
  EXCHANGE(2, ((vi){0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}),
              ((vi){2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31}))
  EXCHANGE(4, ((vi){0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}),
              ((vi){4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31}))
  EXCHANGE(8, ((vi){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}),
              ((vi){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31}))
#elif defined(ENG_ISA_avx2)
  EXCHANGE(1, ((vi){0, 8, 2, 10, 4, 12, 6, 14}), ((vi){1, 9, 3, 11, 5, 13, 7, 15}))
  EXCHANGE(2, ((vi){0, 1, 8, 9, 4, 5, 12, 13}), ((vi){2, 3, 10, 11, 6, 7, 14, 15}))
  EXCHANGE(4, ((vi){0, 1, 2, 3, 8, 9, 10, 11}), ((vi){4, 5, 6, 7, 12, 13, 14, 15}))
#else
  EXCHANGE(1, ((vi){0, 4, 2, 6}), ((vi){1, 5, 3, 7}))
  EXCHANGE(2, ((vi){0, 1, 4, 5}), ((vi){2, 3, 6, 7}))
#endif
}

// to[p*to_row + j] = source[p*row + j*column] for p < rows, j < columns; `columns` up to GEMM_NR and
// padded with zeros to whole vectors. dtype is constant where this is inlined.
VF_INLINE void lay_out_typed(float *to, int64_t to_row, const void *source, const int dtype, int64_t first,
                             int64_t row, int64_t column, int64_t rows, int64_t columns)
{
  if (column == 1) {
    for (int64_t p = 0; p < rows; p++)
      for (int64_t j = 0; j < columns; j += VF_LANES)
        vf_store(to + p * to_row + j, vector(source, dtype, first + p * row + j, least(columns - j, VF_LANES)));
    return;
  }
  if (row == 1) {
    for (int64_t j = 0; j < columns; j += VF_LANES) {
      int wide = least(columns - j, VF_LANES);
      for (int64_t p = 0; p < rows; p += VF_LANES) {
        int deep = least(rows - p, VF_LANES);
        vf square[VF_LANES];
        if (wide == VF_LANES && deep == VF_LANES) {
#pragma GCC unroll 16
          for (int i = 0; i < VF_LANES; i++) square[i] = vector(source, dtype, first + p + (j + i) * column, VF_LANES);
          turn_square(square);
#pragma GCC unroll 16
          for (int i = 0; i < VF_LANES; i++) vf_store(to + (p + i) * to_row + j, square[i]);
        } else {
          for (int i = 0; i < VF_LANES; i++)
            square[i] = i < wide ? vector(source, dtype, first + p + (j + i) * column, deep) : vf_zero();
          turn_square(square);
          for (int i = 0; i < deep; i++) vf_store(to + (p + i) * to_row + j, square[i]);
        }
      }
    }
    return;
  }
  int64_t padded = (columns + VF_LANES - 1) / VF_LANES * VF_LANES;
  for (int64_t p = 0; p < rows; p++)
    for (int64_t j = 0; j < padded; j++)
      to[p * to_row + j] = j < columns ? element(source, dtype, first + p * row + j * column) : 0.0f;
}

static void lay_out(float *to, int64_t to_row, const void *source, int dtype, int64_t first, int64_t row, int64_t column,
                    int64_t rows, int64_t columns)
{
  if (dtype == ENG_f32) lay_out_typed(to, to_row, source, ENG_f32, first, row, column, rows, columns);
  else if (dtype == ENG_f16) lay_out_typed(to, to_row, source, ENG_f16, first, row, column, rows, columns);
  else lay_out_typed(to, to_row, source, ENG_bf16, first, row, column, rows, columns);
}

// ------------------------------------------------------------------ one rectangle of C

// The part of a product in work: columns [n0, n0+n) and steps [k0, k0+k) of it.
typedef struct part {
  const gemm_call *call;
  gemm_offset      at;        // of this member of the batch
  int64_t          n0, n, k0, k, panels;
  bool             last;      // k0 + k is the end
  const float     *packed;    // [panels][k][GEMM_NR]
  float           *carried;   // [m][panels * GEMM_NR] sums of earlier spans of k, NULL when there is one span
} part;

// A panel of B as f32, steps x GEMM_NR.
static void pack_panel(const part *p, int64_t panel, float *packed)
{
  const gemm_operand *b = &p->call->b;
  int64_t j = p->n0 + panel * GEMM_NR;
  lay_out(packed + panel * p->k * GEMM_NR, GEMM_NR, b->data, b->dtype, p->at.b + p->k0 * b->row + j * b->column, b->row, b->column,
          p->k, least(p->n - panel * GEMM_NR, GEMM_NR));
}

// alpha * sums + bias + beta * C, rounded into rows [i0, i0+rows), columns [j0, j0+columns).
static void finish(const part *p, const float *sums, int64_t ld, int64_t i0, int64_t rows, int64_t j0, int columns)
{
  const gemm_call *g = p->call;
  vf bias[GEMM_NV], alpha = vf_set1(g->alpha), beta = vf_set1(g->beta);
  for (int j = 0; g->bias && j < columns; j += VF_LANES) bias[j / VF_LANES] = vector(g->bias, g->bias_dtype, j0 + j, least(columns - j, VF_LANES));
  for (int64_t i = 0; i < rows; i++) {
    int64_t to = p->at.c + (i0 + i) * g->c_row + j0;
    for (int j = 0; j < columns; j += VF_LANES) {
      int n = least(columns - j, VF_LANES);
      vf x = vf_load(sums + i * ld + j);
      if (g->alpha != 1) x = vf_mul(alpha, x);
      if (g->bias) x = vf_add(x, bias[j / VF_LANES]);
      if (g->beta != 0) {
        vf old = vector(g->c, g->c_dtype, to + j, n);
        x = g->beta == 1 ? vf_add(x, old) : vf_add(x, vf_mul(beta, old));
      }
      if (g->c_dtype == ENG_f32) {
        if (n == VF_LANES) vf_store((float *)g->c + to + j, x);
        else vf_store_n((float *)g->c + to + j, x, n);
      } else if (g->c_dtype == ENG_f16) {
        if (n == VF_LANES) vf_store_f16((uint16_t *)g->c + to + j, x);
        else vf_store_f16_n((uint16_t *)g->c + to + j, x, n);
      } else {
        if (n == VF_LANES) vf_store_bf16((uint16_t *)g->c + to + j, x);
        else vf_store_bf16_n((uint16_t *)g->c + to + j, x, n);
      }
    }
  }
}

// Rows [i0, i0+rows) of panels [first, end). a_copy: room for rows x k floats and a little more,
// sums: rows x GEMM_NR.
static void multiply(const part *p, int64_t i0, int64_t rows, int64_t first, int64_t end, float *a_copy, float *sums)
{
  const gemm_call *g = p->call;
  const float *a;
  int64_t a_row, a_step, origin = p->at.a + i0 * g->a.row + p->k0 * g->a.column;
  if (g->a.dtype == ENG_f32 && g->a.column == 1) {
    a = (const float *)g->a.data + origin;
    a_row = g->a.row;
    a_step = 1;
  } else if (g->a.row == 1 && g->a.column != 1) {   // A is transposed: keep it so, [k][rows]
    a_row = 1;
    a_step = (rows + VF_LANES - 1) / VF_LANES * VF_LANES;
    lay_out(a_copy, a_step, g->a.data, g->a.dtype, origin, g->a.column, 1, p->k, rows);
    a = a_copy;
  } else {
    a_row = (p->k + VF_LANES - 1) / VF_LANES * VF_LANES + VF_LANES;   // odd in vectors: rows do not share a cache set
    a_step = 1;
    lay_out(a_copy, a_row, g->a.data, g->a.dtype, origin, g->a.row, g->a.column, rows, p->k);
    a = a_copy;
  }
  // Whole panels of f32 with nothing to add go straight into C.
  bool plain = g->c_dtype == ENG_f32 && g->alpha == 1 && g->beta == 0 && !g->bias;
  for (int64_t panel = first; panel < end; panel++) {
    int64_t j0 = p->n0 + panel * GEMM_NR;
    int columns = least(p->n - panel * GEMM_NR, GEMM_NR), vectors = (columns + VF_LANES - 1) / VF_LANES;
    bool direct = plain && columns % VF_LANES == 0;
    float *c = sums;
    int64_t ldc = GEMM_NR;
    if (direct) {
      c = (float *)g->c + p->at.c + i0 * g->c_row + j0;
      ldc = g->c_row;
    } else if (p->carried) {
      ldc = p->panels * GEMM_NR;
      c = p->carried + i0 * ldc + panel * GEMM_NR;
    }
    const float *b = p->packed + panel * p->k * GEMM_NR;
    for (int64_t i = 0; i < rows; i += GEMM_MR)
      micro[least(rows - i, GEMM_MR) - 1][vectors - 1](p->k, a + i * a_row, a_row, a_step, b, c + i * ldc, ldc, p->k0 > 0);
    if (!direct && p->last) finish(p, c, ldc, i0, rows, j0, columns);
  }
}

// ------------------------------------------------------------------ the whole product

// How a product is cut. Each thread has room for its part of A (a_floats) and a panel of results.
typedef struct layout {
  int64_t k_span, n_span;            // packed at once
  int64_t rows, row_blocks;          // rows of a rectangle, rectangles below each other
  int64_t column_groups;             // rectangles beside each other
  int64_t a_floats, sum_floats, b_floats, carried_floats;
} layout;

static int64_t ceiling(int64_t a, int64_t b) { return (a + b - 1) / b; }

static layout plan(const gemm_call *g, int threads)
{
  layout l = {0};
  // Even pieces; those of k depend on k alone, as the sums do.
  l.k_span = ceiling(ceiling(g->k, ceiling(g->k, GEMM_KC)), GEMM_K_UNIT) * GEMM_K_UNIT;
  if (l.k_span > g->k) l.k_span = g->k;
  int64_t n_most = GEMM_B_FLOATS / l.k_span / GEMM_NR * GEMM_NR;
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
  if (!(g->a.dtype == ENG_f32 && g->a.column == 1)) {
    int64_t by_rows = l.rows * (ceiling(l.k_span, VF_LANES) + 1) * VF_LANES, by_steps = ceiling(l.rows, VF_LANES) * VF_LANES * l.k_span;
    l.a_floats = by_rows > by_steps ? by_rows : by_steps;
  }
  l.sum_floats = l.rows * GEMM_NR;
  l.b_floats = panels * GEMM_NR * l.k_span;
  if (l.k_span < g->k) l.carried_floats = g->m * panels * GEMM_NR;
  return l;
}

static part part_at(const gemm_call *g, const layout *l, gemm_offset at, int64_t n0, int64_t k0, float *packed, float *carried)
{
  part p = {.call = g, .at = at, .n0 = n0, .k0 = k0, .packed = packed};
  p.n = g->n - n0 < l->n_span ? g->n - n0 : l->n_span;
  p.k = g->k - k0 < l->k_span ? g->k - k0 : l->k_span;
  p.panels = ceiling(p.n, GEMM_NR);
  p.last = k0 + p.k == g->k;
  p.carried = l->carried_floats ? carried : NULL;
  return p;
}

// Threads share one product at a time: they pack B together, then take rectangles of C.
static void run_shared(const gemm_call *g, const layout *l, int64_t members, int threads, float *packed, float *carried, float *room, int64_t room_floats)
{
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    float *a_copy = room + omp_get_thread_num() * room_floats, *sums = a_copy + l->a_floats;
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
            multiply(&p, i0, g->m - i0 < l->rows ? g->m - i0 : l->rows, first, end, a_copy, sums);
          }
        }
      }
    }
  }
}

// Every thread takes whole members of the batch.
static void run_batched(const gemm_call *g, const layout *l, int64_t members, int threads, float *room, int64_t room_floats)
{
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t z = 0; z < members; z++) {
    float *a_copy = room + omp_get_thread_num() * room_floats, *sums = a_copy + l->a_floats;
    float *packed = sums + l->sum_floats, *carried = packed + l->b_floats;
    gemm_offset at = gemm_offset_of(g, z);
    for (int64_t n0 = 0; n0 < g->n; n0 += l->n_span) {
      for (int64_t k0 = 0; k0 < g->k; k0 += l->k_span) {
        part p = part_at(g, l, at, n0, k0, packed, carried);
        for (int64_t panel = 0; panel < p.panels; panel++) pack_panel(&p, panel, packed);
        for (int64_t i0 = 0; i0 < g->m; i0 += l->rows)
          multiply(&p, i0, g->m - i0 < l->rows ? g->m - i0 : l->rows, 0, p.panels, a_copy, sums);
      }
    }
  }
}

// K = 0: the sums are zero, what is left is bias and beta * C.
static void run_empty(const gemm_call *g, int64_t members)
{
  const float zero[GEMM_NR] = {0};
  for (int64_t z = 0; z < members; z++) {
    part p = {.call = g, .at = gemm_offset_of(g, z)};
    for (int64_t i = 0; i < g->m; i++)
      for (int64_t j = 0; j < g->n; j += GEMM_NR) finish(&p, zero, 0, i, 1, j, least(g->n - j, GEMM_NR));
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
  bool batched = members >= threads && members > 1 && work < 32.0 * GEMM_SERIAL;
  layout l = plan(g, batched ? 1 : threads);
  if (batched && threads > members) threads = (int)members;

  int64_t room_floats = ceiling(l.a_floats + l.sum_floats + (batched ? l.b_floats + l.carried_floats : 0), 16) * 16;
  int64_t shared_floats = batched ? 0 : ceiling(l.b_floats + l.carried_floats, 16) * 16;
  int64_t bytes = (int64_t)sizeof(float) * (threads * room_floats + shared_floats);
  float *scratch = arena_alloc(ARENA_SCRATCH, bytes);
  if (!scratch) return ENG_ERR_MEMORY;
  float *room = scratch + shared_floats;
  if (batched) run_batched(g, &l, members, threads, room, room_floats);
  else run_shared(g, &l, members, threads, scratch, scratch + l.b_floats, room, room_floats);
  arena_free(ARENA_SCRATCH, scratch, bytes);
  return ENG_OK;
}
