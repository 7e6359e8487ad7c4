// Replaces cuda/kernel/ptx.h with functions that compute what its instructions do. Approximate
// instructions are exact here, so they differ from a card in the last places.
#ifndef ENG_CUDA_PTX_H
#define ENG_CUDA_PTX_H

#include "runtime/device.h"

static inline float exp2_fast(float x)
{
  float y = exp2f(x);
  return fabsf(y) < 0x1p-126f ? 0.0f : y;
}
static inline float reciprocal_fast(float x)
{
  if (fabsf(x) < 0x1p-126f) x = copysignf(0.0f, x);
  float y = 1.0f / x;
  return fabsf(y) < 0x1p-126f ? copysignf(0.0f, y) : y;
}
static inline float max_nan(float a, float b)
{ return a != a || b != b ? __int_as_float(0x7FFFFFFF) : fmaxf(a, b); }

static inline void barrier_init(uint32_t barrier, uint32_t count)
{ *(emulator::barrier *)emulator::shared_at(barrier, 8) = {(uint16_t)count, (uint16_t)count, 0}; }
static inline void barrier_arrive(uint32_t barrier, bool really)
{
  auto *b = (emulator::barrier *)emulator::shared_at(barrier, 8);
  if (really && --b->missing == 0) *b = {b->count, b->count, b->phase + 1};
}
static inline void barrier_wait(uint32_t barrier, uint32_t parity)
{
  auto *b = (emulator::barrier *)emulator::shared_at(barrier, 8);
  if ((b->phase & 1) == parity) emulator::wait_while(&b->phase, b->phase);
}
template <class T> static inline T opaque(T x) { return x; }

#endif
