// Attention before a linear layer that keeps its x in e5m6. The tape holds attention's output only
// as the e5m6 codes of the layer's x. The layer reads the codes for dW, and attention's gradient
// rule reads them as well (DeepSeek-V3 report, section 3.3.2). Called by op.c, backward.c and
// linear.c.
#include "sites.h"

#include "base/error.h"
#include "base/fp8_layout.h"

#include <string.h>

enum { OUT_Y, OUT_LSE, OUT_ENTROPY, OUT_CODES, OUT_SCALE, OUT_COUNT };

eng_status fp8_to_e5m6(tensor **q, tensor **scale, tensor *x)
{
  op_call c = {.op = ENG_OP_quantize, .n_in = 2, .n_out = 5,
               .in = {x},
               .quantize = {.format = ENG_FORMAT_E5M6,
                            .block_rows = 1,
                            .block_columns = FP8_BLOCK,
                            .rule = ENG_SCALE_DEEPGEMM,
                            .flags = QUANTIZE_POW2,
                            .eps = -1}};
  ENG_TRY(op_run(&c));
  tensor_drop(c.out[2]);
  *q = c.out[0], *scale = c.out[1];
  return ENG_OK;
}

/// Reshapes attention's output y [B x T x H x D] to [B x T x HD] and quantizes it to e5m6 codes.
static eng_status keep_codes(op_call *c)
{
  const tensor *y = c->out[OUT_Y];
  OWNED tensor *rows = NULL;
  ENG_TRY(op_reshape(&rows, c->out[OUT_Y], 3,
                     (int64_t[]){y->shape[0], y->shape[1], y->shape[2] * y->shape[3]}));
  return fp8_to_e5m6(&c->out[OUT_CODES], &c->out[OUT_SCALE], rows);
}

static eng_status run_attention(op_call *c)
{
  const fp8_site *s = fp8_site_in_force(c->fp8_attention.site);
  const tensor *q = c->in[0];
  op_call plain = {.op = ENG_OP_attention, .n_in = 3,
                   .in = {c->in[0], c->in[1], c->in[2]},
                   .attention = {.causal = c->fp8_attention.causal,
                                 .entropy = c->fp8_attention.entropy,
                                 .scale = c->fp8_attention.scale}};
  bool keeps = s && s->recipe.role[ENG_FP8_X].keep == ENG_FP8_KEEP_E5M6 && tape_wants(c) &&
               q->ndim == 4 && q->shape[2] * q->shape[3] % 8 == 0;
  bool recording = eng_grad_enabled(false);
  eng_grad_enabled(recording && !keeps);
  eng_status status = op_run(&plain);
  if (status == ENG_OK) {
    memcpy(c->out, plain.out, sizeof c->out);
    c->n_out = plain.n_out;
    if (keeps) status = keep_codes(c);
  }
  eng_grad_enabled(recording);
  if (status != ENG_OK || !keeps) return status;
  c->n_out = OUT_COUNT;
  return tape_record(c);
}

static eng_status attention_grad(grad_call *g)
{
  const op_call *node = g->call;
  const tensor *like = node->out[OUT_Y];
  OWNED tensor *rows = NULL, *y = NULL;
  ENG_TRY(op_run1(&rows, (op_call){.op = ENG_OP_dequantize,
                                   .in = {node->out[OUT_CODES], node->out[OUT_SCALE]},
                                   .dequantize = {.dtype = like->dtype,
                                                  .block_rows = 1,
                                                  .block_columns = FP8_BLOCK,
                                                  .format = ENG_FORMAT_E5M6}}));
  ENG_TRY(op_reshape(&y, rows, like->ndim, like->shape));
  return grad_attention_of(g, y);
}

static void __attribute__((constructor)) register_attention(void)
{
  op_register(ENG_OP_fp8_attention, NULL, run_attention);
  grad_register(ENG_OP_fp8_attention, attention_grad);
}
