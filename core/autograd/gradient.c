// Gradients during backward, and gradients of leaves. See gradient.h. Owns the list of leaves.
// Called by backward.c, gradient rules (grad_*.c, fp8/), tensor_calls.c and Lua.
//
// tensor.gradient is never modified in place: a second contribution creates a new tensor with the
// sum. Gradients of parameters go into the one buffer of their parameter set.
//
// Each node has a relative scale, which multiplies the gradients of the node's outputs and hence
// the results of its rule. grad_emit then rescales each result from the node's relative scale to
// the relative scale of the input. Rules and kernels therefore ignore per-layer scaling.
#include "gradient.h"

#include "base/array.h"
#include "base/error.h"
#include "op.h"
#include "device/transfer.h"
#include "params/params.h"

#include <string.h>

// Leaves that belong to no parameter set and have received a gradient in this step. A scope may
// have dropped some of them since; the generation of x has then changed.
typedef struct leaf { tensor *x; uint32_t generation; } leaf;
static struct { leaf *items; int length; int64_t room; } leaves;

static struct { gradient_place *place; void *data; } placing;

void gradient_set_place(gradient_place *place, void *data)
{
  placing.place = place;
  placing.data = data;
}

double gradient_relative_scale(const tensor *x)
{
  if (x->parameter) return x->parameter->relative_scale;
  return tape_holds(x) ? tape_at(x->node)->relative_scale : 1;
}

void gradient_attach(tensor *x, tensor *dx)
{
  x->gradient = dx;
  dx->is_gradient = true;
}

void gradient_drop(tensor *x)
{
  tensor_drop(x->gradient);
  x->gradient = NULL;
}

bool grad_wants(const grad_call *g, int k)
{ return g->call->in[k] && g->call->in[k]->requires_grad; }

int grad_dtype(const grad_call *g, int k)
{
  const tensor *x = g->call->in[k];
  bool final = gradient_relative_scale(x) == g->relative_scale;   // grad_emit will not rescale dx
  return final || x->dtype == ENG_f64 ? x->dtype : ENG_f32;
}

eng_status grad_run_wide(tensor **out, op_call c)
{
  op_shape s;
  c.n_in = op_table[c.op].about.n_in;
  ENG_TRY(op_infer(&c, &s));
  int dtype = s.out[0].dtype == ENG_f64 ? ENG_f64 : ENG_f32;
  OWNED tensor *made = NULL;
  ENG_TRY(tensor_make(&made, ARENA_STEP, dtype, s.out[0].ndim, s.out[0].shape));
  c.out[0] = made;
  ENG_TRY(op_run(&c));
  *out = made;
  made = NULL;
  return ENG_OK;
}

eng_status grad_share(tensor **out, tensor *x)
{ return tensor_view(out, x, 0, x->ndim, x->shape, x->stride); }

/// Allocates the memory of p's gradient if it has none.
static eng_status place(parameter *p)
{
  if (p->gradient) return ENG_OK;
  return p->set->divided && placing.place ? placing.place(placing.data, p)
                                          : params_gradients(p->set);
}

tensor *grad_target(grad_call *g, int k, bool *accumulate)
{
  parameter *p = g->call->in[k]->parameter;
  // if place() fails, the caller uses grad_emit, which calls place() again and reports the error
  if (!p || p->relative_scale != g->relative_scale) return NULL;
  if (params_sums_terms(p) || place(p) != ENG_OK) return NULL;
  *accumulate = p->has_gradient;
  p->has_gradient = true;
  return p->gradient;
}

void grad_target_failed(grad_call *g, int k, bool accumulate)
{ g->call->in[k]->parameter->has_gradient = accumulate; }

static eng_status round_to(tensor **x, int dtype)
{
  if ((*x)->dtype == dtype) return ENG_OK;
  return op_replace(x, (op_call){.op = ENG_OP_cast, .cast = {.dtype = dtype}});
}

/// Sums dx over the dimensions in which x was broadcast. Consumes dx and returns a tensor of x's
/// shape.
static eng_status unbroadcast(tensor **dx, const tensor *x)
{
  int lead = (*dx)->ndim - x->ndim;
  int64_t mask = 0;
  for (int d = 0; d < (*dx)->ndim; d++)
    if (d < lead || (x->shape[d - lead] == 1 && (*dx)->shape[d] != 1)) mask |= 1ll << d;
  if (mask)
    ENG_TRY(op_replace(dx, (op_call){.op = ENG_OP_sum, .sum = {.mask = mask, .keep = 1}}));
  op_call shaped = {.op = ENG_OP_reshape, .reshape = {.ndim = x->ndim}};
  memcpy(shaped.reshape.shape, x->shape, (size_t)x->ndim * sizeof *x->shape);
  return op_replace(dx, shaped);
}

/// Adds dx to a parameter's gradient in the buffer of its set. Consumes dx.
static eng_status add_to_parameter(parameter *p, tensor *dx)
{
  OWNED tensor *term = dx;
  ENG_TRY(place(p));
  if (params_sums_terms(p)) ENG_TRY(round_to(&term, p->set->term_dtype[p->index]));
  op_call c = {.op = ENG_OP_cast, .n_in = 1, .n_out = 1, .in = {term}, .out = {p->gradient},
               .cast = {.dtype = p->gradient->dtype}};
  if (p->has_gradient)
    c = (op_call){
      .op = ENG_OP_add, .n_in = 2, .n_out = 1, .in = {p->gradient, term}, .out = {p->gradient}};
  ENG_TRY(op_run(&c));
  p->has_gradient = true;
  return ENG_OK;
}

/// Makes dx the gradient of a leaf outside parameter sets. Consumes dx.
static eng_status note_leaf(tensor *x, tensor *dx)
{
  if (!ARRAY_GROW(leaves.items, leaves.room, leaves.length + 1)) {
    tensor_drop(dx);
    return error_set(ENG_ERR_MEMORY, "out of memory for the list of leaves with a gradient");
  }
  leaves.items[leaves.length++] = (leaf){x, x->generation};
  gradient_attach(x, dx);
  return ENG_OK;
}

static eng_status accumulate(tensor *x, tensor *dx)
{
  if (x->parameter) return add_to_parameter(x->parameter, dx);
  if (!x->gradient && x->node < 0) return note_leaf(x, dx);
  if (x->gradient) {
    ENG_TRY(op_replace(&dx, (op_call){.op = ENG_OP_add, .in = {x->gradient, dx}}));
    tensor_drop(x->gradient);
  }
  gradient_attach(x, dx);
  return ENG_OK;
}

eng_status grad_emit(grad_call *g, int k, tensor *dx)
{
  tensor *x = g->call->in[k];
  if (!grad_wants(g, k)) {
    tensor_drop(dx);
    return ENG_OK;
  }
  if (!tensor_same_shape(dx, x)) ENG_TRY(unbroadcast(&dx, x));
  double relative = gradient_relative_scale(x);
  if (relative != g->relative_scale)   // the term is -0, because adding 0 would turn -0 into 0
    ENG_TRY(op_replace(&dx, (op_call){
      .op = ENG_OP_affine, .affine = {.factor = relative / g->relative_scale, .term = -0.0}}));
  if (!x->parameter) ENG_TRY(round_to(&dx, x->dtype));
  return accumulate(x, dx);
}

eng_status grad_emit_op(grad_call *g, int k, op_call c)
{
  tensor *dx;
  ENG_TRY(op_run1(&dx, c));
  return grad_emit(g, k, dx);
}

eng_status grad_run_to(grad_call *g, int k, op_call *c, int64_t *add)
{
  bool accumulate = false;
  tensor *target = c->out[0] = grad_target(g, k, &accumulate);
  *add = accumulate;
  eng_status status = op_run(c);
  if (status != ENG_OK && target) grad_target_failed(g, k, accumulate);
  return status != ENG_OK || target ? status : grad_emit(g, k, c->out[0]);
}

eng_status grad_zeros(tensor **out, int dtype, int ndim, const int64_t *shape)
{
  ENG_TRY(tensor_make(out, ARENA_STEP, dtype, ndim, shape));
  return transfer_clear(*out);
}

eng_status grad_emit_shared(grad_call *g, int k, tensor *dx)
{
  tensor *shared;
  ENG_TRY(grad_share(&shared, dx));
  return grad_emit(g, k, shared);
}

void gradient_drop_leaves(void)
{
  for (int i = 0; i < leaves.length; i++)
    if (leaves.items[i].x->generation == leaves.items[i].generation)
      gradient_drop(leaves.items[i].x);
  leaves.length = 0;
}

// ---- leaves

eng_status eng_requires_grad(const eng_tensor *handle, bool on)
{
  tensor *x;
  ENG_TRY(tensor_find(&x, handle));
  FAIL_IF(tape_holds(x), ENG_ERR_GRADIENT,
          "requires_grad: expected a leaf, got %s, which a recorded operation computed; hint: "
          "x:detach() is a leaf",
          tensor_text(x));
  FAIL_IF(on && !dtype_is_float(x->dtype), ENG_ERR_DTYPE,
          "requires_grad: expected a tensor in f32, f64, f16 or bf16, got %s; hint: x:to(\"f32\")",
          tensor_text(x));
  x->requires_grad = on;
  if (x->parameter && x->parameter->low) x->parameter->low->requires_grad = on;
  return ENG_OK;
}

eng_status eng_gradient(eng_tensor *out, const eng_tensor *handle)
{
  tensor *x;
  *out = (eng_tensor){0, 0};
  ENG_TRY(tensor_find(&x, handle));
  tensor *dx = x->gradient;
  if (x->parameter) {
    const parameter *p = x->parameter;
    FAIL_IF(p->has_gradient && p->set->divided && !p->set->kept, ENG_ERR_STATE,
            "the gradient of parameter %s is divided among the ranks (zero=2 or 3), and no rank "
            "has all of it; hint: zero=1", p->name);
    dx = p->has_gradient ? p->gradient : NULL;
  }
  if (!dx) return ENG_OK;
  tensor *shared;
  ENG_TRY(grad_share(&shared, dx));
  *out = tensor_handle(shared);
  return ENG_OK;
}

eng_status eng_clear_gradient(const eng_tensor *handle)
{
  tensor *x;
  ENG_TRY(tensor_find(&x, handle));
  if (x->parameter) params_drop_gradient(x->parameter);
  else if (x->node < 0) {
    gradient_drop(x);
    for (int i = 0; i < leaves.length; i++)
      if (leaves.items[i].x == x) leaves.items[i--] = leaves.items[--leaves.length];
  }
  return ENG_OK;
}
