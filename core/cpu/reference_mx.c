// Reference kernels for mx_quantize, hadamard, mx_dequantize and mx_matmul. They work element by
// element, find exponents with frexp, and round in f64. The fast kernels must agree with them bit
// for bit, except for the payloads of NaNs. See reference.h, ops.def. Called through reference.c.
#include "reference_side.h"

#include "base/mx_blackwell.h"
#include "base/rng.h"
#include "device/rotated_copy.h"

#include <math.h>

// Returns the exponent of a block's scale, computed from a finite amax.
static int exponent_of(float amax, const mx_format *f, int rule)
{
  int e, emax = f->emax;
  double a = amax;
  if (rule == ENG_MX_RCEIL) {
    a = amax * (float)(1.0 / (double)f->largest);
    emax = 0;
  }
  if (a == 0) return -127;
  double part = 2 * frexp(a, &e);   // 1 <= part < 2
  e--;
  bool up = (rule == ENG_MX_CEIL || rule == ENG_MX_RCEIL) && part > 1;
  if (rule == ENG_MX_EVEN) up = part >= 2 - ldexp(1, -1 - f->fraction);
  // Rules other than rceil read the exponent field, which gives -127 for a subnormal amax. This
  // matters only for mxint8, whose emax is 0: other formats reach the lower limit of -127 in any
  // case.
  if (rule != ENG_MX_RCEIL && a < 0x1p-126) {
    e = -127;
    up = rule == ENG_MX_CEIL ||
         (rule == ENG_MX_EVEN && a >= 0x1p-126 - ldexp(1, -127 - f->fraction));
  }
  e += up - emax;
  return e < -127 ? -127 : e > 127 ? 127 : e;
}

// Returns the distance between neighbouring numbers of the format in the binade of a, a >= 0.
static double step_at(double a, const mx_format *f)
{
  int e;
  frexp(a, &e);
  if (a == 0 || --e < 1 - f->bias) e = 1 - f->bias;
  return ldexp(1, e - f->fraction);
}

static double truncated(double a, const mx_format *f)
{ return step_at(a, f) * floor(a / step_at(a, f)); }

// Returns the code of a scaled number x. Rounds to nearest even or, if sr_bits is not 0,
// stochastically by the random word.
static uint8_t code_of(double x, const mx_format *f, int sr_bits, uint32_t random)
{
  if (x != x) return (uint8_t)f->nan;
  double a = fabs(x);
  if (sr_bits) {
    double u = ldexp((double)(random >> (32 - sr_bits)), -sr_bits);
    if (a < f->largest) a = fmaf((float)u, (float)step_at(a, f), (float)a);
    a = truncated(fmin(a, f->largest), f);
  }
  int code = a >= 2.0 * f->largest ? f->top : (int)small_code(f64_bits(a), f->fraction, f->bias);
  if (code > f->top) code = f->top;
  bool negative = signbit(x);
  return (uint8_t)(f->sign ? code | (negative ? f->sign : 0) : negative ? -code : code);
}

// Does the work of code_of for calls that set `ties` or `sr_rule`, or have an average. `toward` is
// the average, multiplied by the same factor as x.
static uint8_t studied_code_of(const op_call *call, double x, double toward, const mx_format *f,
                               uint32_t random)
{
  const typeof(call->mx_quantize) *q = &call->mx_quantize;
  double a = fabs(x), step = step_at(a, f), below = truncated(a, f), over = a - below, u = 0;
  bool away = q->ties == MX_TIES_AWAY || (q->ties == MX_TIES_UP && !signbit(x)), up;
  if (!(a < f->largest)) return code_of(x, f, 0, 0);
  if (q->sr_bits) u = ldexp((double)(random >> (32 - q->sr_bits)), (int)-q->sr_bits);
  if (call->in[2]) up = (signbit(x) ? -toward : toward) >= below + step / 2;
  else if (q->sr_bits) up = over > u * step;
  else up = over > step / 2 || (over == step / 2 && away);
  a = up ? below + step : below;
  if (q->sr_rule == MX_SR_MSLK) {
    int e;
    frexp(x, &e);
    a = fmaf((float)u, (float)ldexp(x != 0, e - 1 - f->fraction), fabsf((float)x));
    a = truncated(fmin(a, f->largest), f);
  }
  return code_of(copysign(a, x), f, 0, 0);
}

// Sets *e to the exponent of a block's scale under QuEST. Returns false if the block holds Inf or
// NaN.
static bool quest_exponent(int *e, const side *s, int64_t r, int64_t c0, int64_t columns)
{
  double sum = 0, squares = 0;
  for (int64_t c = c0; c < c0 + columns; c++) {
    double x = x_at(s, r, c);
    sum += x, squares += x * x;
  }
  double mean = sum / (double)columns, variance = fmax(squares / (double)columns - mean * mean, 0);
  if (!isfinite(squares)) return false;
  frexp((float)(2.92247856 / 6 * sqrt(variance) + 1e-8), e);
  (*e)--;
  return true;
}

// Returns the e2m1 code nearest to x. Of two equally near codes, returns the code closer to zero.
static uint8_t nearest_of(double x)
{
  mx_format f = mx_format_of(ENG_FORMAT_E2M1);
  int best = 0;
  double a = fmin(fabs(x), f.largest);   // else 0 and 6 would seem equally near to 1e20
  if (x != x) return 7;
  for (int code = 1; code < 8; code++)
    if (fabs(mx_value((uint8_t)code, f) - a) < fabs(mx_value((uint8_t)best, f) - a))
      best = code;
  return (uint8_t)(best | (signbit(x) ? 8 : 0));
}

// Returns the factor on a block's scale. Under "four over six", it is 1.5 if mapping the block's
// amax to 4 gives a smaller error than mapping it to 6, else 1. Under other rules, it is 1.
static float stretch_of(const side *s, int64_t r0, int64_t rows, int64_t c0, int64_t columns,
                        float amax)
{
  int64_t rule = s->call->mx_quantize.rule;
  float error[2][128] = {0};
  mx_format f = mx_format_of(ENG_FORMAT_E2M1);
  for (int four = 0; four < 2 && mx_is_four_over_six(rule); four++) {
    uint8_t scale = nvfp4_scale(amax, s->encode, rule, four ? 1.5f : 1);
    float factor = nvfp4_factor(scale, s->encode);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = 0; c < columns; c++) {
        float x = x_at(s, r0 + r, c0 + c);
        uint8_t code = code_of((double)(x * factor), &f, 0, 0);
        error[four][r] += nvfp4_error(x, mx_value(code, f) * e4m3_to_f32(scale), s->amax, rule);
      }
    for (int half = 64; half > 0; half /= 2)
      for (int r = 0; r < half; r++) error[four][r] += error[four][r + half];
  }
  return error[1][0] < error[0][0] ? 1.5f : 1;
}

static void store(const side *s, int64_t element, uint8_t code, double value)
{
  if (s->call->mx_quantize.flags & MX_VALUES) {
    ((uint16_t *)s->q->data)[element] = bf16_from_f64(value);
  } else if (mx_packed(s->call->mx_quantize.format)) {
    uint8_t *pair = (uint8_t *)s->q->data + element / 2;
    *pair = (uint8_t)(element % 2 ? (*pair & 15) | code << 4 : code);
  } else {
    ((uint8_t *)s->q->data)[element] = code;
  }
}

// Quantizes one group by MS-EDEN. The group is `columns` elements of row r, from column c0 on.
static void quantize_group(const side *s, int64_t r, int64_t c0, int64_t columns)
{
  const typeof(s->call->mx_quantize) *a = &s->call->mx_quantize;
  mx_format f = mx_format_of(a->format), e4m3 = mx_format_of(ENG_e4m3);
  double over = 0, under = 0;
  uint8_t code[MX_EDEN_GROUP], first[MX_EDEN_GROUP];
  for (int64_t c = 0; c < columns; c += a->block_columns) {
    int64_t end = c + a->block_columns < columns ? c + a->block_columns : columns;
    first[c] = nvfp4_scale(block_amax(s, r, 1, c0 + c, end - c, true), s->encode, a->rule, 1);
    if (first[c] == 0) first[c] = 0x38;   // 1 in e4m3
    for (int64_t i = c; i < end; i++) {
      double y = x_at(s, r, c0 + i) * nvfp4_factor(first[c], s->encode);
      code[i] = code_of(y, &f, 0, 0);
      over += y * y;
      under += y * mx_value(code[i], f);
    }
  }
  float correction = under == 0 ? 1.0f : (float)(over / under);
  for (int64_t i = 0; i < columns; i++) {
    int64_t c = i / a->block_columns * a->block_columns,
            number = r * ((s->columns + a->block_columns - 1) / a->block_columns) +
                     (c0 + c) / a->block_columns;
    uint32_t word[4] = {0};
    if (a->sr_bits) philox_block(word, s->random + (uint64_t)(number / 4));
    uint8_t scale = code_of((double)(e4m3_to_f32(first[c]) * correction), &e4m3, (int)a->sr_bits,
                            word[number % 4]);
    ((uint8_t *)s->scale->data)[number] = scale;
    store(s, r * s->columns + c0 + i, code[i],
          (double)(float)(mx_value(code[i], f) * e4m3_to_f32(scale)));
  }
}

static void quantize_groups(const side *s)
{
  for (int64_t r = 0; r < s->rows; r++)
    for (int64_t c = 0; c < s->columns; c += MX_EDEN_GROUP)
      quantize_group(s, r, c, s->columns - c < MX_EDEN_GROUP ? s->columns - c : MX_EDEN_GROUP);
}

static void quantize_side(const side *s)
{
  const typeof(s->call->mx_quantize) *a = &s->call->mx_quantize;
  bool finite = a->flags & MX_FINITE, studied = s->call->in[2] || a->ties || a->sr_rule;
  mx_format f = mx_format_of(a->format);
  uint8_t *scales = s->scale->data;
  for (int64_t r0 = 0; r0 < s->rows; r0 += a->block_rows)
    for (int64_t c0 = 0; c0 < s->columns; c0 += a->block_columns) {
      int64_t rows = s->rows - r0 < a->block_rows ? s->rows - r0 : a->block_rows,
              columns = s->columns - c0 < a->block_columns ? s->columns - c0 : a->block_columns;
      float amax = block_amax(s, r0, rows, c0, columns, !finite);
      double factor, scale;
      uint8_t code;
      if (mx_is_nvfp4(a->rule)) {
        code = nvfp4_scale(amax, s->encode, a->rule, stretch_of(s, r0, rows, c0, columns, amax));
        scale = e4m3_to_f32(code);
        factor = nvfp4_factor(code, s->encode);
      } else {
        // `inf` tells whether the rule `even` rounds the amax to Inf.
        bool inf = a->rule == ENG_MX_EVEN && amax >= 0x1p128 - ldexp(1, 126 - f.fraction);
        bool number = isfinite(amax) && (finite || !inf);
        int e = 127;
        if (a->rule == ENG_MX_QUEST) number = quest_exponent(&e, s, r0, c0, columns);
        else if (number) e = exponent_of(amax, &f, (int)a->rule);
        code = number || finite ? (uint8_t)(e + 127) : 255;
        scale = code == 255 ? NAN : ldexp(1, e);
        factor = code == 255 ? NAN : ldexp(1, -e);
      }
      if (a->factor != 0) factor = (float)factor * (float)a->factor;
      *scales++ = code;
      for (int64_t r = r0; r < r0 + rows; r++)
        for (int64_t c = c0; c < c0 + columns; c++) {
          int64_t element = r * s->columns + c;
          uint32_t word[4] = {0};
          if (a->sr_bits) philox_block(word, s->random + (uint64_t)(element / 4));
          double x = x_at(s, r, c) * factor;
          double toward = 0;
          if (s->call->in[2])
            toward = load_at(s->call->in[2], r * s->row + c * s->column) * factor;
          if (mx_is_nvfp4(a->rule) || a->factor != 0)
            x = (double)(float)x, toward = (double)(float)toward;
          uint8_t q = a->rule == ENG_MX_QUEST ? nearest_of(x)
                      : studied ? studied_code_of(s->call, x, toward, &f, word[element % 4])
                                : code_of(x, &f, (int)a->sr_bits, word[element % 4]);
          if (s->call->out[7])
            ((uint16_t *)s->call->out[7]->data)[element] = bf16_from_f64(fabs(x) < f.largest);
          store(s, element, q, (double)(float)(mx_value(q, f) * scale));
        }
    }
}

// Multiplies x[0 .. n) by the Hadamard matrix H, without the factor sqrt(1/n). H of size 2n is
// [[H, H], [H, -H]], where the inner H has size n.
static void hadamard(double *x, int n)
{
  if (n == 1) return;
  hadamard(x, n / 2);
  hadamard(x + n / 2, n / 2);
  for (int i = 0; i < n / 2; i++) {
    double one = x[i], other = x[i + n / 2];
    x[i] = one + other;
    x[i + n / 2] = one - other;
  }
}

eng_status reference_hadamard(const op_call *call)
{
  const tensor *x = call->in[0], *y = call->out[0];
  bool turned = call->hadamard.turned;
  int n = (int)call->hadamard.n;
  int64_t rows = row_count(x), columns = row_length(x), along = turned ? rows : columns,
          whole = along / n * n;
  side of = {.call = call, .row = turned ? 1 : columns, .column = turned ? columns : 1};
  uint32_t word[4] = {0};
  double a[128];
  if (call->hadamard.signs > 0) philox_block(word, (uint64_t)call->hadamard.signs);
  for (int64_t r = 0; r < (turned ? columns : rows); r++) {
    for (int64_t c = 0; c < whole; c += n) {
      for (int i = 0; i < n; i++)
        a[i] = x_at(&of, r, c + i) * mx_sign(call->hadamard.signs, word, i);
      hadamard(a, n);
      for (int i = 0; i < n; i++)
        store_at(y, r * along + c + i, a[i] * sqrt(1.0 / n));
    }
    for (int64_t c = whole; c < along; c++)
      store_at(y, r * along + c, x_at(&of, r, c));
  }
  return ENG_OK;
}

eng_status reference_mx_quantize(const op_call *call)
{
  if (call->mx_quantize.hadamard)
    return quantize_rotated(call, reference_hadamard, reference_mx_quantize);
  const tensor *x = call->in[0];
  int64_t columns = row_length(x), rows = row_count(x), nan = 0;
  side own = {.call = call, .rows = rows, .columns = columns, .row = columns, .column = 1,
              .q = call->out[0], .scale = call->out[1],
              .random = (uint64_t)call->mx_quantize.counter};
  bool finite = call->mx_quantize.flags & MX_FINITE;
  float amax = call->in[1] ? ((const float *)call->in[1]->data)[0]
                           : block_amax(&own, 0, rows, 0, columns, !finite);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) nan += x_at(&own, r, c) != x_at(&own, r, c);
  ((float *)call->out[2]->data)[0] = amax;
  ((int64_t *)call->out[5]->data)[0] = nan;
  own.amax = amax, own.encode = nvfp4_encode_scale(amax, call->mx_quantize.rule);
  if (call->mx_quantize.rule == ENG_MX_MS_EDEN) quantize_groups(&own);
  else quantize_side(&own);
  if (!call->out[3]) return ENG_OK;
  side turned = {.call = call, .rows = columns, .columns = rows, .row = 1, .column = columns,
                 .q = call->out[3], .scale = call->out[4], .encode = own.encode, .amax = amax,
                 .random = own.random + (uint64_t)((x->count + 3) / 4)};
  quantize_side(&turned);
  ((float *)call->out[6]->data)[0] = amax;
  // With square blocks, the transposed copy has the codes and scales of q, even after stochastic
  // rounding. Both are copied: under four over six, transposed blocks could get other scales,
  // because the errors that the rule compares depend on the order of the sums.
  int64_t length = call->mx_quantize.block_rows;
  if (length != call->mx_quantize.block_columns) return ENG_OK;
  int64_t down = (rows + length - 1) / length, across = (columns + length - 1) / length;
  for (int64_t i = 0; i < down * across; i++)
    ((uint8_t *)turned.scale->data)[i % across * down + i / across] =
      ((const uint8_t *)own.scale->data)[i];
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) {
      int64_t from = r * columns + c;
      const uint8_t *q = own.q->data;
      if (call->mx_quantize.flags & MX_VALUES)
        ((uint16_t *)turned.q->data)[c * rows + r] = ((const uint16_t *)own.q->data)[from];
      else if (mx_packed(call->mx_quantize.format))
        store(&turned, c * rows + r, q[from / 2] >> from % 2 * 4 & 15, 0);
      else
        store(&turned, c * rows + r, q[from], 0);
    }
  return ENG_OK;
}

eng_status reference_mx_dequantize(const op_call *call)
{
  const typeof(call->mx_dequantize) *a = &call->mx_dequantize;
  const uint8_t *q = call->in[0]->data, *scale = call->in[1]->data;
  const tensor *y = call->out[0];
  mx_format f = mx_format_of(a->format);
  int64_t rows = row_count(y), columns = row_length(y),
          across = (columns + a->block_columns - 1) / a->block_columns;
  float whole = 1;
  if (call->in[2]) whole = nvfp4_decode_scale(((const float *)call->in[2]->data)[0], a->rule);
  for (int64_t i = 0; i < rows * columns; i++) {
    uint8_t s = scale[i / columns / a->block_rows * across + i % columns / a->block_columns];
    float value = mx_value(mx_packed(a->format) ? q[i / 2] >> i % 2 * 4 & 15 : q[i], f);
    value *= mx_is_nvfp4(a->rule) ? e4m3_to_f32(s) : ue8m0_to_f32(s);
    store_at(y, i, mx_is_nvfp4(a->rule) ? value * whole : value);
  }
  return ENG_OK;
}

// Decodes n numbers of a row, from column k on. Writes them to x, and the scale of each 16 numbers
// to scale16.
static void decode(float *x, float *scale16, const tensor *q, const tensor *scale, int64_t row,
                   int64_t k, int n, int64_t format, int64_t rule)
{
  const uint8_t *code = q->data, *s = scale->data;
  int64_t K = mx_packed(format) ? 2 * q->shape[1] : q->shape[1], block = K / scale->shape[1],
          high = q->shape[0] / scale->shape[0];
  for (int i = 0; i < n; i++) {
    int64_t at = row * K + k + i;
    x[i] = mx_value(mx_packed(format) ? code[at / 2] >> at % 2 * 4 & 15 : code[at],
                    mx_format_of(format));
    scale16[i / 16] = blackwell_scale(s[row / high * scale->shape[1] + (k + i) / block],
                                      (int)rule);
  }
}

eng_status reference_mx_matmul(const op_call *call)
{
  const typeof(call->mx_matmul) *m = &call->mx_matmul;
  const tensor *a = call->in[0], *b = call->in[2], *y = call->out[0];
  float x[2][BLACKWELL_MOST], scale[2][BLACKWELL_MOST / 16],
        alpha = mx_alpha(call->in[4] ? call->in[4]->data : NULL, m->rule_a,
                         call->in[5] ? call->in[5]->data : NULL, m->rule_b, m->factor);
  int four = mx_packed(m->format_a), n = blackwell_products(four);
  int64_t K = four ? 2 * a->shape[1] : a->shape[1];
  for (int64_t i = 0; i < a->shape[0]; i++)
    for (int64_t j = 0; j < b->shape[0]; j++) {
      float sum = 0;
      for (int64_t k = 0; k < K; k += n) {
        decode(x[0], scale[0], a, call->in[1], i, k, n, m->format_a, m->rule_a);
        decode(x[1], scale[1], b, call->in[3], j, k, n, m->format_b, m->rule_b);
        sum = blackwell_group(x[0], mx_format_of(m->format_a), scale[0], x[1],
                              mx_format_of(m->format_b), scale[1], (int)m->rule_a, sum);
      }
      sum *= alpha;
      if (m->add) sum += (float)load_at(y, i * b->shape[0] + j);
      store_at(y, i * b->shape[0] + j, sum);
    }
  return ENG_OK;
}
