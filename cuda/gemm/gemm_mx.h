// Microscaled products through cuBLASLt's block-scaled modes: y [M x N] = alpha x W^T. x and W are
// in MXFP8 (one ue8m0 scale per 32 numbers of a row) or NVFP4 (one ue4m3 scale per 16). For cards
// from sm_100 on, with cuBLAS 12.8 or later. No card has run these products yet. Included by
// quantized/mx_product.cu and table.c.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif
#include "device/backend.h"

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
