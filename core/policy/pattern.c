// string.find, match, gmatch and gsub for policies. They have LuaJIT's semantics (a pattern ends at
// a zero byte, and character classes follow ASCII), but bounded work, because LuaJIT's functions
// may backtrack for hours inside one call. Every loop here whose length depends on the subject or
// the pattern charges one instruction per iteration to the policy's budget. Charging also reads the
// clock at intervals, so a match ends within the policy's limits.
// Called by policy_library.c, and by policy_verdict.c for patterns in a verdict.
// spec/fuzz/pattern.c compares these functions with LuaJIT's and checks the charges.
#include "policy_vm.h"

#include "base/error.h"

#include <string.h>

enum { CAPTURES = 32, DEEPEST = 200 };      // LuaJIT's limits; DEEPEST: nested match_here calls
enum { OPEN = -1, POSITION = -2 };          // lengths of captures without text. OPEN: not yet
                                            // closed. POSITION: the capture is "()"

typedef struct match {
  lua_State  *L;
  eng_policy *policy;
  const char *subject, *end, *pattern;      // subject and pattern end with a zero byte
  size_t      pattern_length;
  bool        whole;                        // a match must reach the end of the subject
  int         depth, captures;
  struct { const char *begin; ptrdiff_t length; } capture[CAPTURES];
} match;

static const char *match_here(match *m, const char *s, const char *p);

static void step(const match *m) { policy_charge(m->policy, 1); }

static const char *refuse(const match *m, const char *why)
{
  luaL_error(m->L, "%s", why);
  return NULL;
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

// Returns the end of the item (character, %class or [set]) at p.
static const char *item_end(const match *m, const char *p)
{
  char c = *p++;
  if (c == '%') return *p ? p + 1 : refuse(m, "malformed pattern (ends with '%')");
  if (c != '[') return p;
  if (*p == '^') ++p;
  for (bool first = true;; first = false) {        // a ']' at the start is a member
    step(m);
    if (*p == ']' && !first) return p + 1;
    if (*p == '%' && p[1]) ++p;
    if (!*p) return refuse(m, "malformed pattern (missing ']')");
    ++p;
  }
}

// Returns whether c is a member of the set between '[' at `first` and ']' at `last`.
static bool in_set(const match *m, int c, const char *first, const char *last)
{
  const unsigned char *p = (const unsigned char *)first + 1, *end = (const unsigned char *)last;
  bool member = true;
  if (*p == '^') member = false, ++p;
  while (p < end) {
    step(m);
    if (*p == '%') {
      if (in_class(c, p[1])) return member;
      p += 2;
    } else if (p[1] == '-' && p + 2 < end) {
      if (p[0] <= c && c <= p[2]) return member;
      p += 3;
    } else {
      if (*p == c) return member;
      p += 1;
    }
  }
  return !member;
}

// Returns whether the subject's character at s matches the item [p, end).
static bool fits(const match *m, const char *s, const char *p, const char *end)
{
  if (s == m->end) return false;
  int c = (unsigned char)*s;
  switch (*p) {
    case '.': return true;
    case '%': return in_class(c, (unsigned char)p[1]);
    case '[': return in_set(m, c, p, end - 1);
    default:  return *s == *p;
  }
}

// ------------------------------------------------------------------ special items

// Matches an item %bxy at s, where p points at x. Returns the end of the match, or NULL.
static const char *balanced(const match *m, const char *s, const char *p)
{
  if (!p[0] || !p[1]) return refuse(m, "unbalanced pattern");
  if (s == m->end || *s != p[0]) return NULL;
  size_t open = 1;
  while (++s < m->end) {
    step(m);
    if (*s == p[1]) {
      if (--open == 0) return s + 1;
    } else if (*s == p[0]) ++open;
  }
  return NULL;
}

// Matches an item such as %1: if the text of capture `index` (from 0) occurs again at s, returns
// the end of this occurrence, otherwise NULL.
static const char *same_again(const match *m, const char *s, int index)
{
  if (index < 0 || index >= m->captures || m->capture[index].length == OPEN)
    return refuse(m, "invalid capture index");
  const char *text = m->capture[index].begin;
  ptrdiff_t length = m->capture[index].length;
  if (length == POSITION || m->end - s < length) return NULL;
  for (; length > 0; --length) {
    step(m);
    if (*s++ != *text++) return NULL;
  }
  return s;
}

static const char *open_capture(match *m, const char *s, const char *p, ptrdiff_t length)
{
  if (m->captures == CAPTURES) return refuse(m, "too many captures");
  m->capture[m->captures].begin = s;
  m->capture[m->captures++].length = length;
  const char *end = match_here(m, s, p);
  if (!end) --m->captures;
  return end;
}

static const char *close_capture(match *m, const char *s, const char *p)
{
  int last = m->captures - 1;
  while (last >= 0 && m->capture[last].length != OPEN) --last;
  if (last < 0) return refuse(m, "invalid pattern capture");
  m->capture[last].length = s - m->capture[last].begin;
  const char *end = match_here(m, s, p);
  if (!end) m->capture[last].length = OPEN;
  return end;
}

static const char *repeat_most(match *m, const char *s, const char *p, const char *end,
                               ptrdiff_t least)
{
  ptrdiff_t count = 0;
  while (fits(m, s + count, p, end)) step(m), ++count;
  for (; count >= least; --count) {
    const char *found = match_here(m, s + count, end + 1);
    if (found) return found;
  }
  return NULL;
}

static const char *repeat_least(match *m, const char *s, const char *p, const char *end)
{
  for (;; ++s) {
    const char *found = match_here(m, s, end + 1);
    if (found || !fits(m, s, p, end)) return found;
  }
}

// ------------------------------------------------------------------ the whole pattern

static const char *match_items(match *m, const char *s, const char *p)
{
  for (;;) {
    step(m);
    switch (*p) {
      case '\0': return !m->whole || s == m->end ? s : NULL;
      case '(':
        return p[1] == ')' ? open_capture(m, s, p + 2, POSITION) : open_capture(m, s, p + 1, OPEN);
      case ')': return close_capture(m, s, p + 1);
      case '$':
        if (!p[1]) return s == m->end ? s : NULL;
        break;
      case '%':
        if (p[1] == 'b' || is_digit(p[1])) {
          s = p[1] == 'b' ? balanced(m, s, p + 2) : same_again(m, s, p[1] - '1');
          if (!s) return NULL;
          p += p[1] == 'b' ? 4 : 2;
          continue;
        }
        if (p[1] == 'f') {  // %f[set]: the previous character is not in the set, and this one is
          p += 2;
          if (*p != '[') return refuse(m, "missing '[' after '%f' in pattern");
          const char *end = item_end(m, p);
          int before = s == m->subject ? 0 : (unsigned char)s[-1];
          if (in_set(m, before, p, end - 1) || !in_set(m, (unsigned char)*s, p, end - 1))
            return NULL;
          p = end;
          continue;
        }
    }
    const char *end = item_end(m, p), *found;
    switch (*end) {
      case '*': return repeat_most(m, s, p, end, 0);
      case '+': return repeat_most(m, s, p, end, 1);
      case '-': return repeat_least(m, s, p, end);
      case '?':
        if (fits(m, s, p, end) && (found = match_here(m, s + 1, end + 1))) return found;
        p = end + 1;
        continue;
    }
    if (!fits(m, s, p, end)) return NULL;
    ++s;
    p = end;
  }
}

static const char *match_here(match *m, const char *s, const char *p)
{
  if (m->depth == DEEPEST) return refuse(m, "pattern too complex");
  ++m->depth;
  const char *end = match_items(m, s, p);
  --m->depth;
  return end;
}

// Returns the end of a match that begins at s, or NULL.
static const char *match_at(match *m, const char *s, const char *p)
{
  m->depth = m->captures = 0;
  return match_here(m, s, p);
}

// ------------------------------------------------------------------ the four functions

static void begin_match(match *m, lua_State *L)
{
  size_t length;
  m->L = L;
  m->policy = policy_of(L);
  m->subject = luaL_checklstring(L, 1, &length);
  m->end = m->subject + length;
  m->pattern = luaL_checklstring(L, 2, &m->pattern_length);
  m->whole = false;
}

// Pushes capture i (counted from 0) of the match [s, end). If the pattern has no captures, capture
// 0 is the whole match.
static void push_capture(const match *m, int i, const char *s, const char *end)
{
  ptrdiff_t length = i < m->captures ? m->capture[i].length : end - s;
  if (i >= m->captures && i > 0) refuse(m, "invalid capture index");
  if (length == OPEN) refuse(m, "unfinished capture");
  if (length == POSITION) lua_pushinteger(m->L, m->capture[i].begin - m->subject + 1);
  else lua_pushlstring(m->L, i < m->captures ? m->capture[i].begin : s, (size_t)length);
}

// Pushes all captures and returns their number. If there are none and `least` is 1, pushes the
// whole match and returns 1.
static int push_captures(const match *m, int least, const char *s, const char *end)
{
  int n = m->captures > least ? m->captures : least;
  luaL_checkstack(m->L, n, "too many captures");
  for (int i = 0; i < n; ++i) push_capture(m, i, s, end);
  return n;
}

static bool is_plain(const match *m)
{
  for (size_t i = 0; i < m->pattern_length; ++i) {
    step(m);
    if (memchr("^$*+?.([%-", m->pattern[i], 10)) return false;
  }
  return true;
}

static const char *find_plain(const match *m, const char *s)
{
  for (; (size_t)(m->end - s) >= m->pattern_length; ++s) {
    size_t i = 0;
    for (step(m); i < m->pattern_length && s[i] == m->pattern[i]; ++i) step(m);
    if (i == m->pattern_length) return s;
  }
  return NULL;
}

static int find_or_match(lua_State *L, bool find)
{
  match m;
  begin_match(&m, L);
  lua_Integer first = luaL_optinteger(L, 3, 1), length = m.end - m.subject;
  first = first < 0 ? first + length : first - 1;
  const char *s = m.subject + (first < 0 ? 0 : first > length ? length : first), *end;
  if (find && (lua_toboolean(L, 4) || is_plain(&m))) {
    s = find_plain(&m, s);
    if (!s) { lua_pushnil(L); return 1; }
    lua_pushinteger(L, s - m.subject + 1);
    lua_pushinteger(L, s - m.subject + (lua_Integer)m.pattern_length);
    return 2;
  }
  bool anchored = *m.pattern == '^';
  do {
    end = match_at(&m, s, m.pattern + anchored);
    if (!end) continue;
    if (!find) return push_captures(&m, 1, s, end);
    lua_pushinteger(L, s - m.subject + 1);
    lua_pushinteger(L, end - m.subject);
    return 2 + push_captures(&m, 0, s, end);
  } while (s++ < m.end && !anchored);
  lua_pushnil(L);
  return 1;
}

static int box_find(lua_State *L) { return find_or_match(L, true); }

static int box_match(lua_State *L) { return find_or_match(L, false); }

// The iterator of gmatch. Upvalues: subject, pattern, the offset at which the search continues.
static int gmatch_step(lua_State *L)
{
  match m;
  lua_settop(L, 0);
  lua_pushvalue(L, lua_upvalueindex(1));
  lua_pushvalue(L, lua_upvalueindex(2));
  begin_match(&m, L);
  for (const char *s = m.subject + lua_tointeger(L, lua_upvalueindex(3)); s <= m.end; ++s) {
    const char *end = match_at(&m, s, m.pattern);
    if (!end) continue;
    lua_pushinteger(L, end - m.subject + (end == s));        // an empty match advances by one
    lua_replace(L, lua_upvalueindex(3));
    return push_captures(&m, 1, s, end);
  }
  return 0;
}

static int box_gmatch(lua_State *L)
{
  luaL_checkstring(L, 1);
  luaL_checkstring(L, 2);
  lua_settop(L, 2);
  lua_pushinteger(L, 0);
  lua_pushcclosure(L, gmatch_step, 3);
  return 1;
}

static void add_text(const match *m, luaL_Buffer *b, const char *s, const char *end)
{
  size_t length;
  const char *text = lua_tolstring(m->L, 3, &length);
  for (size_t i = 0; i < length; ++i) {
    step(m);
    if (text[i] != '%') luaL_addchar(b, text[i]);
    else if (text[++i] == '0') luaL_addlstring(b, s, (size_t)(end - s));
    else if (is_digit(text[i])) {
      push_capture(m, text[i] - '1', s, end);
      luaL_addvalue(b);
    } else luaL_addchar(b, text[i]);
  }
}

static void add_replacement(const match *m, luaL_Buffer *b, const char *s, const char *end)
{
  lua_State *L = m->L;
  switch (lua_type(L, 3)) {
    case LUA_TFUNCTION:
      policy_check_stack(m->policy);
      lua_pushvalue(L, 3);
      lua_call(L, push_captures(m, 1, s, end), 1);
      break;
    case LUA_TTABLE:
      push_capture(m, 0, s, end);
      lua_gettable(L, 3);
      break;
    default: add_text(m, b, s, end); return;
  }
  if (!lua_toboolean(L, -1)) {                       // nil or false keeps the matched text
    lua_pop(L, 1);
    lua_pushlstring(L, s, (size_t)(end - s));
  } else if (!lua_isstring(L, -1))
    luaL_error(L, "invalid replacement value (a %s)", luaL_typename(L, -1));
  luaL_addvalue(b);
}

static int box_gsub(lua_State *L)
{
  match m;
  begin_match(&m, L);
  const char *s = m.subject;
  int type = lua_type(L, 3);
  lua_Integer most = luaL_optinteger(L, 4, m.end - s + 1), count = 0;
  luaL_argcheck(
    L, type == LUA_TSTRING || type == LUA_TNUMBER || type == LUA_TTABLE || type == LUA_TFUNCTION, 3,
    "string/function/table expected");
  bool anchored = *m.pattern == '^';
  luaL_Buffer b;
  luaL_buffinit(L, &b);
  while (count < most) {
    const char *end = match_at(&m, s, m.pattern + anchored);
    if (end) {
      ++count;
      add_replacement(&m, &b, s, end);
    }
    if (end && end > s) s = end;
    else if (s < m.end) { luaL_addchar(&b, *s); ++s; }
    else break;
    if (anchored) break;
  }
  luaL_addlstring(&b, s, (size_t)(m.end - s));
  luaL_pushresult(&b);
  lua_pushinteger(L, count);
  return 2;
}

void policy_patterns_open(lua_State *L)
{
  static const luaL_Reg functions[] = {{"find", box_find},
                                       {"match", box_match},
                                       {"gmatch", box_gmatch},
                                       {"gsub", box_gsub},
                                       {NULL, NULL}};
  luaL_register(L, NULL, functions);
}

// ------------------------------------------------------------------ names

static int match_names(lua_State *L)                         // argument: pattern
{
  eng_policy *p = policy_of(L);
  const char *pattern = luaL_checkstring(L, 1);
  match m = {.L = L, .policy = p, .pattern = pattern, .whole = true};
  for (int i = 0; i < p->n_tensors + p->n_groups; ++i) {
    m.subject = i < p->n_tensors ? p->tensors[i] : p->groups[i - p->n_tensors];
    m.end = m.subject + strlen(m.subject);
    const char *end = match_at(&m, m.subject, pattern + (*pattern == '^'));
    p->matched[i] = end != NULL;
    if (end) push_captures(&m, 0, m.subject, end);           // refuses "(a"
    lua_settop(L, 1);
  }
  lua_pushnil(L);
  return 1;
}

eng_status policy_match_names(eng_policy *p)
{
  lua_pushcfunction(p->L, match_names);
  lua_pushvalue(p->L, -2);
  policy_continue(p);
  ENG_TRY(policy_call(p, 1));
  lua_pop(p->L, 2);
  return ENG_OK;
}
