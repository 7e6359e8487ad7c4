// FP8 over vectors: codes of VF_LANES floats and back, bit-equal to core/fp8.h. Included by simd.h, between vectors and tiles.
// `fraction` is 3 for e4m3, 2 for e5m2, a constant where these are inlined. Owns nothing.
#ifndef ENG_SIMD_FP8_H
#define ENG_SIMD_FP8_H

VF_INLINE vi vi_least_(vi a, int32_t b)
{
#if defined(ENG_ISA_avx512)
  return (vi)_mm512_min_epi32((__m512i)a, _mm512_set1_epi32(b));
#else
  return vi_select(vi_gt(a, vi_set1(b)), vi_set1(b), a);
#endif
}

/// Codes of finite or infinite magnitudes, past the largest one, with sign and NaN put right.
VF_INLINE vi vf_fp8_finish_(vi code, vi bits, vi magnitude, const int fraction, const bool saturate)
{
  code = vi_least_(code, fraction == 3 ? (saturate ? 0x7E : 0x7F) : (saturate ? 0x7B : 0x7C));
  code = vi_or(code, vi_and(vi_shr(bits, 24), vi_set1(0x80)));
  return vi_select(vi_gt(magnitude, vi_set1(0x7F800000)), vi_set1(0x7F), code);
}

VF_INLINE vi vf_to_fp8(vf x, const int fraction, const bool saturate)
{
  const int bias = fraction == 3 ? 7 : 15, drop = 23 - fraction, unit = (127 + 24 - bias - fraction) << 23;
  vi bits = (vi)x, magnitude = vi_and(bits, vi_set1(0x7FFFFFFF));
  vi even = vi_add(vi_and(vi_shr(magnitude, drop), vi_set1(1)), vi_set1((1 << (drop - 1)) - 1));
  vi normal = vi_sub(vi_shr(vi_add(magnitude, even), drop), vi_set1((127 - bias) << fraction));
  vi subnormal = vi_sub((vi)vf_add((vf)magnitude, vf_from_bits(vi_set1(unit))), vi_set1(unit));
  vi code = vi_select(vi_gt(vi_set1((128 - bias) << 23), magnitude), subnormal, normal);
  return vf_fp8_finish_(code, bits, magnitude, fraction, saturate);
}

/// Stochastic rounding by one random word a lane.
VF_INLINE vi vf_to_fp8_random(vf x, vi random, const int fraction, const bool saturate)
{
  const int bias = fraction == 3 ? 7 : 15, drop = 23 - fraction;
  vi bits = (vi)x, magnitude = vi_and(bits, vi_set1(0x7FFFFFFF)), chance = vi_shr(random, 32 - drop);
  vi normal = vi_sub(vi_shr(vi_add(magnitude, chance), drop), vi_set1((127 - bias) << fraction));
  vm small = vi_gt(vi_set1((128 - bias) << 23), magnitude);
  vf steps = vf_mul((vf)vi_select(small, magnitude, vi_set1(0)), vf_from_bits(vi_set1((127 + bias - 1 + fraction + drop) << 23)));
  vi code = vi_select(small, vi_shr(vi_add(vf_to_vi(steps), chance), drop), normal);
  return vf_fp8_finish_(code, bits, magnitude, fraction, saturate);
}

#if defined(ENG_ISA_avx512)
VF_INLINE void vf_put_bytes_(uint8_t *p, vi code)          { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)code)); }
VF_INLINE void vf_put_bytes_n_(uint8_t *p, vi code, int n) { _mm_mask_storeu_epi8(p, vm_first(n), _mm512_cvtepi32_epi8((__m512i)code)); }
VF_INLINE __m128i vf_bytes_(const uint8_t *p)              { return _mm_loadu_si128((const __m128i *)p); }
VF_INLINE __m128i vf_bytes_n_(const uint8_t *p, int n)     { return _mm_maskz_loadu_epi8(vm_first(n), p); }
// e4m3's bits are those of an f16 256 times smaller, subnormals included.
VF_INLINE vf vf_of_e4m3_(__m128i bytes)
{
  __m256i wide = _mm256_cvtepu8_epi16(bytes), magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7F));
  __m256i half = _mm256_or_si256(_mm256_slli_epi16(magnitude, 7), _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8));
  vf x = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
  vi nan = vi_or(vi_and((vi)x, vi_set1((int32_t)0x80000000)), vi_set1(0x7FC00000));
  return vf_select(_mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7F)), (vf)nan, x);
}
VF_INLINE vf vf_of_e5m2_(__m128i bytes) { return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8)); }

#elif defined(ENG_ISA_avx2)
VF_INLINE __m128i vf_narrow_bytes_(vi code)
{
  __m256i packed = _mm256_packus_epi32((__m256i)code, (__m256i)code);   // lanes 0123 0123 | 4567 4567
  __m128i halves = _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
  return _mm_packus_epi16(halves, halves);
}
VF_INLINE void vf_put_bytes_(uint8_t *p, vi code)          { _mm_storel_epi64((__m128i *)p, vf_narrow_bytes_(code)); }
VF_INLINE void vf_put_bytes_n_(uint8_t *p, vi code, int n) { uint8_t b[16]; _mm_storeu_si128((__m128i *)b, vf_narrow_bytes_(code)); for (int i = 0; i < n; i++) p[i] = b[i]; }
VF_INLINE __m128i vf_bytes_(const uint8_t *p)              { return _mm_loadl_epi64((const __m128i *)p); }
VF_INLINE __m128i vf_bytes_n_(const uint8_t *p, int n)     { uint8_t b[8] = {0}; for (int i = 0; i < n; i++) b[i] = p[i]; return vf_bytes_(b); }
VF_INLINE vf vf_of_e4m3_(__m128i bytes)
{
  __m128i wide = _mm_cvtepu8_epi16(bytes), magnitude = _mm_and_si128(wide, _mm_set1_epi16(0x7F));
  __m128i half = _mm_or_si128(_mm_slli_epi16(magnitude, 7), _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8));
  vf x = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
  vi nan = vi_or(vi_and((vi)x, vi_set1((int32_t)0x80000000)), vi_set1(0x7FC00000));
  return vf_select((vm)_mm256_cvtepi16_epi32(_mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7F))), (vf)nan, x);
}
VF_INLINE vf vf_of_e5m2_(__m128i bytes) { return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 8)); }

#else
VF_INLINE void vf_put_bytes_(uint8_t *p, vi code)          { for (int l = 0; l < VF_LANES; l++) p[l] = (uint8_t)code[l]; }
VF_INLINE void vf_put_bytes_n_(uint8_t *p, vi code, int n) { for (int l = 0; l < n; l++) p[l] = (uint8_t)code[l]; }
VF_INLINE vi vf_bytes_(const uint8_t *p)                   { return (vi){p[0], p[1], p[2], p[3]}; }
VF_INLINE vi vf_bytes_n_(const uint8_t *p, int n)          { vi b = {0}; for (int l = 0; l < n; l++) b[l] = p[l]; return b; }
VF_INLINE vf vf_of_e4m3_(vi bytes)
{
  vi magnitude = bytes & 0x7F, sign = vi_shl(bytes & 0x80, 24);
  vi x = vi_select(magnitude < 8, (vi)(vi_to_vf(magnitude) * 0x1p-9f), vi_shl(magnitude, 20) + (120 << 23));
  return (vf)(sign | vi_select(magnitude == 0x7F, vi_set1(0x7FC00000), x));
}
VF_INLINE vf vf_of_e5m2_(vi bytes) { return vf_widen_f16_(vi_shl(bytes, 8)); }
#endif

VF_INLINE vf vf_load_fp8(const uint8_t *p, const int fraction)           { return fraction == 3 ? vf_of_e4m3_(vf_bytes_(p)) : vf_of_e5m2_(vf_bytes_(p)); }
VF_INLINE vf vf_load_fp8_n(const uint8_t *p, const int fraction, int n)  { return fraction == 3 ? vf_of_e4m3_(vf_bytes_n_(p, n)) : vf_of_e5m2_(vf_bytes_n_(p, n)); }
VF_INLINE void vf_store_fp8(uint8_t *p, vf x, const int fraction, const bool saturate)          { vf_put_bytes_(p, vf_to_fp8(x, fraction, saturate)); }
VF_INLINE void vf_store_fp8_n(uint8_t *p, vf x, const int fraction, const bool saturate, int n) { vf_put_bytes_n_(p, vf_to_fp8(x, fraction, saturate), n); }

VF_INLINE void fp8_decode_typed_(float *restrict to, const uint8_t *restrict from, const int fraction, int64_t n)
{
  int64_t i = 0;
  for (; i + VF_LANES <= n; i += VF_LANES) vf_store(to + i, vf_load_fp8(from + i, fraction));
  if (i < n) vf_store_n(to + i, vf_load_fp8_n(from + i, fraction, (int)(n - i)), (int)(n - i));
}

/// n codes as floats.
static inline __attribute__((unused)) void fp8_decode(float *restrict to, const uint8_t *restrict from, int dtype, int64_t n)
{
  if (dtype == ENG_e4m3) fp8_decode_typed_(to, from, 3, n);
  else fp8_decode_typed_(to, from, 2, n);
}

VF_INLINE void fp8_encode_typed_(uint8_t *restrict to, const float *restrict from, const int fraction, const bool saturate, const uint32_t *random, int64_t n)
{
  int64_t i = 0;
  if (random) {
    for (; i + VF_LANES <= n; i += VF_LANES)
      vf_put_bytes_(to + i, vf_to_fp8_random(vf_load(from + i), vi_load((const int32_t *)random + i), fraction, saturate));
    for (; i < n; i++) to[i] = fp8_from_f32(from[i], fraction, FP8_STOCHASTIC | (saturate ? FP8_SATURATE : 0), random[i]);
    return;
  }
  for (; i + VF_LANES <= n; i += VF_LANES) vf_store_fp8(to + i, vf_load(from + i), fraction, saturate);
  if (i < n) vf_store_fp8_n(to + i, vf_load_n(from + i, (int)(n - i)), fraction, saturate, (int)(n - i));
}

/// n floats as codes; `random`: a word for each of them where they are rounded stochastically, else NULL.
static inline __attribute__((unused)) void fp8_encode(uint8_t *restrict to, int dtype, const float *restrict from, int64_t n, bool saturate, const uint32_t *random)
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

#endif
