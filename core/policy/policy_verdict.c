// The verdict that a policy returns: checks each field of the table from `decide`, with a message
// that names the mistake, and makes its text safe for terminals. Called by policy_vm.c after a
// decision.
#include "policy_vm.h"

#include "base/nearest.h"

#include <stdio.h>
#include <string.h>

const char *const policy_verdict_fields[VERDICT_FIELDS] = {"scale",  "action", "clip",
                                                           "lr_mul", "reason", "scales"};

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

static bool read_action(eng_verdict *out, lua_State *L, char *why, size_t size)
{
  const char *expected = "'step', 'skip', 'retry' or 'stop'";
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
enum { V_SCALE, V_ACTION, V_CLIP, V_LR_MUL, V_REASON, V_SCALES };

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
      default:
        snprintf(why, size, "an unknown field '%.60s'%s", key,
                 nearest_hint(key, policy_verdict_fields, VERDICT_FIELDS));
        return false;
    }
  }
  if (!has_scale) snprintf(why, size, "a table without 'scale', the loss scale of the next step");
  return has_scale;
}
