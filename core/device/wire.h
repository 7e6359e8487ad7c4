// Host kernels for messages between ranks: checks for inf and nan, sums, and conversion to FP8 in
// blocks. They are in cpu/wire.c, because files in cpu/ are compiled with the flags for kernels.
// Called by dist/.
#pragma once

#include "engine.h"

enum { WIRE_INF = 2, WIRE_NAN = 4, WIRE_OVERFLOW = 8 };  // as in eng_parallel_flags
enum { WIRE_BLOCK = 128 };                 // elements of an FP8 block

/// Returns which of inf and nan occur among n numbers in f32, f16 or bf16: WIRE_INF, WIRE_NAN,
/// their sum, or 0.
int wire_flags(const void *x, int dtype, int64_t n);

/// Computes out[i] = the sum over k < n of in[k][i] / share, for i < count, in the order of sums
/// that dist/comm.h defines. Each term is divided before it is added. `out` may be one of the
/// inputs.
void wire_sum(float *out, const float *const *in, int n, int64_t count, float share);

/// Convert n numbers to e4m3 codes, with a power-of-two scale for each block of 128 (the last block
/// may be shorter), and back. Encoding rounds to nearest even, and scales each block so that its
/// largest finite magnitude lies in 224..448, unless this magnitude is below 2^-119. Numbers that
/// round to 256 * 2^120, which is inf in f32, become 240 * 2^120. Inf and nan become nan.
void wire_e4m3_encode(uint8_t *codes, float *scales, const float *x, int64_t n);
void wire_e4m3_decode(float *x, const uint8_t *codes, const float *scales, int64_t n);
