// The backward pass. See backward.c. Included by backward.c, step.c, trap.c and dist/.
#pragma once

#include "tape.h"

/// Functions to which backward reports the gradients of parameters, each as soon as no remaining
/// operation adds to it. `begins` is called first, while parameter.expected marks the parameters
/// that will be reported. `ready` is called once for each of these parameters, and `between` before
/// the first operation and after every operation. `place` allocates parameter.gradient if it has no
/// memory when a gradient is written (ZeRO-2 and 3). Each may be NULL; without `ready`, `between`
/// is not called either. An error in one of the functions ends the pass. backward_set_watch(NULL)
/// or the end of the pass removes the watch.
typedef struct backward_watch {
  eng_status (*begins)(void *data);
  eng_status (*ready)(void *data, struct parameter *p);
  eng_status (*between)(void *data);
  eng_status (*place)(void *data, struct parameter *p);
  void *data;
} backward_watch;
void backward_set_watch(const backward_watch *watch);

/// Returns the node whose gradient is being computed, or -1 outside of backward. *op receives the
/// node's operation, or -1 for a Lua node; outside of backward it is unchanged. `op` may be NULL.
int backward_node(int *op);

/// Ends a step: aborts a pass, empties the tape and drops the gradients of leaves outside parameter
/// sets.
void backward_end_step(void);
