// Replaces the toolkit's file: a thread's asynchronous copies, under CUDA's own names.
#ifndef EMULATOR_PIPELINE_H
#define EMULATOR_PIPELINE_H

#include "emulator.h"

static inline void __pipeline_memcpy_async(void *to, const void *from, size_t bytes)
{ emulator::copy_start(to, from, (uint32_t)bytes, true); }
static inline void __pipeline_commit(void) { emulator::copy_close(); }
static inline void __pipeline_wait_prior(size_t left) { emulator::copy_finish((int)left); }

#endif
