// The CUDA device's table of functions: a kernel cuda_<name> for each operation of ops.def whose
// layout is ANY or ROWS, the passes over all parameters, the functions of runtime/, and two that
// tell which FP8 and MX products the card supports. eng_cuda_backend, the only function that the
// plug-in exports, passes the table to the core. This file may use every folder of cuda/, and no
// folder uses this file. Called by core/device/plugin.c.
#include "gemm/gemm_codes.h"
#include "parameters/passes.h"
#include "quantized/fp8_plain.h"
#include "runtime/device.h"
#include "runtime/runtime.h"

// Declares the kernels. Linking fails if an operation has none.
#define ENG_KERNEL(name) op_kernel cuda_##name;
#include "ops.def"

// Only the emulated card defines this function (spec/cuda/emulator/runtime.cpp).
__attribute__((weak)) extern void card_mark(void *memory, int64_t bytes, bool out);

static const backend device = {
  .name = "cuda",
  .kernel = {
#define ENG_KERNEL(name) [ENG_OP_##name] = cuda_##name,
#include "ops.def"
  },
  .gradstats = cuda_gradstats,
  .optimize = cuda_optimize,
  .unscale = cuda_unscale,
  .gradstats_start = cuda_gradstats_start,
  .gradstats_fetch = cuda_gradstats_fetch,
  .space = SPACE_CUDA,
  .memory = {.take = cuda_take, .give = cuda_give, .capacity = cuda_capacity, .mark = card_mark},
  .move = cuda_move,
  .clear = cuda_clear,
  .synchronize = cuda_synchronize,
  .describe = cuda_describe,
  .capture_begin = cuda_capture_begin,
  .capture_end = cuda_capture_end,
  .graph_launch = cuda_graph_launch,
  .graph_free = cuda_graph_free,
  .fp8 = cuda_fp8,
  .mx = mx_product_supported,
  .identity = cuda_identity,
  .stream_new = cuda_stream_new,
  .stream_follow = cuda_stream_follow,
  .stream_done = cuda_stream_done,
  .stream_mark = cuda_stream_mark,
  .stream_reached = cuda_stream_reached,
  .stream_forget = cuda_stream_forget,
  .stream_move = cuda_stream_move,
  .wire_pack = cuda_wire_pack,
  .wire_unpack = cuda_wire_unpack,
  .wire_sum = cuda_wire_sum,
};

__attribute__((visibility("default")))
backend_plugin eng_cuda_backend;

const backend *eng_cuda_backend(const backend_host *host)
{
  if (!host_accept(host)) return NULL;
  return cuda_open() == ENG_OK ? &device : NULL;
}
