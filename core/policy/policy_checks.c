// Functions that most scalers need: checks of options in `init` (check.positive, check.floor ...),
// and changes of the scale in `decide` (back_off, grow, rescale) with their reasons.
// policies/README.md lists them. They keep nothing outside the policy's state; a policy could
// define them itself in Lua.
// Called by policy_library.c when a policy is loaded.
#include "policy_vm.h"

#include <math.h>
#include <string.h>

#define WORD "abcdefghijklmnopqrstuvwxyz_0123456789"

typedef enum strictness { LENIENT, STRICT, NO_OPTION } strictness;

// Returns whether the options at `index` have strict=false (LENIENT), strict=true (STRICT) or no
// such option.
static strictness strictness_of(lua_State *L, int index)
{
  lua_pushvalue(L, index);
  policy_open_constant(L, lua_gettop(L));
  lua_pushliteral(L, "strict");
  lua_rawget(L, -2);
  strictness found = !lua_isboolean(L, -1) ? NO_OPTION : lua_toboolean(L, -1) ? STRICT : LENIENT;
  lua_pop(L, 2);
  return found;
}

// Raises an error with the text on top of the stack, unless the options (argument 1) have
// strict=false.
static int refuse_strictly(lua_State *L)
{
  strictness found = strictness_of(L, 1);
  if (found == LENIENT) return 0;
  lua_pushstring(L, found == STRICT ? "; strict=false accepts it" : "");
  lua_concat(L, 2);
  return lua_error(L);
}

static double option(lua_State *L, int name)
{
  const char *text = luaL_checkstring(L, name);
  luaL_checktype(L, 1, LUA_TTABLE);
  lua_getfield(L, 1, text);
  if (lua_type(L, -1) != LUA_TNUMBER)
    return luaL_error(L, "check: expected the name of a numeric option, got '%s'", text);
  double x = lua_tonumber(L, -1);
  lua_pop(L, 1);
  return x;
}

// ------------------------------------------------------------------ ranges of options

typedef enum range { POSITIVE, FLOAT32, NOT_NEGATIVE, FACTOR, SHARE, FRACTION, STEPS } range;

static const char *const wanted[] = {                      // after "NAME must"
  [POSITIVE] = "be a positive finite number",
  [FLOAT32] = "be a positive number that float32 can hold",
  [NOT_NEGATIVE] = "be 0 or a positive finite number",
  [FACTOR] = "be greater than 1 and finite",
  [SHARE] = "lie strictly between 0 and 1",
  [FRACTION] = "be 0 or more and below 1",
  [STEPS] = "be a positive number of steps",
};

static bool within(range r, double x)
{
  switch (r) {
    case POSITIVE:     return x > 0 && x < INFINITY;
    case FLOAT32:      return (float)x > 0 && (float)x < INFINITY;
    case NOT_NEGATIVE: return x >= 0 && x < INFINITY;
    case FACTOR:       return x > 1 && x < INFINITY;
    case SHARE:        return x > 0 && x < 1;
    case FRACTION:     return x >= 0 && x < 1;
    case STEPS:        return x > 0;
  }
  return false;
}

static double option_in(lua_State *L, int name, range r)
{
  double x = option(L, name);
  if (!within(r, x)) {
    lua_pushfstring(L, "%s must %s, got %f", lua_tostring(L, name), wanted[r], x);
    lua_error(L);            // without a position: the error is not in a line of the policy
  }
  return r == FLOAT32 ? (double)(float)x : x;
}

// check.RANGE(options, name, ...): checks that the options with these names are in the range, and
// returns their numbers. check.float32 rounds the numbers to float32.
static int check_range(lua_State *L)                       // upvalue: the range
{
  range r = (range)lua_tointeger(L, lua_upvalueindex(1));
  int last = lua_gettop(L);
  for (int name = 2; name <= last; ++name) lua_pushnumber(L, option_in(L, name, r));
  return last > 1 ? last - 1 : 0;
}

// ------------------------------------------------------------------ traps: likely mistakes

// check.trap(options, condition, text): if `condition` is true, refuses the options, unless they
// have strict=false.
static int check_trap(lua_State *L)
{
  luaL_checktype(L, 1, LUA_TTABLE);
  luaL_checkstring(L, 3);
  lua_settop(L, 3);
  return lua_toboolean(L, 2) ? refuse_strictly(L) : 0;
}

// check.expect(options, condition, text): unless `condition` is true, raises an error: "expected
// TEXT, got NAME = VALUE, ..." with the numeric options that the text names.
static int check_expect(lua_State *L)
{
  const char *at = luaL_checkstring(L, 3), *before = ", got ";
  luaL_checktype(L, 1, LUA_TTABLE);
  if (lua_toboolean(L, 2)) return 0;
  policy_open_constant(L, 1);
  lua_settop(L, 3);
  lua_pushfstring(L, "expected %s", at);
  while (*(at += strcspn(at, WORD))) {
    lua_pushlstring(L, at, strspn(at, WORD));
    lua_pushvalue(L, 5);
    lua_rawget(L, 1);
    if (lua_type(L, 6) == LUA_TNUMBER) {
      lua_pushfstring(L, "%s%s%s = %f", lua_tostring(L, 4), before, lua_tostring(L, 5),
                      lua_tonumber(L, 6));
      lua_replace(L, 4);
      before = ", ";
    }
    lua_settop(L, 4);
    at += strspn(at, WORD);
  }
  return lua_error(L);
}

// check.count(options, name [, hint]): refuses an option that is not a whole number of at least 1,
// unless the options have strict=false. Infinity is allowed and means never.
static int check_count(lua_State *L)
{
  double x = option(L, 2);
  const char *hint = luaL_optstring(L, 3, "");
  if (x >= 1 && x == floor(x)) return 0;
  lua_pushfstring(L, "%s must be a whole number of 1 or more, got %f%s%s", lua_tostring(L, 2), x,
                  *hint ? "; " : "", hint);
  return refuse_strictly(L);
}

// check.whole(options, name, least, most): refuses an option that is not a whole number from
// `least` to `most`.
static int check_whole(lua_State *L)
{
  double x = option(L, 2), least = luaL_checknumber(L, 3), most = luaL_checknumber(L, 4);
  if (x >= least && x <= most && x == floor(x)) return 0;
  lua_pushfstring(L, "%s must be a whole number from %f to %f, got %f", lua_tostring(L, 2), least,
                  most, x);
  return lua_error(L);
}

// check.rescale(options): checks the options of rescale() and returns the initial scale.
static int check_rescale(lua_State *L)
{
  lua_settop(L, 1);
  lua_pushliteral(L, "growth_interval");
  check_count(L);
  lua_settop(L, 1);
  lua_pushliteral(L, "loss_scale");
  lua_pushliteral(L, "init_scale");
  double fixed = option_in(L, 2, NOT_NEGATIVE);
  lua_pushnumber(L, fixed > 0 ? fixed : option_in(L, 3, FLOAT32));
  return 1;
}

// check.limits(options): checks init_scale and its limits, min_scale (0: no limit) and max_scale
// (infinite: no limit), and returns init_scale, which may lie outside the limits.
static int check_limits(lua_State *L)
{
  lua_settop(L, 1);
  lua_pushliteral(L, "init_scale");
  lua_pushliteral(L, "min_scale");
  lua_pushliteral(L, "max_scale");
  option_in(L, 2, FLOAT32);
  double least = option(L, 3), most = option(L, 4);
  if (!(least >= 0 && most > 0 && least <= most)) {
    lua_pushfstring(L, "expected 0 <= min_scale <= max_scale and max_scale > 0, got "
                    "min_scale = %f, max_scale = %f", least, most);
    return lua_error(L);
  }
  lua_pushnumber(L, option(L, 2));
  return 1;
}

// check.floor(options, least, first): refuses options whose smallest scale (the option named
// `least`) is above the initial scale (the option named `first`), unless they have strict=false.
static int check_floor(lua_State *L)
{
  double least = option(L, 2), first = option(L, 3);
  if (!(least > first)) return 0;
  lua_pushfstring(L, "%s = %f is above %s = %f, so an overflow would raise the scale; lower %s",
                  lua_tostring(L, 2), least, lua_tostring(L, 3), first, lua_tostring(L, 2));
  return refuse_strictly(L);
}

// ------------------------------------------------------------------ changes of the scale

static double number_field(lua_State *L, int index, const char *name)
{
  luaL_checktype(L, index, LUA_TTABLE);
  lua_getfield(L, index, name);
  if (lua_type(L, -1) != LUA_TNUMBER)
    return luaL_error(L, "expected %s.%s to be a number, got %s", index == 1 ? "state" : "options",
                      name, luaL_typename(L, -1));
  double value = lua_tonumber(L, -1);
  lua_pop(L, 1);
  return value;
}

static double scale_of(lua_State *L) { return number_field(L, 1, "scale"); }   // state.scale

// Sets state.scale and builds the verdict { scale = ..., reason = ... }, with action = "stop" if
// `stop`. The reason is on top of the stack, a text or nil.
static int verdict(lua_State *L, double scale, bool stop)
{
  lua_pushnumber(L, scale);
  lua_setfield(L, 1, "scale");
  lua_createtable(L, 0, 3);
  lua_pushnumber(L, scale);
  lua_setfield(L, -2, "scale");
  lua_pushvalue(L, -2);
  lua_setfield(L, -2, "reason");
  if (stop) {
    lua_pushliteral(L, "stop");
    lua_setfield(L, -2, "action");
  }
  return 1;
}

// back_off(state, to): the verdict after an overflow; `to` is the new scale. A scale of 0 stops the
// run.
static int back_off(lua_State *L)
{
  double to = luaL_checknumber(L, 2), scale = scale_of(L);
  if (to == 0) {
    lua_pushfstring(L,
                    "the loss scale fell to %f and gradients still overflow: they are inf or nan "
                    "for a reason other than the scale"
                    " (look at the first bad tensor, the learning rate, the data)",
                    scale);
    return verdict(L, scale, true);
  }
  if (to == scale) lua_pushfstring(L, "overflow at the smallest scale %f", scale);
  else lua_pushfstring(L, "overflow: scale %f -> %f", scale, to);
  return verdict(L, to, false);
}

// grow(state, to, why [, options]): the verdict after good steps; `to` is the new scale. If `to` is
// infinite, the scale stays unchanged or, with strict=false in the options, the run stops.
static int grow(lua_State *L)
{
  double to = luaL_checknumber(L, 2);
  const char *why = luaL_checkstring(L, 3);
  double scale = scale_of(L);
  if (to == INFINITY) {
    bool lenient = lua_istable(L, 4) && strictness_of(L, 4) == LENIENT;
    lua_pushstring(L, lenient ? "the loss scale would grow to infinity and stay there"
                              : "growth would reach infinity: the scale stays unchanged");
    return verdict(L, scale, lenient);
  }
  if (to == scale) lua_pushfstring(L, "already at the largest scale, %f", scale);
  else lua_pushfstring(L, "%s: scale %f -> %f", why, scale, to);
  return verdict(L, to, false);
}

// rescale(state, record, options): returns a verdict that sets only the loss scale, or stops the
// run if the scale would become 0. Policies that decide about updates (they clip, skip or repeat
// steps) leave the scale to this function. With options.loss_scale above 0 the scale is fixed.
// Otherwise it follows dynamic.lua's rule, with options.growth_interval and the count of good steps
// in state.good.
static int rescale(lua_State *L)
{
  double scale = scale_of(L), fixed = number_field(L, 3, "loss_scale");
  double interval = number_field(L, 3, "growth_interval"), good = 0;
  lua_getfield(L, 2, "overflow");
  bool overflow = lua_toboolean(L, -1), grows = false;
  if (fixed > 0) scale = fixed;
  else {
    if (!overflow) good = number_field(L, 1, "good") + 1;
    grows = !overflow && good == interval;
    lua_pushnumber(L, grows ? 0 : good);
    lua_setfield(L, 1, "good");
  }
  lua_settop(L, 1);
  if (fixed > 0 || (!overflow && !grows)) {
    lua_pushnil(L);
    return verdict(L, scale, false);
  }
  lua_pushnumber(L, (float)(overflow ? scale / 2 : scale * 2));
  if (overflow) return back_off(L);
  lua_pushfstring(L, "%f good steps in a row", interval);
  return grow(L);
}

void policy_checks_open(lua_State *L)
{
  static const luaL_Reg changes[] = {
    {"rescale", rescale}, {"back_off", back_off}, {"grow", grow}, {NULL, NULL}};
  static const luaL_Reg checks[] = {
    {"trap", check_trap},       {"expect", check_expect}, {"count", check_count},
    {"whole", check_whole},     {"floor", check_floor},   {"limits", check_limits},
    {"rescale", check_rescale}, {NULL, NULL}};
  static const struct { const char *name; range range; } ranges[] = {
    {"positive", POSITIVE}, {"float32", FLOAT32}, {"not_negative", NOT_NEGATIVE},
    {"factor", FACTOR},     {"share", SHARE},     {"fraction", FRACTION},
    {"steps", STEPS}};
  luaL_register(L, NULL, changes);
  lua_newtable(L);
  luaL_register(L, NULL, checks);
  for (size_t i = 0; i < sizeof ranges / sizeof *ranges; ++i) {
    lua_pushinteger(L, ranges[i].range);
    lua_pushcclosure(L, check_range, 1);
    lua_setfield(L, -2, ranges[i].name);
  }
}
