// NCCL: messages from card to card and, if the processes have no MPI, host messages through the
// cards. The library is loaded when it is first needed. The engine uses only NCCL's messages
// between two ranks, and computes sums itself in the order of comm.h.
//
// NCCL's communicators have no tags: both sides must issue the same messages in the same order. So
// each kind of work with its own order (comm_stream) has a communicator over all ranks and a stream
// of the device (backend.h). A group is a list of world ranks in that communicator. Two ranks may
// issue work on two streams in different orders. NCCL allows that as long as the kernels of all
// streams fit on a card at once: each stream runs one kernel at a time, of at most 32 blocks
// (NCCL_MAX_CTAS).
// Owns the library, the communicators and the staging memory of host messages. Called by Lua and
// the other files of this folder.
#define _GNU_SOURCE
#include "comm_nccl.h"

#include "device/backend.h"
#include "comm.h"
#include "base/error.h"
#include "device/plugin.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct {
  nccl_calls     call;
  void          *library;
  char           text[640];         // version and file
  const backend *card;
  int32_t        rank, size;
  nccl_comm      comm[COMM_STREAMS];
  void          *stream[COMM_STREAMS];
  bool           direct;            // comm_cards_decide enabled card-to-card messages
  char           how[640];          // how data on cards travels, and why, as text
} nccl;

// ------------------------------------------------------------------ the library

static eng_status load(void)
{
  static const char *const names[] = NCCL_NAMES;
  if (nccl.library) return ENG_OK;
  // specs select a library that needs no card
  const char *other = getenv("ENGINE_NCCL_LIBRARY");
  if (other && !*other) other = NULL;
  const char *name = other ? other : "libnccl.so.2";
  void *library = plugin_library(name, RTLD_LOCAL);
  FAIL_IF(!library, ENG_ERR_LIBRARY, "cannot load %s (%s)", name,
          other ? dlerror() : "install NVIDIA's package libnccl2; the CUDA toolkit lacks it");
  union { void *object; void (*function)(void); } entry;
  void (**slot)(void) = (void (**)(void))&nccl.call;
  _Static_assert(sizeof nccl.call == sizeof names / sizeof *names * sizeof *slot,
                 "a name for every function");
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    entry.object = dlsym(library, names[i]);
    if (!entry.object) {
      dlclose(library);
      return error_set(ENG_ERR_LIBRARY,
                       "%s has no %s; hint: install NCCL %d.%d or later", name, names[i],
                       NCCL_OLDEST / 10000, NCCL_OLDEST / 100 % 100);
    }
    slot[i] = entry.function;
  }
  int version = 0;
  Dl_info info;
  nccl.call.get_version(&version);
  snprintf(nccl.text, sizeof nccl.text, "%d.%d.%d, %.512s", version / 10000, version / 100 % 100,
           version % 100, dladdr(entry.object, &info) && info.dli_fname ? info.dli_fname : name);
  if (version < NCCL_OLDEST || version >= 30000) {
    dlclose(library);
    return error_set(ENG_ERR_LIBRARY, "NCCL %s: expected version %d.%d or a later 2.x", nccl.text,
                     NCCL_OLDEST / 10000, NCCL_OLDEST / 100 % 100);
  }
  nccl.library = library;
  return ENG_OK;
}

eng_status eng_comm_nccl(const char **text)
{
  *text = NULL;
  ENG_TRY(load());
  *text = nccl.text;
  return ENG_OK;
}

static eng_status failed(nccl_result result, const char *what, nccl_comm comm)
{
  const char *more = nccl.call.last_error(comm);
  return error_set(
    ENG_ERR_LIBRARY, "nccl: %s: %s%s%s%s", what, nccl.call.error_string(result),
    more && more[0] ? ": " : "", more ? more : "",
    result == NCCL_REMOTE_ERROR
      ? "; another rank has died"
      : "; hint: NCCL_DEBUG=WARN prints more; with MPI, ENGINE_NCCL=off sends through the host");
}

static eng_status card_of_process(void)
{
  if (!nccl.card) nccl.card = backend_find("cuda");
  return nccl.card ? ENG_OK : ENG_ERR_DEVICE;
}

/// Opens the stream of a communicator whose creation returned `result`. Returns the error if the
/// creation failed.
static eng_status open_stream(comm_stream stream, nccl_result result, const char *what)
{
  if (result != NCCL_SUCCESS) return failed(result, what, NULL);
  return nccl.card->stream_new(&nccl.stream[stream]);
}

static eng_status open_first(comm_stream stream, nccl_id id)
{
  return open_stream(stream, nccl.call.init_rank(&nccl.comm[stream], nccl.size, id, nccl.rank),
                     "connecting the cards");
}

static eng_status open_another(comm_stream stream, comm_stream first)
{
  if (nccl.comm[stream]) return ENG_OK;
  return open_stream(stream,
                     nccl.call.split(nccl.comm[first], 0, nccl.rank, &nccl.comm[stream], NULL),
                     "opening another communicator of all cards");
}

void comm_streams_end(bool well)
{
  for (int stream = COMM_STREAMS - 1; stream >= 0; stream--) {
    if (!nccl.comm[stream]) continue;
    if (well) nccl.call.destroy(nccl.comm[stream]);
    else nccl.call.abort(nccl.comm[stream]);
    nccl.comm[stream] = NULL;
  }
}

// ------------------------------------------------------------------ streams

void *comm_stream_of(comm_stream stream) { return nccl.stream[stream]; }

/// Enqueues messages of a group. of_world: the world rank of each of the group's ranks, or NULL if
/// the group is the world.
static eng_status exchange(comm_stream stream, const int32_t *of_world,
                           const comm_message *messages, int n, const char *what)
{
  // watched, because the call blocks while NCCL connects two ranks for the first time
  comm_watch_mark before = comm_watch(what);
  nccl_result result = nccl.call.group_start();
  for (int i = 0; i < n && result == NCCL_SUCCESS; i++) {
    const comm_message *m = &messages[i];
    int peer = comm_of_world(of_world, m->peer);
    if (m->bytes == 0) continue;
    result = m->send ? nccl.call.send(m->memory, (size_t)m->bytes, NCCL_BYTES, peer,
                                      nccl.comm[stream], nccl.stream[stream])
                     : nccl.call.receive(m->memory, (size_t)m->bytes, NCCL_BYTES, peer,
                                         nccl.comm[stream], nccl.stream[stream]);
  }
  nccl_result end = nccl.call.group_end();
  comm_watched(before);
  if (result == NCCL_SUCCESS) result = end;
  return result == NCCL_SUCCESS ? ENG_OK : failed(result, what, nccl.comm[stream]);
}

eng_status comm_stream_exchange(comm_stream stream, const eng_comm *comm,
                                const comm_message *messages, int n, const char *what)
{ return exchange(stream, comm->of_world, messages, n, what); }

/// Sets *done to whether a stream is idle. Returns an error if NCCL has detected one. Never waits.
static eng_status stream_done(bool *done, comm_stream stream, const char *what)
{
  nccl_result noticed = NCCL_SUCCESS;
  ENG_TRY(nccl.card->stream_done(done, nccl.stream[stream]));
  if (*done) return ENG_OK;
  nccl_result result = nccl.call.async_error(nccl.comm[stream], &noticed);
  if (result == NCCL_SUCCESS) result = noticed;
  if (result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS) return ENG_OK;
  // NCCL also reports an error when another rank ends after its last message. If the stream's work
  // is done by now, this error does not matter.
  ENG_TRY(nccl.card->stream_done(done, nccl.stream[stream]));
  return *done ? ENG_OK : failed(result, what, nccl.comm[stream]);
}

eng_status comm_stream_wait(comm_stream stream, const char *what)
{
  double since = eng_clock();
  while (true) {
    bool done = false;
    ENG_TRY(stream_done(&done, stream, what));
    if (done) return ENG_OK;
    ENG_TRY(comm_pause(&since, what));
  }
}

// ------------------------------------------------------------------ from card to card, or not

typedef enum nccl_wish { WISH_AUTO, WISH_ON, WISH_OFF, WISH_UNKNOWN } nccl_wish;

/// The report of each rank, from which all ranks make the same decision.
typedef struct card_note {
  int32_t wish, wanted, can;
  char    card[96];               // the unique name of the rank's card
  char    why[156];               // the reason if `can` is 0; ENGINE_NCCL itself if it is invalid
} card_note;

static nccl_wish wish_of_process(void)
{
  const char *text = getenv("ENGINE_NCCL");
  if (!text || !*text || strcmp(text, "auto") == 0) return WISH_AUTO;
  return strcmp(text, "on") == 0 ? WISH_ON : strcmp(text, "off") == 0 ? WISH_OFF : WISH_UNKNOWN;
}

static void write_note(card_note *note, bool wanted)
{
  *note = (card_note){.wish = (int32_t)wish_of_process(), .wanted = wanted};
  if (note->wish == WISH_UNKNOWN)
    snprintf(note->why, sizeof note->why, "%s", getenv("ENGINE_NCCL"));
  if (!wanted || note->wish == WISH_OFF || note->wish == WISH_UNKNOWN) return;
  note->can = load() == ENG_OK && card_of_process() == ENG_OK;
  // NCCL accepts two ranks on one card if NCCL_HOSTID gives them different host ids, so the host id
  // is part of the card's name
  const char *host = getenv("NCCL_HOSTID");
  if (note->can)
    snprintf(note->card, sizeof note->card, "%s %.50s", nccl.card->identity(), host ? host : "");
  else snprintf(note->why, sizeof note->why, "%s", eng_error_message());
}

/// Decides, with the same result on every rank, whether NCCL can be used. If it cannot, `why`
/// receives the reason. `any`: some rank's data is on a card. `must`: some rank requires NCCL.
static bool decide(char *why, size_t size, bool *any, bool *must, const card_note *notes, int n)
{
  *any = *must = false;
  for (int r = 0; r < n; r++) {
    *any = *any || notes[r].wanted;
    *must = *must || notes[r].wish == WISH_ON;
  }
  why[0] = 0;
  for (int r = 0; r < n && !why[0]; r++) {
    const card_note *a = &notes[r];
    if (a->wish == WISH_OFF) snprintf(why, size, "ENGINE_NCCL=off");
    else if (!a->wanted) snprintf(why, size, "the data of rank %d is in host memory", r);
    else if (!a->can) snprintf(why, size, "rank %d: %s", r, a->why);
    for (int q = 0; q < r && !why[0]; q++)
      if (strcmp(notes[q].card, a->card) == 0)
        snprintf(why, size, "ranks %d and %d share one card, which NCCL refuses", q, r);
  }
  return !why[0];
}

static eng_status open_streams(eng_comm *everybody)
{
  if (nccl.comm[STREAM_HOST]) ENG_TRY(open_another(STREAM_GRADIENTS, STREAM_HOST));
  else if (!nccl.comm[STREAM_GRADIENTS]) {
    nccl_id id = {{0}};
    nccl_result result = everybody->rank == 0 ? nccl.call.get_unique_id(&id) : NCCL_SUCCESS;
    nccl.rank = everybody->rank;
    nccl.size = everybody->size;
    if (result != NCCL_SUCCESS) return failed(result, "making a rendezvous address", NULL);
    ENG_TRY(eng_comm_broadcast(everybody, &id, sizeof id, 0));
    ENG_TRY(open_first(STREAM_GRADIENTS, id));
  }
  return open_another(STREAM_ROWS, STREAM_GRADIENTS);
}

eng_status comm_cards_decide(bool *cards, eng_comm *everybody, bool wanted)
{
  char why[320];
  bool any, must;
  *cards = nccl.direct = false;
  // one process without other ranks, or a rehearsal (comm_predict.c)
  if (!everybody->transport || !everybody->transport->test) return ENG_OK;
  card_note own;
  FREED card_note *notes = calloc((size_t)everybody->size, sizeof *notes);
  FAIL_IF(!notes, ENG_ERR_MEMORY, "out of memory on the host for a list of %d ranks",
          everybody->size);
  write_note(&own, wanted);
  ENG_TRY(eng_comm_all_gather(everybody, notes, &own, sizeof own));
  for (int r = 0; r < everybody->size; r++)
    FAIL_IF(notes[r].wish == WISH_UNKNOWN, ENG_ERR_VALUE,
            "ENGINE_NCCL on rank %d: expected auto, on or off, got '%s'", r, notes[r].why);
  bool can = decide(why, sizeof why, &any, &must, notes, everybody->size);
  FAIL_IF(!can && must, ENG_ERR_LIBRARY,
          "NCCL is required (ENGINE_NCCL=on) but not available: %s; hint: ENGINE_NCCL=auto", why);
  FAIL_IF(!can && nccl.comm[STREAM_HOST] && everybody->size > 1, ENG_ERR_LIBRARY,
          "these processes are connected by NCCL alone, which cannot carry this data: %s; hint: "
          "use device=cuda on every rank, or start them with mpirun or srun --mpi=pmix", why);
  if (!can) {
    snprintf(nccl.how, sizeof nccl.how, "%s%s", any ? "through the host: " : "", any ? why : "");
    return ENG_OK;
  }
  comm_watch_mark before = comm_watch("the connection of the ranks' cards");
  eng_status status = open_streams(everybody);
  comm_watched(before);
  if (status != ENG_OK) return status;
  snprintf(nccl.how, sizeof nccl.how, "from card to card over NCCL %.*s",
           (int)strcspn(nccl.text, ","), nccl.text);
  *cards = nccl.direct = true;
  return ENG_OK;
}

bool comm_cards(void) { return nccl.direct; }
const char *comm_cards_text(void) { return nccl.how[0] ? nccl.how : NULL; }

// ------------------------------------------------------------------ host messages over the cards

/// Messages in flight, and their staging buffer on the card. A finished exchange is reused, so that
/// steps after the first allocate nothing.
typedef struct staged {
  struct staged *next;
  int           n, capacity;
  comm_message *host, *there;        // [n] the messages in host memory, and on the card
  char         *memory;              // on the card
  int64_t       bytes;
} staged;

enum { STAGED_ALIGN = 256 };

static staged *spare;

static eng_status staged_room(staged *s, int n, int64_t bytes)
{
  if (n > s->capacity) {
    free(s->host);
    free(s->there);
    s->host = calloc((unsigned)n, sizeof *s->host);
    s->there = calloc((unsigned)n, sizeof *s->there);
    s->capacity = s->host && s->there ? n : 0;
    FAIL_IF(s->capacity == 0, ENG_ERR_MEMORY, "ranks: out of memory for messages");
  }
  if (bytes > s->bytes) {
    if (s->memory) nccl.card->memory.give(s->memory, s->bytes);
    s->memory = nccl.card->memory.take(bytes);
    s->bytes = s->memory ? bytes : 0;
    FAIL_IF(!s->memory, ENG_ERR_MEMORY,
            "ranks: out of memory on the card for messages of %lld bytes", (long long)bytes);
  }
  return ENG_OK;
}

static const char MESSAGES[] = "an exchange of messages between ranks";

static eng_status start(void **out, const int32_t *of_world, const comm_message *messages, int n,
                        int tag)
{
  (void)tag;
  staged *s = spare ? spare : calloc(1, sizeof *s);
  int64_t bytes = 0;
  *out = NULL;
  FAIL_IF(!s, ENG_ERR_MEMORY, "ranks: out of memory for messages");
  spare = s->next;
  for (int i = 0; i < n; i++)
    bytes += (messages[i].bytes + STAGED_ALIGN - 1) / STAGED_ALIGN * STAGED_ALIGN;
  eng_status status = staged_room(s, n, bytes);
  char *at = s->memory;
  for (int i = 0; i < n && status == ENG_OK; i++) {
    s->host[i] = s->there[i] = messages[i];
    s->there[i].memory = at;
    at += (messages[i].bytes + STAGED_ALIGN - 1) / STAGED_ALIGN * STAGED_ALIGN;
    if (messages[i].send && messages[i].bytes > 0)
      status = nccl.card->stream_move(nccl.stream[STREAM_HOST], s->there[i].memory,
                                      messages[i].memory, messages[i].bytes, COPY_TO_DEVICE);
  }
  s->n = n;
  if (status == ENG_OK) status = exchange(STREAM_HOST, of_world, s->there, n, MESSAGES);
  if (status == ENG_OK) *out = s;
  else {
    s->next = spare;
    spare = s;
  }
  return status;
}

static eng_status test(bool *done, void *under_way)
{
  staged *s = under_way;
  ENG_TRY(stream_done(done, STREAM_HOST, MESSAGES));
  if (!*done) return ENG_OK;
  for (int i = 0; i < s->n; i++)
    if (!s->host[i].send && s->host[i].bytes > 0)
      ENG_TRY(nccl.card->stream_move(nccl.stream[STREAM_HOST], s->host[i].memory,
                                     s->there[i].memory, s->host[i].bytes, COPY_TO_HOST));
  s->next = spare;
  spare = s;
  return ENG_OK;
}

static void end_all(int code)
{
  comm_streams_end(false);
  _exit(code);
}

static void finish(void) {}

static comm_transport transport;

static const char *describe(void)
{
  static char text[128];
  snprintf(text, sizeof text, "NCCL %.*s without MPI, %d rank%s, %d of them here",
           (int)strcspn(nccl.text, ","), nccl.text, nccl.size, nccl.size > 1 ? "s" : "",
           transport.local_size);
  return text;
}

/// Counts the ranks whose machine has this machine's name.
static eng_status count_local(void)
{
  enum { NAME = 64 };
  char own[NAME] = "";
  FREED char *names = calloc((size_t)nccl.size, NAME);
  FAIL_IF(!names, ENG_ERR_MEMORY, "out of memory for the host names of %d ranks", nccl.size);
  gethostname(own, sizeof own - 1);
  eng_status status = eng_comm_all_gather(&comm_world, names, own, NAME);
  for (int r = 0; r < nccl.size; r++)
    transport.local_size += strcmp(names + (size_t)r * NAME, own) == 0;
  return status;
}

eng_status comm_nccl_world(const comm_transport **out, int rank, int size, const char *where)
{
  nccl_id id = {{0}};
  *out = NULL;
  FAIL_IF(wish_of_process() == WISH_OFF, ENG_ERR_LIBRARY, "ENGINE_NCCL=off, but these processes "
          "have no other connection; hint: use mpirun, or srun --mpi=pmix");
  ENG_TRY(load());
  ENG_TRY(card_of_process());
  nccl.rank = rank;
  nccl.size = size;
  bool ours = where && !getenv("NCCL_COMM_ID");
  if (ours) setenv("NCCL_COMM_ID", where, 1);
  nccl_result result = nccl.call.get_unique_id(&id);
  eng_status status = result == NCCL_SUCCESS ? open_first(STREAM_HOST, id)
                                             : failed(result, "making a rendezvous address", NULL);
  if (ours) unsetenv("NCCL_COMM_ID");
  ENG_TRY(status);
  transport = (comm_transport){.abi = COMM_ABI,
                               .rank = rank,
                               .size = size,
                               .start = start,
                               .test = test,
                               .abort = end_all,
                               .finish = finish,
                               .describe = describe};
  comm_world.transport = &transport;                  // for count_local
  ENG_TRY(count_local());
  *out = &transport;
  return ENG_OK;
}
