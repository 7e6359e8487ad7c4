// Copies with a change of format or layout: cast, contiguous, concat. Both sides may have any
// strides (eng_copy may pass a view as output). If both sides have the same format, elements are
// moved as bits, in units of up to 16 bytes if rows allow (as in slices, or when heads and
// positions are swapped). If the two sides are contiguous along different dimensions of 8 elements
// or more, elements of one format, or of f32, f16 and bf16, go through tiles in shared memory, so
// that both sides access whole cache lines. Conversions among f32, f16 and bf16 round to nearest
// even and process groups of elements; other conversions process single elements. Called through
// the device's table.
#include "kernel/map.h"

extern "C" {
#include "base/rng.h"
}

#include <type_traits>

// ------------------------------------------------------------------ rows in units

template <typename Unit>
static __global__ void __launch_bounds__(WALK_THREADS) move_kernel(const walk<2> w)
{
  constexpr int U = 4;   // units that a thread has in flight
  int64_t first = (int64_t)blockIdx.x * (WALK_THREADS * U) + threadIdx.x, at[U][2];
  Unit unit[U];
#pragma unroll
  for (int u = 0; u < U; u++) {
    int64_t group = first + u * WALK_THREADS;
    if (group >= w.groups) continue;
    walk_offsets(at[u], w, group);
    unit[u] = ((const Unit *)w.data[1])[at[u][1]];
  }
#pragma unroll
  for (int u = 0; u < U; u++)
    if (first + u * WALK_THREADS < w.groups) ((Unit *)w.data[0])[at[u][0]] = unit[u];
}

template <typename Unit> static void move_launch(const walk<2> &w)
{
  walk_parts<2>(w, 4, [](const walk<2> &part, unsigned blocks) {
    move_kernel<Unit><<<blocks, WALK_THREADS, 0, cuda_stream()>>>(part);
  });
}

// Copies rows in the largest units that divide them. The walk is changed to count units instead of
// elements.
static eng_status move(walk<2> w)
{
  int size = eng_dtype_size(w.dtype[0]), unit = size;
  bool runs = w.stride[0][0] == 1 && w.stride[1][0] == 1;
  if (runs && w.ndim == 1) {
    CUDA_TRY(cudaMemcpyAsync(w.data[0], w.data[1], (size_t)(w.count * size),
                             cudaMemcpyDeviceToDevice, cuda_stream()));
    return ENG_OK;
  }
  if (runs)
    for (unit = 16; unit > size && !walk_bundle(w, unit / size); unit /= 2) {}
  for (int k = 0; k < 2; k++) {
    for (int d = 0; d < w.ndim; d++) w.stride[k][d] = w.stride[k][d] * size / unit;
    w.width[k] = unit;
  }
  switch (unit) {
    case 1:  move_launch<uint8_t>(w); break;
    case 2:  move_launch<uint16_t>(w); break;
    case 4:  move_launch<uint32_t>(w); break;
    case 8:  move_launch<uint2>(w); break;
    default: move_launch<uint4>(w); break;
  }
  return ENG_OK;
}

// ------------------------------------------------------------------ tiles

/// A transposition. The target is contiguous along dimension 0 of the walk, the source along
/// dimension `down`. There are across_tiles tiles along dimension 0 and down_tiles along `down`.
struct turn { int down; uint32_t across_tiles, down_tiles; };

/// The start of a block's tile: its indices along both dimensions, and its offsets in both tensors.
struct turn_place { int64_t across, down, to, from; };

__device__ static inline turn_place place_of_tile(const walk<2> &w, const turn &t, int side)
{
  // There are fewer than 2^31 blocks, so 32-bit division suffices (64-bit division is slow).
  uint32_t rest = blockIdx.x, tile = rest / t.across_tiles;
  turn_place p;
  p.across = (int64_t)(rest - tile * t.across_tiles) * side;
  rest = tile / t.down_tiles;
  p.down = (int64_t)(tile - rest * t.down_tiles) * side;
  p.to = p.across * w.stride[0][0] + p.down * w.stride[0][t.down];
  p.from = p.across * w.stride[1][0] + p.down * w.stride[1][t.down];
#pragma unroll 1
  for (int d = 1; d < w.ndim; d++) {
    if (d == t.down) continue;
    uint32_t size = (uint32_t)w.shape[d], index = rest % size;
    rest /= size;
    p.to += index * w.stride[0][d];
    p.from += index * w.stride[1][d];
  }
  return p;
}

template <typename To, typename From> __device__ static inline void convert(To &y, From x)
{
  if constexpr (std::is_same_v<To, From>) y = x;
  else narrow(y, widen(x));
}

template <typename To, typename From, int SIDE>
static __global__ void __launch_bounds__(256) turn_kernel(const walk<2> w, const turn t)
{
  constexpr int PAD = sizeof(To) >= 4 ? 1 : 4 / sizeof(To);   // avoids bank conflicts in columns
  __shared__ To tile[SIDE][SIDE + PAD];
  const turn_place p = place_of_tile(w, t, SIDE);
  // number of elements from the tile's start to the end of each dimension
  int64_t wide = w.shape[0] - p.across, high = w.shape[t.down] - p.down;
  int x = threadIdx.x % 32, y = threadIdx.x / 32;
#pragma unroll
  for (int j = 0; j < SIDE; j += 8)
#pragma unroll
    for (int i = 0; i < SIDE; i += 32)
      if (y + j < wide && x + i < high)
        convert(tile[x + i][y + j],
                ((const From *)w.data[1])[p.from + (y + j) * w.stride[1][0] + x + i]);
  __syncthreads();
#pragma unroll
  for (int j = 0; j < SIDE; j += 8)
#pragma unroll
    for (int i = 0; i < SIDE; i += 32)
      if (y + j < high && x + i < wide)
        ((To *)w.data[0])[p.to + (y + j) * w.stride[0][t.down] + x + i] = tile[y + j][x + i];
}

// Transposes 2-byte elements in pairs. A thread transposes squares of 2 x 2, so that memory is
// accessed in words of 4 bytes. A tile has 32 x 32 squares: tile[0] has the words of the target's
// even rows, tile[1] the words of its odd rows.
static __global__ void __launch_bounds__(256) turn_pairs_kernel(const walk<2> w, const turn t)
{
  __shared__ uint32_t tile[2][32][33];
  const turn_place p = place_of_tile(w, t, 64);
  int64_t wide = w.shape[0] - p.across, high = w.shape[t.down] - p.down;
  int x = threadIdx.x % 32, y = threadIdx.x / 32;
  uint32_t first[4], second[4];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    if (2 * (y + 8 * j) >= wide || 2 * x >= high) continue;
    const uint16_t *source =
      (const uint16_t *)w.data[1] + p.from + 2 * (y + 8 * j) * w.stride[1][0] + 2 * x;
    first[j] = *(const uint32_t *)source;
    second[j] = *(const uint32_t *)(source + w.stride[1][0]);
  }
#pragma unroll
  for (int j = 0; j < 4; j++) {
    if (2 * (y + 8 * j) >= wide || 2 * x >= high) continue;
    tile[0][x][y + 8 * j] = (first[j] & 0xFFFFu) | second[j] << 16;
    tile[1][x][y + 8 * j] = first[j] >> 16 | (second[j] & 0xFFFF0000u);
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 8; j++) {
    int row = y + 8 * j;
    if (row < high && 2 * x < wide)
      *(uint32_t *)((uint16_t *)w.data[0] + p.to + row * w.stride[0][t.down] + 2 * x) =
        tile[row % 2][row / 2][x];
  }
}

// Whether the elements form pairs along both dimensions, and all pairs are aligned words.
static bool turns_in_pairs(const walk<2> &w, int down)
{
  if (w.shape[0] % 2 || w.shape[down] % 2) return false;
  for (int k = 0; k < 2; k++) {
    if ((uintptr_t)w.data[k] % 4) return false;
    for (int d = 0; d < w.ndim; d++)
      if (d != (k == 0 ? 0 : down) && w.stride[k][d] % 2) return false;
  }
  return true;
}

template <typename To, typename From> static void turn_launch(const walk<2> &w, int down)
{
  constexpr int SIDE = sizeof(To) == 8 ? 32 : 64;
  turn t = {down, (uint32_t)parts(w.shape[0], SIDE), (uint32_t)parts(w.shape[down], SIDE)};
  // below 2^31 for any tensor that fits on a card
  int64_t blocks = w.count / (w.shape[0] * w.shape[down]) * t.across_tiles * t.down_tiles;
  if constexpr (SIDE == 64 && sizeof(To) == 2 && sizeof(From) == 2) {
    if (w.dtype[0] == w.dtype[1] && turns_in_pairs(w, down)) {
      turn_pairs_kernel<<<(unsigned)blocks, 256, 0, cuda_stream()>>>(w, t);
      return;
    }
  }
  turn_kernel<To, From, SIDE><<<(unsigned)blocks, 256, 0, cuda_stream()>>>(w, t);
}

static void turn_over(const walk<2> &w, int down)
{
  if (w.dtype[0] == w.dtype[1]) {
    switch (eng_dtype_size(w.dtype[0])) {
      case 1:  turn_launch<uint8_t, uint8_t>(w, down); break;
      case 2:  turn_launch<uint16_t, uint16_t>(w, down); break;
      case 4:  turn_launch<uint32_t, uint32_t>(w, down); break;
      default: turn_launch<uint2, uint2>(w, down); break;
    }
  } else {
    with_fast_format(w.dtype[0], [&](auto to) {
      with_fast_format(w.dtype[1],
                       [&](auto from) { turn_launch<decltype(to), decltype(from)>(w, down); });
    });
  }
}

// If copying by tiles is faster, returns the dimension along which the source is contiguous.
// Otherwise returns 0.
static int turned_dimension(const walk<2> &w)
{
  if (w.stride[0][0] != 1 || w.stride[1][0] == 1 || w.stride[1][0] == 0 || w.shape[0] < 8) return 0;
  for (int d = 1; d < w.ndim; d++)
    if (w.stride[1][d] == 1 && w.shape[d] >= 8) return d;
  return 0;
}

// ------------------------------------------------------------------ calls

struct copy_rule {
  template <int V> __device__ void operator()(float (&y)[1][V], const float (&x)[1][V]) const
  {
#pragma unroll
    for (int v = 0; v < V; v++) y[0][v] = x[0][v];
  }
};

// Of all elementwise kernels, only the kernels of this file accept FP8. Overflow becomes Inf, or
// NaN in formats without Inf (core/base/fp8.h).
__host__ __device__ static inline bool is_fp8(int d) { return d == ENG_e4m3 || d == ENG_e5m2; }

__device__ static inline double load_fp8(const void *data, int dtype, int64_t i)
{
  uint8_t code = ((const uint8_t *)data)[i];
  return dtype == ENG_e4m3 ? e4m3_to_f32(code) : e5m2_to_f32(code);
}

/// Loads element i, in any format, as a double for conversion to FP8.
__device__ static inline double load_for_fp8(const void *data, int dtype, int64_t i)
{
  if (is_fp8(dtype)) return load_fp8(data, dtype, i);
  return dtype_is_float(dtype) ? element_double(data, dtype, i) :
                           double_from_int(element_whole(data, dtype, i), false);
}

struct copy_body {
  __device__ void operator()(const walk<2> &w, const int64_t (&at)[2]) const
  {
    const int to = w.dtype[0], from = w.dtype[1];
    if (is_fp8(to)) {
      const double value = load_for_fp8(w.data[1], from, at[1]);
      ((uint8_t *)w.data[0])[at[0]] =
        to == ENG_e4m3 ? e4m3_from_f64(value, 0) : e5m2_from_f64(value, 0);
    } else if (is_fp8(from)) {
      element_store(w.data[0], to, at[0], load_fp8(w.data[1], from, at[1]));
    } else {
      copy_element(w.data[0], to, at[0], w.data[1], from, at[1]);
    }
  }
};

static eng_status copy(const tensor *y, const tensor *x)
{
  bool same = x->dtype == y->dtype, fast = is_fast(x->dtype) && is_fast(y->dtype);
  walk<2> w = walk_over<2>(y, {y, x});
  int down = turned_dimension(w);
  if (down && (same || fast)) {
    turn_over(w, down);
  } else if (same) {
    ENG_TRY(move(w));
  } else {
    op_call call = simple_call(ENG_OP_cast, x, NULL, y);
    return fast ? map<1, 1, false>(&call, copy_rule{}) : each<1, 1>(&call, copy_body{});
  }
  return cuda_launched("a copy");
}

/// Converts to FP8 with saturation, stochastic rounding or both, as `mode` says.
struct mode_body {
  int mode;
  uint64_t seed, counter;
  const uint8_t *first;   // first element of the output, which is dense
  __device__ void operator()(const walk<2> &w, const int64_t (&at)[2]) const
  {
    uint8_t *to = (uint8_t *)w.data[0] + at[0];
    const uint64_t i = (uint64_t)(to - first);
    uint32_t word[4] = {};
    if (mode & FP8_STOCHASTIC) philox_of(word, seed, counter + i / 4);
    *to = fp8_from_f32(f32_odd_from_f64(load_for_fp8(w.data[1], w.dtype[1], at[1])),
                       w.dtype[0] == ENG_e4m3 ? 3 : 2, mode, word_of_element(word, i));
  }
};

extern "C" eng_status cuda_cast(const op_call *call)
{
  const tensor *y = call->out[0];
  if (!is_fp8(y->dtype) || !call->cast.mode) return copy(y, call->in[0]);
  return each<1, 1>(call, mode_body{(int)call->cast.mode, rng_seed(), (uint64_t)call->cast.counter,
                                    (const uint8_t *)y->data});
}
extern "C" eng_status cuda_contiguous(const op_call *call)
{ return copy(call->out[0], call->in[0]); }

extern "C" eng_status cuda_concat(const op_call *call)
{
  tensor part = *call->out[0];   // the slice of the output for the next input
  int64_t dimension = call->concat.dim < 0 ? call->concat.dim + part.ndim : call->concat.dim;
  for (int k = 0; k < call->n_in; k++) {
    const tensor *x = call->in[k];
    if (x->count == 0) continue;
    for (int d = 0; d < part.ndim; d++) part.shape[d] = x->shape[d];
    part.count = x->count;
    ENG_TRY(copy(&part, x));
    part.data =
      (char *)part.data + x->shape[dimension] * part.stride[dimension] * eng_dtype_size(part.dtype);
  }
  return ENG_OK;
}
