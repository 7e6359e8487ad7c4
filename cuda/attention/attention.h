// Shared by the attention kernels: the description of a call, and functions in which one warp
// computes one row in plain arithmetic.
//
// There are two implementations. The tensor-core implementation (attention_forward.cu,
// attention_backward.cu, attention_hopper*.cu) computes calls in which all tensors but lse and
// entropy are f16, or all are bf16, up to 128 wide, with a scale from 1e-30 to 1e30. The plain
// implementation (attention_plain.cu) computes everything else.
//
// Edge cases are as on the CPU. A row that sees no key has y = 0, lse = -inf and entropy 0, and
// gives no gradient to k and v. A row with a NaN, or whose largest score is infinite, becomes NaN.
// A key that the causal mask hides never affects a query, not even as 0 * NaN. A product of tiles
// breaks this last rule, because it includes hidden keys with probability 0. It also yields NaN
// where a probability that was rounded to 0 is multiplied by an infinite value. So rows that the
// tensor cores return as Inf or NaN are recomputed one by one, in f32, by the functions below. Rows
// of finite inputs are recomputed only if a sum leaves the range of f32.
//
// The order of sums depends only on shapes and formats, and on whether the card is a Hopper.
// Included by the kernel files of this folder.
#pragma once

#include "kernel/element.h"
#include "kernel/mma.h"

#include <type_traits>

/// A tensor [B x time x heads x width]. The elements of a row (along the width) are adjacent.
/// `batch`, `time` and `head` are the other three strides, in elements.
typedef struct attention_view {
  void   *data;
  int64_t batch, time, head;
} attention_view;

typedef struct attention_problem {
  int32_t batch, queries, keys, heads, groups, width;   // B, T, S, H, G, D
  int32_t shared;                                       // heads that share a key head: H / G
  int32_t causal;
  double  factor;                                       // of the scores
  attention_view q, k, v;
  // Forward pass: y [B x T x H x D] has y_dtype. `lse` and `entropy` [B x H x T] have lse_dtype and
  // are NULL if they are not wanted.
  attention_view y;
  int32_t y_dtype, lse_dtype;
  void   *lse, *entropy;
  // Backward pass: lse is f32 (f64 for f64 inputs), and dy has the shape and format of q. Scratch
  // memory `delta` [B x H x delta_line], in the format of lse, holds for each of the T queries the
  // sum of p * dp (see `slope`) over its keys. Gradients that are not wanted are NULL.
  attention_view dy, dq, dk, dv;
  int32_t dq_dtype, dk_dtype, dv_dtype;
  void   *delta;
  int64_t delta_line;   // elements from one head to the next; at least T
} attention_problem;

/// Computes y on tensor cores. Inputs and y have `dtype`, f16 or bf16. D is 32, 64, 96 or 128, with
/// zeros beyond the true width; input rows are 16-byte aligned; factor > 0. `stored`, the true
/// width, is the number of columns of y.
eng_status attention_forward(const attention_problem *p, int dtype, int stored);
/// Does the same on Hopper, for D = 64 and D = 128.
eng_status attention_forward_hopper(const attention_problem *p, int dtype, int stored);
/// Computes the gradients. They have the format `dtype`, and their rows have `stored` columns. Rows
/// of y, the result of the forward pass, are as wide as rows of q. All else is as for
/// attention_forward.
eng_status attention_backward(const attention_problem *p, int dtype, int stored);

/// The forward and the backward pass in plain arithmetic. Inputs have `dtype` (f32 or f64) and any
/// width; outputs have any float dtype. In the backward pass y, if given, also has `dtype`.
eng_status attention_plain_forward(const attention_problem *p, int dtype);
eng_status attention_plain_backward(const attention_problem *p, int dtype);

/// Checks that n thread blocks fit into one launch. Errors: SHAPE.
static inline eng_status check_blocks(int64_t n, const char *operation)
{
  if (n <= INT32_MAX) return ENG_OK;
  return error_set(ENG_ERR_SHAPE,
                   "%s: expected at most 2^31 - 1 thread blocks, got %lld; hint: a smaller batch",
                   operation, (long long)n);
}

/// Returns f(c), where c is the first of the constants C, REST.. that is at least n.
template <int C, int... REST, class F> static eng_status with_size(int64_t n, const F &f)
{
  if constexpr (sizeof...(REST) > 0)
    if (n > C) return with_size<REST...>(n, f);
  return f(std::integral_constant<int, C>{});
}

/// Launches `blocks` blocks, if any, of a kernel with `bytes` bytes of dynamic shared memory each.
/// Errors: SHAPE if there are too many blocks.
template <class Kernel, class... Arguments>
static eng_status launch_kernel(const char *operation, Kernel *kernel, int64_t blocks, int threads,
                                int bytes, const Arguments &...arguments)
{
  if (blocks == 0) return ENG_OK;
  ENG_TRY(check_blocks(blocks, operation));
  if (bytes > 0)
    CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<(unsigned)blocks, threads, bytes, cuda_stream()>>>(arguments...);
  return cuda_launched(operation);
}

/// Returns the number n of keys that query t sees. They are keys 0 to n - 1.
__device__ static inline int keys_seen(const attention_problem &p, int t)
{
  if (!p.causal) return p.keys;
  int64_t n = (int64_t)t + p.keys - p.queries + 1;
  return n < 0 ? 0 : n > p.keys ? p.keys : (int)n;
}
/// Returns the first query that sees key j, or p.queries or a larger number if no query sees it.
__device__ static inline int first_query(const attention_problem &p, int j)
{
  int64_t t = p.causal ? (int64_t)j - p.keys + p.queries : 0;
  return t < 0 ? 0 : (int)t;
}

template <class T>
__device__ static inline T *row_of(const attention_view &v, int64_t b, int64_t t, int64_t h)
{ return (T *)v.data + b * v.batch + t * v.time + h * v.head; }
__device__ static inline int64_t line_of(const attention_problem &p, int64_t b, int64_t h,
                                         int64_t t)
{ return (b * p.heads + h) * p.queries + t; }

__device__ static inline int64_t delta_at(const attention_problem &p, int64_t b, int64_t h,
                                          int64_t t)
{ return (b * p.heads + h) * p.delta_line + t; }

// ---- functions in which one warp computes one row. T is the type of the tensors, A the type of
// the arithmetic (float or double). All 32 lanes must call these functions together.

// columns that a lane sums at a time (128 per warp); wider rows take more rounds
enum { ROW_COLUMNS = 4 };

template <class A> __device__ static inline A warp_sum(A x)
{
  for (int k = 16; k; k >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, k);
  return x;
}
/// Returns the largest x of the warp's lanes, ignoring NaN.
template <class A> __device__ static inline A warp_max(A x)
{
  for (int k = 16; k; k >>= 1) {
    A other = __shfl_xor_sync(0xFFFFFFFFu, x, k);
    x = other > x || x != x ? other : x;
  }
  return x;
}

/// Returns the dot product of a and b over the width. `a` is the same in every lane; each lane has
/// its own `b`.
template <class T, class A> __device__ static inline A dot_with(const T *a, const T *b, int width)
{
  int lane = threadIdx.x & 31;
  A sum = 0;
  for (int d = 0; d < width; d += 32) {
    A mine = d + lane < width ? (A)widen(a[d + lane]) : (A)0;
    int n = min(32, width - d);
    for (int i = 0; i < n; i++)
      sum = fused(__shfl_sync(0xFFFFFFFFu, mine, i), (A)widen(b[d + i]), sum);
  }
  return sum;
}

/// Computes y of query t and, if wanted, its lse and entropy. `columns` is the number of columns of
/// y.
template <class T, class A>
__device__ __noinline__ void forward_row(const attention_problem &p, int b, int h, int t,
                                         int columns)
{
  int lane = threadIdx.x & 31, group = h / p.shared, n = keys_seen(p, t);
  const T *q = row_of<T>(p.q, b, t, h);
  A factor = (A)p.factor, inf = (A)INFINITY;
  for (int d0 = 0; d0 == 0 || d0 < columns; d0 += 32 * ROW_COLUMNS) {
    // weighted: sum of e * (score - top)
    A top = -inf, sum = 0, weighted = 0, y[ROW_COLUMNS] = {0};
    for (int j0 = 0; j0 < n; j0 += 32) {
      bool seen = j0 + lane < n;
      A score =
        factor * dot_with<T, A>(q, row_of<T>(p.k, b, min(j0 + lane, n - 1), group), p.width);
      A largest = warp_max(seen ? score : -inf), before = top;
      if (largest > top) top = largest;
      // a row of only -inf must sum to 0; a shift of -inf would give exp(-inf + inf), which is NaN
      A shift = top == -inf ? (A)0 : top;
      A keep = exp_of(before - shift), x = score - shift, e = seen ? exp_of(x) : (A)0;
      weighted = keep == 0 ? (A)0 : keep * (weighted + (before - shift) * sum);
      weighted += warp_sum(e == 0 ? (A)0 : e * x);
      sum = sum * keep + warp_sum(e);
      for (int i = 0; i < ROW_COLUMNS; i++) y[i] *= keep;
      int steps = min(32, n - j0);
      for (int j = 0; j < steps; j++) {
        A weight = __shfl_sync(0xFFFFFFFFu, e, j);
        const T *v = row_of<T>(p.v, b, j0 + j, group);
        for (int i = 0; i < ROW_COLUMNS; i++) {
          int d = d0 + 32 * i + lane;
          if (d < columns) y[i] = fused(weight, (A)widen(v[d]), y[i]);
        }
      }
    }
    bool lost = n > 0 && sum == 0;   // every score is -inf
    for (int i = 0; i < ROW_COLUMNS; i++) {
      int d = d0 + 32 * i + lane;
      if (d < columns)
        store_as(p.y.data, p.y_dtype, b * p.y.batch + t * p.y.time + h * p.y.head + d,
                 n == 0 ? (A)0 : lost ? (A)NAN : y[i] / sum);
    }
    if (d0 == 0 && lane == 0) {
      int64_t line = line_of(p, b, h, t);
      if (p.lse)
        store_as(p.lse, p.lse_dtype, line, n == 0 ? -inf : lost ? (A)NAN : top + log_of(sum));
      if (p.entropy)
        store_as(p.entropy, p.lse_dtype, line,
                 n == 0 ? (A)0 : lost ? (A)NAN : log_of(sum) - weighted / sum);
    }
  }
}

/// The probability p of one query and key, and the gradient dp of p. In slope_of, which computes
/// both, `q` and `dy` are the same in every lane; each lane has its own `k` and `v`. A caller may
/// swap the pairs (q, dy) and (k, v).
template <class A> struct slope { A p, dp; };
template <class T, class A>
__device__ static inline slope<A> slope_of(const T *q, const T *dy, const T *k, const T *v,
                                           A factor, A lse, int width)
{
  A score = factor * dot_with<T, A>(q, k, width);
  return {exp_of(score - lse), dot_with<T, A>(dy, v, width)};
}

/// Returns, in every lane, the sum of p * dp over the keys of query t.
template <class T, class A>
__device__ __noinline__ A delta_of_row(const attention_problem &p, int b, int h, int t)
{
  int lane = threadIdx.x & 31, group = h / p.shared, n = keys_seen(p, t);
  A lse = ((const A *)p.lse)[line_of(p, b, h, t)], sum = 0;
  for (int j0 = 0; j0 < n; j0 += 32) {
    int j = min(j0 + lane, n - 1);
    slope<A> s =
      slope_of<T, A>(row_of<T>(p.q, b, t, h), row_of<T>(p.dy, b, t, h), row_of<T>(p.k, b, j, group),
                     row_of<T>(p.v, b, j, group), (A)p.factor, lse, p.width);
    sum += warp_sum(j0 + lane < n ? s.p * s.dp : (A)0);
  }
  return sum;
}

/// Computes dq of query t, using lse and delta.
template <class T, class A>
__device__ __noinline__ void dq_row(const attention_problem &p, int b, int h, int t, int columns)
{
  int lane = threadIdx.x & 31, group = h / p.shared, n = keys_seen(p, t);
  A lse = ((const A *)p.lse)[line_of(p, b, h, t)],
    delta = ((const A *)p.delta)[delta_at(p, b, h, t)];
  for (int d0 = 0; d0 < columns; d0 += 32 * ROW_COLUMNS) {
    A dq[ROW_COLUMNS] = {0};
    for (int j0 = 0; j0 < n; j0 += 32) {
      int j = min(j0 + lane, n - 1), steps = min(32, n - j0);
      slope<A> s = slope_of<T, A>(row_of<T>(p.q, b, t, h), row_of<T>(p.dy, b, t, h),
                                  row_of<T>(p.k, b, j, group), row_of<T>(p.v, b, j, group),
                                  (A)p.factor, lse, p.width);
      A ds = s.p * (s.dp - delta);
      for (int i = 0; i < steps; i++) {
        A weight = __shfl_sync(0xFFFFFFFFu, ds, i);
        const T *k = row_of<T>(p.k, b, j0 + i, group);
        for (int c = 0; c < ROW_COLUMNS; c++) {
          int d = d0 + 32 * c + lane;
          if (d < columns) dq[c] = fused(weight, (A)widen(k[d]), dq[c]);
        }
      }
    }
    for (int c = 0; c < ROW_COLUMNS; c++) {
      int d = d0 + 32 * c + lane;
      if (d < columns)
        store_as(p.dq.data, p.dq_dtype, b * p.dq.batch + t * p.dq.time + h * p.dq.head + d,
                 (A)p.factor * dq[c]);
    }
  }
}

/// Computes dk and dv of key j, if wanted, using lse and delta. The sums run over the heads that
/// share the key and, within a head, over the queries.
template <class T, class A>
__device__ __noinline__ void dkdv_row(const attention_problem &p, int b, int group, int j,
                                      int columns)
{
  int lane = threadIdx.x & 31;
  const T *k = row_of<T>(p.k, b, j, group), *v = row_of<T>(p.v, b, j, group);
  for (int d0 = 0; d0 < columns; d0 += 32 * ROW_COLUMNS) {
    A dk[ROW_COLUMNS] = {0}, dv[ROW_COLUMNS] = {0};
    for (int h = group * p.shared; h < (group + 1) * p.shared; h++)
      for (int t0 = first_query(p, j); t0 < p.queries; t0 += 32) {
        int t = min(t0 + lane, p.queries - 1), steps = min(32, p.queries - t0);
        slope<A> s = slope_of<T, A>(k, v, row_of<T>(p.q, b, t, h), row_of<T>(p.dy, b, t, h),
                                    (A)p.factor, ((const A *)p.lse)[line_of(p, b, h, t)], p.width);
        A ds = s.p * (s.dp - ((const A *)p.delta)[delta_at(p, b, h, t)]);
        for (int i = 0; i < steps; i++) {
          A for_k = __shfl_sync(0xFFFFFFFFu, ds, i), for_v = __shfl_sync(0xFFFFFFFFu, s.p, i);
          const T *q = row_of<T>(p.q, b, t0 + i, h), *dy = row_of<T>(p.dy, b, t0 + i, h);
          for (int c = 0; c < ROW_COLUMNS; c++) {
            int d = d0 + 32 * c + lane;
            if (d < columns) {
              dk[c] = fused(for_k, (A)widen(q[d]), dk[c]);
              dv[c] = fused(for_v, (A)widen(dy[d]), dv[c]);
            }
          }
        }
      }
    for (int c = 0; c < ROW_COLUMNS; c++) {
      int d = d0 + 32 * c + lane;
      if (d >= columns) continue;
      if (p.dk.data)
        store_as(p.dk.data, p.dk_dtype, b * p.dk.batch + j * p.dk.time + group * p.dk.head + d,
                 (A)p.factor * dk[c]);
      if (p.dv.data)
        store_as(p.dv.data, p.dv_dtype, b * p.dv.batch + j * p.dv.time + group * p.dv.head + d,
                 dv[c]);
    }
  }
}
