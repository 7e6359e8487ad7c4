// Attention forward on Hopper (sm_90a): f16 and bf16, 64 or 128 wide. See attention.h. This file
// computes the same numbers as attention_forward.cu, in the same order of keys, with the same rules
// for infinities and masks.
//
// A block processes 128 queries of one head, 64 in each of its two warpgroups, and iterates over
// the keys while the next keys load. wgmma is asynchronous: while the warps turn the scores of one
// tile of keys into probabilities, the tensor cores multiply the previous tile's probabilities by
// its values.
#include "attention_hopper.h"

template <int D> constexpr int KEYS_OF = D == 64 ? 64 : 128;        // keys at a time
// blocks that fit into a multiprocessor's registers
template <int D, bool ENTROPY> constexpr int BLOCKS_OF = D == 64 && !ENTROPY ? 2 : 1;
template <int D> constexpr int HOPPER_BYTES = (ROWS + 4 * KEYS_OF<D>) * D * 2 + 1024;

#if HOPPER_BODY
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
#endif

template <class T, int D, bool ENTROPY>
__global__ void __launch_bounds__(BLOCK, BLOCKS_OF<D, ENTROPY>)
  hopper_tiles(const __grid_constant__ attention_problem p, const schedule plan, const int stored)
{
#if HOPPER_BODY
  extern __shared__ __align__(1024) unsigned char room[];
  constexpr int KEYS = KEYS_OF<D>;
  constexpr uint32_t TILE = KEYS * D * 2;
  // The shuffle tells the compiler that `warp` is the same in all lanes. wgmma is not allowed in
  // branches that may diverge.
  const int warp = __shfl_sync(0xFFFFFFFFu, (int)threadIdx.x >> 5, 0), part = warp >> 2;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;

  int set = blockIdx.x / (plan.tiles * plan.together),
      rest = blockIdx.x % (plan.tiles * plan.together);
  int width = min(plan.together, plan.heads - set * plan.together);
  int pair = set * plan.together + rest % width, b = pair / p.heads, h = pair % p.heads,
      group = h / p.shared;
  // the first query of the block, of the warpgroup and of the warp
  int t0 = (plan.tiles - 1 - rest / width) * ROWS, first = t0 + part * 64, own = t0 + warp * 16;

  const T *k = row_of<T>(p.k, b, 0, group), *v = row_of<T>(p.v, b, 0, group);
  const int last = keys_seen(p, min(t0 + ROWS, p.queries) - 1), all_see = keys_seen(p, first);
  // The block processes `tiles` tiles of keys and the warpgroup `own_tiles`, at least one each,
  // even if all keys are hidden.
  const int tiles = max(1, (last + KEYS - 1) / KEYS),
            own_last = first < p.queries ? keys_seen(p, min(first + 64, p.queries) - 1) : 0;
  const int own_tiles = max(1, (own_last + KEYS - 1) / KEYS);
  const uint32_t shared = (shared_address(room) + 1023) & ~1023u;
  const uint32_t q_tile = shared, k_tiles = shared + ROWS * D * 2, v_tiles = k_tiles + 2 * TILE;
  const float scale = (float)(p.factor * LOG2_E);

  // Two groups of copies: the tiles that the first scores need, then the other tiles of round 0.
  load_rows<D, ROWS>(q_tile, row_of<T>(p.q, b, 0, h), p.q.time, t0, p.queries);
  load_rows<D, KEYS>(k_tiles, k, p.k.time, 0, p.keys);
  copy_commit();
  if (tiles > 1) load_rows<D, KEYS>(k_tiles + TILE, k, p.k.time, KEYS, p.keys);
  load_rows<D, KEYS>(v_tiles, v, p.v.time, 0, p.keys);
  copy_commit();

  float y[D / 2], s[KEYS / 2], keep[2];
  uint32_t weights[KEYS / 16][4];
  running r = {{-INFINITY, -INFINITY}, {0, 0}, {0, 0}};
#pragma unroll
  for (int i = 0; i < D / 2; i++) y[i] = 0;
#pragma unroll
  for (int i = 0; i < KEYS / 16; i++)
    weights[i][0] = weights[i][1] = weights[i][2] = weights[i][3] = 0;

  copy_wait<1>();
  publish_shared();
  __syncthreads();
  const uint32_t own_q = q_tile + part * 64 * 128;
  group_begin();
  start_rows_times_rows<T, D, KEYS>(s, own_q, k_tiles);
  group_commit();
  group_wait<0>();
  settle(s);
  if (KEYS > all_see) hide_after(s, keys_seen(p, own + g), keys_seen(p, own + g + 8));
  weigh<T, ENTROPY>(s, &r, keep, scale);

  int n = 0;
  auto next_tiles = [&] {
    copy_wait<0>();
    publish_shared();
    // key tile n + 1 and value tile n are loaded; all warps are done with keys n and values n - 1
    __syncthreads();
    if (n + 2 < tiles)
      load_rows<D, KEYS>(k_tiles + (n & 1) * TILE, k, p.k.time, (n + 2) * KEYS, p.keys);
    if (n + 1 < tiles)
      load_rows<D, KEYS>(v_tiles + ((n + 1) & 1) * TILE, v, p.v.time, (n + 1) * KEYS, p.keys);
    copy_commit();
  };
  // Waits for the previous round's product with values, then rescales y. Each round begins with
  // this wait, because the compiler moves a wait up as far as the loop allows.
  auto end_values = [&] {
    group_wait<0>();
    settle(y);
    settle(weights);
#pragma unroll
    for (int i = 0; i < D / 2; i++) y[i] *= keep[i >> 1 & 1];
  };
  for (; n + 1 < own_tiles; n++) {
    end_values();
    next_tiles();
    round_weights<T>(weights, s);
    group_begin();
    start_rows_times_rows<T, D, KEYS>(s, own_q, k_tiles + ((n + 1) & 1) * TILE);
    group_commit();
    start_weights_times_rows<T, D, KEYS>(y, weights, v_tiles + (n & 1) * TILE);
    group_commit();
    group_wait<1>();
    settle(s);
    if ((n + 2) * KEYS > all_see)
      hide_after(s, keys_seen(p, own + g) - (n + 1) * KEYS,
                 keys_seen(p, own + g + 8) - (n + 1) * KEYS);
    weigh<T, ENTROPY>(s, &r, keep, scale);
  }
  end_values();
  next_tiles();
  round_weights<T>(weights, s);
  group_begin();
  start_weights_times_rows<T, D, KEYS>(y, weights, v_tiles + (n & 1) * TILE);
  group_commit();
  group_wait<0>();
  settle(y);
  settle(weights);
  // these tiles are hidden from the queries of this warpgroup, but the other warpgroup sees them
  for (n++; n < tiles; n++) next_tiles();
  copy_wait<0>();
  __syncthreads();   // all reads of q are done, so y can take its place

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
  uint32_t bad =
    store_rows<T, D, 1>(rows, room + (shared - shared_address(room)) + warp * 16 * (D * 2),
                        row_of<T>(p.y, b, 0, h), p.y.time, own, p.queries, stored);
  __syncwarp();
  for (; bad; bad &= bad - 1) {
    int row = own + __ffs(bad) - 1;
    if (row < p.queries) forward_row<T, float>(p, b, h, row, stored);
  }
#else
  __trap();   // reached only in a build for sm_90 instead of sm_90a
#endif
}

template <class T, int D> static eng_status forward(const attention_problem *p, int stored)
{
  auto kernel = p->entropy ? hopper_tiles<T, D, true> : hopper_tiles<T, D, false>;
  CUDA_TRY(
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, HOPPER_BYTES<D>));
  schedule plan;
  ENG_TRY(schedule_of(&plan, p, ROWS, D));
  kernel<<<(unsigned)(plan.tiles * plan.heads), BLOCK, HOPPER_BYTES<D>, cuda_stream()>>>(
    *p, plan, stored);
  CUDA_LAUNCHED("attention");
  return ENG_OK;
}

eng_status attention_forward_hopper(const attention_problem *p, int dtype, int stored)
{
  if (dtype == ENG_f16)
    return p->width == 64 ? forward<f16_t, 64>(p, stored) : forward<f16_t, 128>(p, stored);
  return p->width == 64 ? forward<bf16_t, 64>(p, stored) : forward<bf16_t, 128>(p, stored);
}
