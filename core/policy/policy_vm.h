// Inside of a policy: its Lua state and what the files that make it work share.
//   policy_vm.c      the state itself: memory, budget, loading, deciding
//   policy_box.c     the library a policy sees
//   policy_checks.c  checks of options, and how a scale moves, beside that library
//   policy_record.c  the record it reads
//   policy_verdict.c what it answers
//   policy_state.c   its state: roll back, save, restore, hand over
// Lua is reached through this header and main.c alone. Hosts use engine.h, section "policies".
#ifndef ENG_POLICY_VM_H
#define ENG_POLICY_VM_H

#include "engine.h"
#include "base/numerics.h"
#include "policy_data.h"

#include <lauxlib.h>
#include <lua.h>

// Fixed places on the policy's Lua stack, so that a decision pushes copies and looks nothing up.
enum { SLOT_POLICY = 1, SLOT_DECIDE, SLOT_STATE, SLOT_OPTIONS, SLOT_RECORD, SLOT_TASK, SLOT_COUNT = SLOT_TASK };

enum { FIELD_BUCKETS = 64, VERDICT_FIELDS = 6, FLAT_FIELDS = 24 };

typedef struct policy_option {
  char *name, *value, *preset;
  int   type;                    // ENG_OPTION_*
} policy_option;

typedef struct policy_signal { char *name; double value; } policy_signal;

/// Interned names by address: Lua keeps one copy of each string, so a field is found without comparing text.
typedef struct field_map { const char *key[FIELD_BUCKETS]; int8_t field[FIELD_BUCKETS]; } field_map;

/// Where in the state's blob the value of a field stands, when the state is a flat table of numbers and booleans.
typedef struct flat_field { const void *key; uint32_t offset; bool is_boolean; } flat_field;

struct eng_policy {
  lua_State *L;

  // What the file says.
  char    *name, *doc, *file, *source;
  unsigned needs;
  policy_option *options;
  int      n_options;
  bool     has_init, has_migrate, fp8;

  // Memory in bytes, as the allocator counts it. The limits hold while the policy's code runs.
  size_t   used, limit;

  // The budget of the call under way.
  bool     running;              // the policy's code runs; false: the host works in its state
  const char *killed;            // NULL, or why this call is being ended, pcall or not
  int64_t  budget, instructions; // left, and at the start
  int64_t  unclocked;            // work since the clock was looked at
  double   seconds, deadline;    // deadline 0: the clock was not read yet
  const char *stack;             // the C stack when the call began
  uint64_t random_key, random_count;

  // The record in view.
  const eng_record *record;
  const eng_tensor_stats *stats;
  field_map record_map, stats_map;
  char   **tensors, **groups;
  int32_t *group_of;
  int      n_tensors, n_groups;
  bool     scalable;
  eng_tensor_stats *group_stats; // sums per group, made when first asked for
  bool     groups_summed;
  policy_signal *signals;
  int      n_signals;

  // State and verdict.
  bool     ready;                // init or restore made a state
  data_blob good, next;          // the state after the last good call, and room for the next
  flat_field flat[FLAT_FIELDS];  // their common layout, in the order Lua walks the table
  int      n_flat;               // 0: not known, or not flat
  data_blob text, envelope;      // what save gave out, and what it is made from
  const char *verdict_key[VERDICT_FIELDS];
  eng_verdict last;              // the last good one
  double  *group_scale, *group_next;     // [n_groups]; 0: that of the verdict
  int64_t  failures;

  // The host's protected work, run by SLOT_TASK.
  void   (*task)(struct eng_policy *policy, void *argument);
  void    *task_argument;
};

// ---- policy_vm.c

/// Runs `task` in protected mode, free of limits: it may raise Lua errors and leave one result on the
/// stack. ENG_ERR_POLICY with the Lua message; MEMORY when there is none.
eng_status policy_protected(eng_policy *policy, void (*task)(eng_policy *, void *), void *argument);
/// The same with the state at stack index 1 of the task.
eng_status policy_protected_on_state(eng_policy *policy, void (*task)(eng_policy *, void *), void *argument);
/// Before and after the policy's own code runs (init, decide, migrate, the file itself).
void policy_enter(eng_policy *policy);
void policy_leave(eng_policy *policy);
/// Takes `work` Lua instructions' worth from the budget; raises when it is spent.
void policy_charge(eng_policy *policy, int64_t work);
/// Raises when C calls and Lua calls nest too deeply.
void policy_check_stack(eng_policy *policy);
/// Ends the policy's call with an error that it cannot catch. Does not return.
void policy_kill(eng_policy *policy, const char *why);
/// The policy a Lua state belongs to.
eng_policy *policy_of(lua_State *L);
/// Calls the policy's function that stands below its `n` arguments, under its limits, and leaves one
/// result. On an error (POLICY) the stack is as it was at rest.
eng_status policy_call(eng_policy *policy, int n);
/// The text of the error value on top of the stack, without running anything.
const char *policy_error_text(eng_policy *policy);

// ---- policy_box.c
/// Pushes the table that is the policy's environment.
void policy_box_open(eng_policy *policy);
/// Puts an empty table in place of the one on top of the stack, through which that one can be read and not written; `what` it is, in the plural.
void policy_make_constant(lua_State *L, const char *what);
/// Puts the table behind such an empty one at `index` in its place; any other value stays. index: from the bottom.
void policy_open_constant(lua_State *L, int index);

// ---- policy_checks.c
/// Adds back_off and grow to the environment on top of the stack and pushes the library check.
void policy_checks_open(lua_State *L);

// ---- policy_verdict.c
extern const char *const policy_verdict_fields[VERDICT_FIELDS];
/// Reads the table on top of the stack. False with the reason in `why`.
bool policy_read_verdict(eng_policy *policy, eng_verdict *out, char *why, size_t size);
/// Copies a text that goes to terminals and pages: at most size - 1 bytes, never half of a UTF-8 character. What is no character of a text
/// becomes a question mark, a line's end a space.
void policy_copy_reason(char *out, size_t size, const char *text, size_t length);
static inline bool policy_is_scale(double x) { return f64_is_finite(x) && x > 0; }

// ---- policy_record.c
/// Makes the record's views and pushes `record`.
void policy_record_open(eng_policy *policy);
void policy_record_free(eng_policy *policy);
/// Pushes iterator, view, nil for a view at `index`; false when it is none.
bool policy_record_pairs(lua_State *L, int index);
/// "record.hist" for a view at `index`, NULL when it is none.
const char *policy_record_name(lua_State *L, int index);
void field_map_add(field_map *map, const char *key, int field);
static inline int field_map_find(const field_map *map, const char *key)
{
  for (unsigned i = (unsigned)((uintptr_t)key >> 3) % FIELD_BUCKETS;; i = (i + 1) % FIELD_BUCKETS) {
    if (map->key[i] == key) return map->field[i];
    if (!map->key[i]) return -1;
  }
}

// ---- policy_state.c
/// Copies the table at `index` into `out`. False with the offending field's path in `error`: a
/// function, a table in two places, nesting past DATA_DEPTH.
bool policy_encode(eng_policy *policy, int index, const char *root, data_blob *out, char *error, size_t error_size);
/// Copies the state after a good call into `good`. False, with `good` as it was, when it is no plain data.
bool policy_snapshot(eng_policy *policy, char *error, size_t error_size);
/// Pushes the value that a blob holds. Raises on lack of memory: call it under policy_protected.
void policy_decode(eng_policy *policy, const char *at);
/// The state as it was after the last good call.
eng_status policy_roll_back(eng_policy *policy);

#endif
