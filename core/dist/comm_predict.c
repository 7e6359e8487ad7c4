// Predicts the messages and memory of a reduction of gradients over a given number of ranks: lays
// the buckets out for an imaginary group and counts their bytes. Also measures this process's work
// in a reduction. The contracts are in engine_ranks.h (eng_parallel_predict,
// eng_parallel_rehearse). Called by Lua (engine plan).
#include "comm_gradients.h"

#include "base/error.h"
#include "autograd/tape.h"

#include <stdlib.h>

/// Adds this rank's messages and memory for bucket b to `out`.
static void count_bucket(eng_parallel_sizes *out, int64_t *longest, const eng_parallel *p,
                         const bucket *b, int zero)
{
  int own = b->comm->rank, ranks = b->comm->size;
  int64_t others = ranks - 1;
  out->messages += others;
  out->bytes += b->begin[ranks] - b->bytes;
  if (zero == 0 && b->packed > 0) {
    out->messages += others;
    out->bytes += b->packed * others;
  }
  if (bucket_piece(b, own) > *longest) *longest = bucket_piece(b, own);
  for (int k = 0; k < b->n; k++) {
    int64_t from, at, n = bucket_overlap(p, b, k, own, &from, &at);
    out->own += n;
    out->gradients +=
      params_part_bytes(zero >= 2 ? n : p->set->member[b->member[k]].value->count, b->dtype);
    if (zero == 0 || zero == 3 || n == 0) continue;
    out->weight_messages += others;
    out->weight_bytes +=
      n * eng_dtype_size(p->set->member[b->member[k]].value->dtype) * others;
  }
}

/// If input k of an operation is a parameter of the set, or a parameter's low-precision copy,
/// returns the parameter. Otherwise returns NULL.
static parameter *read_here(const eng_parallel *p, const op_call *call, int k)
{
  parameter *member = k < call->n_in && call->in[k] ? call->in[k]->parameter : NULL;
  return member && member->set == p->set ? member : NULL;
}

/// Computes how many bytes of memory the gradients will need during backward, with an imagined pool
/// (`rooms`). Walks over the tape in the order of backward. A gradient takes memory when it is
/// first written, and releases it when its bucket is complete and all earlier buckets have been
/// sent.
static eng_status count_rooms(int64_t *bytes, eng_parallel *p, int64_t block_bytes)
{
  int length = eng_tape_length();
  AT_END(pool_free) pool rooms = {.block_bytes = block_bytes, .imagined = true};
  // the first operation on the tape that reads each member; -1: no operation
  FREED int32_t *first = malloc(((size_t)p->set->n + 1) * sizeof *first);
  FREED void **room = calloc((size_t)p->set->n + 1, sizeof *room);
  FAIL_IF(!first || !room, ENG_ERR_MEMORY, "out of memory for a prediction");
  for (int i = 0; i < p->set->n; i++) first[i] = -1;
  for (int node = length - 1; node >= 0; node--)
    for (int k = 0; k < tape_call(node)->n_in; k++) {
      const parameter *member = read_here(p, tape_call(node), k);
      if (member) first[member->index] = node;
    }
  for (int k = 0; k < p->n_buckets; k++) p->buckets[k].left = p->buckets[k].n;
  for (int i = 0; i < p->set->n; i++)
    if (first[i] < 0) p->buckets[p->bucket_of[i]].left--;
  int next = 0;
  for (int node = length; node >= 0; node--) {
    const op_call *call = node < length ? tape_call(node) : NULL;
    for (int k = 0; call && k < call->n_in; k++) {
      parameter *member = read_here(p, call, k);
      if (member && !room[member->index] && member->value->requires_grad)
        ENG_TRY(pool_take(&room[member->index], &rooms, member_room(p->set, member->index)));
    }
    for (int k = 0; call && k < call->n_in; k++) {
      parameter *member = read_here(p, call, k);
      if (!member || first[member->index] != node) continue;
      first[member->index] = -1;  // counts the member once, even if the operation reads it twice
      p->buckets[p->bucket_of[member->index]].left--;
    }
    for (; next < p->n_buckets && p->buckets[p->order[next]].left == 0; next++) {
      const bucket *b = &p->buckets[p->order[next]];
      for (int k = 0; k < b->n; k++)
        pool_give(&rooms, room[b->member[k]], member_room(p->set, b->member[k]));
    }
  }
  *bytes = 0;
  for (int k = 0; k < rooms.n_blocks; k++) *bytes += rooms.block[k].bytes;
  return ENG_OK;
}

/// Finds the rank that sums the most elements.
static eng_status busiest(int *rank, eng_parallel *p)
{
  FREED int64_t *sums = calloc((size_t)p->comm->size, sizeof *sums);
  FAIL_IF(!sums, ENG_ERR_MEMORY, "out of memory for a prediction");
  *rank = 0;
  for (int k = 0; k < p->n_buckets; k++) {
    ENG_TRY(bucket_cut(p, &p->buckets[k], k));
    for (int r = 0; r < p->comm->size; r++) sums[r] += bucket_piece(&p->buckets[k], r);
  }
  for (int r = 1; r < p->comm->size; r++)
    if (sums[r] > sums[*rank]) *rank = r;
  return ENG_OK;
}

static void forget(eng_parallel *p) { heap_free(&p->memory); }

eng_status eng_parallel_predict(eng_parallel_sizes *out, eng_params *set, int rank, int size,
                                const eng_parallel_options *options)
{
  *out = (eng_parallel_sizes){0};
  ENG_TRY(params_alive(set));
  FAIL_IF(size < 1 || rank < -1 || rank >= size, ENG_ERR_VALUE, "prediction of a reduction: "
          "expected a rank below the number of ranks, or -1 for the rank that sums the most, got "
          "rank %d of %d", rank, size);
  ENG_TRY(buckets_check(options));
  FAIL_IF(options->apart, ENG_ERR_VALUE, "prediction of a reduction: expected every rank to hold "
          "all parameters, got parameters that only some ranks hold");
  eng_comm group = {.rank = rank < 0 ? 0 : rank, .size = size};
  AT_END(forget) eng_parallel p = {.set = set, .comm = &group};
  int64_t *own = HEAP_NEW(&p.memory, int64_t, 2 * set->n);
  HEAP_TAKE(&p.memory, p.apart, set->n);
  FAIL_IF(p.memory.failed, ENG_ERR_MEMORY, "out of memory for a prediction");
  ENG_TRY(buckets_fill(&p, options));
  out->buckets = p.n_buckets;
  if (rank < 0) ENG_TRY(busiest(&group.rank, &p));
  int64_t longest = 0, largest = 0, block = 0, room = 0;
  for (int k = 0; k < p.n_buckets; k++) ENG_TRY(bucket_cut(&p, &p.buckets[k], k));
  for (int k = 0; k < p.n_buckets; k++)
    count_bucket(out, &longest, &p, &p.buckets[k], options->zero);
  if (size == 1) return ENG_OK;
  for (int i = 0; i < set->n; i++) {
    if (set->member[i].value->count > largest) largest = set->member[i].value->count;
    member_owned(&own[2 * i], &own[2 * i + 1], &p, i, group.rank);
  }
  buckets_bounds(&block, &room, &p, options->bucket);
  out->under_way =
    block + (size * longest > largest ? size * longest : largest) * (int64_t)sizeof(float);
  if (options->zero >= 2) ENG_TRY(count_rooms(&out->rooms, &p, room));
  return options->zero == 3 ? weights_predict(out, &p, own, options->units) : ENG_OK;
}

// ------------------------------------------------------------------ a rehearsal

static eng_status start_nothing(void **exchange, const int32_t *of_world,
                                const comm_message *messages, int n, int tag)
{
  (void)of_world, (void)messages, (void)n, (void)tag;
  *exchange = NULL;        // already complete
  return ENG_OK;
}

eng_status eng_parallel_rehearse(double *seconds, eng_params *set, int size,
                                 const eng_parallel_options *options)
{
  static const comm_transport nowhere = {.start = start_nothing};
  *seconds = 0;
  FAIL_IF(size < 2, ENG_ERR_VALUE,
          "rehearsal of a reduction: expected 2 ranks or more, got %d", size);
  FAIL_IF(options->apart, ENG_ERR_VALUE, "rehearsal of a reduction: expected every rank to hold "
          "all parameters, got parameters that only some ranks hold");
  eng_comm group = {.transport = &nowhere, .size = size};
  eng_parallel_options simple = *options;
  simple.zero = options->zero > 0;      // ZeRO-2 does the same work as ZeRO-1
  eng_parallel *p;
  ENG_TRY(eng_parallel_new(&p, set, &group, &simple));
  eng_status status = ENG_OK;
  for (int turn = 0; turn < 3 && status == ENG_OK; turn++) {
    double began = eng_clock();
    status = eng_parallel_begin(p, ENG_PASS_FIRST);
    if (status == ENG_OK) status = eng_parallel_finish(p);
    double took = eng_clock() - began;
    if (turn == 0 || took < *seconds) *seconds = took;
  }
  eng_parallel_free(p);
  free(set->own);
  set->own = NULL;
  set->sharded = false;
  return status == ENG_OK ? eng_params_zero_grad(set) : status;
}
