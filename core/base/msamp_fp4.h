// Microsoft's FP4 (arXiv 2501.17116, MS-AMP) on single numbers: the scale of a row, rounding to
// e2m1, and the slope of the weights' rounding. Inline, so that gcc and nvcc compile the same code.
// Called by the kernels of msamp_fp4 and by the checks in fp8/.
//
// Numbers are bf16, held in f32. Let `a` be the largest magnitude of a row after clamping. Then:
//   factor of a row   S = 2^floor(log2(6 / a)), at most 2^127; 1 if `a` is 0, Inf or NaN
//   code of v         the e2m1 number nearest to v S, ties toward +Inf; Inf and NaN stay
//   value of a code   code / S
// The value of every code is exact in bf16 unless it overflows. Clamping limits a row to the range
// between two of its K elements. If the row is sorted in ascending order, with NaN last, these two
// have the indices int((1 - clamp) K) and int(clamp K).
#pragma once

#include "engine.h"
#include "numerics.h"

/// Whether `clamp` is valid: 0 (no clamping) or an allowed quantile.
ENG_INLINE int msamp_clamps(double clamp)
{ return clamp == 0 || (clamp >= 0.5 && clamp <= 0.9999); }

/// Maps a bf16 number to 16 bits in ascending order. -0 equals 0, and NaN is the largest.
ENG_INLINE uint16_t msamp_order(uint16_t bf16)
{
  if ((bf16 & 0x7FFF) > 0x7F80) return 0xFFFF;
  if (bf16 == 0x8000) bf16 = 0;
  return (uint16_t)(bf16 & 0x8000 ? ~bf16 : bf16 | 0x8000);
}
/// Returns the number that msamp_order maps to these bits.
ENG_INLINE float msamp_ordered(uint16_t order)
{ return bf16_to_f32((uint16_t)(order & 0x8000 ? order & 0x7FFF : ~order)); }

/// Returns the index of the element that is the upper bound of clamping, or with `upper` = 0 the
/// lower bound, in a row of K elements in ascending order.
ENG_INLINE int64_t msamp_rank(double clamp, int64_t K, int upper)
{ return (int64_t)((upper ? clamp : 1 - clamp) * (double)K); }

ENG_INLINE float msamp_within(float v, float least, float most)
{ return v < least ? least : v > most ? most : v; }
/// Returns what clamping v to c cuts off, in bf16.
ENG_INLINE float msamp_cut(float v, float c)
{ return v == c ? 0 : bf16_to_f32(bf16_from_f32(v - c)); }

/// Returns the ue8m0 code of 1 / S for a row with this amax. 1 / S is 2^ceil(log2(amax / 6)), at
/// least 2^-127, or 1 if amax is 0, Inf or NaN.
ENG_INLINE uint8_t msamp_scale(float amax)
{
  uint32_t bits = f32_bits(amax);
  if (bits == 0 || bits >= 0x7F800000u) return 127;
  int code = (int)(bits >> 23) - 2 + ((bits & 0x7FFFFFu) > 0x400000u);
  return (uint8_t)(code < 0 ? 0 : code);
}

/// Returns the e2m1 number nearest to t, ties toward +Inf. Returns Inf and NaN unchanged.
ENG_INLINE float msamp_round(float t)
{
  float a = __builtin_fabsf(t), v;
  if (!(t - t == 0)) return t;
  if (t >= 0)
    v = a >= 5 ? 6 : a >= 3.5f ? 4 : a >= 2.5f ? 3 : 0.5f * (float)((a >= 0.25f) + (a >= 0.75f) +
                                                               (a >= 1.25f) + (a >= 1.75f));
  else
    v = a > 5 ? 6 : a > 3.5f ? 4 : a > 2.5f ? 3 : 0.5f * (float)((a > 0.25f) + (a > 0.75f) +
                                                            (a > 1.25f) + (a > 1.75f));
  return t < 0 && v > 0 ? -v : v;
}

/// Differentiable gradient estimator (DGE): returns the slope by which the gradient of a rounded
/// weight is multiplied. The slope is min(|2 u / d - 1|^(1/5 - 1) / 5, 3). Here t is the weight
/// times S, u is the distance of |t| from the e2m1 number below it, and d is the distance from that
/// number to the next. If |t| > 6 or t is NaN, the slope is 0.
ENG_INLINE float msamp_slope(float t)
{
  float a = __builtin_fabsf(t);
  if (!(a <= 6)) return 0;
  float d = a < 2 ? 0.5f : a < 4 ? 1 : 2,
        u = a < 4 ? a - d * (float)(int)(a / d) : a - 4,
        slope = (float)(__builtin_pow(__builtin_fabs(2 * (double)u / d - 1), -0.8) / 5);
  return slope < 3 ? slope : 3;
}
