// Replaces cuda/kernel/ptx.h with functions that compute what its instructions do. Approximate
// instructions are exact here, so they differ from a card in the last places.
#ifndef ENG_CUDA_PTX_H
#define ENG_CUDA_PTX_H

#include <cuda.h>

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

static inline emulator::barrier *barrier_at(uint32_t barrier)
{ return (emulator::barrier *)emulator::shared_at(barrier, 8); }
static inline void barrier_init(uint32_t barrier, uint32_t count)
{ *barrier_at(barrier) = {count, count, 0, 0}; }
static inline void barrier_arrive(uint32_t barrier, bool really)
{
  if (!really) return;
  barrier_at(barrier)->missing--;
  emulator::barrier_turn(barrier_at(barrier));
}
static inline void barrier_expect(uint32_t barrier, uint32_t bytes)
{
  barrier_at(barrier)->awaited += bytes / 16;
  barrier_arrive(barrier, true);
}
static inline void barrier_wait(uint32_t barrier, uint32_t parity)
{
  auto *b = barrier_at(barrier);
  if ((b->phase & 1) == parity) emulator::wait_while(&b->phase, b->phase);
}
static inline void copy_box(uint32_t to, const CUtensorMap *map, int column, int row, int head,
                            int batch, uint32_t barrier)
{
  emulator::copy_box_start(to, (const emulator::box_map *)map, {column, row, head, batch}, barrier);
}
static inline void copy_line(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier)
{ emulator::copy_line_start(to, from, bytes, barrier); }
template <class T> static inline T opaque(T x) { return x; }

#endif
