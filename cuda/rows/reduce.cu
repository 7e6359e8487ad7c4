// Sum, mean, max and min over any dimensions of any strides, and the gradient of max and min.
// Called through the device's table.
//
// The order of a sum depends only on the shape, the strides, the format and the alignment of x. For
// f32, f16 and bf16, a thread sums a few elements at a time in f32 (in double if f32 would
// overflow) and adds these sums in double. Then the sums of threads are added: down columns in the
// order of the warps, otherwise as a tree in each warp and in the order of the warps. A long
// reduction is cut into pieces, and a second launch adds their sums. f64 is summed in double;
// integers wrap in i64. max and min return NaN if any element is NaN; their choice between -0 and
// +0 is unspecified.
#include "kernel/map.h"

enum { SUM, MAX, MIN };
// blocks that fit on a multiprocessor of an H200, and the number of its multiprocessors
enum { COLUMN_BLOCKS = 3, PIECE_BLOCKS = 3, MULTIPROCESSORS = 132 };

/// A reduction as two walks over x: `kept` over the dimensions that remain, `gone` over the
/// dimensions that are reduced.
struct reduction {
  walk<1> kept, gone;            // both read x
  int64_t results, each;         // number of results; number of elements per result
  double  divisor;               // `each` for a mean, else 1
  void   *y;                     // dense
  int32_t y_dtype;
  int32_t lanes;                 // threads that share a result, if fewer than a block
  int64_t pieces, length;        // pieces of a result; groups in a piece (columns_kernel: rows)
};

// ------------------------------------------------------------------ combining elements

// Returns b if b is better (larger for MAX, smaller for MIN) or NaN, else a.
template <typename T> __device__ static inline T better(T a, T b, int rule)
{ return (rule == MAX ? b > a : b < a) || b != b ? b : a; }

__device__ static inline double plus(double a, double b) { return a + b; }
__device__ static inline int64_t plus(int64_t a, int64_t b)   // wraps
{ return (int64_t)((uint64_t)a + (uint64_t)b); }

/// How elements are read and combined one at a time, in T: double, or int64_t for integers (WHOLE).
template <int RULE, typename T> struct singles {
  enum { V = 1, EVEN_ROWS = 0, WHOLE = T(0.5) == T(0) };
  typedef T raw;
  typedef T number;
  typedef T total;
  __device__ static void fetch(T &r, const void *x, int dtype, int64_t at)
  {
    if constexpr (WHOLE) r = element_int(x, dtype, at);
    else r = element_double(x, dtype, at);
  }
  __device__ static void values(T (&v)[1], const T &r, int) { v[0] = r; }
  __device__ static T value(const T &r, int, int) { return r; }
  __device__ static T identity()
  {
    if constexpr (WHOLE) return RULE == SUM ? 0 : RULE == MAX ? INT64_MIN : INT64_MAX;
    else return RULE == SUM ? 0.0 : RULE == MAX ? -INFINITY : INFINITY;
  }
  __device__ static T combine(T a, T b) { return RULE == SUM ? plus(a, b) : better(a, b, RULE); }
  /// Combines a few values with the total.
  template <int N> __device__ static void take(T &total, const T (&x)[N])
  {
#pragma unroll
    for (int i = 0; i < N; i++) total = combine(total, x[i]);
  }
  __device__ static void store(void *y, int dtype, int64_t at, T total, double divisor)
  {
    if constexpr (WHOLE) element_store_int(y, dtype, at, total);
    else element_store(y, dtype, at, total / divisor);
  }
};
template <int RULE> using doubles = singles<RULE, double>;
template <int RULE> using integers = singles<RULE, int64_t>;

/// How elements of f32, f16 and bf16 are read and combined, V at a time. Totals are in double.
template <int RULE, int V_> struct floats : doubles<RULE> {
  enum { V = V_, EVEN_ROWS = 0 };
  typedef typename mixed<V>::raw raw;
  typedef float number;
  __device__ static void fetch(raw &r, const void *x, int dtype, int64_t at)
  { mixed<V>::fetch(r, x, dtype, at, 1); }
  __device__ static void values(float (&v)[V], const raw &r, int dtype)
  { mixed<V>::floats(v, r, dtype); }
  __device__ static float value(const raw &r, int v, int dtype)
  { return mixed<V>::member(r, v, dtype); }
  __device__ static float identity()
  { return RULE == SUM ? 0.0f : RULE == MAX ? -INFINITY : INFINITY; }
  template <int N> __device__ static void take(double &total, const float (&x)[N])
  {
    float run = x[0];
#pragma unroll
    for (int i = 1; i < N; i++) run = RULE == SUM ? run + x[i] : better(run, x[i], RULE);
    if (RULE == SUM && !f32_is_finite(run)) {
      double sum = 0.0;
#pragma unroll
      for (int i = 0; i < N; i++) sum += x[i];
      total += sum;
    } else {
      total = doubles<RULE>::combine(total, run);
    }
  }
};

/// Like `floats`, for 16 bytes of one format at a time. Reductions down columns use it only if rows
/// are equally spaced.
template <int RULE, class T> struct packed : floats<RULE, 16 / sizeof(T)> {
  enum { V = 16 / sizeof(T), EVEN_ROWS = 1 };
  typedef words<T, V> raw;
  __device__ static void fetch(raw &r, const void *x, int, int64_t at)
  { load_words(r, (const T *)x + at); }
  __device__ static void values(float (&v)[V], const raw &r, int) { widen_words(v, r); }
  __device__ static float value(const raw &r, int v, int)
  {
    float x[V];
    widen_words(x, r);   // the compiler drops unused results
    return x[v];
  }
};

// ------------------------------------------------------------------ several threads per result

/// Combines groups first, first + step and so on, below `stop`, of one result. The elements of this
/// result begin at offset `base` of x.
template <class P>
__device__ static typename P::total sum_groups(const walk<1> &gone, int64_t base, int64_t first,
                                               int64_t step, int64_t stop)
{
  constexpr int V = P::V, U = 4;   // groups in flight
  typename P::total total = P::identity();
  for (int64_t at = first; at < stop; at += U * step) {
    typename P::raw raw[U];
    typename P::number value[U * V];
#pragma unroll
    for (int u = 0; u < U; u++) {
      if (at + u * step >= stop) continue;
      int64_t offset[1];
      walk_offsets(offset, gone, at + u * step);
      P::fetch(raw[u], gone.data[0], gone.dtype[0], base + offset[0]);
    }
#pragma unroll
    for (int u = 0; u < U; u++) {
      typename P::number part[V];
      if (at + u * step < stop) P::values(part, raw[u], gone.dtype[0]);
#pragma unroll
      for (int v = 0; v < V; v++) value[u * V + v] = at + u * step < stop ? part[v] : P::identity();
    }
    P::take(total, value);
  }
  return total;
}

/// Reduces with r.lanes threads per result, at most a warp.
template <class P> static __global__ void __launch_bounds__(256) lanes_kernel(const reduction r)
{
  int64_t thread = (int64_t)blockIdx.x * 256 + threadIdx.x, result = thread / r.lanes;
  int lane = (int)(thread % r.lanes);
  typename P::total total = P::identity();
  if (result < r.results) {
    int64_t base[1];
    walk_offsets(base, r.kept, result);
    total = sum_groups<P>(r.gone, base[0], lane, r.lanes, r.gone.groups);
  }
  for (int apart = r.lanes / 2; apart > 0; apart /= 2)
    total = P::combine(total, __shfl_xor_sync(~0u, total, apart));
  if (result < r.results && lane == 0) P::store(r.y, r.y_dtype, result, total, r.divisor);
}

/// Reduces with one block per piece of a result.
template <class P>
static __global__ void __launch_bounds__(256, PIECE_BLOCKS) pieces_kernel(const reduction r)
{
  __shared__ typename P::total warps[8];
  int64_t result = blockIdx.x / r.pieces, first = blockIdx.x % r.pieces * r.length;
  int64_t base[1], stop = first + r.length < r.gone.groups ? first + r.length : r.gone.groups;
  walk_offsets(base, r.kept, result);
  typename P::total total = sum_groups<P>(r.gone, base[0], first + threadIdx.x, 256, stop);
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2)
    total = P::combine(total, __shfl_xor_sync(~0u, total, apart));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = total;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int k = 1; k < 8; k++) total = P::combine(total, warps[k]);
  P::store(r.y, r.y_dtype, blockIdx.x, total, r.divisor);
}

// ------------------------------------------------------------------ results contiguous in x

/// Reduces down columns. Each lane of a warp takes V adjacent results; each of the block's eight
/// warps takes every eighth row of a piece.
template <class P>
static __global__ void __launch_bounds__(256, COLUMN_BLOCKS) columns_kernel(const reduction r)
{
  constexpr int V = P::V, U = 8;   // rows in flight
  __shared__ typename P::total sums[8][32][V];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned tile = blockIdx.x / (unsigned)r.pieces, piece = blockIdx.x % (unsigned)r.pieces;
  const int64_t column = tile * 32ll + lane, first = piece * r.length;
  const int rows = (int)(first + r.length < r.each ? r.length : r.each - first);
  typename P::total total[V];
#pragma unroll
  for (int v = 0; v < V; v++) total[v] = P::identity();
  if (column < r.kept.groups) {
    int64_t base[1];
    walk_offsets(base, r.kept, column);
    for (int row = warp; row < rows; row += 8 * U) {
      typename P::raw raw[U];
#pragma unroll
      for (int u = 0; u < U; u++) {
        if (row + 8 * u >= rows) continue;
        int64_t offset[1] = {(first + row + 8 * u) * r.gone.stride[0][0]};
        if (!P::EVEN_ROWS) walk_offsets(offset, r.gone, first + row + 8 * u);
        P::fetch(raw[u], r.gone.data[0], r.gone.dtype[0], base[0] + offset[0]);
      }
#pragma unroll
      for (int v = 0; v < V; v++) {
        typename P::number value[U];
#pragma unroll
        for (int u = 0; u < U; u++)
          value[u] = row + 8 * u < rows ? P::value(raw[u], v, r.gone.dtype[0]) : P::identity();
        P::take(total[v], value);
      }
    }
  }
#pragma unroll
  for (int v = 0; v < V; v++) sums[warp][lane][v] = total[v];
  __syncthreads();
  for (int i = threadIdx.x; i < 32 * V; i += 256) {
    if (tile * 32ll + i / V >= r.kept.groups) return;
    typename P::total all = sums[0][i / V][i % V];
#pragma unroll
    for (int k = 1; k < 8; k++) all = P::combine(all, sums[k][i / V][i % V]);
    P::store(r.y, r.y_dtype, (tile * 32ll * V + i) * r.pieces + piece, all, r.divisor);
  }
}

// ------------------------------------------------------------------ launching

/// Returns a walk over the dimensions of x whose bit in `mask` equals `gone`.
static walk<1> part_of(const tensor *x, uint64_t mask, bool gone)
{
  walk_shape shape = {};
  int64_t stride[1][ENG_MAX_DIMS] = {};
  for (int d = 0; d < x->ndim; d++) {
    if ((mask >> d & 1) != (uint64_t)gone) continue;
    shape.shape[shape.ndim] = x->shape[d];
    stride[0][shape.ndim++] = x->stride[d];
  }
  return walk_of<1>(shape, stride, {x->data}, {x->dtype});
}

/// Bundles `inner` into groups of V elements if all offsets of `other` are multiples of V. Returns
/// false, with `inner` unchanged, if that is impossible.
static bool bundle_inside(walk<1> &inner, const walk<1> &other, int V)
{
  for (int d = 0; d < other.ndim; d++)
    if (other.shape[d] > 1 && other.stride[0][d] % V) return false;
  return inner.stride[0][0] == 1 && inner.count % V == 0 && walk_bundle(inner, V);
}

/// Launches a reduction, down columns if the results are adjacent in x (`beside`).
template <class P> static void launch(reduction &r, bool beside)
{
  walk_dividers(r.kept);
  walk_dividers(r.gone);
  if (beside) {
    columns_kernel<P>
      <<<(unsigned)(parts(r.kept.groups, 32) * r.pieces), 256, 0, cuda_stream()>>>(r);
  } else if (r.pieces == 1 && r.gone.groups <= 1024) {
    r.lanes = 1;
    while (r.lanes < 32 && 2 * r.lanes < r.gone.groups) r.lanes *= 2;
    lanes_kernel<P><<<(unsigned)parts(r.results * r.lanes, 256), 256, 0, cuda_stream()>>>(r);
  } else {
    pieces_kernel<P><<<(unsigned)(r.results * r.pieces), 256, 0, cuda_stream()>>>(r);
  }
}

/// Chooses the number and the length of pieces. `blocks` blocks process one piece of every result;
/// all pieces together take at most `most` blocks where possible. A piece is a multiple of `least`
/// groups, and at most 2^30. The choice depends only on these arguments, not on the card.
static void cut(reduction &r, int64_t groups, int64_t blocks, int64_t least, int64_t most)
{
  int64_t wanted = most / blocks, possible = parts(groups, least);
  r.pieces = wanted < possible ? wanted : possible;
  if (r.pieces < 1) r.pieces = 1;
  r.length = min(parts(possible, r.pieces) * least, (int64_t)1 << 30);
  if (r.length < 1) r.length = 1;
  r.pieces = parts(groups, r.length);
  if (r.pieces < 1) r.pieces = 1;
}

template <int RULE> static eng_status reduce(const op_call *call)
{
  const tensor *x = call->in[0], *y = call->out[0];
  uint64_t mask = (uint64_t)call->sum.mask;
  reduction r = {};
  r.kept = part_of(x, mask, false);
  r.gone = part_of(x, mask, true);
  r.results = y->count;
  r.each = r.gone.count;
  r.divisor = call->op == ENG_OP_mean ? (double)r.each : 1.0;
  r.y = y->data;
  r.y_dtype = y->dtype;
  FAIL_IF(r.results >= 1ll << 31 || r.each >= 1ll << 40 || (r.gone.ndim > 1 && r.each >= 1ll << 31),
          ENG_ERR_SHAPE, "%s: expected fewer than 2^31 results, each from fewer than 2^31 "
          "elements (fewer than 2^40 if one stride spans the reduced dimensions), got %s",
          eng_op_name(call->op), tensor_text(x));
  bool whole = !dtype_is_float(x->dtype) && !dtype_is_float(y->dtype), fast = is_fast(x->dtype);
  bool beside =
    r.kept.stride[0][0] == 1 && r.results >= 32 && r.gone.stride[0][0] != 1 && r.each > 1;
  auto bundled = [&](int V) {
    return fast && (beside ? bundle_inside(r.kept, r.gone, V) : bundle_inside(r.gone, r.kept, V));
  };
  bool whole_pieces = (!beside || r.gone.ndim == 1) && bundled(x->dtype == ENG_f32 ? 4 : 8),
       vectors = !whole_pieces && bundled(4);
  if (beside) cut(r, r.each, parts(r.kept.groups, 32), 64, COLUMN_BLOCKS * MULTIPROCESSORS);
  else
    cut(r, r.gone.groups, r.results, whole_pieces || vectors ? 2048 : 8192,
        PIECE_BLOCKS * MULTIPROCESSORS);

  // The results of pieces go into scratch memory [results x pieces]; a second launch reduces them.
  int64_t bytes = r.pieces > 1 ? r.results * r.pieces * 8 : 0;
  void *part = NULL;
  reduction again = r;
  if (r.pieces > 1) {
    if (!(part = scratch_take(bytes))) return ENG_ERR_MEMORY;
    int dtype = whole ? ENG_i64 : ENG_f64;
    again.kept = walk_of<1>({1, {r.results}}, {{r.pieces}}, {part}, {dtype});
    again.gone = walk_of<1>({1, {r.pieces}}, {{1}}, {part}, {dtype});
    again.pieces = 1;
    again.length = r.pieces;
    r.y = part;
    r.y_dtype = dtype;
    r.divisor = 1.0;
  }
  if (whole) launch<integers<RULE>>(r, beside);
  else if (whole_pieces)
    with_fast_format(x->dtype,
                     [&](auto format) { launch<packed<RULE, decltype(format)>>(r, beside); });
  else if (vectors) launch<floats<RULE, 4>>(r, beside);
  else if (fast) launch<floats<RULE, 1>>(r, beside);
  else launch<doubles<RULE>>(r, beside);
  if (part) {
    if (whole) launch<integers<RULE>>(again, false);
    else launch<doubles<RULE>>(again, false);
    scratch_give(part, bytes);
  }
  return cuda_launched(eng_op_name(call->op));
}

extern "C" eng_status cuda_sum(const op_call *call)  { return reduce<SUM>(call); }
extern "C" eng_status cuda_mean(const op_call *call) { return reduce<SUM>(call); }
extern "C" eng_status cuda_max(const op_call *call)  { return reduce<MAX>(call); }
extern "C" eng_status cuda_min(const op_call *call)  { return reduce<MIN>(call); }

// ------------------------------------------------------------------ gradient of max and min

// Whether a equals b. NaN equals NaN here.
__device__ static inline bool equals(double a, double b) { return a == b || (a != a && b != b); }

// In both bodies the walk holds dx, x, y, dy and counts.
struct count_body {
  __device__ void operator()(const walk<5> &w, const int64_t (&at)[5]) const
  {
    if (equals(element_double(w.data[1], w.dtype[1], at[1]),
               element_double(w.data[2], w.dtype[2], at[2])))
      // integers: any order gives the same result
      atomicAdd((unsigned long long *)w.data[4] + at[4], 1ull);
  }
};

struct share_body {
  __device__ void operator()(const walk<5> &w, const int64_t (&at)[5]) const
  {
    bool equal = equals(element_double(w.data[1], w.dtype[1], at[1]),
                        element_double(w.data[2], w.dtype[2], at[2]));
    double slope = equal ? element_double(w.data[3], w.dtype[3], at[3]) /
                             (double)((const unsigned long long *)w.data[4])[at[4]] :
                           0.0;
    element_store(w.data[0], w.dtype[0], at[0], slope);
  }
};

extern "C" eng_status cuda_extreme_grad(const op_call *call)
{
  const tensor *x = call->in[0], *y = call->in[1], *dy = call->in[2], *dx = call->out[0];
  uint64_t mask = (uint64_t)call->extreme_grad.mask;
  int64_t counts = 1, stride[5][ENG_MAX_DIMS] = {};   // dx, x, y, dy, counts
  // e is the dimension of y that corresponds to dimension d of x
  for (int d = x->ndim - 1, e = y->ndim - 1; d >= 0; d--) {
    bool gone = mask >> d & 1;
    stride[0][d] = dx->stride[d];
    stride[1][d] = x->stride[d];
    if (!gone) {
      stride[2][d] = y->stride[e];
      stride[3][d] = dy->stride[e];
      stride[4][d] = counts;
      counts *= x->shape[d];
    }
    if (!gone || y->ndim == x->ndim) e--;
  }
  void *count = scratch_take(counts * 8);
  if (!count) return ENG_ERR_MEMORY;
  cudaError_t result = cudaMemsetAsync(count, 0, (size_t)(counts * 8), cuda_stream());
  walk<5> w = walk_of<5>(shape_of(x), stride, {dx->data, x->data, y->data, dy->data, count},
                         {dx->dtype, x->dtype, y->dtype, dy->dtype, ENG_i64});
  each_of(w, count_body{});
  each_of(w, share_body{});
  scratch_give(count, counts * 8);
  ENG_TRY(cuda_status(result, "extreme_grad"));
  return cuda_launched("extreme_grad");
}
