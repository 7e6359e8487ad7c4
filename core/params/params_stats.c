// Gradient statistics that are requested and then fetched: in the same step in sync mode, a step
// later in lagged mode. A GPU keeps the results until they are fetched. For a device that computes
// statistics immediately, this file keeps the results, so that scripts see the same behaviour on
// both kinds of devices. Owns eng_params.pending. Called by Lua, optimizer.c (lagged update) and
// params.c.
#include "params.h"

#include "base/error.h"
#include "base/numerics.h"

#include <math.h>
#include <string.h>

static eng_status room_for(pending_stats *p, eng_params *set, bool on_host)
{
  if (!p->which) HEAP_TAKE(&set->memory, p->which, set->n);
  if (!p->relative_scale) HEAP_TAKE(&set->memory, p->relative_scale, set->n);
  if (on_host && !p->stats) HEAP_TAKE(&set->memory, p->stats, set->n);
  if (p->which && p->relative_scale && (p->stats || !on_host)) return ENG_OK;
  return error_set(ENG_ERR_MEMORY, "out of memory for the statistics of %d parameters", set->n);
}

static eng_status want_pending(const eng_params *set)
{
  if (set->n_pending > 0) return ENG_OK;
  return error_set(ENG_ERR_STATE, "gradient statistics: none were requested; hint: call "
                                  "eng_params_stats_start first");
}

eng_status eng_params_stats_withdraw(eng_params *set)
{
  const backend *device = backend_of_space(set->space);
  ENG_TRY(want_pending(set));
  const pending_stats *p =
    &set->pending[(set->first_pending + --set->n_pending) % ENG_STATS_PENDING];
  if (set->newest == p) set->newest = NULL;
  return device && device->gradstats_fetch ? device->gradstats_fetch(p->ticket, NULL, 0, NULL, 0)
                                           : ENG_OK;
}

void eng_params_stats_forget(eng_params *set)
{ while (set->n_pending > 0) eng_params_stats_withdraw(set); }

static eng_status check_losses(tensor **loss, const eng_tensor *losses, int n)
{
  FAIL_IF(n < 0 || n > ENG_STATS_LOSSES, ENG_ERR_VALUE,
          "gradient statistics: expected 0 to %d losses, got %d", ENG_STATS_LOSSES, n);
  for (int i = 0; i < n; i++) {
    ENG_TRY(tensor_get(&loss[i], &losses[i]));
    FAIL_IF(loss[i]->dtype != ENG_f32 || loss[i]->count != 1, ENG_ERR_DTYPE,
            "gradient statistics: expected a loss of one f32 element, got %s; hint: "
            "loss:to('f32'), or mode=sync", tensor_text(loss[i]));
    FAIL_IF(loss[i]->store->space != arena_space(), ENG_ERR_DEVICE,
            "gradient statistics: the loss %s is not in the memory of the current device, %s; "
            "hint: loss:to('%s')", tensor_text(loss[i]), backend_current()->name,
            backend_current()->name);
  }
  return ENG_OK;
}

/// Copies from `known` the statistics of the members that have a gradient.
static void take_known(pending_stats *p, const eng_params *set, const eng_tensor_stats *known)
{
  p->m = 0;
  for (int i = 0; i < set->n; i++) {
    if (!set->member[i].has_gradient || set->member[i].value->count == 0) continue;
    p->which[p->m] = i;
    p->stats[p->m++] = known[i];
  }
}

/// Computes the totals of a request: the loss, which the record shows, and the sum of squares and
/// the overflow, which decide the update.
static void sum_up(pending_stats *p, tensor *const *loss)
{
  p->loss = p->sum_squares = 0;
  p->overflow = false;
  for (int i = 0; i < p->n_losses; i++) p->loss += tensor_load(loss[i]->data, ENG_f32, 0);
  for (int k = 0; k < p->m; k++) {
    double scale = p->stats[k].relative_scale;
    p->sum_squares += p->stats[k].sum_squares / (scale * scale);
    p->overflow = p->overflow || p->stats[k].inf + p->stats[k].nan > 0;
  }
}

/// Computes the statistics, or requests them from a device that computes them later.
static eng_status compute(pending_stats *p, eng_params *set, tensor *const *loss)
{
  const backend *device = backend_current();
  ENG_TRY(params_whole(set));
  p->m = params_spans(set);
  memcpy(p->which, set->which, (size_t)p->m * sizeof *p->which);
  for (int k = 0; k < p->m; k++) p->relative_scale[k] = set->span[k].scale;
  if (device->gradstats_start)
    return device->gradstats_start(&p->ticket, set->span, p->m, p->needs, loss, p->n_losses);
  ENG_TRY(device->gradstats(set->span, p->m, p->needs | ENG_NEED_NORM, p->stats));
  for (int k = 0; k < p->m; k++) p->stats[k].relative_scale = p->relative_scale[k];
  return ENG_OK;
}

eng_status eng_params_stats_start(eng_params *set, unsigned needs, const eng_tensor *losses,
                                  int n_losses, const eng_tensor_stats *known)
{
  ENG_TRY(params_alive(set));
  FAIL_IF(set->n_pending == ENG_STATS_PENDING, ENG_ERR_STATE, "gradient statistics: expected at "
          "most %d requests at a time, and all of them have not been fetched yet; hint: call "
          "eng_params_stats_fetch first", ENG_STATS_PENDING);
  ENG_TRY(params_here(set, "gradient statistics"));
  bool later = backend_current()->gradstats_start != NULL;
  FAIL_IF(later && known, ENG_ERR_DEVICE, "gradient statistics: expected no `known` statistics, "
          "because the device %s computes them itself", backend_current()->name);
  tensor *loss[ENG_STATS_LOSSES];
  ENG_TRY(check_losses(loss, losses, n_losses));
  pending_stats *p = &set->pending[(set->first_pending + set->n_pending) % ENG_STATS_PENDING];
  ENG_TRY(room_for(p, set, !later));
  p->needs = needs;
  p->n_losses = n_losses;
  if (known) take_known(p, set, known);
  else ENG_TRY(compute(p, set, loss));
  if (!later) sum_up(p, loss);
  set->n_pending++;
  set->newest = p;
  return ENG_OK;
}

eng_status eng_params_stats_fetch(eng_record *record, eng_tensor_stats *stats, double *loss,
                                  eng_params *set, double scale)
{
  ENG_TRY(params_alive(set));
  ENG_TRY(want_pending(set));
  ENG_TRY(params_here(set, "gradient statistics"));
  const backend *device = backend_current();
  pending_stats *p = &set->pending[set->first_pending];
  const eng_tensor_stats *found = p->stats;
  set->first_pending = (set->first_pending + 1) % ENG_STATS_PENDING;
  set->n_pending--;   // consumed, even if the fetch fails
  if (device->gradstats_fetch) {
    double values[ENG_STATS_LOSSES];
    ENG_TRY(device->gradstats_fetch(p->ticket, set->stats, p->m, values, p->n_losses));
    p->loss = 0;
    for (int i = 0; i < p->n_losses; i++) p->loss += values[i];
    found = set->stats;
    for (int k = 0; k < p->m; k++) set->stats[k].relative_scale = p->relative_scale[k];
  }
  *loss = p->loss;
  params_record(record, stats, set, found, p->which, p->m, scale, p->needs);
  return ENG_OK;
}

bool params_stats_factor(double *factor, const eng_params *set, double gradient_factor,
                         double clip_norm)
{
  const pending_stats *p = set->newest;
  *factor = gradient_factor;
  if (p->overflow) return false;
  *factor = clip_factor(gradient_factor, sqrt(p->sum_squares) * gradient_factor, clip_norm);
  return true;
}
