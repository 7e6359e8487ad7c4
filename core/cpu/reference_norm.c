// Reference kernels for layer_norm and rms_norm over the last dimension, and their gradients. The
// statistics are the mean and 1 / sqrt(variance + eps). The variance is the sum of the squared
// deviations divided by the row's length. rms_norm has one statistic, 1 / sqrt(mean square + eps).
// The gradients read the saved statistics. The kernels with a residual compute x + branch,
// normalize it, and return both results. See reference.h. Called through reference.c.
#include "reference.h"

#include <math.h>

// Computes y = (x - mean) * rstd * weight + bias one row at a time. rms_norm has mean 0 and no
// bias.
static eng_status normalize(const op_call *call, bool layer)
{
  const tensor *y = call->out[0];
  int64_t rows = row_count(y), n = row_length(y);
  VALUES(x, call->in[0]);
  VALUES(weight, call->in[1]);
  VALUES(bias, layer ? call->in[2] : NULL);
  ZEROS(double, means, rows);
  ZEROS(double, rstds, rows);
  for (int64_t r = 0; r < rows; r++) {
    double *row = x + r * n, sum = 0.0, squares = 0.0;
    for (int64_t i = 0; i < n; i++) sum += row[i];
    means[r] = layer ? sum / (double)n : 0.0;
    for (int64_t i = 0; i < n; i++) squares += (row[i] - means[r]) * (row[i] - means[r]);
    rstds[r] = 1.0 / sqrt(squares / (double)n + call->layer_norm.eps);
    for (int64_t i = 0; i < n; i++)
      row[i] = (row[i] - means[r]) * rstds[r] * (weight ? weight[i] : 1.0) + (bias ? bias[i] : 0.0);
  }
  values_store(y, x, false);
  if (layer) values_store(call->out[1], means, false);
  values_store(call->out[layer ? 2 : 1], rstds, false);
  return ENG_OK;
}

eng_status reference_layer_norm(const op_call *call) { return normalize(call, true); }
eng_status reference_rms_norm(const op_call *call)   { return normalize(call, false); }

// With h = (x - mean) * rstd and g = dy * weight:
//   dx = rstd * (g - mean(g) - h * mean(g * h)), dweight = sum of dy * h, dbias = sum of dy.
// rms_norm has no term mean(g), because it subtracts no mean.
static eng_status normalize_grad(const op_call *call, bool layer)
{
  const tensor *tx = call->in[0];
  int64_t rows = row_count(tx), n = row_length(tx);
  VALUES(x, tx);
  VALUES(weight, call->in[1]);
  VALUES(means, layer ? call->in[2] : NULL);
  VALUES(rstds, call->in[layer ? 3 : 2]);
  VALUES(dy, call->in[layer ? 4 : 3]);
  ZEROS(double, dweight, n);
  ZEROS(double, dbias, n);
  for (int64_t r = 0; r < rows; r++) {
    double *row = x + r * n, *slope = dy + r * n, mean_g = 0.0, mean_gh = 0.0;
    for (int64_t i = 0; i < n; i++) {
      double h = (row[i] - (means ? means[r] : 0.0)) * rstds[r];
      dweight[i] += slope[i] * h;
      dbias[i] += slope[i];
      slope[i] *= weight ? weight[i] : 1.0;   // `slope` is g from here on
      row[i] = h;
      mean_g += slope[i] / (double)n;
      mean_gh += slope[i] * h / (double)n;
    }
    if (!layer) mean_g = 0.0;
    for (int64_t i = 0; i < n; i++) row[i] = rstds[r] * (slope[i] - mean_g - row[i] * mean_gh);
  }
  values_store(call->out[0], x, false);
  if (call->layer_norm_grad.affine) {
    values_store(call->out[1], dweight, false);
    if (layer) values_store(call->out[2], dbias, false);
  }
  return ENG_OK;
}

eng_status reference_layer_norm_grad(const op_call *call) { return normalize_grad(call, true); }
eng_status reference_rms_norm_grad(const op_call *call)   { return normalize_grad(call, false); }

// Computes a norm with a residual: runs the addition, then the norm.
static eng_status add_normalize(const op_call *call, bool layer)
{
  op_call add = {.op = ENG_OP_add, .n_in = 2, .n_out = 1, .in = {call->in[0], call->in[1]},
                 .out = {call->out[1]}};
  op_call norm = {.in = {call->out[1], call->in[2], call->in[3]},
                  .out = {call->out[0], call->out[2], call->out[3]},
                  .layer_norm = {.eps = call->layer_norm.eps}};
  ENG_TRY(reference_add(&add));
  return normalize(&norm, layer);
}

static eng_status add_normalize_grad(const op_call *call, bool layer)
{
  op_call add = {.op = ENG_OP_add, .n_in = 2, .n_out = 1,
                 .in = {call->in[layer ? 5 : 4], call->out[0]}, .out = {call->out[0]}};
  ENG_TRY(normalize_grad(call, layer));
  return reference_add(&add);
}

eng_status reference_add_layer_norm(const op_call *call)      { return add_normalize(call, true); }
eng_status reference_add_rms_norm(const op_call *call)        { return add_normalize(call, false); }
eng_status reference_add_layer_norm_grad(const op_call *call)
{ return add_normalize_grad(call, true); }
eng_status reference_add_rms_norm_grad(const op_call *call)
{ return add_normalize_grad(call, false); }
