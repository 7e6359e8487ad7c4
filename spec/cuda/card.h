// A fake card: the part of the CUDA runtime and of cuBLASLt that cuda/gemm/*.c call, computed on
// the host with plain loops. It checks for what the real libraries refuse, so the host logic of
// products can be tested without a GPU.
#ifndef SPEC_CUDA_CARD_H
#define SPEC_CUDA_CARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { CARD_ALGORITHMS = 10 };

typedef struct fake_card {
  int   capability;                 // 90
  // the most algorithms that the heuristic offers; 0: none for any product
  int   offered;
  bool  no_bias;                    // none for products with a bias
  bool  no_epilogue;                // none for products with a GELU, its slope or column sums
  float epilogue_time;              // extra milliseconds of an epilogue
  float time[CARD_ALGORITHMS];      // milliseconds that each algorithm takes
  int   reduction[CARD_ALGORITHMS]; // its reduction scheme
  // workspace bytes that each needs per element of C; not offered above the allowed workspace
  int   workspace[CARD_ALGORITHMS];
  long  room;                       // bytes of scratch memory; 0: unlimited
  bool  capturing;                  // the stream is being captured
  bool  no_memory;                  // cudaMalloc fails from now on
  int   refused;                    // refuses the n-th product from now on; 0: none
  int   sample;                     // computes one in this many elements of C
  // FP8 sums as in Hopper's tensor cores (core/base/fp8_hopper.h), instead of exact ones
  bool  hopper;
  // counts of calls; the last algorithm and mode
  int   matmuls, heuristics, synchronizations, plain, finished, last_algorithm, last_fast;
  // products fused with a GELU, its slope or column sums; separate passes that computed these
  int   epilogues, passes;
  long  scratch_bytes;              // taken and not yet given back
  float running;                    // milliseconds of work queued so far
  long  memory;                     // cudaMalloc'ed pieces not freed
  char  error[4096];
} fake_card;
extern fake_card card;

/// Ends the program with a message unless `holds`.
#define CHECK(holds, ...)                                                \
  do {                                                                   \
    if (!(holds)) check_failed(__FILE__, __LINE__, #holds, __VA_ARGS__); \
  } while (0)
__attribute__((noreturn, format(printf, 4, 5)))
void check_failed(const char *file, int line, const char *what, const char *format, ...);

/// The tanh form of GELU, and its slope.
double gelu_of(double x);
double gelu_slope(double x);

struct CUstream_st;
/// Runs `run` on a copy of `what` (`bytes` long) in stream order.
void card_later(void (*run)(const void *what), const void *what, size_t bytes,
                struct CUstream_st *stream);

/// Elements by dtype (f32, f64, f16, bf16); `at` is an index in elements.
double element_get(const void *data, int dtype, int64_t at);
void   element_set(void *data, int dtype, int64_t at, double value);

#endif
