// mx_quantize under the rules quest and ms_eden (core/base/mx.h). Blocks have one row. A task takes
// one row of x. Included by mx_quantize.c, once per instruction set. Owns nothing.
#pragma once

#include "base/mx.h"
#include "base/rng.h"
#include "magnitude.h"
#include "rows.h"
#include "tasks.h"

enum { FITTED_MOST = 128 };   // the most elements of a block

static const float e2m1_number[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6,
                                      -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};

/// Returns the ue4m3 code of `scale`, the scale of a block. Rounds stochastically if sr_bits is not
/// 0, else to nearest even. `block` is the block's number, from 0 on, in the whole tensor.
static uint8_t eden_scale(float scale, int sr_bits, uint64_t counter, int64_t block)
{
  uint32_t word[4];
  if (!sr_bits) return e4m3_from_f32(scale, FP8_SATURATE);
  philox_block(word, counter + (uint64_t)block / 4);
  return mx_code_stochastic(scale, mx_uniform(word[block % 4], sr_bits), mx_format_of(ENG_e4m3));
}

/// Writes n codes to elements [at, at + n) of output 0. With MX_VALUES, writes bf16 numbers
/// instead: the value of each code times `unit`.
static void put_fitted(const op_call *call, int64_t at, const uint8_t *code, int n, float unit)
{
  void *q = call->out[0]->data;
  if (!(call->mx_quantize.flags & MX_VALUES)) {
    for (int i = 0; i < n; i += 2)
      ((uint8_t *)q)[(at + i) / 2] = (uint8_t)(code[i] | code[i + 1] << 4);
    return;
  }
  for (int i = 0; i < n; i++) ((uint16_t *)q)[at + i] = bf16_from_f32(e2m1_number[code[i]] * unit);
}

static void quest_row(const void *context, int64_t row)
{
  const op_call *call = context;
  const tensor *x = call->in[0];
  int64_t columns = row_length(x), wide = call->mx_quantize.block_columns,
          across = ceiling(columns, wide);
  uint8_t *scale = (uint8_t *)call->out[1]->data + row * across;
  uint16_t *gate = call->out[7] ? call->out[7]->data : NULL;
  for (int64_t j = 0; j < across; j++) {
    float v[FITTED_MOST];
    uint8_t code[FITTED_MOST];
    int64_t at = row * columns + j * wide;
    int n = (int)smaller(wide, columns - j * wide);
    floats_from(v, x->data, x->dtype, at, n);
    double sum = 0, squares = 0;
    for (int i = 0; i < n; i++) sum += v[i], squares += (double)v[i] * v[i];
    scale[j] = quest_scale(sum, squares, n);
    float factor = mx_inverse(scale[j]);
    for (int i = 0; i < n; i++) code[i] = e2m1_code_down(v[i] * factor);
    for (int i = 0; gate && i < n; i++)
      gate[at + i] = quest_gate(v[i] * factor) ? 0x3F80 : 0;   // 1 and 0 in bf16
    put_fitted(call, at, code, n, ue8m0_to_f32(scale[j]));
  }
}

/// Writes a block's codes and returns the value of its scale. eden_row corrects this scale later.
/// Adds the block's terms to *squares and *product, the sums of its group. `encode` is NVFP4's S
/// (base/mx.h).
static float eden_block(const float *x, int n, float encode, uint8_t *code, double *squares,
                        double *product)
{
  uint32_t top = largest_magnitude(x, ENG_f32, 0, n);
  uint8_t scale = nvfp4_scale(f32_from(top), encode, ENG_MX_MS_EDEN, 1);
  if (!scale) scale = 0x38;   // 1 in e4m3
  float factor = nvfp4_factor(scale, encode);
  for (int i = 0; i < n; i++) {
    float y = x[i] * factor;
    code[i] = mx_code(y, mx_format_of(ENG_FORMAT_E2M1));
    *squares += (double)y * y;
    *product += (double)y * e2m1_number[code[i]];
  }
  return e4m3_to_f32(scale);
}

static void eden_row(const void *context, int64_t row)
{
  const op_call *call = context;
  const typeof(call->mx_quantize) *a = &call->mx_quantize;
  const tensor *x = call->in[0];
  int64_t columns = row_length(x), wide = a->block_columns, block = row * ceiling(columns, wide);
  float encode = nvfp4_encode_scale(((const float *)call->out[2]->data)[0], a->rule);
  for (int64_t c0 = 0; c0 < columns; c0 += MX_EDEN_GROUP) {
    float v[MX_EDEN_GROUP], scale[MX_EDEN_GROUP];
    uint8_t code[MX_EDEN_GROUP];
    int n = (int)smaller(MX_EDEN_GROUP, columns - c0);
    double squares = 0, product = 0;
    floats_from(v, x->data, x->dtype, row * columns + c0, n);
    for (int c = 0, j = 0; c < n; c += (int)wide, j++)
      scale[j] = eden_block(v + c, (int)smaller(wide, n - c), encode, code + c, &squares, &product);
    float correction = product == 0 ? 1 : (float)(squares / product);
    for (int c = 0, j = 0; c < n; c += (int)wide, j++, block++) {
      uint8_t rounded = eden_scale(scale[j] * correction, (int)a->sr_bits, (uint64_t)a->counter,
                                   block);
      ((uint8_t *)call->out[1]->data)[block] = rounded;
      put_fitted(call, row * columns + c0 + c, code + c, (int)smaller(wide, n - c),
                 e4m3_to_f32(rounded));
    }
  }
}

/// Quantizes all of x. Output 2 already holds the tensor's amax.
static void quantize_fitted(const op_call *call, bool together)
{
  run_tasks(row_count(call->in[0]), together,
            call->mx_quantize.rule == ENG_MX_QUEST ? quest_row : eden_row, call);
}
