// Softmax, log softmax and logsumexp over the last dimension, with their gradients. Called
// through the backend table; owns nothing.
//
// The largest element of a row is subtracted first, so that exp of a finite element does not
// overflow. As in PyTorch, a row with NaN or +inf yields NaN, and so does a row of only -inf.
// logsumexp gives +inf for a row with +inf and no NaN, and -inf for a row of only -inf. In softmax,
// a row of up to SHORT elements takes one exp per element and one read of memory. A longer row
// takes two exps per element and two reads, and its second read usually comes from the caches.
#include "simd.h"
#include "rows.h"

enum { SHORT = 4096 };   // floats, 16 KiB of stack

// ------------------------------------------------------------------ softmax, log softmax

/// Computes a row of y = exp(x - max) * second or, for the logarithm, y = (x - max) - second.
/// `second` is 1 / sum or, for the logarithm, log(sum). The logarithm subtracts twice, because max
/// may be large and log(sum) small.
static void map_row(const tensor *x, const tensor *y, int64_t first, int64_t n, float max,
                    float second, bool logarithm)
{
  float buffer[TILE] __attribute__((aligned(64))), to[TILE] __attribute__((aligned(64)));
  vf m = vf_set1(max), s = vf_set1(second);
  for (int64_t at = first; at < first + n; at += TILE) {
    int length = (int)smaller(TILE, first + n - at);
    const float *in = tile_load(buffer, x->data, x->dtype, at, length);
    float *out = tile_target(to, y->data, y->dtype, at);
    if (logarithm) MAP1(out, in, length, vf_sub(vf_sub(a, m), s));
    else MAP1(out, in, length, vf_mul(vf_exp_low(vf_sub(a, m)), s));
    tile_store(y->data, y->dtype, at, out, length);
  }
}

static void softmax_short(const tensor *x, const tensor *y, int64_t first, int n)
{
  float row[SHORT] __attribute__((aligned(64)));
  const float *in = tile_load(row, x->data, x->dtype, first, n);
  float max = tile_max(in, n);
  double sum = 0.0;
  for (int at = 0; at < n; at += TILE)
    sum += tile_exp_sum(in + at, (int)smaller(TILE, n - at), max, row + at);
  vf factor = vf_set1((float)(1.0 / sum));
  for (int at = 0; at < n; at += TILE) {
    float buffer[TILE] __attribute__((aligned(64)));
    int length = (int)smaller(TILE, n - at);
    float *out = tile_target(buffer, y->data, y->dtype, first + at);
    MAP1(out, row + at, length, vf_mul(a, factor));
    tile_store(y->data, y->dtype, first + at, out, length);
  }
}

static eng_status forward(const op_call *call, bool logarithm)
{
  if (!all_fast(call)) return forward_to_reference(call);
  const tensor *x = call->in[0], *y = call->out[0];
  int64_t n = row_length(x), rows = row_count(x);
#pragma omp parallel for schedule(static) if (x->count > PARALLEL_ELEMENTS)
  for (int64_t row = 0; row < rows; row++) {
    if (n <= SHORT && !logarithm) {
      softmax_short(x, y, row * n, (int)n);
      continue;
    }
    row_exponents e = row_exponents_of(x->data, x->dtype, row * n, n);
    map_row(x, y, row * n, n, e.max, (float)(logarithm ? log(e.sum) : 1.0 / e.sum), logarithm);
  }
  return ENG_OK;
}

KERNEL(softmax) { return forward(call, false); }
KERNEL(log_softmax) { return forward(call, true); }

// ------------------------------------------------------------------ gradients

static double tile_dot(const float *a, const float *b, int n)
{
  vf p = vf_zero(), q = p;
  int i = 0;
  for (; i + 2 * VF_LANES <= n; i += 2 * VF_LANES) {
    p = vf_fma(vf_load(a + i), vf_load(b + i), p);
    q = vf_fma(vf_load(a + i + VF_LANES), vf_load(b + i + VF_LANES), q);
  }
  for (; i + VF_LANES <= n; i += VF_LANES) p = vf_fma(vf_load(a + i), vf_load(b + i), p);
  if (i < n) q = vf_fma(vf_load_n(a + i, n - i), vf_load_n(b + i, n - i), q);
  return vf_sum(vf_add(p, q));
}

/// Computes a tile of dx.
///   softmax       dx = y * (dy - sum), where `sum` is the row's sum of y * dy
///   log softmax   dx = dy - exp(y) * sum, where `sum` is the row's sum of dy
static void grad_tile(const float *y, const float *dy, double sum, bool logarithm, void *dx,
                      int dtype, int64_t first, int n)
{
  float buffer[TILE] __attribute__((aligned(64)));
  float *out = tile_target(buffer, dx, dtype, first);
  vf s = vf_set1((float)sum);
  if (logarithm) MAP2(out, y, dy, n, vf_fma(vf_exp(a), vf_neg(s), b));
  else MAP2(out, y, dy, n, vf_mul(a, vf_sub(b, s)));
  tile_store(dx, dtype, first, out, n);
}

static eng_status grad(const op_call *call, bool logarithm)
{
  if (!all_fast(call)) return forward_to_reference(call);
  const tensor *y = call->in[0], *dy = call->in[1], *dx = call->out[0];
  int64_t n = row_length(y), rows = row_count(y);
#pragma omp parallel for schedule(static) if (y->count > PARALLEL_ELEMENTS)
  for (int64_t row = 0; row < rows; row++) {
    float y_buffer[TILE] __attribute__((aligned(64))), dy_buffer[TILE] __attribute__((aligned(64)));
    const float *p = NULL, *d = NULL;
    double sum = 0.0;
    for (int64_t at = 0; at < n; at += TILE) {
      int length = (int)smaller(TILE, n - at);
      d = tile_load(dy_buffer, dy->data, dy->dtype, row * n + at, length);
      if (!logarithm) p = tile_load(y_buffer, y->data, y->dtype, row * n + at, length);
      sum += logarithm ? tile_sum(d, length) : tile_dot(p, d, length);
    }
    for (int64_t at = 0; at < n; at += TILE) {
      int length = (int)smaller(TILE, n - at);
      // If the row is a single tile, the buffers still hold it.
      if (n > TILE) d = tile_load(dy_buffer, dy->data, dy->dtype, row * n + at, length);
      if (n > TILE || logarithm)
        p = tile_load(y_buffer, y->data, y->dtype, row * n + at, length);
      grad_tile(p, d, sum, logarithm, dx->data, dx->dtype, row * n + at, length);
    }
  }
  return ENG_OK;
}

KERNEL(softmax_grad) { return grad(call, false); }
KERNEL(log_softmax_grad) { return grad(call, true); }

// ------------------------------------------------------------------ logsumexp

static bool row_has_nan(const void *x, int dtype, int64_t first, int64_t n)
{
  for (int64_t i = 0; i < n; i++)
    if (f32_is_nan(get(x, dtype, first + i))) return true;
  return false;
}

KERNEL(logsumexp)
{
  if (!all_fast(call)) return forward_to_reference(call);
  const tensor *x = call->in[0], *y = call->out[0];
  int64_t n = row_length(x), rows = row_count(x);
#pragma omp parallel for schedule(static) if (x->count > PARALLEL_ELEMENTS)
  for (int64_t row = 0; row < rows; row++) {
    row_exponents e = row_exponents_of(x->data, x->dtype, row * n, n);
    double value = (double)e.max + log(e.sum);
    if (e.max == INFINITY && !row_has_nan(x->data, x->dtype, row * n, n)) value = INFINITY;
    put(y->data, y->dtype, row, value);
  }
  return ENG_OK;
}
