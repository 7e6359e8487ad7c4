// Included by every file of the CUDA device: the stream, checked calls, scratch memory and number
// formats. The device itself (memory, copies, faults) is device.cu; the table of its functions is
// table.c. Functions of the core come through host.c, so that kernel files use the core's own
// headers and names (error_set, arena_alloc, tensor_text).
#pragma once

#ifdef __cplusplus
extern "C" {
#endif
#include "device/backend.h"
#include "base/error.h"
#include "base/numerics.h"
#ifdef __cplusplus
}
#endif

#include <cuda_runtime.h>

#ifdef __cplusplus
extern "C" {
#endif

/// The compute stream: all kernels, copies and products go to it, in order.
cudaStream_t cuda_stream(void);
/// The card's number of multiprocessors (132 on an H200), and its compute capability times ten
/// (90).
int cuda_multiprocessors(void);
int cuda_capability(void);

/// Returns ENG_OK, or an error that contains `what` and CUDA's own message.
eng_status cuda_status(cudaError_t result, const char *what);

/// A kernel's workspace. Free it before the host function that launches the kernel returns: the
/// compute stream orders later uses of the memory after this one. Pieces are 256-byte aligned on
/// this device.
static inline void *scratch_take(int64_t bytes) { return arena_alloc(ARENA_SCRATCH, bytes); }
static inline void scratch_give(void *piece, int64_t bytes)
{ arena_free(ARENA_SCRATCH, piece, bytes); }

/// The pieces of scratch memory that a call has taken, to be freed together.
enum { SCRATCH_PIECES = 6 };
typedef struct scratch {
  int     n;
  void   *piece[SCRATCH_PIECES];
  int64_t bytes[SCRATCH_PIECES];
} scratch;

/// Takes a piece; NULL, with the error set, if out of memory.
static inline void *scratch_keep(scratch *s, int64_t bytes)
{
  void *piece = scratch_take(bytes);
  if (!piece) return NULL;
  s->piece[s->n] = piece;
  s->bytes[s->n++] = bytes;
  return piece;
}
static inline void scratch_give_all(scratch *s)
{
  while (s->n > 0) {
    s->n--;
    scratch_give(s->piece[s->n], s->bytes[s->n]);
  }
}

/// The number of rows of x [.. x columns]: the product of all sizes but the last.
static inline int64_t rows_of(const tensor *x)
{
  int64_t rows = 1;
  for (int d = 0; d + 1 < x->ndim; d++) rows *= x->shape[d];
  return rows;
}

/// A fault reported by a kernel: the first index out of range since the last check. The record is
/// in device memory. The host checks it whenever it waits for the device for another reason (to
/// read a value or a step's statistics); that call then fails with ENG_ERR_VALUE.
typedef struct cuda_fault_record {
  // 1 if the other fields are valid. atomicCAS sets it, so that the first fault is kept.
  int32_t raised;
  int32_t op;            // eng_op
  int64_t value, limit;  // the bad index; the smallest index that is too large
} cuda_fault_record;
cuda_fault_record *cuda_fault(void);
/// Clears the fault and returns its error. For functions that copy the fault record themselves:
/// `seen` is their copy, with `raised` set.
eng_status cuda_fault_told(const cuda_fault_record *seen);

#ifdef __cplusplus
}
#endif

#define CUDA_TRY(call)                                                  \
  do {                                                                  \
    cudaError_t cuda_try_ = (call);                                     \
    if (cuda_try_ != cudaSuccess) return cuda_status(cuda_try_, #call); \
  } while (0)
/// Use after a launch: catches an invalid launch configuration. An error inside the kernel appears
/// at the next wait.
#define CUDA_LAUNCHED(name)                        \
  do {                                             \
    cudaError_t cuda_try_ = cudaPeekAtLastError(); \
    if (cuda_try_ != cudaSuccess) {                \
      cudaGetLastError();                          \
      return cuda_status(cuda_try_, name);         \
    }                                              \
  } while (0)

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>

/// Reports a fault of operation `op` from a kernel.
__device__ static inline void raise_fault(cuda_fault_record *fault, int op, int64_t value,
                                          int64_t limit)
{
  if (atomicCAS(&fault->raised, 0, 1) == 0) {
    fault->op = op;
    fault->value = value;
    fault->limit = limit;
  }
}

// Storage types of f16 and bf16. A template over storage types converts once on each read and once
// on each write.
struct f16_t  { uint16_t bits; };
struct bf16_t { uint16_t bits; };

/// Converts any float format to f32 (f64 to f64), exactly. A signaling NaN in f16 becomes quiet, as
/// in numerics.h.
__device__ static inline float  widen(float x)  { return x; }
__device__ static inline double widen(double x) { return x; }
__device__ static inline float  widen(f16_t x)  { return __half2float(__ushort_as_half(x.bits)); }
__device__ static inline float  widen(bf16_t x) { return __uint_as_float((uint32_t)x.bits << 16); }

// Rounds once, to nearest even, bit-equal to numerics.h. The hardware's conversions return one
// canonical NaN (0x7FFF). These functions keep a NaN's sign and payload, hence the branch.
__device__ static inline void narrow(float &y, float x)  { y = x; }
__device__ static inline void narrow(double &y, double x) { y = x; }
__device__ static inline void narrow(f16_t &y, float x)
{
  uint32_t b = __float_as_uint(x);
  if ((b & 0x7FFFFFFFu) > 0x7F800000u)
    y.bits = (uint16_t)((b >> 16 & 0x8000u) | 0x7E00u | (b >> 13 & 0x3FFu));
  else y.bits = __half_as_ushort(__float2half_rn(x));
}
__device__ static inline void narrow(bf16_t &y, float x) { y.bits = bf16_from_f32(x); }
#endif
