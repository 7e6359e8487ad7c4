// Tiles of 16-bit numbers in shared memory for attention on tensor cores: layout, loading and
// products. A tile has D numbers a row. The order of a row's 16-byte pieces depends on the row, so
// that the eight rows that ldmatrix reads at a time, and the rows that a warp stores, are in
// different banks.
#ifndef ENG_CUDA_ATTENTION_TILES_H
#define ENG_CUDA_ATTENTION_TILES_H

#include "attention.h"

enum { QUERIES = 64 };   // queries at a time, in blocks of keys

/// Shared by the kernels of the backward pass, in addition to the problem. shift [B x H x line]:
/// -lse in powers of 2 plus RAISE, so that a probability is 2^(scaled score + shift); -inf, which
/// makes it 0, for rows that see no key or do not exist. largest [B x G]: |dy| as bits.
typedef struct backward_room {
  float    *shift;
  uint32_t *largest;
  int64_t   line;      // T in whole tiles of QUERIES
} backward_room;

/// dk, dv and dq on Hopper for D 64 and 128; delta and shift are ready.
eng_status attention_hopper_backward(const attention_problem *p, const backward_room *r, int dtype,
                                     int stored);

#ifdef __CUDACC__

enum { WARPS = 4, THREADS = 32 * WARPS };

constexpr float LOG2_E = 1.44269504088896340736f;

/// Hopper has its own kernels for these widths.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <int D> constexpr bool NOT_HERE = D % 64 == 0;
#else
template <int D> constexpr bool NOT_HERE = false;
#endif

/// Probabilities are multiplied by 2^RAISE: in f16 they would otherwise be subnormal below 2^-14.
/// (They are at most 1, so 2^15 is in range.)
template <class T> constexpr int RAISE = 0;
template <> constexpr int RAISE<f16_t> = 15;

/// In f16, dscores are multiplied by this power of two, computed from the largest finite |dy|.
template <class T> __device__ static inline float lift_of(const backward_room &r, int64_t pair)
{
  if (RAISE<T> == 0) return 1.0f;
  // 0 for 0 (no other f16 is that small); at most 127 + 15
  uint32_t exponent = r.largest[pair] >> 23;
  return exponent ? __uint_as_float((254 + 4 - exponent) << 23) : 1.0f;
}

/// Position of piece `piece` of row `row` among the pieces of that row.
template <int D>
__host__ __device__ static inline int piece_place(int row, int piece)
{ return D % 64 == 0 ? piece ^ (row & 7) : piece ^ (row >> 1 & 3); }

/// Loads rows [first, first + ROWS) of a head into `tile`; rows from `limit` on become zeros.
template <int D, int ROWS, class T>
__device__ static inline void load_tile(uint32_t tile, const T *head, int64_t stride, int first,
                                        int limit, int thread = threadIdx.x)
{
  constexpr int PIECES = D / 8, STEP = THREADS / PIECES;
  // a thread's pieces are in one column of pieces, all at the swizzled offset of the first
  if constexpr (THREADS % PIECES == 0) {
    const int row = thread / PIECES, piece = thread % PIECES, there = limit - first - row;
    const T *column = head + piece * 8;
    int64_t at = (first + row) * stride;
    tile += row * (D * 2) + piece_place<D>(row, piece) * 16;
#pragma unroll
    for (int i = 0; i < ROWS / STEP; i++, at += STEP * stride)
      copy16(tile + i * (STEP * D * 2), column + (i * STEP < there ? at : 0), i * STEP < there);
  } else {
#pragma unroll
    for (int i = 0; i < ROWS * PIECES / THREADS; i++) {
      int at = i * THREADS + thread, row = at / PIECES, piece = at % PIECES;
      bool there = first + row < limit;
      const T *from = head + (there ? (first + row) * stride : 0) + piece * 8;
      copy16(tile + row * (D * 2) + piece_place<D>(row, piece) * 16, from, there);
    }
  }
}

/// Start of a lane's ldmatrix addresses in a tile. `row` and `piece` are the lane's; only their
/// lowest bits affect the order of pieces. So a step of 16 rows is an addition, and a step of two
/// pieces an exclusive or. If tiles and rows begin at multiples of a power of two, that xor applies
/// to the whole address, and one register serves all steps.
template <int D> struct lane_place {
  static constexpr bool WHOLE = (D & (D - 1)) == 0;
  uint32_t row, turn;
  __device__ lane_place(uint32_t tile, int row_, int piece)
      : row(tile + row_ * (D * 2)), turn(piece_place<D>(row_, piece) * 16)
  {
    if (WHOLE) row += turn;
  }
  __device__ uint32_t at(int rows, int pieces) const
  { return rows * (D * 2) + (WHOLE ? row ^ (pieces * 16) : row + (turn ^ (pieces * 16))); }
};
/// Loads rows of a tile as A [16 x 16]: rows from `rows`, columns from 8 * `pieces`.
template <int D>
__device__ static inline lane_place<D> place_a(uint32_t tile)
{
  int l = threadIdx.x & 31;
  return {tile, l & 15, l >> 4};
}
/// Loads rows of a tile as columns of B, two of them [16 x 8] in registers 0, 1 and 2, 3: 16 rows
/// of the tile, 16 columns.
template <int D>
__device__ static inline lane_place<D> place_b(uint32_t tile)
{
  int l = threadIdx.x & 31;
  return {tile, (l & 7) + (l >> 4) * 8, l >> 3 & 1};
}
/// Loads rows of a tile as rows of B (load_matrices_turned), two of them in registers 0, 1 and 2,
/// 3: 16 rows of the tile, 16 columns.
template <int D>
__device__ static inline lane_place<D> place_turned(uint32_t tile)
{
  int l = threadIdx.x & 31;
  return {tile, l & 15, l >> 4};
}

/// c [16 MT x 16 N] += a [16 MT x D] times rows [16 N x D] transposed, both tiles in shared memory.
/// c[m][n]: 16 x 8 each.
template <class T, int D, int MT, int N>
__device__ static inline void product_of_rows(float (&c)[MT][2 * N][4], const lane_place<D> &a,
                                              const lane_place<D> &rows)
{
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    uint32_t left[MT][4], right[4];
#pragma unroll
    for (int m = 0; m < MT; m++) load_matrices(left[m], a.at(16 * m, 2 * k));
#pragma unroll
    for (int n = 0; n < N; n++) {
      load_matrices(right, rows.at(16 * n, 2 * k));
#pragma unroll
      for (int m = 0; m < MT; m++) {
        multiply_add(c[m][2 * n], left[m], right[0], right[1], T());
        multiply_add(c[m][2 * n + 1], left[m], right[2], right[3], T());
      }
    }
  }
}

/// The same with `a` in registers.
template <class T, int D, int MT, int N>
__device__ static inline void product_of_rows(float (&c)[MT][2 * N][4],
                                              const uint32_t (&a)[MT][D / 16][4],
                                              const lane_place<D> &rows)
{
#pragma unroll
  for (int k = 0; k < D / 16; k++)
#pragma unroll
    for (int n = 0; n < N; n++) {
      uint32_t right[4];
      load_matrices(right, rows.at(16 * n, 2 * k));
#pragma unroll
      for (int m = 0; m < MT; m++) {
        multiply_add(c[m][2 * n], a[m][k], right[0], right[1], T());
        multiply_add(c[m][2 * n + 1], a[m][k], right[2], right[3], T());
      }
    }
}

/// c [16 MT x D] += weights [16 MT x 16 N] times rows [16 N x D] of a tile. The weights have the
/// register layout of a product's result and are rounded to T.
template <class T, int D, int MT, int N>
__device__ static inline void product_with_rows(float (&c)[MT][D / 8][4],
                                                const uint32_t (&weights)[MT][2 * N][2],
                                                const lane_place<D> &rows)
{
#pragma unroll
  for (int n = 0; n < N; n++) {
    uint32_t left[MT][4];
#pragma unroll
    for (int m = 0; m < MT; m++) {
      left[m][0] = weights[m][2 * n][0];
      left[m][1] = weights[m][2 * n][1];
      left[m][2] = weights[m][2 * n + 1][0];
      left[m][3] = weights[m][2 * n + 1][1];
    }
#pragma unroll
    for (int d = 0; d < D / 16; d++) {
      uint32_t right[4];
      load_matrices_turned(right, rows.at(16 * n, 2 * d));
#pragma unroll
      for (int m = 0; m < MT; m++) {
        multiply_add(c[m][2 * d], left[m], right[0], right[1], T());
        multiply_add(c[m][2 * d + 1], left[m], right[2], right[3], T());
      }
    }
  }
}

template <int MT, int N> __device__ static inline void clear(float (&c)[MT][N][4])
{
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < N; n++) c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0;
}

/// Rounds a warp's rows [16 MT x D] to T and stores columns [0, stored) of rows [first, limit) of
/// `head`, through `tile`, shared memory that no other warp uses. Returns a bit for each row (m *
/// 16 + row) that contains Inf or NaN before rounding.
template <class T, int D, int MT>
__device__ static inline uint32_t store_rows(const float (&c)[MT][D / 8][4], unsigned char *tile,
                                             T *head, int64_t stride, int first, int limit,
                                             int stored)
{
  int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  uint32_t bad = 0;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int row = 16 * m + 8 * half + g;
      float sum = 0;   // of x * 0: stays 0 while all are finite
#pragma unroll
      for (int d = 0; d < D / 8; d++) {
        float x = c[m][d][2 * half], y = c[m][d][2 * half + 1];
        sum = fmaf(y, 0.0f, fmaf(x, 0.0f, sum));
        *(uint32_t *)(tile + row * (D * 2) + piece_place<D>(row, d) * 16 + t * 4) = pack(x, y, T());
      }
      if (!f32_is_finite(sum)) bad |= 1u << row;
    }
  for (int k = 1; k < 32; k <<= 1) bad |= __shfl_xor_sync(0xFFFFFFFFu, bad, k);
  __syncwarp();
  bool whole = stored % 8 == 0 && stride % 8 == 0 && ((uintptr_t)head & 15) == 0;
  for (int at = lane; at < 16 * MT * (D / 8); at += 32) {
    int row = at / (D / 8), piece = at % (D / 8), n = min(stored - 8 * piece, 8);
    if (first + row >= limit || n <= 0) continue;
    const uint4 *from = (const uint4 *)(tile + row * (D * 2) + piece_place<D>(row, piece) * 16);
    T *to = head + (first + row) * stride + piece * 8;
    if (whole) *(uint4 *)to = *from;
    else
      for (int i = 0; i < n; i++) to[i] = ((const T *)from)[i];
  }
  return bad;
}
#endif
#endif
