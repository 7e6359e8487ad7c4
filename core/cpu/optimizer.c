// The fused optimizer update. In one pass over memory, it multiplies gradients by their factor,
// clamps them, and updates moments, master weights and low-precision weights. This file also
// unscales gradients into f32. Called through backend.optimize and backend.unscale; owns nothing.
// core/params has checked that all formats are f32, f16 or bf16. The reference kernels are in
// reference_optimizer.c.
//
// Except for Lion, spike_clip and update_clip, formulas and the order of operations are those of
// PyTorch's single-tensor optimizers. No product is fused with a sum, so that every instruction set
// gives the same bits. Moments in bf16 are widened to f32. The update uses their new values
// unrounded and rounds them once to store them. Masters in bf16 are widened in the same way;
// backend.optimize describes their rounding.
//
// On request the pass also sums the squares of the weight changes (before update_clip), of the new
// weights and of the new moments. The sums have a fixed order, so they do not depend on the number
// of threads. Only these sums use vf_fma, so in the plain build they differ in the last bits.
#include "simd.h"

#include "base/rng.h"
#include "blocks.h"
#include "device/update_rule.h"
#include "philox.h"

#include <math.h>
#include <string.h>

VF_INLINE vf scaled(const scaling *s, vf g)
{ return vf_mul(vf_mul(g, vf_set1(s->first)), vf_set1(s->second)); }

// ------------------------------------------------------------------ rules

/// The constants of an update's formula, and those with which the loops scale and clamp gradients
/// and scale the change of the weights.
typedef struct rule {
  update_rule of;
  scaling scale;
  float   limit;             // gradients are clamped to +-limit; inf means no clamp
  float   spike;             // adam: limit on g^2 / v; 0 means no limit
  float   factor;            // multiplies the change of the weights
  bool    dry;               // only the norms are wanted
} rule;

static rule rule_of(const eng_update *u, const eng_hyper *h)
{
  return (rule){.of = update_rule_of(u, h), .scale = scaling_of(u->gradient_factor),
                .limit = u->clip_value > 0 ? (float)u->clip_value : INFINITY,
                .spike = (float)u->spike_clip, .factor = (float)u->factor, .dry = u->dry != 0};
}

// The kinds of loop. Adam and AdamW share a loop, because they differ only in their constants. SGD
// has three loops: without a momentum buffer, with a momentum buffer, and for the first update of
// that buffer with dampening (param_span.starts).
enum { LOOP_SGD, LOOP_MOMENTUM, LOOP_MOMENTUM_STARTS, LOOP_ADAM, LOOP_LION };

// What a loop does besides the update. PLAIN does nothing else, WITH_NORMS computes norms, and
// LIMITED computes norms and applies spike_clip and update_clip.
enum { PLAIN, WITH_NORMS, LIMITED };

/// Updates one vector of elements: weight p, gradient g, moments m and v.
VF_INLINE void advance(int loop, int extra, const rule *r, vf *p, vf g, vf *m, vf *v)
{
  g = scaled(&r->scale, g);
  // If g is NaN, vf_min and vf_max return their second argument, so g stays NaN.
  g = vf_max(vf_set1(-r->limit), vf_min(vf_set1(r->limit), g));
  if (extra == LIMITED && loop == LOOP_ADAM && r->spike > 0) {
    vf most = vf_mul(vf_set1(r->spike), *v);
    g = vf_select(vf_gt(vf_mul(g, g), most), vf_copysign(vf_sqrt(most), g), g);
  }
  if (r->of.coupled_decay != 0)
    g = vf_add(g, vf_mul(vf_set1(r->of.coupled_decay), *p));

  if (loop == LOOP_ADAM) {
    *p = vf_mul(*p, vf_set1(r->of.keep));
    // Moves m toward g by the fraction gain1 of their distance, computed from whichever of m and g
    // is nearer to the result, as PyTorch's lerp does.
    vf way = vf_sub(g, *m);
    *m = r->of.gain1 < 0.5f ? vf_add(*m, vf_mul(vf_set1(r->of.gain1), way))
                         : vf_add(g, vf_mul(vf_set1(r->of.gain1 - 1.0f), way));
    *v = vf_add(vf_mul(*v, vf_set1(r->of.beta2)), vf_mul(vf_mul(vf_set1(r->of.gain2), g), g));
    vf size = vf_add(vf_div(vf_sqrt(*v), vf_set1(r->of.root)), vf_set1(r->of.eps));
    *p = vf_add(*p, vf_div(vf_mul(vf_set1(-r->of.lr), *m), size));
  } else if (loop == LOOP_LION) {
    *p = vf_mul(*p, vf_set1(r->of.keep));
    vf direction = vf_add(vf_mul(vf_set1(r->of.beta1), *m), vf_mul(vf_set1(r->of.gain1), g));
    // The sign of 0 is 0, and the sign of NaN is NaN.
    vm sided = vf_gt(vf_abs(direction), vf_zero());
    vf sign = vf_select(sided, vf_copysign(vf_set1(1.0f), direction), direction);
    *p = vf_sub(*p, vf_mul(vf_set1(r->of.lr), sign));
    *m = vf_add(vf_mul(vf_set1(r->of.beta2), *m), vf_mul(vf_set1(r->of.gain2), g));
  } else {
    if (loop == LOOP_MOMENTUM_STARTS) *m = g;
    if (loop == LOOP_MOMENTUM)
      *m = vf_add(vf_mul(vf_set1(r->of.momentum), *m), vf_mul(vf_set1(r->of.gain), g));
    if (loop != LOOP_SGD) g = r->of.nesterov ? vf_add(g, vf_mul(vf_set1(r->of.momentum), *m)) : *m;
    *p = vf_sub(*p, vf_mul(vf_set1(r->of.lr), g));
  }
}

/// Prefetches the cache line that lies one kilobyte after p.
VF_INLINE void ahead(const void *p) { __builtin_prefetch((const void *)((uintptr_t)p + 1024)); }

/// Sums of squares use LANES lanes on every instruction set. The squares of SUM_TILES tiles are
/// added in f32, and these sums in f64. In f32, the square of a change below 1e-19 is subnormal and
/// loses bits. Second moments are multiplied by V_UNIT, which keeps the squares of typical values
/// in f32's range.
enum { LANES = 16, SUM_TILES = 4 };
#define V_UNIT 0x1p40f

typedef struct squares { vf of[ENG_NORMS][LANES / VF_LANES]; } squares;

VF_INLINE void add_square(vf *sum, vf x) { *sum = vf_fma(x, x, *sum); }

/// Updates the vector of elements at p, g, m and v. Only its first `count` elements exist. Unless
/// extra is PLAIN, adds the squares to vector `lane` of the sums.
VF_INLINE void step_at(int loop, int extra, const rule *r, float *p, const float *g, float *m,
                       float *v, int count, squares *sum, int lane)
{
  const bool has_m = loop != LOOP_SGD, has_v = loop == LOOP_ADAM;
  vf weight = vf_load_n(p, count), gradient = vf_load_n(g, count), before = weight,
     first = has_m ? vf_load_n(m, count) : vf_zero(),
     second = has_v ? vf_load_n(v, count) : vf_zero();
  advance(loop, extra, r, &weight, gradient, &first, &second);
  if (extra != PLAIN) {
    vf change = vf_sub(weight, before);
    if (extra == LIMITED && r->factor != 1)
      weight = vf_add(before, vf_mul(vf_set1(r->factor), change));
    change = vf_padded(change, count, vf_zero());   // an infinite factor makes missing lanes NaN
    weight = vf_padded(weight, count, vf_zero());
    first = vf_padded(first, count, vf_zero());
    second = vf_padded(second, count, vf_zero());
    add_square(&sum->of[ENG_NORM_UPDATE][lane], change);
    add_square(&sum->of[ENG_NORM_WEIGHT][lane], weight);
    if (has_m) add_square(&sum->of[ENG_NORM_M][lane], first);
    if (has_v) add_square(&sum->of[ENG_NORM_V][lane], vf_mul(second, vf_set1(V_UNIT)));
    if (extra == LIMITED && r->dry) return;
  }
  vf_store_n(p, weight, count);
  if (has_m) vf_store_n(m, first, count);
  if (has_v) vf_store_n(v, second, count);
}

/// Updates n <= TILE elements, all in f32. m and v may be NULL if the loop does not use them.
/// Unless extra is PLAIN, adds the squares to `sums`.
VF_INLINE void run(int loop, int extra, const rule *given, float *restrict p,
                   const float *restrict g, float *restrict m, float *restrict v, int n,
                   squares *sums)
{
  const bool has_m = loop != LOOP_SGD, has_v = loop == LOOP_ADAM;
  const rule r = *given;
  squares sum = *sums;
  int i = 0;
  for (; i + LANES <= n; i += LANES) {
    ahead(p + i);
    ahead(g + i);
    if (has_m) ahead(m + i);
    if (has_v) ahead(v + i);
    for (int u = 0; u < LANES / VF_LANES; u++) {
      int at = i + u * VF_LANES;
      step_at(loop, extra, &r, p + at, g + at, has_m ? m + at : NULL, has_v ? v + at : NULL,
              VF_LANES, &sum, u);
    }
  }
  for (int u = 0; i < n; i += VF_LANES, u++)
    step_at(loop, extra, &r, p + i, g + i, has_m ? m + i : NULL, has_v ? v + i : NULL,
            n - i < VF_LANES ? n - i : VF_LANES, &sum, u);
  if (extra == PLAIN) return;
  *sums = sum;
}

// A function for each combination of a loop and an extra, and the table of these functions.
typedef void run_function(const rule *r, float *p, const float *g, float *m, float *v, int n,
                          squares *sums);
#define LOOPS(f) f(SGD) f(MOMENTUM) f(MOMENTUM_STARTS) f(ADAM) f(LION)
#define RUN(loop, extra)                                                                          \
  static void run_##loop##_##extra(const rule *r, float *p, const float *g, float *m, float *v,   \
                                   int n, squares *sums)                                          \
  { run(LOOP_##loop, extra, r, p, g, m, v, n, sums); }
#define RUNS(loop) RUN(loop, PLAIN) RUN(loop, WITH_NORMS) RUN(loop, LIMITED)
#define ROW(loop) \
  [LOOP_##loop] = {run_##loop##_PLAIN, run_##loop##_WITH_NORMS, run_##loop##_LIMITED},
LOOPS(RUNS)
static run_function *const runs[][3] = {LOOPS(ROW)};

static int loop_of(const param_span *s, const rule *r, int kind)
{
  static const int loops[] = {
#define ENG_OPTIMIZER(name, KIND, loop, ...) LOOP_##loop,
#include "optimizers.def"
  };
  if (loops[kind] != LOOP_SGD) return loops[kind];
  if (!s->moment[0] || r->of.momentum == 0) return LOOP_SGD;
  return s->starts ? LOOP_MOMENTUM_STARTS : LOOP_MOMENTUM;
}

// ------------------------------------------------------------------ norms

/// Returns whether an f32 sum of squares is accurate: it did not overflow, and it is so large that
/// squares that underflowed do not matter.
static bool is_sound(double sum) { return sum >= 0x1p-90 && sum <= 0x1p120; }

static double sum_exactly(const void *values, int dtype, int64_t first, int n)
{
  float buffer[TILE] __attribute__((aligned(64)));
  double sum = 0;
  for (int at = 0; at < n; at += TILE) {
    int count = n - at < TILE ? n - at : TILE;
    const float *x = tile_load(buffer, values, dtype, first + at, count);
    for (int i = 0; i < count; i++) sum += (double)x[i] * x[i];
  }
  return sum;
}

/// Adds the f32 sums in `of` to the f64 sums in `sums`, and clears `of`.
static void spill(squares *of, double (*sums)[LANES])
{
  for (int k = 0; k < ENG_NORMS; k++) {
    float lane[LANES];
    for (int u = 0; u < LANES / VF_LANES; u++) vf_store(lane + u * VF_LANES, of->of[k][u]);
    for (int i = 0; i < LANES; i++) sums[k][i] += lane[i];
  }
  *of = (squares){0};
}

/// Writes the sums of squares of a block to norms [ENG_NORMS]. A sum that is_sound rejects is
/// computed again in double from the stored values, if the update stored any.
static void total(double (*sums)[LANES], const param_span *s, int64_t first, int n, bool dry,
                  double *norms)
{
  const double units[ENG_NORMS] = {1, 1, 1, V_UNIT};
  const void *values[ENG_NORMS] = {NULL, s->master, s->moment[0], s->moment[1]};
  for (int k = 0; k < ENG_NORMS; k++) {
    double sum = 0;
    for (int i = 0; i < LANES; i++) sum += sums[k][i];
    if (values[k] && !dry && !is_sound(sum))
      norms[k] =
        sum_exactly(values[k], k > ENG_NORM_WEIGHT ? s->moment_dtype : s->master_dtype, first, n);
    else norms[k] = sum / (units[k] * units[k]);
  }
}

// ------------------------------------------------------------------ masters in bf16

/// Returns weights [at, at + n) in f32 for the loops. f32 masters stay in place; bf16 masters plus
/// their compensation (rounding errors) go to `buffer`.
static float *load_masters(float *buffer, const param_span *s, int64_t at, int n)
{
  float lost[TILE] __attribute__((aligned(64)));
  float *p = (float *)tile_load(buffer, s->master, s->master_dtype, at, n);
  if (!s->compensation) return p;
  floats_from(lost, s->compensation, ENG_bf16, at, n);
  for (int i = 0; i < n; i++) p[i] += lost[i];
  return p;
}

/// Rounds weights [at, at + n) of a span to bf16 stochastically, in place.
static void round_randomly(float *p, const param_span *s, const eng_update *u, int64_t at, int n)
{
  enum { EACH = 8 * VF_LANES };   // how many 16-bit numbers a call of philox_vectors_at gives
  uint16_t random[TILE + EACH] __attribute__((aligned(64)));
  for (int i = 0; i < n; i += EACH)
    philox_vectors_at((uint32_t *)(void *)(random + i), rng_seed(),
                      (uint64_t)(s->first + at + i) / 8, (uint32_t)u->draw,
                      (uint32_t)s->index + 1u);
  for (int i = 0; i < n; i++) {
    uint32_t bits = f32_bits(p[i]), rounded = (bits + random[i]) & 0xFFFF0000u;
    p[i] = f32_from((bits & 0x7FFFFFFFu) > 0x7F800000u ? bits : rounded);
  }
}

/// Stores the weights that load_masters returned, after their update.
static void store_masters(const param_span *s, const eng_update *u, int64_t at, float *p, int n)
{
  if (s->master_dtype == ENG_bf16 && u->rounding == ENG_ROUND_STOCHASTIC)
    round_randomly(p, s, u, at, n);
  tile_store(s->master, s->master_dtype, at, p, n);
  if (!s->compensation) return;
  float kept[TILE] __attribute__((aligned(64)));
  floats_from(kept, s->master, ENG_bf16, at, n);
  for (int i = 0; i < n; i++) p[i] = f32_is_finite(kept[i]) ? p[i] - kept[i] : 0.0f;
  floats_to(s->compensation, ENG_bf16, at, p, n);
}

// ------------------------------------------------------------------ blocks

/// Updates elements [first, first + count), unless the rule is dry. If not NULL, norms [ENG_NORMS]
/// receives the sums of squares of the change, the weights and the moments.
static void update_block(const param_span *s, const rule *given, const eng_update *u, int64_t first,
                         int count, double *norms)
{
  rule own = *given;
  const rule *r = &own;
  // s->scale is not 1 if the gradient has a relative scale or a factor in eng_update.clips.
  if (s->scale != 1) own.scale = scaling_of(u->gradient_factor / s->scale);
  const int extra = u->spike_clip > 0 || u->update_clip > 0 ? LIMITED : norms ? WITH_NORMS : PLAIN;
  run_function *run = runs[loop_of(s, r, u->kind)][extra];
  squares some = {0};
  double sums[ENG_NORMS][LANES] = {0};
  float gradient[TILE] __attribute__((aligned(64))), moment1[TILE] __attribute__((aligned(64))),
    moment2[TILE] __attribute__((aligned(64))), weight[TILE] __attribute__((aligned(64)));
  for (int64_t at = first, end = first + count; at < end; at += TILE) {
    int n = end - at < TILE ? (int)(end - at) : TILE;
    float *p = load_masters(weight, s, at, n);
    const float *g = tile_load(gradient, s->gradient, s->gradient_dtype, at, n);
    float *m = NULL, *v = NULL;
    // For f32 moments, m and v point to the moments themselves, else to copies in a tile, which
    // tile_store writes back.
    if (s->moment[0]) m = (float *)tile_load(moment1, s->moment[0], s->moment_dtype, at, n);
    if (s->moment[1]) v = (float *)tile_load(moment2, s->moment[1], s->moment_dtype, at, n);
    run(r, p, g, m, v, n, &some);
    if (norms && (at + n == end || (at - first) / TILE % SUM_TILES == SUM_TILES - 1))
      spill(&some, sums);
    if (r->dry) continue;
    if (s->moment[0]) tile_store(s->moment[0], s->moment_dtype, at, m, n);
    if (s->moment[1]) tile_store(s->moment[1], s->moment_dtype, at, v, n);
    if (s->low) tile_store(s->low, s->low_dtype, at, p, n);
    store_masters(s, u, at, p, n);
  }
  if (norms) total(sums, s, first, count, r->dry, norms);
}

eng_status ISA_NAME(cpu_optimize)(const param_span *spans, int n, const eng_update *update)
{
  AT_END(blocks_close) block_list list;
  ENG_TRY(blocks_open(&list, spans, n));
  const int64_t wanted = update->norms ? list.n : 0;
  SCRATCH(rule, rules, update->n_groups);
  SCRATCH(double, sums, wanted * ENG_NORMS);
  double(*norms)[ENG_NORMS] = wanted ? (double(*)[ENG_NORMS])sums : NULL;
  memset(sums, 0, (size_t)wanted * sizeof *norms);
  for (int k = 0; k < update->n_groups; k++) rules[k] = rule_of(update, &update->groups[k]);
#pragma omp parallel if (list.elements > PARALLEL_ELEMENTS)
  {
    int part = omp_get_thread_num(), parts = omp_get_num_threads();
    int64_t end = blocks_part(&list, part + 1, parts);
    for (int64_t b = blocks_part(&list, part, parts); b < end; b++) {
      const param_span *s = &spans[list.at[b].span];
      update_block(s, &rules[s->group], update, list.at[b].first, list.at[b].count,
                   norms ? norms[b] : NULL);
    }
  }
  for (int k = 0; norms && k < n; k++) memset(spans[k].norms, 0, sizeof *norms);
  for (int64_t b = 0; norms && b < list.n; b++)
    for (int k = 0; k < ENG_NORMS; k++) spans[list.at[b].span].norms[k] += norms[b][k];
  return ENG_OK;
}

// ------------------------------------------------------------------ unscaling

/// Writes target = gradient * scale. Returns whether some product is inf or nan.
static bool unscale_block(const param_span *s, const scaling *scale, float *target, int64_t first,
                          int count)
{
  float buffer[TILE] __attribute__((aligned(64)));
  vi bad = vi_set1(0);
  for (int64_t at = first, end = first + count; at < end; at += TILE) {
    int n = end - at < TILE ? (int)(end - at) : TILE;
    const float *g = tile_load(buffer, s->gradient, s->gradient_dtype, at, n);
    float *to = target + at;
    // Inf and nan have all exponent bits set, so adding 1 to the lowest exponent bit carries into
    // the sign bit.
    FOR_VECTORS(i, n, {
      vf x = scaled(scale, vf_load_n(g + i, lanes));
      ahead(g + i);
      vf_store_n(to + i, x, lanes);
      vi high = vi_add(vi_and(vf_bits(x), vi_set1(0x7FFFFFFF)), vi_set1(0x00800000));
      bad = vi_or(bad, vf_bits(vf_padded(vf_from_bits(high), lanes, vf_zero())));
    });
  }
  return vm_any(vi_gt(vi_set1(0), bad));
}

eng_status ISA_NAME(cpu_unscale)(const param_span *spans, int n, double factor,
                                 float *const *target, int *found_inf)
{
  *found_inf = 0;
  AT_END(blocks_close) block_list list;
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
  return ENG_OK;
}
