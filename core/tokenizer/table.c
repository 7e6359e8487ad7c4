// Hash tables of texts and of pairs, and a trie whose edges are a table of pairs. See tokenizer.h.
// Called by tokenizer.c, bpe.c, unigram.c and words.c.
#include "tokenizer.h"

#include <stdlib.h>

// ---- texts

// Returns the index of a text, or -1.
static int64_t number_of(const texts *table, const char *text, int64_t size)
{
  if (table->room == 0) return -1;
  uint64_t hash = eng_hash64(text, size), high = hash & ~0xFFFFFFFFull;
  for (uint64_t slot = hash;; slot++) {
    uint64_t entry = table->slots[slot & (uint64_t)(table->room - 1)];
    if (entry == 0) return -1;
    int64_t number = (int64_t)(entry & 0xFFFFFFFFu) - 1;
    if ((entry & ~0xFFFFFFFFull) == high && table->list[number].size == size &&
        memcmp(table->pool.data + table->list[number].at, text, (size_t)size) == 0)
      return number;
  }
}

int64_t texts_find(const texts *table, const char *text, int64_t size)
{
  int64_t number = number_of(table, text, size);
  return number < 0 ? -1 : (int64_t)table->list[number].value;
}

static bool texts_grow(texts *table)
{
  int64_t room = table->room ? table->room * 2 : 1024;
  uint64_t *slots = calloc((size_t)room, sizeof *slots);
  if (!slots) return false;
  for (int64_t i = 0; i < table->room; i++) {
    uint64_t entry = table->slots[i];
    if (entry == 0) continue;
    const struct text_entry *known = &table->list[(entry & 0xFFFFFFFFu) - 1];
    uint64_t slot = eng_hash64(table->pool.data + known->at, known->size);
    while (slots[slot & (uint64_t)(room - 1)]) slot++;
    slots[slot & (uint64_t)(room - 1)] = entry;
  }
  free(table->slots);
  table->slots = slots;
  table->room = room;
  return true;
}

bool texts_set(texts *table, const char *text, int64_t size, uint32_t value)
{
  int64_t number = number_of(table, text, size);
  if (number >= 0) {
    table->list[number].value = value;
    return true;
  }
  if (table->count * 2 >= table->room && !texts_grow(table)) return false;
  if (!ARRAY_GROW(table->list, table->list_room, table->count + 1)) return false;
  table->list[table->count] = (struct text_entry){ table->pool.size, (int32_t)size, value };
  buffer_add(&table->pool, text, size);
  if (table->pool.failed) return false;
  uint64_t hash = eng_hash64(text, size), slot = hash;
  while (table->slots[slot & (uint64_t)(table->room - 1)]) slot++;
  table->count++;
  table->slots[slot & (uint64_t)(table->room - 1)] = (hash & ~0xFFFFFFFFull) |
                                                     (uint64_t)table->count;
  return true;
}

void texts_free(texts *table)
{
  buffer_free(&table->pool);
  free(table->slots);
  free(table->list);
  *table = (texts){ 0 };
}

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
