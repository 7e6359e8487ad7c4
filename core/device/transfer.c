// Transfers between host memory and tensors in any memory. Values are converted on the host. See
// transfer.h.
#include "transfer.h"

#include "backend.h"
#include "base/error.h"

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
{
  return move(space, to, from, bytes, COPY_INSIDE);
}

eng_status transfer_to_host(void *to, int space, const void *from, int64_t bytes)
{
  return move(space, to, from, bytes, COPY_TO_HOST);
}

eng_status transfer_from_host(int space, void *to, const void *from, int64_t bytes)
{
  return move(space, to, from, bytes, COPY_TO_DEVICE);
}

static int64_t bytes_of(const tensor *x)
{
  return x->count * eng_dtype_size(x->dtype);
}

eng_status transfer_clear(const tensor *x)
{
  return transfer_zero(x->store->space, x->data, bytes_of(x));
}

eng_status transfer_set(const tensor *x, double value)
{
  if (x->store->space == SPACE_HOST) {
    tensor_store(x->data, x->dtype, 0, value);
    return ENG_OK;
  }
  char cell[8] = {0};
  tensor_store(cell, x->dtype, 0, value);
  return transfer_from_host(x->store->space, x->data, cell, eng_dtype_size(x->dtype));
}

// ---- elements on the host

/// Converts elements between a row-major buffer and a tensor of any strides, both in host memory.
static void convert(void *buffer, int format, const tensor *x, bool into_tensor)
{
  bool exact_ints = dtype_is_integer(format) && dtype_is_integer(x->dtype);
  if (format == x->dtype && tensor_contiguous(x)) {
    size_t bytes = (size_t)bytes_of(x);
    if (bytes == 0) return;
    if (into_tensor) memcpy(x->data, buffer, bytes);
    else memcpy(buffer, x->data, bytes);
    return;
  }
  int64_t index[ENG_MAX_DIMS] = {0}, at = 0;
  for (int64_t i = 0; i < x->count; i++) {
    if (into_tensor && exact_ints)
      tensor_store_int(x->data, x->dtype, at, tensor_load_int(buffer, format, i));
    else if (into_tensor) tensor_store(x->data, x->dtype, at, tensor_load(buffer, format, i));
    else if (exact_ints)
      tensor_store_int(buffer, format, i, tensor_load_int(x->data, x->dtype, at));
    else tensor_store(buffer, format, i, tensor_load(x->data, x->dtype, at));
    for (int d = x->ndim - 1; d >= 0; d--) {
      at += x->stride[d];
      if (++index[d] < x->shape[d]) break;
      at -= x->stride[d] * x->shape[d];
      index[d] = 0;
    }
  }
}

// ---- elements on a device

/// A row-major tensor of x's shape over the given memory.
static tensor rows_over(const tensor *x, storage *store, void *memory)
{
  tensor y = {.data = memory,
              .count = x->count,
              .ndim = x->ndim,
              .dtype = x->dtype,
              .store = store,
              .live = true,
              .node = -1};
  for (int64_t d = x->ndim - 1, stride = 1; d >= 0; stride *= x->shape[d], d--) {
    y.shape[d] = x->shape[d];
    y.stride[d] = stride;
  }
  return y;
}

/// Copies between tensors of one shape in one device's memory; any strides.
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
  storage nobody = {
    .memory = to, .bytes = bytes_of(x), .references = 1, .arena = -1, .space = x->store->space};
  tensor y = rows_over(x, &nobody, to);
  return copy_strided(&y, x);
}

/// Reads or writes through host memory: rows are copied in x's dtype and converted here.
static eng_status through_host(void *buffer, int format, const tensor *x, bool into_tensor)
{
  int space = x->store->space;
  int64_t bytes = bytes_of(x);
  bool converts = format != x->dtype, gathers = !tensor_contiguous(x);
  void *rows = converts ? malloc((size_t)bytes) : buffer;
  void *piece = gathers ? arena_alloc_in(space, ARENA_SCRATCH, bytes) : x->data;
  eng_status status = ENG_OK;
  if (!rows)
    status = error_set(ENG_ERR_MEMORY, "out of memory for a host copy of %s", tensor_text(x));
  else if (!piece) status = ENG_ERR_MEMORY;
  storage nobody = {.references = 1, .arena = -1, .space = SPACE_HOST};
  tensor host = rows_over(x, &nobody, rows);
  if (status == ENG_OK && into_tensor) {
    if (converts) convert(buffer, format, &host, true);
    status = transfer_from_host(space, piece, rows, bytes);
    if (status == ENG_OK && gathers) {
      storage there = {
        .memory = piece, .bytes = bytes, .references = 1, .arena = -1, .space = space};
      tensor y = rows_over(x, &there, piece);
      status = copy_strided(x, &y);
    }
  } else if (status == ENG_OK) {
    if (gathers) status = transfer_rows(piece, x);
    if (status == ENG_OK) status = transfer_to_host(rows, space, piece, bytes);
    if (status == ENG_OK && converts) convert(buffer, format, &host, false);
  }
  if (gathers) arena_free_in(space, ARENA_SCRATCH, piece, bytes);
  if (converts) free(rows);
  return status;
}

eng_status transfer_read(void *buffer, int format, const tensor *x)
{
  if (x->count == 0) return ENG_OK;
  if (x->store->space != SPACE_HOST) return through_host(buffer, format, x, false);
  convert(buffer, format, x, false);
  return ENG_OK;
}

eng_status transfer_write(const tensor *x, const void *buffer, int format)
{
  if (x->count == 0) return ENG_OK;
  if (x->store->space != SPACE_HOST) return through_host((void *)buffer, format, x, true);
  convert((void *)buffer, format, x, true);
  return ENG_OK;
}
