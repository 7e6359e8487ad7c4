// Host kernels for gradients between ranks: a check for inf and nan, sums, and FP8 in blocks. Bound
// by memory bandwidth, so compiled with the CPU's vector kernels (cpu/wire.c). Called by dist/.
#pragma once

#include "engine.h"

enum { WIRE_INF = 2, WIRE_NAN = 4, WIRE_OVERFLOW = 8 };  // as in eng_parallel_flags
enum { WIRE_BLOCK = 128 };                 // elements of an FP8 block

/// Reports whether n numbers in f32, f16 or bf16 contain inf or nan, as WIRE_INF and WIRE_NAN.
int wire_flags(const void *x, int dtype, int64_t n);

/// out[i] = the sum over k of in[k][i] / share, in the order of comm.h; each term is divided first.
/// `out` may be one of the inputs.
void wire_sum(float *out, const float *const *in, int n, int64_t count, float share);

/// Converts n numbers to e4m3 codes with one power of two for each block of 128 (the last block may
/// be shorter), and back. Rounds to nearest even; the block's largest finite magnitude maps into
/// 224..448. Inf and nan become nan.
void wire_e4m3_encode(uint8_t *codes, float *scales, const float *x, int64_t n);
void wire_e4m3_decode(float *x, const uint8_t *codes, const float *scales, int64_t n);
