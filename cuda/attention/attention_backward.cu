// Attention backward with tensor cores: f16 and bf16, at most 128 wide. See attention.h.
//
// A query and a key have a probability p (the softmax of their score) and dp = dy . v.
// A query has delta = sum of p * dp = dy . y. The gradients are
//   dscore = p * (dp - delta)
//   dq = factor * sum of dscore * k
//   dk = factor * sum of dscore * q
//   dv = sum of p * dy
// There are three kernels. The first computes delta of each row. The second computes dk and dv: a
// block owns some keys and iterates over the queries. The third computes dq: a block owns some
// queries and iterates over the keys. The second and third recompute the probabilities from lse.
// Each result is written by one block, so the order of sums is fixed.
//
// Probabilities and dscores stay in registers, because the result of one product has the register
// layout of the next product's operand.
//
// In f16 a dscore could overflow if dy carries a large loss scale, or vanish if dy is small. So
// dscores are multiplied by a power of two that brings the largest |dy| of the heads that share a
// key head to between 16 and 32. Probabilities are multiplied by 2^15. Called by attention.cu.
#include "attention_tiles.h"

// In blocks that own keys: number of 16-key tiles per warp
template <int D> constexpr int KEY_MT = D <= 64 ? 2 : 1;
// In blocks that own keys: number of queries whose scores are in registers at a time
template <int D> constexpr int KEY_STEP = D <= 64 ? 32 : 64;
// In blocks that own queries: number of keys in shared memory at a time
template <int D> constexpr int KEYS_STAGED = D <= 64 ? 64 : 32;
// In blocks that own queries: number of 16-query tiles per warp, and number of keys whose scores
// are in registers at a time
enum { QUERY_MT = 2, QUERY_STEP = 32, QUERY_ROWS = WARPS * 16 * QUERY_MT };

// ---- delta

/// The rows of a block: tile `tile` of head h. Blocks that run together have neighbouring heads,
/// whose rows are neighbours in memory.
struct delta_rows { int b, h, tile; };
__device__ static inline delta_rows delta_rows_of(int block, int heads, int tiles)
{ return {block / heads / tiles, block % heads, block / heads % tiles}; }

template <class T, int D>
__global__ void __launch_bounds__(THREADS)
  attention_delta(const __grid_constant__ attention_problem p, const backward_room r)
{
  // LANES lanes share a row; each reads 16 bytes of y and of dy (with D = 96, the last four read
  // nothing). A warp processes AT_ONCE rows together.
  constexpr int LANES = D == 96 ? 16 : D / 8, AT_ONCE = 32 / LANES;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, piece = lane % LANES;
  const int tiles = (int)(r.line / QUERIES);
  const auto [b, h, tile] = delta_rows_of(blockIdx.x, p.heads, tiles);
  uint32_t largest = 0, bad = 0;   // bad: bit mask of the rows that the warp must recompute
  for (int i = 0; i < QUERIES / (WARPS * AT_ONCE); i++) {
    const int first = tile * QUERIES + (i * WARPS + warp) * AT_ONCE, t = first + lane / LANES;
    float sum = 0;
    if (t < p.queries && piece < D / 8) {
      uint4 ys = *(const uint4 *)(row_of<T>(p.y, b, t, h) + piece * 8),
            slopes = *(const uint4 *)(row_of<T>(p.dy, b, t, h) + piece * 8);
#pragma unroll
      for (int k = 0; k < 8; k++) {
        float slope = widen(((const T *)&slopes)[k]);
        sum = fmaf(widen(((const T *)&ys)[k]), slope, sum);
        uint32_t magnitude = __float_as_uint(slope) & 0x7FFFFFFFu;
        if (magnitude < 0x7F800000u) largest = max(largest, magnitude);
      }
    }
#pragma unroll
    for (int k = LANES / 2; k; k >>= 1) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, k);
    for (uint32_t lanes = __ballot_sync(0xFFFFFFFFu, piece == 0 && !f32_is_finite(sum)); lanes;
         lanes &= lanes - 1)
      bad |= 1u << (i * AT_ONCE + (__ffs(lanes) - 1) / LANES);
    if (piece == 0) {
      bool sees = t < p.queries && keys_seen(p, t) > 0;
      float lse = sees ? ((const float *)p.lse)[line_of(p, b, h, t)] : 0.0f;
      ((float *)p.delta)[delta_at(p, b, h, t)] = sees ? sum : 0.0f;
      r.shift[delta_at(p, b, h, t)] = sees ? fmaf(-lse, (float)LOG2_E, (float)RAISE<T>) : -INFINITY;
    }
  }
  if (RAISE<T>) {
    largest = __reduce_max_sync(0xFFFFFFFFu, largest);
    if (lane == 0) atomicMax(&r.largest[b * p.groups + h / p.shared], largest);
  }
  // The sums of the rows in `bad` are not finite, for example because y overflowed when it was
  // rounded. So the delta of these rows is recomputed from p and dp.
  for (; bad; bad &= bad - 1) {
    const auto [b, h, tile] = delta_rows_of(opaque((int)blockIdx.x), p.heads, tiles);
    const int at = __ffs(bad) - 1,
              t = tile * QUERIES + (at / AT_ONCE * WARPS + warp) * AT_ONCE + at % AT_ONCE;
    const float exact = delta_of_row<T, float>(p, b, h, t);
    if (lane == at % AT_ONCE * LANES)
      ((float *)p.delta)[delta_at(p, b, h, t)] = keys_seen(p, t) > 0 ? exact : 0.0f;
  }
}

// ---- dk, dv

template <int D> constexpr int KEY_ROWS = WARPS * 16 * KEY_MT<D>;
template <int D>
constexpr int KEY_BYTES = (2 * KEY_ROWS<D> + 4 * QUERIES) * D * 2 + 4 * QUERIES * 4;

/// Batch, key head and first key of a block. Blocks with the most queries go first.
struct keys_place { int b, group, first; };
template <int D>
__device__ static inline keys_place keys_of(const attention_problem &p, const backward_room &r,
                                            int block)
{
  const scheduled at = scheduled_at(r.keys, block);
  return {at.head / p.groups, at.head % p.groups, at.tile * KEY_ROWS<D>};
}

template <class T, int D>
__global__ void __launch_bounds__(THREADS, 2)
  attention_grad_keys(const __grid_constant__ attention_problem p, const backward_room r,
                      const int stored)
{
  if constexpr (NOT_HERE<D>) return;
  extern __shared__ __align__(1024) unsigned char room[];
  constexpr int MT = KEY_MT<D>, ROWS = KEY_ROWS<D>, STEP = KEY_STEP<D>;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const keys_place of = keys_of<D>(p, r, blockIdx.x);
  const uint32_t shared = shared_address(room);
  constexpr uint32_t TILE = QUERIES * D * 2, KEEP = ROWS * D * 2;
  const uint32_t staged = shared + 2 * KEEP;                               // two stages of q and dy
  // two stages of shift and delta
  float *const lines = (float *)(room + 2 * KEEP + 4 * TILE);

  // `left` counts the heads of the group that are not finished, including the head to load here
  auto load_queries = [&](int stage, int left, int from) {
    const int thread = opaque((int)threadIdx.x), b = opaque(of.b),
              h = (of.group + 1) * p.shared - left;
    load_tile<D, QUERIES>(staged + stage * 2 * TILE, row_of<T>(p.q, b, 0, h), p.q.time, from,
                          p.queries, thread);
    load_tile<D, QUERIES>(staged + stage * 2 * TILE + TILE, row_of<T>(p.dy, b, 0, h), p.dy.time,
                          from, p.queries, thread);
    if (thread < 2 * QUERIES / 4) {
      int which = thread / (QUERIES / 4), piece = thread % (QUERIES / 4);
      const float *line =
        (which ? (const float *)p.delta : r.shift) + ((int64_t)b * p.heads + h) * r.line + from;
      copy16(shared_address(lines + (2 * stage + which) * QUERIES + piece * 4), line + piece * 4,
             true);
    }
  };
  auto advance = [&](int &left, int &first) {
    first += QUERIES;
    if (first < p.queries) return;
    first = first_query(p, opaque(of.first)) / QUERIES * QUERIES;
    left--;
  };

  load_tile<D, ROWS>(shared, row_of<T>(p.k, of.b, 0, of.group), p.k.time, of.first, p.keys);
  load_tile<D, ROWS>(shared + KEEP, row_of<T>(p.v, of.b, 0, of.group), p.v.time, of.first, p.keys);
  int first = first_query(p, of.first) / QUERIES * QUERIES, left = first < p.queries ? p.shared : 0;
  if (left > 0) load_queries(0, left, first);
  copy_commit();

  const float scale = (float)(p.factor * LOG2_E),
              held = lift_of<T>(r, (int64_t)of.b * p.groups + of.group) * exp2f((float)-RAISE<T>);
  float dk[MT][D / 8][4], dv[MT][D / 8][4];
  clear(dk);
  clear(dv);
  const lane_place<D> k_place = place_a<D>(shared + warp * 16 * MT * (D * 2)),
                      v_place = place_a<D>(shared + KEEP + warp * 16 * MT * (D * 2));

  for (int stage = 0; left > 0; stage ^= 1) {
    const uint32_t q_tile = staged + stage * 2 * TILE, dy_tile = q_tile + TILE;
    const int own = opaque(of.first) + warp * 16 * MT;
    copy_wait<0>();
    __syncthreads();
    int next_left = left, next = first;
    advance(next_left, next);
    if (next_left > 0) {
      load_queries(stage ^ 1, next_left, next);
      copy_commit();
    }
#pragma unroll 1
    for (int at = 0; at < QUERIES; at += STEP) {
      // these queries see none of the warp's keys
      if (first + at + STEP <= first_query(p, own)) continue;
      const float *shift = lines + 2 * stage * QUERIES + at, *delta = shift + QUERIES;
      float s[MT][STEP / 8][4], ds[MT][STEP / 8][4];
      clear(s);
      product_of_rows<T, D, MT, STEP / 16>(s, k_place, place_b<D>(q_tile + at * (D * 2)));
      if (first + at < first_query(p, own + 16 * MT - 1)) {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            // the first query that sees this row's key, counted from the thread's first column;
            // columns before it are masked
            int hidden = first_query(p, own + 16 * m + 8 * half + g) - first - at - 2 * t;
#pragma unroll
            for (int i = 0; i < STEP / 8; i++) {
              if (8 * i < hidden) s[m][i][2 * half] = -INFINITY;
              if (8 * i + 1 < hidden) s[m][i][2 * half + 1] = -INFINITY;
            }
          }
      }
      uint32_t weights[MT][STEP / 8][2];
#pragma unroll
      for (int i = 0; i < STEP / 8; i++) {
        const float2 shifts = *(const float2 *)(shift + 8 * i + 2 * t);
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
          for (int half = 0; half < 2; half++) {
            s[m][i][2 * half] = exp2_fast(fmaf(s[m][i][2 * half], scale, shifts.x));
            s[m][i][2 * half + 1] = exp2_fast(fmaf(s[m][i][2 * half + 1], scale, shifts.y));
            weights[m][i][half] = rounded_pair(T(), s[m][i][2 * half], s[m][i][2 * half + 1]);
          }
        }
      }
      product_with_rows<T, D, MT, STEP / 16>(dv, weights, place_turned<D>(dy_tile + at * (D * 2)));
      clear(ds);
      product_of_rows<T, D, MT, STEP / 16>(ds, v_place, place_b<D>(dy_tile + at * (D * 2)));
#pragma unroll
      for (int i = 0; i < STEP / 8; i++) {
        const float2 deltas = *(const float2 *)(delta + 8 * i + 2 * t);
        const float less[2] = {-held * deltas.x, -held * deltas.y};
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
          for (int half = 0; half < 2; half++)
            weights[m][i][half] =
              rounded_pair(T(), s[m][i][2 * half] * fmaf(held, ds[m][i][2 * half], less[0]),
                           s[m][i][2 * half + 1] * fmaf(held, ds[m][i][2 * half + 1], less[1]));
      }
      product_with_rows<T, D, MT, STEP / 16>(dk, weights, place_turned<D>(q_tile + at * (D * 2)));
    }
    first = opaque(first);
    advance(left, first);
  }
  copy_wait<0>();
  __syncthreads();

  const keys_place to = keys_of<D>(p, r, opaque((int)blockIdx.x));
  const int own = to.first + warp * 16 * MT;
  const float lift = lift_of<T>(r, (int64_t)to.b * p.groups + to.group);
  const float k_factor = (float)p.factor / lift, v_factor = exp2f((float)-RAISE<T>);
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int d = 0; d < D / 8; d++)
#pragma unroll
      for (int c = 0; c < 4; c++) {
        dk[m][d][c] *= k_factor;
        dv[m][d][c] *= v_factor;
      }
  uint32_t bad = 0;
  unsigned char *own_rows = room + warp * 16 * MT * (D * 2);
  if (p.dk.data)
    bad |= store_rows<T, D, MT>(dk, own_rows, row_of<T>(p.dk, to.b, 0, to.group), p.dk.time, own,
                                p.keys, stored);
  if (p.dv.data)
    bad |= store_rows<T, D, MT>(dv, own_rows + KEEP, row_of<T>(p.dv, to.b, 0, to.group), p.dv.time,
                                own, p.keys, stored);
  __syncwarp();
  for (; bad; bad &= bad - 1) {
    int key = own + __ffs(bad) - 1;
    if (key < p.keys) dkdv_row<T, float>(p, to.b, to.group, key, stored);
  }
}

// ---- dq

template <int D>
constexpr int QUERY_BYTES = (2 * QUERY_ROWS + 4 * KEYS_STAGED<D>) * D * 2;

/// Batch, head and first query of a block. Blocks with the most keys go first.
struct queries_place { int b, h, first; };
__device__ static inline queries_place queries_of(const attention_problem &p,
                                                  const backward_room &r, int block)
{
  const scheduled at = scheduled_at(r.queries, block);
  return {at.head / p.heads, at.head % p.heads, (r.queries.tiles - 1 - at.tile) * QUERY_ROWS};
}

template <class T, int D>
__global__ void __launch_bounds__(THREADS, 2)
  attention_grad_queries(const __grid_constant__ attention_problem p, const backward_room r,
                         const int stored)
{
  if constexpr (NOT_HERE<D>) return;
  extern __shared__ __align__(1024) unsigned char room[];
  constexpr int MT = QUERY_MT, ROWS = QUERY_ROWS, KEYS = KEYS_STAGED<D>, STEP = QUERY_STEP;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const queries_place of = queries_of(p, r, blockIdx.x);
  const int group = of.h / p.shared;
  const uint32_t shared = shared_address(room);
  constexpr uint32_t TILE = KEYS * D * 2, KEEP = ROWS * D * 2;
  const uint32_t staged = shared + 2 * KEEP;   // two stages of k and v
  const T *k = row_of<T>(p.k, of.b, 0, group), *v = row_of<T>(p.v, of.b, 0, group);

  load_tile<D, ROWS>(shared, row_of<T>(p.q, of.b, 0, of.h), p.q.time, of.first, p.queries);
  load_tile<D, ROWS>(shared + KEEP, row_of<T>(p.dy, of.b, 0, of.h), p.dy.time, of.first, p.queries);
  load_tile<D, KEYS>(staged, k, p.k.time, 0, p.keys);
  load_tile<D, KEYS>(staged + TILE, v, p.v.time, 0, p.keys);
  copy_commit();

  const float scale = (float)(p.factor * LOG2_E),
              held = lift_of<T>(r, (int64_t)of.b * p.groups + group) * exp2f((float)-RAISE<T>);
  float dq[MT][D / 8][4], shift[MT][2], less[MT][2];
  clear(dq);
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int row = of.first + warp * 16 * MT + 16 * m + 8 * half + g;
      bool there = row < p.queries;
      const int64_t at = ((int64_t)of.b * p.heads + of.h) * r.line + row;
      shift[m][half] = there ? r.shift[at] : -INFINITY;
      less[m][half] = there ? -held * ((const float *)p.delta)[at] : 0.0f;
    }
  const lane_place<D> q_place = place_a<D>(shared + warp * 16 * MT * (D * 2)),
                      dy_place = place_a<D>(shared + KEEP + warp * 16 * MT * (D * 2));

  for (int n = 0;; n++) {
    const int first = D > 96 ? opaque(of.first) : of.first, own = first + warp * 16 * MT;
    const int last = keys_seen(p, min(first + ROWS, p.queries) - 1);   // keys that the block sees
    if (n * KEYS >= last) break;
    const uint32_t k_tile = staged + (n & 1) * 2 * TILE, v_tile = k_tile + TILE;
    copy_wait<0>();
    __syncthreads();
    if ((n + 1) * KEYS < last) {
      uint32_t next = staged + ((n + 1) & 1) * 2 * TILE;
      load_tile<D, KEYS>(next, k, p.k.time, (n + 1) * KEYS, p.keys);
      load_tile<D, KEYS>(next + TILE, v, p.v.time, (n + 1) * KEYS, p.keys);
      copy_commit();
    }
#pragma unroll 1
    for (int at = 0; at < KEYS; at += STEP) {
      const int key = n * KEYS + at;
      if (key >= keys_seen(p, min(own + 16 * MT, p.queries) - 1)) continue;
      float s[MT][STEP / 8][4], ds[MT][STEP / 8][4];
      clear(s);
      clear(ds);
      product_of_rows<T, D, MT, STEP / 16>(s, q_place, place_b<D>(k_tile + at * (D * 2)));
      product_of_rows<T, D, MT, STEP / 16>(ds, dy_place, place_b<D>(v_tile + at * (D * 2)));
      if (key + STEP > keys_seen(p, own)) {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            int seen = keys_seen(p, own + 16 * m + 8 * half + g) - key - 2 * t;
#pragma unroll
            for (int i = 0; i < STEP / 8; i++) {
              if (8 * i >= seen) s[m][i][2 * half] = -INFINITY;
              if (8 * i + 1 >= seen) s[m][i][2 * half + 1] = -INFINITY;
            }
          }
      }
      uint32_t weights[MT][STEP / 8][2];
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int i = 0; i < STEP / 8; i++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            float x = exp2_fast(fmaf(s[m][i][2 * half], scale, shift[m][half])) *
                      fmaf(held, ds[m][i][2 * half], less[m][half]);
            float y = exp2_fast(fmaf(s[m][i][2 * half + 1], scale, shift[m][half])) *
                      fmaf(held, ds[m][i][2 * half + 1], less[m][half]);
            weights[m][i][half] = rounded_pair(T(), x, y);
          }
      product_with_rows<T, D, MT, STEP / 16>(dq, weights, place_turned<D>(k_tile + at * (D * 2)));
    }
  }
  copy_wait<0>();
  __syncthreads();

  const queries_place to = queries_of(p, r, opaque((int)blockIdx.x));
  const int own = to.first + warp * 16 * MT;
  const float factor = (float)p.factor / lift_of<T>(r, (int64_t)to.b * p.groups + to.h / p.shared);
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int d = 0; d < D / 8; d++)
#pragma unroll
      for (int c = 0; c < 4; c++) dq[m][d][c] *= factor;
  uint32_t bad =
    store_rows<T, D, MT>(dq, room + warp * 16 * MT * (D * 2), row_of<T>(p.dq, to.b, 0, to.h),
                         p.dq.time, own, p.queries, stored);
  __syncwarp();
  for (; bad; bad &= bad - 1) {
    int row = own + __ffs(bad) - 1;
    if (row < p.queries) dq_row<T, float>(p, to.b, to.h, row, stored);
  }
}

// ---- launching

template <class T, int D>
static eng_status launch(const attention_problem *p, backward_room *r, int dtype, int stored)
{
  const char *name = "attention_grad";
  ENG_TRY(schedule_backward(r, p, KEY_ROWS<D>, QUERY_ROWS, D));
  if (r->largest)
    CUDA_TRY(cudaMemsetAsync(r->largest, 0, (size_t)r->keys.heads * sizeof(uint32_t),
                             cuda_stream()));
  ENG_TRY(launch_kernel(name, attention_delta<T, D>, r->line / QUERIES * p->batch * p->heads,
                        THREADS, 0, *p, *r));
  if (cuda_capability() == 90 && D % 64 == 0) return attention_hopper_backward(p, r, dtype, stored);
  if (p->dk.data || p->dv.data)
    ENG_TRY(launch_kernel(name, attention_grad_keys<T, D>, r->keys.tiles * r->keys.heads, THREADS,
                          KEY_BYTES<D>, *p, *r, stored));
  return p->dq.data ? launch_kernel(name, attention_grad_queries<T, D>,
                                    r->queries.tiles * r->queries.heads, THREADS, QUERY_BYTES<D>,
                                    *p, *r, stored) :
                      ENG_OK;
}

eng_status attention_backward(const attention_problem *call, int dtype, int stored)
{
  attention_problem p = *call;
  int64_t line = parts(p.queries, QUERIES) * QUERIES,
          floats = (int64_t)p.batch * p.heads * line;
  int64_t bytes = 2 * floats * 4 + (int64_t)p.batch * p.groups * 4;
  float *room = (float *)scratch_take(bytes);
  if (!room) return ENG_ERR_MEMORY;
  p.delta = room + floats;
  p.delta_line = line;
  uint32_t *largest = dtype == ENG_f16 ? (uint32_t *)(room + 2 * floats) : NULL;
  backward_room r = {room, largest, line, {}, {}};
  eng_status status = with_heads<32, 64, 96, 128>(dtype, p.width, [&](auto t, auto d) {
    return launch<decltype(t), decltype(d)::value>(&p, &r, dtype, stored);
  });
  scratch_give(room, bytes);
  return status;
}
