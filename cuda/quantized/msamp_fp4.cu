// Microsoft's FP4: msamp_fp4, bit-equal to core/cpu/reference_msamp.c, with the formulas of
// core/base/msamp_fp4.h. A block of threads takes one row. If the call clamps, the block finds each
// of the two bounds bit by bit: for each bit, it counts how many elements are below a candidate.
// Called through the device's table.
#include "kernel/element.h"

extern "C" {
#include "base/msamp_fp4.h"
#include "base/mx.h"
}

namespace {

enum { THREADS = 256, WARPS = THREADS / 32 };

struct job {
  const void *x;
  int       dtype;
  int64_t   columns;
  uint16_t *y, *gate;        // gate: NULL if not wanted
  uint8_t  *scale;
  uint32_t *top;             // the bits of x's largest magnitude so far
  double    clamp;           // the quantile that bounds a row, or 0 for no clamping
  bool      drops;           // y leaves out what clamping cut off
};

enum combination { LARGEST, SUM };

/// Returns the largest `value` of the block's threads, or the sum of all, to every thread. `room`
/// is shared memory.
template <combination HOW>
__device__ inline uint32_t combined(uint32_t value, uint32_t (&room)[WARPS])
{
  value = HOW == SUM ? __reduce_add_sync(0xFFFFFFFFu, value)
                     : __reduce_max_sync(0xFFFFFFFFu, value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = value;
  __syncthreads();
  uint32_t all = 0;
  for (int w = 0; w < WARPS; w++) all = HOW == SUM ? all + room[w] : max(all, room[w]);
  return all;
}

/// Returns the number at index `rank` (from 0) of the n numbers in ascending order.
__device__ inline uint16_t ranked(const uint16_t *order, int64_t n, int64_t rank,
                                  uint32_t (&room)[WARPS])
{
  uint32_t found = 0;        // the largest candidate so far with at most `rank` numbers below it
  for (int bit = 15; bit >= 0; bit--) {
    const uint32_t next = found | 1u << bit;
    uint32_t below = 0;
    for (int64_t i = threadIdx.x; i < n; i += THREADS) below += order[i] < next;
    if (combined<SUM>(below, room) <= rank) found = next;
  }
  return (uint16_t)found;
}

__global__ void __launch_bounds__(THREADS) quantize_row(const __grid_constant__ job p)
{
  __shared__ uint32_t room[WARPS];
  const int64_t n = p.columns, at = (int64_t)blockIdx.x * n;
  uint16_t *y = p.y + at;    // holds msamp_order(x) at first
  // `least` holds 0xFFFF minus the smallest number so far, so that a maximum finds the smallest
  uint32_t top = 0, least = 0, most = 0;
  for (int64_t i = threadIdx.x; i < n; i += THREADS) {
    const float v = (float)element_double(p.x, p.dtype, at + i);
    top = max(top, __float_as_uint(v) & 0x7FFFFFFFu);
    y[i] = msamp_order(bf16_from_f32(v));
    least = max(least, 0xFFFFu - y[i]);
    most = max(most, (uint32_t)y[i]);
  }
  top = combined<LARGEST>(top, room);
  if (threadIdx.x == 0) atomicMax(p.top, top);
  least = 0xFFFFu - combined<LARGEST>(least, room);
  most = combined<LARGEST>(most, room);
  if (p.clamp != 0) {
    least = ranked(y, n, msamp_rank(p.clamp, n, 0), room);
    most = ranked(y, n, msamp_rank(p.clamp, n, 1), room);
  }
  const float low = msamp_ordered((uint16_t)least), high = msamp_ordered((uint16_t)most),
              under = fabsf(low), amax = under > fabsf(high) ? under : fabsf(high);
  const uint8_t scale = msamp_scale(amax);
  const float factor = mx_inverse(scale), unit = ue8m0_to_f32(scale);
  if (threadIdx.x == 0) p.scale[blockIdx.x] = scale;
  for (int64_t i = threadIdx.x; i < n; i += THREADS) {
    const float v = msamp_ordered(y[i]), c = msamp_within(v, low, high), t = c * factor;
    y[i] = bf16_from_f32(msamp_round(t) * unit + (p.drops ? 0.0f : msamp_cut(v, c)));
    if (p.gate) p.gate[at + i] = bf16_from_f32(msamp_slope(bf16_to_f32(bf16_from_f32(t))));
  }
}

/// Turns *top, the bits of the largest magnitude, into the amax: any NaN becomes the canonical NaN.
/// Runs in one thread.
__global__ void finish(uint32_t *top)
{
  if (*top > 0x7F800000u) *top = 0x7FC00000u;
}

}  // namespace

extern "C" eng_status cuda_msamp_fp4(const op_call *call)
{
  const auto &a = call->msamp_fp4;
  const tensor *x = call->in[0];
  job p = {};
  p.x = x->data;
  p.dtype = x->dtype;
  p.columns = x->shape[x->ndim - 1];
  p.y = (uint16_t *)call->out[0]->data;
  p.gate = a.gate ? (uint16_t *)call->out[3]->data : NULL;
  p.scale = (uint8_t *)call->out[1]->data;
  p.top = (uint32_t *)call->out[2]->data;
  p.clamp = a.clamp;
  p.drops = a.drops;
  const int64_t rows = call->out[1]->count;
  FAIL_IF(rows > INT32_MAX, ENG_ERR_VALUE, "msamp_fp4: expected at most 2^31 - 1 rows, got %lld; "
          "hint: a smaller batch", (long long)rows);
  CUDA_TRY(cudaMemsetAsync(p.top, 0, sizeof *p.top, cuda_stream()));
  if (rows > 0) quantize_row<<<(unsigned)rows, THREADS, 0, cuda_stream()>>>(p);
  finish<<<1, 1, 0, cuda_stream()>>>(p.top);
  return cuda_launched("msamp_fp4");
}
