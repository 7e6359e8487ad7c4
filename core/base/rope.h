// Frequencies of rotary positions, in radians per position. Compiled by gcc and nvcc: the kernels
// of every device call it, so that they agree.
#pragma once

#include <math.h>
#include <stdint.h>

#include "numerics.h"

/// The attributes of the operation rope that determine the frequencies (ops.def).
typedef struct rope_scaling {
  double  base, factor, low, high;
  int64_t context;
} rope_scaling;

/// The frequency of pair i of `half` pairs: base^(-i / half). factor 0: unscaled. context and high
/// 0: divided by factor (linear scaling). With a context, as in Llama 3, a pair that turns `high`
/// times or more within `context` positions is unscaled, a pair that turns `low` times or fewer is
/// divided by factor, and pairs between are interpolated linearly in the number of turns. Without
/// a context, as in YaRN (Peng et al. 2023), the pairs up to number `low` are unscaled, those from
/// number `high` on are divided by factor, and pairs between are interpolated linearly in i.
ENG_INLINE double rope_frequency(const rope_scaling *s, int64_t i, int64_t half)
{
  double plain = pow(s->base, -(double)i / (double)half);
  if (s->factor == 0) return plain;
  if (s->context == 0 && s->high == 0) return plain / s->factor;
  double turns = (double)s->context * plain / 6.283185307179586,
         part = (s->context ? turns - s->low : s->high - (double)i) / (s->high - s->low);
  part = part < 0 ? 0 : part > 1 ? 1 : part;
  return part * plain + (1 - part) * plain / s->factor;
}
