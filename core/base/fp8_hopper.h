// Hopper's FP8 accumulator as a formula: what the tensor core's wgmma instructions compute from 32
// products at a time. Two independent models agree with this formula: MMA-Sim (simulator/nv_ptx.py,
// class wgmma; arXiv 2511.10909) and MATLAB-tensor-core (models/H100TC.m; arXiv 2512.07004). Inline
// and scalar, for gcc and nvcc: the reference for fp8_matmul's accumulator `hopper`. The formula
// does not apply to mma.sync, which keeps 25 bits. Called by the kernels of fp8_matmul.
//
//   1. each product is exact: the significands are multiplied (the result is in [1, 4) for normal
//      inputs), and the exponents added; a subnormal input has the smallest normal exponent; zero
//      products are ignored; the accumulator c is one more term
//   2. E is the largest of these exponents; every term is truncated to a multiple of 2^(E - 13)
//   3. the exact sum of the terms is truncated to 13 fraction bits
//
// A NaN, an infinity times zero or two opposite infinities give NaN 0x7FFFFFFF. Otherwise an
// infinite term gives that infinity. A sum of zero is +0.
#pragma once

#include "numerics.h"

enum { HOPPER_GROUP = 32, HOPPER_BITS = 13 };

/// A decoded number: magnitude = significand * 2^(exponent - f), with an integer significand and
/// the format's number f of fraction bits.
typedef struct fp8_parts { int negative, significand, exponent; } fp8_parts;

/// Decodes a code, which must be finite. fraction: 3 for e4m3, 2 for e5m2.
ENG_INLINE fp8_parts fp8_parts_of(uint8_t code, int fraction)
{
  fp8_parts p;
  int field = (code & 0x7F) >> fraction, bias = fraction == 3 ? 7 : 15;
  p.negative = code >> 7;
  p.significand = (code & ((1 << fraction) - 1)) | (field ? 1 << fraction : 0);
  p.exponent = (field ? field : 1) - bias;
  return p;
}

ENG_INLINE float fp8_to_f32(uint8_t code, int fraction)
{ return fraction == 3 ? e4m3_to_f32(code) : e5m2_to_f32(code); }

/// Returns the index (0 to n-1) of the product that the accumulator `fp32` adds at this step. The
/// accumulator takes products in pairs and adds the second of each pair first, as instructions that
/// multiply pairs do.
ENG_INLINE int64_t fp8_fp32_order(int64_t step, int64_t n)
{ return (step ^ 1) < n ? step ^ 1 : step; }

/// Returns c + a[0] b[0] + .. + a[n-1] b[n-1] for n <= 32. Strides are in elements.
ENG_INLINE float hopper_group(const uint8_t *a, int64_t a_stride, int a_fraction, const uint8_t *b,
                              int64_t b_stride, int b_fraction, int n, float c)
{
  int largest = -1000, odd = !f32_is_finite(c);
  for (int i = 0; i < n; i++) {
    uint8_t x = a[i * a_stride], y = b[i * b_stride];
    odd |= !f32_is_finite(fp8_to_f32(x, a_fraction)) || !f32_is_finite(fp8_to_f32(y, b_fraction));
  }
  if (odd) {   // f32 arithmetic treats Inf and NaN correctly
    float sum = c;
    for (int i = 0; i < n; i++)
      sum += fp8_to_f32(a[i * a_stride], a_fraction) * fp8_to_f32(b[i * b_stride], b_fraction);
    return f32_is_nan(sum) ? f32_from(0x7FFFFFFFu) : sum;
  }
  for (int i = 0; i < n; i++) {
    fp8_parts x = fp8_parts_of(a[i * a_stride], a_fraction),
              y = fp8_parts_of(b[i * b_stride], b_fraction);
    if (x.significand && y.significand && x.exponent + y.exponent > largest)
      largest = x.exponent + y.exponent;
  }
  uint32_t c_bits = f32_bits(c);
  int c_exponent = (int)(c_bits >> 23 & 0xFF) - 127;
  if (c != 0 && c_exponent > largest) largest = c_exponent;
  if (largest == -1000) return 0.0f;
  int64_t sum = 0;
  for (int i = 0; i < n; i++) {
    fp8_parts x = fp8_parts_of(a[i * a_stride], a_fraction),
              y = fp8_parts_of(b[i * b_stride], b_fraction);
    int64_t term = (int64_t)x.significand * y.significand;
    int shift = x.exponent + y.exponent - a_fraction - b_fraction - (largest - HOPPER_BITS);
    term = shift >= 0 ? term << shift : shift > -63 ? term >> -shift : 0;
    sum += x.negative != y.negative ? -term : term;
  }
  if (c != 0) {
    int64_t term = (int64_t)((c_bits & 0x7FFFFFu) | 0x800000u);
    int shift = largest - HOPPER_BITS - (c_exponent - 23);
    term = shift < 63 ? term >> shift : 0;
    sum += c_bits >> 31 ? -term : term;
  }
  if (sum == 0) return 0.0f;
  // |sum| is below 2^21, so it is exact as a float; the factor is a power of two in f32's range
  float value = (float)sum * f32_from((uint32_t)(127 + largest - HOPPER_BITS) << 23);
  return f32_from(f32_bits(value) & ~((1u << (23 - HOPPER_BITS)) - 1u));
}
