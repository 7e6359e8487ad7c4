// Attention forward on Hopper (sm_90a): f16 and bf16, 64 or 128 wide. See attention.h. This file
// computes the same outputs as attention_forward.cu. The order of keys and the rules for infinities
// and masks are the same too, but tiles have other sizes, so the last bits may differ.
//
// A block is two warpgroups, each with 64 queries of one head. Two blocks share a multiprocessor.
// They do not wait for each other: while one uses the tensor cores, the other computes
// probabilities, loads its first tiles or stores its results. A tile's probabilities are computed
// in four parts, and the product of one part with values runs while the next part is computed.
//
// The hardware copies tiles to shared memory when the block's first thread asks for them: two
// buffers for tiles of keys and two for tiles of values. Barriers announce full and empty buffers,
// so that one warpgroup can be ahead of the other. Called by attention.cu and
// attention_hopper_backward.cu.
#include <cudaTypedefs.h>

#include "attention_hopper.h"

eng_status map_rows(CUtensorMap *map, const attention_view &view, int batch, int time, int heads,
                    int width, int rows)
{
  // a function of the driver, which this library does not link
  static PFN_cuTensorMapEncodeTiled_v12000 encode;
  if (!encode) {
    cudaDriverEntryPointQueryResult found;
    CUDA_TRY(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void **)&encode, 12000,
                                              cudaEnableDefault, &found));
    FAIL_IF(!encode, ENG_ERR_DEVICE, "attention: expected a driver that has "
            "cuTensorMapEncodeTiled; hint: update NVIDIA's driver");
  }
  if (batch == 0 || time == 0 || heads == 0) return ENG_OK;
  // The stride of a dimension of size 1 is never used, but must be valid.
  auto bytes = [](int size, int64_t stride) { return size == 1 ? 16 : (cuuint64_t)(2 * stride); };
  const cuuint64_t sizes[4] = {(cuuint64_t)width, (cuuint64_t)time, (cuuint64_t)heads,
                               (cuuint64_t)batch},
                   strides[3] = {bytes(time, view.time), bytes(heads, view.head),
                                 bytes(batch, view.batch)};
  const cuuint32_t box[4] = {64, (cuuint32_t)rows, 1, 1}, steps[4] = {1, 1, 1, 1};
  const CUresult result =
    encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, view.data, sizes, strides, box, steps,
           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? ENG_OK :
                                  error_set(ENG_ERR_DEVICE,
                                            "attention: cuTensorMapEncodeTiled failed with "
                                            "CUresult %d for a tensor [%d x %d x %d x %d]",
                                            (int)result, batch, time, heads, width);
}

typedef struct forward_maps { CUtensorMap q, k, v; } forward_maps;

enum { GROUPS = 2, ROWS = 64 };   // warpgroups of a block, and the queries of each
enum { BUFFERS = 4, KEYS_IN = 0, VALUES_IN = 2 };   // two buffers hold keys, two values
// keys in a tile, limited by the registers that hold their scores
template <int D> constexpr int KEYS_OF = D == 64 ? 128 : 64;
// Size of shared memory in bytes. It holds the queries (later y), the buffers, and two barriers for
// each buffer. The last 1024 bytes leave room to align the tiles to 1024 bytes.
template <int D>
constexpr int HOPPER_BYTES = (GROUPS * ROWS + BUFFERS * KEYS_OF<D>)*D * 2 + BUFFERS * 16 + 1024;

#if HOPPER_BODY
/// Running softmax state of a thread's two rows: the largest score, the sum of e (exponentials
/// times 2^RAISE) and, for entropies, the sum of e * log2(e / 2^RAISE).
typedef struct running { float top[2], sum[2], weighted[2]; } running;

/// Raises r->top to the largest of the scores s. Sets `shift` so that 2^(s * scale + shift) is an
/// unnormalized probability, and `keep` to the factor that rescales the sums of earlier tiles.
/// Rescales r->weighted.
template <bool ENTROPY, int N>
__device__ static inline void raise_top(const float (&s)[N], running *r, float (&shift)[2],
                                        float (&keep)[2], float scale)
{
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float largest = r->top[half];
#pragma unroll
    for (int i = 0; i < N / 4; i++)
      largest = fmaxf(largest, fmaxf(s[4 * i + 2 * half], s[4 * i + 2 * half + 1]));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
    shift[half] = largest == -INFINITY ? 0.0f : -largest * scale;
    const float fallen = fmaf(r->top[half], scale, shift[half]);   // log2 of keep
    keep[half] = exp2_fast(fallen);
    r->top[half] = largest;
    if (ENTROPY)
      r->weighted[half] =
        keep[half] == 0 ? 0.0f : keep[half] * fmaf(fallen, r->sum[half], r->weighted[half]);
  }
}

/// Turns one of PARTS parts of the scores into unnormalized probabilities times 2^RAISE, and adds
/// them to `tile`.
template <class T, bool ENTROPY, int PARTS, int N>
__device__ static inline void weigh(float (&s)[N], int part, const float (&shift)[2],
                                    running *tile, float scale)
{
  constexpr int EACH = N / 4 / PARTS;
#pragma unroll
  for (int i = part * EACH; i < (part + 1) * EACH; i++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float raised = shift[half] + (float)RAISE<T>;
#pragma unroll
      for (int c = 0; c < 2; c++) {
        float &e = s[4 * i + 2 * half + c];
        const float log = ENTROPY ? fmaf(e, scale, shift[half]) : 0.0f;
        e = exp2_fast(fmaf(e, scale, raised));
        tile->sum[half] += e;
        // clamps log, which is -inf where e is 0, so that the term is 0 there
        if (ENTROPY) tile->weighted[half] = fmaf(e, fmaxf(log, -200.0f), tile->weighted[half]);
      }
    }
}

/// Divides a warp's rows of y by the sums. Stores y and, if wanted, lse and entropy. `tile` is
/// shared memory of this warp alone, through which y goes. Returns the rows to recompute, as
/// store_rows does.
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
    bool blind = keys_seen(p, row) == 0;
    float inverse = 1.0f / total;
#pragma unroll
    for (int d = 0; d < D / 8; d++)
#pragma unroll
      for (int c = 0; c < 2; c++)
        rows[0][d][2 * half + c] = blind ? 0.0f : y[4 * d + 2 * half + c] * inverse;
    if (t == 0 && row < p.queries)
      store_statistics<T, ENTROPY>(p, b, h, row, blind, r.top[half], total, entropy);
  }
  return store_rows<T, D, 1>(rows, tile, row_of<T>(p.y, b, 0, h), p.y.time, own, p.queries,
                            stored);
}

#endif

template <class T, int D, bool ENTROPY>
__global__ void __launch_bounds__(128 * GROUPS, 2)
  hopper_rows(const __grid_constant__ attention_problem p,
              const __grid_constant__ forward_maps maps, const schedule plan, const int stored)
{
#if HOPPER_BODY
  extern __shared__ __align__(1024) unsigned char room[];
  constexpr int KEYS = KEYS_OF<D>, PARTS = 4;
  constexpr uint32_t TILE = KEYS * D * 2, OWN = ROWS * D * 2;
  // The shuffle tells the compiler that `warp` is the same in all lanes. wgmma is not allowed in
  // branches that may diverge.
  const int warp = __shfl_sync(0xFFFFFFFFu, (int)threadIdx.x >> 5, 0), group = warp >> 2;
  const int g = (threadIdx.x & 31) >> 2;
  const bool loads = threadIdx.x == 0;
  const scheduled at = scheduled_at(plan, blockIdx.x);
  const int b = at.head / p.heads, h = at.head % p.heads, key_head = h / p.shared;
  // the first query of the block, of the warpgroup and of the warp; blocks with the most keys go
  // first
  const int block_first = (plan.tiles - 1 - at.tile) * GROUPS * ROWS,
            first = block_first + group * ROWS, own = block_first + warp * 16;
  auto seen_before = [&](int row) { return keys_seen(p, min(row, p.queries) - 1); };
  auto tiles_of = [&](int keys) { return (keys + KEYS - 1) / KEYS; };
  // The first warpgroup may see one tile fewer than the block. It then leaves the loop one turn
  // earlier.
  const int tiles = tiles_of(seen_before(first + ROWS)),
            block_tiles = tiles_of(seen_before(block_first + GROUPS * ROWS));
  const int all_see = keys_seen(p, first);

  const uint32_t start = shared_address(room), base = (start + 1023) & ~1023u,
                 own_q = base + group * OWN, tiles_at = base + GROUPS * OWN;
  const buffer_barriers<BUFFERS> buffers = {tiles_at + BUFFERS * TILE};
  // The first warpgroup has the first thread. If it sees no key, it puts its rows of y in the place
  // of its queries at once, so these must not be copied there.
  const int skipped = tiles == 0;
  // Tile n of the keys goes to buffer KEYS_IN + n % 2, tile n of the values to VALUES_IN + n % 2.
  // Each is use n / 2 of its buffer.
  auto load = [&](int in, int n) {
    const int i = in + (n & 1);
    buffers.claim(i, n >> 1, TILE + (in == KEYS_IN && n == 0 ? (GROUPS - skipped) * OWN : 0));
    copy_rows<D, KEYS>(tiles_at + i * TILE, in == KEYS_IN ? maps.k : maps.v, n * KEYS, key_head, b,
                       buffers.full(i));
  };
  auto take = [&](int in, int n) {
    buffers.take(in + (n & 1), n >> 1);
    return tiles_at + (in + (n & 1)) * TILE;
  };
  auto give = [&](int in, int n) { buffers.give(in + (n & 1)); };
  buffers.open(4 * GROUPS);
  if (loads && block_tiles > 0) {
    load(KEYS_IN, 0);
    for (int i = skipped; i < GROUPS; i++)
      copy_rows<D, ROWS>(base + i * OWN, maps.q, block_first + i * ROWS, h, b,
                         buffers.full(KEYS_IN));
    load(VALUES_IN, 0);
  }
  __syncwarp();

  const float scale = (float)(p.factor * LOG2_E);
  float y[D / 2];
  running r = {{-INFINITY, -INFINITY}, {0, 0}, {0, 0}};
#pragma unroll
  for (int i = 0; i < D / 2; i++) y[i] = 0;
  for (int n = 0; n < tiles; n++) {
    const uint32_t key_tile = take(KEYS_IN, n);
    float s[KEYS / 2];
    uint32_t weights[KEYS / 16][4];
    forget(s);   // otherwise ptxas runs out of registers
    group_begin();
    start_rows_times_rows<T, D, KEYS>(s, own_q, key_tile);
    group_commit();
    if (loads && n + 1 < block_tiles) load(KEYS_IN, n + 1);
    __syncwarp();
    group_wait<0>();
    settle(s);
    give(KEYS_IN, n);
    const int key = n * KEYS;
    if (key + KEYS > all_see)
      hide_after(s, keys_seen(p, own + g) - key, keys_seen(p, own + g + 8) - key);

    float shift[2], keep[2];
    running tile = {};
    uint32_t value_tile = 0;
    raise_top<ENTROPY>(s, &r, shift, keep, scale);
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      weigh<T, ENTROPY, PARTS>(s, part, shift, &tile, scale);
      if (part == 0) {
#pragma unroll
        for (int i = 0; i < D / 2; i++) y[i] *= keep[i >> 1 & 1];
        value_tile = take(VALUES_IN, n);
      }
      round_weights<T, PARTS>(weights, s, part);
      group_begin();
      start_weights_times_rows<T, D, KEYS, PARTS>(y, weights, value_tile, part);
      group_commit();
      if (part == 0) {
        if (loads && n + 1 < block_tiles) load(VALUES_IN, n + 1);
        __syncwarp();
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (ENTROPY) r.weighted[half] += tile.weighted[half];
      r.sum[half] = fmaf(r.sum[half], keep[half], tile.sum[half]);
    }
    group_wait<0>();
    settle(y);
    settle(weights);
    give(VALUES_IN, n);
  }

  // After this barrier no warp of the warpgroup reads the queries, so each warp can put its rows of
  // y in their place.
  group_meet(1 + group, 128);
  uint32_t bad = finish_rows<T, D, ENTROPY>(y, r, p, b, h, own,
                                            room + (base - start) + warp * (16 * D * 2), stored);
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
  auto kernel = p->entropy ? hopper_rows<T, D, true> : hopper_rows<T, D, false>;
  schedule plan;
  ENG_TRY(schedule_of(&plan, p, GROUPS * ROWS, D));
  forward_maps maps = {};
  ENG_TRY(map_rows(&maps.q, p->q, p->batch, p->queries, p->heads, D, ROWS));
  ENG_TRY(map_rows(&maps.k, p->k, p->batch, p->keys, p->groups, D, KEYS_OF<D>));
  ENG_TRY(map_rows(&maps.v, p->v, p->batch, p->keys, p->groups, D, KEYS_OF<D>));
  return launch_kernel("attention", kernel, plan.tiles * plan.heads, 128 * GROUPS,
                       HOPPER_BYTES<D>, *p, maps, plan, stored);
}

eng_status attention_forward_hopper(const attention_problem *p, int dtype, int stored)
{
  return with_heads<64, 128>(dtype, p->width, [&](auto t, auto d) {
    return forward<decltype(t), decltype(d)::value>(p, stored);
  });
}
