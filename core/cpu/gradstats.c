// Gradient statistics: one read-only pass over every gradient, at memory bandwidth. Called through
// backend.gradstats; owns nothing. The reference kernel is in reference_gradstats.c.
//
// A block (blocks.h) is read in chunks that fit the first-level cache. A common chunk has no inf or
// nan, and its squares fit f32; one pass finishes it. The integer maximum of the magnitudes' bits
// tells whether a chunk was common. If not, the chunk, still in cache, is read again by a slower,
// careful pass.
//   squares    Squares are added in 32 lanes of f32. Element i goes to lane i mod 32 on every
//              instruction set. So that few roundings add up, a lane sums each stripe of STRIPE
//              elements, then the stripes of the chunk. The lanes of a chunk are folded to a
//              double. Chunks with extreme magnitudes are summed in double.
//   order      Sums run over lanes, then chunks, then blocks, in the same order for any number of
//              threads.
//   histogram  Exponents become bytes. The highest binades, which hold most elements, are counted
//              by comparison, and the few elements below them are counted one by one. The plain
//              build counts all elements one by one. Counts are integers, so any order gives the
//              same result.
#include "blocks.h"
#include "magnitude.h"
#include "simd.h"

// Sizes in elements. CHUNK / 32 stays below 256, so that the counts of a lane fit a byte.
enum { CHUNK = 4096, STRIPE = 512, LANES = 32 };
// A normal f32 with exponent bits e is in binade e - 127, so its bin of the histogram is
// e - 127 - ENG_HIST_FIRST = e + HIST_F32.
enum { HIST_F32 = 33 };

/// The statistics of a block or chunk.
typedef struct tally {
  double   sum_squares;
  int32_t  inf, nan, zeros, tiny;    // tiny: below the smallest normal number, including zeros
  uint32_t amax;                     // bits of the largest finite magnitude, as f32
} tally;

// Bounds on the bits of a magnitude: inf and nan are *_INF or more, zeros and subnormals are below
// *_TINY.
#define F32_INF   0x7F800000
#define F32_TINY  0x00800000
#define F16_INF   0x7C00
#define F16_TINY  0x0400
#define BF16_INF  0x7F80
#define BF16_TINY 0x0080
// Magnitudes below 2^-63 have squares below f32's normal range. If the chunk's amax is at least
// 2^-40, these squares add up to less than 2^-34 of the sum, which is below f32's precision.
// Skipping them avoids slow subnormal arithmetic.
#define F32_FAINT  0x20000000
#define BF16_FAINT 0x2000
// Range of a chunk's amax in which its squares are summed in f32. From 2^60 on, the sum of a lane's
// CHUNK / LANES squares could overflow.
#define F32_SQUARES_FROM 0x2B800000   // 2^-40
#define F32_SQUARES_TO   0x5D800000   // 2^60

// ------------------------------------------------------------------ integer lanes

#if defined(ENG_ISA_avx512)
typedef __mmask32 vhm;
VF_INLINE vi vi_tick(vi count, vm m)
{ return (vi)_mm512_mask_add_epi32((__m512i)count, m, (__m512i)count, _mm512_set1_epi32(1)); }
VF_INLINE vhm vh_below(vh a, int16_t x)
{ return _mm512_cmplt_epi16_mask((__m512i)a, _mm512_set1_epi16(x)); }
VF_INLINE vhm vh_equal(vh a, int16_t x)
{ return _mm512_cmpeq_epi16_mask((__m512i)a, _mm512_set1_epi16(x)); }
VF_INLINE vh vh_keep(vhm m, vh a)       { return (vh)_mm512_maskz_mov_epi16(m, (__m512i)a); }
VF_INLINE vh vh_tick(vh count, vhm m)
{ return (vh)_mm512_mask_add_epi16((__m512i)count, m, (__m512i)count, _mm512_set1_epi16(1)); }
#else
typedef int16_t vhm __attribute__((vector_size(2 * HALVES), may_alias));   // -1 or 0 in each lane
VF_INLINE vi vi_tick(vi count, vm m)    { return count - m; }
VF_INLINE vhm vh_below(vh a, int16_t x) { return (vhm)a < x; }
VF_INLINE vhm vh_equal(vh a, int16_t x) { return (vhm)a == x; }
VF_INLINE vh vh_keep(vhm m, vh a)       { return (vh)m & a; }
VF_INLINE vh vh_tick(vh count, vhm m)   { return count - (vh)m; }
#endif
#if defined(ENG_ISA_plain)   // faster than vh_larger, which compares unsigned numbers
VF_INLINE vh vh_most(vh a, vh b) { vh m = (vh)((vhm)a > (vhm)b); return (m & a) | (~m & b); }
#else
VF_INLINE vh vh_most(vh a, vh b)        { return vh_larger(a, b); }
#endif
VF_INLINE vm vi_below(vi a, int32_t x)  { return vi_gt(vi_set1(x), a); }
VF_INLINE vm vi_equal(vi a, int32_t x)  { return vi_eq(a, vi_set1(x)); }
VF_INLINE vi vi_keep(vm m, vi a)        { return vi_select(m, a, vi_set1(0)); }

VF_INLINE int32_t vi_total(vi a)
{
  int32_t lane[VF_LANES], sum = 0;
  vi_store(lane, a);
  for (int i = 0; i < VF_LANES; i++) sum += lane[i];
  return sum;
}

/// Folds 16-bit lanes in pairs into 32-bit lanes, by sum or by maximum; all values are below 2^15.
VF_INLINE vi vh_pairs_sum(vh a) { return ((vi)a & 0xFFFF) + vi_shr((vi)a, 16); }
VF_INLINE vi vh_pairs_max(vh a) { return vi_larger_((vi)a & 0xFFFF, vi_shr((vi)a, 16)); }

// ------------------------------------------------------------------ chunks

/// Returns the sum of 32 f32 lanes in double: adds the upper half to the lower half until one lane
/// is left.
VF_INLINE double fold(const float *lane)
{
  double sum[LANES / 2];
  for (int i = 0; i < LANES / 2; i++) sum[i] = (double)lane[i] + (double)lane[i + LANES / 2];
  for (int half = LANES / 4; half > 0; half /= 2)
    for (int i = 0; i < half; i++) sum[i] += sum[i + half];
  return sum[0];
}

/// Prefetches the cache line two pages ahead. Without this, reading and computing hardly overlap.
/// An address past the end is harmless, and the cast through an integer keeps the arithmetic
/// defined.
VF_INLINE void prefetch(const void *p) { __builtin_prefetch((const void *)((uintptr_t)p + 8192)); }

// Returns the tally of n f32 numbers; n is a multiple of LANES, at most CHUNK. With `careful`, inf
// and nan are counted and excluded from the sums. Otherwise only amax, then F32_INF or more, tells
// that there are some, and the sum of squares is not valid.
VF_INLINE tally chunk_f32(const float *g, int n, bool careful)
{
  enum { V = LANES / VF_LANES };
  vf total[V];
  vi top[V], zeros = {0}, tiny = {0}, inf = {0}, finite = {0};
  for (int v = 0; v < V; v++) {
    total[v] = vf_zero();
    top[v] = vi_set1(0);
  }
  for (int i = 0; i < n;) {
    vf square[V];
    for (int v = 0; v < V; v++) square[v] = vf_zero();
    for (int end = n - i < STRIPE ? n : i + STRIPE; i < end; i += LANES) {
      prefetch(g + i);
      prefetch(g + i + LANES / 2);
      for (int v = 0; v < V; v++) {
        vi a = vi_load((const int32_t *)(g + i) + v * VF_LANES) & 0x7FFFFFFF;
        zeros = vi_tick(zeros, vi_equal(a, 0));
        tiny = vi_tick(tiny, vi_below(a, F32_TINY));
        if (careful) {
          vm sound = vi_below(a, F32_INF);
          finite = vi_tick(finite, sound);
          inf = vi_tick(inf, vi_equal(a, F32_INF));
          a = vi_keep(sound, a);
        }
        top[v] = vi_larger_(top[v], a);
        vf x = (vf)vi_keep(vm_not(vi_below(a, F32_FAINT)), a);
        square[v] = vf_add(square[v], vf_mul(x, x));
      }
    }
    for (int v = 0; v < V; v++) total[v] = vf_add(total[v], square[v]);
  }
  float lane[LANES];
  for (int v = 0; v < V; v++) {
    vf_store(lane + v * VF_LANES, total[v]);
    top[0] = vi_larger_(top[0], top[v]);
  }
  tally t = {.sum_squares = fold(lane), .zeros = vi_total(zeros), .tiny = vi_total(tiny),
             .amax = across(top[0])};
  if (careful) {
    t.inf = vi_total(inf);
    t.nan = n - vi_total(finite) - t.inf;
  }
  return t;
}

/// Does the work of chunk_f32 for f16 and bf16, but returns amax as the 16 bits of the format.
VF_INLINE tally chunk_half(const uint16_t *g, int n, bool bf16, bool careful)
{
  enum { V = LANES / HALVES };
  const int16_t infinity = bf16 ? BF16_INF : F16_INF, smallest = bf16 ? BF16_TINY : F16_TINY;
  vf total[2 * V];
  vh top[V], zeros = {0}, tiny = {0}, inf = {0}, finite = {0};
  for (int v = 0; v < V; v++) {
    total[2 * v] = total[2 * v + 1] = vf_zero();
    top[v] = (vh){0};
  }
  for (int i = 0; i < n;) {
    vf square[2 * V];
    for (int v = 0; v < 2 * V; v++) square[v] = vf_zero();
    for (int end = n - i < STRIPE ? n : i + STRIPE; i < end; i += LANES) {
      prefetch(g + i);
      for (int v = 0; v < V; v++) {
        const uint16_t *p = g + i + v * HALVES;
        vh a = vh_load(p) & 0x7FFF;
        zeros = vh_tick(zeros, vh_equal(a, 0));
        tiny = vh_tick(tiny, vh_below(a, smallest));
        if (careful) {
          vhm sound = vh_below(a, infinity);
          finite = vh_tick(finite, sound);
          inf = vh_tick(inf, vh_equal(a, infinity));
          a = vh_keep(sound, a);
        }
        top[v] = vh_most(top[v], a);
        vf x, y;
        if (bf16) {   // x holds the even elements, y the odd elements
          vh seen = vh_keep(~vh_below(a, BF16_FAINT), a);
          x = (vf)vi_shl((vi)seen, 16);
          y = (vf)((vi)seen & (int32_t)0xFFFF0000);
        } else if (careful) {
          uint16_t kept[HALVES];
          memcpy(kept, &a, sizeof a);
          x = vf_load_f16(kept);
          y = vf_load_f16(kept + VF_LANES);
        } else {
          x = vf_load_f16(p);
          y = vf_load_f16(p + VF_LANES);
        }
        square[2 * v] = vf_add(square[2 * v], vf_mul(x, x));
        square[2 * v + 1] = vf_add(square[2 * v + 1], vf_mul(y, y));
      }
    }
    for (int v = 0; v < 2 * V; v++) total[v] = vf_add(total[v], square[v]);
  }
  float lane[LANES];
  for (int v = 0; v < V; v++) {
    float *to = lane + v * HALVES, x[VF_LANES], y[VF_LANES];
    vf_store(x, total[2 * v]);
    vf_store(y, total[2 * v + 1]);
    for (int k = 0; k < VF_LANES; k++) {
      to[bf16 ? 2 * k : k] = x[k];
      to[bf16 ? 2 * k + 1 : VF_LANES + k] = y[k];
    }
    top[0] = vh_most(top[0], top[v]);
  }
  tally t = {.sum_squares = fold(lane), .zeros = vi_total(vh_pairs_sum(zeros)),
             .tiny = vi_total(vh_pairs_sum(tiny)),
             .amax = across(vh_pairs_max(top[0]))};
  if (careful) {
    t.inf = vi_total(vh_pairs_sum(inf));
    t.nan = n - vi_total(vh_pairs_sum(finite)) - t.inf;
  }
  return t;
}

/// Returns the sum of squares in double, without inf and nan, for chunks whose squares do not fit
/// f32.
static __attribute__((noinline)) double squares_wide(const void *g, int dtype, int n)
{
  float buffer[CHUNK];
  const float *x = tile_load(buffer, g, dtype, 0, n);
  double lane[LANES] = {0};
  for (int i = 0; i < n; i += LANES)
    for (int k = 0; k < LANES; k++) {
      double y = f32_is_finite(x[i + k]) ? x[i + k] : 0;
      lane[k] += y * y;
    }
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int k = 0; k < half; k++) lane[k] += lane[k + half];
  return lane[0];
}

static __attribute__((noinline)) tally careful(const void *g, int dtype, int n)
{
  return dtype == ENG_f32   ? chunk_f32(g, n, true)
         : dtype == ENG_f16 ? chunk_half(g, n, false, true)
                            : chunk_half(g, n, true, true);
}

/// Returns the tally of one chunk, whatever it contains. The tally's amax is in f32 bits.
VF_INLINE tally chunk_tally(const void *g, int dtype, int n)
{
  const bool bf16 = dtype == ENG_bf16;
  const uint32_t infinity = dtype == ENG_f32 ? F32_INF : bf16 ? BF16_INF : F16_INF;
  tally t = dtype == ENG_f32 ? chunk_f32(g, n, false) : chunk_half(g, n, bf16, false);
  if (t.amax >= infinity) t = careful(g, dtype, n);
  if (dtype == ENG_f16) {
    t.amax = f32_bits(f16_to_f32((uint16_t)t.amax));
    return t;
  }
  if (bf16) t.amax <<= 16;
  bool extreme = t.amax >= F32_SQUARES_TO || (t.amax < F32_SQUARES_FROM && t.amax > 0);
  if (extreme) t.sum_squares = squares_wide(g, dtype, n);
  return t;
}

// ------------------------------------------------------------------ histogram

/// Counts the subnormals of f32 or bf16 into `hist`. Their exponent bits are zero, so the highest
/// set bit gives the binade: bit 0 stands for 2^-149.
static __attribute__((noinline)) void count_subnormals(const void *g, int dtype, int n,
                                                       int64_t *hist)
{
  float buffer[CHUNK];
  const float *x = tile_load(buffer, g, dtype, 0, n);
  for (int i = 0; i < n; i++) {
    uint32_t a = f32_bits(x[i]) & 0x7FFFFFFF;
    if (a != 0 && a < F32_TINY) hist[160 - 149 + 31 - __builtin_clz(a)]++;
  }
}

#if defined(ENG_ISA_plain)
/// Returns the exponent bits of an f16 magnitude `a` converted to f32, or 0 for zero.
VF_INLINE uint32_t exponent_f16(uint32_t a)
{
  return a >= F16_TINY ? (a >= F16_INF ? 255 : (a >> 10) + 112)
         : a           ? 134 - (uint32_t)__builtin_clz(a)
                       : 0;
}

/// Adds the exponents of a chunk of n <= CHUNK numbers, whose tally is t, to `hist`. Adjacent
/// numbers often share a bin, so they are counted in four different tables. An increment then need
/// not wait for the previous increment.
static void chunk_histogram(const void *g, int dtype, int n, const tally *t, int64_t *hist)
{
  uint32_t table[4][256] = {0};
  const uint16_t *half = g;
  for (int i = 0; i < n; i++) {
    uint32_t key = dtype == ENG_f16    ? exponent_f16(half[i] & 0x7FFF)
                   : dtype == ENG_bf16 ? half[i] >> 7
                                       : f32_bits(((const float *)g)[i]) >> 23;
    table[i & 3][key & 255]++;
  }
  // Skips key 0 (zeros and f32 subnormals) and key 255 (inf and nan).
  for (int k = 1; k < 255; k++)
    hist[HIST_F32 + k] += table[0][k] + table[1][k] + table[2][k] + table[3][k];
  if (dtype != ENG_f16 && t->tiny > t->zeros) count_subnormals(g, dtype, n, hist);
}
#else
typedef uint8_t vb __attribute__((vector_size(4 * VF_LANES), may_alias));
enum { VB_LANES = 4 * VF_LANES };

VF_INLINE vb vb_load(const uint8_t *p) { vb a; memcpy(&a, p, sizeof a); return a; }

#if defined(ENG_ISA_avx512)
/// Adds one to each lane of `count` whose lane of `key` is x.
VF_INLINE vb vb_tick(vb count, vb key, uint8_t x)
{
  __mmask64 m = _mm512_cmpeq_epi8_mask((__m512i)key, _mm512_set1_epi8((char)x));
  return (vb)_mm512_mask_add_epi8((__m512i)count, m, (__m512i)count, _mm512_set1_epi8(1));
}
/// Returns a mask of the lanes whose keys are from 1 to `high`.
VF_INLINE uint64_t vb_find(vb key, uint8_t high)
{
  return _mm512_cmplt_epu8_mask(_mm512_sub_epi8((__m512i)key, _mm512_set1_epi8(1)),
                                _mm512_set1_epi8((char)high));
}
VF_INLINE int32_t vb_total(vb a)
{ return (int32_t)_mm512_reduce_add_epi64(_mm512_sad_epu8((__m512i)a, _mm512_setzero_si512())); }
/// Narrows the lanes of a and b to half their width, in an unspecified order. The values must fit.
VF_INLINE vh vh_narrowed(vi a, vi b) { return (vh)_mm512_packus_epi32((__m512i)a, (__m512i)b); }
VF_INLINE vb vb_narrowed(vh a, vh b) { return (vb)_mm512_packus_epi16((__m512i)a, (__m512i)b); }
#elif defined(ENG_ISA_avx2)
VF_INLINE vb vb_tick(vb count, vb key, uint8_t x) { return count - (vb)(key == x); }
VF_INLINE uint64_t vb_find(vb key, uint8_t high)
{ return (uint32_t)_mm256_movemask_epi8((__m256i)(vb)((key - 1) < high)); }
VF_INLINE int32_t vb_total(vb a)
{
  __m256i four = _mm256_sad_epu8((__m256i)a, _mm256_setzero_si256());
  __m128i two = _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
  return (int32_t)(_mm_cvtsi128_si64(two) + _mm_extract_epi64(two, 1));
}
VF_INLINE vh vh_narrowed(vi a, vi b) { return (vh)_mm256_packus_epi32((__m256i)a, (__m256i)b); }
VF_INLINE vb vb_narrowed(vh a, vh b) { return (vb)_mm256_packus_epi16((__m256i)a, (__m256i)b); }
#endif

/// Returns the exponent bits of two vectors of bf16, in an unspecified order.
VF_INLINE vb vb_exponents_bf16(vh a, vh b) { return vb_narrowed((a >> 7) & 0xFF, (b >> 7) & 0xFF); }
/// Returns the exponent bits of four vectors of f32, in an unspecified order.
VF_INLINE vb vb_exponents(vf a, vf b, vf c, vf d)
{
  return vb_narrowed(vh_narrowed(vi_shr((vi)a, 23), vi_shr((vi)b, 23)) & 0xFF,
                     vh_narrowed(vi_shr((vi)c, 23), vi_shr((vi)d, 23)) & 0xFF);
}

/// Writes to `key` the exponent bits of n numbers converted to f32, in an unspecified order, padded
/// with zeros to whole vectors. Returns the number of keys, including the padding. f16 is widened
/// exactly: its subnormals are normal in f32.
VF_INLINE int exponents(uint8_t *key, const void *g, int dtype, int n)
{
  const int size = dtype == ENG_f32 ? 4 : 2;
  int whole = n / VB_LANES * VB_LANES, filled = (n + VB_LANES - 1) / VB_LANES * VB_LANES;
  vb rest[4] = {0};
  if (filled > whole)
    memcpy(rest, (const char *)g + (int64_t)whole * size, (size_t)(n - whole) * (size_t)size);
  for (int i = 0; i < filled; i += VB_LANES) {
    const char *from = i < whole ? (const char *)g + (int64_t)i * size : (const char *)rest;
    vb keys;
    if (dtype == ENG_bf16) {
      keys = vb_exponents_bf16(vh_load((const uint16_t *)from),
                               vh_load((const uint16_t *)from + HALVES));
    } else {
      vf x[4];
      for (int k = 0; k < 4; k++)
        x[k] = dtype == ENG_f16 ? vf_load_f16((const uint16_t *)from + k * VF_LANES)
                                : vf_load((const float *)from + k * VF_LANES);
      keys = vb_exponents(x[0], x[1], x[2], x[3]);
    }
    memcpy(key + i, &keys, sizeof keys);
  }
  return filled;
}

/// Counts into bin[key] the keys that have one of the `bins` values high, high - 1, .., except
/// values below 1. Returns the number of keys counted.
VF_INLINE int count_top(const uint8_t *key, int n, int high, int bins, int64_t *bin)
{
  vb count[8] = {0};   // n / VB_LANES stays below 256, so that no byte overflows
  int found = 0;
  for (int i = 0; i < n; i += VB_LANES) {
    vb k = vb_load(key + i);
    for (int b = 0; b < bins; b++) count[b] = vb_tick(count[b], k, (uint8_t)(high - b));
  }
  for (int b = 0; b < bins && high - b > 0; b++) {
    int total = vb_total(count[b]);
    bin[high - b] += total;
    found += total;
  }
  return found;
}

/// Counts n keys into bin[key], except keys 0 and 255. There are `left` other keys, and none of
/// them exceeds `high`. The highest keys are counted by comparison, until few enough are left
/// that finding them one by one is faster.
static void count_keys(const uint8_t *key, int n, int high, int left, int64_t *bin)
{
  enum { FEW = 24 };
  if (left > FEW) {
    left -= count_top(key, n, high, 8, bin);
    high -= 8;
  }
  for (; left > FEW && high > 0; high -= 4) left -= count_top(key, n, high, 4, bin);
  for (int i = 0; i < n && left > 0 && high > 0; i += VB_LANES) {
    for (uint64_t found = vb_find(vb_load(key + i), (uint8_t)high); found; found &= found - 1) {
      bin[key[i + __builtin_ctzll(found)]]++;
      left--;
    }
  }
}

/// Adds the exponents of a chunk of n numbers, whose tally is t, to `hist`. n is a multiple of
/// LANES, at most CHUNK.
VF_INLINE void chunk_histogram(const void *g, int dtype, int n, const tally *t, int64_t *hist)
{
  uint8_t key[CHUNK + VB_LANES] __attribute__((aligned(64)));
  int filled = exponents(key, g, dtype, n);
  // Zeros and f32 subnormals have key 0, which count_keys leaves out.
  int subnormal = dtype == ENG_f16 ? 0 : t->tiny - t->zeros;
  count_keys(key, filled, (int)(t->amax >> 23), n - t->zeros - subnormal - t->inf - t->nan,
             hist + HIST_F32);
  if (subnormal > 0) count_subnormals(g, dtype, n, hist);
}
#endif

// ------------------------------------------------------------------ blocks, tensors

VF_INLINE void tally_add(tally *sum, const tally *t)
{
  sum->sum_squares += t->sum_squares;
  sum->inf += t->inf;
  sum->nan += t->nan;
  sum->zeros += t->zeros;
  sum->tiny += t->tiny;
  if (t->amax > sum->amax) sum->amax = t->amax;
}

/// Returns the tally of elements [first, first + count). dtype is constant where this is inlined.
VF_INLINE tally block_tally(const void *gradient, int dtype, int64_t first, int count,
                            int64_t *hist)
{
  const int size = dtype == ENG_f32 ? 4 : 2;
  const char *g = (const char *)gradient + first * size;
  tally sum = {0};
  int i = 0, whole = count / LANES * LANES;
  while (i < whole) {
    int n = whole - i < CHUNK ? whole - i : CHUNK;
    tally t = chunk_tally(g + (int64_t)i * size, dtype, n);
    tally_add(&sum, &t);
    if (hist) chunk_histogram(g + (int64_t)i * size, dtype, n, &t, hist);
    i += n;
  }
  if (i < count) {   // the rest, padded with zeros
    float rest[LANES] = {0};
    memcpy(rest, g + (int64_t)i * size, (size_t)(count - i) * (size_t)size);
    tally t = chunk_tally(rest, dtype, LANES);
    if (hist) chunk_histogram(rest, dtype, LANES, &t, hist);
    t.zeros -= LANES - (count - i);
    t.tiny -= LANES - (count - i);
    tally_add(&sum, &t);
  }
  return sum;
}

/// Adds a thread's histogram `from` to a tensor's histogram `to`, and clears `from`. Other threads
/// may add to `to` at the same time.
static void flush_histogram(int64_t *from, int64_t *to)
{
  for (int b = 0; b < ENG_HIST_BINS; b++) {
    if (!from[b]) continue;
    __atomic_fetch_add(&to[b], from[b], __ATOMIC_RELAXED);
    from[b] = 0;
  }
}

static void work(const block_list *list, int64_t from, int64_t to, const param_span *spans,
                 tally *result, eng_tensor_stats *stats, bool histogram)
{
  int64_t hist[ENG_HIST_BINS] = {0};
  for (int64_t b = from; b < to; b++) {
    const block *at = &list->at[b];
    const param_span *span = &spans[at->span];
    int64_t *bins = histogram ? hist : NULL;
    if (span->gradient_dtype == ENG_f16)
      result[b] = block_tally(span->gradient, ENG_f16, at->first, at->count, bins);
    else if (span->gradient_dtype == ENG_bf16)
      result[b] = block_tally(span->gradient, ENG_bf16, at->first, at->count, bins);
    else result[b] = block_tally(span->gradient, ENG_f32, at->first, at->count, bins);
    if (histogram && (b + 1 == to || list->at[b + 1].span != at->span))
      flush_histogram(hist, stats[at->span].hist);
  }
}

static void stats_add(eng_tensor_stats *s, const tally *t, unsigned needs)
{
  s->inf += t->inf;
  s->nan += t->nan;
  if (needs & ENG_NEED_ZEROS) s->zeros += t->zeros;
  if (needs & ENG_NEED_UNDERFLOW) s->underflow += t->tiny - t->zeros;
  if (needs & ENG_NEED_NORM) s->sum_squares += t->sum_squares;
  double amax = (double)f32_from(t->amax);
  if ((needs & ENG_NEED_AMAX) && amax > s->amax) s->amax = amax;
}

eng_status ISA_NAME(cpu_gradstats)(const param_span *spans, int n, unsigned needs,
                                   eng_tensor_stats *stats)
{
  for (int k = 0; k < n; k++) stats[k] = (eng_tensor_stats){.count = spans[k].count};
  AT_END(blocks_close) block_list list;
  ENG_TRY(blocks_open(&list, spans, n));
  SCRATCH(tally, result, list.n);
  const bool histogram = needs & ENG_NEED_HIST;
#pragma omp parallel if (list.elements > PARALLEL_ELEMENTS)
  {
    int part = omp_get_thread_num(), parts = omp_get_num_threads();
    work(&list, blocks_part(&list, part, parts), blocks_part(&list, part + 1, parts), spans, result,
         stats, histogram);
  }
  for (int64_t b = 0; b < list.n; b++) stats_add(&stats[list.at[b].span], &result[b], needs);
  return ENG_OK;
}
