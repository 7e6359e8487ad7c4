// Shape rules of operations that move elements: views, split, concat. See infer.h. Called by
// infer.c.
#include "base/error.h"
#include "infer.h"

static eng_status shape_list(op_call *c, int *ndim, int64_t *shape)
{
  FAIL_IF(c->reshape.ndim < 0 || c->reshape.ndim > ENG_MAX_DIMS, ENG_ERR_VALUE, "%s: expected 0 "
          "to %d dimensions, got %lld", op_name(c), ENG_MAX_DIMS, (long long)c->reshape.ndim);
  *ndim = (int)c->reshape.ndim;
  for (int d = 0; d < *ndim; d++) shape[d] = c->reshape.shape[d];
  return ENG_OK;
}

eng_status infer_reshape(op_call *c, op_shape *s)
{
  int ndim, hole = -1;
  // `bound` is the product of the sizes above 0, for the overflow check
  int64_t shape[ENG_MAX_DIMS], known = 1, bound = 1;
  ENG_TRY(shape_list(c, &ndim, shape));
  for (int d = 0; d < ndim; d++) {
    if (shape[d] == -1 && hole < 0) hole = d;
    else if (shape[d] < 0 || __builtin_mul_overflow(bound, shape[d] ? shape[d] : 1, &bound) ||
             __builtin_mul_overflow(known, shape[d], &known))
      return error_set(ENG_ERR_VALUE, "view: expected sizes >= 0 (one may be -1) with a product "
                       "below 2^63, got %s",
                       tensor_shape_text(ndim, shape));
  }
  int64_t count = c->in[0]->count;
  if (hole >= 0 && known > 0 && count % known == 0) shape[hole] = count / known;
  else if (hole >= 0 || known != count)
    return error_set(ENG_ERR_SHAPE, "view: %s has %lld elements and cannot become %s",
                     tensor_text(c->in[0]), (long long)count, tensor_shape_text(ndim, shape));
  put_out(s, 0, c->in[0]->dtype, ndim, shape);
  return ENG_OK;
}

eng_status infer_permute(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  unsigned seen = 0;
  int64_t shape[ENG_MAX_DIMS];
  for (int d = 0; d < x->ndim; d++) {
    ENG_TRY(fix_dim(c, &c->permute.order[d], x));
    FAIL_IF(seen >> c->permute.order[d] & 1, ENG_ERR_VALUE,
            "permute: expected each dimension of %s exactly once, got dimension %d twice",
            tensor_text(x), (int)c->permute.order[d] + 1);
    seen |= 1u << c->permute.order[d];
    shape[d] = x->shape[c->permute.order[d]];
  }
  put_out(s, 0, x->dtype, x->ndim, shape);
  return ENG_OK;
}

eng_status infer_expand(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  int ndim;
  int64_t shape[ENG_MAX_DIMS];
  ENG_TRY(shape_list(c, &ndim, shape));
  bool fits = ndim >= x->ndim;
  for (int d = 1; fits && d <= ndim; d++) {
    int64_t have = d <= x->ndim ? x->shape[x->ndim - d] : 1;
    if (shape[ndim - d] == -1) shape[ndim - d] = have;
    fits = shape[ndim - d] >= 0 && (have == shape[ndim - d] || have == 1);
  }
  FAIL_IF(!fits, ENG_ERR_SHAPE,
          "expand: %s does not broadcast to %s", tensor_text(x), tensor_shape_text(ndim, shape));
  put_out(s, 0, x->dtype, ndim, shape);
  return ENG_OK;
}

eng_status infer_slice(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  ENG_TRY(fix_dim(c, &c->slice.dim, x));
  int64_t n = x->shape[c->slice.dim], start = c->slice.start, stop = c->slice.stop,
          step = c->slice.step;
  FAIL_IF(step < 1, ENG_ERR_VALUE,
          "slice: expected a step of at least 1, got %lld", (long long)step);
  if (step > n) c->slice.step = step = n > 0 ? n : 1;   // a longer step selects the same elements
  start = start < 0 ? start + n : start;
  stop = stop < 0 ? stop + n : stop;
  start = start < 0 ? 0 : start > n ? n : start;
  stop = stop < start ? start : stop > n ? n : stop;
  c->slice.start = start;
  c->slice.stop = stop;
  put_like(s, 0, x->dtype, x);
  s->out[0].shape[c->slice.dim] = (stop - start + step - 1) / step;
  return ENG_OK;
}

eng_status infer_split(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  ENG_TRY(fix_dim(c, &c->split.dim, x));
  int64_t sum = 0;
  FAIL_IF(c->n_out < 1 || c->n_out > ENG_OP_OUTPUTS, ENG_ERR_VALUE,
          "split: expected 1 to %d parts, got %d", ENG_OP_OUTPUTS, c->n_out);
  for (int k = 0; k < c->n_out; k++) {
    int64_t size = c->split.sizes[k];
    FAIL_IF(size < 0 || size > x->shape[c->split.dim], ENG_ERR_VALUE,
            "split: expected parts of 0 to %lld along dimension %lld of %s, got a part of %lld",
            (long long)x->shape[c->split.dim], (long long)c->split.dim + 1, tensor_text(x),
            (long long)size);
    sum += size;
    put_like(s, k, x->dtype, x);
    s->out[k].shape[c->split.dim] = c->split.sizes[k];
  }
  FAIL_IF(sum != x->shape[c->split.dim], ENG_ERR_SHAPE, "split: the part sizes sum to %lld, but "
          "dimension %lld of %s has size %lld", (long long)sum, (long long)c->split.dim + 1,
          tensor_text(x), (long long)x->shape[c->split.dim]);
  return ENG_OK;
}

eng_status infer_concat(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  ENG_TRY(want_ndim(c, 0, 1));
  ENG_TRY(fix_dim(c, &c->concat.dim, x));
  int dtype = x->dtype;
  int64_t size = x->shape[c->concat.dim];
  for (int k = 1; k < c->n_in; k++) {
    const tensor *y = c->in[k];
    bool fits = y->ndim == x->ndim;
    for (int d = 0; fits && d < x->ndim; d++)
      fits = d == c->concat.dim || x->shape[d] == y->shape[d];
    FAIL_IF(!fits, ENG_ERR_SHAPE, "concat: the sizes of %s and %s differ outside dimension %lld",
            tensor_text(x), tensor_text(y), (long long)c->concat.dim + 1);
    size += y->shape[c->concat.dim];
    dtype = dtype_promote(dtype, y->dtype);
  }
  put_like(s, 0, dtype, x);
  s->out[0].shape[c->concat.dim] = size;
  return ENG_OK;
}
