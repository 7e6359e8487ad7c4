// The operation bias_grad on the card: column sums of dy [rows x n], in an order that depends only
// on the shape, the format and whether rows are 16-byte aligned.
//
// There are two passes. The first cuts dy into tiles, about one for each block that an H200 can run
// at the same time. A tile covers a chunk of rows and up to 512 bytes (32 lanes x 16 bytes) of each
// row. A block of 8 warps sums one tile: a thread reads 16 bytes of a row at a time and has 8 rows
// in flight. (If rows are not 16-byte aligned, a thread reads one element at a time, and a tile has
// up to 32 columns.) Then the sums of the lanes that share columns are added, and then the sums of
// the warps, in a fixed order. A tile yields one partial sum for each of its columns. The second
// pass adds the partial sums of all chunks and, if the call accumulates, the previous contents of
// the output. Sums are in f32, or in f64 for f64 inputs. The operation cannot be faster than one
// read of dy. Called through the device's table and by gemm_fused.c.
#include "kernel/element.h"
#include "kernel/vector.h"

namespace {

enum {
  WARPS = 8,
  IN_FLIGHT = 8,          // rows that a thread loads before it adds them
  RESIDENT = 4,           // blocks per multiprocessor; an H200 has 132 multiprocessors
  MOST_BLOCKS = 132 * RESIDENT,
  SUM_COLUMNS = 32, SUM_ROWS = 32,   // threads of a block in the second pass
};

template <typename T> struct sum_type { typedef float type; };
template <> struct sum_type<double> { typedef double type; };

// V adjacent elements, which are loaded first and added to sums later.
template <typename T, int V> struct piece {
  words<T, V> raw;
  // if `there` is false, loads zeros, which change no sum
  __device__ void load(const T *from, bool there)
  {
    raw = {};
    if (there) load_words(raw, from);
  }
  __device__ void add_to(float (&sum)[V]) const
  {
    float x[V];
    widen_words(x, raw);
#pragma unroll
    for (int v = 0; v < V; v++) sum[v] += x[v];
  }
};
template <typename T> struct piece<T, 1> {
  T raw;
  __device__ void load(const T *from, bool there) { raw = there ? *from : T{}; }
  __device__ void add_to(typename sum_type<T>::type (&sum)[1]) const { sum[0] += widen(raw); }
};
template <> struct piece<double, 2> {
  double2 raw;
  __device__ void load(const double *from, bool there)
  { raw = there ? *(const double2 *)from : double2{}; }
  __device__ void add_to(double (&sum)[2]) const { sum[0] += raw.x; sum[1] += raw.y; }
};

// Sets row `chunk` of partial [chunks x n] to the sum of the chunk_rows rows of dy from
// chunk * chunk_rows on. 2^lanes_log2 lanes of a warp take adjacent columns of a row; the remaining
// lanes take the next rows.
template <typename T, int V>
__global__ void __launch_bounds__(32 * WARPS, RESIDENT)
  sum_tiles(typename sum_type<T>::type *__restrict__ partial, const T *__restrict__ dy,
            int64_t rows, int64_t n, int64_t chunk_rows, int lanes_log2)
{
  typedef typename sum_type<T>::type SUM;
  __shared__ SUM kept[WARPS][32 * V];
  const int lane = threadIdx.x, warp = threadIdx.y, lanes = 1 << lanes_log2;
  const int beside = lane & (lanes - 1), below = lane >> lanes_log2,
            step = WARPS * (32 >> lanes_log2);
  const int64_t column = ((int64_t)blockIdx.x * lanes + beside) * V;
  const int64_t first = blockIdx.y * chunk_rows,
                end = first + chunk_rows < rows ? first + chunk_rows : rows;
  SUM sum[V] = {};
  if (column < n) {
    const int above = warp * (32 >> lanes_log2) + below;
    const T *from = dy + (first + above) * n + column;
    const int64_t stride = (int64_t)step * n;
    for (int left = (int)(end - first) - above; left > 0; left -= IN_FLIGHT * step) {
      piece<T, V> x[IN_FLIGHT];
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; i++, from += stride) x[i].load(from, i * step < left);
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; i++) x[i].add_to(sum);
    }
  }
  for (int apart = 16; apart >= lanes; apart >>= 1)
#pragma unroll
    for (int v = 0; v < V; v++) sum[v] += __shfl_down_sync(0xFFFFFFFFu, sum[v], apart);
  if (below == 0)
#pragma unroll
    for (int v = 0; v < V; v++) kept[warp][beside * V + v] = sum[v];
  __syncthreads();
  for (int i = warp * 32 + lane; i < lanes * V; i += 32 * WARPS) {
    const int64_t at = (int64_t)blockIdx.x * lanes * V + i;
    if (at >= n) continue;
    SUM total = kept[0][i];
#pragma unroll
    for (int w = 1; w < WARPS; w++) total += kept[w][i];
    partial[blockIdx.y * n + at] = total;
  }
}

// Sets out[j] to the sum of partial[chunk][j] over the chunks or, with `add`, adds the sum to
// out[j]. A thread sums every 32nd chunk; then the sums of a column's threads are added in order.
template <typename SUM>
__global__ void __launch_bounds__(SUM_COLUMNS *SUM_ROWS)
  sum_chunks(void *out, int dtype, const SUM *__restrict__ partial, int64_t n, int chunks, bool add)
{
  __shared__ SUM kept[SUM_ROWS][SUM_COLUMNS];
  const int64_t column = (int64_t)blockIdx.x * SUM_COLUMNS + threadIdx.x;
  SUM sum = 0;
  if (column < n)
    for (int chunk = threadIdx.y; chunk < chunks; chunk += IN_FLIGHT * SUM_ROWS) {
      SUM x[IN_FLIGHT];
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; i++)
        x[i] = chunk + i * SUM_ROWS < chunks ?
                 partial[(int64_t)(chunk + i * SUM_ROWS) * n + column] :
                 (SUM)0;
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; i++) sum += x[i];
    }
  kept[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= n) return;
  for (int r = 1; r < SUM_ROWS; r++) sum += kept[r][threadIdx.x];
  if (add) sum = load_as<SUM>(out, dtype, column) + sum;
  store_as(out, dtype, column, sum);
}

template <typename T, int V>
eng_status run(const op_call *call, int64_t rows, int64_t n)
{
  typedef typename sum_type<T>::type SUM;
  int lanes_log2 = 0;
  while (lanes_log2 < 5 && ((int64_t)V << lanes_log2) < n) lanes_log2++;
  const int64_t width = (int64_t)V << lanes_log2, tiles = (n + width - 1) / width,
                step = WARPS * (32 >> lanes_log2);
  // The number of chunks is such that, where possible, an H200 runs all blocks at the same time. A
  // chunk is a multiple of `round`, the number of rows that a block loads at a time, and has fewer
  // than 2^31 rows.
  const int64_t round = IN_FLIGHT * step,
                most = (MOST_BLOCKS / tiles > 1 ? MOST_BLOCKS / tiles : 1) + (rows >> 30),
                rounds = (rows + round - 1) / round;
  const int64_t chunk_rows = (rounds + most - 1) / most * round,
                chunks = chunk_rows ? (rows + chunk_rows - 1) / chunk_rows : 0;

  const int64_t bytes = (chunks ? chunks : 1) * n * (int64_t)sizeof(SUM);
  SUM *partial = static_cast<SUM *>(scratch_take(bytes));
  if (!partial) return ENG_ERR_MEMORY;
  tensor *out = call->out[0];
  if (chunks)
    sum_tiles<T, V><<<dim3((unsigned)tiles, (unsigned)chunks), dim3(32, WARPS), 0, cuda_stream()>>>(
      partial, static_cast<const T *>(call->in[0]->data), rows, n, chunk_rows, lanes_log2);
  sum_chunks<SUM>
    <<<(unsigned)((n + SUM_COLUMNS - 1) / SUM_COLUMNS), dim3(SUM_COLUMNS, SUM_ROWS), 0,
       cuda_stream()>>>(out->data, out->dtype, partial, n, (int)chunks, call->bias_grad.add != 0);
  scratch_give(partial, bytes);
  return cuda_launched("bias_grad");
}

template <typename T>
eng_status run(const op_call *call, int64_t rows, int64_t n)
{
  enum { V = 16 / sizeof(T) };
  const bool aligned = n % V == 0 && (uintptr_t)call->in[0]->data % 16 == 0;
  return aligned ? run<T, V>(call, rows, n) : run<T, 1>(call, rows, n);
}

}  // namespace

extern "C" eng_status cuda_bias_grad(const op_call *call)
{
  const tensor *dy = call->in[0];
  const int64_t n = dy->shape[dy->ndim - 1], rows = n ? dy->count / n : 0;
  return with_format(dy->dtype, [=](auto t) { return run<decltype(t)>(call, rows, n); });
}
