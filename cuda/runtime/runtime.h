// This folder's functions, most of which table.c lists: memory and streams (device.cu), copies from
// pageable memory (staging.c), messages between ranks (wire.cu), captured steps (graph.cu).
// backend.h has the contracts. Included by this folder, parameters/ and table.c.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif
#include "device/backend.h"

// host.c
/// Keeps the core's table of functions. Returns false if the table's version differs from this
/// plug-in's.
bool        host_accept(const backend_host *given);
// device.cu
/// Opens the card of this process's local rank, or the first visible card if there is no launcher.
eng_status  cuda_open(void);
void       *cuda_take(int64_t bytes);
void        cuda_give(void *memory, int64_t bytes);
int64_t     cuda_capacity(void);
eng_status  cuda_move(void *to, const void *from, int64_t bytes, copy_direction direction);
eng_status  cuda_clear(void *memory, int64_t bytes);
eng_status  cuda_synchronize(void);
const char *cuda_describe(void);
const char *cuda_identity(void);
eng_status  cuda_stream_new(void **stream);
eng_status  cuda_stream_follow(void *stream);
eng_status  cuda_stream_done(bool *done, void *stream);
eng_status  cuda_stream_mark(void **mark, void *stream);
eng_status  cuda_stream_reached(bool *reached, void *mark);
void        cuda_stream_forget(void *mark);
eng_status  cuda_stream_move(void *stream, void *to, const void *from, int64_t bytes,
                             copy_direction direction);
// staging.c
/// Copies to the card. Waits only if the next segment of pinned memory is still in use, or for the
/// whole stream if the ring of segments grows (see staging.c). The caller may reuse `from` as soon
/// as this returns. Not during a capture.
eng_status  cuda_stage(void *to, const void *from, int64_t bytes);
// wire.cu
eng_status  cuda_wire_pack(void *stream, const wire_run *runs, int n, int64_t longest,
                           int comm_dtype, int dtype, uint32_t *flags);
eng_status  cuda_wire_unpack(void *stream, const wire_run *runs, int n, int64_t longest,
                             int comm_dtype, int dtype);
eng_status  cuda_wire_sum(void *stream, void *out, const void *const *terms, int n, int64_t count,
                          int comm_dtype, float share);
// graph.cu
eng_status  cuda_capture_begin(void);
eng_status  cuda_capture_end(void **graph);
eng_status  cuda_graph_launch(void *graph);
void        cuda_graph_free(void *graph);
/// Whether a step is being captured.
bool        cuda_capturing(void);
/// Copies `size` bytes to pinned host memory and returns that memory, which the graph that is being
/// captured can read at each launch. It is freed with the graph. Returns NULL, with the error set,
/// if memory runs out.
void       *cuda_capture_keep(const void *bytes, int64_t size);
/// During a capture, queues device memory to be freed when the capture ends, and returns true. (To
/// free it now, the host would have to wait for the stream.) Without a capture, returns false.
bool        cuda_give_later(void *memory);

#ifdef __cplusplus
}
#endif
