// Tiles of 16-bit numbers in shared memory for attention on tensor cores: layout, loading and
// products. A tile has D numbers per row. The order of a row's 16-byte pieces depends on the row,
// so that the eight rows that ldmatrix reads at a time, and the rows that a warp stores, are in
// different banks. Included by attention_forward.cu, attention_backward.cu and attention_hopper.h.
#pragma once

#include "attention.h"
#include "kernel/vector.h"

enum { QUERIES = 64 };   // queries at a time, in kernels whose blocks own keys

/// The assignment of heads and tiles of rows to blocks. Heads are processed in sets of `together`.
/// The rows over which the blocks of a set iterate (k and v, if blocks own queries) fit in 24 MiB,
/// half of Hopper's L2 cache. (A set has at least the heads of one key head, even if their rows do
/// not fit.) Within a set, blocks take the first tile of every head, then the second tile of every
/// head, and so on.
typedef struct schedule { int32_t tiles, heads, together; } schedule;

/// What the kernels of the backward pass share. shift [B x H x line] is RAISE - lse * log2(e), so
/// that 2^(score * log2(e) + shift) is a probability times 2^RAISE. For rows that see no key or do
/// not exist, shift is -inf, which makes the probability 0. largest [B x G] holds the bits of the
/// largest finite |dy| of the heads that share a key head (NULL for bf16).
typedef struct backward_room {
  float    *shift;
  uint32_t *largest;
  int64_t   line;      // T rounded up to a multiple of QUERIES
  schedule  keys, queries;   // for blocks that own keys (B x G heads); queries (B x H heads)
} backward_room;

/// Computes dk, dv and dq on Hopper for D = 64 and D = 128. delta, shift and largest must be ready.
eng_status attention_hopper_backward(const attention_problem *p, backward_room *r, int dtype,
                                     int stored);

enum { WARPS = 4, THREADS = 32 * WARPS };

constexpr double LOG2_E = 1.44269504088896340736;   // 1 / ln 2
constexpr float LN_2 = 0.693147180559945309f;

/// Whether attention_hopper*.cu computes width D on this architecture. If so, the kernels of
/// attention_forward.cu and attention_backward.cu that compute y, dk, dv and dq are empty.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <int D> constexpr bool NOT_HERE = D % 64 == 0;
#else
template <int D> constexpr bool NOT_HERE = false;
#endif

/// Probabilities are multiplied by 2^RAISE: in f16 by 2^15, because f16 numbers below 2^-14 are
/// subnormal, and in bf16 by 1. Probabilities are at most 1, so the products are in f16's range.
template <class T> constexpr int RAISE = 0;
template <> constexpr int RAISE<f16_t> = 15;

/// Returns the factor that multiplies the dscores of a key head: in f16, a power of two computed
/// from the largest finite |dy|; in bf16, 1. `pair` is the index of the key head in r.largest.
template <class T> __device__ static inline float lift_of(const backward_room &r, int64_t pair)
{
  if (RAISE<T> == 0) return 1.0f;
  // The exponent field is 0 only if the largest |dy| is 0, because f16 values are normal in f32.
  // The field is at most 127 + 15, so the factor is at least 2^-11.
  uint32_t exponent = r.largest[pair] >> 23;
  return exponent ? __uint_as_float((254 + 4 - exponent) << 23) : 1.0f;
}

/// Returns f(T{}, d), where T is the type of `dtype`, f16 or bf16, and d is the one of WIDTHS that
/// equals `width`.
template <int... WIDTHS, class F>
static eng_status with_heads(int dtype, int width, const F &f)
{
  return with_size<WIDTHS...>(
    width, [&](auto d) { return dtype == ENG_f16 ? f(f16_t{}, d) : f(bf16_t{}, d); });
}

/// Computes the schedule for `heads` heads of `tiles` tiles. All blocks of `shared` neighbouring
/// heads read the same head_bytes bytes. Errors: SHAPE.
static inline eng_status schedule_heads(schedule *plan, int64_t heads, int shared, int64_t tiles,
                                        int64_t head_bytes)
{
  int64_t together = (24 << 20) / (head_bytes + 1) * shared;
  ENG_TRY(check_blocks(tiles * heads, "attention"));
  *plan = {(int32_t)tiles, (int32_t)heads,
           (int32_t)(together < shared ? shared : together > heads ? heads : together)};
  return ENG_OK;
}

/// Computes the schedule for blocks of `rows` queries. All query heads of a key head read the same
/// keys and values. Errors: SHAPE.
static inline eng_status schedule_of(schedule *plan, const attention_problem *p, int rows,
                                     int width)
{
  return schedule_heads(plan, (int64_t)p->batch * p->heads, p->shared,
                        parts(p->queries, rows), 4 * (int64_t)p->keys * width);
}

/// Computes two schedules: r->keys for blocks of key_rows keys, and r->queries for blocks of
/// query_rows queries. All key blocks of a key head read the same queries and dy. Errors: SHAPE.
static inline eng_status schedule_backward(backward_room *r, const attention_problem *p,
                                           int key_rows, int query_rows, int width)
{
  ENG_TRY(schedule_heads(&r->keys, (int64_t)p->batch * p->groups, 1,
                         parts(p->keys, key_rows), 4 * (int64_t)p->queries * p->shared * width));
  return schedule_of(&r->queries, p, query_rows, width);
}

/// The head (counted over all batches) and the tile of a block.
struct scheduled { int head, tile; };
__device__ static inline scheduled scheduled_at(const schedule &plan, int block)
{
  const unsigned each = plan.tiles * plan.together, first = block / each * plan.together,
                 width = min(plan.together, plan.heads - (int)first), rest = block % each;
  return {(int)(first + rest % width), (int)(rest / width)};
}

/// Returns the position, in pieces of 16 bytes, at which a tile stores piece `piece` of row `row`
/// within this row.
template <int D>
__host__ __device__ static inline int piece_place(int row, int piece)
{ return D % 64 == 0 ? piece ^ (row & 7) : piece ^ (row >> 1 & 3); }

/// Starts copies (copy16) of rows [first, first + ROWS) of a head to `tile`; rows from `limit` on
/// become zeros.
template <int D, int ROWS, class T>
__device__ static inline void load_tile(uint32_t tile, const T *head, int64_t stride, int first,
                                        int limit, int thread = threadIdx.x)
{
  constexpr int PIECES = D / 8, STEP = THREADS / PIECES;
  // A thread loads the same piece (16 bytes) of every STEP-th row. The swizzle puts it at the same
  // offset in all of these rows.
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

/// The base of a lane's ldmatrix addresses in a tile. piece_place depends only on the lowest bits
/// of the row. So moving down by 16 rows adds a constant to an address, and moving right by two
/// pieces flips bits of the piece's offset. If D is a power of two, every row begins at a multiple
/// of 2 D bytes. Then the bits can be flipped in the address itself, so one register is enough for
/// all steps.
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
/// Returns this lane's addresses for loading A [16 x 16] from a tile. at(rows, pieces) is the
/// address for the A that begins at row `rows` and column 8 * `pieces`.
template <int D>
__device__ static inline lane_place<D> place_a(uint32_t tile)
{
  int l = threadIdx.x & 31;
  return {tile, l & 15, l >> 4};
}
/// Returns this lane's addresses for loading two B [16 x 8] from 16 rows and 16 columns of a tile.
/// Each row becomes a column of B. Registers 0 and 1 get the B of the first 8 rows, registers 2 and
/// 3 the B of the next 8 rows.
template <int D>
__device__ static inline lane_place<D> place_b(uint32_t tile)
{
  int l = threadIdx.x & 31;
  return {tile, (l & 7) + (l >> 4) * 8, l >> 3 & 1};
}
/// Returns this lane's addresses for loading two B [16 x 8] from 16 rows and 16 columns of a tile
/// with load_matrices_turned. Each row becomes a row of B. Registers 0 and 1 get the B of the first
/// 8 columns, registers 2 and 3 the B of the next 8 columns.
template <int D>
__device__ static inline lane_place<D> place_turned(uint32_t tile)
{
  int l = threadIdx.x & 31;
  return {tile, l & 15, l >> 4};
}

/// Adds `a` [16 MT x D], multiplied by the transpose of `rows` [16 N x D], to c [16 MT x 16 N].
/// Both factors are tiles in shared memory. c[m][n] is a block of 16 x 8.
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

/// Does the same as the product_of_rows above, but `a` is in registers.
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

/// Adds weights [16 MT x 16 N] times rows [16 N x D] of a tile to c [16 MT x D]. The weights have
/// the register layout of a product's result and are rounded to T.
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

/// Rounds a warp's rows c [16 MT x D] to T, and stores columns [0, stored) of row r of c in row
/// first + r of `head`. Rows of `head` from `limit` on are not written. Uses `tile`, shared memory
/// that no other warp uses, as a buffer. Returns a bit for each row of c (bit m * 16 + row) that
/// contains Inf or NaN before rounding.
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
      float sum = 0;   // sum of x * 0, which stays 0 while all x are finite
#pragma unroll
      for (int d = 0; d < D / 8; d++) {
        float x = c[m][d][2 * half], y = c[m][d][2 * half + 1];
        sum = fmaf(y, 0.0f, fmaf(x, 0.0f, sum));
        *(uint32_t *)(tile + row * (D * 2) + piece_place<D>(row, d) * 16 + t * 4) =
          rounded_pair(T(), x, y);
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

/// Stores lse, if wanted, and with ENTROPY the entropy of query `row`. top: its largest score.
/// total: the sum of e, the exponentials times 2^RAISE. weighted: the sum of e * log2(e / 2^RAISE).
/// blind: the query sees no key.
template <class T, bool ENTROPY>
__device__ static inline void store_statistics(const attention_problem &p, int b, int h, int row,
                                               bool blind, float top, float total,
                                               float weighted)
{
  const int64_t line = line_of(p, b, h, row);
  const bool lost = total == 0;   // every score is -inf
  const float log_sum = logf(total) - RAISE<T> * LN_2;
  if (p.lse)
    ((float *)p.lse)[line] = blind ? -INFINITY :
                             lost  ? NAN :
                                     fmaf(top, (float)p.factor, log_sum);
  if (ENTROPY)
    ((float *)p.entropy)[line] = blind ? 0.0f : lost ? NAN : log_sum - LN_2 * (weighted / total);
}
