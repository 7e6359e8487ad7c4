// The tape: which operations the step ran, in order, so that backward() can walk them in reverse.
// Recorded by op.c and by the FP8 layers; read by backward.c. See tape.c.
#ifndef ENG_TAPE_H
#define ENG_TAPE_H

#include "device/backend.h"

/// One recorded operation. Tensors are held by pointer: they live as long as the step.
typedef struct tape_node {
  op_call call;
  int64_t lua_id;       // >= 0: a gradient that Lua computes; call.op is -1
  // what the gradients of its outputs carry beside the seed (eng_gradient_carry)
  double  carry;
  // storage.writes when it was recorded
  uint32_t in_writes[ENG_OP_INPUTS], out_writes[ENG_OP_OUTPUTS];
} tape_node;

/// Whether recording is on and some input requires a gradient.
bool tape_wants(const op_call *call);
eng_status tape_record(const op_call *call);
/// Whether the tape has the operation that made x.
bool tape_holds(const tensor *x);
static inline bool tape_empty(void) { return tensor_tape_length == 0; }
/// Node i, and its operation, whose op is -1 for a gradient that Lua computes.
const tape_node *tape_at(int i);
const op_call *tape_call(int i);
/// Whether input k of a recorded node is unchanged since.
bool tape_unwritten(int node, int k);
/// Whether the tape names a tensor from place `mark` of the step's list on.
bool tape_reaches(int mark);
/// While frozen nothing is recorded; for backward, which points into the nodes.
void tape_freeze(bool on);
/// Empties the tape and drops the gradients of its outputs.
void tape_clear(void);
/// Makes room for one more item in a list of `length`.
eng_status tape_grow(void **items, int length, int *capacity, size_t size);

#endif
