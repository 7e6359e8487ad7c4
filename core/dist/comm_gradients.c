// Reduces gradients over ranks while backward runs: the work on buckets during a training step.
// engine_ranks.h (eng_parallel) has the contract; comm_buckets.c defines the buckets.
//
// A bucket whose members are complete is sent when its turn comes: each rank receives the piece
// that it sums. One byte per member says whether the sender had a gradient for it, and whether this
// gradient had inf or nan, so that every rank knows which rank's gradient overflowed. Without ZeRO,
// each rank then sends its sums to the other ranks in the same comm dtype. Both exchanges advance
// after every operation of backward, and while backward waits for memory.
//
// With ZeRO-2 and ZeRO-3, the backward pass writes each gradient into temporary memory (`rooms`),
// which is released once the gradient is packed. The sums are added to this rank's pieces of the
// gradients.
//
// comm_cards.c reduces gradients on cards that exchange messages directly. Other gradients on a
// device pass through a host buffer. Called by Lua, comm_parallel.c and comm_predict.c.
#include "comm_gradients.h"

#include "base/error.h"
#include "autograd/backward.h"
#include "device/transfer.h"
#include "params/params_parted.h"

#include <string.h>

static const char SUM[] = "the sum of gradients";     // for error messages

// ------------------------------------------------------------------ sending and summing

/// Packs the gradients of a bucket into the messages to all ranks. The last bytes of a message are
/// the members' flags.
static eng_status pack_bucket(eng_parallel *p, bucket *b)
{
  int64_t longest, size = eng_dtype_size(b->dtype);
  int n = bucket_runs(p->table, &longest, p, b, false), space = p->set->space;
  for (int k = 0; k < b->n; k++) p->own_flags[b->member[k]] = 0;
  for (wire_run *run = p->table; n > 0; run++, n--) {
    if (space != SPACE_HOST && run->how & WIRE_RUN_THERE) {
      ENG_TRY(transfer_to_host(p->raw, space, run->numbers, run->n * size));
      run->numbers = p->raw;
    }
    ENG_TRY(comm_pack(&p->own_flags[run->slot], run, b->comm_dtype, b->dtype, p->values));
  }
  for (int rank = 0; rank < b->comm->size; rank++) {
    int64_t packed = comm_packed_bytes(b->comm_dtype, bucket_piece(b, rank));
    char *flags = b->out + b->begin[rank] + packed;
    memset(flags, 0, (size_t)(b->begin[rank + 1] - b->begin[rank] - packed));
    for (int k = 0; k < b->n; k++)
      if (p->set->member[b->member[k]].has_gradient)
        flags[k] = (char)(HAS_GRADIENT | comm_flags(p->own_flags[b->member[k]]));
  }
  return ENG_OK;
}

static int tag_of(const eng_parallel *p, const bucket *b)
{ return COMM_TAG_BUCKET + (int)(b - p->buckets); }

static eng_status advance(eng_parallel *p, double *since);

/// Takes the memory that a bucket needs for sending. While other buckets occupy all memory,
/// backward waits for their messages.
static eng_status take_memory(eng_parallel *p, bucket *b)
{
  double began = 0, since = 0;
  while (true) {
    void *memory;
    ENG_TRY(pool_take(&memory, &p->messages_pool, b->need));
    b->out = memory;
    if (memory) break;
    if (began == 0) began = since = eng_clock();
    ENG_TRY(advance(p, &since));
  }
  if (began > 0) p->facts.held += eng_clock() - began;
  b->in = b->out + b->begin[b->comm->size];
  b->sum = b->in + b->in_bytes;
  return ENG_OK;
}

static void bucket_done(eng_parallel *p, bucket *b)
{
  b->state = BUCKET_DONE;
  p->under_way--;
  pool_give(&p->messages_pool, b->out, b->need);
  b->out = b->in = b->sum = NULL;
}

/// ZeRO-2: releases the temporary memory of member i's gradient.
static void leave_room(eng_parallel *p, int i)
{
  parameter *member = &p->set->member[i];
  tensor *place = p->place[i];
  member->has_gradient = false;
  member->gradient = NULL;
  pool_give(&p->rooms, place->data, member_room(p->set, i));
  place->data = place->store->memory = NULL;
}

/// Sends the pieces of a bucket whose members are all complete.
static eng_status send_out(eng_parallel *p, bucket *b)
{
  if (p->first == 0) p->first = eng_clock();
  ENG_TRY(take_memory(p, b));
  if (p->cards) {
    b->state = BUCKET_OUT;
    p->under_way++;
    ENG_TRY(cards_send(p, b));
    // The memory may be reused: later kernels write to it only after the packing has read it.
    for (int k = 0; p->zero == 2 && k < b->n; k++) leave_room(p, b->member[k]);
    return ENG_OK;
  }
  ENG_TRY(pack_bucket(p, b));
  for (int k = 0; p->zero == 2 && k < b->n; k++) leave_room(p, b->member[k]);
  int own = b->comm->rank, n = bucket_messages(p, b, false);
  memcpy(b->in + b->bytes * own, b->out + b->begin[own], (size_t)b->bytes);
  b->state = BUCKET_OUT;
  p->under_way++;
  return b->comm->transport && n > 0
           ? comm_start(&b->exchange, b->comm, p->messages, n, tag_of(p, b))
           : ENG_OK;
}

/// Returns the rank in p->comm that has number `rank` in the bucket's group.
static int among_all(const eng_parallel *p, const bucket *b, int rank)
{ return b->comm == p->comm ? rank : p->holder[rank]; }

/// Sums this rank's piece over all ranks. Rounds the sum to the comm dtype, in which this rank
/// sends it to the other ranks.
static eng_status sum_piece(eng_parallel *p, bucket *b)
{
  int ranks = b->comm->size;
  int64_t own = bucket_piece(b, b->comm->rank);
  for (int rank = 0; rank < ranks; rank++) {
    const char *piece = b->in + b->bytes * rank;
    p->terms[rank] = (const float *)piece;
    for (int k = 0; k < b->n; k++) {
      uint8_t flags = (uint8_t)piece[b->packed + k];
      p->rank_flags[(int64_t)among_all(p, b, rank) * p->set->n + b->member[k]] |= flags;
      b->anyone[k] = (rank > 0 && b->anyone[k]) || flags & HAS_GRADIENT;
    }
  }
  return comm_sum(b->sum, p->terms, ranks, own, b->comm_dtype, (float)p->comm->size, p->values);
}

/// Writes the sums into the gradients that any rank had: with ZeRO only this rank's piece,
/// otherwise all pieces. With ZeRO-2, adds to a sum of earlier passes of this step.
static eng_status unpack_bucket(eng_parallel *p, const bucket *b)
{
  int64_t longest;
  int n = bucket_runs(p->table, &longest, p, b, true), space = p->set->space;
  bool here = space == SPACE_HOST;
  for (wire_run *run = p->table; n > 0; run++, n--) {
    void *gradient = run->numbers;
    int64_t bytes = run->n * eng_dtype_size(b->dtype);
    if (!b->anyone[run->slot]) continue;
    if (!here) run->numbers = p->raw;
    if (!here && run->how & WIRE_RUN_ADD)
      ENG_TRY(transfer_to_host(p->raw, space, gradient, bytes));
    ENG_TRY(comm_unpack(run, b->comm_dtype, b->dtype, p->values));
    if (!here) ENG_TRY(transfer_from_host(space, gradient, p->raw, bytes));
  }
  return ENG_OK;
}

static eng_status take_sums(eng_parallel *p, bucket *b)
{
  for (int k = 0; k < b->n; k++) {
    parameter *member = &p->set->member[b->member[k]];
    if (p->zero == 2) member->has_gradient = p->had[b->member[k]];
    if (b->anyone[k]) member->has_gradient = true;
  }
  ENG_TRY(unpack_bucket(p, b));
  bucket_done(p, b);
  return ENG_OK;
}

/// With gradients on cards: exchanges the ranks' flags of a pass, once all buckets are done, and
/// sets has_gradient of the members.
static eng_status read_flags(eng_parallel *p)
{
  int64_t n = p->set->n;
  ENG_TRY(cards_exchange_flags(p));
  for (int64_t k = 0; k < p->comm->size * n; k++) p->rank_flags[k] |= p->pass_flags[k];
  for (int i = 0; i < n; i++) {
    const bucket *b = &p->buckets[p->bucket_of[i]];
    bool anyone = p->zero == 2 && p->had[i];
    for (int rank = 0; rank < b->comm->size; rank++)
      anyone = anyone || p->pass_flags[among_all(p, b, rank) * n + i] & HAS_GRADIENT;
    if (anyone || p->zero == 2) p->set->member[i].has_gradient = anyone;
  }
  return ENG_OK;
}

/// Sends this rank's sums to the other ranks and receives the sums of the other ranks. Reuses the
/// buffers of received gradients, which have already been summed.
static eng_status send_back(eng_parallel *p, bucket *b)
{
  int n = bucket_messages(p, b, true);
  b->state = BUCKET_BACK;
  return n > 0 ? comm_start(&b->exchange, b->comm, p->messages, n, tag_of(p, b)) : ENG_OK;
}

/// Advances a bucket as far as possible without waiting.
static eng_status move_on(eng_parallel *p, bucket *b)
{
  bool done = false;
  if (p->cards && b->state == BUCKET_OUT) {
    ENG_TRY(cards_done(&done, p, b));
    if (!done) return ENG_OK;
    p->arrived++;
    bucket_done(p, b);
  }
  while (b->state == BUCKET_OUT || b->state == BUCKET_BACK) {
    bool arrived;
    ENG_TRY(comm_test(&arrived, b->comm, b->exchange, SUM));
    if (!arrived) return ENG_OK;
    p->arrived++;
    b->exchange = NULL;
    if (b->state == BUCKET_BACK) return take_sums(p, b);
    ENG_TRY(sum_piece(p, b));
    if (p->zero) return take_sums(p, b);
    ENG_TRY(send_back(p, b));
  }
  return ENG_OK;
}

// ------------------------------------------------------------------ during backward

/// Advances all buckets in flight.
static eng_status progress(void *parallel)
{
  eng_parallel *p = parallel;
  for (int k = 0; p->under_way > 0 && k < p->n_buckets; k++) ENG_TRY(move_on(p, &p->buckets[k]));
  return ENG_OK;
}

/// The body of a loop that waits for buckets: advances the buckets, or pauses if no message has
/// arrived. *since: the time at which the loop began or an exchange last completed.
static eng_status advance(eng_parallel *p, double *since)
{
  int64_t before = p->arrived;
  ENG_TRY(progress(p));
  if (p->arrived == before) return comm_pause(since, SUM);
  *since = eng_clock();
  return ENG_OK;
}

/// Sends complete buckets in order, up to the first bucket that is not complete.
static eng_status send_complete(eng_parallel *p)
{
  while (p->next < p->n_buckets && p->buckets[p->order[p->next]].left == 0)
    ENG_TRY(send_out(p, &p->buckets[p->order[p->next++]]));
  return ENG_OK;
}

static void note_complete(eng_parallel *p, int index)
{
  if (p->complete[index]) return;
  p->complete[index] = true;
  p->buckets[p->bucket_of[index]].left--;
  if (p->alone && p->zero == 2) leave_room(p, index);
}

/// Begins a pass. Members that the pass does not reach are complete from the start.
static eng_status pass_begins(void *data)
{
  eng_parallel *p = data;
  for (int i = 0; i < p->set->n; i++)
    if (!p->set->member[i].expected) note_complete(p, i);
  return p->alone ? ENG_OK : send_complete(p);
}

static eng_status member_complete(void *data, parameter *member)
{
  eng_parallel *p = data;
  if (member->set != p->set) return ENG_OK;
  note_complete(p, member->index);
  return p->alone ? ENG_OK : send_complete(p);
}

/// ZeRO-2: provides the memory for a gradient that backward is about to write.
static eng_status member_begins(void *data, parameter *member)
{
  eng_parallel *p = data;
  if (member->set != p->set) return params_gradients(member->set);
  tensor *place = p->place[member->index];
  ENG_TRY(pool_take(&place->data, &p->rooms, member_room(p->set, member->index)));
  place->store->memory = place->data;
  member->gradient = place;
  return ENG_OK;
}

eng_status eng_parallel_begin(eng_parallel *p, int pass)
{
  eng_params *set = p->set;
  ENG_TRY(params_alive(set));
  FAIL_IF(p->broken, ENG_ERR_STATE, "a step failed while gradients were in flight between ranks: "
          "this process cannot continue training; hint: start the job again");
  FAIL_IF(p->armed, ENG_ERR_STATE, "the reduction of this step over ranks has already "
          "begun; hint: finish or cancel it first (eng_parallel_finish, eng_parallel_cancel)");
  FAIL_IF(pass == ENG_PASS_MORE && p->zero < 2, ENG_ERR_STATE,
          "ENG_PASS_MORE needs zero=2 or 3, got zero=%d, with which gradients are reduced once a "
          "step; hint: ENG_PASS_FIRST", p->zero);
  for (int k = 0; k < p->n_buckets; k++) {
    bucket *b = &p->buckets[k];
    FAIL_IF(set->gradient_dtype[b->member[0]] != b->dtype, ENG_ERR_STATE,
            "the dtypes of gradients have changed since their reduction over ranks was set up; "
            "hint: create a new optimizer");
    b->state = BUCKET_FILLS;
    b->left = b->n;
  }
  if (p->zero < 2) ENG_TRY(params_gradients(set));
  memset(p->complete, 0, (size_t)set->n);
  for (int i = 0; p->zero == 2 && i < set->n; i++) {
    p->had[i] = set->member[i].has_gradient;
    set->member[i].has_gradient = false;
  }
  p->next = 0;
  p->first = 0;
  p->alone = pass == ENG_PASS_ALONE;
  if (pass == ENG_PASS_FIRST) {
    p->facts = (eng_parallel_facts){.buckets = p->n_buckets};
    memset(p->rank_flags, 0, (size_t)(p->comm->size * (int64_t)set->n));
  }
  if (p->cards) ENG_TRY(cards_begin(p));
  p->armed = true;
  comm_meanwhile(progress, p);
  backward_set_watch(&(backward_watch){pass_begins, member_complete, progress,
                                       p->zero == 2 ? member_begins : NULL, p});
  return ENG_OK;
}

/// ZeRO-2: drops the gradients that backward has written and no bucket has sent.
static void leave_rooms(eng_parallel *p)
{
  // the members of a freed set have no tensors, and so no sizes
  for (int k = 0; p->zero == 2 && !p->set->freed && k < p->n_buckets; k++) {
    const bucket *b = &p->buckets[k];
    for (int m = 0; b->state == BUCKET_FILLS && m < b->n; m++) leave_room(p, b->member[m]);
  }
}

eng_status eng_parallel_finish(eng_parallel *p)
{
  FAIL_IF(!p->armed, ENG_ERR_STATE,
          "no reduction over ranks has begun; hint: call eng_parallel_begin first");
  backward_set_watch(NULL);
  comm_meanwhile(NULL, NULL);
  double began = eng_clock(), since = began;
  if (p->alone) {
    eng_parallel_cancel(p);
    for (int i = 0; p->zero == 2 && i < p->set->n; i++) p->set->member[i].has_gradient = p->had[i];
    return ENG_OK;
  }
  for (int k = 0; k < p->n_buckets; k++) p->buckets[k].left = 0;
  ENG_TRY(send_complete(p));
  if (p->cards) ENG_TRY(comm_stream_wait(STREAM_GRADIENTS, SUM));
  while (p->under_way > 0) ENG_TRY(advance(p, &since));
  if (p->cards) ENG_TRY(read_flags(p));
  double now = eng_clock();
  if (p->set->parted) {
    p->facts.weight_messages += p->brought.messages;
    p->facts.weight_bytes += p->brought.bytes;
    p->facts.weights += p->brought.seconds;
    p->facts.weight_exchanges += p->brought.exchanges;
    p->facts.weights_ahead += p->set->parted->used_ahead;
    p->set->parted->used_ahead = 0;
    p->facts.weights_memory = parted_kept(p->set, p->set->parted) + p->set->parted->most;
    memset(&p->brought, 0, sizeof p->brought);
  }
  p->facts.waited += now - began;
  p->facts.seconds += now - (p->first ? p->first : began);
  p->armed = false;
  return ENG_OK;
}

void eng_parallel_cancel(eng_parallel *p)
{
  if (!p->armed) return;
  backward_set_watch(NULL);
  comm_meanwhile(NULL, NULL);
  p->armed = false;
  p->broken = p->broken || p->under_way > 0;
  leave_rooms(p);
}

int eng_parallel_flags(const eng_parallel *p, int rank, int index)
{
  if (rank < 0 || rank >= p->comm->size || index < 0 || index >= p->set->n) return 0;
  return p->rank_flags[(int64_t)rank * p->set->n + index];
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
    float *sum = p->values;        // long enough for the largest member
    const int64_t bytes = count * (int64_t)sizeof *sum;
    if (member->has_gradient)
      ENG_TRY(transfer_to_host(sum, p->set->space, member->gradient->data, bytes));
    else memset(sum, 0, (size_t)bytes);
    for (int64_t k = 0; k < count; k++) sum[k] /= (float)p->comm->size;
    ENG_TRY(eng_comm_all_reduce(p->buckets[p->bucket_of[i]].comm, sum, count, ENG_f32, ENG_SUM));
    ENG_TRY(transfer_from_host(p->set->space, member->gradient->data, sum, bytes));
    member->has_gradient = true;
  }
  return ENG_OK;
}
