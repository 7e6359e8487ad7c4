// FP8: quantize, with the transposed copy of the same read, and dequantize; bit-equal to core/cpu/reference_fp8.c.
//
// A block of threads takes tile after tile of 128 x 128 numbers, 8 x 8 a thread, and writes its codes in both directions, the turned
// ones by way of shared memory; the next tile is on its way meanwhile (cp.async: 96 KiB a multiprocessor). Quotients are found by two
// products that enclose them; where their codes differ the thread divides. Where scale blocks fit the tile (1 x 128, 128 x 1, 128 x 128) the tile finds their
// largest magnitudes itself: x is read once. For all others a first pass finds them by integer maxima, which know no order; a
// factor that is given (delayed scaling) needs none. Stochastic rounding, rows of no multiple of 8 numbers, f64, and blocks that
// are neither whole sides nor those of a tile, go number by number. Everything is seen in the coordinates of x: the blocks of the transposed copy are given with
// rows and columns exchanged.
#include "element.h"

#include "fp8_layout.h"
#include "fp8_scale.h"
extern "C" {
#include "rng.h"
}

#include <cfloat>
#include <cuda_pipeline.h>

enum { TILE = 128, DOWN = 8, EIGHT = 8 /* rows and columns of a thread */, TILE_THREADS = TILE / DOWN * (TILE / EIGHT), TILE_WARPS = TILE_THREADS / 32 };
enum { LANES = TILE / EIGHT /* threads of a row */, THREADS = 256 /* of all other kernels */ };

/// How scale factors vary within a tile.
enum { BY_TILE, BY_ROW, BY_COLUMN, BY_BLOCK };

/// One of the two outputs, in the coordinates of x: block (i, j) covers row_block x column_block of x.
struct side {
  void    *q;                          // NULL: not wanted
  float   *scale;                      // of block (i, j): scale[i * row_stride + j * column_stride]
  float   *factor;                     // of block (i, j): factor[i * across + j]; NULL: the tile finds it by itself
  int64_t  row_block, column_block, down, across;   // sizes, and how many blocks there are
  int64_t  row_stride, column_stride;
  int64_t  random;                     // Philox block of its first element
  int      how;
};

/// From a largest magnitude to a scale.
struct scaling_rule {
  const float *given;                  // the factor, or NULL
  float   largest, eps, limit;
  int     rule, power_of_two, margin, divides;
};

struct job {
  side    own, turned;
  scaling_rule rule;
  int64_t rows, columns;
  uint32_t *amax;                      // bits of the largest magnitude, NaN when there is one; NULL: not wanted
  uint64_t seed;
  int     wide;                        // eight numbers of x at a time, from 16-byte places
  int     turned_wide;                 // rows of the transposed copy begin on 16 bytes
  int     tiles;                       // it goes by tiles
  unsigned across;                     // tiles of a row
  int     height, width;               // rows and columns again
  int     same;                        // the transposed copy has the same bytes
};

__device__ static inline fp8_scale scale_of(const scaling_rule &r, float amax)
{
  if (r.given) {
    fp8_scale s = {*r.given, 1.0f / *r.given};
    return s;
  }
  return fp8_scale_of(amax, r.largest, r.rule, r.power_of_two, r.eps, r.margin, r.limit);
}

/// The bits of |x| as maxima count them: NaN is left out but by the rule that makes its block NaN.
__device__ static inline uint32_t magnitude_of(float x, uint32_t nan)
{
  uint32_t a = __float_as_uint(x) & 0x7FFFFFFFu;
  return a > 0x7F800000u ? nan : a;
}

// ------------------------------------------------------------------ codes

/// Codes of four numbers, the first in the lowest byte; E: bits of the fraction, 3 or 2.
template <int E> __device__ static inline uint32_t codes(float a, float b, float c, float d)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t low, high;
  if (E == 3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  }
  return (uint32_t)low | (uint32_t)high << 16;
#else
  return (uint32_t)fp8_from_f32(a, E, FP8_SATURATE, 0) | (uint32_t)fp8_from_f32(b, E, FP8_SATURATE, 0) << 8 |
         (uint32_t)fp8_from_f32(c, E, FP8_SATURATE, 0) << 16 | (uint32_t)fp8_from_f32(d, E, FP8_SATURATE, 0) << 24;
#endif
}

__device__ static inline float scaled(float x, float factor, int divides) { return divides ? x / factor : x * factor; }

template <typename T> __device__ static inline float number(T x) { return widen(x); }
template <> __device__ inline float number<double>(double x)     { return (float)x; }

/// e5m6_from_f32, saturating, without its detour through double: the rule of fp8_code_f32 holds for any fraction.
__device__ static inline uint16_t e5m6_of(float x)
{
  uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7E0;
  uint32_t code = magnitude >= 0x47800000u ? 0xFFFu : fp8_code_f32(magnitude, 6);   // 65536 and beyond
  return (uint16_t)((bits >> 20 & 0x800u) | min(code, (uint32_t)E5M6_MAX_CODE));
}

/// Eight numbers as e5m6, in three words.
__device__ static inline void put_e5m6(uint32_t *to, const float y[EIGHT])
{
  uint16_t code[EIGHT];
  uint32_t word[3];
  for (int k = 0; k < EIGHT; k++) code[k] = e5m6_of(y[k]);
  e5m6_pack(word, code);
  for (int k = 0; k < 3; k++) to[k] = word[k];
}

/// Factor of element (r, c) of x.
__device__ static inline float factor_at(const side &s, int64_t r, int64_t c)
{
  return s.factor[r / s.row_block * s.across + c / s.column_block];
}

// ------------------------------------------------------------------ eight numbers

/// Eight neighbours of a row as they lie in memory: pairs of 16 bits, or f32, which f64 is rounded to.
template <typename T> struct eight {
  enum { WORDS = sizeof(T) == 2 ? 4 : 8, EACH = EIGHT / WORDS };
  uint32_t w[WORDS];
};

/// Of the magnitudes in a word: their bits, their signs' places, and what lifts a NaN alone into these.
template <typename T> struct magnitudes          { enum : uint32_t { bits = 0x7FFFFFFFu, signs = 0x80000000u, beyond = 0x007FFFFFu }; };
template <>           struct magnitudes<bf16_t>  { enum : uint32_t { bits = 0x7FFF7FFFu, signs = 0x80008000u, beyond = 0x007F007Fu }; };
template <>           struct magnitudes<f16_t>   { enum : uint32_t { bits = 0x7FFF7FFFu, signs = 0x80008000u, beyond = 0x03FF03FFu }; };

/// From a 16-byte place (f32: two).
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

/// The first `there` of them from any place, zeros behind.
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

/// Number h of a word.
template <typename T> __device__ static inline float number_of(uint32_t word, int h)
{
  if constexpr (sizeof(T) == 2) {
    T x = {(uint16_t)(h ? word >> 16 : word)};
    return widen(x);
  } else {
    return __uint_as_float(word);
  }
}
template <> __device__ inline float number_of<bf16_t>(uint32_t word, int h) { return __uint_as_float(h ? word & 0xFFFF0000u : word << 16); }

template <typename T> __device__ static inline float number_of(const eight<T> &v, int k)
{
  return number_of<T>(v.w[k / eight<T>::EACH], k % eight<T>::EACH);
}

template <typename T> __device__ static inline uint32_t larger(uint32_t a, uint32_t b)
{
  if constexpr (sizeof(T) == 2) return __vmaxu2(a, b);
  else return max(a, b);
}

template <typename T> __device__ static inline bool some_nan(uint32_t magnitude) { return ((magnitude + magnitudes<T>::beyond) & magnitudes<T>::signs) != 0; }
/// Without those that are NaN.
template <typename T> __device__ static inline uint32_t but_nan(uint32_t magnitude)
{
  const uint32_t found = (magnitude + magnitudes<T>::beyond) & magnitudes<T>::signs;
  return magnitude & ~(sizeof(T) == 2 ? (found >> 15) * 0xFFFFu : (uint32_t)((int32_t)found >> 31));
}

/// Magnitude h of a word as the bits of an f32, one for all NaN.
template <typename T> __device__ static inline uint32_t magnitude_bits(uint32_t word, int h)
{
  const uint32_t a = __float_as_uint(number_of<T>(word, h)) & 0x7FFFFFFFu;
  return a > 0x7F800000u ? 0x7FC00000u : a;
}
template <typename T> __device__ static inline uint32_t largest_bits(uint32_t word)
{
  return sizeof(T) == 2 ? max(magnitude_bits<T>(word, 0), magnitude_bits<T>(word, 1)) : magnitude_bits<T>(word, 0);
}

// ------------------------------------------------------------------ tiles

/// What a tile's threads share.
struct shared_tile {
  uint32_t row_top[TILE], warp_top[TILE_WARPS];           // bits of f32
  alignas(16) uint32_t column_top[TILE_WARPS][TILE];      // words of magnitudes
  alignas(16) float factor[2][TILE];                      // of q and of its transposed copy: of rows or of columns
  alignas(16) float low[2][TILE], high[2][TILE];          // next to its inverse, on either side
  alignas(16) uint32_t turned[TILE][TILE / 4];            // codes [column of x][rows of x], word w of column c at w ^ (c / 8 * 2)
};

/// The place of a tile and of a thread in it.
struct tile_place {
  int down, across;                // which tile it is
  int first_row, first_column;     // the thread's, in the tile
  int rows_there;                  // rows from the thread's first to the last; 0 where its columns are none
};
// Where tiles are taken, sides are below 2^31 - TILE.
__device__ static inline int row_of(const tile_place &at)    { return at.down * TILE + at.first_row; }
__device__ static inline int column_of(const tile_place &at) { return at.across * TILE + at.first_column; }
__device__ static inline int64_t offset_of(const tile_place &at, const job &p) { return row_of(at) * (int64_t)p.width + column_of(at); }

/// Factors of one side into shared memory: found here from the maxima, with the scale written out, or read. Threads 0 to 127 take
/// the tile's rows, 128 to 255 its columns.
template <typename T> __device__ static inline void share_factors(shared_tile &t, const side &s, int which, const job &p, const tile_place &at)
{
  const int i = threadIdx.x % TILE;
  if (!s.q || (int)threadIdx.x / TILE != (s.how == BY_COLUMN)) return;
  const int r = at.down * TILE + (s.how == BY_ROW ? i : 0), c = at.across * TILE + (s.how == BY_COLUMN ? i : 0);
  float factor = 1.0f;
  if (r < p.height && c < p.width) {
    const int64_t down = s.how == BY_ROW ? r : s.down == 1 ? 0 : at.down, across = s.how == BY_COLUMN ? c : s.across == 1 ? 0 : at.across;
    if (s.factor) {
      factor = s.factor[down * s.across + across];
    } else {
      uint32_t top = s.how == BY_ROW ? t.row_top[i] : 0;
      if (s.how == BY_COLUMN) {
        for (int w = 0; w < TILE_WARPS; w++) top = larger<T>(top, t.column_top[w][i / eight<T>::EACH]);
        top = magnitude_bits<T>(top, i % eight<T>::EACH);
      } else if (s.how == BY_TILE) {
        for (int w = 0; w < TILE_WARPS; w++) top = max(top, t.warp_top[w]);
      }
      fp8_scale found = scale_of(p.rule, __uint_as_float(top));
      factor = found.factor;
      if (s.how != BY_TILE || i == 0) s.scale[down * s.row_stride + across * s.column_stride] = found.scale;
    }
  }
  t.factor[which][i] = factor;
  if (!p.rule.divides) return;
  // Rounding is monotonic: x / factor lies between x * low and x * high. An inverse that is exact serves for both; a factor whose
  // inverse may leave the normal numbers yields codes that never agree.
  const bool ordinary = factor >= 0x1p-100f && factor <= 0x1p100f;
  const float inverse = 1.0f / factor;
  const bool exact = fmaf(inverse, factor, -1.0f) == 0.0f;
  t.low[which][i] = ordinary ? __uint_as_float(__float_as_uint(inverse) - !exact) : __uint_as_float(0x7FC00000u);
  t.high[which][i] = ordinary ? __uint_as_float(__float_as_uint(inverse) + !exact) : 1.0f;
}

/// Codes of four numbers, and where a quotient's are in doubt.
template <int E, bool DIVIDES> __device__ static inline uint32_t four_codes(const float x[4], const float low[4], const float high[4], uint32_t &doubt)
{
  const uint32_t word = codes<E>(x[0] * low[0], x[1] * low[1], x[2] * low[2], x[3] * low[3]);
  if (DIVIDES) doubt |= word ^ codes<E>(x[0] * high[0], x[1] * high[1], x[2] * high[2], x[3] * high[3]);
  return word;
}

/// Factors of four rows or columns, or four times that of one.
template <bool ALL> __device__ static inline void load_factors(float f[4], const float *from)
{
  const float4 four = ALL ? *(const float4 *)from : make_float4(*from, *from, *from, *from);
  f[0] = four.x;
  f[1] = four.y;
  f[2] = four.z;
  f[3] = four.w;
}

/// The thread's codes: own rows to memory. COLUMNS: factors go by columns.
template <typename T, int E, bool DIVIDES, bool COLUMNS>
__device__ static inline uint32_t write_own(const shared_tile &t, const eight<T> (&v)[DOWN], const job &p, const tile_place &at)
{
  uint8_t *to = (uint8_t *)p.own.q + offset_of(at, p);
  uint32_t doubt = 0;
#pragma unroll
  for (int j = 0; j < DOWN; j++, to += p.width) {
    uint32_t word[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int first = COLUMNS ? at.first_column + 4 * h : at.first_row + j;
      float x[4], low[4], high[4];
      load_factors<COLUMNS>(low, (DIVIDES ? t.low : t.factor)[0] + first);
      if (DIVIDES) load_factors<COLUMNS>(high, t.high[0] + first);
#pragma unroll
      for (int k = 0; k < 4; k++) x[k] = number_of(v[j], 4 * h + k);
      word[h] = four_codes<E, DIVIDES>(x, low, high, doubt);
    }
    if (j < at.rows_there) *(uint2 *)to = make_uint2(word[0], word[1]);
  }
  return doubt;
}

/// Place of a thread's rows of a column in the transposed tile: two words.
__device__ static inline uint32_t *turned_word(shared_tile &t, const tile_place &at, int k)
{
  return &t.turned[at.first_column + k][at.first_row / 4 ^ at.first_column / EIGHT * 2];
}

/// The thread's codes of the transposed copy, into shared memory.
template <typename T, int E, bool DIVIDES, bool COLUMNS>
__device__ static inline uint32_t turn_codes(shared_tile &t, const eight<T> (&v)[DOWN], const tile_place &at)
{
  uint32_t doubt = 0;
#pragma unroll
  for (int k = 0; k < EIGHT; k++) {
    uint32_t word[DOWN / 4];
#pragma unroll
    for (int i = 0; i < DOWN / 4; i++) {
      const int first = COLUMNS ? at.first_column + k : at.first_row + 4 * i;
      float x[4], low[4], high[4];
      load_factors<!COLUMNS>(low, (DIVIDES ? t.low : t.factor)[1] + first);
      if (DIVIDES) load_factors<!COLUMNS>(high, t.high[1] + first);
#pragma unroll
      for (int j = 0; j < 4; j++) x[j] = number_of(v[4 * i + j], k);
      word[i] = four_codes<E, DIVIDES>(x, low, high, doubt);
    }
    *(uint2 *)turned_word(t, at, k) = make_uint2(word[0], word[1]);
  }
  return doubt;
}

/// Both once more, by true quotients, number by number: for the few threads that were in doubt.
template <typename T, int E> __device__ static inline void divide_all(shared_tile &t, const eight<T> (&of)[DOWN], const job &p, const tile_place &at)
{
  enum { WORDS = eight<T>::WORDS, EACH = eight<T>::EACH };
  uint32_t v[DOWN * WORDS];
#pragma unroll
  for (int i = 0; i < DOWN * WORDS; i++) v[i] = of[i / WORDS].w[i % WORDS];
#pragma unroll 1
  for (int n = 0; n < DOWN * EIGHT; n++) {
    const int j = n / EIGHT, k = n % EIGHT, row = at.first_row + j, column = at.first_column + k;
    const float x = number_of<T>(v[0], 0);
    if (p.own.q && j < at.rows_there) {
      const float y = x / t.factor[0][p.own.how == BY_COLUMN ? column : row];
      ((uint8_t *)p.own.q)[offset_of(at, p) + j * (int64_t)p.width + k] = (uint8_t)codes<E>(y, y, y, y);
    }
    if (p.turned.q) {
      const float y = x / t.factor[1][p.turned.how == BY_COLUMN ? column : row];
      ((uint8_t *)turned_word(t, at, k))[j] = (uint8_t)codes<E>(y, y, y, y);
    }
    if (EACH == 2 && k % 2 == 0) {
      v[0] >>= 16;
      continue;
    }
#pragma unroll
    for (int i = 0; i < DOWN * WORDS - 1; i++) v[i] = v[i + 1];   // so that registers keep fixed numbers
  }
}

/// The tile's part of the transposed copy: 16 bytes, rows of x, at a time.
__device__ static inline void write_turned(const shared_tile &t, const job &p, const tile_place &at)
{
  const int r0 = at.down * TILE, c0 = at.across * TILE;
  uint8_t *q = (uint8_t *)p.turned.q + (int64_t)c0 * p.height + r0;
#pragma unroll
  for (int i = threadIdx.x; i < TILE * TILE / 16; i += TILE_THREADS) {
    const int column = i / (TILE / 16), sixteen = i % (TILE / 16), group = column / EIGHT;
    if (c0 + column >= p.width) continue;
    uint4 found = *(const uint4 *)&t.turned[column][4 * (sixteen ^ group / 2)];
    if (group % 2) found = make_uint4(found.z, found.w, found.x, found.y);
    uint8_t *to = q + (int64_t)column * p.height + 16 * sixteen;
    const int there = p.height - r0 - 16 * sixteen;
    if (p.turned_wide && there >= 16) {
      *(uint4 *)to = found;
    } else {
      const uint32_t word[4] = {found.x, found.y, found.z, found.w};
#pragma unroll
      for (int k = 0; k < 16; k++)
        if (k < there) to[k] = (uint8_t)(word[k / 4] >> k % 4 * 8);
    }
  }
}

/// Largest magnitudes of the thread's rows and columns; BUT_NAN: without NaN.
template <typename T, bool BUT_NAN>
__device__ static inline void find_tops(uint32_t (&row)[DOWN], uint32_t (&column)[eight<T>::WORDS], const eight<T> (&v)[DOWN])
{
#pragma unroll
  for (int i = 0; i < eight<T>::WORDS; i++) column[i] = 0;
#pragma unroll
  for (int j = 0; j < DOWN; j++) {
    row[j] = 0;
#pragma unroll
    for (int i = 0; i < eight<T>::WORDS; i++) {
      uint32_t word = v[j].w[i];
      if (BUT_NAN) asm volatile("" : "+r"(word));   // found anew: else the first search keeps all its magnitudes, in registers that are dear
      const uint32_t a = BUT_NAN ? but_nan<T>(word & magnitudes<T>::bits) : word & magnitudes<T>::bits;
      row[j] = larger<T>(row[j], a);
      column[i] = larger<T>(column[i], a);
    }
  }
}

/// Maxima of the tile's rows, columns and warps into shared memory; the largest of all into p.amax.
template <typename T> __device__ static inline void share_tops(shared_tile &t, const eight<T> (&v)[DOWN], const job &p, const tile_place &at)
{
  enum { WORDS = eight<T>::WORDS };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t row[DOWN], column[WORDS];
  find_tops<T, false>(row, column, v);
  uint32_t any = 0;
#pragma unroll
  for (int j = 0; j < DOWN; j++) any = larger<T>(any, row[j]);
  const bool nan = some_nan<T>(any);
  if (nan && p.rule.rule != ENG_SCALE_TORCHAO) find_tops<T, true>(row, column, v);
  if (p.own.how == BY_COLUMN || p.turned.how == BY_COLUMN) {
#pragma unroll
    for (int i = 0; i < WORDS; i++) column[i] = larger<T>(column[i], __shfl_xor_sync(0xFFFFFFFFu, column[i], LANES));
    if (lane < LANES)
#pragma unroll
      for (int i = 0; i < WORDS; i += 4)
        *(uint4 *)&t.column_top[warp][at.first_column / eight<T>::EACH + i] = make_uint4(column[i], column[i + 1], column[i + 2], column[i + 3]);
  }
  enum { PACKED = sizeof(T) == 2, N = PACKED ? DOWN / 2 : DOWN };
  uint32_t tops[N];   // of rows 0 and 1, 2 and 3 and so on; or of one each
#pragma unroll
  for (int i = 0; i < N; i++) {
    if constexpr (PACKED) tops[i] = larger<T>(__byte_perm(row[2 * i], row[2 * i + 1], 0x5410), __byte_perm(row[2 * i], row[2 * i + 1], 0x7632));
    else tops[i] = row[i];
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) tops[i] = larger<T>(tops[i], __shfl_xor_sync(0xFFFFFFFFu, tops[i], step));
  }
  uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < N; i++) all = max(all, largest_bits<T>(tops[i]));
  all = max(all, __shfl_xor_sync(0xFFFFFFFFu, all, LANES));
  if (lane % LANES == 0)
#pragma unroll
    for (int j = 0; j < DOWN; j++) t.row_top[at.first_row + j] = PACKED ? magnitude_bits<T>(tops[j / 2], j % 2) : magnitude_bits<T>(tops[j], 0);
  if (lane == 0) t.warp_top[warp] = all;
  if (!p.amax) return;
  const bool some = __any_sync(0xFFFFFFFFu, nan);
  if (lane != 0) return;
  if (some) all = 0x7FC00000u;
  if (all > *(volatile uint32_t *)p.amax) atomicMax(p.amax, all);   // most know at once that theirs is not the largest
}

__device__ static inline tile_place place_of(unsigned tile, const job &p)
{
  tile_place at;
  at.down = (int)(tile / p.across);
  at.across = (int)(tile % p.across);
  at.first_row = threadIdx.x / LANES * DOWN;
  at.first_column = threadIdx.x % LANES * EIGHT;
  at.rows_there = column_of(at) < p.width ? p.height - row_of(at) : 0;   // columns are a multiple of 8
  return at;
}

/// The thread's numbers on their way to places that are its own.
template <typename T> __device__ static inline void send_for(uint4 *stage, const T *x, const job &p, const tile_place &at)
{
  enum { QUADS = eight<T>::WORDS / 4 };
  const T *from = x + offset_of(at, p);
#pragma unroll
  for (int j = 0; j < DOWN; j++, from += p.width)
    if (j < at.rows_there)
#pragma unroll
      for (int i = 0; i < QUADS; i++) __pipeline_memcpy_async(stage + (j * QUADS + i) * TILE_THREADS + threadIdx.x, (const uint4 *)from + i, 16);
  __pipeline_commit();
}

/// Those numbers, zeros where there are none.
template <typename T> __device__ static inline void receive(eight<T> (&v)[DOWN], const uint4 *stage, const tile_place &at)
{
  enum { QUADS = eight<T>::WORDS / 4 };
  __pipeline_wait_prior(0);
  asm volatile("" ::: "memory");   // no read moves before the wait
#pragma unroll
  for (int j = 0; j < DOWN; j++)
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
      const uint4 raw = j < at.rows_there ? stage[(j * QUADS + i) * TILE_THREADS + threadIdx.x] : make_uint4(0, 0, 0, 0);
      v[j].w[4 * i] = raw.x;
      v[j].w[4 * i + 1] = raw.y;
      v[j].w[4 * i + 2] = raw.z;
      v[j].w[4 * i + 3] = raw.w;
    }
}

/// Blocks of a multiprocessor.
template <typename T> constexpr int tiles_resident(void) { return sizeof(T) == 2 ? 3 : 2; }
/// Shared memory: shared_tile, then the numbers on their way.
template <typename T> static int tile_bytes(void) { return (int)(sizeof(shared_tile) + TILE * TILE * sizeof(T)); }

template <typename T, int E, bool DIVIDES> __global__ static void __launch_bounds__(TILE_THREADS, tiles_resident<T>())
quantize_tiles(const T *x, unsigned tiles, const job p)
{
  extern __shared__ uint4 shared[];
  shared_tile &t = *(shared_tile *)shared;
  uint4 *stage = shared + sizeof(shared_tile) / sizeof(uint4);
  const bool backwards = p.own.factor != NULL;   // after another read, whose end may still be in the cache
  unsigned n = blockIdx.x;
  send_for(stage, x, p, place_of(backwards ? tiles - 1 - n : n, p));
  for (; n < tiles; n += gridDim.x) {
    const tile_place at = place_of(backwards ? tiles - 1 - n : n, p);
    const unsigned next = n + gridDim.x;
    eight<T> v[DOWN];
    receive(v, stage, at);
    if (next < tiles) send_for(stage, x, p, place_of(backwards ? tiles - 1 - next : next, p));
    if (!p.own.factor || p.amax) share_tops(t, v, p, at);
    __syncthreads();
    share_factors<T>(t, p.own, 0, p, at);
    share_factors<T>(t, p.turned, 1, p, at);
    __syncthreads();

    if constexpr (E == 6) {   // no transposed copy
      if (p.own.q)
#pragma unroll
        for (int j = 0; j < DOWN; j++) {
          if (j >= at.rows_there) continue;
          float y[EIGHT];
#pragma unroll
          for (int k = 0; k < EIGHT; k++)
            y[k] = scaled(number_of(v[j], k), t.factor[0][p.own.how == BY_COLUMN ? at.first_column + k : at.first_row + j], DIVIDES);
          put_e5m6((uint32_t *)p.own.q + (offset_of(at, p) + j * (int64_t)p.width) / 8 * 3, y);
        }
    } else {
      uint32_t doubt = 0;
      if (p.own.q) doubt = p.own.how == BY_COLUMN ? write_own<T, E, DIVIDES, true>(t, v, p, at) : write_own<T, E, DIVIDES, false>(t, v, p, at);
      if (p.turned.q) doubt |= p.turned.how == BY_COLUMN ? turn_codes<T, E, DIVIDES, true>(t, v, at) : turn_codes<T, E, DIVIDES, false>(t, v, at);
      if (DIVIDES && doubt) divide_all<T, E>(t, v, p, at);
      if (!p.turned.q) continue;
      __syncthreads();
      write_turned(t, p, at);
    }
  }
}

// ------------------------------------------------------------------ maxima of other blocks

enum { STRIP = 64, AHEAD = 4 /* rows on their way */, MAXIMA_COLUMNS = 32 * EIGHT, MAXIMA_ROWS = THREADS / 32 * STRIP };

/// A thread's maxima of eight columns into those of the blocks of its row, and from then on anew.
template <typename T>
__device__ static inline void flush_maxima(eight<T> &top, uint32_t *of_row, int64_t c, int there, int64_t column_block, bool whole_rows)
{
  uint32_t some = 0;
  if (whole_rows) {
#pragma unroll
    for (int i = 0; i < eight<T>::WORDS; i++) some = max(some, largest_bits<T>(top.w[i]));
    some = __reduce_max_sync(0xFFFFFFFFu, some);
    if (threadIdx.x % 32 == 0) atomicMax(of_row, some);
  } else {
#pragma unroll
    for (int k = 0; k < EIGHT; k++) {
      some = max(some, magnitude_bits<T>(top.w[k / eight<T>::EACH], k % eight<T>::EACH));
      if (k >= there || (k + 1 < there && (c + k) / column_block == (c + k + 1) / column_block)) continue;
      atomicMax(of_row + (c + k) / column_block, some);
      some = 0;
    }
  }
#pragma unroll
  for (int i = 0; i < eight<T>::WORDS; i++) top.w[i] = 0;
}

/// The largest magnitudes of all blocks, whose bits begin as 0; NaN is left out unless `nans`. A warp goes down STRIP rows of 256 columns.
template <typename T> __global__ static void __launch_bounds__(THREADS, sizeof(T) == 2 ? 3 : 2)
block_maxima(const T *x, int64_t rows, int64_t columns, int wide, int64_t row_block, int64_t column_block, int64_t blocks_across, int nans, uint32_t *maxima)
{
  __shared__ uint32_t warps[THREADS / 32];
  enum { WORDS = eight<T>::WORDS };
  const unsigned across = (unsigned)((columns + MAXIMA_COLUMNS - 1) / MAXIMA_COLUMNS);
  const int64_t r0 = (int64_t)(blockIdx.x / across) * MAXIMA_ROWS + threadIdx.x / 32 * STRIP;
  const int64_t c = (int64_t)(blockIdx.x % across) * MAXIMA_COLUMNS + threadIdx.x % 32 * EIGHT;
  const int there = (int)min((int64_t)EIGHT, max((int64_t)0, columns - c)), down = (int)max((int64_t)0, min((int64_t)STRIP, rows - r0));
  const bool whole_rows = column_block >= columns, whole = whole_rows && row_block >= rows, all_wide = wide && there == EIGHT;
  const T *from = x + r0 * columns + c;
  eight<T> top, v[AHEAD];
#pragma unroll
  for (int i = 0; i < WORDS; i++) top.w[i] = 0;
  int64_t block = whole ? 0 : r0 / row_block;
  int64_t next = whole ? STRIP : (block + 1) * row_block - r0;   // rows until the block's end
#pragma unroll
  for (int j = 0; j < AHEAD; j++, from += columns) {
    if (all_wide && j < down) load_wide(v[j], from);
    else load_some(v[j], from, j < down ? there : 0);
  }
#pragma unroll 1
  for (int first = 0; first < down; first += AHEAD) {
#pragma unroll
    for (int j = 0; j < AHEAD; j++, from += columns) {
      const int r = first + j;
      uint32_t some = 0;
#pragma unroll
      for (int i = 0; i < WORDS; i++) {
        v[j].w[i] &= magnitudes<T>::bits;
        some = larger<T>(some, v[j].w[i]);
      }
      if (some_nan<T>(some) && !nans)
#pragma unroll
        for (int i = 0; i < WORDS; i++) v[j].w[i] = but_nan<T>(v[j].w[i]);
#pragma unroll
      for (int i = 0; i < WORDS; i++) top.w[i] = larger<T>(top.w[i], v[j].w[i]);
      if (all_wide && r + AHEAD < down) load_wide(v[j], from);
      else load_some(v[j], from, r + AHEAD < down ? there : 0);
      if (whole || r >= down || (r + 1 < next && r + 1 < down)) continue;
      flush_maxima(top, maxima + block * blocks_across, c, there, column_block, whole_rows);
      next += row_block;
      block++;
    }
  }
  if (!whole) return;
  uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < WORDS; i++) all = max(all, largest_bits<T>(top.w[i]));
  all = __reduce_max_sync(0xFFFFFFFFu, all);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = all;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 0; w < THREADS / 32; w++) all = max(all, warps[w]);
  atomicMax(maxima, all);
}

/// Factors, and the scales of one side, from maxima; one thread a block. The other side's scales too where its blocks are the same.
__global__ static void make_scales(const uint32_t *maxima, side s, side other, bool both, scaling_rule rule)
{
  int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= s.down * s.across) return;
  int64_t i = at / s.across, j = at % s.across;
  fp8_scale found = scale_of(rule, __uint_as_float(maxima[at]));
  s.factor[at] = found.factor;
  if (s.q) s.scale[i * s.row_stride + j * s.column_stride] = found.scale;
  if (both && other.q) other.scale[i * other.row_stride + j * other.column_stride] = found.scale;
}

// ------------------------------------------------------------------ number by number

/// Four codes (e5m6: eight) of one output in its own order. `turned`: that of the transposed copy.
template <typename T, int E, bool RANDOM> __global__ static void __launch_bounds__(THREADS)
quantize_numbers(const T *x, const job p, bool turned)
{
  enum { N = E == 6 ? 8 : 4 };
  const side &s = turned ? p.turned : p.own;
  const int64_t count = p.rows * p.columns, first = N * ((int64_t)blockIdx.x * THREADS + threadIdx.x), inner = turned ? p.rows : p.columns;
  uint64_t have = ~0ull;
  uint32_t word[4] = {0, 0, 0, 0};
  float y[N];
  for (int k = 0; k < N && first + k < count; k++) {
    const int64_t outer = (first + k) / inner, rest = (first + k) % inner, r = turned ? rest : outer, c = turned ? outer : rest;
    y[k] = scaled(number(x[r * p.columns + c]), factor_at(s, r, c), p.rule.divides);
    if (E == 6) continue;
    uint32_t chance = 0;
    if (RANDOM) {
      const bool as_own = turned && p.same;
      const uint64_t element = (uint64_t)(as_own ? r * p.columns + c : first + k), block = (uint64_t)(as_own ? p.own.random : s.random) + element / 4;
      if (block != have) philox_of(word, p.seed, block);
      have = block;
      chance = element % 4 == 0 ? word[0] : element % 4 == 1 ? word[1] : element % 4 == 2 ? word[2] : word[3];
    }
    ((uint8_t *)s.q)[first + k] = fp8_from_f32(y[k], E, FP8_SATURATE | (RANDOM ? FP8_STOCHASTIC : 0), chance);
  }
  if (E == 6 && first < count) put_e5m6((uint32_t *)s.q + first / 8 * 3, y);
}

/// The largest magnitude of all, NaN when there is one.
template <typename T> __global__ static void __launch_bounds__(THREADS)
whole_amax(const T *x, int64_t count, uint32_t *amax)
{
  uint32_t top = 0;
  for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < count; i += (int64_t)gridDim.x * THREADS)
    top = max(top, magnitude_of(number(x[i]), 0x7FC00000u));
  top = __reduce_max_sync(0xFFFFFFFFu, top);
  if (threadIdx.x % 32 == 0) atomicMax(amax, top);
}

// ------------------------------------------------------------------ the host's side of quantize

static int64_t grid(int64_t n, int64_t each) { return (n + each - 1) / each; }

/// The tile finds factors of these blocks by itself.
static bool fits_tile(int64_t row_block, int64_t column_block)
{
  return (row_block == TILE && column_block == TILE) || (row_block == 1 && column_block == TILE) || (row_block == TILE && column_block == 1);
}

static int how_of(const side *s, int64_t rows, int64_t columns)
{
  if (s->down == 1 && s->across == 1) return BY_TILE;
  if (s->row_block == TILE && s->column_block == TILE) return BY_TILE;
  if (s->row_block == 1 && (s->column_block == TILE || s->column_block >= columns)) return BY_ROW;
  if (s->column_block == 1 && (s->row_block == TILE || s->row_block >= rows)) return BY_COLUMN;
  return BY_BLOCK;
}

/// A side of x [rows x columns]; block sizes as the call has them, for the output as it lies.
static side side_of(const op_call *call, bool turned, int64_t rows, int64_t columns)
{
  fp8_scales at = fp8_scales_for(call->ints[1], call->ints[2], turned ? columns : rows, turned ? rows : columns, NULL);
  tensor *q = call->out[turned ? 3 : 0], *scale = call->out[turned ? 4 : 1];
  side s = {};
  s.q = q && scale ? q->data : NULL;
  s.scale = scale ? (float *)scale->data : NULL;
  s.row_block = turned ? at.inner_block : at.row_block;
  s.column_block = turned ? at.row_block : at.inner_block;
  s.down = turned ? at.inner_count : at.row_count;
  s.across = turned ? at.row_count : at.inner_count;
  s.row_stride = turned ? at.inner_stride : at.row_stride;
  s.column_stride = turned ? at.row_stride : at.inner_stride;
  s.random = call->ints[5] + (turned ? (rows * columns + 3) / 4 : 0);
  s.how = how_of(&s, rows, columns);
  return s;
}

template <typename T> static eng_status find_scales(const T *x, job *p, side *s, side *other, bool both, uint32_t *maxima)
{
  int64_t blocks = s->down * s->across;
  if (blocks == 0) return ENG_OK;
  CUDA_TRY(cudaMemsetAsync(maxima, 0, (size_t)blocks * sizeof *maxima, cuda_stream()));
  int64_t pieces = grid(p->rows, MAXIMA_ROWS) * grid(p->columns, MAXIMA_COLUMNS);
  if (pieces > 0 && !p->rule.given) {
    block_maxima<T><<<(unsigned)pieces, THREADS, 0, cuda_stream()>>>(x, p->rows, p->columns, p->wide, s->row_block, s->column_block, s->across,
                                                                     p->rule.rule == ENG_SCALE_TORCHAO, maxima);
    CUDA_LAUNCHED("quantize");
  }
  make_scales<<<(unsigned)grid(blocks, THREADS), THREADS, 0, cuda_stream()>>>(maxima, *s, *other, both, p->rule);
  CUDA_LAUNCHED("quantize");
  return ENG_OK;
}

template <typename T, int E, bool DIVIDES> static eng_status launch_tiles(const T *x, const job *p)
{
  const int64_t tiles = grid(p->rows, TILE) * grid(p->columns, TILE), room = (int64_t)tiles_resident<T>() * cuda_multiprocessors();
  CUDA_TRY(cudaFuncSetAttribute(quantize_tiles<T, E, DIVIDES>, cudaFuncAttributeMaxDynamicSharedMemorySize, tile_bytes<T>()));
  quantize_tiles<T, E, DIVIDES><<<(unsigned)(tiles < room ? tiles : room), TILE_THREADS, tile_bytes<T>(), cuda_stream()>>>(x, (unsigned)tiles, *p);
  return ENG_OK;
}
template <typename T, int E, bool DIVIDES> static eng_status launch_tiles(const double *, const job *) { return ENG_OK; }   // f64 goes number by number

template <typename T, int E> static eng_status write_codes(const T *x, const job *p, bool random)
{
  const int64_t count = p->rows * p->columns;
  cudaStream_t stream = cuda_stream();
  if (count == 0) return ENG_OK;
  if (p->tiles) {
    if (p->rule.divides) ENG_TRY((launch_tiles<T, E, true>(x, p)));
    else ENG_TRY((launch_tiles<T, E, false>(x, p)));
  } else {
    unsigned blocks = (unsigned)grid(count, (E == 6 ? 8 : 4) * THREADS);
    for (int turned = 0; turned < 2; turned++) {
      if (!(turned ? p->turned : p->own).q) continue;
      if (random) quantize_numbers<T, E, true><<<blocks, THREADS, 0, stream>>>(x, *p, turned != 0);
      else quantize_numbers<T, E, false><<<blocks, THREADS, 0, stream>>>(x, *p, turned != 0);
    }
    if (p->amax) whole_amax<T><<<(unsigned)(4 * cuda_multiprocessors()), THREADS, 0, stream>>>(x, count, p->amax);
  }
  CUDA_LAUNCHED("quantize");
  return ENG_OK;
}

template <typename T> static eng_status quantize(const op_call *call, job *p, uint32_t *maxima)
{
  const T *x = (const T *)call->in[0]->data;
  bool random = (call->ints[4] & FP8_STOCHASTIC) != 0;
  if (p->own.factor) ENG_TRY(find_scales(x, p, &p->own, &p->turned, p->same, maxima));
  if (p->turned.factor && !p->same) ENG_TRY(find_scales(x, p, &p->turned, &p->own, false, maxima));
  if (call->ints[0] == ENG_e4m3) return write_codes<T, 3>(x, p, random);
  if (call->ints[0] == ENG_e5m2) return write_codes<T, 2>(x, p, random);
  return write_codes<T, 6>(x, p, false);
}

extern "C" eng_status cuda_quantize(const op_call *call)
{
  const tensor *x = call->in[0];
  const int format = (int)call->ints[0], dtype = x->dtype;
  job p = {};
  p.columns = x->shape[x->ndim - 1];
  p.rows = 1;
  for (int d = 0; d < x->ndim - 1; d++) p.rows *= x->shape[d];
  p.own = side_of(call, false, p.rows, p.columns);
  p.turned = side_of(call, true, p.rows, p.columns);
  p.same = call->ints[1] == call->ints[2];
  p.seed = rng_seed();
  p.amax = call->out[2] ? (uint32_t *)call->out[2]->data : NULL;
  p.rule.given = call->in[1] ? (const float *)call->in[1]->data : NULL;
  p.rule.largest = format == ENG_e4m3 ? E4M3_MAX : format == ENG_e5m2 ? E5M2_MAX : E5M6_MAX;
  p.rule.rule = (int)call->ints[3];
  p.rule.power_of_two = (call->ints[4] & 4) != 0;
  p.rule.eps = fp8_eps(p.rule.rule, call->floats[0]);
  p.rule.margin = (int)call->floats[1];
  p.rule.divides = fp8_divides(p.rule.rule) && !p.rule.given;
  bool low = (dtype == ENG_f16 || dtype == ENG_bf16) && (call->ints[1] || call->ints[2]);
  p.rule.limit = !low ? FLT_MAX : dtype == ENG_f16 ? 65504.0f : bf16_to_f32(0x7F7F);

  for (int k = 1; k <= 4; k += 3)   // the padding of the scales
    if (call->out[k] && call->out[k]->count > (k == 1 ? p.own.down * p.own.across : p.turned.down * p.turned.across))
      CUDA_TRY(cudaMemsetAsync(call->out[k]->data, 0, (size_t)call->out[k]->count * sizeof(float), cuda_stream()));
  if (p.amax) CUDA_TRY(cudaMemsetAsync(p.amax, 0, sizeof *p.amax, cuda_stream()));

  p.wide = (uintptr_t)x->data % 16 == 0 && p.columns % EIGHT == 0;
  p.turned_wide = p.rows % 16 == 0;
  p.across = (unsigned)grid(p.columns, TILE);
  p.height = (int)p.rows;
  p.width = (int)p.columns;
  p.tiles = p.wide && p.rows < INT32_MAX - TILE && p.columns < INT32_MAX - TILE && dtype != ENG_f64 && !(call->ints[4] & FP8_STOCHASTIC) &&
            p.own.how != BY_BLOCK && p.turned.how != BY_BLOCK;

  // Factors in memory, for both sides, unless the tiles find them.
  bool in_tiles = p.tiles && fits_tile(p.own.row_block, p.own.column_block) && call->ints[1] && call->ints[2];
  int64_t own_blocks = p.own.down * p.own.across, turned_blocks = p.turned.down * p.turned.across;
  int64_t bytes = in_tiles ? 0 : (own_blocks + turned_blocks + (own_blocks > turned_blocks ? own_blocks : turned_blocks) + 1) * (int64_t)sizeof(float);
  float *factors = NULL;
  if (!in_tiles && !(factors = (float *)scratch_take(bytes))) return ENG_ERR_MEMORY;
  if (!in_tiles) {
    p.own.factor = factors;
    p.turned.factor = p.same ? factors : factors + own_blocks;
  }
  uint32_t *maxima = (uint32_t *)(factors + own_blocks + turned_blocks);
  eng_status status;
  switch (dtype) {
    case ENG_f16:  status = quantize<f16_t>(call, &p, maxima); break;
    case ENG_bf16: status = quantize<bf16_t>(call, &p, maxima); break;
    case ENG_f64:  status = quantize<double>(call, &p, maxima); break;
    default:       status = quantize<float>(call, &p, maxima); break;
  }
  if (factors) scratch_give(factors, bytes);
  return status;
}

// ------------------------------------------------------------------ dequantize

struct unscaling {
  const void  *q;
  const float *scale;
  void        *y;
  int64_t      rows, columns;
  fp8_scales   at;
  int          format, dtype, wide;
};

template <typename T> __device__ static inline void put(T &y, float x) { narrow(y, x); }
template <> __device__ inline void put<double>(double &y, float x)     { y = (double)x; }

/// Eight neighbours of a row a thread.
template <typename T> __global__ static void __launch_bounds__(THREADS)
multiply_codes(const unscaling p)
{
  const int64_t groups = (p.columns + EIGHT - 1) / EIGHT, at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (at >= groups * p.rows) return;
  const int64_t r = at / groups, c = at % groups * EIGHT, first = r * p.columns + c;
  const int there = (int)min((int64_t)EIGHT, p.columns - c);
  float v[EIGHT];
  if (p.format == ENG_FORMAT_E5M6) {
    const uint32_t *from = (const uint32_t *)p.q + first / 8 * 3, word[3] = {from[0], from[1], from[2]};
    uint16_t code[EIGHT];
    e5m6_unpack(code, word);
    for (int k = 0; k < EIGHT; k++) v[k] = e5m6_to_f32(code[k]);
  } else {
    uint2 eight = make_uint2(0, 0);
    const uint8_t *from = (const uint8_t *)p.q + first;
    if (p.wide) {
      eight = *(const uint2 *)from;
    } else {
#pragma unroll
      for (int k = 0; k < EIGHT; k++)
        if (k < there) (k < 4 ? eight.x : eight.y) |= (uint32_t)from[k] << k % 4 * 8;
    }
    for (int k = 0; k < EIGHT; k++) {
      uint8_t code = (uint8_t)((k < 4 ? eight.x : eight.y) >> k % 4 * 8);
      v[k] = p.format == ENG_e4m3 ? e4m3_to_f32(code) : e5m2_to_f32(code);
    }
  }
  const float *of_row = p.scale + r / p.at.row_block * p.at.row_stride;
  int64_t block = c / p.at.inner_block, next = (block + 1) * p.at.inner_block;
  pack<T, EIGHT> y;
  for (int k = 0; k < EIGHT; k++) {
    if (c + k == next && k < there) {
      block++;
      next += p.at.inner_block;
    }
    put(y.v[k], v[k] * of_row[block * p.at.inner_stride]);
  }
  T *to = (T *)p.y + first;
  if (p.wide) {
    enum { WORDS = sizeof(T) * EIGHT / 16 };
    union { pack<T, EIGHT> y; uint4 raw[WORDS]; } u;
    u.y = y;
#pragma unroll
    for (int i = 0; i < WORDS; i++) ((uint4 *)to)[i] = u.raw[i];
  } else {
    for (int k = 0; k < EIGHT; k++)
      if (k < there) to[k] = y.v[k];
  }
}

extern "C" eng_status cuda_dequantize(const op_call *call)
{
  const tensor *q = call->in[0], *y = call->out[0];
  unscaling p = {};
  p.q = q->data;
  p.scale = (const float *)call->in[1]->data;
  p.y = y->data;
  p.columns = y->shape[y->ndim - 1];
  p.rows = y->count / p.columns;
  p.at = fp8_scales_for(call->ints[1], call->ints[2], p.rows, p.columns, NULL);
  p.format = call->ints[3] == ENG_FORMAT_E5M6 ? (int)ENG_FORMAT_E5M6 : q->dtype;
  p.dtype = y->dtype;
  p.wide = p.columns % EIGHT == 0 && (uintptr_t)p.q % 8 == 0 && (uintptr_t)p.y % 16 == 0;
  unsigned blocks = (unsigned)grid(p.rows * grid(p.columns, EIGHT), THREADS);
  switch (y->dtype) {
    case ENG_f16:  multiply_codes<f16_t><<<blocks, THREADS, 0, cuda_stream()>>>(p); break;
    case ENG_bf16: multiply_codes<bf16_t><<<blocks, THREADS, 0, cuda_stream()>>>(p); break;
    case ENG_f64:  multiply_codes<double><<<blocks, THREADS, 0, cuda_stream()>>>(p); break;
    default:       multiply_codes<float><<<blocks, THREADS, 0, cuda_stream()>>>(p); break;
  }
  CUDA_LAUNCHED("dequantize");
  return ENG_OK;
}
