// The one door for operations. See op.h; the list is ops.def, the shape rules are infer.c.
#include "op.h"

#include "base/error.h"
#include "fp8/fp8_linear.h"
#include "graph.h"
#include "params/params.h"
#include "base/rng.h"
#include "tape.h"

#include <string.h>

const op_info op_table[ENG_OP_COUNT] = {
#define MANY -1
#define ENG_OP(name, inputs, outputs, layout, cast, gradient) {#name, inputs, outputs, LAYOUT_##layout, CAST_##cast},
#include "ops.def"
#undef ENG_OP
#undef MANY
};

static eng_precision precision = {-1, -1, -1, -1, 0};   // in force: what the innermost autocast asks for

void eng_autocast(const eng_precision *now, eng_precision *previous)
{
  if (previous) *previous = precision;
  precision = now ? *now : (eng_precision){-1, -1, -1, -1, 0};
}

// ---- precision

eng_status op_cast_to(tensor **out, bool *made, tensor *x, int dtype)
{
  *made = x->dtype != dtype;
  *out = x;
  return *made ? op_run1(out, ENG_OP_cast, x, NULL, NULL, (int64_t[]){dtype}, 1, 0, 0) : ENG_OK;
}

/// x in `dtype`: a parameter's low-precision copy where it has one, else a recorded cast.
static eng_status lowered(tensor **x, int dtype)
{
  if ((*x)->parameter && (*x)->parameter->shadow && (*x)->parameter->shadow->dtype == dtype) return params_shadow(x, (*x)->parameter);
  bool made;
  return op_cast_to(x, &made, *x, dtype);
}

/// Brings the inputs of a call to the precision in force; says what dtype autocast wants out[0] in, or -1.
static eng_status apply_precision(op_call *c, int *yields)
{
  *yields = -1;
  op_cast cast = op_table[c->op].cast;
  if (cast == CAST_NONE || cast == CAST_ANY) return ENG_OK;
  for (int k = 0; k < c->n_in; k++)
    if (c->in[k] && c->in[k]->dtype == ENG_f64) return ENG_OK;   // f64 is asked for by hand, always
  switch (cast) {
    case CAST_LOWER:
      if (precision.compute < 0) break;
      for (int k = 0; k < c->n_in; k++)
        if (c->in[k] && dtype_is_float(c->in[k]->dtype)) ENG_TRY(lowered(&c->in[k], precision.compute));
      break;
    case CAST_EMBED:
      if (precision.residual >= 0 && c->in[0]->parameter && c->in[0]->parameter->shadow && c->in[0]->parameter->shadow->dtype == precision.residual)
        ENG_TRY(params_shadow(&c->in[0], c->in[0]->parameter));
      *yields = precision.residual;
      break;
    case CAST_NORM: *yields = precision.norm; break;
    case CAST_WIDE: *yields = precision.wide; break;
    default: break;
  }
  return ENG_OK;
}

// ---- running

static eng_status check_arity(const op_call *c)
{
  if (c->op < 0 || c->op >= ENG_OP_COUNT) return error_set(ENG_ERR_VALUE, "there is no operation number %d", c->op);
  const op_info *info = &op_table[c->op];
  bool fits = info->n_in < 0 ? c->n_in >= 1 && c->n_in <= ENG_OP_INPUTS : c->n_in == info->n_in;
  if (!fits || c->in[0] == NULL) return error_set(ENG_ERR_VALUE, "%s: expected %d inputs, got %d", info->name, info->n_in, c->n_in);
  return ENG_OK;
}

static bool is_norm_grad(int op)
{
  return op == ENG_OP_layer_norm_grad || op == ENG_OP_rms_norm_grad || op == ENG_OP_add_layer_norm_grad || op == ENG_OP_add_rms_norm_grad;
}

/// Inputs that may be absent: biases and norm weights. Everything else must be there.
static eng_status check_present(const op_call *c)
{
  for (int k = 0; k < c->n_in; k++) {
    bool norm = c->op == ENG_OP_layer_norm || c->op == ENG_OP_rms_norm || is_norm_grad(c->op);
    bool adds = c->op == ENG_OP_add_layer_norm || c->op == ENG_OP_add_rms_norm;
    bool optional = (norm && k == 1) || (adds && k >= 2) || (c->op == ENG_OP_quantize && k == 1) ||
                    (c->op == ENG_OP_swiglu_quantize && k == 2) || (c->op == ENG_OP_fp8_matmul && k == 4) ||
                    (k == 2 && (c->op == ENG_OP_linear || c->op == ENG_OP_layer_norm)) || (c->op == ENG_OP_mlp_gelu && (k == 2 || k == 4));
    if (!c->in[k] && !optional) return error_set(ENG_ERR_VALUE, "%s: input %d is missing", op_table[c->op].name, k + 1);
  }
  return ENG_OK;
}

/// Every input must lie in the memory of the device in force.
static eng_status check_space(const op_call *c)
{
  int space = arena_space();
  if (op_table[c->op].layout == LAYOUT_VIEW) return ENG_OK;   // computes nothing
  for (int k = 0; k < c->n_in; k++) {
    if (!c->in[k] || c->in[k]->store->space == space) continue;
    const char *here = backend_current()->name;
    return error_set(ENG_ERR_DEVICE, "%s: input %d, %s, is not in the memory of the device in force, %s; hint: x:to('%s')", op_table[c->op].name,
                     k + 1, tensor_text(c->in[k]), here, here);
  }
  return ENG_OK;
}

/// quantize, alone or behind another operation.
static bool makes_codes(int op) { return op == ENG_OP_quantize || op == ENG_OP_swiglu_quantize; }

static eng_status make_outputs(op_call *c, const op_shape *s)
{
  for (int k = 0; k < c->n_out; k++) {
    if (c->out[k]) {
      if (c->out[k]->ndim != s->out[k].ndim || memcmp(c->out[k]->shape, s->out[k].shape, (size_t)s->out[k].ndim * sizeof(int64_t)) != 0)
        return error_set(ENG_ERR_SHAPE, "%s: the output is %s, expected %s", op_table[c->op].name, tensor_text(c->out[k]),
                         tensor_shape_text(s->out[k].ndim, s->out[k].shape));
      continue;
    }
    bool unwanted = (c->op == ENG_OP_attention && k == 2 && !c->ints[1]) ||
                    (makes_codes(c->op) && k > 2 && !(c->ints[4] & 8)) ||
                    (is_norm_grad(c->op) && k > 0 && !c->ints[1]);
    if (!unwanted) ENG_TRY(tensor_make(&c->out[k], ARENA_STEP, s->out[k].dtype, s->out[k].ndim, s->out[k].shape));
  }
  return ENG_OK;
}

/// Whether there is nothing to compute: kernels need not think of outputs without elements.
static bool outputs_empty(const op_call *c)
{
  for (int k = 0; k < c->n_out; k++)
    if (c->out[k] && c->out[k]->count > 0) return false;
  return true;
}

/// Drops the outputs this call made (not those it was given) after a failure.
static void drop_outputs(op_call *c, const bool *given)
{
  for (int k = 0; k < c->n_out; k++)
    if (c->out[k] && !given[k]) {
      tensor_drop(c->out[k]);
      c->out[k] = NULL;
    }
}

/// Random numbers of operations that use them, unless the call brings their place: a recorded call replays them.
static eng_status take_numbers(op_call *c)
{
  int64_t blocks = (c->in[0]->count + 3) / 4, *place = NULL;
  if (c->op == ENG_OP_dropout) place = &c->ints[0];
  if (c->op == ENG_OP_cast && dtype_is_fp8((int)c->ints[0]) && c->ints[1] & FP8_STOCHASTIC) place = &c->ints[2];
  if (makes_codes(c->op) && c->ints[4] & FP8_STOCHASTIC) place = &c->ints[5];
  if (!place || place[1]) return ENG_OK;
  ENG_TRY(graph_forbids("an operation that draws random numbers"));
  place[0] = (int64_t)rng_take(makes_codes(c->op) && c->ints[4] & 8 ? 2 * blocks : blocks);
  place[1] = 1;
  return ENG_OK;
}

eng_status op_run(op_call *c)
{
  if (eng_interrupted() >= 2) return error_set(ENG_ERR_INTERRUPTED, "interrupted");
  ENG_TRY(check_arity(c));
  if (op_table[c->op].n_out >= 0) c->n_out = op_table[c->op].n_out;
  ENG_TRY(check_present(c));

  const op_info *info = &op_table[c->op];
  ENG_TRY(check_space(c));
  if (c->op == ENG_OP_linear && precision.fp8 && fp8_site_on(c->ints[0])) return fp8_linear(c, &precision, NULL);
  int yields;
  ENG_TRY(apply_precision(c, &yields));
  op_shape shape;
  ENG_TRY(op_infer(c, &shape));
  bool record = tape_wants(c);

  if (info->layout == LAYOUT_VIEW) {
    ENG_TRY(op_view(c, &shape));
    return record ? tape_record(c) : ENG_OK;
  }
  if (yields >= 0 && dtype_is_float(shape.out[0].dtype) && shape.out[0].dtype != ENG_f64) shape.out[0].dtype = yields;
  if (info->layout == LAYOUT_ROWS)
    for (int k = 0; k < c->n_in; k++)
      if (c->in[k] && !tensor_contiguous(c->in[k])) ENG_TRY(op_run1(&c->in[k], ENG_OP_contiguous, c->in[k], NULL, NULL, NULL, 0, 0, 0));
  ENG_TRY(take_numbers(c));

  op_kernel *kernel = backend_current()->kernel[c->op];
  if (!kernel) return error_set(ENG_ERR_DEVICE, "the device '%s' has no kernel for %s", backend_current()->name, info->name);
  bool given[ENG_OP_OUTPUTS];
  for (int k = 0; k < ENG_OP_OUTPUTS; k++) given[k] = c->out[k] != NULL;
  eng_status status = make_outputs(c, &shape);
  if (status == ENG_OK && !outputs_empty(c)) status = kernel(c);
  if (status == ENG_OK && record && c->op == ENG_OP_swiglu && precision.fp8 && fp8_site_recomputes(c->ints[0])) status = fp8_keep_swiglu(c);
  if (status == ENG_OK && record) status = tape_record(c);
  if (status != ENG_OK) drop_outputs(c, given);
  return status;
}

eng_status op_run1(tensor **out, int op, tensor *a, tensor *b, tensor *third, const int64_t *ints, int n_ints, double f0, double f1)
{
  op_call c = {.op = op, .in = {a, b, third}, .floats = {f0, f1}};
  c.n_in = op_table[op].n_in;
  if (ints) memcpy(c.ints, ints, (size_t)n_ints * sizeof *ints);
  *out = NULL;
  ENG_TRY(op_run(&c));
  *out = c.out[0];
  return ENG_OK;
}

// ---- what Lua calls

/// Runs a call of Lua's; a given `target` takes output 0.
static eng_status run_call(eng_op_call *call, tensor *target)
{
  op_call c = {.op = call->op, .n_in = call->n_in, .n_out = call->n_out, .out = {target}};
  if (call->n_in < 0 || call->n_in > ENG_OP_INPUTS) return error_set(ENG_ERR_VALUE, "expected up to %d inputs, got %d", ENG_OP_INPUTS, call->n_in);
  for (int k = 0; k < call->n_in; k++) {
    if (call->in[k].slot == 0) continue;
    eng_status status = tensor_get(&c.in[k], &call->in[k]);
    if (status != ENG_OK) return call->op >= 0 && call->op < ENG_OP_COUNT ? error_prefix(status, "%s", op_table[call->op].name) : status;
  }
  memcpy(c.ints, call->ints, sizeof c.ints);
  memcpy(c.floats, call->floats, sizeof c.floats);
  ENG_TRY(op_run(&c));
  call->n_out = c.n_out;
  for (int k = 0; k < ENG_OP_OUTPUTS; k++) call->out[k] = tensor_handle(c.out[k]);
  return ENG_OK;
}

eng_status eng_run(eng_op_call *call)
{
  return run_call(call, NULL);
}

eng_status eng_swiglu_linear(eng_tensor *y, const eng_tensor in[4], int64_t site)
{
  op_call swiglu = {.op = ENG_OP_swiglu, .n_in = 2, .ints = {site}}, linear = {.op = ENG_OP_linear, .n_in = 3, .ints = {site}};
  tensor **const to[4] = {&swiglu.in[0], &swiglu.in[1], &linear.in[1], &linear.in[2]};
  for (int k = 0; k < 4; k++)
    if (in[k].slot) ENG_TRY(tensor_get(to[k], &in[k]));
  if (eng_interrupted() >= 2) return error_set(ENG_ERR_INTERRUPTED, "interrupted");
  if (precision.fp8 && linear.in[1] && fp8_swiglu_fits(&swiglu)) {
    ENG_TRY(fp8_swiglu_linear(&swiglu, &linear, &precision));
  } else {
    ENG_TRY(op_run(&swiglu));
    linear.in[0] = swiglu.out[0];
    ENG_TRY(op_run(&linear));
    eng_tensor h = tensor_handle(swiglu.out[0]);
    ENG_TRY(eng_done(&h));
  }
  *y = tensor_handle(linear.out[0]);
  return ENG_OK;
}

eng_status eng_run_into(eng_op_call *call, const eng_tensor *target)
{
  tensor *y;
  ENG_TRY(tensor_get(&y, target));
  if (y->store->space != backend_current()->space)
    return error_set(ENG_ERR_DEVICE, "%s is not in the memory of the device in force", tensor_text(y));
  for (int k = 0; k < call->n_in && k < ENG_OP_INPUTS; k++) {
    tensor *x = NULL;
    if (call->in[k].slot) ENG_TRY(tensor_get(&x, &call->in[k]));
    if (x && x->store == y->store) return error_set(ENG_ERR_VALUE, "an operation cannot read the memory it writes: %s", tensor_text(y));
  }
  if (call->op != ENG_OP_matmul && call->op != ENG_OP_fp8_matmul)
    return error_set(ENG_ERR_VALUE, "only matmul and fp8_matmul write into tensors that are there");
  if (!dtype_is_float(y->dtype) || !tensor_contiguous(y))
    return error_set(ENG_ERR_SHAPE, "expected a contiguous floating-point tensor to write into, got %s", tensor_text(y));
  bool recording = eng_grad_enabled(false);
  eng_status status = run_call(call, y);
  eng_grad_enabled(recording);
  y->store->writes++;
  return status;
}

const char *eng_op_name(int op)
{
  return op >= 0 && op < ENG_OP_COUNT ? op_table[op].name : NULL;
}

bool eng_op_supported(const char *device, int op)
{
  const backend *b = backend_find(device);
  if (!b || op < 0 || op >= ENG_OP_COUNT) return false;
  return op_table[op].layout == LAYOUT_VIEW || b->kernel[op] != NULL;
}
