// Activation checkpointing: segments of the tape that keep only their results. See checkpoint.c.
#pragma once

#include "tape.h"

/// Called by the backward pass when nodes from `cursor` on are done. If the node before is the last
/// of a segment, computes the tensors again that the segment's gradient rules read. Frees those of
/// the segment that begins at the cursor.
eng_status checkpoint_reach(int cursor);
