// Recording: the operations of a step, in order. See tape.h.
//
// Layers may have relative scales. The relative scale of a node applies to the gradients of its
// outputs; a parameter has its own relative scale (gradient.c). Owns the nodes. op.c and fp8/
// record operations; backward.c processes the nodes in reverse order. Called by this folder, fp8/,
// dist/ and Lua.
#include "tape.h"

#include "base/array.h"
#include "base/error.h"
#include "base/numerics.h"
#include "op.h"

static struct {
  tape_node *nodes;
  int64_t room;                // allocated nodes; the first tensor_tape_length are in use
  bool off;                    // recording is off
  // while frozen, nothing is recorded, even if recording is on: backward has pointers to nodes,
  // which must not move
  bool frozen;
  double relative_scale;       // relative scale of the nodes recorded from now on
  int again;                   // the node that runs again (checkpoint.c); -1: none
  eng_precision precision;     // set by tape_note, like `drawn`
  uint64_t drawn;
} tape = {.relative_scale = 1, .again = -1};
int tape_segment;

// ---- recording

bool tape_wants(const op_call *call)
{
  bool frozen = tape.frozen && tape.again < 0;
  if (tape.off || frozen || !op_table[call->op].differentiable) return false;
  for (int k = 0; k < call->n_in; k++)
    if (call->in[k] && call->in[k]->requires_grad) return true;
  return false;
}

/// Returns the mask of the outputs that have a gradient, without output 0.
static int later_outputs(const op_call *call)
{
  const op_info *info = &op_table[call->op];
  for (int k = 0; k < call->n_in && info->later; k++)
    if (info->later_from >> k & 1 && call->in[k]->requires_grad) return info->later;
  return 0;
}

void tape_note(const eng_precision *precision)
{
  uint64_t seed;
  if (tape.off) return;
  tape.precision = *precision;
  eng_rng_get(&seed, &tape.drawn);
}

void tape_choose(int node, bool on) { tape.nodes[node].chosen = on; }
void tape_again(int node) { tape.again = node; }
bool tape_runs_again(void) { return tape.again >= 0; }

/// Moves the memory of the call's outputs to the outputs of the node that runs again.
static eng_status give_memory(const op_call *call)
{
  const op_call *node = &tape.nodes[tape.again].call;
  for (int k = 0; k < node->n_out; k++) {
    tensor *to = node->out[k], *from = call->out[k];
    if (!to || !from || to == from) continue;
    if (to->store == from->store) {
      to->data = from->data;   // a view of recomputed memory, which has a new address
    } else if (!to->store->memory) {
      to->data = from->data;
      to->store->memory = from->store->memory;
      to->store->bytes = from->store->bytes;
      to->store->arena = from->store->arena;
      from->store->memory = NULL;
    }
    tensor_drop(from);
  }
  return ENG_OK;
}

/// Assigns the memory that a call allocated for its outputs to the open segment (checkpoint.c). The
/// outputs of an operation whose gradient is written in Lua belong to no segment.
static void mark_segment(const op_call *call)
{
  for (int k = 0; k < call->n_out; k++) {
    storage *s = call->out[k] ? call->out[k]->store : NULL;
    if (!s) continue;
    bool is_view = call->op >= 0 && op_table[call->op].layout == LAYOUT_VIEW;
    if (call->op < 0) s->segment = 0;
    else if ((!is_view || s != call->in[0]->store) && (s->arena == ARENA_STEP || !s->memory))
      s->segment = tape_segment;
  }
}

static eng_status record(const op_call *call, int64_t lua_id)
{
  if (tape.again >= 0) return give_memory(call);
  FAIL_IF(!ARRAY_GROW(tape.nodes, tape.room, tensor_tape_length + 1), ENG_ERR_MEMORY,
          "out of memory for the tape");
  int later = lua_id < 0 ? later_outputs(call) : 0;
  for (int k = 0; k < call->n_out; k++) {
    tensor *y = call->out[k];
    bool has_gradient = k == 0 || lua_id >= 0 || (later >> k & 1);
    if (!y || !dtype_is_float(y->dtype) || !has_gradient) continue;
    y->requires_grad = true;
    y->node = tensor_tape_length;
    y->output = k;
  }
  tape_node *node = &tape.nodes[tensor_tape_length++];
  *node = (tape_node){.call = *call, .lua_id = lua_id, .relative_scale = tape.relative_scale,
                      .segment = tape_segment, .precision = tape.precision, .drawn = tape.drawn};
  if (tape_segment) mark_segment(call);
  for (int k = 0; k < call->n_in; k++)
    if (call->in[k]) node->in_writes[k] = call->in[k]->store->writes;
  for (int k = 0; k < call->n_out; k++)
    if (call->out[k]) node->out_writes[k] = call->out[k]->store->writes;
  return ENG_OK;
}

eng_status tape_record(const op_call *call) { return record(call, -1); }

eng_status eng_record_lua(int64_t id, const eng_tensor *x, int n_in, const eng_tensor *y, int n_out)
{
  FAIL_IF(n_in < 1 || n_in > ENG_OP_INPUTS || n_out < 1 || n_out > ENG_OP_OUTPUTS, ENG_ERR_VALUE,
          "custom: expected 1 to %d input tensors and 1 to %d results, got %d and %d",
          ENG_OP_INPUTS, ENG_OP_OUTPUTS, n_in, n_out);
  op_call call = {.op = -1, .n_in = n_in, .n_out = n_out};
  bool wanted = false;
  for (int k = 0; k < n_in; k++) {
    ENG_TRY(tensor_find(&call.in[k], &x[k]));
    wanted |= call.in[k]->requires_grad;
  }
  for (int k = 0; k < n_out; k++) {
    ENG_TRY(tensor_get(&call.out[k], &y[k]));
    const tensor *result = call.out[k];
    bool twice = false;
    for (int l = 0; l < k; l++) twice |= result == call.out[l];
    FAIL_IF(!result->of_step || tape_holds(result) || result->requires_grad || twice,
            ENG_ERR_GRADIENT, "custom: expected result %d of forward to be a new tensor of this "
            "step, got %s, which %s; hint: x:contiguous() is new", k + 1, tensor_text(result),
            !result->of_step ? "lives longer than the step" : twice ? "is also an earlier result" :
            tape_holds(result) ? "an operation on the tape made" : "requires a gradient");
  }
  return wanted && !tape.off && !tape.frozen ? record(&call, id) : ENG_OK;
}

bool tape_holds(const tensor *x)
{
  return x->node >= 0 && x->node < tensor_tape_length &&
         tape.nodes[x->node].call.out[x->output] == x;
}

const tape_node *tape_at(int i) { return &tape.nodes[i]; }

const op_call *tape_call(int i) { return &tape.nodes[i].call; }

const tensor *tape_modified(const tape_node *node, int reads, int saves)
{
  const op_call *call = &node->call;
  for (int k = 0; k < call->n_in; k++)
    if (reads >> k & 1 && call->in[k] && call->in[k]->store->writes != node->in_writes[k])
      return call->in[k];
  for (int k = 0; k < call->n_out; k++)
    if (saves >> k & 1 && call->out[k] && call->out[k]->store->writes != node->out_writes[k])
      return call->out[k];
  return NULL;
}

eng_status tape_check_unmodified(const tape_node *node, int reads, int saves)
{
  const tensor *changed = tape_modified(node, reads, saves);
  FAIL_IF(changed, ENG_ERR_GRADIENT, "%s was modified after an operation read it or computed it; "
          "hint: x:keep() makes a copy to write into", tensor_text(changed));
  return ENG_OK;
}

bool tape_reaches(int mark)
{
  for (int i = 0; i < tensor_tape_length; i++) {
    const op_call *call = &tape.nodes[i].call;
    for (int k = 0; k < call->n_in; k++)
      if (call->in[k] && call->in[k]->step_index >= mark) return true;
    for (int k = 0; k < call->n_out; k++)
      if (call->out[k] && call->out[k]->step_index >= mark) return true;
  }
  return false;
}

int eng_tape_length(void) { return tensor_tape_length; }

void tape_freeze(bool on) { tape.frozen = on; }

bool eng_grad_enabled(bool on)
{
  bool before = !tape.off;
  tape.off = !on;
  return before;
}

eng_status eng_gradient_relative_scale(double *before, double relative)
{
  *before = tape.relative_scale;
  FAIL_IF(!f64_is_finite(relative) || !(relative > 0), ENG_ERR_VALUE,
          "expected a positive finite relative scale of gradients, got %g", relative);
  tape.relative_scale = relative;
  return ENG_OK;
}

void tape_clear(void)
{
  for (int i = 0; i < tensor_tape_length; i++)
    for (int k = 0; k < tape.nodes[i].call.n_out; k++) {
      tensor *y = tape.nodes[i].call.out[k];
      if (!y) continue;
      tensor_drop(y->gradient);
      y->gradient = NULL;
    }
  tensor_tape_length = tape_segment = 0;
}
