// simd.h: one vector type for the CPU kernels. On x86-64, a kernel file is compiled three times,
// with ENG_ISA_plain, ENG_ISA_avx2 or ENG_ISA_avx512 defined; elsewhere once, with ENG_ISA_plain.
// This header gives each build float vectors of 4, 8 or 16 lanes under the same names, conversions
// that are bit-equal to numerics.h, and tiles: buffers of f32 through which one loop serves every
// mix of f32, f16 and bf16 tensors. The elementary functions are in vmath.h. Included by the kernel
// files of cpu/ only. Owns nothing.
//
// vf   VF_LANES floats             vi   VF_LANES int32
// vm   a mask, one flag per lane   vf16 VF_LANES numbers of 16 bits
//
// Rules that hold on every instruction set:
//   vf_min(a, b), vf_max(a, b)   give b where either is NaN, and where both are zero; to keep the
//                                NaN of a value, pass the value as b
//   vf_fma(a, b, c)              a*b + c; rounded once on avx2 and avx512, twice in the plain build
//                                (which is therefore not bit-equal to the other builds)
//   comparisons                  false where either side is NaN, except vf_ne, which is true there
//   *_n(pointer, n)              touches the first n lanes only, 0 <= n <= VF_LANES; a load fills
//                                the other lanes with 0; n = VF_LANES costs no more than a plain
//                                load or store
//   vf_sum, vf_maxall            reduce the lanes in a fixed order: the upper half is folded onto
//                                the lower half until one lane is left
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "base/numerics.h"
#include "tensor/tensor.h"

#define VF_INLINE static inline __attribute__((always_inline, unused))

#if defined(ENG_ISA_avx512)
#include <immintrin.h>
#define ISA_NAME(x) x##_avx512
enum { VF_LANES = 16 };
typedef __m512 vf;
typedef int32_t vi __attribute__((vector_size(64), may_alias));
typedef __mmask16 vm;
#elif defined(ENG_ISA_avx2)
#include <immintrin.h>
#define ISA_NAME(x) x##_avx2
enum { VF_LANES = 8 };
typedef __m256 vf;
typedef int32_t vi __attribute__((vector_size(32), may_alias));
typedef vi vm;   // -1 or 0 in each lane
#else
#define ISA_NAME(x) x##_plain
enum { VF_LANES = 4 };
typedef float vf __attribute__((vector_size(16), may_alias));
typedef int32_t vi __attribute__((vector_size(16), may_alias));
typedef vi vm;
#endif
typedef uint32_t vu __attribute__((vector_size(4 * VF_LANES), may_alias));

// ------------------------------------------------------------------ same on every instruction set

VF_INLINE vf vf_zero(void)       { return (vf){0}; }
VF_INLINE vf vf_set1(float x)    { return x - (vf){0}; }      // x - 0 keeps -0 and NaN
VF_INLINE vi vi_set1(int32_t x)  { return x + (vi){0}; }
VF_INLINE vi vf_bits(vf a)       { return (vi)a; }
VF_INLINE vf vf_from_bits(vi a)  { return (vf)a; }

VF_INLINE vf vf_add(vf a, vf b)  { return a + b; }
VF_INLINE vf vf_sub(vf a, vf b)  { return a - b; }
VF_INLINE vf vf_mul(vf a, vf b)  { return a * b; }
VF_INLINE vf vf_div(vf a, vf b)  { return a / b; }
VF_INLINE vf vf_neg(vf a)        { return (vf)((vi)a ^ (int32_t)0x80000000); }
VF_INLINE vf vf_abs(vf a)        { return (vf)((vi)a & 0x7FFFFFFF); }
/// Returns the magnitude of a with the sign of b.
VF_INLINE vf vf_copysign(vf a, vf b)
{ return (vf)(((vi)a & 0x7FFFFFFF) | ((vi)b & (int32_t)0x80000000)); }

VF_INLINE vi vi_add(vi a, vi b)  { return (vi)((vu)a + (vu)b); }   // wraps
VF_INLINE vi vi_sub(vi a, vi b)  { return (vi)((vu)a - (vu)b); }
VF_INLINE vi vi_and(vi a, vi b)  { return a & b; }
VF_INLINE vi vi_or(vi a, vi b)   { return a | b; }
VF_INLINE vi vi_xor(vi a, vi b)  { return a ^ b; }
VF_INLINE vi vi_shl(vi a, int n) { return (vi)((vu)a << n); }
VF_INLINE vi vi_shr(vi a, int n) { return (vi)((vu)a >> n); }   // shifts in zeros
VF_INLINE vi vi_sar(vi a, int n) { return a >> n; }             // shifts in the sign
VF_INLINE vi vi_load(const int32_t *p)     { vi a; memcpy(&a, p, sizeof a); return a; }
VF_INLINE void vi_store(int32_t *p, vi a)  { memcpy(p, &a, sizeof a); }

VF_INLINE vm vm_and(vm a, vm b)            { return a & b; }
VF_INLINE vm vm_or(vm a, vm b)             { return a | b; }
VF_INLINE vm vm_not(vm a)                  { return (vm)~a; }

#if !defined(ENG_ISA_avx512)
VF_INLINE vm vi_gt(vi a, vi b)             { return a > b; }
VF_INLINE vm vi_eq(vi a, vi b)             { return a == b; }
VF_INLINE vm vf_lt(vf a, vf b)             { return (vm)(a < b); }
VF_INLINE vm vf_le(vf a, vf b)             { return (vm)(a <= b); }
VF_INLINE vm vf_gt(vf a, vf b)             { return (vm)(a > b); }
VF_INLINE vm vf_ge(vf a, vf b)             { return (vm)(a >= b); }
VF_INLINE vm vf_eq(vf a, vf b)             { return (vm)(a == b); }
VF_INLINE vm vf_ne(vf a, vf b)             { return (vm)(a != b); }
VF_INLINE vi vi_select(vm m, vi a, vi b)   { return (m & a) | (~m & b); }
VF_INLINE vi vi_larger_(vi a, vi b)
{
#if defined(ENG_ISA_avx2)
  return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
  return vi_select(a > b, a, b);
#endif
}
#endif

#if !defined(ENG_ISA_plain)
// sum8_ and max8_ fold the upper half of the lanes onto the lower half until one lane is left.
VF_INLINE float sum8_(__m256 a)
{
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

VF_INLINE float max8_(__m256 a)
{
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
#endif

#if defined(ENG_ISA_avx512)
// ------------------------------------------------------------------ AVX-512

VF_INLINE vm vm_first(int n)               { return (vm)((1u << n) - 1u); }
/// Returns one bit per lane. The bit of lane 0 is the lowest.
VF_INLINE uint32_t vm_bits(vm a)           { return a; }

VF_INLINE vf vf_load(const float *p)       { return _mm512_loadu_ps(p); }
VF_INLINE void vf_store(float *p, vf a)    { _mm512_storeu_ps(p, a); }
VF_INLINE void vf_stream_(float *p, vf a)  { _mm512_stream_ps(p, a); }
VF_INLINE vf vf_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps(vm_first(n), p); }
VF_INLINE void vf_store_n(float *p, vf a, int n)    { _mm512_mask_storeu_ps(p, vm_first(n), a); }

VF_INLINE vf vf_fma(vf a, vf b, vf c)      { return _mm512_fmadd_ps(a, b, c); }
VF_INLINE vf vf_max(vf a, vf b)            { return _mm512_max_ps(a, b); }
VF_INLINE vf vf_min(vf a, vf b)            { return _mm512_min_ps(a, b); }
VF_INLINE vf vf_sqrt(vf a)                 { return _mm512_sqrt_ps(a); }
/// Rounds to the nearest integer, ties to even.
VF_INLINE vf vf_rint(vf a)                 { return _mm512_roundscale_ps(a, 8); }
VF_INLINE vi vf_to_vi(vf a)                { return (vi)_mm512_cvttps_epi32(a); }   // toward zero
VF_INLINE vf vi_to_vf(vi a)                { return _mm512_cvtepi32_ps((__m512i)a); }

VF_INLINE vm vf_lt(vf a, vf b)             { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
VF_INLINE vm vf_le(vf a, vf b)             { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
VF_INLINE vm vf_gt(vf a, vf b)             { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
VF_INLINE vm vf_ge(vf a, vf b)             { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
VF_INLINE vm vf_eq(vf a, vf b)             { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
VF_INLINE vm vf_ne(vf a, vf b)             { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ); }
VF_INLINE vm vi_gt(vi a, vi b) { return _mm512_cmpgt_epi32_mask((__m512i)a, (__m512i)b); }
VF_INLINE vm vi_eq(vi a, vi b) { return _mm512_cmpeq_epi32_mask((__m512i)a, (__m512i)b); }
/// Returns a where the mask is set and b elsewhere.
VF_INLINE vf vf_select(vm m, vf a, vf b)   { return _mm512_mask_blend_ps(m, b, a); }
VF_INLINE vi vi_select(vm m, vi a, vi b)
{ return (vi)_mm512_mask_blend_epi32(m, (__m512i)b, (__m512i)a); }
/// Returns the larger of each pair of lanes.
VF_INLINE vi vi_larger_(vi a, vi b) { return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b); }

VF_INLINE __m256 low_(vf a)                { return _mm512_castps512_ps256(a); }
VF_INLINE __m256 high_(vf a)               { return _mm512_extractf32x8_ps(a, 1); }
VF_INLINE float vf_sum(vf a)               { return sum8_(_mm256_add_ps(low_(a), high_(a))); }
VF_INLINE float vf_maxall(vf a)            { return max8_(_mm256_max_ps(low_(a), high_(a))); }

typedef __m256i vf16;
VF_INLINE vf16 vf16_of_words_(vi a)        { return _mm512_cvtepi32_epi16((__m512i)a); }
VF_INLINE vf16 vf16_load_n_(const uint16_t *p, int n)
{ return _mm256_maskz_loadu_epi16(vm_first(n), p); }
VF_INLINE void vf16_store_n_(uint16_t *p, vf16 h, int n)
{ _mm256_mask_storeu_epi16(p, vm_first(n), h); }
VF_INLINE vf vf_widen_f16_(vf16 h)       { return _mm512_cvtph_ps(h); }
VF_INLINE vf16 vf_narrow_f16_(vf a) { return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT); }
VF_INLINE vf vf_widen_bf16_(vf16 h) { return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16); }

#elif defined(ENG_ISA_avx2)
// ------------------------------------------------------------------ AVX2 with FMA and F16C

VF_INLINE vm vm_first(int n)               { return (vi){0, 1, 2, 3, 4, 5, 6, 7} < n; }
VF_INLINE uint32_t vm_bits(vm a)           { return (uint32_t)_mm256_movemask_ps((__m256)a); }

VF_INLINE vf vf_load(const float *p)       { return _mm256_loadu_ps(p); }
VF_INLINE void vf_store(float *p, vf a)    { _mm256_storeu_ps(p, a); }
VF_INLINE void vf_stream_(float *p, vf a)  { _mm256_stream_ps(p, a); }
VF_INLINE vf vf_load_n(const float *p, int n)
{ return n == VF_LANES ? vf_load(p) : _mm256_maskload_ps(p, (__m256i)vm_first(n)); }
VF_INLINE void vf_store_n(float *p, vf a, int n)
{
  if (n == VF_LANES) vf_store(p, a);
  else _mm256_maskstore_ps(p, (__m256i)vm_first(n), a);
}

VF_INLINE vf vf_fma(vf a, vf b, vf c)      { return _mm256_fmadd_ps(a, b, c); }
VF_INLINE vf vf_max(vf a, vf b)            { return _mm256_max_ps(a, b); }
VF_INLINE vf vf_min(vf a, vf b)            { return _mm256_min_ps(a, b); }
VF_INLINE vf vf_sqrt(vf a)                 { return _mm256_sqrt_ps(a); }
VF_INLINE vf vf_rint(vf a)                 { return _mm256_round_ps(a, 8); }
VF_INLINE vi vf_to_vi(vf a)                { return (vi)_mm256_cvttps_epi32(a); }
VF_INLINE vf vi_to_vf(vi a)                { return _mm256_cvtepi32_ps((__m256i)a); }

VF_INLINE vf vf_select(vm m, vf a, vf b)   { return _mm256_blendv_ps(b, a, (__m256)m); }

VF_INLINE float vf_sum(vf a)               { return sum8_(a); }
VF_INLINE float vf_maxall(vf a)            { return max8_(a); }

typedef __m128i vf16;
// Narrows words below 2^16 to 16 bits.
VF_INLINE vf16 vf16_of_words_(vi a)
{
  // `packed` holds lanes 0123 0123 | 4567 4567.
  __m256i packed = _mm256_packus_epi32((__m256i)a, (__m256i)a);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
VF_INLINE vf16 vf16_load_n_(const uint16_t *p, int n)
{
  if (n == VF_LANES) return _mm_loadu_si128((const __m128i *)p);
  vf16 h = {0};
  memcpy(&h, p, (size_t)n * sizeof *p);
  return h;
}
VF_INLINE void vf16_store_n_(uint16_t *p, vf16 h, int n)
{
  if (n == VF_LANES) _mm_storeu_si128((__m128i *)p, h);
  else memcpy(p, &h, (size_t)n * sizeof *p);
}
VF_INLINE vf vf_widen_f16_(vf16 h)       { return _mm256_cvtph_ps(h); }
VF_INLINE vf16 vf_narrow_f16_(vf a) { return _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT); }
VF_INLINE vf vf_widen_bf16_(vf16 h) { return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16); }

#else
// ------------------------------------------------------------------ plain C, any processor

VF_INLINE vm vm_first(int n)               { return (vi){0, 1, 2, 3} < n; }
VF_INLINE uint32_t vm_bits(vm a)
{ return (uint32_t)((a[0] & 1) | (a[1] & 2) | (a[2] & 4) | (a[3] & 8)); }

VF_INLINE vf vf_load(const float *p)       { vf a; memcpy(&a, p, sizeof a); return a; }
VF_INLINE void vf_store(float *p, vf a)    { memcpy(p, &a, sizeof a); }
VF_INLINE vf vf_load_n(const float *p, int n)
{
  if (n == VF_LANES) return vf_load(p);
  vf a = {0};
  memcpy(&a, p, (size_t)n * sizeof *p);
  return a;
}
VF_INLINE void vf_store_n(float *p, vf a, int n)
{
  if (n == VF_LANES) vf_store(p, a);
  else memcpy(p, &a, (size_t)n * sizeof *p);
}

VF_INLINE vf vf_select(vm m, vf a, vf b)   { return (vf)((m & (vi)a) | (~m & (vi)b)); }

VF_INLINE vf vf_fma(vf a, vf b, vf c)      { return a * b + c; }
VF_INLINE vf vf_max(vf a, vf b)            { return vf_select(a > b, a, b); }
VF_INLINE vf vf_min(vf a, vf b)            { return vf_select(a < b, a, b); }
VF_INLINE vf vf_sqrt(vf a) { return (vf){sqrtf(a[0]), sqrtf(a[1]), sqrtf(a[2]), sqrtf(a[3])}; }
// Adding 2^23 leaves no bits for a fraction; every number from 2^23 on is an integer already.
VF_INLINE vf vf_rint(vf a)
{
  vf t = vf_abs(a), whole = (t + 8388608.0f) - 8388608.0f;
  return vf_select(t < 8388608.0f, vf_copysign(whole, a), a);
}
VF_INLINE vi vf_to_vi(vf a)                { return __builtin_convertvector(a, vi); }
VF_INLINE vf vi_to_vf(vi a)                { return __builtin_convertvector(a, vf); }

VF_INLINE float vf_sum(vf a)               { return (a[0] + a[2]) + (a[1] + a[3]); }
VF_INLINE float vf_maxall(vf a)
{
  float x = a[0] > a[2] ? a[0] : a[2], y = a[1] > a[3] ? a[1] : a[3];
  return x > y ? x : y;
}

typedef vi vf16;   // each number in the low half of a lane
VF_INLINE vf16 vf16_of_words_(vi a)        { return a; }
VF_INLINE vf16 vf16_load_n_(const uint16_t *p, int n)
{
  if (n == VF_LANES) return (vi){p[0], p[1], p[2], p[3]};
  vi h = {0};
  for (int l = 0; l < n; l++) h[l] = p[l];
  return h;
}
VF_INLINE void vf16_store_n_(uint16_t *p, vf16 h, int n)
{ for (int l = 0; l < n; l++) p[l] = (uint16_t)h[l]; }
VF_INLINE vf vf_widen_f16_(vf16 h)
{
  vi magnitude = h & 0x7FFF, sign = vi_shl(h & 0x8000, 16);
  vi normal = vi_shl(magnitude, 13) + 0x38000000;
  vi special = vi_shl(magnitude, 13) | 0x7F800000;
  special = vi_select(magnitude > 0x7C00, special | 0x00400000, special);
  vf subnormal = vi_to_vf(magnitude) * 0x1p-24f;
  vi result =
    vi_select(magnitude < 0x0400, (vi)subnormal, vi_select(magnitude >= 0x7C00, special, normal));
  return (vf)(result | sign);
}
VF_INLINE vf16 vf_narrow_f16_(vf a)
{
  vi bits = (vi)a, magnitude = bits & 0x7FFFFFFF, sign = vi_shr(bits, 16) & 0x8000;
  vi normal = vi_shr(vi_add(magnitude, (vi_shr(magnitude, 13) & 1) + (0xFFF - 0x38000000)), 13);
  // An f32 from 0.5 to 1 is a multiple of 2^-24, so the addition rounds to the step of f16's
  // subnormals.
  vi subnormal = (vi)((vf)magnitude + 0.5f) - 0x3F000000;
  vi nan = (vi_shr(magnitude, 13) & 0x3FF) | 0x7E00;
  vi result =
    vi_select(magnitude < 0x38800000, subnormal,
              vi_select(magnitude >= 0x477FF000, (vi){0x7C00, 0x7C00, 0x7C00, 0x7C00}, normal));
  return vi_select(magnitude > 0x7F800000, nan, result) | sign;
}
VF_INLINE vf vf_widen_bf16_(vf16 h)      { return (vf)vi_shl(h, 16); }
#endif

// ------------------------------------------------------------------ any format

// The processor's own conversion, vcvtneps2bf16, is not used: it flushes subnormals to zero.
VF_INLINE vf16 vf_narrow_bf16_(vf a)
{
  vi bits = (vi)a, top = vi_shr(bits, 16), rounded = vi_shr(vi_add(bits, (top & 1) + 0x7FFF), 16);
  return vf16_of_words_(vi_select(vf_ne(a, a), top | 0x40, rounded));
}

VF_INLINE vf vf_load_f16_n(const uint16_t *p, int n) { return vf_widen_f16_(vf16_load_n_(p, n)); }
VF_INLINE vf vf_load_bf16_n(const uint16_t *p, int n) { return vf_widen_bf16_(vf16_load_n_(p, n)); }
VF_INLINE void vf_store_f16_n(uint16_t *p, vf a, int n) { vf16_store_n_(p, vf_narrow_f16_(a), n); }
VF_INLINE void vf_store_bf16_n(uint16_t *p, vf a, int n)
{ vf16_store_n_(p, vf_narrow_bf16_(a), n); }
/// Stores numbers that are exact in bf16, or NaN.
VF_INLINE void vf_store_bf16_exact(uint16_t *p, vf a)
{ vf16_store_n_(p, vf16_of_words_(vi_shr((vi)a, 16)), VF_LANES); }
VF_INLINE vf vf_load_f16(const uint16_t *p)           { return vf_load_f16_n(p, VF_LANES); }

/// Loads n numbers of f32, f16 or bf16, from element `at` of `data` on. For speed, callers pass a
/// constant dtype.
VF_INLINE vf vf_read(const void *data, const int dtype, int64_t at, int n)
{
  if (dtype == ENG_f32) return vf_load_n((const float *)data + at, n);
  const uint16_t *half = (const uint16_t *)data + at;
  return dtype == ENG_f16 ? vf_load_f16_n(half, n) : vf_load_bf16_n(half, n);
}
/// Stores n numbers, rounded to nearest even: the inverse of vf_read.
VF_INLINE void vf_write(void *data, const int dtype, int64_t at, vf x, int n)
{
  if (dtype == ENG_f32) vf_store_n((float *)data + at, x, n);
  else if (dtype == ENG_f16) vf_store_f16_n((uint16_t *)data + at, x, n);
  else vf_store_bf16_n((uint16_t *)data + at, x, n);
}

/// Copies n bytes to a result that is not read soon. If `to` and n are multiples of 64, as for most
/// large tensors, the caches do not read the old contents first, except in the plain build. Other
/// threads may read the result after stream_end.
VF_INLINE void stream(void *to, const void *from, size_t n)
{
#if !defined(ENG_ISA_plain)
  for (size_t i = 0; ((uintptr_t)to | n) % 64 == 0 && i < n; i += sizeof(vf))
    vf_stream_((float *)((char *)to + i), vf_load((const float *)((const char *)from + i)));
  if (((uintptr_t)to | n) % 64 == 0) return;
#endif
  memcpy(to, from, n);
}
VF_INLINE void stream_end(void)
{
#if !defined(ENG_ISA_plain)
  _mm_sfence();
#endif
}

/// Returns x with `fill` in the lanes from n on.
VF_INLINE vf vf_padded(vf x, int n, vf fill)
{ return n == VF_LANES ? x : vf_select(vm_first(n), x, fill); }

VF_INLINE bool vm_any(vm a)                { return vm_bits(a) != 0; }
VF_INLINE vm vf_isnan(vf a)
{ return vi_gt(vi_and((vi)a, vi_set1(0x7FFFFFFF)), vi_set1(0x7F800000)); }
VF_INLINE vm vf_isinf(vf a)
{ return vi_eq(vi_and((vi)a, vi_set1(0x7FFFFFFF)), vi_set1(0x7F800000)); }

/// Splits n elements into vectors and runs a block for each vector. `i` is the index of the first
/// element in the vector. `lanes` is the number of elements in it: the constant VF_LANES, except in
/// an incomplete last vector.
#define FOR_VECTORS(i, n, ...)                                                              \
  do {                                                                                      \
    int64_t i = 0, n_ = (n);                                                                \
    for (; i + VF_LANES <= n_; i += VF_LANES) {                                             \
      enum { lanes = VF_LANES };                                                            \
      __VA_ARGS__                                                                           \
    }                                                                                       \
    if (i < n_) {                                                                           \
      const int lanes = (int)(n_ - i);                                                      \
      __VA_ARGS__                                                                           \
    }                                                                                       \
  } while (0)

#include "simd_fp8.h"

/// MAP1 and MAP2 set y[0..n) to `expression`. In it, `a` stands for a vector of pa and, for MAP2,
/// `b` for a vector of pb.
#define MAP1(y, pa, n, expression)                                                          \
  do {                                                                                      \
    float *y_ = (y);                                                                        \
    const float *pa_ = (pa);                                                                \
    FOR_VECTORS(i_, n, {                                                                    \
      vf a = vf_load_n(pa_ + i_, lanes);                                                    \
      vf_store_n(y_ + i_, expression, lanes);                                               \
    });                                                                                     \
  } while (0)

#define MAP2(y, pa, pb, n, expression)                                                      \
  do {                                                                                      \
    float *y_ = (y);                                                                        \
    const float *pa_ = (pa), *pb_ = (pb);                                                   \
    FOR_VECTORS(i_, n, {                                                                    \
      vf a = vf_load_n(pa_ + i_, lanes), b = vf_load_n(pb_ + i_, lanes);                    \
      vf_store_n(y_ + i_, expression, lanes);                                               \
    });                                                                                     \
  } while (0)

// ------------------------------------------------------------------ tiles

enum { TILE = 512 };   // floats in a tile buffer: 2 KiB, so that several fit in the L1 cache

VF_INLINE bool dtype_is_fast(int d) { return d == ENG_f32 || d == ENG_f16 || d == ENG_bf16; }

/// Converts n contiguous elements of `src`, in a fast dtype or FP8, to floats.
VF_INLINE void floats_from(float *restrict to, const void *restrict src, int dtype, int64_t first,
                           int64_t n)
{
  if (dtype == ENG_f16)
    FOR_VECTORS(i, n, { vf_store_n(to + i, vf_read(src, ENG_f16, first + i, lanes), lanes); });
  else if (dtype == ENG_bf16)
    FOR_VECTORS(i, n, { vf_store_n(to + i, vf_read(src, ENG_bf16, first + i, lanes), lanes); });
  else if (dtype == ENG_f32)
    memcpy(to, (const float *)src + first, (size_t)n * sizeof(float));
  else
    fp8_decode(to, (const uint8_t *)src + first, dtype, n);
}

/// Converts n floats to contiguous elements of `dst`, in a fast dtype or FP8, rounded to nearest
/// even. FP8 does not saturate.
VF_INLINE void floats_to(void *restrict dst, int dtype, int64_t first, const float *restrict from,
                         int64_t n)
{
  if (dtype == ENG_f16)
    FOR_VECTORS(i, n, { vf_write(dst, ENG_f16, first + i, vf_load_n(from + i, lanes), lanes); });
  else if (dtype == ENG_bf16)
    FOR_VECTORS(i, n, { vf_write(dst, ENG_bf16, first + i, vf_load_n(from + i, lanes), lanes); });
  else if (dtype == ENG_f32)
    memcpy((float *)dst + first, from, (size_t)n * sizeof(float));
  else
    fp8_encode((uint8_t *)dst + first, dtype, from, n, false, NULL);
}

/// Returns a pointer to n contiguous elements of `src` as floats, beginning with element `first`.
/// If `src` is f32, the pointer is into `src`. Otherwise the elements are converted into `buffer`
/// [n].
static inline const float *tile_load(float *buffer, const void *src, int dtype, int64_t first,
                                     int64_t n)
{
  if (dtype == ENG_f32) return (const float *)src + first;
  floats_from(buffer, src, dtype, first, n);
  return buffer;
}

/// Does the work of tile_load for n <= TILE elements that are `stride` apart. `first` and `stride`
/// are in elements. Unless `stride` is 1, the result is `buffer`, also for f32.
static inline const float *tile_gather(float *buffer, const void *src, int dtype, int64_t first,
                                       int64_t stride, int n)
{
  if (stride == 1) return tile_load(buffer, src, dtype, first, n);
  if (stride == 0) {
    float x;
    floats_from(&x, src, dtype, first, 1);
    for (int i = 0; i < n; i++) buffer[i] = x;
  } else if (dtype == ENG_f32) {
    const float *p = (const float *)src + first;
    for (int i = 0; i < n; i++) buffer[i] = p[i * stride];
  } else if (dtype_is_fp8(dtype)) {
    const uint8_t *p = (const uint8_t *)src + first;
    uint8_t bytes[TILE];
    for (int i = 0; i < n; i++) bytes[i] = p[i * stride];
    floats_from(buffer, bytes, dtype, 0, n);
  } else {
    const uint16_t *p = (const uint16_t *)src + first;
    uint16_t half[TILE];
    for (int i = 0; i < n; i++) half[i] = p[i * stride];
    floats_from(buffer, half, dtype, 0, n);
  }
  return buffer;
}

/// Returns where to compute the elements of `dst` from `first` on: in `dst` itself if it is f32,
/// else in `buffer`, from which tile_store rounds them into `dst`.
static inline float *tile_target(float *buffer, void *dst, int dtype, int64_t first)
{ return dtype == ENG_f32 ? (float *)dst + first : buffer; }

static inline void tile_store(void *dst, int dtype, int64_t first, const float *values, int n)
{
  if (dtype == ENG_f32 && values == (const float *)dst + first) return;
  floats_to(dst, dtype, first, values, n);
}

#include "vmath.h"
