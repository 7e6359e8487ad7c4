// The inner parts of a bf16 product that takes two steps of k at a time: VDPBF16PS adds a[2p+1]
// b[2p+1] and then a[2p] b[2p] to an f32. Where a processor runs this instruction at the rate of a
// plain fused multiply-add, a product takes half the time. The last section chooses between pairs
// and single numbers. Included by gemm_packed.c, attention.c and fp8_matmul.c; owns nothing.
//
// Numerics: products of bf16 are exact, and each of the two sums is rounded to nearest even.
// Subnormal operands count as zero and subnormal sums become zero, as on AMX: inf times a subnormal
// is nan here, and a huge number times a subnormal is 0. With ENGINE_PAIRS=off, subnormals keep
// their values. NaN and infinity propagate.
//
// A word holds the bf16 numbers of two adjacent steps of k, with the earlier step in its low half.
// A step past the end is zero. Words are stored as floats, whose values have no meaning. A panel of
// B is [(k+1)/2][GEMM_NR] words.
#pragma once

#include "device/backend.h"
#include "gemm.h"
#include "gemm_micro.h"

#if defined(ENG_ISA_avx512)   // no other instruction set has VDPBF16PS

// ------------------------------------------------------------------ micro-kernel

// Returns sum + a1 row1 + a0 row0, where a0 and a1 are the low and high halves of the word `a` of
// A, and row0 and row1 are the low and high halves of a vector of words.
__attribute__((target("avx512bf16"))) VF_INLINE vf pair_product(vf sum, const float *a, vf row)
{
  int32_t word;
  memcpy(&word, a, sizeof word);
  return _mm512_dpbf16_ps(sum, (__m512bh)(word + (vi){0}), (__m512bh)row);
}

#define PAIRS(mr, nv)                                                                       \
  __attribute__((target("avx512bf16"))) static void pairs_##mr##x##nv(                      \
    int64_t n, const float *a, int64_t a_row, int64_t a_step, const float *b, float *c,     \
    int64_t ldc, bool resume)                                                               \
  { micro_body(mr, nv, pair_product, n, a, a_row, a_step, b, c, ldc, resume); }
MICRO_SIZES(PAIRS)
#define PAIRS_NAME(mr, nv) [mr - 1][nv - 1] = pairs_##mr##x##nv,
static micro_kernel *const micro_pairs[GEMM_MR][GEMM_NV] = {MICRO_SIZES(PAIRS_NAME)};

VF_INLINE vf read_pairs(const char *at, int64_t left)
{
  if (left >= 2 * VF_LANES) return (vf)_mm512_loadu_si512(at);
  return (vf)_mm512_maskz_loadu_epi16((1u << left) - 1, at);
}
__attribute__((target("avx512bf16"))) THIN(thin_pairs, read_pairs, pair_product, 2, 2)

// ------------------------------------------------------------------ packing

enum { PAIRS_AHEAD = 8 };   // rows to prefetch ahead

// Sets to[p*to_row + j] to the word of source[2p*row + j*column] and source[(2p+1)*row + j*column],
// for 2p < rows, j < columns. Rows of `to` are padded with zeros to whole vectors. `columns` is at
// most GEMM_NR if `to` is a panel; otherwise it has no limit.
static void lay_out_pairs(float *to, int64_t to_row, const uint16_t *source, int64_t row,
                          int64_t column, int64_t rows, int64_t columns)
{
  int64_t words = (rows + 1) / 2, padded = (columns + VF_LANES - 1) / VF_LANES * VF_LANES,
          whole = rows / 2;
  if (column == 1) {
    for (int64_t p = 0; p < words; p++) {
      const uint16_t *low = source + 2 * p * row, *high = p < whole ? low + row : NULL;
      // The hardware does not prefetch rows that are far apart.
      for (int64_t j = 0; j < columns; j += 2 * VF_LANES) {
        __builtin_prefetch(low + PAIRS_AHEAD * row + j);
        __builtin_prefetch(low + (PAIRS_AHEAD + 1) * row + j);
      }
      for (int64_t j = 0; j < padded; j += VF_LANES) {
        __mmask16 here = columns - j >= VF_LANES ? 0xFFFF : (__mmask16)((1u << (columns - j)) - 1);
        vi x = (vi)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(here, low + j));
        if (high)
          x = vi_or(
            x, vi_shl((vi)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(here, high + j)), 16));
        vi_store((int32_t *)(to + p * to_row + j), x);
      }
    }
    return;
  }
  if (row == 1) {
    lay_out_turned(read_pairs, 2, 2, to, to_row, (const char *)source, column, rows, columns);
    return;
  }
  for (int64_t p = 0; p < words; p++)
    for (int64_t j = 0; j < padded; j++) {
      uint32_t x = 0;
      if (j < columns) {
        x = source[2 * p * row + j * column];
        if (p < whole) x |= (uint32_t)source[(2 * p + 1) * row + j * column] << 16;
      }
      memcpy(to + p * to_row + j, &x, sizeof x);
    }
}

// Like lay_out_pairs, but a word holds two adjacent numbers of one row instead of one column: sets
// to[i*to_row + p] to the word of source[i*row + 2p*column] and source[i*row + (2p+1)*column].
static void lay_out_row_pairs(float *to, int64_t to_row, const uint16_t *source, int64_t row,
                              int64_t column, int64_t rows, int64_t steps)
{
  for (int64_t i = 0; i < rows; i++, source += row, to += to_row) {
    int64_t whole = steps / 2;
    if (column == 1) memcpy(to, source, (size_t)whole * sizeof *to);
    for (int64_t p = column == 1 ? whole : 0; p < (steps + 1) / 2; p++) {
      uint32_t x = source[2 * p * column];
      if (p < whole) x |= (uint32_t)source[(2 * p + 1) * column] << 16;
      memcpy(to + p, &x, sizeof x);
    }
  }
}

// ------------------------------------------------------------------ pairs of f32, rounded

// Rounds n numbers of a row to bf16 and packs every two adjacent numbers into a word. n is rounded
// up to whole vectors. `to` may be `from`.
__attribute__((target("avx512bf16"))) static inline void words_along(float *to, const float *from,
                                                                     int64_t n)
{
  for (int64_t j = 0; j < n; j += VF_LANES)
    _mm256_storeu_si256((__m256i *)(void *)((uint16_t *)to + j),
                        (__m256i)_mm512_cvtneps_pbh(vf_load(from + j)));
}

// Rounds n columns of two rows to bf16 and packs the two numbers of each column into a word. n is
// rounded up to whole vectors. `to` may be either row. If `second` is NULL, the second row is
// zeros.
__attribute__((target("avx512bf16"))) static inline void words_across(float *to, const float *first,
                                                                      const float *second,
                                                                      int64_t n)
{
  const __m512i turns = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (int64_t j = 0; j < n; j += VF_LANES) {
    vf high = second ? vf_load(second + j) : vf_zero();
    vi_store(
      (int32_t *)(void *)(to + j),
      (vi)_mm512_permutexvar_epi16(turns, (__m512i)_mm512_cvtne2ps_pbh(high, vf_load(first + j))));
  }
}

#endif

// ---------------------------------------------- pairs or single numbers, on any instruction set

// Returns whether this build and processor multiply operands of these formats as pairs.
static inline bool pairs_of(int a, int b)
{
#if defined(ENG_ISA_avx512)
  return a == ENG_bf16 && b == ENG_bf16 && gemm_pairs_here();
#else
  (void)a, (void)b;
  return false;
#endif
}

// Returns the number of steps that the micro-kernel takes over k.
static inline int64_t steps_of(bool pairs, int64_t k) { return pairs ? (k + 1) / 2 : k; }

static inline micro_kernel *kernel_of(bool pairs, int rows, int vectors)
{
#if defined(ENG_ISA_avx512)
  if (pairs) return micro_pairs[rows - 1][vectors - 1];
#endif
  (void)pairs;
  return micro[rows - 1][vectors - 1];
}

static inline thin_kernel *thin_kernel_of(bool pairs, int dtype)
{
#if defined(ENG_ISA_avx512)
  if (pairs) return thin_pairs;
#endif
  (void)pairs;
  return dtype == ENG_f32 ? thin_f32 : dtype == ENG_f16 ? thin_f16 : thin_bf16;
}

// Lays out columns like lay_out: to[p*to_row + j] is element (p, j) of source or, for pairs, the
// word of elements (2p, j) and (2p+1, j).
static inline void lay_out_steps(bool pairs, float *to, int64_t to_row, const void *source,
                                 int dtype, int64_t first, int64_t row, int64_t column,
                                 int64_t rows, int64_t columns)
{
#if defined(ENG_ISA_avx512)
  if (pairs) {
    lay_out_pairs(to, to_row, (const uint16_t *)source + first, row, column, rows, columns);
    return;
  }
#endif
  (void)pairs;
  lay_out(to, to_row, source, dtype, first, row, column, rows, columns);
}

// Lays out rows of A without transposing them: to[i*to_row + p] is element (i, p) or, for pairs,
// the word of elements (i, 2p) and (i, 2p+1).
static inline void lay_out_rows(bool pairs, float *to, int64_t to_row, const void *source,
                                int dtype, int64_t first, int64_t row, int64_t column, int64_t rows,
                                int64_t k)
{
#if defined(ENG_ISA_avx512)
  if (pairs) {
    lay_out_row_pairs(to, to_row, (const uint16_t *)source + first, row, column, rows, k);
    return;
  }
#endif
  (void)pairs;
  lay_out(to, to_row, source, dtype, first, row, column, rows, k);
}
