// Selection by index, with gradients: embedding, gather, index_select. Selection by size: topk,
// argmax, argmin. Called through the backend table; owns nothing.
//
// Elements that are only copied keep every bit, whatever their dtype. Indices are checked before
// anything is written. A gradient sums in f32 all elements of dy that belong to one element of dx,
// in order of position, and rounds once. Each element of dx belongs to one thread, so no atomics
// are needed. As in reference_index.c, NaN is the largest element for topk and argmax and the
// smallest for argmin; among equal elements (-0 equals +0) the first one is taken.
#include "simd.h"
#include "rows.h"

// sum_rows adds elements in runs of this length, and then adds the sums of the runs. This keeps
// rounding errors small. The gradient of gather has no runs.
enum { SUM_RUN = 32 };

// ------------------------------------------------------------------ indices

/// The indices of a call as i64, all in range. `at` is the tensor's own memory or a copy in
/// scratch.
typedef struct indices {
  const int64_t *at;
  int64_t n;
  scratch_piece copy;
} indices;

static void indices_close(indices *all) { scratch_free(&all->copy); }

static eng_status indices_open(indices *all, const op_call *call, const tensor *index, int64_t size)
{
  *all = (indices){.at = index->data, .n = index->count};
  if (index->dtype != ENG_i64) {
    all->copy = scratch_alloc(arena_space(), index->count * (int64_t)sizeof(int64_t));
    int64_t *copy = all->copy.memory;
    if (!copy) return ENG_ERR_MEMORY;
    if (index->dtype == ENG_i32)
      for (int64_t i = 0; i < all->n; i++) copy[i] = ((const int32_t *)index->data)[i];
    else
      for (int64_t i = 0; i < all->n; i++) copy[i] = tensor_load_int(index->data, index->dtype, i);
    all->at = copy;
  }
  uint64_t bad = 0;
  for (int64_t i = 0; i < all->n; i++) bad |= (uint64_t)all->at[i] >= (uint64_t)size;
  return bad ? forward_to_reference(call) : ENG_OK;   // the reference kernel reports a bad index
}

/// The shape of a tensor seen from one dimension: [outer x size x inner]. `outer` and `inner` are
/// the products of the sizes before and after this dimension.
typedef struct around { int64_t outer, size, inner; } around;

static around around_of(const tensor *x, int dimension)
{
  around a = {1, x->shape[dimension], 1};
  for (int d = 0; d < dimension; d++) a.outer *= x->shape[d];
  for (int d = dimension + 1; d < x->ndim; d++) a.inner *= x->shape[d];
  return a;
}

// ------------------------------------------------------------------ rows by index

/// Sets y[o, k, :] = x[o, ids[k], :], where x and y have one dtype.
static eng_status select_rows(const op_call *call, around a)
{
  const char *x = call->in[0]->data;
  char *y = call->out[0]->data;
  AT_END(indices_close) indices ids;
  ENG_TRY(indices_open(&ids, call, call->in[1], a.size));
  int64_t rows = a.outer * ids.n, bytes = a.inner * eng_dtype_size(call->in[0]->dtype);
#pragma omp parallel for schedule(static) if (rows * bytes > 4 * PARALLEL_ELEMENTS)
  for (int64_t row = 0; row < rows; row++) {
    const char *from = x + (row / ids.n * a.size + ids.at[row % ids.n]) * bytes;
    if (bytes == 4) memcpy(y + row * 4, from, 4);
    else if (bytes == 2) memcpy(y + row * 2, from, 2);
    else memcpy(y + row * bytes, from, (size_t)bytes);
  }
  return ENG_OK;
}

KERNEL(embedding)
{
  const tensor *weight = call->in[0], *y = call->out[0];
  if (weight->dtype == y->dtype) return select_rows(call, around_of(weight, 0));
  if (!all_fast_except(call, 1)) return forward_to_reference(call);
  AT_END(indices_close) indices ids;
  ENG_TRY(indices_open(&ids, call, call->in[1], weight->shape[0]));
  int64_t n = weight->shape[1];
#pragma omp parallel for schedule(static) if (y->count > PARALLEL_ELEMENTS)
  for (int64_t row = 0; row < ids.n; row++) {
    float buffer[TILE] __attribute__((aligned(64)));
    for (int64_t at = 0; at < n; at += TILE) {
      int length = (int)smaller(TILE, n - at);
      const float *from =
        tile_load(buffer, weight->data, weight->dtype, ids.at[row] * n + at, length);
      tile_store(y->data, y->dtype, row * n + at, from, length);
    }
  }
  return ENG_OK;
}

KERNEL(index_select)
{
  const tensor *x = call->in[0];
  if (x->dtype != call->out[0]->dtype) return forward_to_reference(call);
  return select_rows(call, around_of(x, (int)call->index_select.dim));
}

static void set_zero(const tensor *x, int64_t first, int64_t n)
{
  int64_t size = eng_dtype_size(x->dtype);
  memset((char *)x->data + first * size, 0, (size_t)(n * size));
}

/// Sums elements [at, at + length) of n rows of dy: the rows base + order[0] .. base + order[n-1].
/// A row has `inner` elements. Stores the sums in dx[first, first + length) or, if `add`, adds them
/// to dx.
static void sum_rows(const tensor *dx, int64_t first, const tensor *dy, int64_t base,
                     const int64_t *order, int64_t n, int64_t inner, int64_t at, int length,
                     bool add)
{
  float sum[TILE] __attribute__((aligned(64))), run[TILE] __attribute__((aligned(64)));
  float buffer[TILE] __attribute__((aligned(64)));
  memset(sum, 0, (size_t)length * sizeof(float));
  for (int64_t k = 0; k < n; ) {
    int64_t end = smaller(n, k + SUM_RUN);
    float *into = n <= SUM_RUN ? sum : run;
    if (into == run) memset(run, 0, (size_t)length * sizeof(float));
    for (; k < end; k++) {
      const float *from =
        tile_load(buffer, dy->data, dy->dtype, (base + order[k]) * inner + at, length);
      for (int i = 0; i < length; i++) into[i] += from[i];
    }
    if (into == run) for (int i = 0; i < length; i++) sum[i] += run[i];
  }
  if (add) {
    const float *before = tile_load(buffer, dx->data, dx->dtype, first, length);
    for (int i = 0; i < length; i++) sum[i] = before[i] + sum[i];
  }
  tile_store(dx->data, dx->dtype, first, sum, length);
}

/// Sets dx[o, v, :] to the sum of dy[o, k, :] over all k with ids[k] = v or, if `add`, adds the sum
/// to it. A counting sort groups the positions k by v.
static eng_status scatter_rows(const tensor *dx, around a, const tensor *dy, const indices *ids,
                               bool add)
{
  // start [size + 1]: where the positions of each v begin in `order` [n]
  SCRATCH(int64_t, start, a.size + 1);
  SCRATCH(int64_t, order, ids->n);
  memset(start, 0, (size_t)(a.size + 1) * sizeof(int64_t));
  for (int64_t k = 0; k < ids->n; k++) start[ids->at[k]]++;
  for (int64_t v = 0, sum = 0; v <= a.size; v++) {   // turns the counts in `start` into ends
    sum += start[v];
    start[v] = sum;
  }
  // Fills the part of each v in `order` from its end. Afterwards, start[v] is the part's start.
  for (int64_t k = ids->n - 1; k >= 0; k--) order[--start[ids->at[k]]] = k;

  // If dx has few rows, each row is cut into pieces of 64 elements, so that several threads can
  // share a row that many indices select.
  bool few = a.outer * a.size < 1024;
  int64_t step = few ? 1 : 32, width = few ? 64 : a.inner;
  int64_t blocks = (a.size + step - 1) / step, chunks = (a.inner + width - 1) / width;
#pragma omp parallel for schedule(dynamic, 4) if (dx->count > PARALLEL_ELEMENTS || \
                                                    dy->count > PARALLEL_ELEMENTS)
  for (int64_t item = 0; item < a.outer * blocks * chunks; item++) {
    int64_t outer = item / chunks / blocks, v = item / chunks % blocks * step,
            left = item % chunks * width;
    int64_t end = smaller(a.size, v + step), right = smaller(a.inner, left + width);
    while (v < end) {
      int64_t first = (outer * a.size + v) * a.inner, same = v;
      while (same < end && start[same] == start[same + 1]) same++;
      if (same > v) {   // no index selects rows [v, same); if rows are cut, this is one row
        if (!add) set_zero(dx, first + left, (same - v - 1) * a.inner + right - left);
        v = same;
        continue;
      }
      for (int64_t at = left; at < right; at += TILE)
        sum_rows(dx, first + at, dy, outer * ids->n, order + start[v], start[v + 1] - start[v],
                 a.inner, at, (int)smaller(TILE, right - at), add);
      v++;
    }
  }
  return ENG_OK;
}

static eng_status scatter_call(const op_call *call, around a, bool add)
{
  if (!dtype_is_fast(call->in[0]->dtype) || !dtype_is_fast(call->out[0]->dtype))
    return forward_to_reference(call);
  AT_END(indices_close) indices ids;
  ENG_TRY(indices_open(&ids, call, call->in[1], a.size));
  return scatter_rows(call->out[0], a, call->in[0], &ids, add);
}

KERNEL(embedding_grad)
{ return scatter_call(call, around_of(call->out[0], 0), call->embedding_grad.add != 0); }

KERNEL(index_select_grad)
{ return scatter_call(call, around_of(call->out[0], (int)call->index_select_grad.dim), false); }

// ------------------------------------------------------------------ elements by index

/// For each position of `small`, in row-major order, writes the offset of the same position in
/// `large`. Considers only dimensions [from, to) of the two shapes.
static void fill_places(int64_t *places, const tensor *small, const tensor *large, int from, int to)
{
  int64_t n = 1;
  places[0] = 0;
  for (int d = from; d < to; d++)
    if (small->shape[d] == 0) return;   // `small` is empty, and `places` has room for one entry
  for (int d = from; d < to; d++) {   // extends the table by one dimension, from its end
    for (int64_t i = n - 1; i >= 0; i--)
      for (int64_t j = small->shape[d] - 1; j >= 0; j--)
        places[i * small->shape[d] + j] = places[i] * large->shape[d] + j;
    n *= small->shape[d];
  }
}

/// How gather and its gradient iterate over the index [outer x size x inner] and x.
typedef struct picks {
  around  index, x;
  indices ids;
  const int64_t *outer, *inner;   // offsets in x of the index's outer and inner positions
  scratch_piece tables;           // memory of `outer` and `inner`
} picks;

static eng_status picks_open(picks *p, const op_call *call, const tensor *x, int dimension)
{
  const tensor *index = call->in[1];
  *p = (picks){.index = around_of(index, dimension), .x = around_of(x, dimension)};
  ENG_TRY(indices_open(&p->ids, call, index, p->x.size));
  int64_t outer = larger(p->index.outer, 1), inner = larger(p->index.inner, 1);
  p->tables = scratch_alloc(arena_space(), (outer + inner) * (int64_t)sizeof(int64_t));
  int64_t *tables = p->tables.memory;
  if (!tables) return ENG_ERR_MEMORY;
  fill_places(tables, index, x, 0, dimension);
  fill_places(tables + outer, index, x, dimension + 1, x->ndim);
  p->outer = tables;
  p->inner = tables + outer;
  return ENG_OK;
}

static void picks_close(picks *p)
{
  scratch_free(&p->tables);
  indices_close(&p->ids);
}

static inline __attribute__((always_inline))
void gather_sized(char *y, const char *x, const picks *p, int size)
{
  int64_t lines = p->index.outer * p->index.size, inner = p->index.inner;
#pragma omp parallel for schedule(static) if (p->ids.n > PARALLEL_ELEMENTS)
  for (int64_t line = 0; line < lines; line++) {
    int64_t base = p->outer[line / p->index.size] * p->x.size;
    const int64_t *at = p->ids.at + line * inner;
    for (int64_t i = 0; i < inner; i++)
      memcpy(y + (line * inner + i) * size, x + ((base + at[i]) * p->x.inner + p->inner[i]) * size,
             (size_t)size);
  }
}

KERNEL(gather)
{
  const tensor *x = call->in[0], *y = call->out[0];
  if (x->dtype != y->dtype) return forward_to_reference(call);
  AT_END(picks_close) picks p;
  ENG_TRY(picks_open(&p, call, x, (int)call->gather.dim));
  switch (eng_dtype_size(x->dtype)) {
    case 1:  gather_sized(y->data, x->data, &p, 1); break;
    case 2:  gather_sized(y->data, x->data, &p, 2); break;
    case 4:  gather_sized(y->data, x->data, &p, 4); break;
    default: gather_sized(y->data, x->data, &p, 8); break;
  }
  return ENG_OK;
}

/// Adds the elements of column (o, i) of dy to the elements that the index selects in the same
/// column of dx. If dx is not f32, the sums are computed in `sums` [size]. `sums` must hold zeros,
/// and holds zeros again afterwards.
static void scatter_column(const tensor *dx, const tensor *dy, const picks *p, int64_t o, int64_t i,
                           float *sums)
{
  const int64_t *at = p->ids.at;
  int64_t n = p->index.size, step = p->index.inner, first = o * n * step + i;
  int64_t base = p->outer[o] * p->x.size * p->x.inner + p->inner[i], stride = p->x.inner;
  if (dx->dtype == ENG_f32) {
    float *to = (float *)dx->data + base;
    for (int64_t j = 0, k = first; j < n; j++, k += step)
      to[at[k] * stride] += get(dy->data, dy->dtype, k);
    return;
  }
  for (int64_t j = 0, k = first; j < n; j++, k += step) sums[at[k]] += get(dy->data, dy->dtype, k);
  for (int64_t j = 0, k = first; j < n; j++, k += step)
    put(dx->data, dx->dtype, base + at[k] * stride, sums[at[k]]);
  for (int64_t j = 0, k = first; j < n; j++, k += step) sums[at[k]] = 0.0f;
}

KERNEL(gather_grad)
{
  const tensor *dy = call->in[0], *dx = call->out[0];
  if (!dtype_is_fast(dy->dtype) || !dtype_is_fast(dx->dtype)) return forward_to_reference(call);
  AT_END(picks_close) picks p;
  ENG_TRY(picks_open(&p, call, dx, (int)call->gather_grad.dim));
  bool narrow = dx->dtype != ENG_f32;
  int64_t room = padded(p.x.size), columns = p.index.outer * p.index.inner,
          span = PARALLEL_ELEMENTS, floats = narrow ? omp_get_max_threads() * room : 0;
  SCRATCH(float, sums, floats);
  memset(sums, 0, (size_t)floats * sizeof *sums);
#pragma omp parallel if (dx->count > PARALLEL_ELEMENTS)
  {
#pragma omp for schedule(static)
    for (int64_t at = 0; at < dx->count; at += span)
      set_zero(dx, at, smaller(span, dx->count - at));
#pragma omp for schedule(static)
    for (int64_t c = 0; c < columns; c++)
      scatter_column(dx, dy, &p, c / p.index.inner, c % p.index.inner,
                     sums + omp_get_thread_num() * room);
  }
  return ENG_OK;
}

// ------------------------------------------------------------------ topk

/// Returns a sort key for x, which is element i of its row. A larger x has a greater key. NaN is
/// the largest, -0 equals +0, and among equal elements the earlier element has the greater key.
static inline uint64_t rank_of(float x, int64_t i)
{
  uint32_t bits = f32_bits(x), order;
  if (f32_is_nan(x)) order = 0xFFFFFFFFu;
  else if ((bits & 0x7FFFFFFFu) == 0) order = 0x80000000u;
  else order = bits >> 31 ? ~bits : bits | 0x80000000u;
  return (uint64_t)order << 32 | (0xFFFFFFFFu - (uint32_t)i);
}

static inline int64_t place_of(uint64_t rank) { return (int64_t)(0xFFFFFFFFu - (uint32_t)rank); }

/// Puts the key `rank` into `heap`, which has the smallest key on top. On entry, position `hole` is
/// free, and everything below it is in heap order.
static void heap_sink(uint64_t *heap, int64_t n, int64_t hole, uint64_t rank)
{
  for (;;) {
    int64_t child = 2 * hole + 1;
    if (child >= n) break;
    if (child + 1 < n && heap[child + 1] < heap[child]) child++;
    if (heap[child] >= rank) break;
    heap[hole] = heap[child];
    hole = child;
  }
  heap[hole] = rank;
}

/// Writes the k greatest keys (rank_of) of a row to heap [k], greatest first.
static void top_of_row(uint64_t *heap, int64_t k, const void *x, int dtype, int64_t first,
                       int64_t n)
{
  float buffer[TILE] __attribute__((aligned(64)));
  for (int64_t i = 0; i < k; i++) heap[i] = rank_of(get(x, dtype, first + i), i);
  for (int64_t i = k / 2 - 1; i >= 0; i--) heap_sink(heap, k, i, heap[i]);
  float least = get(x, dtype, first + place_of(heap[0]));
  for (int64_t at = k; at < n; at += TILE) {
    int length = (int)smaller(TILE, n - at);
    const float *tile = tile_load(buffer, x, dtype, first + at, length);
    FOR_VECTORS(i, length, {
      // Few elements exceed the smallest in the heap, so a whole vector is compared first.
      vm worse = vf_le(vf_load_n(tile + i, lanes), vf_set1(least));
      uint32_t better = vm_bits(vm_and(vm_first(lanes), vm_not(worse)));
      for (uint32_t left = better; left; left &= left - 1) {
        int64_t j = i + __builtin_ctz(left);
        uint64_t rank = rank_of(tile[j], at + j);
        if (rank > heap[0]) heap_sink(heap, k, 0, rank);
      }
      if (better) least = get(x, dtype, first + place_of(heap[0]));
    });
  }
  for (int64_t m = k - 1; m > 0; m--) {   // moves the smallest key to the end, repeatedly
    uint64_t last = heap[m];
    heap[m] = heap[0];
    heap_sink(heap, m, 0, last);
  }
}

KERNEL(topk)
{
  const tensor *x = call->in[0], *values = call->out[0], *places = call->out[1];
  int64_t n = row_length(x), rows = row_count(x), k = call->topk.k;
  if (!dtype_is_fast(x->dtype) || (values && values->dtype != x->dtype) || n > UINT32_MAX)
    return forward_to_reference(call);
  int64_t room = padded(k);
  SCRATCH(uint64_t, scratch, omp_get_max_threads() * room);
#pragma omp parallel for schedule(static) if (x->count > PARALLEL_ELEMENTS)
  for (int64_t row = 0; row < rows; row++) {
    uint64_t *heap = scratch + omp_get_thread_num() * room;
    top_of_row(heap, k, x->data, x->dtype, row * n, n);
    for (int64_t i = 0; i < k; i++) {
      int64_t at = place_of(heap[i]);
      if (values && x->dtype == ENG_f32)
        ((float *)values->data)[row * k + i] = ((const float *)x->data)[row * n + at];
      else if (values)
        ((uint16_t *)values->data)[row * k + i] = ((const uint16_t *)x->data)[row * n + at];
      if (places) tensor_store_int(places->data, places->dtype, row * k + i, at);
    }
  }
  return ENG_OK;
}

// ------------------------------------------------------------------ argmax, argmin

/// Returns the position of the first NaN of a row or, if there is none, of the first largest
/// element. A `sign` of -0.0f reverses the order; +0.0f keeps it.
static int64_t extreme_of_row(const void *x, int dtype, int64_t first, int64_t n, float sign)
{
  float buffer[TILE] __attribute__((aligned(64))), best = -INFINITY;
  float fill = f32_from(f32_bits(-INFINITY) ^ f32_bits(sign));
  vi flip = vf_bits(vf_set1(sign));
  int64_t place = 0;
  for (int64_t at = 0; at < n; at += TILE) {
    int length = (int)smaller(TILE, n - at);
    const float *tile = tile_load(buffer, x, dtype, first + at, length);
    vf top = vf_set1(-INFINITY);
    vm nan = vm_first(0);
    FOR_VECTORS(i, length, {
      vf v = load_padded(tile + i, lanes, fill);
      nan = vm_or(nan, vf_isnan(v));
      top = vf_max(top, vf_from_bits(vi_xor(vf_bits(v), flip)));
    });
    if (vm_any(nan)) {
      int i = 0;
      while (!f32_is_nan(tile[i])) i++;
      return at + i;
    }
    float largest = vf_maxall(top);
    if (largest > best) {
      float wanted = f32_from(f32_bits(largest) ^ f32_bits(sign));
      int i = 0;
      while (tile[i] != wanted) i++;   // -0 equals +0
      best = largest;
      place = at + i;
    }
  }
  return place;
}

/// Does the work of extreme_of_row for columns [at, at + length) of a matrix [size x inner]: sets
/// place[i] for each column.
static void extreme_of_columns(int32_t *place, const void *x, int dtype, int64_t first, around a,
                               int64_t at, int length, float sign)
{
  float buffer[TILE] __attribute__((aligned(64))), best[TILE] __attribute__((aligned(64))) = {0};
  uint32_t flip = f32_bits(sign);
  for (int32_t j = 0; j < a.size; j++) {
    const float *row = tile_load(buffer, x, dtype, first + j * a.inner + at, length);
    for (int i = 0; i < length; i++) {
      float v = f32_from(f32_bits(row[i]) ^ flip), b = best[i];
      int take = (j == 0) | (v > b) | (f32_is_nan(v) & !f32_is_nan(b));
      best[i] = take ? v : b;
      place[i] = take ? j : place[i];
    }
  }
}

static eng_status find_extreme(const op_call *call, float sign)
{
  const tensor *x = call->in[0], *y = call->out[0];
  around a = around_of(x, (int)call->argmax.dim);
  if (!dtype_is_fast(x->dtype) || a.size > INT32_MAX) return forward_to_reference(call);
  int64_t width = a.inner == 1 ? 1 : TILE, chunks = (a.inner + width - 1) / width;
#pragma omp parallel for schedule(static) if (x->count > PARALLEL_ELEMENTS)
  for (int64_t item = 0; item < a.outer * chunks; item++) {
    int64_t outer = item / chunks, at = item % chunks * width, first = outer * a.size * a.inner;
    if (a.inner == 1) {
      tensor_store_int(y->data, y->dtype, outer,
                       extreme_of_row(x->data, x->dtype, first, a.size, sign));
    } else {
      int32_t place[TILE] = {0};
      int length = (int)smaller(width, a.inner - at);
      extreme_of_columns(place, x->data, x->dtype, first, a, at, length, sign);
      for (int i = 0; i < length; i++)
        tensor_store_int(y->data, y->dtype, outer * a.inner + at + i, place[i]);
    }
  }
  return ENG_OK;
}

KERNEL(argmax) { return find_extreme(call, 0.0f); }
KERNEL(argmin) { return find_extreme(call, -0.0f); }
