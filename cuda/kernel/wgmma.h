// wgmma: Hopper's asynchronous matrix product by a warpgroup (four warps). B is in shared memory, A
// in shared memory or in registers. Included by kernels compiled for sm_90a; for other
// architectures the bodies of those kernels only trap.
//
// A tile in shared memory has rows of 64 16-bit numbers (128 bytes) and is 1024-byte aligned. Piece
// p (16 bytes) of row r is at position p ^ (r & 7) of the row: the hardware's 128-byte swizzle.
// Wider matrices are several tiles side by side.
//
// The registers of a warpgroup hold C [64 x N] and A [64 x 16] as follows. Warp w has rows 16 w to
// 16 w + 15, in the layout of mma.h; d[4 i + k] is c[k] of mma.h for columns 8 i to 8 i + 7.
#pragma once

#include "mma.h"

#if defined(__CUDACC__)

/// Returns wgmma's descriptor of the rows at `offset` in the tile at `address`. Groups of 8 rows
/// are 1024 bytes apart. `beside`, the distance in bytes to the tile with the next 64 columns,
/// matters only in weights_times_rows, for a B of more than 64 columns.
__device__ static inline uint64_t tile_descriptor(uint32_t address, uint32_t beside,
                                                  uint32_t offset)
{
  // only the lower word depends on the address; the constant offset is added last
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

#define REGISTERS_32                                                                              \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),      \
    "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),    \
    "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),    \
    "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define NUMBERS_32                                                                                 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25," \
  "%26,%27,%28,%29,%30,%31"
#define REGISTERS_64                                                                              \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),      \
    "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),    \
    "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),    \
    "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),    \
    "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),    \
    "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),    \
    "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),    \
    "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define NUMBERS_64                                                                                 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25," \
  "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%"  \
  "49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
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
#endif
