// Reduces gradients within one process: packs, sums and unpacks the numbers of several imaginary
// ranks with the functions and kernels of a real reduction, in host memory or on a card. Specs
// compare the card's kernels with the host's this way. See engine_ranks.h (eng_comm_dtype_reduce).
// Called by specs.
#include "comm.h"

#include "device/backend.h"
#include "base/error.h"
#include "device/wire.h"
#include "tensor/scratch.h"

#include <stdlib.h>
#include <string.h>

typedef struct reduction {
  const tensor *out, *x;
  int      ranks, comm_dtype;
  int64_t  n, count, bytes;          // n: numbers of each rank; count: n with padding; bytes: size
                                     // of a packed piece
  bool     add;
  int     *flags;
} reduction;

/// Lists a run for each rank and a run for the result. Their packed pieces are `apart` bytes apart.
static void list_runs(wire_run *runs, const reduction *r, char *pieces, int64_t apart)
{
  int64_t size = eng_dtype_size(r->x->dtype);
  for (int k = 0; k <= r->ranks; k++) {
    runs[k] = comm_run(pieces + apart * k, r->comm_dtype, r->count, 0);
    runs[k].n = r->n;
    runs[k].slot = k;
    runs[k].numbers = k < r->ranks ? (char *)r->x->data + r->n * size * k : r->out->data;
    runs[k].how = k < r->ranks ? WIRE_RUN_THERE | WIRE_RUN_FILL : r->add ? WIRE_RUN_ADD : 0;
  }
}

static eng_status on_host(reduction *r)
{
  int dtype = r->x->dtype, ranks = r->ranks;
  SCRATCH_IN(SPACE_HOST, char, pieces, r->bytes * (ranks + 1));
  SCRATCH_IN(SPACE_HOST, float, room, r->count * (ranks + 1));
  SCRATCH_IN(SPACE_HOST, wire_run, runs, ranks + 1);
  SCRATCH_IN(SPACE_HOST, const float *, terms, ranks);
  list_runs(runs, r, pieces, r->bytes);
  for (int k = 0; k < ranks; k++) {
    uint32_t flags = 0;
    ENG_TRY(comm_pack(&flags, &runs[k], r->comm_dtype, dtype, room));
    terms[k] = runs[k].packed;
    r->flags[k] = comm_flags(flags);
  }
  ENG_TRY(comm_sum(runs[ranks].packed, terms, ranks, r->count, r->comm_dtype, (float)ranks, room));
  return comm_unpack(&runs[ranks], r->comm_dtype, dtype, room);
}

static eng_status on_card(reduction *r)
{
  const backend *card = backend_of_space(r->x->store->space);
  int64_t packed = (r->bytes + 255) / 256 * 256, ranks = r->ranks;
  int64_t terms_bytes = (ranks + 1) / 2 * 16, runs_bytes = (ranks + 1) * (int64_t)sizeof(wire_run),
          flags_bytes = ranks * (int64_t)sizeof(uint32_t);
  int64_t bytes = (ranks + 1) * packed + terms_bytes + runs_bytes + flags_bytes;
  FAIL_IF(!card->wire_pack, ENG_ERR_DEVICE,
          "the device %s has no kernels for messages between ranks", card->name);
  SCRATCH_IN(r->x->store->space, char, there, bytes);
  char *table = there + (ranks + 1) * packed, *sum = there + ranks * packed;
  FREED char *staged = malloc((size_t)(terms_bytes + runs_bytes));
  FREED uint32_t *flags = calloc((size_t)ranks, sizeof *flags);
  FAIL_IF(!staged || !flags, ENG_ERR_MEMORY, "out of memory for the messages of %d ranks",
          r->ranks);
  const void **terms = (const void **)staged;
  wire_run *made = (wire_run *)(staged + terms_bytes);
  list_runs(made, r, there, packed);
  for (int k = 0; k < r->ranks; k++) terms[k] = made[k].packed;
  ENG_TRY(card->move(table, staged, terms_bytes + runs_bytes, COPY_TO_DEVICE));
  const wire_run *runs = (const wire_run *)(table + terms_bytes);
  void *flags_there = table + terms_bytes + runs_bytes;
  ENG_TRY(card->clear(flags_there, flags_bytes));
  ENG_TRY(
    card->wire_pack(NULL, runs, r->ranks, r->n, r->comm_dtype, r->x->dtype, flags_there));
  ENG_TRY(card->wire_sum(NULL, sum, (const void *const *)table, r->ranks, r->count, r->comm_dtype,
                         (float)r->ranks));
  ENG_TRY(card->wire_unpack(NULL, runs + r->ranks, 1, r->n, r->comm_dtype, r->x->dtype));
  ENG_TRY(card->move(flags, flags_there, flags_bytes, COPY_TO_HOST));
  for (int k = 0; k < r->ranks; k++) r->flags[k] = comm_flags(flags[k]);
  return ENG_OK;
}

eng_status eng_comm_dtype_reduce(const eng_tensor *out, int *flags, const eng_tensor *handle,
                                 int comm_dtype, bool add)
{
  tensor *to, *x;
  ENG_TRY(tensor_get(&to, out));
  ENG_TRY(tensor_get(&x, handle));
  FAIL_IF(comm_dtype < 0 || comm_dtype >= ENG_COMM_DTYPES, ENG_ERR_VALUE,
          "reduction of gradients: expected a comm dtype from 0 to 4 (ENG_COMM_*), got %d",
          comm_dtype);
  FAIL_IF(x->dtype != ENG_f32 && !dtype_is_low(x->dtype), ENG_ERR_DTYPE,
          "reduction of gradients: expected x in f32, f16 or bf16, got %s", tensor_text(x));
  FAIL_IF(x->ndim != 2 || to->ndim != 1 || x->shape[0] < 1 || x->shape[1] < 1 ||
          to->count != x->shape[1] || to->dtype != x->dtype ||
          to->store->space != x->store->space || !tensor_contiguous(x) || !tensor_contiguous(to),
          ENG_ERR_SHAPE, "reduction of gradients: expected contiguous x [ranks x n] and out [n] "
          "of one dtype and device, got x %s%s in %s memory and out %s%s in %s memory",
          tensor_text(x), tensor_contiguous(x) ? "" : " (not contiguous)",
          backend_of_space(x->store->space)->name, tensor_text(to),
          tensor_contiguous(to) ? "" : " (not contiguous)",
          backend_of_space(to->store->space)->name);
  reduction r = {.out = to,
                 .x = x,
                 .ranks = (int)x->shape[0],
                 .comm_dtype = comm_dtype_of(comm_dtype, x->dtype),
                 .n = x->shape[1],
                 .add = add,
                 .flags = flags};
  r.count = comm_padded(r.n);
  r.bytes = comm_packed_bytes(r.comm_dtype, r.count);
  to->store->writes++;
  return x->store->space == SPACE_HOST ? on_host(&r) : on_card(&r);
}
