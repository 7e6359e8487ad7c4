// Packs numbers into messages between ranks, and unpacks them. The comm dtype of a message is f32,
// bf16, f16, or e4m3 in blocks with a power-of-two scale each. See comm.h. Called by the other
// files of this folder and by specs and their fake card.
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

wire_run comm_run(void *piece, int comm_dtype, int64_t count, int64_t at)
{
  char *begin = piece;
  wire_run run = {.packed = begin + at * eng_dtype_size(comm_dtype)};
  if (comm_dtype == ENG_e4m3) run.scales = (float *)(begin + count) + at / WIRE_BLOCK;
  return run;
}

eng_status comm_encode(const wire_run *r, int comm_dtype, const void *numbers, int dtype,
                       float *room)
{
  if (comm_dtype != ENG_e4m3) return comm_cast(r->packed, comm_dtype, numbers, dtype, r->n);
  if (dtype != ENG_f32) ENG_TRY(comm_cast(room, ENG_f32, numbers, dtype, r->n));
  wire_e4m3_encode(r->packed, r->scales, dtype == ENG_f32 ? numbers : room, r->n);
  return ENG_OK;
}

eng_status comm_decode(void *to, int dtype, const wire_run *r, int comm_dtype, float *room)
{
  if (comm_dtype != ENG_e4m3) return comm_cast(to, dtype, r->packed, comm_dtype, r->n);
  wire_e4m3_decode(dtype == ENG_f32 ? to : room, r->packed, r->scales, r->n);
  return dtype == ENG_f32 ? ENG_OK : comm_cast(to, dtype, room, ENG_f32, r->n);
}

eng_status comm_pack(uint32_t *flags, const wire_run *r, int comm_dtype, int dtype, float *room)
{
  bool there = r->how & WIRE_RUN_THERE;
  int size = eng_dtype_size(comm_dtype), own = there ? wire_flags(r->numbers, dtype, r->n) : 0;
  if (there) ENG_TRY(comm_encode(r, comm_dtype, r->numbers, dtype, room));
  else {
    memset(room, 0, (size_t)r->n * sizeof *room);
    ENG_TRY(comm_encode(r, comm_dtype, room, ENG_f32, NULL));
  }
  if (r->how & WIRE_RUN_FILL)
    memset((char *)r->packed + r->n * size, 0, (size_t)((comm_padded(r->n) - r->n) * size));
  if (there && dtype_is_low(comm_dtype) && dtype != comm_dtype && !(own & WIRE_INF) &&
      wire_flags(r->packed, comm_dtype, r->n) & WIRE_INF)
    own |= WIRE_OVERFLOW;
  *flags |= (uint32_t)own;
  return ENG_OK;
}

int comm_flags(uint32_t of_runs)
{ return (int)(of_runs & WIRE_INF ? of_runs & ~(uint32_t)WIRE_OVERFLOW : of_runs); }

/// Adds n numbers in `dtype` to the n numbers at `to`. Adds in f32 and rounds the sums to `dtype`.
static eng_status add(void *to, const void *numbers, int dtype, int64_t n)
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

eng_status comm_unpack(const wire_run *r, int comm_dtype, int dtype, float *room)
{
  if (!(r->how & WIRE_RUN_ADD)) return comm_decode(r->numbers, dtype, r, comm_dtype, room);
  ENG_TRY(comm_decode(room + r->n, dtype, r, comm_dtype, room));
  return add(r->numbers, room + r->n, dtype, r->n);
}

eng_status comm_sum(void *out, const float **terms, int n, int64_t count, int comm_dtype,
                    float share, float *room)
{
  for (int k = 0; k < n && comm_dtype != ENG_f32; k++) {
    wire_run term = comm_run((void *)terms[k], comm_dtype, count, 0);
    term.n = count;
    terms[k] = room + count * k;
    ENG_TRY(comm_decode(room + count * k, ENG_f32, &term, comm_dtype, NULL));
  }
  wire_sum(room, terms, n, count, share);
  wire_run sum = comm_run(out, comm_dtype, count, 0);
  sum.n = count;
  return comm_encode(&sum, comm_dtype, room, ENG_f32, NULL);
}

eng_status eng_comm_dtype_round(float *x, int64_t n, int comm_dtype)
{
  FAIL_IF(comm_dtype <= ENG_COMM_OWN || comm_dtype >= ENG_COMM_DTYPES, ENG_ERR_VALUE,
          "rounding as in a message: expected a comm dtype from 1 to 4 (ENG_COMM_*), got %d",
          comm_dtype);
  int dtype = comm_dtype_of(comm_dtype, ENG_f32);
  int64_t count = comm_padded(n);
  FREED char *piece = malloc((size_t)comm_packed_bytes(dtype, count) + 1);
  FAIL_IF(!piece, ENG_ERR_MEMORY, "rounding as in a message: out of memory for %lld numbers",
          (long long)n);
  wire_run run = comm_run(piece, dtype, count, 0);
  run.n = n;
  ENG_TRY(comm_encode(&run, dtype, x, ENG_f32, NULL));
  return comm_decode(x, ENG_f32, &run, dtype, NULL);
}
