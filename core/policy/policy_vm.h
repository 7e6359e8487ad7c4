// A policy's internals: its Lua state, and declarations shared by the files of this folder, which
// README.md lists. Only this folder and main/ include Lua's headers. Hosts use the section
// "policies" of engine_policy.h. Included by this folder.
#pragma once

#include "engine.h"
#include "base/heap.h"
#include "base/numerics.h"
#include "policy_data.h"

#include <lauxlib.h>
#include <lua.h>

// Fixed slots on the policy's Lua stack. A decision copies from them without a table lookup.
enum {
  SLOT_POLICY = 1,
  SLOT_DECIDE,
  SLOT_STATE,
  SLOT_OPTIONS,
  SLOT_RECORD,
  SLOT_TASK,
  SLOT_COUNT = SLOT_TASK
};

// Indices in Lua's registry.
enum { KEEP_TASK = 1, KEEP_TENSORS, KEEP_GROUPS, KEEP_FLAT_KEYS };

enum { FIELD_BUCKETS = 64, VERDICT_FIELDS = 18, FLAT_FIELDS = 24 };
#define ENG_FIELD(...) + 1
enum { RECORD_NAMES = 0
#include "record.def"
};

typedef struct policy_option {
  char *name, *value, *preset;
  int   type;                    // ENG_OPTION_*
} policy_option;

typedef struct policy_signal { char *name; double value; } policy_signal;
typedef struct policy_logged { char name[ENG_NAME_BYTES + 1]; double value; } policy_logged;

/// A hash table from a field's name to its index. Lua keeps one copy of each string, so the keys
/// are addresses of interned names, and no text is compared.
typedef struct field_map { const char *key[FIELD_BUCKETS]; int8_t field[FIELD_BUCKETS]; } field_map;

/// The offset of a field's value in the state's blob, for a state that is a flat table of numbers
/// and booleans. key: the address of the field's interned name.
typedef struct flat_field { const void *key; uint32_t offset; bool is_boolean; } flat_field;

struct eng_policy {
  lua_State *L;

  heap     memory;               // of texts, options and lists
  heap     names;                // of the lists of tensors and groups

  // Read from the file.
  char    *name, *doc, *file, *source;
  unsigned needs;
  policy_option *options;
  int      n_options;
  bool     has_init, has_migrate, fp8;

  // Bytes, as the allocator counts them. The limit applies while the policy's code runs.
  size_t   used, limit;
  size_t   largest;              // the largest allocation by the policy's code

  // The budget of the current call.
  bool     running;              // false: the host's code uses the Lua state, without limits
  const char *killed;            // why the current call must end, even inside pcall; else NULL
  int64_t  budget;               // instructions left
  int64_t  instructions;         // the budget at the start of the call
  int64_t  unclocked;            // instructions since the clock was last read
  double   seconds, deadline;    // deadline 0: the clock has not been read
  const char *stack;             // address of the C stack when the call began
  uint64_t random_key, random_count;

  // The record of the current decision.
  const eng_record *record;
  const eng_tensor_stats *stats;
  field_map record_map, stats_map;
  char   **tensors, **groups;
  int32_t *group_of;
  int      n_tensors, n_groups;
  bool     scalable;
  eng_tensor_stats *group_stats; // sums per group, computed on first use
  bool     groups_summed;
  policy_signal *signals;
  int      n_signals;

  // State and verdict.
  char     why[320];             // why a verdict or a state was refused (policy_refuse)
  bool     ready;                // init or restore has set a state
  data_blob good;                // the state after the last good call
  data_blob next;                // buffer for the state after the next call
  flat_field flat[FLAT_FIELDS];  // the layout of a flat state: its fields in the order of lua_next
  int      n_flat;               // 0: unknown, or not flat
  data_blob text;                // the result of save
  data_blob envelope;            // the blob that `text` was written from
  const char *verdict_key[VERDICT_FIELDS];
  eng_verdict last;              // the last good verdict
  // [n_groups] group_scale: the groups' scales in the last good verdict; group_next: the groups'
  // scales in the verdict that is being read. 0: the group has the verdict's `scale`
  double  *group_scale, *group_next;
  double  *each[ENG_EACH];       // [n_tensors] the last verdict's values per tensor
  uint32_t each_set;             // bit ENG_EACH_*: the last verdict set these values
  bool    *matched;              // [n_tensors + n_groups] which names the last pattern matched
  const eng_record *judged;      // the record of the decision whose verdict is being read
  const eng_tensor_stats *judged_stats;
  policy_logged *logit_muls;     // [ENG_POLICY_LOGIT_MULS], allocated at first use
  int      n_logit_muls;
  policy_logged *logs;           // [ENG_POLICY_LOGS], allocated at first use
  int      n_logs;               // number of values that the last decision logged
  char     printed[ENG_POLICY_PRINTS];
  size_t   printed_bytes;
  bool     printed_read;         // `printed` was read, so the next print overwrites it
  int64_t  failures;

  // The host's protected task, run by the function in SLOT_TASK.
  void   (*task)(struct eng_policy *policy, void *argument);
  void    *task_argument;
};

// ---- policy_run.c

/// Creates the Lua state with its limits and its stack slots. Returns false if memory runs out.
bool policy_open(eng_policy *policy);
/// Runs `task` in protected mode, without limits unless the task calls policy_enter. The task may
/// raise Lua errors. Leaves the task's last value, or nil, on the stack. Errors: POLICY with the
/// Lua message; MEMORY; the stack then has only the fixed slots.
eng_status policy_protected(eng_policy *policy, void (*task)(eng_policy *, void *), void *argument);
/// policy_enter puts the policy's limits in force for one call, and policy_leave lifts them. Call
/// policy_enter before the policy's own code runs (init, decide, migrate, the file itself), and
/// policy_leave afterwards. policy_continue does the same for a later part of a call: it renews
/// neither the budget nor the time.
void policy_enter(eng_policy *policy);
void policy_continue(eng_policy *policy);
void policy_leave(eng_policy *policy);
/// Subtracts `work` Lua instructions from the budget. Raises an error if the call must end: the
/// budget or the time is exhausted, or an interrupt has arrived.
void policy_charge(eng_policy *policy, int64_t work);
/// Raises an error if C calls and Lua calls nest too deeply.
void policy_check_stack(eng_policy *policy);
/// Returns the policy that a Lua state belongs to.
eng_policy *policy_of(lua_State *L);
/// Interns a name in the Lua state. The returned address is valid until the state is closed.
const char *policy_intern(lua_State *L, const char *name);
/// Calls the function that is on the stack below its `n` arguments, then policy_leave. Call
/// policy_enter or policy_continue before. Leaves one result. Errors: POLICY; the stack then has
/// only the fixed slots.
eng_status policy_call(eng_policy *policy, int n);
/// Returns the text of the error value on top of the stack, without running the policy's code.
const char *policy_error_text(eng_policy *policy);
/// Returns the number of the first source line with `word =` outside a comment of one line. For
/// "return", returns the number of the last line with that word. Returns 1 if there is no such
/// line.
int policy_line_of(const eng_policy *policy, const char *word);

// ---- policy_constant.c
/// Replaces the table on top of the stack by a constant: an empty table that reads from the
/// original and refuses writes. `what` names it in messages, in the plural.
void policy_make_constant(lua_State *L, const char *what);
/// Replaces a constant at `index` (absolute) by its original table; does not change other values.
void policy_open_constant(lua_State *L, int index);

// ---- pattern.c
/// Adds find, match, gmatch and gsub to the library on top of the stack.
void policy_patterns_open(lua_State *L);
/// Pops a Lua pattern from the stack. Sets policy->matched[i] to whether the pattern matches the
/// whole of name i. The names of the tensors come first, then the names of the groups. Errors:
/// POLICY; the stack then has only the fixed slots.
eng_status policy_match_names(eng_policy *policy);

// ---- policy_library.c
/// Pushes the policy's environment: the table of its globals. Its print() fills `printed`.
void policy_library_open(eng_policy *policy);

// ---- policy_checks.c
/// Adds back_off, grow and rescale to the environment on top of the stack and pushes the library
/// `check`.
void policy_checks_open(lua_State *L);

// ---- policy_verdict.c
/// Interns the names of a verdict's fields.
void policy_verdict_open(eng_policy *policy);
/// Describes field `index` of a verdict; index < VERDICT_FIELDS.
eng_policy_name policy_verdict_field(int index);
/// Reads the verdict on top of the stack: a table, or a number, which is the next scale. Returns
/// false, with the reason in policy->why, if the verdict is invalid.
bool policy_read_verdict(eng_policy *policy, eng_verdict *out);
/// Writes policy->why. Returns false.
__attribute__((format(printf, 2, 3)))
bool policy_refuse(eng_policy *policy, const char *format, ...);
static inline bool policy_is_scale(double x) { return f64_is_finite(x) && x > 0; }

// ---- policy_record.c
/// Describes the name with number `index` in record.def; index < RECORD_NAMES.
eng_policy_name policy_record_field(int index);
/// Creates the record's views and pushes `record`.
void policy_record_open(eng_policy *policy);
/// Returns the index (from 0) of the tensor or group whose name is on the stack at `index`, or -1.
int policy_named(const eng_policy *policy, bool group, int index);
/// Pushes iterator, view and nil for a view at `index`. Returns false if the value is not a view.
bool policy_record_pairs(lua_State *L, int index);
/// Pushes iterator, view and 0 for ipairs over record.tensors or record.groups at `index`. Raises
/// an error for any other view. Returns false if the value is not a view.
bool policy_record_ipairs(lua_State *L, int index);
/// Returns a name such as "record.hist" for a view at `index`, or NULL if the value is not a view.
const char *policy_record_name(lua_State *L, int index);

// ---- policy_state.c
/// Copies the state after a good call into `good`. If the state is not plain data, returns false
/// with the reason in policy->why and leaves `good` unchanged.
bool policy_snapshot(eng_policy *policy);
/// Restores the state as it was after the last good call.
eng_status policy_roll_back(eng_policy *policy);
