// The number formats by name: the range of each format, and conversion of single numbers to and
// from the small formats. Used by messages, tools and specs, through the FFI; kernels use
// numerics.h and fp8.h directly.
#include "engine.h"
#include "numerics.h"

#include <math.h>
#include <string.h>

// Formats with exponent bits: 2^(1 - bias) is the smallest normal number, and
// 2^(1 - bias - fraction_bits) the smallest subnormal. `last` is the fraction of the largest finite
// number in units of 2^-fraction_bits. `above` says what the code after the largest number stands
// for: INF, infinity; NOT, the only NaN of the format; NONE, nothing, because the format always
// saturates. Formats without exponent bits: codes are two's complement in units of
// 2^-fraction_bits, from -last to 127.
enum { INF, NOT, NONE };
typedef struct format {
  const char *name;
  int exponent_bits, fraction_bits, bias;
  uint64_t last;
  int above;
  bool has_sign;
} format;
static const format formats[] = {
  { "f64", 11, 52, 1023, (1ull << 52) - 1, INF, true },
  { "f32", 8, 23, 127, (1 << 23) - 1, INF, true },
  { "tf32", 8, 10, 127, 1023, INF, true },
  { "bf16", 8, 7, 127, 127, INF, true },
  { "f16", 5, 10, 15, 1023, INF, true },
  { "e5m6", 5, 6, 15, 63, INF, true },
  { "e5m2", 5, 2, 15, 3, INF, true },
  // with the top exponent, the fraction 7 means NaN, and the other fractions mean numbers
  { "e4m3", 4, 3, 7, 6, NOT, true },
  { "ue4m3", 4, 3, 7, 6, NOT, false },
  { "e4m3_ieee", 4, 3, 7, 7, INF, true },
  { "e3m2", 3, 2, 3, 3, NONE, true },
  { "e2m3", 2, 3, 1, 7, NONE, true },
  { "e2m1", 2, 1, 1, 1, NONE, true },
  { "int8", 0, 0, 0, 128, NONE, true },
  { "mxint8", 0, 6, 0, 127, NONE, true },
};

static const format *find_format(const char *name)
{
  for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
    if (strcmp(formats[i].name, name) == 0) return &formats[i];
  return NULL;
}

bool eng_format_get(eng_format *out, const char *name)
{
  if (strcmp(name, "ue8m0") == 0) {
    *out = (eng_format){ .exponent_bits = 8, .bias = 127, .max_exponent = 127, .min_exponent = -127,
                         .largest = 0x1p127, .overflow = INFINITY, .normal = 0x1p-127,
                         .smallest = 0x1p-127 };
    return true;
  }
  const format *f = find_format(name);
  if (!f) return false;
  int fraction = f->fraction_bits, bias = f->bias;
  if (f->exponent_bits == 0) {
    double unit = ldexp(1, -fraction);
    *out = (eng_format){ .fraction_bits = 7, .max_exponent = 6 - fraction,
                         .min_exponent = -fraction, .is_signed = 1, .largest = 127 * unit,
                         .overflow = INFINITY, .normal = unit, .smallest = unit };
    return true;
  }
  // exponent of the largest number
  int top = (1 << f->exponent_bits) - 1 - bias - (f->above == INF);
  double unit = ldexp(1, top - fraction), largest = ldexp(1, top) + (double)f->last * unit;
  // The midpoint between the largest number and the next code. It overflows if the largest number's
  // fraction is odd, because ties round to even.
  double tie = largest + unit / 2;
  *out = (eng_format){ .exponent_bits = f->exponent_bits, .fraction_bits = fraction,
                       .bias = bias, .max_exponent = top, .min_exponent = 1 - bias,
                       .is_signed = f->has_sign, .largest = largest,
                       .overflow = f->above == NONE ? INFINITY
                                   : f->last & 1    ? tie : nextafter(tie, INFINITY),
                       .normal = ldexp(1, 1 - bias), .smallest = ldexp(1, 1 - bias - fraction) };
  return true;
}

// Returns the code of x in a format of the table, rounded to nearest even. With exponent bits, NaN
// becomes the positive quiet NaN or, in a format without NaN, the largest number, as in the cvt
// instructions of the hardware. A format without a sign bit gets the code of |x|.
static int64_t encode(const format *f, double x, int mode)
{
  if (f->exponent_bits == 0) {   // saturates; NaN becomes 0
    double units = rint(ldexp(x, f->fraction_bits));
    return (uint8_t)(int8_t)(units != units ? 0 : fmin(fmax(units, -(double)f->last), 127));
  }
  int code_bits = f->exponent_bits + f->fraction_bits;
  uint32_t unit = 1u << f->fraction_bits, infinite = (1u << code_bits) - unit,
           largest = (f->above == INF ? infinite - unit : infinite) + (uint32_t)f->last,
           nan = f->above == INF ? infinite + unit / 2 : largest + (f->above == NOT);
  return small_from_f64(x, f->fraction_bits, f->bias, largest, f->has_sign ? 1u << code_bits : 0,
                        nan, f->above == NONE ? FP8_SATURATE : mode);
}

static double decode(const format *f, uint32_t code)
{
  if (f->exponent_bits == 0) return ldexp((int8_t)(uint8_t)code, -f->fraction_bits);
  int fraction = f->fraction_bits, field = (int)(code >> fraction) & ((1 << f->exponent_bits) - 1);
  uint64_t part = code & ((1u << fraction) - 1);
  double value = ldexp((double)(part | (uint64_t)(field > 0) << fraction),
                       (field ? field : 1) - f->bias - fraction);
  if (field == (1 << f->exponent_bits) - 1) {
    if (f->above == INF) value = part ? NAN : INFINITY;
    if (f->above == NOT && part > f->last) value = NAN;
  }
  return f->has_sign && code >> (f->exponent_bits + fraction) & 1 ? -value : value;
}

// Rounds as float8_e8m0fnu in ml_dtypes does: to nearest, ties up. Subnormal f32 above 2^-127
// become 2^-126. 0, negative numbers and numbers that round past 2^127 become NaN.
static uint8_t ue8m0_nearest(double x)
{
  if (!(x > 0) || x >= 0x1.8p127) return 0xFF;
  if (x < 0x1p-126) return x > 0x1p-127;
  int exponent;
  double fraction = frexp(x, &exponent);   // 0.5 <= fraction < 1
  return (uint8_t)(exponent + 126 + (fraction >= 0.75));
}

// Casts to e5m6 as TileKernels does (quant/per_token_cast_to_e5m6_kernel.py): truncates to f16,
// then rounds up by a rule that agrees with rounding to nearest even only for normal results.
// Matches TileKernels for |x| <= 65024, the range that its scales guarantee; larger values saturate
// here.
static uint16_t e5m6_tilekernels(float x)
{
  uint32_t bits = f32_bits(x), magnitude = bits & 0x7FFFFFFFu, half;
  if (magnitude > 0x7F800000u) return 0x7E0;
  // 65536 and above
  if (magnitude >= 0x47800000u) half = 0x7BFFu;
  else if (magnitude >= 0x38800000u) half = (magnitude >> 13) - (112u << 10);
  // subnormal f16: in units of 2^-24
  else half = (uint32_t)(f32_from(magnitude) * 16777216.0f);
  uint32_t code = half >> 4;
  code += (code & 1u) + (bits & 0x1FFFFu) > 0x10000u;
  return (uint16_t)((bits >> 20 & 0x800u) | small_bound(code, E5M6_MAX_CODE, FP8_SATURATE));
}

int64_t eng_small_encode(const char *name, double x, int mode)
{
  if (strcmp(name, "ue8m0") == 0)
    return mode & 4 ? ue8m0_nearest(x) : ue8m0_from_f32(f32_odd_from_f64(x), mode & 1);
  if (strcmp(name, "e5m6_tilekernels") == 0) return e5m6_tilekernels((float)x);
  // these three have other codes for NaN than encode()
  if (strcmp(name, "e5m2") == 0) return e5m2_from_f64(x, mode);
  if (strcmp(name, "f16") == 0) return f16_from_f64(x);
  if (strcmp(name, "bf16") == 0) return bf16_from_f64(x);
  const format *f = find_format(name);
  return f && f->fraction_bits <= 10 ? encode(f, x, mode) : -1;
}

double eng_small_decode(const char *name, uint32_t code)
{
  if (strcmp(name, "ue8m0") == 0) return ue8m0_to_f32((uint8_t)code);
  const format *f = find_format(strcmp(name, "e5m6_tilekernels") == 0 ? "e5m6" : name);
  return f && f->fraction_bits <= 10 ? decode(f, code) : NAN;
}
