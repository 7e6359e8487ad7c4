// A product on the card, by whatever way there is; see gemm.c. Called by gemm_fused.c.
#ifndef ENG_CUDA_GEMM_H
#define ENG_CUDA_GEMM_H

#include "gemm_layout.h"

/// Queues C = A B + bias, or C += A B. p->after is not looked at.
eng_status gemm_run(const gemm_product *p);

#endif
