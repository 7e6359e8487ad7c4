// The passes over all parameters: gradient statistics (gradstats.cu), updates and unscaling
// (optimizer.cu). backend.h has the contracts. Called through the device's table. The core has
// checked the formats (core/params): f32 or bf16 masters; gradients, moments and low-precision
// weights in f32, f16 or bf16; losses of one f32 element.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif
#include "device/backend.h"

// gradstats.cu
eng_status cuda_gradstats(const param_span *spans, int n, unsigned needs, eng_tensor_stats *stats);
eng_status cuda_gradstats_start(int64_t *ticket, const param_span *spans, int n, unsigned needs,
                                tensor *const *loss, int n_loss);
eng_status cuda_gradstats_fetch(int64_t ticket, eng_tensor_stats *stats, int n, double *loss,
                                int n_loss);

/// Totals of a gradstats pass, in device memory. Lagged updates read them.
typedef struct cuda_step_total {
  int64_t bad;            // number of inf and nan in all spans
  double  sum_squares;    // of the finite gradients, each divided by its span's `scale`
} cuda_step_total;
/// Returns the totals of the pass with this ticket, whether or not its results have been fetched.
/// Returns NULL once a later pass has overwritten the totals.
const cuda_step_total *cuda_total_of(int64_t ticket);

// optimizer.cu
eng_status cuda_optimize(const param_span *spans, int n, const eng_update *update);
eng_status cuda_unscale(const param_span *spans, int n, double factor, float *const *target,
                        int *found_inf);

#ifdef __cplusplus
}
#endif
