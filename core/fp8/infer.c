// Shape and dtype rules of quantize, dequantize and fp8_matmul (ops.def).
#include "base/error.h"
#include "base/fp8_layout.h"
#include "autograd/op.h"

#include <string.h>

static void put(op_shape *s, int k, int dtype, int ndim, const int64_t *shape)
{
  s->out[k].dtype = dtype;
  s->out[k].ndim = ndim;
  if (ndim > 0) memcpy(s->out[k].shape, shape, (size_t)ndim * sizeof *shape);
}

static eng_status want_blocks(const op_call *c, int64_t rows, int64_t columns)
{
  if (rows >= 0 && columns >= 0 && rows <= 1ll << 40 && columns <= 1ll << 40) return ENG_OK;
  return error_set(ENG_ERR_VALUE, "%s: expected blocks of 1 or more rows and columns, or 0 for all, got %lld x %lld", op_table[c->op].about.name,
                   (long long)rows, (long long)columns);
}

/// Input k holds the scales of a matrix rows x columns in these blocks.
static eng_status want_scales(const op_call *c, int k, int64_t block_rows, int64_t block_columns, int64_t rows, int64_t columns)
{
  const tensor *s = c->in[k];
  int64_t shape[2];
  fp8_scales_for(block_rows, block_columns, rows, columns, shape);
  if (s->dtype == ENG_f32 && s->ndim == 2 && memcmp(s->shape, shape, sizeof shape) == 0) return ENG_OK;
  return error_set(s->dtype == ENG_f32 ? ENG_ERR_SHAPE : ENG_ERR_DTYPE, "%s: expected the scales of %lld x %lld in blocks of %lld x %lld (0: all) as f32 %s, got %s; core/base/fp8_layout.h says how they lie",
                   op_table[c->op].about.name, (long long)rows, (long long)columns, (long long)block_rows, (long long)block_columns,
                   tensor_shape_text(2, shape), tensor_text(s));
}

/// Codes and scales of x, or of what is made of x and others of its shape.
static eng_status infer_codes(const op_call *c, const tensor *x, const tensor *factor, op_shape *s)
{
  const char *name = op_table[c->op].about.name;
  int64_t format = c->ints[0];
  if (!dtype_is_float(x->dtype)) return error_set(ENG_ERR_DTYPE, "%s: expected a floating-point tensor, got %s", name, tensor_text(x));
  if (x->ndim < 1) return error_set(ENG_ERR_SHAPE, "%s: expected at least 1 dimension, got %s", name, tensor_text(x));
  if (format != ENG_e4m3 && format != ENG_e5m2 && format != ENG_FORMAT_E5M6)
    return error_set(ENG_ERR_DTYPE, "%s: expected the format e4m3, e5m2 or e5m6, got number %lld", name, (long long)format);
  ENG_TRY(want_blocks(c, c->ints[1], c->ints[2]));
  if (c->ints[3] < 0 || c->ints[3] >= ENG_SCALES)
    return error_set(ENG_ERR_VALUE, "%s: there is no scale rule %lld; rules: 0 to %d", name, (long long)c->ints[3], ENG_SCALES - 1);
  if (c->ints[4] < 0 || c->ints[4] > 15) return error_set(ENG_ERR_VALUE, "%s: expected flags of 0 to 15, got %lld", name, (long long)c->ints[4]);
  if (!(c->floats[0] <= 1e30)) return error_set(ENG_ERR_VALUE, "%s: expected eps up to 1e30, or negative for the rule's, got %g", name, c->floats[0]);
  if (!(c->floats[1] >= -100 && c->floats[1] <= 100) || c->floats[1] != (double)(int)c->floats[1])
    return error_set(ENG_ERR_VALUE, "%s: expected a whole margin within +-100, got %g", name, c->floats[1]);
  int64_t columns = x->shape[x->ndim - 1], rows = 1;
  for (int d = 0; d < x->ndim - 1; d++) rows *= x->shape[d];
  bool packed = format == ENG_FORMAT_E5M6;
  if (packed && columns % 8) return error_set(ENG_ERR_SHAPE, "%s: e5m6 packs 8 numbers of a row, got %s", name, tensor_text(x));
  if (packed && c->ints[4] & 10) return error_set(ENG_ERR_VALUE, "%s: e5m6 rounds to nearest even and has no transposed copy", name);
  if (factor) {
    if (c->ints[1] || c->ints[2]) return error_set(ENG_ERR_VALUE, "%s: a given factor belongs to blocks of the whole tensor, got %lld x %lld", name, (long long)c->ints[1], (long long)c->ints[2]);
    if (factor->dtype != ENG_f32 || factor->count != 1) return error_set(ENG_ERR_SHAPE, "%s: expected one f32 factor, got %s", name, tensor_text(factor));
  }
  put(s, 0, packed ? ENG_i32 : (int)format, x->ndim, x->shape);
  if (packed) s->out[0].shape[x->ndim - 1] = columns / 8 * 3;
  int64_t shape[2];
  fp8_scales_for(c->ints[1], c->ints[2], rows, columns, shape);
  put(s, 1, ENG_f32, 2, shape);
  put(s, 2, ENG_f32, 0, NULL);
  put(s, 3, packed ? ENG_i32 : (int)format, 2, (int64_t[]){columns, rows});
  fp8_scales_for(c->ints[1], c->ints[2], columns, rows, shape);
  put(s, 4, ENG_f32, 2, shape);
  return ENG_OK;
}

static eng_status infer_quantize(op_call *c, op_shape *s)
{
  return infer_codes(c, c->in[0], c->in[1], s);
}

static eng_status infer_swiglu_quantize(op_call *c, op_shape *s)
{
  const tensor *gate = c->in[0], *up = c->in[1];
  if (gate->dtype != up->dtype || !tensor_same_shape(gate, up))
    return error_set(gate->dtype != up->dtype ? ENG_ERR_DTYPE : ENG_ERR_SHAPE, "swiglu_quantize: expected a gate and an up of one shape and format, got %s and %s",
                     tensor_text(gate), tensor_text(up));
  return infer_codes(c, gate, c->in[2], s);
}

static eng_status infer_dequantize(op_call *c, op_shape *s)
{
  const tensor *q = c->in[0];
  bool packed = c->ints[3] == ENG_FORMAT_E5M6;
  if (packed ? q->dtype != ENG_i32 : !dtype_is_fp8(q->dtype))
    return error_set(ENG_ERR_DTYPE, "dequantize: expected %s, got %s", packed ? "e5m6 as i32" : "an FP8 tensor", tensor_text(q));
  if (q->ndim < 1) return error_set(ENG_ERR_SHAPE, "dequantize: expected at least 1 dimension, got %s", tensor_text(q));
  if (c->ints[0] < 0 || c->ints[0] >= ENG_DTYPE_COUNT || !dtype_is_float((int)c->ints[0]))
    return error_set(ENG_ERR_DTYPE, "dequantize: expected the number of a floating-point dtype, got %lld", (long long)c->ints[0]);
  ENG_TRY(want_blocks(c, c->ints[1], c->ints[2]));
  int64_t columns = q->shape[q->ndim - 1], rows = 1;
  for (int d = 0; d < q->ndim - 1; d++) rows *= q->shape[d];
  if (packed && columns % 3) return error_set(ENG_ERR_SHAPE, "dequantize: e5m6 packs 8 numbers in three i32, got %s", tensor_text(q));
  if (packed) columns = columns / 3 * 8;
  ENG_TRY(want_scales(c, 1, c->ints[1], c->ints[2], rows, columns));
  put(s, 0, (int)c->ints[0], q->ndim, q->shape);
  s->out[0].shape[q->ndim - 1] = columns;
  return ENG_OK;
}

static eng_status infer_fp8_matmul(op_call *c, op_shape *s)
{
  const tensor *a = c->in[0], *b = c->in[2], *bias = c->in[4];
  if (!dtype_is_fp8(a->dtype) || !dtype_is_fp8(b->dtype))
    return error_set(ENG_ERR_DTYPE, "fp8_matmul: expected two FP8 matrices, got %s and %s; hint: quantize them", tensor_text(a), tensor_text(b));
  bool ta = c->ints[0] != 0, tb = c->ints[1] != 0;
  if (a->ndim != 2 || b->ndim != 2 || a->shape[ta ? 0 : 1] != b->shape[tb ? 1 : 0])
    return error_set(ENG_ERR_SHAPE, "fp8_matmul: expected [M x K] times [K x N], got %s%s and %s%s", tensor_text(a), ta ? " (transposed)" : "",
                     tensor_text(b), tb ? " (transposed)" : "");
  ENG_TRY(want_blocks(c, c->ints[2], c->ints[3]));
  ENG_TRY(want_blocks(c, c->ints[4], c->ints[5]));
  ENG_TRY(want_scales(c, 1, c->ints[2], c->ints[3], a->shape[0], a->shape[1]));
  ENG_TRY(want_scales(c, 3, c->ints[4], c->ints[5], b->shape[0], b->shape[1]));
  int64_t m = a->shape[ta ? 1 : 0], k = a->shape[ta ? 0 : 1], n = b->shape[tb ? 0 : 1];
  int64_t along_a = c->ints[ta ? 2 : 3], along_b = c->ints[tb ? 5 : 4];   // blocks along K
  if (along_a == 0 || along_a > k) along_a = k;
  if (along_b == 0 || along_b > k) along_b = k;
  int64_t less = along_a < along_b ? along_a : along_b, more = along_a < along_b ? along_b : along_a;
  if (more < k && more % less)
    return error_set(ENG_ERR_SHAPE, "fp8_matmul: blocks of %lld and of %lld along K do not nest", (long long)along_a, (long long)along_b);
  if (c->ints[6] && (c->ints[6] < 1 || c->ints[6] > ENG_DTYPE_COUNT || !dtype_is_float((int)c->ints[6] - 1)))
    return error_set(ENG_ERR_DTYPE, "fp8_matmul: expected the number of a floating-point dtype + 1, got %lld", (long long)c->ints[6]);
  if (c->ints[7] < 0 || c->ints[7] >= ENG_ACCUMULATORS)
    return error_set(ENG_ERR_VALUE, "fp8_matmul: there is no accumulator %lld; accumulators: 0 to %d", (long long)c->ints[7], ENG_ACCUMULATORS - 1);
  if (c->ints[8] < 0 || c->ints[8] % 32 || c->ints[8] > 1ll << 40)
    return error_set(ENG_ERR_VALUE, "fp8_matmul: expected a promotion every multiple of 32 steps, or 0 for none, got %lld", (long long)c->ints[8]);
  if (bias && (!dtype_is_float(bias->dtype) || bias->ndim != 1 || bias->shape[0] != n))
    return error_set(ENG_ERR_SHAPE, "fp8_matmul: expected a bias of shape [%lld], got %s", (long long)n, tensor_text(bias));
  if (c->ints[9] && bias) return error_set(ENG_ERR_VALUE, "fp8_matmul: adding onto an output leaves no place for a bias");
  put(s, 0, c->ints[6] ? (int)c->ints[6] - 1 : ENG_f32, 2, (int64_t[]){m, n});
  return ENG_OK;
}

static void __attribute__((constructor)) register_rules(void)
{
  op_register(ENG_OP_quantize, infer_quantize, NULL);
  op_register(ENG_OP_swiglu_quantize, infer_swiglu_quantize, NULL);
  op_register(ENG_OP_dequantize, infer_dequantize, NULL);
  op_register(ENG_OP_fp8_matmul, infer_fp8_matmul, NULL);
}
