// Type promotion, broadcasting, and the checks of inputs that shape rules share. See infer.h, op.h.
// Called by infer*.c, fp8/infer.c, op.c, profile.c and tensor_calls.c.
#include "base/error.h"
#include "base/numerics.h"
#include "infer.h"

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

const char *op_name(const op_call *c) { return op_table[c->op].about.name; }

void put_out(op_shape *s, int k, int dtype, int ndim, const int64_t *shape)
{
  s->out[k].dtype = dtype;
  s->out[k].ndim = ndim;
  if (ndim > 0) memcpy(s->out[k].shape, shape, (size_t)ndim * sizeof *shape);
}

void put_like(op_shape *s, int k, int dtype, const tensor *x)
{ put_out(s, k, dtype, x->ndim, x->shape); }

void put_outer(op_shape *s, int k, int dtype, const tensor *x)
{ put_out(s, k, dtype, x->ndim - 1, x->shape); }

eng_status want_float(const op_call *c, int k)
{
  if (dtype_is_float(c->in[k]->dtype)) return ENG_OK;
  return error_set(ENG_ERR_DTYPE,
                   "%s: expected a floating-point tensor, got %s; hint: x:to(\"f32\")", op_name(c),
                   tensor_text(c->in[k]));
}

eng_status want_floats(const op_call *c, int n)
{
  for (int k = 0; k < n; k++) ENG_TRY(want_float(c, k));
  return ENG_OK;
}

eng_status want_index(const op_call *c, int k, const char *what)
{
  int d = c->in[k]->dtype;
  if (!dtype_is_float(d) && !dtype_is_fp8(d) && d != ENG_bool) return ENG_OK;
  return error_set(ENG_ERR_DTYPE,
                   "%s: expected %s of an integer dtype, got %s; hint: %s:to(\"i64\")", op_name(c),
                   what, tensor_text(c->in[k]), what);
}

eng_status want_same(const op_call *c, int j, int k)
{
  if (tensor_same_shape(c->in[j], c->in[k])) return ENG_OK;
  return error_set(ENG_ERR_SHAPE, "%s: expected two tensors of the same shape, got %s and %s",
                   op_name(c), tensor_text(c->in[j]), tensor_text(c->in[k]));
}

eng_status want_float_attribute(const op_call *c, int64_t dtype)
{
  if (dtype >= 0 && dtype < ENG_DTYPE_COUNT && dtype_is_float((int)dtype)) return ENG_OK;
  return error_set(ENG_ERR_DTYPE,
                   "%s: expected the number of a floating-point dtype, got %lld (%s)", op_name(c),
                   (long long)dtype,
                   dtype >= 0 && dtype < ENG_DTYPE_COUNT ? eng_dtype_name((int)dtype) : "no dtype");
}

eng_status want_shape(const op_call *c, int k, int ndim, const int64_t *shape,
                      const char *what)
{
  const tensor *x = c->in[k];
  if (x->ndim == ndim && memcmp(x->shape, shape, (size_t)ndim * sizeof *shape) == 0) return ENG_OK;
  return error_set(ENG_ERR_SHAPE, "%s: expected input %d to have the shape of %s (%s), got %s",
                   op_name(c), k + 1, what, tensor_shape_text(ndim, shape), tensor_text(x));
}

eng_status want_ndim(const op_call *c, int k, int least)
{
  if (c->in[k]->ndim >= least) return ENG_OK;
  return error_set(ENG_ERR_SHAPE, "%s: expected at least %d dimension%s, got %s", op_name(c), least,
                   least == 1 ? "" : "s", tensor_text(c->in[k]));
}

eng_status want_vector(const op_call *c, int k, const char *what, int64_t n)
{
  const tensor *v = c->in[k];
  if (!v) return ENG_OK;
  ENG_TRY(want_float(c, k));
  if (v->ndim == 1 && v->shape[0] == n) return ENG_OK;
  return error_set(ENG_ERR_SHAPE, "%s: expected %s of shape [%lld], got %s", op_name(c), what,
                   (long long)n, tensor_text(v));
}

eng_status fix_dim(const op_call *c, int64_t *dim, const tensor *x)
{
  int64_t d = *dim < 0 ? *dim + x->ndim : *dim;
  FAIL_IF(d < 0 || d >= x->ndim, ENG_ERR_VALUE, "%s: dimension %lld does not exist in %s",
          op_name(c), (long long)(*dim < 0 || *dim == INT64_MAX ? *dim : *dim + 1), tensor_text(x));
  *dim = d;
  return ENG_OK;
}

int wide_of(int d) { return dtype_is_low(d) ? ENG_f32 : d; }
