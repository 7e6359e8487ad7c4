// Philox 4x32-10 (base/rng.h) on vectors: the random words of VF_LANES blocks at a time, in the
// order in which kernels use them. Included by kernels, once per instruction set. Owns nothing.
#pragma once

#include "simd.h"

// Multiplies 32-bit lanes by a constant; returns the low and high halves of the products.
VF_INLINE void multiply_(vu a, uint32_t factor, vu *low, vu *high)
{
#if defined(ENG_ISA_avx512)
  __m512i c = _mm512_set1_epi32((int32_t)factor), even = _mm512_mul_epu32((__m512i)a, c);
  __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), c);
  *low = (vu)_mm512_mask_shuffle_epi32(even, 0xAAAA, odd, 0xA0);
  *high = (vu)_mm512_mask_shuffle_epi32(odd, 0x5555, even, 0xF5);
#elif defined(ENG_ISA_avx2)
  __m256i c = _mm256_set1_epi32((int32_t)factor), even = _mm256_mul_epu32((__m256i)a, c);
  __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), c);
  *low = (vu)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  *high = (vu)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
#else
  for (int l = 0; l < VF_LANES; l++) {
    uint64_t product = (uint64_t)a[l] * factor;
    (*low)[l] = (uint32_t)product;
    (*high)[l] = (uint32_t)(product >> 32);
  }
#endif
}

// These functions interleave words of 32 or 64 bits within each 128-bit part.
#if defined(ENG_ISA_avx512)
VF_INLINE vu low32_(vu a, vu b)  { return (vu)_mm512_unpacklo_epi32((__m512i)a, (__m512i)b); }
VF_INLINE vu high32_(vu a, vu b) { return (vu)_mm512_unpackhi_epi32((__m512i)a, (__m512i)b); }
VF_INLINE vu low64_(vu a, vu b)  { return (vu)_mm512_unpacklo_epi64((__m512i)a, (__m512i)b); }
VF_INLINE vu high64_(vu a, vu b) { return (vu)_mm512_unpackhi_epi64((__m512i)a, (__m512i)b); }
#elif defined(ENG_ISA_avx2)
VF_INLINE vu low32_(vu a, vu b)  { return (vu)_mm256_unpacklo_epi32((__m256i)a, (__m256i)b); }
VF_INLINE vu high32_(vu a, vu b) { return (vu)_mm256_unpackhi_epi32((__m256i)a, (__m256i)b); }
VF_INLINE vu low64_(vu a, vu b)  { return (vu)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b); }
VF_INLINE vu high64_(vu a, vu b) { return (vu)_mm256_unpackhi_epi64((__m256i)a, (__m256i)b); }
#else
VF_INLINE vu low32_(vu a, vu b)  { return (vu){a[0], b[0], a[1], b[1]}; }
VF_INLINE vu high32_(vu a, vu b) { return (vu){a[2], b[2], a[3], b[3]}; }
VF_INLINE vu low64_(vu a, vu b)  { return (vu){a[0], a[1], b[0], b[1]}; }
VF_INLINE vu high64_(vu a, vu b) { return (vu){a[2], a[3], b[2], b[3]}; }
#endif

/// Computes the random words of VF_LANES blocks. On entry, w[k] holds word k of each block's
/// counter; on return, word k of each block's random words.
VF_INLINE void philox_rounds_(vu w[4], uint64_t seed)
{
  uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < 10; round++) {
    vu low_a, high_a, low_b, high_b;
    multiply_(w[0], 0xD2511F53u, &low_a, &high_a);
    multiply_(w[2], 0xCD9E8D57u, &low_b, &high_b);
    w[0] = high_b ^ w[1] ^ key0;
    w[2] = high_a ^ w[3] ^ key1;
    w[1] = low_b;
    w[3] = low_a;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

/// Sets words 0 and 1 of VF_LANES block counters. Lane l gets the 64-bit sum `counter` + place[l].
VF_INLINE void philox_counters_(vu w[4], uint64_t counter, vu place)
{
  w[0] = place + (uint32_t)counter;
  w[1] = (uint32_t)(counter >> 32) - (vu)(w[0] < (uint32_t)counter);   // < yields -1 on a carry
}

/// Stores in `word` the 4 * VF_LANES words of VF_LANES consecutive blocks from `counter` on, in
/// order. `high2` and `high3` are words 2 and 3 of Philox's counter.
VF_INLINE void philox_vectors_at(uint32_t *word, uint64_t seed, uint64_t counter, uint32_t high2,
                                 uint32_t high3)
{
  // Lane l computes block place[l], so that the final interleaving puts all words in order.
  enum { PARTS = VF_LANES / 4 };
  vu place;
  for (int l = 0; l < VF_LANES; l++) place[l] = (uint32_t)(PARTS * (l % 4) + l / 4);
  vu w[4] = {[2] = high2 + (vu){0}, [3] = high3 + (vu){0}};
  philox_counters_(w, counter, place);
  philox_rounds_(w, seed);
  vu a = low32_(w[0], w[1]), b = high32_(w[0], w[1]), c = low32_(w[2], w[3]),
     d = high32_(w[2], w[3]);
  vu out[4] = {low64_(a, c), high64_(a, c), low64_(b, d), high64_(b, d)};
  memcpy(word, out, sizeof out);
}

/// Does the work of philox_vectors_at for the stream of philox_of, where words 2 and 3 of the
/// counter are 0.
VF_INLINE void philox_vectors(uint32_t *word, uint64_t seed, uint64_t counter)
{ philox_vectors_at(word, seed, counter, 0, 0); }

/// Stores word k of VF_LANES blocks in word[k * line ..]. The first block has the number `counter`,
/// and the numbers of the blocks are `stride` apart.
VF_INLINE void philox_columns(uint32_t *word, int64_t line, uint64_t seed, uint64_t counter,
                              uint32_t stride)
{
  vu place, w[4] = {0};
  for (int l = 0; l < VF_LANES; l++) place[l] = (uint32_t)l * stride;
  philox_counters_(w, counter, place);
  philox_rounds_(w, seed);
  for (int k = 0; k < 4; k++) memcpy(word + k * line, &w[k], sizeof w[k]);
}
