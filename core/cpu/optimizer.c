// The fused optimizer update, one pass over memory: gradient * factor, clamp, moments, f32 master
// weights, low-precision weights. Also unscales gradients into f32. Fills backend.optimize and
// backend.unscale; owns nothing. The slow twins are in reference_optimizer.c.
//
// Formulas and the order of operations are those of PyTorch's single-tensor optimizers. No product
// is fused with a sum, so that every instruction set gives the same bits. Moments in bf16 are
// widened to f32. The update uses their new values unrounded and rounds them once to store them.
#include "simd.h"

#include "blocks.h"

// ------------------------------------------------------------------ the factor on gradients

/// Multiplication by a double factor in f32. A factor that is a subnormal f32 or beyond f32 is
/// applied in two steps, the first of them an exact power of two.
typedef struct scaling { float first, second; } scaling;

static scaling scaling_of(double factor)
{
  double size = fabs(factor);
  if (size >= 0x1p127) return (scaling){0x1p64f, (float)(factor * 0x1p-64)};
  if (size < 0x1p-126) return (scaling){0x1p-64f, (float)(factor * 0x1p64)};
  return (scaling){1.0f, (float)factor};
}

VF_INLINE vf scaled(const scaling *s, vf g)
{
  return vf_mul(vf_mul(g, vf_set1(s->first)), vf_set1(s->second));
}

// ------------------------------------------------------------------ rules

/// The hyperparameters of a group in the form that the loops use.
typedef struct rule {
  scaling scale;
  float   limit;             // clamp gradients to +-limit; inf: no clamp
  float   coupled_decay;     // times the weight, added to the gradient (sgd, adam)
  float   keep;              // 1 - lr * weight_decay, multiplies the weight (adamw, lion)
  float   lr;                // adam: lr / (1 - beta1^t)
  float   beta1, gain1;      // gain: 1 - beta
  float   beta2, gain2;
  float   root, eps;         // root: sqrt(1 - beta2^t)
  float   momentum, gain;    // sgd; gain: 1 - dampening
  bool    nesterov;
} rule;

static rule rule_of(const eng_update *u, const eng_hyper *h)
{
  rule r = {
    .scale = scaling_of(u->gradient_factor),
    .limit = u->clip_value > 0 ? (float)u->clip_value : INFINITY, .keep = 1.0f, .lr = (float)h->lr,
    .beta1 = (float)h->beta1, .gain1 = (float)(1.0 - h->beta1), .beta2 = (float)h->beta2,
    .gain2 = (float)(1.0 - h->beta2), .eps = (float)h->eps, .momentum = (float)h->momentum,
    .gain = (float)(1.0 - h->dampening), .nesterov = h->nesterov != 0,
  };
  if (u->kind == ENG_SGD || u->kind == ENG_ADAM) r.coupled_decay = (float)h->weight_decay;
  else r.keep = (float)(1.0 - h->lr * h->weight_decay);
  if (u->kind == ENG_ADAM || u->kind == ENG_ADAMW) {
    r.lr = (float)(h->lr / (1.0 - pow(h->beta1, (double)u->t)));
    r.root = (float)sqrt(1.0 - pow(h->beta2, (double)u->t));
  }
  return r;
}

// Kinds of loop. Adam and AdamW share one: they differ only in their constants. SGD has three:
// without a momentum buffer, with one, and for the first update of that buffer.
enum { LOOP_SGD, LOOP_MOMENTUM, LOOP_MOMENTUM_STARTS, LOOP_ADAM, LOOP_LION };

/// One vector of elements: weight p, gradient g, moments m and v.
VF_INLINE void advance(int loop, const rule *r, vf *p, vf g, vf *m, vf *v)
{
  // If g is NaN, vf_min and vf_max return their second argument, so g stays NaN.
  g = scaled(&r->scale, g);
  g = vf_max(vf_set1(-r->limit), vf_min(vf_set1(r->limit), g));
  if ((loop == LOOP_SGD || loop == LOOP_MOMENTUM || loop == LOOP_MOMENTUM_STARTS ||
       loop == LOOP_ADAM) &&
      r->coupled_decay != 0)
    g = vf_add(g, vf_mul(vf_set1(r->coupled_decay), *p));

  if (loop == LOOP_ADAM) {
    *p = vf_mul(*p, vf_set1(r->keep));
    // m moves toward g by the fraction gain1, computed from the nearer of the two.
    vf way = vf_sub(g, *m);
    *m = r->gain1 < 0.5f ? vf_add(*m, vf_mul(vf_set1(r->gain1), way))
                         : vf_add(g, vf_mul(vf_set1(r->gain1 - 1.0f), way));
    *v = vf_add(vf_mul(*v, vf_set1(r->beta2)), vf_mul(vf_mul(vf_set1(r->gain2), g), g));
    vf size = vf_add(vf_div(vf_sqrt(*v), vf_set1(r->root)), vf_set1(r->eps));
    *p = vf_add(*p, vf_div(vf_mul(vf_set1(-r->lr), *m), size));
  } else if (loop == LOOP_LION) {
    *p = vf_mul(*p, vf_set1(r->keep));
    vf direction = vf_add(vf_mul(vf_set1(r->beta1), *m), vf_mul(vf_set1(r->gain1), g));
    // The sign of 0 is 0, that of NaN is NaN.
    vm sided = vf_gt(vf_abs(direction), vf_zero());
    vf sign = vf_select(sided, vf_copysign(vf_set1(1.0f), direction), direction);
    *p = vf_sub(*p, vf_mul(vf_set1(r->lr), sign));
    *m = vf_add(vf_mul(vf_set1(r->beta2), *m), vf_mul(vf_set1(r->gain2), g));
  } else {
    if (loop == LOOP_MOMENTUM_STARTS) *m = g;
    if (loop == LOOP_MOMENTUM)
      *m = vf_add(vf_mul(vf_set1(r->momentum), *m), vf_mul(vf_set1(r->gain), g));
    if (loop != LOOP_SGD) g = r->nesterov ? vf_add(g, vf_mul(vf_set1(r->momentum), *m)) : *m;
    *p = vf_sub(*p, vf_mul(vf_set1(r->lr), g));
  }
}

/// Prefetches a kilobyte ahead of the arithmetic.
VF_INLINE void ahead(const void *p)
{
  __builtin_prefetch((const void *)((uintptr_t)p + 1024));
}

/// Updates n <= TILE elements, all in f32. m and v may be NULL where the loop does not use them.
VF_INLINE void run(int loop, const rule *given, float *restrict p, const float *restrict g,
                   float *restrict m, float *restrict v, int n)
{
  const bool has_m = loop != LOOP_SGD, has_v = loop == LOOP_ADAM;
  const rule r = *given;
  int i = 0;
  for (; i + VF_LANES <= n; i += VF_LANES) {
    vf weight = vf_load(p + i), first = has_m ? vf_load(m + i) : vf_zero(),
       second = has_v ? vf_load(v + i) : vf_zero();
    ahead(p + i);
    ahead(g + i);
    if (has_m) ahead(m + i);
    if (has_v) ahead(v + i);
    advance(loop, &r, &weight, vf_load(g + i), &first, &second);
    vf_store(p + i, weight);
    if (has_m) vf_store(m + i, first);
    if (has_v) vf_store(v + i, second);
  }
  if (i == n) return;
  int rest = n - i;
  vf weight = vf_load_n(p + i, rest), first = has_m ? vf_load_n(m + i, rest) : vf_zero();
  vf second = has_v ? vf_load_n(v + i, rest) : vf_zero();
  advance(loop, &r, &weight, vf_load_n(g + i, rest), &first, &second);
  vf_store_n(p + i, weight, rest);
  if (has_m) vf_store_n(m + i, first, rest);
  if (has_v) vf_store_n(v + i, second, rest);
}

static void run_sgd(const rule *r, float *p, const float *g, int n)
{
  run(LOOP_SGD, r, p, g, NULL, NULL, n);
}
static void run_momentum(const rule *r, float *p, const float *g, float *m, int n)
{
  run(LOOP_MOMENTUM, r, p, g, m, NULL, n);
}
static void run_momentum_starts(const rule *r, float *p, const float *g, float *m, int n)
{
  run(LOOP_MOMENTUM_STARTS, r, p, g, m, NULL, n);
}
static void run_adam(const rule *r, float *p, const float *g, float *m, float *v, int n)
{
  run(LOOP_ADAM, r, p, g, m, v, n);
}
static void run_lion(const rule *r, float *p, const float *g, float *m, int n)
{
  run(LOOP_LION, r, p, g, m, NULL, n);
}

// ------------------------------------------------------------------ blocks

static void update_block(const param_span *s, const rule *given, const eng_update *u, int64_t first,
                         int count)
{
  const int kind = u->kind;
  rule own = *given;
  const rule *r = &own;
  // This layer has a relative scale.
  if (s->scale != 1) own.scale = scaling_of(u->gradient_factor / s->scale);
  float gradient[TILE] __attribute__((aligned(64))), moment1[TILE] __attribute__((aligned(64))),
    moment2[TILE] __attribute__((aligned(64)));
  for (int64_t at = first, end = first + count; at < end; at += TILE) {
    int n = end - at < TILE ? (int)(end - at) : TILE;
    float *p = s->master + at;
    const float *g = tile_load(gradient, s->gradient, s->gradient_dtype, at, n);
    float *m = NULL, *v = NULL;
    // For f32 moments, m and v point to the moments themselves, else to copies in a tile, which
    // tile_store writes back.
    if (s->moment1) m = (float *)tile_load(moment1, s->moment1, s->moment_dtype, at, n);
    if (s->moment2) v = (float *)tile_load(moment2, s->moment2, s->moment_dtype, at, n);
    if (kind == ENG_ADAM || kind == ENG_ADAMW) run_adam(r, p, g, m, v, n);
    else if (kind == ENG_LION) run_lion(r, p, g, m, n);
    else if (!m || r->momentum == 0) run_sgd(r, p, g, n);
    else if (s->starts) run_momentum_starts(r, p, g, m, n);
    else run_momentum(r, p, g, m, n);
    if (s->moment1) tile_store(s->moment1, s->moment_dtype, at, m, n);
    if (s->moment2) tile_store(s->moment2, s->moment_dtype, at, v, n);
    if (s->shadow) tile_store(s->shadow, s->shadow_dtype, at, p, n);
  }
}

static bool span_is_fast(const param_span *s)
{
  return dtype_is_fast(s->gradient_dtype) && (!s->shadow || dtype_is_fast(s->shadow_dtype)) &&
         (!s->moment1 || dtype_is_fast(s->moment_dtype));
}

static eng_status check_span(const param_span *s, const eng_update *update)
{
  bool adam = update->kind == ENG_ADAM || update->kind == ENG_ADAMW,
       lion = update->kind == ENG_LION;
  if (update->kind < ENG_SGD || update->kind > ENG_LION)
    return error_set(ENG_ERR_VALUE, "optimize: unknown optimizer number %d", update->kind);
  if (((adam || lion) && !s->moment1) || (adam && !s->moment2))
    return error_set(ENG_ERR_VALUE, "optimize: parameter %s lacks moments for optimizer number %d",
                     s->name, update->kind);
  return ENG_OK;
}

static eng_status optimize(const param_span *spans, int n, const eng_update *update)
{
  for (int k = 0; k < n; k++) {
    ENG_TRY(check_span(&spans[k], update));
    if (!span_is_fast(&spans[k])) return backend_reference()->optimize(spans, n, update);
  }
  block_list list;
  ENG_TRY(blocks_open(&list, spans, n));
  int64_t bytes = update->n_groups * (int64_t)sizeof(rule);
  rule *rules = arena_alloc(ARENA_SCRATCH, bytes);
  if (!rules) {
    blocks_close(&list);
    return ENG_ERR_MEMORY;
  }
  for (int k = 0; k < update->n_groups; k++) rules[k] = rule_of(update, &update->groups[k]);
#pragma omp parallel if (list.elements > PARALLEL_ELEMENTS)
  {
    int part = omp_get_thread_num(), parts = omp_get_num_threads();
    int64_t end = blocks_part(&list, part + 1, parts);
    for (int64_t b = blocks_part(&list, part, parts); b < end; b++) {
      const param_span *s = &spans[list.at[b].span];
      update_block(s, &rules[s->group], update, list.at[b].first, list.at[b].count);
    }
  }
  arena_free(ARENA_SCRATCH, rules, bytes);
  blocks_close(&list);
  return ENG_OK;
}

// ------------------------------------------------------------------ unscaling

/// target = gradient * scale; returns whether some product is inf or nan.
static bool unscale_block(const param_span *s, const scaling *scale, float *target, int64_t first,
                          int count)
{
  float buffer[TILE] __attribute__((aligned(64)));
  vi bad = vi_set1(0);
  for (int64_t at = first, end = first + count; at < end; at += TILE) {
    int n = end - at < TILE ? (int)(end - at) : TILE, i = 0;
    const float *g = tile_load(buffer, s->gradient, s->gradient_dtype, at, n);
    float *to = target + at;
    // Inf and nan have all exponent bits set, so adding 1 to the lowest exponent bit carries into
    // the sign bit.
    for (; i + VF_LANES <= n; i += VF_LANES) {
      vf x = scaled(scale, vf_load(g + i));
      ahead(g + i);
      vf_store(to + i, x);
      bad = vi_or(bad, vi_add(vi_and(vf_bits(x), vi_set1(0x7FFFFFFF)), vi_set1(0x00800000)));
    }
    if (i < n) {
      vf x = scaled(scale, vf_load_n(g + i, n - i));
      vf_store_n(to + i, x, n - i);
      vi high = vi_add(vi_and(vf_bits(x), vi_set1(0x7FFFFFFF)), vi_set1(0x00800000));
      bad = vi_or(bad, vi_select(vm_first(n - i), high, vi_set1(0)));
    }
  }
  return vm_any(vi_gt(vi_set1(0), bad));
}

static eng_status unscale(const param_span *spans, int n, double factor, float *const *target,
                          int *found_inf)
{
  *found_inf = 0;
  for (int k = 0; k < n; k++)
    if (!dtype_is_fast(spans[k].gradient_dtype))
      return backend_reference()->unscale(spans, n, factor, target, found_inf);
  block_list list;
  ENG_TRY(blocks_open(&list, spans, n));
  const scaling scale = scaling_of(factor);
  int found = 0;
#pragma omp parallel if (list.elements > PARALLEL_ELEMENTS) reduction(|:found)
  {
    int part = omp_get_thread_num(), parts = omp_get_num_threads();
    int64_t end = blocks_part(&list, part + 1, parts);
    for (int64_t b = blocks_part(&list, part, parts); b < end; b++) {
      const block *at = &list.at[b];
      double relative = spans[at->span].scale;
      const scaling own = relative == 1 ? scale : scaling_of(factor / relative);
      if (unscale_block(&spans[at->span], &own, target[at->span], at->first, at->count)) found = 1;
    }
  }
  *found_inf = found;
  blocks_close(&list);
  return ENG_OK;
}

void ISA_NAME(cpu_register_optimizer)(backend *b)
{
  b->optimize = optimize;
  b->unscale = unscale;
}
