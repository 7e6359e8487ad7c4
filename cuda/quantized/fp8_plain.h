// FP8 products: what the card can do (fp8_matmul.c), and the formula (fp8_plain.cu).
#ifndef ENG_CUDA_FP8_PLAIN_H
#define ENG_CUDA_FP8_PLAIN_H

#ifdef __cplusplus
extern "C" {
#endif
#include "device/backend.h"

/// The operation as in ops.def, every accumulator, bit for bit as the reference.
eng_status fp8_plain(const op_call *call);
/// What the tensor cores multiply in FP8; see backend.h.
int cuda_fp8(void);

#ifdef __cplusplus
}
#endif
#endif
