// fp8_matmul without tensor cores, see fp8_plain.cu.
#ifndef ENG_CUDA_FP8_PLAIN_H
#define ENG_CUDA_FP8_PLAIN_H

#ifdef __cplusplus
extern "C" {
#endif
#include "device/backend.h"

/// The operation as in ops.def, every accumulator, bit for bit as the reference.
eng_status fp8_plain(const op_call *call);

#ifdef __cplusplus
}
#endif
#endif
