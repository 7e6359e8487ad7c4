// Helpers shared by the reference kernels: iteration over strided tensors (walk), and dense copies
// in double. Included only by reference*.c and reference_side.h.
//
// Most kernels read every input into a dense array of doubles, compute with plain loops, and write
// the result back with one rounding. Integers go through int64 and wrap.
#pragma once

#include "device/backend.h"
#include "base/error.h"
#include "base/numerics.h"
#include "tensor/scratch.h"

#include <string.h>

// ------------------------------------------------------------------ walking

enum { WALK_TENSORS = 5 };

/// An iteration over a shape in row-major order. Keeps the current offset in each of its tensors.
typedef struct walk {
  int     ndim;
  int     n;                                      // number of tensors
  int64_t shape[ENG_MAX_DIMS], index[ENG_MAX_DIMS];
  int64_t stride[WALK_TENSORS][ENG_MAX_DIMS];     // in elements
  int64_t at[WALK_TENSORS];                       // offset of the current element of each tensor
  int64_t position, count;                        // steps taken, steps in the whole walk
} walk;

walk walk_over(int ndim, const int64_t *shape);
/// Adds `x` to the walk. Its dimensions align with the last dimensions of the shape; a dimension of
/// size 1 is broadcast.
void walk_add(walk *w, const tensor *x);
/// Adds an array to the walk. `stride` holds its strides in elements, one for each dimension of the
/// shape.
void walk_add_strides(walk *w, const int64_t *stride);
/// Returns a walk over the shape of output 0 of an elementwise call. Its tensors are the inputs,
/// then the output; none may be absent.
walk walk_call(const op_call *call);
static inline bool walk_ended(const walk *w) { return w->position >= w->count; }
void walk_next(walk *w);

// ------------------------------------------------------------------ dense copies

/// Like SCRATCH (scratch.h), but all elements are zero.
#define ZEROS(type, name, count)     \
  SCRATCH(type, name, count);        \
  memset(name, 0, (size_t)name##_piece.bytes)
/// Declares `name`, the elements of x as doubles, in scratch memory; NULL if x is absent.
#define VALUES(name, x)                                 \
  SCRATCH(double, name##_room, (x) ? (x)->count : 0);   \
  double *const name = values_load(name##_room, (x))

/// Writes the elements of x, in row-major order, to `values`. Returns `values`, or NULL if x is
/// absent.
double *values_load(double *values, const tensor *x);
/// Rounds dense values into x or, if `add`, adds them to x's values. x may be absent.
void    values_store(const tensor *x, const double *values, bool add);

// ------------------------------------------------------------------ elements

/// These functions load or store the element of x that is `at` elements after x->data.
static inline double load_at(const tensor *x, int64_t at)
{ return tensor_load(x->data, x->dtype, at); }
static inline int64_t load_int_at(const tensor *x, int64_t at)
{ return tensor_load_int(x->data, x->dtype, at); }
static inline void store_at(const tensor *x, int64_t at, double value)
{ tensor_store(x->data, x->dtype, at, value); }
static inline void store_int_at(const tensor *x, int64_t at, int64_t value)
{ tensor_store_int(x->data, x->dtype, at, value); }
/// Copies one element: bit for bit when the formats agree, else rounded once.
void element_copy(const tensor *to, int64_t to_at, const tensor *from, int64_t from_at);
/// Returns whether the element of x at offset a is greater (sign 1) or less (sign -1) than the
/// element at offset b. With either sign, a NaN beats every number; -0 equals +0.
bool element_beats(const tensor *x, int64_t a, int64_t b, int sign);

/// Returns the logarithm of the sum of exp(x[i]) over i < n. Subtracts the largest value first.
/// Returns -inf for n = 0, and NaN if the largest value is infinite (inf - inf).
double row_logsumexp(const double *x, int64_t n);

static inline double sigmoid_of(double x)  { return 1.0 / (1.0 + __builtin_exp(-x)); }
static inline double silu_of(double x)     { return x * sigmoid_of(x); }
double silu_slope(double x);

// ------------------------------------------------------------------ kernels

// Declares reference_<name> for every operation that needs a kernel. If one is missing, linking
// fails.
#define ENG_KERNEL(name) op_kernel reference_##name;
#include "ops.def"

eng_status reference_gradstats(const param_span *spans, int n, unsigned needs,
                               eng_tensor_stats *stats);
eng_status reference_optimize(const param_span *spans, int n, const eng_update *update);
eng_status reference_unscale(const param_span *spans, int n, double factor, float *const *target,
                             int *found_inf);
