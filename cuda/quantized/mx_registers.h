// The fast kernel of mx_quantize: blocks of 1 x 16, 1 x 32, 16 x 16 or 32 x 32 numbers. Included
// only by mx_quantize.cu, whose quantize_tile serves all other calls.
//
// A thread holds 8 x 8 numbers of x in registers, a warp 32 x 64 (4 lanes down, 8 across), and a
// block of threads 128 x 128. So the numbers of a scale block belong to 2 or 4 lanes (of a square
// block: 2 x 2 or 4 x 4 lanes), which find its largest magnitude by shuffles. A thread's part of a
// row of either result is 8 adjacent elements. Shared memory holds only a table of the 256 possible
// scales.
//
// Elements are rounded as in core/cpu/mx_encode.h. Let 2^e be the largest power of two not above
// |y| or, if |y| is subnormal in the format, the smallest normal number. f32 has `drop` fraction
// bits more than the format. Adding 2^(e + drop) rounds |y| to a multiple of the format's step. The
// sum's last bits then hold the number of steps.
#pragma once

#include "mx_quantize.h"
#include "quantize.h"
#include "kernel/vector.h"

namespace {

enum { LANES_ACROSS = 8, LANES_DOWN = 4, WARPS_ACROSS = 2 };
enum { VALUES, BYTES, PAIRS };         // what a result holds: bf16, codes, or two codes in a byte

/// Rounds a magnitude to the format f: to nearest even or, with RANDOM, as mx_code_stochastic does
/// for u. Sets `code`, and returns the code's value.
template <bool RANDOM>
__device__ inline float rounded_magnitude(uint32_t &code, float a, float u, const mx_format &f)
{
  const uint32_t least = (uint32_t)(128 - f.bias) << 23, drop = (uint32_t)(23 - f.fraction),
                 infinity = 0x7F800000u;
  if (RANDOM) {
    const uint32_t binade = max(__float_as_uint(a) & infinity, least);
    a = fmaf(u, __uint_as_float(binade - ((uint32_t)f.fraction << 23)), a);
  }
  a = fminf(a, f.largest);
  const uint32_t binade = max(__float_as_uint(a) & infinity, least);
  const float far = __uint_as_float(binade + (drop << 23)),
              sum = RANDOM ? __fadd_rz(a, far) : a + far;
  code = (__float_as_uint(sum) + ((binade - least) >> drop)) & (uint32_t)(f.sign - 1);
  return sum - far;
}

/// Rounds y as rounded_magnitude does. Without NAN_TOO, y must not be NaN.
template <bool RANDOM, bool NAN_TOO>
__device__ inline float rounded(uint32_t &code, float y, float u, const mx_format &f)
{
  const uint32_t sign = __float_as_uint(y) & 0x80000000u;
  const float a = rounded_magnitude<RANDOM>(code, fabsf(y), u, f);
  if (sign) code |= (uint32_t)f.sign;
  if (!NAN_TOO || y == y) return __uint_as_float(__float_as_uint(a) | sign);
  code = (uint32_t)f.nan;
  return f.nan == f.top ? f.largest : y;
}

/// Writes eight elements of a result, from element `at` on. `by` has the factor on the elements and
/// the value of their scale.
template <int OUT, bool RANDOM, bool NAN_TOO>
__device__ inline void write_eight(const mx_job &p, const mx_side &s, int64_t at,
                                   const float (&x)[EIGHT], float2 by)
{
  uint32_t random[2][4] = {}, w[4] = {}, code;
  float value[EIGHT];
#pragma unroll
  for (int h = 0; h < 2 && RANDOM; h++)
    philox_of(random[h], p.seed, (uint64_t)(s.random + at / 4) + h);
#pragma unroll
  for (int k = 0; k < EIGHT; k++) {
    const float u = RANDOM ? mx_uniform(random[k / 4][k % 4], p.sr_bits) : 0.0f;
    value[k] = rounded<RANDOM, NAN_TOO>(code, x[k] * by.x, u, p.format) * by.y;
    if (OUT == BYTES) w[k / 4] |= code << k % 4 * 8;
    if (OUT == PAIRS) w[0] |= code << k * 4;
  }
  if (OUT == VALUES) {
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = rounded_pair(bf16_t{}, value[2 * i], value[2 * i + 1]);
    *(uint4 *)(s.q + 2 * at) = make_uint4(w[0], w[1], w[2], w[3]);
  } else if (OUT == BYTES) {
    *(uint2 *)(s.q + at) = make_uint2(w[0], w[1]);
  } else {
    *(uint32_t *)(s.q + at / 2) = w[0];
  }
}

/// Where a thread's numbers are in x, and how many of their rows exist.
struct place { int64_t r0, c0; int rows; };

/// The codes of the scales of a thread's eight rows or columns, one byte each.
struct scale_codes {
  uint32_t w[2];
  __device__ uint32_t operator[](int k) const { return w[k / 4] >> k % 4 * 8 & 0xFFu; }
  __device__ void set(int k, uint32_t code)
  { w[k / 4] = (w[k / 4] & ~(0xFFu << k % 4 * 8)) | code << k % 4 * 8; }
  /// Whether one of the codes is `code`. Looks for a zero byte in w ^ (`code` in each byte).
  __device__ bool any(uint32_t code) const
  {
    const uint32_t ones = 0x01010101u, a = w[0] ^ code * ones, b = w[1] ^ code * ones;
    return (((a - ones) & ~a) | ((b - ones) & ~b)) & 0x80808080u;
  }
};

/// Hides the numbers from the compiler, which would otherwise keep values derived from them in
/// registers.
template <typename T> __device__ inline void forget(eight<T> (&v)[DOWN])
{
#pragma unroll
  for (int j = 0; j < DOWN; j++)
#pragma unroll
    for (int i = 0; i < eight<T>::WORDS; i++) v[j].w[i] = opaque(v[j].w[i]);
}

/// Writes the thread's elements of both results. own[j] and turned[k] are the codes of the scales
/// of its row j and column k.
template <typename T, int OUT, bool RANDOM, bool NAN_TOO>
__device__ inline void write_both(const mx_job &p, eight<T> (&v)[DOWN], const float2 *table,
                                  const scale_codes &own, const scale_codes &turned,
                                  const place &at)
{
  float x[EIGHT];
  forget(v);
#pragma unroll
  for (int j = 0; j < DOWN; j++) {
    if (j >= at.rows) break;
#pragma unroll
    for (int k = 0; k < EIGHT; k++) x[k] = number_of(v[j], k);
    write_eight<OUT, RANDOM, NAN_TOO>(p, p.of[0], (at.r0 + j) * p.columns + at.c0, x,
                                      table[own[j]]);
  }
  if (p.sides < 2 || at.rows == 0) return;
  forget(v);
#pragma unroll
  for (int k = 0; k < EIGHT; k++) {
#pragma unroll
    for (int j = 0; j < DOWN; j++) x[j] = number_of(v[j], k);
    write_eight<OUT, RANDOM, NAN_TOO>(p, p.of[1], (at.c0 + k) * p.rows + at.r0, x,
                                      table[turned[k]]);
  }
}

/// Finds the largest magnitudes of the thread's rows and columns, as words like those of x.
template <typename T, bool BUT_NAN>
__device__ inline void find_tops(uint32_t (&row)[DOWN], uint32_t (&column)[eight<T>::WORDS],
                                 const eight<T> (&v)[DOWN])
{
#pragma unroll
  for (int i = 0; i < eight<T>::WORDS; i++) column[i] = 0;
#pragma unroll
  for (int j = 0; j < DOWN; j++) {
    row[j] = 0;
#pragma unroll
    for (int i = 0; i < eight<T>::WORDS; i++) {
      uint32_t word = v[j].w[i] & magnitudes<T>::bits;
      if (BUT_NAN) word = but_nan<T>(word);
      row[j] = larger<T>(row[j], word);
      column[i] = larger<T>(column[i], word);
    }
  }
}

/// Replaces each word by its maximum over `lanes` lanes that are `stride` lanes apart.
template <typename T, int N>
__device__ inline void merge(uint32_t (&word)[N], int lanes, int stride)
{
  for (int step = stride; step < lanes * stride; step *= 2)
#pragma unroll
    for (int i = 0; i < N; i++)
      word[i] = larger<T>(word[i], __shfl_xor_sync(0xFFFFFFFFu, word[i], step));
}

/// Finds the largest magnitudes of the blocks that hold the thread's rows and columns. As in x, a
/// word holds one f32 or two 16-bit numbers. Returns whether the thread holds NaN.
template <typename T>
__device__ inline bool find_amaxes(uint32_t (&own)[eight<T>::WORDS],
                                   uint32_t (&column)[eight<T>::WORDS], const mx_job &p,
                                   eight<T> (&v)[DOWN], const T *x, int rows)
{
  enum { WORDS = eight<T>::WORDS };
  uint32_t row[DOWN], top = 0;
  int count = 0;
  find_tops<T, false>(row, column, v);
#pragma unroll
  for (int i = 0; i < WORDS; i++) top = larger<T>(top, column[i]);
  const bool nan = some_nan<T>(top);
  if (nan) {                           // rare, so it reads x again instead of using registers
    top = 0;
#pragma unroll 1
    for (int j = 0; j < rows; j++)
#pragma unroll 1
      for (int k = 0; k < EIGHT; k++)
        top = max(top, magnitude_of(number(x[j * p.columns + k]), count));
    if (p.finite) find_tops<T, true>(row, column, v);
  } else {
    top = largest_bits<T>(top);
  }
  if (p.seen) report(p.seen, top, count);
#pragma unroll
  for (int i = 0; i < WORDS; i++) {
    if constexpr (WORDS < EIGHT)       // a word has the magnitudes of two rows
      own[i] = larger<T>(__byte_perm(row[2 * i], row[2 * i + 1], 0x5410),
                         __byte_perm(row[2 * i], row[2 * i + 1], 0x7632));
    else own[i] = row[i];
  }
  if (p.square) {
    uint32_t all[1] = {0};
#pragma unroll
    for (int i = 0; i < WORDS; i++) all[0] = larger<T>(all[0], own[i]);
    if (WORDS < EIGHT) all[0] = larger<T>(all[0], __byte_perm(all[0], 0, 0x1032));
    merge<T>(all, p.lanes, 1);
    merge<T>(all, p.lanes, LANES_ACROSS);
#pragma unroll
    for (int i = 0; i < WORDS; i++) own[i] = column[i] = all[0];
  } else {
    merge<T>(own, p.lanes, 1);
    if (p.sides == 2) merge<T>(column, p.lanes, LANES_ACROSS);
  }
  return nan;
}

// ------------------------------------------------------------------ four over six

/// Returns the sum of nvfp4_error over a row of a block of x or, for the transposed copy, over a
/// column. The row or column is spread over p.lanes lanes, which are `stride` lanes apart; x holds
/// the eight numbers of this lane. The lanes add their errors to the sum one after the other, so
/// the order is fixed.
__device__ inline float error_of(const float (&x)[EIGHT], float2 by, const mx_job &p, float amax,
                                 int stride)
{
  const mx_format f = mx_format_of(ENG_FORMAT_E2M1);
  const int lane = threadIdx.x % 32, first = lane & ~((p.lanes - 1) * stride);
  float error[EIGHT], y[EIGHT], sum = 0;
#pragma unroll
  for (int k = 0; k < EIGHT; k++) {
    uint32_t code;
    y[k] = rounded_magnitude<false>(code, fabsf(x[k]) * by.x, 0, f) * by.y * amax;
    // y / 1536, rounded once: the estimate y * inverse is corrected by its remainder. If y is Inf,
    // the remainder is NaN, and fminf makes the result Inf. If y is NaN, either all errors of the
    // block are NaN or amax is Inf; in both cases neither scale is better.
    const float inverse = 1.0f / 1536.0f, estimate = y[k] * inverse;
    error[k] = fminf(fmaf(fmaf(estimate, -1536.0f, y[k]), inverse, estimate), INFINITY);
  }
  if (!(fabsf(amax) >= 0x1p-105f))     // the remainder may be too small for f32
#pragma unroll
    for (int k = 0; k < EIGHT; k++) error[k] = (float)((double)y[k] * (1.0 / 1536.0));
#pragma unroll
  for (int k = 0; k < EIGHT; k++) error[k] = fabsf(error[k] - fabsf(x[k]));
  if (p.rule == ENG_MX_FOUR_OVER_SIX_MSE)
#pragma unroll
    for (int k = 0; k < EIGHT; k++) error[k] *= error[k];
#pragma unroll 1
  for (int i = 0; i < p.lanes; i++) {
#pragma unroll
    for (int k = 0; k < EIGHT; k++) sum += error[k];
    sum = __shfl_sync(0xFFFFFFFFu, sum, first + i * stride);
  }
  return sum;
}

/// Returns the sum of the errors of a square block's rows. Adds the second half of the rows to the
/// first half until one row is left.
__device__ inline float sum_of_rows(float (&error)[DOWN], int lanes)
{
  for (int step = lanes / 2; step > 0; step /= 2)
#pragma unroll
    for (int j = 0; j < DOWN; j++)
      error[j] += __shfl_xor_sync(0xFFFFFFFFu, error[j], step * LANES_ACROSS);
#pragma unroll
  for (int half = DOWN / 2; half > 0; half /= 2)
#pragma unroll
    for (int j = 0; j < half; j++) error[j] += error[j + half];
  return error[0];
}

/// Decides for each block whether its scale maps the block's amax to 6 or to 4. `own` and `turned`
/// hold the codes for 6. Replaces those whose error is smaller with 4 by the codes of `own4` and
/// `turned4`.
template <typename T>
__device__ inline void choose(scale_codes &own, scale_codes &turned, const scale_codes &own4,
                              const scale_codes &turned4, const mx_job &p, eight<T> (&v)[DOWN],
                              const float2 *table)
{
  const float amax = *p.amax;
  float x[EIGHT], six[DOWN], four[DOWN];
#pragma unroll
  for (int j = 0; j < DOWN; j++) {
#pragma unroll
    for (int k = 0; k < EIGHT; k++) x[k] = number_of(v[j], k);
    six[j] = error_of(x, table[own[j]], p, amax, 1);
    four[j] = error_of(x, table[own4[j]], p, amax, 1);
    if (!p.square && four[j] < six[j]) own.set(j, own4[j]);
  }
  if (p.square) {
    if (sum_of_rows(four, p.lanes) < sum_of_rows(six, p.lanes)) own = own4, turned = turned4;
    return;
  }
  if (p.sides < 2) return;
  forget(v);
#pragma unroll
  for (int k = 0; k < EIGHT; k++) {
#pragma unroll
    for (int j = 0; j < DOWN; j++) x[j] = number_of(v[j], k);
    six[k] = error_of(x, table[turned[k]], p, amax, LANES_ACROSS);
    four[k] = error_of(x, table[turned4[k]], p, amax, LANES_ACROSS);
    if (four[k] < six[k]) turned.set(k, turned4[k]);
  }
}

// ------------------------------------------------------------------ the kernel

/// Computes what mx_scale does, with constants of mx_power in place of branches.
__device__ inline uint32_t power_of(float amax, const mx_power &p)
{
  const uint32_t top = __float_as_uint(amax), bits = __float_as_uint(amax * p.by) + p.half;
  const int code = bits <= p.zero ? 0 : (int)((bits + p.up) >> 23) - p.emax;
  return top + p.slack >= 0x7F800000u ? p.over : (uint32_t)min(max(code, 0), 254);
}

/// Computes the codes of the scales of eight blocks. `amax` holds the blocks' amaxes in words like
/// those of x (one f32 or two bf16). nvfp4_wanted explains `stretch`.
template <typename T, bool FOUR_OVER_SIX>
__device__ inline scale_codes scales_of(const uint32_t (&amax)[eight<T>::WORDS], const mx_job &p,
                                        float encode, float stretch)
{
  const mx_format e4m3 = mx_format_of(ENG_e4m3);
  const int rule = FOUR_OVER_SIX ? ENG_MX_FOUR_OVER_SIX : ENG_MX_NVFP4;
  scale_codes codes = {};
  float top[EIGHT];
#pragma unroll
  for (int k = 0; k < EIGHT; k++)
    top[k] = fabsf(number_of<T>(amax[k / eight<T>::EACH], k % eight<T>::EACH));
  if (!mx_is_nvfp4(p.rule)) {
#pragma unroll
    for (int k = 0; k < EIGHT; k++) codes.w[k / 4] |= power_of(top[k], p.power) << k % 4 * 8;
    return codes;
  }
#pragma unroll
  for (int k = 0; k < EIGHT; k++) {
    uint32_t code;
    rounded<false, true>(code, nvfp4_wanted(top[k], encode, rule, stretch), 0, e4m3);
    codes.w[k / 4] |= code << k % 4 * 8;
  }
  return codes;
}

/// Writes the scales of the blocks that begin in the thread's rows and columns.
__device__ inline void write_scales(const mx_job &p, const scale_codes &own,
                                    const scale_codes &turned, const place &at)
{
  const int lane = threadIdx.x % 32, last = p.lanes - 1, shift = 31 - __clz(EIGHT * p.lanes);
  const bool left = (lane % LANES_ACROSS & last) == 0, upper = (lane / LANES_ACROSS & last) == 0;
  const mx_side &a = p.of[0], &b = p.of[1];
  uint8_t *to = a.scale + (p.square ? at.r0 >> shift : at.r0) * a.scale_row +
                (at.c0 >> shift) * a.scale_column;
#pragma unroll
  for (int j = 0; j < DOWN; j++, to += a.scale_row)
    if (j < at.rows && left && (!p.square || (j == 0 && upper))) *to = (uint8_t)own[j];
  if (p.sides < 2 || !upper || at.rows == 0) return;
  to = b.scale + (at.r0 >> shift) * b.scale_row +
       (p.square ? at.c0 >> shift : at.c0) * b.scale_column;
#pragma unroll
  for (int k = 0; k < EIGHT; k++, to += b.scale_column)
    if (!p.square || (k == 0 && left)) *to = (uint8_t)turned[k];
}

template <typename T, int OUT, bool RANDOM, bool FOUR_OVER_SIX>
__global__ void __launch_bounds__(TILE_THREADS, sizeof(T) == 2 && !FOUR_OVER_SIX && !RANDOM ? 3 : 2)
quantize_in_registers(const __grid_constant__ mx_job p)
{
  __shared__ float2 table[256];        // for each code of a scale: factor on elements, value
  // If p.seen is NULL, survey_all has just read x, and the end of x may still be in the cache. In
  // this case the tiles are processed from the last to the first.
  const unsigned tile = p.seen ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  place at;
  const uint32_t down = divide(tile, p.by_across);
  at.r0 = (int64_t)down * TILE +
          (warp / WARPS_ACROSS * LANES_DOWN + lane / LANES_ACROSS) * DOWN;
  at.c0 = (int64_t)(tile - down * p.by_across.size) * TILE +
          (warp % WARPS_ACROSS * LANES_ACROSS + lane % LANES_ACROSS) * EIGHT;
  at.rows = at.c0 < p.columns ? (int)max((int64_t)0, min((int64_t)DOWN, p.rows - at.r0)) : 0;
  eight<T> v[DOWN] = {};
  const T *x = (const T *)p.x + at.r0 * p.columns + at.c0;
#pragma unroll
  for (int j = 0; j < DOWN; j++)
    if (j < at.rows) load_wide(v[j], x + j * p.columns);
  const float encode = mx_is_nvfp4(p.rule) ? nvfp4_encode_scale(*p.amax, p.rule) : 1.0f;
  const uint8_t entry = (uint8_t)threadIdx.x;
  table[entry] = mx_is_nvfp4(p.rule) ?
    make_float2(nvfp4_factor(entry, encode) * p.factor, e4m3_to_f32(entry)) :
    make_float2(mx_inverse(entry) * p.factor, ue8m0_to_f32(entry));
  __syncthreads();
  uint32_t row[eight<T>::WORDS], column[eight<T>::WORDS];
  bool nan = find_amaxes(row, column, p, v, x, at.rows);
  scale_codes own = scales_of<T, FOUR_OVER_SIX>(row, p, encode, 1.0f),
              turned = scales_of<T, FOUR_OVER_SIX>(column, p, encode, 1.0f);
  if constexpr (FOUR_OVER_SIX)
    choose(own, turned, scales_of<T, true>(row, p, encode, 1.5f),
           scales_of<T, true>(column, p, encode, 1.5f), p, v, table);
  write_scales(p, own, turned, at);
  const uint32_t of_nan = mx_is_nvfp4(p.rule) ? 0x7Fu : 0xFFu;
  nan |= own.any(of_nan) | turned.any(of_nan);
  if (nan) write_both<T, OUT, RANDOM, true>(p, v, table, own, turned, at);
  else write_both<T, OUT, RANDOM, false>(p, v, table, own, turned, at);
}

}  // namespace
