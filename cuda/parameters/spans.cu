// The tables of the passes over all parameters; see spans.h. The passes own them. Called by
// gradstats.cu and optimizer.cu.
#include "spans.h"
#include "runtime/runtime.h"

#include <stdlib.h>
#include <string.h>

eng_status device_grow(device_room *room, int64_t bytes)
{
  if (bytes <= room->bytes) return ENG_OK;
  if (room->data) cuda_give(room->data, room->bytes);
  room->bytes = 0;
  room->data = cuda_take(bytes + bytes / 4);
  FAIL_IF(!room->data, ENG_ERR_MEMORY, "cuda: out of device memory for the tables of a pass over "
          "all parameters (%lld bytes); hint: a smaller batch or context, or accumulate=N",
          (long long)bytes);
  room->bytes = bytes + bytes / 4;
  // for compute-sanitizer's initcheck, which reports copies of bytes that were never written
  CUDA_TRY(cudaMemsetAsync(room->data, 0, (size_t)room->bytes, cuda_stream()));
  return ENG_OK;
}

static eng_status table_room(span_table *table, int n)
{
  if (n <= table->capacity) return ENG_OK;
  int capacity = n + n / 4 + 16;
  device_span *known = (device_span *)realloc(table->known, (size_t)capacity * sizeof *known);
  if (known) table->known = known;
  device_span *fresh = (device_span *)realloc(table->fresh, (size_t)capacity * sizeof *fresh);
  if (fresh) table->fresh = fresh;
  FAIL_IF(!known || !fresh, ENG_ERR_MEMORY,
          "out of memory on the host for a table of %d parameters", n);
  table->capacity = capacity;
  return ENG_OK;
}

eng_status spans_ready(span_table *table, const param_span *spans, int n, float *const *target)
{
  ENG_TRY(table_room(table, n));
  int64_t chunks = 0;
  memset(table->fresh, 0, (size_t)n * sizeof *table->fresh);   // clears padding for memcmp
  for (int k = 0; k < n; k++) {
    const param_span *s = &spans[k];
    device_span *d = &table->fresh[k];
    d->master = target ? target[k] : s->master;
    d->master_dtype = target ? ENG_f32 : s->master_dtype;
    d->compensation = s->compensation;
    d->first = s->first;
    d->index = s->index;
    d->low = s->low;
    d->gradient = s->gradient;
    d->count = s->count;
    d->scale = s->scale;
    d->low_dtype = s->low_dtype;
    d->gradient_dtype = s->gradient_dtype;
    d->moment_dtype = s->moment_dtype;
    d->group = s->group;
    d->starts = s->starts;
    d->aligned = is_aligned(d->master) && is_aligned(d->low) && is_aligned(d->gradient) &&
                 is_aligned(d->compensation);
    for (int m = 0; m < ENG_MOMENTS; m++) {
      d->moment[m] = s->moment[m];
      d->aligned = d->aligned && is_aligned(d->moment[m]);
    }
    d->first_chunk = (int32_t)chunks;
    d->chunks = (int32_t)parts(s->count, SPAN_CHUNK);
    chunks += d->chunks;
    FAIL_IF(chunks > INT32_MAX, ENG_ERR_VALUE,
            "cuda: expected at most 2^45 elements in all parameters together, got more in the "
            "first %d of %d parameters", k + 1, n);
  }
  if (n == table->n && memcmp(table->fresh, table->known, (size_t)n * sizeof *table->fresh) == 0)
    return ENG_OK;

  int64_t spans_bytes = n * (int64_t)sizeof(device_span),
          list_bytes = chunks * (int64_t)sizeof(int32_t);
  table->n = -1;   // marks the table as incomplete
  ENG_TRY(device_grow(&table->room, spans_bytes + list_bytes));
  table->span = (device_span *)table->room.data;
  table->chunk = (int32_t *)(table->span + n);
  int32_t *list = (int32_t *)malloc((size_t)list_bytes), *at = list;
  FAIL_IF(!list && chunks > 0, ENG_ERR_MEMORY,
          "out of memory on the host for a table of %d parameters", n);
  for (int k = 0; k < n; k++)
    for (int c = 0; c < table->fresh[k].chunks; c++) *at++ = k;
  eng_status status = cuda_stage(table->span, table->fresh, spans_bytes);
  if (status == ENG_OK) status = cuda_stage(table->chunk, list, list_bytes);
  free(list);
  ENG_TRY(status);
  device_span *known = table->known;
  table->known = table->fresh;
  table->fresh = known;
  table->chunks = chunks;
  table->n = n;
  return ENG_OK;
}
