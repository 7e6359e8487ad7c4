// Max and average pooling of images [N x H x W x C], and their gradients. A thread computes V
// channels of one pixel of y or, in a gradient, of dx. The thread of an element of dx adds up the
// gradients of the windows that contain the element, in order, so each element is written once.
// f32, f16 and bf16 sum in f32 and round once; f64 sums in f64. Called through the device's table.
#include "kernel/lanes.h"

#include "base/pool_windows.h"

/// A call as kernels see it. `large` holds the images, `small` the pooled images.
struct pooling {
  pool_side   side[2];                // H, W
  void       *large, *small;
  // for max pooling, in the shape of `small`: the index of each maximum in its window, row * kernel
  // width + column
  int32_t    *cell;
  int32_t     large_dtype, small_dtype;
  bool        counted;                // cells of padding count in the mean (pool_divisor)
  int64_t     threads;
  divider     vectors, columns, rows; // of the output: groups of V channels, columns, rows
};

/// What a thread computes: channels from c on, in row i and column j of image n.
struct pool_place { int64_t n, i, j, c; };

__device__ static inline pool_place place_of(const pooling &p, uint32_t thread, int V)
{
  const uint32_t pixel = divide(thread, p.vectors), line = divide(pixel, p.columns),
                 image = divide(line, p.rows);
  return {image, line - image * p.rows.size, pixel - line * p.columns.size,
          (int64_t)(thread - pixel * p.vectors.size) * V};
}

/// Returns the offset of the thread's channels in pixel (i, j) of the images or, with SMALL, of the
/// pooled images.
template <bool SMALL>
__device__ static inline int64_t offset_of(const pooling &p, const pool_place &at, int64_t i,
                                           int64_t j, int V)
{
  const int64_t high = SMALL ? p.side[0].m : p.side[0].n, wide = SMALL ? p.side[1].m : p.side[1].n;
  return ((at.n * high + i) * wide + j) * p.vectors.size * V + at.c;
}

template <class L, bool MAX>
static __global__ void __launch_bounds__(WALK_THREADS) pool_kernel(const pooling p)
{
  constexpr int V = L::V;
  typedef typename L::number number;
  const int64_t thread = (int64_t)blockIdx.x * WALK_THREADS + threadIdx.x;
  if (thread >= p.threads) return;
  const pool_place at = place_of(p, (uint32_t)thread, V);
  int64_t top, left;
  const pool_range rows = pool_cells(&p.side[0], at.i, &top),
                   columns = pool_cells(&p.side[1], at.j, &left);
  const int kernel = (int)p.side[1].kernel;
  number y[V];
  int cell[V];
#pragma unroll
  for (int v = 0; v < V; v++) {
    y[v] = MAX ? -INFINITY : 0;
    cell[v] = (int)(rows.first - top) * kernel + (int)(columns.first - left);
  }
  for (int64_t h = rows.first; h < rows.end; h++)
    for (int64_t w = columns.first; w < columns.end; w++) {
      typename L::raw raw;
      number x[V];
      L::fetch(raw, p.large, p.large_dtype, offset_of<false>(p, at, h, w, V));
      L::values(x, raw, p.large_dtype);
#pragma unroll
      for (int v = 0; v < V; v++) {
        if (!MAX) y[v] += x[v];
        else if (x[v] > y[v] || x[v] != x[v]) {
          y[v] = x[v];
          cell[v] = (int)(h - top) * kernel + (int)(w - left);
        }
      }
    }
  const int64_t to = offset_of<true>(p, at, at.i, at.j, V);
  if (MAX) {
    if (p.cell)
#pragma unroll
      for (int v = 0; v < V; v++) p.cell[to + v] = cell[v];
  } else {
    const number area = (number)(pool_divisor(&p.side[0], rows, top, p.counted) *
                                 pool_divisor(&p.side[1], columns, left, p.counted));
#pragma unroll
    for (int v = 0; v < V; v++) y[v] /= area;
  }
  L::store(p.small, p.small_dtype, to, y);
}

template <class L, bool MAX>
static __global__ void __launch_bounds__(WALK_THREADS) pool_grad_kernel(const pooling p)
{
  constexpr int V = L::V;
  typedef typename L::number number;
  const int64_t thread = (int64_t)blockIdx.x * WALK_THREADS + threadIdx.x;
  if (thread >= p.threads) return;
  const pool_place at = place_of(p, (uint32_t)thread, V);
  const pool_range rows = pool_windows(&p.side[0], at.i), columns = pool_windows(&p.side[1], at.j);
  const int kernel = (int)p.side[1].kernel;
  number dx[V] = {};
  for (int64_t i = rows.first; i < rows.end; i++)
    for (int64_t j = columns.first; j < columns.end; j++) {
      int64_t top, left;
      const pool_range r = pool_cells(&p.side[0], i, &top), s = pool_cells(&p.side[1], j, &left);
      const int64_t from = offset_of<true>(p, at, i, j, V);
      const int cell = (int)(at.i - top) * kernel + (int)(at.j - left);
      const number area = (number)(pool_divisor(&p.side[0], r, top, p.counted) *
                                   pool_divisor(&p.side[1], s, left, p.counted));
      typename L::raw raw;
      number dy[V];
      L::fetch(raw, p.small, p.small_dtype, from);
      L::values(dy, raw, p.small_dtype);
#pragma unroll
      for (int v = 0; v < V; v++)
        dx[v] += !MAX ? dy[v] / area : p.cell[from + v] == cell ? dy[v] : 0;
    }
  L::store(p.large, p.large_dtype, offset_of<false>(p, at, at.i, at.j, V), dx);
}

// ------------------------------------------------------------------ calls

template <class L> static void launch(pooling p, const tensor *over, bool max, bool back)
{
  p.threads = over->count / L::V;
  p.vectors = divider_of(over->shape[3] / L::V);
  p.columns = divider_of(over->shape[2]);
  p.rows = divider_of(over->shape[1]);
  const unsigned blocks = (unsigned)parts(p.threads, WALK_THREADS);
  auto kernel = back ? (max ? pool_grad_kernel<L, true> : pool_grad_kernel<L, false>) :
                       (max ? pool_kernel<L, true> : pool_kernel<L, false>);
  kernel<<<blocks, WALK_THREADS, 0, cuda_stream()>>>(p);
}

static eng_status pool(const op_call *call, bool max, bool back)
{
  const tensor *large = back ? call->out[0] : call->in[0],
               *small = back ? call->in[0] : call->out[0], *over = back ? large : small,
               *cell = max ? (back ? call->in[1] : call->out[1]) : NULL;
  pooling p = {};
  p.large = large->data;
  p.small = small->data;
  p.cell = (int32_t *)data_of(cell);
  p.large_dtype = large->dtype;
  p.small_dtype = small->dtype;
  p.counted = !max && call->avg_pool2d.counted;
  for (int d = 0; d < 2; d++)
    p.side[d] = {large->shape[1 + d], small->shape[1 + d], call->max_pool2d.kernel[d],
                 call->max_pool2d.stride[d], call->max_pool2d.padding[d]};
  const bool fast = is_fast(large->dtype) && is_fast(small->dtype),
             vectors = fast && large->shape[3] % 4 == 0 &&
                       ((uintptr_t)p.large | (uintptr_t)p.small) % 16 == 0;
  FAIL_IF(over->count / (vectors ? 4 : 1) >= 1ll << 31, ENG_ERR_SHAPE,
          "%s: expected fewer than 2^%d elements on cuda, got %s", eng_op_name(call->op),
          vectors ? 33 : 31, tensor_text(over));
  if (vectors) launch<float_lanes<4>>(p, over, max, back);
  else if (fast) launch<float_lanes<1>>(p, over, max, back);
  else launch<double_lanes>(p, over, max, back);
  return cuda_launched(eng_op_name(call->op));
}

extern "C" eng_status cuda_max_pool2d(const op_call *call)      { return pool(call, true, false); }
extern "C" eng_status cuda_max_pool2d_grad(const op_call *call) { return pool(call, true, true); }
extern "C" eng_status cuda_avg_pool2d(const op_call *call)      { return pool(call, false, false); }
extern "C" eng_status cuda_avg_pool2d_grad(const op_call *call) { return pool(call, false, true); }
