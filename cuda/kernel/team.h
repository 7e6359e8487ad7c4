// A team is the threads that share a row: a warp, or a block of TEAM threads. Sums and maxima over
// a team are returned to all of its threads. The order of a sum depends on TEAM alone. Included by
// kernel files. Owns nothing.
#pragma once

#include "runtime/device.h"

/// Returns the larger of two numbers. If one is NaN, returns the other.
__device__ static inline float  larger(float a, float b)   { return fmaxf(a, b); }
__device__ static inline double larger(double a, double b) { return fmax(a, b); }

/// All threads of a team must call its functions together.
template <int TEAM> struct team {
  /// This thread's index in the team, from 0.
  __device__ static int rank() { return threadIdx.x % TEAM; }
  /// Combines the x of all threads with f(a, b).
  template <typename T, class F> __device__ static T combined(T x, const F &f)
  {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) x = f(x, __shfl_xor_sync(~0u, x, apart));
    if constexpr (TEAM > 32) {
      __shared__ T warps[TEAM / 32];
      __syncthreads();   // all reads of the previous result are done
      if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
      __syncthreads();
      x = warps[0];
#pragma unroll
      for (int k = 1; k < TEAM / 32; k++) x = f(x, warps[k]);
    }
    return x;
  }
  __device__ static double sum(double x)
  { return combined(x, [](double a, double b) { return a + b; }); }
  template <typename T> __device__ static T largest(T x)
  { return combined(x, [](T a, T b) { return larger(a, b); }); }
  __device__ static bool any(bool x)
  {
    if constexpr (TEAM > 32) return __syncthreads_or(x);
    else return __any_sync(~0u, x);
  }
};
