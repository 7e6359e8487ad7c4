// A pool: allocates pieces of any size from a few large blocks of an arena. Pieces are freed in any
// order, and adjacent gaps are merged, so the pool needs memory only for the pieces that are in use
// at one time. The host needs no access to the memory. Owns its blocks. Called by dist/.
#pragma once

#include "arena.h"

typedef struct pool_block { char *memory; int64_t bytes; } pool_block;
typedef struct pool_gap { char *at; int64_t bytes; int32_t block; } pool_gap;

typedef struct pool {
  int32_t     space;              // memory space of the blocks
  arena_id    arena;
  int64_t     block_bytes;        // smallest size of a block
  int32_t     most_blocks;        // 0: no limit
  // true: no memory is allocated; only the positions of pieces are computed
  bool        imagined;
  int32_t     n_blocks, n_gaps, pieces;
  int64_t     room_blocks, room_gaps;
  pool_block *block;
  pool_gap   *gap;                // sorted by block and position
} pool;

enum { POOL_ALIGNMENT = 256 };

/// Returns the number of bytes that a piece of `bytes` bytes takes in a block.
static inline int64_t pool_rounded(int64_t bytes)
{
  return (bytes > 0 ? bytes + POOL_ALIGNMENT - 1 : POOL_ALIGNMENT) / POOL_ALIGNMENT *
         POOL_ALIGNMENT;
}

/// Allocates a piece, contents undefined. *out is NULL if no gap is large enough and no further
/// block is allowed. A new block has block_bytes, or the size of the piece if that is larger.
/// Errors: MEMORY.
eng_status pool_take(void **out, pool *from, int64_t bytes);
void pool_give(pool *to, void *piece, int64_t bytes);
/// Frees all blocks, including pieces still in use.
void pool_free(pool *p);
