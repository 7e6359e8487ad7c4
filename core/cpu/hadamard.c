// The operation hadamard. Called through backend.kernel[]; owns nothing. Sums are in f64 or,
// where rotate_halves shows that sums in f32 are exact, in f32.
//
// The result is [lines x along]: a line is a row of x, or a column if `turned`. A task transforms
// one tile of MOST x MOST numbers, LINE lines at a time, with the lines in the lanes of vectors;
// then it transposes the tile. Calls with x in f64, or a result in f16 or f64, go to the reference.
#include "base/mx.h"
#include "base/rng.h"
#include "philox.h"
#include "rows.h"
#include "simd.h"
#include "simd_halves.h"
#include "tasks.h"
#include "turn.h"

#include <math.h>
#include <string.h>

enum { MOST = 128, LINE = 32 };

typedef struct rotation {
  const tensor *x;
  void    *y;
  int      dtype, n;         // dtype: of y, bf16 or f32
  bool     turned;
  int64_t  along, lines, columns;   // columns: of x
  float    sign[MOST];
} rotation;

typedef double doubles __attribute__((vector_size(64), may_alias, aligned(8)));
enum { DOUBLES = 8 };

// Multiplies LINE numbers by `root` in f64 and rounds them to bf16, without rounding to f32 in
// between: adding and subtracting a power of two about 2^45 times as large rounds to the 8
// significant bits of bf16. If a result is neither normal nor 0, bf16_from_f64 computes all of them
// again.
static void round_line(uint16_t *to, const double *x, double root)
{
  uint32_t bits[LINE], odd = 0;
  for (int c = 0; c < LINE; c++) {
    double y = x[c] * root;
    uint64_t sign_exponent = f64_bits(y) & 0xFFF0000000000000u;
    double far = f64_from(sign_exponent + (45ull << 52));
    bits[c] = f32_bits((float)__builtin_copysign((y + far) - far, y));
  }
  for (int c = 0; c < LINE; c++) {
    uint32_t magnitude = bits[c] & 0x7FFFFFFFu;
    odd |= (magnitude - 1 < 0x007FFFFFu) | (magnitude >= 0x7F800000u);
    to[c] = (uint16_t)(bits[c] >> 16);
  }
  for (int c = 0; odd && c < LINE; c++) to[c] = bf16_from_f64(x[c] * root);
}

// Replaces two numbers, or two vectors, by their sum and their difference.
#define BUTTERFLY(a, b)                 \
  do {                                  \
    typeof(a) one = (a), other = (b);   \
    (a) = one + other;                  \
    (b) = one - other;                  \
  } while (0)

// Transforms 16 vectors v. Unrolled, they stay in registers.
#define TRANSFORM_16(v)                                     \
  do {                                                      \
    _Pragma("GCC unroll 4")                                 \
    for (int half = 1; half < 16; half *= 2)                \
      _Pragma("GCC unroll 16")                              \
      for (int k = 0; k < 16; k++)                          \
        if (!(k & half)) BUTTERFLY((v)[k], (v)[k + half]);  \
  } while (0)

// Transforms one group of 16 rows of x.
static void transform_16(double (*x)[LINE])
{
  for (int c = 0; c < LINE; c += DOUBLES) {
    doubles v[16];
#pragma GCC unroll 16
    for (int k = 0; k < 16; k++) v[k] = *(const doubles *)&x[k][c];
    TRANSFORM_16(v);
#pragma GCC unroll 16
    for (int k = 0; k < 16; k++) *(doubles *)&x[k][c] = v[k];
  }
}

// Transforms the n rows of x, without the factor sqrt(1/n).
static void transform(double (*x)[LINE], int n)
{
  for (int r = 0; r < n; r += 16) transform_16(x + r);
  for (int half = 16; half < n; half *= 2)
    for (int r = 0; r < n; r += 2 * half)
      for (int k = r; k < r + half; k++)
        for (int c = 0; c < LINE; c++) BUTTERFLY(x[k][c], x[k + half][c]);
}

// to[k][l] = element first + k of line `line` + l, for k < deep and l < some. In a whole group, it
// is multiplied by its sign. Other lines get zeros.
static void load_group(double (*to)[LINE], const rotation *o, int64_t first, int deep, int64_t line,
                       int some, bool whole)
{
  float x[LINE > MOST ? LINE : MOST] = {0};
  int size = o->x->dtype == ENG_f32 ? 4 : 2;
  for (int k = 0; o->turned && k < deep; k++) {
    int64_t from = (first + k) * o->columns + line;
    // the next group's rows are too far apart for the hardware prefetcher
    __builtin_prefetch((const char *)o->x->data + size * (from + o->n * o->columns));
    floats_from(x, o->x->data, o->x->dtype, from, some);
    float sign = whole ? o->sign[k] : 1;
    for (int l = 0; l < LINE; l++) to[k][l] = x[l] * sign;
  }
  if (!o->turned) memset(to, 0, (size_t)deep * sizeof *to);
  for (int l = 0; !o->turned && l < some; l++) {
    floats_from(x, o->x->data, o->x->dtype, (line + l) * o->columns + first, deep);
    for (int k = 0; k < deep; k++) to[k][l] = x[k] * (whole ? o->sign[k] : 1);
  }
}

// ------------------------------------------------------------------ bf16 in f32

// Whether rotate_halves computes this transform: of bf16 to bf16, by a factor that is a power of
// two.
static bool halves_fit(const rotation *o)
{ return o->x->dtype == ENG_bf16 && o->dtype == ENG_bf16 && (o->n == 16 || o->n == 64); }

// x[k][l] = element first + k of line `line` + l, for l < some. Other lines get zeros.
static void load_halves(uint16_t (*x)[LINE], const rotation *o, int64_t first, int64_t line,
                        int some)
{
  const uint16_t *from = o->x->data;
  uint16_t rows[LINE * MOST];
  if (some < LINE) memset(o->turned ? *x : rows, 0, (size_t)(LINE * o->n) * sizeof *from);
  for (int k = 0; o->turned && k < o->n; k++) {
    const uint16_t *row = from + (first + k) * o->columns + line;
    // the next group's rows are too far apart for the hardware prefetcher
    __builtin_prefetch(row + o->n * o->columns, 0, 2);
    if (some == LINE) memcpy(x[k], row, sizeof *x);
    else memcpy(x[k], row, (size_t)some * sizeof *row);
  }
  if (o->turned) return;
  from += line * o->columns + first;
  for (int l = 0; some < LINE && l < some; l++)
    memcpy(rows + l * o->n, from + l * o->columns, (size_t)o->n * sizeof *from);
  if (some < LINE) turn_tile(x, LINE, rows, o->n, LINE, o->n, 2);
  else turn_tile(x, LINE, from, o->columns, LINE, o->n, 2);
}

// Transforms one line in f64: rotate_halves for a line whose sums may be inexact in f32.
static void rotate_line(uint16_t *to, const uint16_t *x, const rotation *o)
{
  double v[MOST], root = sqrt(1.0 / o->n);
  for (int k = 0; k < o->n; k++) v[k] = bf16_to_f32(x[k * LINE]) * o->sign[k];
  for (int half = 1; half < o->n; half *= 2)
    for (int k = 0; k < o->n; k++)
      if (!(k & half)) BUTTERFLY(v[k], v[k + half]);
  for (int k = 0; k < o->n; k++) to[k * MOST] = bf16_from_f64(v[k] * root);
}

// Transforms one group of 16 rows of x in f32. The first half of a row of `sum` holds the results
// of the even lines, the second half those of the odd lines.
VF_INLINE void sum_halves(float (*sum)[HALVES], const uint16_t *x, const float *sign)
{
  vi both[16];
#pragma GCC unroll 16
  for (int k = 0; k < 16; k++)
    both[k] = (vi)(vh_load(x + k * LINE) ^ (uint16_t)(sign[k] < 0 ? 0x8000 : 0));
  for (int odd = 0; odd < 2; odd++) {
    vf v[16];
#pragma GCC unroll 16
    for (int k = 0; k < 16; k++)
      v[k] = (vf)(odd ? vi_and(both[k], vi_set1((int32_t)0xFFFF0000)) : vi_shl(both[k], 16));
    TRANSFORM_16(v);
#pragma GCC unroll 16
    for (int k = 0; k < 16; k++) vf_store(sum[k] + odd * VF_LANES, v[k]);
  }
}

VF_INLINE vi rounded_to_bf16(vf x)
{ return vi_add(vi_add((vi)x, vi_set1(0x7FFF)), vi_and(vi_shr((vi)x, 16), vi_set1(1))); }

// Transforms LINE lines of x [n][LINE]; rows of the result are MOST elements apart. The f32 sums of
// a line are exact if its exponents differ by at most 16 - log2(n): then n times the largest number
// and the last bit of the smallest lie within 24 bits. Other lines are computed in f64.
static void rotate_halves(uint16_t *to, const uint16_t (*x)[LINE], const rotation *o)
{
  int n = o->n, most_apart = n == 16 ? 12 : 10;
  vf root = vf_set1(n == 16 ? 0.25f : 0.125f);
  for (int l = 0; l < LINE; l += HALVES) {
    vh top = {0}, low = {0};             // low: the smallest nonzero magnitude, negated
    for (int k = 0; k < n; k++) {
      vh magnitude = vh_load(x[k] + l) & 0x7FFF;
      top = vh_larger(top, magnitude);
      low = vh_larger(low, -magnitude);
    }
    float sum[64][HALVES];
    for (int r = 0; r < n; r += 16) sum_halves(sum + r, x[r] + l, o->sign + r);
    for (int half = 16; half < n; half *= 2)
      for (int k = 0; k < n; k++)
        for (int c = 0; !(k & half) && c < HALVES; c++) BUTTERFLY(sum[k][c], sum[k + half][c]);
    for (int k = 0; k < n; k++) {
      vi even = rounded_to_bf16(vf_mul(vf_load(sum[k]), root)),
         odd = rounded_to_bf16(vf_mul(vf_load(sum[k] + VF_LANES), root));
      vh_store(to + k * MOST + l,
               (vh)vi_or(vi_shr(even, 16), vi_and(odd, vi_set1((int32_t)0xFFFF0000))));
    }
    vh high = top >> 7, apart = high - (-low >> 7);   // of exponents
    if (vh_across(high) < 248 && vh_across(apart) <= most_apart) continue;
    for (int c = 0; c < HALVES; c++)
      if (high[c] >= 248 || apart[c] > most_apart) rotate_line(to + l + c, x[0] + l + c, o);
  }
}

static void rotate_task(const void *context, int64_t t)
{
  const rotation *o = context;
  int64_t across = (o->lines + MOST - 1) / MOST, a0 = t / across * MOST, l0 = t % across * MOST;
  int deep = (int)smaller(MOST, o->along - a0), lines = (int)smaller(MOST, o->lines - l0),
      size = o->dtype == ENG_f32 ? 4 : 2;
  uint32_t tile[MOST * MOST], turn[MOST * MOST];
  double wide[MOST][LINE];
  for (int a = 0; a < deep; a += o->n)
    for (int l = 0; l < lines; l += LINE) {
      for (int k = 0; k < LINE && l + k < lines; k++)
        __builtin_prefetch((char *)o->y + size * ((l0 + l + k) * o->along + a0 + a), 1);
      int n = (int)smaller(o->n, deep - a), some = (int)smaller(LINE, lines - l);
      if (n == o->n && halves_fit(o)) {
        uint16_t halves[64][LINE];
        load_halves(halves, o, a0 + a, l0 + l, some);
        rotate_halves((uint16_t *)tile + a * MOST + l, halves, o);
        continue;
      }
      load_group(wide, o, a0 + a, n, l0 + l, some, n == o->n);
      double root = n == o->n ? sqrt(1.0 / n) : 1;      // an incomplete last group stays as it is
      if (n == o->n) transform(wide, n);
      for (int k = 0; k < n; k++)
        if (size == 2) round_line((uint16_t *)tile + (a + k) * MOST + l, wide[k], root);
        else for (int c = 0; c < LINE; c++)
          ((float *)tile)[(a + k) * MOST + l + c] = (float)(wide[k][c] * root);
    }
  turn_tile(turn, MOST, tile, MOST, deep, lines, size);
  for (int l = 0; l < lines; l++)
    memcpy((char *)o->y + size * ((l0 + l) * o->along + a0), (char *)turn + size * l * MOST,
           (size_t)(size * deep));
}

static eng_status hadamard(const op_call *call)
{
  const typeof(call->hadamard) *a = &call->hadamard;
  const tensor *x = call->in[0], *y = call->out[0];
  bool fast = dtype_is_fast(x->dtype) && (y->dtype == ENG_f32 || y->dtype == ENG_bf16);
  if (!fast || x->count == 0) return forward_to_reference(call);
  rotation o = {.x = x, .y = y->data, .dtype = y->dtype, .n = (int)a->n, .turned = a->turned != 0,
                .columns = row_length(x)};
  o.along = a->turned ? row_count(x) : o.columns;
  o.lines = a->turned ? o.columns : row_count(x);
  uint32_t word[4] = {0};
  if (a->signs > 0) philox_block(word, (uint64_t)a->signs);
  for (int i = 0; i < o.n; i++) o.sign[i] = mx_sign(a->signs, word, i);
  run_tasks((o.along + MOST - 1) / MOST * ((o.lines + MOST - 1) / MOST),
            x->count >= PARALLEL_ELEMENTS, rotate_task, &o);
  return ENG_OK;
}

void ISA_NAME(cpu_register_hadamard)(backend *b) { b->kernel[ENG_OP_hadamard] = hadamard; }
