// Gradient rules of convolution, pooling, batch norm and group norm. They run the operations
// NAME_grad (conv2d_grad_x and conv2d_grad_w for convolution). Called by backward.c.
#include "base/error.h"
#include "op.h"
#include "gradient.h"

#include <string.h>

eng_status grad_conv2d(grad_call *g)
{
  const op_call *y = g->call;
  const size_t shared = sizeof(int64_t[7]);   // stride, padding, dilation, groups
  tensor *x = y->in[0], *w = y->in[1], *dy = g->dy[0];
  if (grad_wants(g, 0)) {
    op_call c = {.op = ENG_OP_conv2d_grad_x, .n_in = 2, .in = {dy, w},
                 .conv2d_grad_x = {.size = {x->shape[1], x->shape[2]}, .dtype = grad_dtype(g, 0)}};
    memcpy(&c.conv2d_grad_x, &y->conv2d, shared);
    ENG_TRY(op_run(&c));
    ENG_TRY(grad_emit(g, 0, c.out[0]));
  }
  if (grad_wants(g, 1)) {
    op_call c = {.op = ENG_OP_conv2d_grad_w, .n_in = 2, .in = {dy, x},
                 .conv2d_grad_w = {.kernel = {w->shape[2], w->shape[3]},
                                   .dtype = grad_dtype(g, 1)}};
    memcpy(&c.conv2d_grad_w, &y->conv2d, shared);
    ENG_TRY(grad_run_to(g, 1, &c, &c.conv2d_grad_w.add));
  }
  if (!grad_wants(g, 2)) return ENG_OK;
  op_call c = {.op = ENG_OP_bias_grad, .in = {dy}, .bias_grad = {.dtype = grad_dtype(g, 2)}};
  return grad_emit_op(g, 2, c);
}

eng_status grad_max_pool2d(grad_call *g)
{
  const op_call *y = g->call;
  const tensor *x = y->in[0];
  op_call c = {.op = ENG_OP_max_pool2d_grad, .in = {g->dy[0], y->out[1]},
               .max_pool2d_grad = {.size = {x->shape[1], x->shape[2]}, .dtype = grad_dtype(g, 0)}};
  memcpy(&c.max_pool2d_grad, &y->max_pool2d, sizeof(int64_t[6]));   // attributes up to `padding`
  return grad_emit_op(g, 0, c);
}

eng_status grad_avg_pool2d(grad_call *g)
{
  const op_call *y = g->call;
  const tensor *x = y->in[0];
  op_call c = {.op = ENG_OP_avg_pool2d_grad, .in = {g->dy[0]}};
  memcpy(&c.avg_pool2d_grad, &y->avg_pool2d, sizeof(int64_t[7]));   // attributes up to `counted`
  for (int d = 0; d < 2; d++) c.avg_pool2d_grad.input[d] = x->shape[1 + d];
  c.avg_pool2d_grad.dtype = grad_dtype(g, 0);
  return grad_emit_op(g, 0, c);
}

eng_status grad_batch_norm(grad_call *g)
{
  const op_call *y = g->call;
  bool given = y->in[3] != NULL;
  FAIL_IF(grad_wants(g, 3) || grad_wants(g, 4), ENG_ERR_VALUE,
          "batch_norm: a mean or variance that is passed in cannot get a gradient; hint: pass "
          "mean:detach() and variance:detach()");
  op_call c = {.op = ENG_OP_batch_norm_grad, .n_in = 6,
               .in = {y->in[0], y->in[1], given ? y->in[3] : y->out[1],
                      given ? y->in[4] : y->out[2], g->dy[0]},
               .batch_norm_grad = {.given = given, .eps = y->batch_norm.eps}};
  return grad_norm_of(g, &c);
}

eng_status grad_group_norm(grad_call *g)
{
  const op_call *y = g->call;
  op_call c = {.op = ENG_OP_group_norm_grad, .n_in = 5,
               .in = {y->in[0], y->in[1], y->out[1], y->out[2], g->dy[0]},
               .group_norm_grad = {.groups = y->group_norm.groups, .eps = y->group_norm.eps}};
  return grad_norm_of(g, &c);
}
