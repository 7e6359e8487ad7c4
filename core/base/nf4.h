// NF4 of single numbers, as bitsandbytes 0.50 computes it on a CPU. Inline, so that gcc and nvcc
// compile the same code. Called by the kernels of nf4_quantize and nf4_dequantize, and by
// fp8/infer.c.
//
// The elements of a tensor, in row-major order, form blocks. An element x is divided by `a`, the
// absmax of its block, and rounded to the nearest of 16 numbers, ties to the lower number. The
// quotient is computed as x * (1 / max(a, 1e-38)), or, in a last block that is not full, as x /
// max(a, 1e-38). For such a last block, max(a, 1e-38) is also the absmax that is stored. NaN has
// code 15 and makes its block NaN.
//
// Double quantization: `offset` is the mean of all absmaxes, unless the caller gives it. The
// differences absmax - offset form groups of 256; g is the largest magnitude in a group. Each
// difference is divided by g and rounded to the nearest of 2^16 numbers from -1 to 1, then to the
// nearest of the 256 numbers of nf4_map. The dequantized absmax is map[code] * g + offset.
#pragma once

#include "numerics.h"

enum { NF4_GROUP = 256 };

// Quantiles of a normal distribution, divided by the largest quantile (QLoRA, arXiv 2305.14314,
// appendix E).
static const float nf4_number[16] = {
  -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
  -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
  0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f,
  0.7229568362236023f, 1.0f};

/// Returns the number by which a block's elements are divided.
ENG_INLINE float nf4_divisor(float absmax) { return absmax < 1e-38f ? 1e-38f : absmax; }

ENG_INLINE float nf4_within_one(float x) { return x < -1.0f ? -1.0f : x > 1.0f ? 1.0f : x; }

/// Fills in the 256 numbers of 8-bit dynamic quantization (arXiv 1511.04561), ascending: 0, 1, and
/// for i = 0 .. 6 the midpoints of 2^i equal parts of [0.1, 1] times 10^(i - 6), with both signs.
static inline void nf4_map(float map[NF4_GROUP])
{
  static const float power[7] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};
  map[127] = 0.0f, map[255] = 1.0f;
  for (int i = 0, at = 128; i < 7; i++) {
    int n = 1 << i;
    float step = 0.9f / (float)n, left = 0.1f;
    for (int k = 1; k <= n; k++, at++) {
      float right = k < (n + 1) / 2 ? __builtin_fmaf(step, (float)k, 0.1f)
                                    : __builtin_fmaf(-step, (float)(n - k), 1.0f);
      map[at] = power[i] * ((left + right) / 2.0f);
      map[254 - at] = -map[at];
      left = right;
    }
  }
}

/// Returns the index of the number nearest to x among 2^16 evenly spaced numbers from -1 to 1, or 0
/// for NaN.
ENG_INLINE int nf4_bin(float x)
{ return x == x ? (int)(uint16_t)((nf4_within_one(x) + 1.0f) * 0.5f * 65535.0f + 0.5f) : 0; }
ENG_INLINE float nf4_bin_number(int bin) { return -1.0f + 2.0f * (float)bin / 65535.0f; }
