// Layer norm and RMS norm, forward and backward, over the last dimension. RMS norm is layer norm
// with a mean of 0, so both share their loops; `centred`, a compile-time constant, tells them
// apart. Called through the backend table; owns nothing.
//
// A row stays in the caches: memory is read once forward (x) and once backward (x and dy).
// With a residual (`adds`, also a compile-time constant), the row is x + branch, rounded to the
// format in which this sum is stored. dx then includes dsum, the gradient of the stored sum. Sums
// over a row are in f32 within a tile and in double across tiles; the variance is taken about the
// computed mean. Where f32 is not enough, mean and variance are computed entirely in double
// (wide_moments).
#include "simd.h"
#include "rows.h"

enum {
  BLOCK_ROWS = 32,                   // the fewest rows in a block of column sums, except the last
  BLOCKS_MOST = 128,                 // the most blocks of a call
  BLOCK_FLOATS = 4 << 20,            // roughly the most floats of partial sums in a call
  COLUMN_CHUNK = 64                  // columns that a thread sums over the blocks at a time
};

/// Returns the vector v of the call as f32 [n]: its own memory, a conversion in `buffer`, or n
/// copies of `absent` if v is NULL.
static const float *vector_f32(float *buffer, const tensor *v, int64_t n, float absent)
{
  if (v) return tile_load(buffer, v->data, v->dtype, 0, n);
  for (int64_t i = 0; i < n; i++) buffer[i] = absent;
  return buffer;
}

// ------------------------------------------------------------------ forward

// If variance / mean^2 is below this limit, the rounding error of a tile's f32 sum would show in y,
// so the row's mean and variance are computed in double.
static const double NARROW = 1e-4;

/// Computes in double the mean (0 if not `centred`) and the mean square deviation of a row. Used
/// for a row whose f32 sums overflow, a row with Inf or NaN, or a row whose mean is large for its
/// spread. The mean of a constant row is that constant, so its deviations are 0.
static __attribute__((noinline)) double wide_moments(const float *x, int64_t n, bool centred,
                                                     float *mean)
{
  double sum = 0.0, squares = 0.0;
  for (int64_t i = 0; i < n && centred; i++) sum += x[i];
  const double middle = sum / (double)n;
  *mean = (float)middle;
  for (int64_t i = 0; i < n; i++) {
    double d = (double)x[i] - middle;
    squares += d * d;
  }
  return squares / (double)n;
}

/// Writes y = (x - mean) * rstd * weight + bias for one row.
static void normalize(const float *x, const float *weight, const float *bias, float mean,
                      float rstd, void *y, int dtype, int64_t first, int64_t n)
{
  float buffer[TILE] __attribute__((aligned(64)));
  vf m = vf_set1(mean), r = vf_set1(rstd);
  for (int64_t at = 0; at < n; at += TILE) {
    int length = (int)smaller(TILE, n - at);
    const float *in = x + at, *w = weight + at, *b = bias + at;
    float *out = tile_target(buffer, y, dtype, first + at);
    FOR_VECTORS(i, length, {
      vf t = vf_mul(vf_sub(vf_load_n(in + i, lanes), m), r);
      vf_store_n(out + i, vf_fma(t, vf_load_n(w + i, lanes), vf_load_n(b + i, lanes)), lanes);
    });
    tile_store(y, dtype, first + at, out, length);
  }
}

// The next two functions add n elements. `void *` tensors are in the narrow format `dtype`, a
// constant, and are read and written from element `first` on. Values are rounded to that format by
// storing and loading them again.

/// Writes sum = a + b. `row` [n] receives the rounded sum in f32.
VF_INLINE void sum_narrow(float *row, void *sum, const void *a, const void *b, const int dtype,
                          int64_t first, int64_t n)
{
  FOR_VECTORS(i, n, {
    vf q = vf_read(b, dtype, first + i, lanes), p = vf_read(a, dtype, first + i, lanes);
    vf_write(sum, dtype, first + i, vf_add(p, q), lanes);
    vf_store_n(row + i, vf_read(sum, dtype, first + i, lanes), lanes);
  });
}

/// Writes y = a + b. First rounds the n numbers of b to `dtype`.
VF_INLINE void add_rounded(void *y, const void *a, const float *b, const int dtype, int64_t first,
                           int64_t n)
{
  FOR_VECTORS(i, n, {
    vf_write(y, dtype, first + i, vf_load_n(b + i, lanes), lanes);
    vf rounded = vf_read(y, dtype, first + i, lanes);
    vf_write(y, dtype, first + i, vf_add(vf_read(a, dtype, first + i, lanes), rounded), lanes);
  });
}

/// Writes a row of sum = x + branch. Returns the rounded row in f32, which is the memory of `sum`
/// or `buffer` [n].
static const float *add_row(float *buffer, const tensor *sum, const tensor *x, const tensor *branch,
                            int64_t first, int64_t n)
{
  float *row = tile_target(buffer, sum->data, sum->dtype, first);
  if (x->dtype == branch->dtype && sum->dtype == x->dtype && x->dtype != ENG_f32) {
    if (x->dtype == ENG_f16) sum_narrow(row, sum->data, x->data, branch->data, ENG_f16, first, n);
    else sum_narrow(row, sum->data, x->data, branch->data, ENG_bf16, first, n);
    return row;
  }
  float tx[TILE] __attribute__((aligned(64))), tb[TILE] __attribute__((aligned(64)));
  for (int64_t at = 0; at < n; at += TILE) {
    int length = (int)smaller(TILE, n - at);
    MAP2(row + at, tile_load(tx, x->data, x->dtype, first + at, length),
         tile_load(tb, branch->data, branch->dtype, first + at, length), length, vf_add(a, b));
    if (sum->dtype == ENG_f32) continue;
    floats_to(sum->data, sum->dtype, first + at, row + at, length);
    floats_from(row + at, sum->data, sum->dtype, first + at, length);
  }
  return row;
}

/// Writes dx = dsum + `values` [n], after rounding `values` to dx's format.
static void add_gradient(const tensor *dx, const tensor *dsum, float *values, int64_t first, int n)
{
  if (dx->dtype == dsum->dtype && dx->dtype != ENG_f32) {
    if (dx->dtype == ENG_f16) add_rounded(dx->data, dsum->data, values, ENG_f16, first, n);
    else add_rounded(dx->data, dsum->data, values, ENG_bf16, first, n);
    return;
  }
  float buffer[TILE] __attribute__((aligned(64)));
  if (dx->dtype != ENG_f32) {
    floats_to(dx->data, dx->dtype, first, values, n);
    floats_from(values, dx->data, dx->dtype, first, n);
  }
  MAP2(values, tile_load(buffer, dsum->data, dsum->dtype, first, n), values, n, vf_add(a, b));
  tile_store(dx->data, dx->dtype, first, values, n);
}

static inline __attribute__((always_inline))
eng_status norm(const op_call *call, bool centred, bool adds)
{
  if (!all_fast(call)) return forward_to_reference(call);
  // with `adds`, branch follows x and sum follows y; `next` is the index after them in both lists
  const int next = adds ? 2 : 1;
  const tensor *x = call->in[0], *bias = centred ? call->in[next + 1] : NULL, *y = call->out[0];
  tensor *means = centred ? call->out[next] : NULL, *rstds = call->out[next + centred];
  int64_t n = row_length(x), rows = row_count(x), room = padded(n);
  SCRATCH(float, scratch, (2 + omp_get_max_threads()) * room);
  // x * 1 + -0 is x in every bit, -0 included.
  const float *weight = vector_f32(scratch, call->in[next], n, 1.0f);
  const float *shift = vector_f32(scratch + room, bias, n, -0.0f);
  double eps = call->layer_norm.eps;

#pragma omp parallel for schedule(static) if (x->count > PARALLEL_ELEMENTS)
  for (int64_t row = 0; row < rows; row++) {
    float *own = scratch + (2 + omp_get_thread_num()) * room;
    const float *in = adds ? add_row(own, call->out[1], x, call->in[1], row * n, n)
                           : tile_load(own, x->data, x->dtype, row * n, n);
    float mean = centred ? (float)(row_sum(in, ENG_f32, 0, n) / (double)n) : 0.0f;
    double variance = row_squares(in, n, mean) / (double)n;
    if (!f64_is_finite(variance) || variance < NARROW * mean * mean)
      variance = wide_moments(in, n, centred, &mean);
    float rstd = (float)(1.0 / sqrt(variance + eps));
    if (means) put(means->data, means->dtype, row, mean);
    if (rstds) put(rstds->data, rstds->dtype, row, rstd);
    normalize(in, weight, shift, mean, rstd, y->data, y->dtype, row * n, n);
  }
  return ENG_OK;
}

KERNEL(layer_norm) { return norm(call, true, false); }
KERNEL(rms_norm) { return norm(call, false, false); }
KERNEL(add_layer_norm) { return norm(call, true, true); }
KERNEL(add_rms_norm) { return norm(call, false, true); }

// ------------------------------------------------------------------ backward

/// Means of g and of g * xhat over a row, with g = dy * weight and xhat = (x - mean) * rstd.
typedef struct row_means { float g, gx; } row_means;

/// Returns the means of a row. Also adds dy * xhat to dweight [n] and dy to dbias [n] unless they
/// are NULL.
static inline __attribute__((always_inline)) row_means
backward_sums(const float *x, const float *dy, const float *weight, float mean, float rstd,
              int64_t n, float *dweight, float *dbias)
{
  vf m = vf_set1(mean), r = vf_set1(rstd);
  double sum_g = 0.0, sum_gx = 0.0;
  for (int64_t at = 0; at < n; at += TILE) {
    vf g_lanes = vf_zero(), gx_lanes = vf_zero();
    FOR_VECTORS(k, smaller(TILE, n - at), {
      int64_t i = at + k;
      vf d = vf_load_n(dy + i, lanes), g = vf_mul(d, vf_load_n(weight + i, lanes)),
         xhat = vf_mul(vf_sub(load_padded(x + i, lanes, mean), m), r);
      g_lanes = vf_add(g_lanes, g);
      gx_lanes = vf_fma(g, xhat, gx_lanes);
      if (dweight)
        vf_store_n(dweight + i, vf_fma(d, xhat, vf_load_n(dweight + i, lanes)), lanes);
      if (dbias) vf_store_n(dbias + i, vf_add(d, vf_load_n(dbias + i, lanes)), lanes);
    });
    sum_g += vf_sum(g_lanes);
    sum_gx += vf_sum(gx_lanes);
  }
  return (row_means){(float)(sum_g / (double)n), (float)(sum_gx / (double)n)};
}

/// Writes a row of dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), without the term mean(g) if
/// not centred. If there is a dsum, dx is rounded and then dsum is added.
static inline __attribute__((always_inline)) void backward_row(
  const float *x, const float *dy, const float *weight, float mean, float rstd, row_means means,
  bool centred, const tensor *dsum, const tensor *dx, int64_t first, int64_t n)
{
  float buffer[TILE] __attribute__((aligned(64)));
  vf m = vf_set1(mean), r = vf_set1(rstd), mean_g = vf_set1(centred ? means.g : 0.0f),
     minus_gx = vf_set1(-means.gx);
  for (int64_t at = 0; at < n; at += TILE) {
    int length = (int)smaller(TILE, n - at);
    const float *in = x + at, *d = dy + at, *w = weight + at;
    float *out = tile_target(buffer, dx->data, dx->dtype, first + at);
    FOR_VECTORS(i, length, {
      vf xhat = vf_mul(vf_sub(vf_load_n(in + i, lanes), m), r),
         g = vf_mul(vf_load_n(d + i, lanes), vf_load_n(w + i, lanes));
      vf_store_n(out + i, vf_mul(vf_fma(xhat, minus_gx, vf_sub(g, mean_g)), r), lanes);
    });
    if (dsum) add_gradient(dx, dsum, out, first + at, length);
    else tile_store(dx->data, dx->dtype, first + at, out, length);
  }
}

/// Sums the `blocks` rows of `partial`, which are `stride` floats apart, in order, and rounds the
/// sum once into `total` [n], which may be NULL.
static void sum_blocks(tensor *total, const float *partial, int64_t blocks, int64_t stride,
                       int64_t n)
{
  if (!total) return;
#pragma omp parallel for schedule(static) if (blocks * n > PARALLEL_ELEMENTS)
  for (int64_t at = 0; at < n; at += COLUMN_CHUNK) {
    float sum[COLUMN_CHUNK] __attribute__((aligned(64))) = {0};
    int64_t length = smaller(COLUMN_CHUNK, n - at);
    for (int64_t block = 0; block < blocks; block++) {
      const float *p = partial + block * stride + at;
      for (int64_t i = 0; i < length; i++) sum[i] += p[i];
    }
    floats_to(total->data, total->dtype, at, sum, length);
  }
}

static inline __attribute__((always_inline))
eng_status norm_grad(const op_call *call, bool centred, bool adds)
{
  if (!all_fast(call)) return forward_to_reference(call);
  const tensor *x = call->in[0], *means = centred ? call->in[2] : NULL,
               *rstds = call->in[2 + centred], *dy = call->in[3 + centred];
  const tensor *dsum = adds ? call->in[4 + centred] : NULL, *dx = call->out[0];
  tensor *dweight = call->layer_norm_grad.affine ? call->out[1] : NULL,
         *dbias = centred && call->layer_norm_grad.affine ? call->out[2] : NULL;
  int64_t n = row_length(x), rows = row_count(x), room = padded(n);

  // Blocks depend on the shape alone, so column sums are the same for any number of threads.
  bool columns = dweight || dbias;
  int64_t most = larger(4, smaller(BLOCKS_MOST, BLOCK_FLOATS / (2 * room + 1)));
  int64_t block_rows = larger(BLOCK_ROWS, (rows + most - 1) / most),
          blocks = (rows + block_rows - 1) / block_rows;
  int threads = omp_get_max_threads();
  SCRATCH(float, scratch, (1 + 2 * threads + (columns ? 2 * blocks : 0)) * room);
  const float *weight = vector_f32(scratch, call->in[1], n, 1.0f);
  float *partial = scratch + (1 + 2 * threads) * room;   // [blocks x 2 x room]: dweight, dbias

#pragma omp parallel for schedule(static) if (x->count > PARALLEL_ELEMENTS)
  for (int64_t block = 0; block < blocks; block++) {
    float *own = scratch + (1 + 2 * omp_get_thread_num()) * room;
    float *sum_w = partial + 2 * block * room, *sum_b = sum_w + room;
    if (columns) memset(sum_w, 0, (size_t)(2 * room) * sizeof(float));
    int64_t end = smaller(rows, (block + 1) * block_rows);
    for (int64_t row = block * block_rows; row < end; row++) {
      const float *in = tile_load(own, x->data, x->dtype, row * n, n);
      const float *d = tile_load(own + room, dy->data, dy->dtype, row * n, n);
      float mean = means ? get(means->data, means->dtype, row) : 0.0f,
            rstd = get(rstds->data, rstds->dtype, row);
      row_means sums = !columns ? backward_sums(in, d, weight, mean, rstd, n, NULL, NULL)
                     : dbias    ? backward_sums(in, d, weight, mean, rstd, n, sum_w, sum_b)
                                : backward_sums(in, d, weight, mean, rstd, n, sum_w, NULL);
      if (dx) backward_row(in, d, weight, mean, rstd, sums, centred, dsum, dx, row * n, n);
    }
  }
  sum_blocks(dweight, partial, blocks, 2 * room, n);
  sum_blocks(dbias, partial + room, blocks, 2 * room, n);
  return ENG_OK;
}

KERNEL(layer_norm_grad) { return norm_grad(call, true, false); }
KERNEL(rms_norm_grad) { return norm_grad(call, false, false); }
KERNEL(add_layer_norm_grad) { return norm_grad(call, true, true); }
KERNEL(add_rms_norm_grad) { return norm_grad(call, false, true); }
