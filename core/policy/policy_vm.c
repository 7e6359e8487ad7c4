// A policy: loading its file, running its decisions, freeing it. Each policy runs in a separate,
// small Lua state with limits (policy_run.c) and a reduced library (policy_library.c), so that it
// cannot harm the run. policies/README.md is the contract enforced here. Owns eng_policy. Called by
// Lua (engine_policy.h).
#include "policy_vm.h"

#include "base/error.h"
#include "base/text.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LARGEST_SOURCE = 1 << 20 };   // bytes

// ------------------------------------------------------------------ reading the file

static const char *const file_fields[] = {"name",  "doc",  "kind",   "options",
                                          "needs", "init", "decide", "migrate"};
#define COUNT(list) ((int)(sizeof list / sizeof *list))

// Raises an error that begins with the file and the line of `word` (policy_line_of), or with the
// file only if `word` is NULL.
__attribute__((format(printf, 3, 4), noreturn))
static void fail(eng_policy *p, const char *word, const char *format, ...)
{
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (word) lua_pushfstring(p->L, "%s:%d: %s", p->file, policy_line_of(p, word), text);
  else lua_pushfstring(p->L, "%s: %s", p->file, text);
  lua_error(p->L);
  abort();                                             // lua_error does not return
}

static char *copy_text(eng_policy *p, const char *s)
{
  char *copy = heap_text(&p->memory, s, (int64_t)strlen(s));
  if (!copy) luaL_error(p->L, "not enough memory");
  return copy;
}

static void stem(char *out, size_t size, const char *file)
{
  const char *slash = strrchr(file, '/');
  snprintf(out, size, "%s", slash ? slash + 1 : file);
  char *dot = strrchr(out, '.');
  if (dot && dot != out) *dot = '\0';
}

// The read_* functions below read the table that the file returned, at index 1 of the stack.
static void read_identity(eng_policy *p)
{
  lua_State *L = p->L;
  for (lua_pushnil(L); lua_next(L, 1); lua_pop(L, 1)) {
    if (lua_type(L, -2) != LUA_TSTRING)
      fail(p, "return", "the policy's table has a %s as a key; expected names",
           luaL_typename(L, -2));
    const char *key = lua_tostring(L, -2);
    int known = 0;
    while (known < COUNT(file_fields) && strcmp(key, file_fields[known]) != 0) ++known;
    if (known == COUNT(file_fields)) {
      const char *hint = nearest_hint(key, file_fields, COUNT(file_fields));
      fail(p, key, "unknown field '%s'%s", key, *hint ? hint : "; a policy's fields are name, doc, "
           "kind, options, needs, init, decide and migrate");
    }
    static const int types[] = {LUA_TSTRING, LUA_TSTRING,   LUA_TSTRING,   LUA_TTABLE,
                                LUA_TTABLE,  LUA_TFUNCTION, LUA_TFUNCTION, LUA_TFUNCTION};
    if (lua_type(L, -1) != types[known])
      fail(p, key, "'%s' must be a %s, got a %s", key, lua_typename(L, types[known]),
           luaL_typename(L, -1));
  }
  lua_getfield(L, 1, "decide");
  if (lua_isnil(L, -1))
    fail(p, "return",
         "'decide' is missing: a policy returns { decide = function(state, record, options) ... "
         "end, ... }");
  if (lua_iscfunction(L, -1)) fail(p, "decide", "'decide' must be a function written in Lua");
  lua_getfield(L, 1, "init");
  p->has_init = !lua_isnil(L, -1);
  lua_getfield(L, 1, "migrate");
  p->has_migrate = !lua_isnil(L, -1);
  lua_getfield(L, 1, "doc");
  p->doc = copy_text(p, lua_isnil(L, -1) ? "" : lua_tostring(L, -1));
  lua_getfield(L, 1, "kind");
  p->fp8 = !lua_isnil(L, -1) && strcmp(lua_tostring(L, -1), "fp8") == 0;
  if (!lua_isnil(L, -1) && !p->fp8 && strcmp(lua_tostring(L, -1), "scale") != 0)
    fail(p, "kind",
         "'kind' must be \"scale\" (a loss scale; the default) or \"fp8\" (scales of FP8 "
         "layers), got \"%.60s\"",
         lua_tostring(L, -1));
  lua_getfield(L, 1, "name");
  char from_file[128];
  stem(from_file, sizeof from_file, p->file);
  p->name = copy_text(p, lua_isnil(L, -1) ? from_file : lua_tostring(L, -1));
  const char *problem = eng_name_problem(p->name, (int64_t)strlen(p->name));
  if (problem) fail(p, "name", "'name' %s", problem);
  lua_settop(L, 1);
}

bool eng_policy_name_get(eng_policy_name *out, int index)
{
  const bool found = index >= 0 && index < RECORD_NAMES + VERDICT_FIELDS;
  if (found)
    *out = index < RECORD_NAMES ? policy_record_field(index)
                                : policy_verdict_field(index - RECORD_NAMES);
  return found;
}

static void read_needs(eng_policy *p)
{
  lua_State *L = p->L;
  lua_getfield(L, 1, "needs");
  if (lua_istable(L, 2)) {
    for (lua_pushnil(L); lua_next(L, 2); lua_pop(L, 1)) {
      if (lua_type(L, -2) != LUA_TNUMBER || lua_type(L, -1) != LUA_TSTRING)
        fail(p, "needs",
             "'needs' must be a list of names, such as { \"amax\", \"norm\" }, got a %s as a %s",
             luaL_typename(L, lua_type(L, -2) != LUA_TNUMBER ? -2 : -1),
             lua_type(L, -2) != LUA_TNUMBER ? "key" : "value");
      const char *need = lua_tostring(L, -1);
      const char *names[RECORD_NAMES + VERDICT_FIELDS];
      int n = 0;
      eng_policy_name name;
      bool found = false;
      for (int i = 0; !found && eng_policy_name_get(&name, i); ++i) {
        if (!name.listed) continue;
        names[n++] = name.name;
        found = strcmp(need, name.name) == 0;
      }
      if (!found) {
        const char *hint = nearest_hint(need, names, n);
        fail(p, "needs", "unknown need '%s'%s", need,
             *hint ? hint : "; policies/README.md lists what a policy may need");
      }
      p->needs |= name.need;
    }
  }
  lua_settop(L, 1);
}

static char *value_text(eng_policy *p, int index)
{
  char number[32];
  switch (lua_type(p->L, index)) {
    case LUA_TNUMBER:
      eng_number_text(number, lua_tonumber(p->L, index));
      return copy_text(p, number);
    case LUA_TBOOLEAN: return copy_text(p, lua_toboolean(p->L, index) ? "true" : "false");
    default:           return copy_text(p, lua_tostring(p->L, index));
  }
}

static int by_name(const void *a, const void *b)
{ return strcmp(((const policy_option *)a)->name, ((const policy_option *)b)->name); }

static void read_options(eng_policy *p)
{
  lua_State *L = p->L;
  lua_getfield(L, 1, "options");
  int n = 0;
  if (lua_istable(L, 2)) {
    for (lua_pushnil(L); lua_next(L, 2); lua_pop(L, 1)) ++n;
    if (!HEAP_TAKE(&p->memory, p->options, n)) luaL_error(L, "not enough memory");
    for (lua_pushnil(L); lua_next(L, 2); lua_pop(L, 1)) {
      if (lua_type(L, -2) != LUA_TSTRING)
        fail(p, "options", "'options' has a %s as a key; expected names", luaL_typename(L, -2));
      const char *name = lua_tostring(L, -2), *problem = eng_name_problem(name, lua_objlen(L, -2));
      if (problem) fail(p, "options", "the name of an option %s: '%.40s'", problem, name);
      int type = lua_type(L, -1);
      if (type != LUA_TNUMBER && type != LUA_TBOOLEAN && type != LUA_TSTRING)
        fail(p, name, "option '%s' is a %s; a default must be a number, a boolean or a string",
             name, lua_typename(L, type));
      policy_option *option = &p->options[p->n_options++];
      option->type = type == LUA_TNUMBER    ? ENG_OPTION_NUMBER
                     : type == LUA_TBOOLEAN ? ENG_OPTION_BOOLEAN
                                            : ENG_OPTION_STRING;
      option->name = copy_text(p, name);
      option->preset = value_text(p, -1);
      option->value = value_text(p, -1);
    }
    qsort(p->options, (size_t)p->n_options, sizeof *p->options, by_name);
  }
  lua_settop(L, 1);
}

// Reads a number written as people write scales: "0.5", "1e-4", "inf" or "2^16".
static bool read_number(double *out, const char *text)
{
  const char *power = strchr(text, '^');
  if (!power) return number_read(out, text, strlen(text));
  double base, exponent;
  if (!number_read(&base, text, (size_t)(power - text)) ||
      !number_read(&exponent, power + 1, strlen(power + 1)))
    return false;
  *out = pow(base, exponent);
  return true;
}

// Returns "; did you mean ..." for a misspelt name of an option. If no option has a similar name,
// returns a list of all options, which it writes to `all`.
static const char *option_choices(const eng_policy *p, const char *name, char all[static 256])
{
  const char *names[64];
  int n = p->n_options < COUNT(names) ? p->n_options : COUNT(names);
  for (int i = 0; i < n; ++i) names[i] = p->options[i].name;
  const char *hint = nearest_hint(name, names, n);
  if (*hint) return hint;
  snprintf(all, 256, "%s", p->n_options ? "" : "; it has none");
  for (int i = 0; i < p->n_options; ++i) {
    size_t used = strlen(all);
    snprintf(all + used, 256 - used, "%s%s", i ? ", " : "; it has ", p->options[i].name);
  }
  return all;
}

static void set_option(eng_policy *p, const char *name, const char *value)
{
  policy_option *option = NULL;
  for (int i = 0; i < p->n_options && !option; ++i)
    if (strcmp(p->options[i].name, name) == 0) option = &p->options[i];
  if (!option) {
    char all[256];
    fail(p, NULL, "policy '%s' has no option '%s'%s", p->name, name, option_choices(p, name, all));
  }
  double number;
  if (option->type == ENG_OPTION_NUMBER && !read_number(&number, value))
    fail(p, option->name, "option '%s' must be a number, got '%s'", name, value);
  if (option->type == ENG_OPTION_BOOLEAN && strcmp(value, "true") != 0 &&
      strcmp(value, "false") != 0)
    fail(p, option->name, "option '%s' must be true or false, got '%s'", name, value);
  char number_text[32];
  if (option->type == ENG_OPTION_NUMBER) eng_number_text(number_text, number);
  option->value = copy_text(p, option->type == ENG_OPTION_NUMBER ? number_text : value);
}

static int unknown_option(lua_State *L)
{
  const eng_policy *p = policy_of(L);
  const char *name = lua_type(L, 2) == LUA_TSTRING ? lua_tostring(L, 2) : luaL_typename(L, 2);
  char all[256];
  return luaL_error(L, "the policy has no option '%s'%s", name, option_choices(p, name, all));
}

static void push_options(eng_policy *p)
{
  lua_State *L = p->L;
  lua_createtable(L, 0, p->n_options);
  for (int i = 0; i < p->n_options; ++i) {
    const policy_option *option = &p->options[i];
    double number = 0;
    if (option->type == ENG_OPTION_NUMBER) {
      number_read(&number, option->value, strlen(option->value));
      lua_pushnumber(L, number);
    } else if (option->type == ENG_OPTION_BOOLEAN)
      lua_pushboolean(L, strcmp(option->value, "true") == 0);
    else lua_pushstring(L, option->value);
    lua_setfield(L, -2, option->name);
  }
  lua_createtable(L, 0, 1);
  lua_pushcfunction(L, unknown_option);
  lua_setfield(L, -2, "__index");
  lua_setmetatable(L, -2);
  policy_make_constant(L, "options");
}

struct load { const char *source; int64_t bytes; const char *const *names, *const *values; int n; };

// Returns { policy, decide, options, record }; eng_policy_load moves them to their stack slots.
static void load_task(eng_policy *p, void *argument)
{
  const struct load *load = argument;
  lua_State *L = p->L;
  policy_library_open(p);                                                    // 1: environment
  char chunk[512];
  snprintf(chunk, sizeof chunk, "@%s", p->file);
  if (load->bytes > 0 && load->source[0] == LUA_SIGNATURE[0])
    fail(p, NULL, "expected Lua source, got compiled code");
  policy_enter(p);
  if (luaL_loadbufferx(L, load->source, (size_t)load->bytes, chunk, "t") != 0) lua_error(L);
  lua_pushvalue(L, 1);
  lua_setfenv(L, -2);
  lua_call(L, 0, LUA_MULTRET);
  policy_leave(p);
  if (p->killed) luaL_error(L, "%s: %s", p->file, p->killed);
  if (lua_gettop(L) != 2 || !lua_istable(L, 2))
    fail(p, "return", "the file must return one table with the policy's fields, got %s",
         lua_gettop(L) == 1  ? "nothing"
         : lua_gettop(L) > 2 ? "several values"
         : lua_isnil(L, 2)   ? "nil"
                             : lua_pushfstring(L, "a %s", luaL_typename(L, 2)));
  lua_remove(L, 1);
  read_identity(p);
  read_needs(p);
  read_options(p);
  for (int i = 0; i < load->n; ++i) set_option(p, load->names[i], load->values[i]);

  policy_verdict_open(p);
  lua_createtable(L, 4, 0);
  lua_pushvalue(L, 1);
  lua_rawseti(L, -2, 1);
  lua_getfield(L, 1, "decide");
  lua_rawseti(L, -2, 2);
  push_options(p);
  lua_rawseti(L, -2, 3);
  policy_record_open(p);
  lua_rawseti(L, -2, 4);
}

eng_status eng_policy_load(eng_policy **out, const char *source, int64_t bytes, const char *file,
                           const char *const *names, const char *const *values, int n)
{
  *out = NULL;
  FAIL_IF(bytes > LARGEST_SOURCE, ENG_ERR_POLICY, "%s: expected a policy file of at most %d "
          "bytes, got %lld", file, LARGEST_SOURCE, (long long)bytes);
  eng_policy *p = calloc(1, sizeof *p);
  FAIL_IF(!p, ENG_ERR_MEMORY, "%s: out of memory", file);
  p->file = heap_text(&p->memory, file, (int64_t)strlen(file));
  p->source = heap_text(&p->memory, source, bytes);
  if (p->memory.failed || !policy_open(p)) {
    eng_policy_free(p);
    return error_set(ENG_ERR_MEMORY, "%s: out of memory", file);
  }

  struct load load = { source, bytes, names, values, n };
  eng_status status = policy_protected(p, load_task, &load);
  if (status != ENG_OK) {
    eng_policy_free(p);
    return status;
  }
  static const int slots[] = { SLOT_POLICY, SLOT_DECIDE, SLOT_OPTIONS, SLOT_RECORD };
  for (int i = 0; i < COUNT(slots); ++i) {
    lua_rawgeti(p->L, -1, i + 1);
    lua_replace(p->L, slots[i]);
  }
  lua_settop(p->L, SLOT_COUNT);
  *out = p;
  return ENG_OK;
}

void eng_policy_free(eng_policy *p)
{
  if (!p) return;
  if (p->L) lua_close(p->L);
  heap_free(&p->memory);
  heap_free(&p->names);
  free(p->signals);
  data_free(&p->good);
  data_free(&p->next);
  data_free(&p->text);
  data_free(&p->envelope);
  free(p);
}

void eng_policy_describe(eng_policy_info *out, const eng_policy *p)
{
  *out = (eng_policy_info){.name = p->name,
                           .doc = p->doc,
                           .file = p->file,
                           .needs = p->needs,
                           .fp8 = p->fp8,
                           .options = p->n_options,
                           .failures = p->failures};
}

eng_status eng_policy_option_get(eng_policy_option *out, const eng_policy *p, int index)
{
  FAIL_IF(index < 0 || index >= p->n_options, ENG_ERR_VALUE,
          "policy %s: expected an option index >= 0 and below %d, got %d", p->name, p->n_options,
          index);
  const policy_option *option = &p->options[index];
  *out = (eng_policy_option){ option->name, option->value, option->preset, option->type };
  return ENG_OK;
}

double eng_policy_scale(const eng_policy *p) { return p->last.scale; }

double eng_policy_group_scale(const eng_policy *p, int group)
{
  bool own = group >= 0 && group < p->n_groups && p->group_scale[group] > 0;
  return own ? p->group_scale[group] : p->last.scale;
}

bool eng_policy_scales_groups(const eng_policy *p)
{
  for (int i = 0; i < p->n_groups; i++)
    if (p->group_scale[i] > 0 && p->group_scale[i] != p->last.scale) return true;
  return false;
}

// ------------------------------------------------------------------ verdicts

// Handles a failed decision: *out receives scale, clip and lr_mul of the last good verdict, and the
// policy gets back the state from before the decision. The verdict's reason is `reason` or,
// unless `what` is NULL, the position of decide, `what` and `reason`.
static void fall_back(eng_verdict *out, eng_policy *p, const eng_record *record, const char *what,
                      const char *reason)
{
  char text[512];
  if (what) {
    lua_Debug where = {0};
    lua_settop(p->L, SLOT_COUNT);
    lua_pushvalue(p->L, SLOT_DECIDE);
    lua_getinfo(p->L, ">S", &where);
    snprintf(text, sizeof text, "%s:%d: decide %s%s", p->file, where.linedefined, what, reason);
  } else snprintf(text, sizeof text, "%s", reason);
  lua_settop(p->L, SLOT_COUNT);
  ++p->failures;
  *out = p->last;
  p->n_logs = p->n_logit_muls = 0;
  out->failed = 1;
  out->action = record->overflow ? ENG_ACTION_SKIP : ENG_ACTION_STEP;
  eng_text_shown(out->reason, sizeof out->reason, text, (int64_t)strlen(text), false);
  if (policy_roll_back(p) != ENG_OK) {
    // Memory ran out while the old state was rebuilt. So eng_policy_decide returns an error until
    // init or restore sets a state.
    p->ready = false;
    snprintf(out->reason, sizeof out->reason, "%.120s: its state was lost: %.100s", p->file,
             eng_error_message());
  }
}

// Reads what decide returned: one scale or one table. Returns false, with the reason in p->why, if
// it is invalid.
static bool read_result(eng_policy *p, eng_verdict *out)
{
  lua_State *L = p->L;
  if (lua_gettop(L) != SLOT_COUNT + 1)
    return policy_refuse(p, "%s; expected one scale or one table",
                         lua_gettop(L) == SLOT_COUNT ? "nothing" : "several values");
  if (lua_istable(L, -1) || lua_type(L, -1) == LUA_TNUMBER) return policy_read_verdict(p, out);
  return policy_refuse(p, "a %s; expected the next scale or a table { scale = ..., ... }",
                       luaL_typename(L, -1));
}

eng_status eng_policy_decide(eng_verdict *out, eng_policy *p, const eng_record *record,
                             const eng_tensor_stats *stats)
{
  FAIL_IF(!p->ready, ENG_ERR_STATE, "policy %s: cannot decide before init or restore", p->name);
  lua_State *L = p->L;
  p->record = record;
  p->stats = stats;
  p->groups_summed = false;
  p->each_set = 0;
  p->n_logs = p->n_logit_muls = 0;
  p->random_key = (uint64_t)record->step;
  p->random_count = 0;

  lua_pushvalue(L, SLOT_DECIDE);
  lua_pushvalue(L, SLOT_STATE);
  lua_pushvalue(L, SLOT_RECORD);
  lua_pushvalue(L, SLOT_OPTIONS);
  policy_enter(p);
  int failed = lua_pcall(L, 3, LUA_MULTRET, 0);
  policy_leave(p);
  p->record = NULL;
  p->stats = NULL;

  if (failed || p->killed) {
    if (failed) fall_back(out, p, record, NULL, policy_error_text(p));
    else fall_back(out, p, record, "was ended: ", p->killed);
    return ENG_OK;
  }
  p->judged = record;
  p->judged_stats = stats;
  *out = (eng_verdict){.action = record->overflow ? ENG_ACTION_SKIP : ENG_ACTION_STEP, .lr_mul = 1};
  if (p->n_groups) memset(p->group_next, 0, (size_t)p->n_groups * sizeof *p->group_next);
  const char *what = "returned ";
  bool good = read_result(p, out);
  if (good && !policy_snapshot(p)) {
    what = "left a state that is not plain data: ";
    good = false;
  }
  if (!good) {
    fall_back(out, p, record, what, p->why);
    return ENG_OK;
  }
  lua_settop(L, SLOT_COUNT);
  if (p->n_groups)
    memcpy(p->group_scale, p->group_next, (size_t)p->n_groups * sizeof *p->group_scale);
  p->each_set = out->each;
  p->last.scale = out->scale;
  p->last.clip = out->clip;
  // A failed decision repeats the last lr_mul. A rollback's lr_mul already holds for the rest of
  // the run, so repeating it would apply it twice.
  p->last.lr_mul = out->action == ENG_ACTION_ROLLBACK ? 1 : out->lr_mul;
  return ENG_OK;
}
