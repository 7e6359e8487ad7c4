// Elementwise functions of one input, their derivatives, swiglu and dropout. f32, f16 and bf16
// compute in f32 (map.h). f64, integers, sin, cos, and dropout of tensors that are not 16-byte
// aligned compute in double or int64, with one thread per element. Called through the device's
// table.
//
//   relu        relu(NaN) is NaN; the gradient is 0 for x <= 0, even if dy is not finite; for
//               x = NaN it is dy
//   gelu, silu  NaN for x = -inf (-inf * 0 in the formula), as in PyTorch; the slope is 0 at -inf
//               and 1 at +inf
//   hardswish   the gradient is 0 for x <= -3; for x >= 3 and x = NaN it is dy, as in PyTorch
//   sigmoids    in f32 are computed from z = exp(-|x|): no overflow, no cancellation, gradual
//               underflow (but see the functions named `low`, for 16-bit formats)
//   dropout     a dropped element is 0, even if it was NaN or Inf
#include "kernel/map.h"
#include "kernel/ptx.h"
#include "kernel/swiglu.h"

extern "C" {
#include "base/rng.h"
}

// ------------------------------------------------------------------ functions in f32

__device__ static inline float softplus(float x)
{ return (x > 0.0f ? x : 0.0f) + log1pf(expf(-fabsf(x))); }

/// Returns x clamped to [-bound, bound]; NaN stays NaN.
__device__ static inline float held(float x, float bound)
{ return x > bound ? bound : x < -bound ? -bound : x; }

// In x * 0.5 (1 + tanh(u)), the factor on x equals the sigmoid of 2u. The sigmoid has no
// cancellation for negative u.
__device__ static inline float gelu_tanh(float x)
{
  float v = x * fmaf(x * x, 0.0713548163f, 1.59576912f);
  return x * sigmoid(v);
}

// gelu_tanh_low and gelu_tanh_slope_low are for 16-bit results. Their relative errors are about
// 1e-6; rounding to the format adds about 2e-3 (bf16) or 2e-4 (f16). If x is below about -10, the
// sigmoid is below 2^-126 and becomes 0, and so do both results.

/// Returns the sigmoid of sqrt(8/pi) (x + 0.044715 x^3). `square` is x^2.
__device__ static inline float gelu_tanh_gate_low(float x, float square)
{ return reciprocal_fast(1.0f + exp2_fast(x * fmaf(square, -0.102943240f, -2.30220820f))); }

__device__ static inline float gelu_tanh_low(float x) { return x * gelu_tanh_gate_low(x, x * x); }

/// Returns x * relu6(x + 3) / 6; NaN stays NaN.
template <class T> __device__ static inline T hardswish(T x)
{
  T t = x + T(3);
  return x * ((t <= T(0) ? T(0) : t >= T(6) ? T(6) : t) / T(6));
}

__device__ static inline float gelu(float x) { return 0.5f * x * erfcf(-0.707106781f * x); }

template <int V>
__device__ static inline void unary_floats(int op, float (&y)[V], const float (&x)[V])
{
#define EACH(formula)                           \
  _Pragma("unroll") for (int v = 0; v < V; v++) \
  {                                             \
    float a = x[v];                             \
    y[v] = formula;                             \
  }
  switch (op) {
    case ENG_OP_neg:         EACH(-a); break;
    case ENG_OP_abs:         EACH(fabsf(a)); break;
    case ENG_OP_exp:         EACH(expf(a)); break;
    case ENG_OP_log:         EACH(logf(a)); break;
    case ENG_OP_sqrt:        EACH(sqrtf(a)); break;
    case ENG_OP_rsqrt:       EACH(1.0f / sqrtf(a)); break;
    case ENG_OP_tanh:        EACH(tanhf(a)); break;
    case ENG_OP_sigmoid:     EACH(sigmoid(a)); break;
    case ENG_OP_log_sigmoid: EACH(-softplus(-a)); break;
    case ENG_OP_softplus:    EACH(softplus(a)); break;
    case ENG_OP_relu:        EACH(a <= 0.0f ? 0.0f : a); break;
    case ENG_OP_gelu:        EACH(gelu(a)); break;
    case ENG_OP_gelu_tanh:   EACH(gelu_tanh(a)); break;
    case ENG_OP_hardswish:   EACH(hardswish(a)); break;
    default:                 EACH(a * sigmoid(a)); break;
  }
#undef EACH
}

/// The rule of operation OP alone or, with OP = -1, a rule in which `op` selects the formula.
/// Operations that take much of a model's time have their own kernel, because a kernel of many
/// formulas needs as many registers as the longest formula.
template <int OP> struct unary_rule {
  int op;
  template <int V>
  __device__ void operator()(float (&y)[1][V], const float (&x)[1][V]) const
  { unary_floats(OP < 0 ? op : OP, y[0], x[0]); }
  template <int V>
  __device__ void low(float (&y)[1][V], const float (&x)[1][V]) const
  {
    int which = OP < 0 ? op : OP;
    if (which != ENG_OP_gelu_tanh) return (*this)(y, x);
#pragma unroll
    for (int v = 0; v < V; v++) y[0][v] = gelu_tanh_low(x[0][v]);
  }
};

// ------------------------------------------------------------------ derivatives in f32

/// Returns s(x) (1 - s(x)), where s is the sigmoid.
__device__ static inline float sigmoid_slope(float x)
{
  float z = expf(-fabsf(x)), r = 1.0f / (1.0f + z);
  return z * r * r;
}

/// Returns 1 - tanh(x)^2 without cancellation, as 4 z / (1 + z)^2 with z = exp(-2|x|).
__device__ static inline float tanh_slope(float x)
{
  float a = fabsf(x), z = expf(-(a + a)), r = 2.0f / (1.0f + z);
  return z * r * r;
}

__device__ static inline float silu_slope(float x)
{
  x = held(x, 120.0f);
  float z = expf(-fabsf(x)), r = 1.0f / (1.0f + z), s = (x >= 0.0f ? 1.0f : z) * r;
  return fmaf(x, z * r * r, s);
}

__device__ static inline float gelu_slope(float x)
{
  x = held(x, 15.0f);
  return fmaf(x * 0.39894228f, expf(-0.5f * x * x), 0.5f * erfcf(-0.707106781f * x));
}

__device__ static inline float gelu_tanh_slope(float x)
{
  x = held(x, 15.0f);   // the slope is constant beyond 15, and x^3 stays finite
  float square = x * x, v = x * fmaf(square, 0.0713548163f, 1.59576912f),
        slope = fmaf(square, 0.214064449f, 1.59576912f);
  float z = expf(-fabsf(v)), r = 1.0f / (1.0f + z), s = (x >= 0.0f ? 1.0f : z) * r;
  return fmaf(x * slope, z * r * r, s);   // s (1 - s) = z / (1 + z)^2
}

__device__ static inline float gelu_tanh_slope_low(float x)
{
  x = held(x, 15.0f);
  float square = x * x, slope = fmaf(square, 0.214064449f, 1.59576912f),
        s = gelu_tanh_gate_low(x, square);
  return fmaf(x * slope, fmaf(-s, s, s), s);
}

// Computes y = slope(x) * dy. In the formulas `a` is x and `b` is dy.
template <int V>
__device__ static inline void slope_floats(int op, float (&y)[V], const float (&x)[V],
                                           const float (&dy)[V])
{
#define EACH(formula)                           \
  _Pragma("unroll") for (int v = 0; v < V; v++) \
  {                                             \
    float a = x[v], b = dy[v];                  \
    (void)a;                                    \
    y[v] = formula;                             \
  }
  switch (op) {
    case ENG_OP_neg:         EACH(-b); break;
    case ENG_OP_abs:         EACH(b * (a == 0.0f ? 0.0f : a != a ? a : copysignf(1.0f, a))); break;
    case ENG_OP_exp:         EACH(expf(a) * b); break;
    case ENG_OP_log:         EACH(b / a); break;
    case ENG_OP_sqrt:        EACH(0.5f / sqrtf(a) * b); break;
    case ENG_OP_rsqrt:       EACH(-0.5f / sqrtf(a) / a * b); break;
    case ENG_OP_tanh:        EACH(tanh_slope(a) * b); break;
    case ENG_OP_sigmoid:     EACH(sigmoid_slope(a) * b); break;
    case ENG_OP_log_sigmoid: EACH(sigmoid(-a) * b); break;
    case ENG_OP_softplus:    EACH(sigmoid(a) * b); break;
    case ENG_OP_relu:        EACH(a <= 0.0f ? 0.0f : b); break;
    case ENG_OP_gelu:        EACH(gelu_slope(a) * b); break;
    case ENG_OP_gelu_tanh:   EACH(gelu_tanh_slope(a) * b); break;
    case ENG_OP_hardswish:
      EACH(a <= -3.0f ? 0.0f : a < 3.0f ? (a + a + 3.0f) / 6.0f * b : b); break;
    default:                 EACH(silu_slope(a) * b); break;
  }
#undef EACH
}

template <int OP> struct slope_rule {   // OP as in unary_rule
  int op;
  template <int V>
  __device__ void operator()(float (&y)[1][V], const float (&x)[2][V]) const
  { slope_floats(OP < 0 ? op : OP, y[0], x[0], x[1]); }
  template <int V>
  __device__ void low(float (&y)[1][V], const float (&x)[2][V]) const
  {
    int which = OP < 0 ? op : OP;
    if (which != ENG_OP_gelu_tanh) return (*this)(y, x);
#pragma unroll
    for (int v = 0; v < V; v++) y[0][v] = gelu_tanh_slope_low(x[0][v]) * x[1][v];
  }
};

// ------------------------------------------------------------------ in double

#define GELU_K 0.79788456080286535588   // sqrt(2 / pi)
#define GELU_C 0.044715

__device__ static inline double sigmoid_double(double x) { return 1.0 / (1.0 + exp(-x)); }

__device__ static double unary_double(int op, double x)
{
  switch (op) {
    case ENG_OP_neg:         return -x;
    case ENG_OP_abs:         return fabs(x);
    case ENG_OP_exp:         return exp(x);
    case ENG_OP_log:         return log(x);
    case ENG_OP_sqrt:        return sqrt(x);
    case ENG_OP_rsqrt:       return 1.0 / sqrt(x);
    case ENG_OP_sin:         return sin(x);
    case ENG_OP_cos:         return cos(x);
    case ENG_OP_tanh:        return tanh(x);
    case ENG_OP_sigmoid:     return sigmoid_double(x);
    case ENG_OP_log_sigmoid: return (x < 0 ? x : 0.0) - log1p(exp(-fabs(x)));
    case ENG_OP_softplus:    return (x > 0 ? x : 0.0) + log1p(exp(-fabs(x)));
    case ENG_OP_relu:        return x <= 0 ? 0.0 : x;
    case ENG_OP_gelu:        return 0.5 * x * erfc(-x * 0.70710678118654752440);
    case ENG_OP_gelu_tanh:   return 0.5 * x * (1.0 + tanh(GELU_K * (x + GELU_C * x * x * x)));
    case ENG_OP_hardswish:   return hardswish(x);
    default:                 return x * sigmoid_double(x);
  }
}

__device__ static double silu_slope_double(double x)
{
  if (isinf(x)) return x > 0;   // the slope's limits: 1 at +inf, 0 at -inf
  double s = sigmoid_double(x);
  return s * (1.0 + x * (1.0 - s));
}

__device__ static double slope_double(int op, double v)
{
  switch (op) {
    case ENG_OP_neg:         return -1.0;
    case ENG_OP_abs:         return f64_is_nan(v) ? v : (v > 0) - (v < 0);
    case ENG_OP_exp:         return exp(v);
    case ENG_OP_log:         return 1.0 / v;
    case ENG_OP_sqrt:        return 0.5 / sqrt(v);
    case ENG_OP_rsqrt:       return -0.5 / (v * sqrt(v));
    case ENG_OP_sin:         return cos(v);
    case ENG_OP_cos:         return -sin(v);
    case ENG_OP_tanh:        return 1.0 / (cosh(v) * cosh(v));
    case ENG_OP_sigmoid:     return sigmoid_double(v) * sigmoid_double(-v);
    case ENG_OP_log_sigmoid: return sigmoid_double(-v);
    case ENG_OP_softplus:    return sigmoid_double(v);
    case ENG_OP_relu:        return 1.0;   // slope_body clears dy where v <= 0
    case ENG_OP_hardswish:   return v > -3 && v < 3 ? (2 * v + 3) / 6 : 1.0;   // dy is 0 if v <= -3
    case ENG_OP_gelu:
      if (isinf(v)) return v > 0;
      return 0.5 * erfc(-v * 0.70710678118654752440) +
             v * exp(-0.5 * v * v) * 0.39894228040143267794;
    case ENG_OP_gelu_tanh: {
      double t = tanh(GELU_K * (v + GELU_C * v * v * v)), rest = 1.0 - t * t;
      // where tanh is 1 or -1, `bend` is 0; the formula might yield 0 * inf
      double bend = rest == 0.0 ? 0.0 : 0.5 * v * rest * GELU_K * (1.0 + 3.0 * GELU_C * v * v);
      return 0.5 * (1.0 + t) + bend;
    }
    default: return silu_slope_double(v);
  }
}

struct unary_body {
  int op;
  __device__ void operator()(const walk<2> &w, const int64_t (&at)[2]) const
  {
    // operations that also exist for integers
    bool keeps = op == ENG_OP_neg || op == ENG_OP_abs || op == ENG_OP_relu;
    if (keeps && !dtype_is_float(w.dtype[0]) && !dtype_is_float(w.dtype[1])) {
      int64_t x = element_int(w.data[1], w.dtype[1], at[1]), minus = (int64_t)(0 - (uint64_t)x);
      element_store_int(w.data[0], w.dtype[0], at[0],
                op == ENG_OP_neg ? minus :
                x >= 0           ? x :
                op == ENG_OP_abs ? minus :
                                   0);
    } else {
      element_store(w.data[0], w.dtype[0], at[0],
                   unary_double(op, element_double(w.data[1], w.dtype[1], at[1])));
    }
  }
};

struct slope_body {
  int op;
  __device__ void operator()(const walk<3> &w, const int64_t (&at)[3]) const
  {
    double v = element_double(w.data[1], w.dtype[1], at[1]),
           dy = element_double(w.data[2], w.dtype[2], at[2]);
    if ((op == ENG_OP_relu && v <= 0) || (op == ENG_OP_hardswish && v <= -3)) dy = 0.0;
    element_store(w.data[0], w.dtype[0], at[0], slope_double(op, v) * dy);
  }
};

// ------------------------------------------------------------------ calls

static bool is_circular(int op) { return op == ENG_OP_sin || op == ENG_OP_cos; }

/// Runs Rule (unary_rule or slope_rule) for operation `op` on a call with N inputs.
template <template <int> class Rule, int N> static eng_status run(const op_call *call, int op)
{
  walk<1 + N> w = walk_of_call<1, N>(call);
  bool done = false;
  switch (op) {
    case ENG_OP_relu:      done = map_dense<1, N>(w, Rule<ENG_OP_relu>{}); break;
    case ENG_OP_gelu:      done = map_dense<1, N>(w, Rule<ENG_OP_gelu>{}); break;
    case ENG_OP_gelu_tanh: done = map_dense<1, N>(w, Rule<ENG_OP_gelu_tanh>{}); break;
    case ENG_OP_silu:      done = map_dense<1, N>(w, Rule<ENG_OP_silu>{}); break;
  }
  if (!done) return map<1, N>(call, Rule<-1>{op});
  return cuda_launched(eng_op_name(call->op));
}

static eng_status unary(const op_call *call)
{
  if (!all_fast(call) || is_circular(call->op)) return each<1, 1>(call, unary_body{call->op});
  return run<unary_rule, 1>(call, call->op);
}

#define ENG_UNARY(name, ...) \
  extern "C" eng_status cuda_##name(const op_call *call) { return unary(call); }
#include "ops.def"

extern "C" eng_status cuda_unary_grad(const op_call *call)
{
  const int op = (int)call->unary_grad.of;
  if (!all_fast(call) || is_circular(op)) return each<1, 2>(call, slope_body{op});
  return run<slope_rule, 2>(call, op);
}

// ------------------------------------------------------------------ swiglu

struct swiglu_rule {
  template <int V> __device__ void operator()(float (&y)[1][V], const float (&x)[2][V]) const
  {
#pragma unroll
    for (int v = 0; v < V; v++) y[0][v] = swiglu_of(x[0][v], x[1][v]);
  }
  template <int V> __device__ void low(float (&y)[1][V], const float (&x)[2][V]) const
  {
#pragma unroll
    for (int v = 0; v < V; v++) y[0][v] = swiglu_low(x[0][v], x[1][v]);
  }
};

struct swiglu_body {
  __device__ void operator()(const walk<3> &w, const int64_t (&at)[3]) const
  {
    double gate = element_double(w.data[1], w.dtype[1], at[1]),
           up = element_double(w.data[2], w.dtype[2], at[2]);
    element_store(w.data[0], w.dtype[0], at[0], gate * sigmoid_double(gate) * up);
  }
};

extern "C" eng_status cuda_swiglu(const op_call *call)
{
  if (!all_fast(call)) return each<1, 2>(call, swiglu_body{});
  return map<1, 2>(call, swiglu_rule{});
}

// inputs gate, up and dy; outputs dgate and dup
struct swiglu_grad_rule {
  template <int V> __device__ void operator()(float (&y)[2][V], const float (&x)[3][V]) const
  {
#pragma unroll
    for (int v = 0; v < V; v++) {
      y[0][v] = silu_slope(x[0][v]) * x[2][v] * x[1][v];
      y[1][v] = x[0][v] * sigmoid(x[0][v]) * x[2][v];
    }
  }
};

struct swiglu_grad_body {
  __device__ void operator()(const walk<5> &w, const int64_t (&at)[5]) const
  {
    double gate = element_double(w.data[2], w.dtype[2], at[2]),
           up = element_double(w.data[3], w.dtype[3], at[3]);
    double dy = element_double(w.data[4], w.dtype[4], at[4]);
    if (w.data[0]) element_store(w.data[0], w.dtype[0], at[0], dy * up * silu_slope_double(gate));
    if (w.data[1]) element_store(w.data[1], w.dtype[1], at[1], dy * (gate * sigmoid_double(gate)));
  }
};

extern "C" eng_status cuda_swiglu_grad(const op_call *call)
{
  if (!all_fast(call)) return each<2, 3>(call, swiglu_grad_body{});
  return map<2, 3>(call, swiglu_grad_rule{});
}

// ------------------------------------------------------------------ dropout

/// Selects the elements to drop. Element i in row-major order takes word i % 4 of Philox block
/// counter + i / 4. The element is dropped if the word is below `least` << 8.
struct dropout_mask {
  uint64_t seed, counter;
  uint32_t least;    // the probability of a drop, in units of 2^-24
};

// Each thread processes V elements. The tensors are dense and have one format.
template <typename T, int V> static __global__ void __launch_bounds__(WALK_THREADS)
dropout_kernel(T *y, const T *x, int64_t count, dropout_mask mask, float factor)
{
  int64_t first = ((int64_t)blockIdx.x * WALK_THREADS + threadIdx.x) * V;
  if (first >= count) return;
  bool whole = first + V <= count;
  pack<T, V> p;
  if (whole) {
    p = *(const pack<T, V> *)(x + first);
  } else {
#pragma unroll
    for (int v = 0; v < V; v++) p.v[v] = x[first + v < count ? first + v : first];
  }
  uint32_t word[V];
#pragma unroll
  for (int v = 0; v < V; v += 4) {
    uint32_t four[4];
    philox_of(four, mask.seed, mask.counter + (uint64_t)(first + v) / 4);
#pragma unroll
    for (int j = 0; j < 4; j++) word[v + j] = four[j];
  }
#pragma unroll
  for (int v = 0; v < V; v++) {
    float kept = widen(p.v[v]) * factor;
    narrow(p.v[v], (word[v] >> 8) >= mask.least ? kept : 0.0f);
  }
  if (whole) {
    *(pack<T, V> *)(y + first) = p;
  } else {
#pragma unroll
    for (int v = 0; v < V; v++)
      if (first + v < count) y[first + v] = p.v[v];
  }
}

// Computes x / rest or, if `factor` is not 0, x * factor in f32, as dropout_kernel does.
static __global__ void dropout_elements(void *y, int y_dtype, const void *x, int x_dtype,
                                        int64_t count, dropout_mask mask, double rest, float factor)
{
  int64_t i = (int64_t)blockIdx.x * WALK_THREADS + threadIdx.x;
  if (i >= count) return;
  uint32_t word[4];
  philox_of(word, mask.seed, mask.counter + (uint64_t)i / 4);
  bool kept = (word_of_element(word, (uint64_t)i) >> 8) >= mask.least;
  double value = kept ? element_double(x, x_dtype, i) : 0.0;
  if (kept) value = factor != 0 ? (double)((float)value * factor) : value / rest;
  element_store(y, y_dtype, i, value);
}

extern "C" eng_status cuda_dropout(const op_call *call)
{
  const tensor *x = call->in[0], *y = call->out[0];
  double p = call->dropout.p, least = p * 0x1p24;
  dropout_mask mask = {rng_seed(), (uint64_t)call->dropout.counter, (uint32_t)least};
  // rounds up, so that word >> 8 >= least means (word >> 8) / 2^24 >= p
  if ((double)mask.least < least) mask.least++;
  bool aligned = ((uintptr_t)x->data | (uintptr_t)y->data) % 16 == 0,
       fast = is_fast(x->dtype) && is_fast(y->dtype);
  float factor = fast ? (float)(1.0 / (1.0 - p)) : 0.0f;
  if (fast && x->dtype == y->dtype && aligned) {
    with_fast_format(x->dtype, [&](auto t) {
      typedef decltype(t) T;
      constexpr int V = 16 / sizeof(T);
      dropout_kernel<T, V>
        <<<(unsigned)parts(x->count, WALK_THREADS * V), WALK_THREADS, 0, cuda_stream()>>>(
          (T *)y->data, (const T *)x->data, x->count, mask, factor);
    });
  } else {
    unsigned blocks = (unsigned)parts(x->count, WALK_THREADS);
    dropout_elements<<<blocks, WALK_THREADS, 0, cuda_stream()>>>(y->data, y->dtype, x->data,
                                                                 x->dtype, x->count, mask, 1.0 - p,
                                                                 factor);
  }
  return cuda_launched("dropout");
}
