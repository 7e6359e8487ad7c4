// Names of dtypes and operations; reads and writes single elements of every dtype. See dtype.h,
// numerics.h. Linked into device plug-ins as well.
#include "dtype.h"

#include "numerics.h"

static const struct { const char *name; int size; char kind; } dtypes[ENG_DTYPE_COUNT] = {
#define ENG_DTYPE(name, number, bytes, kind) [number] = {#name, bytes, #kind[0]},
#include "dtypes.def"
#undef ENG_DTYPE
};

const char *eng_dtype_name(int dtype)
{
  return dtype >= 0 && dtype < ENG_DTYPE_COUNT ? dtypes[dtype].name : "?";
}

int eng_dtype_size(int dtype)
{
  return dtype >= 0 && dtype < ENG_DTYPE_COUNT ? dtypes[dtype].size : 0;
}

const char *eng_op_name(int op)
{
  static const char *const names[ENG_OP_COUNT] = {
#define ENG_OP(name, ...) #name,
#include "ops.def"
  };
  return op >= 0 && op < ENG_OP_COUNT ? names[op] : NULL;
}

double tensor_load(const void *data, int dtype, int64_t i)
{
  switch (dtype) {
    case ENG_f32:  return ((const float *)data)[i];
    case ENG_f64:  return ((const double *)data)[i];
    case ENG_f16:  return f16_to_f32(((const uint16_t *)data)[i]);
    case ENG_bf16: return bf16_to_f32(((const uint16_t *)data)[i]);
    case ENG_e4m3: return e4m3_to_f32(((const uint8_t *)data)[i]);
    case ENG_e5m2: return e5m2_to_f32(((const uint8_t *)data)[i]);
    default:       return (double)tensor_load_int(data, dtype, i);
  }
}

void tensor_store(void *data, int dtype, int64_t i, double value)
{
  switch (dtype) {
    case ENG_f32:  ((float *)data)[i] = (float)value; break;
    case ENG_f64:  ((double *)data)[i] = value; break;
    case ENG_f16:  ((uint16_t *)data)[i] = f16_from_f64(value); break;
    case ENG_bf16: ((uint16_t *)data)[i] = bf16_from_f64(value); break;
    case ENG_e4m3: ((uint8_t *)data)[i] = e4m3_from_f64(value, 0); break;
    case ENG_e5m2: ((uint8_t *)data)[i] = e5m2_from_f64(value, 0); break;
    case ENG_u8:   ((uint8_t *)data)[i] = (uint8_t)int_of(value, 0, 255); break;
    case ENG_i8:   ((int8_t *)data)[i] = (int8_t)int_of(value, -128, 127); break;
    case ENG_i16:  ((int16_t *)data)[i] = (int16_t)int_of(value, -32768, 32767); break;
    case ENG_i32:  ((int32_t *)data)[i] = (int32_t)int_of(value, -0x1p31, 0x1p31 - 1); break;
    case ENG_i64:  ((int64_t *)data)[i] = int_of(value, -0x1p63, 0x1p63); break;
    case ENG_bool: ((uint8_t *)data)[i] = value != 0; break;   // NaN is true, as in C
  }
}

int64_t tensor_load_int(const void *data, int dtype, int64_t i)
{
  switch (dtype) {
    case ENG_u8:
    case ENG_bool: return ((const uint8_t *)data)[i];
    case ENG_i8:   return ((const int8_t *)data)[i];
    case ENG_i16:  return ((const int16_t *)data)[i];
    case ENG_i32:  return ((const int32_t *)data)[i];
    case ENG_i64:  return ((const int64_t *)data)[i];
    default:       return int_of(tensor_load(data, dtype, i), -0x1p63, 0x1p63);
  }
}

void tensor_store_int(void *data, int dtype, int64_t i, int64_t value)
{
  switch (dtype) {
    case ENG_u8:   ((uint8_t *)data)[i] = (uint8_t)value; break;
    case ENG_i8:   ((int8_t *)data)[i] = (int8_t)value; break;
    case ENG_i16:  ((int16_t *)data)[i] = (int16_t)value; break;
    case ENG_i32:  ((int32_t *)data)[i] = (int32_t)value; break;
    case ENG_i64:  ((int64_t *)data)[i] = value; break;
    case ENG_bool: ((uint8_t *)data)[i] = value != 0; break;
    default:       tensor_store(data, dtype, i, (double)value);
  }
}
