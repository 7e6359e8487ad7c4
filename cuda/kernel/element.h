// Loads, stores and converts single elements whose format is known only at run time. Adds to the
// functions of base/element.h. Kernels use the functions of both files for f64, integers and
// unusual combinations of formats, where a branch per element costs less than compiling a kernel
// per combination. Included by kernel files. Owns nothing.
#pragma once

#include "runtime/device.h"

#include "base/element.h"

/// Loads element i of a tensor in a float format as T (float or double). The value is exact, except
/// that an f64 element is rounded once if T is float.
template <class T> __device__ static inline T load_as(const void *data, int dtype, int64_t i)
{
  switch (dtype) {
    case ENG_f32:  return (T)((const float *)data)[i];
    case ENG_f16:  return (T)widen(((const f16_t *)data)[i]);
    case ENG_bf16: return (T)widen(((const bf16_t *)data)[i]);
    default:       return (T)((const double *)data)[i];
  }
}

/// Rounds x once and stores it as element i of a tensor in a float format.
__device__ static inline void store_as(void *data, int dtype, int64_t i, float x)
{
  switch (dtype) {
    case ENG_f32:  ((float *)data)[i] = x; break;
    case ENG_f16:  narrow(((f16_t *)data)[i], x); break;
    case ENG_bf16: narrow(((bf16_t *)data)[i], x); break;
    default:       ((double *)data)[i] = x;
  }
}
__device__ static inline void store_as(void *data, int dtype, int64_t i, double x)
{
  switch (dtype) {
    case ENG_f32:  ((float *)data)[i] = (float)x; break;
    case ENG_f16:  ((uint16_t *)data)[i] = f16_from_f64(x); break;
    case ENG_bf16: ((uint16_t *)data)[i] = bf16_from_f64(x); break;
    default:       ((double *)data)[i] = x;
  }
}

/// Copies one element between tensors. If the formats agree, copies it bit for bit. Otherwise
/// converts it by the rules of base/element.h, so a float result is rounded once. Does not convert
/// from or to FP8; copy.cu does.
__device__ static inline void copy_element(void *to, int to_dtype, int64_t to_at, const void *from,
                                           int from_dtype, int64_t from_at)
{
  if (to_dtype == from_dtype) {
    switch (to_dtype) {
    case ENG_f64:
    case ENG_i64: ((uint64_t *)to)[to_at] = ((const uint64_t *)from)[from_at]; break;
    case ENG_f32:
    case ENG_i32: ((uint32_t *)to)[to_at] = ((const uint32_t *)from)[from_at]; break;
    case ENG_f16:
    case ENG_bf16:
    case ENG_i16: ((uint16_t *)to)[to_at] = ((const uint16_t *)from)[from_at]; break;
    default: ((uint8_t *)to)[to_at] = ((const uint8_t *)from)[from_at]; break;
    }
  } else if (dtype_is_float(from_dtype)) {
    element_store(to, to_dtype, to_at, element_double(from, from_dtype, from_at));
  } else if (dtype_is_float(to_dtype)) {
    element_store(to, to_dtype, to_at,
                 double_from_int(element_int(from, from_dtype, from_at), to_dtype == ENG_f64));
  } else {
    element_store_int(to, to_dtype, to_at, element_int(from, from_dtype, from_at));
  }
}

/// Returns the random word of element i. A Philox block has four words, one for each of four
/// elements. (Indexing with a variable would move the array from registers to local memory.)
__device__ static inline uint32_t word_of_element(const uint32_t (&word)[4], uint64_t i)
{ return i & 2 ? (i & 1 ? word[3] : word[2]) : (i & 1 ? word[1] : word[0]); }

/// V elements, aligned as a whole. One access loads or stores them if they have at most 16 bytes.
template <typename T, int V> struct alignas(sizeof(T) * V) pack { T v[V]; };

/// The exponential, the logarithm and a * b + c with one rounding, for kernel templates over float
/// and double.
__device__ static inline float  exp_of(float x)  { return expf(x); }
__device__ static inline double exp_of(double x) { return exp(x); }
__device__ static inline float  log_of(float x)  { return logf(x); }
__device__ static inline double log_of(double x) { return log(x); }
__device__ static inline float  fused(float a, float b, float c)    { return fmaf(a, b, c); }
__device__ static inline double fused(double a, double b, double c) { return fma(a, b, c); }

/// Whether every tensor of the call is f32, f16 or bf16 (absent tensors are ignored).
static inline bool all_fast(const op_call *call)
{
  for (int k = 0; k < call->n_in; k++)
    if (call->in[k] && !is_fast(call->in[k]->dtype)) return false;
  for (int k = 0; k < call->n_out; k++)
    if (call->out[k] && !is_fast(call->out[k]->dtype)) return false;
  return true;
}
