// Shape and dtype rules: what each operation accepts, and the shapes and dtypes of its outputs. See
// op.h. Messages count dimensions from 1, as scripts do.
#include "base/error.h"
#include "base/numerics.h"
#include "op.h"

#include <string.h>

// ---- promotion and broadcasting

static int dtype_rank(int d)
{
  static const int rank[ENG_DTYPE_COUNT] = {
    [ENG_bool] = 0, [ENG_u8] = 1, [ENG_i8] = 2, [ENG_i16] = 3, [ENG_i32] = 4, [ENG_i64] = 5,
    [ENG_f16] = 6, [ENG_bf16] = 6, [ENG_f32] = 7, [ENG_f64] = 8,
  };
  return rank[d];
}

int dtype_promote(int a, int b)
{
  if (a == b) return a;
  if (dtype_is_low(a) && dtype_is_low(b)) return ENG_f32;
  if ((a == ENG_u8 && b == ENG_i8) || (a == ENG_i8 && b == ENG_u8)) return ENG_i16;
  return dtype_rank(a) > dtype_rank(b) ? a : b;
}

bool shape_broadcast(int *ndim, int64_t *shape, const tensor *a, const tensor *b)
{
  int n = a->ndim > b->ndim ? a->ndim : b->ndim;
  for (int d = 1; d <= n; d++) {
    int64_t x = d <= a->ndim ? a->shape[a->ndim - d] : 1,
            y = d <= b->ndim ? b->shape[b->ndim - d] : 1;
    if (x != y && x != 1 && y != 1) return false;
    shape[n - d] = x == 1 ? y : x;
  }
  *ndim = n;
  return true;
}

// ---- helpers

static const char *name_of(const op_call *c) { return op_table[c->op].about.name; }

static void put(op_shape *s, int k, int dtype, int ndim, const int64_t *shape)
{
  s->out[k].dtype = dtype;
  s->out[k].ndim = ndim;
  if (ndim > 0) memcpy(s->out[k].shape, shape, (size_t)ndim * sizeof *shape);
}

static void put_like(op_shape *s, int k, int dtype, const tensor *x)
{
  put(s, k, dtype, x->ndim, x->shape);
}

/// Sets the shape of output k to x's without the last `drop` dimensions.
static void put_outer(op_shape *s, int k, int dtype, const tensor *x, int drop)
{
  put(s, k, dtype, x->ndim - drop, x->shape);
}

static eng_status want_float(const op_call *c, int k)
{
  if (dtype_is_float(c->in[k]->dtype)) return ENG_OK;
  return error_set(ENG_ERR_DTYPE,
                   "%s: expected a floating-point tensor, got %s; hint: x:to(\"f32\")", name_of(c),
                   tensor_text(c->in[k]));
}

static eng_status want_index(const op_call *c, int k, const char *what)
{
  int d = c->in[k]->dtype;
  if (!dtype_is_float(d) && d != ENG_bool) return ENG_OK;
  return error_set(ENG_ERR_DTYPE,
                   "%s: expected %s of an integer dtype, got %s; hint: %s:to(\"i64\")", name_of(c),
                   what, tensor_text(c->in[k]), what);
}

static eng_status want_same(const op_call *c, int j, int k)
{
  if (tensor_same_shape(c->in[j], c->in[k])) return ENG_OK;
  return error_set(ENG_ERR_SHAPE, "%s: expected two tensors of one shape, got %s and %s",
                   name_of(c), tensor_text(c->in[j]), tensor_text(c->in[k]));
}

/// Checks a dtype in an attribute: that of a gradient, hence a float.
static eng_status want_float_attribute(const op_call *c, int64_t dtype)
{
  if (dtype >= 0 && dtype < ENG_DTYPE_COUNT && dtype_is_float((int)dtype)) return ENG_OK;
  return error_set(ENG_ERR_DTYPE,
                   "%s: expected the number of a floating-point dtype, got %lld (%s)", name_of(c),
                   (long long)dtype,
                   dtype >= 0 && dtype < ENG_DTYPE_COUNT ? eng_dtype_name((int)dtype) : "no dtype");
}

/// Checks that input k has this shape, which is that of `what`.
static eng_status want_shape(const op_call *c, int k, int ndim, const int64_t *shape,
                             const char *what)
{
  const tensor *x = c->in[k];
  if (x->ndim == ndim && memcmp(x->shape, shape, (size_t)ndim * sizeof *shape) == 0) return ENG_OK;
  return error_set(ENG_ERR_SHAPE, "%s: expected input %d in the shape of %s, %s, got %s",
                   name_of(c), k + 1, what, tensor_shape_text(ndim, shape), tensor_text(x));
}

static eng_status want_ndim(const op_call *c, int k, int least)
{
  if (c->in[k]->ndim >= least) return ENG_OK;
  return error_set(ENG_ERR_SHAPE, "%s: expected at least %d dimension%s, got %s", name_of(c), least,
                   least == 1 ? "" : "s", tensor_text(c->in[k]));
}

/// Checks a [C] vector for the last dimension of x.
static eng_status want_vector(const op_call *c, int k, const char *what, int64_t n)
{
  const tensor *v = c->in[k];
  if (!v) return ENG_OK;
  ENG_TRY(want_float(c, k));
  if (v->ndim == 1 && v->shape[0] == n) return ENG_OK;
  return error_set(ENG_ERR_SHAPE, "%s: expected %s of shape [%lld], got %s", name_of(c), what,
                   (long long)n, tensor_text(v));
}

static eng_status fix_dim(const op_call *c, int64_t *dim, const tensor *x)
{
  int64_t d = *dim < 0 ? *dim + x->ndim : *dim;
  if (d < 0 || d >= x->ndim)
    return error_set(ENG_ERR_VALUE, "%s: dimension %lld does not exist in %s", name_of(c),
                     (long long)(*dim < 0 || *dim == INT64_MAX ? *dim : *dim + 1), tensor_text(x));
  *dim = d;
  return ENG_OK;
}

static int wide_of(int d) { return dtype_is_low(d) ? ENG_f32 : d; }

// ---- groups of operations

static eng_status broadcast(op_call *c, op_shape *s, int a, int b)
{
  int ndim;
  int64_t shape[ENG_MAX_DIMS];
  if (!shape_broadcast(&ndim, shape, c->in[a], c->in[b]))
    return error_set(
      ENG_ERR_SHAPE,
      "%s: shapes do not broadcast: %s and %s; sizes must match from the right, or be 1",
      name_of(c), tensor_text(c->in[a]), tensor_text(c->in[b]));
  int dtype = dtype_promote(c->in[a]->dtype, c->in[b]->dtype);
  switch (c->op) {
    case ENG_OP_eq: case ENG_OP_ne: case ENG_OP_lt: case ENG_OP_le: case ENG_OP_gt: case ENG_OP_ge:
      dtype = ENG_bool;
      break;
    case ENG_OP_div: case ENG_OP_pow:
      if (!dtype_is_float(dtype)) dtype = ENG_f32;
      break;
    default:
      if (dtype == ENG_bool && c->op != ENG_OP_where) dtype = ENG_u8;
  }
  put(s, 0, dtype, ndim, shape);
  return ENG_OK;
}

static eng_status infer_binary(op_call *c, op_shape *s) { return broadcast(c, s, 0, 1); }

static eng_status infer_where(op_call *c, op_shape *s)
{
  if (c->in[0]->dtype != ENG_bool)
    return error_set(ENG_ERR_DTYPE,
                     "where: expected a bool condition, got %s; hint: compare first, as in x:gt(0)",
                     tensor_text(c->in[0]));
  ENG_TRY(broadcast(c, s, 1, 2));
  tensor value = {.ndim = s->out[0].ndim};
  memcpy(value.shape, s->out[0].shape, sizeof value.shape);
  if (!shape_broadcast(&s->out[0].ndim, s->out[0].shape, c->in[0], &value))
    return error_set(ENG_ERR_SHAPE, "where: the condition %s does not broadcast with %s",
                     tensor_text(c->in[0]), tensor_shape_text(value.ndim, value.shape));
  return ENG_OK;
}

static eng_status infer_shape_list(op_call *c, int *ndim, int64_t *shape)
{
  if (c->reshape.ndim < 0 || c->reshape.ndim > ENG_MAX_DIMS)
    return error_set(ENG_ERR_VALUE, "%s: expected 0 to %d dimensions, got %lld", name_of(c),
                     ENG_MAX_DIMS, (long long)c->reshape.ndim);
  *ndim = (int)c->reshape.ndim;
  for (int d = 0; d < *ndim; d++) shape[d] = c->reshape.shape[d];
  return ENG_OK;
}

static eng_status infer_reshape(op_call *c, op_shape *s)
{
  int ndim, hole = -1;
  // bound: the product without empty dimensions
  int64_t shape[ENG_MAX_DIMS], known = 1, bound = 1;
  ENG_TRY(infer_shape_list(c, &ndim, shape));
  for (int d = 0; d < ndim; d++) {
    if (shape[d] == -1 && hole < 0) hole = d;
    else if (shape[d] < 0 || __builtin_mul_overflow(bound, shape[d] ? shape[d] : 1, &bound) ||
             __builtin_mul_overflow(known, shape[d], &known))
      return error_set(ENG_ERR_VALUE, "view: expected sizes >= 0, one of which may be -1, got %s",
                       tensor_shape_text(ndim, shape));
  }
  int64_t count = c->in[0]->count;
  if (hole >= 0 && known > 0 && count % known == 0) shape[hole] = count / known;
  else if (hole >= 0 || known != count)
    return error_set(ENG_ERR_SHAPE, "view: %s has %lld elements and cannot become %s",
                     tensor_text(c->in[0]), (long long)count, tensor_shape_text(ndim, shape));
  put(s, 0, c->in[0]->dtype, ndim, shape);
  return ENG_OK;
}

static eng_status infer_permute(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  unsigned seen = 0;
  int64_t shape[ENG_MAX_DIMS];
  for (int d = 0; d < x->ndim; d++) {
    ENG_TRY(fix_dim(c, &c->permute.order[d], x));
    seen |= 1u << c->permute.order[d];
    shape[d] = x->shape[c->permute.order[d]];
  }
  if (seen != (1u << x->ndim) - 1)
    return error_set(ENG_ERR_VALUE, "permute: expected each dimension of %s exactly once",
                     tensor_text(x));
  put(s, 0, x->dtype, x->ndim, shape);
  return ENG_OK;
}

static eng_status infer_expand(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  int ndim;
  int64_t shape[ENG_MAX_DIMS];
  ENG_TRY(infer_shape_list(c, &ndim, shape));
  bool fits = ndim >= x->ndim;
  for (int d = 1; fits && d <= ndim; d++) {
    int64_t have = d <= x->ndim ? x->shape[x->ndim - d] : 1;
    if (shape[ndim - d] == -1) shape[ndim - d] = have;
    fits = shape[ndim - d] >= 0 && (have == shape[ndim - d] || have == 1);
  }
  if (!fits)
    return error_set(ENG_ERR_SHAPE, "expand: %s does not broadcast to %s", tensor_text(x),
                     tensor_shape_text(ndim, shape));
  put(s, 0, x->dtype, ndim, shape);
  return ENG_OK;
}

static eng_status infer_slice(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  ENG_TRY(fix_dim(c, &c->slice.dim, x));
  int64_t n = x->shape[c->slice.dim], start = c->slice.start, stop = c->slice.stop,
          step = c->slice.step;
  if (step < 1)
    return error_set(ENG_ERR_VALUE, "slice: expected a step of at least 1, got %lld",
                     (long long)step);
  if (step > n) c->slice.step = step = n > 0 ? n : 1;   // same result as any longer step
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

static eng_status infer_split(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  ENG_TRY(fix_dim(c, &c->split.dim, x));
  int64_t sum = 0;
  if (c->n_out < 1 || c->n_out > ENG_OP_OUTPUTS)
    return error_set(ENG_ERR_VALUE, "split: expected 1 to %d parts, got %d", ENG_OP_OUTPUTS,
                     c->n_out);
  for (int k = 0; k < c->n_out; k++) {
    int64_t size = c->split.sizes[k];
    if (size < 0 || size > x->shape[c->split.dim])
      return error_set(ENG_ERR_VALUE,
                       "split: a part of dimension %lld of %s cannot have %lld elements",
                       (long long)c->split.dim + 1, tensor_text(x), (long long)size);
    sum += size;
    put_like(s, k, x->dtype, x);
    s->out[k].shape[c->split.dim] = c->split.sizes[k];
  }
  if (sum != x->shape[c->split.dim])
    return error_set(ENG_ERR_SHAPE, "split: the parts sum to %lld, dimension %lld of %s has %lld",
                     (long long)sum, (long long)c->split.dim + 1, tensor_text(x),
                     (long long)x->shape[c->split.dim]);
  return ENG_OK;
}

static eng_status infer_concat(op_call *c, op_shape *s)
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
    if (!fits)
      return error_set(ENG_ERR_SHAPE, "concat: %s and %s differ outside dimension %lld",
                       tensor_text(x), tensor_text(y), (long long)c->concat.dim + 1);
    size += y->shape[c->concat.dim];
    dtype = dtype_promote(dtype, y->dtype);
  }
  put_like(s, 0, dtype, x);
  s->out[0].shape[c->concat.dim] = size;
  return ENG_OK;
}

static eng_status infer_pick(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0], *index = c->in[1];
  ENG_TRY(want_index(c, 1, "index"));
  ENG_TRY(want_ndim(c, 0, 1));
  ENG_TRY(fix_dim(c, &c->gather.dim, x));
  if (c->op == ENG_OP_index_select) {
    if (index->ndim != 1)
      return error_set(ENG_ERR_SHAPE, "index_select: expected an index of one dimension, got %s",
                       tensor_text(index));
    put_like(s, 0, x->dtype, x);
    s->out[0].shape[c->gather.dim] = index->shape[0];
    return ENG_OK;
  }
  bool fits = index->ndim == x->ndim;
  for (int d = 0; fits && d < x->ndim; d++)
    fits = d == c->gather.dim || index->shape[d] <= x->shape[d];
  if (!fits)
    return error_set(ENG_ERR_SHAPE,
                     "gather: the index %s must have the dimensions of %s and no larger sizes "
                     "outside dimension %lld",
                     tensor_text(index), tensor_text(x), (long long)c->gather.dim + 1);
  put_like(s, 0, x->dtype, index);
  return ENG_OK;
}

static eng_status infer_reduce(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  uint64_t mask = (uint64_t)c->sum.mask;
  if (mask >> x->ndim)
    return error_set(ENG_ERR_VALUE, "%s: the mask names a dimension that %s lacks", name_of(c),
                     tensor_text(x));
  int ndim = 0;
  int64_t shape[ENG_MAX_DIMS], n = 1;
  for (int d = 0; d < x->ndim; d++) {
    bool gone = mask >> d & 1;
    if (gone) n *= x->shape[d];
    if (!gone || c->sum.keep) shape[ndim++] = gone ? 1 : x->shape[d];
  }
  int dtype = x->dtype;
  if (c->op == ENG_OP_sum) dtype = dtype_is_float(dtype) ? wide_of(dtype) : ENG_i64;
  if (c->op == ENG_OP_mean) dtype = dtype_is_float(dtype) ? wide_of(dtype) : ENG_f32;
  if ((c->op == ENG_OP_max || c->op == ENG_OP_min) && n == 0)
    return error_set(ENG_ERR_VALUE, "%s: expected at least one element, got %s",
                     name_of(c), tensor_text(x));
  put(s, 0, dtype, ndim, shape);
  return ENG_OK;
}

static eng_status infer_arg(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  ENG_TRY(want_ndim(c, 0, 1));
  ENG_TRY(fix_dim(c, &c->argmax.dim, x));
  if (x->shape[c->argmax.dim] == 0)
    return error_set(ENG_ERR_VALUE, "%s: expected a dimension with elements, got %s", name_of(c),
                     tensor_text(x));
  int ndim = 0;
  int64_t shape[ENG_MAX_DIMS];
  for (int d = 0; d < x->ndim; d++)
    if (d != c->argmax.dim || c->argmax.keep) shape[ndim++] = d == c->argmax.dim ? 1 : x->shape[d];
  put(s, 0, ENG_i64, ndim, shape);
  return ENG_OK;
}

static eng_status infer_matmul(op_call *c, op_shape *s)
{
  const tensor *a = c->in[0], *b = c->in[1];
  ENG_TRY(want_float(c, 0));
  ENG_TRY(want_float(c, 1));
  if (a->ndim < 2 || b->ndim < 2)
    return error_set(ENG_ERR_SHAPE,
                     "matmul: expected at least 2 dimensions on both sides, got %s and %s",
                     tensor_text(a), tensor_text(b));
  int64_t m = a->shape[a->ndim - (c->matmul.transpose_a ? 1 : 2)],
          ka = a->shape[a->ndim - (c->matmul.transpose_a ? 2 : 1)];
  int64_t n = b->shape[b->ndim - (c->matmul.transpose_b ? 2 : 1)],
          kb = b->shape[b->ndim - (c->matmul.transpose_b ? 1 : 2)];
  if (ka != kb)
    return error_set(ENG_ERR_SHAPE,
                     "matmul: expected [.. x M x K] times [.. x K x N], got %s%s and %s%s",
                     tensor_text(a), c->matmul.transpose_a ? " (transposed)" : "", tensor_text(b),
                     c->matmul.transpose_b ? " (transposed)" : "");
  tensor outer_a = *a, outer_b = *b;
  outer_a.ndim -= 2;
  outer_b.ndim -= 2;
  int ndim;
  int64_t shape[ENG_MAX_DIMS];
  if (!shape_broadcast(&ndim, shape, &outer_a, &outer_b))
    return error_set(ENG_ERR_SHAPE, "matmul: the batch dimensions of %s and %s do not broadcast",
                     tensor_text(a), tensor_text(b));
  shape[ndim++] = m;
  shape[ndim++] = n;
  if (c->matmul.yields)
    ENG_TRY(want_float_attribute(c, c->matmul.yields < 0 ? -1 : c->matmul.yields - 1));
  put(s, 0, c->matmul.yields ? (int)c->matmul.yields - 1 : dtype_promote(a->dtype, b->dtype), ndim,
      shape);
  return ENG_OK;
}

static eng_status infer_linear(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0], *w = c->in[1];
  ENG_TRY(want_float(c, 0));
  ENG_TRY(want_float(c, 1));
  ENG_TRY(want_ndim(c, 0, 1));
  if (w->ndim != 2 || w->shape[1] != x->shape[x->ndim - 1])
    return error_set(ENG_ERR_SHAPE,
                     "linear: expected x [.. x K] and a weight [N x K], got %s and %s",
                     tensor_text(x), tensor_text(w));
  ENG_TRY(want_vector(c, 2, "a bias", w->shape[0]));
  int dtype = dtype_promote(x->dtype, w->dtype);
  if (c->in[2]) dtype = dtype_promote(dtype, c->in[2]->dtype);
  put_like(s, 0, dtype, x);
  s->out[0].shape[x->ndim - 1] = w->shape[0];
  return ENG_OK;
}

static eng_status infer_mlp_gelu(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0], *up = c->in[1], *down = c->in[3];
  for (int k = 0; k < 4; k += k == 1 ? 2 : 1) ENG_TRY(want_float(c, k));
  ENG_TRY(want_ndim(c, 0, 1));
  if (up->ndim != 2 || down->ndim != 2 || up->shape[1] != x->shape[x->ndim - 1] ||
      down->shape[1] != up->shape[0])
    return error_set(
      ENG_ERR_SHAPE,
      "mlp_gelu: expected x [.. x C] and weights [H x C] and [N x H], got %s, %s and %s",
      tensor_text(x), tensor_text(up), tensor_text(down));
  ENG_TRY(want_vector(c, 2, "a first bias", up->shape[0]));
  ENG_TRY(want_vector(c, 4, "a second bias", down->shape[0]));
  int dtype = x->dtype;
  for (int k = 1; k < 5; k++)
    if (c->in[k]) dtype = dtype_promote(dtype, c->in[k]->dtype);
  for (int k = 0; k < 3; k++) {
    put_like(s, k, dtype, x);
    s->out[k].shape[x->ndim - 1] = k == 0 ? down->shape[0] : up->shape[0];
  }
  return ENG_OK;
}

static eng_status infer_matmul_gelu_grad(op_call *c, op_shape *s)
{
  const tensor *dy = c->in[0], *w = c->in[1], *u = c->in[2];
  for (int k = 0; k < 3; k++) ENG_TRY(want_float(c, k));
  ENG_TRY(want_ndim(c, 0, 1));
  int last = dy->ndim - 1;
  if (w->ndim != 2 || w->shape[0] != dy->shape[last] || u->ndim != dy->ndim ||
      w->shape[1] != u->shape[last] ||
      memcmp(u->shape, dy->shape, (size_t)last * sizeof *u->shape) != 0)
    return error_set(
      ENG_ERR_SHAPE,
      "matmul_gelu_grad: expected dy [.. x N], a weight [N x H] and u [.. x H], got %s, %s and %s",
      tensor_text(dy), tensor_text(w), tensor_text(u));
  put_like(s, 0, u->dtype, u);
  return ENG_OK;
}

static eng_status infer_linear_grad(op_call *c, op_shape *s)
{
  const tensor *dy = c->in[0], *x = c->in[1];
  for (int k = 0; k < 2; k++) {
    ENG_TRY(want_float(c, k));
    ENG_TRY(want_ndim(c, k, 1));
    ENG_TRY(want_float_attribute(c, c->linear_grad.dtype[k]));
  }
  int last = dy->ndim - 1;
  if (x->ndim != dy->ndim || memcmp(x->shape, dy->shape, (size_t)last * sizeof *x->shape) != 0)
    return error_set(ENG_ERR_SHAPE,
                     "linear_grad: expected dy [.. x N] and x [.. x K], got %s and %s",
                     tensor_text(dy), tensor_text(x));
  int64_t shape[2] = {dy->shape[last], x->shape[last]};
  put(s, 0, (int)c->linear_grad.dtype[0], 2, shape);
  put(s, 1, (int)c->linear_grad.dtype[1], 1, shape);
  return ENG_OK;
}

/// x, branch? and vectors -> y, the sum?, statistics; `adds`: with branch and sum
static eng_status norm(op_call *c, op_shape *s, bool layer, bool adds)
{
  const tensor *x = c->in[0];
  const int next = adds ? 2 : 1;
  ENG_TRY(want_float(c, 0));
  if (adds) {
    ENG_TRY(want_float(c, 1));
    ENG_TRY(want_same(c, 0, 1));
  }
  ENG_TRY(want_ndim(c, 0, 1));
  int64_t n = x->shape[x->ndim - 1];
  ENG_TRY(want_vector(c, next, "a weight", n));
  if (layer) ENG_TRY(want_vector(c, next + 1, "a bias", n));
  if (!(c->layer_norm.eps >= 0))
    return error_set(ENG_ERR_VALUE, "%s: expected eps >= 0, got %g", name_of(c), c->layer_norm.eps);
  int dtype = adds ? dtype_promote(x->dtype, c->in[1]->dtype) : x->dtype,
      statistics = dtype == ENG_f64 ? ENG_f64 : ENG_f32;
  put_like(s, 0, dtype, x);
  if (adds) put_like(s, 1, dtype, x);
  put_outer(s, next, statistics, x, 1);
  if (layer) put_outer(s, next + 1, statistics, x, 1);
  return ENG_OK;
}

static eng_status norm_grad(op_call *c, op_shape *s, bool layer)
{
  const tensor *x = c->in[0];
  const int dy = layer ? 4 : 3;   // dsum may follow
  ENG_TRY(want_ndim(c, 0, 1));
  int64_t n[1] = {x->shape[x->ndim - 1]};
  ENG_TRY(want_vector(c, 1, "a weight", n[0]));
  for (int k = 2; k < dy; k++)
    ENG_TRY(want_shape(c, k, x->ndim - 1, x->shape, "x without its last dimension"));
  for (int k = dy; k < c->n_in; k++) ENG_TRY(want_shape(c, k, x->ndim, x->shape, "x"));
  for (int k = 0; k < c->n_in; k++)
    if (c->in[k]) ENG_TRY(want_float(c, k));
  ENG_TRY(want_float_attribute(c, c->layer_norm_grad.dtype));
  put_like(s, 0, x->dtype, x);
  put(s, 1, (int)c->layer_norm_grad.dtype, 1, n);
  if (layer) put(s, 2, (int)c->layer_norm_grad.dtype, 1, n);
  return ENG_OK;
}

static eng_status infer_layer_norm(op_call *c, op_shape *s)      { return norm(c, s, true, false); }
static eng_status infer_rms_norm(op_call *c, op_shape *s)
{ return norm(c, s, false, false); }
static eng_status infer_add_layer_norm(op_call *c, op_shape *s)  { return norm(c, s, true, true); }
static eng_status infer_add_rms_norm(op_call *c, op_shape *s)    { return norm(c, s, false, true); }
static eng_status infer_layer_norm_grad(op_call *c, op_shape *s) { return norm_grad(c, s, true); }
static eng_status infer_rms_norm_grad(op_call *c, op_shape *s)   { return norm_grad(c, s, false); }

static eng_status want_attention(const op_call *c)
{
  const tensor *q = c->in[0], *k = c->in[1], *v = c->in[2];
  for (int i = 0; i < 3; i++) ENG_TRY(want_float(c, i));
  bool fits = q->ndim == 4 && k->ndim == 4 && v->ndim == 4 && tensor_same_shape(k, v) &&
              q->shape[0] == k->shape[0] && q->shape[3] == k->shape[3] && k->shape[2] > 0 &&
              q->shape[2] % k->shape[2] == 0;
  if (!fits)
    return error_set(ENG_ERR_SHAPE,
                     "%s: expected q [B x T x H x D] and k, v [B x S x G x D] with H a multiple of "
                     "G, got %s, %s and %s",
                     name_of(c), tensor_text(q), tensor_text(k), tensor_text(v));
  return ENG_OK;
}

static eng_status infer_attention(op_call *c, op_shape *s)
{
  const tensor *q = c->in[0];
  ENG_TRY(want_attention(c));
  int statistics = q->dtype == ENG_f64 ? ENG_f64 : ENG_f32;
  int64_t rows[3] = {q->shape[0], q->shape[2], q->shape[1]};
  put_like(s, 0, q->dtype, q);
  put(s, 1, statistics, 3, rows);
  put(s, 2, statistics, 3, rows);
  return ENG_OK;
}

static eng_status infer_attention_grad(op_call *c, op_shape *s)
{
  const tensor *q = c->in[0];
  ENG_TRY(want_attention(c));
  for (int k = 3; k < 6; k++) ENG_TRY(want_float(c, k));
  int64_t rows[3] = {q->shape[0], q->shape[2], q->shape[1]};
  ENG_TRY(want_shape(c, 3, 4, q->shape, "q"));
  ENG_TRY(want_shape(c, 4, 3, rows, "the rows of q"));
  ENG_TRY(want_shape(c, 5, 4, q->shape, "q"));
  if (c->in[4]->dtype != (q->dtype == ENG_f64 ? ENG_f64 : ENG_f32) || !tensor_contiguous(c->in[4]))
    return error_set(ENG_ERR_DTYPE,
                     "attention_grad: expected the lse that attention returned, got %s",
                     tensor_text(c->in[4]));
  for (int k = 0; k < 3; k++) put_like(s, k, c->in[k]->dtype, c->in[k]);
  return ENG_OK;
}

static eng_status infer_rope(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  ENG_TRY(want_float(c, 0));
  if (x->ndim != 4 || x->shape[3] % 2)
    return error_set(ENG_ERR_SHAPE, "rope: expected [B x T x H x D] with an even D, got %s",
                     tensor_text(x));
  if (!(c->rope.base > 0))
    return error_set(ENG_ERR_VALUE, "rope: expected a base > 0, got %g", c->rope.base);
  // positions are counted in double
  if (c->rope.position > 1ll << 52 || c->rope.position < -(1ll << 52))
    return error_set(ENG_ERR_VALUE, "rope: expected a position within +-2^52, got %lld",
                     (long long)c->rope.position);
  put_like(s, 0, x->dtype, x);
  return ENG_OK;
}

static eng_status want_classes(const op_call *c)
{
  const tensor *x = c->in[0], *t = c->in[1];
  ENG_TRY(want_float(c, 0));
  ENG_TRY(want_index(c, 1, "targets"));
  ENG_TRY(want_ndim(c, 0, 1));
  tensor rows = *x;
  rows.ndim--;
  if (!tensor_same_shape(&rows, t) || x->shape[x->ndim - 1] < 1)
    return error_set(
      ENG_ERR_SHAPE, "%s: expected logits [.. x V] and targets of shape %s, got %s and %s",
      name_of(c), tensor_shape_text(rows.ndim, rows.shape), tensor_text(x), tensor_text(t));
  if (!(c->cross_entropy.smoothing >= 0 && c->cross_entropy.smoothing < 1))
    return error_set(ENG_ERR_VALUE, "%s: expected label smoothing in [0, 1), got %g", name_of(c),
                     c->cross_entropy.smoothing);
  if (c->cross_entropy.reduction < 0 || c->cross_entropy.reduction > 2)
    return error_set(ENG_ERR_VALUE,
                     "%s: expected the reduction 0 (none), 1 (mean) or 2 (sum), got %lld",
                     name_of(c), (long long)c->cross_entropy.reduction);
  return ENG_OK;
}

static eng_status infer_cross_entropy(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  ENG_TRY(want_classes(c));
  int dtype = wide_of(x->dtype);
  if (c->cross_entropy.reduction) put(s, 0, dtype, 0, NULL);
  else put_outer(s, 0, dtype, x, 1);
  put_outer(s, 1, dtype, x, 1);
  return ENG_OK;
}

static eng_status infer_cross_entropy_grad(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0], *dloss = c->in[3];
  ENG_TRY(want_classes(c));
  ENG_TRY(want_float(c, 2));
  ENG_TRY(want_float(c, 3));
  ENG_TRY(want_shape(c, 2, x->ndim - 1, x->shape, "the rows of the logits"));
  if (!c->cross_entropy_grad.reduction)
    ENG_TRY(want_shape(c, 3, x->ndim - 1, x->shape, "the rows of the logits"));
  else if (dloss->count != 1)
    return error_set(ENG_ERR_SHAPE, "cross_entropy_grad: expected the gradient of one loss, got %s",
                     tensor_text(dloss));
  put_like(s, 0, x->dtype, x);
  return ENG_OK;
}

// ---- gradients whose shape rules differ from the forward operation's

/// gather_grad, index_select_grad: dy and index -> dx, of the shape in the attributes
static eng_status infer_pick_grad(op_call *c, op_shape *s)
{
  const tensor *dy = c->in[0], *index = c->in[1];
  ENG_TRY(want_float(c, 0));
  ENG_TRY(want_index(c, 1, "index"));
  if (c->gather_grad.ndim < 1 || c->gather_grad.ndim > ENG_MAX_DIMS)
    return error_set(ENG_ERR_VALUE, "%s: expected 1 to %d dimensions, got %lld", name_of(c),
                     ENG_MAX_DIMS, (long long)c->gather_grad.ndim);
  tensor dx = {.dtype = dy->dtype, .ndim = (int)c->gather_grad.ndim};
  memcpy(dx.shape, &c->gather_grad.shape[0], sizeof dx.shape);
  ENG_TRY(fix_dim(c, &c->gather_grad.dim, &dx));
  bool selects = c->op == ENG_OP_index_select_grad,
       fits = dy->ndim == dx.ndim && (selects ? index->ndim == 1 : tensor_same_shape(dy, index));
  for (int d = 0; fits && d < dx.ndim; d++) {
    if (selects) fits = dy->shape[d] == (d == c->gather_grad.dim ? index->shape[0] : dx.shape[d]);
    else fits = d == c->gather_grad.dim || dy->shape[d] <= dx.shape[d];
  }
  if (!fits)
    return error_set(ENG_ERR_SHAPE,
                     "%s: %s and the index %s do not fit %s along dimension %lld", name_of(c),
                     tensor_text(dy), tensor_text(index), tensor_shape_text(dx.ndim, dx.shape),
                     (long long)c->gather_grad.dim);
  put_like(s, 0, dy->dtype, &dx);
  return ENG_OK;
}

static eng_status infer_embedding_grad(op_call *c, op_shape *s)
{
  const tensor *dy = c->in[0], *ids = c->in[1];
  ENG_TRY(want_float(c, 0));
  ENG_TRY(want_index(c, 1, "ids"));
  if (dy->ndim != ids->ndim + 1 ||
      memcmp(dy->shape, ids->shape, (size_t)ids->ndim * sizeof *ids->shape) != 0)
    return error_set(ENG_ERR_SHAPE,
                     "embedding_grad: expected dy [.. x C] and ids [..], got %s and %s",
                     tensor_text(dy), tensor_text(ids));
  ENG_TRY(want_float_attribute(c, c->embedding_grad.dtype));
  put(s, 0, (int)c->embedding_grad.dtype, 2,
      (int64_t[]){c->embedding_grad.rows, dy->shape[dy->ndim - 1]});
  return ENG_OK;
}

static eng_status infer_extreme_grad(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  op_call forward = *c;
  op_shape reduced;
  forward.op = ENG_OP_max;
  forward.sum.keep = c->in[1]->ndim == x->ndim;
  ENG_TRY(infer_reduce(&forward, &reduced));
  for (int k = 0; k < 3; k++) ENG_TRY(want_float(c, k));
  for (int k = 1; k < 3; k++)
    ENG_TRY(want_shape(c, k, reduced.out[0].ndim, reduced.out[0].shape, "the reduced x"));
  put_like(s, 0, x->dtype, x);
  return ENG_OK;
}

/// Two tensors of one shape -> an output of this dtype
static eng_status pair_grad(op_call *c, op_shape *s, int64_t dtype)
{
  ENG_TRY(want_float(c, 0));
  ENG_TRY(want_float(c, 1));
  ENG_TRY(want_same(c, 0, 1));
  ENG_TRY(want_float_attribute(c, dtype));
  put_like(s, 0, (int)dtype, c->in[0]);
  return ENG_OK;
}

static eng_status infer_swiglu_grad(op_call *c, op_shape *s)
{
  for (int k = 0; k < 3; k++) ENG_TRY(want_float(c, k));
  ENG_TRY(want_same(c, 0, 1));
  ENG_TRY(want_same(c, 0, 2));
  for (int k = 0; k < 2; k++) put_like(s, k, c->in[k]->dtype, c->in[k]);
  return ENG_OK;
}

static eng_status infer_unary_grad(op_call *c, op_shape *s)
{
  if (!op_is_unary((int)c->unary_grad.of))
    return error_set(ENG_ERR_VALUE,
                     "unary_grad: expected the number of an operation of one input, got %lld",
                     (long long)c->unary_grad.of);
  return pair_grad(c, s, c->unary_grad.dtype);
}

static eng_status infer_softmax_grad(op_call *c, op_shape *s)
{
  ENG_TRY(want_ndim(c, 0, 1));
  return pair_grad(c, s, c->softmax_grad.dtype);
}

// ---- other operations

static eng_status infer_like(op_call *c, op_shape *s)
{
  put_like(s, 0, c->in[0]->dtype, c->in[0]);
  return ENG_OK;
}

static eng_status infer_floats(op_call *c, op_shape *s)
{
  ENG_TRY(want_float(c, 0));
  return infer_like(c, s);
}

static eng_status infer_numbers(op_call *c, op_shape *s)
{
  if (c->in[0]->dtype == ENG_bool)
    return error_set(ENG_ERR_DTYPE, "%s: expected numbers, got %s; hint: x:to(\"f32\")", name_of(c),
                     tensor_text(c->in[0]));
  return infer_like(c, s);
}

static eng_status infer_clamp(op_call *c, op_shape *s)
{
  bool no_low = f64_is_nan(c->clamp.low);
  if (no_low || f64_is_nan(c->clamp.high))
    return error_set(ENG_ERR_VALUE, "clamp: expected the %s limit to be a number, got nan",
                     no_low ? "lower" : "upper");
  return infer_numbers(c, s);
}

static eng_status infer_rows(op_call *c, op_shape *s)
{
  ENG_TRY(want_float(c, 0));
  ENG_TRY(want_ndim(c, 0, 1));
  return infer_like(c, s);
}

static eng_status infer_logsumexp(op_call *c, op_shape *s)
{
  ENG_TRY(infer_rows(c, s));
  s->out[0].ndim--;
  return ENG_OK;
}

static eng_status infer_dropout(op_call *c, op_shape *s)
{
  double p = c->dropout.p;
  ENG_TRY(want_float(c, 0));
  if (!(p >= 0 && p <= 1))
    return error_set(ENG_ERR_VALUE, "dropout: expected a probability in [0, 1], got %g", p);
  return infer_like(c, s);
}

static eng_status infer_swiglu(op_call *c, op_shape *s)
{
  ENG_TRY(want_float(c, 0));
  ENG_TRY(want_float(c, 1));
  ENG_TRY(want_same(c, 0, 1));
  put_like(s, 0, dtype_promote(c->in[0]->dtype, c->in[1]->dtype), c->in[0]);
  return ENG_OK;
}

static eng_status infer_cast(op_call *c, op_shape *s)
{
  int64_t dtype = c->cast.dtype, mode = c->cast.mode;
  if (dtype < 0 || dtype >= ENG_DTYPE_COUNT)
    return error_set(ENG_ERR_DTYPE, "cast: unknown dtype number %lld", (long long)dtype);
  if (dtype_is_fp8((int)dtype) && (mode < 0 || mode > 3))
    return error_set(ENG_ERR_VALUE, "cast: expected a rounding mode of 0 to 3, got %lld",
                     (long long)mode);
  put_like(s, 0, (int)dtype, c->in[0]);
  return ENG_OK;
}

static eng_status infer_embedding(op_call *c, op_shape *s)
{
  const tensor *w = c->in[0], *ids = c->in[1];
  ENG_TRY(want_index(c, 1, "ids"));
  if (w->ndim != 2)
    return error_set(ENG_ERR_SHAPE, "embedding: expected a weight [V x C], got %s", tensor_text(w));
  if (ids->ndim + 1 > ENG_MAX_DIMS)
    return error_set(ENG_ERR_SHAPE, "embedding: %s has too many dimensions", tensor_text(ids));
  put_like(s, 0, w->dtype, ids);
  s->out[0].shape[s->out[0].ndim++] = w->shape[1];
  return ENG_OK;
}

static eng_status infer_topk(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  int64_t k = c->topk.k;
  ENG_TRY(want_ndim(c, 0, 1));
  int64_t n = x->shape[x->ndim - 1];
  if (k < 0 || k > n)
    return error_set(ENG_ERR_VALUE, "topk: expected k in 0..%lld, got %lld", (long long)n,
                     (long long)k);
  put_like(s, 0, x->dtype, x);
  s->out[0].shape[x->ndim - 1] = k;
  put(s, 1, ENG_i64, x->ndim, s->out[0].shape);
  return ENG_OK;
}

static eng_status infer_bias_grad(op_call *c, op_shape *s)
{
  const tensor *dy = c->in[0];
  ENG_TRY(want_float(c, 0));
  ENG_TRY(want_ndim(c, 0, 1));
  ENG_TRY(want_float_attribute(c, c->bias_grad.dtype));
  put(s, 0, (int)c->bias_grad.dtype, 1, &dy->shape[dy->ndim - 1]);
  return ENG_OK;
}

static eng_status infer_mse(op_call *c, op_shape *s)
{
  ENG_TRY(want_float(c, 0));
  ENG_TRY(want_float(c, 1));
  ENG_TRY(want_same(c, 0, 1));
  put(s, 0, wide_of(dtype_promote(c->in[0]->dtype, c->in[1]->dtype)), 0, NULL);
  return ENG_OK;
}

// ---- the table

#define infer_registered NULL
static op_infer_rule *rules[ENG_OP_COUNT] = {
#define ENG_OP(name, inputs, outputs, layout, cast, shape, ...) [ENG_OP_##name] = infer_##shape,
#include "ops.def"
};

void op_infer_register(int op, op_infer_rule *rule) { rules[op] = rule; }

/// Accepts FP8 tensors only in operations that move, convert or multiply them.
static eng_status check_codes(const op_call *c)
{
  for (int k = 0; k < c->n_in; k++) {
    if (!c->in[k] || !dtype_is_fp8(c->in[k]->dtype)) continue;
    if (!op_table[c->op].takes_codes)
      return error_set(ENG_ERR_DTYPE,
                       "%s: FP8 tensors have no arithmetic, got %s; hint: x:to(\"f32\"), or "
                       "its quantizer's dequantize",
                       name_of(c), tensor_text(c->in[k]));
    for (int j = 0; c->op == ENG_OP_concat && j < c->n_in; j++)
      if (c->in[j]->dtype != c->in[k]->dtype)
        return error_set(ENG_ERR_DTYPE,
                         "concat: FP8 tensors join only with tensors of the same dtype, got "
                         "%s and %s; hint: x:to(\"f32\")",
                         tensor_text(c->in[k]), tensor_text(c->in[j]));
  }
  return ENG_OK;
}

eng_status op_infer(op_call *c, op_shape *s)
{
  ENG_TRY(check_codes(c));
  return rules[c->op](c, s);
}
