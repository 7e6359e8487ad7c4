// Steps and scopes. See step.c. Included by step.c and tensor_calls.c.
#pragma once

#include "tensor/arena.h"

/// The arena for a tensor that a script creates now, for example with engine.zeros: ARENA_STEP
/// inside a step or scope, ARENA_KEPT outside.
arena_id step_home(void);
