// Measures the times of operations. While profiling is on, the current device is a wrapper that
// measures the time of each call. Profiling costs nothing while it is off. No other file depends on
// this one. Owns the table of rows. Called from Lua (engine.profile).
#include "base/mx.h"
#include "device/wrapper.h"
#include "op.h"

#include <stdio.h>
#include <string.h>

enum { ROWS = 512 };

static wrapper timed;          // timed.inner: the profiled device
static bool measuring;         // false: the wrapper only calls the device
static eng_profile_row rows[ROWS];
static int n_rows;

/// Adds a call to the row of its operation and detail. All calls of an operation pass the same
/// pointer `op`, so the pointers are compared. The last row sums up the calls that have no row of
/// their own.
static void add(const char *op, const char *detail, double seconds, double bytes, double flops)
{
  if (!measuring) return;
  eng_profile_row *row = rows, *last = rows + ROWS - 1;
  while (row < rows + n_rows && row < last &&
         (row->op != op || strcmp(row->detail, detail) != 0))
    row++;
  if (row == rows + n_rows) {
    *row = (eng_profile_row){.op = row == last ? "(all others)" : op};
    if (row < last) snprintf(row->detail, sizeof row->detail, "%s", detail);
    n_rows++;
  }
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
    // q [B x T x H x D], k [B x S x G x D]. pairs: the multiplications of one matrix product; a
    // causal mask halves them. The forward pass has two such products, the backward pass five.
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
  if (measuring && timed.inner->synchronize) timed.inner->synchronize();
  return eng_clock();
}

/// Writes the dtypes and shapes of the first two inputs, and the dtype of the first output. A '
/// marks an input that matmul transposes.
static void describe(char *text, int room, const op_call *c)
{
  const bool turned[2] = {c->op == ENG_OP_matmul && c->matmul.transpose_a,
                          c->op == ENG_OP_matmul && c->matmul.transpose_b};
  int at = 0;
  for (int k = 0; k < 2 && k < c->n_in; k++)
    if (c->in[k] && at < room)
      at += snprintf(text + at, (size_t)(room - at), "%s%s%s", k ? ", " : "", tensor_text(c->in[k]),
                     turned[k] ? "'" : "");
  if (c->out[0] && at < room)
    snprintf(text + at, (size_t)(room - at), " -> %s", eng_dtype_name(c->out[0]->dtype));
}

static eng_status timed_kernel(const op_call *c)
{
  double from = clock_now();
  eng_status status = timed.inner->kernel[c->op](c);
  double seconds = clock_now() - from, bytes = 0;
  char detail[sizeof rows[0].detail] = "";
  describe(detail, (int)sizeof detail, c);
  // these operations read as many bytes of their first input as they write
  bool table = c->op == ENG_OP_embedding || c->op == ENG_OP_gather || c->op == ENG_OP_index_select;
  for (int k = table ? 1 : 0; k < c->n_in; k++) bytes += bytes_of(c->in[k]);
  for (int k = 0; k < c->n_out; k++) bytes += (table ? 2 : 1) * bytes_of(c->out[k]);
  add(op_name(c), detail, seconds, bytes, status == ENG_OK ? flops_of(c) : 0);
  return status;
}

static void add_pass(const char *pass, double seconds, const param_span *spans, int n, bool moments)
{
  double bytes = 0;
  for (int i = 0; i < n; i++) {
    double each = (double)eng_dtype_size(spans[i].gradient_dtype);
    if (moments) {   // masters and moments are read and written
      each += 2.0 * (double)eng_dtype_size(spans[i].master_dtype);
      if (spans[i].compensation) each += 4;
      for (int k = 0; k < ENG_MOMENTS; k++)
        if (spans[i].moment[k]) each += 2.0 * (double)eng_dtype_size(spans[i].moment_dtype);
      if (spans[i].low) each += (double)eng_dtype_size(spans[i].low_dtype);
    }
    bytes += each * (double)spans[i].count;
  }
  add(pass, "", seconds, bytes, 0);
}

static eng_status timed_gradstats(const param_span *spans, int n, unsigned needs,
                                  eng_tensor_stats *stats)
{
  double from = clock_now();
  eng_status status = timed.inner->gradstats(spans, n, needs, stats);
  add_pass("(gradient statistics)", clock_now() - from, spans, n, false);
  return status;
}

static eng_status timed_optimize(const param_span *spans, int n, const eng_update *update)
{
  double from = clock_now();
  eng_status status = timed.inner->optimize(spans, n, update);
  add_pass("(optimizer)", clock_now() - from, spans, n, true);
  return status;
}

static eng_status timed_unscale(const param_span *spans, int n, double factor, float *const *target,
                                int *found_inf)
{
  double from = clock_now();
  eng_status status = timed.inner->unscale(spans, n, factor, target, found_inf);
  add_pass("(unscale)", clock_now() - from, spans, n, false);
  return status;
}

void eng_profile(bool on)
{
  measuring = on;
  wrapper_remove(&timed);
  if (!on) return;
  n_rows = 0;
  if (!wrapper_put(&timed)) return;        // the trap was set around it
  backend *device = &timed.device;
  for (int op = 0; op < ENG_OP_COUNT; op++)
    if (device->kernel[op]) device->kernel[op] = timed_kernel;
  device->gradstats = timed_gradstats;
  device->optimize = timed_optimize;
  device->unscale = timed_unscale;
}

int eng_profile_rows(eng_profile_row *out, int capacity)
{
  int n = n_rows < capacity ? n_rows : capacity;
  if (n > 0) memcpy(out, rows, (size_t)n * sizeof *out);
  return n;
}
