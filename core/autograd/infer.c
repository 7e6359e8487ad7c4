// Shape and dtype rules: what each operation accepts, and the shapes and dtypes of its outputs. See
// op.h. This file has the rules of elementwise operations, reductions and indexing, and the table
// of all rules. Owns this table. Called by op.c, gradient.c, grad_nn.c and fp8/.
#include "base/error.h"
#include "base/numerics.h"
#include "infer.h"

#include <string.h>

// ---- elementwise operations, reductions

static eng_status broadcast(op_call *c, op_shape *s, int a, int b)
{
  int ndim;
  int64_t shape[ENG_MAX_DIMS];
  FAIL_IF(!shape_broadcast(&ndim, shape, c->in[a], c->in[b]), ENG_ERR_SHAPE,
          "%s: %s and %s do not broadcast: compared from the right, two sizes must be equal, or "
          "one of them must be 1",
          op_name(c), tensor_text(c->in[a]), tensor_text(c->in[b]));
  int dtype = dtype_promote(c->in[a]->dtype, c->in[b]->dtype);
  switch (c->op) {
    case ENG_OP_eq: case ENG_OP_ne: case ENG_OP_lt: case ENG_OP_le: case ENG_OP_gt: case ENG_OP_ge:
      dtype = ENG_bool;
      break;
    case ENG_OP_div: case ENG_OP_pow:
      if (!dtype_is_float(dtype)) dtype = ENG_f32;
      break;
    default:
      if (dtype == ENG_bool && c->op != ENG_OP_where) dtype = ENG_u8;
  }
  put_out(s, 0, dtype, ndim, shape);
  return ENG_OK;
}

eng_status infer_binary(op_call *c, op_shape *s) { return broadcast(c, s, 0, 1); }

eng_status infer_where(op_call *c, op_shape *s)
{
  FAIL_IF(c->in[0]->dtype != ENG_bool, ENG_ERR_DTYPE, "where: expected a bool condition, got %s; "
          "hint: compare first, as in x:gt(0)", tensor_text(c->in[0]));
  ENG_TRY(broadcast(c, s, 1, 2));
  tensor value = {.ndim = s->out[0].ndim};
  memcpy(value.shape, s->out[0].shape, sizeof value.shape);
  FAIL_IF(!shape_broadcast(&s->out[0].ndim, s->out[0].shape, c->in[0], &value), ENG_ERR_SHAPE,
          "where: the condition %s does not broadcast with %s", tensor_text(c->in[0]),
          tensor_shape_text(value.ndim, value.shape));
  return ENG_OK;
}

eng_status infer_pick(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0], *index = c->in[1];
  ENG_TRY(want_index(c, 1, "index"));
  ENG_TRY(want_ndim(c, 0, 1));
  ENG_TRY(fix_dim(c, &c->gather.dim, x));
  if (c->op == ENG_OP_index_select) {
    FAIL_IF(index->ndim != 1, ENG_ERR_SHAPE,
            "index_select: expected an index of one dimension, got %s", tensor_text(index));
    put_like(s, 0, x->dtype, x);
    s->out[0].shape[c->gather.dim] = index->shape[0];
    return ENG_OK;
  }
  bool fits = index->ndim == x->ndim;
  for (int d = 0; fits && d < x->ndim; d++)
    fits = d == c->gather.dim || index->shape[d] <= x->shape[d];
  FAIL_IF(!fits, ENG_ERR_SHAPE,
          "gather: the index %s must have as many dimensions as %s and no larger sizes outside "
          "dimension %lld", tensor_text(index), tensor_text(x), (long long)c->gather.dim + 1);
  put_like(s, 0, x->dtype, index);
  return ENG_OK;
}

eng_status infer_reduce(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  uint64_t mask = (uint64_t)c->sum.mask;
  FAIL_IF(mask >> x->ndim, ENG_ERR_VALUE,
          "%s: expected a mask with bits for the %d dimensions of %s, got 0x%llx", op_name(c),
          x->ndim, tensor_text(x), (unsigned long long)mask);
  int ndim = 0;
  int64_t shape[ENG_MAX_DIMS], n = 1;
  for (int d = 0; d < x->ndim; d++) {
    bool gone = mask >> d & 1;
    if (gone) n *= x->shape[d];
    if (!gone || c->sum.keep) shape[ndim++] = gone ? 1 : x->shape[d];
  }
  int dtype = x->dtype;
  if (c->op == ENG_OP_sum) dtype = dtype_is_float(dtype) ? wide_of(dtype) : ENG_i64;
  if (c->op == ENG_OP_mean) dtype = dtype_is_float(dtype) ? wide_of(dtype) : ENG_f32;
  FAIL_IF((c->op == ENG_OP_max || c->op == ENG_OP_min) && n == 0, ENG_ERR_VALUE,
          "%s: expected at least one element, got %s", op_name(c), tensor_text(x));
  put_out(s, 0, dtype, ndim, shape);
  return ENG_OK;
}

eng_status infer_arg(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  ENG_TRY(want_ndim(c, 0, 1));
  ENG_TRY(fix_dim(c, &c->argmax.dim, x));
  FAIL_IF(x->shape[c->argmax.dim] == 0, ENG_ERR_VALUE,
          "%s: expected at least one element along dimension %lld, got %s", op_name(c),
          (long long)c->argmax.dim + 1, tensor_text(x));
  int ndim = 0;
  int64_t shape[ENG_MAX_DIMS];
  for (int d = 0; d < x->ndim; d++)
    if (d != c->argmax.dim || c->argmax.keep) shape[ndim++] = d == c->argmax.dim ? 1 : x->shape[d];
  put_out(s, 0, ENG_i64, ndim, shape);
  return ENG_OK;
}

// ---- gradients whose shape rules differ from the forward operation's

/// The rule of gather_grad and index_select_grad. Inputs: dy, index. Output: dx, whose shape is an
/// attribute.
eng_status infer_pick_grad(op_call *c, op_shape *s)
{
  const tensor *dy = c->in[0], *index = c->in[1];
  ENG_TRY(want_float(c, 0));
  ENG_TRY(want_index(c, 1, "index"));
  FAIL_IF(c->gather_grad.ndim < 1 || c->gather_grad.ndim > ENG_MAX_DIMS, ENG_ERR_VALUE,
          "%s: expected dx to have 1 to %d dimensions, got %lld", op_name(c), ENG_MAX_DIMS,
          (long long)c->gather_grad.ndim);
  tensor dx = {.dtype = dy->dtype, .ndim = (int)c->gather_grad.ndim};
  memcpy(dx.shape, &c->gather_grad.shape[0], sizeof dx.shape);
  ENG_TRY(fix_dim(c, &c->gather_grad.dim, &dx));
  bool selects = c->op == ENG_OP_index_select_grad,
       fits = dy->ndim == dx.ndim && (selects ? index->ndim == 1 : tensor_same_shape(dy, index));
  for (int d = 0; fits && d < dx.ndim; d++) {
    if (selects) fits = dy->shape[d] == (d == c->gather_grad.dim ? index->shape[0] : dx.shape[d]);
    else fits = d == c->gather_grad.dim || dy->shape[d] <= dx.shape[d];
  }
  FAIL_IF(!fits, ENG_ERR_SHAPE, "%s: dy %s and the index %s do not fit dx %s along dimension %lld",
          op_name(c), tensor_text(dy), tensor_text(index), tensor_shape_text(dx.ndim, dx.shape),
          (long long)c->gather_grad.dim + 1);
  put_like(s, 0, dy->dtype, &dx);
  return ENG_OK;
}

eng_status infer_embedding_grad(op_call *c, op_shape *s)
{
  const tensor *dy = c->in[0], *ids = c->in[1];
  ENG_TRY(want_float(c, 0));
  ENG_TRY(want_index(c, 1, "ids"));
  FAIL_IF(dy->ndim != ids->ndim + 1 ||
          memcmp(dy->shape, ids->shape, (size_t)ids->ndim * sizeof *ids->shape) != 0, ENG_ERR_SHAPE,
          "embedding_grad: expected dy [.. x C] and ids [..], got %s and %s", tensor_text(dy),
          tensor_text(ids));
  ENG_TRY(want_float_attribute(c, c->embedding_grad.dtype));
  put_out(s, 0, (int)c->embedding_grad.dtype, 2,
      (int64_t[]){c->embedding_grad.rows, dy->shape[dy->ndim - 1]});
  return ENG_OK;
}

eng_status infer_extreme_grad(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  op_call forward = *c;
  op_shape reduced;
  forward.op = ENG_OP_max;
  forward.sum.keep = c->in[1]->ndim == x->ndim;
  ENG_TRY(infer_reduce(&forward, &reduced));
  ENG_TRY(want_floats(c, 3));
  for (int k = 1; k < 3; k++)
    ENG_TRY(want_shape(c, k, reduced.out[0].ndim, reduced.out[0].shape, "the reduced x"));
  put_like(s, 0, x->dtype, x);
  return ENG_OK;
}

/// The rule of a gradient with two inputs of the same shape. The output has this shape and `dtype`.
static eng_status pair_grad(op_call *c, op_shape *s, int64_t dtype)
{
  ENG_TRY(want_floats(c, 2));
  ENG_TRY(want_same(c, 0, 1));
  ENG_TRY(want_float_attribute(c, dtype));
  put_like(s, 0, (int)dtype, c->in[0]);
  return ENG_OK;
}

eng_status infer_swiglu_grad(op_call *c, op_shape *s)
{
  ENG_TRY(want_floats(c, 3));
  ENG_TRY(want_same(c, 0, 1));
  ENG_TRY(want_same(c, 0, 2));
  for (int k = 0; k < 2; k++) put_like(s, k, c->in[k]->dtype, c->in[k]);
  return ENG_OK;
}

eng_status infer_unary_grad(op_call *c, op_shape *s)
{
  FAIL_IF(!op_is_unary((int)c->unary_grad.of), ENG_ERR_VALUE, "unary_grad: expected the number of "
          "an ENG_UNARY operation (ops.def), got %lld", (long long)c->unary_grad.of);
  return pair_grad(c, s, c->unary_grad.dtype);
}

eng_status infer_softmax_grad(op_call *c, op_shape *s)
{
  ENG_TRY(want_ndim(c, 0, 1));
  return pair_grad(c, s, c->softmax_grad.dtype);
}

// ---- other operations

eng_status infer_like(op_call *c, op_shape *s)
{
  put_like(s, 0, c->in[0]->dtype, c->in[0]);
  return ENG_OK;
}

eng_status infer_floats(op_call *c, op_shape *s)
{
  ENG_TRY(want_float(c, 0));
  return infer_like(c, s);
}

eng_status infer_numbers(op_call *c, op_shape *s)
{
  FAIL_IF(c->in[0]->dtype == ENG_bool, ENG_ERR_DTYPE,
          "%s: expected a tensor of numbers, got %s; hint: x:to(\"f32\")", op_name(c),
          tensor_text(c->in[0]));
  return infer_like(c, s);
}

eng_status infer_clamp(op_call *c, op_shape *s)
{
  bool no_low = f64_is_nan(c->clamp.low);
  FAIL_IF(no_low || f64_is_nan(c->clamp.high), ENG_ERR_VALUE,
          "clamp: expected the %s limit to be a number, got nan", no_low ? "lower" : "upper");
  return infer_numbers(c, s);
}

eng_status infer_rows(op_call *c, op_shape *s)
{
  ENG_TRY(want_float(c, 0));
  ENG_TRY(want_ndim(c, 0, 1));
  return infer_like(c, s);
}

eng_status infer_logsumexp(op_call *c, op_shape *s)
{
  ENG_TRY(infer_rows(c, s));
  s->out[0].ndim--;
  return ENG_OK;
}

eng_status infer_dropout(op_call *c, op_shape *s)
{
  double p = c->dropout.p;
  ENG_TRY(want_float(c, 0));
  FAIL_IF(!(p >= 0 && p <= 1), ENG_ERR_VALUE,
          "dropout: expected a probability in [0, 1], got %g", p);
  return infer_like(c, s);
}

eng_status infer_swiglu(op_call *c, op_shape *s)
{
  ENG_TRY(want_floats(c, 2));
  ENG_TRY(want_same(c, 0, 1));
  put_like(s, 0, dtype_promote(c->in[0]->dtype, c->in[1]->dtype), c->in[0]);
  return ENG_OK;
}

eng_status infer_cast(op_call *c, op_shape *s)
{
  int64_t dtype = c->cast.dtype, mode = c->cast.mode;
  FAIL_IF(dtype < 0 || dtype >= ENG_DTYPE_COUNT, ENG_ERR_DTYPE,
          "cast: expected the number of a dtype, 0 to %d, got %lld", ENG_DTYPE_COUNT - 1,
          (long long)dtype);
  FAIL_IF(dtype_is_fp8((int)dtype) && (mode < 0 || mode > 3), ENG_ERR_VALUE,
          "cast: expected the mode 0, 1 (saturate), 2 (round stochastically) or 3 (both), got %lld",
          (long long)mode);
  put_like(s, 0, (int)dtype, c->in[0]);
  return ENG_OK;
}

eng_status infer_embedding(op_call *c, op_shape *s)
{
  const tensor *w = c->in[0], *ids = c->in[1];
  ENG_TRY(want_index(c, 1, "ids"));
  FAIL_IF(w->ndim != 2, ENG_ERR_SHAPE,
          "embedding: expected a weight [V x C], got %s", tensor_text(w));
  FAIL_IF(ids->ndim + 1 > ENG_MAX_DIMS, ENG_ERR_SHAPE, "embedding: expected ids of fewer than %d "
          "dimensions, got %s", ENG_MAX_DIMS, tensor_text(ids));
  put_like(s, 0, w->dtype, ids);
  s->out[0].shape[s->out[0].ndim++] = w->shape[1];
  return ENG_OK;
}

eng_status infer_topk(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  int64_t k = c->topk.k;
  ENG_TRY(want_ndim(c, 0, 1));
  int64_t n = x->shape[x->ndim - 1];
  FAIL_IF(k < 0 || k > n, ENG_ERR_VALUE,
          "topk: expected k in 0..%lld, got %lld", (long long)n, (long long)k);
  put_like(s, 0, x->dtype, x);
  s->out[0].shape[x->ndim - 1] = k;
  put_out(s, 1, ENG_i64, x->ndim, s->out[0].shape);
  return ENG_OK;
}

eng_status infer_bias_grad(op_call *c, op_shape *s)
{
  const tensor *dy = c->in[0];
  ENG_TRY(want_float(c, 0));
  ENG_TRY(want_ndim(c, 0, 1));
  ENG_TRY(want_float_attribute(c, c->bias_grad.dtype));
  put_out(s, 0, (int)c->bias_grad.dtype, 1, &dy->shape[dy->ndim - 1]);
  return ENG_OK;
}

eng_status infer_mse(op_call *c, op_shape *s)
{
  ENG_TRY(want_floats(c, 2));
  ENG_TRY(want_same(c, 0, 1));
  put_out(s, 0, wide_of(dtype_promote(c->in[0]->dtype, c->in[1]->dtype)), 0, NULL);
  return ENG_OK;
}

// ---- the table

#define infer_registered NULL
static op_infer_rule *rules[ENG_OP_COUNT] = {
#define ENG_OP(name, inputs, outputs, layout, cast, shape, ...) [ENG_OP_##name] = infer_##shape,
#include "ops.def"
};

void op_infer_register(int op, op_infer_rule *rule) { rules[op] = rule; }

/// Accepts FP8 tensors only in operations that move, convert or multiply them.
static eng_status check_codes(const op_call *c)
{
  for (int k = 0; k < c->n_in; k++) {
    if (!c->in[k] || !dtype_is_fp8(c->in[k]->dtype)) continue;
    FAIL_IF(!op_table[c->op].takes_codes, ENG_ERR_DTYPE,
            "%s: FP8 tensors allow no arithmetic, got %s; hint: x:to(\"f32\"), or dequantize() of "
            "the quantized tensor", op_name(c), tensor_text(c->in[k]));
    for (int j = 0; c->op == ENG_OP_concat && j < c->n_in; j++)
      FAIL_IF(c->in[j]->dtype != c->in[k]->dtype, ENG_ERR_DTYPE,
              "concat: an FP8 tensor needs other tensors of the same dtype, got %s and %s; "
              "hint: x:to(\"f32\")", tensor_text(c->in[k]), tensor_text(c->in[j]));
  }
  return ENG_OK;
}

eng_status op_infer(op_call *c, op_shape *s)
{
  ENG_TRY(check_codes(c));
  return rules[c->op](c, s);
}
