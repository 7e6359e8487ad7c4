// Computes silu(gate) * up in f32, for swiglu (unary.cu) and swiglu_quantize (quantize.cu).
// Included by pointwise/unary.cu and quantized/quantize_tiles.h.
#pragma once

#include "vector.h"

__device__ static inline float sigmoid(float x)
{
  float z = expf(-fabsf(x));
  return (x >= 0.0f ? 1.0f : z) / (1.0f + z);   // if x is NaN, z is NaN too
}

__device__ static inline float swiglu_of(float gate, float up) { return gate * sigmoid(gate) * up; }

/// Computes SwiGLU of V adjacent elements, held as words in memory order, and rounds it to T.
template <typename T, int V>
__device__ static inline void swiglu_words(words<T, V> &h, const words<T, V> &gate,
                                           const words<T, V> &up)
{
  float g[V], u[V];
  widen_words(g, gate);
  widen_words(u, up);
#pragma unroll
  for (int v = 0; v < V; v++) g[v] = swiglu_of(g[v], u[v]);
  narrow_words(h, g);
}
