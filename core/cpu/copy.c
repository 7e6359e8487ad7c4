// Copies that change the dtype or layout: cast, contiguous, concat. Source and target may have any
// strides (an output of eng_copy may be a view). Called through backend.kernel[]; owns nothing.
//
// Transposed copies go block by block, so that whole cache lines of source and target are used. If
// both formats are the same, elements are moved as bits. Between f32, f16, bf16 and FP8, elements
// are rounded to nearest even, but a cast to FP8 may request another rounding mode. Other pairs of
// formats go to the reference kernels.
#include "operand.h"
#include "philox.h"
#include "base/rng.h"
#include "simd.h"
#include "tasks.h"
#include "turn.h"

enum { SIDE = 32 };   // block of a transposed copy: SIDE x SIDE elements

/// A copy: the shape that source and target share, and their strides. Dimension 0 is the innermost
/// dimension of the target.
typedef struct relayout {
  int     ndim, turned;          // turned: see turned_dimension
  int64_t shape[ENG_MAX_DIMS], from[ENG_MAX_DIMS], to[ENG_MAX_DIMS];   // strides in elements
  const char *source;
  char       *target;
  int     source_dtype, target_dtype, source_size, target_size;        // sizes in bytes
} relayout;

// Describes a copy of x, broadcast to `shape`, into a target with the strides `to_stride`.
static relayout relayout_of(const tensor *x, int ndim, const int64_t *shape, void *target,
                            int dtype, const int64_t *to_stride)
{
  relayout r = {.source = x->data, .target = target, .source_dtype = x->dtype,
                .target_dtype = dtype, .source_size = eng_dtype_size(x->dtype),
                .target_size = eng_dtype_size(dtype)};
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

// Copies n elements of `size` bytes as bits. Strides are in elements.
static void move(void *to, int64_t to_stride, const void *from, int64_t from_stride, int n,
                 int size)
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

enum { RUN = 16 * TILE };   // the most elements that a task copies along the innermost dimension

// Copies n <= RUN elements along the innermost dimension.
static void copy_run(const relayout *r, int64_t to, int64_t from, int n)
{
  if (r->source_dtype == r->target_dtype) {
    move(r->target + to * r->target_size, r->to[0], r->source + from * r->source_size, r->from[0],
         n, r->source_size);
    return;
  }
  if (r->source_size == 2 && dtype_is_fp8(r->target_dtype) && r->from[0] == 1 && r->to[0] == 1) {
    fp8_of_halves((uint8_t *)r->target + to, r->target_dtype, (const uint16_t *)r->source + from,
                  r->source_dtype == ENG_f16, n);
    return;
  }
  for (int at = 0; at < n; at += TILE) {
    float buffer[TILE];
    int length = (int)smaller(TILE, n - at);
    int64_t source = from + at * r->from[0], target = to + at * r->to[0];
    const float *values =
      tile_gather(buffer, r->source, r->source_dtype, source, r->from[0], length);
    if (r->to[0] == 1) {
      tile_store(r->target, r->target_dtype, target, values, length);
    } else {
      uint32_t rounded[TILE];
      floats_to(rounded, r->target_dtype, 0, values, length);
      move(r->target + target * r->target_size, r->to[0], rounded, 1, length, r->target_size);
    }
  }
}

// Copies a block of m x n elements: m along dimension k, in which the source is contiguous, and n
// along the innermost dimension.
static void copy_block(const relayout *r, int k, int64_t to, int64_t from, int m, int n)
{
  if (r->source_dtype == r->target_dtype) {
    char *target = r->target + to * r->target_size;
    const char *source = r->source + from * r->source_size;
    int side = 16 / r->source_size, i = 0, j = 0;
    int whole_m = r->source_size <= 4 ? m / side * side : 0, whole_n = n / side * side;
    for (i = 0; i < whole_m; i += side)   // these loops are about 1.4 times as fast as turn_tile
      for (j = 0; j < whole_n; j += side) {
        if (side == 4)
          turn_words((uint32_t *)target + i * r->to[k] + j, r->to[k],
                     (const uint32_t *)source + j * r->from[0] + i, r->from[0]);
        else if (side == 16)
          turn_bytes((uint8_t *)target + i * r->to[k] + j, r->to[k],
                     (const uint8_t *)source + j * r->from[0] + i, r->from[0]);
        else
          turn_halves((uint16_t *)target + i * r->to[k] + j, r->to[k],
                      (const uint16_t *)source + j * r->from[0] + i, r->from[0]);
      }
    for (i = 0; i < m; i++) {   // copies the elements outside whole squares
      int done = i < whole_m ? whole_n : 0;
      move(target + (i * r->to[k] + done) * r->target_size, r->to[0],
           source + (i + done * r->from[0]) * r->source_size, r->from[0], n - done, r->source_size);
    }
    return;
  }
  float rows[SIDE][SIDE + 1], line[SIDE];   // SIDE + 1 spreads a column over the cache sets
  for (int j = 0; j < n; j++)
    floats_from(rows[j], r->source, r->source_dtype, from + j * r->from[0], m);
  for (int i = 0; i < m; i++) {
    for (int j = 0; j < n; j++) line[j] = rows[j][i];
    floats_to(r->target, r->target_dtype, to + i * r->to[k], line, n);
  }
}

// Adds the offsets of position `at` to *from and *to. Positions are counted over all dimensions
// except 0 and `skip`. The lowest of these dimensions varies fastest.
static void place(const relayout *r, int skip, int64_t at, int64_t *from, int64_t *to)
{
  for (int d = 1; d < r->ndim; d++) {
    if (d == skip) continue;
    *from += at % r->shape[d] * r->from[d];
    *to += at % r->shape[d] * r->to[d];
    at /= r->shape[d];
  }
}

static void run_task(const void *context, int64_t task)
{
  const relayout *r = context;
  int64_t across = ceiling(r->shape[0], RUN);
  int64_t j = task % across * RUN, from = j * r->from[0], to = j * r->to[0];
  place(r, 0, task / across, &from, &to);
  copy_run(r, to, from, (int)smaller(RUN, r->shape[0] - j));
}

static void block_task(const void *context, int64_t task)
{
  const relayout *r = context;
  int k = r->turned;
  int64_t across = ceiling(r->shape[0], SIDE), down = ceiling(r->shape[k], SIDE);
  int64_t j = task % across * SIDE, i = task / across % down * SIDE;
  int64_t from = i + j * r->from[0], to = i * r->to[k] + j;
  place(r, k, task / across / down, &from, &to);
  copy_block(r, k, to, from, (int)smaller(SIDE, r->shape[k] - i),
             (int)smaller(SIDE, r->shape[0] - j));
}

// Returns the dimension in which the source is contiguous, if that is not the target's innermost
// dimension and copying in blocks is faster. Otherwise returns 0.
static int turned_dimension(const relayout *r)
{
  if (r->from[0] == 1 || r->from[0] == 0 || r->to[0] != 1) return 0;
  for (int d = 1; d < r->ndim; d++)
    if (r->from[d] == 1 && r->shape[d] >= 4 && r->shape[0] >= 4) return d;
  return 0;
}

static void copy_relayout(relayout *r)
{
  int64_t count = 1;
  for (int d = 0; d < r->ndim; d++) count *= r->shape[d];
  if (count == 0) return;
  bool together = count >= PARALLEL_ELEMENTS;
  r->turned = turned_dimension(r);
  if (r->turned) {
    int64_t across = ceiling(r->shape[0], SIDE), down = ceiling(r->shape[r->turned], SIDE);
    run_tasks(count / (r->shape[0] * r->shape[r->turned]) * across * down, together, block_task, r);
  } else {
    run_tasks(count / r->shape[0] * ceiling(r->shape[0], RUN), together, run_task, r);
  }
}

static bool converts(int dtype) { return dtype_is_fast(dtype) || dtype_is_fp8(dtype); }
static bool can_copy(int from, int to) { return from == to || (converts(from) && converts(to)); }

// Casts to FP8 with a rounding mode other than the default. Stochastic rounding of element i uses
// word i % 4 of the Philox block `counter` + i / 4.
static void mode_task(const void *context, int64_t task)
{
  const op_call *call = context;
  const tensor *x = call->in[0], *y = call->out[0];
  int mode = (int)call->cast.mode;
  int64_t end = smaller((task + 1) * RUN, x->count);
  float buffer[TILE];
  uint32_t words[TILE];
  for (int64_t at = task * RUN; at < end; at += TILE) {
    int n = (int)smaller(TILE, end - at);
    for (int i = 0; mode & FP8_STOCHASTIC && i < n; i += 4 * VF_LANES)
      philox_vectors(words + i, rng_seed(), (uint64_t)call->cast.counter + (uint64_t)(at + i) / 4);
    fp8_encode((uint8_t *)y->data + at, y->dtype, tile_load(buffer, x->data, x->dtype, at, n), n,
               mode & FP8_SATURATE, mode & FP8_STOCHASTIC ? words : NULL);
  }
}

static eng_status copy(const op_call *call)
{
  const tensor *x = call->in[0], *y = call->out[0];
  if (call->op == ENG_OP_cast && dtype_is_fp8(y->dtype) && call->cast.mode) {
    if (!dtype_is_fast(x->dtype) || !tensor_contiguous(x) || !tensor_contiguous(y))
      return forward_to_reference(call);
    run_tasks(ceiling(x->count, RUN), x->count >= PARALLEL_ELEMENTS, mode_task, call);
    return ENG_OK;
  }
  if (!can_copy(x->dtype, y->dtype)) return forward_to_reference(call);
  relayout r = relayout_of(x, y->ndim, y->shape, y->data, y->dtype, y->stride);
  copy_relayout(&r);
  return ENG_OK;
}

KERNEL(cast) { return copy(call); }
KERNEL(contiguous) { return copy(call); }

KERNEL(concat)
{
  const tensor *y = call->out[0];
  for (int k = 0; k < call->n_in; k++)
    if (!can_copy(call->in[k]->dtype, y->dtype)) return forward_to_reference(call);
  char *target = y->data;
  for (int k = 0; k < call->n_in; k++) {
    const tensor *x = call->in[k];
    relayout r = relayout_of(x, x->ndim, x->shape, target, y->dtype, y->stride);
    copy_relayout(&r);
    target += x->shape[call->concat.dim] * y->stride[call->concat.dim] * eng_dtype_size(y->dtype);
  }
  return ENG_OK;
}
