// Replaces CUB's file: sorts integers by some of their bits; stable, as CUB's contract requires.
#ifndef EMULATOR_RADIX_SORT_H
#define EMULATOR_RADIX_SORT_H

#include "emulator.h"

#include <algorithm>

namespace cub {
struct DeviceRadixSort {
  template <class N>
  static cudaError_t sort(bool down, void *space, size_t &bytes, const uint64_t *from, uint64_t *to,
                          N n, int first_bit, int end_bit, cudaStream_t stream)
  {
    if (!space) {
      bytes = 256;
      return cudaSuccess;
    }
    return emulator::work_later("cub::DeviceRadixSort", stream, [=] {
      memset(space, 0xFF, 256);
      const uint64_t bits =
        end_bit - first_bit == 64 ? ~0ull : ((1ull << (end_bit - first_bit)) - 1) << first_bit;
      std::copy(from, from + n, to);
      std::stable_sort(to, to + n, [=](uint64_t a, uint64_t b) {
        return down ? (a & bits) > (b & bits) : (a & bits) < (b & bits);
      });
    });
  }
  template <class N>
  static cudaError_t SortKeys(void *space, size_t &bytes, const uint64_t *from, uint64_t *to, N n,
                              int first_bit, int end_bit, cudaStream_t stream)
  {
    return sort(false, space, bytes, from, to, n, first_bit, end_bit, stream);
  }
  template <class N>
  static cudaError_t SortKeysDescending(void *space, size_t &bytes, const uint64_t *from,
                                        uint64_t *to, N n, int first_bit, int end_bit,
                                        cudaStream_t stream)
  {
    return sort(true, space, bytes, from, to, n, first_bit, end_bit, stream);
  }
};
}

#endif
