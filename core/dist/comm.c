// Groups of ranks and collective operations, made of messages between two ranks. comm.h gives the
// order of sums.
//
// Small reductions use recursive doubling: log2(n) exchanges for n = 2^k ranks (for other n, up to
// two more), after each of which both partners hold the same sum. Large reductions take two
// exchanges. In the first, every rank receives its piece from all other ranks and sums it. In the
// second, it sends this sum to all other ranks. Both methods add in the same order.
// Owns groups; reaches other ranks only through a group's transport and comm_wait.c. Called by Lua
// and by the other files of this folder.
#include "comm.h"

#include "base/error.h"
#include "base/numerics.h"
#include "tensor/tensor.h"
#include "device/transfer.h"

#include <stdlib.h>
#include <string.h>

enum { SMALL = 1 << 15,              // up to this many bytes, a reduction uses recursive doubling
       PIECE = 1024,                 // elements summed at a time: partial sums stay in the L1 cache
       LEVELS = 24 };                // levels of partial sums: enough below 2^24 ranks

// ------------------------------------------------------------------ groups

int eng_comm_rank(const eng_comm *comm) { return comm->rank; }
int eng_comm_size(const eng_comm *comm) { return comm->size; }

/// Lists in `part` the world numbers of the ranks in `parent` that passed the same color, ordered
/// by key and rank.
static eng_status list_ranks(eng_comm *part, eng_comm *parent, int color, int key)
{
  typedef struct wish { int32_t color, key; } wish;
  wish own = {color, key};
  FREED wish *all = calloc((size_t)parent->size, sizeof *all);
  part->of_world = calloc((size_t)parent->size, sizeof *part->of_world);
  FAIL_IF(!all || !part->of_world, ENG_ERR_MEMORY, "out of memory while creating a group of ranks");
  ENG_TRY(eng_comm_all_gather(parent, all, &own, sizeof own));
  part->size = 0;
  for (int r = 0; r < parent->size; r++) {
    if (all[r].color != color) continue;
    int place = 0;                                // index of rank r in the new group
    for (int q = 0; q < parent->size; q++)
      if (all[q].color == color && (all[q].key < all[r].key || (all[q].key == all[r].key && q < r)))
        place++;
    part->of_world[place] = comm_of_world(parent->of_world, r);
    if (r == parent->rank) part->rank = place;
    part->size++;
  }
  // Groups begin to number their operations at different places. So if ranks get out of step, a
  // message of one group is rarely taken for a message of another group that shares ranks with it.
  int64_t bytes = part->size * (int64_t)sizeof *part->of_world;
  part->next_tag = (int32_t)(eng_crc32c(0, part->of_world, bytes) % COMM_TAGS);
  return ENG_OK;
}

eng_status eng_comm_split(eng_comm **out, eng_comm *parent, int color, int key)
{
  *out = NULL;
  FAIL_IF(color < -1, ENG_ERR_VALUE,
          "split of a group of ranks: expected a color of 0 or more, or -1 for no group, got %d",
          color);
  eng_comm *part = calloc(1, sizeof *part);
  FAIL_IF(!part, ENG_ERR_MEMORY, "out of memory for a group of ranks");
  part->transport = parent->transport;
  part->size = 1;
  eng_status status = ENG_OK;
  if (parent->transport) status = list_ranks(part, parent, color, key);
  if (status != ENG_OK || color < 0) eng_comm_free(part);
  else *out = part;
  return status;
}

void eng_comm_free(eng_comm *comm)
{
  if (!comm || comm == &comm_world) return;
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
{ return f64_is_nan(a) || f64_is_nan(b) ? f64_from(0x7FF8000000000000ull) : a > b ? a : b; }

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
  FAIL_IF(dtype != ENG_f32 && dtype != ENG_f64 && dtype != ENG_i64, ENG_ERR_DTYPE,
          "reduction over ranks: expected numbers in f32, f64 or i64, got %s",
          eng_dtype_name(dtype));
  return op == ENG_SUM || op == ENG_MAX
           ? ENG_OK
           : error_set(ENG_ERR_VALUE, "reduction over ranks: unknown operation number %d; "
                     "expected 0 (sum) or 1 (maximum)", op);
}

/// Writes to out[i] the reduction of in[k][i] over k, in the order that comm.h defines. `out` may
/// be one of the inputs.
static void combine_all(void *out, const void *const *in, int n, int64_t count, int dtype, int op)
{
  int size = eng_dtype_size(dtype), p = largest_power(n);
  double room[LEVELS][PIECE];
  for (int64_t from = 0; from < count; from += PIECE) {
    int64_t m = count - from < PIECE ? count - from : PIECE, at = from * size;
    int level[LEVELS], depth = 0;
    // Works like a binary counter: adds the last two partial sums when they cover equally many
    // ranks.
    for (int k = 0; k < p; k++) {
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

// ------------------------------------------------------------------ reductions over ranks

typedef struct reduction {
  eng_comm *comm;
  char     *data;
  int64_t   count, n_sums;    // the first n_sums values are summed; of the others, the maximum is
                              // taken
  int32_t   dtype;
  const char *what;
} reduction;

static void combine_own(const reduction *r, const void *low, const void *high)
{
  int64_t at = r->n_sums * eng_dtype_size(r->dtype);
  combine(r->data, low, high, r->n_sums, r->dtype, ENG_SUM);
  combine(r->data + at, (const char *)low + at, (const char *)high + at, r->count - r->n_sums,
          r->dtype, ENG_MAX);
}

/// Recursive doubling among the first p ranks, where p is the largest power of two that is at most
/// the number of ranks. Each remaining rank first sends its data to one of the p ranks, which
/// combines the data with its own, and sends the result back at the end. `room` holds incoming
/// data.
static eng_status reduce_small(const reduction *r, char *room, int tag)
{
  eng_comm *c = r->comm;
  int p = largest_power(c->size), rank = c->rank;
  int64_t bytes = r->count * eng_dtype_size(r->dtype);
  comm_message give = {r->data, bytes, rank - p, true}, get = {r->data, bytes, rank - p, false};
  if (rank >= p) {
    ENG_TRY(comm_exchange(c, &give, 1, tag, r->what));
    return comm_exchange(c, &get, 1, tag, r->what);
  }
  bool helps = rank + p < c->size;
  get = (comm_message){room, bytes, rank + p, false};
  if (helps) {
    ENG_TRY(comm_exchange(c, &get, 1, tag, r->what));
    combine_own(r, r->data, room);
  }
  for (int distance = 1; distance < p; distance *= 2) {
    comm_message both[] = {{r->data, bytes, rank ^ distance, true},
                           {room, bytes, rank ^ distance, false}};
    ENG_TRY(comm_exchange(c, both, 2, tag, r->what));
    if (rank & distance) combine_own(r, room, r->data);
    else combine_own(r, r->data, room);
  }
  give.peer = rank + p;
  return helps ? comm_exchange(c, &give, 1, tag, r->what) : ENG_OK;
}

/// Every rank reduces one piece: it receives this piece from all other ranks and sends them the
/// result. A piece has `piece` elements; `room` has space for one piece per rank. The values must
/// all be summed, or all reduced to their maximum.
static eng_status reduce_large(const reduction *r, char *room, int64_t piece, int tag)
{
  eng_comm *c = r->comm;
  int64_t size = eng_dtype_size(r->dtype), step = piece * size, all = r->count * size;
  char *own = r->data + step * c->rank;
  FREED comm_message *m = calloc(2 * (size_t)c->size, sizeof *m);
  FREED const void **in = calloc((size_t)c->size, sizeof *in);
  FAIL_IF(!m || !in, ENG_ERR_MEMORY, "out of memory for a reduction over %d ranks", c->size);
  for (int round = 0; round < 2; round++) {
    int n = 0;
    int64_t own_bytes = all - step * c->rank;
    own_bytes = own_bytes < 0 ? 0 : own_bytes < step ? own_bytes : step;
    for (int peer = 0; peer < c->size; peer++) {
      in[peer] = peer == c->rank ? own : room + step * peer;
      if (peer == c->rank) continue;
      int64_t bytes = all - step * peer;
      bytes = bytes < step ? bytes : step;
      if (bytes > 0) m[n++] = (comm_message){r->data + step * peer, bytes, peer, round == 0};
      if (own_bytes > 0)
        m[n++] = (comm_message){round == 0 ? room + step * peer : own, own_bytes, peer, round == 1};
    }
    ENG_TRY(comm_exchange(c, m, n, tag, r->what));
    if (round == 0)
      combine_all(own, in, c->size, own_bytes / size, r->dtype, r->n_sums ? ENG_SUM : ENG_MAX);
  }
  return ENG_OK;
}

static eng_status reduce(const reduction *r)
{
  eng_comm *c = r->comm;
  if (c->size == 1 || r->count == 0) return ENG_OK;
  int64_t size = eng_dtype_size(r->dtype), bytes = r->count * size,
          piece = (r->count + c->size - 1) / c->size;
  bool small = bytes <= SMALL || (r->n_sums > 0 && r->n_sums < r->count);
  FAIL_IF(!small && piece * size > COMM_LARGEST, ENG_ERR_VALUE,
          "%s: expected at most 1 GiB for each rank to sum, got %lld bytes; hint: reduce a part of "
          "the array at a time", r->what, (long long)(piece * size));
  int tag = comm_tag(c);
  FREED char *room = malloc((size_t)(small ? bytes : piece * c->size * size));
  FAIL_IF(!room, ENG_ERR_MEMORY,
          "out of memory for a reduction of %lld bytes over ranks", (long long)bytes);
  return small ? reduce_small(r, room, tag) : reduce_large(r, room, piece, tag);
}

eng_status eng_comm_all_reduce(eng_comm *comm, void *data, int64_t count, int dtype, int op)
{
  ENG_TRY(check_type(dtype, op));
  return reduce(&(reduction){comm, data, count, op == ENG_SUM ? count : 0, dtype, "a reduction"});
}

eng_status comm_reduce_both(eng_comm *comm, double *values, int n_sums, int n_maxima,
                            const char *what)
{
  return reduce(&(reduction){comm, (char *)values, n_sums + n_maxima, n_sums, ENG_f64, what});
}

eng_status eng_comm_barrier(eng_comm *comm)
{
  double nothing = 0;
  return comm_reduce_both(comm, &nothing, 1, 0, "a barrier");
}

// ------------------------------------------------------------------ copies

eng_status eng_comm_broadcast(eng_comm *comm, void *data, int64_t bytes, int root)
{
  enum { PART = 1 << 24 };
  int n = comm->size, place = (comm->rank - root + n) % n;     // the root has place 0
  FAIL_IF(root < 0 || root >= n, ENG_ERR_VALUE,
          "broadcast: expected a root rank from 0 to %d, got %d", n - 1, root);
  if (n == 1) return ENG_OK;
  int tag = comm_tag(comm);
  for (int64_t at = 0; at < bytes; at += PART) {
    int64_t part = bytes - at < PART ? bytes - at : PART;
    int reach = 1;
    while (reach < n) reach *= 2;
    // `place` is the rank, counted from the root. When a round with distance d begins, the ranks at
    // places 0 .. d - 1 have the data. Each of them sends it to the rank at its place + d.
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
  FAIL_IF(!tensor_contiguous(x), ENG_ERR_SHAPE,
          "broadcast over ranks: expected a contiguous tensor, got a view %s; hint: x:contiguous()",
          tensor_text(x));
  int64_t bytes = x->count * eng_dtype_size(x->dtype);
  x->store->writes++;
  if (x->store->space == SPACE_HOST) return eng_comm_broadcast(comm, x->data, bytes, root);
  FREED char *host = malloc((size_t)bytes);
  FAIL_IF(!host, ENG_ERR_MEMORY, "out of memory to send %s", tensor_text(x));
  if (comm->rank == root) ENG_TRY(transfer_to_host(host, x->store->space, x->data, bytes));
  ENG_TRY(eng_comm_broadcast(comm, host, bytes, root));
  return comm->rank == root ? ENG_OK : transfer_from_host(x->store->space, x->data, host, bytes);
}

eng_status eng_comm_all_gather(eng_comm *comm, void *all, const void *own, int64_t bytes)
{
  char *to = all;
  FAIL_IF(comm->size > 1 && bytes > COMM_LARGEST, ENG_ERR_VALUE, "an all-gather: expected at most "
          "1 GiB from each rank, got %lld bytes; hint: gather a part of the array at a time",
          (long long)bytes);
  memmove(to + bytes * comm->rank, own, (size_t)bytes);
  if (comm->size == 1 || bytes == 0) return ENG_OK;
  FREED comm_message *m = calloc(2 * (size_t)comm->size, sizeof *m);
  FAIL_IF(!m, ENG_ERR_MEMORY, "out of memory for messages to %d ranks", comm->size);
  int n = 0;
  for (int peer = 0; peer < comm->size; peer++) {
    if (peer == comm->rank) continue;
    m[n++] = (comm_message){to + bytes * comm->rank, bytes, peer, true};
    m[n++] = (comm_message){to + bytes * peer, bytes, peer, false};
  }
  return comm_exchange(comm, m, n, comm_tag(comm), "an all-gather");
}
