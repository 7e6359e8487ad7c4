// The verdict that a policy returns: checks each field of the table from `decide`, with a message
// that names the mistake, and makes its text safe for terminals. Called by policy_vm.c, by
// policy_state.c (policy_refuse), and by Lua to read parts of a verdict.
#include "policy_vm.h"

#include "base/text.h"
#include "device/gradstats.h"

#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

/// A field of a verdict, and the function that reads its value from the top of the stack.
typedef struct verdict_field verdict_field;
struct verdict_field {
  const char *name;
  unsigned    need;       // the ENG_NEED_* that `needs` must list for the field; 0: none
  bool      (*read)(eng_policy *p, eng_verdict *out, const verdict_field *field);
  const char *expected;   // for messages: the expected value
  const char *entry;      // for messages: an expected entry; NULL: the value need not be a table
  size_t      at;         // a single number's offset in eng_verdict, or the ENG_EACH_* of numbers
                          // per tensor
};

bool policy_refuse(eng_policy *p, const char *format, ...)
{
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(p->why, sizeof p->why, format, arguments);
  va_end(arguments);
  return false;
}

// Refuses the value on top of the stack: "scale = nan; expected ...".
static bool bad_value(eng_policy *p, const char *field, const char *expected)
{
  lua_State *L = p->L;
  char number[32];
  switch (lua_type(L, -1)) {
    case LUA_TNUMBER:
      eng_number_text(number, lua_tonumber(L, -1));
      return policy_refuse(p, "%s = %s; expected %s", field, number, expected);
    case LUA_TSTRING:
      return policy_refuse(p, "%s = '%.40s'; expected %s", field, lua_tostring(L, -1), expected);
    case LUA_TBOOLEAN:
      return policy_refuse(p, "%s = %s; expected %s", field,
                           lua_toboolean(L, -1) ? "true" : "false", expected);
    default:
      return policy_refuse(p, "%s = %s; expected %s", field, luaL_typename(L, -1), expected);
  }
}

// Refuses the value on top of the stack, which belongs to the key below it.
static bool bad_entry(eng_policy *p, const verdict_field *f)
{
  char place[100];
  snprintf(place, sizeof place, "%s[\"%.60s\"]", f->name, lua_tostring(p->L, -2));
  return bad_value(p, place, f->entry);
}

static bool bad_key(eng_policy *p, const char *field, const char *expected)
{
  return policy_refuse(p, "'%s' with a %s as a key; expected %s", field, luaL_typename(p->L, -2),
                       expected);
}

// Returns the number on top of the stack, or NaN if the value there is not a number.
static double number(lua_State *L)
{ return lua_type(L, -1) == LUA_TNUMBER ? lua_tonumber(L, -1) : f64_from(0x7FF8000000000000ull); }

// Looks up the key below the top of the stack. *named is the index i of a tensor, n_tensors + i for
// group i, or -1 for a pattern, whose matches are in p->matched. A group takes precedence over a
// tensor of the same name.
static bool find_named(eng_policy *p, const char *field, int *named)
{
  lua_State *L = p->L;
  *named = -1;
  if (lua_type(L, -2) != LUA_TSTRING) return bad_key(p, field, "names or patterns");
  if (p->n_tensors + p->n_groups == 0) return true;          // a replay without a model
  int key = lua_gettop(L) - 1, group = policy_named(p, true, key);
  *named = group >= 0 ? p->n_tensors + group : policy_named(p, false, key);
  if (*named >= 0) return true;
  const char *name = lua_tostring(L, -2);
  lua_pushvalue(L, -2);
  if (policy_match_names(p) != ENG_OK)
    return policy_refuse(p, "'%s' with the pattern '%.60s': %s", field, name, eng_error_message());
  for (int i = 0; i < p->n_tensors + p->n_groups; i++)
    if (p->matched[i]) return true;
  const char *hint = nearest_hint(name, (const char *const *)p->groups, p->n_groups);
  if (!*hint) hint = nearest_hint(name, (const char *const *)p->tensors, p->n_tensors);
  char example[100] = "";
  if (!*hint && p->n_tensors > 0)
    snprintf(example, sizeof example, "; one tensor is called '%.60s'", p->tensors[0]);
  return policy_refuse(p, "'%s' for '%.60s', which matches no group and no tensor%s%s", field,
                       name, hint, example);
}

// Returns whether find_named found tensor i, its group, or a pattern that matches its name.
static bool names_tensor(const eng_policy *p, int named, int i)
{
  if (named < 0) return p->matched[i];
  return named < p->n_tensors ? i == named : p->group_of[i] == named - p->n_tensors;
}

// ------------------------------------------------------------------ single values

static double *number_at(eng_verdict *out, const verdict_field *f)
{ return (double *)((char *)out + f->at); }

static bool read_scale(eng_policy *p, eng_verdict *out, const verdict_field *f)
{
  out->scale = number(p->L);
  return policy_is_scale(out->scale) || bad_value(p, f->name, f->expected);
}

// Reads a limit; infinity means no limit.
static bool read_limit(eng_policy *p, eng_verdict *out, const verdict_field *f)
{
  double limit = number(p->L);
  if (!(limit > 0)) return bad_value(p, f->name, f->expected);
  *number_at(out, f) = f64_is_finite(limit) ? limit : 0;
  return true;
}

static bool read_factor(eng_policy *p, eng_verdict *out, const verdict_field *f)
{
  double factor = *number_at(out, f) = number(p->L);
  return (f64_is_finite(factor) && factor >= 0) || bad_value(p, f->name, f->expected);
}

static bool read_whole(eng_policy *p, eng_verdict *out, const verdict_field *f, double least)
{
  double x = number(p->L);
  if (!(x >= least && x <= 1e9 && x == floor(x))) return bad_value(p, f->name, f->expected);
  *(int64_t *)((char *)out + f->at) = (int64_t)x;
  return true;
}

static bool read_steps(eng_policy *p, eng_verdict *out, const verdict_field *f)
{ return read_whole(p, out, f, 0); }

static bool read_update_number(eng_policy *p, eng_verdict *out, const verdict_field *f)
{ return read_whole(p, out, f, 1); }

static bool read_reason(eng_policy *p, eng_verdict *out, const verdict_field *f)
{
  if (lua_type(p->L, -1) != LUA_TSTRING) return bad_value(p, f->name, f->expected);
  size_t length;
  const char *reason = lua_tolstring(p->L, -1, &length);
  eng_text_shown(out->reason, sizeof out->reason, reason, (int64_t)strnlen(reason, length), false);
  return true;
}

static bool read_action(eng_policy *p, eng_verdict *out, const verdict_field *f)
{
  if (lua_type(p->L, -1) != LUA_TSTRING) return bad_value(p, f->name, f->expected);
  const char *action = lua_tostring(p->L, -1), *names[ENG_ACTIONS];
  out->action = eng_action_from_name(action);
  if (out->action >= 0) return true;
  for (int i = 0; i < ENG_ACTIONS; ++i) names[i] = eng_action_name(i);
  const char *hint = nearest_hint(action, names, ENG_ACTIONS);
  if (!*hint) return bad_value(p, f->name, f->expected);
  return policy_refuse(p, "action = '%.40s'%s", action, hint);
}

// ------------------------------------------------------------------ tables

static bool read_scales(eng_policy *p, eng_verdict *out, const verdict_field *f)
{
  lua_State *L = p->L;
  (void)out;
  if (!p->scalable)
    return policy_refuse(p, "'scales', but this run has a single scale for all gradients");
  for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
    int named;
    double scale = number(L);
    if (!find_named(p, f->name, &named)) return false;
    if (!policy_is_scale(scale)) return bad_entry(p, f);
    for (int i = 0; i < p->n_tensors + p->n_groups; ++i) {
      if (named < 0 ? !p->matched[i] : i != named) continue;
      int group = i < p->n_tensors ? p->group_of[i] : i - p->n_tensors;
      if (group < 0) continue;
      if (p->group_next[group] > 0 && p->group_next[group] != scale)
        return policy_refuse(p, "the scales %.15g and %.15g for the group '%.60s'; expected one",
                             fmin(p->group_next[group], scale), fmax(p->group_next[group], scale),
                             p->groups[group]);
      p->group_next[group] = scale;
    }
  }
  return true;
}

static double true_norm(const eng_policy *p, const eng_tensor_stats *s)
{ return sqrt(s->sum_squares) / (p->judged->scale * gradstats_relative_scale(s)); }

// Applies an entry of `clips` or, with `exactly`, of `grad_norms` to tensor i: `norm` becomes at
// most, or exactly, `limit`. In `grad_norms` a factor of -1 means that the tensor has no entry yet,
// and entries that differ leave NaN.
static void limit_tensor(eng_policy *p, int i, double norm, double limit, bool exactly)
{
  double *factor = &p->each[ENG_EACH_CLIP][i], wanted = limit / norm;
  if (!(norm > (exactly ? 0 : limit))) return;
  if (!exactly) *factor = fmin(*factor, wanted);
  else if (*factor == -1) *factor = wanted;
  else if (*factor != wanted) *factor = f64_from(0x7FF8000000000000ull);
}

// Applies an entry to the joint norm of a group's tensors.
static void limit_group(eng_policy *p, int group, double limit, bool exactly)
{
  double squares = 0;
  for (int i = 0; i < p->n_tensors; ++i) {
    if (p->group_of[i] != group) continue;
    double norm = true_norm(p, &p->judged_stats[i]);
    squares += norm * norm;
  }
  for (int i = 0; i < p->n_tensors; ++i)
    if (p->group_of[i] == group) limit_tensor(p, i, sqrt(squares), limit, exactly);
}

static void begin_each(eng_policy *p, eng_verdict *out, int what, double none)
{
  out->each |= 1u << what;
  for (int i = 0; i < p->n_tensors; ++i) p->each[what][i] = none;
}

// Reads `clips` or `grad_norms`.
static bool read_norms(eng_policy *p, eng_verdict *out, const verdict_field *f)
{
  lua_State *L = p->L;
  const bool exactly = f->need == ENG_NEED_GRAD_NORMS;
  if (out->each >> ENG_EACH_CLIP & 1)
    return policy_refuse(p, "both 'clips' and 'grad_norms'; expected one of them");
  begin_each(p, out, ENG_EACH_CLIP, exactly ? -1 : 1);
  for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
    int named;
    double limit = number(L);
    if (!find_named(p, f->name, &named)) return false;
    if (!(limit > 0) || (exactly && !f64_is_finite(limit))) return bad_entry(p, f);
    if (!p->judged_stats) continue;                          // no statistics per tensor (replay)
    for (int i = 0; i < p->n_tensors; ++i)
      if (named < 0 ? p->matched[i] : i == named)
        limit_tensor(p, i, true_norm(p, &p->judged_stats[i]), limit, exactly);
    if (named >= p->n_tensors) limit_group(p, named - p->n_tensors, limit, exactly);
  }
  for (int i = 0; exactly && i < p->n_tensors; ++i) {
    double *factor = &p->each[ENG_EACH_CLIP][i];
    if (f64_is_nan(*factor))
      return policy_refuse(p, "'grad_norms' with entries that set the tensor '%.60s' to different "
                           "norms; expected one entry for each tensor", p->tensors[i]);
    if (*factor == -1) *factor = 1;
  }
  return true;
}

// Reads `lr_muls` or `caps`, which give a number to each tensor. The order of a table's entries
// differs between processes, so messages name the smaller of two numbers first, as in read_scales.
static bool read_numbers(eng_policy *p, eng_verdict *out, const verdict_field *f)
{
  lua_State *L = p->L;
  const bool cap = f->at == ENG_EACH_CAP;
  double *values = p->each[f->at];
  begin_each(p, out, (int)f->at, -1);
  for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
    int named;
    double value = number(L);
    if (!find_named(p, f->name, &named)) return false;
    if (!f64_is_finite(value) || value < 0) return bad_entry(p, f);
    for (int i = 0; i < p->n_tensors; ++i) {
      if (!names_tensor(p, named, i)) continue;
      if (values[i] >= 0 && values[i] != value)
        return policy_refuse(p, "the %s %.15g and %.15g for the tensor '%.60s'; expected one",
                             f->name, fmin(values[i], value), fmax(values[i], value),
                             p->tensors[i]);
      values[i] = value;
    }
  }
  for (int i = 0; i < p->n_tensors; ++i)
    if (values[i] < 0) values[i] = cap ? HUGE_VAL : 1;
  return true;
}

// Marks the tensors that the string on top of the stack selects. The string is the name of a tensor
// or group, or a pattern.
static bool mark_reset(eng_policy *p, const verdict_field *f)
{
  int named;
  if (lua_type(p->L, -1) != LUA_TSTRING) return bad_value(p, f->name, f->expected);
  lua_pushnil(p->L);                                         // find_named reads below the top
  if (!find_named(p, f->name, &named)) return false;
  lua_pop(p->L, 1);
  for (int i = 0; i < p->n_tensors; ++i)
    if (names_tensor(p, named, i)) p->each[ENG_EACH_RESET][i] = 1;
  return true;
}

static bool read_reset(eng_policy *p, eng_verdict *out, const verdict_field *f)
{
  lua_State *L = p->L;
  if (lua_isboolean(L, -1)) {
    if (lua_toboolean(L, -1)) begin_each(p, out, ENG_EACH_RESET, 1);
    return true;
  }
  begin_each(p, out, ENG_EACH_RESET, 0);
  if (!lua_istable(L, -1)) return mark_reset(p, f);
  for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1))
    if (!mark_reset(p, f)) return false;
  return true;
}

// Returns the list for up to `most` values of `field`. Allocates the list at its first use. If
// memory runs out, refuses the verdict and returns NULL.
static policy_logged *list_of(eng_policy *p, policy_logged **list, int most, const char *field)
{
  if (!*list && !HEAP_TAKE(&p->memory, *list, most))
    policy_refuse(p, "'%s', but the engine is out of memory", field);
  return *list;
}

// Reads `logit_muls`. A key names a head as MODULE.HEAD; the signal logit_max.MODULE.HEAD must
// exist.
static bool read_logit_muls(eng_policy *p, eng_verdict *out, const verdict_field *f)
{
  static const char prefix[] = "logit_max.";
  const size_t length = sizeof prefix - 1;
  lua_State *L = p->L;
  (void)out;
  if (!list_of(p, &p->logit_muls, ENG_POLICY_LOGIT_MULS, f->name)) return false;
  for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
    if (lua_type(L, -2) != LUA_TSTRING) return bad_key(p, f->name, "names of heads");
    const char *name = lua_tostring(L, -2), *nearest = "";
    bool known = false;
    for (int i = 0; i < p->n_signals && !known; ++i) {
      const char *signal = p->signals[i].name;
      if (strncmp(signal, prefix, length) != 0) continue;
      known = strcmp(signal + length, name) == 0;
      nearest = signal + length;
    }
    if (!known || strlen(name) > ENG_NAME_BYTES)
      return policy_refuse(p, "'logit_muls' for the unknown head '%.60s'%s%.60s%s", name,
                           *nearest ? "; heads are named like '" : "", nearest,
                           *nearest ? "'" : "");
    if (!policy_is_scale(number(L))) return bad_entry(p, f);
    if (p->n_logit_muls == ENG_POLICY_LOGIT_MULS)
      return policy_refuse(p, "'logit_muls' for more than %d heads", ENG_POLICY_LOGIT_MULS);
    policy_logged *to = &p->logit_muls[p->n_logit_muls++];
    snprintf(to->name, sizeof to->name, "%s", name);
    to->value = lua_tonumber(L, -1);
  }
  return true;
}

// Reads `log`. Most policies log the same names at every step, so a name is checked only if it
// differs from the name at the same position in the last `log`.
static bool read_log(eng_policy *p, eng_verdict *out, const verdict_field *f)
{
  lua_State *L = p->L;
  (void)out;
  if (!list_of(p, &p->logs, ENG_POLICY_LOGS, f->name)) return false;
  for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
    if (lua_type(L, -2) != LUA_TSTRING) return bad_key(p, f->name, "names");
    if (p->n_logs == ENG_POLICY_LOGS)
      return policy_refuse(p, "a 'log' of more than %d values", ENG_POLICY_LOGS);
    size_t length;
    const char *name = lua_tolstring(L, -2, &length);
    policy_logged *to = &p->logs[p->n_logs];
    if (strlen(name) != length || strcmp(name, to->name) != 0) {
      const char *problem = eng_name_problem(name, (int64_t)length);
      if (problem) return policy_refuse(p, "'log' with a name that %s", problem);
      memcpy(to->name, name, length + 1);
    }
    if (lua_type(L, -1) != LUA_TNUMBER) {
      char field[80];
      snprintf(field, sizeof field, "log.%.60s", name);
      return bad_value(p, field, f->entry);
    }
    to->value = lua_tonumber(L, -1);
    p->n_logs++;
  }
  return true;
}

// ------------------------------------------------------------------ the verdict

#define AT(member) offsetof(eng_verdict, member)
static const verdict_field fields[] = {
  {"scale", 0, read_scale, "a positive finite number", NULL, AT(scale)},
  {"action", 0, read_action, "'step', 'skip', 'retry', 'stop' or 'rollback'", NULL, 0},
  {"clip", 0, read_limit, "a positive number, the limit on the gradient norm", NULL, AT(clip)},
  {"lr_mul", 0, read_factor, "a finite factor, 0 or more", NULL, AT(lr_mul)},
  {"reason", 0, read_reason, "a string", NULL, 0},
  {"scales", 0, read_scales, "a table { group = scale }", "a positive finite number", 0},
  {"log", 0, read_log, "a table { name = number }", "a number", 0},
  {"back", 0, read_steps, "a whole number of steps, 0 or more", NULL, AT(back)},
  {"skip", 0, read_steps, "a whole number of steps, 0 or more", NULL, AT(skip)},
  {"clips", ENG_NEED_CLIPS, read_norms, "a table { name = norm }",
   "a positive number, the limit on the gradient norm", 0},
  {"lr_muls", ENG_NEED_LR_MULS, read_numbers, "a table { name = factor }",
   "a finite factor, 0 or more", ENG_EACH_LR},
  {"reset_moments", ENG_NEED_RESET_MOMENTS, read_reset,
   "true, a name, a pattern, or a list of names and patterns", NULL, 0},
  {"update_clip", ENG_NEED_UPDATE_CLIP, read_limit, "a positive number", NULL, AT(update_clip)},
  {"spike_clip", ENG_NEED_SPIKE_CLIP, read_limit, "a positive number", NULL, AT(spike_clip)},
  {"logit_muls", ENG_NEED_LOGIT_MULS, read_logit_muls, "a table { head = factor }",
   "a positive finite factor", 0},
  {"caps", ENG_NEED_CAPS, read_numbers, "a table { name = magnitude }",
   "a finite magnitude, 0 or more", ENG_EACH_CAP},
  {"grad_norms", ENG_NEED_GRAD_NORMS, read_norms, "a table { name = norm }",
   "a positive finite number, the gradient norm", 0},
  {"bias_step", ENG_NEED_BIAS_STEP, read_update_number, "a whole number, 1 or more", NULL,
   AT(bias_step)},
};
#undef AT
_Static_assert(sizeof fields / sizeof *fields == VERDICT_FIELDS, "VERDICT_FIELDS counts the rows");

void policy_verdict_open(eng_policy *p)
{
  for (int i = 0; i < VERDICT_FIELDS; ++i)
    p->verdict_key[i] = policy_intern(p->L, fields[i].name);
}

eng_policy_name policy_verdict_field(int index)
{
  const verdict_field *f = &fields[index];
  return (eng_policy_name){
    .name = f->name, .need = f->need, .verdict = true, .listed = f->need != 0};
}

// Refuses a factor that takes the learning rate `lr` out of f32's range: the update would compute
// with infinity, or with 0 although the factor is not 0. `tensor`: NULL for `lr_mul`.
static bool keeps_rate(eng_policy *p, const char *tensor, double lr, double factor)
{
  const double least = 0x1p-149, most = FLT_MAX, rate = lr * factor;
  const bool usable = lr >= least && lr <= most;      // else the run itself has a useless rate
  if (!usable || factor == 0 || (rate >= least && rate <= most)) return true;
  char field[100] = "lr_mul";
  if (tensor) snprintf(field, sizeof field, "lr_muls[\"%.60s\"]", tensor);
  return policy_refuse(p, "%s = %g; expected 0, or %.3g to %.3g, so that the learning rate, now "
                       "%g, stays in the range of f32", field, factor, least / lr, most / lr, lr);
}

static bool keeps_rates(eng_policy *p, const eng_verdict *out)
{
  const double lr = p->judged->lr;
  const bool each = out->each >> ENG_EACH_LR & 1;
  bool good = keeps_rate(p, NULL, lr, out->lr_mul);
  for (int i = 0; good && each && i < p->n_tensors; ++i)
    good = keeps_rate(p, p->tensors[i], lr * out->lr_mul, p->each[ENG_EACH_LR][i]);
  return good;
}

// The budget of all patterns in a verdict together, as a multiple of that of one call: it suffices
// for a hundred patterns and a thousand tensors. The time is that of the whole decision.
enum { PATTERN_BUDGETS = 10 };

bool policy_read_verdict(eng_policy *p, eng_verdict *out)
{
  lua_State *L = p->L;
  if (__builtin_mul_overflow(p->instructions, PATTERN_BUDGETS, &p->budget)) p->budget = INT64_MAX;
  if (lua_type(L, -1) == LUA_TNUMBER) return read_scale(p, out, &fields[0]);
  int table = lua_gettop(L);
  for (lua_pushnil(L); lua_next(L, table); lua_pop(L, 1)) {
    if (lua_type(L, -2) != LUA_TSTRING)
      return policy_refuse(p, "a table with a %s as a key; expected { scale = ..., action = ... }",
                           luaL_typename(L, -2));
    const char *key = lua_tostring(L, -2);
    int i = 0;
    while (i < VERDICT_FIELDS && key != p->verdict_key[i]) ++i;
    if (i == VERDICT_FIELDS) {
      const char *hint = nearest_hint(key, p->verdict_key, VERDICT_FIELDS);
      return policy_refuse(p, "an unknown field '%.60s'%s", key,
                           *hint ? hint : "; `engine help verdict` lists the fields of a verdict");
    }
    const verdict_field *f = &fields[i];
    if (f->need & ~p->needs)
      return policy_refuse(
        p, "'%s', which this policy does not announce: add \"%s\" to its 'needs'", key, key);
    if (f->entry && !lua_istable(L, -1)) return bad_value(p, key, f->expected);
    if (!f->read(p, out, f)) return false;
  }
  if (out->back + out->skip > 0 && out->action != ENG_ACTION_ROLLBACK)
    return policy_refuse(p, "'back' or 'skip' without action = 'rollback'");
  if (!(out->scale > 0))
    return policy_refuse(p, "a table without 'scale', the loss scale of the next step");
  return keeps_rates(p, out);
}

double eng_policy_each(const eng_policy *p, int what, int index)
{
  bool set = what >= 0 && what < ENG_EACH && index >= 0 && index < p->n_tensors &&
             (p->each_set >> what & 1);
  if (set) return p->each[what][index];
  return what == ENG_EACH_CAP ? HUGE_VAL : what != ENG_EACH_RESET;
}

const char *eng_policy_logit_mul(double *factor, const eng_policy *p, int index)
{
  if (index < 0 || index >= p->n_logit_muls) return NULL;
  *factor = p->logit_muls[index].value;
  return p->logit_muls[index].name;
}

const char *eng_policy_logged(double *value, const eng_policy *p, int index)
{
  if (index < 0 || index >= p->n_logs) return NULL;
  *value = p->logs[index].value;
  return p->logs[index].name;
}
