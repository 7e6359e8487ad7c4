// The verdict that a policy returns: checks each field of the table from `decide`, with a message
// that names the mistake, and makes its text safe for terminals. Called by policy_vm.c after a
// decision.
#include "policy_vm.h"

#include "base/error.h"
#include "base/nearest.h"
#include "device/gradstats.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const policy_verdict_fields[VERDICT_FIELDS] = {
  "scale", "action", "clip", "lr_mul", "reason", "scales", "log", "back", "skip", "clips",
  "lr_muls", "reset_moments", "update_clip", "spike_clip", "logit_muls",
  "caps", "grad_norms", "bias_step"};
// The word that `needs` must list for a field.
static const unsigned field_needs[VERDICT_FIELDS] = {
  [9] = ENG_NEED_CLIPS,        ENG_NEED_LR_MULS,    ENG_NEED_RESET_MOMENTS,
  ENG_NEED_UPDATE_CLIP, ENG_NEED_SPIKE_CLIP, ENG_NEED_LOGIT_MULS, ENG_NEED_CAPS,
  ENG_NEED_GRAD_NORMS, ENG_NEED_BIAS_STEP};

void policy_copy_reason(char *out, size_t size, const char *text, size_t length)
{
  eng_text_shown(out, (int64_t)size, text, (int64_t)length, false);
}

// Writes the reason for refusing the verdict to `why`. Returns false.
__attribute__((format(printf, 3, 4)))
static bool refuse(char *why, size_t size, const char *format, ...)
{
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(why, size, format, arguments);
  va_end(arguments);
  return false;
}

// Writes to `why` that the value on top of the stack is invalid for `field`: "scale = nan; expected
// ...". Returns false.
static bool bad_value(lua_State *L, char *why, size_t size, const char *field, const char *expected)
{
  char number[32];
  switch (lua_type(L, -1)) {
    case LUA_TNUMBER:
      eng_number_text(number, lua_tonumber(L, -1));
      return refuse(why, size, "%s = %s; expected %s", field, number, expected);
    case LUA_TSTRING:
      return refuse(why, size, "%s = '%.40s'; expected %s", field, lua_tostring(L, -1), expected);
    case LUA_TBOOLEAN:
      return refuse(why, size, "%s = %s; expected %s", field,
                    lua_toboolean(L, -1) ? "true" : "false", expected);
    default:
      return refuse(why, size, "%s = %s; expected %s", field, luaL_typename(L, -1), expected);
  }
}

// Finds what the key below the top of the stack names: returns the number of a tensor or, from
// n_tensors on, of a group; -1 for a pattern, whose matches are in p->matched; -2, with `why`, if
// nothing has that name. Groups go before tensors if `groups`.
static int find_named(eng_policy *p, const char *field, bool groups, char *why, size_t size)
{
  lua_State *L = p->L;
  if (lua_type(L, -2) != LUA_TSTRING) {
    snprintf(why, size, "'%s' with a %s as a key; expected names or patterns", field,
             luaL_typename(L, -2));
    return -2;
  }
  if (p->n_tensors + p->n_groups == 0) return -1;            // a replay without a model
  for (int pass = 0; pass < 2; pass++) {
    bool group = (pass == 0) == groups;
    int found = policy_named(p, group, lua_gettop(L) - 1);
    if (found >= 0) return group ? p->n_tensors + found : found;
  }
  const char *name = lua_tostring(L, -2);
  lua_pushvalue(L, -2);
  if (policy_match_names(p) != ENG_OK) {
    snprintf(why, size, "'%s' with the pattern '%.60s': %s", field, name, eng_error_message());
    return -2;
  }
  for (int i = 0; i < p->n_tensors + p->n_groups; i++)
    if (p->matched[i]) return -1;
  const char *hint = nearest_hint(name, (const char *const *)p->groups, p->n_groups);
  if (!*hint) hint = nearest_hint(name, (const char *const *)p->tensors, p->n_tensors);
  char example[100] = "";
  if (!*hint && p->n_tensors > 0)
    snprintf(example, sizeof example, "; one tensor is called '%.60s'", p->tensors[0]);
  snprintf(why, size, "'%s' for '%.60s', which matches no group and no tensor%s%s", field, name,
           hint, example);
  return -2;
}

static bool bad_entry(lua_State *L, char *why, size_t size, const char *field, const char *expected)
{
  char place[100];
  snprintf(place, sizeof place, "%s[\"%.60s\"]", field, lua_tostring(L, -2));
  return bad_value(L, why, size, place, expected);
}

static bool read_scales(eng_policy *p, char *why, size_t size)
{
  lua_State *L = p->L;
  if (!lua_istable(L, -1)) return bad_value(L, why, size, "scales", "a table { group = scale }");
  if (!p->scalable)
    return refuse(why, size, "'scales', but this run has a single scale for all gradients");
  for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
    int named = find_named(p, "scales", true, why, size);
    if (named == -2) return false;
    if (lua_type(L, -1) != LUA_TNUMBER || !policy_is_scale(lua_tonumber(L, -1)))
      return bad_entry(L, why, size, "scales", "a positive finite number");
    double scale = lua_tonumber(L, -1);
    for (int i = 0; i < p->n_tensors + p->n_groups; ++i) {
      if (named < 0 ? !p->matched[i] : i != named) continue;
      int group = i < p->n_tensors ? p->group_of[i] : i - p->n_tensors;
      if (group < 0) continue;
      if (p->group_next[group] > 0 && p->group_next[group] != scale)
        return refuse(why, size, "two scales for the group '%.60s'", p->groups[group]);
      p->group_next[group] = scale;
    }
  }
  return true;
}

static double true_norm(const eng_policy *p, const eng_tensor_stats *s)
{
  return sqrt(s->sum_squares) / (p->judged->scale * gradstats_relative_scale(s));
}

// Limits the norm of all tensors of `group` together, or of tensor `only` if group is -1, to
// `limit`. With `exactly`, sets the norm to `limit`, whether it was larger or smaller.
static void limit_norm(eng_policy *p, int only, int group, double limit, bool exactly)
{
  if (!p->judged_stats) return;                              // a replay without tensors
  double squares = 0, *factor = p->each[ENG_EACH_CLIP];
  for (int i = 0; i < p->n_tensors; ++i) {
    if (group >= 0 ? p->group_of[i] != group : i != only) continue;
    double norm = true_norm(p, &p->judged_stats[i]);
    squares += norm * norm;
  }
  double norm = group >= 0 ? sqrt(squares) : true_norm(p, &p->judged_stats[only]);
  if (!(norm > (exactly ? 0 : limit))) return;
  for (int i = 0; i < p->n_tensors; ++i)
    if ((group >= 0 ? p->group_of[i] == group : i == only) && (exactly || limit / norm < factor[i]))
      factor[i] = limit / norm;
}

static void begin_each(eng_policy *p, eng_verdict *out, int what, double none)
{
  out->each |= 1u << what;
  for (int i = 0; i < p->n_tensors; ++i) p->each[what][i] = none;
}

static bool read_norms(eng_policy *p, eng_verdict *out, bool exactly, char *why, size_t size)
{
  lua_State *L = p->L;
  const char *field = exactly ? "grad_norms" : "clips";
  if (!lua_istable(L, -1)) return bad_value(L, why, size, field, "a table { name = norm }");
  if (out->each >> ENG_EACH_CLIP & 1) {
    snprintf(why, size, "both 'clips' and 'grad_norms'");
    return false;
  }
  begin_each(p, out, ENG_EACH_CLIP, 1);
  for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
    int named = find_named(p, field, true, why, size);
    if (named == -2) return false;
    double limit = lua_tonumber(L, -1);
    if (lua_type(L, -1) != LUA_TNUMBER || !(limit > 0) || (exactly && !f64_is_finite(limit)))
      return bad_entry(L, why, size, field,
                       exactly ? "a positive finite number, the gradient norm"
                               : "a positive number, the largest gradient norm");
    for (int i = 0; i < p->n_tensors; ++i)
      if (named < 0 ? p->matched[i] : i == named) limit_norm(p, i, -1, limit, exactly);
    if (named >= p->n_tensors) limit_norm(p, -1, named - p->n_tensors, limit, exactly);
  }
  return true;
}

// Reads `lr_muls` or `caps`: a number for each tensor.
static bool read_numbers(eng_policy *p, eng_verdict *out, int what, char *why, size_t size)
{
  lua_State *L = p->L;
  const bool cap = what == ENG_EACH_CAP;
  const char *field = cap ? "caps" : "lr_muls";
  if (!lua_istable(L, -1))
    return bad_value(L, why, size, field,
                     cap ? "a table { name = magnitude }" : "a table { name = factor }");
  begin_each(p, out, what, -1);
  double *factor = p->each[what];
  for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
    int named = find_named(p, field, true, why, size);
    if (named == -2) return false;
    double value = lua_tonumber(L, -1);
    if (lua_type(L, -1) != LUA_TNUMBER || !f64_is_finite(value) || value < 0)
      return bad_entry(L, why, size, field,
                       cap ? "a finite magnitude, 0 or more" : "a finite factor, 0 or more");
    for (int i = 0; i < p->n_tensors; ++i) {
      bool hit = named < 0 ? p->matched[i]
                           : i == named || p->group_of[i] == named - p->n_tensors;
      if (!hit) continue;
      if (factor[i] >= 0 && factor[i] != value)
        return refuse(why, size, "two %s in '%s' for the tensor '%.60s'", cap ? "caps" : "factors",
                      field, p->tensors[i]);
      factor[i] = value;
    }
  }
  for (int i = 0; i < p->n_tensors; ++i)
    if (factor[i] < 0) factor[i] = cap ? HUGE_VAL : 1;
  return true;
}

// Marks the tensors that the name or pattern on top of the stack means.
static bool mark_reset(eng_policy *p, char *why, size_t size)
{
  lua_State *L = p->L;
  if (lua_type(L, -1) != LUA_TSTRING)
    return bad_value(L, why, size, "reset_moments", "true, a name, a pattern, or a list of these");
  lua_pushnil(L);                                            // find_named reads below the top
  int named = find_named(p, "reset_moments", true, why, size);
  if (named == -2) return false;
  lua_pop(L, 1);
  for (int i = 0; i < p->n_tensors; ++i)
    if (named < 0 ? p->matched[i] : i == named || p->group_of[i] == named - p->n_tensors)
      p->each[ENG_EACH_RESET][i] = 1;
  return true;
}

static bool read_reset(eng_policy *p, eng_verdict *out, char *why, size_t size)
{
  lua_State *L = p->L;
  if (lua_isboolean(L, -1)) {
    if (lua_toboolean(L, -1)) begin_each(p, out, ENG_EACH_RESET, 1);
    return true;
  }
  begin_each(p, out, ENG_EACH_RESET, 0);
  if (!lua_istable(L, -1)) return mark_reset(p, why, size);
  for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1))
    if (!mark_reset(p, why, size)) return false;
  return true;
}

// Reads `logit_muls`. Heads are named like the signals logit_max.MODULE.HEAD.
static bool read_logit_muls(eng_policy *p, char *why, size_t size)
{
  static const char prefix[] = "logit_max.";
  const size_t length = sizeof prefix - 1;
  lua_State *L = p->L;
  if (!lua_istable(L, -1))
    return bad_value(L, why, size, "logit_muls", "a table { head = factor }");
  if (!p->logit_muls) p->logit_muls = calloc(ENG_POLICY_LOGIT_MULS, sizeof *p->logit_muls);
  if (!p->logit_muls) return refuse(why, size, "'logit_muls', but memory is exhausted");
  for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
    if (lua_type(L, -2) != LUA_TSTRING) {
      snprintf(why, size, "'logit_muls' with a %s as a key; expected names of heads",
               luaL_typename(L, -2));
      return false;
    }
    const char *name = lua_tostring(L, -2), *nearest = "";
    bool known = false;
    for (int i = 0; i < p->n_signals && !known; ++i) {
      const char *signal = p->signals[i].name;
      if (strncmp(signal, prefix, length) != 0) continue;
      known = strcmp(signal + length, name) == 0;
      nearest = signal + length;
    }
    if (!known || strlen(name) > ENG_NAME_BYTES) {
      snprintf(why, size, "'logit_muls' for the unknown head '%.60s'%s%.60s%s", name,
               *nearest ? "; heads are named like '" : "", nearest, *nearest ? "'" : "");
      return false;
    }
    double value = lua_tonumber(L, -1);
    if (lua_type(L, -1) != LUA_TNUMBER || !policy_is_scale(value))
      return bad_entry(L, why, size, "logit_muls", "a positive finite factor");
    if (p->n_logit_muls == ENG_POLICY_LOGIT_MULS)
      return refuse(why, size, "'logit_muls' for more than %d heads", ENG_POLICY_LOGIT_MULS);
    policy_logged *to = &p->logit_muls[p->n_logit_muls++];
    snprintf(to->name, sizeof to->name, "%s", name);
    to->value = value;
  }
  return true;
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

// Reads `log`. Checks a name only if it differs from the name at the same place of the last `log`.
static bool read_log(eng_policy *p, char *why, size_t size)
{
  lua_State *L = p->L;
  if (!lua_istable(L, -1)) return bad_value(L, why, size, "log", "a table { name = number }");
  if (!p->logs) p->logs = calloc(ENG_POLICY_LOGS, sizeof *p->logs);
  if (!p->logs) return refuse(why, size, "'log', but memory is exhausted");
  for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
    if (lua_type(L, -2) != LUA_TSTRING) {
      snprintf(why, size, "'log' with a %s as a key; expected names", luaL_typename(L, -2));
      return false;
    }
    if (p->n_logs == ENG_POLICY_LOGS)
      return refuse(why, size, "a 'log' of more than %d values", ENG_POLICY_LOGS);
    size_t length;
    const char *name = lua_tolstring(L, -2, &length);
    policy_logged *to = &p->logs[p->n_logs];
    if (strlen(name) != length || strcmp(name, to->name) != 0) {
      const char *problem = eng_name_problem(name, (int64_t)length);
      if (problem) return refuse(why, size, "'log' with a name that %s", problem);
      memcpy(to->name, name, length + 1);
    }
    if (lua_type(L, -1) != LUA_TNUMBER) {
      char field[80];
      snprintf(field, sizeof field, "log.%.60s", name);
      return bad_value(L, why, size, field, "a number");
    }
    to->value = lua_tonumber(L, -1);
    p->n_logs++;
  }
  return true;
}

const char *eng_policy_logged(double *value, const eng_policy *p, int index)
{
  if (index < 0 || index >= p->n_logs) return NULL;
  *value = p->logs[index].value;
  return p->logs[index].name;
}

static bool read_action(eng_verdict *out, lua_State *L, char *why, size_t size)
{
  const char *expected = "'step', 'skip', 'retry', 'stop' or 'rollback'";
  if (lua_type(L, -1) != LUA_TSTRING) return bad_value(L, why, size, "action", expected);
  const char *action = lua_tostring(L, -1);
  int known = eng_action_from_name(action);
  if (known >= 0) {
    out->action = known;
    return true;
  }
  const char *names[ENG_ACTIONS];
  for (int i = 0; i < ENG_ACTIONS; ++i) names[i] = eng_action_name(i);
  const char *hint = nearest_hint(action, names, ENG_ACTIONS);
  if (!*hint) return bad_value(L, why, size, "action", expected);
  snprintf(why, size, "action = '%.40s'%s", action, hint);
  return false;
}

// in the order of policy_verdict_fields
enum { V_SCALE, V_ACTION, V_CLIP, V_LR_MUL, V_REASON, V_SCALES, V_LOG, V_BACK, V_SKIP,
       V_CLIPS, V_LR_MULS, V_RESET_MOMENTS, V_UPDATE_CLIP, V_SPIKE_CLIP, V_LOGIT_MULS, V_CAPS,
       V_GRAD_NORMS, V_BIAS_STEP };

bool policy_read_verdict(eng_policy *p, eng_verdict *out, char *why, size_t size)
{
  lua_State *L = p->L;
  int table = lua_gettop(L);
  bool has_scale = false;
  for (lua_pushnil(L); lua_next(L, table); lua_pop(L, 1)) {
    if (lua_type(L, -2) != LUA_TSTRING) {
      snprintf(why, size, "a table with a %s as a key; expected { scale = ..., action = ... }",
               luaL_typename(L, -2));
      return false;
    }
    const char *key = lua_tostring(L, -2);
    int field = 0;
    while (field < VERDICT_FIELDS && key != p->verdict_key[field]) ++field;
    double number =
      lua_type(L, -1) == LUA_TNUMBER ? lua_tonumber(L, -1) : f64_from(0x7FF8000000000000ull);
    if (field < VERDICT_FIELDS && field_needs[field] & ~p->needs)
      return refuse(why, size,
                    "'%s', which this policy does not announce: add \"%s\" to its 'needs'", key,
                    key);
    switch (field) {
      case V_SCALE:
        if (!policy_is_scale(number))
          return bad_value(L, why, size, "scale", "a positive finite number");
        out->scale = number;
        has_scale = true;
        break;
      case V_ACTION:
        if (!read_action(out, L, why, size)) return false;
        break;
      case V_CLIP:
        if (f64_is_nan(number) || !(number > 0))
          return bad_value(L, why, size, "clip", "a positive number, the largest gradient norm");
        out->clip = f64_is_finite(number) ? number : 0;
        break;
      case V_LR_MUL:
        if (!f64_is_finite(number) || number < 0)
          return bad_value(L, why, size, "lr_mul", "a finite factor, 0 or more");
        out->lr_mul = number;
        break;
      case V_REASON: {
        if (lua_type(L, -1) != LUA_TSTRING) return bad_value(L, why, size, "reason", "a string");
        size_t length;
        const char *reason = lua_tolstring(L, -1, &length);
        policy_copy_reason(out->reason, sizeof out->reason, reason, strnlen(reason, length));
        break;
      }
      case V_SCALES:
        if (!read_scales(p, why, size)) return false;
        break;
      case V_BACK:
      case V_SKIP:
        if (!(number >= 0 && number <= 1e9 && number == floor(number)))
          return bad_value(L, why, size, key, "a whole number of steps, 0 or more");
        *(field == V_BACK ? &out->back : &out->skip) = (int64_t)number;
        break;
      case V_LOG:
        if (!read_log(p, why, size)) return false;
        break;
      case V_CLIPS:
      case V_GRAD_NORMS:
        if (!read_norms(p, out, field == V_GRAD_NORMS, why, size)) return false;
        break;
      case V_LR_MULS:
      case V_CAPS:
        if (!read_numbers(p, out, field == V_CAPS ? ENG_EACH_CAP : ENG_EACH_LR, why, size))
          return false;
        break;
      case V_BIAS_STEP:
        if (!(number >= 1 && number <= 1e9 && number == floor(number)))
          return bad_value(L, why, size, key, "a whole number, 1 or more");
        out->bias_step = (int64_t)number;
        break;
      case V_RESET_MOMENTS:
        if (!read_reset(p, out, why, size)) return false;
        break;
      case V_LOGIT_MULS:
        if (!read_logit_muls(p, why, size)) return false;
        break;
      case V_UPDATE_CLIP:
      case V_SPIKE_CLIP:
        if (f64_is_nan(number) || !(number > 0))
          return bad_value(L, why, size, key, "a positive number");
        *(field == V_UPDATE_CLIP ? &out->update_clip : &out->spike_clip) =
          f64_is_finite(number) ? number : 0;
        break;
      default:
        snprintf(why, size, "an unknown field '%.60s'%s", key,
                 nearest_hint(key, policy_verdict_fields, VERDICT_FIELDS));
        return false;
    }
  }
  if (out->back + out->skip > 0 && out->action != ENG_ACTION_ROLLBACK)
    return refuse(why, size, "'back' or 'skip' without action = 'rollback'");
  if (!has_scale) snprintf(why, size, "a table without 'scale', the loss scale of the next step");
  return has_scale;
}
