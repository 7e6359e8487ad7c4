// Gradient statistics: one launch reads all gradients once, and a small second launch adds up the
// results.
//
//   chunk    SPAN_CHUNK elements (spans.h). As many blocks as fit on the card iterate over all
//            chunks, 16 bytes per load. A thread has four loads in flight, even across chunk ends.
//   squares  are summed in f32 over the 4 or 8 elements of one access (at most three roundings),
//            then in double. Accesses are checked in pairs: if a pair's sum is not finite, or so
//            small that squares may have been lost, its elements go through careful(). Only
//            careful() detects inf and nan, and it squares in double.
//   order    of sums: lanes, warps, chunks of a tensor, tensors; the same on every card
//   counts   are integers, which may be added in any order. Histograms are in shared memory, with
//            one bank per lane.
//
// Owns the buffers that carry the results to the host. The reference kernel is in
// core/cpu/reference_gradstats.c. Called through the device's table.
#include "passes.h"
#include "runtime/runtime.h"
#include "spans.h"

#include <stdlib.h>
#include <string.h>

enum {
  WARPS = SPAN_THREADS / 32,
  BATCH = 4,                         // accesses that a thread has in flight
  // blocks per multiprocessor: 4 blocks have 4 * 256 threads * 4 * 16 bytes = 64 KiB in flight
  RESIDENT = 4,
  SLAB = 2048,                       // chunks that a block of sum_up adds: 2^25 elements at most
};

/// The statistics of a chunk, or of a slab of chunks. sum_up reads a tally as two uint4; `unused`
/// fills it up to their size.
typedef struct alignas(16) tally {
  double   squares;
  uint32_t amax;                     // largest finite magnitude, as the bits of an f32
  int32_t  inf, nan, zeros, tiny;    // tiny: below the smallest normal number, zeros included
  int32_t  unused;
} tally;
static_assert(sizeof(tally) == 2 * sizeof(uint4), "sum_up reads a tally as two uint4");

/// A tensor's statistics for the host, except for the histogram.
typedef struct span_result {
  int64_t inf, nan, zeros, underflow;
  double  amax, squares;
} span_result;

// ------------------------------------------------------------------ two accesses

/// A thread's sums over a chunk. For f32, `zeros` and `tiny` are integers. For the 16-bit formats
/// they are pairs of halves, which are exact up to 2048.
template <typename T> struct running {
  double   squares;
  float    amax;            // of elements that went through careful()
  __half2  top;             // the largest magnitudes of all other elements, as bits
  __half2  zeros, tiny;
  int      inf, nan;
};
template <> struct running<float> {
  double squares;
  float  amax;
  int    zeros, tiny, inf, nan;
};

/// A 16-bit format: the bits of its smallest normal number, and the number of its fraction bits.
template <typename T> struct layout;
template <> struct layout<f16_t>  { enum { normal = 0x0400, fraction = 10 }; };
template <> struct layout<bf16_t> { enum { normal = 0x0080, fraction = 7 }; };

__device__ static inline __half2 as_halves(uint32_t w) { return *(__half2 *)&w; }
__device__ static inline uint32_t as_word(__half2 h) { return *(uint32_t *)&h; }

__device__ static inline float2 widen_pair(uint32_t w, f16_t)
{ return __half22float2(as_halves(w)); }
__device__ static inline float2 widen_pair(uint32_t w, bf16_t)
{ return make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xFFFF0000u)); }

/// Adds one element, which may be inf or nan. Used when the squares of the elements of an access
/// cannot be summed in f32.
template <typename R> __device__ static inline void careful(R &r, float x)
{
  uint32_t a = __float_as_uint(x) & 0x7FFFFFFFu;
  if (a >= 0x7F800000u) {
    if (a == 0x7F800000u) r.inf++;
    else r.nan++;
  } else {
    r.squares = fma((double)x, (double)x, r.squares);   // the product is exact
    r.amax = fmaxf(r.amax, fabsf(x));
  }
}

/// Calls f(word) for all words of two accesses. The loop is not unrolled, because it rarely runs.
template <typename F> __device__ static inline void each_word(uint4 a, uint4 b, F f)
{
#pragma unroll 1
  for (int k = 0; k < 8; k++) {
    f(a.x);
    a = make_uint4(a.y, a.z, a.w, b.x);
    b = make_uint4(b.y, b.z, b.w, 0);
  }
}

/// A block's histogram of exponent fields. The upper 16 bits of an f32, or the 16 bits of a 16-bit
/// number, are masked to the exponent field and used as an offset in bytes. All counters of a lane
/// lie in one bank. Subnormal numbers have exponent field 0; `subnormal` counts them by leading
/// zeros.
struct histogram {
  alignas(1024) char fields[0x8000];
  uint32_t subnormal[32];
};
/// Shared memory for the histogram, or 4 bytes if there is none. (An array of bytes would not have
/// the histogram's alignment.)
template <bool HIST> struct histogram_room { histogram bins; };
template <> struct histogram_room<false> { uint32_t nothing; };

/// Counts one number. `bits` is its exponent field, in place within the upper 16 bits of an f32 or
/// the 16 bits of a 16-bit number.
__device__ static inline void count_field(histogram *h, uint32_t bits)
{ atomicAdd((uint32_t *)(h->fields + (bits | threadIdx.x % 32 * 4)), 1u); }
__device__ static inline void count_subnormal(histogram *h, uint32_t fraction)
{ atomicAdd(&h->subnormal[__clz(fraction)], 1u); }

#define SQUARES_FROM 0x1p-80f   // in a sum below this, squares too small for f32 may matter
#define SQUARES_TO   0x1.FFFFFEp127f

__device__ static inline float squares_of(const float x[4])
{ return fmaf(x[1], x[1], x[0] * x[0]) + fmaf(x[3], x[3], x[2] * x[2]); }

template <bool HIST>
__device__ static inline void look(running<float> &r, uint4 a, uint4 b, histogram *bins)
{
  const float x[8] = {__uint_as_float(a.x), __uint_as_float(a.y), __uint_as_float(a.z),
                      __uint_as_float(a.w), __uint_as_float(b.x), __uint_as_float(b.y),
                      __uint_as_float(b.z), __uint_as_float(b.w)};
  float top = 0.0f;
#pragma unroll
  for (int k = 0; k < 8; k++) {
    r.zeros += x[k] == 0.0f;
    r.tiny += fabsf(x[k]) < 0x1p-126f;
    top = fmaxf(top, fabsf(x[k]));
    if (HIST) {
      uint32_t magnitude = __float_as_uint(x[k]) & 0x7FFFFFFFu;
      count_field(bins, magnitude >> 16 & 0x7F80u);
      if (magnitude - 1 < 0x007FFFFFu) count_subnormal(bins, magnitude);
    }
  }
  const float first = squares_of(x), second = squares_of(x + 4), sum = first + second;
  if (sum >= SQUARES_FROM && sum <= SQUARES_TO) {
    r.squares += (double)first;
    r.squares += (double)second;
    r.amax = fmaxf(r.amax, top);
  } else if (((a.x | a.y | a.z | a.w | b.x | b.y | b.z | b.w) & 0x7FFFFFFFu) != 0) {
    each_word(a, b, [&](uint32_t w) { careful(r, __uint_as_float(w)); });
  }
}

/// Processes eight elements: counts zeros and tiny numbers, updates the largest magnitudes in
/// `top`, and returns the sum of squares.
template <bool HIST, typename T>
__device__ static inline float look_at(uint4 raw, __half2 &top, __half2 &zeros, __half2 &tiny,
                                       histogram *bins)
{
  // Magnitudes are compared as f16, even if they are bf16: the bits have the same order. A number
  // whose bits are a NaN in f16 is neither zero nor tiny. `top` may miss it, but its square is out
  // of range, so careful() runs.
  const __half2 normal = as_halves((uint32_t)layout<T>::normal * 0x00010001u), zero = as_halves(0);
  const uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
  float part[4];
#pragma unroll
  for (int k = 0; k < 4; k++) {
    __half2 h = as_halves(w[k]), magnitude = __habs2(h);
    zeros = __hadd2(zeros, __heq2(h, zero));
    tiny = __hadd2(tiny, __hlt2(magnitude, normal));
    top = __hmax2(top, magnitude);
    float2 x = widen_pair(w[k], T());
    part[k] = fmaf(x.y, x.y, x.x * x.x);
    if (HIST) {
      enum { mask = 0x8000 - (1 << layout<T>::fraction) };
      count_field(bins, w[k] & mask);
      count_field(bins, w[k] >> 16 & mask);
    }
  }
  return (part[0] + part[1]) + (part[2] + part[3]);
}

template <bool HIST, typename T>
__device__ static inline void look(running<T> &r, uint4 a, uint4 b, histogram *bins)
{
  const bool narrow_range = layout<T>::fraction == 10;   // squares of f16 are never lost
  __half2 top = as_halves(0), zeros = top, tiny = top;
  const float first = look_at<HIST, T>(a, top, zeros, tiny, bins),
              second = look_at<HIST, T>(b, top, zeros, tiny, bins), sum = first + second;
  r.zeros = __hadd2(r.zeros, zeros);
  r.tiny = __hadd2(r.tiny, tiny);
  if (HIST && as_word(zeros) != as_word(tiny))
    each_word(a, b, [&](uint32_t w) {
      const uint32_t low = w & 0x7FFFu, high = w >> 16 & 0x7FFFu;
      if (low - 1 < layout<T>::normal - 1) count_subnormal(bins, low);
      if (high - 1 < layout<T>::normal - 1) count_subnormal(bins, high);
    });
  if ((narrow_range || sum >= SQUARES_FROM) && sum <= SQUARES_TO) {
    r.squares += (double)first;
    r.squares += (double)second;
    r.top = __hmax2(r.top, top);
  } else if (((a.x | a.y | a.z | a.w | b.x | b.y | b.z | b.w) & 0x7FFF7FFFu) != 0) {
    each_word(a, b, [&](uint32_t w) {
      float2 x = widen_pair(w, T());
      careful(r, x.x);
      careful(r, x.y);
    });
  }
}

// ------------------------------------------------------------------ a chunk

__device__ static inline int halves_total(__half2 h)
{ return (int)(__low2float(h) + __high2float(h)); }

/// Converts a thread's sums to a tally. Subtracts `padding`, the number of zeros that only fill up
/// accesses, from the counts of zeros and of tiny numbers.
__device__ static inline tally finish(const running<float> &r, int padding)
{
  return {r.squares,         __float_as_uint(r.amax), r.inf, r.nan,
          r.zeros - padding, r.tiny - padding,        0};
}
template <typename T> __device__ static inline tally finish(const running<T> &r, int padding)
{
  float2 top = widen_pair(as_word(r.top), T());
  float amax = fmaxf(r.amax, fmaxf(top.x, top.y));
  return {r.squares, __float_as_uint(amax),           r.inf,
          r.nan,     halves_total(r.zeros) - padding, halves_total(r.tiny) - padding,
          0};
}

/// A chunk as a block sees it.
struct piece {
  const uint4 *at;
  // number of whole 16-byte accesses (0 if the array is unaligned); number of elements
  int whole, n;
  int span, dtype;
};

__device__ static inline piece piece_of(const device_span *spans, const int32_t *chunk, int c,
                                        int chunks)
{
  piece p = {NULL, 0, 0, -1, 0};
  if (c >= chunks) return p;
  p.span = __ldg(chunk + c);
  const device_span &s = spans[p.span];
  const int64_t first = (int64_t)(c - s.first_chunk) * SPAN_CHUNK;
  p.dtype = s.gradient_dtype;
  const int size = p.dtype == ENG_f32 ? 4 : 2;
  p.at = (const uint4 *)((const char *)s.gradient + first * size);
  p.n = (int)min((int64_t)SPAN_CHUNK, s.count - first);
  p.whole = ((uintptr_t)p.at & 15) == 0 ? p.n * size / 16 : 0;
  return p;
}

/// Loads the k-th access of this thread, or zeros past the end.
__device__ static inline uint4 access_of(const uint4 *at, int whole, int k)
{
  const int i = threadIdx.x + k * SPAN_THREADS;
  return i < whole ? __ldg(at + i) : make_uint4(0, 0, 0, 0);
}

/// Reads the thread's share of a chunk. On entry `ahead` holds the thread's first accesses of this
/// chunk, and on return its first accesses of the next chunk.
template <bool HIST, typename T>
__device__ static inline tally read_chunk(uint4 (&ahead)[BATCH], const piece &now,
                                          const piece &next, histogram *bins)
{
  enum { V = 16 / sizeof(T) };
  running<T> r;
  memset(&r, 0, sizeof r);
  const uint4 *at = now.at;
  int left = now.whole,
      padding = -V * max(0, (now.whole - (int)threadIdx.x + SPAN_THREADS - 1) / SPAN_THREADS);
  do {
    const bool last = left <= BATCH * SPAN_THREADS;
    at = last ? next.at : at + BATCH * SPAN_THREADS;
    left = last ? next.whole : left - BATCH * SPAN_THREADS;
#pragma unroll
    for (int k = 0; k < BATCH; k += 2) {
      look<HIST>(r, ahead[k], ahead[k + 1], bins);
      ahead[k] = access_of(at, left, k);
      ahead[k + 1] = access_of(at, left, k + 1);
    }
    padding += BATCH * V;
    if (last) break;
  } while (true);
  const T *g = (const T *)now.at;
  // the elements beyond whole accesses, padded with zeros
#pragma unroll 1
  for (int i = now.whole * V + threadIdx.x * V; i < now.n; i += SPAN_THREADS * V) {
    union { uint4 raw; T x[V]; } u;
    u.raw = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int k = 0; k < V; k++)
      if (i + k < now.n) u.x[k] = g[i + k];
      else padding++;
    padding += V;
    look<HIST>(r, u.raw, make_uint4(0, 0, 0, 0), bins);
  }
  return finish(r, padding);
}

__device__ static inline tally warp_tally(tally t)
{
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    t.squares += __shfl_xor_sync(0xFFFFFFFFu, t.squares, step);
  t.amax = __reduce_max_sync(0xFFFFFFFFu, t.amax);
  t.inf = __reduce_add_sync(0xFFFFFFFFu, t.inf);
  t.nan = __reduce_add_sync(0xFFFFFFFFu, t.nan);
  t.zeros = __reduce_add_sync(0xFFFFFFFFu, t.zeros);
  t.tiny = __reduce_add_sync(0xFFFFFFFFu, t.tiny);
  return t;
}

/// Sums tallies over the block into *to. There is only one barrier, so repeated calls must
/// alternate between two arrays for `warps`.
__device__ static inline void block_tally(tally t, tally *warps, tally *to)
{
  t = warp_tally(t);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = t;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  t = warp_tally(threadIdx.x < WARPS ? warps[threadIdx.x] : tally{});
  if (threadIdx.x == 0) *to = t;
}

/// Adds the block's histogram to the tensor's histogram, then clears the block's. All threads must
/// call this function, after a barrier.
__device__ static inline void flush_bins(histogram *h, int dtype, unsigned long long *hist)
{
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // `first` is the bin of exponent field 0
  const int fraction = dtype == ENG_f16 ? 10 : 7, fields = 0x8000 >> fraction,
            first = dtype == ENG_f16 ? 145 : 33;
  for (int f = warp; f < fields; f += WARPS) {
    uint32_t *at = (uint32_t *)(h->fields + (f << fraction)) + lane;
    const uint32_t sum = __reduce_add_sync(0xFFFFFFFFu, *at);
    *at = 0;
    // leaves out field 0 (zero or subnormal) and the last field (inf or nan)
    if (lane == 0 && sum && f > 0 && f < fields - 1)
      atomicAdd(&hist[first + f], (unsigned long long)sum);
  }
  // a subnormal with highest set bit b is (fraction bits - b) bins below the smallest normal number
  if (warp == 0) {
    const uint32_t some = h->subnormal[lane];
    h->subnormal[lane] = 0;
    if (some)
      atomicAdd(&hist[first + 1 + (31 - lane) - (dtype == ENG_f32 ? 23 : fraction)],
                (unsigned long long)some);
  }
  __syncthreads();
}

/// Fills the tallies of all chunks and, with HIST, the histograms of the tensors. With HIST a block
/// takes consecutive chunks. They belong to few tensors, so the block seldom adds its histogram to
/// the histogram of a tensor.
template <bool HIST>
__global__ static void __launch_bounds__(SPAN_THREADS, RESIDENT)
  read_gradients(const device_span *spans, const int32_t *chunk, int chunks, tally *tallies,
                 unsigned long long *hist)
{
  __shared__ tally warps[2][WARPS];
  __shared__ histogram_room<HIST> room;
  histogram *bins = HIST ? (histogram *)&room : NULL;
  if (HIST) {
    for (int b = threadIdx.x; b < (int)(sizeof(histogram) / 4); b += SPAN_THREADS)
      ((uint32_t *)bins)[b] = 0;
    __syncthreads();
  }
  uint4 ahead[BATCH];
  const int end = HIST ? (int)((int64_t)chunks * (blockIdx.x + 1) / gridDim.x) : chunks;
  int c = HIST ? (int)((int64_t)chunks * blockIdx.x / gridDim.x) : (int)blockIdx.x;
  piece now = piece_of(spans, chunk, c, end);
#pragma unroll
  for (int k = 0; k < BATCH; k++) ahead[k] = access_of(now.at, now.whole, k);
  for (int half = 0; now.span >= 0; half ^= 1) {
    const int after = HIST ? c + 1 : c + (int)gridDim.x;
    const piece next = piece_of(spans, chunk, after, end);
    tally t;
    if (now.dtype == ENG_f16) t = read_chunk<HIST, f16_t>(ahead, now, next, bins);
    else if (now.dtype == ENG_bf16) t = read_chunk<HIST, bf16_t>(ahead, now, next, bins);
    else t = read_chunk<HIST, float>(ahead, now, next, bins);
    block_tally(t, warps[half], tallies + c);   // has a barrier, which flush_bins needs
    if (HIST && now.span != next.span)
      flush_bins(bins, now.dtype, hist + (int64_t)now.span * ENG_HIST_BINS);
    now = next;
    c = after;
  }
}

// ------------------------------------------------------------------ tensors and the total

/// Adds up the tallies, with one block per slab of a tensor. The last block to finish sums the
/// slabs and the tensors. `counter` is 0 between launches.
__global__ static void __launch_bounds__(SPAN_THREADS, 2)
  sum_up(const device_span *spans, int n, int slabs, const tally *tallies, tally *partial,
         span_result *results, cuda_step_total *total, unsigned *counter,
         const cuda_fault_record *fault, cuda_fault_record *fault_seen)
{
  __shared__ tally warps[WARPS];
  __shared__ double squares[WARPS];
  __shared__ int64_t bad[WARPS];
  __shared__ bool last;
  if ((int)blockIdx.x < n * slabs) {
    const device_span &s = spans[blockIdx.x / slabs];
    const int from = blockIdx.x % slabs * SLAB + threadIdx.x;
    tally t = {};
#pragma unroll
    for (int k = 0; k < SLAB / SPAN_THREADS; k++) {
      const int c = from + k * SPAN_THREADS;
      const tally one = c < s.chunks ? tallies[s.first_chunk + c] : tally{};
      t.squares += one.squares;
      t.amax = max(t.amax, one.amax);
      t.inf += one.inf;
      t.nan += one.nan;
      t.zeros += one.zeros;
      t.tiny += one.tiny;
    }
    block_tally(t, warps, partial + blockIdx.x);
  }
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(counter, 1u) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  double all_squares = 0;
  int64_t all_bad = 0;
  for (int k = threadIdx.x; k < n; k += SPAN_THREADS) {
    span_result r = {};
    for (int j = 0; j < slabs; j++) {
      // bypasses the L1 cache, because other blocks of this launch wrote the tallies
      union { uint4 raw[2]; tally t; } u;
      u.raw[0] = __ldcg((const uint4 *)(partial + k * slabs + j));
      u.raw[1] = __ldcg((const uint4 *)(partial + k * slabs + j) + 1);
      r.squares += u.t.squares;
      r.amax = fmax(r.amax, (double)__uint_as_float(u.t.amax));
      r.inf += u.t.inf;
      r.nan += u.t.nan;
      r.zeros += u.t.zeros;
      r.underflow += u.t.tiny - u.t.zeros;
    }
    results[k] = r;
    all_squares += r.squares / spans[k].scale / spans[k].scale;
    all_bad += r.inf + r.nan;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    all_squares += __shfl_xor_sync(0xFFFFFFFFu, all_squares, step);
    all_bad += __shfl_xor_sync(0xFFFFFFFFu, all_bad, step);
  }
  if (threadIdx.x % 32 == 0) {
    squares[threadIdx.x / 32] = all_squares;
    bad[threadIdx.x / 32] = all_bad;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < WARPS; w++) {
      all_squares += squares[w];
      all_bad += bad[w];
    }
    total->bad = all_bad;
    total->sum_squares = all_squares;
    *fault_seen = *fault;
    *counter = 0;
  }
}

enum { GATHERED = 64 };
struct gather_list { const float *at[GATHERED]; };

__global__ static void gather_losses(gather_list list, int n, float *to)
{
  if ((int)threadIdx.x < n) to[threadIdx.x] = *list.at[threadIdx.x];
}

// ------------------------------------------------------------------ the host's side

/// The results of a pass on their way to the host: fault, losses, statistics and histograms. They
/// are contiguous in device memory and in host memory.
typedef struct report {
  int64_t     ticket;            // of the last pass that used this report
  // busy: the results are not fetched yet. dropped: they never will be, but their copy may still be
  // in flight.
  bool        busy, dropped;
  char       *memory;            // pinned
  int64_t     bytes;
  cudaEvent_t arrived;
  int64_t    *count;             // elements of each tensor
  int         n, n_loss, capacity;
  unsigned    needs;
  int64_t     faults_told;       // cuda_faults_told() when the report was requested
} report;

static struct {
  span_table table;
  // a tally per chunk; the current report; a cuda_step_total for each report, then the counter of
  // sum_up
  device_room tallies, device, totals;
  report     reports[STATS_TICKETS];
  int64_t    tickets;            // number of tickets given out so far
} pass;

const cuda_step_total *cuda_total_of(int64_t ticket)
{
  for (int i = 0; i < STATS_TICKETS; i++)
    if (ticket > 0 && pass.reports[i].ticket == ticket)
      return (const cuda_step_total *)pass.totals.data + i;
  return NULL;
}

/// Returns a free report, preferring one with no copy in flight.
static report *report_free(void)
{
  report *found = NULL;
  for (report *r = pass.reports; r < pass.reports + STATS_TICKETS; r++) {
    if (r->busy) continue;
    if (!r->dropped) return r;
    if (!found) found = r;
  }
  return found;
}

static int64_t round_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }
static int64_t losses_at(void) { return round_up(sizeof(cuda_fault_record)); }
static int64_t results_at(int n_loss)
{ return losses_at() + round_up(n_loss * (int64_t)sizeof(float)); }
static int64_t hist_at(int n, int n_loss)
{ return results_at(n_loss) + round_up(n * (int64_t)sizeof(span_result)); }
static int64_t hist_bytes(int n) { return n * (int64_t)(ENG_HIST_BINS * sizeof(int64_t)); }

static eng_status report_room(report *r, int n, int64_t bytes)
{
  if (r->dropped) CUDA_TRY(cudaEventSynchronize(r->arrived));
  r->dropped = false;
  if (!r->arrived) CUDA_TRY(cudaEventCreateWithFlags(&r->arrived, cudaEventDisableTiming));
  if (bytes > r->bytes) {
    if (r->memory) CUDA_TRY(cudaFreeHost(r->memory));
    r->memory = NULL;
    r->bytes = 0;
    CUDA_TRY(cudaMallocHost((void **)&r->memory, (size_t)(bytes + bytes / 4)));
    r->bytes = bytes + bytes / 4;
  }
  if (n > r->capacity) {
    int64_t *count = (int64_t *)realloc(r->count, (size_t)n * sizeof *count);
    FAIL_IF(!count, ENG_ERR_MEMORY, "out of memory on the host for the statistics of %d tensors",
            n);
    r->count = count;
    r->capacity = n;
  }
  return ENG_OK;
}

/// Starts a pass. Sets *out to its report, which is then busy.
static eng_status launch(report **out, const param_span *spans, int n, unsigned needs,
                         tensor *const *loss, int n_loss)
{
  report *r = report_free();
  FAIL_IF(!r, ENG_ERR_STATE, "gradient statistics: %d passes are in flight, the most allowed; "
          "hint: fetch the results of one before starting another", STATS_TICKETS);
  bool hist = needs & ENG_NEED_HIST;
  int64_t bytes = hist_at(n, n_loss) + (hist ? hist_bytes(n) : 0), longest = 1;
  for (int k = 0; k < n; k++)
    if (spans[k].count > longest) longest = spans[k].count;
  const int64_t slabs = parts(longest, (int64_t)SLAB * SPAN_CHUNK);
  ENG_TRY(spans_ready(&pass.table, spans, n, NULL));
  ENG_TRY(device_grow(&pass.tallies,
                      (pass.table.chunks + n * slabs + 1) * (int64_t)sizeof(tally)));
  ENG_TRY(device_grow(&pass.device, bytes));
  ENG_TRY(report_room(r, n, bytes));
  ENG_TRY(device_grow(&pass.totals, (STATS_TICKETS + 1) * (int64_t)sizeof(cuda_step_total)));
  r->ticket = ++pass.tickets;   // the report's previous contents are lost, even if this pass fails

  const span_table *t = &pass.table;
  char *device = (char *)pass.device.data;
  cuda_step_total *totals = (cuda_step_total *)pass.totals.data;
  tally *tallies = (tally *)pass.tallies.data;
  unsigned long long *bins = (unsigned long long *)(device + hist_at(n, n_loss));
  if (hist && n > 0) CUDA_TRY(cudaMemsetAsync(bins, 0, (size_t)hist_bytes(n), cuda_stream()));
  if (t->chunks > 0) {
    auto kernel = hist ? read_gradients<true> : read_gradients<false>;
    kernel<<<capped_grid(t->chunks, RESIDENT), SPAN_THREADS, 0, cuda_stream()>>>(
      t->span, t->chunk, (int)t->chunks, tallies, bins);
  }
  sum_up<<<n > 0 ? (unsigned)(n * slabs) : 1, SPAN_THREADS, 0, cuda_stream()>>>(
    t->span, n, (int)slabs, tallies, tallies + t->chunks,
    (span_result *)(device + results_at(n_loss)), totals + (r - pass.reports),
    (unsigned *)(totals + STATS_TICKETS), cuda_fault(), (cuda_fault_record *)device);
  for (int from = 0; from < n_loss; from += GATHERED) {
    gather_list list;
    int some = n_loss - from < GATHERED ? n_loss - from : GATHERED;
    for (int k = 0; k < GATHERED; k++)
      list.at[k] = (const float *)loss[from + (k < some ? k : 0)]->data;
    gather_losses<<<1, GATHERED, 0, cuda_stream()>>>(list, some,
                                                     (float *)(device + losses_at()) + from);
  }
  ENG_TRY(cuda_launched("gradient statistics"));
  CUDA_TRY(
    cudaMemcpyAsync(r->memory, device, (size_t)bytes, cudaMemcpyDeviceToHost, cuda_stream()));
  CUDA_TRY(cudaEventRecord(r->arrived, cuda_stream()));
  for (int k = 0; k < n; k++) r->count[k] = spans[k].count;
  r->n = n;
  r->n_loss = n_loss;
  r->needs = needs;
  r->faults_told = cuda_faults_told();
  r->busy = true;
  *out = r;
  return ENG_OK;
}

/// Waits for a report. Meanwhile clears `stats`, which is large with histograms.
static eng_status arrive(report *r, eng_tensor_stats *stats)
{
  memset(stats, 0, (size_t)r->n * sizeof *stats);
  ENG_TRY(cuda_status(cudaEventSynchronize(r->arrived), "waiting for gradient statistics"));
  const cuda_fault_record *fault = (const cuda_fault_record *)r->memory;
  // a wait, or another report in flight, may have returned the same fault
  if (!fault->raised || r->faults_told != cuda_faults_told()) return ENG_OK;
  return cuda_fault_told(fault);
}

static void unpack(eng_tensor_stats *stats, const report *r)
{
  const span_result *results = (const span_result *)(r->memory + results_at(r->n_loss));
  const int64_t *hist = (const int64_t *)(r->memory + hist_at(r->n, r->n_loss));
  for (int k = 0; k < r->n; k++) {
    eng_tensor_stats *s = &stats[k];
    s->count = r->count[k];
    s->inf = results[k].inf;
    s->nan = results[k].nan;
    if (r->needs & ENG_NEED_ZEROS) s->zeros = results[k].zeros;
    if (r->needs & ENG_NEED_UNDERFLOW) s->underflow = results[k].underflow;
    if (r->needs & ENG_NEED_AMAX) s->amax = results[k].amax;
    if (r->needs & ENG_NEED_NORM) s->sum_squares = results[k].squares;
    if (r->needs & ENG_NEED_HIST)
      memcpy(s->hist, hist + (int64_t)k * ENG_HIST_BINS, sizeof s->hist);
  }
}

/// Fetches a report's results and frees the report, even on an error.
static eng_status fetch(report *r, eng_tensor_stats *stats, double *loss, int n_loss)
{
  r->busy = false;
  ENG_TRY(arrive(r, stats));
  unpack(stats, r);
  const float *values = (const float *)(r->memory + losses_at());
  for (int k = 0; k < n_loss; k++) loss[k] = (double)values[k];
  return ENG_OK;
}

eng_status cuda_gradstats(const param_span *spans, int n, unsigned needs, eng_tensor_stats *stats)
{
  report *r;
  ENG_TRY(launch(&r, spans, n, needs, NULL, 0));
  return fetch(r, stats, NULL, 0);
}

eng_status cuda_gradstats_start(int64_t *ticket, const param_span *spans, int n, unsigned needs,
                                tensor *const *loss, int n_loss)
{
  report *r;
  ENG_TRY(launch(&r, spans, n, needs, loss, n_loss));
  *ticket = r->ticket;
  return ENG_OK;
}

eng_status cuda_gradstats_fetch(int64_t ticket, eng_tensor_stats *stats, int n, double *loss,
                                int n_loss)
{
  report *r = NULL;
  for (int i = 0; i < STATS_TICKETS && !r; i++)
    if (pass.reports[i].busy && pass.reports[i].ticket == ticket) r = &pass.reports[i];
  FAIL_IF(!r, ENG_ERR_STATE,
          "gradient statistics: no pass with ticket %lld is in flight; hint: were its results "
          "fetched or dropped before?", (long long)ticket);
  if (!stats || n != r->n || n_loss != r->n_loss) {
    r->busy = false;
    r->dropped = true;
    if (!stats) return ENG_OK;
    return error_set(
      ENG_ERR_VALUE,
      "gradient statistics: the pass has %d tensors and %d losses, the call expects %d and %d",
      r->n, r->n_loss, n, n_loss);
  }
  return fetch(r, stats, loss, n_loss);
}
