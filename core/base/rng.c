// The generator's state. See rng.h; random.c fills tensors. Called by device/plugin.c, autograd/,
// fp8/, kernels and Lua.
#include "rng.h"

static struct { uint64_t seed, counter; } state;

void eng_seed(uint64_t seed) { eng_rng_set(seed, 0); }

void eng_rng_get(uint64_t *seed, uint64_t *counter)
{
  *seed = state.seed;
  *counter = state.counter;
}

void eng_rng_set(uint64_t seed, uint64_t counter)
{
  state.seed = seed;
  state.counter = counter;
}

uint64_t rng_seed(void) { return state.seed; }

uint64_t rng_take(int64_t blocks)
{
  uint64_t first = state.counter;
  state.counter += (uint64_t)blocks;
  return first;
}
