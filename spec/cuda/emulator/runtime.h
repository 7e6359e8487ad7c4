// What threads.cpp and runtime.cpp tell each other.
#ifndef EMULATOR_RUNTIME_H
#define EMULATOR_RUNTIME_H

#include "emulator.h"

// Under AddressSanitizer device memory that the arenas do not hand out, and shared memory beside a variable, are closed.
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define CLOSE(memory, bytes) __asan_poison_memory_region(memory, (size_t)(bytes))
#define OPEN(memory, bytes)  __asan_unpoison_memory_region(memory, (size_t)(bytes))
#else
#define CLOSE(memory, bytes) ((void)(memory), (void)(bytes))
#define OPEN(memory, bytes)  ((void)(memory), (void)(bytes))
#endif

namespace emulator {

enum { FORWARDS, BACKWARDS, SHUFFLED };

/// ENGINE_EMULATED_CARD="name=value,..." in the environment.
struct settings {
  int  capability;   // sm=90: compute capability times ten
  int  order;        // order=forwards | backwards | shuffled: of blocks, warps and lanes
  // run=late: a stream's work begins when somebody waits for it; run=early: at once
  bool late;
  long memory;       // memory=2048: MiB
  long pinned;       // pinned=2048: MiB of pinned host memory
  // closed=1: device memory is closed to the host but while a stream works (slow: a look into it ends the process there)
  bool closed;
  // trace=FILE: a line for every call of the run-time library that launches, copies or waits
  const char *trace;
};
const settings &set(void);

/// Runs all blocks of a launch; false after a fault.
bool run_grid(const char *name, dim3 grid, dim3 block, size_t shared,
              const std::function<void()> &body);
}

#endif
