// Hash tables of texts and of pairs, and a trie whose edges are a table of pairs. See tokenizer.h.
// Called by tokenizer.c, bpe.c, unigram.c and words.c.
#include "tokenizer.h"

#include <stdlib.h>

// ---- pairs

static void pairs_put(pair *slots, int64_t room, pair entry)
{
  uint64_t slot = mix(entry.key);
  while (slots[slot & (uint64_t)(room - 1)].key != ~0ull) slot++;
  slots[slot & (uint64_t)(room - 1)] = entry;
}

bool pairs_set(pairs *table, uint64_t key, uint32_t rank, uint32_t id)
{
  pair *known = (pair *)pairs_find(table, key);
  if (known) {
    known->rank = rank;
    known->id = id;
    return true;
  }
  if (table->count * 2 >= table->room) {
    int64_t room = table->room ? table->room * 2 : 1024;
    pair *slots = malloc((size_t)room * sizeof *slots);
    if (!slots) return false;
    memset(slots, 0xFF, (size_t)room * sizeof *slots);
    for (int64_t i = 0; i < table->room; i++)
      if (table->slots[i].key != ~0ull) pairs_put(slots, room, table->slots[i]);
    free(table->slots);
    table->slots = slots;
    table->room = room;
  }
  pairs_put(table->slots, table->room, (pair){ .key = key, .rank = rank, .id = id });
  table->count++;
  return true;
}

void pairs_free(pairs *table)
{
  free(table->slots);
  *table = (pairs){ 0 };
}

// ---- texts

// Returns the index of a text, or -1. *key becomes the text's key in table->index: its hash or, if
// that is the key of another text, the next number that is not.
static int64_t index_of(const texts *table, const char *text, int64_t size, uint64_t *key)
{
  *key = eng_hash64(text, size) >> 1;        // never ~0, which is not a key
  for (const pair *p; (p = pairs_find(&table->index, *key)) != NULL; ++*key) {
    const struct text_entry *e = &table->list[p->id];
    if (e->size == size && memcmp(table->pool.data + e->at, text, (size_t)size) == 0)
      return p->id;
  }
  return -1;
}

int64_t texts_find(const texts *table, const char *text, int64_t size)
{
  uint64_t key;
  int64_t index = index_of(table, text, size, &key);
  return index < 0 ? -1 : (int64_t)table->list[index].value;
}

bool texts_set(texts *table, const char *text, int64_t size, uint32_t value)
{
  uint64_t key;
  int64_t index = index_of(table, text, size, &key);
  if (index >= 0) {
    table->list[index].value = value;
    return true;
  }
  if (!ARRAY_GROW(table->list, table->room, table->count + 1)) return false;
  table->list[table->count] = (struct text_entry){ table->pool.size, (int32_t)size, value };
  buffer_add(&table->pool, text, size);
  if (table->pool.failed || !pairs_set(&table->index, key, 0, (uint32_t)table->count)) return false;
  table->count++;
  return true;
}

void texts_free(texts *table)
{
  buffer_free(&table->pool);
  pairs_free(&table->index);
  free(table->list);
  *table = (texts){ 0 };
}

// ---- trie

// Adds a node and returns its index, or -1 if memory runs out.
static int64_t trie_node(trie *t)
{
  if (!ARRAY_GROW(t->value, t->room, t->nodes + 1)) return -1;
  t->value[t->nodes] = -1;
  return t->nodes++;
}

bool trie_add(trie *t, const char *text, int64_t size, int32_t value)
{
  if (t->nodes == 0 && trie_node(t) < 0) return false;
  int64_t node = 0;
  for (int64_t i = 0; i < size; i++) {
    int64_t next = trie_step(t, node, (unsigned char)text[i]);
    if (next < 0) {
      next = trie_node(t);
      if (next < 0 || !pairs_set(&t->edges, (uint64_t)node << 8 | (unsigned char)text[i], 0,
                                 (uint32_t)next))
        return false;
    }
    node = next;
  }
  t->value[node] = value;
  return true;
}

int32_t trie_longest(const trie *t, int64_t node, const char *text, int64_t size, int64_t at,
                     int64_t *end)
{
  int32_t found = -1;
  while (at < size && node >= 0) {
    node = trie_step(t, node, (unsigned char)text[at++]);
    if (node < 0 || t->value[node] < 0) continue;
    found = t->value[node];
    *end = at;
  }
  return found;
}

void trie_free(trie *t)
{
  pairs_free(&t->edges);
  free(t->value);
  *t = (trie){ 0 };
}
