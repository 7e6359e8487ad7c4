// Scratch memory of a block of code. Included by kernels and by other files that take scratch
// memory. Owns nothing.
#pragma once

#include "arena.h"
#include "base/scope.h"

typedef struct scratch_piece { int space; void *memory; int64_t bytes; } scratch_piece;

/// Declares `name`, a pointer to `count` elements of scratch memory, contents undefined. The memory
/// is freed when the enclosing block ends. If memory runs out, returns ENG_ERR_MEMORY from the
/// enclosing function. SCRATCH takes the memory in the current space, SCRATCH_IN in `space`.
/// Kernels use SCRATCH: their device computes in the current space.
#define SCRATCH(type, name, count) SCRATCH_IN(arena_space(), type, name, count)
#define SCRATCH_IN(space, type, name, count)                  \
  AT_END(scratch_free) scratch_piece name##_piece =           \
    scratch_alloc((space), (int64_t)sizeof(type) * (count));  \
  if (!name##_piece.memory) return ENG_ERR_MEMORY;            \
  type *const name = name##_piece.memory

static inline scratch_piece scratch_alloc(int space, int64_t bytes)
{ return (scratch_piece){space, arena_alloc_in(space, ARENA_SCRATCH, bytes), bytes}; }
static inline void scratch_free(scratch_piece *p)
{ arena_free_in(p->space, ARENA_SCRATCH, p->memory, p->bytes); }
