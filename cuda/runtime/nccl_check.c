// Checks core/dist/comm_nccl.h against nccl.h, if this machine has it. Generates no code. Called by
// nothing.
#if __has_include(<nccl.h>)
#include "dist/comm_nccl.h"

#include <nccl.h>

_Static_assert(sizeof(ncclUniqueId) == sizeof(nccl_id), "nccl_id must be as large as NCCL's id");
_Static_assert(sizeof(ncclResult_t) == sizeof(nccl_result) &&
                 sizeof(ncclDataType_t) == sizeof(unsigned),
               "NCCL's enumerations must have the sizes in comm_nccl.h");
_Static_assert((int)ncclSuccess == NCCL_SUCCESS && (int)ncclRemoteError == NCCL_REMOTE_ERROR &&
                 (int)ncclInProgress == NCCL_IN_PROGRESS,
               "NCCL's results must have the values in comm_nccl.h");
_Static_assert((int)ncclUint8 == NCCL_BYTES, "NCCL_BYTES must be NCCL's type of a byte");

/// Type-checks a call of each function with the parameters that comm_nccl.h declares. The compiler
/// rejects a mismatch.
static inline void check(void)
{
  ncclResult_t result = ncclSuccess;
  ncclComm_t comm = NULL;
  ncclUniqueId id = {{0}};
  int version;
  void *memory = NULL;
  if (sizeof(ncclGetVersion(&version)) && sizeof(ncclGetUniqueId(&id)) &&
      sizeof(ncclCommInitRank(&comm, 1, id, 0)) && sizeof(ncclCommSplit(comm, 0, 0, &comm, NULL)) &&
      sizeof(ncclCommDestroy(comm)) && sizeof(ncclCommAbort(comm)) &&
      sizeof(ncclCommGetAsyncError(comm, &result)) && sizeof(ncclGetErrorString(result)) &&
      sizeof(ncclGetLastError(comm)) && sizeof(ncclGroupStart()) && sizeof(ncclGroupEnd()) &&
      sizeof(ncclSend(memory, (size_t)1, ncclUint8, 0, comm, (cudaStream_t)memory)) &&
      sizeof(ncclRecv(memory, (size_t)1, ncclUint8, 0, comm, (cudaStream_t)memory)))
    (void)version;
}
#endif
typedef int nccl_check_is_not_empty;
