// Layer norm, RMS norm and their gradients in plain loops, in f64: for f64, for x with y, dy or dx
// of another format, and for rows that are too long for registers. Called by norm.cu.
#include "norm.h"

#include "kernel/element.h"

enum { PLAIN_THREADS = 256 };

__global__ void __launch_bounds__(PLAIN_THREADS) plain_rows(const __grid_constant__ norm_call p)
{
  __shared__ double room[2][PLAIN_THREADS / 32];
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    int64_t first = row * p.n;
    double sum = 0, squares = 0, mean = 0;
    if (p.centred) {
      for (int i = threadIdx.x; i < p.n; i += PLAIN_THREADS)
        sum += element_double(p.x, p.x_dtype, first + i);
      mean = row_sum<PLAIN_THREADS>(sum, room[0]) / p.n;
    }
    for (int i = threadIdx.x; i < p.n; i += PLAIN_THREADS) {
      double d = element_double(p.x, p.x_dtype, first + i) - mean;
      squares += d * d;
    }
    double rstd = 1.0 / sqrt(row_sum<PLAIN_THREADS>(squares, room[1]) / p.n + p.eps);
    if (threadIdx.x == 0) {
      if (p.out_means) element_store(p.out_means, p.out_means_dtype, row, mean);
      if (p.out_rstds) element_store(p.out_rstds, p.out_rstds_dtype, row, rstd);
    }
    for (int i = threadIdx.x; i < p.n; i += PLAIN_THREADS) {
      double h = (element_double(p.x, p.x_dtype, first + i) - mean) * rstd,
             w = p.weight ? element_double(p.weight, p.weight_dtype, i) : 1.0;
      element_store(p.y, p.y_dtype, first + i,
                   h * w + (p.bias ? element_double(p.bias, p.bias_dtype, i) : 0.0));
    }
    __syncthreads();
  }
}

__device__ static inline double normed(const norm_call &p, int64_t row, int64_t i)
{
  double mean = p.means ? element_double(p.means, p.means_dtype, row) : 0.0;
  return (element_double(p.x, p.x_dtype, row * p.n + i) - mean) *
         element_double(p.rstds, p.rstds_dtype, row);
}

__global__ void __launch_bounds__(PLAIN_THREADS)
  plain_grad_rows(const __grid_constant__ norm_call p)
{
  __shared__ double room[2][PLAIN_THREADS / 32];
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    double sum_g = 0, sum_gh = 0;
    for (int i = threadIdx.x; i < p.n; i += PLAIN_THREADS) {
      double g = element_double(p.dy, p.dy_dtype, row * p.n + i) *
                 (p.weight ? element_double(p.weight, p.weight_dtype, i) : 1.0);
      sum_g += g;
      sum_gh += g * normed(p, row, i);
    }
    double mean_g = row_sum<PLAIN_THREADS>(sum_g, room[0]) / p.n,
           mean_gh = row_sum<PLAIN_THREADS>(sum_gh, room[1]) / p.n;
    if (!p.centred) mean_g = 0;
    double rstd = element_double(p.rstds, p.rstds_dtype, row);
    for (int i = threadIdx.x; i < p.n; i += PLAIN_THREADS) {
      double g = element_double(p.dy, p.dy_dtype, row * p.n + i) *
                 (p.weight ? element_double(p.weight, p.weight_dtype, i) : 1.0);
      element_store(p.dx, p.dx_dtype, row * p.n + i,
                   rstd * (g - mean_g - normed(p, row, i) * mean_gh));
    }
    __syncthreads();
  }
}

/// Computes dweight and dbias. A block sums 32 columns; each of its eight slices of threads takes
/// every eighth row.
__global__ void __launch_bounds__(PLAIN_THREADS)
  plain_grad_columns(const __grid_constant__ norm_call p, void *dweight, int dweight_dtype,
                          void *dbias, int dbias_dtype)
{
  __shared__ double slices[2][8][33];
  const int column = threadIdx.x % 32, slice = threadIdx.x / 32;
  const int64_t c = (int64_t)blockIdx.x * 32 + column;
  double for_weight = 0, for_bias = 0;
  if (c < p.n)
    for (int64_t row = slice; row < p.rows; row += 8) {
      double slope = element_double(p.dy, p.dy_dtype, row * p.n + c);
      for_weight += slope * normed(p, row, c);
      for_bias += slope;
    }
  slices[0][slice][column] = for_weight;
  slices[1][slice][column] = for_bias;
  __syncthreads();
  if (slice != 0 || c >= p.n) return;
  for_weight = for_bias = 0;
  for (int s = 0; s < 8; s++) {
    for_weight += slices[0][s][column];
    for_bias += slices[1][s][column];
  }
  if (dweight) element_store(dweight, dweight_dtype, c, for_weight);
  if (dbias) element_store(dbias, dbias_dtype, c, for_bias);
}

static unsigned blocks_of(const norm_call &p) { return (unsigned)min(p.rows, (int64_t)65535); }

void norm_plain(const norm_call *p)
{ plain_rows<<<blocks_of(*p), PLAIN_THREADS, 0, cuda_stream()>>>(*p); }

eng_status norm_grad_plain(const norm_call *p, const tensor *dweight, const tensor *dbias)
{
  if (p->rows > 0 && p->dx)
    plain_grad_rows<<<blocks_of(*p), PLAIN_THREADS, 0, cuda_stream()>>>(*p);
  if ((dweight || dbias) && p->n > 0)
    plain_grad_columns<<<(unsigned)parts(p->n, 32), PLAIN_THREADS, 0, cuda_stream()>>>(
      *p, data_of(dweight), dtype_of(dweight), data_of(dbias), dtype_of(dbias));
  return cuda_launched("norm_grad");
}
