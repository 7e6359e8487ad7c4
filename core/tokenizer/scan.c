// Scanners: hand-written matchers for the regular expressions of known tokenizers, in place of an
// engine for regular expressions. The comment of such a scanner shows its expression.
// lua/engine/data/tokenizer_steps.lua maps expressions to scanners. Called by split.c and
// normalize.c.
#define _GNU_SOURCE   // memmem
#include "tokenizer.h"

typedef struct text { const char *data; int64_t size; } text;

// Returns the class of the character at `at`, and its length in *n. At the end of the text both are
// 0.
static inline uint16_t class_at(text t, int64_t at, int *n)
{
  if (at >= t.size) { *n = 0; return 0; }
  return unicode_class[code_at(t.data + at, n)];
}

// Returns the end of the run of characters from `at` that have a class in `some`.
static inline int64_t run_of(text t, int64_t at, int some)
{
  for (int n;; at += n)
    if (!(class_at(t, at, &n) & some)) return at;
}

// Does the same as run_of, for a run of at most `most` characters.
static int64_t run_up_to(text t, int64_t at, int some, int most)
{
  for (int n; most > 0 && (class_at(t, at, &n) & some); at += n) most--;
  return at;
}

// Returns the end of the run of characters from `at` that have no class in `none`.
static inline int64_t run_without(text t, int64_t at, int none)
{
  for (int n;; at += n) {
    uint16_t bits = class_at(t, at, &n);
    if (n == 0 || (bits & none)) return at;
  }
}

static inline bool line_end(text t, int64_t at)
{ return at < t.size && (t.data[at] == '\n' || t.data[at] == '\r'); }

static inline int64_t line_ends(text t, int64_t at)
{
  while (line_end(t, at)) at++;
  return at;
}

// Returns the end of the contraction ('s 't 're 've 'm 'll 'd) that begins at the apostrophe `at`,
// or `at` if there is none. `fold`: ignores case; U+017F folds to s.
static int64_t contraction(text t, int64_t at, bool fold)
{
  int64_t left = t.size - at - 1;
  if (left < 1) return at;
  const unsigned char *s = (const unsigned char *)t.data + at + 1;
  if (fold && left >= 2 && s[0] == 0xC5 && s[1] == 0xBF) return at + 3;
  int a = s[0], b = left > 1 ? s[1] : 0;
  if (fold) {
    if (a >= 'A' && a <= 'Z') a += 32;
    if (b >= 'A' && b <= 'Z') b += 32;
  }
  if (a == 's' || a == 't' || a == 'm' || a == 'd') return at + 2;
  if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return at + 3;
  return at;
}

// Returns the end of the match of \s+(?!\S)|\s+ at `at`, which is white space. The match is the
// whole run of white space if the run reaches the end of the text or is one character long.
// Otherwise it is the run without its last character.
static int64_t white(text t, int64_t at)
{
  int64_t end = run_of(t, at, UC_SPACE);
  if (end == t.size) return end;
  int64_t last = char_before(t.data + at, t.data + end) - t.data;
  return last > at ? last : end;
}

// Returns the end of the match of \s*[\r\n]+ at `at`, which is white space: the position after the
// last line break of the run. Returns `at` if the run has no line break.
static int64_t white_lines(text t, int64_t at)
{
  int64_t end = run_of(t, at, UC_SPACE);
  while (end > at && !line_end(t, end - 1)) end--;
  return end;
}

// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
static int64_t gpt2(text t, int64_t at)
{
  int64_t end;
  if (t.data[at] == '\'' && (end = contraction(t, at, false)) > at) return end;
  int64_t word = at + (t.data[at] == ' ');
  int n;
  uint16_t bits = class_at(t, word, &n);
  if (bits & UC_LETTER) return run_of(t, word + n, UC_LETTER);
  if (bits & UC_NUMBER) return run_of(t, word + n, UC_NUMBER);
  if (n > 0 && !(bits & UC_SPACE))
    return run_without(t, word + n, UC_SPACE | UC_LETTER | UC_NUMBER);
  return white(t, at);
}

// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|
// \s*[\r\n]+|\s+(?!\S)|\s+
// Qwen2: \p{N} instead of \p{N}{1,3}.
static int64_t llama3(text t, int64_t at, int digits)
{
  int64_t end;
  if (t.data[at] == '\'' && (end = contraction(t, at, true)) > at) return end;
  int n, m;
  uint16_t bits = class_at(t, at, &n);
  if (bits & UC_LETTER) return run_of(t, at + n, UC_LETTER);
  if (bits & UC_NUMBER) return run_up_to(t, at, UC_NUMBER, digits);
  uint16_t next = class_at(t, at + n, &m);
  if (!line_end(t, at) && (next & UC_LETTER)) return run_of(t, at + n + m, UC_LETTER);
  bool blank = t.data[at] == ' ';
  if (blank ? m > 0 && !(next & (UC_SPACE | UC_LETTER | UC_NUMBER)) : !(bits & UC_SPACE))
    return line_ends(t, run_without(t, at + n, UC_SPACE | UC_LETTER | UC_NUMBER));
  if ((end = white_lines(t, at)) > at) return end;
  return white(t, at);
}

static bool ascii_letter(char c) { return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z'); }

// [!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|
//  ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
// Returns `at` if nothing matches.
static int64_t deepseek(text t, int64_t at)
{
  enum { WORD = UC_LETTER | UC_MARK_NOW, SIGN = UC_PUNCTUATION_NOW | UC_SYMBOL };
  int n, m;
  uint16_t bits = class_at(t, at, &n), next = class_at(t, at + n, &m);
  if (n == 1 && (bits & UC_PUNCTUATION) && m == 1 && ascii_letter(t.data[at + 1])) {
    for (at++; at < t.size && ascii_letter(t.data[at]);) at++;
    return at;
  }
  if (bits & WORD) return run_of(t, at + n, WORD);
  if (!(bits & SIGN) && !line_end(t, at) && (next & WORD)) return run_of(t, at + n + m, WORD);
  bool blank = t.data[at] == ' ';
  if ((blank ? next : bits) & SIGN) return line_ends(t, run_of(t, at + n, SIGN));
  if (!(bits & UC_SPACE)) return at;
  int64_t end = white_lines(t, at);
  return end > at ? end : white(t, at);
}

// [一-龥぀-ゟ゠-ヿ]
static bool cjk(uint32_t c) { return (c >= 0x4E00 && c <= 0x9FA5) || (c >= 0x3040 && c <= 0x30FF); }

// Returns the end of the match that begins at `at`, or `at` if there is none.
static int64_t match_at(int scan, text t, int64_t at)
{
  int n;
  uint16_t bits;
  int64_t end = at;
  switch (scan) {
  case ENG_SCAN_GPT2: return gpt2(t, at);
  case ENG_SCAN_LLAMA3: return llama3(t, at, 3);
  case ENG_SCAN_QWEN2: return llama3(t, at, 1);
  case ENG_SCAN_DEEPSEEK: return deepseek(t, at);
  case ENG_SCAN_SPACE: return run_up_to(t, at, UC_SPACE, 1);       // \s
  case ENG_SCAN_SPACES: return run_of(t, at, UC_SPACE);            // \s+
  case ENG_SCAN_NUMERIC: return run_up_to(t, at, UC_NUMBER, 1);    // \p{N}
  case ENG_SCAN_DIGITS: return run_of(t, at, UC_NUMBER);           // \p{N}+
  case ENG_SCAN_DIGITS3: return run_up_to(t, at, UC_NUMBER, 3);    // \p{N}{1,3}
  case ENG_SCAN_PUNCTUATION: return run_up_to(t, at, UC_PUNCTUATION, 1);   // BERT's rule
  case ENG_SCAN_WORDS:                                     // \w+|[^\w\s]+
    bits = class_at(t, at, &n);
    if (bits & UC_WORD) return run_of(t, at, UC_WORD);
    return run_without(t, at, UC_WORD | UC_SPACE);
  case ENG_SCAN_BLANKS:                                    //  {2,}
    while (end < t.size && t.data[end] == ' ') end++;
    return end - at >= 2 ? end : at;
  case ENG_SCAN_CJK:
    while (end < t.size && cjk(code_at(t.data + end, &n))) end += n;
    return end;
  default: return at;
  }
}

bool pattern_next(int scan, const char *what, int64_t length, const char *data, int64_t size,
                  int64_t at, int64_t *start, int64_t *end)
{
  if (scan == 0) {
    const char *found = length > 0 && size - at >= length
      ? memmem(data + at, (size_t)(size - at), what, (size_t)length) : NULL;
    if (!found) return false;
    *start = found - data;
    *end = *start + length;
    return true;
  }
  text t = { data, size };
  for (int n; at < size; at += n) {
    *end = match_at(scan - 1, t, at);
    if (*end > at) { *start = at; return true; }
    code_at(data + at, &n);
  }
  return false;
}
