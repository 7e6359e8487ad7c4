// Losses: cross entropy over the last dimension, its gradient, and the mean squared error.
//
// Cross entropy reads the logits once. Each thread keeps a maximum and the sum of exponentials
// relative to it, which is rescaled when the maximum grows. Probabilities are never stored. The
// gradient reads the logits once and writes each result once, except the target's, which is written
// twice. A warp processes a short row, a block a long row. The results of rows are summed in double
// in a fixed order.
//
// NaN and Inf are handled as in core/cpu/reference_loss.c: an infinite largest logit makes its row
// NaN. A target out of range raises the fault. Called through the device's table.
#include "kernel/element.h"
#include "kernel/ptx.h"
#include "kernel/team.h"
#include "kernel/vector.h"

#include <math.h>

enum {
  THREADS = 256,
  BATCH = 4 /* accesses that a thread has in flight */,
  SHORT_ROW = 1024,
  SUM_THREADS = 1024
};

// ------------------------------------------------------------------ rows

// The type of the arithmetic on a row of T.
template <typename T> struct wide_of { typedef float type; };
template <> struct wide_of<double>   { typedef double type; };

/// Returns exp(d) for d <= 0. In f32 the relative error grows with |d|, but the result's
/// contribution to a sum shrinks accordingly.
__device__ static inline float  below_one(float d)  { return exp2_fast(d * 1.4426950408889634f); }
__device__ static inline double below_one(double d) { return exp(d); }

__device__ static inline float  tangent(float x)   { return tanhf(x); }
__device__ static inline double tangent(double x)  { return tanh(x); }

/// A soft cap of logits, cap * tanh(x / cap). If CAPPED is false, there is no cap.
template <typename A> struct soft_cap { A cap, inverse; };

template <bool CAPPED, typename A> __device__ static inline A capped(A x, soft_cap<A> c)
{ return CAPPED ? c.cap * tangent(x * c.inverse) : x; }

/// Returns the cap's derivative, 1 - tanh(x / cap)^2, without cancellation: 4 z / (1 + z)^2 with
/// z = exp(-2|x / cap|).
template <bool CAPPED, typename A> __device__ static inline A cap_slope(A x, soft_cap<A> c)
{
  if (!CAPPED) return (A)1;
  const A u = x * c.inverse, z = exp_of(u < 0 ? 2 * u : -2 * u);
  return 4 * z / ((1 + z) * (1 + z));
}

/// A row of n elements: `head` elements before the first aligned address, `whole` aligned 16-byte
/// accesses, and the rest.
struct cut { int head, whole; };

template <typename T> __device__ static inline cut cut_of(const T *row, int n)
{
  cut c;
  c.head = min(n, (int)((16 - (uintptr_t)row % 16) % 16 / sizeof(T)));
  c.whole = (n - c.head) / (int)(16 / sizeof(T));
  return c;
}

/// 16 bytes of a row.
template <typename T> union piece {
  uint4 raw;
  T     x[16 / sizeof(T)];
};

// ------------------------------------------------------------------ cross entropy

/// What a thread has accumulated from a row: `sum` is the sum of exp(x - top), or of exp(x) while
/// top is -inf.
template <typename A> struct seen {
  A top, sum;
  double plain;   // sum of x, for label smoothing
};

template <int N, bool PLAIN, typename A>
__device__ static inline void absorb(seen<A> &s, const A x[N])
{
  A largest = x[0];
  for (int k = 1; k < N; k++) largest = larger(largest, x[k]);
  if (largest > s.top) {
    if (s.top != -(A)INFINITY) s.sum *= below_one(s.top - largest);
    s.top = largest;
  }
  A shift = s.top == -(A)INFINITY ? (A)0 : s.top, e[N];
  for (int k = 0; k < N; k++) e[k] = below_one(x[k] - shift);
  for (int half = N / 2; half > 0; half /= 2)
    for (int k = 0; k < half; k++) e[k] += e[k + half];
  s.sum += e[0];
  if (PLAIN)
    for (int k = 0; k < N; k++) s.plain += (double)x[k];
}

template <int LANES, bool PLAIN, bool CAPPED, typename T, typename A>
__device__ static inline seen<A> read_row(const T *row, int n, soft_cap<A> limit)
{
  enum { V = 16 / sizeof(T) };
  const cut c = cut_of(row, n);
  const uint4 *at = (const uint4 *)(row + c.head);
  const int lane = team<LANES>::rank();
  seen<A> s = {-(A)INFINITY, 0, 0};
  for (int i = lane; i < c.whole; i += BATCH * LANES) {
    piece<T> p[BATCH];
#pragma unroll
    for (int k = 0; k < BATCH; k++)
      if (i + k * LANES < c.whole) p[k].raw = __ldg(at + i + k * LANES);
#pragma unroll
    for (int k = 0; k < BATCH; k++) {
      if (i + k * LANES >= c.whole) break;
      A x[V];
      for (int e = 0; e < V; e++) x[e] = capped<CAPPED>((A)widen(p[k].x[e]), limit);
      absorb<V, PLAIN>(s, x);
    }
  }
  for (int i = lane; i < c.head; i += LANES) {
    A x[1] = {capped<CAPPED>((A)widen(row[i]), limit)};
    absorb<1, PLAIN>(s, x);
  }
  for (int i = c.head + c.whole * V + lane; i < n; i += LANES) {
    A x[1] = {capped<CAPPED>((A)widen(row[i]), limit)};
    absorb<1, PLAIN>(s, x);
  }
  return s;
}

template <int LANES, bool PLAIN, bool CAPPED, typename T>
__global__ static void __launch_bounds__(THREADS, sizeof(T) == 8 ? 2 : 4)
  row_losses(const T *logits, const void *targets, int target_dtype, int64_t rows, int classes,
             int64_t ignored, double smoothing, double z_loss, double cap, double *losses,
             void *loss, int loss_dtype, void *lse, int lse_dtype, cuda_fault_record *fault)
{
  typedef typename wide_of<T>::type A;
  const int64_t r = (int64_t)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
  if (r >= rows) return;
  const T *row = logits + r * classes;
  const int64_t target = element_int(targets, target_dtype, r);
  const bool counts = target != ignored && target >= 0 && target < classes;
  double own = 0.0, total = 0.0, top = 0.0, log_sum = 0.0;
  if (target != ignored && !counts && team<LANES>::rank() == 0)
    raise_fault(fault, ENG_OP_cross_entropy, target, classes);
  if (counts || lse) {
    const soft_cap<A> limit = {(A)cap, (A)(1 / cap)};
    const double wanted = counts ? (double)capped<CAPPED>((A)widen(row[target]), limit) : 0.0;
    seen<A> s = read_row<LANES, PLAIN, CAPPED>(row, classes, limit);
    A largest = team<LANES>::largest(s.top);
    if (s.top != -(A)INFINITY) s.sum *= exp_of(s.top - largest);
    double sum = team<LANES>::sum((double)s.sum);
    if (PLAIN) total = team<LANES>::sum(s.plain);
    if (team<LANES>::rank() != 0) return;
    log_sum = log(sum);
    top = (double)largest;
    if (!f64_is_finite(top)) top = f64_from(0x7FF8000000000000ull);   // NaN, as in PyTorch
    if (lse) element_store(lse, lse_dtype, r, top + log_sum);
    own = log_sum - (wanted - top);
    if (PLAIN)
      own = (1.0 - smoothing) * own + smoothing * (log_sum + top - total / (double)classes);
    if (z_loss != 0) own += z_loss * (top + log_sum) * (top + log_sum);
    if (!counts) own = 0.0;
  }
  if (team<LANES>::rank() != 0) return;
  if (losses) losses[r] = own;
  else if (loss) element_store(loss, loss_dtype, r, own);
}

/// Returns the sum over the block to thread 0, and parts of the sum to the others. The order is
/// fixed.
__device__ static inline double block_sum(double x)
{
  __shared__ double all[SUM_THREADS];
  all[threadIdx.x] = x;
  for (int half = SUM_THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if ((int)threadIdx.x < half) all[threadIdx.x] = x += all[threadIdx.x + half];
  }
  return x;
}

__device__ static inline double counted_targets(const void *targets, int dtype, int64_t rows,
                                                int64_t ignored)
{
  int64_t counted = 0;
  for (int64_t r = threadIdx.x; r < rows; r += SUM_THREADS)
    counted += element_int(targets, dtype, r) != ignored;
  return block_sum((double)counted);   // exact
}

/// Divides the sum of n numbers by the number of targets that are not ignored (NaN if all are
/// ignored) or, if `targets` is NULL, by `divisor`. Runs in one block.
__global__ static void __launch_bounds__(SUM_THREADS)
  divided_sum(const double *numbers, int64_t n, const void *targets, int target_dtype,
              int64_t ignored, double divisor, void *out, int dtype)
{
  double sum = 0.0;
  for (int64_t i = threadIdx.x; i < n; i += SUM_THREADS) sum += numbers[i];
  sum = block_sum(sum);
  __syncthreads();
  if (targets) divisor = counted_targets(targets, target_dtype, n, ignored);
  if (threadIdx.x == 0) element_store(out, dtype, 0, sum / divisor);
}

__global__ static void __launch_bounds__(SUM_THREADS)
count_rows(const void *targets, int target_dtype, int64_t rows, int64_t ignored, double *counted)
{
  double sum = counted_targets(targets, target_dtype, rows, ignored);
  if (threadIdx.x == 0) *counted = sum;
}

/// Finds how many rows and classes the logits have.
static eng_status shape_of(int64_t *rows, int *classes, const op_call *call)
{
  const tensor *x = call->in[0];
  int64_t n = x->shape[x->ndim - 1];
  FAIL_IF(n > INT32_MAX, ENG_ERR_SHAPE, "%s: expected at most 2^31 - 1 classes on cuda, got %lld",
          eng_op_name(call->op), (long long)n);
  *classes = (int)n;
  *rows = x->count / n;
  return ENG_OK;
}

/// Returns the number of blocks: a warp processes a short row, a block a long one.
static unsigned grid_of(int64_t rows, int classes)
{ return (unsigned)(classes <= SHORT_ROW ? parts(rows, THREADS / 32) : rows); }

template <typename T>
static void launch_losses(const op_call *call, int64_t rows, int classes, double *losses)
{
  const tensor *x = call->in[0], *targets = call->in[1], *loss = call->out[0], *lse = call->out[1];
  const double smoothing = call->cross_entropy.smoothing, cap = call->cross_entropy.soft_cap;
  const bool is_short = classes <= SHORT_ROW;
  // With a cap, only the kernel with label smoothing is compiled. At smoothing 0 it adds 0 times
  // the smoothing term, which is finite because capped logits are finite.
  auto kernel = cap > 0 ?
    (is_short ? row_losses<32, true, true, T> : row_losses<THREADS, true, true, T>) :
    smoothing != 0 ?
    (is_short ? row_losses<32, true, false, T> : row_losses<THREADS, true, false, T>) :
    (is_short ? row_losses<32, false, false, T> : row_losses<THREADS, false, false, T>);
  kernel<<<grid_of(rows, classes), THREADS, 0, cuda_stream()>>>(
    (const T *)x->data, targets->data, targets->dtype, rows, classes, call->cross_entropy.ignore,
    smoothing, call->cross_entropy.z_loss, cap, losses, data_of(loss), dtype_of(loss), data_of(lse),
    dtype_of(lse), cuda_fault());
}

extern "C" eng_status cuda_cross_entropy(const op_call *call)
{
  const tensor *x = call->in[0], *targets = call->in[1], *loss = call->out[0];
  int64_t rows = 0;
  int classes = 0, mode = (int)call->cross_entropy.reduction;
  ENG_TRY(shape_of(&rows, &classes, call));
  int64_t bytes = rows * (int64_t)sizeof(double);
  double *losses = NULL;
  if (mode != 0 && !(losses = (double *)scratch_take(bytes))) return ENG_ERR_MEMORY;
  if (rows > 0)
    with_format(x->dtype,
                [&](auto t) { launch_losses<decltype(t)>(call, rows, classes, losses); });
  if (mode != 0 && loss)
    divided_sum<<<1, SUM_THREADS, 0, cuda_stream()>>>(
      losses, rows, mode == 1 ? targets->data : NULL, targets->dtype, call->cross_entropy.ignore, 1,
      loss->data, loss->dtype);
  if (losses) scratch_give(losses, bytes);
  return cuda_launched("cross_entropy");
}

// ------------------------------------------------------------------ gradient of cross entropy

/// Like narrow_words of vector.h, for two doubles.
__device__ static inline void narrow_words(words<double, 2> &to, const double (&from)[2])
{ memcpy(to.w, from, sizeof to.w); }

template <int LANES, bool CAPPED, typename T>
__global__ static void __launch_bounds__(THREADS, sizeof(T) == 8 ? 2 : CAPPED ? 3 : 4)
  row_gradients(const T *logits, T *gradients, const void *targets, int target_dtype, int64_t rows,
                int classes, int64_t ignored, double smoothing, double z_loss, double cap,
                const void *lse, int lse_dtype, const void *dloss, int dloss_dtype, bool per_row,
                const double *counted, cuda_fault_record *fault)
{
  typedef typename wide_of<T>::type A;
  enum { V = 16 / sizeof(T) };
  const int64_t r = (int64_t)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
  if (r >= rows) return;
  const int lane = team<LANES>::rank();
  const T *row = logits + r * classes;
  T *out = gradients + r * classes;
  const int64_t target = element_int(targets, target_dtype, r);
  const bool counts = target != ignored && target >= 0 && target < classes;
  if (target != ignored && !counts && lane == 0)
    raise_fault(fault, ENG_OP_cross_entropy_grad, target, classes);

  // The slope is in double, so that a loss scale beyond f32 does not overflow if the division by
  // the count brings it back into range.
  double slope = element_double(dloss, dloss_dtype, per_row ? r : 0);
  if (counted) slope /= *counted;
  const double row_lse = element_double(lse, lse_dtype, r);
  const double weight = z_loss != 0 ? 1.0 + 2.0 * z_loss * row_lse : 1.0;
  const A log_sum = (A)row_lse, floor = (A)(smoothing / (double)classes), factor = (A)slope,
          share = (A)weight;
  const soft_cap<A> limit = {(A)cap, (A)(1 / cap)};
  auto gradient = [&](A x) -> A {
    const A p = exp_of(capped<CAPPED>(x, limit) - log_sum) * share;
    return (p - floor) * factor * cap_slope<CAPPED>(x, limit);
  };
  cut c = cut_of(out, classes);
  if (((uintptr_t)row - (uintptr_t)out) % 16 != 0) {   // 16-byte accesses cannot be aligned in both
    c.head = classes;
    c.whole = 0;
  }

  // The gradient of the target's logit loses digits to cancellation, so it is computed in double.
  // The thread that owns this element overwrites it after the loops.
  const int tail = c.head + c.whole * V, t = (int)target;
  const bool mine = counts && lane == (t < c.head ? t :
                                       t < tail   ? (t - c.head) / V :
                                                    t - tail) %
                                        LANES;
  const double wanted = mine ? (double)widen(row[target]) : 0.0;

  const uint4 *at = (const uint4 *)(row + c.head);
  for (int i = lane; i < c.whole; i += BATCH * LANES) {
    piece<T> p[BATCH];
#pragma unroll
    for (int k = 0; k < BATCH; k++)
      if (i + k * LANES < c.whole) p[k].raw = at[i + k * LANES];
#pragma unroll
    for (int k = 0; k < BATCH; k++) {
      if (i + k * LANES >= c.whole) break;
      A y[V];
      for (int e = 0; e < V; e++)
        y[e] = counts ? gradient(widen(p[k].x[e])) : (A)0;
      words<T, V> rounded;
      narrow_words(rounded, y);
      store_words(out + c.head + (i + k * LANES) * V, rounded);
    }
  }
  for (int i = lane; i < c.head; i += LANES)
    narrow(out[i], counts ? gradient(widen(row[i])) : (A)0);
  for (int i = tail + lane; i < classes; i += LANES)
    narrow(out[i], counts ? gradient(widen(row[i])) : (A)0);
  if (mine) {
    const soft_cap<double> exact = {cap, 1 / cap};
    const double p = exp(capped<CAPPED>(wanted, exact) - row_lse) * weight;
    narrow(out[target], (A)((p - (1.0 - smoothing) - smoothing / (double)classes) * slope *
                            cap_slope<CAPPED>(wanted, exact)));
  }
}

template <typename T>
static void launch_gradients(const op_call *call, int64_t rows, int classes, const double *counted)
{
  const tensor *x = call->in[0], *targets = call->in[1], *lse = call->in[2], *dloss = call->in[3];
  const bool is_short = classes <= SHORT_ROW;
  const double cap = call->cross_entropy.soft_cap;
  auto kernel =
    cap > 0 ? (is_short ? row_gradients<32, true, T> : row_gradients<THREADS, true, T>) :
              (is_short ? row_gradients<32, false, T> : row_gradients<THREADS, false, T>);
  kernel<<<grid_of(rows, classes), THREADS, 0, cuda_stream()>>>(
    (const T *)x->data, (T *)call->out[0]->data, targets->data, targets->dtype, rows, classes,
    call->cross_entropy.ignore, call->cross_entropy.smoothing, call->cross_entropy.z_loss, cap,
    lse->data, lse->dtype, dloss->data, dloss->dtype, call->cross_entropy.reduction == 0, counted,
    cuda_fault());
}

extern "C" eng_status cuda_cross_entropy_grad(const op_call *call)
{
  const tensor *x = call->in[0], *targets = call->in[1];
  int64_t rows = 0;
  int classes = 0;
  ENG_TRY(shape_of(&rows, &classes, call));
  double *counted = NULL;
  if (call->cross_entropy.reduction == 1) {
    counted = (double *)scratch_take(sizeof *counted);
    if (!counted) return ENG_ERR_MEMORY;
    count_rows<<<1, SUM_THREADS, 0, cuda_stream()>>>(targets->data, targets->dtype, rows,
                                                     call->cross_entropy.ignore, counted);
  }
  with_format(x->dtype,
              [&](auto t) { launch_gradients<decltype(t)>(call, rows, classes, counted); });
  if (counted) scratch_give(counted, sizeof *counted);
  return cuda_launched("cross_entropy_grad");
}

// ------------------------------------------------------------------ mean squared error

enum { MSE_CHUNK = 16 * SUM_THREADS };   // elements that a block sums

__global__ static void __launch_bounds__(SUM_THREADS)
square_distances(const void *a, int a_dtype, const void *b, int b_dtype, int64_t n, double *partial)
{
  double sum = 0.0;
  int64_t first = (int64_t)blockIdx.x * MSE_CHUNK, end = min(n, first + MSE_CHUNK);
  for (int64_t i = first + threadIdx.x; i < end; i += SUM_THREADS) {
    double d = element_double(a, a_dtype, i) - element_double(b, b_dtype, i);
    sum += d * d;
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

extern "C" eng_status cuda_mse(const op_call *call)
{
  const tensor *a = call->in[0], *b = call->in[1], *out = call->out[0];
  int64_t blocks = parts(a->count, MSE_CHUNK), bytes = blocks * (int64_t)sizeof(double);
  double *partial = (double *)scratch_take(bytes);
  if (!partial) return ENG_ERR_MEMORY;
  if (blocks > 0)
    square_distances<<<(unsigned)blocks, SUM_THREADS, 0, cuda_stream()>>>(
      a->data, a->dtype, b->data, b->dtype, a->count, partial);
  divided_sum<<<1, SUM_THREADS, 0, cuda_stream()>>>(
    partial, blocks, nullptr, 0, 0, (double)a->count, out->data, out->dtype);   // 0 / 0 is NaN
  scratch_give(partial, bytes);
  return cuda_launched("mse");
}
