// The tape: the recorded operations of a step, in order. Written by op.c, the FP8 layers and, for
// gradients written in Lua, by Lua; read by this folder, fp8/ and dist/. See tape.c.
#pragma once

#include "device/backend.h"

/// One recorded operation. It points to its tensors, which live as long as the step.
typedef struct tape_node {
  op_call call;
  int64_t lua_id;       // >= 0: a Lua gradient; call.op is -1
  // relative scale of the outputs' gradients (eng_gradient_relative_scale)
  double  relative_scale;
  // storage.writes of each input and output when the call was recorded
  uint32_t in_writes[ENG_OP_INPUTS], out_writes[ENG_OP_OUTPUTS];
  // The rest is for running the operation again (checkpoint.c). segment: 1 + the index of the
  // segment's first node; 0: none. chosen: the operation runs again. precision: autocast's
  // settings. drawn: the number of Philox blocks drawn before this operation.
  int32_t       segment;
  bool          chosen;
  eng_precision precision;
  uint64_t      drawn;
} tape_node;

/// Whether to record a call: recording is on, the tape is not frozen (or a node runs again), the
/// operation is differentiable, and an input requires a gradient.
bool tape_wants(const op_call *call);
eng_status tape_record(const op_call *call);
/// Whether a recorded operation computed x.
bool tape_holds(const tensor *x);
static inline bool tape_empty(void) { return tensor_tape_length == 0; }
/// tape_at returns node i, and tape_call its call. call.op is -1 for a Lua gradient.
const tape_node *tape_at(int i);
const op_call *tape_call(int i);
/// Stores autocast's settings and the current number of drawn Philox blocks, for the node of the
/// operation that is about to run.
void tape_note(const eng_precision *precision);
/// The open segment, numbered as in tape_node; 0: none. Set by checkpoint.c.
extern int tape_segment;
/// Makes the next operation recompute node `node`: the tape does not record the operation, and the
/// memory of its outputs moves to those outputs of the node that were freed. -1 ends this mode.
void tape_again(int node);
/// Chooses whether a node of a segment runs again.
void tape_choose(int node, bool on);
bool tape_runs_again(void);
/// Finds a tensor that a script has modified since the node was recorded, among the inputs in the
/// mask `reads` and the outputs in the mask `saves`. Returns NULL if there is none.
const tensor *tape_modified(const tape_node *node, int reads, int saves);
/// Fails with GRADIENT if tape_modified finds a tensor. The gradient rule, or the operation when it
/// runs again, would read the tensor and silently compute wrong values.
eng_status tape_check_unmodified(const tape_node *node, int reads, int saves);
/// Whether a node refers to a tensor at index `mark` or later in the step's list of tensors.
bool tape_reaches(int mark);
/// While the tape is frozen, it records nothing. Used by backward, which has pointers to nodes.
void tape_freeze(bool on);
/// Empties the tape and drops the gradients of its outputs.
void tape_clear(void);
/// Whether one of the nodes first .. last - 1 may read this memory, in its gradient rule or when
/// its operation runs again (tape_bytes.c).
bool tape_reads(const storage *store, int first, int last);
/// Called by the backward pass when the nodes from `cursor` on are done. If node cursor - 1 is the
/// last of a segment, recomputes the tensors that the gradient rules of that segment read. If a
/// segment begins at the cursor, frees the tensors of that segment (checkpoint.c).
eng_status checkpoint_reach(int cursor);
