// Computes the scale of a block from its largest magnitude by the rules of other projects, bit for
// bit. Inline, so that gcc and nvcc compile the same code. Divisions are in f32, or in f64 where
// the rule says so, and round to nearest even. Called by quantizers, wire.c, wire.cu and fp8/.
//
// A value is quantized as q = x * factor (in the rule deepseek, q = x / scale), and fp8.h rounds q
// to its format, saturating. q * scale restores the value. `largest` is the largest number of the
// format: 448 (E4M3), 57344 (E5M2) or 65024 (E5M6). "Powers of two" says how a rule rounds if
// scales must be powers of two.
//
//   rule, source and formula
//   transformer_engine   TransformerEngine common/recipe/recipe_common.cuh
//     factor = largest / max(amax, eps), where eps is 0 by default; if the maximum is 0 or if amax
//     is Inf or NaN, the factor is 1; an infinite factor becomes `limit` (FLT_MAX if the block is
//     the whole tensor, else the largest number of the input's format); powers of two: clears the
//     fraction of the factor; scale = 1 / factor
//   deepseek   DeepSeek-V3 inference/kernel.py
//     scale = max(amax, 1e-4) / largest; powers of two: rounds the scale up; q = x / scale
//   deepgemm   DeepGEMM utils/math.py; TileKernels agrees
//     the scale of deepseek; powers of two: rounds the scale up, with the biased exponent within
//     1..254; q = x * (1 / scale)
//   torchao   torchao float8/float8_utils.py
//     factor = largest / max(amax, 1e-12), divided in f64 and rounded to f32; powers of two: clears
//     the fraction of the factor; scale = 1 / factor. A NaN in the block makes all of it NaN
//   msamp   MS-AMP common/tensor/meta.py
//     factor = 2^(floor(log2(largest / amax)) - margin), always a power of two; 1 where amax is 0,
//     Inf or NaN, and 2^127 where the quotient is infinite
//
// amax is the largest |x|. All rules but torchao's ignore NaN, as fmax and Triton's max do, so
// their amax is NaN only if the caller passes NaN.
// Rounding the scale up to a power of two is the same as rounding the factor down.
#pragma once

#include "engine.h"
#include "numerics.h"

/// The factors that quantize and dequantize a block.
typedef struct fp8_scale {
  float factor;   // q = x * factor; if fp8_divides, factor equals scale and q = x / factor
  float scale;    // x = q * scale
} fp8_scale;

/// Whether elements are divided by fp8_scale.factor, which then equals the scale: q = x / factor.
ENG_INLINE int fp8_divides(int rule) { return rule == ENG_SCALE_DEEPSEEK; }

/// Returns the largest number of e4m3, e5m2 or ENG_FORMAT_E5M6.
ENG_INLINE float fp8_largest(int64_t format)
{ return format == ENG_e4m3 ? E4M3_MAX : format == ENG_e5m2 ? E5M2_MAX : E5M6_MAX; }

/// Returns the value that replaces an infinite factor, for blocks of this shape (0: the whole
/// dimension) in a tensor of this dtype.
ENG_INLINE float fp8_limit(int64_t block_rows, int64_t block_columns, int dtype)
{
  if ((block_rows == 0 && block_columns == 0) || (dtype != ENG_f16 && dtype != ENG_bf16))
    return f32_from(0x7F7FFFFFu);
  return dtype == ENG_f16 ? 65504.0f : bf16_to_f32(0x7F7F);
}

/// Returns the smallest amax that a rule assumes: `eps`, or the rule's default if `eps` is
/// negative.
ENG_INLINE float fp8_eps(int rule, double eps)
{
  if (eps >= 0) return (float)eps;
  return rule == ENG_SCALE_DEEPSEEK || rule == ENG_SCALE_DEEPGEMM ? 1e-4f
         : rule == ENG_SCALE_TORCHAO                              ? 1e-12f
                                                                  : 0.0f;
}

/// Returns 2^exponent. Exponents outside -149..127 are clamped.
ENG_INLINE float fp8_power(int exponent)
{
  if (exponent > 127) exponent = 127;
  if (exponent < -149) exponent = -149;
  return exponent < -126 ? f32_from(1u << (exponent + 149))
                         : f32_from((uint32_t)(exponent + 127) << 23);
}

/// Returns floor(log2 x) for a positive finite x.
ENG_INLINE int fp8_exponent(float x)
{
  uint32_t bits = f32_bits(x);
  if (bits >= 0x00800000u) return (int)(bits >> 23) - 127;
  int exponent = -150;
  for (; bits; bits >>= 1) exponent++;
  return exponent;
}

/// Returns the factors of a block. amax: the block's largest magnitude, ignoring NaN (torchao: NaN
/// if the block contains one). margin: an integer; the scale is multiplied by 2^margin, unless the
/// rule gives the factor 1 or (msamp) 2^127.
ENG_INLINE fp8_scale fp8_scale_of(float amax, float largest, int rule, int power_of_two, float eps,
                                  int margin, float limit)
{
  fp8_scale s;
  int finite = f32_is_finite(amax);
  if (rule == ENG_SCALE_DEEPSEEK || rule == ENG_SCALE_DEEPGEMM) {
    s.scale = (finite && amax < eps ? eps : amax) / largest;
    s.scale *= fp8_power(margin);
    if (power_of_two && f32_is_finite(s.scale) && s.scale > 0) {
      if (rule == ENG_SCALE_DEEPGEMM && s.scale < f32_from(0x00800000u))
        s.scale = f32_from(0x00800000u);
      int exponent = fp8_exponent(s.scale);
      s.scale = fp8_power(exponent + (fp8_power(exponent) < s.scale));    // at most 2^127
    }
    s.factor = rule == ENG_SCALE_DEEPSEEK ? s.scale : 1.0f / s.scale;
    return s;
  }
  if (rule == ENG_SCALE_TORCHAO) {
    s.factor = (float)((double)largest / (double)(amax < eps ? eps : amax)) * fp8_power(-margin);
    if (power_of_two && !f32_is_nan(s.factor))
      s.factor = f32_from(f32_bits(s.factor) & 0xFF800000u);
    s.scale = 1.0f / s.factor;
    return s;
  }
  if (finite && amax < eps) amax = eps;
  s.factor = s.scale = 1.0f;
  if (!finite || amax == 0) return s;
  s.factor = largest / amax;
  if (rule == ENG_SCALE_MSAMP) {
    s.factor =
      f32_is_finite(s.factor) ? fp8_power(fp8_exponent(s.factor) - margin) : fp8_power(127);
  } else {
    s.factor *= fp8_power(-margin);
    if (!f32_is_finite(s.factor)) s.factor = limit;
    if (power_of_two) s.factor = f32_from(f32_bits(s.factor) & 0xFF800000u);
  }
  s.scale = 1.0f / s.factor;
  return s;
}
