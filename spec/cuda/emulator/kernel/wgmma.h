// Replaces cuda/kernel/wgmma.h with functions that do what its instructions do. A product reads its
// operands and is computed only when the kernel waits for it; this exposes kernels that change the
// operands too early. Sums are in double, rounded once.
#ifndef ENG_CUDA_WGMMA_H
#define ENG_CUDA_WGMMA_H

#include "mma.h"

static inline uint64_t tile_descriptor(uint32_t address, uint32_t beside,
                                       uint32_t offset)
{
  // only the lower word depends on the address; the constant offset is added last
  const uint32_t low = (address >> 4 | beside >> 4 << 16) + (offset >> 4);
  return (uint64_t)(1024 >> 4 | 1u << 30) << 32 | low;
}
static inline void publish_shared() {}
static inline void group_meet(int id, int threads) { emulator::meet_at(id, threads); }

namespace emulator {
/// A product in flight: a warpgroup's registers, and where the operands begin in shared memory.
struct product {
  float *d[WARPGROUP];
  const uint32_t *a[WARPGROUP];   // NULL: from shared memory
  uint64_t from_a, from_b;
  bool add, b_turned;
};
struct product_ask { float *d; const uint32_t *a; uint64_t from_a, from_b; bool add; };

/// Element (row, column) of rows of 64 numbers in the order of the 128-byte swizzle: the hardware
/// permutes the 16-byte pieces of an address by its bits 7 to 9.
template <class T> double swizzled(uint32_t start, uint32_t row, uint32_t column)
{
  uint32_t address = start + row / 8 * 1024 + row % 8 * 128 + column * 2;
  address ^= (address >> 7 & 7) << 4;
  return widen(*(const T *)shared_at(address, 2));
}

template <class T, int N> void run_product(const product &p)
{
  static double a[64][16], b[16][N];
  uint32_t start_a = (uint32_t)(p.from_a & 0x3FFF) << 4,
           start_b = (uint32_t)(p.from_b & 0x3FFF) << 4,
           beside = (uint32_t)(p.from_b >> 16 & 0x3FFF) << 4;
  for (int r = 0; r < 64; r++)
    for (int k = 0; k < 16; k++) {
      if (!p.a[0]) {
        a[r][k] = swizzled<T>(start_a, (uint32_t)r, (uint32_t)k);
      } else {
        int lane = r / 16 * 32 + r % 8 * 4 + k % 8 / 2, word = r % 16 / 8 + k / 8 * 2;
        a[r][k] = half_of<T>(p.a[lane][word], k % 2);
      }
    }
  for (int k = 0; k < 16; k++)
    for (int n = 0; n < N; n++)
      b[k][n] = p.b_turned ? swizzled<T>(start_b + (uint32_t)(n / 64) * beside, (uint32_t)k,
                                         (uint32_t)(n % 64)) :
                             swizzled<T>(start_b, (uint32_t)n, (uint32_t)k);
  for (int l = 0; l < WARPGROUP; l++)
    for (int i = 0; i < N / 2; i++) {
      int row = l / 32 * 16 + l % 32 / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + l % 4 * 2 + i % 2;
      double sum = p.add ? p.d[l][i] : 0.0;
      for (int k = 0; k < 16; k++) sum += a[row][k] * b[k][column];
      p.d[l][i] = (float)sum;
    }
}

void product_start(const product &p, void (*run)(const product &));
void product_close(thread *const *who, int n);
template <int LEFT> void product_finish(thread *const *who, int n);
void products_finish(int left);

template <class T, int N, bool TURNED> void ask_products(thread *const *who, int n)
{
  product p;
  const product_ask *first = (const product_ask *)who[0]->mine;
  p.from_a = first->from_a;
  p.from_b = first->from_b;
  p.add = first->add;
  p.b_turned = TURNED;
  for (int l = 0; l < n; l++) {
    if (!who[l]) fault("wgmma: thread %d of the warpgroup is missing", l);
    const product_ask *one = (const product_ask *)who[l]->mine;
    if (one->from_a != p.from_a || one->from_b != p.from_b || one->add != p.add)
      fault("wgmma: threads of a warpgroup disagree on the operands");
    p.d[l] = one->d;
    p.a[l] = one->a;
  }
  product_start(p, run_product<T, N>);
}
template <int LEFT> void product_finish(thread *const *, int) { products_finish(LEFT); }
}

static inline void group_begin() {}
static inline void group_commit() { emulator::meet_warpgroup(emulator::product_close, nullptr); }
template <int LEFT>
static inline void group_wait()
{ emulator::meet_warpgroup(emulator::product_finish<LEFT>, nullptr); }
template <int N> static inline void settle(float (&)[N]) {}
template <int M, int N> static inline void settle(uint32_t (&)[M][N]) {}
template <int N> static inline void forget(float (&)[N]) {}

template <int H, class T>
static inline void rows_times_rows(float (&d)[H], uint64_t a, uint64_t b, bool add, T)
{
  emulator::product_ask mine = {d, nullptr, a, b, add};
  emulator::meet_warpgroup(emulator::ask_products<T, 2 * H, false>, &mine);
}
template <int H, class T>
static inline void weights_times_rows(float (&d)[H], const uint32_t (&a)[4], uint64_t b, T)
{
  emulator::product_ask mine = {d, a, 0, b, true};
  emulator::meet_warpgroup(emulator::ask_products<T, 2 * H, true>, &mine);
}

#endif
