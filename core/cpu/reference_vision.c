// Reference kernels for convolution, pooling, batch norm and group norm, with their gradients. They
// loop over every element and compute in double. Images are [N x H x W x C]. See reference.h.
// Called through reference.c.
#include "base/pool_windows.h"
#include "reference.h"

#include <math.h>

// ------------------------------------------------------------------ convolution

enum { X, W, Y, TENSORS };

// Adds to each element of tensor `result` (X, W or Y) its terms. A term is the product of one
// element of each of the other two tensors. `values` are dense arrays in the shapes of `part`.
static void add_products(const op_call *c, tensor *const part[TENSORS], double *const *values,
                         int result)
{
  const int64_t *x = part[X]->shape, *w = part[W]->shape, *y = part[Y]->shape;
  int64_t cg = w[1], og = w[0] / (c->conv2d.groups ? c->conv2d.groups : 1);
  const int64_t *stride = c->conv2d.stride, *pad = c->conv2d.padding, *step = c->conv2d.dilation;
  int one = (result + 1) % TENSORS, other = (result + 2) % TENSORS;
  for (int64_t n = 0; n < y[0]; n++)
    for (int64_t p = 0; p < y[1]; p++)
      for (int64_t q = 0; q < y[2]; q++)
        for (int64_t o = 0; o < y[3]; o++)
          for (int64_t i = 0; i < w[2]; i++)
            for (int64_t j = 0; j < w[3]; j++) {
              int64_t h = p * stride[0] - pad[0] + i * step[0],
                      v = q * stride[1] - pad[1] + j * step[1];
              if (h < 0 || h >= x[1] || v < 0 || v >= x[2]) continue;
              for (int64_t k = 0; k < cg; k++) {
                int64_t at[TENSORS] = {((n * x[1] + h) * x[2] + v) * x[3] + o / og * cg + k,
                                       ((o * cg + k) * w[2] + i) * w[3] + j,
                                       ((n * y[1] + p) * y[2] + q) * y[3] + o};
                values[result][at[result]] += values[one][at[one]] * values[other][at[other]];
              }
            }
}

static eng_status convolve(const op_call *call, tensor *const part[TENSORS], int result,
                           const tensor *bias, bool add)
{
  const tensor *out = part[result];
  VALUES(start, bias);
  ZEROS(double, x, part[X]->count);
  ZEROS(double, w, part[W]->count);
  ZEROS(double, y, part[Y]->count);
  double *const values[TENSORS] = {x, w, y};
  for (int k = 0; k < TENSORS; k++)
    if (k != result) values_load(values[k], part[k]);
  for (int64_t i = 0; bias && i < out->count; i++) values[result][i] = start[i % bias->count];
  add_products(call, part, values, result);
  values_store(out, values[result], add);
  return ENG_OK;
}

eng_status reference_conv2d(const op_call *call)
{
  return convolve(call, (tensor *[]){call->in[0], call->in[1], call->out[0]}, Y, call->in[2],
                  false);
}

eng_status reference_conv2d_grad_x(const op_call *call)
{ return convolve(call, (tensor *[]){call->out[0], call->in[1], call->in[0]}, X, NULL, false); }

eng_status reference_conv2d_grad_w(const op_call *call)
{
  return convolve(call, (tensor *[]){call->in[1], call->out[0], call->in[0]}, W, NULL,
                  call->conv2d_grad_w.add);
}

// ------------------------------------------------------------------ pooling

static int64_t place(const tensor *x, int64_t n, int64_t i, int64_t j)
{ return ((n * x->shape[1] + i) * x->shape[2] + j) * x->shape[3]; }

// Pools `large` into `small`, which are dense arrays in the shapes of tl and ts. With `back`, reads
// the gradient of each window's result from `small`. Max pooling adds it to the maximum's cell in
// `large`; average pooling adds an equal share to each cell of the window. `cell` holds each
// maximum's position in its window; NULL means average pooling.
static void pool(const op_call *c, const tensor *tl, double *large, const tensor *ts, double *small,
                 double *cell, bool back)
{
  pool_side side[2];
  for (int d = 0; d < 2; d++)
    side[d] = (pool_side){tl->shape[1 + d], ts->shape[1 + d], c->max_pool2d.kernel[d],
                          c->max_pool2d.stride[d], c->max_pool2d.padding[d]};
  bool counted = !cell && c->avg_pool2d.counted;
  for (int64_t k = 0; k < ts->count; k++) {
    int64_t channel = k % ts->shape[3], j = k / ts->shape[3] % ts->shape[2],
            i = k / ts->shape[3] / ts->shape[2] % ts->shape[1],
            n = k / ts->shape[3] / ts->shape[2] / ts->shape[1], top, left;
    pool_range rows = pool_cells(&side[0], i, &top), columns = pool_cells(&side[1], j, &left);
    double area = (double)(pool_divisor(&side[0], rows, top, counted) *
                           pool_divisor(&side[1], columns, left, counted)), sum = 0.0;
    bool first = true;
    for (int64_t h = rows.first; h < rows.end; h++)
      for (int64_t w = columns.first; w < columns.end; w++) {
        double number = (double)((h - top) * side[1].kernel + w - left);
        double *x = &large[place(tl, n, h, w) + channel];
        if (back) *x += !cell ? small[k] / area : cell[k] == number ? small[k] : 0.0;
        else if (!cell) sum += *x;
        else if (first || *x > small[k] || *x != *x) small[k] = *x, cell[k] = number;
        first = false;
      }
    if (!back && !cell) small[k] = sum / area;
  }
}

static eng_status pool_images(const op_call *call, bool max, bool back)
{
  const tensor *tl = back ? call->out[0] : call->in[0], *ts = back ? call->in[0] : call->out[0];
  ZEROS(double, large, tl->count);
  ZEROS(double, small, ts->count);
  ZEROS(double, cell, max ? ts->count : 0);
  values_load(back ? small : large, call->in[0]);
  if (max && back) values_load(cell, call->in[1]);
  pool(call, tl, large, ts, small, max ? cell : NULL, back);
  values_store(call->out[0], back ? large : small, false);
  if (max && !back) values_store(call->out[1], cell, false);
  return ENG_OK;
}

eng_status reference_max_pool2d(const op_call *call)      { return pool_images(call, true, false); }
eng_status reference_max_pool2d_grad(const op_call *call) { return pool_images(call, true, true); }
eng_status reference_avg_pool2d_grad(const op_call *call) { return pool_images(call, false, true); }
eng_status reference_avg_pool2d(const op_call *call)
{ return pool_images(call, false, false); }

// ------------------------------------------------------------------ norms

// Describes x [N x rows x C] with its channels divided into groups. Batch norm has one sample with
// all rows, and one channel per group.
typedef struct grouped { int64_t rows, channels, groups, width, statistics; } grouped;

static grouped groups_of(const tensor *x, bool batch, int64_t groups)
{
  int64_t channels = x->shape[x->ndim - 1], samples = batch ? 1 : x->shape[0];
  if (batch) groups = channels;
  return (grouped){x->count ? x->count / (channels * samples) : 0, channels, groups,
                   groups ? channels / groups : 0, samples * groups};
}

/// Returns the index of the statistic to which element i belongs.
static int64_t group_of(const grouped *g, int64_t i)
{ return i / (g->rows * g->channels) * g->groups + i % g->channels / g->width; }

static eng_status norm(const op_call *call, bool batch)
{
  const tensor *tx = call->in[0];
  grouped g = groups_of(tx, batch, batch ? 0 : call->group_norm.groups);
  bool given = batch && call->in[3];
  double count = (double)(g.rows * g.width);
  double eps = batch ? call->batch_norm.eps : call->group_norm.eps;
  VALUES(x, tx);
  VALUES(weight, call->in[1]);
  VALUES(bias, call->in[2]);
  ZEROS(double, mean, g.statistics);
  ZEROS(double, variance, g.statistics);
  if (given) values_load(mean, call->in[3]), values_load(variance, call->in[4]);
  for (int64_t i = 0; !given && i < tx->count; i++) mean[group_of(&g, i)] += x[i];
  for (int64_t k = 0; !given && k < g.statistics; k++) mean[k] /= count;
  for (int64_t i = 0; !given && i < tx->count; i++) {
    double d = x[i] - mean[group_of(&g, i)];
    variance[group_of(&g, i)] += d * d;
  }
  for (int64_t k = 0; !given && k < g.statistics; k++) variance[k] /= count;
  for (int64_t i = 0; i < tx->count; i++) {
    int64_t k = group_of(&g, i), c = i % g.channels;
    x[i] = (x[i] - mean[k]) / sqrt(variance[k] + eps) * (weight ? weight[c] : 1.0) +
           (bias ? bias[c] : 0.0);
  }
  values_store(call->out[0], x, false);
  if (!given) values_store(call->out[1], mean, false);
  if (!given) values_store(call->out[2], variance, false);
  return ENG_OK;
}

// With h = (x - mean) * rstd and g = dy * weight:
//   dx = rstd * (g - mean(g) - h * mean(g * h)), dweight = sum of dy * h, dbias = sum of dy.
// If mean and variance do not depend on x, dx = rstd * g.
static eng_status norm_grad(const op_call *call, bool batch)
{
  const tensor *tx = call->in[0];
  grouped g = groups_of(tx, batch, batch ? 0 : call->group_norm_grad.groups);
  bool given = batch && call->batch_norm_grad.given;
  const tensor *part = batch ? call->in[5] : NULL;   // sums over the rows of all ranks, or NULL
  double count = (double)(part ? call->batch_norm_grad.rows : g.rows * g.width);
  double eps = batch ? call->batch_norm_grad.eps : call->group_norm_grad.eps;
  VALUES(x, tx);
  VALUES(weight, call->in[1]);
  VALUES(mean, call->in[2]);
  VALUES(rstd, call->in[3]);
  VALUES(dy, call->in[4]);
  VALUES(sums, part);
  ZEROS(double, mean_g, g.statistics);
  ZEROS(double, mean_gh, g.statistics);
  ZEROS(double, dweight, g.channels);
  ZEROS(double, dbias, g.channels);
  for (int64_t k = 0; k < g.statistics; k++) rstd[k] = 1.0 / sqrt(rstd[k] + eps);
  for (int64_t i = 0; i < tx->count; i++) {
    int64_t k = group_of(&g, i), c = i % g.channels;
    double h = (x[i] - mean[k]) * rstd[k], slope = dy[i] * (weight ? weight[c] : 1.0);
    dweight[c] += dy[i] * h;
    dbias[c] += dy[i];
    mean_g[k] += slope / count;
    mean_gh[k] += slope * h / count;
    x[i] = h;
    dy[i] = slope;
  }
  for (int64_t c = 0; sums && c < g.channels; c++) {
    double w = weight ? weight[c] : 1.0;
    mean_g[c] = w * sums[g.channels + c] / count;
    mean_gh[c] = w * sums[c] / count;
  }
  for (int64_t i = 0; i < tx->count; i++) {
    int64_t k = group_of(&g, i);
    x[i] = rstd[k] * (given ? dy[i] : dy[i] - mean_g[k] - x[i] * mean_gh[k]);
  }
  values_store(call->out[0], x, false);
  if (call->batch_norm_grad.affine) {
    values_store(call->out[1], dweight, false);
    values_store(call->out[2], dbias, false);
  }
  return ENG_OK;
}

eng_status reference_batch_norm(const op_call *call)      { return norm(call, true); }
eng_status reference_batch_norm_grad(const op_call *call) { return norm_grad(call, true); }
eng_status reference_group_norm(const op_call *call)      { return norm(call, false); }
eng_status reference_group_norm_grad(const op_call *call) { return norm_grad(call, false); }
