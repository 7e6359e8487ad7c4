// How this process was started, and the transport that goes with it: MPI, in libengine_mpi.so beside this library, loaded only where mpirun or
// srun started several processes, so that a machine without MPI runs everything else; NCCL alone (comm_nccl.c) where torchrun did, or srun
// without an MPI plug-in. Called by comm.c.
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

typedef enum way { WAY_ALONE, WAY_MPI, WAY_NCCL, WAY_WRONG } way;

/// What starters call a process's number and how many there are; `also` must be set, too. SLURM's names are those of a step: a batch script has
/// none. torchrun's are set by many, and come last where it is not known to be torchrun, which may itself be started by srun.
#define A_PLACE_TO_MEET "MASTER_ADDR"
static const struct { const char *rank, *size, *who, *also; way way; } starters[] = {
  {"RANK", "WORLD_SIZE", "torchrun", "TORCHELASTIC_RUN_ID", WAY_NCCL},
  {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "mpirun", NULL, WAY_MPI},
  {"PMI_RANK", "PMI_SIZE", "mpiexec", NULL, WAY_MPI},
  {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "srun --mpi", "PMIX_RANK", WAY_MPI},
  {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "srun", A_PLACE_TO_MEET, WAY_NCCL},
  {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "srun", NULL, WAY_MPI},
  {"RANK", "WORLD_SIZE", "a starter with torchrun's variables", A_PLACE_TO_MEET, WAY_NCCL},
};

typedef struct launch {
  int         rank, size;
  const char *who;
  way         way;
  char        wrong[320];       // WAY_WRONG: what the environment says cannot be
} launch;

static bool is_set(const char *name, bool nccl)
{
  if (strcmp(name, A_PLACE_TO_MEET) == 0 && (nccl || getenv("NCCL_COMM_ID"))) return true;     // told otherwise, or missed by load_nccl
  return getenv(name) != NULL;
}

/// A whole number between these, and nothing else.
static bool read_number(int *number, const char *text, long least, long most)
{
  char *end;
  long value = strtol(text, &end, 10);
  *number = (int)value;
  return *text >= '0' && *text <= '9' && !*end && value >= least && value <= most;
}

/// The first starter that speaks of several processes, else one that speaks of one. A starter whose numbers cannot be is passed over as long
/// as another has good ones.
static void find_starter(launch *found, bool nccl)
{
  enum { MOST = 1 << 24 };
  for (size_t i = 0; i < sizeof starters / sizeof *starters && found->size == 1; i++) {
    const char *r = getenv(starters[i].rank), *n = getenv(starters[i].size);
    int rank, size;
    if (!r || !n || (starters[i].also && !is_set(starters[i].also, nccl))) continue;
    if (!read_number(&size, n, 1, MOST) || !read_number(&rank, r, 0, size - 1)) {
      snprintf(found->wrong, sizeof found->wrong, "%s=%.60s %s=%.60s: expected the number of processes, and this one's, from 0 on", starters[i].size, n,
               starters[i].rank, r);
    } else if (!found->who || size > 1) {
      found->rank = rank;
      found->size = size;
      found->who = starters[i].who;
      found->way = size > 1 ? starters[i].way : WAY_ALONE;
    }
  }
  const char *several = getenv("WORLD_SIZE");
  if (found->who || !several || strcmp(several, "1") == 0) return;
  if (!getenv("RANK")) snprintf(found->wrong, sizeof found->wrong, "WORLD_SIZE=%.60s without RANK", several);
  else if (!is_set(A_PLACE_TO_MEET, nccl))
    snprintf(found->wrong, sizeof found->wrong, "WORLD_SIZE=%.60s and RANK without MASTER_ADDR, the machine of rank 0", several);
}

static launch launched(void)
{
  launch found = {0, 1, NULL, WAY_ALONE, ""};
  const char *asked = getenv("ENGINE_RANKS");
  if (asked && strcmp(asked, "off") == 0) return found;
  bool mpi = asked && strcmp(asked, "mpi") == 0, nccl = asked && strcmp(asked, "nccl") == 0;
  find_starter(&found, nccl);
  if (asked && *asked && !mpi && !nccl) snprintf(found.wrong, sizeof found.wrong, "ENGINE_RANKS=%.60s: expected off, mpi or nccl", asked);
  else if (found.who) found.wrong[0] = 0;
  if (found.wrong[0]) {         // to train alone would be another job
    found.way = WAY_WRONG;
    if (found.size == 1) found.size = 2;
  } else if (mpi || nccl) {
    found.way = mpi ? WAY_MPI : WAY_NCCL;
    if (!found.who) found.who = mpi ? "ENGINE_RANKS=mpi" : "ENGINE_RANKS=nccl";
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

/// Where rank 0 listens while the ranks meet: MASTER_ADDR, and the port after MASTER_PORT, on which torchrun itself may listen. NULL: not told.
static eng_status meeting_place(const char **out)
{
  enum { USUAL_PORT = 29500 };
  static char place[300];
  const char *address = getenv("MASTER_ADDR"), *port = getenv("MASTER_PORT");
  int number = USUAL_PORT;
  *out = NULL;
  if (getenv("NCCL_COMM_ID") || !address || !*address) return ENG_OK;
  if (port && !read_number(&number, port, 1, 65534)) return error_set(ENG_ERR_VALUE, "MASTER_PORT: expected a port from 1 to 65534, got '%.60s'", port);
  snprintf(place, sizeof place, strchr(address, ':') ? "[%.255s]:%d" : "%.255s:%d", address, number + 1);
  *out = place;
  return ENG_OK;
}

static eng_status load_nccl(const comm_transport **out, const launch *l)
{
  const char *where = NULL;
  if (l->size > 1) ENG_TRY(meeting_place(&where));
  if (l->size > 1 && !where && !getenv("NCCL_COMM_ID"))
    return error_set(ENG_ERR_LIBRARY, "%s started %d processes that are to meet over NCCL, but not where; hint: MASTER_ADDR=the machine of rank 0", l->who, l->size);
  eng_status status = comm_nccl_world(out, l->rank, l->size, where);
  if (status == ENG_OK) return ENG_OK;
  char reason[1024];
  snprintf(reason, sizeof reason, "%s", eng_error_message());
  char *hint = strstr(reason, "; hint:");
  if (hint) *hint = 0;
  return error_set(status, "%s started %d process%s without MPI, which meet over NCCL, each with a card of its own: %s; hint: mpirun -np %d engine SCRIPT "
                   "(or srun --mpi=pmix) needs no cards, ENGINE_RANKS=off no other processes, NCCL_DEBUG=WARN says more", l->who, l->size,
                   l->size > 1 ? "es" : "", reason, l->size);
}

// ------------------------------------------------------------------ MPI

static eng_status host_error(eng_status status, const char *text) { return error_set(status, "%s", text); }

static eng_status load_mpi(const comm_transport **out, const launch *l)
{
  static const comm_host host = {.abi = COMM_ABI, .error = host_error};
  Dl_info info;
  char path[PATH_MAX + 32], real[PATH_MAX];
  if (!dladdr((void *)(uintptr_t)load_mpi, &info) || !info.dli_fname) return error_set(ENG_ERR_LIBRARY, "ranks: cannot tell the folder of libengine.so");
  snprintf(path, PATH_MAX, "%s", realpath(info.dli_fname, real) ? real : info.dli_fname);
  char *slash = strrchr(path, '/');
  strcpy(slash ? slash + 1 : path, "libengine_mpi.so");
  if (access(path, R_OK) != 0)
    return error_set(ENG_ERR_LIBRARY, "%s started %d processes, but this build has no MPI: there is no %s; hint: apt-get install libopenmpi-dev "
                     "openmpi-bin, then make", l->who, l->size, path);
  void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);     // Open MPI's own plug-ins look for its symbols
  if (!library) return error_set(ENG_ERR_LIBRARY, "ranks: cannot load %s: %s; hint: make, with the MPI that is here", path, dlerror());
  union { void *object; comm_plugin *function; } entry = {dlsym(library, "eng_comm_mpi")};
  if (!entry.object) return error_set(ENG_ERR_LIBRARY, "ranks: %s is no transport of this engine; hint: make", path);
  error_set(ENG_ERR_LIBRARY, "ranks: %s belongs to another version of the engine; hint: make", path);
  const comm_transport *transport = entry.function(&host);
  if (!transport) return ENG_ERR_LIBRARY;
  if (transport->size != l->size && l->size > 1)
    return error_set(ENG_ERR_LIBRARY, "%s started %d processes, but %s sees %d; hint: srun --mpi=pmix, or the mpirun of this MPI; with a card for each, "
                     "MASTER_ADDR=the machine of rank 0 lets them meet over NCCL", l->who, l->size, transport->describe(), transport->size);
  *out = transport;
  return ENG_OK;
}

// Libraries below a transport set signal handlers when they start: UCX, which Open MPI 5 uses, takes
// SIGHUP and SIGBUS. The process keeps the handlers that it had before.
static const int kept_signals[] = {SIGHUP, SIGINT, SIGTERM, SIGALRM, SIGBUS};
enum { KEPT_SIGNALS = sizeof kept_signals / sizeof *kept_signals };

eng_status comm_load(const comm_transport **out)
{
  launch l = launched();
  *out = NULL;
  if (l.way == WAY_WRONG)
    return error_set(ENG_ERR_VALUE, "ranks: %s; hint: ENGINE_RANKS=off trains in this process alone",
                     l.wrong);
  struct sigaction before[KEPT_SIGNALS];
  for (int i = 0; i < KEPT_SIGNALS; i++) sigaction(kept_signals[i], NULL, &before[i]);
  eng_status status = l.way == WAY_MPI ? load_mpi(out, &l)
                    : l.way == WAY_NCCL ? load_nccl(out, &l) : ENG_OK;
  for (int i = 0; i < KEPT_SIGNALS; i++) sigaction(kept_signals[i], &before[i], NULL);
  return status;
}
