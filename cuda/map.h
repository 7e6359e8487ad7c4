// Elementwise kernels over f32, f16 and bf16: y = rule(x...) in f32, rounded once, for tensors of any strides and
// broadcasting. A thread takes groups of V neighbours, 16 bytes of each tensor where all have one format and lie well (dense,
// rows of a view, a bias repeated over rows, a column repeated along its row), else 4 elements, else single ones.
// A rule is a struct with
//   template <int V> __device__ void operator()(float (&y)[M][V], const float (&x)[N][V]) const
// Formats and layouts other than these: each()'s, in f64 or i64, one element a thread. Included by kernel files. Owns nothing.
#ifndef ENG_CUDA_MAP_H
#define ENG_CUDA_MAP_H

#include "element.h"
#include "walk.h"

/// Groups of 16 bytes in one format that the compiler knows.
template <typename T> struct uniform {
  enum { V = 16 / sizeof(T) };
  typedef pack<T, V> raw;
  __device__ static void fetch(raw &r, const void *data, int, int64_t at, int64_t inner)
  {
    if (inner) {
      r = *(const raw *)((const T *)data + at);
    } else {
      T one = ((const T *)data)[at];
#pragma unroll
      for (int v = 0; v < V; v++) r.v[v] = one;
    }
  }
  __device__ static void floats(float (&x)[V], const raw &r, int)
  {
#pragma unroll
    for (int v = 0; v < V; v++) x[v] = widen(r.v[v]);
  }
  __device__ static void store(void *data, int, int64_t at, const float (&y)[V])
  {
    raw r;
#pragma unroll
    for (int v = 0; v < V; v++) narrow(r.v[v], y[v]);
    *(raw *)((T *)data + at) = r;
  }
};

/// Groups of V elements whose formats are known when the kernel runs. A target may be bool, too.
template <int V_> struct mixed {
  enum { V = V_, HALF = V_ > 1 ? V_ / 2 : 1 };
  struct raw { uint32_t word[V_]; };   // as in memory: 16-bit formats fill one half. Nothing waits for it but floats().
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
  __device__ static void floats(float (&x)[V], const raw &r, int dtype)
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
  template <typename T> __device__ static void store_as(void *data, int64_t at, const float (&y)[V])
  {
    pack<T, V> p;
#pragma unroll
    for (int v = 0; v < V; v++) narrow(p.v[v], y[v]);
    *(pack<T, V> *)((T *)data + at) = p;
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

/// Tensors 0 .. M-1 of the walk are outputs (absent: NULL), the N after them inputs.
template <class IO, int M, int N, class Rule> static __global__ void __launch_bounds__(WALK_THREADS) map_kernel(const walk<M + N> w, const Rule rule)
{
  constexpr int V = IO::V, U = V == 1 ? 4 : 2;   // groups in flight
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
    for (int k = 0; k < N; k++) IO::fetch(raw[u][k], w.data[M + k], w.dtype[M + k], at[M + k], w.inner[M + k]);
  }
#pragma unroll
  for (int u = 0; u < U; u++) {
    if ((first + u * WALK_THREADS) * V + V > w.count) continue;
    float x[N][V], y[M][V];
#pragma unroll
    for (int k = 0; k < N; k++) IO::floats(x[k], raw[u][k], w.dtype[M + k]);
    rule(y, x);
#pragma unroll
    for (int k = 0; k < M; k++)
      if (M == 1 || w.data[k]) IO::store(w.data[k], w.dtype[k], to[u][k], y[k]);
  }
  if (V == 1 || w.count % V == 0 || blockIdx.x != gridDim.x - 1) return;
  // The short last group of a dense walk: an element a thread.
  int64_t at = w.count / V * V + threadIdx.x;
  if (at >= w.count) return;
  float x[N][1], y[M][1];
#pragma unroll
  for (int k = 0; k < N; k++) {
    mixed<1>::raw one;
    mixed<1>::fetch(one, w.data[M + k], w.dtype[M + k], at * w.inner[M + k], 1);
    mixed<1>::floats(x[k], one, w.dtype[M + k]);
  }
  rule(y, x);
#pragma unroll
  for (int k = 0; k < M; k++)
    if (M == 1 || w.data[k]) mixed<1>::store(w.data[k], w.dtype[k], at, y[k]);
}

template <class IO, int M, int N, class Rule> static void map_launch(const walk<M + N> &w, const Rule &rule)
{
  walk_parts<M + N>(w, IO::V == 1 ? 4 : 2, [&](const walk<M + N> &part, unsigned blocks) {
    map_kernel<IO, M, N, Rule><<<blocks, WALK_THREADS, 0, cuda_stream()>>>(part, rule);
  });
}

/// Runs a rule whose inputs are all f32, f16 or bf16, and whose outputs are, too, or bool. Kernels for one format alone are
/// made only where `Hot`.
template <int M, int N, bool Hot = true, class Rule> static eng_status map(const op_call *call, const Rule &rule)
{
  const tensor *over = call->out[0] ? call->out[0] : call->out[M - 1], *list[M + N];
  bool same = true;
  for (int k = 0; k < M + N; k++) {
    list[k] = k < M ? call->out[k] : call->in[k - M];
    same = same && (!list[k] || list[k]->dtype == over->dtype);
  }
  walk<M + N> w = walk_over<M + N>(over, list);
  bool done = false;
  if constexpr (Hot) {
    if (same && walk_bundle(w, over->dtype == ENG_f32 ? 4 : 8)) {
      done = true;
      if (over->dtype == ENG_f32) map_launch<uniform<float>, M, N>(w, rule);
      else if (over->dtype == ENG_f16) map_launch<uniform<f16_t>, M, N>(w, rule);
      else map_launch<uniform<bf16_t>, M, N>(w, rule);
    }
  }
  if (done) {
  } else if (walk_bundle(w, 4)) {
    map_launch<mixed<4>, M, N>(w, rule);
  } else {
    map_launch<mixed<1>, M, N>(w, rule);
  }
  CUDA_LAUNCHED(eng_op_name(call->op));
  return ENG_OK;
}

/// One element a thread: body(w, at) with `at` the offsets of the element in every tensor, `index` its number in row-major order.
template <int K, class Body> static __global__ void __launch_bounds__(WALK_THREADS) each_kernel(const walk<K> w, const Body body)
{
  int64_t index = (int64_t)blockIdx.x * WALK_THREADS + threadIdx.x;
  if (index >= w.groups) return;
  int64_t at[K];
  walk_offsets(at, w, index);
  body(w, at);
}

/// The slow way for any formats: outputs and inputs as in map.
template <int M, int N, class Body> static eng_status each(const op_call *call, const Body &body)
{
  const tensor *over = call->out[0] ? call->out[0] : call->out[M - 1], *list[M + N];
  for (int k = 0; k < M + N; k++) list[k] = k < M ? call->out[k] : call->in[k - M];
  walk_parts<M + N>(walk_over<M + N>(over, list), 1, [&](const walk<M + N> &part, unsigned blocks) {
    each_kernel<M + N, Body><<<blocks, WALK_THREADS, 0, cuda_stream()>>>(part, body);
  });
  CUDA_LAUNCHED(eng_op_name(call->op));
  return ENG_OK;
}

#endif
