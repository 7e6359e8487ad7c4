// Steps and scopes. See step.c.
#pragma once

#include "tensor/arena.h"

/// The arena of a new tensor: ARENA_STEP inside a step or scope. Outside, tensors from a factory
/// (such as engine.zeros) get ARENA_KEPT, others ARENA_STEP.
arena_id step_home(bool factory);
