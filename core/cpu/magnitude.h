// The largest magnitude among f32, f16 or bf16 numbers, found by comparing bits: a NaN is larger
// than any number. Included by fp8_quantize.c, once per instruction set. Owns nothing.
#pragma once

#include "simd.h"

VF_INLINE vi magnitudes(vf x) { return vi_and((vi)x, vi_set1(0x7FFFFFFF)); }

// The largest lane.
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

// f16 and bf16 are compared as 16-bit integers, twice as many at a time.
typedef uint16_t vh __attribute__((vector_size(4 * VF_LANES), may_alias));
enum { HALVES = 2 * VF_LANES };
VF_INLINE vh vh_load(const uint16_t *p) { vh a; memcpy(&a, p, sizeof a); return a; }
VF_INLINE void vh_store(uint16_t *p, vh a) { memcpy(p, &a, sizeof a); }
VF_INLINE vh vh_larger(vh a, vh b)
{
#if defined(ENG_ISA_avx512)
  return (vh)_mm512_max_epu16((__m512i)a, (__m512i)b);
#elif defined(ENG_ISA_avx2)
  return (vh)_mm256_max_epu16((__m256i)a, (__m256i)b);
#else
  vh m = (vh)(a > b);
  return (m & a) | (~m & b);
#endif
}
VF_INLINE uint16_t vh_across(vh a)
{
#if defined(ENG_ISA_avx512) || defined(ENG_ISA_avx2)
#if defined(ENG_ISA_avx512)
  __m256i x =
    _mm256_max_epu16(_mm512_castsi512_si256((__m512i)a), _mm512_extracti64x4_epi64((__m512i)a, 1));
#else
  __m256i x = (__m256i)a;
#endif
  __m128i y = _mm_max_epu16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  return (uint16_t)~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(y, _mm_set1_epi16(-1))), 0);
#else
  uint16_t most = 0;
  for (int l = 0; l < HALVES; l++) most = a[l] > most ? a[l] : most;
  return most;
#endif
}

// A half-word's magnitude as the bits of a float.
VF_INLINE uint32_t widened(uint16_t half, int dtype)
{
  return dtype == ENG_bf16 ? (uint32_t)half << 16 : f32_bits(f16_to_f32(half));
}

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
  uint16_t most = vh_across(vh_larger(a, b));
  for (; i < n; i++) most = (x[i] & 0x7FFF) > most ? x[i] & 0x7FFF : most;
  return most;
}

// The largest magnitude of n elements from `first` on.
VF_INLINE uint32_t largest_magnitude(const void *x, int dtype, int64_t first, int64_t n)
{
  return dtype == ENG_f32 ? largest_of_floats((const float *)x + first, n)
                          : widened(largest_of_halves((const uint16_t *)x + first, n), dtype);
}
