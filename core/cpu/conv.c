// Convolution and its gradients. oneDNN (conv_onednn.c) computes them in the tensors' formats or,
// if it does not support these or the result is added to the output, in f32 on converted copies.
// The result is rounded once. Outputs that are NaN are computed again here. The reference kernels
// take f64, empty tensors, and calls that oneDNN does not support. Called through backend.kernel[];
// owns nothing.
#include "conv.h"
#include "rows.h"
#include "simd.h"
#include "tasks.h"

/// Returns the sizes of a call, and the memory and formats of its parts.
static conv_call describe(const op_call *call, conv_kind kind, tensor *const *part)
{
  conv_call g = {.kind = kind, .groups = call->conv2d.groups, .threads = omp_get_max_threads()};
  const int64_t *x = part[CONV_X]->shape, *w = part[CONV_W]->shape, *y = part[CONV_Y]->shape;
  g.n = x[0], g.h = x[1], g.w = x[2], g.c = x[3], g.p = y[1], g.q = y[2], g.o = y[3];
  for (int d = 0; d < 2; d++) {
    g.kernel[d] = w[2 + d], g.stride[d] = call->conv2d.stride[d];
    g.padding[d] = call->conv2d.padding[d], g.dilation[d] = call->conv2d.dilation[d];
  }
  for (int i = 0; i < CONV_PARTS; i++) {
    g.data[i] = part[i] ? part[i]->data : NULL;
    g.dtype[i] = part[i] ? part[i]->dtype : -1;
  }
  return g;
}

/// Converts x to y, which has another format.
static eng_status convert(tensor *y, tensor *x)
{
  op_call cast = {.op = ENG_OP_cast, .n_in = 1, .n_out = 1, .in = {x}, .out = {y}};
  return backend_cpu()->kernel[ENG_OP_cast](&cast);
}

/// Adds `sum` to `out` in double; each result is rounded once.
static void add_onto(const tensor *out, const float *sum)
{
  for (int64_t i = 0; i < out->count; i++)
    put(out->data, out->dtype, i, (double)get(out->data, out->dtype, i) + sum[i]);
}

// ---- NaN from values outside an output's sum

// oneDNN multiplies blocks of channels, and pairs of 16-bit numbers, and pads them with zeros. Its
// sums then include products of such a zero and a value that does not belong to the output's sum.
// If that value is infinite or NaN, the output becomes NaN. So each output that is NaN is computed
// again from its own terms. The loops may stop once the sum is NaN, because it stays NaN.

/// Returns element i of a part in memory order. x and y are channels last; W is
/// [O x C/groups x KH x KW].
static double at(const conv_call *g, conv_part part, int64_t i)
{ return get(g->data[part], (int)g->dtype[part], i); }

static double y_element(const conv_call *g, int64_t index)
{
  int64_t o = index % g->o, q = index / g->o % g->q, p = index / g->o / g->q % g->p,
          n = index / g->o / g->q / g->p, cg = g->c / g->groups,
          first = o / (g->o / g->groups) * cg;
  double sum = g->data[CONV_BIAS] ? at(g, CONV_BIAS, o) : 0;
  for (int64_t i = 0; i < g->kernel[0]; i++)
    for (int64_t j = 0; j < g->kernel[1]; j++) {
      int64_t h = p * g->stride[0] - g->padding[0] + i * g->dilation[0],
              v = q * g->stride[1] - g->padding[1] + j * g->dilation[1];
      if (h < 0 || h >= g->h || v < 0 || v >= g->w) continue;
      for (int64_t k = 0; k < cg && sum == sum; k++)
        sum += at(g, CONV_X, ((n * g->h + h) * g->w + v) * g->c + first + k) *
               at(g, CONV_W, ((o * cg + k) * g->kernel[0] + i) * g->kernel[1] + j);
    }
  return sum;
}

/// Returns the output position along dimension d that reads position `input` through kernel element
/// i, or -1 if there is none.
static int64_t output_of(const conv_call *g, int d, int64_t input, int64_t i, int64_t outputs)
{
  int64_t from = input + g->padding[d] - i * g->dilation[d];
  return from < 0 || from % g->stride[d] || from / g->stride[d] >= outputs ? -1
                                                                          : from / g->stride[d];
}

static double dx_element(const conv_call *g, int64_t index)
{
  int64_t c = index % g->c, v = index / g->c % g->w, h = index / g->c / g->w % g->h,
          n = index / g->c / g->w / g->h, cg = g->c / g->groups, og = g->o / g->groups,
          first = c / cg * og;
  double sum = 0;
  for (int64_t i = 0; i < g->kernel[0]; i++)
    for (int64_t j = 0; j < g->kernel[1]; j++) {
      int64_t p = output_of(g, 0, h, i, g->p), q = output_of(g, 1, v, j, g->q);
      if (p < 0 || q < 0) continue;
      for (int64_t o = first; o < first + og && sum == sum; o++)
        sum += at(g, CONV_Y, ((n * g->p + p) * g->q + q) * g->o + o) *
               at(g, CONV_W, ((o * cg + c % cg) * g->kernel[0] + i) * g->kernel[1] + j);
    }
  return sum;
}

static double dw_element(const conv_call *g, int64_t index)
{
  int64_t j = index % g->kernel[1], i = index / g->kernel[1] % g->kernel[0], cg = g->c / g->groups,
          k = index / g->kernel[1] / g->kernel[0] % cg,
          o = index / g->kernel[1] / g->kernel[0] / cg, c = o / (g->o / g->groups) * cg + k;
  double sum = 0;
  for (int64_t n = 0; n < g->n; n++)
    for (int64_t p = 0; p < g->p && sum == sum; p++)
      for (int64_t q = 0; q < g->q; q++) {
        int64_t h = p * g->stride[0] - g->padding[0] + i * g->dilation[0],
                v = q * g->stride[1] - g->padding[1] + j * g->dilation[1];
        if (h < 0 || h >= g->h || v < 0 || v >= g->w) continue;
        sum += at(g, CONV_X, ((n * g->h + h) * g->w + v) * g->c + c) *
               at(g, CONV_Y, ((n * g->p + p) * g->q + q) * g->o + o);
      }
  return sum;
}

typedef struct repair { const conv_call *call; int64_t count; } repair;

static void repair_tile(const void *context, int64_t k)
{
  const repair *r = context;
  const conv_call *g = r->call;
  const int result = (int)conv_result(g->kind);
  float buffer[TILE] __attribute__((aligned(64)));
  int64_t first = k * TILE;
  int n = (int)smaller(TILE, r->count - first);
  const float *t = tile_load(buffer, g->data[result], g->dtype[result], first, n);
  for (int i = 0; i < n; i++)
    if (t[i] != t[i])
      put(g->data[result], g->dtype[result], first + i,
          g->kind == CONV_FORWARD ? y_element(g, first + i)
          : g->kind == CONV_INPUT ? dx_element(g, first + i)
                                  : dw_element(g, first + i));
}

/// Computes the call through oneDNN and repairs outputs that are NaN. *done is false if oneDNN does
/// not support the call.
static eng_status compute(bool *done, const conv_call *g, int64_t count)
{
  ENG_TRY(conv_onednn(done, g));
  repair r = {g, count};
  if (*done) run_tasks((count + TILE - 1) / TILE, count > PARALLEL_ELEMENTS, repair_tile, &r);
  return ENG_OK;
}

// ---- calls

/// Runs the call in f32. Parts in other formats are converted to or from f32 copies. With `add`,
/// the result is added to the output.
static eng_status in_f32(bool *done, conv_call *g, tensor *const *part, bool add)
{
  const int result = (int)conv_result(g->kind);
  tensor copy[CONV_PARTS], *out = part[result];
  bool copied[CONV_PARTS];
  int64_t floats = 0;
  for (int i = 0; i < CONV_PARTS; i++) {
    copied[i] = part[i] && (g->dtype[i] != ENG_f32 || (add && i == result));
    if (copied[i]) floats += padded(part[i]->count);
  }
  SCRATCH(float, room, floats);
  for (int64_t i = 0, at = 0; i < CONV_PARTS; i++) {
    if (!copied[i]) continue;
    copy[i] = *part[i];
    copy[i].data = g->data[i] = room + at;
    copy[i].dtype = g->dtype[i] = ENG_f32;
    at += padded(part[i]->count);
    if (i != result) ENG_TRY(convert(&copy[i], part[i]));
  }
  ENG_TRY(compute(done, g, out->count));
  if (*done && add) add_onto(out, copy[result].data);
  else if (*done && copied[result]) ENG_TRY(convert(out, &copy[result]));
  return ENG_OK;
}

static eng_status run(const op_call *call, conv_kind kind, tensor *const *part, bool add)
{
  bool done = false, empty = false;
  for (int i = 0; i < CONV_BIAS; i++) empty |= part[i]->count == 0;
  if (!all_fast(call) || empty) return forward_to_reference(call);
  conv_call g = describe(call, kind, part);
  const int result = (int)conv_result(kind);
  bool one_format = true;      // both inputs have one format; oneDNN can write that format or f32
  for (int i = 0; i < CONV_BIAS; i++)
    one_format &= i == result || g.dtype[i] == g.dtype[result == CONV_X ? CONV_W : CONV_X];
  bool f32 = g.dtype[CONV_X] == ENG_f32 && g.dtype[CONV_W] == ENG_f32;
  if (one_format && !add && !f32) ENG_TRY(compute(&done, &g, part[result]->count));
  if (!done) ENG_TRY(in_f32(&done, &g, part, add));
  return done ? ENG_OK : forward_to_reference(call);
}

KERNEL(conv2d)
{
  return run(call, CONV_FORWARD, (tensor *[]){call->in[0], call->in[1], call->out[0], call->in[2]},
             false);
}

KERNEL(conv2d_grad_x)
{ return run(call, CONV_INPUT, (tensor *[]){call->out[0], call->in[1], call->in[0], NULL}, false); }

KERNEL(conv2d_grad_w)
{
  return run(call, CONV_WEIGHT, (tensor *[]){call->in[1], call->out[0], call->in[0], NULL},
             call->conv2d_grad_w.add);
}
