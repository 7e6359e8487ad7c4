// Linear layers under a microscaling recipe. A role's copies do not hold codes but, in bf16, the
// numbers that the codes stand for. An ordinary matmul multiplies them; the product of two such
// numbers is exact. NVFP4's scale of the whole tensor, amax / 2688, is not part of the copies,
// because bf16 would round the scaled numbers. It multiplies the f32 sums, and so does the inverse
// of a role's `factor`.
//
// A recipe may give x and W separate formats for the backward products (eng_fp8_recipe.backward).
// These products then read the forward product's numbers, quantized again. Their results are the
// gradients of these numbers; fp8_mx_through turns them into the gradients of x and W. Called by
// linear.c; see its head.
#include "sites.h"

#include "base/error.h"
#include "base/mx.h"
#include "base/rng.h"
#include "device/transfer.h"

#include <math.h>
#include <stdlib.h>

static eng_status copy_into(tensor **out, tensor *x)
{
  op_call c = {.op = ENG_OP_contiguous, .n_in = 1, .n_out = 1, .in = {x}, .out = {*out}};
  eng_status status = op_run(&c);
  if (status == ENG_OK) *out = c.out[0];
  return status;
}

// fp8_measure for microscaling. x: the tensor that was quantized.
static eng_status measure(fp8_site *s, int role, tensor *x, tensor *q, const tensor *scale,
                          const tensor *amax)
{
  const eng_fp8_role *r = &s->recipe.role[role];
  fp8_sample m;
  float whole = 1;
  if (mx_is_nvfp4(r->mx - 1)) {
    ENG_TRY(transfer_read(&whole, ENG_f32, amax));
    whole = nvfp4_decode_scale(whole, r->mx - 1);
  }
  if (r->factor != 0) whole /= (float)r->factor;
  ENG_TRY(fp8_sample_read(&m, x, q, scale));
  mx_format f = mx_format_of(r->format);
  // half a step above the largest number
  float limit = 1.5f * f.largest - 0.5f * mx_value((uint8_t)(f.top - 1), f);
  for (int64_t i = 0; i < m.rows; i++)
    for (int64_t k = 0; k < m.columns; k++) {
      int64_t at = i * m.every / r->block_rows * scale->shape[1] + k / r->block_columns;
      uint8_t code = (uint8_t)m.scale[at];
      float unit = mx_is_nvfp4(r->mx - 1) ? e4m3_to_f32(code) : ue8m0_to_f32(code),
            number = m.q[i * m.columns + k];
      fp8_meter_element(&s->meter[role], m.x[i * m.columns + k], unit > 0 ? number / unit : 0,
                        unit * whole, f.largest, limit);
    }
  free(m.x);
  return ENG_OK;
}

// The attribute `signs` of the operation hadamard for a product. Each product of a layer draws its
// own signs.
static int64_t signs_of(const fp8_site *s, const eng_fp8_product *p)
{
  if (p->signs <= ENG_FP8_SIGNS_FIXED) return p->signs;
  uint64_t hash = 0xCBF29CE484222325u;
  for (const char *c = s->name; *c; c++) hash = (hash ^ (uint8_t)*c) * 0x100000001B3u;
  hash = (hash ^ (uint64_t)(p - s->recipe.product)) * 0x100000001B3u;
  int64_t drawn = p->signs == ENG_FP8_SIGNS_STEP       ? fp8_step()
                  : p->signs == ENG_FP8_SIGNS_BACKWARD ? s->pass
                                                       : -1;
  if (drawn >= 0) hash = (hash ^ (uint64_t)drawn) * 0x9E3779B97F4A7C15u;
  return (int64_t)(hash >> 2) + 1;
}

static bool changes(const eng_fp8_product *p)
{ return p->hadamard && p->signs >= ENG_FP8_SIGNS_STEP; }

void fp8_mx_begin_backward(fp8_site *s)
{
  const eng_fp8_product *p = s->recipe.product;
  if (p[ENG_FP8_DGRAD].signs == ENG_FP8_SIGNS_BACKWARD ||
      p[ENG_FP8_WGRAD].signs == ENG_FP8_SIGNS_BACKWARD)
    s->pass = (int64_t)rng_take(1);
}

int64_t fp8_mx_step(const fp8_site *s)
{
  const eng_fp8_product *p = s->recipe.product;
  return changes(&p[ENG_FP8_FORWARD]) || changes(&p[ENG_FP8_DGRAD]) ? fp8_step() : 0;
}

// x, or its transpose, under a product's Hadamard transform.
static eng_status rotate(tensor **y, const fp8_site *s, const eng_fp8_product *p, tensor *x,
                         bool turned)
{
  if (changes(p))
    ENG_TRY(backend_forbids("a Hadamard transform with new signs in each step"));
  return op_run1(y, (op_call){.op = ENG_OP_hadamard, .in = {x},
                              .hadamard = {.n = p->hadamard, .signs = signs_of(s, p),
                                           .turned = turned, .dtype = ENG_bf16}});
}

static eng_status encode(fp8_mx_copies *to, const eng_fp8_role *r, tensor *x, bool transposed)
{
  op_call c = {.op = ENG_OP_mx_quantize, .n_in = 2, .n_out = 8,
               .in = {x},
               .out = {to->q, NULL, to->amax, to->q_t, NULL, NULL, to->amax_t, to->gate},
               .mx_quantize = {.format = r->format,
                               .block_rows = r->block_rows,
                               .block_columns = r->block_columns,
                               .rule = r->mx - 1,
                               .flags = MX_VALUES | (transposed ? QUANTIZE_TRANSPOSED : 0) |
                                        (mx_is_gated(r->mx - 1) ? MX_GATE : 0),
                               .sr_bits = r->stochastic,
                               .factor = r->factor}};
  ENG_TRY(op_run(&c));
  *to = (fp8_mx_copies){c.out[0], c.out[1], c.out[2], c.out[3], c.out[6], c.out[7]};
  tensor_drop(c.out[5]);
  if (c.out[4]) tensor_drop(c.out[4]);
  return ENG_OK;
}

// Quantizes x transposed, for the product that sums over the rows of x.
static eng_status encode_turned(fp8_mx_copies *to, const fp8_site *s, const eng_fp8_role *r,
                                const eng_fp8_product *p, tensor *x)
{
  fp8_mx_copies made = {0};
  tensor *y = NULL;
  if (p->hadamard) {
    made.q = to->q_t, made.amax = to->amax_t;
    ENG_TRY(rotate(&y, s, p, x, true));
  } else {
    made.q_t = to->q_t, made.amax_t = to->amax_t;
  }
  eng_status status = encode(&made, r, y ? y : x, !y);
  if (y) tensor_drop(y);
  if (status != ENG_OK) return status;
  to->q_t = y ? made.q : made.q_t, to->amax_t = y ? made.amax : made.amax_t;
  tensor_drop(made.scale);
  if (!y) tensor_drop(made.q), tensor_drop(made.amax);
  return ENG_OK;
}

eng_status fp8_mx_quantize(fp8_mx_copies *to, tensor *slot, fp8_site *s, int role, tensor *x,
                           bool transposed)
{
  // the products that read a role's copy and its transposed copy
  static const int readers[][2] = {{ENG_FP8_FORWARD, ENG_FP8_WGRAD},
                                   {ENG_FP8_FORWARD, ENG_FP8_DGRAD},
                                   {ENG_FP8_DGRAD, ENG_FP8_WGRAD}};
  const eng_fp8_role *r = &s->recipe.role[role];
  const eng_fp8_product *along = &s->recipe.product[readers[role][0]],
                        *across = &s->recipe.product[readers[role][1]];
  bool apart = transposed && (along->hadamard || across->hadamard);
  tensor *y = NULL;
  fp8_mx_copies made = *to;
  if (apart) made.q_t = made.amax_t = NULL;
  if (along->hadamard) ENG_TRY(rotate(&y, s, along, x, false));
  eng_status status = encode(&made, r, y ? y : x, transposed && !apart);
  if (status == ENG_OK) {
    to->q = made.q, to->scale = made.scale, to->amax = made.amax;
    to->gate = made.gate;
    if (!apart) to->q_t = made.q_t, to->amax_t = made.amax_t;
    if (fp8_measuring()) status = measure(s, role, y ? y : x, to->q, to->scale, to->amax);
  }
  if (y) tensor_drop(y);
  if (status == ENG_OK && apart) status = encode_turned(to, s, r, across, x);
  return status == ENG_OK ? copy_into(&slot, to->amax) : status;
}

// Multiplies *y by NVFP4's scale of the whole tensor `of`, if it has one.
static eng_status scale_by(tensor **y, const fp8_mx_factor *of)
{
  tensor *factor, *scaled;
  int rule = of->role->mx - 1;
  if (!mx_is_nvfp4(rule)) return ENG_OK;
  ENG_TRY(op_run1(&factor, (op_call){.op = ENG_OP_affine, .n_out = 1, .in = {of->amax},
                                     .affine = {.factor = 1.0 / (double)nvfp4_top(rule)}}));
  eng_status status =
    op_run1(&scaled, (op_call){.op = ENG_OP_mul, .n_out = 1, .in = {*y, factor}});
  tensor_drop(factor);
  if (status != ENG_OK) return status;
  tensor_drop(*y);
  *y = scaled;
  return ENG_OK;
}

eng_status fp8_mx_requantize(fp8_mx_copies *to, const fp8_site *s, int role, tensor *q,
                             tensor *amax)
{
  const eng_fp8_product *p = &s->recipe.product[role == ENG_FP8_X ? ENG_FP8_WGRAD : ENG_FP8_DGRAD];
  tensor *values;
  int64_t columns = q->shape[q->ndim - 1];
  ENG_TRY(op_reshape(&values, q, 2, (int64_t[]){columns ? q->count / columns : 0, columns}));
  eng_status status = scale_by(&values, &(fp8_mx_factor){.amax = amax,
                                                         .role = &s->recipe.role[role]});
  if (status == ENG_OK) status = encode_turned(to, s, &s->recipe.backward[role], p, values);
  tensor_drop(values);
  return status;
}

eng_status fp8_mx_through(tensor **g, const fp8_site *s, tensor *gate, int dtype)
{
  const eng_fp8_product *p = &s->recipe.product[ENG_FP8_FORWARD];
  op_call steps[] = {
    {.op = ENG_OP_mul, .n_out = 1, .in = {NULL, gate}},
    {.op = ENG_OP_hadamard, .in = {NULL},
     .hadamard = {.n = p->hadamard, .signs = ENG_FP8_SIGNS_NONE, .dtype = dtype}},
  };
  bool wanted[] = {gate != NULL, p->hadamard != 0};
  for (int k = 0; k < 2; k++) {
    tensor *next;
    if (!wanted[k]) continue;
    steps[k].in[0] = *g;
    ENG_TRY(op_run1(&next, steps[k]));
    tensor_drop(*g);
    *g = next;
  }
  return ENG_OK;
}

eng_status fp8_mx_multiply(tensor **y, const fp8_mx_factor *a, const fp8_mx_factor *b, tensor *bias,
                           int dtype, bool add)
{
  double factor = (a->role->factor != 0 ? a->role->factor : 1) *
                  (b->role->factor != 0 ? b->role->factor : 1);
  bool after = mx_is_nvfp4(a->role->mx - 1) || mx_is_nvfp4(b->role->mx - 1) || factor != 1 || bias;
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
  eng_status status = scale_by(&sum, a);
  if (status == ENG_OK) status = scale_by(&sum, b);
  if (status == ENG_OK && factor != 1) {
    status = op_run1(&more, (op_call){.op = ENG_OP_affine, .in = {sum},
                                      .affine = {.factor = 1 / factor}});
    if (status == ENG_OK) tensor_drop(sum), sum = more;
  }
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
