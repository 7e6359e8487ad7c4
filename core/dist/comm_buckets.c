// The layout of gradients in buckets: which gradients travel together, how each bucket is cut into
// the ranks' pieces, and in which order buckets are sent. engine_ranks.h (eng_parallel) has the
// contract.
//
// The members (parameters) of the set go into buckets from the last to the first, which is the
// order in which backward completes them. Each rank sums one piece of a bucket, computes its
// statistics and, with ZeRO, updates it.
//
// All ranks send their buckets in the same order. Otherwise two ranks could deadlock, each with its
// message memory full of buckets that wait for buckets of the other rank. Owns the buckets' arrays.
// Called by the other files that include comm_gradients.h.
#include "comm_gradients.h"

#include "base/error.h"

#include <string.h>

int64_t bucket_overlap(const eng_parallel *p, const bucket *b, int k, int rank, int64_t *from,
                       int64_t *at)
{
  int64_t begin = b->cut[rank], end = b->cut[rank + 1], first = b->at[k],
          last = first + p->set->member[b->member[k]].value->count;
  int64_t low = first > begin ? first : begin, high = last < end ? last : end;
  *from = low - first;
  *at = low - begin;
  return high > low ? high - low : 0;
}

int bucket_runs(wire_run *runs, int64_t *longest, const eng_parallel *p, const bucket *b, bool back)
{
  int n_runs = 0, own = b->comm->rank;
  *longest = 0;
  for (int k = 0; k < b->n; k++) {
    const int i = b->member[k];
    const parameter *member = &p->set->member[i];
    for (int rank = 0; rank < b->comm->size; rank++) {
      int64_t from, at, n = bucket_overlap(p, b, k, rank, &from, &at);
      if (n == 0 || (back && p->zero && rank != own)) continue;
      char *piece = !back         ? b->out + b->begin[rank]
                    : rank == own ? b->sum
                                  : b->in + b->begin[rank];
      wire_run run = comm_run(piece, b->comm_dtype, bucket_piece(b, rank), at);
      run.n = n;
      run.slot = back ? k : i;
      if (!back) run.how = WIRE_RUN_FILL | (member->has_gradient ? WIRE_RUN_THERE : 0);
      if (back && p->zero == 2) {
        run.numbers = p->set->gradients->part[i]->data;
        if (p->had[i]) run.how = WIRE_RUN_ADD;
      } else if (back || member->has_gradient)
        run.numbers = (char *)member->gradient->data + from * eng_dtype_size(b->dtype);
      runs[n_runs++] = run;
      if (n > *longest) *longest = n;
    }
  }
  return n_runs;
}

void member_owned(int64_t *from, int64_t *to, const eng_parallel *p, int index, int rank)
{
  const bucket *b = &p->buckets[p->bucket_of[index]];
  int k = 0;
  while (b->member[k] != index) k++;
  int64_t at, n = bucket_overlap(p, b, k, rank, from, &at);
  if (n == 0) *from = 0;
  *to = *from + n;
}

/// Fills buckets, each of one dtype, with members in the order in which backward completes them.
/// With `apart`, takes the members that only some ranks hold, otherwise the members that all ranks
/// hold. The two kinds never share a bucket, so a bucket has the same index on all ranks of its
/// group.
static eng_status fill_group(eng_parallel *p, int64_t limit, int comm_dtype, bool apart)
{
  eng_params *set = p->set;
  int32_t open[ENG_DTYPE_COUNT];
  int64_t bytes[ENG_DTYPE_COUNT] = {0};
  memset(open, -1, sizeof open);
  for (int i = set->n - 1; i >= 0; i--) {
    if (p->apart[i] != apart) continue;
    int dtype = set->gradient_dtype[i];
    int64_t own = set->member[i].value->count * eng_dtype_size(dtype);
    if (open[dtype] < 0 || bytes[dtype] + own > limit) {
      open[dtype] = p->n_buckets++;
      bytes[dtype] = 0;
      bucket *b = &p->buckets[open[dtype]];
      *b = (bucket){.comm = apart ? p->holders : p->comm, .dtype = dtype};
      b->comm_dtype = b->comm->size > 1 ? comm_dtype_of(comm_dtype, dtype) : dtype;
      HEAP_TAKE(&p->memory, b->member, i + 1);
      HEAP_TAKE(&p->memory, b->at, i + 2);
      HEAP_TAKE(&p->memory, b->anyone, i + 1);
      FAIL_IF(p->memory.failed, ENG_ERR_MEMORY, "out of memory for gradient buckets");
    }
    bucket *b = &p->buckets[open[dtype]];
    b->member[b->n] = i;
    b->at[b->n + 1] = b->at[b->n] + comm_padded(set->member[i].value->count);
    b->n++;
    bytes[dtype] += own;
    p->bucket_of[i] = open[dtype];
  }
  return ENG_OK;
}

/// Cuts a bucket into pieces of nearly equal size. A cut that falls between two allowed positions
/// is rounded up or down, depending on `number`, the bucket's index. This spreads the work over the
/// ranks when pieces are smaller than the distance between allowed positions. `whole`: cuts are
/// allowed only between members.
static void cut(bucket *b, int number, int ranks, bool whole)
{
  enum { STEP = 4096, PARTS = 1024 };    // STEP: elements that gradstats sums at a time
  // A cut is rounded down if its distance from the lower position is at most most_down / PARTS of
  // the distance between the two positions. most_down varies with the bucket's index, in steps of
  // the golden ratio (633 / 1024).
  int64_t most_down = PARTS - (PARTS / 2 + (int64_t)number * 633) % PARTS;
  int64_t total = b->at[b->n];
  for (int rank = 0, k = 0; rank <= ranks; rank++) {
    int64_t ideal = total / ranks * rank + total % ranks * rank / ranks;
    while (k < b->n - 1 && b->at[k + 1] <= ideal) k++;
    int64_t inside = ideal - b->at[k], length = b->at[k + 1] - b->at[k],
            step = whole && length > 0 ? length : STEP, down = inside / step * step,
            up = down + step < length ? down + step : length;
    b->cut[rank] = rank == ranks
                     ? total
                     : b->at[k] + ((inside - down) * PARTS <= (up - down) * most_down ? down : up);
  }
}

static int64_t message_bytes(const bucket *b, int rank)
{
  return (comm_packed_bytes(b->comm_dtype, bucket_piece(b, rank)) + b->n + COMM_ALIGN - 1) /
         COMM_ALIGN * COMM_ALIGN;
}

eng_status bucket_cut(eng_parallel *p, bucket *b, int number)
{
  int ranks = b->comm->size;
  if (!b->cut) HEAP_TAKE(&p->memory, b->cut, ranks + 1);
  if (!b->begin) HEAP_TAKE(&p->memory, b->begin, ranks + 1);
  FAIL_IF(p->memory.failed, ENG_ERR_MEMORY, "out of memory for gradient buckets");
  cut(b, number, ranks, p->whole);
  for (int rank = 0; rank < ranks; rank++) {
    int64_t bytes = message_bytes(b, rank);
    b->begin[rank + 1] = b->begin[rank] + bytes;
    FAIL_IF(bytes > COMM_LARGEST, ENG_ERR_VALUE, "the gradients of %s%s need a message of "
            "%lld bytes, above the limit of 1 GiB; hint: %s", p->set->member[b->member[0]].name,
            b->n > 1 ? " and others in its bucket" : "", (long long)bytes,
            b->n > 1 ? "a smaller bucket" : "more ranks, or a comm dtype of fewer bytes");
  }
  b->packed = comm_packed_bytes(b->comm_dtype, bucket_piece(b, b->comm->rank));
  b->bytes = message_bytes(b, b->comm->rank);
  b->in_bytes = b->bytes * ranks > b->begin[ranks] ? b->bytes * ranks : b->begin[ranks];
  b->need = b->begin[ranks] + b->in_bytes + b->packed;
  return ENG_OK;
}

int bucket_messages(eng_parallel *p, const bucket *b, bool back)
{
  int n = 0;
  for (int peer = 0; peer < b->comm->size; peer++) {
    if (peer == b->comm->rank) continue;
    int64_t theirs = comm_packed_bytes(b->comm_dtype, bucket_piece(b, peer)), own = b->packed;
    if (!back && !p->cards) {         // flag bytes follow the packed piece
      theirs = b->begin[peer + 1] - b->begin[peer];
      own = b->bytes;
    }
    comm_message sent = {b->out + b->begin[peer], theirs, peer, true},
                 got = {b->in + b->bytes * peer, own, peer, false};
    if (back) {
      sent = (comm_message){b->sum, own, peer, true};
      got = (comm_message){b->in + b->begin[peer], theirs, peer, false};
    }
    if (sent.bytes > 0) p->messages[n++] = sent;
    if (got.bytes > 0) p->messages[n++] = got;
    p->facts.bytes += sent.bytes;
    p->facts.messages += !back || sent.bytes > 0;
  }
  return n;
}

int piece_messages(comm_message *messages, int64_t *sent, int64_t *bytes, const eng_parallel *p,
                   int index, char *data, int dtype, int64_t whole)
{
  const eng_comm *comm = p->buckets[p->bucket_of[index]].comm;
  int64_t size = eng_dtype_size(dtype), own[2], theirs[2];    // ranges of elements
  int n = 0;
  member_owned(&own[0], &own[1], p, index, comm->rank);
  for (int peer = 0; peer < comm->size; peer++) {
    if (peer == comm->rank) continue;
    member_owned(&theirs[0], &theirs[1], p, index, peer);
    for (int send = 1; send >= 0; send--) {
      const int64_t *range = send ? own : theirs;
      if (range[1] == range[0]) continue;
      int64_t from = whole ? 0 : range[0], length = (whole ? whole : range[1] - range[0]) * size;
      if (messages) messages[n] = (comm_message){data + from * size, length, peer, send};
      n++;
      *sent += send;
      *bytes += send * length;
    }
  }
  return n;
}

// The memory for messages holds the largest bucket and, in addition, the larger of two things: the
// second largest bucket, or three ordinary buckets. It never exceeds the size of all buckets. A
// bucket is ordinary unless it has a single member, of more than `limit` bytes. A block of `rooms`
// holds the gradients of any ordinary bucket.
void buckets_bounds(int64_t *messages, int64_t *room_block, const eng_parallel *p, int64_t limit)
{
  int64_t all = 0, largest = 0, second = 0, ordinary = 0, room = 0;
  for (int k = 0; k < p->n_buckets; k++) {
    const bucket *b = &p->buckets[k];
    int64_t need = pool_rounded(b->need), bytes = b->at[b->n] * eng_dtype_size(b->dtype);
    all += need;
    if (need > largest) {
      second = largest;
      largest = need;
    } else if (need > second) second = need;
    if (b->n == 1 && bytes > limit) continue;
    if (need > ordinary) ordinary = need;
    if (bytes > room) room = bytes;
  }
  int64_t bound = largest + (second > 3 * ordinary ? second : 3 * ordinary);
  *messages = bound < all ? bound : all;
  *room_block = room;
}

/// Sets the order in which buckets are sent: descending by the lowest index among a bucket's
/// members, which is the order in which backward completes the buckets. Ranks that hold the same
/// parameters have the same members in a bucket, so any two ranks send the buckets they share in
/// the same order.
static eng_status set_order(eng_parallel *p)
{
  HEAP_TAKE(&p->memory, p->order, p->n_buckets);
  FAIL_IF(p->memory.failed, ENG_ERR_MEMORY, "out of memory for gradient buckets");
  for (int k = 0; k < p->n_buckets; k++) {
    const bucket *b = &p->buckets[k];
    int at = k;
    for (; at > 0; at--) {
      const bucket *before = &p->buckets[p->order[at - 1]];
      if (before->member[before->n - 1] > b->member[b->n - 1]) break;
      p->order[at] = p->order[at - 1];
    }
    p->order[at] = k;
  }
  return ENG_OK;
}

eng_status buckets_fill(eng_parallel *p, const eng_parallel_options *options)
{
  p->whole = options->whole != 0;
  HEAP_TAKE(&p->memory, p->buckets, p->set->n);
  HEAP_TAKE(&p->memory, p->bucket_of, p->set->n);
  FAIL_IF(p->memory.failed, ENG_ERR_MEMORY, "out of memory for gradient buckets");
  ENG_TRY(fill_group(p, options->bucket, options->comm_dtype, false));
  if (p->holders) ENG_TRY(fill_group(p, options->bucket, options->comm_dtype, true));
  return set_order(p);
}

eng_status buckets_check(const eng_parallel_options *options)
{
  FAIL_IF(options->comm_dtype < 0 || options->comm_dtype >= ENG_COMM_DTYPES, ENG_ERR_VALUE,
          "gradient buckets: expected a comm dtype from 0 to 4 (ENG_COMM_*), got %d",
          options->comm_dtype);
  FAIL_IF(options->zero < 0 || options->zero > 3, ENG_ERR_VALUE,
          "zero: expected 0, 1, 2 or 3, got %d", options->zero);
  FAIL_IF(options->bucket < 1, ENG_ERR_VALUE, "gradient buckets: expected a size of 1 byte or "
          "more, got %lld", (long long)options->bucket);
  return ENG_OK;
}
