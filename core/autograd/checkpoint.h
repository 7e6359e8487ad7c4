// Activation checkpointing: segments of the tape that keep only their results. See checkpoint.c.
#pragma once

#include "tape.h"

/// Called by the backward pass when the nodes from `cursor` on are done. If node cursor - 1 is the
/// last of a segment, recomputes the tensors that the gradient rules of that segment read. If a
/// segment begins at the cursor, frees the tensors of that segment.
eng_status checkpoint_reach(int cursor);
