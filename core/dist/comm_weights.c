// ZeRO-3: sends the weights of a unit, such as a transformer block, to the ranks that are about to
// use it. params/params_parted.c starts this when an operation reads, or will probably soon read, a
// weight that this rank has only in part. Each rank owns the pieces that it would own with ZeRO-1
// and ZeRO-2. Messages go directly from the owner's weight buffer into the weight buffers of the
// other ranks, in the dtype that the operation reads.
//
// All ranks run the same operations, so they fetch the same units in the same order. Each unit's
// messages have their own tag, so ranks that fetch different units wait for each other until the
// timeout reports them. A rank that fetches units in a different order computes a different
// checksum of the order; lua/engine/dist/reducer.lua compares the checksums in every step.
// Owns the exchange in flight (eng_parallel.coming). Called by comm_parallel.c, comm_predict.c and
// Lua.
#include "comm_gradients.h"

#include "base/error.h"
#include "autograd/op.h"
#include "autograd/tape.h"
#include "params/params_parted.h"

#include <stdio.h>
#include <stdlib.h>

static void first_name(char *text, size_t size, const eng_params *set, int unit)
{
  int i = 0;
  while (i < set->n - 1 && set->parted->unit_of[i] != unit) i++;
  snprintf(text, size, "the weights of the unit of %s", set->member[i].name);
}

/// Lists the messages that carry one form (PARTED_*) of a unit's weights, as piece_messages does. A
/// derived copy (PARTED_DERIVED, an FP8 copy) is not cut: it belongs to the rank that owns the
/// whole member.
static int list_messages(comm_message *messages, int64_t *sent, int64_t *bytes,
                         const eng_parallel *p, const params_parted *q, int unit, int form)
{
  int n = 0;
  tensor *x[PARAMS_DERIVED];
  for (int i = 0; i < p->set->n; i++) {
    int parts = q->unit_of[i] == unit ? parted_tensors(x, p->set, i, form) : 0;
    for (int k = 0; k < parts; k++)
      n += piece_messages(messages ? messages + n : NULL, sent, bytes, p, i, x[k]->data,
                          x[k]->dtype, form == PARTED_DERIVED ? x[k]->count : 0);
  }
  return n;
}

static eng_status start(void *data, int unit, int form)
{
  eng_parallel *p = data;
  int64_t none = 0;
  double began = eng_clock();
  p->brought_in = eng_crc32c(p->brought_in, (int32_t[2]){unit, form}, 2 * sizeof(int32_t));
  first_name(p->coming.what, sizeof p->coming.what, p->set, unit);
  int n = list_messages(NULL, &none, &none, p, p->set->parted, unit, form),
      tag = COMM_TAG_BUCKET + p->n_buckets + unit * PARTED_FORMS + form;
  FREED comm_message *messages = calloc((size_t)n + 1, sizeof *messages);
  FAIL_IF(!messages, ENG_ERR_MEMORY, "out of memory for messages");
  list_messages(messages, &p->brought.messages, &p->brought.bytes, p, p->set->parted, unit, form);
  eng_status status =
    n > 0 ? comm_start(&p->coming.exchange, p->comm, messages, n, tag) : ENG_OK;
  p->brought.exchanges++;
  p->brought.seconds += eng_clock() - began;
  return status;
}

static eng_status advance(void *data)
{
  eng_parallel *p = data;
  bool done;
  void *exchange = p->coming.exchange;
  p->coming.exchange = NULL;
  ENG_TRY(comm_test(&done, p->comm, exchange, p->coming.what));
  if (!done) p->coming.exchange = exchange;
  return ENG_OK;
}

static eng_status finish(void *data)
{
  eng_parallel *p = data;
  double began = eng_clock();
  void *exchange = p->coming.exchange;
  p->coming.exchange = NULL;
  eng_status status = comm_await(p->comm, exchange, p->coming.what);
  p->brought.seconds += eng_clock() - began;
  return status;
}

static eng_status check_units(const eng_parallel *p, const int32_t *units)
{
  FAIL_IF(!units, ENG_ERR_VALUE,
          "zero=3: expected the unit of each parameter (eng_parallel_options.units), got none");
  for (int i = 0; i < p->set->n; i++)
    FAIL_IF(units[i] < 0 || units[i] >= p->set->n, ENG_ERR_VALUE, "zero=3: expected a unit from 0 "
            "to %d for parameter %s, got %d", p->set->n - 1, p->set->member[i].name, units[i]);
  return ENG_OK;
}

eng_status weights_part(eng_parallel *p, const int32_t *units)
{
  static const parted_link link = {start, advance, finish};
  params_parted *q;
  ENG_TRY(check_units(p, units));
  FAIL_IF(p->set->space != SPACE_HOST, ENG_ERR_DEVICE,
          "zero=3 needs the weights in cpu memory, got weights in %s memory; hint: zero=2",
          backend_of_space(p->set->space)->name);
  ENG_TRY(parted_new(&q, p->set, p->set->own, units, p->apart));
  q->link = &link;
  q->data = p;
  return params_part(p->set, q);
}

static eng_status check_parted(const eng_parallel *p)
{
  ENG_TRY(params_alive(p->set));
  return p->set->parted ? ENG_OK
                        : error_set(ENG_ERR_STATE, "these weights are not divided among ranks; "
                                                   "this call needs zero=3");
}

eng_status eng_parallel_leave(eng_parallel *p)
{
  ENG_TRY(check_parted(p));
  return params_leave(p->set);
}

eng_status eng_parallel_whole(eng_parallel *p)
{
  ENG_TRY(check_parted(p));
  return params_bring_all(p->set);
}

uint32_t eng_parallel_order(const eng_parallel *p) { return p->brought_in; }

eng_status eng_parallel_piece(eng_tensor *out, eng_parallel *p, int index)
{
  *out = (eng_tensor){0, 0};
  ENG_TRY(check_parted(p));
  ENG_TRY(params_index(p->set, index));
  ENG_TRY(params_wait());       // the caller may write to the piece
  *out = tensor_handle(p->set->parted->piece[index]);
  return ENG_OK;
}

// ------------------------------------------------------------------ a prediction

typedef struct prediction {
  eng_parallel *p;
  params_parted *q;
  eng_parallel_sizes *out;
} prediction;

static eng_status count_messages(void *data, int unit, int form)
{
  const prediction *a = data;
  a->out->weight_exchanges++;
  list_messages(NULL, &a->out->weight_messages, &a->out->weight_bytes, a->p, a->q, unit, form);
  return ENG_OK;
}

static eng_status do_nothing(void *data)
{
  (void)data;
  return ENG_OK;
}

/// Simulates the fetch of the weights that a node of the tape reads, forward or backward. An FP8
/// layer reads copies of its weights, although its tape entry names the weights.
static eng_status read_inputs(const prediction *a, int node, bool forward)
{
  const op_call *call = tape_call(node);
  if (call->op < 0 || op_table[call->op].layout == LAYOUT_VIEW) return ENG_OK;
  int unit[ENG_OP_INPUTS], form[ENG_OP_INPUTS], n = 0;
  int reads = forward ? ~0 : op_table[call->op].about.reads;
  bool absent = false, layer = op_table[call->op].layout == LAYOUT_CALLS;
  for (int k = 0; k < call->n_in; k++)
    for (int i = 0; call->in[k] && i < a->p->set->n; i++) {
      const parameter *p = &a->p->set->member[i];
      if (!parted_holds(&form[n], p, call->in[k]->store)) continue;
      bool derived = layer && p->derived;
      if (!derived && !(reads >> k & 1)) break;
      if (layer) form[n] = derived ? PARTED_DERIVED : PARTED_COMPUTE;
      unit[n] = a->q->unit_of[i];
      absent |= !parted_here(a->q, unit[n], form[n]);
      n++;
      break;
    }
  return absent ? parted_need(a->q, unit, form, n) : ENG_OK;
}

/// Simulates the fetches of a whole step.
static eng_status read_all(const prediction *a)
{
  eng_status status = parted_drop(a->q);
  int length = eng_tape_length();
  for (int i = 0; i < length && status == ENG_OK; i++) status = read_inputs(a, i, true);
  for (int i = length - 1; i >= 0 && status == ENG_OK; i--) {
    int segment = tape_at(i)->segment;     // a checkpointed segment runs again before its backward
    bool last = segment && (i == length - 1 || tape_at(i + 1)->segment != segment);
    for (int k = segment - 1; last && k <= i && status == ENG_OK; k++)
      status = read_inputs(a, k, true);
    if (status == ENG_OK) status = read_inputs(a, i, false);
  }
  return status;
}

eng_status weights_predict(eng_parallel_sizes *out, eng_parallel *p, const int64_t *own,
                           const int32_t *units)
{
  static const parted_link link = {count_messages, do_nothing, do_nothing};
  eng_parallel_sizes first = {0};        // the sizes for the first step, which has no earlier order
                                         // to predict from
  prediction a = {.p = p, .out = &first};
  ENG_TRY(check_units(p, units));
  ENG_TRY(parted_new(&a.q, p->set, own, units, p->apart));
  a.q->imagined = true;
  a.q->link = &link;
  a.q->data = &a;
  eng_status status = read_all(&a);
  a.out = out;
  if (status == ENG_OK) status = read_all(&a);
  out->weights = parted_kept(p->set, a.q) + a.q->most;
  parted_free(a.q);
  return status;
}
