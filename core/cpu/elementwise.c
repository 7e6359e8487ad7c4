// Arithmetic, comparisons, where, affine, powers, clamp, dropout: element by element, any strides
// and broadcasting. Bound by memory, hence one pass over tiles that every thread keeps in its cache.
// f64 and integer tensors go to the reference.
// Called through backend.kernel[].
//
//   maximum, minimum   a NaN on either side gives NaN; of equal ones (-0, +0) the first
//   clamp              NaN stays
//   dropout            a dropped element is 0, NaN and Inf included
#include "../rng.h"
#include "operand.h"
#include "philox.h"
#include "simd.h"

// ------------------------------------------------------------------ two inputs

static inline void binary_tile(int op, float *y, const float *pa, const float *pb, int n)
{
  switch (op) {
    case ENG_OP_add:     MAP2(y, pa, pb, n, vf_add(a, b)); break;
    case ENG_OP_sub:     MAP2(y, pa, pb, n, vf_sub(a, b)); break;
    case ENG_OP_mul:     MAP2(y, pa, pb, n, vf_mul(a, b)); break;
    case ENG_OP_div:     MAP2(y, pa, pb, n, vf_div(a, b)); break;
    case ENG_OP_maximum: MAP2(y, pa, pb, n, vf_select(vm_or(vf_ge(a, b), vf_ne(a, a)), a, b)); break;
    case ENG_OP_minimum: MAP2(y, pa, pb, n, vf_select(vm_or(vf_le(a, b), vf_ne(a, a)), a, b)); break;
    default:             for (int i = 0; i < n; i++) y[i] = powf(pa[i], pb[i]);
  }
}

static eng_status binary(const op_call *call)
{
  if (!all_fast(call)) return forward_to_reference(call);
  const tensor *y = call->out[0];
  operand a = operand_of(call->in[0], y), b = operand_of(call->in[1], y);
  int op = call->op;
  FOR_TILES(first, n, y->count) {
    float ta[TILE], tb[TILE], ty[TILE];
    const float *pa = operand_load(&a, ta, first, n), *pb = operand_load(&b, tb, first, n);
    float *to = tile_target(ty, y->data, y->dtype, first);
    binary_tile(op, to, pa, pb, n);
    tile_store(y->data, y->dtype, first, to, n);
  }
  return ENG_OK;
}

static inline void compare_tile(int op, uint8_t *restrict y, const float *restrict a, const float *restrict b, int n)
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

static eng_status comparison(const op_call *call)
{
  const tensor *y = call->out[0];
  if (!dtype_is_fast(call->in[0]->dtype) || !dtype_is_fast(call->in[1]->dtype) || y->dtype != ENG_bool)
    return forward_to_reference(call);
  operand a = operand_of(call->in[0], y), b = operand_of(call->in[1], y);
  uint8_t *to = y->data;
  int op = call->op;
  FOR_TILES(first, n, y->count) {
    float ta[TILE], tb[TILE];
    const float *pa = operand_load(&a, ta, first, n), *pb = operand_load(&b, tb, first, n);
    compare_tile(op, to + first, pa, pb, n);
  }
  return ENG_OK;
}

// ------------------------------------------------------------------ where

static eng_status where(const op_call *call)
{
  const tensor *y = call->out[0];
  if (!dtype_is_fast(call->in[1]->dtype) || !dtype_is_fast(call->in[2]->dtype) || !dtype_is_fast(y->dtype) ||
      call->in[0]->dtype != ENG_bool)
    return forward_to_reference(call);
  operand condition = operand_of(call->in[0], y), a = operand_of(call->in[1], y), b = operand_of(call->in[2], y);
  FOR_TILES(first, n, y->count) {
    float ta[TILE], tb[TILE], ty[TILE];
    uint8_t tc[TILE];
    const float *pa = operand_load(&a, ta, first, n), *pb = operand_load(&b, tb, first, n);
    const uint8_t *pc = operand_load_bytes(&condition, tc, first, n);
    float *to = tile_target(ty, y->data, y->dtype, first);
    for (int i = 0; i < n; i++) {
      float yes = pa[i], no = pb[i];
      to[i] = pc[i] ? yes : no;
    }
    tile_store(y->data, y->dtype, first, to, n);
  }
  return ENG_OK;
}

// ------------------------------------------------------------------ one input and numbers

// A double that f32 cannot hold, not even roughly: the reference computes those.
static inline bool beyond_f32(double x)
{
  double magnitude = fabs(x);
  return f64_is_finite(x) && x != 0 && (magnitude > 3.4028234663852886e38 || magnitude < 1.1754943508222875e-38);
}

static eng_status affine(const op_call *call)
{
  if (!all_fast(call) || beyond_f32(call->floats[0]) || beyond_f32(call->floats[1])) return forward_to_reference(call);
  const tensor *y = call->out[0];
  operand x = operand_of(call->in[0], y);
  vf factor = vf_set1((float)call->floats[0]), shift = vf_set1((float)call->floats[1]);
  FOR_TILES(first, n, y->count) {
    float tx[TILE], ty[TILE];
    const float *px = operand_load(&x, tx, first, n);
    float *to = tile_target(ty, y->data, y->dtype, first);
    MAP1(to, px, n, vf_fma(a, factor, shift));
    tile_store(y->data, y->dtype, first, to, n);
  }
  return ENG_OK;
}

static eng_status clamp(const op_call *call)
{
  if (!all_fast(call)) return forward_to_reference(call);
  const tensor *y = call->out[0];
  operand x = operand_of(call->in[0], y);
  vf low = vf_set1((float)call->floats[0]), high = vf_set1((float)call->floats[1]);
  FOR_TILES(first, n, y->count) {
    float tx[TILE], ty[TILE];
    const float *px = operand_load(&x, tx, first, n);
    float *to = tile_target(ty, y->data, y->dtype, first);
    MAP1(to, px, n, vf_min(high, vf_max(low, a)));
    tile_store(y->data, y->dtype, first, to, n);
  }
  return ENG_OK;
}

// The exponents that people use need no pow. As pow does it: -0 and -inf to the 1/2 are +0 and +inf.
static inline vf vf_root_(vf a)
{
  return vf_select(vf_eq(a, vf_set1(-INFINITY)), vf_set1(INFINITY), vf_add(vf_sqrt(a), vf_zero()));
}

static inline void pow_tile(float *y, const float *x, int n, double exponent)
{
  vf one = vf_set1(1.0f);
  if (exponent == 2.0)       MAP1(y, x, n, vf_mul(a, a));
  else if (exponent == 3.0)  MAP1(y, x, n, vf_mul(vf_mul(a, a), a));
  else if (exponent == 1.0)  memmove(y, x, (size_t)n * sizeof(float));
  else if (exponent == 0.5)  MAP1(y, x, n, vf_root_(a));
  else if (exponent == -0.5) MAP1(y, x, n, vf_div(one, vf_root_(a)));
  else if (exponent == -1.0) MAP1(y, x, n, vf_div(one, a));
  else for (int i = 0; i < n; i++) y[i] = (float)pow(x[i], exponent);
}

static eng_status pow_scalar(const op_call *call)
{
  if (!all_fast(call)) return forward_to_reference(call);
  const tensor *y = call->out[0];
  operand x = operand_of(call->in[0], y);
  double exponent = call->floats[0];
  FOR_TILES(first, n, y->count) {
    float tx[TILE], ty[TILE];
    const float *px = operand_load(&x, tx, first, n);
    float *to = tile_target(ty, y->data, y->dtype, first);
    pow_tile(to, px, n, exponent);
    tile_store(y->data, y->dtype, first, to, n);
  }
  return ENG_OK;
}

// ------------------------------------------------------------------ dropout

static eng_status dropout(const op_call *call)
{
  if (!all_fast(call)) return forward_to_reference(call);
  const tensor *y = call->out[0];
  operand x = operand_of(call->in[0], y);
  double p = call->floats[0];
  uint64_t seed = rng_seed(), counter = (uint64_t)call->ints[0];
  // word >> 8 over 2^24 is at least p, in integers
  int32_t least = (int32_t)ceil(p * 0x1p24);
  float factor = (float)(1.0 / (1.0 - p));
  FOR_TILES(first, n, y->count) {
    float tx[TILE], ty[TILE];
    uint32_t word[TILE];
    const float *px = operand_load(&x, tx, first, n);
    float *to = tile_target(ty, y->data, y->dtype, first);
    for (int i = 0; i < n; i += 4 * VF_LANES) philox_vectors(word + i, seed, counter + (uint64_t)(first + i) / 4);
    for (int i = 0; i < n; i++) {
      float kept = px[i] * factor;
      to[i] = (int32_t)(word[i] >> 8) >= least ? kept : 0.0f;
    }
    tile_store(y->data, y->dtype, first, to, n);
  }
  return ENG_OK;
}

void ISA_NAME(cpu_register_elementwise)(backend *b)
{
  static const int arithmetic[] = {ENG_OP_add, ENG_OP_sub, ENG_OP_mul, ENG_OP_div, ENG_OP_pow, ENG_OP_maximum, ENG_OP_minimum};
  for (int k = 0; k < (int)(sizeof arithmetic / sizeof *arithmetic); k++) b->kernel[arithmetic[k]] = binary;
  for (int op = ENG_OP_eq; op <= ENG_OP_ge; op++) b->kernel[op] = comparison;
  b->kernel[ENG_OP_where] = where;
  b->kernel[ENG_OP_affine] = affine;
  b->kernel[ENG_OP_clamp] = clamp;
  b->kernel[ENG_OP_pow_scalar] = pow_scalar;
  b->kernel[ENG_OP_dropout] = dropout;
}
