// Groups of ranks and collective operations, made of messages between two ranks. comm.h gives the
// order of sums.
//
// Small reductions use recursive doubling: log2(n) exchanges, after each of which both partners
// hold the same sum. Large ones take two exchanges: every rank receives one piece from all others
// and sums it, then sends that sum to the others. Both methods add in the same order.
// Owns groups and requests; calls nothing but a group's transport and comm_wait.c.
#include "comm.h"

#include "base/error.h"
#include "base/numerics.h"
#include "tensor/tensor.h"
#include "device/transfer.h"

#include <stdlib.h>
#include <string.h>

enum { SMALL = 1 << 15,              // up to this many bytes, a reduction uses recursive doubling
       PIECE = 1024,                 // elements summed at a time: partial sums stay in the L1 cache
       LEVELS = 24 };                // levels of partial sums: enough for 2^24 ranks

// ------------------------------------------------------------------ groups

int eng_comm_rank(const eng_comm *comm) { return comm->rank; }
int eng_comm_size(const eng_comm *comm) { return comm->size; }

/// Makes a group for a transport without groups: a list of the world numbers of the ranks in
/// `parent` that gave the same color, ordered by key and rank.
static eng_status split_by_numbers(eng_comm *part, eng_comm *parent, int color, int key)
{
  typedef struct wish { int32_t color, key; } wish;
  wish own = {color, key}, *all = calloc((size_t)parent->size, sizeof *all);
  part->of_world = calloc((size_t)parent->size, sizeof *part->of_world);
  if (!all || !part->of_world) {
    free(all);
    return error_set(ENG_ERR_MEMORY, "out of memory while creating a group of ranks");
  }
  eng_status status = eng_comm_all_gather(parent, all, &own, sizeof own);
  part->size = 0;
  for (int r = 0; status == ENG_OK && r < parent->size; r++) {
    if (all[r].color != color) continue;
    int place = 0;                                // of rank r among the ranks of its color
    for (int q = 0; q < parent->size; q++)
      if (all[q].color == color && (all[q].key < all[r].key || (all[q].key == all[r].key && q < r)))
        place++;
    part->of_world[place] = comm_of_world(parent, r);
    if (r == parent->rank) part->rank = place;
    part->size++;
  }
  free(all);
  part->group = part->of_world;
  return status;
}

static eng_status split_by_transport(eng_comm *part, eng_comm *parent, int color, int key)
{
  comm_watch_mark before = comm_watch("the creation of a group");
  eng_status status =
    parent->transport->split(&part->group, &part->rank, &part->size, parent->group, color, key);
  comm_watched(before);
  if (status != ENG_OK || color < 0) return status;
  int32_t own = comm_world.rank;
  part->of_world = calloc((size_t)part->size, sizeof *part->of_world);
  if (!part->of_world) return error_set(ENG_ERR_MEMORY, "out of memory for a group of ranks");
  return eng_comm_all_gather(part, part->of_world, &own, sizeof own);
}

eng_status eng_comm_split(eng_comm **out, eng_comm *parent, int color, int key)
{
  *out = NULL;
  if (color < -1)
    return error_set(ENG_ERR_VALUE,
                     "split of a group: expected a color of 0 or more, or -1 for none, got %d",
                     color);
  eng_comm *part = calloc(1, sizeof *part);
  if (!part) return error_set(ENG_ERR_MEMORY, "out of memory for a group of ranks");
  part->transport = parent->transport;
  part->size = 1;
  eng_status status = ENG_OK;
  if (parent->transport)
    status = parent->transport->split ? split_by_transport(part, parent, color, key)
                                      : split_by_numbers(part, parent, color, key);
  if (status != ENG_OK || color < 0) eng_comm_free(part);
  else *out = part;
  return status;
}

void eng_comm_free(eng_comm *comm)
{
  if (!comm || comm == &comm_world) return;
  if (comm->group && comm_world.transport && comm->transport->free)
    comm->transport->free(comm->group);
  free(comm->of_world);
  free(comm);
}

// ------------------------------------------------------------------ reductions in memory

static int largest_power(int n)
{
  int p = 1;
  while (2 * p <= n) p *= 2;
  return p;
}

static double larger(double a, double b)
{
  return f64_is_nan(a) || f64_is_nan(b) ? f64_from(0x7FF8000000000000ull) : a > b ? a : b;
}

/// out = low op high, elementwise. `out` may be one of the inputs.
static void combine(void *out, const void *low, const void *high, int64_t n, int dtype, int op)
{
#define COMBINE(type, sum, most) { \
    type *o = out; const type *a = low, *b = high; \
    if (op == ENG_SUM) for (int64_t i = 0; i < n; i++) o[i] = sum; \
    else for (int64_t i = 0; i < n; i++) o[i] = most; }
  if (dtype == ENG_f32) COMBINE(float, a[i] + b[i], (float)larger(a[i], b[i]))
  else if (dtype == ENG_f64) COMBINE(double, a[i] + b[i], larger(a[i], b[i]))
  else COMBINE(int64_t, (int64_t)((uint64_t)a[i] + (uint64_t)b[i]), a[i] > b[i] ? a[i] : b[i])
#undef COMBINE
}

static eng_status check_type(int dtype, int op)
{
  if (dtype != ENG_f32 && dtype != ENG_f64 && dtype != ENG_i64)
    return error_set(ENG_ERR_DTYPE, "reduction over ranks: expected f32, f64 or i64, got %s",
                     eng_dtype_name(dtype));
  return op == ENG_SUM || op == ENG_MAX
           ? ENG_OK
           : error_set(ENG_ERR_VALUE, "reduction over ranks: unknown operation number %d", op);
}

/// out[i] = the reduction of in[k][i] over k, in the order of comm.h. `out` may be one of the
/// inputs.
static void combine_all(void *out, const void *const *in, int n, int64_t count, int dtype, int op)
{
  int size = eng_dtype_size(dtype), p = largest_power(n);
  double room[LEVELS][PIECE];
  for (int64_t from = 0; from < count; from += PIECE) {
    int64_t m = count - from < PIECE ? count - from : PIECE, at = from * size;
    int level[LEVELS], depth = 0;
    for (int k = 0; k < p; k++) {      // a binary counter: equal neighbours merge
      const char *low = (const char *)in[k] + at;
      if (k + p < n) combine(room[depth], low, (const char *)in[k + p] + at, m, dtype, op);
      else memcpy(room[depth], low, (size_t)(m * size));
      level[depth++] = 0;
      while (depth > 1 && level[depth - 1] == level[depth - 2]) {
        combine(room[depth - 2], room[depth - 2], room[depth - 1], m, dtype, op);
        level[--depth - 1]++;
      }
    }
    memcpy((char *)out + at, room[0], (size_t)(m * size));
  }
}

// ------------------------------------------------------------------ requests

enum { FOLD, DOUBLE, UNFOLD, PIECES, ROUND, DONE };

/// An all-reduce in progress.
struct eng_comm_request {
  eng_comm *comm;
  char     *data, *room;      // room: the incoming data
  int64_t   count;
  int32_t   dtype, op, tag;
  int32_t   n_sums;           // f64: sums of the first n_sums values, maxima of the rest; -1: `op`
  int32_t   phase, distance;  // of recursive doubling
  int64_t   piece;            // elements that one rank reduces
  void     *exchange;         // NULL: none in flight
  const char *what;
};

static void combine_own(eng_comm_request *r, const void *low, const void *high)
{
  if (r->n_sums < 0) {
    combine(r->data, low, high, r->count, r->dtype, r->op);
    return;
  }
  int64_t n = r->n_sums, at = n * (int64_t)sizeof(double);
  combine(r->data, low, high, n, ENG_f64, ENG_SUM);
  combine(r->data + at, (const char *)low + at, (const char *)high + at, r->count - n, ENG_f64,
          ENG_MAX);
}

static int64_t piece_of(const eng_comm_request *r, int rank)
{
  int64_t left = r->count - r->piece * rank;
  return left < 0 ? 0 : left < r->piece ? left : r->piece;
}

static eng_status start_messages(eng_comm_request *r, const comm_message *messages, int n)
{
  return comm_start(&r->exchange, r->comm, messages, n, r->tag);
}

/// Starts the messages of the current phase; skips phases in which this rank takes no part.
static eng_status enter(eng_comm_request *r)
{
  const eng_comm *c = r->comm;
  int size = eng_dtype_size(r->dtype), p = largest_power(c->size), extra = c->size - p,
      rank = c->rank, n = 0;
  int64_t bytes = r->count * size;
  comm_message m[2];
  comm_message *many = NULL;
  eng_status status = ENG_OK;
  while (true) {
    switch (r->phase) {
    case FOLD:
      if (extra > 0 && rank >= p) m[n++] = (comm_message){r->data, bytes, rank - p, true};
      if (rank < extra) m[n++] = (comm_message){r->room, bytes, rank + p, false};
      if (n > 0) return start_messages(r, m, n);
      r->phase = DOUBLE;
      r->distance = 1;
      break;
    case DOUBLE:
      if (rank >= p || r->distance >= p) {
        r->phase = UNFOLD;
        break;
      }
      m[0] = (comm_message){r->data, bytes, rank ^ r->distance, true};
      m[1] = (comm_message){r->room, bytes, rank ^ r->distance, false};
      return start_messages(r, m, 2);
    case UNFOLD:
      if (rank < extra) m[n++] = (comm_message){r->data, bytes, rank + p, true};
      if (rank >= p) m[n++] = (comm_message){r->data, bytes, rank - p, false};
      if (n > 0) return start_messages(r, m, n);
      r->phase = DONE;
      return ENG_OK;
    case PIECES:
    case ROUND:
      many = calloc(2 * (size_t)c->size, sizeof *many);
      if (!many)
        return error_set(ENG_ERR_MEMORY, "out of memory for a reduction over %d ranks", c->size);
      for (int peer = 0; peer < c->size; peer++) {
        if (peer == rank) continue;
        int64_t own = piece_of(r, rank) * size, other = piece_of(r, peer) * size;
        char *own_data = r->data + r->piece * rank * size,
             *other_data = r->data + r->piece * peer * size;
        bool first = r->phase == PIECES;
        if (other > 0) many[n++] = (comm_message){other_data, other, peer, first};
        if (own > 0)
          many[n++] =
            (comm_message){first ? r->room + r->piece * peer * size : own_data, own, peer, !first};
      }
      status = n > 0 ? start_messages(r, many, n) : ENG_OK;
      free(many);
      return status;
    default:
      return ENG_OK;
    }
  }
}

/// Computes after a phase's exchange and enters the next phase.
static eng_status advance(eng_comm_request *r)
{
  const eng_comm *c = r->comm;
  int p = largest_power(c->size), extra = c->size - p, size = eng_dtype_size(r->dtype);
  switch (r->phase) {
  case FOLD:
    if (c->rank < extra) combine_own(r, r->data, r->room);
    r->phase = DOUBLE;
    r->distance = 1;
    break;
  case DOUBLE:
    if (c->rank & r->distance) combine_own(r, r->room, r->data);
    else combine_own(r, r->data, r->room);
    r->distance *= 2;
    break;
  case PIECES: {
    const void **in = calloc((size_t)c->size, sizeof *in);
    if (!in)
      return error_set(ENG_ERR_MEMORY, "out of memory for a reduction over %d ranks", c->size);
    char *own = r->data + r->piece * c->rank * size;
    for (int k = 0; k < c->size; k++) in[k] = k == c->rank ? own : r->room + r->piece * k * size;
    combine_all(own, in, c->size, piece_of(r, c->rank), r->dtype, r->op);
    free(in);
    r->phase = ROUND;
    break;
  }
  default:
    r->phase = DONE;
    return ENG_OK;
  }
  return enter(r);
}

static eng_status begin(eng_comm_request *r)
{
  eng_comm *c = r->comm;
  r->phase = DONE;
  if (c->size == 1 || r->count == 0) return ENG_OK;
  int64_t bytes = r->count * eng_dtype_size(r->dtype);
  bool small = bytes <= SMALL || r->n_sums >= 0;
  r->tag = comm_tag(c);
  r->piece = (r->count + c->size - 1) / c->size;
  r->phase = small ? FOLD : PIECES;
  r->room = malloc((size_t)(small ? bytes : r->piece * c->size * eng_dtype_size(r->dtype)));
  if (!r->room)
    return error_set(ENG_ERR_MEMORY, "out of memory for a reduction of %lld bytes over ranks",
                     (long long)bytes);
  return enter(r);
}

eng_status eng_comm_test(bool *done, eng_comm_request *r)
{
  *done = false;
  while (r->phase != DONE) {
    bool arrived = true;
    if (r->exchange) {
      ENG_TRY(r->comm->transport->test(&arrived, r->exchange));
      if (!arrived) return ENG_OK;
      r->exchange = NULL;
    }
    ENG_TRY(advance(r));
  }
  *done = true;
  return ENG_OK;
}

/// Waits for a request. `status`: the result of begin().
static eng_status run(eng_comm_request *r, eng_status status)
{
  bool done = false;
  int spins = 0;
  double since = 0;
  while (status == ENG_OK && !done) {
    status = eng_comm_test(&done, r);
    if (status == ENG_OK && !done) status = comm_idle(&spins, &since, r->what);
  }
  if (r->exchange) comm_cancel(r->comm, r->exchange, r->what);
  free(r->room);
  r->room = NULL;
  return status;
}

eng_status eng_comm_all_reduce(eng_comm *comm, void *data, int64_t count, int dtype, int op)
{
  ENG_TRY(check_type(dtype, op));
  eng_comm_request r = {.comm = comm,
                        .data = data,
                        .count = count,
                        .dtype = dtype,
                        .op = op,
                        .n_sums = -1,
                        .what = "a reduction"};
  return run(&r, begin(&r));
}

eng_status comm_reduce_both(eng_comm *comm, double *values, int n_sums, int n_maxima,
                            const char *what)
{
  eng_comm_request r = {.comm = comm,
                        .data = (char *)values,
                        .count = n_sums + n_maxima,
                        .dtype = ENG_f64,
                        .n_sums = n_sums,
                        .what = what};
  return run(&r, begin(&r));
}

eng_status eng_comm_all_reduce_start(eng_comm_request **out, eng_comm *comm, void *data,
                                     int64_t count, int dtype, int op)
{
  *out = NULL;
  ENG_TRY(check_type(dtype, op));
  eng_comm_request *r = calloc(1, sizeof *r);
  if (!r) return error_set(ENG_ERR_MEMORY, "out of memory for a reduction over ranks");
  *r = (eng_comm_request){.comm = comm,
                          .data = data,
                          .count = count,
                          .dtype = dtype,
                          .op = op,
                          .n_sums = -1,
                          .what = "a reduction"};
  eng_status status = begin(r);
  // Without message tags, two ranks could run the phases of two requests in different orders.
  if (status != ENG_OK || (comm->transport && comm->transport->ordered)) status = run(r, status);
  if (status == ENG_OK) *out = r;
  else free(r);
  return status;
}

eng_status eng_comm_wait(eng_comm_request *r)
{
  eng_status status = run(r, ENG_OK);
  free(r);
  return status;
}

eng_status eng_comm_reduce_scatter(eng_comm *comm, void *own, const void *data, int64_t count,
                                   int dtype, int op)
{
  ENG_TRY(check_type(dtype, op));
  int n = comm->size, k = 0, size = eng_dtype_size(dtype);
  int64_t bytes = count * size;
  const char *from = data;
  char *room = malloc((size_t)(bytes * n) + 1);
  const void **in = calloc((size_t)n, sizeof *in);
  comm_message *m = calloc(2 * (size_t)n, sizeof *m);
  eng_status status =
    room && in && m ? ENG_OK
                    : error_set(ENG_ERR_MEMORY, "out of memory for a reduction over %d ranks", n);
  for (int peer = 0; status == ENG_OK && peer < n; peer++) {
    in[peer] = peer == comm->rank ? from + bytes * peer : room + bytes * peer;
    if (peer == comm->rank || bytes == 0) continue;
    m[k++] = (comm_message){(void *)(from + bytes * peer), bytes, peer, true};
    m[k++] = (comm_message){room + bytes * peer, bytes, peer, false};
  }
  if (status == ENG_OK && k > 0) status = comm_exchange(comm, m, k, comm_tag(comm), "a reduction");
  if (status == ENG_OK) combine_all(own, in, n, count, dtype, op);
  free(room);
  free(in);
  free(m);
  return status;
}

// ------------------------------------------------------------------ copies

eng_status eng_comm_barrier(eng_comm *comm)
{
  double nothing = 0;
  eng_comm_request r = {.comm = comm,
                        .data = (char *)&nothing,
                        .count = 1,
                        .dtype = ENG_f64,
                        .op = ENG_SUM,
                        .n_sums = -1,
                        .what = "a barrier"};
  return run(&r, begin(&r));
}

eng_status eng_comm_broadcast(eng_comm *comm, void *data, int64_t bytes, int root)
{
  enum { PART = 1 << 24 };
  int n = comm->size, place = (comm->rank - root + n) % n;     // the root has place 0
  if (root < 0 || root >= n)
    return error_set(ENG_ERR_VALUE, "broadcast: expected a rank from 0 to %d, got %d", n - 1,
                     root);
  if (n == 1) return ENG_OK;
  int tag = comm_tag(comm);
  for (int64_t at = 0; at < bytes; at += PART) {
    int64_t part = bytes - at < PART ? bytes - at : PART;
    int reach = 1;
    while (reach < n) reach *= 2;
    // In round d the places below d have the data, and each sends it to the place d further on.
    for (int d = 1; d < reach; d *= 2) {
      comm_message m = {(char *)data + at, part, 0, place < d};
      if (place < d ? place + d >= n : place >= 2 * d) continue;
      m.peer = (place < d ? place + d + root : place - d + root) % n;
      ENG_TRY(comm_exchange(comm, &m, 1, tag, "a broadcast"));
    }
  }
  return ENG_OK;
}

eng_status eng_comm_broadcast_tensor(eng_comm *comm, const eng_tensor *handle, int root)
{
  tensor *x;
  ENG_TRY(tensor_get(&x, handle));
  if (comm->size == 1 || x->count == 0) return ENG_OK;
  if (!tensor_contiguous(x))
    return error_set(ENG_ERR_SHAPE, "broadcast over ranks: expected a contiguous tensor, got %s",
                     tensor_text(x));
  int64_t bytes = x->count * eng_dtype_size(x->dtype);
  x->store->writes++;
  if (x->store->space == SPACE_HOST) return eng_comm_broadcast(comm, x->data, bytes, root);
  char *host = malloc((size_t)bytes);
  if (!host) return error_set(ENG_ERR_MEMORY, "out of memory to send %s", tensor_text(x));
  eng_status status =
    comm->rank == root ? transfer_to_host(host, x->store->space, x->data, bytes) : ENG_OK;
  if (status == ENG_OK) status = eng_comm_broadcast(comm, host, bytes, root);
  if (status == ENG_OK && comm->rank != root)
    status = transfer_from_host(x->store->space, x->data, host, bytes);
  free(host);
  return status;
}

eng_status eng_comm_all_gather(eng_comm *comm, void *all, const void *own, int64_t bytes)
{
  char *to = all;
  memmove(to + bytes * comm->rank, own, (size_t)bytes);
  if (comm->size == 1 || bytes == 0) return ENG_OK;
  comm_message *m = calloc(2 * (size_t)comm->size, sizeof *m);
  if (!m) return error_set(ENG_ERR_MEMORY, "out of memory for %d ranks", comm->size);
  int n = 0;
  for (int peer = 0; peer < comm->size; peer++) {
    if (peer == comm->rank) continue;
    m[n++] = (comm_message){to + bytes * comm->rank, bytes, peer, true};
    m[n++] = (comm_message){to + bytes * peer, bytes, peer, false};
  }
  eng_status status = comm_exchange(comm, m, n, comm_tag(comm), "an all-gather");
  free(m);
  return status;
}
