// SentencePiece's compiled character map: a double-array trie whose values are offsets into a block
// of texts. Layout: the size of the trie in bytes (u32), the trie (u32 units), then the texts, each
// ended by a 0 byte. Called by tokenizer.c and normalize.c.
#include "tokenizer.h"

#include <stdlib.h>
#include <utf8proc.h>

struct charsmap {
  uint32_t *units;
  int64_t   n_units, size;
  char     *texts;
};

eng_status charsmap_new(struct charsmap **out, heap *memory, const char *data, int64_t size)
{
  uint32_t bytes = 0;
  if (size >= 4) memcpy(&bytes, data, 4);
  FAIL_IF(size < 4 || bytes % 4 != 0 || (int64_t)bytes > size - 4 || bytes == 0, ENG_ERR_FORMAT,
          "tokenizer: the compiled character map (precompiled_charsmap), of %lld bytes, is damaged",
          (long long)size);
  struct charsmap *map = HEAP_NEW(memory, struct charsmap, 1);
  if (!map) return no_memory();
  map->n_units = bytes / 4;
  map->size = size - 4 - bytes;
  HEAP_TAKE(memory, map->units, map->n_units);
  map->texts = heap_text(memory, data + 4 + bytes, map->size);
  if (memory->failed) return no_memory();
  memcpy(map->units, data + 4, bytes);
  FAIL_IF(utf8_valid(map->texts, map->size) < map->size, ENG_ERR_FORMAT,
          "tokenizer: the compiled character map (precompiled_charsmap) has texts that are not "
          "UTF-8");
  *out = map;
  return ENG_OK;
}

static int64_t offset_of(uint32_t unit) { return (int64_t)(unit >> 10) << ((unit & 0x200) >> 6); }

// Returns the replacement of the shortest prefix of `key` that is in the map, or NULL.
static const char *lookup(const struct charsmap *map, const char *key, int64_t size)
{
  int64_t node = offset_of(map->units[0]);
  for (int64_t i = 0; i < size && key[i]; i++) {
    node ^= (unsigned char)key[i];
    if (node >= map->n_units) return NULL;
    uint32_t unit = map->units[node];
    if ((unit & 0x800000FFu) != (unsigned char)key[i]) return NULL;
    node ^= offset_of(unit);
    if (node >= map->n_units) return NULL;
    if (unit & 0x100) {
      int64_t at = map->units[node] & 0x7FFFFFFFu;
      // a text that starts inside a character would be malformed
      return at < map->size && (map->texts[at] & 0xC0) != 0x80 ? map->texts + at : NULL;
    }
  }
  return NULL;
}

// Replaces the characters of a text. Looks up a grapheme of up to 5 bytes as a whole. If the
// grapheme is longer or not in the map, looks up its characters one by one.
void charsmap_run(const struct charsmap *map, buffer *out, const char *text, int64_t size)
{
  for (int64_t at = 0; at < size;) {
    int n;
    utf8proc_int32_t c = (utf8proc_int32_t)code_at(text + at, &n), state = 0;
    int64_t end = at + n;
    while (end < size) {
      int m;
      utf8proc_int32_t next = (utf8proc_int32_t)code_at(text + end, &m);
      if (utf8proc_grapheme_break_stateful(c, next, &state)) break;
      c = next;
      end += m;
    }
    const char *whole = end - at < 6 ? lookup(map, text + at, end - at) : NULL;
    if (whole) {
      buffer_add(out, whole, (int64_t)strlen(whole));
      at = end;
    }
    for (; at < end; at += n) {
      code_at(text + at, &n);
      const char *one = lookup(map, text + at, n);
      buffer_add(out, one ? one : text + at, one ? (int64_t)strlen(one) : n);
    }
  }
}
