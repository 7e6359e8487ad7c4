// Microscaled products through cuBLASLt; gemm_mx.h has the contracts. As in gemm_fp8.c, the
// row-major y = x W^T is the column-major D = op(A) op(B) with A = W (op T) and B = x (op N).
// Called by quantized/mx_product.cu and table.c.
#include "gemm_mx.h"

#include "runtime/device.h"
#include "gemm_lt.h"

#include <cublasLt.h>

enum { SINCE = 120800 };   // the cuBLAS version that added block-scaled modes

bool mx_product_supported(int64_t format_x, int64_t format_w, bool nvfp4)
{
  bool four = format_x == ENG_FORMAT_E2M1 && format_w == ENG_FORMAT_E2M1,
       eight = (format_x == ENG_e4m3 && (format_w == ENG_e4m3 || format_w == ENG_e5m2)) ||
               (format_x == ENG_e5m2 && format_w == ENG_e4m3);
  return cuda_capability() >= 100 && cublasLtGetVersion() >= SINCE && (nvfp4 ? four : eight);
}

eng_status mx_product(void *y, int dtype, const mx_operand *x, const mx_operand *w, int64_t inner,
                      bool nvfp4, const float *alpha, bool add)
{
  int mode = nvfp4 ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3
                   : CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
  gemm_problem problem = {
    .m = w->rows,
    .n = x->rows,
    .k = inner,
    .type_a = w->format,
    .type_b = x->format,
    .type_c = dtype,
    .transpose_a = 1,
    .lda = inner,
    .ldb = inner,
    .ldc = w->rows,
    .batch = 1,
    .align_a = 16,
    .align_b = 16,
    .align_c = 16,
    .bias = -1,
    .accumulate = add,
    .scaling_a = mode + 1,
    .scaling_b = mode + 1,
  };
  gemm_operands on = {.a = w->codes,
                      .b = x->codes,
                      .c = y,
                      .scale_a = w->scales,
                      .scale_b = x->scales,
                      .alpha = alpha};
  bool done;
  ENG_TRY(gemm_lt_run(&done, &problem, &on));
  return done ? ENG_OK :
                error_set(ENG_ERR_LIBRARY,
                          "%s product of [%lld x %lld] by [%lld x %lld] transposed: not supported "
                          "by cuBLASLt %zu on sm_%d; hint: set accumulator = \"fp32\" in forward, "
                          "dgrad and wgrad of the recipe",
                          nvfp4 ? "NVFP4" : "MXFP8", (long long)x->rows, (long long)inner,
                          (long long)w->rows, (long long)inner, cublasLtGetVersion(),
                          cuda_capability());
}
