// The tape and the backward pass. See tape.h.
//
// backward() walks the nodes in reverse. A gradient on its way hangs at the tensor it belongs to
// (tensor.gradient) and never changes once it hangs there: a second contribution makes a new sum. Gradients of
// parameters go into their flat buffer. Where a Lua node stands the walk stops and Lua resumes it.
//
// Layers may be scaled apart: every node has a carry, a factor that the gradients of its outputs have beside the
// seed, and every parameter one for its own. A rule computes in its node's carry; grad_emit brings the result to
// the carry of the tensor it is for. So no rule and no kernel knows of it, and it does not matter how a tensor gets
// from one layer into another.
#include "tape.h"
#include "device/transfer.h"

#include "base/error.h"
#include "fp8/fp8_linear.h"
#include "graph.h"
#include "base/numerics.h"
#include "op.h"
#include "params/params.h"

#include <stdlib.h>
#include <string.h>

#define ENG_OP(name, inputs, outputs, layout, cast, gradient) eng_status grad_##gradient(grad_call *g);
#include "ops.def"
#undef ENG_OP

static grad_rule *const rules[ENG_OP_COUNT] = {
#define ENG_OP(name, inputs, outputs, layout, cast, gradient) grad_##gradient,
#include "ops.def"
#undef ENG_OP
};

static struct {
  tape_node *nodes;
  int length, capacity;
  bool off;                    // recording is switched off
  double carry;                // of the nodes recorded from now on
} tape = {.carry = 1};

static struct {
  bool running, retain;
  bool was_off;                // recording before backward began
  eng_precision precision;     // autocast before backward began
  int cursor;                  // the next node to treat is cursor - 1
  grad_call pending;           // of the Lua node that waits
  int64_t pending_id;          // -1: none
} pass = {.pending_id = -1};

// Leaves outside parameter sets that hold a gradient of this step; a scope may have dropped one since.
typedef struct leaf { tensor *x; uint32_t generation; } leaf;
static struct { leaf *items; int length, capacity; } leaves;

// Parameters in order of the first operation that reads them: where the walk has passed that, their gradient is complete.
typedef struct due { parameter *p; int node; } due;
static struct { tape_watch on; due *items; int length, capacity; } watch;

eng_status grad_none(grad_call *g)
{
  return error_set(ENG_ERR_GRADIENT, "%s has no gradient", eng_op_name(g->call->op));
}

bool eng_op_differentiable(int op)
{
  return op >= 0 && op < ENG_OP_COUNT && rules[op] != grad_none;
}

static eng_status grow(void **items, int length, int *capacity, size_t size)
{
  if (length < *capacity) return ENG_OK;
  int more = *capacity ? 2 * *capacity : 1024;
  void *grown = realloc(*items, (size_t)more * size);
  if (!grown) return error_set(ENG_ERR_MEMORY, "out of memory for the tape");
  *items = grown;
  *capacity = more;
  return ENG_OK;
}

// ---- recording

// While backward runs nothing is recorded, whoever switches recording on: the pass points into the nodes.
bool tape_wants(const op_call *call)
{
  if (tape.off || pass.running || rules[call->op] == grad_none) return false;
  for (int k = 0; k < call->n_in; k++)
    if (call->in[k] && call->in[k]->requires_grad) return true;
  return false;
}

static bool adds_before_norm(int op)
{
  return op == ENG_OP_add_layer_norm || op == ENG_OP_add_rms_norm;
}

static eng_status record(const op_call *call, int64_t lua_id)
{
  ENG_TRY(grow((void **)&tape.nodes, tape.length, &tape.capacity, sizeof *tape.nodes));
  for (int k = 0; k < call->n_out; k++) {
    tensor *y = call->out[k];
    // Later outputs are by-products without gradient (statistics, indices), but for split, Lua nodes and the sum that a norm is of.
    bool sum = k == 1 && adds_before_norm(call->op) && (call->in[0]->requires_grad || call->in[1]->requires_grad);
    if (!y || !dtype_is_float(y->dtype) || (k > 0 && lua_id < 0 && call->op != ENG_OP_split && !sum)) continue;
    y->requires_grad = true;
    y->node = tape.length;
    y->output = k;
  }
  tape_node *node = &tape.nodes[tape.length++];
  *node = (tape_node){.call = *call, .lua_id = lua_id, .carry = tape.carry};
  for (int k = 0; k < call->n_in; k++)
    if (call->in[k]) node->in_writes[k] = call->in[k]->store->writes;
  for (int k = 0; k < call->n_out; k++)
    if (call->out[k]) node->out_writes[k] = call->out[k]->store->writes;
  return ENG_OK;
}

eng_status tape_record(const op_call *call)
{
  return record(call, -1);
}

eng_status eng_record_lua(int64_t id, const eng_tensor *x, int n_in, const eng_tensor *y, int n_out)
{
  if (n_in < 1 || n_in > ENG_OP_INPUTS || n_out < 1 || n_out > ENG_OP_OUTPUTS)
    return error_set(ENG_ERR_VALUE, "a Lua gradient takes 1 to %d inputs and 1 to %d outputs, got %d and %d", ENG_OP_INPUTS, ENG_OP_OUTPUTS, n_in, n_out);
  op_call call = {.op = -1, .n_in = n_in, .n_out = n_out};
  bool wanted = false;
  for (int k = 0; k < n_in; k++) {
    ENG_TRY(tensor_get(&call.in[k], &x[k]));
    wanted |= call.in[k]->requires_grad;
  }
  for (int k = 0; k < n_out; k++) {
    ENG_TRY(tensor_get(&call.out[k], &y[k]));
    if (!call.out[k]->of_step || tape_holds(call.out[k]) || call.out[k]->requires_grad)
      return error_set(ENG_ERR_GRADIENT, "output %d of a Lua gradient must be a new tensor of this step, computed under engine.no_grad()", k + 1);
  }
  return wanted && !tape.off && !pass.running ? record(&call, id) : ENG_OK;
}

bool tape_holds(const tensor *x)
{
  return x->node >= 0 && x->node < tape.length && tape.nodes[x->node].call.out[x->output] == x;
}

bool tape_empty(void)
{
  return tape.length == 0;
}

const op_call *tape_call(int i)
{
  return &tape.nodes[i].call;
}

bool tape_unwritten(int i, int k)
{
  return tape.nodes[i].call.in[k]->store->writes == tape.nodes[i].in_writes[k];
}

void tape_add_input(int i, tensor *x)
{
  tape_node *node = &tape.nodes[i];
  node->in_writes[node->call.n_in] = x->store->writes;
  node->call.in[node->call.n_in++] = x;
}

bool tape_reaches(int mark)
{
  for (int i = 0; i < tape.length; i++) {
    const op_call *call = &tape.nodes[i].call;
    for (int k = 0; k < call->n_in; k++)
      if (call->in[k] && call->in[k]->step_index >= mark) return true;
    for (int k = 0; k < call->n_out; k++)
      if (call->out[k] && call->out[k]->step_index >= mark) return true;
  }
  return false;
}

int eng_tape_length(void)
{
  return tape.length;
}

bool eng_grad_enabled(bool on)
{
  bool before = !tape.off;
  tape.off = !on;
  return before;
}

eng_status eng_gradient_carry(double *before, double carry)
{
  *before = tape.carry;
  if (!f64_is_finite(carry) || !(carry > 0)) return error_set(ENG_ERR_VALUE, "gradients cannot carry the factor %g: expected a positive finite number", carry);
  tape.carry = carry;
  return ENG_OK;
}

/// What the gradient of x carries: as the operation that made it, or as its parameter; other leaves nothing.
static double carry_of(const tensor *x)
{
  if (x->parameter) return x->parameter->carry;
  return tape_holds(x) ? tape.nodes[x->node].carry : 1;
}

// ---- gradients on their way

static void hang(tensor *x, tensor *dx)
{
  x->gradient = dx;
  dx->hung = true;
}

static void let_go(tensor *x)
{
  tensor_drop(x->gradient);
  x->gradient = NULL;
}

static void tape_clear(void)
{
  for (int i = 0; i < tape.length; i++)
    for (int k = 0; k < tape.nodes[i].call.n_out; k++)
      if (tape.nodes[i].call.out[k]) let_go(tape.nodes[i].call.out[k]);
  tape.length = 0;
}

void tape_end_step(void)
{
  eng_backward_abort();
  tape_clear();
  for (int i = 0; i < leaves.length; i++)
    if (leaves.items[i].x->generation == leaves.items[i].generation) let_go(leaves.items[i].x);
  leaves.length = 0;
}

bool grad_wants(const grad_call *g, int k)
{
  return g->call->in[k] && g->call->in[k]->requires_grad;
}

eng_status grad_share(tensor **out, tensor *x)
{
  return tensor_view(out, x, 0, x->ndim, x->shape, x->stride);
}

/// Sees to it that p's gradient has memory.
static eng_status place(parameter *p)
{
  if (p->gradient) return ENG_OK;
  return p->set->divided && watch.on.place ? watch.on.place(watch.on.data, p) : params_gradients(p->set);
}

tensor *grad_target(grad_call *g, int k, bool *accumulate)
{
  parameter *p = g->call->in[k]->parameter;
  if (!p || p->carry != g->carry || place(p) != ENG_OK) return NULL;      // an error comes again when the gradient is emitted
  *accumulate = p->has_gradient;
  p->has_gradient = true;
  return p->gradient;
}

void grad_target_failed(grad_call *g, int k, bool accumulate)
{
  g->call->in[k]->parameter->has_gradient = accumulate;
}

/// Sums dx over the dimensions in which x was broadcast; takes dx, gives a tensor of x's shape.
static eng_status unbroadcast(tensor **dx, const tensor *x)
{
  tensor *from = *dx;
  int lead = from->ndim - x->ndim;
  int64_t mask = 0;
  for (int d = 0; d < from->ndim; d++)
    if (d < lead || (x->shape[d - lead] == 1 && from->shape[d] != 1)) mask |= 1ll << d;
  tensor *summed = NULL, *shaped = NULL;
  eng_status status = ENG_OK;
  if (mask) {
    status = op_run1(&summed, ENG_OP_sum, from, NULL, NULL, (int64_t[]){mask, 1}, 2, 0, 0);
    tensor_drop(from);
  } else summed = from;
  if (status == ENG_OK) {
    int64_t ints[1 + ENG_MAX_DIMS] = {x->ndim};
    memcpy(ints + 1, x->shape, (size_t)x->ndim * sizeof *ints);
    status = op_run1(&shaped, ENG_OP_reshape, summed, NULL, NULL, ints, 1 + x->ndim, 0, 0);
  }
  tensor_drop(summed);
  *dx = shaped;
  return status;
}

/// Adds dx to a parameter's gradient in the flat buffer; takes dx.
static eng_status add_to_parameter(parameter *p, tensor *dx)
{
  eng_status status = place(p);
  if (status != ENG_OK) {
    tensor_drop(dx);
    return status;
  }
  op_call c = {.op = ENG_OP_cast, .n_in = 1, .n_out = 1, .in = {dx}, .out = {p->gradient}, .ints = {p->gradient->dtype}};
  if (p->has_gradient) c = (op_call){.op = ENG_OP_add, .n_in = 2, .n_out = 1, .in = {p->gradient, dx}, .out = {p->gradient}};
  status = op_run(&c);
  if (status == ENG_OK) p->has_gradient = true;
  tensor_drop(dx);
  return status;
}

static eng_status accumulate(tensor *x, tensor *dx)
{
  if (x->parameter) return add_to_parameter(x->parameter, dx);
  if (!x->gradient) {
    if (x->node < 0) {
      eng_status status = grow((void **)&leaves.items, leaves.length, &leaves.capacity, sizeof *leaves.items);
      if (status != ENG_OK) {
        tensor_drop(dx);
        return status;
      }
    }
    hang(x, dx);
    if (x->node >= 0) return ENG_OK;
    leaves.items[leaves.length++] = (leaf){x, x->generation};
    return ENG_OK;
  }
  tensor *sum;
  eng_status status = op_run1(&sum, ENG_OP_add, x->gradient, dx, NULL, NULL, 0, 0, 0);
  tensor_drop(dx);
  if (status != ENG_OK) return status;
  tensor_drop(x->gradient);
  hang(x, sum);
  return ENG_OK;
}

eng_status grad_emit(grad_call *g, int k, tensor *dx)
{
  tensor *x = g->call->in[k];
  if (!tensor_same_shape(dx, x)) ENG_TRY(unbroadcast(&dx, x));
  double carry = carry_of(x);
  if (carry != g->carry) {
    tensor *scaled;   // adding -0 keeps the sign of zeros
    eng_status status = op_run1(&scaled, ENG_OP_affine, dx, NULL, NULL, NULL, 0, carry / g->carry, -0.0);
    tensor_drop(dx);
    if (status != ENG_OK) return status;
    dx = scaled;
  }
  if (dx->dtype != x->dtype && !x->parameter) {
    tensor *rounded;
    eng_status status = op_run1(&rounded, ENG_OP_cast, dx, NULL, NULL, (int64_t[]){x->dtype}, 1, 0, 0);
    tensor_drop(dx);
    if (status != ENG_OK) return status;
    dx = rounded;
  }
  return accumulate(x, dx);
}

// ---- the backward pass

void tape_set_watch(const tape_watch *on)
{
  watch.on = on ? *on : (tape_watch){0};
  watch.length = 0;
}

/// Lists the parameters that the nodes below the cursor read.
static eng_status expect_gradients(void)
{
  watch.length = 0;
  for (int i = 0; watch.on.ready && i < pass.cursor; i++) {
    const op_call *call = &tape.nodes[i].call;
    for (int k = 0; k < call->n_in; k++) {
      parameter *p = call->in[k] ? call->in[k]->parameter : NULL;
      if (!p || p->expected) continue;
      ENG_TRY(grow((void **)&watch.items, watch.length, &watch.capacity, sizeof *watch.items));
      watch.items[watch.length++] = (due){p, i};
      p->expected = true;
    }
  }
  eng_status status = watch.on.begins ? watch.on.begins(watch.on.data) : ENG_OK;
  for (int i = 0; i < watch.length; i++) watch.items[i].p->expected = false;
  return status;
}

/// Tells of the gradients that the walk, which has come down to the cursor, has completed.
static eng_status tell_complete(void)
{
  while (watch.length > 0 && watch.items[watch.length - 1].node >= pass.cursor)
    ENG_TRY(watch.on.ready(watch.on.data, watch.items[--watch.length].p));
  return watch.on.between ? watch.on.between(watch.on.data) : ENG_OK;
}

static void finish(void)
{
  tape_set_watch(NULL);
  tape.off = pass.was_off;
  eng_autocast(&pass.precision, NULL);
  pass.running = false;
  pass.pending_id = -1;
}

int tape_backward_node(int *op)
{
  if (!pass.running || pass.cursor >= tape.length) return -1;
  if (op) *op = tape.nodes[pass.cursor].lua_id >= 0 ? -1 : tape.nodes[pass.cursor].call.op;
  return pass.cursor;
}

void eng_backward_abort(void)
{
  tape_set_watch(NULL);
  if (!pass.running) return;
  finish();
  tape_clear();
}

/// The gradients that arrived at a node's outputs; false when none did.
static bool collect(grad_call *g, const tape_node *node)
{
  bool any = false;
  const op_call *call = &node->call;
  *g = (grad_call){.call = call, .carry = node->carry};
  for (int k = 0; k < call->n_out; k++)
    if (call->out[k] && call->out[k]->gradient) {
      g->dy[k] = call->out[k]->gradient;
      any = true;
    }
  return any;
}

static void drop_collected(const op_call *call)
{
  for (int k = 0; k < call->n_out; k++)
    if (call->out[k]) let_go(call->out[k]);
}

/// Rules that need no values of inputs and outputs: whoever wrote into those changes nothing.
static bool reads_no_values(int op)
{
  switch (op) {
    case ENG_OP_add: case ENG_OP_sub: case ENG_OP_affine: case ENG_OP_neg: case ENG_OP_cast: case ENG_OP_contiguous: case ENG_OP_dropout:
    case ENG_OP_reshape: case ENG_OP_permute: case ENG_OP_expand: case ENG_OP_slice: case ENG_OP_split: case ENG_OP_concat:
    case ENG_OP_sum: case ENG_OP_mean:
      return true;
    default:
      return false;
  }
}

/// The rule would see other values than the operation did: an error, not a wrong gradient.
static eng_status check_unwritten(const tape_node *node)
{
  const op_call *call = &node->call;
  if (reads_no_values(call->op)) return ENG_OK;
  const tensor *changed = NULL;
  // in FP8 it reads copies alone; of a residual the sum
  for (int k = fp8_is_linear(call) ? 3 : fp8_is_swiglu(call) || adds_before_norm(call->op) ? 2 : 0; k < call->n_in; k++)
    if (call->in[k] && call->in[k]->store->writes != node->in_writes[k]) changed = call->in[k];
  for (int k = 0; k < call->n_out; k++)
    if (call->out[k] && call->out[k]->store->writes != node->out_writes[k]) changed = call->out[k];
  if (!changed) return ENG_OK;
  return error_set(ENG_ERR_GRADIENT, "%s was written into after it was computed with; hint: write into a copy, x:keep()", tensor_text(changed));
}

static eng_status walk(void)
{
  eng_status status = ENG_OK;
  while (status == ENG_OK) {
    if (watch.on.ready && (status = tell_complete()) != ENG_OK) break;
    if (pass.cursor == 0) break;
    tape_node *node = &tape.nodes[--pass.cursor];
    grad_call g;
    if (!collect(&g, node)) continue;
    if (node->lua_id >= 0) {
      pass.pending = g;
      pass.pending_id = node->lua_id;
      return ENG_OK;
    }
    status = check_unwritten(node);
    if (status == ENG_OK) status = rules[node->call.op](&g);
    if (status != ENG_OK) error_prefix(status, "backward of %s", eng_op_name(node->call.op));
    drop_collected(&node->call);
  }
  bool retain = pass.retain && status == ENG_OK;
  finish();
  if (!retain) tape_clear();
  return status;
}

eng_status eng_backward(const eng_tensor *handle, double seed, bool retain)
{
  tensor *loss;
  ENG_TRY(tensor_get(&loss, handle));
  if (pass.running) return error_set(ENG_ERR_STATE, "backward is already running");
  if (loss->count != 1) return error_set(ENG_ERR_SHAPE, "backward: expected a loss of one element, got %s; hint: loss:sum() or loss:mean()", tensor_text(loss));
  if (!tape_holds(loss))
    return error_set(ENG_ERR_GRADIENT, loss->requires_grad && loss->node >= 0
                     ? "backward: the tape of this loss was emptied by an earlier backward; hint: backward{retain=true} the first time"
                     : "backward: nothing in this loss requires a gradient; hint: x:requires_grad(true), and no engine.no_grad() around it");
  tensor *dy;
  ENG_TRY(tensor_make(&dy, ARENA_STEP, loss->dtype, loss->ndim, loss->shape));
  if (!graph_takes_seed(dy)) ENG_TRY(transfer_set(dy, seed * carry_of(loss)));
  let_go(loss);
  hang(loss, dy);
  pass.running = true;
  pass.retain = retain;
  pass.cursor = loss->node + 1;
  pass.was_off = tape.off;
  tape.off = true;
  eng_autocast(NULL, &pass.precision);
  eng_status status = expect_gradients();
  if (status == ENG_OK) return walk();
  finish();
  return status;
}

// ---- gradients written in Lua

int64_t eng_backward_pending(void)
{
  return pass.pending_id;
}

static eng_status want_pending(void)
{
  return pass.pending_id >= 0 ? ENG_OK : error_set(ENG_ERR_STATE, "no Lua gradient is being computed");
}

eng_status eng_backward_output(eng_tensor *gradient, int output)
{
  ENG_TRY(want_pending());
  const op_call *call = pass.pending.call;
  if (output < 0 || output >= call->n_out) return error_set(ENG_ERR_VALUE, "this Lua gradient has %d outputs, not %d", call->n_out, output + 1);
  tensor *y = call->out[output];
  if (!pass.pending.dy[output]) {
    tensor *zero;
    ENG_TRY(tensor_make(&zero, ARENA_STEP, y->dtype, y->ndim, y->shape));
    ENG_TRY(transfer_clear(zero));
    hang(y, zero);
    pass.pending.dy[output] = zero;
  }
  tensor *shared;
  ENG_TRY(grad_share(&shared, pass.pending.dy[output]));
  *gradient = tensor_handle(shared);
  return ENG_OK;
}

eng_status eng_backward_input(int input, const eng_tensor *gradient)
{
  ENG_TRY(want_pending());
  const op_call *call = pass.pending.call;
  if (input < 0 || input >= call->n_in) return error_set(ENG_ERR_VALUE, "this Lua gradient has %d inputs, not %d", call->n_in, input + 1);
  tensor *dx, *shared;
  ENG_TRY(tensor_get(&dx, gradient));
  tensor *x = call->in[input];
  if (!tensor_same_shape(dx, x))
    return error_set(ENG_ERR_SHAPE, "a Lua gradient gave %s for input %d, which is %s", tensor_text(dx), input + 1, tensor_text(x));
  if (!x->requires_grad) return ENG_OK;
  ENG_TRY(grad_share(&shared, dx));
  return grad_emit(&pass.pending, input, shared);
}

eng_status eng_backward_resume(void)
{
  ENG_TRY(want_pending());
  drop_collected(pass.pending.call);
  pass.pending_id = -1;
  return walk();
}

// ---- leaves

eng_status eng_requires_grad(const eng_tensor *handle, bool on)
{
  tensor *x;
  ENG_TRY(tensor_get(&x, handle));
  if (tape_holds(x)) return error_set(ENG_ERR_GRADIENT, "requires_grad: %s was computed; only leaves can be marked", tensor_text(x));
  if (on && !dtype_is_float(x->dtype)) return error_set(ENG_ERR_DTYPE, "requires_grad: expected a floating-point tensor, got %s", tensor_text(x));
  x->requires_grad = on;
  if (x->parameter && x->parameter->shadow) x->parameter->shadow->requires_grad = on;
  return ENG_OK;
}

eng_status eng_gradient(eng_tensor *out, const eng_tensor *handle)
{
  tensor *x;
  *out = (eng_tensor){0, 0};
  ENG_TRY(tensor_get(&x, handle));
  tensor *dx = x->gradient;
  if (x->parameter) {
    const parameter *p = x->parameter;
    if (p->has_gradient && p->set->divided && !p->set->kept)
      return error_set(ENG_ERR_STATE, "the gradient of %s is divided among ranks (zero=2), and no rank has all of it; hint: zero=0", p->name);
    dx = p->has_gradient ? p->gradient : NULL;
  }
  if (!dx) return ENG_OK;
  tensor *shared;
  ENG_TRY(grad_share(&shared, dx));
  *out = tensor_handle(shared);
  return ENG_OK;
}

eng_status eng_clear_gradient(const eng_tensor *handle)
{
  tensor *x;
  ENG_TRY(tensor_get(&x, handle));
  if (x->parameter) params_forget(x->parameter);
  else if (x->node < 0) {
    let_go(x);
    for (int i = 0; i < leaves.length; i++)
      if (leaves.items[i].x == x) leaves.items[i--] = leaves.items[--leaves.length];
  }
  return ENG_OK;
}
