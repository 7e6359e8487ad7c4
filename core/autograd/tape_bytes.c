// The memory that the tape keeps for the backward pass, in bytes: the memory of the tensors that
// gradient rules read (columns `reads` and `saves` of ops.def). A tensor that no rule reads can be
// freed after its last use in the forward pass (eng_done). Called by Lua, grad_nn.c and fp8/.
#include "base/error.h"
#include "op.h"
#include "tape.h"

#include <stdlib.h>

typedef struct piece { const storage *store; bool codes; } piece;

static int by_address(const void *a, const void *b)
{
  const storage *x = ((const piece *)a)->store, *y = ((const piece *)b)->store;
  return x < y ? -1 : x > y;
}

/// Appends to `to` the memory of each tensor of x[count] that belongs to the step and is in the
/// mask `read`. `codes` is the mask of tensors that hold FP8 codes or scales.
static void take(piece *to, int *n, tensor *const *x, int count, int read, int codes)
{
  for (int k = 0; k < count; k++)
    if (read >> k & 1 && x[k] && !x[k]->parameter && x[k]->store->arena == ARENA_STEP)
      to[(*n)++] = (piece){x[k]->store, codes >> k & 1};
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
    const op_info *info = &op_table[call->op];
    take(all, &n, call->in, call->n_in, info->about.reads, 0);
    take(all, &n, call->out, call->n_out, info->about.saves, info->codes);
  }
  qsort(all, (size_t)n, sizeof *all, by_address);
  int64_t bytes = 0;
  for (int i = 0; i < n; i++) {
    if (i > 0 && all[i].store == all[i - 1].store) continue;
    bytes += all[i].store->bytes;
    if (all[i].codes) *fp8 += all[i].store->bytes;
  }
  free(all);
  return bytes;
}

/// Whether a recorded call still needs this memory, for its gradient rule or to run again.
static bool is_read(const storage *store, const tape_node *node)
{
  const op_call *call = &node->call;
  const eng_op_info *info = &op_table[call->op].about;
  // a checkpointed operation reads all its inputs when it runs again
  int reads = node->segment ? ~0 : info->reads;
  for (int k = 0; k < call->n_in; k++)
    if (reads >> k & 1 && call->in[k] && call->in[k]->store == store) return true;
  for (int k = 0; k < call->n_out; k++)
    if (info->saves >> k & 1 && call->out[k] && call->out[k]->store == store) return true;
  return false;
}

bool tape_reads(const storage *store, int first, int last)
{
  for (int i = last - 1; i >= first; i--)   // a Lua gradient may read anything
    if (tape_call(i)->op < 0 || is_read(store, tape_at(i))) return true;
  return false;
}

eng_status eng_done(const eng_tensor *handle)
{
  tensor *x;
  ENG_TRY(tensor_get(&x, handle));
  storage *s = x->store;
  bool computed = tape_holds(x);
  if (tape_segment) return ENG_OK;   // the end of the segment frees the tensor
  if (s->arena != ARENA_STEP || !s->memory || (x->requires_grad && !computed)) return ENG_OK;
  if (!x->done) s->done++;
  x->done = true;
  if (s->done != s->references) return ENG_OK;
  int first = computed && s->references == 1 ? x->node : 0;
  if (tape_reads(s, first, eng_tape_length())) return ENG_OK;
  arena_free_in(s->space, ARENA_STEP, s->memory, s->bytes);
  s->memory = x->data = NULL;   // tensor_get refuses views of empty storage
  s->bytes = 0;
  return ENG_OK;
}
