// The operations nf4_quantize and nf4_dequantize. Called through backend.kernel[]; owns nothing but
// scratch during a call. A task takes CHUNK blocks. With double quantization, a single thread then
// quantizes the absmaxes of all blocks. f64 goes to the reference kernels.
#include "base/nf4.h"
#include "magnitude.h"
#include "rows.h"
#include "simd.h"
#include "tasks.h"

enum { CHUNK = 16, MOST = 4096 };   // MOST: the most elements of a block

typedef struct blocks {
  const tensor *x;          // the input of nf4_quantize or the output of nf4_dequantize
  int64_t  size;
  uint8_t *q;
  float   *absmax;
} blocks;

VF_INLINE void encode(uint8_t *code, const float *x, int n, float factor, float divisor,
                      const float *bound)
{
  for (int i = 0; i < n; i++) {
    float v = nf4_within_one(divisor != 0 ? x[i] / divisor : x[i] * factor);
    int c = 0;
    for (int k = 0; k < 15; k++) c += !(v <= bound[k]);
    code[i] = (uint8_t)c;
  }
}

static void quantize_task(const void *context, int64_t t)
{
  const blocks *b = context;
  float buffer[MOST], bound[15];
  uint8_t code[MOST + 1];
  for (int k = 0; k < 15; k++) bound[k] = (nf4_number[k] + nf4_number[k + 1]) / 2;
  for (int64_t j = t * CHUNK; j < (t + 1) * CHUNK && j * b->size < b->x->count; j++) {
    int64_t from = j * b->size;
    int n = (int)smaller(b->size, b->x->count - from);
    const float *x = tile_load(buffer, b->x->data, b->x->dtype, from, n);
    float absmax = f32_from(largest_of_floats(x, n)), divisor = nf4_divisor(absmax);
    if (n == b->size) encode(code, x, n, 1.0f / divisor, 0, bound);
    else encode(code, x, n, 0, absmax = divisor, bound);
    b->absmax[j] = absmax;
    code[n] = 7;
    for (int i = 0; i < n; i += 2) b->q[(from + i) / 2] = (uint8_t)(code[i] << 4 | code[i + 1]);
  }
}

// Quantizes n absmaxes: writes their codes, the scale of each group, and the offset.
static eng_status quantize_absmaxes(const op_call *call, const float *absmax, int64_t n)
{
  uint8_t *code = call->out[2]->data;
  float *group = call->out[3]->data, *offset = call->out[4]->data, map[NF4_GROUP];
  SCRATCH(uint8_t, nearest, 1 << 16);
  nf4_map(map);
  for (int bin = 0, k = 0; bin < 1 << 16; bin++) {
    while (k < 255 && 0.5f * (map[k] + map[k + 1]) < nf4_bin_number(bin)) k++;
    nearest[bin] = (uint8_t)k;
  }
  if (call->in[1]) {
    *offset = ((const float *)call->in[1]->data)[0];
  } else {
    double sum = 0;
    for (int64_t j = 0; j < n; j++) sum += absmax[j];
    *offset = (float)(n ? sum / (double)n : 0);
  }
  for (int64_t from = 0; from < n; from += NF4_GROUP) {
    int64_t end = smaller(n, from + NF4_GROUP);
    float top = 0;
    for (int64_t j = from; j < end; j++) {
      float size = f32_from(f32_bits(absmax[j] - *offset) & 0x7FFFFFFFu);
      top = size > top ? size : top;
    }
    group[from / NF4_GROUP] = top;
    for (int64_t j = from; j < end; j++)
      code[j] = top == 0 ? 0 : nearest[nf4_bin((absmax[j] - *offset) * (1.0f / top))];
  }
  return ENG_OK;
}

KERNEL(nf4_quantize)
{
  blocks b = {.x = call->in[0], .size = call->nf4_quantize.block, .q = call->out[0]->data,
              .absmax = call->out[1]->data};
  if (!dtype_is_fast(b.x->dtype)) return forward_to_reference(call);
  int64_t n = call->out[1]->count;
  run_tasks((n + CHUNK - 1) / CHUNK, b.x->count >= PARALLEL_ELEMENTS, quantize_task, &b);
  return call->nf4_quantize.nested ? quantize_absmaxes(call, b.absmax, n) : ENG_OK;
}

static void dequantize_task(const void *context, int64_t t)
{
  const blocks *b = context;
  float buffer[MOST];
  for (int64_t j = t * CHUNK; j < (t + 1) * CHUNK && j * b->size < b->x->count; j++) {
    int64_t from = j * b->size;
    int n = (int)smaller(b->size, b->x->count - from);
    for (int i = 0; i < n; i++)
      buffer[i] = nf4_number[b->q[(from + i) / 2] >> (i % 2 ? 0 : 4) & 15] * b->absmax[j];
    floats_to(b->x->data, b->x->dtype, from, buffer, n);
  }
}

KERNEL(nf4_dequantize)
{
  const tensor *scale = call->in[1];
  blocks b = {.x = call->out[0], .size = call->nf4_dequantize.block, .q = call->in[0]->data,
              .absmax = scale->data};
  if (!dtype_is_fast(b.x->dtype) || b.x->count == 0) return forward_to_reference(call);
  SCRATCH(float, absmax, call->in[2] ? scale->count : 0);
  if (call->in[2]) {
    const float *group = call->in[2]->data, *offset = call->in[3]->data;
    const uint8_t *code = scale->data;
    float map[NF4_GROUP];
    nf4_map(map);
    for (int64_t j = 0; j < scale->count; j++)
      absmax[j] = map[code[j]] * group[j / NF4_GROUP] + *offset;
    b.absmax = absmax;
  }
  run_tasks((scale->count + CHUNK - 1) / CHUNK, b.x->count >= PARALLEL_ELEMENTS, dequantize_task,
            &b);
  return ENG_OK;
}
