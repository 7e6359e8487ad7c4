// The core's functions for the CUDA device; see host.c.
#ifndef ENG_CUDA_HOST_H
#define ENG_CUDA_HOST_H
#include "device/backend.h"

/// Keeps the core's table. Returns false if the table's version differs from this plug-in's.
bool host_accept(const backend_host *given);

#endif
