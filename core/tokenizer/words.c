// Encodes words, with a cache of words seen before. A byte-pair word of more than UNCUT bytes is
// cut between two known characters that no merge joins (bpe.c). Its parts are encoded and cached
// separately; their ids in order are the ids of the whole word. Cutting speeds up tokenizers that
// treat a whole text as one word (Llama 2). Called by split.c and, to build the tables, by
// tokenizer.c.
#include "tokenizer.h"

#include <stdio.h>
#include <stdlib.h>

enum {
  UNCUT = 40,                  // words of at most this many bytes are not cut
  CACHE_SLOTS = 1 << 16,
  CACHE_BYTES = 1 << 22,       // limits the bytes of the cached words, and the number of their ids
  CACHE_WORD = 96              // the longest word that is cached, in bytes
};

eng_status words_ready(eng_tokenizer *t)
{
  for (int b = 0; b < 256; b++) {
    char name[8];
    snprintf(name, sizeof name, "<0x%02X>", (unsigned)b);
    t->byte_id[b] = texts_find(&t->vocab, name, 6);
  }
  t->cache.slots = calloc(CACHE_SLOTS, sizeof *t->cache.slots);
  if (!t->cache.slots) return no_memory();
  if (t->model == ENG_TOKENS_BPE) return bpe_ready(t);
  return t->model == ENG_TOKENS_WORDS ? ENG_OK : pieces_ready(t);
}

static eng_status word_model(eng_tokenizer *t, const char *word, int64_t size)
{
  FAIL_IF(size > ENG_TOKENS_MAX_WORD, ENG_ERR_VALUE, "tokenizer: a word has %lld bytes, expected "
          "at most %d; hint: encode the text in parts", (long long)size, (int)ENG_TOKENS_MAX_WORD);
  switch (t->model) {
  case ENG_TOKENS_BPE: return bpe_word(t, word, size);
  case ENG_TOKENS_UNIGRAM: return unigram_word(t, word, size);
  case ENG_TOKENS_WORDPIECE: return wordpiece_word(t, word, size);
  default: break;
  }
  int64_t id = texts_find(&t->vocab, word, size);
  if (id < 0) id = t->unknown;
  if (id < 0) return unknown_missing(word, size);
  ids_add(&t->out, (uint32_t)id);
  return ENG_OK;
}

static eng_status word_cached(eng_tokenizer *t, const char *word, int64_t size)
{
  if (size > CACHE_WORD) return word_model(t, word, size);
  word_cache *cache = &t->cache;
  uint64_t hash = eng_hash64(word, size);
  struct cached *slot = &cache->slots[hash & (CACHE_SLOTS - 1)];
  if (slot->size == size && slot->hash == hash &&
      memcmp(cache->keys.data + slot->at, word, (size_t)size) == 0) {
    ids_grow(&t->out, slot->n);
    for (int32_t i = 0; i < slot->n; i++) ids_add(&t->out, cache->values.data[slot->first + i]);
    return ENG_OK;
  }
  int64_t first = t->out.size;
  ENG_TRY(word_model(t, word, size));
  int64_t n = t->out.size - first;
  if (cache->keys.size + size > CACHE_BYTES || cache->values.size + n > CACHE_BYTES) {
    memset(cache->slots, 0, CACHE_SLOTS * sizeof *cache->slots);
    cache->keys.size = cache->values.size = 0;
  }
  *slot = (struct cached){ hash, cache->keys.size, (int32_t)size, (int32_t)cache->values.size,
                           (int32_t)n };
  buffer_add(&cache->keys, word, size);
  ids_grow(&cache->values, n);
  for (int64_t i = 0; i < n; i++) ids_add(&cache->values, t->out.data[first + i]);
  if (cache->keys.failed || cache->values.failed) slot->size = 0;
  return ENG_OK;
}

eng_status word_encode(eng_tokenizer *t, const char *word, int64_t size)
{
  if (t->model != ENG_TOKENS_BPE || !t->cuts || size <= UNCUT)
    return word_cached(t, word, size);
  int64_t start = 0;
  uint64_t before = 0;
  bool known_before = false;
  for (int64_t at = 0; at < size;) {
    int n;
    uint32_t c = char_at(t, word + at, &n);
    bool known = t->char_id[c] != 0;          // no cut beside an unknown character
    if (known && known_before && !pairs_find(&t->bigrams, before << 32 | c)) {
      ENG_TRY(word_cached(t, word + start, at - start));
      start = at;
    }
    before = c;
    known_before = known;
    at += n;
  }
  return word_cached(t, word + start, size - start);
}
