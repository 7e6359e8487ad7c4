// How this process was started, and the transport that goes with it: libengine_mpi.so beside this library, loaded only where mpirun or
// srun started several processes, so that a machine without MPI runs everything else. Called by comm.c.
#define _GNU_SOURCE
#include "comm.h"

#include "error.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/// What starters call a process's number and how many there are. SLURM's names are those of a step: a batch script has none.
static const struct { const char *rank, *size, *who; } starters[] = {
  {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "mpirun"},
  {"PMI_RANK", "PMI_SIZE", "mpiexec"},
  {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "srun"},
};

static const char *launched(int *rank, int *size)
{
  *rank = 0;
  *size = 1;
  const char *asked = getenv("ENGINE_RANKS");
  if (asked && strcmp(asked, "off") == 0) return NULL;
  for (size_t i = 0; i < sizeof starters / sizeof *starters; i++) {
    const char *r = getenv(starters[i].rank), *n = getenv(starters[i].size);
    if (!r || !n || atoi(n) < 1 || atoi(r) < 0 || atoi(r) >= atoi(n)) continue;
    *rank = atoi(r);
    *size = atoi(n);
    return starters[i].who;
  }
  return NULL;
}

bool eng_comm_launched(int *rank, int *size)
{
  return launched(rank, size) != NULL && *size > 1;
}

static eng_status host_error(eng_status status, const char *text) { return error_set(status, "%s", text); }

eng_status comm_load(const comm_transport **out)
{
  static const comm_host host = {.abi = COMM_ABI, .error = host_error};
  *out = NULL;
  int rank, size;
  const char *who = launched(&rank, &size), *asked = getenv("ENGINE_RANKS");
  bool wanted = asked && strcmp(asked, "mpi") == 0;
  if (size == 1 && !wanted) return ENG_OK;
  if (!who) who = "ENGINE_RANKS=mpi";

  Dl_info info;
  char path[PATH_MAX + 32], real[PATH_MAX];
  if (!dladdr((void *)(uintptr_t)comm_load, &info) || !info.dli_fname) return error_set(ENG_ERR_LIBRARY, "ranks: cannot tell the folder of libengine.so");
  snprintf(path, PATH_MAX, "%s", realpath(info.dli_fname, real) ? real : info.dli_fname);
  char *slash = strrchr(path, '/');
  strcpy(slash ? slash + 1 : path, "libengine_mpi.so");
  if (access(path, R_OK) != 0)
    return error_set(ENG_ERR_LIBRARY, "%s started %d processes, but this build has no MPI: there is no %s; hint: apt-get install libopenmpi-dev "
                     "openmpi-bin, then make", who, size, path);
  void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);     // Open MPI's own plug-ins look for its symbols
  if (!library) return error_set(ENG_ERR_LIBRARY, "ranks: cannot load %s: %s; hint: make, with the MPI that is here", path, dlerror());
  union { void *object; comm_plugin *function; } entry = {dlsym(library, "eng_comm_mpi")};
  if (!entry.object) return error_set(ENG_ERR_LIBRARY, "ranks: %s is no transport of this engine; hint: make", path);
  error_set(ENG_ERR_LIBRARY, "ranks: %s belongs to another version of the engine; hint: make", path);
  const comm_transport *transport = entry.function(&host);
  if (!transport) return ENG_ERR_LIBRARY;
  if (transport->size != size && size > 1)
    return error_set(ENG_ERR_LIBRARY, "%s started %d processes, but %s sees %d; hint: srun --mpi=pmix, or the mpirun of this MPI", who, size,
                     transport->describe(), transport->size);
  *out = transport;
  return ENG_OK;
}
