// Parameter sets: flat buffers of weights, gradients and low-precision weights. See engine.h.
// Called by op.c (which low-precision copy to use), tape.c (where a gradient goes).
#ifndef ENG_PARAMS_H
#define ENG_PARAMS_H

#include "backend.h"

/// A member of a parameter set; tensor.parameter points here.
typedef struct parameter {
  eng_params *set;
  int32_t     index;
  char       *name;
  tensor     *value;          // the f32 master, the leaf that scripts hold
  tensor     *shadow;         // low-precision weights, or NULL; a leaf whose gradient is this parameter's
  tensor     *gradient;       // view of the flat gradient buffer, in gradient dtype
  bool        has_gradient;   // something was accumulated since the last zero_grad
} parameter;

#endif
