// Names of dtypes and operations; reads and writes single elements of every dtype. See dtype.h,
// numerics.h. Linked into device plug-ins as well. Called by most folders from tensor/ up, and by
// Lua.
#include "element.h"

static const struct { const char *name; int size; char kind; } dtypes[ENG_DTYPE_COUNT] = {
#define ENG_DTYPE(name, number, bytes, kind) [number] = {#name, bytes, #kind[0]},
#include "dtypes.def"
#undef ENG_DTYPE
};

const char *eng_dtype_name(int dtype)
{ return dtype >= 0 && dtype < ENG_DTYPE_COUNT ? dtypes[dtype].name : "?"; }

int eng_dtype_size(int dtype)
{ return dtype >= 0 && dtype < ENG_DTYPE_COUNT ? dtypes[dtype].size : 0; }

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
  if (dtype == ENG_e4m3) return e4m3_to_f32(((const uint8_t *)data)[i]);
  if (dtype == ENG_e5m2) return e5m2_to_f32(((const uint8_t *)data)[i]);
  return element_double(data, dtype, i);
}

void tensor_store(void *data, int dtype, int64_t i, double value)
{
  if (dtype == ENG_e4m3) ((uint8_t *)data)[i] = e4m3_from_f64(value, 0);
  else if (dtype == ENG_e5m2) ((uint8_t *)data)[i] = e5m2_from_f64(value, 0);
  else element_store(data, dtype, i, value);
}

int64_t tensor_load_int(const void *data, int dtype, int64_t i)
{
  return dtype_is_integer(dtype) ? element_whole(data, dtype, i)
                                 : int_of(tensor_load(data, dtype, i), -0x1p63, 0x1p63);
}

void tensor_store_int(void *data, int dtype, int64_t i, int64_t value)
{
  if (dtype_is_integer(dtype)) element_store_int(data, dtype, i, value);
  else tensor_store(data, dtype, i, double_from_int(value, dtype == ENG_f64));
}
