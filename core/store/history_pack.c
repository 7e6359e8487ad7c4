// Gradient statistics as compact blobs. A blob begins with a version byte and the number of
// tensors. For each tensor it has five counts as variable-length numbers (7 bits per byte, low bits
// first), amax and sum of squares as doubles, and the histogram: the first bin, the number of bins,
// and their counts. Since version 2, relative scale and reference norm follow as doubles. A tensor
// takes about 45 bytes without a histogram.
// Called by history.c, and by Lua to unpack.
#include "base/error.h"
#include "history.h"

#include <string.h>

enum {
  PACK_VERSION = 2,
  NUMBER_MOST = 10,    // bytes of a variable-length number
  // the five counts, four doubles, and the histogram: first bin, number of bins and their counts
  TENSOR_MOST = 5 * NUMBER_MOST + 32 + 2 * NUMBER_MOST + ENG_HIST_BINS * NUMBER_MOST
};

static uint8_t *put_number(uint8_t *to, uint64_t value)
{
  for (; value >= 128; value >>= 7) *to++ = (uint8_t)(value | 128);
  *to++ = (uint8_t)value;
  return to;
}

static uint8_t *put_double(uint8_t *to, double value)
{
  memcpy(to, &value, 8);
  return to + 8;
}

static uint8_t *put_hist(uint8_t *to, const int64_t *hist)
{
  int first = 0, end = ENG_HIST_BINS;
  while (end > 0 && hist[end - 1] == 0) end--;
  while (first < end && hist[first] == 0) first++;
  to = put_number(to, (uint64_t)first);
  to = put_number(to, (uint64_t)(end - first));
  for (int b = first; b < end; b++) to = put_number(to, (uint64_t)hist[b]);
  return to;
}

int64_t history_pack_bound(int n) { return 1 + NUMBER_MOST + (int64_t)n * TENSOR_MOST; }

int64_t history_pack(uint8_t *blob, const eng_tensor_stats *stats, int n)
{
  uint8_t *to = blob;
  *to++ = PACK_VERSION;
  to = put_number(to, (uint64_t)n);
  for (int i = 0; i < n; i++) {
    const eng_tensor_stats *s = &stats[i];
    to = put_number(to, (uint64_t)s->count);
    to = put_number(to, (uint64_t)s->inf);
    to = put_number(to, (uint64_t)s->nan);
    to = put_number(to, (uint64_t)s->zeros);
    to = put_number(to, (uint64_t)s->underflow);
    to = put_double(to, s->amax);
    to = put_double(to, s->sum_squares);
    to = put_hist(to, s->hist);
    to = put_double(to, s->relative_scale);
    to = put_double(to, s->norm_ref);
  }
  return to - blob;
}

typedef struct reader { const uint8_t *now, *end; bool bad; } reader;

static int64_t get_number(reader *from)
{
  uint64_t value = 0;
  for (int shift = 0; shift < 63; shift += 7) {
    if (from->now == from->end) break;
    uint8_t byte = *from->now++;
    value |= (uint64_t)(byte & 127) << shift;
    if (byte < 128) return (int64_t)value;
  }
  from->bad = true;
  return 0;
}

static double get_double(reader *from)
{
  double value = 0;
  if (from->end - from->now < 8) {
    from->bad = true;
    return 0;
  }
  memcpy(&value, from->now, 8);
  from->now += 8;
  return value;
}

static void get_tensor(reader *from, eng_tensor_stats *s, int version)
{
  memset(s, 0, sizeof *s);
  s->count = get_number(from);
  s->inf = get_number(from);
  s->nan = get_number(from);
  s->zeros = get_number(from);
  s->underflow = get_number(from);
  s->amax = get_double(from);
  s->sum_squares = get_double(from);
  int64_t first = get_number(from), bins = get_number(from);
  if (first > ENG_HIST_BINS || bins > ENG_HIST_BINS - first) from->bad = true;
  for (int64_t b = 0; b < bins && !from->bad; b++) s->hist[first + b] = get_number(from);
  if (version < 2) return;
  s->relative_scale = get_double(from);
  s->norm_ref = get_double(from);
}

eng_status eng_history_unpack(int *n, eng_tensor_stats *stats, int capacity, const void *blob,
                              int64_t size)
{
  reader from = { blob, (const uint8_t *)blob + size, false };
  *n = 0;
  int version = size < 2 ? 0 : *from.now++;
  FAIL_IF(version < 1 || version > PACK_VERSION, ENG_ERR_FORMAT,
          "history: the statistics of a step have version %d, expected 1 to %d; hint: is the file "
          "damaged, or from a newer engine?", version, PACK_VERSION);
  int64_t count = get_number(&from);
  if (count > size) from.bad = true;           // a tensor takes more than a byte
  for (int64_t i = 0; i < count && !from.bad; i++) {
    eng_tensor_stats scratch;
    get_tensor(&from, i < capacity ? &stats[i] : &scratch, version);
  }
  FAIL_IF(from.bad || from.now != from.end, ENG_ERR_FORMAT,
          "history: the statistics of a step are damaged");
  *n = (int)count;
  return ENG_OK;
}
