// Shared by the kernels of norms: norm.cu, whose kernels keep rows in registers, and norm_plain.cu,
// whose kernels serve any format and length. Included by both.
#pragma once

#include "runtime/device.h"

/// A call as kernels see it: contiguous rows of n columns; the data pointer of an absent tensor is
/// NULL.
typedef struct norm_call {
  const void *x, *branch, *weight, *bias, *means, *rstds, *dy, *dsum;
  void *y, *sum, *out_means, *out_rstds, *dx;
  int32_t x_dtype, weight_dtype, bias_dtype, means_dtype, rstds_dtype, dy_dtype, y_dtype,
    out_means_dtype, out_rstds_dtype, dx_dtype;
  int64_t rows;
  int32_t n;
  bool centred;    // layer norm
  // n is a multiple of 8, and all tensors except statistics and column sums are 16-byte aligned
  bool whole;
  double eps;
  // [blocks x 2 x n] f32: sums of dy * h (h: normalized x) and of dy; NULL if not wanted
  float *partial;
} norm_call;

/// Launches the plain forward kernel; *p has at least one row.
void norm_plain(const norm_call *p);
/// Computes the gradients with plain kernels. dweight and dbias are NULL if they are not wanted.
eng_status norm_grad_plain(const norm_call *p, const tensor *dweight, const tensor *dbias);

/// Returns the sum over the threads of a row to every thread. `room` is shared memory with one
/// number per warp, for rows that take a block. A sum has only one barrier, so between two calls
/// with the same `room` there must be a call with another room.
template <int ROW, class A> __device__ static inline A row_sum(A x, A *room)
{
#pragma unroll
  for (int k = 16; k; k >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, k);
  if (ROW == 32) return x;
  if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = x;
  __syncthreads();
  x = 0;
#pragma unroll
  for (int w = 0; w < ROW / 32; w++) x += room[w];
  return x;
}
