// The interface between threads.cpp and runtime.cpp.
#ifndef EMULATOR_RUNTIME_H
#define EMULATOR_RUNTIME_H

#include "emulator.h"

// Under AddressSanitizer these are inaccessible: device memory that no arena has handed out, and
// shared memory around variables.
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

/// The settings of ENGINE_EMULATED_CARD="name=value,..." in the environment.
struct settings {
  int  capability;   // sm=90: compute capability times ten
  int  order;        // order=forwards | backwards | shuffled: of blocks, warps and lanes
  // run=late: a stream's work begins when the host waits for it; run=early: at once
  bool late;
  long memory;       // memory=2048: MiB
  long pinned;       // pinned=2048: MiB of pinned host memory
  // closed=1: device memory is inaccessible to the host except while a stream works (slow; a stray
  // access ends the process right there)
  bool closed;
  // trace=FILE: a line for every run-time call that launches, copies or waits
  const char *trace;
};
const settings &set(void);

/// Runs all blocks of a launch; false after a fault.
bool run_grid(const char *name, dim3 grid, dim3 block, size_t shared,
              const std::function<void()> &body);
}

#endif
