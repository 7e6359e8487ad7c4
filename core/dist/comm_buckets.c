// Which gradients travel together: the buckets of a parameter set whose gradients are reduced over ranks, how each is cut into the ranks'
// pieces, and the memory they go through. See engine.h (eng_parallel) for the contract; comm_gradients.c takes the buckets through a step.
//
// The members of a set are gathered into buckets, last ones first, as backward completes them. A rank's piece of every bucket is what it
// sums, what it computes statistics of and, with ZeRO-1, what it updates.
//
// Memory: what is under way lies in one block that holds a few buckets (`messages_pool`); where there is no room a bucket waits until
// messages have arrived. So that ranks do not wait for each other's, all send their buckets in one order. With ZeRO-2 what backward
// writes comes out of a pool as well, a room for each gradient that has begun.
//
// Owns the buckets and their memory, and the set's `own`.
#include "comm_gradients.h"

#include "base/error.h"

#include <stdlib.h>
#include <string.h>

int64_t bucket_overlap(const eng_parallel *p, const bucket *b, int k, int rank, int64_t *from, int64_t *at)
{
  int64_t begin = b->cut[rank], end = b->cut[rank + 1], first = b->at[k], last = first + p->set->member[b->member[k]].value->count;
  int64_t low = first > begin ? first : begin, high = last < end ? last : end;
  *from = low - first;
  *at = low - begin;
  return high > low ? high - low : 0;
}

/// Members in the order backward completes them, cut into buckets of one format each: those of all ranks, then those that stand apart, so
/// that buckets of one group have the same numbers on all its ranks.
static eng_status fill_group(eng_parallel *p, int64_t limit, int wire, bool apart)
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
      b->wire = b->comm->size > 1 ? comm_wire_dtype(wire, dtype) : dtype;
      b->member = calloc((size_t)i + 1, sizeof *b->member);
      b->at = calloc((size_t)i + 2, sizeof *b->at);
      b->anyone = calloc((size_t)i + 1, sizeof *b->anyone);
      if (!b->member || !b->at || !b->anyone) return error_set(ENG_ERR_MEMORY, "out of memory for buckets of gradients");
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

/// Where the pieces of a bucket begin: near equal shares. A share that ends between two places where a cut may be goes up or down as the
/// bucket's number has it, so that where shares are smaller than that other ranks get a piece of each bucket.
static void cut(bucket *b, int number, int ranks)
{
  enum { STEP = 4096, PARTS = 1024 };    // STEP: what gradstats sums at a time
  int64_t most_down = PARTS - (PARTS / 2 + (int64_t)number * 633) % PARTS;      // of the way between two places; 633 / 1024: the golden section
  int64_t total = b->at[b->n];
  for (int rank = 0, k = 0; rank <= ranks; rank++) {
    int64_t ideal = total / ranks * rank + total % ranks * rank / ranks;
    while (k < b->n - 1 && b->at[k + 1] <= ideal) k++;
    int64_t inside = ideal - b->at[k], length = b->at[k + 1] - b->at[k], down = inside / STEP * STEP, up = down + STEP < length ? down + STEP : length;
    b->cut[rank] = rank == ranks ? total : b->at[k] + ((inside - down) * PARTS <= (up - down) * most_down ? down : up);
  }
}

static int64_t message_bytes(const bucket *b, int rank)
{
  return (comm_packed_bytes(b->wire, bucket_piece(b, rank)) + b->n + COMM_ALIGN - 1) / COMM_ALIGN * COMM_ALIGN;
}

eng_status bucket_cut(bucket *b, int number)
{
  int ranks = b->comm->size;
  b->cut = calloc((size_t)ranks + 1, sizeof *b->cut);
  b->begin = calloc((size_t)ranks + 1, sizeof *b->begin);
  if (!b->cut || !b->begin) return error_set(ENG_ERR_MEMORY, "out of memory for buckets of gradients");
  cut(b, number, ranks);
  for (int rank = 0; rank < ranks; rank++) {
    int64_t bytes = message_bytes(b, rank);
    b->begin[rank + 1] = b->begin[rank] + bytes;
    if (bytes > COMM_LARGEST) return error_set(ENG_ERR_VALUE, "a bucket of gradients would send %lld bytes at once; hint: a smaller bucket", (long long)bytes);
  }
  b->packed = comm_packed_bytes(b->wire, bucket_piece(b, b->comm->rank));
  b->bytes = message_bytes(b, b->comm->rank);
  b->in_bytes = b->bytes * ranks > b->begin[ranks] ? b->bytes * ranks : b->begin[ranks];
  b->need = b->begin[ranks] + b->in_bytes + b->packed;
  return ENG_OK;
}

// Messages of the largest bucket and three ordinary ones, or the next largest, at once; a room as large as any ordinary bucket's.
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

static eng_status make_pools(eng_parallel *p, int64_t limit)
{
  int64_t messages, room;
  buckets_bounds(&messages, &room, p, limit);
  p->messages_pool = (pool){.space = p->cards ? p->set->space : SPACE_HOST, .arena = ARENA_MESSAGE, .block_bytes = messages, .most_blocks = 1};
  p->rooms = (pool){.space = p->set->space, .arena = ARENA_GRADIENT, .block_bytes = room};
  if (messages == 0) return ENG_OK;
  void *piece;
  ENG_TRY(pool_take(&piece, &p->messages_pool, 1));     // the block is there from now on, or this fails
  pool_give(&p->messages_pool, piece, 1);
  return ENG_OK;
}

static eng_status take_memory(eng_parallel *p, int64_t limit)
{
  int64_t size = p->comm->size, longest = 0, largest = 0;
  for (int k = 0; k < p->n_buckets; k++) {
    bucket *b = &p->buckets[k];
    ENG_TRY(bucket_cut(b, k));
    if (p->cards) b->need = cards_bytes(b);
    if (bucket_piece(b, b->comm->rank) > longest) longest = bucket_piece(b, b->comm->rank);
  }
  for (int i = 0; i < p->set->n; i++) {
    if (p->set->member[i].value->count > largest) largest = p->set->member[i].value->count;
    bucket *b = &p->buckets[p->bucket_of[i]];
    for (int k = 0; k < b->n; k++) {
      int64_t from, at, n = bucket_overlap(p, b, k, b->comm->rank, &from, &at);
      if (b->member[k] != i) continue;
      p->set->own[2 * i] = n ? from : 0;
      p->set->own[2 * i + 1] = n ? from + n : 0;
    }
  }
  ENG_TRY(make_pools(p, limit));
  p->n_values = !p->cards && size * longest > largest ? size * longest : largest;
  p->values = arena_alloc_in(SPACE_HOST, ARENA_MESSAGE, p->n_values * (int64_t)sizeof(float));
  if (!p->values) return ENG_ERR_MEMORY;
  if (p->set->space != SPACE_HOST) p->raw = malloc((size_t)(largest * (int64_t)sizeof(float)) + 1);
  p->messages = calloc(2 * (size_t)size, sizeof *p->messages);
  p->terms = calloc((size_t)size, sizeof *p->terms);
  p->brought = calloc((size_t)size, (size_t)p->set->n + 1);
  if (p->messages && p->terms && p->brought && (p->raw || p->set->space == SPACE_HOST)) return ENG_OK;
  return error_set(ENG_ERR_MEMORY, "out of memory for buckets of gradients");
}

/// The order in which buckets go out: those first whose lowest member comes last in the set, as backward completes them. Buckets of ranks that
/// hold the same parameters have the same members, so that any two ranks send those they have in common in one order.
static eng_status set_order(eng_parallel *p)
{
  p->order = calloc((size_t)p->n_buckets + 1, sizeof *p->order);
  if (!p->order) return error_set(ENG_ERR_MEMORY, "out of memory for buckets of gradients");
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
  size_t n = (size_t)p->set->n + 1;
  p->buckets = calloc(n, sizeof *p->buckets);
  p->bucket_of = calloc(n, sizeof *p->bucket_of);
  if (!p->buckets || !p->bucket_of) return error_set(ENG_ERR_MEMORY, "out of memory for buckets of gradients");
  ENG_TRY(fill_group(p, options->bucket, options->wire, false));
  if (p->holders) ENG_TRY(fill_group(p, options->bucket, options->wire, true));
  return set_order(p);
}

eng_status buckets_check(const eng_parallel_options *options)
{
  if (options->wire < 0 || options->wire >= ENG_WIRES) return error_set(ENG_ERR_VALUE, "there is no wire format number %d", options->wire);
  if (options->zero < 0 || options->zero > 2) return error_set(ENG_ERR_VALUE, "zero: expected 0, 1 or 2, got %d", options->zero);
  if (options->bucket < 1) return error_set(ENG_ERR_VALUE, "buckets of gradients: expected 1 byte or more, got %lld", (long long)options->bucket);
  return ENG_OK;
}

void buckets_free(eng_parallel *p)
{
  for (int k = 0; k < p->n_buckets; k++) {
    bucket *b = &p->buckets[k];
    free(b->member);
    free(b->at);
    free(b->cut);
    free(b->begin);
    free(b->anyone);
  }
  free(p->buckets);
  free(p->bucket_of);
  free(p->order);
}

void eng_parallel_free(eng_parallel *p)
{
  if (!p) return;
  eng_parallel_cancel(p);
  buckets_free(p);
  for (int i = 0; p->place && i < p->set->n; i++) tensor_drop(p->place[i]);
  cards_free(p);
  if (p->under_way == 0) {      // else messages still come and go there
    pool_free(&p->messages_pool);
    arena_free_in(SPACE_HOST, ARENA_MESSAGE, p->values, p->n_values * (int64_t)sizeof(float));
  }
  pool_free(&p->rooms);
  if (!p->zero) {      // with ZeRO the set stays shared out: its moments are
    free(p->set->own);
    p->set->own = NULL;
  }
  params_release(p->set);
  free(p->apart);
  free(p->holder);
  free(p->complete);
  free(p->brought);
  free(p->place);
  free(p->had);
  free(p->raw);
  free(p->messages);
  free(p->terms);
  free(p->numbers);
  free(p);
}

/// ZeRO-2: of the gradients only the own pieces stay.
static eng_status divide(eng_parallel *p)
{
  eng_params *set = p->set;
  p->place = calloc((size_t)set->n + 1, sizeof *p->place);
  p->had = calloc((size_t)set->n + 1, sizeof *p->had);
  if (!p->place || !p->had) return error_set(ENG_ERR_MEMORY, "out of memory for buckets of gradients");
  for (int i = 0; i < set->n; i++) {
    const tensor *value = set->member[i].value;
    ENG_TRY(tensor_wrap(&p->place[i], set->space, NULL, set->gradient_dtype[i], value->ndim, value->shape));
  }
  flat_buffer *own;
  ENG_TRY(flat_new_own(&own, ARENA_GRADIENT, set, set->gradient_dtype));
  params_divide(set, own);
  return ENG_OK;
}

/// Which parameters stand apart, and who holds them.
static eng_status meet_holders(eng_parallel *p, const eng_parallel_options *options)
{
  if (!options->apart || !options->holders) return ENG_OK;
  p->holders = options->holders;
  memcpy(p->apart, options->apart, (size_t)p->set->n);
  p->holder = calloc((size_t)p->holders->size, sizeof *p->holder);
  if (!p->holder) return error_set(ENG_ERR_MEMORY, "out of memory for %d ranks", p->holders->size);
  return eng_comm_all_gather(p->holders, p->holder, &p->comm->rank, sizeof *p->holder);
}

eng_status eng_parallel_new(eng_parallel **out, eng_params *set, eng_comm *comm, const eng_parallel_options *options)
{
  *out = NULL;
  if (!set || set->freed) return error_set(ENG_ERR_STATE, "there is no parameter set");
  if (set->own) return error_set(ENG_ERR_STATE, "these parameters are shared out among ranks already");
  ENG_TRY(buckets_check(options));
  if (set->kept) return error_set(ENG_ERR_STATE, "these parameters are in a reference backward");
  eng_parallel *p = calloc(1, sizeof *p);
  if (!p) return error_set(ENG_ERR_MEMORY, "out of memory for buckets of gradients");
  size_t n = (size_t)set->n + 1;
  p->set = set;
  p->comm = comm;
  set->references++;
  set->own = calloc(2 * n, sizeof *set->own);
  p->apart = calloc(n, sizeof *p->apart);
  p->complete = calloc(n, sizeof *p->complete);
  eng_status status = set->own && p->apart && p->complete ? meet_holders(p, options) : error_set(ENG_ERR_MEMORY, "out of memory for buckets of gradients");
  if (status == ENG_OK) status = comm_cards_meet(&p->cards, comm, set->space == SPACE_CUDA);
  if (status == ENG_OK) status = buckets_fill(p, options);
  if (status == ENG_OK) status = take_memory(p, options->bucket);
  if (status == ENG_OK && p->cards) status = cards_new(p);
  if (status == ENG_OK && options->zero == 2) status = divide(p);
  if (status != ENG_OK) {
    eng_parallel_free(p);
    return status;
  }
  p->facts.buckets = p->n_buckets;
  p->zero = options->zero;
  set->sharded = options->zero > 0;
  *out = p;
  return ENG_OK;
}

void eng_parallel_own(int64_t *from, int64_t *to, const eng_parallel *p, int index)
{
  *from = p->set->own[2 * index];
  *to = p->set->own[2 * index + 1];
}
