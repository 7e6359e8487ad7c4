// Reference passes over all parameters: unscaling and fused optimizers. See backend.h, engine.h.
//
// The update is computed in f32, with one rounding per operation and in the order written here, so
// that the fast optimizer can be compared with it to within an ulp. Gradients that are not finite
// get no special treatment: the policy decides whether to step at all. Called through reference.c.
#include "reference.h"

#include "base/rng.h"

#include <math.h>
#include <string.h>

// ------------------------------------------------------------------ unscaling

// Returns g * factor, with the factor rounded to f32 first. A factor of 2^127 or more, or below
// 2^-126, stays a double, because its product with a gradient may still be in range.
static float times_factor(float g, double factor)
{
  double size = fabs(factor);
  return size >= 0x1p127 || size < 0x1p-126 ? (float)(g * factor) : g * (float)factor;
}

eng_status reference_unscale(const param_span *spans, int n, double factor, float *const *target,
                             int *found_inf)
{
  *found_inf = 0;
  for (int k = 0; k < n; k++)
    for (int64_t i = 0; i < spans[k].count; i++) {
      float product = times_factor(
        (float)tensor_load(spans[k].gradient, spans[k].gradient_dtype, i), factor / spans[k].scale);
      if (!f32_is_finite(product)) *found_inf = 1;
      target[k][i] = product;
    }
  return ENG_OK;
}

// ------------------------------------------------------------------ optimizers

// Each function updates the moments m of one element with the weight w and the gradient g, and
// returns the new weight. `starts`: m[0] has never been updated. An optimizer does not change a
// moment that it does not use.
#define UNUSED __attribute__((unused))
#define ELEMENT float w, float g, float m[ENG_MOMENTS], const eng_hyper *h,                        \
                UNUSED const eng_update *u, UNUSED bool starts

// Adds decay * w to g. The momentum buffer starts as g. In later updates:
//   buffer = momentum * buffer + (1 - dampening) * g
// Then w -= lr * (nesterov ? g + momentum * buffer : buffer) or, without momentum, w -= lr * g.
static float sgd(ELEMENT)
{
  float momentum = (float)h->momentum;
  if (h->weight_decay != 0) g = g + (float)h->weight_decay * w;
  if (h->momentum != 0) {
    m[0] = starts ? g : momentum * m[0] + (float)(1.0 - h->dampening) * g;
    g = h->nesterov ? g + momentum * m[0] : m[0];
  }
  return w - (float)h->lr * g;
}

// With spike_clip > 0, limits |g| to sqrt(spike_clip * v). Adds decay * w to g. Then:
//   m = beta1 m + (1 - beta1) g, computed as a step from m toward g
//   v = beta2 v + (1 - beta2) g^2
//   w -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
static float adam(ELEMENT)
{
  float most = (float)u->spike_clip * m[1];
  if (u->spike_clip > 0 && g * g > most) g = copysignf(sqrtf(most), g);
  float step = (float)(h->lr / (1.0 - pow(h->beta1, (double)u->t)));
  float root = (float)sqrt(1.0 - pow(h->beta2, (double)u->t));
  if (h->weight_decay != 0) g = g + (float)h->weight_decay * w;
  float gain = (float)(1.0 - h->beta1);
  m[0] = gain < 0.5f ? m[0] + gain * (g - m[0]) : g + (gain - 1.0f) * (g - m[0]);
  m[1] = m[1] * (float)h->beta2 + (float)(1.0 - h->beta2) * g * g;
  return w + -step * m[0] / (sqrtf(m[1]) / root + (float)h->eps);
}

// Multiplies w by 1 - lr * decay, then updates it as Adam without decay.
static float adamw(ELEMENT)
{
  eng_hyper plain = *h;
  plain.weight_decay = 0;
  return adam(w * (float)(1.0 - h->lr * h->weight_decay), g, m, &plain, u, starts);
}

// Multiplies w by 1 - lr * decay. Then:
//   w -= lr * sign(beta1 m + (1 - beta1) g)
//   m = beta2 m + (1 - beta2) g
// The sign of 0 is 0, and the sign of NaN is NaN.
static float lion(ELEMENT)
{
  float direction = (float)h->beta1 * m[0] + (float)(1.0 - h->beta1) * g;
  float sign = direction > 0 ? 1.0f : direction < 0 ? -1.0f : direction;
  w = w * (float)(1.0 - h->lr * h->weight_decay);
  m[0] = (float)h->beta2 * m[0] + (float)(1.0 - h->beta2) * g;
  return w - (float)h->lr * sign;
}

/// Stores a new weight as an f32 or bf16 master. If the span has a compensation, stores the
/// weight's rounding error there.
static void store_weight(const param_span *s, const eng_update *u, int64_t i, float w)
{
  if (s->master_dtype == ENG_bf16 && u->rounding == ENG_ROUND_STOCHASTIC) {
    uint32_t word[4];
    rng_of_update(word, rng_seed(), u->draw, s->index, (s->first + i) / 8);
    ((uint16_t *)s->master)[i] = bf16_stochastic(w, rng_half(word, s->first + i));
  } else tensor_store(s->master, s->master_dtype, i, w);
  if (!s->compensation) return;
  float kept = (float)tensor_load(s->master, s->master_dtype, i);
  tensor_store(s->compensation, ENG_bf16, i, f32_is_finite(kept) ? w - kept : 0.0f);
}

eng_status reference_optimize(const param_span *spans, int n, const eng_update *update)
{
  static float (*const element[])(ELEMENT) = {
#define ENG_OPTIMIZER(name, ...) name,
#include "optimizers.def"
  };
  float limit = (float)update->clip_value;
  for (int k = 0; k < n; k++) {
    const param_span *span = &spans[k];
    const eng_hyper *h = &update->groups[span->group];
    if (span->norms) memset(span->norms, 0, ENG_NORMS * sizeof *span->norms);
    for (int64_t i = 0; i < span->count; i++) {
      float w = (float)tensor_load(span->master, span->master_dtype, i);
      if (span->compensation) w += (float)tensor_load(span->compensation, ENG_bf16, i);
      float before = w;
      float g = times_factor((float)tensor_load(span->gradient, span->gradient_dtype, i),
                             update->gradient_factor / span->scale);
      if (limit > 0) g = g > limit ? limit : g < -limit ? -limit : g;   // NaN stays NaN
      float m[ENG_MOMENTS] = {0};
      for (int k = 0; k < ENG_MOMENTS; k++)
        if (span->moment[k]) m[k] = (float)tensor_load(span->moment[k], span->moment_dtype, i);
      w = element[update->kind](w, g, m, h, update, span->starts != 0);
      float change = w - before;
      if (update->factor != 1) w = before + (float)update->factor * change;
      const float normed[ENG_NORMS] = {change, w, span->moment[0] ? m[0] : 0,
                                       span->moment[1] ? m[1] : 0};
      for (int k = 0; span->norms && k < ENG_NORMS; k++)
        span->norms[k] += (double)normed[k] * normed[k];
      if (update->dry) continue;
      store_weight(span, update, i, w);
      for (int k = 0; k < ENG_MOMENTS; k++)
        if (span->moment[k]) tensor_store(span->moment[k], span->moment_dtype, i, m[k]);
      if (span->low) tensor_store(span->low, span->low_dtype, i, w);
    }
  }
  return ENG_OK;
}
