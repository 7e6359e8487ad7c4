// A parameter set whose gradients are reduced over ranks: how it is created, gets memory and is
// freed. engine_ranks.h (eng_parallel) has the contract; comm_gradients.c reduces the buckets in a
// step.
//
// Messages and sums of the buckets in flight share one block with space for a few buckets
// (`messages_pool`). When the block is full, further buckets wait until messages have arrived. With
// ZeRO-2 and ZeRO-3, the backward pass writes gradients into a second pool (`rooms`).
//
// Owns eng_parallel and the set's `own`. Called by Lua, and by comm_predict.c, which measures a
// reduction without sending anything (eng_parallel_rehearse).
#include "comm_gradients.h"

#include "base/error.h"
#include "params/params_parted.h"

#include <stdlib.h>
#include <string.h>

static eng_status make_pools(eng_parallel *p, int64_t limit)
{
  int64_t messages, room;
  buckets_bounds(&messages, &room, p, limit);
  p->messages_pool = (pool){.space = p->cards ? p->set->space : SPACE_HOST,
                            .arena = ARENA_MESSAGE,
                            .block_bytes = messages,
                            .most_blocks = 1};
  p->rooms = (pool){.space = p->set->space, .arena = ARENA_GRADIENT, .block_bytes = room};
  if (messages == 0) return ENG_OK;
  void *piece;
  ENG_TRY(pool_take(&piece, &p->messages_pool, 1));     // allocates the block now, or fails
  pool_give(&p->messages_pool, piece, 1);
  return ENG_OK;
}

static eng_status take_memory(eng_parallel *p, int64_t limit)
{
  int64_t size = p->comm->size, longest = 0, largest = 0, runs = 0;
  for (int k = 0; k < p->n_buckets; k++) {
    bucket *b = &p->buckets[k];
    ENG_TRY(bucket_cut(p, b, k));
    if (p->cards) b->need = cards_bytes(b);
    if (bucket_piece(b, b->comm->rank) > longest) longest = bucket_piece(b, b->comm->rank);
    if (b->n + b->comm->size > runs) runs = b->n + b->comm->size;
  }
  for (int i = 0; i < p->set->n; i++) {
    if (p->set->member[i].value->count > largest) largest = p->set->member[i].value->count;
    int rank = p->buckets[p->bucket_of[i]].comm->rank;
    member_owned(&p->set->own[2 * i], &p->set->own[2 * i + 1], p, i, rank);
  }
  ENG_TRY(make_pools(p, limit));
  int64_t terms = size > 1 ? size : 2;      // at least a run and the sum that it is added to
  p->n_values = !p->cards && terms * longest > largest ? terms * longest : largest;
  p->values = arena_alloc_in(SPACE_HOST, ARENA_MESSAGE, p->n_values * (int64_t)sizeof(float));
  if (!p->values) return ENG_ERR_MEMORY;
  if (p->set->space != SPACE_HOST) HEAP_TAKE(&p->memory, p->raw, largest * (int64_t)sizeof(float));
  if (!p->cards) p->table = HEAP_NEW(&p->memory, wire_run, runs);
  HEAP_TAKE(&p->memory, p->own_flags, p->set->n + 1);
  HEAP_TAKE(&p->memory, p->messages, 2 * size);
  HEAP_TAKE(&p->memory, p->terms, size);
  HEAP_TAKE(&p->memory, p->rank_flags, size * p->set->n);
  return p->memory.failed ? error_set(ENG_ERR_MEMORY, "out of memory for gradient buckets")
                          : ENG_OK;
}

/// Checks that each piece of weights that a rank sends (ZeRO) fits into one message. The size of
/// messages from card to card has no limit.
static eng_status check_pieces(const eng_parallel *p)
{
  for (int i = 0; i < p->set->n && !p->cards; i++) {
    const parameter *member = &p->set->member[i];
    int64_t size = eng_dtype_size(member->value->dtype), from, to;
    int ranks = p->buckets[p->bucket_of[i]].comm->size;
    if (ranks == 1 || member->value->count * size <= COMM_LARGEST) continue;
    for (int rank = 0; rank < ranks; rank++) {
      member_owned(&from, &to, p, i, rank);
      FAIL_IF((to - from) * size > COMM_LARGEST, ENG_ERR_VALUE, "the weights of %s need a message "
              "of %lld bytes, above the limit of 1 GiB; hint: %s", member->name,
              (long long)((to - from) * size), p->whole ? "zero=0" : "more ranks, or zero=0");
    }
  }
  return ENG_OK;
}

void eng_parallel_free(eng_parallel *p)
{
  if (!p) return;
  eng_parallel_cancel(p);
  for (int i = 0; p->place && i < p->set->n; i++) tensor_drop(p->place[i]);
  cards_free(p);
  if (p->set->parted) {
    params_wait();          // weights in flight use this memory
    p->set->parted->link = NULL;
  }
  if (p->under_way == 0) {      // else not freed: messages in flight still use this memory
    pool_free(&p->messages_pool);
    arena_free_in(SPACE_HOST, ARENA_MESSAGE, p->values, p->n_values * (int64_t)sizeof(float));
  }
  pool_free(&p->rooms);
  if (!p->zero) {      // with ZeRO the set stays divided, because its moments are divided
    free(p->set->own);
    p->set->own = NULL;
  }
  params_release(p->set);
  heap_free(&p->memory);
  free(p->numbers);
  free(p);
}

/// ZeRO-2: keeps only this rank's pieces of the gradients.
static eng_status divide(eng_parallel *p)
{
  eng_params *set = p->set;
  HEAP_TAKE(&p->memory, p->place, set->n);
  HEAP_TAKE(&p->memory, p->had, set->n);
  FAIL_IF(p->memory.failed, ENG_ERR_MEMORY, "out of memory for gradient buckets");
  for (int i = 0; i < set->n; i++) {
    const tensor *value = set->member[i].value;
    ENG_TRY(tensor_wrap(&p->place[i], set->space, NULL, set->gradient_dtype[i], value->ndim,
                        value->shape));
  }
  flat_buffer *own;
  ENG_TRY(flat_new(&own, ARENA_GRADIENT, set, set->gradient_dtype, true));
  params_divide(set, own);
  return ENG_OK;
}

/// Records in p->apart which parameters only some ranks hold, and in p->holder the rank that each
/// holder has in p->comm.
static eng_status find_holders(eng_parallel *p, const eng_parallel_options *options)
{
  if (!options->apart || !options->holders) return ENG_OK;
  p->holders = options->holders;
  memcpy(p->apart, options->apart, (size_t)p->set->n);
  HEAP_TAKE(&p->memory, p->holder, p->holders->size);
  FAIL_IF(p->memory.failed, ENG_ERR_MEMORY, "out of memory for a group of %d ranks",
          p->holders->size);
  return eng_comm_all_gather(p->holders, p->holder, &p->comm->rank, sizeof *p->holder);
}

eng_status eng_parallel_new(eng_parallel **out, eng_params *set, eng_comm *comm,
                            const eng_parallel_options *options)
{
  *out = NULL;
  ENG_TRY(params_alive(set));
  FAIL_IF(set->own, ENG_ERR_STATE, "these parameters already have a reduction over ranks; hint: "
          "free it first or, if it divided them (ZeRO), use new parameters");
  ENG_TRY(buckets_check(options));
  FAIL_IF(set->kept, ENG_ERR_STATE,
          "a reference backward pass of these parameters is running; hint: end it first");
  eng_parallel *p = calloc(1, sizeof *p);
  FAIL_IF(!p, ENG_ERR_MEMORY, "out of memory for gradient buckets");
  p->set = set;
  p->comm = comm;
  set->references++;
  set->own = calloc(2 * (size_t)set->n + 1, sizeof *set->own);
  HEAP_TAKE(&p->memory, p->apart, set->n);
  HEAP_TAKE(&p->memory, p->complete, set->n);
  eng_status status = set->own && !p->memory.failed
                        ? find_holders(p, options)
                        : error_set(ENG_ERR_MEMORY, "out of memory for gradient buckets");
  if (status == ENG_OK) status = comm_cards_decide(&p->cards, comm, set->space == SPACE_CUDA);
  if (status == ENG_OK) status = buckets_fill(p, options);
  if (status == ENG_OK) status = take_memory(p, options->bucket);
  if (status == ENG_OK && options->zero > 0) status = check_pieces(p);
  if (status == ENG_OK && p->cards) status = cards_new(p);
  if (status == ENG_OK && options->zero == 3) status = weights_part(p, options->units);
  // This comes last, because params_divide cannot be undone.
  if (status == ENG_OK && options->zero >= 2) status = divide(p);
  if (status != ENG_OK) {
    params_forget_parts(set);
    eng_parallel_free(p);
    return status;
  }
  p->facts.buckets = p->n_buckets;
  p->zero = options->zero == 3 ? 2 : options->zero;
  set->sharded = options->zero > 0;
  *out = p;
  return ENG_OK;
}

void eng_parallel_own(int64_t *from, int64_t *to, const eng_parallel *p, int index)
{
  *from = p->set->own[2 * index];
  *to = p->set->own[2 * index + 1];
}
