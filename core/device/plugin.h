// Loading the CUDA device and NVIDIA's libraries at run time. See plugin.c. Included by backend.c
// and dist/comm_nccl.c.
#pragma once

#include "backend.h"

/// Returns the CUDA device; the first call loads it. If it is not available, returns NULL with the
/// error set.
const backend *plugin_cuda(void);

/// Loads one of NVIDIA's libraries from the search path of the system's loader. If the library is
/// not there, tries the folders of the CUDA toolkit and of NVIDIA's Python packages. Returns NULL
/// if the library is not found. mode: RTLD_GLOBAL or RTLD_LOCAL.
void *plugin_library(const char *name, int mode);
