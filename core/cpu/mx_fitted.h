// mx_quantize under the rules whose scales depend on more than the largest element of a block
// (core/base/mx.h): quest. Blocks have one row. A task is a row of x. Included by mx_quantize.c,
// once per instruction set. Owns nothing.
#pragma once

#include "base/mx.h"
#include "rows.h"
#include "tasks.h"

enum { FITTED_MOST = 128 };   // elements of a block, at most

static bool is_fitted(int64_t rule) { return rule == ENG_MX_QUEST; }

/// Writes the codes, or code * unit in bf16, of n elements from element `at` on.
static void put_fitted(const op_call *call, int64_t at, const uint8_t *code, int n, float unit)
{
  void *q = call->out[0]->data;
  if (!(call->mx_quantize.flags & MX_VALUES)) {
    for (int i = 0; i < n; i += 2)
      ((uint8_t *)q)[(at + i) / 2] = (uint8_t)(code[i] | code[i + 1] << 4);
    return;
  }
  static const float number[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6,
                                   -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};
  for (int i = 0; i < n; i++) ((uint16_t *)q)[at + i] = bf16_from_f32(number[code[i]] * unit);
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

static void quantize_fitted(const op_call *call, bool together)
{ run_tasks(row_count(call->in[0]), together, quest_row, call); }
