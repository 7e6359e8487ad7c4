// Loads and stores single elements whose format is known only at run time, in every format but FP8.
// A store to a float format rounds once. An integer stored in an integer format wraps; a float
// converted to an integer is truncated and saturated. In bool, every value but 0 becomes 1. Inline,
// so that gcc and nvcc compile the same code. Used by dtype.c, which adds FP8, and by CUDA kernels.
#pragma once

#include "dtype.h"

/// Loads an element of an integer format.
ENG_INLINE int64_t element_whole(const void *data, int dtype, int64_t i)
{
  switch (dtype) {
    case ENG_i8:  return ((const int8_t *)data)[i];
    case ENG_i16: return ((const int16_t *)data)[i];
    case ENG_i32: return ((const int32_t *)data)[i];
    case ENG_i64: return ((const int64_t *)data)[i];
    default:      return ((const uint8_t *)data)[i];   // u8, bool
  }
}

ENG_INLINE double element_double(const void *data, int dtype, int64_t i)
{
  switch (dtype) {
    case ENG_f32:  return ((const float *)data)[i];
    case ENG_f64:  return ((const double *)data)[i];
    case ENG_f16:  return f16_to_f32(((const uint16_t *)data)[i]);
    case ENG_bf16: return bf16_to_f32(((const uint16_t *)data)[i]);
    default:       return (double)element_whole(data, dtype, i);
  }
}

ENG_INLINE int64_t element_int(const void *data, int dtype, int64_t i)
{
  return dtype_is_float(dtype) ? int_of(element_double(data, dtype, i), -0x1p63, 0x1p63)
                               : element_whole(data, dtype, i);
}

ENG_INLINE void element_store(void *data, int dtype, int64_t i, double value)
{
  switch (dtype) {
    case ENG_f32:  ((float *)data)[i] = (float)value; break;
    case ENG_f64:  ((double *)data)[i] = value; break;
    case ENG_f16:  ((uint16_t *)data)[i] = f16_from_f64(value); break;
    case ENG_bf16: ((uint16_t *)data)[i] = bf16_from_f64(value); break;
    case ENG_u8:   ((uint8_t *)data)[i] = (uint8_t)int_of(value, 0, 255); break;
    case ENG_i8:   ((int8_t *)data)[i] = (int8_t)int_of(value, -128, 127); break;
    case ENG_i16:  ((int16_t *)data)[i] = (int16_t)int_of(value, -32768, 32767); break;
    case ENG_i32:  ((int32_t *)data)[i] = (int32_t)int_of(value, -0x1p31, 0x1p31 - 1); break;
    case ENG_i64:  ((int64_t *)data)[i] = int_of(value, -0x1p63, 0x1p63); break;
    case ENG_bool: ((uint8_t *)data)[i] = value != 0; break;   // NaN is true, as in C
  }
}

ENG_INLINE void element_store_int(void *data, int dtype, int64_t i, int64_t value)
{
  switch (dtype) {
    case ENG_u8:   ((uint8_t *)data)[i] = (uint8_t)value; break;
    case ENG_i8:   ((int8_t *)data)[i] = (int8_t)value; break;
    case ENG_i16:  ((int16_t *)data)[i] = (int16_t)value; break;
    case ENG_i32:  ((int32_t *)data)[i] = (int32_t)value; break;
    case ENG_i64:  ((int64_t *)data)[i] = value; break;
    case ENG_bool: ((uint8_t *)data)[i] = value != 0; break;
    default:       element_store(data, dtype, i, double_from_int(value, dtype == ENG_f64));
  }
}
