// Loads and stores elements of any float format, chosen at run time, for kernels that access few
// elements. The format of sums is a template argument, float or double. Included by gemm_plain.cu
// and bias_grad.cu.
#pragma once

#include "runtime/device.h"

/// Loads element `at` exactly, or rounded once if it is f64 and SUM is float.
template <typename SUM>
__device__ inline SUM element_load(const void *data, int dtype, int64_t at)
{
  switch (dtype) {
    case ENG_f32: return (SUM)static_cast<const float *>(data)[at];
    case ENG_f16: return (SUM)widen(static_cast<const f16_t *>(data)[at]);
    case ENG_bf16: return (SUM)widen(static_cast<const bf16_t *>(data)[at]);
    default: return (SUM)static_cast<const double *>(data)[at];
  }
}

/// Stores `value`, rounded once.
__device__ inline void element_store(void *data, int dtype, int64_t at, float value)
{
  switch (dtype) {
    case ENG_f32: static_cast<float *>(data)[at] = value; break;
    case ENG_f16: narrow(static_cast<f16_t *>(data)[at], value); break;
    case ENG_bf16: narrow(static_cast<bf16_t *>(data)[at], value); break;
    default: static_cast<double *>(data)[at] = value;
  }
}

__device__ inline void element_store(void *data, int dtype, int64_t at, double value)
{
  switch (dtype) {
    case ENG_f32: static_cast<float *>(data)[at] = (float)value; break;
    case ENG_f16: static_cast<f16_t *>(data)[at].bits = f16_from_f64(value); break;
    case ENG_bf16: static_cast<bf16_t *>(data)[at].bits = bf16_from_f64(value); break;
    default: static_cast<double *>(data)[at] = value;
  }
}
