// Linear layers under a microscaling recipe. A role's copies do not hold codes but, in bf16, the
// numbers that the codes stand for. An ordinary matmul multiplies them; the product of two such
// numbers is exact. NVFP4's scale of the whole tensor, amax / 2688, is not part of the copies,
// because bf16 would round the scaled numbers. It multiplies the f32 sums. Called by linear.c; see
// its head.
#include "sites.h"

#include "base/error.h"
#include "base/mx.h"
#include "device/transfer.h"

#include <math.h>
#include <stdlib.h>

/// Bits of stochastic rounding, as in Transformer Engine.
enum { SR_BITS = 8 };

static eng_status copy_into(tensor **out, tensor *x)
{
  op_call c = {.op = ENG_OP_contiguous, .n_in = 1, .n_out = 1, .in = {x}, .out = {*out}};
  eng_status status = op_run(&c);
  if (status == ENG_OK) *out = c.out[0];
  return status;
}

// The signs of a role's Hadamard transform, as mx_quantize takes them. x and dy have the same.
static int64_t signs_of(const fp8_site *s, const eng_fp8_role *r)
{
  if (r->signs <= ENG_FP8_SIGNS_FIXED) return r->signs;
  uint64_t hash = 0xCBF29CE484222325u;
  for (const char *c = s->name; *c; c++) hash = (hash ^ (uint8_t)*c) * 0x100000001B3u;
  if (r->signs == ENG_FP8_SIGNS_STEP) hash = (hash ^ (uint64_t)fp8_step()) * 0x9E3779B97F4A7C15u;
  return (int64_t)(hash >> 2) + 1;
}

eng_status fp8_mx_quantize(fp8_mx_copies *to, tensor *slot, const fp8_site *s, int role, tensor *x,
                           bool transposed)
{
  const eng_fp8_role *r = &s->recipe.role[role];
  if (r->hadamard && r->signs == ENG_FP8_SIGNS_STEP)
    ENG_TRY(backend_forbids("a Hadamard transform with new signs in each step"));
  op_call c = {.op = ENG_OP_mx_quantize, .n_in = 2, .n_out = 7,
               .in = {x},
               .out = {to->q, NULL, to->amax, to->q_t, NULL, NULL, to->amax_t},
               .mx_quantize = {.format = r->format,
                               .block_rows = r->block_rows,
                               .block_columns = r->block_columns,
                               .rule = r->mx - 1,
                               .flags = MX_VALUES | (transposed ? QUANTIZE_TRANSPOSED : 0),
                               .sr_bits = r->stochastic ? SR_BITS : 0,
                               .hadamard = transposed ? r->hadamard : 0,
                               .signs = signs_of(s, r)}};
  ENG_TRY(op_run(&c));
  to->q = c.out[0], to->scale = c.out[1], to->amax = c.out[2], to->q_t = c.out[3];
  to->amax_t = c.out[6];
  tensor_drop(c.out[5]);
  if (c.out[4]) tensor_drop(c.out[4]);
  return copy_into(&slot, to->amax);
}

// *y times amax / 2688.
static eng_status scale_by(tensor **y, tensor *amax)
{
  tensor *factor, *scaled;
  ENG_TRY(op_run1(&factor, (op_call){.op = ENG_OP_affine, .n_out = 1, .in = {amax},
                                     .affine = {.factor = 1.0 / 2688}}));
  eng_status status =
    op_run1(&scaled, (op_call){.op = ENG_OP_mul, .n_out = 1, .in = {*y, factor}});
  tensor_drop(factor);
  if (status != ENG_OK) return status;
  tensor_drop(*y);
  *y = scaled;
  return ENG_OK;
}

eng_status fp8_mx_multiply(tensor **y, const fp8_mx_factor *a, const fp8_mx_factor *b, tensor *bias,
                           int dtype, bool add)
{
  bool after = a->amax || b->amax || bias;
  op_call c = {.op = ENG_OP_matmul, .n_in = 2, .n_out = 1,
               .in = {a->q, b->q},
               .out = {after ? NULL : *y},
               .matmul = {.transpose_a = a->turned,
                          .transpose_b = b->turned,
                          .yields = (after ? ENG_f32 : dtype) + 1,
                          .add = !after && add}};
  ENG_TRY(op_run(&c));
  if (!after) {
    *y = c.out[0];
    return ENG_OK;
  }
  tensor *sum = c.out[0], *more;
  eng_status status = a->amax ? scale_by(&sum, a->amax) : ENG_OK;
  if (status == ENG_OK && b->amax) status = scale_by(&sum, b->amax);
  for (int k = 0; k < 2 && status == ENG_OK; k++) {   // the bias, then what *y holds
    tensor *term = k == 0 ? bias : add ? *y : NULL;
    if (!term) continue;
    status = op_run1(&more, (op_call){.op = ENG_OP_add, .n_out = 1, .in = {sum, term}});
    if (status != ENG_OK) break;
    tensor_drop(sum);
    sum = more;
  }
  if (status == ENG_OK) {
    op_call round = {.op = ENG_OP_cast, .n_in = 1, .n_out = 1, .in = {sum}, .out = {*y},
                     .cast = {.dtype = dtype}};
    status = op_run(&round);
    if (status == ENG_OK) *y = round.out[0];
  }
  tensor_drop(sum);
  return status;
}

eng_status fp8_mx_measure(fp8_site *s, int role, tensor *x, tensor *q, const tensor *scale,
                          const tensor *amax)
{
  const eng_fp8_role *r = &s->recipe.role[role];
  int64_t columns = x->shape[x->ndim - 1], rows = columns ? x->count / columns : 0;
  if (x->count == 0) return ENG_OK;
  int64_t every = fp8_measured_every(rows, columns), taken = (rows + every - 1) / every,
          across = scale->shape[1];
  float *values = malloc((size_t)(2 * taken * columns + scale->count) * sizeof *values), whole = 1;
  if (!values) return error_set(ENG_ERR_MEMORY, "out of memory for the FP8 meters");
  float *numbers = values + taken * columns, *codes = numbers + taken * columns;
  eng_status status = fp8_read_rows(values, x, every);
  if (status == ENG_OK) status = fp8_read_rows(numbers, q, every);
  if (status == ENG_OK) status = transfer_read(codes, ENG_f32, scale);
  if (status == ENG_OK && r->mx - 1 == ENG_MX_NVFP4) {
    status = transfer_read(&whole, ENG_f32, amax);
    whole = nvfp4_decode_scale(whole);
  }
  mx_format f = mx_format_of(r->format);
  // half a step above the largest number
  float limit = 1.5f * f.largest - 0.5f * mx_value((uint8_t)(f.top - 1), f);
  for (int64_t i = 0; i < taken && status == ENG_OK; i++)
    for (int64_t k = 0; k < columns; k++) {
      uint8_t code = (uint8_t)codes[i * every / r->block_rows * across + k / r->block_columns];
      float unit = r->mx - 1 == ENG_MX_NVFP4 ? e4m3_to_f32(code) : ue8m0_to_f32(code),
            number = numbers[i * columns + k];
      fp8_meter_element(&s->meter[role], values[i * columns + k], unit > 0 ? number / unit : 0,
                        unit * whole, f.largest, limit);
    }
  free(values);
  return status;
}
