// Bit-exact conversions of single numbers to and from FP8 and related formats. Inline and without
// libraries; numerics.h includes this file. The vector versions are tested against these functions,
// as numerics.h says.
//
//             bits    bias  largest          smallest normal / subnormal   Inf      NaN
//   e4m3      1-4-3   7     448     0x7E     2^-6   / 2^-9                 none     0x7F, 0xFF
//   e5m2      1-5-2   15    57344   0x7B     2^-14  / 2^-16                0x7C    0x7D-7F, 0xFD-FF
//   e5m6      1-5-6   15    65024   0x7BF    2^-14  / 2^-20                0x7C0    0x7C1-0x7FF
//   ue8m0     0-8-0   127   2^127   0xFE     2^-127                        none     0xFF
//
// e5m6 is the top 12 bits of f16; ue8m0 holds powers of two, for scales. Inf and, in e5m6, NaN also
// have the codes with the sign bit.
//
// Conversion rounds the exact value once, to nearest even, from any source format. Except for NaN,
// the results equal those of __nv_cvt_double_to_fp8 (cuda_fp8.hpp) and ml_dtypes (float8.h,
// ConvertImpl). Infinity overflows, and so does a number that rounds past the largest one (e4m3:
// |x| > 464, e5m2: |x| >= 61440). The result of overflow is Inf, or NaN in formats without Inf, or
// the largest finite number when saturating; it keeps the sign. -0 stays -0. NaN becomes +0x7F, as
// in the cvt instructions of the hardware (e5m6: +0x7E0).
//
// Stochastic rounding returns one of the two neighbours of |x|, with the sign of x. P(up) is the
// distance of |x| from the lower neighbour, divided by the distance between the two. Rounding uses
// the top 20 bits of a random word for e4m3 and the top 21 for e5m2, so a probability is exact to
// 2^-20 or 2^-21. Numbers that the format represents exactly never change.
#pragma once

/// Rounding modes, as bits.
enum { FP8_SATURATE = 1, FP8_STOCHASTIC = 2 };

enum { E4M3_MAX_CODE = 0x7E, E5M2_MAX_CODE = 0x7B, E5M6_MAX_CODE = 0x7BF };
#define E4M3_MAX 448.0f
#define E5M2_MAX 57344.0f
#define E5M6_MAX 65024.0f

/// Rounds a double to f32 "to odd": toward zero, and sets the last bit if the result is inexact. A
/// later rounding to at least two bits fewer gives the same result as rounding the double directly.
ENG_INLINE float f32_odd_from_f64(double x)
{
  float nearest = (float)x;
  if (!f64_is_finite(x) || (double)nearest == x) return nearest;
  uint32_t bits = f32_bits(nearest);
  // takes the next number toward zero if `nearest` was rounded away from zero
  bits -= (nearest < 0 ? -(double)nearest : (double)nearest) > (x < 0 ? -x : x);
  return f32_from(bits | 1u);
}

/// Handles overflow of a rounded magnitude. Returns `code` if it is at most `largest`. Otherwise
/// returns `largest` when saturating, else `largest` + 1: Inf, or NaN in formats without Inf.
ENG_INLINE uint32_t small_bound(uint32_t code, uint32_t largest, int mode)
{
  if (code <= largest) return code;
  return mode & FP8_SATURATE ? largest : largest + 1;
}

// ---- the reference: from double, and so from f32, f16 and bf16, which double represents exactly

/// Returns the code of x. fraction: the number of fraction bits; largest: the code of the largest
/// number; sign: the mask of the sign bit, or 0 if the format has none; nan: the result for NaN.
ENG_INLINE uint32_t small_from_f64(double x, int fraction, int bias, uint32_t largest,
                                   uint32_t sign, uint32_t nan, int mode)
{
  uint64_t bits = f64_bits(x), magnitude = bits & 0x7FFFFFFFFFFFFFFFull;
  if (magnitude > 0x7FF0000000000000ull) return nan;
  uint32_t code = small_bound(small_code(magnitude, fraction, bias), largest, mode);
  return bits >> 63 ? code | sign : code;
}

ENG_INLINE uint8_t e4m3_from_f64(double x, int mode)
{ return (uint8_t)small_from_f64(x, 3, 7, E4M3_MAX_CODE, 0x80, 0x7F, mode); }
ENG_INLINE uint8_t e5m2_from_f64(double x, int mode)
{ return (uint8_t)small_from_f64(x, 2, 15, E5M2_MAX_CODE, 0x80, 0x7F, mode); }
ENG_INLINE uint16_t e5m6_from_f64(double x, int mode)
{ return (uint16_t)small_from_f64(x, 6, 15, E5M6_MAX_CODE, 0x800, 0x7E0, mode); }

// ---- from float (e4m3 and e5m2 without doubles): used by kernels

/// Rounds the magnitude of a finite float to nearest even in e4m3 (fraction 3) or e5m2 (fraction 2)
/// and returns its code. Below the smallest normal number, adding 2^(23 + exponent of the smallest
/// subnormal) rounds to a multiple of that subnormal.
ENG_INLINE uint32_t fp8_code_f32(uint32_t magnitude, int fraction)
{
  int bias = fraction == 3 ? 7 : 15, drop = 23 - fraction;
  if (magnitude < (uint32_t)(128 - bias) << 23) {
    uint32_t unit = (uint32_t)(127 + 24 - bias - fraction) << 23;
    return f32_bits(f32_from(magnitude) + f32_from(unit)) - unit;
  }
  return ((magnitude + (1u << (drop - 1)) - 1 + (magnitude >> drop & 1)) >> drop) -
         ((uint32_t)(127 - bias) << fraction);
}

/// Works as fp8_code_f32 does, but rounds stochastically. A magnitude below the smallest normal
/// number is first truncated to a multiple of the smallest subnormal times 2^-20 (e5m2: 2^-21).
ENG_INLINE uint32_t fp8_code_stochastic(uint32_t magnitude, int fraction, uint32_t random)
{
  int bias = fraction == 3 ? 7 : 15, drop = 23 - fraction;
  random >>= 32 - drop;
  // below the smallest normal number; `steps` is |x| / (smallest subnormal * 2^-drop), truncated
  if (magnitude < (uint32_t)(128 - bias) << 23) {
    uint32_t steps = (uint32_t)(f32_from(magnitude) *
                                f32_from((uint32_t)(127 + bias - 1 + fraction + drop) << 23));
    return (steps + random) >> drop;
  }
  return ((magnitude + random) >> drop) - ((uint32_t)(127 - bias) << fraction);
}

ENG_INLINE uint8_t fp8_from_f32(float x, int fraction, int mode, uint32_t random)
{
  uint32_t bits = f32_bits(x), magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7F;
  uint32_t code = magnitude >= 0x47800000u ? 0xFFu // 65536 and above
                  : mode & FP8_STOCHASTIC  ? fp8_code_stochastic(magnitude, fraction, random)
                                           : fp8_code_f32(magnitude, fraction);
  uint32_t largest = fraction == 3 ? E4M3_MAX_CODE : E5M2_MAX_CODE;
  return (uint8_t)((bits >> 24 & 0x80u) | small_bound(code, largest, mode));
}

ENG_INLINE uint8_t e4m3_from_f32(float x, int mode)
{ return fp8_from_f32(x, 3, mode & FP8_SATURATE, 0); }
ENG_INLINE uint16_t e5m6_from_f32(float x, int mode) { return e5m6_from_f64((double)x, mode); }

// ---- back to float, exact

ENG_INLINE float e5m2_to_f32(uint8_t code) { return f16_to_f32((uint16_t)(code << 8)); }
ENG_INLINE float e5m6_to_f32(uint16_t code) { return f16_to_f32((uint16_t)(code << 4)); }
ENG_INLINE float e4m3_to_f32(uint8_t code)
{
  uint32_t sign = (uint32_t)(code & 0x80u) << 24, magnitude = code & 0x7Fu;
  if (magnitude == 0x7F) return f32_from(sign | 0x7FC00000u);
  if (magnitude < 8) return f32_from(sign | f32_bits((float)magnitude * 0.001953125f));
  return f32_from(sign | ((magnitude << 20) + (120u << 23)));
}

// ---- scales that are powers of two

/// Returns 2^(code - 127), or NaN for code 0xFF.
ENG_INLINE float ue8m0_to_f32(uint8_t code)
{
  return code == 0xFF ? f32_from(0x7FC00000u)
         : code == 0  ? f32_from(0x00400000u)
                      : f32_from((uint32_t)code << 23);
}

/// Returns the code of the largest power of two that is not above |x| or, if `up` is set, of the
/// smallest power of two that is not below |x|. The result is clamped to 2^-127..2^127; Inf and NaN
/// become NaN.
ENG_INLINE uint8_t ue8m0_from_f32(float x, int up)
{
  uint32_t magnitude = f32_bits(x) & 0x7FFFFFFFu;
  if (magnitude >= 0x7F800000u) return 0xFF;
  // subnormal in f32: code 0 stands for 2^-127, whose bits are 0x00400000, and code 1 for 2^-126
  if (magnitude < 0x00800000u) return up && magnitude > 0x00400000u;
  uint32_t code = (magnitude >> 23) + (up && (magnitude & 0x7FFFFFu));
  return (uint8_t)(code > 0xFE ? 0xFE : code);
}

// ---- e5m6 in memory: eight numbers in three words, the first in the top bits

ENG_INLINE void e5m6_pack(uint32_t word[3], const uint16_t code[8])
{
  word[0] = (uint32_t)code[0] << 20 | (uint32_t)code[1] << 8 | (uint32_t)code[2] >> 4;
  word[1] = (uint32_t)code[2] << 28 | (uint32_t)code[3] << 16 | (uint32_t)code[4] << 4 |
            (uint32_t)code[5] >> 8;
  word[2] = (uint32_t)code[5] << 24 | (uint32_t)code[6] << 12 | (uint32_t)code[7];
}

ENG_INLINE void e5m6_unpack(uint16_t code[8], const uint32_t word[3])
{
  code[0] = (uint16_t)(word[0] >> 20);
  code[1] = (uint16_t)(word[0] >> 8 & 0xFFFu);
  code[2] = (uint16_t)((word[0] << 4 | word[1] >> 28) & 0xFFFu);
  code[3] = (uint16_t)(word[1] >> 16 & 0xFFFu);
  code[4] = (uint16_t)(word[1] >> 4 & 0xFFFu);
  code[5] = (uint16_t)((word[1] << 8 | word[2] >> 24) & 0xFFFu);
  code[6] = (uint16_t)(word[2] >> 12 & 0xFFFu);
  code[7] = (uint16_t)(word[2] & 0xFFFu);
}
