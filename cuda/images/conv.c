// Convolution of images [N x H x W x C] on the card, and its gradients, as matrix products
// (../gemm). As in im2col, the input pixels under the kernel at one place (a pixel of the result)
// form one row of a matrix. The matrix is made in tiles of at most TILE_BYTES of scratch memory, or
// of one row if a row is longer. The product of a tile and the weights is rounded once. The
// gradient of x is computed in the same way, from dy instead of x. The gradient of the weights adds
// the products of dy and the tiles in f32 (f64 for f64), in order, and rounds the total once. A
// kernel of 1 x 1 with stride 1 and no padding needs no copy of pixels. Groups are a batch of
// products or, with a bias, one product after the other. Called through the device's table.
#include "conv.h"

#include "runtime/device.h"
#include "gemm/gemm.h"

op_kernel cuda_conv2d, cuda_conv2d_grad_x, cuda_conv2d_grad_w, cuda_contiguous;

static const int64_t TILE_BYTES = 64 << 20;

/// Fills `g` (see conv.h). Its places are the pixels of `over`. The pixels under the kernel are
/// pixels of `from`. `kernel` holds KH and KW. `turned` is true for the gradient of x.
static eng_status describe(conv_gather *g, const op_call *call, const tensor *from,
                           const tensor *over, const int64_t *kernel, bool turned)
{
  const int64_t groups = call->conv2d.groups;
  *g = (conv_gather){.from = from->data,
                     .dtype = from->dtype,
                     .turned = turned,
                     .places = over->shape[0] * over->shape[1] * over->shape[2],
                     .rows = over->shape[1],
                     .columns = over->shape[2],
                     .high = from->shape[1],
                     .wide = from->shape[2],
                     .groups = groups,
                     .channels = from->shape[3] / groups};
  for (int d = 0; d < 2; d++) {
    g->kernel[d] = kernel[d];
    g->stride[d] = call->conv2d.stride[d];
    g->padding[d] = call->conv2d.padding[d];
    g->dilation[d] = call->conv2d.dilation[d];
  }
  int64_t taps = kernel[0] * kernel[1], row;
  if (g->places < INT32_MAX && !__builtin_mul_overflow(taps, from->shape[3], &row) &&
      row < INT32_MAX)
    return ENG_OK;
  return error_set(ENG_ERR_SHAPE,
                   "%s: on cuda, expected fewer than 2^31 - 1 pixels, and fewer than 2^31 - 1 "
                   "products per pixel, got pixels of %s and a kernel of %lld x %lld over %s",
                   eng_op_name(call->op), tensor_text(over), (long long)kernel[0],
                   (long long)kernel[1], tensor_text(from));
}

/// Whether each place meets the pixel at its own position and no other.
static bool is_direct(const conv_gather *g)
{
  for (int d = 0; d < 2; d++)
    if (g->kernel[d] != 1 || g->stride[d] != 1 || g->padding[d] != 0) return false;
  return true;
}

/// Iterates over the rows [groups x taps x channels] of a gather, tile by tile.
typedef struct tiles {
  const conv_gather *g;
  bool    direct;
  int64_t k, row;               // number of columns of one group; of all groups
  int64_t first, count, most;   // first place and number of places of the tile; limit on `count`
  void   *memory;
} tiles;

static eng_status tiles_open(tiles *t, const conv_gather *g, scratch *s)
{
  const int64_t k = g->kernel[0] * g->kernel[1] * g->channels, row = g->groups * k,
                bytes = row * eng_dtype_size(g->dtype), fit = bytes ? TILE_BYTES / bytes : 0;
  *t = (tiles){.g = g, .direct = is_direct(g) || row == 0, .k = k, .row = row};
  t->most = t->direct || fit > g->places ? g->places : fit > 0 ? fit : 1;
  if (t->direct) return ENG_OK;
  t->memory = scratch_keep(s, t->most * bytes);
  return t->memory ? ENG_OK : ENG_ERR_MEMORY;
}

/// Advances to the next tile and sets *rows to its matrices [count x k], one for each group. *more
/// is false after the last tile.
static eng_status tiles_next(bool *more, gemm_matrix *rows, tiles *t)
{
  const conv_gather *g = t->g;
  t->first += t->count;
  t->count = g->places - t->first < t->most ? g->places - t->first : t->most;
  *more = t->count > 0;
  if (!*more) return ENG_OK;
  *rows = (gemm_matrix){
    .data = t->direct ? (void *)g->from : t->memory, .dtype = g->dtype, .row = t->row, .column = 1,
    .batch = {t->k}};
  return t->direct ? ENG_OK : conv_collect(t->memory, g, t->first, t->count);
}

/// Copies w, viewed with these sizes and strides, to scratch memory without gaps.
static eng_status permute(const void **to, const tensor *w, const int64_t *shape,
                          const int64_t *stride, scratch *s)
{
  tensor from = {.data = w->data, .dtype = w->dtype, .ndim = 4, .count = w->count}, copy;
  copy = from;
  int64_t step = 1;
  for (int d = 3; d >= 0; step *= shape[d--]) {
    from.shape[d] = copy.shape[d] = shape[d];
    from.stride[d] = stride[d];
    copy.stride[d] = step;
  }
  *to = copy.data = scratch_keep(s, w->count * eng_dtype_size(w->dtype));
  if (!copy.data) return ENG_ERR_MEMORY;
  op_call call = simple_call(ENG_OP_contiguous, &from, NULL, &copy);
  return cuda_contiguous(&call);
}

/// Describes w [O x C/groups x KH x KW] as the matrices that yield y or, with `turned`, the
/// gradient of x.
static eng_status weights_of(conv_weights *m, const tensor *w, int64_t groups, bool turned,
                             scratch *s)
{
  const int64_t og = w->shape[0] / groups, cg = w->shape[1], taps = w->shape[2] * w->shape[3];
  *m = (conv_weights){.data = w->data, .dtype = w->dtype, .count = w->count,
                      .width = turned ? cg : og, .row = turned ? cg : 1,
                      .column = turned ? 1 : taps * cg, .batch = og * taps * cg};
  if (taps == 1 || w->count == 0) return ENG_OK;
  if (turned)   // [groups x taps x O/groups x C/groups]
    return permute(&m->data, w, (int64_t[]){groups, taps, og, cg},
                   (int64_t[]){og * cg * taps, 1, cg * taps, taps}, s);
  return permute(&m->data, w, (int64_t[]){1, groups * og, taps, cg},   // [O x taps x C/groups]
                 (int64_t[]){0, cg * taps, 1, taps}, s);
}

/// Runs p for every group: as a batch or, with a bias, group by group, because a product has only
/// one bias.
static eng_status for_groups(gemm_product *p, int64_t groups)
{
  p->batch_dims = 1;
  p->batch[0] = groups;
  if (!p->bias || groups == 1) return gemm_run(p);
  p->batch_dims = 0;
  for (int64_t i = 0; i < groups; i++) {
    ENG_TRY(gemm_run(p));
    p->a.data = (char *)p->a.data + p->a.batch[0] * eng_dtype_size(p->a.dtype);
    p->b.data = (char *)p->b.data + p->b.batch[0] * eng_dtype_size(p->b.dtype);
    p->c.data = (char *)p->c.data + p->c.batch[0] * eng_dtype_size(p->c.dtype);
    p->bias = (const char *)p->bias + p->n * eng_dtype_size(p->bias_dtype);
  }
  return ENG_OK;
}

/// Computes out [places x O]: the pixels that the places meet, times the weights, plus the bias.
static eng_status multiply(const conv_gather *g, const tensor *w, const tensor *bias,
                           const tensor *out, scratch *s)
{
  conv_weights m;
  tiles t;
  ENG_TRY(weights_of(&m, w, g->groups, g->turned, s));
  ENG_TRY(tiles_open(&t, g, s));
  const int64_t row = g->groups * m.width;
  for (bool more = true; more;) {
    gemm_matrix pixels;
    ENG_TRY(tiles_next(&more, &pixels, &t));
    if (!more) break;
    gemm_product p = {
      .m = t.count, .n = m.width, .k = t.k, .a = pixels,
      .b = {.data = (void *)m.data, .dtype = m.dtype, .row = m.row, .column = m.column,
            .batch = {m.batch}},
      .c = {.data = (char *)out->data + t.first * row * eng_dtype_size(out->dtype),
            .dtype = out->dtype, .row = row, .column = 1, .batch = {m.width}},
      .bias = data_of(bias), .bias_dtype = dtype_of(bias)};
    ENG_TRY(for_groups(&p, g->groups));
  }
  return t.direct ? ENG_OK : conv_repair(out, g, &m, bias);
}

/// Computes y from x or, with `turned`, dx from dy.
static eng_status convolve(const op_call *call, const tensor *bias, bool turned)
{
  const tensor *from = call->in[0], *w = call->in[1], *out = call->out[0];
  conv_gather g;
  scratch s = {0};
  ENG_TRY(describe(&g, call, from, out, w->shape + 2, turned));
  eng_status status = multiply(&g, w, bias, out, &s);
  scratch_give_all(&s);
  return status;
}

eng_status cuda_conv2d(const op_call *call)        { return convolve(call, call->in[2], false); }
eng_status cuda_conv2d_grad_x(const op_call *call) { return convolve(call, NULL, true); }

/// Sets sum [O x taps x C/groups], in `dtype`, to the sum over all places of dy times the pixels.
static eng_status sum_places(void *sum, int dtype, const conv_gather *g, const tensor *dy,
                             int64_t bytes, scratch *s)
{
  const int64_t outputs = dy->shape[3], og = outputs / g->groups;
  tiles t;
  if (g->places == 0) CUDA_TRY(cudaMemsetAsync(sum, 0, (size_t)bytes, cuda_stream()));
  ENG_TRY(tiles_open(&t, g, s));
  for (bool more = true; more;) {
    gemm_matrix pixels;
    ENG_TRY(tiles_next(&more, &pixels, &t));
    if (!more) break;
    gemm_product p = {
      .m = og, .n = t.k, .k = t.count, .b = pixels,
      .a = {.data = (char *)dy->data + t.first * outputs * eng_dtype_size(dy->dtype),
            .dtype = dy->dtype, .row = 1, .column = outputs, .batch = {og}},
      .c = {.data = sum, .dtype = dtype, .row = t.k, .column = 1, .batch = {og * t.k}},
      .accumulate = t.first > 0};
    ENG_TRY(for_groups(&p, g->groups));
  }
  return ENG_OK;
}

eng_status cuda_conv2d_grad_w(const op_call *call)
{
  const tensor *dy = call->in[0], *x = call->in[1], *dw = call->out[0];
  conv_gather g;
  scratch s = {0};
  ENG_TRY(describe(&g, call, x, dy, dw->shape + 2, false));
  const bool wide = x->dtype == ENG_f64 || dy->dtype == ENG_f64 || dw->dtype == ENG_f64;
  const int dtype = wide ? ENG_f64 : ENG_f32;
  const int64_t bytes = dw->count * eng_dtype_size(dtype);
  void *sum = scratch_keep(&s, bytes);
  eng_status status = sum ? sum_places(sum, dtype, &g, dy, bytes, &s) : ENG_ERR_MEMORY;
  if (status == ENG_OK)
    status = conv_finish_weights(dw, sum, dtype, &g, dy, call->conv2d_grad_w.add != 0);
  scratch_give_all(&s);
  return status;
}
