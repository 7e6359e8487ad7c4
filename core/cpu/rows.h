// Helpers for kernels that work on the rows of a tensor. They read f32, f16 or bf16 (the fast
// dtypes) as f32, and sum rows in a fixed order. Included by kernel files and other headers of this
// folder, once per instruction set. Owns nothing.
//
// A sum is taken in a fixed order: per lane within a tile of TILE elements, then over the lanes by
// a fixed tree, then over the tiles in order, in double. The order depends on the length of the row
// and the lanes of the instruction set, never on the number of threads.
#pragma once

#include "device/backend.h"
#include "base/error.h"
#include "simd.h"
#include "tensor/scratch.h"

#include <omp.h>

// With fewer elements, waking the other threads costs more than it saves.
enum { PARALLEL_ELEMENTS = 16384 };

/// Returns whether every tensor of the call is f32, f16 or bf16. Absent tensors do not count.
static inline bool all_fast(const op_call *call)
{
  for (int k = 0; k < call->n_in; k++)
    if (call->in[k] && !dtype_is_fast(call->in[k]->dtype)) return false;
  for (int k = 0; k < call->n_out; k++)
    if (call->out[k] && !dtype_is_fast(call->out[k]->dtype)) return false;
  return true;
}

/// Does the same as all_fast, but ignores input number `input` (from 0), which is not a float
/// tensor.
static inline bool all_fast_except(const op_call *call, int input)
{
  op_call floats = *call;
  floats.in[input] = NULL;
  return all_fast(&floats);
}

/// Begins the definition of the kernel of operation `name`. The kernel's argument is `call`.
#define KERNEL(name) eng_status ISA_NAME(cpu_##name)(const op_call *call)

static inline eng_status forward_to_reference(const op_call *call)
{ return backend_reference()->kernel[call->op](call); }

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b)  { return a > b ? a : b; }
/// Returns a / b, rounded up.
static inline int64_t ceiling(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Returns `count` rounded up to whole cache lines of floats, so that the buffers of two threads
/// share no line.
static inline int64_t padded(int64_t count) { return (count + 15) / 16 * 16; }

static inline float get(const void *data, int dtype, int64_t i)
{
  if (dtype == ENG_f32) return ((const float *)data)[i];
  uint16_t bits = ((const uint16_t *)data)[i];
  return dtype == ENG_f16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

/// Stores a double, rounded once.
static inline void put(void *data, int dtype, int64_t i, double value)
{
  if (dtype == ENG_f32) ((float *)data)[i] = (float)value;
  else ((uint16_t *)data)[i] = dtype == ENG_f16 ? f16_from_f64(value) : bf16_from_f64(value);
}

/// Loads the first n lanes from `source` and puts `fill` in the other lanes.
VF_INLINE vf load_padded(const float *source, int n, float fill)
{ return vf_padded(vf_load_n(source, n), n, vf_set1(fill)); }

/// Returns the sum of one tile in double, element by element. Used for a tile whose f32 sum
/// overflows or that holds Inf or NaN.
static __attribute__((noinline, unused)) double wide_sum(const float *x, int n)
{
  double sum = 0.0;
  for (int i = 0; i < n; i++) sum += x[i];
  return sum;
}

/// Folds a tile into one vector, in four independent chains. Lanes past the end hold `fill`.
VF_INLINE vf tile_fold(const float *x, int n, float fill, vf (*fold)(vf, vf))
{
  vf a = vf_set1(fill), b = a, c = a, d = a;
  int i = 0;
  for (; i + 4 * VF_LANES <= n; i += 4 * VF_LANES) {
    a = fold(a, vf_load(x + i));
    b = fold(b, vf_load(x + i + VF_LANES));
    c = fold(c, vf_load(x + i + 2 * VF_LANES));
    d = fold(d, vf_load(x + i + 3 * VF_LANES));
  }
  for (; i + VF_LANES <= n; i += VF_LANES) a = fold(a, vf_load(x + i));
  if (i < n) b = fold(b, load_padded(x + i, n - i, fill));
  return fold(fold(a, b), fold(c, d));
}

/// Returns the sum of one tile.
static inline double tile_sum(const float *x, int n)
{
  float sum = vf_sum(tile_fold(x, n, 0.0f, vf_add));
  return f32_is_finite(sum) ? sum : wide_sum(x, n);
}

/// Returns the sum of elements [first, first + n) of x.
static inline double row_sum(const void *x, int dtype, int64_t first, int64_t n)
{
  float buffer[TILE] __attribute__((aligned(64)));
  double sum = 0.0;
  for (int64_t at = 0; at < n; at += TILE) {
    int length = (int)smaller(TILE, n - at);
    sum += tile_sum(tile_load(buffer, x, dtype, first + at, length), length);
  }
  return sum;
}

/// Returns the sum of (x - centre)^2 over a row.
static inline double row_squares(const float *x, int64_t n, float centre)
{
  vf m = vf_set1(centre);
  double sum = 0.0;
  for (int64_t at = 0; at < n; at += TILE) {
    const float *t = x + at;
    int length = (int)smaller(TILE, n - at), i = 0;
    vf a = vf_set1(0.0f), b = a, c = a, d = a;
    for (; i + 4 * VF_LANES <= length; i += 4 * VF_LANES) {
      vf p = vf_sub(vf_load(t + i), m), q = vf_sub(vf_load(t + i + VF_LANES), m);
      vf r = vf_sub(vf_load(t + i + 2 * VF_LANES), m), s = vf_sub(vf_load(t + i + 3 * VF_LANES), m);
      a = vf_fma(p, p, a);
      b = vf_fma(q, q, b);
      c = vf_fma(r, r, c);
      d = vf_fma(s, s, d);
    }
    for (; i + VF_LANES <= length; i += VF_LANES) {
      vf p = vf_sub(vf_load(t + i), m);
      a = vf_fma(p, p, a);
    }
    if (i < length) {
      vf p = vf_sub(load_padded(t + i, length - i, centre), m);
      b = vf_fma(p, p, b);
    }
    sum += vf_sum(vf_add(vf_add(a, b), vf_add(c, d)));
  }
  return sum;
}

/// Returns the largest element of a tile. If the tile holds a NaN, the result is arbitrary.
static inline float tile_max(const float *x, int n)
{ return vf_maxall(tile_fold(x, n, -INFINITY, vf_max)); }

/// Returns the sum of exp(x - shift) over a tile. Unless `keep` is NULL, stores each exp(x - shift)
/// in keep [n].
VF_INLINE double tile_exp_sum(const float *x, int n, float shift, float *keep)
{
  vf m = vf_set1(shift), a = vf_set1(0.0f), b = a;
  int i = 0;
  for (; i + 2 * VF_LANES <= n; i += 2 * VF_LANES) {
    vf p = vf_exp_low(vf_sub(vf_load(x + i), m)),
       q = vf_exp_low(vf_sub(vf_load(x + i + VF_LANES), m));
    if (keep) {
      vf_store(keep + i, p);
      vf_store(keep + i + VF_LANES, q);
    }
    a = vf_add(a, p);
    b = vf_add(b, q);
  }
  for (; i < n; i += VF_LANES) {   // at most twice: a whole vector, then the rest
    int lanes = n - i < VF_LANES ? n - i : VF_LANES;
    vf p = vf_exp_low(vf_sub(load_padded(x + i, lanes, -INFINITY), m));
    if (keep) vf_store_n(keep + i, p, lanes);
    a = vf_add(a, p);
  }
  return vf_sum(vf_add(a, b));
}

/// The largest element of a row and the sum of exp(x - max), found in one pass. If max is -inf, the
/// sum is 0. A NaN anywhere, or +inf, makes the sum NaN.
typedef struct row_exponents {
  float  max;
  double sum;
} row_exponents;

/// Computes row_exponents for the row in elements [first, first + n) of x. A tile with a larger
/// maximum rescales the sum so far.
static inline row_exponents row_exponents_of(const void *x, int dtype, int64_t first, int64_t n)
{
  float buffer[TILE] __attribute__((aligned(64)));
  row_exponents row = {-INFINITY, 0.0};
  for (int64_t at = 0; at < n; at += TILE) {
    int length = (int)smaller(TILE, n - at);
    const float *tile = tile_load(buffer, x, dtype, first + at, length);
    float largest = tile_max(tile, length);
    if (largest > row.max) {
      if (row.max != -INFINITY) row.sum *= exp((double)row.max - (double)largest);
      row.max = largest;
    }
    row.sum += tile_exp_sum(tile, length, row.max == -INFINITY ? 0.0f : row.max, NULL);
  }
  return row;
}
