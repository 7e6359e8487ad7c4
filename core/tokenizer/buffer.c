// Growing buffers of bytes and of ids, the model's scratch memory, and the repair of malformed
// UTF-8. See tokenizer.h. Called by this folder.
#include "tokenizer.h"

#include <stdlib.h>

// The largest size of a buffer, in bytes. Steps can lengthen a text, but no real text needs 2 GiB.
static const int64_t LARGEST = (int64_t)1 << 31;

eng_status no_memory(void) { return error_set(ENG_ERR_MEMORY, "tokenizer: out of memory"); }

char *buffer_more(buffer *b, int64_t bytes)
{
  int64_t needed = b->size + bytes > 0 ? b->size + bytes : 1;
  if (needed > LARGEST || !ARRAY_GROW(b->data, b->room, needed)) {
    b->failed = true;
    return NULL;
  }
  return b->data + b->size;
}

void buffer_add(buffer *b, const char *data, int64_t size)
{
  char *at = buffer_more(b, size);
  if (!at) return;
  if (size > 0) memcpy(at, data, (size_t)size);
  b->size += size;
}

void buffer_free(buffer *b)
{
  free(b->data);
  *b = (buffer){ 0 };
}

void ids_grow(ids *list, int64_t more)
{ if (!ARRAY_GROW(list->data, list->room, list->size + more)) list->failed = true; }

void *scratch_of(eng_tokenizer *t, int64_t bytes)
{
  if (t->scratch_room < bytes) {
    free(t->scratch);
    t->scratch = malloc((size_t)bytes);
    t->scratch_room = t->scratch ? bytes : 0;
  }
  return t->scratch;
}

bool utf8_repair(buffer *out, const char *text, int64_t size)
{
  int64_t good = utf8_valid(text, size);
  if (good == size) return false;
  while (size > 0) {
    buffer_add(out, text, good);
    text += good;
    size -= good;
    if (size == 0) break;
    buffer_add(out, "\xEF\xBF\xBD", 3);
    int bad = -utf8_length(text, size);
    text += bad;
    size -= bad;
    good = utf8_valid(text, size);
  }
  return true;
}
