// Reference kernels that work element by element: arithmetic, comparisons, activations and their
// gradients, dropout, casts. They take any strides and any broadcasting. See reference.h. Called
// through reference.c.
//
// Edge cases:
//   maximum, minimum   NaN if either input is NaN; the first input if both are equal (-0 equals +0)
//   relu               NaN stays NaN; its slope is 0 at 0 and below, and 1 at NaN
//   gelu, silu         no special cases: at -inf they are -inf * 0 = NaN, as in PyTorch; their
//                      slopes are 0 at -inf and 1 at +inf, which are the limits, and finite
//                      wherever x is finite
//   integers           wrap; affine computes in double if its factor or term is not an integer
//                      below 2^63 in magnitude
#include "reference.h"

#include "base/rng.h"

#include <math.h>

// ------------------------------------------------------------------ two inputs

typedef double  binary_float(double a, double b);
typedef int64_t binary_int(int64_t a, int64_t b);

// Computes y = float_rule(a, b). If int_rule is not NULL, it replaces float_rule for an integer y
// or, with `compares`, for two integers a and b.
static eng_status map_two(const op_call *call, binary_float *float_rule, binary_int *int_rule,
                          bool compares)
{
  const tensor *a = call->in[0], *b = call->in[1], *y = call->out[0];
  bool integers = dtype_is_integer(compares ? a->dtype : y->dtype) &&
                  dtype_is_integer(compares ? b->dtype : y->dtype);
  for (walk w = walk_call(call); !walk_ended(&w); walk_next(&w)) {
    if (integers && int_rule)
      store_int_at(y, w.at[2], int_rule(load_int_at(a, w.at[0]), load_int_at(b, w.at[1])));
    else
      store_at(y, w.at[2], float_rule(load_at(a, w.at[0]), load_at(b, w.at[1])));
  }
  return ENG_OK;
}

#define ARITHMETIC(name, float_formula, int_formula)                        \
  static double name##_floats(double a, double b) { return float_formula; } \
  static int64_t name##_ints(int64_t a, int64_t b) { return int_formula; }  \
  eng_status reference_##name(const op_call *call)                          \
  { return map_two(call, name##_floats, name##_ints, false); }

#define COMPARISON(name, operator)                                          \
  static double name##_floats(double a, double b) { return a operator b; }  \
  static int64_t name##_ints(int64_t a, int64_t b) { return a operator b; } \
  eng_status reference_##name(const op_call *call)                          \
  { return map_two(call, name##_floats, name##_ints, true); }

static int64_t wrap(uint64_t bits) { return (int64_t)bits; }

ARITHMETIC(add, a + b, wrap((uint64_t)a + (uint64_t)b))
ARITHMETIC(sub, a - b, wrap((uint64_t)a - (uint64_t)b))
ARITHMETIC(mul, a * b, wrap((uint64_t)a * (uint64_t)b))
ARITHMETIC(maximum, f64_is_nan(a) || a >= b ? a : b, a >= b ? a : b)
ARITHMETIC(minimum, f64_is_nan(a) || a <= b ? a : b, a <= b ? a : b)
COMPARISON(eq, ==)
COMPARISON(ne, !=)
COMPARISON(lt, <)
COMPARISON(le, <=)
COMPARISON(gt, >)
COMPARISON(ge, >=)

static double quotient(double a, double b) { return a / b; }
static double power(double a, double b)    { return pow(a, b); }
eng_status reference_div(const op_call *call) { return map_two(call, quotient, NULL, false); }
eng_status reference_pow(const op_call *call) { return map_two(call, power, NULL, false); }

eng_status reference_where(const op_call *call)
{
  const tensor *condition = call->in[0], *a = call->in[1], *b = call->in[2], *y = call->out[0];
  for (walk w = walk_call(call); !walk_ended(&w); walk_next(&w)) {
    bool yes = load_at(condition, w.at[0]) != 0;
    element_copy(y, w.at[3], yes ? a : b, w.at[yes ? 1 : 2]);
  }
  return ENG_OK;
}

// ------------------------------------------------------------------ one input

typedef double unary_rule(double x);

// Computes y = rule(x), or y = int_rule(x) if there is an int_rule and both x and y are integers.
static eng_status map_one(const op_call *call, unary_rule *rule, int64_t (*int_rule)(int64_t))
{
  const tensor *x = call->in[0], *y = call->out[0];
  bool integers = int_rule && dtype_is_integer(x->dtype) && dtype_is_integer(y->dtype);
  for (walk w = walk_call(call); !walk_ended(&w); walk_next(&w)) {
    if (integers) store_int_at(y, w.at[1], int_rule(load_int_at(x, w.at[0])));
    else store_at(y, w.at[1], rule(load_at(x, w.at[0])));
  }
  return ENG_OK;
}

// `formula` computes y from x; `gradient` computes dx from x and dy.
#define UNARY_RULES(name, formula, gradient)                                         \
  static double name##_value(double x) { return formula; }                           \
  static double name##_gradient(double x, double dy) { return (void)x, (gradient); }

#define UNARY(name, formula, gradient)      \
  UNARY_RULES(name, formula, gradient)      \
  eng_status reference_##name(const op_call *call) { return map_one(call, name##_value, NULL); }

#define UNARY_INT(name, formula, gradient, int_formula)        \
  UNARY_RULES(name, formula, gradient)                         \
  static int64_t name##_int(int64_t x) { return int_formula; } \
  eng_status reference_##name(const op_call *call)             \
  { return map_one(call, name##_value, name##_int); }

static const double GELU_K = 0.79788456080286535588;   // sqrt(2 / pi)
static const double GELU_C = 0.044715;

static double gelu_slope(double x)
{
  if (isinf(x)) return x > 0;
  return 0.5 * erfc(-x * M_SQRT1_2) + x * exp(-0.5 * x * x) * (0.5 * M_2_SQRTPI * M_SQRT1_2);
}

static double gelu_tanh_slope(double x)
{
  double t = tanh(GELU_K * (x + GELU_C * x * x * x)), rest = 1.0 - t * t;
  // rest is 0 where t has rounded to 1 or -1. `bend` is then 0 even if x^2 overflows.
  double bend = rest == 0.0 ? 0.0 : 0.5 * x * rest * GELU_K * (1.0 + 3.0 * GELU_C * x * x);
  return 0.5 * (1.0 + t) + bend;
}

static double sign_of(double x) { return f64_is_nan(x) ? x : (x > 0) - (x < 0); }

UNARY_INT(neg, -x, -1.0 * dy, wrap(0 - (uint64_t)x))
UNARY_INT(abs, fabs(x), sign_of(x) * dy, x < 0 ? wrap(0 - (uint64_t)x) : x)
UNARY_INT(relu, x <= 0 ? 0.0 : x, x <= 0 ? 0.0 : dy, x > 0 ? x : 0)
UNARY(exp, exp(x), exp(x) * dy)
UNARY(log, log(x), 1.0 / x * dy)
UNARY(sqrt, sqrt(x), 0.5 / sqrt(x) * dy)
UNARY(rsqrt, 1.0 / sqrt(x), -0.5 / (x * sqrt(x)) * dy)
UNARY(sin, sin(x), cos(x) * dy)
UNARY(cos, cos(x), -sin(x) * dy)
UNARY(tanh, tanh(x), 1.0 / (cosh(x) * cosh(x)) * dy)
UNARY(sigmoid, sigmoid_of(x), sigmoid_of(-x) * sigmoid_of(x) * dy)
UNARY(log_sigmoid, (x < 0 ? x : 0.0) - log1p(exp(-fabs(x))), sigmoid_of(-x) * dy)
UNARY(softplus, (x > 0 ? x : 0.0) + log1p(exp(-fabs(x))), sigmoid_of(x) * dy)
UNARY(gelu, 0.5 * x * erfc(-x * M_SQRT1_2), gelu_slope(x) * dy)
UNARY(gelu_tanh, 0.5 * x * (1.0 + tanh(GELU_K * (x + GELU_C * x * x * x))),
      gelu_tanh_slope(x) * dy)
UNARY(silu, silu_of(x), silu_slope(x) * dy)
UNARY(hardswish, x * (fmin(fmax(x + 3.0, 0.0), 6.0) / 6.0),
      x <= -3 ? 0.0 : x < 3 ? (2 * x + 3) / 6 * dy : dy)

static binary_float *const gradients[ENG_OP_COUNT] = {
#define ENG_UNARY(name, ...) [ENG_OP_##name] = name##_gradient,
#include "ops.def"
};

eng_status reference_unary_grad(const op_call *call)
{ return map_two(call, gradients[call->unary_grad.of], NULL, false); }

// ------------------------------------------------------------------ one input and scalars

eng_status reference_affine(const op_call *call)
{
  const tensor *x = call->in[0], *y = call->out[0];
  double factor = call->affine.factor, shift = call->affine.term;
  bool whole =
    factor == rint(factor) && fabs(factor) < 0x1p63 && shift == rint(shift) && fabs(shift) < 0x1p63;
  bool integers = dtype_is_integer(x->dtype) && dtype_is_integer(y->dtype) && whole;
  for (walk w = walk_call(call); !walk_ended(&w); walk_next(&w)) {
    if (integers) {
      uint64_t value = (uint64_t)load_int_at(x, w.at[0]);
      store_int_at(y, w.at[1], wrap(value * (uint64_t)(int64_t)factor + (uint64_t)(int64_t)shift));
    } else {
      store_at(y, w.at[1], load_at(x, w.at[0]) * factor + shift);
    }
  }
  return ENG_OK;
}

eng_status reference_pow_scalar(const op_call *call)
{
  const tensor *x = call->in[0], *y = call->out[0];
  for (walk w = walk_call(call); !walk_ended(&w); walk_next(&w))
    store_at(y, w.at[1], pow(load_at(x, w.at[0]), call->pow_scalar.exponent));
  return ENG_OK;
}

eng_status reference_clamp(const op_call *call)
{
  const tensor *x = call->in[0], *y = call->out[0];
  double low = call->clamp.low, high = call->clamp.high;
  for (walk w = walk_call(call); !walk_ended(&w); walk_next(&w)) {
    double value = load_at(x, w.at[0]);
    double bounded = value < low ? low : value;
    bounded = bounded > high ? high : bounded;
    if (bounded != value && !f64_is_nan(value)) store_at(y, w.at[1], bounded);
    else element_copy(y, w.at[1], x, w.at[0]);   // keeps every bit, even of 64-bit integers
  }
  return ENG_OK;
}

// ------------------------------------------------------------------ swiglu

static double gated(double gate, double up) { return silu_of(gate) * up; }
eng_status reference_swiglu(const op_call *call) { return map_two(call, gated, NULL, false); }

eng_status reference_swiglu_grad(const op_call *call)
{
  const tensor *gate = call->in[0], *up = call->in[1], *dy = call->in[2], *dgate = call->out[0],
               *dup = call->out[1];
  walk w = walk_over(dy->ndim, dy->shape);
  walk_add(&w, gate);
  walk_add(&w, up);
  walk_add(&w, dy);
  walk_add(&w, dgate ? dgate : dy);
  walk_add(&w, dup ? dup : dy);
  for (; !walk_ended(&w); walk_next(&w)) {
    double a = load_at(gate, w.at[0]), b = load_at(up, w.at[1]), g = load_at(dy, w.at[2]);
    if (dgate) store_at(dgate, w.at[3], g * b * silu_slope(a));
    if (dup) store_at(dup, w.at[4], g * silu_of(a));
  }
  return ENG_OK;
}

// ------------------------------------------------------------------ dropout, copies

// Element i, counted in row-major order, takes word i % 4 of Philox block number `counter` + i / 4.
// A dropped element becomes 0, whatever its value was. A kept element is divided by 1 - p.
eng_status reference_dropout(const op_call *call)
{
  const tensor *x = call->in[0], *y = call->out[0];
  double p = call->dropout.p;
  for (walk w = walk_call(call); !walk_ended(&w); walk_next(&w)) {
    uint32_t words[4];
    philox_block(words, (uint64_t)call->dropout.counter + (uint64_t)(w.position / 4));
    bool keep = (words[w.position % 4] >> 8) * 0x1p-24 >= p;
    store_at(y, w.at[1], keep ? load_at(x, w.at[0]) / (1.0 - p) : 0.0);
  }
  return ENG_OK;
}

static eng_status copy_elements(const op_call *call)
{
  const tensor *x = call->in[0], *y = call->out[0];
  for (walk w = walk_call(call); !walk_ended(&w); walk_next(&w))
    element_copy(y, w.at[1], x, w.at[0]);
  return ENG_OK;
}

// Casts floats or integers to FP8 with a rounding mode other than the default.
static eng_status cast_by_mode(const op_call *call, int mode)
{
  const tensor *x = call->in[0], *y = call->out[0];
  for (walk w = walk_call(call); !walk_ended(&w); walk_next(&w)) {
    double value = dtype_is_integer(x->dtype)
                     ? double_from_int(load_int_at(x, w.at[0]), false)
                     : load_at(x, w.at[0]);
    uint32_t words[4] = {0};
    if (mode & FP8_STOCHASTIC)
      philox_block(words, (uint64_t)call->cast.counter + (uint64_t)(w.position / 4));
    ((uint8_t *)y->data)[w.at[1]] = fp8_from_f32(
      f32_odd_from_f64(value), y->dtype == ENG_e4m3 ? 3 : 2, mode, words[w.position % 4]);
  }
  return ENG_OK;
}

eng_status reference_cast(const op_call *call)
{
  int mode = (int)call->cast.mode;
  return dtype_is_fp8(call->out[0]->dtype) && mode ? cast_by_mode(call, mode)
                                                   : copy_elements(call);
}
eng_status reference_contiguous(const op_call *call) { return copy_elements(call); }
