// SwiGLU before a linear layer in FP8. If the recipe keeps x as "swiglu", the tape keeps the two
// inputs of the SwiGLU only as FP8 codes. It does not keep the output, which the layer recomputes
// from these codes for dW (DeepSeek-V3 report, section 3.3.3). The inputs are quantized like the
// layer's x, but to nearest and without delayed scaling.
//
// Fused swiglu and linear: if only the layer reads the output of the SwiGLU, the pass that computes
// the output writes only its codes. The tape still holds two operations; the tensor between them
// has no memory, and no gradient rule reads it. Called by op.c, backward.c and linear.c.
#include "sites.h"

#include "base/error.h"

enum { OUT_Y, OUT_GATE_Q, OUT_GATE_SCALE, OUT_UP_Q, OUT_UP_SCALE, OUT_COUNT };

static bool recomputes(const fp8_site *s)
{ return s && s->recipe.role[ENG_FP8_X].keep == ENG_FP8_KEEP_SWIGLU; }

/// Quantizes gate and up as the role x says, but always to nearest and with their own amaxes: the
/// factor of delayed scaling is for x alone. Stores codes and scales in the outputs after y.
static eng_status keep_inputs(op_call *c, const fp8_site *s)
{
  const eng_fp8_role *r = &s->recipe.role[ENG_FP8_X];
  for (int k = 0; k < 2; k++) {
    op_call q = fp8_quantize_call(s, ENG_FP8_X, c->in[k], false);
    q.in[1] = NULL, q.quantize.flags &= QUANTIZE_POW2;
    bool recording = eng_grad_enabled(false);
    eng_status status = op_run(&q);
    eng_grad_enabled(recording);
    ENG_TRY(error_prefix(status, "quantizing an input of SwiGLU"));
    tensor_drop(q.out[2]);
    c->out[OUT_GATE_Q + 2 * k] = q.out[0];
    c->out[OUT_GATE_SCALE + 2 * k] = q.out[1];
  }
  c->fp8_swiglu.block_rows = r->block_rows, c->fp8_swiglu.block_columns = r->block_columns;
  c->n_out = OUT_COUNT;
  return ENG_OK;
}

static eng_status run_swiglu(op_call *c)
{
  const fp8_site *s = fp8_site_in_force(c->fp8_swiglu.site);
  op_call plain = {.op = ENG_OP_swiglu, .n_in = 2, .in = {c->in[0], c->in[1]}};
  bool keeps = recomputes(s) && tape_wants(c), recording = eng_grad_enabled(false);
  eng_grad_enabled(recording && !keeps);
  eng_status status = op_run(&plain);
  eng_grad_enabled(recording);
  c->n_out = 1;
  c->out[OUT_Y] = plain.out[0];
  if (keeps && status == ENG_OK) status = keep_inputs(c, s);
  if (keeps && status == ENG_OK) status = tape_record(c);
  if (status != ENG_OK) {
    tensor_drop(c->out[OUT_Y]);
    c->out[OUT_Y] = NULL;
  }
  return status;
}

/// Dequantizes input k of a recorded fp8_swiglu to its own dtype.
static eng_status dequantize_input(tensor **out, const op_call *node, int k)
{
  return op_run1(out, (op_call){.op = ENG_OP_dequantize,
                                .in = {node->out[OUT_GATE_Q + 2 * k],
                                       node->out[OUT_GATE_SCALE + 2 * k]},
                                .dequantize = {.dtype = node->in[k]->dtype,
                                               .block_rows = node->fp8_swiglu.block_rows,
                                               .block_columns = node->fp8_swiglu.block_columns}});
}

eng_status fp8_swiglu_recompute(tensor **y, const op_call *node)
{
  OWNED tensor *gate = NULL, *up = NULL;
  ENG_TRY(dequantize_input(&gate, node, 0));
  ENG_TRY(dequantize_input(&up, node, 1));
  return op_run1(y, (op_call){.op = ENG_OP_swiglu, .in = {gate, up}});
}

static eng_status swiglu_grad(grad_call *g)
{
  OWNED tensor *gate = NULL, *up = NULL;
  ENG_TRY(dequantize_input(&gate, g->call, 0));
  ENG_TRY(dequantize_input(&up, g->call, 1));
  return grad_swiglu_of(g, gate, up);
}

// ---- fused swiglu and linear

/// Returns whether a swiglu and its linear layer can run fused, so that the tensor between them
/// exists only as codes.
static bool fits(const fp8_site *s, const tensor *gate, const tensor *up)
{
  const eng_fp8_role *x = s ? &s->recipe.role[ENG_FP8_X] : NULL;
  return s && !fp8_measuring() && !x->mx && x->keep != ENG_FP8_KEEP_E5M6 &&
         gate->dtype == up->dtype && dtype_is_float(gate->dtype) && tensor_same_shape(gate, up) &&
         gate->count > 0;
}

static eng_status run_in_one(op_call *swiglu, op_call *linear, fp8_site *s)
{
  const tensor *gate = swiglu->in[0];
  bool record = tape_wants(swiglu);
  ENG_TRY(tensor_make_done(&swiglu->out[0], gate->dtype, gate->ndim, gate->shape));
  swiglu->n_out = 1;
  if (record && recomputes(s)) ENG_TRY(keep_inputs(swiglu, s));
  else swiglu->op = ENG_OP_swiglu;
  if (record) ENG_TRY(tape_record(swiglu));
  linear->in[0] = swiglu->out[0];
  return fp8_linear_in_force(linear, s, swiglu);
}

static eng_status run_swiglu_linear(op_call *c)
{
  int64_t site = c->fp8_swiglu_linear.site;
  fp8_site *s = fp8_site_in_force(site);
  op_call swiglu = {.op = ENG_OP_fp8_swiglu, .n_in = 2,
                    .in = {c->in[0], c->in[1]},
                    .fp8_swiglu = {.site = site}},
          linear = {.op = ENG_OP_fp8_linear, .n_in = 3,
                    .in = {NULL, c->in[2], c->in[3]},
                    .fp8_linear = {.site = site}};
  if (fits(s, c->in[0], c->in[1])) {
    ENG_TRY(run_in_one(&swiglu, &linear, s));
  } else {
    ENG_TRY(op_run(&swiglu));
    linear.in[0] = swiglu.out[0];
    ENG_TRY(op_run(&linear));
    eng_tensor h = tensor_handle(swiglu.out[0]);
    ENG_TRY(eng_done(&h));
  }
  c->out[0] = linear.out[0];
  return ENG_OK;
}

static void __attribute__((constructor)) register_swiglu(void)
{
  op_register(ENG_OP_fp8_swiglu, NULL, run_swiglu);
  op_register(ENG_OP_fp8_swiglu_linear, NULL, run_swiglu_linear);
  grad_register(ENG_OP_fp8_swiglu, swiglu_grad);
}
