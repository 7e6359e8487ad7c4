// The "reference" device: the slow, clear kernels that every fast kernel is tested against. It also
// serves f64 and integer tensors on the "cpu" device, whose kernels forward to it. Owns its table
// and the helpers of reference.h; the kernels are in reference_*.c. Registered by cpu.c.
#include "reference.h"

#include <math.h>
#include <string.h>

// ------------------------------------------------------------------ walking

walk walk_over(int ndim, const int64_t *shape)
{
  walk w = { .ndim = ndim, .count = 1 };
  for (int d = 0; d < ndim; d++) {
    w.shape[d] = shape[d];
    w.count *= shape[d];
  }
  return w;
}

void walk_add_strides(walk *w, const int64_t *stride)
{
  for (int d = 0; d < w->ndim; d++) w->stride[w->n][d] = stride[d];
  w->n++;
}

void walk_add(walk *w, const tensor *x)
{
  int64_t stride[ENG_MAX_DIMS] = {0};
  for (int d = 0; d < w->ndim; d++) {
    int own = d - (w->ndim - x->ndim);
    if (own >= 0 && x->shape[own] != 1) stride[d] = x->stride[own];
  }
  walk_add_strides(w, stride);
}

walk walk_call(const op_call *call)
{
  const tensor *y = call->out[0];
  walk w = walk_over(y->ndim, y->shape);
  for (int k = 0; k < call->n_in; k++) walk_add(&w, call->in[k]);
  walk_add(&w, y);
  return w;
}

void walk_next(walk *w)
{
  w->position++;
  for (int d = w->ndim - 1; d >= 0; d--) {
    for (int k = 0; k < w->n; k++) w->at[k] += w->stride[k][d];
    if (++w->index[d] < w->shape[d]) return;
    for (int k = 0; k < w->n; k++) w->at[k] -= w->stride[k][d] * w->shape[d];
    w->index[d] = 0;
  }
}

// ------------------------------------------------------------------ dense copies

double *values_load(double *values, const tensor *x)
{
  if (!x) return NULL;
  walk at = walk_over(x->ndim, x->shape);
  for (walk_add(&at, x); !walk_ended(&at); walk_next(&at))
    values[at.position] = load_at(x, at.at[0]);
  return values;
}

void values_store(const tensor *x, const double *values, bool add)
{
  if (!x) return;
  walk at = walk_over(x->ndim, x->shape);
  for (walk_add(&at, x); !walk_ended(&at); walk_next(&at)) {
    double value = values[at.position];
    store_at(x, at.at[0], add ? load_at(x, at.at[0]) + value : value);
  }
}

// ------------------------------------------------------------------ elements

void element_copy(const tensor *to, int64_t to_at, const tensor *from, int64_t from_at)
{
  if (to->dtype == from->dtype) {
    int64_t size = eng_dtype_size(to->dtype);
    memcpy((char *)to->data + to_at * size, (const char *)from->data + from_at * size,
           (size_t)size);
  } else if (!dtype_is_integer(from->dtype)) {
    store_at(to, to_at, load_at(from, from_at));
  } else if (!dtype_is_integer(to->dtype)) {
    store_at(to, to_at, double_from_int(load_int_at(from, from_at), to->dtype == ENG_f64));
  } else {
    store_int_at(to, to_at, load_int_at(from, from_at));
  }
}

bool element_beats(const tensor *x, int64_t a, int64_t b, int sign)
{
  if (dtype_is_integer(x->dtype)) {
    int64_t left = load_int_at(x, a), right = load_int_at(x, b);
    return sign > 0 ? left > right : left < right;
  }
  double left = load_at(x, a), right = load_at(x, b);
  if (f64_is_nan(left) || f64_is_nan(right)) return !f64_is_nan(right);
  return sign > 0 ? left > right : left < right;
}

double row_logsumexp(const double *x, int64_t n)
{
  double largest = -INFINITY, sum = 0.0;
  for (int64_t i = 0; i < n; i++)
    if (x[i] > largest || f64_is_nan(x[i])) largest = x[i];
  for (int64_t i = 0; i < n; i++) sum += exp(x[i] - largest);
  return n ? largest + log(sum) : -INFINITY;
}

double silu_slope(double x)
{
  if (isinf(x)) return x > 0;   // the slope's limits: 1 at +inf, 0 at -inf
  double s = sigmoid_of(x);
  return s * (1.0 + x * (1.0 - s));
}

// ------------------------------------------------------------------ the table

static const backend table = {
  .name = "reference",
  .kernel = {
#define ENG_KERNEL(name) [ENG_OP_##name] = reference_##name,
#include "ops.def"
  },
  .gradstats = reference_gradstats,
  .optimize = reference_optimize,
  .unscale = reference_unscale,
};

const backend *backend_reference(void) { return &table; }
