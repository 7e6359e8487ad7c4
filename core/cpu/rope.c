// Rotary position embedding: pairs of features of x [B x T x H x D] turn by an angle that grows with
// the position. Angles are made in double (a turn by recurrence, restarted exactly at every
// RESTART-th position, so that the result depends neither on threads nor on the length), rotations in
// f32. f64 goes to the reference.
// Called through backend.kernel[].
#include "operand.h"
#include "simd.h"

enum { RESTART = 64, PAIRS = TILE / 2 };

/// cos and sin of every angle, [T x D/2] each; the sine carries the direction.
typedef struct rotation {
  float  *cosine, *sine;
  int64_t positions, half;
} rotation;

static void fill_rotation(const rotation *r, double *frequency, int64_t first, double base, double direction)
{
  int64_t half = r->half, blocks = (r->positions + RESTART - 1) / RESTART;
  double *step_cos = frequency + half, *step_sin = frequency + 2 * half;
  for (int64_t i = 0; i < half; i++) {
    frequency[i] = pow(base, -(double)i / (double)half);
    step_cos[i] = cos(frequency[i]);
    step_sin[i] = sin(frequency[i]);
  }
#pragma omp parallel for schedule(static) if (r->positions * half >= PARALLEL_ELEMENTS / 4)
  for (int64_t block = 0; block < blocks; block++) {
    int64_t start = block * RESTART, stop = smaller(start + RESTART, r->positions);
    for (int64_t i0 = 0; i0 < half; i0 += PAIRS) {
      int n = (int)smaller(PAIRS, half - i0);
      double c[PAIRS], s[PAIRS];
      for (int i = 0; i < n; i++) {
        double angle = (double)(first + start) * frequency[i0 + i];
        c[i] = cos(angle);
        s[i] = sin(angle);
      }
      for (int64_t t = start; t < stop; t++) {
        float *to_cos = r->cosine + t * half + i0, *to_sin = r->sine + t * half + i0;
        for (int i = 0; i < n; i++) {
          to_cos[i] = (float)c[i];
          to_sin[i] = (float)(direction * s[i]);
          double turned = c[i] * step_cos[i0 + i] - s[i] * step_sin[i0 + i];
          s[i] = s[i] * step_cos[i0 + i] + c[i] * step_sin[i0 + i];
          c[i] = turned;
        }
      }
    }
  }
}

// n pairs (a, b) -> (a cos - b sin, b cos + a sin)
static void rotate(float *ya, float *yb, const float *xa, const float *xb, const float *c, const float *s, int n)
{
  for (int i = 0; i < n; i += VF_LANES) {
    int m = n - i;
    bool whole = m >= VF_LANES;
    vf a = whole ? vf_load(xa + i) : vf_load_n(xa + i, m), b = whole ? vf_load(xb + i) : vf_load_n(xb + i, m);
    vf cosine = whole ? vf_load(c + i) : vf_load_n(c + i, m), sine = whole ? vf_load(s + i) : vf_load_n(s + i, m);
    vf first = vf_fma(a, cosine, vf_neg(vf_mul(b, sine))), second = vf_fma(b, cosine, vf_mul(a, sine));
    if (whole) {
      vf_store(ya + i, first);
      vf_store(yb + i, second);
    } else {
      vf_store_n(ya + i, first, m);
      vf_store_n(yb + i, second, m);
    }
  }
}

static eng_status rope(const op_call *call)
{
  if (!all_fast(call)) return forward_to_reference(call);
  const tensor *x = call->in[0], *y = call->out[0];
  if (y->count == 0) return ENG_OK;
  int64_t T = x->shape[1], H = x->shape[2], D = x->shape[3], half = D / 2, rows = x->shape[0] * T;
  bool interleaved = call->ints[1] != 0;
  int64_t bytes = 3 * half * (int64_t)sizeof(double) + 2 * T * half * (int64_t)sizeof(float);
  double *scratch = arena_alloc(ARENA_SCRATCH, bytes);
  if (!scratch) return ENG_ERR_MEMORY;
  rotation r = {.positions = T, .half = half};
  r.cosine = (float *)(scratch + 3 * half);
  r.sine = r.cosine + T * half;
  fill_rotation(&r, scratch, call->ints[0], call->floats[0], call->ints[2] ? -1.0 : 1.0);

  // members of a pair: half a row apart, or side by side
  int64_t apart = interleaved ? 1 : half, step = interleaved ? 2 : 1;
#pragma omp parallel for schedule(static) if (y->count >= PARALLEL_ELEMENTS)
  for (int64_t row = 0; row < rows; row++) {
    int64_t t = row % T, from = row / T * x->stride[0] + t * x->stride[1], to = row * H * D;
    for (int64_t h = 0; h < H; h++)
      for (int64_t i = 0; i < half; i += PAIRS) {
        int n = (int)smaller(PAIRS, half - i);
        float xa[PAIRS], xb[PAIRS], ya[PAIRS], yb[PAIRS], line[TILE];
        int64_t first = from + h * x->stride[2] + i * step * x->stride[3], target = to + h * D + i * step;
        const float *a = tile_gather(xa, x->data, x->dtype, first, step * x->stride[3], n);
        const float *b = tile_gather(xb, x->data, x->dtype, first + apart * x->stride[3], step * x->stride[3], n);
        rotate(ya, yb, a, b, r.cosine + t * half + i, r.sine + t * half + i, n);
        if (interleaved) {
          for (int k = 0; k < n; k++) {
            line[2 * k] = ya[k];
            line[2 * k + 1] = yb[k];
          }
          floats_to(y->data, y->dtype, target, line, 2 * n);
        } else {
          floats_to(y->data, y->dtype, target, ya, n);
          floats_to(y->data, y->dtype, target + half, yb, n);
        }
      }
  }
  arena_free(ARENA_SCRATCH, scratch, bytes);
  return ENG_OK;
}

void ISA_NAME(cpu_register_rope)(backend *b)
{
  b->kernel[ENG_OP_rope] = rope;
}
