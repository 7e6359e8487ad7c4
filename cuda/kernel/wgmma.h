// wgmma: Hopper's asynchronous matrix product by a warpgroup (four warps). B is in shared memory, A
// in shared memory or in registers. Only sm_90a has it; for other architectures, the bodies of the
// kernels that use it only trap. Included by attention_hopper.h.
//
// A tile in shared memory has rows of 64 16-bit numbers (128 bytes) and is 1024-byte aligned. Piece
// p (16 bytes) of row r is at position p ^ (r & 7) of the row: the hardware's 128-byte swizzle.
// Wider matrices are several tiles side by side.
//
// The registers of a warpgroup hold C [64 x N] and A [64 x 16] as follows. Warp w has rows 16 w to
// 16 w + 15, in the layout of mma.h; d[4 i + k] is c[k] of mma.h for columns 8 i to 8 i + 7.
#pragma once

#include "mma.h"

/// Returns wgmma's descriptor of the operand that begins `offset` bytes after the beginning of the
/// tile at `address`. Groups of 8 rows are 1024 bytes apart. `beside`, the distance in bytes to the
/// tile with the next 64 columns, matters only in weights_times_rows, for a B of more than 64
/// columns.
__device__ static inline uint64_t tile_descriptor(uint32_t address, uint32_t beside,
                                                  uint32_t offset)
{
  // Only the lower word depends on the address. `offset`, a constant in unrolled loops, is added
  // last, so that the loop computes the rest once.
  const uint32_t low = (address >> 4 | beside >> 4 << 16) + (offset >> 4);
  return (uint64_t)(1024 >> 4 | 1u << 30) << 32 | low;
}

/// Makes this thread's writes to shared memory visible to wgmma and to copies by the hardware; call
/// it before a barrier.
__device__ static inline void publish_shared()
{ asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

/// Arrives at the block's barrier `id` (1 to 15; 0 is __syncthreads) and waits until `threads`
/// threads have arrived. Called by whole warps.
__device__ static inline void group_meet(int id, int threads)
{ asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory"); }

/// Makes earlier writes to registers visible to the products that read these registers or add to
/// them.
__device__ static inline void group_begin()
{ asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
/// Ends a group: the products started since the previous group.
__device__ static inline void group_commit()
{ asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
/// Waits until at most LEFT committed groups are in flight.
template <int LEFT>
__device__ static inline void group_wait()
{ asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(LEFT) : "memory"); }

/// Stops the compiler from reading or reusing these registers before this point.
template <int N> __device__ static inline void settle(float (&d)[N])
{
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i]) :: "memory");
}
/// Tells the compiler that it need not keep the contents of these registers.
template <int N> __device__ static inline void forget(float (&d)[N])
{
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "=f"(d[i]) :: "memory");
}
template <int M, int N> __device__ static inline void settle(uint32_t (&a)[M][N])
{
#pragma unroll
  for (int i = 0; i < M; i++)
#pragma unroll
    for (int k = 0; k < N; k++) asm volatile("" : "+r"(a[i][k]) :: "memory");
}

#define REGISTERS_8(i)                                                              \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]),       \
    "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define REGISTERS_FROM(i) \
  REGISTERS_8(i), REGISTERS_8(i + 8), REGISTERS_8(i + 16), REGISTERS_8(i + 24)
#define REGISTERS_32 REGISTERS_FROM(0)
#define REGISTERS_64 REGISTERS_FROM(0), REGISTERS_FROM(32)
#define NUMBERS_32                                                                                 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25," \
  "%26,%27,%28,%29,%30,%31"
#define NUMBERS_64                                                                                 \
  NUMBERS_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,"   \
             "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
/// Starts d [64 x N] = a [64 x 16] times the transpose of b [N x 16] or, with `add`, d += that
/// product. a and b are the descriptors of 16 columns of a tile.
#define WGMMA_ROWS(TYPE, NAME, N, REGISTERS, NUMBERS, A, B, ADD)                              \
  __device__ static inline void rows_times_rows(float (&d)[N / 2], uint64_t a, uint64_t b,    \
                                                bool add, TYPE)                               \
  {                                                                                           \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" ADD ", 0;\n"                              \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" NUMBERS \
                 "}, %" A ", %" B ", p, 1, 1, 0, 0; }\n"                                      \
                 : REGISTERS                                                                  \
                 : "l"(a), "l"(b), "r"((int)add));                                            \
  }
/// Starts d [64 x N] += a [64 x 16] times b [16 x N]. a is in registers; b is the descriptor of 16
/// rows of tiles.
#define WGMMA_WEIGHTS(TYPE, NAME, N, REGISTERS, NUMBERS, A0, A1, A2, A3, B)                   \
  __device__ static inline void weights_times_rows(float (&d)[N / 2], const uint32_t (&a)[4], \
                                                   uint64_t b, TYPE)                          \
  {                                                                                           \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0;\n"                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" NUMBERS \
                 "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", p, 1, 1, 1; }\n"           \
                 : REGISTERS                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                       \
  }
WGMMA_ROWS(f16_t, "f16", 64, REGISTERS_32, NUMBERS_32, "32", "33", "34")
WGMMA_WEIGHTS(f16_t, "f16", 64, REGISTERS_32, NUMBERS_32, "32", "33", "34", "35", "36")
WGMMA_ROWS(bf16_t, "bf16", 64, REGISTERS_32, NUMBERS_32, "32", "33", "34")
WGMMA_WEIGHTS(bf16_t, "bf16", 64, REGISTERS_32, NUMBERS_32, "32", "33", "34", "35", "36")
WGMMA_ROWS(f16_t, "f16", 128, REGISTERS_64, NUMBERS_64, "64", "65", "66")
WGMMA_WEIGHTS(f16_t, "f16", 128, REGISTERS_64, NUMBERS_64, "64", "65", "66", "67", "68")
WGMMA_ROWS(bf16_t, "bf16", 128, REGISTERS_64, NUMBERS_64, "64", "65", "66")
WGMMA_WEIGHTS(bf16_t, "bf16", 128, REGISTERS_64, NUMBERS_64, "64", "65", "66", "67", "68")
