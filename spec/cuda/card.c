// See card.h.
#include "card.h"

#include "runtime/device.h"
#include "quantized/fp8_plain.h"
#include "gemm/gemm_codes.h"
#include "gemm/gemm.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

fake_card card;

// ------------------------------------------------------------------ the core and the device

eng_status error_set(eng_status status, const char *format, ...)
{
  va_list args;
  va_start(args, format);
  vsnprintf(card.error, sizeof card.error, format, args);
  va_end(args);
  return status;
}

const char *eng_dtype_name(int dtype)
{
  static const char *const names[] = {"f32", "f64", "f16", "bf16"};
  return dtype >= 0 && dtype < 4 ? names[dtype] : "?";
}

int eng_dtype_size(int dtype)
{
  return dtype == ENG_f64                       ? 8 :
         dtype == ENG_f32                       ? 4 :
         dtype == ENG_e4m3 || dtype == ENG_e5m2 ? 1 :
                                                  2;
}

int arena_space(void) { return SPACE_CUDA; }

void *arena_alloc_in(int space, arena_id id, int64_t bytes)
{
  (void)space, (void)id;
  if (card.room && card.scratch_bytes + bytes > card.room) {
    error_set(ENG_ERR_MEMORY, "out of scratch memory for %ld bytes", (long)bytes);
    return NULL;
  }
  card.scratch_bytes += bytes;
  return aligned_alloc(256, (size_t)(bytes + 255) / 256 * 256 + 256);
}

void arena_free_in(int space, arena_id id, void *piece, int64_t bytes)
{
  (void)space, (void)id;
  card.scratch_bytes -= bytes;
  free(piece);
}

void card_later(void (*run)(const void *), const void *what, size_t bytes, cudaStream_t stream)
{
  (void)bytes, (void)stream;
  run(what);
}

cudaStream_t cuda_stream(void) { return NULL; }
int cuda_multiprocessors(void) { return 132; }
int cuda_capability(void) { return card.capability; }
eng_status cuda_status(cudaError_t result, const char *what)
{
  return result == cudaSuccess ?
           ENG_OK :
           error_set(ENG_ERR_DEVICE, "cuda: error %d in %s", (int)result, what);
}

/// Does the work of the kernels contiguous and cast.
static eng_status copy(const op_call *call)
{
  const tensor *x = call->in[0], *y = call->out[0];
  int64_t index[ENG_MAX_DIMS] = {0};
  for (int64_t i = 0; i < y->count; i++) {
    int64_t from = 0, to = 0;
    for (int d = 0; d < x->ndim; d++) {
      from += index[d] * x->stride[d];
      to += index[d] * y->stride[d];
    }
    if (x->dtype == ENG_e4m3 || x->dtype == ENG_e5m2)
      ((uint8_t *)y->data)[to] = ((const uint8_t *)x->data)[from];
    else element_set(y->data, y->dtype, to, element_get(x->data, x->dtype, from));
    for (int d = x->ndim - 1; d >= 0 && ++index[d] == x->shape[d]; d--) index[d] = 0;
  }
  return ENG_OK;
}

eng_status cuda_contiguous(const op_call *call)
{
  CHECK(call->in[0]->dtype == call->out[0]->dtype, "contiguous does not convert");
  return copy(call);
}

eng_status cuda_cast(const op_call *call)
{
  CHECK(call->cast.dtype == call->out[0]->dtype, "cast to another format than its output's");
  return copy(call);
}

// ------------------------------------------------------------------ unary.cu, bias_grad.cu

eng_status cuda_gelu_tanh(const op_call *call)
{
  const tensor *x = call->in[0], *y = call->out[0];
  card.passes++;
  for (int64_t i = 0; i < y->count; i += card.sample)
    element_set(y->data, y->dtype, i, gelu_of(element_get(x->data, x->dtype, i)));
  return ENG_OK;
}

eng_status cuda_unary_grad(const op_call *call)
{
  const tensor *x = call->in[0], *dy = call->in[1], *dx = call->out[0];
  CHECK(call->unary_grad.of == ENG_OP_gelu_tanh && call->unary_grad.dtype == dx->dtype &&
          x->count == dy->count && dx->count == x->count,
        "unary_grad");
  card.passes++;
  for (int64_t i = 0; i < dx->count; i += card.sample)
    element_set(dx->data, dx->dtype, i,
                gelu_slope(element_get(x->data, x->dtype, i)) *
                  element_get(dy->data, dy->dtype, i));
  return ENG_OK;
}

eng_status cuda_bias_grad(const op_call *call)
{
  const tensor *dy = call->in[0], *db = call->out[0];
  int64_t n = db->count, rows = n ? dy->count / n : 0;
  CHECK(dy->shape[dy->ndim - 1] == n && call->bias_grad.dtype == db->dtype, "bias_grad");
  if (rows > 1) card.passes++;
  for (int64_t j = 0; j < n; j++) {
    double sum = call->bias_grad.add ? element_get(db->data, db->dtype, j) : 0;
    for (int64_t i = 0; i < rows; i++) sum += element_get(dy->data, dy->dtype, i * n + j);
    element_set(db->data, db->dtype, j, sum);
  }
  return ENG_OK;
}

// ------------------------------------------------------------------ gemm_plain.cu

static int64_t batch_offset(const gemm_product *p, const gemm_matrix *x, int64_t z)
{
  int64_t offset = 0;
  for (int d = p->batch_dims - 1; d >= 0; d--) {
    offset += z % p->batch[d] * x->batch[d];
    z /= p->batch[d];
  }
  return offset;
}

static void each(const gemm_product *p, const gemm_matrix *ready)
{
  int64_t batches = 1;
  for (int d = 0; d < p->batch_dims; d++) batches *= p->batch[d];
  for (int64_t z = 0; z < batches; z++)
    for (int64_t i = 0; i < p->m; i++)
      for (int64_t j = 0; j < p->n; j++) {
        double sum = 0;
        if (ready)
          sum = element_get(ready->data, ready->dtype,
                            batch_offset(p, ready, z) + i * ready->row + j * ready->column);
        for (int64_t k = 0; !ready && k < p->k; k++)
          sum += element_get(p->a.data, p->a.dtype,
                             batch_offset(p, &p->a, z) + i * p->a.row + k * p->a.column) *
                 element_get(p->b.data, p->b.dtype,
                             batch_offset(p, &p->b, z) + k * p->b.row + j * p->b.column);
        int64_t at = batch_offset(p, &p->c, z) + i * p->c.row + j * p->c.column;
        if (p->bias) sum += element_get(p->bias, p->bias_dtype, j);
        if (p->accumulate) sum += element_get(p->c.data, p->c.dtype, at);
        element_set(p->c.data, p->c.dtype, at, sum);
      }
}

eng_status gemm_plain(const gemm_product *p)
{
  card.plain++;
  each(p, NULL);
  return ENG_OK;
}

eng_status gemm_finish(const gemm_product *p, const gemm_matrix *sum)
{
  card.finished++;
  each(p, sum);
  return ENG_OK;
}

/// In place of fp8_plain.cu: only records the call.
eng_status fp8_plain(const op_call *call)
{
  (void)call;
  card.plain++;
  return ENG_OK;
}

// ------------------------------------------------------------------ the CUDA runtime

struct CUevent_st { float at; };

cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
  (void)device;
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "NVIDIA Fake 1");
  properties->multiProcessorCount = 132;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void **memory, size_t bytes)
{
  if (card.no_memory) return cudaErrorMemoryAllocation;
  *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
  card.memory++;
  return cudaSuccess;
}
cudaError_t cudaFree(void *memory) { free(memory); card.memory--; return cudaSuccess; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
  (void)kind, (void)stream;
  memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream)
{
  (void)stream;
  memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event)
{
  *event = calloc(1, sizeof **event);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
  (void)stream;
  event->at = card.running;
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
  (void)event;
  card.synchronizations++;
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to)
{
  *milliseconds = to->at - from->at;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
  (void)stream;
  card.synchronizations++;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
  (void)stream;
  *status = card.capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
