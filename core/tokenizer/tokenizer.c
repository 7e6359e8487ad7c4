// A tokenizer: building it from its parts, and encoding a text. Encoding has the order of Hugging
// Face's tokenizers: find added tokens in the text, normalize the text between them, find added
// tokens in the normalized text, split the remaining text into words, and encode each word with the
// model. Called by lua/engine/data/tokenizer.lua.
#include "tokenizer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

// Returns how many bytes a message shows of a text of `size` bytes.
static int shown(int64_t size) { return (int)(size < 60 ? size : 60); }

// ---- building

eng_status eng_tokenizer_new(eng_tokenizer **out, int model, int flags, int64_t unknown,
                             const char *prefix, const char *suffix, int64_t longest)
{
  FAIL_IF(model < ENG_TOKENS_BPE || model > ENG_TOKENS_WORDS, ENG_ERR_VALUE,
          "tokenizer: expected a model from 0 to 3 (ENG_TOKENS_*), got %d", model);
  eng_tokenizer *t = calloc(1, sizeof *t);
  if (!t) return no_memory();
  unicode_start();
  t->model = model;
  t->flags = flags;
  t->unknown = unknown;
  t->longest = longest;
  t->least = INFINITY;
  t->prefix_size = (int64_t)strlen(prefix);
  t->suffix_size = (int64_t)strlen(suffix);
  t->prefix = heap_text(&t->memory, prefix, t->prefix_size);
  t->suffix = heap_text(&t->memory, suffix, t->suffix_size);
  if (t->memory.failed) {
    eng_tokenizer_free(t);
    return no_memory();
  }
  *out = t;
  return ENG_OK;
}

static void steps_free(steps *list)
{
  for (int i = 0; i < list->n; i++) {
    buffer_free(&list->list[i].work);
    free(list->list[i].points);
  }
}

void eng_tokenizer_free(eng_tokenizer *t)
{
  if (!t) return;
  heap_free(&t->memory);
  texts_free(&t->vocab);
  texts_free(&t->all);
  texts_free(&t->raw);
  texts_free(&t->special);
  buffer_free(&t->names);
  free(t->by_id);
  free(t->score);
  pairs_free(&t->merges);
  pairs_free(&t->bigrams);
  free(t->char_id);
  trie_free(&t->pieces);
  free(t->added);
  trie_free(&t->raw_added);
  trie_free(&t->normalized_added);
  steps_free(&t->normalize);
  steps_free(&t->split);
  steps_free(&t->decode);
  free(t->before.data);
  free(t->after.data);
  free(t->out.data);
  free(t->cache.slots);
  buffer_free(&t->cache.keys);
  free(t->cache.values.data);
  buffer_free(&t->repaired);
  buffer_free(&t->text_out);
  for (int i = 0; i < 4; i++) buffer_free(&t->decode_work[i]);
  free(t->scratch);
  free(t);
}

static eng_status building(const eng_tokenizer *t)
{
  return !t->ready ? ENG_OK : error_set(ENG_ERR_STATE, "tokenizer: a tokenizer cannot "
    "change after eng_tokenizer_ready; hint: build another one with eng_tokenizer_new");
}

static eng_status built(const eng_tokenizer *t)
{
  return t->ready ? ENG_OK : error_set(ENG_ERR_STATE, "tokenizer: a tokenizer cannot encode or "
    "decode while it is being built; hint: call eng_tokenizer_ready first");
}

// Checks an id and a token's text, and makes room for the id. `known`: the id of the token that has
// this text already, or -1.
static eng_status accept(eng_tokenizer *t, int64_t id, const char *text, int64_t size,
                         int64_t known)
{
  ENG_TRY(building(t));
  FAIL_IF(id < 0 || id > ENG_TOKENS_MAX_ID, ENG_ERR_FORMAT, "tokenizer: token '%.*s' has the id "
          "%lld, expected 0 to %d", shown(size), text, (long long)id, (int)ENG_TOKENS_MAX_ID);
  FAIL_IF(size > ENG_TOKENS_MAX_BYTES, ENG_ERR_FORMAT, "tokenizer: token %lld has %lld bytes, "
          "expected at most %d", (long long)id, (long long)size, (int)ENG_TOKENS_MAX_BYTES);
  FAIL_IF(utf8_valid(text, size) < size, ENG_ERR_FORMAT,
          "tokenizer: the text of token %lld is not UTF-8", (long long)id);
  if (id >= t->room_ids) {
    int64_t room = t->room_ids, score_room = room;
    if (!ARRAY_GROW(t->by_id, room, id + 1) || !ARRAY_GROW(t->score, score_room, id + 1))
      return no_memory();
    for (int64_t i = t->room_ids; i < room; i++) {
      t->by_id[i] = (decoded){ .at = -1 };
      t->score[i] = 0;
    }
    t->room_ids = room;
  }
  FAIL_IF(known >= 0 && known != id, ENG_ERR_FORMAT, "tokenizer: token '%.*s' has two ids, %lld "
          "and %lld", shown(size), text, (long long)known, (long long)id);
  FAIL_IF(known < 0 && t->by_id[id].at >= 0, ENG_ERR_FORMAT,
          "tokenizer: the id %lld belongs to two tokens, '%.*s' and '%.*s'", (long long)id,
          shown(t->by_id[id].size), t->names.data + t->by_id[id].at, shown(size), text);
  if (id >= t->size) t->size = id + 1;
  return ENG_OK;
}

static eng_status name_token(eng_tokenizer *t, int64_t id, const char *text, int64_t size)
{
  t->by_id[id] = (decoded){ .at = t->names.size, .shown = t->names.size, .size = (int32_t)size,
                            .shown_size = (int32_t)size };
  buffer_add(&t->names, text, size);
  if (t->names.failed) return no_memory();
  return texts_set(&t->all, text, size, (uint32_t)id) ? ENG_OK : no_memory();
}

// Rounds a score as the package `tokenizers` does when it reads a number: reads the digits as an
// integer, converts it to a double, then multiplies or divides by a power of ten. Each operation
// rounds. Even the last bit matters: it decides whether two ways to split a word have equal scores.
static double score_of(double score)
{
  char text[32];
  eng_number_text(text, score);
  uint64_t digits = 0;
  int exponent = 0;
  bool point = false;
  for (const char *at = text; *at; at++) {
    if (*at == 'e') { exponent += atoi(at + 1); break; }
    if (*at == '.') point = true;
    else if (*at != '-') {
      digits = digits * 10 + (uint64_t)(*at - '0');
      exponent -= point;
    }
  }
  char power[16];
  snprintf(power, sizeof power, "1e%d", exponent < 0 ? -exponent : exponent);
  double scale = strtod(power, NULL);
  double value = exponent < 0 ? (double)digits / scale : (double)digits * scale;
  return score < 0 ? -value : value;
}

eng_status eng_tokenizer_token(eng_tokenizer *t, int64_t id, const char *text, int64_t size,
                               double score)
{
  // in unigram several ids may have the same text; the last one is used
  int64_t known = t->model == ENG_TOKENS_UNIGRAM ? -1 : texts_find(&t->vocab, text, size);
  ENG_TRY(accept(t, id, text, size, known == id ? -1 : known));
  FAIL_IF(!(fabs(score) < 1e300), ENG_ERR_FORMAT, "tokenizer: token '%.*s': expected a score "
          "above -1e300 and below 1e300, got %g", shown(size), text, score);
  ENG_TRY(name_token(t, id, text, size));
  if (!texts_set(&t->vocab, text, size, (uint32_t)id)) return no_memory();
  if (t->model == ENG_TOKENS_UNIGRAM) {
    t->score[id] = score_of(score);
    if (t->score[id] < t->least) t->least = t->score[id];
  }
  return ENG_OK;
}

eng_status eng_tokenizer_merge(eng_tokenizer *t, const char *left, int64_t left_size,
                               const char *right, int64_t right_size)
{
  ENG_TRY(building(t));
  int64_t a = texts_find(&t->vocab, left, left_size);
  int64_t b = texts_find(&t->vocab, right, right_size);
  int64_t skip = b >= 0 && right_size >= t->prefix_size ? t->prefix_size : 0;
  t->text_out.size = 0;
  buffer_add(&t->text_out, left, left_size);
  buffer_add(&t->text_out, right + skip, right_size - skip);
  if (t->text_out.failed) return no_memory();
  int64_t both = texts_find(&t->vocab, t->text_out.data, t->text_out.size);
  FAIL_IF(a < 0 || b < 0 || both < 0, ENG_ERR_FORMAT,
          "tokenizer: merge %u of '%.*s' and '%.*s' names '%.*s', which is not in the vocabulary",
          t->n_merges + 1, shown(left_size), left, shown(right_size), right,
          shown(a < 0 ? left_size : b < 0 ? right_size : t->text_out.size),
          a < 0 ? left : b < 0 ? right : t->text_out.data);
  if (!pairs_set(&t->merges, (uint64_t)a << 32 | (uint64_t)b, t->n_merges++, (uint32_t)both))
    return no_memory();
  return ENG_OK;
}

eng_status eng_tokenizer_added(eng_tokenizer *t, int64_t id, const char *text, int64_t size,
                               int flags)
{
  FAIL_IF(size == 0, ENG_ERR_FORMAT, "tokenizer: added token %lld has no text", (long long)id);
  int64_t known = texts_find(&t->all, text, size);
  ENG_TRY(accept(t, id, text, size, known));
  FAIL_IF(t->by_id[id].added, ENG_ERR_FORMAT,
          "tokenizer: token '%.*s' is added twice", shown(size), text);
  if (known < 0) ENG_TRY(name_token(t, id, text, size));
  if (!ARRAY_GROW(t->added, t->room_added, t->n_added + 1)) return no_memory();
  added *a = &t->added[t->n_added];
  *a = (added){ .id = id, .text = heap_text(&t->memory, text, size), .size = size, .flags = flags };
  if (!a->text) return no_memory();
  t->by_id[id].added = true;
  t->n_added++;
  return ENG_OK;
}

static bool step_fits(int stage, int kind)
{
  if (kind == ENG_STEP_REPLACE) return true;
  if (stage == ENG_STAGE_DECODE) return kind >= ENG_STEP_FROM_BYTES && kind <= ENG_STEP_CUT;
  if (kind == ENG_STEP_SPLIT) return stage == ENG_STAGE_SPLIT;
  return kind >= ENG_STEP_NFC && kind <= ENG_STEP_CHARSMAP;
}

eng_status eng_tokenizer_step(eng_tokenizer *t, int stage, int kind, int64_t flags, const char *a,
                              int64_t a_size, const char *b, int64_t b_size)
{
  ENG_TRY(building(t));
  FAIL_IF(stage < ENG_STAGE_NORMALIZE || stage > ENG_STAGE_DECODE || !step_fits(stage, kind),
          ENG_ERR_VALUE, "tokenizer: stage %d (ENG_STAGE_*) has no step %d (ENG_STEP_*)", stage,
          kind);
  steps *list = stage == ENG_STAGE_NORMALIZE ? &t->normalize
                : stage == ENG_STAGE_SPLIT   ? &t->split
                                             : &t->decode;
  FAIL_IF(list->n == ENG_TOKENS_MAX_STEPS, ENG_ERR_VALUE,
          "tokenizer: expected at most %d steps in stage %d (ENG_STAGE_*), got more",
          (int)ENG_TOKENS_MAX_STEPS, stage);
  bool needs_text = ((kind == ENG_STEP_REPLACE || kind == ENG_STEP_SPLIT) &&
                     (kind == ENG_STEP_SPLIT ? flags >> 4 : flags) == 0) ||
                    kind == ENG_STEP_CUT;
  FAIL_IF(needs_text && a_size == 0, ENG_ERR_FORMAT,
          "tokenizer: a step that %s text has the empty pattern '' in tokenizer.json",
          kind == ENG_STEP_REPLACE ? "replaces" : kind == ENG_STEP_SPLIT ? "splits" : "cuts");
  step *s = &list->list[list->n++];
  *s = (step){ .kind = kind, .flags = flags, .a_size = a_size, .b_size = b_size };
  s->a = heap_text(&t->memory, a, a_size);
  s->b = heap_text(&t->memory, b, b_size);
  if (t->memory.failed) return no_memory();
  if (kind == ENG_STEP_CHARSMAP) ENG_TRY(charsmap_new(&s->map, &t->memory, a, a_size));
  return ENG_OK;
}

eng_status eng_tokenizer_frame(eng_tokenizer *t, int64_t id, bool after)
{
  ENG_TRY(building(t));
  FAIL_IF(id < 0 || id >= t->size || t->by_id[id].at < 0, ENG_ERR_FORMAT,
          "tokenizer: the template names the id %lld, which no token has", (long long)id);
  ids *list = after ? &t->after : &t->before;
  ids_add(list, (uint32_t)id);
  return list->failed ? no_memory() : ENG_OK;
}

static eng_status normalized(eng_tokenizer *t, const char **text, int64_t *size)
{
  for (int i = 0; i < t->normalize.n; i++)
    ENG_TRY(step_run(&t->normalize.list[i], text, size));
  return ENG_OK;
}

// Inserts the added tokens into their tries. Sets `shown` and `special` of tokens for decoding.
static eng_status added_ready(eng_tokenizer *t)
{
  for (int64_t i = 0; i < t->n_added; i++) {
    added *a = &t->added[i];
    const char *text = a->text;
    int64_t size = a->size;
    bool in_normalized = (a->flags & ENG_ADDED_NORMALIZED) != 0;
    decoded *d = &t->by_id[a->id];
    if (in_normalized) {
      ENG_TRY(normalized(t, &text, &size));
      FAIL_IF(size > ENG_TOKENS_MAX_BYTES, ENG_ERR_FORMAT,
              "tokenizer: the added token '%.*s' has %lld bytes after normalization, expected "
              "at most %d", shown(a->size), a->text, (long long)size, (int)ENG_TOKENS_MAX_BYTES);
      d->shown = t->names.size;
      d->shown_size = (int32_t)size;
      buffer_add(&t->names, text, size);
      if (t->names.failed) return no_memory();
    }
    if ((a->flags & ENG_ADDED_SPECIAL) && !texts_set(&t->special, a->text, a->size, 0))
      return no_memory();
    FAIL_IF(size == 0, ENG_ERR_FORMAT, "tokenizer: the normalizer leaves nothing of the added "
            "token '%.*s'", shown(a->size), a->text);
    trie *tokens = in_normalized ? &t->normalized_added : &t->raw_added;
    bool *first = in_normalized ? t->normalized_first : t->raw_first;
    first[(unsigned char)*text] = true;
    if (!trie_add(tokens, text, size, (int32_t)i)) return no_memory();
  }
  for (int64_t i = 0; i < t->size; i++) {   // by text, because several ids may have the same text
    decoded *d = &t->by_id[i];
    d->special = d->at >= 0 &&
                 texts_find(&t->special, t->names.data + d->shown, d->shown_size) >= 0;
  }
  return ENG_OK;
}

eng_status eng_tokenizer_ready(eng_tokenizer *t)
{
  ENG_TRY(building(t));
  FAIL_IF(t->vocab.count == 0, ENG_ERR_FORMAT, "tokenizer: the vocabulary is empty");
  FAIL_IF(t->unknown >= t->size || (t->unknown >= 0 && t->by_id[t->unknown].at < 0), ENG_ERR_FORMAT,
          "tokenizer: expected the id of the unknown token (unk_id or unk_token) to be in the "
          "vocabulary, got %lld", (long long)t->unknown);
  ENG_TRY(added_ready(t));
  ENG_TRY(words_ready(t));
  t->ready = true;
  return ENG_OK;
}

// ---- encoding

static bool word_char(const char *at)
{
  int n;
  return (unicode_class[code_at(at, &n)] & UC_WORD) != 0;
}

static eng_status section(eng_tokenizer *t, const char *text, int64_t size, bool first, bool raw);

// Appends the ids of added tokens, and encodes the text between them with section(). `first`: the
// text is the start of the whole input. `raw`: the text is not yet normalized.
static eng_status extract(eng_tokenizer *t, const char *text, int64_t size, bool first, bool raw)
{
  const trie *tokens = raw ? &t->raw_added : &t->normalized_added;
  const bool *begins = raw ? t->raw_first : t->normalized_first;
  int64_t done = 0;
  for (int64_t at = 0; tokens->nodes > 0 && at < size;) {
    FAIL_IF((at & 0xFFFF) == 0 && eng_interrupted() == 2, ENG_ERR_INTERRUPTED,
            "tokenizer: interrupted");
    int64_t stop;
    int32_t number =
      begins[(unsigned char)text[at]] ? trie_longest(tokens, 0, text, size, at, &stop) : -1;
    if (number < 0) { at++; continue; }
    const added *a = &t->added[number];
    int64_t start = at, next = stop;
    at = stop;
    if ((a->flags & ENG_ADDED_SINGLE_WORD) &&
        ((start > 0 && word_char(char_before(text, text + start))) ||
         (stop < size && word_char(text + stop))))
      continue;
    while ((a->flags & ENG_ADDED_LSTRIP) && start > done) {
      const char *before = char_before(text, text + start);
      int n;
      if (!(unicode_class[code_at(before, &n)] & UC_SPACE)) break;
      start = before - text;
    }
    while ((a->flags & ENG_ADDED_RSTRIP) && next < size) {
      int n;
      if (!(unicode_class[code_at(text + next, &n)] & UC_SPACE)) break;
      next += n;
    }
    if (done < start) ENG_TRY(section(t, text + done, start - done, first && done == 0, raw));
    ids_add(&t->out, (uint32_t)a->id);
    done = next;
  }
  return done < size ? section(t, text + done, size - done, first && done == 0, raw) : ENG_OK;
}

static eng_status section(eng_tokenizer *t, const char *text, int64_t size, bool first, bool raw)
{
  if (!raw) return split_run(t, 0, text, size, first);
  ENG_TRY(normalized(t, &text, &size));
  return extract(t, text, size, first, false);
}

eng_status eng_tokenizer_encode(const uint32_t **out, int64_t *count, eng_tokenizer *t,
                                const char *text, int64_t size, bool special)
{
  ENG_TRY(built(t));
  t->out.size = 0;
  t->out.failed = t->repaired.failed = false;
  for (int64_t i = 0; special && i < t->before.size; i++) ids_add(&t->out, t->before.data[i]);
  t->repaired.size = 0;
  if (utf8_repair(&t->repaired, text, size)) {
    if (t->repaired.failed) return no_memory();
    text = t->repaired.data;
    size = t->repaired.size;
  }
  ENG_TRY(extract(t, text, size, true, true));
  for (int64_t i = 0; special && i < t->after.size; i++) ids_add(&t->out, t->after.data[i]);
  if (t->out.failed) return no_memory();
  *out = t->out.data;
  *count = t->out.size;
  return ENG_OK;
}

eng_status eng_tokenizer_decode(const char **text, int64_t *size, eng_tokenizer *t,
                                const uint32_t *list, int64_t count, bool skip)
{
  ENG_TRY(built(t));
  ENG_TRY(decode_run(t, list, count, skip));
  *text = t->text_out.size ? t->text_out.data : "";
  *size = t->text_out.size;
  return ENG_OK;
}

// ---- queries

bool eng_tokenizer_splits_lines(const eng_tokenizer *t)
{
  for (int i = 0; i < t->normalize.n; i++)
    if (t->normalize.list[i].kind > ENG_STEP_NFKD) return false;
  bool words = false;
  for (int i = 0; i < t->split.n; i++) {
    const step *s = &t->split.list[i];
    if (s->kind == ENG_STEP_BYTES) continue;
    int scan = (int)(s->flags >> 4) - 1;
    if (s->kind != ENG_STEP_SPLIT || (s->flags & 15) != ENG_SPLIT_ISOLATED) return false;
    words = words || scan == ENG_SCAN_GPT2 || scan == ENG_SCAN_LLAMA3 || scan == ENG_SCAN_QWEN2 ||
            scan == ENG_SCAN_DEEPSEEK;
    if (!words && scan != ENG_SCAN_DIGITS3 && scan != ENG_SCAN_NUMERIC && scan != ENG_SCAN_CJK)
      return false;
  }
  for (int64_t i = 0; i < t->n_added; i++)
    if ((t->added[i].flags & (ENG_ADDED_LSTRIP | ENG_ADDED_RSTRIP)) ||
        memchr(t->added[i].text, '\n', (size_t)t->added[i].size))
      return false;
  return words;
}

int64_t eng_tokenizer_size(const eng_tokenizer *t) { return t->size; }

const char *eng_tokenizer_text(int64_t *size, const eng_tokenizer *t, int64_t id)
{
  if (id < 0 || id >= t->size || t->by_id[id].at < 0) return NULL;
  *size = t->by_id[id].size;
  return t->names.data + t->by_id[id].at;
}

int64_t eng_tokenizer_find(const eng_tokenizer *t, const char *text, int64_t size)
{ return texts_find(&t->all, text, size); }
