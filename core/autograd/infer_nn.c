// Shape rules of products, norms, attention and losses, with their gradients. See infer.h. Called
// by infer.c.
#include "base/error.h"
#include "base/numerics.h"
#include "infer.h"

#include <string.h>

eng_status infer_matmul(op_call *c, op_shape *s)
{
  const tensor *a = c->in[0], *b = c->in[1];
  ENG_TRY(want_floats(c, 2));
  FAIL_IF(a->ndim < 2 || b->ndim < 2, ENG_ERR_SHAPE, "matmul: expected two tensors of at "
          "least 2 dimensions, got %s and %s", tensor_text(a), tensor_text(b));
  int64_t m = a->shape[a->ndim - (c->matmul.transpose_a ? 1 : 2)],
          ka = a->shape[a->ndim - (c->matmul.transpose_a ? 2 : 1)];
  int64_t n = b->shape[b->ndim - (c->matmul.transpose_b ? 2 : 1)],
          kb = b->shape[b->ndim - (c->matmul.transpose_b ? 1 : 2)];
  FAIL_IF(ka != kb, ENG_ERR_SHAPE, "matmul: expected [.. x M x K] times [.. x K x N], got %s%s "
          "and %s%s", tensor_text(a), c->matmul.transpose_a ? " (transposed)" : "", tensor_text(b),
          c->matmul.transpose_b ? " (transposed)" : "");
  tensor outer_a = *a, outer_b = *b;
  outer_a.ndim -= 2;
  outer_b.ndim -= 2;
  int ndim;
  int64_t shape[ENG_MAX_DIMS];
  FAIL_IF(!shape_broadcast(&ndim, shape, &outer_a, &outer_b), ENG_ERR_SHAPE, "matmul: the batch "
          "dimensions of %s and %s do not broadcast", tensor_text(a), tensor_text(b));
  shape[ndim++] = m;
  shape[ndim++] = n;
  if (c->matmul.yields)
    ENG_TRY(want_float_attribute(c, c->matmul.yields < 0 ? -1 : c->matmul.yields - 1));
  int dtype = c->matmul.yields ? (int)c->matmul.yields - 1 : dtype_promote(a->dtype, b->dtype);
  put_out(s, 0, dtype, ndim, shape);
  return ENG_OK;
}

eng_status infer_linear(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0], *w = c->in[1];
  ENG_TRY(want_floats(c, 2));
  ENG_TRY(want_ndim(c, 0, 1));
  FAIL_IF(w->ndim != 2 || w->shape[1] != x->shape[x->ndim - 1], ENG_ERR_SHAPE, "linear: expected "
          "x [.. x K] and a weight [N x K], got %s and %s", tensor_text(x), tensor_text(w));
  ENG_TRY(want_vector(c, 2, "a bias", w->shape[0]));
  int dtype = dtype_promote(x->dtype, w->dtype);
  if (c->in[2]) dtype = dtype_promote(dtype, c->in[2]->dtype);
  put_like(s, 0, dtype, x);
  s->out[0].shape[x->ndim - 1] = w->shape[0];
  return ENG_OK;
}

eng_status infer_mlp_gelu(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0], *up = c->in[1], *down = c->in[3];
  for (int k = 0; k < 4; k += k == 1 ? 2 : 1) ENG_TRY(want_float(c, k));
  ENG_TRY(want_ndim(c, 0, 1));
  FAIL_IF(up->ndim != 2 || down->ndim != 2 || up->shape[1] != x->shape[x->ndim - 1] ||
          down->shape[1] != up->shape[0], ENG_ERR_SHAPE,
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

eng_status infer_matmul_gelu_grad(op_call *c, op_shape *s)
{
  const tensor *dy = c->in[0], *w = c->in[1], *u = c->in[2];
  ENG_TRY(want_floats(c, 3));
  ENG_TRY(want_ndim(c, 0, 1));
  int last = dy->ndim - 1;
  FAIL_IF(w->ndim != 2 || w->shape[0] != dy->shape[last] || u->ndim != dy->ndim ||
          w->shape[1] != u->shape[last] ||
          memcmp(u->shape, dy->shape, (size_t)last * sizeof *u->shape) != 0, ENG_ERR_SHAPE,
          "matmul_gelu_grad: expected dy [.. x N], a weight [N x H] and u [.. x H], got %s, %s "
          "and %s", tensor_text(dy), tensor_text(w), tensor_text(u));
  put_like(s, 0, u->dtype, u);
  return ENG_OK;
}

eng_status infer_linear_grad(op_call *c, op_shape *s)
{
  const tensor *dy = c->in[0], *x = c->in[1];
  for (int k = 0; k < 2; k++) {
    ENG_TRY(want_float(c, k));
    ENG_TRY(want_ndim(c, k, 1));
    ENG_TRY(want_float_attribute(c, c->linear_grad.dtype[k]));
  }
  int last = dy->ndim - 1;
  FAIL_IF(x->ndim != dy->ndim || memcmp(x->shape, dy->shape, (size_t)last * sizeof *x->shape) != 0,
          ENG_ERR_SHAPE, "linear_grad: expected dy [.. x N] and x [.. x K], got %s and %s",
          tensor_text(dy), tensor_text(x));
  int64_t shape[2] = {dy->shape[last], x->shape[last]};
  put_out(s, 0, (int)c->linear_grad.dtype[0], 2, shape);
  put_out(s, 1, (int)c->linear_grad.dtype[1], 1, shape);
  return ENG_OK;
}

/// The rule of all norms. Inputs: x, the branch (if `adds`), the weight, the bias (if `layer`).
/// Outputs: y, the sum (if `adds`), then one or two statistics.
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
  FAIL_IF(!(c->layer_norm.eps >= 0), ENG_ERR_VALUE,
          "%s: expected eps >= 0, got %g", op_name(c), c->layer_norm.eps);
  int dtype = adds ? dtype_promote(x->dtype, c->in[1]->dtype) : x->dtype,
      statistics = wide_of(dtype);
  put_like(s, 0, dtype, x);
  if (adds) put_like(s, 1, dtype, x);
  put_outer(s, next, statistics, x);
  if (layer) put_outer(s, next + 1, statistics, x);
  return ENG_OK;
}

static eng_status norm_grad(op_call *c, op_shape *s, bool layer)
{
  const tensor *x = c->in[0];
  const int dy = layer ? 4 : 3;   // index of the input dy; the input dsum may follow
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
  put_out(s, 1, (int)c->layer_norm_grad.dtype, 1, n);
  if (layer) put_out(s, 2, (int)c->layer_norm_grad.dtype, 1, n);
  return ENG_OK;
}

eng_status infer_layer_norm(op_call *c, op_shape *s)      { return norm(c, s, true, false); }
eng_status infer_rms_norm(op_call *c, op_shape *s)        { return norm(c, s, false, false); }
eng_status infer_add_layer_norm(op_call *c, op_shape *s)  { return norm(c, s, true, true); }
eng_status infer_add_rms_norm(op_call *c, op_shape *s)    { return norm(c, s, false, true); }
eng_status infer_layer_norm_grad(op_call *c, op_shape *s) { return norm_grad(c, s, true); }
eng_status infer_rms_norm_grad(op_call *c, op_shape *s)   { return norm_grad(c, s, false); }

static eng_status want_attention(const op_call *c)
{
  const tensor *q = c->in[0], *k = c->in[1], *v = c->in[2];
  ENG_TRY(want_floats(c, 3));
  bool fits = q->ndim == 4 && k->ndim == 4 && v->ndim == 4 && tensor_same_shape(k, v) &&
              q->shape[0] == k->shape[0] && q->shape[3] == k->shape[3] && k->shape[2] > 0 &&
              q->shape[2] % k->shape[2] == 0;
  FAIL_IF(!fits, ENG_ERR_SHAPE,
          "%s: expected q [B x T x H x D] and k, v [B x S x G x D] with H a multiple of G, got "
          "%s, %s and %s", op_name(c), tensor_text(q), tensor_text(k), tensor_text(v));
  return ENG_OK;
}

eng_status infer_attention(op_call *c, op_shape *s)
{
  const tensor *q = c->in[0];
  ENG_TRY(want_attention(c));
  FAIL_IF(c->attention.entropy < 0 || c->attention.entropy > ENG_ROW_LOGIT_MAX, ENG_ERR_VALUE,
          "%s: expected entropy to be 0 (none), 1 (entropy) or 2 (largest logit), got %lld",
          op_name(c), (long long)c->attention.entropy);
  FAIL_IF(c->attention.entropy == ENG_ROW_LOGIT_MAX && backend_current()->gradstats_start,
          ENG_ERR_DEVICE, "%s: the device %s cannot return the largest logit of each row; "
          "hint: engine.device('cpu')", op_name(c), backend_current()->name);
  int statistics = wide_of(q->dtype);
  int64_t rows[3] = {q->shape[0], q->shape[2], q->shape[1]};
  put_like(s, 0, q->dtype, q);
  put_out(s, 1, statistics, 3, rows);
  put_out(s, 2, statistics, 3, rows);
  return ENG_OK;
}

eng_status infer_attention_grad(op_call *c, op_shape *s)
{
  const tensor *q = c->in[0];
  ENG_TRY(want_attention(c));
  for (int k = 3; k < 6; k++) ENG_TRY(want_float(c, k));
  int64_t rows[3] = {q->shape[0], q->shape[2], q->shape[1]};
  ENG_TRY(want_shape(c, 3, 4, q->shape, "q"));
  ENG_TRY(want_shape(c, 4, 3, rows, "the rows of q"));
  ENG_TRY(want_shape(c, 5, 4, q->shape, "q"));
  FAIL_IF(c->in[4]->dtype != wide_of(q->dtype) || !tensor_contiguous(c->in[4]), ENG_ERR_DTYPE,
          "attention_grad: expected the contiguous lse in %s that attention returned, got %s%s",
          eng_dtype_name(wide_of(q->dtype)), tensor_text(c->in[4]),
          tensor_contiguous(c->in[4]) ? "" : ", which is not contiguous");
  for (int k = 0; k < 3; k++) put_like(s, k, c->in[k]->dtype, c->in[k]);
  return ENG_OK;
}

eng_status infer_rope(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  ENG_TRY(want_float(c, 0));
  FAIL_IF(x->ndim != 4 || x->shape[3] % 2, ENG_ERR_SHAPE,
          "rope: expected [B x T x H x D] with an even D, got %s", tensor_text(x));
  FAIL_IF(!(c->rope.base > 0), ENG_ERR_VALUE, "rope: expected a base > 0, got %g", c->rope.base);
  FAIL_IF(!(c->rope.factor >= 0), ENG_ERR_VALUE,
          "rope: expected a factor > 0, or 0 for unscaled frequencies, got %g", c->rope.factor);
  double low = c->rope.low, high = c->rope.high;
  FAIL_IF(c->rope.context != 0 && !(c->rope.context > 0 && 0 < low && low < high), ENG_ERR_VALUE,
          "rope: expected a context > 0 and 0 < low < high, got context %lld, low %g and high %g",
          (long long)c->rope.context, low, high);
  FAIL_IF(c->rope.context == 0 && high != 0 && !(0 <= low && low < high), ENG_ERR_VALUE,
          "rope: if context is 0, expected 0 <= low < high, or a high of 0 (linear scaling), got "
          "low %g and high %g", low, high);
  // positions are computed in f64
  FAIL_IF(c->rope.position > 1ll << 52 || c->rope.position < -(1ll << 52), ENG_ERR_VALUE,
          "rope: expected a position within +-2^52, got %lld", (long long)c->rope.position);
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
  FAIL_IF(!tensor_same_shape(&rows, t) || x->shape[x->ndim - 1] < 1, ENG_ERR_SHAPE,
          "%s: expected logits [.. x V] with V >= 1 and targets of shape %s, got %s and %s",
          op_name(c), tensor_shape_text(rows.ndim, rows.shape), tensor_text(x), tensor_text(t));
  FAIL_IF(!(c->cross_entropy.smoothing >= 0 && c->cross_entropy.smoothing < 1), ENG_ERR_VALUE,
          "%s: expected label smoothing in [0, 1), got %g", op_name(c), c->cross_entropy.smoothing);
  double z_loss = c->cross_entropy.z_loss, cap = c->cross_entropy.soft_cap;
  FAIL_IF(!(z_loss >= 0 && z_loss <= 1e6), ENG_ERR_VALUE,
          "%s: expected z_loss in 0..1e6, got %g", op_name(c), z_loss);
  FAIL_IF(cap != 0 && !(cap >= 1e-3 && cap <= 1e6), ENG_ERR_VALUE,
          "%s: expected soft_cap in 1e-3..1e6, or 0 for no cap, got %g", op_name(c), cap);
  FAIL_IF(c->cross_entropy.reduction < 0 || c->cross_entropy.reduction > 2, ENG_ERR_VALUE,
          "%s: expected the reduction 0 (none), 1 (mean) or 2 (sum), got %lld", op_name(c),
          (long long)c->cross_entropy.reduction);
  return ENG_OK;
}

eng_status infer_cross_entropy(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  ENG_TRY(want_classes(c));
  int dtype = wide_of(x->dtype);
  if (c->cross_entropy.reduction) put_out(s, 0, dtype, 0, NULL);
  else put_outer(s, 0, dtype, x);
  put_outer(s, 1, dtype, x);
  return ENG_OK;
}

eng_status infer_cross_entropy_grad(op_call *c, op_shape *s)
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
