// The operation mx_matmul. It sums as Blackwell's tensor cores do (core/base/mx_blackwell.h). A
// task computes LANES columns of the result, from LANES rows of b. It takes ROWS rows of a at a
// time, so it decodes the rows of b once for ROWS rows of a. Where a number, a scale or a sum is
// Inf or NaN, blackwell_group computes the LANES sums of one row of a, one by one. Called through
// backend.kernel[]; owns nothing.
#include "base/mx_blackwell.h"
#include "rows.h"
#include "simd.h"
#include "tasks.h"

enum { LANES = 16, ROWS = 8 };

typedef struct product {
  const op_call *call;
  int64_t M, N, K;
  int     four;           // whether a and b are e2m1
  int     n, bits;        // blackwell_products and blackwell_bits of `four`
  float   alpha;
} product;

// What the tensor cores read of one row of a or b at a time: blackwell_products numbers, and a
// scale for each 16 of them. Numbers and scales are also split into significands and exponents.
// `odd` tells whether any number or scale is Inf or NaN.
typedef struct group {
  float  value[BLACKWELL_MOST], scale[BLACKWELL_MOST / 16];
  double significand[BLACKWELL_MOST], scale_significand[BLACKWELL_MOST / 16];
  int    exponent[BLACKWELL_MOST], scale_exponent[BLACKWELL_MOST / 16], odd;
} group;

static void decode(group *g, const product *p, int side, int64_t row, int64_t k)
{
  const op_call *c = p->call;
  const tensor *q = c->in[2 * side], *scale = c->in[2 * side + 1];
  int64_t rule = side ? c->mx_matmul.rule_b : c->mx_matmul.rule_a, across = scale->shape[1],
          block = p->K / across, high = q->shape[0] / scale->shape[0];
  mx_format f = mx_format_of(side ? c->mx_matmul.format_b : c->mx_matmul.format_a);
  const uint8_t *code = q->data, *s = scale->data;
  g->odd = 0;
  for (int i = 0; i < p->n; i++) {
    int64_t at = row * p->K + k + i;
    g->value[i] = mx_value(p->four ? code[at / 2] >> at % 2 * 4 & 15 : code[at], f);
    mx_parts x = mx_parts_of(g->value[i], 1 - f.bias);
    g->significand[i] = x.significand, g->exponent[i] = x.exponent;
    g->odd |= !f32_is_finite(g->value[i]);
  }
  for (int i = 0; i < p->n / 16; i++) {
    g->scale[i] = blackwell_scale(s[row / high * across + (k + 16 * i) / block], (int)rule);
    mx_parts x = mx_parts_of(g->scale[i], blackwell_least((int)rule));
    g->scale_significand[i] = x.significand, g->scale_exponent[i] = x.exponent;
    g->odd |= !f32_is_finite(g->scale[i]);
  }
}

// The groups of LANES rows of b. The last index of an array is the row. `odd` tells whether any of
// the rows holds Inf or NaN.
typedef struct panel {
  float  value[BLACKWELL_MOST][LANES];
  double significand[BLACKWELL_MOST][LANES], scale_significand[BLACKWELL_MOST / 16][LANES];
  int    exponent[BLACKWELL_MOST][LANES], scale_exponent[BLACKWELL_MOST / 16][LANES], odd;
} panel;

// Adds to each c[j] the products of `a` and row j of b. Truncates terms and sums as Blackwell does.
static void add_group(float *c, const product *p, const group *a, const panel *b)
{
  int terms = p->four ? 4 : 32, zero = blackwell_zero(p->four), exponent[32][LANES], largest[LANES];
  double term[32][LANES], sum[LANES];
  for (int j = 0; j < LANES; j++) largest[j] = blackwell_accumulator(c[j], p->four).exponent;
  for (int t = 0; t < terms; t++)
    for (int j = 0; j < LANES; j++) {
      int s = p->four ? t : t / 16;
      exponent[t][j] = a->scale_exponent[s] + b->scale_exponent[s][j];
      if (p->four) {
        float dot = 0, some = 0;
        for (int i = 16 * t; i < 16 * t + 16; i++) {
          float x = a->value[i] * b->value[i][j];
          dot += x;
          some += x < 0 ? -x : x;
        }
        double scale = a->scale_significand[t] * b->scale_significand[t][j];
        term[t][j] = dot * scale;
        if (some == 0 || scale == 0) exponent[t][j] = zero;
      } else {
        exponent[t][j] += a->exponent[t] + b->exponent[t][j];
        term[t][j] = a->significand[t] * b->significand[t][j];
        if (term[t][j] == 0) exponent[t][j] = zero;
      }
      if (exponent[t][j] > largest[j]) largest[j] = exponent[t][j];
    }
  for (int j = 0; j < LANES; j++) {
    mx_parts x = blackwell_accumulator(c[j], p->four);
    sum[j] =
      __builtin_trunc(x.significand * blackwell_power(x.exponent - largest[j] + p->bits));
  }
  for (int t = 0; t < terms; t++)
    for (int j = 0; j < LANES; j++)
      sum[j] +=
        __builtin_trunc(term[t][j] * blackwell_power(exponent[t][j] - largest[j] + p->bits));
  for (int j = 0; j < LANES; j++) c[j] = blackwell_round(sum[j], largest[j] - p->bits);
}

static void columns_task(const void *context, int64_t t)
{
  const product *p = context;
  const typeof(p->call->mx_matmul) *m = &p->call->mx_matmul;
  const tensor *y = p->call->out[0];
  int64_t j0 = t * LANES;
  int wide = (int)smaller(LANES, p->N - j0);
  panel b;
  group lane[LANES], a;
  for (int64_t i0 = 0; i0 < p->M; i0 += ROWS) {
    float c[ROWS][LANES] = {{0}};
    for (int64_t k = 0; k < p->K; k += p->n) {
      b.odd = 0;
      for (int j = 0; j < LANES; j++) {
        decode(&lane[j], p, 1, j0 + (j < wide ? j : 0), k);
        b.odd |= lane[j].odd;
        for (int i = 0; i < p->n; i++) {
          b.value[i][j] = lane[j].value[i], b.significand[i][j] = lane[j].significand[i];
          b.exponent[i][j] = lane[j].exponent[i];
        }
        for (int i = 0; i < p->n / 16; i++) {
          b.scale_significand[i][j] = lane[j].scale_significand[i];
          b.scale_exponent[i][j] = lane[j].scale_exponent[i];
        }
      }
      for (int i = 0; i < ROWS && i0 + i < p->M; i++) {
        decode(&a, p, 0, i0 + i, k);
        int odd = a.odd | b.odd;
        for (int j = 0; j < LANES; j++) odd |= !f32_is_finite(c[i][j]);
        if (!odd) add_group(c[i], p, &a, &b);
        for (int j = 0; odd && j < LANES; j++)
          c[i][j] = blackwell_group(a.value, mx_format_of(m->format_a), a.scale, lane[j].value,
                                    mx_format_of(m->format_b), lane[j].scale,
                                    (int)m->rule_a, c[i][j]);
      }
    }
    for (int i = 0; i < ROWS && i0 + i < p->M; i++)
      for (int j = 0; j < wide; j++) {
        int64_t at = (i0 + i) * p->N + j0 + j;
        float sum = c[i][j] * p->alpha;
        if (m->add) sum += (float)tensor_load(y->data, y->dtype, at);
        tensor_store(y->data, y->dtype, at, sum);
      }
  }
}

KERNEL(mx_matmul)
{
  const typeof(call->mx_matmul) *m = &call->mx_matmul;
  int four = mx_packed(m->format_a);
  product p = {.call = call, .M = call->in[0]->shape[0], .N = call->in[2]->shape[0],
               .K = call->in[0]->shape[1] * (four ? 2 : 1), .four = four,
               .n = blackwell_products(four), .bits = blackwell_bits(four),
               .alpha = mx_alpha(call->in[4] ? call->in[4]->data : NULL, m->rule_a,
                                 call->in[5] ? call->in[5]->data : NULL, m->rule_b, m->factor)};
  run_tasks((p.N + LANES - 1) / LANES, p.M * p.N * p.K >= PARALLEL_ELEMENTS, columns_task, &p);
  return ENG_OK;
}
