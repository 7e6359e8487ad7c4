// Batch norm and group norm of x [N x S x C], channels last, and their gradients. Batch norm is
// computed as group norm of a single sample that holds all rows, with one channel per group.
//
// There are three passes. The first cuts a sample into tiles. A tile covers a piece of the rows and
// up to 32 vectors of channels. For each channel of a tile, the first pass sums x and x^2 or, for
// the gradients, dy and dy * (x - mean). (A forward pass with given statistics needs no sums.) The
// second pass adds the sums of a channel's pieces and of a group's channels, and derives up to four
// factors for each channel. The third pass applies the factors to the elements.
//
// A thread sums a run of RUN rows in f32 (in f64 if f32 would overflow), and adds the sums of its
// runs in f64. In a run, x is split into the run's mean and the deviations from it, so that only
// the deviations are rounded to f32. The shape, the formats and the alignment of x, dy and the
// output determine the order of every sum. f64 inputs are computed in f64 throughout. Called
// through the device's table.
#include "kernel/lanes.h"
#include "kernel/team.h"

namespace {

enum {
  WARPS = 8,
  THREADS = 32 * WARPS,
  RUN = 8,                   // rows that a thread loads before it adds them
  MOST_BLOCKS = 132 * 4,     // blocks that an H200 runs at a time; limits the pieces
};

/// A call as kernels see it. Absent tensors are NULL.
struct channel_norm {
  const void *x, *dy;
  void   *out;                             // y, or dx
  int32_t x_dtype, dy_dtype, out_dtype;
  int64_t samples, rows;                   // rows of one sample
  int64_t channels, groups;
  int     lanes_log2;                      // 2^lanes_log2 lanes of a warp take adjacent vectors
  int64_t tiles, pieces, piece_rows;       // tiles along the channels, pieces along the rows
  double *partial;                         // [samples x pieces x 2 x channels]
  void   *factor;                          // [samples x 4 x channels], f32 or f64: see apply
  bool    wide;                            // factors are f64
  bool    given;                           // backward: the statistics do not depend on x
};

/// What a thread processes: a vector of channels, from `channel` on, in the rows `first`,
/// `first + step` and so on, below `end`. A thread without channels has no rows. `beside` is the
/// index of the vector in its tile, `below` the index of the row among those that the thread's warp
/// takes at a time.
struct thread_place {
  int64_t sample, piece, channel, first, end;
  int     step, beside, below;
};

template <int V> __device__ inline thread_place place_of(const channel_norm &s)
{
  thread_place at;
  const int lanes = 1 << s.lanes_log2, lane = threadIdx.x % 32, warp = threadIdx.x / 32,
            down = 32 >> s.lanes_log2;     // rows of a warp
  const int64_t tile = blockIdx.x % s.tiles, block = blockIdx.x / s.tiles;
  at.sample = block / s.pieces;
  at.piece = block % s.pieces;
  at.beside = lane & (lanes - 1);
  at.below = lane >> s.lanes_log2;
  at.channel = (tile * lanes + at.beside) * V;
  at.step = WARPS * down;
  at.first = at.piece * s.piece_rows + warp * down + at.below;
  const int64_t end = (at.piece + 1) * s.piece_rows;
  at.end = at.channel >= s.channels ? 0 : end < s.rows ? end : s.rows;
  return at;
}

__device__ inline int64_t offset_of(const channel_norm &s, const thread_place &at, int64_t row)
{ return (at.sample * s.rows + row) * s.channels + at.channel; }

/// Loads factor `which` (0 to 3) of each of the thread's V channels.
template <class L>
__device__ inline void load_factors(typename L::number (&f)[L::V], const channel_norm &s,
                                    const thread_place &at, int which)
{
  const auto *from = (const typename L::number *)s.factor +
                     (at.sample * 4 + which) * s.channels + at.channel;
#pragma unroll
  for (int v = 0; v < L::V; v++) f[v] = from[v];
}

// ------------------------------------------------------------------ sums

/// Converts `raw`, V channels of one row, to numbers. If `there` is false, the thread has no row to
/// convert, and the numbers are zeros.
template <class L>
__device__ inline void values_of(typename L::number (&x)[L::V], const typename L::raw &raw,
                                 int dtype, bool there)
{
  if (there) L::values(x, raw, dtype);
#pragma unroll
  for (int v = 0; v < L::V; v++) x[v] = there ? x[v] : 0;
}

/// Adds x and x^2 of n rows to the sums of V channels. x is split into m, the rounded mean of the
/// rows, and deviations from m. The sum of x^2 is then
///   n m^2 + 2 m * (sum of the deviations) + (sum of the squared deviations).
template <class L>
__device__ inline void add_moments(double (&sum)[2][L::V], const typename L::raw (&raw)[RUN],
                                   const channel_norm &s, int n)
{
  constexpr int V = L::V;
  typename L::number x[V], m[V] = {}, deviation[V] = {}, square[V] = {};
#pragma unroll
  for (int u = 0; u < RUN; u++) {
    values_of<L>(x, raw[u], s.x_dtype, u < n);
#pragma unroll
    for (int v = 0; v < V; v++) m[v] += x[v];
  }
#pragma unroll
  for (int v = 0; v < V; v++) m[v] /= (typename L::number)n;
#pragma unroll
  for (int u = 0; u < RUN; u++) {
    values_of<L>(x, raw[u], s.x_dtype, u < n);
#pragma unroll
    for (int v = 0; v < V; v++) {
      const auto d = u < n ? x[v] - m[v] : 0;
      deviation[v] += d;
      square[v] += d * d;
    }
  }
#pragma unroll
  for (int v = 0; v < V; v++) {
    if (f64_is_finite((double)square[v])) {
      const double whole = (double)n * m[v] + deviation[v];
      sum[0][v] += whole;
      sum[1][v] += square[v] + m[v] * (whole + deviation[v]);
      continue;
    }
#pragma unroll
    for (int u = 0; u < RUN; u++) {
      values_of<L>(x, raw[u], s.x_dtype, u < n);
      sum[0][v] += (double)x[v];
      sum[1][v] += (double)x[v] * (double)x[v];
    }
  }
}

/// Adds dy and dy * (x - mean) of n rows to the sums of V channels.
template <class L>
__device__ inline void add_slopes(double (&sum)[2][L::V], const typename L::raw (&x_raw)[RUN],
                                  const typename L::raw (&dy_raw)[RUN],
                                  const typename L::number (&mean)[L::V], const channel_norm &s,
                                  int n)
{
  constexpr int V = L::V;
  typename L::number x[V], dy[V], total[V] = {}, product[V] = {};
#pragma unroll
  for (int u = 0; u < RUN; u++) {
    values_of<L>(x, x_raw[u], s.x_dtype, u < n);
    values_of<L>(dy, dy_raw[u], s.dy_dtype, u < n);
#pragma unroll
    for (int v = 0; v < V; v++) {
      total[v] += dy[v];
      product[v] += u < n ? dy[v] * (x[v] - mean[v]) : 0;
    }
  }
#pragma unroll
  for (int v = 0; v < V; v++) {
    if (f64_is_finite((double)total[v]) && f64_is_finite((double)product[v])) {
      sum[0][v] += total[v];
      sum[1][v] += product[v];
      continue;
    }
#pragma unroll
    for (int u = 0; u < RUN; u++) {
      values_of<L>(x, x_raw[u], s.x_dtype, u < n);
      values_of<L>(dy, dy_raw[u], s.dy_dtype, u < n);
      sum[0][v] += (double)dy[v];
      if (u < n) sum[1][v] += (double)dy[v] * ((double)x[v] - (double)mean[v]);
    }
  }
}

/// Fills `partial`. In the backward pass, factor 0 must hold the means.
template <class L, bool BACK>
__global__ void __launch_bounds__(THREADS) sum_rows(const __grid_constant__ channel_norm s)
{
  constexpr int V = L::V;
  typedef typename L::number number;
  __shared__ double kept[WARPS][2][32 * V];
  const thread_place at = place_of<V>(s);
  const int lanes = 1 << s.lanes_log2;
  double sums[2][V] = {};
  number mean[V];
  if (BACK && at.end > 0) load_factors<L>(mean, s, at, 0);
  for (int64_t row = at.first; row < at.end; row += RUN * at.step) {
    typename L::raw x[RUN], dy[RUN];
    int n = 0;
#pragma unroll
    for (int u = 0; u < RUN; u++) {
      if (row + u * at.step >= at.end) continue;
      const int64_t from = offset_of(s, at, row + u * at.step);
      L::fetch(x[u], s.x, s.x_dtype, from);
      if (BACK) L::fetch(dy[u], s.dy, s.dy_dtype, from);
      n++;
    }
    if (BACK) add_slopes<L>(sums, x, dy, mean, s, n);
    else add_moments<L>(sums, x, s, n);
  }
#pragma unroll
  for (int which = 0; which < 2; which++)
#pragma unroll
    for (int v = 0; v < V; v++) {
      double sum = sums[which][v];
      for (int apart = 16; apart >= lanes; apart >>= 1)
        sum += __shfl_down_sync(0xFFFFFFFFu, sum, apart);
      if (at.below == 0) kept[threadIdx.x / 32][which][at.beside * V + v] = sum;
    }
  __syncthreads();
  const int64_t tile = blockIdx.x % s.tiles * lanes * V;
  double *to = s.partial + (at.sample * s.pieces + at.piece) * 2 * s.channels + tile;
  for (int i = threadIdx.x; i < 2 * lanes * V; i += THREADS) {
    const int which = i / (lanes * V), c = i % (lanes * V);
    if (tile + c >= s.channels) continue;
    double sum = kept[0][which][c];
#pragma unroll
    for (int w = 1; w < WARPS; w++) sum += kept[w][which][c];
    to[which * s.channels + c] = sum;
  }
}

// ------------------------------------------------------------------ factors

/// A small tensor, which kernels read and write element by element in any float format.
struct vector { void *data; int32_t dtype; };

vector vector_of(const tensor *x) { return {data_of(x), dtype_of(x)}; }

__device__ inline double number_at(const vector &x, int64_t i, double absent)
{ return x.data ? element_double(x.data, x.dtype, i) : absent; }

__device__ inline void put_factor(const channel_norm &s, int64_t sample, int which, int64_t c,
                                  double value)
{
  const int64_t at = (sample * 4 + which) * s.channels + c;
  if (s.wide) ((double *)s.factor)[at] = value;
  else ((float *)s.factor)[at] = (float)value;
}

/// Returns sum `which` (0 or 1) of channel c in one piece of a sample.
__device__ inline double part_of(const channel_norm &s, int64_t sample, int64_t piece, int which,
                                 int64_t c)
{ return s.partial[((sample * s.pieces + piece) * 2 + which) * s.channels + c]; }

/// The group of a sample that a warp processes: `width` channels from `from` on. k is the index of
/// the group's statistics. `there` is false if no group is left for the warp.
struct warp_group { int64_t k, sample, from, width; bool there; };

__device__ inline warp_group group_of_warp(const channel_norm &s)
{
  const int64_t k = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32, width = s.channels / s.groups;
  return {k, k / s.groups, k % s.groups * width, width, k < s.samples * s.groups};
}

/// The statistics of a norm. If `mean` and `variance` are given, they are used. Otherwise they are
/// computed and stored in `out_mean` and `out_variance`, except where these are NULL.
struct statistics { vector mean, variance, weight, bias, out_mean, out_variance; double eps; };

/// Finds the factors of the forward pass, y = (x - f0) * f1 + f2. A warp processes a group of a
/// sample.
__global__ void __launch_bounds__(THREADS)
  find_factors(const __grid_constant__ channel_norm s, const __grid_constant__ statistics t)
{
  const warp_group g = group_of_warp(s);
  if (!g.there) return;
  double mean, variance;
  if (t.mean.data) {
    mean = number_at(t.mean, g.k, 0);
    variance = number_at(t.variance, g.k, 0);
  } else {
    const double count = (double)(s.rows * g.width);
    double sum = 0, squares = 0;
    for (int64_t i = threadIdx.x % 32; i < s.pieces * g.width; i += 32) {
      sum += part_of(s, g.sample, i / g.width, 0, g.from + i % g.width);
      squares += part_of(s, g.sample, i / g.width, 1, g.from + i % g.width);
    }
    mean = team<32>::sum(sum) / count;
    variance = team<32>::sum(squares) / count - mean * mean;
    if (variance < 0) variance = 0;   // negative only by rounding; NaN stays NaN
    if (threadIdx.x % 32 == 0) {
      if (t.out_mean.data) element_store(t.out_mean.data, t.out_mean.dtype, g.k, mean);
      if (t.out_variance.data)
        element_store(t.out_variance.data, t.out_variance.dtype, g.k, variance);
    }
  }
  const double rstd = 1.0 / sqrt(variance + t.eps);
  for (int64_t c = g.from + threadIdx.x % 32; c < g.from + g.width; c += 32) {
    put_factor(s, g.sample, 0, c, mean);
    put_factor(s, g.sample, 1, c, rstd * number_at(t.weight, c, 1.0));
    put_factor(s, g.sample, 2, c, number_at(t.bias, c, -0.0));   // x + -0 equals x in every bit
  }
}

/// Puts the means into factor 0, for the backward pass.
__global__ void __launch_bounds__(THREADS)
  put_means(const __grid_constant__ channel_norm s, const vector mean)
{
  const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, width = s.channels / s.groups;
  if (i >= s.samples * s.channels) return;
  put_factor(s, i / s.channels, 0, i % s.channels, number_at(mean, i / width, 0));
}

/// Further inputs of the gradient. `count` is the number of elements that share a mean. If several
/// ranks share the batch of a batch norm, sums [2 x C] holds dweight and dbias summed over the rows
/// of all ranks. Otherwise `sums` is NULL.
struct gradient { vector variance, weight, sums; double count, eps; };

/// Finds the factors of the backward pass. A warp processes a group of a sample. With
/// h = (x - mean) * rstd and g = dy * weight,
///   dx = rstd * (g - mean(g) - h * mean(g * h)) = dy * f1 + (x - f0) * f3 + f2
__global__ void __launch_bounds__(THREADS)
  find_grad_factors(const __grid_constant__ channel_norm s, const __grid_constant__ gradient t)
{
  const warp_group g = group_of_warp(s);
  if (!g.there) return;
  const double rstd = 1.0 / sqrt(number_at(t.variance, g.k, 0) + t.eps);
  double sum_g = 0, sum_gh = 0;
  for (int64_t i = threadIdx.x % 32; i < s.pieces * g.width; i += 32) {
    const int64_t c = g.from + i % g.width;
    const double w = number_at(t.weight, c, 1.0);
    sum_g += w * part_of(s, g.sample, i / g.width, 0, c);
    sum_gh += w * part_of(s, g.sample, i / g.width, 1, c) * rstd;
  }
  sum_g = team<32>::sum(sum_g);
  sum_gh = team<32>::sum(sum_gh);
  if (t.sums.data) {   // the group is channel k
    sum_g = number_at(t.weight, g.k, 1.0) * number_at(t.sums, s.channels + g.k, 0);
    sum_gh = number_at(t.weight, g.k, 1.0) * number_at(t.sums, g.k, 0);
  }
  for (int64_t c = g.from + threadIdx.x % 32; c < g.from + g.width; c += 32) {
    put_factor(s, g.sample, 1, c, rstd * number_at(t.weight, c, 1.0));
    put_factor(s, g.sample, 2, c, -rstd * (sum_g / t.count));
    put_factor(s, g.sample, 3, c, -rstd * rstd * (sum_gh / t.count));
  }
}

/// Computes dweight and dbias. A warp processes a channel.
__global__ void __launch_bounds__(THREADS)
  sum_samples(const __grid_constant__ channel_norm s, const __grid_constant__ gradient t,
              const vector dweight, const vector dbias)
{
  const int64_t c = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
  if (c >= s.channels) return;
  double for_weight = 0, for_bias = 0;
  for (int64_t i = threadIdx.x % 32; i < s.samples * s.pieces; i += 32) {
    const int64_t sample = i / s.pieces, k = sample * s.groups + c / (s.channels / s.groups);
    for_bias += part_of(s, sample, i % s.pieces, 0, c);
    for_weight +=
      part_of(s, sample, i % s.pieces, 1, c) / sqrt(number_at(t.variance, k, 0) + t.eps);
  }
  for_weight = team<32>::sum(for_weight);
  for_bias = team<32>::sum(for_bias);
  if (threadIdx.x % 32 != 0) return;
  if (dweight.data) element_store(dweight.data, dweight.dtype, c, for_weight);
  if (dbias.data) element_store(dbias.data, dbias.dtype, c, for_bias);
}

// ------------------------------------------------------------------ elements

/// Computes y = (x - f0) * f1 + f2 or, with BACK, dx = dy * f1 + (x - f0) * f3 + f2. If the
/// statistics do not depend on x, dx = dy * f1.
template <class L, bool BACK>
__global__ void __launch_bounds__(THREADS) apply(const __grid_constant__ channel_norm s)
{
  constexpr int V = L::V, AHEAD = V > 1 ? 4 : 1;   // rows in flight
  typedef typename L::number number;
  const thread_place at = place_of<V>(s);
  if (at.first >= at.end) return;
  number f0[V], f1[V], f2[V], f3[V];
  load_factors<L>(f0, s, at, 0);
  load_factors<L>(f1, s, at, 1);
  load_factors<L>(f2, s, at, 2);
  if (BACK) load_factors<L>(f3, s, at, 3);
#pragma unroll AHEAD
  for (int64_t row = at.first; row < at.end; row += at.step) {
    const int64_t i = offset_of(s, at, row);
    typename L::raw raw;
    number x[V], y[V];
    L::fetch(raw, s.x, s.x_dtype, i);
    L::values(x, raw, s.x_dtype);
    if constexpr (BACK) {
      L::fetch(raw, s.dy, s.dy_dtype, i);
      L::values(y, raw, s.dy_dtype);
    }
#pragma unroll
    for (int v = 0; v < V; v++) {
      if (!BACK) y[v] = fused(x[v] - f0[v], f1[v], f2[v]);
      else if (s.given) y[v] = y[v] * f1[v];
      else y[v] = fused(y[v], f1[v], fused(x[v] - f0[v], f3[v], f2[v]));
    }
    L::store(s.out, s.out_dtype, i, y);
  }
}

// ------------------------------------------------------------------ launching

/// Returns the width of the widest vectors that x, dy and the output allow: 4 or 1, or 0 if one of
/// them is f64.
int vector_width(const channel_norm &s)
{
  if (!is_fast(s.x_dtype) || !is_fast(s.out_dtype) || (s.dy && !is_fast(s.dy_dtype))) return 0;
  return s.channels % 4 == 0 && ((uintptr_t)s.x | (uintptr_t)s.dy | (uintptr_t)s.out) % 16 == 0 ?
           4 : 1;
}

/// Describes x, dy and the output, and cuts them into tiles and pieces.
eng_status describe(channel_norm *s, const op_call *call, const tensor *dy, bool batch,
                    int64_t groups)
{
  const tensor *x = call->in[0], *out = call->out[0];
  *s = {};
  s->x = x->data;
  s->x_dtype = x->dtype;
  s->dy = data_of(dy);
  s->dy_dtype = dtype_of(dy);
  s->out = data_of(out);
  s->out_dtype = out ? out->dtype : x->dtype;
  s->channels = x->shape[x->ndim - 1];
  s->samples = batch ? 1 : x->shape[0];
  s->groups = batch ? s->channels : groups;
  s->rows = x->count ? x->count / (s->samples * s->channels) : 0;
  const int width = vector_width(*s), V = width ? width : 1;
  s->wide = width == 0;
  while (s->lanes_log2 < 5 && ((int64_t)V << s->lanes_log2) < s->channels) s->lanes_log2++;
  s->tiles = parts(s->channels, (int64_t)V << s->lanes_log2);
  const int64_t round = RUN * WARPS * (32 >> s->lanes_log2), rounds = parts(s->rows, round),
                blocks = s->samples * s->tiles, most = blocks < MOST_BLOCKS && blocks > 0 ?
                                                         MOST_BLOCKS / blocks : 1;
  s->piece_rows = rounds ? parts(rounds, most) * round : round;
  s->pieces = parts(s->rows, s->piece_rows);   // 0 if there are no rows; all sums are then 0
  FAIL_IF(blocks * s->pieces >= 1ll << 31, ENG_ERR_SHAPE,
          "%s: expected a batch in which samples * ceil(channels / %d) is below 2^31, got %s; "
          "hint: a smaller batch", eng_op_name(call->op), V << s->lanes_log2, tensor_text(x));
  const int64_t factors = s->samples * 4 * s->channels * 8,
                bytes = factors + s->samples * s->pieces * 2 * s->channels * 8;
  s->factor = scratch_take(bytes);
  s->partial = (double *)((char *)s->factor + factors);
  return s->factor ? ENG_OK : ENG_ERR_MEMORY;
}

void give(const channel_norm &s)
{ scratch_give(s.factor, s.samples * (4 + s.pieces * 2) * s.channels * 8); }

enum pass { SUM, APPLY };

template <bool BACK> void launch(const channel_norm &s, pass which)
{
  const unsigned blocks = (unsigned)(s.samples * s.tiles * s.pieces);
  const int width = vector_width(s);
  if (blocks == 0) return;
  auto kernel = which == SUM ? (width == 4 ? sum_rows<float_lanes<4>, BACK> :
                                width == 1 ? sum_rows<float_lanes<1>, BACK> :
                                             sum_rows<double_lanes, BACK>) :
                               (width == 4 ? apply<float_lanes<4>, BACK> :
                                width == 1 ? apply<float_lanes<1>, BACK> :
                                             apply<double_lanes, BACK>);
  kernel<<<blocks, THREADS, 0, cuda_stream()>>>(s);
}

eng_status norm(const op_call *call, bool batch)
{
  const bool given = batch && call->in[3];
  channel_norm s;
  ENG_TRY(describe(&s, call, NULL, batch, batch ? 0 : call->group_norm.groups));
  const statistics t = {
    vector_of(given ? call->in[3] : NULL), vector_of(given ? call->in[4] : NULL),
    vector_of(call->in[1]), vector_of(call->in[2]), vector_of(call->out[1]),
    vector_of(call->out[2]), batch ? call->batch_norm.eps : call->group_norm.eps};
  if (!given) launch<false>(s, SUM);
  const unsigned groups = (unsigned)parts(s.samples * s.groups, WARPS);
  if (groups) find_factors<<<groups, THREADS, 0, cuda_stream()>>>(s, t);
  if (s.out) launch<false>(s, APPLY);
  give(s);
  return cuda_launched(eng_op_name(call->op));
}

eng_status norm_grad(const op_call *call, bool batch)
{
  channel_norm s;
  ENG_TRY(describe(&s, call, call->in[4], batch, batch ? 0 : call->group_norm_grad.groups));
  const tensor *sums = batch ? call->in[5] : NULL;
  const double count = sums ? (double)call->batch_norm_grad.rows :
                              (double)s.rows * (double)(s.channels / (s.groups ? s.groups : 1));
  const gradient t = {vector_of(call->in[3]), vector_of(call->in[1]), vector_of(sums), count,
                      batch ? call->batch_norm_grad.eps : call->group_norm_grad.eps};
  s.given = batch && call->batch_norm_grad.given;
  const unsigned channels = (unsigned)parts(s.channels, WARPS),
                 means = (unsigned)parts(s.samples * s.channels, THREADS),
                 groups = (unsigned)parts(s.samples * s.groups, WARPS);
  if (means) put_means<<<means, THREADS, 0, cuda_stream()>>>(s, vector_of(call->in[2]));
  launch<true>(s, SUM);
  if (groups) find_grad_factors<<<groups, THREADS, 0, cuda_stream()>>>(s, t);
  if (channels && (call->out[1] || call->out[2]))
    sum_samples<<<channels, THREADS, 0, cuda_stream()>>>(s, t, vector_of(call->out[1]),
                                                         vector_of(call->out[2]));
  if (s.out) launch<true>(s, APPLY);
  give(s);
  return cuda_launched(eng_op_name(call->op));
}

}  // namespace

extern "C" eng_status cuda_batch_norm(const op_call *call)      { return norm(call, true); }
extern "C" eng_status cuda_batch_norm_grad(const op_call *call) { return norm_grad(call, true); }
extern "C" eng_status cuda_group_norm(const op_call *call)      { return norm(call, false); }
extern "C" eng_status cuda_group_norm_grad(const op_call *call) { return norm_grad(call, false); }
