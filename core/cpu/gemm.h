// Matrix products inside the CPU device. gemm.c turns each operation into gemm_calls and chooses a
// path: packed or pairs (both in gemm_packed.c), or oneDNN (gemm_onednn.c). Included by gemm*.c,
// gemm_pairs.h and cpu.c.
//
//   packed  any mix of f32, f16 and bf16. Operands become f32 while they are packed. Every element
//           of the result is a chain of f32 multiply-adds over k in rising order, fused except in
//           the plain build, and rounded once into its dtype. If k exceeds 384, it is cut into
//           nearly equal pieces of at most 384 steps, which are summed separately and then added.
//           The bits of an element depend only on k, its row of A and its column of B. They do not
//           depend on m, n, the batch, strides, alignment or the number of threads.
//   pairs   a variant of `packed` for bf16 times bf16 with k of 128 or more, on processors that
//           multiply pairs of bf16 at full speed (gemm_pairs.h). It adds two steps of k at a time,
//           the later step first, and takes subnormals as zero, as AMX does. Otherwise it is like
//           `packed`.
//   oneDNN  bf16 on processors with AMX, where it is several times faster than anything in f32.
//           Its order of summation may depend on shapes and thread count. AMX's instruction
//           TDPBF16PS, like VDPBF16PS, takes subnormal inputs as zero and flushes subnormal sums.
#pragma once

#include "device/backend.h"

enum { GEMM_BATCH_DIMS = 4 };   // ENG_MAX_DIMS minus the two dimensions of a matrix

/// A matrix, or a batch of them. Element (i, j) of batch (z0, z1, ..) has this index in `data`:
///   i*row + j*column + z0*batch[0] + z1*batch[1] + ..
typedef struct gemm_operand {
  const void *data;
  int32_t     dtype;                    // f32, f16 or bf16
  int64_t     row, column;              // strides in elements, of any value
  int64_t     batch[GEMM_BATCH_DIMS];   // strides of the batch; 0 in a dimension that is broadcast
} gemm_operand;

/// What is done with a finished element x of A B + bias before it is stored. `side` is a matrix
/// with the dtype and layout of C.
typedef enum gemm_after {
  GEMM_AS_IT_IS,
  GEMM_GELU,        // C = x; side = gelu_tanh(C), computed from the rounded C
  GEMM_GELU_GRAD,   // C = gelu_tanh'(side) * x, rounded once
} gemm_after;

/// The product C = A B + bias or, with `add`, C = A B + bias + C, for every matrix of the batch. A
/// is [m x k], B [k x n], C [m x n] with contiguous rows. Sums are f32 and are rounded once into C.
/// Without `add`, C is not read, so a NaN in it does not matter. With k = 0, A B is zero.
typedef struct gemm_call {
  int64_t      m, n, k;
  gemm_operand a, b;
  void        *c;
  int32_t      c_dtype;
  int64_t      c_row;                   // elements between rows of C
  int64_t      c_batch[GEMM_BATCH_DIMS];
  int32_t      batch_dims;              // 0 for a single product
  int64_t      batch[GEMM_BATCH_DIMS];  // sizes, outermost first
  const void  *bias;                    // [n] contiguous, or NULL
  int32_t      bias_dtype;
  bool         add;
  gemm_after   after;                   // GELU requires batch_dims = 0 and no `add`
  void        *side;
} gemm_call;

/// These functions compute a product by the packed path, each for one instruction set. They must be
/// called from the main thread, because they take scratch memory and start threads. Errors: MEMORY.
eng_status gemm_packed_plain(const gemm_call *call);
eng_status gemm_packed_avx2(const gemm_call *call);
eng_status gemm_packed_avx512(const gemm_call *call);

/// Returns whether this processor multiplies pairs of bf16 (VDPBF16PS) at the rate of f32
/// multiply-adds. AMD processors do from Zen 4 on. Intel processors run the instruction at half the
/// rate, but have AMX. On processors with the instruction, ENGINE_PAIRS=on|off in the environment
/// overrides the answer.
bool gemm_pairs_here(void);

/// gemm_onednn_here returns whether oneDNN uses AMX on this processor. gemm_onednn_prefers returns
/// whether oneDNN is the faster path for this product on this machine.
bool gemm_onednn_here(void);
bool gemm_onednn_prefers(const gemm_call *call);
/// Computes the product through oneDNN. If oneDNN cannot compute it, sets *done to false and writes
/// nothing to C. Must be called from the main thread. Errors: MEMORY, LIBRARY.
eng_status gemm_onednn(bool *done, const gemm_call *call);

/// Offsets, in elements, of matrix z (from 0) of the batch in A, B and C.
typedef struct gemm_offset { int64_t a, b, c; } gemm_offset;
static inline gemm_offset gemm_offset_of(const gemm_call *g, int64_t z)
{
  gemm_offset at = {0, 0, 0};
  for (int d = g->batch_dims - 1; d >= 0; d--) {
    int64_t i = z % g->batch[d];
    z /= g->batch[d];
    at.a += i * g->a.batch[d];
    at.b += i * g->b.batch[d];
    at.c += i * g->c_batch[d];
  }
  return at;
}
