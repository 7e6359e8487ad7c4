// Fused attention and its gradient on the CPU: q [B x T x H x D], k and v [B x S x G x D], in f32,
// f16 or bf16 with any strides. Arithmetic is f32, except where pairs of bf16 are multiplied.
// Called through the kernel table; owns nothing but scratch during a call.
//
// A task is a range of the queries that read one (batch, key head). It packs K and V once as panels
// (gemm_micro.h), then processes ROWS queries at a time. Scores, softmax and the product with V
// cover whole rows of keys, so partial sums need no rescaling. Scores take ROWS x S floats per
// thread, never T x S. Tiles of the micro-kernel that the causal mask hides completely are skipped.
// The backward pass recomputes the probabilities from the saved lse. It also computes the sum of
// p * dp itself instead of deriving it from y, which may have been rounded to 16 bits.
//
// If the processor multiplies pairs of bf16 at full speed (gemm_pairs.h) and all operands are bf16,
// the operands are multiplied unscaled, and scores, dq and dk are scaled afterwards. Probabilities
// and gradients of scores are rounded to bf16 before they enter a product, as in the CUDA kernels.
// The sum of the probabilities, lse and entropy use the unrounded probabilities. All sums are f32.
//
// Edge cases: a query without visible keys has y = 0, lse = -inf and entropy 0, and gives no
// gradient to k and v. If a query's largest score is infinite, or one of its scores is NaN, its row
// of y and its lse are NaN. A key that the causal mask hides never affects a query, not even as
// 0 * NaN, because tiles with a non-finite number are processed row by row. Results do not depend
// on the number of threads: rows are independent, and the order of a sum over queries depends only
// on the shape and on which tiles have non-finite numbers.
#include <omp.h>

#include "device/backend.h"
#include "gemm_pairs.h"
#include "simd.h"

enum {
  ROWS = 8 * GEMM_MR,     // queries that a task processes at a time
  // In a product with V (or K), one call of the micro-kernel sums over at most STEPS keys or pairs
  // of keys, so that the part of a panel that it reads stays in cache.
  STEPS = 384,
  FEW_TASKS = 16,         // the backward pass splits the queries until there are this many tasks
};

typedef struct sizes {
  int64_t batch, queries, keys, heads, groups, width;   // B, T, S, H, G, D: see the top
  int64_t shared;         // heads that share a key head: H / G
  int64_t padded;         // width rounded up to whole vectors
  // A matrix [steps x width] is cut into panels of `span` columns. They are equally wide, because
  // for a width of 64, two panels of 32 columns run faster than one of 48 and one of 16.
  int64_t span;
  int64_t key_row;        // row stride of a tile of scores, in floats; more than S
  int64_t tiles;          // tiles of ROWS queries in one head
  float   factor;         // scales scores and their gradients
  // `factor` split in two: q is multiplied by `early` before the product, scores by `late` after
  // it. One of the two is 1.
  float   early, late;
  bool    causal, pairs;  // pairs: operands are multiplied as pairs of bf16
} sizes;

static int64_t whole_vectors(int64_t n) { return ceiling(n, VF_LANES) * VF_LANES; }

static sizes sizes_of(const op_call *call)
{
  const tensor *q = call->in[0], *k = call->in[1];
  sizes s = {.batch = q->shape[0], .queries = q->shape[1], .heads = q->shape[2],
             .width = q->shape[3]};
  s.keys = k->shape[1];
  s.groups = k->shape[2];
  s.shared = s.heads / s.groups;
  s.padded = whole_vectors(s.width);
  s.span = whole_vectors(ceiling(s.padded, ceiling(s.padded, GEMM_NR)));
  s.key_row = whole_vectors(s.keys) + VF_LANES;
  s.tiles = ceiling(s.queries, ROWS);
  double scale = call->attention.scale;
  s.factor = (float)(scale == 0 ? 1.0 / sqrt((double)s.width) : scale);
  s.causal = call->attention.causal != 0;
  s.pairs = pairs_of(q->dtype, k->dtype) && pairs_of(q->dtype, call->in[2]->dtype) &&
            (call->n_in < 6 || pairs_of(q->dtype, call->in[5]->dtype));
  s.early = s.pairs ? 1 : s.factor;
  s.late = s.pairs ? s.factor : 1;
  return s;
}

// Returns the number of keys that query t attends to. They are always the first keys.
static int64_t seen_by(const sizes *s, int64_t t)
{
  if (!s->causal) return s->keys;
  int64_t n = t + s->keys - s->queries + 1;
  return n < 0 ? 0 : n;
}

// Returns how many floats a matrix [steps x columns] takes when packed as panels of `span` columns.
static int64_t panel_floats(int64_t steps, int64_t columns, int64_t span)
{ return ceiling(columns, span) * GEMM_NR * steps; }

// ------------------------------------------------------------------ packing

// One head of one sequence in a tensor [B x time x heads x D]. The index of element (t, d) is
// `first` + t*row + d*column.
typedef struct slice {
  const void *data;
  int         dtype;
  int64_t     first, row, column;
} slice;

static slice slice_of(const tensor *x, int64_t b, int64_t head)
{
  return (slice){x->data, x->dtype, b * x->stride[0] + head * x->stride[2], x->stride[1],
                 x->stride[3]};
}

// Packs the transpose of a slice, [width x times], as panels whose columns are time steps.
static void pack_turned(float *to, const sizes *s, slice x, int64_t times)
{
  for (int64_t t = 0; t < times; t += GEMM_NR)
    lay_out_steps(s->pairs, to + t * steps_of(s->pairs, s->width), GEMM_NR, x.data, x.dtype,
                  x.first + t * x.row, x.column, x.row, s->width, least(times - t, GEMM_NR));
}

// Packs time steps [first, first+n) of a slice [times x width] as panels, each of `span` columns.
// `first` is even, because with pairs a word of a panel holds two time steps.
static void pack_part(float *to, const sizes *s, slice x, int64_t times, int64_t first, int64_t n)
{
  to += steps_of(s->pairs, first) * GEMM_NR;
  for (int64_t d = 0; d < s->width; d += s->span, to += steps_of(s->pairs, times) * GEMM_NR)
    lay_out_steps(s->pairs, to, GEMM_NR, x.data, x.dtype, x.first + first * x.row + d * x.column,
                  x.row, x.column, n, least(s->width - d, s->span));
}

static void pack(float *to, const sizes *s, slice x, int64_t times)
{ pack_part(to, s, x, times, 0, times); }

// Copies rows [t0, t0+rows) of a slice to `to`, where they are s->padded floats apart. Multiplies
// them by `factor`, which is 1 for pairs of bf16.
static void pack_rows(float *to, const sizes *s, slice x, int64_t t0, int64_t rows, float factor)
{
  lay_out_rows(s->pairs, to, s->padded, x.data, x.dtype, x.first + t0 * x.row, x.row, x.column,
               rows, s->width);
  if (factor == 1) return;
  for (int64_t i = 0; i < rows * s->padded; i += VF_LANES)
    vf_store(to + i, vf_mul(vf_load(to + i), vf_set1(factor)));
}

// Packs queries [t0, t0+n) of x as panels, each of `span` columns. Without pairs, takes them from
// `rows`, where pack_rows has put them.
static void pack_queries(float *to, const sizes *s, slice x, const float *rows, int64_t t0,
                         int64_t n)
{
  x.first += t0 * x.row;
  if (!s->pairs) x = (slice){rows, ENG_f32, 0, s->padded, 1};
  pack(to, s, x, n);
}

static bool all_finite(const float *x, int64_t n, bool pairs)
{
  const vi infinite = vi_set1(0x7F800000);
  vi most = vi_set1(0);
  for (int64_t i = 0; i < n; i += VF_LANES) {
    vi bits = vf_bits(vf_load(x + i)), exponent = vi_and(bits, infinite),
       low = vi_and(vi_shl(bits, 16), infinite);
    most = vi_select(vi_gt(exponent, most), exponent, most);
    if (pairs) most = vi_select(vi_gt(low, most), low, most);
  }
  return !vm_any(vi_eq(most, infinite));
}

// Returns whether all panels of a matrix [steps x width] hold only finite numbers.
static bool panels_finite(const float *panels, const sizes *s, int64_t steps)
{
  for (int64_t d = 0; d < s->padded; d += s->span, panels += steps * GEMM_NR)
    for (int64_t p = 0; p < steps; p++)
      if (!all_finite(panels + p * GEMM_NR, least(s->padded - d, s->span), s->pairs)) return false;
  return true;
}

// ------------------------------------------------------------------ products of tiles

// Computes scores [rows x visible keys] = a [rows x width] times the panels [width x keys] that
// pack_turned packed.
static void scores_of(float *scores, const sizes *s, const float *a, const float *panels,
                      int64_t t0, int64_t rows)
{
  int64_t last = seen_by(s, t0 + rows - 1), steps = steps_of(s->pairs, s->width);
  for (int64_t key = 0; key < last; key += GEMM_NR) {
    for (int64_t i = 0; i < rows; i += GEMM_MR) {
      int n = least(rows - i, GEMM_MR);
      int64_t columns = seen_by(s, t0 + i + n - 1) - key;
      if (columns <= 0) continue;
      micro_kernel *kernel = kernel_of(s->pairs, n, ceiling(least(columns, GEMM_NR), VF_LANES));
      kernel(steps, a + i * s->padded, s->padded, 1, panels + key * steps,
             scores + i * s->key_row + key, s->key_row, false);
    }
  }
}

// Computes `to` [rows x width] = p [rows x visible keys] times `panels` [keys x width], which were
// packed from `from`. Operands that are not finite come one row at a time. So if `rows` is 1, the
// product must not include a hidden key, because 0 * NaN is NaN. With `pairs`, the first hidden key
// may share a word of the panel with the last visible key. It is then removed from the panel during
// the product and restored afterwards.
static void weighted_sums(float *to, const sizes *s, const float *p, float *panels, slice from,
                          int64_t t0, int64_t rows)
{
  int64_t first = seen_by(s, t0), all = steps_of(s->pairs, s->keys);
  bool alone = s->pairs && rows == 1 && first % 2 == 1 && first < s->keys;
  if (alone) pack_part(panels, s, from, s->keys, first - 1, 1);
  const float *panel = panels;
  for (int64_t d = 0; d < s->padded; d += s->span, panel += all * GEMM_NR) {
    int vectors = least(s->padded - d, s->span) / VF_LANES;
    for (int64_t k = 0; k == 0 || k < all; k += STEPS) {
      for (int64_t i = 0; i < rows; i += GEMM_MR) {
        int n = least(rows - i, GEMM_MR);
        int64_t steps = steps_of(s->pairs, seen_by(s, t0 + i + n - 1)) - k;
        if (steps <= 0 && k > 0) continue;   // at k = 0 the kernel must at least clear `to`
        kernel_of(s->pairs, n, vectors)(least(steps, STEPS), p + i * s->key_row + k, s->key_row, 1,
                                        panel + k * GEMM_NR, to + i * s->padded + d, s->padded,
                                        k > 0);
      }
    }
  }
  if (alone) pack_part(panels, s, from, s->keys, first - 1, 2);
}

// Adds p^T times panels [rows x width] to `to` [keys x width], for the keys that are visible to
// queries [t0, t0+rows). With `pairs`, each word of p packs the bf16 values of two queries and is
// stored in the row of the first query.
static void add_turned(float *to, const sizes *s, const float *p, const float *panels, int64_t t0,
                       int64_t rows)
{
  int64_t last = seen_by(s, t0 + rows - 1), steps = steps_of(s->pairs, rows),
          each = s->pairs ? 2 : 1, apart = each * s->key_row;
  for (int64_t d = 0; d < s->padded; d += s->span, panels += steps * GEMM_NR) {
    int vectors = least(s->padded - d, s->span) / VF_LANES;
    for (int64_t key = 0; key < last; key += GEMM_MR) {
      // The first row, or pair of rows, to which this key is visible.
      int64_t from = s->causal ? key - (s->keys - s->queries) - t0 : 0;
      from = from < 0 ? 0 : from / each;
      kernel_of(s->pairs, least(last - key, GEMM_MR), vectors)(
        steps - from, p + from * apart + key, 1, apart, panels + from * GEMM_NR,
        to + key * s->padded + d, s->padded, true);
    }
  }
}

// ------------------------------------------------------------------ operands in bf16

// Rounds p and ds [rows x last] of the backward pass to bf16. `last` is the number of keys that the
// last query attends to. A word of p packs two queries and is stored in the row of the first query.
// A word of ds packs two keys. ds_turned receives ds packed like p.
static void round_gradients(const sizes *s, float *p, float *ds, float *ds_turned, int64_t rows,
                            int64_t last)
{
#if defined(ENG_ISA_avx512)
  for (int64_t i = 0; i < rows; i += 2) {
    int64_t at = i * s->key_row, next = at + s->key_row;
    bool two = i + 1 < rows;
    words_across(p + at, p + at, two ? p + next : NULL, last);
    words_across(ds_turned + at, ds + at, two ? ds + next : NULL, last);
    words_along(ds + at, ds + at, last);
    if (two) words_along(ds + next, ds + next, last);
  }
#else
  (void)s, (void)p, (void)ds, (void)ds_turned, (void)rows, (void)last;
#endif
}

// ------------------------------------------------------------------ forward

// Returns exp(scale * x - shift) in the first n lanes and 0 in the other lanes. Stores the argument
// of exp in *difference. The product is rounded before the subtraction, because the shift was found
// from rounded products. With a fused multiply-subtract, a huge score could differ from the shift
// so much that exp would overflow. The other lanes compute exp(0), and their results are then
// replaced by 0. exp(-inf) would give 0 directly, but an underflow costs a hundred cycles, and with
// a causal mask most rows have such lanes.
VF_INLINE vf exp_first(vf *difference, const float *x, float scale, float shift, int n)
{
  vf shifted = vf_sub(vf_mul(vf_load_n(x, n), vf_set1(scale)), vf_set1(shift));
  *difference = vf_padded(shifted, n, vf_zero());
  return vf_padded(vf_exp_low(*difference), n, vf_zero());
}

VF_INLINE vf entropy_part(vf e, vf x)
{ return vf_select(vf_eq(e, vf_zero()), vf_zero(), vf_mul(e, x)); }

// Replaces n > 0 scores by exp(scale * score - max), padded with zeros to a whole vector, and
// returns the sum of the results. `max` is the largest scaled score, ignoring NaN. Stores the lse
// in *lse. Stores in *extra what `which` requests: the entropy, `max` or, if it is 0, nothing.
VF_INLINE float softmax_row(float *row, int64_t n, float scale, float *lse, float *extra,
                            const int which)
{
  const bool with_entropy = which == ENG_ROW_ENTROPY;
  vf top = vf_set1(-INFINITY), x;
  FOR_VECTORS(j, n, {
    vf scaled = vf_mul(vf_load_n(row + j, lanes), vf_set1(scale));
    top = vf_max(vf_padded(scaled, lanes, vf_set1(-INFINITY)), top);
  });
  float max = vf_maxall(top);
  if (which == ENG_ROW_LOGIT_MAX) *extra = max;
  if (max == -INFINITY) max = 0;   // so that exp(-inf - max) is 0, not NaN
  vf sum = vf_zero(), weighted = vf_zero();
  FOR_VECTORS(j, n, {
    vf e = exp_first(&x, row + j, scale, max, lanes);
    vf_store(row + j, e);
    sum = vf_add(sum, e);
    if (with_entropy) weighted = vf_add(weighted, entropy_part(e, x));
  });
  float total = vf_sum(sum);
  *lse = total == 0 ? NAN : max + logf(total);
  if (with_entropy) *extra = total == 0 ? NAN : logf(total) - vf_sum(weighted) / total;
  return total;
}

// The buffers of one thread in the forward pass, and their total size in floats.
typedef struct forward_room { float *turned_k, *v, *q, *scores, *y; int64_t floats; } forward_room;

// Returns the next `floats` floats of `room` and adds `floats` to *taken. If `room` is NULL, only
// counts and returns NULL.
static float *take(int64_t *taken, float *room, int64_t floats)
{
  float *piece = room ? room + *taken : NULL;
  *taken += floats;
  return piece;
}

static forward_room forward_room_at(const sizes *s, float *room)
{
  forward_room r = {.floats = 0};
  r.turned_k = take(&r.floats, room, panel_floats(s->width, s->keys, GEMM_NR));
  r.v = take(&r.floats, room, panel_floats(s->keys, s->width, s->span));
  r.q = take(&r.floats, room, ROWS * s->padded);
  r.scores = take(&r.floats, room, ROWS * s->key_row);
  r.y = take(&r.floats, room, ROWS * s->padded);
  return r;
}

static void forward_tile(const op_call *call, const sizes *s, const forward_room *r, int64_t b,
                         int64_t head, int64_t t0, int64_t rows)
{
  const tensor *y = call->out[0];
  float *lse = call->out[1] ? (float *)call->out[1]->data : NULL;
  const int which = call->out[2] ? (int)call->attention.entropy : 0;
  float *extra = which ? (float *)call->out[2]->data : NULL;
  pack_rows(r->q, s, slice_of(call->in[0], b, head), t0, rows, s->early);
  scores_of(r->scores, s, r->q, r->turned_k, t0, rows);
  float sums[ROWS];
  int64_t last = seen_by(s, t0 + rows - 1), line = (b * s->heads + head) * s->queries + t0;
  for (int64_t i = 0; i < rows; i++) {
    float *row = r->scores + i * s->key_row, row_lse = -INFINITY;
    float row_extra = which == ENG_ROW_LOGIT_MAX ? -INFINITY : 0;
    int64_t n = seen_by(s, t0 + i);
    sums[i] = 1;
    if (n && which == ENG_ROW_ENTROPY)
      sums[i] = softmax_row(row, n, s->late, &row_lse, &row_extra, ENG_ROW_ENTROPY);
    else if (n && which)
      sums[i] = softmax_row(row, n, s->late, &row_lse, &row_extra, ENG_ROW_LOGIT_MAX);
    else if (n) sums[i] = softmax_row(row, n, s->late, &row_lse, NULL, 0);
    for (int64_t j = whole_vectors(n); j < last; j += VF_LANES) vf_store(row + j, vf_zero());
#if defined(ENG_ISA_avx512)   // no other build multiplies pairs
    if (s->pairs) words_along(row, row, last);   // rounds to bf16; a word packs two keys
#endif
    if (lse) lse[line + i] = row_lse;
    if (extra) extra[line + i] = row_extra;
  }
  weighted_sums(r->y, s, r->scores, r->v, slice_of(call->in[2], b, head / s->shared), t0, rows);
  for (int64_t i = 0; i < rows; i++) {
    float *row = r->y + i * s->padded;
    for (int64_t d = 0; d < s->padded; d += VF_LANES)
      vf_store(row + d, vf_div(vf_load(row + d), vf_set1(sums[i])));
    floats_to(y->data, y->dtype, ((b * s->queries + t0 + i) * s->heads + head) * s->width, row,
              s->width);
  }
}

// If D is 0, lse still has elements, which the reference kernel computes.
static bool fast_call(const op_call *call) { return all_fast(call) && call->in[0]->shape[3] > 0; }

KERNEL(attention)
{
  if (!fast_call(call)) return forward_to_reference(call);
  sizes s = sizes_of(call);
  int64_t pairs = s.batch * s.groups, units = s.shared * s.tiles;
  double work =
    (double)s.batch * (double)s.heads * (double)s.queries * (double)s.keys * (double)s.width;
  int threads = work < 1 << 16 ? 1 : omp_get_max_threads();
  int64_t shares = pairs >= 2 * threads ? 1 : ceiling(2 * threads, pairs);
  if (shares > units) shares = units;
  if (threads > pairs * shares) threads = (int)(pairs * shares);
  int64_t floats = padded(forward_room_at(&s, NULL).floats);
  SCRATCH(float, scratch, threads * floats);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t task = 0; task < pairs * shares; task++) {
    int64_t pair = task / shares, share = task % shares, b = pair / s.groups,
            group = pair % s.groups;
    forward_room r = forward_room_at(&s, scratch + omp_get_thread_num() * floats);
    pack_turned(r.turned_k, &s, slice_of(call->in[1], b, group), s.keys);
    pack(r.v, &s, slice_of(call->in[2], b, group), s.keys);
    int64_t at_once = s.causal && !panels_finite(r.v, &s, steps_of(s.pairs, s.keys)) ? 1 : ROWS;
    for (int64_t unit = share * units / shares; unit < (share + 1) * units / shares; unit++) {
      int64_t head = group * s.shared + unit / s.tiles;
      int64_t first = unit % s.tiles * ROWS, end = first + least(s.queries - first, ROWS);
      for (int64_t t = first; t < end; t += at_once)
        forward_tile(call, &s, &r, b, head, t, least(end - t, at_once));
    }
  }
  return ENG_OK;
}

// ------------------------------------------------------------------ backward

typedef struct backward_room {
  float *turned_k, *turned_v, *k;                  // panels of the key head
  float *q, *dy, *q_panels, *dy_panels;           // the current queries; q is multiplied by `early`
  float *p, *ds, *dq;
  // Used with pairs: ds in words that pack two queries. A word of `ds` itself packs two keys.
  float *ds_turned;
  int64_t floats;                                  // total size of the buffers
} backward_room;

static backward_room backward_room_at(const sizes *s, float *room)
{
  backward_room r = {.floats = 0};
  r.turned_k = take(&r.floats, room, panel_floats(s->width, s->keys, GEMM_NR));
  r.turned_v = take(&r.floats, room, panel_floats(s->width, s->keys, GEMM_NR));
  r.k = take(&r.floats, room, panel_floats(s->keys, s->width, s->span));
  r.q = take(&r.floats, room, ROWS * s->padded);
  r.dy = take(&r.floats, room, ROWS * s->padded);
  r.dq = take(&r.floats, room, ROWS * s->padded);
  r.q_panels = take(&r.floats, room, panel_floats(ROWS, s->width, s->span));
  r.dy_panels = take(&r.floats, room, panel_floats(ROWS, s->width, s->span));
  r.p = take(&r.floats, room, ROWS * s->key_row);
  r.ds = take(&r.floats, room, ROWS * s->key_row);
  // With pairs, a word of p packs two queries and is stored in the row of the first query, so the
  // second row of each pair is free for ds_turned.
  r.ds_turned = room ? r.p + s->key_row : NULL;
  return r;
}

// Replaces the n scores in p by the probabilities exp(scale * score - lse). In ds, replaces dp, the
// gradients of the probabilities, by the gradients of the scaled scores, p * (dp - sum of p * dp).
// Pads both with zeros to a whole vector.
static void gradient_row(float *p, float *ds, int64_t n, float scale, float lse)
{
  vf sum = vf_zero(), x;
  FOR_VECTORS(j, n, {
    vf e = exp_first(&x, p + j, scale, lse, lanes);
    vf_store(p + j, e);
    sum = vf_fma(e, vf_load_n(ds + j, lanes), sum);
  });
  vf total = vf_set1(vf_sum(sum));
  FOR_VECTORS(j, n, {
    x = vf_mul(vf_load_n(p + j, lanes), vf_sub(vf_load_n(ds + j, lanes), total));
    vf_store(ds + j, vf_padded(x, lanes, vf_zero()));   // lanes past n may hold 0 * NaN
  });
}

// Adds the contribution of queries [t0, t0+rows) to dk and dv [S x padded], and stores the dq of
// these queries.
static void backward_tile(const op_call *call, const sizes *s, const backward_room *r, float *dk,
                          float *dv, bool keys_finite, int64_t b, int64_t head, int64_t t0,
                          int64_t rows)
{
  const tensor *lse = call->in[4], *dq = call->out[0];
  slice q = slice_of(call->in[0], b, head), dy = slice_of(call->in[5], b, head);
  pack_rows(r->q, s, q, t0, rows, s->early);
  pack_rows(r->dy, s, dy, t0, rows, 1);
  pack_queries(r->q_panels, s, q, r->q, t0, rows);
  pack_queries(r->dy_panels, s, dy, r->dy, t0, rows);
  int64_t steps = steps_of(s->pairs, rows);
  bool finite =
    keys_finite && panels_finite(r->q_panels, s, steps) && panels_finite(r->dy_panels, s, steps);
  if (rows > 1 && s->causal && !finite) {
    for (int64_t i = 0; i < rows; i++)
      backward_tile(call, s, r, dk, dv, keys_finite, b, head, t0 + i, 1);
    return;
  }
  scores_of(r->p, s, r->q, r->turned_k, t0, rows);
  scores_of(r->ds, s, r->dy, r->turned_v, t0, rows);
  int64_t last = seen_by(s, t0 + rows - 1);
  for (int64_t i = 0; i < rows; i++) {
    float *p = r->p + i * s->key_row, *ds = r->ds + i * s->key_row;
    int64_t n = seen_by(s, t0 + i),
            line = b * lse->stride[0] + head * lse->stride[1] + (t0 + i) * lse->stride[2];
    gradient_row(p, ds, n, s->late, ((const float *)lse->data)[line]);
    for (int64_t j = whole_vectors(n); j < last; j += VF_LANES) {
      vf_store(p + j, vf_zero());
      vf_store(ds + j, vf_zero());
    }
  }
  if (s->pairs) round_gradients(s, r->p, r->ds, r->ds_turned, rows, last);
  add_turned(dv, s, r->p, r->dy_panels, t0, rows);
  add_turned(dk, s, s->pairs ? r->ds_turned : r->ds, r->q_panels, t0, rows);
  if (!dq) return;
  weighted_sums(r->dq, s, r->ds, r->k, slice_of(call->in[1], b, head / s->shared), t0, rows);
  for (int64_t i = 0; i < rows; i++) {
    float *row = r->dq + i * s->padded;
    for (int64_t d = 0; d < s->padded; d += VF_LANES)
      vf_store(row + d, vf_mul(vf_load(row + d), vf_set1(s->factor)));
    floats_to(dq->data, dq->dtype,
              b * dq->stride[0] + (t0 + i) * dq->stride[1] + head * dq->stride[2], row, s->width);
  }
}

// Adds up the sums of all shares of a key head in order, multiplies the total by `factor` and
// rounds it into d [B x S x G x D]. A share is a part of the queries that read the key head. `sums`
// [S x padded] holds the sums of the first share. The sums of each further share begin `step`
// floats after those of the previous share.
static void store_keys(const tensor *d, const sizes *s, float *sums, int64_t shares, int64_t step,
                       float factor, int64_t b, int64_t group)
{
  if (!d) return;
  for (int64_t t = 0; t < s->keys; t++) {
    float *row = sums + t * s->padded;
    for (int64_t share = 1; share < shares; share++)
      for (int64_t j = 0; j < s->padded; j += VF_LANES)
        vf_store(row + j, vf_add(vf_load(row + j), vf_load(row + share * step + j)));
    for (int64_t j = 0; factor != 1 && j < s->padded; j += VF_LANES)
      vf_store(row + j, vf_mul(vf_load(row + j), vf_set1(factor)));
    floats_to(d->data, d->dtype, b * d->stride[0] + t * d->stride[1] + group * d->stride[2], row,
              s->width);
  }
}

KERNEL(attention_grad)
{
  if (!fast_call(call)) return forward_to_reference(call);
  sizes s = sizes_of(call);
  int64_t pairs = s.batch * s.groups, units = s.shared * s.tiles;
  // The number of shares decides the order of the sums, so it must depend on the shape, not on the
  // number of threads.
  int64_t shares = pairs >= FEW_TASKS ? 1 : ceiling(FEW_TASKS, pairs);
  if (shares > units) shares = units > 0 ? units : 1;
  double work =
    (double)s.batch * (double)s.heads * (double)s.queries * (double)s.keys * (double)s.width;
  int threads = work < 1 << 15 ? 1 : omp_get_max_threads();
  if (threads > pairs * shares) threads = (int)(pairs * shares);
  int64_t floats = padded(backward_room_at(&s, NULL).floats), key_floats = s.keys * s.padded;
  int64_t held = shares > 1 ? pairs * shares : threads;   // how many sums of dk (and of dv) exist
  SCRATCH(float, scratch, threads * floats + held * 2 * key_floats);
  float *sums = scratch + threads * floats;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    int thread = omp_get_thread_num();
    backward_room r = backward_room_at(&s, scratch + thread * floats);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < pairs * shares; task++) {
      int64_t pair = task / shares, share = task % shares, b = pair / s.groups,
              group = pair % s.groups;
      float *dk = sums + (shares > 1 ? task : thread) * 2 * key_floats, *dv = dk + key_floats;
      memset(dk, 0, (size_t)(2 * key_floats) * sizeof(float));
      pack_turned(r.turned_k, &s, slice_of(call->in[1], b, group), s.keys);
      pack_turned(r.turned_v, &s, slice_of(call->in[2], b, group), s.keys);
      pack(r.k, &s, slice_of(call->in[1], b, group), s.keys);
      bool finite = panels_finite(r.k, &s, steps_of(s.pairs, s.keys));
      for (int64_t unit = share * units / shares; unit < (share + 1) * units / shares; unit++) {
        int64_t t0 = unit % s.tiles * ROWS;
        int64_t head = group * s.shared + unit / s.tiles;
        backward_tile(call, &s, &r, dk, dv, finite, b, head, t0, least(s.queries - t0, ROWS));
      }
      if (shares == 1) {
        store_keys(call->out[1], &s, dk, 1, 0, s.late, b, group);
        store_keys(call->out[2], &s, dv, 1, 0, 1, b, group);
      }
    }
    if (shares > 1) {
#pragma omp for schedule(static)
      for (int64_t pair = 0; pair < pairs; pair++) {
        float *dk = sums + pair * shares * 2 * key_floats;
        store_keys(call->out[1], &s, dk, shares, 2 * key_floats, s.late, pair / s.groups,
                   pair % s.groups);
        store_keys(call->out[2], &s, dk + key_floats, shares, 2 * key_floats, 1, pair / s.groups,
                   pair % s.groups);
      }
    }
  }
  return ENG_OK;
}
