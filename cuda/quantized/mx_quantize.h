// Shared by the kernels of mx_quantize: the description of a call and of its two results, and the
// survey of x, which finds its largest magnitude and the number of its NaNs. Included by
// mx_registers.h.
#pragma once

#include "kernel/element.h"
#include "kernel/walk.h"

extern "C" {
#include "base/mx.h"
#include "base/rng.h"
}

namespace {

/// The bits of a matrix's largest magnitude other than NaN, and the number of NaN in it.
struct survey {
  uint32_t top, unused;
  unsigned long long nan;
};

/// One of the two results: x quantized, or x transposed and quantized. In x, a block has `high`
/// rows and `wide` columns.
struct mx_side {
  uint8_t *q, *scale;
  int      high, wide;
  divider  by_high, by_wide;
  int64_t  scale_row, scale_column;    // strides of `scale`: from a block of x to the block
                                       // below it, and to the block on its right
  int64_t  length;                     // of a row of the result
  int64_t  random;                     // Philox block of the first element
  bool     turned;                     // the result is for the transposed x
  bool     same;                       // has the same codes as the other side
  bool     aligned;                    // four elements can be written at once
};

/// The rule and format of mx_scale as constants for a formula without branches. If the bits of
/// amax, plus `slack`, are at least the bits of Inf, a scale's code is `over`. Otherwise let b be
/// the bits of amax * by, plus `half`. If b is at most `zero`, the code is 0. If b is larger, the
/// code is the exponent field of b + up, minus emax, clamped to 0 .. 254.
struct mx_power {
  float    by;
  uint32_t half, up, zero, slack, over;
  int      emax;
};

struct mx_job {
  const void *x;
  int      dtype;
  int64_t  rows, columns, tiles_across;
  int      tile_rows, tile_columns;
  bool     aligned;                    // four numbers of x can be read at once
  int      sides;
  mx_side  of[2];
  int      rule, sr_bits;
  bool     finite, values;             // MX_FINITE and MX_VALUES of ops.def
  const float *amax;                   // of the tensor, for NVFP4
  const float *average;                // in the layout of x; decides which way each number is
                                       // rounded (mx_code_toward). NULL: to nearest
  survey  *seen;                       // NULL: the kernel does not survey x
  uint64_t seed;
  float    factor;                     // multiplies the elements
  // only for quantize_in_registers
  mx_format format;
  mx_power power;
  divider  by_across;                  // tiles in a row of tiles
  int      lanes;                      // threads that share a row (or a column) of a block
  bool     square;                     // blocks have as many rows as columns
};

/// Returns the bits of |x|. If x is NaN, returns 0 and increments `nan`.
__device__ inline uint32_t magnitude_of(float x, int &nan)
{
  const uint32_t bits = __float_as_uint(x) & 0x7FFFFFFFu;
  nan += bits > 0x7F800000u;
  return bits > 0x7F800000u ? 0 : bits;
}

/// Merges the maxima and NaN counts of a warp's threads into *seen. All 32 threads must call it.
__device__ inline void report(survey *seen, uint32_t top, int nan)
{
  top = __reduce_max_sync(0xFFFFFFFFu, top);
  nan = __reduce_add_sync(0xFFFFFFFFu, nan);
  if (threadIdx.x % 32) return;
  if (top > *(volatile uint32_t *)&seen->top) atomicMax(&seen->top, top);
  if (nan) atomicAdd(&seen->nan, (unsigned long long)nan);
}

}  // namespace
