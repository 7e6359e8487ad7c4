// Attention in plain arithmetic: f32 and f64 of any width, and all other calls that the tensor
// cores do not support. See attention.h. For f32 up to 256 wide, a warp owns a few rows (queries or
// keys) and iterates over the opposite rows (keys or queries) 32 at a time, in tiles that the block
// loads into shared memory. To compute scores, each lane takes one row of the tile; to sum rows,
// each lane takes columns. Rows with Inf or NaN in their results are recomputed, as in the
// tensor-core kernels. For all other formats and widths a warp computes one row: y or dq of a
// query, or dk and dv of a key. Called by attention.cu.
#include "attention.h"

enum { ROW_WARPS = 4 };   // warps of a block

/// Returns the index of the row that this warp computes, or -1 if no row is left for it.
__device__ static inline int64_t own_row(int64_t rows)
{
  int64_t row = (int64_t)blockIdx.x * ROW_WARPS + (threadIdx.x >> 5);
  return row < rows ? row : -1;
}

/// What a call of plain_rows computes. Each warp computes one row of it.
enum { ROWS_OF_Y, ROWS_OF_DQ, ROWS_OF_DK_DV };
template <class A, int WHAT>
__global__ void __launch_bounds__(32 * ROW_WARPS)
  plain_rows(const __grid_constant__ attention_problem p, int64_t rows)
{
  constexpr bool of_keys = WHAT == ROWS_OF_DK_DV;
  const int64_t row = own_row(rows);
  if (row < 0) return;
  const int64_t each = of_keys ? p.keys : p.queries, heads = of_keys ? p.groups : p.heads;
  const int b = (int)(row / each / heads), h = (int)(row / each % heads), t = (int)(row % each);
  if constexpr (WHAT == ROWS_OF_Y) forward_row<A, A>(p, b, h, t, p.width);
  else if constexpr (WHAT == ROWS_OF_DQ) dq_row<A, A>(p, b, h, t, p.width);
  else dkdv_row<A, A>(p, b, h, t, p.width);
}

template <class A>
__global__ void __launch_bounds__(32 * ROW_WARPS)
  plain_delta(const __grid_constant__ attention_problem p, int64_t rows)
{
  int64_t row = own_row(rows), pair = row / p.queries;
  if (row < 0) return;
  int b = (int)(pair / p.heads), h = (int)(pair % p.heads), t = (int)(row % p.queries),
      lane = threadIdx.x & 31;
  A sum = (A)NAN;
  if (p.y.data) {   // delta equals y . dy, unless y . dy is Inf or NaN
    sum = 0;
    for (int d = lane; d < p.width; d += 32)
      sum = fused(row_of<A>(p.y, b, t, h)[d], row_of<A>(p.dy, b, t, h)[d], sum);
    sum = warp_sum(sum);
    if (keys_seen(p, t) == 0) sum = 0;
  }
  if (!(sum - sum == 0)) sum = delta_of_row<A, A>(p, b, h, t);
  if ((threadIdx.x & 31) == 0) ((A *)p.delta)[row] = sum;
}

// ---- f32 by tiles. C is the number of columns that a lane sums; the width is at most 32 C.

template <int C> constexpr int TILE_WARPS = C == 8 ? 4 : 8;
template <int C> constexpr int FORWARD_ROWS = C == 8 ? 4 : 8;                      // rows of a warp
template <int C> constexpr int BACKWARD_ROWS = C == 8 ? 2 : C == 4 ? 4 : 8;
template <int C>
constexpr int FORWARD_FLOATS =
  32 * (2 * 32 * C + 1) + TILE_WARPS<C> * FORWARD_ROWS<C> * (32 * C + 32);
template <int C>
constexpr int BACKWARD_FLOATS =
  2 * 32 * (32 * C + 1) + 3 + TILE_WARPS<C> * BACKWARD_ROWS<C> * (2 * 32 * C + 2 * 32);

/// Loads N rows of a head, from `first` on, into `to`, where rows are `line` floats apart. Rows
/// from `limit` on and columns from `width` on become zeros.
template <int C, int N>
__device__ static inline void load_floats(float *to, int line, const float *head, int64_t stride,
                                          int first, int limit, int width)
{
  for (int at = threadIdx.x; at < N * 32 * C; at += 32 * TILE_WARPS<C>) {
    int row = at / (32 * C), d = at % (32 * C);
    to[row * line + d] = first + row < limit && d < width ? head[(first + row) * stride + d] : 0.0f;
  }
}

/// Sets sums[r], for each r, to the dot product of row r of `rows` [R x 32 C] and the lane's row of
/// a tile. `tile` is the address of the lane's row.
template <int C, int R>
__device__ static inline void dots(float (&sums)[R], const float *rows, const float *tile)
{
#pragma unroll
  for (int r = 0; r < R; r++) sums[r] = 0;
  for (int d = 0; d < 32 * C; d += 4) {
    float x[4] = {tile[d], tile[d + 1], tile[d + 2], tile[d + 3]};
#pragma unroll
    for (int r = 0; r < R; r++) {
      float4 a = *(const float4 *)(rows + r * 32 * C + d);
      sums[r] = fmaf(a.w, x[3], fmaf(a.z, x[2], fmaf(a.y, x[1], fmaf(a.x, x[0], sums[r]))));
    }
  }
}

/// Adds the product of weights [R x 32] and 32 rows of `tile` to sums [R x 32 C]. The rows are
/// `line` floats apart. Lane l has column l + 32 c in sums[r][c].
template <int C, int R>
__device__ static inline void add_rows(float (&sums)[R][C], const float *weights, const float *tile,
                                       int line)
{
  for (int j = 0; j < 32; j += 4) {
    float x[4][C];
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int c = 0; c < C; c++) x[k][c] = tile[(j + k) * line + (threadIdx.x & 31) + 32 * c];
#pragma unroll
    for (int r = 0; r < R; r++) {
      float4 w = *(const float4 *)(weights + r * 32 + j);
#pragma unroll
      for (int c = 0; c < C; c++)
        sums[r][c] = fmaf(w.w, x[3][c],
                          fmaf(w.z, x[2][c], fmaf(w.y, x[1][c], fmaf(w.x, x[0][c], sums[r][c]))));
    }
  }
}

/// Multiplies the lane's columns of a row by `factor` and stores them. Returns true if any column,
/// in any lane, is Inf or NaN.
template <int C>
__device__ static inline bool store_row(const float (&x)[C], float factor, void *data, int dtype,
                                        int64_t first, int width)
{
  bool bad = false;
#pragma unroll
  for (int c = 0; c < C; c++) {
    int d = (threadIdx.x & 31) + 32 * c;
    if (d >= width) continue;
    bad = bad || !f32_is_finite(x[c] * factor);
    store_as(data, dtype, first + d, x[c] * factor);
  }
  return __ballot_sync(0xFFFFFFFFu, bad) != 0;
}

template <int C>
__global__ void __launch_bounds__(32 * TILE_WARPS<C>, 1)
  tiles_forward(const __grid_constant__ attention_problem p)
{
  extern __shared__ __align__(1024) unsigned char room[];
  constexpr int R = FORWARD_ROWS<C>, BLOCK_ROWS = TILE_WARPS<C> * R;
  float *const q = (float *)room, *const weights = q + BLOCK_ROWS * 32 * C,
               *const v = weights + BLOCK_ROWS * 32, *const k = v + 32 * 32 * C;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, pairs = p.batch * p.heads,
            pair = blockIdx.x % pairs, b = pair / p.heads, h = pair % p.heads;
  const int group = h / p.shared,
            t0 = ((int)(gridDim.x / pairs) - 1 - (int)(blockIdx.x / pairs)) * BLOCK_ROWS,
            own = t0 + warp * R;
  const int last = keys_seen(p, min(t0 + BLOCK_ROWS, p.queries) - 1),
            own_last = own < p.queries ? keys_seen(p, min(own + R, p.queries) - 1) : 0;
  const float factor = (float)p.factor;
  load_floats<C, BLOCK_ROWS>(q, 32 * C, row_of<float>(p.q, b, 0, h), p.q.time, t0, p.queries,
                             p.width);
  float y[R][C], top[R], sum[R], weighted[R];
#pragma unroll
  for (int r = 0; r < R; r++) {
    top[r] = -INFINITY;
    sum[r] = weighted[r] = 0;   // sums over the lane's keys
#pragma unroll
    for (int c = 0; c < C; c++) y[r][c] = 0;
  }
  float *const own_weights = weights + warp * R * 32;
  for (int j0 = 0; j0 < last; j0 += 32) {
    __syncthreads();
    load_floats<C, 32>(k, 32 * C + 1, row_of<float>(p.k, b, 0, group), p.k.time, j0, p.keys,
                       p.width);
    load_floats<C, 32>(v, 32 * C, row_of<float>(p.v, b, 0, group), p.v.time, j0, p.keys, p.width);
    __syncthreads();
    if (j0 >= own_last) continue;
    float s[R];
    dots<C, R>(s, q + warp * R * 32 * C, k + lane * (32 * C + 1));
#pragma unroll
    for (int r = 0; r < R; r++) {
      bool seen = j0 + lane < keys_seen(p, own + r);
      float score = factor * s[r], before = top[r], largest = warp_max(seen ? score : -INFINITY);
      if (largest > before) top[r] = largest;
      float shift = top[r] == -INFINITY ? 0.0f : top[r], keep = expf(before - shift),
            x = score - shift, e = seen ? expf(x) : 0.0f;
      weighted[r] = (keep == 0 ? 0.0f : keep * fmaf(before - shift, sum[r], weighted[r])) +
                    (e == 0 ? 0.0f : e * x);
      sum[r] = fmaf(sum[r], keep, e);
#pragma unroll
      for (int c = 0; c < C; c++) y[r][c] *= keep;
      own_weights[r * 32 + lane] = e;
    }
    __syncwarp();
    add_rows<C, R>(y, own_weights, v, 32 * C);
    __syncwarp();
  }
  for (int r = 0; r < R; r++) {
    const int t = own + r;
    if (t >= p.queries) break;
    float total = 0, entropy = 0, largest = 0, row[C];
#pragma unroll
    for (int i = 0; i < R; i++)   // arrays in registers need constant indices
      if (i == r) {
        total = warp_sum(sum[i]);
        entropy = warp_sum(weighted[i]);
        largest = top[i];
#pragma unroll
        for (int c = 0; c < C; c++) row[c] = keys_seen(p, t) ? y[i][c] / total : 0.0f;
      }
    bool blind = keys_seen(p, t) == 0, lost = total == 0;
    if (lane == 0) {
      int64_t line = line_of(p, b, h, t);
      if (p.lse)
        store_as(p.lse, p.lse_dtype, line, blind ? -INFINITY : lost ? NAN : largest + logf(total));
      if (p.entropy)
        store_as(p.entropy, p.lse_dtype, line,
                 blind ? 0.0f :
                 lost  ? NAN :
                         logf(total) - entropy / total);
    }
    if (store_row<C>(row, 1.0f, p.y.data, p.y_dtype, b * p.y.batch + t * p.y.time + h * p.y.head,
                     p.width))
      forward_row<float, float>(p, b, h, t, p.width);
  }
}

/// Computes dq or, with KEYS_STAY, dk and dv. The rows that stay in shared memory are queries (for
/// dq) or keys (for dk and dv). The opposite rows are loaded tile by tile.
template <int C, bool KEYS_STAY>
__global__ void __launch_bounds__(32 * TILE_WARPS<C>, 1)
  tiles_backward(const __grid_constant__ attention_problem p)
{
  extern __shared__ __align__(1024) unsigned char room[];
  constexpr int R = BACKWARD_ROWS<C>, BLOCK_ROWS = TILE_WARPS<C> * R, LINE = 32 * C + 1;
  // the rows that stay: q and dy, or k and v
  float *const stay = (float *)room, *const stay_slopes = stay + BLOCK_ROWS * 32 * C;
  // for each warp: dscores and, with KEYS_STAY, probabilities
  float *const weights = stay_slopes + BLOCK_ROWS * 32 * C;
  // the current tile of the opposite rows: k and v, or q and dy
  float *const tile = weights + 2 * BLOCK_ROWS * 32, *const slopes = tile + 32 * LINE;
  const int heads = KEYS_STAY ? p.groups : p.heads, pairs = p.batch * heads,
            pair = blockIdx.x % pairs, b = pair / heads, head = pair % heads;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, blocks = (int)(gridDim.x / pairs),
            block = (int)(blockIdx.x / pairs);
  const int first = (KEYS_STAY ? block : blocks - 1 - block) * BLOCK_ROWS, own = first + warp * R,
            limit = KEYS_STAY ? p.keys : p.queries;
  const attention_view &stay_view = KEYS_STAY ? p.k : p.q, &slope_view = KEYS_STAY ? p.v : p.dy;
  load_floats<C, BLOCK_ROWS>(stay, 32 * C, row_of<float>(stay_view, b, 0, head), stay_view.time,
                             first, limit, p.width);
  load_floats<C, BLOCK_ROWS>(stay_slopes, 32 * C, row_of<float>(slope_view, b, 0, head),
                             slope_view.time, first, limit, p.width);
  const float factor = (float)p.factor;
  float sums[R][C], slope_sums[R][C];   // dq, or dk and dv
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int c = 0; c < C; c++) sums[r][c] = slope_sums[r][c] = 0;
  float *const own_weights = weights + 2 * warp * R * 32;

  const int head_first = KEYS_STAY ? head * p.shared : head,
            head_end = KEYS_STAY ? head_first + p.shared : head + 1;
  const int from = KEYS_STAY ? first_query(p, first) : 0,
            end = KEYS_STAY ? p.queries : keys_seen(p, min(first + BLOCK_ROWS, p.queries) - 1);
  for (int h = head_first; h < head_end; h++)
    for (int at = from; at < end; at += 32) {
      const attention_view &view = KEYS_STAY ? p.q : p.k, &with = KEYS_STAY ? p.dy : p.v;
      const int other = KEYS_STAY ? h : h / p.shared;
      __syncthreads();
      load_floats<C, 32>(tile, LINE, row_of<float>(view, b, 0, other), view.time, at, end, p.width);
      load_floats<C, 32>(slopes, LINE, row_of<float>(with, b, 0, other), with.time, at, end,
                         p.width);
      __syncthreads();
      float s[R], ds[R];
      dots<C, R>(s, stay + warp * R * 32 * C, tile + lane * LINE);
      dots<C, R>(ds, stay_slopes + warp * R * 32 * C, slopes + lane * LINE);
#pragma unroll
      for (int r = 0; r < R; r++) {
        const int t = KEYS_STAY ? at + lane : own + r, j = KEYS_STAY ? own + r : at + lane;
        const bool seen = t < p.queries && j < keys_seen(p, t);
        const float lse = seen ? ((const float *)p.lse)[line_of(p, b, h, t)] : 0.0f,
                    delta = seen ? ((const float *)p.delta)[delta_at(p, b, h, t)] : 0.0f;
        const float e = seen ? expf(fmaf(factor, s[r], -lse)) : 0.0f;
        own_weights[r * 32 + lane] = seen ? e * (ds[r] - delta) : 0.0f;
        if (KEYS_STAY) own_weights[(R + r) * 32 + lane] = e;
      }
      __syncwarp();
      add_rows<C, R>(sums, own_weights, tile, LINE);
      if (KEYS_STAY) add_rows<C, R>(slope_sums, own_weights + R * 32, slopes, LINE);
      __syncwarp();
    }
#pragma unroll
  for (int r = 0; r < R; r++) {
    const int row = own + r;
    if (row >= limit) continue;
    bool bad = false;
    if (KEYS_STAY) {
      if (p.dk.data)
        bad |= store_row<C>(sums[r], factor, p.dk.data, p.dk_dtype,
                            b * p.dk.batch + row * p.dk.time + head * p.dk.head, p.width);
      if (p.dv.data)
        bad |= store_row<C>(slope_sums[r], 1.0f, p.dv.data, p.dv_dtype,
                            b * p.dv.batch + row * p.dv.time + head * p.dv.head, p.width);
      if (bad) dkdv_row<float, float>(p, b, head, row, p.width);
    } else if (store_row<C>(sums[r], factor, p.dq.data, p.dq_dtype,
                            b * p.dq.batch + row * p.dq.time + head * p.dq.head, p.width)) {
      dq_row<float, float>(p, b, head, row, p.width);
    }
  }
}

// ---- launching

template <int C> static eng_status forward_tiles(const attention_problem *p)
{
  int64_t blocks = parts(p->queries, TILE_WARPS<C> * FORWARD_ROWS<C>) * p->batch * p->heads;
  return launch_kernel("attention", tiles_forward<C>, blocks, 32 * TILE_WARPS<C>,
                       FORWARD_FLOATS<C> * 4, *p);
}

template <int C, bool KEYS_STAY> static eng_status backward_tiles(const attention_problem *p)
{
  int64_t tiles = parts(KEYS_STAY ? p->keys : p->queries, TILE_WARPS<C> * BACKWARD_ROWS<C>),
          blocks = tiles * p->batch * (KEYS_STAY ? p->groups : p->heads);
  return launch_kernel("attention_grad", tiles_backward<C, KEYS_STAY>, blocks, 32 * TILE_WARPS<C>,
                       BACKWARD_FLOATS<C> * 4, *p);
}

/// Launches a kernel that computes one row with each warp.
template <class Kernel>
static eng_status by_rows(const char *operation, Kernel *kernel, const attention_problem *p,
                          int64_t rows)
{ return launch_kernel(operation, kernel, parts(rows, ROW_WARPS), 32 * ROW_WARPS, 0, *p, rows); }

template <class A> static eng_status forward(const attention_problem *p)
{
  int64_t rows = (int64_t)p->batch * p->heads * p->queries;
  if (p->width > 0 && p->width <= 256 && sizeof(A) == 4)
    return with_size<1, 2, 4, 8>(parts(p->width, 32),
                                 [=](auto c) { return forward_tiles<decltype(c)::value>(p); });
  return by_rows("attention", plain_rows<A, ROWS_OF_Y>, p, rows);
}

template <class A> static eng_status backward(const attention_problem *p)
{
  const int64_t q_rows = (int64_t)p->batch * p->heads * p->queries,
                k_rows = (int64_t)p->batch * p->groups * p->keys;
  const bool for_queries = p->dq.data, for_keys = p->dk.data || p->dv.data;
  ENG_TRY(by_rows("attention_grad", plain_delta<A>, p, q_rows));
  if (p->width <= 256 && sizeof(A) == 4)
    return with_size<1, 2, 4, 8>(parts(p->width, 32), [=](auto c) {
      if (for_queries) ENG_TRY((backward_tiles<decltype(c)::value, false>(p)));
      return for_keys ? backward_tiles<decltype(c)::value, true>(p) : ENG_OK;
    });
  if (for_queries) ENG_TRY(by_rows("attention_grad", plain_rows<A, ROWS_OF_DQ>, p, q_rows));
  return for_keys ? by_rows("attention_grad", plain_rows<A, ROWS_OF_DK_DV>, p, k_rows) : ENG_OK;
}

eng_status attention_plain_forward(const attention_problem *p, int dtype)
{ return dtype == ENG_f64 ? forward<double>(p) : forward<float>(p); }

eng_status attention_plain_backward(const attention_problem *call, int dtype)
{
  attention_problem p = *call;
  int64_t bytes = (int64_t)p.batch * p.heads * p.queries * (dtype == ENG_f64 ? 8 : 4);
  p.delta_line = p.queries;
  p.delta = scratch_take(bytes);
  if (!p.delta) return ENG_ERR_MEMORY;
  eng_status status = dtype == ENG_f64 ? backward<double>(&p) : backward<float>(&p);
  scratch_give(p.delta, bytes);
  return status;
}
