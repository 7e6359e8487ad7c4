// See host.c.
#ifndef ENG_CUDA_HOST_H
#define ENG_CUDA_HOST_H
#include "device/backend.h"

/// Keeps the core's table; false when it is of another version.
bool host_accept(const backend_host *given);

#endif
