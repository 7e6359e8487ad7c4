// The largest magnitude among f32, f16 or bf16 numbers, found by comparing bits: a NaN is larger
// than any number. Included by hadamard.c, gradstats.c and quantizers, once per instruction set.
// Owns nothing.
#pragma once

#include "simd_halves.h"

VF_INLINE vi magnitudes(vf x) { return vi_and((vi)x, vi_set1(0x7FFFFFFF)); }

// Returns the largest lane.
VF_INLINE uint32_t across(vi a)
{
#if defined(ENG_ISA_avx512)
  return (uint32_t)_mm512_reduce_max_epi32((__m512i)a);
#else
  int32_t most = 0;
  for (int l = 0; l < VF_LANES; l++) most = a[l] > most ? a[l] : most;
  return (uint32_t)most;
#endif
}

// Converts the magnitude bits of an f16 or bf16 to the bits of the equal f32.
VF_INLINE uint32_t widened(uint16_t half, int dtype)
{ return dtype == ENG_bf16 ? (uint32_t)half << 16 : f32_bits(f16_to_f32(half)); }

VF_INLINE uint32_t largest_of_floats(const float *x, int64_t n)
{
  vi a = {0}, b = {0};
  int64_t i = 0;
  for (; i + 2 * VF_LANES <= n; i += 2 * VF_LANES) {
    a = vi_larger_(a, magnitudes(vf_load(x + i)));
    b = vi_larger_(b, magnitudes(vf_load(x + i + VF_LANES)));
  }
  for (; i + VF_LANES <= n; i += VF_LANES) a = vi_larger_(a, magnitudes(vf_load(x + i)));
  if (i < n) a = vi_larger_(a, magnitudes(vf_load_n(x + i, (int)(n - i))));
  return across(vi_larger_(a, b));
}

VF_INLINE uint16_t largest_of_halves(const uint16_t *x, int64_t n)
{
  vh a = {0}, b = {0};
  int64_t i = 0;
  for (; i + 2 * HALVES <= n; i += 2 * HALVES) {
    a = vh_larger(a, vh_load(x + i) & 0x7FFF);
    b = vh_larger(b, vh_load(x + i + HALVES) & 0x7FFF);
  }
  for (; i + HALVES <= n; i += HALVES) a = vh_larger(a, vh_load(x + i) & 0x7FFF);
  if (i < n) b = vh_larger(b, vh_load_n(x + i, n - i) & 0x7FFF);
  return vh_across(vh_larger(a, b));
}

// Returns the largest magnitude of each of HALVES groups of 16 numbers.
VF_INLINE vh largest_of_sixteens(const uint16_t *x)
{
  vh v[16];
#pragma GCC unroll 16
  for (int k = 0; k < 16; k++) v[k] = vh_load(x + k * HALVES) & 0x7FFF;
#if defined(ENG_ISA_avx512)
  // Each round joins pairs of vectors by comparing neighbouring parts. The parts have 16 bits in
  // the first round, then 64, then 32, and 128 in the last.
#define JOIN(n, low, high)                                                \
  for (int k = 0; k < n; k++) {                                           \
    __m512i a = (__m512i)v[2 * k], b = (__m512i)v[2 * k + 1];             \
    v[k] = (vh)_mm512_max_epu16((low), (high));                           \
  }
#define SHUFFLED(a, b, order) \
  (__m512i) _mm512_shuffle_ps((__m512)(a), (__m512)(b), order)
  JOIN(8, _mm512_mask_blend_epi16(0xAAAAAAAA, a, _mm512_slli_epi32(b, 16)),
       _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(a, 16), b))
  JOIN(4, _mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b))
  JOIN(2, SHUFFLED(a, b, 0x88), SHUFFLED(a, b, 0xDD))
  JOIN(1, _mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xDD))
#undef JOIN
#undef SHUFFLED
  return __builtin_shufflevector(v[0], v[0], 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15,
                                 16, 24, 17, 25, 18, 26, 19, 27, 20, 28, 21, 29, 22, 30, 23, 31);
#else
#pragma GCC unroll 4
  for (int n = 8; n > 0; n /= 2)
#pragma GCC unroll 8
    for (int k = 0; k < n; k++) v[k] = vh_larger_neighbours(v[2 * k], v[2 * k + 1]);
  return v[0];
#endif
}

// Returns the largest magnitude of n elements from element `first` on, as f32 bits.
VF_INLINE uint32_t largest_magnitude(const void *x, int dtype, int64_t first, int64_t n)
{
  return dtype == ENG_f32 ? largest_of_floats((const float *)x + first, n)
                          : widened(largest_of_halves((const uint16_t *)x + first, n), dtype);
}
