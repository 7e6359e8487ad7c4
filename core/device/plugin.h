// See plugin.c.
#ifndef ENG_PLUGIN_H
#define ENG_PLUGIN_H

#include "backend.h"

/// The CUDA device, loaded at the first call; NULL with the error set when there is none.
const backend *plugin_cuda(void);

/// A library of NVIDIA's where the system's loader has it, or else in the toolkit's folders or those of NVIDIA's Python packages; NULL when
/// there is none. mode: RTLD_GLOBAL or RTLD_LOCAL.
void *plugin_library(const char *name, int mode);

#endif
