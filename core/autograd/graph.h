// Captured steps. See graph.c.
#ifndef ENG_GRAPH_H
#define ENG_GRAPH_H

#include "tensor/tensor.h"

/// While a step is captured: the place of a loss's gradient is noted, its value written before each
/// launch. False when none is.
bool graph_takes_seed(const tensor *seed);

#endif
