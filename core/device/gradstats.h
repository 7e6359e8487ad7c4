// The step's record: gradient statistics over all tensors, as a policy reads them.
// The device's gradstats kernel fills the per-tensor statistics, gradstats.c sums them, dist/
// reduces them over ranks, policy/ and store/ read them. The public structures are in engine.h;
// here are the core's helpers.
#ifndef ENG_GRADSTATS_H
#define ENG_GRADSTATS_H

#include "engine.h"

/// The factor that a tensor's gradient carries beside the loss scale.
static inline double gradstats_carry(const eng_tensor_stats *s)
{
  return s->carry > 0 ? s->carry : 1;
}

/// Adds the statistics of `n` tensors into one record: counts, sums of squares, maxima, histogram.
/// `scale` is the loss scale the gradients carry: amax and norm in the record are true magnitudes.
void gradstats_total(eng_record *record, const eng_tensor_stats *stats, int n, double scale);

/// The same where only `needs` (ENG_NEED_*) was computed: leaves out the histogram when it was not.
void gradstats_sum(eng_record *record, const eng_tensor_stats *stats, int n, double scale, unsigned needs);

#endif
