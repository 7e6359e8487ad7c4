// Reference kernels for FP8: quantize, swiglu_quantize, dequantize and fp8_matmul. They work
// element by element with the scalar formulas of core/base/fp8*.h. The fast kernels must agree with
// them bit for bit, except for the payloads of NaNs in f32, f16 and bf16. See reference.h, ops.def.
// Called through reference.c.
#include "reference_side.h"

#include "base/fp8_hopper.h"
#include "base/fp8_layout.h"
#include "base/fp8_scale.h"
#include "base/rng.h"

#include <string.h>

// ------------------------------------------------------------------ quantize

static fp8_scale scale_of_block(const op_call *call, float amax)
{
  int rule = (int)call->quantize.rule;
  if (call->in[1]) {
    float factor = ((const float *)call->in[1]->data)[0];
    return (fp8_scale){factor, 1.0f / factor};
  }
  return fp8_scale_of(amax, fp8_largest(call->quantize.format), rule,
                      (call->quantize.flags & QUANTIZE_POW2) != 0,
                      fp8_eps(rule, call->quantize.eps), (int)call->quantize.margin,
                      fp8_limit(call->quantize.block_rows, call->quantize.block_columns,
                                call->in[0]->dtype));
}

static uint32_t random_of(const side *s, int64_t element)
{
  uint32_t word[4];
  if (!(s->call->quantize.flags & QUANTIZE_STOCHASTIC)) return 0;
  philox_block(word, s->random + (uint64_t)(element / 4));
  return word[element % 4];
}

static void quantize_side(const side *s)
{
  const op_call *call = s->call;
  fp8_scales at = fp8_scales_for(call->quantize.block_rows, call->quantize.block_columns, s->rows,
                                 s->columns, NULL);
  bool divides = fp8_divides((int)call->quantize.rule) && !call->in[1],
       packed = call->quantize.format == ENG_FORMAT_E5M6;
  int mode = FP8_SATURATE | (call->quantize.flags & QUANTIZE_STOCHASTIC ? FP8_STOCHASTIC : 0),
      fraction = call->quantize.format == ENG_e4m3 ? 3 : 2;
  memset(s->scale->data, 0, (size_t)s->scale->count * sizeof(float));   // padding stays 0
  for (int64_t i = 0; i < at.row_count; i++)
    for (int64_t j = 0; j < at.inner_count; j++) {
      int64_t r0 = i * at.row_block, c0 = j * at.inner_block;
      int64_t rows = s->rows - r0 < at.row_block ? s->rows - r0 : at.row_block;
      int64_t columns = s->columns - c0 < at.inner_block ? s->columns - c0 : at.inner_block;
      fp8_scale scale = scale_of_block(
        call, block_amax(s, r0, rows, c0, columns, call->quantize.rule == ENG_SCALE_TORCHAO));
      ((float *)s->scale->data)[i * at.row_stride + j * at.inner_stride] = scale.scale;
      for (int64_t r = r0; r < r0 + rows; r++)
        for (int64_t c = c0; c < c0 + columns; c++) {
          float x = x_at(s, r, c), y = divides ? x / scale.factor : x * scale.factor;
          int64_t element = r * s->columns + c;
          // Eight 12-bit codes fill three words. Unpacks the codes already in these words, and
          // packs them again with the new code.
          if (packed) {
            uint32_t *word = (uint32_t *)s->q->data + element / 8 * 3;
            uint16_t code[8] = {0};
            if (c % 8) e5m6_unpack(code, word);
            code[c % 8] = e5m6_from_f32(y, mode);
            e5m6_pack(word, code);
          } else {
            ((uint8_t *)s->q->data)[element] =
              fp8_from_f32(y, fraction, mode, random_of(s, element));
          }
        }
    }
}

eng_status reference_quantize(const op_call *call)
{
  const tensor *x = call->in[0];
  int64_t columns = row_length(x), rows = row_count(x);
  side own = {.call = call, .rows = rows, .columns = columns, .row = columns, .column = 1,
              .q = call->out[0], .scale = call->out[1],
              .random = (uint64_t)call->quantize.counter};
  if (own.q && own.scale) quantize_side(&own);
  if (call->out[2]) {
    float amax = block_amax(&own, 0, rows, 0, columns, true);
    ((float *)call->out[2]->data)[0] = f32_is_nan(amax) ? f32_from(0x7FC00000u) : amax;
  }
  if (!call->out[3] || !call->out[4]) return ENG_OK;
  side turned = {.call = call, .rows = columns, .columns = rows, .row = 1, .column = columns,
                 .q = call->out[3], .scale = call->out[4],
                 .random = (uint64_t)call->quantize.counter + (uint64_t)((x->count + 3) / 4)};
  quantize_side(&turned);
  // With square blocks, the transposed copy has the codes of q, even after stochastic rounding.
  if (call->quantize.block_rows == call->quantize.block_columns)
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = 0; c < columns; c++)
        ((uint8_t *)turned.q->data)[c * rows + r] = ((const uint8_t *)own.q->data)[r * columns + c];
  return ENG_OK;
}

eng_status reference_swiglu_quantize(const op_call *call)
{
  tensor h = *call->in[0];   // in[0] is `gate`, which is contiguous and has h's shape
  SCRATCH(char, room, h.count * eng_dtype_size(h.dtype));
  h.data = room;
  op_call swiglu = {.op = ENG_OP_swiglu, .n_in = 2, .n_out = 1, .in = {call->in[0], call->in[1]},
                    .out = {&h}},
          codes = *call;
  codes.op = ENG_OP_quantize, codes.n_in = 2, codes.in[0] = &h, codes.in[1] = call->in[2];
  ENG_TRY(reference_swiglu(&swiglu));
  return reference_quantize(&codes);
}

eng_status reference_dequantize(const op_call *call)
{
  const tensor *q = call->in[0], *y = call->out[0];
  bool packed = call->dequantize.format == ENG_FORMAT_E5M6;
  int64_t rows = row_count(y), columns = row_length(y);
  const float *scale = call->in[1]->data;
  fp8_scales at = fp8_scales_for(call->dequantize.block_rows, call->dequantize.block_columns, rows,
                                 columns, NULL);
  for (int64_t i = 0; i < y->count; i++) {
    float value;
    if (packed) {
      uint16_t code[8];
      e5m6_unpack(code, (const uint32_t *)q->data + i / 8 * 3);
      value = e5m6_to_f32(code[i % 8]);
    } else {
      value = fp8_to_f32(((const uint8_t *)q->data)[i], q->dtype == ENG_e4m3 ? 3 : 2);
    }
    store_at(y, i, value * scale[fp8_scale_at(&at, i / columns, i % columns)]);
  }
  return ENG_OK;
}

// ------------------------------------------------------------------ fp8_matmul

// An operand of the product, indexed by (i, k) whether or not it is stored transposed.
typedef struct matrix {
  const uint8_t *data;
  const float   *scale;
  int            fraction;
  int64_t        i_stride, k_stride;
  fp8_scales     at;                // gives the index of the scale of element (i, k)
} matrix;

// Describes q as an operand. The product sums over q's second dimension if `along_k`, else over its
// first.
static matrix matrix_of(const tensor *q, const tensor *scale, bool along_k, int64_t block_rows,
                        int64_t block_columns)
{
  matrix m = {.data = q->data, .scale = scale->data, .fraction = q->dtype == ENG_e4m3 ? 3 : 2};
  m.i_stride = along_k ? q->shape[1] : 1;
  m.k_stride = along_k ? 1 : q->shape[1];
  m.at = fp8_scales_for(block_rows, block_columns, q->shape[0], q->shape[1], NULL);
  if (!along_k) m.at = fp8_scales_turned(m.at);
  return m;
}

static float scale_at(const matrix *m, int64_t i, int64_t k)
{ return m->scale[fp8_scale_at(&m->at, i, k)]; }

static float value_at(const matrix *m, int64_t i, int64_t k)
{ return fp8_to_f32(m->data[i * m->i_stride + k * m->k_stride], m->fraction); }

// Returns the sum of a(i, s) * b(j, s) over s in [k, k + n), as the accumulator `model`
// (ENG_ACCUMULATE_*) computes it.
static double accumulate(const matrix *a, const matrix *b, int model, int64_t i, int64_t j,
                         int64_t k, int64_t n)
{
  float sum = 0;
  double exact = 0;
  if (model == ENG_ACCUMULATE_HOPPER) {
    for (int64_t at = k; at < k + n; at += HOPPER_GROUP) {
      int group = (int)(k + n - at < HOPPER_GROUP ? k + n - at : HOPPER_GROUP);
      sum = hopper_group(a->data + i * a->i_stride + at * a->k_stride, a->k_stride, a->fraction,
                         b->data + j * b->i_stride + at * b->k_stride, b->k_stride, b->fraction,
                         group, sum);
    }
    return sum;
  }
  for (int64_t step = 0; step < n; step++) {
    int64_t at = k + (model == ENG_ACCUMULATE_FP32 ? fp8_fp32_order(step, n) : step);
    float product = value_at(a, i, at) * value_at(b, j, at);   // exact
    if (model == ENG_ACCUMULATE_EXACT) exact += (double)product;
    else if (model == ENG_ACCUMULATE_FP32) sum += product;
    else
      sum = e4m3_to_f32(
        e4m3_from_f32(sum + e4m3_to_f32(e4m3_from_f32(product, FP8_SATURATE)), FP8_SATURATE));
  }
  return model == ENG_ACCUMULATE_EXACT ? exact : (double)sum;
}

eng_status reference_fp8_matmul(const op_call *call)
{
  const tensor *y = call->out[0], *bias = call->in[4];
  bool ta = call->fp8_matmul.transpose_a != 0, tb = call->fp8_matmul.transpose_b != 0;
  int64_t a_rows = call->fp8_matmul.a_rows, a_columns = call->fp8_matmul.a_columns,
          b_rows = call->fp8_matmul.b_rows, b_columns = call->fp8_matmul.b_columns;
  matrix a = matrix_of(call->in[0], call->in[1], !ta, a_rows, a_columns);
  matrix b = matrix_of(call->in[2], call->in[3], tb, b_rows, b_columns);
  int64_t m = y->shape[0], n = y->shape[1], k = call->in[0]->shape[ta ? 0 : 1];
  int64_t stretch = a.at.inner_block < b.at.inner_block ? a.at.inner_block : b.at.inner_block;
  fp8_order order = fp8_scale_order(ta ? a_columns : a_rows, ta ? a_rows : a_columns,
                                    tb ? b_rows : b_columns, tb ? b_columns : b_rows);
  int model = (int)call->fp8_matmul.accumulator;
  int64_t promotion = call->fp8_matmul.promotion ? call->fp8_matmul.promotion : INT64_MAX / 2;
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < n; j++) {
      float total = 0;
      double exact = 0;
      for (int64_t k0 = 0; k0 < k; k0 += stretch) {
        int64_t end = k0 + stretch < k ? k0 + stretch : k;
        float sum = 0, one = scale_at(&a, i, k0), other = scale_at(&b, j, k0);
        for (int64_t at = k0; at < end; at += promotion) {
          double part =
            accumulate(&a, &b, model, i, j, at, end - at < promotion ? end - at : promotion);
          if (model == ENG_ACCUMULATE_EXACT) exact += part * (double)one * (double)other;
          else sum += (float)part;
        }
        total = fp8_add_scaled(order, sum, one, other, total);
      }
      int64_t place = i * y->stride[0] + j * y->stride[1];
      double addend = bias ? load_at(bias, j * bias->stride[0]) : 0;
      double value = model == ENG_ACCUMULATE_EXACT ? exact + addend
                     : bias                        ? (double)(total + (float)addend)
                                                   : (double)total;
      double before = call->fp8_matmul.add ? load_at(y, place) : 0;
      store_at(y, place, value);
      if (call->fp8_matmul.add)
        store_at(y, place, before + load_at(y, place));
    }
  return ENG_OK;
}
