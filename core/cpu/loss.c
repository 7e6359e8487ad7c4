// Losses: cross entropy over the last dimension with its gradient, and mean squared error.
// Called through the backend table; owns nothing.
//
// Cross entropy reads the logits once or, with label smoothing, twice. With a soft cap, it reads
// them once, because each thread keeps a row of capped logits. It finds the maximum and the sum of
// exponentials together, tile by tile, and never stores the probabilities. The gradient reads the
// logits once and writes dlogits once. Per-row results are summed in double in the order of the
// rows, so the result does not depend on the number of threads.
#include "simd.h"
#include "rows.h"

enum { MSE_BLOCK = 32 * TILE };   // elements that a thread sums at a time

// ------------------------------------------------------------------ cross entropy

/// Returns whether every target is a valid class or the ignored value. Sets *counted to the number
/// of rows that are not ignored.
static bool targets_fit(const op_call *call, int64_t *counted)
{
  const tensor *targets = call->in[1];
  int64_t classes = row_length(call->in[0]), rows = row_count(call->in[0]);
  *counted = 0;
  for (int64_t row = 0; row < rows; row++) {
    int64_t t = tensor_load_int(targets->data, targets->dtype, row);
    if (t == call->cross_entropy.ignore) continue;
    if (t < 0 || t >= classes) return false;
    ++*counted;
  }
  return true;
}

/// Writes a row's capped logits, cap * tanh(x / cap), in f32 to out [classes].
static void cap_row(float *out, const tensor *x, int64_t first, int64_t classes, double cap)
{
  float buffer[TILE] __attribute__((aligned(64)));
  vf c = vf_set1((float)cap), inverse = vf_set1((float)(1.0 / cap));
  for (int64_t at = 0; at < classes; at += TILE) {
    int n = (int)smaller(TILE, classes - at);
    const float *in = tile_load(buffer, x->data, x->dtype, first + at, n);
    MAP1(out + at, in, n, vf_mul(c, vf_tanh(vf_mul(a, inverse))));
  }
}

KERNEL(cross_entropy)
{
  int64_t counted;
  // The reference kernel reports a target that is not a class.
  if (!all_fast_except(call, 1) || !targets_fit(call, &counted)) return forward_to_reference(call);
  const tensor *x = call->in[0], *targets = call->in[1], *loss = call->out[0], *lse = call->out[1];
  int64_t classes = row_length(x), rows = row_count(x), ignored = call->cross_entropy.ignore,
          reduction = call->cross_entropy.reduction;
  double smoothing = call->cross_entropy.smoothing, z_loss = call->cross_entropy.z_loss,
         cap = call->cross_entropy.soft_cap;
  int64_t width = cap > 0 ? padded(classes) : 0;
  SCRATCH(double, losses, rows);
  SCRATCH(float, capped, omp_get_max_threads() * width);

#pragma omp parallel for schedule(static) if (x->count > PARALLEL_ELEMENTS)
  for (int64_t row = 0; row < rows; row++) {
    int64_t t = tensor_load_int(targets->data, targets->dtype, row), first = row * classes;
    losses[row] = 0.0;
    if (t == ignored && !lse) continue;
    const void *logits = x->data;
    int dtype = x->dtype;
    if (cap > 0) {
      float *own = capped + omp_get_thread_num() * width;
      cap_row(own, x, first, classes, cap);
      logits = own, dtype = ENG_f32, first = 0;
    }
    row_exponents e = row_exponents_of(logits, dtype, first, classes);
    // An infinite maximum gives NaN, as in PyTorch.
    double log_sum = log(e.sum), top = f32_is_finite(e.max) ? (double)e.max : NAN;
    if (lse) put(lse->data, lse->dtype, row, top + log_sum);
    if (t == ignored) continue;
    double own = log_sum - ((double)get(logits, dtype, first + t) - top);
    if (smoothing != 0.0) {
      double all = log_sum + top - row_sum(logits, dtype, first, classes) / (double)classes;
      own = (1.0 - smoothing) * own + smoothing * all;
    }
    if (z_loss != 0.0) own += z_loss * (top + log_sum) * (top + log_sum);
    losses[row] = own;
  }

  double sum = 0.0;
  for (int64_t row = 0; row < rows; row++) {
    sum += losses[row];
    if (loss && reduction == 0) put(loss->data, loss->dtype, row, losses[row]);
  }
  if (loss && reduction != 0)
    put(loss->data, loss->dtype, 0, reduction == 1 ? sum / (double)counted : sum);
  return ENG_OK;
}

/// The constants of a row's gradient: dlogits = (exp(x - lse) * weight - floor) * factor, except at
/// the target. `weight` is 1 + 2 z_loss lse; `floor` is smoothing / classes.
typedef struct row_slope { float lse, weight, floor, factor; } row_slope;

VF_INLINE vf slope_of(vf x, const row_slope *r)
{
  vf p = vf_mul(vf_exp_low(vf_sub(x, vf_set1(r->lse))), vf_set1(r->weight));
  return vf_mul(vf_sub(p, vf_set1(r->floor)), vf_set1(r->factor));
}

/// Returns the gradient for x, a logit before the soft cap: slope_of the capped logit, times the
/// derivative of the cap at x.
VF_INLINE vf capped_slope_of(vf x, const row_slope *r, float cap)
{
  vf u = vf_mul(x, vf_set1(1.0f / cap));
  return vf_mul(slope_of(vf_mul(vf_set1(cap), vf_tanh(u)), r), vf_tanh_derivative(u));
}

static void gradient_tile(const float *x, const row_slope *r, float cap, float *out, int n)
{
  if (cap > 0) MAP1(out, x, n, capped_slope_of(a, r, cap));
  else MAP1(out, x, n, slope_of(a, r));
}

KERNEL(cross_entropy_grad)
{
  int64_t counted;
  if (!all_fast_except(call, 1) || !targets_fit(call, &counted)) return forward_to_reference(call);
  const tensor *x = call->in[0], *targets = call->in[1], *lse = call->in[2], *dloss = call->in[3],
               *dx = call->out[0];
  int64_t classes = row_length(x), rows = row_count(x), ignored = call->cross_entropy.ignore,
          reduction = call->cross_entropy.reduction;
  double smoothing = call->cross_entropy.smoothing, floor = smoothing / (double)classes,
         z_loss = call->cross_entropy.z_loss, cap = call->cross_entropy.soft_cap;

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
    // The factor stays a double, so that the target's gradient, computed in double below, is
    // rounded to f32 only once.
    double factor = get(dloss->data, dloss->dtype, reduction == 0 ? row : 0);
    if (reduction == 1) factor /= (double)counted;
    float row_lse = get(lse->data, lse->dtype, row);
    double target = get(x->data, x->dtype, first + t), own_slope = 1.0,
           weight = z_loss != 0.0 ? 1.0 + 2.0 * z_loss * (double)row_lse : 1.0;
    if (cap > 0) {
      double cosine = cosh(target / cap);
      own_slope = cosine != cosine ? cosine : 1.0 / (cosine * cosine);
      target = cap * tanh(target / cap);
    }
    row_slope slope = {row_lse, (float)weight, (float)floor, (float)factor};
    for (int64_t at = 0; at < classes; at += TILE) {
      int length = (int)smaller(TILE, classes - at);
      const float *in = tile_load(in_buffer, x->data, x->dtype, first + at, length);
      float *out = tile_target(out_buffer, dx->data, dx->dtype, first + at);
      gradient_tile(in, &slope, (float)cap, out, length);
      if (t >= at && t < at + length)
        out[t - at] = (float)((exp(target - (double)row_lse) * weight - (1.0 - smoothing) - floor) *
                              factor * own_slope);
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

KERNEL(mse)
{
  if (!all_fast(call)) return forward_to_reference(call);
  const tensor *a = call->in[0], *b = call->in[1], *out = call->out[0];
  int64_t blocks = ceiling(a->count, MSE_BLOCK);
  SCRATCH(double, partial, blocks);
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
  return ENG_OK;
}
