// NF4: nf4_quantize and nf4_dequantize, bit-equal to core/cpu/reference_nf4.c, with the tables of
// core/base/nf4.h. A warp quantizes a block. If the absmaxes (largest magnitudes of the blocks) are
// quantized too and no offset is given, one thread computes their mean, by a sum in f64 in the
// CPU's order. This is slow, but weights are quantized only once. Called through the device's
// table.
#include "kernel/element.h"

extern "C" {
#include "base/nf4.h"
}

namespace {

enum { THREADS = 256, WARPS = THREADS / 32, EIGHT = 8, PIECE = 1024 };

/// The tables that kernels take as arguments. four_bits has NF4's numbers and the midpoints between
/// them; eight_bits has the number that each code of an absmax stands for.
struct four_bits { float number[16], middle[15]; };
struct eight_bits { float map[NF4_GROUP]; };

four_bits four_bits_of(void)
{
  four_bits t;
  for (int k = 0; k < 16; k++) t.number[k] = nf4_number[k];
  for (int k = 0; k < 15; k++) t.middle[k] = (nf4_number[k] + nf4_number[k + 1]) / 2;
  return t;
}

__device__ inline uint32_t nearest(float x, const four_bits &t)
{
  uint32_t code = 0;
#pragma unroll
  for (int k = 0; k < 15; k++) code += !(x <= t.middle[k]);
  return code;
}

__global__ void __launch_bounds__(THREADS)
quantize_blocks(const void *x, int dtype, int64_t count, int64_t size,
                const __grid_constant__ four_bits t, uint8_t *q, float *absmax)
{
  const int64_t block = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32, from = block * size,
                lane = threadIdx.x % 32;
  if (from >= count) return;
  const int64_t n = min(size, count - from);
  uint32_t top = 0;   // bits of the largest magnitude; bits of a NaN exceed those of any number
  for (int64_t i = lane; i < n; i += 32)
    top = max(top, __float_as_uint((float)element_double(x, dtype, from + i)) & 0x7FFFFFFFu);
  const float largest = __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, top)),
              divisor = nf4_divisor(largest), factor = 1.0f / divisor;
  for (int64_t i = 2 * lane; i < n; i += 64) {
    uint32_t code[2] = {7, 7};
    for (int k = 0; k < 2 && i + k < n; k++) {
      const float v = (float)element_double(x, dtype, from + i + k);
      code[k] = nearest(nf4_within_one(n < size ? v / divisor : v * factor), t);
    }
    q[(from + i) / 2] = (uint8_t)(code[0] << 4 | code[1]);
  }
  if (lane == 0) absmax[block] = n < size ? divisor : largest;
}

/// Sets *offset to the mean of all absmaxes or, if `given` is not NULL, to *given. Runs in one
/// block, in which one thread adds.
__global__ void __launch_bounds__(THREADS)
find_offset(const float *absmax, int64_t n, const float *given, float *offset)
{
  __shared__ float piece[PIECE];
  double sum = 0;
  for (int64_t from = 0; from < n && !given; from += PIECE) {
    const int there = (int)min((int64_t)PIECE, n - from);
    __syncthreads();
    for (int i = threadIdx.x; i < there; i += THREADS) piece[i] = absmax[from + i];
    __syncthreads();
    for (int i = 0; i < there && threadIdx.x == 0; i++) sum += piece[i];
  }
  if (threadIdx.x == 0) *offset = given ? *given : n ? (float)(sum / (double)n) : 0.0f;
}

/// Computes the codes of a group of absmaxes, one per thread, and the group's largest magnitude.
__global__ void __launch_bounds__(NF4_GROUP)
quantize_absmaxes(const float *absmax, int64_t n, const float *offset,
                  const __grid_constant__ eight_bits t, uint8_t *code, float *group)
{
  __shared__ float map[NF4_GROUP];
  __shared__ uint32_t warps[NF4_GROUP / 32];
  const int64_t at = (int64_t)blockIdx.x * NF4_GROUP + threadIdx.x;
  const float x = at < n ? absmax[at] - *offset : 0.0f;
  uint32_t top = __float_as_uint(x) & 0x7FFFFFFFu;
  top = __reduce_max_sync(0xFFFFFFFFu, top > 0x7F800000u ? 0u : top);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = top;
  map[threadIdx.x] = t.map[threadIdx.x];
  __syncthreads();
  for (int w = 0; w < NF4_GROUP / 32; w++) top = max(top, warps[w]);
  const float largest = __uint_as_float(top);
  if (threadIdx.x == 0) group[blockIdx.x] = largest;
  if (at >= n) return;
  // finds, by bisection, the number in `map` that is nearest to v; of two equally near, the first
  const float v = nf4_bin_number(nf4_bin(x * (1.0f / largest)));
  int low = 0, high = NF4_GROUP - 1;
  while (low < high) {
    const int k = (low + high) / 2;
    if (0.5f * (map[k] + map[k + 1]) < v) low = k + 1;
    else high = k;
  }
  code[at] = largest == 0 ? 0 : (uint8_t)low;
}

struct unscaling {
  const uint8_t *q, *code;
  const float   *absmax, *group, *offset;   // if `group` is not NULL, `code` replaces `absmax`
  void          *y;
  int64_t        count, size;
};

/// Each thread decodes eight adjacent codes, which are in one block.
template <typename T> __global__ void __launch_bounds__(THREADS)
multiply_codes(const unscaling p, const __grid_constant__ four_bits four,
               const __grid_constant__ eight_bits eight)
{
  __shared__ float number[16], map[NF4_GROUP];
  if (threadIdx.x < 16) number[threadIdx.x] = four.number[threadIdx.x];
  map[threadIdx.x] = eight.map[threadIdx.x];
  __syncthreads();
  const int64_t first = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * EIGHT,
                block = first / p.size;
  if (first >= p.count) return;
  const float absmax = p.group ? map[p.code[block]] * p.group[block / NF4_GROUP] + *p.offset :
                                 p.absmax[block];
  T *y = (T *)p.y;
  for (int64_t i = first; i < first + EIGHT && i < p.count; i++)
    narrow(y[i], number[p.q[i / 2] >> (i % 2 ? 0 : 4) & 15] * absmax);
}

}  // namespace

extern "C" eng_status cuda_nf4_quantize(const op_call *call)
{
  const tensor *x = call->in[0];
  float *absmax = (float *)call->out[1]->data;
  const int64_t n = call->out[1]->count;
  const bool nested = call->nf4_quantize.nested;
  float *offset = nested ? (float *)call->out[4]->data : NULL;
  if (n > 0)
    quantize_blocks<<<(unsigned)parts(n, WARPS), THREADS, 0, cuda_stream()>>>(
      x->data, x->dtype, x->count, call->nf4_quantize.block, four_bits_of(),
      (uint8_t *)call->out[0]->data, absmax);
  if (nested)
    find_offset<<<1, THREADS, 0, cuda_stream()>>>(
      absmax, n, (const float *)data_of(call->in[1]), offset);
  if (nested && n > 0) {
    eight_bits t;
    nf4_map(t.map);
    quantize_absmaxes<<<(unsigned)parts(n, NF4_GROUP), NF4_GROUP, 0, cuda_stream()>>>(
      absmax, n, offset, t, (uint8_t *)call->out[2]->data, (float *)call->out[3]->data);
  }
  return cuda_launched("nf4_quantize");
}

extern "C" eng_status cuda_nf4_dequantize(const op_call *call)
{
  const tensor *y = call->out[0], *scale = call->in[1];
  const four_bits four = four_bits_of();
  eight_bits eight;
  nf4_map(eight.map);
  unscaling p = {};
  p.q = (const uint8_t *)call->in[0]->data;
  p.code = (const uint8_t *)scale->data;
  p.absmax = (const float *)scale->data;
  if (call->in[2]) {
    p.group = (const float *)call->in[2]->data;
    p.offset = (const float *)call->in[3]->data;
  }
  p.y = y->data;
  p.count = y->count;
  p.size = call->nf4_dequantize.block;
  const unsigned blocks = (unsigned)parts(p.count, THREADS * EIGHT);
  with_format(y->dtype, [&](auto t) {
    multiply_codes<decltype(t)><<<blocks, THREADS, 0, cuda_stream()>>>(p, four, eight);
  });
  return cuda_launched("nf4_dequantize");
}
