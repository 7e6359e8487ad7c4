// Messages between ranks: conversion of numbers to and from the comm dtype, and the sum over ranks.
// The results have the same bits as those of core/dist/comm_pack.c and core/cpu/wire.c, except for
// the bits of a NaN. All kernels are bound by memory bandwidth. A warp processes a block of 128
// elements; each thread processes four adjacent elements. Called through the device's table.
#include "device.h"
#include "runtime.h"

#include "base/fp8.h"
#include "base/fp8_scale.h"
extern "C" {
#include "device/wire.h"
}

#include <type_traits>

enum {
  EACH = 4 /* adjacent elements per thread */,
  THREADS = 256,
  WARPS = THREADS / 32,
  LEVELS = 24 /* partial sums that a thread keeps: enough for fewer than 2^24 ranks */,
  MOST_ACROSS = 2048 /* blocks of threads that share a run or, in `sum`, a message */,
  MOST_RUNS = 32768 /* runs that have blocks of their own; with more, a block takes several */
};

struct e4m3_t { uint8_t bits; };

template <class T> struct alignas(EACH * sizeof(T)) quad { T at[EACH]; };

/// Loads four adjacent elements from p on. Elements at index `left` and beyond become zeros.
template <class T> __device__ static inline quad<T> load(const T *p, int64_t left)
{
  quad<T> q = {};
  if (left >= EACH && (uintptr_t)p % sizeof q == 0) q = *(const quad<T> *)p;
  else for (int i = 0; i < EACH; i++) if (i < left) q.at[i] = p[i];
  return q;
}

template <class T> __device__ static inline void store(T *p, int64_t left, quad<T> q)
{
  if (left >= EACH && (uintptr_t)p % sizeof q == 0) *(quad<T> *)p = q;
  else for (int i = 0; i < EACH; i++) if (i < left) p[i] = q.at[i];
}

template <class T> __device__ static inline quad<float> widened(quad<T> q)
{
  quad<float> v;
  for (int i = 0; i < EACH; i++) v.at[i] = widen(q.at[i]);
  return v;
}

// put and get convert to and from each comm dtype. Each thread of a warp stores or loads four
// elements of a block; all threads of the warp must call them together.

template <class W>
__device__ static inline void put(W *packed, float *, quad<float> v, int64_t, int64_t left)
{
  quad<W> q;
  for (int i = 0; i < EACH; i++) narrow(q.at[i], v.at[i]);
  store(packed, left, q);
}

__device__ static inline void put(e4m3_t *packed, float *scales, quad<float> v, int64_t block,
                                  int64_t left)
{
  float amax = 0;
  for (int i = 0; i < EACH; i++) {
    float magnitude = f32_from(f32_bits(v.at[i]) & 0x7FFFFFFFu);
    if (f32_is_finite(magnitude) && magnitude > amax) amax = magnitude;
  }
  for (int step = 16; step > 0; step /= 2)
    amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
  fp8_scale s = fp8_scale_of(amax, E4M3_MAX, ENG_SCALE_TRANSFORMER_ENGINE, 1, 0, 0, fp8_power(127));
  quad<e4m3_t> q;
  for (int i = 0; i < EACH; i++) {
    q.at[i].bits = f32_is_finite(v.at[i]) ? e4m3_from_f32(v.at[i] * s.factor, FP8_SATURATE) :
                                            (uint8_t)(0x7F | (f32_bits(v.at[i]) >> 24 & 0x80));
    if (s.scale == 0x1p120f && (q.at[i].bits & 0x7F) == 0x78) q.at[i].bits--;   // 256 becomes 240
  }
  store(packed, left, q);
  if (threadIdx.x % 32 == 0) scales[block] = s.scale;
}

template <class W>
__device__ static inline quad<float> get(const W *packed, const float *, int64_t, int64_t left)
{ return widened(load(packed, left)); }

__device__ static inline quad<float> get(const e4m3_t *packed, const float *scales, int64_t block,
                                         int64_t left)
{
  quad<e4m3_t> q = load(packed, left);
  quad<float> v;
  for (int i = 0; i < EACH; i++) v.at[i] = e4m3_to_f32(q.at[i].bits) * scales[block];
  return v;
}

/// Returns the scales of `piece`, a part of a message in E4M3. A piece is `count` codes of one byte
/// each, followed by the scales.
template <class W>
__device__ static inline float *scales_of(W *piece, int64_t count)
{ return (float *)((char *)piece + count); }

// ------------------------------------------------------------------ passes

// Numbers already in the comm dtype are copied without rounding, and their NaNs keep every bit.

template <class N, class W>
__global__ void __launch_bounds__(THREADS) pack(const wire_run *runs, int n, uint32_t *flags)
{
  for (int r = blockIdx.y; r < n; r += gridDim.y) {
    wire_run run = runs[r];
    bool there = run.how & WIRE_RUN_THERE, fill = run.how & WIRE_RUN_FILL;
    uint32_t found = 0;
    for (int64_t block = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; block * WIRE_BLOCK < run.n;
         block += (int64_t)gridDim.x * WARPS) {
      int64_t at = block * WIRE_BLOCK + threadIdx.x % 32 * EACH, left = run.n - at;
      quad<N> q = {};
      if (there) q = load((const N *)run.numbers + at, left);
      if (fill) left = EACH;
      quad<float> v = widened(q);
      W *to = (W *)run.packed + at;
      if constexpr (std::is_same_v<N, W>) store(to, left, q);
      else put(to, run.scales, v, block, left);
      for (int i = 0; i < EACH; i++) {
        if (!f32_is_finite(v.at[i])) found |= f32_is_nan(v.at[i]) ? WIRE_NAN : WIRE_INF;
        if constexpr (sizeof(W) == 2 && !std::is_same_v<N, W>) {       // f16, bf16
          W packed;
          narrow(packed, v.at[i]);
          if (f32_is_finite(v.at[i]) && !f32_is_finite(widen(packed))) found |= WIRE_OVERFLOW;
        }
      }
    }
    if (found) atomicOr(&flags[run.slot], found);
  }
}

template <class N, class W>
__global__ void __launch_bounds__(THREADS) unpack(const wire_run *runs, int n)
{
  for (int r = blockIdx.y; r < n; r += gridDim.y) {
    wire_run run = runs[r];
    for (int64_t block = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; block * WIRE_BLOCK < run.n;
         block += (int64_t)gridDim.x * WARPS) {
      int64_t at = block * WIRE_BLOCK + threadIdx.x % 32 * EACH, left = run.n - at;
      N *to = (N *)run.numbers + at;
      quad<N> q;
      if constexpr (std::is_same_v<N, W>) q = load((const N *)run.packed + at, left);
      else {
        quad<float> v = get((const W *)run.packed + at, run.scales, block, left);
        for (int i = 0; i < EACH; i++) narrow(q.at[i], v.at[i]);
      }
      if (run.how & WIRE_RUN_ADD) {
        quad<N> before = load(to, left);
        for (int i = 0; i < EACH; i++) narrow(q.at[i], widen(before.at[i]) + widen(q.at[i]));
      }
      store(to, left, q);
    }
  }
}

/// Sums the terms of n ranks, each term divided by `share`, in the order that comm.h defines. p is
/// the largest power of two that does not exceed n. Term k + p is added to term k. The p results
/// are merged as in a binary counter: two partial sums are added as soon as both contain the same
/// number of results.
template <class W>
__global__ void __launch_bounds__(THREADS)
  sum(W *out, const void *const *terms, int n, int p, int64_t count, float share)
{
  for (int64_t block = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; block * WIRE_BLOCK < count;
       block += (int64_t)gridDim.x * WARPS) {
    int64_t at = block * WIRE_BLOCK + threadIdx.x % 32 * EACH, left = count - at;
    quad<float> level[LEVELS];
    int top = 0;
    for (int k = 0; k < p; k++) {
      const W *term = (const W *)terms[k];
      quad<float> v = get(term + at, scales_of((W *)term, count), block, left);
      for (int i = 0; i < EACH; i++) v.at[i] = v.at[i] / share;
      if (k + p < n) {
        const W *far = (const W *)terms[k + p];
        quad<float> w = get(far + at, scales_of((W *)far, count), block, left);
        for (int i = 0; i < EACH; i++) v.at[i] = v.at[i] + w.at[i] / share;
      }
      for (int bits = k; bits & 1; bits >>= 1) {
        top--;
        for (int i = 0; i < EACH; i++) v.at[i] = level[top].at[i] + v.at[i];
      }
      level[top++] = v;
    }
    put(out + at, scales_of(out, count), level[0], block, left);
  }
}

// ------------------------------------------------------------------ the kernel for each dtype

static unsigned across_of(int64_t longest)
{
  int64_t blocks = parts(longest, THREADS * EACH);
  return (unsigned)(blocks < 1 ? 1 : blocks < MOST_ACROSS ? blocks : (int64_t)MOST_ACROSS);
}

/// Calls f(W{}) for the storage type W of a comm dtype.
template <class F> static eng_status with_comm_dtype(int comm_dtype, const char *what, const F &f)
{
  FAIL_IF(!is_fast(comm_dtype) && comm_dtype != ENG_e4m3, ENG_ERR_DTYPE,
          "cuda: %s: expected the comm dtype f32, f16, bf16 or e4m3, got %s", what,
          eng_dtype_name(comm_dtype));
  if (comm_dtype == ENG_e4m3) f(e4m3_t{});
  else with_fast_format(comm_dtype, f);
  return cuda_launched(what);
}

static cudaStream_t stream_of(void *stream)
{ return stream ? (cudaStream_t)stream : cuda_stream(); }

/// Packs n runs into messages or, if `out` is false, unpacks them.
static eng_status convert(bool out, void *stream, const wire_run *runs, int n, int64_t longest,
                          int comm_dtype, int dtype, uint32_t *flags)
{
  if (n == 0) return ENG_OK;
  FAIL_IF(!is_fast(dtype), ENG_ERR_DTYPE,
          "cuda: messages between ranks: expected f32, f16 or bf16, got %s",
          eng_dtype_name(dtype));
  cudaStream_t on = stream_of(stream);
  dim3 grid(across_of(longest), n < MOST_RUNS ? n : MOST_RUNS);
  return with_comm_dtype(comm_dtype, "messages between ranks", [&](auto packed) {
    with_fast_format(dtype, [&](auto number) {
      typedef decltype(packed) W;
      typedef decltype(number) N;
      if (out) pack<N, W><<<grid, THREADS, 0, on>>>(runs, n, flags);
      else unpack<N, W><<<grid, THREADS, 0, on>>>(runs, n);
    });
  });
}

eng_status cuda_wire_pack(void *stream, const wire_run *runs, int n, int64_t longest,
                          int comm_dtype, int dtype, uint32_t *flags)
{ return convert(true, stream, runs, n, longest, comm_dtype, dtype, flags); }

eng_status cuda_wire_unpack(void *stream, const wire_run *runs, int n, int64_t longest,
                            int comm_dtype, int dtype)
{ return convert(false, stream, runs, n, longest, comm_dtype, dtype, NULL); }

eng_status cuda_wire_sum(void *stream, void *out, const void *const *terms, int n, int64_t count,
                         int comm_dtype, float share)
{
  int p = 1;
  while (2 * p <= n) p *= 2;
  if (count == 0) return ENG_OK;
  return with_comm_dtype(comm_dtype, "the sum over ranks", [&](auto w) {
    sum<<<across_of(count), THREADS, 0, stream_of(stream)>>>((decltype(w) *)out, terms, n, p, count,
                                                             share);
  });
}
