// The operation msamp_fp4. Called through backend.kernel[]; owns the table of slopes, and scratch
// during a call. A task takes one row. f64 goes to the reference kernel.
#include "base/msamp_fp4.h"
#include "base/mx.h"
#include "magnitude.h"
#include "rows.h"
#include "simd.h"
#include "tasks.h"

#include <pthread.h>

enum { SLOPES = 0x40C0 + 1 };         // one for each bf16 number from 0 to 6
static uint16_t slope[SLOPES];        // msamp_slope in bf16; the index is a bf16 number's bits
static pthread_once_t slopes_once = PTHREAD_ONCE_INIT;

static void fill_slopes(void)
{
  for (int i = 0; i < SLOPES; i++) slope[i] = bf16_from_f32(msamp_slope(bf16_to_f32((uint16_t)i)));
}

typedef struct job {
  const op_call *call;
  int64_t   columns;
  uint32_t *top;             // [rows]: the bits of the largest magnitude in each row of x
} job;

/// Returns the number that would have index `rank` (from 0) if `order` [n] were sorted.
static uint16_t ranked(const uint16_t *order, int64_t n, int64_t rank)
{
  uint32_t found = 0;        // the largest value tried so far with at most `rank` numbers below it
  for (int bit = 15; bit >= 0; bit--) {
    uint32_t next = found | 1u << bit, below = 0;
    for (int64_t i = 0; i < n; i++) below += order[i] < next;
    if (below <= rank) found = next;
  }
  return (uint16_t)found;
}

static void row_task(const void *context, int64_t row)
{
  const job *p = context;
  const typeof(p->call->msamp_fp4) *a = &p->call->msamp_fp4;
  const tensor *x = p->call->in[0];
  int64_t n = p->columns, at = row * n;
  uint16_t *y = (uint16_t *)p->call->out[0]->data + at,       // holds msamp_order(x) at first
           *gate = a->gate ? (uint16_t *)p->call->out[3]->data + at : NULL,
           least = 0xFFFF, most = 0;
  p->top[row] = largest_magnitude(x->data, x->dtype, at, n);
  for (int64_t i = 0; i < n; i++) {
    y[i] = msamp_order(bf16_from_f32(get(x->data, x->dtype, at + i)));
    least = y[i] < least ? y[i] : least;
    most = y[i] > most ? y[i] : most;
  }
  if (a->clamp != 0) {
    least = ranked(y, n, msamp_rank(a->clamp, n, 0));
    most = ranked(y, n, msamp_rank(a->clamp, n, 1));
  }
  float low = msamp_ordered(least), high = msamp_ordered(most), under = fabsf(low),
        amax = under > fabsf(high) ? under : fabsf(high);
  uint8_t scale = msamp_scale(amax);
  ((uint8_t *)p->call->out[1]->data)[row] = scale;
  float factor = mx_inverse(scale), unit = ue8m0_to_f32(scale);
  for (int64_t i = 0; i < n; i++) {
    float v = msamp_ordered(y[i]), c = msamp_within(v, low, high), t = c * factor;
    y[i] = bf16_from_f32(msamp_round(t) * unit + (a->drops ? 0 : msamp_cut(v, c)));
    uint16_t size = bf16_from_f32(fabsf(t));
    if (gate) gate[i] = size < SLOPES ? slope[size] : 0;
  }
}

KERNEL(msamp_fp4)
{
  const tensor *x = call->in[0];
  if (!dtype_is_fast(x->dtype) || x->count == 0) return forward_to_reference(call);
  int64_t rows = row_count(x);
  SCRATCH(uint32_t, tops, rows);
  job p = {.call = call, .columns = row_length(x), .top = tops};
  if (call->msamp_fp4.gate) pthread_once(&slopes_once, fill_slopes);
  run_tasks(rows, x->count >= PARALLEL_ELEMENTS, row_task, &p);
  uint32_t top = 0;
  for (int64_t r = 0; r < rows; r++) top = tops[r] > top ? tops[r] : top;
  *(float *)call->out[2]->data = top > 0x7F800000u ? f32_from(0x7FC00000u) : f32_from(top);
  return ENG_OK;
}
