// Reference kernels that join and select: concat; gather, index_select, embedding and their
// gradients; topk, argmax, argmin. Elements that are only moved keep every bit. See reference.h.
//
// Edge cases: NaN counts as the largest element in topk and argmax, and as the smallest in argmin
// (a NaN is always found). Among equal elements, the first is taken. Called through reference.c.
#include "reference.h"

// ------------------------------------------------------------------ joining

eng_status reference_concat(const op_call *call)
{
  const tensor *y = call->out[0];
  int64_t offset = 0;   // where the current input begins in y along the dimension
  for (int k = 0; k < call->n_in; k++) {
    const tensor *x = call->in[k];
    walk w = walk_over(x->ndim, x->shape);
    walk_add(&w, x);
    walk_add_strides(&w, y->stride);
    for (; !walk_ended(&w); walk_next(&w))
      element_copy(y, w.at[1] + offset * y->stride[call->concat.dim], x, w.at[0]);
    offset += x->shape[call->concat.dim];
  }
  return ENG_OK;
}

// ------------------------------------------------------------------ selection by index

// `small` is y and `large` is x, or dy and dx in a gradient. Each element of `small` corresponds to
// one element of `large`. Along one dimension, an index gives the position in `large`; along the
// other dimensions, the two elements have the same position. gather has an index for each element
// of `small`; the other operations have an index for each position along the dimension.

// Checks all indices against the size of the dimension from which they select.
static eng_status check_indices(const op_call *call, int64_t size)
{
  const tensor *indices = call->in[1];
  for (int64_t k = 0; k < indices->count; k++) {
    int64_t index = load_int_at(indices, k);
    FAIL_IF(index < 0 || index >= size, ENG_ERR_VALUE,
            "%s: expected %s%lld, got %lld at position %lld of %s", eng_op_name(call->op),
            size > 0 ? "indices in 0.." : "no indices into a dimension of size ",
            (long long)(size - (size > 0)), (long long)index, (long long)k + 1,
            tensor_text(indices));
  }
  return ENG_OK;
}

// Copies the elements of `small` from `large` or, given `sums` in the shape of `large`, adds the
// elements of `small` to `sums`.
static void pick(const op_call *call, const tensor *small, const tensor *large, int64_t dimension,
                 double *sums)
{
  bool each = call->op == ENG_OP_gather || call->op == ENG_OP_gather_grad;
  for (walk w = walk_over(small->ndim, small->shape); !walk_ended(&w); walk_next(&w)) {
    int64_t index = load_int_at(call->in[1], each ? w.position : w.index[dimension]), place = 0;
    for (int d = 0; d < large->ndim; d++)
      place = place * large->shape[d] + (d == dimension ? index : w.index[d]);
    if (sums) sums[place] += load_at(small, w.position);
    else element_copy(small, w.position, large, place);
  }
}

static eng_status select_from(const op_call *call, const tensor *y, int64_t dimension)
{
  const tensor *x = call->in[0];
  ENG_TRY(check_indices(call, x->shape[dimension]));
  pick(call, y, x, dimension, NULL);
  return ENG_OK;
}

// Sums in double all elements of dy that belong to one element of dx, then rounds once.
static eng_status select_grad(const op_call *call, const tensor *dy, int64_t dimension, bool add)
{
  const tensor *dx = call->out[0];
  ENG_TRY(check_indices(call, dx->shape[dimension]));
  ZEROS(double, sums, dx->count);
  pick(call, dy, dx, dimension, sums);
  values_store(dx, sums, add);
  return ENG_OK;
}

// Returns a tensor [.. x C] as a matrix [rows x C].
static tensor matrix_of(const tensor *x)
{
  tensor matrix = *x;
  matrix.ndim = 2;
  matrix.shape[0] = row_count(x);
  matrix.shape[1] = row_length(x);
  return matrix;
}

eng_status reference_gather(const op_call *call)
{ return select_from(call, call->out[0], call->gather.dim); }

eng_status reference_gather_grad(const op_call *call)
{ return select_grad(call, call->in[0], call->gather_grad.dim, false); }

eng_status reference_index_select(const op_call *call)
{ return select_from(call, call->out[0], call->index_select.dim); }

eng_status reference_index_select_grad(const op_call *call)
{ return select_grad(call, call->in[0], call->index_select_grad.dim, false); }

eng_status reference_embedding(const op_call *call)
{
  tensor rows = matrix_of(call->out[0]);
  return select_from(call, &rows, 0);
}

eng_status reference_embedding_grad(const op_call *call)
{
  tensor rows = matrix_of(call->in[0]);
  return select_grad(call, &rows, 0, call->embedding_grad.add != 0);
}

// ------------------------------------------------------------------ the largest elements

eng_status reference_topk(const op_call *call)
{
  const tensor *x = call->in[0], *values = call->out[0], *places = call->out[1];
  int64_t n = row_length(x), rows = row_count(x), k = call->topk.k;
  ZEROS(int64_t, taken, n);   // 1 + the last row in which element i was taken
  for (int64_t r = 0; r < rows; r++)
    for (int64_t rank = 0; rank < k; rank++) {
      int64_t best = -1;
      for (int64_t i = 0; i < n; i++)
        if (taken[i] != r + 1 && (best < 0 || element_beats(x, r * n + i, r * n + best, 1)))
          best = i;
      taken[best] = r + 1;
      if (values) element_copy(values, r * k + rank, x, r * n + best);
      if (places) store_int_at(places, r * k + rank, best);
    }
  return ENG_OK;
}

// Stores in y the index of the largest element (sign 1, argmax) or the smallest element (sign -1,
// argmin) along the dimension.
static eng_status find_extreme(const op_call *call, int sign)
{
  const tensor *x = call->in[0], *y = call->out[0];
  int64_t n = x->shape[call->argmax.dim], step = 1;   // step: distance from candidate to candidate
  for (int d = x->ndim - 1; d > call->argmax.dim; d--) step *= x->shape[d];
  for (int64_t i = 0; i < y->count; i++) {
    int64_t first = i / step * n * step + i % step, best = 0;
    for (int64_t j = 1; j < n; j++)
      if (element_beats(x, first + j * step, first + best * step, sign)) best = j;
    store_int_at(y, i, best);
  }
  return ENG_OK;
}

eng_status reference_argmax(const op_call *call) { return find_extreme(call, 1); }
eng_status reference_argmin(const op_call *call) { return find_extreme(call, -1); }
