// Compares string.find, match, gmatch and gsub of policies with LuaJIT's on random strings and
// patterns: results, captures and errors must be equal. A call's charge must cover the basic blocks
// that it executes (counted with -fsanitize-coverage=trace-pc), and its CPU time must stay within
// the time limit. Run by `make fuzz`. Usage: pattern [rounds [seed]]
#include "policy/pattern.c"

#include <lualib.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#ifdef __clang__
#define UNCOUNTED __attribute__((no_sanitize("coverage")))
#else
#define UNCOUNTED __attribute__((no_sanitize_coverage))
#endif

static uint64_t blocks;

void __sanitizer_cov_trace_pc(void);
UNCOUNTED void __sanitizer_cov_trace_pc(void)
{
  ++blocks;
}

static uint64_t state;

UNCOUNTED static uint32_t draw(uint32_t below)
{
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (uint32_t)((state >> 33) % below);
}

// ------------------------------------------------------------------ random calls

typedef struct text { size_t length; char bytes[2048]; } text;

UNCOUNTED static void add(text *to, const char *bytes, size_t length)
{
  if (length > sizeof to->bytes - to->length) length = sizeof to->bytes - to->length;
  memcpy(to->bytes + to->length, bytes, length);
  to->length += length;
}

UNCOUNTED static char letter(void)
{
  static const char usual[] = "aaaabbbbcAB01_ .,-()[]%^$\n\0\x7F\x80\xFF";
  return draw(50) ? usual[draw(sizeof usual - 1)] : (char)draw(256);
}

UNCOUNTED static void draw_subject(text *out, bool large)
{
  out->length = 0;
  bool uniform = draw(3) == 0;
  for (uint32_t n = draw(large ? 2000 : 24); n > 0; --n) {
    char c = uniform ? 'a' + (draw(12) == 0) : letter();
    add(out, &c, 1);
  }
}

UNCOUNTED static void draw_pattern(text *out, bool large)
{
  static const char classes[] = "aAcCdDgGlLpPsSuUwWxXzZ%.[]-$b0123f";
  static const char suffixes[] = "*+-?";
  out->length = 0;
  if (draw(8) == 0) add(out, "^", 1);
  for (uint32_t n = draw(8); n > 0; --n) {
    char c[2] = {letter(), letter()};
    bool repeatable = true;
    switch (draw(14)) {
      case 0: case 1: case 2: add(out, "a", 1); break;
      case 3: add(out, c, 1); break;
      case 4: add(out, ".", 1); break;
      case 5: c[0] = '%'; c[1] = classes[draw(sizeof classes - 1)]; add(out, c, 2); break;
      case 6: add(out, "(", 1); repeatable = false; break;
      case 7: add(out, ")", 1); repeatable = false; break;
      case 8: add(out, "()", 2); repeatable = false; break;
      case 9: add(out, "%b", 2); add(out, c, 2); repeatable = false; break;
      case 10: add(out, "(a", 2); add(out, ")%1", draw(4)); repeatable = false; break;
      default:
        if (draw(3) == 0) { add(out, "%f", 2); repeatable = false; }
        add(out, "[^", 1 + draw(2));
        for (uint32_t members = draw(large ? 400 : 5); members > 0; --members) {
          c[0] = '%';
          c[1] = draw(4) ? letter() : classes[draw(sizeof classes - 1)];
          if (draw(3) == 0) add(out, c, 2);
          else add(out, c + 1, 1);
          if (draw(6) == 0) add(out, "-z", 1 + draw(2));
        }
        if (draw(20)) add(out, "]", 1);
    }
    if (repeatable && draw(2)) add(out, suffixes + draw(4), 1);
  }
  if (draw(10) == 0) add(out, "$", 1);
}

typedef struct call {
  int  function, init, fourth, replacement;       // a field 0: no such argument
  text subject, pattern, with;
} call;

enum { FIND, MATCH, GMATCH, GSUB, FUNCTIONS };
static const char *const names[] = {"find", "match", "gmatch", "gsub"};

UNCOUNTED static void draw_call(call *c)
{
  bool large = draw(20) == 0;
  c->function = (int)draw(FUNCTIONS);
  c->init = draw(3) ? 0 : (int)draw(60) - 30;
  c->fourth = draw(6) == 0;
  c->replacement = (int)draw(5);
  draw_subject(&c->subject, large);
  // past the end, LuaJIT with its 5.2 extensions answers differently; policies see 5.1's answer
  if (c->init > (int)c->subject.length + 1) c->init = (int)c->subject.length + 1;
  draw_pattern(&c->pattern, large && draw(2));
  if (draw(30) == 0) c->pattern = c->subject;
  c->with.length = 0;
  for (uint32_t n = draw(5); n > 0; --n) {
    char piece[2] = {'%', "0123%a"[draw(6)]};
    if (draw(2)) add(&c->with, piece, 2);
    else add(&c->with, "x", 1);
  }
}

// A replacement function: returns nothing for a string of odd length, else its first argument.
UNCOUNTED static int echo(lua_State *L)
{
  if (lua_type(L, 1) == LUA_TSTRING && lua_objlen(L, 1) % 2) return 0;
  lua_settop(L, 1);
  return 1;
}

// ------------------------------------------------------------------ running the calls

// Appends the values from stack index `from` on (results, or an error) to `out`.
UNCOUNTED static void read_results(text *out, lua_State *L, int from)
{
  for (int i = from; i <= lua_gettop(L); ++i) {
    size_t length = 0;
    const char *bytes = lua_tolstring(L, i, &length);
    add(out, lua_typename(L, lua_type(L, i)), 3);
    if (bytes) add(out, bytes, length);
    add(out, "|", 1);
  }
}

static int calls;

// Runs the call with the library at stack index 1, and counts it. Returns false on an error.
UNCOUNTED static bool run(text *out, lua_State *L, const call *c)
{
  calls = 1;
  out->length = 0;
  lua_settop(L, 1);
  lua_getfield(L, 1, names[c->function]);
  lua_pushlstring(L, c->subject.bytes, c->subject.length);
  lua_pushlstring(L, c->pattern.bytes, c->pattern.length);
  if (c->function == GSUB) {
    switch (c->replacement) {
      case 0: lua_pushcfunction(L, echo); break;
      case 1:
        lua_newtable(L);
        lua_pushliteral(L, "<a>");
        lua_setfield(L, -2, "a");
        lua_pushboolean(L, 0);
        lua_setfield(L, -2, "b");
        if (!c->fourth) break;
        lua_newtable(L);
        lua_setfield(L, -2, "aa");
        break;
      default: lua_pushlstring(L, c->with.bytes, c->with.length);
    }
    if (c->init) lua_pushinteger(L, c->init);
  } else if (c->function != GMATCH && c->init) {
    lua_pushinteger(L, c->init);
    if (c->fourth) lua_pushboolean(L, 1);
  }
  bool good = lua_pcall(L, lua_gettop(L) - 2, LUA_MULTRET, 0) == 0;
  if (c->function == GMATCH && good) {
    for (; good && calls < 3000; ++calls) {
      lua_settop(L, 2);
      lua_pushvalue(L, 2);
      good = lua_pcall(L, 0, LUA_MULTRET, 0) == 0;
      if (lua_gettop(L) == 2) break;
      if (good) read_results(out, L, 3);
    }
    if (!good) read_results(out, L, 3);
  } else read_results(out, L, 2);
  return good;
}

UNCOUNTED static double cpu_time(void)
{
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

UNCOUNTED static void show(const char *what, const text *t)
{
  fprintf(stderr, "  %s \"", what);
  for (size_t i = 0; i < t->length; ++i)
    fprintf(stderr, t->bytes[i] >= ' ' && t->bytes[i] < 127 ? "%c" : "\\%03d",
            (unsigned char)t->bytes[i]);
  fprintf(stderr, "\"\n");
}

UNCOUNTED static int complain(long round, const call *c, const char *what)
{
  fprintf(stderr, "fuzz: round %ld, string.%s init=%d fourth=%d replacement=%d: %s\n", round,
          names[c->function], c->init, c->fourth, c->replacement, what);
  show("subject", &c->subject);
  show("pattern", &c->pattern);
  show("with", &c->with);
  return 1;
}

enum {
  BLOCKS_PER_CHARGE = 64, BLOCKS_PER_CALL = 48,       // the most that may be executed
  LONG_EVERY = 1024, BUDGET = 1000000
};
static const double time_limit = 0.02, time_slack = 0.02;     // seconds

UNCOUNTED static eng_policy *open_policy(int64_t budget)
{
  static const char source[] =
    "return { init = function() return { scale = 1 } end, decide = function() return 1 end }";
  eng_policy *p = NULL;
  eng_policy_limits(0, budget, time_limit);
  if (eng_policy_load(&p, source, sizeof source - 1, "p.lua", NULL, NULL, 0) != ENG_OK) return NULL;
  lua_settop(p->L, 0);
  lua_newtable(p->L);
  policy_patterns_open(p->L);
  return p;
}

UNCOUNTED int main(int argc, char **argv)
{
  long rounds = argc > 1 ? atol(argv[1]) : 1000000, failed = 0, ended = 0, timed = 0;
  state = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
  // The first policy can exceed its instruction budget, the second only its time limit.
  eng_policy *policies[2] = {open_policy(BUDGET), open_policy(INT64_MAX / 2)};
  lua_State *plain = luaL_newstate();
  if (!policies[0] || !policies[1] || !plain) return 1;
  luaL_openlibs(plain);
  lua_getglobal(plain, "string");
  static call c;
  static text ours, theirs;
  double most = 0, slowest = 0;
  for (long round = 0; round < rounds; ++round) {
    draw_call(&c);
    eng_policy *p = policies[round % LONG_EVERY == LONG_EVERY - 1];
    if (round % LONG_EVERY == LONG_EVERY - 1) {               // backtracks for very long
      c = (call){.function = MATCH, .subject.length = 1000};
      memset(c.subject.bytes, 'a', 1000);
      for (int i = 0; i < 5; ++i) {
        static const char *const items[] = {".-", "a-", "[ab]-", "%w-", "%f[^b]a-", "[a-z]*"};
        const char *item = items[draw(6)];
        add(&c.pattern, item, strlen(item));
      }
      add(&c.pattern, "z", 1);
    }
    policy_enter(p);
    blocks = 0;
    double began = cpu_time();
    bool good = run(&ours, p->L, &c);
    double took = cpu_time() - began;
    policy_leave(p);
    double charged = (double)(p->instructions - p->budget);
    double per = ((double)blocks - BLOCKS_PER_CALL * calls) / charged;
    most = per > most ? per : most;
    slowest = took > slowest ? took : slowest;
    if (took > time_limit + time_slack) return complain(round, &c, "ran past the time limit");
    if (per > BLOCKS_PER_CHARGE) return complain(round, &c, "executed more than its charge covers");
    if (p->killed) {
      ++ended;
      timed += p != policies[0];
      continue;
    }
    failed += !good;
    if (run(&theirs, plain, &c) != good || ours.length != theirs.length ||
        memcmp(ours.bytes, theirs.bytes, ours.length) != 0) {
      complain(round, &c, "differs from LuaJIT");
      show("ours", &ours);
      show("LuaJIT", &theirs);
      return 1;
    }
  }
  printf("fuzz pattern: %ld calls, %ld raised the same errors, %ld ended by a limit (%ld by time); "
         "at most %.1f blocks per charge, %.3f s\n",
         rounds, failed, ended, timed, most, slowest);
  eng_policy_free(policies[0]);
  eng_policy_free(policies[1]);
  lua_close(plain);
  return failed > 0 && ended > 0 ? 0 : 1;
}
