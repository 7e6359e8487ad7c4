// What Lua asks of single tensors: make, keep, free, read, write, fill. Operations come through
// op.c, gradients through tape.c. Contracts in engine.h.
#include "error.h"
#include "op.h"
#include "step.h"
#include "tape.h"

#include <string.h>

eng_status eng_new(eng_tensor *out, int dtype, int ndim, const int64_t *shape, int home)
{
  tensor *x;
  *out = (eng_tensor){0, 0};
  ENG_TRY(tensor_make(&x, home == ENG_KEEP ? ARENA_KEPT : home == ENG_STEP ? ARENA_STEP : step_home(true), dtype, ndim, shape));
  memset(x->data, 0, (size_t)(x->count * eng_dtype_size(dtype)));
  *out = tensor_handle(x);
  return ENG_OK;
}

/// Copies x into y (same number of elements in broadcast) without recording.
static eng_status copy(tensor *y, tensor *x)
{
  bool recording = eng_grad_enabled(false);
  op_call c = {.op = ENG_OP_cast, .n_in = 1, .in = {x}, .out = {y}, .ints = {y->dtype}};
  eng_status status = op_run(&c);
  eng_grad_enabled(recording);
  y->store->writes++;
  return status;
}

eng_status eng_keep(eng_tensor *out, const eng_tensor *handle)
{
  tensor *x, *y;
  *out = (eng_tensor){0, 0};
  ENG_TRY(tensor_get(&x, handle));
  ENG_TRY(tensor_make(&y, ARENA_KEPT, x->dtype, x->ndim, x->shape));
  eng_status status = copy(y, x);
  if (status != ENG_OK) {
    tensor_drop(y);
    return status;
  }
  *out = tensor_handle(y);
  return ENG_OK;
}

eng_status eng_free(const eng_tensor *handle)
{
  tensor *x;
  ENG_TRY(tensor_get(&x, handle));
  if (x->held) return error_set(ENG_ERR_STATE, "%s belongs to a parameter set, which frees it", tensor_text(x));
  if (!tape_empty()) {   // the tape may need it
    if (x->of_step) return ENG_OK;
    return error_set(ENG_ERR_STATE, "%s cannot be freed while operations stand on the tape; hint: engine.end_step() first", tensor_text(x));
  }
  if (x->node < 0) ENG_TRY(eng_clear_gradient(handle));
  tensor_drop(x);
  return ENG_OK;
}

eng_status eng_info(eng_tensor_info *out, const eng_tensor *handle)
{
  tensor *x;
  ENG_TRY(tensor_get(&x, handle));
  *out = (eng_tensor_info){
    .count = x->count, .ndim = x->ndim, .dtype = x->dtype, .requires_grad = x->requires_grad, .is_leaf = !tape_holds(x),
    .owner = x->held ? 2 : x->of_step ? 0 : 1, .contiguous = tensor_contiguous(x), .step = x->step, .data = x->data,
  };
  memcpy(out->shape, x->shape, (size_t)x->ndim * sizeof *x->shape);
  memcpy(out->stride, x->stride, (size_t)x->ndim * sizeof *x->stride);
  return ENG_OK;
}

/// Element-wise conversion between a row-major buffer and a tensor of any strides.
static void transfer(void *buffer, int format, tensor *x, bool into_tensor)
{
  bool exact_ints = !dtype_is_float(format) && !dtype_is_float(x->dtype);
  if (format == x->dtype && tensor_contiguous(x)) {
    size_t bytes = (size_t)(x->count * eng_dtype_size(format));
    if (bytes == 0) return;
    if (into_tensor) memcpy(x->data, buffer, bytes);
    else memcpy(buffer, x->data, bytes);
    return;
  }
  int64_t index[ENG_MAX_DIMS] = {0}, at = 0;
  for (int64_t i = 0; i < x->count; i++) {
    if (into_tensor && exact_ints) tensor_store_int(x->data, x->dtype, at, tensor_load_int(buffer, format, i));
    else if (into_tensor) tensor_store(x->data, x->dtype, at, tensor_load(buffer, format, i));
    else if (exact_ints) tensor_store_int(buffer, format, i, tensor_load_int(x->data, x->dtype, at));
    else tensor_store(buffer, format, i, tensor_load(x->data, x->dtype, at));
    for (int d = x->ndim - 1; d >= 0; d--) {
      at += x->stride[d];
      if (++index[d] < x->shape[d]) break;
      at -= x->stride[d] * x->shape[d];
      index[d] = 0;
    }
  }
}

static eng_status check_transfer(const tensor *x, const void *memory, int format, int64_t count)
{
  if (!memory && count != 0) return error_set(ENG_ERR_VALUE, "expected memory for %s, got nothing", tensor_text(x));
  if (format < 0 || format >= ENG_DTYPE_COUNT) return error_set(ENG_ERR_DTYPE, "there is no dtype number %d", format);
  if (count != x->count) return error_set(ENG_ERR_SHAPE, "expected %lld values for %s, got %lld", (long long)x->count, tensor_text(x), (long long)count);
  return ENG_OK;
}

eng_status eng_write(const eng_tensor *handle, const void *source, int from, int64_t count)
{
  tensor *x;
  ENG_TRY(tensor_get(&x, handle));
  ENG_TRY(check_transfer(x, source, from, count));
  transfer((void *)source, from, x, true);
  x->store->writes++;
  return ENG_OK;
}

eng_status eng_read(void *target, int to, int64_t count, const eng_tensor *handle)
{
  tensor *x;
  ENG_TRY(tensor_get(&x, handle));
  ENG_TRY(check_transfer(x, target, to, count));
  transfer(target, to, x, false);
  return ENG_OK;
}

eng_status eng_item(double *out, const eng_tensor *handle)
{
  tensor *x;
  ENG_TRY(tensor_get(&x, handle));
  if (x->count != 1) return error_set(ENG_ERR_SHAPE, "item: expected a tensor of one element, got %s", tensor_text(x));
  *out = tensor_load(x->data, x->dtype, 0);
  return ENG_OK;
}

eng_status eng_fill(const eng_tensor *handle, double value)
{
  tensor *x;
  ENG_TRY(tensor_get(&x, handle));
  char cell[8];
  tensor_store(cell, x->dtype, 0, value);
  storage nobody = {.memory = cell, .bytes = 8, .references = 1, .arena = -1};
  tensor one = {.data = cell, .count = x->count, .ndim = x->ndim, .dtype = x->dtype, .store = &nobody, .live = true, .node = -1};
  memcpy(one.shape, x->shape, sizeof one.shape);   // strides stay 0: the one element everywhere
  return copy(x, &one);
}

eng_status eng_copy(const eng_tensor *target, const eng_tensor *source)
{
  tensor *x, *y;
  ENG_TRY(tensor_get(&y, target));
  ENG_TRY(tensor_get(&x, source));
  int ndim;
  int64_t shape[ENG_MAX_DIMS];
  if (!shape_broadcast(&ndim, shape, x, y) || ndim != y->ndim || memcmp(shape, y->shape, (size_t)ndim * sizeof *shape) != 0)
    return error_set(ENG_ERR_SHAPE, "copy: %s does not broadcast into %s", tensor_text(x), tensor_text(y));
  tensor *between = NULL, *spread = NULL;
  eng_status status = ENG_OK;
  bool recording = eng_grad_enabled(false);
  // Kernels copy in parallel and in blocks: one memory read and written at once needs a copy between.
  if (x != y && x->store == y->store) {
    status = op_run1(&between, ENG_OP_contiguous, x, NULL, NULL, NULL, 0, 0, 0);
    x = between;
  }
  if (status == ENG_OK && !tensor_same_shape(x, y)) {
    int64_t ints[1 + ENG_MAX_DIMS] = {y->ndim};
    memcpy(ints + 1, y->shape, (size_t)y->ndim * sizeof *ints);
    status = op_run1(&spread, ENG_OP_expand, x, NULL, NULL, ints, 1 + y->ndim, 0, 0);
    x = spread;
  }
  eng_grad_enabled(recording);
  if (status == ENG_OK) status = copy(y, x);
  tensor_drop(spread);
  tensor_drop(between);
  return status;
}

const char *eng_version(void)
{
  return ENG_VERSION;
}

int eng_abi_size(void)
{
  return (int)sizeof(eng_op_call);
}
