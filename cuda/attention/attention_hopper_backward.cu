// Attention backward on Hopper (sm_90a). One kernel computes dk and dv in blocks of 64 keys,
// another dq in blocks of 64 queries. The method and, except for rounding, the results are those of
// attention_backward.cu, whose first kernel also computes delta, shift and largest for this file.
// The products use wgmma. Called by attention_backward.cu.
//
// A block is one warpgroup. Two to four blocks share a multiprocessor. They do not wait for each
// other: while one uses the tensor cores, another computes probabilities, loads its first rows or
// stores its results. On an H200 this is faster than larger blocks, which read q, dy, k and v less
// often. The hardware copies rows to shared memory when the block's first thread asks for them.
#include "attention_hopper.h"

enum { KEYS = 64 };   // keys in a tile of the kernel that computes dq
enum { ROWS = 64 };   // rows of a block
enum { STAGES = 2 };   // pairs of tiles in shared memory: one is read while the other loads
/// Size of shared memory in bytes. It holds the block's own rows (k and v, or q and dy). For each
/// stage it holds a pair of tiles (q and dy, or k and v), a pair of lines (shift and delta), and
/// two barriers. The last 1024 bytes leave room to align the tiles to 1024 bytes.
template <int D>
constexpr int BACKWARD_BYTES =
  (2 * ROWS + STAGES * 2 * 64) * D * 2 + STAGES * (2 * QUERIES * 4 + 16) + 1024;

typedef struct backward_maps { CUtensorMap q, k, v, dy; } backward_maps;

#if HOPPER_BODY
/// Multiplies a warp's 16 rows of c by `factor` and stores them. Returns the rows to recompute, as
/// store_rows does.
template <class T, int D>
__device__ static inline uint32_t store_scaled(const float (&c)[D / 2], float factor,
                                               unsigned char *tile, T *head, int64_t stride,
                                               int first, int limit, int stored)
{
  float rows[1][D / 8][4];
#pragma unroll
  for (int d = 0; d < D / 8; d++)
#pragma unroll
    for (int i = 0; i < 4; i++) rows[0][d][i] = c[4 * d + i] * factor;
  return store_rows<T, D, 1>(rows, tile, head, stride, first, limit, stored);
}
#endif

// ---- dk, dv

template <class T, int D>
__global__ void __launch_bounds__(THREADS, D == 64 ? 3 : 2)
  hopper_grad_keys(const __grid_constant__ attention_problem p,
                   const __grid_constant__ backward_maps maps, const backward_room r,
                   const int stored)
{
#if HOPPER_BODY
  extern __shared__ __align__(1024) unsigned char room[];
  constexpr uint32_t TILE = QUERIES * D * 2, KEEP = ROWS * D * 2;
  const int warp = __shfl_sync(0xFFFFFFFFu, (int)threadIdx.x >> 5, 0);
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const scheduled at = scheduled_at(r.keys, blockIdx.x);
  const int pair = at.head, b = pair / p.groups, group = pair % p.groups;
  // blocks whose keys are seen by the most queries go first
  const int key0 = at.tile * ROWS, own = key0 + warp * 16;

  const int first_tile = first_query(p, key0) / QUERIES,
            tiles = max(0, (p.queries + QUERIES - 1) / QUERIES - first_tile);
  const int all_see = first_query(p, key0 + ROWS - 1), total = tiles * p.shared;
  const int row_first[2] = {first_query(p, own + g), first_query(p, own + g + 8)};
  // shared memory: k, v, stages of q and dy, stages of shift and delta, barriers
  const uint32_t base = shared_address(room), shared = (base + 1023) & ~1023u,
                 staged = shared + 2 * KEEP, lines = staged + STAGES * 2 * TILE;
  const buffer_barriers<STAGES, 32> stages = {lines + STAGES * 2 * QUERIES * 4};
  unsigned char *const place = room + (shared - base);

  const bool loads = threadIdx.x == 0;
  auto load_queries = [&](int n) {
    const int h = group * p.shared + n / tiles, first = (first_tile + n % tiles) * QUERIES;
    const uint32_t to = staged + n % STAGES * 2 * TILE, line = lines + n % STAGES * QUERIES * 8;
    const int64_t from = ((int64_t)b * p.heads + h) * r.line + first;
    const uint32_t full = stages.full(n % STAGES);
    stages.claim(n % STAGES, n / STAGES, 2 * TILE + 2 * QUERIES * 4 + (n == 0 ? 2 * KEEP : 0));
    if (n == 0) {
      copy_rows<D, ROWS>(shared, maps.k, key0, group, b, full);
      copy_rows<D, ROWS>(shared + KEEP, maps.v, key0, group, b, full);
    }
    copy_rows<D, QUERIES>(to, maps.q, first, h, b, full);
    copy_rows<D, QUERIES>(to + TILE, maps.dy, first, h, b, full);
    copy_line(line, r.shift + from, QUERIES * 4, full);
    copy_line(line + QUERIES * 4, (const float *)p.delta + from, QUERIES * 4, full);
  };
  stages.open(WARPS);
  if (loads && total > 0) load_queries(0);
  __syncwarp();

  const float scale = (float)(p.factor * LOG2_E), lift = lift_of<T>(r, pair),
              held = lift * exp2f((float)-RAISE<T>);
  float dk[D / 2], dv[D / 2];
  uint32_t for_v[QUERIES / 16][4], for_k[QUERIES / 16][4];
#pragma unroll
  for (int i = 0; i < D / 2; i++) dk[i] = dv[i] = 0;
#pragma unroll
  for (int i = 0; i < QUERIES / 16; i++)
#pragma unroll
    for (int c = 0; c < 4; c++) for_v[i][c] = for_k[i][c] = 0;
  auto end_products = [&] {
    group_wait<0>();
    settle(dv);
    settle(dk);
    settle(for_v);
    settle(for_k);
  };

  for (int n = 0, first = first_tile * QUERIES; n < total; n++, first += QUERIES) {
    if (first >= p.queries) first = first_tile * QUERIES;   // the next head
    end_products();
    if (n > 0) stages.give((n - 1) % STAGES);
    stages.take(n % STAGES, n / STAGES);
    const uint32_t q_tile = staged + n % STAGES * 2 * TILE, dy_tile = q_tile + TILE;
    const float *shift = (float *)(place + (lines - shared)) + n % STAGES * 2 * QUERIES + 2 * t,
                *delta = shift + QUERIES;
    float s[QUERIES / 2], ds[QUERIES / 2];
    // Without these calls, ptxas runs out of registers and ends each product before it starts the
    // next.
    forget(s);
    forget(ds);
    group_begin();
    start_rows_times_rows<T, D, QUERIES>(s, shared, q_tile);
    group_commit();
    start_rows_times_rows<T, D, QUERIES>(ds, shared + KEEP, dy_tile);
    group_commit();
    if (loads && n + 1 < total) load_queries(n + 1);
    __syncwarp();
    group_wait<1>();
    settle(s);
    if (first < all_see) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        // number of columns (queries) before the first query that sees this row's key
        int hidden = row_first[half] - first - 2 * t;
#pragma unroll
        for (int i = 0; i < QUERIES / 8; i++) {
          if (8 * i < hidden) s[4 * i + 2 * half] = -INFINITY;
          if (8 * i + 1 < hidden) s[4 * i + 2 * half + 1] = -INFINITY;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < QUERIES / 8; i++) {
      const float2 shifts = *(const float2 *)(shift + 8 * i);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        s[4 * i + 2 * half] = exp2_fast(fmaf(s[4 * i + 2 * half], scale, shifts.x));
        s[4 * i + 2 * half + 1] = exp2_fast(fmaf(s[4 * i + 2 * half + 1], scale, shifts.y));
      }
    }
    round_weights<T>(for_v, s);
    settle(for_v);
    group_begin();
    start_weights_times_rows<T, D, QUERIES>(dv, for_v, dy_tile);
    group_commit();
    group_wait<1>();
    settle(ds);
#pragma unroll
    for (int i = 0; i < QUERIES / 8; i++) {
      const float2 deltas = *(const float2 *)(delta + 8 * i);
      const float less[2] = {-held * deltas.x, -held * deltas.y};
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int c = 0; c < 2; c++)
          ds[4 * i + 2 * half + c] =
            s[4 * i + 2 * half + c] * fmaf(held, ds[4 * i + 2 * half + c], less[c]);
    }
    round_weights<T>(for_k, ds);
    settle(for_k);
    group_begin();
    start_weights_times_rows<T, D, QUERIES>(dk, for_k, q_tile);
    group_commit();
  }
  end_products();
  __syncthreads();   // all reads of k and v are done, so dk and dv can take their place

  uint32_t bad = 0;
  unsigned char *own_rows = place + warp * 16 * (D * 2);
  if (p.dk.data)
    bad |= store_scaled<T, D>(dk, (float)p.factor / lift, own_rows, row_of<T>(p.dk, b, 0, group),
                              p.dk.time, own, p.keys, stored);
  if (p.dv.data)
    bad |= store_scaled<T, D>(dv, exp2f((float)-RAISE<T>), own_rows + KEEP,
                              row_of<T>(p.dv, b, 0, group), p.dv.time, own, p.keys, stored);
  __syncwarp();
  for (; bad; bad &= bad - 1) {
    int key = own + __ffs(bad) - 1;
    if (key < p.keys) dkdv_row<T, float>(p, b, group, key, stored);
  }
#else
  __trap();
#endif
}

// ---- dq

template <class T, int D>
__global__ void __launch_bounds__(THREADS, D == 64 ? 4 : 2)
  hopper_grad_queries(const __grid_constant__ attention_problem p,
                      const __grid_constant__ backward_maps maps, const backward_room r,
                      const int stored)
{
#if HOPPER_BODY
  extern __shared__ __align__(1024) unsigned char room[];
  constexpr uint32_t TILE = KEYS * D * 2, KEEP = ROWS * D * 2;
  const int warp = __shfl_sync(0xFFFFFFFFu, (int)threadIdx.x >> 5, 0);
  const int lane = threadIdx.x & 31, g = lane >> 2;
  const scheduled at = scheduled_at(r.queries, blockIdx.x);
  const int pair = at.head, b = pair / p.heads, h = pair % p.heads, group = h / p.shared;
  const int first = (r.queries.tiles - 1 - at.tile) * ROWS, own = first + warp * 16;

  const int last = keys_seen(p, min(first + ROWS, p.queries) - 1), all_see = keys_seen(p, first);
  const int tiles = (last + KEYS - 1) / KEYS,
            row_seen[2] = {keys_seen(p, own + g), keys_seen(p, own + g + 8)};
  // shared memory: q, dy, stages of k and v, barriers
  const uint32_t base = shared_address(room), shared = (base + 1023) & ~1023u,
                 staged = shared + 2 * KEEP;
  const buffer_barriers<STAGES> stages = {staged + STAGES * 2 * TILE};

  const bool loads = threadIdx.x == 0;
  auto load_keys = [&](int n) {
    const uint32_t to = staged + n % STAGES * 2 * TILE, full = stages.full(n % STAGES);
    stages.claim(n % STAGES, n / STAGES, 2 * TILE + (n == 0 ? 2 * KEEP : 0));
    if (n == 0) {
      copy_rows<D, ROWS>(shared, maps.q, first, h, b, full);
      copy_rows<D, ROWS>(shared + KEEP, maps.dy, first, h, b, full);
    }
    copy_rows<D, KEYS>(to, maps.k, n * KEYS, group, b, full);
    copy_rows<D, KEYS>(to + TILE, maps.v, n * KEYS, group, b, full);
  };
  stages.open(WARPS);
  if (loads && tiles > 0) load_keys(0);
  __syncwarp();

  const float scale = (float)(p.factor * LOG2_E),
              lift = lift_of<T>(r, (int64_t)b * p.groups + group),
              held = lift * exp2f((float)-RAISE<T>);
  float dq[D / 2], shift[2], less[2];
  uint32_t weights[KEYS / 16][4];
#pragma unroll
  for (int i = 0; i < D / 2; i++) dq[i] = 0;
#pragma unroll
  for (int i = 0; i < KEYS / 16; i++)
    weights[i][0] = weights[i][1] = weights[i][2] = weights[i][3] = 0;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int row = own + 8 * half + g;
    bool there = row < p.queries;
    shift[half] = there ? r.shift[pair * r.line + row] : -INFINITY;
    less[half] = there ? -held * ((const float *)p.delta)[pair * r.line + row] : 0.0f;
  }
  auto end_products = [&] {
    group_wait<0>();
    settle(dq);
    settle(weights);
  };

  for (int n = 0; n < tiles; n++) {
    stages.take(n % STAGES, n / STAGES);
    const int key = n * KEYS;
    const uint32_t k_tile = staged + n % STAGES * 2 * TILE, v_tile = k_tile + TILE;
    float s[KEYS / 2], ds[KEYS / 2];
    group_begin();
    start_rows_times_rows<T, D, KEYS>(s, shared, k_tile);
    group_commit();
    start_rows_times_rows<T, D, KEYS>(ds, shared + KEEP, v_tile);
    group_commit();
    if (loads && n + 1 < tiles) load_keys(n + 1);
    __syncwarp();
    group_wait<1>();
    settle(s);
    if (key + KEYS > all_see) hide_after(s, row_seen[0] - key, row_seen[1] - key);
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) s[i] = exp2_fast(fmaf(s[i], scale, shift[i >> 1 & 1]));
    group_wait<0>();
    settle(ds);
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) ds[i] = s[i] * fmaf(held, ds[i], less[i >> 1 & 1]);
    round_weights<T>(weights, ds);
    settle(weights);
    group_begin();
    start_weights_times_rows<T, D, KEYS>(dq, weights, k_tile);
    group_commit();
    end_products();
    stages.give(n % STAGES);
  }
  __syncthreads();

  uint32_t bad =
    store_scaled<T, D>(dq, (float)p.factor / lift, room + (shared - base) + warp * 16 * (D * 2),
                       row_of<T>(p.dq, b, 0, h), p.dq.time, own, p.queries, stored);
  __syncwarp();
  for (; bad; bad &= bad - 1) {
    int row = own + __ffs(bad) - 1;
    if (row < p.queries) dq_row<T, float>(p, b, h, row, stored);
  }
#else
  __trap();
#endif
}

// ---- launching

template <class T, int D>
static eng_status launch(const attention_problem *p, backward_room *r, int stored)
{
  ENG_TRY(schedule_backward(r, p, ROWS, ROWS, D));
  backward_maps maps = {};
  ENG_TRY(map_rows(&maps.q, p->q, p->batch, p->queries, p->heads, D, ROWS));
  ENG_TRY(map_rows(&maps.dy, p->dy, p->batch, p->queries, p->heads, D, ROWS));
  ENG_TRY(map_rows(&maps.k, p->k, p->batch, p->keys, p->groups, D, ROWS));
  ENG_TRY(map_rows(&maps.v, p->v, p->batch, p->keys, p->groups, D, ROWS));
  const char *name = "attention_grad";
  if (p->dk.data || p->dv.data)
    ENG_TRY(launch_kernel(name, hopper_grad_keys<T, D>, r->keys.tiles * r->keys.heads, THREADS,
                          BACKWARD_BYTES<D>, *p, maps, *r, stored));
  return p->dq.data ? launch_kernel(name, hopper_grad_queries<T, D>,
                                    r->queries.tiles * r->queries.heads, THREADS,
                                    BACKWARD_BYTES<D>, *p, maps, *r, stored) :
                      ENG_OK;
}

eng_status attention_hopper_backward(const attention_problem *p, backward_room *r, int dtype,
                                     int stored)
{
  return with_heads<64, 128>(dtype, p->width, [&](auto t, auto d) {
    return launch<decltype(t), decltype(d)::value>(p, r, stored);
  });
}
