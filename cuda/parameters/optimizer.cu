// The fused optimizer update. One launch over all parameters multiplies gradients by a factor,
// clamps them, and updates moments, master weights and low-precision weights. Updates of bf16
// masters have kernels of their own. This file also unscales gradients into f32. Called through the
// device's table.
//
// Results are bit-equal to core/cpu/reference_optimizer.c, with the same order of operations: f32
// with one rounding per operation, no fused multiply-adds (see the build flags), IEEE division and
// square root.
//
// The values that change between updates (learning rate, factor, t) are in one piece of device
// memory, `numbers`, which the host sends before the launch (cuda_stage). The card itself decides
// on a lagged update: the kernel `decide` reads the totals of the gradient statistics, counts t,
// and sets the factor. Owns `numbers`.
//
// For the norms of the change, the weights and the moments, squares are summed in f64. The order is
// the same on every card: a thread's elements, then lanes, warps and a tensor's chunks. The host
// waits for the sums. Updates without norms and without spike_clip use kernels that lack this code.
#include "passes.h"
#include "kernel/lanes.h"
#include "runtime/runtime.h"
#include "spans.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

extern "C" {
#include "base/rng.h"
#include "device/update_rule.h"
}

struct rule : update_rule {
  // in lagged updates, `decide` computes lr and root from these three, because t is on the card
  double plain_lr, plain_beta1, plain_beta2;
};

/// The numbers of one update.
typedef struct numbers {
  // factor on the gradients; in a lagged update, `decide` multiplies it by the clip coefficient
  double  factor;
  double  clip_norm;
  int64_t t;                 // number of this update, from 1
  float   limit;             // clamp gradients to +-limit; inf: no clamp
  int32_t go;                // 0: skip this update
  int32_t corrected, n_groups;   // corrected: whether the optimizer has ENG_BIAS_CORRECTION
  // spike: the limit on g^2 / v, or 0 for no limit. shrink: the factor on the change of the
  // weights. dry: 1 to compute norms and write nothing. Only updates with norms or spike_clip use
  // these three.
  float   spike, shrink;
  int32_t dry;
  // counter: the index of the update counter. fresh: 1 if this counter restarts at t. Only lagged
  // updates use these two.
  int32_t counter, fresh;
  // rounding: ENG_ROUND_*. seed and draw determine the random bits of stochastic rounding; each
  // applied update has its own draw. Only bf16 masters use these three.
  int32_t rounding;
  uint64_t seed;
  int64_t draw;
} numbers;

enum { NUMBERS = (sizeof(numbers) + 15) / 16 * 16 };

/// Returns the rules of the groups, which follow *u in memory.
__host__ __device__ static inline rule *rules_of(const numbers *u)
{ return (rule *)((char *)u + NUMBERS); }

// ------------------------------------------------------------------ elements

__device__ static inline float scaled(const scaling &s, float g) { return g * s.first * s.second; }

enum { LOOP_SGD, LOOP_ADAM, LOOP_LION };

/// Updates one element: weight w, gradient g, moments m and v. `momentum` is true if SGD uses
/// momentum, `starts` if m has no value yet and becomes the gradient. `spike` is Adam's limit on
/// g^2 / v, or 0 for no limit.
template <int LOOP>
__device__ static inline void advance(const rule &r, float limit, float spike, bool momentum,
                                      bool starts, float &w, float g, float &m, float &v)
{
  g = g > limit ? limit : g < -limit ? -limit : g;   // NaN stays
  if (LOOP == LOOP_ADAM && spike > 0) {
    const float most = spike * v;
    if (g * g > most) g = copysignf(sqrtf(most), g);
  }
  if (LOOP == LOOP_ADAM) {
    w = w * r.keep;
    if (r.coupled_decay != 0) g = g + r.coupled_decay * w;
    // m moves toward g by the fraction gain1. The formula starts from m or g, whichever is nearer.
    m = r.gain1 < 0.5f ? m + r.gain1 * (g - m) : g + (r.gain1 - 1.0f) * (g - m);
    v = v * r.beta2 + r.gain2 * g * g;
    w = w + -r.lr * m / (sqrtf(v) / r.root + r.eps);
  } else if (LOOP == LOOP_LION) {
    float direction = r.beta1 * m + r.gain1 * g;
    float sign = direction > 0 ? 1.0f : direction < 0 ? -1.0f : direction;
    w = w * r.keep;
    m = r.beta2 * m + r.gain2 * g;
    w = w - r.lr * sign;
  } else {
    if (r.coupled_decay != 0) g = g + r.coupled_decay * w;
    if (momentum) {
      m = starts ? g : r.momentum * m + r.gain * g;
      g = r.nesterov ? g + r.momentum * m : m;
    }
    w = w - r.lr * g;
  }
}

/// Loads and stores four elements at a time. Loading and widening are separate, so all loads are in
/// flight before the first wait.
typedef float_lanes<4> quads;

// ------------------------------------------------------------------ chunks

enum { BATCH = 2 };   // groups of four elements that a thread has in flight

/// The piece of a tensor that a block updates. Pointers are to the piece's first element.
struct piece {
  char   *master, *compensation, *low, *gradient, *moment1, *moment2;
  int     master_dtype, low_dtype, gradient_dtype, moment_dtype, n, quads, index;
  int64_t first;             // index of the piece's first element in its parameter
};

__device__ static inline char *moved(void *p, int dtype, int64_t elements)
{ return p ? (char *)p + elements * (dtype == ENG_f32 ? 4 : 2) : NULL; }

__device__ static inline piece piece_of(const device_span &s)
{
  int64_t first = (int64_t)((int)blockIdx.x - s.first_chunk) * SPAN_CHUNK;
  piece p;
  p.low_dtype = s.low_dtype;
  p.gradient_dtype = s.gradient_dtype;
  p.moment_dtype = s.moment_dtype;
  p.master_dtype = s.master_dtype;
  p.index = s.index;
  p.first = s.first + first;
  p.master = moved(s.master, s.master_dtype, first);
  p.compensation = moved(s.compensation, ENG_bf16, first);
  p.low = moved(s.low, s.low_dtype, first);
  p.gradient = moved(s.gradient, s.gradient_dtype, first);
  p.moment1 = moved(s.moment[0], s.moment_dtype, first);
  p.moment2 = moved(s.moment[1], s.moment_dtype, first);
  p.n = (int)min((int64_t)SPAN_CHUNK, s.count - first);
  p.quads = s.aligned ? p.n / 4 : 0;
  return p;
}

/// Calls `advance`. If MORE is true, also multiplies the change of the weight by u->shrink, and
/// adds the squares of the unshrunk change, of the new weight and of the moments to `sum`.
template <int LOOP, bool MORE>
__device__ static inline void advance_one(const rule &r, const numbers *u, bool momentum,
                                          bool starts, float &w, float g, float &m, float &v,
                                          double (&sum)[ENG_NORMS])
{
  const float before = w;
  advance<LOOP>(r, u->limit, MORE ? u->spike : 0.0f, momentum, starts, w, g, m, v);
  if (!MORE) return;
  const float change = w - before;
  if (u->shrink != 1) w = before + u->shrink * change;
  const float of[ENG_NORMS] = {change, w, m, v};
  for (int k = 0; k < ENG_NORMS; k++) sum[k] += (double)of[k] * of[k];
}

/// Rounds the N new weights `w` to bf16, and sets `lost` to the rounding errors. w[0] is element i
/// of the piece. Does nothing for f32 masters.
template <int N> __device__ static inline void
round_masters(const piece &p, const numbers *u, int i, float *w, float *lost)
{
  uint32_t word[4] = {0, 0, 0, 0};
  int64_t have = -1;
  for (int k = 0; k < N && p.master_dtype == ENG_bf16; k++) {
    const int64_t element = p.first + i + k;
    const float whole = w[k];
    if (u->rounding == ENG_ROUND_STOCHASTIC) {
      if (element / 8 != have)
        rng_of_update(word, u->seed, u->draw, p.index, have = element / 8);
      w[k] = bf16_to_f32(bf16_stochastic(whole, rng_half(word, element)));
    } else w[k] = bf16_to_f32(bf16_from_f32(whole));
    lost[k] = f32_is_finite(w[k]) ? whole - w[k] : 0.0f;
  }
}

/// Adds up the sums of a block's threads. Returns sum k to thread k, for k < ENG_NORMS.
__device__ static inline double block_sums(const double (&sum)[ENG_NORMS])
{
  __shared__ double warps[ENG_NORMS][SPAN_THREADS / 32];
  for (int k = 0; k < ENG_NORMS; k++) {
    double s = sum[k];
    for (int bits = 16; bits > 0; bits /= 2) s += __shfl_xor_sync(0xFFFFFFFFu, s, bits);
    if (threadIdx.x % 32 == 0) warps[k][threadIdx.x / 32] = s;
  }
  __syncthreads();
  double total = 0;
  for (int w = 0; w < SPAN_THREADS / 32 && threadIdx.x < ENG_NORMS; w++)
    total += warps[threadIdx.x][w];
  return total;
}

/// Updates all parameters, with one block per chunk. MORE is true for updates with norms or
/// spike_clip, BF16 if some masters are bf16. `partial` [chunks][ENG_NORMS] receives the sums of
/// squares of each chunk, or is NULL if norms are not wanted.
template <int LOOP, bool MORE, bool BF16> __global__ static void
__launch_bounds__(SPAN_THREADS, MORE || BF16 ? 2 : 3)
advance_all(const device_span *spans, const int32_t *chunk, const numbers *u, double *partial)
{
  if (!u->go) return;
  const device_span &s = spans[chunk[blockIdx.x]];
  const piece p = piece_of(s);
  const rule r = rules_of(u)[s.group];
  const scaling scale = scaling_of(u->factor / s.scale);
  const bool starts = s.starts != 0, writes = !MORE || !u->dry;
  double sum[ENG_NORMS] = {0, 0, 0, 0};
  const bool has_m = LOOP != LOOP_SGD || (p.moment1 && r.momentum != 0), has_v = LOOP == LOOP_ADAM;

  for (int first = threadIdx.x; first < p.quads; first += BATCH * SPAN_THREADS) {
    quads::raw g[BATCH], w[BATCH], m[BATCH], v[BATCH], c[BATCH];
#pragma unroll
    for (int k = 0; k < BATCH; k++) {
      // past the end, the last quad is read again but not written
      const int at = 4 * min(first + k * SPAN_THREADS, p.quads - 1);
      m[k] = v[k] = {};
      quads::fetch(g[k], p.gradient, p.gradient_dtype, at);
      quads::fetch(w[k], p.master, BF16 ? p.master_dtype : ENG_f32, at);
      if (BF16 && p.compensation) quads::fetch(c[k], p.compensation, ENG_bf16, at);
      if (has_m) quads::fetch(m[k], p.moment1, p.moment_dtype, at);
      if (has_v) quads::fetch(v[k], p.moment2, p.moment_dtype, at);
    }
#pragma unroll
    for (int k = 0; k < BATCH; k++) {
      const int at = 4 * (first + k * SPAN_THREADS);
      if (at >= 4 * p.quads) break;
      float weight[4], gradient[4], first_moment[4], second_moment[4], lost[4];
      quads::values(gradient, g[k], p.gradient_dtype);
      quads::values(weight, w[k], BF16 ? p.master_dtype : ENG_f32);
      if (BF16 && p.compensation) {
        quads::values(lost, c[k], ENG_bf16);
        for (int e = 0; e < 4; e++) weight[e] += lost[e];
      }
      quads::values(first_moment, m[k], p.moment_dtype);
      quads::values(second_moment, v[k], p.moment_dtype);
      for (int e = 0; e < 4; e++)
        advance_one<LOOP, MORE>(r, u, has_m, starts, weight[e], scaled(scale, gradient[e]),
                                first_moment[e], second_moment[e], sum);
      if (!writes) continue;
      if (BF16) round_masters<4>(p, u, at, weight, lost);
      quads::store(p.master, BF16 ? p.master_dtype : ENG_f32, at, weight);
      if (BF16 && p.compensation) quads::store(p.compensation, ENG_bf16, at, lost);
      if (has_m) quads::store(p.moment1, p.moment_dtype, at, first_moment);
      if (has_v) quads::store(p.moment2, p.moment_dtype, at, second_moment);
      if (p.low) quads::store(p.low, p.low_dtype, at, weight);
    }
  }
  for (int i = 4 * p.quads + threadIdx.x; i < p.n; i += SPAN_THREADS) {
    float w = load_as<float>(p.master, BF16 ? p.master_dtype : ENG_f32, i), lost;
    const float g = load_as<float>(p.gradient, p.gradient_dtype, i);
    if (BF16 && p.compensation) w += load_as<float>(p.compensation, ENG_bf16, i);
    float m = has_m ? load_as<float>(p.moment1, p.moment_dtype, i) : 0.0f,
          v = has_v ? load_as<float>(p.moment2, p.moment_dtype, i) : 0.0f;
    advance_one<LOOP, MORE>(r, u, has_m, starts, w, scaled(scale, g), m, v, sum);
    if (!writes) continue;
    if (BF16) round_masters<1>(p, u, i, &w, &lost);
    store_as(p.master, BF16 ? p.master_dtype : ENG_f32, i, w);
    if (BF16 && p.compensation) store_as(p.compensation, ENG_bf16, i, lost);
    if (has_m) store_as(p.moment1, p.moment_dtype, i, m);
    if (has_v) store_as(p.moment2, p.moment_dtype, i, v);
    if (p.low) store_as(p.low, p.low_dtype, i, w);
  }
  if (!MORE || !partial) return;
  const double total = block_sums(sum);
  if (threadIdx.x < ENG_NORMS) partial[blockIdx.x * (int64_t)ENG_NORMS + threadIdx.x] = total;
}

/// Adds up each tensor's chunks: one block per tensor, one warp per norm.
__global__ static void __launch_bounds__(32 * ENG_NORMS)
add_chunks(const device_span *spans, const double *partial, double *norms)
{
  const device_span &s = spans[blockIdx.x];
  const int k = threadIdx.x / 32;
  double sum = 0;
  for (int64_t c = threadIdx.x % 32; c < s.chunks; c += 32)
    sum += partial[(s.first_chunk + c) * ENG_NORMS + k];
  for (int bits = 16; bits > 0; bits /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, bits);
  if (threadIdx.x % 32 == 0) norms[blockIdx.x * (int64_t)ENG_NORMS + k] = sum;
}

/// Decides whether a lagged update is applied, and with which factor and t. Runs in one block.
__global__ static void decide(numbers *u, const cuda_step_total *total, int64_t *counters)
{
  __shared__ int64_t t;
  if (threadIdx.x == 0) {
    bool go = total->bad == 0;
    u->draw = t = u->fresh ? u->t : counters[u->counter];
    counters[u->counter] = t + (go ? 1 : 0);
    double norm = sqrt(total->sum_squares) * fabs(u->factor);
    u->factor = clip_factor(u->factor, norm, u->clip_norm);
    u->go = go;
  }
  __syncthreads();
  rule *rules = rules_of(u);
  for (int g = threadIdx.x; u->corrected && g < u->n_groups; g += blockDim.x) {
    rules[g].lr = (float)(rules[g].plain_lr / (1.0 - pow(rules[g].plain_beta1, (double)t)));
    rules[g].root = (float)sqrt(1.0 - pow(rules[g].plain_beta2, (double)t));
  }
}

/// Writes gradient * factor / the span's relative scale, in f32. The spans of this pass have the
/// targets in place of masters. Sets *found to 1 if a result is inf or nan.
__global__ static void __launch_bounds__(SPAN_THREADS, 4)
scale_gradients(const device_span *spans, const int32_t *chunk, double factor, int *found)
{
  const device_span &s = spans[chunk[blockIdx.x]];
  const piece p = piece_of(s);
  const scaling scale = scaling_of(factor / s.scale);
  bool bad = false;
  for (int first = threadIdx.x; first < p.quads; first += BATCH * SPAN_THREADS) {
    quads::raw g[BATCH];
#pragma unroll
    for (int k = 0; k < BATCH; k++)
      quads::fetch(g[k], p.gradient, p.gradient_dtype,
                   4 * min(first + k * SPAN_THREADS, p.quads - 1));
#pragma unroll
    for (int k = 0; k < BATCH; k++) {
      const int at = 4 * (first + k * SPAN_THREADS);
      if (at >= 4 * p.quads) break;
      float x[4];
      quads::values(x, g[k], p.gradient_dtype);
      for (int e = 0; e < 4; e++) {
        x[e] = scaled(scale, x[e]);
        bad |= !f32_is_finite(x[e]);
      }
      quads::store(p.master, ENG_f32, at, x);
    }
  }
  for (int i = 4 * p.quads + threadIdx.x; i < p.n; i += SPAN_THREADS) {
    float x = scaled(scale, load_as<float>(p.gradient, p.gradient_dtype, i));
    bad |= !f32_is_finite(x);
    ((float *)p.master)[i] = x;
  }
  if (__syncthreads_or(bad) && threadIdx.x == 0) *found = 1;
}

// ------------------------------------------------------------------ the host's side

static struct {
  span_table  table, targets;        // for updates; for unscaling
  device_room numbers;
  device_room norms;      // sums of squares: [n][ENG_NORMS] for tensors, then [chunks][ENG_NORMS]
  device_room counters;   // the update counters [ENG_UPDATE_SLOTS], int64_t, then the int found_inf
} pass;

static eng_status counters_ready(void)
{ return device_grow(&pass.counters, (ENG_UPDATE_SLOTS + 1) * (int64_t)sizeof(int64_t)); }

static rule rule_of(const eng_update *u, const eng_hyper *h)
{ return rule{update_rule_of(u, h), h->lr, h->beta1, h->beta2}; }

/// Sends this update's numbers, and the table if it changed, to the card.
static eng_status prepare(const param_span *spans, int n, const eng_update *update)
{
  int64_t bytes = NUMBERS + update->n_groups * (int64_t)sizeof(rule);
  if (n == 0) return ENG_OK;
  ENG_TRY(counters_ready());
  ENG_TRY(spans_ready(&pass.table, spans, n, NULL));
  ENG_TRY(device_grow(&pass.numbers, bytes));
  numbers *u = (numbers *)calloc(1, (size_t)bytes);
  FAIL_IF(!u, ENG_ERR_MEMORY, "out of memory on the host for an update with %d groups",
          update->n_groups);
  u->factor = update->gradient_factor;
  u->clip_norm = update->clip_norm;
  u->t = update->t;
  u->limit = update->clip_value > 0 ? (float)update->clip_value : INFINITY;
  u->go = 1;
  u->corrected = has_trait(update->kind, ENG_BIAS_CORRECTION);
  u->n_groups = update->n_groups;
  u->spike = (float)update->spike_clip;
  u->shrink = (float)update->factor;
  u->dry = update->dry;
  u->counter = update->slot;
  u->fresh = update->fresh;
  u->rounding = update->rounding;
  u->seed = rng_seed();
  u->draw = update->draw;
  for (int g = 0; g < update->n_groups; g++) rules_of(u)[g] = rule_of(update, &update->groups[g]);
  eng_status status = cuda_stage(pass.numbers.data, u, bytes);
  free(u);
  return status;
}

/// Adds up the chunks' sums of squares, waits for them, and stores them in spans[k].norms.
static eng_status fetch_norms(const param_span *spans, int n)
{
  const int64_t bytes = n * (int64_t)sizeof(double[ENG_NORMS]);
  double *sums = (double *)pass.norms.data;
  add_chunks<<<(unsigned)n, 32 * ENG_NORMS, 0, cuda_stream()>>>(
    pass.table.span, sums + (int64_t)n * ENG_NORMS, sums);
  ENG_TRY(cuda_launched("optimize"));
  double *host = (double *)malloc((size_t)bytes);
  FAIL_IF(!host, ENG_ERR_MEMORY, "out of memory on the host for the norms of %d parameters", n);
  eng_status status = cuda_move(host, sums, bytes, COPY_TO_HOST);
  for (int k = 0; k < n && status == ENG_OK; k++)
    memcpy(spans[k].norms, host + (int64_t)k * ENG_NORMS, sizeof(double[ENG_NORMS]));
  free(host);
  return status;
}

typedef void advance_kernel(const device_span *, const int32_t *, const numbers *, double *);

template <int LOOP> static advance_kernel *kernel_of(bool more, bool bf16)
{
  if (more) return bf16 ? advance_all<LOOP, true, true> : advance_all<LOOP, true, false>;
  return bf16 ? advance_all<LOOP, false, true> : advance_all<LOOP, false, false>;
}

static advance_kernel *(*const kernels_of[])(bool more, bool bf16) = {
#define ENG_OPTIMIZER(name, KIND, loop, ...) kernel_of<LOOP_##loop>,
#include "optimizers.def"
};

eng_status cuda_optimize(const param_span *spans, int n, const eng_update *update)
{
  const cuda_step_total *total = cuda_total_of(update->statistics);
  FAIL_IF(update->lagged && !total, ENG_ERR_STATE, "optimize: a lagged update needs gradient "
          "statistics, and this step has none; hint: lagged = false");
  ENG_TRY(prepare(spans, n, update));
  const bool norms = update->norms != NULL;
  for (int k = 0; k < n && norms; k++) memset(spans[k].norms, 0, sizeof(double[ENG_NORMS]));
  if (n == 0 || pass.table.chunks == 0) return ENG_OK;
  numbers *u = (numbers *)pass.numbers.data;
  if (update->lagged)
    decide<<<1, 64, 0, cuda_stream()>>>(u, total, (int64_t *)pass.counters.data);
  if (norms)
    ENG_TRY(device_grow(&pass.norms,
                        (n + pass.table.chunks) * (int64_t)sizeof(double[ENG_NORMS])));
  const bool more = norms || update->spike_clip > 0;
  bool bf16 = false;               // whether some masters are bf16
  for (int k = 0; k < n; k++) bf16 = bf16 || spans[k].master_dtype != ENG_f32;
  double *partial = norms ? (double *)pass.norms.data + (int64_t)n * ENG_NORMS : NULL;
  advance_kernel *kernel = kernels_of[update->kind](more, bf16);
  kernel<<<(unsigned)pass.table.chunks, SPAN_THREADS, 0, cuda_stream()>>>(
    pass.table.span, pass.table.chunk, u, partial);
  ENG_TRY(cuda_launched("optimize"));
  return norms ? fetch_norms(spans, n) : ENG_OK;
}

eng_status cuda_unscale(const param_span *spans, int n, double factor, float *const *target,
                        int *found_inf)
{
  *found_inf = 0;
  ENG_TRY(counters_ready());
  ENG_TRY(spans_ready(&pass.targets, spans, n, target));
  const span_table *t = &pass.targets;
  if (t->chunks == 0) return ENG_OK;
  int *found = (int *)((int64_t *)pass.counters.data + ENG_UPDATE_SLOTS);
  CUDA_TRY(cudaMemsetAsync(found, 0, sizeof *found, cuda_stream()));
  scale_gradients<<<(unsigned)t->chunks, SPAN_THREADS, 0, cuda_stream()>>>(t->span, t->chunk,
                                                                           factor, found);
  ENG_TRY(cuda_launched("unscale"));
  return cuda_move(found_inf, found, sizeof *found, COPY_TO_HOST);
}
