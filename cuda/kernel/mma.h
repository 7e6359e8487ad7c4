// The tensor-core instructions of a warp on compute capability 8.0 and later, one function each:
// asynchronous copies from device to shared memory (cp.async), loads of matrices from shared memory
// into registers (ldmatrix), and the product m16n8k16 of f16 or bf16 with f32 sums. Included by the
// attention kernels.
//
// The registers of lane 4 * g + t hold these elements of a matrix:
//   A [16 x 16]  a[0]: columns 2t, 2t+1 of row g; a[1]: the same columns of row g + 8;
//                a[2], a[3]: as a[0], a[1], but columns 2t+8, 2t+9
//   B [16 x 8]   b0: rows 2t, 2t+1 of column g; b1: rows 2t+8, 2t+9 of column g
//   C [16 x 8]   c[0], c[1]: columns 2t, 2t+1 of row g; c[2], c[3]: the same columns of row g + 8
#pragma once

#include "ptx.h"

__device__ static inline uint32_t shared_address(const void *p)
{ return (uint32_t)__cvta_generic_to_shared(p); }

/// Starts a copy of 16 bytes to shared memory. Both addresses must be 16-byte aligned. If `there`
/// is false, writes zeros and reads nothing, but `from` must still be a valid address.
__device__ static inline void copy16(uint32_t to, const void *from, bool there)
{
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}
/// copy_commit ends a group of copies. copy_wait waits until at most `LEFT` groups of this thread
/// are in flight.
__device__ static inline void copy_commit()
{ asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int LEFT>
__device__ static inline void copy_wait()
{ asm volatile("cp.async.wait_group %0;\n" ::"n"(LEFT) : "memory"); }

/// Loads four 8 x 8 matrices of 16-bit numbers. Lane l passes the address (16-byte aligned) of row
/// l % 8 of matrix l / 8. Lane 4 * g + t gets columns 2t and 2t+1 of row g of each matrix.
/// load_matrices_turned transposes each matrix first.
__device__ static inline void load_matrices(uint32_t (&r)[4], uint32_t address)
{
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ static inline void load_matrices_turned(uint32_t (&r)[4], uint32_t address)
{
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

/// c += a b
__device__ static inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                           uint32_t b1, f16_t)
{
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
               "{%8,%9}, {%0,%1,%2,%3};\n"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ static inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                           uint32_t b1, bf16_t)
{
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
               "{%8,%9}, {%0,%1,%2,%3};\n"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
