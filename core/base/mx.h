// Microscaling of single numbers: the element formats, the rules that compute a block's scale from
// its largest magnitude, and rounding. Inline, so that gcc and nvcc compile the same code. Called
// by the kernels of mx_*, hadamard and msamp_fp4, by fp8/ and by autograd/profile.c. The reference
// kernels in reference_mx.c compute the same results in f64 by other formulas.
//
//   element   bits    bias  largest      emax        scale of a block
//   e4m3      1-4-3   7     448          8           a power of two, in ue8m0 (fp8.h)
//   e5m2      1-5-2   15    57344        15
//   e3m2      1-3-2   3     28           4
//   e2m3      1-2-3   1     7.5          2
//   e2m1      1-2-1   1     6            2           also NVFP4: ue4m3, and one f32 per tensor
//   mxint8    8       -     127/64       0           two's complement, in units of 1/64
//
// Rules of MX. `a` is the amax of a block in f32, e is the exponent of the block's scale, and emax
// is the exponent of the element format's largest number:
//   floor   e = floor(log2 a) - emax                   OCP MX 1.0, section 6.3
//   ceil    e = ceil(log2 a) - emax                    torchao
//   even    as floor, after rounding `a` to the fraction bits of an element, ties up (torchao)
//   rceil   e = ceil(log2(a * f32(1 / largest)))       Transformer Engine, cuBLAS, torchao
// The code of a scale is 127 + e, clamped to 0..254; a zero block has code 0. The code of an
// element x is round(x * 2^-e), saturating.
//
// NVFP4, as in Transformer Engine. g is the amax of the tensor:
//   S = min(2688 / g, FLT_MAX), or 1 if g or this minimum is 0
//   scale of a block      s = e4m3(min(a * (S * f32(1/6)), FLT_MAX)), saturating
//   code of an element    round(x * min(1 / (s * (1 / S)), FLT_MAX))
//   value of a code       code * s * (g / 2688)
// A block whose amax is much smaller than the tensor's has the scale 0.
//
// QuEST, the forward pass of Quartet (arXiv 2505.14669), only for e2m1: e = floor(log2 s), where
// s = f32(2.92247856 / 6 * std + 1e-8). std is the population standard deviation of the block's
// elements, computed from their sum and the sum of their squares, both added up in f64 in the order
// of the elements. Ties round toward zero. An element of magnitude 6 * 2^e or more has no gradient.
//
// Four over six (Transformer Engine's 4over6): NVFP4 with 1536 = 256 * 6 in place of 2688. Each
// block chooses between two scales, s6 = e4m3((a / 6) * S) and s4 = e4m3((a / 6) * S * 1.5). It
// takes the scale with the smaller error, or s6 if the errors are equal. For an element x, let
// d = code * s * g / 1536 - x. The error of a row of a block is the sum of |d| or, under the rule
// four_over_six_mse, of d^2, in f32, in order. The errors of rows are summed in pairs, the most
// distant rows first: of 16 rows, r and r + 8.
//
// MS-EDEN, the backward pass of Quartet II (arXiv 2601.22813): the scale s of a block is the s6 of
// four over six, computed with 255.99 in place of 256, and with 6 / (17/16 * 0.93) in place of 6.
// So the largest elements saturate. If s6 is 0, s is 1. Then each group of 128 elements of a row
// gets a correction c = f32((sum of y^2) / (sum of y * code)), where y is an element times the
// factor of its block, before rounding. The sums are in f64, in order; c is 1 if the divisor is 0.
// The final scale of a block is f32(s * c), rounded to e4m3 stochastically or to nearest even.
#pragma once

#include "engine.h"
#include "numerics.h"

typedef struct mx_format {
  int   fraction, bias, emax;
  int   top;          // code of the largest number
  int   nan;          // the code that a NaN becomes; in a format without NaN, `top` or 0
  int   sign;         // mask of the sign bit; 0: two's complement
  float largest;
} mx_format;

ENG_INLINE mx_format mx_format_of(int64_t format)
{
  switch (format) {
    case ENG_e4m3:          return (mx_format){3, 7, 8, 0x7E, 0x7F, 0x80, 448.0f};
    case ENG_e5m2:          return (mx_format){2, 15, 15, 0x7B, 0x7F, 0x80, 57344.0f};
    case ENG_FORMAT_E3M2:   return (mx_format){2, 3, 4, 0x1F, 0x1F, 0x20, 28.0f};
    case ENG_FORMAT_E2M3:   return (mx_format){3, 1, 2, 0x1F, 0x1F, 0x20, 7.5f};
    case ENG_FORMAT_MXINT8: return (mx_format){6, 1, 0, 127, 0, 0, 1.984375f};
    default:                return (mx_format){1, 1, 2, 7, 7, 8, 6.0f};
  }
}

/// Whether elements are packed two to a byte, the even one in the low half.
ENG_INLINE int mx_packed(int64_t format) { return format == ENG_FORMAT_E2M1; }

// ---- scales

/// Returns the ue8m0 code for a block with this amax. If `saturates`, an amax of Inf or NaN gives
/// 254. If not, it gives 255, and a finite amax that the rule `even` rounds up to Inf also gives
/// 255, as in torchao.
ENG_INLINE uint8_t mx_scale(float amax, mx_format f, int rule, int saturates)
{
  uint32_t bits = f32_bits(amax);
  // adds half a unit in the last place of an element
  if (rule == ENG_MX_EVEN && f32_is_finite(amax)) bits += 1u << (22 - f.fraction);
  if (bits >= 0x7F800000u && !saturates) return 255;
  if (!f32_is_finite(amax)) return 254;
  if (rule == ENG_MX_RCEIL) return ue8m0_from_f32(amax * (1.0f / f.largest), 1);
  int code = (int)(bits >> 23) + (rule == ENG_MX_CEIL && (bits & 0x7FFFFFu)) - f.emax;
  return (uint8_t)(code < 0 ? 0 : code > 254 ? 254 : code);
}

/// QuEST: returns the ue8m0 code for a block of n numbers with this sum and sum of squares, or 255
/// if Inf or NaN is among the numbers.
ENG_INLINE uint8_t quest_scale(double sum, double squares, int n)
{
  double mean = sum / n, variance = squares / n - mean * mean;
  if (!(variance - variance == 0)) return 255;
  float scale = (float)(2.92247856 / 6 * __builtin_sqrt(variance > 0 ? variance : 0) + 1e-8);
  return (uint8_t)(f32_bits(scale) >> 23);
}

/// Whether this rule gives some elements no gradient.
ENG_INLINE int mx_is_gated(int64_t rule) { return rule == ENG_MX_QUEST; }
/// QuEST: whether an element has a gradient. y: the element divided by its scale.
ENG_INLINE int quest_gate(float y) { return __builtin_fabsf(y) < 6; }

/// Returns 2^-e for the ue8m0 code of 2^e, or NaN for code 255.
ENG_INLINE float mx_inverse(uint8_t code)
{
  return code == 254 ? f32_from(0x00400000u)
         : code == 255 ? f32_from(0x7FC00000u)
                       : f32_from((uint32_t)(254 - code) << 23);
}

/// mx_is_four_over_six: whether a block chooses between two scales. mx_is_nvfp4: whether blocks
/// have ue4m3 scales and the tensor an f32 scale, as in NVFP4, four over six and MS-EDEN.
ENG_INLINE int mx_is_four_over_six(int64_t rule)
{ return rule == ENG_MX_FOUR_OVER_SIX || rule == ENG_MX_FOUR_OVER_SIX_MSE; }
ENG_INLINE int mx_is_nvfp4(int64_t rule)
{ return rule == ENG_MX_NVFP4 || mx_is_four_over_six(rule) || rule == ENG_MX_MS_EDEN; }
/// Whether mx_quantize has separate code for this rule (core/cpu/mx_fitted.h).
ENG_INLINE int mx_is_fitted(int64_t rule)
{ return rule == ENG_MX_QUEST || rule == ENG_MX_MS_EDEN; }

enum { MX_EDEN_GROUP = 128 };   // elements that share a correction c
/// Returns the magnitude to which a block's largest element is scaled before rounding. For the
/// scale s4 of four over six, that magnitude is 4, not the number returned.
ENG_INLINE float nvfp4_largest(int64_t rule)
{ return rule == ENG_MX_MS_EDEN ? (float)(6 / (17.0 / 16 * 0.93)) : 6.0f; }

/// Returns the number to which the factor S maps a tensor's amax: S is this number / amax.
ENG_INLINE float nvfp4_top(int64_t rule)
{
  return rule == ENG_MX_NVFP4     ? 2688.0f
         : rule == ENG_MX_MS_EDEN ? (float)(255.99 * 6 / (17.0 / 16 * 0.93))
                                  : 1536.0f;
}

/// Returns the factor S of NVFP4 (defined above) for a tensor with this amax.
ENG_INLINE float nvfp4_encode_scale(float amax, int64_t rule)
{
  float s = nvfp4_top(rule) / amax, most = f32_from(0x7F7FFFFFu);
  if (s > most) s = most;
  return amax == 0 || s == 0 ? 1.0f : s;
}

/// Returns the scale of a block before it is rounded to ue4m3. It is NaN if `amax` or S (`encode`)
/// is NaN. stretch: 1.5 for the scale s4 of four over six, else 1.
ENG_INLINE float nvfp4_wanted(float amax, float encode, int64_t rule, float stretch)
{
  float scale = rule == ENG_MX_NVFP4 ? amax * (encode * (1.0f / 6.0f))
                                     : amax / nvfp4_largest(rule) * encode;
  return scale * stretch;
}

/// Returns the ue4m3 code of a block's scale, or the code of NaN. `stretch`: see nvfp4_wanted.
ENG_INLINE uint8_t nvfp4_scale(float amax, float encode, int64_t rule, float stretch)
{ return e4m3_from_f32(nvfp4_wanted(amax, encode, rule, stretch), FP8_SATURATE); }

/// Returns the factor by which the elements of a block are multiplied before rounding.
ENG_INLINE float nvfp4_factor(uint8_t scale, float encode)
{
  float factor = 1.0f / (e4m3_to_f32(scale) * (1.0f / encode)), most = f32_from(0x7F7FFFFFu);
  return factor > most ? most : factor;
}

/// Returns the factor that multiplies code * s of every element of a tensor: g / nvfp4_top, or 1 if
/// g is 0 (S is then 1, too). g is the tensor's amax.
ENG_INLINE float nvfp4_decode_scale(float amax, int64_t rule)
{ return amax == 0 ? 1.0f : amax / nvfp4_top(rule); }

/// Returns the factor that multiplies the sums of a matrix product. It is the product of `factor`
/// (unless 0) and, for each tensor whose amax is not NULL, nvfp4_decode_scale. Each multiplication
/// is rounded to f32.
ENG_INLINE float mx_alpha(const float *amax_a, int64_t rule_a, const float *amax_b, int64_t rule_b,
                          double factor)
{
  float alpha = amax_a ? nvfp4_decode_scale(*amax_a, rule_a) : 1.0f;
  if (amax_b) alpha *= nvfp4_decode_scale(*amax_b, rule_b);
  return factor == 0 ? alpha : alpha * (float)factor;
}

/// Four over six: returns the error of an element x in a tensor with this amax. `value` is the
/// element's code times its block's scale.
ENG_INLINE float nvfp4_error(float x, float value, float amax, int64_t rule)
{
  float off = value * amax / nvfp4_top(rule) - x;
  return rule == ENG_MX_FOUR_OVER_SIX_MSE ? off * off : __builtin_fabsf(off);
}

// ---- random Hadamard transform

/// Returns the sign, 1 or -1, of element i of 128. `signs` < 0: always 1. `signs` 0: Transformer
/// Engine's 16 signs, repeated. `signs` > 0: the bits of Philox block `signs` give the signs;
/// `word` holds the four words of this block.
ENG_INLINE float mx_sign(int64_t signs, const uint32_t word[4], int i)
{
  uint32_t negative = signs < 0 ? 0 : signs == 0 ? 0xD7E8u >> i % 16 : word[i / 32] >> i % 32;
  return negative & 1 ? -1.0f : 1.0f;
}

// ---- elements

ENG_INLINE uint8_t mx_signed(uint32_t code, uint32_t x, mx_format f)
{
  uint32_t negative = x >> 31;
  return (uint8_t)(f.sign ? code | (negative ? (uint32_t)f.sign : 0) : negative ? 0 - code : code);
}

/// Returns the code of x, rounded to nearest even as in fp8_code_f32 (fp8.h), but for any format of
/// mx_format_of and saturating.
ENG_INLINE uint8_t mx_code(float x, mx_format f)
{
  uint32_t bits = f32_bits(x), magnitude = bits & 0x7FFFFFFFu;
  uint32_t unit = (uint32_t)(127 + 24 - f.bias - f.fraction) << 23,
           drop = (uint32_t)(23 - f.fraction);
  // mxint8 is fixed point: `high` encodes magnitudes from 1 up, and `low` smaller magnitudes
  uint32_t low = f32_bits(f32_from(magnitude) + f32_from(unit)) - unit,
           high = ((magnitude + (1u << (drop - 1)) - 1 + (magnitude >> drop & 1)) >> drop) -
                  ((uint32_t)(127 - f.bias) << f.fraction),
           code = magnitude < (uint32_t)(128 - f.bias) << 23 ? low : high;
  code = code > (uint32_t)f.top ? (uint32_t)f.top : code;
  return magnitude > 0x7F800000u ? (uint8_t)f.nan : mx_signed(code, bits, f);
}

/// Returns the code of x in e2m1, rounded to nearest, ties toward zero (QuEST).
ENG_INLINE uint8_t e2m1_code_down(float x)
{
  float a = __builtin_fabsf(x);
  int code = (a > 0.25f) + (a > 0.75f) + (a > 1.25f) + (a > 1.75f) + (a > 2.5f) + (a > 3.5f) +
             (a > 5);
  return (uint8_t)(a != a ? 7 : code | (int)(f32_bits(x) >> 31) << 3);
}

/// Rounds stochastically, as in Transformer Engine's software path. Computes the f32 sum
/// |x| + u * d, where d is the distance between codes in x's binade, and truncates it to the code
/// at or below it, saturating. u in [0, 1) holds `sr_bits` random bits. So P(up), the distance of
/// |x| from the lower code divided by d, is rounded down to a multiple of 2^-sr_bits.
ENG_INLINE uint8_t mx_code_stochastic(float x, float u, mx_format f)
{
  uint32_t bits = f32_bits(x), magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return (uint8_t)f.nan;
  uint32_t normal = (uint32_t)(128 - f.bias) << 23, binade = magnitude & 0x7F800000u;
  if (binade < normal) binade = normal;
  float step = f32_from(binade - ((uint32_t)f.fraction << 23)),
        sum = __builtin_fmaf(u, step, f32_from(magnitude));
  uint32_t code = f32_bits(sum), units = (uint32_t)(127 + f.bias - 1 + f.fraction) << 23;
  code = sum >= f.largest ? (uint32_t)f.top
         : code < normal  ? (uint32_t)(sum * f32_from(units))
                          : (code >> (23 - f.fraction)) - ((uint32_t)(127 - f.bias) << f.fraction);
  return mx_signed(code, bits, f);
}

/// Returns the number that a code stands for.
ENG_INLINE float mx_value(uint8_t code, mx_format f)
{
  if (!f.sign) return (float)(int8_t)code * 0x1p-6f;
  int magnitude = code & (f.sign - 1), field = magnitude >> f.fraction;
  if (f.top > 0x1F) return f.fraction == 3 ? e4m3_to_f32(code) : e5m2_to_f32(code);
  int significand = (magnitude & ((1 << f.fraction) - 1)) | (field ? 1 << f.fraction : 0);
  float value = (float)significand *
                f32_from((uint32_t)(127 + (field ? field : 1) - f.bias - f.fraction) << 23);
  return code & f.sign ? -value : value;
}

/// Q-EMA of TetraJet: rounds |x| to the code at or below it, or to the next code above if `toward`
/// (-toward if x is negative) is at least halfway between the two. If |x| is not below the largest
/// number or x is NaN, returns mx_code(x).
ENG_INLINE uint8_t mx_code_toward(float x, float toward, mx_format f)
{
  if (!(__builtin_fabsf(x) < f.largest)) return mx_code(x, f);
  int negative = (int)(f32_bits(x) >> 31);
  uint8_t below = mx_code_stochastic(x, 0, f),
          next = (uint8_t)(negative && !f.sign ? below - 1 : below + 1);
  float half = 0.5f * __builtin_fabsf(mx_value(below, f) + mx_value(next, f));
  return (negative ? -toward : toward) >= half ? next : below;
}

/// Returns u for mx_code_stochastic: the top `sr_bits` bits of a random word, as a fraction.
ENG_INLINE float mx_uniform(uint32_t word, int sr_bits)
{ return (float)(word >> (32 - sr_bits)) * f32_from((uint32_t)(127 - sr_bits) << 23); }
