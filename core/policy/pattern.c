// The bounded pattern matcher. See pattern.h. Character classes are those of ASCII, whatever the
// locale.
#include "pattern.h"

#include <string.h>

const char pattern_exhausted[] = "pattern takes too long";

enum { DEEPEST = 200 };   // nested attempts, each a C frame
#define NO_MATCH ((ptrdiff_t)-1)

static ptrdiff_t match_here(pattern_state *m, size_t s, size_t p);

static ptrdiff_t refuse(pattern_state *m, const char *why)
{
  if (!m->error) m->error = why;
  return NO_MATCH;
}

// ------------------------------------------------------------------ single characters

static bool is_lower(int c) { return c >= 'a' && c <= 'z'; }
static bool is_upper(int c) { return c >= 'A' && c <= 'Z'; }
static bool is_digit(int c) { return c >= '0' && c <= '9'; }
static bool is_graph(int c) { return c > 32 && c < 127; }

static bool in_class(int c, int class)
{
  bool yes;
  switch (class | 32) {
    case 'a': yes = is_lower(c) || is_upper(c); break;
    case 'c': yes = c < 32 || c == 127; break;
    case 'd': yes = is_digit(c); break;
    case 'g': yes = is_graph(c); break;
    case 'l': yes = is_lower(c); break;
    case 'p': yes = is_graph(c) && !is_lower(c) && !is_upper(c) && !is_digit(c); break;
    case 's': yes = c == ' ' || (c >= '\t' && c <= '\r'); break;
    case 'u': yes = is_upper(c); break;
    case 'w': yes = is_lower(c) || is_upper(c) || is_digit(c); break;
    case 'x': yes = is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); break;
    case 'z': yes = c == 0; break;
    default: return class == c;
  }
  return is_upper(class) ? !yes : yes;
}

// The offset after the item (character, %class or [set]) at p; 0 with the error set if it is
// incomplete.
static size_t item_end(pattern_state *m, size_t p)
{
  char c = m->pattern[p++];
  if (c == '%') {
    if (p == m->pattern_length) { refuse(m, "malformed pattern (ends with '%')"); return 0; }
    return p + 1;
  }
  if (c != '[') return p;
  if (p < m->pattern_length && m->pattern[p] == '^') ++p;
  for (bool first = true;; first = false) {        // a ']' at the start is a member
    if (p >= m->pattern_length) { refuse(m, "malformed pattern (missing ']')"); return 0; }
    c = m->pattern[p++];
    if (c == ']' && !first) return p;
    if (c == '%') {
      if (p >= m->pattern_length) { refuse(m, "malformed pattern (missing ']')"); return 0; }
      ++p;
    }
  }
}

// Whether c is a member of the set between '[' at p and ']' at last.
static bool in_set(const pattern_state *m, int c, size_t p, size_t last)
{
  const unsigned char *pattern = (const unsigned char *)m->pattern;
  bool member = true;
  ++p;
  if (pattern[p] == '^') member = false, ++p;
  while (p < last) {
    if (pattern[p] == '%') {
      if (in_class(c, pattern[p + 1])) return member;
      p += 2;
    } else if (p + 2 < last && pattern[p + 1] == '-') {
      if (pattern[p] <= c && c <= pattern[p + 2]) return member;
      p += 3;
    } else {
      if (pattern[p] == c) return member;
      p += 1;
    }
  }
  return !member;
}

// Whether the subject's character at s matches the item [p, end).
static bool fits(pattern_state *m, size_t s, size_t p, size_t end)
{
  m->work -= m->pattern[p] == '[' ? (int64_t)(end - p) : 1;
  if (m->work < 0) { refuse(m, pattern_exhausted); return false; }
  if (s >= m->subject_length) return false;
  int c = (unsigned char)m->subject[s];
  switch (m->pattern[p]) {
    case '.': return true;
    case '%': return in_class(c, (unsigned char)m->pattern[p + 1]);
    case '[': return in_set(m, c, p, end - 1);
    default:  return (unsigned char)m->pattern[p] == c;
  }
}

// ------------------------------------------------------------------ special items

static ptrdiff_t balanced(pattern_state *m, size_t s, size_t p)      // %bxy, p at x
{
  if (p + 1 >= m->pattern_length) return refuse(m, "malformed pattern (missing arguments to '%b')");
  if (s >= m->subject_length || m->subject[s] != m->pattern[p]) return NO_MATCH;
  char opening = m->pattern[p], closing = m->pattern[p + 1];
  for (size_t open = 1, i = s + 1; i < m->subject_length; ++i) {
    if (--m->work < 0) return refuse(m, pattern_exhausted);
    if (m->subject[i] == closing) {
      if (--open == 0) return (ptrdiff_t)(i + 1);
    } else if (m->subject[i] == opening) ++open;
  }
  return NO_MATCH;
}

static ptrdiff_t same_again(pattern_state *m, size_t s, int index)   // %1
{
  if (index < 0 || index >= m->captures || m->capture[index].length == PATTERN_OPEN)
    return refuse(m, "invalid capture index");
  if (m->capture[index].length == PATTERN_POSITION) return NO_MATCH;
  size_t length = (size_t)m->capture[index].length;
  m->work -= (int64_t)length;
  if (m->work < 0) return refuse(m, pattern_exhausted);
  if (m->subject_length - s < length ||
      memcmp(m->subject + m->capture[index].begin, m->subject + s, length) != 0)
    return NO_MATCH;
  return (ptrdiff_t)(s + length);
}

static ptrdiff_t open_capture(pattern_state *m, size_t s, size_t p, ptrdiff_t length)
{
  if (m->captures == PATTERN_CAPTURES) return refuse(m, "too many captures");
  m->capture[m->captures].begin = s;
  m->capture[m->captures++].length = length;
  ptrdiff_t end = match_here(m, s, p);
  if (end < 0) --m->captures;
  return end;
}

static ptrdiff_t close_capture(pattern_state *m, size_t s, size_t p)
{
  int last = m->captures - 1;
  while (last >= 0 && m->capture[last].length != PATTERN_OPEN) --last;
  if (last < 0) return refuse(m, "invalid pattern capture");
  m->capture[last].length = (ptrdiff_t)(s - m->capture[last].begin);
  ptrdiff_t end = match_here(m, s, p);
  if (end < 0) m->capture[last].length = PATTERN_OPEN;
  return end;
}

static ptrdiff_t repeat_most(pattern_state *m, size_t s, size_t p, size_t end, size_t least)
{
  size_t count = 0;
  while (fits(m, s + count, p, end)) ++count;
  for (;; --count) {
    if (m->error || count < least) return NO_MATCH;
    ptrdiff_t r = match_here(m, s + count, end + 1);
    if (r >= 0 || count == 0) return r;
  }
}

static ptrdiff_t repeat_least(pattern_state *m, size_t s, size_t p, size_t end)
{
  for (;;) {
    ptrdiff_t r = match_here(m, s, end + 1);
    if (r >= 0 || m->error) return r;
    if (!fits(m, s, p, end)) return NO_MATCH;
    ++s;
  }
}

// ------------------------------------------------------------------ the whole pattern

static ptrdiff_t match_items(pattern_state *m, size_t s, size_t p)
{
  while (!m->error) {
    if (--m->work < 0) return refuse(m, pattern_exhausted);
    if (p == m->pattern_length) return (ptrdiff_t)s;
    char c = m->pattern[p], next = p + 1 < m->pattern_length ? m->pattern[p + 1] : '\0';
    if (c == '(')
      return next == ')' ? open_capture(m, s, p + 2, PATTERN_POSITION)
                         : open_capture(m, s, p + 1, PATTERN_OPEN);
    if (c == ')') return close_capture(m, s, p + 1);
    if (c == '$' && p + 1 == m->pattern_length)
      return s == m->subject_length ? (ptrdiff_t)s : NO_MATCH;
    if (c == '%' && (next == 'b' || is_digit(next))) {
      ptrdiff_t r = next == 'b' ? balanced(m, s, p + 2) : same_again(m, s, next - '1');
      if (r < 0) return r;
      s = (size_t)r;
      p += next == 'b' ? 4 : 2;
      continue;
    }
    if (c == '%' && next == 'f') {  // %f[set]: the previous character is not a member, this one is
      p += 2;
      if (p >= m->pattern_length || m->pattern[p] != '[')
        return refuse(m, "missing '[' after '%f' in pattern");
      size_t end = item_end(m, p);
      if (!end) return NO_MATCH;
      int before = s == 0 ? 0 : (unsigned char)m->subject[s - 1];
      int here = s < m->subject_length ? (unsigned char)m->subject[s] : 0;
      if (in_set(m, before, p, end - 1) || !in_set(m, here, p, end - 1)) return NO_MATCH;
      p = end;
      continue;
    }
    size_t end = item_end(m, p);
    if (!end) return NO_MATCH;
    switch (end < m->pattern_length ? m->pattern[end] : '\0') {
      case '*': return repeat_most(m, s, p, end, 0);
      case '+': return repeat_most(m, s, p, end, 1);
      case '-': return repeat_least(m, s, p, end);
      case '?':
        if (fits(m, s, p, end)) {
          ptrdiff_t r = match_here(m, s + 1, end + 1);
          if (r >= 0 || m->error) return r;
        }
        p = end + 1;
        continue;
      default:
        if (!fits(m, s, p, end)) return NO_MATCH;
        ++s;
        p = end;
    }
  }
  return NO_MATCH;
}

static ptrdiff_t match_here(pattern_state *m, size_t s, size_t p)
{
  if (m->depth == DEEPEST) return refuse(m, "pattern too complex");
  ++m->depth;
  ptrdiff_t end = match_items(m, s, p);
  --m->depth;
  return end;
}

bool pattern_match(pattern_state *m, size_t start, size_t at, size_t *end)
{
  m->error = NULL;
  m->depth = 0;
  m->captures = 0;
  ptrdiff_t r = match_here(m, start, at);
  if (r >= 0 && !m->error) {
    for (int i = 0; i < m->captures; ++i)
      if (m->capture[i].length == PATTERN_OPEN) { refuse(m, "unfinished capture"); return false; }
    *end = (size_t)r;
  }
  return r >= 0 && !m->error;
}
