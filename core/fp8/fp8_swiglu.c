// SwiGLU in front of a linear layer in FP8: its two inputs stay on the tape as FP8 codes alone, and its output not at all: the layer
// makes it from them anew when it needs it for dW (DeepSeek-V3, section 3.3.3 of its report). Codes are made as the layer's own x.
//
// And both in one: where nobody but the layer reads what the SwiGLU gives, its codes come of the pass that computes it, and its numbers are never
// written. The tape has the same two operations, with a tensor between them that has no memory: no gradient rule reads it.
// Called by op.c (what to record, both in one), grad_elementwise.c (backward) and fp8_linear.c (the output anew).
#include "fp8_linear.h"

#include "base/error.h"

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

bool fp8_swiglu_fits(const op_call *swiglu)
{
  const tensor *gate = swiglu->in[0], *up = swiglu->in[1];
  return fp8_site_on(swiglu->ints[0]) && !fp8_measuring() && fp8_site_role(swiglu->ints[0], ENG_FP8_X)->keep != ENG_FP8_KEEP_E5M6 && gate && up &&
         gate->dtype == up->dtype && dtype_is_float(gate->dtype) && tensor_same_shape(gate, up) && gate->count > 0 &&
         gate->store->space == arena_space() && up->store->space == arena_space();
}

eng_status fp8_swiglu_linear(op_call *swiglu, op_call *linear, const eng_precision *precision)
{
  const tensor *gate = swiglu->in[0];
  bool record = tape_wants(swiglu);
  ENG_TRY(tensor_make_done(&swiglu->out[0], gate->dtype, gate->ndim, gate->shape));
  swiglu->n_out = 1;
  if (record && fp8_site_recomputes(swiglu->ints[0])) ENG_TRY(fp8_keep_swiglu(swiglu));
  if (record) ENG_TRY(tape_record(swiglu));
  linear->in[0] = swiglu->out[0];
  linear->n_out = 1;
  return fp8_linear(linear, precision, swiglu);
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
