// Rounds the elements of scaled blocks to the codes of a microscaling format, or to the values of
// these codes in bf16. Included by mx_quantize.c, once per instruction set. Owns nothing.
#pragma once

#include "base/mx.h"
#include "magnitude.h"
#include "rows.h"
#include "simd.h"

enum { INFINITE = 0x7F800000 };   // the bits of infinity in f32

/// How elements are rounded: to nearest even; by random words, as in mx_code_stochastic; or toward
/// the element's average over steps, as in mx_code_toward.
typedef enum rounding { NEAREST, RANDOM, TOWARD } rounding;

/// Computes the codes of y and the values of the codes. If `by` is RANDOM, u holds numbers in
/// [0, 1); if TOWARD, the averages, scaled as y is. `nan` says whether y may hold NaN.
/// Let 2^e be the largest power of two not above |y| or, if |y| is subnormal in the format, the
/// smallest normal number. `drop` is how many of f32's fraction bits the format lacks. Adding
/// 2^(e + drop) rounds to the format's step and leaves the significand in the sum's last bits.
VF_INLINE void encode(vf y, vf u, const rounding by, bool nan, const mx_format f, vi *code,
                      vf *value)
{
  const int drop = 23 - f.fraction, least = (128 - f.bias) << 23, step = f.fraction << 23;
  vi magnitude = magnitudes(y);
  vf a = (vf)magnitude;
  if (by == RANDOM) {
    vi binade = vi_larger_(vi_and(magnitude, vi_set1(INFINITE)), vi_set1(least));
    a = vf_fused(u, (vf)vi_sub(binade, vi_set1(step)), a);
  }
  a = (vf)vi_least_((vi)a, (int32_t)f32_bits(f.largest));
  vi binade = vi_above_(vi_and((vi)a, vi_set1(INFINITE)), least);
  vf far = (vf)vi_add(binade, vi_set1(least + (drop << 23))), sum = vf_add(a, far),
     v = vf_sub(sum, far);
  vi c = vi_add((vi)sum, vi_shr(binade, drop));
  if (by != NEAREST) {                               // undoes rounding up, so that a is truncated
    vm above = vf_gt(v, a);
    vf one = (vf)vi_add(binade, vi_set1(least - step));    // the distance to the next code
    v = vf_select(above, vf_sub(v, one), v);
    c = vi_select(above, vi_sub(c, vi_set1(1)), c);
    if (by == TOWARD) {
      vf toward = (vf)vi_xor((vi)u, vi_and((vi)y, vi_set1(INT32_MIN)));
      vm up = vm_and(vf_ge(toward, vf_fma(one, vf_set1(0.5f), v)), vf_lt(a, vf_set1(f.largest)));
      v = vf_select(up, vf_add(v, one), v);
      c = vi_select(up, vi_add(c, vi_set1(1)), c);
    }
  }
  c = vi_and(c, vi_set1(f.sign ? f.sign - 1 : 127));
  if (f.sign) c = vi_or(c, vi_and(vi_shr((vi)y, 31 - __builtin_ctz((unsigned)f.sign)),
                                  vi_set1(f.sign)));
  else c = vi_select(vi_gt(vi_set1(0), (vi)y), vi_sub(vi_set1(0), c), c);
  v = vf_copysign(v, y);
  if (!f.sign) v = vf_add(v, vf_zero());             // two's complement has no -0
  if (nan) {
    vm is_nan = vi_gt(magnitude, vi_set1(INFINITE));
    c = vi_select(is_nan, vi_set1(f.nan), c);
    v = vf_select(is_nan, vf_set1(mx_value((uint8_t)f.nan, f)), v);
  }
  *code = c;
  *value = v;
}

enum { WORD_LINE = 128 };

/// The elements that one call of encode_strip encodes: part of one row of x or, if each column is a
/// block, parts of `rows` rows.
typedef struct strip {
  const void *x;             // element (0, 0) of the strip has the index `first`
  int      dtype;            // of x
  int64_t  first, stride;    // stride: elements between rows of x
  int64_t  line;             // bytes between rows of the result
  int      rows, columns;
  int      wide;             // columns of a block, or 0 if each column is a block
  const float *factor;       // [blocks]: multiplies the elements of a block before rounding
  const float *unit;         // [blocks]: the value of a block's scale
  const uint32_t *word;      // random words, with rows WORD_LINE apart, or NULL if not RANDOM
  int      sr_bits;
  const float *average;      // the averages of row 0, or NULL if not TOWARD
  bool     nan;              // an element or a factor may be NaN
  bool     exact;            // each code * scale is exact in bf16
  bool     powers;           // each unit is a power of two, 2^-100 to 2^126, and equals 1 / factor
  bool     packed;           // stores the codes of elements 2k and 2k + 1 of a block in one byte
} strip;

/// Returns whether a strip of these elements can be `packed`. `wide` is the field of strip; if it
/// is 0, `deep` is the number of elements of a block.
static bool strip_packs(int dtype, bool nearest, int columns, int wide, int deep)
{
  bool fits = wide ? wide % HALVES == 0 || 2 * wide == HALVES : deep % 2 == 0;
  return dtype == ENG_bf16 && nearest && columns % HALVES == 0 && fits;
}

/// Encodes columns [c, c + n) of row r of a strip, n <= VF_LANES. Writes each element's code as a
/// byte or, with `values`, its code * scale in bf16. `by` and `scale` hold the factors and scales
/// of these columns.
VF_INLINE void encode_lanes(void *to, const strip *s, int r, int c, const int n, vf by, vf scale,
                            const bool values, const rounding how, const mx_format f)
{
  vf y = vf_mul(vf_read(s->x, s->dtype, s->first + r * s->stride + c, n), by), u = vf_zero(), v;
  vi code;
  if (how == TOWARD) u = vf_mul(vf_read(s->average, ENG_f32, c, n), by);
  if (how == RANDOM)   // computes mx_uniform of each word
    u = vf_mul(vi_to_vf(vi_shr(vi_load((const int32_t *)s->word + r * WORD_LINE + c),
                               32 - s->sr_bits)),
               vf_from_bits(vi_set1((127 - s->sr_bits) << 23)));
  encode(y, u, how, s->nan, f, &code, &v);
  to = (char *)to + r * s->line;
  if (!values) vf_put_bytes_n_((uint8_t *)to + c, code, n);
  else if (n == VF_LANES && s->exact) vf_store_bf16_exact((uint16_t *)to + c, vf_mul(v, scale));
  else vf_store_bf16_n((uint16_t *)to + c, vf_mul(v, scale), n);
}

/// Encodes HALVES elements of bf16. code[0] and v[0] belong to the elements at even positions,
/// code[1] and v[1] to those at odd positions.
VF_INLINE void encode_halves(vi code[2], vf v[2], const uint16_t *x, const vf by[2], bool nan,
                             const mx_format f)
{
  vi both = (vi)vh_load(x), odd = vi_and(both, vi_set1((int32_t)0xFFFF0000));
  encode(vf_mul((vf)vi_shl(both, 16), by[0]), vf_zero(), NEAREST, nan, f, &code[0], &v[0]);
  encode(vf_mul((vf)odd, by[1]), vf_zero(), NEAREST, nan, f, &code[1], &v[1]);
}

/// Stores what encode_halves has computed: the codes as bytes or, with `values`, each v * scale,
/// which must be exact in bf16.
VF_INLINE void put_halves(void *to, const vi code[2], const vf v[2], const vf scale[2],
                          const bool values)
{
  if (values) {
    vi even = (vi)vf_mul(v[0], scale[0]), odd = (vi)vf_mul(v[1], scale[1]);
    vh_store(to, (vh)vi_or(vi_shr(even, 16), vi_and(odd, vi_set1((int32_t)0xFFFF0000))));
  } else {
    vh_put_bytes(to, (vh)vi_or(vi_and(code[0], vi_set1(0xFF)), vi_shl(code[1], 16)));
  }
}

/// Does the work of encode_strip for bf16, HALVES columns at a time. Returns the number of columns
/// that it has encoded, 0 if blocks are parts of a row and have a width other than HALVES / 2 or a
/// multiple of HALVES.
VF_INLINE int encode_pairs(void *to, const strip *s, const bool values, const bool each,
                           const mx_format f)
{
  const bool nan = s->nan, packed = s->packed;
  const int64_t stride = s->stride, line = s->line;
  const int columns = s->columns, rows = each ? s->rows : 1, wide = each ? columns : s->wide;
  const int two = !each && 2 * wide == HALVES;    // HALVES columns are two blocks
  int c = 0;
  if (!each && wide % HALVES != 0 && !two) return 0;
  // left: the columns of block j that are not encoded yet
  for (int j = 0, left = wide; c + HALVES <= columns; c += HALVES, left -= HALVES) {
    if (left <= 0) j += 1 + two, left = wide;
    const uint16_t *x = (const uint16_t *)s->x + s->first + c;
    const float *factor = s->factor + (each ? c : j), *unit = s->unit + (each ? c : j);
    char *row = (char *)to + (values ? 2 * c : packed && !each ? c / 2 : c);
    vf by[2], scale[2], v[2];
    vi code[2], next[2];
    if (each) {
      vf_deinterleave(by, factor);
      vf_deinterleave(scale, unit);
    } else {
      by[0] = by[1] = two ? vf_set2(factor[0], factor[1]) : vf_set1(factor[0]);
      scale[0] = scale[1] = two ? vf_set2(unit[0], unit[1]) : vf_set1(unit[0]);
    }
    for (int r = 0; r < rows; r++, x += stride, row += line) {
      encode_halves(code, v, x, by, nan, f);
      if (packed && !each) {
        vf_put_bytes_n_((uint8_t *)row, vi_or(code[0], vi_shl(code[1], 4)), VF_LANES);
        continue;
      }
      if (packed) {   // the codes of two rows
        encode_halves(next, v, x += stride, by, nan, f), r++;
        for (int k = 0; k < 2; k++) code[k] = vi_or(code[k], vi_shl(next[k], 4));
      }
      put_halves(row, code, v, scale, values);
    }
  }
  return c;
}

#if defined(ENG_ISA_avx512)
/// Encodes HALVES elements of bf16, none of them NaN, by arithmetic on 16-bit integers. `factor`
/// holds their factors in bf16. These are powers of two, so small that each subnormal rounds to 0.
/// Returns the codes or, with `values`, the value of each code divided by its factor, in bf16.
/// Let u be |x| * factor, with bf16's fraction and the format's bias. If the result is normal in
/// the format, its code is u >> drop, rounded to nearest even. If it is subnormal, its code is the
/// significand, shifted further by the distance to the smallest normal exponent.
VF_INLINE vh encode_by_power(vh x, vh factor, const bool values, const mx_format f)
{
#define SET(n) _mm512_set1_epi16((short)(n))
  const int drop = 7 - f.fraction, bias = (127 - f.bias) << 7, normal = 1 << f.fraction;
  const __m512i one = SET(1), raise = _mm512_sub_epi16((__m512i)factor, SET(0x3F80 + bias));
  __m512i u = _mm512_add_epi16((__m512i)(x & 0x7FFF), raise);
  const __m512i shift = _mm512_max_epi16(SET(drop), _mm512_sub_epi16(SET(drop + 1),
                                                                    _mm512_srai_epi16(u, 7))),
                half = _mm512_sllv_epi16(one, _mm512_sub_epi16(shift, one));
  u = _mm512_max_epi16(u, (__m512i)((x & 0x7F) | 0x80));
  const __m512i odd = _mm512_and_si512(_mm512_srlv_epi16(u, shift), one);
  u = _mm512_add_epi16(_mm512_add_epi16(u, half), _mm512_sub_epi16(odd, one));
  const __m512i code = _mm512_min_epu16(_mm512_srlv_epi16(u, shift), SET(f.top));
  if (!values)
    return (vh)code | (x >> (15 - __builtin_ctz((unsigned)f.sign)) & (uint16_t)f.sign);
#define U(k) (short)((f32_bits(k) >> 16) - ((126u + (unsigned)f.fraction) << 7))
  const __m512i subnormal =   // what u is for the values of the codes below `normal`
    _mm512_castsi128_si512(_mm_setr_epi16(0, U(1), U(2), U(3), U(4), U(5), U(6), U(7)));
#undef U
  u = _mm512_mask_permutexvar_epi16(_mm512_slli_epi16(code, (unsigned)drop),
                                    _mm512_cmplt_epu16_mask(code, SET(normal)), code, subnormal);
  u = _mm512_maskz_sub_epi16(_mm512_test_epi16_mask(code, code), u, raise);   // code 0 stays 0
  return (vh)u | (x & 0x8000);
#undef SET
}

/// Does the work of encode_strip for bf16 if scales are powers of two, HALVES columns at a time.
/// Returns the number of columns that it has encoded, 0 if encode_by_power cannot encode the strip.
VF_INLINE int encode_powers(void *to, const strip *s, const bool values, const bool each,
                            const mx_format f)
{
  const bool packed = s->packed;
  const int columns = s->columns, rows = each ? s->rows : 1, wide = each ? columns : s->wide;
  const int64_t stride = s->stride, line = s->line;
  if (!s->powers || !f.sign || s->nan || (!each && wide % HALVES != 0)) return 0;
  int c = 0;
  for (int j = 0, left = wide; c + HALVES <= columns; c += HALVES, left -= HALVES) {
    if (left <= 0) j++, left = wide;   // the next block of the row
    const uint16_t *x = (const uint16_t *)s->x + s->first + c;
    uint8_t *row = (uint8_t *)to + (values ? 2 * c : packed && !each ? c / 2 : c);
    const vh factor = each ? vh_high(s->factor + c) : vh_set1(f32_bits(s->factor[j]) >> 16);
    for (int r = 0; r < rows; r++, x += stride, row += line) {
      vh y = encode_by_power(vh_load(x), factor, values, f);
      if (values) {
        vh_store((uint16_t *)row, y);
      } else if (packed && each) {   // the codes of two rows
        y |= encode_by_power(vh_load(x += stride), factor, false, f) << 4;
        vh_put_bytes(row, y);
        r++;
      } else if (packed) {
        vf_put_bytes_n_(row, vi_or((vi)y, vi_shr((vi)y, 12)), VF_LANES);
      } else {
        vh_put_bytes(row, y);
      }
    }
  }
  return c;
}
#endif

/// Encodes a strip. With `each`, every column is a block.
VF_INLINE void encode_strip(void *to, const strip *s, const bool values, const bool each,
                            const rounding how, const mx_format f)
{
  const float *factor = s->factor, *unit = s->unit;
  int first = 0;
  if (s->dtype == ENG_bf16 && how == NEAREST && (!values || s->exact)) {
#if defined(ENG_ISA_avx512)
    first = encode_powers(to, s, values, each, f);
#endif
    if (first == 0) first = encode_pairs(to, s, values, each, f);
  }
  for (int j = each ? 0 : first / s->wide, c = first; c < s->columns; j++) {
    vf by = vf_set1(factor[j]), scale = vf_set1(unit[j]);
    int end = each ? s->columns : (int)smaller(c + s->wide, s->columns);
    for (; c < end; c += VF_LANES) {
      int n = (int)smaller(VF_LANES, end - c);
      if (each) by = vf_load(factor + c), scale = vf_load(unit + c);
      for (int r = 0; n == VF_LANES && r < s->rows; r++)
        encode_lanes(to, s, r, c, VF_LANES, by, scale, values, how, f);
      for (int r = 0; n < VF_LANES && r < s->rows; r++)
        encode_lanes(to, s, r, c, n, by, scale, values, how, f);
    }
    c = end;
  }
}

// Encodes a strip in the format f. Functions that are not inlined call it with a constant f, so
// that the compiler simplifies the arithmetic for the two most used formats. In one large function,
// gcc 12 merged the constant cases with the general one.
VF_INLINE void encode_in(void *to, const strip *s, const bool values, const mx_format f)
{
  if (s->average) encode_strip(to, s, values, false, TOWARD, f);
  else if (s->word && s->wide) encode_strip(to, s, values, false, RANDOM, f);
  else if (s->word) encode_strip(to, s, values, true, RANDOM, f);
  else if (s->wide) encode_strip(to, s, values, false, NEAREST, f);
  else encode_strip(to, s, values, true, NEAREST, f);
}

#define NOINLINE static __attribute__((noinline)) void
NOINLINE codes_e4m3(void *to, const strip *s) { encode_in(to, s, false, mx_format_of(ENG_e4m3)); }
NOINLINE values_e4m3(void *to, const strip *s) { encode_in(to, s, true, mx_format_of(ENG_e4m3)); }
NOINLINE codes_e2m1(void *to, const strip *s)
{ encode_in(to, s, false, mx_format_of(ENG_FORMAT_E2M1)); }
NOINLINE values_e2m1(void *to, const strip *s)
{ encode_in(to, s, true, mx_format_of(ENG_FORMAT_E2M1)); }
NOINLINE encode_any(void *to, const strip *s, bool values, mx_format f)
{
  if (values) encode_in(to, s, true, f);
  else encode_in(to, s, false, f);
}
#undef NOINLINE

static void encode_as(void *to, const strip *s, bool values, int64_t format)
{
  if (format == ENG_e4m3) (values ? values_e4m3 : codes_e4m3)(to, s);
  else if (format == ENG_FORMAT_E2M1) (values ? values_e2m1 : codes_e2m1)(to, s);
  else encode_any(to, s, values, mx_format_of(format));
}
