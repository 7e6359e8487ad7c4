// Microscaled products through cuBLASLt's block-scaled modes: y [M x N] = alpha x W^T with codes of
// MXFP8 (a scale in ue8m0 for 32 numbers of a row) or NVFP4 (in ue4m3 for 16). For cards from
// sm_100 on, with cuBLAS 12.8 or later. No card has run these products yet.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif
#include "device/backend.h"

/// A matrix [rows x inner] in device memory, 16-byte aligned: codes row by row, a byte each or, in
/// e2m1, two to a byte (the even one in the low half); scales in tiles of 128 rows x 4 blocks,
/// padded with zeros. In a tile, the scale of row r and block c is at
/// (r % 32) * 16 + (r % 128 / 32) * 4 + c % 4.
typedef struct mx_operand {
  const void *codes, *scales;
  int64_t     rows;
  int32_t     format;     // e4m3, e5m2 or ENG_FORMAT_E2M1
} mx_operand;

/// Whether the card and cuBLASLt multiply these formats, whose scales follow NVFP4 or MX. There is
/// no mode for e2m1 with MX's scales, nor for e5m2 twice.
bool mx_product_supported(int64_t format_x, int64_t format_w, bool nvfp4);

/// Queues y = alpha[0] x W^T + alpha[1] y, rounded once. y [x.rows x w.rows] is contiguous, in f32,
/// bf16 or f16, 16-byte aligned. Rows of both matrices are multiples of 16, `inner` of 32 and for
/// e2m1 of 64. alpha: in device memory for NVFP4, whose factors of tensors are there, else in host
/// memory. `add`: whether alpha[1] is not 0.
eng_status mx_product(void *y, int dtype, const mx_operand *x, const mx_operand *w, int64_t inner,
                      bool nvfp4, const float *alpha, bool add);

#ifdef __cplusplus
}
#endif
