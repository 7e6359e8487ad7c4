// Linear layers in FP8, out of three operations that every device has: quantize, dequantize and fp8_matmul. What a script would get by
// calling these by hand, to the bit.
//
//   forward   xq = quantize(x), wq = quantize(W), y = fp8_matmul(xq, wq^T) + bias, in one rounding
//   backward  dyq = quantize(dy); dx = fp8_matmul(dyq, wq); dW += fp8_matmul(dyq^T, xq), onto the parameter's own gradient;
//             the bias' gradient is summed from dy itself
// A product along the other side of a matrix wants blocks along that side. Where blocks are square or the whole matrix the same bytes
// serve, read transposed. Else the transposed matrix is quantized: dy's and W's with the pass that makes the other copy, x's as the
// role's `keep` says. So the tape keeps one copy of x, for all layers in a row that read it alike, and none of x itself.
//
// Where x is a swiglu's and nobody else reads it, its codes are made with it and x is never written (fp8_swiglu.c).
// W is quantized from what a forward pass reads otherwise (its low-precision copy, or the master), once, until somebody writes there.
// Owns the table of sites. Not recorded: the operations inside.
#include "fp8_linear.h"

#include "base/error.h"
#include "base/fp8_layout.h"
#include "base/fp8_scale.h"
#include "params/params.h"
#include "device/transfer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct fp8_site {
  char    *name;
  bool     on;
  uint32_t version;                      // of the recipe
  eng_fp8_recipe recipe;
  double   factor[ENG_FP8_ROLES];        // 0: the role's own amax decides
  tensor  *factor_of[ENG_FP8_ROLES];     // the same where the device reads it, f32 [1]
  double   amax[ENG_FP8_ROLES];
  eng_fp8_meter meter[ENG_FP8_ROLES];
} fp8_site;

static struct { fp8_site **item; int64_t length, capacity; } sites;   // item i is site i + 1
static bool measuring;

static const char *const role_name[] = { "x", "w", "dy" }, *const product_name[] = { "forward", "dgrad", "wgrad" };

static eng_status site_get(fp8_site **out, int64_t site)
{
  *out = site >= 1 && site <= sites.length ? sites.item[site - 1] : NULL;
  return *out ? ENG_OK : error_set(ENG_ERR_STATE, "there is no FP8 site %lld (any more)", (long long)site);
}

// ---- tensors whose owner is gone while the tape may still look at them

static struct { tensor **item; int length, capacity; } orphans;

static void release_orphans(void)
{
  if (!tape_empty()) return;
  while (orphans.length > 0) tensor_drop(orphans.item[--orphans.length]);
}

static void let_go(tensor *x)
{
  if (!x) return;
  if (tape_empty()) {
    tensor_drop(x);
    return;
  }
  if (orphans.length == orphans.capacity) {
    int more = orphans.capacity ? 2 * orphans.capacity : 64;
    tensor **grown = realloc(orphans.item, (size_t)more * sizeof *grown);
    if (!grown) return;   // lost, not dangling
    orphans.item = grown;
    orphans.capacity = more;
  }
  orphans.item[orphans.length++] = x;
}

// ---- amaxes: each quantization leaves its own in a slot of device memory, which is read back only when somebody asks

enum { AMAX_SLOTS = 4096 };
static struct {
  tensor *slots;                         // f32 [AMAX_SLOTS]
  int     used;
  bool    asked;                         // for, since the slots were full last: else nobody waits for the device
  struct { int64_t site; int role; } of[AMAX_SLOTS];
  int64_t round;                         // how often the slots began anew
  struct { int64_t site; int slot; } x_too[AMAX_SLOTS];   // sites whose x is the one that a slot is of
  int     too;
} amaxes;

static double larger_or_nan(double a, double b) { return a != a ? a : b != b || b > a ? b : a; }

static void amaxes_anew(void)
{
  amaxes.used = amaxes.too = 0;
  amaxes.round++;
}

static eng_status collect_amaxes(void)
{
  if (!amaxes.slots || amaxes.used == 0) return ENG_OK;
  static float value[AMAX_SLOTS];
  int used = amaxes.used, too = amaxes.too;
  amaxes_anew();
  tensor *some;
  ENG_TRY(tensor_view(&some, amaxes.slots, 0, 1, (int64_t[]){used}, (int64_t[]){1}));
  eng_status status = transfer_read(value, ENG_f32, some);
  tensor_drop(some);
  for (int i = 0; i < used && status == ENG_OK; i++) {
    fp8_site *s = sites.item[amaxes.of[i].site - 1];
    if (s) s->amax[amaxes.of[i].role] = larger_or_nan(s->amax[amaxes.of[i].role], value[i]);
  }
  for (int i = 0; i < too && status == ENG_OK; i++) {
    fp8_site *s = sites.item[amaxes.x_too[i].site - 1];
    if (s) s->amax[ENG_FP8_X] = larger_or_nan(s->amax[ENG_FP8_X], value[amaxes.x_too[i].slot]);
  }
  return status;
}

/// A place for the next amax, f32 [].
static eng_status amax_slot(tensor **out, int64_t site, int role)
{
  if (amaxes.slots && amaxes.slots->store->space != arena_space()) {
    ENG_TRY(collect_amaxes());
    let_go(amaxes.slots);
    amaxes.slots = NULL;
  }
  if (!amaxes.slots) ENG_TRY(tensor_make(&amaxes.slots, ARENA_KEPT, ENG_f32, 1, (int64_t[]){AMAX_SLOTS}));
  if (amaxes.used == AMAX_SLOTS) {
    if (amaxes.asked) ENG_TRY(collect_amaxes());
    amaxes_anew();
    amaxes.asked = false;
  }
  ENG_TRY(tensor_view(out, amaxes.slots, amaxes.used, 0, NULL, NULL));
  amaxes.of[amaxes.used].site = site;
  amaxes.of[amaxes.used++].role = role;
  return ENG_OK;
}

// ---- sites

eng_status eng_fp8_site_new(int64_t *site, const char *name)
{
  if (sites.length == sites.capacity) {
    int64_t more = sites.capacity ? 2 * sites.capacity : 64;
    fp8_site **grown = realloc(sites.item, (size_t)more * sizeof *grown);
    if (!grown) return error_set(ENG_ERR_MEMORY, "out of memory for the FP8 site of %s", name);
    sites.item = grown;
    sites.capacity = more;
  }
  fp8_site *s = calloc(1, sizeof *s);
  if (s) s->name = strdup(name);
  if (!s || !s->name) {
    free(s);
    return error_set(ENG_ERR_MEMORY, "out of memory for the FP8 site of %s", name);
  }
  for (int r = 0; r < ENG_FP8_ROLES; r++) s->amax[r] = -1;
  sites.item[sites.length] = s;
  *site = ++sites.length;
  return ENG_OK;
}

void eng_fp8_site_free(int64_t site)
{
  fp8_site *s;
  if (site_get(&s, site) != ENG_OK) return;
  for (int r = 0; r < ENG_FP8_ROLES; r++) let_go(s->factor_of[r]);
  sites.item[site - 1] = NULL;
  free(s->name);
  free(s);
  release_orphans();
}

static bool is_square(const eng_fp8_role *r) { return r->block_rows == r->block_columns; }

static eng_status check_role(const fp8_site *s, const eng_fp8_recipe *recipe, int role)
{
  const eng_fp8_role *r = &recipe->role[role];
  if (r->format != ENG_e4m3 && r->format != ENG_e5m2)
    return error_set(ENG_ERR_DTYPE, "%s: FP8 format of %s: expected e4m3 or e5m2, got number %d", s->name, role_name[role], r->format);
  if (r->block_rows < 0 || r->block_columns < 0)
    return error_set(ENG_ERR_VALUE, "%s: blocks of %s: expected 1 or more rows and columns, or 0 for all, got %d x %d", s->name, role_name[role], r->block_rows, r->block_columns);
  if (r->rule < 0 || r->rule >= ENG_SCALES) return error_set(ENG_ERR_VALUE, "%s: %s: there is no scale rule %d", s->name, role_name[role], r->rule);
  if (r->margin < -100 || r->margin > 100) return error_set(ENG_ERR_VALUE, "%s: %s: expected a margin within +-100, got %d", s->name, role_name[role], r->margin);
  if (r->keep < 0 || r->keep > ENG_FP8_KEEP_SWIGLU) return error_set(ENG_ERR_VALUE, "%s: %s: there is no way number %d to keep it", s->name, role_name[role], r->keep);
  if (!(r->eps <= 1e30)) return error_set(ENG_ERR_VALUE, "%s: %s: expected eps up to 1e30, or negative for the rule's, got %g", s->name, role_name[role], r->eps);
  return ENG_OK;
}

/// Blocks of two factors along the side that a product sums over: one must hold a whole number of the other.
static eng_status check_nesting(const fp8_site *s, int product, const char *a_name, int64_t a, const char *b_name, int64_t b)
{
  if (a == 0 || b == 0 || a % b == 0 || b % a == 0) return ENG_OK;
  return error_set(ENG_ERR_SHAPE, "%s: %s: blocks of %s hold %lld, those of %s %lld along the side they are summed over, and one must divide the other",
                   s->name, product_name[product], a_name, (long long)a, b_name, (long long)b);
}

eng_status eng_fp8_site_set(int64_t site, const eng_fp8_recipe *recipe)
{
  fp8_site *s;
  ENG_TRY(site_get(&s, site));
  release_orphans();
  if (!tape_empty())
    return error_set(ENG_ERR_STATE, "%s: its FP8 recipe cannot change while operations stand on the tape; hint: change it between steps", s->name);
  if (recipe) {
    for (int r = 0; r < ENG_FP8_ROLES; r++) ENG_TRY(check_role(s, recipe, r));
    for (int p = 0; p < ENG_FP8_PRODUCTS; p++) {
      const eng_fp8_product *of = &recipe->product[p];
      if (of->accumulator < 0 || of->accumulator >= ENG_ACCUMULATORS)
        return error_set(ENG_ERR_VALUE, "%s: %s: there is no accumulator %d", s->name, product_name[p], of->accumulator);
      if (of->promotion < 0 || of->promotion % 32)
        return error_set(ENG_ERR_VALUE, "%s: %s: expected a promotion every multiple of 32 steps, or 0 for none, got %d", s->name, product_name[p], of->promotion);
    }
    // a matrix that is not square in blocks goes transposed into the other product: its columns' blocks are along the sum in both
    const eng_fp8_role *x = &recipe->role[ENG_FP8_X], *w = &recipe->role[ENG_FP8_W], *dy = &recipe->role[ENG_FP8_DY];
    ENG_TRY(check_nesting(s, ENG_FP8_FORWARD, "x", x->block_columns, "w", w->block_columns));
    ENG_TRY(check_nesting(s, ENG_FP8_DGRAD, "dy", dy->block_columns, "w", w->block_columns));
    ENG_TRY(check_nesting(s, ENG_FP8_WGRAD, "dy", dy->block_columns, "x", x->block_columns));
    s->recipe = *recipe;
  }
  for (int r = 0; r < ENG_FP8_ROLES; r++) s->factor[r] = 0;
  s->on = recipe != NULL;
  s->version++;
  return ENG_OK;
}

eng_status eng_fp8_delay(int64_t site, int role, double amax)
{
  fp8_site *s;
  ENG_TRY(site_get(&s, site));
  if (role < 0 || role >= ENG_FP8_ROLES) return error_set(ENG_ERR_VALUE, "%s: an FP8 site has no role %d", s->name, role);
  const eng_fp8_role *r = &s->recipe.role[role];
  if (!s->on) return error_set(ENG_ERR_STATE, "%s: there is no FP8 recipe here that could delay its scales", s->name);
  if (!(amax >= 0) || !f32_is_finite((float)amax))
    return error_set(ENG_ERR_VALUE, "%s: the amax of %s: expected a finite f32, or 0 for its own, got %g", s->name, role_name[role], amax);
  if (amax != 0 && (r->block_rows || r->block_columns))
    return error_set(ENG_ERR_VALUE, "%s: %s has blocks of %d x %d, and delayed scaling is for one block; hint: block = \"tensor\"", s->name, role_name[role],
                     r->block_rows, r->block_columns);
  fp8_scale scale = fp8_scale_of((float)amax, fp8_largest(r->format), r->rule, r->pow2, fp8_eps(r->rule, r->eps), r->margin, fp8_limit(0, 0, ENG_f32));
  float wanted = amax == 0 ? 0.0f : fp8_divides(r->rule) ? 1.0f / scale.scale : scale.factor;
  if (s->factor_of[role] && s->factor_of[role]->store->space != arena_space()) {
    let_go(s->factor_of[role]);
    s->factor_of[role] = NULL;
    s->factor[role] = 0;
  }
  if (s->factor[role] == (double)wanted) return ENG_OK;
  if (amax != 0) {
    if (!s->factor_of[role]) ENG_TRY(tensor_make(&s->factor_of[role], ARENA_KEPT, ENG_f32, 1, (int64_t[]){1}));
    ENG_TRY(transfer_set(s->factor_of[role], wanted));
  }
  s->factor[role] = wanted;
  return ENG_OK;
}

eng_status eng_fp8_amax(double amax[3], int64_t site)
{
  fp8_site *s;
  ENG_TRY(site_get(&s, site));
  ENG_TRY(collect_amaxes());
  amaxes.asked = true;
  for (int r = 0; r < ENG_FP8_ROLES; r++) {
    amax[r] = s->amax[r];
    s->amax[r] = -1;
  }
  return ENG_OK;
}

// ---- meters

bool fp8_measuring(void) { return measuring; }

bool eng_fp8_measure(bool on)
{
  bool before = measuring;
  measuring = on;
  return before;
}

eng_status eng_fp8_meters(eng_fp8_meter meter[3], int64_t site)
{
  fp8_site *s;
  ENG_TRY(site_get(&s, site));
  memcpy(meter, s->meter, sizeof s->meter);
  memset(s->meter, 0, sizeof s->meter);
  return ENG_OK;
}

enum { MOST_MEASURED = 1 << 16 };

static void meter_element(eng_fp8_meter *m, float x, float code, float scale, float largest, float limit)
{
  if (!f32_is_finite(x)) {
    m->nonfinite++;
    return;
  }
  double size = fabs((double)x), off = (double)x - (double)code * scale;
  m->count++;
  if (size == 0) m->zeros++;
  else {
    m->underflow += code == 0;                                    // -0, too
    m->overflow += fabsf(code) == largest && size > (double)limit * scale;
    if (m->least == 0 || size < m->least) m->least = size;
  }
  if (size > m->amax) m->amax = size;
  m->signal += size * size;
  if (f32_is_finite(code)) m->error += off * off;
  if (m->scale_min == 0 || scale < m->scale_min) m->scale_min = scale;
  if (scale > m->scale_max) m->scale_max = scale;
}

/// Every `every`-th row of x [.. x K], as f32 in host memory.
static eng_status read_rows(float *to, tensor *x, int64_t every)
{
  int64_t columns = x->shape[x->ndim - 1], rows = columns ? x->count / columns : 0;
  tensor *flat, *some;
  ENG_TRY(op_run1(&flat, ENG_OP_reshape, x, NULL, NULL, (int64_t[]){2, rows, columns}, 3, 0, 0));
  eng_status status = op_run1(&some, ENG_OP_slice, flat, NULL, NULL, (int64_t[]){0, 0, rows, every}, 4, 0, 0);
  if (status == ENG_OK) {
    status = transfer_read(to, ENG_f32, some);
    tensor_drop(some);
  }
  tensor_drop(flat);
  return status;
}

static eng_status measure(fp8_site *s, int role, tensor *x, tensor *q, const tensor *scale)
{
  const eng_fp8_role *r = &s->recipe.role[role];
  int64_t columns = x->shape[x->ndim - 1], rows = columns ? x->count / columns : 0;
  if (x->count == 0) return ENG_OK;
  int64_t most = MOST_MEASURED / columns > 1 ? MOST_MEASURED / columns : 1, every = (rows + most - 1) / most, taken = (rows + every - 1) / every;
  fp8_scales at = fp8_scales_for(r->block_rows, r->block_columns, rows, columns, NULL);
  float *values = malloc((size_t)(2 * taken * columns + scale->count) * sizeof *values);
  if (!values) return error_set(ENG_ERR_MEMORY, "out of memory for the FP8 meters");
  float *codes = values + taken * columns, *scales = codes + taken * columns;
  eng_status status = read_rows(values, x, every);
  if (status == ENG_OK) status = read_rows(codes, q, every);
  if (status == ENG_OK) status = transfer_read(scales, ENG_f32, scale);
  // what rounds beyond the largest number: half a step above it (fp8.h)
  float largest = fp8_largest(r->format), limit = r->format == ENG_e4m3 ? 464.0f : 61440.0f;
  for (int64_t i = 0; i < taken && status == ENG_OK; i++)
    for (int64_t k = 0; k < columns; k++)
      meter_element(&s->meter[role], values[i * columns + k], codes[i * columns + k], scales[fp8_scale_at(&at, i * every, k)], largest, limit);
  free(values);
  return status;
}

// ---- quantizing

/// A matrix in FP8 as a product takes it: codes, scales, the blocks as they are given, and whether the dimension of the sum is first.
typedef struct factor {
  tensor *q, *scale;
  int64_t block_rows, block_columns;
  bool    turned;
} factor;

typedef struct copies { tensor *q, *scale, *q_t, *scale_t; } copies;

static void drop_copies(copies *c)
{
  tensor *const all[] = { c->q, c->scale, c->q_t, c->scale_t };
  for (int k = 0; k < 4; k++)
    if (all[k]) tensor_drop(all[k]);
  *c = (copies){0};
}

/// x in a role's format and blocks, into the copies given where there are any; transposed: x transposed, too. `swiglu`: x has no memory, and its
/// codes are made from that call's inputs.
static eng_status quantize(copies *out, int64_t number, fp8_site *s, int role, tensor *x, const op_call *swiglu, bool transposed)
{
  const eng_fp8_role *r = &s->recipe.role[role];
  tensor *factor = s->factor[role] != 0 ? s->factor_of[role] : NULL;
  op_call c = {.op = ENG_OP_quantize, .n_in = 2, .n_out = 5, .in = {x, factor},
               .out = {out->q, out->scale, NULL, out->q_t, out->scale_t},
               .ints = {r->format, r->block_rows, r->block_columns, r->rule,
                        (r->stochastic ? FP8_STOCHASTIC : 0) + (r->pow2 ? 4 : 0) + (transposed ? 8 : 0)},
               .floats = {r->eps, r->margin}};
  if (swiglu) c.op = ENG_OP_swiglu_quantize, c.n_in = 3, c.in[0] = swiglu->in[0], c.in[1] = swiglu->in[1], c.in[2] = factor;
  ENG_TRY(amax_slot(&c.out[2], number, role));
  tensor *amax = c.out[2];
  eng_status status = op_run(&c);
  tensor_drop(amax);
  if (status != ENG_OK) return error_prefix(status, "%s: FP8 of %s", s->name, role_name[role]);
  *out = (copies){c.out[0], c.out[1], c.out[3], c.out[4]};
  return measuring ? measure(s, role, x, out->q, out->scale) : ENG_OK;
}

static eng_status flat(tensor **out, tensor *x)
{
  int64_t columns = x->shape[x->ndim - 1];
  return op_run1(out, ENG_OP_reshape, x, NULL, NULL, (int64_t[]){2, columns ? x->count / columns : 0, columns}, 3, 0, 0);
}

/// a b: a's and b's codes may have any number of dimensions. y: given, or made in dtype.
static eng_status multiply(tensor **y, const fp8_site *s, int product, const factor *a, const factor *b, tensor *bias, int dtype, bool add)
{
  tensor *qa, *qb;
  ENG_TRY(flat(&qa, a->q));
  eng_status status = flat(&qb, b->q);
  if (status == ENG_OK) {
    const eng_fp8_product *p = &s->recipe.product[product];
    op_call c = {.op = ENG_OP_fp8_matmul, .n_in = 5, .n_out = 1, .in = {qa, a->scale, qb, b->scale, bias}, .out = {*y},
                 .ints = {a->turned, b->turned, a->block_rows, a->block_columns, b->block_rows, b->block_columns, *y ? (*y)->dtype + 1 : dtype + 1,
                          p->accumulator, p->promotion, add}};
    status = op_run(&c);
    if (status == ENG_OK) *y = c.out[0];
    else status = error_prefix(status, "%s: %s of [%lld x %lld]%s in blocks of %lld x %lld by [%lld x %lld]%s in %lld x %lld", s->name, product_name[product],
                        (long long)qa->shape[0], (long long)qa->shape[1], a->turned ? " transposed" : "", (long long)a->block_rows, (long long)a->block_columns,
                        (long long)qb->shape[0], (long long)qb->shape[1], b->turned ? " transposed" : "", (long long)b->block_rows, (long long)b->block_columns);
    tensor_drop(qb);
  }
  tensor_drop(qa);
  return status;
}

// ---- weights

void fp8_weight_free(fp8_weight *weight)
{
  if (!weight) return;
  let_go(weight->q);
  let_go(weight->scale);
  let_go(weight->q_t);
  let_go(weight->scale_t);
  free(weight);
  release_orphans();
}

fp8_stamp fp8_weight_stamp(const fp8_weight *weight)
{
  fp8_site *s;
  if (!weight || !weight->q) return (fp8_stamp){0};
  return (fp8_stamp){weight->q->data, weight->site, site_get(&s, weight->site) == ENG_OK ? s->version : 0};
}

void fp8_weight_outdate(fp8_weight *weight)
{
  if (weight && weight->source) weight->seen = weight->source->store->writes - 1;
}

int64_t fp8_weight_bytes(const fp8_weight *weight)
{
  if (!weight || !weight->q) return 0;
  return weight->q->count + 4 * weight->scale->count + (weight->q_t ? weight->q_t->count + 4 * weight->scale_t->count : 0);
}

/// New tensors of the copies' shapes, which outlive the step.
static eng_status make_weight(fp8_weight *to, const eng_fp8_role *r, const tensor *w, bool transposed)
{
  int64_t shape[2];
  fp8_scales_for(r->block_rows, r->block_columns, w->shape[0], w->shape[1], shape);
  ENG_TRY(tensor_make(&to->q, ARENA_PARAMETER, r->format, 2, w->shape));
  ENG_TRY(tensor_make(&to->scale, ARENA_PARAMETER, ENG_f32, 2, shape));
  if (!transposed) return ENG_OK;
  fp8_scales_for(r->block_rows, r->block_columns, w->shape[1], w->shape[0], shape);
  ENG_TRY(tensor_make(&to->q_t, ARENA_PARAMETER, r->format, 2, (int64_t[]){w->shape[1], w->shape[0]}));
  return tensor_make(&to->scale_t, ARENA_PARAMETER, ENG_f32, 2, shape);
}

/// The copies of w: its parameter's where those are still true, else made now. *kept: they belong to the parameter.
static eng_status weight_copies(copies *out, bool *kept, int64_t number, fp8_site *s, tensor *w)
{
  const eng_fp8_role *r = &s->recipe.role[ENG_FP8_W];
  parameter *p = w->parameter;
  bool transposed = !is_square(r);
  *kept = p != NULL;
  tensor *source = w;
  if (p && p->shadow) ENG_TRY(params_shadow(&source, p));
  if (!p) return quantize(out, number, s, ENG_FP8_W, source, NULL, transposed);
  fp8_weight *c = p->fp8;
  bool same = c && c->site == number && c->recipe == s->version && c->source == source;
  if (!same) {
    fp8_weight_free(c);
    p->fp8 = c = calloc(1, sizeof *c);
    if (!c) return error_set(ENG_ERR_MEMORY, "out of memory for the FP8 copy of %s", p->name);
    eng_status status = make_weight(c, r, w, transposed);
    if (status != ENG_OK) {
      fp8_weight_free(c);
      p->fp8 = NULL;
      return status;
    }
  }
  *out = (copies){c->q, c->scale, c->q_t, c->scale_t};
  if (same && c->seen == source->store->writes && c->factor == s->factor[ENG_FP8_W] && !measuring) return ENG_OK;
  c->site = 0;   // until it is done
  ENG_TRY(quantize(out, number, s, ENG_FP8_W, source, NULL, transposed));
  bool stale = same && (c->seen != source->store->writes || c->factor != s->factor[ENG_FP8_W]);
  if (stale) {   // a tape that read the old numbers is out of date
    c->q->store->writes++;
    if (c->q_t) c->q_t->store->writes++;
  }
  *c = (fp8_weight){.site = number, .recipe = s->version, .seen = source->store->writes, .source = source, .factor = s->factor[ENG_FP8_W],
                    .q = c->q, .scale = c->scale, .q_t = c->q_t, .scale_t = c->scale_t};
  return ENG_OK;
}

// ---- forward

/// Where a recorded linear keeps what its backward pass needs.
enum { IN_X, IN_W, IN_BIAS, IN_XQ, IN_X_SCALE, IN_WQ, IN_W_SCALE, IN_WQ_T, IN_W_SCALE_T, IN_COUNT };
// ints of its node from 1 on: how x is kept (ENG_FP8_KEEP_*); the node of the swiglu that made x, where it is to be made anew; the slot of
// x's amax, and the round of slots it belongs to
enum { INT_KEEP = 1, INT_SWIGLU, INT_SLOT, INT_ROUND };

/// The node of a swiglu that keeps its inputs in FP8 and made x, or -1.
static int swiglu_of(const tensor *x)
{
  return tape_holds(x) && fp8_is_swiglu(tape_call(x->node)) ? x->node : -1;
}

static eng_status check_shapes(const fp8_site *s, const op_call *c)
{
  const tensor *x = c->in[IN_X], *w = c->in[IN_W], *bias = c->in[IN_BIAS];
  bool fits = dtype_is_float(x->dtype) && dtype_is_float(w->dtype) && x->ndim >= 1 && w->ndim == 2 && w->shape[1] == x->shape[x->ndim - 1];
  if (!fits) return error_set(ENG_ERR_SHAPE, "linear: expected x [.. x K] and a weight [N x K], got %s and %s", tensor_text(x), tensor_text(w));
  if (bias && (!dtype_is_float(bias->dtype) || bias->ndim != 1 || bias->shape[0] != w->shape[0]))
    return error_set(ENG_ERR_SHAPE, "linear: expected a bias of shape [%lld], got %s", (long long)w->shape[0], tensor_text(bias));
  if (w->shape[1] == 0)
    return error_set(ENG_ERR_SHAPE, "%s: FP8 has no scale for rows of no elements, got x %s and a weight %s", s->name, tensor_text(x), tensor_text(w));
  if (s->recipe.role[ENG_FP8_X].keep == ENG_FP8_KEEP_E5M6 && w->shape[1] % 8)
    return error_set(ENG_ERR_SHAPE, "%s: keeping x in e5m6 packs 8 numbers of a row, got x %s; hint: keep = \"codes\"", s->name, tensor_text(x));
  return ENG_OK;
}

/// The node of the attention whose output x shows in another shape, or -1.
static int attention_of(const tensor *x)
{
  while (tape_holds(x) && tape_call(x->node)->op == ENG_OP_reshape) x = tape_call(x->node)->in[0];
  return tape_holds(x) && x->output == 0 && tape_call(x->node)->op == ENG_OP_attention ? x->node : -1;
}

eng_status fp8_attention_output(tensor **y, const op_call *node)
{
  const tensor *like = node->out[0];
  tensor *flat_y;
  ENG_TRY(op_run1(&flat_y, ENG_OP_dequantize, node->in[3], node->in[4], NULL, (int64_t[]){like->dtype, 1, FP8_BLOCK, ENG_FORMAT_E5M6}, 4, 0, 0));
  int64_t ints[1 + ENG_MAX_DIMS] = {like->ndim};
  memcpy(ints + 1, like->shape, sizeof like->shape);
  eng_status status = op_run1(y, ENG_OP_reshape, flat_y, NULL, NULL, ints, 1 + like->ndim, 0, 0);
  tensor_drop(flat_y);
  return status;
}

/// What is kept of x, into the node's places; the copies lose what is kept.
static eng_status keep_x(op_call *node, const eng_fp8_role *r, copies *x)
{
  node->ints[INT_KEEP] = r->keep;
  node->ints[INT_SWIGLU] = swiglu_of(node->in[IN_X]);
  if (r->keep == ENG_FP8_KEEP_SWIGLU) {
    if (node->ints[INT_SWIGLU] >= 0) return ENG_OK;
    node->ints[INT_KEEP] = ENG_FP8_KEEP_CODES;   // x is no swiglu's
  }
  if (r->keep == ENG_FP8_KEEP_E5M6) {
    op_call c = {.op = ENG_OP_quantize, .n_in = 2, .n_out = 5, .in = {node->in[IN_X]}, .ints = {ENG_FORMAT_E5M6, 1, FP8_BLOCK, ENG_SCALE_DEEPGEMM, 4}, .floats = {-1, 0}};
    ENG_TRY(op_run(&c));
    tensor_drop(c.out[2]);
    node->in[IN_XQ] = c.out[0], node->in[IN_X_SCALE] = c.out[1];
    int attention = attention_of(node->in[IN_X]);   // its own rule reads the same codes
    if (attention >= 0 && !fp8_is_attention(tape_call(attention))) {
      tape_add_input(attention, c.out[0]);
      tape_add_input(attention, c.out[1]);
    }
  } else if (x->q_t) {
    node->in[IN_XQ] = x->q_t, node->in[IN_X_SCALE] = x->scale_t;
    x->q_t = x->scale_t = NULL;
  } else {
    node->in[IN_XQ] = x->q, node->in[IN_X_SCALE] = x->scale;
    x->q = x->scale = NULL;
  }
  return ENG_OK;
}

static bool same_role(const eng_fp8_role *a, const eng_fp8_role *b)
{
  return a->format == b->format && a->block_rows == b->block_rows && a->block_columns == b->block_columns && a->rule == b->rule &&
         a->pow2 == b->pow2 && !a->stochastic && !b->stochastic && a->margin == b->margin && a->eps == b->eps;
}

/// A linear just recorded that keeps the codes this one needs: the same x in the same way, by its own amax (gate and up of a SwiGLU). One copy
/// serves both. NULL: there is none.
static const op_call *same_codes(const fp8_site *s, const tensor *x)
{
  enum { BACK = 8 };
  const eng_fp8_role *role = &s->recipe.role[ENG_FP8_X];
  int length = eng_tape_length();
  for (int i = length - 1; i >= 0 && i >= length - BACK; i--) {
    const op_call *c = tape_call(i);
    if (!fp8_is_linear(c) || c->in[IN_X] != x || !c->in[IN_XQ] || c->ints[INT_KEEP] != ENG_FP8_KEEP_CODES) continue;
    const fp8_site *other = fp8_site_on(c->ints[0]) ? sites.item[c->ints[0] - 1] : NULL;
    if (!other || other->factor[ENG_FP8_X] != 0 || s->factor[ENG_FP8_X] != 0 || !same_role(&other->recipe.role[ENG_FP8_X], role)) continue;
    if (c->ints[INT_ROUND] == amaxes.round && amaxes.too < AMAX_SLOTS && tape_unwritten(i, IN_X)) return c;
  }
  return NULL;
}

static eng_status forward(op_call *c, fp8_site *s, int compute, bool record, const op_call *swiglu)
{
  const eng_fp8_role *rx = &s->recipe.role[ENG_FP8_X], *rw = &s->recipe.role[ENG_FP8_W];
  tensor *x = c->in[IN_X], *w = c->in[IN_W];
  copies xq = {0}, wq = {0};
  bool kept = false, keeps_x = record && w->requires_grad;
  const op_call *other = keeps_x && rx->keep == ENG_FP8_KEEP_CODES ? same_codes(s, x) : NULL;
  eng_status status = ENG_OK;
  if (other) {
    xq.q = other->in[IN_XQ], xq.scale = other->in[IN_X_SCALE];
    c->ints[INT_SLOT] = other->ints[INT_SLOT];
    amaxes.x_too[amaxes.too].site = c->ints[0];
    amaxes.x_too[amaxes.too++].slot = (int)c->ints[INT_SLOT];
    if (measuring) status = measure(s, ENG_FP8_X, x, xq.q, xq.scale);
  } else {
    status = quantize(&xq, c->ints[0], s, ENG_FP8_X, x, swiglu, keeps_x && rx->keep == ENG_FP8_KEEP_TRANSPOSED && !is_square(rx));
    c->ints[INT_SLOT] = amaxes.used - 1;
  }
  c->ints[INT_ROUND] = amaxes.round;
  if (status == ENG_OK) status = weight_copies(&wq, &kept, c->ints[0], s, w);
  tensor *flat_y = NULL, *y = NULL, *bias = c->in[IN_BIAS];
  if (status == ENG_OK && bias && bias->parameter && bias->parameter->shadow) status = params_shadow(&bias, bias->parameter);
  if (status == ENG_OK) {
    factor a = {xq.q, xq.scale, rx->block_rows, rx->block_columns, false}, b = {wq.q, wq.scale, rw->block_rows, rw->block_columns, true};
    status = multiply(&flat_y, s, ENG_FP8_FORWARD, &a, &b, bias, compute >= 0 ? compute : x->dtype, false);
  }
  if (status == ENG_OK) {
    int64_t ints[1 + ENG_MAX_DIMS] = {x->ndim};
    memcpy(ints + 1, x->shape, sizeof x->shape);
    ints[x->ndim] = w->shape[0];
    status = op_run1(&y, ENG_OP_reshape, flat_y, NULL, NULL, ints, 1 + x->ndim, 0, 0);
    tensor_drop(flat_y);
  }
  if (status == ENG_OK && record) {
    c->n_in = IN_COUNT;
    if (keeps_x) status = keep_x(c, rx, &xq);
    if (x->requires_grad) {
      bool turned = wq.q_t != NULL;
      c->in[turned ? IN_WQ_T : IN_WQ] = turned ? wq.q_t : wq.q;
      c->in[turned ? IN_W_SCALE_T : IN_W_SCALE] = turned ? wq.scale_t : wq.scale;
      if (!kept && turned) wq.q_t = wq.scale_t = NULL;
      if (!kept && !turned) wq.q = wq.scale = NULL;
    }
  }
  if (!other) drop_copies(&xq);
  if (!kept) drop_copies(&wq);
  c->out[0] = y;
  return status;
}

eng_status fp8_linear(op_call *c, const eng_precision *precision, const op_call *swiglu)
{
  fp8_site *s;
  ENG_TRY(site_get(&s, c->ints[0]));
  ENG_TRY(check_shapes(s, c));
  bool record = tape_wants(c), recording = eng_grad_enabled(false);
  tensor *given = c->out[0];
  if (given) {
    eng_grad_enabled(recording);
    return error_set(ENG_ERR_VALUE, "%s: a linear in FP8 makes its own output", s->name);
  }
  eng_status status = forward(c, s, precision->compute, record, swiglu);
  eng_grad_enabled(recording);
  if (status == ENG_OK && record) status = tape_record(c);
  if (status != ENG_OK && c->out[0]) {
    tensor_drop(c->out[0]);
    c->out[0] = NULL;
  }
  return status;
}

bool fp8_site_on(int64_t site)
{
  return site >= 1 && site <= sites.length && sites.item[site - 1] && sites.item[site - 1]->on;
}

const eng_fp8_role *fp8_site_role(int64_t site, int role)
{
  return &sites.item[site - 1]->recipe.role[role];
}

bool fp8_site_recomputes(int64_t site)
{
  return fp8_site_on(site) && fp8_site_role(site, ENG_FP8_X)->keep == ENG_FP8_KEEP_SWIGLU;
}

// ---- backward

/// x for dW: the sum goes over its rows.
static eng_status kept_x(factor *out, copies *made, int64_t number, fp8_site *s, const op_call *node)
{
  const eng_fp8_role *r = &s->recipe.role[ENG_FP8_X];
  tensor *q = node->in[IN_XQ], *scale = node->in[IN_X_SCALE], *x;
  *out = (factor){q, scale, r->block_rows, r->block_columns, false};
  bool packed = node->ints[INT_KEEP] == ENG_FP8_KEEP_E5M6, anew = node->ints[INT_KEEP] == ENG_FP8_KEEP_SWIGLU;
  if (!packed && !anew && is_square(r)) return ENG_OK;
  out->turned = true;
  if (node->ints[INT_KEEP] == ENG_FP8_KEEP_TRANSPOSED) return ENG_OK;
  if (anew) ENG_TRY(fp8_swiglu_again(&x, tape_call((int)node->ints[INT_SWIGLU])));
  else ENG_TRY(op_run1(&x, ENG_OP_dequantize, q, scale, NULL,
                       (int64_t[]){ENG_f32, packed ? 1 : r->block_rows, packed ? FP8_BLOCK : r->block_columns, packed ? ENG_FORMAT_E5M6 : 0}, 4, 0, 0));
  // once more, in blocks along the other side; neither an amax nor a measurement of x
  bool turn = !is_square(r);
  op_call c = {.op = ENG_OP_quantize, .n_in = 2, .n_out = 5, .in = {x, s->factor[ENG_FP8_X] != 0 ? s->factor_of[ENG_FP8_X] : NULL},
               .ints = {r->format, r->block_rows, r->block_columns, r->rule, (r->stochastic ? FP8_STOCHASTIC : 0) + (r->pow2 ? 4 : 0) + (turn ? 8 : 0)},
               .floats = {r->eps, r->margin}};
  eng_status status = op_run(&c);
  tensor_drop(x);
  if (status != ENG_OK) return error_prefix(status, "%s (site %lld): FP8 of x for dW", s->name, (long long)number);
  tensor_drop(c.out[2]);
  *made = (copies){c.out[0], c.out[1], c.out[3], c.out[4]};
  out->q = turn ? made->q_t : made->q;
  out->scale = turn ? made->scale_t : made->scale;
  out->turned = turn;
  return ENG_OK;
}

static eng_status emit_dx(grad_call *g, fp8_site *s, const copies *dy)
{
  const op_call *node = g->call;
  const eng_fp8_role *rd = &s->recipe.role[ENG_FP8_DY], *rw = &s->recipe.role[ENG_FP8_W];
  tensor *x = node->in[IN_X], *flat_dx = NULL, *dx;
  bool turned = node->in[IN_WQ_T] != NULL;
  factor a = {dy->q, dy->scale, rd->block_rows, rd->block_columns, false},
         b = {node->in[turned ? IN_WQ_T : IN_WQ], node->in[turned ? IN_W_SCALE_T : IN_W_SCALE], rw->block_rows, rw->block_columns, turned};
  ENG_TRY(multiply(&flat_dx, s, ENG_FP8_DGRAD, &a, &b, NULL, x->dtype, false));
  int64_t ints[1 + ENG_MAX_DIMS] = {x->ndim};
  memcpy(ints + 1, x->shape, sizeof x->shape);
  eng_status status = op_run1(&dx, ENG_OP_reshape, flat_dx, NULL, NULL, ints, 1 + x->ndim, 0, 0);
  tensor_drop(flat_dx);
  return status == ENG_OK ? grad_emit(g, IN_X, dx) : status;
}

static eng_status emit_dw(grad_call *g, fp8_site *s, const copies *dy)
{
  const eng_fp8_role *rd = &s->recipe.role[ENG_FP8_DY];
  factor a = {dy->q, dy->scale, rd->block_rows, rd->block_columns, true}, b;
  if (dy->q_t) a = (factor){dy->q_t, dy->scale_t, rd->block_rows, rd->block_columns, false};
  copies made = {0};
  ENG_TRY(kept_x(&b, &made, g->call->ints[0], s, g->call));
  bool accumulate = false;
  tensor *dw = grad_target(g, IN_W, &accumulate);
  bool direct = dw != NULL;
  eng_status status = multiply(&dw, s, ENG_FP8_WGRAD, &a, &b, NULL, g->call->in[IN_W]->dtype, accumulate);
  if (status != ENG_OK && direct) grad_target_failed(g, IN_W, accumulate);
  drop_copies(&made);
  return status == ENG_OK && !direct ? grad_emit(g, IN_W, dw) : status;
}

static eng_status emit_bias(grad_call *g)
{
  bool accumulate = false;
  tensor *dy, *bias = g->call->in[IN_BIAS];
  ENG_TRY(flat(&dy, g->dy[0]));
  op_call c = {.op = ENG_OP_bias_grad, .n_in = 1, .in = {dy}, .out = {grad_target(g, IN_BIAS, &accumulate)}, .ints = {bias->dtype, 0}};
  bool direct = c.out[0] != NULL;
  c.ints[1] = accumulate;
  eng_status status = op_run(&c);
  if (status != ENG_OK && direct) grad_target_failed(g, IN_BIAS, accumulate);
  tensor_drop(dy);
  return status == ENG_OK && !direct ? grad_emit(g, IN_BIAS, c.out[0]) : status;
}

eng_status fp8_linear_grad(grad_call *g)
{
  fp8_site *s;
  ENG_TRY(site_get(&s, g->call->ints[0]));
  bool wants_x = grad_wants(g, IN_X), wants_w = grad_wants(g, IN_W);
  if (wants_x || wants_w) {
    copies dy = {0};
    eng_status status = quantize(&dy, g->call->ints[0], s, ENG_FP8_DY, g->dy[0], NULL, wants_w && !is_square(&s->recipe.role[ENG_FP8_DY]));
    if (status == ENG_OK && wants_x) status = emit_dx(g, s, &dy);
    if (status == ENG_OK && wants_w) status = emit_dw(g, s, &dy);
    drop_copies(&dy);
    ENG_TRY(status);
  }
  return grad_wants(g, IN_BIAS) ? emit_bias(g) : ENG_OK;
}
