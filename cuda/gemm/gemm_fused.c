// The operations mlp_gelu, matmul_gelu_grad and linear_grad on the card: products with an operation
// before or after them. One cuBLASLt kernel with an epilogue can compute product and operation,
// which saves writing and reading a matrix. If there is no such kernel, or if it is slower, product
// and operation run separately: first gemm.c, then the kernels of unary.cu and bias_grad.cu.
//
// GELU and its slope are fused only for f16 and bf16, for which cuBLASLt's tanh is accurate enough.
// Column sums are fused only for f16 and bf16 inputs and an f32 product: a fused kernel stores the
// sums in the product's format, and a narrower format would round them earlier than bias_grad.cu
// does. ENGINE_CUBLASLT_FUSE=0 disables fusion. Called through the device's table.
#include "runtime/device.h"
#include "gemm.h"
#include "gemm_lt.h"

#include <limits.h>

op_kernel cuda_linear, cuda_gelu_tanh, cuda_unary_grad, cuda_bias_grad, cuda_mlp_gelu,
  cuda_matmul_gelu_grad, cuda_linear_grad;

// The estimated cost of a separate pass: the bytes that it moves per nanosecond, and a fixed cost
// in nanoseconds.
enum { PASS_BYTES = 3000, PASS_START = 3000 };

/// Returns a matrix that describes a tensor [.. x columns] without gaps.
static gemm_matrix matrix_of_rows(const tensor *x)
{
  return (gemm_matrix){
    .data = x->data, .dtype = x->dtype, .row = x->shape[x->ndim - 1], .column = 1};
}

// ------------------------------------------------------------------ in one kernel

static bool can_fuse(const gemm_product *p)
{
  int dtype = p->a.dtype;
  bool sums = p->after == GEMM_BIAS_GRAD;
  if ((dtype != ENG_f16 && dtype != ENG_bf16) || p->b.dtype != dtype ||
      p->c.dtype != (sums ? ENG_f32 : dtype) || !is_on("ENGINE_CUBLASLT_FUSE", true))
    return false;
  if (p->k == 0 || p->m > INT_MAX || p->n > INT_MAX || p->k > INT_MAX ||
      gemm_alignment(p->side) != 16)
    return false;
  if (p->bias && (p->bias_dtype != dtype || gemm_alignment(p->bias) != 16)) return false;
  // If rows are unaligned, some kernels of cuBLASLt round the sum before the epilogue (gemm.c).
  // cuBLASLt also requires aligned rows of u.
  return sums || (gemm_rows_aligned(&p->a, p->m, p->k) && gemm_rows_aligned(&p->b, p->k, p->n) &&
                  gemm_rows_aligned(&p->c, p->m, p->n));
}

/// Runs the product and p->after in one kernel. Sets *done to false, with the output unspecified,
/// if no kernel computes both or if separate passes are faster. `bytes` is the additional memory
/// traffic of separate passes.
static eng_status fused(bool *done, const gemm_product *p, int64_t bytes)
{
  *done = false;
  gemm_problem problem;
  if (!can_fuse(p) || !gemm_describe(&problem, p, -1)) return ENG_OK;
  gemm_operands on = {
    .a = p->b.data, .b = p->a.data, .c = p->c.data, .bias = p->bias, .side = p->side};
  int64_t together, alone;
  ENG_TRY(gemm_lt_time(&together, &problem, &on));
  if (together < 0) return ENG_OK;
  if (together > 0) {
    gemm_problem bare = problem;
    bare.after = GEMM_AS_IT_IS;
    ENG_TRY(gemm_lt_time(&alone, &bare, &on));
    if (alone > 0 && together > alone + bytes / PASS_BYTES + PASS_START) return ENG_OK;
  }
  return gemm_lt_run(done, &problem, &on);
}

// ------------------------------------------------------------------ the operations

// h = gelu(u), u = x W^T + bias
static eng_status linear_gelu(tensor *h, tensor *u, tensor *x, tensor *w, tensor *bias)
{
  op_call linear = {.op = ENG_OP_linear, .n_in = 3, .n_out = 1, .in = {x, w, bias}, .out = {u}};
  op_call gelu = simple_call(ENG_OP_gelu_tanh, u, NULL, h);
  gemm_product p = gemm_of_linear(&linear);
  bool done;
  p.after = GEMM_GELU;
  p.c = matrix_of_rows(h);
  p.side = u->data;
  ENG_TRY(fused(&done, &p, 2 * u->count * eng_dtype_size(u->dtype)));
  if (done) return ENG_OK;
  ENG_TRY(cuda_linear(&linear));
  return cuda_gelu_tanh(&gelu);
}

eng_status cuda_mlp_gelu(const op_call *call)
{
  tensor *y = call->out[0], *u = call->out[1], *h = call->out[2];
  op_call down = {
    .op = ENG_OP_linear, .n_in = 3, .n_out = 1, .in = {h, call->in[3], call->in[4]}, .out = {y}};
  if (u->count > 0) ENG_TRY(linear_gelu(h, u, call->in[0], call->in[1], call->in[2]));
  return y->count > 0 ? cuda_linear(&down) : ENG_OK;
}

// du = gelu'(u) * (dy W). If the product and gelu' run as separate passes, dy W is kept in f32 (f64
// for f64).
eng_status cuda_matmul_gelu_grad(const op_call *call)
{
  tensor *dy = call->in[0], *w = call->in[1], *u = call->in[2], *du = call->out[0];
  gemm_product p = {.m = rows_of(dy),
                    .n = w->shape[1],
                    .k = w->shape[0],
                    .a = matrix_of_rows(dy),
                    .b = matrix_of_rows(w),
                    .c = matrix_of_rows(du),
                    .after = GEMM_GELU_GRAD,
                    .side = u->data};
  bool done;
  ENG_TRY(fused(&done, &p, 8 * u->count));
  if (done) return ENG_OK;
  tensor dh = *u;   // without gaps, like all inputs here
  dh.dtype = u->dtype == ENG_f64 ? ENG_f64 : ENG_f32;
  int64_t bytes = dh.count * eng_dtype_size(dh.dtype);
  dh.data = scratch_take(bytes);
  if (!dh.data) return ENG_ERR_MEMORY;
  op_call slope = {.op = ENG_OP_unary_grad, .n_in = 2, .n_out = 1, .in = {u, &dh}, .out = {du},
                   .unary_grad = {.of = ENG_OP_gelu_tanh, .dtype = du->dtype}};
  p.c = matrix_of_rows(&dh);
  p.after = GEMM_AS_IT_IS;
  eng_status status = gemm_run(&p);
  if (status == ENG_OK) status = cuda_unary_grad(&slope);
  scratch_give(dh.data, bytes);
  return status;
}

/// Sets db to the column sums of x or, with `add`, adds the sums to db. The formats may differ.
static eng_status column_sums(tensor *db, tensor *x, bool add)
{
  op_call call = {.op = ENG_OP_bias_grad, .n_in = 1, .n_out = 1, .in = {x}, .out = {db},
                  .bias_grad = {.dtype = db->dtype, .add = add}};
  return cuda_bias_grad(&call);
}

// Computes dW = dy^T x and db = the column sums of dy. If linear_grad.add[0] is set, dW is added to
// the previous contents of its output. If add[1] is set, the same holds for db.
eng_status cuda_linear_grad(const op_call *call)
{
  tensor *dy = call->in[0], *x = call->in[1], *dw = call->out[0], *db = call->out[1];
  bool add = call->linear_grad.add[1] != 0;
  gemm_matrix rows = matrix_of_rows(dy);
  gemm_product p = {.m = dw->shape[0],
                    .n = dw->shape[1],
                    .k = rows_of(dy),
                    .a = rows,
                    .b = matrix_of_rows(x),
                    .c = matrix_of_rows(dw),
                    .accumulate = call->linear_grad.add[0] != 0,
                    .after = GEMM_BIAS_GRAD};
  p.a.row = 1;
  p.a.column = rows.row;
  if (dw->count == 0) return db->count > 0 ? column_sums(db, dy, add) : ENG_OK;
  // cuBLASLt stores the sums only in aligned f32 memory, and cannot add them to db. If db needs
  // anything else, the sums go to scratch memory, and column_sums stores them in db or adds them.
  tensor sums = {.dtype = ENG_f32, .ndim = 2, .count = p.m, .shape = {1, p.m}, .stride = {p.m, 1}};
  bool direct = db->dtype == ENG_f32 && !add && gemm_alignment(db->data) == 16, done;
  int64_t bytes = p.m * (int64_t)sizeof(float);
  sums.data = direct ? db->data : scratch_take(bytes);
  if (!sums.data) return ENG_ERR_MEMORY;
  p.side = sums.data;
  eng_status status = fused(&done, &p, dy->count * eng_dtype_size(dy->dtype));
  if (status == ENG_OK && done && !direct) status = column_sums(db, &sums, add);
  if (!direct) scratch_give(sums.data, bytes);
  if (status != ENG_OK || done) return status;
  p.after = GEMM_AS_IT_IS;
  ENG_TRY(gemm_run(&p));
  return column_sums(db, dy, add);
}
