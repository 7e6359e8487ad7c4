// See conv.h. Called by conv.c.
#include "conv.h"

#include "kernel/element.h"
#include "kernel/walk.h"

namespace {

enum { THREADS = 256 };

/// A conv_gather as the kernel `collect` sees it. The channels of one group in one pixel take
/// `units` accesses.
struct collection {
  conv_gather g;
  void    *to;
  uint32_t first, total;                  // first place of the tile; number of units in the tile
  divider  units, columns_of_kernel, rows_of_kernel, groups, columns, rows;
};

/// Returns the index, along dimension d, of the pixel that a place with index i meets under element
/// k of the kernel, or -1 if there is no such pixel. `size` is the number of pixels along d.
__device__ inline int64_t met(const conv_gather &g, int d, int64_t i, int64_t k, int64_t size)
{
  int64_t at;
  if (!g.turned) {
    at = i * g.stride[d] - g.padding[d] + k * g.dilation[d];
  } else {
    at = i + g.padding[d] - k * g.dilation[d];
    if (g.stride[d] > 1) at = at % g.stride[d] ? -1 : at / g.stride[d];
  }
  return at >= 0 && at < size ? at : -1;
}

/// Returns the index of the pixel of `from` that place (n, i, j) meets under element (row, column)
/// of the kernel, or -1 if there is no such pixel.
__device__ inline int64_t pixel_met(const conv_gather &g, int64_t n, int64_t i, int64_t j,
                                    int64_t row, int64_t column)
{
  const int64_t h = met(g, 0, i, row, g.high), w = met(g, 1, j, column, g.wide);
  return h < 0 || w < 0 ? -1 : (n * g.high + h) * g.wide + w;
}

template <typename Unit>
__global__ void __launch_bounds__(THREADS) collect(const __grid_constant__ collection c)
{
  const uint32_t at = blockIdx.x * (uint32_t)THREADS + threadIdx.x;
  if (at >= c.total) return;
  const uint32_t cell = divide(at, c.units), line = divide(cell, c.columns_of_kernel),
                 group_of = divide(line, c.rows_of_kernel), place = divide(group_of, c.groups),
                 all = c.first + place, image_row = divide(all, c.columns),
                 image = divide(image_row, c.rows);
  const uint32_t unit = at - cell * c.units.size, column = cell - line * c.columns_of_kernel.size,
                 row = line - group_of * c.rows_of_kernel.size,
                 group = group_of - place * c.groups.size;
  const int64_t pixel = pixel_met(c.g, image, image_row - image * c.rows.size,
                                  all - image_row * c.columns.size, row, column);
  Unit x = {};
  if (pixel >= 0)
    x = ((const Unit *)c.g.from)[(pixel * c.groups.size + group) * c.units.size + unit];
  ((Unit *)c.to)[at] = x;
}

__global__ void __launch_bounds__(THREADS)
  find_nonfinite(const void *x, int dtype, int64_t count, int *found)
{
  const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  const bool bad = i < count && !f64_is_finite(load_as<double>(x, dtype, i));
  if (__syncthreads_or(bad) && threadIdx.x == 0) *found = 1;
}

/// The kernel of conv_repair, with one thread per element of out. Sums are in double; a sum that is
/// NaN stays NaN.
__global__ void __launch_bounds__(THREADS)
  repair(void *out, int dtype, int64_t count, const __grid_constant__ conv_gather g,
         const __grid_constant__ conv_weights w, const void *bias, int bias_dtype,
         const int *found)
{
  const int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (!*found || at >= count) return;
  const double before = load_as<double>(out, dtype, at);
  if (before == before) return;
  const int64_t o = at % w.width, group = at / w.width % g.groups, place = at / w.width / g.groups,
                j = place % g.columns, i = place / g.columns % g.rows,
                n = place / g.columns / g.rows;
  double sum = bias ? load_as<double>(bias, bias_dtype, group * w.width + o) : 0;
  for (int64_t row = 0; row < g.kernel[0]; row++)
    for (int64_t column = 0; column < g.kernel[1]; column++) {
      const int64_t pixel = pixel_met(g, n, i, j, row, column),
                    k = (row * g.kernel[1] + column) * g.channels;
      for (int64_t c = 0; pixel >= 0 && c < g.channels && sum == sum; c++)
        sum += load_as<double>(g.from, g.dtype, (pixel * g.groups + group) * g.channels + c) *
               load_as<double>(w.data, w.dtype, group * w.batch + (k + c) * w.row + o * w.column);
    }
  store_as(out, dtype, at, sum);
}

/// Computes element (o, c, row, column) of a weight's gradient from x and dy [places x outputs].
__device__ double weight_slope(const conv_gather &g, const void *dy, int dtype, int64_t outputs,
                               int64_t o, int64_t c, int64_t row, int64_t column)
{
  const int64_t group = o / (outputs / g.groups);
  double sum = 0;
  for (int64_t place = 0; place < g.places && sum == sum; place++) {
    const int64_t pixel = pixel_met(g, place / g.columns / g.rows, place / g.columns % g.rows,
                                    place % g.columns, row, column);
    if (pixel >= 0)
      sum += load_as<double>(g.from, g.dtype, (pixel * g.groups + group) * g.channels + c) *
             load_as<double>(dy, dtype, place * outputs + o);
  }
  return sum;
}

/// The kernel of conv_finish_weights, with one thread per element of dw [outputs x channels x
/// taps]. T is the format of `sum`.
template <typename T>
__global__ void __launch_bounds__(THREADS)
  finish_weights(void *dw, int dtype, int64_t count, const T *sum,
                 const __grid_constant__ conv_gather g, const void *dy, int dy_dtype,
                 int64_t outputs, bool add)
{
  const int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x, taps = g.kernel[0] * g.kernel[1];
  if (at >= count) return;
  const int64_t tap = at % taps, c = at / taps % g.channels, o = at / taps / g.channels;
  T x = sum[(o * taps + tap) * g.channels + c];
  if (x != x)
    x = (T)weight_slope(g, dy, dy_dtype, outputs, o, c, tap / g.kernel[1], tap % g.kernel[1]);
  if (add) x = load_as<T>(dw, dtype, at) + x;
  store_as(dw, dtype, at, x);
}

unsigned blocks_of(int64_t n) { return (unsigned)((n + THREADS - 1) / THREADS); }

}  // namespace

extern "C" eng_status conv_collect(void *to, const conv_gather *g, int64_t first, int64_t count)
{
  const int64_t bytes = g->channels * eng_dtype_size(g->dtype);
  const uintptr_t together = (uintptr_t)to | (uintptr_t)g->from | (uintptr_t)bytes;
  const int unit = together % 16 == 0 ? 16 : together % 8 == 0 ? 8 : together % 4 == 0 ? 4 : 2;
  collection c = {};
  c.g = *g;
  c.to = to;
  c.first = (uint32_t)first;
  c.total = (uint32_t)(count * g->groups * g->kernel[0] * g->kernel[1] * (bytes / unit));
  c.units = divider_of(bytes / unit);
  c.columns_of_kernel = divider_of(g->kernel[1]);
  c.rows_of_kernel = divider_of(g->kernel[0]);
  c.groups = divider_of(g->groups);
  c.columns = divider_of(g->columns);
  c.rows = divider_of(g->rows);
  auto kernel = unit == 16 ? collect<uint4> :
                unit == 8  ? collect<uint2> :
                unit == 4  ? collect<uint32_t> :
                             collect<uint16_t>;
  kernel<<<blocks_of(c.total), THREADS, 0, cuda_stream()>>>(c);
  return cuda_launched("conv2d");
}

extern "C" eng_status conv_repair(const tensor *out, const conv_gather *g, const conv_weights *w,
                                  const tensor *bias)
{
  int *found = (int *)scratch_take(sizeof *found);
  if (!found) return ENG_ERR_MEMORY;
  const cudaError_t result = cudaMemsetAsync(found, 0, sizeof *found, cuda_stream());
  find_nonfinite<<<blocks_of(w->count), THREADS, 0, cuda_stream()>>>(w->data, w->dtype, w->count,
                                                                     found);
  repair<<<blocks_of(out->count), THREADS, 0, cuda_stream()>>>(
    out->data, out->dtype, out->count, *g, *w, data_of(bias), dtype_of(bias), found);
  scratch_give(found, sizeof *found);
  CUDA_TRY(result);
  return cuda_launched("conv2d");
}

extern "C" eng_status conv_finish_weights(const tensor *dw, const void *sum, int dtype,
                                          const conv_gather *g, const tensor *dy, bool add)
{
  const unsigned blocks = blocks_of(dw->count);
  const int64_t outputs = dw->shape[0];
  if (dtype == ENG_f64)
    finish_weights<double><<<blocks, THREADS, 0, cuda_stream()>>>(
      dw->data, dw->dtype, dw->count, (const double *)sum, *g, dy->data, dy->dtype, outputs, add);
  else
    finish_weights<float><<<blocks, THREADS, 0, cuda_stream()>>>(
      dw->data, dw->dtype, dw->count, (const float *)sum, *g, dy->data, dy->dtype, outputs, add);
  return cuda_launched("conv2d_grad_w");
}
