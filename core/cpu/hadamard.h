// The Hadamard transform of tiles, for hadamard.c and mx_quantize.c. Included by both. hadamard.c
// defines the functions, once per instruction set. Owns nothing.
#pragma once

#include "device/backend.h"
#include "simd.h"

enum { ROTATION_SIDE = 128 };   // the side of a tile, and the most elements of a group

/// The transform of x, whose result is [lines x along]. A line is a row of x or, if `turned`, a
/// column. Each group of n consecutive elements of a line is transformed by itself.
typedef struct rotation {
  const tensor *x;
  void    *y;                // the result, only for the operation hadamard
  int      dtype, n;         // dtype: of the result, bf16 or f32
  bool     turned;
  int64_t  along, lines, columns;   // columns: of x
  float    sign[ROTATION_SIDE];     // [n]: 1 or -1, the factor on each element of a group
  uint16_t flip[ROTATION_SIDE];     // the sign bits of `sign`, in bf16
} rotation;

/// Describes the transform of x in groups of n elements, with a result of format `dtype`. mx_sign
/// (base/mx.h) explains `signs`.
rotation ISA_NAME(rotation_of)(const tensor *x, int64_t n, int64_t signs, bool turned, int dtype);

/// Computes elements [a0, a0 + deep) of lines [l0, l0 + lines) of the result. Writes them
/// transposed to `tile` [deep x lines], whose rows are ROTATION_SIDE elements apart. a0 is a
/// multiple of n.
void ISA_NAME(rotate_tile)(const rotation *o, void *tile, int64_t a0, int deep, int64_t l0,
                           int lines);

/// Updates *top (f32 bits) with the largest magnitude, except NaN, among elements [a0, a0 + deep)
/// of all lines of the result, which is bf16. Returns whether any of these elements is NaN.
bool ISA_NAME(rotated_amax)(const rotation *o, uint32_t *top, int64_t a0, int deep);

op_kernel ISA_NAME(cpu_hadamard);
