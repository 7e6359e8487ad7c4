// Products of codes through cuBLASLt: y = x W^T, with x and W in FP8 (scales by tensor, row or
// block), MXFP8 (one ue8m0 scale per 32 numbers of a row) or NVFP4 (one ue4m3 scale per 16). Sums
// and FP8's scales are in f32. Included by quantized/fp8_matmul.c, quantized/mx_product.cu and
// table.c.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif
#include "device/backend.h"
#include "base/fp8_layout.h"

// ---- FP8. core/base/fp8_layout.h defines the layouts of operands and scales.

/// An operand in device memory: [rows x inner] bytes, contiguous. rows and inner are padded to
/// multiples of FP8_PAD; data is 16-byte aligned. `scale` has the layout
/// that fp8_scales_for gives for rows and inner, and is 16-byte aligned.
typedef struct fp8_operand {
  const void  *data;
  const float *scale;
  int64_t      rows, inner;
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

// ---- MXFP8 and NVFP4, on cards from sm_100 on, with cuBLAS 12.8 or later. No card has run these
// products yet.

/// A matrix [rows x inner] in device memory, 16-byte aligned. Codes are stored row by row, one per
/// byte or, in e2m1, two per byte (the even column's code in the low half). Scales are stored in
/// tiles of 128 rows x 4 blocks, padded with zeros. In a tile, the scale of row r and block c is at
/// byte (r % 32) * 16 + (r % 128 / 32) * 4 + c % 4.
typedef struct mx_operand {
  const void *codes, *scales;
  int64_t     rows;
  int32_t     format;     // e4m3, e5m2 or ENG_FORMAT_E2M1
} mx_operand;

/// Whether the card and cuBLASLt multiply these formats, with NVFP4's scales if `nvfp4`, else with
/// MX's. cuBLASLt has no mode for e2m1 with MX's scales, nor for two operands in e5m2.
bool mx_product_supported(int64_t format_x, int64_t format_w, bool nvfp4);

/// Queues y = alpha[0] x W^T + alpha[1] y, rounded once. y [x.rows x w.rows] is contiguous, in f32,
/// bf16 or f16, 16-byte aligned. The numbers of rows are multiples of 16; `inner` is a multiple of
/// 32, or of 64 for e2m1. alpha is in device memory for NVFP4, whose tensor scales are computed
/// there, and in host memory otherwise. `add` says whether alpha[1] is not 0.
eng_status mx_product(void *y, int dtype, const mx_operand *x, const mx_operand *w, int64_t inner,
                      bool nvfp4, const float *alpha, bool add);

#ifdef __cplusplus
}
#endif
