// Softmax, log softmax and logsumexp over the last dimension, with their gradients. The largest
// element of a row is subtracted first, so no finite input overflows. As in PyTorch, a row with NaN
// or +inf yields NaN, and so does a row of only -inf. Exceptions: logsumexp is +inf for a row with
// +inf and no NaN, and -inf for a row of only -inf.
//
// A warp processes a row of up to 1024 elements, a block a row of up to 8192 (256 and 2048 if rows
// cannot be read four elements at a time). Such rows stay in registers, so that each element takes
// one read of memory and one exp. Longer rows, and other formats than f32, f16 and bf16, are read
// twice (for logsumexp, once). A thread sums the few elements of one load (in longer rows, of four
// loads) in f32, and adds these sums in double. f64 is summed in double throughout. Called through
// the device's table.
#include "kernel/lanes.h"
#include "kernel/team.h"

enum { HELD = 8 };   // groups of a row that a thread keeps in registers

// ------------------------------------------------------------------ forward

struct rows_call {
  const void *x, *dy;     // dy: NULL except in gradients, where x is y of the forward pass
  void   *y;
  int64_t rows, n;
  int32_t x_dtype, dy_dtype, y_dtype, op;
};

/// The values of a row from which every element's result follows. `sum` is the sum of
/// exp(x - largest), later its inverse. `log_sum` is the sum's logarithm. `nan` is true if the row
/// contains a NaN.
template <typename T> struct row_result {
  T    largest, sum, log_sum;
  bool nan;
};

/// Stores V results. For softmax, x holds exp(element - largest); for log softmax, the elements.
template <class L>
__device__ static inline void finish(const rows_call &c, int64_t at,
                                     const typename L::number (&x)[L::V],
                                     const row_result<typename L::number> &r)
{
  typename L::number y[L::V];
#pragma unroll
  for (int v = 0; v < L::V; v++)   // two subtractions: largest may be large, log_sum small
    y[v] = c.op == ENG_OP_softmax ? x[v] * r.sum : x[v] - r.largest - r.log_sum;
  L::store(c.y, c.y_dtype, at, y);
}

template <typename T>
__device__ static inline void finish_row(const rows_call &c, int64_t row, const row_result<T> &r)
{
  T value = isinf(r.largest) ? r.largest : r.largest + r.log_sum;
  element_store(c.y, c.y_dtype, row, r.nan ? (double)NAN : (double)value);
}

/// Processes rows that fit in registers: n is a multiple of V and at most TEAM * HELD * V.
template <class L, int TEAM>
static __global__ void __launch_bounds__(256) held_kernel(const rows_call c)
{
  constexpr int V = L::V;
  typedef typename L::number T;
  typedef team<TEAM> t;
  int64_t row = (int64_t)blockIdx.x * (256 / TEAM) + threadIdx.x / TEAM, base = row * c.n;
  bool here = row < c.rows;   // false in spare warps of the last block, which only shuffle
  typename L::raw raw[HELD];
  T x[HELD][V];
#pragma unroll
  for (int j = 0; j < HELD; j++) {
    int64_t at = (int64_t)(t::rank() + j * TEAM) * V;
    if (here && at < c.n) L::fetch(raw[j], c.x, c.x_dtype, base + at);
  }
  row_result<T> r = {-INFINITY, 0, 0, false};
#pragma unroll
  for (int j = 0; j < HELD; j++) {
    bool inside = here && (int64_t)(t::rank() + j * TEAM) * V < c.n;
    if (inside) L::values(x[j], raw[j], c.x_dtype);
#pragma unroll
    for (int v = 0; v < V; v++) {
      x[j][v] = inside ? x[j][v] : -INFINITY;
      r.largest = larger(r.largest, x[j][v]);
      r.nan = r.nan || x[j][v] != x[j][v];
    }
  }
  r.largest = t::largest(r.largest);
  r.nan = t::any(r.nan);
  T shift = r.largest == -INFINITY ? 0 : r.largest;   // if all are -inf, every exp is 0
  double sum = 0.0;
#pragma unroll
  for (int j = 0; j < HELD; j++) {
    T part = 0;
#pragma unroll
    for (int v = 0; v < V; v++) {
      T e = exp_of(x[j][v] - shift);
      part += e;
      if (c.op == ENG_OP_softmax) x[j][v] = e;
    }
    sum += part;
  }
  r.sum = (T)t::sum(sum);
  r.log_sum = log_of(r.sum);
  if (c.op == ENG_OP_logsumexp) {
    if (here && t::rank() == 0) finish_row(c, row, r);
    return;
  }
  r.sum = (T)1 / r.sum;
#pragma unroll
  for (int j = 0; j < HELD; j++) {
    int64_t at = (int64_t)(t::rank() + j * TEAM) * V;
    if (here && at < c.n) finish<L>(c, base + at, x[j], r);
  }
}

/// Processes rows of any length, with one block per row. When a larger element appears, the sum so
/// far is rescaled.
template <class L> static __global__ void __launch_bounds__(256) long_kernel(const rows_call c)
{
  constexpr int V = L::V, U = 4, STEP = 256 * V;
  typedef typename L::number T;
  typedef team<256> t;
  int64_t base = (int64_t)blockIdx.x * c.n;
  T largest = -INFINITY;
  bool nan = false;
  double sum = 0.0;
  for (int64_t first = (int64_t)threadIdx.x * V; first < c.n; first += U * STEP) {
    typename L::raw raw[U];
    T x[U][V], top = -INFINITY, part = 0;
#pragma unroll
    for (int u = 0; u < U; u++)
      if (first + u * STEP < c.n) L::fetch(raw[u], c.x, c.x_dtype, base + first + u * STEP);
#pragma unroll
    for (int u = 0; u < U; u++) {
      bool inside = first + u * STEP < c.n;
      if (inside) L::values(x[u], raw[u], c.x_dtype);
#pragma unroll
      for (int v = 0; v < V; v++) {
        x[u][v] = inside ? x[u][v] : -INFINITY;
        top = larger(top, x[u][v]);
        nan = nan || x[u][v] != x[u][v];
      }
    }
    if (top > largest) {
      if (largest != -INFINITY) sum *= exp_of(largest - top);
      largest = top;
    }
    T shift = largest == -INFINITY ? 0 : largest;
#pragma unroll
    for (int u = 0; u < U; u++)
#pragma unroll
      for (int v = 0; v < V; v++) part += exp_of(x[u][v] - shift);
    sum += part;
  }
  row_result<T> r;
  r.largest = t::largest(largest);
  r.nan = t::any(nan);
  if (largest != -INFINITY) sum *= exp_of(largest - r.largest);
  r.sum = (T)t::sum(sum);
  r.log_sum = log_of(r.sum);
  if (c.op == ENG_OP_logsumexp) {
    if (threadIdx.x == 0) finish_row(c, blockIdx.x, r);
    return;
  }
  r.sum = (T)1 / r.sum;
  for (int64_t at = (int64_t)threadIdx.x * V; at < c.n; at += STEP) {
    typename L::raw raw;
    T x[V];
    L::fetch(raw, c.x, c.x_dtype, base + at);
    L::values(x, raw, c.x_dtype);
    if (c.op == ENG_OP_softmax) {
#pragma unroll
      for (int v = 0; v < V; v++) x[v] = exp_of(x[v] - r.largest);
    }
    finish<L>(c, base + at, x, r);
  }
}

// ------------------------------------------------------------------ gradients

// For softmax, dx = y (dy - sum(y dy)). For log_softmax, dx = dy - exp(y) sum(dy).
template <typename T>
__device__ static inline T slope_part(int op, T y, T dy)
{ return op == ENG_OP_softmax_grad ? y * dy : dy; }
__device__ static inline float slope_of(int op, float y, float dy, float sum)
{ return op == ENG_OP_softmax_grad ? y * (dy - sum) : fmaf(expf(y), -sum, dy); }
__device__ static inline double slope_of(int op, double y, double dy, double sum)
{ return op == ENG_OP_softmax_grad ? y * (dy - sum) : dy - exp(y) * sum; }

template <class L, int TEAM>
static __global__ void __launch_bounds__(256) held_grad_kernel(const rows_call c)
{
  constexpr int V = L::V;
  typedef typename L::number T;
  typedef team<TEAM> t;
  int64_t row = (int64_t)blockIdx.x * (256 / TEAM) + threadIdx.x / TEAM, base = row * c.n;
  bool here = row < c.rows;
  typename L::raw y_raw[HELD], dy_raw[HELD];
#pragma unroll
  for (int j = 0; j < HELD; j++) {
    int64_t at = (int64_t)(t::rank() + j * TEAM) * V;
    if (!here || at >= c.n) continue;
    L::fetch(y_raw[j], c.x, c.x_dtype, base + at);
    L::fetch(dy_raw[j], c.dy, c.dy_dtype, base + at);
  }
  double sum = 0.0;
#pragma unroll
  for (int j = 0; j < HELD; j++) {
    if (!here || (int64_t)(t::rank() + j * TEAM) * V >= c.n) continue;
    T y[V], dy[V], part = 0;
    L::values(y, y_raw[j], c.x_dtype);
    L::values(dy, dy_raw[j], c.dy_dtype);
#pragma unroll
    for (int v = 0; v < V; v++) part += slope_part(c.op, y[v], dy[v]);
    sum += part;
  }
  T total = (T)t::sum(sum);
#pragma unroll
  for (int j = 0; j < HELD; j++) {
    int64_t at = (int64_t)(t::rank() + j * TEAM) * V;
    if (!here || at >= c.n) continue;
    T y[V], dy[V];
    L::values(y, y_raw[j], c.x_dtype);
    L::values(dy, dy_raw[j], c.dy_dtype);
#pragma unroll
    for (int v = 0; v < V; v++) y[v] = slope_of(c.op, y[v], dy[v], total);
    L::store(c.y, c.y_dtype, base + at, y);
  }
}

template <class L> static __global__ void __launch_bounds__(256) long_grad_kernel(const rows_call c)
{
  constexpr int V = L::V, U = 4, STEP = 256 * V;
  typedef typename L::number T;
  int64_t base = (int64_t)blockIdx.x * c.n;
  double sum = 0.0;
  for (int64_t first = (int64_t)threadIdx.x * V; first < c.n; first += U * STEP) {
    typename L::raw y_raw[U], dy_raw[U];
#pragma unroll
    for (int u = 0; u < U; u++) {
      if (first + u * STEP >= c.n) continue;
      L::fetch(y_raw[u], c.x, c.x_dtype, base + first + u * STEP);
      L::fetch(dy_raw[u], c.dy, c.dy_dtype, base + first + u * STEP);
    }
    T part = 0;
#pragma unroll
    for (int u = 0; u < U; u++) {
      if (first + u * STEP >= c.n) continue;
      T y[V], dy[V];
      L::values(y, y_raw[u], c.x_dtype);
      L::values(dy, dy_raw[u], c.dy_dtype);
#pragma unroll
      for (int v = 0; v < V; v++) part += slope_part(c.op, y[v], dy[v]);
    }
    sum += part;
  }
  T total = (T)team<256>::sum(sum);
  for (int64_t at = (int64_t)threadIdx.x * V; at < c.n; at += STEP) {
    typename L::raw y_raw, dy_raw;
    T y[V], dy[V];
    L::fetch(y_raw, c.x, c.x_dtype, base + at);
    L::fetch(dy_raw, c.dy, c.dy_dtype, base + at);
    L::values(y, y_raw, c.x_dtype);
    L::values(dy, dy_raw, c.dy_dtype);
#pragma unroll
    for (int v = 0; v < V; v++) y[v] = slope_of(c.op, y[v], dy[v], total);
    L::store(c.y, c.y_dtype, base + at, y);
  }
}

// ------------------------------------------------------------------ calls

template <class L> static void launch(const rows_call &c)
{
  void (*kernel)(const rows_call) = NULL;
  int64_t each = 1;   // rows of a block
  if constexpr (sizeof(typename L::number) == sizeof(float)) {
    if (c.n <= 32 * HELD * L::V) {
      kernel = c.dy ? held_grad_kernel<L, 32> : held_kernel<L, 32>;
      each = 8;
    } else if (c.n <= 256 * HELD * L::V) {
      kernel = c.dy ? held_grad_kernel<L, 256> : held_kernel<L, 256>;
    }
  }
  if (!kernel) kernel = c.dy ? long_grad_kernel<L> : long_kernel<L>;
  kernel<<<(unsigned)parts(c.rows, each), 256, 0, cuda_stream()>>>(c);
}

static eng_status along_rows(const op_call *call)
{
  const tensor *x = call->in[0], *dy = call->n_in > 1 ? call->in[1] : NULL, *y = call->out[0];
  rows_call c = {
    x->data,  data_of(dy),  y->data,  rows_of(x), x->ndim ? x->shape[x->ndim - 1] : 1,
    x->dtype, dtype_of(dy), y->dtype, call->op};
  FAIL_IF(c.rows >= 1ll << 31, ENG_ERR_SHAPE,
          "%s: expected fewer than 2^31 rows, got %s", eng_op_name(call->op), tensor_text(x));
  bool aligned = ((uintptr_t)c.x | (uintptr_t)c.dy | (uintptr_t)c.y) % 16 == 0;
  if (!all_fast(call)) launch<double_lanes>(c);
  else if (aligned && c.n % 4 == 0) launch<float_lanes<4>>(c);
  else launch<float_lanes<1>>(c);
  return cuda_launched(eng_op_name(call->op));
}

extern "C" eng_status cuda_softmax(const op_call *call)          { return along_rows(call); }
extern "C" eng_status cuda_softmax_grad(const op_call *call)     { return along_rows(call); }
extern "C" eng_status cuda_log_softmax(const op_call *call)      { return along_rows(call); }
extern "C" eng_status cuda_log_softmax_grad(const op_call *call) { return along_rows(call); }
extern "C" eng_status cuda_logsumexp(const op_call *call)        { return along_rows(call); }
