// `side` describes one of the two results of a call that quantizes: the quantized x, or the
// quantized transpose of x. Included by reference_fp8.c, reference_mx.c and reference_msamp.c.
#pragma once

#include "reference.h"

#include <math.h>

typedef struct side {
  const op_call *call;
  int64_t  rows, columns;           // of the result
  int64_t  row, column;             // strides in x, in elements, of the result's rows and columns
  tensor  *q, *scale;
  uint64_t random;                  // Philox block of the first element
  float    encode, amax;            // NVFP4's S (base/mx.h); the amax of the tensor
} side;

static inline float x_at(const side *s, int64_t r, int64_t c)
{ return (float)load_at(s->call->in[0], r * s->row + c * s->column); }

// Returns the largest magnitude of a block. With `nans`, returns NaN if the block holds a NaN.
static inline float block_amax(const side *s, int64_t r0, int64_t rows, int64_t c0,
                               int64_t columns, bool nans)
{
  float amax = 0;
  for (int64_t r = r0; r < r0 + rows; r++)
    for (int64_t c = c0; c < c0 + columns; c++) {
      float x = fabsf(x_at(s, r, c));
      if (f32_is_nan(x) && nans) return x;
      if (x > amax) amax = x;
    }
  return amax;
}
