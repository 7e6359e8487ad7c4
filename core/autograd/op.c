// Runs operations (op.h). Owns autocast's settings. ops.def is the list of operations, and infer.c
// has the shape rules. Called by Lua, this folder and fp8/.
#include "op.h"

#include "base/error.h"
#include "params/params.h"
#include "base/rng.h"
#include "tape.h"

#include <string.h>

// autocast's current settings
static eng_precision precision = {-1, -1, -1, -1, 0};

void eng_autocast(const eng_precision *now, eng_precision *previous)
{
  if (previous) *previous = precision;
  precision = now ? *now : (eng_precision){-1, -1, -1, -1, 0};
}

const eng_precision *op_precision(void) { return &precision; }

// ---- rules registered by higher folders

static op_calls *calls_of[ENG_OP_COUNT];

void op_register(int op, op_infer_rule *infer, op_calls *calls)
{
  op_infer_register(op, infer);
  calls_of[op] = calls;
}

// ---- precision

/// Whether x is a parameter with a low-precision copy in `dtype`.
static bool has_low(const tensor *x, int dtype)
{ return x->parameter && x->parameter->low && x->parameter->low->dtype == dtype; }

/// Replaces x by its values in `dtype`: by its low-precision copy in `dtype` if x is a parameter
/// that has one, else by the result of a recorded cast. Leaves x if it has this dtype.
static eng_status lowered(tensor **x, int dtype)
{
  if (has_low(*x, dtype)) return params_low(x, (*x)->parameter);
  if ((*x)->dtype == dtype) return ENG_OK;
  return op_run1(x, (op_call){.op = ENG_OP_cast, .in = {*x}, .cast = {.dtype = dtype}});
}

/// Converts the inputs of a call to the current precision. *yields receives the dtype that autocast
/// prescribes for out[0], or -1.
static eng_status apply_precision(op_call *c, int *yields)
{
  *yields = -1;
  op_cast cast = op_table[c->op].cast;
  if (cast == CAST_NONE || cast == CAST_ANY) return ENG_OK;
  for (int k = 0; k < c->n_in; k++)
    // autocast leaves calls with an f64 input unchanged, because scripts choose f64 explicitly
    if (c->in[k] && c->in[k]->dtype == ENG_f64) return ENG_OK;
  switch (cast) {
    case CAST_LOWER:
      if (precision.compute < 0) break;
      for (int k = 0; k < c->n_in; k++)
        if (c->in[k] && dtype_is_float(c->in[k]->dtype))
          ENG_TRY(lowered(&c->in[k], precision.compute));
      break;
    case CAST_EMBED:
      if (has_low(c->in[0], precision.residual))
        ENG_TRY(params_low(&c->in[0], c->in[0]->parameter));
      *yields = precision.residual;
      break;
    case CAST_NORM: *yields = precision.norm; break;
    case CAST_WIDE: *yields = precision.wide; break;
    default: break;
  }
  return ENG_OK;
}

// ---- running

static eng_status check_inputs(op_call *c)
{
  FAIL_IF(c->op < 0 || c->op >= ENG_OP_COUNT, ENG_ERR_VALUE, "expected the number "
          "of an operation, 0 to %d, got %d", ENG_OP_COUNT - 1, c->op);
  const eng_op_info *info = &op_table[c->op].about;
  FAIL_IF(info->n_in < 0 && (c->n_in < 1 || c->n_in > ENG_OP_INPUTS), ENG_ERR_VALUE,
          "%s: expected 1 to %d inputs, got %d", info->name, ENG_OP_INPUTS, c->n_in);
  while (c->n_in >= 0 && c->n_in < info->n_in && info->optional >> c->n_in & 1)
    c->in[c->n_in++] = NULL;
  FAIL_IF(info->n_in >= 0 && c->n_in != info->n_in, ENG_ERR_VALUE,
          "%s: expected %d inputs, got %d", info->name, info->n_in, c->n_in);
  for (int k = 0; k < c->n_in; k++)
    FAIL_IF(!c->in[k] && !(info->optional >> k & 1), ENG_ERR_VALUE,
            "%s: input %d is missing", info->name, k + 1);
  if (info->n_out >= 0) c->n_out = info->n_out;
  for (int k = 0; k < 2; k++)
    FAIL_IF(!c->out[k] && op_adds_onto(c, k), ENG_ERR_VALUE,
            "%s: expected an output to add to, got none", info->name);
  return ENG_OK;
}

/// Checks that every input lies in the memory of the current device.
static eng_status check_space(const op_call *c)
{
  int space = arena_space();
  if (op_table[c->op].layout == LAYOUT_VIEW) return ENG_OK;   // a view computes nothing
  for (int k = 0; k < c->n_in; k++) {
    if (!c->in[k] || c->in[k]->store->space == space) continue;
    const char *here = backend_current()->name;
    return error_set(
      ENG_ERR_DEVICE,
      "%s: input %d (%s) is not in the memory of the current device, %s; hint: x:to('%s')",
      op_name(c), k + 1, tensor_text(c->in[k]), here, here);
  }
  return ENG_OK;
}

static eng_status make_outputs(op_call *c, const op_shape *s)
{
  int absent = op_absent_outputs(c);
  for (int k = 0; k < c->n_out; k++) {
    if (c->out[k]) {
      if (c->out[k]->ndim != s->out[k].ndim ||
          memcmp(c->out[k]->shape, s->out[k].shape, (size_t)s->out[k].ndim * sizeof(int64_t)) != 0)
        return error_set(ENG_ERR_SHAPE, "%s: the given output is %s, expected %s", op_name(c),
                         tensor_text(c->out[k]),
                         tensor_shape_text(s->out[k].ndim, s->out[k].shape));
      continue;
    }
    if (absent >> k & 1) continue;
    ENG_TRY(tensor_make(&c->out[k], ARENA_STEP, s->out[k].dtype, s->out[k].ndim, s->out[k].shape));
  }
  return ENG_OK;
}

/// Whether all outputs are empty. Kernels are never called for outputs without elements.
static bool outputs_empty(const op_call *c)
{
  for (int k = 0; k < c->n_out; k++)
    if (c->out[k] && c->out[k]->count > 0) return false;
  return true;
}

/// After a failure, drops the outputs that this call allocated, and keeps the outputs that the
/// caller passed.
static void drop_outputs(op_call *c, const bool *given)
{
  for (int k = 0; k < c->n_out; k++)
    if (c->out[k] && !given[k]) {
      tensor_drop(c->out[k]);
      c->out[k] = NULL;
    }
}

/// Reserves Philox blocks for a call that draws random numbers, unless its counter is already set:
/// then the call draws the numbers of a recorded call again.
static eng_status take_numbers(op_call *c)
{
  int blocks;
  int64_t *place = op_random_place(c, &blocks);
  if (!place || place[1]) return ENG_OK;
  ENG_TRY(backend_forbids("an operation that draws random numbers"));
  place[0] = (int64_t)rng_take(blocks * ((c->in[0]->count + 3) / 4));
  place[1] = 1;
  return ENG_OK;
}

// ---- elements in another order

/// Whether output element i depends only on element i of each input, so that elements can be
/// computed in any order.
static bool is_elementwise(op_call *c)
{
  switch (c->op) {
    case ENG_OP_add: case ENG_OP_sub: case ENG_OP_mul: case ENG_OP_div: case ENG_OP_maximum:
    case ENG_OP_minimum: case ENG_OP_affine: case ENG_OP_clamp: case ENG_OP_unary_grad:
      return true;
    case ENG_OP_cast: return !op_random_place(c, &(int){0});
    default: return op_is_unary(c->op);
  }
}

/// Whether all inputs of an elementwise call have the same shape and the same strides, and fill
/// their memory without gaps, but are not row-major. For example, scripts view images in
/// channels-last memory as [N x C x H x W]. Sets `order` to the dimensions by descending stride.
static bool in_one_order(op_call *c, int *order)
{
  const tensor *x = c->in[0];
  if (c->out[0] || tensor_contiguous(x) || !is_elementwise(c)) return false;
  for (int d = 0; d < x->ndim; d++) {
    int at = d;
    for (; at > 0 && x->stride[order[at - 1]] < x->stride[d]; at--) order[at] = order[at - 1];
    order[at] = d;
  }
  int64_t stride = 1;
  for (int k = x->ndim - 1; k >= 0; stride *= x->shape[order[k--]])
    if (x->stride[order[k]] != stride) return false;
  for (int k = 1; k < c->n_in; k++)
    if (!tensor_same_shape(x, c->in[k]) ||
        memcmp(x->stride, c->in[k]->stride, (size_t)x->ndim * sizeof *x->stride) != 0)
      return false;
  return true;
}

/// Computes an elementwise call on row-major views of the inputs, with the dimensions in the order
/// `order`. The output gets the inputs' strides.
static eng_status run_in_order(op_call *c, const op_shape *shape, const int *order)
{
  const int n = c->in[0]->ndim;
  op_call p = *c;
  op_shape s = *shape;
  int64_t stride[ENG_MAX_DIMS];
  for (int d = 0; d < n; d++) {
    s.out[0].shape[d] = shape->out[0].shape[order[d]];
    stride[d] = c->in[0]->stride[order[d]];
  }
  eng_status status = ENG_OK;
  int made = 0;
  for (; made < c->n_in && status == ENG_OK; made += status == ENG_OK)
    status = tensor_view(&p.in[made], c->in[made], 0, n, s.out[0].shape, stride);
  if (status == ENG_OK) status = make_outputs(&p, &s);
  if (status == ENG_OK && !outputs_empty(&p)) status = backend_current()->kernel[c->op](&p);
  if (status == ENG_OK)
    status = tensor_view(&c->out[0], p.out[0], 0, n, c->in[0]->shape, c->in[0]->stride);
  tensor_drop(p.out[0]);
  while (made > 0) tensor_drop(p.in[--made]);
  return status;
}

/// ZeRO-3: fetches the weights that this call reads and that are not in this rank's memory. First
/// advances transfers that are in progress.
static eng_status bring_weights(const op_call *c)
{
  if (params_exchanging) ENG_TRY(params_advance());
  for (int k = 0; k < c->n_in; k++)
    if (c->in[k] && c->in[k]->store->absent) return params_fetch(c->in, c->n_in);
  return ENG_OK;
}

eng_status op_run(op_call *c)
{
  FAIL_IF(eng_interrupted() == 2, ENG_ERR_INTERRUPTED, "interrupted");
  ENG_TRY(check_inputs(c));
  const op_info *info = &op_table[c->op];
  ENG_TRY(check_space(c));
  int yields;
  ENG_TRY(apply_precision(c, &yields));
  tape_note(&precision);
  if (info->layout == LAYOUT_CALLS) return calls_of[c->op](c);
  op_shape shape;
  ENG_TRY(op_infer(c, &shape));
  bool record = tape_wants(c);

  if (info->layout == LAYOUT_VIEW) {
    ENG_TRY(op_view(c, &shape));
    return record ? tape_record(c) : ENG_OK;
  }
  ENG_TRY(bring_weights(c));
  if (yields >= 0 && dtype_is_float(shape.out[0].dtype) && shape.out[0].dtype != ENG_f64)
    shape.out[0].dtype = yields;
  if (info->layout == LAYOUT_ROWS)
    for (int k = 0; k < c->n_in; k++)
      if (c->in[k] && !tensor_contiguous(c->in[k]))
        ENG_TRY(op_run1(&c->in[k], (op_call){.op = ENG_OP_contiguous, .in = {c->in[k]}}));
  ENG_TRY(take_numbers(c));

  op_kernel *kernel = backend_current()->kernel[c->op];
  FAIL_IF(!kernel, ENG_ERR_DEVICE,
          "%s: the device %s has no kernel for this operation; hint: engine.device('cpu')",
          op_name(c), backend_current()->name);
  int order[ENG_MAX_DIMS];
  if (in_one_order(c, order)) {
    ENG_TRY(run_in_order(c, &shape, order));
    return record ? tape_record(c) : ENG_OK;
  }
  bool given[ENG_OP_OUTPUTS];
  for (int k = 0; k < ENG_OP_OUTPUTS; k++) given[k] = c->out[k] != NULL;
  eng_status status = make_outputs(c, &shape);
  if (status == ENG_OK && !outputs_empty(c)) status = kernel(c);
  if (status == ENG_OK && record) status = tape_record(c);
  if (status != ENG_OK) drop_outputs(c, given);
  return status;
}

eng_status op_run1(tensor **out, op_call c)
{
  c.n_in = op_table[c.op].about.n_in;
  *out = NULL;
  ENG_TRY(op_run(&c));
  *out = c.out[0];
  return ENG_OK;
}

eng_status op_replace(tensor **x, op_call c)
{
  OWNED tensor *before = *x;
  if (!c.in[0]) c.in[0] = before;
  return op_run1(x, c);
}

eng_status op_reshape(tensor **out, tensor *x, int ndim, const int64_t *shape)
{
  op_call c = {.op = ENG_OP_reshape, .in = {x}, .reshape = {.ndim = ndim}};
  memcpy(c.reshape.shape, shape, (size_t)ndim * sizeof *shape);
  return op_run1(out, c);
}

eng_status op_rows(tensor **out, tensor *x)
{ return op_reshape(out, x, 2, (int64_t[]){row_count(x), row_length(x)}); }

eng_status op_expand(tensor **out, tensor *x, int ndim, const int64_t *shape)
{
  op_call c = {.op = ENG_OP_expand, .in = {x}, .expand = {.ndim = ndim}};
  memcpy(c.expand.shape, shape, (size_t)ndim * sizeof *shape);
  return op_run1(out, c);
}

// ---- called from Lua

/// Runs a call from Lua. `target`, unless NULL, becomes output 0.
static eng_status run_call(eng_op_call *call, tensor *target)
{
  op_call c = {.op = call->op, .n_in = call->n_in, .n_out = call->n_out, .out = {target}};
  FAIL_IF(call->n_in < 0 || call->n_in > ENG_OP_INPUTS, ENG_ERR_VALUE,
          "operation number %d: expected 0 to %d inputs, got %d", call->op, ENG_OP_INPUTS,
          call->n_in);
  for (int k = 0; k < call->n_in; k++) {
    if (call->in[k].slot == 0) continue;
    eng_status status = tensor_find(&c.in[k], &call->in[k]);
    if (status != ENG_OK && call->n_in > 1) error_prefix(status, "input %d", k + 1);
    if (status != ENG_OK)
      return call->op >= 0 && call->op < ENG_OP_COUNT
               ? error_prefix(status, "%s", op_table[call->op].about.name)
               : status;
  }
  memcpy(c.attributes.ints, call->ints, sizeof call->ints);
  memcpy(c.attributes.floats, call->floats, sizeof call->floats);
  ENG_TRY(op_run(&c));
  call->n_out = c.n_out;
  for (int k = 0; k < ENG_OP_OUTPUTS; k++) call->out[k] = tensor_handle(c.out[k]);
  return ENG_OK;
}

eng_status eng_run(eng_op_call *call) { return run_call(call, NULL); }

eng_status eng_run_into(eng_op_call *call, const eng_tensor *target)
{
  tensor *y;
  ENG_TRY(tensor_get(&y, target));
  FAIL_IF(y->store->space != backend_current()->space, ENG_ERR_DEVICE,
          "the output %s is not in the memory of the current device, %s; hint: engine.device('%s')",
          tensor_text(y), backend_current()->name, backend_of_space(y->store->space)->name);
  for (int k = 0; k < call->n_in && k < ENG_OP_INPUTS; k++) {
    tensor *x = NULL;
    if (call->in[k].slot) ENG_TRY(tensor_get(&x, &call->in[k]));
    FAIL_IF(x && x->store == y->store, ENG_ERR_VALUE, "an operation cannot read the memory it "
            "writes: input %d shares the memory of the output %s; hint: x:contiguous() is a copy",
            k + 1, tensor_text(y));
  }
  const char *name = eng_op_name(call->op);
  FAIL_IF(!op_takes_target(call->op), ENG_ERR_VALUE, "%s cannot write into a given tensor; hint: "
          "copy the result into the tensor", name ? name : "an unknown operation");
  FAIL_IF(!dtype_is_float(y->dtype) || !tensor_contiguous(y), ENG_ERR_SHAPE,
          "expected a contiguous floating-point tensor to write into, got %s%s", tensor_text(y),
          tensor_contiguous(y) ? "" : " with gaps or in another order");
  bool recording = eng_grad_enabled(false);
  eng_status status = run_call(call, y);
  eng_grad_enabled(recording);
  y->store->writes++;
  return status;
}

bool eng_op_supported(const char *device, int op)
{
  const backend *b = backend_find(device);
  if (!b || op < 0 || op >= ENG_OP_COUNT) return false;
  return op_table[op].layout >= LAYOUT_VIEW || b->kernel[op] != NULL;
}
