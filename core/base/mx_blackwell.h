// Blackwell's block-scaled tensor cores as a formula, after MMA-Sim 2.1.1 (TCGen05MMABlockScale;
// arXiv 2511.10909). Inline and scalar, for gcc and nvcc: the reference for mx_matmul. Called by
// its kernels and by fp8/mx.c.
//
//   mxf8f6f4   32 products with one pair of scales. A term is the product of two significands, not
//              normalized; its exponent is the sum of the exponents of both numbers and both scales
//   mxf4nvf4   64 products of e2m1. A term is the exact sum of 16 products times the significands
//              of both scales; its exponent is the sum of the exponents of the scales alone
//
// The accumulator c is one more term. E is the largest exponent; every term is truncated to a
// multiple of 2^(E - 25) (mxf4nvf4: 2^(E - 35)). The exact sum is truncated to f32, and -0 becomes
// +0. Subnormal numbers have the smallest normal exponent. A zero term has the exponent -133 in
// mxf8f6f4 and -139 in mxf4nvf4; E can be this exponent. A term of mxf4nvf4 is zero if all its
// products are zero or a scale is zero. A NaN or two opposite infinities give 0x7FFFFFFF; otherwise
// an infinite term gives that infinity. ue4m3 scales have no sign.
#pragma once

#include "mx.h"

enum { BLACKWELL_MOST = 64 };

/// A number as significand * 2^exponent, 1 <= |significand| < 2 unless it is subnormal or 0.
typedef struct mx_parts { double significand; int exponent; } mx_parts;

/// Splits x into significand and exponent. least: the smallest normal exponent of x's format.
ENG_INLINE mx_parts mx_parts_of(float x, int least)
{
  int e = (int)(f64_bits((double)x) >> 52 & 0x7FF) - 1023;
  if (e < least) e = least;
  return (mx_parts){(double)x * f64_from((uint64_t)(1023 - e) << 52), e};
}

/// blackwell_products: the number of products that one instruction sums. blackwell_bits: the bits
/// that a term keeps below the largest exponent. blackwell_zero: the exponent of a zero term.
/// `four`: both factors are e2m1.
ENG_INLINE int blackwell_products(int four) { return four ? 64 : 32; }
ENG_INLINE int blackwell_bits(int four) { return four ? 35 : 25; }
ENG_INLINE int blackwell_zero(int four) { return four ? -139 : -133; }

/// Returns the accumulator c as a term.
ENG_INLINE mx_parts blackwell_accumulator(float c, int four)
{
  mx_parts x = mx_parts_of(c, -126);
  if (c == 0) x.exponent = blackwell_zero(four);
  return x;
}

ENG_INLINE double blackwell_power(int e)
{ return e < -1022 ? 0 : f64_from((uint64_t)(1023 + e) << 52); }

/// Returns sum * 2^exponent, truncated to f32; -0 becomes +0.
ENG_INLINE float blackwell_round(double sum, int exponent)
{
  double y = sum * blackwell_power(exponent), size = y < 0 ? -y : y;
  float nearest = (float)y, magnitude = nearest < 0 ? -nearest : nearest;
  if (size < 0x1p128 && (double)magnitude > size) nearest = f32_from(f32_bits(nearest) - 1);
  return nearest + 0.0f;
}

/// blackwell_scale: the value of a scale's code (NaN for the code of NaN). blackwell_least: the
/// smallest exponent of the scale's format.
ENG_INLINE float blackwell_scale(uint8_t code, int rule)
{ return mx_is_nvfp4(rule) ? e4m3_to_f32(code & 0x7F) : ue8m0_to_f32(code); }
ENG_INLINE int blackwell_least(int rule) { return mx_is_nvfp4(rule) ? -6 : -127; }

/// Returns c + the sum of 32 products (64 if both formats are e2m1) of the elements of a and b.
/// scale_a[i] and scale_b[i] are the scales of elements 16 i to 16 i + 15.
ENG_INLINE float blackwell_group(const float *a, mx_format fa, const float *scale_a, const float *b,
                                 mx_format fb, const float *scale_b, int rule, float c)
{
  int four = fa.top == 7 && fb.top == 7, n = blackwell_products(four), bits = blackwell_bits(four);
  int step = four ? 16 : 1, least = blackwell_least(rule);
  mx_parts term[33], part = blackwell_accumulator(c, four);
  int terms = 0, largest = part.exponent;
  double check = c, sum = 0;
  for (int k = 0; k < n; k++)
    check += (double)a[k] * b[k] * scale_a[k / 16] * scale_b[k / 16];
  if (check != check) return f32_from(0x7FFFFFFFu);
  if (check - check != 0) return (float)check;
  term[terms++] = part;
  for (int k = 0; k < n; k += step) {
    mx_parts x = mx_parts_of(scale_a[k / 16], least), y = mx_parts_of(scale_b[k / 16], least);
    int e = x.exponent + y.exponent;
    double s = 0;
    int zero = x.significand * y.significand == 0;
    if (four) {
      int some = 0;
      for (int i = k; i < k + 16; i++) s += (double)a[i] * b[i], some |= a[i] * b[i] != 0;
      s *= x.significand * y.significand;
      zero |= !some;
    } else {
      x = mx_parts_of(a[k], 1 - fa.bias), y = mx_parts_of(b[k], 1 - fb.bias);
      s = x.significand * y.significand;
      zero |= s == 0;
      e += x.exponent + y.exponent;
    }
    if (zero) e = blackwell_zero(four);
    term[terms++] = (mx_parts){s, e};
    if (e > largest) largest = e;
  }
  for (int i = 0; i < terms; i++)
    sum += __builtin_trunc(term[i].significand *
                           blackwell_power(term[i].exponent - largest + bits));
  return blackwell_round(sum, largest - bits);
}
