// Cuts a pass over all parameters into blocks of at most BLOCK_ELEMENTS, so that threads share long
// and short tensors alike without a parallel region for each tensor. The cut depends only on the
// tensors, so sums per block do not depend on the number of threads. Included by gradstats.c and
// optimizer.c. Owns only the block list, in scratch memory.
#pragma once

#include "device/backend.h"
#include "base/error.h"
#include "tensor/scratch.h"

#include <omp.h>

enum {
  BLOCK_ELEMENTS = 65536,
  PARALLEL_ELEMENTS = 32768   // with fewer elements, a parallel region costs more than it saves
};

typedef struct block {
  int64_t first;     // index of the block's first element in its span
  int64_t before;    // number of elements in all earlier blocks
  int32_t span, count;   // the span's index; number of elements in the block
} block;

typedef struct block_list {
  block  *at;
  int64_t n, elements, bytes;
} block_list;

/// Lists the blocks of all spans, in order, in scratch memory. Errors: MEMORY.
static inline eng_status blocks_open(block_list *list, const param_span *spans, int n)
{
  *list = (block_list){0};
  for (int k = 0; k < n; k++) list->n += (spans[k].count + BLOCK_ELEMENTS - 1) / BLOCK_ELEMENTS;
  list->bytes = list->n * (int64_t)sizeof(block);
  list->at = arena_alloc(ARENA_SCRATCH, list->bytes);
  if (!list->at) return ENG_ERR_MEMORY;
  block *b = list->at;
  for (int k = 0; k < n; k++) {
    for (int64_t first = 0; first < spans[k].count; first += BLOCK_ELEMENTS, b++) {
      int64_t left = spans[k].count - first;
      *b =
        (block){first, list->elements, k, (int32_t)(left < BLOCK_ELEMENTS ? left : BLOCK_ELEMENTS)};
      list->elements += b->count;
    }
  }
  return ENG_OK;
}

static inline void blocks_close(block_list *list)
{ arena_free(ARENA_SCRATCH, list->at, list->bytes); }

/// Returns the index of the first block of part `part` (counted from 0) when the list is cut into
/// `parts` parts with nearly equal numbers of elements. Returns list->n if part == parts.
static inline int64_t blocks_part(const block_list *list, int part, int parts)
{
  int64_t bound = list->elements / parts * part + list->elements % parts * part / parts;
  int64_t low = 0, high = list->n;
  while (low < high) {
    int64_t middle = (low + high) / 2;
    if (list->at[middle].before < bound) low = middle + 1;
    else high = middle;
  }
  return part >= parts ? list->n : low;
}
