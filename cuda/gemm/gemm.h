// Products on the card. Included by gemm.c, gemm_fused.c, gemm_codes.c, gemm_plain.cu and
// images/conv.c.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif
#include "gemm_layout.h"

// gemm.c
/// Queues C = A B + bias, or C += A B, by the fastest path that supports it. Ignores p->after.
eng_status gemm_run(const gemm_product *p);

// gemm_plain.cu
/// Computes a complete product with any strides, sizes (k = 0 included) and float formats. Adds in
/// the order of k, in f64 if A, B or C is f64 and in f32 otherwise. Rounds once into C.
eng_status gemm_plain(const gemm_product *p);
/// Computes C = sum + bias, or C += sum, rounded once. `sum` is the product A B, in f32 or f64
/// (sum->dtype says which), with any strides and the batch dimensions of p.
eng_status gemm_finish(const gemm_product *p, const gemm_matrix *sum);

#ifdef __cplusplus
}
#endif
