// Measures the times of operations. While profiling is on, the current device is a wrapper that
// measures the time of each call. When profiling is off, it costs nothing. No other file depends on
// this one. Owns the table of rows. Called from Lua (engine.profile).
#include "base/mx.h"
#include "device/backend.h"
#include "op.h"

#include <stdio.h>
#include <string.h>

enum { ROWS = 512 };
// values of call_kind.op that are not operations
enum { PASS_GRADSTATS = ENG_OP_COUNT, PASS_OPTIMIZE, PASS_UNSCALE, REST };

// Calls with the same operation, dtypes and shapes share a row.
typedef struct call_kind {
  int32_t op;
  int32_t dtype[3];        // dtypes of the first two inputs and the first output; -1: absent
  int32_t transposed;      // transposition flags of a product
  int32_t ndim[2];
  int64_t shape[2][ENG_MAX_DIMS];
} call_kind;

typedef struct profile_row {
  call_kind kind;
  int64_t calls;
  double seconds, bytes, flops;
} profile_row;

static const backend *inner;   // the profiled device
static backend timed;
static profile_row rows[ROWS];
static int n_rows;

static profile_row *row_of(const call_kind *kind)
{
  for (int i = 0; i < n_rows; i++)
    if (memcmp(&rows[i].kind, kind, sizeof *kind) == 0) return &rows[i];
  if (n_rows == ROWS) return &rows[ROWS - 1];   // full: the last row sums up all other kinds
  profile_row *row = &rows[n_rows++];
  memset(row, 0, sizeof *row);
  row->kind = *kind;
  if (n_rows == ROWS) row->kind.op = REST;
  return row;
}

static void add(const call_kind *kind, double seconds, double bytes, double flops)
{
  profile_row *row = row_of(kind);
  row->calls++;
  row->seconds += seconds;
  row->bytes += bytes;
  row->flops += flops;
}

static double bytes_of(const tensor *x)
{ return x ? (double)x->count * (double)eng_dtype_size(x->dtype) : 0; }

/// Counts the multiplications and additions in a call's matrix products. In convolutions, products
/// with padding count, too. Returns 0 for operations without matrix products.
static double flops_of(const op_call *c)
{
  const tensor *a = c->in[0], *out = c->out[0];
  switch (c->op) {
  case ENG_OP_matmul:
    return 2.0 * (double)out->count * (double)a->shape[a->ndim - (c->matmul.transpose_a ? 2 : 1)];
  case ENG_OP_linear:
  case ENG_OP_matmul_gelu_grad: return 2.0 * (double)out->count * (double)a->shape[a->ndim - 1];
  case ENG_OP_linear_grad:
    return 2.0 * (double)out->count * (double)(out->shape[0] ? a->count / out->shape[0] : 0);
  case ENG_OP_mlp_gelu:
    return 2.0 * ((double)a->count + (double)out->count) * (double)c->in[1]->shape[0];
  case ENG_OP_attention:
  case ENG_OP_attention_grad: {
    // q [B x T x H x D], k [B x S x G x D]; a causal mask halves the number of pairs
    double pairs = (double)a->count * (double)c->in[1]->shape[1] / (c->attention.causal ? 2 : 1);
    return (c->op == ENG_OP_attention ? 4 : 10) * pairs;
  }
  case ENG_OP_conv2d:
  case ENG_OP_conv2d_grad_x:
  case ENG_OP_conv2d_grad_w: {
    // y [N x P x Q x O], or its gradient; w [O x ..]
    const tensor *y = c->op == ENG_OP_conv2d ? out : a,
                 *w = c->op == ENG_OP_conv2d_grad_w ? out : c->in[1];
    return 2.0 * (double)y->count * (double)(w->shape[0] ? w->count / w->shape[0] : 0);
  }
  case ENG_OP_fp8_matmul:
    return 2.0 * (double)out->count * (double)a->shape[c->fp8_matmul.transpose_a ? 0 : 1];
  case ENG_OP_mx_matmul:
    return 2.0 * (double)out->count * (double)a->shape[1] *
           (mx_packed(c->mx_matmul.format_a) ? 2 : 1);   // two codes to a byte
  default: return 0;
  }
}

/// Waits until the device has finished its work, then returns the time.
static double clock_now(void)
{
  if (inner->synchronize) inner->synchronize();
  return eng_clock();
}

static eng_status timed_kernel(const op_call *c)
{
  double from = clock_now();
  eng_status status = inner->kernel[c->op](c);
  double seconds = clock_now() - from;
  call_kind kind;
  memset(&kind, 0, sizeof kind);   // clears padding: kinds are compared as bytes
  kind.op = c->op;
  if (c->op == ENG_OP_matmul)
    kind.transposed = (c->matmul.transpose_a != 0) + 2 * (c->matmul.transpose_b != 0);
  double bytes = 0;
  for (int k = 0; k < 2; k++) {
    const tensor *x = k < c->n_in ? c->in[k] : NULL;
    kind.dtype[k] = x ? x->dtype : -1;
    kind.ndim[k] = x ? x->ndim : -1;
    if (x) memcpy(kind.shape[k], x->shape, (size_t)x->ndim * sizeof *x->shape);
  }
  kind.dtype[2] = c->out[0] ? c->out[0]->dtype : -1;
  // these operations read as many bytes of their first input as they write
  bool table = c->op == ENG_OP_embedding || c->op == ENG_OP_gather || c->op == ENG_OP_index_select;
  for (int k = table ? 1 : 0; k < c->n_in; k++) bytes += bytes_of(c->in[k]);
  for (int k = 0; k < c->n_out; k++) bytes += (table ? 2 : 1) * bytes_of(c->out[k]);
  add(&kind, seconds, bytes, status == ENG_OK ? flops_of(c) : 0);
  return status;
}

static void add_pass(int pass, double seconds, const param_span *spans, int n, bool moments)
{
  call_kind kind;
  memset(&kind, 0, sizeof kind);
  kind.op = pass;
  double bytes = 0;
  for (int i = 0; i < n; i++) {
    double each = (double)eng_dtype_size(spans[i].gradient_dtype);
    if (moments) {   // masters and moments are read and written
      each += 2.0 * (double)eng_dtype_size(spans[i].master_dtype);
      if (spans[i].compensation) each += 4;
      if (spans[i].moment1) each += 2.0 * (double)eng_dtype_size(spans[i].moment_dtype);
      if (spans[i].moment2) each += 2.0 * (double)eng_dtype_size(spans[i].moment_dtype);
      if (spans[i].low) each += (double)eng_dtype_size(spans[i].low_dtype);
    }
    bytes += each * (double)spans[i].count;
  }
  add(&kind, seconds, bytes, 0);
}

static eng_status timed_gradstats(const param_span *spans, int n, unsigned needs,
                                  eng_tensor_stats *stats)
{
  double from = clock_now();
  eng_status status = inner->gradstats(spans, n, needs, stats);
  add_pass(PASS_GRADSTATS, clock_now() - from, spans, n, false);
  return status;
}

static eng_status timed_optimize(const param_span *spans, int n, const eng_update *update)
{
  double from = clock_now();
  eng_status status = inner->optimize(spans, n, update);
  add_pass(PASS_OPTIMIZE, clock_now() - from, spans, n, true);
  return status;
}

static eng_status timed_unscale(const param_span *spans, int n, double factor, float *const *target,
                                int *found_inf)
{
  double from = clock_now();
  eng_status status = inner->unscale(spans, n, factor, target, found_inf);
  add_pass(PASS_UNSCALE, clock_now() - from, spans, n, false);
  return status;
}

void eng_profile(bool on)
{
  if (backend_current() == &timed) backend_use(inner);
  if (!on) return;
  n_rows = 0;
  inner = backend_current();
  timed = *inner;
  for (int op = 0; op < ENG_OP_COUNT; op++)
    if (inner->kernel[op]) timed.kernel[op] = timed_kernel;
  timed.gradstats = timed_gradstats;
  timed.optimize = timed_optimize;
  timed.unscale = timed_unscale;
  backend_use(&timed);
}

static const char *name_of(int op)
{
  switch (op) {
    case PASS_GRADSTATS: return "(gradient statistics)";
    case PASS_OPTIMIZE: return "(optimizer)";
    case PASS_UNSCALE: return "(unscale)";
    case REST: return "(all others)";
    default: return op_table[op].about.name;
  }
}

int eng_profile_rows(eng_profile_row *out, int capacity)
{
  int n = n_rows < capacity ? n_rows : capacity;
  for (int i = 0; i < n; i++) {
    const call_kind *kind = &rows[i].kind;
    out[i] = (eng_profile_row){.op = name_of(kind->op),
                               .calls = rows[i].calls,
                               .seconds = rows[i].seconds,
                               .bytes = rows[i].bytes,
                               .flops = rows[i].flops};
    if (kind->op >= ENG_OP_COUNT) continue;
    int at = 0, room = (int)sizeof out[i].detail;
    for (int k = 0; k < 2; k++)
      if (kind->dtype[k] >= 0 && at < room)
        at +=
          snprintf(out[i].detail + at, (size_t)(room - at), "%s%s %s%s", k ? ", " : "",
                   eng_dtype_name(kind->dtype[k]), tensor_shape_text(kind->ndim[k], kind->shape[k]),
                   kind->transposed >> k & 1 ? "'" : "");
    if (kind->dtype[2] >= 0 && at < room)
      snprintf(out[i].detail + at, (size_t)(room - at), " -> %s", eng_dtype_name(kind->dtype[2]));
  }
  return n;
}
