// The structure of a tokenizer, and the functions that the files of this folder export to each
// other. tokenizer.c builds a tokenizer and runs its steps. Included by this folder.
#pragma once

#include "base/array.h"
#include "base/error.h"
#include "base/heap.h"
#include "base/text.h"
#include "engine.h"

#include <string.h>

// ---- unicode.c

/// Classes of code points, as bits. BERT and StripAccents use PUNCTUATION, MARK and NONSPACING,
/// which follow an old version of Unicode. Regular expressions use *_NOW, which follow a new one.
/// INERT: normalization does not change the character. See unicode_versions.c.
enum {
  UC_LETTER = 1, UC_NUMBER = 2, UC_SPACE = 4, UC_PUNCTUATION = 8, UC_MARK = 16, UC_NONSPACING = 32,
  UC_CONTROL = 64, UC_WORD = 128, UC_SYMBOL = 256, UC_PUNCTUATION_NOW = 512, UC_MARK_NOW = 1024,
  UC_INERT = 2048
};
extern uint16_t unicode_class[0x110000];
/// A range of code points whose class differs from libutf8proc's (unicode_versions.c): `first` and
/// the `more` code points after it.
typedef struct unicode_range { uint32_t first; uint16_t more, bits; } unicode_range;
extern const unicode_range unicode_ranges[];
extern const int unicode_ranges_count;
/// Fills unicode_class.
void unicode_start(void);
/// Returns the code point at `at`, which is valid UTF-8, and its number of bytes in *n.
static inline uint32_t code_at(const char *at, int *n)
{
  const unsigned char *s = (const unsigned char *)at;
  if (s[0] < 0x80) { *n = 1; return s[0]; }
  if (s[0] < 0xE0) { *n = 2; return (s[0] & 0x1Fu) << 6 | (s[1] & 0x3Fu); }
  if (s[0] < 0xF0) {
    *n = 3;
    return (s[0] & 0x0Fu) << 12 | (s[1] & 0x3Fu) << 6 | (s[2] & 0x3Fu);
  }
  *n = 4;
  return (s[0] & 0x07u) << 18 | (s[1] & 0x3Fu) << 12 | (s[2] & 0x3Fu) << 6 | (s[3] & 0x3Fu);
}
/// Returns the start of the character that ends before `at`, where `at` > `from`.
static inline const char *char_before(const char *from, const char *at)
{
  do at--; while (at > from && (*at & 0xC0) == 0x80);
  return at;
}

// ---- buffer.c: growing buffers. A buffer that cannot grow sets `failed` and keeps its contents.
// The caller checks `failed` once, at the end.

/// Sets the error MEMORY and returns it.
eng_status no_memory(void);
typedef struct buffer { char *data; int64_t size, room; bool failed; } buffer;
char *buffer_more(buffer *b, int64_t bytes);      // returns the end, with room for `bytes`; or NULL
void  buffer_add(buffer *b, const char *data, int64_t size);
void  buffer_free(buffer *b);

typedef struct ids { uint32_t *data; int64_t size, room; bool failed; } ids;
void ids_grow(ids *list, int64_t more);
static inline void ids_add(ids *list, uint32_t id)
{
  if (list->size == list->room) ids_grow(list, 1);
  if (list->size < list->room) list->data[list->size++] = id;
}

/// If `text` is not UTF-8, appends it with U+FFFD in place of each malformed part and returns true.
/// Otherwise appends nothing and returns false.
bool utf8_repair(buffer *out, const char *text, int64_t size);

// ---- table.c

/// A hash table from 64-bit keys to two values. A key is a pair: two token ids (merges), two
/// characters (bigrams), or a node and a byte (edges of a trie). In `texts` it comes from a hash.
typedef struct pair { uint64_t key; uint32_t rank, id; } pair;
typedef struct pairs { pair *slots; int64_t room, count; } pairs;
static inline uint64_t mix(uint64_t key)
{
  key *= 0x9E3779B97F4A7C15ull;
  return key ^ key >> 32;
}
/// Returns the entry of a key, or NULL. ~0 is not a key: it marks an empty slot.
static inline const pair *pairs_find(const pairs *table, uint64_t key)
{
  if (table->room == 0) return NULL;
  for (uint64_t slot = mix(key);; slot++) {
    const pair *p = &table->slots[slot & (uint64_t)(table->room - 1)];
    if (p->key == key) return p;
    if (p->key == ~0ull) return NULL;
  }
}
/// Adds or replaces an entry. Returns false if memory runs out.
bool pairs_set(pairs *table, uint64_t key, uint32_t rank, uint32_t id);
void pairs_free(pairs *table);

/// A hash table from texts to values. The texts have indices from 0, in order of insertion.
typedef struct texts {
  buffer  pool;
  pairs   index;               // from a hash of a text to its index, as `id`
  // [index] the text's offset in the pool, its size in bytes, and its value
  struct text_entry { int64_t at; int32_t size; uint32_t value; } *list;
  int64_t count, room;
} texts;
/// Returns the value of a text, or -1.
int64_t texts_find(const texts *table, const char *text, int64_t size);
/// Sets the value of a text and adds the text if it is new. Returns false if memory runs out.
bool    texts_set(texts *table, const char *text, int64_t size, uint32_t value);
void    texts_free(texts *table);

/// A trie of bytes; node 0 is the root. The edge from a node to a child has the key node << 8 |
/// byte, and its `id` is the child. A node's value is -1 if no text ends there.
typedef struct trie { pairs edges; int32_t *value; int64_t nodes, room; } trie;
static inline int64_t trie_step(const trie *t, int64_t node, unsigned char byte)
{
  const pair *p = pairs_find(&t->edges, (uint64_t)node << 8 | byte);
  return p ? (int64_t)p->id : -1;
}
bool trie_add(trie *t, const char *text, int64_t size, int32_t value);
/// Follows the bytes of `text`, from position `at` on, through the trie, from `node` on. Returns
/// the value of the longest match and sets *end to the position after it. If nothing matches,
/// returns -1 and leaves *end unchanged.
int32_t trie_longest(const trie *t, int64_t node, const char *text, int64_t size, int64_t at,
                     int64_t *end);
void trie_free(trie *t);

// ---- the tokenizer

typedef struct step {
  int     kind;
  int64_t flags;
  char   *a, *b;               // the step's texts
  int64_t a_size, b_size;
  struct charsmap *map;        // only ENG_STEP_CHARSMAP
  buffer  work;                // the result of the step's last run
  int32_t *points;             // only normal forms: the code points of a run of characters
  int64_t room;                // of points
} step;

typedef struct steps { step list[ENG_TOKENS_MAX_STEPS]; int n; } steps;

typedef struct added {
  int64_t id;
  char   *text;                // as in the file
  int64_t size;
  int     flags;
} added;

/// A cache from words to their ids. at: offset of a word in `keys`; first, n: index of its first id
/// in `values`, and number of its ids.
typedef struct word_cache {
  struct cached { uint64_t hash; int64_t at; int32_t size, first, n; } *slots;
  buffer  keys;
  ids     values;
} word_cache;

/// Where `names` holds a token's two texts, as offsets and sizes in bytes. `at` and `size`: the
/// text that the file gives. `shown` and `shown_size`: the text from which decoding starts.
typedef struct decoded {
  int64_t at, shown;
  int32_t size, shown_size;
  bool    special, added;
} decoded;

struct eng_tokenizer {
  heap      memory;            // of the texts that do not grow
  int       model, flags;
  int64_t   unknown, longest;  // see eng_tokenizer_new
  char     *prefix, *suffix;
  int64_t   prefix_size, suffix_size;
  texts     vocab;             // the model's tokens by their text
  texts     all;               // the model's and the added tokens, by the text in the file
  buffer    names;             // the texts to which by_id refers
  decoded  *by_id;             // [room_ids]; at < 0: no such token
  int64_t   room_ids, size;
  double   *score;             // [room_ids] only for unigram
  double    least;             // the lowest score
  pairs     merges;            // from the ids of two adjacent tokens to the rank and the id of
                               // their merge
  uint32_t  n_merges;
  uint32_t *char_id;           // [0x110000] 1 + id of the token of a character (in byte mode, of a
                               // byte); 0: no such token
  pairs     bigrams;           // pairs of adjacent characters in a merge's result
  bool      byte_mode, cuts;   // see bpe.c, words.c
  texts     raw;               // byte mode: tokens as bytes
  texts     special;           // texts of special tokens
  int64_t   byte_id[256];      // ids of the tokens <0x00> to <0xFF>; -1: no such token
  trie      pieces;            // unigram and WordPiece
  int64_t   continuing;        // WordPiece: the trie node of `prefix`; -1: none
  added    *added;
  int64_t   n_added, room_added;
  trie      raw_added, normalized_added;   // the added tokens to find in raw text, and the added
                                           // tokens to find in normalized text
  bool      raw_first[256], normalized_first[256];   // [byte] whether a token of raw_added (or of
                                                     // normalized_added) begins with the byte
  steps     normalize, split, decode;
  ids       before, after;     // the ids that encoding puts before and after those of a text
  ids       out;               // the result of encoding
  word_cache cache;
  buffer    repaired;          // the text to encode, if it had to be repaired; work of decoding
  buffer    text_out;          // the result of decoding; work of building and encoding
  buffer    decode_work[4];    // the lists of texts before and after a decoder's step: bytes, ends
  void     *scratch;           // see scratch_of
  int64_t   scratch_room;
  bool      ready;
};

/// Returns the character of a word at `at`, and its number of bytes in *n. In byte mode, a
/// character is a byte.
static inline uint32_t char_at(const eng_tokenizer *t, const char *at, int *n)
{
  if (!t->byte_mode) return code_at(at, n);
  *n = 1;
  return (unsigned char)*at;
}

/// Returns scratch memory of at least `bytes`, or NULL if memory runs out. The next call may free
/// it.
void *scratch_of(eng_tokenizer *t, int64_t bytes);

// ---- normalize.c, charsmap.c

/// Runs one step on a text; *text and *size become the result, which is valid until the step's next
/// run. Handles the kinds of steps whose result depends on this text alone.
eng_status step_run(step *s, const char **text, int64_t *size);
eng_status charsmap_new(struct charsmap **out, heap *memory, const char *data, int64_t size);
void       charsmap_run(const struct charsmap *map, buffer *out, const char *text, int64_t size);
/// Returns whether a text begins with s->a.
bool       step_begins(const step *s, const char *text, int64_t size);
/// Appends `text` to `out`, with every match of a pattern replaced by `with`. The pattern is
/// scanner `scan` - 1 or, if `scan` is 0, the text `what`. If nothing matches, appends nothing and
/// returns false.
bool       pattern_replace(buffer *out, const char *text, int64_t size, int scan, const char *what,
                           int64_t length, const char *with, int64_t with_size);
/// Appends the bytes that GPT-2's characters in a text represent and returns true. If the text has
/// other characters, appends nothing and returns false.
bool       bytes_of(buffer *out, const char *text, int64_t size);

// ---- scan.c

/// Finds the next match of a pattern at or after `at`. Returns false if there is none. The pattern
/// is scanner `scan` - 1 (ENG_SCAN_*) or, if `scan` is 0, the text `what` of `length` bytes.
bool pattern_next(int scan, const char *what, int64_t length, const char *text, int64_t size,
                  int64_t at, int64_t *start, int64_t *end);

// ---- split.c

/// Splits a text into words and encodes each word. Runs the splitter's steps, beginning with step
/// `from`. `first`: the text is the start of the whole input.
eng_status split_run(eng_tokenizer *t, int from, const char *text, int64_t size, bool first);

// ---- words.c, bpe.c, unigram.c: append the ids of one word to t->out

/// Build the tables for encoding. Call words_ready after all tokens and merges are added; it calls
/// the other function that the model needs.
eng_status words_ready(eng_tokenizer *t);
eng_status bpe_ready(eng_tokenizer *t);
eng_status pieces_ready(eng_tokenizer *t);
/// Encodes a word with the tokenizer's model, or reads its ids from the cache.
eng_status word_encode(eng_tokenizer *t, const char *word, int64_t size);
eng_status bpe_word(eng_tokenizer *t, const char *word, int64_t size);
eng_status unigram_word(eng_tokenizer *t, const char *word, int64_t size);
eng_status wordpiece_word(eng_tokenizer *t, const char *word, int64_t size);
/// Sets the error VALUE, because neither `word` nor unknown text has a token, and returns it.
eng_status unknown_missing(const char *word, int64_t size);
/// Appends the tokens of the bytes of unknown text (<0xE2> and so on) and returns true. If the
/// tokenizer has no BYTE_FALLBACK or one of these tokens is missing, appends nothing and returns
/// false.
bool       fall_back(eng_tokenizer *t, const char *text, int64_t size);

// ---- decode.c

/// Decodes tokens into t->text_out: runs the decoder's steps on their texts and joins the results.
/// `skip`: leaves out special tokens.
eng_status decode_run(eng_tokenizer *t, const uint32_t *list, int64_t count, bool skip);
