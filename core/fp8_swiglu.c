// SwiGLU in front of a linear layer in FP8: its two inputs stay on the tape as FP8 codes alone, and its output not at all: the layer
// makes it from them anew when it needs it for dW (DeepSeek-V3, section 3.3.3 of its report). Codes are made as the layer's own x.
// Called by op.c (what to record), grad_elementwise.c (backward) and fp8_linear.c (the output anew).
#include "fp8_linear.h"

#include "error.h"

enum { IN_GATE_Q = 2, IN_GATE_SCALE, IN_UP_Q, IN_UP_SCALE, IN_COUNT };

eng_status fp8_keep_swiglu(op_call *c)
{
  const eng_fp8_role *r = fp8_site_role(c->ints[0], ENG_FP8_X);
  for (int k = 0; k < 2; k++) {
    op_call q = {.op = ENG_OP_quantize, .n_in = 2, .n_out = 5, .in = {c->in[k]}, .ints = {r->format, r->block_rows, r->block_columns, r->rule, r->pow2 ? 4 : 0},
                 .floats = {r->eps, r->margin}};
    bool recording = eng_grad_enabled(false);
    eng_status status = op_run(&q);
    eng_grad_enabled(recording);
    if (status != ENG_OK) return error_prefix(status, "FP8 of SwiGLU's input");
    tensor_drop(q.out[2]);
    c->in[IN_GATE_Q + 2 * k] = q.out[0];
    c->in[IN_GATE_SCALE + 2 * k] = q.out[1];
  }
  c->ints[1] = r->block_rows, c->ints[2] = r->block_columns;
  c->n_in = IN_COUNT;
  return ENG_OK;
}

eng_status fp8_swiglu_inputs(tensor *out[2], const op_call *node)
{
  for (int k = 0; k < 2; k++) {
    int64_t ints[4] = {node->in[k]->dtype, node->ints[1], node->ints[2], 0};
    ENG_TRY(op_run1(&out[k], ENG_OP_dequantize, node->in[IN_GATE_Q + 2 * k], node->in[IN_GATE_SCALE + 2 * k], NULL, ints, 4, 0, 0));
  }
  return ENG_OK;
}

eng_status fp8_swiglu_again(tensor **y, const op_call *node)
{
  tensor *x[2] = {0};
  eng_status status = fp8_swiglu_inputs(x, node);
  if (status == ENG_OK) status = op_run1(y, ENG_OP_swiglu, x[0], x[1], NULL, NULL, 0, 0, 0);
  for (int k = 0; k < 2; k++)
    if (x[k]) tensor_drop(x[k]);
  return status;
}
