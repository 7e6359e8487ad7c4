// Decoding: lists the texts of the tokens, runs the decoder's steps on the list, and joins the
// texts. See tokenizer.h. Called by tokenizer.c.
#include "tokenizer.h"

// A list of texts: their concatenated bytes, and the end offset of each text as int64.
typedef struct list { buffer *bytes, *ends; } list;

static void list_end(list *l)
{
  int64_t end = l->bytes->size;
  buffer_add(l->ends, (const char *)&end, sizeof end);
}

static int64_t list_count(const list *l) { return l->ends->size / (int64_t)sizeof(int64_t); }

static const char *list_at(const list *l, int64_t i, int64_t *size)
{
  const int64_t *ends = (const int64_t *)(const void *)l->ends->data;
  int64_t start = i > 0 ? ends[i - 1] : 0;
  *size = ends[i] - start;
  return l->bytes->data + start;
}

// Appends a text in which `with` replaces every occurrence of s->a.
static void add_replaced(buffer *out, const char *text, int64_t size, const step *s,
                         const char *with)
{
  if (!pattern_replace(out, text, size, 0, s->a, s->a_size, with, (int64_t)strlen(with)))
    buffer_add(out, text, size);
}

// Does BERT's clean-up in `out` from offset `from` on: removes the space before punctuation and
// contractions, and contracts "do not".
static void clean_up(eng_tokenizer *t, buffer *out, int64_t from)
{
  static const struct { const char *what, *with; } rules[] = {
    { " .", "." }, { " ?", "?" }, { " !", "!" }, { " ,", "," }, { " ' ", "'" }, { " n't", "n't" },
    { " 'm", "'m" }, { " do not", " don't" }, { " 's", "'s" }, { " 've", "'ve" }, { " 're", "'re" },
  };
  buffer *work = &t->repaired;
  for (size_t r = 0; r < sizeof rules / sizeof *rules; r++) {
    work->size = 0;
    const char *what = rules[r].what, *with = rules[r].with;
    if (!pattern_replace(work, out->data + from, out->size - from, 0, what, (int64_t)strlen(what),
                         with, (int64_t)strlen(with)))
      continue;
    out->size = from;
    buffer_add(out, work->data, work->size);
  }
}

// Returns the byte of a token such as <0xE2>, or -1 for any other token.
static int fallback_byte(const char *text, int64_t size)
{
  if (size != 6 || memcmp(text, "<0x", 3) != 0 || text[5] != '>') return -1;
  int high = hex_digit(text[3]), low = hex_digit(text[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

// Ends the last text of the list, whose bytes begin at offset `from`. If they are not UTF-8, each
// byte becomes a U+FFFD.
static void end_bytes(eng_tokenizer *t, list *to, int64_t from)
{
  int64_t n = to->bytes->size - from;
  if (n == 0) return;
  t->repaired.size = 0;
  if (utf8_repair(&t->repaired, to->bytes->data + from, n)) {
    to->bytes->size = from;
    for (; n > 0; n--) buffer_add(to->bytes, "\xEF\xBF\xBD", 3);
  }
  list_end(to);
}

// Joins adjacent tokens such as <0xE2> to one text, whose bytes they name. Copies other texts.
static void from_fallback(eng_tokenizer *t, const list *from, list *to)
{
  int64_t pending = 0, size;                 // pending: offset of the unfinished text
  for (int64_t i = 0; i < list_count(from); i++) {
    const char *text = list_at(from, i, &size);
    int byte = fallback_byte(text, size);
    if (byte >= 0) {
      char b = (char)byte;
      buffer_add(to->bytes, &b, 1);
      continue;
    }
    end_bytes(t, to, pending);
    buffer_add(to->bytes, text, size);
    list_end(to);
    pending = to->bytes->size;
  }
  end_bytes(t, to, pending);
}

// Removes s->a from the start of a text up to flags & 255 times, and from its end up to flags >> 8
// times.
static void cut(const step *s, const char **text, int64_t *size)
{
  for (int64_t i = s->flags & 255; i > 0 && step_begins(s, *text, *size); i--) {
    *text += s->a_size;
    *size -= s->a_size;
  }
  for (int64_t i = s->flags >> 8; i > 0 && *size >= s->a_size; i--) {
    if (!step_begins(s, *text + *size - s->a_size, s->a_size)) break;
    *size -= s->a_size;
  }
}

// Runs a step that changes each text separately, on one text of the list.
static eng_status each(eng_tokenizer *t, step *s, const char *text, int64_t size, bool first,
                       bool last, buffer *out)
{
  int64_t from = out->size;
  switch (s->kind) {
  case ENG_STEP_FROM_METASPACE:
    add_replaced(out, text, size, s, first && (s->flags & 1) ? "" : " ");
    break;
  case ENG_STEP_FROM_WORDPIECE:
    if (!first && step_begins(s, text, size)) {
      text += s->a_size;
      size -= s->a_size;
    } else if (!first) {
      buffer_add(out, " ", 1);
    }
    buffer_add(out, text, size);
    if (s->flags & 1) clean_up(t, out, from);
    break;
  case ENG_STEP_FROM_SUFFIX:
    add_replaced(out, text, size, s, last ? "" : " ");
    break;
  case ENG_STEP_CUT:
    cut(s, &text, &size);
    buffer_add(out, text, size);
    break;
  default:
    ENG_TRY(step_run(s, &text, &size));
    buffer_add(out, text, size);
  }
  return ENG_OK;
}

static eng_status decode_step(eng_tokenizer *t, step *s, const list *from, list *to)
{
  int64_t n = list_count(from), size;
  switch (s->kind) {
  case ENG_STEP_FUSE:
    buffer_add(to->bytes, from->bytes->data, from->bytes->size);
    list_end(to);
    return ENG_OK;
  case ENG_STEP_FROM_FALLBACK: from_fallback(t, from, to); return ENG_OK;
  case ENG_STEP_FROM_BYTES:
    for (int64_t i = 0; i < n; i++) {
      const char *text = list_at(from, i, &size);
      if (!bytes_of(to->bytes, text, size)) buffer_add(to->bytes, text, size);
    }
    t->repaired.size = 0;
    if (utf8_repair(&t->repaired, to->bytes->data, to->bytes->size)) {
      to->bytes->size = 0;
      buffer_add(to->bytes, t->repaired.data, t->repaired.size);
    }
    list_end(to);
    return ENG_OK;
  default: break;
  }
  for (int64_t i = 0; i < n; i++) {
    const char *text = list_at(from, i, &size);
    ENG_TRY(each(t, s, text, size, i == 0, i == n - 1, to->bytes));
    list_end(to);
  }
  return ENG_OK;
}

eng_status decode_run(eng_tokenizer *t, const uint32_t *ids, int64_t count, bool skip)
{
  list from = { &t->decode_work[0], &t->decode_work[1] };
  list to = { &t->decode_work[2], &t->decode_work[3] };
  from.bytes->size = from.ends->size = 0;
  for (int i = 0; i < 4; i++) t->decode_work[i].failed = false;
  t->text_out.failed = false;
  for (int64_t i = 0; i < count; i++) {
    FAIL_IF(ids[i] >= t->size || t->by_id[ids[i]].at < 0, ENG_ERR_VALUE, "tokenizer: no token has "
            "the id %u; ids go from 0 to %lld", ids[i], (long long)t->size - 1);
    const decoded *d = &t->by_id[ids[i]];
    if (skip && d->special) continue;
    if (t->decode.n == 0 && list_count(&from) > 0) buffer_add(from.bytes, " ", 1);
    buffer_add(from.bytes, t->names.data + d->shown, d->shown_size);
    list_end(&from);
  }
  for (int i = 0; i < t->decode.n && list_count(&from) > 0; i++) {
    to.bytes->size = to.ends->size = 0;
    ENG_TRY(decode_step(t, &t->decode.list[i], &from, &to));
    list other = from;
    from = to;
    to = other;
  }
  for (int i = 0; i < 4; i++)
    if (t->decode_work[i].failed) return no_memory();
  t->text_out.size = 0;
  buffer_add(&t->text_out, from.bytes->data, from.bytes->size);
  if (t->text_out.failed) return no_memory();
  return ENG_OK;
}
