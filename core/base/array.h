// Growing arrays. Called by tensor/, autograd/, fp8/, policy/, store/ and tokenizer/.
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/// Makes room for `needed` elements in the array `items`, which comes from malloc or is NULL.
/// `room` (int64_t) is the array's capacity in elements. Returns false, and changes nothing, if
/// there is no memory.
#define ARRAY_GROW(items, room, needed) array_grow(&(items), &(room), needed, sizeof *(items))

/// The function behind ARRAY_GROW. `items` is the address of the array's pointer, and `size` is the
/// number of bytes in an element.
static inline bool array_grow(void *items, int64_t *room, int64_t needed, size_t size)
{
  if (needed <= *room) return true;
  int64_t more = needed < 32 ? 64 : 2 * needed;
  void *array;
  memcpy(&array, items, sizeof array);   // `items` points to a pointer of any type
  array = realloc(array, (size_t)more * size);
  if (array == NULL) return false;
  memcpy(items, &array, sizeof array);
  *room = more;
  return true;
}
