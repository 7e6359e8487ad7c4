// Steps and scopes. See step.c.
#ifndef ENG_STEP_H
#define ENG_STEP_H

#include "tensor/arena.h"

/// The arena of a new tensor: the step's inside a step or scope; outside, a factory's tensors are
/// kept.
arena_id step_home(bool factory);

#endif
