// What gradients go through between ranks: a look for inf and nan, sums, and FP8 in blocks. On the host; compiled with the CPU's kernels
// (cpu/wire.c) because it is bound by memory as they are. Called by comm_*.c.
#ifndef ENG_WIRE_H
#define ENG_WIRE_H

#include "engine.h"

enum { WIRE_INF = 2, WIRE_NAN = 4, WIRE_OVERFLOW = 8 };   // bits, as eng_parallel_brought gives them
enum { WIRE_BLOCK = 128 };                 // elements of an FP8 block

/// Which of WIRE_INF and WIRE_NAN are among n numbers in f32, f16 or bf16.
int wire_flags(const void *x, int dtype, int64_t n);

/// out[i] = the sum over k of in[k][i] / share, in the order of ranks (comm.h); each term is divided before. `out` may be one of the inputs.
void wire_sum(float *out, const float *const *in, int n, int64_t count, float share);

/// n numbers as e4m3 codes, a power of two for each block of 128 (the last may be shorter). Rounded to nearest even; the block's largest
/// finite magnitude lands in 224..448. Inf and nan become nan.
void wire_e4m3_encode(uint8_t *codes, float *scales, const float *x, int64_t n);
void wire_e4m3_decode(float *x, const uint8_t *codes, const float *scales, int64_t n);

#endif
