// The inner parts of a matrix product that gemm_packed.c and attention.c share: the micro-kernel,
// and the layout step that converts matrices of any format and stride to the f32 layout that the
// micro-kernel reads. This file also has the kernel for few rows, which reads a transposed B in
// place, without packing. fp8_matmul.c uses float_product and its type. Included by gemm_pairs.h;
// owns nothing.
//
// A panel is GEMM_NR columns of a matrix B [k x n], stored [k][GEMM_NR]. Unused columns up to the
// next whole vector hold zeros; columns after this vector are never read.
#pragma once

#include "rows.h"
#include "simd.h"

// The micro-kernel holds GEMM_MR rows of GEMM_NV vectors of C in registers. It needs GEMM_NV more
// registers for B and one for A. MICRO_SIZES(f) expands to f(rows, vectors) for each of its sizes.
#if defined(ENG_ISA_avx512)
enum { GEMM_MR = 8, GEMM_NV = 3 };
#define MICRO_ROW(f, mr) f(mr, 1) f(mr, 2) f(mr, 3)
#define MICRO_MORE(f) MICRO_ROW(f, 5) MICRO_ROW(f, 6) MICRO_ROW(f, 7) MICRO_ROW(f, 8)
#elif defined(ENG_ISA_avx2)
enum { GEMM_MR = 6, GEMM_NV = 2 };
#define MICRO_ROW(f, mr) f(mr, 1) f(mr, 2)
#define MICRO_MORE(f) MICRO_ROW(f, 5) MICRO_ROW(f, 6)
#else
enum { GEMM_MR = 4, GEMM_NV = 2 };
#define MICRO_ROW(f, mr) f(mr, 1) f(mr, 2)
#define MICRO_MORE(f)
#endif
#define MICRO_SIZES(f) \
  MICRO_ROW(f, 1) MICRO_ROW(f, 2) MICRO_ROW(f, 3) MICRO_ROW(f, 4) MICRO_MORE(f)
enum { GEMM_NR = GEMM_NV * VF_LANES };   // columns of a panel of B

// ------------------------------------------------------------------ micro-kernel

// Returns sum + *a * row, where *a is one element of A and `row` is a vector of a panel.
typedef vf micro_product(vf sum, const float *a, vf row);

VF_INLINE vf float_product(vf sum, const float *a, vf row) { return vf_fma(vf_set1(*a), row, sum); }

// Computes c [mr x nv*VF_LANES] = a b over k steps or, with `resume`, adds a b to c. Rows of c are
// ldc floats apart. Element (i, p) of a is at i*a_row + p*a_step. b is a packed panel with GEMM_NR
// floats per step. mr, nv and product are constant where this is inlined.
VF_INLINE void micro_body(const int mr, const int nv, micro_product *product, int64_t k,
                          const float *a, int64_t a_row, int64_t a_step, const float *b, float *c,
                          int64_t ldc, bool resume)
{
  vf sum[GEMM_MR][GEMM_NV];
#pragma GCC unroll 16
  for (int i = 0; i < mr; i++) {
#pragma GCC unroll 4
    for (int j = 0; j < nv; j++) sum[i][j] = vf_zero();
  }
  for (int64_t p = 0; p < k; p++) {
    vf row[GEMM_NV];
#pragma GCC unroll 4
    for (int j = 0; j < nv; j++) row[j] = vf_load(b + j * VF_LANES);
#pragma GCC unroll 16
    for (int i = 0; i < mr; i++) {
#pragma GCC unroll 4
      for (int j = 0; j < nv; j++) sum[i][j] = product(sum[i][j], a + i * a_row, row[j]);
    }
    a += a_step;
    b += GEMM_NR;
  }
#pragma GCC unroll 16
  for (int i = 0; i < mr; i++) {
#pragma GCC unroll 4
    for (int j = 0; j < nv; j++) {
      float *at = c + i * ldc + j * VF_LANES;
      vf_store(at, resume ? vf_add(vf_load(at), sum[i][j]) : sum[i][j]);
    }
  }
}

typedef void micro_kernel(int64_t k, const float *a, int64_t a_row, int64_t a_step, const float *b,
                          float *c, int64_t ldc, bool resume);

#define MICRO(mr, nv)                                                                     \
  static void micro_##mr##x##nv(int64_t k, const float *a, int64_t a_row, int64_t a_step, \
                                const float *b, float *c, int64_t ldc, bool resume)       \
  { micro_body(mr, nv, float_product, k, a, a_row, a_step, b, c, ldc, resume); }
MICRO_SIZES(MICRO)
#define MICRO_NAME(mr, nv) [mr - 1][nv - 1] = micro_##mr##x##nv,
static micro_kernel *const micro[GEMM_MR][GEMM_NV] = {MICRO_SIZES(MICRO_NAME)};

// ------------------------------------------------------------------ reading operands

VF_INLINE int least(int64_t a, int64_t b) { return (int)(a < b ? a : b); }

// Transposes a square of VF_LANES vectors in log2(VF_LANES) rounds. In each round, two rows `step`
// apart exchange their odd and even groups of `step` lanes. The patterns are literals, so that the
// compiler finds shuffle instructions for them. In a pattern, numbers from VF_LANES on stand for
// lanes of the second row.
#define LANES(...) __VA_ARGS__
#define EXCHANGE(step, low, high)                       \
  for (int i = 0; i < VF_LANES; i++) {                  \
    if (i & step) continue;                             \
    vf x = row[i], y = row[i + step];                   \
    row[i] = __builtin_shufflevector(x, y, low);        \
    row[i + step] = __builtin_shufflevector(x, y, high);\
  }
VF_INLINE void turn_square(vf *row)
{
#if defined(ENG_ISA_avx512)
  EXCHANGE(1, LANES(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
              LANES(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
  EXCHANGE(2, LANES(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
              LANES(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
  EXCHANGE(4, LANES(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
              LANES(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
  EXCHANGE(8, LANES(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
              LANES(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#elif defined(ENG_ISA_avx2)
  EXCHANGE(1, LANES(0, 8, 2, 10, 4, 12, 6, 14), LANES(1, 9, 3, 11, 5, 13, 7, 15))
  EXCHANGE(2, LANES(0, 1, 8, 9, 4, 5, 12, 13), LANES(2, 3, 10, 11, 6, 7, 14, 15))
  EXCHANGE(4, LANES(0, 1, 2, 3, 8, 9, 10, 11), LANES(4, 5, 6, 7, 12, 13, 14, 15))
#else
  EXCHANGE(1, LANES(0, 4, 2, 6), LANES(1, 5, 3, 7))
  EXCHANGE(2, LANES(0, 1, 4, 5), LANES(2, 3, 6, 7))
#endif
}

// ------------------------------------------------------------------ few rows, a transposed matrix

// Reads the steps of k that begin at address `at` into a vector, one step per lane. May read at
// most `left` numbers.
typedef vf step_reader(const char *at, int64_t left);
#define STEP_READER(name, dtype)                  \
  VF_INLINE vf name(const char *at, int64_t left) \
  { return vf_read(at, dtype, 0, least(left, VF_LANES)); }
STEP_READER(read_f32, ENG_f32)
STEP_READER(read_f16, ENG_f16)
STEP_READER(read_bf16, ENG_bf16)

// Adds A B over `deep` steps of k to sums [rows x VF_LANES]. In column i of B, the steps begin at
// the address column[i] + at, where at most `left` numbers may be read. Prefetches the memory
// `ahead` bytes after this address.
VF_INLINE void thin_square(step_reader *read, micro_product *product, int64_t left, int deep,
                           const float *a, int64_t a_row, int64_t a_step, int64_t rows,
                           const char *const *column, int64_t at, int64_t ahead, float *sums)
{
  vf square[VF_LANES];
#pragma GCC unroll 16
  for (int i = 0; i < VF_LANES; i++) {
    __builtin_prefetch(column[i] + at + ahead);
    square[i] = read(column[i] + at, left);
  }
  turn_square(square);
  for (int64_t i = 0; i < rows; i++, a += a_row, sums += VF_LANES) {
    vf sum = vf_load(sums);
#pragma GCC unroll 16
    for (int q = 0; q < VF_LANES; q++)
      if (q < deep) sum = product(sum, a + q * a_step, square[q]);
    vf_store(sums, sum);
  }
}

// Computes sums [rows x VF_LANES] = A B over k, where each column of B is contiguous, and columns
// are b_column bytes apart. B is transposed in registers, a square at a time. A step of the product
// takes `numbers` numbers of `size` bytes. Only `wide` columns are read; the sums of the other
// columns have no meaning. read, product, size and numbers are constant where this is inlined.
VF_INLINE void thin_body(step_reader *read, micro_product *product, const int size,
                         const int numbers, int64_t k, const float *a, int64_t a_row,
                         int64_t a_step, int64_t rows, const char *b, int64_t b_column, int wide,
                         float *sums)
{
  const int whole = VF_LANES * numbers;
  const char *column[VF_LANES];
  for (int i = 0; i < VF_LANES; i++) column[i] = b + least(i, wide - 1) * b_column;
  for (int64_t i = 0; i < rows; i++) vf_store(sums + i * VF_LANES, vf_zero());
  int64_t at = 0, ahead = VF_LANES * b_column;
  for (; at + whole <= k; at += whole, a += VF_LANES * a_step)
    thin_square(read, product, whole, VF_LANES, a, a_row, a_step, rows, column, at * size, ahead,
                sums);
  int64_t left = k - at;
  if (left)
    thin_square(read, product, left, (int)ceiling(left, numbers), a, a_row, a_step, rows, column,
                at * size, ahead, sums);
}

typedef void thin_kernel(int64_t k, const float *a, int64_t a_row, int64_t a_step, int64_t rows,
                         const char *b, int64_t b_column, int wide, float *sums);
#define THIN(name, read, product, size, numbers)                                                 \
  static void name(int64_t k, const float *a, int64_t a_row, int64_t a_step, int64_t rows,       \
                   const char *b, int64_t b_column, int wide, float *sums)                       \
  {                                                                                              \
    thin_body(read, product, size, numbers, k, a, a_row, a_step, rows, b, b_column, wide, sums); \
  }
THIN(thin_f32, read_f32, float_product, 4, 1)
THIN(thin_f16, read_f16, float_product, 2, 1)
THIN(thin_bf16, read_bf16, float_product, 2, 1)

// Sets to[p*to_row + j] to step p of column j, for p < ceiling(k, numbers), j < columns. In
// `source`, a column has k contiguous numbers of `size` bytes, and columns are `column` numbers
// apart; a step takes `numbers` numbers. Rows of `to` are padded with zeros to whole vectors. read,
// size and numbers are constant where this is inlined.
VF_INLINE void lay_out_turned(step_reader *read, const int size, const int numbers, float *to,
                              int64_t to_row, const char *source, int64_t column, int64_t k,
                              int64_t columns)
{
  const int whole = VF_LANES * numbers;
  for (int64_t j = 0; j < columns; j += VF_LANES) {
    int wide = least(columns - j, VF_LANES);
    for (int64_t at = 0, p = 0; at < k; at += whole, p += VF_LANES) {
      int64_t left = k - at;
      const char *from = source + (j * column + at) * size;
      vf square[VF_LANES];
      if (wide == VF_LANES && left >= whole) {
#pragma GCC unroll 16
        for (int i = 0; i < VF_LANES; i++) square[i] = read(from + i * column * size, whole);
        turn_square(square);
#pragma GCC unroll 16
        for (int i = 0; i < VF_LANES; i++) vf_store(to + (p + i) * to_row + j, square[i]);
      } else {
        int deep = least(ceiling(left, numbers), VF_LANES);
        for (int i = 0; i < VF_LANES; i++)
          square[i] = i < wide ? read(from + i * column * size, left) : vf_zero();
        turn_square(square);
        for (int i = 0; i < deep; i++) vf_store(to + (p + i) * to_row + j, square[i]);
      }
    }
  }
}

// Sets to[p*to_row + j] = source[first + p*row + j*column] for p < rows, j < columns. Rows of `to`
// are padded with zeros to whole vectors. read and dtype are constant where this is inlined.
VF_INLINE void lay_out_typed(step_reader *read, const int dtype, float *to, int64_t to_row,
                             const void *source, int64_t first, int64_t row, int64_t column,
                             int64_t rows, int64_t columns)
{
  if (column == 1) {
    int64_t whole = columns / VF_LANES * VF_LANES;
    for (int64_t p = 0; p < rows; p++, first += row, to += to_row) {
      for (int64_t j = 0; j < whole; j += VF_LANES)
        vf_store(to + j, vf_read(source, dtype, first + j, VF_LANES));
      if (whole < columns)
        vf_store(to + whole, vf_read(source, dtype, first + whole, (int)(columns - whole)));
    }
    return;
  }
  if (row == 1) {
    const int size = dtype == ENG_f32 ? 4 : 2;
    lay_out_turned(read, size, 1, to, to_row, (const char *)source + first * size, column, rows,
                   columns);
    return;
  }
  int64_t padded = (columns + VF_LANES - 1) / VF_LANES * VF_LANES;
  for (int64_t p = 0; p < rows; p++)
    for (int64_t j = 0; j < padded; j++)
      to[p * to_row + j] =
        j < columns ? get(source, dtype, first + p * row + j * column) : 0.0f;
}

static void lay_out(float *to, int64_t to_row, const void *source, int dtype, int64_t first,
                    int64_t row, int64_t column, int64_t rows, int64_t columns)
{
  if (dtype == ENG_f32)
    lay_out_typed(read_f32, ENG_f32, to, to_row, source, first, row, column, rows, columns);
  else if (dtype == ENG_f16)
    lay_out_typed(read_f16, ENG_f16, to, to_row, source, first, row, column, rows, columns);
  else lay_out_typed(read_bf16, ENG_bf16, to, to_row, source, first, row, column, rows, columns);
}
