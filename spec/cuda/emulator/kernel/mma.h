// Replaces cuda/kernel/mma.h with functions that do what its instructions do. Copies are made only
// when a thread waits for them. Products sum in double and round once, so they differ from a
// card in the last places.
#ifndef ENG_CUDA_MMA_H
#define ENG_CUDA_MMA_H

#include "ptx.h"

static inline uint32_t shared_address(const void *p) { return emulator::shared_offset(p); }

static inline void copy16(uint32_t to, const void *from, bool there)
{ emulator::copy_start(emulator::shared_at(to, 16), from, 16, there); }
static inline void copy_commit() { emulator::copy_close(); }
template <int LEFT> static inline void copy_wait() { emulator::copy_finish(LEFT); }

namespace emulator {
struct matrices { uint32_t *r, address; };
template <bool TURNED> void read_matrices(thread *const *who, int n)
{
  uint16_t m[4][8][8];
  for (int l = 0; l < n; l++) {
    if (!who[l]) fault("ldmatrix: lane %d is missing", l);
    uint32_t address = ((matrices *)who[l]->mine)->address;
    if (address % 16) fault("ldmatrix: shared address %u is not aligned to 16 bytes", address);
    memcpy(m[l / 8][l % 8], shared_at(address, 16), 16);
  }
  for (int l = 0; l < n; l++) {
    int g = l / 4, t = l % 4;
    for (int k = 0; k < 4; k++) {
      uint16_t low = TURNED ? m[k][2 * t][g] : m[k][g][2 * t],
               high = TURNED ? m[k][2 * t + 1][g] : m[k][g][2 * t + 1];
      ((matrices *)who[l]->mine)->r[k] = (uint32_t)high << 16 | low;
    }
  }
}
}
static inline void load_matrices(uint32_t (&r)[4], uint32_t address)
{
  emulator::matrices mine = {r, address};
  emulator::meet_warp(0xFFFFFFFFu, emulator::read_matrices<false>, &mine);
}
static inline void load_matrices_turned(uint32_t (&r)[4], uint32_t address)
{
  emulator::matrices mine = {r, address};
  emulator::meet_warp(0xFFFFFFFFu, emulator::read_matrices<true>, &mine);
}

namespace emulator {
template <class T>
double half_of(uint32_t word, int k)
{ return widen(T{(uint16_t)(word >> 16 * k)}); }

struct factors { float *c; const uint32_t *a; uint32_t b[2]; };
template <class T> void multiply_warp(thread *const *who, int n)
{
  double a[16][16], b[16][8];
  for (int l = 0; l < n; l++) {
    if (!who[l]) fault("mma: lane %d is missing", l);
    const factors *f = (const factors *)who[l]->mine;
    int g = l / 4, t = l % 4;
    for (int k = 0; k < 2; k++) {
      a[g][2 * t + k] = half_of<T>(f->a[0], k);
      a[g + 8][2 * t + k] = half_of<T>(f->a[1], k);
      a[g][2 * t + 8 + k] = half_of<T>(f->a[2], k);
      a[g + 8][2 * t + 8 + k] = half_of<T>(f->a[3], k);
      b[2 * t + k][g] = half_of<T>(f->b[0], k);
      b[2 * t + 8 + k][g] = half_of<T>(f->b[1], k);
    }
  }
  for (int l = 0; l < n; l++) {
    float *c = ((factors *)who[l]->mine)->c;
    for (int i = 0; i < 4; i++) {
      int row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2;
      double sum = c[i];
      for (int k = 0; k < 16; k++) sum += a[row][k] * b[k][column];
      c[i] = (float)sum;
    }
  }
}
}
template <class T>
static inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T)
{
  emulator::factors mine = {c, a, {b0, b1}};
  emulator::meet_warp(0xFFFFFFFFu, emulator::multiply_warp<T>, &mine);
}

#endif
