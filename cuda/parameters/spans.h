// Shared by the passes over all parameters: a table in device memory, which lists the parameters
// and the chunks that they are cut into. Used by gradstats.cu and optimizer.cu.
#pragma once

#include "runtime/device.h"

enum {
  // elements of a chunk. The tensors alone determine where chunks end, so that sums have the same
  // order on every card
  SPAN_CHUNK = 16384,
  SPAN_THREADS = 256,
};

/// A param_span as kernels see it.
typedef struct device_span {
  void    *master;               // master weights; or the f32 target when gradients are unscaled
  void    *compensation, *low, *gradient, *moment[ENG_MOMENTS];
  int64_t  count, first;
  double   scale;
  int32_t  master_dtype, low_dtype, gradient_dtype, moment_dtype, group, starts, index;
  int32_t  aligned;              // 1: every array is 16-byte aligned
  int32_t  first_chunk, chunks;
} device_span;

/// Device memory of `bytes` bytes.
typedef struct device_room { void *data; int64_t bytes; } device_room;

/// A pass's table. In device memory it is span[n], then chunk[chunks] with each chunk's span index.
typedef struct span_table {
  device_room  room;
  device_span *span;             // in `room`
  int32_t     *chunk;            // in `room`
  int          n;
  int64_t      chunks;
  device_span *known, *fresh;    // host memory: the spans on the card, and the new ones
  int          capacity;         // of `known` and `fresh`
} span_table;

/// Brings the table up to date, and sends it to the card if something changed. Waits for the card
/// only if the table needs more device memory, or as cuda_stage does. `target` holds the
/// destinations of unscaled gradients, or is NULL.
eng_status spans_ready(span_table *table, const param_span *spans, int n, float *const *target);

/// If the memory is smaller than `bytes`, replaces it by memory of 5/4 of `bytes`, filled with
/// zeros. The old contents are then lost.
eng_status device_grow(device_room *room, int64_t bytes);
