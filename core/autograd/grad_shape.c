// Gradient rules of views, concatenation, indexing and reductions: each sends the elements of dy
// back to the elements of x that they come from. Called by backward.c.
#include "base/error.h"
#include "op.h"
#include "gradient.h"

#include <string.h>

eng_status grad_reshape(grad_call *g)
{
  tensor *dx;
  const tensor *x = g->call->in[0];
  ENG_TRY(op_reshape(&dx, g->dy[0], x->ndim, x->shape));
  return grad_emit(g, 0, dx);
}

eng_status grad_permute(grad_call *g)
{
  op_call back = {.op = ENG_OP_permute, .in = {g->dy[0]}};
  for (int d = 0; d < g->dy[0]->ndim; d++) back.permute.order[g->call->permute.order[d]] = d;
  return grad_emit_op(g, 0, back);
}

eng_status grad_expand(grad_call *g) { return grad_emit_shared(g, 0, g->dy[0]); }

eng_status grad_slice(grad_call *g)
{
  tensor *x = g->call->in[0], *dx, *place;
  ENG_TRY(grad_zeros(&dx, g->dy[0]->dtype, x->ndim, x->shape));
  ENG_TRY(op_run1(&place, (op_call){.op = ENG_OP_slice, .in = {dx}, .slice = g->call->slice}));
  op_call copy = {.op = ENG_OP_cast, .n_in = 1, .n_out = 1, .in = {g->dy[0]}, .out = {place},
                  .cast = {.dtype = place->dtype}};
  ENG_TRY(op_run(&copy));
  tensor_drop(place);
  return grad_emit(g, 0, dx);
}

/// Joins the gradients of a split's parts into one tensor without a copy, if they are adjacent in
/// memory. Otherwise *out is NULL.
static eng_status side_by_side(tensor **out, const grad_call *g)
{
  const tensor *x = g->call->in[0], *first = g->dy[0];
  int64_t dim = g->call->split.dim;
  *out = NULL;
  if (!first) return ENG_OK;
  char *next = first->data;
  for (int k = 0; k < g->call->n_out; k++) {
    const tensor *dy = g->dy[k];
    if (!dy || dy->store != first->store || dy->dtype != first->dtype || dy->data != next)
      return ENG_OK;
    if (memcmp(dy->stride, first->stride, (size_t)x->ndim * sizeof *dy->stride) != 0) return ENG_OK;
    next += dy->shape[dim] * dy->stride[dim] * eng_dtype_size(dy->dtype);
  }
  int64_t stride = 1;   // the whole must be row-major, so that no later operation copies it
  for (int d = x->ndim - 1; d >= 0; stride *= x->shape[d--])
    if (first->stride[d] != stride) return ENG_OK;
  return tensor_view(out, g->dy[0], 0, x->ndim, x->shape, first->stride);
}

eng_status grad_split(grad_call *g)
{
  tensor *whole;
  ENG_TRY(side_by_side(&whole, g));
  if (whole) return grad_emit(g, 0, whole);
  op_call c = {
    .op = ENG_OP_concat, .n_in = g->call->n_out, .concat = {.dim = g->call->split.dim}};
  for (int k = 0; k < g->call->n_out; k++) {
    const tensor *part = g->call->out[k];
    c.in[k] = g->dy[k];
    if (!c.in[k]) ENG_TRY(grad_zeros(&c.in[k], part->dtype, part->ndim, part->shape));
  }
  ENG_TRY(op_run(&c));
  return grad_emit(g, 0, c.out[0]);
}

eng_status grad_concat(grad_call *g)
{
  int64_t dim = g->call->concat.dim, start = 0;
  for (int k = 0; k < g->call->n_in; k++) {
    int64_t stop = start + g->call->in[k]->shape[dim];
    op_call part = {.op = ENG_OP_slice, .in = {g->dy[0]},
                    .slice = {.dim = dim, .start = start, .stop = stop, .step = 1}};
    if (grad_wants(g, k)) ENG_TRY(grad_emit_op(g, k, part));
    start = stop;
  }
  return ENG_OK;
}

/// Adds the elements of dy to zeros of x's shape, at the positions that `index` picked along `dim`.
static eng_status scatter(grad_call *g, int op, tensor *dy, tensor *index, int64_t dim)
{
  const tensor *x = g->call->in[0];
  op_call c = {.op = op, .in = {dy, index}, .gather_grad = {.dim = dim, .ndim = x->ndim}};
  memcpy(c.gather_grad.shape, x->shape, (size_t)x->ndim * sizeof *x->shape);
  return grad_emit_op(g, 0, c);
}

eng_status grad_gather(grad_call *g)
{ return scatter(g, ENG_OP_gather_grad, g->dy[0], g->call->in[1], g->call->gather.dim); }

eng_status grad_index_select(grad_call *g)
{
  return scatter(g, ENG_OP_index_select_grad, g->dy[0], g->call->in[1], g->call->index_select.dim);
}

eng_status grad_topk(grad_call *g)
{ return scatter(g, ENG_OP_gather_grad, g->dy[0], g->call->out[1], g->call->in[0]->ndim - 1); }

// ---- reductions

/// Reshapes dy to x's dimensions, with size 1 in the reduced ones, then broadcasts it to x's shape
/// (stride 0).
static eng_status spread(tensor **out, grad_call *g, tensor *dy)
{
  const tensor *x = g->call->in[0];
  tensor kept = *x;
  OWNED tensor *shaped = NULL;
  for (int d = 0; d < x->ndim; d++)
    if (g->call->sum.mask >> d & 1) kept.shape[d] = 1;
  ENG_TRY(op_reshape(&shaped, dy, x->ndim, kept.shape));
  return op_expand(out, shaped, x->ndim, x->shape);
}

eng_status grad_sum(grad_call *g)
{
  tensor *dx;
  ENG_TRY(spread(&dx, g, g->dy[0]));
  return grad_emit(g, 0, dx);
}

eng_status grad_mean(grad_call *g)
{
  double n =
    (double)g->call->in[0]->count / (double)(g->call->out[0]->count ? g->call->out[0]->count : 1);
  tensor *share, *dx;
  ENG_TRY(op_affine(&share, g->dy[0], 1 / n, 0));
  ENG_TRY(spread(&dx, g, share));
  tensor_drop(share);
  return grad_emit(g, 0, dx);
}

static eng_status extreme(grad_call *g)
{
  return grad_emit_op(g, 0, (op_call){.op = ENG_OP_extreme_grad,
                                      .in = {g->call->in[0], g->call->out[0], g->dy[0]},
                                      .extreme_grad = {.mask = g->call->max.mask}});
}

eng_status grad_max(grad_call *g) { return extreme(g); }
eng_status grad_min(grad_call *g) { return extreme(g); }
