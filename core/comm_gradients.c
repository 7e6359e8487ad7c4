// Gradients reduced over ranks while backward goes on: a bucket's way in a step. See engine.h (eng_parallel) for the contract; comm_buckets.c
// makes the buckets.
//
// A bucket whose members are complete goes out: to every rank the piece it sums, with a byte for each member that says whether this rank
// had a gradient for it and what was wrong with it, so that everybody knows which rank brought the inf. The sums come back (without ZeRO)
// in the same format. Both exchanges move on whenever backward has finished an operation.
//
// Gradients in other memory than the host's go through a buffer there.
#include "comm_gradients.h"

#include "error.h"
#include "numerics.h"
#include "tape.h"
#include "transfer.h"
#include "wire.h"

#include <string.h>

enum { HAS_GRADIENT = 1, WIRE_OVERFLOW = 8 };

// ------------------------------------------------------------------ a bucket's way

/// The member's gradient in host memory.
static eng_status on_host(const void **values, eng_parallel *p, const tensor *gradient)
{
  *values = gradient->data;
  if (gradient->store->space == SPACE_HOST) return ENG_OK;
  *values = p->raw;
  return transfer_to_host(p->raw, gradient->store->space, gradient->data, gradient->count * eng_dtype_size(gradient->dtype));
}

static eng_status pack_member(eng_parallel *p, bucket *b, int k)
{
  const parameter *member = &p->set->member[b->member[k]];
  int ranks = b->comm->size, flags = 0;
  const void *values = NULL;
  if (member->has_gradient) {
    ENG_TRY(on_host(&values, p, member->gradient));
    flags = HAS_GRADIENT | wire_flags(values, b->dtype, member->value->count);
  }
  for (int rank = 0; rank < ranks; rank++) {
    int64_t from, at, n = bucket_overlap(p, b, k, rank, &from, &at);
    if (n == 0) continue;
    char *piece = b->out + b->begin[rank];
    int64_t count = bucket_piece(b, rank);
    if (values) {
      ENG_TRY(comm_pack(piece, b->wire, count, at, (const char *)values + from * eng_dtype_size(b->dtype), b->dtype, n, p->values));
      if (b->wire == ENG_f16 && b->dtype != ENG_f16 && !(flags & WIRE_INF) && wire_flags(piece + at * 2, ENG_f16, n) & WIRE_INF) flags |= WIRE_OVERFLOW;
    } else if (b->wire == ENG_e4m3) {
      memset(p->values, 0, (size_t)n * sizeof *p->values);
      ENG_TRY(comm_pack(piece, b->wire, count, at, p->values, ENG_f32, n, NULL));
    } else memset(piece + at * eng_dtype_size(b->wire), 0, (size_t)(n * eng_dtype_size(b->wire)));
  }
  for (int rank = 0; rank < ranks; rank++) b->out[b->begin[rank] + comm_packed_bytes(b->wire, bucket_piece(b, rank)) + k] = (char)flags;
  return ENG_OK;
}

static int tag_of(const eng_parallel *p, const bucket *b) { return COMM_TAG_BUCKET + (int)(b - p->buckets); }

/// All members are complete: the pieces go out.
static eng_status send_out(eng_parallel *p, bucket *b)
{
  if (p->first == 0) p->first = eng_clock();
  for (int k = 0; k < b->n; k++) ENG_TRY(pack_member(p, b, k));
  int n = 0, own = b->comm->rank;
  for (int peer = 0; peer < b->comm->size; peer++) {
    if (peer == own) continue;
    int64_t bytes = b->begin[peer + 1] - b->begin[peer];
    p->messages[n++] = (comm_message){b->out + b->begin[peer], bytes, peer, true};
    p->messages[n++] = (comm_message){b->in + b->bytes * peer, b->bytes, peer, false};
    p->facts.bytes += bytes;
  }
  memcpy(b->in + b->bytes * own, b->out + b->begin[own], (size_t)b->bytes);
  b->state = BUCKET_OUT;
  p->under_way++;
  return b->comm->transport && n > 0 ? b->comm->transport->start(&b->exchange, b->comm->group, p->messages, n, tag_of(p, b)) : ENG_OK;
}

/// The number among all ranks of a bucket's rank.
static int among_all(const eng_parallel *p, const bucket *b, int rank) { return b->comm == p->comm ? rank : p->holder[rank]; }

/// Everybody's pieces are here: the sum, rounded to the wire's format as the others will see it.
static eng_status sum_piece(eng_parallel *p, bucket *b)
{
  int ranks = b->comm->size;
  int64_t own = bucket_piece(b, b->comm->rank);
  for (int rank = 0; rank < ranks; rank++) {
    const char *piece = b->in + b->bytes * rank;
    float *values = p->values + own * rank;
    p->terms[rank] = values;
    if (b->wire == ENG_f32) p->terms[rank] = (const float *)piece;
    else ENG_TRY(comm_unpack(values, ENG_f32, own, piece, b->wire, own, 0, NULL));
    for (int k = 0; k < b->n; k++) p->brought[(int64_t)among_all(p, b, rank) * p->set->n + b->member[k]] = (uint8_t)piece[b->packed + k];
  }
  wire_sum(p->values, p->terms, ranks, own, (float)p->comm->size);
  return comm_pack(b->sum, b->wire, own, 0, p->values, ENG_f32, own, NULL);
}

static eng_status write_gradient(eng_parallel *p, const bucket *b, int k, int rank, const char *piece)
{
  int64_t from, at, n = bucket_overlap(p, b, k, rank, &from, &at);
  if (n == 0) return ENG_OK;
  const tensor *gradient = p->set->member[b->member[k]].gradient;
  int64_t size = eng_dtype_size(b->dtype);
  char *to = (char *)gradient->data + from * size;
  bool here = gradient->store->space == SPACE_HOST;
  ENG_TRY(comm_unpack(here ? to : p->raw, b->dtype, n, piece, b->wire, bucket_piece(b, rank), at, p->values));
  return here ? ENG_OK : transfer_from_host(gradient->store->space, to, p->raw, n * size);
}

/// The sums, the own one or all, become gradients.
static eng_status take_sums(eng_parallel *p, bucket *b)
{
  for (int k = 0; k < b->n; k++) {
    parameter *member = &p->set->member[b->member[k]];
    bool anyone = false;
    for (int rank = 0; rank < b->comm->size; rank++) anyone = anyone || eng_parallel_brought(p, among_all(p, b, rank), b->member[k]) & HAS_GRADIENT;
    if (!anyone) continue;
    member->has_gradient = true;
    for (int rank = 0; rank < b->comm->size; rank++) {
      if (rank == b->comm->rank) ENG_TRY(write_gradient(p, b, k, rank, b->sum));
      else if (!p->zero) ENG_TRY(write_gradient(p, b, k, rank, b->in + b->begin[rank]));
    }
  }
  b->state = BUCKET_DONE;
  p->under_way--;
  return ENG_OK;
}

/// Everybody's sums to everybody; they arrive where the terms were.
static eng_status send_back(eng_parallel *p, bucket *b)
{
  int n = 0;
  for (int peer = 0; peer < b->comm->size; peer++) {
    if (peer == b->comm->rank) continue;
    int64_t theirs = comm_packed_bytes(b->wire, bucket_piece(b, peer));
    if (b->packed > 0) p->messages[n++] = (comm_message){b->sum, b->packed, peer, true};
    if (theirs > 0) p->messages[n++] = (comm_message){b->in + b->begin[peer], theirs, peer, false};
    p->facts.bytes += b->packed;
  }
  b->state = BUCKET_BACK;
  return n > 0 ? b->comm->transport->start(&b->exchange, b->comm->group, p->messages, n, tag_of(p, b)) : ENG_OK;
}

/// Takes a bucket as far as it comes without waiting.
static eng_status move_on(eng_parallel *p, bucket *b)
{
  while (b->state == BUCKET_OUT || b->state == BUCKET_BACK) {
    bool arrived = true;
    if (b->exchange) ENG_TRY(b->comm->transport->test(&arrived, b->exchange));
    if (!arrived) return ENG_OK;
    b->exchange = NULL;
    if (b->state == BUCKET_BACK) return take_sums(p, b);
    ENG_TRY(sum_piece(p, b));
    if (p->zero) return take_sums(p, b);
    ENG_TRY(send_back(p, b));
  }
  return ENG_OK;
}

// ------------------------------------------------------------------ in step with backward

static eng_status member_complete(void *data, parameter *member)
{
  eng_parallel *p = data;
  if (member->set != p->set || p->complete[member->index]) return ENG_OK;
  p->complete[member->index] = true;
  bucket *b = &p->buckets[p->bucket_of[member->index]];
  return --b->left == 0 ? send_out(p, b) : ENG_OK;
}

static eng_status between_operations(void *data)
{
  eng_parallel *p = data;
  for (int k = 0; p->under_way > 0 && k < p->n_buckets; k++) ENG_TRY(move_on(p, &p->buckets[k]));
  return ENG_OK;
}

eng_status eng_parallel_begin(eng_parallel *p)
{
  if (p->set->freed) return error_set(ENG_ERR_STATE, "these parameters were freed");
  if (p->armed) return error_set(ENG_ERR_STATE, "the reduction over ranks has begun already");
  for (int k = 0; k < p->n_buckets; k++) {
    bucket *b = &p->buckets[k];
    if (p->set->gradients->part[b->member[0]]->dtype != b->dtype)
      return error_set(ENG_ERR_STATE, "the gradients' formats changed after they were shared out among ranks");
    b->state = BUCKET_FILLS;
    b->left = b->n;
  }
  memset(p->complete, 0, (size_t)p->set->n);
  p->first = 0;
  p->facts.bytes = 0;
  p->armed = true;
  tape_set_watch(&(tape_watch){member_complete, between_operations, p});
  return ENG_OK;
}

eng_status eng_parallel_finish(eng_parallel *p)
{
  if (!p->armed) return error_set(ENG_ERR_STATE, "no reduction over ranks has begun");
  tape_set_watch(NULL);
  double began = eng_clock();
  for (int k = 0; k < p->n_buckets; k++)
    if (p->buckets[k].state == BUCKET_FILLS) ENG_TRY(send_out(p, &p->buckets[k]));
  // Whatever comes first is treated first; only where nothing comes does this rank wait, for the oldest.
  while (p->under_way > 0) {
    int before = p->under_way, oldest = -1;
    for (int k = 0; k < p->n_buckets; k++) {
      ENG_TRY(move_on(p, &p->buckets[k]));
      if (oldest < 0 && p->buckets[k].exchange) oldest = k;
    }
    if (p->under_way < before || oldest < 0) continue;
    bucket *b = &p->buckets[oldest];
    bool done = false;
    for (int spin = 0; spin < 64 && !done; spin++) {
      ENG_TRY(b->comm->transport->test(&done, b->exchange));
    }
    if (done) {
      b->exchange = NULL;
      continue;
    }
    ENG_TRY(comm_pause(began, "the sum of gradients"));
  }
  double now = eng_clock();
  p->facts.waited = now - began;
  p->facts.seconds = now - (p->first ? p->first : began);
  p->armed = false;
  return ENG_OK;
}

void eng_parallel_cancel(eng_parallel *p)
{
  if (!p->armed) return;
  tape_set_watch(NULL);
  p->armed = false;
}

int eng_parallel_brought(const eng_parallel *p, int rank, int index)
{
  if (rank < 0 || rank >= p->comm->size || index < 0 || index >= p->set->n) return 0;
  return p->brought[(int64_t)rank * p->set->n + index];
}

void eng_parallel_last(eng_parallel_facts *out, const eng_parallel *p) { *out = p->facts; }

eng_status eng_parallel_reference(eng_parallel *p)
{
  for (int i = 0; i < p->set->n; i++) {
    parameter *member = &p->set->member[i];
    int64_t count = member->value->count;
    double has = member->has_gradient;
    ENG_TRY(comm_reduce_both(p->comm, &has, 0, 1, "the reference gradients"));
    if (has == 0 || count == 0) continue;
    const void *values;
    float *sum = p->values;        // as long as the largest member
    if (member->has_gradient) {
      ENG_TRY(on_host(&values, p, member->gradient));
      memcpy(sum, values, (size_t)count * sizeof *sum);
    } else memset(sum, 0, (size_t)count * sizeof *sum);
    for (int64_t k = 0; k < count; k++) sum[k] /= (float)p->comm->size;
    ENG_TRY(eng_comm_all_reduce(p->buckets[p->bucket_of[i]].comm, sum, count, ENG_f32, ENG_SUM));
    ENG_TRY(transfer_from_host(p->set->space, member->gradient->data, sum, count * (int64_t)sizeof *sum));
    member->has_gradient = true;
  }
  return ENG_OK;
}
