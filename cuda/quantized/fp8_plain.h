// FP8 products: the card's capabilities (fp8_matmul.c), and the scalar formulas (fp8_plain.cu,
// mx_dequantize.cu). Included by these files, mx_product.cu and table.c.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif
#include "device/backend.h"

/// Computes fp8_matmul as defined in ops.def, with any accumulator, bit-equal to the reference.
eng_status fp8_plain(const op_call *call);
/// Computes mx_matmul as defined in ops.def.
eng_status mx_plain(const op_call *call);
/// The card's level of support for FP8 products; see backend.h.
int cuda_fp8(void);

#ifdef __cplusplus
}
#endif
