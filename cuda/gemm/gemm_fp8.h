// FP8 products through cuBLASLt: y [M x N] = x [M x K] W^T with x and W in FP8, sums and scales in
// f32. core/base/fp8_layout.h defines the layouts of operands and scales. Called by
// quantized/fp8_matmul.c.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif
#include "device/backend.h"
#include "base/fp8_layout.h"

/// An operand in device memory: [rows x inner] bytes, with rows `stride` bytes apart. rows and
/// inner are padded to multiples of FP8_PAD; data and stride are 16-byte aligned. `scale` has the
/// layout that fp8_scales_for gives for rows and inner, and is 16-byte aligned.
typedef struct fp8_operand {
  const void  *data;
  const float *scale;
  int64_t      rows, inner, stride;
  int32_t      format;     // e4m3 or e5m2
  int32_t      scaling;    // fp8_scaling
} fp8_operand;

/// y [m x n] = x W^T + bias, or y += x W^T. x has at least m rows and W at least n rows; further
/// rows are padding. If there is padding, the product goes through scratch memory, because y has no
/// room for padding.
typedef struct fp8_result {
  void       *data;         // device memory
  int32_t     dtype;        // f32, bf16 or f16; usually f32 when accumulating
  int64_t     m, n, stride; // stride: elements between rows
  int32_t     accumulate;   // 1: y += x W^T, without a bias
  const void *bias;         // [n], contiguous, or NULL
  int32_t     bias_dtype;   // f32, bf16 or f16
} fp8_result;

/// Whether the card multiplies operands with these scalings. From sm_89 on, both may be FP8_TENSOR.
/// sm_90 (Hopper, not its successors) supports three more pairs: both FP8_ROW, both FP8_VEC128, or
/// one FP8_VEC128 and the other FP8_BLK128. A scaling of -1 stands for any other, which no card
/// supports.
bool fp8_product_supported(int scaling_x, int scaling_w);

/// Queues the product, whose scalings must be supported. With `fast` (FP8_TENSOR and FP8_ROW only),
/// the tensor cores' accumulators, which keep 14 bits, sum over all of K. Otherwise their sums are
/// promoted to f32 every 128 products along K. At most one operand may be E5M2. Errors: MEMORY;
/// LIBRARY if cuBLASLt is too old for the scales or has no algorithm.
eng_status fp8_product(const fp8_result *y, const fp8_operand *x, const fp8_operand *w, bool fast);

#ifdef __cplusplus
}
#endif
