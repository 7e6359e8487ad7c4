// Arenas: the memory of tensors. Each memory space (the host, a card) has its own set of arenas. An
// arena takes large chunks from the system and hands out 64-byte aligned pieces; the next request
// of the same size reuses a freed piece. A training step requests the same sizes every time, so
// after the first step nothing more is taken from the system. Owns all tensor memory. Called by
// tensor.c, pool.c, device/, params/, autograd/, fp8/ and dist/, and by kernels (scratch).
#pragma once

#include "engine.h"

typedef enum arena_id {
  ARENA_PARAMETER,   // weights and their low-precision copies: flat buffers
  // gradients, in a flat buffer; with ZeRO-2 and 3, this rank's pieces and gradients to be sent
  ARENA_GRADIENT,
  ARENA_OPTIMIZER,   // moments and compensations
  ARENA_MESSAGE,     // messages between ranks: gradient buckets in flight, rows of experts
  ARENA_KEPT,        // tensors made outside a step or by keep()
  ARENA_STEP,        // activations and gradients of a step; reset at the step's end
  ARENA_SCRATCH,     // a kernel's work space, freed when the kernel returns
  ARENA_COUNT
} arena_id;

/// Memory spaces. A tensor's memory belongs to one space, and a device computes in one space.
enum { SPACE_HOST = 0, SPACE_CUDA = 1, SPACE_COUNT = 2 };

/// The memory functions of a space other than the host's. backend.h describes them.
typedef struct arena_source {
  void   *(*take)(int64_t bytes);
  void    (*give)(void *memory, int64_t bytes);
  int64_t (*capacity)(void);
  /// Reports memory that was handed out (`out` is true; its contents are undefined) or freed, in
  /// the order of the device's work. NULL: nothing is reported. The emulated card
  /// (spec/cuda/emulator/) finds accesses outside of tensors with these reports.
  void    (*mark)(void *memory, int64_t bytes, bool out);
} arena_source;

/// Sets the memory functions of a space other than the host's, before its first allocation.
void arena_register(int space, const arena_source *source);
/// Makes a memory space current: arena_alloc allocates there.
void arena_use(int space);
/// Returns the current memory space.
int arena_space(void);
/// Adds `by` to the pin count of a space. While the count is above 0, step and scratch memory stays
/// allocated, because a captured step refers to it.
void arena_pin(int space, int by);

/// Allocates at least `bytes` bytes, 64-byte aligned (256 on a card), contents undefined. A request
/// of 0 bytes gets a piece, too. On failure returns NULL with the error set (MEMORY, with the arena
/// table in the text).
void *arena_alloc_in(int space, arena_id id, int64_t bytes);
/// Frees a piece of `bytes` bytes; a later request of the same size reuses it. NULL is allowed.
void arena_free_in(int space, arena_id id, void *piece, int64_t bytes);

/// Allocate and free in the current memory space.
static inline void *arena_alloc(arena_id id, int64_t bytes)
{ return arena_alloc_in(arena_space(), id, bytes); }
static inline void arena_free(arena_id id, void *piece, int64_t bytes)
{ arena_free_in(arena_space(), id, piece, bytes); }

/// arena_pages_give returns whole pages inside a lasting piece of host memory to the system; the
/// piece stays allocated. arena_pages_take makes these pages usable again, contents undefined. Both
/// adjust the arena's count of bytes in use.
void arena_pages_give(arena_id id, void *pages, int64_t bytes);
void arena_pages_take(arena_id id, void *pages, int64_t bytes);
