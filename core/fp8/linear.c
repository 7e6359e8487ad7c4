// Linear layers in FP8, composed of three operations that every device has: quantize, dequantize,
// fp8_matmul. A script that calls these operations itself gets the same bits.
//
//   forward   xq = quantize(x), wq = quantize(W), y = fp8_matmul(xq, wq^T) + bias, rounded once
//   backward  dyq = quantize(dy); dx = fp8_matmul(dyq, wq); dW += fp8_matmul(dyq^T, xq), into the
//             parameter's gradient; the bias gradient is the sum of dy, unquantized
//
// The forward product sums over the columns of x and W, dgrad over the rows of W, and wgrad over
// the rows of x and dy. Square blocks, or one block for the whole matrix, serve both directions.
// Otherwise a transposed copy is quantized too. For dy and W, the pass that quantizes the matrix
// also makes the transposed copy. For x, the role's `keep` decides when the copy is made, and from
// which form of x. The tape does not keep x itself but a quantized copy, which other layers that
// quantize x in the same way can share (same_codes).
//
// If x is the output of a swiglu that only this layer reads, the swiglu computes the codes of x and
// never writes x (swiglu.c). W is quantized from the weights of the forward pass (the low-precision
// copy, or the master). The codes are kept until the weights or the settings change (fp8_weight).
// The tape records the layer as one operation.
//
// Under a microscaling recipe (mx.c) the copies hold values in bf16, which matmul multiplies, or,
// if `coded`, codes, which mx_matmul multiplies. A microscaling recipe may also quantize the copies
// again for the backward products (eng_fp8_recipe.backward). Called by op.c, backward.c and
// swiglu.c.
#include "sites.h"

#include "base/error.h"
#include "base/fp8_layout.h"
#include "base/mx.h"
#include "params/params.h"

#include <stdlib.h>
#include <string.h>

// ---- quantizing

/// Does the work of quantize() for an FP8 recipe.
static eng_status quantize_codes(fp8_copies *out, tensor *slot, fp8_site *s, int role, tensor *x,
                                 const op_call *swiglu, bool transposed)
{
  op_call c = fp8_quantize_call(s, role, x, transposed);
  c.out[0] = out->q, c.out[1] = out->scale, c.out[2] = slot;
  c.out[3] = out->q_t, c.out[4] = out->scale_t;
  if (swiglu)
    c.op = ENG_OP_swiglu_quantize, c.n_in = 3, c.in[2] = c.in[1], c.in[0] = swiglu->in[0],
    c.in[1] = swiglu->in[1];
  ENG_TRY(op_run(&c));
  *out = (fp8_copies){c.out[0], c.out[1], c.out[3], c.out[4], NULL};
  return fp8_measuring() ? fp8_measure(s, role, x, out->q, out->scale) : ENG_OK;
}

/// Quantizes x in a role's format and blocks, into the tensors in `out` that are not NULL; creates
/// the others. `transposed`: also quantizes the transpose of x. `swiglu`, unless NULL: the call
/// that computes x. In this case x has no memory, and its codes are computed from that call's
/// inputs.
static eng_status quantize(fp8_copies *out, int64_t number, fp8_site *s, int role, tensor *x,
                           const op_call *swiglu, bool transposed, bool coded)
{
  OWNED tensor *slot = NULL;
  ENG_TRY(fp8_amax_slot(&slot, number, role));
  eng_status status = s->recipe.role[0].mx
                        ? fp8_mx_quantize(out, slot, s, role, x, transposed, coded)
                        : quantize_codes(out, slot, s, role, x, swiglu, transposed);
  return error_prefix(status, "%s: quantizing %s", s->name, fp8_role_name[role]);
}

/// Does the work of multiply() for an FP8 recipe and codes with two dimensions.
static eng_status multiply_codes(tensor **y, const fp8_site *s, int product, const fp8_factor *a,
                                 const fp8_factor *b, tensor *bias, int dtype, bool add)
{
  const eng_fp8_product *p = &s->recipe.product[product];
  const eng_fp8_role *ra = a->role, *rb = b->role;
  op_call c = {.op = ENG_OP_fp8_matmul, .n_in = 5, .n_out = 1,
               .in = {a->q, a->scale, b->q, b->scale, bias},
               .out = {*y},
               .fp8_matmul = {.transpose_a = a->turned,
                              .transpose_b = b->turned,
                              .a_rows = ra->block_rows,
                              .a_columns = ra->block_columns,
                              .b_rows = rb->block_rows,
                              .b_columns = rb->block_columns,
                              .yields = dtype + 1,
                              .accumulator = p->accumulator,
                              .promotion = p->promotion,
                              .add = add}};
  ENG_TRY(error_prefix(
    op_run(&c), "[%lld x %lld]%s in blocks of %d x %d by [%lld x %lld]%s in blocks of %d x %d",
    (long long)a->q->shape[0], (long long)a->q->shape[1], a->turned ? " transposed" : "",
    ra->block_rows, ra->block_columns, (long long)b->q->shape[0], (long long)b->q->shape[1],
    b->turned ? " transposed" : "", rb->block_rows, rb->block_columns));
  *y = c.out[0];
  return ENG_OK;
}

/// Computes y = a b. The codes of a and b may have any number of dimensions. If *y is NULL, creates
/// it in `dtype`.
static eng_status multiply(tensor **y, const fp8_site *s, int product, fp8_factor a, fp8_factor b,
                           tensor *bias, int dtype, bool add)
{
  OWNED tensor *qa = NULL, *qb = NULL;
  if (*y) dtype = (*y)->dtype;
  ENG_TRY(op_rows(&qa, a.q));
  ENG_TRY(op_rows(&qb, b.q));
  a.q = qa, b.q = qb;
  return error_prefix(s->recipe.role[0].mx
                        ? fp8_mx_multiply(y, &a, &b, bias, dtype, add)
                        : multiply_codes(y, s, product, &a, &b, bias, dtype, add),
                      "%s: %s", s->name, fp8_product_name[product]);
}

// ---- weights

/// A parameter's FP8 copy. It is rebuilt after its source, its site, the recipe, w's factor of
/// delayed scaling, the Hadamard signs, the site's average of w or its form (values or codes) has
/// changed, and at every use while meters are on.
typedef struct fp8_weight {
  params_derived derived;
  int64_t  site;
  uint32_t recipe, seen;       // version of the site's recipe; storage.writes of the source
  int64_t  step;               // the step that drew its Hadamard signs (fp8_mx_step); 0: the signs
                               // are fixed
  const tensor *source;        // the master, or its low-precision copy
  double   factor;             // of delayed scaling
  uint32_t average_seen;       // storage.writes of the site's average
  fp8_copies made;             // q_t: for dx; NULL if dx reads q
} fp8_weight;

static int weight_tensors(tensor **out, const params_derived *copy)
{
  const fp8_copies *made = &((const fp8_weight *)copy)->made;
  tensor *const all[PARAMS_DERIVED] = {made->q, made->scale, made->q_t, made->scale_t, made->gate};
  int n = 0;
  for (int k = 0; k < PARAMS_DERIVED; k++)
    if (all[k]) out[n++] = all[k];
  return n;
}

static void weight_free(params_derived *copy)
{
  tensor *all[PARAMS_DERIVED];
  for (int k = weight_tensors(all, copy) - 1; k >= 0; k--) fp8_drop_later(all[k]);
  free(copy);
  fp8_release_orphans();
}

static params_stamp weight_stamp(const params_derived *copy)
{
  const fp8_weight *weight = (const fp8_weight *)copy;
  fp8_site *s;
  return (params_stamp){weight->made.q->data, weight->site,
                        fp8_site_get(&s, weight->site) == ENG_OK ? s->version : 0};
}

static void weight_outdate(params_derived *copy)
{
  fp8_weight *weight = (fp8_weight *)copy;
  if (weight->source) weight->seen = weight->source->store->writes - 1;
}

/// ZeRO-3: the rank that owns all of a parameter quantizes it. The other ranks receive the
/// quantized copy when they use the parameter.
static eng_status quantize_own(fp8_copies *out, int64_t number, fp8_site *s, parameter *p,
                               const tensor *source, bool transposed, bool coded)
{
  OWNED tensor *whole = NULL;
  FAIL_IF(s->recipe.role[ENG_FP8_W].stochastic, ENG_ERR_VALUE,
          "%s: weights cannot be rounded stochastically with zero=3; hint: zero=2", s->name);
  if (!params_owns(p)) return params_derived_outdated(p);
  ENG_TRY(params_wait());
  tensor *made[PARAMS_DERIVED];
  for (int k = weight_tensors(made, p->derived) - 1; k >= 0; k--) made[k]->store->absent = false;
  ENG_TRY(tensor_wrap(&whole, source->store->space, source->data, source->dtype, source->ndim,
                      source->shape));
  ENG_TRY(quantize(out, number, s, ENG_FP8_W, whole, NULL, transposed, coded));
  return params_derived_outdated(p);
}

/// Creates the tensors for a copy of a matrix [rows x columns] and for its scale.
static eng_status make_copy(tensor **q, tensor **scale, const eng_fp8_role *r, int64_t rows,
                            int64_t columns, bool coded)
{
  int64_t shape[2];
  fp8_scales_for(r->block_rows, r->block_columns, rows, columns, shape);
  if (coded) ENG_TRY(fp8_mx_make(q, ARENA_PARAMETER, r, rows, columns));
  else
    ENG_TRY(tensor_make(q, ARENA_PARAMETER, r->mx ? ENG_bf16 : r->format, 2,
                        (int64_t[]){rows, columns}));
  return tensor_make(scale, ARENA_PARAMETER, ENG_f32, r->mx ? 0 : 2, shape);
}

/// Creates the tensors of the FP8 copy, which outlive the step.
static eng_status make_weight(fp8_copies *to, const eng_fp8_role *r, const tensor *w,
                              bool transposed, bool coded)
{
  int64_t rows = w->shape[0], columns = w->shape[1];
  if (mx_is_gated(r->mx - 1) || r->dge)
    ENG_TRY(tensor_make(&to->gate, ARENA_PARAMETER, ENG_bf16, 2, w->shape));
  ENG_TRY(make_copy(&to->q, &to->scale, r, rows, columns, coded));
  return transposed ? make_copy(&to->q_t, &to->scale_t, r, columns, rows, coded) : ENG_OK;
}

/// Sets *out to the FP8 copies of w. If w belongs to a parameter, these are the parameter's own
/// copies, which are rebuilt unless they are current. Otherwise the copies are made for this call,
/// and *made also gets them, for the caller to drop.
static eng_status weight_copies(fp8_copies *out, fp8_copies *made, int64_t number, fp8_site *s,
                                tensor *w, bool coded)
{
  const eng_fp8_role *r = &s->recipe.role[ENG_FP8_W];
  parameter *p = w->parameter;
  bool transposed = (coded || !fp8_is_square(r)) && !fp8_mx_again(s, ENG_FP8_W);
  tensor *source = w, *average;
  ENG_TRY(fp8_average(&average, s, r));
  uint32_t average_seen = average ? average->store->writes : 0;
  if (p && p->low) ENG_TRY(params_low(&source, p));
  if (!p) {
    ENG_TRY(quantize(made, number, s, ENG_FP8_W, source, NULL, transposed, coded));
    *out = *made;
    return ENG_OK;
  }
  fp8_weight *c = (fp8_weight *)p->derived;
  bool same = c && c->site == number && c->recipe == s->version && c->source == source &&
              (c->made.q->dtype == ENG_u8) == coded;
  if (!same) {
    params_drop_derived(p);
    c = calloc(1, sizeof *c);
    FAIL_IF(!c, ENG_ERR_MEMORY, "out of memory for the FP8 copy of %s", p->name);
    eng_status status = make_weight(&c->made, r, w, transposed, coded);
    if (status != ENG_OK) {
      weight_free(&c->derived);
      return status;
    }
    c->derived = (params_derived){weight_free, weight_outdate, weight_stamp, weight_tensors};
    p->derived = &c->derived;
  }
  *out = c->made;
  int64_t step = fp8_mx_step(s);
  bool current = same && c->seen == source->store->writes && c->step == step &&
                 c->factor == s->factor[ENG_FP8_W] && c->average_seen == average_seen;
  if (current && !fp8_measuring()) return ENG_OK;
  c->site = 0;   // invalid until the copy is complete
  if (params_fetched_on_use(p)) ENG_TRY(quantize_own(out, number, s, p, source, transposed, coded));
  else ENG_TRY(quantize(out, number, s, ENG_FP8_W, source, NULL, transposed, coded));
  if (same && !current) {   // so that backward refuses a tape that read the old codes
    c->made.q->store->writes++;
    if (c->made.q_t) c->made.q_t->store->writes++;
  }
  *c = (fp8_weight){.derived = c->derived,
                    .site = number,
                    .recipe = s->version,
                    .step = step,
                    .seen = source->store->writes,
                    .source = source,
                    .factor = s->factor[ENG_FP8_W],
                    .average_seen = average_seen,
                    .made = c->made};
  return ENG_OK;
}

// ---- forward

enum { IN_X, IN_W, IN_BIAS };
enum { OUT_Y, OUT_XQ, OUT_X_SCALE, OUT_WQ, OUT_W_SCALE, OUT_X_GATE, OUT_W_GATE, OUT_COUNT };

/// Returns the tape node of the fp8_swiglu whose output is x, or -1.
static int swiglu_of(const tensor *x)
{ return tape_holds(x) && tape_call(x->node)->op == ENG_OP_fp8_swiglu ? x->node : -1; }

/// Returns the call that runs the layer in high precision.
static op_call plain_linear(const op_call *c)
{
  return (op_call){.op = ENG_OP_linear, .n_in = 3,
                   .in = {c->in[IN_X], c->in[IN_W], c->in[IN_BIAS]}};
}

static eng_status check_shapes(const fp8_site *s, const op_call *c)
{
  const tensor *x = c->in[IN_X], *w = c->in[IN_W];
  op_call plain = plain_linear(c);
  op_shape shape;
  ENG_TRY(op_infer(&plain, &shape));
  FAIL_IF(w->shape[1] == 0, ENG_ERR_SHAPE, "%s: expected x and a weight with rows of at "
          "least one element in FP8, got %s and %s", s->name, tensor_text(x), tensor_text(w));
  FAIL_IF(s->recipe.role[ENG_FP8_X].keep == ENG_FP8_KEEP_E5M6 && w->shape[1] % 8, ENG_ERR_SHAPE,
          "%s: x kept in e5m6 needs a row length that is a multiple of 8, got x %s; hint: keep "
          "= \"codes\"", s->name, tensor_text(x));
  return ENG_OK;
}

/// Returns the fp8_attention call that computed x, or NULL if there is none. x is the call's output
/// y [B x T x H x D], reshaped to rows of HD elements and not written to since.
static const op_call *attention_of(const tensor *x)
{
  int64_t columns = x->shape[x->ndim - 1];
  while (tape_holds(x) && tape_call(x->node)->op == ENG_OP_reshape) x = tape_call(x->node)->in[0];
  if (!tape_holds(x) || x->output != 0 || tape_call(x->node)->op != ENG_OP_fp8_attention)
    return NULL;
  bool same =
    x->shape[2] * x->shape[3] == columns && x->store->writes == tape_at(x->node)->out_writes[0];
  return same ? tape_call(x->node) : NULL;
}

/// Sets the call's outputs to what the tape keeps of x: codes moved out of `x`, e5m6 codes, or
/// nothing if backward recomputes x from the swiglu.
static eng_status keep_x(op_call *c, const eng_fp8_role *r, fp8_copies *x)
{
  c->fp8_linear.keep = r->keep;
  c->fp8_linear.swiglu = swiglu_of(c->in[IN_X]);
  if (r->keep == ENG_FP8_KEEP_SWIGLU) {
    if (c->fp8_linear.swiglu >= 0) return ENG_OK;
    c->fp8_linear.keep = ENG_FP8_KEEP_CODES;   // x is not the output of a swiglu
  }
  tensor **q = &c->out[OUT_XQ], **scale = &c->out[OUT_X_SCALE];
  if (r->keep == ENG_FP8_KEEP_E5M6) {
    const op_call *attention = attention_of(c->in[IN_X]);
    if (!attention) return fp8_to_e5m6(q, scale, c->in[IN_X]);
    *q = attention->out[3], *scale = attention->out[4];
  } else if (x->q_t) {
    *q = x->q_t, *scale = x->scale_t;
    x->q_t = x->scale_t = NULL;
  } else {
    *q = x->q, *scale = x->scale;
    x->q = x->scale = NULL;
  }
  return ENG_OK;
}

static bool same_role(const eng_fp8_role *a, const eng_fp8_role *b)
{
  return a->format == b->format && a->block_rows == b->block_rows &&
         a->block_columns == b->block_columns && a->rule == b->rule && a->pow2 == b->pow2 &&
         !a->stochastic && !b->stochastic && a->margin == b->margin && a->eps == b->eps;
}

/// Returns a recent linear layer whose codes of x this layer can share, or NULL. For example, gate
/// and up of a SwiGLU can share codes. Both layers must read the same x with equal settings of the
/// role x, and neither may use microscaling, or stochastic rounding or delayed scaling for x.
static const op_call *same_codes(const fp8_site *s, const tensor *x)
{
  enum { BACK = 8 };
  const eng_fp8_role *role = &s->recipe.role[ENG_FP8_X];
  if (role->mx || tape_runs_again()) return NULL;
  int length = eng_tape_length();
  for (int i = length - 1; i >= 0 && i >= length - BACK; i--) {
    const op_call *c = tape_call(i);
    if (c->op != ENG_OP_fp8_linear || c->in[IN_X] != x || !c->out[OUT_XQ] ||
        c->fp8_linear.keep != ENG_FP8_KEEP_CODES)
      continue;
    const fp8_site *other = fp8_site_in_force(c->fp8_linear.site);
    if (!other || other->factor[ENG_FP8_X] != 0 || s->factor[ENG_FP8_X] != 0 ||
        !same_role(&other->recipe.role[ENG_FP8_X], role))
      continue;
    if (fp8_amax_can_share(c->fp8_linear.round) && !tape_modified(tape_at(i), 1 << IN_X, 0))
      return c;
  }
  return NULL;
}

static eng_status forward(op_call *c, fp8_site *s, int compute, bool record, const op_call *swiglu)
{
  const eng_fp8_role *rx = &s->recipe.role[ENG_FP8_X], *rw = &s->recipe.role[ENG_FP8_W];
  tensor *x = c->in[IN_X], *w = c->in[IN_W], *bias = c->in[IN_BIAS];
  typeof(c->fp8_linear) *a = &c->fp8_linear;
  // The product reads xq and wq. Of these, this call drops the tensors in made_x and made_w.
  fp8_copies xq = {0}, wq = {0};
  AT_END(fp8_drop_copies) fp8_copies made_x = {0};
  AT_END(fp8_drop_copies) fp8_copies made_w = {0};
  bool keeps_x = record && w->requires_grad,
       coded = fp8_mx_coded(s, x->count / w->shape[1], w->shape[1], w->shape[0]),
       turns_x = coded ? !fp8_mx_again(s, ENG_FP8_X)
                       : rx->keep == ENG_FP8_KEEP_TRANSPOSED && !fp8_is_square(rx);
  s->accumulator = !rx->mx ? -1 : coded ? ENG_ACCUMULATE_BLACKWELL : ENG_ACCUMULATE_FP32;
  const op_call *other = keeps_x && rx->keep == ENG_FP8_KEEP_CODES ? same_codes(s, x) : NULL;
  if (other) {
    xq.q = other->out[OUT_XQ], xq.scale = other->out[OUT_X_SCALE];
    a->slot = other->fp8_linear.slot;
    fp8_amax_share(a->site, a->slot);
    if (fp8_measuring()) ENG_TRY(fp8_measure(s, ENG_FP8_X, x, xq.q, xq.scale));
  } else {
    ENG_TRY(quantize(&made_x, a->site, s, ENG_FP8_X, x, swiglu, keeps_x && turns_x, coded));
    xq = made_x;
    a->slot = fp8_amax_last().slot;
  }
  a->round = fp8_amax_last().round;
  ENG_TRY(weight_copies(&wq, &made_w, a->site, s, w, coded));
  if (s->recipe.product[ENG_FP8_FORWARD].high) {
    ENG_TRY(op_run1(&c->out[OUT_Y], plain_linear(c)));
  } else {
    OWNED tensor *flat_y = NULL;
    int64_t shape[ENG_MAX_DIMS];
    if (bias && bias->parameter && bias->parameter->low)
      ENG_TRY(params_low(&bias, bias->parameter));
    ENG_TRY(multiply(&flat_y, s, ENG_FP8_FORWARD, (fp8_factor){xq.q, xq.scale, rx, false},
                     (fp8_factor){wq.q, wq.scale, rw, true}, bias,
                     compute >= 0 ? compute : x->dtype, false));
    memcpy(shape, x->shape, sizeof shape);
    shape[x->ndim - 1] = w->shape[0];
    ENG_TRY(op_reshape(&c->out[OUT_Y], flat_y, x->ndim, shape));
  }
  if (!record) return ENG_OK;
  c->n_out = OUT_COUNT;
  if (keeps_x) ENG_TRY(keep_x(c, rx, other ? &xq : &made_x));
  if (x->requires_grad) {
    a->turned = wq.q_t != NULL;
    c->out[OUT_WQ] = a->turned ? wq.q_t : wq.q;
    c->out[OUT_W_SCALE] = a->turned ? wq.scale_t : wq.scale;
    if (a->turned) made_w.q_t = made_w.scale_t = NULL;
    else made_w.q = made_w.scale = NULL;
    c->out[OUT_X_GATE] = made_x.gate, made_x.gate = NULL;
  }
  if (keeps_x) c->out[OUT_W_GATE] = wq.gate, made_w.gate = NULL;
  return ENG_OK;
}

eng_status fp8_linear_in_force(op_call *c, fp8_site *s, const op_call *swiglu)
{
  ENG_TRY(check_shapes(s, c));
  bool record = tape_wants(c), recording = eng_grad_enabled(false);
  c->n_out = 1;
  eng_status status = forward(c, s, op_precision()->compute, record, swiglu);
  eng_grad_enabled(recording);
  if (status == ENG_OK && record) status = tape_record(c);
  if (status == ENG_OK) return ENG_OK;
  tensor_drop(c->out[OUT_Y]);
  c->out[OUT_Y] = NULL;
  return status;
}

/// Runs the layer in FP8, or in high precision if the site is not active.
static eng_status run_linear(op_call *c)
{
  fp8_site *s = fp8_site_in_force(c->fp8_linear.site);
  if (s) return fp8_linear_in_force(c, s, NULL);
  c->n_out = 1;
  return op_run1(&c->out[OUT_Y], plain_linear(c));
}

// ---- backward

/// Provides x or w as an operand of its backward product. This product sums over rows, and the
/// forward product summed over columns. So the values that the forward product read are quantized
/// again, unless the recipe says that they stay unchanged.
static eng_status quantize_again(fp8_factor *out, fp8_copies *made, fp8_site *s, int role,
                                 const op_call *node)
{
  bool x = role == ENG_FP8_X;
  tensor *q = node->out[x ? OUT_XQ : OUT_WQ], *amax = node->out[x ? OUT_X_SCALE : OUT_W_SCALE];
  *out = (fp8_factor){q, amax, &s->recipe.role[role], false};
  if (fp8_mx_same(s, role)) return ENG_OK;
  ENG_TRY(error_prefix(fp8_mx_requantize(made, s, role, q, amax),
                       "%s: quantizing %s for its backward product", s->name,
                       fp8_role_name[role]));
  *out = (fp8_factor){made->q_t, made->scale_t, &s->recipe.backward[role], true};
  return ENG_OK;
}

/// Turns the kept form of x into the operand of the product dW, which sums over the rows of x.
static eng_status kept_x(fp8_factor *out, fp8_copies *made, int64_t number, fp8_site *s,
                         const op_call *node)
{
  if (fp8_mx_again(s, ENG_FP8_X)) return quantize_again(out, made, s, ENG_FP8_X, node);
  const eng_fp8_role *r = &s->recipe.role[ENG_FP8_X];
  tensor *q = node->out[OUT_XQ], *scale = node->out[OUT_X_SCALE];
  OWNED tensor *x = NULL;
  int64_t keep = node->fp8_linear.keep;
  *out = (fp8_factor){q, scale, r, false};
  bool packed = keep == ENG_FP8_KEEP_E5M6, again = keep == ENG_FP8_KEEP_SWIGLU,
       coded = q && q->dtype == ENG_u8;
  if (!packed && !again && !coded && fp8_is_square(r)) return ENG_OK;
  out->turned = true;
  if (keep == ENG_FP8_KEEP_TRANSPOSED || coded) return ENG_OK;
  if (again) ENG_TRY(fp8_swiglu_recompute(&x, tape_call((int)node->fp8_linear.swiglu)));
  else
    ENG_TRY(
      op_run1(&x, (op_call){.op = ENG_OP_dequantize, .in = {q, scale},
                            .dequantize = {.dtype = ENG_f32,
                                           .block_rows = packed ? 1 : r->block_rows,
                                           .block_columns = packed ? FP8_BLOCK : r->block_columns,
                                           .format = packed ? ENG_FORMAT_E5M6 : 0}}));
  // Quantizes x again. The product reads the transposed copy unless blocks are square. Records no
  // amax and no measurement.
  bool turn = !fp8_is_square(r);
  op_call c = fp8_quantize_call(s, ENG_FP8_X, x, turn);
  ENG_TRY(error_prefix(op_run(&c), "%s (site %lld): quantizing x for dW", s->name,
                       (long long)number));
  tensor_drop(c.out[2]);
  *made = (fp8_copies){c.out[0], c.out[1], c.out[3], c.out[4], NULL};
  *out = (fp8_factor){turn ? made->q_t : made->q, turn ? made->scale_t : made->scale, r, turn};
  return ENG_OK;
}

static eng_status emit_dx(grad_call *g, fp8_site *s, const fp8_copies *dy)
{
  const op_call *node = g->call;
  tensor *x = node->in[IN_X], *flat_dx = NULL, *dx;
  fp8_factor a = {dy->q, dy->scale, &s->recipe.role[ENG_FP8_DY], false},
             b = {node->out[OUT_WQ], node->out[OUT_W_SCALE], &s->recipe.role[ENG_FP8_W],
                  node->fp8_linear.turned};
  fp8_copies made = {0};
  bool again = fp8_mx_again(s, ENG_FP8_W);
  if (again) ENG_TRY(quantize_again(&b, &made, s, ENG_FP8_W, node));
  eng_status status = multiply(&flat_dx, s, ENG_FP8_DGRAD, a, b, NULL,
                               again ? ENG_f32 : grad_dtype(g, IN_X), false);
  fp8_drop_copies(&made);
  ENG_TRY(status);
  status = op_reshape(&dx, flat_dx, x->ndim, x->shape);
  tensor_drop(flat_dx);
  ENG_TRY(status);
  if (again) ENG_TRY(fp8_mx_through(&dx, s, node->out[OUT_X_GATE], grad_dtype(g, IN_X)));
  return grad_emit(g, IN_X, dx);
}

static eng_status emit_dw(grad_call *g, fp8_site *s, const fp8_copies *dy)
{
  const eng_fp8_role *rd = &s->recipe.role[ENG_FP8_DY];
  fp8_factor a = {dy->q, dy->scale, rd, true}, b;
  if (dy->q_t) a = (fp8_factor){dy->q_t, dy->scale_t, rd, false};
  fp8_copies made = {0};
  ENG_TRY(kept_x(&b, &made, g->call->fp8_linear.site, s, g->call));
  bool accumulate = false, again = fp8_mx_again(s, ENG_FP8_X);
  tensor *dw = again ? NULL : grad_target(g, IN_W, &accumulate);
  bool direct = dw != NULL;
  eng_status status = multiply(&dw, s, ENG_FP8_WGRAD, a, b, NULL,
                               again ? ENG_f32 : grad_dtype(g, IN_W), accumulate);
  if (status != ENG_OK && direct) grad_target_failed(g, IN_W, accumulate);
  fp8_drop_copies(&made);
  ENG_TRY(status);
  if (again) ENG_TRY(fp8_mx_through(&dw, s, g->call->out[OUT_W_GATE], grad_dtype(g, IN_W)));
  return direct ? ENG_OK : grad_emit(g, IN_W, dw);
}

static eng_status emit_bias(grad_call *g)
{
  OWNED tensor *dy = NULL;
  ENG_TRY(op_rows(&dy, g->dy[0]));
  op_call c = {.op = ENG_OP_bias_grad, .n_in = 1, .in = {dy},
               .bias_grad = {.dtype = grad_dtype(g, IN_BIAS)}};
  return grad_run_to(g, IN_BIAS, &c, &c.bias_grad.add);
}

static eng_status linear_grad(grad_call *g)
{
  fp8_site *s;
  int64_t site = g->call->fp8_linear.site;
  ENG_TRY(fp8_site_get(&s, site));
  bool wants_x = grad_wants(g, IN_X), wants_w = grad_wants(g, IN_W);
  if (wants_x || wants_w) {
    AT_END(fp8_drop_copies) fp8_copies dy = {0};
    const tensor *kept = g->call->out[wants_w ? OUT_XQ : OUT_WQ];
    bool coded = kept && kept->dtype == ENG_u8;
    fp8_mx_begin_backward(s);
    ENG_TRY(quantize(&dy, site, s, ENG_FP8_DY, g->dy[0], NULL,
                     wants_w && (coded || !fp8_is_square(&s->recipe.role[ENG_FP8_DY])), coded));
    if (wants_x) ENG_TRY(emit_dx(g, s, &dy));
    if (wants_w) ENG_TRY(emit_dw(g, s, &dy));
  }
  return grad_wants(g, IN_BIAS) ? emit_bias(g) : ENG_OK;
}

static void __attribute__((constructor)) register_linear(void)
{
  op_register(ENG_OP_fp8_linear, NULL, run_linear);
  grad_register(ENG_OP_fp8_linear, linear_grad);
}
