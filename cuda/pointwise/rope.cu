// Rotary position embedding: rotates pairs of features of x [B x T x H x D] by an angle that grows
// with the position. Angles, cosines and sines are computed in double, once per position and pair,
// into a table of f32; rotations are in f32. For f64 tensors everything is in double, pair by pair.
// Called through the device's table.
#include "kernel/map.h"
#include "base/rope.h"

/// The angles of a call. at() computes the cosine and the sine for pair i at row t.
struct rope_angle {
  rope_scaling scaling;
  double       direction;       // 1, or -1 to rotate back
  int64_t      first, half;     // position of row 0; D/2
  __device__ void at(int64_t t, int64_t i, double *cosine, double *sine) const
  {
    double angle = (double)(first + t) * rope_frequency(&scaling, i, half);
    sincos(angle, sine, cosine);
    *sine *= direction;
  }
};

/// Fills table [2 x T x D/2] with the cosines, then with the sines times `direction`.
static __global__ void __launch_bounds__(128)
  table_kernel(float *table, rope_angle angle, int64_t count)
{
  int64_t at = (int64_t)blockIdx.x * 128 + threadIdx.x;
  if (at >= count) return;
  double cosine, sine;
  angle.at(at / angle.half, at % angle.half, &cosine, &sine);
  table[at] = (float)cosine;
  table[count + at] = (float)sine;
}

/// Rotates V pairs (a, b) per thread. The walk holds y, x and the cosines. A thread reads two runs
/// of V elements of x. Either the first run holds every a and the second every b, or pairs are
/// interleaved (`neighbours`).
template <int V> struct rotate_body {
  // distances in elements: from the first run to the second in y (apart) and in x (x_apart); from
  // cosine to sine in the table (sines)
  int64_t apart, x_apart, sines;
  bool    neighbours;
  __device__ void operator()(const walk<3> &w, const int64_t (&at)[3]) const
  {
    typedef mixed<V> lanes;
    typename lanes::raw first, second;
    lanes::fetch(first, w.data[1], w.dtype[1], at[1], 1);
    lanes::fetch(second, w.data[1], w.dtype[1], at[1] + x_apart, 1);
    pack<float, V> c = *(const pack<float, V> *)((const float *)w.data[2] + at[2]);
    pack<float, V> s = *(const pack<float, V> *)((const float *)w.data[2] + at[2] + sines);
    float p[V], q[V], a[V], b[V];
    lanes::floats(p, first, w.dtype[1]);
    lanes::floats(q, second, w.dtype[1]);
    bool side_by_side = neighbours && V > 1;
#pragma unroll
    for (int v = 0; v < V; v++) {
      int k = 2 * v;   // index of a[v] among the 2V interleaved elements
      a[v] = side_by_side ? (k < V ? p[k % V] : q[k % V]) : p[v];
      b[v] = side_by_side ? (k + 1 < V ? p[(k + 1) % V] : q[(k + 1) % V]) : q[v];
    }
#pragma unroll
    for (int v = 0; v < V; v++) {
      float turned = fmaf(a[v], c.v[v], -(b[v] * s.v[v]));
      b[v] = fmaf(b[v], c.v[v], a[v] * s.v[v]);
      a[v] = turned;
    }
#pragma unroll
    for (int v = 0; v < V; v++) {
      p[v] = side_by_side ? (v % 2 ? b[v / 2] : a[v / 2]) : a[v];
      q[v] = side_by_side ? (v % 2 ? b[(V + v) / 2] : a[(V + v) / 2]) : b[v];
    }
    lanes::store(w.data[0], w.dtype[0], at[0], p);
    lanes::store(w.data[0], w.dtype[0], at[0] + apart, q);
  }
};

struct rotate_double {   // the walk holds y, x, and the index in the table
  rope_angle angle;
  int64_t    apart, x_apart;
  __device__ void operator()(const walk<3> &w, const int64_t (&at)[3]) const
  {
    double c, s, a = element_double(w.data[1], w.dtype[1], at[1]),
                 b = element_double(w.data[1], w.dtype[1], at[1] + x_apart);
    angle.at(at[2] / angle.half, at[2] % angle.half, &c, &s);
    element_store(w.data[0], w.dtype[0], at[0], a * c - b * s);
    element_store(w.data[0], w.dtype[0], at[0] + apart, b * c + a * s);
  }
};

/// Returns a walk over groups of V pairs in y, x and the table.
static walk<3> pairs_of(const tensor *y, const tensor *x, float *table, int64_t pair, int V)
{
  int64_t half = x->shape[3] / 2, stride[3][ENG_MAX_DIMS] = {};
  walk_shape shape = {4, {x->shape[0], x->shape[1], x->shape[2], half / V}};
  for (int d = 0; d < 3; d++) {
    stride[0][d] = y->stride[d];
    stride[1][d] = x->stride[d];
    stride[2][d] = d == 1 ? half : 0;
  }
  stride[0][3] = V * pair * y->stride[3];
  stride[1][3] = V * pair * x->stride[3];
  stride[2][3] = V;
  return walk_of<3>(shape, stride, {y->data, x->data, table}, {y->dtype, x->dtype, ENG_f32});
}

// Whether runs of V elements can be read and written in one access.
static bool vectors_fit(const tensor *y, const tensor *x, int V)
{
  bool fit = x->shape[3] / 2 % V == 0 && x->stride[3] == 1 && y->stride[3] == 1 &&
             ((uintptr_t)x->data | (uintptr_t)y->data) % 16 == 0;
  for (int d = 0; d < 3; d++) fit = fit && x->stride[d] % V == 0 && y->stride[d] % V == 0;
  return fit;
}

extern "C" eng_status cuda_rope(const op_call *call)
{
  const tensor *x = call->in[0], *y = call->out[0];
  bool neighbours = call->rope.interleaved != 0;
  int64_t half = x->shape[3] / 2, pair = neighbours ? 2 : 1, places = x->shape[1] * half;
  int64_t apart = (neighbours ? 1 : half) * y->stride[3],
          x_apart = (neighbours ? 1 : half) * x->stride[3];
  rope_angle angle = {{call->rope.base, call->rope.factor, call->rope.low, call->rope.high,
                       call->rope.context},
                      call->rope.backward ? -1.0 : 1.0, call->rope.position, half};
  if (!all_fast(call)) {
    each_of(pairs_of(y, x, NULL, pair, 1), rotate_double{angle, apart, x_apart});
  } else {
    int64_t bytes = 2 * places * (int64_t)sizeof(float);
    float *table = (float *)scratch_take(bytes);
    if (!table) return ENG_ERR_MEMORY;
    table_kernel<<<(unsigned)((places + 127) / 128), 128, 0, cuda_stream()>>>(table, angle, places);
    if (vectors_fit(y, x, 4)) {
      int64_t second = neighbours ? 4 : half;   // where the second run of 4 elements begins
      each_of(pairs_of(y, x, table, pair, 4), rotate_body<4>{second, second, places, neighbours});
    } else {
      each_of(pairs_of(y, x, table, pair, 1), rotate_body<1>{apart, x_apart, places, neighbours});
    }
    scratch_give(table, bytes);
  }
  return cuda_launched("rope");
}
