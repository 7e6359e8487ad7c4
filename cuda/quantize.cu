// FP8: quantize, with the transposed copy of the same read, and dequantize; bit-equal to core/cpu/reference_fp8.c.
//
// A block of threads takes a tile of 128 x 128 numbers into registers, 4 x 8 a thread, and writes its codes in both directions,
// the turned ones by way of shared memory. Where scale blocks fit the tile (1 x 128, 128 x 1, 128 x 128) the tile finds their
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

enum { TILE = 128, DOWN = 4, EIGHT = 8 /* rows and columns of a thread */, TILE_THREADS = TILE / DOWN * (TILE / EIGHT), TILE_WARPS = TILE_THREADS / 32 };
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
__device__ static inline uint32_t nan_of(const scaling_rule &r) { return r.rule == ENG_SCALE_TORCHAO ? 0x7FC00000u : 0u; }

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

// ------------------------------------------------------------------ tiles

/// Eight numbers of a row from a 16-byte place.
template <typename T> __device__ static inline void load_wide(float v[EIGHT], const T *x)
{
  union { uint4 raw[EIGHT * sizeof(T) / 16]; T x[EIGHT]; } u;
#pragma unroll
  for (int i = 0; i < (int)(EIGHT * sizeof(T) / 16); i++) u.raw[i] = __ldg((const uint4 *)x + i);
#pragma unroll
  for (int k = 0; k < EIGHT; k++) v[k] = number(u.x[k]);
}

/// What a tile's threads share.
struct shared_tile {
  uint32_t row_top[TILE], column_top[TILE_WARPS][TILE], warp_top[TILE_WARPS];
  float    row_factor[2][TILE], column_factor[2][TILE];   // of q and of its transposed copy
  alignas(16) uint32_t turned[TILE][TILE / DOWN];         // codes [column of x][rows of x], word w of column c at w ^ (c / 8 * 2)
};

/// Factors of one side into shared memory: found here from the maxima, with the scale written out, or read. Threads 0 to 127 take
/// the tile's rows, 128 to 255 its columns.
__device__ static inline void share_factors(shared_tile &t, const side &s, int which, const job &p, int64_t r0, int64_t c0)
{
  const int i = threadIdx.x % TILE;
  if (!s.q || (int)threadIdx.x / TILE != (s.how == BY_COLUMN)) return;
  int64_t r = r0 + (s.how == BY_ROW ? i : 0), c = c0 + (s.how == BY_COLUMN ? i : 0);
  float factor = 1.0f;
  if (r < p.rows && c < p.columns) {
    if (s.factor) {
      factor = factor_at(s, r, c);
    } else {
      uint32_t top = s.how == BY_ROW ? t.row_top[i] : 0;
      for (int w = 0; s.how != BY_ROW && w < TILE_WARPS; w++) top = max(top, s.how == BY_COLUMN ? t.column_top[w][i] : t.warp_top[w]);
      fp8_scale found = scale_of(p.rule, __uint_as_float(top));
      factor = found.factor;
      if (s.how != BY_TILE || i == 0) s.scale[r / s.row_block * s.row_stride + c / s.column_block * s.column_stride] = found.scale;
    }
  }
  if (s.how == BY_COLUMN) t.column_factor[which][i] = factor;
  else t.row_factor[which][i] = factor;
}

/// The tile's part of the transposed copy.
template <int E> __device__ static inline void write_turned(shared_tile &t, const float (&v)[DOWN][EIGHT], const job &p, int first_row, int first_column, int64_t r0, int64_t c0)
{
  const bool by_columns = p.turned.how == BY_COLUMN;
#pragma unroll
  for (int k = 0; k < EIGHT; k++) {
    float y[DOWN];
#pragma unroll
    for (int j = 0; j < DOWN; j++)
      y[j] = scaled(v[j][k], by_columns ? t.column_factor[1][first_column + k] : t.row_factor[1][first_row + j], p.rule.divides);
    t.turned[first_column + k][first_row / DOWN ^ first_column / EIGHT * 2] = codes<E>(y[0], y[1], y[2], y[3]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < TILE * TILE / 16; i += TILE_THREADS) {   // 16 bytes of the copy, rows of x, at a time
    const int column = i / (TILE / 16), sixteen = i % (TILE / 16), group = column / EIGHT;
    if (c0 + column >= p.columns) break;
    uint4 found = *(const uint4 *)&t.turned[column][4 * (sixteen ^ group / 2)];
    if (group % 2) found = make_uint4(found.z, found.w, found.x, found.y);
    const int64_t row = r0 + 16 * sixteen;
    uint8_t *to = (uint8_t *)p.turned.q + (c0 + column) * p.rows + row;
    if (p.turned_wide && row + 16 <= p.rows) {
      *(uint4 *)to = found;
    } else {
      const uint32_t word[4] = {found.x, found.y, found.z, found.w};
#pragma unroll
      for (int k = 0; k < 16; k++)
        if (row + k < p.rows) to[k] = (uint8_t)(word[k / 4] >> k % 4 * 8);
    }
  }
}

template <typename T, int E> __global__ static void __launch_bounds__(TILE_THREADS, 2)
quantize_tiles(const T *x, const job p)
{
  __shared__ shared_tile t;
  const int64_t across = (p.columns + TILE - 1) / TILE;
  const int64_t r0 = blockIdx.x / across * TILE, c0 = blockIdx.x % across * TILE;
  const int first_row = threadIdx.x / LANES * DOWN, first_column = threadIdx.x % LANES * EIGHT;
  const int64_t r = r0 + first_row, c = c0 + first_column;
  const int rows_there = c < p.columns ? (int)min((int64_t)DOWN, p.rows - r) : 0;   // columns are a multiple of 8

  float v[DOWN][EIGHT];
#pragma unroll
  for (int j = 0; j < DOWN; j++) {
    if (j < rows_there) load_wide(v[j], x + (r + j) * p.columns + c);
    else
#pragma unroll
      for (int k = 0; k < EIGHT; k++) v[j][k] = 0.0f;
  }

  const uint32_t nan = nan_of(p.rule);
  uint32_t top = 0, row_top[DOWN], column_top[EIGHT];
  bool nans = false;
#pragma unroll
  for (int k = 0; k < EIGHT; k++) column_top[k] = 0;
#pragma unroll
  for (int j = 0; j < DOWN; j++) {
    row_top[j] = 0;
#pragma unroll
    for (int k = 0; k < EIGHT; k++) {
      uint32_t a = magnitude_of(v[j][k], nan);
      nans |= v[j][k] != v[j][k];
      row_top[j] = max(row_top[j], a);
      column_top[k] = max(column_top[k], a);
    }
    top = max(top, row_top[j]);
  }
  top = __reduce_max_sync(0xFFFFFFFFu, top);
  nans = __any_sync(0xFFFFFFFFu, nans);
  if (threadIdx.x % 32 == 0) {
    t.warp_top[threadIdx.x / 32] = top;
    if (p.amax) atomicMax(p.amax, nans ? 0x7FC00000u : top);
  }
  if (!p.own.factor) {   // both sides find theirs here
#pragma unroll
    for (int j = 0; j < DOWN; j++) {
#pragma unroll
      for (int step = 1; step < LANES; step *= 2) row_top[j] = max(row_top[j], __shfl_xor_sync(0xFFFFFFFFu, row_top[j], step));
      if (threadIdx.x % LANES == 0) t.row_top[first_row + j] = row_top[j];
    }
#pragma unroll
    for (int k = 0; k < EIGHT; k++) {
      column_top[k] = max(column_top[k], __shfl_xor_sync(0xFFFFFFFFu, column_top[k], LANES));
      if (threadIdx.x % 32 < LANES) t.column_top[threadIdx.x / 32][first_column + k] = column_top[k];
    }
  }
  __syncthreads();
  share_factors(t, p.own, 0, p, r0, c0);
  share_factors(t, p.turned, 1, p, r0, c0);
  __syncthreads();

  const bool by_columns = p.own.how == BY_COLUMN;
  if (p.own.q) {
#pragma unroll
    for (int j = 0; j < DOWN; j++) {
      float y[EIGHT];
#pragma unroll
      for (int k = 0; k < EIGHT; k++)
        y[k] = scaled(v[j][k], by_columns ? t.column_factor[0][first_column + k] : t.row_factor[0][first_row + j], p.rule.divides);
      if (j >= rows_there) continue;
      const int64_t at = (r + j) * p.columns + c;
      if (E == 6) put_e5m6((uint32_t *)p.own.q + at / 8 * 3, y);
      else *(uint2 *)((uint8_t *)p.own.q + at) = make_uint2(codes<E>(y[0], y[1], y[2], y[3]), codes<E>(y[4], y[5], y[6], y[7]));
    }
  }
  if (E != 6 && p.turned.q) write_turned<E>(t, v, p, first_row, first_column, r0, c0);
}

// ------------------------------------------------------------------ maxima of other blocks

enum { STRIP = 64, AHEAD = 4 /* rows on their way */, MAXIMA_COLUMNS = 32 * EIGHT, MAXIMA_ROWS = THREADS / 32 * STRIP };

/// A thread's maxima of eight columns into those of the blocks of its row, and from then on anew.
__device__ static inline void flush_maxima(uint32_t (&top)[EIGHT], uint32_t *of_row, int64_t c, int there, int64_t column_block, bool whole_rows)
{
  uint32_t some = 0;
  if (whole_rows) {
#pragma unroll
    for (int k = 0; k < EIGHT; k++) some = max(some, top[k]);
    some = __reduce_max_sync(0xFFFFFFFFu, some);
    if (threadIdx.x % 32 == 0) atomicMax(of_row, some);
  } else {
#pragma unroll
    for (int k = 0; k < EIGHT; k++) {
      some = max(some, top[k]);
      if (k >= there || (k + 1 < there && (c + k) / column_block == (c + k + 1) / column_block)) continue;
      atomicMax(of_row + (c + k) / column_block, some);
      some = 0;
    }
  }
#pragma unroll
  for (int k = 0; k < EIGHT; k++) top[k] = 0;
}

/// The largest magnitudes of all blocks, whose bits begin as 0. A warp goes down STRIP rows of 256 columns.
template <typename T> __global__ static void __launch_bounds__(THREADS, 3)
block_maxima(const T *x, int64_t rows, int64_t columns, int wide, int64_t row_block, int64_t column_block, int64_t blocks_across, uint32_t nan, uint32_t *maxima)
{
  __shared__ uint32_t warps[THREADS / 32];
  const int64_t across = (columns + MAXIMA_COLUMNS - 1) / MAXIMA_COLUMNS;
  const int64_t r0 = blockIdx.x / across * MAXIMA_ROWS + threadIdx.x / 32 * STRIP, end = min(rows, r0 + STRIP);
  const int64_t c = blockIdx.x % across * MAXIMA_COLUMNS + threadIdx.x % 32 * EIGHT;
  const int there = (int)min((int64_t)EIGHT, max((int64_t)0, columns - c));
  const bool whole_rows = column_block >= columns, whole = whole_rows && row_block >= rows;
  uint32_t top[EIGHT];
#pragma unroll
  for (int k = 0; k < EIGHT; k++) top[k] = 0;
  int64_t next = (r0 / row_block + 1) * row_block;
  for (int64_t first = r0; first < end; first += AHEAD) {
    float v[AHEAD][EIGHT];
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      const T *from = x + (first + j) * columns + c;
      if (wide && there == EIGHT && first + j < end) load_wide(v[j], from);
      else
#pragma unroll
        for (int k = 0; k < EIGHT; k++) v[j][k] = k < there && first + j < end ? number(from[k]) : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      const int64_t r = first + j;
      if (r >= end) continue;
#pragma unroll
      for (int k = 0; k < EIGHT; k++) top[k] = max(top[k], magnitude_of(v[j][k], nan));
      if (whole || (r + 1 < next && r + 1 < end)) continue;
      flush_maxima(top, maxima + r / row_block * blocks_across, c, there, column_block, whole_rows);
      next += row_block;
    }
  }
  if (!whole) return;
  uint32_t all = 0;
#pragma unroll
  for (int k = 0; k < EIGHT; k++) all = max(all, top[k]);
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
                                                                     p->rule.rule == ENG_SCALE_TORCHAO ? 0x7FC00000u : 0u, maxima);
    CUDA_LAUNCHED("quantize");
  }
  make_scales<<<(unsigned)grid(blocks, THREADS), THREADS, 0, cuda_stream()>>>(maxima, *s, *other, both, p->rule);
  CUDA_LAUNCHED("quantize");
  return ENG_OK;
}

template <typename T, int E> static void launch_tiles(const T *x, const job *p)
{
  quantize_tiles<T, E><<<(unsigned)(grid(p->rows, TILE) * grid(p->columns, TILE)), TILE_THREADS, 0, cuda_stream()>>>(x, *p);
}
template <typename T, int E> static void launch_tiles(const double *, const job *) {}   // f64 goes number by number

template <typename T, int E> static eng_status write_codes(const T *x, const job *p, bool random)
{
  const int64_t count = p->rows * p->columns;
  cudaStream_t stream = cuda_stream();
  if (count == 0) return ENG_OK;
  if (p->tiles) {
    launch_tiles<T, E>(x, p);
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
    if (call->out[k] && call->out[k]->count > 0)
      CUDA_TRY(cudaMemsetAsync(call->out[k]->data, 0, (size_t)call->out[k]->count * sizeof(float), cuda_stream()));
  if (p.amax) CUDA_TRY(cudaMemsetAsync(p.amax, 0, sizeof *p.amax, cuda_stream()));

  p.wide = (uintptr_t)x->data % 16 == 0 && p.columns % EIGHT == 0;
  p.turned_wide = p.rows % 16 == 0;
  p.tiles = p.wide && dtype != ENG_f64 && !(call->ints[4] & FP8_STOCHASTIC) && p.own.how != BY_BLOCK && p.turned.how != BY_BLOCK;

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
