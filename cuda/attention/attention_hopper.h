// Shared by the attention kernels for Hopper. A warpgroup computes 64 rows; tiles have 64 columns.
// Included by attention_hopper*.cu.
#pragma once

#include "attention_tiles.h"
#include "kernel/wgmma.h"

// These kernels are called on sm_90a only; other architectures lack the instructions.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER_BODY 1
#else
#define HOPPER_BODY 0
#endif

/// Fills *map for copies of `rows` rows and 64 columns of a view [batch x time x heads x width],
/// in the layout of wgmma.h. Leaves the map of an empty view as it is. Errors: DEVICE.
eng_status map_rows(CUtensorMap *map, const attention_view &view, int batch, int time, int heads,
                    int width, int rows);

#if HOPPER_BODY
/// The barriers of a block's N buffers, in 16 N bytes of shared memory. A phase of barrier full(i)
/// ends when copies have filled buffer i. A phase of barrier empty(i) ends when all warps have read
/// buffer i. The uses of a buffer are numbered from 0; use n is phase n of both barriers. GIVERS:
/// how many lanes of a warp arrive in give(): 1 if only products of the warp read buffers, because
/// a wait for products includes all lanes; 32 if the lanes also read buffers themselves.
template <int N, int GIVERS = 1> struct buffer_barriers {
  uint32_t start;   // address
  __device__ uint32_t full(int i) const { return start + 16 * i; }
  __device__ uint32_t empty(int i) const { return full(i) + 8; }
  /// Called once by all threads of the block.
  __device__ void open(int warps) const
  {
    if (threadIdx.x == 0) {
      for (int i = 0; i < N; i++) {
        barrier_init(full(i), 1);
        barrier_init(empty(i), warps * GIVERS);
      }
      publish_shared();
    }
    __syncthreads();
  }
  /// Waits until buffer i is empty, and sets how many bytes the copies for this use will write.
  /// Called by the thread that then starts the copies.
  __device__ void claim(int i, int use, uint32_t bytes) const
  {
    barrier_wait(empty(i), ~use & 1);
    barrier_expect(full(i), bytes);
  }
  /// take() waits until buffer i is full. A warp calls give() when it has read the buffer.
  __device__ void take(int i, int use) const { barrier_wait(full(i), use & 1); }
  __device__ void give(int i) const { barrier_arrive(empty(i), threadIdx.x % 32 < GIVERS); }
};

/// Starts copies of rows [first, first + N) of a head to D / 64 tiles, the first at address `tile`.
/// Rows that do not exist become zeros.
template <int D, int N>
__device__ static inline void copy_rows(uint32_t tile, const CUtensorMap &map, int first, int head,
                                        int batch, uint32_t barrier)
{
#pragma unroll
  for (int c = 0; c < D / 64; c++)
    copy_box(tile + c * (N * 128), &map, c * 64, first, head, batch, barrier);
}

/// Starts c [64 x N] = a b^T, with a [64 x D] and b [N x D]. a: the address of tiles of 64 rows.
/// b: the address of tiles of N rows.
template <class T, int D, int N>
__device__ static inline void start_rows_times_rows(float (&c)[N / 2], uint32_t a, uint32_t b)
{
#pragma unroll
  for (int i = 0; i < D / 16; i++)
    rows_times_rows(c, tile_descriptor(a, 16, i / 4 * (64 * 128) + i % 4 * 32),
                    tile_descriptor(b, 16, i / 4 * (N * 128) + i % 4 * 32), i > 0, T());
}

/// Starts c [64 x D] += weights [64 x N] times a matrix [N x D]. `rows` is the address of the tiles
/// that hold the matrix. With PARTS > 1, multiplies only one part of the N columns and rows.
template <class T, int D, int N, int PARTS = 1>
__device__ static inline void start_weights_times_rows(float (&c)[D / 2],
                                                       const uint32_t (&weights)[N / 16][4],
                                                       uint32_t rows, int part = 0)
{
  constexpr int EACH = N / 16 / PARTS;
#pragma unroll
  for (int i = part * EACH; i < (part + 1) * EACH; i++)
    weights_times_rows(c, weights[i], tile_descriptor(rows, N * 128, i * 2048), T());
}

/// Rounds a product's result to T, in the register layout of the next product's operand. With
/// PARTS > 1, rounds only one part of the columns.
template <class T, int PARTS = 1, int N>
__device__ static inline void round_weights(uint32_t (&weights)[N / 8][4], const float (&s)[N],
                                            int part = 0)
{
  constexpr int EACH = N / 8 / PARTS;
#pragma unroll
  for (int i = part * EACH; i < (part + 1) * EACH; i++)
#pragma unroll
    for (int c = 0; c < 4; c++)
      weights[i][c] = rounded_pair(T(), s[8 * i + 2 * c], s[8 * i + 2 * c + 1]);
}

/// Sets to -inf the scores of columns that a row does not see. The thread's first row sees the
/// first seen0 columns of the tile, its second row the first seen1.
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
