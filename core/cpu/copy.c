// Copies with a change of dtype or layout: cast, contiguous, concat. Any strides on both sides (an
// output handed in by eng_copy may be a view). Transposed copies go block by block, so that source
// and target lines are both used whole. Elements of one size are moved as bits; among f32, f16 and
// bf16 they are rounded to nearest even; other pairs go to the reference.
// Called through backend.kernel[].
#include "operand.h"
#include "simd.h"

enum { SIDE = 32 };   // block of a transposed copy: SIDE x SIDE elements

/// One shape seen by source and target; dimensions innermost (of the target) first.
typedef struct relayout {
  int     ndim;
  int64_t shape[ENG_MAX_DIMS], from[ENG_MAX_DIMS], to[ENG_MAX_DIMS];   // strides in elements
  const char *source;
  char       *target;
  int     source_dtype, target_dtype, source_size, target_size;        // sizes in bytes
} relayout;

// x broadcasts to `shape`; to_stride belongs to the target, one per dimension.
static relayout relayout_of(const tensor *x, int ndim, const int64_t *shape, void *target, int dtype, const int64_t *to_stride)
{
  relayout r = {.source = x->data, .target = target, .source_dtype = x->dtype, .target_dtype = dtype,
                .source_size = eng_dtype_size(x->dtype), .target_size = eng_dtype_size(dtype)};
  for (int d = 1; d <= ndim; d++) {
    int64_t size = shape[ndim - d], to = to_stride[ndim - d];
    int64_t from = d <= x->ndim && x->shape[x->ndim - d] != 1 ? x->stride[x->ndim - d] : 0;
    int k = r.ndim - 1;
    if (size == 1) continue;
    if (k >= 0 && from == r.from[k] * r.shape[k] && to == r.to[k] * r.shape[k]) {
      r.shape[k] *= size;
    } else {
      r.shape[r.ndim] = size;
      r.from[r.ndim] = from;
      r.to[r.ndim++] = to;
    }
  }
  if (r.ndim == 0) {
    r.ndim = 1;
    r.shape[0] = r.from[0] = r.to[0] = 1;
  }
  return r;
}

#define MOVE(type)                                                                          \
  do {                                                                                      \
    type *restrict y = to;                                                                  \
    const type *restrict x = from;                                                          \
    if (from_stride == 0) for (int i = 0; i < n; i++) y[i * to_stride] = x[0];              \
    else if (to_stride == 1) for (int i = 0; i < n; i++) y[i] = x[i * from_stride];         \
    else for (int i = 0; i < n; i++) y[i * to_stride] = x[i * from_stride];                 \
  } while (0)

// n elements of `size` bytes.
static void move(void *to, int64_t to_stride, const void *from, int64_t from_stride, int n, int size)
{
  if (to_stride == 1 && from_stride == 1) {
    memcpy(to, from, (size_t)n * (size_t)size);
    return;
  }
  switch (size) {
    case 1: MOVE(uint8_t); break;
    case 2: MOVE(uint16_t); break;
    case 4: MOVE(uint32_t); break;
    default: MOVE(uint64_t);
  }
}

// n <= TILE elements along the innermost dimension.
static void copy_run(const relayout *r, int64_t to, int64_t from, int n)
{
  if (r->source_dtype == r->target_dtype) {
    move(r->target + to * r->target_size, r->to[0], r->source + from * r->source_size, r->from[0], n, r->source_size);
    return;
  }
  float buffer[TILE];
  const float *values = tile_gather(buffer, r->source, r->source_dtype, from, r->from[0], n);
  if (r->to[0] == 1) {
    tile_store(r->target, r->target_dtype, to, values, n);
  } else {
    uint32_t rounded[TILE];
    floats_to(rounded, r->target_dtype, 0, values, n);
    move(r->target + to * r->target_size, r->to[0], rounded, 1, n, r->target_size);
  }
}

// Block of m x n: m steps along dimension k, in which the source is contiguous, n along the innermost.
static void copy_block(const relayout *r, int k, int64_t to, int64_t from, int m, int n)
{
  if (r->source_dtype == r->target_dtype) {
    for (int i = 0; i < m; i++)
      move(r->target + (to + i * r->to[k]) * r->target_size, r->to[0], r->source + (from + i) * r->source_size, r->from[0], n,
           r->source_size);
    return;
  }
  float rows[SIDE][SIDE + 1], line[SIDE];   // one more, so that columns do not share a cache set
  for (int j = 0; j < n; j++) floats_from(rows[j], r->source, r->source_dtype, from + j * r->from[0], m);
  for (int i = 0; i < m; i++) {
    for (int j = 0; j < n; j++) line[j] = rows[j][i];
    floats_to(r->target, r->target_dtype, to + i * r->to[k], line, n);
  }
}

static void copy_dense(const relayout *r)
{
  int64_t count = r->shape[0], piece = 16 * TILE;
#pragma omp parallel for schedule(static) if (count >= PARALLEL_ELEMENTS)
  for (int64_t first = 0; first < count; first += piece) {
    int64_t n = smaller(piece, count - first);
    if (r->source_dtype == r->target_dtype) {
      memcpy(r->target + first * r->target_size, r->source + first * r->source_size, (size_t)(n * r->source_size));
    } else {
      for (int64_t at = first; at < first + n; at += TILE) copy_run(r, at, at, (int)smaller(TILE, first + n - at));
    }
  }
}

// The dimension in which the source is contiguous, when it is not the innermost one of the target and
// blocks pay; else 0.
static int turned_dimension(const relayout *r)
{
  if (r->from[0] == 1 || r->from[0] == 0 || r->to[0] != 1) return 0;
  for (int d = 1; d < r->ndim; d++)
    if (r->from[d] == 1 && r->shape[d] >= 4 && r->shape[0] >= 4) return d;
  return 0;
}

// Offsets of place `at` in the row-major order of the dimensions from `first` on, without `skip`.
static void place(const relayout *r, int first, int skip, int64_t at, int64_t *from, int64_t *to)
{
  for (int d = first; d < r->ndim; d++) {
    if (d == skip) continue;
    *from += at % r->shape[d] * r->from[d];
    *to += at % r->shape[d] * r->to[d];
    at /= r->shape[d];
  }
}

static void copy_relayout(const relayout *r)
{
  if (r->ndim == 1 && r->from[0] == 1 && r->to[0] == 1) {
    copy_dense(r);
    return;
  }
  int turned = turned_dimension(r);
  int64_t count = 1;
  for (int d = 0; d < r->ndim; d++) count *= r->shape[d];
  if (count == 0) return;
  if (turned) {
    int64_t across = (r->shape[0] + SIDE - 1) / SIDE, down = (r->shape[turned] + SIDE - 1) / SIDE;
    int64_t outer = count / (r->shape[0] * r->shape[turned]), units = outer * across * down;
#pragma omp parallel for schedule(static) if (count >= PARALLEL_ELEMENTS)
    for (int64_t unit = 0; unit < units; unit++) {
      int64_t j = unit % across * SIDE, i = unit / across % down * SIDE;
      int64_t from = i + j * r->from[0], to = i * r->to[turned] + j;
      place(r, 1, turned, unit / across / down, &from, &to);
      copy_block(r, turned, to, from, (int)smaller(SIDE, r->shape[turned] - i), (int)smaller(SIDE, r->shape[0] - j));
    }
  } else {
    int64_t across = (r->shape[0] + TILE - 1) / TILE, units = count / r->shape[0] * across;
#pragma omp parallel for schedule(static) if (count >= PARALLEL_ELEMENTS)
    for (int64_t unit = 0; unit < units; unit++) {
      int64_t j = unit % across * TILE, from = j * r->from[0], to = j * r->to[0];
      place(r, 1, 0, unit / across, &from, &to);
      copy_run(r, to, from, (int)smaller(TILE, r->shape[0] - j));
    }
  }
}

static bool can_copy(int from, int to) { return from == to || (dtype_is_fast(from) && dtype_is_fast(to)); }

static eng_status copy(const op_call *call)
{
  const tensor *x = call->in[0], *y = call->out[0];
  if (!can_copy(x->dtype, y->dtype)) return forward_to_reference(call);
  relayout r = relayout_of(x, y->ndim, y->shape, y->data, y->dtype, y->stride);
  copy_relayout(&r);
  return ENG_OK;
}

static eng_status concat(const op_call *call)
{
  const tensor *y = call->out[0];
  for (int k = 0; k < call->n_in; k++)
    if (!can_copy(call->in[k]->dtype, y->dtype)) return forward_to_reference(call);
  int dimension = (int)call->ints[0];
  if (dimension < 0) dimension += y->ndim;
  char *target = y->data;
  for (int k = 0; k < call->n_in; k++) {
    const tensor *x = call->in[k];
    relayout r = relayout_of(x, x->ndim, x->shape, target, y->dtype, y->stride);
    copy_relayout(&r);
    target += x->shape[dimension] * y->stride[dimension] * eng_dtype_size(y->dtype);
  }
  return ENG_OK;
}

void ISA_NAME(cpu_register_copy)(backend *b)
{
  b->kernel[ENG_OP_cast] = copy;
  b->kernel[ENG_OP_contiguous] = copy;
  b->kernel[ENG_OP_concat] = concat;
}
