// Blocks of memory that one owner frees together. The owner makes its requests and then checks
// once, in `failed`, whether memory ran out. Called by params/, dist/, policy/, store/ and
// tokenizer/.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct heap {
  struct heap_block *first;
  bool failed;
} heap;

/// Returns room for `count` >= 0 elements of `type`, filled with zeros. If memory runs out, returns
/// NULL and sets owner->failed to true.
#define HEAP_NEW(owner, type, count) \
  ((type *)heap_take((owner), (int64_t)(count), sizeof(type)))
/// Sets `pointer` to the result of HEAP_NEW for the type that it points to.
#define HEAP_TAKE(owner, pointer, count) \
  ((pointer) = heap_take((owner), (int64_t)(count), sizeof *(pointer)))
void *heap_take(heap *owner, int64_t count, size_t size);

/// Returns a copy of `size` bytes of text with a final 0. If memory runs out, does what HEAP_NEW
/// does.
char *heap_text(heap *owner, const char *text, int64_t size);

/// Frees all blocks.
void heap_free(heap *owner);
