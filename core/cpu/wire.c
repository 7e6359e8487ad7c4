// The arithmetic of gradient messages between ranks, in host memory: a search for inf and nan, sums
// over ranks, and e4m3 encoding. device/wire.h declares the functions. Owns nothing. Called by
// dist/.
#include "device/wire.h"

#include "base/fp8_scale.h"
#include "base/numerics.h"

#include <stdbool.h>
#include <string.h>

// PIECE: elements summed at a time. LEVELS: the most partial sums of wire_sum; 24 are enough for
// fewer than 2^24 ranks.
enum { PIECE = 1024, LEVELS = 24 };

int wire_flags(const void *x, int dtype, int64_t n)
{
  int inf = 0, nan = 0;
  if (dtype == ENG_f32) {
    const int32_t *bits = x;
    for (int64_t i = 0; i < n; i++) {
      int32_t magnitude = bits[i] & 0x7FFFFFFF;
      inf |= magnitude == 0x7F800000;
      nan |= magnitude > 0x7F800000;
    }
  } else {
    const int16_t *bits = x, limit = dtype == ENG_f16 ? 0x7C00 : 0x7F80;
    int16_t any_inf = 0, any_nan = 0;    // 16 bits wide, so that the loop is vectorized
    for (int64_t i = 0; i < n; i++) {
      int16_t magnitude = bits[i] & 0x7FFF;
      any_inf |= magnitude == limit;
      any_nan |= magnitude > limit;
    }
    inf = any_inf, nan = any_nan;
  }
  return (inf ? WIRE_INF : 0) | (nan ? WIRE_NAN : 0);
}

static void divided(float *restrict out, const float *restrict x, int m, float share, bool exact)
{
  float factor = 1 / share;               // exact for a power of two: x * factor equals x / share
  if (exact) for (int i = 0; i < m; i++) out[i] = x[i] * factor;
  else for (int i = 0; i < m; i++) out[i] = x[i] / share;
}

static void add(float *restrict out, const float *restrict x, int m)
{ for (int i = 0; i < m; i++) out[i] += x[i]; }

void wire_sum(float *out, const float *const *in, int n, int64_t count, float share)
{
  bool exact = (f32_bits(share) & 0x7FFFFFu) == 0;
  float room[LEVELS][PIECE], term[PIECE];
  int p = 1;
  while (2 * p <= n) p *= 2;
  for (int64_t from = 0; from < count; from += PIECE) {
    int m = (int)(count - from < PIECE ? count - from : PIECE);
    int level[LEVELS], depth = 0;
    for (int k = 0; k < p; k++) {         // two sums of the same level merge into the next level
      divided(room[depth], in[k] + from, m, share, exact);
      if (k + p < n) {
        divided(term, in[k + p] + from, m, share, exact);
        add(room[depth], term, m);
      }
      level[depth++] = 0;
      for (; depth > 1 && level[depth - 1] == level[depth - 2]; depth--, level[depth - 1]++)
        add(room[depth - 2], room[depth - 1], m);
    }
    memcpy(out + from, room[0], (size_t)m * sizeof *out);
  }
}

void wire_e4m3_encode(uint8_t *codes, float *scales, const float *x, int64_t n)
{
  for (int64_t from = 0, block = 0; from < n; from += WIRE_BLOCK, block++) {
    int m = (int)(n - from < WIRE_BLOCK ? n - from : WIRE_BLOCK);
    float amax = 0;
    for (int i = 0; i < m; i++) {
      float magnitude = f32_from(f32_bits(x[from + i]) & 0x7FFFFFFFu);
      if (f32_is_finite(magnitude) && magnitude > amax) amax = magnitude;
    }
    fp8_scale s =
      fp8_scale_of(amax, E4M3_MAX, ENG_SCALE_TRANSFORMER_ENGINE, 1, 0, 0, fp8_power(127));
    scales[block] = s.scale;
    for (int i = 0; i < m; i++)
      codes[from + i] = f32_is_finite(x[from + i])
                          ? e4m3_from_f32(x[from + i] * s.factor, FP8_SATURATE)
                          : (uint8_t)(0x7F | (f32_bits(x[from + i]) >> 24 & 0x80));
    for (int i = 0; s.scale == 0x1p120f && i < m; i++)
      if ((codes[from + i] & 0x7F) == 0x78) codes[from + i]--;   // 256 becomes 240
  }
}

void wire_e4m3_decode(float *x, const uint8_t *codes, const float *scales, int64_t n)
{
  float value[256];
  for (int code = 0; code < 256; code++) value[code] = e4m3_to_f32((uint8_t)code);
  for (int64_t i = 0; i < n; i++) x[i] = value[codes[i]] * scales[i / WIRE_BLOCK];
}
