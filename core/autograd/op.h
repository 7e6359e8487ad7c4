// Running operations. Every operation goes through op_run: check, apply the current precision,
// allocate, compute, record. Called by Lua (eng_run), this folder and fp8/. dist/ reads op_table.
#pragma once

#include "device/backend.h"

/// What autocast does with an operation; the `cast` column of ops.def.
typedef enum op_cast { CAST_LOWER, CAST_WIDE, CAST_NORM, CAST_EMBED, CAST_ANY, CAST_NONE } op_cast;
/// Which strides the kernel accepts, or why there is no kernel; the `layout` column.
typedef enum op_layout { LAYOUT_ANY, LAYOUT_ROWS, LAYOUT_VIEW, LAYOUT_CALLS } op_layout;

/// A row of ops.def (ops.c). Bit k of a mask is input or output k.
typedef struct op_info {
  eng_op_info about;
  op_layout layout;
  op_cast   cast;
  bool      differentiable;
  bool      takes_codes;        // accepts FP8 tensors; other operations refuse them
  // later: the outputs after output 0 that can have a gradient. They have one if an input in
  // later_from requires a gradient.
  int32_t   later, later_from;
  int32_t   codes;              // saved outputs that are FP8 codes and scales
} op_info;

extern const op_info op_table[ENG_OP_COUNT];

/// Returns the mask of the outputs that this call does not compute.
int op_absent_outputs(const op_call *call);
/// For a call that draws random numbers, returns its counter attribute and sets *blocks to the
/// number of Philox blocks per 4 elements. Returns NULL for other calls. The attribute after the
/// counter is nonzero if the counter is already set.
int64_t *op_random_place(op_call *call, int *blocks);
/// op_adds_onto: whether the call adds its result to the contents of `output`. op_takes_target:
/// whether the caller of operation `op` may pass its own tensor as output 0.
bool op_adds_onto(const op_call *call, int output);
bool op_takes_target(int op);

/// Shape and dtype of every output of a checked call.
typedef struct op_shape {
  struct { int dtype, ndim; int64_t shape[ENG_MAX_DIMS]; } out[ENG_OP_OUTPUTS];
} op_shape;

/// Checks inputs and attributes of a call and infers its outputs. Messages name the expected and
/// the actual values. Makes negative dimensions in the attributes non-negative.
eng_status op_infer(op_call *call, op_shape *shape);

/// op_infer_rule: a shape rule. op_calls: runs an operation of layout CALLS. For each operation
/// that ops.def marks `registered`, fp8/ registers one of them: op_calls for the layout CALLS,
/// otherwise op_infer_rule.
typedef eng_status op_infer_rule(op_call *call, op_shape *shape);
typedef eng_status op_calls(op_call *call);
void op_infer_register(int op, op_infer_rule *rule);
void op_register(int op, op_infer_rule *infer, op_calls *calls);

/// Returns the name of a call's operation.
const char *op_name(const op_call *call);

/// Returns the current precision.
const eng_precision *op_precision(void);

/// Creates the outputs of a VIEW operation. reshape copies x if its strides allow no view.
eng_status op_view(op_call *call, const op_shape *shape);

/// Runs an operation. The caller may pass an output tensor (not NULL), which must have the inferred
/// shape and keeps its dtype; the result is then written into this tensor. Records the call if
/// tape_wants returns true.
eng_status op_run(op_call *call);

/// Runs an operation with one output and a fixed number of inputs; op_run1 sets n_in.
eng_status op_run1(tensor **out, op_call call);

/// Replaces *x by the result of an operation with one output, and drops the old tensor. *x is input
/// 0 of the operation unless `call` names another. After an error, *x is NULL.
eng_status op_replace(tensor **x, op_call call);

/// Reshapes x, as a view if its strides allow it. One size may be -1.
eng_status op_reshape(tensor **out, tensor *x, int ndim, const int64_t *shape);
/// Reshapes x [.. x C] to [rows x C].
eng_status op_rows(tensor **out, tensor *x);

/// Broadcasts x to a shape, as a view.
eng_status op_expand(tensor **out, tensor *x, int ndim, const int64_t *shape);

static inline eng_status op_affine(tensor **out, tensor *x, double factor, double term)
{
  op_call c = {.op = ENG_OP_affine, .in = {x}, .affine = {.factor = factor, .term = term}};
  return op_run1(out, c);
}

/// Returns the promoted dtype: floats win over integers; f16 with bf16 gives f32; u8
/// with i8 gives i16.
int dtype_promote(int a, int b);

/// Broadcasts two shapes. Returns false if the shapes do not broadcast.
bool shape_broadcast(int *ndim, int64_t *shape, const tensor *a, const tensor *b);
