// Reference pass of the gradient statistics. See backend.h, engine_policy.h. Called through
// backend.gradstats; owns nothing.
#include "reference.h"

#include <math.h>

static double smallest_normal(int dtype)
{
  switch (dtype) {
    case ENG_f16: return 0x1p-14;
    case ENG_f64: return 0x1p-1022;
    default:      return 0x1p-126;   // f32, bf16
  }
}

// The sum of squares is taken in double, in the order of the elements.
eng_status reference_gradstats(const param_span *spans, int n, unsigned needs,
                               eng_tensor_stats *stats)
{
  for (int k = 0; k < n; k++) {
    const param_span *span = &spans[k];
    eng_tensor_stats *s = &stats[k];
    *s = (eng_tensor_stats){ .count = span->count };
    for (int64_t i = 0; i < span->count; i++) {
      double g = tensor_load(span->gradient, span->gradient_dtype, i), magnitude = fabs(g);
      if (f64_is_nan(g)) {
        s->nan++;
      } else if (!f64_is_finite(g)) {
        s->inf++;
      } else {
        if (needs & ENG_NEED_AMAX) s->amax = fmax(s->amax, magnitude);
        if (needs & ENG_NEED_NORM) s->sum_squares += g * g;
        if (needs & ENG_NEED_ZEROS) s->zeros += g == 0;
        if (needs & ENG_NEED_UNDERFLOW)
          s->underflow += g != 0 && magnitude < smallest_normal(span->gradient_dtype);
        if ((needs & ENG_NEED_HIST) && g != 0) {
          int bin = ilogb(magnitude) + 160;
          s->hist[bin < 0 ? 0 : bin >= ENG_HIST_BINS ? ENG_HIST_BINS - 1 : bin]++;
        }
      }
    }
  }
  return ENG_OK;
}
