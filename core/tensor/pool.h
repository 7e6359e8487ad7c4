// A pool: pieces of memory of any size that are taken and given back in any order, out of few large
// blocks of an arena, so that the memory in use is what lies in pieces at one time and not what
// passes through. Neighbours that were given back are one again. Works for memory that the host
// cannot look into, too. Owns its blocks. Called by comm_*.c.
#ifndef ENG_POOL_H
#define ENG_POOL_H

#include "arena.h"

typedef struct pool_block { char *memory; int64_t bytes; } pool_block;
typedef struct pool_gap { char *at; int64_t bytes; int32_t block; } pool_gap;

typedef struct pool {
  int32_t     space;              // whose memory
  arena_id    arena;
  int64_t     block_bytes;        // a block at least
  int32_t     most_blocks;        // 0: as many as it takes
  // there is no memory: where pieces would lie is all that is wanted
  bool        imagined;
  int32_t     n_blocks, n_gaps, room_gaps, room_blocks, pieces;
  pool_block *block;
  pool_gap   *gap;                // by block and place
} pool;

enum { POOL_ALIGNMENT = 256 };

/// What a piece of `bytes` takes of a block.
static inline int64_t pool_rounded(int64_t bytes)
{
  return (bytes > 0 ? bytes + POOL_ALIGNMENT - 1 : POOL_ALIGNMENT) / POOL_ALIGNMENT *
         POOL_ALIGNMENT;
}

/// A piece, contents undefined. *out is NULL where all blocks there may be have no gap that is
/// large enough; a piece larger than block_bytes gets a block of its own where there may be
/// another. Errors: MEMORY.
eng_status pool_take(void **out, pool *from, int64_t bytes);
void pool_give(pool *to, void *piece, int64_t bytes);
/// Gives the blocks back, whatever lies in them.
void pool_free(pool *p);

#endif
