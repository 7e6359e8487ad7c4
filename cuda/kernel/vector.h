// Loads and stores adjacent elements of a float format as words, and converts them to and from f32.
// A loaded word stays packed until its elements are converted, so that several loads are in flight
// at the same time. (If the words were arrays of 16-bit members, the compiler would rearrange their
// halves as soon as a load arrives, and the next load would wait.) Included by kernel files. Owns
// nothing.
#pragma once

#include "runtime/device.h"

/// The unsigned integer type of SIZE bytes (2 or 4).
template <int SIZE> struct word_of { typedef uint32_t type; };
template <> struct word_of<2> { typedef uint16_t type; };

/// V elements of T, which together take 4, 8 or a multiple of 16 bytes. In memory they are aligned
/// to their total size, but to at most 16 bytes.
template <typename T, int V> struct words { uint32_t w[V * sizeof(T) / 4]; };

template <typename T, int V>
__device__ static inline void load_words(words<T, V> &to, const T *from)
{
  constexpr int BYTES = V * sizeof(T);
  if constexpr (BYTES >= 16) {
#pragma unroll
    for (int k = 0; k < BYTES / 16; k++) {
      uint4 piece = ((const uint4 *)from)[k];
      to.w[4 * k] = piece.x;
      to.w[4 * k + 1] = piece.y;
      to.w[4 * k + 2] = piece.z;
      to.w[4 * k + 3] = piece.w;
    }
  } else if constexpr (BYTES == 8) {
    uint2 piece = *(const uint2 *)from;
    to.w[0] = piece.x; to.w[1] = piece.y;
  } else {
    to.w[0] = *(const uint32_t *)from;
  }
}

template <typename T, int V>
__device__ static inline void store_words(T *to, const words<T, V> &from)
{
  constexpr int BYTES = V * sizeof(T);
  if constexpr (BYTES >= 16) {
#pragma unroll
    for (int k = 0; k < BYTES / 16; k++)
      ((uint4 *)to)[k] =
        uint4{from.w[4 * k], from.w[4 * k + 1], from.w[4 * k + 2], from.w[4 * k + 3]};
  } else if constexpr (BYTES == 8) {
    *(uint2 *)to = uint2{from.w[0], from.w[1]};
  } else {
    *(uint32_t *)to = from.w[0];
  }
}

template <int V>
__device__ static inline void widen_words(float (&to)[V], const words<float, V> &from)
{
#pragma unroll
  for (int v = 0; v < V; v++) to[v] = __uint_as_float(from.w[v]);
}
template <int V>
__device__ static inline void widen_words(float (&to)[V], const words<bf16_t, V> &from)
{
#pragma unroll
  for (int v = 0; v < V; v += 2) {
    to[v] = __uint_as_float(from.w[v / 2] << 16);
    to[v + 1] = __uint_as_float(from.w[v / 2] & 0xFFFF0000u);
  }
}
template <int V>
__device__ static inline void widen_words(float (&to)[V], const words<f16_t, V> &from)
{
#pragma unroll
  for (int v = 0; v < V; v += 2) {
    to[v] = widen(f16_t{(uint16_t)from.w[v / 2]});
    to[v + 1] = widen(f16_t{(uint16_t)(from.w[v / 2] >> 16)});
  }
}

// Rounds two elements as narrow() does, except that every NaN becomes the canonical NaN. If a group
// contains a NaN, narrow_words() therefore rounds the whole group again with narrow().
__device__ static inline uint32_t rounded_pair(bf16_t, float low, float high)
{
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *(uint32_t *)&pair;
}
__device__ static inline uint32_t rounded_pair(f16_t, float low, float high)
{
  __half2 pair = __floats2half2_rn(low, high);
  return *(uint32_t *)&pair;
}
template <typename T, int V>
__device__ static inline void narrow_words(words<T, V> &to, const float (&from)[V])
{
  bool any_nan = false;
#pragma unroll
  for (int v = 0; v < V; v += 2) {
    to.w[v / 2] = rounded_pair(T{}, from[v], from[v + 1]);
    any_nan |= (from[v] != from[v]) | (from[v + 1] != from[v + 1]);
  }
  if (!any_nan) return;
#pragma unroll
  for (int v = 0; v < V; v += 2) {
    T low, high;
    narrow(low, from[v]);
    narrow(high, from[v + 1]);
    to.w[v / 2] = (uint32_t)high.bits << 16 | low.bits;
  }
}
template <int V>
__device__ static inline void narrow_words(words<float, V> &to, const float (&from)[V])
{
#pragma unroll
  for (int v = 0; v < V; v++) to.w[v] = __float_as_uint(from[v]);
}
