// Computes a product on the card, by the fastest path that supports it; see gemm.c. Called by
// gemm_fused.c and images/conv.c.
#pragma once

#include "gemm_layout.h"

/// Queues C = A B + bias, or C += A B. Ignores p->after.
eng_status gemm_run(const gemm_product *p);
