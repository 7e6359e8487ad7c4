// What a kernel sees when it runs on the host: its place in the grid, shared memory, barriers and
// the functions of a warp. to_host.lua rewrites the sources of cuda/ so that they compile as C++
// against this file and the headers in kernel/; threads.cpp runs the threads of a block;
// runtime.cpp is the CUDA run-time library. Included by every rewritten file. Owns nothing.
#ifndef EMULATOR_H
#define EMULATOR_H

#define EMULATED_CARD 1   // to_host.lua writes this name for __CUDACC__

#include <cuda.h>
#include <cuda_runtime.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __noinline__
#define __noinline__ __attribute__((noinline))
#undef __shared__   // to_host.lua removes every use

namespace emulator {

// ------------------------------------------------------------------ launching

struct shape {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
  shape(dim3 g, dim3 b, size_t s = 0, cudaStream_t on = nullptr)
      : grid(g), block(b), shared(s), stream(on)
  {
  }
};

/// Queues a kernel in its stream. `body` runs one thread.
void launch_later(const char *name, const shape &at, std::function<void()> body);

/// Queues a library's work in a stream.
cudaError_t work_later(const char *name, cudaStream_t stream, std::function<void()> work);

/// K<<<at>>>(args): copies the arguments now, as a real launch does.
template <class Body, class... Args>
void launch(const char *name, const shape &at, Body body, const Args &...args)
{
  launch_later(name, at, [body, kept = std::tuple<std::decay_t<Args>...>(args...)] {
    std::apply(body, kept);
  });
}

// ------------------------------------------------------------------ threads

enum { WARP = 32, WARPGROUP = 128, MOST_THREADS = 1024 };

struct copy_in_flight { void *to; const void *from; uint32_t bytes; };   // from NULL: zeros

struct thread {
  uint3 index;
  int   number;                                // in its block
  int   state;
  void *stack;                                 // threads.cpp's
  void *mine;                                  // its contribution to an exchange
  uint32_t mask;
  void (*kind)(thread *const *, int);
  const uint32_t *word;                        // waits while this is `old`
  uint32_t old;
  // groups of asynchronous copies; the last one is still open
  std::vector<std::vector<copy_in_flight>> copies;
};

struct block_state {
  uint3 index;
  dim3 threads, grid;
  uint64_t serial;                             // unique for every block that ever ran
};

extern thread *now;                            // the running thread
extern block_state block;

/// Waits until all threads of the warp in `mask` that have not returned call this with the same
/// mask and kind. Then kind(who, 32) runs once; who[lane] is NULL for the other lanes.
void meet_warp(uint32_t mask, void (*kind)(thread *const *, int), void *mine);
/// meet_warp for the four warps of a warpgroup.
void meet_warpgroup(void (*kind)(thread *const *, int), void *mine);
/// __syncthreads; returns whether any thread voted true.
bool meet_block(bool vote);
/// A barrier in shared memory (mbarrier): `missing` of `count` threads have not arrived, and copies
/// have still to write 16 * `awaited` bytes.
struct barrier { uint32_t count : 9, missing : 9, awaited : 14; uint32_t phase; };
/// Waits until *word differs from `old`.
void wait_while(const uint32_t *word, uint32_t old);
/// Arrives at the block's barrier `id` for `threads` threads and waits for the others.
void meet_at(int id, int threads);
/// Ends the kernel with a message on stderr; later calls of the run-time library fail, as after a
/// fault on a real card.
[[noreturn]] void fault(const char *format, ...) __attribute__((format(printf, 1, 2)));

// ---- shared memory: a window of 256 KiB, filled with NaN when a block begins

void *take_shared(size_t bytes, size_t align);
void *dynamic_shared(void);
uint32_t shared_offset(const void *p);         // in the window: a 32-bit shared address
void *shared_at(uint32_t offset, uint32_t bytes);

template <class T> struct shared_variable {
  uint64_t serial;
  T *at;
  T &here()
  {
    if (serial != block.serial) {
      at = (T *)take_shared(sizeof(T), alignof(T) < 16 ? 16 : alignof(T));
      serial = block.serial;
    }
    return *at;
  }
};

// ------------------------------------------------------------------ asynchronous copies
// A copy is made only when a thread waits for it.


void copy_start(void *to, const void *from, uint32_t bytes, bool there);
void copy_close(void);
void copy_finish(int left);

/// What cuTensorMapEncodeTiled writes: a tensor of 16-bit numbers, and the size of a box.
struct box_map { const uint16_t *data; uint64_t size[4], stride[4]; uint32_t rows; };
/// Starts to copy a box (64 columns of `rows` rows) in the order of the 128-byte swizzle, or
/// `bytes` adjacent bytes.
void copy_box_start(uint32_t to, const box_map *map, const int (&at)[4], uint32_t barrier);
void copy_line_start(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier);
/// Begins the barrier's next phase if nothing is missing.
void barrier_turn(barrier *b);

// ------------------------------------------------------------------ exchanges within warps

template <class T> struct letter { T sent, got; int from; };

/// Returns lane `from`'s x; all-ones bits if that lane has returned or is not in the mask.
template <class T> T exchange(uint32_t mask, T x, int from)
{
  letter<T> mine = {x, x, from};
  meet_warp(mask, [](thread *const *who, int n) {
    for (int i = 0; i < n; i++) {
      if (!who[i]) continue;
      letter<T> *l = (letter<T> *)who[i]->mine;
      if (who[l->from]) l->got = ((letter<T> *)who[l->from]->mine)->sent;
      else memset(&l->got, 0xFF, sizeof l->got);
    }
  }, &mine);
  return mine.got;
}

/// Every lane gets the values of all lanes in the mask, combined by Op.
template <class T, class Op> T combine(uint32_t mask, T x, Op)
{
  T mine = x;
  meet_warp(mask, [](thread *const *who, int n) {
    bool any = false;
    T all{};
    for (int i = 0; i < n; i++) {
      if (!who[i]) continue;
      T one = *(T *)who[i]->mine;
      all = any ? Op()(all, one) : one;
      any = true;
    }
    for (int i = 0; i < n; i++)
      if (who[i]) *(T *)who[i]->mine = all;
  }, &mine);
  return mine;
}

struct adding  { template <class T> T operator()(T a, T b) const { return a + b; } };
struct largest { template <class T> T operator()(T a, T b) const { return a > b ? a : b; } };
struct either  { template <class T> T operator()(T a, T b) const { return a | b; } };
inline int lane(void) { return now->number % WARP; }

}

template <class... Args>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Args...), cudaFuncAttribute attribute, int value)
{
  return cudaFuncSetAttribute((const void *)kernel, attribute, value);
}

#define threadIdx (emulator::now->index)
#define blockIdx  (emulator::block.index)
#define blockDim  (emulator::block.threads)
#define gridDim   (emulator::block.grid)

// ------------------------------------------------------------------ intrinsics

static inline void __syncthreads(void) { emulator::meet_block(false); }
static inline int  __syncthreads_or(int vote) { return emulator::meet_block(vote != 0); }
static inline void __syncwarp(uint32_t mask = 0xFFFFFFFFu)
{
  emulator::meet_warp(mask, [](emulator::thread *const *, int) {}, nullptr);
}
static inline void __threadfence(void) {}
[[noreturn]] static inline void __trap(void) { emulator::fault("trap"); }

template <class T>
static inline T __shfl_xor_sync(uint32_t mask, T x, int bits)
{ return emulator::exchange(mask, x, emulator::lane() ^ bits); }
template <class T> static inline T __shfl_sync(uint32_t mask, T x, int from, int width = 32)
{
  return emulator::exchange(mask, x, emulator::lane() / width * width + (from & (width - 1)));
}
template <class T> static inline T __shfl_down_sync(uint32_t mask, T x, uint32_t by)
{
  int from = emulator::lane() + (int)by;
  return emulator::exchange(mask, x, from < 32 ? from : emulator::lane());
}
template <class T> static inline T __shfl_up_sync(uint32_t mask, T x, uint32_t by)
{
  int from = emulator::lane() - (int)by;
  return emulator::exchange(mask, x, from >= 0 ? from : emulator::lane());
}
static inline uint32_t __ballot_sync(uint32_t mask, int vote)
{
  return emulator::combine(mask, vote ? 1u << emulator::lane() : 0u, emulator::either());
}
static inline int __any_sync(uint32_t mask, int vote)
{ return emulator::combine(mask, (uint32_t)(vote != 0), emulator::either()) != 0; }
static inline int __all_sync(uint32_t mask, int vote) { return !__any_sync(mask, !vote); }
template <class T>
static inline T __reduce_max_sync(uint32_t mask, T x)
{ return emulator::combine(mask, x, emulator::largest()); }
template <class T>
static inline T __reduce_add_sync(uint32_t mask, T x)
{ return emulator::combine(mask, x, emulator::adding()); }

// Only one thread runs at a time, and it yields only where it waits.
template <class T, class V>
static inline T atomicAdd(T *to, V x)
{
  T old = *to;
  *to = (T)(old + (T)x);
  return old;
}
template <class T, class V>
static inline T atomicMax(T *to, V x)
{
  T old = *to;
  if ((T)x > old) *to = (T)x;
  return old;
}
template <class T, class V>
static inline T atomicMin(T *to, V x)
{
  T old = *to;
  if ((T)x < old) *to = (T)x;
  return old;
}
template <class T, class V>
static inline T atomicOr(T *to, V x)
{
  T old = *to;
  *to = old | (T)x;
  return old;
}
template <class T, class A, class B>
static inline T atomicCAS(T *to, A was, B x)
{
  T old = *to;
  if (old == (T)was) *to = (T)x;
  return old;
}

template <class T> static inline T __ldg(const T *p)  { return *p; }
template <class T> static inline T __ldcg(const T *p) { return *p; }

static inline float    __uint_as_float(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }
static inline float    __int_as_float(int32_t b)   { float x; memcpy(&x, &b, 4); return x; }
static inline uint32_t __float_as_uint(float x)    { uint32_t b; memcpy(&b, &x, 4); return b; }
static inline int32_t  __float_as_int(float x)     { int32_t b; memcpy(&b, &x, 4); return b; }
/// a + b, rounded toward zero, for a and b of one sign. Then their sum in f64 is exact, or the
/// smaller one is too small to change the result.
static inline float __fadd_rz(float a, float b)
{
  double sum = (double)a + b;
  float nearest = (float)sum;
  return std::fabs(nearest) > std::fabs(sum) ? std::nextafterf(nearest, 0) : nearest;
}
/// x rounded to f32 toward zero.
static inline float __double2float_rz(double x)
{
  float nearest = (float)x;
  return std::fabs(nearest) > std::fabs(x) ? std::nextafterf(nearest, 0) : nearest;
}
static inline int __ffs(uint32_t x)       { return __builtin_ffs((int)x); }
static inline int __clz(uint32_t x)       { return x ? __builtin_clz(x) : 32; }
static inline int __popc(uint32_t x)      { return __builtin_popcount(x); }
static inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t which)
{
  uint64_t all = (uint64_t)b << 32 | a;
  uint32_t r = 0;
  for (int i = 0; i < 4; i++) {
    uint32_t pick = which >> 4 * i & 0xF, byte = (uint32_t)(all >> 8 * (pick & 7)) & 0xFF;
    if (pick & 8) byte = byte & 0x80 ? 0xFF : 0;
    r |= byte << 8 * i;
  }
  return r;
}
static inline uint32_t __vmaxu2(uint32_t a, uint32_t b)
{
  uint32_t low = (a & 0xFFFF) > (b & 0xFFFF) ? a & 0xFFFF : b & 0xFFFF,
           high = a >> 16 > b >> 16 ? a >> 16 : b >> 16;
  return high << 16 | low;
}
template <class A, class B> static constexpr std::common_type_t<A, B> min(A a, B b)
{
  typedef std::common_type_t<A, B> T;
  return (T)a < (T)b ? (T)a : (T)b;
}
template <class A, class B> static constexpr std::common_type_t<A, B> max(A a, B b)
{
  typedef std::common_type_t<A, B> T;
  return (T)a > (T)b ? (T)a : (T)b;
}
static inline size_t __cvta_generic_to_shared(const void *p) { return emulator::shared_offset(p); }

using std::isinf;
using std::isnan;
using std::isfinite;

#endif
