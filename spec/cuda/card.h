// A card that is none: the CUDA runtime and cuBLASLt as far as cuda/gemm*.c call them, computed on the host with plain loops
// and checked for what the real ones would refuse, so that the host logic of products runs where there is no GPU.
#ifndef SPEC_CUDA_CARD_H
#define SPEC_CUDA_CARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { CARD_ALGORITHMS = 10 };

typedef struct fake_card {
  int   capability;                 // 90
  // algorithms the heuristic offers at most; 0: none for any product
  int   offered;
  bool  no_bias;                    // none for products with a bias
  bool  no_epilogue;                // none for products with a GELU, its slope or column sums
  float epilogue_time;              // milliseconds that those take more
  float time[CARD_ALGORITHMS];      // milliseconds each takes
  int   reduction[CARD_ALGORITHMS]; // its reduction scheme
  // bytes it wants for each element of C; it is not offered where that is more than is allowed
  int   workspace[CARD_ALGORITHMS];
  long  room;                       // bytes of scratch memory that there are; 0: no bound
  bool  capturing;                  // the stream is being captured
  bool  no_memory;                  // cudaMalloc fails from now on
  int   refused;                    // the how-manieth product from now on is refused; 0: none
  int   sample;                     // of the elements of C one in so many is computed
  // FP8 sums as Hopper's tensor cores make them (core/base/fp8_hopper.h); else exact ones
  bool  hopper;
  // what happened
  int   matmuls, heuristics, synchronizations, plain, finished, last_algorithm, last_fast;
  // products with a GELU, its slope or column sums; passes that made these apart
  int   epilogues, passes;
  long  scratch_bytes;              // taken and not given back
  float running;                    // milliseconds of work queued so far
  long  memory;                     // cudaMalloc'ed pieces not freed
  char  error[4096];
} fake_card;
extern fake_card card;

/// Ends the program with a line when `holds` is false.
#define CHECK(holds, ...)                                                \
  do {                                                                   \
    if (!(holds)) check_failed(__FILE__, __LINE__, #holds, __VA_ARGS__); \
  } while (0)
__attribute__((noreturn, format(printf, 4, 5)))
void check_failed(const char *file, int line, const char *what, const char *format, ...);

/// tanh's GELU and its slope.
double gelu_of(double x);
double gelu_slope(double x);

struct CUstream_st;
/// Runs a copy of `what`, of `bytes`, when its stream comes to it.
void card_later(void (*run)(const void *what), const void *what, size_t bytes,
                struct CUstream_st *stream);

/// Elements by dtype (f32, f64, f16, bf16), at an index in elements.
double element_get(const void *data, int dtype, int64_t at);
void   element_set(void *data, int dtype, int64_t at, double value);

#endif
