// Shape and dtype rules of quantize, swiglu_quantize, dequantize, mx_*, hadamard, msamp_fp4, nf4_*
// and fp8_matmul (ops.def). Called by autograd/infer.c.
#include "base/error.h"
#include "base/fp8_layout.h"
#include "base/msamp_fp4.h"
#include "base/mx.h"
#include "base/nf4.h"
#include "autograd/infer.h"
#include "sites.h"

#include <math.h>
#include <string.h>

static eng_status want_blocks(const op_call *c, int64_t rows, int64_t columns)
{
  if (rows >= 0 && columns >= 0 && rows <= 1ll << 40 && columns <= 1ll << 40) return ENG_OK;
  return error_set(
    ENG_ERR_VALUE,
    "%s: expected blocks of 1 to 2^40 rows and columns (0 means the whole dimension), got %lld x "
    "%lld",
    op_name(c), (long long)rows, (long long)columns);
}

/// Checks that a whole-number attribute lies between two bounds; `what` names it in the message.
static eng_status want_between(const op_call *c, const char *what, int64_t value, int low, int high)
{
  if (value >= low && value <= high) return ENG_OK;
  return error_set(ENG_ERR_VALUE, "%s: expected %s from %d to %d, got %lld", op_name(c), what, low,
                   high, (long long)value);
}

/// Checks that input k holds the scales of a [rows x columns] matrix in these blocks.
static eng_status want_scales(const op_call *c, int k, int64_t block_rows, int64_t block_columns,
                              int64_t rows, int64_t columns)
{
  const tensor *s = c->in[k];
  int64_t shape[2];
  fp8_scales_for(block_rows, block_columns, rows, columns, shape);
  if (s->dtype == ENG_f32 && s->ndim == 2 && memcmp(s->shape, shape, sizeof shape) == 0)
    return ENG_OK;
  return error_set(s->dtype == ENG_f32 ? ENG_ERR_SHAPE : ENG_ERR_DTYPE,
                   "%s: the scales of a %lld x %lld matrix in blocks of %lld x %lld must be "
                   "f32 %s, got %s (a block size of 0 means the whole dimension; "
                   "core/base/fp8_layout.h defines the layout)",
                   op_name(c), (long long)rows, (long long)columns,
                   (long long)block_rows, (long long)block_columns, tensor_shape_text(2, shape),
                   tensor_text(s));
}

/// Infers the output of a product, [m x n]. The attribute `yields` selects its dtype.
static eng_status put_product(const op_call *c, op_shape *s, int64_t yields, int64_t m, int64_t n)
{
  FAIL_IF(yields && (yields < 1 || yields > ENG_DTYPE_COUNT || !dtype_is_float((int)yields - 1)),
          ENG_ERR_DTYPE, "%s: expected yields to be 0, or 1 plus the number of a floating-point "
          "dtype, got %lld", op_name(c), (long long)yields);
  put_out(s, 0, yields ? (int)yields - 1 : ENG_f32, 2, (int64_t[]){m, n});
  return ENG_OK;
}

/// Infers the codes, scales and amax of a quantized tensor. The operation quantize quantizes input
/// 0, x. swiglu_quantize quantizes the result of the swiglu, which has the shape of input 0.
static eng_status infer_codes(const op_call *c, const tensor *factor, op_shape *s)
{
  const typeof(c->quantize) *a = &c->quantize;
  const char *name = op_name(c);
  const tensor *x = c->in[0];
  int64_t format = a->format, shape[2], rows = row_count(x), columns = row_length(x);
  ENG_TRY(want_float(c, 0));
  ENG_TRY(want_ndim(c, 0, 1));
  FAIL_IF(format != ENG_e4m3 && format != ENG_e5m2 && format != ENG_FORMAT_E5M6, ENG_ERR_DTYPE,
          "%s: expected the format e4m3, e5m2 or e5m6, got %s (number %lld)", name,
          fp8_format_name(format), (long long)format);
  ENG_TRY(want_blocks(c, a->block_rows, a->block_columns));
  ENG_TRY(want_between(c, "a scale rule", a->rule, 0, ENG_SCALES - 1));
  ENG_TRY(want_between(c, "flags", a->flags, 0, 15));
  FAIL_IF(!(fabs(a->eps) <= 1e30), ENG_ERR_VALUE,
          "%s: expected eps within +-1e30 (negative: the rule's default), got %g", name, a->eps);
  FAIL_IF(!(a->margin >= -100 && a->margin <= 100) || a->margin != (double)(int)a->margin,
          ENG_ERR_VALUE,
          "%s: expected an integer margin from -100 to 100, got %g", name, a->margin);
  bool packed = format == ENG_FORMAT_E5M6;
  FAIL_IF(packed && columns % 8, ENG_ERR_SHAPE, "%s: e5m6 packs 8 numbers, so the row length must "
          "be a multiple of 8, got %s", name, tensor_text(x));
  FAIL_IF(packed && a->flags & (QUANTIZE_STOCHASTIC | QUANTIZE_TRANSPOSED), ENG_ERR_VALUE,
          "%s: e5m6 allows no stochastic rounding (flag 2) and no transposed copy (8), got flags "
          "%lld", name, (long long)a->flags);
  if (factor) {
    FAIL_IF(a->block_rows || a->block_columns, ENG_ERR_VALUE,
            "%s: a given factor needs one block for the whole tensor, got blocks of %lld x %lld",
            name, (long long)a->block_rows, (long long)a->block_columns);
    FAIL_IF(factor->dtype != ENG_f32 || factor->count != 1, ENG_ERR_SHAPE,
            "%s: expected one f32 factor, got %s", name, tensor_text(factor));
  }
  put_out(s, 0, packed ? ENG_i32 : (int)format, x->ndim, x->shape);
  if (packed) s->out[0].shape[x->ndim - 1] = columns / 8 * 3;
  fp8_scales_for(a->block_rows, a->block_columns, rows, columns, shape);
  put_out(s, 1, ENG_f32, 2, shape);
  put_out(s, 2, ENG_f32, 0, NULL);
  put_out(s, 3, packed ? ENG_i32 : (int)format, 2, (int64_t[]){columns, rows});
  fp8_scales_for(a->block_rows, a->block_columns, columns, rows, shape);
  put_out(s, 4, ENG_f32, 2, shape);
  return ENG_OK;
}

static eng_status infer_quantize(op_call *c, op_shape *s) { return infer_codes(c, c->in[1], s); }

static eng_status infer_swiglu_quantize(op_call *c, op_shape *s)
{
  const tensor *gate = c->in[0], *up = c->in[1];
  FAIL_IF(gate->dtype != up->dtype || !tensor_same_shape(gate, up),
          gate->dtype != up->dtype ? ENG_ERR_DTYPE : ENG_ERR_SHAPE,
          "swiglu_quantize: expected gate and up of the same shape and dtype, got %s and %s",
          tensor_text(gate), tensor_text(up));
  return infer_codes(c, c->in[2], s);
}

static eng_status infer_dequantize(op_call *c, op_shape *s)
{
  const tensor *q = c->in[0];
  bool packed = c->dequantize.format == ENG_FORMAT_E5M6;
  FAIL_IF(packed ? q->dtype != ENG_i32 : !dtype_is_fp8(q->dtype), ENG_ERR_DTYPE, "dequantize: "
          "expected %s, got %s", packed ? "e5m6 as i32" : "an FP8 tensor", tensor_text(q));
  ENG_TRY(want_ndim(c, 0, 1));
  ENG_TRY(want_float_attribute(c, c->dequantize.dtype));
  ENG_TRY(want_blocks(c, c->dequantize.block_rows, c->dequantize.block_columns));
  int64_t rows = row_count(q), columns = row_length(q);
  FAIL_IF(packed && columns % 3, ENG_ERR_SHAPE, "dequantize: e5m6 packs 8 numbers in three i32, "
          "so the number of i32 in a row must be a multiple of 3, got %s", tensor_text(q));
  if (packed) columns = columns / 3 * 8;
  ENG_TRY(want_scales(c, 1, c->dequantize.block_rows, c->dequantize.block_columns, rows, columns));
  put_out(s, 0, (int)c->dequantize.dtype, q->ndim, q->shape);
  s->out[0].shape[q->ndim - 1] = columns;
  return ENG_OK;
}

// ---- microscaling

static eng_status want_mx(const op_call *c, int64_t format, int64_t rows, int64_t columns,
                          int64_t rule)
{ return error_prefix(fp8_check_mx(format, rows, columns, rule), "%s", op_name(c)); }

static eng_status want_amax(const op_call *c, int k)
{
  const tensor *amax = c->in[k];
  if (!amax || (amax->dtype == ENG_f32 && amax->count == 1)) return ENG_OK;
  return error_set(ENG_ERR_SHAPE, "%s: expected one f32 %s, got %s", op_name(c),
                   c->op == ENG_OP_nf4_quantize ? "offset" : "amax", tensor_text(amax));
}

static bool is_transform(int64_t n) { return n == 16 || n == 32 || n == 64 || n == 128; }

static int64_t blocks_in(int64_t n, int64_t block) { return (n + block - 1) / block; }

static eng_status infer_mx_quantize(op_call *c, op_shape *s)
{
  const typeof(c->mx_quantize) *a = &c->mx_quantize;
  const tensor *x = c->in[0];
  ENG_TRY(want_float(c, 0));
  ENG_TRY(want_ndim(c, 0, 1));
  ENG_TRY(want_mx(c, a->format, a->block_rows, a->block_columns, a->rule));
  ENG_TRY(want_amax(c, 1));
  bool turned = a->flags & QUANTIZE_TRANSPOSED, values = a->flags & MX_VALUES,
       only = a->flags & MX_ROTATED_ONLY, quest = a->rule == ENG_MX_QUEST,
       packed = a->format == ENG_FORMAT_E2M1 && !values;
  FAIL_IF(a->hadamard && !(turned && is_transform(a->hadamard)), ENG_ERR_VALUE,
          "mx_quantize: expected hadamard to be 0 or, with `transposed` (flag 8), 16, 32, 64 or "
          "128; got %lld with flags %lld", (long long)a->hadamard, (long long)a->flags);
  const int64_t allowed = QUANTIZE_TRANSPOSED | MX_VALUES | MX_FINITE |
                          (quest && !only ? MX_GATE : 0) | (a->hadamard ? MX_ROTATED_ONLY : 0);
  FAIL_IF(a->flags & ~allowed, ENG_ERR_VALUE,
          "mx_quantize: expected flags to be 0 or a sum of 8, 16, 32, 64 and 128 (64 only with "
          "quest and without 128; 128 only with hadamard), got %lld", (long long)a->flags);
  FAIL_IF(mx_is_fitted(a->rule) &&
            (a->block_rows != 1 || (turned && !a->hadamard) || a->flags & MX_FINITE ||
             (quest && a->sr_bits) || (a->factor != 0 && a->factor != 1) ||
             (!quest && MX_EDEN_GROUP % a->block_columns)), ENG_ERR_VALUE,
          "mx_quantize: quest and ms_eden need blocks of one row, no factor, `nonfinite` other "
          "than \"te\" (flag 32) and, with `transposed` (flag 8), also hadamard; quest also needs "
          "sr_bits = 0; ms_eden a block length that divides %d; got %s in blocks of %lld x %lld, "
          "factor %g, flags %lld, hadamard %lld and sr_bits %lld", MX_EDEN_GROUP,
          fp8_rule_name(a->rule), (long long)a->block_rows, (long long)a->block_columns, a->factor,
          (long long)a->flags, (long long)a->hadamard, (long long)a->sr_bits);
  ENG_TRY(want_between(c, "sr_bits", a->sr_bits, 0, 24));
  ENG_TRY(want_between(c, "ties", a->ties, 0, MX_TIES - 1));
  ENG_TRY(want_between(c, "sr_rule", a->sr_rule, 0, MX_SR_RULES - 1));
  const tensor *average = c->in[2];
  FAIL_IF(average && (average->dtype != ENG_f32 || !tensor_same_shape(average, x)), ENG_ERR_SHAPE,
          "mx_quantize: expected an average in f32 with the shape of x, %s, got %s",
          tensor_shape_text(x->ndim, x->shape), tensor_text(average));
  const char *why = NULL;
  if ((average != NULL) + (a->ties != 0) + (a->sr_bits != 0) > 1)
    why = "expected at most one of average, ties and sr_bits";
  else if (a->sr_rule && !a->sr_bits) why = "sr_rule needs sr_bits";
  else if (average && a->hadamard) why = "an average needs hadamard = 0";
  else if (mx_is_fitted(a->rule) && (average || a->ties || a->sr_rule))
    why = "quest and ms_eden allow no average, ties or sr_rule";
  else if (mx_is_four_over_six(a->rule) && (average || a->ties || a->sr_bits))
    why = "four_over_six allows no average, ties or sr_bits, because it compares errors of "
          "rounding to nearest";
  FAIL_IF(why, ENG_ERR_VALUE, "mx_quantize: %s; got %s average, ties %lld, sr_bits %lld, sr_rule "
          "%lld and hadamard %lld", why, average ? "an" : "no", (long long)a->ties,
          (long long)a->sr_bits, (long long)a->sr_rule, (long long)a->hadamard);
  FAIL_IF((a->factor != 0 && !(a->factor >= 0.5 && a->factor <= 1)) ||
          (a->factor != 0 && a->factor != 1 && mx_is_four_over_six(a->rule)), ENG_ERR_VALUE,
          "mx_quantize: expected a factor from 0.5 to 1, or 0 for none (with four_over_six only "
          "0 or 1), got %g", a->factor);
  int64_t rows = row_count(x), columns = row_length(x);
  FAIL_IF(packed && (columns % 2 || (turned && rows % 2)), ENG_ERR_SHAPE,
          "mx_quantize: e2m1 packs pairs along a row, so rows%s need an even length, got %s",
          turned ? " and columns" : "", tensor_text(x));
  int dtype = values ? ENG_bf16 : ENG_u8;
  put_out(s, 0, dtype, x->ndim, x->shape);
  if (packed) s->out[0].shape[x->ndim - 1] = columns / 2;
  put_out(s, 1, ENG_u8, 2, (int64_t[]){blocks_in(rows, a->block_rows),
                                       blocks_in(columns, a->block_columns)});
  put_out(s, 2, ENG_f32, 0, NULL);
  put_out(s, 3, dtype, 2, (int64_t[]){columns, packed ? rows / 2 : rows});
  put_out(s, 4, ENG_u8, 2, (int64_t[]){blocks_in(columns, a->block_rows),
                                       blocks_in(rows, a->block_columns)});
  put_out(s, 5, ENG_i64, 0, NULL);
  put_out(s, 6, ENG_f32, 0, NULL);
  put_out(s, 7, ENG_bf16, x->ndim, x->shape);
  return ENG_OK;
}

static eng_status infer_hadamard(op_call *c, op_shape *s)
{
  const typeof(c->hadamard) *a = &c->hadamard;
  const tensor *x = c->in[0];
  ENG_TRY(want_float(c, 0));
  ENG_TRY(want_ndim(c, 0, 1));
  ENG_TRY(want_float_attribute(c, a->dtype));
  FAIL_IF(!is_transform(a->n), ENG_ERR_VALUE, "hadamard: expected a transform of 16, 32, 64 or "
          "128 elements, got %lld", (long long)a->n);
  int64_t rows = row_count(x), columns = row_length(x);
  if (a->turned) put_out(s, 0, (int)a->dtype, 2, (int64_t[]){columns, rows});
  else put_out(s, 0, (int)a->dtype, x->ndim, x->shape);
  return ENG_OK;
}

static eng_status infer_msamp_fp4(op_call *c, op_shape *s)
{
  const typeof(c->msamp_fp4) *a = &c->msamp_fp4;
  const tensor *x = c->in[0];
  ENG_TRY(want_float(c, 0));
  ENG_TRY(want_ndim(c, 0, 1));
  FAIL_IF(!msamp_clamps(a->clamp), ENG_ERR_VALUE, "msamp_fp4: expected clamp to be a quantile "
          "from 0.5 to 0.9999, or 0 for none, got %g", a->clamp);
  put_out(s, 0, ENG_bf16, x->ndim, x->shape);
  put_out(s, 1, ENG_u8, 2, (int64_t[]){row_count(x), 1});
  put_out(s, 2, ENG_f32, 0, NULL);
  put_out(s, 3, ENG_bf16, x->ndim, x->shape);
  return ENG_OK;
}

static eng_status infer_mx_dequantize(op_call *c, op_shape *s)
{
  const typeof(c->mx_dequantize) *a = &c->mx_dequantize;
  const tensor *q = c->in[0], *scale = c->in[1];
  FAIL_IF(q->dtype != ENG_u8 || scale->dtype != ENG_u8, ENG_ERR_DTYPE, "mx_dequantize: expected "
          "codes and scales in u8, got %s and %s", tensor_text(q), tensor_text(scale));
  ENG_TRY(want_ndim(c, 0, 1));
  ENG_TRY(want_float_attribute(c, a->dtype));
  ENG_TRY(want_mx(c, a->format, a->block_rows, a->block_columns, a->rule));
  ENG_TRY(want_amax(c, 2));
  int64_t rows = row_count(q), columns = row_length(q);
  if (a->format == ENG_FORMAT_E2M1) columns *= 2;
  int64_t shape[] = {blocks_in(rows, a->block_rows), blocks_in(columns, a->block_columns)};
  FAIL_IF(scale->ndim != 2 || memcmp(scale->shape, shape, sizeof shape) != 0, ENG_ERR_SHAPE,
          "mx_dequantize: the scales of a %lld x %lld matrix in blocks of %lld x %lld must be "
          "u8 %s, got %s", (long long)rows, (long long)columns, (long long)a->block_rows,
          (long long)a->block_columns, tensor_shape_text(2, shape), tensor_text(scale));
  put_out(s, 0, (int)a->dtype, q->ndim, q->shape);
  s->out[0].shape[q->ndim - 1] = columns;
  return ENG_OK;
}

static eng_status infer_mx_matmul(op_call *c, op_shape *s)
{
  const typeof(c->mx_matmul) *a = &c->mx_matmul;
  bool four = a->format_a == ENG_FORMAT_E2M1 && a->format_b == ENG_FORMAT_E2M1,
       eight = (a->format_a == ENG_e4m3 || a->format_a == ENG_e5m2) &&
               (a->format_b == ENG_e4m3 || a->format_b == ENG_e5m2);
  FAIL_IF(!four && !eight, ENG_ERR_DTYPE, "mx_matmul: expected both operands in e4m3 or e5m2, or "
          "both in e2m1, got %s and %s", fp8_format_name(a->format_a),
          fp8_format_name(a->format_b));
  int nvfp4 = mx_is_nvfp4(a->rule_a);
  FAIL_IF(a->rule_a < 0 || a->rule_a >= ENG_MX_RULES || a->rule_b < 0 ||
          a->rule_b >= ENG_MX_RULES || nvfp4 != mx_is_nvfp4(a->rule_b) || (nvfp4 && !four),
          ENG_ERR_VALUE, "mx_matmul: expected two scale rules from 0 to %d, and NVFP4's scales "
          "(only with e2m1) in both or in neither, got %lld (%s) and %lld (%s) with codes in %s "
          "and %s", ENG_MX_RULES - 1, (long long)a->rule_a, fp8_rule_name(a->rule_a),
          (long long)a->rule_b, fp8_rule_name(a->rule_b), fp8_format_name(a->format_a),
          fp8_format_name(a->format_b));
  int64_t K = 0, block = nvfp4 ? 16 : 32;
  for (int k = 0; k < 4; k += 2) {
    const tensor *q = c->in[k], *scale = c->in[k + 1];
    int64_t columns = q->ndim == 2 ? q->shape[1] * (four ? 2 : 1) : -1;
    if (k == 0) K = columns;
    FAIL_IF(q->dtype != ENG_u8 || scale->dtype != ENG_u8 || columns != K || K % (four ? 64 : 32) ||
            scale->ndim != 2 || scale->shape[1] != K / block ||
            (q->count && (scale->shape[0] == 0 || q->shape[0] % scale->shape[0])), ENG_ERR_SHAPE,
            "mx_matmul: expected u8 codes of K elements a row, K the same in a and b and a "
            "multiple of %d, and 2-D u8 scales, one for every %lld elements of a row, whose rows "
            "divide those of the codes; got %s (K %lld, in a %lld) with scales %s as operand %s",
            four ? 64 : 32, (long long)block, tensor_text(q), (long long)columns, (long long)K,
            tensor_text(scale), k ? "b" : "a");
  }
  ENG_TRY(want_amax(c, 4));
  ENG_TRY(want_amax(c, 5));
  return put_product(c, s, a->yields, c->in[0]->shape[0], c->in[2]->shape[0]);
}

// ---- NF4

static eng_status want_nf4_block(const op_call *c, int64_t block)
{
  if (block >= 32 && block <= 4096 && (block & (block - 1)) == 0) return ENG_OK;
  return error_set(ENG_ERR_VALUE,
                   "%s: expected a block of 32 to 4096 elements, a power of two, got %lld",
                   op_name(c), (long long)block);
}

static eng_status infer_nf4_quantize(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  ENG_TRY(want_float(c, 0));
  ENG_TRY(want_amax(c, 1));
  ENG_TRY(want_nf4_block(c, c->nf4_quantize.block));
  int64_t blocks = blocks_in(x->count, c->nf4_quantize.block);
  put_out(s, 0, ENG_u8, 1, (int64_t[]){blocks_in(x->count, 2)});
  put_out(s, 1, ENG_f32, 1, &blocks);
  put_out(s, 2, ENG_u8, 1, &blocks);
  put_out(s, 3, ENG_f32, 1, (int64_t[]){blocks_in(blocks, NF4_GROUP)});
  put_out(s, 4, ENG_f32, 0, NULL);
  return ENG_OK;
}

static eng_status infer_nf4_dequantize(op_call *c, op_shape *s)
{
  const typeof(c->nf4_dequantize) *a = &c->nf4_dequantize;
  const tensor *q = c->in[0], *absmax = c->in[1], *group = c->in[2], *offset = c->in[3];
  ENG_TRY(want_float_attribute(c, a->dtype));
  ENG_TRY(want_nf4_block(c, a->block));
  FAIL_IF(a->rows < 0 || a->columns < 0 || a->rows > 1ll << 30 || a->columns > 1ll << 30,
          ENG_ERR_VALUE, "nf4_dequantize: expected rows and columns up to 2^30, got %lld and %lld",
          (long long)a->rows, (long long)a->columns);
  int64_t n = a->rows * a->columns, blocks = blocks_in(n, a->block);
  FAIL_IF(q->dtype != ENG_u8 || q->count != blocks_in(n, 2) || absmax->count != blocks ||
          absmax->dtype != (group ? ENG_u8 : ENG_f32), ENG_ERR_SHAPE,
          "nf4_dequantize: %lld x %lld elements in blocks of %lld need codes u8 [%lld] and "
          "absmax %s [%lld], got %s and %s", (long long)a->rows, (long long)a->columns,
          (long long)a->block, (long long)blocks_in(n, 2), group ? "u8" : "f32",
          (long long)blocks, tensor_text(q), tensor_text(absmax));
  FAIL_IF(!group != !offset ||
            (group && (group->dtype != ENG_f32 || group->count != blocks_in(blocks, NF4_GROUP) ||
                       offset->dtype != ENG_f32 || offset->count != 1)), ENG_ERR_SHAPE,
          "nf4_dequantize: expected group f32 [%lld] and offset f32 [1], or neither, got group %s "
          "and offset %s", (long long)blocks_in(blocks, NF4_GROUP),
          group ? tensor_text(group) : "absent", offset ? tensor_text(offset) : "absent");
  put_out(s, 0, (int)a->dtype, 2, (int64_t[]){a->rows, a->columns});
  return ENG_OK;
}

static eng_status infer_fp8_matmul(op_call *c, op_shape *s)
{
  const typeof(c->fp8_matmul) *m = &c->fp8_matmul;
  const tensor *a = c->in[0], *b = c->in[2];
  FAIL_IF(!dtype_is_fp8(a->dtype) || !dtype_is_fp8(b->dtype), ENG_ERR_DTYPE,
          "fp8_matmul: expected two FP8 matrices, got %s and %s; hint: quantize them",
          tensor_text(a), tensor_text(b));
  bool ta = m->transpose_a != 0, tb = m->transpose_b != 0;
  FAIL_IF(a->ndim != 2 || b->ndim != 2 || a->shape[ta ? 0 : 1] != b->shape[tb ? 1 : 0],
          ENG_ERR_SHAPE, "fp8_matmul: expected [M x K] times [K x N], got %s%s and %s%s",
          tensor_text(a), ta ? " (transposed)" : "", tensor_text(b), tb ? " (transposed)" : "");
  ENG_TRY(want_blocks(c, m->a_rows, m->a_columns));
  ENG_TRY(want_blocks(c, m->b_rows, m->b_columns));
  ENG_TRY(want_scales(c, 1, m->a_rows, m->a_columns, a->shape[0], a->shape[1]));
  ENG_TRY(want_scales(c, 3, m->b_rows, m->b_columns, b->shape[0], b->shape[1]));
  int64_t k = a->shape[ta ? 0 : 1], along_a = ta ? m->a_rows : m->a_columns,
          along_b = tb ? m->b_columns : m->b_rows;   // blocks along K
  if (along_a == 0 || along_a > k) along_a = k;
  if (along_b == 0 || along_b > k) along_b = k;
  int64_t less = along_a < along_b ? along_a : along_b,
          more = along_a < along_b ? along_b : along_a;
  FAIL_IF(more < k && more % less, ENG_ERR_SHAPE, "fp8_matmul: along K, one block size must "
          "divide the other, got %lld and %lld", (long long)along_a, (long long)along_b);
  ENG_TRY(want_between(c, "an accumulator", m->accumulator, 0, ENG_ACCUMULATORS - 1));
  FAIL_IF(m->promotion < 0 || m->promotion % 32 || m->promotion > 1ll << 40, ENG_ERR_VALUE,
          "fp8_matmul: expected a promotion interval that is a multiple of 32 up to 2^40, or 0, "
          "got %lld", (long long)m->promotion);
  int64_t n = b->shape[tb ? 0 : 1];
  ENG_TRY(want_vector(c, 4, "a bias", n));
  FAIL_IF(m->add && c->in[4], ENG_ERR_VALUE,
          "fp8_matmul: expected no bias in a call that adds its result to the output; hint: add "
          "the bias in a separate call");
  return put_product(c, s, m->yields, a->shape[ta ? 1 : 0], n);
}

static void __attribute__((constructor)) register_rules(void)
{
  op_register(ENG_OP_quantize, infer_quantize, NULL);
  op_register(ENG_OP_swiglu_quantize, infer_swiglu_quantize, NULL);
  op_register(ENG_OP_dequantize, infer_dequantize, NULL);
  op_register(ENG_OP_mx_quantize, infer_mx_quantize, NULL);
  op_register(ENG_OP_hadamard, infer_hadamard, NULL);
  op_register(ENG_OP_msamp_fp4, infer_msamp_fp4, NULL);
  op_register(ENG_OP_mx_dequantize, infer_mx_dequantize, NULL);
  op_register(ENG_OP_mx_matmul, infer_mx_matmul, NULL);
  op_register(ENG_OP_nf4_quantize, infer_nf4_quantize, NULL);
  op_register(ENG_OP_nf4_dequantize, infer_nf4_dequantize, NULL);
  op_register(ENG_OP_fp8_matmul, infer_fp8_matmul, NULL);
}
