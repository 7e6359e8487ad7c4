// Captured steps. See graph.c.
#ifndef ENG_GRAPH_H
#define ENG_GRAPH_H

#include "tensor/tensor.h"

/// During a capture, notes the address of the loss's gradient, whose value is written before each
/// launch. False if no capture is running.
bool graph_takes_seed(const tensor *seed);

#endif
