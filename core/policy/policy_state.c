// A policy's state as plain data. It is copied out after every decision, so that a failed decision
// can be undone and a state that cannot be saved is detected immediately. The state is also saved
// as text, restored, and handed to another policy. Called by policy_vm.c, and by Lua
// (engine_policy.h).
#include "policy_vm.h"

#include "base/error.h"
#include "base/numerics.h"
#include "base/scope.h"
#include "base/text.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  TEXT_VERSION = 1,
  // The most levels of tables in a state; policies/README.md promises this number. Copying a state
  // calls a C function for each level, so without a limit a long chain of tables would overflow the
  // C stack. A saved text nests one deeper, because save puts the state into a table.
  STATE_DEPTH = 30
};
_Static_assert(STATE_DEPTH + 1 == (int)DATA_DEPTH, "restore accepts what a state may be");

// ------------------------------------------------------------------ Lua tables to blobs

// The tables seen so far, in a hash table with open addressing; `room` is a power of two. `few` is
// the first hash table. A state must be a tree, because a copy would duplicate a shared table.
enum { FEW = 32 };
typedef struct visited { size_t n, room; const void **table, *few[FEW]; } visited;

static const void **place_of(const void **table, size_t room, const void *key)
{
  size_t at = ((uintptr_t)key >> 4) & (room - 1);
  while (table[at] && table[at] != key) at = (at + 1) & (room - 1);
  return &table[at];
}

// Returns whether a table is seen for the first time. Returns true if memory runs out.
static bool visit(visited *v, const void *table)
{
  if (v->n * 2 >= v->room) {
    size_t room = v->room * 4;
    const void **wider = calloc(room, sizeof *wider);
    if (!wider) return true;
    for (size_t i = 0; i < v->room; ++i)
      if (v->table[i]) *place_of(wider, room, v->table[i]) = v->table[i];
    if (v->table != v->few) free(v->table);
    v->table = wider;
    v->room = room;
  }
  const void **place = place_of(v->table, v->room, table);
  if (*place) return false;
  *place = table;
  ++v->n;
  return true;
}

typedef struct walk {
  eng_policy *policy;
  data_blob  *out;
  int         root, base;     // stack indices. root: the outermost table; base: the slot below the
                              // first key
  const char *refusal;
  visited     seen;
} walk;

static void room_task(eng_policy *p, void *argument)
{
  (void)argument;
  luaL_checkstack(p->L, 4 * DATA_DEPTH, "state");
}

// Writes the number, string or boolean at `index`. Returns false for a value of another type.
static bool put_scalar(data_blob *out, lua_State *L, int index)
{
  size_t length;
  const char *text;
  switch (lua_type(L, index)) {
    case LUA_TSTRING:
      text = lua_tolstring(L, index, &length);
      data_string(out, text, length);
      return true;
    case LUA_TNUMBER:  data_number(out, lua_tonumber(L, index)); return true;
    case LUA_TBOOLEAN: data_tag(out, lua_toboolean(L, index) ? 't' : 'f'); return true;
    default: return false;
  }
}

static bool refuse(walk *w, const char *why)
{
  w->refusal = why;
  return false;
}

// Writes the table at stack index `table`. The keys and values of all levels are on the stack above
// w->base. If the table is refused, they stay there, so that refuse_path can read the path.
static bool encode(walk *w, int table, int depth)
{
  lua_State *L = w->policy->L;
  if (depth == 4) {  // Lua's minimal stack suffices up to this depth
    if (policy_protected(w->policy, room_task, NULL) != ENG_OK) return refuse(w, "out of memory");
    lua_settop(L, table);
  }
  data_tag(w->out, '{');
  for (lua_pushnil(L); lua_next(L, table); lua_pop(L, 1)) {
    if (!put_scalar(w->out, L, -2))
      return refuse(w, "the key is not a number, string or boolean");
    if (put_scalar(w->out, L, -1)) continue;
    if (lua_type(L, -1) == LUA_TUSERDATA)
      return refuse(w, "parts of the record cannot be stored; copy the numbers");
    if (lua_type(L, -1) != LUA_TTABLE) return refuse(w, luaL_typename(L, -1));
    _Static_assert(STATE_DEPTH == 30, "the message says 30");
    if (depth == STATE_DEPTH)
      return refuse(w, "tables nest more than 30 deep, the limit of a state");
    if (w->seen.n == 0) visit(&w->seen, lua_topointer(L, w->root));
    if (!visit(&w->seen, lua_topointer(L, -1)))
      return refuse(w, "the same table is in two places; store a copy in one of them");
    if (!encode(w, w->base + 2 * depth, depth + 1)) return false;
  }
  data_tag(w->out, '}');
  return true;
}

// Refuses the state. The message has the path of the offending field, such as state.groups.a[3].
// The path consists of the keys on the stack, from index `base` on.
static void refuse_path(eng_policy *p, int base, const char *why)
{
  lua_State *L = p->L;
  char path[160] = "state", number[32];
  size_t used = strlen(path), size = sizeof path;
  for (int i = base; i < lua_gettop(L) && used < size; i += 2) {
    if (lua_type(L, i) == LUA_TSTRING)
      used += (size_t)snprintf(path + used, size - used, ".%.60s", lua_tostring(L, i));
    else if (lua_type(L, i) == LUA_TNUMBER) {
      eng_number_text(number, lua_tonumber(L, i));
      used += (size_t)snprintf(path + used, size - used, "[%s]", number);
    } else used += (size_t)snprintf(path + used, size - used, "[%s]", luaL_typename(L, i));
  }
  bool is_type = *why && strchr(why, ' ') == NULL;
  policy_refuse(p, is_type ? "%s is a %s; only numbers, strings, booleans and tables can be saved"
                           : "%s: %s", path, why);
}

// Copies the state at `index` into `next`. Returns false, with the reason and the path of the
// offending field in p->why, if the state is not a tree of plain data or nests deeper than
// STATE_DEPTH.
static bool copy_state(eng_policy *p, int index)
{
  walk w = {.policy = p, .out = &p->next, .root = index, .base = lua_gettop(p->L), .refusal = "",
            .seen.room = FEW};
  w.seen.table = w.seen.few;
  data_clear(&p->next);
  p->n_flat = 0;
  bool fine = encode(&w, index, 1);
  if (!fine) refuse_path(p, w.base + 1, w.refusal);
  else if (p->next.failed) fine = policy_refuse(p, "out of memory");
  if (!fine) lua_settop(p->L, w.base);
  if (w.seen.table != w.seen.few) free(w.seen.table);
  return fine;
}

// ------------------------------------------------------------------ the copy after every decision

static void swap_blobs(eng_policy *p)
{
  data_blob swap = p->good;
  p->good = p->next;
  p->next = swap;
}

// Writes the addresses of the state's keys to `flat`, and references the keys in Lua's registry. So
// the keys stay alive, and an address always identifies the same string.
static void keep_keys_task(eng_policy *p, void *argument)
{
  (void)argument;
  lua_State *L = p->L;
  lua_createtable(L, FLAT_FIELDS, 0);
  int n = 0;
  for (const char *at = p->good.bytes + 1; *at != '}'; at = data_skip(at)) {
    data_item key;
    at = data_read(&key, at);
    lua_pushlstring(L, key.string, key.length);
    p->flat[n++].key = lua_topointer(L, -1);
    lua_rawseti(L, -2, n);
  }
  lua_rawseti(L, LUA_REGISTRYINDEX, KEEP_FLAT_KEYS);
}

// Records the layout of `good` in `flat`, if the state is a flat table of at most FLAT_FIELDS
// numbers and booleans whose keys are strings. Copies the bytes of `good` to `next`, so later
// snapshots write only values.
static void learn_layout(eng_policy *p)
{
  int n = 0;
  const char *at = p->good.bytes + 1;
  while (*at != '}') {
    data_item item;
    at = data_read(&item, at);
    if (n == FLAT_FIELDS || item.tag != 's' || !strchr("ntf", *at)) return;
    p->flat[n].is_boolean = *at != 'n';
    p->flat[n++].offset = (uint32_t)(at - p->good.bytes) + (*at == 'n');
    at = data_skip(at);
  }
  if (policy_protected(p, keep_keys_task, NULL) != ENG_OK) return;
  lua_settop(p->L, SLOT_COUNT);
  data_clear(&p->next);
  data_append(&p->next, p->good.bytes, p->good.size);
  if (!p->next.failed) p->n_flat = n;
}

// Writes the values of a flat state to `next`. Returns false if the state's fields, their order or
// their types changed.
static bool snapshot_flat(eng_policy *p)
{
  lua_State *L = p->L;
  char *bytes = p->next.bytes;
  int i = 0;
  lua_pushnil(L);
  for (; lua_next(L, SLOT_STATE); ++i) {
    if (i == p->n_flat || lua_topointer(L, -2) != p->flat[i].key) return false;
    int type = lua_type(L, -1);
    if (type == LUA_TNUMBER && !p->flat[i].is_boolean) {
      double x = lua_tonumber(L, -1);
      memcpy(bytes + p->flat[i].offset, &x, sizeof x);
    } else if (type == LUA_TBOOLEAN && p->flat[i].is_boolean) {
      bytes[p->flat[i].offset] = lua_toboolean(L, -1) ? 't' : 'f';
    } else return false;
    lua_settop(L, -2);
  }
  return i == p->n_flat;
}

bool policy_snapshot(eng_policy *p)
{
  if (p->n_flat > 0 && snapshot_flat(p)) {
    swap_blobs(p);
    return true;
  }
  lua_settop(p->L, SLOT_COUNT);
  if (!copy_state(p, SLOT_STATE)) return false;
  swap_blobs(p);
  learn_layout(p);
  return true;
}

// ------------------------------------------------------------------ blobs to Lua tables

static const char *decode(lua_State *L, const char *at);

// Sets the fields at `at`, up to the table's '}', in the table on top of the stack. Returns the
// position after the '}'.
static const char *put_fields(lua_State *L, const char *at)
{
  while (*at != '}') {
    at = decode(L, at);
    at = decode(L, at);
    lua_rawset(L, -3);
  }
  return at + 1;
}

static const char *decode(lua_State *L, const char *at)
{
  data_item item;
  at = data_read(&item, at);
  switch (item.tag) {
    case 'n': lua_pushnumber(L, item.number); break;
    case 's': lua_pushlstring(L, item.string, item.length); break;
    case 't': lua_pushboolean(L, 1); break;
    case 'f': lua_pushboolean(L, 0); break;
    default:
      luaL_checkstack(L, 8, "state");
      lua_newtable(L);
      at = put_fields(L, at);
  }
  return at;
}

static void state_task(eng_policy *p, void *at)
{
  // The garbage of a failed call is collected first, because it may occupy all the memory.
  if (p->used > p->limit / 2) lua_gc(p->L, LUA_GCCOLLECT, 0);
  decode(p->L, at);
}

static eng_status set_state(eng_policy *p, const data_blob *blob)
{
  p->n_flat = 0;
  lua_pushnil(p->L);
  lua_replace(p->L, SLOT_STATE);
  ENG_TRY(policy_protected(p, state_task, blob->bytes));
  lua_replace(p->L, SLOT_STATE);
  return ENG_OK;
}

eng_status policy_roll_back(eng_policy *p) { return set_state(p, &p->good); }

// ------------------------------------------------------------------ init

// Reads the number under `key` in the table at `at`. Returns false if there is none.
static bool find_number(double *out, const char *at, const char *key)
{
  data_item item;
  const char *value = data_find(at, key);
  if (!value) return false;
  data_read(&item, value);
  if (item.tag == 'n') *out = item.number;
  return item.tag == 'n';
}

static double option_number(const eng_policy *p, const char *name)
{
  double number;
  for (int i = 0; i < p->n_options; ++i)
    if (strcmp(p->options[i].name, name) == 0 && p->options[i].type == ENG_OPTION_NUMBER &&
        number_read(&number, p->options[i].value, strlen(p->options[i].value)))
      return number;
  return 0;
}

static void put_scale(lua_State *L, double scale)         // into the state on top of the stack
{
  lua_pushnumber(L, scale);
  lua_setfield(L, -2, "scale");
}

// Leaves { scale = options.init_scale } on the stack, or {} if there is no such option.
static void default_state_task(eng_policy *p, void *argument)
{
  (void)argument;
  double scale = option_number(p, "init_scale");
  lua_newtable(p->L);
  if (scale != 0) put_scale(p->L, scale);
}

// Calls init or migrate, which is on the stack below its `n` arguments. Leaves the returned state
// on the stack.
static eng_status call_maker(eng_policy *p, const char *maker, int n)
{
  policy_enter(p);
  ENG_TRY(policy_call(p, n));
  if (lua_istable(p->L, -1)) return ENG_OK;
  error_set(ENG_ERR_POLICY, "%s:%d: %s must return the state as a table, got %s", p->file,
            policy_line_of(p, maker), maker, luaL_typename(p->L, -1));
  lua_settop(p->L, SLOT_COUNT);
  return ENG_ERR_POLICY;
}

// Makes the initial state, by calling init if the policy has one. Leaves the state on top of the
// stack.
static eng_status fresh_state(eng_policy *p)
{
  p->random_key = ~0ull;
  p->random_count = 0;
  if (!p->has_init) return policy_protected(p, default_state_task, NULL);
  lua_getfield(p->L, SLOT_POLICY, "init");
  lua_pushvalue(p->L, SLOT_OPTIONS);
  return call_maker(p, "init", 1);
}

// Copies the state on top of the stack into `next`.
static eng_status copy_out(eng_policy *p, const char *maker)
{
  if (copy_state(p, lua_gettop(p->L))) return ENG_OK;
  lua_settop(p->L, SLOT_COUNT);
  return error_set(ENG_ERR_POLICY, "%s:%d: %s made a state that is not plain data: %s", p->file,
                   policy_line_of(p, maker), maker, p->why);
}

// Replaces the policy's current state by the state on top of the stack, whose copy is in `next`.
static void take_state(eng_policy *p)
{
  swap_blobs(p);
  lua_replace(p->L, SLOT_STATE);
  lua_settop(p->L, SLOT_COUNT);
}

// Adopts the state on top of the stack: copies it, checks its scale, makes it current and resets
// the last verdict. Uses `scale` if the state has no scale.
static eng_status adopt(eng_policy *p, const char *maker, double scale)
{
  ENG_TRY(copy_out(p, maker));
  find_number(&scale, p->next.bytes, "scale");
  if (!policy_is_scale(scale)) {
    char number[32];
    bool option = !p->has_init && strcmp(maker, "init") == 0;
    eng_number_text(number, scale);
    lua_settop(p->L, SLOT_COUNT);
    return error_set(ENG_ERR_POLICY,
                     "%s:%d: expected a positive finite initial %s, got %s; hint: set state.scale "
                     "in %s%s%s",
                     p->file, policy_line_of(p, option ? "options" : maker),
                     p->fp8 ? "scale" : "loss scale", number, maker,
                     option ? ", or the option init_scale" : "",
                     p->fp8 ? " (1 if the policy uses no scale)" : "");
  }
  take_state(p);
  p->last = (eng_verdict){ .scale = scale, .lr_mul = 1 };
  if (p->n_groups) memset(p->group_scale, 0, (size_t)p->n_groups * sizeof *p->group_scale);
  p->ready = true;
  return ENG_OK;
}

// Copies the old policy's last verdict (clip, factor on the learning rate and, if groups can be
// scaled, the scales of groups that both policies have), if both policies have the same name or the
// new policy is for FP8 layers. So FP8 layers keep their scales and formats until the new policy's
// first decision.
static void keep_verdict(eng_policy *p, const eng_policy *old)
{
  if (!p->fp8 && strcmp(p->name, old->name) != 0) return;
  p->last.clip = old->last.clip;
  p->last.lr_mul = old->last.lr_mul;
  for (int i = 0; i < p->n_groups && p->scalable; ++i)
    for (int k = 0; k < old->n_groups; ++k)
      if (strcmp(p->groups[i], old->groups[k]) == 0) p->group_scale[i] = old->group_scale[k];
}

eng_status eng_policy_init(eng_policy *p)
{
  lua_settop(p->L, SLOT_COUNT);
  ENG_TRY(fresh_state(p));
  ENG_TRY(adopt(p, "init", option_number(p, "init_scale")));
  p->failures = 0;
  return ENG_OK;
}

static void scale_task(eng_policy *p, void *scale)
{
  decode(p->L, p->good.bytes);
  put_scale(p->L, *(double *)scale);
}

eng_status eng_policy_set_scale(eng_policy *p, double scale)
{
  FAIL_IF(!p->ready, ENG_ERR_STATE,
          "policy %s: cannot set a scale before init or restore", p->name);
  FAIL_IF(!policy_is_scale(scale), ENG_ERR_VALUE,
          "policy %s: a loss scale must be a positive finite number, got %g", p->name, scale);
  double present;
  if (find_number(&present, p->good.bytes, "scale")) {
    ENG_TRY(policy_protected(p, scale_task, &scale));
    if (!copy_state(p, lua_gettop(p->L))) {
      lua_settop(p->L, SLOT_COUNT);
      return error_set(ENG_ERR_MEMORY, "policy %s: %s", p->name, p->why);
    }
    take_state(p);
  }
  p->last.scale = scale;
  return ENG_OK;
}

// ------------------------------------------------------------------ save and restore

static void put_text(data_blob *b, const char *text) { data_string(b, text, strlen(text)); }

static void put_number(data_blob *b, const char *name, double number)
{
  put_text(b, name);
  data_number(b, number);
}

eng_status eng_policy_save(const char **text, int64_t *bytes, eng_policy *p)
{
  FAIL_IF(!p->ready, ENG_ERR_STATE,
          "policy %s: there is no state to save before init or restore", p->name);
  data_blob *b = &p->envelope;
  data_clear(b);
  data_tag(b, '{');
  put_number(b, "clip", p->last.clip);
  put_number(b, "failures", (double)p->failures);
  put_number(b, "lr_mul", p->last.lr_mul);
  put_text(b, "policy");
  put_text(b, p->name);
  put_number(b, "scale", p->last.scale);
  put_text(b, "scales");
  data_tag(b, '{');
  for (int i = 0; i < p->n_groups; ++i)
    if (p->group_scale[i] != 0) put_number(b, p->groups[i], p->group_scale[i]);
  data_tag(b, '}');
  put_text(b, "state");
  data_append(b, p->good.bytes, p->good.size);
  put_number(b, "version", TEXT_VERSION);
  data_tag(b, '}');
  p->text.size = 0;
  p->text.failed = b->failed;
  if (!b->failed) data_text(&p->text, b->bytes);
  data_tag(&p->text, '\0');
  FAIL_IF(p->text.failed, ENG_ERR_MEMORY, "policy %s: out of memory for its saved state", p->name);
  *text = p->text.bytes;
  *bytes = (int64_t)p->text.size - 1;
  return ENG_OK;
}

static eng_status take_back(eng_policy *p, const char *at)
{
  data_item item;
  double version, scale, clip, lr_mul, failures;
  const char *policy = data_find(at, "policy"), *state = data_find(at, "state"),
             *scales = data_find(at, "scales");
  FAIL_IF(!find_number(&version, at, "version"), ENG_ERR_FORMAT,
          "policy %s: the saved state is damaged: it has no 'version'", p->name);
  FAIL_IF(version != TEXT_VERSION, ENG_ERR_FORMAT,
          "policy %s: expected a saved state of version %d, got version %g", p->name, TEXT_VERSION,
          version);
  if (!policy || !state || *state != '{' || !scales || *scales != '{' ||
      !find_number(&scale, at, "scale") || !policy_is_scale(scale) ||
      !find_number(&clip, at, "clip") || !(clip >= 0) || !f64_is_finite(clip) ||
      !find_number(&lr_mul, at, "lr_mul") || !(lr_mul >= 0) || !f64_is_finite(lr_mul) ||
      !find_number(&failures, at, "failures") || !(failures >= 0 && failures <= 0x1p53) ||
      failures != floor(failures))
    return error_set(ENG_ERR_FORMAT, "policy %s: the saved state is damaged: policy, state, scale, "
                     "scales, clip, lr_mul or failures is missing or not valid", p->name);
  data_read(&item, policy);
  FAIL_IF(item.tag != 's' || item.length != strlen(p->name) ||
          memcmp(item.string, p->name, item.length) != 0, ENG_ERR_POLICY,
          "policy %s: this state was saved by policy '%.*s'; hint: restore it in a policy of that "
          "name, and pass that policy to take_over()",
          p->name, item.tag == 's' ? (int)item.length : 0, item.tag == 's' ? item.string : "");

  data_clear(&p->next);
  p->n_flat = 0;
  data_append(&p->next, state, (size_t)(data_skip(state) - state));
  FAIL_IF(p->next.failed, ENG_ERR_MEMORY, "policy %s: out of memory for its state", p->name);
  ENG_TRY(policy_protected(p, state_task, p->next.bytes));
  lua_replace(p->L, SLOT_STATE);
  swap_blobs(p);
  p->last = (eng_verdict){ .scale = scale, .clip = clip, .lr_mul = lr_mul };
  p->failures = (int64_t)failures;
  for (int i = 0; i < p->n_groups; ++i) {
    p->group_scale[i] = 0;
    double own;
    if (find_number(&own, scales, p->groups[i]) && policy_is_scale(own)) p->group_scale[i] = own;
  }
  p->ready = true;
  return ENG_OK;
}

eng_status eng_policy_restore(eng_policy *p, const char *text, int64_t bytes)
{
  char why[128];
  AT_END(data_free) data_blob blob = {0};
  lua_settop(p->L, SLOT_COUNT);
  FAIL_IF(!data_parse(&blob, text, (size_t)bytes, why, sizeof why), ENG_ERR_FORMAT,
          "policy %s: the saved state is damaged: %s", p->name, why);
  return take_back(p, blob.bytes);
}

// ------------------------------------------------------------------ handing over

static void arguments_task(eng_policy *p, void *old)        // returns { old state, old name }
{
  lua_createtable(p->L, 2, 0);
  decode(p->L, ((const eng_policy *)old)->good.bytes);
  lua_rawseti(p->L, -2, 1);
  lua_pushstring(p->L, ((const eng_policy *)old)->name);
  lua_rawseti(p->L, -2, 2);
}

// Reads the fresh state from `next`, copies values of the old policy into it, and returns it.
// Copies all fields of the old state if both policies have the same name. Otherwise copies only the
// scale, if the fresh state has one.
static void merge_task(eng_policy *p, void *argument)
{
  const eng_policy *old = argument;
  double scale;
  decode(p->L, p->next.bytes);
  if (strcmp(p->name, old->name) == 0) put_fields(p->L, old->good.bytes + 1);
  else if (find_number(&scale, p->next.bytes, "scale")) put_scale(p->L, old->last.scale);
}

eng_status eng_policy_migrate(eng_policy *p, const eng_policy *old)
{
  lua_State *L = p->L;
  FAIL_IF(!old->ready, ENG_ERR_STATE,
          "policy %s: cannot take over from %s, which has no state yet", p->name, old->name);
  lua_settop(L, SLOT_COUNT);
  if (p->has_migrate) {
    ENG_TRY(policy_protected(p, arguments_task, (void *)old));
    lua_getfield(L, SLOT_POLICY, "migrate");
    lua_rawgeti(L, SLOT_COUNT + 1, 1);
    lua_rawgeti(L, SLOT_COUNT + 1, 2);
    lua_pushvalue(L, SLOT_OPTIONS);
    ENG_TRY(call_maker(p, "migrate", 3));
  } else {
    ENG_TRY(fresh_state(p));
    ENG_TRY(copy_out(p, "init"));
    lua_settop(L, SLOT_COUNT);
    ENG_TRY(policy_protected(p, merge_task, (void *)old));
  }
  ENG_TRY(adopt(p, p->has_migrate ? "migrate" : "init", old->last.scale));
  keep_verdict(p, old);
  return ENG_OK;
}
