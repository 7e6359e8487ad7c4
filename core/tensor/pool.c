// Pools: first fit among gaps sorted by position. See pool.h. A pool has few blocks and few pieces
// (buckets of gradients), so a scan of all gaps costs little compared with the use of a piece.
// Called by dist/.
#include "pool.h"

#include "base/array.h"
#include "base/error.h"

#include <stdlib.h>
#include <string.h>

static void insert(pool *p, int at, pool_gap gap)
{
  memmove(p->gap + at + 1, p->gap + at, (size_t)(p->n_gaps - at) * sizeof *p->gap);
  p->gap[at] = gap;
  p->n_gaps++;
}

static void erase(pool *p, int at)
{
  p->n_gaps--;
  memmove(p->gap + at, p->gap + at + 1, (size_t)(p->n_gaps - at) * sizeof *p->gap);
}

/// Appends an empty block.
static eng_status add_block(pool *p, int64_t bytes)
{
  FAIL_IF(!ARRAY_GROW(p->block, p->room_blocks, p->n_blocks + 1), ENG_ERR_MEMORY,
          "out of memory for a list of %d blocks of messages or gradients", p->n_blocks + 1);
  void *memory = p->imagined ? (void *)((uintptr_t)(p->n_blocks + 1) << 44)
                             : arena_alloc_in(p->space, p->arena, bytes);
  if (!memory) return ENG_ERR_MEMORY;
  insert(p, p->n_gaps, (pool_gap){memory, bytes, p->n_blocks});
  p->block[p->n_blocks++] = (pool_block){memory, bytes};
  return ENG_OK;
}

eng_status pool_take(void **out, pool *p, int64_t bytes)
{
  *out = NULL;
  bytes = pool_rounded(bytes);
  // Reserves table entries for as many gaps as there can be, so that pool_give cannot fail: one for
  // each piece and block, including the new ones, and one that pool_give inserts before it merges.
  FAIL_IF(!ARRAY_GROW(p->gap, p->room_gaps, p->pieces + p->n_blocks + 3), ENG_ERR_MEMORY,
          "out of memory for the list of %d messages and gradients", p->pieces + 1);
  int k = 0;
  while (k < p->n_gaps && p->gap[k].bytes < bytes) k++;
  if (k == p->n_gaps) {
    if (p->most_blocks > 0 && p->n_blocks == p->most_blocks) return ENG_OK;
    ENG_TRY(add_block(p, bytes > p->block_bytes ? bytes : p->block_bytes));
  }
  pool_gap *gap = &p->gap[k];
  *out = gap->at;
  gap->at += bytes;
  gap->bytes -= bytes;
  if (gap->bytes == 0) erase(p, k);
  p->pieces++;
  return ENG_OK;
}

static int block_of(const pool *p, const char *piece)
{
  int k = 0;
  while (k + 1 < p->n_blocks &&
         !(piece >= p->block[k].memory && piece < p->block[k].memory + p->block[k].bytes))
    k++;
  return k;
}

void pool_give(pool *p, void *piece, int64_t bytes)
{
  if (!piece) return;
  pool_gap fresh = {piece, pool_rounded(bytes), block_of(p, piece)};
  int k = 0;
  while (k < p->n_gaps && (p->gap[k].block < fresh.block ||
                           (p->gap[k].block == fresh.block && p->gap[k].at < fresh.at)))
    k++;
  insert(p, k, fresh);
  p->pieces--;
  // Merges the new gap with adjacent gaps.
  if (k + 1 < p->n_gaps && p->gap[k + 1].block == fresh.block &&
      fresh.at + fresh.bytes == p->gap[k + 1].at) {
    p->gap[k].bytes += p->gap[k + 1].bytes;
    erase(p, k + 1);
  }
  if (k > 0 && p->gap[k - 1].block == fresh.block &&
      p->gap[k - 1].at + p->gap[k - 1].bytes == fresh.at) {
    p->gap[k - 1].bytes += p->gap[k].bytes;
    erase(p, k);
  }
}

void pool_free(pool *p)
{
  for (int k = 0; k < p->n_blocks && !p->imagined; k++)
    arena_free_in(p->space, p->arena, p->block[k].memory, p->block[k].bytes);
  free(p->block);
  free(p->gap);
  p->block = NULL;
  p->gap = NULL;
  p->n_blocks = p->n_gaps = p->pieces = 0;
  p->room_blocks = p->room_gaps = 0;
}
