// Byte-pair encoding of a word. Called by words.c.
//
// Byte mode: if the splitter's last step turns bytes into GPT-2's characters, and the model has no
// prefix, suffix or BYTE_FALLBACK, encoding skips that step and uses tables that are indexed by
// bytes.
//
// Cuts: if no merge's result contains two characters side by side, no merge ever joins the two. So
// words.c may cut a word between them, unless the model has a prefix, a suffix or IGNORE_MERGES.
#include "tokenizer.h"

#include <stdlib.h>

enum { SHORT_WORD = 40 };      // merge_short handles words of up to this many symbols

// ---- tables for encoding

// Adds each pair of adjacent characters in a merge's result to t->bigrams.
static bool join_pairs(eng_tokenizer *t, const char *text, int64_t size)
{
  uint64_t before = 0;
  for (int64_t at = 0; at < size;) {
    int n;
    uint32_t c = char_at(t, text + at, &n);
    if (at > 0 && !pairs_set(&t->bigrams, before << 32 | c, 0, 0)) return false;
    before = c;
    at += n;
  }
  return true;
}

// In byte mode, converts a token's text to the bytes that its characters represent, because words
// are encoded as bytes. Returns false if a character represents no byte; the token then never
// matches.
static bool as_encoded(eng_tokenizer *t, const char **text, int64_t *size)
{
  if (!t->byte_mode) return true;
  t->text_out.size = 0;
  if (!bytes_of(&t->text_out, *text, *size)) return false;
  *text = t->text_out.data;
  *size = t->text_out.size;
  return true;
}

eng_status bpe_ready(eng_tokenizer *t)
{
  t->char_id = calloc(0x110000, sizeof *t->char_id);
  bool ok = t->char_id != NULL;
  t->byte_mode = t->split.n > 0 && t->split.list[t->split.n - 1].kind == ENG_STEP_BYTES &&
                 t->prefix_size == 0 && t->suffix_size == 0 &&
                 !(t->flags & ENG_TOKENS_BYTE_FALLBACK);
  t->cuts = t->prefix_size == 0 && t->suffix_size == 0 && !(t->flags & ENG_TOKENS_IGNORE_MERGES);
  const texts *v = &t->vocab;
  for (int64_t i = 0; ok && i < v->count; i++) {
    const char *text = v->pool.data + v->list[i].at;
    int64_t size = v->list[i].size;
    // skips tokens that never match: empty tokens, and tokens that as_encoded refuses
    if (size == 0 || !as_encoded(t, &text, &size)) continue;
    if (t->byte_mode) ok = texts_set(&t->raw, text, size, v->list[i].value);
    int n;
    uint32_t c = char_at(t, text, &n);
    if (n == size) t->char_id[c] = 1 + v->list[i].value;
  }
  for (int64_t i = 0; ok && t->cuts && i < t->merges.room; i++) {
    const pair *p = &t->merges.slots[i];
    if (p->key == ~0ull) continue;
    const char *text = t->names.data + t->by_id[p->id].at;
    int64_t size = t->by_id[p->id].size;
    if (as_encoded(t, &text, &size)) ok = join_pairs(t, text, size);
  }
  return ok ? ENG_OK : no_memory();
}

// ---- merging

typedef struct symbol { uint32_t id; int32_t prev, next; } symbol;      // prev, next: -1 if none
typedef struct merge { uint32_t rank, id; int32_t at; } merge;          // at: the left symbol

static inline const pair *merge_of(const eng_tokenizer *t, uint32_t a, uint32_t b)
{ return pairs_find(&t->merges, (uint64_t)a << 32 | b); }

static inline pair merge_or_none(const eng_tokenizer *t, uint32_t a, uint32_t b)
{
  const pair *p = merge_of(t, a, b);
  return p ? *p : (pair){ .rank = UINT32_MAX };
}

// Repeatedly applies the merge of the lowest rank, the leftmost among equals, until no merge
// applies. Returns the number of ids that remain.
static int merge_short(const eng_tokenizer *t, uint32_t *id, int n)
{
  pair next[SHORT_WORD];                               // next[i]: merge of the pair (i, i + 1)
  for (int i = 0; i + 1 < n; i++) next[i] = merge_or_none(t, id[i], id[i + 1]);
  while (n > 1) {
    int best = 0;
    for (int i = 1; i + 1 < n; i++)
      if (next[i].rank < next[best].rank) best = i;
    if (next[best].rank == UINT32_MAX) break;
    id[best] = next[best].id;
    memmove(id + best + 1, id + best + 2, (size_t)(n - best - 2) * sizeof *id);
    memmove(next + best, next + best + 1, (size_t)(n - best - 2) * sizeof *next);
    n--;
    for (int i = best > 0 ? best - 1 : 0; i <= best && i + 1 < n; i++)
      next[i] = merge_or_none(t, id[i], id[i + 1]);
  }
  return n;
}

static inline bool lower(merge a, merge b)
{ return a.rank < b.rank || (a.rank == b.rank && a.at < b.at); }

static void heap_down(merge *heap, int64_t n, int64_t at)
{
  merge item = heap[at];
  for (int64_t child; (child = 2 * at + 1) < n; at = child) {
    if (child + 1 < n && lower(heap[child + 1], heap[child])) child++;
    if (!lower(heap[child], item)) break;
    heap[at] = heap[child];
  }
  heap[at] = item;
}

static void heap_add(merge *heap, int64_t n, merge item)
{
  int64_t at = n;
  for (int64_t up; at > 0 && lower(item, heap[up = (at - 1) / 2]); at = up) heap[at] = heap[up];
  heap[at] = item;
}

// Does the same as merge_short, for longer words: keeps the candidate merges in a heap. The heap
// starts with fewer than n candidates. Each merge removes one candidate and one symbol and adds at
// most two candidates, so the heap never holds more than 2n.
static eng_status merge_long(eng_tokenizer *t, uint32_t *id, int64_t *count)
{
  int64_t n = *count, heap_n = 0;
  symbol *s = scratch_of(t, n * (int64_t)(sizeof(symbol) + 2 * sizeof(merge)));
  if (!s) return no_memory();
  merge *heap = (merge *)(s + n);
  for (int64_t i = 0; i < n; i++) {
    s[i] = (symbol){ id[i], (int32_t)i - 1, i + 1 < n ? (int32_t)i + 1 : -1 };
    const pair *p = i + 1 < n ? merge_of(t, id[i], id[i + 1]) : NULL;
    if (p) heap[heap_n++] = (merge){ p->rank, p->id, (int32_t)i };
  }
  for (int64_t i = heap_n / 2; i-- > 0;) heap_down(heap, heap_n, i);
  int64_t polls = 0;
  while (heap_n > 0) {
    merge top = heap[0];
    heap[0] = heap[--heap_n];
    if (heap_n > 0) heap_down(heap, heap_n, 0);
    FAIL_IF((++polls & 0xFFFFF) == 0 && eng_interrupted() == 2, ENG_ERR_INTERRUPTED,
            "tokenizer: interrupted");
    symbol *left = &s[top.at];
    if (left->id == UINT32_MAX || left->next < 0) continue;
    symbol *right = &s[left->next];
    const pair *now = merge_of(t, left->id, right->id);
    if (!now || now->id != top.id) continue;             // an earlier merge changed the pair
    left->id = top.id;
    right->id = UINT32_MAX;
    left->next = right->next;
    if (left->next >= 0) s[left->next].prev = top.at;
    const pair *p = left->prev >= 0 ? merge_of(t, s[left->prev].id, left->id) : NULL;
    if (p) heap_add(heap, heap_n++, (merge){ p->rank, p->id, left->prev });
    p = left->next >= 0 ? merge_of(t, left->id, s[left->next].id) : NULL;
    if (p) heap_add(heap, heap_n++, (merge){ p->rank, p->id, top.at });
  }
  int64_t out = 0;
  for (int64_t i = 0; i < n; i++)
    if (s[i].id != UINT32_MAX) id[out++] = s[i].id;
  *count = out;
  return ENG_OK;
}

// ---- a word

// Returns the token of one character of a word. The token's text begins with the model's prefix
// unless the character is the word's first, and ends with the model's suffix if it is the last.
// Returns -1 if there is no such token.
static int64_t affixed(eng_tokenizer *t, const char *at, int n, bool first, bool last)
{
  buffer *b = &t->text_out;
  b->size = 0;
  if (!first) buffer_add(b, t->prefix, t->prefix_size);
  buffer_add(b, at, n);
  if (last) buffer_add(b, t->suffix, t->suffix_size);
  return b->failed ? -1 : texts_find(&t->vocab, b->data, b->size);
}

eng_status bpe_word(eng_tokenizer *t, const char *word, int64_t size)
{
  if (t->flags & ENG_TOKENS_IGNORE_MERGES) {
    int64_t whole = texts_find(t->byte_mode ? &t->raw : &t->vocab, word, size);
    if (whole >= 0) { ids_add(&t->out, (uint32_t)whole); return ENG_OK; }
  }
  int64_t first = t->out.size;
  bool affixes = t->prefix_size || t->suffix_size, fuse = false;
  for (int64_t at = 0; at < size;) {
    int n;
    uint32_t c = char_at(t, word + at, &n);
    int64_t id = affixes ? affixed(t, word + at, n, at == 0, at + n == size)
                         : (int64_t)t->char_id[c] - 1;
    if (id >= 0) {
      ids_add(&t->out, (uint32_t)id);
      fuse = false;
    } else if (fall_back(t, word + at, n)) {
      // fall_back has appended the tokens of the character's bytes
    } else if (t->unknown < -1) {
      return unknown_missing(word + at, n);
    } else if (t->unknown >= 0) {
      if (!fuse) ids_add(&t->out, (uint32_t)t->unknown);
      fuse = (t->flags & ENG_TOKENS_FUSE_UNK) != 0;
    }
    at += n;
  }
  if (t->out.failed) return no_memory();
  int64_t n = t->out.size - first;
  if (n <= SHORT_WORD) n = merge_short(t, t->out.data + first, (int)n);
  else ENG_TRY(merge_long(t, t->out.data + first, &n));
  t->out.size = first + n;
  return ENG_OK;
}
