// Shared by the attention kernels for Hopper. A warpgroup computes 64 rows; tiles have 64 columns.
#pragma once

#include "attention_tiles.h"
#include "kernel/wgmma.h"

// These kernels are called on sm_90a only; other architectures lack the instructions.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER_BODY 1
#else
#define HOPPER_BODY 0
#endif

#if HOPPER_BODY && defined(__CUDACC__)
/// Loads rows [first, first + N) of a head into tiles of 64 columns; rows from `limit` on become
/// zeros.
template <int D, int N, class T>
__device__ static inline void load_rows(uint32_t tile, const T *head, int64_t stride, int first,
                                        int limit, int thread = threadIdx.x)
{
  // All 16-byte pieces that a thread loads are in one column of pieces, and the swizzle puts them
  // at the same offset in their rows.
  constexpr int PIECES = D / 8, STEP = THREADS / PIECES;
  static_assert(STEP % 8 == 0, "the swizzle depends on the row's lowest bits");
  const int row = thread / PIECES, piece = thread % PIECES, there = limit - first - row;
  const T *column = head + piece * 8;
  int64_t at = (first + row) * stride;
  tile += piece / 8 * (N * 128) + row * 128 + ((piece ^ row) & 7) * 16;
#pragma unroll
  for (int i = 0; i < N / STEP; i++, at += STEP * stride)
    copy16(tile + i * (STEP * 128), column + (i * STEP < there ? at : 0), i * STEP < there);
}

/// Does the same as load_rows with one warp, into tiles of TALL rows.
template <int D, int N, int TALL, class T>
__device__ static inline void load_rows_by_warp(uint32_t tile, const T *head, int64_t stride,
                                                int first, int limit)
{
  // The warp loads four rows of a tile at a time, so the swizzle alternates between two orders.
  const int row = threadIdx.x / 8 % 4, piece = threadIdx.x % 8, there = limit - first - row;
  const T *from = head + (first + row) * stride + piece * 8;
  const uint32_t to[2] = {tile + row * 128 + (piece ^ row) * 16,
                          tile + row * 128 + (piece ^ row ^ 4) * 16};
#pragma unroll 8
  for (int i = 0; i < N / 4; i++, from += 4 * stride)
#pragma unroll
    for (int c = 0; c < D / 64; c++)
      copy16(to[i & 1] + i * 512 + c * (TALL * 128), 4 * i < there ? from + c * 64 : head,
             4 * i < there);
}

/// Starts c [64 x N] = a b^T, with a [64 x D] and b [N x D]. a: the address of 64 rows in tiles of
/// TALL rows. b: the address of tiles of N rows.
template <class T, int D, int N, int TALL>
__device__ static inline void start_rows_times_rows(float (&c)[N / 2], uint32_t a, uint32_t b)
{
#pragma unroll
  for (int i = 0; i < D / 16; i++)
    rows_times_rows(c, tile_descriptor(a, 16, i / 4 * (TALL * 128) + i % 4 * 32),
                    tile_descriptor(b, 16, i / 4 * (N * 128) + i % 4 * 32), i > 0, T());
}

/// Starts c [64 x D] += weights [64 x N] times a matrix [N x D]. `rows` is the address of the tiles
/// that hold the matrix.
template <class T, int D, int N>
__device__ static inline void start_weights_times_rows(float (&c)[D / 2],
                                                       const uint32_t (&weights)[N / 16][4],
                                                       uint32_t rows)
{
#pragma unroll
  for (int i = 0; i < N / 16; i++)
    weights_times_rows(c, weights[i], tile_descriptor(rows, N * 128, i * 2048), T());
}

/// Rounds a product's result to T, in the register layout of the next product's operand.
template <class T, int N>
__device__ static inline void round_weights(uint32_t (&weights)[N / 8][4], const float (&s)[N])
{
#pragma unroll
  for (int i = 0; i < N / 8; i++)
#pragma unroll
    for (int c = 0; c < 4; c++)
      weights[i][c] = rounded_pair(T(), s[8 * i + 2 * c], s[8 * i + 2 * c + 1]);
}

/// Sets to -inf the scores of columns that a row does not see. seen0 and seen1: how many columns,
/// from the start of the tile on, the thread's first and second row see.
template <int N> __device__ static inline void hide_after(float (&s)[N], int seen0, int seen1)
{
  int seen[2] = {seen0 - 2 * ((int)threadIdx.x & 3), seen1 - 2 * ((int)threadIdx.x & 3)};
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      if (8 * i >= seen[half]) s[4 * i + 2 * half] = -INFINITY;
      if (8 * i + 1 >= seen[half]) s[4 * i + 2 * half + 1] = -INFINITY;
    }
}
#endif
