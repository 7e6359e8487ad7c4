// Copies from pageable host memory to the card. The driver may wait for all earlier work of the
// stream before it copies from pageable memory. So a step's data (its batch, and what parameters/
// sends) goes through a ring of pinned segments. The host waits for the card only when the ring
// grows, and when it reuses a segment that the card has not read yet. Owns the ring. Called by
// device.cu and parameters/.
#include "device.h"
#include "runtime.h"

#include <string.h>

enum { SEGMENTS = 4 };
static const int64_t LEAST = 1 << 20;   // bytes of the smallest segment

static struct {
  char       *memory;            // SEGMENTS segments of `bytes` bytes each
  int64_t     bytes, used;       // size of a segment, and bytes taken from the current one
  int64_t     most;              // largest size of a segment; lowered if pinned memory is short
  int         filling;           // index of the current segment
  cudaEvent_t read[SEGMENTS];    // reached when the card has read the segment
} ring = {.most = 16 << 20};

/// Makes segments of at least `wanted` bytes, or smaller ones if pinned memory is short or
/// `ring.most` is reached. Copies longer than a segment are then sent in pieces.
static eng_status ring_make(int64_t wanted)
{
  int64_t bytes = ring.memory ? ring.bytes : LEAST;
  while (bytes < wanted && bytes < ring.most) bytes *= 2;
  if (ring.memory && bytes == ring.bytes) return ENG_OK;
  for (int i = 0; i < SEGMENTS; i++)
    if (!ring.read[i]) CUDA_TRY(cudaEventCreateWithFlags(&ring.read[i], cudaEventDisableTiming));
  char *memory = NULL;
  cudaError_t result;
  while ((result = cudaMallocHost((void **)&memory, (size_t)(SEGMENTS * bytes))) ==
           cudaErrorMemoryAllocation &&
         bytes > LEAST) {
    cudaGetLastError();
    ring.most = bytes /= 2;
    if (bytes == ring.bytes) return ENG_OK;
  }
  ENG_TRY(cuda_status(result, "cudaMallocHost (pinned segments for copies to the card)"));
  if (ring.memory) {
    CUDA_TRY(cudaStreamSynchronize(cuda_stream()));
    CUDA_TRY(cudaFreeHost(ring.memory));
  }
  ring.memory = memory;
  ring.bytes = bytes;
  ring.used = 0;
  return ENG_OK;
}

static eng_status next_segment(void)
{
  CUDA_TRY(cudaEventRecord(ring.read[ring.filling], cuda_stream()));
  ring.filling = (ring.filling + 1) % SEGMENTS;
  CUDA_TRY(cudaEventSynchronize(ring.read[ring.filling]));
  ring.used = 0;
  return ENG_OK;
}

eng_status cuda_stage(void *to, const void *from, int64_t bytes)
{
  ENG_TRY(ring_make(bytes));
  while (bytes > 0) {
    if (ring.used == ring.bytes || (bytes > ring.bytes - ring.used && bytes <= ring.bytes))
      ENG_TRY(next_segment());
    int64_t room = ring.bytes - ring.used, some = bytes < room ? bytes : room;
    char *at = ring.memory + ring.filling * ring.bytes + ring.used;
    memcpy(at, from, (size_t)some);
    CUDA_TRY(cudaMemcpyAsync(to, at, (size_t)some, cudaMemcpyHostToDevice, cuda_stream()));
    ring.used += (some + 63) / 64 * 64 < room ? (some + 63) / 64 * 64 : room;
    to = (char *)to + some;
    from = (const char *)from + some;
    bytes -= some;
  }
  return ENG_OK;
}
