// Attention forward on Hopper (sm_90a): f16 and bf16, 64 or 128 wide. See attention.h. This file
// computes the same numbers as attention_forward.cu, in the same order of keys, with the same rules
// for infinities and masks.
//
// Each multiprocessor runs at most one block, which computes items until none is left. An item is
// 128 (D = 128) or 192 (D = 64) queries of one head. One warpgroup only loads: each of its four
// warps fills one of four buffers, two for tiles of keys and two for tiles of values, as soon as
// that buffer is empty. Each other warpgroup computes 64 queries. Barriers in shared memory
// announce full and empty buffers, so no barrier stops all warps, and the next item loads while one
// ends.
//
// wgmma is asynchronous: while the warps turn the scores of one tile of keys into probabilities,
// the tensor cores multiply the previous tile's probabilities by its values. The warpgroups start
// their products in turns, so that one computes probabilities while others use the tensor cores.
#include "attention_hopper.h"

enum { KEYS = 128 };   // keys at a time
// warpgroups that compute, and their queries
template <int D> constexpr int COMPUTING = D == 64 ? 3 : 2;
template <int D> constexpr int QUERIES_OF = 64 * COMPUTING<D>;
template <int D> constexpr int THREADS_OF = 128 * (COMPUTING<D> + 1);
// Buffers in shared memory: 0 and 1 hold keys, 2 and 3 values, 4 and 5 queries (later y).
enum { BUFFERS = 6, LOADERS = 4, VALUES_IN = 2, QUERIES_IN = 4 };
template <int D> constexpr uint32_t TILE = KEYS * D * 2;
template <int D> constexpr uint32_t QUERY_TILE = QUERIES_OF<D> * D * 2;
template <int D> constexpr uint32_t BARRIERS_AT = 4 * TILE<D> + 2 * QUERY_TILE<D>;
template <int D> constexpr int HOPPER_BYTES = BARRIERS_AT<D> + BUFFERS * 16 + 24 + 1024;

// The number of requests for items. A block gets its first item without a request, and its last
// request finds no item left. So a launch makes as many requests as it has items. The last of them
// sets the number back to 0.
static __device__ unsigned requests;

#if HOPPER_BODY
/// An item of work: QUERIES_OF<D> queries, from `first` on, of head b * H + h, and the number of
/// tiles of keys that they see, at least one.
typedef struct item { int head, first, tiles; } item;

template <int D>
__device__ static inline item item_of(const attention_problem &p, const schedule &plan, int n)
{
  const scheduled at = scheduled_at(plan, n);
  const int first = (plan.tiles - 1 - at.tile) * QUERIES_OF<D>;   // most keys first
  const int last = keys_seen(p, min(first + QUERIES_OF<D>, p.queries) - 1);
  return {at.head, first, max(1, (last + KEYS - 1) / KEYS)};
}

/// A block's shared memory. Buffer i has the barriers full(i) and empty(i). Its uses are numbered
/// from 0, and each use is a phase of both barriers.
template <int D> struct buffers {
  uint32_t base;
  unsigned char *memory;   // the same as a pointer
  __device__ uint32_t at(int i) const
  { return base + (i < QUERIES_IN ? i * TILE<D> : 4 * TILE<D> + (i - QUERIES_IN) * QUERY_TILE<D>); }
  __device__ uint32_t full(int i) const { return base + BARRIERS_AT<D> + i * 16; }
  __device__ uint32_t empty(int i) const { return full(i) + 8; }
  /// The number of the block's item in a round, and the barrier that announces it.
  __device__ int *number(int round) const
  { return (int *)(memory + BARRIERS_AT<D> + BUFFERS * 16) + (round & 1); }
  __device__ uint32_t announced(int round) const { return full(BUFFERS) + 8 + 8 * (round & 1); }
  __device__ int await_number(int round) const
  {
    barrier_wait(announced(round), round >> 1 & 1);
    return *number(round);
  }
  /// The loading side: waits until the buffer is empty; publishes it after loading.
  __device__ void claim(int i, int use) const { barrier_wait(empty(i), ~use & 1); }
  __device__ void publish(int i) const
  {
    copy_commit();
    copy_wait<0>();
    publish_shared();
    barrier_arrive(full(i), true);
  }
  /// The computing side: waits until the buffer is full; gives it back, once per warp.
  __device__ void take(int i, int use) const { barrier_wait(full(i), use & 1); }
  __device__ void give(int i, bool really = true) const
  { barrier_arrive(empty(i), really && threadIdx.x % 32 == 0); }
};

/// The work of loading warp `warp` (0 to 3): it fills buffer `warp`, and loads a quarter of the
/// queries of each item. Warp 0 also requests the items.
template <class T, int D>
__device__ static inline void load_items(const attention_problem &p, const schedule &plan,
                                         const buffers<D> room, int warp)
{
  constexpr int QUARTER = QUERIES_OF<D> / LOADERS;
  const attention_view &from = warp < 2 ? p.k : p.v;
  const int items = plan.tiles * plan.heads;
  int done = 0;   // tiles of earlier items
  for (int round = 0;; round++) {
    const int q = QUERIES_IN + (round & 1);
    room.claim(q, round >> 1);   // so all warps have read the number of round - 2
    if (warp == 0 && threadIdx.x % 32 == 0) {
      unsigned n = blockIdx.x;
      if (round > 0) {
        n = gridDim.x + atomicAdd(&requests, 1u);
        if (n == gridDim.x + items - 1) requests = 0;
      }
      *room.number(round) = (int)n;
      barrier_arrive(room.announced(round), true);
    }
    const int number = room.await_number(round);
    if (number >= items) break;
    const item x = item_of<D>(p, plan, number);
    const int b = x.head / p.heads, h = x.head % p.heads;
    load_rows_by_warp<D, QUARTER, QUERIES_OF<D>>(room.at(q) + warp * QUARTER * 128,
                                                 row_of<T>(p.q, b, 0, h), p.q.time,
                                                 x.first + warp * QUARTER, p.queries);
    room.publish(q);
    for (int n = (done ^ warp) & 1; n < x.tiles; n += 2) {
      room.claim(warp, (done + n) >> 1);
      load_rows_by_warp<D, KEYS, KEYS>(room.at(warp), row_of<T>(from, b, 0, h / p.shared),
                                       from.time, n * KEYS, p.keys);
      room.publish(warp);
    }
    done += x.tiles;
  }
}

/// Running softmax state of a thread's two rows: the largest score, the sum of e (exponentials
/// times 2^RAISE) and, for entropies, the sum of e * log2(e / 2^RAISE).
typedef struct running { float top[2], sum[2], weighted[2]; } running;

/// Turns scores into unnormalized probabilities times 2^RAISE and updates *r. Sets `keep` to the
/// factor that rescales y.
template <class T, bool ENTROPY, int N>
__device__ static inline void weigh(float (&s)[N], running *r, float (&keep)[2], float scale)
{
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float largest = r->top[half];
#pragma unroll
    for (int i = 0; i < N / 4; i++)
      largest = fmaxf(largest, fmaxf(s[4 * i + 2 * half], s[4 * i + 2 * half + 1]));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
    float shift = largest == -INFINITY ? 0.0f : -largest * scale, raised = shift + (float)RAISE<T>,
          part = 0, part_weighted = 0;
    // log2 of the factor that rescales the sums so far to the new largest score
    const float fallen = fmaf(r->top[half], scale, shift);
    keep[half] = exp2_fast(fallen);
    r->top[half] = largest;
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
#pragma unroll
      for (int c = 0; c < 2; c++) {
        float &e = s[4 * i + 2 * half + c];
        const float log = ENTROPY ? fmaf(e, scale, shift) : 0.0f;
        e = exp2_fast(fmaf(e, scale, raised));
        part += e;
        // clamps log, which is -inf where e is 0, so that the term is 0 there
        if (ENTROPY) part_weighted = fmaf(e, fmaxf(log, -200.0f), part_weighted);
      }
    }
    if (ENTROPY)
      r->weighted[half] =
        (keep[half] == 0 ? 0.0f : keep[half] * fmaf(fallen, r->sum[half], r->weighted[half])) +
        part_weighted;
    r->sum[half] = fmaf(r->sum[half], keep[half], part);
  }
}

/// Divides a warp's rows of y by the sums and stores them, lse and entropy, using the shared memory
/// `tile`. Returns the rows to recompute, as store_rows does.
template <class T, int D, bool ENTROPY>
__device__ static inline uint32_t finish_rows(const float (&y)[D / 2], const running &r,
                                              const attention_problem &p, int b, int h, int own,
                                              unsigned char *tile, int stored)
{
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  float rows[1][D / 8][4];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int row = own + 8 * half + g;
    float total = r.sum[half];
    total += __shfl_xor_sync(0xFFFFFFFFu, total, 1);
    total += __shfl_xor_sync(0xFFFFFFFFu, total, 2);
    float entropy = r.weighted[half];
    if (ENTROPY) {
      entropy += __shfl_xor_sync(0xFFFFFFFFu, entropy, 1);
      entropy += __shfl_xor_sync(0xFFFFFFFFu, entropy, 2);
    }
    bool blind = keys_seen(p, row) == 0, lost = total == 0;   // lost: every score is -inf
    float inverse = 1.0f / total;
#pragma unroll
    for (int d = 0; d < D / 8; d++)
#pragma unroll
      for (int c = 0; c < 2; c++)
        rows[0][d][2 * half + c] = blind ? 0.0f : y[4 * d + 2 * half + c] * inverse;
    if (t == 0 && row < p.queries) {
      const int64_t line = line_of(p, b, h, row);
      const float log_sum = logf(total) - RAISE<T> * LN_2;
      if (p.lse)
        ((float *)p.lse)[line] = blind ? -INFINITY :
                                 lost  ? NAN :
                                         fmaf(r.top[half], (float)p.factor, log_sum);
      if (ENTROPY)
        ((float *)p.entropy)[line] = blind ? 0.0f :
                                     lost  ? NAN :
                                             log_sum - LN_2 * (entropy / total);
    }
  }
  return store_rows<T, D, 1>(rows, tile, row_of<T>(p.y, b, 0, h), p.y.time, own, p.queries,
                            stored);
}

/// The work of a computing warp.
template <class T, int D, bool ENTROPY>
__device__ static inline void compute_items(const attention_problem &p, const schedule &plan,
                                            const buffers<D> room, int warp, int stored)
{
  const int part = warp >> 2, g = (threadIdx.x & 31) >> 2;
  const float scale = (float)(p.factor * LOG2_E);
  // A warpgroup waits for its turn before it starts a tile's products, and then passes the turn to
  // the next warpgroup. All warpgroups must take the same number of turns: n - 1 for an item of
  // n tiles. If all keys of a tile are hidden from a warpgroup's queries, the warpgroup takes the
  // turn and passes it on without computing.
  auto await_turn = [&] { group_meet(1 + part, 256); };
  auto pass_turn = [&] { group_pass(1 + (part + 1) % COMPUTING<D>, 256); };
  if (part == COMPUTING<D> - 1) pass_turn();

  int n = 0;   // tiles so far; tile n is use n >> 1 of the buffers n & 1 and VALUES_IN + (n & 1)
  for (int round = 0;; round++) {
    const int number = room.await_number(round);
    if (number >= plan.tiles * plan.heads) break;
    const item x = item_of<D>(p, plan, number);
    // the first query of the warpgroup and of the warp
    const int first = x.first + part * 64, own = x.first + warp * 16;
    const int own_last = first < p.queries ? keys_seen(p, min(first + 64, p.queries) - 1) : 0;
    const int start = n, end = n + x.tiles, own_end = n + max(1, (own_last + KEYS - 1) / KEYS),
              hidden = n + keys_seen(p, first) / KEYS;   // the first tile with hidden keys
    const int q = QUERIES_IN + (round & 1);
    const uint32_t own_q = room.at(q) + part * 64 * 128;
    auto take_keys = [&](int n) { room.take(n & 1, n >> 1); };
    auto take_values = [&](int n) { room.take(VALUES_IN + (n & 1), n >> 1); };

    float y[D / 2], s[KEYS / 2], keep[2];
    uint32_t weights[KEYS / 16][4];
    running r = {{-INFINITY, -INFINITY}, {0, 0}, {0, 0}};
#pragma unroll
    for (int i = 0; i < D / 2; i++) y[i] = 0;
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
      weights[i][0] = weights[i][1] = weights[i][2] = weights[i][3] = 0;

    room.take(q, round >> 1);
    take_keys(n);
    group_begin();
    start_rows_times_rows<T, D, KEYS, QUERIES_OF<D>>(s, own_q, room.at(n & 1));
    group_commit();
    group_wait<0>();
    settle(s);
    room.give(n & 1);
    if (n >= hidden) hide_after(s, keys_seen(p, own + g), keys_seen(p, own + g + 8));
    weigh<T, ENTROPY>(s, &r, keep, scale);

    // Waits for the previous tile's product with values, then rescales y. The loop below has this
    // wait at the start of a round, because the compiler would move a wait at the end of a round up
    // to an earlier place in the round.
    auto end_values = [&] {
      group_wait<0>();
      settle(y);
      settle(weights);
      room.give(VALUES_IN + (~n & 1), n > start);
#pragma unroll
      for (int i = 0; i < D / 2; i++) y[i] *= keep[i >> 1 & 1];
    };
    for (; n + 1 < own_end; n++) {
      end_values();
      round_weights<T>(weights, s);
      take_keys(n + 1);
      take_values(n);
      await_turn();
      group_begin();
      start_rows_times_rows<T, D, KEYS, QUERIES_OF<D>>(s, own_q, room.at(~n & 1));
      group_commit();
      start_weights_times_rows<T, D, KEYS>(y, weights, room.at(VALUES_IN + (n & 1)));
      group_commit();
      pass_turn();
      group_wait<1>();
      settle(s);
      room.give(~n & 1);
      const int key = (n + 1 - start) * KEYS;
      if (n + 1 >= hidden)
        hide_after(s, keys_seen(p, own + g) - key, keys_seen(p, own + g + 8) - key);
      weigh<T, ENTROPY>(s, &r, keep, scale);
    }
    end_values();
    round_weights<T>(weights, s);
    take_values(n);
    group_begin();
    start_weights_times_rows<T, D, KEYS>(y, weights, room.at(VALUES_IN + (n & 1)));
    group_commit();
    group_wait<0>();
    settle(y);
    settle(weights);
    room.give(VALUES_IN + (n & 1));
    // these tiles are hidden from the queries of this warpgroup, but other warpgroups see them
    for (n++; n < end; n++) {
      await_turn();
      pass_turn();
      take_keys(n);
      room.give(n & 1);
      take_values(n);
      room.give(VALUES_IN + (n & 1));
    }

    // The warpgroup no longer needs its rows of q, 64 rows in each tile of 64 columns. Its four
    // warps divide this memory among them and use it for y.
    group_meet(1 + COMPUTING<D> + part, 128);
    const int bytes = warp % 4 * 16 * D * 2,
              place = bytes / (64 * 128) * (QUERIES_OF<D> * 128) + bytes % (64 * 128);
    const int b = x.head / p.heads, h = x.head % p.heads;
    uint32_t bad = finish_rows<T, D, ENTROPY>(y, r, p, b, h, own,
                                              room.memory + (own_q - room.base) + place, stored);
    __syncwarp();
    room.give(q);
    for (; bad; bad &= bad - 1) {
      int row = own + __ffs(bad) - 1;
      if (row < p.queries) forward_row<T, float>(p, b, h, row, stored);
    }
  }
  if (part == 0) await_turn();   // the turn that was passed last
}
#endif

template <class T, int D, bool ENTROPY>
__global__ void __launch_bounds__(THREADS_OF<D>, 1)
  hopper_tiles(const __grid_constant__ attention_problem p, const schedule plan, const int stored)
{
#if HOPPER_BODY
  extern __shared__ __align__(1024) unsigned char memory[];
  // The shuffle tells the compiler that `warp` is the same in all lanes. wgmma is not allowed in
  // branches that may diverge.
  const int warp = __shfl_sync(0xFFFFFFFFu, (int)threadIdx.x >> 5, 0);
  const uint32_t start = shared_address(memory);
  const uint32_t base = (start + 1023) & ~1023u;
  const buffers<D> room = {base, memory + (base - start)};
  if (threadIdx.x == 0)
    for (int i = 0; i < BUFFERS; i++) {
      barrier_init(room.full(i), i < QUERIES_IN ? 32 : 32 * LOADERS);
      barrier_init(room.empty(i), 4 * COMPUTING<D>);
    }
  if (threadIdx.x < 2) barrier_init(room.announced(threadIdx.x), 1);
  __syncthreads();
  // the registers of a multiprocessor, divided between the two kinds of warpgroups
  if (warp >= 4 * COMPUTING<D>) {
    fewer_registers<D == 64 ? 32 : 40>();
    load_items<T, D>(p, plan, room, warp - 4 * COMPUTING<D>);
  } else {
    more_registers<D == 64 ? 160 : 232>();
    compute_items<T, D, ENTROPY>(p, plan, room, warp, stored);
  }
#else
  atomicAdd(&requests, 0u);   // keeps the variable in builds for other architectures
  __trap();                   // reached only in a build for sm_90 instead of sm_90a
#endif
}

template <class T, int D> static eng_status forward(const attention_problem *p, int stored)
{
  auto kernel = p->entropy ? hopper_tiles<T, D, true> : hopper_tiles<T, D, false>;
  schedule plan;
  ENG_TRY(schedule_of(&plan, p, QUERIES_OF<D>, D));
  const int items = plan.tiles * plan.heads, most = cuda_multiprocessors();
  return launch_kernel("attention", kernel, items < most ? items : most, THREADS_OF<D>,
                       HOPPER_BYTES<D>, *p, plan, stored);
}

eng_status attention_forward_hopper(const attention_problem *p, int dtype, int stored)
{
  if (dtype == ENG_f16)
    return p->width == 64 ? forward<f16_t, 64>(p, stored) : forward<f16_t, 128>(p, stored);
  return p->width == 64 ? forward<bf16_t, 64>(p, stored) : forward<bf16_t, 128>(p, stored);
}
