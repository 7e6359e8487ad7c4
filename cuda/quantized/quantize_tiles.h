// The kernel of quantize for tiles of 128 x 128, which computes the codes of both directions from
// one read. Included only by quantize.cu, which describes the method.
#pragma once

#include "quantize.h"
#include "kernel/swiglu.h"

#include <cuda_pipeline.h>

/// Shared memory of a tile.
struct shared_tile {
  // row_top, warp_top: the largest magnitude of each row and of each warp's numbers, as bits of
  // f32. column_top: for each warp, the largest magnitude of each column of its numbers, in words
  // like those of x (one f32 or two 16-bit numbers).
  uint32_t row_top[TILE], warp_top[TILE_WARPS];
  alignas(16) uint32_t column_top[TILE_WARPS][TILE];
  // factor[0] belongs to q, factor[1] to its transposed copy; one per row or per column
  alignas(16) float factor[2][TILE];
  alignas(16) float inverse[2][TILE];   // of each factor, if the rule divides
  // turned[c] holds the transposed copy's codes of column c of x; word w is at w ^ (c / 8 * 2)
  alignas(16) uint32_t turned[TILE][TILE / 4];
};

/// The position of a tile, and of a thread in it.
struct tile_place {
  int down, across;                // the tile's indices
  int first_row, first_column;     // of the thread, within the tile
  // number of rows of x from the thread's first row on; 0 or less if there are none, 0 if the
  // thread's columns are outside x
  int rows_there;
};
// Indices fit in an int, because tiles are used only if both sides of x are below 2^31 - TILE.
__device__ static inline int row_of(const tile_place &at) { return at.down * TILE + at.first_row; }
__device__ static inline int column_of(const tile_place &at)
{ return at.across * TILE + at.first_column; }
__device__ static inline int64_t offset_of(const tile_place &at, const job &p)
{ return row_of(at) * (int64_t)p.width + column_of(at); }

/// Computes the factors of one side from s.maxima or, if that is NULL, from the tile's maxima, puts
/// them into shared memory, and writes the scales. Threads 128 to 255 do this for factors by
/// column, threads 0 to 127 for all other factors. Returns true if the thread's factor is a divisor
/// outside the range that quotient() supports.
template <typename T>
__device__ static inline bool share_factors(shared_tile &t, const side &s, int which, const job &p,
                                            const tile_place &at)
{
  const int i = threadIdx.x % TILE;
  if (!s.q || (int)threadIdx.x / TILE != (s.how == BY_COLUMN)) return false;
  const int r = at.down * TILE + (s.how == BY_ROW ? i : 0),
            c = at.across * TILE + (s.how == BY_COLUMN ? i : 0);
  float factor = 1.0f;
  if (r < p.height && c < p.width) {
    const int64_t down = s.how == BY_ROW ? r :
                         s.down == 1     ? 0 :
                                           at.down,
                  across = s.how == BY_COLUMN ? c :
                           s.across == 1      ? 0 :
                                                at.across;
    uint32_t top = s.how == BY_ROW ? t.row_top[i] : 0;
    if (s.maxima) {
      top = s.maxima[down * s.across + across];
    } else if (s.how == BY_COLUMN) {
      for (int w = 0; w < TILE_WARPS; w++)
        top = larger<T>(top, t.column_top[w][i / eight<T>::EACH]);
      top = magnitude_bits<T>(top, i % eight<T>::EACH);
    } else if (s.how == BY_TILE) {
      for (int w = 0; w < TILE_WARPS; w++) top = max(top, t.warp_top[w]);
    }
    fp8_scale found = scale_of(p.rule, __uint_as_float(top));
    factor = found.factor;
    if (s.how != BY_TILE || i == 0)
      s.scale[down * s.row_stride + across * s.column_stride] = found.scale;
  }
  t.factor[which][i] = factor;
  if (!p.rule.divides) return false;
  t.inverse[which][i] = 1.0f / factor;
  return !(factor >= 0x1p-80f && factor <= 0x1p100f);
}

/// Returns a number with the same code as x / s. inverse: 1 / s, rounded to nearest. Corrects the
/// product x * inverse by its remainder (Markstein), which gives the rounded quotient if nothing
/// leaves the normal range. The rounding was tested for all significands of s, with the x whose
/// quotients come nearest to the middle between two floats. The ranges of the numbers:
///   s is from 2^-80 to 2^100. Tiles with another s divide.
///   |x| is at most the amax that gave s, and the margin of a scale is at least -100, so
///   |x / s| < 2^117. An infinite x makes s infinite. NaN stays NaN.
///   If |x| >= 2^-102, the remainder is a multiple of 2^-149, so it is exact. If |x| is smaller,
///   |x / s| < 2^-22, so quotient and result both have the code of zero, with the sign of x.
/// For x = -0, the remainder is +0, and -0 + +0 * -inverse keeps the sign. (With the remainder
/// negated instead, gcc, which builds the emulated card, would compute s * -q + x, which is +0, and
/// lose the sign.)
__device__ static inline float quotient(float x, float s, float inverse)
{
  const float q = x * inverse, remainder = fmaf(q, s, -x);
  return fmaf(remainder, -inverse, q);
}

/// Loads the factors of four rows or columns, or one factor four times.
template <bool ALL> __device__ static inline void load_factors(float f[4], const float *from)
{
  const float4 four = ALL ? *(const float4 *)from : make_float4(*from, *from, *from, *from);
  f[0] = four.x;
  f[1] = four.y;
  f[2] = four.z;
  f[3] = four.w;
}

/// Writes the codes of the thread's rows to memory. With COLUMNS, factors are per column.
template <typename T, int E, bool DIVIDES, bool COLUMNS>
__device__ static inline void write_own(const shared_tile &t, const eight<T> (&v)[DOWN],
                                        const job &p, const tile_place &at)
{
  uint8_t *to = (uint8_t *)p.own.q + offset_of(at, p);
#pragma unroll
  for (int j = 0; j < DOWN; j++, to += p.width) {
    uint32_t word[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int first = COLUMNS ? at.first_column + 4 * h : at.first_row + j;
      float y[4], factor[4], inverse[4] = {};
      load_factors<COLUMNS>(factor, t.factor[0] + first);
      if (DIVIDES) load_factors<COLUMNS>(inverse, t.inverse[0] + first);
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const float x = number_of(v[j], 4 * h + k);
        y[k] = DIVIDES ? quotient(x, factor[k], inverse[k]) : x * factor[k];
      }
      word[h] = codes<E>(y[0], y[1], y[2], y[3]);
    }
    if (j < at.rows_there) *(uint2 *)to = make_uint2(word[0], word[1]);
  }
}

/// Returns the address of the two words of the transposed tile that hold the codes of the thread's
/// column k.
__device__ static inline uint32_t *turned_word(shared_tile &t, const tile_place &at, int k)
{ return &t.turned[at.first_column + k][at.first_row / 4 ^ at.first_column / EIGHT * 2]; }

/// Puts the thread's codes of the transposed copy into shared memory.
template <typename T, int E, bool DIVIDES, bool COLUMNS>
__device__ static inline void turn_codes(shared_tile &t, const eight<T> (&v)[DOWN],
                                         const tile_place &at)
{
#pragma unroll
  for (int k = 0; k < EIGHT; k++) {
    uint32_t word[DOWN / 4];
#pragma unroll
    for (int i = 0; i < DOWN / 4; i++) {
      const int first = COLUMNS ? at.first_column + k : at.first_row + 4 * i;
      float y[4], factor[4], inverse[4] = {};
      load_factors<!COLUMNS>(factor, t.factor[1] + first);
      if (DIVIDES) load_factors<!COLUMNS>(inverse, t.inverse[1] + first);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float x = number_of(v[4 * i + j], k);
        y[j] = DIVIDES ? quotient(x, factor[j], inverse[j]) : x * factor[j];
      }
      word[i] = codes<E>(y[0], y[1], y[2], y[3]);
    }
    *(uint2 *)turned_word(t, at, k) = make_uint2(word[0], word[1]);
  }
}

/// Does the work of write_own and turn_codes by division, number by number, for tiles with a factor
/// that quotient() does not support.
template <typename T, int E>
__device__ static inline void divide_all(shared_tile &t, const eight<T> (&of)[DOWN], const job &p,
                                         const tile_place &at)
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
      ((uint8_t *)p.own.q)[offset_of(at, p) + j * (int64_t)p.width + k] =
        (uint8_t)codes<E>(y, y, y, y);
    }
    if (p.turned.q) {
      const float y = x / t.factor[1][p.turned.how == BY_COLUMN ? column : row];
      ((uint8_t *)turned_word(t, at, k))[j] = (uint8_t)codes<E>(y, y, y, y);
    }
    if (EACH == 2 && k % 2 == 0) {
      v[0] >>= 16;
      continue;
    }
    // shifts the words, so that v[0] always has the next number: an array is kept in registers only
    // if its indices are constant
#pragma unroll
    for (int i = 0; i < DOWN * WORDS - 1; i++) v[i] = v[i + 1];
  }
}

/// Writes the tile's part of the transposed copy, 16 codes (rows of x) at a time.
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

/// Tracks the largest magnitudes of the words added so far. NaN counts as the largest or, with
/// BUT_NAN, is ignored. Compares floats, because one instruction drops the sign and compares. To
/// compare integers, a thread would need registers for all magnitudes in addition to the numbers.
template <typename T, bool BUT_NAN> struct largest_of {
  float high = 0;
  __device__ void add(uint32_t word)
  {
    const float x = fabsf(__uint_as_float(word));
    high = BUT_NAN ? fmaxf(high, x) : max_nan(high, x);
  }
  __device__ uint32_t found() const { return __float_as_uint(high); }
};
template <bool BUT_NAN> struct largest_of<f16_t, BUT_NAN> {
  __half2 high = {};
  __device__ void add(uint32_t word)
  {
    const __half2 x = __habs2(*(const __half2 *)&word);
    high = BUT_NAN ? __hmax2(high, x) : __hmax2_nan(high, x);
  }
  __device__ uint32_t found() const { return *(const uint32_t *)&high; }
};
/// bf16's comparison keeps the sign, so this tracks the largest and the smallest number.
template <bool BUT_NAN> struct largest_of<bf16_t, BUT_NAN> {
  __nv_bfloat162 high = {}, low = {};
  __device__ void add(uint32_t word)
  {
    const __nv_bfloat162 x = *(const __nv_bfloat162 *)&word;
    high = BUT_NAN ? __hmax2(high, x) : __hmax2_nan(high, x);
    low = BUT_NAN ? __hmin2(low, x) : __hmin2_nan(low, x);
  }
  __device__ uint32_t found() const
  {
    return larger<bf16_t>(*(const uint32_t *)&high,
                          *(const uint32_t *)&low & magnitudes<bf16_t>::bits);
  }
};

/// Finds the largest magnitudes of the thread's rows and columns. With BUT_NAN, ignores NaN.
template <typename T, bool BUT_NAN>
__device__ static inline void find_tops(uint32_t (&row)[DOWN], uint32_t (&column)[eight<T>::WORDS],
                                        const eight<T> (&v)[DOWN])
{
  largest_of<T, BUT_NAN> down[eight<T>::WORDS];
#pragma unroll
  for (int j = 0; j < DOWN; j++) {
    largest_of<T, BUT_NAN> across;
#pragma unroll
    for (int i = 0; i < eight<T>::WORDS; i++) {
      across.add(v[j].w[i]);
      down[i].add(v[j].w[i]);
    }
    row[j] = across.found();
  }
#pragma unroll
  for (int i = 0; i < eight<T>::WORDS; i++) column[i] = down[i].found();
}

/// Puts the maxima of the tile's rows, columns and warps into shared memory, and merges the largest
/// of all into p.amax.
template <typename T>
__device__ static inline void share_tops(shared_tile &t, const eight<T> (&v)[DOWN], const job &p,
                                         const tile_place &at)
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
    for (int i = 0; i < WORDS; i++)
      column[i] = larger<T>(column[i], __shfl_xor_sync(0xFFFFFFFFu, column[i], LANES));
    if (lane < LANES)
#pragma unroll
      for (int i = 0; i < WORDS; i += 4)
        *(uint4 *)&t.column_top[warp][at.first_column / eight<T>::EACH + i] =
          make_uint4(column[i], column[i + 1], column[i + 2], column[i + 3]);
  }
  enum { PACKED = sizeof(T) == 2, N = PACKED ? DOWN / 2 : DOWN };
  uint32_t tops[N];   // pairs of rows (0 and 1, 2 and 3 ..) of 16-bit numbers, or single rows
#pragma unroll
  for (int i = 0; i < N; i++) {
    if constexpr (PACKED)
      tops[i] = larger<T>(__byte_perm(row[2 * i], row[2 * i + 1], 0x5410),
                          __byte_perm(row[2 * i], row[2 * i + 1], 0x7632));
    else tops[i] = row[i];
#pragma unroll
    for (int step = 1; step < LANES; step *= 2)
      tops[i] = larger<T>(tops[i], __shfl_xor_sync(0xFFFFFFFFu, tops[i], step));
  }
  uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < N; i++) all = max(all, largest_bits<T>(tops[i]));
  all = max(all, __shfl_xor_sync(0xFFFFFFFFu, all, LANES));
  if (lane % LANES == 0)
#pragma unroll
    for (int j = 0; j < DOWN; j++)
      t.row_top[at.first_row + j] =
        PACKED ? magnitude_bits<T>(tops[j / 2], j % 2) : magnitude_bits<T>(tops[j], 0);
  if (lane == 0) t.warp_top[warp] = all;
  if (!p.amax) return;
  const bool some = __any_sync(0xFFFFFFFFu, nan);
  if (lane != 0) return;
  if (some) all = 0x7FC00000u;
  // most warps can skip the atomic operation, because *p.amax is already as large
  if (all > *(volatile uint32_t *)p.amax) atomicMax(p.amax, all);
}

__device__ static inline tile_place place_of(unsigned tile, const job &p)
{
  tile_place at;
  at.down = (int)(tile / p.across);
  at.across = (int)(tile % p.across);
  at.first_row = threadIdx.x / LANES * DOWN;
  at.first_column = threadIdx.x % LANES * EIGHT;
  // p.width is a multiple of 8, so a thread's columns are all inside x or all outside
  at.rows_there = column_of(at) < p.width ? p.height - row_of(at) : 0;
  return at;
}

/// Returns the place in `stage` of a 16-byte quad of row j of the thread. `quad` counts from the
/// beginning of the tile's row. In f32 the places are such that neither loads nor reads have bank
/// conflicts.
template <typename T> __device__ static inline int staged(int j, int quad)
{
  enum { QUADS = eight<T>::WORDS / 4 };
  return (j * TILE_THREADS + threadIdx.x / LANES * LANES) * QUADS +
         (QUADS == 2 ? quad ^ (quad >> 3 & 1) : quad);
}

/// Starts loading the thread's share of its warp's numbers into `stage`. In f32 the share includes
/// quads that other threads of the warp will read, so that the loads are contiguous.
template <typename T>
__device__ static inline void send_for(uint4 *stage, const T *x, const job &p, const tile_place &at)
{
  enum { QUADS = eight<T>::WORDS / 4, EACH = EIGHT / QUADS };
  const int column = at.across * TILE + threadIdx.x % LANES * EACH;
  const T *from = x + row_of(at) * (int64_t)p.width + column;
#pragma unroll
  for (int j = 0; j < DOWN; j++, from += p.width)
#pragma unroll
    for (int i = 0; i < QUADS; i++)
      if (row_of(at) + j < p.height && column + i * LANES * EACH < p.width)
        __pipeline_memcpy_async(stage + staged<T>(j, i * LANES + threadIdx.x % LANES),
                                from + i * LANES * EACH, 16);
  __pipeline_commit();
}

/// Waits for the numbers that send_for loads, and reads them. Numbers outside x are zeros.
template <typename T>
__device__ static inline void receive(eight<T> (&v)[DOWN], const uint4 *stage, const tile_place &at)
{
  enum { QUADS = eight<T>::WORDS / 4 };
  __pipeline_wait_prior(0);
  asm volatile("" ::: "memory");   // no read may move before the wait
  if (QUADS > 1) __syncwarp();
#pragma unroll
  for (int j = 0; j < DOWN; j++)
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
      const uint4 raw = j < at.rows_there ?
                          stage[staged<T>(j, threadIdx.x % LANES * QUADS + i)] :
                          make_uint4(0, 0, 0, 0);
      v[j].w[4 * i] = raw.x;
      v[j].w[4 * i + 1] = raw.y;
      v[j].w[4 * i + 2] = raw.z;
      v[j].w[4 * i + 3] = raw.w;
    }
  if (QUADS > 1) __syncwarp();   // the next send_for overwrites what other lanes read here
}

/// The number of 16-byte quads of a tile in `stage`.
template <typename T> struct stage_of { enum { QUADS = TILE * TILE * sizeof(T) / sizeof(uint4) }; };

/// Starts loading a tile of x into `stage` and, with SWIGLU, a tile of `up` behind the tile of x.
template <typename T, bool SWIGLU>
__device__ static inline void send_tile(uint4 *stage, const T *x, const job &p,
                                        const tile_place &at)
{
  send_for(stage, x, p, at);
  if constexpr (SWIGLU) send_for(stage + stage_of<T>::QUADS, (const T *)p.up, p, at);
}

/// Reads the numbers to quantize. With SWIGLU a thread reads the rows of `up` one at a time, so
/// that gate and up are never both completely in registers.
template <typename T, bool SWIGLU>
__device__ static inline void receive_tile(eight<T> (&v)[DOWN], const uint4 *stage,
                                           const tile_place &at)
{
  receive(v, stage, at);
  if constexpr (SWIGLU) {
    static_assert(sizeof(T) == 2, "a thread reads one quad from each row");
    const uint4 *ups = stage + stage_of<T>::QUADS + threadIdx.x;
#pragma unroll
    for (int j = 0; j < DOWN; j++) {
      words<T, EIGHT> gate, up = {}, h;
#pragma unroll
      for (int i = 0; i < eight<T>::WORDS; i++) gate.w[i] = v[j].w[i];
      if (j < at.rows_there) load_words(up, (const T *)(ups + j * TILE_THREADS));
      swiglu_words(h, gate, up);
#pragma unroll
      for (int i = 0; i < eight<T>::WORDS; i++) v[j].w[i] = h.w[i];
    }
  }
}

/// The number of blocks that fit in the shared memory of a multiprocessor from sm_90 to below
/// sm_120. The compiler limits registers so that this many blocks fit, and the host launches this
/// many per multiprocessor. Other cards have less shared memory, so a block may wait until another
/// has ended. For these cards, the kernel with SWIGLU is compiled for one block, which may then use
/// more registers.
template <typename T, bool SWIGLU> constexpr int tiles_resident(void)
{
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200)
  if (SWIGLU) return 1;
#endif
  return sizeof(T) == 2 && !SWIGLU ? 3 : 2;
}
/// Size of shared memory in bytes. It holds a shared_tile, then the numbers being loaded.
template <typename T, bool SWIGLU>
static int tile_bytes(void)
{ return (int)(sizeof(shared_tile) + (SWIGLU ? 2 : 1) * TILE * TILE * sizeof(T)); }

template <typename T, int E, bool DIVIDES, bool SWIGLU>
__global__ static void __launch_bounds__(TILE_THREADS, tiles_resident<T, SWIGLU>())
  quantize_tiles(const T *x, unsigned tiles, const job p)
{
  extern __shared__ uint4 shared[];
  shared_tile &t = *(shared_tile *)shared;
  uint4 *stage = shared + sizeof(shared_tile) / sizeof(uint4);
  // If maxima are in memory, the pass that found them has just read x, and the end of x may still
  // be in the cache. So the tiles are processed from the last to the first.
  const bool backwards = p.own.maxima != NULL;
  // indices are unsigned: below 0 they wrap around to a large value, which ends the loop
  unsigned n = backwards ? tiles - 1 - blockIdx.x : blockIdx.x;
  send_tile<T, SWIGLU>(stage, x, p, place_of(n, p));
  while (n < tiles) {
    const tile_place at = place_of(n, p);
    eight<T> v[DOWN];
    receive_tile<T, SWIGLU>(v, stage, at);
    n += backwards ? 0 - gridDim.x : gridDim.x;
    if (n < tiles) send_tile<T, SWIGLU>(stage, x, p, place_of(n, p));
    if ((!p.own.maxima && !p.rule.given) || p.amax) share_tops(t, v, p, at);
    __syncthreads();
    const bool bad_own = share_factors<T>(t, p.own, 0, p, at),
               bad_turned = share_factors<T>(t, p.turned, 1, p, at);
    const bool by_division = __syncthreads_or(bad_own || bad_turned) != 0;

    if constexpr (E == 6) {   // no transposed copy
      if (p.own.q)
#pragma unroll
        for (int j = 0; j < DOWN; j++) {
          if (j >= at.rows_there) continue;
          float y[EIGHT];
#pragma unroll
          for (int k = 0; k < EIGHT; k++) {
            const float x = number_of(v[j], k);
            const int i = p.own.how == BY_COLUMN ? at.first_column + k : at.first_row + j;
            y[k] = DIVIDES && !by_division ? quotient(x, t.factor[0][i], t.inverse[0][i]) :
                                             scaled(x, t.factor[0][i], DIVIDES);
          }
          put_e5m6((uint32_t *)p.own.q + (offset_of(at, p) + j * (int64_t)p.width) / 8 * 3, y);
        }
    } else {
      if (DIVIDES && by_division) {
        divide_all<T, E>(t, v, p, at);
      } else {
        if (p.own.q && p.own.how == BY_COLUMN) write_own<T, E, DIVIDES, true>(t, v, p, at);
        else if (p.own.q) write_own<T, E, DIVIDES, false>(t, v, p, at);
        if (p.turned.q && p.turned.how == BY_COLUMN) turn_codes<T, E, DIVIDES, true>(t, v, at);
        else if (p.turned.q) turn_codes<T, E, DIVIDES, false>(t, v, at);
      }
      if (!p.turned.q) continue;
      __syncthreads();
      write_turned(t, p, at);
    }
  }
}
