// Convolutions through oneDNN 2.6 to 3.x. x and y stay channels last in memory unless oneDNN has a
// fast kernel only for another layout. On every call, weights are reordered into the layout that
// oneDNN chooses, if that is not their own. Called by conv.c.
//
// Numerics: products and sums are f32, and the result is rounded once. On processors with
// AVX512-BF16 or AMX, bf16 products take subnormals as zero and flush subnormal sums. NaN and
// infinity propagate. In some kernels, they also reach outputs that do not depend on them; conv.c
// corrects these outputs. oneDNN chooses the order of the sums, which is fixed for one version of
// oneDNN, one shape and one thread count. For calls that it does not support, oneDNN returns
// dnnl_unimplemented. conv.c then converts to f32 or calls the reference kernels.
#include "conv.h"

#include "onednn.h"

#include <stddef.h>
#include <string.h>

// The largest size passed to oneDNN, which computes some products of sizes in 32 bits.
enum { LARGEST = 1 << 24 };

// Indices of the memories of a onednn_entry: the caller's parts, the parts in oneDNN's layouts, and
// the scratchpad.
enum { WANTED = CONV_PARTS, SCRATCHPAD = WANTED + CONV_BIAS, MEMORIES };
// Indices of the primitives of a onednn_entry: the reorders of X, W and Y, then the convolution.
enum { CONVOLUTION = 3 };

enum { KEY = offsetof(conv_call, data) };   // bytes of a conv_call that are its key

static const int argument[CONV_KINDS][CONV_PARTS] = {
  {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST, DNNL_ARG_BIAS},
  {DNNL_ARG_DIFF_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DIFF_DST, 0},
  {DNNL_ARG_SRC, DNNL_ARG_DIFF_WEIGHTS, DNNL_ARG_DIFF_DST, 0}};
static const dnnl_query_t query[CONV_KINDS][CONV_BIAS] = {
  {dnnl_query_src_md, dnnl_query_weights_md, dnnl_query_dst_md},
  {dnnl_query_diff_src_md, dnnl_query_weights_md, dnnl_query_diff_dst_md},
  {dnnl_query_src_md, dnnl_query_diff_weights_md, dnnl_query_diff_dst_md}};

// ---- the convolution's primitive descriptor, in the APIs of oneDNN 2 and 3

typedef struct sizes { dnnl_dims_t stride, dilation, padding; } sizes;

#if DNNL_VERSION_MAJOR >= 3
static dnnl_status_t conv_create(dnnl_primitive_desc_t *out, conv_kind kind, const sizes *s,
                                 layout_view x, layout_view w, layout_view y, layout_view bias,
                                 const_dnnl_primitive_attr_t a, const_dnnl_primitive_desc_t hint)
{
  const dnnl_alg_kind_t how = dnnl_convolution_direct;
  if (kind == CONV_FORWARD)
    return dnnl_convolution_forward_primitive_desc_create(
      out, onednn_engine, dnnl_forward_training, how, x, w, bias, y, s->stride, s->dilation,
      s->padding, s->padding, a);
  if (kind == CONV_INPUT)
    return dnnl_convolution_backward_data_primitive_desc_create(
      out, onednn_engine, how, x, w, y, s->stride, s->dilation, s->padding, s->padding, hint, a);
  return dnnl_convolution_backward_weights_primitive_desc_create(
    out, onednn_engine, how, x, w, NULL, y, s->stride, s->dilation, s->padding, s->padding, hint,
    a);
}
#else
static dnnl_status_t conv_create(dnnl_primitive_desc_t *out, conv_kind kind, const sizes *s,
                                 layout_view x, layout_view w, layout_view y, layout_view bias,
                                 const_dnnl_primitive_attr_t a, const_dnnl_primitive_desc_t hint)
{
  const dnnl_alg_kind_t how = dnnl_convolution_direct;
  dnnl_convolution_desc_t d;
  dnnl_status_t status =
    kind == CONV_FORWARD ? dnnl_dilated_convolution_forward_desc_init(
      &d, dnnl_forward_training, how, x, w, bias, y, s->stride, s->dilation, s->padding, s->padding)
    : kind == CONV_INPUT ? dnnl_dilated_convolution_backward_data_desc_init(
      &d, how, x, w, y, s->stride, s->dilation, s->padding, s->padding)
    : dnnl_dilated_convolution_backward_weights_desc_init(
      &d, how, x, w, NULL, y, s->stride, s->dilation, s->padding, s->padding);
  return status ? status : dnnl_primitive_desc_create(out, &d, a, onednn_engine, hint);
}
#endif

// ---- building

/// Creates the memory descriptor of a part, with the layout of the caller's memory or, with `any`,
/// a layout that oneDNN chooses.
static dnnl_status_t describe(dnnl_memory_desc_t *l, const conv_call *k, conv_part part, bool any)
{
  dnnl_data_type_t format = (dnnl_data_type_t)onednn_format((int)k->dtype[part]);
  dnnl_dims_t size = {k->n, k->c, k->h, k->w}, stride = {k->h * k->w * k->c, 1, k->w * k->c, k->c};
  int n = 4;
  if (part == CONV_Y) {
    size[1] = k->o, size[2] = k->p, size[3] = k->q;
    stride[0] = k->p * k->q * k->o, stride[2] = k->q * k->o, stride[3] = k->o;
  } else if (part == CONV_BIAS) {
    n = 1, size[0] = k->o, stride[0] = 1;
  } else if (part == CONV_W) {
    n = 0;
    if (k->groups > 1) size[n++] = k->groups;
    size[n++] = k->o / k->groups, size[n++] = k->c / k->groups;
    size[n++] = k->kernel[0], size[n++] = k->kernel[1];
    for (int64_t d = n - 1, step = 1; d >= 0; step *= size[d--]) stride[d] = step;
  }
  return any ? layout_create_any(l, n, size, format, dnnl_format_tag_any)
             : layout_create(l, n, size, format, stride);
}

/// Creates a convolution's primitive descriptor, with x and y channels last or, with `any`, in a
/// layout that oneDNN chooses.
static dnnl_status_t describe_conv(dnnl_primitive_desc_t *out, const conv_call *k, conv_kind kind,
                                   bool any, const_dnnl_primitive_desc_t hint)
{
  sizes s = {.stride = {k->stride[0], k->stride[1]},
             .dilation = {k->dilation[0] - 1, k->dilation[1] - 1},
             .padding = {k->padding[0], k->padding[1]}};
  bool biased = kind == CONV_FORWARD && k->dtype[CONV_BIAS] >= 0;
  dnnl_memory_desc_t l[CONV_PARTS];
  dnnl_primitive_attr_t attributes = NULL;
  memset(l, 0, sizeof l);
  dnnl_status_t status = dnnl_success;
  for (int i = 0; i < CONV_PARTS - !biased && status == dnnl_success; i++)
    status = describe(&l[i], k, i, i == CONV_W || (any && i != CONV_BIAS));
  if (status == dnnl_success) status = onednn_attributes(&attributes);
  if (status == dnnl_success)
    status = conv_create(out, kind, &s, view(&l[CONV_X]), view(&l[CONV_W]), view(&l[CONV_Y]),
                         biased ? view(&l[CONV_BIAS]) : NULL, attributes, hint);
  if (attributes) dnnl_primitive_attr_destroy(attributes);
  for (int i = 0; i < CONV_PARTS; i++) layout_destroy(&l[i]);
  return status;
}

/// Returns whether oneDNN would compute the convolution with one of its slow kernels.
static bool is_slow(const_dnnl_primitive_desc_t conv)
{
  const char *name = NULL;
  if (dnnl_primitive_desc_query(conv, dnnl_query_impl_info_str, 0, &name) != dnnl_success || !name)
    return false;
  return strstr(name, "ref") || strncmp(name, "gemm", 4) == 0;
}

/// Creates the convolution's primitive descriptor. x and y are channels last, unless oneDNN has a
/// fast kernel only for another layout.
static dnnl_status_t choose(dnnl_primitive_desc_t *out, const conv_call *k)
{
  // oneDNN needs the description of a forward convolution, in y's format, to describe a gradient.
  conv_call plain = *k;
  plain.dtype[CONV_X] = plain.dtype[CONV_W] = plain.dtype[CONV_Y];
  for (int any = 0; any < 2; any++) {
    dnnl_primitive_desc_t forward = NULL, found = NULL;
    dnnl_status_t status = dnnl_success;
    if (k->kind != CONV_FORWARD) status = describe_conv(&forward, &plain, CONV_FORWARD, any, NULL);
    if (status == dnnl_success) status = describe_conv(&found, k, (conv_kind)k->kind, any, forward);
    if (forward) dnnl_primitive_desc_destroy(forward);
    if (status != dnnl_success) continue;
    if (*out && is_slow(found)) {
      dnnl_primitive_desc_destroy(found);
      break;
    }
    if (*out) dnnl_primitive_desc_destroy(*out);
    *out = found;
    if (!is_slow(found)) break;
  }
  return *out ? dnnl_success : dnnl_unimplemented;
}

static dnnl_status_t build_reorder(onednn_entry *e, int part, layout_view own, layout_view wanted,
                                   bool result)
{
  dnnl_primitive_desc_t reorder;
  dnnl_primitive_attr_t attributes;
  dnnl_status_t status = dnnl_memory_create(&e->memory[WANTED + part], wanted, onednn_engine,
                                            DNNL_MEMORY_NONE);
  if (status == dnnl_success) status = onednn_attributes(&attributes);
  if (status != dnnl_success) return status;
  status = dnnl_reorder_primitive_desc_create(&reorder, result ? wanted : own, onednn_engine,
                                              result ? own : wanted, onednn_engine, attributes);
  dnnl_primitive_attr_destroy(attributes);
  if (status != dnnl_success) return status;
  int64_t scratch = (int64_t)dnnl_memory_desc_get_size(
    dnnl_primitive_desc_query_md(reorder, dnnl_query_scratchpad_md, 0));
  status = scratch > 0 ? dnnl_unimplemented : dnnl_primitive_create(&e->primitive[part], reorder);
  dnnl_primitive_desc_destroy(reorder);
  e->bytes[WANTED + part] = (int64_t)dnnl_memory_desc_get_size(wanted);
  return status;
}

static dnnl_status_t fill(onednn_entry *e, const conv_call *k, const_dnnl_primitive_desc_t conv)
{
  dnnl_status_t status = dnnl_success;
  for (int i = 0; i < CONV_PARTS && status == dnnl_success; i++) {
    if (i == CONV_BIAS && k->dtype[i] < 0) continue;
    dnnl_memory_desc_t own;
    memset(&own, 0, sizeof own);
    status = describe(&own, k, i, false);
    if (status != dnnl_success) return status;
    status = dnnl_memory_create(&e->memory[i], view(&own), onednn_engine, DNNL_MEMORY_NONE);
    layout_view wanted =
      i != CONV_BIAS ? dnnl_primitive_desc_query_md(conv, query[k->kind][i], 0) : NULL;
    if (status == dnnl_success && wanted && !dnnl_memory_desc_equal(view(&own), wanted))
      status = build_reorder(e, i, view(&own), wanted, i == (int)conv_result(k->kind));
    layout_destroy(&own);
  }
  if (status != dnnl_success) return status;
  layout_view scratch = dnnl_primitive_desc_query_md(conv, dnnl_query_scratchpad_md, 0);
  e->bytes[SCRATCHPAD] = (int64_t)dnnl_memory_desc_get_size(scratch);
  status = dnnl_memory_create(&e->memory[SCRATCHPAD], scratch, onednn_engine, DNNL_MEMORY_NONE);
  return status == dnnl_success ? dnnl_primitive_create(&e->primitive[CONVOLUTION], conv) : status;
}

static eng_status build(onednn_entry *e, const conv_call *k)
{
  ENG_TRY(onednn_open());
  onednn_take(e, k, KEY);
  dnnl_primitive_desc_t conv = NULL;
  dnnl_status_t status = choose(&conv, k);
  if (status == dnnl_success) status = fill(e, k, conv);
  if (conv) dnnl_primitive_desc_destroy(conv);
  e->refused = status != dnnl_success;
  return ENG_OK;
}

// ---- running

static eng_status reorder(const onednn_entry *e, int part, bool result)
{
  int own = part, wanted = WANTED + part;
  dnnl_exec_arg_t arguments[2] = {{DNNL_ARG_FROM, e->memory[result ? wanted : own]},
                                  {DNNL_ARG_TO, e->memory[result ? own : wanted]}};
  DNNL_TRY("reordering a tensor",
           dnnl_primitive_execute(e->primitive[part], onednn_stream, 2, arguments));
  return ENG_OK;
}

static eng_status execute(const onednn_entry *e, const conv_call *g, char *scratch)
{
  dnnl_exec_arg_t arguments[CONV_PARTS + 1];
  const int result = (int)conv_result(g->kind);
  int n = 0;
  for (int i = 0; i < MEMORIES; i++) {
    if (!e->memory[i]) continue;
    void *data = i < CONV_PARTS ? g->data[i] : scratch;
    DNNL_TRY("setting an argument of the convolution",
             dnnl_memory_set_data_handle(e->memory[i], data));
    if (i >= CONV_PARTS) scratch += (e->bytes[i] + 63) / 64 * 64;
  }
  for (int i = 0; i < CONV_PARTS; i++) {
    if (!e->memory[i]) continue;
    bool reordered = i < 3 && e->primitive[i];
    if (reordered && i != result) ENG_TRY(reorder(e, i, false));
    arguments[n++] = (dnnl_exec_arg_t){argument[g->kind][i], e->memory[reordered ? WANTED + i : i]};
  }
  arguments[n++] = (dnnl_exec_arg_t){DNNL_ARG_SCRATCHPAD, e->memory[SCRATCHPAD]};
  DNNL_TRY("running the convolution",
           dnnl_primitive_execute(e->primitive[CONVOLUTION], onednn_stream, n, arguments));
  if (e->primitive[result]) ENG_TRY(reorder(e, result, true));
  DNNL_TRY("waiting for the convolution", dnnl_stream_wait(onednn_stream));
  return ENG_OK;
}

eng_status conv_onednn(bool *done, const conv_call *g)
{
  *done = false;
  const int64_t *size = &g->n, *end = g->dtype;   // every size of the call
  for (; size < end; size++)
    if (*size > LARGEST) return ENG_OK;
  onednn_entry *e = onednn_find(g, KEY);
  if (!e->taken) ENG_TRY(build(e, g));
  if (e->refused) return ENG_OK;
  int64_t bytes = 0;
  for (int i = WANTED; i < MEMORIES; i++) bytes += (e->bytes[i] + 63) / 64 * 64;
  SCRATCH(char, room, bytes);
  ENG_TRY(execute(e, g, room));
  *done = true;
  return ENG_OK;
}
