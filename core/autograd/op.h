// The one door for operations: check, apply the precision in force, allocate, compute, record.
// eng_run (Lua) and the gradient rules both come in here.
#ifndef ENG_OP_H
#define ENG_OP_H

#include "device/backend.h"

/// What autocast does with an operation; the `cast` column of ops.def.
typedef enum op_cast { CAST_LOWER, CAST_WIDE, CAST_NORM, CAST_EMBED, CAST_ANY, CAST_NONE } op_cast;
/// What strides its kernel takes; the `layout` column.
typedef enum op_layout { LAYOUT_ANY, LAYOUT_ROWS, LAYOUT_VIEW } op_layout;

typedef struct op_info {
  const char *name;
  int n_in, n_out;          // -1: MANY
  op_layout layout;
  op_cast cast;
} op_info;

extern const op_info op_table[ENG_OP_COUNT];

/// Shape and dtype of every output of a checked call.
typedef struct op_shape {
  struct { int dtype, ndim; int64_t shape[ENG_MAX_DIMS]; } out[ENG_OP_OUTPUTS];
} op_shape;

/// Checks inputs and attributes of a call (with a message that names expected and got) and says what
/// comes out. Normalises negative dimensions in the attributes.
eng_status op_infer(op_call *call, op_shape *shape);

/// Its parts in infer_fp8.c: refuses FP8 inputs of operations that would compute with them; the FP8 operations.
eng_status infer_fp8_refuse(const op_call *call);
eng_status infer_quantize(op_call *call, op_shape *shape);
eng_status infer_swiglu_quantize(op_call *call, op_shape *shape);
eng_status infer_dequantize(op_call *call, op_shape *shape);
eng_status infer_fp8_matmul(op_call *call, op_shape *shape);

/// Makes the outputs of a VIEW operation (reshape may have to copy).
eng_status op_view(op_call *call, const op_shape *shape);

/// Runs an operation. An output that is given (non-NULL) is written in place: it must have the
/// inferred shape and takes its own dtype. Records when the tape wants it.
eng_status op_run(op_call *call);

/// Shorthands for gradient rules: one output, inputs by position, attributes by compound literal.
eng_status op_run1(tensor **out, int op, tensor *a, tensor *b, tensor *c, const int64_t *ints, int n_ints, double f0, double f1);

/// y in `dtype`; x itself when it already is (then *made is false).
eng_status op_cast_to(tensor **out, bool *made, tensor *x, int dtype);

/// The widest of two dtypes: floats win over integers, f16 with bf16 gives f32.
int dtype_promote(int a, int b);

/// Broadcast of two shapes; false when they do not fit.
bool shape_broadcast(int *ndim, int64_t *shape, const tensor *a, const tensor *b);

#endif
