// Transposes of whole blocks in 16-byte registers: 4 x 4 words, 8 x 8 half words, 16 x 16 bytes.
// Strides are in elements. Included by copy.c, fp8_matmul.c, fp8_quantize.c, mx_quantize.c and
// hadamard.c. Owns nothing.
#pragma once

#include <stdint.h>

typedef uint32_t words __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint8_t bytes __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t halves __attribute__((vector_size(16), aligned(2), may_alias));

static inline void turn_words(uint32_t *y, int64_t y_stride, const uint32_t *x, int64_t x_stride)
{
  words a = *(const words *)x, b = *(const words *)(x + x_stride);
  words c = *(const words *)(x + 2 * x_stride), d = *(const words *)(x + 3 * x_stride);
  words ab = __builtin_shufflevector(a, b, 0, 4, 1, 5),
        cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
  *(words *)y = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
  *(words *)(y + y_stride) = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
  ab = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  cd = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  *(words *)(y + 2 * y_stride) = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
  *(words *)(y + 3 * y_stride) = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

static inline void turn_halves(uint16_t *y, int64_t y_stride, const uint16_t *x, int64_t x_stride)
{
  halves row[8], next[8];
  for (int k = 0; k < 8; k++) row[k] = *(const halves *)(x + k * x_stride);
  for (int round = 0; round < 3; round++) {   // each round interleaves rows k and k + 4
    for (int k = 0; k < 4; k++) {
      next[2 * k] = __builtin_shufflevector(row[k], row[k + 4], 0, 8, 1, 9, 2, 10, 3, 11);
      next[2 * k + 1] = __builtin_shufflevector(row[k], row[k + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
    for (int k = 0; k < 8; k++) row[k] = next[k];
  }
  for (int k = 0; k < 8; k++) *(halves *)(y + k * y_stride) = row[k];
}

static inline void turn_bytes(uint8_t *y, int64_t y_stride, const uint8_t *x, int64_t x_stride)
{
  bytes row[16], next[16];
  for (int k = 0; k < 16; k++) row[k] = *(const bytes *)(x + k * x_stride);
#pragma GCC unroll 4
  for (int round = 0; round < 4; round++) {   // each round interleaves rows k and k + 8
    for (int k = 0; k < 8; k++) {
      next[2 * k] = __builtin_shufflevector(
        row[k], row[k + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      next[2 * k + 1] = __builtin_shufflevector(
        row[k], row[k + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    for (int k = 0; k < 16; k++) row[k] = next[k];
  }
  for (int k = 0; k < 16; k++) *(bytes *)(y + k * y_stride) = row[k];
}

/// Writes the transpose of x [rows x columns] to y [columns x rows]. An element has `size` bytes:
/// 1, 2 or 4. Works in whole blocks of 16 / size rows and columns, so x and y need room for `rows`
/// and `columns` rounded up to multiples of 16 / size.
static inline void turn_tile(void *y, int64_t y_stride, const void *x, int64_t x_stride, int rows,
                             int columns, int size)
{
  uint8_t *y8 = y;
  uint16_t *y16 = y;
  uint32_t *y32 = y;
  for (int c = 0; c < columns; c += 16 / size)
    for (int r = 0; r < rows; r += 16 / size) {
      int64_t to = c * y_stride + r, from = r * x_stride + c;
      if (size == 1) turn_bytes(y8 + to, y_stride, (const uint8_t *)x + from, x_stride);
      else if (size == 2) turn_halves(y16 + to, y_stride, (const uint16_t *)x + from, x_stride);
      else turn_words(y32 + to, y_stride, (const uint32_t *)x + from, x_stride);
    }
}
