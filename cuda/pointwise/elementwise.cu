// Arithmetic, comparisons, where, affine, powers and clamp: elementwise, with any strides and
// broadcasting. f32, f16 and bf16 compute in f32 (map.h), f64 and integers in double and int64 with
// one thread per element. In every format, powers compute in double, except pow_scalar with the
// exponents 3, 2, 1, 1/2, -1/2 and -1, and so does affine if a constant is out of f32's normal
// range. Called through the device's table.
//
//   maximum, minimum   NaN if either input is NaN; of equal inputs (-0, +0) the first is returned
//   clamp              NaN stays NaN
//   integers           wrap; affine is exact if factor and term are integers, else it is in double
#include "kernel/map.h"

// ------------------------------------------------------------------ two inputs

template <int V>
__device__ static void binary_floats(int op, float (&y)[V], const float (&a)[V],
                                     const float (&b)[V])
{
#define EACH(formula) _Pragma("unroll") for (int v = 0; v < V; v++) y[v] = formula
  switch (op) {
    case ENG_OP_add:     EACH(a[v] + b[v]); break;
    case ENG_OP_sub:     EACH(a[v] - b[v]); break;
    case ENG_OP_mul:     EACH(a[v] * b[v]); break;
    case ENG_OP_maximum: EACH(a[v] >= b[v] || a[v] != a[v] ? a[v] : b[v]); break;
    default:             EACH(a[v] <= b[v] || a[v] != a[v] ? a[v] : b[v]); break;
  }
#undef EACH
}

struct binary_rule {
  int op;
  template <int V>
  __device__ void operator()(float (&y)[1][V], const float (&x)[2][V]) const
  { binary_floats(op, y[0], x[0], x[1]); }
};

struct quotient_rule {   // has a kernel of its own, because a division takes many registers
  template <int V> __device__ void operator()(float (&y)[1][V], const float (&x)[2][V]) const
  {
#pragma unroll
    for (int v = 0; v < V; v++) y[0][v] = x[0][v] / x[1][v];
  }
};

__device__ static double binary_double(int op, double a, double b)
{
  switch (op) {
    case ENG_OP_add:     return a + b;
    case ENG_OP_sub:     return a - b;
    case ENG_OP_mul:     return a * b;
    case ENG_OP_div:     return a / b;
    case ENG_OP_maximum: return a >= b || a != a ? a : b;
    case ENG_OP_minimum: return a <= b || a != a ? a : b;
    default:             return pow(a, b);
  }
}

__device__ static int64_t binary_int(int op, int64_t a, int64_t b)
{
  switch (op) {
    case ENG_OP_add:     return (int64_t)((uint64_t)a + (uint64_t)b);
    case ENG_OP_sub:     return (int64_t)((uint64_t)a - (uint64_t)b);
    case ENG_OP_mul:     return (int64_t)((uint64_t)a * (uint64_t)b);
    case ENG_OP_maximum: return a >= b ? a : b;
    default:             return a <= b ? a : b;
  }
}

struct binary_body {
  int op;
  __device__ void operator()(const walk<3> &w, const int64_t (&at)[3]) const
  {
    if (!dtype_is_float(w.dtype[0]))
      element_store_int(w.data[0], w.dtype[0], at[0],
                binary_int(op, element_int(w.data[1], w.dtype[1], at[1]),
                           element_int(w.data[2], w.dtype[2], at[2])));
    else
      element_store(w.data[0], w.dtype[0], at[0],
                   binary_double(op, element_double(w.data[1], w.dtype[1], at[1]),
                                 element_double(w.data[2], w.dtype[2], at[2])));
  }
};

static eng_status binary(const op_call *call)
{
  if (!all_fast(call)) return each<1, 2>(call, binary_body{call->op});
  return map<1, 2>(call, binary_rule{call->op});
}

extern "C" eng_status cuda_add(const op_call *call)     { return binary(call); }
extern "C" eng_status cuda_sub(const op_call *call)     { return binary(call); }
extern "C" eng_status cuda_mul(const op_call *call)     { return binary(call); }
extern "C" eng_status cuda_maximum(const op_call *call) { return binary(call); }
extern "C" eng_status cuda_minimum(const op_call *call) { return binary(call); }

extern "C" eng_status cuda_div(const op_call *call)
{
  if (!all_fast(call)) return each<1, 2>(call, binary_body{call->op});
  return map<1, 2>(call, quotient_rule{});
}

// Computes in double, because a power computed in f32 would be off by several units in the last
// place.
extern "C" eng_status cuda_pow(const op_call *call)
{ return each<1, 2>(call, binary_body{ENG_OP_pow}); }

// ------------------------------------------------------------------ comparisons

template <typename T> __device__ static bool compares(int op, T a, T b)
{
  switch (op) {
    case ENG_OP_eq: return a == b;
    case ENG_OP_ne: return a != b;
    case ENG_OP_lt: return a < b;
    case ENG_OP_le: return a <= b;
    case ENG_OP_gt: return a > b;
    default:        return a >= b;
  }
}

struct compare_rule {
  int op;
  template <int V> __device__ void operator()(float (&y)[1][V], const float (&x)[2][V]) const
  {
#pragma unroll
    for (int v = 0; v < V; v++) y[0][v] = compares(op, x[0][v], x[1][v]) ? 1.0f : 0.0f;
  }
};

struct compare_body {
  int op;
  __device__ void operator()(const walk<3> &w, const int64_t (&at)[3]) const
  {
    bool y;
    if (dtype_is_float(w.dtype[1]) || dtype_is_float(w.dtype[2]))
      y = compares(op, element_double(w.data[1], w.dtype[1], at[1]),
                   element_double(w.data[2], w.dtype[2], at[2]));
    else
      y = compares(op, element_int(w.data[1], w.dtype[1], at[1]),
                   element_int(w.data[2], w.dtype[2], at[2]));
    element_store_int(w.data[0], w.dtype[0], at[0], y);
  }
};

static eng_status comparison(const op_call *call)
{
  if (!is_fast(call->in[0]->dtype) || !is_fast(call->in[1]->dtype) ||
      call->out[0]->dtype != ENG_bool)
    return each<1, 2>(call, compare_body{call->op});
  return map<1, 2, false>(call, compare_rule{call->op});
}

extern "C" eng_status cuda_eq(const op_call *call) { return comparison(call); }
extern "C" eng_status cuda_ne(const op_call *call) { return comparison(call); }
extern "C" eng_status cuda_lt(const op_call *call) { return comparison(call); }
extern "C" eng_status cuda_le(const op_call *call) { return comparison(call); }
extern "C" eng_status cuda_gt(const op_call *call) { return comparison(call); }
extern "C" eng_status cuda_ge(const op_call *call) { return comparison(call); }

// ------------------------------------------------------------------ where

template <typename T, int V>
__device__ static pack<T, V> bits_at(const void *data, int64_t at, int64_t inner)
{
  if (inner) return *(const pack<T, V> *)((const T *)data + at);
  T one = ((const T *)data)[at];
  pack<T, V> p;
#pragma unroll
  for (int v = 0; v < V; v++) p.v[v] = one;
  return p;
}

// The walk holds y, condition (bool), a and b. The kernel copies bits, so y, a and b may have any
// format that all three share.
template <typename T, int V>
static __global__ void __launch_bounds__(WALK_THREADS) where_kernel(const walk<4> w)
{
  int64_t group = (int64_t)blockIdx.x * WALK_THREADS + threadIdx.x;
  if (group * V + V <= w.count) {
    int64_t at[4];
    walk_offsets(at, w, group);
    pack<uint8_t, V> condition = bits_at<uint8_t, V>(w.data[1], at[1], w.inner[1]);
    pack<T, V> a = bits_at<T, V>(w.data[2], at[2], w.inner[2]),
               b = bits_at<T, V>(w.data[3], at[3], w.inner[3]);
#pragma unroll
    for (int v = 0; v < V; v++) a.v[v] = condition.v[v] ? a.v[v] : b.v[v];
    *(pack<T, V> *)((T *)w.data[0] + at[0]) = a;
  }
  // the last group of a walk of one dimension may be short; then each thread copies one element of
  // that group
  int64_t i = w.count / V * V + threadIdx.x;
  if (V == 1 || blockIdx.x != gridDim.x - 1 || i >= w.count) return;
  int k = ((const uint8_t *)w.data[1])[i * w.inner[1]] ? 2 : 3;
  ((T *)w.data[0])[i] =
    k == 2 ? ((const T *)w.data[2])[i * w.inner[2]] : ((const T *)w.data[3])[i * w.inner[3]];
}

template <typename T> static void where_bits(walk<4> w)
{
  constexpr int V = 16 / sizeof(T);
  auto kernel = walk_bundle(w, V) ? where_kernel<T, V> : where_kernel<T, 1>;
  walk_parts<4>(w, 1, [=](const walk<4> &part, unsigned blocks) {
    kernel<<<blocks, WALK_THREADS, 0, cuda_stream()>>>(part);
  });
}

struct where_body {
  __device__ void operator()(const walk<4> &w, const int64_t (&at)[4]) const
  {
    if (element_double(w.data[1], w.dtype[1], at[1]) != 0)
      copy_element(w.data[0], w.dtype[0], at[0], w.data[2], w.dtype[2], at[2]);
    else copy_element(w.data[0], w.dtype[0], at[0], w.data[3], w.dtype[3], at[3]);
  }
};

extern "C" eng_status cuda_where(const op_call *call)
{
  const tensor *y = call->out[0], *condition = call->in[0], *a = call->in[1], *b = call->in[2];
  if (a->dtype != y->dtype || b->dtype != y->dtype || condition->dtype != ENG_bool)
    return each<1, 3>(call, where_body{});
  walk<4> w = walk_over<4>(y, {y, condition, a, b});
  switch (eng_dtype_size(y->dtype)) {
    case 1:  where_bits<uint8_t>(w); break;
    case 2:  where_bits<uint16_t>(w); break;
    case 4:  where_bits<uint32_t>(w); break;
    default: where_bits<uint64_t>(w);
  }
  return cuda_launched("where");
}

// ------------------------------------------------------------------ one input and scalars

// Whether x is finite, not 0, and outside the normal range of f32.
static bool beyond_f32(double x)
{
  double magnitude = x < 0 ? -x : x;
  return f64_is_finite(x) && x != 0 &&
         (magnitude > 3.4028234663852886e38 || magnitude < 1.1754943508222875e-38);
}

struct number_rule {
  int op;
  float a, b;
  template <int V> __device__ void operator()(float (&y)[1][V], const float (&x)[1][V]) const
  {
#pragma unroll
    for (int v = 0; v < V; v++) {
      float value = x[0][v];
      if (op == ENG_OP_affine) {
        value = fmaf(value, a, b);
      } else {
        value = value < a ? a : value;
        value = value > b ? b : value;
      }
      y[0][v] = value;
    }
  }
};

struct affine_body {
  double factor, shift;
  bool whole;
  __device__ void operator()(const walk<2> &w, const int64_t (&at)[2]) const
  {
    if (whole && !dtype_is_float(w.dtype[0]) && !dtype_is_float(w.dtype[1])) {
      uint64_t value = (uint64_t)element_int(w.data[1], w.dtype[1], at[1]);
      element_store_int(w.data[0], w.dtype[0], at[0],
                (int64_t)(value * (uint64_t)(int64_t)factor + (uint64_t)(int64_t)shift));
    } else {
      element_store(w.data[0], w.dtype[0], at[0],
                   element_double(w.data[1], w.dtype[1], at[1]) * factor + shift);
    }
  }
};

static bool whole_number(double x) { return x > -0x1p63 && x < 0x1p63 && x == (double)(int64_t)x; }

extern "C" eng_status cuda_affine(const op_call *call)
{
  double factor = call->affine.factor, shift = call->affine.term;
  if (!all_fast(call) || beyond_f32(factor) || beyond_f32(shift))
    return each<1, 1>(call,
                      affine_body{factor, shift, whole_number(factor) && whole_number(shift)});
  return map<1, 1>(call, number_rule{ENG_OP_affine, (float)factor, (float)shift});
}

struct clamp_body {
  double low, high;
  __device__ void operator()(const walk<2> &w, const int64_t (&at)[2]) const
  {
    double value = element_double(w.data[1], w.dtype[1], at[1]);
    double bounded = value < low ? low : value;
    bounded = bounded > high ? high : bounded;
    // elements that are not clamped keep every bit
    if (bounded != value && !f64_is_nan(value))
      element_store(w.data[0], w.dtype[0], at[0], bounded);
    else copy_element(w.data[0], w.dtype[0], at[0], w.data[1], w.dtype[1], at[1]);
  }
};

extern "C" eng_status cuda_clamp(const op_call *call)
{
  const double low = call->clamp.low, high = call->clamp.high;
  if (!all_fast(call)) return each<1, 1>(call, clamp_body{low, high});
  return map<1, 1>(call, number_rule{ENG_OP_clamp, (float)low, (float)high});
}

// Common exponents need no pow. As with pow, -0 and -inf to the power 1/2 are +0 and +inf.
__device__ static float root(float x) { return x == -INFINITY ? INFINITY : sqrtf(x) + 0.0f; }

struct power_rule {
  int twice;   // the exponent times two
  template <int V> __device__ void operator()(float (&y)[1][V], const float (&x)[1][V]) const
  {
#define EACH(formula) _Pragma("unroll") for (int v = 0; v < V; v++) y[0][v] = formula
    switch (twice) {
      case 6:  EACH(x[0][v] * x[0][v] * x[0][v]); break;
      case 4:  EACH(x[0][v] * x[0][v]); break;
      case 1:  EACH(root(x[0][v])); break;
      case -1: EACH(1.0f / root(x[0][v])); break;
      case -2: EACH(1.0f / x[0][v]); break;
      default: EACH(x[0][v]); break;
    }
#undef EACH
  }
};

struct power_body {
  double exponent;
  __device__ void operator()(const walk<2> &w, const int64_t (&at)[2]) const
  {
    element_store(w.data[0], w.dtype[0], at[0],
                 pow(element_double(w.data[1], w.dtype[1], at[1]), exponent));
  }
};

extern "C" eng_status cuda_pow_scalar(const op_call *call)
{
  double e = call->pow_scalar.exponent;
  bool plain = e == 3 || e == 2 || e == 1 || e == 0.5 || e == -0.5 || e == -1;
  if (!all_fast(call) || !plain) return each<1, 1>(call, power_body{e});
  return map<1, 1>(call, power_rule{(int)(2 * e)});
}
