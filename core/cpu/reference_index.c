// Reference kernels that join and select: concat, gather, index_select, embedding and their
// gradients, top-k, argmax. Elements that are only moved keep every bit. See reference.h.
//
// Edge cases: NaN counts as the largest element in topk and argmax, and as the smallest in argmin
// (a NaN is always found); among equal elements the first one is taken.
#include "reference.h"


// ------------------------------------------------------------------ joining

eng_status reference_concat(const op_call *call)
{
  const tensor *y = call->out[0];
  int dimension = dimension_of(call->concat.dim, y->ndim);
  int64_t offset = 0;   // of the current part, along `dimension`
  for (int k = 0; k < call->n_in; k++) {
    const tensor *x = call->in[k];
    walk w = walk_over(x->ndim, x->shape);
    walk_add(&w, x);
    walk_add_strides(&w, y->stride);
    for (; !walk_ended(&w); walk_next(&w))
      element_copy(y->data, y->dtype, w.at[1] + offset * y->stride[dimension], x->data, x->dtype,
                   w.at[0]);
    offset += x->shape[dimension];
  }
  return ENG_OK;
}

// ------------------------------------------------------------------ picking

// The index at offset `at`, checked against `size`, the size of the dimension it selects from.
static eng_status read_index(int64_t *index, const op_call *call, const tensor *indices, int64_t at,
                             int64_t position, int64_t size)
{
  *index = tensor_load_int(indices->data, indices->dtype, at);
  if (*index >= 0 && *index < size) return ENG_OK;
  return error_set(ENG_ERR_VALUE,
                   "%s: expected indices in 0..%lld, got %lld at position %lld of %s",
                   eng_op_name(call->op), (long long)size - 1, (long long)*index,
                   (long long)position, tensor_text(indices));
}


eng_status reference_gather(const op_call *call)
{
  const tensor *x = call->in[0], *indices = call->in[1], *y = call->out[0];
  int dimension = dimension_of(call->gather.dim, x->ndim);
  walk w = walk_over(y->ndim, y->shape);
  walk_add_strides(&w, indices->stride);
  walk_add(&w, y);
  for (; !walk_ended(&w); walk_next(&w)) {
    int64_t index, from = 0;
    ENG_TRY(read_index(&index, call, indices, w.at[0], w.position, x->shape[dimension]));
    for (int d = 0; d < x->ndim; d++) from += (d == dimension ? index : w.index[d]) * x->stride[d];
    element_copy(y->data, y->dtype, w.at[1], x->data, x->dtype, from);
  }
  return ENG_OK;
}

// Sums in double everything that was selected from one place, then rounds once.
eng_status reference_gather_grad(const op_call *call)
{
  const tensor *dy = call->in[0], *indices = call->in[1], *dx = call->out[0];
  int dimension = dimension_of(call->gather_grad.dim, dx->ndim);
  workspace space = {0};
  double *sums = workspace_doubles(&space, dx->count);
  if (space.failed) return workspace_close(&space);
  walk w = walk_over(dy->ndim, dy->shape);
  walk_add(&w, dy);
  walk_add_strides(&w, indices->stride);
  for (; !walk_ended(&w); walk_next(&w)) {
    int64_t index, to = 0;
    eng_status status =
      read_index(&index, call, indices, w.at[1], w.position, dx->shape[dimension]);
    if (status != ENG_OK) {
      workspace_close(&space);
      return status;
    }
    for (int d = 0; d < dx->ndim; d++)
      to = to * dx->shape[d] + (d == dimension ? index : w.index[d]);
    sums[to] += tensor_load(dy->data, dy->dtype, w.at[0]);
  }
  values_store(dx, sums, false);
  return workspace_close(&space);
}

eng_status reference_index_select(const op_call *call)
{
  const tensor *x = call->in[0], *indices = call->in[1], *y = call->out[0];
  int dimension = dimension_of(call->index_select.dim, x->ndim);
  for (int64_t k = 0; k < indices->count; k++) {
    int64_t index;
    ENG_TRY(read_index(&index, call, indices, k * indices->stride[0], k, x->shape[dimension]));
  }
  walk w = walk_over(y->ndim, y->shape);
  for (walk_add(&w, y); !walk_ended(&w); walk_next(&w)) {
    int64_t index = tensor_load_int(indices->data, indices->dtype,
                                    w.index[dimension] * indices->stride[0]),
            from = 0;
    for (int d = 0; d < x->ndim; d++) from += (d == dimension ? index : w.index[d]) * x->stride[d];
    element_copy(y->data, y->dtype, w.at[0], x->data, x->dtype, from);
  }
  return ENG_OK;
}

eng_status reference_index_select_grad(const op_call *call)
{
  const tensor *dy = call->in[0], *indices = call->in[1], *dx = call->out[0];
  int dimension = dimension_of(call->index_select_grad.dim, dx->ndim);
  for (int64_t k = 0; k < indices->count; k++) {
    int64_t index;
    ENG_TRY(read_index(&index, call, indices, k * indices->stride[0], k, dx->shape[dimension]));
  }
  workspace space = {0};
  double *sums = workspace_doubles(&space, dx->count);
  if (space.failed) return workspace_close(&space);
  walk w = walk_over(dy->ndim, dy->shape);
  for (walk_add(&w, dy); !walk_ended(&w); walk_next(&w)) {
    int64_t index = tensor_load_int(indices->data, indices->dtype,
                                    w.index[dimension] * indices->stride[0]),
            to = 0;
    for (int d = 0; d < dx->ndim; d++)
      to = to * dx->shape[d] + (d == dimension ? index : w.index[d]);
    sums[to] += tensor_load(dy->data, dy->dtype, w.at[0]);
  }
  values_store(dx, sums, false);
  return workspace_close(&space);
}

eng_status reference_embedding(const op_call *call)
{
  const tensor *weight = call->in[0], *ids = call->in[1], *y = call->out[0];
  int64_t columns = weight->shape[1];
  walk rows = walk_over(ids->ndim, ids->shape);
  walk_add(&rows, ids);
  walk_add_strides(&rows, y->stride);
  for (; !walk_ended(&rows); walk_next(&rows)) {
    int64_t id;
    ENG_TRY(read_index(&id, call, ids, rows.at[0], rows.position, weight->shape[0]));
    for (int64_t c = 0; c < columns; c++)
      element_copy(y->data, y->dtype, rows.at[1] + c * y->stride[y->ndim - 1], weight->data,
                   weight->dtype, id * weight->stride[0] + c * weight->stride[1]);
  }
  return ENG_OK;
}

eng_status reference_embedding_grad(const op_call *call)
{
  const tensor *dy = call->in[0], *ids = call->in[1], *dweight = call->out[0];
  int64_t columns = dweight->shape[1];
  workspace space = {0};
  double *sums = workspace_doubles(&space, dweight->count);
  double *slopes = workspace_load(&space, dy);
  if (space.failed) return workspace_close(&space);
  walk rows = walk_over(ids->ndim, ids->shape);
  for (walk_add(&rows, ids); !walk_ended(&rows); walk_next(&rows)) {
    int64_t id;
    eng_status status = read_index(&id, call, ids, rows.at[0], rows.position, dweight->shape[0]);
    if (status != ENG_OK) {
      workspace_close(&space);
      return status;
    }
    for (int64_t c = 0; c < columns; c++)
      sums[id * columns + c] += slopes[rows.position * columns + c];
  }
  values_store(dweight, sums, call->embedding_grad.add != 0);
  return workspace_close(&space);
}

// ------------------------------------------------------------------ the largest elements

eng_status reference_topk(const op_call *call)
{
  const tensor *x = call->in[0], *values = call->out[0], *places = call->out[1];
  int last = x->ndim - 1;
  int64_t n = x->shape[last], k = call->topk.k, step = x->stride[last];
  workspace space = {0};
  int64_t *taken = workspace_ints(&space, n);   // 1 + the last row in which an element was taken
  if (space.failed) return workspace_close(&space);
  walk rows = walk_over(last, x->shape);
  walk_add_strides(&rows, x->stride);
  walk_add_strides(&rows, values ? values->stride : x->stride);
  walk_add_strides(&rows, places ? places->stride : x->stride);
  for (; !walk_ended(&rows); walk_next(&rows)) {
    for (int64_t rank = 0; rank < k; rank++) {
      int64_t best = -1;
      for (int64_t i = 0; i < n; i++) {
        if (taken[i] == rows.position + 1) continue;
        if (best < 0 || element_compare(x, rows.at[0] + i * step, rows.at[0] + best * step) > 0)
          best = i;
      }
      taken[best] = rows.position + 1;
      if (values)
        element_copy(values->data, values->dtype, rows.at[1] + rank * values->stride[last], x->data,
                     x->dtype, rows.at[0] + best * step);
      if (places)
        tensor_store_int(places->data, places->dtype, rows.at[2] + rank * places->stride[last],
                         best);
    }
  }
  return workspace_close(&space);
}

// Stores in y the index of each largest element (sign 1: argmax) or smallest one (sign -1: argmin).
static eng_status find_extreme(const op_call *call, int sign)
{
  const tensor *x = call->in[0], *y = call->out[0];
  int dimension = dimension_of(call->argmax.dim, x->ndim);
  int64_t n = x->shape[dimension], step = x->stride[dimension];
  int64_t shape[ENG_MAX_DIMS], stride[ENG_MAX_DIMS];
  // Walks over every dimension except the searched one, which y has with size 1 or lacks.
  for (int d = 0; d < x->ndim; d++) {
    int own = y->ndim == x->ndim || d < dimension ? d : d - 1;
    shape[d] = d == dimension ? 1 : x->shape[d];
    stride[d] = d == dimension ? 0 : y->stride[own];
  }
  walk w = walk_over(x->ndim, shape);
  walk_add_strides(&w, x->stride);
  walk_add_strides(&w, stride);
  if (n == 0 && w.count > 0)
    return error_set(ENG_ERR_VALUE, "%s: expected at least one element to choose from, got %s",
                     eng_op_name(call->op), tensor_text(x));
  for (; !walk_ended(&w); walk_next(&w)) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++) {
      int64_t here = w.at[0] + i * step, there = w.at[0] + best * step;
      int order = element_compare(x, here, there);
      bool nan = dtype_is_float(x->dtype) && f64_is_nan(tensor_load(x->data, x->dtype, here));
      bool best_nan = dtype_is_float(x->dtype) && f64_is_nan(tensor_load(x->data, x->dtype, there));
      if (nan || best_nan ? nan && !best_nan : sign * order > 0) best = i;
    }
    tensor_store_int(y->data, y->dtype, w.at[1], best);
  }
  return ENG_OK;
}

eng_status reference_argmax(const op_call *call) { return find_extreme(call, 1); }
eng_status reference_argmin(const op_call *call) { return find_extreme(call, -1); }
