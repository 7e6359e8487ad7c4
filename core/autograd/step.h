// Steps and scopes: how long tensors live. See step.c.
#ifndef ENG_STEP_H
#define ENG_STEP_H

#include "tensor/arena.h"

/// Where a new tensor lives: inside a step or scope in the step's arena; outside, what a factory
/// makes is kept.
arena_id step_home(bool factory);

#endif
