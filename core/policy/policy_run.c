// Running a policy's code under limits: an allocator with a cap, an instruction budget enforced by
// a count hook, a time limit, and protected calls. A call that exceeds the limit on instructions or
// time ends with an error that the policy cannot catch. An allocation past the limit on memory
// raises an error that it can catch. Owns the limits that a policy gets when it is loaded. Called
// by the other files of this folder and by Lua (eng_policy_limits).
#include "policy_vm.h"

#include "base/error.h"

#include <luajit.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
  HOOK_INTERVAL = 256,            // Lua instructions between two checks of the budget
  CLOCK_INTERVAL = 4096,          // Lua instructions, at least, between two readings of the clock
  BYTES_PER_INSTRUCTION = 64,     // allocating this many bytes costs one instruction of the budget
  STACK_ROOM = 256 << 10,         // bytes of C stack that nested calls may take
};

static struct { int64_t memory, instructions; double seconds; } limits = { 8 << 20, 1000000, 2.0 };

void eng_policy_limits(int64_t memory, int64_t instructions, double seconds)
{
  if (memory > 0) limits.memory = memory;
  if (instructions > 0) limits.instructions = instructions;
  if (seconds > 0) limits.seconds = seconds;
}

// ------------------------------------------------------------------ memory and budget

eng_policy *policy_of(lua_State *L)
{
  void *policy;
  lua_getallocf(L, &policy);
  return policy;
}

static void *allocate(void *owner, void *piece, size_t old, size_t size)
{
  eng_policy *p = owner;
  if (!piece) old = 0;
  if (size == 0) {
    p->used -= old;
    free(piece);
    return NULL;
  }
  if (size > old && p->running) {
    // The cap on one allocation bounds the cost of a single instruction (a concatenation, a
    // comparison).
    if (p->used - old + size > p->limit || size > p->limit / 4) return NULL;
    p->budget -= (int64_t)((size - old) / BYTES_PER_INSTRUCTION);
    if (size > p->largest) p->largest = size;
  }
  void *moved = realloc(piece, size);
  if (!moved) return size <= old ? piece : NULL;      // Lua assumes that shrinking succeeds
  p->used += size - old;
  return moved;
}

static void budget_hook(lua_State *L, lua_Debug *at);

// Ends the policy's call with an error that the policy cannot catch. The message has the position
// of the function at `level` of the call stack. Does not return.
static void end_call(eng_policy *p, const char *why, int level)
{
  // From now on the hook raises at every instruction, so that no pcall in the policy can continue.
  p->killed = why;
  lua_sethook(p->L, budget_hook, LUA_MASKCOUNT, 1);
  luaL_where(p->L, level);
  lua_pushstring(p->L, why);
  lua_concat(p->L, 2);
  lua_error(p->L);
}

static const char out_of_budget[] = "the policy exceeded its instruction budget; a decision "
                                    "usually takes a few hundred instructions";
static const char out_of_time[] =
  "the policy exceeded its limit of processor time; a decision must take microseconds";

// Returns the seconds of processor time that this thread has used. Unlike the time of day, it does
// not depend on what else the machine does, and does not pass while the process is stopped.
static double processor_time(void)
{
  struct timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// Returns why the call must end now, or NULL. Called only after some work, so that short decisions
// do not pay for reading the clock.
static const char *overrun(eng_policy *p)
{
  p->unclocked = 0;
  double now = processor_time();
  if (p->deadline == 0) p->deadline = now + p->seconds;
  if (now > p->deadline) return out_of_time;
  return eng_interrupted() == 2 ? "interrupted" : NULL;
}

static void spend(eng_policy *p, int64_t work, int level)
{
  if (!p->running) return;
  if (p->killed) end_call(p, p->killed, level);
  p->budget -= work;
  if (p->budget < 0) end_call(p, out_of_budget, level);
  p->unclocked += work;
  const char *why = p->unclocked < CLOCK_INTERVAL ? NULL : overrun(p);
  if (why) end_call(p, why, level);
}

static void budget_hook(lua_State *L, lua_Debug *at)
{
  (void)at;
  spend(policy_of(L), HOOK_INTERVAL, 0);
}

void policy_charge(eng_policy *p, int64_t work) { spend(p, work, 1); }

void policy_check_stack(eng_policy *p)
{
  ptrdiff_t depth = p->stack - (const char *)__builtin_frame_address(0);
  if (depth > STACK_ROOM || depth < -STACK_ROOM) luaL_error(p->L, "calls nest too deeply");
}

void policy_enter(eng_policy *p)
{
  p->budget = p->instructions;
  p->deadline = 0;
  if (p->killed) lua_sethook(p->L, budget_hook, LUA_MASKCOUNT, HOOK_INTERVAL);
  p->killed = NULL;
  policy_continue(p);
}

void policy_continue(eng_policy *p)
{
  p->stack = __builtin_frame_address(0);
  p->running = true;
}

void policy_leave(eng_policy *p) { p->running = false; }

// ------------------------------------------------------------------ protected calls

static bool is_word(char c)
{ return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_'; }

int policy_line_of(const eng_policy *p, const char *word)
{
  bool is_return = strcmp(word, "return") == 0;
  size_t length = strlen(word);
  int line = 1, found = 1;
  for (const char *c = p->source; *c; ++c) {
    if (*c == '\n') { ++line; continue; }
    if (c[0] == '-' && c[1] == '-') {
      while (c[1] && c[1] != '\n') ++c;
      continue;
    }
    if ((c > p->source && is_word(c[-1])) || strncmp(c, word, length) != 0 || is_word(c[length]))
      continue;
    const char *after = c + length;
    while (*after == ' ' || *after == '\t') ++after;
    if (is_return) found = line;
    else if (*after == '=' && after[1] != '=') return line;
  }
  return found;
}

const char *policy_error_text(eng_policy *p)
{
  static _Thread_local char text[512];
  if (lua_type(p->L, -1) != LUA_TSTRING) {
    bool nothing = lua_isnoneornil(p->L, -1);
    snprintf(text, sizeof text, "%s: the policy raised an error %s%s", p->file,
             nothing ? "without a message" : "that is not a string but a ",
             nothing ? "" : luaL_typename(p->L, -1));
    return text;
  }
  const char *raised = lua_tostring(p->L, -1);
  lua_Debug where = {0};
  lua_pushvalue(p->L, SLOT_DECIDE);
  if (lua_isfunction(p->L, -1)) lua_getinfo(p->L, ">S", &where);
  else lua_pop(p->L, 1);
  if (strcmp(raised, "not enough memory") == 0)
    snprintf(text, sizeof text,
             "%s: out of memory: a policy may use %lld bytes, at most a quarter of them in one "
             "allocation",
             p->file, (long long)p->limit);
  else if (strncmp(raised, p->file, strlen(p->file)) == 0 ||
           strncmp(raised, where.short_src, strlen(where.short_src)) == 0)
    snprintf(text, sizeof text, "%s", raised);             // the message has file and line
  else snprintf(text, sizeof text, "%s: %s", p->file, raised);
  return text;
}

static int run_task(lua_State *L)
{
  eng_policy *p = policy_of(L);
  p->task(p, p->task_argument);
  return lua_gettop(L) > 0 ? 1 : 0;
}

eng_status policy_protected(eng_policy *p, void (*task)(eng_policy *, void *), void *argument)
{
  p->task = task;
  p->task_argument = argument;
  lua_pushvalue(p->L, SLOT_TASK);
  int failed = lua_pcall(p->L, 0, 1, 0);
  bool limited = p->running;           // memory then ran out because of the policy's limit
  policy_leave(p);
  if (!failed) return ENG_OK;
  eng_status status = failed == LUA_ERRMEM && !limited ? ENG_ERR_MEMORY : ENG_ERR_POLICY;
  error_set(status, "%s", policy_error_text(p));
  lua_settop(p->L, SLOT_COUNT);
  return status;
}

eng_status policy_call(eng_policy *p, int n)
{
  int failed = lua_pcall(p->L, n, 1, 0);
  policy_leave(p);
  if (failed || p->killed) {
    error_set(ENG_ERR_POLICY, "%s", failed ? policy_error_text(p) : p->killed);
    lua_settop(p->L, SLOT_COUNT);
    return ENG_ERR_POLICY;
  }
  return ENG_OK;
}

// ------------------------------------------------------------------ the Lua state

const char *policy_intern(lua_State *L, const char *name)
{
  lua_pushstring(L, name);
  const char *address = lua_tostring(L, -1);
  lua_pushboolean(L, 1);
  lua_rawset(L, LUA_REGISTRYINDEX);
  return address;
}

static int open_state(lua_State *L)
{
  // The JIT compiler is off, because hooks do not fire in compiled traces.
  luaJIT_setmode(L, 0, LUAJIT_MODE_ENGINE | LUAJIT_MODE_OFF);
  lua_gc(L, LUA_GCSETPAUSE, 150);
  lua_sethook(L, budget_hook, LUA_MASKCOUNT, HOOK_INTERVAL);
  lua_pushcfunction(L, run_task);
  lua_rawseti(L, LUA_REGISTRYINDEX, KEEP_TASK);
  return 0;
}

bool policy_open(eng_policy *p)
{
  p->limit = (size_t)limits.memory;
  p->instructions = limits.instructions;
  p->seconds = limits.seconds;
  p->L = lua_newstate(allocate, p);
  if (!p->L || lua_cpcall(p->L, open_state, NULL) != 0) return false;
  for (int slot = 1; slot < SLOT_COUNT; ++slot) lua_pushnil(p->L);
  lua_rawgeti(p->L, LUA_REGISTRYINDEX, KEEP_TASK);                       // SLOT_TASK
  return true;
}
