// The operation hadamard, and the functions of hadamard.h. Called through backend.kernel[]; owns
// nothing. Sums are in f64 or, where this gives the same result, in f32: if halves_fit() allows f32
// for the call, inexact_lines() finds the lines that need f64 nevertheless.
//
// A line is a row of x or, if `turned`, a column. A task transforms one tile of at most MOST x MOST
// numbers, in steps of LINE lines. Each lane of a vector holds an element of a different line. The
// task then transposes the tile into the result. Calls with x in f64, or with a result in f16 or
// f64, go to the reference kernel.
#include "hadamard.h"

#include "base/mx.h"
#include "base/rng.h"
#include "magnitude.h"
#include "philox.h"
#include "rows.h"
#include "simd.h"
#include "tasks.h"
#include "turn.h"

#include <math.h>
#include <string.h>

enum { MOST = ROTATION_SIDE, LINE = 32 };

typedef double doubles __attribute__((vector_size(64), may_alias, aligned(8)));
enum { DOUBLES = 8 };

// Multiplies LINE numbers by `root` in f64 and rounds each product once, to bf16. To round a
// product, it adds a power of two about 2^45 times as large and subtracts it again. This leaves 8
// significant bits, as many as bf16 has. If a result is neither normal nor 0, bf16_from_f64
// computes all LINE results again.
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

// Transforms 16 vectors v. The loops are unrolled, so that the vectors stay in registers.
#define TRANSFORM_16(v)                                     \
  do {                                                      \
    _Pragma("GCC unroll 4")                                 \
    for (int half = 1; half < 16; half *= 2)                \
      _Pragma("GCC unroll 16")                              \
      for (int k = 0; k < 16; k++)                          \
        if (!(k & half)) BUTTERFLY((v)[k], (v)[k + half]);  \
  } while (0)

// Transforms 16 rows of x. Row k holds element k of LINE lines.
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

// Sets to[k][l] to element first + k of line `line` + l, for k < deep and l < some. If the group is
// whole, multiplies each element by its sign. Only `some` lines exist; the others become zeros.
static void load_group(double (*to)[LINE], const rotation *o, int64_t first, int deep, int64_t line,
                       int some, bool whole)
{
  float x[LINE > MOST ? LINE : MOST] = {0};
  int size = o->x->dtype == ENG_f32 ? 4 : 2;
  for (int k = 0; o->turned && k < deep; k++) {
    int64_t from = (first + k) * o->columns + line;
    // prefetches the next group, because its rows are too far apart for the hardware to do so
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

// Returns whether rotate_halves can compute this transform. rotate_halves reads and writes only
// bf16, and needs a factor sqrt(1/n) that is a power of two.
static bool halves_fit(const rotation *o)
{ return o->x->dtype == ENG_bf16 && o->dtype == ENG_bf16 && (o->n == 16 || o->n == 64); }

// Returns the group of o->n elements that begins at `first`, in LINE lines from `line` on, of which
// only `some` exist. The result points into x if the lines are columns of x and all exist, else to
// a copy in `room`. Relative to it, element first + k of line `line` + l has the index
// k * *stride + l. A copy has zeros in the lines that do not exist.
static const uint16_t *find_halves(uint16_t (*room)[LINE], int64_t *stride, const rotation *o,
                                   int64_t first, int64_t line, int some)
{
  const uint16_t *x = o->x->data;
  uint16_t rows[LINE * MOST];
  x += o->turned ? first * o->columns + line : line * o->columns + first;
  if (o->turned && some == LINE) {
    *stride = o->columns;
    return x;
  }
  *stride = LINE;
  if (some < LINE) memset(o->turned ? *room : rows, 0, (size_t)(LINE * o->n) * sizeof *x);
  for (int k = 0; o->turned && k < o->n; k++)
    memcpy(room[k], x + k * o->columns, (size_t)some * sizeof *x);
  if (o->turned) return *room;
  for (int l = 0; some < LINE && l < some; l++)
    memcpy(rows + l * o->n, x + l * o->columns, (size_t)o->n * sizeof *x);
  if (some < LINE) turn_tile(room, LINE, rows, o->n, LINE, o->n, 2);
  else turn_tile(room, LINE, x, o->columns, LINE, o->n, 2);
  return *room;
}

// Transforms one group of one line in f64. Used if its sums may be inexact in f32.
static void rotate_line(uint16_t *to, int64_t to_stride, const uint16_t *x, int64_t stride,
                        const rotation *o)
{
  double v[MOST], root = sqrt(1.0 / o->n);
  for (int k = 0; k < o->n; k++) v[k] = bf16_to_f32(x[k * stride]) * o->sign[k];
  for (int half = 1; half < o->n; half *= 2)
    for (int k = 0; k < o->n; k++)
      if (!(k & half)) BUTTERFLY(v[k], v[k + half]);
  for (int k = 0; k < o->n; k++) to[k * to_stride] = bf16_from_f64(v[k] * root);
}

// Returns a mask of the lines whose f32 sums may be inexact: all bits of their lanes are 1. The
// sums of a line are exact if its exponents differ by at most 16 - log2(n), because n times the
// largest number and the last bit of the smallest then lie within 24 bits. Lines with Inf, NaN or
// numbers whose sum may overflow are in the mask, too.
VF_INLINE vh inexact_lines(const uint16_t *x, int64_t stride, const int n)
{
  vh top = {0}, low = {0};               // low: the smallest nonzero magnitude, negated
  for (int k = 0; k < n; k++) {
    vh magnitude = vh_load(x + k * stride) & 0x7FFF;
    top = vh_larger(top, magnitude);
    low = vh_larger(low, -magnitude);
  }
  // high: each line's largest exponent; apart: its difference from the line's smallest exponent
  vh high = top >> 7, apart = high - (-low >> 7);
  return (vh)(high >= 248) | (vh)(apart > (uint16_t)(n == 16 ? 12 : 10));
}

// Transforms 16 rows of x in f32. Row k holds element k of HALVES lines. In a row of `sum`, the
// first half holds the results of the even lines, the second half those of the odd lines.
VF_INLINE void sum_sixteen(float (*sum)[HALVES], const uint16_t *x, int64_t stride,
                           const uint16_t *flip)
{
  vi both[16];
#pragma GCC unroll 16
  for (int k = 0; k < 16; k++) both[k] = (vi)(vh_load(x + k * stride) ^ flip[k]);
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

// Transforms HALVES lines in f32, without the factor sqrt(1/n). `sum` is as in sum_sixteen.
VF_INLINE void sum_halves(float (*sum)[HALVES], const uint16_t *x, int64_t stride,
                          const rotation *o, const int n)
{
  for (int r = 0; r < n; r += 16) sum_sixteen(sum + r, x + r * stride, stride, o->flip + r);
  for (int half = 16; half < n; half *= 2)
    for (int k = 0; k < n; k++)
      for (int c = 0; !(k & half) && c < HALVES; c++) BUTTERFLY(sum[k][c], sum[k + half][c]);
}

VF_INLINE vi rounded_to_bf16(vf x)
{ return vi_add(vi_add((vi)x, vi_set1(0x7FFF)), vi_and(vi_shr((vi)x, 16), vi_set1(1))); }

VF_INLINE bool vh_any(vh a) { return vm_any(vm_not(vi_eq((vi)a, vi_set1(0)))); }

// Transforms LINE lines of x. Lines whose f32 sums may be inexact are computed in f64. Rows of the
// result are MOST elements apart.
VF_INLINE void rotate_halves(uint16_t *to, const uint16_t *x, int64_t stride, const rotation *o,
                             const int n)
{
  const vi upper = vi_set1((int32_t)0xFFFF0000);
  const vf root = vf_set1(n == 16 ? 0.25f : 0.125f);
  for (int l = 0; l < LINE; l += HALVES, x += HALVES, to += HALVES) {
    float sum[64][HALVES];
    sum_halves(sum, x, stride, o, n);
    for (int k = 0; k < n; k++) {
      vi even = rounded_to_bf16(vf_mul(vf_load(sum[k]), root)),
         odd = rounded_to_bf16(vf_mul(vf_load(sum[k] + VF_LANES), root));
      vh_store(to + k * MOST, (vh)vi_or(vi_shr(even, 16), vi_and(odd, upper)));
    }
    vh inexact = inexact_lines(x, stride, n);
    for (int c = 0; vh_any(inexact) && c < HALVES; c++)
      if (inexact[c]) rotate_line(to + c, MOST, x + c, stride, o);
  }
}

// ------------------------------------------------------------------ tiles

void ISA_NAME(rotate_tile)(const rotation *o, void *tile, int64_t a0, int deep, int64_t l0,
                           int lines)
{
  double wide[MOST][LINE];
  uint16_t room[64][LINE];
  for (int a = 0; a < deep; a += o->n)
    for (int l = 0; l < lines; l += LINE) {
      int n = (int)smaller(o->n, deep - a), some = (int)smaller(LINE, lines - l);
      uint16_t *to = (uint16_t *)tile + a * MOST + l;
      if (n == o->n && halves_fit(o)) {
        int64_t stride;
        const uint16_t *x = find_halves(room, &stride, o, a0 + a, l0 + l, some);
        // prefetches the next tile, because its rows are too far apart for the hardware to do so
        for (int k = 0; o->turned && k < n; k++)
          __builtin_prefetch(x + k * stride + MOST, 0, 2);
        if (n == 16) rotate_halves(to, x, stride, o, 16);
        else rotate_halves(to, x, stride, o, 64);
        continue;
      }
      load_group(wide, o, a0 + a, n, l0 + l, some, n == o->n);
      double root = n == o->n ? sqrt(1.0 / n) : 1;      // an incomplete last group stays as it is
      if (n == o->n) transform(wide, n);
      for (int k = 0; k < n; k++)
        if (o->dtype == ENG_bf16) round_line(to + k * MOST, wide[k], root);
        else for (int c = 0; c < LINE; c++)
          ((float *)tile)[(a + k) * MOST + l + c] = (float)(wide[k][c] * root);
    }
}

// Updates *top (f32 bits) with the magnitudes of n bf16 numbers, except NaN. Returns whether any of
// the numbers is NaN.
static bool add_halves(uint32_t *top, const uint16_t *x, int n)
{
  bool nan = false;
  for (int i = 0; i < n; i++) {
    uint32_t bits = (uint32_t)(x[i] & 0x7FFF) << 16;
    if (bits > 0x7F800000u) nan = true;
    else if (bits > *top) *top = bits;
  }
  return nan;
}

// Does the work of rotated_amax for one group of n elements in HALVES lines. Lines whose f32 sums
// are exact update *most with the magnitudes of these sums; rotated_amax applies the factor
// sqrt(1/n) and rounds the maximum. The other lines are computed in f64 and update *top with the
// magnitudes of their results.
VF_INLINE bool amax_of_halves(vi *most, uint32_t *top, const uint16_t *x, int64_t stride,
                              const rotation *o, const int n)
{
  float sum[64][HALVES];
  vi even = {0}, odd = {0};
  vh inexact = inexact_lines(x, stride, n);
  bool nan = false;
  sum_halves(sum, x, stride, o, n);
  for (int k = 0; k < n; k++) {
    even = vi_larger_(even, magnitudes(vf_load(sum[k])));
    odd = vi_larger_(odd, magnitudes(vf_load(sum[k] + VF_LANES)));
  }
  if (vh_any(inexact)) {
    even = vi_and(even, vi_sub(vi_and((vi)inexact, vi_set1(1)), vi_set1(1)));
    odd = vi_and(odd, vi_sub(vi_shr((vi)inexact, 31), vi_set1(1)));
    for (int c = 0; c < HALVES; c++) {
      uint16_t line[64];
      if (!inexact[c]) continue;
      rotate_line(line, 1, x + c, stride, o);
      nan |= add_halves(top, line, n);
    }
  }
  *most = vi_larger_(*most, vi_larger_(even, odd));
  return nan;
}

bool ISA_NAME(rotated_amax)(const rotation *o, uint32_t *top, int64_t a0, int deep)
{
  uint16_t tile[MOST * MOST], room[64][LINE];
  bool nan = false;
  vi most = {0};
  for (int a = 0; a < deep; a += o->n)
    for (int64_t l = 0; l < o->lines; l += LINE) {
      int n = (int)smaller(o->n, deep - a), some = (int)smaller(LINE, o->lines - l);
      if (n == o->n && halves_fit(o)) {
        int64_t stride;
        const uint16_t *x = find_halves(room, &stride, o, a0 + a, l, some);
        for (int c = 0; c < LINE; c += HALVES)
          if (n == 16) nan |= amax_of_halves(&most, top, x + c, stride, o, 16);
          else nan |= amax_of_halves(&most, top, x + c, stride, o, 64);
        continue;
      }
      ISA_NAME(rotate_tile)(o, tile, a0 + a, n, l, some);
      for (int k = 0; k < n; k++) nan |= add_halves(top, tile + k * MOST, some);
    }
  most = rounded_to_bf16(vf_mul((vf)most, vf_set1(o->n == 16 ? 0.25f : 0.125f)));
  *top = (uint32_t)larger(*top, across(vi_and(most, vi_set1(0x7FFF0000))));
  return nan;
}

static void rotate_task(const void *context, int64_t t)
{
  const rotation *o = context;
  int64_t across = (o->lines + MOST - 1) / MOST, a0 = t / across * MOST, l0 = t % across * MOST;
  int deep = (int)smaller(MOST, o->along - a0), lines = (int)smaller(MOST, o->lines - l0),
      size = o->dtype == ENG_f32 ? 4 : 2;
  uint32_t tile[MOST * MOST], turn[MOST * MOST];
  for (int l = 0; l < lines; l++)
    for (int at = 0; at < size * deep; at += 64)
      __builtin_prefetch((char *)o->y + size * ((l0 + l) * o->along + a0) + at, 1);
  ISA_NAME(rotate_tile)(o, tile, a0, deep, l0, lines);
  turn_tile(turn, MOST, tile, MOST, deep, lines, size);
  for (int l = 0; l < lines; l++)
    memcpy((char *)o->y + size * ((l0 + l) * o->along + a0), (char *)turn + size * l * MOST,
           (size_t)(size * deep));
}

rotation ISA_NAME(rotation_of)(const tensor *x, int64_t n, int64_t signs, bool turned, int dtype)
{
  rotation o = {.x = x, .dtype = dtype, .n = (int)n, .turned = turned, .columns = row_length(x)};
  o.along = turned ? row_count(x) : o.columns;
  o.lines = turned ? o.columns : row_count(x);
  uint32_t word[4] = {0};
  if (signs > 0) philox_block(word, (uint64_t)signs);
  for (int i = 0; i < o.n; i++) {
    o.sign[i] = mx_sign(signs, word, i);
    o.flip[i] = o.sign[i] < 0 ? 0x8000 : 0;
  }
  return o;
}

KERNEL(hadamard)
{
  const typeof(call->hadamard) *a = &call->hadamard;
  const tensor *x = call->in[0], *y = call->out[0];
  bool fast = dtype_is_fast(x->dtype) && (y->dtype == ENG_f32 || y->dtype == ENG_bf16);
  if (!fast || x->count == 0) return forward_to_reference(call);
  rotation o = ISA_NAME(rotation_of)(x, a->n, a->signs, a->turned != 0, y->dtype);
  o.y = y->data;
  run_tasks((o.along + MOST - 1) / MOST * ((o.lines + MOST - 1) / MOST),
            x->count >= PARALLEL_ELEMENTS, rotate_task, &o);
  return ENG_OK;
}
