// The operation hadamard, bit-equal to core/cpu/reference_mx.c: sums are in f64 and in the CPU's
// order. A line is a row of x or, if `turned`, a column. A block of threads takes WIDE lines and
// transforms one group of n adjacent elements in each.
#include "kernel/element.h"
#include "kernel/walk.h"

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
  int      dtype, yields, n;
  bool     turned;
  int64_t  along, lines, columns, signs;   // y is [lines x along]; x has `columns` columns
  uint64_t seed;
  double   root;
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
    a[k][l] = (float)load_double(p.x, p.dtype, at) * sign[k];
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
      store_double(p.y, p.yields, (l0 + l) * p.along + a0 + k, whole ? a[k][l] * p.root : a[k][l]);
  }
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
  const int64_t groups = (p.along + p.n - 1) / p.n * ((p.lines + WIDE - 1) / WIDE);
  if (groups > INT32_MAX)
    return error_set(ENG_ERR_VALUE,
                     "hadamard: %lld x %lld numbers are too many for one call; hint: a smaller "
                     "batch", (long long)rows, (long long)p.columns);
  if (groups > 0) rotate<<<(unsigned)groups, THREADS, 0, cuda_stream()>>>(p);
  CUDA_LAUNCHED("hadamard");
  return ENG_OK;
}
