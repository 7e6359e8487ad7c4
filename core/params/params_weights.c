// The weights of a set's members: low-precision copies and their rounding, the elements that this
// rank owns, sizes and checksum. Called by the other files of this folder, autograd/, fp8/, dist/
// and Lua.
#include "params_parted.h"

#include "base/error.h"
#include "device/transfer.h"

#include <stdlib.h>

// ---- checks

eng_status params_alive(const eng_params *set)
{
  FAIL_IF(!set, ENG_ERR_STATE, "expected a parameter set, got none");
  FAIL_IF(set->freed, ENG_ERR_STATE, "the parameter set was freed, with its tensors; hint: make "
          "the model again, and then its optimizer");
  return ENG_OK;
}

eng_status params_index(const eng_params *set, int index)
{
  if (index >= 0 && index < set->n) return ENG_OK;
  return error_set(ENG_ERR_VALUE, "expected a parameter index from 0 to %d, got %d", set->n - 1,
                   index);
}

bool params_fetched_on_use(const parameter *p)
{
  const params_parted *q = p->set->parted;
  return q && !q->whole && q->unit_of[p->index] >= 0;
}

bool params_owns(const parameter *p)
{
  const int64_t *own = p->set->own + 2 * p->index;
  return own[1] - own[0] == p->value->count;
}

// ---- low-precision weights

eng_status params_cast(tensor *to, tensor *from)
{
  const int space = from->store->space;
  const backend *current = backend_current(),
                *device = space == current->space ? current : backend_of_space(space);
  op_call c = {.op = ENG_OP_cast, .n_in = 1, .n_out = 1, .in = {from}, .out = {to},
               .cast = {.dtype = to->dtype}};
  return from->count > 0 ? device->kernel[c.op](&c) : ENG_OK;
}

/// Returns the elements [from, to) of a contiguous tensor as a tensor of one dimension.
static tensor narrowed(const tensor *x, int64_t from, int64_t to)
{
  tensor part = *x;
  part.data = (char *)x->data + from * eng_dtype_size(x->dtype);
  part.ndim = part.stride[0] = 1;
  part.count = part.shape[0] = to - from;
  return part;
}

eng_status params_round(parameter *p)
{
  const int64_t all[2] = {0, p->value->count};
  const int64_t *part = params_fetched_on_use(p) ? p->set->own + 2 * p->index : all;
  tensor from = narrowed(p->value, part[0], part[1]), to = narrowed(p->low, part[0], part[1]);
  ENG_TRY(params_cast(&to, &from));
  p->low->store->writes++;
  p->seen = p->value->store->writes;
  return ENG_OK;
}

eng_status params_low(tensor **out, parameter *p)
{
  *out = p->low;
  return p->seen == p->value->store->writes ? ENG_OK : params_round(p);
}

eng_status params_round_written(eng_params *set)
{
  tensor *low;
  for (int i = 0; i < set->n; i++)
    if (set->member[i].low) ENG_TRY(params_low(&low, &set->member[i]));
  return ENG_OK;
}

eng_status eng_params_low(eng_tensor *out, eng_params *set, int index)
{
  *out = (eng_tensor){0, 0};
  ENG_TRY(params_alive(set));
  ENG_TRY(params_index(set, index));
  tensor *low;
  if (!set->member[index].low) return ENG_OK;
  ENG_TRY(params_low(&low, &set->member[index]));
  *out = tensor_handle(low);
  return ENG_OK;
}

void params_written(parameter *p)
{
  if (p->low) p->low->store->writes++;
  if (p->seen == p->value->store->writes) p->seen++;
  p->value->store->writes++;
}

// ---- sizes and checksum

void eng_params_bytes(int64_t bytes[4], const eng_params *set)
{
  const flat_buffer *flat[3] = {set->masters, set->low, set->gradients};
  for (int k = 0; k < 3; k++) bytes[k] = flat[k] ? flat[k]->bytes : 0;
  for (int i = 0; !set->gradients && !set->freed && i < set->n; i++)
    bytes[2] += params_part_bytes(set->member[i].value->count, set->gradient_dtype[i]);
  bytes[3] = 0;
  for (int i = 0; i < set->n; i++) {
    const params_derived *derived = set->member[i].derived;
    tensor *x[PARAMS_DERIVED];
    for (int k = derived ? derived->tensors(x, derived) - 1 : -1; k >= 0; k--)
      bytes[3] += params_part_bytes(x[k]->count, x[k]->dtype);
  }
}

int64_t eng_params_count(const eng_params *set) { return set->count; }

uint64_t eng_params_checksum_of(const eng_params *set, const uint8_t *which, int value)
{
  FREED uint64_t *sum = malloc((size_t)(set->n + 1) * sizeof *sum);
  int n = 0;
  bool good = sum != NULL;
  for (int i = 0; i < set->n && !set->freed && good; i++) {
    if (which && which[i] != value) continue;
    const tensor *x = set->member[i].value;
    good = !x->store->closed &&
           transfer_checksum(&sum[n++], set->space, x->data,
                             x->count * eng_dtype_size(x->dtype)) == ENG_OK;
  }
  return good ? eng_hash64(sum, n * (int64_t)sizeof *sum) : 0;
}
