// The operations matmul and linear on the card. A call is described as a product of strided
// matrices (gemm_layout.h) and goes to cuBLASLt (gemm_lt.c). An operand that cuBLASLt cannot read
// is copied first. If cuBLASLt cannot write the output, it writes the sums to scratch memory in f32
// (f64 for f64), and a second pass rounds them into the output. gemm_plain.cu computes products
// that cuBLASLt does not support. Called through the device's table and by gemm_fused.c and
// images/conv.c.
#include "runtime/device.h"
#include "gemm.h"
#include "gemm_lt.h"

#include <limits.h>

op_kernel cuda_matmul, cuda_linear, cuda_cast;

// A batch that cuBLASLt cannot stride through takes several launches. If there would be more than
// MOST_LAUNCHES, the operands whose strides prevent a single launch are copied, which is cheaper.
enum { MOST_LAUNCHES = 32 };

/// Replaces x [batch.. x rows x columns] by a copy in `dtype` without gaps. Broadcast batch
/// dimensions stay broadcast. Contiguous rows stay contiguous, and so do contiguous columns.
static eng_status copy_operand(gemm_matrix *x, const gemm_product *p, int64_t rows, int64_t columns,
                               int dtype, scratch *s)
{
  bool by_columns = x->row < x->column;
  tensor from = {.data = x->data,
                 .dtype = x->dtype,
                 .ndim = p->batch_dims + 2,
                 .count = rows * columns},
         to;
  for (int d = 0; d < p->batch_dims; d++) {
    from.shape[d] = x->batch[d] ? p->batch[d] : 1;
    from.stride[d] = x->batch[d];
    from.count *= from.shape[d];
  }
  int last = from.ndim - 1;
  from.shape[last - 1] = by_columns ? columns : rows;
  from.stride[last - 1] = by_columns ? x->column : x->row;
  from.shape[last] = by_columns ? rows : columns;
  from.stride[last] = by_columns ? x->row : x->column;

  to = from;
  to.dtype = dtype;
  int64_t step = 1;
  for (int d = last; d >= 0; d--) {
    to.stride[d] = step;
    step *= to.shape[d];
  }
  to.data = scratch_keep(s, to.count * eng_dtype_size(dtype));
  if (!to.data) return ENG_ERR_MEMORY;
  op_call cast = {.op = ENG_OP_cast, .n_in = 1, .n_out = 1, .in = {&from}, .out = {&to},
                  .cast = {.dtype = dtype}};
  ENG_TRY(cuda_cast(&cast));   // copies if the formats are equal

  gemm_matrix dense = {.data = to.data, .dtype = dtype};
  dense.row = to.stride[by_columns ? last : last - 1];
  dense.column = to.stride[by_columns ? last - 1 : last];
  for (int d = 0; d < p->batch_dims; d++) dense.batch[d] = x->batch[d] ? to.stride[d] : 0;
  *x = dense;
  return ENG_OK;
}

/// Returns the format in which the operands are multiplied: f64 if A, B or C is f64, else the
/// format of A and B if both have the same, else f32.
static int factor_dtype(const gemm_product *p)
{
  if (p->a.dtype == ENG_f64 || p->b.dtype == ENG_f64 || p->c.dtype == ENG_f64) return ENG_f64;
  return p->a.dtype == p->b.dtype ? p->a.dtype : ENG_f32;
}

/// Whether cuBLASLt can write C (and add the bias) with one rounding. If rows are unaligned, some
/// of its kernels round the sum to f16 or bf16 before they add the bias.
static bool can_write(const gemm_product *p, int factors)
{
  gemm_leading leading;
  bool format = p->c.dtype == factors || (p->c.dtype == ENG_f32 && factors != ENG_f64);
  bool bias = !p->bias || (p->bias_dtype == p->c.dtype && gemm_alignment(p->bias) == 16);
  if (p->bias && eng_dtype_size(p->c.dtype) == 2)
    bias = bias && gemm_rows_aligned(&p->a, p->m, p->k) && gemm_rows_aligned(&p->b, p->k, p->n) &&
           gemm_rows_aligned(&p->c, p->m, p->n);
  return format && bias && gemm_leading_of(&leading, &p->c, p->m, p->n) && !leading.transposed;
}

/// Replaces C by dense scratch memory in the format of the sums, for a C that cuBLASLt cannot
/// write.
static eng_status make_sum(gemm_product *q, int factors, scratch *s)
{
  int dtype = factors == ENG_f64 ? ENG_f64 : ENG_f32;
  int64_t step = q->m * q->n;
  q->c = (gemm_matrix){.dtype = dtype, .row = q->n, .column = 1};
  for (int d = q->batch_dims - 1; d >= 0; d--) {
    q->c.batch[d] = step;
    step *= q->batch[d];
  }
  q->c.data = scratch_keep(s, step * eng_dtype_size(dtype));
  q->accumulate = 0;
  q->bias = NULL;
  return q->c.data ? ENG_OK : ENG_ERR_MEMORY;
}

static int64_t launches_of(const gemm_product *p, int walked)
{
  int64_t launches = 1;
  for (int d = 0; d < p->batch_dims; d++)
    if (d != walked) launches *= p->batch[d];
  return launches;
}

/// Computes, with gemm_plain, the matrices of q whose index is `at` in all batch dimensions except
/// `walked`.
static eng_status one_plainly(const gemm_product *q, int walked, const int64_t *at)
{
  gemm_product one = *q;
  one.a.data = gemm_data_at(q, &q->a, at);
  one.b.data = gemm_data_at(q, &q->b, at);
  one.c.data = gemm_data_at(q, &q->c, at);
  for (int d = 0; d < q->batch_dims; d++)
    if (d != walked) one.batch[d] = 1;
  return gemm_plain(&one);
}

/// Computes every matrix of q with cuBLASLt. If cuBLASLt cannot compute the product, *done is false
/// and nothing is written. If cuBLASLt refuses only a later launch, gemm_plain computes the
/// matrices that are left, because starting over could accumulate twice into C.
static eng_status launch_all(bool *done, const gemm_product *q)
{
  int walked = gemm_walked_dim(q);
  int64_t at[GEMM_BATCH_DIMS] = {0};
  gemm_problem problem;
  *done = false;
  if (!gemm_describe(&problem, q, walked)) return ENG_OK;
  if (problem.m > INT_MAX || problem.n > INT_MAX || problem.k > INT_MAX || problem.batch > INT_MAX)
    return ENG_OK;
  problem.tf32 = q->a.dtype == ENG_f32 && is_on("ENGINE_TF32", false);
  for (bool begun = false, more = true; more; begun = true, more = gemm_next(q, walked, at)) {
    gemm_operands on = {.a = gemm_data_at(q, &q->b, at),
                        .b = gemm_data_at(q, &q->a, at),
                        .c = gemm_data_at(q, &q->c, at),
                        .bias = q->bias};
    ENG_TRY(gemm_lt_run(done, &problem, &on));
    if (!*done && !begun) return ENG_OK;
    if (!*done) ENG_TRY(one_plainly(q, walked, at));
    *done = true;
  }
  return ENG_OK;
}

static eng_status by_library(bool *done, const gemm_product *p, scratch *s)
{
  gemm_product q = *p;
  gemm_leading leading;
  int factors = factor_dtype(p);
  unsigned copy = launches_of(p, gemm_walked_dim(p)) > MOST_LAUNCHES ? gemm_batch_breakers(p) : 0;
  if (copy & 1 || p->a.dtype != factors || !gemm_leading_of(&leading, &p->a, p->m, p->k))
    ENG_TRY(copy_operand(&q.a, p, p->m, p->k, factors, s));
  if (copy & 2 || p->b.dtype != factors || !gemm_leading_of(&leading, &p->b, p->k, p->n))
    ENG_TRY(copy_operand(&q.b, p, p->k, p->n, factors, s));
  if (can_write(p, factors)) {
    gemm_product whole = q;
    gemm_simplify(&whole);
    ENG_TRY(launch_all(done, &whole));
    if (*done || !p->bias) return ENG_OK;
  }
  ENG_TRY(make_sum(&q, factors, s));
  gemm_matrix sum = q.c;
  gemm_simplify(&q);
  ENG_TRY(launch_all(done, &q));
  return *done ? gemm_finish(p, &sum) : ENG_OK;
}

eng_status gemm_run(const gemm_product *given)
{
  gemm_product p = *given;
  gemm_simplify(&p);
  if (p.k == 0) return gemm_plain(&p);   // sets C to 0 or the bias, or keeps C if p accumulates
  bool done = false;
  scratch s = {0};
  eng_status status = by_library(&done, &p, &s);
  if (status == ENG_OK && !done) status = gemm_plain(&p);
  scratch_give_all(&s);
  return status;
}

eng_status cuda_matmul(const op_call *call)
{
  gemm_product p = gemm_of_matmul(call);
  return gemm_run(&p);
}

eng_status cuda_linear(const op_call *call)
{
  gemm_product p = gemm_of_linear(call);
  return gemm_run(&p);
}
