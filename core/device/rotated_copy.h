// mx_quantize with a Hadamard transform (ops.def), for devices and calls that have no single kernel
// for it. Two other kernels of the device compute it: its hadamard, and its mx_quantize without a
// transform. Included by cpu/mx_quantize.c, cpu/reference_mx.c and the CUDA device. Owns scratch
// memory during a call.
#pragma once

#include "backend.h"

static inline eng_status quantize_rotated(const op_call *call, op_kernel *hadamard,
                                          op_kernel *quantize)
{
  enum { NAN_BYTES = 256 };            // of `nan`, padded so that y is aligned
  const tensor *x = call->in[0];
  int64_t columns = x->shape[x->ndim - 1], rows = columns ? x->count / columns : 0,
          bytes = NAN_BYTES + 2 * x->count;
  bool both = !(call->mx_quantize.flags & MX_ROTATED_ONLY);
  char *room = (char *)arena_alloc(ARENA_SCRATCH, bytes);
  tensor y = *x, nan = *x;             // y: the transformed x; nan: the count of NaN in y, unused
  op_call one = *call, rotate = *call, two = *call;
  if (!room) return ENG_ERR_MEMORY;
  nan.data = room, nan.dtype = ENG_i64;
  y.data = room + NAN_BYTES, y.dtype = ENG_bf16;
  y.ndim = 2, y.shape[0] = columns, y.shape[1] = rows;
  rotate.op = ENG_OP_hadamard;
  rotate.out[0] = &y;
  rotate.hadamard.n = call->mx_quantize.hadamard;
  rotate.hadamard.signs = call->mx_quantize.signs;
  rotate.hadamard.turned = 1;
  rotate.hadamard.dtype = ENG_bf16;
  one.mx_quantize.flags &= ~(int64_t)QUANTIZE_TRANSPOSED;
  one.mx_quantize.hadamard = 0;
  one.out[3] = one.out[4] = one.out[6] = NULL;
  two.mx_quantize = one.mx_quantize;
  two.mx_quantize.flags &= ~(int64_t)(MX_ROTATED_ONLY | MX_GATE);
  if (both) two.mx_quantize.counter += (x->count + 3) / 4;
  two.in[0] = &y, two.in[1] = NULL;
  two.out[0] = call->out[3], two.out[1] = call->out[4], two.out[2] = call->out[6];
  two.out[3] = two.out[4] = two.out[6] = two.out[7] = NULL;
  two.out[5] = &nan;
  eng_status status = both ? quantize(&one) : ENG_OK;
  if (status == ENG_OK) status = hadamard(&rotate);
  if (status == ENG_OK) status = quantize(&two);
  arena_free(ARENA_SCRATCH, room, bytes);
  return status;
}
