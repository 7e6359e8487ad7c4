// The memory layout of FP8 operands and their scales, for quantizers and products on the CPU and
// the GPU. All other files get the layout from here. Inline, so that gcc and nvcc compile the same
// code. Included by fp8/ and by the kernels of FP8.
//
// An operand is a matrix [rows x inner] of FP8 bytes, row-major. `inner` is the dimension that the
// product sums over: y [M x N] = x [M x K] W^T with W [N x K]. So x has M rows, W has N, and both
// have inner = K. A product that sums over another dimension (dgrad over N, wgrad over M) reads a
// transposed copy, a separate operand.
//
// A quantized value times its scale is the real value: the scale is amax / largest, not its
// inverse. Scales are f32, one for
//   FP8_TENSOR   the whole operand                  scale[0]
//   FP8_ROW      each row                           scale[r]
//   FP8_VEC128   each 1 x 128 piece of a row        scale[(k / 128) * round_up(rows, 4) + r]:
//                                                   rows are contiguous
//   FP8_BLK128   each 128 x 128 block               scale[(r / 128) * round_up(L, 4) + k / 128],
//                                                   L = ceil(inner / 128): blocks along `inner`
//                                                   are contiguous
// These are the layouts that cuBLASLt expects. The rows of BLK128's scales must be padded to a
// multiple of 4: otherwise cuBLASLt silently returns wrong results if L is not a multiple of 4.
// Scales in the padding are read but multiply nothing; they must be finite, such as 0. Scale arrays
// are 16-byte aligned.
//
// A transposed BLK128 operand has the same blocks: its scales are the transposed matrix of scales,
// padded again.
#pragma once

#include "numerics.h"

#include <math.h>
#include <stddef.h>

typedef enum fp8_scaling { FP8_TENSOR, FP8_ROW, FP8_VEC128, FP8_BLK128 } fp8_scaling;

enum {
  FP8_BLOCK = 128,       // elements that share a scale, along one dimension or both
  // on the GPU, rows and inner of a product's operands are padded with zeros to a multiple of this
  FP8_PAD = 16,
  FP8_SCALE_PAD = 4,     // rows of scales are padded to a multiple of this many scales
};

ENG_INLINE int64_t fp8_round_up(int64_t n, int64_t multiple)
{ return (n + multiple - 1) / multiple * multiple; }

/// Returns the size of an operand's dimension, padded for a product on the GPU. The GPU needs
/// `inner` to be a multiple of 16 bytes, and M and N multiples of 8. A multiple of 16 satisfies
/// both rules, also for the transposed copy, whose inner dimension is `rows`. The CPU's products
/// need no padding.
ENG_INLINE int64_t fp8_padded(int64_t n) { return fp8_round_up(n, FP8_PAD); }

/// The scales of an operand. Element (r, k) has scale[(r / row_block) * row_stride + (k /
/// inner_block) * inner_stride].
typedef struct fp8_scales {
  int64_t row_block, inner_block;     // elements that share a scale
  int64_t row_stride, inner_stride;   // floats from block to block
  int64_t row_count, inner_count;     // blocks along each dimension
  int64_t count;                      // floats in all, padding included
} fp8_scales;

/// Returns the sizes and strides of the scales of an operand [rows x inner] in blocks of any shape;
/// a block size of 0 means the whole dimension. If a block is a whole row (ROW) or the whole
/// operand (TENSOR), the scales have no padding. Otherwise, blocks of one row give the scales the
/// layout of VEC128, and blocks of several rows give them the layout of BLK128. So the scales of an
/// operand in 128 x 1 blocks have the same layout as the VEC128 scales of its transpose. `shape`
/// [2], unless NULL, receives the shape of a row-major array of the scales.
ENG_INLINE fp8_scales fp8_scales_for(int64_t block_rows, int64_t block_inner, int64_t rows,
                                     int64_t inner, int64_t *shape)
{
  fp8_scales s;
  s.row_block = block_rows ? block_rows : rows ? rows : 1;
  s.inner_block = block_inner ? block_inner : inner ? inner : 1;
  s.row_count = block_rows ? rows / block_rows + (rows % block_rows != 0) : 1;
  s.inner_count = block_inner ? inner / block_inner + (inner % block_inner != 0) : 1;
  // `whole`: a block is a whole row or the whole operand, so its scales need no padding
  int by_rows = block_rows == 1 && block_inner != 0, whole = !block_inner && block_rows <= 1;
  s.row_stride = by_rows ? 1 : whole ? block_rows : fp8_round_up(s.inner_count, FP8_SCALE_PAD);
  s.inner_stride = by_rows ? fp8_round_up(s.row_count, FP8_SCALE_PAD) : whole ? 0 : 1;
  int64_t outer = by_rows ? s.inner_count : whole ? 1 : s.row_count,
          length = by_rows ? s.inner_stride : whole ? s.row_count : s.row_stride;
  if (shape) shape[0] = outer, shape[1] = length;
  s.count = outer * length;
  return s;
}

/// Returns the same scales with rows and inner exchanged: element (k, r) has the scale of (r, k).
ENG_INLINE fp8_scales fp8_scales_turned(fp8_scales s)
{
  return (fp8_scales){s.inner_block,  s.row_block,   s.inner_stride, s.row_stride,
                      s.inner_count,  s.row_count,   s.count};
}

/// Returns the index of the scale of element (r, k).
ENG_INLINE int64_t fp8_scale_at(const fp8_scales *s, int64_t r, int64_t k)
{ return r / s->row_block * s->row_stride + k / s->inner_block * s->inner_stride; }

/// The order in which a product multiplies a sum by the scales of its operands: sum * (a * b),
/// (sum * a) * b or (sum * b) * a.
typedef enum fp8_order { FP8_TOGETHER, FP8_A_FIRST, FP8_B_FIRST } fp8_order;

/// Returns the order for operands with scale blocks of these sizes. _across: the size of a block
/// across K; _along: its size along K (0: all of K). cuBLASLt uses this order on Hopper but does
/// not document it; products of CUDA 13.0 on an H200 agreed with it in all bits (docs/fp8.md).
/// Pairs of block sizes that cuBLASLt lacks follow the same rule.
ENG_INLINE fp8_order fp8_scale_order(int64_t a_across, int64_t a_along, int64_t b_across,
                                     int64_t b_along)
{
  if (a_across != 1 || b_across != 1) return FP8_TOGETHER;
  return a_along == 0 && b_along == 0 ? FP8_B_FIRST : FP8_A_FIRST;
}

/// Returns total + sum * a * b. `order` says how the sum and the scales a and b are multiplied.
ENG_INLINE float fp8_add_scaled(fp8_order order, float sum, float a, float b, float total)
{
  if (order == FP8_TOGETHER) return fmaf(sum, a * b, total);
  return order == FP8_A_FIRST ? fmaf(sum * a, b, total) : fmaf(sum * b, a, total);
}
