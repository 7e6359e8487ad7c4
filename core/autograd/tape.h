// The tape: which operations the step ran, in order, so that backward() can walk them in reverse.
// Nodes are recorded by op.c; the rule of each node's operation is found in the table made from
// ops.def (grad_*.c). Owns the nodes and, while backward runs, the gradients on their way.
#ifndef ENG_TAPE_H
#define ENG_TAPE_H

#include "device/backend.h"

/// One recorded operation. Tensors are held by pointer: they live as long as the step.
typedef struct tape_node {
  op_call call;
  int64_t lua_id;       // >= 0: a gradient that Lua computes; call.op is -1
  double  carry;        // what the gradients of its outputs carry beside the seed (eng_gradient_carry)
  uint32_t in_writes[ENG_OP_INPUTS], out_writes[ENG_OP_OUTPUTS];   // storage.writes when it was recorded
} tape_node;

/// What a gradient rule works on: the node and the gradient of each of its outputs (NULL: none came).
typedef struct grad_call {
  const op_call *call;
  tensor *dy[ENG_OP_OUTPUTS];
  double  carry;        // of the node: what dy carries, and what the rule computes
} grad_call;

/// A gradient rule: computes the gradients that are wanted and hands them over with grad_emit.
typedef eng_status grad_rule(grad_call *g);

/// Whether recording is on and some input requires a gradient.
bool tape_wants(const op_call *call);
eng_status tape_record(const op_call *call);
/// Whether the tape has the operation that made x.
bool tape_holds(const tensor *x);
bool tape_empty(void);
/// Operation i of the tape; its op is -1 for a gradient that Lua computes.
const op_call *tape_call(int i);
/// Whether nobody wrote into input k of a recorded node since.
bool tape_unwritten(int node, int k);
/// One more input of a recorded node, which its gradient rule will read.
void tape_add_input(int node, tensor *x);
/// Whether the tape names a tensor from place `mark` of the step's list on.
bool tape_reaches(int mark);
/// Empties the tape and lets go of the gradients of leaves: the step is over.
void tape_end_step(void);

/// Who wants to know during backward when a parameter's gradient is complete: no operation left on the way will add to it.
/// `begins` comes first, while parameter.expected marks those that will be told of; `ready` is called once for each of these, as soon as its
/// gradient is complete; `between` after every operation; `place` when a gradient is to be written that has no memory (ZeRO-2), to give
/// it parameter.gradient. An error ends the pass. NULL ends the watch, as does the end of the pass.
typedef struct tape_watch {
  eng_status (*begins)(void *data);
  eng_status (*ready)(void *data, struct parameter *p);
  eng_status (*between)(void *data);
  eng_status (*place)(void *data, struct parameter *p);
  void *data;
} tape_watch;
void tape_set_watch(const tape_watch *watch);

/// The node whose gradient is being computed, -1 outside of backward; `op` (may be NULL): its operation, -1 for a Lua node.
int tape_backward_node(int *op);

/// True when input k exists and requires a gradient.
bool grad_wants(const grad_call *g, int k);

/// Gives the gradient of input k and takes ownership of `dx`. It is summed over broadcast
/// dimensions to the input's shape, brought from the node's carry to the input's, and rounded to the input's dtype where
/// these differ.
eng_status grad_emit(grad_call *g, int k, tensor *dx);

/// The memory where input k's gradient finally belongs, when it is a parameter: a rule can write
/// there directly (adding when *accumulate) instead of emitting. NULL otherwise, and where it carries another factor.
tensor *grad_target(grad_call *g, int k, bool *accumulate);

/// Takes that back when the rule failed to write there: a gradient exists only where there was one before.
void grad_target_failed(grad_call *g, int k, bool accumulate);

/// Another tensor over the same memory, for a gradient that goes to two places.
eng_status grad_share(tensor **out, tensor *x);

#endif
