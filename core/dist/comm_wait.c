// Waiting for other ranks: exchanges, the timeout, and the end of a job that lost a rank. A wait
// that exceeds the timeout ends the job with a message, so that a job never hangs silently.
//
// Owns the timeout, the watchdog thread and the world's group, which world.c fills.
// Called by Lua and the other files of this folder.
#define _GNU_SOURCE
#include "comm.h"

#include "base/error.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SPINS = 2000 };               // a wait yields the core after this many polls, because
                                     // there may be more ranks than cores
static const double STOPPED = 1;     // seconds; see look_at_clock

eng_comm comm_world = { .size = 1 };
static double timeout = 300;        // seconds

// The end of a message about a rank that did not come in time.
#define SLOW "hint: if that rank was only slow, rank_timeout or ENGINE_RANK_TIMEOUT allows more " \
             "seconds\n"

double eng_comm_timeout(double seconds)
{
  double before = timeout;
  if (seconds > 0) timeout = seconds;
  return before;
}

/// Advances `since`, the start of a wait, by the time for which this process was stopped, because a
/// job that is suspended and continued has lost no rank. A running process reads the clock far more
/// often than every STOPPED seconds, so a longer gap means that it was stopped. `looked`: the time
/// of the last call. Returns the current time.
static double look_at_clock(double *since, double *looked)
{
  double now = eng_clock(), last = *looked > *since ? *looked : *since;
  if (now - last > STOPPED) *since += now - last;
  return *looked = now;
}

// ------------------------------------------------------------------ calls without a timeout

// While a library call without a timeout waits for other ranks, a thread watches the clock. The
// first such call starts the thread, which runs until the process ends.
static struct {
  pthread_mutex_t lock;
  comm_watch_mark now;               // what == NULL: nothing is watched
  bool            runs;
} watch = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void *watch_calls(void *nothing)
{
  enum { TICK_US = 50000 };
  double looked = 0;
  while (true) {
    usleep(TICK_US);
    pthread_mutex_lock(&watch.lock);
    double now = look_at_clock(&watch.now.since, &looked);
    if (watch.now.what && now - watch.now.since > timeout) {
      fprintf(stderr, "engine: rank %d of %d has waited %g s at %s: another rank has died or hung, "
              "or was never started. The job ends; " SLOW, comm_world.rank, comm_world.size,
              timeout, watch.now.what);
      fflush(stderr);
      _exit(COMM_LOST_CODE);
    }
    pthread_mutex_unlock(&watch.lock);
  }
  return nothing;
}

comm_watch_mark comm_watch(const char *what)
{
  pthread_t thread;
  pthread_mutex_lock(&watch.lock);
  comm_watch_mark before = watch.now;
  watch.now = (comm_watch_mark){what, eng_clock()};
  if (!watch.runs && pthread_create(&thread, NULL, watch_calls, NULL) == 0) {
    pthread_detach(thread);
    watch.runs = true;
  }
  pthread_mutex_unlock(&watch.lock);
  return before;
}

void comm_watched(comm_watch_mark before)
{
  pthread_mutex_lock(&watch.lock);
  watch.now = before;
  pthread_mutex_unlock(&watch.lock);
}

// ------------------------------------------------------------------ a rank is missing

enum { NOTE = 96 };                  // bytes of an alarm, which names the collective

/// Sends this rank's alarm, `what`, to every other rank and collects the alarms of the other ranks,
/// for up to 2 s. The entry of a rank in `notes` [world size x NOTE] stays empty if the rank sends
/// no alarm.
static void exchange_alarms(char *notes, const char *what)
{
  enum { GRACE_MS = 2000 };
  const comm_transport *t = comm_world.transport;
  int n = comm_world.size;
  char *own = notes + (size_t)comm_world.rank * NOTE;
  comm_message *messages = calloc((size_t)n, sizeof *messages);
  void **receives = calloc((size_t)n, sizeof *receives);
  snprintf(own, NOTE, "%s", what);
  for (int r = 0; messages && receives && r < n; r++) {
    if (r == comm_world.rank) continue;
    void *sent;
    messages[r] = (comm_message){own, NOTE, r, true};
    if (t->start(&sent, NULL, &messages[r], 1, COMM_TAG_ALARM) != ENG_OK) continue;
    messages[r] = (comm_message){notes + (size_t)r * NOTE, NOTE, r, false};
    if (t->start(&receives[r], NULL, &messages[r], 1, COMM_TAG_ALARM) != ENG_OK) receives[r] = NULL;
  }
  bool open = true;
  for (int ms = 0; receives && open && ms < GRACE_MS; ms += 10) {
    open = false;
    for (int r = 0; r < n; r++) {
      bool done = false;
      if (receives[r] && t->test(&done, receives[r]) == ENG_OK && done) receives[r] = NULL;
      open = open || receives[r];
    }
    usleep(10000);
  }
}

/// Prints which ranks sent no alarm. If all ranks sent one, prints where each rank waits.
static void report_missing(const char *notes, const char *what)
{
  int missing = 0;
  char names[512] = "", waits[1024] = "";
  size_t at = 0, to = 0;
  for (int r = 0; r < comm_world.size; r++) {
    const char *note = notes + (size_t)r * NOTE;
    if (!note[0]) {
      missing++;
      if (at < sizeof names - 16)
        at += (size_t)snprintf(names + at, sizeof names - at, "%s%d", at ? ", " : "", r);
    } else if (to < sizeof waits - NOTE)
      to +=
        (size_t)snprintf(waits + to, sizeof waits - to, "%srank %d: %.*s", to ? "; " : "", r,
                         NOTE - 1, note);
  }
  fflush(stdout);
  if (missing > 0)
    fprintf(stderr,
            "engine: rank%s %s did not reach %s within %g s: %s died or hung. The job ends; " SLOW,
            missing > 1 ? "s" : "", names, what, timeout, missing > 1 ? "they" : "it");
  else {
    char shown[4 * sizeof waits];
    eng_text_shown(shown, sizeof shown, waits, (int64_t)strlen(waits), false);
    fprintf(stderr, "engine: the ranks have waited %g s for each other at different places (%s). "
            "The job ends; hint: every rank must make the same calls\n", timeout, shown);
  }
  fflush(stderr);
}

/// Ends the job because a rank missed a collective. Waiting ranks exchange alarm messages; a rank
/// that sends none is missing. A waiting rank that receives an alarm sends its own immediately,
/// however short its wait has been. The lowest waiting rank prints the message and ends the job.
/// Does not return.
static void lost(const char *what)
{
  const comm_transport *t = comm_world.transport;
  char *notes = t->probe ? calloc((size_t)comm_world.size, NOTE) : NULL;
  if (notes) {
    int first = 0;
    exchange_alarms(notes, what);
    while (!notes[(size_t)first * NOTE]) first++;      // ends at this rank's own note at the latest
    if (first == comm_world.rank) report_missing(notes, what);
    else sleep(2);
  } else {
    fflush(stdout);
    fprintf(stderr,
            "engine: rank %d of %d has waited %g s at %s: another rank has died or hung (the "
            "rank that printed no message). The job ends; " SLOW,
            comm_world.rank, comm_world.size, timeout, what);
    fflush(stderr);
  }
  t->abort(COMM_LOST_CODE);
  _exit(COMM_LOST_CODE);
}

// ------------------------------------------------------------------ waiting

/// Says once, on rank 0, where it waits after a SIGTERM. mpirun sends SIGTERM to the other ranks of
/// a job that lost one, and about 2 s later ends them.
static void report_ending(double waited, const char *what)
{
  static bool told;
  if (told || waited < 0.5 || comm_world.rank > 0 || eng_interrupt_signal(0) != SIGTERM) return;
  told = true;
  fprintf(stderr, "engine: rank 0 was told to end (SIGTERM) while it waits for other ranks at %s; "
          "hint: if a rank has died, mpirun names it, and resume=auto continues from the last "
          "checkpoint\n", what);
}

/// Does the work of comm_pause in every SPINS-th call only, for a loop that polls often. `spins`
/// and `since` start at 0.
static eng_status idle(int *spins, double *since, const char *what)
{
  if (++*spins % SPINS) return ENG_OK;
  FAIL_IF(eng_interrupted() == 2, ENG_ERR_INTERRUPTED, "interrupted");
  const comm_transport *t = comm_world.transport;
  static double looked;
  if (*since == 0) *since = eng_clock();
  double now = look_at_clock(since, &looked);
  report_ending(now - *since, what);
  if (now - *since > timeout || (t->probe && t->probe(COMM_TAG_ALARM))) lost(what);
  sched_yield();
  return ENG_OK;
}

eng_status comm_pause(double *since, const char *what)
{
  int spins = SPINS - 1;
  return idle(&spins, since, what);
}

static struct { eng_status (*work)(void *data); void *data; } meanwhile;

void comm_meanwhile(eng_status (*work)(void *data), void *data)
{
  meanwhile.work = work;
  meanwhile.data = data;
}

bool comm_broken;

eng_status comm_start(void **exchange, const eng_comm *comm, const comm_message *messages, int n,
                      int tag)
{
  FAIL_IF(comm_broken, ENG_ERR_STATE, "an exchange between ranks was cut short: this process can "
          "no longer reach the other ranks; hint: start the job again");
  return comm->transport->start(exchange, comm->of_world, messages, n, tag);
}

/// Abandons an exchange after the error `status`, so that its memory can be freed (comm_broken).
static eng_status abandon(const eng_comm *comm, void *exchange, const char *what,
                          eng_status status)
{
  comm_broken = true;
  if (comm->transport->cancel) {
    comm_watch_mark before = comm_watch(what);     // `cancel` waits for messages that have begun
    comm->transport->cancel(exchange);
    comm_watched(before);
  }
  return status == ENG_ERR_LIBRARY
           ? error_prefix(status, "rank %d, at %s", comm_world.rank, what) : status;
}

eng_status comm_test(bool *done, const eng_comm *comm, void *exchange, const char *what)
{
  *done = true;
  if (!exchange) return ENG_OK;
  eng_status status = comm->transport->test(done, exchange);
  return status == ENG_OK ? ENG_OK : abandon(comm, exchange, what, status);
}

eng_status comm_await(const eng_comm *comm, void *exchange, const char *what)
{
  bool done;
  int spins = 0;
  double since = 0;
  while (true) {
    ENG_TRY(comm_test(&done, comm, exchange, what));
    if (done) return ENG_OK;
    eng_status status = meanwhile.work ? meanwhile.work(meanwhile.data) : ENG_OK;
    if (status == ENG_OK) status = idle(&spins, &since, what);
    if (status != ENG_OK) return abandon(comm, exchange, what, status);
  }
}

eng_status comm_exchange(eng_comm *comm, const comm_message *messages, int n, int tag,
                         const char *what)
{
  void *exchange;
  if (n == 0) return ENG_OK;
  ENG_TRY(comm_start(&exchange, comm, messages, n, tag));
  return comm_await(comm, exchange, what);
}

int comm_tag(eng_comm *comm)
{
  comm->next_tag = (comm->next_tag + 1) % COMM_TAGS;
  return (comm->of_world ? COMM_TAG_GROUP : COMM_TAG_WORLD) + comm->next_tag;
}
