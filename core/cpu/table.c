// Fills the CPU device's table with the functions of one instruction set: the kernels that KERNEL
// (rows.h) defines, and the passes over all parameters. A missing kernel is a linker error. Called
// by cpu.c; owns nothing.
#include "device/backend.h"
#include "simd.h"

#define ENG_KERNEL(name) op_kernel ISA_NAME(cpu_##name);
#include "ops.def"
eng_status ISA_NAME(cpu_gradstats)(const param_span *spans, int n, unsigned needs,
                                   eng_tensor_stats *stats);
eng_status ISA_NAME(cpu_optimize)(const param_span *spans, int n, const eng_update *update);
eng_status ISA_NAME(cpu_unscale)(const param_span *spans, int n, double factor,
                                 float *const *target, int *found_inf);

void ISA_NAME(cpu_fill)(backend *b)
{
#define ENG_KERNEL(name) b->kernel[ENG_OP_##name] = ISA_NAME(cpu_##name);
#include "ops.def"
  b->gradstats = ISA_NAME(cpu_gradstats);
  b->optimize = ISA_NAME(cpu_optimize);
  b->unscale = ISA_NAME(cpu_unscale);
}
