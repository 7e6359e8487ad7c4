// Gradient rules of elementwise operations. Each rule computes the derivative of its operation's
// formula in ops.def; grad_emit sums over broadcast dimensions and rounds to the input's dtype.
// Intermediate values, and gradients that grad_emit sums, are f32 (f64 if an input is f64), so that
// a gradient is rounded only once. Called by backward.c and fp8/swiglu.c.
#include "base/error.h"
#include "op.h"
#include "gradient.h"

// These functions run an operation and return its result as a new tensor.
static eng_status binary(tensor **out, int op, tensor *a, tensor *b)
{ return op_run1(out, (op_call){.op = op, .in = {a, b}}); }
static eng_status wide_binary(tensor **out, int op, tensor *a, tensor *b)
{ return grad_run_wide(out, (op_call){.op = op, .in = {a, b}}); }
static eng_status wide_affine(tensor **out, tensor *x, double factor, double term)
{
  return grad_run_wide(out, (op_call){.op = ENG_OP_affine, .in = {x},
                                      .affine = {.factor = factor, .term = term}});
}

/// Computes x where the comparison `op` of a and b holds, else 0.
static eng_status masked(tensor **out, int op, tensor *a, tensor *b, tensor *x)
{
  OWNED tensor *condition = NULL, *zero = NULL;
  ENG_TRY(binary(&condition, op, a, b));
  ENG_TRY(grad_zeros(&zero, x->dtype, 0, NULL));
  return op_run1(out, (op_call){.op = ENG_OP_where, .in = {condition, x, zero}});
}

static eng_status emit_affine(grad_call *g, int k, tensor *x, double factor)
{
  op_call c = {.op = ENG_OP_affine, .in = {x}, .affine = {.factor = factor}};
  return grad_emit_op(g, k, c);
}

eng_status grad_add(grad_call *g)
{
  for (int k = 0; k < 2; k++)
    if (grad_wants(g, k)) ENG_TRY(grad_emit_shared(g, k, g->dy[0]));
  return ENG_OK;
}

eng_status grad_sub(grad_call *g)
{
  if (grad_wants(g, 0)) ENG_TRY(grad_emit_shared(g, 0, g->dy[0]));
  return grad_wants(g, 1) ? emit_affine(g, 1, g->dy[0], -1) : ENG_OK;
}

eng_status grad_mul(grad_call *g)
{
  for (int k = 0; k < 2; k++) {
    if (!grad_wants(g, k)) continue;
    const tensor *x = g->call->in[k];
    bool more = !tensor_same_shape(x, g->dy[0]) || grad_dtype(g, k) != x->dtype;
    tensor *dx;
    ENG_TRY((more ? wide_binary : binary)(&dx, ENG_OP_mul, g->dy[0], g->call->in[1 - k]));
    ENG_TRY(grad_emit(g, k, dx));
  }
  return ENG_OK;
}

// y = a / b: da = dy / b, db = -da (a / b). Computes a / b again, because y may have been rounded.
eng_status grad_div(grad_call *g)
{
  tensor *a = g->call->in[0], *b = g->call->in[1], *da;
  ENG_TRY(wide_binary(&da, ENG_OP_div, g->dy[0], b));
  if (grad_wants(g, 1)) {
    OWNED tensor *y = NULL;
    ENG_TRY(wide_binary(&y, ENG_OP_div, a, b));
    ENG_TRY(op_replace(&y, (op_call){.op = ENG_OP_mul, .in = {da, y}}));
    ENG_TRY(emit_affine(g, 1, y, -1));
  }
  return grad_emit(g, 0, da);
}

/// Emits the gradient of input k: p * q * dy where `test` is not 0, else 0. `zero` is a scalar
/// tensor with the value 0.
static eng_status emit_where_nonzero(grad_call *g, int k, tensor *p, tensor *q, tensor *test,
                                     tensor *zero)
{
  tensor *slope, *kept;
  ENG_TRY(binary(&slope, ENG_OP_mul, p, q));
  ENG_TRY(masked(&kept, ENG_OP_ne, test, zero, slope));
  return grad_emit_op(g, k, (op_call){.op = ENG_OP_mul, .in = {kept, g->dy[0]}});
}

// y = a^b: da = dy b a^(b-1), or 0 where b is 0; db = dy y log a, or 0 where a is 0 and b >= 0.
// Computes a^b again, because y may have been rounded.
eng_status grad_pow(grad_call *g)
{
  tensor *a = g->call->in[0], *b = g->call->in[1], *zero;
  ENG_TRY(grad_zeros(&zero, b->dtype, 0, NULL));
  if (grad_wants(g, 0)) {
    tensor *less, *power;
    ENG_TRY(wide_affine(&less, b, 1, -1));
    ENG_TRY(wide_binary(&power, ENG_OP_pow, a, less));
    ENG_TRY(emit_where_nonzero(g, 0, power, b, b, zero));
  }
  if (grad_wants(g, 1)) {
    tensor *y, *logarithm, *plus, *test;
    ENG_TRY(wide_binary(&y, ENG_OP_pow, a, b));
    ENG_TRY(grad_run_wide(&logarithm, (op_call){.op = ENG_OP_log, .in = {a}}));
    ENG_TRY(binary(&plus, ENG_OP_ge, b, zero));
    ENG_TRY(op_run1(&test, (op_call){.op = ENG_OP_where, .in = {plus, a, b}}));
    ENG_TRY(emit_where_nonzero(g, 1, y, logarithm, test, zero));
  }
  return ENG_OK;
}

// The gradient of maximum (minimum) goes to the larger (smaller) input; equal inputs get half each,
// and none gets it if an input is NaN.
static eng_status extreme(grad_call *g, int wins)
{
  tensor *half, *shared_half;
  ENG_TRY(wide_affine(&half, g->dy[0], 0.5, 0));
  ENG_TRY(masked(&shared_half, ENG_OP_eq, g->call->in[0], g->call->in[1], half));
  for (int k = 0; k < 2; k++) {
    if (!grad_wants(g, k)) continue;
    OWNED tensor *alone = NULL;
    ENG_TRY(masked(&alone, wins, g->call->in[k], g->call->in[1 - k], g->dy[0]));
    ENG_TRY(grad_emit_op(g, k, (op_call){.op = ENG_OP_add, .in = {alone, shared_half}}));
  }
  return ENG_OK;
}

eng_status grad_maximum(grad_call *g) { return extreme(g, ENG_OP_gt); }
eng_status grad_minimum(grad_call *g) { return extreme(g, ENG_OP_lt); }

eng_status grad_where(grad_call *g)
{
  tensor *dy = g->dy[0], *zero;
  ENG_TRY(grad_zeros(&zero, dy->dtype, 0, NULL));
  for (int k = 1; k < 3; k++) {
    op_call c = {.op = ENG_OP_where,
                 .in = {g->call->in[0], k == 1 ? dy : zero, k == 1 ? zero : dy}};
    if (grad_wants(g, k)) ENG_TRY(grad_emit_op(g, k, c));
  }
  return ENG_OK;
}

eng_status grad_affine(grad_call *g) { return emit_affine(g, 0, g->dy[0], g->call->affine.factor); }

eng_status grad_pow_scalar(grad_call *g)
{
  double p = g->call->pow_scalar.exponent;
  OWNED tensor *slope = NULL;
  ENG_TRY(grad_run_wide(&slope, (op_call){.op = ENG_OP_pow_scalar, .in = {g->call->in[0]},
                                          .pow_scalar = {.exponent = p == 0 ? 0 : p - 1}}));
  ENG_TRY(op_replace(&slope, (op_call){.op = ENG_OP_affine, .affine = {.factor = p}}));
  return grad_emit_op(g, 0, (op_call){.op = ENG_OP_mul, .in = {slope, g->dy[0]}});
}

// dx is dy where y equals x, that is, where x lies within the bounds, inclusive; else 0.
eng_status grad_clamp(grad_call *g)
{
  tensor *dx;
  ENG_TRY(masked(&dx, ENG_OP_eq, g->call->in[0], g->call->out[0], g->dy[0]));
  return grad_emit(g, 0, dx);
}

eng_status grad_neg(grad_call *g) { return emit_affine(g, 0, g->dy[0], -1); }

// The rule of unary operations. The kernel unary_grad computes f'(x) * dy in one pass.
eng_status grad_unary(grad_call *g)
{
  return grad_emit_op(g, 0, (op_call){.op = ENG_OP_unary_grad, .in = {g->call->in[0], g->dy[0]},
                                      .unary_grad = {.of = g->call->op,
                                                     .dtype = grad_dtype(g, 0)}});
}

eng_status grad_swiglu_of(grad_call *g, tensor *gate, tensor *up)
{
  op_call c = {.op = ENG_OP_swiglu_grad, .n_in = 3, .in = {gate, up, g->dy[0]}};
  ENG_TRY(op_run(&c));
  for (int k = 0; k < 2; k++) ENG_TRY(grad_emit(g, k, c.out[k]));
  return ENG_OK;
}

eng_status grad_swiglu(grad_call *g) { return grad_swiglu_of(g, g->call->in[0], g->call->in[1]); }

// Draws the same mask again, from the counter in the recorded call.
eng_status grad_dropout(grad_call *g)
{
  return grad_emit_op(
    g, 0, (op_call){.op = ENG_OP_dropout, .in = {g->dy[0]}, .dropout = g->call->dropout});
}

eng_status grad_cast(grad_call *g)       { return grad_emit_shared(g, 0, g->dy[0]); }
eng_status grad_contiguous(grad_call *g) { return grad_emit_shared(g, 0, g->dy[0]); }
