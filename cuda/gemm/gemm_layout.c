// See gemm_layout.h. Called by gemm.c and gemm_fused.c.
#include "gemm_layout.h"

static gemm_matrix matrix_of(const tensor *x, bool transposed, int batch_dims)
{
  int64_t last = x->stride[x->ndim - 1], before = x->stride[x->ndim - 2];
  gemm_matrix o = {.data = x->data,
                   .dtype = x->dtype,
                   .row = transposed ? last : before,
                   .column = transposed ? before : last};
  int own = x->ndim - 2;
  for (int d = 0; d < own; d++) o.batch[batch_dims - own + d] = x->shape[d] == 1 ? 0 : x->stride[d];
  return o;
}

gemm_product gemm_of_matmul(const op_call *call)
{
  const tensor *a = call->in[0], *b = call->in[1], *c = call->out[0];
  gemm_product p = {.batch_dims = c->ndim - 2, .accumulate = call->matmul.add != 0};
  p.m = c->shape[c->ndim - 2];
  p.n = c->shape[c->ndim - 1];
  p.k = a->shape[a->ndim - (call->matmul.transpose_a ? 2 : 1)];
  p.a = matrix_of(a, call->matmul.transpose_a != 0, p.batch_dims);
  p.b = matrix_of(b, call->matmul.transpose_b != 0, p.batch_dims);
  p.c = matrix_of(c, false, p.batch_dims);
  for (int d = 0; d < p.batch_dims; d++) p.batch[d] = c->shape[d];
  return p;
}

// y [rows x N] = x [rows x K] W^T + bias, where W is [N x K] and all tensors are contiguous
gemm_product gemm_of_linear(const op_call *call)
{
  const tensor *x = call->in[0], *w = call->in[1], *bias = call->in[2], *y = call->out[0];
  gemm_product p = {.m = 1, .n = w->shape[0], .k = w->shape[1]};
  for (int d = 0; d < x->ndim - 1; d++) p.m *= x->shape[d];
  p.a = (gemm_matrix){.data = x->data, .dtype = x->dtype, .row = p.k, .column = 1};
  p.b = (gemm_matrix){.data = w->data, .dtype = w->dtype, .row = 1, .column = p.k};
  p.c = (gemm_matrix){.data = y->data, .dtype = y->dtype, .row = p.n, .column = 1};
  if (bias) {
    p.bias = bias->data;
    p.bias_dtype = bias->dtype;
  }
  return p;
}

// ---- fewer dimensions

static void move_dim(gemm_product *p, int to, int from)
{
  p->batch[to] = p->batch[from];
  p->a.batch[to] = p->a.batch[from];
  p->b.batch[to] = p->b.batch[from];
  p->c.batch[to] = p->c.batch[from];
}

/// Whether one stride of x covers dimensions d and d + 1. A broadcast over both qualifies.
static bool walks_as_one(const gemm_product *p, const gemm_matrix *x, int d)
{ return x->batch[d] == x->batch[d + 1] * p->batch[d + 1]; }

void gemm_simplify(gemm_product *p)
{
  int kept = 0;
  for (int d = 0; d < p->batch_dims; d++)
    if (p->batch[d] != 1) move_dim(p, kept++, d);
  p->batch_dims = kept;
  for (int d = kept - 2; d >= 0; d--) {
    if (!walks_as_one(p, &p->a, d) || !walks_as_one(p, &p->b, d) || !walks_as_one(p, &p->c, d))
      continue;
    p->batch[d + 1] *= p->batch[d];
    for (int e = d; e < p->batch_dims - 1; e++) move_dim(p, e, e + 1);
    p->batch_dims--;
  }
  while (p->batch_dims > 0) {
    int d = p->batch_dims - 1;
    bool one = p->m == 1;   // if so, the batch becomes the rows, at any stride
    if (p->b.batch[d] != 0 ||
        (!one && (p->c.batch[d] != p->m * p->c.row || p->a.batch[d] != p->m * p->a.row)))
      break;
    if (one) {
      p->a.row = p->a.batch[d];
      p->c.row = p->c.batch[d];
    }
    p->m *= p->batch[d];
    p->batch_dims = d;
  }
}

unsigned gemm_batch_breakers(const gemm_product *p)
{
  unsigned found = 0;
  for (int d = 0; d + 1 < p->batch_dims; d++) {
    if (p->a.batch[d] && p->a.batch[d + 1] && !walks_as_one(p, &p->a, d)) found |= 1;
    if (p->b.batch[d] && p->b.batch[d + 1] && !walks_as_one(p, &p->b, d)) found |= 2;
  }
  return found;
}

// ---- cuBLASLt's view

bool gemm_leading_of(gemm_leading *leading, const gemm_matrix *x, int64_t rows, int64_t columns)
{
  if ((x->column == 1 || columns == 1) && (x->row >= columns || rows == 1)) {
    *leading = (gemm_leading){.ld = rows == 1 ? columns : x->row};
    return true;
  }
  if ((x->row == 1 || rows == 1) && (x->column >= rows || columns == 1)) {
    *leading = (gemm_leading){.ld = columns == 1 ? rows : x->column, .transposed = true};
    return true;
  }
  return false;
}

int64_t gemm_alignment(const void *data)
{
  uintptr_t address = (uintptr_t)data | 16;
  return (int64_t)(address & (0 - address));
}

bool gemm_rows_aligned(const gemm_matrix *x, int64_t rows, int64_t columns)
{
  gemm_leading leading;
  return gemm_leading_of(&leading, x, rows, columns) && gemm_alignment(x->data) == 16 &&
         leading.ld * eng_dtype_size(x->dtype) % 16 == 0;
}

/// Returns the alignment in bytes that every matrix of a batch has.
static int64_t batch_alignment(const gemm_product *p, const gemm_matrix *x)
{
  uintptr_t address = (uintptr_t)x->data;
  for (int d = 0; d < p->batch_dims; d++)
    address |= (uintptr_t)(x->batch[d] * eng_dtype_size(x->dtype));
  return gemm_alignment((const void *)address);
}

bool gemm_describe(gemm_problem *problem, const gemm_product *p, int walked)
{
  gemm_leading a, b, c;
  if (!gemm_leading_of(&a, &p->a, p->m, p->k) || !gemm_leading_of(&b, &p->b, p->k, p->n) ||
      !gemm_leading_of(&c, &p->c, p->m, p->n) || c.transposed)
    return false;
  *problem = (gemm_problem){
    .m = p->n, .n = p->m, .k = p->k, .batch = 1,
    .type_a = p->b.dtype, .type_b = p->a.dtype, .type_c = p->c.dtype,
    .transpose_a = b.transposed, .transpose_b = a.transposed,
    .lda = b.ld, .ldb = a.ld, .ldc = c.ld,
    .align_a = batch_alignment(p, &p->b),
    .align_b = batch_alignment(p, &p->a),
    .align_c = batch_alignment(p, &p->c),
    .bias = p->bias ? p->bias_dtype : -1,
    .accumulate = p->accumulate, .after = p->after,
  };
  if (walked >= 0) {
    problem->batch = p->batch[walked];
    problem->stride_a = p->b.batch[walked];
    problem->stride_b = p->a.batch[walked];
    problem->stride_c = p->c.batch[walked];
  }
  return true;
}

int gemm_walked_dim(const gemm_product *p)
{
  int best = -1;
  for (int d = 0; d < p->batch_dims; d++)
    if (best < 0 || p->batch[d] > p->batch[best]) best = d;
  return best;
}

void *gemm_data_at(const gemm_product *p, const gemm_matrix *x, const int64_t *at)
{
  int64_t offset = 0;
  for (int d = 0; d < p->batch_dims; d++) offset += at[d] * x->batch[d];
  return (char *)x->data + offset * eng_dtype_size(x->dtype);
}

bool gemm_next(const gemm_product *p, int walked, int64_t *at)
{
  for (int d = p->batch_dims - 1; d >= 0; d--) {
    if (d == walked) continue;
    if (++at[d] < p->batch[d]) return true;
    at[d] = 0;
  }
  return false;
}
