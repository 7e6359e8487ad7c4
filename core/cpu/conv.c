// Convolution and its gradients. oneDNN computes them (conv_onednn.c), in the tensors' formats or,
// where it does not have those, in f32 on converted copies; the result is rounded once. Calls that
// oneDNN refuses, f64 and empty tensors go to the reference. Registered by cpu.c; owns nothing.
#include "conv.h"
#include "rows.h"
#include "simd.h"
#include "tasks.h"

static int64_t sizes_of(int64_t *n, const tensor *x)
{
  for (int d = 0; d < 4; d++) n[d] = x->shape[d];
  return x->count;
}

/// The call's geometry, from the tensors of each part.
static conv_call describe(const op_call *call, conv_kind kind, tensor *const *part)
{
  conv_call g = {.kind = kind, .groups = call->conv2d.groups};
  int64_t x[4], w[4], y[4];
  sizes_of(x, part[CONV_X]);
  sizes_of(w, part[CONV_W]);
  sizes_of(y, part[CONV_Y]);
  g.n = x[0], g.h = x[1], g.w = x[2], g.c = x[3], g.p = y[1], g.q = y[2], g.o = y[3];
  for (int d = 0; d < 2; d++) {
    g.kernel[d] = w[2 + d], g.stride[d] = call->conv2d.stride[d];
    g.padding[d] = call->conv2d.padding[d], g.dilation[d] = call->conv2d.dilation[d];
  }
  for (int i = 0; i < CONV_PARTS; i++)
    if (part[i]) g.data[i] = part[i]->data, g.dtype[i] = part[i]->dtype;
  return g;
}

static int nan_found;

typedef struct conversion { void *to; const void *from; int to_dtype, dtype; int64_t count; }
  conversion;

static void convert(const void *context, int64_t k)
{
  const conversion *c = context;
  float buffer[TILE] __attribute__((aligned(64)));
  int64_t first = k * TILE;
  int n = (int)smaller(TILE, c->count - first);
  floats_to(c->to, c->to_dtype, first, tile_load(buffer, c->from, c->dtype, first, n), n);
}

/// Converts `count` numbers, one of the two formats being f32.
static void convert_all(void *to, int to_dtype, const void *from, int dtype, int64_t count)
{
  conversion c = {to, from, to_dtype, dtype, count};
  run_tasks((count + TILE - 1) / TILE, count > PARALLEL_ELEMENTS, convert, &c);
}

/// out = out + sum, in f32, rounded once.
static void add_onto(const tensor *out, const float *sum)
{
  for (int64_t i = 0; i < out->count; i++)
    put(out->data, out->dtype, i, (double)get(out->data, out->dtype, i) + sum[i]);
}

/// Runs the call in f32 on copies of the parts in other formats. With `add`, the result is added to
/// the output.
static eng_status in_f32(bool *done, conv_call *g, tensor *const *part, bool add)
{
  const int result = (int)conv_result(g->kind);
  float *copy[CONV_PARTS] = {NULL};
  eng_status status = ENG_OK;
  for (int i = 0; i < CONV_PARTS && status == ENG_OK; i++) {
    bool adds = add && i == result;
    if (!part[i] || (g->dtype[i] == ENG_f32 && !adds)) continue;
    copy[i] = arena_alloc(ARENA_SCRATCH, part[i]->count * (int64_t)sizeof(float));
    if (!copy[i]) status = ENG_ERR_MEMORY;
    else if (i != result) convert_all(copy[i], ENG_f32, part[i]->data, part[i]->dtype,
                                      part[i]->count);
    g->data[i] = copy[i];
    g->dtype[i] = ENG_f32;
  }
  if (status == ENG_OK) status = conv_onednn(done, g);
  const tensor *out = part[result];
  if (*done && add) add_onto(out, copy[result]);
  else if (*done && copy[result])
    convert_all(out->data, out->dtype, copy[result], ENG_f32, out->count);
  for (int i = CONV_PARTS - 1; i >= 0; i--)
    if (copy[i]) arena_free(ARENA_SCRATCH, copy[i], part[i]->count * (int64_t)sizeof(float));
  return status;
}

static void find_nan(const void *context, int64_t k)
{
  const tensor *x = context;
  float buffer[TILE] __attribute__((aligned(64)));
  int n = (int)smaller(TILE, x->count - k * TILE), found = 0;
  const float *t = tile_load(buffer, x->data, x->dtype, k * TILE, n);
  for (int i = 0; i < n; i++) found |= t[i] != t[i];
  if (!found) return;
#pragma omp atomic write
  nan_found = 1;
}

/// Whether a result of oneDNN in bf16 may be wrong. Where oneDNN pads pairs of bf16 with zeros, an
/// infinity times 0 makes sums NaN that contain no infinity.
static bool is_suspect(const tensor *x)
{
  nan_found = 0;
  run_tasks((x->count + TILE - 1) / TILE, x->count > PARALLEL_ELEMENTS, find_nan, x);
  return nan_found;
}

static eng_status run(const op_call *call, conv_kind kind, tensor *const *part, bool add)
{
  bool done = false, empty = false;
  for (int i = 0; i < CONV_BIAS; i++) empty |= part[i]->count == 0;
  if (!all_fast(call) || empty) return forward_to_reference(call);
  conv_call g = describe(call, kind, part);
  const int result = (int)conv_result(kind);
  bool one_format = true;      // of the inputs; oneDNN also yields f32 for low-precision inputs
  for (int i = 0; i < CONV_BIAS; i++)
    one_format &= i == result || g.dtype[i] == g.dtype[result == CONV_X ? CONV_W : CONV_X];
  bool f32 = g.dtype[CONV_X] == ENG_f32 && g.dtype[CONV_W] == ENG_f32;
  if (one_format && !add && !f32) ENG_TRY(conv_onednn(&done, &g));
  if (done && kind == CONV_WEIGHT) done = !is_suspect(part[CONV_W]);
  if (!done) ENG_TRY(in_f32(&done, &g, part, add));
  return done ? ENG_OK : forward_to_reference(call);
}

static eng_status conv2d(const op_call *c)
{
  return run(c, CONV_FORWARD, (tensor *[]){c->in[0], c->in[1], c->out[0], c->in[2]}, false);
}

static eng_status conv2d_grad_x(const op_call *c)
{
  return run(c, CONV_INPUT, (tensor *[]){c->out[0], c->in[1], c->in[0], NULL}, false);
}

static eng_status conv2d_grad_w(const op_call *c)
{
  return run(c, CONV_WEIGHT, (tensor *[]){c->in[1], c->out[0], c->in[0], NULL},
             c->conv2d_grad_w.add);
}

void ISA_NAME(cpu_register_conv)(backend *b)
{
  b->kernel[ENG_OP_conv2d] = conv2d;
  b->kernel[ENG_OP_conv2d_grad_x] = conv2d_grad_x;
  b->kernel[ENG_OP_conv2d_grad_w] = conv2d_grad_w;
}
