// Shared by the host programs of the CUDA device's products: random tensors, and the parts of
// gemm_fp8_host.c. See gemm_host.c.
#ifndef ENG_SPEC_GEMM_HOST_H
#define ENG_SPEC_GEMM_HOST_H

#include "card.h"
#include "runtime/device.h"

/// The same numbers in every run.
int64_t random_below(int64_t n);
/// Memory aligned to 256 bytes, valid until forget_tensors().
void   *piece(int64_t bytes);
void    forget_tensors(void);
/// A tensor of small integers in one of several layouts: 0 plain, 1 last two dimensions swapped in
/// memory, 2 every other element, 3 gaps between rows, 4 first dimension innermost, 5 beginning one
/// element late. `spread`: broadcast in the first dimension.
tensor  make(int dtype, int ndim, const int64_t *shape, int layout, bool spread);
/// The offset of element `index`, counted row by row.
int64_t place(const tensor *x, int64_t index);

void fp8_products(void);
void fp8_matmuls(void);

#endif
