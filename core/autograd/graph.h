// Captured steps. See graph.c.
#ifndef ENG_GRAPH_H
#define ENG_GRAPH_H

#include "tensor/tensor.h"

/// During a capture, stores the address of `seed`, the loss's gradient; each launch first writes
/// the gradient's value there. False if no capture is running.
bool graph_takes_seed(const tensor *seed);

#endif
