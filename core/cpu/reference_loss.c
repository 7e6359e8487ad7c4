// Reference kernels for losses: cross entropy (with label smoothing, an ignored target, a soft cap
// of the logits and a z-loss) and its gradient; the mean squared error. See reference.h.
//
// Edge cases: an infinite largest logit makes its row NaN (inf - inf). Rows whose target is ignored
// have loss 0 and gradient 0 whatever their logits are; their lse is still computed. Called through
// reference.c.
#include "reference.h"

#include <math.h>

// Checks every target, and sets *counted to the number of rows that are not ignored.
static eng_status count_targets(int64_t *counted, const op_call *call)
{
  const tensor *targets = call->in[1];
  int64_t rows = row_count(call->in[0]), last = row_length(call->in[0]) - 1,
          ignored = call->cross_entropy.ignore;
  *counted = 0;
  for (int64_t r = 0; r < rows; r++) {
    int64_t t = load_int_at(targets, r);
    if (t == ignored) continue;
    FAIL_IF(t < 0 || t > last, ENG_ERR_VALUE, "%s: expected targets in 0..%lld (or %lld, "
            "ignored), got %lld at row %lld of %s; hint: does the vocabulary of the data fit the "
            "model?", eng_op_name(call->op), (long long)last, (long long)ignored, (long long)t,
            (long long)r + 1, tensor_text(targets));
    ++*counted;
  }
  return ENG_OK;
}

// Replaces n logits x by cap * tanh(x / cap), and stores the derivatives in `slopes` unless that is
// NULL. A cap of 0 leaves x unchanged.
static void apply_cap(double *x, double *slopes, int64_t n, double cap)
{
  for (int64_t i = 0; i < n; i++) {
    double t = cap > 0 ? tanh(x[i] / cap) : 0.0, u = cap > 0 ? cosh(x[i] / cap) : 1.0;
    if (cap > 0) x[i] = cap * t;
    if (slopes) slopes[i] = u != u ? u : 1.0 / (u * u);
  }
}

// Computes a row's loss from its capped logits x:
//   (1 - smoothing) * (lse - x[target]) + smoothing * (mean over v of lse - x[v]) + z_loss * lse^2
eng_status reference_cross_entropy(const op_call *call)
{
  const tensor *logits = call->in[0];
  int64_t rows = row_count(logits), classes = row_length(logits), counted,
          mode = call->cross_entropy.reduction, ignored = call->cross_entropy.ignore;
  double smoothing = call->cross_entropy.smoothing, z_loss = call->cross_entropy.z_loss,
         total = 0.0;
  ENG_TRY(count_targets(&counted, call));
  VALUES(x, logits);
  ZEROS(double, losses, rows);
  ZEROS(double, lses, rows);
  apply_cap(x, NULL, rows * classes, call->cross_entropy.soft_cap);
  for (int64_t r = 0; r < rows; r++) {
    const double *row = x + r * classes;
    lses[r] = row_logsumexp(row, classes);
    int64_t target = load_int_at(call->in[1], r);
    if (target == ignored) continue;
    losses[r] = (1.0 - smoothing) * (lses[r] - row[target]);
    if (z_loss > 0) losses[r] += z_loss * lses[r] * lses[r];
    for (int64_t v = 0; smoothing > 0 && v < classes; v++)
      losses[r] += smoothing * (lses[r] - row[v]) / (double)classes;
    total += losses[r];
  }
  if (mode == 1) total /= (double)counted;   // the mean over no rows is NaN: 0 / 0
  values_store(call->out[0], mode ? &total : losses, false);
  values_store(call->out[1], lses, false);
  return ENG_OK;
}

// Computes dlogits = slope * slopes *
//   ((1 + 2 z_loss lse) softmax - (1 - smoothing) onehot - smoothing / classes).
// `slope` is dloss or, for the mean, dloss / the number of counted rows. `slopes` holds the
// derivatives of the cap.
eng_status reference_cross_entropy_grad(const op_call *call)
{
  const tensor *logits = call->in[0];
  int64_t rows = row_count(logits), classes = row_length(logits), counted,
          mode = call->cross_entropy.reduction, ignored = call->cross_entropy.ignore;
  double smoothing = call->cross_entropy.smoothing, z_loss = call->cross_entropy.z_loss;
  ENG_TRY(count_targets(&counted, call));
  VALUES(x, logits);
  VALUES(dloss, call->in[3]);
  ZEROS(double, slopes, rows * classes);
  apply_cap(x, slopes, rows * classes, call->cross_entropy.soft_cap);
  for (int64_t r = 0; r < rows; r++) {
    double *row = x + r * classes, lse = row_logsumexp(row, classes);
    double weight = z_loss > 0 ? 1.0 + 2.0 * z_loss * lse : 1.0;
    double slope = mode == 0 ? dloss[r] : mode == 1 ? dloss[0] / (double)counted : dloss[0];
    int64_t target = load_int_at(call->in[1], r);
    for (int64_t v = 0; v < classes; v++) {
      double wanted = (v == target ? 1.0 - smoothing : 0.0) + smoothing / (double)classes;
      row[v] = target == ignored ? 0.0 :
        (exp(row[v] - lse) * weight - wanted) * slope * slopes[r * classes + v];
    }
  }
  values_store(call->out[0], x, false);
  return ENG_OK;
}

eng_status reference_mse(const op_call *call)
{
  VALUES(a, call->in[0]);
  VALUES(b, call->in[1]);
  int64_t n = call->in[0]->count;
  double sum = 0.0;
  for (int64_t i = 0; i < n; i++) sum += (a[i] - b[i]) * (a[i] - b[i]);
  sum /= (double)n;
  values_store(call->out[0], &sum, false);
  return ENG_OK;
}
