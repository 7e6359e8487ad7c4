// View operations: a new shape and new strides over the same memory. See op.h. Called by op.c.
#include "base/error.h"
#include "op.h"

#include <string.h>

/// Sets `stride` so that x's memory can be read as `shape`. Returns false if a copy is needed.
/// Splits both shapes, from the left, into groups of dimensions with equal products. Within a
/// group, the dimensions of x must be mergeable into one with a single stride.
static bool reshape_strides(const tensor *x, int ndim, const int64_t *shape, int64_t *stride)
{
  int64_t size[ENG_MAX_DIMS], step[ENG_MAX_DIMS];   // of x, without its dimensions of size 1
  int n = 0;
  for (int d = 0; d < x->ndim; d++)
    if (x->shape[d] != 1) {
      size[n] = x->shape[d];
      step[n++] = x->stride[d];
    }
  int from = 0, to = 0;
  bool rows = x->count == 0 || tensor_contiguous(x);
  while (!rows && from < n && to < ndim) {
    int from_end = from + 1, to_end = to + 1;
    int64_t have = size[from], want = shape[to];
    while (have != want) {
      if (want < have) want *= shape[to_end++];
      else have *= size[from_end++];
    }
    for (int d = from; d < from_end - 1; d++)
      if (step[d] != size[d + 1] * step[d + 1]) return false;
    stride[to_end - 1] = step[from_end - 1];
    for (int d = to_end - 1; d > to; d--) stride[d - 1] = stride[d] * shape[d];
    from = from_end;
    to = to_end;
  }
  int64_t next = 1;   // row-major strides for the rest: all of `shape`, or dimensions of size 1
  for (int d = ndim - 1; d >= to; d--) {
    stride[d] = next;
    next *= shape[d];
  }
  return true;
}

static eng_status view_reshape(op_call *c, const op_shape *s)
{
  tensor *x = c->in[0];
  int64_t stride[ENG_MAX_DIMS];
  int ndim = s->out[0].ndim;
  const int64_t *shape = s->out[0].shape;
  OWNED tensor *copy = NULL;   // the view keeps the copy's memory alive
  if (!reshape_strides(x, ndim, shape, stride)) {
    op_call flat = {.op = ENG_OP_contiguous, .n_in = 1, .n_out = 1, .in = {x}};
    ENG_TRY(tensor_make_in(&copy, x->store->space, ARENA_STEP, x->dtype, x->ndim, x->shape));
    flat.out[0] = copy;
    ENG_TRY(backend_of_space(x->store->space)->kernel[ENG_OP_contiguous](&flat));
    x = copy;
    reshape_strides(x, ndim, shape, stride);
  }
  return tensor_view(&c->out[0], x, 0, ndim, shape, stride);
}

static eng_status view_expand(op_call *c, const op_shape *s)
{
  tensor *x = c->in[0];
  int64_t stride[ENG_MAX_DIMS];
  int ndim = s->out[0].ndim, lead = ndim - x->ndim;
  for (int d = 0; d < ndim; d++)
    stride[d] = d < lead || x->shape[d - lead] != s->out[0].shape[d] ? 0 : x->stride[d - lead];
  return tensor_view(&c->out[0], x, 0, ndim, s->out[0].shape, stride);
}

eng_status op_view(op_call *c, const op_shape *s)
{
  tensor *x = c->in[0];
  int64_t stride[ENG_MAX_DIMS];
  memcpy(stride, x->stride, sizeof stride);
  int dim = (int)c->slice.dim;   // split.dim is the same attribute
  switch (c->op) {
    case ENG_OP_reshape: return view_reshape(c, s);
    case ENG_OP_expand:  return view_expand(c, s);
    case ENG_OP_permute:
      for (int d = 0; d < x->ndim; d++) stride[d] = x->stride[c->permute.order[d]];
      return tensor_view(&c->out[0], x, 0, x->ndim, s->out[0].shape, stride);
    case ENG_OP_slice:
      stride[dim] *= c->slice.step;
      return tensor_view(&c->out[0], x, c->slice.start * x->stride[dim], x->ndim, s->out[0].shape,
                         stride);
    default: {
      int64_t offset = 0;
      for (int k = 0; k < c->n_out; k++) {
        ENG_TRY(
          tensor_view(&c->out[k], x, offset * x->stride[dim], x->ndim, s->out[k].shape, stride));
        offset += c->split.sizes[k];
      }
      return ENG_OK;
    }
  }
}
