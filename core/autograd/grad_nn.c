// Gradient rules of products, norms, attention and losses. A kernel that can add to its output
// writes a parameter's gradient directly into the buffer that holds the gradients of its parameter
// set (grad_target). Called by backward.c, grad_vision.c and fp8/attention.c.
#include "base/error.h"
#include "op.h"
#include "gradient.h"

#include <string.h>

// ---- products

/// Computes the gradient of input k as the product of a and b, either of which may be transposed.
/// Writes into the parameter's gradient buffer if grad_target returns it. The dtype is f32 if
/// grad_emit sums the result over batch dimensions.
static eng_status product_to(grad_call *g, int k, tensor *a, tensor *b, bool transpose_a,
                             bool transpose_b)
{
  tensor *x = g->call->in[k];
  op_call c = {
    .op = ENG_OP_matmul, .n_in = 2,
    .in = {a, b},
    .matmul = {
      .transpose_a = transpose_a, .transpose_b = transpose_b, .yields = grad_dtype(g, k) + 1}};
  op_shape s;
  ENG_TRY(op_infer(&c, &s));
  bool summed = s.out[0].ndim != x->ndim ||
                memcmp(s.out[0].shape, x->shape, (size_t)x->ndim * sizeof *x->shape) != 0;
  if (summed && x->dtype != ENG_f64) c.matmul.yields = ENG_f32 + 1;
  if (a->ndim == 2 && b->ndim == 2) return grad_run_to(g, k, &c, &c.matmul.add);
  ENG_TRY(op_run(&c));
  return grad_emit(g, k, c.out[0]);
}

eng_status grad_matmul(grad_call *g)
{
  tensor *a = g->call->in[0], *b = g->call->in[1], *dy = g->dy[0];
  bool ta = g->call->matmul.transpose_a, tb = g->call->matmul.transpose_b;
  if (grad_wants(g, 0)) {
    if (!ta) ENG_TRY(product_to(g, 0, dy, b, false, !tb));
    else     ENG_TRY(product_to(g, 0, b, dy, tb, true));
  }
  if (grad_wants(g, 1)) {
    if (!tb) return product_to(g, 1, a, dy, !ta, false);
    return product_to(g, 1, dy, a, true, ta);
  }
  return ENG_OK;
}

/// Emits dx = dy w, the gradient of a linear layer's input 0, x [.. x K]. dy is [rows x N], w is
/// [N x K].
static eng_status input_gradient(grad_call *g, tensor *dy, tensor *w)
{
  const tensor *x = g->call->in[0];
  op_call c = {
    .op = ENG_OP_matmul, .n_in = 2, .in = {dy, w}, .matmul = {.yields = grad_dtype(g, 0) + 1}};
  ENG_TRY(op_run(&c));
  tensor *dx;
  ENG_TRY(op_reshape(&dx, c.out[0], x->ndim, x->shape));
  tensor_drop(c.out[0]);
  return grad_emit(g, 0, dx);
}

/// Emits the gradients of a linear layer's weight (input w) and bias (input w + 1) from dy [rows x
/// N] and x [rows x K]: dy^T x and the column sums of dy.
static eng_status weight_gradients(grad_call *g, int w, tensor *dy, tensor *x)
{
  const int b = w + 1;
  if (!grad_wants(g, b)) return grad_wants(g, w) ? product_to(g, w, dy, x, true, false) : ENG_OK;
  if (!grad_wants(g, w)) {
    op_call c = {.op = ENG_OP_bias_grad, .n_in = 1, .in = {dy},
                 .bias_grad = {.dtype = grad_dtype(g, b)}};
    return grad_run_to(g, b, &c, &c.bias_grad.add);
  }
  bool adds[2] = {false, false}, direct[2];
  op_call c = {.op = ENG_OP_linear_grad, .n_in = 2, .in = {dy, x}};
  for (int k = 0; k < 2; k++) {
    c.out[k] = grad_target(g, w + k, &adds[k]);
    direct[k] = c.out[k] != NULL;
    c.linear_grad.dtype[k] = grad_dtype(g, w + k);
    c.linear_grad.add[k] = adds[k];
  }
  eng_status status = op_run(&c);
  for (int k = 0; k < 2; k++) {
    if (status != ENG_OK && direct[k]) grad_target_failed(g, w + k, adds[k]);
    if (status == ENG_OK && !direct[k]) status = grad_emit(g, w + k, c.out[k]);
  }
  return status;
}

// y = x W^T + b: dx = dy W, dW = dy^T x, db = column sums of dy
eng_status grad_linear(grad_call *g)
{
  OWNED tensor *x = NULL, *dy = NULL;
  ENG_TRY(op_rows(&x, g->call->in[0]));
  ENG_TRY(op_rows(&dy, g->dy[0]));
  if (grad_wants(g, 0)) ENG_TRY(input_gradient(g, dy, g->call->in[1]));
  return weight_gradients(g, 1, dy, x);
}

// y = gelu(u) W2^T + b2, u = x W1^T + b1. Both linear layers have the rule of linear. Between them,
// du = gelu'(u) (dy W2).
eng_status grad_mlp_gelu(grad_call *g)
{
  const op_call *y = g->call;
  OWNED tensor *dy = NULL, *h = NULL, *x = NULL, *u = NULL, *du = NULL;
  ENG_TRY(op_rows(&dy, g->dy[0]));
  ENG_TRY(op_rows(&h, y->out[2]));
  ENG_TRY(weight_gradients(g, 3, dy, h));
  if (!grad_wants(g, 0) && !grad_wants(g, 1) && !grad_wants(g, 2)) return ENG_OK;
  ENG_TRY(op_rows(&x, y->in[0]));
  ENG_TRY(op_rows(&u, y->out[1]));
  ENG_TRY(op_run1(&du, (op_call){.op = ENG_OP_matmul_gelu_grad, .in = {dy, y->in[3], u}}));
  ENG_TRY(weight_gradients(g, 1, du, x));
  return grad_wants(g, 0) ? input_gradient(g, du, y->in[1]) : ENG_OK;
}

eng_status grad_embedding(grad_call *g)
{
  if (!grad_wants(g, 0)) return ENG_OK;
  op_call c = {.op = ENG_OP_embedding_grad, .n_in = 2, .in = {g->dy[0], g->call->in[1]},
               .embedding_grad = {.rows = g->call->in[0]->shape[0], .dtype = grad_dtype(g, 0)}};
  return grad_run_to(g, 0, &c, &c.embedding_grad.add);
}

// ---- norms

/// Runs a norm's backward kernel and emits the gradients of weight and bias. `weight` is the index
/// of the weight among the node's inputs; the bias follows it. The caller emits dx. The attributes
/// of all norms' gradients begin with dtype and affine, so c->layer_norm_grad names them here.
static eng_status norm_vectors(tensor **dx, grad_call *g, op_call *c, int weight)
{
  const op_call *y = g->call;
  bool affine = false;
  for (int k = weight; k < y->n_in; k++) affine |= grad_wants(g, k);
  c->layer_norm_grad.dtype = y->in[weight] && y->in[weight]->dtype == ENG_f64 ? ENG_f64 : ENG_f32;
  c->layer_norm_grad.affine = affine;
  ENG_TRY(op_run(c));
  for (int k = weight; k < y->n_in; k++) ENG_TRY(grad_emit(g, k, c->out[1 + k - weight]));
  *dx = c->out[0];
  return ENG_OK;
}

eng_status grad_norm_of(grad_call *g, op_call *c)
{
  tensor *dx;
  ENG_TRY(norm_vectors(&dx, g, c, 1));
  return grad_emit(g, 0, dx);
}

eng_status grad_layer_norm(grad_call *g)
{
  const op_call *y = g->call;
  op_call c = {.op = ENG_OP_layer_norm_grad, .n_in = 5,
               .in = {y->in[0], y->in[1], y->out[1], y->out[2], g->dy[0]}};
  return grad_norm_of(g, &c);
}

eng_status grad_rms_norm(grad_call *g)
{
  const op_call *y = g->call;
  op_call c = {
    .op = ENG_OP_rms_norm_grad, .n_in = 4, .in = {y->in[0], y->in[1], y->out[1], g->dy[0]}};
  return grad_norm_of(g, &c);
}

// sum = x + branch, y = norm(sum). Both x and branch receive the gradient of sum, which is dsum
// plus the gradient through the norm. The caller leaves dy and dsum out of `c` and sets c->op to
// the gradient of the norm alone; `added` is the operation that also adds dsum.
static eng_status add_norm(grad_call *g, op_call *c, int added)
{
  tensor *dsum = g->dy[1], *dx = NULL;
  if (g->dy[0]) {
    c->in[c->n_in++] = g->dy[0];
    if (dsum) {
      c->op = added;
      c->in[c->n_in++] = dsum;
    }
    ENG_TRY(norm_vectors(&dx, g, c, 2));
    dsum = dx;
  }
  for (int k = 0; k < 2; k++)
    if (grad_wants(g, k)) ENG_TRY(grad_emit_shared(g, k, dsum));
  tensor_drop(dx);
  return ENG_OK;
}

eng_status grad_add_layer_norm(grad_call *g)
{
  const op_call *y = g->call;
  op_call c = {
    .op = ENG_OP_layer_norm_grad, .n_in = 4, .in = {y->out[1], y->in[2], y->out[2], y->out[3]}};
  return add_norm(g, &c, ENG_OP_add_layer_norm_grad);
}

eng_status grad_add_rms_norm(grad_call *g)
{
  const op_call *y = g->call;
  op_call c = {.op = ENG_OP_rms_norm_grad, .n_in = 3, .in = {y->out[1], y->in[2], y->out[2]}};
  return add_norm(g, &c, ENG_OP_add_rms_norm_grad);
}

// ---- attention

/// If q, k and v are adjacent parts of one projection [B x T x (H+2G)D] along its last dimension,
/// allocates one tensor of this shape and makes their gradients views of its parts, so that split's
/// gradient need not copy.
static eng_status joint_gradients(op_call *c)
{
  const tensor *q = c->in[0], *last = NULL;
  int64_t T = q->shape[1], D = q->shape[3], width = 0, size = eng_dtype_size(q->dtype);
  for (int k = 0; k < 3; k++) width += c->in[k]->shape[2] * D;
  const int64_t stride[4] = {T * width, width, D, 1};
  for (int k = 0; k < 3; k++) {
    const tensor *x = c->in[k];
    bool beside = !last || (char *)x->data == (char *)last->data + last->shape[2] * D * size;
    if (x->store != q->store || x->dtype != q->dtype || x->shape[1] != T ||
        memcmp(x->stride, stride, sizeof stride) != 0 || !beside)
      return ENG_OK;
    last = x;
  }
  tensor *joint;
  ENG_TRY(tensor_make(&joint, ARENA_STEP, q->dtype, 3, (int64_t[]){q->shape[0], T, width}));
  eng_status status = ENG_OK;
  for (int64_t k = 0, at = 0; k < 3 && status == ENG_OK; at += c->in[k]->shape[2] * D, k++)
    status = tensor_view(&c->out[k], joint, at, 4, c->in[k]->shape, stride);
  tensor_drop(joint);
  return status;
}

eng_status grad_attention_of(grad_call *g, tensor *out)
{
  const op_call *y = g->call;
  op_call c = {.op = ENG_OP_attention_grad, .n_in = 6,
               .in = {y->in[0], y->in[1], y->in[2], out, y->out[1], g->dy[0]},
               .attention_grad = {.causal = y->attention.causal, .scale = y->attention.scale}};
  eng_status status = ENG_OK;
  if (grad_wants(g, 0) && grad_wants(g, 1) && grad_wants(g, 2)) status = joint_gradients(&c);
  if (status == ENG_OK) status = op_run(&c);
  if (status != ENG_OK) {
    for (int k = 0; k < 3; k++) tensor_drop(c.out[k]);
    return status;
  }
  for (int k = 0; k < 3; k++) ENG_TRY(grad_emit(g, k, c.out[k]));
  return ENG_OK;
}

eng_status grad_attention(grad_call *g) { return grad_attention_of(g, g->call->out[0]); }

// The gradient of a rotation is the inverse rotation.
eng_status grad_rope(grad_call *g)
{
  op_call back = {.op = ENG_OP_rope, .in = {g->dy[0]}, .rope = g->call->rope};
  back.rope.backward = !back.rope.backward;
  return grad_emit_op(g, 0, back);
}

// ---- softmax and losses

static eng_status from_output(grad_call *g, int op)
{
  return grad_emit_op(g, 0, (op_call){.op = op, .in = {g->call->out[0], g->dy[0]},
                                      .softmax_grad = {.dtype = grad_dtype(g, 0)}});
}

eng_status grad_softmax(grad_call *g)     { return from_output(g, ENG_OP_softmax_grad); }
eng_status grad_log_softmax(grad_call *g) { return from_output(g, ENG_OP_log_softmax_grad); }

// d logsumexp(x) / dx = softmax(x) = exp(x - y)
eng_status grad_logsumexp(grad_call *g)
{
  tensor *p, *dy, *dx;
  int64_t shape[ENG_MAX_DIMS];
  memcpy(shape, g->dy[0]->shape, (size_t)g->dy[0]->ndim * sizeof *shape);
  shape[g->dy[0]->ndim] = 1;
  ENG_TRY(grad_run_wide(&p, (op_call){.op = ENG_OP_softmax, .in = {g->call->in[0]}}));
  ENG_TRY(op_reshape(&dy, g->dy[0], g->dy[0]->ndim + 1, shape));
  ENG_TRY(op_run1(&dx, (op_call){.op = ENG_OP_mul, .in = {p, dy}}));
  tensor_drop(p);
  tensor_drop(dy);
  return grad_emit(g, 0, dx);
}

/// Whether dx may be written over x: the script has released every tensor in x's memory (eng_done),
/// and no gradient rule that still has to run reads this memory. Only the CPU's kernels support
/// this.
static bool can_overwrite(const grad_call *g, const tensor *x)
{
  const storage *s = x->store;
  return g->last && s->space == SPACE_HOST && s->arena == ARENA_STEP && s->memory &&
         s->done == s->references && x->dtype != ENG_f64 && tape_holds(x) && x->count > 0 &&
         s->bytes == x->count * eng_dtype_size(x->dtype) &&
         !tape_reads(s, 0, g->call->out[0]->node);
}

eng_status grad_cross_entropy(grad_call *g)
{
  const op_call *y = g->call;
  op_call c = {.op = ENG_OP_cross_entropy_grad, .n_in = 4,
               .in = {y->in[0], y->in[1], y->out[1], g->dy[0]}, .cross_entropy = y->cross_entropy};
  tensor *x = y->in[0], *over = NULL;
  if (can_overwrite(g, x)) {
    ENG_TRY(tensor_make_done(&over, x->dtype, x->ndim, x->shape));
    over->data = x->data;
    c.out[0] = over;
  }
  eng_status status = op_run(&c);
  if (over && status == ENG_OK) {   // the memory of x becomes the memory of its gradient
    over->done = false;
    *over->store = *x->store;
    over->store->references = 1;
    over->store->done = over->store->segment = 0;
    x->store->memory = x->data = NULL;
    x->store->bytes = 0;
  }
  if (status != ENG_OK) tensor_drop(over);
  return status == ENG_OK ? grad_emit(g, 0, c.out[0]) : status;
}

// mean (a - b)^2: da = 2 (a - b) dy / n, db = -da
eng_status grad_mse(grad_call *g)
{
  tensor *a = g->call->in[0], *b = g->call->in[1], *difference, *factor, *da;
  // The difference has the dtype of the loss: f32 even if the inputs are f16 or bf16.
  ENG_TRY(tensor_make(&difference, ARENA_STEP, g->dy[0]->dtype, a->ndim, a->shape));
  op_call minus = {.op = ENG_OP_sub, .n_in = 2, .in = {a, b}, .out = {difference}};
  ENG_TRY(op_run(&minus));
  ENG_TRY(op_affine(&factor, g->dy[0], 2.0 / (double)(a->count ? a->count : 1), 0));
  ENG_TRY(op_run1(&da, (op_call){.op = ENG_OP_mul, .in = {difference, factor}}));
  tensor_drop(difference);
  tensor_drop(factor);
  if (grad_wants(g, 1)) {
    op_call minus_da = {.op = ENG_OP_affine, .in = {da}, .affine = {.factor = -1}};
    ENG_TRY(grad_emit_op(g, 1, minus_da));
  }
  return grad_emit(g, 0, da);
}
