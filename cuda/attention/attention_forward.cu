// Attention forward with tensor cores: f16 and bf16, at most 128 wide. See attention.h.
//
// A block processes 128 queries of one head, 32 per warp, and iterates over the keys, 64 or 32 at a
// time, while the next keys load. With entropies and more than 96 columns, registers suffice for
// only 64 queries per block. Softmax is computed online: for each row a block keeps the largest
// score so far, the sum of the exponentials, and y. When the largest score grows, the block
// rescales the sum and y. Probabilities are rounded to the inputs' format for the product with v.
// The sums are in f32, over the unrounded probabilities. Called by attention.cu.
#include "attention_tiles.h"

// 16-query tiles per warp
template <int D, bool ENTROPY> constexpr int TALL = ENTROPY && D > 96 ? 1 : 2;
// queries of a block
template <int D, bool ENTROPY> constexpr int ROWS_OF = 16 * WARPS * TALL<D, ENTROPY>;
// keys that a block processes at a time, limited by the registers that hold their scores
template <int D> constexpr int KEYS_OF = D <= 64 ? 64 : 32;

/// Batch, head and first query of a block.
struct block_place { int b, h, first; };
template <int ROWS>
__device__ static inline block_place place_of(int block, const schedule &plan, int heads)
{
  const scheduled at = scheduled_at(plan, block);
  return {at.head / heads, at.head % heads, (plan.tiles - 1 - at.tile) * ROWS};
}

template <int D, bool ENTROPY>
constexpr int FORWARD_BYTES = (ROWS_OF<D, ENTROPY> + 4 * KEYS_OF<D>)*D * 2;

template <class T, int D, bool ENTROPY>
__global__ void __launch_bounds__(THREADS, 2)
  attention_forward_tiles(const __grid_constant__ attention_problem p, const schedule plan,
                          const int stored)
{
  if constexpr (NOT_HERE<D>) return;
  extern __shared__ __align__(1024) unsigned char room[];
  constexpr int KEYS = KEYS_OF<D>, MT = TALL<D, ENTROPY>, OWN = 16 * MT /* queries of a warp */,
                ROWS = ROWS_OF<D, ENTROPY>;
  // whether q stays in registers; with entropies, 64 columns of q do not fit
  constexpr bool HOLD_Q = D <= (ENTROPY ? 32 : 64);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;

  const block_place at = place_of<ROWS>(blockIdx.x, plan, p.heads);
  const int group = at.h / p.shared;

  const T *q = row_of<T>(p.q, at.b, 0, at.h), *k = row_of<T>(p.k, at.b, 0, group),
          *v = row_of<T>(p.v, at.b, 0, group);
  const uint32_t shared = shared_address(room);
  constexpr uint32_t TILE = KEYS * D * 2;
  const uint32_t tiles = shared + ROWS * D * 2;   // two stages of k and v
  unsigned char *own_rows = room + warp * OWN * (D * 2);

  load_tile<D, ROWS>(shared, q, p.q.time, at.first, p.queries);
  load_tile<D, KEYS>(tiles, k, p.k.time, 0, p.keys);
  load_tile<D, KEYS>(tiles + TILE, v, p.v.time, 0, p.keys);
  copy_commit();

  const float scale = (float)(p.factor * LOG2_E);
  uint32_t held[HOLD_Q ? MT : 1][D / 16][4];
  float y[MT][D / 8][4], top[MT][2], sum[MT][2], weighted[MT][2];
  clear(y);
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      top[m][half] = -INFINITY;
      sum[m][half] = weighted[m][half] = 0;
    }
  const lane_place<D> q_place = place_a<D>(shared + warp * OWN * (D * 2));

  for (int n = 0;; n++) {
    const int first = ENTROPY ? opaque(at.first) : at.first, own = first + warp * OWN;
    const int last = keys_seen(p, min(first + ROWS, p.queries) - 1);   // keys that the block sees
    if (n * KEYS >= last) break;

    const uint32_t stage = tiles + (n & 1) * 2 * TILE;
    copy_wait<0>();
    __syncthreads();   // this tile is loaded, and all warps have finished the previous tile
    if ((n + 1) * KEYS < last) {
      uint32_t next = tiles + ((n + 1) & 1) * 2 * TILE;
      load_tile<D, KEYS>(next, k, p.k.time, (n + 1) * KEYS, p.keys);
      load_tile<D, KEYS>(next + TILE, v, p.v.time, (n + 1) * KEYS, p.keys);
      copy_commit();
    }
    if (HOLD_Q && n == 0) {
#pragma unroll
      for (int m = 0; m < (HOLD_Q ? MT : 1); m++)
#pragma unroll
        for (int i = 0; i < D / 16; i++) load_matrices(held[m][i], q_place.at(16 * m, 2 * i));
    }
    // these keys are hidden from all queries of the warp
    if (n * KEYS >= keys_seen(p, min(own + OWN, p.queries) - 1)) continue;

    float s[MT][KEYS / 8][4];
    clear(s);
    if constexpr (HOLD_Q) product_of_rows<T, D, MT, KEYS / 16>(s, held, place_b<D>(stage));
    else product_of_rows<T, D, MT, KEYS / 16>(s, q_place, place_b<D>(stage));

    if ((n + 1) * KEYS > keys_seen(p, own)) {
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          int seen = keys_seen(p, own + 16 * m + 8 * half + g) - n * KEYS - 2 * t;
#pragma unroll
          for (int i = 0; i < KEYS / 8; i++) {
            if (8 * i >= seen) s[m][i][2 * half] = -INFINITY;
            if (8 * i + 1 >= seen) s[m][i][2 * half + 1] = -INFINITY;
          }
        }
    }

    uint32_t weights[MT][KEYS / 8][2];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float largest = top[m][half], before = largest;
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++)
          largest = fmaxf(largest, fmaxf(s[m][i][2 * half], s[m][i][2 * half + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
        top[m][half] = largest;
        // While all scores of a row are -inf, the sum of their exponentials must stay 0. With a
        // shift of inf, each term would be exp(-inf + inf), which is NaN.
        float shift = largest == -INFINITY ? 0.0f : -largest * scale,
              raised = shift + (float)RAISE<T>;
        float keep = exp2_fast(fmaf(before, scale, shift)), part = 0, part_weighted = 0;
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++) {
          float e[2];
#pragma unroll
          for (int c = 0; c < 2; c++) {
            float score = s[m][i][2 * half + c];
            e[c] = exp2_fast(fmaf(score, scale, raised));
            part += e[c];
            if (ENTROPY) part_weighted += e[c] == 0 ? 0.0f : e[c] * fmaf(score, scale, shift);
          }
          weights[m][i][half] = rounded_pair(T(), e[0], e[1]);
        }
        if (ENTROPY) {
          float moved = keep == 0 ?
                          0.0f :
                          keep * fmaf(fmaf(before, scale, shift), sum[m][half], weighted[m][half]);
          weighted[m][half] = moved + part_weighted;
        }
        sum[m][half] = fmaf(sum[m][half], keep, part);
#pragma unroll
        for (int d = 0; d < D / 8; d++) {
          y[m][d][2 * half] *= keep;
          y[m][d][2 * half + 1] *= keep;
        }
      }
    product_with_rows<T, D, MT, KEYS / 16>(y, weights, place_turned<D>(stage + TILE));
  }
  copy_wait<0>();
  const block_place to = place_of<ROWS>(opaque((int)blockIdx.x), plan, p.heads);
  const int own = to.first + warp * OWN;
  __syncthreads();   // y will overwrite q, whose copy must have ended even if no key was seen

#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int row = own + 16 * m + 8 * half + g;
      float total = sum[m][half], entropy = weighted[m][half];
      total += __shfl_xor_sync(0xFFFFFFFFu, total, 1);
      total += __shfl_xor_sync(0xFFFFFFFFu, total, 2);
      if (ENTROPY) {
        entropy += __shfl_xor_sync(0xFFFFFFFFu, entropy, 1);
        entropy += __shfl_xor_sync(0xFFFFFFFFu, entropy, 2);
      }
      bool blind = keys_seen(p, row) == 0;
      float inverse = 1.0f / total;
#pragma unroll
      for (int d = 0; d < D / 8; d++) {
        y[m][d][2 * half] = blind ? 0.0f : y[m][d][2 * half] * inverse;
        y[m][d][2 * half + 1] = blind ? 0.0f : y[m][d][2 * half + 1] * inverse;
      }
      if (t == 0 && row < p.queries)
        store_statistics<T, ENTROPY>(p, to.b, to.h, row, blind, top[m][half], total, entropy);
    }
  __syncwarp();
  uint32_t bad = store_rows<T, D, MT>(y, own_rows, row_of<T>(p.y, to.b, 0, to.h), p.y.time, own,
                                      p.queries, stored);
  __syncwarp();
  for (; bad; bad &= bad - 1) {
    int row = own + __ffs(bad) - 1;
    if (row < p.queries) forward_row<T, float>(p, to.b, to.h, row, stored);
  }
}

template <class T, int D, bool ENTROPY>
static eng_status launch(const attention_problem *p, int stored)
{
  schedule plan;
  ENG_TRY(schedule_of(&plan, p, ROWS_OF<D, ENTROPY>, D));
  return launch_kernel("attention", attention_forward_tiles<T, D, ENTROPY>, plan.tiles * plan.heads,
                       THREADS, FORWARD_BYTES<D, ENTROPY>, *p, plan, stored);
}

template <class T, int D> static eng_status forward(const attention_problem *p, int stored)
{ return p->entropy ? launch<T, D, true>(p, stored) : launch<T, D, false>(p, stored); }

eng_status attention_forward(const attention_problem *p, int dtype, int stored)
{
  return with_heads<32, 64, 96, 128>(dtype, p->width, [&](auto t, auto d) {
    return forward<decltype(t), decltype(d)::value>(p, stored);
  });
}
