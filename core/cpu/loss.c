// Losses: cross entropy over the last dimension with its gradient, and mean squared error.
// Registered by cpu.c, called through the backend table; owns nothing.
//
// Cross entropy reads the logits once: maximum and sum of exponentials together, tile by tile; the
// probabilities are never stored. The gradient reads the logits once and writes once. Per-row
// results are summed in double in the order of the rows, so the result does not depend on threads.
#include "simd.h"
#include "rows.h"

enum { MSE_BLOCK = 32 * TILE };   // elements a thread sums at a time

// ------------------------------------------------------------------ cross entropy

/// Checks the targets before any work and counts those that are not ignored.
static eng_status check_targets(const op_call *call, const tensor *targets, int64_t rows,
                                int64_t classes, int64_t *counted)
{
  int64_t ignored = call->cross_entropy.ignore, n = 0;
  for (int64_t row = 0; row < rows; row++) {
    int64_t t = tensor_load_int(targets->data, targets->dtype, row);
    if (t == ignored) continue;
    if (t < 0 || t >= classes)
      return error_set(
        ENG_ERR_VALUE,
        "%s: expected targets in 0..%lld (or %lld, ignored), got %lld at row %lld of %s; "
        "hint: does the vocabulary of the data fit the model?",
        eng_op_name(call->op), (long long)classes - 1, (long long)ignored, (long long)t,
        (long long)row, tensor_text(targets));
    n++;
  }
  *counted = n;
  return ENG_OK;
}

static double sum_of(const void *x, int dtype, int64_t first, int64_t n)
{
  float buffer[TILE] __attribute__((aligned(64)));
  double sum = 0.0;
  for (int64_t at = 0; at < n; at += TILE) {
    int length = (int)smaller(TILE, n - at);
    sum += tile_sum(tile_load(buffer, x, dtype, first + at, length), length);
  }
  return sum;
}

static bool logits_fast(const op_call *call)
{
  for (int k = 0; k < call->n_in; k++)   // targets are integers
    if (k != 1 && call->in[k] && !dtype_is_fast(call->in[k]->dtype)) return false;
  for (int k = 0; k < call->n_out; k++)
    if (call->out[k] && !dtype_is_fast(call->out[k]->dtype)) return false;
  return true;
}

static eng_status cross_entropy(const op_call *call)
{
  if (!logits_fast(call)) return forward_to_reference(call);
  const tensor *x = call->in[0], *targets = call->in[1], *loss = call->out[0], *lse = call->out[1];
  int64_t classes = row_length(x), rows = row_count(x), ignored = call->cross_entropy.ignore,
          reduction = call->cross_entropy.reduction, counted = 0;
  double smoothing = call->cross_entropy.smoothing;
  ENG_TRY(check_targets(call, targets, rows, classes, &counted));
  int64_t bytes = rows * (int64_t)sizeof(double);
  double *losses = arena_alloc(ARENA_SCRATCH, bytes);
  if (!losses) return ENG_ERR_MEMORY;

#pragma omp parallel for schedule(static) if (x->count > PARALLEL_ELEMENTS)
  for (int64_t row = 0; row < rows; row++) {
    int64_t t = tensor_load_int(targets->data, targets->dtype, row), first = row * classes;
    losses[row] = 0.0;
    if (t == ignored && !lse) continue;
    row_exponents e = row_exponents_of(x->data, x->dtype, first, classes);
    // An infinite maximum gives NaN, as in PyTorch.
    double log_sum = log(e.sum), top = f32_is_finite(e.max) ? (double)e.max : NAN;
    if (lse) put(lse->data, lse->dtype, row, top + log_sum);
    if (t == ignored) continue;
    double own = log_sum - ((double)get(x->data, x->dtype, first + t) - top);
    if (smoothing != 0.0) {
      double all = log_sum + top - sum_of(x->data, x->dtype, first, classes) / (double)classes;
      own = (1.0 - smoothing) * own + smoothing * all;
    }
    losses[row] = own;
  }

  double sum = 0.0;
  for (int64_t row = 0; row < rows; row++) {
    sum += losses[row];
    if (loss && reduction == 0) put(loss->data, loss->dtype, row, losses[row]);
  }
  if (loss && reduction != 0)
    put(loss->data, loss->dtype, 0, reduction == 1 ? sum / (double)counted : sum);
  arena_free(ARENA_SCRATCH, losses, bytes);
  return ENG_OK;
}

/// dlogits = (exp(x - lse) - floor) * factor for one tile; `floor` is the share of smoothing that
/// each class gets.
static void gradient_tile(const float *x, float lse, float floor, float factor, float *out, int n)
{
  vf l = vf_set1(lse), u = vf_set1(floor), f = vf_set1(factor);
  int i = 0;
  for (; i + VF_LANES <= n; i += VF_LANES)
    vf_store(out + i, vf_mul(vf_sub(vf_exp_low(vf_sub(vf_load(x + i), l)), u), f));
  if (i < n)
    vf_store_n(out + i, vf_mul(vf_sub(vf_exp_low(vf_sub(vf_load_n(x + i, n - i), l)), u), f),
               n - i);
}

static eng_status cross_entropy_grad(const op_call *call)
{
  if (!logits_fast(call)) return forward_to_reference(call);
  const tensor *x = call->in[0], *targets = call->in[1], *lse = call->in[2], *dloss = call->in[3],
               *dx = call->out[0];
  int64_t classes = row_length(x), rows = row_count(x), ignored = call->cross_entropy.ignore,
          reduction = call->cross_entropy.reduction, counted = 0;
  double smoothing = call->cross_entropy.smoothing, floor = smoothing / (double)classes;
  ENG_TRY(check_targets(call, targets, rows, classes, &counted));

#pragma omp parallel for schedule(static) if (x->count > PARALLEL_ELEMENTS)
  for (int64_t row = 0; row < rows; row++) {
    float in_buffer[TILE] __attribute__((aligned(64))),
      out_buffer[TILE] __attribute__((aligned(64)));
    int64_t t = tensor_load_int(targets->data, targets->dtype, row), first = row * classes;
    if (t == ignored) {
      size_t size = dx->dtype == ENG_f32 ? 4 : 2;
      memset((char *)dx->data + (size_t)first * size, 0, (size_t)classes * size);
      continue;
    }
    // The factor is a double, so that a loss scale beyond f32 does not overflow if the mean brings
    // the factor back into range.
    double factor = get(dloss->data, dloss->dtype, reduction == 0 ? row : 0);
    if (reduction == 1) factor /= (double)counted;
    float row_lse = get(lse->data, lse->dtype, row), target = get(x->data, x->dtype, first + t);
    for (int64_t at = 0; at < classes; at += TILE) {
      int length = (int)smaller(TILE, classes - at);
      const float *in = tile_load(in_buffer, x->data, x->dtype, first + at, length);
      float *out = tile_target(out_buffer, dx->data, dx->dtype, first + at);
      gradient_tile(in, row_lse, (float)floor, (float)factor, out, length);
      if (t >= at && t < at + length)
        out[t - at] =
          (float)((exp((double)target - (double)row_lse) - (1.0 - smoothing) - floor) * factor);
      tile_store(dx->data, dx->dtype, first + at, out, length);
    }
  }
  return ENG_OK;
}

// ------------------------------------------------------------------ mean squared error

static double tile_distance(const float *a, const float *b, int n)
{
  vf p = vf_zero(), q = p;
  int i = 0;
  for (; i + 2 * VF_LANES <= n; i += 2 * VF_LANES) {
    vf d = vf_sub(vf_load(a + i), vf_load(b + i)),
       e = vf_sub(vf_load(a + i + VF_LANES), vf_load(b + i + VF_LANES));
    p = vf_fma(d, d, p);
    q = vf_fma(e, e, q);
  }
  for (; i < n; i += VF_LANES) {
    int length = (int)smaller(VF_LANES, n - i);
    vf d = vf_sub(vf_load_n(a + i, length), vf_load_n(b + i, length));
    p = vf_fma(d, d, p);
  }
  double sum = vf_sum(vf_add(p, q));
  if (f64_is_finite(sum)) return sum;
  sum = 0.0;   // f32 overflowed, but the mean may be in range
  for (i = 0; i < n; i++) sum += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
  return sum;
}

static eng_status mse(const op_call *call)
{
  if (!all_fast(call)) return forward_to_reference(call);
  const tensor *a = call->in[0], *b = call->in[1], *out = call->out[0];
  int64_t blocks = (a->count + MSE_BLOCK - 1) / MSE_BLOCK, bytes = blocks * (int64_t)sizeof(double);
  double *partial = arena_alloc(ARENA_SCRATCH, bytes);
  if (!partial) return ENG_ERR_MEMORY;
#pragma omp parallel for schedule(static) if (a->count > PARALLEL_ELEMENTS)
  for (int64_t block = 0; block < blocks; block++) {
    float a_buffer[TILE] __attribute__((aligned(64))), b_buffer[TILE] __attribute__((aligned(64)));
    int64_t end = smaller(a->count, (block + 1) * MSE_BLOCK);
    partial[block] = 0.0;
    for (int64_t at = block * MSE_BLOCK; at < end; at += TILE) {
      int length = (int)smaller(TILE, end - at);
      const float *p = tile_load(a_buffer, a->data, a->dtype, at, length);
      const float *q = tile_load(b_buffer, b->data, b->dtype, at, length);
      partial[block] += tile_distance(p, q, length);
    }
  }
  double sum = 0.0;
  for (int64_t block = 0; block < blocks; block++) sum += partial[block];
  put(out->data, out->dtype, 0, sum / (double)a->count);
  arena_free(ARENA_SCRATCH, partial, bytes);
  return ENG_OK;
}

void ISA_NAME(cpu_register_loss)(backend *b)
{
  b->kernel[ENG_OP_cross_entropy] = cross_entropy;
  b->kernel[ENG_OP_cross_entropy_grad] = cross_entropy_grad;
  b->kernel[ENG_OP_mse] = mse;
}
