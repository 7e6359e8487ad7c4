// Descriptions of matrix products on the CUDA device: first by strides, like tensors, then in
// cuBLASLt's form, column-major with leading dimensions. Host logic without CUDA, so
// spec/cuda/gemm_host.c tests it on any machine. Called by gemm.c and gemm_fused.c; the other files
// of this folder (except bias_grad.cu) and images/conv.c use its types.
#pragma once

#include "device/backend.h"

enum { GEMM_BATCH_DIMS = ENG_MAX_DIMS - 2 };

/// A matrix, or a batch of them. Element (i, j) of batch (z0, z1, ..) is at offset
/// i*row + j*column + z0*batch[0] + z1*batch[1] + .. from data, in elements.
typedef struct gemm_matrix {
  void   *data;
  int32_t dtype;
  int64_t row, column;              // strides in elements, of any size
  int64_t batch[GEMM_BATCH_DIMS];   // 0 where broadcast
} gemm_matrix;

/// An operation that a cuBLASLt kernel can compute in addition to a product. It reads or writes
/// gemm_product.side, which is contiguous. Only gemm_fused.c requests such operations.
typedef enum gemm_after {
  GEMM_AS_IT_IS,
  // side [m x n] = A B + bias in C's dtype; C = gelu_tanh(A B + bias), from the unrounded sum
  GEMM_GELU,
  GEMM_GELU_GRAD,   // C = gelu_tanh'(side) * A B; side [m x n] is in C's dtype
  // side [m] = the sum of each row of A, in C's dtype; C = A B or C += A B as usual
  GEMM_BIAS_GRAD,
} gemm_after;

/// C = A B + bias, or C += A B, for every batch: A [m x k], B [k x n], C [m x n], bias [n] or none.
typedef struct gemm_product {
  int64_t     m, n, k;
  gemm_matrix a, b, c;
  int32_t     batch_dims;               // 0 for a single product
  int64_t     batch[GEMM_BATCH_DIMS];   // sizes, outermost first
  const void *bias;                     // contiguous, or NULL
  int32_t     bias_dtype;
  int32_t     accumulate;               // 1: C += A B
  int32_t     after;                    // gemm_after
  void       *side;
} gemm_product;

gemm_product gemm_of_matmul(const op_call *call);
gemm_product gemm_of_linear(const op_call *call);

/// Removes batch dimensions without changing the product. Dimensions of size 1 are dropped.
/// Adjacent dimensions are merged if every matrix can traverse both with one stride. Where B is
/// broadcast and the strides allow it, dimensions become rows of A and C.
void gemm_simplify(gemm_product *p);

/// Returns a bit mask of the matrices (1: A, 2: B) whose strides prevent two batch dimensions from
/// being merged.
unsigned gemm_batch_breakers(const gemm_product *p);

/// A matrix [rows x columns] as cuBLASLt sees it: transposed if its columns are contiguous.
typedef struct gemm_leading {
  int64_t ld;           // elements between rows (or columns, when transposed)
  bool    transposed;   // columns are contiguous, not rows
} gemm_leading;
/// Describes x for cuBLASLt. Returns false if neither rows nor columns are contiguous, or if they
/// overlap.
bool gemm_leading_of(gemm_leading *leading, const gemm_matrix *x, int64_t rows, int64_t columns);

/// Whether every row, or every column if columns are contiguous, is 16-byte aligned.
bool gemm_rows_aligned(const gemm_matrix *x, int64_t rows, int64_t columns);

/// A problem for cuBLASLt: everything that the choice of an algorithm depends on. It is the key in
/// the table of choices. cuBLASLt computes the column-major product D [m x n] = op(A) op(B). Its D
/// is the transpose of our C, so its A is our B and its m is our n. Strides are in elements. type_*
/// are dtypes; `bias` is a dtype, or -1 for none; align_* are in bytes, up to 16; scaling_* are
/// cuBLASLt's scale modes + 1, or 0 for none; `after` is a gemm_after.
#define GEMM_PROBLEM_FIELDS(F)                                                               \
  F(m)                                                                                       \
  F(n) F(k) F(type_a) F(type_b) F(type_c) F(transpose_a) F(transpose_b) F(lda) F(ldb) F(ldc) \
    F(batch) F(stride_a) F(stride_b) F(stride_c) F(align_a) F(align_b) F(align_c) F(bias)    \
      F(accumulate) F(tf32) F(scaling_a) F(scaling_b) F(fast) F(after)
typedef struct gemm_problem {
#define GEMM_FIELD(name) int64_t name;
  GEMM_PROBLEM_FIELDS(GEMM_FIELD)
#undef GEMM_FIELD
} gemm_problem;

/// Returns the largest power of two, up to 16, that divides the address `data`.
int64_t gemm_alignment(const void *data);

/// Describes the product as a cuBLASLt problem over batch dimension `walked` (-1: a single matrix).
/// The problem is the same for every index of the other dimensions. Returns false, with *problem
/// undefined, if A, B or C cannot be described. C must have contiguous rows.
bool gemm_describe(gemm_problem *problem, const gemm_product *p, int walked);

/// Returns the batch dimension that one launch of cuBLASLt covers (the longest), or -1 without a
/// batch. Callers loop over the other dimensions.
int gemm_walked_dim(const gemm_product *p);

/// Returns the address of the first element of matrix x at index `at` of the batch dimensions.
void *gemm_data_at(const gemm_product *p, const gemm_matrix *x, const int64_t *at);
/// Advances `at` to the next index over all batch dimensions except `walked`. Returns false after
/// the last index.
bool gemm_next(const gemm_product *p, int walked, int64_t *at);
