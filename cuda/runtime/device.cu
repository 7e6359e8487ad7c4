// The card: the compute stream, memory for the arenas, copies, faults, and the streams for messages
// between ranks. Owns the compute stream and the fault record. Called through the table (table.c)
// and by every kernel file (device.h).
#include "device.h"
#include "runtime.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct {
  int ordinal;
  cudaStream_t stream;
  // an event of the compute stream, for another stream to wait for (cuda_stream_follow)
  cudaEvent_t reached;
  cudaDeviceProp properties;
  cuda_fault_record *fault;      // device memory
  cuda_fault_record *fault_seen; // pinned host memory: a copy of `fault`
  bool open;
} card;

cudaStream_t cuda_stream(void) { return card.stream; }
int cuda_multiprocessors(void) { return card.properties.multiProcessorCount; }
int cuda_capability(void) { return 10 * card.properties.major + card.properties.minor; }
cuda_fault_record *cuda_fault(void) { return card.fault; }

eng_status cuda_status(cudaError_t result, const char *what)
{
  if (result == cudaSuccess) return ENG_OK;
  cudaGetLastError();
  FAIL_IF(result == cudaErrorMemoryAllocation, ENG_ERR_MEMORY, "cuda: out of device or pinned "
          "memory in %s; hint: a smaller batch or context, or accumulate=N", what);
  return error_set(ENG_ERR_DEVICE, "cuda: %s (%s) in %s%s", cudaGetErrorString(result),
                   cudaGetErrorName(result), what,
                   result == cudaErrorIllegalAddress || result == cudaErrorLaunchFailure ?
                     "; results on the card are lost; hint: restart the process" :
                     "");
}

/// Returns the ordinal of this process's card: the process's local rank modulo `count`, or 0 if no
/// launcher set a local rank. Returns -1, with the error set, if a launcher's variable is not a
/// number of at most nine digits.
static int wanted_ordinal(int count)
{
  static const char *const names[] = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"};
  for (unsigned i = 0; i < sizeof names / sizeof *names; i++) {
    const char *text = getenv(names[i]);
    if (!text || !*text) continue;
    if (strlen(text) < 10 && strspn(text, "0123456789") == strlen(text)) return atoi(text) % count;
    error_set(ENG_ERR_DEVICE,
              "cuda: %s: expected the local rank of this process, an integer from 0 to 999999999, "
              "got '%.40s'", names[i], text);
    return -1;
  }
  return 0;
}

eng_status cuda_open(void)
{
  if (card.open) return ENG_OK;
  int count = 0, driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  FAIL_IF(driver == 0, ENG_ERR_DEVICE, "cuda: this machine has no NVIDIA driver; hint: device=cpu");
  FAIL_IF(driver < runtime / 1000 * 1000, ENG_ERR_DEVICE,
          "cuda: the driver supports CUDA %d.%d, but this build needs %d.0 or later; hint: a "
          "newer driver, or device=cpu", driver / 1000, driver % 1000 / 10, runtime / 1000);
  cudaError_t result = cudaGetDeviceCount(&count);
  if (result != cudaSuccess || count == 0) {
    cudaGetLastError();
    return error_set(ENG_ERR_DEVICE,
                     "cuda: no device (%s); hint: run nvidia-smi to see the cards, check whether "
                     "CUDA_VISIBLE_DEVICES hides them, or use device=cpu",
                     result == cudaSuccess ? "the driver finds none" : cudaGetErrorString(result));
  }
  card.ordinal = wanted_ordinal(count);
  if (card.ordinal < 0) return ENG_ERR_DEVICE;
  CUDA_TRY(cudaSetDevice(card.ordinal));
  CUDA_TRY(cudaGetDeviceProperties(&card.properties, card.ordinal));
  FAIL_IF(card.properties.major < 8, ENG_ERR_DEVICE,
          "cuda: %s has compute capability %d.%d, but the kernels need 8.0 or later; hint: "
          "device=cpu", card.properties.name, card.properties.major, card.properties.minor);
  CUDA_TRY(cudaStreamCreateWithFlags(&card.stream, cudaStreamNonBlocking));
  CUDA_TRY(cudaMalloc((void **)&card.fault, sizeof *card.fault));
  CUDA_TRY(cudaMemsetAsync(card.fault, 0, sizeof *card.fault, card.stream));
  CUDA_TRY(cudaMallocHost((void **)&card.fault_seen, sizeof *card.fault_seen));
  card.open = true;
  return ENG_OK;
}

const char *cuda_describe(void)
{
  static char text[1024];
  int driver = 0, runtime = 0;
  size_t free_bytes = 0, all = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  cudaMemGetInfo(&free_bytes, &all);
  snprintf(text, sizeof text,
           "%s, sm_%d, %d multiprocessors, %.1f of %.1f GiB free, CUDA %d.%d (driver %d.%d)",
           card.properties.name, cuda_capability(), cuda_multiprocessors(),
           (double)free_bytes / (1 << 30), (double)all / (1 << 30), runtime / 1000,
           runtime % 1000 / 10, driver / 1000, driver % 1000 / 10);
  return text;
}

const char *cuda_identity(void)
{
  static char text[40];
  for (int i = 0; i < 16; i++)
    snprintf(text + 2 * i, 3, "%02x", (unsigned char)card.properties.uuid.bytes[i]);
  return text;
}

// ---- memory

void *cuda_take(int64_t bytes)
{
  void *memory = NULL;
  if (cudaMalloc(&memory, (size_t)bytes) == cudaSuccess) return memory;
  cudaGetLastError();
  return NULL;
}

void cuda_give(void *memory, int64_t bytes)
{
  (void)bytes;
  if (cuda_give_later(memory)) return;
  cudaStreamSynchronize(card.stream);   // a kernel may still use this memory
  cudaFree(memory);
}

int64_t cuda_capacity(void)
{
  size_t free_bytes = 0, all = 0;
  return cudaMemGetInfo(&free_bytes, &all) == cudaSuccess ? (int64_t)all : 0;
}

// ---- copies and waiting

static int64_t faults_told;

int64_t cuda_faults_told(void) { return faults_told; }

eng_status cuda_fault_told(const cuda_fault_record *seen)
{
  cuda_fault_record fault = *seen;
  faults_told++;
  CUDA_TRY(cudaMemsetAsync(card.fault, 0, sizeof *card.fault, card.stream));
  return error_set(
    ENG_ERR_VALUE,
    "%s: expected %s%lld, got %lld (reported at the next wait for the device, not by the call)",
    eng_op_name(fault.op),
    fault.limit > 0 ? "indices in 0.." : "no indices into a dimension of size ",
    (long long)(fault.limit - (fault.limit > 0)), (long long)fault.value);
}

eng_status cuda_synchronize(void)
{
  FAIL_IF(cuda_capturing(), ENG_ERR_STATE, "graph: the step waits for the device, which a "
          "captured step cannot do; hint: graph=false");
  CUDA_TRY(cudaMemcpyAsync(card.fault_seen, card.fault, sizeof *card.fault, cudaMemcpyDeviceToHost,
                           card.stream));
  ENG_TRY(cuda_status(cudaStreamSynchronize(card.stream), "waiting for the device"));
  return card.fault_seen->raised ? cuda_fault_told(card.fault_seen) : ENG_OK;
}

static cudaMemcpyKind kind_of(copy_direction direction)
{
  return direction == COPY_TO_DEVICE ? cudaMemcpyHostToDevice :
         direction == COPY_TO_HOST   ? cudaMemcpyDeviceToHost :
                                       cudaMemcpyDeviceToDevice;
}

eng_status cuda_move(void *to, const void *from, int64_t bytes, copy_direction direction)
{
  if (bytes == 0) return ENG_OK;
  if (direction == COPY_TO_DEVICE) {
    if (!cuda_capturing()) return cuda_stage(to, from, bytes);
    // every launch of the graph repeats this copy, so it must read memory that the graph keeps
    if (!(from = cuda_capture_keep(from, bytes))) return ENG_ERR_MEMORY;
  }
  FAIL_IF(direction == COPY_TO_HOST && cuda_capturing(), ENG_ERR_STATE, "graph: the step reads a "
          "value back from the device, which a captured step cannot do; hint: graph=false");
  CUDA_TRY(cudaMemcpyAsync(to, from, (size_t)bytes, kind_of(direction), card.stream));
  return direction == COPY_TO_HOST ? cuda_synchronize() : ENG_OK;
}

eng_status cuda_clear(void *memory, int64_t bytes)
{
  if (bytes > 0) CUDA_TRY(cudaMemsetAsync(memory, 0, (size_t)bytes, card.stream));
  return ENG_OK;
}

// ---- streams for messages between ranks, in addition to the compute stream

eng_status cuda_stream_new(void **out)
{
  int low = 0, high = 0;
  cudaStream_t stream = NULL;
  *out = NULL;
  CUDA_TRY(cudaDeviceGetStreamPriorityRange(&low, &high));
  // the highest priority, because other ranks wait for the work of this stream
  CUDA_TRY(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, high));
  *out = stream;
  return ENG_OK;
}

eng_status cuda_stream_follow(void *stream)
{
  if (!card.reached) CUDA_TRY(cudaEventCreateWithFlags(&card.reached, cudaEventDisableTiming));
  CUDA_TRY(cudaEventRecord(card.reached, card.stream));
  // waits for the work queued so far; recording the event again later does not change this wait
  CUDA_TRY(cudaStreamWaitEvent((cudaStream_t)stream, card.reached, 0));
  return ENG_OK;
}

static eng_status answer(bool *done, cudaError_t result)
{
  *done = result == cudaSuccess;
  if (result == cudaErrorNotReady) cudaGetLastError();
  return *done || result == cudaErrorNotReady ? ENG_OK :
                                                cuda_status(result, "messages between ranks");
}

eng_status cuda_stream_done(bool *done, void *stream)
{ return answer(done, cudaStreamQuery((cudaStream_t)stream)); }

eng_status cuda_stream_mark(void **mark, void *stream)
{
  cudaEvent_t event = (cudaEvent_t)*mark;
  if (!event) CUDA_TRY(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  *mark = event;
  CUDA_TRY(cudaEventRecord(event, (cudaStream_t)stream));
  return ENG_OK;
}

eng_status cuda_stream_reached(bool *reached, void *mark)
{ return answer(reached, cudaEventQuery((cudaEvent_t)mark)); }

void cuda_stream_forget(void *mark) { if (mark) cudaEventDestroy((cudaEvent_t)mark); }

eng_status cuda_stream_move(void *stream, void *to, const void *from, int64_t bytes,
                          copy_direction direction)
{
  if (bytes > 0)
    CUDA_TRY(
      cudaMemcpyAsync(to, from, (size_t)bytes, kind_of(direction), (cudaStream_t)stream));
  if (direction == COPY_TO_HOST) CUDA_TRY(cudaStreamSynchronize((cudaStream_t)stream));
  return ENG_OK;
}
