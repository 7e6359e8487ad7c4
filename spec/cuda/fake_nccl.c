// A stand-in for NCCL on machines without cards: the functions of core/dist/comm_nccl.h over memory
// shared by the processes of one machine. It guarantees only what NCCL guarantees: messages
// between two ranks of a communicator arrive in order, those of a group run concurrently, and
// nothing runs before its stream reaches it. It refuses what NCCL refuses (two ranks on one card,
// sizes that differ between the two sides of a message, memory outside the card) and hangs where
// NCCL hangs. Loaded by ENGINE_NCCL_LIBRARY.
//
// Processes meet in a file in FAKE_NCCL_FOLDER (or /dev/shm), named by the id, or by NCCL_COMM_ID
// if set. FAKE_NCCL_VERSION sets the reported version.
#define _GNU_SOURCE
#include "fake.h"

#include "dist/comm_nccl.h"

#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define EXPORT __attribute__((visibility("default")))

enum {
  RING = 1 << 16,
  MOST_RANKS = 16,
  INVALID_USAGE = 5,
  SYSTEM_ERROR = 2,
  INTERNAL_ERROR = 3,
  INVALID_ARGUMENT = 4
};

/// Bytes from one rank to another: `head` counts those written, `tail` those read.
typedef struct ring {
  _Atomic uint64_t head, tail;
  char data[RING];
} ring;

typedef struct meeting {
  _Atomic int arrived, left[MOST_RANKS];
  int  pid[MOST_RANKS];
  char card[MOST_RANKS][64];
  ring ring[];                        // [size][size] from, to
} meeting;

struct ncclComm {
  meeting *shared;
  size_t   bytes;
  int      rank, size, splits;
  bool     broken;
  char     name[128];
};

static char last_error[512];

static unsigned refuse(unsigned result, const char *text, const char *more)
{
  snprintf(last_error, sizeof last_error, "%.100s%.400s", text, more);
  return result;
}

EXPORT unsigned ncclGetVersion(int *version)
{
  const char *text = getenv("FAKE_NCCL_VERSION");
  *version = text ? atoi(text) : 22809;
  return NCCL_SUCCESS;
}

EXPORT const char *ncclGetErrorString(unsigned result)
{
  static const char *const texts[] = {"no error",
                                      "unhandled cuda error",
                                      "unhandled system error",
                                      "internal error",
                                      "invalid argument",
                                      "invalid usage",
                                      "remote process exited or there was a network error",
                                      "NCCL operation in progress"};
  return result < sizeof texts / sizeof *texts ? texts[result] : "unknown result code";
}

EXPORT const char *ncclGetLastError(nccl_comm comm) { (void)comm; return last_error; }

EXPORT unsigned ncclGetUniqueId(nccl_id *id)
{
  static int n;
  const char *place = getenv("NCCL_COMM_ID");
  if (place && !strrchr(place, ':'))
    return refuse(INVALID_ARGUMENT, "Invalid NCCL_COMM_ID: ", place);
  if (place) snprintf(id->bytes, sizeof id->bytes, "at-%.100s", place);
  else snprintf(id->bytes, sizeof id->bytes, "of-%d-%d", (int)getpid(), n++);
  for (char *c = id->bytes; *c; c++)
    if (*c == '/') *c = '_';
  return NCCL_SUCCESS;
}

/// Waits for all ranks, however long that takes.
static unsigned meet(nccl_comm *out, const char *name, int rank, int size)
{
  const char *folder = getenv("FAKE_NCCL_FOLDER");
  char path[512];
  *out = NULL;
  if (size > MOST_RANKS || rank < 0 || rank >= size)
    return refuse(INVALID_ARGUMENT, "ranks out of range", "");
  struct ncclComm *c = calloc(1, sizeof *c);
  snprintf(c->name, sizeof c->name, "%s", name);
  snprintf(path, sizeof path, "%s/fake-nccl-%s", folder ? folder : "/dev/shm", name);
  c->rank = rank;
  c->size = size;
  c->bytes = sizeof(meeting) + (size_t)(size * size) * sizeof(ring);
  int file = open(path, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, (off_t)c->bytes) != 0)
    return refuse(SYSTEM_ERROR, "cannot make ", path);
  c->shared = mmap(NULL, c->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (c->shared == MAP_FAILED) return refuse(SYSTEM_ERROR, "cannot map ", path);
  c->shared->pid[rank] = (int)getpid();
  snprintf(c->shared->card[rank], sizeof c->shared->card[rank], "%s", fake_identity());
  atomic_fetch_add(&c->shared->arrived, 1);
  while (atomic_load(&c->shared->arrived) < size) usleep(1000);
  if (rank == 0) unlink(path);
  for (int a = 0; a < size; a++)
    for (int b = 0; b < a; b++)
      if (strcmp(c->shared->card[a], c->shared->card[b]) == 0)
        return refuse(INVALID_USAGE, "Duplicate GPU detected: ", c->shared->card[a]);
  *out = c;
  return NCCL_SUCCESS;
}

EXPORT unsigned ncclCommInitRank(nccl_comm *comm, int size, nccl_id id, int rank)
{ return meet(comm, id.bytes, rank, size); }

EXPORT unsigned ncclCommSplit(nccl_comm comm, int color, int key, nccl_comm *part, void *config)
{
  char name[160];
  if (color != 0 || key != comm->rank || config)
    return refuse(INVALID_ARGUMENT, "the stand-in can only split into the same ranks", "");
  snprintf(name, sizeof name, "%.100s+%d", comm->name, comm->splits++);
  return meet(part, name, comm->rank, comm->size);
}

EXPORT unsigned ncclCommDestroy(nccl_comm comm)
{
  atomic_store(&comm->shared->left[comm->rank], 1);
  munmap(comm->shared, comm->bytes);
  free(comm);
  return NCCL_SUCCESS;
}

EXPORT unsigned ncclCommAbort(nccl_comm comm) { return ncclCommDestroy(comm); }

/// Whether a process has ended, zombies included.
static bool dead(int pid)
{
  char path[64], state = 0;
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE *file = fopen(path, "r");
  if (!file) return true;
  bool told = fscanf(file, "%*d (%*[^)]) %c", &state) == 1;
  fclose(file);
  return told && (state == 'Z' || state == 'X');
}

EXPORT unsigned ncclCommGetAsyncError(nccl_comm comm, unsigned *error)
{
  *error = comm->broken ? INTERNAL_ERROR : NCCL_SUCCESS;
  for (int r = 0; r < comm->size; r++)
    if (!comm->shared->left[r] && dead(comm->shared->pid[r])) *error = NCCL_REMOTE_ERROR;
  return NCCL_SUCCESS;
}

// ---- messages

typedef struct message {
  nccl_comm comm;
  fake_lane *lane;
  char     *memory;
  // at: bytes moved so far, first the eight bytes of the size, then the memory
  uint64_t  bytes, at;
  int       peer;
  bool      send, done;
} message;

typedef struct group_task {
  fake_task task;
  int       n;
  message   messages[];
} group_task;

static message *waiting;
static int n_waiting, capacity, depth;

/// Moves up to `bytes` bytes of a message; returns how many.
static uint64_t write_ring(ring *r, const char *from, uint64_t bytes)
{
  uint64_t head = atomic_load(&r->head), room = RING - (head - atomic_load(&r->tail)),
           n = bytes < room ? bytes : room;
  for (uint64_t i = 0; i < n; i++) r->data[(head + i) % RING] = from[i];
  atomic_store(&r->head, head + n);
  return n;
}

static uint64_t read_ring(ring *r, char *to, uint64_t bytes)
{
  uint64_t tail = atomic_load(&r->tail), there = atomic_load(&r->head) - tail,
           n = bytes < there ? bytes : there;
  for (uint64_t i = 0; i < n; i++) to[i] = r->data[(tail + i) % RING];
  atomic_store(&r->tail, tail + n);
  return n;
}

/// Advances as far as possible; false when the other side expects another size.
static bool move_on(message *m)
{
  struct ncclComm *c = m->comm;
  ring *r = &c->shared->ring[m->send ? c->rank * c->size + m->peer : m->peer * c->size + c->rank];
  if (m->at == 0) {
    uint64_t told = m->bytes;
    if (m->send) {
      if (RING - (atomic_load(&r->head) - atomic_load(&r->tail)) < sizeof told) return true;
      write_ring(r, (const char *)&told, sizeof told);
    } else {
      if (atomic_load(&r->head) - atomic_load(&r->tail) < sizeof told) return true;
      read_ring(r, (char *)&told, sizeof told);
      if (told != m->bytes) return false;
    }
    m->at = sizeof told;
  }
  uint64_t done = m->at - sizeof m->bytes;
  m->at += m->send ? write_ring(r, m->memory + done, m->bytes - done) :
                     read_ring(r, m->memory + done, m->bytes - done);
  m->done = m->at == m->bytes + sizeof m->bytes;
  return true;
}

static int run_group(fake_task *task)
{
  group_task *g = (group_task *)task;
  bool all = true;
  for (int i = 0; i < g->n; i++) {
    message *m = &g->messages[i];
    bool before = false;              // an earlier message with the same rank is unfinished
    for (int k = 0; k < i && !before; k++)
      before =
        !g->messages[k].done && g->messages[k].send == m->send && g->messages[k].peer == m->peer;
    if (!m->done && !before && !move_on(m)) {
      m->comm->broken = true;
      refuse(INTERNAL_ERROR, "a message's two sides differ in size", "");
      return -1;
    }
    all = all && m->done;
  }
  return all;
}

static unsigned add(void *memory, size_t bytes, unsigned type, int peer, nccl_comm comm,
                    void *stream, bool send)
{
  fake_lane *lane = stream;
  if (!comm || !lane || type != NCCL_BYTES || peer < 0 || peer >= comm->size)
    return refuse(INVALID_ARGUMENT, "invalid message", "");
  if (!lane->on_card(memory) || !lane->on_card((char *)memory + bytes - 1))
    return refuse(INVALID_ARGUMENT, "memory that is not the card's", "");
  if (depth == 0)
    return refuse(INVALID_USAGE, "a message to its own rank outside of a group would hang", "");
  if (n_waiting == capacity) {
    capacity = 2 * capacity + 16;
    waiting = realloc(waiting, (size_t)capacity * sizeof *waiting);
  }
  waiting[n_waiting++] = (message){comm, lane, memory, bytes, 0, peer, send, false};
  return NCCL_SUCCESS;
}

EXPORT unsigned ncclSend(const void *memory, size_t bytes, unsigned type, int peer, nccl_comm comm,
                         void *stream)
{
  return add((void *)memory, bytes, type, peer, comm, stream, true);
}

EXPORT unsigned ncclRecv(void *memory, size_t bytes, unsigned type, int peer, nccl_comm comm,
                         void *stream)
{
  return add(memory, bytes, type, peer, comm, stream, false);
}

EXPORT unsigned ncclGroupStart(void)
{
  depth++;
  return NCCL_SUCCESS;
}

EXPORT unsigned ncclGroupEnd(void)
{
  if (depth == 0) return refuse(INVALID_USAGE, "a group that has not begun", "");
  if (--depth > 0 || n_waiting == 0) return NCCL_SUCCESS;
  group_task *g = malloc(sizeof *g + (size_t)n_waiting * sizeof *waiting);
  g->n = n_waiting;
  memcpy(g->messages, waiting, (size_t)n_waiting * sizeof *waiting);
  n_waiting = 0;
  for (int i = 0; i < g->n; i++)
    if (g->messages[i].lane != g->messages[0].lane)
      return refuse(INVALID_USAGE, "a group on two streams", "");
  fake_lane_push(g->messages[0].lane, &g->task, run_group, "messages");
  return NCCL_SUCCESS;
}
