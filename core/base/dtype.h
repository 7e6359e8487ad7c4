// Number formats: the kind of a dtype, and access to single elements in host memory as double or
// int64. See dtype.c. Called by most folders.
#pragma once

#include "engine.h"
#include "numerics.h"

ENG_INLINE bool dtype_is_float(int d)
{ return d == ENG_f32 || d == ENG_f64 || d == ENG_f16 || d == ENG_bf16; }
static inline bool dtype_is_low(int d)   { return d == ENG_f16 || d == ENG_bf16; }
static inline bool dtype_is_fp8(int d)   { return d == ENG_e4m3 || d == ENG_e5m2; }
/// Whether d is an integer dtype. bool counts as an integer.
static inline bool dtype_is_integer(int d) { return !dtype_is_float(d) && !dtype_is_fp8(d); }

/// Read and write element `index` in host memory as a double. A store rounds once, from double.
double tensor_load(const void *data, int dtype, int64_t index);
void   tensor_store(void *data, int dtype, int64_t index, double value);
/// Read and write element `index` as an integer. In integer tensors all 64-bit values are exact; a
/// store to another format rounds once.
int64_t tensor_load_int(const void *data, int dtype, int64_t index);
void    tensor_store_int(void *data, int dtype, int64_t index, int64_t value);
