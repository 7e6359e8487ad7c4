// Single-thread instructions that have no intrinsic, one function each. mma.h has the instructions
// of a warp, wgmma.h the instructions of a warpgroup. These three files hold all assembly
// instructions of the device code. Included by kernel files. Owns nothing.
#pragma once

#include <cuda.h>

#include "runtime/device.h"

/// Returns 2^x within 2 units in the last place. Results below 2^-126 become 0.
__device__ static inline float exp2_fast(float x)
{
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
/// Returns 1/x, within 1 unit in the last place for normal x. Results below 2^-126 become 0; 1/NaN
/// is NaN.
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

// A barrier in shared memory (mbarrier, 8 bytes), given by its address. A phase ends when `count`
// threads have arrived, and the next phase begins at once. Phases alternate between parity 0 and 1,
// beginning with 0. A thread that has waited for the end of a phase sees what the arriving threads
// wrote before they arrived. Hopper and later.
__device__ static inline void barrier_init(uint32_t barrier, uint32_t count)
{ asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(count) : "memory"); }
/// Arrives if `really` is true. Has no branch, so the threads of a warp do not diverge.
__device__ static inline void barrier_arrive(uint32_t barrier, bool really)
{
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %1, 0;\n"
               "@p mbarrier.arrive.shared::cta.b64 _, [%0]; }\n" ::"r"(barrier),
               "r"((int)really)
               : "memory");
}
/// Arrives, and also keeps the phase from ending until copies (below) have written `bytes` bytes.
__device__ static inline void barrier_expect(uint32_t barrier, uint32_t bytes)
{
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}
/// Waits for the end of the current phase if it has this parity; otherwise returns at once.
__device__ static inline void barrier_wait(uint32_t barrier, uint32_t parity)
{
  asm volatile("{ .reg .pred p;\n"
               "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
               "@p bra done;\n"
               "bra again;\n"
               "done: }\n" ::"r"(barrier),
               "r"(parity)
               : "memory");
}

/// Starts a copy, by the hardware, of a box of a tensor of 16-bit numbers to the shared address
/// `to`. `map` describes the tensor and the size of the box, whose first number is at `column` of
/// the given row, head and batch. Numbers outside the tensor become 0. One thread calls this.
/// Threads that have waited for `barrier` see the result. Hopper and later.
__device__ static inline void copy_box(uint32_t to, const CUtensorMap *map, int column, int row,
                                       int head, int batch, uint32_t barrier)
{
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %5, %6}], [%2];\n" ::"r"(to),
               "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}
/// Starts a copy, by the hardware, of `bytes` adjacent bytes to the shared address `to`. Both
/// addresses and `bytes` are multiples of 16. Threads that have waited for `barrier` see the
/// result. Hopper and later.
__device__ static inline void copy_line(uint32_t to, const void *from, uint32_t bytes,
                                        uint32_t barrier)
{
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1], %2, [%3];\n" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

/// Hides the value of x from the compiler, which then recomputes values derived from x instead of
/// keeping them in registers.
template <class T> __device__ static inline T opaque(T x)
{
  asm volatile("" : "+r"(x));
  return x;
}
