// Reference kernels for matmul, linear, mlp_gelu, and the products and column sums in their
// gradients. Sums are in double, in the order of k or of the rows, and are rounded once. See
// reference.h. Called through reference.c.
#include "reference.h"

// Adds the sum over k of a[m][k] * b[k][n] to acc[m][n]. a and b are given by their first element
// and two strides in elements, from row to row and from column to column. acc is dense.
static void multiply(double *acc, int64_t rows, int64_t columns, int64_t inner, const double *a,
                     int64_t a_row, int64_t a_column, const double *b, int64_t b_row,
                     int64_t b_column)
{
  for (int64_t m = 0; m < rows; m++) {
    double *sums = acc + m * columns;
    for (int64_t k = 0; k < inner; k++) {
      double factor = a[m * a_row + k * a_column];
      const double *row = b + k * b_row;
      for (int64_t n = 0; n < columns; n++) sums[n] += factor * row[n * b_column];
    }
  }
}

// Sets `stride` to the strides, in elements, that a dense copy of x has along the batch dimensions
// of y: 0 where x is broadcast.
static void batch_strides(int64_t *stride, const tensor *x, const tensor *y)
{
  int64_t step = x->shape[x->ndim - 1] * x->shape[x->ndim - 2];
  for (int d = y->ndim - 3; d >= 0; d--) {
    int own = d - (y->ndim - x->ndim);
    stride[d] = own >= 0 && x->shape[own] != 1 ? step : 0;
    if (own >= 0) step *= x->shape[own];
  }
}

eng_status reference_matmul(const op_call *call)
{
  const tensor *ta = call->in[0], *tb = call->in[1], *y = call->out[0];
  bool a_transposed = call->matmul.transpose_a != 0, b_transposed = call->matmul.transpose_b != 0;
  int64_t rows = y->shape[y->ndim - 2], columns = y->shape[y->ndim - 1];
  int64_t inner = ta->shape[ta->ndim - (a_transposed ? 2 : 1)];
  int64_t a_stride[ENG_MAX_DIMS], b_stride[ENG_MAX_DIMS];
  batch_strides(a_stride, ta, y);
  batch_strides(b_stride, tb, y);
  VALUES(a, ta);
  VALUES(b, tb);
  ZEROS(double, sums, y->count);
  walk batch = walk_over(y->ndim - 2, y->shape);
  walk_add_strides(&batch, a_stride);
  walk_add_strides(&batch, b_stride);
  for (; !walk_ended(&batch); walk_next(&batch))
    multiply(sums + batch.position * rows * columns, rows, columns, inner,
             a + batch.at[0], a_transposed ? 1 : inner, a_transposed ? rows : 1,
             b + batch.at[1], b_transposed ? 1 : columns, b_transposed ? inner : 1);
  values_store(y, sums, call->matmul.add != 0);
  return ENG_OK;
}

eng_status reference_linear(const op_call *call)
{
  const tensor *y = call->out[0];
  int64_t rows = row_count(y), columns = row_length(y), inner = row_length(call->in[0]);
  VALUES(x, call->in[0]);
  VALUES(weight, call->in[1]);
  VALUES(bias, call->in[2]);
  ZEROS(double, sums, y->count);
  for (int64_t i = 0; bias && i < y->count; i++) sums[i] = bias[i % columns];
  multiply(sums, rows, columns, inner, x, inner, 1, weight, 1, inner);
  values_store(y, sums, false);
  return ENG_OK;
}

eng_status reference_bias_grad(const op_call *call)
{
  const tensor *dy = call->in[0], *dbias = call->out[0];
  int64_t rows = row_count(dy), columns = row_length(dy);
  VALUES(slopes, dy);
  ZEROS(double, sums, columns);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) sums[c] += slopes[r * columns + c];
  values_store(dbias, sums, call->bias_grad.add != 0);
  return ENG_OK;
}

eng_status reference_linear_grad(const op_call *call)
{
  const tensor *dy = call->in[0], *x = call->in[1], *dw = call->out[0];
  int64_t rows = row_count(dy), columns = row_length(dy), inner = row_length(x);
  VALUES(slopes, dy);
  VALUES(from, x);
  ZEROS(double, sums, dw->count);
  multiply(sums, columns, inner, rows, slopes, 1, columns, from, inner, 1);
  values_store(dw, sums, call->linear_grad.add[0] != 0);
  op_call bias = {.op = ENG_OP_bias_grad, .n_in = 1, .n_out = 1, .in = {call->in[0]},
                  .out = {call->out[1]}, .bias_grad = {.dtype = call->linear_grad.dtype[1],
                                                       .add = call->linear_grad.add[1]}};
  return reference_bias_grad(&bias);
}

eng_status reference_mlp_gelu(const op_call *call)
{
  tensor *y = call->out[0], *u = call->out[1], *h = call->out[2];
  op_call up = {.op = ENG_OP_linear, .n_in = 3, .n_out = 1,
                .in = {call->in[0], call->in[1], call->in[2]}, .out = {u}};
  op_call gelu = {.op = ENG_OP_gelu_tanh, .n_in = 1, .n_out = 1, .in = {u}, .out = {h}};
  op_call down = {
    .op = ENG_OP_linear, .n_in = 3, .n_out = 1, .in = {h, call->in[3], call->in[4]}, .out = {y}};
  ENG_TRY(reference_linear(&up));
  ENG_TRY(reference_gelu_tanh(&gelu));
  return reference_linear(&down);
}

eng_status reference_matmul_gelu_grad(const op_call *call)
{
  const tensor *dy = call->in[0], *u = call->in[2];
  tensor dh = *u;   // the product, before rounding
  int64_t rows = row_count(dy), columns = row_length(u), inner = row_length(dy);
  VALUES(slopes, dy);
  VALUES(weight, call->in[1]);
  ZEROS(double, sums, u->count);
  multiply(sums, rows, columns, inner, slopes, inner, 1, weight, columns, 1);
  dh.dtype = ENG_f64;
  dh.data = sums;
  op_call slope = {.op = ENG_OP_unary_grad, .n_in = 2, .n_out = 1, .in = {call->in[2], &dh},
                   .out = {call->out[0]},
                   .unary_grad = {.of = ENG_OP_gelu_tanh, .dtype = u->dtype}};
  return reference_unary_grad(&slope);
}
