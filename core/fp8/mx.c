// Linear layers under a microscaling recipe. A role's copies hold, in bf16, the numbers that the
// codes represent. An ordinary matmul multiplies them; the product of two such numbers is exact in
// f32. NVFP4's scale of the whole tensor (amax / 2688 under the rule nvfp4) is not part of the
// copies, because bf16 would round the scaled numbers. Instead, the f32 sums are multiplied by both
// operands' scales of the whole tensor and divided by both roles' `factor`.
//
// If the accumulator is BLACKWELL, or if it is DEVICE and the card's tensor cores multiply codes,
// the copies hold codes and scales instead, for mx_matmul, provided that formats and sizes fit.
// fp8_mx_coded decides this for a layer's three products together, at each call.
//
// With eng_fp8_recipe.backward, the backward products read the numbers that the forward product
// read, unchanged or quantized again. Their results are the gradients of these numbers, and
// fp8_mx_through turns them into the gradients of x and W. dy may be in FP8 with power-of-two
// scales; its copy holds the values of the codes, which are exact in bf16. Called by linear.c; see
// its head.
#include "sites.h"

#include "base/error.h"
#include "base/mx_blackwell.h"
#include "base/rng.h"
#include "device/transfer.h"

#include <stdlib.h>

static eng_status copy_into(tensor *out, tensor *x)
{
  op_call c = {.op = ENG_OP_contiguous, .n_in = 1, .n_out = 1, .in = {x}, .out = {out}};
  return op_run(&c);
}

// ---- codes

// Returns the format and blocks in which a product reads x, w or dy.
static const eng_fp8_role *role_in(const fp8_site *s, int product, int role)
{
  bool again = product != ENG_FP8_FORWARD && fp8_mx_again(s, role) && !fp8_mx_same(s, role);
  return again ? &s->recipe.backward[role] : &s->recipe.role[role];
}

// Returns whether mx_matmul accepts a matrix in this role, if the matrix's sides are multiples of
// `side`.
static bool fits(const eng_fp8_role *r, int64_t side)
{
  return r->block_columns == (mx_is_nvfp4(r->mx - 1) ? 16 : 32) && side % r->block_rows == 0 &&
         (r->format == ENG_e4m3 || r->format == ENG_e5m2 || mx_packed(r->format));
}

bool fp8_mx_coded(const fp8_site *s, int64_t rows, int64_t columns, int64_t outputs)
{
  bool coded = s->recipe.role[0].mx && rows > 0 && outputs > 0;
  for (int p = 0; p < ENG_FP8_PRODUCTS && coded; p++) {
    const eng_fp8_role *a = role_in(s, p, fp8_factors[p][0]),
                       *b = role_in(s, p, fp8_factors[p][1]);
    int accumulator = s->recipe.product[p].accumulator;
    bool nvfp4 = mx_is_nvfp4(a->mx - 1), four = mx_packed(a->format);
    int64_t side = blackwell_products(four);
    coded = nvfp4 == mx_is_nvfp4(b->mx - 1) && four == mx_packed(b->format) && fits(a, side) &&
            fits(b, side) && rows % side == 0 && columns % side == 0 && outputs % side == 0;
    if (!coded || s->recipe.product[p].high) continue;
    bool (*card)(int64_t, int64_t, bool) = backend_current()->mx;
    coded = accumulator == ENG_ACCUMULATE_BLACKWELL ||
            (accumulator == ENG_ACCUMULATE_DEVICE && card && card(a->format, b->format, nvfp4));
  }
  return coded;
}

// Returns how many bytes a block of one row takes, for its codes and its scale.
static int64_t block_bytes(const eng_fp8_role *r)
{ return r->block_columns / (mx_packed(r->format) ? 2 : 1) + 1; }

eng_status fp8_mx_make(tensor **out, arena_id arena, const eng_fp8_role *r, int64_t rows,
                       int64_t columns)
{
  return tensor_make(out, arena, ENG_u8, 2,
                     (int64_t[]){rows, columns / r->block_columns * block_bytes(r)});
}

// Creates views of the codes and of the scales of a coded copy.
static eng_status open_codes(tensor **codes, tensor **scales, tensor *copy, const eng_fp8_role *r)
{
  int64_t rows = copy->shape[0], blocks = copy->shape[1] / block_bytes(r),
          width = copy->shape[1] - blocks;
  ENG_TRY(tensor_view(codes, copy, 0, 2, (int64_t[]){rows, width}, (int64_t[]){width, 1}));
  return tensor_view(scales, copy, rows * width, 2, (int64_t[]){rows / r->block_rows, blocks},
                     (int64_t[]){blocks, 1});
}

// Computes the values of a coded copy, in bf16.
static eng_status decode(tensor **values, tensor *copy, const eng_fp8_role *r)
{
  OWNED tensor *codes = NULL, *scales = NULL;
  ENG_TRY(open_codes(&codes, &scales, copy, r));
  return op_run1(values, (op_call){.op = ENG_OP_mx_dequantize, .in = {codes, scales},
                                   .mx_dequantize = {.dtype = ENG_bf16,
                                                     .format = r->format,
                                                     .block_rows = r->block_rows,
                                                     .block_columns = r->block_columns,
                                                     .rule = r->mx - 1}});
}

// ---- quantizing

// Does the work of fp8_measure for microscaling. x: the tensor before quantization; q: its
// quantized values.
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
  // Magnitudes above `limit` count as overflow. The limit is the format's largest number plus half
  // a step. If this midpoint itself rounds up, the limit is the next smaller f32.
  float limit = 1.5f * f.largest - 0.5f * mx_value((uint8_t)(f.top - 1), f);
  if (f.top & 1 && !mx_is_gated(r->mx - 1)) limit = f32_from(f32_bits(limit) - 1);
  for (int64_t i = 0; i < m.rows; i++)
    for (int64_t k = 0; k < m.columns; k++) {
      int64_t at = i * m.every / r->block_rows * scale->shape[1] +
                   (r->block_columns ? k / r->block_columns : 0);
      uint8_t code = (uint8_t)m.scale[at];
      float unit = mx_is_nvfp4(r->mx - 1) ? e4m3_to_f32(code) : ue8m0_to_f32(code),
            number = m.q[i * m.columns + k];
      fp8_meter_element(&s->meter[role], m.x[i * m.columns + k], unit > 0 ? number / unit : 0,
                        unit * whole, f.largest, limit);
    }
  free(m.x);
  return ENG_OK;
}

// Returns the attribute `signs` that the operation hadamard gets for a product. Random signs differ
// from one product of a layer to another.
static int64_t signs_of(const fp8_site *s, const eng_fp8_product *p)
{
  if (p->signs <= ENG_FP8_SIGNS_FIXED) return p->signs;
  uint64_t hash = 0xCBF29CE484222325u;   // FNV-1a of the name and the product
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

static eng_status allow_signs(const eng_fp8_product *p)
{
  return changes(p) ? backend_forbids("a Hadamard transform with new signs in each step") : ENG_OK;
}

// Applies a product's Hadamard transform to the rows of x.
static eng_status rotate(tensor **y, const fp8_site *s, const eng_fp8_product *p, tensor *x)
{
  ENG_TRY(allow_signs(p));
  return op_run1(y, (op_call){.op = ENG_OP_hadamard, .in = {x},
                              .hadamard = {.n = p->hadamard, .signs = signs_of(s, p),
                                           .dtype = ENG_bf16}});
}

static eng_status encode_msamp(fp8_copies *to, tensor **scale, const eng_fp8_role *r, tensor *x)
{
  op_call c = {.op = ENG_OP_msamp_fp4, .n_in = 1, .n_out = 4,
               .in = {x},
               .out = {to->q, NULL, to->scale, to->gate},
               .msamp_fp4 = {.gate = r->dge, .drops = r->drops, .clamp = r->clamp}};
  ENG_TRY(op_run(&c));
  *to = (fp8_copies){.q = c.out[0], .scale = c.out[2], .gate = c.out[3]};
  *scale = c.out[1];
  return ENG_OK;
}

/// Quantizes dy in FP8. to->q gets the values of the codes, in bf16.
static eng_status quantize_fp8(fp8_copies *to, fp8_site *s, int role, tensor *x)
{
  const eng_fp8_role *r = &s->recipe.role[role];
  op_call c = fp8_quantize_call(s, role, x, false);
  ENG_TRY(op_run(&c));
  OWNED tensor *q = c.out[0], *scale = c.out[1];
  to->scale = c.out[2];
  if (fp8_measuring()) ENG_TRY(fp8_measure(s, role, x, q, scale));
  return op_run1(&to->q, (op_call){.op = ENG_OP_dequantize, .in = {q, scale},
                                   .dequantize = {.dtype = ENG_bf16,
                                                  .block_rows = r->block_rows,
                                                  .block_columns = r->block_columns}});
}

// Quantizes x. With QUANTIZE_TRANSPOSED in `flags`, also quantizes the transposed x, which
// `product` reads. If `product` has a Hadamard transform, the transposed x is transformed first.
// With MX_ROTATED_ONLY in `flags`, makes only the transposed copy. Sets *scale to the scales of q's
// blocks.
static eng_status encode(fp8_copies *to, tensor **scale, const fp8_site *s, const eng_fp8_role *r,
                         tensor *x, int64_t flags, const eng_fp8_product *product, bool coded)
{
  if (r->mx - 1 == ENG_MX_MSAMP_FP4) return encode_msamp(to, scale, r, x);
  bool transposed = flags & QUANTIZE_TRANSPOSED, only = flags & MX_ROTATED_ONLY;
  int gate = mx_is_gated(r->mx - 1) && !only ? MX_GATE : 0;
  // if coded: x as a matrix; views of the codes and scales of q and of q_t
  OWNED tensor *flat = NULL, *codes = NULL, *scales = NULL, *codes_t = NULL, *scales_t = NULL;
  tensor *average;
  ENG_TRY(fp8_average(&average, s, r));
  op_call c = {.op = ENG_OP_mx_quantize, .n_in = 3, .n_out = 8,
               .in = {x, NULL, average},
               .out = {to->q, NULL, to->scale, to->q_t, NULL, NULL, to->scale_t, to->gate},
               .mx_quantize = {.format = r->format,
                               .block_rows = r->block_rows,
                               .block_columns = r->block_columns,
                               .rule = r->mx - 1,
                               .flags = (coded ? 0 : MX_VALUES) | gate | flags,
                               .sr_bits = r->stochastic,
                               .factor = r->factor}};
  if (transposed && product->hadamard) {
    ENG_TRY(allow_signs(product));
    c.mx_quantize.hadamard = product->hadamard;
    c.mx_quantize.signs = signs_of(s, product);
  }
  if (coded) {
    int64_t columns = x->shape[x->ndim - 1], rows = x->count / columns;
    ENG_TRY(op_rows(&flat, x));
    if (!only && !to->q) ENG_TRY(fp8_mx_make(&to->q, ARENA_STEP, r, rows, columns));
    if (!only) ENG_TRY(open_codes(&codes, &scales, to->q, r));
    if (transposed && !to->q_t) ENG_TRY(fp8_mx_make(&to->q_t, ARENA_STEP, r, columns, rows));
    if (transposed) ENG_TRY(open_codes(&codes_t, &scales_t, to->q_t, r));
    c.in[0] = flat;
    c.out[0] = codes, c.out[1] = scales, c.out[3] = codes_t, c.out[4] = scales_t;
  }
  ENG_TRY(op_run(&c));
  *to = (fp8_copies){coded ? to->q : c.out[0], c.out[2], coded ? to->q_t : c.out[3], c.out[6],
                     c.out[7]};
  *scale = c.out[1];
  scales = NULL;           // *scale is this view
  tensor_drop(c.out[5]);
  if (!coded) tensor_drop(c.out[4]);
  if (!coded || !gate || x->ndim == 2) return ENG_OK;
  OWNED tensor *flat_gate = c.out[7];
  return op_reshape(&to->gate, flat_gate, x->ndim, x->shape);
}

// Quantizes x transposed, for the product that sums over the rows of x.
static eng_status encode_turned(fp8_copies *to, const fp8_site *s, const eng_fp8_role *r,
                                const eng_fp8_product *p, tensor *x, bool coded)
{
  fp8_copies made = {.q_t = to->q_t, .scale_t = to->scale_t};
  OWNED tensor *scale = NULL;
  int64_t flags = QUANTIZE_TRANSPOSED | (p->hadamard ? MX_ROTATED_ONLY : 0);
  ENG_TRY(encode(&made, &scale, s, r, x, flags, p, coded));
  to->q_t = made.q_t, to->scale_t = made.scale_t;
  made.q_t = made.scale_t = NULL;
  fp8_drop_copies(&made);
  return ENG_OK;
}

eng_status fp8_mx_quantize(fp8_copies *to, tensor *slot, fp8_site *s, int role, tensor *x,
                           bool transposed, bool coded)
{
  // per role: the product that reads the copy, and the product that reads the transposed copy
  static const int readers[][2] = {{ENG_FP8_FORWARD, ENG_FP8_WGRAD},
                                   {ENG_FP8_FORWARD, ENG_FP8_DGRAD},
                                   {ENG_FP8_DGRAD, ENG_FP8_WGRAD}};
  const eng_fp8_role *r = &s->recipe.role[role];
  const eng_fp8_product *along = &s->recipe.product[readers[role][0]],
                        *across = &s->recipe.product[readers[role][1]];
  bool apart = transposed && along->hadamard;   // q is made from rotated x, q_t from x itself
  OWNED tensor *y = NULL, *scale = NULL;
  fp8_copies made = *to;
  if (!r->mx) {
    ENG_TRY(quantize_fp8(to, s, role, x));
    return copy_into(slot, to->scale);
  }
  if (apart) made.q_t = made.scale_t = NULL;
  if (along->hadamard) ENG_TRY(rotate(&y, s, along, x));
  ENG_TRY(encode(&made, &scale, s, r, y ? y : x, transposed && !apart ? QUANTIZE_TRANSPOSED : 0,
                 across, coded));
  if (apart) made.q_t = to->q_t, made.scale_t = to->scale_t;
  *to = made;
  if (fp8_measuring()) {
    OWNED tensor *values = NULL;
    if (coded) ENG_TRY(decode(&values, to->q, r));
    ENG_TRY(measure(s, role, y ? y : x, coded ? values : to->q, scale, to->scale));
  }
  tensor_drop(y);
  y = NULL;
  if (apart) ENG_TRY(encode_turned(to, s, r, across, x, coded));
  return copy_into(slot, to->scale);
}

// Multiplies *y by one number: the product of `factor` and the f32 scales that operands a and b
// have for the whole tensor, as in NVFP4. Operands under other rules have no such scale. b may be
// NULL. mx_alpha does the same for mx_matmul.
static eng_status scale_by(tensor **y, const fp8_factor *a, const fp8_factor *b, double factor)
{
  const fp8_factor *of[] = {a, b};
  OWNED tensor *alpha = NULL;
  for (int k = 0; k < 2; k++) {
    int rule = of[k] ? of[k]->role->mx - 1 : 0;
    OWNED tensor *scale = NULL;
    if (!of[k] || !mx_is_nvfp4(rule)) continue;
    ENG_TRY(op_affine(&scale, of[k]->scale, 1.0 / (double)nvfp4_top(rule), 0));
    if (alpha) ENG_TRY(op_replace(&scale, (op_call){.op = ENG_OP_mul, .in = {NULL, alpha}}));
    tensor *before = alpha;
    alpha = scale;
    scale = before;
  }
  if (factor != 1)
    ENG_TRY(op_replace(alpha ? &alpha : y,
                       (op_call){.op = ENG_OP_affine, .affine = {.factor = factor}}));
  return alpha ? op_replace(y, (op_call){.op = ENG_OP_mul, .in = {NULL, alpha}}) : ENG_OK;
}

eng_status fp8_mx_requantize(fp8_copies *to, const fp8_site *s, int role, tensor *q,
                             tensor *amax)
{
  const eng_fp8_product *p = &s->recipe.product[role == ENG_FP8_X ? ENG_FP8_WGRAD : ENG_FP8_DGRAD];
  OWNED tensor *values = NULL;
  bool coded = q->dtype == ENG_u8;
  if (coded) ENG_TRY(decode(&values, q, &s->recipe.role[role]));
  else ENG_TRY(op_rows(&values, q));
  fp8_factor read = {.scale = amax, .role = &s->recipe.role[role]};
  ENG_TRY(scale_by(&values, &read, NULL, 1));
  return encode_turned(to, s, &s->recipe.backward[role], p, values, coded);
}

eng_status fp8_mx_through(tensor **g, const fp8_site *s, tensor *gate, int dtype)
{
  const eng_fp8_product *p = &s->recipe.product[ENG_FP8_FORWARD];
  if (gate) ENG_TRY(op_replace(g, (op_call){.op = ENG_OP_mul, .in = {NULL, gate}}));
  if (!p->hadamard) return ENG_OK;
  return op_replace(g, (op_call){.op = ENG_OP_hadamard,
                                 .hadamard = {.n = p->hadamard, .signs = ENG_FP8_SIGNS_NONE,
                                              .dtype = dtype}});
}

eng_status fp8_mx_multiply(tensor **y, const fp8_factor *a, const fp8_factor *b, tensor *bias,
                           int dtype, bool add)
{
  double factor = (a->role->factor != 0 ? a->role->factor : 1) *
                  (b->role->factor != 0 ? b->role->factor : 1);
  bool coded = a->q->dtype == ENG_u8, nvfp4_a = mx_is_nvfp4(a->role->mx - 1),
       nvfp4_b = mx_is_nvfp4(b->role->mx - 1);
  bool after = bias || (!coded && (nvfp4_a || nvfp4_b || factor != 1));
  op_call c = {.op = ENG_OP_matmul, .n_in = 2, .n_out = 1,
               .in = {a->q, b->q},
               .out = {after ? NULL : *y},
               .matmul = {.transpose_a = a->turned,
                          .transpose_b = b->turned,
                          .yields = (after ? ENG_f32 : dtype) + 1,
                          .add = !after && add}};
  OWNED tensor *qa = NULL, *scale_a = NULL, *qb = NULL, *scale_b = NULL;
  if (coded) {
    ENG_TRY(open_codes(&qa, &scale_a, a->q, a->role));
    ENG_TRY(open_codes(&qb, &scale_b, b->q, b->role));
    c = (op_call){.op = ENG_OP_mx_matmul, .n_in = 6, .n_out = 1,
                  .in = {qa, scale_a, qb, scale_b, nvfp4_a ? a->scale : NULL,
                         nvfp4_b ? b->scale : NULL},
                  .out = {after ? NULL : *y},
                  .mx_matmul = {.format_a = a->role->format,
                                .format_b = b->role->format,
                                .rule_a = a->role->mx - 1,
                                .rule_b = b->role->mx - 1,
                                .yields = (after ? ENG_f32 : dtype) + 1,
                                .add = !after && add,
                                .factor = 1 / factor}};
  }
  ENG_TRY(op_run(&c));
  if (!after) {
    *y = c.out[0];
    return ENG_OK;
  }
  OWNED tensor *sum = c.out[0];
  if (!coded) ENG_TRY(scale_by(&sum, a, b, 1 / factor));
  if (bias) ENG_TRY(op_replace(&sum, (op_call){.op = ENG_OP_add, .in = {NULL, bias}}));
  if (add) ENG_TRY(op_replace(&sum, (op_call){.op = ENG_OP_add, .in = {NULL, *y}}));
  op_call round = {.op = ENG_OP_cast, .n_in = 1, .n_out = 1, .in = {sum}, .out = {*y},
                   .cast = {.dtype = dtype}};
  ENG_TRY(op_run(&round));
  *y = round.out[0];
  return ENG_OK;
}
