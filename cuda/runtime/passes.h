// The CUDA device's functions that are no operations, as table.c lists them: memory and lanes (device.cu), copies
// from ordinary memory (staging.c), messages between ranks (wire.cu),
// the passes over all parameters (gradstats.cu, optimizer.cu). Contracts: backend.h.
#ifndef ENG_CUDA_PASSES_H
#define ENG_CUDA_PASSES_H

#ifdef __cplusplus
extern "C" {
#endif
#include "device/backend.h"

// device.cu
/// Takes the card: the one of CUDA_VISIBLE_DEVICES, or with LOCAL_RANK that of the rank.
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
/// A copy to the card that neither waits nor needs `from` once it returns.
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
/// Whether a step is being captured; host memory of `bytes` that lives as long as its graph, for what it copies to the card.
bool        cuda_capturing(void);
void       *cuda_capture_keep(const void *bytes, int64_t size);
/// While a step is captured nobody may wait for the stream: notes device memory that is to be freed at the capture's end. False when none is.
bool        cuda_give_later(void *memory);

// gradstats.cu
eng_status cuda_gradstats(const param_span *spans, int n, unsigned needs, eng_tensor_stats *stats);
eng_status cuda_gradstats_start(int64_t *ticket, const param_span *spans, int n, unsigned needs,
                                tensor *const *loss, int n_loss);
eng_status cuda_gradstats_fetch(int64_t ticket, eng_tensor_stats *stats, int n, double *loss,
                                int n_loss);

/// For lagged updates: what a gradstats pass found, in device memory.
typedef struct cuda_step_total {
  int64_t bad;            // inf and nan of all spans
  double  sum_squares;    // of the finite gradients, divided by their span's `scale`
} cuda_step_total;
/// Of the pass with this ticket, fetched or not; NULL when a later pass took its place.
const cuda_step_total *cuda_total_of(int64_t ticket);

// optimizer.cu
eng_status cuda_optimize(const param_span *spans, int n, const eng_update *update);
eng_status cuda_unscale(const param_span *spans, int n, double factor, float *const *target,
                        int *found_inf);

#ifdef __cplusplus
}
#endif
#endif
