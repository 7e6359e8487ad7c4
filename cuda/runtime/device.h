// What every file of the CUDA device uses: the compute stream, checked calls, scratch memory,
// faults and number formats. device.cu implements memory, copies and faults; table.c lists all
// functions of the device. host.c defines some functions of the core under the same names
// (error_set, arena_alloc, tensor_text), so kernel files include the core's headers and call these
// functions as the core does. Included by every folder of cuda/.
#pragma once

#include <cuda_runtime.h>
#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif
#include "device/backend.h"
#include "base/error.h"
#include "base/numerics.h"

/// The compute stream: all kernels, copies and products go to it, in order, except some of those
/// that carry messages between ranks.
cudaStream_t cuda_stream(void);
/// The card's number of multiprocessors, and its compute capability times ten: 132 and 90 on an
/// H200.
int cuda_multiprocessors(void);
int cuda_capability(void);

/// Returns ENG_OK, or an error that contains `what` and, except for ENG_ERR_MEMORY, CUDA's own
/// message. Clears CUDA's last error, so that cuda_launched does not report it again.
eng_status cuda_status(cudaError_t result, const char *what);

/// Returns an error if the configuration of a kernel launch since the last call was invalid. An
/// error inside a kernel appears at the next wait.
static inline eng_status cuda_launched(const char *what)
{ return cuda_status(cudaPeekAtLastError(), what); }

/// Whether an environment variable that may be 0 or 1 is 1. Returns `otherwise` if it is unset or
/// has another value. (lua/engine/cli/environment.lua reports other values at start.)
static inline bool is_on(const char *name, bool otherwise)
{
  const char *text = getenv(name);
  return strcmp(text ? text : "", otherwise ? "0" : "1") == 0 ? !otherwise : otherwise;
}

/// Takes and frees memory for a kernel's intermediate results. The host function that launches the
/// kernel must free it before returning. This is safe while the kernel still runs, because later
/// kernels that get the same memory run after it, on the same stream. Pieces are 256-byte aligned
/// on this device.
static inline void *scratch_take(int64_t bytes) { return arena_alloc(ARENA_SCRATCH, bytes); }
static inline void scratch_give(void *piece, int64_t bytes)
{ arena_free(ARENA_SCRATCH, piece, bytes); }

/// The pieces of scratch memory that a call has taken, to be freed together. A call takes at most
/// SCRATCH_PIECES.
enum { SCRATCH_PIECES = 6 };
typedef struct scratch {
  int     n;
  void   *piece[SCRATCH_PIECES];
  int64_t bytes[SCRATCH_PIECES];
} scratch;

/// Takes a piece of scratch memory, which scratch_give_all frees. Returns NULL, with the error set,
/// if there is not enough memory.
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

/// Returns how many parts of `each` elements hold n elements; the last part may be shorter.
static inline int64_t parts(int64_t n, int64_t each) { return (n + each - 1) / each; }

/// Whether an address is a multiple of 16, as the widest loads and stores need.
static inline bool is_aligned(const void *p) { return (uintptr_t)p % 16 == 0; }

/// Returns the number of blocks of threads to launch for work that `blocks` blocks can share: at
/// most `each` per multiprocessor.
static inline unsigned capped_grid(int64_t blocks, int each)
{
  int64_t most = (int64_t)each * cuda_multiprocessors();
  return (unsigned)(blocks < most ? blocks : most);
}

/// The data and the format of a tensor that may be absent; NULL and f32 if it is.
static inline void *data_of(const tensor *x) { return x ? x->data : NULL; }
static inline int dtype_of(const tensor *x) { return x ? x->dtype : ENG_f32; }

/// Returns the number of rows of x [.. x columns]: the product of all sizes but the last.
static inline int64_t rows_of(const tensor *x)
{
  int64_t rows = 1;
  for (int d = 0; d + 1 < x->ndim; d++) rows *= x->shape[d];
  return rows;
}

/// Returns a call of an operation without attributes: y = op(a, b), where b may be NULL.
static inline op_call simple_call(int op, const tensor *a, const tensor *b, const tensor *y)
{
  op_call call = {};
  call.op = op;
  call.n_in = b ? 2 : 1;
  call.n_out = 1;
  call.in[0] = (tensor *)a;
  call.in[1] = (tensor *)b;
  call.out[0] = (tensor *)y;
  return call;
}

/// A fault reported by a kernel: the first index out of range since the last check. The record is
/// in device memory. The host checks it whenever it waits for the device for another reason (to
/// read a value or a step's statistics). The call that waits then fails with ENG_ERR_VALUE.
typedef struct cuda_fault_record {
  // 1 if the other fields are valid. atomicCAS sets it, so that the first fault is kept.
  int32_t raised;
  int32_t op;            // eng_op
  int64_t value, limit;  // the bad index; the smallest index that is too large
} cuda_fault_record;
cuda_fault_record *cuda_fault(void);
/// Clears the fault record and returns the error for the fault in `seen`, a copy of the record in
/// which `raised` is set. Called by functions that copy the record to the host themselves.
eng_status cuda_fault_told(const cuda_fault_record *seen);
/// The number of faults that have been returned as errors. If it has grown since a copy of the
/// record was requested, the fault in this copy may have been returned already.
int64_t cuda_faults_told(void);

#ifdef __cplusplus
}
#endif

#define CUDA_TRY(call)                                                  \
  do {                                                                  \
    cudaError_t cuda_try_ = (call);                                     \
    if (cuda_try_ != cudaSuccess) return cuda_status(cuda_try_, #call); \
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

// Storage types of f16 and bf16. A kernel template over storage types calls widen() after each read
// and narrow() before each write.
struct f16_t  { uint16_t bits; };
struct bf16_t { uint16_t bits; };

/// Converts a number to f32, exactly; f64 stays f64. A signaling NaN in f16 becomes quiet, as in
/// numerics.h.
__device__ static inline float  widen(float x)  { return x; }
__device__ static inline double widen(double x) { return x; }
__device__ static inline float  widen(f16_t x)  { return __half2float(__ushort_as_half(x.bits)); }
__device__ static inline float  widen(bf16_t x) { return __uint_as_float((uint32_t)x.bits << 16); }

// Rounds x once, to nearest even, with the same bits as numerics.h. The hardware's conversions turn
// every NaN into 0x7FFF, so NaN takes a branch of its own that keeps its sign and payload.
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

/// Whether d is f32, f16 or bf16, the formats that the fast kernels compute in f32.
static inline bool is_fast(int d) { return d == ENG_f32 || d == ENG_f16 || d == ENG_bf16; }

/// Returns f(T{}) for the storage type T of a fast format.
template <class F> static auto with_fast_format(int dtype, const F &f)
{ return dtype == ENG_f32 ? f(float{}) : dtype == ENG_f16 ? f(f16_t{}) : f(bf16_t{}); }

/// Returns f(T{}) for the storage type T of a fast format or f64.
template <class F> static auto with_format(int dtype, const F &f)
{ return dtype == ENG_f64 ? f(double{}) : with_fast_format(dtype, f); }
#endif
