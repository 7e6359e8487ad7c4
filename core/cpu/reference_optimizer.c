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

// The two moments of one element. An optimizer does not change a moment that it does not use.
typedef struct moments { float first, second; } moments;

// Adds decay * w to g. The momentum buffer starts as g. In later updates:
//   buffer = momentum * buffer + (1 - dampening) * g
// Then w -= lr * (nesterov ? g + momentum * buffer : buffer) or, without momentum, w -= lr * g.
static float sgd(float w, float g, moments *m, const eng_hyper *h, bool starts)
{
  float momentum = (float)h->momentum;
  if (h->weight_decay != 0) g = g + (float)h->weight_decay * w;
  if (h->momentum != 0) {
    m->first = starts ? g : momentum * m->first + (float)(1.0 - h->dampening) * g;
    g = h->nesterov ? g + momentum * m->first : m->first;
  }
  return w - (float)h->lr * g;
}

// With spike > 0, limits |g| to sqrt(spike * v). For weight decay, Adam then adds decay * w to g,
// and AdamW multiplies w by 1 - lr * decay. Then:
//   m = beta1 m + (1 - beta1) g, computed as a step from m toward g
//   v = beta2 v + (1 - beta2) g^2
//   w -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
static float adam(float w, float g, moments *m, const eng_hyper *h, int64_t t, bool decoupled,
                  float spike)
{
  float most = spike * m->second;
  if (spike > 0 && g * g > most) g = copysignf(sqrtf(most), g);
  float step = (float)(h->lr / (1.0 - pow(h->beta1, (double)t)));
  float root = (float)sqrt(1.0 - pow(h->beta2, (double)t));
  if (decoupled) w = w * (float)(1.0 - h->lr * h->weight_decay);
  else if (h->weight_decay != 0) g = g + (float)h->weight_decay * w;
  float gain = (float)(1.0 - h->beta1);
  m->first = gain < 0.5f ? m->first + gain * (g - m->first) : g + (gain - 1.0f) * (g - m->first);
  m->second = m->second * (float)h->beta2 + (float)(1.0 - h->beta2) * g * g;
  return w + -step * m->first / (sqrtf(m->second) / root + (float)h->eps);
}

// Multiplies w by 1 - lr * decay. Then:
//   w -= lr * sign(beta1 m + (1 - beta1) g)
//   m = beta2 m + (1 - beta2) g
// The sign of 0 is 0, and the sign of NaN is NaN.
static float lion(float w, float g, moments *m, const eng_hyper *h)
{
  float direction = (float)h->beta1 * m->first + (float)(1.0 - h->beta1) * g;
  float sign = direction > 0 ? 1.0f : direction < 0 ? -1.0f : direction;
  w = w * (float)(1.0 - h->lr * h->weight_decay);
  m->first = (float)h->beta2 * m->first + (float)(1.0 - h->beta2) * g;
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
  float limit = (float)update->clip_value, spike = (float)update->spike_clip;
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
      moments m = {0};
      if (span->moment1) m.first = (float)tensor_load(span->moment1, span->moment_dtype, i);
      if (span->moment2) m.second = (float)tensor_load(span->moment2, span->moment_dtype, i);
      switch (update->kind) {
        case ENG_SGD:   w = sgd(w, g, &m, h, span->starts != 0); break;
        case ENG_ADAM:  w = adam(w, g, &m, h, update->t, false, spike); break;
        case ENG_ADAMW: w = adam(w, g, &m, h, update->t, true, spike); break;
        case ENG_LION:  w = lion(w, g, &m, h); break;
      }
      float change = w - before;
      if (update->factor != 1) w = before + (float)update->factor * change;
      const float normed[ENG_NORMS] = {change, w, span->moment1 ? m.first : 0,
                                       span->moment2 ? m.second : 0};
      for (int k = 0; span->norms && k < ENG_NORMS; k++)
        span->norms[k] += (double)normed[k] * normed[k];
      if (update->dry) continue;
      store_weight(span, update, i, w);
      if (span->moment1) tensor_store(span->moment1, span->moment_dtype, i, m.first);
      if (span->moment2) tensor_store(span->moment2, span->moment_dtype, i, m.second);
      if (span->low) tensor_store(span->low, span->low_dtype, i, w);
    }
  }
  return ENG_OK;
}
