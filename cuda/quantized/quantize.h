// Shared by the kernels of quantize.cu: the description of a call and of its two outputs, the
// conversion to codes, and the eight numbers of a row that a thread holds in registers. Included by
// quantize_tiles.h and mx_registers.h.
#pragma once

#include "kernel/element.h"
#include "kernel/ptx.h"

#include "base/fp8_layout.h"
#include "base/fp8_scale.h"
extern "C" {
#include "base/rng.h"
}

enum {
  TILE = 128,
  DOWN = 8,
  EIGHT = 8 /* a thread holds DOWN rows of EIGHT numbers */,
  TILE_THREADS = TILE / DOWN * (TILE / EIGHT),
  TILE_WARPS = TILE_THREADS / 32
};
enum { LANES = TILE / EIGHT /* threads per row */, THREADS = 256 /* of a block without tiles */ };

/// How scale factors vary within a tile.
enum { BY_TILE, BY_ROW, BY_COLUMN, BY_BLOCK };

/// One of the two outputs: the codes of x, or their transposed copy. Blocks are in the coordinates
/// of x: each covers row_block x column_block numbers of x.
struct side {
  void    *q;                          // NULL if not wanted
  float   *scale;                      // block (i, j): scale[i * row_stride + j * column_stride]
  // block (i, j) has maxima[i * across + j], its largest magnitude as bits of f32; NULL: each tile
  // finds the maxima of its blocks itself
  uint32_t *maxima;
  float   *factor;                     // of block (i, j): factor[i * across + j]; only for
                                       // quantize_numbers
  // block sizes, and the number of blocks each way
  int64_t  row_block, column_block, down, across;
  int64_t  row_stride, column_stride;
  int64_t  random;                     // Philox block of the first element
  int      how;                        // BY_TILE, BY_ROW, BY_COLUMN or BY_BLOCK
};

/// How a largest magnitude becomes a scale: the arguments of fp8_scale_of.
struct scaling_rule {
  const float *given;                  // the factor, or NULL
  float   largest, eps, limit;
  int     rule, power_of_two, margin, divides;   // divides: 1: q = x / factor (fp8_divides)
};

struct job {
  side    own, turned;
  // not NULL for swiglu_quantize in tiles: x is the gate, and silu(x) * up is rounded to x's
  // format, then quantized
  const void *up;
  scaling_rule rule;
  int64_t rows, columns;
  // bits of the largest magnitude, or of a NaN if the input contains one; NULL if not wanted
  uint32_t *amax;
  uint64_t seed;
  int     wide;                        // 1: groups of eight numbers of x are 16-byte aligned
  int     turned_wide;                 // 1: rows of the transposed copy are 16-byte aligned
  int     tiles;                       // 1: x is processed by tiles
  unsigned across;                     // tiles in a row of tiles
  int     height, width;               // rows and columns as int
  int     same;                        // 1: the transposed copy has q's codes and scales
};

__device__ static inline fp8_scale scale_of(const scaling_rule &r, float amax)
{
  if (r.given) return {*r.given, 1.0f / *r.given};
  return fp8_scale_of(amax, r.largest, r.rule, r.power_of_two, r.eps, r.margin, r.limit);
}

/// Returns the bits of |x|, or `nan` if x is NaN.
__device__ static inline uint32_t magnitude_of(float x, uint32_t nan)
{
  uint32_t a = __float_as_uint(x) & 0x7FFFFFFFu;
  return a > 0x7F800000u ? nan : a;
}

// ------------------------------------------------------------------ codes

/// Returns the codes of four numbers, the first in the lowest byte. E is the number of fraction
/// bits, 3 or 2.
template <int E> __device__ static inline uint32_t codes(float a, float b, float c, float d)
{
#ifdef PTX_FP8
  return E == 3 ? pack_e4m3(a, b) | pack_e4m3(c, d) << 16 : pack_e5m2(a, b) | pack_e5m2(c, d) << 16;
#else
  return (uint32_t)fp8_from_f32(a, E, FP8_SATURATE, 0) |
         (uint32_t)fp8_from_f32(b, E, FP8_SATURATE, 0) << 8 |
         (uint32_t)fp8_from_f32(c, E, FP8_SATURATE, 0) << 16 |
         (uint32_t)fp8_from_f32(d, E, FP8_SATURATE, 0) << 24;
#endif
}

__device__ static inline float scaled(float x, float factor, int divides)
{ return divides ? x / factor : x * factor; }

template <typename T> __device__ static inline float number(T x) { return widen(x); }
template <> __device__ inline float number<double>(double x)     { return (float)x; }

/// Does the same as e5m6_from_f32 with saturation, but without arithmetic in double. (fp8_code_f32
/// can round to 6 fraction bits, not only to 2 or 3.)
__device__ static inline uint16_t e5m6_of(float x)
{
  uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7E0;
  // the code of 65536 and more is too large; min() below limits it
  uint32_t code = magnitude >= 0x47800000u ? 0xFFFu : fp8_code_f32(magnitude, 6);
  return (uint16_t)((bits >> 20 & 0x800u) | min(code, (uint32_t)E5M6_MAX_CODE));
}

/// Stores eight numbers as e5m6 in three words.
__device__ static inline void put_e5m6(uint32_t *to, const float y[EIGHT])
{
  uint16_t code[EIGHT];
  uint32_t word[3];
  for (int k = 0; k < EIGHT; k++) code[k] = e5m6_of(y[k]);
  e5m6_pack(word, code);
  for (int k = 0; k < 3; k++) to[k] = word[k];
}

/// Returns the factor of element (r, c) of x.
__device__ static inline float factor_at(const side &s, int64_t r, int64_t c)
{ return s.factor[r / s.row_block * s.across + c / s.column_block]; }

// ------------------------------------------------------------------ eight numbers

/// Eight adjacent numbers of a row as 32-bit words. A word holds two 16-bit numbers or one f32 (f64
/// is rounded to f32).
template <typename T> struct eight {
  enum { WORDS = sizeof(T) == 2 ? 4 : 8, EACH = EIGHT / WORDS };
  uint32_t w[WORDS];
};

/// Masks for the numbers in a word: the bits of their magnitudes, their signs, and an addend that
/// carries into the sign bit only for the magnitude of a NaN.
template <typename T>
struct magnitudes {
  enum : uint32_t { bits = 0x7FFFFFFFu, signs = 0x80000000u, beyond = 0x007FFFFFu };
};
template <>
struct magnitudes<bf16_t> {
  enum : uint32_t { bits = 0x7FFF7FFFu, signs = 0x80008000u, beyond = 0x007F007Fu };
};
template <>
struct magnitudes<f16_t> {
  enum : uint32_t { bits = 0x7FFF7FFFu, signs = 0x80008000u, beyond = 0x03FF03FFu };
};

/// Reads eight numbers from a 16-byte aligned address, in one access (two for f32).
template <typename T> __device__ static inline void load_wide(eight<T> &v, const T *x)
{
#pragma unroll
  for (int i = 0; i < eight<T>::WORDS / 4; i++) {
    const uint4 raw = __ldg((const uint4 *)x + i);
    v.w[4 * i] = raw.x;
    v.w[4 * i + 1] = raw.y;
    v.w[4 * i + 2] = raw.z;
    v.w[4 * i + 3] = raw.w;
  }
}
template <> __device__ inline void load_wide<double>(eight<double> &v, const double *x)
{
#pragma unroll
  for (int k = 0; k < EIGHT; k++) v.w[k] = __float_as_uint((float)x[k]);
}

/// Reads the first `there` numbers from any address; the rest become zeros.
template <typename T> __device__ static inline void load_some(eight<T> &v, const T *x, int there)
{
#pragma unroll
  for (int i = 0; i < eight<T>::WORDS; i++) v.w[i] = 0;
#pragma unroll
  for (int k = 0; k < EIGHT; k++) {
    if (k >= there) continue;
    if constexpr (sizeof(T) == 2) v.w[k / 2] |= (uint32_t)x[k].bits << k % 2 * 16;
    else v.w[k] = __float_as_uint((float)x[k]);
  }
}

/// Returns the number at index h of a word. In f32 a word has only index 0.
template <typename T> __device__ static inline float number_of(uint32_t word, int h)
{
  if constexpr (sizeof(T) == 2) {
    T x = {(uint16_t)(h ? word >> 16 : word)};
    return widen(x);
  } else {
    return __uint_as_float(word);
  }
}
template <>
__device__ inline float number_of<bf16_t>(uint32_t word, int h)
{ return __uint_as_float(h ? word & 0xFFFF0000u : word << 16); }

template <typename T> __device__ static inline float number_of(const eight<T> &v, int k)
{ return number_of<T>(v.w[k / eight<T>::EACH], k % eight<T>::EACH); }

template <typename T> __device__ static inline uint32_t larger(uint32_t a, uint32_t b)
{
  if constexpr (sizeof(T) == 2) return __vmaxu2(a, b);
  else return max(a, b);
}

template <typename T>
__device__ static inline bool some_nan(uint32_t magnitude)
{ return ((magnitude + magnitudes<T>::beyond) & magnitudes<T>::signs) != 0; }
/// Returns the word with NaNs replaced by 0.
template <typename T> __device__ static inline uint32_t but_nan(uint32_t magnitude)
{
  const uint32_t found = (magnitude + magnitudes<T>::beyond) & magnitudes<T>::signs;
  return magnitude & ~(sizeof(T) == 2 ? (found >> 15) * 0xFFFFu : (uint32_t)((int32_t)found >> 31));
}

/// Returns the magnitude at index h of a word as the bits of an f32. Every NaN becomes 0x7FC00000.
template <typename T> __device__ static inline uint32_t magnitude_bits(uint32_t word, int h)
{
  const uint32_t a = __float_as_uint(number_of<T>(word, h)) & 0x7FFFFFFFu;
  return a > 0x7F800000u ? 0x7FC00000u : a;
}
template <typename T> __device__ static inline uint32_t largest_bits(uint32_t word)
{
  return sizeof(T) == 2 ? max(magnitude_bits<T>(word, 0), magnitude_bits<T>(word, 1)) :
                          magnitude_bits<T>(word, 0);
}
