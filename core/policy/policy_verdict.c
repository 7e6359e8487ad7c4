// The verdict that a policy returns: checks each field of the table from `decide`, with a message
// that names the mistake, and makes its text safe for terminals. Called by policy_vm.c after a
// decision.
#include "policy_vm.h"

#include "base/nearest.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const policy_verdict_fields[VERDICT_FIELDS] = {
  "scale", "action", "clip", "lr_mul", "reason", "scales", "log", "back", "skip"};

void policy_copy_reason(char *out, size_t size, const char *text, size_t length)
{
  eng_text_shown(out, (int64_t)size, text, (int64_t)length, false);
}

// Writes to `why` that the value on top of the stack is invalid for `field`: "scale = nan; expected
// ...". Returns false.
static bool bad_value(lua_State *L, char *why, size_t size, const char *field, const char *expected)
{
  char number[32];
  switch (lua_type(L, -1)) {
    case LUA_TNUMBER:
      eng_number_text(number, lua_tonumber(L, -1));
      snprintf(why, size, "%s = %s; expected %s", field, number, expected);
      break;
    case LUA_TSTRING:
      snprintf(why, size, "%s = '%.40s'; expected %s", field, lua_tostring(L, -1), expected);
      break;
    case LUA_TBOOLEAN:
      snprintf(why, size, "%s = %s; expected %s", field, lua_toboolean(L, -1) ? "true" : "false",
               expected);
      break;
    default: snprintf(why, size, "%s = %s; expected %s", field, luaL_typename(L, -1), expected);
    }
  return false;
}

static bool read_scales(eng_policy *p, char *why, size_t size)
{
  lua_State *L = p->L;
  if (!lua_istable(L, -1)) return bad_value(L, why, size, "scales", "a table { group = scale }");
  if (!p->scalable) {
    snprintf(why, size, "'scales', but this run has a single scale for all gradients");
    return false;
  }
  for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
    if (lua_type(L, -2) != LUA_TSTRING) {
      snprintf(why, size, "'scales' with a %s as a key; expected names of groups",
               luaL_typename(L, -2));
      return false;
    }
    const char *name = lua_tostring(L, -2);
    int group = 0;
    while (group < p->n_groups && strcmp(p->groups[group], name) != 0) ++group;
    if (group == p->n_groups) {
      snprintf(why, size, "a scale for the unknown group '%.60s'%s", name,
               nearest_hint(name, (const char *const *)p->groups, p->n_groups));
      return false;
    }
    if (lua_type(L, -1) != LUA_TNUMBER || !policy_is_scale(lua_tonumber(L, -1))) {
      char field[80];
      snprintf(field, sizeof field, "scales.%.60s", name);
      return bad_value(L, why, size, field, "a positive finite number");
    }
    p->group_next[group] = lua_tonumber(L, -1);
  }
  return true;
}

// Checks a name only if it differs from the name at the same place of the last `log`.
static bool read_log(eng_policy *p, char *why, size_t size)
{
  lua_State *L = p->L;
  if (!lua_istable(L, -1)) return bad_value(L, why, size, "log", "a table { name = number }");
  if (!p->logs) p->logs = calloc(ENG_POLICY_LOGS, sizeof *p->logs);
  if (!p->logs) {
    snprintf(why, size, "'log', but memory is exhausted");
    return false;
  }
  for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
    if (lua_type(L, -2) != LUA_TSTRING) {
      snprintf(why, size, "'log' with a %s as a key; expected names", luaL_typename(L, -2));
      return false;
    }
    if (p->n_logs == ENG_POLICY_LOGS) {
      snprintf(why, size, "a 'log' of more than %d values", ENG_POLICY_LOGS);
      return false;
    }
    size_t length;
    const char *name = lua_tolstring(L, -2, &length);
    policy_logged *to = &p->logs[p->n_logs];
    if (strlen(name) != length || strcmp(name, to->name) != 0) {
      const char *problem = eng_name_problem(name, (int64_t)length);
      if (problem) {
        snprintf(why, size, "'log' with a name that %s", problem);
        return false;
      }
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
enum { V_SCALE, V_ACTION, V_CLIP, V_LR_MUL, V_REASON, V_SCALES, V_LOG, V_BACK, V_SKIP };

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
      default:
        snprintf(why, size, "an unknown field '%.60s'%s", key,
                 nearest_hint(key, policy_verdict_fields, VERDICT_FIELDS));
        return false;
    }
  }
  if (out->back + out->skip > 0 && out->action != ENG_ACTION_ROLLBACK) {
    snprintf(why, size, "'back' or 'skip' without action = 'rollback'");
    return false;
  }
  if (!has_scale) snprintf(why, size, "a table without 'scale', the loss scale of the next step");
  return has_scale;
}
