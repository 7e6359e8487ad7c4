// Ranks are processes that work on one job. A transport moves bytes between them; all transports
// have one interface. The MPI transport is a plug-in library (comm_mpi.c); the NCCL transport
// (comm_nccl.c) is used where there is no MPI; a process that runs alone has no transport. All
// collective operations (comm.c) are made of messages between two ranks, so the order of a sum does
// not depend on the transport, the message size or the algorithm. Data on the ranks' cards goes
// from card to card over NCCL where possible, else through the host.
//
// The order of a sum over ranks 0..n-1: let p be the largest power of two <= n. First x[i + p] is
// added to x[i] for i < n - p. Then a balanced binary tree adds x[0..p-1], adjacent elements first:
// ((x0 + x1) + (x2 + x3)) for four ranks.
//
// README.md lists the files. Called by Lua through engine.h. Devices (cpu/, ../cuda/) never call
// this folder.
#pragma once

#include "engine.h"

/// One message of an exchange. Its host memory must stay valid until the exchange is done.
typedef struct comm_message {
  void   *memory;
  int64_t bytes;              // at most COMM_LARGEST
  int32_t peer;               // rank in the group
  bool    send;
} comm_message;

enum { COMM_LARGEST = 1 << 30 };

/// A transport: the functions that move bytes between the ranks of the world.
typedef struct comm_transport {
  int32_t abi;                // COMM_ABI
  int32_t rank, size;         // in the world
  int32_t local_size;         // ranks on this machine
  /// Starts n messages of a group. of_world: the world number of each of the group's ranks, or NULL
  /// if the group is the world. Messages between two ranks with the same tag arrive in the order in
  /// which they were started.
  eng_status (*start)(void **exchange, const int32_t *of_world, const comm_message *messages, int n,
                      int tag);
  /// Sets *done to whether all messages are done. If they are, frees the exchange. Never waits.
  eng_status (*test)(bool *done, void *exchange);
  /// Ends an exchange after an error. Afterwards no message can arrive in the exchange's memory,
  /// but its sends stay in flight. NULL: there is nothing to end, because messages arrive only
  /// during `test`.
  void (*cancel)(void *exchange);
  /// Returns whether a message with this tag has arrived and no started receive matches it. Never
  /// waits. NULL: the transport cannot test for unexpected messages.
  bool (*probe)(int tag);
  /// Ends every process of the job; does not return.
  void (*abort)(int code);
  /// Closes the transport; may wait until the other ranks close theirs. The engine calls this last,
  /// if the job has not failed.
  void (*finish)(void);
  const char *(*describe)(void);
} comm_transport;

enum { COMM_ABI = 6 };

typedef struct comm_host {
  int32_t abi;
  eng_status (*error)(eng_status status, const char *text);
} comm_host;

/// The plug-in's only function. Returns NULL if host->abi is not its own COMM_ABI or, with the
/// error set, if the transport cannot start.
typedef const comm_transport *comm_plugin(const comm_host *host);

struct eng_comm {
  const comm_transport *transport;   // NULL: a process that runs alone
  int32_t rank, size;
  int32_t next_tag;
  int32_t *of_world;  // [size] the ranks' world numbers; NULL: the group is the world
};

/// Returns the world number of a group's rank. of_world: as in eng_comm.
static inline int comm_of_world(const int32_t *of_world, int rank)
{ return of_world ? of_world[rank] : rank; }

// ---- comm_wait.c: waiting

/// The group of all ranks. It has one rank and no transport until world.c fills it.
extern eng_comm comm_world;

/// Tags of messages. The world and each group number their operations in the order in which they
/// start; comm_tag returns the tag of the next operation. Alarms and gradient buckets have separate
/// tags.
enum {
  // COMM_TAGS: how many tags the world has; all groups together share as many
  COMM_TAG_WORLD = 0, COMM_TAG_GROUP = 4095, COMM_TAGS = 4095,
  COMM_TAG_ALARM = 8191, COMM_TAG_BUCKET = 8192
};
int comm_tag(eng_comm *comm);

/// Starts an exchange. Errors: STATE if comm_broken.
eng_status comm_start(void **exchange, const eng_comm *comm, const comm_message *messages, int n,
                      int tag);
/// Sets *done to whether the exchange has finished. If it has, frees it. An exchange of NULL counts
/// as finished. Never waits. After an error, abandons the exchange (comm_broken). `what` names the
/// operation in error messages.
eng_status comm_test(bool *done, const eng_comm *comm, void *exchange, const char *what);
/// Waits until an exchange has finished, with the timeout of comm_exchange.
eng_status comm_await(const eng_comm *comm, void *exchange, const char *what);
/// Starts an exchange and waits for it. After the timeout (eng_comm_timeout), ends the job with a
/// message. If the transport can probe, the message names the ranks that did not reach `what`.
eng_status comm_exchange(eng_comm *comm, const comm_message *messages, int n, int tag,
                         const char *what);
/// True after an exchange was abandoned because of an error. Other ranks may wait forever for the
/// messages of that exchange, so this process starts no other exchange and ends the job when it
/// exits.
extern bool comm_broken;
enum { COMM_LOST_CODE = 70 };          // exit code of a job that lost a rank
/// Sets the function `work`, which comm_exchange calls repeatedly while it waits; NULL: none. Other
/// ranks may be unable to reach the exchange until this rank has done more work. For example, while
/// this rank exchanges tokens in backward, another rank may wait for its gradient buckets.
void comm_meanwhile(eng_status (*work)(void *data), void *data);
/// Yields the core, and ends the job after the timeout, as comm_exchange does. A loop that waits
/// for other ranks calls this in each iteration. `since` (eng_clock) is the time at which the loop
/// began. If this process was stopped, advances `since` by the time for which it was stopped.
/// Errors: INTERRUPTED at level 2 of eng_interrupt.
eng_status comm_pause(double *since, const char *what);
/// Begin and end the watch over a library call that has no timeout of its own. If the call exceeds
/// eng_comm_timeout, a thread prints that this rank waits at `what` and ends the job. Watches nest:
/// comm_watch returns the outer watch, which comm_watched restores.
typedef struct comm_watch_mark { const char *what; double since; } comm_watch_mark;
comm_watch_mark comm_watch(const char *what);
void comm_watched(comm_watch_mark before);

// ---- comm.c: collectives that engine.h does not declare

/// Reduces `values` over the ranks, in place: sums values[0..n_sums), and takes the maxima of the
/// next n_maxima values, where NaN exceeds every number. Takes about log2(n) exchanges for n ranks;
/// two if more than 4096 values are all sums or all maxima.
eng_status comm_reduce_both(eng_comm *comm, double *values, int n_sums, int n_maxima,
                            const char *what);

// ---- comm_pack.c: numbers in a comm dtype

/// Returns the dtype that `option` (ENG_COMM_*) selects for numbers in dtype `own`. The result
/// ENG_e4m3 stands for FP8 with one scale for each block of WIRE_BLOCK elements.
int comm_dtype_of(int option, int own);
/// comm_padded returns `count` rounded up to a multiple of WIRE_BLOCK. comm_packed_bytes returns
/// the size in bytes of `count` packed numbers; in FP8 the codes come first, then the scales.
int64_t comm_padded(int64_t count);
int64_t comm_packed_bytes(int comm_dtype, int64_t count);
/// Converts n numbers in host memory from one dtype to another with the CPU's kernel.
eng_status comm_cast(void *to, int to_dtype, const void *from, int from_dtype, int64_t n);
/// Returns a run that begins at element `at`, a multiple of WIRE_BLOCK, of a packed piece of
/// `count` elements. The caller sets the other fields.
typedef struct wire_run wire_run;
wire_run comm_run(void *piece, int comm_dtype, int64_t count, int64_t at);
/// comm_encode converts the numbers of a run to its packed form, and comm_decode converts this form
/// to the numbers `to`. `room`: n floats, used in FP8 if `dtype` is not f32.
eng_status comm_encode(const wire_run *run, int comm_dtype, const void *numbers, int dtype,
                       float *room);
eng_status comm_decode(void *to, int dtype, const wire_run *run, int comm_dtype, float *room);
/// comm_pack, comm_unpack and comm_sum do in host memory what a device's wire_pack, wire_unpack and
/// wire_sum (backend.h) do in its memory; comm_pack and comm_unpack take a single run. `room`: work
/// space of n floats for a run of n elements, or 2 n with WIRE_RUN_ADD. comm_sum needs n * count
/// floats, and replaces the packed pieces in `terms` [n] by their numbers.
eng_status comm_pack(uint32_t *flags, const wire_run *run, int comm_dtype, int dtype, float *room);
eng_status comm_unpack(const wire_run *run, int comm_dtype, int dtype, float *room);
eng_status comm_sum(void *out, const float **terms, int n, int64_t count, int comm_dtype,
                    float share, float *room);
/// Returns the flags of a gradient, given those of all its runs. Runs are packed separately, but
/// WIRE_OVERFLOW counts only if the gradient itself has no inf.
int comm_flags(uint32_t of_runs);

// ---- comm_nccl.c: messages between cards

/// The streams (backend.h) that messages between cards use. HOST: host messages where there is no
/// MPI. GRADIENTS: gradients and updated weights. ROWS: rows of experts. All ranks issue the same
/// work on a stream in the same order.
typedef enum comm_stream { STREAM_HOST, STREAM_GRADIENTS, STREAM_ROWS, COMM_STREAMS } comm_stream;
/// Decides whether data goes from card to card. Every rank of the world calls this before it sends
/// data. `wanted`: this rank's data is on a card. Sets `cards` if the data of every rank is on a
/// card, each rank has its own card, and NCCL is available. With ENGINE_NCCL=off on any rank,
/// `cards` is false. With ENGINE_NCCL=on, or if the ranks have no other connection, a false result
/// is an error that gives the reason. A process that runs alone always gets false.
eng_status comm_cards_decide(bool *cards, eng_comm *everybody, bool wanted);
/// Returns the decision of the last comm_cards_decide, without communication.
bool comm_cards(void);
/// Returns how data on cards travels: "from card to card over NCCL 2.28.9", or "through the host:
/// ..." with the reason. Returns NULL before comm_cards_decide, for a process that runs alone, and
/// if all data is in host memory.
const char *comm_cards_text(void);
/// Returns the device's stream for a comm_stream.
void *comm_stream_of(comm_stream stream);
/// Enqueues messages between cards' memory on a stream and returns. A rank must not send to itself.
eng_status comm_stream_exchange(comm_stream stream, const eng_comm *comm,
                                const comm_message *messages, int n, const char *what);
/// Waits until a stream is idle, with comm_exchange's timeout.
eng_status comm_stream_wait(comm_stream stream, const char *what);
/// Closes the communicators at the end of the job, or aborts them if `well` is false.
void comm_streams_end(bool well);
/// Connects a world without MPI: host messages go through the cards. `where`: the address of NCCL's
/// rendezvous, "address:port". NULL for a world of one rank, or if NCCL_COMM_ID has the address.
eng_status comm_nccl_world(const comm_transport **out, int rank, int size, const char *where);
