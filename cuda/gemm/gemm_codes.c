// See gemm_codes.h. Called by quantized/fp8_matmul.c, quantized/mx_product.cu and table.c.
#include "gemm_codes.h"

#include "runtime/device.h"
#include "gemm.h"
#include "gemm_lt.h"

#include <cublasLt.h>

// the cuBLAS versions that added FP8's scales by row and by block, and block-scaled MXFP8 and NVFP4
enum { BLOCKS_SINCE = 120900, MX_SINCE = 120800 };

/// Describes y [m x n] = x W^T for codes x [m x k] and W [n x k], all contiguous and 16-byte
/// aligned: A = W (op T), B = x (op N). So both operands are K-major, the only arrangement that
/// cuBLASLt accepts for FP8. The caller adds the formats, the scalings, and a bias if there is one.
static gemm_problem problem_of(int64_t m, int64_t n, int64_t k)
{
  return (gemm_problem){.m = n, .n = m, .k = k, .transpose_a = 1, .lda = k, .ldb = k, .ldc = n,
                        .batch = 1, .align_a = 16, .align_b = 16, .align_c = 16, .bias = -1};
}

// ------------------------------------------------------------------ FP8

static const struct { const char *name; int mode; } scalings[] = {
  [FP8_TENSOR] = {"tensor", CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F},
  [FP8_ROW] = {"row", CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F},
  [FP8_VEC128] = {"1x128", CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F},
  [FP8_BLK128] = {"128x128", CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F},
};

static bool by_block(int scaling) { return scaling == FP8_VEC128 || scaling == FP8_BLK128; }

bool fp8_product_supported(int scaling_x, int scaling_w)
{
  if (scaling_x == FP8_TENSOR && scaling_w == FP8_TENSOR) return cuda_capability() >= 89;
  bool rows = scaling_x == FP8_ROW && scaling_w == FP8_ROW,
       blocks = by_block(scaling_x) && by_block(scaling_w) &&
                !(scaling_x == FP8_BLK128 && scaling_w == FP8_BLK128);
  return (rows || blocks) && cuda_capability() == 90;
}

/// Whether cuBLASLt can write y and add its bias. (If y is f32, cuBLASLt accepts only bf16 biases.)
static bool can_write(const fp8_result *y, const fp8_operand *x, const fp8_operand *w)
{
  bool bias =
    !y->bias || (y->dtype != ENG_f32 && y->bias_dtype == y->dtype && (uintptr_t)y->bias % 16 == 0);
  return y->m == x->rows && y->n == w->rows && y->stride * eng_dtype_size(y->dtype) % 16 == 0 &&
         (uintptr_t)y->data % 16 == 0 && bias;
}

static eng_status multiply(const fp8_result *y, const fp8_operand *x, const fp8_operand *w,
                           bool fast, const gemm_matrix *c, bool direct)
{
  gemm_problem problem = problem_of(x->rows, w->rows, x->inner);
  problem.type_a = w->format;
  problem.type_b = x->format;
  problem.type_c = c->dtype;
  problem.ldc = c->row;
  if (direct && y->bias) problem.bias = y->bias_dtype;
  problem.accumulate = direct && y->accumulate;
  problem.scaling_a = scalings[w->scaling].mode + 1;
  problem.scaling_b = scalings[x->scaling].mode + 1;
  problem.fast = fast;
  gemm_operands on = {.a = w->data,
                      .b = x->data,
                      .c = c->data,
                      .bias = y->bias,
                      .scale_a = w->scale,
                      .scale_b = x->scale};
  bool done;
  ENG_TRY(gemm_lt_run(&done, &problem, &on));
  FAIL_IF(!done, ENG_ERR_LIBRARY, "fp8 product of %s [%lld x %lld], scales by %s, and transposed "
          "%s [%lld x %lld], scales by %s, to %s%s: not supported by cuBLASLt %zu on sm_%d; hint: "
          "ENGINE_FP8_FORMULA=1 uses a slow formula instead", eng_dtype_name(x->format),
          (long long)x->rows, (long long)x->inner, scalings[x->scaling].name,
          eng_dtype_name(w->format), (long long)w->rows, (long long)w->inner,
          scalings[w->scaling].name, eng_dtype_name(c->dtype), fast ? ", fast sums" : "",
          cublasLtGetVersion(), cuda_capability());
  return ENG_OK;
}

eng_status fp8_product(const fp8_result *y, const fp8_operand *x, const fp8_operand *w, bool fast)
{
  FAIL_IF(x->scaling != FP8_TENSOR && cublasLtGetVersion() < BLOCKS_SINCE, ENG_ERR_LIBRARY, "fp8: "
          "scales by %s need cuBLAS 12.9 or later, got version number %zu; hint: a newer cuBLAS, "
          "or ENGINE_FP8_FORMULA=1, which is slow", scalings[x->scaling].name,
          cublasLtGetVersion());
  gemm_matrix c = {.data = y->data, .dtype = y->dtype, .row = y->stride, .column = 1};
  if (can_write(y, x, w)) return multiply(y, x, w, fast, &c, true);

  gemm_matrix sum = {.dtype = ENG_f32, .row = w->rows, .column = 1};
  int64_t bytes = x->rows * w->rows * (int64_t)sizeof(float);
  sum.data = scratch_take(bytes);
  if (!sum.data) return ENG_ERR_MEMORY;
  gemm_product p = {.m = y->m,
                    .n = y->n,
                    .c = c,
                    .bias = y->bias,
                    .bias_dtype = y->bias_dtype,
                    .accumulate = y->accumulate};
  eng_status status = multiply(y, x, w, fast, &sum, false);
  if (status == ENG_OK) status = gemm_finish(&p, &sum);
  scratch_give(sum.data, bytes);
  return status;
}

// ------------------------------------------------------------------ MXFP8, NVFP4

bool mx_product_supported(int64_t format_x, int64_t format_w, bool nvfp4)
{
  bool four = format_x == ENG_FORMAT_E2M1 && format_w == ENG_FORMAT_E2M1,
       eight = (format_x == ENG_e4m3 && (format_w == ENG_e4m3 || format_w == ENG_e5m2)) ||
               (format_x == ENG_e5m2 && format_w == ENG_e4m3);
  return cuda_capability() >= 100 && cublasLtGetVersion() >= MX_SINCE && (nvfp4 ? four : eight);
}

eng_status mx_product(void *y, int dtype, const mx_operand *x, const mx_operand *w, int64_t inner,
                      bool nvfp4, const float *alpha, bool add)
{
  int mode = nvfp4 ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3
                   : CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
  gemm_problem problem = problem_of(x->rows, w->rows, inner);
  problem.type_a = w->format;
  problem.type_b = x->format;
  problem.type_c = dtype;
  problem.accumulate = add;
  problem.scaling_a = problem.scaling_b = mode + 1;
  gemm_operands on = {.a = w->codes,
                      .b = x->codes,
                      .c = y,
                      .scale_a = w->scales,
                      .scale_b = x->scales,
                      .alpha = alpha};
  bool done;
  ENG_TRY(gemm_lt_run(&done, &problem, &on));
  FAIL_IF(!done, ENG_ERR_LIBRARY, "%s product of [%lld x %lld] by [%lld x %lld] transposed: not "
          "supported by cuBLASLt %zu on sm_%d; hint: set accumulator = \"fp32\" in forward, dgrad "
          "and wgrad of the recipe", nvfp4 ? "NVFP4" : "MXFP8", (long long)x->rows,
          (long long)inner, (long long)w->rows, (long long)inner, cublasLtGetVersion(),
          cuda_capability());
  return ENG_OK;
}
