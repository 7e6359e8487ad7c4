// The step's record over all ranks, and the gathering of updated weights.
//
// Each rank has the statistics of its own pieces. One message reduces them to the same record on
// every rank. It carries numbers to sum: each tensor's counts and sums (record.def), the
// histogram if it is needed, and the caller's `sums`. It also carries numbers whose maximum is
// taken: each tensor's maxima, the caller's `maxima` and, for each parameter that only some ranks
// hold (`apart`), whether it has a gradient. The message is sent in every step, even after an
// overflow. Called by Lua.
#include "comm_gradients.h"

#include "device/backend.h"
#include "base/error.h"
#include "params/params_parted.h"
#include "device/transfer.h"

#include <stdlib.h>
#include <string.h>

#define ENG_COUNT(member)      + 1
#define ENG_SUM(member, power) + 1
enum { SUMS_OF_TENSOR = 0
#include "record.def"
};
#define ENG_MAXIMUM(member, power) + 1
enum { MAXIMA_OF_TENSOR = 0
#include "record.def"
};

eng_status eng_parallel_stats(eng_record *record, eng_tensor_stats *stats, eng_parallel *p,
                              double scale, unsigned needs, double *sums, int n_sums,
                              double *maxima, int n_maxima)
{
  eng_params *set = p->set;
  bool hist = needs & ENG_NEED_HIST;
  // the 1: for a parameter in `apart`
  int64_t n = set->n, most = n * (SUMS_OF_TENSOR + MAXIMA_OF_TENSOR + 1) + ENG_HIST_BINS + n_sums +
                             n_maxima;
  if (most > p->n_numbers) {
    free(p->numbers);
    p->numbers = malloc((size_t)most * sizeof *p->numbers);
    p->n_numbers = p->numbers ? most : 0;
    FAIL_IF(!p->numbers, ENG_ERR_MEMORY,
            "out of memory for the record of %lld parameters", (long long)n);
  }
  ENG_TRY(params_own_stats(stats, set, needs));
  double *at = p->numbers, total[ENG_HIST_BINS] = {0};
  for (int i = 0; i < n; i++) {
    const eng_tensor_stats *s = &stats[i];
#define ENG_COUNT(member)      *at++ = (double)s->member;
#define ENG_SUM(member, power) *at++ = s->member;
#include "record.def"
    for (int b = 0; hist && b < ENG_HIST_BINS; b++) total[b] += (double)s->hist[b];
  }
  if (hist) at = (double *)memcpy(at, total, sizeof total) + ENG_HIST_BINS;
  memcpy(at, sums, (size_t)n_sums * sizeof *sums);
  at += n_sums;
  int all_sums = (int)(at - p->numbers);
  for (int i = 0; i < n; i++) {
#define ENG_MAXIMUM(member, power) *at++ = stats[i].member;
#include "record.def"
  }
  memcpy(at, maxima, (size_t)n_maxima * sizeof *maxima);
  at += n_maxima;
  // Only the ranks that hold a parameter in `apart` know whether it has a gradient. The maximum
  // over all ranks tells the other ranks.
  for (int i = 0; i < n; i++)
    if (p->apart[i]) *at++ = set->member[i].has_gradient;
  double began = eng_clock();
  ENG_TRY(comm_reduce_both(p->comm, p->numbers, all_sums, (int)(at - p->numbers) - all_sums,
                           "the record of a step"));
  p->facts.record = eng_clock() - began;
  at = p->numbers + all_sums + n * MAXIMA_OF_TENSOR + n_maxima;
  for (int i = 0; i < n; i++)
    if (p->apart[i]) set->member[i].has_gradient = *at++ != 0;

  at = p->numbers;
  const double *largest = p->numbers + all_sums;
  for (int i = 0; i < n; i++) {
    eng_tensor_stats *s = &stats[i];
#define ENG_COUNT(member)          s->member = (int64_t)*at++;
#define ENG_SUM(member, power)     s->member = *at++;
#define ENG_MAXIMUM(member, power) s->member = *largest++;
#include "record.def"
  }
  params_total(record, set, stats, scale, needs & ~(unsigned)ENG_NEED_HIST);
  for (int b = 0; hist && b < ENG_HIST_BINS; b++) record->hist[b] = (int64_t)*at++;
  memcpy(sums, at, (size_t)n_sums * sizeof *sums);
  memcpy(maxima, largest, (size_t)n_maxima * sizeof *maxima);
  return ENG_OK;
}

eng_status eng_parallel_gather_flags(eng_parallel *p)
{
  if (!p->holders) return ENG_OK;
  const uint8_t *own = p->rank_flags + (int64_t)p->comm->rank * p->set->n;
  return eng_comm_all_gather(p->comm, p->rank_flags, own, p->set->n);
}

eng_status eng_parallel_histograms(eng_tensor_stats *stats, eng_parallel *p)
{
  for (int i = 0; i < p->set->n; i++)
    ENG_TRY(eng_comm_all_reduce(p->comm, stats[i].hist, ENG_HIST_BINS, ENG_i64, ENG_SUM));
  return ENG_OK;
}

// ------------------------------------------------------------------ pieces of weights

/// Sends this rank's piece of member `index` to every other rank that holds the member, and
/// receives the pieces of these ranks. `value`: all elements of the member, in host memory or, with
/// `cards`, in device memory. Messages from device memory are only enqueued.
static eng_status exchange_pieces(eng_parallel *p, int index, char *value, const char *what)
{
  eng_comm *comm = p->buckets[p->bucket_of[index]].comm;
  int n = piece_messages(p->messages, &p->facts.weight_messages, &p->facts.weight_bytes, p, index,
                         value, p->set->member[index].value->dtype, 0);
  return p->cards ? comm_stream_exchange(STREAM_GRADIENTS, comm, p->messages, n, what)
                  : comm_exchange(comm, p->messages, n, comm_tag(comm), what);
}

eng_status eng_parallel_gather(eng_parallel *p)
{
  static const char what[] = "the updated weights";
  eng_params *set = p->set;
  double began = eng_clock();
  const bool staged = set->space != SPACE_HOST && !p->cards;
  if (p->cards)
    ENG_TRY(backend_of_space(set->space)->stream_follow(comm_stream_of(STREAM_GRADIENTS)));
  for (int i = 0; i < set->n; i++) {
    parameter *member = &set->member[i];
    if (!member->has_gradient) continue;          // not updated in this step
    params_written(member);
    if (set->parted && !p->apart[i]) continue;    // other ranks fetch the weight when they use it
    char *value = member->value->data;
    int64_t bytes = member->value->count * eng_dtype_size(member->value->dtype);
    if (staged) ENG_TRY(transfer_to_host(p->values, set->space, value, bytes));
    ENG_TRY(exchange_pieces(p, i, staged ? (char *)p->values : value, what));
    if (staged) ENG_TRY(transfer_from_host(set->space, value, p->values, bytes));
  }
  if (p->cards) ENG_TRY(comm_stream_wait(STREAM_GRADIENTS, what));
  if (set->parted && !p->holders) return params_leave(set);
  p->facts.weights = eng_clock() - began;
  return eng_params_refresh(set);
}
