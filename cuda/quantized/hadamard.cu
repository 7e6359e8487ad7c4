// The operation hadamard, bit-equal to core/cpu/reference_mx.c: sums are in f64 and in the CPU's
// order. A line is a row of x or, if `turned`, a column.
//
// rotate_columns, the fast kernel, transforms groups of 16 elements of columns in registers and
// transposes the result in shared memory. For all other calls, a block of threads of the kernel
// `rotate` transforms one group of n adjacent elements in each of WIDE lines. Called through the
// device's table and by mx_quantize.cu.
#include "kernel/element.h"
#include "kernel/vector.h"

extern "C" {
#include "base/mx.h"
#include "base/rng.h"
}

#include <math.h>

namespace {

enum { THREADS = 256, MOST = 128, WIDE = 32 };

struct rotation {
  const void *x;
  void    *y;
  int      dtype, yields, n;               // format of x; format of y; length of a group
  bool     turned;
  // y is [lines x along]; x has `columns` columns; `signs` selects the signs (mx_sign)
  int64_t  along, lines, columns, signs;
  uint64_t seed;
  double   root;                           // sqrt(1 / n)
  uint32_t negative;                       // bit k: element k of 16 changes its sign
};

__global__ void __launch_bounds__(THREADS) rotate(const __grid_constant__ rotation p)
{
  __shared__ double a[MOST][WIDE + 1];
  __shared__ float sign[MOST];
  const int64_t across = (p.lines + WIDE - 1) / WIDE, a0 = blockIdx.x / across * p.n,
                l0 = blockIdx.x % across * WIDE;
  const int n = p.n, deep = (int)min((int64_t)n, p.along - a0),
            lines = (int)min((int64_t)WIDE, p.lines - l0);
  const bool whole = deep == n;
  if ((int)threadIdx.x < n) {
    uint32_t word[4] = {0, 0, 0, 0};
    if (p.signs > 0) philox_of(word, p.seed, (uint64_t)p.signs);
    sign[threadIdx.x] = whole ? mx_sign(p.signs, word, (int)threadIdx.x) : 1.0f;
  }
  __syncthreads();
  for (int t = threadIdx.x; t < n * WIDE; t += THREADS) {
    const int k = p.turned ? t / WIDE : t % n, l = p.turned ? t % WIDE : t / n;
    if (k >= deep || l >= lines) continue;
    const int64_t at = p.turned ? (a0 + k) * p.columns + l0 + l : (l0 + l) * p.columns + a0 + k;
    a[k][l] = (float)element_double(p.x, p.dtype, at) * sign[k];
  }
  for (int half = 1; half < n && whole; half *= 2) {
    __syncthreads();
    for (int t = threadIdx.x; t < n / 2 * WIDE; t += THREADS) {
      const int j = t / WIDE, l = t % WIDE, k = (j & ~(half - 1)) * 2 + (j & (half - 1));
      const double one = a[k][l], other = a[k + half][l];
      a[k][l] = one + other;
      a[k + half][l] = one - other;
    }
  }
  __syncthreads();
  for (int t = threadIdx.x; t < n * lines; t += THREADS) {
    const int l = t / n, k = t % n;
    if (k < deep)
      element_store(p.y, p.yields, (l0 + l) * p.along + a0 + k, whole ? a[k][l] * p.root : a[k][l]);
  }
}

// ------------------------------------------------------------------ groups of 16 in registers

enum {
  GROUP = 16,
  GROUPS = THREADS / 32,         // groups of a column per block of threads: one per warp
  COLUMNS = 64,                  // columns of x per block of threads: two per lane
  CHUNKS = GROUPS * GROUP / 8    // 16-byte parts of a column of the result
};

/// Rounds x to f32 toward zero. If the result is inexact, sets its last bit, as f32_odd_from_f64
/// does.
__device__ inline float odd_from(double x)
{
  const float low = __double2float_rz(x);
  return __uint_as_float(__float_as_uint(low) | ((double)low != x));
}

/// Transforms 16 numbers of a column, and rounds them to bf16 in eight words.
__device__ inline void rotate_group(words<bf16_t, GROUP> &to, const float (&x)[GROUP], double root)
{
  double v[GROUP];
#pragma unroll
  for (int k = 0; k < GROUP; k++) v[k] = (double)x[k];
#pragma unroll
  for (int half = 1; half < GROUP; half *= 2)
#pragma unroll
    for (int k = 0; k < GROUP; k++) {
      if (k & half) continue;
      const double one = v[k], other = v[k + half];
      v[k] = one + other;
      v[k + half] = one - other;
    }
#pragma unroll
  for (int k = 0; k < GROUP; k += 2)
    to.w[k / 2] = rounded_pair(bf16_t{}, odd_from(v[k] * root), odd_from(v[k + 1] * root));
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 3) rotate_columns(const __grid_constant__ rotation p)
{
  // chunk q of column c is at q ^ (c / 2 % 8), so neither writes nor reads have bank conflicts
  __shared__ uint4 turned[COLUMNS][CHUNKS];
  const int64_t across = (p.lines + COLUMNS - 1) / COLUMNS,
                a0 = blockIdx.x / across * (GROUPS * GROUP), l0 = blockIdx.x % across * COLUMNS;
  const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
  const int64_t row = a0 + group * GROUP, column = l0 + 2 * lane;
  if (row < p.along && column < p.lines) {
    words<T, 2> raw[GROUP];
#pragma unroll
    for (int k = 0; k < GROUP; k++)
      load_words(raw[k], (const T *)p.x + (row + k) * p.columns + column);
#pragma unroll 1                       // unrolled, it would need too many registers
    for (int h = 0; h < 2; h++) {
      words<bf16_t, GROUP> y;
      float x[GROUP];
#pragma unroll
      for (int k = 0; k < GROUP; k++) {
        float two[2];
        widen_words(two, raw[k]);
        x[k] = h ? two[1] : two[0];
        if (p.negative >> k & 1) x[k] = -x[k];
      }
      rotate_group(y, x, p.root);
#pragma unroll
      for (int q = 0; q < 2; q++)
        turned[2 * lane + h][(2 * group + q) ^ lane % 8] =
          make_uint4(y.w[4 * q], y.w[4 * q + 1], y.w[4 * q + 2], y.w[4 * q + 3]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < COLUMNS * CHUNKS / THREADS; i++) {
    const int c = (threadIdx.x + i * THREADS) / CHUNKS, q = threadIdx.x % CHUNKS;
    if (l0 + c < p.lines && a0 + 8 * q < p.along)
      *(uint4 *)((uint16_t *)p.y + (l0 + c) * p.along + a0 + 8 * q) = turned[c][q ^ c / 2 % 8];
  }
}

/// Whether rotate_columns can compute this transform.
bool fits_columns(const rotation &p)
{
  return p.turned && p.n == GROUP && (p.dtype == ENG_bf16 || p.dtype == ENG_f32) &&
         p.yields == ENG_bf16 && p.along % GROUP == 0 && p.lines % 2 == 0 &&
         (uintptr_t)p.x % 8 == 0 && (uintptr_t)p.y % 16 == 0;
}

}  // namespace

extern "C" eng_status cuda_hadamard(const op_call *call)
{
  const auto &a = call->hadamard;
  const tensor *x = call->in[0];
  rotation p = {};
  p.x = x->data;
  p.y = call->out[0]->data;
  p.dtype = x->dtype;
  p.yields = call->out[0]->dtype;
  p.n = (int)a.n;
  p.turned = a.turned;
  p.columns = x->shape[x->ndim - 1];
  const int64_t rows = p.columns ? x->count / p.columns : 0;
  p.along = p.turned ? rows : p.columns;
  p.lines = p.turned ? p.columns : rows;
  p.signs = a.signs;
  p.seed = rng_seed();
  p.root = sqrt(1.0 / (double)a.n);
  const bool fast = fits_columns(p);
  const int64_t deep = fast ? GROUPS * GROUP : p.n, wide = fast ? (int)COLUMNS : (int)WIDE,
                groups = parts(p.along, deep) * parts(p.lines, wide);
  FAIL_IF(groups > INT32_MAX, ENG_ERR_VALUE, "hadamard: expected at most 2^31 - 1 thread blocks, "
          "got %lld for %lld x %lld numbers; hint: a smaller batch", (long long)groups,
          (long long)rows, (long long)p.columns);
  if (fast) {
    uint32_t word[4] = {0, 0, 0, 0};
    if (p.signs > 0) philox_of(word, p.seed, (uint64_t)p.signs);
    for (int k = 0; k < GROUP; k++) p.negative |= (uint32_t)(mx_sign(p.signs, word, k) < 0) << k;
  }
  auto kernel = !fast                ? rotate :
                p.dtype == ENG_bf16 ? rotate_columns<bf16_t> :
                                      rotate_columns<float>;
  if (groups > 0) kernel<<<(unsigned)groups, THREADS, 0, cuda_stream()>>>(p);
  return cuda_launched("hadamard");
}
