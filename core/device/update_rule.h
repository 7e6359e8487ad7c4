// The constants of an optimizer update, computed once for each group. The loops of the CPU and of
// CUDA read them; reference_optimizer.c computes its own. Included by cpu/optimizer.c,
// cuda/parameters/optimizer.cu and, for has_trait, params/optimizer.c.
#pragma once

#include "engine.h"

#include "base/numerics.h"

#include <math.h>

/// A factor of type double, split into two f32 factors that are applied one after the other.
/// `first` is 1 if the factor is between 2^-126 and 2^127. Otherwise `first` is 2^64 or 2^-64,
/// because a scaled gradient may be in the range of f32 although the factor is not.
typedef struct scaling { float first, second; } scaling;

ENG_INLINE scaling scaling_of(double factor)
{
  const double size = fabs(factor);
  scaling s = {1.0f, (float)factor};
  if (size >= 0x1p127) s.first = 0x1p64f, s.second = (float)(factor * 0x1p-64);
  if (size < 0x1p-126) s.first = 0x1p-64f, s.second = (float)(factor * 0x1p64);
  return s;
}

/// A group's hyperparameters in the form that the loops use.
typedef struct update_rule {
  float   coupled_decay;     // its product with the weight is added to the gradient; or 0
  float   keep;              // 1 - lr * weight_decay, which multiplies the weight; or 1
  float   lr;                // with ENG_BIAS_CORRECTION: lr / (1 - beta1^t)
  float   beta1, gain1;      // gain: 1 - beta
  float   beta2, gain2;
  float   root, eps;         // root, with ENG_BIAS_CORRECTION: sqrt(1 - beta2^t)
  float   momentum, gain;    // sgd; gain: 1 - dampening
  int32_t nesterov;
} update_rule;

/// Returns whether an optimizer has a trait (ENG_COUPLED_DECAY ...).
static inline bool has_trait(int kind, int trait)
{
  static const int traits_of[] = {
#define ENG_OPTIMIZER(name, KIND, loop, moments, traits, hyper) traits,
#include "optimizers.def"
  };
  return (traits_of[kind] & trait) != 0;
}

static inline update_rule update_rule_of(const eng_update *u, const eng_hyper *h)
{
  const bool corrected = has_trait(u->kind, ENG_BIAS_CORRECTION),
             coupled = has_trait(u->kind, ENG_COUPLED_DECAY);
  const double rise1 = 1.0 - pow(h->beta1, (double)u->t), rise2 = 1.0 - pow(h->beta2, (double)u->t);
  const update_rule r = {
    coupled ? (float)h->weight_decay : 0.0f,
    coupled ? 1.0f : (float)(1.0 - h->lr * h->weight_decay),
    (float)(corrected ? h->lr / rise1 : h->lr),
    (float)h->beta1, (float)(1.0 - h->beta1),
    (float)h->beta2, (float)(1.0 - h->beta2),
    corrected ? (float)sqrt(rise2) : 0.0f, (float)h->eps,
    (float)h->momentum, (float)(1.0 - h->dampening),
    h->nesterov != 0,
  };
  return r;
}
