// Reference kernels for nf4_quantize and nf4_dequantize. They work element by element, with a
// linear search for the nearest number. The fast kernels must agree with them bit for bit. See
// reference.h, core/base/nf4.h. Called through reference.c.
#include "reference.h"

#include "base/nf4.h"

#include <math.h>

// Returns the index of the number nearest to x among n ascending numbers. Of two equally near
// numbers, takes the first. The midpoint between two numbers is computed in f32.
static uint8_t nearest(float x, const float *number, int n)
{
  int k = 0;
  while (k < n - 1 && !(x <= (number[k] + number[k + 1]) / 2)) k++;
  return (uint8_t)k;
}

static float at(const tensor *x, int64_t i) { return (float)load_at(x, i); }

static void quantize_absmaxes(const op_call *call)
{
  const float *absmax = call->out[1]->data;
  uint8_t *code = call->out[2]->data;
  float *group = call->out[3]->data, *offset = call->out[4]->data, map[NF4_GROUP];
  int64_t n = call->out[1]->count;
  double sum = 0;
  nf4_map(map);
  for (int64_t j = 0; j < n; j++) sum += absmax[j];
  *offset = call->in[1] ? at(call->in[1], 0) : n ? (float)(sum / (double)n) : 0;
  for (int64_t j = 0; j < n; j++) {
    int64_t from = j - j % NF4_GROUP, end = from + NF4_GROUP < n ? from + NF4_GROUP : n;
    float top = 0;
    for (int64_t i = from; i < end; i++) top = fmaxf(top, fabsf(absmax[i] - *offset));
    group[j / NF4_GROUP] = top;
    float x = (absmax[j] - *offset) * (1 / top);
    code[j] = top == 0 ? 0 : nearest(nf4_bin_number(nf4_bin(x)), map, NF4_GROUP);
  }
}

eng_status reference_nf4_quantize(const op_call *call)
{
  const tensor *x = call->in[0];
  int64_t size = call->nf4_quantize.block;
  uint8_t *q = call->out[0]->data;
  float *absmax = call->out[1]->data;
  for (int64_t i = 0; i < x->count; i++) {
    int64_t from = i - i % size, end = from + size < x->count ? from + size : x->count;
    float top = 0;
    for (int64_t k = from; k < end; k++) top = !(fabsf(at(x, k)) <= top) ? fabsf(at(x, k)) : top;
    for (int64_t k = from; k < end; k++) top = at(x, k) == at(x, k) ? top : NAN;
    float divisor = nf4_divisor(top), v = at(x, i) * (1 / divisor);
    if (end - from < size) {
      v = at(x, i) / divisor;
      top = divisor;
    }
    absmax[i / size] = top;
    uint8_t code = nearest(nf4_within_one(v), nf4_number, 16);
    q[i / 2] = i % 2 ? (uint8_t)((q[i / 2] & 0xF0) | code) : (uint8_t)(code << 4 | 7);
  }
  if (call->nf4_quantize.nested) quantize_absmaxes(call);
  return ENG_OK;
}

eng_status reference_nf4_dequantize(const op_call *call)
{
  const tensor *y = call->out[0];
  const uint8_t *q = call->in[0]->data;
  float map[NF4_GROUP];
  nf4_map(map);
  for (int64_t i = 0; i < y->count; i++) {
    int64_t j = i / call->nf4_dequantize.block;
    float absmax = at(call->in[1], j);
    if (call->in[2])
      absmax = map[(int)absmax] * at(call->in[2], j / NF4_GROUP) + at(call->in[3], 0);
    store_at(y, i, nf4_number[q[i / 2] >> (i % 2 ? 0 : 4) & 15] * absmax);
  }
  return ENG_OK;
}
