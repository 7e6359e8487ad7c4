// Transposes of whole blocks in 16-byte registers: 4 x 4 words, 8 x 8 half words, 16 x 16 bytes.
// Strides are in elements. Included by copy.c, fp8_matmul.c, fp8_quantize.c, mx_quantize.c and
// hadamard.c. Owns nothing.
#pragma once

#include <stdint.h>

// Defines a function that transposes n x n elements. In each of log2(n) rounds, it interleaves rows
// k and k + n / 2: `low` and `high` select the lower and the upper halves of the two rows.
#define LIST(...) __VA_ARGS__
#define TURN(name, element, n, rounds, low, high)                                                \
  static inline void name(element *y, int64_t y_stride, const element *x, int64_t x_stride)      \
  {                                                                                              \
    typedef element line __attribute__((vector_size(16), aligned(sizeof(element)), may_alias));  \
    line row[n], next[n];                                                                        \
    for (int k = 0; k < n; k++) row[k] = *(const line *)(x + k * x_stride);                      \
    _Pragma("GCC unroll 4")                                                                      \
    for (int round = 0; round < rounds; round++) {                                               \
      for (int k = 0; k < n / 2; k++) {                                                          \
        next[2 * k] = __builtin_shufflevector(row[k], row[k + n / 2], low);                      \
        next[2 * k + 1] = __builtin_shufflevector(row[k], row[k + n / 2], high);                 \
      }                                                                                          \
      for (int k = 0; k < n; k++) row[k] = next[k];                                              \
    }                                                                                            \
    for (int k = 0; k < n; k++) *(line *)(y + k * y_stride) = row[k];                            \
  }
TURN(turn_words, uint32_t, 4, 2, LIST(0, 4, 1, 5), LIST(2, 6, 3, 7))
TURN(turn_halves, uint16_t, 8, 3, LIST(0, 8, 1, 9, 2, 10, 3, 11), LIST(4, 12, 5, 13, 6, 14, 7, 15))
TURN(turn_bytes, uint8_t, 16, 4,
     LIST(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
     LIST(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31))
#undef LIST
#undef TURN

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
