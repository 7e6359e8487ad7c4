// FP8 products: the card's capabilities (fp8_matmul.c), and the scalar formula (fp8_plain.cu).
#ifndef ENG_CUDA_FP8_PLAIN_H
#define ENG_CUDA_FP8_PLAIN_H

#ifdef __cplusplus
extern "C" {
#endif
#include "device/backend.h"

/// The operation as in ops.def, with every accumulator, bit-equal to the reference.
eng_status fp8_plain(const op_call *call);
/// The level of FP8 products on tensor cores; see backend.h.
int cuda_fp8(void);

#ifdef __cplusplus
}
#endif
#endif
