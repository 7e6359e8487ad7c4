// Reference kernels for sum, mean, max and min, and for the operations along the last dimension:
// softmax, log_softmax and logsumexp. Sums are in row-major order. See reference.h. Called through
// reference.c.
//
// Edge cases:
//   max, min          a NaN gives NaN; the gradient then goes to the NaNs
//   softmax           a row whose maximum is +inf or -inf becomes NaN (inf - inf)
//   logsumexp         a NaN in the row gives NaN, else a +inf gives +inf; a row of only -inf gives
//                     -inf
#include "reference.h"

#include <math.h>

// Returns a walk over x and over the dense result of its reduction, where the stride of a reduced
// dimension is 0. Sets *n to the number of results.
static walk walk_reduced(int64_t *n, const op_call *call)
{
  const tensor *x = call->in[0];
  int64_t stride[ENG_MAX_DIMS] = {0};
  walk w = walk_over(x->ndim, x->shape);
  *n = 1;
  for (int d = x->ndim - 1; d >= 0; d--) {
    if ((uint64_t)call->sum.mask >> d & 1) continue;
    stride[d] = *n;
    *n *= x->shape[d];
  }
  walk_add(&w, x);
  walk_add_strides(&w, stride);
  return w;
}

// ------------------------------------------------------------------ sums

static eng_status float_sum(const op_call *call, double divisor)
{
  int64_t n;
  walk w = walk_reduced(&n, call);
  ZEROS(double, sums, n);
  for (; !walk_ended(&w); walk_next(&w)) sums[w.at[1]] += load_at(call->in[0], w.at[0]);
  for (int64_t i = 0; i < n; i++) sums[i] /= divisor;
  values_store(call->out[0], sums, false);
  return ENG_OK;
}

static eng_status integer_sum(const op_call *call)
{
  const tensor *x = call->in[0], *y = call->out[0];
  int64_t n;
  walk w = walk_reduced(&n, call);
  ZEROS(int64_t, sums, n);
  for (; !walk_ended(&w); walk_next(&w))
    sums[w.at[1]] = (int64_t)((uint64_t)sums[w.at[1]] + (uint64_t)load_int_at(x, w.at[0]));
  walk result = walk_over(y->ndim, y->shape);
  for (walk_add(&result, y); !walk_ended(&result); walk_next(&result))
    store_int_at(y, result.at[0], sums[result.position]);
  return ENG_OK;
}

eng_status reference_sum(const op_call *call)
{
  bool integers = dtype_is_integer(call->in[0]->dtype) && dtype_is_integer(call->out[0]->dtype);
  return integers ? integer_sum(call) : float_sum(call, 1);
}

eng_status reference_mean(const op_call *call)
{ return float_sum(call, (double)(call->in[0]->count / call->out[0]->count)); }

// ------------------------------------------------------------------ extremes

// Computes max (sign 1) or min (sign -1). Finds the offset in x of each result's element, so that
// elements of any dtype are compared and copied exactly.
static eng_status extreme(const op_call *call, int sign)
{
  const tensor *x = call->in[0], *y = call->out[0];
  int64_t n;
  walk w = walk_reduced(&n, call);
  ZEROS(int64_t, best, n);   // 1 + offset, or 0 if not found yet
  for (; !walk_ended(&w); walk_next(&w)) {
    int64_t *found = &best[w.at[1]];
    if (*found == 0 || element_beats(x, w.at[0], *found - 1, sign)) *found = w.at[0] + 1;
  }
  walk result = walk_over(y->ndim, y->shape);
  for (walk_add(&result, y); !walk_ended(&result); walk_next(&result))
    element_copy(y, result.at[0], x, best[result.position] - 1);
  return ENG_OK;
}

eng_status reference_max(const op_call *call) { return extreme(call, 1); }
eng_status reference_min(const op_call *call) { return extreme(call, -1); }

eng_status reference_extreme_grad(const op_call *call)
{
  int64_t n;
  const walk start = walk_reduced(&n, call);
  VALUES(values, call->in[0]);
  VALUES(y, call->in[1]);
  VALUES(dy, call->in[2]);
  ZEROS(double, equals, n);
  for (int pass = 0; pass < 2; pass++)   // counts the equal elements, then shares dy
    for (walk w = start; !walk_ended(&w); walk_next(&w)) {
      int64_t result = w.at[1];
      bool equal = values[w.position] == y[result] ||
                   (f64_is_nan(values[w.position]) && f64_is_nan(y[result]));
      if (pass == 0) equals[result] += equal;
      else values[w.position] = equal ? dy[result] / equals[result] : 0.0;
    }
  values_store(call->out[0], values, false);
  return ENG_OK;
}

// ------------------------------------------------------------------ along the last dimension

static double row_maximum(const double *x, int64_t n)
{
  double largest = -INFINITY;
  for (int64_t i = 0; i < n; i++)
    if (x[i] > largest) largest = x[i];
  return largest;
}

/// Computes one row [n] from one or two inputs; the result replaces the first input.
typedef void row_rule(double *a, const double *b, int64_t n);

static eng_status each_row(const op_call *call, row_rule *rule)
{
  const tensor *out = call->out[0];
  VALUES(a, call->in[0]);
  VALUES(b, call->n_in > 1 ? call->in[1] : NULL);
  int64_t rows = row_count(out), n = row_length(out);
  for (int64_t r = 0; r < rows; r++) rule(a + r * n, b ? b + r * n : NULL, n);
  values_store(out, a, false);
  return ENG_OK;
}

static void softmax_row(double *x, const double *none, int64_t n)
{
  double largest = row_maximum(x, n), sum = 0.0;
  (void)none;
  for (int64_t i = 0; i < n; i++) sum += x[i] = exp(x[i] - largest);
  for (int64_t i = 0; i < n; i++) x[i] /= sum;
}

static void softmax_grad_row(double *y, const double *dy, int64_t n)
{
  double dot = 0.0;
  for (int64_t i = 0; i < n; i++) dot += y[i] * dy[i];
  for (int64_t i = 0; i < n; i++) y[i] *= dy[i] - dot;
}

static void log_softmax_row(double *x, const double *none, int64_t n)
{
  double largest = row_maximum(x, n), sum = 0.0;
  (void)none;
  for (int64_t i = 0; i < n; i++) sum += exp(x[i] - largest);
  for (int64_t i = 0; i < n; i++) x[i] = x[i] - largest - log(sum);
}

static void log_softmax_grad_row(double *y, const double *dy, int64_t n)
{
  double sum = 0.0;
  for (int64_t i = 0; i < n; i++) sum += dy[i];
  for (int64_t i = 0; i < n; i++) y[i] = dy[i] - exp(y[i]) * sum;
}

eng_status reference_softmax(const op_call *call)      { return each_row(call, softmax_row); }
eng_status reference_log_softmax(const op_call *call)  { return each_row(call, log_softmax_row); }
eng_status reference_softmax_grad(const op_call *call) { return each_row(call, softmax_grad_row); }
eng_status reference_log_softmax_grad(const op_call *call)
{ return each_row(call, log_softmax_grad_row); }

eng_status reference_logsumexp(const op_call *call)
{
  const tensor *x = call->in[0];
  int64_t rows = row_count(x), n = row_length(x);
  VALUES(values, x);
  ZEROS(double, results, rows);
  for (int64_t r = 0; r < rows; r++) {
    const double *row = values + r * n;
    bool nan = false;
    for (int64_t i = 0; i < n; i++) nan = nan || f64_is_nan(row[i]);
    double largest = row_maximum(row, n);
    results[r] = !nan && isinf(largest) ? largest : row_logsumexp(row, n);
  }
  values_store(call->out[0], results, false);
  return ENG_OK;
}
