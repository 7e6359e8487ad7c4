// The operation dequantize: converts FP8 or e5m6 codes and their scales to numbers. Called through
// backend.kernel[]; owns nothing.
#include "simd.h"

#include "base/fp8_layout.h"
#include "device/backend.h"
#include "rows.h"
#include "tasks.h"

typedef struct back { const op_call *call; fp8_scales at; int64_t columns; bool packed; } back;

// Unpacks n e5m6 numbers; n is a multiple of 8. The bits of a number are the top 12 bits of an f16.
static void unpack(float *to, const uint32_t *word, int n)
{
  uint16_t code[TILE];
  for (int i = 0; i < n; i += 8, word += 3) e5m6_unpack(code + i, word);
  for (int i = 0; i < n; i++) code[i] = (uint16_t)(code[i] << 4);
  floats_from(to, code, ENG_f16, 0, n);
}

static void back_task(const void *context, int64_t row)
{
  const back *b = context;
  const tensor *q = b->call->in[0], *y = b->call->out[0];
  const float *scale = b->call->in[1]->data;
  float x[TILE], factors[TILE], *to;
  for (int64_t c = 0; c < b->columns; c += TILE) {
    int n = (int)smaller(TILE, b->columns - c);
    int64_t first = row * b->columns + c;
    for (int i = 0; i < n;) {
      int64_t end = smaller(n, ((c + i) / b->at.inner_block + 1) * b->at.inner_block - c);
      float one = scale[fp8_scale_at(&b->at, row, c + i)];
      for (; i < end; i++) factors[i] = one;
    }
    if (b->packed) unpack(x, (const uint32_t *)q->data + first / 8 * 3, n);
    else fp8_decode(x, (const uint8_t *)q->data + first, q->dtype, n);
    to = tile_target(x, y->data, y->dtype, first);
    for (int i = 0; i < n; i++) to[i] = x[i] * factors[i];
    tile_store(y->data, y->dtype, first, to, n);
  }
}

KERNEL(dequantize)
{
  const tensor *q = call->in[0], *y = call->out[0];
  bool packed = call->dequantize.format == ENG_FORMAT_E5M6;
  if (!dtype_is_fast(y->dtype) || (!packed && !dtype_is_fp8(q->dtype)) || y->count == 0)
    return forward_to_reference(call);
  back b = {.call = call, .columns = y->shape[y->ndim - 1], .packed = packed};
  int64_t rows = y->count / b.columns;
  b.at = fp8_scales_for(call->dequantize.block_rows, call->dequantize.block_columns, rows,
                        b.columns, NULL);
  run_tasks(rows, y->count >= PARALLEL_ELEMENTS, back_task, &b);
  return ENG_OK;
}
