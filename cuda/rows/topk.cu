// The largest or smallest elements: topk, argmax, argmin. The rules are the CPU's: NaN is the
// largest for topk and argmax and the smallest for argmin; among equals (-0 equals +0) the first
// wins. Elements are mapped to integers of the same order, so that every format takes the same
// path.
//
// In topk, a row of up to 1024 elements stays in the registers of a warp. In a longer row, a block
// finds one element after the other. If there are few such rows in f32, f16 or bf16, with many
// elements to find, the rows are sorted instead. Called through the device's table.
#include "kernel/element.h"

#include <cub/device/device_radix_sort.cuh>

enum { WARP_ROW = 1024, BLOCK = 512, SORTED_ROWS = 16, SORTED_K = 64 };

// ------------------------------------------------------------------ order

/// Returns the sort key of element i. Keys compare as the elements do. Every NaN gets the same key,
/// the largest.
__device__ static inline uint64_t order_of(const void *x, int dtype, int64_t i)
{
  if (!dtype_is_float(dtype)) return (uint64_t)element_whole(x, dtype, i) ^ 1ull << 63;
  if (dtype == ENG_f64) {
    uint64_t bits = ((const uint64_t *)x)[i], magnitude = bits & 0x7FFFFFFFFFFFFFFFull;
    if (magnitude > 0x7FF0000000000000ull) return ~0ull;
    if (magnitude == 0) return 1ull << 63;
    return bits >> 63 ? ~bits : bits | 1ull << 63;
  }
  float value = dtype == ENG_f32 ? ((const float *)x)[i] :
                dtype == ENG_f16 ? f16_to_f32(((const uint16_t *)x)[i]) :
                                   bf16_to_f32(((const uint16_t *)x)[i]);
  uint32_t bits = __float_as_uint(value), magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0xFFFFFFFFu;
  if (magnitude == 0) return 0x80000000u;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/// Returns the sort key of a NaN, or 0 for formats without NaN.
__device__ static inline uint64_t nan_order(int dtype)
{ return dtype == ENG_f64 ? ~0ull : dtype_is_float(dtype) ? 0xFFFFFFFFull : 0; }

/// A candidate; `place` is -1 if there is none yet. A candidate beats another if its `order` is
/// larger, or equal and its place earlier. If the least is wanted, `order` is complemented, except
/// that of a NaN, which wins in both cases.
struct found { uint64_t order; int64_t place; };

__device__ static inline bool beats(found a, found b)
{
  return a.place >= 0 &&
         (b.place < 0 || a.order > b.order || (a.order == b.order && a.place < b.place));
}

__device__ static inline found across_warp(found best, int lanes)
{
  for (int apart = lanes / 2; apart > 0; apart /= 2) {
    found other = {__shfl_xor_sync(~0u, best.order, apart),
                   __shfl_xor_sync(~0u, best.place, apart)};
    if (beats(other, best)) best = other;
  }
  return best;
}

/// Returns the best element of a block of BLOCK threads, to every thread.
__device__ static found across_block(found best)
{
  __shared__ found warps[BLOCK / 32];
  best = across_warp(best, 32);
  __syncthreads();   // all reads of the previous call are done
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = best;
  __syncthreads();
  return across_warp(warps[threadIdx.x % (BLOCK / 32)], 32);
}

// ------------------------------------------------------------------ argmax, argmin

/// A call of argmax or argmin. x is [outer x size x inner]; y is [outer x inner], dense.
struct extreme_call {
  const void *x;
  void   *y;
  int64_t size, inner, results;
  int32_t x_dtype, y_dtype, lanes, least;   // lanes: threads per result; least: 1 for argmin
};

__device__ static found best_of(const extreme_call &c, int64_t result, int64_t first, int64_t step)
{
  constexpr int U = 4;
  found best = {0, -1};
  int64_t base = result / c.inner * c.size * c.inner + result % c.inner;
  for (int64_t at = first; at < c.size; at += U * step) {
    uint64_t order[U];
#pragma unroll
    for (int u = 0; u < U; u++)
      order[u] =
        at + u * step < c.size ? order_of(c.x, c.x_dtype, base + (at + u * step) * c.inner) : 0;
#pragma unroll
    for (int u = 0; u < U; u++) {
      if (at + u * step >= c.size) continue;
      bool nan = dtype_is_float(c.x_dtype) && order[u] == nan_order(c.x_dtype);
      found here = {c.least && !nan ?
                      ~order[u] & (c.x_dtype == ENG_f64 || !dtype_is_float(c.x_dtype) ?
                                     ~0ull : 0xFFFFFFFFull) :
                      order[u],
                    at + u * step};
      if (beats(here, best)) best = here;
    }
  }
  return best;
}

static __global__ void __launch_bounds__(256) lanes_kernel(const extreme_call c)
{
  int64_t thread = (int64_t)blockIdx.x * 256 + threadIdx.x, result = thread / c.lanes;
  int lane = (int)(thread % c.lanes);
  found best = {0, -1};
  if (result < c.results) best = best_of(c, result, lane, c.lanes);
  best = across_warp(best, c.lanes);
  if (result < c.results && lane == 0) element_store_int(c.y, c.y_dtype, result, best.place);
}

static __global__ void __launch_bounds__(BLOCK) block_kernel(const extreme_call c)
{
  found best = across_block(best_of(c, blockIdx.x, threadIdx.x, BLOCK));
  if (threadIdx.x == 0) element_store_int(c.y, c.y_dtype, blockIdx.x, best.place);
}

static eng_status find_extreme(const op_call *call, bool least)
{
  const tensor *x = call->in[0], *y = call->out[0];
  int64_t dimension = call->argmax.dim < 0 ? call->argmax.dim + x->ndim : call->argmax.dim;
  extreme_call c = {x->data, y->data, x->shape[dimension], 1, y->count, x->dtype, y->dtype,
                    1,       least};
  for (int64_t d = dimension + 1; d < x->ndim; d++) c.inner *= x->shape[d];
  if (c.size > 2048 && c.results < 1 << 16) {
    block_kernel<<<(unsigned)c.results, BLOCK, 0, cuda_stream()>>>(c);
  } else {
    while (c.inner == 1 && c.lanes < 32 && 2 * c.lanes < c.size) c.lanes *= 2;
    lanes_kernel<<<(unsigned)((c.results * c.lanes + 255) / 256), 256, 0, cuda_stream()>>>(c);
  }
  return cuda_launched(eng_op_name(call->op));
}

extern "C" eng_status cuda_argmax(const op_call *call) { return find_extreme(call, false); }
extern "C" eng_status cuda_argmin(const op_call *call) { return find_extreme(call, true); }

// ------------------------------------------------------------------ topk

struct top_call {
  const void *x;
  void   *values, *places;     // NULL if not wanted
  int64_t n, k, rows;
  int32_t x_dtype, value_dtype, place_dtype;
};

__device__ static inline void put(const top_call &c, int64_t row, int64_t rank, int64_t place)
{
  if (c.values)
    copy_element(c.values, c.value_dtype, row * c.k + rank, c.x, c.x_dtype, row * c.n + place);
  if (c.places) element_store_int(c.places, c.place_dtype, row * c.k + rank, place);
}

/// Finds the top k of rows of at most 32 * HELD elements. A warp takes one row. Its lane l holds
/// elements l, l + 32 and so on.
template <int HELD> static __global__ void __launch_bounds__(128) warp_row_kernel(const top_call c)
{
  int64_t row = (int64_t)blockIdx.x * 4 + threadIdx.x / 32;
  int lane = threadIdx.x % 32;
  if (row >= c.rows) return;   // the whole warp returns
  uint64_t order[HELD];
  uint32_t left = 0;           // bit mask of this lane's elements that are not taken yet
#pragma unroll
  for (int j = 0; j < HELD; j++) {
    bool inside = lane + 32 * j < c.n;
    order[j] = inside ? order_of(c.x, c.x_dtype, row * c.n + lane + 32 * j) : 0;
    left |= (uint32_t)inside << j;
  }
  found mine = {0, -1};
  bool look = true;            // this lane must search for its best element again
  for (int64_t rank = 0; rank < c.k; rank++) {
    if (look) {
      mine = {0, -1};
#pragma unroll
      for (int j = 0; j < HELD; j++) {
        found here = {order[j], left >> j & 1 ? lane + 32 * j : -1};
        if (beats(here, mine)) mine = here;
      }
    }
    found best = across_warp(mine, 32);
    look = best.place == mine.place;
    if (!look) continue;
    put(c, row, rank, best.place);
    left &= ~(1u << (best.place / 32));
  }
}

/// Finds the top k of long rows. A block takes one row. Each round finds the best of the elements
/// that rank after the element of the previous round.
static __global__ void __launch_bounds__(BLOCK) block_row_kernel(const top_call c)
{
  int64_t row = blockIdx.x;
  found last = {0, -1};
  for (int64_t rank = 0; rank < c.k; rank++) {
    found best = {0, -1};
    for (int64_t i = threadIdx.x; i < c.n; i += BLOCK) {
      found here = {order_of(c.x, c.x_dtype, row * c.n + i), i};
      if (rank > 0 && !beats(last, here)) continue;   // already taken
      if (beats(here, best)) best = here;
    }
    last = across_block(best);
    if (threadIdx.x == 0) put(c, row, rank, last.place);
  }
}

// Writes the words that sort_rows sorts. Their descending order puts larger elements first and, of
// equal elements, the earlier one.
static __global__ void __launch_bounds__(256)
  rank_kernel(const top_call c, int64_t row, uint64_t *word)
{
  int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
  if (i < c.n)
    word[i] = order_of(c.x, c.x_dtype, row * c.n + i) << 32 | (0xFFFFFFFFu - (uint32_t)i);
}

static __global__ void __launch_bounds__(256)
  sorted_kernel(const top_call c, int64_t row, const uint64_t *word)
{
  int64_t rank = (int64_t)blockIdx.x * 256 + threadIdx.x;
  if (rank < c.k) put(c, row, rank, (int64_t)(0xFFFFFFFFu - (uint32_t)word[rank]));
}

static eng_status sort_rows(const top_call &c)
{
  size_t sort_bytes = 0;
  CUDA_TRY(cub::DeviceRadixSort::SortKeysDescending(NULL, sort_bytes, (const uint64_t *)NULL,
                                                    (uint64_t *)NULL, c.n, 0, 64, cuda_stream()));
  int64_t words = (c.n * 8 + 255) / 256 * 256, bytes = 2 * words + (int64_t)sort_bytes;
  char *space = (char *)scratch_take(bytes);
  if (!space) return ENG_ERR_MEMORY;
  uint64_t *word = (uint64_t *)space, *sorted = (uint64_t *)(space + words);
  cudaError_t result = cudaSuccess;
  for (int64_t row = 0; row < c.rows && result == cudaSuccess; row++) {
    rank_kernel<<<(unsigned)((c.n + 255) / 256), 256, 0, cuda_stream()>>>(c, row, word);
    result = cub::DeviceRadixSort::SortKeysDescending(
      space + 2 * words, sort_bytes, (const uint64_t *)word, sorted, c.n, 0, 64, cuda_stream());
    sorted_kernel<<<(unsigned)((c.k + 255) / 256), 256, 0, cuda_stream()>>>(c, row, sorted);
  }
  scratch_give(space, bytes);
  return cuda_status(result, "topk");
}

extern "C" eng_status cuda_topk(const op_call *call)
{
  const tensor *x = call->in[0], *values = call->out[0], *places = call->out[1];
  top_call c = {x->data, data_of(values), data_of(places), x->shape[x->ndim - 1], call->topk.k,
                rows_of(x), x->dtype, dtype_of(values), dtype_of(places)};
  bool narrow_order = is_fast(x->dtype) && c.n < 1ll << 32;
  if (c.n <= 128) warp_row_kernel<4><<<(unsigned)((c.rows + 3) / 4), 128, 0, cuda_stream()>>>(c);
  else if (c.n <= WARP_ROW)
    warp_row_kernel<32><<<(unsigned)((c.rows + 3) / 4), 128, 0, cuda_stream()>>>(c);
  else if (narrow_order && c.rows <= SORTED_ROWS && c.k > SORTED_K) ENG_TRY(sort_rows(c));
  else block_row_kernel<<<(unsigned)c.rows, BLOCK, 0, cuda_stream()>>>(c);
  return cuda_launched("topk");
}
