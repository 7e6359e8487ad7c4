// Steps on text: the normalizers, and the steps that splitters and decoders share with them. Each
// step has a buffer for its result. If a step changes nothing or only trims the text, its result
// may instead point into its input. Called by tokenizer.c, split.c, decode.c and bpe.c.
#include "tokenizer.h"

#include <stdlib.h>
#include <utf8proc.h>

// ---- GPT-2's characters for bytes: printable bytes map to themselves, others to U+0100 and up

static bool printable(unsigned b)
{ return (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE; }

static uint32_t byte_char(unsigned char byte)
{
  if (printable(byte)) return byte;
  return 0x100 + (byte <= 0x20 ? byte : byte <= 0xA0 ? byte - 0x7Fu + 33 : 67);
}

static int char_byte(uint32_t c)
{
  if (c < 0x100) return printable(c) ? (int)c : -1;
  if (c <= 0x120) return (int)c - 0x100;
  if (c <= 0x142) return (int)c - 0x100 - 33 + 0x7F;
  return c == 0x143 ? 0xAD : -1;
}

bool bytes_of(buffer *out, const char *text, int64_t size)
{
  int64_t start = out->size;
  for (int64_t at = 0; at < size;) {
    int n, byte = char_byte(code_at(text + at, &n));
    if (byte < 0) {
      out->size = start;
      return false;
    }
    char b = (char)byte;
    buffer_add(out, &b, 1);
    at += n;
  }
  return true;
}

// ---- Unicode normalization

// ASCII text is already normalized, and an ASCII character never combines with the characters
// before it. So libutf8proc normalizes only the runs of non-ASCII characters, each run together
// with the ASCII character before it. An inert character also ends a run.
static eng_status compose(step *s, buffer *out, const char *text, int64_t size, int options)
{
  int64_t at = 0;
  while (at < size) {
    int64_t plain = at;
    while (plain < size && !(text[plain] & 0x80)) plain++;
    int64_t start = plain == size || plain == at ? plain : plain - 1, end = plain;
    buffer_add(out, text + at, start - at);
    int n = 1;
    bool inert = false;
    for (; end < size && (text[end] & 0x80); end += n) {
      inert = (unicode_class[code_at(text + end, &n)] & UC_INERT) != 0;
      if (inert) break;
    }
    at = inert ? end + n : end;
    if (start == end) {
      buffer_add(out, text + end, at - end);
      continue;
    }
    utf8proc_ssize_t room, got = (end - start) * 2 + 32;
    do {
      room = got;
      if (!ARRAY_GROW(s->points, s->room, room)) return no_memory();
      got = utf8proc_decompose((const utf8proc_uint8_t *)text + start, end - start, s->points, room,
                               (utf8proc_option_t)options);
    } while (got > room);
    if (got >= 0) got = utf8proc_normalize_utf32(s->points, got, (utf8proc_option_t)options);
    FAIL_IF(got < 0, ENG_ERR_LIBRARY, "tokenizer: libutf8proc cannot normalize the text: %s",
            utf8proc_errmsg(got));
    for (utf8proc_ssize_t i = 0; i < got; i++) {
      char *to = buffer_more(out, 4);
      if (to) out->size += utf8_put(to, (uint32_t)s->points[i]);
    }
    buffer_add(out, text + end, at - end);
  }
  return ENG_OK;
}

// ---- steps on single characters

// Returns the character that replaces c in SentencePiece's normalizer "nmt", or 0 if c is dropped.
static uint32_t nmt(uint32_t c)
{
  if ((c >= 1 && c <= 8) || c == 0xB || (c >= 0xE && c <= 0x1F) || c == 0x7F || c == 0x8F ||
      c == 0x9F)
    return 0;
  bool space = c == 9 || c == 0xA || c == 0xC || c == 0xD || c == 0x1680 ||
               (c >= 0x200B && c <= 0x200F) || c == 0x2028 || c == 0x2029 || c == 0x2581 ||
               c == 0xFEFF || c == 0xFFFD;
  return space ? ' ' : c;
}

static bool chinese(uint32_t c)
{
  return (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0x3400 && c <= 0x4DBF) ||
         (c >= 0x20000 && c <= 0x2A6DF) || (c >= 0x2A700 && c <= 0x2B73F) ||
         (c >= 0x2B740 && c <= 0x2B81F) || (c >= 0x2B920 && c <= 0x2CEAF) ||
         (c >= 0xF900 && c <= 0xFAFF) || (c >= 0x2F800 && c <= 0x2FA1F);
}

// Returns the lower case of a character. The constants below are letters that libutf8proc does not
// know, because Unicode added them after version 15.
static uint32_t lower_case(uint32_t c)
{
  if (c < 0x80) return c + (c >= 'A' && c <= 'Z' ? 32 : 0);
  if (c >= 0x10D50 && c <= 0x10D65) return c + 0x20;
  if (c >= 0x16EA0 && c <= 0x16EB8) return c + 0x1B;
  switch (c) {
  case 0xA7CB: return 0x264;
  case 0xA7DC: return 0x19B;
  case 0x1C89: case 0xA7CC: case 0xA7CE: case 0xA7D2: case 0xA7D4: case 0xA7DA: return c + 1;
  default: return (uint32_t)utf8proc_tolower((utf8proc_int32_t)c);
  }
}

static void per_char(const step *s, buffer *out, const char *text, int64_t size)
{
  for (int64_t at = 0; at < size;) {
    int n;
    uint32_t c = code_at(text + at, &n);
    at += n;
    char *to = buffer_more(out, 16);
    if (!to) return;
    uint16_t bits = unicode_class[c];
    switch (s->kind) {
    case ENG_STEP_LOWERCASE:
      if (c == 0x130) {                              // only U+0130 becomes two code points
        buffer_add(out, "i\xCC\x87", 3);
        continue;
      }
      c = lower_case(c);
      break;
    case ENG_STEP_STRIP_ACCENTS:
      if (bits & (s->flags ? UC_NONSPACING : UC_MARK)) continue;
      break;
    case ENG_STEP_NMT:
      if (c != 0 && (c = nmt(c)) == 0) continue;
      break;
    case ENG_STEP_CLEAN:
      if (c == '\t' || c == '\n' || c == '\r') c = ' ';
      if (c == 0 || c == 0xFFFD || (bits & UC_CONTROL && c != ' ')) continue;
      if (bits & UC_SPACE) c = ' ';
      break;
    case ENG_STEP_CHINESE:
      if (!chinese(c)) break;
      *to++ = ' ';
      n = utf8_put(to, c);
      to[n] = ' ';
      out->size += n + 2;
      continue;
    case ENG_STEP_BYTES:
      for (int i = 0; i < n; i++) {
        int put = utf8_put(to, byte_char((unsigned char)text[at - n + i]));
        to += put;
        out->size += put;
      }
      continue;
    default: break;
    }
    out->size += utf8_put(to, c);
  }
}

static void trim(const step *s, const char **text, int64_t *size)
{
  const char *from = *text, *to = from + *size;
  int n;
  while ((s->flags & 1) && from < to && (unicode_class[code_at(from, &n)] & UC_SPACE)) from += n;
  while ((s->flags & 2) && from < to) {
    const char *last = char_before(from, to);
    if (!(unicode_class[code_at(last, &n)] & UC_SPACE)) break;
    to = last;
  }
  *text = from;
  *size = to - from;
}

bool pattern_replace(buffer *out, const char *text, int64_t size, int scan, const char *what,
                     int64_t length, const char *with, int64_t with_size)
{
  int64_t at = 0, start, end;
  while (pattern_next(scan, what, length, text, size, at, &start, &end)) {
    buffer_add(out, text + at, start - at);
    buffer_add(out, with, with_size);
    at = end;
  }
  if (at > 0) buffer_add(out, text + at, size - at);
  return at > 0;
}

bool step_begins(const step *s, const char *text, int64_t size)
{ return size >= s->a_size && memcmp(text, s->a, (size_t)s->a_size) == 0; }

eng_status step_run(step *s, const char **text, int64_t *size)
{
  buffer *out = &s->work;
  out->size = 0;
  out->failed = false;
  eng_status status = ENG_OK;
  int options = 0;                                   // not 0: a normal form
  switch (s->kind) {
  case ENG_STEP_NFC: options = UTF8PROC_COMPOSE; break;
  case ENG_STEP_NFD: options = UTF8PROC_DECOMPOSE; break;
  case ENG_STEP_NFKC: options = UTF8PROC_COMPOSE | UTF8PROC_COMPAT; break;
  case ENG_STEP_NFKD: options = UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT; break;
  case ENG_STEP_TRIM: trim(s, text, size); return ENG_OK;
  case ENG_STEP_REPLACE:
    if (!pattern_replace(out, *text, *size, (int)s->flags, s->a, s->a_size, s->b, s->b_size))
      return ENG_OK;
    break;
  case ENG_STEP_PREPEND:
    if (*size == 0 || (s->flags && step_begins(s, *text, *size))) return ENG_OK;
    buffer_add(out, s->a, s->a_size);
    buffer_add(out, *text, *size);
    break;
  case ENG_STEP_CHARSMAP: charsmap_run(s->map, out, *text, *size); break;
  default: per_char(s, out, *text, *size);
  }
  if (options) status = compose(s, out, *text, *size, options | UTF8PROC_STABLE);
  if (status == ENG_OK && out->failed) status = no_memory();
  *text = out->size ? out->data : "";
  *size = out->size;
  return status;
}
