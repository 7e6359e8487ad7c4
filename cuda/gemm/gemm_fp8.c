// FP8 products through cuBLASLt; gemm_fp8.h has the contracts. The row-major product y = x W^T is
// the column-major product D [n x m] = op(A) op(B) with A = W (op T) and B = x (op N). Both
// operands are K-major as stored, the only arrangement that cuBLASLt accepts for FP8. Called by
// quantized/fp8_matmul.c.
#include "gemm_fp8.h"

#include "runtime/device.h"
#include "gemm_lt.h"
#include "gemm_plain.h"

#include <cublasLt.h>
#include <stdio.h>

enum { BLOCKS_SINCE = 120900 };   // the cuBLAS version that added scales by row and by block

static const char *scaling_name(int scaling)
{
  switch (scaling) {
    case FP8_TENSOR: return "tensor";
    case FP8_ROW:    return "row";
    case FP8_VEC128: return "1x128";
    case FP8_BLK128: return "128x128";
  }
  return "?";
}

static int mode_of(int scaling)
{
  switch (scaling) {
    case FP8_ROW:    return CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    case FP8_VEC128: return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    case FP8_BLK128: return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    default:         return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  }
}

/// Describes the product for messages.
static const char *product_text(const fp8_result *y, const fp8_operand *x, const fp8_operand *w,
                                bool fast)
{
  static char text[512];
  const fp8_operand *side[2] = {x, w};
  int n = snprintf(text, sizeof text, "fp8 product y %s [%lld x %lld], row stride %lld%s%s =",
                   eng_dtype_name(y->dtype), (long long)y->m, (long long)y->n, (long long)y->stride,
                   y->accumulate ? ", accumulated" : "", y->bias ? ", with a bias" : "");
  for (int i = 0; i < 2; i++)
    n += snprintf(
      text + n, sizeof text - (size_t)n,
      "%s %s [%lld x %lld], row stride %lld, address %% 16 = %d, scales by %s, "
      "address of the scales %% 16 = %d",
      i ? " times transposed" : "",
      side[i]->format == ENG_e5m2 ? "E5M2" :
      side[i]->format == ENG_e4m3 ? "E4M3" :
                                    "?",
      (long long)side[i]->rows, (long long)side[i]->inner, (long long)side[i]->stride,
      (int)((uintptr_t)side[i]->data % 16), scaling_name(side[i]->scaling),
      (int)((uintptr_t)side[i]->scale % 16));
  snprintf(text + n, sizeof text - (size_t)n, "%s", fast ? ", fast sums" : "");
  return text;
}

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
  gemm_problem problem = {
    .m = w->rows,
    .n = x->rows,
    .k = x->inner,
    .type_a = w->format,
    .type_b = x->format,
    .type_c = c->dtype,
    .transpose_a = 1,
    .lda = w->stride,
    .ldb = x->stride,
    .ldc = c->row,
    .batch = 1,
    .align_a = 16,
    .align_b = 16,
    .align_c = 16,
    .bias = direct && y->bias ? y->bias_dtype : -1,
    .accumulate = direct && y->accumulate,
    .scaling_a = mode_of(w->scaling) + 1,
    .scaling_b = mode_of(x->scaling) + 1,
    .fast = fast,
  };
  gemm_operands on = {.a = w->data,
                      .b = x->data,
                      .c = c->data,
                      .bias = y->bias,
                      .scale_a = w->scale,
                      .scale_b = x->scale};
  bool done;
  ENG_TRY(gemm_lt_run(&done, &problem, &on));
  return done ? ENG_OK :
                error_set(ENG_ERR_LIBRARY,
                          "%s: not supported by cuBLASLt %zu on sm_%d; hint: "
                          "ENGINE_FP8_FORMULA=1 uses a slow formula instead",
                          product_text(y, x, w, fast), cublasLtGetVersion(), cuda_capability());
}

eng_status fp8_product(const fp8_result *y, const fp8_operand *x, const fp8_operand *w, bool fast)
{
  FAIL_IF(x->scaling != FP8_TENSOR && cublasLtGetVersion() < BLOCKS_SINCE, ENG_ERR_LIBRARY, "fp8: "
          "scales by %s need cuBLAS 12.9 or later, got version number %zu; hint: a newer cuBLAS, "
          "or ENGINE_FP8_FORMULA=1, which is slow", scaling_name(x->scaling), cublasLtGetVersion());
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
