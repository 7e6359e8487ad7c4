// Embedding, index_select, gather, and their gradients. Elements keep every bit unless the output
// has another format than x. An index out of range raises the fault, and its elements become zeros.
//
// A pick is one index of the call. Its place is the row or element of dx that it selects. Gradients
// sum all picks of a place in a fixed order and without float atomics. The picks are sorted by
// place (a stable radix sort of packed words, by CUB) and cut into chunks of equal length. A thread
// sums a few adjacent columns of one chunk, so a place picked thousands of times costs no more per
// pick than other places. If the picks of a place continue across the end of a chunk, their partial
// sums are stored separately and combined afterwards, chunk by chunk. Sums are f32 (f64 for f64),
// rounded once. If rows consist of aligned 16-byte units, the same launch clears the rows of dx
// that no index picks. Otherwise all of dx is cleared first. (With `add`, nothing is cleared.)
// Called through the device's table.
#include "kernel/lanes.h"

#include <cub/device/device_radix_sort.cuh>

// A tensor as [outer x size x inner] around one dimension.
struct around { int64_t outer, size, inner; };

static around around_of(const tensor *x, int64_t dimension)
{
  around a = {1, x->ndim ? x->shape[dimension] : 1, 1};
  for (int64_t d = 0; d < dimension; d++) a.outer *= x->shape[d];
  for (int64_t d = dimension + 1; d < x->ndim; d++) a.inner *= x->shape[d];
  return a;
}

static int64_t dimension_of(int64_t dimension, const tensor *x)
{ return dimension < 0 ? dimension + x->ndim : dimension; }

// ------------------------------------------------------------------ rows by index

/// y[o, k, :] = x[o, ids[k], :]. A row is `units` accesses; n is the number of picks.
struct row_copy {
  void       *y;
  const void *x, *ids;
  int64_t     total, n, size, units;    // total: units in y
  divider     by_units;                 // for totals below 2^31
  int32_t     y_dtype, x_dtype, id_dtype, op;
  cuda_fault_record *fault;
};

// from: index of a unit of x. fine: the index that selects the row is in range.
struct row_place { int64_t from; bool fine; };

__device__ static inline row_place place_of(const row_copy &r, int64_t at)
{
  int64_t row = r.by_units.size ? divide((uint32_t)at, r.by_units) : at / r.units,
          unit = at - row * r.units;
  int64_t outer = 0, k = row;
  if (row >= r.n) {
    outer = row / r.n;
    k = row - outer * r.n;
  }
  int64_t id = element_whole(r.ids, r.id_dtype, k);
  bool fine = id >= 0 && id < r.size;
  if (!fine && unit == 0) raise_fault(r.fault, r.op, id, r.size);
  return {(outer * r.size + (fine ? id : 0)) * r.units + unit, fine};
}

template <typename Unit>
static __global__ void __launch_bounds__(WALK_THREADS) rows_kernel(const row_copy r)
{
  constexpr int U = 4;   // units that a thread has in flight
  int64_t first = (int64_t)blockIdx.x * (WALK_THREADS * U) + threadIdx.x;
  Unit unit[U];
#pragma unroll
  for (int u = 0; u < U; u++) {
    int64_t at = first + u * WALK_THREADS;
    if (at >= r.total) continue;
    row_place p = place_of(r, at);
    unit[u] = Unit{};
    if (p.fine) unit[u] = ((const Unit *)r.x)[p.from];
  }
#pragma unroll
  for (int u = 0; u < U; u++) {
    int64_t at = first + u * WALK_THREADS;
    if (at < r.total) ((Unit *)r.y)[at] = unit[u];
  }
}

// Copies rows and converts their format. A unit is V elements.
template <int V>
static __global__ void __launch_bounds__(WALK_THREADS) converted_rows_kernel(const row_copy r)
{
  int64_t at = (int64_t)blockIdx.x * WALK_THREADS + threadIdx.x;
  if (at >= r.total) return;
  row_place p = place_of(r, at);
  if constexpr (V > 1) {
    typename mixed<V>::raw raw;
    float value[V] = {};
    if (p.fine) {
      mixed<V>::fetch(raw, r.x, r.x_dtype, p.from * V, 1);
      mixed<V>::floats(value, raw, r.x_dtype);
    }
    mixed<V>::store(r.y, r.y_dtype, at * V, value);
  } else if (p.fine) {
    copy_element(r.y, r.y_dtype, at, r.x, r.x_dtype, p.from);
  } else {
    element_store_int(r.y, r.y_dtype, at, 0);
  }
}

static eng_status copy_rows(const op_call *call, around a)
{
  const tensor *x = call->in[0], *ids = call->in[1], *y = call->out[0];
  row_copy r = {};
  r.y = y->data;
  r.x = x->data;
  r.ids = ids->data;
  r.n = ids->count;
  r.size = a.size;
  r.y_dtype = y->dtype;
  r.x_dtype = x->dtype;
  r.id_dtype = ids->dtype;
  r.op = call->op;
  r.fault = cuda_fault();
  bool same = x->dtype == y->dtype, fast = is_fast(x->dtype) && is_fast(y->dtype);
  uintptr_t together = (uintptr_t)x->data | (uintptr_t)y->data;
  // bytes of an element; bytes of a unit; elements of a unit
  int64_t size = eng_dtype_size(y->dtype), unit = 16, members = 1;
  if (same) {
    for (together |= (uintptr_t)(a.inner * size); together % (uintptr_t)unit; unit /= 2) {}
    members = unit / size;
    r.units = a.inner * size / unit;
  } else {
    if (fast && a.inner % 4 == 0 && together % 16 == 0) members = 4;
    r.units = a.inner / members;
  }
  r.total = a.outer * ids->count * r.units;
  if (r.total < 1ll << 31) r.by_units = divider_of(r.units);
  int64_t each = WALK_THREADS * (same ? 4 : 1);
  unsigned blocks = (unsigned)((r.total + each - 1) / each);
  if (!same && members > 1) converted_rows_kernel<4><<<blocks, WALK_THREADS, 0, cuda_stream()>>>(r);
  else if (!same) converted_rows_kernel<1><<<blocks, WALK_THREADS, 0, cuda_stream()>>>(r);
  else if (unit == 16) rows_kernel<uint4><<<blocks, WALK_THREADS, 0, cuda_stream()>>>(r);
  else if (unit == 8) rows_kernel<uint2><<<blocks, WALK_THREADS, 0, cuda_stream()>>>(r);
  else if (unit == 4) rows_kernel<uint32_t><<<blocks, WALK_THREADS, 0, cuda_stream()>>>(r);
  else if (unit == 2) rows_kernel<uint16_t><<<blocks, WALK_THREADS, 0, cuda_stream()>>>(r);
  else rows_kernel<uint8_t><<<blocks, WALK_THREADS, 0, cuda_stream()>>>(r);
  return cuda_launched(eng_op_name(call->op));
}

extern "C" eng_status cuda_embedding(const op_call *call)
{ return copy_rows(call, around_of(call->in[0], 0)); }

extern "C" eng_status cuda_index_select(const op_call *call)
{
  const tensor *x = call->in[0];
  return copy_rows(call, around_of(x, dimension_of(call->index_select.dim, x)));
}

// ------------------------------------------------------------------ elements by index

/// Gathers an element. The walk holds y, the index, and x without its indexed dimension.
struct gather_body {
  int64_t size, step;    // size and stride of the indexed dimension of x
  cuda_fault_record *fault;
  __device__ void operator()(const walk<3> &w, const int64_t (&at)[3]) const
  {
    int64_t index = element_whole(w.data[1], w.dtype[1], at[1]);
    if (index >= 0 && index < size) {
      copy_element(w.data[0], w.dtype[0], at[0], w.data[2], w.dtype[2], at[2] + index * step);
    } else {
      raise_fault(fault, ENG_OP_gather, index, size);
      element_store_int(w.data[0], w.dtype[0], at[0], 0);
    }
  }
};

extern "C" eng_status cuda_gather(const op_call *call)
{
  const tensor *x = call->in[0], *index = call->in[1], *y = call->out[0];
  int64_t dimension = dimension_of(call->gather.dim, x);
  tensor first = *x;   // broadcast along the indexed dimension
  first.shape[dimension] = 1;
  each_of(walk_over<3>(y, {y, index, &first}),
          gather_body{x->shape[dimension], x->stride[dimension], cuda_fault()});
  return cuda_launched("gather");
}

// ------------------------------------------------------------------ gradients: sums over picks

enum {
  RUN = 64,          // picks in a chunk
  SEGMENT = 4096,    // the most bytes of a row that a warp clears
};

/// A gradient. dx[o, place, i] is the sum of dy[o, k, i] over the picks k of the place, plus the
/// old value of dx if `add`. A column is a pair (o, i). A word holds place << shift | k. The place
/// of an index out of range is a.size.
struct scatter {
  void       *dx;
  const void *dy;
  int32_t     dx_dtype, dy_dtype, shift, add;
  around      a;            // of dx
  int64_t     n, chunks;    // number of picks, and of chunks of RUN picks
  int64_t     columns;      // a.outer * a.inner
  int64_t     row_bytes;    // of dx, if the kernel clears rows that no index picks; otherwise 0
  const uint64_t *word;     // [n], sorted
  // [2 * chunks x columns]: two rows for each chunk. The first is its sum for the place that began
  // in an earlier chunk, the second its sum for the place that begins in the chunk and continues
  // after it
  void       *part;
};

/// Like float_lanes, for rows of dy in a 16-bit format T, 16 bytes at a time. dx is f32, f16 or
/// bf16.
template <typename T> struct low_lanes {
  enum { V = 8 };
  typedef float number;
  typedef words<T, V> raw;
  __device__ static void fetch(raw &r, const void *data, int, int64_t at)
  { load_words(r, (const T *)data + at); }
  __device__ static void values(float (&x)[V], const raw &r, int) { widen_words(x, r); }
  __device__ static void store(void *data, int dtype, int64_t at, const float (&y)[V])
  { mixed<V>::store(data, dtype, at, y); }
};

/// Stores one chunk's sum for a place that has picks in other chunks, too, in row `slot` of `part`.
template <class Lanes>
__device__ static void keep_part(const scatter &s, int64_t slot, int64_t column,
                                 const typename Lanes::number (&sum)[Lanes::V])
{
  auto *to = (typename Lanes::number *)s.part + slot * s.columns + column;
#pragma unroll
  for (int v = 0; v < Lanes::V; v++) to[v] = sum[v];
}

/// Stores the complete sum of a place at offset `to` of dx or, if s.add, adds it there.
template <class Lanes>
__device__ static void finish(const scatter &s, int64_t to, typename Lanes::number (&sum)[Lanes::V])
{
  if (s.add) {
    typedef std::conditional_t<Lanes::V == 1, Lanes, float_lanes<4>> part;
#pragma unroll
    for (int first = 0; first < Lanes::V; first += part::V) {
      typename part::raw raw;
      typename part::number before[part::V];
      part::fetch(raw, s.dx, s.dx_dtype, to + first);
      part::values(before, raw, s.dx_dtype);
#pragma unroll
      for (int v = 0; v < part::V; v++) sum[first + v] = before[v] + sum[first + v];
    }
  }
  Lanes::store(s.dx, s.dx_dtype, to, sum);
}

// Examines 32 adjacent places, and clears one segment of the row of each place that no index picks.
// Called by a warp.
__device__ static void clear_rows(const scatter &s, int64_t warp)
{
  const int64_t groups = (s.a.size + 31) / 32, segments = (s.row_bytes + SEGMENT - 1) / SEGMENT,
                outer = warp / groups / segments, group = warp % groups,
                from = warp / groups % segments * SEGMENT, lane = threadIdx.x % 32,
                place = group * 32 + lane;
  if (outer >= s.a.outer) return;
  int64_t low = 0, high = s.n;   // the first pick whose place is not below `place`
  while (low < high) {
    int64_t middle = (low + high) / 2;
    if ((int64_t)(s.word[middle] >> s.shift) < place) low = middle + 1;
    else high = middle;
  }
  bool picked = low < s.n && (int64_t)(s.word[low] >> s.shift) == place;
  uint32_t left = __ballot_sync(0xFFFFFFFFu, !picked && place < s.a.size);
  for (; left; left &= left - 1) {
    char *row = (char *)s.dx + (outer * s.a.size + group * 32 + __ffs(left) - 1) * s.row_bytes;
    for (int64_t at = from + lane * 16; at < from + SEGMENT && at < s.row_bytes; at += 32 * 16)
      *(uint4 *)(row + at) = uint4{0, 0, 0, 0};
  }
}

// Sums the picks of a chunk. A thread takes V columns of one chunk; consecutive threads take
// adjacent columns. The first `threads` threads of the launch do this. The blocks after the last of
// these threads only clear rows.
template <class Lanes>
static __global__ void __launch_bounds__(WALK_THREADS, 3)
  chunk_kernel(const scatter s, int64_t threads, int64_t vectors)
{
  constexpr int V = Lanes::V, U = 4;   // rows in flight
  typedef typename Lanes::number number;
  int64_t blocks = (threads + WALK_THREADS - 1) / WALK_THREADS,
          thread = (int64_t)blockIdx.x * WALK_THREADS + threadIdx.x;
  if (blockIdx.x >= blocks) return clear_rows(s, (thread - blocks * WALK_THREADS) / 32);
  if (thread >= threads) return;
  int64_t chunk = thread / vectors, column = (thread - chunk * vectors) * V;
  int64_t outer = column / s.a.inner, i = column - outer * s.a.inner;
  int64_t dy = outer * s.n * s.a.inner + i, dx = outer * s.a.size * s.a.inner + i;
  int64_t first = chunk * RUN;
  const int count = (int)(s.n - first < RUN ? s.n - first : RUN);
  const uint64_t *word = s.word + first, mask = (1ull << s.shift) - 1,
                 behind = first + count < s.n ? word[count] : ~0ull;
  typename Lanes::raw raw[U];
  auto fetch = [&](int u, int k) {
    if (k < count)
      Lanes::fetch(raw[u], s.dy, s.dy_dtype, dy + (int64_t)(word[k] & mask) * s.a.inner);
  };
#pragma unroll
  for (int u = 0; u < U; u++) fetch(u, u);
  uint64_t place = word[0] >> s.shift;
  bool began = first > 0 && word[-1] >> s.shift == place;   // the place began in an earlier chunk
  number sum[V] = {};
  for (int at = 0; at < count; at += U) {
#pragma unroll
    for (int u = 0; u < U; u++) {
      if (at + u >= count) break;
      number value[V];
      Lanes::values(value, raw[u], s.dy_dtype);
      fetch(u, at + u + U);
#pragma unroll
      for (int v = 0; v < V; v++) sum[v] += value[v];
      uint64_t next = (at + u + 1 < count ? word[at + u + 1] : behind) >> s.shift;
      if (next == place && at + u + 1 < count) continue;
      if (began) keep_part<Lanes>(s, 2 * chunk, column, sum);
      else if (next == place) keep_part<Lanes>(s, 2 * chunk + 1, column, sum);
      else if (place < (uint64_t)s.a.size) finish<Lanes>(s, dx + (int64_t)place * s.a.inner, sum);
      began = false;
      place = next;
#pragma unroll
      for (int v = 0; v < V; v++) sum[v] = 0;
    }
  }
}

// Adds up the partial sums of each place whose picks are in more than one chunk. The threads of the
// place's first chunk do this.
template <class Lanes>
static __global__ void __launch_bounds__(WALK_THREADS)
  combine_kernel(const scatter s, int64_t threads, int64_t vectors)
{
  constexpr int V = Lanes::V, U = 8;   // parts in flight
  typedef typename Lanes::number number;
  int64_t thread = (int64_t)blockIdx.x * WALK_THREADS + threadIdx.x;
  if (thread >= threads) return;
  int64_t chunk = thread / vectors, column = (thread - chunk * vectors) * V,
          last = chunk * RUN + RUN - 1;
  if (last + 1 >= s.n) return;
  uint64_t place = s.word[last] >> s.shift;
  if (place != s.word[last + 1] >> s.shift || place >= (uint64_t)s.a.size) return;
  if (chunk > 0 && place == s.word[chunk * RUN - 1] >> s.shift) return;   // the place began earlier
  // Finds the last chunk that holds picks of this place, with steps that grow and then shrink.
  int64_t end = chunk + 1, step = 1;
  auto holds = [&](int64_t c) { return c < s.chunks && s.word[c * RUN] >> s.shift == place; };
  for (; holds(end + step); step *= 2) end += step;
  while (step /= 2)
    if (holds(end + step)) end += step;
  const number *part = (const number *)s.part + column;
  number sum[V];
#pragma unroll
  for (int v = 0; v < V; v++) sum[v] = part[(2 * chunk + 1) * s.columns + v];
  for (int64_t at = chunk + 1; at <= end; at += U) {
    number value[U][V];
#pragma unroll
    for (int u = 0; u < U; u++)
#pragma unroll
      for (int v = 0; v < V; v++)
        value[u][v] = at + u <= end ? part[2 * (at + u) * s.columns + v] : 0;
#pragma unroll
    for (int u = 0; u < U; u++)
#pragma unroll
      for (int v = 0; v < V; v++) sum[v] += value[u][v];
  }
  int64_t outer = column / s.a.inner, i = column - outer * s.a.inner;
  finish<Lanes>(s, (outer * s.a.size + (int64_t)place) * s.a.inner + i, sum);
}

// ------------------------------------------------------------------ sorting

/// The indices that are packed into words.
struct pick_source {
  const void *index;
  int32_t     dtype, shift, op;
  int64_t     size;                          // of the dimension
  int64_t     places;                        // number of places; a bad index gets this place
  cuda_fault_record *fault;
};

struct word_body {   // the walk holds words, indices, and the places that index 0 would select
  pick_source p;
  int64_t     step;
  __device__ void operator()(const walk<3> &w, const int64_t (&at)[3]) const
  {
    int64_t index = element_whole(p.index, p.dtype, at[1]), place = at[2] + index * step;
    if (index < 0 || index >= p.size) {
      raise_fault(p.fault, p.op, index, p.size);
      place = p.places;
    }
    ((uint64_t *)w.data[0])[at[0]] = (uint64_t)place << p.shift | (uint64_t)at[0];
  }
};

static int bits_of(int64_t largest)
{
  int bits = 1;
  while (largest >> bits) bits++;
  return bits;
}

template <class Lanes> static void sum_chunks(const scatter &s)
{
  int64_t vectors = s.columns / Lanes::V, threads = s.chunks * vectors;
  unsigned blocks = (unsigned)((threads + WALK_THREADS - 1) / WALK_THREADS);
  int64_t clears = (s.a.size + 31) / 32 * ((s.row_bytes + SEGMENT - 1) / SEGMENT) * s.a.outer,
          in_block = WALK_THREADS / 32;   // warps that clear rows; warps of a block
  chunk_kernel<Lanes><<<blocks + (unsigned)((clears + in_block - 1) / in_block), WALK_THREADS, 0,
                        cuda_stream()>>>(s, threads, vectors);
  if (s.chunks > 1)
    combine_kernel<Lanes><<<blocks, WALK_THREADS, 0, cuda_stream()>>>(s, threads, vectors);
}

/// Sorts the picks and sums them into dx. `w` holds words, indices and places (see word_body).
/// The place of index i + 1 is `step` places after the place of index i.
static eng_status scatter_sums(const op_call *call, scatter s, walk<3> w, int64_t index_size,
                               int64_t step)
{
  const tensor *dx = call->out[0], *index = call->in[1];
  s.dx = dx->data;
  s.dx_dtype = dx->dtype;
  s.dy = call->in[0]->data;
  s.dy_dtype = call->in[0]->dtype;
  int64_t row_bytes = s.a.inner * eng_dtype_size(dx->dtype),
          dx_bytes = dx->count * eng_dtype_size(dx->dtype);
  if (s.n == 0) {
    if (!s.add) CUDA_TRY(cudaMemsetAsync(dx->data, 0, (size_t)dx_bytes, cuda_stream()));
    return ENG_OK;
  }
  FAIL_IF(s.n >= 1ll << 31, ENG_ERR_SHAPE, "%s: expected fewer than 2^31 indices, got %s",
          eng_op_name(call->op), tensor_text(index));
  s.shift = bits_of(s.n - 1);
  FAIL_IF(s.shift + bits_of(s.a.size) > 64, ENG_ERR_SHAPE, "%s: %lld indices into %lld places do "
          "not fit the 64-bit words used for sorting; hint: fewer indices per call",
          eng_op_name(call->op), (long long)s.n, (long long)s.a.size);
  s.chunks = (s.n + RUN - 1) / RUN;
  s.columns = s.a.outer * s.a.inner;
  int bits = bits_of(s.a.size);
  bool wide = !is_fast(s.dy_dtype) || !is_fast(s.dx_dtype);
  // If rows consist of 16-byte units, only rows that no index picks are cleared; else all of dx is.
  if (!s.add && row_bytes % 16 == 0 && (uintptr_t)dx->data % 16 == 0) s.row_bytes = row_bytes;

  size_t sort_bytes = 0;
  CUDA_TRY(cub::DeviceRadixSort::SortKeys(NULL, sort_bytes, (const uint64_t *)NULL,
                                          (uint64_t *)NULL, (int)s.n, s.shift, s.shift + bits,
                                          cuda_stream()));
  int64_t words = (s.n * 8 + 255) / 256 * 256, sorting = ((int64_t)sort_bytes + 255) / 256 * 256;
  int64_t bytes = 2 * words + sorting + 2 * s.chunks * s.columns * (wide ? 8 : 4);
  char *space = (char *)scratch_take(bytes);
  if (!space) return ENG_ERR_MEMORY;
  uint64_t *unsorted = (uint64_t *)space, *sorted = (uint64_t *)(space + words);
  void *sort_space = space + 2 * words;
  s.part = space + 2 * words + sorting;
  s.word = sorted;

  cudaError_t result = cudaSuccess;
  if (!s.add && !s.row_bytes)
    result = cudaMemsetAsync(dx->data, 0, (size_t)dx_bytes, cuda_stream());
  pick_source p = {index->data, index->dtype, s.shift,     call->op,
                   index_size,  s.a.size,     cuda_fault()};
  w.data[0] = unsorted;
  each_of(w, word_body{p, step});
  if (result == cudaSuccess)
    result = cub::DeviceRadixSort::SortKeys(sort_space, sort_bytes, unsorted, sorted, (int)s.n,
                                            s.shift, s.shift + bits, cuda_stream());
  bool aligned = ((uintptr_t)s.dx | (uintptr_t)s.dy) % 16 == 0;
  if (wide) sum_chunks<double_lanes>(s);
  else if (aligned && s.a.inner % 8 == 0 && s.dy_dtype == ENG_f16) sum_chunks<low_lanes<f16_t>>(s);
  else if (aligned && s.a.inner % 8 == 0 && s.dy_dtype == ENG_bf16)
    sum_chunks<low_lanes<bf16_t>>(s);
  else if (aligned && s.a.inner % 4 == 0) sum_chunks<float_lanes<4>>(s);
  else sum_chunks<float_lanes<1>>(s);
  scratch_give(space, bytes);
  ENG_TRY(cuda_status(result, eng_op_name(call->op)));
  return cuda_launched(eng_op_name(call->op));
}

// The picks are whole rows: the index is [n].
static eng_status scatter_rows(const op_call *call, around a, bool add)
{
  const tensor *index = call->in[1];
  scatter s = {};
  s.a = a;
  s.n = index->count;
  s.add = add;
  walk_shape shape = {1, {s.n}};
  int64_t stride[3][ENG_MAX_DIMS] = {{1}, {1}, {0}};
  walk<3> w = walk_of<3>(shape, stride, {NULL, NULL, NULL}, {ENG_i64, index->dtype, ENG_i64});
  return scatter_sums(call, s, w, a.size, 1);
}

extern "C" eng_status cuda_embedding_grad(const op_call *call)
{ return scatter_rows(call, around_of(call->out[0], 0), call->embedding_grad.add != 0); }

extern "C" eng_status cuda_index_select_grad(const op_call *call)
{
  const tensor *dx = call->out[0];
  return scatter_rows(call, around_of(dx, dimension_of(call->index_select_grad.dim, dx)), false);
}

// The picks are single elements: every element of dx is a place, every element of dy is a pick.
extern "C" eng_status cuda_gather_grad(const op_call *call)
{
  const tensor *dx = call->out[0], *dy = call->in[0];
  int64_t dimension = dimension_of(call->gather_grad.dim, dx);
  scatter s = {};
  s.a = {1, dx->count, 1};
  s.n = dy->count;
  tensor first = *dx;   // broadcast along the indexed dimension
  first.shape[dimension] = 1;
  // words have dy's strides; dy and the index are contiguous
  walk<3> w = walk_over<3>(dy, {dy, call->in[1], &first});
  return scatter_sums(call, s, w, dx->shape[dimension], dx->stride[dimension]);
}
