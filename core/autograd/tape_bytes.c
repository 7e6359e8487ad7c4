// What the tape keeps for the backward pass: which of a recorded operation's tensors its gradient rule reads, and the bytes of their
// memory. A tensor that no rule reads can go as soon as the forward pass is done with it. Called by Lua: figures, and who is done.
#include "fp8/fp8_linear.h"

#include "base/error.h"
#include "op.h"
#include "tape.h"

#include <stdlib.h>

enum { FIRST = 1, SECOND = 2, THIRD = 4, FOURTH = 8, ALL = ~0 };
typedef struct reads { int in, out; } reads;   // bits of inputs and outputs

static reads reads_of(const op_call *call)
{
  if (fp8_is_linear(call)) return (reads){ALL & ~(FIRST | SECOND | THIRD), 0};
  if (fp8_is_swiglu(call)) return (reads){ALL & ~(FIRST | SECOND), 0};
  if (fp8_is_attention(call)) return (reads){ALL, SECOND};
  switch (call->op) {
    case ENG_OP_add: case ENG_OP_sub: case ENG_OP_affine: case ENG_OP_neg: case ENG_OP_cast: case ENG_OP_contiguous: case ENG_OP_dropout:
    case ENG_OP_reshape: case ENG_OP_permute: case ENG_OP_expand: case ENG_OP_slice: case ENG_OP_split: case ENG_OP_concat:
    case ENG_OP_sum: case ENG_OP_mean: case ENG_OP_rope:
      return (reads){0, 0};
    case ENG_OP_div:                              return (reads){SECOND, FIRST};
    case ENG_OP_pow: case ENG_OP_clamp: case ENG_OP_max: case ENG_OP_min: case ENG_OP_logsumexp:
      return (reads){ALL, FIRST};
    case ENG_OP_where:                            return (reads){FIRST, 0};
    case ENG_OP_gather: case ENG_OP_index_select: case ENG_OP_embedding:
      return (reads){SECOND, 0};
    case ENG_OP_topk:                             return (reads){0, SECOND};
    case ENG_OP_softmax: case ENG_OP_log_softmax: return (reads){0, FIRST};
    case ENG_OP_linear:                           return (reads){FIRST | SECOND, 0};
    case ENG_OP_mlp_gelu:                         return (reads){FIRST | SECOND | FOURTH, SECOND | THIRD};
    case ENG_OP_layer_norm:                       return (reads){FIRST | SECOND, SECOND | THIRD};
    case ENG_OP_rms_norm:                         return (reads){FIRST | SECOND, SECOND};
    case ENG_OP_add_layer_norm:                   return (reads){THIRD, SECOND | THIRD | FOURTH};
    case ENG_OP_add_rms_norm:                     return (reads){THIRD, SECOND | THIRD};
    case ENG_OP_attention:                        return (reads){ALL, FIRST | SECOND};
    case ENG_OP_cross_entropy:                    return (reads){FIRST | SECOND, SECOND};
    default:                                      return (reads){ALL, 0};
  }
}

typedef struct piece { const storage *store; bool fp8; } piece;

static int by_address(const void *a, const void *b)
{
  const storage *x = ((const piece *)a)->store, *y = ((const piece *)b)->store;
  return x < y ? -1 : x > y;
}

static void take(piece *to, int *n, tensor *const *x, int count, int bits, bool codes)
{
  for (int k = 0; k < count; k++)
    if (bits >> k & 1 && x[k] && !x[k]->parameter && x[k]->store->arena == ARENA_STEP) to[(*n)++] = (piece){x[k]->store, codes};
}

int64_t eng_tape_bytes(int64_t *fp8)
{
  *fp8 = 0;
  int length = eng_tape_length(), n = 0;
  piece *all = malloc(((size_t)length + 1) * (ENG_OP_INPUTS + ENG_OP_OUTPUTS) * sizeof *all);
  if (!all) return -1;
  for (int i = 0; i < length; i++) {
    const op_call *call = tape_call(i);
    if (call->op < 0) continue;
    reads r = reads_of(call);
    int own = fp8_is_attention(call) ? 3 : call->n_in;   // its codes are those of the linear after it
    take(all, &n, call->in, own, r.in, fp8_is_linear(call) || fp8_is_swiglu(call));
    take(all, &n, call->out, call->n_out, r.out, false);
  }
  qsort(all, (size_t)n, sizeof *all, by_address);
  int64_t bytes = 0;
  for (int i = 0; i < n; i++) {
    if (i > 0 && all[i].store == all[i - 1].store) continue;
    bytes += all[i].store->bytes;
    if (all[i].fp8) *fp8 += all[i].store->bytes;
  }
  free(all);
  return bytes;
}

/// Whether a rule will read what lies in this memory.
static bool is_read(const storage *store, const op_call *call)
{
  reads r = reads_of(call);
  for (int k = 0; k < call->n_in; k++)
    if (r.in >> k & 1 && call->in[k] && call->in[k]->store == store) return true;
  for (int k = 0; k < call->n_out; k++)
    if (r.out >> k & 1 && call->out[k] && call->out[k]->store == store) return true;
  return false;
}

eng_status eng_done(const eng_tensor *handle)
{
  tensor *x;
  ENG_TRY(tensor_get(&x, handle));
  storage *s = x->store;
  bool computed = tape_holds(x);
  if (s->arena != ARENA_STEP || !s->memory || (x->requires_grad && !computed)) return ENG_OK;
  if (!x->done) s->done++;
  x->done = true;
  if (s->done != s->references) return ENG_OK;
  int first = computed && s->references == 1 ? x->node : 0;
  for (int i = eng_tape_length() - 1; i >= first; i--) {
    const op_call *call = tape_call(i);
    if (call->op < 0 || is_read(s, call)) return ENG_OK;   // what a gradient in Lua reads nobody knows
  }
  arena_free_in(s->space, ARENA_STEP, s->memory, s->bytes);
  s->memory = x->data = NULL;   // views among them are known by their storage
  s->bytes = 0;
  return ENG_OK;
}
