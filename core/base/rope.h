// Frequencies of rotary position embeddings, in radians per position. Compiled by gcc and nvcc.
// Called by the kernels of every device, so that their frequencies agree.
#pragma once

#include <math.h>
#include <stdint.h>

#include "numerics.h"

/// The attributes of the operation rope that determine the frequencies (ops.def).
typedef struct rope_scaling {
  double  base, factor, low, high;
  int64_t context;
} rope_scaling;

/// Returns the frequency of pair i of `half` pairs, counted from 0: base^(-i / half), scaled as
/// follows. factor 0: unscaled. context and high both 0: divided by factor (linear scaling).
/// context > 0, as in Llama 3: pairs that turn `high` times or more within `context` positions are
/// unscaled, pairs that turn `low` times or fewer are divided by factor, and pairs in between are
/// interpolated linearly in the number of turns. context 0, as in YaRN (Peng et al. 2023): pairs
/// with i <= low are unscaled, pairs with i >= high are divided by factor, and pairs in between are
/// interpolated linearly in i.
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
