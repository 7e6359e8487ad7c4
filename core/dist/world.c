// The world: how this process was started, its transport, and the end of the job.
//
// Two transports exist. MPI is a plug-in, libengine_mpi.so beside this library. It is loaded only
// if mpirun or srun started several processes, so the engine also runs on machines without MPI.
// NCCL alone (comm_nccl.c) is the transport if torchrun started the job, or srun without an MPI
// plug-in. ENGINE_RANKS overrides this choice.
//
// Fills comm_world (comm_wait.c). Called by Lua and main/main.c, but by no file of this folder.
#define _GNU_SOURCE
#include "comm.h"

#include "base/error.h"

#include <dlfcn.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// ------------------------------------------------------------------ how the process was started

typedef enum start_kind { START_ALONE, START_MPI, START_NCCL, START_WRONG } start_kind;

/// The variables in which each launcher passes a process's rank and the number of processes. If
/// `also` is not NULL, that variable must be set too. SLURM sets its variables for a job step, but
/// not for a batch script. Many programs set RANK and WORLD_SIZE, so the row that needs only these
/// two and MASTER_ADDR comes last. The row of torchrun comes first, because srun may have started
/// torchrun. This first row needs TORCHELASTIC_RUN_ID, which only torchrun sets.
#define MEETING_ADDRESS "MASTER_ADDR"
static const struct { const char *rank, *size, *name, *also; start_kind kind; } launchers[] = {
  {"RANK", "WORLD_SIZE", "torchrun", "TORCHELASTIC_RUN_ID", START_NCCL},
  {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "mpirun", NULL, START_MPI},
  {"PMI_RANK", "PMI_SIZE", "mpiexec", NULL, START_MPI},
  {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "srun --mpi", "PMIX_RANK", START_MPI},
  {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "srun", MEETING_ADDRESS, START_NCCL},
  {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "srun", NULL, START_MPI},
  {"RANK", "WORLD_SIZE", "a launcher with torchrun's variables", MEETING_ADDRESS, START_NCCL},
};

typedef struct launch {
  int         rank, size;
  const char *name;             // name of the launcher; NULL: none
  start_kind  kind;
  char        wrong[320];       // START_WRONG: which variables are invalid
} launch;

static bool is_set(const char *name, bool nccl)
{
  // NCCL_COMM_ID replaces MASTER_ADDR. With ENGINE_RANKS=nccl, load_nccl reports a missing address.
  if (strcmp(name, MEETING_ADDRESS) == 0 && (nccl || getenv("NCCL_COMM_ID"))) return true;
  return getenv(name) != NULL;
}

/// Reads a whole number from `least` to `most`. Returns false if `text` is anything else.
static bool read_number(int *number, const char *text, long least, long most)
{
  char *end;
  long value = strtol(text, &end, 10);
  *number = (int)value;
  return *text >= '0' && *text <= '9' && !*end && value >= least && value <= most;
}

/// Finds the first launcher with several processes, else the first one with a single process. A
/// launcher with invalid numbers is skipped if another has valid ones.
static void find_launcher(launch *found, bool nccl)
{
  enum { MOST = 1 << 24 };
  for (size_t i = 0; i < sizeof launchers / sizeof *launchers && found->size == 1; i++) {
    const char *r = getenv(launchers[i].rank), *n = getenv(launchers[i].size);
    int rank, size;
    if (!r || !n || (launchers[i].also && !is_set(launchers[i].also, nccl))) continue;
    if (!read_number(&size, n, 1, MOST) || !read_number(&rank, r, 0, size - 1)) {
      snprintf(found->wrong, sizeof found->wrong,
               "%s=%.60s %s=%.60s: expected the number of "
               "processes, and a rank below that number",
               launchers[i].size, n, launchers[i].rank, r);
    } else if (!found->name || size > 1) {
      found->rank = rank;
      found->size = size;
      found->name = launchers[i].name;
      found->kind = size > 1 ? launchers[i].kind : START_ALONE;
    }
  }
  const char *several = getenv("WORLD_SIZE");
  if (found->name || !several || strcmp(several, "1") == 0) return;
  if (!getenv("RANK"))
    snprintf(found->wrong, sizeof found->wrong, "WORLD_SIZE=%.60s is set, but RANK is not",
             several);
  else if (!is_set(MEETING_ADDRESS, nccl))
    snprintf(found->wrong, sizeof found->wrong,
             "WORLD_SIZE=%.60s and RANK are set, but not MASTER_ADDR (the host of rank 0)",
             several);
}

static launch launched(void)
{
  launch found = {0, 1, NULL, START_ALONE, ""};
  const char *asked = getenv("ENGINE_RANKS");
  if (asked && strcmp(asked, "off") == 0) return found;
  bool mpi = asked && strcmp(asked, "mpi") == 0, nccl = asked && strcmp(asked, "nccl") == 0;
  find_launcher(&found, nccl);
  if (asked && *asked && !mpi && !nccl)
    snprintf(found.wrong, sizeof found.wrong, "ENGINE_RANKS=%.60s: expected off, mpi or nccl",
             asked);
  else if (found.name) found.wrong[0] = 0;
  // Invalid variables must be an error. Otherwise each of the started processes would train alone.
  if (found.wrong[0]) {
    found.kind = START_WRONG;
    if (found.size == 1) found.size = 2;
  } else if (mpi || nccl) {
    found.kind = mpi ? START_MPI : START_NCCL;
    if (!found.name) found.name = mpi ? "ENGINE_RANKS=mpi" : "ENGINE_RANKS=nccl";
  }
  return found;
}

bool eng_comm_launched(int *rank, int *size)
{
  launch found = launched();
  *rank = found.rank;
  *size = found.size;
  return found.size > 1;
}

// ------------------------------------------------------------------ NCCL alone

/// Sets *out to the address at which rank 0 listens for NCCL's rendezvous: MASTER_ADDR and port
/// MASTER_PORT + 1, because torchrun itself may listen on MASTER_PORT. *out is NULL if MASTER_ADDR
/// is not set, or if NCCL_COMM_ID gives the address.
static eng_status meeting_place(const char **out)
{
  enum { USUAL_PORT = 29500 };
  static char place[300];
  const char *address = getenv("MASTER_ADDR"), *port = getenv("MASTER_PORT");
  int number = USUAL_PORT;
  *out = NULL;
  if (getenv("NCCL_COMM_ID") || !address || !*address) return ENG_OK;
  FAIL_IF(port && !read_number(&number, port, 1, 65534), ENG_ERR_VALUE,
          "MASTER_PORT: expected a port from 1 to 65534, got '%.60s'", port);
  snprintf(place, sizeof place, strchr(address, ':') ? "[%.255s]:%d" : "%.255s:%d", address,
           number + 1);
  *out = place;
  return ENG_OK;
}

static eng_status load_nccl(const comm_transport **out, const launch *l)
{
  const char *where = NULL;
  if (l->size > 1) ENG_TRY(meeting_place(&where));
  FAIL_IF(l->size > 1 && !where && !getenv("NCCL_COMM_ID"), ENG_ERR_LIBRARY,
          "%s started %d processes, which need a rendezvous address to connect over NCCL; hint: "
          "set MASTER_ADDR to the host of rank 0", l->name, l->size);
  eng_status status = comm_nccl_world(out, l->rank, l->size, where);
  if (status == ENG_OK) return ENG_OK;
  char reason[1024];
  snprintf(reason, sizeof reason, "%s", eng_error_message());
  char *hint = strstr(reason, "; hint:");
  if (hint) *hint = 0;
  return error_set(
    status,
    "%s started %d process%s without MPI; each needs a card and a connection over NCCL, which "
    "failed: %s; hint: mpirun -np %d engine SCRIPT (or srun --mpi=pmix) needs no cards, "
    "ENGINE_RANKS=off trains in this process alone, NCCL_DEBUG=WARN prints more",
    l->name, l->size, l->size > 1 ? "es" : "", reason, l->size);
}

// ------------------------------------------------------------------ MPI

static eng_status host_error(eng_status status, const char *text)
{ return error_set(status, "%s", text); }

static eng_status load_mpi(const comm_transport **out, const launch *l)
{
  static const comm_host host = {.abi = COMM_ABI, .error = host_error};
  Dl_info info;
  char path[PATH_MAX + 32], real[PATH_MAX];
  FAIL_IF(!dladdr((void *)(uintptr_t)load_mpi, &info) || !info.dli_fname, ENG_ERR_LIBRARY,
          "ranks: cannot find the folder of libengine.so");
  snprintf(path, PATH_MAX, "%s", realpath(info.dli_fname, real) ? real : info.dli_fname);
  char *slash = strrchr(path, '/');
  strcpy(slash ? slash + 1 : path, "libengine_mpi.so");
  FAIL_IF(access(path, R_OK) != 0, ENG_ERR_LIBRARY,
          "%s started %d processes, but this build has no MPI (missing: %s); hint: apt-get "
          "install libopenmpi-dev openmpi-bin, then make", l->name, l->size, path);
  void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);     // Open MPI's plug-ins use its symbols
  FAIL_IF(!library, ENG_ERR_LIBRARY, "ranks: cannot load %s: %s; hint: run make with the MPI of "
          "this machine", path, dlerror());
  union { void *object; comm_plugin *function; } entry = {dlsym(library, "eng_comm_mpi")};
  FAIL_IF(!entry.object, ENG_ERR_LIBRARY,
          "ranks: %s is not the MPI plug-in of this engine; hint: run make", path);
  error_set(ENG_ERR_LIBRARY, "ranks: %s belongs to another version of the engine; hint: run make",
            path);
  const comm_transport *transport = entry.function(&host);
  if (!transport) return ENG_ERR_LIBRARY;
  FAIL_IF(transport->size != l->size && l->size > 1, ENG_ERR_LIBRARY,
          "%s started %d processes, but MPI connects %d (%s); hint: srun --mpi=pmix, or the "
          "mpirun of this MPI; with a card for each process, set MASTER_ADDR to the host of rank 0 "
          "to connect them over NCCL", l->name, l->size, transport->size, transport->describe());
  *out = transport;
  return ENG_OK;
}

// ------------------------------------------------------------------ the world

/// Ends this process's part in the job, also after an error or os.exit().
static void at_exit(int code, void *nothing)
{
  (void)nothing;
  eng_comm_end(code);
}

// The libraries of a transport install signal handlers when they start. For example UCX, which Open
// MPI 5 uses, handles SIGHUP and SIGBUS. load() restores the process's own handlers.
static const int kept_signals[] = {SIGHUP,  SIGINT,  SIGTERM, SIGALRM, SIGBUS,
                                   SIGPIPE, SIGUSR1, SIGUSR2, SIGXCPU, SIGXFSZ};
enum { KEPT_SIGNALS = sizeof kept_signals / sizeof *kept_signals };

/// Loads the transport that this process was started for; *out is NULL if it runs alone.
static eng_status load(const comm_transport **out, const launch *l)
{
  *out = NULL;
  FAIL_IF(l->kind == START_WRONG, ENG_ERR_VALUE,
          "ranks: %s; hint: ENGINE_RANKS=off trains in this process alone", l->wrong);
  struct sigaction handlers[KEPT_SIGNALS];
  for (int i = 0; i < KEPT_SIGNALS; i++) sigaction(kept_signals[i], NULL, &handlers[i]);
  comm_watch_mark before = comm_watch("the start of the job");
  eng_status status = l->kind == START_MPI ? load_mpi(out, l)
                    : l->kind == START_NCCL ? load_nccl(out, l) : ENG_OK;
  comm_watched(before);
  for (int i = 0; i < KEPT_SIGNALS; i++) sigaction(kept_signals[i], &handlers[i], NULL);
  return status;
}

static eng_status read_timeout(void)
{
  const char *text = getenv("ENGINE_RANK_TIMEOUT");
  if (!text || !*text) return ENG_OK;
  char *end;
  double seconds = strtod(text, &end);
  FAIL_IF(!(seconds > 0 && seconds < 1e9) || *end, ENG_ERR_VALUE, "ENGINE_RANK_TIMEOUT: expected "
          "a number of seconds above 0 and below 1e9, got '%s'", text);
  eng_comm_timeout(seconds);
  return ENG_OK;
}

eng_status eng_comm_world(eng_comm **out)
{
  static bool started;
  *out = NULL;
  if (!started) {
    const comm_transport *transport;
    launch l = launched();
    ENG_TRY(read_timeout());
    comm_world = (eng_comm){.rank = l.rank, .size = l.size};       // for the watchdog's message
    eng_status status = load(&transport, &l);
    comm_world = (eng_comm){.size = 1};
    if (status != ENG_OK) return status;
    started = true;
    if (transport) {
      comm_world = (eng_comm){.transport = transport, .rank = transport->rank,
                              .size = transport->size};
      on_exit(at_exit, NULL);
    }
  }
  *out = &comm_world;
  return ENG_OK;
}

int eng_comm_threads(void)
{
  int ranks = comm_world.transport ? comm_world.transport->local_size : 1;
  long cores = sysconf(_SC_NPROCESSORS_ONLN) / ranks;
  return cores > 1 ? (int)cores : 1;
}

const char *eng_comm_text(void)
{
  static char text[1024];
  const char *cards = comm_cards_text(), *world = "one rank";
  if (comm_world.transport) world = comm_world.transport->describe();
  snprintf(text, sizeof text, "%s%s%s", world, cards ? "; data on cards goes " : "",
           cards ? cards : "");
  return text;
}

void eng_comm_end(int code)
{
  const comm_transport *transport = comm_world.transport;
  if (!transport) return;
  comm_world.transport = NULL;
  if (code == 0 && comm_broken) code = COMM_LOST_CODE;
  if (code == 0) {
    comm_watch_mark before = comm_watch("the end of the job");
    comm_streams_end(true);
    transport->finish();
    comm_watched(before);
  } else {
    // The abort ends all ranks at once. Rank 0 usually has the same error to print and a checkpoint
    // to write, so the other ranks wait before they abort.
    if (comm_world.rank > 0) usleep(500000);
    fflush(NULL);
    comm_streams_end(false);
    transport->abort(code);
  }
}
