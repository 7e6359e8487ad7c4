// Elementwise functions of one input, their derivatives, and swiglu. They take any strides. f64 and
// integers go to the reference kernels. vmath.h gives the accuracy and the edge cases of the
// functions. Called through backend.kernel[]; owns nothing.
//
//   relu        keeps NaN; the gradient is dy if x > 0 or x is NaN; if x <= 0 it is 0, even where
//               dy is not finite
//   gelu, silu  NaN at -inf, where the formula gives -inf * 0, as in PyTorch; the slope is 0 at
//               -inf and 1 at +inf, which are its limits. The same holds for gelu_tanh
//   hardswish   NaN at -inf; as in PyTorch, the gradient is 0 if x <= -3, and dy itself if x >= 3
//               or x is NaN. Computed as x * (relu6(x + 3) / 6), which cannot overflow; PyTorch's
//               (x * relu6(x + 3)) / 6 can
#include "operand.h"
#include "simd.h"

static inline vf vf_relu_(vf x) { return vf_select(vf_le(x, vf_zero()), vf_zero(), x); }

static inline vf vf_hardswish(vf x)
{
  vf six = vf_set1(6.0f), t = vf_relu_(vf_add(x, vf_set1(3.0f)));
  return vf_mul(x, vf_div(vf_select(vf_le(six, t), six, t), six));
}

static inline vf vf_hardswish_slope(vf x, vf dy)
{
  vf three = vf_set1(3.0f), slope = vf_div(vf_add(vf_add(x, x), three), vf_set1(6.0f));
  vf inside = vf_select(vf_lt(x, three), vf_mul(slope, dy), dy);
  return vf_select(vf_le(x, vf_neg(three)), vf_zero(), inside);
}

static void unary_tile(const tile *t)
{
  float *y = t->y;
  const float *x = t->x[0];
  const int n = t->n;
  vf one = vf_set1(1.0f);
  switch (t->w->with.op) {
    case ENG_OP_neg:         MAP1(y, x, n, vf_neg(a)); break;
    case ENG_OP_abs:         MAP1(y, x, n, vf_abs(a)); break;
    case ENG_OP_exp:         MAP1(y, x, n, vf_exp(a)); break;
    case ENG_OP_log:         MAP1(y, x, n, vf_log(a)); break;
    case ENG_OP_sqrt:        MAP1(y, x, n, vf_sqrt(a)); break;
    case ENG_OP_rsqrt:       MAP1(y, x, n, vf_div(one, vf_sqrt(a))); break;
    case ENG_OP_sin:         for (int i = 0; i < n; i++) y[i] = sinf(x[i]); break;
    case ENG_OP_cos:         for (int i = 0; i < n; i++) y[i] = cosf(x[i]); break;
    case ENG_OP_tanh:        MAP1(y, x, n, vf_tanh(a)); break;
    case ENG_OP_sigmoid:     MAP1(y, x, n, vf_sigmoid(a)); break;
    case ENG_OP_log_sigmoid: MAP1(y, x, n, vf_neg(vf_softplus(vf_neg(a)))); break;
    case ENG_OP_softplus:    MAP1(y, x, n, vf_softplus(a)); break;
    case ENG_OP_relu:        MAP1(y, x, n, vf_relu_(a)); break;
    case ENG_OP_gelu:        MAP1(y, x, n, vf_gelu(a)); break;
    case ENG_OP_gelu_tanh:   MAP1(y, x, n, vf_gelu_tanh(a)); break;
    case ENG_OP_hardswish:   MAP1(y, x, n, vf_hardswish(a)); break;
    default:                 MAP1(y, x, n, vf_silu(a)); break;
  }
}

// Computes y = slope * dy. Inside MAP2, a is x and b is dy.
static void slope_tile(const tile *t)
{
  float *y = t->y;
  const float *x = t->x[0], *dy = t->x[1];
  const int n = t->n;
  vf one = vf_set1(1.0f), half = vf_set1(0.5f);
  switch (t->w->with.op) {
    case ENG_OP_neg:         MAP1(y, dy, n, vf_neg(a)); break;
    case ENG_OP_abs:
      MAP2(y, x, dy, n,
           vf_mul(b, vf_select(vf_eq(a, vf_zero()), vf_zero(),
                               vf_select(vf_ne(a, a), a, vf_copysign(one, a)))));
      break;
    case ENG_OP_exp:         MAP2(y, x, dy, n, vf_mul(vf_exp(a), b)); break;
    case ENG_OP_log:         MAP2(y, x, dy, n, vf_div(b, a)); break;
    case ENG_OP_sqrt:        MAP2(y, x, dy, n, vf_mul(vf_div(half, vf_sqrt(a)), b)); break;
    case ENG_OP_rsqrt:
      MAP2(y, x, dy, n, vf_mul(vf_div(vf_div(vf_neg(half), vf_sqrt(a)), a), b));
      break;
    case ENG_OP_sin:         for (int i = 0; i < n; i++) y[i] = cosf(x[i]) * dy[i]; break;
    case ENG_OP_cos:         for (int i = 0; i < n; i++) y[i] = -sinf(x[i]) * dy[i]; break;
    case ENG_OP_tanh:        MAP2(y, x, dy, n, vf_mul(vf_tanh_derivative(a), b)); break;
    case ENG_OP_sigmoid:     MAP2(y, x, dy, n, vf_mul(vf_sigmoid_derivative(a), b)); break;
    case ENG_OP_log_sigmoid: MAP2(y, x, dy, n, vf_mul(vf_sigmoid(vf_neg(a)), b)); break;
    case ENG_OP_softplus:    MAP2(y, x, dy, n, vf_mul(vf_sigmoid(a), b)); break;
    case ENG_OP_relu:        MAP2(y, x, dy, n, vf_select(vf_le(a, vf_zero()), vf_zero(), b)); break;
    case ENG_OP_gelu:        MAP2(y, x, dy, n, vf_mul(vf_gelu_derivative(a), b)); break;
    case ENG_OP_gelu_tanh:   MAP2(y, x, dy, n, vf_mul(vf_gelu_tanh_derivative(a), b)); break;
    case ENG_OP_hardswish:   MAP2(y, x, dy, n, vf_hardswish_slope(a, b)); break;
    default:                 MAP2(y, x, dy, n, vf_mul(vf_silu_derivative(a), b)); break;
  }
}

#define ENG_UNARY(name, ...) \
  KERNEL(name) { return elementwise(call, unary_tile, (numbers){.op = call->op}); }
#include "ops.def"

KERNEL(unary_grad)
{ return elementwise(call, slope_tile, (numbers){.op = (int)call->unary_grad.of}); }

// ------------------------------------------------------------------ swiglu

static void swiglu_tile(const tile *t)
{ MAP2(t->y, t->x[0], t->x[1], t->n, vf_mul(vf_silu(a), b)); }

KERNEL(swiglu) { return elementwise(call, swiglu_tile, (numbers){0}); }

static void swiglu_grad_body(const work *w, int64_t first, int n)
{
  const tensor *dgate = w->out[0], *dup = w->out[1];
  float tgate[TILE], tup[TILE], tdy[TILE], tout[TILE];
  const float *gate = operand_load(&w->in[0], tgate, first, n),
              *dy = operand_load(&w->in[2], tdy, first, n);
  if (dup) {
    float *to = tile_target(tout, dup->data, dup->dtype, first);
    MAP2(to, gate, dy, n, vf_mul(vf_silu(a), b));
    tile_store(dup->data, dup->dtype, first, to, n);
  }
  if (dgate) {
    const float *up = operand_load(&w->in[1], tup, first, n);
    float slope[TILE], *to = tile_target(tout, dgate->data, dgate->dtype, first);
    MAP1(slope, gate, n, vf_silu_derivative(a));
    MAP2(slope, slope, dy, n, vf_mul(b, a));
    MAP2(to, slope, up, n, vf_mul(a, b));
    tile_store(dgate->data, dgate->dtype, first, to, n);
  }
}

KERNEL(swiglu_grad)
{
  if (!all_fast(call)) return forward_to_reference(call);
  work w = work_of(call, call->in[0]);
  for_tiles(&w, call->in[0]->count, swiglu_grad_body);
  return ENG_OK;
}
