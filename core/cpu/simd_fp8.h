// Vectors of FP8: converts VF_LANES floats to codes and back, bit-equal to core/base/fp8.h.
// `fraction` is 3 for e4m3 and 2 for e5m2, a constant where these functions are inlined. Included
// by simd.h, after its vectors and before its tiles. Owns nothing.
#pragma once

VF_INLINE vi vi_least_(vi a, int32_t b)
{
#if defined(ENG_ISA_avx512)
  return (vi)_mm512_min_epi32((__m512i)a, _mm512_set1_epi32(b));
#else
  return vi_select(vi_gt(a, vi_set1(b)), vi_set1(b), a);
#endif
}

/// Returns a - b if that is positive, else 0. a and b must not be negative, and their low 16 bits
/// must be 0.
VF_INLINE vi vi_above_(vi a, int32_t b)
{
#if defined(ENG_ISA_avx512)
  return (vi)_mm512_subs_epu16((__m512i)a, _mm512_set1_epi32(b));
#elif defined(ENG_ISA_avx2)
  return (vi)_mm256_subs_epu16((__m256i)a, _mm256_set1_epi32(b));
#else
  return vi_select(vi_gt(a, vi_set1(b)), vi_sub(a, vi_set1(b)), vi_set1(0));
#endif
}

/// Returns, in the low bits of the lanes, the codes of magnitudes that round at most to the first
/// number past the format's largest (`bound` in vf_to_fp8). The higher bits are undefined.
/// `fraction` is 6 for e5m6. Let 2^e be the largest power of two not above the magnitude or, if the
/// magnitude is subnormal in the format, the smallest normal number. `drop` is how many of f32's
/// fraction bits the format lacks. Adding 2^(e + drop) rounds to the format's step, to nearest
/// even, and leaves the significand in the last bits of the sum.
VF_INLINE vi vf_fp8_magnitude_(vi magnitude, const int fraction)
{
  const int bias = fraction == 3 ? 7 : 15, drop = 23 - fraction, least = (128 - bias) << 23;
  vi binade = vi_above_(vi_and(magnitude, vi_set1(0x7F800000)), least);
  vi sum = (vi)vf_add((vf)magnitude, (vf)vi_add(binade, vi_set1(least + (drop << 23))));
  return vi_add(sum, vi_shr(binade, drop));
}
VF_INLINE vi vf_fp8_code_(vi bits, vi magnitude, const int fraction)
{
  return vi_or(vi_and(vf_fp8_magnitude_(magnitude, fraction), vi_set1(0x7F)),
               vi_and(vi_shr(bits, 24), vi_set1(0x80)));
}

VF_INLINE vi vf_to_fp8(vf x, const int fraction, const bool saturate)
{
  // The magnitude that replaces all larger magnitudes. With `saturate`, it is the format's largest
  // number, else the next number on the format's grid, whose code is e4m3's NaN or e5m2's Inf.
  const float bound =
    fraction == 3 ? (saturate ? 448.0f : 480.0f) : (saturate ? 57344.0f : 65536.0f);
  vi bits = (vi)x, magnitude = vi_and(bits, vi_set1(0x7FFFFFFF));
  vi code = vf_fp8_code_(bits, vi_least_(magnitude, (int32_t)f32_bits(bound)), fraction);
  return vi_select(vi_gt(magnitude, vi_set1(0x7F800000)), vi_set1(0x7F), code);
}

/// Does the work of vf_to_fp8 for numbers that are known to be in the format's range when rounded.
VF_INLINE vi vf_to_fp8_within(vf x, const int fraction)
{ return vf_fp8_code_((vi)x, vi_and((vi)x, vi_set1(0x7FFFFFFF)), fraction); }
/// Returns whether a magnitude is in the format's range when rounded. Returns false for NaN.
VF_INLINE bool fp8_is_within(float magnitude, const int fraction)
{ return fraction == 3 ? magnitude <= 464.0f : magnitude < 61440.0f; }

/// Returns the codes of numbers in e5m6, saturating.
VF_INLINE vi vf_to_e5m6(vf x)
{
  vi bits = (vi)x, magnitude = vi_and(bits, vi_set1(0x7FFFFFFF));
  vi code = vf_fp8_magnitude_(vi_least_(magnitude, (int32_t)f32_bits(E5M6_MAX)), 6);
  code = vi_or(vi_and(code, vi_set1(0x7FF)), vi_and(vi_shr(bits, 20), vi_set1(0x800)));
  return vi_select(vi_gt(magnitude, vi_set1(0x7F800000)), vi_set1(0x7E0), code);
}

/// Returns the codes of numbers rounded stochastically, with one random word per lane.
VF_INLINE vi vf_to_fp8_random(vf x, vi random, const int fraction, const bool saturate)
{
  const int bias = fraction == 3 ? 7 : 15, drop = 23 - fraction;
  vi bits = (vi)x, magnitude = vi_and(bits, vi_set1(0x7FFFFFFF)),
     chance = vi_shr(random, 32 - drop);
  vi normal = vi_sub(vi_shr(vi_add(magnitude, chance), drop), vi_set1((127 - bias) << fraction));
  vm small = vi_gt(vi_set1((128 - bias) << 23), magnitude);
  vf steps = vf_mul((vf)vi_select(small, magnitude, vi_set1(0)),
                    vf_from_bits(vi_set1((127 + bias - 1 + fraction + drop) << 23)));
  vi code = vi_select(small, vi_shr(vi_add(vf_to_vi(steps), chance), drop), normal);
  // A code past the largest number becomes the code of the largest number or, without `saturate`,
  // of NaN (e4m3) or Inf (e5m2).
  code = vi_least_(code, fraction == 3 ? (saturate ? 0x7E : 0x7F) : (saturate ? 0x7B : 0x7C));
  code = vi_or(code, vi_and(vi_shr(bits, 24), vi_set1(0x80)));
  return vi_select(vi_gt(magnitude, vi_set1(0x7F800000)), vi_set1(0x7F), code);
}

#if defined(ENG_ISA_avx512)
VF_INLINE void vf_put_bytes_n_(uint8_t *p, vi code, int n)
{
  __m128i bytes = _mm512_cvtepi32_epi8((__m512i)code);
  if (n == VF_LANES) _mm_storeu_si128((__m128i *)p, bytes);
  else _mm_mask_storeu_epi8(p, vm_first(n), bytes);
}
VF_INLINE __m128i vf_bytes_n_(const uint8_t *p, int n)
{
  return n == VF_LANES ? _mm_loadu_si128((const __m128i *)p)
                       : _mm_maskz_loadu_epi8(vm_first(n), p);
}
// The magnitude bits of an e4m3 number, shifted left by 7, are the magnitude bits of an f16 number
// that is 256 times smaller. This holds for subnormals, too.
VF_INLINE vf vf_of_e4m3_(__m128i bytes)
{
  __m256i wide = _mm256_cvtepu8_epi16(bytes),
          magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7F));
  __m256i half =
    _mm256_or_si256(_mm256_slli_epi16(magnitude, 7),
                    _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8));
  vf x = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
  vi nan = vi_or(vi_and((vi)x, vi_set1((int32_t)0x80000000)), vi_set1(0x7FC00000));
  return vf_select(_mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7F)), (vf)nan, x);
}
VF_INLINE vf vf_of_e5m2_(__m128i bytes)
{ return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8)); }

#elif defined(ENG_ISA_avx2)
VF_INLINE void vf_put_bytes_n_(uint8_t *p, vi code, int n)
{
  code = vi_and(code, vi_set1(0xFF));
  // `packed` holds lanes 0123 0123 | 4567 4567.
  __m256i packed = _mm256_packus_epi32((__m256i)code, (__m256i)code);
  __m128i halves = _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)),
          bytes = _mm_packus_epi16(halves, halves);
  if (n == VF_LANES) _mm_storel_epi64((__m128i *)p, bytes);
  else memcpy(p, &bytes, (size_t)n);
}
VF_INLINE __m128i vf_bytes_n_(const uint8_t *p, int n)
{
  if (n == VF_LANES) return _mm_loadl_epi64((const __m128i *)p);
  __m128i bytes = {0};
  memcpy(&bytes, p, (size_t)n);
  return bytes;
}
VF_INLINE vf vf_of_e4m3_(__m128i bytes)
{
  __m128i wide = _mm_cvtepu8_epi16(bytes), magnitude = _mm_and_si128(wide, _mm_set1_epi16(0x7F));
  __m128i half = _mm_or_si128(_mm_slli_epi16(magnitude, 7),
                              _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8));
  vf x = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
  vi nan = vi_or(vi_and((vi)x, vi_set1((int32_t)0x80000000)), vi_set1(0x7FC00000));
  return vf_select((vm)_mm256_cvtepi16_epi32(_mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7F))),
                   (vf)nan, x);
}
VF_INLINE vf vf_of_e5m2_(__m128i bytes)
{ return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 8)); }

#else
VF_INLINE void vf_put_bytes_n_(uint8_t *p, vi code, int n)
{ for (int l = 0; l < n; l++) p[l] = (uint8_t)code[l]; }
VF_INLINE vi vf_bytes_n_(const uint8_t *p, int n)
{
  if (n == VF_LANES) return (vi){p[0], p[1], p[2], p[3]};
  vi b = {0};
  for (int l = 0; l < n; l++) b[l] = p[l];
  return b;
}
VF_INLINE vf vf_of_e4m3_(vi bytes)
{
  vi magnitude = bytes & 0x7F, sign = vi_shl(bytes & 0x80, 24);
  vi x = vi_select(magnitude < 8, (vi)(vi_to_vf(magnitude) * 0x1p-9f),
                   vi_shl(magnitude, 20) + (120 << 23));
  return (vf)(sign | vi_select(magnitude == 0x7F, vi_set1(0x7FC00000), x));
}
VF_INLINE vf vf_of_e5m2_(vi bytes) { return vf_widen_f16_(vi_shl(bytes, 8)); }
#endif

VF_INLINE vf vf_load_fp8_n(const uint8_t *p, const int fraction, int n)
{ return fraction == 3 ? vf_of_e4m3_(vf_bytes_n_(p, n)) : vf_of_e5m2_(vf_bytes_n_(p, n)); }
VF_INLINE void vf_store_fp8_n(uint8_t *p, vf x, const int fraction, const bool saturate, int n)
{ vf_put_bytes_n_(p, vf_to_fp8(x, fraction, saturate), n); }

#if defined(ENG_ISA_avx512)
// These functions convert 32 bf16 numbers at a time. The numbers at even positions become one
// vector of floats, and the numbers at odd positions become another. The signs are restored in the
// finished codes.
VF_INLINE vf vf_even_bf16_(__m512i w) { return (vf)_mm512_slli_epi32(w, 16); }
VF_INLINE vf vf_odd_bf16_(__m512i w)
{ return (vf)_mm512_and_si512(w, _mm512_set1_epi32((int32_t)0xFFFF0000)); }
VF_INLINE __m512i vf_pair_codes_(vf even, vf odd, __m512i w, const int fraction)
{
  __m512i high = _mm512_slli_epi32((__m512i)vf_fp8_magnitude_((vi)odd, fraction), 16);
  __m512i code =
    _mm512_mask_blend_epi16(0xAAAAAAAAu, (__m512i)vf_fp8_magnitude_((vi)even, fraction), high);
  // Takes each bit from the code where the mask 0x7F is set, and from w (the sign) elsewhere.
  return _mm512_ternarylogic_epi32(_mm512_srli_epi16(w, 8), code, _mm512_set1_epi16(0x7F), 0xD8);
}

// Stores 32 bf16 numbers as FP8 codes; does not saturate.
VF_INLINE void vf_store_fp8_of_bf16_(uint8_t *p, const uint16_t *x, const int fraction)
{
  __m512i w = _mm512_loadu_si512(x), magnitude = _mm512_and_si512(w, _mm512_set1_epi16(0x7FFF));
  // 480 and 65536 as bf16, the bounds of vf_to_fp8
  __m512i bounded = _mm512_min_epu16(magnitude, _mm512_set1_epi16(fraction == 3 ? 0x43F0 : 0x4780));
  __m512i code = vf_pair_codes_(vf_even_bf16_(bounded), vf_odd_bf16_(bounded), w, fraction);
  code = _mm512_mask_mov_epi16(code, _mm512_cmpgt_epu16_mask(magnitude, _mm512_set1_epi16(0x7F80)),
                               _mm512_set1_epi16(0x7F));
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi16_epi8(code));
}
#endif

VF_INLINE void fp8_of_halves_typed_(uint8_t *restrict to, const uint16_t *restrict from,
                                    const bool is_f16, const int fraction, int64_t n)
{
  int64_t i = 0;
#if defined(ENG_ISA_avx512)
  for (; !is_f16 && i + 2 * VF_LANES <= n; i += 2 * VF_LANES) {
    __builtin_prefetch(from + i + 1024);   // the hardware prefetcher stops at page boundaries
    vf_store_fp8_of_bf16_(to + i, from + i, fraction);
  }
#endif
  FOR_VECTORS(k, n - i, {
    vf x = vf_read(from, is_f16 ? ENG_f16 : ENG_bf16, i + k, lanes);
    vf_store_fp8_n(to + i + k, x, fraction, false, lanes);
  });
}

/// Converts n numbers of f16 or bf16 to codes; does not saturate.
static inline void fp8_of_halves(uint8_t *restrict to, int dtype, const uint16_t *restrict from,
                                 bool is_f16, int64_t n)
{
  if (dtype == ENG_e4m3) {
    if (is_f16) fp8_of_halves_typed_(to, from, true, 3, n);
    else fp8_of_halves_typed_(to, from, false, 3, n);
  } else {
    if (is_f16) fp8_of_halves_typed_(to, from, true, 2, n);
    else fp8_of_halves_typed_(to, from, false, 2, n);
  }
}

/// Converts n codes to floats.
static inline void fp8_decode(float *restrict to, const uint8_t *restrict from, int dtype,
                              int64_t n)
{
  if (dtype == ENG_e4m3)
    FOR_VECTORS(i, n, { vf_store_n(to + i, vf_load_fp8_n(from + i, 3, lanes), lanes); });
  else
    FOR_VECTORS(i, n, { vf_store_n(to + i, vf_load_fp8_n(from + i, 2, lanes), lanes); });
}

VF_INLINE void fp8_encode_typed_(uint8_t *restrict to, const float *restrict from,
                                 const int fraction, const bool saturate, const uint32_t *random,
                                 int64_t n)
{
  FOR_VECTORS(i, n, {
    vf x = vf_load_n(from + i, lanes);
    vi code;
    if (random) {
      vi words = (vi)vf_load_n((const float *)(const void *)(random + i), lanes);
      code = vf_to_fp8_random(x, words, fraction, saturate);
    } else {
      code = vf_to_fp8(x, fraction, saturate);
    }
    vf_put_bytes_n_(to + i, code, lanes);
  });
}

/// Converts n floats to codes. `random` holds one word per float for stochastic rounding; NULL
/// means rounding to nearest even.
static inline void fp8_encode(uint8_t *restrict to, int dtype, const float *restrict from,
                              int64_t n, bool saturate, const uint32_t *random)
{
  if (dtype == ENG_e4m3) {
    if (random) fp8_encode_typed_(to, from, 3, saturate, random, n);
    else if (saturate) fp8_encode_typed_(to, from, 3, true, NULL, n);
    else fp8_encode_typed_(to, from, 3, false, NULL, n);
  } else {
    if (random) fp8_encode_typed_(to, from, 2, saturate, random, n);
    else if (saturate) fp8_encode_typed_(to, from, 2, true, NULL, n);
    else fp8_encode_typed_(to, from, 2, false, NULL, n);
  }
}
