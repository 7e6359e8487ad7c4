// Parameter sets: the weights of a model in one flat buffer, their gradients and low-precision
// copies in other flat buffers, and the formats of all three. A set owns its flat buffers and the
// tensors over them. engine.h has the contracts. Called by Lua, autograd/capture.c, fp8/, dist/ and
// optimizer.c.
#include "params_parted.h"

#include "base/error.h"
#include "device/transfer.h"

#include <stdlib.h>
#include <string.h>

// ---- creating and freeing a set

static eng_status check_member(tensor **out, const eng_tensor *handle, const char *name)
{
  ENG_TRY(error_prefix(tensor_get(out, handle), "parameter %s", name));
  const tensor *x = *out;
  FAIL_IF(x->parameter, ENG_ERR_VALUE, "parameter %s: this tensor %s is already parameter %s of "
          "another optimizer; hint: a second optimizer can share parameters with the first only if "
          "both have exactly the same parameters", name,
          tensor_text(x), x->parameter->name);
  FAIL_IF(x->dtype != ENG_f32 && x->dtype != ENG_bf16, ENG_ERR_DTYPE,
          "parameter %s: expected f32 or bf16 master weights, got %s; hint: keep the weights "
          "in f32; a precision recipe such as fp16 makes low-precision copies of them", name,
          tensor_text(x));
  FAIL_IF(x->node >= 0, ENG_ERR_VALUE, "parameter %s: expected a leaf, got the result %s of a "
          "recorded operation; hint: :keep() makes it a leaf", name, tensor_text(x));
  return ENG_OK;
}

static void set_discard(eng_params *set)
{
  eng_params_stats_forget(set);
  heap_free(&set->memory);
  free(set->kept);
  free(set->own);
  free(set);
}

static eng_params *set_allocate(int n, const char *const *names)
{
  eng_params *set = calloc(1, sizeof *set);
  if (!set) return NULL;
  heap *memory = &set->memory;
  set->n = n;
  set->references = 1;
  HEAP_TAKE(memory, set->member, n);
  HEAP_TAKE(memory, set->span, n);
  HEAP_TAKE(memory, set->which, n);
  HEAP_TAKE(memory, set->stats, n);
  HEAP_TAKE(memory, set->target, n);
  HEAP_TAKE(memory, set->gradient_dtype, n);
  HEAP_TAKE(memory, set->term_dtype, n);
  for (int i = 0; !memory->failed && i < n; i++) {
    set->member[i].set = set;
    set->member[i].index = i;
    set->gradient_dtype[i] = set->term_dtype[i] = ENG_f32;
    set->member[i].relative_scale = set->member[i].next_relative_scale = 1;
    set->member[i].name = heap_text(memory, names[i], (int64_t)strlen(names[i]));
  }
  if (!memory->failed) return set;
  set_discard(set);
  return NULL;
}

/// Copies the members' values, whatever their strides, into the flat buffer.
static eng_status copy_values(eng_params *set)
{
  for (int i = 0; i < set->n; i++)
    ENG_TRY(transfer_rows(set->masters->part[i]->data, set->member[i].value));
  return ENG_OK;
}

/// Points the members to their copies in the flat buffer and drops their gradients. The members
/// take the dtypes of the copies. Cannot fail.
static void adopt(eng_params *set)
{
  set->count = 0;
  for (int i = 0; i < set->n; i++) {
    tensor *x = set->member[i].value;
    tensor_drop(x->gradient);
    x->gradient = NULL;
    x->dtype = set->masters->part[i]->dtype;
    tensor_rehome(x, set->masters->part[i]);
    for (int64_t d = x->ndim - 1, stride = 1; d >= 0; stride *= x->shape[d], d--)
      x->stride[d] = stride;
    x->parameter = &set->member[i];
    set->masters->part[i] = x;
    set->count += x->count;
  }
}

void params_drop_derived(parameter *p)
{
  if (!p->derived) return;
  params_derived_freed(p);
  p->derived->free(p->derived);
  p->derived = NULL;
}

/// Points the members to their parts of the buffers. Clears gradients and drops derived copies.
static void link_parts(eng_params *set)
{
  for (int i = 0; i < set->n; i++) {
    parameter *p = &set->member[i];
    p->gradient = params_gradient_part(set, i);
    p->low = set->low ? set->low->part[i] : NULL;
    params_drop_gradient(p);
    params_drop_derived(p);
    if (!p->low) continue;
    p->low->parameter = p;
    p->low->requires_grad = p->value->requires_grad;
  }
}

eng_status eng_params_new(eng_params **out, const eng_tensor *tensors, const char *const *names,
                          int n)
{
  *out = NULL;
  flat_reclaim();
  FAIL_IF(n < 0, ENG_ERR_VALUE, "expected 0 or more parameters, got %d", n);
  FAIL_IF(n > 0 && (!tensors || !names), ENG_ERR_VALUE,
          "expected a list of %d tensors and a list of their names, got no %s", n,
          tensors ? "names" : "tensors");
  for (int i = 0; i < n; i++)
    FAIL_IF(!names[i], ENG_ERR_VALUE, "parameter number %d has no name (the first is number 0)", i);

  eng_params *set = set_allocate(n, names);
  FAIL_IF(!set, ENG_ERR_MEMORY, "out of memory for a set of %d parameters", n);
  eng_status status = ENG_OK;
  for (int i = 0; i < n && status == ENG_OK; i++) {
    parameter *p = &set->member[i];
    status = check_member(&p->value, &tensors[i], p->name);
    if (status != ENG_OK) break;
    set->which[i] = p->value->dtype;
    if (i == 0) set->space = p->value->store->space;
    if (p->value->store->space != set->space)
      status =
        error_set(ENG_ERR_DEVICE, "parameter %s: expected a tensor in %s memory, as parameter %s "
                  "is, got one in %s memory; hint: x:to('%s')", p->name,
                  backend_of_space(set->space)->name, set->member[0].name,
                  backend_of_space(p->value->store->space)->name,
                  backend_of_space(set->space)->name);
    for (int k = 0; k < i; k++)
      if (set->member[k].value == p->value)
        status =
          error_set(ENG_ERR_VALUE,
                    "parameters %s and %s are the same tensor %s; hint: list a shared weight once",
                    set->member[k].name, p->name, tensor_text(p->value));
  }
  // The allocation comes before any change of a tensor, so that a failure leaves the tensors
  // unchanged.
  if (status == ENG_OK) status = flat_new(&set->masters, ARENA_PARAMETER, set, set->which, false);
  if (status == ENG_OK) status = copy_values(set);
  if (status != ENG_OK) {
    flat_release(&set->masters);
    set_discard(set);
    return status;
  }
  adopt(set);
  link_parts(set);
  *out = set;
  return ENG_OK;
}

void params_release(eng_params *set) { if (--set->references == 0) set_discard(set); }

void eng_params_free(eng_params *set)
{
  if (!set || set->freed) return;
  set->freed = true;
  if (set->parted) params_forget_parts(set);
  for (int i = 0; i < set->n; i++) {
    parameter *p = &set->member[i];
    p->value->parameter = NULL;
    if (p->low) p->low->parameter = NULL;
    params_drop_derived(p);
    p->value = p->low = p->gradient = NULL;
    p->has_gradient = false;
  }
  flat_release(&set->masters);
  flat_release(&set->low);
  flat_release(&set->gradients);
  flat_release(&set->unscaled);
  flat_release(&set->reference);
  params_release(set);
}

// ---- formats

static bool same_formats(const flat_buffer *flat, const int32_t *dtype, int n)
{
  for (int i = 0; i < n; i++)
    if ((flat && flat->part[i] ? flat->part[i]->dtype : -1) != dtype[i]) return false;
  return true;
}

static eng_status check_format(const eng_params *set, int i, const char *what, int dtype)
{
  if (dtype == ENG_f32 || dtype_is_low(dtype)) return ENG_OK;
  return error_set(ENG_ERR_DTYPE, "parameter %s: expected %s in f32, f16 or bf16, got %s",
                   set->member[i].name, what, eng_dtype_name(dtype));
}

/// Returns the stored format of gradient i: f32 if `gradient` is NULL or `accumulates` is true;
/// otherwise gradient[i], the format of the terms that backward adds.
static int stored_dtype(const int32_t *gradient, bool accumulates, int i)
{ return !gradient || accumulates ? ENG_f32 : gradient[i]; }

static bool other_gradients(const eng_params *set, const int32_t *gradient, bool accumulates)
{
  for (int i = 0; i < set->n; i++)
    if (set->gradient_dtype[i] != stored_dtype(gradient, accumulates, i)) return true;
  return false;
}

/// Sets the error that `what` (gradients or weights) cannot change its format, because the option
/// zero=`zero` divides it among ranks.
static eng_status fixed_format(const char *what, const char *zero)
{
  return error_set(ENG_ERR_STATE, "these %s are divided among ranks (zero=%s) and cannot change "
                                  "their format; hint: create a new optimizer", what, zero);
}

/// Checks that gradients can change to these formats. Errors: STATE, with the reason.
static eng_status gradients_can_change(const eng_params *set, const int32_t *gradient,
                                       bool accumulates)
{
  FAIL_IF(set->kept, ENG_ERR_STATE, "the precision cannot change during a reference backward pass");
  return set->divided && other_gradients(set, gradient, accumulates)
           ? fixed_format("gradients", "2 or 3") : ENG_OK;
}

/// Sets the formats of gradients. If a format changes, drops the gradients' memory; the next
/// backward pass allocates it again.
static void renew_gradients(eng_params *set, const int32_t *gradient, bool accumulates)
{
  if (other_gradients(set, gradient, accumulates)) flat_release(&set->gradients);
  set->accumulates = accumulates;
  for (int i = 0; i < set->n; i++) {
    set->gradient_dtype[i] = stored_dtype(gradient, accumulates, i);
    set->term_dtype[i] = gradient ? gradient[i] : ENG_f32;
  }
  flat_release(&set->unscaled);
  link_parts(set);
}

/// Checks that the masters of a set can change their format. Errors: STATE, with the reason.
static eng_status masters_can_change(const eng_params *set)
{
  if (set->parted) return fixed_format("weights", "3");
  FAIL_IF(tensor_tape_length > 0, ENG_ERR_STATE, "master weights cannot change their format "
          "while the tape has operations; hint: change the precision between steps");
  for (int i = 0; i < set->n; i++)
    FAIL_IF(set->member[i].value->store->references > 1, ENG_ERR_STATE,
            "parameter %s: its format cannot change while a view of it exists; hint: free the "
            "view; a view made inside a step is freed when the step ends", set->member[i].name);
  return ENG_OK;
}

eng_status eng_params_masters(eng_params *set, const int32_t *dtype)
{
  ENG_TRY(params_alive(set));
  for (int i = 0; i < set->n; i++)
    FAIL_IF(dtype[i] != ENG_f32 && dtype[i] != ENG_bf16, ENG_ERR_DTYPE, "parameter %s: expected "
            "master weights in f32 or bf16, got %s", set->member[i].name, eng_dtype_name(dtype[i]));
  if (same_formats(set->masters, dtype, set->n)) return ENG_OK;
  ENG_TRY(masters_can_change(set));
  flat_buffer *fresh, *old = set->masters;
  ENG_TRY(flat_new(&fresh, ARENA_PARAMETER, set, dtype, false));
  eng_status status = ENG_OK;
  for (int i = 0; i < set->n && status == ENG_OK; i++)
    status = params_cast(fresh->part[i], set->member[i].value);
  if (status != ENG_OK) {
    flat_release(&fresh);
    return status;
  }
  set->masters = fresh;
  adopt(set);
  old->n = 0;   // keeps flat_release from dropping the members' tensors
  flat_release(&old);
  flat_release(&set->low);
  link_parts(set);
  return ENG_OK;
}

eng_status eng_params_precision(eng_params *set, const int32_t *low, const int32_t *gradient)
{
  ENG_TRY(params_alive(set));
  flat_reclaim();
  for (int i = 0; i < set->n; i++) {
    if (low) ENG_TRY(check_format(set, i, "weights for the forward pass", low[i]));
    if (gradient) ENG_TRY(check_format(set, i, "gradients", gradient[i]));
  }
  ENG_TRY(gradients_can_change(set, gradient, set->accumulates));
  // The allocation comes first, so that a failure leaves the set unchanged.
  flat_buffer *fresh_low = NULL;
  int32_t *wanted = set->which;   // unused between passes
  for (int i = 0; i < set->n; i++) {
    wanted[i] = low && low[i] != ENG_f32 ? low[i] : -1;
    FAIL_IF(wanted[i] >= 0 && set->member[i].value->dtype != ENG_f32, ENG_ERR_DTYPE,
            "parameter %s: its master is bf16, so expected f32 (no low-precision copy), got %s",
            set->member[i].name, eng_dtype_name(wanted[i]));
  }
  bool new_low = !same_formats(set->low, wanted, set->n);
  if (new_low && set->parted) return fixed_format("weights", "3");
  FAIL_IF(new_low && set->low && tensor_tape_length > 0, ENG_ERR_STATE,
          "low-precision weights cannot change their format while the tape has operations; "
          "hint: change the precision between steps");
  if (new_low) {
    ENG_TRY(flat_new(&fresh_low, ARENA_PARAMETER, set, wanted, false));
    flat_release(&set->low);
    set->low = fresh_low;
  }
  renew_gradients(set, gradient, set->accumulates);
  return new_low ? eng_params_refresh(set) : ENG_OK;
}

eng_status eng_params_accumulate(eng_params *set, bool on)
{
  ENG_TRY(params_alive(set));
  if (set->accumulates == on) return ENG_OK;
  ENG_TRY(gradients_can_change(set, set->term_dtype, on));
  renew_gradients(set, set->term_dtype, on);
  return ENG_OK;
}

eng_status eng_params_refresh(eng_params *set)
{
  ENG_TRY(params_alive(set));
  if (set->parted && !set->parted->whole) ENG_TRY(params_leave(set));
  for (int i = 0; i < set->n; i++) {
    parameter *p = &set->member[i];
    // ZeRO-3: a checkpoint's weights are written to this rank's parts, not through p->value, so the
    // derived copy cannot notice by itself that it is out of date
    if (set->parted && p->derived) p->derived->outdate(p->derived);
    if (p->low) ENG_TRY(params_round(p));
  }
  return ENG_OK;
}
