// Optimizer state: the moments of a parameter set in flat buffers, and the call of the device's
// fused update. engine.h has the contract, cpu/optimizer.c the formulas.
//
// Owns the moments. Holds a reference to the set, so that both may be freed in any order. Called by
// Lua.
#include "base/error.h"
#include "base/numerics.h"
#include "params.h"
#include "device/transfer.h"
#include "device/update_rule.h"

#include <math.h>
#include <stdlib.h>

typedef struct optimizer_member {
  int32_t group;             // index into eng_update.groups
  int64_t begun;             // storage.writes of moment 1 when it was last found to be nonzero; -1:
                             // never
} optimizer_member;

struct eng_optimizer {
  eng_params  *set;
  int32_t      kind, moment_dtype, rounding;
  // index of the counter, on the device, of this optimizer's lagged updates; -1: none yet
  int32_t      slot;
  bool         in_a_row;     // the previous update was lagged
  int64_t      lagged_t;     // number of the next lagged update, on devices that compute statistics
                             // immediately
  // Moments by their number, from 1, and the rounding errors of bf16 masters (ENG_COMPENSATION),
  // which have no part for f32 masters. An entry is NULL until an update (with ENG_MOMENTUM: one
  // with momentum) or eng_optimizer_moment creates it.
  flat_buffer *buffer[1 + ENG_MOMENTS];
  optimizer_member member[]; // [set->n]
};
enum { BUFFERS = 1 + ENG_MOMENTS };

static const eng_optimizer_info kinds[] = {
#define ENG_OPTIMIZER(name, KIND, loop, moments, traits, hyper) {#name, moments, traits, #hyper},
#include "optimizers.def"
};

// The compiler refuses rows with an unknown hyperparameter or with too many moments.
#define ENG_OPTIMIZER(name, KIND, loop, moments, traits, hyper) \
  _Static_assert(sizeof((eng_hyper){ENG_LIST hyper}) && moments <= ENG_MOMENTS, #name);
#include "optimizers.def"

const eng_optimizer_info *eng_optimizer_describe(int kind)
{ return kind >= 0 && kind < ENG_OPTIMIZER_COUNT ? &kinds[kind] : NULL; }

const char *eng_hyper_ranges(void)
{
#define ENG_HYPER(name, type, range) #name "=" #range " "
  return
#include "optimizers.def"
    "";
}

static uint64_t slots_taken;   // one bit for each of the device's counters
_Static_assert(ENG_UPDATE_SLOTS == 64, "one bit for each slot");

static eng_status take_slot(eng_optimizer *state)
{
  for (int k = 0; k < ENG_UPDATE_SLOTS && state->slot < 0; k++)
    if (!(slots_taken >> k & 1)) state->slot = k;
  FAIL_IF(state->slot < 0, ENG_ERR_STATE, "%s: %d other optimizers already use lagged updates, the "
          "most there can be; hint: set optimizers that are no longer used to nil, then call "
          "collectgarbage()", kinds[state->kind].name, ENG_UPDATE_SLOTS);
  slots_taken |= 1ull << state->slot;
  return ENG_OK;
}

/// Returns the dtype of each part of a buffer; -1 for a parameter without a part.
static int32_t *dtypes_of(const eng_optimizer *state, int which)
{
  int32_t *dtype = state->set->which;   // unused between passes
  for (int i = 0; i < state->set->n; i++) {
    bool low = state->set->member[i].value->dtype == ENG_bf16;
    dtype[i] = which != ENG_COMPENSATION ? state->moment_dtype : low ? ENG_bf16 : -1;
  }
  return dtype;
}

static eng_status moment_new(eng_optimizer *state, int which)
{
  flat_buffer **moment = &state->buffer[which];
  const eng_params *set = state->set;
  if (*moment) return ENG_OK;
  ENG_TRY(flat_new(moment, ARENA_OPTIMIZER, set, dtypes_of(state, which), set->sharded));
  if (!*moment) return ENG_OK;
  eng_status status = transfer_zero(set->space, (*moment)->memory, (*moment)->bytes);
  if (status != ENG_OK) flat_release(moment);
  return status;
}

static eng_status check_groups(const eng_params *set, int kind, const int32_t *group_of)
{
  for (int i = 0; i < set->n; i++)
    FAIL_IF(group_of[i] < 0, ENG_ERR_VALUE, "%s: expected a group >= 0 for parameter %s, got %d",
            kinds[kind].name, set->member[i].name, group_of[i]);
  return ENG_OK;
}

eng_status eng_optimizer_groups(eng_optimizer *state, const int32_t *group_of)
{
  ENG_TRY(params_alive(state->set));
  ENG_TRY(check_groups(state->set, state->kind, group_of));
  for (int i = 0; i < state->set->n; i++) state->member[i].group = group_of[i];
  return ENG_OK;
}

eng_status eng_optimizer_new(eng_optimizer **out, eng_params *set, int kind, int moment_dtype,
                             const int32_t *group_of)
{
  *out = NULL;
  FAIL_IF(!eng_optimizer_describe(kind), ENG_ERR_VALUE, "unknown optimizer number %d; expected "
          "0 to %d (optimizers.def)", kind, ENG_OPTIMIZER_COUNT - 1);
  FAIL_IF(moment_dtype != ENG_f32 && moment_dtype != ENG_bf16, ENG_ERR_DTYPE, "%s: expected "
          "moments in f32 or bf16, got %s", kinds[kind].name, eng_dtype_name(moment_dtype));
  ENG_TRY(params_alive(set));
  if (group_of) ENG_TRY(check_groups(set, kind, group_of));

  eng_optimizer *state = calloc(1, sizeof *state + (size_t)set->n * sizeof *state->member);
  FAIL_IF(!state, ENG_ERR_MEMORY, "out of memory for the state of %s", kinds[kind].name);
  state->slot = -1;
  state->set = set;
  state->kind = kind;
  state->moment_dtype = moment_dtype;
  for (int i = 0; i < set->n; i++)
    state->member[i] = (optimizer_member){.group = group_of ? group_of[i] : 0, .begun = -1};
  set->references++;
  *out = state;
  return ENG_OK;
}

void eng_optimizer_free(eng_optimizer *state)
{
  if (!state) return;
  for (int which = 0; which < BUFFERS; which++) flat_release(&state->buffer[which]);
  params_release(state->set);
  if (state->slot >= 0) slots_taken &= ~(1ull << state->slot);
  free(state);
}

void eng_optimizer_restart(eng_optimizer *state) { state->in_a_row = false; }

/// Returns whether the parts of a moment hold only this rank's elements.
static bool is_divided(const flat_buffer *moment, const eng_params *set)
{
  for (int i = 0; i < set->n; i++)
    if (moment->part[i] && moment->part[i]->count != set->own[2 * i + 1] - set->own[2 * i])
      return false;
  return true;
}

eng_status eng_optimizer_shard(eng_optimizer *state)
{
  ENG_TRY(params_alive(state->set));
  eng_params *set = state->set;
  FAIL_IF(!set->sharded, ENG_ERR_STATE,
          "%s: expected parameters that are divided among ranks; hint: call eng_parallel_new with "
          "zero = 1, 2 or 3 first", kinds[state->kind].name);
  for (int which = 0; which < BUFFERS; which++) {
    flat_buffer *whole = state->buffer[which], *part;
    if (!whole || is_divided(whole, set)) continue;
    state->buffer[which] = NULL;
    eng_status status = moment_new(state, which);
    part = state->buffer[which];
    for (int i = 0; i < set->n && status == ENG_OK; i++) {
      // Kahan errors have no part in `whole` or in `part` if the master's dtype has changed.
      if (!whole->part[i] || !part || !part->part[i]) continue;
      int size = eng_dtype_size(whole->part[i]->dtype);
      const char *from = (const char *)whole->part[i]->data + set->own[2 * i] * size;
      status = transfer_inside(set->space, part->part[i]->data, from, part->part[i]->count * size);
    }
    state->buffer[which] = status == ENG_OK ? part : whole;
    flat_release(status == ENG_OK ? &whole : &part);
    ENG_TRY(status);
  }
  return ENG_OK;
}

eng_status eng_optimizer_rounding(eng_optimizer *state, int rounding)
{
  ENG_TRY(params_alive(state->set));
  FAIL_IF(rounding < ENG_ROUND_NEAREST || rounding > ENG_ROUND_KAHAN, ENG_ERR_VALUE, "%s: unknown "
          "rounding number %d; expected 0 to 2 (ENG_ROUND_*)", kinds[state->kind].name, rounding);
  state->rounding = rounding;
  flat_release(&state->buffer[ENG_COMPENSATION]);   // the masters may have another format now
  return ENG_OK;
}

static eng_status check_update(const eng_optimizer *state, const eng_update *update)
{
  const char *name = kinds[state->kind].name;
  if (update->kind != state->kind)
    return error_set(ENG_ERR_VALUE, "expected an update of %s, got an update of %s", name,
                     eng_optimizer_describe(update->kind) ? kinds[update->kind].name
                                                          : "an unknown optimizer");
  FAIL_IF(update->t < 1, ENG_ERR_VALUE,
          "%s: expected an update number of 1 or more, got %lld", name, (long long)update->t);
  for (int g = 0; state->set->sharded && g < update->n_groups; g++)
    FAIL_IF(update->groups[g].dampening != 0, ENG_ERR_VALUE, "%s: expected dampening to be 0 with "
            "ZeRO, got %g: dampening treats a tensor's first update differently, and a rank that "
            "holds only a part of the tensor cannot tell which update is the first; hint: "
            "dampening=0 or zero=0", name, update->groups[g].dampening);
  FAIL_IF(!(update->spike_clip >= 0 && update->update_clip >= 0), ENG_ERR_VALUE,
          "%s: expected update_clip and spike_clip to be 0 or more, got %g and %g", name,
          update->update_clip, update->spike_clip);
  FAIL_IF(update->spike_clip > 0 && !has_trait(state->kind, ENG_SPIKE_CLIP), ENG_ERR_VALUE,
          "%s: this optimizer cannot use spike_clip; expected 0, got %g", name, update->spike_clip);
  FAIL_IF(update->update_clip > 0 && !update->norms, ENG_ERR_VALUE,
          "%s: update_clip needs norms (eng_update.norms), got NULL", name);
  FAIL_IF(update->lagged && !state->set->newest, ENG_ERR_STATE, "%s: a lagged update needs "
          "gradient statistics, and none were requested before it; hint: lagged = false", name);
  FAIL_IF(update->norms && update->lagged && backend_current()->gradstats_start, ENG_ERR_DEVICE,
          "%s: the device %s cannot compute norms in a lagged update; hint: lagged = false", name,
          backend_current()->name);
  for (int i = 0; i < state->set->n; i++)
    FAIL_IF(state->member[i].group >= update->n_groups, ENG_ERR_VALUE,
            "%s: parameter %s is in group %d (counted from 0), but the number of groups is %d",
            name, state->set->member[i].name, state->member[i].group, update->n_groups);
  return ENG_OK;
}

/// Returns whether all bits of this moment are 0. It then counts as never updated, although updates
/// with gradients of zero leave it 0, too (PyTorch counts updates instead). Because the test reads
/// only the moment, a resumed run equals a run without a break, and updates that a GPU has skipped
/// do not count.
static bool untouched(const tensor *moment)
{
  const char *at = moment->data;
  int64_t left = moment->count * eng_dtype_size(moment->dtype);
  while (left > 0) {
    unsigned char piece[4096];
    int64_t bytes = left < (int64_t)sizeof piece ? left : (int64_t)sizeof piece;
    if (transfer_to_host(piece, moment->store->space, at, bytes) != ENG_OK) return false;
    for (int64_t k = 0; k < bytes; k++)
      if (piece[k]) return false;
    at += bytes;
    left -= bytes;
  }
  return true;
}

/// Returns whether parameter i's moment counts as updated. Once the moment was found to be nonzero,
/// it is not read again until a script writes to it, because a read may have to wait for a GPU.
static bool has_begun(eng_optimizer *state, int i)
{
  const tensor *moment = state->buffer[1]->part[i];
  if (state->member[i].begun == (int64_t)moment->store->writes) return true;
  if (untouched(moment)) return false;
  state->member[i].begun = moment->store->writes;
  return true;
}

eng_status eng_optimizer_step(eng_optimizer *state, const eng_update *update)
{
  const backend *device = backend_current();
  ENG_TRY(params_alive(state->set));
  ENG_TRY(check_update(state, update));
  ENG_TRY(params_here(state->set, "an optimizer's update"));
  ENG_TRY(params_wait());
  const bool by_momentum = has_trait(state->kind, ENG_MOMENTUM);
  bool momentum = !by_momentum;
  for (int g = 0; g < update->n_groups; g++) momentum = momentum || update->groups[g].momentum != 0;
  for (int which = 1; momentum && which <= kinds[state->kind].moments; which++)
    ENG_TRY(moment_new(state, which));
  if (state->rounding == ENG_ROUND_KAHAN) ENG_TRY(moment_new(state, ENG_COMPENSATION));

  eng_params *set = state->set;
  eng_update here = *update;
  const bool lagged = update->lagged != 0;
  for (int i = 0; update->norms && i < set->n; i++)
    update->norms[ENG_NORMS * i + ENG_NORM_UPDATE] = 0;
  // On a device that computes statistics immediately, the host decides here whether to skip the
  // update. A GPU decides this itself.
  if (update->lagged && !device->gradstats_start) {
    here.t = here.draw = state->in_a_row ? state->lagged_t : update->t;
    here.lagged = 0;
    state->lagged_t = here.t;
    state->in_a_row = true;
    if (!params_stats_factor(&here.gradient_factor, set, update->gradient_factor,
                             update->clip_norm))
      return ENG_OK;
    state->lagged_t++;
  }
  if (!lagged)
    here.gradient_factor = clip_factor(update->gradient_factor, update->norm, update->clip_norm);
  if (here.lagged) ENG_TRY(take_slot(state));
  here.slot = here.lagged ? state->slot : 0;
  here.fresh = !state->in_a_row;
  here.statistics = set->newest ? set->newest->ticket : 0;
  here.factor = 1;
  here.dry = 0;
  here.rounding = state->rounding;
  update = &here;
  int m = set->sharded ? params_own_spans(set) : params_spans(set);
  bool some = false;
  for (int k = 0; k < m; k++) {
    param_span *span = &set->span[k];
    int i = set->which[k];
    some = some || span->count > 0;
    span->group = state->member[i].group;
    span->moment_dtype = state->moment_dtype;
    const eng_hyper *h = &update->groups[span->group];
    for (int which = 1; which <= ENG_MOMENTS; which++)
      if (state->buffer[which] && !(by_momentum && h->momentum == 0))
        span->moment[which - 1] = state->buffer[which]->part[i]->data;
    const flat_buffer *lost = state->buffer[ENG_COMPENSATION];
    if (lost && lost->part[i] && span->master_dtype == ENG_bf16)
      span->compensation = lost->part[i]->data;
    // Without dampening the first update needs no exception: momentum * 0 + gradient equals the
    // gradient.
    span->starts =
      by_momentum && span->moment[0] && h->dampening != 0 && !has_begun(state, i);
    if (update->clips && update->clips[i] != 1) span->scale /= update->clips[i];
    if (update->norms) span->norms = update->norms + ENG_NORMS * i;
  }
  if (update->update_clip > 0) {
    here.dry = 1;
    ENG_TRY(device->optimize(set->span, m, update));
    here.dry = 0;
    double squares = 0;
    for (int i = 0; i < set->n; i++) squares += update->norms[ENG_NORMS * i + ENG_NORM_UPDATE];
    double norm = sqrt(squares);
    if (norm > update->update_clip) here.factor = update->update_clip / norm;
  }
  ENG_TRY(device->optimize(set->span, m, update));
  if (some) state->in_a_row = lagged;   // without spans the device's counter did not advance
  for (int k = 0; k < m; k++) params_written(&set->member[set->which[k]]);
  return ENG_OK;
}

eng_status eng_optimizer_moment(eng_tensor *out, eng_optimizer *state, int which, int index)
{
  *out = (eng_tensor){0, 0};
  ENG_TRY(params_alive(state->set));
  ENG_TRY(params_index(state->set, index));
  FAIL_IF(which < 0 || which >= BUFFERS, ENG_ERR_VALUE,
          "expected moment 1 to %d, or %d (ENG_COMPENSATION), got %d", ENG_MOMENTS,
          ENG_COMPENSATION, which);
  if (which == ENG_COMPENSATION ? state->rounding != ENG_ROUND_KAHAN
                                : which > kinds[state->kind].moments)
    return ENG_OK;
  ENG_TRY(moment_new(state, which));
  const flat_buffer *moment = state->buffer[which];
  if (moment && moment->part[index]) *out = tensor_handle(moment->part[index]);
  return ENG_OK;
}
