// The backward pass. See backward.c.
#ifndef ENG_BACKWARD_H
#define ENG_BACKWARD_H

#include "tape.h"

/// Reports complete gradients of parameters during backward: no operation left on the way adds to
/// them. `begins` comes first, while parameter.expected marks the parameters that will be reported;
/// `ready` is called once for each of these, as soon as its gradient is complete; `between` after
/// every operation; `place` gives memory to parameter.gradient when a gradient is to be written
/// that has none (ZeRO-2). An error ends the pass. NULL ends the watch, and so does the end of the
/// pass.
typedef struct backward_watch {
  eng_status (*begins)(void *data);
  eng_status (*ready)(void *data, struct parameter *p);
  eng_status (*between)(void *data);
  eng_status (*place)(void *data, struct parameter *p);
  void *data;
} backward_watch;
void backward_set_watch(const backward_watch *watch);

/// The node whose gradient is being computed, -1 outside of backward; `op` (may be NULL): its
/// operation, -1 for a Lua node.
int backward_node(int *op);

/// Ends a step: abandons a pass, empties the tape and drops the gradients of leaves.
void backward_end_step(void);

#endif
