// Arenas: the memory that tensors live in. Each arena takes big chunks from the system and hands
// out 64-byte aligned pieces; a piece given back is used again by the next request of the same size.
// A training step asks for the same sizes every time, so after the first step nothing is taken from
// the system any more.
// Owns all tensor memory. Called by tensor.c, tape.c and kernels (scratch).
#ifndef ENG_ARENA_H
#define ENG_ARENA_H

#include "engine.h"

typedef enum arena_id {
  ARENA_PARAMETER,   // weights, their low-precision copies, gradients: flat buffers
  ARENA_OPTIMIZER,   // moments
  ARENA_KEPT,        // tensors made outside a step or by keep()
  ARENA_STEP,        // activations and gradients of the step; reset at its end
  ARENA_SCRATCH,     // a kernel's working space, given back when it returns
  ARENA_COUNT
} arena_id;

/// A piece of at least `bytes` bytes, 64-byte aligned, contents undefined; never NULL for 0 bytes.
/// NULL with the error set (MEMORY, with the arena table in the text) when there is none.
void *arena_alloc(arena_id id, int64_t bytes);

/// Gives a piece of `bytes` bytes back for use by a later request of the same size. NULL is fine.
void arena_free(arena_id id, void *piece, int64_t bytes);

/// Everything handed out since the last reset becomes free at once.
void arena_reset(arena_id id);

#endif
