// Activation checkpointing. A segment is a part of the tape, such as a block of a model. When it
// ends, the tensors of its nodes are freed, except its results and tensors of up to SMALL bytes.
// Before the backward pass enters the segment, the segment's operations run again with the inputs,
// attributes, random numbers and precision of their nodes, so the results are the same bit for bit.
// An operation does not run again if nothing needs its outputs: neither a gradient rule nor another
// operation that runs again. An operation whose gradient is written in Lua never runs again,
// because its outputs are not freed. Owns nothing: tape.c has the nodes and the open segment.
// Called by Lua and by backward.c.
#include "base/error.h"
#include "op.h"
#include "tape.h"

enum { SMALL = 256 };   // bytes

bool eng_checkpoint_begin(void)
{
  bool recording = eng_grad_enabled(false);
  eng_grad_enabled(recording);
  if (!recording || tape_segment) return false;
  tape_segment = tensor_tape_length + 1;
  return true;
}

/// Frees the memory of the tensors that a segment computed; `first` is the index of its first node.
static void free_segment(int first)
{
  int segment = first + 1;
  for (int i = first; i < tensor_tape_length && tape_at(i)->segment == segment; i++)
    for (int k = 0; k < tape_call(i)->n_out; k++) {
      tensor *x = tape_call(i)->out[k];
      if (!x || x->store->segment != segment || !x->store->memory) continue;
      arena_free_in(x->store->space, ARENA_STEP, x->store->memory, x->store->bytes);
      x->store->memory = NULL;
      x->store->bytes = 0;
    }
}

eng_status eng_checkpoint_end(const eng_tensor *results, int n)
{
  int segment = tape_segment;
  tape_segment = 0;
  for (int k = 0; segment && k < n; k++) {
    tensor *x;
    ENG_TRY(tensor_get(&x, &results[k]));
    if (x->store->segment == segment) x->store->segment = 0;
  }
  if (!segment || n < 0) return ENG_OK;
  for (int i = segment - 1; i < tensor_tape_length; i++) {
    const op_call *call = tape_call(i);
    for (int k = 0; k < call->n_in; k++)   // keeps inputs that no recorded operation computed
      if (call->in[k] && !tape_holds(call->in[k]) && call->in[k]->store->segment == segment)
        call->in[k]->store->segment = 0;
    for (int k = 0; k < call->n_out; k++)
      if (call->out[k] && call->out[k]->store->memory && call->out[k]->store->bytes <= SMALL)
        call->out[k]->store->segment = 0;
  }
  free_segment(segment - 1);
  return ENG_OK;
}

static eng_status run_node(int i)
{
  const tape_node *node = tape_at(i);
  uint64_t seed, drawn;
  eng_rng_get(&seed, &drawn);
  eng_rng_set(seed, node->drawn);
  op_call call = node->call;
  for (int k = 0; k < ENG_OP_OUTPUTS; k++) call.out[k] = NULL;
  eng_autocast(&node->precision, NULL);
  tape_again(i);
  bool recording = eng_grad_enabled(true);
  eng_status status = tape_check_unmodified(node, ~0, 0);
  if (status == ENG_OK) status = op_run(&call);
  eng_grad_enabled(recording);
  tape_again(-1);
  eng_autocast(NULL, NULL);
  eng_rng_set(seed, drawn);
  return error_prefix(status, "recomputing %s of a checkpointed module",
                      eng_op_name(node->call.op));
}

/// Runs operations of the nodes first .. last again. An operation runs if one of its outputs was
/// freed and will be read, by a gradient rule or by another operation that runs again.
static eng_status run_again(int first, int last)
{
  bool all = false;   // the segment has a Lua gradient, which may read any tensor
  for (int i = first; i <= last; i++) all |= tape_call(i)->op < 0;
  // from the last node to the first; `awaited` marks memory that a later node reads, in its
  // gradient rule or when it runs again
  for (int i = last; i >= first; i--) {
    const op_call *call = tape_call(i);
    if (call->op < 0) continue;
    const eng_op_info *info = &op_table[call->op].about;
    const int reads = all ? ~0 : info->reads, saves = all ? ~0 : info->saves;
    bool runs = false;
    for (int k = 0; k < call->n_out; k++) {
      const tensor *x = call->out[k];
      runs |= x && x->store->segment == first + 1 && !x->store->memory &&
              (x->store->awaited || saves >> k & 1);
    }
    tape_choose(i, runs);
    for (int k = 0; k < call->n_in; k++)
      if (call->in[k] && (runs || reads >> k & 1)) call->in[k]->store->awaited = true;
  }
  for (int i = first; i <= last; i++)
    if (tape_at(i)->chosen) ENG_TRY(run_node(i));
  return ENG_OK;
}

eng_status checkpoint_reach(int cursor)
{
  int after = cursor < tensor_tape_length ? tape_at(cursor)->segment : 0,
      segment = cursor > 0 ? tape_at(cursor - 1)->segment : 0;
  if (after == cursor + 1) free_segment(cursor);
  return segment && segment != after ? run_again(segment - 1, cursor - 1) : ENG_OK;
}
