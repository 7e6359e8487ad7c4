// Flat buffers: one allocation divided into a tensor per parameter, for weights, gradients and
// moments. A released buffer waits in a list while a view uses it or the tape has operations. Owns
// the list. Called by this folder and dist/.
#include "params.h"

#include "base/error.h"

#include <stdlib.h>

enum { PART_ALIGNMENT = 64 };   // bytes: a cache line, and the widest vector

static flat_buffer *waiting;

static bool in_use(const flat_buffer *flat)
{
  for (int i = 0; i < flat->n; i++)
    if (flat->part[i] && flat->part[i]->store->references > 1) return true;
  return false;
}

void flat_reclaim(void)
{
  if (!waiting || tensor_tape_length > 0) return;
  flat_buffer **at = &waiting;
  while (*at) {
    flat_buffer *flat = *at;
    if (in_use(flat)) {
      at = &flat->next;
      continue;
    }
    *at = flat->next;
    for (int i = 0; i < flat->n; i++) tensor_drop(flat->part[i]);
    arena_free_in(flat->space, flat->arena, flat->memory, flat->bytes);
    free(flat);
  }
}

void flat_release(flat_buffer **place)
{
  flat_buffer *flat = *place;
  if (!flat) return;
  *place = NULL;
  flat->next = waiting;
  waiting = flat;
  flat_reclaim();
}

int64_t params_part_bytes(int64_t count, int dtype)
{
  if (dtype < 0) return 0;
  return (count * eng_dtype_size(dtype) + PART_ALIGNMENT - 1) / PART_ALIGNMENT * PART_ALIGNMENT;
}

eng_status flat_new(flat_buffer **out, arena_id arena, const eng_params *set, const int32_t *dtype,
                    bool own)
{
  int64_t bytes = 0;
  bool empty = true;
  *out = NULL;
  for (int i = 0; i < set->n; i++) {
    empty = empty && dtype[i] < 0;
    bytes += params_part_bytes(own ? set->own[2 * i + 1] - set->own[2 * i]
                                   : set->member[i].value->count, dtype[i]);
  }
  if (empty) return ENG_OK;
  flat_buffer *flat = calloc(1, sizeof *flat + (size_t)set->n * sizeof flat->part[0]);
  FAIL_IF(!flat, ENG_ERR_MEMORY, "out of memory for a table of %d parameters", set->n);
  flat->space = set->space;
  flat->arena = arena;
  flat->bytes = bytes;
  flat->n = set->n;
  char *at = flat->memory = arena_alloc_in(set->space, arena, bytes);
  eng_status status = at ? ENG_OK : ENG_ERR_MEMORY;
  for (int i = 0; i < set->n && status == ENG_OK; i++) {
    const tensor *value = set->member[i].value;
    int64_t count = own ? set->own[2 * i + 1] - set->own[2 * i] : value->count;
    if (dtype[i] < 0) continue;
    status = tensor_wrap(&flat->part[i], set->space, at, dtype[i], own ? 1 : value->ndim,
                         own ? &count : value->shape);
    at += params_part_bytes(count, dtype[i]);
  }
  if (status == ENG_OK) *out = flat;
  else flat_release(&flat);
  return status;
}
