// Functions of the CUDA device other than operations, as table.c lists them: memory and streams
// (device.cu), copies from pageable memory (staging.c), messages between ranks (wire.cu), the
// passes over all parameters (gradstats.cu, optimizer.cu). Contracts: backend.h.
#ifndef ENG_CUDA_PASSES_H
#define ENG_CUDA_PASSES_H

#ifdef __cplusplus
extern "C" {
#endif
#include "device/backend.h"

// device.cu
/// Opens the card: the first of CUDA_VISIBLE_DEVICES, or the local rank's.
eng_status  cuda_open(void);
void       *cuda_take(int64_t bytes);
void        cuda_give(void *memory, int64_t bytes);
int64_t     cuda_capacity(void);
eng_status  cuda_move(void *to, const void *from, int64_t bytes, copy_direction direction);
eng_status  cuda_clear(void *memory, int64_t bytes);
eng_status  cuda_synchronize(void);
const char *cuda_describe(void);
const char *cuda_identity(void);
eng_status  cuda_lane_new(void **lane);
eng_status  cuda_lane_follow(void *lane);
eng_status  cuda_lane_done(bool *done, void *lane);
eng_status  cuda_lane_mark(void **mark, void *lane);
eng_status  cuda_lane_reached(bool *reached, void *mark);
void        cuda_lane_forget(void *mark);
eng_status cuda_lane_move(void *lane, void *to, const void *from, int64_t bytes,
                          copy_direction direction);
// fp8_matmul.c
int         cuda_fp8(void);
// staging.c
/// Copies to the card without waiting. The caller may reuse `from` as soon as this returns.
eng_status  cuda_stage(void *to, const void *from, int64_t bytes);
// wire.cu
eng_status cuda_wire_pack(void *lane, const wire_run *runs, int n, int64_t longest, int wire,
                          int dtype, uint32_t *flags);
eng_status cuda_wire_unpack(void *lane, const wire_run *runs, int n, int64_t longest, int wire,
                            int dtype);
eng_status cuda_wire_sum(void *lane, void *out, const void *const *terms, int n, int64_t count,
                         int wire, float share);
// graph.cu
eng_status  cuda_capture_begin(void);
eng_status  cuda_capture_end(void **graph);
eng_status  cuda_graph_launch(void *graph);
void        cuda_graph_free(void *graph);
/// Whether a step is being captured.
bool        cuda_capturing(void);
/// A copy of `bytes` in host memory that lives as long as the captured graph. The graph copies
/// from it to the card.
void       *cuda_capture_keep(const void *bytes, int64_t size);
/// A capture forbids waiting for the stream. During one, this notes device memory to free when the
/// capture ends and returns true; otherwise it returns false.
bool        cuda_give_later(void *memory);

// gradstats.cu
eng_status cuda_gradstats(const param_span *spans, int n, unsigned needs, eng_tensor_stats *stats);
eng_status cuda_gradstats_start(int64_t *ticket, const param_span *spans, int n, unsigned needs,
                                tensor *const *loss, int n_loss);
eng_status cuda_gradstats_fetch(int64_t ticket, eng_tensor_stats *stats, int n, double *loss,
                                int n_loss);

/// What a gradstats pass found, in device memory. For lagged updates.
typedef struct cuda_step_total {
  int64_t bad;            // inf and nan of all spans
  double  sum_squares;    // of the finite gradients, divided by their span's `scale`
} cuda_step_total;
/// The totals of the pass with this ticket, fetched or not; NULL once a later pass has reused their
/// place.
const cuda_step_total *cuda_total_of(int64_t ticket);

// optimizer.cu
eng_status cuda_optimize(const param_span *spans, int n, const eng_update *update);
eng_status cuda_unscale(const param_span *spans, int n, double factor, float *const *target,
                        int *found_inf);

#ifdef __cplusplus
}
#endif
#endif
