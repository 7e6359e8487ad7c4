// The floating-point formats by name: the range of each, and conversion of single numbers in the
// small ones. Used by messages, tools and specs; kernels use numerics.h and fp8.h directly. Called
// through the FFI.
#include "engine.h"
#include "numerics.h"

#include <math.h>
#include <string.h>

// 2^(1 - bias) is the smallest normal number and 2^(1 - bias - fraction_bits) the smallest
// subnormal. `last` is the fraction of the largest finite number, in units of 2^-fraction_bits.
static const struct { const char *name; int exponent_bits, fraction_bits, bias; uint64_t last; }
formats[] = {
  { "f64", 11, 52, 1023, (1ull << 52) - 1 }, { "f32", 8, 23, 127, (1 << 23) - 1 },
  { "bf16", 8, 7, 127, 127 }, { "f16", 5, 10, 15, 1023 }, { "e5m6", 5, 6, 15, 63 },
  { "e5m2", 5, 2, 15, 3 },
  { "e4m3", 4, 3, 7, 6 },     // the top exponent holds numbers; only its last fraction is NaN
};

bool eng_format_get(eng_format *out, const char *name)
{
  if (strcmp(name, "ue8m0") == 0) {
    *out = (eng_format){ .exponent_bits = 8, .bias = 127, .max_exponent = 127, .min_exponent = -127,
                         .largest = 0x1p127, .overflow = INFINITY, .normal = 0x1p-127,
                         .smallest = 0x1p-127 };
    return true;
  }
  for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
    if (strcmp(formats[i].name, name) != 0) continue;
    int fraction = formats[i].fraction_bits, bias = formats[i].bias;
    int top = (1 << formats[i].exponent_bits) - 1 - bias;   // exponent of the largest number
    bool has_inf = formats[i].last == (1ull << fraction) - 1;
    if (has_inf) top--;
    double unit = ldexp(1, top - fraction),
           largest = ldexp(1, top) + (double)formats[i].last * unit;
    // Half a unit past the largest number. This tie rounds away from an odd fraction.
    double tie = largest + unit / 2;
    *out = (eng_format){ .exponent_bits = formats[i].exponent_bits, .fraction_bits = fraction,
                         .bias = bias, .max_exponent = top, .min_exponent = 1 - bias,
                         .is_signed = 1, .largest = largest,
                         .overflow = formats[i].last & 1 ? tie : nextafter(tie, INFINITY),
                         .normal = ldexp(1, 1 - bias), .smallest = ldexp(1, 1 - bias - fraction) };
    return true;
  }
  return false;
}

int64_t eng_small_encode(const char *format, double x, int mode, uint32_t random)
{
  float f = f32_odd_from_f64(x);
  bool stochastic = mode & FP8_STOCHASTIC;
  if (strcmp(format, "e4m3") == 0)
    return stochastic ? fp8_from_f32(f, 3, mode, random) : e4m3_from_f64(x, mode);
  if (strcmp(format, "e5m2") == 0)
    return stochastic ? fp8_from_f32(f, 2, mode, random) : e5m2_from_f64(x, mode);
  if (strcmp(format, "e5m6") == 0) return e5m6_from_f64(x, mode);
  if (strcmp(format, "e5m6_tilekernels") == 0) return e5m6_from_f32_tilekernels((float)x);
  if (strcmp(format, "ue8m0") == 0) return ue8m0_from_f32(f, mode & 1);
  if (strcmp(format, "f16") == 0) return f16_from_f64(x);
  if (strcmp(format, "bf16") == 0) return bf16_from_f64(x);
  return -1;
}

double eng_small_decode(const char *format, uint32_t code)
{
  if (strcmp(format, "e4m3") == 0) return e4m3_to_f32((uint8_t)code);
  if (strcmp(format, "e5m2") == 0) return e5m2_to_f32((uint8_t)code);
  if (strncmp(format, "e5m6", 4) == 0) return e5m6_to_f32((uint16_t)code);
  if (strcmp(format, "ue8m0") == 0) return ue8m0_to_f32((uint8_t)code);
  if (strcmp(format, "f16") == 0) return f16_to_f32((uint16_t)code);
  if (strcmp(format, "bf16") == 0) return bf16_to_f32((uint16_t)code);
  return f64_from(0x7FF8000000000000ull);
}
