// See array.h. Called by tensor/, autograd/, fp8/, policy/, store/ and tokenizer/.
#include "array.h"

#include <stdlib.h>
#include <string.h>

bool array_grow(void *items, int64_t *room, int64_t needed, size_t size)
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
