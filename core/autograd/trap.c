// Finds the origin of inf and nan. While the trap is on, the current device is a wrapper that
// checks the first ENG_TRAP_OUTPUTS outputs of every operation that has a kernel. For each pass
// (forward, backward), the wrapper stores the first operation that produced inf and the first that
// produced nan, with statistics of their first tensors. The trap costs nothing while it is off. No
// other file depends on this one. Owns the wrapper and its findings. Called by
// lua/engine/train/trap.lua, which repeats a step with the trap on.
#include "device/wrapper.h"

#include "base/array.h"
#include "base/error.h"
#include "base/numerics.h"
#include "op.h"
#include "params/params.h"
#include "backward.h"
#include "device/transfer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FORWARD, BACKWARD, PASSES };
enum { INF, NAN_, KINDS };

/// The node at which a module's operations start. Node i belongs to the last entry with node <= i.
typedef struct module_start { int node, module; } module_start;

static wrapper watching;                   // watching.inner: the wrapped device
static bool checking;                      // false: the wrapper only calls the device
// The findings for each kind (inf, nan) and pass. arose: `site` is the first call with values of
// this kind in its outputs but not in its inputs. Until such a call is found, `site` is the first
// call with values of this kind in its outputs. found: `site` is set.
static struct { bool found, arose; eng_trap_site site; } first[KINDS][PASSES];
static module_start *starts;
static int n_starts, module_now;
static int64_t starts_room;
static char *buffer;                       // a tensor's values on the host
static int64_t buffer_bytes;

// ---- the module of a node

void eng_trap_module(int module)
{
  module_now = module;
  int node = eng_tape_length();
  if (node == 0) n_starts = 0;             // a new tape
  if (n_starts > 0 && starts[n_starts - 1].node == node) n_starts--;
  // if memory runs out, the nodes of this module are attributed to the previous module
  if (!ARRAY_GROW(starts, starts_room, n_starts + 1)) return;
  starts[n_starts++] = (module_start){node, module};
}

static int module_of(int node)
{
  int i = n_starts - 1;
  while (i >= 0 && starts[i].node > node) i--;
  return i >= 0 ? starts[i].module : 0;
}

// ---- checking tensors

/// Fills *out with the text, name and statistics of x. If x is not floating-point or cannot be
/// read, or memory runs out, the statistics are 0.
static void look(eng_trap_tensor *out, const tensor *x)
{
  memset(out, 0, sizeof *out);
  snprintf(out->text, sizeof out->text, "%s", tensor_text(x));
  if (x->parameter) snprintf(out->name, sizeof out->name, "%s", x->parameter->name);
  if (!dtype_is_float(x->dtype)) return;
  bool wide = x->dtype == ENG_f64;
  int64_t bytes = x->count * (wide ? 8 : 4);
  if (bytes > buffer_bytes) {
    char *grown = realloc(buffer, (size_t)bytes);
    if (!grown) return;
    buffer = grown;
    buffer_bytes = bytes;
  }
  if (x->count == 0 || transfer_read(buffer, wide ? ENG_f64 : ENG_f32, x) != ENG_OK) return;
  out->count = x->count;
  for (int64_t i = 0; i < x->count; i++) {
    double value = wide ? ((const double *)(const void *)buffer)[i]
                        : (double)((const float *)(const void *)buffer)[i];
    if (f64_is_nan(value)) out->nan++;
    else if (!f64_is_finite(value)) out->inf++;
    else if (value > out->amax) out->amax = value;
    else if (-value > out->amax) out->amax = -value;
  }
}

static int64_t bad(const eng_trap_tensor *t, int kind) { return kind == INF ? t->inf : t->nan; }

/// Whether the call overwrote input k.
static bool overwritten(const op_call *c, int k)
{
  for (int i = 0; i < c->n_out; i++)
    if (c->out[i] && c->out[i]->store == c->in[k]->store && c->out[i]->data == c->in[k]->data)
      return true;
  return false;
}

/// Returns the index (from 1) of the first input that contained inf or nan (`kind`) before the
/// call, or 0 if there is none.
static int held_by(const eng_trap_site *site, const op_call *c, int kind)
{
  for (int k = 0; k < site->n_in; k++)
    if (c->in[k] && bad(&site->in[k], kind) > 0 && !overwritten(c, k)) return k + 1;
  return 0;
}

static void describe(eng_trap_site *site, const op_call *c, const eng_trap_tensor *out, int n_out)
{
  int forward_op, node = backward_node(&forward_op);
  memset(site, 0, sizeof *site);
  site->kernel = op_table[c->op].about.name;
  site->backward = node >= 0;
  site->op = node < 0          ? site->kernel
             : forward_op >= 0 ? op_table[forward_op].about.name
                               : "a custom operation";
  site->module = node < 0 ? module_now : module_of(node);
  site->n_in = c->n_in < ENG_TRAP_INPUTS ? c->n_in : ENG_TRAP_INPUTS;
  site->n_out = n_out;
  memcpy(site->out, out, sizeof site->out);
  for (int k = 0; k < site->n_in; k++)
    if (c->in[k]) look(&site->in[k], c->in[k]);
}

static eng_status watched_kernel(const op_call *c)
{
  ENG_TRY(watching.inner->kernel[c->op](c));
  if (!checking || tape_runs_again()) return ENG_OK;   // again: the first run was checked
  const int pass = backward_node(NULL) >= 0 ? BACKWARD : FORWARD;
  eng_trap_tensor out[ENG_TRAP_OUTPUTS] = {0};
  const int n_out = c->n_out < ENG_TRAP_OUTPUTS ? c->n_out : ENG_TRAP_OUTPUTS;
  int64_t sum[KINDS] = {0};
  if (first[INF][pass].arose && first[NAN_][pass].arose) return ENG_OK;
  for (int k = 0; k < n_out; k++) {
    if (!c->out[k]) continue;
    look(&out[k], c->out[k]);
    sum[INF] += out[k].inf;
    sum[NAN_] += out[k].nan;
  }
  for (int kind = 0; kind < KINDS; kind++) {
    if (sum[kind] == 0 || first[kind][pass].arose) continue;
    eng_trap_site site;
    describe(&site, c, out, n_out);
    site.nan = kind == NAN_;
    site.held_by = held_by(&site, c, kind);
    if (first[kind][pass].found && site.held_by) continue;
    first[kind][pass].found = true;
    first[kind][pass].arose = !site.held_by;
    first[kind][pass].site = site;
  }
  return ENG_OK;
}

// ---- on and off

void eng_trap(bool on)
{
  checking = on;
  wrapper_remove(&watching);
  n_starts = module_now = 0;
  if (!on) {
    free(buffer);
    buffer = NULL;
    buffer_bytes = 0;
    return;
  }
  memset(first, 0, sizeof first);
  if (!wrapper_put(&watching)) return;     // the profiler was started around it
  for (int op = 0; op < ENG_OP_COUNT; op++)
    if (watching.inner->kernel[op]) watching.device.kernel[op] = watched_kernel;
}

bool eng_trap_found(eng_trap_site *out, bool nan, bool backward)
{
  const int kind = nan ? NAN_ : INF, pass = backward ? BACKWARD : FORWARD;
  if (first[kind][pass].found) *out = first[kind][pass].site;
  return first[kind][pass].found;
}
