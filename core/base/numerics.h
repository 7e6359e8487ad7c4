// Bit-exact conversions of single numbers between formats. They round to nearest even, overflow to
// infinity, and preserve subnormals, -0 and NaN (with its sign and top payload bits; made quiet,
// except from bf16 to f32). FP8 has rules of its own (fp8.h). Inline and without libraries, so that
// gcc and nvcc compile the same code. The vector versions in cpu/simd.h and cuda/ are tested
// against these functions on every input of 8 or 16 bits and, from f32, on every number and
// midpoint of the target format, their neighbours and random bits. Included by most folders of the
// core and by cuda/.
#pragma once

#include <stdint.h>

#if defined(__CUDACC__)
#define ENG_INLINE static inline __host__ __device__
#else
#define ENG_INLINE static inline
#endif

ENG_INLINE uint32_t f32_bits(float x)    { union { float f; uint32_t u; } v; v.f = x; return v.u; }
ENG_INLINE float    f32_from(uint32_t u) { union { float f; uint32_t u; } v; v.u = u; return v.f; }
ENG_INLINE uint64_t f64_bits(double x)   { union { double f; uint64_t u; } v; v.f = x; return v.u; }
ENG_INLINE double   f64_from(uint64_t u) { union { double f; uint64_t u; } v; v.u = u; return v.f; }

// These functions test the bits of a number, not its value, so the compiler cannot optimize the
// test away.
ENG_INLINE int f32_is_nan(float x)    { return (f32_bits(x) & 0x7FFFFFFFu) > 0x7F800000u; }
ENG_INLINE int f32_is_finite(float x) { return (f32_bits(x) & 0x7F800000u) != 0x7F800000u; }
ENG_INLINE int f64_is_nan(double x)
{ return (f64_bits(x) & 0x7FFFFFFFFFFFFFFFull) > 0x7FF0000000000000ull; }
ENG_INLINE int f64_is_finite(double x)
{ return (f64_bits(x) & 0x7FF0000000000000ull) != 0x7FF0000000000000ull; }

// ---- formats of few bits

/// Returns the code of |x| in a format with `fraction` fraction bits and this bias, rounded to
/// nearest even. `magnitude` is |x| as the bits of a double, finite or infinite. Does not handle
/// overflow: beyond the format's largest number the codes continue.
ENG_INLINE uint32_t small_code(uint64_t magnitude, int fraction, int bias)
{
  int exponent = (int)(magnitude >> 52) - 1023, least = 1 - bias;
  // below half of the smallest subnormal
  if (exponent < least - fraction - 1) return 0;
  uint64_t significand = (magnitude & 0xFFFFFFFFFFFFFull) | 0x10000000000000ull;
  int drop = 52 - fraction + (exponent < least ? least - exponent : 0);
  uint64_t kept = significand >> drop, rest = significand & ((1ull << drop) - 1),
           half = 1ull << (drop - 1);
  kept += rest > half || (rest == half && (kept & 1));
  return (exponent < least ? 0u : (uint32_t)(exponent - least) << fraction) + (uint32_t)kept;
}

// ---- f16: IEEE binary16, 1-5-10, bias 15, largest 65504, smallest subnormal 2^-24 ----

ENG_INLINE float f16_to_f32(uint16_t h)
{
  uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, fraction = h & 0x3FFu;
  if (exponent == 31) {   // Inf, or NaN made quiet
    return f32_from(sign | 0x7F800000u | (fraction << 13) | (fraction ? 0x00400000u : 0u));
  }
  if (exponent != 0) return f32_from(sign | ((exponent + 112u) << 23) | (fraction << 13));
  // zero or subnormal: fraction * 2^-24 is exact in f32
  return f32_from(sign | f32_bits((float)fraction * 5.9604644775390625e-08f));
}

// Rounds once, from double, so that f64 -> f16 has no double rounding. Also correct for f32,
// because f32 -> f64 is exact.
ENG_INLINE uint16_t f16_from_f64(double x)
{
  uint64_t bits = f64_bits(x), magnitude = bits & 0x7FFFFFFFFFFFFFFFull;
  uint32_t sign = (uint32_t)(bits >> 48) & 0x8000u, inf = 0x7C00u;
  if (magnitude > 0x7FF0000000000000ull)
    return (uint16_t)(sign | 0x7E00u | ((magnitude >> 42) & 0x3FFu));
  uint32_t code = small_code(magnitude, 10, 15);
  return (uint16_t)(sign | (code < inf ? code : inf));
}

// ---- bf16: the top half of an f32, 1-8-7 ----

ENG_INLINE float bf16_to_f32(uint16_t b) { return f32_from((uint32_t)b << 16); }

ENG_INLINE uint16_t bf16_from_f32(float x)
{
  uint32_t bits = f32_bits(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return (uint16_t)((bits >> 16) | 0x0040u);
  return (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

/// Rounds |x| to one of the two bf16 numbers next to it, as the 16 bits of `random` decide. The
/// result has the sign of x. P(up) is exactly the distance of |x| from the lower number, divided by
/// the distance between the two numbers. Beyond the largest bf16 the upper number is inf.
ENG_INLINE uint16_t bf16_stochastic(float x, uint32_t random)
{
  uint32_t bits = f32_bits(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return (uint16_t)((bits >> 16) | 0x0040u);
  return (uint16_t)((bits + random) >> 16);
}

#include "fp8.h"

// ---- integers ----

/// Converts floating point to an integer: truncates toward zero, saturates at `low` and `high`, and
/// turns NaN into 0.
ENG_INLINE int64_t int_of(double value, double low, double high)
{
  if (value != value) return 0;
  if (value <= low) return (int64_t)low;
  if (value >= high) return high >= 0x1p63 ? INT64_MAX : (int64_t)high;
  return (int64_t)value;
}

/// Converts an integer to double. With `to_f64`, rounds to nearest even. Otherwise the double is a
/// step on the way to a narrower format: rounding it to that format gives the same result as
/// rounding the integer.
ENG_INLINE double double_from_int(int64_t value, int to_f64)
{
  double nearest = (double)value;
  if (to_f64 || (value > -(1ll << 53) && value < (1ll << 53))) return nearest;
  // Rounds to odd: truncates, and sets the last bit if any bits were lost. So the next rounding
  // treats the number as a tie only if it is one.
  uint64_t magnitude = value < 0 ? 0 - (uint64_t)value : (uint64_t)value;
  int drop = 11 - __builtin_clzll(magnitude);
  uint64_t kept = magnitude >> drop;
  if (kept << drop != magnitude) kept |= 1;
  double odd = (double)kept * (double)(1ull << drop);   // both factors are exact
  return value < 0 ? -odd : odd;
}

// ---- clipping ----

/// Returns the number by which to multiply the gradients. `norm` is their norm after multiplication
/// by `factor`. If this norm does not exceed `limit` (0: no limit), returns `factor`. Otherwise
/// returns a smaller number, as PyTorch does, so that the norm is at most `limit`.
ENG_INLINE double clip_factor(double factor, double norm, double limit)
{ return limit > 0 && norm > limit ? factor * limit / (norm + 1e-6) : factor; }

// Converts double to bf16. The intermediate f32 is rounded to odd, so the result equals that of a
// single rounding.
ENG_INLINE uint16_t bf16_from_f64(double x) { return bf16_from_f32(f32_odd_from_f64(x)); }
