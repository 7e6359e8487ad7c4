// Packs numbers into messages between ranks, and unpacks them. The comm dtype of a message is f32,
// bf16, f16, or e4m3 in blocks with a power-of-two scale each. See comm.h. Called by the other
// files of this folder and by the fake card of the specs.
#include "comm.h"

#include "device/backend.h"
#include "base/error.h"
#include "device/wire.h"

#include <stdlib.h>
#include <string.h>

int comm_dtype_of(int comm_dtype, int own)
{
  static const int32_t of[] = {[ENG_COMM_F32] = ENG_f32,
                               [ENG_COMM_BF16] = ENG_bf16,
                               [ENG_COMM_F16] = ENG_f16,
                               [ENG_COMM_FP8] = ENG_e4m3};
  return comm_dtype == ENG_COMM_OWN ? own : of[comm_dtype];
}

int64_t comm_padded(int64_t count) { return (count + WIRE_BLOCK - 1) / WIRE_BLOCK * WIRE_BLOCK; }

int64_t comm_packed_bytes(int comm_dtype, int64_t count)
{
  if (comm_dtype != ENG_e4m3) return count * eng_dtype_size(comm_dtype);
  return count + (count + WIRE_BLOCK - 1) / WIRE_BLOCK * (int64_t)sizeof(float);
}

eng_status comm_cast(void *to, int to_dtype, const void *from, int from_dtype, int64_t n)
{
  if (n == 0) return ENG_OK;
  if (to_dtype == from_dtype) {
    memcpy(to, from, (size_t)(n * eng_dtype_size(to_dtype)));
    return ENG_OK;
  }
  storage a = {.memory = (void *)from, .references = 1, .arena = -1, .space = SPACE_HOST},
          b = {.memory = to, .references = 1, .arena = -1, .space = SPACE_HOST};
  tensor x = {.data = (void *)from, .count = n, .ndim = 1, .shape = {n}, .stride = {1},
              .dtype = from_dtype, .store = &a, .live = true, .node = -1},
         y = x;
  y.data = to, y.dtype = to_dtype, y.store = &b;
  op_call call = {.op = ENG_OP_cast, .n_in = 1, .n_out = 1, .in = {&x}, .out = {&y},
                  .cast = {.dtype = to_dtype}};
  return backend_cpu()->kernel[ENG_OP_cast](&call);
}

eng_status comm_pack(char *piece, int comm_dtype, int64_t count, int64_t at, const void *from,
                     int dtype, int64_t n, float *room)
{
  if (comm_dtype != ENG_e4m3)
    return comm_cast(piece + at * eng_dtype_size(comm_dtype), comm_dtype, from, dtype, n);
  if (dtype != ENG_f32) {
    ENG_TRY(comm_cast(room, ENG_f32, from, dtype, n));
    from = room;
  }
  wire_e4m3_encode((uint8_t *)piece + at, (float *)(piece + count) + at / WIRE_BLOCK, from, n);
  return ENG_OK;
}

eng_status comm_unpack(void *to, int dtype, int64_t n, const char *piece, int comm_dtype,
                       int64_t count, int64_t at, float *room)
{
  if (comm_dtype != ENG_e4m3)
    return comm_cast(to, dtype, piece + at * eng_dtype_size(comm_dtype), comm_dtype, n);
  wire_e4m3_decode(dtype == ENG_f32 ? to : room, (const uint8_t *)piece + at,
                   (const float *)(piece + count) + at / WIRE_BLOCK, n);
  return dtype == ENG_f32 ? ENG_OK : comm_cast(to, dtype, room, ENG_f32, n);
}

eng_status comm_add(void *to, const void *numbers, int dtype, int64_t n)
{
  enum { SOME = 1024 };
  float term[SOME], sum[SOME];
  int64_t size = eng_dtype_size(dtype);
  for (int64_t done = 0; done < n; done += SOME) {
    int64_t some = n - done < SOME ? n - done : SOME;
    char *at = (char *)to + done * size;
    ENG_TRY(comm_cast(term, ENG_f32, (const char *)numbers + done * size, dtype, some));
    ENG_TRY(comm_cast(sum, ENG_f32, at, dtype, some));
    for (int64_t i = 0; i < some; i++) sum[i] += term[i];
    ENG_TRY(comm_cast(at, dtype, sum, ENG_f32, some));
  }
  return ENG_OK;
}

eng_status eng_comm_dtype_round(float *x, int64_t n, int comm_dtype)
{
  FAIL_IF(comm_dtype <= ENG_COMM_OWN || comm_dtype >= ENG_COMM_DTYPES, ENG_ERR_VALUE,
          "rounding as in a message: expected a comm dtype from 1 to 4 (ENG_COMM_*), got %d",
          comm_dtype);
  int dtype = comm_dtype_of(comm_dtype, ENG_f32);
  int64_t count = comm_padded(n);
  FREED char *piece = malloc((size_t)comm_packed_bytes(dtype, count) + 1);
  FAIL_IF(!piece, ENG_ERR_MEMORY, "out of memory for %lld numbers", (long long)n);
  ENG_TRY(comm_pack(piece, dtype, count, 0, x, ENG_f32, n, NULL));
  return comm_unpack(x, ENG_f32, n, piece, dtype, count, 0, NULL);
}
