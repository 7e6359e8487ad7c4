// The models that look pieces up in a trie: unigram (the pieces with the largest sum of scores) and
// WordPiece (from the left, always the longest piece). See tokenizer.h. Called by words.c and
// bpe.c.
#include "tokenizer.h"

static const double UNKNOWN_PENALTY = 10;    // an unknown character scores this much less than
                                             // the token with the lowest score

eng_status pieces_ready(eng_tokenizer *t)
{
  const texts *v = &t->vocab;
  for (const struct text_entry *e = v->list; e < v->list + v->count; e++)
    if (!trie_add(&t->pieces, v->pool.data + e->at, e->size, (int32_t)e->value))
      return no_memory();
  for (int64_t i = 0; i < t->prefix_size && t->continuing >= 0; i++)
    t->continuing = trie_step(&t->pieces, t->continuing, (unsigned char)t->prefix[i]);
  return ENG_OK;
}

// ---- unknown text, in every model

eng_status unknown_missing(const char *word, int64_t size)
{
  return error_set(ENG_ERR_VALUE, "tokenizer: the vocabulary has no token for '%.*s' and no token "
                   "for unknown text", (int)(size < 40 ? size : 40), word);
}

bool fall_back(eng_tokenizer *t, const char *text, int64_t size)
{
  if (!(t->flags & ENG_TOKENS_BYTE_FALLBACK)) return false;
  for (int64_t i = 0; i < size; i++)
    if (t->byte_id[(unsigned char)text[i]] < 0) return false;
  for (int64_t i = 0; i < size; i++) ids_add(&t->out, (uint32_t)t->byte_id[(unsigned char)text[i]]);
  return true;
}

// ---- unigram

typedef struct best { double score; int32_t from, id; } best;  // from: start of the piece; -1: none

static void better(best *end, double score, int64_t from, int64_t id)
{
  if (end->from >= 0 && !(score > end->score)) return;
  *end = (best){ score, (int32_t)from, (int32_t)id };
}

// Appends the tokens of a run of unknown characters.
static void put_unknown(eng_tokenizer *t, const char *text, int64_t size)
{
  int64_t id = texts_find(&t->vocab, text, size);
  if (id < 0 && fall_back(t, text, size)) return;
  ids_add(&t->out, (uint32_t)(id >= 0 ? id : t->unknown));
}

eng_status unigram_word(eng_tokenizer *t, const char *word, int64_t size)
{
  best *end_at = scratch_of(t, (size + 1) * (int64_t)(sizeof(best) + sizeof(int32_t)));
  if (!end_at) return no_memory();
  end_at[0] = (best){ 0, 0, 0 };
  for (int64_t i = 1; i <= size; i++) end_at[i] = (best){ 0, -1, 0 };
  double unknown = t->least - UNKNOWN_PENALTY;
  for (int64_t at = 0; at < size;) {
    int n;
    code_at(word + at, &n);
    double here = end_at[at].score;
    FAIL_IF((at & 0xFFFF) < n && at > 0 && eng_interrupted() == 2, ENG_ERR_INTERRUPTED,
            "tokenizer: interrupted");
    bool single = false;
    int64_t node = 0;
    for (int64_t i = at; i < size; i++) {
      node = trie_step(&t->pieces, node, (unsigned char)word[i]);
      if (node < 0) break;
      int32_t id = t->pieces.value[node];
      if (id < 0) continue;
      better(&end_at[i + 1], t->score[id] + here, at, id);
      if (i + 1 - at == n) single = true;
    }
    if (!single) {
      if (t->unknown < 0) return unknown_missing(word + at, n);
      better(&end_at[at + n], unknown + here, at, t->unknown);
    }
    at += n;
  }
  int32_t *ends = (int32_t *)(end_at + size + 1);        // ends of the pieces, last piece first
  int64_t n = 0, at = 0, start = -1;         // start of a run of unknown characters; -1: none
  for (int64_t end = size; end > 0; end = end_at[end].from) ends[n++] = (int32_t)end;
  for (; n-- > 0; at = ends[n]) {
    int32_t id = end_at[ends[n]].id;
    if (id == t->unknown) {
      if (start < 0) start = at;
      continue;
    }
    if (start >= 0) put_unknown(t, word + start, at - start);
    start = -1;
    ids_add(&t->out, (uint32_t)id);
  }
  if (start >= 0) put_unknown(t, word + start, size - start);
  return t->out.failed ? no_memory() : ENG_OK;
}

// ---- WordPiece

eng_status wordpiece_word(eng_tokenizer *t, const char *word, int64_t size)
{
  int64_t chars = 0, first = t->out.size, at = 0;
  for (int64_t i = 0; i < size; i++) chars += (word[i] & 0xC0) != 0x80;
  bool bad = chars > t->longest;
  while (!bad && at < size) {
    int32_t id = trie_longest(&t->pieces, at == 0 ? 0 : t->continuing, word, size, at, &at);
    bad = id < 0;
    if (!bad) ids_add(&t->out, (uint32_t)id);
  }
  if (!bad) return ENG_OK;
  if (t->unknown < 0) return unknown_missing(word, size);
  t->out.size = first;
  ids_add(&t->out, (uint32_t)t->unknown);
  return ENG_OK;
}
