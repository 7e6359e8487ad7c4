// Two kernels. One computes products that cuBLASLt does not support; it is slower than cuBLASLt.
// The other rounds a finished product into an output that cuBLASLt cannot write. Called by gemm.c
// and gemm_codes.c.
#include "kernel/element.h"
#include "gemm.h"

namespace {

// A block of 32 x 8 threads computes 32 x 32 elements of C. A thread computes four elements of one
// column.
enum { TILE = 32, ROWS = 8 };

/// Returns the offset in x of the matrix at z, a flat index over all batch dimensions.
__device__ inline int64_t batch_offset(const gemm_product &p, const gemm_matrix &x, int64_t z)
{
  int64_t offset = 0;
  for (int d = p.batch_dims - 1; d >= 0; d--) {
    offset += z % p.batch[d] * x.batch[d];
    z /= p.batch[d];
  }
  return offset;
}

template <typename SUM>
__device__ inline void finish(const gemm_product &p, int64_t batch, int64_t i, int64_t j, SUM sum)
{
  int64_t at = batch + i * p.c.row + j * p.c.column;
  if (p.bias) sum += load_as<SUM>(p.bias, p.bias_dtype, j);
  if (p.accumulate) sum = load_as<SUM>(p.c.data, p.c.dtype, at) + sum;
  store_as(p.c.data, p.c.dtype, at, sum);
}

template <typename SUM>
__global__ void __launch_bounds__(TILE *ROWS)
  multiply(const __grid_constant__ gemm_product p, int64_t batches)
{
  __shared__ SUM a[TILE][TILE + 1], b[TILE][TILE + 1];   // a[row][k], b[k][column]
  const int x = threadIdx.x, y = threadIdx.y;
  const int64_t tiles_m = (p.m + TILE - 1) / TILE, tiles_n = (p.n + TILE - 1) / TILE,
                tiles = tiles_m * tiles_n * batches;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t z = tile / (tiles_m * tiles_n), in_batch = tile % (tiles_m * tiles_n);
    const int64_t first_m = in_batch / tiles_n * TILE, first_n = in_batch % tiles_n * TILE;
    const int64_t from_a = batch_offset(p, p.a, z), from_b = batch_offset(p, p.b, z);
    SUM sum[TILE / ROWS] = {};
    for (int64_t first_k = 0; first_k < p.k; first_k += TILE) {
#pragma unroll
      for (int r = 0; r < TILE; r += ROWS) {
        const int64_t m = first_m + y + r, k = first_k + x;
        a[y + r][x] =
          m < p.m && k < p.k ?
            load_as<SUM>(p.a.data, p.a.dtype, from_a + m * p.a.row + k * p.a.column) :
            SUM(0);
        const int64_t row = first_k + y + r, n = first_n + x;
        b[y + r][x] =
          row < p.k && n < p.n ?
            load_as<SUM>(p.b.data, p.b.dtype, from_b + row * p.b.row + n * p.b.column) :
            SUM(0);
      }
      __syncthreads();
      const int steps = p.k - first_k < TILE ? (int)(p.k - first_k) : TILE;
      for (int k = 0; k < steps; k++)
#pragma unroll
        for (int r = 0; r < TILE / ROWS; r++) sum[r] = fused(a[y + r * ROWS][k], b[k][x], sum[r]);
      __syncthreads();
    }
    const int64_t from_c = batch_offset(p, p.c, z);
#pragma unroll
    for (int r = 0; r < TILE / ROWS; r++) {
      const int64_t m = first_m + y + r * ROWS, n = first_n + x;
      if (m < p.m && n < p.n) finish(p, from_c, m, n, sum[r]);
    }
  }
}

template <typename SUM>
__global__ void round_into(const __grid_constant__ gemm_product p,
                           const __grid_constant__ gemm_matrix from, int64_t count)
{
  const int64_t step = (int64_t)gridDim.x * blockDim.x;
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
    const int64_t n = i % p.n, m = i / p.n % p.m, z = i / p.n / p.m;
    const SUM sum = static_cast<const SUM *>(
      from.data)[batch_offset(p, from, z) + m * from.row + n * from.column];
    finish(p, batch_offset(p, p.c, z), m, n, sum);
  }
}

int64_t batches_of(const gemm_product *p)
{
  int64_t batches = 1;
  for (int d = 0; d < p->batch_dims; d++) batches *= p->batch[d];
  return batches;
}

}  // namespace

extern "C" eng_status gemm_plain(const gemm_product *p)
{
  const int64_t batches = batches_of(p);
  const unsigned grid = capped_grid(parts(p->m, TILE) * parts(p->n, TILE) * batches, 16);
  const dim3 block(TILE, ROWS);
  if (p->a.dtype == ENG_f64 || p->b.dtype == ENG_f64 || p->c.dtype == ENG_f64)
    multiply<double><<<grid, block, 0, cuda_stream()>>>(*p, batches);
  else
    multiply<float><<<grid, block, 0, cuda_stream()>>>(*p, batches);
  return cuda_launched("matmul");
}

extern "C" eng_status gemm_finish(const gemm_product *p, const gemm_matrix *sum)
{
  const int64_t count = p->m * p->n * batches_of(p);
  const unsigned grid = capped_grid(parts(count, 256), 16);
  if (sum->dtype == ENG_f64) round_into<double><<<grid, 256, 0, cuda_stream()>>>(*p, *sum, count);
  else round_into<float><<<grid, 256, 0, cuda_stream()>>>(*p, *sum, count);
  return cuda_launched("matmul");
}
