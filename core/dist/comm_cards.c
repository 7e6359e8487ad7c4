// Reduces a bucket whose gradients are on cards that exchange messages directly (comm_nccl.c).
// Pieces, comm dtypes and the order of sums are the same as in comm_gradients.c. The device packs,
// sums and unpacks (backend.h: wire_pack, wire_sum, wire_unpack). cards_send enqueues the packing
// behind backward's kernels. It enqueues the messages, sums and unpacking on the gradients' stream.
// The host waits only for message memory that other buckets occupy, and at the end of the pass.
// Called by comm_gradients.c and comm_parallel.c.
//
// At the end of a pass the ranks exchange their flags in a host message. For each bucket, the
// device reads a table, which follows the bucket's messages in memory. Owns the flags on the card
// and the host's copies of the tables.
#include "comm_gradients.h"

#include "device/backend.h"
#include "base/error.h"
#include "device/transfer.h"

#include <string.h>

/// Sizes of one bucket's table. The table lists, in this order, the pieces to sum, the runs to pack
/// and the runs to unpack.
typedef struct table_size { int64_t terms, runs, bytes; } table_size;

/// Computes the sizes of a bucket's table. bucket_runs gives the bound on runs.
static table_size table_of(const bucket *b)
{
  table_size t = {.terms = (b->comm->size + 1) / 2 * 2, .runs = b->n + b->comm->size};
  t.bytes = t.terms * (int64_t)sizeof(void *) + 2 * t.runs * (int64_t)sizeof(wire_run);
  return t;
}

static int64_t aligned(int64_t bytes) { return (bytes + COMM_ALIGN - 1) / COMM_ALIGN * COMM_ALIGN; }

int64_t cards_bytes(const bucket *b)
{ return b->begin[b->comm->size] + b->in_bytes + aligned(b->packed) + table_of(b).bytes; }

eng_status cards_new(eng_parallel *p)
{
  int64_t n = p->set->n, largest = 0;
  for (int k = 0; k < p->n_buckets; k++) {
    int64_t bytes = table_of(&p->buckets[k]).bytes;
    if (bytes > largest) largest = bytes;
  }
  p->table = heap_take(&p->memory, largest, 1);
  HEAP_TAKE(&p->memory, p->pass_flags, p->comm->size * n);
  p->flags_bytes = (n + 1) * (int64_t)sizeof *p->own_flags;
  FAIL_IF(p->memory.failed, ENG_ERR_MEMORY, "out of memory for gradient buckets");
  p->flags = arena_alloc_in(p->set->space, ARENA_MESSAGE, p->flags_bytes);
  return p->flags ? ENG_OK : ENG_ERR_MEMORY;
}

void cards_free(eng_parallel *p)
{
  if (p->flags && p->under_way == 0)
    arena_free_in(p->set->space, ARENA_MESSAGE, p->flags, p->flags_bytes);
  for (int k = 0; p->cards && k < p->n_buckets; k++)
    backend_of_space(p->set->space)->stream_forget(p->buckets[k].mark);
}

eng_status cards_begin(eng_parallel *p)
{
  memset(p->pass_flags, 0, (size_t)(p->comm->size * (int64_t)p->set->n));
  return transfer_zero(p->set->space, p->flags, p->flags_bytes);
}

// ------------------------------------------------------------------ in a step

static eng_status exchange(eng_parallel *p, const bucket *b, bool back)
{
  int n = bucket_messages(p, b, back);
  return comm_stream_exchange(STREAM_GRADIENTS, b->comm, p->messages, n, "the sum of gradients");
}

eng_status cards_send(eng_parallel *p, bucket *b)
{
  const backend *card = backend_of_space(p->set->space);
  void *stream = comm_stream_of(STREAM_GRADIENTS);
  int ranks = b->comm->size, own = b->comm->rank;
  table_size t = table_of(b);
  int64_t longest, longest_back;
  b->sum = b->in + b->in_bytes;
  char *there = b->sum + aligned(b->packed);
  const void **terms = (const void **)p->table;
  wire_run *out = (wire_run *)(terms + t.terms), *back = out + t.runs;
  for (int rank = 0; rank < ranks; rank++)
    terms[rank] = rank == own ? b->out + b->begin[own] : b->in + b->bytes * rank;
  int n_out = bucket_runs(out, &longest, p, b, false),
      n_back = bucket_runs(back, &longest_back, p, b, true);
  for (int k = 0; k < b->n; k++)
    if (p->set->member[b->member[k]].has_gradient)
      p->pass_flags[(int64_t)p->comm->rank * p->set->n + b->member[k]] = HAS_GRADIENT;
  ENG_TRY(card->move(there, p->table, t.bytes, COPY_TO_DEVICE));
  const wire_run *out_there = (const wire_run *)(there + t.terms * (int64_t)sizeof(void *));
  ENG_TRY(card->wire_pack(NULL, out_there, n_out, longest, b->comm_dtype, b->dtype, p->flags));
  ENG_TRY(card->stream_follow(stream));
  ENG_TRY(exchange(p, b, false));
  ENG_TRY(card->wire_sum(stream, b->sum, (const void *const *)there, ranks, bucket_piece(b, own),
                         b->comm_dtype, (float)p->comm->size));
  if (p->zero == 0) ENG_TRY(exchange(p, b, true));
  ENG_TRY(
    card->wire_unpack(stream, out_there + t.runs, n_back, longest_back, b->comm_dtype, b->dtype));
  return card->stream_mark(&b->mark, stream);
}

eng_status cards_done(bool *done, eng_parallel *p, bucket *b)
{ return backend_of_space(p->set->space)->stream_reached(done, b->mark); }

eng_status cards_exchange_flags(eng_parallel *p)
{
  int64_t n = p->set->n;
  uint8_t *own = p->pass_flags + (int64_t)p->comm->rank * n;
  void *stream = comm_stream_of(STREAM_GRADIENTS);
  ENG_TRY(backend_of_space(p->set->space)
            ->stream_move(stream, p->own_flags, p->flags, p->flags_bytes, COPY_TO_HOST));
  for (int i = 0; i < n; i++) own[i] |= (uint8_t)comm_flags(p->own_flags[i]);
  return eng_comm_all_gather(p->comm, p->pass_flags, own, n);
}
