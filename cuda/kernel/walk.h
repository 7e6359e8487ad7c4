// A walk visits the elements of several strided, broadcast tensors of one shape. It is prepared for
// kernels: dimensions that are contiguous in every tensor are merged, and multiplications replace
// divisions. Host code builds a walk and bundles its elements into groups of V adjacent elements if
// all tensors allow it. Device code computes offsets from a group's index. Included by kernel
// files. Owns nothing.
#pragma once

#include "runtime/device.h"

/// Division of integers below 2^31 by a divisor known before the launch.
struct divider { uint32_t size, factor, shift; };

static inline divider divider_of(int64_t size)
{
  uint32_t shift = 0;
  if (size < 1) size = 1;
  while ((1ull << shift) < (uint64_t)size) shift++;
  uint64_t factor = (((1ull << shift) - (uint64_t)size) << 32) / (uint64_t)size + 1;
  return {(uint32_t)size, (uint32_t)factor, shift};
}

__host__ __device__ static inline uint32_t divide(uint32_t n, divider d)
{ return ((uint32_t)((uint64_t)n * d.factor >> 32) + n) >> d.shift; }

/// N tensors of one shape. Dimensions are innermost first. A walk has `groups` groups of V
/// elements; V is 1 unless walk_bundle() changes it.
template <int N> struct walk {
  int32_t ndim;
  int32_t dtype[N], width[N];           // format; bytes that an offset of 1 spans
  void   *data[N];
  int64_t count, groups;
  int64_t shape[ENG_MAX_DIMS];          // in groups; `size` holds these sizes too, as dividers
  divider size[ENG_MAX_DIMS];
  int64_t stride[N][ENG_MAX_DIMS];      // elements from one group to the next
  int64_t inner[N];                     // elements from one member of a group to the next
};

/// The shape of a walk, outermost dimension first.
struct walk_shape {
  int     ndim;
  int64_t shape[ENG_MAX_DIMS];
};

static inline walk_shape shape_of(const tensor *x)
{
  walk_shape s = {x->ndim, {0}};
  for (int d = 0; d < x->ndim; d++) s.shape[d] = x->shape[d];
  return s;
}

/// Returns the stride of x along dimension `d` of a broadcast shape with `ndim` dimensions, or 0 if
/// x is broadcast along it. The last dimensions of x and of the shape are aligned.
static inline int64_t stride_in(const tensor *x, int ndim, int d)
{
  int own = d - (ndim - x->ndim);
  return own >= 0 && x->shape[own] != 1 ? x->stride[own] : 0;
}

/// Returns a walk over `shape`. stride[k][d] is the stride of tensor k along dimension d of
/// `shape`, whose dimensions are outermost first.
template <int N>
static walk<N> walk_of(walk_shape shape, const int64_t (&stride)[N][ENG_MAX_DIMS],
                       void *const (&data)[N], const int (&dtype)[N])
{
  walk<N> w = {};
  w.count = 1;
  for (int k = 0; k < N; k++) {
    w.data[k] = data[k];
    w.dtype[k] = dtype[k];
    w.width[k] = eng_dtype_size(dtype[k]);
  }
  for (int d = shape.ndim - 1; d >= 0; d--) {
    int64_t size = shape.shape[d];
    w.count *= size;
    if (size == 1) continue;
    int last = w.ndim - 1;
    bool merges = last >= 0;
    for (int k = 0; k < N && merges; k++)
      merges = stride[k][d] == w.stride[k][last] * w.shape[last];
    if (merges) {
      w.shape[last] *= size;
    } else {
      w.shape[w.ndim] = size;
      for (int k = 0; k < N; k++) w.stride[k][w.ndim] = stride[k][d];
      w.ndim++;
    }
  }
  if (w.ndim == 0) {
    w.ndim = 1;
    w.shape[0] = 1;
    for (int k = 0; k < N; k++) w.stride[k][0] = 1;
  }
  w.groups = w.count;
  for (int k = 0; k < N; k++) w.inner[k] = w.stride[k][0];
  return w;
}

/// Returns a walk over the tensors x, broadcast to the shape of `over`. x[k] may be NULL if kernels
/// do not access tensor k.
template <int N> static walk<N> walk_over(const tensor *over, const tensor *const (&x)[N])
{
  int64_t stride[N][ENG_MAX_DIMS] = {};
  void *data[N];
  int dtype[N];
  for (int k = 0; k < N; k++) {
    const tensor *t = x[k] ? x[k] : over;
    for (int d = 0; d < over->ndim; d++) stride[k][d] = stride_in(t, over->ndim, d);
    data[k] = data_of(x[k]);
    dtype[k] = t->dtype;
  }
  return walk_of<N>(shape_of(over), stride, data, dtype);
}

/// Bundles the elements into groups of V adjacent elements along the innermost dimension. Each
/// tensor must hold a group in contiguous, aligned memory, or repeat one element. In a walk of one
/// dimension the last group may be short. If bundling is impossible, returns false and changes
/// nothing.
template <int N> static bool walk_bundle(walk<N> &w, int V)
{
  if (w.ndim > 1 && w.shape[0] % V) return false;
  for (int k = 0; k < N; k++) {
    if (w.stride[k][0] == 0 || !w.data[k]) continue;
    if (w.stride[k][0] != 1 || (uintptr_t)w.data[k] % (uintptr_t)(V * w.width[k])) return false;
    for (int d = 1; d < w.ndim; d++)
      if (w.stride[k][d] % V) return false;
  }
  w.groups = w.ndim == 1 ? (w.count + V - 1) / V : w.count / V;
  w.shape[0] = w.ndim == 1 ? w.groups : w.shape[0] / V;
  for (int k = 0; k < N; k++) {
    w.inner[k] = w.stride[k][0];
    w.stride[k][0] *= V;
  }
  return true;
}

enum { WALK_THREADS = 256 };

/// Prepares a walk for walk_offsets.
template <int N> static void walk_dividers(walk<N> &w)
{ for (int d = 0; d < w.ndim && w.ndim > 1; d++) w.size[d] = divider_of(w.shape[d]); }

/// Calls launch(part, blocks) once, for the whole walk. If the walk has several dimensions and too
/// many groups for 32-bit counts, calls it once for each of several smaller parts. A part's offsets
/// count from the data pointers of the part. `unroll` is the number of groups per thread.
template <int N, class Launch> static void walk_parts(walk<N> w, int unroll, const Launch &launch)
{
  const int64_t most = 1ll << 31;
  int last = w.ndim - 1;
  if (w.ndim > 1 && w.groups >= most) {
    int64_t each = w.groups / w.shape[last], members = w.count / w.groups;
    int64_t step = each < most ? (most - 1) / each : 1;
    for (int64_t at = 0; at < w.shape[last]; at += step) {
      walk<N> part = w;
      part.shape[last] = w.shape[last] - at < step ? w.shape[last] - at : step;
      part.groups = each * part.shape[last];
      part.count = part.groups * members;
      for (int k = 0; k < N; k++)
        if (w.data[k]) part.data[k] = (char *)w.data[k] + at * w.stride[k][last] * w.width[k];
      if (part.shape[last] == 1) part.ndim--;
      walk_parts<N>(part, unroll, launch);
    }
    return;
  }
  walk_dividers(w);
  launch(w, (unsigned)parts(w.groups, (int64_t)WALK_THREADS * unroll));
}

/// Computes the offset, in elements, of a group's first element in every tensor.
template <int N>
__device__ static inline void walk_offsets(int64_t (&at)[N], const walk<N> &w, int64_t group)
{
  if (w.ndim == 1) {
#pragma unroll
    for (int k = 0; k < N; k++) at[k] = group * w.stride[k][0];
    return;
  }
  uint32_t rest = (uint32_t)group;
#pragma unroll
  for (int k = 0; k < N; k++) at[k] = 0;
#pragma unroll 1
  for (int d = 0; d < ENG_MAX_DIMS; d++) {
    bool last = d == w.ndim - 1;
    uint32_t next = last ? 0 : divide(rest, w.size[d]),
             index = last ? rest : rest - next * w.size[d].size;
#pragma unroll
    for (int k = 0; k < N; k++) at[k] += (int64_t)index * w.stride[k][d];
    if (last) break;
    rest = next;
  }
}
