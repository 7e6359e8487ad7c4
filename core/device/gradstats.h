// The step's record: gradient statistics over all tensors, as a policy reads them. The device's
// gradstats kernel fills the per-tensor statistics, gradstats.c sums them, dist/ reduces them over
// ranks, and policy/ and store/ read them. The structures are in engine_policy.h. Included by
// backend.h and policy/.
#pragma once

#include "engine.h"

/// Returns the relative scale of a tensor's gradient, or 1 if the field is not set.
static inline double gradstats_relative_scale(const eng_tensor_stats *s)
{ return s->relative_scale > 0 ? s->relative_scale : 1; }

// TIMES_1 and TIMES_2: what a total of record.def, of power 1 or 2, becomes if all gradients are
// multiplied by the number `by`. OVER_1 and OVER_2: the same for gradients that are divided by it.
#define TIMES_1(total, by) ((total) * (by))
#define TIMES_2(total, by) ((total) * (by) * (by))
#define OVER_1(total, by)  ((total) / (by))
#define OVER_2(total, by)  ((total) / (by) / (by))

/// Combines the statistics of `n` tensors into one record: counts, sums of squares, maxima, and the
/// histogram if it is among the `needs` (ENG_NEED_*) that the pass computed. Divides amax and norm
/// by `scale` (the loss scale) and by the tensors' relative scales, to get true magnitudes.
void gradstats_sum(eng_record *record, const eng_tensor_stats *stats, int n, double scale,
                   unsigned needs);
