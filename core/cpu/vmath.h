// vmath.h: elementary functions on float vectors, the same source on every instruction set.
// Polynomials are minimax fits (Remez) for the intervals used here. All functions keep NaN and
// underflow gradually. At the infinities they yield their limits, except that gelu, gelu_tanh and
// silu are NaN at -inf.
//
// Largest errors measured, in units in the last place (ulp), over 70 million f32 arguments
// (spec/cpu/vmath_spec.lua repeats a part of them): exp 1.0, log 0.8, tanh 1.3, sigmoid 2.4,
// softplus 2.0, the derivatives of tanh and sigmoid 4.8. Where the result is above 1e-30: silu 3.1,
// gelu 8, gelu_tanh 125. gelu_tanh has its largest error at -8.9, where exp magnifies the rounding
// error of its argument; there, 0.5 (1 + tanh) in f32 would have no correct digit at all. The
// derivatives of silu, gelu and gelu_tanh cross zero; their absolute error is at most 2e-7.
//
// simd.h includes this file at its end; do not include it alone. Owns nothing.
#pragma once

#define VF_C(x) vf_set1(x)

/// Returns exp(hi + lo) for |lo| far below 1. Two parts give the argument more than 24 bits of
/// precision.
VF_INLINE vf vf_exp_split(vf hi, vf lo)
{
  vm gone = vf_lt(hi, VF_C(-104.0f));
  hi = vf_min(VF_C(89.0f), vf_max(VF_C(-106.0f), hi));       // infinity or 0 beyond the bounds
  vf n = vf_rint(vf_mul(hi, VF_C(1.44269504f)));
  // Subtracts n ln 2 in two parts. The first part of ln 2 has 9 bits, so its product with n is
  // exact even without fma.
  vf r = vf_fma(n, VF_C(-0.693359375f), hi);
  r = vf_add(vf_fma(n, VF_C(2.12194440e-4f), r), lo);
  vf q = VF_C(0.001380887215f);
  q = vf_fma(q, r, VF_C(0.008371494614f));
  q = vf_fma(q, r, VF_C(0.0416686674f));
  q = vf_fma(q, r, VF_C(0.1666649686f));
  q = vf_fma(q, r, VF_C(0.4999999179f));
  vf p = vf_add(vf_fma(vf_mul(r, r), q, r), VF_C(1.0f));
  // Sets p to 0 where the result is 0, because the last step takes 30 times as long if it
  // underflows.
  p = vf_select(gone, vf_zero(), p);
#if defined(ENG_ISA_avx512)
  return _mm512_scalef_ps(p, n);
#else
  // Multiplies by 2^n in two factors that are normal numbers. Only the second product can round (to
  // a subnormal).
  vi k = vf_to_vi(n), half = vi_sar(k, 1);
  vf first = vf_from_bits(vi_shl(vi_add(half, vi_set1(127)), 23));
  vf second = vf_from_bits(vi_shl(vi_add(vi_sub(k, half), vi_set1(127)), 23));
  return vf_mul(vf_mul(p, first), second);
#endif
}

VF_INLINE vf vf_exp(vf x) { return vf_exp_split(x, vf_zero()); }

/// Returns exp(x) for an x that is neither +inf nor far above 0: callers pass -|x|, or an element
/// minus the maximum or logsumexp of its row. On AVX-512 this function is cheaper than vf_exp, as
/// accurate, and underflows as gradually; elsewhere it is vf_exp.
VF_INLINE vf vf_exp_low(vf x)
{
#if defined(ENG_ISA_avx512)
  vm gone = vf_lt(x, VF_C(-104.0f));
  x = vf_max(VF_C(-106.0f), x);
  // Adding 1.5 * 2^23 leaves no bits for a fraction, so it rounds x / ln 2 to the nearest integer.
  vf n = vf_sub(vf_fma(x, VF_C(1.44269504f), VF_C(12582912.0f)), VF_C(12582912.0f));
  vf r = vf_fma(n, VF_C(2.12194440e-4f), vf_fma(n, VF_C(-0.693359375f), x));
  vf p = vf_fma(VF_C(0.001380887215f), r, VF_C(0.008371494614f));   // coefficients of vf_exp
  p = vf_fma(p, r, VF_C(0.0416686674f));
  p = vf_fma(p, r, VF_C(0.1666649686f));
  p = vf_fma(p, r, VF_C(0.4999999179f));
  p = vf_fma(vf_fma(p, r, VF_C(1.0f)), r, VF_C(1.0f));
  return _mm512_scalef_ps(vf_select(gone, vf_zero(), p), n);
#else
  return vf_exp(x);
#endif
}

/// Returns log(x), which is -inf at 0 and NaN for negative x.
VF_INLINE vf vf_log(vf x)
{
  vm tiny = vf_lt(x, VF_C(1.17549435e-38f));
  vi bits = vf_bits(vf_select(tiny, vf_mul(x, VF_C(8388608.0f)), x));
  // x, scaled if tiny, is 2^k * (1 + f), with 1 + f in [sqrt(1/2), sqrt(2)).
  vi k = vi_sar(vi_sub(bits, vi_set1(0x3F3504F3)), 23);
  vf f = vf_sub(vf_from_bits(vi_sub(bits, vi_shl(k, 23))), VF_C(1.0f));
  vf e = vf_sub(vi_to_vf(k), vf_select(tiny, VF_C(23.0f), vf_zero()));
  vf p = VF_C(0.06746703498f);
  p = vf_fma(p, f, VF_C(-0.116756023f));
  p = vf_fma(p, f, VF_C(0.1188810241f));
  p = vf_fma(p, f, VF_C(-0.1240559341f));
  p = vf_fma(p, f, VF_C(0.1421956209f));
  p = vf_fma(p, f, VF_C(-0.1666799595f));
  p = vf_fma(p, f, VF_C(0.2000211811f));
  p = vf_fma(p, f, VF_C(-0.2500000959f));
  p = vf_fma(p, f, VF_C(0.3333331261f));
  vf z = vf_mul(f, f);
  vf y = vf_mul(vf_mul(f, z), p);
  y = vf_fma(e, VF_C(-2.12194440e-4f), y);
  y = vf_fma(z, VF_C(-0.5f), y);
  y = vf_fma(e, VF_C(0.693359375f), vf_add(f, y));
  y = vf_select(vf_eq(x, VF_C(INFINITY)), x, y);
  y = vf_select(vf_eq(x, vf_zero()), VF_C(-INFINITY), y);
  return vf_select(vf_ge(x, vf_zero()), y, vf_select(vf_lt(x, vf_zero()), VF_C(NAN), x));
}

/// Returns log(1 + z) for 0 <= z <= 1.
VF_INLINE vf vf_log1p_unit(vf z)
{
  vf u = vf_add(z, VF_C(1.0f));
  vf lost = vf_sub(z, vf_sub(u, VF_C(1.0f)));
  return vf_add(vf_log(u), vf_div(lost, u));
}

VF_INLINE vf vf_tanh(vf x)
{
  vf a = vf_abs(x), t = vf_mul(x, x);
  vf p = VF_C(-0.005607688733f);
  p = vf_fma(p, t, VF_C(0.02056595799f));
  p = vf_fma(p, t, VF_C(-0.05372398871f));
  p = vf_fma(p, t, VF_C(0.1333138311f));
  p = vf_fma(p, t, VF_C(-0.3333328788f));
  vf near = vf_fma(vf_mul(a, t), p, a);
  vf far = vf_sub(VF_C(1.0f), vf_div(VF_C(2.0f), vf_add(vf_exp(vf_add(a, a)), VF_C(1.0f))));
  return vf_copysign(vf_select(vf_lt(a, VF_C(0.625f)), near, far), x);
}

VF_INLINE vf vf_sigmoid(vf x)
{
  vf z = vf_exp_low(vf_neg(vf_abs(x)));
  return vf_div(vf_select(vf_ge(x, vf_zero()), VF_C(1.0f), z), vf_add(z, VF_C(1.0f)));
}

/// Returns exp(-a^2 / 2) for 0 <= a <= 15. a^2 is computed to twice the precision of f32, because
/// exp magnifies the error of a^2.
VF_INLINE vf vf_bell_(vf a)
{
  vf square = vf_mul(a, a);
#if defined(ENG_ISA_avx512) || defined(ENG_ISA_avx2)
  vf rest = vf_fma(a, a, vf_neg(square));
#else
  // `top` has 12 significant bits, so its square is exact.
  vf top = vf_from_bits(vi_and(vf_bits(a), vi_set1((int32_t)0xFFFFF000)));
  square = vf_mul(top, top);
  vf rest = vf_mul(vf_sub(a, top), vf_add(a, top));
#endif
  return vf_exp_split(vf_mul(square, VF_C(-0.5f)), vf_mul(rest, VF_C(-0.5f)));
}

/// Returns exp(a^2 / 2) times the probability that a standard normal variable exceeds a,
/// for 0 <= a <= 15.
VF_INLINE vf vf_tail_factor_(vf a)
{
  vf t = vf_div(vf_sub(a, VF_C(3.0f)), vf_add(a, VF_C(3.0f)));
  vf q = VF_C(5.316193266e-5f);
  q = vf_fma(q, t, VF_C(0.0001150136462f));
  q = vf_fma(q, t, VF_C(-0.0003390128287f));
  q = vf_fma(q, t, VF_C(-0.00098328816f));
  q = vf_fma(q, t, VF_C(0.002904387341f));
  q = vf_fma(q, t, VF_C(0.00613194226f));
  q = vf_fma(q, t, VF_C(-0.04621326361f));
  q = vf_fma(q, t, VF_C(0.1232250412f));
  q = vf_fma(q, t, VF_C(-0.2064026204f));
  return vf_fma(q, t, VF_C(0.1215139475f));
}

/// Returns the normal distribution function at x, and sets *bell to exp(-x^2 / 2). The function
/// keeps its relative accuracy in the lower tail, unlike 0.5 (1 + erf).
VF_INLINE vf vf_normal_cdf(vf x, vf *bell)
{
  vf a = vf_min(VF_C(15.0f), vf_abs(x));
  *bell = vf_bell_(a);
  vf tail = vf_mul(*bell, vf_tail_factor_(a));
  return vf_select(vf_lt(x, vf_zero()), tail, vf_sub(VF_C(1.0f), tail));
}

// ----------------------------------------------------------- activations and their derivatives

// A gated activation is x times its gate, so it is NaN at -inf (-inf * 0), as in PyTorch. Its
// derivative is constant beyond a bound, so x is clamped to the bound. At -inf and +inf, the
// derivative is then 0 and 1, its limits.

VF_INLINE vf vf_gelu(vf x)
{
  vf bell, cdf = vf_normal_cdf(x, &bell);
  return vf_mul(x, cdf);
}

VF_INLINE vf vf_gelu_derivative(vf x)
{
  vf bell, cdf = vf_normal_cdf(x, &bell);
  vf bound = vf_min(VF_C(15.0f), vf_max(VF_C(-15.0f), x));
  return vf_fma(vf_mul(bound, VF_C(0.39894228f)), bell, cdf);
}

// Computes 0.5 (1 + tanh(u)) as the sigmoid of 2u, which takes one exp and does not cancel for
// negative x. v is 2u = x (2 sqrt(2/pi) + 2 sqrt(2/pi) 0.044715 x^2).
VF_INLINE vf vf_gelu_tanh(vf x)
{
  vf v = vf_mul(x, vf_fma(vf_mul(x, x), VF_C(0.0713548163f), VF_C(1.59576912f)));
  return vf_mul(x, vf_sigmoid(v));
}

VF_INLINE vf vf_gelu_tanh_derivative(vf x)
{
  x = vf_min(VF_C(15.0f), vf_max(VF_C(-15.0f), x));   // so that x^3 does not overflow
  vf square = vf_mul(x, x);
  vf v = vf_mul(x, vf_fma(square, VF_C(0.0713548163f), VF_C(1.59576912f)));
  vf slope = vf_fma(square, VF_C(0.214064449f), VF_C(1.59576912f));
  vf z = vf_exp_low(vf_neg(vf_abs(v))), r = vf_div(VF_C(1.0f), vf_add(z, VF_C(1.0f)));
  vf s = vf_mul(vf_select(vf_ge(x, vf_zero()), VF_C(1.0f), z), r);
  return vf_fma(vf_mul(x, slope), vf_mul(vf_mul(z, r), r), s);   // s (1 - s) = z / (1 + z)^2
}

VF_INLINE vf vf_silu(vf x) { return vf_mul(x, vf_sigmoid(x)); }

VF_INLINE vf vf_silu_derivative(vf x)
{
  x = vf_min(VF_C(120.0f), vf_max(VF_C(-120.0f), x));
  vf z = vf_exp_low(vf_neg(vf_abs(x))), r = vf_div(VF_C(1.0f), vf_add(z, VF_C(1.0f)));
  vf s = vf_mul(vf_select(vf_ge(x, vf_zero()), VF_C(1.0f), z), r);
  return vf_fma(x, vf_mul(vf_mul(z, r), r), s);
}

VF_INLINE vf vf_sigmoid_derivative(vf x)
{
  vf z = vf_exp_low(vf_neg(vf_abs(x))), r = vf_div(VF_C(1.0f), vf_add(z, VF_C(1.0f)));
  return vf_mul(vf_mul(z, r), r);
}

/// Returns 1 - tanh^2 without cancellation: 4 z / (1 + z)^2 with z = exp(-2|x|).
VF_INLINE vf vf_tanh_derivative(vf x)
{
  vf a = vf_abs(x), z = vf_exp_low(vf_neg(vf_add(a, a))),
     r = vf_div(VF_C(2.0f), vf_add(z, VF_C(1.0f)));
  return vf_mul(vf_mul(z, r), r);
}

/// Returns log(1 + exp(x)).
VF_INLINE vf vf_softplus(vf x)
{ return vf_add(vf_max(vf_zero(), x), vf_log1p_unit(vf_exp_low(vf_neg(vf_abs(x))))); }
