// Single-thread instructions that have no intrinsic, one function each. mma.h has the instructions
// of a warp, wgmma.h the instructions of a warpgroup. These three files hold all assembly
// instructions of the device code. Included by kernel files. Owns nothing.
#pragma once

#include "runtime/device.h"

#ifdef __CUDACC__

/// Returns 2^x within 2 units in the last place. Results below 2^-126 become 0.
__device__ static inline float exp2_fast(float x)
{
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
/// Returns 1/x, within 1 unit in the last place for normal x. 1/inf is 0; 1/NaN is NaN.
__device__ static inline float reciprocal_fast(float x)
{
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// These functions round two numbers to FP8 with saturation. `low` goes to the low byte.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define PTX_FP8 1
__device__ static inline uint32_t pack_e4m3(float low, float high)
{
  uint16_t r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}
__device__ static inline uint32_t pack_e5m2(float low, float high)
{
  uint16_t r;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}
#endif

/// Like fmaxf, but returns NaN if either argument is NaN.
__device__ static inline float max_nan(float a, float b)
{
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
}

/// Hides the value of x from the compiler, which then recomputes values derived from x instead of
/// keeping them in registers.
template <class T> __device__ static inline T opaque(T x)
{
  asm volatile("" : "+r"(x));
  return x;
}
#endif
