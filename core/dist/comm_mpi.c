// The MPI transport: a plug-in, libengine_mpi.so, built where there is an mpicc. It passes messages
// between two ranks, and ends the job normally or by an abort; comm.c builds groups and collectives
// on the messages. The transport uses only a few MPI functions, so that any implementation works.
// Owns a communicator of all ranks. Called by world.c, which loads it.
#include "comm.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/// Messages in flight.
typedef struct exchange {
  int          n, receives;
  MPI_Request *request;
  MPI_Status  *status;      // of each request, with its error
  comm_message *message;    // of each request, with the peer's world number
} exchange;

static const comm_host *core;
static MPI_Comm everybody;

static eng_status failed(const char *what, int code)
{
  char text[MPI_MAX_ERROR_STRING + 128], reason[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, reason, &length);
  snprintf(text, sizeof text, "ranks: %s: %.*s", what, length, reason);
  return core->error(ENG_ERR_LIBRARY, text);
}

/// Sets the error for a message that does not have the expected length. `got`: the number of bytes
/// that arrived, or -1 if the message is longer than expected.
static eng_status wrong_length(const comm_message *m, int got)
{
  char text[512], number[32] = "more";
  if (got >= 0) snprintf(number, sizeof number, "%d", got);
  snprintf(text, sizeof text,
           "ranks: expected a message of %lld bytes from rank %d, got %s; hint: the ranks make "
           "different calls, or the same call with different lengths; compare the script, the "
           "model, the settings and the shapes of the data on these ranks",
           (long long)m->bytes, m->peer, number);
  return core->error(ENG_ERR_LIBRARY, text);
}

static void release(exchange *e)
{
  free(e->request);
  free(e->status);
  free(e->message);
  free(e);
}

static exchange *make(int n)
{
  exchange *e = calloc(1, sizeof *e);
  if (!e) return NULL;
  e->request = calloc((size_t)n, sizeof *e->request);
  e->status = calloc((size_t)n, sizeof *e->status);
  e->message = calloc((size_t)n, sizeof *e->message);
  if (e->request && e->status && e->message) return e;
  release(e);
  return NULL;
}

static void cancel(void *under_way)
{
  exchange *e = under_way;
  for (int i = 0; i < e->receives; i++)
    if (e->request[i] != MPI_REQUEST_NULL) MPI_Cancel(&e->request[i]);
  MPI_Waitall(e->receives, e->request, MPI_STATUSES_IGNORE);
}

static eng_status start(void **out, const int32_t *of_world, const comm_message *messages, int n,
                        int tag)
{
  exchange *e = make(n);
  *out = NULL;
  if (!e) return core->error(ENG_ERR_MEMORY, "ranks: out of memory for messages");
  // Posts receives first, so that arriving messages find their buffers.
  for (int pass = 0; pass < 2; pass++)
    for (int i = 0; i < n; i++) {
      comm_message *m = &e->message[e->n];
      if (messages[i].send != (pass == 1)) continue;
      *m = messages[i];
      m->peer = comm_of_world(of_world, m->peer);
      MPI_Request *request = &e->request[e->n];
      int code =
        m->bytes > COMM_LARGEST ? MPI_ERR_COUNT
        : m->send
          ? MPI_Isend(m->memory, (int)m->bytes, MPI_BYTE, m->peer, tag, everybody, request)
          : MPI_Irecv(m->memory, (int)m->bytes, MPI_BYTE, m->peer, tag, everybody, request);
      if (code != MPI_SUCCESS) {
        cancel(e);
        return failed(m->send ? "sending" : "receiving", code);
      }
      e->n++;
      e->receives += !m->send;
    }
  *out = e;
  return ENG_OK;
}

static eng_status test(bool *done, void *under_way)
{
  exchange *e = under_way;
  int flag = 0;
  int code = MPI_Testall(e->n, e->request, &flag, e->status);
  *done = flag != 0;
  for (int i = 0; code == MPI_ERR_IN_STATUS && i < e->n; i++) {
    int own = e->status[i].MPI_ERROR, class = MPI_SUCCESS;
    if (own == MPI_SUCCESS || own == MPI_ERR_PENDING) continue;
    MPI_Error_class(own, &class);
    if (class == MPI_ERR_TRUNCATE) return wrong_length(&e->message[i], -1);
    code = own;
  }
  if (code != MPI_SUCCESS) return failed("sending or receiving", code);
  for (int i = 0; flag && i < e->receives; i++) {
    int bytes = 0;
    MPI_Get_count(&e->status[i], MPI_BYTE, &bytes);
    if (bytes != e->message[i].bytes) return wrong_length(&e->message[i], bytes);
  }
  if (flag) release(e);
  return ENG_OK;
}

static bool probe(int tag)
{
  int flag = 0;
  int code = MPI_Iprobe(MPI_ANY_SOURCE, tag, everybody, &flag, MPI_STATUS_IGNORE);
  return code == MPI_SUCCESS && flag;
}

static void end_all(int code) { MPI_Abort(MPI_COMM_WORLD, code); }
static void finish(void) { MPI_Finalize(); }

static comm_transport transport;

static const char *describe(void)
{
  static char text[256];
  char version[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(version, &length);
  version[strcspn(version, ",\n")] = 0;
  snprintf(text, sizeof text, "%.160s, %d rank%s, %d of them here", version, transport.size,
           transport.size > 1 ? "s" : "", transport.local_size);
  return text;
}

__attribute__((visibility("default"))) const comm_transport *eng_comm_mpi(const comm_host *host)
{
  if (host->abi != COMM_ABI) return NULL;
  core = host;
  int code = MPI_SUCCESS, there = 0, provided;
  MPI_Initialized(&there);
  if (!there) code = MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided);
  if (code != MPI_SUCCESS) {
    failed("MPI cannot start", code);
    return NULL;
  }
  MPI_Comm here;
  MPI_Comm_dup(MPI_COMM_WORLD, &everybody);
  MPI_Comm_set_errhandler(everybody, MPI_ERRORS_RETURN);
  int rank, size, local = 1;
  MPI_Comm_rank(everybody, &rank);
  MPI_Comm_size(everybody, &size);
  MPI_Comm_split_type(everybody, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &here);
  MPI_Comm_size(here, &local);
  MPI_Comm_free(&here);
  transport = (comm_transport){.abi = COMM_ABI,
                               .rank = rank,
                               .size = size,
                               .local_size = local,
                               .start = start,
                               .test = test,
                               .cancel = cancel,
                               .probe = probe,
                               .abort = end_all,
                               .finish = finish,
                               .describe = describe};
  return &transport;
}
