// Loads and stores for kernels that sum. float_lanes handles V elements of f32, f16 or bf16 at a
// time, for sums in f32. double_lanes handles single elements of any format, for sums in f64.
// Included by kernel files. Owns nothing.
#pragma once

#include "map.h"

template <int V_> struct float_lanes {
  enum { V = V_ };
  typedef float number;
  typedef typename mixed<V>::raw raw;
  __device__ static void fetch(raw &r, const void *data, int dtype, int64_t at)
  { mixed<V>::fetch(r, data, dtype, at, 1); }
  __device__ static void values(float (&x)[V], const raw &r, int dtype)
  { mixed<V>::floats(x, r, dtype); }
  __device__ static void store(void *data, int dtype, int64_t at, const float (&y)[V])
  { mixed<V>::store(data, dtype, at, y); }
};

struct double_lanes {
  enum { V = 1 };
  typedef double number;
  typedef double raw;
  __device__ static void fetch(raw &r, const void *data, int dtype, int64_t at)
  { r = element_double(data, dtype, at); }
  __device__ static void values(double (&x)[1], const raw &r, int) { x[0] = r; }
  __device__ static void store(void *data, int dtype, int64_t at, const double (&y)[1])
  { element_store(data, dtype, at, y[0]); }
};
