// The operations attention and attention_grad of ops.def. Each call is prepared for one of the two
// implementations (attention.h). An input is copied to scratch memory if the elements of a row are
// not adjacent, or if its format differs from the format of the computation. For tensor cores it is
// also copied if its rows are not 16-byte aligned, if it is broadcast, or if its width must be
// padded to 32, 64, 96 or 128. Called through the device's table.
#include "attention.h"

#include <math.h>

extern "C" op_kernel cuda_cast;   // copies if the formats are equal

// ---- inputs as the kernels need them

/// Converts x [.. x width] to `dtype` and copies it to `to` [.. x padded], which is contiguous.
/// Columns beyond the width become zeros.
static eng_status lay(void *to, int dtype, const tensor *x, int64_t padded)
{
  tensor y = *x;
  int64_t step = 1;
  y.data = to;
  y.dtype = dtype;
  for (int d = x->ndim - 1; d >= 0; d--) {
    y.stride[d] = step;
    step *= d == x->ndim - 1 ? padded : x->shape[d];
  }
  if (padded != x->shape[x->ndim - 1])
    CUDA_TRY(cudaMemsetAsync(to, 0, (size_t)(step * eng_dtype_size(dtype)), cuda_stream()));
  if (x->count == 0) return ENG_OK;
  op_call cast = simple_call(ENG_OP_cast, x, NULL, &y);
  return cuda_cast(&cast);
}

/// Makes a view of x in `dtype`, whose rows have `padded` adjacent elements. With `aligned`, rows
/// are also 16-byte aligned and not broadcast. If x itself does not have this layout, copies it to
/// scratch memory.
static eng_status input_view(attention_view *view, scratch *all, const tensor *x, int dtype,
                             int64_t padded, bool aligned)
{
  const int64_t *size = x->shape, *stride = x->stride, each = eng_dtype_size(dtype);
  bool fits = x->dtype == dtype && size[3] == padded && (stride[3] == 1 || size[3] == 1);
  if (aligned) {
    fits = fits && is_aligned(x->data);
    for (int d = 0; d < 3; d++)
      fits = fits && (size[d] == 1 || (stride[d] > 0 && stride[d] * each % 16 == 0));
  }
  if (fits) {
    *view = {x->data, stride[0], stride[1], stride[2]};
    return ENG_OK;
  }
  void *copy = scratch_keep(all, size[0] * size[1] * size[2] * padded * each);
  if (!copy) return ENG_ERR_MEMORY;
  *view = {copy, size[1] * size[2] * padded, size[2] * padded, padded};
  return lay(copy, dtype, x, padded);
}

static attention_view output_view(const tensor *x)
{
  if (!x) return {};
  return {x->data, x->stride[0], x->stride[1], x->stride[2]};
}

/// Fills *p with the sizes of a call. Sets `dtype` to the format of the computation: f16 or bf16 if
/// the tensor cores support the call, else f32 or f64. Sets `padded` to the width that the kernels
/// see.
static eng_status problem_of(attention_problem *p, int *dtype, int64_t *padded, const op_call *call)
{
  const tensor *q = call->in[0], *k = call->in[1];
  for (int d = 0; d < 4; d++)
    FAIL_IF(q->shape[d] > INT32_MAX || k->shape[d] > INT32_MAX ||
            q->shape[0] * q->shape[2] > INT32_MAX, ENG_ERR_SHAPE,
            "%s: expected sizes and batch * heads below 2^31, got q %s and k %s",
            eng_op_name(call->op), tensor_text(q), tensor_text(k));
  *p = {};
  p->batch = (int32_t)q->shape[0];
  p->queries = (int32_t)q->shape[1];
  p->heads = (int32_t)q->shape[2];
  p->width = (int32_t)q->shape[3];
  p->keys = (int32_t)k->shape[1];
  p->groups = (int32_t)k->shape[2];
  p->shared = p->heads / p->groups;
  p->causal = call->attention.causal != 0;
  p->factor = call->attention.scale == 0 ? 1.0 / sqrt((double)p->width) : call->attention.scale;
  bool alike = dtype_is_low(q->dtype), wide = false;
  for (int i = 0; i < call->n_in; i++) {
    if (i == 4) continue;   // lse
    alike = alike && call->in[i]->dtype == q->dtype;
    wide = wide || call->in[i]->dtype == ENG_f64;
  }
  for (int i = 0; i < call->n_out; i++)   // wanted outputs, except lse and entropy, which are f32
    alike = alike && (!call->out[i] || call->out[i]->dtype == q->dtype ||
                      (call->op == ENG_OP_attention && i > 0));
  bool tiles = alike && p->width > 0 && p->width <= 128 && p->factor >= 1e-30 && p->factor <= 1e30;
  *dtype = tiles ? q->dtype : wide ? ENG_f64 : ENG_f32;
  *padded = tiles ? (p->width + 31) / 32 * 32 : p->width;
  return ENG_OK;
}

static eng_status views_of(attention_problem *p, scratch *all, const op_call *call, int dtype,
                           int64_t padded)
{
  bool aligned = dtype_is_low(dtype);
  ENG_TRY(input_view(&p->q, all, call->in[0], dtype, padded, aligned));
  ENG_TRY(input_view(&p->k, all, call->in[1], dtype, padded, aligned));
  return input_view(&p->v, all, call->in[2], dtype, padded, aligned);
}

// ---- the operations

static eng_status forward(attention_problem *p, scratch *all, const op_call *call, int dtype,
                          int64_t padded)
{
  int width = p->width;
  ENG_TRY(views_of(p, all, call, dtype, padded));
  p->y = output_view(call->out[0]);
  p->y_dtype = call->out[0]->dtype;
  p->lse = data_of(call->out[1]);
  p->entropy = call->attention.entropy ? data_of(call->out[2]) : NULL;
  p->lse_dtype = call->in[0]->dtype == ENG_f64 ? ENG_f64 : ENG_f32;
  p->width = (int32_t)padded;
  if (!dtype_is_low(dtype)) return attention_plain_forward(p, dtype);
  bool hopper = cuda_capability() == 90 && (padded == 64 || padded == 128);
  return hopper ? attention_forward_hopper(p, dtype, width) : attention_forward(p, dtype, width);
}

/// Sets p->lse to lse, converted if necessary to the format that the kernels read. If the inputs
/// have several formats, the forward pass may have stored lse in a different format.
static eng_status lse_view(attention_problem *p, scratch *all, const tensor *lse, int dtype)
{
  int wanted = dtype == ENG_f64 ? ENG_f64 : ENG_f32;
  p->lse = lse->data;
  if (lse->dtype == wanted) return ENG_OK;
  p->lse = scratch_keep(all, lse->count * eng_dtype_size(wanted));
  return p->lse ? lay(p->lse, wanted, lse, lse->shape[2]) : ENG_ERR_MEMORY;
}

static eng_status backward(attention_problem *p, scratch *all, const op_call *call, int dtype,
                           int64_t padded)
{
  int width = p->width;
  bool tiles = dtype_is_low(dtype);
  ENG_TRY(views_of(p, all, call, dtype, padded));
  if (dtype != ENG_f64) ENG_TRY(input_view(&p->y, all, call->in[3], dtype, padded, tiles));
  ENG_TRY(input_view(&p->dy, all, call->in[5], dtype, padded, tiles));
  ENG_TRY(lse_view(p, all, call->in[4], dtype));
  p->dq = output_view(call->out[0]);
  p->dk = output_view(call->out[1]);
  p->dv = output_view(call->out[2]);
  p->dq_dtype = dtype_of(call->out[0]);
  p->dk_dtype = dtype_of(call->out[1]);
  p->dv_dtype = dtype_of(call->out[2]);
  p->width = (int32_t)padded;
  return tiles ? attention_backward(p, dtype, width) : attention_plain_backward(p, dtype);
}

static eng_status run(const op_call *call, decltype(forward) *pass)
{
  attention_problem p;
  scratch all = {};
  int dtype = 0;
  int64_t padded = 0;
  ENG_TRY(problem_of(&p, &dtype, &padded, call));
  eng_status status = pass(&p, &all, call, dtype, padded);
  scratch_give_all(&all);
  return status;
}

extern "C" eng_status cuda_attention(const op_call *call)      { return run(call, forward); }
extern "C" eng_status cuda_attention_grad(const op_call *call) { return run(call, backward); }
