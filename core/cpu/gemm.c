// The CPU kernels of matmul, linear, mlp_gelu, and the products and column sums in their gradients.
// A kernel of a product turns its tensors into a gemm_call: transposes become strides, and batch
// dimensions that B lacks become rows of A if the strides allow it. Then `run` picks the path.
// gemm.h lists the paths and their guarantees. Called through the backend table; owns nothing.
//
// oneDNN is used only for bf16 on processors with AMX; elsewhere it was no faster. On Intel's
// AVX-512 processors, the packed path was within a few percent of oneDNN in f32, and 1.8 times as
// fast in bf16. On AMD's, the path `pairs` was as fast as oneDNN in bf16.
#include "gemm.h"

#include "base/error.h"
#include "rows.h"
#include "simd.h"

enum { APART_FLOATS = 1 << 20 };   // roughly how many f32 sums onednn_and_after keeps at a time

// Applies g->after to rows [i0, i0+rows) of C. `sums` [rows x n] holds the f32 sums of these rows,
// including the bias.
static void finish_apart(const gemm_call *g, const float *sums, int64_t i0, int64_t rows)
{
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < rows; i++) {
    float u[TILE], out[TILE];
    for (int64_t j = 0; j < g->n; j += TILE) {
      int64_t at = (i0 + i) * g->c_row + j;
      const float *x = sums + i * g->n + j;
      int n = (int)smaller(TILE, g->n - j);
      bool slope = g->after == GEMM_GELU_GRAD;
      if (!slope) floats_to(g->c, g->c_dtype, at, x, n);
      const float *from = tile_load(u, slope ? g->side : g->c, g->c_dtype, at, n);
      if (slope) MAP2(out, from, x, n, vf_mul(vf_gelu_tanh_derivative(a), b));
      else MAP1(out, from, n, vf_gelu_tanh(a));
      floats_to(slope ? g->c : g->side, g->c_dtype, at, out, n);
    }
  }
}

// Runs the product through oneDNN, some rows at a time, and applies g->after to these rows while
// their sums are in cache.
static eng_status onednn_and_after(bool *done, const gemm_call *g)
{
  if (g->after == GEMM_AS_IT_IS) return gemm_onednn(done, g);
  int64_t step = smaller(g->m, larger(64, APART_FLOATS / larger(1, g->n) / 64 * 64));
  SCRATCH(float, sums, step * g->n);
  gemm_call piece = *g;
  piece.after = GEMM_AS_IT_IS;
  piece.c = sums;
  piece.c_dtype = ENG_f32;
  piece.c_row = g->n;
  for (int64_t i = 0; i < g->m; i += step) {
    piece.m = smaller(step, g->m - i);
    piece.a.data = (const char *)g->a.data + i * g->a.row * eng_dtype_size(g->a.dtype);
    ENG_TRY(gemm_onednn(done, &piece));
    if (!*done) break;
    finish_apart(g, sums, i, piece.m);
  }
  return ENG_OK;
}

// ------------------------------------------------------------------ matmul

// Drops batch dimensions of size 1. Turns batch dimensions that B lacks into rows of A if the
// strides allow it.
static void simplify(gemm_call *g)
{
  int kept = 0;
  for (int d = 0; d < g->batch_dims; d++) {
    if (g->batch[d] == 1) continue;
    g->batch[kept] = g->batch[d];
    g->a.batch[kept] = g->a.batch[d];
    g->b.batch[kept] = g->b.batch[d];
    g->c_batch[kept++] = g->c_batch[d];
  }
  while (kept > 0 && g->b.batch[kept - 1] == 0 && g->c_batch[kept - 1] == g->m * g->c_row &&
         (g->a.batch[kept - 1] == g->m * g->a.row || g->m == 1)) {
    kept--;
    if (g->m == 1) {
      g->a.row = g->a.batch[kept];
      g->c_row = g->c_batch[kept];
    }
    g->m *= g->batch[kept];
  }
  g->batch_dims = kept;
  // The stride of a dimension of size 1 is never used. Setting it to 1 selects the faster way to
  // read.
  if (g->k == 1) g->a.column = g->b.row = 1;
  if (g->m == 1 && g->a.column != 1) g->a.row = 1;
  if (g->n == 1 && g->b.row != 1) g->b.column = 1;
}

// Computes a product through oneDNN where that is faster, else by the packed path.
static eng_status run(gemm_call g)
{
  simplify(&g);
  if (gemm_onednn_prefers(&g)) {
    bool done;
    ENG_TRY(onednn_and_after(&done, &g));
    if (done) return ENG_OK;
  }
  return ISA_NAME(gemm_packed)(&g);
}

static gemm_operand operand_of(const tensor *x, bool transposed, int batch_dims)
{
  int64_t last = x->stride[x->ndim - 1], before = x->stride[x->ndim - 2];
  gemm_operand o = {.data = x->data, .dtype = x->dtype};
  o.row = transposed ? last : before;
  o.column = transposed ? before : last;
  int own = x->ndim - 2;
  for (int d = 0; d < own; d++) o.batch[batch_dims - own + d] = x->shape[d] == 1 ? 0 : x->stride[d];
  return o;
}

KERNEL(matmul)
{
  const tensor *a = call->in[0], *b = call->in[1], *c = call->out[0];
  int64_t c_column = c->stride[c->ndim - 1];
  bool fast = dtype_is_fast(a->dtype) && dtype_is_fast(b->dtype) && dtype_is_fast(c->dtype) &&
              (c_column == 1 || c->shape[c->ndim - 1] <= 1);
  if (!fast) return forward_to_reference(call);
  gemm_call g = {.batch_dims = c->ndim - 2, .add = call->matmul.add != 0};
  g.m = c->shape[c->ndim - 2];
  g.n = c->shape[c->ndim - 1];
  g.k = a->shape[a->ndim - (call->matmul.transpose_a ? 2 : 1)];
  g.a = operand_of(a, call->matmul.transpose_a != 0, g.batch_dims);
  g.b = operand_of(b, call->matmul.transpose_b != 0, g.batch_dims);
  g.c = c->data;
  g.c_dtype = c->dtype;
  g.c_row = c->stride[c->ndim - 2];
  for (int d = 0; d < g.batch_dims; d++) {
    g.batch[d] = c->shape[d];
    g.c_batch[d] = c->stride[d];
  }
  return run(g);
}

// Views a contiguous tensor [.. x columns] as a matrix.
static gemm_operand rows_operand(const tensor *x)
{
  return (gemm_operand){
    .data = x->data, .dtype = x->dtype, .row = x->shape[x->ndim - 1], .column = 1};
}

static gemm_operand turned(gemm_operand x)
{
  int64_t row = x.row;
  x.row = x.column;
  x.column = row;
  return x;
}

// Describes the product c [rows x n] = a [rows x k] times b [k x n] + bias.
static gemm_call product_of_rows(const tensor *c, const gemm_operand *a, const gemm_operand *b,
                                 int64_t rows, int64_t k, const tensor *bias)
{
  int64_t n = c->shape[c->ndim - 1];
  gemm_call g = {.m = rows, .n = n, .k = k, .a = *a, .b = *b, .c = c->data, .c_dtype = c->dtype,
                 .c_row = n};
  if (bias) {
    g.bias = bias->data;
    g.bias_dtype = bias->dtype;
  }
  return g;
}

// Describes the product y [.. x N] = x [.. x K] W^T + bias, where W is [N x K].
static gemm_call product_of_linear(const tensor *y, const tensor *x, const tensor *w,
                                   const tensor *bias)
{
  gemm_operand a = rows_operand(x), b = turned(rows_operand(w));
  return product_of_rows(y, &a, &b, row_count(x), w->shape[1], bias);
}

KERNEL(linear)
{
  if (!all_fast(call)) return forward_to_reference(call);
  return run(product_of_linear(call->out[0], call->in[0], call->in[1], call->in[2]));
}

// Computes u = x W1^T + b1, h = gelu(u) and y = h W2^T + b2. The first product writes both u and h.
KERNEL(mlp_gelu)
{
  if (!all_fast(call)) return forward_to_reference(call);
  const tensor *y = call->out[0], *u = call->out[1], *h = call->out[2];
  gemm_call up = product_of_linear(u, call->in[0], call->in[1], call->in[2]);
  up.after = GEMM_GELU;
  up.side = h->data;
  ENG_TRY(run(up));
  return run(product_of_linear(y, h, call->in[3], call->in[4]));
}

// Computes du [.. x H] = gelu'(u) * (dy [.. x N] W), where W is [N x H].
KERNEL(matmul_gelu_grad)
{
  if (!all_fast(call)) return forward_to_reference(call);
  const tensor *dy = call->in[0], *w = call->in[1], *u = call->in[2];
  gemm_operand a = rows_operand(dy), b = rows_operand(w);
  gemm_call g = product_of_rows(call->out[0], &a, &b, row_count(dy), w->shape[0], NULL);
  g.after = GEMM_GELU_GRAD;
  g.side = u->data;
  return run(g);
}

// ------------------------------------------------------------------ bias_grad

enum {
  SUM_ROWS = 128,               // rows summed at a time; fixes the order of the sum
  SUM_VECTORS = 4,              // vectors of columns summed at a time
  SUM_COLUMNS = SUM_VECTORS * VF_LANES,
};

// Writes the sum of rows [first, first+rows) of dy [.. x n] to sums [n]. dtype is constant where
// this is inlined.
VF_INLINE void sum_rows(float *sums, const void *dy, const int dtype, int64_t first, int64_t rows,
                        int64_t n)
{
  int64_t j = 0;
  for (; j + SUM_COLUMNS <= n; j += SUM_COLUMNS) {
    vf sum[SUM_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < SUM_VECTORS; v++) sum[v] = vf_zero();
    for (int64_t i = first; i < first + rows; i++) {
#pragma GCC unroll 4
      for (int v = 0; v < SUM_VECTORS; v++)
        sum[v] = vf_add(sum[v], vf_read(dy, dtype, i * n + j + v * VF_LANES, VF_LANES));
    }
#pragma GCC unroll 4
    for (int v = 0; v < SUM_VECTORS; v++) vf_store(sums + j + v * VF_LANES, sum[v]);
  }
  for (; j < n; j += VF_LANES) {
    int left = (int)smaller(VF_LANES, n - j);
    vf sum = vf_zero();
    for (int64_t i = first; i < first + rows; i++)
      sum = vf_add(sum, vf_read(dy, dtype, i * n + j, left));
    vf_store_n(sums + j, sum, left);
  }
}

// Writes the sum of dy's rows to db [n] or, with `add`, adds it to db. Each block of SUM_ROWS rows
// is summed separately, and then the blocks are added in order, so the bits do not depend on the
// number of threads.
KERNEL(bias_grad)
{
  const tensor *dy = call->in[0], *db = call->out[0];
  if (!all_fast(call)) return forward_to_reference(call);
  int64_t n = dy->shape[dy->ndim - 1], rows = row_count(dy), blocks = ceiling(rows, SUM_ROWS);
  SCRATCH(float, partial, (blocks + 1) * n);
  float *total = partial + blocks * n;
#pragma omp parallel for schedule(static) if (rows * n > 1 << 16)
  for (int64_t block = 0; block < blocks; block++) {
    int64_t first = block * SUM_ROWS, count = smaller(SUM_ROWS, rows - first);
    if (dy->dtype == ENG_f32) sum_rows(partial + block * n, dy->data, ENG_f32, first, count, n);
    else if (dy->dtype == ENG_f16)
      sum_rows(partial + block * n, dy->data, ENG_f16, first, count, n);
    else sum_rows(partial + block * n, dy->data, ENG_bf16, first, count, n);
  }
  sum_rows(total, partial, ENG_f32, 0, blocks, n);
  float old[TILE];
  for (int64_t j = 0; call->bias_grad.add && j < n; j += TILE) {
    int count = (int)smaller(TILE, n - j);
    const float *before = tile_load(old, db->data, db->dtype, j, count);
    for (int i = 0; i < count; i++) total[j + i] += before[i];
  }
  floats_to(db->data, db->dtype, 0, total, n);
  return ENG_OK;
}

// Computes dW [N x K] = dy^T x from dy [.. x N] and x [.. x K] or, with `add`, adds it to dW. Then
// computes db as bias_grad does.
KERNEL(linear_grad)
{
  if (!all_fast(call)) return forward_to_reference(call);
  const tensor *dy = call->in[0], *x = call->in[1], *dw = call->out[0];
  gemm_operand a = turned(rows_operand(dy)), b = rows_operand(x);
  gemm_call g = product_of_rows(dw, &a, &b, dw->shape[0], row_count(dy), NULL);
  g.add = call->linear_grad.add[0] != 0;
  ENG_TRY(run(g));
  op_call bias = {.op = ENG_OP_bias_grad, .n_in = 1, .n_out = 1, .in = {call->in[0]},
                  .out = {call->out[1]}, .bias_grad = {.dtype = call->linear_grad.dtype[1],
                                                       .add = call->linear_grad.add[1]}};
  return ISA_NAME(cpu_bias_grad)(&bias);
}
