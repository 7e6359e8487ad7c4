// The gradients of a parameter set: spans, statistics, unscaling, a reference backward. engine.h
// has the contracts.
//
// The backward pass writes a parameter's gradient into parameter.gradient and sets has_gradient. A
// parameter without a gradient is absent from statistics and updates. A span holds the gradient's
// relative scale, and passes over spans divide by it. Called by Lua, autograd/, dist/ and this
// folder.
#include "params.h"

#include "base/error.h"
#include "base/numerics.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void *past(const tensor *x, int64_t elements)
{ return (char *)x->data + elements * eng_dtype_size(x->dtype); }

eng_status params_gradients(eng_params *set)
{
  FAIL_IF(set->divided, ENG_ERR_STATE, "the gradients of these parameters are divided among "
          "ranks (zero=2 or 3): only a trainer's step can compute them; hint: zero=1");
  if (set->gradients) return ENG_OK;
  ENG_TRY(flat_new(&set->gradients, ARENA_GRADIENT, set, set->gradient_dtype, false));
  for (int i = 0; i < set->n; i++)
    if (!set->member[i].gradient) set->member[i].gradient = set->gradients->part[i];
  return ENG_OK;
}

void params_divide(eng_params *set, flat_buffer *own)
{
  flat_release(&set->gradients);
  set->gradients = own;
  set->divided = true;
  for (int i = 0; i < set->n; i++) {
    params_drop_gradient(&set->member[i]);
    set->member[i].gradient = NULL;
  }
}

eng_status eng_params_zero_grad(eng_params *set)
{
  ENG_TRY(params_alive(set));
  flat_reclaim();
  for (int i = 0; i < set->n; i++) {
    parameter *p = &set->member[i];
    params_drop_gradient(p);
    p->gradient = params_gradient_part(set, i);   // it may have pointed to the unscaled gradient
  }
  return ENG_OK;
}

static int spans(eng_params *set, const int64_t *own)
{
  int m = 0;
  for (int i = 0; i < set->n; i++) {
    const parameter *p = &set->member[i];
    int64_t from = own ? own[2 * i] : 0, to = own ? own[2 * i + 1] : p->value->count;
    if (!p->has_gradient || from == to) continue;
    // if gradients are divided, the buffer holds only this rank's elements
    const tensor *gradient = p->gradient ? p->gradient : set->gradients->part[i];
    set->which[m] = i;
    set->span[m++] = (param_span){
      .name = p->name,
      .count = to - from,
      .master = past(p->value, from),
      .master_dtype = p->value->dtype,
      .index = i,
      .first = from,
      .low = p->low ? past(p->low, from) : NULL,
      .low_dtype = p->low ? p->low->dtype : ENG_f32,
      .gradient = past(gradient, p->gradient ? from : from - set->own[2 * i]),
      .gradient_dtype = gradient->dtype,
      .moment_dtype = ENG_f32,
      .scale = p->unscaled ? 1 : p->relative_scale,
    };
  }
  return m;
}

int params_spans(eng_params *set) { return spans(set, NULL); }
int params_own_spans(eng_params *set) { return spans(set, set->own); }

eng_status params_here(const eng_params *set, const char *pass)
{
  ENG_TRY(backend_forbids(pass));
  const backend *device = backend_current();
  if (set->n == 0 || set->space == device->space) return ENG_OK;
  const char *home = backend_of_space(set->space)->name;
  return error_set(
    ENG_ERR_DEVICE,
    "the parameters are in %s memory, but the current device is %s; hint: engine.device('%s')",
    home, device->name, home);
}

eng_status params_whole(const eng_params *set)
{
  if (!set->divided) return ENG_OK;
  return error_set(ENG_ERR_STATE, "the gradients of these parameters are divided among ranks "
                                  "(zero=2 or 3), and this rank has only its own elements; "
                                  "hint: zero=1");
}

eng_status eng_params_stats(eng_record *record, eng_tensor_stats *stats, eng_params *set,
                            double scale, unsigned needs)
{
  ENG_TRY(params_alive(set));
  ENG_TRY(params_here(set, "gradient statistics"));
  ENG_TRY(params_whole(set));
  int m = params_spans(set);
  ENG_TRY(backend_current()->gradstats(set->span, m, needs, set->stats));
  for (int k = 0; k < m; k++) set->stats[k].relative_scale = set->span[k].scale;
  params_record(record, stats, set, set->stats, set->which, m, scale, needs);
  return ENG_OK;
}

void params_record(eng_record *record, eng_tensor_stats *of_member, const eng_params *set,
                   const eng_tensor_stats *of_span, const int32_t *which, int m, double scale,
                   unsigned needs)
{
  gradstats_sum(record, of_span, m, scale, needs);
  if (record->first_bad >= 0) record->first_bad = which[record->first_bad];
  for (int i = 0, k = 0; of_member && i < set->n; i++) {
    if (k < m && which[k] == i) of_member[i] = of_span[k++];
    else of_member[i] = (eng_tensor_stats){0};
  }
}

eng_status params_own_stats(eng_tensor_stats *stats, eng_params *set, unsigned needs)
{
  ENG_TRY(params_alive(set));
  ENG_TRY(params_here(set, "gradient statistics"));
  int m = params_own_spans(set);
  ENG_TRY(backend_current()->gradstats(set->span, m, needs, set->stats));
  memset(stats, 0, (size_t)set->n * sizeof *stats);
  for (int k = 0; k < m; k++) stats[set->which[k]] = set->stats[k];
  for (int i = 0; i < set->n; i++)
    stats[i].relative_scale = set->member[i].unscaled ? 1 : set->member[i].relative_scale;
  return ENG_OK;
}

void params_total(eng_record *record, eng_params *set, const eng_tensor_stats *stats, double scale,
                  unsigned needs)
{
  int m = 0;
  for (int i = 0; i < set->n; i++) {
    if (!set->member[i].has_gradient) continue;
    set->which[m] = i;
    set->stats[m++] = stats[i];
  }
  params_record(record, NULL, set, set->stats, set->which, m, scale, needs);
}

/// Allocates the f32 buffer for the unscaled values of low-precision gradients unless it exists.
static eng_status unscaled_buffer(eng_params *set)
{
  int32_t *dtype = set->which;   // unused between passes
  if (set->unscaled) return ENG_OK;
  for (int i = 0; i < set->n; i++) dtype[i] = set->gradient_dtype[i] == ENG_f32 ? -1 : ENG_f32;
  return flat_new(&set->unscaled, ARENA_GRADIENT, set, dtype, false);
}

eng_status eng_params_unscale(int *found_inf, eng_params *set, double factor)
{
  *found_inf = 0;
  ENG_TRY(params_alive(set));
  ENG_TRY(params_here(set, "unscaling"));
  ENG_TRY(params_whole(set));
  ENG_TRY(unscaled_buffer(set));
  int m = params_spans(set);
  for (int k = 0; k < m; k++) {
    const parameter *p = &set->member[set->which[k]];
    set->target[k] =
      p->gradient->dtype == ENG_f32 ? p->gradient->data : set->unscaled->part[p->index]->data;
  }
  ENG_TRY(backend_current()->unscale(set->span, m, factor, set->target, found_inf));
  for (int k = 0; k < m; k++) {
    parameter *p = &set->member[set->which[k]];
    if (p->gradient->dtype != ENG_f32) p->gradient = set->unscaled->part[p->index];
    p->unscaled = true;
  }
  return ENG_OK;
}

/// Returns the span of member `index` that this rank updates, or NULL if there is none.
static const param_span *span_of(eng_params *set, int index)
{
  int m = set->sharded ? params_own_spans(set) : params_spans(set);
  for (int k = 0; k < m; k++)
    if (set->which[k] == index) return &set->span[k];
  return NULL;
}

eng_status eng_params_true_gradient(int *has, const eng_tensor *into, eng_params *set, int index,
                                    double factor)
{
  *has = 0;
  ENG_TRY(params_alive(set));
  ENG_TRY(params_here(set, "an optimizer's update"));
  ENG_TRY(params_index(set, index));
  const parameter *p = &set->member[index];
  tensor *target;
  ENG_TRY(tensor_get(&target, into));
  FAIL_IF(target->dtype != ENG_f32 || target->store->space != set->space, ENG_ERR_DTYPE,
          "parameter %s: expected an f32 tensor in %s memory, got %s in %s memory", p->name,
          backend_of_space(set->space)->name, tensor_text(target),
          backend_of_space(target->store->space)->name);
  FAIL_IF(!tensor_same_shape(target, p->value), ENG_ERR_SHAPE,
          "parameter %s: expected a tensor of its shape %s, got %s", p->name,
          tensor_shape_text(p->value->ndim, p->value->shape),
          tensor_shape_text(target->ndim, target->shape));
  FAIL_IF(!tensor_contiguous(target), ENG_ERR_SHAPE,
          "parameter %s: expected a contiguous tensor, got a view %s", p->name,
          tensor_text(target));
  const param_span *span = span_of(set, index);
  if (!span) return ENG_OK;
  FAIL_IF(span->count != p->value->count, ENG_ERR_STATE,
          "parameter %s: this rank has only %lld of the %lld elements of the gradient; hint: "
          "zero=0", p->name, (long long)span->count, (long long)p->value->count);
  int found_inf;
  float *to = target->data;
  ENG_TRY(backend_current()->unscale(span, 1, factor, &to, &found_inf));
  target->store->writes++;
  *has = 1;
  return ENG_OK;
}

eng_status eng_params_relative_scale(eng_params *set, const double *relative)
{
  ENG_TRY(params_alive(set));
  for (int i = 0; i < set->n; i++) {
    if (!relative || (f64_is_finite(relative[i]) && relative[i] > 0)) continue;
    return error_set(
      ENG_ERR_VALUE,
      "parameter %s: expected the relative scale of its gradient to be positive and finite, got %g",
      set->member[i].name, relative[i]);
  }
  for (int i = 0; i < set->n; i++) {
    parameter *p = &set->member[i];
    p->next_relative_scale = relative ? relative[i] : 1;
    if (!p->has_gradient) p->relative_scale = p->next_relative_scale;
  }
  return ENG_OK;
}

// ---- a reference backward

eng_status eng_params_reference_begin(eng_params *set)
{
  ENG_TRY(params_alive(set));
  FAIL_IF(set->kept, ENG_ERR_STATE, "a reference backward pass has already begun; hint: "
          "call eng_params_reference_end first");
  for (int i = 0; i < set->n; i++) {
    FAIL_IF(set->member[i].unscaled, ENG_ERR_STATE,
            "a reference backward pass must begin before the gradients are unscaled");
    set->which[i] = ENG_f32;         // the dtypes of the reference buffer
  }
  if (!set->reference)
    ENG_TRY(flat_new(&set->reference, ARENA_GRADIENT, set, set->which, false));
  set->kept = calloc((size_t)set->n + 1, sizeof *set->kept);
  FAIL_IF(!set->kept, ENG_ERR_MEMORY, "out of memory for a reference backward pass");
  for (int i = 0; i < set->n; i++) {
    parameter *p = &set->member[i];
    set->kept[i] = p->has_gradient;
    p->has_gradient = false;
    p->gradient = set->reference->part[i];
  }
  return ENG_OK;
}

eng_status eng_params_reference_end(double *norm, double *norms, eng_params *set, double scale)
{
  *norm = 0;
  ENG_TRY(params_alive(set));
  FAIL_IF(!set->kept, ENG_ERR_STATE, "no reference backward pass has begun; hint: call "
          "eng_params_reference_begin first");
  int m = params_spans(set);
  eng_status status = params_here(set, "the end of a reference backward pass");
  if (status == ENG_OK)
    status = backend_current()->gradstats(set->span, m, ENG_NEED_NORM, set->stats);
  double sum_squares = 0;
  for (int i = 0; norms && i < set->n; i++) norms[i] = 0;
  for (int k = 0; k < m && status == ENG_OK; k++) {
    double size = sqrt(set->stats[k].sum_squares) / set->span[k].scale / scale;
    sum_squares += size * size;
    if (norms) norms[set->which[k]] = size;
  }
  *norm = sqrt(sum_squares);
  for (int i = 0; i < set->n; i++) {
    parameter *p = &set->member[i];
    p->has_gradient = set->kept[i];
    p->gradient = params_gradient_part(set, i);
  }
  free(set->kept);
  set->kept = NULL;
  return status;
}
