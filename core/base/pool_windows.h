// The windows of pooling in one dimension. Compiled by gcc and nvcc. Called by the kernels of every
// device and by the reference kernels. Owns nothing.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "numerics.h"

/// Pooling of n input cells into m windows. If `kernel` is 0, pooling is adaptive: the m windows
/// are spread evenly over the cells and may overlap.
typedef struct pool_side { int64_t n, m, kernel, stride, padding; } pool_side;

typedef struct pool_range { int64_t first, end; } pool_range;

ENG_INLINE int64_t pool_least(int64_t a, int64_t b) { return a < b ? a : b; }
ENG_INLINE int64_t pool_most(int64_t a, int64_t b)  { return a > b ? a : b; }

/// Returns the cells of window i, without padding. *start is the window's first cell including
/// padding; it can be negative.
ENG_INLINE pool_range pool_cells(const pool_side *s, int64_t i, int64_t *start)
{
  *start = s->kernel == 0 ? i * s->n / s->m : i * s->stride - s->padding;
  int64_t end = s->kernel == 0 ? ((i + 1) * s->n + s->m - 1) / s->m : *start + s->kernel;
  return (pool_range){pool_most(*start, 0), pool_least(end, s->n)};
}

/// Returns the windows that contain cell i.
ENG_INLINE pool_range pool_windows(const pool_side *s, int64_t i)
{
  if (s->kernel == 0)
    return (pool_range){i * s->m / s->n, ((i + 1) * s->m + s->n - 1) / s->n};
  int64_t from = i + s->padding - s->kernel + 1;
  return (pool_range){from <= 0 ? 0 : (from + s->stride - 1) / s->stride,
                      pool_least((i + s->padding) / s->stride + 1, s->m)};
}

/// Returns the number of cells that count in a window's mean, along one dimension. The divisor of
/// the mean is the product over both dimensions. With `counted`, cells of padding count too, up to
/// the padded edge.
ENG_INLINE int64_t pool_divisor(const pool_side *s, pool_range cells, int64_t start, bool counted)
{
  if (!counted || s->kernel == 0) return cells.end - cells.first;
  return pool_least(start + s->kernel, s->n + s->padding) - start;
}
