// Operands of elementwise kernels: any strides and broadcasting, read as tiles of f32 in the order
// of the (contiguous) output. A tile whose elements are contiguous in an f32 tensor is the tensor's
// own memory; every other tile is converted or gathered into a buffer that stays in the L1 cache.
// Included by kernel files that take any strides, once per instruction set. Owns nothing.
#pragma once

#include "rows.h"
#include "simd.h"

/// A tensor viewed in an output's shape. Dimensions are innermost first. Dimensions of size 1 are
/// left out, and dimensions that are contiguous with each other are merged. A stride of 0 means
/// broadcast.
typedef struct operand {
  const void *data;
  int     dtype, ndim;
  bool    dense;                                        // element i of the output is data[i]
  int64_t shape[ENG_MAX_DIMS], stride[ENG_MAX_DIMS];    // strides in elements
} operand;

/// Appends an outer dimension, or merges it with the outermost dimension so far if the two are
/// contiguous.
static inline void operand_append(operand *o, int64_t size, int64_t stride)
{
  int k = o->ndim - 1;
  if (size == 1) return;
  if (k >= 0 && stride == o->stride[k] * o->shape[k]) {
    o->shape[k] *= size;
  } else {
    o->shape[o->ndim] = size;
    o->stride[o->ndim++] = stride;
  }
}

/// Completes an operand after the last operand_append.
static inline void operand_finish(operand *o)
{
  if (o->ndim == 0) {
    o->ndim = 1;
    o->shape[0] = 1;
    o->stride[0] = 1;
  }
  o->dense = o->ndim == 1 && o->stride[0] == 1;
}

/// Returns x broadcast to the shape of y. Dimensions align from the last one.
static inline operand operand_of(const tensor *x, const tensor *y)
{
  operand o = {.data = x->data, .dtype = x->dtype};
  for (int d = 1; d <= y->ndim; d++) {
    int64_t stride = d <= x->ndim && x->shape[x->ndim - d] != 1 ? x->stride[x->ndim - d] : 0;
    operand_append(&o, y->shape[y->ndim - d], stride);
  }
  operand_finish(&o);
  return o;
}

/// A position in an operand during an iteration over its elements.
typedef struct cursor {
  int64_t index[ENG_MAX_DIMS], offset;                  // offset in elements from data
} cursor;

static inline cursor cursor_at(const operand *o, int64_t first)
{
  cursor c = {.offset = 0};
  for (int d = 0; d < o->ndim; d++) {
    c.index[d] = d + 1 < o->ndim ? first % o->shape[d] : first;
    c.offset += c.index[d] * o->stride[d];
    first /= o->shape[d];
  }
  return c;
}

/// Advances by n elements, at most to the end of the innermost dimension.
static inline void cursor_advance(cursor *c, const operand *o, int64_t n)
{
  c->index[0] += n;
  c->offset += n * o->stride[0];
  for (int d = 0; d + 1 < o->ndim && c->index[d] == o->shape[d]; d++) {
    c->offset += o->stride[d + 1] - o->shape[d] * o->stride[d];
    c->index[d] = 0;
    c->index[d + 1]++;
  }
}

/// Returns elements [first, first + n), in the output's order, as floats; n <= TILE.
static inline const float *operand_load(const operand *o, float *buffer, int64_t first, int n)
{
  if (o->dense) return tile_load(buffer, o->data, o->dtype, first, n);
  cursor c = cursor_at(o, first);
  if (n <= o->shape[0] - c.index[0])
    return tile_gather(buffer, o->data, o->dtype, c.offset, o->stride[0], n);
  for (int done = 0; done < n;) {
    int run = (int)smaller(n - done, o->shape[0] - c.index[0]);
    const float *from = tile_gather(buffer + done, o->data, o->dtype, c.offset, o->stride[0], run);
    if (from != buffer + done) memcpy(buffer + done, from, (size_t)run * sizeof(float));
    cursor_advance(&c, o, run);
    done += run;
  }
  return buffer;
}

/// Does the work of operand_load for an operand of one byte per element (bool, u8), without
/// conversion.
static inline const uint8_t *operand_load_bytes(const operand *o, uint8_t *buffer, int64_t first,
                                                int n)
{
  const uint8_t *data = o->data;
  if (o->dense) return data + first;
  cursor c = cursor_at(o, first);
  for (int done = 0; done < n;) {
    int run = (int)smaller(n - done, o->shape[0] - c.index[0]);
    if (o->stride[0] == 0) memset(buffer + done, data[c.offset], (size_t)run);
    else for (int i = 0; i < run; i++) buffer[done + i] = data[c.offset + i * o->stride[0]];
    cursor_advance(&c, o, run);
    done += run;
  }
  return buffer;
}

/// The scalar parameters of an elementwise formula.
typedef struct numbers {
  int      op;
  float    a, b;
  double   exponent;
  uint64_t seed, counter;    // Philox
  int32_t  least;            // dropout keeps an element if its random word >> 8 is at least this
} numbers;

struct tile;
/// An elementwise call: its operands, outputs and formula.
typedef struct work {
  operand  in[3];
  const tensor *out[2];
  int      inputs;
  numbers  with;
  void   (*formula)(const struct tile *t);
} work;

/// A tile of the first output: y[0..n), to be computed from x[k][0..n). `first` is the index of
/// y[0] in the output.
typedef struct tile {
  const work  *w;
  float       *y;
  const float *x[3];
  int64_t first;
  int     n;
} tile;

/// Computes output elements [first, first + n), n <= TILE.
typedef void tile_body(const work *w, int64_t first, int n);

/// Returns the call's inputs as operands in the shape of the outputs. `shape` is a tensor of that
/// shape.
static inline work work_of(const op_call *call, const tensor *shape)
{
  work w = {.inputs = call->n_in, .out = {call->out[0], call->out[1]}};
  for (int k = 0; k < call->n_in && k < 3; k++) w.in[k] = operand_of(call->in[k], shape);
  return w;
}

/// Divides `count` elements into tiles and runs `body` on each tile, on all threads if there is
/// enough work.
static inline void for_tiles(const work *w, int64_t count, tile_body *body)
{
  if (count < PARALLEL_ELEMENTS) {   // no parallel region at all: see tasks.h
    for (int64_t first = 0; first < count; first += TILE)
      body(w, first, (int)smaller(TILE, count - first));
    return;
  }
#pragma omp parallel for schedule(static)
  for (int64_t first = 0; first < count; first += TILE)
    body(w, first, (int)smaller(TILE, count - first));
}

static inline void formula_body(const work *w, int64_t first, int n)
{
  const tensor *y = w->out[0];
  float buffer[3][TILE], out[TILE];
  tile t = {.w = w, .y = tile_target(out, y->data, y->dtype, first), .first = first, .n = n};
  for (int k = 0; k < w->inputs; k++) t.x[k] = operand_load(&w->in[k], buffer[k], first, n);
  w->formula(&t);
  tile_store(y->data, y->dtype, first, t.y, n);
}

/// Applies a formula to a call with up to three inputs and one output.
static inline eng_status elementwise(const op_call *call, void (*formula)(const tile *t),
                                     numbers with)
{
  if (!all_fast(call)) return forward_to_reference(call);
  work w = work_of(call, call->out[0]);
  w.formula = formula;
  w.with = with;
  for_tiles(&w, call->out[0]->count, formula_body);
  return ENG_OK;
}
