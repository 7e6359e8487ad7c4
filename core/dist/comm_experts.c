// Exchanges rows of tensors between ranks: a mixture of experts sends each token to the rank that
// holds its expert (lua/engine/nn/moe.lua). engine_ranks.h has the contract.
//
// Rows travel in a comm dtype. A block of FP8 lies within one row, so that a row's result does not
// depend on other rows. Rows that stay on their own rank are rounded in the same way, so that
// results do not depend on which rank holds which expert. If the tensors already have the comm
// dtype, and are in host memory or messages go from card to card, messages use the tensors' memory
// directly. Otherwise the card packs the rows if messages go from card to card, and the host does
// if not. Rows in f64 never go from card to card. Owns the buffers of messages on the host and on
// the card; they only grow. Called by Lua.
#include "comm.h"

#include "device/backend.h"
#include "base/error.h"
#include "base/numerics.h"
#include "tensor/tensor.h"
#include "device/transfer.h"
#include "device/wire.h"

#include <stdlib.h>
#include <string.h>

// OUT and IN: outgoing and incoming messages. HOST: a tensor copied to the host. ROOM: rows as f32,
// or the table of runs for the card. THERE_*: on the card, the messages and the table of runs.
enum { OUT, IN, HOST, ROOM, THERE_OUT, THERE_IN, THERE_TABLE, BUFFERS };

static struct { void *memory; int64_t bytes; } buffer[BUFFERS];

static eng_status reserve(int which, int64_t bytes)
{
  int space = which < THERE_OUT ? SPACE_HOST : SPACE_CUDA;
  if (bytes <= buffer[which].bytes) return ENG_OK;
  arena_free_in(space, ARENA_MESSAGE, buffer[which].memory, buffer[which].bytes);
  bytes += bytes / 4;
  buffer[which].memory = arena_alloc_in(space, ARENA_MESSAGE, bytes);
  buffer[which].bytes = buffer[which].memory ? bytes : 0;
  return buffer[which].memory ? ENG_OK : ENG_ERR_MEMORY;
}

// ------------------------------------------------------------------ formats

static int64_t blocks_of(int64_t columns) { return (columns + WIRE_BLOCK - 1) / WIRE_BLOCK; }
// Returns the size of the codes in bytes, rounded up to a multiple of 4, so that the f32 scales
// after the codes are aligned.
static int64_t codes_bytes(int64_t rows, int64_t columns) { return (rows * columns + 3) / 4 * 4; }

static int64_t rows_bytes(int comm_dtype, int64_t rows, int64_t columns)
{
  if (comm_dtype != ENG_e4m3) return rows * columns * eng_dtype_size(comm_dtype);
  return codes_bytes(rows, columns) + rows * blocks_of(columns) * (int64_t)sizeof(float);
}

// ------------------------------------------------------------------ the exchange

typedef struct exchange {
  eng_comm *comm;
  tensor   *to, *from;
  const int64_t *send, *receive;
  int64_t  columns, largest;         // largest: the largest number of rows to or from one rank
  int      comm_dtype;
} exchange;

static eng_status check_rows(exchange *e, const tensor *x, const int64_t *rows, const char *what)
{
  int64_t sum = 0;
  FAIL_IF(x->ndim != 2 || !tensor_contiguous(x) || !dtype_is_float(x->dtype), ENG_ERR_SHAPE,
          "exchange of rows: expected a contiguous floating-point tensor [rows x columns], got "
          "%s%s", tensor_text(x), tensor_contiguous(x) ? "" : ", which is not contiguous");
  for (int peer = 0; peer < e->comm->size; peer++) {
    FAIL_IF(rows[peer] < 0, ENG_ERR_VALUE,
            "exchange of rows: expected 0 or more rows, got %lld as the count of rows %s rank %d",
            (long long)rows[peer], strcmp(what, "sent") == 0 ? "sent to" : "received from", peer);
    sum += rows[peer];
    if (rows[peer] > e->largest) e->largest = rows[peer];
  }
  if (sum == x->shape[0]) return ENG_OK;
  return error_set(ENG_ERR_SHAPE, "exchange of rows: expected the %s tensor to have %lld rows, "
                   "the sum of the counts of all ranks, got %s", what, (long long)sum,
                   tensor_text(x));
}

/// Exchanges messages with every other rank. `out` and `in` hold the messages in order of ranks, in
/// host memory or, with `cards`, in the memory of this rank's card.
static eng_status send_all(exchange *e, char *out, char *in, eng_exchange_facts *facts, bool cards)
{
  static const char what[] = "the exchange of rows among experts";
  int n = 0;
  FREED comm_message *m = calloc(2 * (size_t)e->comm->size, sizeof *m);
  FAIL_IF(!m, ENG_ERR_MEMORY, "out of memory for messages to %d ranks", e->comm->size);
  for (int peer = 0; peer < e->comm->size; peer++) {
    int64_t sent = rows_bytes(e->comm_dtype, e->send[peer], e->columns),
            got = rows_bytes(e->comm_dtype, e->receive[peer], e->columns);
    if (peer == e->comm->rank) {
      if (cards && sent > 0) ENG_TRY(transfer_inside(SPACE_CUDA, in, out, sent));
      else if (sent > 0) memcpy(in, out, (size_t)sent);
    } else {
      if (sent > 0) m[n++] = (comm_message){out, sent, peer, true};
      if (got > 0) m[n++] = (comm_message){in, got, peer, false};
      if (facts) facts->bytes += sent;
    }
    out += sent;
    in += got;
  }
  // A rank without messages takes a tag, too: the tags of later operations must match on all ranks.
  if (!cards) return comm_exchange(e->comm, m, n, comm_tag(e->comm), what);
  ENG_TRY(backend_of_space(SPACE_CUDA)->stream_follow(comm_stream_of(STREAM_ROWS)));
  ENG_TRY(comm_stream_exchange(STREAM_ROWS, e->comm, m, n, what));
  return comm_stream_wait(STREAM_ROWS, what);
}

static int64_t all_bytes(const exchange *e, const int64_t *rows)
{
  int64_t bytes = 0;
  for (int peer = 0; peer < e->comm->size; peer++)
    bytes += rows_bytes(e->comm_dtype, rows[peer], e->columns);
  return bytes;
}

/// Lists the runs that are packed from the rows at `numbers` into the messages at `message`, or
/// unpacked. All rows of a peer form one run. In FP8, however, each row is a run unless a row
/// consists of whole blocks. Returns the number of runs. If `runs` is NULL, only counts the runs.
static int64_t list_runs(wire_run *runs, int64_t *longest, const exchange *e, char *numbers,
                         const int64_t *rows, char *message)
{
  int64_t n_runs = 0, size = eng_dtype_size(e->from->dtype), columns = e->columns;
  *longest = 0;
  for (int peer = 0; peer < e->comm->size; peer++) {
    int64_t n = rows[peer], pieces = n == 0                                              ? 0
                                     : e->comm_dtype == ENG_e4m3 && columns % WIRE_BLOCK ? n
                                                                                         : 1;
    int64_t each = pieces ? n / pieces * columns : 0;
    char *scales = message + codes_bytes(n, columns);
    for (int64_t r = 0; r < pieces; r++) {
      wire_run run = {.numbers = numbers + r * each * size, .n = each, .how = WIRE_RUN_THERE};
      run.packed = message + r * each * eng_dtype_size(e->comm_dtype);
      if (e->comm_dtype == ENG_e4m3) run.scales = (float *)scales + r * blocks_of(columns);
      if (runs) runs[n_runs] = run;
      n_runs++;
    }
    if (each > *longest) *longest = each;
    numbers += n * columns * size;
    message += rows_bytes(e->comm_dtype, n, columns);
  }
  return n_runs;
}

// ------------------------------------------------------------------ between cards

static eng_status run_between_cards(exchange *e, eng_exchange_facts *facts)
{
  const backend *card = backend_of_space(SPACE_CUDA);
  int64_t longest, longest_in, n_out = list_runs(NULL, &longest, e, NULL, e->send, NULL),
                               n_in = list_runs(NULL, &longest_in, e, NULL, e->receive, NULL);
  int64_t bytes = (n_out + n_in) * (int64_t)sizeof(wire_run), flags = (int64_t)sizeof(uint32_t);
  ENG_TRY(reserve(THERE_OUT, all_bytes(e, e->send)));
  ENG_TRY(reserve(THERE_IN, all_bytes(e, e->receive)));
  ENG_TRY(reserve(THERE_TABLE, bytes + flags));
  ENG_TRY(reserve(ROOM, bytes));
  wire_run *runs = buffer[ROOM].memory;
  list_runs(runs, &longest, e, e->from->data, e->send, buffer[THERE_OUT].memory);
  list_runs(runs + n_out, &longest_in, e, e->to->data, e->receive, buffer[THERE_IN].memory);
  const wire_run *runs_there = buffer[THERE_TABLE].memory;
  // wire_pack needs memory for flags. Nothing reads the flags, because inf and nan show in the
  // results.
  void *flags_there = (char *)buffer[THERE_TABLE].memory + bytes;
  if (bytes > 0) ENG_TRY(card->move(buffer[THERE_TABLE].memory, runs, bytes, COPY_TO_DEVICE));
  if (n_out > 0)
    ENG_TRY(card->wire_pack(NULL, runs_there, (int)n_out, longest, e->comm_dtype, e->from->dtype,
                            flags_there));
  ENG_TRY(send_all(e, buffer[THERE_OUT].memory, buffer[THERE_IN].memory, facts, true));
  if (n_in == 0) return ENG_OK;
  return card->wire_unpack(NULL, runs_there + n_out, (int)n_in, longest_in, e->comm_dtype,
                           e->to->dtype);
}

// ------------------------------------------------------------------ on the host

/// Adds to `facts` the squares of a run's numbers and the squares of their rounding errors. Skips
/// numbers that are inf or nan before or after packing. Uses ROOM.
static eng_status measure(eng_exchange_facts *facts, const wire_run *run, int comm_dtype, int dtype)
{
  float *x = buffer[ROOM].memory, *back = x + run->n;
  ENG_TRY(comm_cast(x, ENG_f32, run->numbers, dtype, run->n));
  ENG_TRY(comm_decode(back, ENG_f32, run, comm_dtype, NULL));
  for (int64_t i = 0; i < run->n; i++) {
    if (!f32_is_finite(x[i]) || !f32_is_finite(back[i])) continue;
    double value = x[i], error = value - back[i];
    facts->signal += value * value;
    facts->error += error * error;
  }
  return ENG_OK;
}

/// Packs the rows at `numbers`, in host memory, into the messages at `message`, or unpacks them.
/// Measures what is packed unless `facts` is NULL.
static eng_status convert(exchange *e, bool pack, char *numbers, const int64_t *rows, char *message,
                          eng_exchange_facts *facts)
{
  int dtype = e->from->dtype;
  int64_t longest, n = list_runs(NULL, &longest, e, numbers, rows, message);
  FREED wire_run *runs = malloc(((size_t)n + 1) * sizeof *runs);
  FAIL_IF(!runs, ENG_ERR_MEMORY, "out of memory for %lld rows", (long long)n);
  list_runs(runs, &longest, e, numbers, rows, message);
  ENG_TRY(reserve(ROOM, 2 * longest * (int64_t)sizeof(float)));
  float *room = buffer[ROOM].memory;
  for (const wire_run *run = runs; run < runs + n; run++) {
    if (pack) ENG_TRY(comm_encode(run, e->comm_dtype, run->numbers, dtype, room));
    else ENG_TRY(comm_decode(run->numbers, dtype, run, e->comm_dtype, room));
    if (facts) ENG_TRY(measure(facts, run, e->comm_dtype, dtype));
  }
  return ENG_OK;
}

/// Packs all outgoing rows into OUT.
static eng_status pack_all(exchange *e, eng_exchange_facts *facts)
{
  const tensor *x = e->from;
  int64_t bytes = x->count * eng_dtype_size(x->dtype);
  char *from = x->data;
  ENG_TRY(reserve(OUT, all_bytes(e, e->send)));
  if (x->store->space != SPACE_HOST) {
    ENG_TRY(reserve(HOST, bytes));
    ENG_TRY(transfer_to_host(buffer[HOST].memory, x->store->space, from, bytes));
    from = buffer[HOST].memory;
  }
  return convert(e, true, from, e->send, buffer[OUT].memory, facts);
}

/// Unpacks all received rows from IN.
static eng_status unpack_all(exchange *e)
{
  const tensor *y = e->to;
  int64_t bytes = y->count * eng_dtype_size(y->dtype);
  bool here = y->store->space == SPACE_HOST;
  if (!here) ENG_TRY(reserve(HOST, bytes));
  char *to = here ? y->data : buffer[HOST].memory;
  ENG_TRY(convert(e, false, to, e->receive, buffer[IN].memory, NULL));
  return here ? ENG_OK : transfer_from_host(y->store->space, y->data, to, bytes);
}

static eng_status run(exchange *e, eng_exchange_facts *facts)
{
  int dtype = e->from->dtype, space = e->from->store->space;
  bool cards = comm_cards() && space == SPACE_CUDA && dtype != ENG_f64;
  if (space == SPACE_HOST && e->comm_dtype == dtype)
    return send_all(e, e->from->data, e->to->data, facts, false);
  if (!cards || facts) ENG_TRY(pack_all(e, facts));
  if (cards && e->comm_dtype == dtype)
    return send_all(e, e->from->data, e->to->data, facts, true);
  if (cards) return run_between_cards(e, facts);
  ENG_TRY(reserve(IN, all_bytes(e, e->receive)));
  ENG_TRY(send_all(e, buffer[OUT].memory, buffer[IN].memory, facts, false));
  return unpack_all(e);
}

eng_status eng_comm_exchange_rows(const eng_tensor *to, const eng_tensor *from, eng_comm *comm,
                                  const int64_t *send, const int64_t *receive, int comm_dtype,
                                  eng_exchange_facts *facts)
{
  exchange e = {.comm = comm, .send = send, .receive = receive};
  ENG_TRY(tensor_get(&e.to, to));
  ENG_TRY(tensor_get(&e.from, from));
  FAIL_IF(comm_dtype < 0 || comm_dtype >= ENG_COMM_DTYPES, ENG_ERR_VALUE,
          "exchange of rows: expected a comm dtype from 0 to 4 (ENG_COMM_*), got %d", comm_dtype);
  ENG_TRY(check_rows(&e, e.from, send, "sent"));
  ENG_TRY(check_rows(&e, e.to, receive, "received"));
  FAIL_IF(e.to->dtype != e.from->dtype || e.to->shape[1] != e.from->shape[1] ||
          e.to->store->space != e.from->store->space || e.to->store == e.from->store, ENG_ERR_SHAPE,
          "exchange of rows: expected two tensors of one dtype, width and device that share no "
          "memory, got %s in %s memory and %s in %s memory%s", tensor_text(e.from),
          backend_of_space(e.from->store->space)->name, tensor_text(e.to),
          backend_of_space(e.to->store->space)->name,
          e.to->store == e.from->store ? ", which share it" : "");
  FAIL_IF(send[comm->rank] != receive[comm->rank], ENG_ERR_VALUE,
          "exchange of rows: this rank sends %lld rows to itself, but expects %lld from itself",
          (long long)send[comm->rank], (long long)receive[comm->rank]);
  e.columns = e.from->shape[1];
  e.comm_dtype = comm_dtype_of(comm_dtype, e.from->dtype);
  FAIL_IF(rows_bytes(e.comm_dtype, e.largest, e.columns) > COMM_LARGEST, ENG_ERR_VALUE,
          "exchange of rows: %lld rows for one rank exceed the largest message (1 GiB); hint: "
          "use smaller batches", (long long)e.largest);
  e.to->store->writes++;
  return run(&e, facts);
}
