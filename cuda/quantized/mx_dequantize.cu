// mx_dequantize, and mx_matmul by the scalar formula of core/base/mx_blackwell.h, which is slow.
// Both are bit-equal to core/cpu/reference_mx.c. mx_product.cu uses the formula for calls that
// tensor cores do not support. Called through the device's table and by mx_product.cu.
#include "kernel/element.h"
#include "fp8_plain.h"

extern "C" {
#include "base/mx_blackwell.h"
}

namespace {

enum { THREADS = 256, EIGHT = 8, TILE = 16 };

struct unscaling {
  const uint8_t *q, *scale;
  const float   *amax;                 // of the tensor; NULL if the tensor has no scale of its own
  void          *y;
  int64_t        rows, columns, block_rows, block_columns;
  int            format, rule;
};

/// Each thread decodes eight adjacent codes of a row with a table of the format's numbers.
template <typename T> __global__ void __launch_bounds__(THREADS) multiply_codes(const unscaling p)
{
  __shared__ float number[256];
  number[threadIdx.x] = mx_value((uint8_t)threadIdx.x, mx_format_of(p.format));
  __syncthreads();
  const int64_t groups = (p.columns + EIGHT - 1) / EIGHT,
                at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (at >= groups * p.rows) return;
  const int64_t r = at / groups, c = at % groups * EIGHT, first = r * p.columns + c;
  const int there = (int)min((int64_t)EIGHT, p.columns - c);
  const float whole = p.amax ? nvfp4_decode_scale(*p.amax, p.rule) : 1.0f;
  const int64_t across = (p.columns + p.block_columns - 1) / p.block_columns;
  int64_t block = c / p.block_columns, next = (block + 1) * p.block_columns;
  const uint8_t *of_row = p.scale + r / p.block_rows * across;
  T *y = (T *)p.y + first;
  for (int k = 0; k < there; k++) {
    if (c + k == next) {
      block++;
      next += p.block_columns;
    }
    const int64_t i = first + k;
    const uint8_t code = mx_packed(p.format) ? p.q[i / 2] >> i % 2 * 4 & 15 : p.q[i];
    narrow(y[k], mx_is_nvfp4(p.rule) ? number[code] * e4m3_to_f32(of_row[block]) * whole :
                                       number[code] * ue8m0_to_f32(of_row[block]));
  }
}

// ------------------------------------------------------------------ products

/// An operand of a product: rows of codes, with `across` scales to a row. A scale covers `high`
/// rows by `block` codes.
struct operand {
  const uint8_t *q, *scale;
  const float   *amax;
  int64_t        rows, across, block, high;
  int            format, rule;
};

/// Decodes n codes of each of 16 rows of an operand, from step k of K on, and the scales of these
/// codes.
__device__ inline void fetch(float (*number)[BLACKWELL_MOST + 1],
                             float (*scale)[BLACKWELL_MOST / 16 + 1], const operand &x,
                             int64_t first, int64_t k, int64_t K, int n)
{
  for (int t = threadIdx.y * TILE + threadIdx.x; t < TILE * n; t += TILE * TILE) {
    const int row = t / n, i = t % n;
    if (first + row >= x.rows) continue;
    const int64_t at = (first + row) * K + k + i;
    const uint8_t code = mx_packed(x.format) ? x.q[at / 2] >> at % 2 * 4 & 15 : x.q[at];
    number[row][i] = mx_value(code, mx_format_of(x.format));
    if (i % 16) continue;
    scale[row][i / 16] = blackwell_scale(
      x.scale[(first + row) / x.high * x.across + (k + i) / x.block], x.rule);
  }
}

/// A block of 16 x 16 threads computes 16 x 16 elements of y [a.rows x b.rows].
__global__ void __launch_bounds__(TILE *TILE)
multiply(const operand a, const operand b, int64_t K, double factor, void *y, int dtype, bool add)
{
  __shared__ float x[2][TILE][BLACKWELL_MOST + 1], scale[2][TILE][BLACKWELL_MOST / 16 + 1];
  const int n = blackwell_products(mx_packed(a.format));
  const int64_t tiles_across = (b.rows + TILE - 1) / TILE,
                tiles = (a.rows + TILE - 1) / TILE * tiles_across;
  const float alpha = mx_alpha(a.amax, a.rule, b.amax, b.rule, factor);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t i0 = tile / tiles_across * TILE, j0 = tile % tiles_across * TILE,
                  i = i0 + threadIdx.y, j = j0 + threadIdx.x;
    float sum = 0;
    for (int64_t k = 0; k < K; k += n) {
      __syncthreads();
      fetch(x[0], scale[0], a, i0, k, K, n);
      fetch(x[1], scale[1], b, j0, k, K, n);
      __syncthreads();
      if (i < a.rows && j < b.rows)
        sum = blackwell_group(x[0][threadIdx.y], mx_format_of(a.format), scale[0][threadIdx.y],
                              x[1][threadIdx.x], mx_format_of(b.format), scale[1][threadIdx.x],
                              a.rule, sum);
    }
    if (i >= a.rows || j >= b.rows) continue;
    sum *= alpha;
    if (add) sum += load_as<float>(y, dtype, i * b.rows + j);
    store_as(y, dtype, i * b.rows + j, sum);
  }
}

operand operand_of(const op_call *call, int side, int64_t K)
{
  const tensor *q = call->in[2 * side], *scale = call->in[2 * side + 1];
  operand x = {};
  x.q = (const uint8_t *)q->data;
  x.scale = (const uint8_t *)scale->data;
  x.amax = (const float *)data_of(call->in[4 + side]);
  x.rows = q->shape[0];
  x.across = scale->shape[1];
  x.block = x.across ? K / x.across : 1;
  x.high = scale->shape[0] ? x.rows / scale->shape[0] : 1;
  x.rule = (int)(side ? call->mx_matmul.rule_b : call->mx_matmul.rule_a);
  x.format = (int)(side ? call->mx_matmul.format_b : call->mx_matmul.format_a);
  return x;
}

}  // namespace

extern "C" eng_status cuda_mx_dequantize(const op_call *call)
{
  const auto &a = call->mx_dequantize;
  const tensor *y = call->out[0];
  unscaling p = {};
  p.q = (const uint8_t *)call->in[0]->data;
  p.scale = (const uint8_t *)call->in[1]->data;
  p.amax = (const float *)data_of(call->in[2]);
  p.y = y->data;
  p.columns = y->shape[y->ndim - 1];
  p.rows = y->count / p.columns;
  p.block_rows = a.block_rows;
  p.block_columns = a.block_columns;
  p.format = (int)a.format;
  p.rule = (int)a.rule;
  const unsigned blocks = (unsigned)parts(p.rows * parts(p.columns, EIGHT), THREADS);
  with_format(y->dtype, [&](auto t) {
    multiply_codes<decltype(t)><<<blocks, THREADS, 0, cuda_stream()>>>(p);
  });
  return cuda_launched("mx_dequantize");
}

extern "C" eng_status mx_plain(const op_call *call)
{
  const int64_t K = call->in[0]->shape[1] * (mx_packed(call->mx_matmul.format_a) ? 2 : 1);
  const operand a = operand_of(call, 0, K), b = operand_of(call, 1, K);
  const unsigned grid = capped_grid(parts(a.rows, TILE) * parts(b.rows, TILE), 16);
  const tensor *y = call->out[0];
  multiply<<<grid, dim3(TILE, TILE), 0, cuda_stream()>>>(
    a, b, K, call->mx_matmul.factor, y->data, y->dtype, call->mx_matmul.add != 0);
  return cuda_launched("mx_matmul");
}
