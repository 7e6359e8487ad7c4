// The record as a policy sees it: userdata that reads the host's structures on access. A decision
// pays only for the fields it reads; nothing is copied, and nothing is writable. Owns the names of
// tensors and groups, the groups' sums, and the signals. Called by policy_vm.c when a policy is
// loaded, by policy_library.c for pairs(), ipairs() and tostring(), by policy_verdict.c to find
// names, and by Lua (eng_policy_tensors, eng_policy_signal).
#include "policy_vm.h"

#include "base/error.h"
#include "device/gradstats.h"
#include "base/numerics.h"
#include "base/text.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef enum view_kind {
  VIEW_RECORD,
  VIEW_HIST,
  VIEW_TENSORS,
  VIEW_GROUPS,
  VIEW_SIGNALS,
  VIEW_TENSOR,
  VIEW_GROUP,
  VIEW_TENSOR_HIST,
  VIEW_GROUP_HIST,
  VIEW_KINDS
} view_kind;

static const char *const view_names[VIEW_KINDS] = {
  "record",         "record.hist",           "record.tensors",       "record.groups",
  "record.signals", "a tensor's statistics", "a group's statistics", "a tensor's hist",
  "a group's hist"};

typedef struct view { int32_t kind, index; } view;

/// How a field is read. The kinds from INTEGER to FIRST_BAD and after OVERFLOW read a member of a
/// structure: `at` is its offset.
typedef enum field_kind {
  NONE,            // there is no such field
  INTEGER,
  NUMBER,
  MAYBE,           // a number; nil if it is NaN
  FLAG,
  FIRST_BAD,       // the index of a tensor, returned as its name
  VIEW,            // `at`: the kind of view
  // the following kinds occur only in the statistics of tensors and groups
  UPDATE,          // `at`: ENG_NORM_*; nil if the record's norm of this kind is NaN
  NAME, SCALE, OVERFLOW,
  SCALED,          // a number that is divided by the scale
  ROOT,            // a number whose square root is divided by the scale
  NONZERO,         // a number; nil if it is 0
  MEASURED_INTEGER, MEASURED_NUMBER   // nil unless the meters of an FP8 layer measured the tensor
} field_kind;
typedef struct place { field_kind kind; size_t at; } place;
enum { IN_RECORD, IN_STATS };
typedef struct field {
  const char *name;
  unsigned    need;
  bool        listed;          // `needs` may list it
  int         combine;         // ENG_COMBINE_*
  place       in[2];           // IN_RECORD, IN_STATS
} field;

#define COUNT(list) ((int)(sizeof list / sizeof *list))

#define NEED(name)       ENG_NEED_##name, true
#define FREE             0, true
#define FACT             0, false
#define IN(kind, member) {kind, offsetof(eng_record, member)}
#define OF(kind, member) {kind, offsetof(eng_tensor_stats, member)}
#define IS(kind, at)     {kind, at}
#define NEVER            {NONE, 0}
#define ENG_FIELD(name, need, combine, ...) {#name, need, ENG_COMBINE_##combine, {__VA_ARGS__}},
static const field fields[RECORD_NAMES] = {
#include "record.def"
};

eng_policy_name policy_record_field(int index)
{
  const field *f = &fields[index];
  return (eng_policy_name){
    .name = f->name, .need = f->need, .combine = f->combine, .listed = f->listed,
    .record = f->in[IN_RECORD].kind != NONE, .tensor = f->in[IN_STATS].kind != NONE};
}

static void field_map_add(field_map *map, const char *key, int field)
{
  unsigned i = (unsigned)((uintptr_t)key >> 3) % FIELD_BUCKETS;
  while (map->key[i]) i = (i + 1) % FIELD_BUCKETS;
  map->key[i] = key;
  map->field[i] = (int8_t)field;
}

static int field_map_find(const field_map *map, const char *key)
{
  for (unsigned i = (unsigned)((uintptr_t)key >> 3) % FIELD_BUCKETS;; i = (i + 1) % FIELD_BUCKETS) {
    if (map->key[i] == key) return map->field[i];
    if (!map->key[i]) return -1;
  }
}

static const eng_record *record_in_view(eng_policy *p)
{
  if (!p->record) luaL_error(p->L, "the record is readable only inside decide");
  return p->record;
}

// Raises an error for the key at index 2, which names none of the fields of `what`. `names` has the
// n fields.
static int unknown_field(lua_State *L, const char *what, const char *const *names, int n)
{
  if (lua_type(L, 2) != LUA_TSTRING)
    return luaL_error(L, "%s: expected the name of a field, got a %s", what, luaL_typename(L, 2));
  const char *name = lua_tostring(L, 2);
  const char *hint = nearest_hint(name, names, n);
  if (!*hint && strcmp(what, "record") == 0) hint = "; `engine help record` lists its fields";
  return luaL_error(L, "%s has no field '%s'%s", what, name, hint);
}

// Returns the field that the key at index 2 names. Raises an error if there is no such field, or if
// the policy's `needs` must list it and do not. `what` names the fields' owner in messages; in:
// IN_RECORD or IN_STATS.
static const field *find_field(lua_State *L, const field_map *map, const char *what, int in)
{
  const char *key = lua_tostring(L, 2);
  int found = key ? field_map_find(map, key) : -1;
  if (found < 0) {
    const char *names[RECORD_NAMES];
    int n = 0;
    for (int i = 0; i < RECORD_NAMES; ++i)
      if (fields[i].in[in].kind != NONE) names[n++] = fields[i].name;
    unknown_field(L, what, names, n);
  }
  const field *f = &fields[found];
  if (f->need & ~policy_of(L)->needs)
    luaL_error(L, "%s.%s is not computed for this policy: add \"%s\" to its 'needs'", what, f->name,
               f->name);
  return f;
}

static void push_unless(lua_State *L, bool absent, double value)
{
  if (absent) lua_pushnil(L);
  else lua_pushnumber(L, value);
}

// Pushes a field of the kind INTEGER, NUMBER or MAYBE, read from the structure `from`.
static void push_member(lua_State *L, place f, const void *from)
{
  const void *at = (const char *)from + f.at;
  double value = f.kind == INTEGER ? (double)*(const int64_t *)at : *(const double *)at;
  push_unless(L, f.kind == MAYBE && f64_is_nan(value), value);
}

// ------------------------------------------------------------------ the record

static int record_index(lua_State *L)  // upvalue: views of hist, tensors, groups, signals
{
  eng_policy *p = policy_of(L);
  const place f = find_field(L, &p->record_map, "record", IN_RECORD)->in[IN_RECORD];
  const eng_record *r = record_in_view(p);
  switch (f.kind) {
    case FLAG: lua_pushboolean(L, *(const int32_t *)((const char *)r + f.at)); break;
    case FIRST_BAD:
      if (r->first_bad >= 0 && r->first_bad < p->n_tensors)
        lua_pushstring(L, p->tensors[r->first_bad]);
      else lua_pushnil(L);
      break;
    case VIEW:
      if ((f.at == VIEW_TENSORS || f.at == VIEW_GROUPS) && !p->stats) lua_pushnil(L);
      else lua_rawgeti(L, lua_upvalueindex(1), (int)f.at);
      break;
    default: push_member(L, f, r);
  }
  return 1;
}

// ------------------------------------------------------------------ tensors and groups

// A group takes the relative scale of its first tensor that has a gradient. The amax and norm of
// tensors with a different scale are converted to the group's scale.
static void sum_groups(eng_policy *p)
{
  memset(p->group_stats, 0, (size_t)p->n_groups * sizeof *p->group_stats);
  for (int i = 0; i < p->n_tensors; ++i) {
    if (p->group_of[i] < 0) continue;
    eng_tensor_stats *g = &p->group_stats[p->group_of[i]];
    const eng_tensor_stats *t = &p->stats[i];
    for (int k = 0; k < ENG_NORMS; k++) g->norms[k] = hypot(g->norms[k], t->norms[k]);
    if (t->count == 0) continue;                             // no gradient
    if (g->relative_scale == 0) g->relative_scale = gradstats_relative_scale(t);
    double ratio = g->relative_scale / gradstats_relative_scale(t);
#define ENG_COUNT(member)          g->member += t->member;
#define ENG_SUM(member, power)     g->member += TIMES_##power(t->member, ratio);
#define ENG_MAXIMUM(member, power) g->member = fmax(g->member, TIMES_##power(t->member, ratio));
#include "record.def"
    g->norm_ref = sqrt(g->norm_ref * g->norm_ref + t->norm_ref * t->norm_ref);
    if (p->needs & ENG_NEED_HIST)
      for (int b = 0; b < ENG_HIST_BINS; ++b) g->hist[b] += t->hist[b];
  }
  p->groups_summed = true;
}

static const eng_tensor_stats *stats_in_view(eng_policy *p, const view *v)
{
  record_in_view(p);
  if (!p->stats)
    luaL_error(p->L, "this step has no statistics per tensor: record.tensors and record.groups are "
                     "nil");
  bool group = v->kind == VIEW_GROUP || v->kind == VIEW_GROUP_HIST;
  if (v->index >= (group ? p->n_groups : p->n_tensors))
    luaL_error(p->L,
               "these statistics belong to an earlier model; read them from the record again");
  if (!group) return &p->stats[v->index];
  if (!p->groups_summed) sum_groups(p);
  return &p->group_stats[v->index];
}

static int stats_index(lua_State *L)
{
  eng_policy *p = policy_of(L);
  const view *v = lua_touserdata(L, 1);
  const place f = find_field(L, &p->stats_map, view_names[v->kind], IN_STATS)->in[IN_STATS];
  const eng_tensor_stats *s = stats_in_view(p, v);
  const bool measured = s->measured != 0;       // false: a gradient, or an unmeasured FP8 tensor
  const void *at = (const char *)s + f.at;
  const double scale = p->record->scale * gradstats_relative_scale(s), *number = at;
  switch (f.kind) {
    case NAME: lua_pushstring(L, (v->kind == VIEW_GROUP ? p->groups : p->tensors)[v->index]); break;
    case SCALE:     lua_pushnumber(L, scale); break;
    case OVERFLOW:  lua_pushboolean(L, s->inf > 0 || s->nan > 0); break;
    case SCALED:    lua_pushnumber(L, *number / scale); break;
    case ROOT:      lua_pushnumber(L, sqrt(*number) / scale); break;
    case NONZERO:   push_unless(L, *number == 0, *number); break;
    case UPDATE:    push_unless(L, f64_is_nan(p->record->norms[f.at]), s->norms[f.at]); break;
    case MEASURED_INTEGER: push_unless(L, !measured, (double)*(const int64_t *)at); break;
    case MEASURED_NUMBER:  push_unless(L, !measured, *number); break;
    case VIEW:      // the hist view is element 1 of this view's environment
      lua_getfenv(L, 1);
      lua_rawgeti(L, -1, 1);
      break;
    default: push_member(L, f, s);
  }
  return 1;
}

// Pushes the element of a list that has the given name or index (from 1), or nil if there is none.
static int list_index(lua_State *L)
{
  const view *v = lua_touserdata(L, 1);
  lua_rawgeti(L, LUA_REGISTRYINDEX, v->kind == VIEW_GROUPS ? KEEP_GROUPS : KEEP_TENSORS);
  lua_pushvalue(L, 2);
  lua_rawget(L, -2);
  return 1;
}

static int list_length(lua_State *L)
{
  const view *v = lua_touserdata(L, 1);
  lua_pushinteger(L, v->kind == VIEW_GROUPS ? policy_of(L)->n_groups : policy_of(L)->n_tensors);
  return 1;
}

int policy_named(const eng_policy *p, bool group, int index)
{
  lua_State *L = p->L;
  int n = group ? p->n_groups : p->n_tensors, found = -1;
  if (p->needs & ENG_NEED_TENSORS) {                         // lists of views by name exist
    lua_pushvalue(L, index);
    lua_rawgeti(L, LUA_REGISTRYINDEX, group ? KEEP_GROUPS : KEEP_TENSORS);
    lua_insert(L, -2);
    lua_rawget(L, -2);
    const view *v = lua_touserdata(L, -1);
    if (v) found = v->index;
    lua_pop(L, 2);
    return found;
  }
  const char *name = lua_tostring(L, index), *const *names =
    (const char *const *)(group ? p->groups : p->tensors);
  for (int i = 0; i < n && found < 0; ++i)
    if (strcmp(names[i], name) == 0) found = i;
  return found;
}

// ------------------------------------------------------------------ the histogram

static const int64_t *bins_in_view(eng_policy *p, const view *v)
{ return v->kind == VIEW_HIST ? record_in_view(p)->hist : stats_in_view(p, v)->hist; }

// hist:sum(from, to): the number of gradients with an exponent in [from, to].
static int hist_sum(lua_State *L)
{
  eng_policy *p = policy_of(L);
  const view *v = lua_touserdata(L, 1);
  if (!v || !(v->kind == VIEW_HIST || v->kind == VIEW_TENSOR_HIST || v->kind == VIEW_GROUP_HIST))
    return luaL_error(L, "hist:sum(from, to): call it with ':' on a histogram");
  double from = luaL_optnumber(L, 2, ENG_HIST_FIRST) - ENG_HIST_FIRST,
         to = luaL_optnumber(L, 3, ENG_HIST_FIRST + ENG_HIST_BINS - 1) - ENG_HIST_FIRST;
  const int64_t *bins = bins_in_view(p, v);
  double sum = 0;
  for (int b = 0; b < ENG_HIST_BINS; ++b)
    if (b >= from && b <= to) sum += (double)bins[b];
  lua_pushnumber(L, sum);
  return 1;
}

static int hist_index(lua_State *L)                          // upvalue: hist_sum
{
  eng_policy *p = policy_of(L);
  const view *v = lua_touserdata(L, 1);
  if (lua_type(L, 2) == LUA_TNUMBER) {
    double e = lua_tonumber(L, 2) - ENG_HIST_FIRST;
    if (e != floor(e))
      return luaL_error(L, "%s: expected an exponent that is a whole number, got %f",
                        view_names[v->kind], lua_tonumber(L, 2));
    const int64_t *bins = bins_in_view(p, v);
    lua_pushnumber(L, e >= 0 && e < ENG_HIST_BINS ? (double)bins[(int)e] : 0);
    return 1;
  }
  static const char *const names[] = {"first", "last", "sum"};
  const char *key = lua_type(L, 2) == LUA_TSTRING ? lua_tostring(L, 2) : "";
  if (strcmp(key, "first") == 0) lua_pushinteger(L, ENG_HIST_FIRST);
  else if (strcmp(key, "last") == 0) lua_pushinteger(L, ENG_HIST_FIRST + ENG_HIST_BINS - 1);
  else if (strcmp(key, "sum") == 0) lua_pushvalue(L, lua_upvalueindex(1));
  else return unknown_field(L, view_names[v->kind], names, COUNT(names));
  return 1;
}

// ------------------------------------------------------------------ signals

static policy_signal *find_signal(const eng_policy *p, const char *name)
{
  for (int i = 0; i < p->n_signals; ++i)
    if (strcmp(p->signals[i].name, name) == 0) return &p->signals[i];
  return NULL;
}

static int signals_index(lua_State *L)
{
  const policy_signal *signal = find_signal(policy_of(L), luaL_checkstring(L, 2));
  push_unless(L, !signal, signal ? signal->value : 0);
  return 1;
}

eng_status eng_policy_signal(eng_policy *p, const char *name, double value)
{
  policy_signal *known = find_signal(p, name);
  if (known) {
    known->value = value;
    return ENG_OK;
  }
  policy_signal *more = realloc(p->signals, (size_t)(p->n_signals + 1) * sizeof *more);
  char *copy = heap_text(&p->memory, name, (int64_t)strlen(name));
  if (more) p->signals = more;
  FAIL_IF(!more || !copy, ENG_ERR_MEMORY,
          "policy %s: out of memory for signal '%s'", p->name, name);
  p->signals[p->n_signals++] = (policy_signal){ copy, value };
  return ENG_OK;
}

// ------------------------------------------------------------------ all views

static int read_only(lua_State *L)
{
  const view *v = lua_touserdata(L, 1);
  return luaL_error(L, "%s is read-only; values that must last belong in 'state'",
                    view_names[v->kind]);
}

const char *policy_record_name(lua_State *L, int index)
{
  return lua_type(L, index) == LUA_TUSERDATA
           ? view_names[((const view *)lua_touserdata(L, index))->kind]
           : NULL;
}

// Pushes the next name and value of a record or of statistics. Skips fields that are nil or not
// computed. Upvalues: view, index.
static int fields_step(lua_State *L)
{
  eng_policy *p = policy_of(L);
  const view *v = lua_touserdata(L, lua_upvalueindex(1));
  const int in = v->kind == VIEW_RECORD ? IN_RECORD : IN_STATS;
  for (int i = (int)lua_tointeger(L, lua_upvalueindex(2)); i < RECORD_NAMES; ++i) {
    const field *f = &fields[i];
    if (f->in[in].kind == NONE || f->need & ~p->needs) continue;
    lua_pushinteger(L, i + 1);
    lua_replace(L, lua_upvalueindex(2));
    lua_pushstring(L, f->name);
    lua_pushvalue(L, -1);
    lua_gettable(L, lua_upvalueindex(1));
    if (!lua_isnil(L, -1)) return 2;
    lua_pop(L, 2);
  }
  return 0;
}

// Pushes the next name and view of a list, the next exponent and nonzero count of a histogram, or
// the next name and value of a signal.
static int items_step(lua_State *L)
{
  eng_policy *p = policy_of(L);
  const view *v = lua_touserdata(L, lua_upvalueindex(1));
  int i = (int)lua_tointeger(L, lua_upvalueindex(2));
  bool group = v->kind == VIEW_GROUPS;
  if (group || v->kind == VIEW_TENSORS) {
    if (i >= (group ? p->n_groups : p->n_tensors)) return 0;
    lua_pushstring(L, (group ? p->groups : p->tensors)[i]);
    lua_rawgeti(L, LUA_REGISTRYINDEX, group ? KEEP_GROUPS : KEEP_TENSORS);
    lua_rawgeti(L, -1, i + 1);
    lua_remove(L, -2);
  } else if (v->kind == VIEW_SIGNALS) {
    if (i >= p->n_signals) return 0;
    lua_pushstring(L, p->signals[i].name);
    lua_pushnumber(L, p->signals[i].value);
  } else {
    const int64_t *bins = bins_in_view(p, v);
    while (i < ENG_HIST_BINS && bins[i] == 0) ++i;
    if (i >= ENG_HIST_BINS) return 0;
    lua_pushinteger(L, i + ENG_HIST_FIRST);
    lua_pushnumber(L, (double)bins[i]);
  }
  lua_pushinteger(L, i + 1);
  lua_replace(L, lua_upvalueindex(2));
  return 2;
}

bool policy_record_pairs(lua_State *L, int index)
{
  if (lua_type(L, index) != LUA_TUSERDATA) return false;
  int kind = ((const view *)lua_touserdata(L, index))->kind;
  lua_pushvalue(L, index);
  lua_pushinteger(L, 0);
  lua_pushcclosure(
    L, kind == VIEW_RECORD || kind == VIEW_TENSOR || kind == VIEW_GROUP ? fields_step : items_step,
    2);
  lua_pushvalue(L, index);
  lua_pushnil(L);
  return true;
}

static int list_step(lua_State *L)
{
  lua_pushinteger(L, lua_tointeger(L, 2) + 1);
  lua_pushvalue(L, -1);
  lua_gettable(L, 1);
  if (lua_isnil(L, -1)) return 1;
  return 2;
}

bool policy_record_ipairs(lua_State *L, int index)
{
  if (lua_type(L, index) != LUA_TUSERDATA) return false;
  int kind = ((const view *)lua_touserdata(L, index))->kind;
  if (kind != VIEW_TENSORS && kind != VIEW_GROUPS)
    luaL_error(L, "ipairs: expected a list, got %s; hint: use pairs", view_names[kind]);
  lua_pushcfunction(L, list_step);
  lua_pushvalue(L, index);
  lua_pushinteger(L, 0);
  return true;
}

// Pops a value and pushes a view. `place` is the index of a tensor or group, or -1. The view's
// metatable has the functions `index`, whose upvalue is the popped value, and `length` (NULL:
// none).
static void push_view(lua_State *L, view_kind kind, int place, lua_CFunction index,
                      lua_CFunction length)
{
  lua_pushcclosure(L, index, 1);
  view *v = lua_newuserdata(L, sizeof *v);
  *v = (view){ (int32_t)kind, place };
  lua_createtable(L, 0, 3);
  lua_pushvalue(L, -3);
  lua_setfield(L, -2, "__index");
  lua_pushcfunction(L, read_only);
  lua_setfield(L, -2, "__newindex");
  if (length) {
    lua_pushcfunction(L, length);
    lua_setfield(L, -2, "__len");
  }
  lua_setmetatable(L, -2);
  lua_remove(L, -2);
}

static void push_hist(lua_State *L, view_kind kind, int place)
{
  lua_pushcfunction(L, hist_sum);
  push_view(L, kind, place, hist_index, NULL);
}

void policy_record_open(eng_policy *p)
{
  lua_State *L = p->L;
  for (int i = 0; i < RECORD_NAMES; ++i)
    for (int in = IN_RECORD; in <= IN_STATS; ++in)
      if (fields[i].in[in].kind != NONE)
        field_map_add(in == IN_RECORD ? &p->record_map : &p->stats_map,
                      policy_intern(L, fields[i].name), i);
  for (int place = KEEP_TENSORS; place <= KEEP_GROUPS; ++place) {
    lua_newtable(L);
    lua_rawseti(L, LUA_REGISTRYINDEX, place);
  }
  static const struct { view_kind kind; lua_CFunction index, length; } views[] = {
    {VIEW_TENSORS, list_index, list_length},
    {VIEW_GROUPS, list_index, list_length},
    {VIEW_SIGNALS, signals_index, NULL},
  };
  lua_newtable(L);
  push_hist(L, VIEW_HIST, -1);
  lua_rawseti(L, -2, VIEW_HIST);
  for (int i = 0; i < COUNT(views); ++i) {
    lua_pushnil(L);
    push_view(L, views[i].kind, -1, views[i].index, views[i].length);
    lua_rawseti(L, -2, (int)views[i].kind);
  }
  push_view(L, VIEW_RECORD, -1, record_index, NULL);
}

// ------------------------------------------------------------------ names

static char **copy_names(heap *memory, const char *const *names, int n)
{
  char **copy = HEAP_NEW(memory, char *, n);
  for (int i = 0; copy && i < n; ++i)
    copy[i] = heap_text(memory, names[i], (int64_t)strlen(names[i]));
  return copy;
}

// Pushes a view of the same kind as the view at stack index `model`, with the same metatable.
static void push_like(lua_State *L, int model, int place)
{
  const view *from = lua_touserdata(L, model);
  view *v = lua_newuserdata(L, sizeof *v);
  *v = (view){ from->kind, place };
  lua_getmetatable(L, model);
  lua_setmetatable(L, -2);
}

static void fill_list(eng_policy *p, view_kind kind, view_kind hist, const char *const *names,
                      int n, int place)
{
  lua_State *L = p->L;
  lua_createtable(L, n, n);
  int list = lua_gettop(L);
  lua_pushnil(L);
  push_view(L, kind, -1, stats_index, NULL);
  push_hist(L, hist, -1);
  for (int i = 0; i < n; ++i) {
    push_like(L, list + 1, i);
    if (p->needs & ENG_NEED_HIST) {
      lua_createtable(L, 1, 0);
      push_like(L, list + 2, i);
      lua_rawseti(L, -2, 1);
      lua_setfenv(L, -2);
    }
    lua_pushvalue(L, -1);
    lua_rawseti(L, list, i + 1);
    lua_setfield(L, list, names[i]);
  }
  lua_settop(L, list);
  lua_rawseti(L, LUA_REGISTRYINDEX, place);
}

struct naming { const char *const *tensors, *const *groups; int n, n_groups; };

static void name_task(eng_policy *p, void *argument)
{
  const struct naming *naming = argument;
  fill_list(p, VIEW_TENSOR, VIEW_TENSOR_HIST, naming->tensors, naming->n, KEEP_TENSORS);
  fill_list(p, VIEW_GROUP, VIEW_GROUP_HIST, naming->groups, naming->n_groups, KEEP_GROUPS);
}

eng_status eng_policy_tensors(eng_policy *p, const char *const *names, const int32_t *group_of,
                              int n, const char *const *groups, int n_groups, bool scalable)
{
  for (int i = 0; i < n; ++i)
    FAIL_IF(group_of && (group_of[i] < -1 || group_of[i] >= n_groups), ENG_ERR_VALUE,
            "policy %s: tensor '%s': expected a group index >= -1 and below %d, got %d", p->name,
            names[i], n_groups, group_of[i]);
  // A view takes a few hundred bytes, so views are made only for policies that read them.
  if (p->needs & ENG_NEED_TENSORS) {
    struct naming naming = { names, groups, n, n_groups };
    size_t before = p->used;
    ENG_TRY(policy_protected(p, name_task, &naming));
    lua_settop(p->L, SLOT_COUNT);
    if (p->used > before) p->limit += p->used - before;      // the limit does not count views
  }
  eng_policy made = *p;
  made.names = (heap){0};
  made.n_tensors = n;
  made.n_groups = n_groups;
  made.tensors = copy_names(&made.names, names, n);
  made.groups = copy_names(&made.names, groups, n_groups);
  HEAP_TAKE(&made.names, made.group_of, n);
  HEAP_TAKE(&made.names, made.group_stats, n_groups);
  HEAP_TAKE(&made.names, made.group_scale, n_groups);
  HEAP_TAKE(&made.names, made.group_next, n_groups);
  HEAP_TAKE(&made.names, made.each[0], (int64_t)n * ENG_EACH);
  HEAP_TAKE(&made.names, made.matched, n + n_groups);
  heap_free(made.names.failed ? &made.names : &p->names);
  FAIL_IF(made.names.failed, ENG_ERR_MEMORY,
          "policy %s: out of memory for the names of %d tensors", p->name, n);
  *p = made;
  for (int i = 0; i < n; ++i) p->group_of[i] = group_of ? group_of[i] : -1;
  for (int k = 1; k < ENG_EACH; k++) p->each[k] = p->each[0] + (size_t)n * (size_t)k;
  p->each_set = 0;
  p->scalable = scalable;
  return ENG_OK;
}
