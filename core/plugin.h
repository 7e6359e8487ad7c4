// See plugin.c.
#ifndef ENG_PLUGIN_H
#define ENG_PLUGIN_H

#include "backend.h"

/// The CUDA device, loaded at the first call; NULL with the error set when there is none.
const backend *plugin_cuda(void);

#endif
