// The backward pass: runs the gradient rule of each node of the tape, from the last node to the
// first. At a node with a Lua gradient the pass returns to Lua, which computes the gradient and
// resumes the pass. Owns the pass and the table of rules. Called by Lua, step.c and trap.c. dist/
// sets the watch (backward.h), and fp8/ registers rules.
#include "backward.h"

#include "base/array.h"
#include "base/error.h"
#include "device/transfer.h"
#include "gradient.h"
#include "op.h"
#include "params/params.h"

// Declares every rule. The names `none` and `registered` of ops.def become null pointers.
#define ENG_OP(name, inputs, outputs, layout, cast, shape, gradient, ...) grad_rule grad_##gradient;
#include "ops.def"
#define grad_none NULL
#define grad_registered NULL
static grad_rule *rules[ENG_OP_COUNT] = {
#define ENG_OP(name, inputs, outputs, layout, cast, shape, gradient, ...) \
  [ENG_OP_##name] = grad_##gradient,
#include "ops.def"
};

void grad_register(int op, grad_rule *rule) { rules[op] = rule; }

static struct {
  bool running, retain;        // retain: the tape is kept after the pass
  bool was_recording;          // whether recording was on before backward began
  eng_precision precision;     // autocast's settings before backward
  int cursor;                  // nodes from cursor on are done; the next node is cursor - 1
  grad_call pending;           // the Lua node at which the pass has stopped
  int64_t pending_id;          // -1: none
} pass = {.pending_id = -1};

// Parameters, each with the index of the first node that reads it, in ascending order of this
// index. Once the pass has processed that node, the parameter's gradient is complete.
typedef struct due { parameter *p; int node; } due;
static struct { backward_watch on; due *items; int length; int64_t room; } watch;

// ---- the backward pass

void backward_set_watch(const backward_watch *on)
{
  watch.on = on ? *on : (backward_watch){0};
  watch.length = 0;
  gradient_set_place(watch.on.place, watch.on.data);
}

/// Lists the parameters that nodes before the cursor read, and calls watch.on.begins.
static eng_status expect_gradients(void)
{
  watch.length = 0;
  for (int i = 0; watch.on.ready && i < pass.cursor; i++) {
    const op_call *call = tape_call(i);
    for (int k = 0; k < call->n_in; k++) {
      parameter *p = call->in[k] ? call->in[k]->parameter : NULL;
      if (!p || p->expected) continue;
      FAIL_IF(!ARRAY_GROW(watch.items, watch.room, watch.length + 1), ENG_ERR_MEMORY,
              "out of memory for the list of expected gradients");
      watch.items[watch.length++] = (due){p, i};
      p->expected = true;
    }
  }
  eng_status status = watch.on.begins ? watch.on.begins(watch.on.data) : ENG_OK;
  for (int i = 0; i < watch.length; i++) watch.items[i].p->expected = false;
  return status;
}

/// Calls watch.on.ready for each gradient that is now complete, because no node before the cursor
/// adds to it. Then calls watch.on.between.
static eng_status report_complete(void)
{
  while (watch.length > 0 && watch.items[watch.length - 1].node >= pass.cursor)
    ENG_TRY(watch.on.ready(watch.on.data, watch.items[--watch.length].p));
  return watch.on.between ? watch.on.between(watch.on.data) : ENG_OK;
}

static void finish(void)
{
  backward_set_watch(NULL);
  eng_grad_enabled(pass.was_recording);
  tape_freeze(false);
  eng_autocast(&pass.precision, NULL);
  pass.running = false;
  pass.pending_id = -1;
}

int backward_node(int *op)
{
  if (!pass.running || pass.cursor >= tensor_tape_length) return -1;
  if (op) *op = tape_call(pass.cursor)->op;
  return pass.cursor;
}

void eng_backward_abort(void)
{
  backward_set_watch(NULL);
  if (!pass.running) return;
  finish();
  tape_clear();
}

/// Collects the gradients of a node's outputs. Returns false if there are none.
static bool collect(grad_call *g, const tape_node *node)
{
  bool any = false;
  const op_call *call = &node->call;
  *g = (grad_call){.call = call, .relative_scale = node->relative_scale,
                   .last = !pass.retain};
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
    if (call->out[k]) gradient_drop(call->out[k]);
}

static eng_status walk(void)
{
  eng_status status = ENG_OK;
  while (status == ENG_OK) {
    if (watch.on.ready && (status = report_complete()) != ENG_OK) break;
    if ((status = checkpoint_reach(pass.cursor)) != ENG_OK) break;
    if (pass.cursor == 0) break;
    const tape_node *node = tape_at(--pass.cursor);
    grad_call g;
    if (!collect(&g, node)) continue;
    if (node->lua_id >= 0) {
      pass.pending = g;
      pass.pending_id = node->lua_id;
      return ENG_OK;
    }
    const eng_op_info *info = &op_table[node->call.op].about;
    status = tape_check_unmodified(node, info->reads, info->saves);
    if (status == ENG_OK) status = rules[node->call.op](&g);
    error_prefix(status, "backward of %s", eng_op_name(node->call.op));
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
  FAIL_IF(pass.running, ENG_ERR_STATE, "backward: another backward pass is already running; "
          "hint: do not call backward() inside the gradient of a custom operation");
  FAIL_IF(loss->count != 1, ENG_ERR_SHAPE, "backward: expected a loss of one element, got %s; "
          "hint: loss:sum() or loss:mean()", tensor_text(loss));
  if (!tape_holds(loss))
    return error_set(ENG_ERR_GRADIENT,
                     loss->requires_grad && loss->node >= 0
                       ? "backward: an earlier backward emptied the tape of this loss; "
                         "hint: backward{retain=true} in the earlier call"
                     : loss->requires_grad
                       ? "backward: expected a loss that operations computed, got a leaf"
                       : "backward: nothing in this loss requires a gradient; hint: "
                         "x:requires_grad(true), and no engine.no_grad() around the forward pass");
  tensor *dy;
  ENG_TRY(tensor_make(&dy, ARENA_STEP, loss->dtype, loss->ndim, loss->shape));
  if (!capture_takes_seed(dy)) ENG_TRY(transfer_set(dy, seed * gradient_relative_scale(loss)));
  gradient_drop(loss);
  gradient_attach(loss, dy);
  pass.running = true;
  pass.retain = retain;
  pass.cursor = loss->node + 1;
  pass.was_recording = eng_grad_enabled(false);
  tape_freeze(true);
  eng_autocast(NULL, &pass.precision);
  eng_status status = expect_gradients();
  if (status == ENG_OK) return walk();
  finish();
  return status;
}

// ---- gradients written in Lua

int64_t eng_backward_pending(void) { return pass.pending_id; }

static eng_status want_pending(void)
{
  return pass.pending_id >= 0 ? ENG_OK
                              : error_set(ENG_ERR_STATE,
                                          "no backward pass is computing the gradient of a "
                                          "custom operation now; hint: do not call "
                                          "engine.end_step() in the function that computes such a "
                                          "gradient");
}

eng_status eng_backward_output(eng_tensor *gradient, int output)
{
  ENG_TRY(want_pending());
  const op_call *call = pass.pending.call;
  FAIL_IF(output < 0 || output >= call->n_out, ENG_ERR_VALUE, "custom gradient: expected "
          "an output from 1 to %d, got %d", call->n_out, output + 1);
  tensor *y = call->out[output];
  if (!pass.pending.dy[output]) {
    tensor *zero;
    ENG_TRY(grad_zeros(&zero, y->dtype, y->ndim, y->shape));
    gradient_attach(y, zero);
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
  FAIL_IF(input < 0 || input >= call->n_in, ENG_ERR_VALUE, "custom gradient: expected an "
          "input from 1 to %d, got %d", call->n_in, input + 1);
  tensor *dx, *shared;
  ENG_TRY(tensor_get(&dx, gradient));
  tensor *x = call->in[input];
  FAIL_IF(!tensor_same_shape(dx, x), ENG_ERR_SHAPE,
          "custom gradient: got %s as the gradient of input %d; expected the shape of that "
          "input, %s", tensor_text(dx), input + 1, tensor_text(x));
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

// ---- the end of a step

void backward_end_step(void)
{
  eng_backward_abort();
  tape_clear();
  gradient_drop_leaves();
}
