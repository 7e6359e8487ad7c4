// Computes fp8_matmul by the scalar formulas of core/base/fp8*.h, for any blocks, layouts and
// accumulators, on any card, with the same bits as the reference. It is meant for experiments and
// for checking the tensor cores, which are much faster. Called by fp8_matmul.c.
#include "runtime/device.h"
#include "kernel/element.h"
#include "fp8_plain.h"

extern "C" {
#include "base/fp8_hopper.h"
#include "base/fp8_layout.h"
}

namespace {

// a block of 16 x 16 threads computes 16 x 16 elements, STEP steps of K at a time
enum { SIDE = 16, STEP = HOPPER_GROUP };

/// An operand of the product, transposed or not. In element (i, k), i is the row of y (for a) or
/// the column of y (for b).
struct operand {
  const uint8_t *data;
  const float   *scale;
  fp8_scales     at;                      // layout of `scale`, for elements (i, k)
  int64_t        i_stride, k_stride;
  int            fraction;                // fraction bits: 3 for e4m3, 2 for e5m2
};

struct product {
  operand a, b;
  int64_t m, n, k, stretch, promotion;    // stretch: adjacent steps of K that share scales
  fp8_order order;
  bool    adds;
  void   *y;
  int     y_dtype, bias_dtype;
  int64_t y_row, y_column, bias_stride;
  const void *bias;
};

__device__ inline float scale_of(const operand &x, int64_t i, int64_t k)
{ return x.scale[fp8_scale_at(&x.at, i, k)]; }

/// Loads the codes of 16 rows of an operand from step k on. Elements outside the operand become
/// zeros, which affect no result.
__device__ inline void fetch(uint8_t (*tile)[STEP + 4], const operand &x, int64_t rows,
                             int64_t first, int64_t k, int steps)
{
  for (int t = threadIdx.y * SIDE + threadIdx.x; t < SIDE * STEP; t += SIDE * SIDE) {
    const bool along_k = x.k_stride == 1;   // lets consecutive threads read adjacent bytes
    const int i = along_k ? t / STEP : t % SIDE, j = along_k ? t % STEP : t / SIDE;
    tile[i][j] =
      first + i < rows && j < steps ? x.data[(first + i) * x.i_stride + (k + j) * x.k_stride] : 0;
  }
}

template <int MODEL>
__global__ void __launch_bounds__(SIDE *SIDE) multiply(const __grid_constant__ product p)
{
  __shared__ uint8_t a[SIDE][STEP + 4], b[SIDE][STEP + 4];
  const int64_t tiles_n = (p.n + SIDE - 1) / SIDE, tiles = (p.m + SIDE - 1) / SIDE * tiles_n;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t first_i = tile / tiles_n * SIDE, first_j = tile % tiles_n * SIDE;
    const int64_t i = first_i + threadIdx.y, j = first_j + threadIdx.x;
    const bool inside = i < p.m && j < p.n;
    float total = 0;
    double exact = 0;
    for (int64_t k0 = 0; k0 < p.k; k0 += p.stretch) {
      const int64_t end = p.k - k0 < p.stretch ? p.k : k0 + p.stretch;
      float sum = 0, scale_a = 0, scale_b = 0;
      if (inside) {
        scale_a = scale_of(p.a, i, k0);
        scale_b = scale_of(p.b, j, k0);
      }
      for (int64_t at = k0; at < end; at += p.promotion) {
        const int64_t stop = end - at < p.promotion ? end : at + p.promotion;
        float part = 0;
        double wide = 0;
        for (int64_t k = at; k < stop; k += STEP) {
          const int steps = stop - k < STEP ? (int)(stop - k) : STEP;
          __syncthreads();
          fetch(a, p.a, p.m, first_i, k, steps);
          fetch(b, p.b, p.n, first_j, k, steps);
          __syncthreads();
          if constexpr (MODEL == ENG_ACCUMULATE_HOPPER) {
            part = hopper_group(a[threadIdx.y], 1, p.a.fraction, b[threadIdx.x], 1, p.b.fraction,
                                steps, part);
          } else {
            for (int step = 0; step < steps; step++) {
              const int s = MODEL == ENG_ACCUMULATE_FP32 ? (int)fp8_fp32_order(step, steps) : step;
              // the product is exact
              const float multiplied = fp8_to_f32(a[threadIdx.y][s], p.a.fraction) *
                                       fp8_to_f32(b[threadIdx.x][s], p.b.fraction);
              if (MODEL == ENG_ACCUMULATE_EXACT) wide += (double)multiplied;
              else if (MODEL == ENG_ACCUMULATE_FP32) part += multiplied;
              else
                part = e4m3_to_f32(e4m3_from_f32(
                  part + e4m3_to_f32(e4m3_from_f32(multiplied, FP8_SATURATE)), FP8_SATURATE));
            }
          }
        }
        if (MODEL == ENG_ACCUMULATE_EXACT) exact += wide * (double)scale_a * (double)scale_b;
        else sum += part;
      }
      total = fp8_add_scaled(p.order, sum, scale_a, scale_b, total);
    }
    if (!inside) continue;
    const int64_t place = i * p.y_row + j * p.y_column;
    const double addend = p.bias ? element_double(p.bias, p.bias_dtype, j * p.bias_stride) : 0;
    const double value = MODEL == ENG_ACCUMULATE_EXACT ? exact + addend :
                         p.bias                        ? (double)(total + (float)addend) :
                                                         (double)total;
    const double before = p.adds ? element_double(p.y, p.y_dtype, place) : 0;
    element_store(p.y, p.y_dtype, place, value);
    if (p.adds)
      element_store(p.y, p.y_dtype, place, before + element_double(p.y, p.y_dtype, place));
  }
}

/// Describes q as an operand. With `along_k`, the product sums over q's second stored dimension,
/// otherwise over its first.
operand operand_of(const tensor *q, const tensor *scale, bool along_k, int64_t block_rows,
                   int64_t block_columns)
{
  const fp8_scales stored =
    fp8_scales_for(block_rows, block_columns, q->shape[0], q->shape[1], nullptr);
  return {static_cast<const uint8_t *>(q->data),
          static_cast<const float *>(scale->data),
          along_k ? stored : fp8_scales_turned(stored),
          along_k ? q->shape[1] : 1,
          along_k ? 1 : q->shape[1],
          q->dtype == ENG_e4m3 ? 3 : 2};
}

}  // namespace

extern "C" eng_status fp8_plain(const op_call *call)
{
  const tensor *y = call->out[0], *bias = call->in[4];
  const bool ta = call->fp8_matmul.transpose_a != 0, tb = call->fp8_matmul.transpose_b != 0;
  product p = {};
  const int64_t a_rows = call->fp8_matmul.a_rows, a_columns = call->fp8_matmul.a_columns,
                b_rows = call->fp8_matmul.b_rows, b_columns = call->fp8_matmul.b_columns;
  p.a = operand_of(call->in[0], call->in[1], !ta, a_rows, a_columns);
  p.b = operand_of(call->in[2], call->in[3], tb, b_rows, b_columns);
  p.m = y->shape[0];
  p.n = y->shape[1];
  p.k = call->in[0]->shape[ta ? 0 : 1];
  p.stretch = min(p.a.at.inner_block, p.b.at.inner_block);
  p.promotion = call->fp8_matmul.promotion ? call->fp8_matmul.promotion : INT64_MAX / 2;
  p.order = fp8_scale_order(ta ? a_columns : a_rows, ta ? a_rows : a_columns,
                            tb ? b_rows : b_columns, tb ? b_columns : b_rows);
  p.adds = call->fp8_matmul.add != 0;
  p.y = y->data;
  p.y_dtype = y->dtype;
  p.y_row = y->stride[0];
  p.y_column = y->stride[1];
  if (bias) {
    p.bias = bias->data;
    p.bias_dtype = bias->dtype;
    p.bias_stride = bias->stride[0];
  }
  const unsigned grid = capped_grid(parts(p.m, SIDE) * parts(p.n, SIDE), 16);
  const int64_t model = call->fp8_matmul.accumulator;
  auto kernel = model == ENG_ACCUMULATE_FP32   ? multiply<ENG_ACCUMULATE_FP32> :
                model == ENG_ACCUMULATE_EXACT  ? multiply<ENG_ACCUMULATE_EXACT> :
                model == ENG_ACCUMULATE_HOPPER ? multiply<ENG_ACCUMULATE_HOPPER> :
                                                 multiply<ENG_ACCUMULATE_E4M3>;
  kernel<<<grid, dim3(SIDE, SIDE), 0, cuda_stream()>>>(p);
  return cuda_launched("fp8_matmul");
}
