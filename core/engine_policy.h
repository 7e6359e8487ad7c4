// Part of engine.h; only engine.h includes this file. What policies read and decide: statistics of
// gradients, records, verdicts, and the policies themselves.

// ------------------------------------------------------------------ statistics, records, verdicts

/// Values of attention's attribute `entropy`: which number attention returns for each row in
/// addition to lse.
enum { ENG_ROW_ENTROPY = 1, ENG_ROW_LOGIT_MAX = 2 };

/// What a policy's `needs` can contain: statistics of a step, signals of modules, and fields of a
/// verdict. Inf and nan are always counted. The order of the bits has no meaning. Each bit except
/// TENSORS and NORM_REF is in one of the masks at the end.
enum {
  ENG_NEED_AMAX = 1 << 0,
  ENG_NEED_NORM = 1 << 1,
  ENG_NEED_ZEROS = 1 << 2,
  ENG_NEED_UNDERFLOW = 1 << 3,
  ENG_NEED_HIST = 1 << 4,
  ENG_NEED_TENSORS = 1 << 5,      // the record also has the statistics per tensor and per group
  ENG_NEED_NORM_REF = 1 << 6,     // the trainer runs a backward pass in f32 now and then
  ENG_NEED_UPDATE_NORM = 1 << 7,
  ENG_NEED_WEIGHT_NORM = 1 << 8,
  ENG_NEED_M_NORM = 1 << 9,
  ENG_NEED_V_NORM = 1 << 10,
  ENG_NEED_LOGIT_MAX = 1 << 11,   // attention publishes its largest logits as signals
  ENG_NEED_CLIPS = 1 << 12,
  ENG_NEED_LR_MULS = 1 << 13,
  ENG_NEED_RESET_MOMENTS = 1 << 14,
  ENG_NEED_UPDATE_CLIP = 1 << 15,
  ENG_NEED_SPIKE_CLIP = 1 << 16,
  ENG_NEED_LOGIT_MULS = 1 << 17,
  ENG_NEED_CAPS = 1 << 18,
  ENG_NEED_GRAD_NORMS = 1 << 19,
  ENG_NEED_BIAS_STEP = 1 << 20,
  ENG_NEED_ACTIVATIONS = 1 << 21, // watched modules publish amax and kurtosis as signals

  // One pass over the gradients computes these.
  ENG_NEED_GRADIENTS = ENG_NEED_AMAX | ENG_NEED_NORM | ENG_NEED_ZEROS | ENG_NEED_UNDERFLOW |
                       ENG_NEED_HIST,
  // The optimizer's update computes these together (eng_update.norms).
  ENG_NEED_UPDATE_NORMS = ENG_NEED_UPDATE_NORM | ENG_NEED_WEIGHT_NORM | ENG_NEED_M_NORM |
                          ENG_NEED_V_NORM,
  // Modules publish these as signals.
  ENG_NEED_SIGNALS = ENG_NEED_LOGIT_MAX | ENG_NEED_ACTIVATIONS,
  // The verdict may use these fields; a run that does not support them refuses the policy.
  ENG_NEED_VERDICT = ENG_NEED_CLIPS | ENG_NEED_LR_MULS | ENG_NEED_RESET_MOMENTS |
                     ENG_NEED_UPDATE_CLIP | ENG_NEED_SPIKE_CLIP | ENG_NEED_LOGIT_MULS |
                     ENG_NEED_CAPS | ENG_NEED_GRAD_NORMS | ENG_NEED_BIAS_STEP
};

/// Norms that an optimizer's update computes. UPDATE: the norm of the change of the weights, before
/// update_clip. WEIGHT: of the f32 weights after the update. M and V: of moments 1 and 2 after the
/// update.
enum { ENG_NORM_UPDATE = 0, ENG_NORM_WEIGHT = 1, ENG_NORM_M = 2, ENG_NORM_V = 3, ENG_NORMS = 4 };

/// Bins of the exponent histogram: bin b, from 0, counts the finite nonzero gradients g, as stored
/// (scaled), with floor(log2|g|) = ENG_HIST_FIRST + b. The first bin also counts all smaller
/// values, and the last bin all larger ones.
enum { ENG_HIST_BINS = 320, ENG_HIST_FIRST = -160 };

/// Statistics of one tensor's gradient as stored, that is, multiplied by the loss scale. They cover
/// its finite elements; inf and nan are counted separately. `underflow` counts nonzero elements
/// below the smallest normal number of the dtype (subnormal: they have lost bits); `zeros` counts
/// exact zeros, -0 included.
typedef struct eng_tensor_stats {
  int64_t count, inf, nan, zeros, underflow;
  double  amax;               // largest finite |g|
  double  sum_squares;        // sum of g^2 over finite elements
  int64_t hist[320];          // filled only with ENG_NEED_HIST
  double  relative_scale;     // relative scale of the gradient; 0 (not set) means 1
  double  norm_ref;           // norm in a reference backward pass; 0: there was none
  // The next three fields are for a tensor that an FP8 layer quantized; `underflow` then counts
  // numbers that became 0.
  int64_t measured;           // elements measured; 0: none, or this is a gradient
  int64_t clipped;            // measured elements too large for the format, which saturated
  double  snr;                // signal-to-noise ratio of the quantized numbers, dB
  double  norms[4];           // ENG_NORM_*; [k] is valid unless the record's norms[k] is NaN
} eng_tensor_stats;

/// Computes statistics of a contiguous f32, f16 or bf16 tensor in one pass, as eng_tensor_stats
/// defines them for gradients: count, inf, nan, and those of zeros, underflow, amax, sum_squares
/// (ENG_NEED_NORM) and the exponent histogram that `needs` (ENG_NEED_*) lists; the others are 0.
/// Errors: DTYPE, VALUE (not contiguous), DEVICE.
eng_status eng_stats(eng_tensor_stats *out, const eng_tensor *x, unsigned needs);

/// What a policy reads about a step. amax and norm are true (unscaled) magnitudes of the finite
/// values; policies/README.md, the policy contract, describes the fields.
typedef struct eng_record {
  int64_t step, updates;      // steps before this step; updates applied before it
  double  scale;              // the loss scale of this backward pass
  double  loss, lr;
  int64_t count, inf, nan, zeros, underflow;
  double  amax, norm;
  double  norm_ref;           // norm of a reference backward pass in fp32; NaN: there was none
  double  elapsed;            // seconds since the run began
  int32_t overflow;           // 1: some gradient is inf or nan
  int32_t first_bad;          // index of the first tensor with inf or nan; -1: none
  // 1: the verdict's `caps` were applied, and the norms describe the capped gradients
  int32_t capped;
  double  norms[4];           // ENG_NORM_* of the update before this step; NaN: not known
  // For the history: the largest finite |g|, as stored, of all f16 gradients. -1: no gradient is
  // f16. 0: unknown, or no f16 gradient has a finite element other than 0.
  double  amax_f16;
  int64_t hist[320];          // the last member: run/swap.lua leaves it out of copies
} eng_record;

/// What a verdict does with the step. ROLLBACK: the run goes back to an earlier checkpoint.
enum {
  ENG_ACTION_STEP = 0, ENG_ACTION_SKIP = 1, ENG_ACTION_RETRY = 2, ENG_ACTION_STOP = 3,
  ENG_ACTION_ROLLBACK = 4, ENG_ACTIONS = 5
};
/// Returns "step", "skip", "retry", "stop" or "rollback", or "?" for any other number.
const char *eng_action_name(int action);
/// Returns the action with this name, or -1 if there is none.
int eng_action_from_name(const char *name);

/// What a policy decided.
typedef struct eng_verdict {
  double  scale;              // loss scale of the next step
  int32_t action;             // ENG_ACTION_*
  int32_t failed;             // 1: the policy failed; scale, clip and lr_mul come from the last
                              // good verdict
  double  clip;               // limit on the gradient norm; 0: no limit
  // factor on the learning rate of this update, or of all updates after a rollback
  double  lr_mul;
  // For a rollback. back: the least number of steps to go back. skip: the number of steps of data
  // to leave out.
  int64_t back, skip;
  double  update_clip;        // limit on the norm of the change of all weights; 0: no limit
  double  spike_clip;         // adam, adamw: limit on g^2 / v of an element; 0: no limit
  int64_t bias_step;          // number of this update for bias correction; 0: the optimizer's own
                              // count
  uint32_t each;              // bit number ENG_EACH_* is 1 if the verdict sets that quantity for
                              // single tensors
  char    reason[256];
} eng_verdict;

// ------------------------------------------------------------------ policies

/// A loss-scaling policy: a Lua file in its own sandboxed state. policies/README.md is its
/// contract. Its memory, instructions and time are limited, so it can neither hang the process nor
/// use up its memory.
typedef struct eng_policy eng_policy;

/// What eng_policy_describe returns. Strings live as long as the policy.
typedef struct eng_policy_info {
  const char *name, *doc;     // doc: "" when there is none
  const char *file;           // the file name shown in the policy's messages
  uint32_t needs;             // ENG_NEED_*
  int32_t  options;           // number of options
  int64_t  failures;          // decisions that failed so far
  bool     fp8;               // its `kind` is "fp8": it controls FP8 layers, not the loss scale
} eng_policy_info;

/// The types of a policy's options.
enum { ENG_OPTION_NUMBER = 0, ENG_OPTION_BOOLEAN = 1, ENG_OPTION_STRING = 2 };

/// An option with its current value and the file's default, as text. Options are sorted by name.
typedef struct eng_policy_option {
  const char *name, *value, *preset;
  int32_t type;               // ENG_OPTION_*: the type of the default
} eng_policy_option;

/// Sets the limits of policies loaded from now on: bytes of Lua memory (default 8 MiB), and for a
/// call Lua instructions (default 1,000,000; library calls count in proportion to their work; a
/// verdict's patterns get 10 times as many) and seconds of processor time (default 2). 0: keep.
void eng_policy_limits(int64_t memory, int64_t instructions, double seconds);

/// Compiles and checks a policy. `file` is the name shown in messages. Options are given as `n`
/// pairs of text; a value is parsed as the type of the option's default: a number ("0.5", "2^16",
/// "inf"), "true" or "false", or text. Errors: POLICY, with the file and, if one is known, the
/// line (also if its own code exceeds the limit on memory); MEMORY.
eng_status eng_policy_load(eng_policy **out, const char *source, int64_t bytes, const char *file,
                           const char *const *names, const char *const *values, int n);
/// Frees a policy. NULL is allowed.
void       eng_policy_free(eng_policy *policy);
void       eng_policy_describe(eng_policy_info *out, const eng_policy *policy);
/// Describes option `index`, counted from 0. Errors: VALUE (no such option).
eng_status eng_policy_option_get(eng_policy_option *out, const eng_policy *policy, int index);

/// Replaces the policy's state by a fresh one, and forgets the last good verdict and the number of
/// failures. Errors: POLICY.
eng_status eng_policy_init(eng_policy *policy);
/// Returns the current loss scale. It comes from the fresh, restored or migrated state, the last
/// good verdict or eng_policy_set_scale, whichever set it last.
double     eng_policy_scale(const eng_policy *policy);
/// Sets the current scale, and also state.scale if the state has a number of this name. The rest of
/// the state, including its counters, is unchanged. Errors: VALUE (not a positive finite number),
/// STATE.
eng_status eng_policy_set_scale(eng_policy *policy, double scale);

/// Names the tensors of eng_policy_decide's `stats` and the group of each (group_of[i] < n_groups,
/// or -1; NULL: -1 for each). Forgets the scales of groups in the last good verdict. `scalable`:
/// this run can scale groups separately, so a verdict may contain `scales`.
eng_status eng_policy_tensors(eng_policy *policy, const char *const *names, const int32_t *group_of,
                              int n, const char *const *groups, int n_groups, bool scalable);
/// Returns the loss scale of a group in the last good verdict: its entry in `scales` or, if it has
/// none, the verdict's `scale`.
double     eng_policy_group_scale(const eng_policy *policy, int group);
/// Returns whether the last good verdict gives any group a scale other than the verdict's `scale`.
bool       eng_policy_scales_groups(const eng_policy *policy);
/// What a verdict sets for single tensors.
enum { ENG_EACH_CLIP = 0, ENG_EACH_LR = 1, ENG_EACH_RESET = 2, ENG_EACH_CAP = 3, ENG_EACH = 4 };
/// Returns a quantity (`what`) that the last verdict sets for tensor `index`. ENG_EACH_CLIP: the
/// factor on the tensor's gradient from `clips` or `grad_norms`, 1 without an entry. ENG_EACH_LR:
/// the factor on its learning rate, 1 without an entry. ENG_EACH_RESET: 1 if its moments are reset,
/// else 0. ENG_EACH_CAP: its entry in `caps`, inf without one. After a failed decision nothing is
/// set.
double     eng_policy_each(const eng_policy *policy, int what, int index);
/// Reads entry `index` of the last verdict's `logit_muls`: sets *factor and returns "MODULE.HEAD",
/// with heads counted from 1. Returns NULL past the end.
const char *eng_policy_logit_mul(double *factor, const eng_policy *policy, int index);
enum { ENG_POLICY_LOGIT_MULS = 4096 };
/// Sets record.signals[name] in the records that the policy reads, until it is set again.
eng_status eng_policy_signal(eng_policy *policy, const char *name, double value);

/// How the values of a record's field over several optimizers make one (record.def).
enum { ENG_COMBINE_NONE = 0, ENG_COMBINE_SUM = 1, ENG_COMBINE_MAX = 2, ENG_COMBINE_ROOT = 3 };
/// A name that policies use. It is a field of the record, of the statistics of a tensor or group,
/// or of a verdict, or `needs` may list it. need: the ENG_NEED_* that the policy must announce, or
/// 0. combine: ENG_COMBINE_*.
typedef struct eng_policy_name {
  const char *name;
  uint32_t need;
  int32_t  combine;
  bool     record, tensor, verdict, listed;
} eng_policy_name;
/// Describes name `index`, counted from 0. Returns false past the end. A name that the record and
/// the verdict share is there twice.
bool eng_policy_name_get(eng_policy_name *out, int index);

/// Runs the policy on a record to get its verdict. `stats` has an entry for each tensor of
/// eng_policy_tensors, or is NULL. Returns ENG_OK unless the policy has no state (STATE). If the
/// policy raises an error, exceeds a limit, returns an invalid verdict or leaves a state that is
/// not plain data, verdict.failed is 1 and verdict.reason says why. Then scale, clip and lr_mul
/// come from the last good verdict, the action is skip on overflow, else step, and the policy's
/// state is restored.
eng_status eng_policy_decide(eng_verdict *out, eng_policy *policy, const eng_record *record,
                             const eng_tensor_stats *stats);

/// Reads entry `index` of the last verdict's `log`, in arbitrary order: sets *value and returns the
/// entry's name, which is valid until the next decision. Returns NULL past the end.
const char *eng_policy_logged(double *value, const eng_policy *policy, int index);
/// Returns what the policy printed since the last call of this function, as lines "file:line: text"
/// without control characters, or "" if it printed nothing. Keeps the first ENG_POLICY_PRINTS
/// bytes. Valid until the next call that uses the policy.
const char *eng_policy_printed(eng_policy *policy);
enum { ENG_POLICY_LOGS = 64, ENG_POLICY_PRINTS = 2048 };   // values in a `log`; bytes printed

/// Writes the policy's state, its number of failures, and the scale, scales, clip and lr_mul of the
/// last good verdict as canonical text: numbers are exact and keys are sorted, so the same state
/// always gives the same bytes. The policy owns the text, which is valid until the next save.
/// Signals and tensor names are not saved. Errors: STATE, MEMORY.
eng_status eng_policy_save(const char **text, int64_t *bytes, eng_policy *policy);
/// Restores a saved text. On an error the state is unchanged. Errors: FORMAT, POLICY (saved by a
/// policy of another name), MEMORY.
eng_status eng_policy_restore(eng_policy *policy, const char *text, int64_t bytes);
/// Lets `policy` continue from `old`, which is unchanged. If `policy` has a function `migrate`,
/// that function makes the new state. Otherwise, if both policies have the same name, `policy`
/// takes over the old state (new fields start fresh); else it starts fresh from the old scale.
/// Errors: POLICY, STATE.
eng_status eng_policy_migrate(eng_policy *policy, const eng_policy *old);
