// A list of blocks. See heap.h. Called by params/, dist/, policy/, store/ and tokenizer/.
#include "heap.h"

#include <stdlib.h>
#include <string.h>

typedef struct heap_block {
  struct heap_block *next;
  max_align_t        memory[];
} heap_block;

void *heap_take(heap *owner, int64_t count, size_t size)
{
  size_t bytes;
  bool fits = !__builtin_mul_overflow(count, size, &bytes) &&
              !__builtin_add_overflow(bytes, sizeof(heap_block), &bytes);
  heap_block *block = fits ? calloc(1, bytes) : NULL;
  if (!block) {
    owner->failed = true;
    return NULL;
  }
  block->next = owner->first;
  owner->first = block;
  return block->memory;
}

char *heap_text(heap *owner, const char *text, int64_t size)
{
  char *copy = heap_take(owner, size + 1, 1);
  if (copy && size > 0) memcpy(copy, text, (size_t)size);
  return copy;
}

void heap_free(heap *owner)
{
  while (owner->first) {
    heap_block *block = owner->first;
    owner->first = block->next;
    free(block);
  }
}
