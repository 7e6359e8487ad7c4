// Layer norm and RMS norm, forward and backward, over the last dimension. RMS norm is layer norm
// with a mean of 0.
//
// Up to 8192 columns, a row stays in the registers of its warp or block, so that memory is read
// once: x forward, x and dy backward. Blocks process many rows and load the next row while they
// compute one, except backward in f32, and backward in f16 if rows are read element by element.
// Arithmetic is f32, with the variance about the computed mean. Statistics are recomputed in f64,
// from a second read, if the variance is out of f32's range, or if it is so small relative to the
// mean that rounding of the mean would show in y (as in a constant row). All other calls (f64, x
// with y or dy of another format, longer rows) go to norm_plain.cu.
//
// With a residual (ADDS) a row is x + branch, which is rounded and saved as `sum`. In the backward
// pass, dsum is added to the gradient after the gradient is rounded. Sums over rows and columns
// have the same order as without a residual, so the results have the same bits as those of an add
// followed by the norm. If the fast kernels do not support a call, add and norm run one after the
// other.
//
// Column sums (dweight, dbias) take two kernels. In the first, each group of threads adds its rows,
// and each block adds its groups. The second adds the blocks. The assignment of rows to groups
// depends only on the shape. Called through the device's table.
#include "norm.h"

#include "kernel/lanes.h"

enum { WARP_ROWS = 4 };   // rows of a block if each warp takes one row
template <int ROW> constexpr int BLOCK_THREADS = ROW == 32 ? 32 * WARP_ROWS : ROW;
template <int ROW> constexpr int BLOCK_ROWS = ROW == 32 ? WARP_ROWS : 1;

// ---- columns of a thread: V pieces of 8; `ROW` threads share a row

template <int ROW>
__device__ static inline int column_of(int piece)
{ return (piece * ROW + (int)threadIdx.x % ROW) * 8; }

/// Loads a thread's pieces of a row of n columns. The first piece begins at `column`. Columns
/// beyond the row become zeros.
template <typename T, int V, int ROW>
__device__ static inline void load_pieces(words<T, 8> (&to)[V], const T *row, int column, int n,
                                          bool whole)
{
#pragma unroll
  for (int v = 0; v < V; v++)
#pragma unroll
    for (int k = 0; k < (int)(2 * sizeof(T)); k++) to[v].w[k] = 0;
  if (whole) {
#pragma unroll
    for (int v = 0; v < V; v++)
      if (column + v * ROW * 8 < n) load_words(to[v], row + column + v * ROW * 8);
  } else {
    typedef typename word_of<sizeof(T)>::type bits;
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
      for (int i = 0; i < 8; i++) {
        int c = column + v * ROW * 8 + i;
        if (c < n)
          to[v].w[i * sizeof(T) / 4] |= (uint32_t)((const bits *)row)[c] << (i * sizeof(T) % 4 * 8);
      }
  }
}

template <typename T>
__device__ static inline void store_raw(T *row, const words<T, 8> &raw, int c, int n, bool whole)
{
  if (whole) {
    if (c < n) store_words(row + c, raw);
  } else {
    typedef typename word_of<sizeof(T)>::type bits;
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (c + i < n)
        ((bits *)row)[c + i] = (bits)(raw.w[i * sizeof(T) / 4] >> (i * sizeof(T) % 4 * 8));
  }
}

template <typename T>
__device__ static inline void store_piece(T *row, const float (&from)[8], int c, int n, bool whole)
{
  words<T, 8> raw;
  narrow_words(raw, from);
  store_raw(row, raw, c, n, whole);
}

/// Rounds x to format T in place and returns its words.
template <typename T> __device__ static inline words<T, 8> rounded(float (&x)[8])
{
  words<T, 8> raw;
  narrow_words(raw, x);
  widen_words(x, raw);
  return raw;
}

// A block keeps weight and bias in shared memory, in f32. The 8 columns of a piece are stored as
// two halves; each half is adjacent to the same half of the next thread. If the loop loaded weight
// and bias from global memory, it would have to wait for them and the next row together.

/// The size of a weight or bias in shared memory, in units of float4.
template <int V, int ROW> constexpr int KEPT = V * ROW * 2;

/// Returns the column of the first number in float4 `at` of a weight or bias in shared memory.
template <int ROW> __device__ static inline int kept_column(unsigned at)
{ return (int)((at / (2 * ROW) * ROW + at % ROW) * 8 + at / ROW % 2 * 4); }

/// Loads n columns of a weight or bias into shared memory. If there is no such tensor, every column
/// is `absent`. A barrier must follow.
template <int V, int ROW>
__device__ static inline void keep(float4 *kept, const void *data, int dtype, int n, bool whole,
                                   float absent)
{
  constexpr int STEP = BLOCK_THREADS<ROW>, U = (KEPT<V, ROW> + STEP - 1) / STEP;
  if (data && !whole) {
    for (int c = threadIdx.x; c < V * ROW * 8; c += STEP) {
      int piece = c / (ROW * 8), thread = c / 8 % ROW, half = c / 4 % 2;
      ((float *)kept)[((piece * 2 + half) * ROW + thread) * 4 + c % 4] =
        c < n ? (float)element_double(data, dtype, c) : 0.0f;
    }
    return;
  }
  typedef float_lanes<4> four;
  four::raw raw[U];   // all in flight
#pragma unroll
  for (int u = 0; u < U; u++) {
    int c = kept_column<ROW>(threadIdx.x + u * STEP);
    if (data && c < n) four::fetch(raw[u], data, dtype, c);
  }
#pragma unroll
  for (int u = 0; u < U; u++) {
    int at = threadIdx.x + u * STEP;
    float x[4] = {absent, absent, absent, absent};
    if (data && kept_column<ROW>(at) < n) four::values(x, raw[u], dtype);
    if (at < KEPT<V, ROW>) kept[at] = float4{x[0], x[1], x[2], x[3]};
  }
}
template <int ROW>
__device__ static inline void recall(float (&to)[8], const float4 *kept, int piece)
{
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float4 four = kept[(piece * 2 + half) * ROW + threadIdx.x % ROW];
    to[4 * half] = four.x;
    to[4 * half + 1] = four.y;
    to[4 * half + 2] = four.z;
    to[4 * half + 3] = four.w;
  }
}

/// Computes two sums like row_sum, with one barrier for both. Between two calls with the same
/// `room` there must be a call with another room.
template <int ROW> __device__ static inline void row_sums(float &a, float &b, float2 *room)
{
#pragma unroll
  for (int k = 16; k; k >>= 1) {
    a += __shfl_xor_sync(0xFFFFFFFFu, a, k);
    b += __shfl_xor_sync(0xFFFFFFFFu, b, k);
  }
  if (ROW == 32) return;
  if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = float2{a, b};
  __syncthreads();
  a = b = 0;
#pragma unroll
  for (int w = 0; w < ROW / 32; w++) {
    a += room[w].x;
    b += room[w].y;
  }
}

// ---- forward

// if variance / mean^2 of a row is below this, a mean in f32 is not exact enough
static constexpr float NARROW = 1e-4f;

/// How many blocks of 128 threads fit on a multiprocessor at once. Registers limit this number: a
/// thread holds its part of the row as f32, its part of the next row as loaded, and 8 columns of
/// weight and bias. With a residual (ADDS), the next row's branch takes as many registers as its x.
constexpr int FORWARD_RESIDENT[2][2][5] = {   // [16-bit][ADDS][V]
  {{0, 8, 6, 4, 4}, {0, 8, 6, 3, 3}},
  {{0, 10, 8, 7, 6}, {0, 10, 8, 6, 4}},
};
template <typename T, int V, int ROW, bool ADDS>
constexpr int FORWARD_BLOCKS = FORWARD_RESIDENT[sizeof(T) == 2][ADDS][V] * 128 / BLOCK_THREADS<ROW>;

/// The inputs of a row: x and, with a residual, the branch.
template <typename T, int V, bool ADDS> struct forward_row { words<T, 8> x[V]; };
template <typename T, int V> struct forward_row<T, V, true> { words<T, 8> x[V], branch[V]; };

template <typename T, int V, int ROW, bool ADDS>
__device__ static inline void load_row(forward_row<T, V, ADDS> &to, const norm_call &p, int64_t row)
{
  load_pieces<T, V, ROW>(to.x, (const T *)p.x + row * p.n, column_of<ROW>(0), p.n, p.whole);
  if constexpr (ADDS)
    load_pieces<T, V, ROW>(to.branch, (const T *)p.branch + row * p.n, column_of<ROW>(0), p.n,
                           p.whole);
}

/// Reads one number of a row from memory again: x or, with ADDS, the rounded sum x + branch.
template <typename T, bool ADDS>
__device__ static inline double number_of(const norm_call &p, int64_t at)
{
  float x = widen(((const T *)p.x)[at]);
  if constexpr (ADDS) {
    T sum;
    narrow(sum, x + widen(((const T *)p.branch)[at]));
    x = widen(sum);
  }
  return x;
}

template <typename T, int V, int ROW, bool ADDS>
__global__ void __launch_bounds__(BLOCK_THREADS<ROW>, (FORWARD_BLOCKS<T, V, ROW, ADDS>))
  norm_rows(const __grid_constant__ norm_call p)
{
  __shared__ float room[2][2][ROW / 32];
  __shared__ double wide_room[2][ROW / 32];
  extern __shared__ float4 kept[];   // weight, bias
  keep<V, ROW>(kept, p.weight, p.weight_dtype, p.n, p.whole, 1.0f);
  // x * 1 + -0 equals x in every bit
  keep<V, ROW>(kept + KEPT<V, ROW>, p.bias, p.bias_dtype, p.n, p.whole, -0.0f);
  const float count = (float)p.n, eps = (float)p.eps;
  const int64_t step = (int64_t)gridDim.x * BLOCK_ROWS<ROW>;
  int64_t row = (int64_t)blockIdx.x * BLOCK_ROWS<ROW> + (ROW == 32 ? threadIdx.x >> 5 : 0);
  forward_row<T, V, ADDS> next;
  if (row < p.rows) load_row<T, V, ROW, ADDS>(next, p, row);
  __syncthreads();
  for (int turn = 0; row < p.rows; row += step, turn ^= 1) {
    float x[V][8], mean = 0;
#pragma unroll
    for (int v = 0; v < V; v++) {
      widen_words(x[v], next.x[v]);
      if constexpr (ADDS) {
        float branch[8];
        widen_words(branch, next.branch[v]);
#pragma unroll
        for (int i = 0; i < 8; i++) x[v][i] += branch[i];
        store_raw((T *)p.sum + row * p.n, rounded<T>(x[v]), column_of<ROW>(v), p.n, p.whole);
      }
    }
    if (row + step < p.rows) load_row<T, V, ROW, ADDS>(next, p, row + step);
    if (p.centred) {
      float sum = 0;
#pragma unroll
      for (int v = 0; v < V; v++)
#pragma unroll
        for (int i = 0; i < 8; i++) sum += x[v][i];
      mean = row_sum<ROW>(sum, room[turn][0]) / count;
#pragma unroll
      for (int v = 0; v < V; v++)
        if (column_of<ROW>(v) + 8 > p.n)   // columns beyond the row get the mean, so they add 0
#pragma unroll
          for (int i = 0; i < 8; i++) x[v][i] = column_of<ROW>(v) + i < p.n ? x[v][i] : mean;
    }
    float squares = 0;
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
      for (int i = 0; i < 8; i++) {
        float d = x[v][i] - mean;
        squares = fmaf(d, d, squares);
      }
    float spread = row_sum<ROW>(squares, room[turn][1]) / count, variance = spread + eps,
          rstd = 1.0f / sqrtf(variance);
    // Recomputes in f64 if the spread is too large or too small for f32 or not finite, or if the
    // mean's error would show. The condition is the same for all threads of the row.
    if (!(variance > 1e-30f && variance < 1e37f) || spread < NARROW * mean * mean) {
      double sum = 0, wide = 0;   // rare, so the row is read again rather than kept in registers
#pragma unroll 1
      for (int c = threadIdx.x % ROW; c < p.n; c += ROW)
        sum += number_of<T, ADDS>(p, row * p.n + c);
      sum = row_sum<ROW>(sum, wide_room[0]);
      const double middle = p.centred ? sum / p.n : 0.0;
      mean = (float)middle;
#pragma unroll 1
      for (int c = threadIdx.x % ROW; c < p.n; c += ROW) {
        double d = number_of<T, ADDS>(p, row * p.n + c) - middle;
        wide += d * d;
      }
      rstd = (float)(1.0 / sqrt(row_sum<ROW>(wide, wide_room[1]) / p.n + p.eps));
    }
    if (threadIdx.x % ROW == 0) {
      if (p.out_means) ((float *)p.out_means)[row] = mean;
      if (p.out_rstds) ((float *)p.out_rstds)[row] = rstd;
    }
#pragma unroll
    for (int v = 0; v < V; v++) {
      float weight[8], bias[8];
      recall<ROW>(weight, kept, v);
      recall<ROW>(bias, kept + KEPT<V, ROW>, v);
#pragma unroll
      for (int i = 0; i < 8; i++) x[v][i] = fmaf((x[v][i] - mean) * rstd, weight[i], bias[i]);
      store_piece((T *)p.y + row * p.n, x[v], column_of<ROW>(v), p.n, p.whole);
    }
  }
}

// ---- backward

/// GRAD_RESIDENT is the number of blocks of 128 threads that fit on a multiprocessor at once.
/// GRAD_BLOCKS is the same for blocks of BLOCK_THREADS threads. An H200 has MULTIPROCESSORS
/// multiprocessors. A group of threads processes at least BLOCK_LEAST rows, if there are enough
/// rows.
constexpr int GRAD_RESIDENT[5] = {0, 6, 4, 3, 2};   // [V]
template <int V, int ROW>
constexpr int GRAD_BLOCKS = GRAD_RESIDENT[V] * 128 / BLOCK_THREADS<ROW>;
enum { MULTIPROCESSORS = 132, BLOCK_LEAST = 4 };

/// Computes the rows [first, end) that a group of threads processes, in order.
__device__ static inline void rows_of_group(int64_t *first, int64_t *end, int64_t rows,
                                            int64_t group, int64_t groups)
{
  *first = rows * group / groups;
  *end = rows * (group + 1) / groups;
}

/// A thread's part of a row: V pieces of x and dy, and the row's statistics.
template <typename T, int V> struct norm_row { words<T, 8> x[V], dy[V]; float mean, rstd; };

template <typename T, int V, int ROW>
__device__ static inline void load_row(norm_row<T, V> &to, const norm_call &p, int64_t row)
{
  load_pieces<T, V, ROW>(to.x, (const T *)p.x + row * p.n, column_of<ROW>(0), p.n, p.whole);
  load_pieces<T, V, ROW>(to.dy, (const T *)p.dy + row * p.n, column_of<ROW>(0), p.n, p.whole);
  to.mean = p.means ? ((const float *)p.means)[row] : 0.0f;
  to.rstd = ((const float *)p.rstds)[row];
}

/// Whether rows that are read element by element are loaded only after the previous row is
/// finished. Their many loads in flight would take more registers than the f16 kernels have left.
template <typename T> constexpr bool PARTS_LATE = false;
template <> constexpr bool PARTS_LATE<f16_t> = true;

template <typename T, int V, int ROW, bool ADDS>
__global__ void __launch_bounds__(BLOCK_THREADS<ROW>, (GRAD_BLOCKS<V, ROW>))
  norm_grad_rows(const __grid_constant__ norm_call p)
{
  constexpr bool AHEAD = sizeof(T) == 2;   // load rows ahead; f32 would take too many registers
  __shared__ float2 room[2][ROW / 32];
  __shared__ float4 kept[KEPT<V, ROW>];
  keep<V, ROW>(kept, p.weight, p.weight_dtype, p.n, p.whole, 1.0f);
  __syncthreads();
  const int own = ROW == 32 ? threadIdx.x >> 5 : 0;
  const float count = (float)p.n;
  float for_weight[V][8], for_bias[V][8];
#pragma unroll
  for (int v = 0; v < V; v++)
#pragma unroll
    for (int i = 0; i < 8; i++) for_weight[v][i] = for_bias[v][i] = 0;
  int64_t row, end;
  rows_of_group(&row, &end, p.rows, (int64_t)blockIdx.x * BLOCK_ROWS<ROW> + own,
                (int64_t)gridDim.x * BLOCK_ROWS<ROW>);
  norm_row<T, V> next;
  if (AHEAD && row < end) load_row<T, V, ROW>(next, p, row);
  for (int turn = 0; row < end; row++, turn ^= 1) {
    if (!AHEAD) load_row<T, V, ROW>(next, p, row);
    float h[V][8], slope[V][8];
    const float mean = next.mean, rstd = next.rstd;
#pragma unroll
    for (int v = 0; v < V; v++) {
      widen_words(h[v], next.x[v]);
      widen_words(slope[v], next.dy[v]);
    }
    if (AHEAD && (p.whole || !PARTS_LATE<T>) && row + 1 < end)
      load_row<T, V, ROW>(next, p, row + 1);
    float sum_g = 0, sum_gh = 0;
#pragma unroll
    for (int v = 0; v < V; v++) {
      float weight[8];
      recall<ROW>(weight, kept, v);
#pragma unroll
      for (int i = 0; i < 8; i++) h[v][i] = (h[v][i] - mean) * rstd;
      // beyond the row dy is 0; h must be 0 too, because 0 * NaN is NaN
      if (column_of<ROW>(v) + 8 > p.n)
#pragma unroll
        for (int i = 0; i < 8; i++) h[v][i] = column_of<ROW>(v) + i < p.n ? h[v][i] : 0.0f;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        for_weight[v][i] = fmaf(slope[v][i], h[v][i], for_weight[v][i]);
        for_bias[v][i] += slope[v][i];
        slope[v][i] *= weight[i];
        sum_g += slope[v][i];
        sum_gh = fmaf(slope[v][i], h[v][i], sum_gh);
      }
    }
    words<T, 8> dsum[ADDS ? V : 1];   // in flight while the row's threads sum
    if constexpr (ADDS)
      load_pieces<T, V, ROW>(dsum, (const T *)p.dsum + row * p.n, column_of<ROW>(0), p.n, p.whole);
    row_sums<ROW>(sum_g, sum_gh, room[turn]);
    if (p.dx) {
      const float mean_g = p.centred ? sum_g / count : 0.0f, mean_gh = sum_gh / count;
#pragma unroll
      for (int v = 0; v < V; v++) {
#pragma unroll
        for (int i = 0; i < 8; i++) h[v][i] = rstd * fmaf(-h[v][i], mean_gh, slope[v][i] - mean_g);
        if constexpr (ADDS) {
          float came[8];
          widen_words(came, dsum[v]);
          rounded<T>(h[v]);
#pragma unroll
          for (int i = 0; i < 8; i++) h[v][i] = came[i] + h[v][i];
        }
        store_piece((T *)p.dx + row * p.n, h[v], column_of<ROW>(v), p.n, p.whole);
      }
    }
    if (PARTS_LATE<T> && !p.whole && row + 1 < end) load_row<T, V, ROW>(next, p, row + 1);
  }
  if (!p.partial) return;
  float *to = p.partial + (int64_t)blockIdx.x * 2 * p.n;
  if constexpr (ROW == 32) {
    __shared__ float sums[WARP_ROWS][V * 256];
    for (int which = 0; which < 2; which++) {
      __syncthreads();
#pragma unroll
      for (int v = 0; v < V; v++)
#pragma unroll
        for (int i = 0; i < 8; i++)
          sums[own][column_of<ROW>(v) + i] = which ? for_bias[v][i] : for_weight[v][i];
      __syncthreads();
      for (int c = threadIdx.x; c < p.n; c += BLOCK_THREADS<ROW>) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARP_ROWS; w++) sum += sums[w][c];
        to[which * p.n + c] = sum;
      }
    }
  } else {
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (column_of<ROW>(v) + i < p.n) {
          to[column_of<ROW>(v) + i] = for_weight[v][i];
          to[p.n + column_of<ROW>(v) + i] = for_bias[v][i];
        }
  }
}

enum { SUM_COLUMNS = 16, SUM_SLICES = 32 };

/// Sums partial [blocks x 2 x n] over the blocks: columns [0, n) into dweight, columns [n, 2n) into
/// dbias. Either may be NULL.
__global__ void __launch_bounds__(SUM_COLUMNS * SUM_SLICES)
  norm_sum_blocks(void *dweight, int dweight_dtype, void *dbias, int dbias_dtype,
                  const float *partial, int blocks, int n)
{
  __shared__ float slices[SUM_SLICES][SUM_COLUMNS + 1];
  const int column = threadIdx.x % SUM_COLUMNS, slice = threadIdx.x / SUM_COLUMNS;
  const int64_t c = (int64_t)blockIdx.x * SUM_COLUMNS + column;
  float sum = 0;
  if (c < 2 * (int64_t)n) {
    const float *at = partial + c;
    int first = blocks * slice / SUM_SLICES, end = blocks * (slice + 1) / SUM_SLICES;
    for (int block = first; block < end; block += 16) {   // 16 in flight
      float x[16];
#pragma unroll
      for (int i = 0; i < 16; i++) x[i] = block + i < end ? at[(int64_t)(block + i) * 2 * n] : 0.0f;
#pragma unroll
      for (int i = 0; i < 16; i++) sum += x[i];
    }
  }
  slices[slice][column] = sum;
  __syncthreads();
  if (slice != 0 || c >= 2 * (int64_t)n) return;
  sum = 0;
#pragma unroll
  for (int s = 0; s < SUM_SLICES; s++) sum += slices[s][column];
  if (c < n && dweight) element_store(dweight, dweight_dtype, c, sum);
  if (c >= n && dbias) element_store(dbias, dbias_dtype, c - n, sum);
}

// ---- launching

typedef void norm_kernel(const norm_call);

/// A kernel, with its threads and rows per block, resident blocks per multiprocessor, and pieces
/// per thread. `kernel` is NULL if a row is too long for registers.
typedef struct norm_choice {
  norm_kernel *kernel;
  int threads, rows, resident, pieces;
} norm_choice;

/// Returns the first kernel whose registers hold a row of n elements. The numbers after BACK are
/// pairs: the pieces per thread and the threads per row.
template <class T, bool ADDS, bool BACK, int V, int ROW, int... REST>
static norm_choice choose(int64_t n)
{
  if (n <= 8 * V * ROW) {
    if constexpr (BACK)
      return {norm_grad_rows<T, V, ROW, ADDS>, BLOCK_THREADS<ROW>, BLOCK_ROWS<ROW>,
              GRAD_BLOCKS<V, ROW>, V};
    else
      return {norm_rows<T, V, ROW, ADDS>, BLOCK_THREADS<ROW>, BLOCK_ROWS<ROW>,
              FORWARD_BLOCKS<T, V, ROW, ADDS>, V};
  }
  if constexpr (sizeof...(REST) > 0) return choose<T, ADDS, BACK, REST...>(n);
  else return {};
}
template <bool ADDS> static norm_choice forward_kernel(int dtype, int64_t n)
{
  return with_fast_format(dtype, [=](auto t) {
    return choose<decltype(t), ADDS, false, 1, 32, 2, 32, 3, 32, 4, 32, 2, 128, 3, 128, 4, 128,
                  3, 256, 4, 256>(n);
  });
}
template <bool ADDS> static norm_choice backward_kernel(int dtype, int64_t n)
{
  return with_fast_format(dtype, [=](auto t) {
    return choose<decltype(t), ADDS, true, 1, 32, 2, 32, 3, 32, 4, 32, 2, 128, 3, 128, 2, 256,
                  2, 384, 2, 512>(n);
  });
}

/// Sets *data and *dtype to the data and the dtype of x, or to NULL and f32 if x is NULL. Clears
/// `fast` if x is not f32, f16 or bf16, and p->whole if x is not 16-byte aligned.
static void look_at(norm_call *p, bool *fast, const tensor *x, const void **data, int32_t *dtype)
{
  *data = data_of(x);
  *dtype = dtype_of(x);
  if (!x) return;
  if (!is_fast(x->dtype)) *fast = false;
  if (!is_aligned(x->data)) p->whole = false;
}

static norm_call call_of(const op_call *call, bool centred)
{
  const tensor *x = call->in[0];
  norm_call p = {};
  p.n = (int32_t)x->shape[x->ndim - 1];
  p.rows = rows_of(x);
  p.centred = centred;
  p.whole = p.n % 8 == 0;
  p.eps = call->layer_norm.eps;
  return p;
}

static eng_status check_length(const op_call *call)
{
  const tensor *x = call->in[0];
  FAIL_IF(x->shape[x->ndim - 1] > INT32_MAX / 2, ENG_ERR_SHAPE,
          "%s: expected rows of fewer than 2^30 elements on cuda, got %s", eng_op_name(call->op),
          tensor_text(x));
  return ENG_OK;
}

extern "C" op_kernel cuda_add;

/// Computes sum = x + branch in a separate pass.
static eng_status add_to(const tensor *x, const tensor *branch, const tensor *sum)
{
  if (sum->count == 0) return ENG_OK;
  op_call add = simple_call(ENG_OP_add, x, branch, sum);
  return cuda_add(&add);
}

static eng_status forward(const op_call *call, bool centred, bool adds)
{
  ENG_TRY(check_length(call));
  norm_call p = call_of(call, centred);
  // index of the first input after x and branch, and of the first output after y and sum
  const int next = adds ? 2 : 1;
  const tensor *branch = adds ? call->in[1] : NULL, *sum = adds ? call->out[1] : NULL;
  int32_t branch_dtype, sum_dtype;
  bool fast = true;
  look_at(&p, &fast, call->in[0], &p.x, &p.x_dtype);
  look_at(&p, &fast, call->in[next], &p.weight, &p.weight_dtype);
  look_at(&p, &fast, centred ? call->in[next + 1] : NULL, &p.bias, &p.bias_dtype);
  look_at(&p, &fast, call->out[0], (const void **)&p.y, &p.y_dtype);
  look_at(&p, &fast, branch, &p.branch, &branch_dtype);
  look_at(&p, &fast, sum, (const void **)&p.sum, &sum_dtype);
  const tensor *means = centred ? call->out[next] : NULL,
               *rstds = call->out[centred ? next + 1 : next];
  p.out_means = data_of(means);
  p.out_means_dtype = dtype_of(means);
  p.out_rstds = data_of(rstds);
  p.out_rstds_dtype = dtype_of(rstds);
  norm_choice choice =
    adds ? forward_kernel<true>(p.x_dtype, p.n) : forward_kernel<false>(p.x_dtype, p.n);
  fast = fast && p.y_dtype == p.x_dtype && choice.kernel && p.n > 0;
  if (adds && !(fast && branch_dtype == p.x_dtype && sum_dtype == p.x_dtype)) {
    op_call norm = *call;
    norm.in[0] = call->out[1];
    for (int k = 1; k < 3; k++) norm.in[k] = call->in[k + 1];
    for (int k = 1; k < 3; k++) norm.out[k] = call->out[k + 1];
    ENG_TRY(add_to(call->in[0], branch, sum));
    return forward(&norm, centred, false);
  }
  if (fast) {
    unsigned blocks = capped_grid(parts(p.rows, choice.rows), choice.resident);
    int bytes = choice.pieces * choice.threads / choice.rows * 8 * 2 * (int)sizeof(float);
    if (bytes > 40 << 10)
      CUDA_TRY(cudaFuncSetAttribute((const void *)choice.kernel,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    choice.kernel<<<blocks, choice.threads, bytes, cuda_stream()>>>(p);
  } else {
    norm_plain(&p);
  }
  return cuda_launched(eng_op_name(call->op));
}

extern "C" eng_status cuda_layer_norm(const op_call *call) { return forward(call, true, false); }
extern "C" eng_status cuda_rms_norm(const op_call *call) { return forward(call, false, false); }
extern "C" eng_status cuda_add_layer_norm(const op_call *call) { return forward(call, true, true); }
extern "C" eng_status cuda_add_rms_norm(const op_call *call) { return forward(call, false, true); }

static eng_status backward(const op_call *call, bool centred, bool adds)
{
  ENG_TRY(check_length(call));
  norm_call p = call_of(call, centred);
  bool fast = true;
  look_at(&p, &fast, call->in[0], &p.x, &p.x_dtype);
  look_at(&p, &fast, call->in[1], &p.weight, &p.weight_dtype);
  look_at(&p, &fast, call->in[centred ? 4 : 3], &p.dy, &p.dy_dtype);
  look_at(&p, &fast, call->out[0], (const void **)&p.dx, &p.dx_dtype);
  const tensor *dsum = adds ? call->in[centred ? 5 : 4] : NULL;
  int32_t dsum_dtype;
  look_at(&p, &fast, dsum, &p.dsum, &dsum_dtype);
  const tensor *means = centred ? call->in[2] : NULL, *rstds = call->in[centred ? 3 : 2];
  p.means = data_of(means);
  p.means_dtype = dtype_of(means);
  p.rstds = rstds->data;
  p.rstds_dtype = rstds->dtype;
  const tensor *dweight = call->layer_norm_grad.affine ? call->out[1] : NULL,
               *dbias = centred && call->layer_norm_grad.affine ? call->out[2] : NULL;
  if ((dweight && dweight->dtype == ENG_f64) || (dbias && dbias->dtype == ENG_f64)) fast = false;
  if (p.dy_dtype != p.x_dtype || (p.dx && p.dx_dtype != p.x_dtype) || p.rstds_dtype != ENG_f32 ||
      (p.means && p.means_dtype != ENG_f32))
    fast = false;
  norm_choice choice =
    adds ? backward_kernel<true>(p.x_dtype, p.n) : backward_kernel<false>(p.x_dtype, p.n);
  fast = fast && choice.kernel && p.n > 0 && p.rows > 0;
  if (adds && !(fast && dsum_dtype == p.x_dtype)) {
    ENG_TRY(backward(call, centred, false));
    return add_to(dsum, call->out[0], call->out[0]);
  }
  if (!fast) return norm_grad_plain(&p, dweight, dbias);

  int64_t groups = parts(p.rows, BLOCK_LEAST),
          blocks = min(parts(groups, choice.rows), (int64_t)MULTIPROCESSORS * choice.resident);
  int64_t bytes = dweight || dbias ? blocks * 2 * p.n * (int64_t)sizeof(float) : 0;
  if (bytes) {
    p.partial = (float *)scratch_take(bytes);
    if (!p.partial) return ENG_ERR_MEMORY;
  }
  choice.kernel<<<(unsigned)blocks, choice.threads, 0, cuda_stream()>>>(p);
  if (bytes)
    norm_sum_blocks<<<(unsigned)parts(2 * (int64_t)p.n, SUM_COLUMNS), SUM_COLUMNS * SUM_SLICES, 0,
                      cuda_stream()>>>(
      data_of(dweight), dtype_of(dweight), data_of(dbias), dtype_of(dbias), p.partial, (int)blocks,
      p.n);
  scratch_give(p.partial, bytes);
  return cuda_launched(eng_op_name(call->op));
}

extern "C" eng_status cuda_layer_norm_grad(const op_call *call)
{ return backward(call, true, false); }
extern "C" eng_status cuda_rms_norm_grad(const op_call *call)
{ return backward(call, false, false); }
extern "C" eng_status cuda_add_layer_norm_grad(const op_call *call)
{ return backward(call, true, true); }
extern "C" eng_status cuda_add_rms_norm_grad(const op_call *call)
{ return backward(call, false, true); }
