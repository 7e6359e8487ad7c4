// Computes silu(gate) * up in f32, for swiglu (unary.cu) and swiglu_quantize (quantize.cu).
// Included by pointwise/unary.cu and quantized/quantize_tiles.h.
#pragma once

#include "kernel/ptx.h"
#include "vector.h"

__device__ static inline float sigmoid(float x)
{
  float z = expf(-fabsf(x));
  return (x >= 0.0f ? 1.0f : z) * reciprocal_fast(1.0f + z);   // if x is NaN, z is NaN too
}

__device__ static inline float swiglu_of(float gate, float up) { return gate * sigmoid(gate) * up; }

/// Returns the same as swiglu_of, with a relative error below 1e-5. It is for 16-bit results:
/// rounding to bf16 adds an error of 2e-3, rounding to f16 an error of 2e-4. If gate is below about
/// -87, the sigmoid is below 2^-126 and becomes 0.
__device__ static inline float swiglu_low(float gate, float up)
{ return gate * reciprocal_fast(1.0f + exp2_fast(gate * -1.4426950408889634f)) * up; }

/// Computes SwiGLU of V adjacent elements, held as words in memory order, and rounds it to T, a
/// 16-bit format.
template <typename T, int V>
__device__ static inline void swiglu_words(words<T, V> &h, const words<T, V> &gate,
                                           const words<T, V> &up)
{
  float g[V], u[V];
  widen_words(g, gate);
  widen_words(u, up);
#pragma unroll
  for (int v = 0; v < V; v++) g[v] = swiglu_low(g[v], u[v]);
  narrow_words(h, g);
}
