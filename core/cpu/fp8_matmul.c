// The operation fp8_matmul: multiplies FP8 matrices with block scales, y [M x N] = a [M x K] b
// [K x N], with one of four models of the accumulator. The results have the same bits as those of
// reference_fp8.c, except for the payloads of NaNs, on every instruction set and with any number of
// threads. Called through backend.kernel[]; owns nothing but scratch during a call.
//
// K is cut into runs: pieces of at most RUN steps that end where a scale changes or a promotion is
// due. For every run, panels of columns of b and blocks of rows of a are packed as f32 or as pairs
// of bf16, which is exact. For each row and panel, the model updates its accumulator, `part`. At
// the end of a promotion interval, `part` is added to `sum`. At the end of a stretch (an interval
// of K with constant scales), `sum` is scaled and added to `total`. `part`, `sum` and `total` are
// kept in f32 between runs. After the last run, the bias is added and the result is rounded to its
// dtype.
//   fp32    chains of multiply-adds, several rows at a time. Products of FP8 numbers are exact in
//           f32, so fusing changes nothing. Of each pair of steps of K, the later step is added
//           first, as in the instruction that multiplies pairs of bf16. FP8 numbers are exact in
//           bf16, so this instruction gives the same bits. It is used where it is fast (gemm.h).
//   hopper  the formula of core/base/fp8_hopper.h on vectors of columns. Exponents are bytes, and
//           converting the terms to integers truncates them.
//   e4m3    products and sums are rounded to e4m3 by arithmetic on their bits
//   exact   in f64, one panel and row at a time (exact_panel)
#include <omp.h>

#include "base/fp8_hopper.h"
#include "base/fp8_layout.h"
#include "gemm_pairs.h"
#include "rows.h"
#include "simd.h"
#include "simd_halves.h"
#include "turn.h"

enum {
  RUN = 128,                     // the most steps of K in a run, a multiple of HOPPER_GROUP
  // y is computed in squares of SPAN rows and columns, so that partial results stay in cache.
  SPAN = 512,
  BLOCK = 64,                    // rows of a task
  PANEL = 4 * VF_LANES,          // columns of a panel: their exponents fill a vector of bytes
  ZERO_EXPONENT = -64,           // exponent of a zero, below the sum of any two other exponents
  LEAST_EXPONENT = -48,          // above the exponents of zero products, below all others
};

typedef int8_t vb __attribute__((vector_size(4 * VF_LANES), may_alias));

/// An operand of the product: element (i, k), i < size, is at i * i_stride + k * k_stride. In a, i
/// is the row of y; in b, i is the column of y.
typedef struct matrix {
  const uint8_t *data;
  const float   *scale;
  int            dtype, fraction;
  int64_t        i_stride, k_stride, size;
  fp8_scales     at;                 // gives the index of the scale of element (i, k)
} matrix;

/// A run: steps [k, k + steps) of K. It lies within one stretch, whose index is `stretch`, and
/// within one promotion interval. The sum over this interval is a `part`, to which several runs may
/// add.
typedef struct run {
  int64_t k, steps, stretch;
  bool starts_part, ends_part;     // whether the run begins, and ends, a promotion interval
  bool first_part, ends_stretch;   // whether the interval begins, and the run ends, a stretch
} run;

typedef struct product {
  const op_call *call;
  matrix   a, b;
  int64_t  m, n, k, stretch, promotion;
  int      model;
  bool     pairs;                    // the fp32 model multiplies pairs of bf16
  fp8_order order;                   // of the multiplications by scale_a and scale_b
  float   *scale_a, *scale_b;        // [stretches][m], [stretches][n rounded up to whole panels]
  int64_t  scale_a_row, scale_b_row;
} product;

// ------------------------------------------------------------------ packing

// Copies the codes in rows [i0, i0+rows) and steps [k0, k0+steps) of a matrix to `to`, which is
// [steps][to_row] bytes. to_row is a multiple of 16.
static void bytes_by_step(uint8_t *to, int64_t to_row, const matrix *x, int64_t i0, int64_t rows,
                          int64_t k0, int64_t steps)
{
  if (x->i_stride == 1) {
    for (int64_t k = 0; k < steps; k++)
      memcpy(to + k * to_row, x->data + (k0 + k) * x->k_stride + i0, (size_t)rows);
    return;
  }
  const uint8_t *from = x->data + i0 * x->i_stride + k0;
  int64_t i = 0;
  for (; i + 16 <= rows; i += 16) {
    int64_t k = 0;
    for (; k + 16 <= steps; k += 16)
      turn_bytes(to + k * to_row + i, to_row, from + i * x->i_stride + k, x->i_stride);
    for (; k < steps; k++)
      for (int64_t l = i; l < i + 16; l++) to[k * to_row + l] = from[l * x->i_stride + k];
  }
  for (; i < rows; i++)
    for (int64_t k = 0; k < steps; k++) to[k * to_row + i] = from[i * x->i_stride + k];
}

// Writes the exponents of n codes, as defined by the hopper model. Returns whether any code is an
// infinity or a NaN.
static bool exponents_of(int8_t *to, const uint8_t *code, int fraction, int64_t n)
{
  int bias = fraction == 3 ? 7 : 15, odd = 0, special = fraction == 3 ? 0x7F : 0x7C;
  for (int64_t i = 0; i < n; i++) {
    int magnitude = code[i] & 0x7F, field = magnitude >> fraction;
    to[i] = (int8_t)(magnitude == 0 ? ZERO_EXPONENT : (field ? field : 1) - bias);
    odd |= magnitude >= special;
  }
  return odd;
}

/// Columns [j0, j0+columns) of b in one run, as f32 numbers and, for the hopper model, as
/// exponents. If the product multiplies pairs, `value` holds [RUN / 2][PANEL] words of two bf16,
/// with the earlier step in the low half and zeros past the last step.
typedef struct panel {
  float  value[RUN * PANEL] __attribute__((aligned(64)));
  int8_t exponent[RUN * PANEL] __attribute__((aligned(64)));
  bool   odd;                      // holds an infinity or a NaN
} panel;

#if defined(ENG_ISA_avx512)
// The 128 magnitudes of a format as bf16, in the order of their codes.
typedef struct magnitudes { __m512i quarter[4]; } magnitudes;

static magnitudes magnitudes_of(int dtype)
{
  uint8_t code[128];
  float value[128];
  uint16_t half[128];
  for (int i = 0; i < 128; i++) code[i] = (uint8_t)i;
  fp8_decode(value, code, dtype, 128);
  for (int i = 0; i < 128; i++) half[i] = (uint16_t)(f32_bits(value[i]) >> 16);   // exact
  magnitudes m;
  memcpy(&m, half, sizeof m);
  return m;
}

// Converts 32 codes, each in a 16-bit lane, to bf16.
VF_INLINE __m512i vh_of_fp8_(__m512i code, const magnitudes *m)
{
  __m512i low = _mm512_permutex2var_epi16(m->quarter[0], code, m->quarter[1]),
          high = _mm512_permutex2var_epi16(m->quarter[2], code, m->quarter[3]);
  __m512i magnitude =
    _mm512_mask_blend_epi16(_mm512_test_epi16_mask(code, _mm512_set1_epi16(0x40)), low, high);
  return _mm512_or_si512(magnitude,
                         _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(0x80)), 8));
}

// Converts codes [steps][PANEL] to words [(steps + 1) / 2][PANEL] of two bf16.
static void pairs_of_panel(float *to, const uint8_t *code, int64_t steps, int dtype)
{
  magnitudes m = magnitudes_of(dtype);
  for (int64_t k = 0; k < steps; k += 2, code += 2 * PANEL)
    for (int64_t j = 0; j < PANEL; j += VF_LANES, to += VF_LANES) {
      __m512i low = _mm512_cvtepu8_epi32(vf_bytes_n_(code + j, VF_LANES)),
              high = _mm512_setzero_si512();
      if (k + 1 < steps)
        high = _mm512_slli_epi32(_mm512_cvtepu8_epi32(vf_bytes_n_(code + PANEL + j, VF_LANES)), 16);
      _mm512_storeu_si512(to, vh_of_fp8_(_mm512_or_si512(low, high), &m));
    }
}

// Converts a row of codes to bf16, with zeros past the end.
static void pairs_of_row(float *to, const uint8_t *code, int64_t steps, const magnitudes *m)
{
  for (int64_t k = 0; k < steps; k += 32, to += 16) {
    __mmask32 here = steps - k >= 32 ? 0xFFFFFFFF : ((__mmask32)1 << (steps - k)) - 1;
    _mm512_storeu_si512(
      to, vh_of_fp8_(_mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(here, code + k)), m));
  }
}
#endif

static void lay_panel(panel *p, const product *g, int64_t j0, int64_t columns, const run *r)
{
  uint8_t code[RUN * PANEL];
  if (columns < PANEL) memset(code, 0, sizeof code);
  bytes_by_step(code, PANEL, &g->b, j0, columns, r->k, r->steps);
#if defined(ENG_ISA_avx512)
  if (g->pairs) {
    pairs_of_panel(p->value, code, r->steps, g->b.dtype);
    return;
  }
#endif
  fp8_decode(p->value, code, g->b.dtype, r->steps * PANEL);
  p->odd = g->model == ENG_ACCUMULATE_HOPPER &&
           exponents_of(p->exponent, code, g->b.fraction, r->steps * PANEL);
}

/// Rows [i0, i0+rows) of a in one run. In `value`, they are RUN floats apart. The numbers are bf16
/// if the product multiplies pairs, else f32.
typedef struct slab {
  float  value[BLOCK * RUN] __attribute__((aligned(64)));
  int8_t exponent[BLOCK * RUN];
  bool   odd[BLOCK];
  // sums of a promotion interval that begins and ends in this run
  float  part[BLOCK * PANEL] __attribute__((aligned(64)));
} slab;

static void lay_slab(slab *s, const product *g, int64_t i0, int64_t rows, const run *r)
{
  uint8_t row[RUN], turned[RUN * BLOCK];
#if defined(ENG_ISA_avx512)
  const magnitudes m = magnitudes_of(g->a.dtype);
#endif
  if (g->a.k_stride != 1) bytes_by_step(turned, BLOCK, &g->a, i0, rows, r->k, r->steps);
  for (int64_t i = 0; i < rows; i++) {
    const uint8_t *code = g->a.data + (i0 + i) * g->a.i_stride + r->k;
    if (g->a.k_stride != 1) {
      for (int64_t k = 0; k < r->steps; k++) row[k] = turned[k * BLOCK + i];
      code = row;
    }
#if defined(ENG_ISA_avx512)
    if (g->pairs) {
      pairs_of_row(s->value + i * RUN, code, r->steps, &m);
      continue;
    }
#endif
    fp8_decode(s->value + i * RUN, code, g->a.dtype, r->steps);
    if (g->model == ENG_ACCUMULATE_HOPPER)
      s->odd[i] = exponents_of(s->exponent + i * RUN, code, g->a.fraction, r->steps);
  }
}

// ------------------------------------------------- the models: a run updates `part` [rows x PANEL]

// The rows of a that are multiplied at a time. A panel is four vectors wide, but only two of its
// vectors are multiplied at a time, which leaves registers for more rows.
#if defined(ENG_ISA_avx512)
enum { PAIR_ROWS = 8 };
#else
enum { PAIR_ROWS = 4 };
#endif

// Adds the products of n steps to `part` or, without `resume`, stores their sums in `part`, for
// `rows` rows and two vectors of columns. With `pairs`, a step is a word of two bf16. rows,
// multiply and pairs are constants where this is inlined.
VF_INLINE void chains(const int rows, micro_product *multiply, const bool pairs, const float *a,
                      const float *b, int64_t n, float *part, bool resume)
{
  vf sum[PAIR_ROWS][2];
#pragma GCC unroll 16
  for (int i = 0; i < rows; i++)
    for (int v = 0; v < 2; v++)
      sum[i][v] = resume ? vf_load(part + i * PANEL + v * VF_LANES) : vf_zero();
  for (int64_t step = 0; step < n; step++) {
    int64_t k = pairs ? step : fp8_fp32_order(step, n);
    vf one = vf_load(b + k * PANEL), two = vf_load(b + k * PANEL + VF_LANES);
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
      sum[i][0] = multiply(sum[i][0], a + i * RUN + k, one);
      sum[i][1] = multiply(sum[i][1], a + i * RUN + k, two);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows; i++)
    for (int v = 0; v < 2; v++) vf_store(part + i * PANEL + v * VF_LANES, sum[i][v]);
}

VF_INLINE void all_chains(micro_product *multiply, const bool pairs, const float *a, const float *b,
                          int64_t n, int64_t rows, float *part, bool resume)
{
  for (int half = 0; half < PANEL; half += 2 * VF_LANES) {
    int64_t i = 0;
    for (; i + PAIR_ROWS <= rows; i += PAIR_ROWS)
      chains(PAIR_ROWS, multiply, pairs, a + i * RUN, b + half, n, part + i * PANEL + half, resume);
    for (; i < rows; i++)
      chains(1, multiply, pairs, a + i * RUN, b + half, n, part + i * PANEL + half, resume);
  }
}

static void fp32_rows(const float *a, const float *b, int64_t steps, int64_t rows, float *part,
                      bool resume)
{ all_chains(float_product, false, a, b, steps, rows, part, resume); }

#if defined(ENG_ISA_avx512)
__attribute__((target("avx512bf16"))) static void pairs_rows(const float *a, const float *b,
                                                             int64_t steps, int64_t rows,
                                                             float *part, bool resume)
{ all_chains(pair_product, true, a, b, (steps + 1) / 2, rows, part, resume); }
#endif

VF_INLINE vb vb_max_(vb a, vb b)
{
#if defined(ENG_ISA_avx512)
  return (vb)_mm512_max_epi8((__m512i)a, (__m512i)b);
#elif defined(ENG_ISA_avx2)
  return (vb)_mm256_max_epi8((__m256i)a, (__m256i)b);
#else
  vb more = a > b;
  return (a & more) | (b & ~more);
#endif
}

// Widens VF_LANES bytes, a quarter of a vb, to int32.
VF_INLINE vi vb_quarter_(const int8_t *p)
{
#if defined(ENG_ISA_avx512)
  return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(ENG_ISA_avx2)
  return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
  return (vi){p[0], p[1], p[2], p[3]};
#endif
}

// Updates `part` for one row and one panel of finite numbers. The accumulator takes HOPPER_GROUP
// products at a time.
static void hopper_row(const float *a, const int8_t *ea, const float *b, const int8_t *eb,
                       int64_t steps, float *part)
{
  for (int64_t k0 = 0; k0 < steps; k0 += HOPPER_GROUP) {
    int64_t n = smaller(HOPPER_GROUP, steps - k0);
    vb most = (vb){0} + LEAST_EXPONENT;
    for (int64_t k = k0; k < k0 + n; k++) {
      vb e;
      memcpy(&e, eb + k * PANEL, sizeof e);
      most = vb_max_(most, e + ea[k]);
    }
    int8_t quarters[PANEL] __attribute__((aligned(64)));
    memcpy(quarters, &most, sizeof most);
    vf c[4], scale[4];
    vi sum[4], top[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
      c[v] = vf_load(part + v * VF_LANES);
      // the exponents of c; -127 for zero
      vi exponent = vi_sub(vi_and(vi_shr((vi)c[v], 23), vi_set1(0xFF)), vi_set1(127));
      top[v] = vi_larger_(vb_quarter_(quarters + v * VF_LANES), exponent);
      scale[v] = (vf)vi_shl(vi_sub(vi_set1(127 + HOPPER_BITS), top[v]), 23);
      sum[v] = vf_to_vi(vf_mul(c[v], scale[v]));
    }
    for (int64_t k = k0; k < k0 + n; k++) {
      vf x = vf_set1(a[k]);
#pragma GCC unroll 4
      for (int v = 0; v < 4; v++)
        sum[v] = vi_add(
          sum[v], vf_to_vi(vf_mul(vf_mul(x, vf_load(b + k * PANEL + v * VF_LANES)), scale[v])));
    }
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
      vf value =
        vf_mul(vi_to_vf(sum[v]), (vf)vi_shl(vi_add(top[v], vi_set1(127 - HOPPER_BITS)), 23));
      value = (vf)vi_and((vi)value, vi_set1(~((1 << (23 - HOPPER_BITS)) - 1)));
      vm finite = vi_gt(vi_set1(0x7F800000), vi_and((vi)c[v], vi_set1(0x7FFFFFFF)));
      vf_store(part + v * VF_LANES, vf_select(finite, value, c[v]));
    }
  }
}

// Does the work of hopper_row with the scalar formula, for operands that hold an infinity or a NaN.
static void hopper_odd(const product *g, int64_t i, int64_t j0, int64_t columns, const run *r,
                       float *part)
{
  for (int64_t k0 = 0; k0 < r->steps; k0 += HOPPER_GROUP)
    for (int64_t j = 0; j < columns; j++)
      part[j] = hopper_group(
        g->a.data + i * g->a.i_stride + (r->k + k0) * g->a.k_stride, g->a.k_stride, g->a.fraction,
        g->b.data + (j0 + j) * g->b.i_stride + (r->k + k0) * g->b.k_stride, g->b.k_stride,
        g->b.fraction, (int)smaller(HOPPER_GROUP, r->steps - k0), part[j]);
}

// Rounds x to e4m3, saturating.
VF_INLINE vf vf_round_e4m3(vf x)
{
  vi bits = (vi)x, magnitude = vi_and(bits, vi_set1(0x7FFFFFFF)),
     sign = vi_and(bits, vi_set1((int32_t)0x80000000));
  vi even = vi_add(vi_and(vi_shr(magnitude, 20), vi_set1(1)), vi_set1(0x7FFFF));
  vi normal = vi_and(vi_add(magnitude, even), vi_set1(~0xFFFFF));
  vi subnormal = (vi)vf_sub(vf_add((vf)magnitude, vf_set1(16384.0f)), vf_set1(16384.0f));
  vi rounded = vi_select(vi_gt(vi_set1(0x3C800000), magnitude), subnormal, normal);
  rounded = vi_select(vi_gt(rounded, vi_set1(0x43E00000)), vi_set1(0x43E00000), rounded);
  rounded =
    vi_select(vi_gt(magnitude, vi_set1(0x7F800000)), vi_set1(0x7FC00000), vi_or(rounded, sign));
  return (vf)rounded;
}

static void e4m3_row(const float *a, const float *b, int64_t steps, float *part)
{
  vf sum[4];
#pragma GCC unroll 4
  for (int v = 0; v < 4; v++) sum[v] = vf_load(part + v * VF_LANES);
  for (int64_t k = 0; k < steps; k++) {
    vf x = vf_set1(a[k]);
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++)
      sum[v] = vf_round_e4m3(
        vf_add(sum[v], vf_round_e4m3(vf_mul(x, vf_load(b + k * PANEL + v * VF_LANES)))));
  }
#pragma GCC unroll 4
  for (int v = 0; v < 4; v++) vf_store(part + v * VF_LANES, sum[v]);
}

// ------------------------------------------------------------------ promotion and scales

// Ends a promotion interval: adds `part` to `sum` and, if a stretch ends too, adds the scaled `sum`
// to `total`. Rows are PANEL floats apart.
static void promote(const product *g, const run *r, int64_t i0, int64_t rows, int64_t j0,
                    const float *part, float *sum, float *total)
{
  const float *scale_a = g->scale_a + r->stretch * g->scale_a_row + i0,
              *scale_b = g->scale_b + r->stretch * g->scale_b_row + j0;
  bool alone = r->first_part && r->ends_stretch;
  for (int64_t i = 0; i < rows; i++)
    for (int v = 0; v < PANEL; v += VF_LANES) {
      int64_t at = i * PANEL + v;
      vf x = vf_load(part + at);
      if (!alone) {
        if (!r->first_part) x = vf_add(vf_load(sum + at), x);
        else x = vf_add(vf_zero(), x);
        vf_store(sum + at, x);
      }
      if (!r->ends_stretch) continue;
      vf one = vf_set1(scale_a[i]), other = vf_load(scale_b + v),
         before = r->stretch ? vf_load(total + at) : vf_zero();
      vf_store(total + at, g->order == FP8_TOGETHER  ? vf_fused(x, vf_mul(one, other), before)
                           : g->order == FP8_A_FIRST ? vf_fused(vf_mul(x, one), other, before)
                                                     : vf_fused(vf_mul(x, other), one, before));
    }
}

// Rounds total + bias and stores it in y or, if the call accumulates, adds it to y.
static void finish(const product *g, int64_t i0, int64_t rows, int64_t j0, int64_t columns,
                   const float *total)
{
  const tensor *y = g->call->out[0], *bias = g->call->in[4];
  float addend[PANEL], row[PANEL], old[PANEL];
  if (bias) floats_from(addend, bias->data, bias->dtype, j0, columns);
  for (int64_t i = 0; i < rows; i++) {
    int64_t first = (i0 + i) * y->stride[0] + j0;
    for (int64_t j = 0; j < columns; j++)
      row[j] = bias ? total[i * PANEL + j] + addend[j] : total[i * PANEL + j];
    if (g->call->fp8_matmul.add) {
      floats_from(old, y->data, y->dtype, first, columns);
      if (y->dtype != ENG_f32) {   // rounds the product, as without `add`; y is rounded again
        uint16_t half[PANEL];
        floats_to(half, y->dtype, 0, row, columns);
        floats_from(row, half, y->dtype, 0, columns);
      }
      for (int64_t j = 0; j < columns; j++) row[j] = old[j] + row[j];
    }
    floats_to(y->data, y->dtype, first, row, columns);
  }
}

// ------------------------------------------------------------------ the complete product

// Copies the scales into the order of use: for each stretch, one scale per row of a or per column
// of b. The padding of the last panel gets zeros.
static void lay_scales(float *to, int64_t to_row, const matrix *x, int64_t k, int64_t stretch)
{
  for (int64_t s = 0; s * stretch < k; s++)
    for (int64_t i = 0; i < to_row; i++)
      to[s * to_row + i] =
        i >= x->size ? 0.0f : x->scale[fp8_scale_at(&x->at, i, s * stretch)];
}

static run run_at(const product *g, int64_t k)
{
  run r = {.k = k, .stretch = k / g->stretch};
  int64_t begins = r.stretch * g->stretch, ends = smaller(begins + g->stretch, g->k);
  int64_t part = begins + (k - begins) / g->promotion * g->promotion,
          part_ends = smaller(part + g->promotion, ends);
  r.steps = smaller(RUN, part_ends - k);
  r.starts_part = k == part;
  r.first_part = part == begins;
  r.ends_part = k + r.steps == part_ends;
  r.ends_stretch = k + r.steps == ends;
  return r;
}

// Multiplies rows [i0, i0+rows) of a by a panel of b, over one run. `carried` [3][BLOCK x PANEL]
// holds `part`, `sum` and `total` of this rectangle of y.
static void rectangle(const product *g, const run *r, slab *a, const panel *b, int64_t i0,
                      int64_t rows, int64_t j0, float *carried)
{
  float *part = r->starts_part && r->ends_part ? a->part : carried, *sum = carried + BLOCK * PANEL,
        *total = carried + 2 * BLOCK * PANEL;
#if defined(ENG_ISA_avx512)
  if (g->pairs) pairs_rows(a->value, b->value, r->steps, rows, part, !r->starts_part);
  else
#endif
  if (g->model == ENG_ACCUMULATE_FP32) {
    fp32_rows(a->value, b->value, r->steps, rows, part, !r->starts_part);
  } else {
    if (r->starts_part) memset(part, 0, (size_t)rows * PANEL * sizeof(float));
    for (int64_t i = 0; i < rows; i++) {
      if (g->model == ENG_ACCUMULATE_E4M3)
        e4m3_row(a->value + i * RUN, b->value, r->steps, part + i * PANEL);
      else if (a->odd[i] || b->odd)
        hopper_odd(g, i0 + i, j0, smaller(PANEL, g->n - j0), r, part + i * PANEL);
      else
        hopper_row(a->value + i * RUN, a->exponent + i * RUN, b->value, b->exponent, r->steps,
                   part + i * PANEL);
    }
  }
  if (r->ends_part) promote(g, r, i0, rows, j0, part, sum, total);
  if (r->k + r->steps == g->k) finish(g, i0, rows, j0, smaller(PANEL, g->n - j0), total);
}

static eng_status run_product(const product *g)
{
  int threads = (double)g->m * (double)g->n * (double)g->k < 1 << 16 ? 1 : omp_get_max_threads();
  int64_t high = smaller(SPAN, ceiling(g->m, BLOCK) * BLOCK),
          panels = smaller(SPAN / PANEL, ceiling(g->n, PANEL)), blocks = high / BLOCK;
  SCRATCH(panel, b, panels);
  SCRATCH(slab, slabs, threads);
  SCRATCH(float, carried, blocks * panels * 3 * BLOCK * PANEL);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    slab *a = slabs + omp_get_thread_num();
    for (int64_t i0 = 0; i0 < g->m; i0 += SPAN)
      for (int64_t j0 = 0; j0 < g->n; j0 += SPAN) {
        int64_t rows = smaller(SPAN, g->m - i0), here = ceiling(smaller(SPAN, g->n - j0), PANEL),
                down = ceiling(rows, BLOCK);
        for (int64_t k = 0; k < g->k;) {
          run r = run_at(g, k);
#pragma omp for schedule(static)
          for (int64_t p = 0; p < here; p++)
            lay_panel(&b[p], g, j0 + p * PANEL, smaller(PANEL, g->n - j0 - p * PANEL), &r);
          int64_t groups = down >= threads ? 1 : smaller(threads, here),
                  group = ceiling(here, groups);
#pragma omp for schedule(static)
          for (int64_t task = 0; task < down * groups; task++) {
            int64_t block = task / groups, i = i0 + block * BLOCK,
                    deep = smaller(BLOCK, i0 + rows - i);
            lay_slab(a, g, i, deep, &r);
            for (int64_t p = task % groups * group; p < smaller(here, (task % groups + 1) * group);
                 p++)
              rectangle(g, &r, a, &b[p], i, deep, j0 + p * PANEL,
                        carried + (block * panels + p) * 3 * BLOCK * PANEL);
          }
          k += r.steps;
        }
      }
  }
  return ENG_OK;
}

// Computes a product with K = 0, whose sums are empty.
static void run_empty(const product *g)
{
  const float zero[PANEL] = {0};
  for (int64_t i = 0; i < g->m; i++)
    for (int64_t j = 0; j < g->n; j += PANEL) finish(g, i, 1, j, smaller(PANEL, g->n - j), zero);
}

// ------------------------------------------------------------------ exact

// Computes the columns of one panel in f64, for all rows. `values` and `row` are scratch: `values`
// holds the panel's numbers [k][PANEL], and `row` holds a row of a.
static void exact_panel(const product *g, int64_t j0, float *values, float *row)
{
  const tensor *y = g->call->out[0], *bias = g->call->in[4];
  int64_t columns = smaller(PANEL, g->n - j0);
  uint8_t code[RUN * PANEL] = {0};
  for (int64_t k = 0; k < g->k; k += RUN) {
    int64_t steps = smaller(RUN, g->k - k);
    bytes_by_step(code, PANEL, &g->b, j0, columns, k, steps);
    fp8_decode(values + k * PANEL, code, g->b.dtype, steps * PANEL);
  }
  for (int64_t i = 0; i < g->m; i++) {
    double total[PANEL] = {0};
    for (int64_t k = 0; k < g->k; k++)
      row[k] = fp8_to_f32(g->a.data[i * g->a.i_stride + k * g->a.k_stride], g->a.fraction);
    for (int64_t k = 0, end; k < g->k; k = end) {
      int64_t s = k / g->stretch, into = (k - s * g->stretch) / g->promotion;
      end =
        smaller(smaller((s + 1) * g->stretch, s * g->stretch + (into + 1) * g->promotion), g->k);
      double sum[PANEL] = {0}, one = (double)g->scale_a[s * g->scale_a_row + i];
      for (int64_t at = k; at < end; at++)
        for (int j = 0; j < PANEL; j++) sum[j] += (double)(row[at] * values[at * PANEL + j]);
      for (int j = 0; j < PANEL; j++) {
        double other = (double)g->scale_b[s * g->scale_b_row + j0 + j];
        total[j] += sum[j] * one * other;
      }
    }
    for (int64_t j = 0; j < columns; j++) {
      int64_t place = i * y->stride[0] + j0 + j;
      double before = g->call->fp8_matmul.add ? tensor_load(y->data, y->dtype, place) : 0;
      tensor_store(y->data, y->dtype, place,
                   bias ? total[j] + tensor_load(bias->data, bias->dtype, j0 + j) : total[j]);
      if (g->call->fp8_matmul.add)
        tensor_store(y->data, y->dtype, place, before + tensor_load(y->data, y->dtype, place));
    }
  }
}

static eng_status run_exact(const product *g)
{
  int threads = (double)g->m * (double)g->n * (double)g->k < 1 << 16 ? 1 : omp_get_max_threads();
  int64_t floats = g->k * (PANEL + 1);
  SCRATCH(float, room, threads * floats);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t p = 0; p < ceiling(g->n, PANEL); p++) {
    float *own = room + omp_get_thread_num() * floats;
    exact_panel(g, p * PANEL, own, own + g->k * PANEL);
  }
  return ENG_OK;
}

// ------------------------------------------------------------------ the operation

static matrix matrix_of(const tensor *q, const tensor *scale, bool k_last, int64_t block_rows,
                        int64_t block_columns)
{
  matrix x = {.data = q->data, .scale = scale->data, .dtype = q->dtype,
              .fraction = q->dtype == ENG_e4m3 ? 3 : 2};
  x.i_stride = k_last ? q->shape[1] : 1;
  x.k_stride = k_last ? 1 : q->shape[1];
  x.size = q->shape[k_last ? 0 : 1];
  x.at = fp8_scales_for(block_rows, block_columns, q->shape[0], q->shape[1], NULL);
  if (!k_last) x.at = fp8_scales_turned(x.at);
  return x;
}

KERNEL(fp8_matmul)
{
  const tensor *y = call->out[0], *bias = call->in[4];
  bool ta = call->fp8_matmul.transpose_a != 0, tb = call->fp8_matmul.transpose_b != 0;
  if (y->stride[1] != 1 || !dtype_is_fast(y->dtype) || (bias && !dtype_is_fast(bias->dtype)))
    return forward_to_reference(call);
  product g = {.call = call, .m = y->shape[0], .n = y->shape[1],
               .k = call->in[0]->shape[ta ? 0 : 1], .model = (int)call->fp8_matmul.accumulator,
               .promotion = call->fp8_matmul.promotion};
  if (!g.promotion) g.promotion = INT64_MAX / 4;
#if defined(ENG_ISA_avx512)
  g.pairs = g.model == ENG_ACCUMULATE_FP32 && gemm_pairs_here();
#endif
  int64_t a_rows = call->fp8_matmul.a_rows, a_columns = call->fp8_matmul.a_columns,
          b_rows = call->fp8_matmul.b_rows, b_columns = call->fp8_matmul.b_columns;
  g.a = matrix_of(call->in[0], call->in[1], !ta, a_rows, a_columns);
  g.b = matrix_of(call->in[2], call->in[3], tb, b_rows, b_columns);
  if (g.k == 0) {
    run_empty(&g);
    return ENG_OK;
  }
  g.stretch = smaller(g.k, smaller(g.a.at.inner_block, g.b.at.inner_block));
  g.order = fp8_scale_order(ta ? a_columns : a_rows, ta ? a_rows : a_columns,
                            tb ? b_rows : b_columns, tb ? b_columns : b_rows);
  int64_t stretches = ceiling(g.k, g.stretch);
  g.scale_a_row = g.m;
  g.scale_b_row = ceiling(g.n, PANEL) * PANEL;
  SCRATCH(float, scale_a, stretches * g.scale_a_row);
  SCRATCH(float, scale_b, stretches * g.scale_b_row);
  g.scale_a = scale_a;
  g.scale_b = scale_b;
  lay_scales(g.scale_a, g.scale_a_row, &g.a, g.k, g.stretch);
  lay_scales(g.scale_b, g.scale_b_row, &g.b, g.k, g.stretch);
  return g.model == ENG_ACCUMULATE_EXACT ? run_exact(&g) : run_product(&g);
}
