// Gradient statistics: one read of every gradient, all tensors in one launch; a second small one sums up.
//
//   chunk    a block reads SPAN_CHUNK elements (spans.h), 16 bytes at a time
//   squares  of the 4 or 8 elements of one access in f32, at most three roundings deep, then in double. A sum that is not
//            finite or so small that squares may have been lost sends its access through careful(): only there are
//            inf and nan looked for, squares taken in double
//   order    lanes, warps, chunks of a tensor, tensors: always the same
//   counts   integers, so any order
// Owns the results on their way to the host. The slow twin stands in core/cpu/reference_optimizer.c.
#include "passes.h"
#include "spans.h"

#include <stdlib.h>
#include <string.h>

enum { WARPS = SPAN_THREADS / 32, BATCH = 4 /* accesses of a thread in flight */ };

/// What a chunk holds.
typedef struct tally {
  double   squares;
  uint32_t amax;                     // bits of the largest finite magnitude, as f32
  int32_t  inf, nan, zeros, tiny;    // tiny: below the smallest normal number, zeros among them
  int32_t  unused;
} tally;

/// A tensor's statistics as the host gets them; the histogram apart.
typedef struct span_result {
  int64_t inf, nan, zeros, underflow;
  double  amax, squares;
} span_result;

// ------------------------------------------------------------------ one access

/// A thread's sums. f32 counts in integers; the 16-bit formats count in pairs of halves, exact up to 2048.
template <typename T> struct running {
  double   squares;
  float    amax;
  uint32_t top;             // 16-bit formats: the largest magnitudes so far, two halves
  __half2  zeros, tiny;
  int      inf, nan;
};
template <> struct running<float> {
  double squares;
  float  amax;
  int    zeros, tiny, inf, nan;
};

template <typename T> struct bits16;
template <> struct bits16<f16_t>  { enum { infinity = 0x7C00, normal = 0x0400 }; };
template <> struct bits16<bf16_t> { enum { infinity = 0x7F80, normal = 0x0080 }; };

__device__ static inline __half2 as_halves(uint32_t w)
{
  union { uint32_t w; __half2 h; } u;
  u.w = w;
  return u.h;
}

__device__ static inline float2 widen_pair(uint32_t w, f16_t)  { return __half22float2(as_halves(w)); }
__device__ static inline float2 widen_pair(uint32_t w, bf16_t) { return make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xFFFF0000u)); }

/// The larger of the magnitudes of two pairs, neither of them NaN.
__device__ static inline uint32_t larger_pair(uint32_t a, uint32_t b, f16_t)
{
  union { __half2 h; uint32_t w; } u;
  u.h = __hmax2(as_halves(a & 0x7FFF7FFFu), as_halves(b & 0x7FFF7FFFu));
  return u.w;
}
__device__ static inline uint32_t larger_pair(uint32_t a, uint32_t b, bf16_t)
{
  union { uint32_t w; __nv_bfloat162 h; } p, q, u;
  p.w = a & 0x7FFF7FFFu;
  q.w = b & 0x7FFF7FFFu;
  u.h = __hmax2(p.h, q.h);
  return u.w;
}

/// One element into its bin of the warp's histogram.
__device__ static inline void count_bin(uint32_t *bins, float x)
{
  uint32_t a = __float_as_uint(x) & 0x7FFFFFFFu;
  if (a == 0 || a >= 0x7F800000u) return;
  atomicAdd(&bins[a >= 0x00800000u ? (a >> 23) + 33 : 42 - __clz(a)], 1u);   // bin of 2^e: e + 160
}

/// Elements whose squares f32 cannot sum up, some of them inf or nan perhaps.
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

#define SQUARES_FROM 0x1p-80f   // below this squares that f32 cannot hold may matter
#define SQUARES_TO   0x1.FFFFFEp127f

template <bool HIST> __device__ static inline void look(running<float> &r, uint4 raw, uint32_t *bins)
{
  const float x[4] = {__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z), __uint_as_float(raw.w)};
  for (int k = 0; k < 4; k++) {
    r.zeros += x[k] == 0.0f;
    r.tiny += fabsf(x[k]) < 0x1p-126f;
    if (HIST) count_bin(bins, x[k]);
  }
  float sum = fmaf(x[1], x[1], x[0] * x[0]) + fmaf(x[3], x[3], x[2] * x[2]);
  if (sum >= SQUARES_FROM && sum <= SQUARES_TO) {
    r.squares += (double)sum;
    r.amax = fmaxf(r.amax, fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3]))));
  } else if (((raw.x | raw.y | raw.z | raw.w) & 0x7FFFFFFFu) != 0) {
    for (int k = 0; k < 4; k++) careful(r, x[k]);
  }
}

template <bool HIST, typename T> __device__ static inline void look(running<T> &r, uint4 raw, uint32_t *bins)
{
  // As f16, bits compare like magnitudes in either format: what is NaN there is neither zero nor tiny here.
  const __half2 normal = as_halves((uint32_t)bits16<T>::normal * 0x00010001u), zero = as_halves(0);
  const uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
  float part[4];
  for (int k = 0; k < 4; k++) {
    __half2 h = as_halves(w[k]);
    r.zeros = __hadd2(r.zeros, __heq2(h, zero));
    r.tiny = __hadd2(r.tiny, __hlt2(__habs2(h), normal));
    float2 x = widen_pair(w[k], T());
    part[k] = fmaf(x.y, x.y, x.x * x.x);
    if (HIST) {
      count_bin(bins, x.x);
      count_bin(bins, x.y);
    }
  }
  float sum = (part[0] + part[1]) + (part[2] + part[3]);
  if ((sum >= SQUARES_FROM || (int)bits16<T>::infinity == 0x7C00) && sum <= SQUARES_TO) {   // squares of f16 never get lost
    r.squares += (double)sum;
    r.top = larger_pair(r.top, larger_pair(larger_pair(w[0], w[1], T()), larger_pair(w[2], w[3], T()), T()), T());
  } else if (((w[0] | w[1] | w[2] | w[3]) & 0x7FFF7FFFu) != 0) {
    for (int k = 0; k < 4; k++) {
      float2 x = widen_pair(w[k], T());
      careful(r, x.x);
      careful(r, x.y);
    }
  }
}

// ------------------------------------------------------------------ a chunk

__device__ static inline int halves_total(__half2 h) { return (int)(__low2float(h) + __high2float(h)); }

/// A thread's sums in the one form that is reduced. `padding`: zeros that are no elements.
__device__ static inline tally finish(const running<float> &r, int padding)
{
  tally t = {r.squares, __float_as_uint(r.amax), r.inf, r.nan, r.zeros - padding, r.tiny - padding, 0};
  return t;
}
template <typename T> __device__ static inline tally finish(const running<T> &r, int padding)
{
  float2 top = widen_pair(r.top, T());
  float amax = fmaxf(r.amax, fmaxf(top.x, top.y));
  tally t = {r.squares, __float_as_uint(amax), r.inf, r.nan, halves_total(r.zeros) - padding, halves_total(r.tiny) - padding, 0};
  return t;
}

/// The thread's share of n elements at g.
template <bool HIST, typename T> __device__ static inline tally read_chunk(const T *g, int n, bool aligned, uint32_t *bins)
{
  enum { V = 16 / sizeof(T) };
  running<T> r;
  memset(&r, 0, sizeof r);
  int padding = 0, whole = aligned ? n / V : 0;
  const uint4 *at = (const uint4 *)g;
  for (int i = threadIdx.x; i < whole; i += BATCH * SPAN_THREADS) {
    uint4 raw[BATCH];
#pragma unroll
    for (int k = 0; k < BATCH; k++) {
      bool there = i + k * SPAN_THREADS < whole;
      raw[k] = there ? __ldg(at + i + k * SPAN_THREADS) : make_uint4(0, 0, 0, 0);
      padding += there ? 0 : V;
    }
#pragma unroll
    for (int k = 0; k < BATCH; k++) look<HIST>(r, raw[k], bins);
  }
  for (int i = whole * V + threadIdx.x * V; i < n; i += SPAN_THREADS * V) {   // the rest, filled up with zeros
    union { uint4 raw; T x[V]; } u;
    u.raw = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int k = 0; k < V; k++)
      if (i + k < n) u.x[k] = g[i + k];
      else padding++;
    look<HIST>(r, u.raw, bins);
  }
  return finish(r, padding);
}

/// The block's sum, in thread 0.
__device__ static inline tally block_tally(tally t)
{
  __shared__ tally warps[WARPS];
  for (int step = 16; step > 0; step /= 2) t.squares += __shfl_xor_sync(0xFFFFFFFFu, t.squares, step);
  t.amax = __reduce_max_sync(0xFFFFFFFFu, t.amax);
  t.inf = __reduce_add_sync(0xFFFFFFFFu, t.inf);
  t.nan = __reduce_add_sync(0xFFFFFFFFu, t.nan);
  t.zeros = __reduce_add_sync(0xFFFFFFFFu, t.zeros);
  t.tiny = __reduce_add_sync(0xFFFFFFFFu, t.tiny);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = t;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int w = 1; w < WARPS; w++) {
      t.squares += warps[w].squares;
      t.amax = max(t.amax, warps[w].amax);
      t.inf += warps[w].inf;
      t.nan += warps[w].nan;
      t.zeros += warps[w].zeros;
      t.tiny += warps[w].tiny;
    }
  return t;
}

template <bool HIST> __global__ static void __launch_bounds__(SPAN_THREADS, 3)
read_gradients(const device_span *spans, const int32_t *chunk, tally *tallies, unsigned long long *hist)
{
  __shared__ uint32_t bins[HIST ? WARPS * ENG_HIST_BINS : 1];   // each warp its own, so that they do not wait for each other
  const device_span &s = spans[chunk[blockIdx.x]];
  uint32_t *own = bins + (HIST ? threadIdx.x / 32 * ENG_HIST_BINS : 0);
  if (HIST) {
    for (int b = threadIdx.x; b < WARPS * ENG_HIST_BINS; b += SPAN_THREADS) bins[b] = 0;
    __syncthreads();
  }
  int64_t first = (int64_t)((int)blockIdx.x - s.first_chunk) * SPAN_CHUNK;
  int n = (int)min((int64_t)SPAN_CHUNK, s.count - first);
  tally t;
  if (s.gradient_dtype == ENG_f16) t = read_chunk<HIST>((const f16_t *)s.gradient + first, n, s.aligned, own);
  else if (s.gradient_dtype == ENG_bf16) t = read_chunk<HIST>((const bf16_t *)s.gradient + first, n, s.aligned, own);
  else t = read_chunk<HIST>((const float *)s.gradient + first, n, s.aligned, own);
  t = block_tally(t);   // a barrier for the bins as well
  if (threadIdx.x == 0) tallies[blockIdx.x] = t;
  if (HIST)
    for (int b = threadIdx.x; b < ENG_HIST_BINS; b += SPAN_THREADS) {
      uint32_t sum = 0;
      for (int w = 0; w < WARPS; w++) sum += bins[w * ENG_HIST_BINS + b];
      if (sum) atomicAdd(&hist[(int64_t)chunk[blockIdx.x] * ENG_HIST_BINS + b], (unsigned long long)sum);
    }
}

// ------------------------------------------------------------------ tensors, all of them

/// Sums of doubles, integers and a maximum over the block, in thread 0.
struct wide_tally {
  double  squares;
  double  amax;
  int64_t inf, nan, zeros, tiny;
};

__device__ static inline void wide_add(wide_tally &a, const wide_tally &b)
{
  a.squares += b.squares;
  a.amax = fmax(a.amax, b.amax);
  a.inf += b.inf;
  a.nan += b.nan;
  a.zeros += b.zeros;
  a.tiny += b.tiny;
}

__device__ static inline wide_tally block_wide(wide_tally t)
{
  __shared__ wide_tally all[SPAN_THREADS];
  __syncthreads();   // of an earlier use
  all[threadIdx.x] = t;
  for (int half = SPAN_THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if ((int)threadIdx.x < half) wide_add(all[threadIdx.x], all[threadIdx.x + half]);
  }
  return all[0];
}

/// A block per tensor; the last one to finish also sums over the tensors. `counter` is 0 between launches.
__global__ static void __launch_bounds__(SPAN_THREADS, 2)
sum_up(const device_span *spans, int n, const tally *tallies, span_result *results, cuda_step_total *total, unsigned *counter,
       const cuda_fault_record *fault, cuda_fault_record *fault_seen)
{
  __shared__ bool last;
  if ((int)blockIdx.x < n) {
    const device_span &s = spans[blockIdx.x];
    wide_tally t = {0, 0, 0, 0, 0, 0};
    for (int c = threadIdx.x; c < s.chunks; c += SPAN_THREADS) {
      const tally &one = tallies[s.first_chunk + c];
      wide_tally w = {one.squares, (double)__uint_as_float(one.amax), one.inf, one.nan, one.zeros, one.tiny};
      wide_add(t, w);
    }
    t = block_wide(t);
    if (threadIdx.x == 0) {
      span_result r = {t.inf, t.nan, t.zeros, t.tiny - t.zeros, t.amax, t.squares};
      results[blockIdx.x] = r;
    }
  }
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(counter, 1u) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  wide_tally t = {0, 0, 0, 0, 0, 0};
  for (int k = threadIdx.x; k < n; k += SPAN_THREADS) {
    const volatile span_result *r = &results[k];   // written by other blocks of this launch
    double scale = spans[k].scale;
    wide_tally w = {r->squares / scale / scale, 0, r->inf, r->nan, 0, 0};
    wide_add(t, w);
  }
  t = block_wide(t);
  if (threadIdx.x == 0) {
    total->bad = t.inf + t.nan;
    total->sum_squares = t.squares;
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

enum { SLOTS = 5, DIRECT = 4 /* the slot of passes that are waited for at once */ };

/// What one pass found, on its way: fault, losses, results, histograms, in one piece of memory here and there.
typedef struct report {
  char       *memory;            // pinned
  int64_t     bytes;
  cudaEvent_t arrived;
  int64_t    *count;             // elements of each tensor
  int         n, n_loss, capacity;
  unsigned    needs;
  bool        told;              // its fault has been reported already
} report;

static struct {
  span_table table;
  void      *tallies, *device;   // device memory: of every chunk; the report being made
  int64_t    tallies_bytes, device_bytes;
  cuda_step_total *total;        // device memory, with the counter of sum_up behind it
  report     slot[SLOTS];
  int        oldest, on_the_way;
} pass;

const cuda_step_total *cuda_last_total(void) { return pass.total; }

static int64_t round_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }
static int64_t losses_at(void) { return round_up(sizeof(cuda_fault_record)); }
static int64_t results_at(int n_loss) { return losses_at() + round_up(n_loss * (int64_t)sizeof(float)); }
static int64_t hist_at(int n, int n_loss) { return results_at(n_loss) + round_up(n * (int64_t)sizeof(span_result)); }
static int64_t hist_bytes(int n) { return n * (int64_t)(ENG_HIST_BINS * sizeof(int64_t)); }

static eng_status check_pass(const param_span *spans, int n, tensor *const *loss, int n_loss)
{
  for (int k = 0; k < n; k++) {
    int d = spans[k].gradient_dtype;
    if (d != ENG_f32 && d != ENG_f16 && d != ENG_bf16)
      return error_set(ENG_ERR_DTYPE, "gradient statistics: expected the gradient of %s in f32, f16 or bf16, got %s", spans[k].name, eng_dtype_name(d));
  }
  for (int k = 0; k < n_loss; k++)
    if (loss[k]->dtype != ENG_f32 || loss[k]->count != 1)
      return error_set(ENG_ERR_VALUE, "gradient statistics: expected losses of one f32 element, got %s", tensor_text(loss[k]));
  return ENG_OK;
}

static eng_status report_room(report *r, int n, int64_t bytes)
{
  if (r->arrived) CUDA_TRY(cudaEventSynchronize(r->arrived));   // a report that was dropped may still be on its way
  else CUDA_TRY(cudaEventCreateWithFlags(&r->arrived, cudaEventDisableTiming));
  if (bytes > r->bytes) {
    if (r->memory) CUDA_TRY(cudaFreeHost(r->memory));
    r->memory = NULL;
    r->bytes = 0;
    CUDA_TRY(cudaMallocHost((void **)&r->memory, (size_t)(bytes + bytes / 4)));
    r->bytes = bytes + bytes / 4;
  }
  if (n > r->capacity) {
    int64_t *count = (int64_t *)realloc(r->count, (size_t)n * sizeof *count);
    if (!count) return error_set(ENG_ERR_MEMORY, "out of memory for the statistics of %d tensors", n);
    r->count = count;
    r->capacity = n;
  }
  return ENG_OK;
}

static eng_status launch(const param_span *spans, int n, unsigned needs, tensor *const *loss, int n_loss, report *r)
{
  ENG_TRY(check_pass(spans, n, loss, n_loss));
  bool hist = needs & ENG_NEED_HIST;
  int64_t bytes = hist_at(n, n_loss) + (hist ? hist_bytes(n) : 0);
  ENG_TRY(spans_ready(&pass.table, spans, n, NULL));
  ENG_TRY(device_grow(&pass.tallies, &pass.tallies_bytes, (pass.table.chunks + 1) * (int64_t)sizeof(tally)));
  ENG_TRY(device_grow(&pass.device, &pass.device_bytes, bytes));
  ENG_TRY(report_room(r, n, bytes));
  if (!pass.total) {
    cuda_step_total *total = (cuda_step_total *)cuda_take(2 * sizeof *total);
    if (!total) return error_set(ENG_ERR_MEMORY, "cuda: out of device memory for gradient statistics");
    CUDA_TRY(cudaMemsetAsync(total, 0, 2 * sizeof *total, cuda_stream()));
    pass.total = total;
  }

  const span_table *t = &pass.table;
  char *device = (char *)pass.device;
  tally *tallies = (tally *)pass.tallies;
  unsigned long long *bins = (unsigned long long *)(device + hist_at(n, n_loss));
  if (hist && n > 0) CUDA_TRY(cudaMemsetAsync(bins, 0, (size_t)hist_bytes(n), cuda_stream()));
  if (t->chunks > 0) {
    if (hist) read_gradients<true><<<(unsigned)t->chunks, SPAN_THREADS, 0, cuda_stream()>>>(t->span, t->chunk, tallies, bins);
    else read_gradients<false><<<(unsigned)t->chunks, SPAN_THREADS, 0, cuda_stream()>>>(t->span, t->chunk, tallies, bins);
    CUDA_LAUNCHED("gradient statistics");
  }
  sum_up<<<n > 0 ? (unsigned)n : 1, SPAN_THREADS, 0, cuda_stream()>>>(t->span, n, tallies, (span_result *)(device + results_at(n_loss)), pass.total,
                                                                     (unsigned *)(pass.total + 1), cuda_fault(), (cuda_fault_record *)device);
  CUDA_LAUNCHED("gradient statistics");
  for (int from = 0; from < n_loss; from += GATHERED) {
    gather_list list;
    int some = n_loss - from < GATHERED ? n_loss - from : GATHERED;
    for (int k = 0; k < GATHERED; k++) list.at[k] = (const float *)loss[from + (k < some ? k : 0)]->data;
    gather_losses<<<1, GATHERED, 0, cuda_stream()>>>(list, some, (float *)(device + losses_at()) + from);
    CUDA_LAUNCHED("gradient statistics");
  }
  CUDA_TRY(cudaMemcpyAsync(r->memory, device, (size_t)bytes, cudaMemcpyDeviceToHost, cuda_stream()));
  CUDA_TRY(cudaEventRecord(r->arrived, cuda_stream()));
  for (int k = 0; k < n; k++) r->count[k] = spans[k].count;
  r->n = n;
  r->n_loss = n_loss;
  r->needs = needs;
  r->told = false;
  return ENG_OK;
}

static void unpack(eng_tensor_stats *stats, const report *r)
{
  const span_result *results = (const span_result *)(r->memory + results_at(r->n_loss));
  const int64_t *hist = (const int64_t *)(r->memory + hist_at(r->n, r->n_loss));
  for (int k = 0; k < r->n; k++) {
    eng_tensor_stats *s = &stats[k];
    memset(s, 0, sizeof *s);
    s->count = r->count[k];
    s->inf = results[k].inf;
    s->nan = results[k].nan;
    if (r->needs & ENG_NEED_ZEROS) s->zeros = results[k].zeros;
    if (r->needs & ENG_NEED_UNDERFLOW) s->underflow = results[k].underflow;
    if (r->needs & ENG_NEED_AMAX) s->amax = results[k].amax;
    if (r->needs & ENG_NEED_NORM) s->sum_squares = results[k].squares;
    if (r->needs & ENG_NEED_HIST) memcpy(s->hist, hist + (int64_t)k * ENG_HIST_BINS, sizeof s->hist);
  }
}

eng_status cuda_gradstats(const param_span *spans, int n, unsigned needs, eng_tensor_stats *stats)
{
  ENG_TRY(launch(spans, n, needs, NULL, 0, &pass.slot[DIRECT]));
  ENG_TRY(cuda_synchronize());
  unpack(stats, &pass.slot[DIRECT]);
  return ENG_OK;
}

eng_status cuda_gradstats_start(const param_span *spans, int n, unsigned needs, tensor *const *loss, int n_loss)
{
  if (pass.on_the_way == DIRECT)
    return error_set(ENG_ERR_STATE, "gradient statistics: %d passes are on their way; hint: fetch the oldest first", DIRECT);
  ENG_TRY(launch(spans, n, needs, loss, n_loss, &pass.slot[(pass.oldest + pass.on_the_way) % DIRECT]));
  pass.on_the_way++;
  return ENG_OK;
}

eng_status cuda_gradstats_fetch(eng_tensor_stats *stats, int n, double *loss, int n_loss)
{
  report *r = &pass.slot[pass.oldest];
  if (pass.on_the_way == 0) return error_set(ENG_ERR_STATE, "gradient statistics: no pass is on its way");
  if (stats && (n != r->n || n_loss != r->n_loss))
    return error_set(ENG_ERR_VALUE, "gradient statistics: the oldest pass is of %d tensors and %d losses, asked for %d and %d", r->n, r->n_loss, n, n_loss);
  pass.oldest = (pass.oldest + 1) % DIRECT;
  pass.on_the_way--;
  if (!stats) return ENG_OK;
  CUDA_TRY(cudaEventSynchronize(r->arrived));
  const cuda_fault_record *fault = (const cuda_fault_record *)r->memory;
  if (fault->raised && !r->told) {
    for (int k = 0; k < SLOTS; k++) pass.slot[k].told = true;   // those behind it met the same one
    return cuda_fault_told(fault);
  }
  unpack(stats, r);
  const float *values = (const float *)(r->memory + losses_at());
  for (int k = 0; k < n_loss; k++) loss[k] = (double)values[k];
  return ENG_OK;
}
