// Functions that shape rules share: they check the inputs of a call and set its outputs. Messages
// count dimensions from 1, as scripts do. Used by infer*.c and by the rules of fp8/.
#pragma once

#include "op.h"

/// Declares the rule infer_<shape> for each name in the column `shape` of ops.def.
#define ENG_OP(name, inputs, outputs, layout, cast, shape, ...) op_infer_rule infer_##shape;
#include "ops.def"

/// Set the dtype and shape of output k. put_like uses the shape of x; put_outer uses the shape of x
/// without its last dimension.
void put_out(op_shape *s, int k, int dtype, int ndim, const int64_t *shape);
void put_like(op_shape *s, int k, int dtype, const tensor *x);
void put_outer(op_shape *s, int k, int dtype, const tensor *x);

/// Check input k. want_float: its dtype is floating-point. want_floats: the dtypes of the first n
/// inputs are floating-point. want_index: its dtype is an integer dtype, not bool; `what` names the
/// input in the message. want_ndim: it has at least `least` dimensions. want_shape: it has this
/// shape, which the message calls the shape of `what`. want_same: it has the shape of input j.
/// Errors: DTYPE, SHAPE.
eng_status want_float(const op_call *c, int k);
eng_status want_floats(const op_call *c, int n);
eng_status want_index(const op_call *c, int k, const char *what);
eng_status want_ndim(const op_call *c, int k, int least);
eng_status want_shape(const op_call *c, int k, int ndim, const int64_t *shape, const char *what);
eng_status want_same(const op_call *c, int j, int k);
/// Checks that input k, if present, is a floating-point vector [n]; `what` names it in the message.
eng_status want_vector(const op_call *c, int k, const char *what, int64_t n);
/// Checks that an attribute holds the number of a floating-point dtype.
eng_status want_float_attribute(const op_call *c, int64_t dtype);
/// Converts a negative dimension, which counts from the end of x's shape, to one that counts from
/// 0. Errors: VALUE if x has no such dimension.
eng_status fix_dim(const op_call *c, int64_t *dim, const tensor *x);

/// Returns f32 for f16 and bf16, and any other dtype unchanged.
int wide_of(int dtype);
