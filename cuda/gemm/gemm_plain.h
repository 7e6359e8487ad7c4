// Our own products, for what cuBLASLt does not take, and what comes after a product; see gemm_plain.cu.
#ifndef ENG_CUDA_GEMM_PLAIN_H
#define ENG_CUDA_GEMM_PLAIN_H

#ifdef __cplusplus
extern "C" {
#endif
#include "gemm_layout.h"

/// The whole product: any strides, sizes (k = 0 too) and float formats, sums in the order of k in f32, in f64 when any of A, B
/// and C is f64. One rounding into C.
eng_status gemm_plain(const gemm_product *p);

/// C = sum + bias, or C += sum, rounded once: `sum` is the product in f32 (f64 when sum->dtype says so), any strides, with
/// the batch dimensions of p.
eng_status gemm_finish(const gemm_product *p, const gemm_matrix *sum);

#ifdef __cplusplus
}
#endif
#endif
