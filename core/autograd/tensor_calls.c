// Functions of engine.h on single tensors: create, keep, free, read, write, fill. Called by Lua,
// store/ and main/.
// The functions for operations are in op.c, and those for gradients are in gradient.c.
#include "base/error.h"
#include "base/numerics.h"
#include "op.h"
#include "step.h"
#include "tape.h"
#include "device/transfer.h"

#include <string.h>

/// Returns a new tensor to the script, or drops it if `status` is an error.
static eng_status hand_over(eng_tensor *out, tensor *x, eng_status status)
{
  if (status == ENG_OK) *out = tensor_handle(x);
  else tensor_drop(x);
  return status;
}

eng_status eng_new(eng_tensor *out, int dtype, int ndim, const int64_t *shape, int home)
{
  tensor *x;
  *out = (eng_tensor){0, 0};
  arena_id arena = home == ENG_KEEP ? ARENA_KEPT : home == ENG_STEP ? ARENA_STEP : step_home();
  ENG_TRY(tensor_make(&x, arena, dtype, ndim, shape));
  return hand_over(out, x, transfer_clear(x));
}

/// Copies x into y, with broadcasting. The tape does not record the copy.
static eng_status copy(tensor *y, tensor *x)
{
  op_call c = {.op = ENG_OP_cast, .n_in = 1, .n_out = 1, .in = {x}, .out = {y},
               .cast = {.dtype = y->dtype}};
  eng_status status = ENG_OK;
  FAIL_IF(x->store->space != y->store->space, ENG_ERR_DEVICE,
          "copy: expected the source and the target on one device, got the source %s in %s memory "
          "and the target %s in %s memory; hint: source:to('%s')",
          tensor_text(x), backend_of_space(x->store->space)->name, tensor_text(y),
          backend_of_space(y->store->space)->name, backend_of_space(y->store->space)->name);
  if (x->store->space == arena_space()) {
    bool recording = eng_grad_enabled(false);
    status = op_run(&c);
    eng_grad_enabled(recording);
  } else if (y->count > 0) {
    // the device that owns the memory need not be the current one
    status = backend_of_space(y->store->space)->kernel[c.op](&c);
  }
  y->store->writes++;
  return status;
}

eng_status eng_keep(eng_tensor *out, const eng_tensor *handle)
{
  tensor *x, *y;
  *out = (eng_tensor){0, 0};
  ENG_TRY(tensor_get(&x, handle));
  ENG_TRY(tensor_make_in(&y, x->store->space, ARENA_KEPT, x->dtype, x->ndim, x->shape));
  return hand_over(out, y, copy(y, x));
}

eng_status eng_free(const eng_tensor *handle)
{
  tensor *x;
  ENG_TRY(tensor_get(&x, handle));
  FAIL_IF(x->held, ENG_ERR_STATE, "%s belongs to an optimizer's parameters and is freed with them",
          tensor_text(x));
  if (!tape_empty()) {   // the tape may need the tensor
    if (x->of_step) return ENG_OK;
    return error_set(
      ENG_ERR_STATE,
      "%s cannot be freed while the tape has operations; hint: call backward() or "
      "engine.end_step() first",
      tensor_text(x));
  }
  if (x->node < 0) ENG_TRY(eng_clear_gradient(handle));
  tensor_drop(x);
  return ENG_OK;
}

eng_status eng_to_device(eng_tensor *out, const eng_tensor *handle, const char *name)
{
  tensor *x, *y;
  *out = (eng_tensor){0, 0};
  ENG_TRY(tensor_get(&x, handle));
  const backend *device = backend_find(name);
  if (!device) return ENG_ERR_DEVICE;
  ENG_TRY(tensor_make_in(&y, device->space, step_home(), x->dtype, x->ndim, x->shape));
  int64_t bytes = y->count * eng_dtype_size(y->dtype);
  eng_status status;
  if (x->store->space == y->store->space) status = transfer_rows(y->data, x);
  else if (y->store->space == SPACE_HOST) status = transfer_read(y->data, y->dtype, x);
  else if (x->store->space == SPACE_HOST && tensor_contiguous(x))
    status = transfer_from_host(y->store->space, y->data, x->data, bytes);
  else {
    void *rows = arena_alloc_in(SPACE_HOST, ARENA_SCRATCH, bytes);
    status = rows ? transfer_read(rows, x->dtype, x) : ENG_ERR_MEMORY;
    if (status == ENG_OK) status = transfer_from_host(y->store->space, y->data, rows, bytes);
    arena_free_in(SPACE_HOST, ARENA_SCRATCH, rows, bytes);
  }
  return hand_over(out, y, status);
}

eng_status eng_info(eng_tensor_info *out, const eng_tensor *handle)
{
  tensor *x;
  ENG_TRY(tensor_find(&x, handle));
  *out = (eng_tensor_info){
    .count = x->count,
    .ndim = x->ndim,
    .dtype = x->dtype,
    .requires_grad = x->requires_grad,
    .is_leaf = !tape_holds(x),
    .owner = x->held ? 2 : x->of_step ? 0 : 1,
    .contiguous = tensor_contiguous(x),
    .step = x->step,
    .space = x->store->space,
    .divided = x->store->closed,
    .data = x->store->space == SPACE_HOST && !x->store->closed ? x->data : NULL,
  };
  memcpy(out->shape, x->shape, (size_t)x->ndim * sizeof *x->shape);
  memcpy(out->stride, x->stride, (size_t)x->ndim * sizeof *x->stride);
  return ENG_OK;
}

static eng_status check_transfer(const tensor *x, const void *memory, int format, int64_t count)
{
  FAIL_IF(!memory && count != 0, ENG_ERR_VALUE,
          "expected a pointer to memory for the elements of %s, got NULL", tensor_text(x));
  FAIL_IF(format < 0 || format >= ENG_DTYPE_COUNT, ENG_ERR_DTYPE,
          "expected the number of a dtype, 0 to %d, got %d", ENG_DTYPE_COUNT - 1, format);
  FAIL_IF(count != x->count, ENG_ERR_SHAPE, "expected %lld values for %s, got %lld",
          (long long)x->count, tensor_text(x), (long long)count);
  return ENG_OK;
}

eng_status eng_write(const eng_tensor *handle, const void *source, int from, int64_t count)
{
  tensor *x;
  ENG_TRY(tensor_get(&x, handle));
  ENG_TRY(check_transfer(x, source, from, count));
  ENG_TRY(transfer_write(x, source, from));
  x->store->writes++;
  return ENG_OK;
}

// Returns x, or the default NaN if x is a negative quiet NaN with a payload. LuaJIT represents
// values that are not numbers, such as strings, by such NaNs, and would take x for one of these
// values.
static double lua_number(double x)
{ return f64_bits(x) > 0xFFF8000000000000ull ? f64_from(0x7FF8000000000000ull) : x; }

eng_status eng_read(void *target, int to, int64_t count, const eng_tensor *handle)
{
  tensor *x;
  ENG_TRY(tensor_get(&x, handle));
  ENG_TRY(check_transfer(x, target, to, count));
  ENG_TRY(transfer_read(target, to, x));
  for (int64_t i = 0; to == ENG_f64 && i < count; i++)
    ((double *)target)[i] = lua_number(((double *)target)[i]);
  return ENG_OK;
}

eng_status eng_checksum(uint64_t *out, const eng_tensor *handle)
{
  tensor *x;
  ENG_TRY(tensor_get(&x, handle));
  FAIL_IF(!tensor_contiguous(x), ENG_ERR_SHAPE,
          "checksum: expected a contiguous tensor, got a view %s; hint: x:contiguous()",
          tensor_text(x));
  return transfer_checksum(out, x->store->space, x->data, x->count * eng_dtype_size(x->dtype));
}

eng_status eng_item(double *out, const eng_tensor *handle)
{
  tensor *x;
  ENG_TRY(tensor_get(&x, handle));
  FAIL_IF(x->count != 1, ENG_ERR_SHAPE,
          "item: expected a tensor of one element, got %s", tensor_text(x));
  char cell[8];
  ENG_TRY(transfer_to_host(cell, x->store->space, x->data, eng_dtype_size(x->dtype)));
  *out = lua_number(tensor_load(cell, x->dtype, 0));
  return ENG_OK;
}

eng_status eng_fill(const eng_tensor *handle, double value)
{
  tensor *x;
  ENG_TRY(tensor_get(&x, handle));
  OWNED tensor *one = NULL;
  ENG_TRY(tensor_make_in(&one, x->store->space, ARENA_STEP, x->dtype, 0, NULL));
  ENG_TRY(transfer_set(one, value));
  tensor everywhere = *one;   // a view of `one` with x's shape
  everywhere.ndim = x->ndim;
  everywhere.count = x->count;
  memcpy(everywhere.shape, x->shape, sizeof everywhere.shape);
  memset(everywhere.stride, 0, sizeof everywhere.stride);
  return copy(x, &everywhere);
}

eng_status eng_copy(const eng_tensor *target, const eng_tensor *source)
{
  tensor *x, *y;
  ENG_TRY(tensor_get(&y, target));
  ENG_TRY(tensor_get(&x, source));
  int ndim;
  int64_t shape[ENG_MAX_DIMS];
  FAIL_IF(!shape_broadcast(&ndim, shape, x, y) || ndim != y->ndim ||
          memcmp(shape, y->shape, (size_t)ndim * sizeof *shape) != 0, ENG_ERR_SHAPE,
          "copy: %s does not broadcast into %s", tensor_text(x), tensor_text(y));
  OWNED tensor *between = NULL, *spread = NULL;
  eng_status status = ENG_OK;
  bool recording = eng_grad_enabled(false);
  // Kernels copy in parallel and in blocks. So if x and y may overlap, x is first copied to a new
  // tensor.
  if (x != y && x->store == y->store) {
    status = op_run1(&between, (op_call){.op = ENG_OP_contiguous, .in = {x}});
    x = between;
  }
  if (status == ENG_OK && !tensor_same_shape(x, y)) {
    status = op_expand(&spread, x, y->ndim, y->shape);
    x = spread;
  }
  eng_grad_enabled(recording);
  return status == ENG_OK ? copy(y, x) : status;
}

const char *eng_version(void) { return ENG_VERSION; }

int eng_abi_size(void) { return (int)sizeof(eng_op_call); }
