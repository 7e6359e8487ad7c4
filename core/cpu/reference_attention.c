// Reference kernels for attention, its gradient, and rotary position embedding. They compute the
// whole row of probabilities in double and do not use results that the forward pass saved. See
// reference.h.
//
// Edge cases: a query without visible keys has y = 0, lse = -inf and entropy 0, and gives no
// gradient to k and v. y and lse of a row are NaN if a score is +inf or NaN, or if all scores are
// -inf. In other rows, a score of -inf has weight 0. Called through reference.c.
#include "reference.h"

#include <math.h>

#include "base/rope.h"

// Sizes of a call: q [B x T x H x D], k and v [B x S x G x D]; H / G query heads share a key head.
typedef struct sizes {
  int64_t batch, queries, keys, heads, groups, width;
  double  factor;
  bool    causal;
} sizes;

static sizes sizes_of(const op_call *call)
{
  const tensor *q = call->in[0], *k = call->in[1];
  sizes s = {q->shape[0], q->shape[1], k->shape[1],     q->shape[2],
             k->shape[2], q->shape[3], call->attention.scale, call->attention.causal != 0};
  if (s.factor == 0.0) s.factor = 1.0 / sqrt((double)s.width);
  return s;
}

// Returns the index of the first element of head h at time t in a dense [B x times x heads x D].
static int64_t vector_at(const sizes *s, int64_t times, int64_t heads, int64_t b, int64_t t,
                         int64_t h)
{ return ((b * times + t) * heads + h) * s->width; }

static int64_t keys_seen(const sizes *s, int64_t t)
{
  if (!s->causal) return s->keys;
  int64_t seen = t + s->keys - s->queries + 1;
  return seen < 0 ? 0 : seen;
}

static double dot(const double *a, const double *b, int64_t n)
{
  double sum = 0.0;
  for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
  return sum;
}

// Computes the scaled scores of one query against the first `seen` keys.
static void scores_of(double *scores, const sizes *s, const double *query, const double *k,
                      int64_t b, int64_t group, int64_t seen)
{
  for (int64_t j = 0; j < seen; j++)
    scores[j] = s->factor * dot(query, k + vector_at(s, s->keys, s->groups, b, j, group), s->width);
}

eng_status reference_attention(const op_call *call)
{
  sizes s = sizes_of(call);
  int64_t rows = s.batch * s.heads * s.queries;
  const bool entropy = call->attention.entropy == ENG_ROW_ENTROPY;
  VALUES(q, call->in[0]);
  VALUES(k, call->in[1]);
  VALUES(v, call->in[2]);
  ZEROS(double, y, call->out[0]->count);
  ZEROS(double, scores, s.keys);
  ZEROS(double, lse, rows);
  ZEROS(double, extra, rows);
  int64_t row = 0;
  for (int64_t b = 0; b < s.batch; b++)
    for (int64_t h = 0; h < s.heads; h++)
      for (int64_t t = 0; t < s.queries; t++, row++) {
        int64_t group = h / (s.heads / s.groups), seen = keys_seen(&s, t),
                at = vector_at(&s, s.queries, s.heads, b, t, h);
        scores_of(scores, &s, q + at, k, b, group, seen);
        lse[row] = row_logsumexp(scores, seen);
        if (!entropy) extra[row] = -INFINITY;
        for (int64_t j = 0; j < seen; j++) {
          double p = exp(scores[j] - lse[row]);
          const double *value = v + vector_at(&s, s.keys, s.groups, b, j, group);
          for (int64_t d = 0; d < s.width; d++) y[at + d] += p * value[d];
          if (entropy) extra[row] += p == 0.0 ? 0.0 : p * (lse[row] - scores[j]);
          else if (scores[j] > extra[row]) extra[row] = scores[j];
        }
      }
  values_store(call->out[0], y, false);
  values_store(call->out[1], lse, false);
  if (call->attention.entropy) values_store(call->out[2], extra, false);
  return ENG_OK;
}

// p = softmax(scores), dp = dy . v, dscore = factor * p * (dp - sum of p * dp)
// dq = sum of dscore * k, dk = sum of dscore * q, dv = sum of p * dy
eng_status reference_attention_grad(const op_call *call)
{
  sizes s = sizes_of(call);
  VALUES(q, call->in[0]);
  VALUES(k, call->in[1]);
  VALUES(v, call->in[2]);
  VALUES(dy, call->in[5]);
  ZEROS(double, dq, call->in[0]->count);
  ZEROS(double, dk, call->in[1]->count);
  ZEROS(double, dv, call->in[2]->count);
  ZEROS(double, p, s.keys);
  ZEROS(double, dp, s.keys);
  for (int64_t b = 0; b < s.batch; b++)
    for (int64_t h = 0; h < s.heads; h++)
      for (int64_t t = 0; t < s.queries; t++) {
        int64_t group = h / (s.heads / s.groups), seen = keys_seen(&s, t),
                at = vector_at(&s, s.queries, s.heads, b, t, h);
        scores_of(p, &s, q + at, k, b, group, seen);
        double lse = row_logsumexp(p, seen), sum = 0.0;
        for (int64_t j = 0; j < seen; j++) {
          p[j] = exp(p[j] - lse);
          dp[j] = dot(dy + at, v + vector_at(&s, s.keys, s.groups, b, j, group), s.width);
          sum += p[j] * dp[j];
        }
        for (int64_t j = 0; j < seen; j++) {
          int64_t key = vector_at(&s, s.keys, s.groups, b, j, group);
          double dscore = s.factor * p[j] * (dp[j] - sum);
          for (int64_t d = 0; d < s.width; d++) {
            dq[at + d] += dscore * k[key + d];
            dk[key + d] += dscore * q[at + d];
            dv[key + d] += p[j] * dy[at + d];
          }
        }
      }
  values_store(call->out[0], dq, false);
  values_store(call->out[1], dk, false);
  values_store(call->out[2], dv, false);
  return ENG_OK;
}

// Rotates pair i of every head at time t by the angle (first position + t) * frequency of pair i.
eng_status reference_rope(const op_call *call)
{
  const tensor *y = call->out[0];
  int64_t times = y->shape[1], heads = y->shape[2], width = y->shape[3], half = width / 2;
  bool neighbours = call->rope.interleaved != 0;   // pairs (2i, 2i + 1) instead of (i, i + D/2)
  double direction = call->rope.backward ? -1.0 : 1.0;
  rope_scaling scaling = {call->rope.base, call->rope.factor, call->rope.low, call->rope.high,
                          call->rope.context};
  VALUES(x, call->in[0]);
  for (int64_t row = 0; row < y->shape[0] * times; row++) {
    double position = (double)(call->rope.position + row % times);
    for (int64_t i = 0; i < half; i++) {
      double angle = direction * position * rope_frequency(&scaling, i, half),
             c = cos(angle), s = sin(angle);
      for (int64_t h = 0; h < heads; h++) {
        double *head = x + (row * heads + h) * width;
        double *first = head + (neighbours ? 2 * i : i),
               *second = head + (neighbours ? 2 * i + 1 : i + half);
        double a = *first, b = *second;
        *first = a * c - b * s;
        *second = b * c + a * s;
      }
    }
  }
  values_store(y, x, false);
  return ENG_OK;
}
