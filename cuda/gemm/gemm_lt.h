// Products through cuBLASLt. gemm_lt.c keeps descriptors and an algorithm for each problem. Called
// by gemm.c, gemm_fused.c and gemm_codes.c.
#pragma once

#include "gemm_layout.h"

/// The operands of a problem, in device memory and in cuBLASLt's order (its A is our B). Scales are
/// NULL except for FP8 and microscaled operands. `alpha` holds two numbers: the factor on the
/// product and the factor on C. It is in device memory for NVFP4, in host memory for MX, and NULL
/// for all other operands. `side` is the memory that the operation `problem->after` reads or
/// writes.
typedef struct gemm_operands {
  const void  *a, *b;
  void        *c;
  const void  *bias;
  const void  *scale_a, *scale_b;
  const float *alpha;
  void        *side;
} gemm_operands;

/// Queues the product. *done is false, with nothing written, if cuBLASLt has no algorithm for it.
eng_status gemm_lt_run(bool *done, const gemm_problem *problem, const gemm_operands *on);

/// Sets *ns to the time in ns that the search measured for the problem's algorithm, or to 0 if the
/// algorithm was not timed, or to -1 if there is no algorithm. Runs the search first if necessary;
/// the search overwrites C, unless the product accumulates.
eng_status gemm_lt_time(int64_t *ns, const gemm_problem *problem, const gemm_operands *on);
