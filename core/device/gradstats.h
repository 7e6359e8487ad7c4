// The step record: what one fused pass over the gradients yields, and what a policy is told.
// Filled by the device's gradstats, summed up by gradstats.c, reduced over ranks by comm, read by
// policy_vm.c and history.c. The public structures stand in engine.h; here are the core's helpers.
#ifndef ENG_GRADSTATS_H
#define ENG_GRADSTATS_H

#include "engine.h"

/// What a tensor's gradient carries beside the loss scale.
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
