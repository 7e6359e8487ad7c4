// Transfers between host memory and tensors in any memory. Values are converted on the host. See
// transfer.h. Called by autograd/, params/, fp8/, dist/ and store/.
#include "transfer.h"

#include "backend.h"
#include "base/error.h"
#include "tensor/scratch.h"

#include <stdlib.h>
#include <string.h>

// ---- bytes

eng_status transfer_zero(int space, void *memory, int64_t bytes)
{
  if (bytes <= 0) return ENG_OK;
  if (space != SPACE_HOST) return backend_of_space(space)->clear(memory, bytes);
  memset(memory, 0, (size_t)bytes);
  return ENG_OK;
}

static eng_status move(int space, void *to, const void *from, int64_t bytes,
                       copy_direction direction)
{
  if (bytes <= 0) return ENG_OK;
  if (space != SPACE_HOST) return backend_of_space(space)->move(to, from, bytes, direction);
  memcpy(to, from, (size_t)bytes);
  return ENG_OK;
}

eng_status transfer_inside(int space, void *to, const void *from, int64_t bytes)
{ return move(space, to, from, bytes, COPY_INSIDE); }

eng_status transfer_to_host(void *to, int space, const void *from, int64_t bytes)
{ return move(space, to, from, bytes, COPY_TO_HOST); }

eng_status transfer_from_host(int space, void *to, const void *from, int64_t bytes)
{ return move(space, to, from, bytes, COPY_TO_DEVICE); }

static int64_t bytes_of(const tensor *x) { return x->count * eng_dtype_size(x->dtype); }

eng_status transfer_clear(const tensor *x)
{ return transfer_zero(x->store->space, x->data, bytes_of(x)); }

eng_status transfer_set(const tensor *x, double value)
{
  char cell[8];
  tensor_store(cell, x->dtype, 0, value);
  return transfer_from_host(x->store->space, x->data, cell, eng_dtype_size(x->dtype));
}

// ---- elements on the host

/// Copies elements between a row-major buffer and a tensor of any strides, both in host memory.
/// Converts unless the dtypes are the same.
static void convert(void *buffer, int format, const tensor *x, bool into_tensor)
{
  char *to = into_tensor ? x->data : buffer;
  const char *from = into_tensor ? buffer : x->data;
  const int to_dtype = into_tensor ? x->dtype : format,
            from_dtype = into_tensor ? format : x->dtype;
  const bool same = format == x->dtype, integers = dtype_is_integer(from_dtype);
  const int64_t size = eng_dtype_size(x->dtype);
  if (same && tensor_contiguous(x)) {
    memcpy(to, from, (size_t)bytes_of(x));
    return;
  }
  int64_t index[ENG_MAX_DIMS] = {0}, place = 0;
  for (int64_t i = 0; i < x->count; i++) {
    const int64_t a = into_tensor ? place : i, b = into_tensor ? i : place;
    if (same) memcpy(to + a * size, from + b * size, (size_t)size);
    else if (integers) tensor_store_int(to, to_dtype, a, tensor_load_int(from, from_dtype, b));
    else tensor_store(to, to_dtype, a, tensor_load(from, from_dtype, b));
    for (int d = x->ndim - 1; d >= 0; d--) {
      place += x->stride[d];
      if (++index[d] < x->shape[d]) break;
      place -= x->stride[d] * x->shape[d];
      index[d] = 0;
    }
  }
}

// ---- elements on a device

/// Returns a row-major tensor that has x's shape and whose data is `memory`.
static tensor rows_over(const tensor *x, void *memory)
{
  tensor y = *x;
  y.data = memory;
  for (int64_t d = x->ndim - 1, stride = 1; d >= 0; stride *= x->shape[d], d--)
    y.stride[d] = stride;
  return y;
}

/// Copies between two tensors of the same shape in the same device's memory. They may have any
/// strides.
static eng_status copy_strided(const tensor *to, const tensor *from)
{
  op_call call = {.op = ENG_OP_cast, .n_in = 1, .n_out = 1, .in = {(tensor *)from},
                  .out = {(tensor *)to}, .cast = {.dtype = to->dtype}};
  return backend_of_space(from->store->space)->kernel[ENG_OP_cast](&call);
}

eng_status transfer_rows(void *to, const tensor *x)
{
  if (x->count == 0) return ENG_OK;
  if (tensor_contiguous(x)) return transfer_inside(x->store->space, to, x->data, bytes_of(x));
  if (x->store->space == SPACE_HOST) {
    convert(to, x->dtype, x, false);
    return ENG_OK;
  }
  tensor y = rows_over(x, to);
  return copy_strided(&y, x);
}

/// Reads or writes a tensor. If it is in a device's memory, the elements pass between device and
/// host in x's dtype and in row-major order, and are converted on the host.
static eng_status transfer(void *buffer, int format, const tensor *x, bool into_tensor)
{
  int space = x->store->space;
  int64_t bytes = bytes_of(x);
  if (bytes == 0) return ENG_OK;
  if (space == SPACE_HOST) {
    convert(buffer, format, x, into_tensor);
    return ENG_OK;
  }
  bool converts = format != x->dtype, gathers = !tensor_contiguous(x);
  FREED void *converted = converts ? malloc((size_t)bytes) : NULL;
  FAIL_IF(converts && !converted, ENG_ERR_MEMORY,
          "out of memory for a host copy of %s", tensor_text(x));
  AT_END(scratch_free) scratch_piece gathered = {0};
  if (gathers) gathered = scratch_alloc(space, bytes);
  if (gathers && !gathered.memory) return ENG_ERR_MEMORY;
  void *rows = converts ? converted : buffer, *piece = gathers ? gathered.memory : x->data;
  tensor host = rows_over(x, rows), inside = rows_over(x, piece);
  if (into_tensor) {
    if (converts) convert(buffer, format, &host, true);
    ENG_TRY(transfer_from_host(space, piece, rows, bytes));
    return gathers ? copy_strided(x, &inside) : ENG_OK;
  }
  if (gathers) ENG_TRY(transfer_rows(piece, x));
  ENG_TRY(transfer_to_host(rows, space, piece, bytes));
  if (converts) convert(buffer, format, &host, false);
  return ENG_OK;
}

eng_status transfer_read(void *buffer, int format, const tensor *x)
{ return transfer(buffer, format, x, false); }

eng_status transfer_write(const tensor *x, const void *buffer, int format)
{ return transfer((void *)buffer, format, x, true); }
