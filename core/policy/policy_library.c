// The library that a policy sees: the base functions, and the constant tables math, table, string,
// bit and check. It excludes functions that could leave the sandbox, keep hidden state, run long
// inside one C call, or differ between replays of the same record. It has the engine's own pairs
// and next (fixed order), tostring and string.format (no addresses), math.random (seeded by the
// step), table.sort and pattern functions (bounded work and C stack). Called by policy_vm.c when a
// policy is loaded.
#define _GNU_SOURCE
#include "policy_vm.h"

#include "base/text.h"

#include <lualib.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ------------------------------------------------------------------ base

// Raises an error for an undefined global. The message for a name that was removed on purpose
// differs from the message for a misspelt name.
static int unknown_global(lua_State *L)
{
  static const char *const names[] = {
    "assert", "error",  "ipairs", "next",  "pairs",  "pcall", "select", "tonumber", "tostring",
    "type",   "unpack", "math",   "table", "string", "bit",   "check",  "back_off", "grow",
    "rescale",
    "print"};
  static const char *const removed[] = {
    "load",    "loadstring", "loadfile",  "dofile", "require",  "collectgarbage", "getfenv",
    "setfenv", "newproxy",   "rawset",    "rawget", "rawequal", "setmetatable",   "getmetatable",
    "xpcall",  "coroutine",  "io",     "os",       "debug",          "package",
    "ffi",     "jit",        "module",    "gcinfo", "_G"};
  const char *name = lua_type(L, 2) == LUA_TSTRING ? lua_tostring(L, 2) : "?";
  for (size_t i = 0; i < sizeof removed / sizeof *removed; ++i)
    if (strcmp(name, removed[i]) == 0)
      return luaL_error(L, "'%s' is not available in a policy; hint: \"The sandbox\" in "
                        "policies/README.md lists what is", name);
  return luaL_error(L, "'%s' is not defined%s", name,
                    nearest_hint(name, names, (int)(sizeof names / sizeof *names)));
}

static int global_assigned(lua_State *L)
{
  return luaL_error(
    L,
    "a policy has no global variables ('%s'): write 'local'; values that must last belong in "
    "'state'",
    lua_type(L, 2) == LUA_TSTRING ? lua_tostring(L, 2) : "?");
}

// An exhausted budget ends the policy even inside a pcall. Each pcall is charged, because with a
// nearly full stack LuaJIT raises an error before it counts an instruction of the called function.
static int box_pcall(lua_State *L)
{
  eng_policy *p = policy_of(L);
  luaL_checkany(L, 1);
  policy_check_stack(p);
  policy_charge(p, 16);
  int status = lua_pcall(L, lua_gettop(L) - 1, LUA_MULTRET, 0);
  policy_charge(p, 0);  // raises again if the call must end
  lua_pushboolean(L, status == 0);
  lua_insert(L, 1);
  return lua_gettop(L);
}

static int box_tostring(lua_State *L)
{
  luaL_checkany(L, 1);
  switch (lua_type(L, 1)) {
    case LUA_TSTRING:  lua_settop(L, 1); break;
    case LUA_TNUMBER:  lua_settop(L, 1); lua_tostring(L, 1); break;
    case LUA_TBOOLEAN: lua_pushstring(L, lua_toboolean(L, 1) ? "true" : "false"); break;
    case LUA_TUSERDATA:
      lua_pushstring(L, policy_record_name(L, 1) ? policy_record_name(L, 1) : "userdata");
      break;
    default:           lua_pushstring(L, luaL_typename(L, 1));
  }
  return 1;
}

// Adds a line to `printed`: the position of the call and the arguments, separated by spaces.
static int box_print(lua_State *L)
{
  eng_policy *p = policy_of(L);
  int n = lua_gettop(L);
  luaL_where(L, 1);
  luaL_checkstack(L, 2 * n + 2, "too many arguments");
  for (int i = 1; i <= n; ++i) {
    lua_pushcfunction(L, box_tostring);
    lua_pushvalue(L, i);
    lua_call(L, 1, 1);
    if (i < n) lua_pushliteral(L, " ");
  }
  lua_concat(L, lua_gettop(L) - n);
  size_t length;
  const char *text = lua_tolstring(L, -1, &length);
  policy_charge(p, 16 + (int64_t)length);
  if (p->printed_read) p->printed_bytes = 0;
  p->printed_read = false;
  size_t room = sizeof p->printed - p->printed_bytes;
  if (room < 8) return 0;
  char *to = p->printed + p->printed_bytes;
  eng_text_shown(to, (int64_t)room - 1, text, (int64_t)length, false);
  p->printed_bytes += strlen(to) + 1;
  p->printed[p->printed_bytes - 1] = '\n';
  p->printed[p->printed_bytes] = '\0';
  return 0;
}

const char *eng_policy_printed(eng_policy *p)
{
  if (p->printed_read || p->printed_bytes == 0) return "";
  p->printed_read = true;
  return p->printed;
}

// Calls the library function that the running function wraps, with the same arguments. If LuaJIT
// raises an error in a function called from C, the message has neither a position nor the name of
// the function. Both are added here.
static int call_wrapped(lua_State *L)                  // upvalues: see box_function
{
  lua_pushvalue(L, lua_upvalueindex(1));
  lua_insert(L, 1);
  int status = lua_pcall(L, lua_gettop(L) - 1, LUA_MULTRET, 0);
  if (status == 0) return lua_gettop(L);
  policy_charge(policy_of(L), 0);                      // raises again if the call must end
  if (status == LUA_ERRMEM) return lua_error(L);
  luaL_where(L, 1);
  luaL_gsub(L, lua_tostring(L, -2), "'?'", lua_tostring(L, lua_upvalueindex(2)));
  lua_concat(L, 2);
  return lua_error(L);
}

// table.insert and table.move ignore metatables. So this function refuses a constant as argument 1
// of either, or as argument 5 of move. An insert moves all later elements and is charged for their
// number.
static int box_writing(lua_State *L)                   // upvalues: see box_function
{
  if (lua_gettop(L) == 3 && lua_istable(L, 1) && lua_isnumber(L, 2)) {
    lua_Number n = (lua_Number)lua_objlen(L, 1), at = lua_tonumber(L, 2);
    if (!(at >= 1 && at <= n + 1))
      return luaL_error(L, "table.insert: expected a position from 1 to %f, got %f", n + 1, at);
    policy_charge(policy_of(L), (int64_t)(n + 1 - at));
  }
  for (int i = 1; i <= 5; i += 4)
    if (lua_istable(L, i) && lua_getmetatable(L, i))
      return luaL_error(L, "%s: this table is constant; use 'state' for values that change",
                        lua_tostring(L, lua_upvalueindex(2)));
  return call_wrapped(L);
}

// pairs and next visit keys in a fixed order: numbers, then strings by bytes, then booleans. Lua's
// own order of string keys changes from process to process.

// Charges for a traversal of a table with n entries. A traversal also visits empty slots. Lua does
// not report their number, but the policy's largest allocation bounds it.
static void charge_walk(eng_policy *p, int64_t n)
{ policy_charge(p, n + (int64_t)(p->largest / 1024)); }

static data_item read_key(lua_State *L, int index)
{
  size_t length;
  data_item key = {.tag = 'n'};
  switch (lua_type(L, index)) {
    case LUA_TNUMBER: key.number = lua_tonumber(L, index); break;
    case LUA_TSTRING:
      key.tag = 's';
      key.string = lua_tolstring(L, index, &length);
      key.length = (uint32_t)length;
      break;
    case LUA_TBOOLEAN: key.tag = lua_toboolean(L, index) ? 't' : 'f'; break;
    default:
      luaL_error(L, "pairs, next: a %s as a key has no fixed order; use numbers, strings or "
                    "booleans", luaL_typename(L, index));
  }
  return key;
}

static void push_key(lua_State *L, const data_item *key)
{
  if (key->tag == 's') lua_pushlstring(L, key->string, key->length);
  else if (key->tag == 'n') lua_pushnumber(L, key->number);
  else lua_pushboolean(L, key->tag == 't');
}

// The iterator of pairs. Upvalues: the table, its sorted keys, the index of the current key.
static int pairs_step(lua_State *L)
{
  lua_Integer i = lua_tointeger(L, lua_upvalueindex(3));
  for (;;) {
    lua_rawgeti(L, lua_upvalueindex(2), (int)++i);
    if (lua_isnil(L, -1)) return 1;
    lua_pushvalue(L, -1);
    lua_rawget(L, lua_upvalueindex(1));
    if (!lua_isnil(L, -1)) break;                     // nil: removed during the traversal
    lua_pop(L, 2);
  }
  lua_pushinteger(L, i);
  lua_replace(L, lua_upvalueindex(3));
  return 2;
}

static int box_ipairs(lua_State *L)                    // upvalues: see box_function
{
  return policy_record_ipairs(L, 1) ? 3 : call_wrapped(L);
}

static int box_pairs(lua_State *L)
{
  if (policy_record_pairs(L, 1)) return 3;
  luaL_checktype(L, 1, LUA_TTABLE);
  lua_settop(L, 1);
  policy_open_constant(L, 1);
  size_t n = 0;
  for (lua_pushnil(L); lua_next(L, 1); lua_pop(L, 1)) ++n;
  charge_walk(policy_of(L), (int64_t)n * 8);
  lua_pushvalue(L, 1);
  data_item *keys = lua_newuserdata(L, (n + 1) * sizeof *keys);
  size_t i = 0;
  for (lua_pushnil(L); lua_next(L, 1); lua_pop(L, 1)) keys[i++] = read_key(L, -2);
  qsort(keys, n, sizeof *keys, data_by_key);
  lua_createtable(L, (int)n, 0);
  for (i = 0; i < n; ++i) {
    push_key(L, &keys[i]);
    lua_rawseti(L, -2, (int)i + 1);
  }
  lua_remove(L, -2);
  lua_pushinteger(L, 0);
  lua_pushcclosure(L, pairs_step, 3);
  lua_pushvalue(L, 1);
  lua_pushnil(L);
  return 3;
}

// Returns the next key and its value: the smallest key above the given key or, for nil, the
// smallest key of the table. Returns nil after the last key.
static int box_next(lua_State *L)
{
  luaL_checktype(L, 1, LUA_TTABLE);
  lua_settop(L, 2);
  policy_open_constant(L, 1);
  data_item after = {0}, best = {0};
  bool first = lua_isnil(L, 2), found = false;
  if (!first) after = read_key(L, 2);
  int64_t n = 0;
  for (lua_pushnil(L); lua_next(L, 1); lua_pop(L, 1), ++n) {
    data_item key = read_key(L, -2);
    if ((first || data_by_key(&key, &after) > 0) && (!found || data_by_key(&key, &best) < 0))
      best = key, found = true;
  }
  charge_walk(policy_of(L), n);
  if (!found) { lua_pushnil(L); return 1; }
  push_key(L, &best);
  lua_pushvalue(L, -1);
  lua_rawget(L, 1);
  return 2;
}

// ------------------------------------------------------------------ math

// Rounds to float32, like a scaler that keeps its scale in a float32 tensor.
static int box_f32(lua_State *L)
{
  lua_pushnumber(L, (double)(float)luaL_checknumber(L, 1));
  return 1;
}

// SplitMix64 over a counter that restarts with every record, so a step always draws the same
// numbers.
static uint64_t mix(uint64_t z)
{
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

static int box_random(lua_State *L)
{
  eng_policy *p = policy_of(L);
  uint64_t draw =
    mix(mix(p->random_key + 0x9E3779B97F4A7C15ull) + ++p->random_count * 0x9E3779B97F4A7C15ull);
  double r = (double)(draw >> 11) * 0x1p-53, low = 1, high;
  switch (lua_gettop(L)) {
    case 0: lua_pushnumber(L, r); return 1;
    case 1: high = floor(luaL_checknumber(L, 1)); break;
    default: low = floor(luaL_checknumber(L, 1)); high = floor(luaL_checknumber(L, 2));
  }
  if (!(low <= high))
    return luaL_error(L, "math.random: expected low <= high, got %f and %f", low, high);
  lua_pushnumber(L, floor(r * (high - low + 1)) + low);
  return 1;
}

// ------------------------------------------------------------------ table and string

enum { BYTES_PER_INSTRUCTION = 64 };

// Returns the cost of reading or creating a value, in instructions. A string's cost depends on its
// length, even if Lua shares one copy of the string.
static int64_t price(lua_State *L, int index)
{
  return 1 + (lua_type(L, index) == LUA_TSTRING
                ? (int64_t)lua_objlen(L, index) / BYTES_PER_INSTRUCTION : 0);
}

static void charge_values(lua_State *L)                // charges for all values on the stack
{
  int64_t work = 0;
  for (int i = lua_gettop(L); i > 0; --i) work += price(L, i);
  policy_charge(policy_of(L), work);
}

// Calls a library function whose work is proportional to the number of its arguments and the size
// of its results. Charges for both.
static int box_charged(lua_State *L)                   // upvalues: see box_function
{
  policy_charge(policy_of(L), lua_gettop(L));
  int n = call_wrapped(L);
  charge_values(L);
  return n;
}

// Calls a library function that reads its arguments completely, and charges for their length.
static int box_reading(lua_State *L)                   // upvalues: see box_function
{
  charge_values(L);
  return box_charged(L);
}

// Wraps table.concat. Charges for the table's elements too, and does so before the call, because
// the call raises an error at an element that is not a string. An element takes at least 8 bytes,
// so the charge is at most the policy's memory divided by 8.
static int box_concat(lua_State *L)                    // upvalues: see box_function
{
  eng_policy *p = policy_of(L);
  luaL_checktype(L, 1, LUA_TTABLE);
  double n = luaL_optnumber(L, 4, (double)lua_objlen(L, 1)) - luaL_optnumber(L, 3, 1) + 1;
  policy_charge(p, (int64_t)fmin(fmax(n, 0), (double)p->used / 8));
  return box_charged(L);
}

static int charged_less(lua_State *L)
{
  policy_charge(policy_of(L), price(L, 1));
  lua_pushboolean(L, lua_lessthan(L, 1, 2));
  return 1;
}

// LuaJIT's sort is quadratic for some orders, so each comparison is charged. A comparison written
// in Lua is charged by its instructions.
static int box_sort(lua_State *L)                      // upvalues: see box_function
{
  luaL_checktype(L, 1, LUA_TTABLE);
  lua_settop(L, 2);
  policy_check_stack(policy_of(L));
  lua_pushvalue(L, lua_upvalueindex(1));
  lua_insert(L, 1);
  if (lua_isnil(L, 3)) {
    lua_pushcfunction(L, charged_less);
    lua_replace(L, 3);
  }
  lua_call(L, 2, 0);
  return 0;
}

static int box_format(lua_State *L)                    // upvalues: see box_function
{
  int n = lua_gettop(L);
  size_t length;
  const char *format = luaL_checklstring(L, 1, &length);
  for (size_t i = 0; i < length; ++i) {
    if (format[i] != '%') continue;
    ++i;
    while (i < length && strchr("-+ #0123456789.", format[i])) ++i;
    if (i < length && format[i] == 'p')
      return luaL_error(L, "string.format: '%%p' is not available in a policy");
  }
  for (int i = 2; i <= n; ++i)
    if (lua_type(L, i) != LUA_TNUMBER && lua_type(L, i) != LUA_TSTRING &&
        lua_type(L, i) != LUA_TBOOLEAN && !lua_isnil(L, i))
      return luaL_error(L, "string.format: argument %d is a %s and cannot be converted to text", i,
                        luaL_typename(L, i));
  return box_reading(L);
}

// ------------------------------------------------------------------ the environment

/// A function that this file adds to a library. If `wraps`, it replaces LuaJIT's function `name`;
/// its upvalues are LuaJIT's function and the name in quotes.
typedef struct box_function { const char *name; lua_CFunction function; bool wraps; } box_function;

// Opens LuaJIT's library `name`, and pushes a new table with its fields in `kept` and with
// `functions`. Both lists end with NULL.
static void open_library(lua_State *L, lua_CFunction open, const char *name,
                         const char *const *kept, const box_function *functions)
{
  lua_pushcfunction(L, open);
  lua_pushstring(L, name);
  lua_call(L, 1, 1);
  lua_newtable(L);
  for (; *kept; ++kept) {
    lua_getfield(L, -2, *kept);
    lua_setfield(L, -2, *kept);
  }
  for (const box_function *f = functions; f->name; ++f) {
    if (f->wraps) {
      lua_getfield(L, -2, f->name);
      lua_pushfstring(L, "'%s'", f->name);
    }
    lua_pushcclosure(L, f->function, f->wraps ? 2 : 0);
    lua_setfield(L, -2, f->name);
  }
  lua_remove(L, -2);
}

// Makes the library on top of the stack constant, and adds it to the environment below it.
static void set_library(lua_State *L, const char *name)
{
  char what[32];
  snprintf(what, sizeof what, "the fields of '%s'", name);
  policy_make_constant(L, what);
  lua_setfield(L, -2, name);
}

void policy_library_open(eng_policy *p)
{
  static const char *const base_names[] = {"assert", "error", "type", NULL};
  static const char *const math_names[] = {
    "abs",   "acos", "asin",  "atan", "atan2", "ceil", "cos",   "cosh", "deg", "exp",
    "floor", "fmod", "frexp", "huge", "ldexp", "log",  "log10", "max",  "min", "modf",
    "pi",    "pow",  "rad",   "sin",  "sinh",  "sqrt", "tan",   "tanh", NULL};
  static const char *const table_names[] = {"remove", NULL}, *const string_names[] = {"len", NULL};
  static const char *const bit_names[] = {"arshift", "band",   "bnot", "bor", "bswap",
                                          "bxor",    "lshift", "rol",  "ror", "rshift",
                                          "tobit",   "tohex",  NULL};
  static const box_function base[] = {
    {"ipairs", box_ipairs, true},      {"select", box_charged, true},
    {"unpack", box_charged, true},     {"tonumber", box_reading, true},
    {"pairs", box_pairs, false},       {"next", box_next, false},
    {"tostring", box_tostring, false}, {"pcall", box_pcall, false},
    {"print", box_print, false},       {NULL, NULL, false}};
  static const box_function math[] = {
    {"random", box_random, false}, {"f32", box_f32, false}, {NULL, NULL, false}};
  static const box_function table[] = {
    {"sort", box_sort, true},    {"insert", box_writing, true}, {"move", box_writing, true},
    {"concat", box_concat, true}, {NULL, NULL, false}};
  static const box_function string[] = {
    {"format", box_format, true}, {"byte", box_charged, true},  {"char", box_charged, true},
    {"rep", box_charged, true},   {"sub", box_charged, true},   {"lower", box_charged, true},
    {"upper", box_charged, true}, {"reverse", box_charged, true}, {NULL, NULL, false}};
  static const box_function none[] = {{NULL, NULL, false}};
  lua_State *L = p->L;
  open_library(L, luaopen_base, "", base_names, base);
  open_library(L, luaopen_math, LUA_MATHLIBNAME, math_names, math);
  set_library(L, "math");
  open_library(L, luaopen_table, LUA_TABLIBNAME, table_names, table);
  set_library(L, "table");
  open_library(L, luaopen_bit, LUA_BITLIBNAME, bit_names, none);
  set_library(L, "bit");
  open_library(L, luaopen_string, LUA_STRLIBNAME, string_names, string);
  policy_patterns_open(L);
  lua_pushliteral(L, "");                              // ("text"):method() calls the same functions
  lua_getmetatable(L, -1);
  lua_pushvalue(L, -3);
  lua_setfield(L, -2, "__index");
  lua_pop(L, 2);
  set_library(L, "string");
  policy_checks_open(L);
  set_library(L, "check");
  lua_createtable(L, 0, 1);
  lua_pushcfunction(L, unknown_global);
  lua_setfield(L, -2, "__index");
  lua_setmetatable(L, -2);
  // The environment itself stays empty, so an assignment to any name is refused.
  lua_newtable(L);
  lua_createtable(L, 0, 2);
  lua_pushvalue(L, -3);
  lua_setfield(L, -2, "__index");
  lua_pushcfunction(L, global_assigned);
  lua_setfield(L, -2, "__newindex");
  lua_setmetatable(L, -2);
  lua_remove(L, -2);
}
