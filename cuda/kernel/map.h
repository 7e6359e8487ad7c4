// Elementwise kernels over f32, f16 and bf16: y = rule(x...) in f32, rounded once, for tensors of
// any strides and broadcasting. A thread processes groups of V adjacent elements. A group is 16
// bytes of each tensor if all tensors have one format and suitable layouts (dense, rows of a view,
// a bias repeated over rows, one number per row). Otherwise it is 4 elements or, if the layouts do
// not allow this, a single element. A rule with N inputs and M outputs is a struct with
//   template <int V>
//   __device__ void operator()(float (&y)[M][V], const float (&x)[N][V]) const
// and, optionally, a template `low` with the same parameters, whose results need only be accurate
// enough for 16-bit formats. Other formats use each(), in f64 or i64, with one element per thread.
// Included by kernel files. Owns nothing.
#pragma once

#include "element.h"
#include "vector.h"
#include "walk.h"

/// Loads, converts and stores groups of 16 bytes in one format, which is known at compile time.
template <typename T> struct uniform {
  enum { V = 16 / sizeof(T) };
  typedef words<T, V> raw;
  // If one element repeats (inner == 0), fetch() loads only r.w[0]. floats() fills in the other
  // words later, so that fetch() does not wait for the load.
  __device__ static void fetch(raw &r, const void *data, int, int64_t at, int64_t inner)
  {
    const T *from = (const T *)data + at;
    if (inner) load_words(r, from);
    else r.w[0] = sizeof(T) == 2 ? *(const uint16_t *)from : *(const uint32_t *)from;
  }
  __device__ static void floats(float (&x)[V], const raw &r, int, int64_t inner)
  {
    raw all = r;
    if (!inner) {
      uint32_t one = sizeof(T) == 2 ? r.w[0] * 0x10001u : r.w[0];
#pragma unroll
      for (int k = 0; k < 4; k++) all.w[k] = one;
    }
    widen_words(x, all);
  }
  __device__ static void store(void *data, int, int64_t at, const float (&y)[V])
  {
    raw r;
    narrow_words(r, y);
    store_words((T *)data + at, r);
  }
};

/// Loads, converts and stores groups of V elements in formats that are known only at run time. The
/// target of store() may also be a bool tensor.
template <int V_> struct mixed {
  enum { V = V_, HALF = V_ > 1 ? V_ / 2 : 1 };
  // The words as they are in memory; 16-bit formats use only the first half of the array. Nothing
  // waits for the loads until floats() uses the words.
  struct raw { uint32_t word[V_]; };
  __device__ static void fetch(raw &r, const void *data, int dtype, int64_t at, int64_t inner)
  {
    if (dtype == ENG_f32) {
      const uint32_t *from = (const uint32_t *)data + at;
      if (inner) {
        pack<uint32_t, V> p = *(const pack<uint32_t, V> *)from;
#pragma unroll
        for (int v = 0; v < V; v++) r.word[v] = p.v[v];
      } else {
        uint32_t one = *from;
#pragma unroll
        for (int v = 0; v < V; v++) r.word[v] = one;
      }
    } else {
      const uint16_t *from = (const uint16_t *)data + at;
      if (V > 1 && inner) {
        pack<uint32_t, HALF> p = *(const pack<uint32_t, HALF> *)from;
#pragma unroll
        for (int v = 0; v < HALF; v++) r.word[v] = p.v[v];
      } else {
        uint32_t one = *from;
#pragma unroll
        for (int v = 0; v < HALF; v++) r.word[v] = V > 1 ? one << 16 | one : one;
      }
    }
  }
  __device__ static void floats(float (&x)[V], const raw &r, int dtype, int64_t = 1)
  {
    if (dtype == ENG_f32) {
#pragma unroll
      for (int v = 0; v < V; v++) x[v] = __uint_as_float(r.word[v]);
    } else if (dtype == ENG_f16) {
#pragma unroll
      for (int v = 0; v < V; v++) x[v] = widen(f16_t{(uint16_t)(r.word[v / 2] >> (v % 2 * 16))});
    } else {
#pragma unroll
      for (int v = 0; v < V; v++) x[v] = widen(bf16_t{(uint16_t)(r.word[v / 2] >> (v % 2 * 16))});
    }
  }
  __device__ static float member(const raw &r, int v, int dtype)
  {
    if (dtype == ENG_f32) return __uint_as_float(r.word[v]);
    uint16_t bits = (uint16_t)(r.word[v / 2] >> (v % 2 * 16));
    return dtype == ENG_f16 ? widen(f16_t{bits}) : widen(bf16_t{bits});
  }
  template <typename T> __device__ static void store_as(void *data, int64_t at, const float (&y)[V])
  {
    if constexpr (V > 1) {
      words<T, V> r;
      narrow_words(r, y);
      store_words((T *)data + at, r);
    } else {
      narrow(((T *)data)[at], y[0]);
    }
  }
  __device__ static void store(void *data, int dtype, int64_t at, const float (&y)[V])
  {
    if (dtype == ENG_f32) {
      store_as<float>(data, at, y);
    } else if (dtype == ENG_f16) {
      store_as<f16_t>(data, at, y);
    } else if (dtype == ENG_bf16) {
      store_as<bf16_t>(data, at, y);
    } else {
      pack<uint8_t, V> p;
#pragma unroll
      for (int v = 0; v < V; v++) p.v[v] = y[v] != 0.0f;
      *(pack<uint8_t, V> *)((uint8_t *)data + at) = p;
    }
  }
};

/// has_low tells whether a rule has a `low` form. apply() uses that form if no tensor of the call
/// is f32. The choice depends on formats alone, so an element's result does not depend on the
/// layout of the tensors.
template <class Rule, int V, class = void> struct has_low { enum { value = 0 }; };
template <class Rule, int V>
struct has_low<Rule, V, decltype((void)&Rule::template low<V>)> {
  enum { value = 1 };
};

template <class Rule, int M, int N, int V>
__device__ static inline void apply(const Rule &rule, bool low, float (&y)[M][V],
                                    const float (&x)[N][V])
{
  if constexpr (has_low<Rule, V>::value) {
    if (low) rule.low(y, x);
    else rule(y, x);
  } else {
    rule(y, x);
  }
}

/// Applies a rule to a walk. The walk's first M tensors are outputs (NULL if absent), the next N
/// are inputs.
template <class IO, int M, int N, class Rule>
static __global__ void __launch_bounds__(WALK_THREADS)
  map_kernel(const walk<M + N> w, const Rule rule)
{
  constexpr int V = IO::V, U = V == 1 ? 4 : 2;   // groups in flight
  bool low = true;
#pragma unroll
  for (int k = 0; k < M + N; k++) low = low && w.dtype[k] != ENG_f32;
  int64_t first = (int64_t)blockIdx.x * (WALK_THREADS * U) + threadIdx.x;
  typename IO::raw raw[U][N];
  int64_t to[U][M];
#pragma unroll
  for (int u = 0; u < U; u++) {
    int64_t group = first + u * WALK_THREADS;
    if (group * V + V > w.count) continue;
    int64_t at[M + N];
    walk_offsets(at, w, group);
#pragma unroll
    for (int k = 0; k < M; k++) to[u][k] = at[k];
#pragma unroll
    for (int k = 0; k < N; k++)
      IO::fetch(raw[u][k], w.data[M + k], w.dtype[M + k], at[M + k], w.inner[M + k]);
  }
#pragma unroll
  for (int u = 0; u < U; u++) {
    if ((first + u * WALK_THREADS) * V + V > w.count) continue;
    float x[N][V], y[M][V];
#pragma unroll
    for (int k = 0; k < N; k++) IO::floats(x[k], raw[u][k], w.dtype[M + k], w.inner[M + k]);
    apply(rule, low, y, x);
#pragma unroll
    for (int k = 0; k < M; k++)
      if (M == 1 || w.data[k]) IO::store(w.data[k], w.dtype[k], to[u][k], y[k]);
  }
  if (V == 1 || w.count % V == 0 || blockIdx.x != gridDim.x - 1) return;
  // The last group of a walk of one dimension may be short. Then each thread computes one element
  // of that group.
  int64_t at = w.count / V * V + threadIdx.x;
  if (at >= w.count) return;
  float x[N][1], y[M][1];
#pragma unroll
  for (int k = 0; k < N; k++) {
    mixed<1>::raw one;
    mixed<1>::fetch(one, w.data[M + k], w.dtype[M + k], at * w.inner[M + k], 1);
    mixed<1>::floats(x[k], one, w.dtype[M + k]);
  }
  apply(rule, low, y, x);
#pragma unroll
  for (int k = 0; k < M; k++)
    if (M == 1 || w.data[k]) mixed<1>::store(w.data[k], w.dtype[k], at, y[k]);
}

template <class IO, int M, int N, class Rule>
static void map_launch(const walk<M + N> &w, const Rule &rule)
{
  walk_parts<M + N>(w, IO::V == 1 ? 4 : 2, [&](const walk<M + N> &part, unsigned blocks) {
    map_kernel<IO, M, N, Rule><<<blocks, WALK_THREADS, 0, cuda_stream()>>>(part, rule);
  });
}

/// Dense tensors of one format. With several outputs, y[k] may be NULL (absent).
template <typename T, int M, int N> struct dense { T *y[M]; const T *x[N]; int64_t count; };

template <typename T, int M, int N, class Rule>
static __global__ void __launch_bounds__(WALK_THREADS)
  dense_kernel(const dense<T, M, N> d, const Rule rule)
{
  constexpr int V = 16 / sizeof(T), U = N == 1 ? 4 : 2;
  constexpr bool LOW = sizeof(T) == 2;
  int64_t first = (int64_t)blockIdx.x * (WALK_THREADS * U) + threadIdx.x;
  words<T, V> raw[U][N];
#pragma unroll
  for (int u = 0; u < U; u++)
    if ((first + u * WALK_THREADS) * V + V <= d.count)
#pragma unroll
      for (int k = 0; k < N; k++) load_words(raw[u][k], d.x[k] + (first + u * WALK_THREADS) * V);
#pragma unroll
  for (int u = 0; u < U; u++) {
    int64_t at = (first + u * WALK_THREADS) * V;
    if (at + V > d.count) continue;
    float x[N][V], y[M][V];
#pragma unroll
    for (int k = 0; k < N; k++) widen_words(x[k], raw[u][k]);
    apply(rule, LOW, y, x);
#pragma unroll
    for (int k = 0; k < M; k++) {
      words<T, V> rounded;
      narrow_words(rounded, y[k]);
      if (M == 1 || d.y[k]) store_words(d.y[k] + at, rounded);
    }
  }
  if (blockIdx.x != gridDim.x - 1) return;
  int64_t at = d.count / V * V + threadIdx.x;   // short last group: one element per thread
  if (at >= d.count) return;
  float x[N][1], y[M][1];
#pragma unroll
  for (int k = 0; k < N; k++) x[k][0] = widen(d.x[k][at]);
  apply(rule, LOW, y, x);
#pragma unroll
  for (int k = 0; k < M; k++)
    if (M == 1 || d.y[k]) narrow(d.y[k][at], y[k][0]);
}

template <typename T, int M, int N, class Rule>
static void dense_launch(const walk<M + N> &w, const Rule &rule)
{
  dense<T, M, N> d;
  for (int k = 0; k < M; k++) d.y[k] = (T *)w.data[k];
  for (int k = 0; k < N; k++) d.x[k] = (const T *)w.data[M + k];
  d.count = w.count;
  constexpr int64_t EACH = (int64_t)WALK_THREADS * (16 / sizeof(T)) * (N == 1 ? 4 : 2);
  dense_kernel<T, M, N, Rule>
    <<<(unsigned)((d.count + EACH - 1) / EACH), WALK_THREADS, 0, cuda_stream()>>>(d, rule);
}

/// Runs a rule and returns true if all tensors of the call have the same format, are dense and are
/// 16-byte aligned. Otherwise returns false.
template <int M, int N, class Rule> static bool map_dense(const walk<M + N> &w, const Rule &rule)
{
  if (w.ndim != 1 || w.count >= 1ll << 40) return false;
  for (int k = 0; k < M + N; k++)
    if (w.dtype[k] != w.dtype[0] || (w.data[k] && w.stride[k][0] != 1) || (uintptr_t)w.data[k] % 16)
      return false;
  with_fast_format(w.dtype[0], [&](auto t) { dense_launch<decltype(t), M, N>(w, rule); });
  return true;
}

/// Returns a walk over the tensors of a call, outputs first. An absent tensor gets the strides of
/// an output.
template <int M, int N> static walk<M + N> walk_of_call(const op_call *call)
{
  const tensor *over = call->out[0] ? call->out[0] : call->out[M - 1], *list[M + N];
  for (int k = 0; k < M + N; k++) list[k] = k < M ? call->out[k] : call->in[k - M];
  return walk_over<M + N>(over, list);
}

/// Runs a rule on a call. Inputs are f32, f16 or bf16; outputs may also be bool. With `Hot`, faster
/// kernels are also compiled for calls whose tensors all have one format.
template <int M, int N, bool Hot = true, class Rule>
static eng_status map(const op_call *call, const Rule &rule)
{
  walk<M + N> w = walk_of_call<M, N>(call);
  bool same = true, done = false;
  for (int k = 0; k < M + N; k++) same = same && w.dtype[k] == w.dtype[0];
  if constexpr (Hot) {
    done = same && map_dense<M, N>(w, rule);
    if (!done && same && walk_bundle(w, w.dtype[0] == ENG_f32 ? 4 : 8)) {
      done = true;
      with_fast_format(w.dtype[0],
                       [&](auto t) { map_launch<uniform<decltype(t)>, M, N>(w, rule); });
    }
  }
  if (!done && walk_bundle(w, 4)) map_launch<mixed<4>, M, N>(w, rule);
  else if (!done) map_launch<mixed<1>, M, N>(w, rule);
  return cuda_launched(eng_op_name(call->op));
}

/// Runs body(w, at) for one element per thread. `at` holds the offset of the element in every
/// tensor.
template <int K, class Body>
static __global__ void __launch_bounds__(WALK_THREADS) each_kernel(const walk<K> w, const Body body)
{
  int64_t index = (int64_t)blockIdx.x * WALK_THREADS + threadIdx.x;
  if (index >= w.groups) return;
  int64_t at[K];
  walk_offsets(at, w, index);
  body(w, at);
}

template <int K, class Body> static void each_of(const walk<K> &w, const Body &body)
{
  walk_parts<K>(w, 1, [&](const walk<K> &part, unsigned blocks) {
    each_kernel<K, Body><<<blocks, WALK_THREADS, 0, cuda_stream()>>>(part, body);
  });
}

/// Runs body(w, at) for every element of a call, in any formats: the slow path. The walk holds
/// outputs, then inputs, as in map.
template <int M, int N, class Body> static eng_status each(const op_call *call, const Body &body)
{
  each_of(walk_of_call<M, N>(call), body);
  return cuda_launched(eng_op_name(call->op));
}
