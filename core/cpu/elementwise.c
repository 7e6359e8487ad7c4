// Arithmetic, comparisons, where, affine, powers, clamp, dropout. They work element by element and
// take any strides and broadcasting. Memory bandwidth bounds these operations, so each is one pass
// over tiles that stay in a thread's cache. f64 and integer tensors go to the reference kernels.
// Called through backend.kernel[]; owns nothing.
//
//   maximum, minimum   NaN if either input is NaN; the first input if both are equal (-0 equals +0)
//   clamp              NaN stays NaN
//   dropout            a dropped element is 0, even where it was NaN or Inf
#include "base/rng.h"
#include "operand.h"
#include "philox.h"
#include "simd.h"

// ------------------------------------------------------------------ two inputs

static void binary_tile(const tile *t)
{
  switch (t->w->with.op) {
    case ENG_OP_add: MAP2(t->y, t->x[0], t->x[1], t->n, vf_add(a, b)); break;
    case ENG_OP_sub: MAP2(t->y, t->x[0], t->x[1], t->n, vf_sub(a, b)); break;
    case ENG_OP_mul: MAP2(t->y, t->x[0], t->x[1], t->n, vf_mul(a, b)); break;
    case ENG_OP_div: MAP2(t->y, t->x[0], t->x[1], t->n, vf_div(a, b)); break;
    case ENG_OP_maximum:
      MAP2(t->y, t->x[0], t->x[1], t->n, vf_select(vm_or(vf_ge(a, b), vf_ne(a, a)), a, b));
      break;
    case ENG_OP_minimum:
      MAP2(t->y, t->x[0], t->x[1], t->n, vf_select(vm_or(vf_le(a, b), vf_ne(a, a)), a, b));
      break;
    default: for (int i = 0; i < t->n; i++) t->y[i] = powf(t->x[0][i], t->x[1][i]);
  }
}

#define BINARY(name) \
  KERNEL(name) { return elementwise(call, binary_tile, (numbers){.op = call->op}); }
BINARY(add) BINARY(sub) BINARY(mul) BINARY(div) BINARY(pow) BINARY(maximum) BINARY(minimum)

static inline void compare_tile(int op, uint8_t *restrict y, const float *restrict a,
                                const float *restrict b, int n)
{
  switch (op) {
    case ENG_OP_eq: for (int i = 0; i < n; i++) y[i] = a[i] == b[i]; break;
    case ENG_OP_ne: for (int i = 0; i < n; i++) y[i] = a[i] != b[i]; break;
    case ENG_OP_lt: for (int i = 0; i < n; i++) y[i] = a[i] < b[i]; break;
    case ENG_OP_le: for (int i = 0; i < n; i++) y[i] = a[i] <= b[i]; break;
    case ENG_OP_gt: for (int i = 0; i < n; i++) y[i] = a[i] > b[i]; break;
    default:        for (int i = 0; i < n; i++) y[i] = a[i] >= b[i];
  }
}

static void compare_body(const work *w, int64_t first, int n)
{
  float ta[TILE], tb[TILE];
  compare_tile(w->with.op, (uint8_t *)w->out[0]->data + first,
               operand_load(&w->in[0], ta, first, n), operand_load(&w->in[1], tb, first, n), n);
}

static eng_status comparison(const op_call *call)
{
  const tensor *y = call->out[0];
  if (!dtype_is_fast(call->in[0]->dtype) || !dtype_is_fast(call->in[1]->dtype))
    return forward_to_reference(call);
  work w = work_of(call, y);
  w.with.op = call->op;
  for_tiles(&w, y->count, compare_body);
  return ENG_OK;
}

#define COMPARISON(name) KERNEL(name) { return comparison(call); }
COMPARISON(eq) COMPARISON(ne) COMPARISON(lt) COMPARISON(le) COMPARISON(gt) COMPARISON(ge)

// ------------------------------------------------------------------ where

static void where_body(const work *w, int64_t first, int n)
{
  const tensor *y = w->out[0];
  float ta[TILE], tb[TILE], ty[TILE];
  uint8_t tc[TILE];
  const uint8_t *pc = operand_load_bytes(&w->in[0], tc, first, n);
  const float *pa = operand_load(&w->in[1], ta, first, n),
              *pb = operand_load(&w->in[2], tb, first, n);
  float *to = tile_target(ty, y->data, y->dtype, first);
  for (int i = 0; i < n; i++) {
    float yes = pa[i], no = pb[i];   // loading both lets this compile to a blend
    to[i] = pc[i] ? yes : no;
  }
  tile_store(y->data, y->dtype, first, to, n);
}

KERNEL(where)
{
  if (!all_fast_except(call, 0)) return forward_to_reference(call);
  work w = work_of(call, call->out[0]);
  for_tiles(&w, call->out[0]->count, where_body);
  return ENG_OK;
}

// ------------------------------------------------------------------ one input and scalars

// Returns whether a double is finite and nonzero but outside f32's normal range. The reference
// kernels handle such numbers.
static inline bool beyond_f32(double x)
{
  double magnitude = fabs(x);
  return f64_is_finite(x) && x != 0 &&
         (magnitude > 3.4028234663852886e38 || magnitude < 1.1754943508222875e-38);
}

static void affine_tile(const tile *t)
{
  vf factor = vf_set1(t->w->with.a), term = vf_set1(t->w->with.b);
  MAP1(t->y, t->x[0], t->n, vf_fma(a, factor, term));
}

KERNEL(affine)
{
  double factor = call->affine.factor, term = call->affine.term;
  if (beyond_f32(factor) || beyond_f32(term)) return forward_to_reference(call);
  return elementwise(call, affine_tile, (numbers){.a = (float)factor, .b = (float)term});
}

static void clamp_tile(const tile *t)
{
  vf low = vf_set1(t->w->with.a), high = vf_set1(t->w->with.b);
  MAP1(t->y, t->x[0], t->n, vf_min(high, vf_max(low, a)));
}

KERNEL(clamp)
{
  return elementwise(call, clamp_tile,
                     (numbers){.a = (float)call->clamp.low, .b = (float)call->clamp.high});
}

// Returns the square root as pow(a, 0.5) defines it: +0 for -0, and +inf for -inf. pow_tile uses it
// for the exponents 0.5 and -0.5, which are common, in place of pow.
static inline vf vf_root_(vf a)
{
  return vf_select(vf_eq(a, vf_set1(-INFINITY)), vf_set1(INFINITY), vf_add(vf_sqrt(a), vf_zero()));
}

static void pow_tile(const tile *t)
{
  float *y = t->y;
  const float *x = t->x[0];
  const int n = t->n;
  const double exponent = t->w->with.exponent;
  vf one = vf_set1(1.0f);
  if (exponent == 2.0)       MAP1(y, x, n, vf_mul(a, a));
  else if (exponent == 3.0)  MAP1(y, x, n, vf_mul(vf_mul(a, a), a));
  else if (exponent == 1.0)  memmove(y, x, (size_t)n * sizeof(float));
  else if (exponent == 0.5)  MAP1(y, x, n, vf_root_(a));
  else if (exponent == -0.5) MAP1(y, x, n, vf_div(one, vf_root_(a)));
  else if (exponent == -1.0) MAP1(y, x, n, vf_div(one, a));
  else for (int i = 0; i < n; i++) y[i] = (float)pow(x[i], exponent);
}

KERNEL(pow_scalar)
{ return elementwise(call, pow_tile, (numbers){.exponent = call->pow_scalar.exponent}); }

// ------------------------------------------------------------------ dropout

static void dropout_tile(const tile *t)
{
  const numbers with = t->w->with;
  const float *x = t->x[0];
  float *y = t->y;
  uint32_t word[TILE];
  for (int i = 0; i < t->n; i += 4 * VF_LANES)
    philox_vectors(word + i, with.seed, with.counter + (uint64_t)(t->first + i) / 4);
  for (int i = 0, n = t->n; i < n; i++) {
    float kept = x[i] * with.a;
    y[i] = (int32_t)(word[i] >> 8) >= with.least ? kept : 0.0f;
  }
}

KERNEL(dropout)
{
  double p = call->dropout.p;
  // An element is kept if (word >> 8) / 2^24 >= p. `least` is the smallest word >> 8 that is kept.
  return elementwise(call, dropout_tile,
                     (numbers){.seed = rng_seed(), .counter = (uint64_t)call->dropout.counter,
                               .least = (int32_t)ceil(p * 0x1p24), .a = (float)(1.0 / (1.0 - p))});
}
