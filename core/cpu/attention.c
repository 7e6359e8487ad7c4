// Fused attention and its gradient on the CPU: q [B x T x H x D], k and v [B x S x G x D], in f32, f16 or bf16
// with any strides; everything inside is f32. Called through the kernel table; owns nothing but
// scratch during a call.
//
// How it goes: a task is a share of the queries of one (batch, key head). It lays K and V out once as
// packed f32 panels, then takes ROWS queries at a time: scores, softmax and the product with V for
// whole rows of keys, so nothing is rescaled. Memory is ROWS x S floats a thread, never T x S. Parts that
// the causal mask hides are skipped in steps of a micro-kernel tile.
// The backward pass forms the probabilities again from the saved lse, and sums p * dp itself rather
// than taking it from y, which may have been rounded to 16 bits.
//
// Decided here: a row that sees no key has y = 0, lse = -inf, entropy 0 and passes no gradient on. An
// infinite largest score or a NaN makes its row NaN. A key after the query never touches it, not even
// as 0 * NaN: tiles that hold a non-finite number are worked through row by row.
// Results do not depend on the number of threads: rows are independent, and sums over queries have an
// order given by the shape alone.
#include <omp.h>

#include "../backend.h"
#include "../error.h"
#include "gemm_micro.h"
#include "simd.h"

enum {
  ROWS = 8 * GEMM_MR,     // queries at a time
  STEPS = 384,            // keys summed in one go by the product with V (and K): the panel stays near the core
  FEW_TASKS = 16,         // the backward pass cuts queries into shares until there are this many
};

typedef struct sizes {
  int64_t batch, queries, keys, heads, groups, width;   // B T S H G D
  int64_t shared;         // heads that share a key head: H / G
  int64_t padded;         // width in whole vectors
  int64_t span;           // columns of a panel of width: even parts, as 64 = 2 x 32 runs better than 48 + 16
  int64_t key_row;        // floats from query to query in a tile of scores, > S
  int64_t tiles;          // of ROWS queries, in one head
  float   factor;
  bool    causal;
} sizes;

static int64_t ceiling(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t whole_vectors(int64_t n)      { return ceiling(n, VF_LANES) * VF_LANES; }

static sizes sizes_of(const op_call *call)
{
  const tensor *q = call->in[0], *k = call->in[1];
  sizes s = {.batch = q->shape[0], .queries = q->shape[1], .heads = q->shape[2], .width = q->shape[3]};
  s.keys = k->shape[1];
  s.groups = k->shape[2];
  s.shared = s.heads / s.groups;
  s.padded = whole_vectors(s.width);
  s.span = whole_vectors(ceiling(s.padded, ceiling(s.padded, GEMM_NR)));
  s.key_row = whole_vectors(s.keys) + VF_LANES;
  s.tiles = ceiling(s.queries, ROWS);
  s.factor = call->floats[0] == 0 ? (float)(1.0 / sqrt((double)s.width)) : (float)call->floats[0];
  s.causal = call->ints[0] != 0;
  return s;
}

// Keys that query t sees: the first so many.
static int64_t seen_by(const sizes *s, int64_t t)
{
  if (!s->causal) return s->keys;
  int64_t n = t + s->keys - s->queries + 1;
  return n < 0 ? 0 : n;
}

// Floats that a matrix [steps x columns] takes as panels that use `span` columns each.
static int64_t panel_floats(int64_t steps, int64_t columns, int64_t span)
{
  return ceiling(columns, span) * GEMM_NR * steps;
}

// ------------------------------------------------------------------ laying out

// One head of a tensor [B x time x heads x D]; element (t, d) is `first` + t*row + d*column.
typedef struct slice {
  const void *data;
  int         dtype;
  int64_t     first, row, column;
} slice;

static slice slice_of(const tensor *x, int64_t b, int64_t head)
{
  return (slice){x->data, x->dtype, b * x->stride[0] + head * x->stride[2], x->stride[1], x->stride[3]};
}

// [width x times] as panels of times: the transpose.
static void pack_turned(float *to, slice x, int64_t times, int64_t width)
{
  for (int64_t t = 0; t < times; t += GEMM_NR)
    lay_out(to + t * width, GEMM_NR, x.data, x.dtype, x.first + t * x.row, x.column, x.row, width,
            least(times - t, GEMM_NR));
}

// [times x width] as panels of width.
static void pack(float *to, const sizes *s, slice x, int64_t times)
{
  for (int64_t d = 0; d < s->width; d += s->span, to += times * GEMM_NR)
    lay_out(to, GEMM_NR, x.data, x.dtype, x.first + d * x.column, x.row, x.column, times, least(s->width - d, s->span));
}

// [rows x width] row by row, `padded` floats apart, times factor.
static void pack_rows(float *to, const sizes *s, slice x, int64_t t0, int64_t rows, float factor)
{
  lay_out(to, s->padded, x.data, x.dtype, x.first + t0 * x.row, x.row, x.column, rows, s->width);
  if (factor == 1) return;
  for (int64_t i = 0; i < rows * s->padded; i += VF_LANES) vf_store(to + i, vf_mul(vf_load(to + i), vf_set1(factor)));
}

// The panels of what pack_rows laid out.
static void panels_of_rows(float *to, const sizes *s, const float *rows, int64_t n)
{
  for (int64_t d = 0; d < s->padded; d += s->span, to += n * GEMM_NR)
    for (int64_t i = 0; i < n; i++)
      for (int64_t j = d; j < s->padded && j < d + s->span; j += VF_LANES)
        vf_store(to + i * GEMM_NR + j - d, vf_load(rows + i * s->padded + j));
}

static bool all_finite(const float *x, int64_t n)
{
  vi most = vi_set1(0);
  for (int64_t i = 0; i < n; i += VF_LANES) {
    vi exponent = vi_and(vf_bits(vf_load(x + i)), vi_set1(0x7F800000));
    most = vi_select(vi_gt(exponent, most), exponent, most);
  }
  return !vm_any(vi_eq(most, vi_set1(0x7F800000)));
}

// Of panels of width.
static bool panels_finite(const float *panels, const sizes *s, int64_t steps)
{
  for (int64_t d = 0; d < s->padded; d += s->span, panels += steps * GEMM_NR)
    for (int64_t p = 0; p < steps; p++)
      if (!all_finite(panels + p * GEMM_NR, least(s->padded - d, s->span))) return false;
  return true;
}

// ------------------------------------------------------------------ products of tiles

// scores [rows x seen keys] = a [rows x width] times turned panels [width x keys].
static void scores_of(float *scores, const sizes *s, const float *a, const float *panels, int64_t t0, int64_t rows)
{
  int64_t last = seen_by(s, t0 + rows - 1);
  for (int64_t key = 0; key < last; key += GEMM_NR) {
    for (int64_t i = 0; i < rows; i += GEMM_MR) {
      int n = least(rows - i, GEMM_MR);
      int64_t columns = seen_by(s, t0 + i + n - 1) - key;
      if (columns <= 0) continue;
      micro_kernel *kernel = micro[n - 1][ceiling(least(columns, GEMM_NR), VF_LANES) - 1];
      kernel(s->width, a + i * s->padded, s->padded, 1, panels + key * s->width, scores + i * s->key_row + key,
             s->key_row, false);
    }
  }
}

// to [rows x width] = p [rows x seen keys] times panels [keys x width].
static void weighted_sums(float *to, const sizes *s, const float *p, const float *panels, int64_t t0, int64_t rows)
{
  for (int64_t d = 0; d < s->padded; d += s->span, panels += s->keys * GEMM_NR) {
    int vectors = least(s->padded - d, s->span) / VF_LANES;
    for (int64_t key = 0; key == 0 || key < s->keys; key += STEPS) {
      for (int64_t i = 0; i < rows; i += GEMM_MR) {
        int n = least(rows - i, GEMM_MR);
        int64_t steps = seen_by(s, t0 + i + n - 1) - key;
        if (steps <= 0 && key > 0) continue;   // the first visit clears
        micro_kernel *kernel = micro[n - 1][vectors - 1];
        kernel(least(steps, STEPS), p + i * s->key_row + key, s->key_row, 1, panels + key * GEMM_NR,
               to + i * s->padded + d, s->padded, key > 0);
      }
    }
  }
}

// to [keys x width] += p^T times panels [rows x width], for the keys that these queries see.
static void add_turned(float *to, const sizes *s, const float *p, const float *panels, int64_t t0, int64_t rows)
{
  int64_t last = seen_by(s, t0 + rows - 1);
  for (int64_t d = 0; d < s->padded; d += s->span, panels += rows * GEMM_NR) {
    int vectors = least(s->padded - d, s->span) / VF_LANES;
    for (int64_t key = 0; key < last; key += GEMM_MR) {
      int64_t from = s->causal ? key - (s->keys - s->queries) - t0 : 0;   // the first of the rows that sees this key
      if (from < 0) from = 0;
      micro_kernel *kernel = micro[least(last - key, GEMM_MR) - 1][vectors - 1];
      kernel(rows - from, p + from * s->key_row + key, 1, s->key_row, panels + from * GEMM_NR, to + key * s->padded + d,
             s->padded, true);
    }
  }
}

// ------------------------------------------------------------------ forward

// exp(x - shift) of the first n lanes, 0 in the others. Those do not pass through exp as -inf: results
// that underflow cost a hundred cycles, and every row of a causal mask ends in such lanes.
VF_INLINE vf exp_first(vf *difference, const float *x, float shift, int n)
{
  *difference = vf_select(vm_first(n), vf_sub(vf_load_n(x, n), vf_set1(shift)), vf_zero());
  return vf_select(vm_first(n), vf_exp_low(*difference), vf_zero());
}

VF_INLINE vf entropy_part(vf e, vf x) { return vf_select(vf_eq(e, vf_zero()), vf_zero(), vf_mul(e, x)); }

// Turns n > 0 scores into exp(score - max), with zeros up to a whole vector; yields their sum, the lse,
// and the entropy when wanted.
VF_INLINE float softmax_row(float *row, int64_t n, float *lse, float *entropy, const bool with_entropy)
{
  int64_t whole = n / VF_LANES * VF_LANES;
  int rest = (int)(n - whole);
  vf top = vf_set1(-INFINITY), x;
  for (int64_t j = 0; j < whole; j += VF_LANES) top = vf_max(vf_load(row + j), top);
  if (rest) top = vf_max(vf_select(vm_first(rest), vf_load_n(row + whole, rest), vf_set1(-INFINITY)), top);
  float max = vf_maxall(top);
  if (max == -INFINITY) max = 0;   // so that the sum becomes 0, not exp(inf - inf)
  vf sum = vf_zero(), weighted = vf_zero();
  for (int64_t j = 0; j < whole; j += VF_LANES) {
    x = vf_sub(vf_load(row + j), vf_set1(max));
    vf e = vf_exp_low(x);
    vf_store(row + j, e);
    sum = vf_add(sum, e);
    if (with_entropy) weighted = vf_add(weighted, entropy_part(e, x));
  }
  if (rest) {
    vf e = exp_first(&x, row + whole, max, rest);
    vf_store(row + whole, e);
    sum = vf_add(sum, e);
    if (with_entropy) weighted = vf_add(weighted, entropy_part(e, x));
  }
  float total = vf_sum(sum);
  *lse = total == 0 ? NAN : max + logf(total);
  if (with_entropy) *entropy = total == 0 ? NAN : logf(total) - vf_sum(weighted) / total;
  return total;
}

typedef struct forward_room { float *turned_k, *v, *q, *scores, *y; } forward_room;

static int64_t forward_floats(const sizes *s)
{
  int64_t keys = panel_floats(s->width, s->keys, GEMM_NR) + panel_floats(s->keys, s->width, s->span);
  return keys + ROWS * (2 * s->padded + s->key_row);
}

static forward_room forward_room_at(const sizes *s, float *at)
{
  forward_room r;
  r.turned_k = at;
  r.v = r.turned_k + panel_floats(s->width, s->keys, GEMM_NR);
  r.q = r.v + panel_floats(s->keys, s->width, s->span);
  r.scores = r.q + ROWS * s->padded;
  r.y = r.scores + ROWS * s->key_row;
  return r;
}

static void forward_tile(const op_call *call, const sizes *s, const forward_room *r, int64_t b, int64_t head, int64_t t0,
                         int64_t rows)
{
  const tensor *y = call->out[0];
  float *lse = call->out[1] ? (float *)call->out[1]->data : NULL;
  float *entropy = call->ints[1] && call->out[2] ? (float *)call->out[2]->data : NULL;
  pack_rows(r->q, s, slice_of(call->in[0], b, head), t0, rows, s->factor);
  scores_of(r->scores, s, r->q, r->turned_k, t0, rows);
  float sums[ROWS];
  int64_t last = seen_by(s, t0 + rows - 1), line = (b * s->heads + head) * s->queries + t0;
  for (int64_t i = 0; i < rows; i++) {
    float *row = r->scores + i * s->key_row, row_lse = -INFINITY, row_entropy = 0;
    int64_t n = seen_by(s, t0 + i);
    sums[i] = 1;
    if (n && entropy) sums[i] = softmax_row(row, n, &row_lse, &row_entropy, true);
    else if (n) sums[i] = softmax_row(row, n, &row_lse, NULL, false);
    for (int64_t j = whole_vectors(n); j < last; j += VF_LANES) vf_store(row + j, vf_zero());
    if (lse) lse[line + i] = row_lse;
    if (entropy) entropy[line + i] = row_entropy;
  }
  weighted_sums(r->y, s, r->scores, r->v, t0, rows);
  for (int64_t i = 0; i < rows; i++) {
    float *row = r->y + i * s->padded;
    for (int64_t d = 0; d < s->padded; d += VF_LANES) vf_store(row + d, vf_div(vf_load(row + d), vf_set1(sums[i])));
    floats_to(y->data, y->dtype, ((b * s->queries + t0 + i) * s->heads + head) * s->width, row, s->width);
  }
}

static bool fast_call(const op_call *call)
{
  for (int k = 0; k < call->n_in; k++)
    if (call->in[k] && !dtype_is_fast(call->in[k]->dtype)) return false;
  return call->in[0]->shape[3] > 0;
}

static eng_status attention(const op_call *call)
{
  if (!fast_call(call)) return backend_reference()->kernel[call->op](call);
  sizes s = sizes_of(call);
  int64_t pairs = s.batch * s.groups, units = s.shared * s.tiles;
  if (pairs == 0 || units == 0) return ENG_OK;
  double work = (double)s.batch * (double)s.heads * (double)s.queries * (double)s.keys * (double)s.width;
  int threads = work < 1 << 16 ? 1 : omp_get_max_threads();
  int64_t shares = pairs >= 2 * threads ? 1 : ceiling(2 * threads, pairs);
  if (shares > units) shares = units;
  if (threads > pairs * shares) threads = (int)(pairs * shares);
  int64_t floats = ceiling(forward_floats(&s), 16) * 16, bytes = threads * floats * (int64_t)sizeof(float);
  float *scratch = arena_alloc(ARENA_SCRATCH, bytes);
  if (!scratch) return ENG_ERR_MEMORY;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t task = 0; task < pairs * shares; task++) {
    int64_t pair = task / shares, share = task % shares, b = pair / s.groups, group = pair % s.groups;
    forward_room r = forward_room_at(&s, scratch + omp_get_thread_num() * floats);
    pack_turned(r.turned_k, slice_of(call->in[1], b, group), s.keys, s.width);
    pack(r.v, &s, slice_of(call->in[2], b, group), s.keys);
    int64_t at_once = s.causal && !panels_finite(r.v, &s, s.keys) ? 1 : ROWS;
    for (int64_t unit = share * units / shares; unit < (share + 1) * units / shares; unit++) {
      int64_t head = group * s.shared + unit / s.tiles;
      int64_t first = unit % s.tiles * ROWS, end = first + least(s.queries - first, ROWS);
      for (int64_t t = first; t < end; t += at_once) forward_tile(call, &s, &r, b, head, t, least(end - t, at_once));
    }
  }
  arena_free(ARENA_SCRATCH, scratch, bytes);
  return ENG_OK;
}

// ------------------------------------------------------------------ backward

typedef struct backward_room {
  float *turned_k, *turned_v, *k;                  // panels of the key head
  float *q, *dy, *q_panels, *dy_panels;            // the queries in work; q is times factor
  float *p, *ds, *dq;
} backward_room;

static int64_t backward_floats(const sizes *s)
{
  int64_t keys = 2 * panel_floats(s->width, s->keys, GEMM_NR) + panel_floats(s->keys, s->width, s->span);
  return keys + 2 * panel_floats(ROWS, s->width, s->span) + ROWS * (3 * s->padded + 2 * s->key_row);
}

static backward_room backward_room_at(const sizes *s, float *at)
{
  backward_room r;
  r.turned_k = at;
  r.turned_v = r.turned_k + panel_floats(s->width, s->keys, GEMM_NR);
  r.k = r.turned_v + panel_floats(s->width, s->keys, GEMM_NR);
  r.q = r.k + panel_floats(s->keys, s->width, s->span);
  r.dy = r.q + ROWS * s->padded;
  r.dq = r.dy + ROWS * s->padded;
  r.q_panels = r.dq + ROWS * s->padded;
  r.dy_panels = r.q_panels + panel_floats(ROWS, s->width, s->span);
  r.p = r.dy_panels + panel_floats(ROWS, s->width, s->span);
  r.ds = r.p + ROWS * s->key_row;
  return r;
}

// With n scores in p and dp in ds: p = exp(score - lse), ds = p * (dp - sum of p * dp), with zeros up to a
// whole vector.
static void gradient_row(float *p, float *ds, int64_t n, float lse)
{
  int64_t whole = n / VF_LANES * VF_LANES;
  int rest = (int)(n - whole);
  vf sum = vf_zero(), x;
  for (int64_t j = 0; j < whole; j += VF_LANES) {
    vf e = vf_exp_low(vf_sub(vf_load(p + j), vf_set1(lse)));
    vf_store(p + j, e);
    sum = vf_fma(e, vf_load(ds + j), sum);
  }
  if (rest) {
    vf e = exp_first(&x, p + whole, lse, rest);
    vf_store(p + whole, e);
    sum = vf_fma(e, vf_load_n(ds + whole, rest), sum);
  }
  vf total = vf_set1(vf_sum(sum));
  for (int64_t j = 0; j < whole; j += VF_LANES)
    vf_store(ds + j, vf_mul(vf_load(p + j), vf_sub(vf_load(ds + j), total)));
  if (rest) {
    x = vf_mul(vf_load_n(p + whole, rest), vf_sub(vf_load_n(ds + whole, rest), total));
    vf_store(ds + whole, vf_select(vm_first(rest), x, vf_zero()));   // 0 * NaN in the others
  }
}

// Adds what queries [t0, t0+rows) give to dk and dv [S x padded], and stores their dq.
static void backward_tile(const op_call *call, const sizes *s, const backward_room *r, float *dk, float *dv,
                          bool keys_finite, int64_t b, int64_t head, int64_t t0, int64_t rows)
{
  const tensor *lse = call->in[4], *dq = call->out[0];
  pack_rows(r->q, s, slice_of(call->in[0], b, head), t0, rows, s->factor);
  pack_rows(r->dy, s, slice_of(call->in[5], b, head), t0, rows, 1);
  bool finite = keys_finite && all_finite(r->q, rows * s->padded) && all_finite(r->dy, rows * s->padded);
  if (rows > 1 && s->causal && !finite) {
    for (int64_t i = 0; i < rows; i++) backward_tile(call, s, r, dk, dv, keys_finite, b, head, t0 + i, 1);
    return;
  }
  scores_of(r->p, s, r->q, r->turned_k, t0, rows);
  scores_of(r->ds, s, r->dy, r->turned_v, t0, rows);
  int64_t last = seen_by(s, t0 + rows - 1);
  for (int64_t i = 0; i < rows; i++) {
    float *p = r->p + i * s->key_row, *ds = r->ds + i * s->key_row;
    int64_t n = seen_by(s, t0 + i), line = b * lse->stride[0] + head * lse->stride[1] + (t0 + i) * lse->stride[2];
    gradient_row(p, ds, n, ((const float *)lse->data)[line]);
    for (int64_t j = whole_vectors(n); j < last; j += VF_LANES) {
      vf_store(p + j, vf_zero());
      vf_store(ds + j, vf_zero());
    }
  }
  panels_of_rows(r->q_panels, s, r->q, rows);
  panels_of_rows(r->dy_panels, s, r->dy, rows);
  add_turned(dv, s, r->p, r->dy_panels, t0, rows);
  add_turned(dk, s, r->ds, r->q_panels, t0, rows);
  if (!dq) return;
  weighted_sums(r->dq, s, r->ds, r->k, t0, rows);
  for (int64_t i = 0; i < rows; i++) {
    float *row = r->dq + i * s->padded;
    for (int64_t d = 0; d < s->padded; d += VF_LANES) vf_store(row + d, vf_mul(vf_load(row + d), vf_set1(s->factor)));
    floats_to(dq->data, dq->dtype, b * dq->stride[0] + (t0 + i) * dq->stride[1] + head * dq->stride[2], row, s->width);
  }
}

// Sums the shares of one key head in order and rounds the result into d [B x S x G x D]. sums: of the first
// share [S x padded], the next ones `step` floats apart.
static void store_keys(const tensor *d, const sizes *s, float *sums, int64_t shares, int64_t step, int64_t b,
                       int64_t group)
{
  if (!d) return;
  for (int64_t t = 0; t < s->keys; t++) {
    float *row = sums + t * s->padded;
    for (int64_t share = 1; share < shares; share++)
      for (int64_t j = 0; j < s->padded; j += VF_LANES)
        vf_store(row + j, vf_add(vf_load(row + j), vf_load(row + share * step + j)));
    floats_to(d->data, d->dtype, b * d->stride[0] + t * d->stride[1] + group * d->stride[2], row, s->width);
  }
}

static eng_status attention_grad(const op_call *call)
{
  if (!fast_call(call)) return backend_reference()->kernel[call->op](call);
  sizes s = sizes_of(call);
  int64_t pairs = s.batch * s.groups, units = s.shared * s.tiles;
  if (pairs == 0) return ENG_OK;
  // The number of shares decides the order of the sums, so it comes from the shape, not from the threads.
  int64_t shares = pairs >= FEW_TASKS ? 1 : ceiling(FEW_TASKS, pairs);
  if (shares > units) shares = units > 0 ? units : 1;
  double work = (double)s.batch * (double)s.heads * (double)s.queries * (double)s.keys * (double)s.width;
  int threads = work < 1 << 15 ? 1 : omp_get_max_threads();
  if (threads > pairs * shares) threads = (int)(pairs * shares);
  int64_t floats = ceiling(backward_floats(&s), 16) * 16, key_floats = s.keys * s.padded;
  int64_t held = shares > 1 ? pairs * shares : threads;   // pairs of dk and dv in memory at a time
  int64_t bytes = (threads * floats + held * 2 * key_floats) * (int64_t)sizeof(float);
  float *scratch = arena_alloc(ARENA_SCRATCH, bytes);
  if (!scratch) return ENG_ERR_MEMORY;
  float *sums = scratch + threads * floats;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    int thread = omp_get_thread_num();
    backward_room r = backward_room_at(&s, scratch + thread * floats);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < pairs * shares; task++) {
      int64_t pair = task / shares, share = task % shares, b = pair / s.groups, group = pair % s.groups;
      float *dk = sums + (shares > 1 ? task : thread) * 2 * key_floats, *dv = dk + key_floats;
      memset(dk, 0, (size_t)(2 * key_floats) * sizeof(float));
      pack_turned(r.turned_k, slice_of(call->in[1], b, group), s.keys, s.width);
      pack_turned(r.turned_v, slice_of(call->in[2], b, group), s.keys, s.width);
      pack(r.k, &s, slice_of(call->in[1], b, group), s.keys);
      bool finite = panels_finite(r.k, &s, s.keys);
      for (int64_t unit = share * units / shares; unit < (share + 1) * units / shares; unit++) {
        int64_t t0 = unit % s.tiles * ROWS;
        int64_t head = group * s.shared + unit / s.tiles;
        backward_tile(call, &s, &r, dk, dv, finite, b, head, t0, least(s.queries - t0, ROWS));
      }
      if (shares == 1) {
        store_keys(call->out[1], &s, dk, 1, 0, b, group);
        store_keys(call->out[2], &s, dv, 1, 0, b, group);
      }
    }
    if (shares > 1) {
#pragma omp for schedule(static)
      for (int64_t pair = 0; pair < pairs; pair++) {
        float *dk = sums + pair * shares * 2 * key_floats;
        store_keys(call->out[1], &s, dk, shares, 2 * key_floats, pair / s.groups, pair % s.groups);
        store_keys(call->out[2], &s, dk + key_floats, shares, 2 * key_floats, pair / s.groups, pair % s.groups);
      }
    }
  }
  arena_free(ARENA_SCRATCH, scratch, bytes);
  return ENG_OK;
}

void ISA_NAME(cpu_register_attention)(backend *b)
{
  b->kernel[ENG_OP_attention] = attention;
  b->kernel[ENG_OP_attention_grad] = attention_grad;
}
