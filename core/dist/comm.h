// Ranks: groups of processes that work on one job, behind one interface. What moves bytes is a transport: MPI's stands in a plug-in
// library (comm_mpi.c), NCCL's (comm_nccl.c) serves where there is no MPI, a process of its own has none. All collective operations are made
// here (comm.c) of messages between two ranks, so that sums have one order whatever the transport, the size of a message or the algorithm does.
// What lies on the ranks' cards goes from card to card over NCCL where that is to be had, else through the host (comm_lanes, below).
//
// The order of a sum over ranks 0..n-1: with p the largest power of two <= n, first x[i] + x[i+p] for i < n - p, then pairs of
// neighbours, pairs of these pairs and so on: ((x0 + x1) + (x2 + x3)) for four.
//
// Called by Lua through engine.h and by comm_*.c. Everything below backend.h knows nothing of ranks.
#ifndef ENG_COMM_H
#define ENG_COMM_H

#include "engine.h"

/// One message of an exchange. The memory is the host's and must stand until the exchange is done.
typedef struct comm_message {
  void   *memory;
  int64_t bytes;              // at most COMM_LARGEST
  int32_t peer;               // rank in the group
  bool    send;
} comm_message;

enum { COMM_LARGEST = 1 << 30 };

/// What moves bytes. `group` is the transport's own.
typedef struct comm_transport {
  int32_t abi;                // COMM_ABI
  int32_t rank, size, local_size;   // of the world; ranks on this machine
  void   *world;
  /// Starts n messages. Those between two ranks with one tag arrive in the order they were started.
  eng_status (*start)(void **exchange, void *group, const comm_message *messages, int n, int tag);
  /// Whether all are done, after which the exchange is gone. Never waits.
  eng_status (*test)(bool *done, void *exchange);
  /// Whether somebody's message with that tag has arrived that nobody receives yet. Never waits. NULL: nobody can call out of turn.
  bool (*knocked)(void *group, int tag);
  /// The group of those who give the same color, ordered by key and rank. Everybody in the parent calls it. NULL: a group is its ranks'
  /// numbers in the world, an int32_t for each (eng_comm.of_world).
  eng_status (*split)(void **group, int32_t *rank, int32_t *size, void *parent, int color, int key);
  void (*free)(void *group);
  /// It knows no tags: all ranks must start the same exchanges in the same order, one at a time.
  bool ordered;
  /// Ends every process of the job; does not return.
  void (*abort)(int code);
  /// The last call, when all ranks are through.
  void (*finish)(void);
  const char *(*describe)(void);
} comm_transport;

enum { COMM_ABI = 3 };

typedef struct comm_host {
  int32_t abi;
  eng_status (*error)(eng_status status, const char *text);
} comm_host;

/// The plug-in's one function: NULL with the error set when the transport cannot start.
typedef const comm_transport *comm_plugin(const comm_host *host);

struct eng_comm {
  const comm_transport *transport;   // NULL: a process of its own
  void   *group;
  int32_t rank, size;
  int32_t next_tag;
  int32_t *of_world;                 // [size] the ranks' numbers in the world; NULL: it is the world
};

/// The number in the world of a group's rank.
static inline int comm_of_world(const eng_comm *comm, int rank) { return comm->of_world ? comm->of_world[rank] : rank; }

/// Tags: operations of one group are numbered in the order they are started; gradient buckets have tags of their own.
enum { COMM_TAG_OPERATION = 0, COMM_TAGS = 4096, COMM_TAG_BUCKET = 8192, COMM_TAG_ALARM = 8191 };

/// Waits for an exchange. After the timeout (eng_comm_timeout) the job is ended with a message that names who did not come to `what`.
eng_status comm_wait(eng_comm *comm, void *exchange, const char *what);
/// What is done again and again while comm_wait waits: others may be waiting for it before they come to what is waited for here (gradients
/// on their way, while backward exchanges tokens). NULL: nothing.
void comm_meanwhile(eng_status (*work)(void *data), void *data);
/// One breath of a wait of one's own that began at `since` (eng_clock): offers the core to others, and ends the job as comm_wait does.
eng_status comm_pause(double since, const char *what);
/// Starts and waits.
eng_status comm_exchange(eng_comm *comm, const comm_message *messages, int n, int tag, const char *what);
int comm_tag(eng_comm *comm);
/// From here to comm_watched the process may be in a library that knows no patience: when that lasts longer than the timeout, a thread ends
/// the job, saying that this rank waits at `what`. They nest.
typedef struct comm_watch_mark { const char *what; double since; } comm_watch_mark;
comm_watch_mark comm_watch(const char *what);
void comm_watched(comm_watch_mark before);

/// Sums values[0..n_sums) and takes maxima (NaN wins) of the n_maxima after them, in one message where there are two ranks,
/// log2(n) in all.
eng_status comm_reduce_both(eng_comm *comm, double *values, int n_sums, int n_maxima, const char *what);

/// The order of sums, for memory: out[i] = sum over k of in[k][i].
void comm_sum_f32(float *out, const float *const *in, int n, int64_t count);

/// comm_wire.c: numbers in a wire's format (ENG_WIRE_*, of numbers in `own`) as a dtype, ENG_e4m3 with a scale for each block of WIRE_BLOCK.
int comm_wire_dtype(int wire, int own);
/// Elements up to the end of a block; and the bytes of so many: codes, then scales.
int64_t comm_padded(int64_t count);
int64_t comm_packed_bytes(int wire, int64_t count);
/// n numbers in host memory from one dtype to another, by the CPU's kernel.
eng_status comm_cast(void *to, int to_dtype, const void *from, int from_dtype, int64_t n);
/// Elements [at, at + n) of a packed piece of `count`, from numbers in `dtype`, and back. `room`: n floats where that is not f32. at is a
/// multiple of a block.
eng_status comm_pack(char *piece, int wire, int64_t count, int64_t at, const void *from, int dtype, int64_t n, float *room);
eng_status comm_unpack(void *to, int dtype, int64_t n, const char *piece, int wire, int64_t count, int64_t at, float *room);

/// comm_nccl.c: messages between the cards of all ranks, on lanes (backend.h) that each go in their own order. Where cards talk, ranks ask
/// the same of a lane in the same order.
typedef enum comm_lane { LANE_HOST, LANE_GRADIENTS, LANE_ROWS, COMM_LANES } comm_lane;
/// Every rank of the world calls it before it sends what it has: whether that goes from card to card. `wanted`: here it lies on a card. Over
/// NCCL when that is so on each, each has a card of its own and the library (ENGINE_NCCL=off: never; on: or it is an error that says why not).
eng_status comm_cards_meet(bool *cards, eng_comm *everybody, bool wanted);
/// What it found the last time, without asking anybody.
bool comm_cards(void);
/// "over NCCL 2.28.9", or "through the host: ...", and why; NULL before the cards met.
const char *comm_cards_text(void);
/// The lane as the device knows it.
void *comm_lane_of(comm_lane lane);
/// Messages between cards' memory, on a lane; those to oneself are none. Returns when they are asked for.
eng_status comm_lane_exchange(comm_lane lane, const eng_comm *comm, const comm_message *messages, int n, const char *what);
/// Until all that was asked of a lane is done, with comm_wait's patience.
eng_status comm_lane_wait(comm_lane lane, const char *what);
/// At the end of the job: well, or at once.
void comm_lanes_end(bool well);
/// The world where there is no MPI: host messages go by way of the cards. `where`: what NCCL's own rendezvous takes, "address:port"; NULL
/// for a world of one.
eng_status comm_nccl_world(const comm_transport **out, int rank, int size, const char *where);

/// comm_start.c: the transport this process was started for; NULL in `out` when it is alone. Fails where it was started as one of
/// several and cannot reach the others.
eng_status comm_load(const comm_transport **out);

#endif
