// Reference kernel of msamp_fp4. It sorts each row, searches the table of e2m1 numbers for the
// nearest, and works in f64. The fast kernels must agree with it bit for bit, except for the
// payload of a NaN amax. See reference.h, ops.def. Called through reference.c.
#include "reference_side.h"

#include "base/msamp_fp4.h"

#include <math.h>
#include <stdlib.h>

static const double e2m1[] = {-6, -4, -3, -2, -1.5, -1, -.5, 0, .5, 1, 1.5, 2, 3, 4, 6};
enum { NUMBERS = sizeof e2m1 / sizeof *e2m1 };

static int ascending(const void *a, const void *b)
{
  double x = *(const double *)a, y = *(const double *)b;
  return x != x ? y == y : y != y ? -1 : (x > y) - (x < y);
}

static double nearest(double t)
{
  double best = e2m1[0];
  if (!isfinite(t)) return t;
  t = fmax(fmin(t, 6), -6);
  for (int k = 1; k < NUMBERS; k++)
    if (fabs(e2m1[k] - t) <= fabs(best - t)) best = e2m1[k];
  return best;
}

static double slope_of(double t)
{
  int k = 0;
  if (!(fabs(t) <= 6)) return 0;
  while (k + 2 < NUMBERS && e2m1[k + 1] <= t) k++;
  double step = e2m1[k + 1] - e2m1[k];
  return fmin(pow(fabs(2 * (t - e2m1[k]) / step - 1), -0.8) / 5, 3);
}

eng_status reference_msamp_fp4(const op_call *call)
{
  const tensor *x = call->in[0];
  const typeof(call->msamp_fp4) *a = &call->msamp_fp4;
  int64_t rows = row_count(x), K = row_length(x);
  side of = {.call = call, .rows = rows, .columns = K, .row = K, .column = 1};
  *(float *)call->out[2]->data = block_amax(&of, 0, rows, 0, K, true);
  SCRATCH(double, v, 2 * K);
  double *sorted = v + K;
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t c = 0; c < K; c++) sorted[c] = v[c] = bf16_to_f32(bf16_from_f32(x_at(&of, r, c)));
    qsort(sorted, (size_t)K, sizeof *v, ascending);
    double least = K ? sorted[0] : 0, most = K ? sorted[K - 1] : 0, amax;
    if (a->clamp != 0 && K) {
      least = sorted[(int64_t)((1 - a->clamp) * (double)K)];
      most = sorted[(int64_t)(a->clamp * (double)K)];
    }
    amax = most != most ? most : fmax(fabs(least), fabs(most));
    int e = 0;
    if (amax != 0 && isfinite(amax)) {
      double part = frexp(amax / 6, &e);   // amax / 6 = part * 2^e, 0.5 <= part < 1
      e -= part <= 0.5;
      if (e < -127) e = -127;
    }
    ((uint8_t *)call->out[1]->data)[r] = (uint8_t)(e + 127);
    for (int64_t c = 0; c < K; c++) {
      double within = v[c] < least ? least : v[c] > most ? most : v[c], t = ldexp(within, -e),
             cut = a->drops || v[c] == within ? 0 : bf16_to_f32(bf16_from_f64(v[c] - within));
      store_at(call->out[0], r * K + c, ldexp(nearest(t), e) + cut);
      if (a->gate)
        store_at(call->out[3], r * K + c, slope_of(bf16_to_f32(bf16_from_f64(t))));
    }
  }
  return ENG_OK;
}
