// Arenas: the memory that tensors live in, one set of them for each memory space: the host's, a
// card's. Each arena takes big chunks from the system and hands out 64-byte aligned pieces; a piece
// given back is used again by the next request of the same size. A training step asks for the same
// sizes every time, so after the first step nothing is taken from the system any more. Owns all
// tensor memory. Called by tensor.c, tape.c and kernels (scratch).
#ifndef ENG_ARENA_H
#define ENG_ARENA_H

#include "engine.h"

typedef enum arena_id {
  ARENA_PARAMETER,   // weights and their low-precision copies: flat buffers
  // gradients: a flat buffer; with ZeRO-2 the own pieces, and what backward writes before it is
  // sent
  ARENA_GRADIENT,
  ARENA_OPTIMIZER,   // moments
  ARENA_MESSAGE,     // gradients between ranks: buckets in flight
  ARENA_KEPT,        // tensors made outside a step or by keep()
  ARENA_STEP,        // activations and gradients of the step; reset at its end
  ARENA_SCRATCH,     // a kernel's working space, given back when it returns
  ARENA_COUNT
} arena_id;

/// Memory spaces: a tensor's memory belongs to one, and a device computes in one.
enum { SPACE_HOST = 0, SPACE_CUDA = 1, SPACE_COUNT = 2 };

/// Where a space that is not the host's gets its memory (backend.h says what the functions do).
typedef struct arena_source {
  void   *(*take)(int64_t bytes);
  void    (*give)(void *memory, int64_t bytes);
  int64_t (*capacity)(void);
  /// Reports, in order with the device's work, that bytes are allocated (contents undefined) or
  /// freed. NULL: no reports. The emulated card uses it to check its kernels.
  void    (*mark)(void *memory, int64_t bytes, bool out);
} arena_source;

/// Where a space other than the host's gets its memory from; told once, before anything is taken
/// from it.
void arena_register(int space, const arena_source *source);
/// Puts a memory space in force: the one that arena_alloc takes from.
void arena_use(int space);
/// The space in force.
int arena_space(void);
/// While a space is pinned (counted) its step and scratch memory is not given back: a captured step
/// lies there.
void arena_pin(int space, int by);

/// A piece of at least `bytes` bytes, 64-byte aligned (256 on a card), contents undefined; never
/// NULL for 0 bytes. NULL with the error set (MEMORY, with the arena table in the text) when there
/// is none.
void *arena_alloc(arena_id id, int64_t bytes);

/// The same from a space by number.
void *arena_alloc_in(int space, arena_id id, int64_t bytes);
void arena_free_in(int space, arena_id id, void *piece, int64_t bytes);

/// Gives a piece of `bytes` bytes back for use by a later request of the same size. NULL is fine.
void arena_free(arena_id id, void *piece, int64_t bytes);

/// Everything handed out since the last reset, in any space, becomes free at once.
void arena_reset(arena_id id);

#endif
