// Shape rules of convolution, pooling, batch norm and group norm, with their gradients. See
// infer.h. Images are [N x H x W x C]. Called by infer.c.
#include "base/error.h"
#include "infer.h"

// The largest size, stride, padding and dilation, so that products fit in 64 bits.
static const int64_t LARGEST = 1ll << 30;

static eng_status want_image(const op_call *c, int k)
{
  const tensor *x = c->in[k];
  ENG_TRY(want_float(c, k));
  if (x->ndim == 4 && x->shape[1] <= LARGEST && x->shape[2] <= LARGEST) return ENG_OK;
  return error_set(ENG_ERR_SHAPE, "%s: expected images [N x H x W x C] with H and W up to 2^30, "
                   "got %s", op_name(c), tensor_text(x));
}

/// Checks that a pair of integers, for H and W, lies in least..LARGEST; `what` names the pair in
/// the message.
static eng_status want_pair(const op_call *c, const int64_t *pair, const char *what, int64_t least)
{
  for (int d = 0; d < 2; d++)
    FAIL_IF(pair[d] < least || pair[d] > LARGEST, ENG_ERR_VALUE, "%s: expected %s from %lld to "
            "2^30, got %lld", op_name(c), what, (long long)least, (long long)pair[d]);
  return ENG_OK;
}

/// Computes the number of windows that fit into `size` with this padding on both sides.
static eng_status windows(const op_call *c, int64_t *out, int64_t size, int64_t kernel,
                          int64_t stride, int64_t padding, int64_t dilation)
{
  int64_t span = dilation * (kernel - 1) + 1;
  *out = (size + 2 * padding - span) / stride + 1;
  if (size + 2 * padding >= span && kernel > 0) return ENG_OK;
  return error_set(ENG_ERR_SHAPE,
                   "%s: a kernel of size %lld, dilated by %lld, does not fit into %lld pixels with "
                   "a padding of %lld on each side", op_name(c), (long long)kernel,
                   (long long)dilation, (long long)size, (long long)padding);
}

// ---- convolution

/// Computes the shape of y for x [n x size[0] x size[1] x channels] and a weight of shape w.
static eng_status conv_output(const op_call *c, int64_t *y, int64_t n, const int64_t *size,
                              int64_t channels, const int64_t *w)
{
  ENG_TRY(want_pair(c, c->conv2d.stride, "a stride", 1));
  ENG_TRY(want_pair(c, c->conv2d.padding, "a padding", 0));
  ENG_TRY(want_pair(c, c->conv2d.dilation, "a dilation", 1));
  ENG_TRY(want_pair(c, w + 2, "a kernel size", 1));
  ENG_TRY(want_pair(c, size, "a height or width", 0));
  int64_t groups = c->conv2d.groups;
  FAIL_IF(groups < 1 || channels % groups || w[0] % groups || w[1] != channels / groups,
          ENG_ERR_SHAPE, "%s: expected a weight [O x %lld/groups x KH x KW] with groups that "
          "divide O and the %lld channels, got %s and %lld groups", op_name(c), (long long)channels,
          (long long)channels, tensor_shape_text(4, w), (long long)groups);
  y[0] = n, y[3] = w[0];
  for (int d = 0; d < 2; d++)
    ENG_TRY(windows(c, &y[1 + d], size[d], w[2 + d], c->conv2d.stride[d], c->conv2d.padding[d],
                    c->conv2d.dilation[d]));
  return ENG_OK;
}

static eng_status want_weight(const op_call *c)
{
  ENG_TRY(want_float(c, 1));
  if (c->in[1]->ndim == 4) return ENG_OK;
  return error_set(ENG_ERR_SHAPE, "%s: expected a weight [O x C/groups x KH x KW], got %s",
                   op_name(c), tensor_text(c->in[1]));
}

eng_status infer_conv2d(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0], *w = c->in[1];
  int64_t y[4];
  ENG_TRY(want_image(c, 0));
  ENG_TRY(want_weight(c));
  ENG_TRY(conv_output(c, y, x->shape[0], x->shape + 1, x->shape[3], w->shape));
  ENG_TRY(want_vector(c, 2, "a bias", w->shape[0]));
  int dtype = dtype_promote(x->dtype, w->dtype);
  if (c->in[2]) dtype = dtype_promote(dtype, c->in[2]->dtype);
  put_out(s, 0, dtype, 4, y);
  return ENG_OK;
}

eng_status infer_conv2d_grad_x(op_call *c, op_shape *s)
{
  const tensor *dy = c->in[0], *w = c->in[1];
  int64_t y[4], channels;
  ENG_TRY(want_image(c, 0));
  ENG_TRY(want_weight(c));
  ENG_TRY(want_float_attribute(c, c->conv2d_grad_x.dtype));
  int64_t x[4] = {dy->shape[0], c->conv2d_grad_x.size[0], c->conv2d_grad_x.size[1], 0};
  if (__builtin_mul_overflow(w->shape[1], c->conv2d.groups, &channels)) channels = -1;
  ENG_TRY(conv_output(c, y, x[0], x + 1, channels, w->shape));
  ENG_TRY(want_shape(c, 0, 4, y, "y"));
  x[3] = channels;
  put_out(s, 0, (int)c->conv2d_grad_x.dtype, 4, x);
  return ENG_OK;
}

eng_status infer_conv2d_grad_w(op_call *c, op_shape *s)
{
  const tensor *dy = c->in[0], *x = c->in[1];
  const int64_t *kernel = c->conv2d_grad_w.kernel, groups = c->conv2d.groups;
  int64_t y[4];
  ENG_TRY(want_image(c, 0));
  ENG_TRY(want_image(c, 1));
  ENG_TRY(want_float_attribute(c, c->conv2d_grad_w.dtype));
  int64_t w[4] = {dy->shape[3], x->shape[3] / (groups < 1 ? 1 : groups), kernel[0], kernel[1]};
  ENG_TRY(conv_output(c, y, x->shape[0], x->shape + 1, x->shape[3], w));
  ENG_TRY(want_shape(c, 0, 4, y, "y"));
  put_out(s, 0, (int)c->conv2d_grad_w.dtype, 4, w);
  return ENG_OK;
}

// ---- pooling

/// Computes the shape of the output for x [n x size[0] x size[1] x channels]. Reads kernel, stride
/// and padding from c->max_pool2d for average pooling, too: the attributes of both operations begin
/// with these three.
static eng_status pool_output(const op_call *c, int64_t *y, int64_t n, const int64_t *size,
                              int64_t channels)
{
  const int64_t *kernel = c->max_pool2d.kernel, *padding = c->max_pool2d.padding;
  ENG_TRY(want_pair(c, kernel, "a kernel size", 1));
  ENG_TRY(want_pair(c, c->max_pool2d.stride, "a stride", 1));
  ENG_TRY(want_pair(c, padding, "a padding", 0));
  ENG_TRY(want_pair(c, size, "a height or width", 1));
  y[0] = n, y[3] = channels;
  for (int d = 0; d < 2; d++) {
    FAIL_IF(padding[d] > kernel[d] / 2, ENG_ERR_VALUE,
            "%s: expected a padding of at most half the kernel size %lld, got %lld", op_name(c),
            (long long)kernel[d], (long long)padding[d]);
    ENG_TRY(windows(c, &y[1 + d], size[d], kernel[d], c->max_pool2d.stride[d], padding[d], 1));
  }
  if (kernel[0] * kernel[1] <= LARGEST) return ENG_OK;   // indices of cells are i32
  return error_set(ENG_ERR_VALUE, "%s: expected a kernel of up to 2^30 cells, got %lld x %lld",
                   op_name(c), (long long)kernel[0], (long long)kernel[1]);
}

eng_status infer_max_pool2d(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  int64_t y[4];
  ENG_TRY(want_image(c, 0));
  ENG_TRY(pool_output(c, y, x->shape[0], x->shape + 1, x->shape[3]));
  put_out(s, 0, x->dtype, 4, y);
  put_out(s, 1, ENG_i32, 4, y);
  return ENG_OK;
}

eng_status infer_max_pool2d_grad(op_call *c, op_shape *s)
{
  const int64_t *size = c->max_pool2d_grad.size;
  int64_t y[4], x[4] = {c->in[0]->shape[0], size[0], size[1], c->in[0]->shape[3]};
  ENG_TRY(want_image(c, 0));
  ENG_TRY(want_float_attribute(c, c->max_pool2d_grad.dtype));
  ENG_TRY(pool_output(c, y, x[0], size, x[3]));
  for (int k = 0; k < 2; k++) ENG_TRY(want_shape(c, k, 4, y, "y"));
  FAIL_IF(c->in[1]->dtype != ENG_i32, ENG_ERR_DTYPE, "%s: expected the i32 indices that "
          "max_pool2d returned, got %s", op_name(c), tensor_text(c->in[1]));
  put_out(s, 0, (int)c->max_pool2d_grad.dtype, 4, x);
  return ENG_OK;
}

eng_status infer_avg_pool2d(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  const int64_t *size = c->avg_pool2d.size;
  ENG_TRY(want_image(c, 0));
  int64_t y[4] = {x->shape[0], size[0], size[1], x->shape[3]};
  if (c->avg_pool2d.kernel[0] == 0) {
    ENG_TRY(want_pair(c, size, "an output size", 1));
    ENG_TRY(want_pair(c, x->shape + 1, "a height or width", 1));
  } else ENG_TRY(pool_output(c, y, x->shape[0], x->shape + 1, x->shape[3]));
  put_out(s, 0, x->dtype, 4, y);
  return ENG_OK;
}

eng_status infer_avg_pool2d_grad(op_call *c, op_shape *s)
{
  const tensor *dy = c->in[0];
  const int64_t *size = c->avg_pool2d_grad.input;
  int64_t y[4];
  ENG_TRY(want_image(c, 0));
  ENG_TRY(want_float_attribute(c, c->avg_pool2d_grad.dtype));
  int64_t x[4] = {dy->shape[0], size[0], size[1], dy->shape[3]};
  if (c->avg_pool2d_grad.kernel[0] == 0) {
    ENG_TRY(want_pair(c, size, "a height or width", 1));
    ENG_TRY(want_pair(c, dy->shape + 1, "an output size", 1));
  } else {
    ENG_TRY(pool_output(c, y, x[0], size, x[3]));
    ENG_TRY(want_shape(c, 0, 4, y, "y"));
  }
  put_out(s, 0, (int)c->avg_pool2d_grad.dtype, 4, x);
  return ENG_OK;
}

// ---- norms

/// Checks x [.. x C] and eps, and that each of the inputs 1 .. last is absent or a vector [C].
static eng_status want_channels(const op_call *c, int last, double eps)
{
  static const char *const name[] = {"", "a weight", "a bias", "a mean", "a variance"};
  const tensor *x = c->in[0];
  ENG_TRY(want_float(c, 0));
  ENG_TRY(want_ndim(c, 0, 2));
  for (int k = 1; k <= last; k++)
    ENG_TRY(want_vector(c, k, name[k], x->shape[x->ndim - 1]));
  if (eps >= 0) return ENG_OK;
  return error_set(ENG_ERR_VALUE, "%s: expected eps >= 0, got %g", op_name(c), eps);
}

static eng_status want_groups(const op_call *c, int64_t groups)
{
  int64_t channels = c->in[0]->shape[c->in[0]->ndim - 1];
  if (groups >= 1 && channels % groups == 0) return ENG_OK;
  return error_set(ENG_ERR_VALUE, "%s: expected a number of groups that divides the %lld channels, "
                   "got %lld", op_name(c), (long long)channels, (long long)groups);
}

eng_status infer_batch_norm(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  ENG_TRY(want_channels(c, 4, c->batch_norm.eps));
  FAIL_IF(!c->in[3] != !c->in[4], ENG_ERR_VALUE,
          "batch_norm: expected a mean and a variance, or neither; got only a %s",
          c->in[3] ? "mean" : "variance");
  put_like(s, 0, x->dtype, x);
  int dtype = c->batch_norm.wide ? ENG_f64 : wide_of(x->dtype);
  for (int k = 1; k < 3; k++) put_out(s, k, dtype, 1, x->shape + x->ndim - 1);
  return ENG_OK;
}

eng_status infer_group_norm(op_call *c, op_shape *s)
{
  const tensor *x = c->in[0];
  ENG_TRY(want_channels(c, 2, c->group_norm.eps));
  ENG_TRY(want_groups(c, c->group_norm.groups));
  int64_t shape[2] = {x->shape[0], c->group_norm.groups};
  put_like(s, 0, x->dtype, x);
  for (int k = 1; k < 3; k++) put_out(s, k, wide_of(x->dtype), 2, shape);
  return ENG_OK;
}

static eng_status norm_grad(op_call *c, op_shape *s, int ndim, const int64_t *statistics)
{
  const tensor *x = c->in[0];
  for (int k = 2; k < 4; k++) {
    ENG_TRY(want_float(c, k));
    ENG_TRY(want_shape(c, k, ndim, statistics, "the norm's statistics"));
  }
  ENG_TRY(want_float(c, 4));
  ENG_TRY(want_shape(c, 4, x->ndim, x->shape, "x"));
  ENG_TRY(want_float_attribute(c, c->batch_norm_grad.dtype));
  put_like(s, 0, x->dtype, x);
  for (int k = 1; k < 3; k++)
    put_out(s, k, (int)c->batch_norm_grad.dtype, 1, x->shape + x->ndim - 1);
  return ENG_OK;
}

eng_status infer_batch_norm_grad(op_call *c, op_shape *s)
{
  const int64_t *channels = c->in[0]->shape + c->in[0]->ndim - 1;
  ENG_TRY(want_channels(c, 1, c->batch_norm_grad.eps));
  if (c->in[5]) {
    ENG_TRY(want_float(c, 5));
    ENG_TRY(want_shape(c, 5, 2, (int64_t[]){2, *channels}, "two sums for each channel"));
    FAIL_IF(c->batch_norm_grad.rows < 1, ENG_ERR_VALUE, "batch_norm_grad: expected sums over 1 or "
            "more rows, got rows = %lld", (long long)c->batch_norm_grad.rows);
  }
  return norm_grad(c, s, 1, channels);
}

eng_status infer_group_norm_grad(op_call *c, op_shape *s)
{
  ENG_TRY(want_channels(c, 1, c->group_norm_grad.eps));
  ENG_TRY(want_groups(c, c->group_norm_grad.groups));
  return norm_grad(c, s, 2, (int64_t[]){c->in[0]->shape[0], c->group_norm_grad.groups});
}
