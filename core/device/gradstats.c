// Sums the per-tensor statistics of a gradient pass into the step's record, and computes the same
// statistics of one tensor (eng_stats). Also defines the names of a verdict's actions. Called by
// params/ after a pass, and by policy/, store/ and Lua.
#include "gradstats.h"

#include "backend.h"
#include "base/error.h"

#include <math.h>
#include <string.h>

void gradstats_sum(eng_record *record, const eng_tensor_stats *stats, int n, double scale,
                   unsigned needs)
{
#define ENG_COUNT(member)          record->member = 0;
#define ENG_SUM(member, power)     double member = 0;
#define ENG_MAXIMUM(member, power) double member = 0;
#include "record.def"
  record->first_bad = -1;
  memset(record->hist, 0, sizeof record->hist);
  for (int k = 0; k < n; k++) {
    const eng_tensor_stats *s = &stats[k];
    // the divisions are exact if the relative scale is a power of two and nothing overflows or
    // underflows
    double relative = gradstats_relative_scale(s);
#define ENG_COUNT(member)          record->member += s->member;
#define ENG_SUM(member, power)     member += OVER_##power(s->member, relative);
#define ENG_MAXIMUM(member, power) member = fmax(member, OVER_##power(s->member, relative));
#include "record.def"
    if (record->first_bad < 0 && s->inf + s->nan > 0) record->first_bad = k;
    if (needs & ENG_NEED_HIST)
      for (int b = 0; b < ENG_HIST_BINS; b++) record->hist[b] += s->hist[b];
  }
  record->overflow = record->inf + record->nan > 0;
  record->amax = amax / scale;
  record->norm = sqrt(sum_squares) / scale;
}

eng_status eng_stats(eng_tensor_stats *out, const eng_tensor *handle, unsigned needs)
{
  tensor *x;
  ENG_TRY(tensor_get(&x, handle));
  FAIL_IF(x->dtype != ENG_f32 && x->dtype != ENG_f16 && x->dtype != ENG_bf16, ENG_ERR_DTYPE,
          "stats: expected a tensor in f32, f16 or bf16, got %s; hint: x:to('f32')",
          tensor_text(x));
  FAIL_IF(!tensor_contiguous(x), ENG_ERR_VALUE,
          "stats: expected a contiguous tensor, got a view %s; hint: x:contiguous()",
          tensor_text(x));
  param_span span = {.name = "x", .count = x->count, .gradient = x->data,
                     .gradient_dtype = x->dtype, .scale = 1};
  memset(out, 0, sizeof *out);
  return backend_of_space(x->store->space)->gradstats(&span, 1, needs, out);
}

static const char *const actions[ENG_ACTIONS] = {"step", "skip", "retry", "stop", "rollback"};

const char *eng_action_name(int action)
{ return action >= 0 && action < ENG_ACTIONS ? actions[action] : "?"; }

int eng_action_from_name(const char *name)
{
  for (int i = 0; i < ENG_ACTIONS; i++)
    if (strcmp(actions[i], name) == 0) return i;
  return -1;
}
