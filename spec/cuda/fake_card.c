// A card for machines without one: a plug-in like libengine_cuda.so whose kernels are the CPU's and
// whose "device memory" is host memory, inaccessible (PROT_NONE) outside kernels and copies, so a
// core that reads it crashes at once. It tests the core's side: memory spaces, copies, lagged
// statistics, streams between ranks (with fake_nccl.c). Loaded by ENGINE_CUDA_PLUGIN; built by the
// Makefile; used by spec/device/fake_card_spec.lua.
#include "fake.h"

#include "device/backend.h"
#include "dist/comm.h"
#include "base/error.h"
#include "base/numerics.h"
#include "device/wire.h"
#include "../../cuda/runtime/runtime.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { MOST_PIECES = 256, MOST_TENSORS = 512, RING = 4 };
static const int64_t CAPACITY = 1ll << 31;

static struct { char *at; int64_t bytes; } pieces[MOST_PIECES];
static int n_pieces;

// cpu.o needs this symbol
void backend_register(const char *name, const backend *(*get)(void)) { (void)name; (void)get; }
static int64_t taken;

static void protect(int mode)
{
  for (int i = 0; i < n_pieces; i++) mprotect(pieces[i].at, (size_t)pieces[i].bytes, mode);
}
static bool opened;
static void open_memory(void) { protect(PROT_READ | PROT_WRITE); opened = true; }
static void close_memory(void) { protect(PROT_NONE); opened = false; }

static void *take(int64_t bytes)
{
  if (n_pieces == MOST_PIECES || taken + bytes > CAPACITY) return NULL;
  char *at = mmap(NULL, (size_t)bytes, opened ? PROT_READ | PROT_WRITE : PROT_NONE,
                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return NULL;
  madvise(at, (size_t)bytes, MADV_HUGEPAGE);      // fewer pages to open and close
  pieces[n_pieces].at = at;
  pieces[n_pieces++].bytes = bytes;
  taken += bytes;
  return at;
}

static void give(void *memory, int64_t bytes)
{
  for (int i = 0; i < n_pieces; i++)
    if (pieces[i].at == memory) {
      pieces[i] = pieces[--n_pieces];
      break;
    }
  munmap(memory, (size_t)bytes);
  taken -= bytes;
}

static int64_t capacity(void) { return CAPACITY; }

static bool on_card(const void *memory)
{
  for (int i = 0; i < n_pieces; i++)
    if ((const char *)memory >= pieces[i].at &&
        (const char *)memory < pieces[i].at + pieces[i].bytes)
      return true;
  return false;
}

// ---- captured steps: a list of operations and copies

typedef struct act {
  struct act *next;
  op_call  call;             // for an operation; its tensors are copied below
  tensor   tensors[ENG_OP_INPUTS + ENG_OP_OUTPUTS];
  void    *to;               // for a copy or zeros
  void    *from;
  int64_t  bytes;
  // 0: operation, 1: copy within the card, 2: copy of `from`, which the act owns, 3: zeros
  int      what;
} act;

static act *acts, **last_act;
static bool capturing;

static act *add_act(int what)
{
  act *a = calloc(1, sizeof *a);
  a->what = what;
  *last_act = a;
  last_act = &a->next;
  return a;
}

static void note_copy(int what, void *to, const void *from, int64_t bytes)
{
  act *a = add_act(what);
  a->to = to;
  a->bytes = bytes;
  a->from = (void *)from;
  if (what == 2) a->from = memcpy(malloc((size_t)bytes), from, (size_t)bytes);
}

static void note_call(const op_call *call)
{
  act *a = add_act(0);
  int n = 0;
  a->call = *call;
  for (int k = 0; k < call->n_in; k++)
    if (call->in[k]) *(a->call.in[k] = &a->tensors[n++]) = *call->in[k];
  for (int k = 0; k < call->n_out; k++)
    if (call->out[k]) *(a->call.out[k] = &a->tensors[n++]) = *call->out[k];
}

static eng_status capture_begin(void)
{
  capturing = true;
  acts = NULL;
  last_act = &acts;
  return ENG_OK;
}

static eng_status capture_end(void **graph)
{
  capturing = false;
  *graph = acts;
  return ENG_OK;
}

static void graph_free(void *graph)
{
  for (act *a = graph, *next; a; a = next) {
    next = a->next;
    if (a->what == 2) free(a->from);
    free(a);
  }
}

static eng_status graph_launch(void *graph)
{
  open_memory();
  eng_status status = ENG_OK;
  for (act *a = graph; a && status == ENG_OK; a = a->next) {
    if (a->what == 0) status = backend_cpu()->kernel[a->call.op](&a->call);
    else if (a->what == 3) memset(a->to, 0, (size_t)a->bytes);
    else memcpy(a->to, a->from, (size_t)a->bytes);
  }
  close_memory();
  return status;
}

// ---- copies and kernels

static eng_status move(void *to, const void *from, int64_t bytes, copy_direction direction)
{
  if (capturing && direction == COPY_TO_HOST)
    return error_set(ENG_ERR_STATE,
                     "graph: the step reads a value back from the device, which a captured step "
                     "cannot do; hint: graph=false");
  bool fits =
    on_card(to) == (direction != COPY_TO_HOST) && on_card(from) == (direction != COPY_TO_DEVICE);
  if (!fits)
    return error_set(ENG_ERR_DEVICE,
                     "fake card: a copy in direction %d between memory of the wrong kinds",
                     (int)direction);
  if (capturing) {
    note_copy(direction == COPY_INSIDE ? 1 : 2, to, from, bytes);
    return ENG_OK;
  }
  open_memory();
  memcpy(to, from, (size_t)bytes);
  close_memory();
  return ENG_OK;
}

static eng_status clear(void *memory, int64_t bytes)
{
  if (!on_card(memory))
    return error_set(ENG_ERR_DEVICE, "fake card: clearing memory that is not the card's");
  if (capturing) {
    note_copy(3, memory, NULL, bytes);
    return ENG_OK;
  }
  open_memory();
  memset(memory, 0, (size_t)bytes);
  close_memory();
  return ENG_OK;
}

static eng_status synchronize(void) { return ENG_OK; }
static const char *describe(void) { return "fake card, the CPU's kernels"; }

static eng_status run(const op_call *call)
{
  for (int k = 0; k < call->n_in; k++)
    if (call->in[k] && call->in[k]->count > 0 && !on_card(call->in[k]->data))
      return error_set(ENG_ERR_DEVICE, "fake card: input %d of %s is not in its memory", k + 1,
                       eng_op_name(call->op));
  for (int k = 0; k < call->n_out; k++)
    if (call->out[k] && call->out[k]->count > 0 && !on_card(call->out[k]->data))
      return error_set(ENG_ERR_DEVICE, "fake card: output %d of %s is not in its memory", k + 1,
                       eng_op_name(call->op));
  if (capturing) {
    note_call(call);
    return ENG_OK;
  }
  open_memory();
  eng_status status = backend_cpu()->kernel[call->op](call);
  close_memory();
  return status;
}

// ---- passes over all parameters, lagged ones included

static struct {
  int64_t ticket;
  eng_tensor_stats stats[MOST_TENSORS];
  double loss[ENG_STATS_LOSSES], sum_squares;
  bool bad;
} ring[RING];
static int64_t tickets;
static int64_t counter[ENG_UPDATE_SLOTS];

static eng_status gradstats(const param_span *spans, int n, unsigned needs, eng_tensor_stats *stats)
{
  open_memory();
  eng_status status = backend_cpu()->gradstats(spans, n, needs, stats);
  close_memory();
  return status;
}

static eng_status gradstats_start(int64_t *ticket, const param_span *spans, int n, unsigned needs,
                                  tensor *const *loss, int n_loss)
{
  if (n > MOST_TENSORS) return error_set(ENG_ERR_STATE, "fake card: no room for statistics");
  int slot = (int)(tickets % RING);   // replaces the oldest; no spec has this many in flight
  ENG_TRY(gradstats(spans, n, needs | ENG_NEED_NORM, ring[slot].stats));
  open_memory();
  for (int i = 0; i < n_loss; i++) ring[slot].loss[i] = *(const float *)loss[i]->data;
  close_memory();
  ring[slot].sum_squares = 0;
  ring[slot].bad = false;
  for (int k = 0; k < n; k++) {
    ring[slot].sum_squares += ring[slot].stats[k].sum_squares / (spans[k].scale * spans[k].scale);
    ring[slot].bad = ring[slot].bad || ring[slot].stats[k].inf + ring[slot].stats[k].nan > 0;
  }
  *ticket = ring[slot].ticket = ++tickets;
  return ENG_OK;
}

static eng_status gradstats_fetch(int64_t ticket, eng_tensor_stats *stats, int n, double *loss,
                                  int n_loss)
{
  int slot = (int)((ticket - 1) % RING);
  if (!stats) return ENG_OK;
  if (ring[slot].ticket != ticket)
    return error_set(ENG_ERR_STATE, "fake card: the statistics with ticket %lld are gone",
                     (long long)ticket);
  memcpy(stats, ring[slot].stats, (size_t)n * sizeof *stats);
  memcpy(loss, ring[slot].loss, (size_t)n_loss * sizeof *loss);
  return ENG_OK;
}

static eng_status optimize(const param_span *spans, int n, const eng_update *update)
{
  eng_update here = *update;
  int64_t *t = &counter[update->slot];
  if (update->lagged) {
    int slot = (int)((update->statistics - 1) % RING);
    if (update->fresh) *t = update->t;
    if (ring[slot].bad) return ENG_OK;
    here.t = here.draw = (*t)++;
    double norm = sqrt(ring[slot].sum_squares) * update->gradient_factor;
    here.gradient_factor = clip_factor(update->gradient_factor, norm, update->clip_norm);
    here.lagged = 0;
  }
  open_memory();
  eng_status status = backend_cpu()->optimize(spans, n, &here);
  close_memory();
  return status;
}

static eng_status unscale(const param_span *spans, int n, double factor, float *const *target,
                          int *found_inf)
{
  open_memory();
  eng_status status = backend_cpu()->unscale(spans, n, factor, target, found_inf);
  close_memory();
  return status;
}

// ---- streams: a task runs as late as possible, when the host asks whether it is done

static eng_status lane_new(void **out)
{
  fake_lane *lane = calloc(1, sizeof *lane);
  if (!lane) return error_set(ENG_ERR_MEMORY, "fake card: out of memory for a stream");
  *lane = (fake_lane){.last = NULL, .open = open_memory, .close = close_memory, .on_card = on_card};
  *out = lane;
  return ENG_OK;
}

static eng_status lane_follow(void *lane)      // the device has no pending work
{
  return lane ? ENG_OK : error_set(ENG_ERR_STATE, "fake card: no stream");
}

static eng_status lane_done(bool *done, void *data)
{
  fake_lane *lane = data;
  int ran = 1;
  open_memory();
  while (lane->first && (ran = lane->first->run(lane->first)) == 1) {
    fake_task *task = lane->first;
    lane->first = task->next;
    lane->done++;
    free(task);
  }
  close_memory();
  *done = !lane->first;
  return ran < 0 ?
           error_set(ENG_ERR_DEVICE, "fake card: a stream's task failed: %s", lane->first->what) :
           ENG_OK;
}

typedef struct lane_place { fake_lane *lane; long asked; } lane_place;

static eng_status lane_mark(void **mark, void *lane)
{
  lane_place *place = *mark ? *mark : calloc(1, sizeof *place);
  if (!place) return error_set(ENG_ERR_MEMORY, "fake card: out of memory for a mark");
  *place = (lane_place){lane, ((fake_lane *)lane)->asked};
  *mark = place;
  return ENG_OK;
}

static eng_status lane_reached(bool *reached, void *mark)
{
  lane_place *place = mark;
  bool done;
  ENG_TRY(lane_done(&done, place->lane));
  *reached = place->lane->done >= place->asked;
  return ENG_OK;
}

static void lane_forget(void *mark) { free(mark); }

typedef struct copy_task { fake_task task; void *to; int64_t bytes; char from[]; } copy_task;

static int run_copy(fake_task *task)
{
  copy_task *c = (copy_task *)task;
  memcpy(c->to, c->from, (size_t)c->bytes);
  return 1;
}

static eng_status lane_move(void *data, void *to, const void *from, int64_t bytes,
                            copy_direction direction)
{
  fake_lane *lane = data;
  if (direction == COPY_TO_HOST) {
    if (lane->first)
      return error_set(ENG_ERR_STATE, "fake card: a copy to the host from an unfinished stream");
    return move(to, from, bytes, direction);
  }
  if (direction != COPY_TO_DEVICE || !on_card(to))
    return error_set(ENG_ERR_DEVICE, "fake card: a stream's copy between wrong kinds of memory");
  copy_task *c = malloc(sizeof *c + (size_t)bytes);
  if (!c) return error_set(ENG_ERR_MEMORY, "fake card: out of memory for a copy");
  c->to = to;
  c->bytes = bytes;
  memcpy(c->from, from, (size_t)bytes);
  fake_lane_push(lane, &c->task, run_copy, "a copy");
  return ENG_OK;
}

// ---- messages between ranks

typedef struct wire_task {
  fake_task task;
  const wire_run *runs;
  const void *const *terms;
  void    *out;
  uint32_t *flags;
  int64_t  count;
  int      n, wire, dtype;
  float    share;
} wire_task;

static float *room_for(const wire_task *t)
{
  int64_t longest = 0;
  for (int i = 0; i < t->n; i++)
    if (t->runs[i].n > longest) longest = t->runs[i].n;
  return malloc((size_t)(2 * longest + 1) * sizeof(float));
}

static int run_pack(fake_task *task)
{
  wire_task *t = (wire_task *)task;
  float *room = room_for(t);
  bool good = room != NULL;
  for (int i = 0; i < t->n && good; i++)
    good = comm_pack(&t->flags[t->runs[i].slot], &t->runs[i], t->wire, t->dtype, room) == ENG_OK;
  free(room);
  return good ? 1 : -1;
}

static int run_unpack(fake_task *task)
{
  wire_task *t = (wire_task *)task;
  float *room = room_for(t);
  bool good = room != NULL;
  for (int i = 0; i < t->n && good; i++)
    good = comm_unpack(&t->runs[i], t->wire, t->dtype, room) == ENG_OK;
  free(room);
  return good ? 1 : -1;
}

static int run_sum(fake_task *task)
{
  wire_task *t = (wire_task *)task;
  float *room = malloc((size_t)(t->count * t->n + 1) * sizeof *room);
  const float **terms = calloc((size_t)t->n, sizeof *terms);
  bool good = room && terms;
  for (int k = 0; k < t->n && good; k++) terms[k] = t->terms[k];
  good = good && comm_sum(t->out, terms, t->n, t->count, t->wire, t->share, room) == ENG_OK;
  free(room);
  free(terms);
  return good ? 1 : -1;
}

static eng_status push_wire(void *lane, wire_task what, int (*run)(fake_task *), const char *name)
{
  if ((what.runs && !on_card(what.runs)) || (what.flags && !on_card(what.flags)) ||
      (what.terms && !on_card(what.terms)) || (what.out && !on_card(what.out)))
    return error_set(ENG_ERR_DEVICE, "fake card: %s from a table that is not in its memory", name);
  wire_task *t = malloc(sizeof *t);
  if (!t) return error_set(ENG_ERR_MEMORY, "fake card: out of memory for %s", name);
  *t = what;
  if (lane) fake_lane_push(lane, &t->task, run, name);
  else {                                  // no lane: runs now, in order with everything else
    open_memory();
    int good = run(&t->task);
    close_memory();
    free(t);
    if (good != 1) return error_set(ENG_ERR_DEVICE, "fake card: %s failed", name);
  }
  return ENG_OK;
}

static eng_status wire_pack(void *lane, const wire_run *runs, int n, int64_t longest, int wire,
                            int dtype, uint32_t *flags)
{
  (void)longest;
  return push_wire(lane,
                   (wire_task){.runs = runs, .n = n, .wire = wire, .dtype = dtype, .flags = flags},
                   run_pack, "packing");
}

static eng_status wire_unpack(void *lane, const wire_run *runs, int n, int64_t longest, int wire,
                              int dtype)
{
  (void)longest;
  return push_wire(lane, (wire_task){.runs = runs, .n = n, .wire = wire, .dtype = dtype},
                   run_unpack, "unpacking");
}

static eng_status sum_pieces(void *lane, void *out, const void *const *terms, int n, int64_t count,
                             int wire, float share)
{
  return push_wire(
    lane,
    (wire_task){.out = out, .terms = terms, .n = n, .count = count, .wire = wire, .share = share},
    run_sum, "adding up");
}

static backend device = {
  .name = "cuda",
  .gradstats = gradstats,
  .optimize = optimize,
  .unscale = unscale,
  .gradstats_start = gradstats_start,
  .gradstats_fetch = gradstats_fetch,
  .space = SPACE_CUDA,
  .memory = {.take = take, .give = give, .capacity = capacity},
  .move = move,
  .clear = clear,
  .synchronize = synchronize,
  .describe = describe,
  .capture_begin = capture_begin,
  .capture_end = capture_end,
  .graph_launch = graph_launch,
  .graph_free = graph_free,
  .identity = fake_identity,
  .stream_new = lane_new,
  .stream_follow = lane_follow,
  .stream_done = lane_done,
  .stream_mark = lane_mark,
  .stream_reached = lane_reached,
  .stream_forget = lane_forget,
  .stream_move = lane_move,
  .wire_pack = wire_pack,
  .wire_unpack = wire_unpack,
  .wire_sum = sum_pieces,
};

__attribute__((visibility("default")))
backend_plugin eng_cuda_backend;

const backend *eng_cuda_backend(const backend_host *host)
{
  if (!host_accept(host)) return NULL;
  for (int op = 0; op < ENG_OP_COUNT; op++)
    device.kernel[op] = backend_cpu()->kernel[op] ? run : NULL;
  return &device;
}
