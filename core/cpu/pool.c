// Max and average pooling of images [N x H x W x C], and their gradients. A task is one row of the
// result; the innermost loops run over channels. Gradients are gathered: an element of dx is the
// sum over the windows that contain it, in their order, so no two tasks write the same element.
// Sums are f32, rounded once. Called through backend.kernel[]; owns nothing.
#include "base/pool_windows.h"
#include "rows.h"
#include "simd.h"
#include "tasks.h"

typedef struct pooling {
  bool      max, counted;             // counted: the mean counts padding (pool_divisor)
  pool_side side[2];                  // H, W
  int64_t   channels;
  const tensor *large, *small;        // images [N x H x W x C], pooled images
  int32_t  *cell;                     // max pooling: each maximum's position in its window
} pooling;

static int64_t place(const tensor *x, int64_t n, int64_t i, int64_t j)
{ return ((n * x->shape[1] + i) * x->shape[2] + j) * x->shape[3]; }

static void max_tile(float *restrict best, int32_t *restrict at, const float *restrict x,
                     int32_t cell, int n)
{
  for (int i = 0; i < n; i++) {
    bool take = (x[i] > best[i]) | (x[i] != x[i]);
    best[i] = take ? x[i] : best[i];
    at[i] = take ? cell : at[i];
  }
}

static void add_tile(float *restrict sum, const float *restrict x, int n)
{ for (int i = 0; i < n; i++) sum[i] += x[i]; }

static void add_where(float *restrict sum, const float *restrict x, const int32_t *restrict at,
                      int32_t cell, int n)
{ for (int i = 0; i < n; i++) sum[i] += at[i] == cell ? x[i] : 0.0f; }

/// Computes channels [c, c + length) of output (n, i, j). In `cell`, a maximum's position in its
/// window is row * kernel width + column. Rows and columns count from 0 and include the padding.
static void pool_window(const pooling *p, int64_t n, int64_t i, int64_t j, int64_t c, int length)
{
  float buffer[TILE] __attribute__((aligned(64))), out[TILE] __attribute__((aligned(64)));
  int64_t top, left;
  pool_range rows = pool_cells(&p->side[0], i, &top), columns = pool_cells(&p->side[1], j, &left);
  int64_t to = place(p->small, n, i, j) + c;
  float divisor = (float)(pool_divisor(&p->side[0], rows, top, p->counted) *
                          pool_divisor(&p->side[1], columns, left, p->counted));
  for (int k = 0; k < length; k++) {
    out[k] = p->max ? -INFINITY : 0.0f;
    if (p->max)
      p->cell[to + k] = (int32_t)((rows.first - top) * p->side[1].kernel + columns.first - left);
  }
  for (int64_t h = rows.first; h < rows.end; h++)
    for (int64_t w = columns.first; w < columns.end; w++) {
      const float *x = tile_load(buffer, p->large->data, p->large->dtype,
                                 place(p->large, n, h, w) + c, length);
      int32_t cell = (int32_t)((h - top) * p->side[1].kernel + w - left);
      if (p->max) max_tile(out, p->cell + to, x, cell, length);
      else add_tile(out, x, length);
    }
  for (int k = 0; k < length && !p->max; k++) out[k] /= divisor;
  floats_to(p->small->data, p->small->dtype, to, out, length);
}

/// Computes channels [c, c + length) of dx at (n, h, w).
static void pool_cell(const pooling *p, int64_t n, int64_t h, int64_t w, int64_t c, int length)
{
  float buffer[TILE] __attribute__((aligned(64))), out[TILE] __attribute__((aligned(64))) = {0};
  pool_range rows = pool_windows(&p->side[0], h), columns = pool_windows(&p->side[1], w);
  for (int64_t i = rows.first; i < rows.end; i++)
    for (int64_t j = columns.first; j < columns.end; j++) {
      int64_t top, left, from = place(p->small, n, i, j) + c;
      pool_range r = pool_cells(&p->side[0], i, &top), s = pool_cells(&p->side[1], j, &left);
      const float *dy = tile_load(buffer, p->small->data, p->small->dtype, from, length);
      int32_t cell = (int32_t)((h - top) * p->side[1].kernel + w - left);
      float divisor = (float)(pool_divisor(&p->side[0], r, top, p->counted) *
                              pool_divisor(&p->side[1], s, left, p->counted));
      if (p->max) add_where(out, dy, p->cell + from, cell, length);
      else for (int k = 0; k < length; k++) out[k] += dy[k] / divisor;
    }
  floats_to(p->large->data, p->large->dtype, place(p->large, n, h, w) + c, out, length);
}

static inline void row_of(const pooling *p, int64_t task, const tensor *over, bool back)
{
  int64_t n = task / over->shape[1], i = task % over->shape[1];
  for (int64_t j = 0; j < over->shape[2]; j++)
    for (int64_t c = 0; c < p->channels; c += TILE) {
      int length = (int)smaller(TILE, p->channels - c);
      if (back) pool_cell(p, n, i, j, c, length);
      else pool_window(p, n, i, j, c, length);
    }
}

static void forward_row(const void *p, int64_t k)  { row_of(p, k, ((pooling *)p)->small, false); }
static void backward_row(const void *p, int64_t k) { row_of(p, k, ((pooling *)p)->large, true); }

static eng_status pool(const op_call *c, bool max, bool back)
{
  const tensor *large = back ? c->out[0] : c->in[0], *small = back ? c->in[0] : c->out[0];
  tensor *cell = max ? (back ? c->in[1] : c->out[1]) : NULL;
  if (!dtype_is_fast(large->dtype) || !dtype_is_fast(small->dtype)) return forward_to_reference(c);
  pooling p = {.max = max, .counted = !max && c->avg_pool2d.counted,
               .channels = large->shape[3], .large = large, .small = small,
               .cell = cell ? cell->data : NULL};
  for (int d = 0; d < 2; d++)
    p.side[d] = (pool_side){large->shape[1 + d], small->shape[1 + d], c->max_pool2d.kernel[d],
                            c->max_pool2d.stride[d], c->max_pool2d.padding[d]};
  const tensor *over = back ? large : small;
  run_tasks(over->shape[0] * over->shape[1], large->count > PARALLEL_ELEMENTS,
            back ? backward_row : forward_row, &p);
  return ENG_OK;
}

KERNEL(max_pool2d) { return pool(call, true, false); }
KERNEL(max_pool2d_grad) { return pool(call, true, true); }
KERNEL(avg_pool2d) { return pool(call, false, false); }
KERNEL(avg_pool2d_grad) { return pool(call, false, true); }
