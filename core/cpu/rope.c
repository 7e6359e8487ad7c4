// Rotary position embedding: rotates pairs of features of x [B x T x H x D] by an angle that grows
// with the position. The cosines and sines of the angles are computed in double, by a recurrence
// that starts again from an exact cosine and sine every RESTART positions, so that the result
// depends neither on the number of threads nor on the length of the sequence. Rotations are in f32.
// f64 goes to the reference kernel. Called through backend.kernel[]; owns nothing.
#include "base/rope.h"
#include "operand.h"
#include "simd.h"
#include "tasks.h"

enum { RESTART = 64, PAIRS = TILE / 2 };

/// What the tasks of a call share. `cosine` and `sine` [T x D/2] hold the cosine and sine of every
/// angle. For the gradient, `sine` is negated. `frequency` holds the angle by which each pair of
/// features turns per position; step_cosine and step_sine are the cosine and sine of that angle.
typedef struct rotation {
  const tensor *x, *y;
  float   *cosine, *sine;
  double  *frequency, *step_cosine, *step_sine;   // [D/2]
  int64_t  first, positions, half;                // position of time step 0; T; D/2
  double   direction;                             // -1 for the gradient, else 1
  bool     interleaved;
} rotation;

static void fill_frequencies(const rotation *r, const rope_scaling *scaling)
{
  for (int64_t i = 0; i < r->half; i++) {
    r->frequency[i] = rope_frequency(scaling, i, r->half);
    r->step_cosine[i] = cos(r->frequency[i]);
    r->step_sine[i] = sin(r->frequency[i]);
  }
}

// Computes the cosines and sines of the angles at RESTART consecutive positions.
static void angle_task(const void *context, int64_t task)
{
  const rotation *r = context;
  int64_t start = task * RESTART, stop = smaller(start + RESTART, r->positions);
  for (int64_t i0 = 0; i0 < r->half; i0 += PAIRS) {
    const double *step_cosine = r->step_cosine + i0, *step_sine = r->step_sine + i0;
    int n = (int)smaller(PAIRS, r->half - i0);
    double c[PAIRS], s[PAIRS];
    for (int i = 0; i < n; i++) {
      double angle = (double)(r->first + start) * r->frequency[i0 + i];
      c[i] = cos(angle);
      s[i] = sin(angle);
    }
    for (int64_t t = start; t < stop; t++) {
      float *cosine = r->cosine + t * r->half + i0, *sine = r->sine + t * r->half + i0;
      for (int i = 0; i < n; i++) {
        cosine[i] = (float)c[i];
        sine[i] = (float)(r->direction * s[i]);
        double turned = c[i] * step_cosine[i] - s[i] * step_sine[i];
        s[i] = s[i] * step_cosine[i] + c[i] * step_sine[i];
        c[i] = turned;
      }
    }
  }
}

// Rotates n pairs: (a, b) -> (a cos - b sin, b cos + a sin).
static void rotate(float *ya, float *yb, const float *xa, const float *xb, const float *c,
                   const float *s, int n)
{
  FOR_VECTORS(i, n, {
    vf a = vf_load_n(xa + i, lanes), b = vf_load_n(xb + i, lanes);
    vf cosine = vf_load_n(c + i, lanes), sine = vf_load_n(s + i, lanes);
    vf_store_n(ya + i, vf_fma(a, cosine, vf_neg(vf_mul(b, sine))), lanes);
    vf_store_n(yb + i, vf_fma(b, cosine, vf_mul(a, sine)), lanes);
  });
}

// Rotates all heads of one position of one sequence.
static void rotate_task(const void *context, int64_t row)
{
  const rotation *r = context;
  const tensor *x = r->x, *y = r->y;
  int64_t half = r->half, heads = x->shape[2], t = row % r->positions;
  int64_t from = row / r->positions * x->stride[0] + t * x->stride[1], to = row * heads * 2 * half;
  // The members of a pair are D/2 features apart or, if interleaved, adjacent.
  int64_t apart = (r->interleaved ? 1 : half) * x->stride[3], pair = r->interleaved ? 2 : 1;
  for (int64_t h = 0; h < heads; h++)
    for (int64_t i = 0; i < half; i += PAIRS) {
      int n = (int)smaller(PAIRS, half - i);
      float xa[PAIRS], xb[PAIRS], ya[PAIRS], yb[PAIRS], line[TILE];
      int64_t source = from + h * x->stride[2] + i * pair * x->stride[3],
              target = to + h * 2 * half + i * pair;
      const float *a = tile_gather(xa, x->data, x->dtype, source, pair * x->stride[3], n);
      const float *b = tile_gather(xb, x->data, x->dtype, source + apart, pair * x->stride[3], n);
      rotate(ya, yb, a, b, r->cosine + t * half + i, r->sine + t * half + i, n);
      if (r->interleaved) {
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

KERNEL(rope)
{
  if (!all_fast(call)) return forward_to_reference(call);
  const tensor *x = call->in[0], *y = call->out[0];
  int64_t T = x->shape[1], half = x->shape[3] / 2;
  SCRATCH(double, steps, 3 * half);
  SCRATCH(float, cosines, 2 * T * half);
  rotation r = {.x = x, .y = y, .first = call->rope.position, .positions = T, .half = half,
                .interleaved = call->rope.interleaved != 0,
                .direction = call->rope.backward ? -1.0 : 1.0, .frequency = steps,
                .step_cosine = steps + half, .step_sine = steps + 2 * half, .cosine = cosines,
                .sine = cosines + T * half};
  fill_frequencies(&r, &(rope_scaling){call->rope.base, call->rope.factor, call->rope.low,
                                       call->rope.high, call->rope.context});
  run_tasks(ceiling(T, RESTART), T * half >= PARALLEL_ELEMENTS / 4, angle_task, &r);
  run_tasks(x->shape[0] * T, y->count >= PARALLEL_ELEMENTS, rotate_task, &r);
  return ENG_OK;
}
