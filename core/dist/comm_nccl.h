// The part of NCCL's interface that this engine uses, with the types and constants of nccl.h. The
// build needs no NCCL, because comm_nccl.c loads the library at run time. Where nccl.h is
// installed, cuda/runtime/nccl_check.c compares this file with it. spec/cuda/fake_nccl.c implements
// these functions for specs. Included by comm_nccl.c and nccl_check.c.
#pragma once

#include <stddef.h>

typedef struct ncclComm *nccl_comm;
typedef struct nccl_id { char bytes[128]; } nccl_id;

enum { NCCL_SUCCESS = 0, NCCL_REMOTE_ERROR = 6, NCCL_IN_PROGRESS = 7 };    // values of ncclResult_t
enum { NCCL_BYTES = 1 };  // ncclUint8, a value of ncclDataType_t
enum { NCCL_OLDEST = 21800 };  // the version that introduced ncclCommSplit

typedef unsigned nccl_result;
typedef struct nccl_calls {
  nccl_result (*get_version)(int *version);
  nccl_result (*get_unique_id)(nccl_id *id);
  nccl_result (*init_rank)(nccl_comm *comm, int size, nccl_id id, int rank);
  nccl_result (*split)(nccl_comm comm, int color, int key, nccl_comm *part, void *config);
  nccl_result (*destroy)(nccl_comm comm);
  nccl_result (*abort)(nccl_comm comm);
  nccl_result (*async_error)(nccl_comm comm, nccl_result *error);
  const char *(*error_string)(nccl_result result);
  const char *(*last_error)(nccl_comm comm);
  nccl_result (*group_start)(void);
  nccl_result (*group_end)(void);
  nccl_result (*send)(const void *memory, size_t count, unsigned type, int peer, nccl_comm comm,
                      void *stream);
  nccl_result (*receive)(void *memory, size_t count, unsigned type, int peer, nccl_comm comm,
                         void *stream);
} nccl_calls;

/// The names of these functions in the library, in the order of nccl_calls.
#define NCCL_NAMES                                                                                 \
  {"ncclGetVersion",   "ncclGetUniqueId", "ncclCommInitRank",      "ncclCommSplit",                \
   "ncclCommDestroy",  "ncclCommAbort",   "ncclCommGetAsyncError", "ncclGetErrorString",           \
   "ncclGetLastError", "ncclGroupStart",  "ncclGroupEnd",          "ncclSend",                     \
   "ncclRecv"}
