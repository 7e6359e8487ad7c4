// Vectors of HALVES 16-bit lanes: loads, stores, and maxima. The maxima compare the bits of f16 and
// bf16 numbers as unsigned integers. The file ends with helpers for vectors of floats, which
// mx_encode.h and fp8_matmul.c use. Included by magnitude.h and fp8_matmul.c, once per instruction
// set. Owns nothing.
#pragma once

#include "simd.h"

enum { HALVES = 2 * VF_LANES };
typedef uint16_t vh __attribute__((vector_size(4 * VF_LANES), may_alias));
VF_INLINE vh vh_set1(uint32_t x)           { return (uint16_t)x - (vh){0}; }
VF_INLINE vh vh_load(const uint16_t *p)    { vh a; memcpy(&a, p, sizeof a); return a; }
VF_INLINE void vh_store(uint16_t *p, vh a) { memcpy(p, &a, sizeof a); }
// Loads the first n lanes, 0 <= n < HALVES; the other lanes are 0.
VF_INLINE vh vh_load_n(const uint16_t *p, int64_t n)
{
#if defined(ENG_ISA_avx512)
  return (vh)_mm512_maskz_loadu_epi16((1u << n) - 1, p);
#else
  vh a = {0};
  memcpy(&a, p, (size_t)n * sizeof *p);
  return a;
#endif
}
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
/// Returns the larger number of each adjacent pair in a, followed by the larger number of each
/// adjacent pair in b.
VF_INLINE vh vh_larger_neighbours(vh a, vh b)
{
  vi x = (vi)vh_larger(a, (vh)vi_shr((vi)a, 16)), y = (vi)vh_larger(b, (vh)vi_shr((vi)b, 16));
#if defined(ENG_ISA_avx512)
  return (vh)_mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16((__m512i)x)),
                                _mm512_cvtepi32_epi16((__m512i)y), 1);
#elif defined(ENG_ISA_avx2)
  vi low = vi_set1(0xFFFF);
  __m256i packed = _mm256_packus_epi32((__m256i)vi_and(x, low), (__m256i)vi_and(y, low));
  return (vh)_mm256_permute4x64_epi64(packed, 0xD8);
#else
  return __builtin_shufflevector((vh)x, (vh)y, 0, 2, 4, 6, 8, 10, 12, 14);
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

#if defined(ENG_ISA_avx512)
/// Returns the upper halves of HALVES floats.
VF_INLINE vh vh_high(const float *p)
{
  __m512i low = _mm512_srli_epi32((__m512i)vf_load(p), 16),
          high = _mm512_srli_epi32((__m512i)vf_load(p + VF_LANES), 16);
  return (vh)_mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(low)),
                                _mm512_cvtepi32_epi16(high), 1);
}
#endif

/// Stores the low byte of each lane.
VF_INLINE void vh_put_bytes(uint8_t *p, vh code)
{
#if defined(ENG_ISA_avx512)
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi16_epi8((__m512i)code));
#else
  for (int l = 0; l < HALVES; l++) p[l] = (uint8_t)code[l];
#endif
}

/// Returns a * b + c, rounded once on every instruction set.
VF_INLINE vf vf_fused(vf a, vf b, vf c)
{
#if defined(ENG_ISA_avx512) || defined(ENG_ISA_avx2)
  return vf_fma(a, b, c);
#else
  return (vf){fmaf(a[0], b[0], c[0]), fmaf(a[1], b[1], c[1]), fmaf(a[2], b[2], c[2]),
              fmaf(a[3], b[3], c[3])};
#endif
}
/// Returns a in the lower half of the lanes and b in the upper half.
VF_INLINE vf vf_set2(float a, float b)
{ return vf_select(vm_first(VF_LANES / 2), vf_set1(a), vf_set1(b)); }
/// Splits 2 * VF_LANES floats: to[0] gets the floats at even positions, to[1] the floats at odd
/// positions.
VF_INLINE void vf_deinterleave(vf to[2], const float *p)
{
  vf a = vf_load(p), b = vf_load(p + VF_LANES);
#if defined(ENG_ISA_avx512)
  to[0] = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  to[1] = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif defined(ENG_ISA_avx2)
  to[0] = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
  to[1] = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
  to[0] = __builtin_shufflevector(a, b, 0, 2, 4, 6);
  to[1] = __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}
