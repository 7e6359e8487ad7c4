// Batch norm and group norm of x [N x S x C], channels last, and their gradients. Batch norm is
// computed as the group norm of one sample that has all rows, with one group for each channel.
// Called through backend.kernel[]; owns nothing.
//
// Rows are cut into blocks that stay in the second-level cache; the blocks depend on the shape
// alone. In the forward pass, each block computes, in f32 and for each channel, the mean, the
// mean's rounding error and the sum of squared deviations. In the backward pass, it computes the
// sums of dy and of dy * (x - mean). The results of the blocks, and then of the channels of a
// group, are combined in double, in a fixed order. A call with a variance above MOST_VARIANCE runs
// in the reference kernel; so does a forward pass that finds a variance of NaN.
#include "rows.h"
#include "simd.h"
#include "tasks.h"

// A block has about BLOCK_ELEMENTS elements, but at least ROWS_LEAST and at most ROWS_MOST rows,
// few enough to sum in f32. The last block may have fewer.
enum { BLOCK_ELEMENTS = 16384, ROWS_LEAST = 16, ROWS_MOST = 128,
       PARTS = 3 };                            // numbers that a block yields for each channel

// With a larger variance, x - mean and its products with dy may overflow f32, and 1 / variance may
// underflow.
static const double MOST_VARIANCE = 0x1p100;

typedef struct channel_norm {
  const tensor *x, *dy, *out;
  int64_t samples, rows, channels, groups;     // `rows` counts the rows of one sample
  int64_t block_rows, blocks;                  // `blocks` counts the blocks of one sample
  float  *partial;                             // [samples x blocks x PARTS x channels]
  float  *factor;                              // [samples x 4 x channels]: see apply_rows
  bool    given;                               // backward pass: the statistics are constants
} channel_norm;

static channel_norm shape_of(const tensor *x, bool batch, int64_t groups)
{
  channel_norm s = {.x = x, .channels = x->shape[x->ndim - 1]};
  s.samples = batch ? 1 : x->shape[0];
  s.rows = x->count / (s.samples * s.channels);
  s.groups = batch ? s.channels : groups;
  s.block_rows = larger(ROWS_LEAST, smaller(ROWS_MOST, BLOCK_ELEMENTS / s.channels));
  s.blocks = (s.rows + s.block_rows - 1) / s.block_rows;
  return s;
}

static int64_t first_of(const channel_norm *s, int64_t sample, int64_t row)
{ return (sample * s->rows + row) * s->channels; }

static void add_row(float *restrict a, const float *restrict b, int n)
{ for (int i = 0; i < n; i++) a[i] += b[i]; }

/// Adds the deviations from m to `sum` and their squares to `squares`.
static void add_deviations(float *restrict sum, float *restrict squares, const float *restrict x,
                           const float *restrict m, int n)
{
  for (int i = 0; i < n; i++) {
    float d = x[i] - m[i];
    sum[i] += d;
    squares[i] += d * d;
  }
}

static void add_products(float *restrict a, const float *restrict x, const float *restrict m,
                         const float *restrict dy, int n)
{ for (int i = 0; i < n; i++) a[i] += dy[i] * (x[i] - m[i]); }

/// Forward pass: computes the mean, the sum of squared deviations and the mean's rounding error of
/// each channel in a block.
static void measure(const void *context, int64_t task)
{
  const channel_norm *s = context;
  int64_t sample = task / s->blocks, row = task % s->blocks * s->block_rows, n = s->channels,
          end = smaller(s->rows, row + s->block_rows);
  float *mean = s->partial + task * PARTS * n, *squares = mean + n, *error = squares + n,
        buffer[TILE], sum[TILE];
  const float count = (float)(end - row);
  memset(mean, 0, (size_t)(2 * n) * sizeof *mean);
  for (int64_t c = 0; c < n; c += TILE) {
    int length = (int)smaller(TILE, n - c);
    memset(sum, 0, sizeof sum);
    for (int64_t r = row; r < end; r++)
      add_row(mean + c, tile_load(buffer, s->x->data, s->x->dtype, first_of(s, sample, r) + c,
                                  length), length);
    for (int i = 0; i < length; i++) mean[c + i] /= count;
    for (int64_t r = row; r < end; r++)
      add_deviations(sum, squares + c, tile_load(buffer, s->x->data, s->x->dtype,
                                                 first_of(s, sample, r) + c, length),
                     mean + c, length);
    for (int i = 0; i < length; i++) {
      error[c + i] = sum[i] / count;
      float rest = squares[c + i] - sum[i] * (sum[i] / count);
      squares[c + i] = rest < 0.0f ? 0.0f : rest;
    }
  }
}

/// Backward pass: computes the sums of dy and of dy * (x - mean) of each channel over a block.
static void measure_grad(const void *context, int64_t task)
{
  const channel_norm *s = context;
  int64_t sample = task / s->blocks, row = task % s->blocks * s->block_rows, n = s->channels,
          end = smaller(s->rows, row + s->block_rows);
  const float *mean = s->factor + sample * 4 * n;
  float *sum = s->partial + task * PARTS * n, *product = sum + n, buffer[2][TILE];
  memset(sum, 0, (size_t)(2 * n) * sizeof *sum);
  for (int64_t r = row; r < end; r++)
    for (int64_t c = 0; c < n; c += TILE) {
      int64_t first = first_of(s, sample, r) + c;
      int length = (int)smaller(TILE, n - c);
      const float *x = tile_load(buffer[0], s->x->data, s->x->dtype, first, length),
                  *dy = tile_load(buffer[1], s->dy->data, s->dy->dtype, first, length);
      add_row(sum + c, dy, length);
      add_products(product + c, x, mean + c, dy, length);
    }
}

/// Computes out for the rows of a block. f0 to f3 [channels] are the four rows of s->factor for the
/// sample.
///   forward    out = (x - f0) * f1 + f2
///   backward   out = dy * f1 + (x - f0) * f3 + f2; with constant statistics, out = dy * f1
static void apply_rows(const void *context, int64_t task)
{
  const channel_norm *s = context;
  int64_t sample = task / s->blocks, row = task % s->blocks * s->block_rows, n = s->channels,
          end = smaller(s->rows, row + s->block_rows);
  float bx[TILE] __attribute__((aligned(64))), bd[TILE] __attribute__((aligned(64))),
    by[TILE] __attribute__((aligned(64)));
  for (int64_t r = row; r < end; r++)
    for (int64_t c = 0; c < n; c += TILE) {
      const float *f0 = s->factor + sample * 4 * n + c, *f1 = f0 + n, *f2 = f1 + n, *f3 = f2 + n;
      int64_t first = first_of(s, sample, r) + c;
      int length = (int)smaller(TILE, n - c), i = 0;
      const float *x = tile_load(bx, s->x->data, s->x->dtype, first, length);
      float *y = tile_target(by, s->out->data, s->out->dtype, first);
      if (!s->dy) {
        for (; i + VF_LANES <= length; i += VF_LANES)
          vf_store(y + i, vf_fma(vf_sub(vf_load(x + i), vf_load(f0 + i)), vf_load(f1 + i),
                                 vf_load(f2 + i)));
        for (; i < length; i++) y[i] = (x[i] - f0[i]) * f1[i] + f2[i];
      } else {
        const float *d = tile_load(bd, s->dy->data, s->dy->dtype, first, length);
        if (s->given) for (i = 0; i < length; i++) y[i] = d[i] * f1[i];
        for (; i + VF_LANES <= length; i += VF_LANES) {
          vf t = vf_fma(vf_sub(vf_load(x + i), vf_load(f0 + i)), vf_load(f3 + i), vf_load(f2 + i));
          vf_store(y + i, vf_fma(vf_load(d + i), vf_load(f1 + i), t));
        }
        for (; i < length; i++) y[i] = d[i] * f1[i] + ((x[i] - f0[i]) * f3[i] + f2[i]);
      }
      tile_store(s->out->data, s->out->dtype, first, y, length);
    }
}

static void run_blocks(const channel_norm *s, task_body *body)
{ run_tasks(s->samples * s->blocks, s->x->count > PARALLEL_ELEMENTS, body, s); }

// ------------------------------------------------------------------ forward

/// Computes the mean and variance of a group (channels [from, to)) from the results of its blocks.
static void combine(const channel_norm *s, int64_t sample, int64_t from, int64_t to, double *mean,
                    double *variance)
{
  const float *partial = s->partial + sample * s->blocks * PARTS * s->channels;
  double sum = 0.0, squares = 0.0, count = (double)(s->rows * (to - from));
  *mean = 0.0;
  for (int pass = 0; pass < 2; pass++) {
    for (int64_t b = 0; b < s->blocks; b++) {
      const float *block = partial + b * PARTS * s->channels, *error = block + 2 * s->channels;
      double n = (double)smaller(s->block_rows, s->rows - b * s->block_rows);
      for (int64_t c = from; c < to; c++) {
        double m = (double)block[c] + error[c], d = m - *mean;
        if (pass == 0) sum += n * m;
        else squares += block[s->channels + c] + n * d * d;
      }
    }
    if (pass == 0) *mean = sum / count;
  }
  *variance = squares / count;
}

static void put_statistic(const tensor *x, int64_t i, double value)
{ if (x) tensor_store(x->data, x->dtype, i, value); }

static double number_at(const tensor *x, int64_t i, double absent)
{ return x ? tensor_load(x->data, x->dtype, i) : absent; }

static eng_status norm(const op_call *call, bool batch)
{
  op_call y = *call;
  y.n_out = 1;   // all_fast then checks no output but y, because the statistics may be f64
  if (!all_fast(&y) || call->in[0]->count == 0) return forward_to_reference(call);
  channel_norm s = shape_of(call->in[0], batch, batch ? 0 : call->group_norm.groups);
  const tensor *weight = call->in[1], *bias = call->in[2], *given = batch ? call->in[3] : NULL;
  double eps = batch ? call->batch_norm.eps : call->group_norm.eps;
  int64_t width = s.channels / s.groups;
  SCRATCH(float, partial, s.samples * s.blocks * PARTS * s.channels);
  SCRATCH(float, factor, s.samples * 4 * s.channels);
  s.out = call->out[0], s.partial = partial, s.factor = factor;
  if (!given) run_blocks(&s, measure);
  for (int64_t k = 0; k < s.samples * s.groups; k++) {
    int64_t sample = k / s.groups, from = k % s.groups * width;
    float *f = s.factor + sample * 4 * s.channels;
    double mean, variance;
    if (given) mean = number_at(given, k, 0), variance = number_at(call->in[4], k, 0);
    else combine(&s, sample, from, from + width, &mean, &variance);
    if (!(variance <= MOST_VARIANCE)) return forward_to_reference(call);   // also if NaN
    if (!given) put_statistic(call->out[1], k, mean), put_statistic(call->out[2], k, variance);
    double rstd = 1.0 / sqrt(variance + eps);
    for (int64_t c = from; c < from + width; c++) {
      f[c] = (float)mean;
      f[s.channels + c] = (float)(rstd * number_at(weight, c, 1.0));
      f[2 * s.channels + c] = (float)number_at(bias, c, -0.0);
    }
  }
  run_blocks(&s, apply_rows);
  return ENG_OK;
}

// ------------------------------------------------------------------ backward

/// Computes the sums of dy and of dy * (x - mean) in channel c, over all blocks of a sample.
static void sums_of(const channel_norm *s, int64_t sample, int64_t c, double *sum, double *product)
{
  const float *block = s->partial + sample * s->blocks * PARTS * s->channels + c;
  *sum = *product = 0.0;
  for (int64_t b = 0; b < s->blocks; b++, block += PARTS * s->channels) {
    *sum += block[0];
    *product += block[s->channels];
  }
}

static eng_status norm_grad(const op_call *call, bool batch)
{
  if (!all_fast(call) || call->in[0]->count == 0) return forward_to_reference(call);
  channel_norm s = shape_of(call->in[0], batch, batch ? 0 : call->group_norm_grad.groups);
  const tensor *weight = call->in[1], *means = call->in[2], *variances = call->in[3],
               *sums = batch ? call->in[5] : NULL;
  tensor *const *out = call->out;
  double eps = batch ? call->batch_norm_grad.eps : call->group_norm_grad.eps;
  int64_t C = s.channels, width = C / s.groups;
  s.given = batch && call->batch_norm_grad.given;
  SCRATCH(float, partial, s.samples * s.blocks * PARTS * C);
  SCRATCH(float, factor, s.samples * 4 * C);
  SCRATCH(double, total, 2 * C);
  s.dy = call->in[4], s.out = out[0], s.partial = partial, s.factor = factor;
  memset(total, 0, (size_t)(2 * C) * sizeof *total);
  for (int64_t k = 0; k < variances->count; k++)
    if (get(variances->data, variances->dtype, k) > MOST_VARIANCE)
      return forward_to_reference(call);
  for (int64_t k = 0; k < s.samples * C; k++)
    s.factor[k / C * 4 * C + k % C] = get(means->data, means->dtype, k / width);
  run_blocks(&s, measure_grad);
  for (int64_t k = 0; k < s.samples * s.groups; k++) {
    int64_t sample = k / s.groups, from = k % s.groups * width;
    float *f = s.factor + sample * 4 * C;
    double rstd = 1.0 / sqrt((double)get(variances->data, variances->dtype, k) + eps),
           mean_g = 0.0, mean_gh = 0.0, sum, product,
           count = (double)(sums ? call->batch_norm_grad.rows : s.rows * width);
    for (int64_t c = from; c < from + width; c++) {
      double w = number_at(weight, c, 1.0);
      sums_of(&s, sample, c, &sum, &product);
      total[c] += product * rstd;
      total[C + c] += sum;
      mean_g += w * (sums ? number_at(sums, C + c, 0) : sum) / count;
      mean_gh += w * (sums ? number_at(sums, c, 0) : product * rstd) / count;
      f[C + c] = (float)(rstd * w);
    }
    for (int64_t c = from; c < from + width; c++) {
      f[2 * C + c] = (float)(-rstd * mean_g);
      f[3 * C + c] = (float)(-rstd * rstd * mean_gh);
    }
  }
  for (int k = 1; k < 3; k++)
    for (int64_t c = 0; c < C && out[k]; c++)
      put(out[k]->data, out[k]->dtype, c, total[(k - 1) * C + c]);
  if (out[0]) run_blocks(&s, apply_rows);
  return ENG_OK;
}

KERNEL(batch_norm) { return norm(call, true); }
KERNEL(batch_norm_grad) { return norm_grad(call, true); }
KERNEL(group_norm) { return norm(call, false); }
KERNEL(group_norm_grad) { return norm_grad(call, false); }
