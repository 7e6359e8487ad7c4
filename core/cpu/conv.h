// Convolutions inside the CPU device. Included by conv_onednn.c and by its caller, conv.c.
#pragma once

#include "device/backend.h"

/// What a call computes: y, the gradient of x, or the gradient of the weight.
typedef enum conv_kind { CONV_FORWARD, CONV_INPUT, CONV_WEIGHT, CONV_KINDS } conv_kind;

/// The tensors of a convolution. x and y are channels last; W is [O x C/groups x KH x KW]. In a
/// CONV_INPUT call, X is dx; in a CONV_WEIGHT call, W is dW; in both, Y is dy.
typedef enum conv_part { CONV_X, CONV_W, CONV_Y, CONV_BIAS, CONV_PARTS } conv_part;

/// A convolution. Its fields, except `data`, are the key of conv_onednn's table of primitives.
typedef struct conv_call {
  int64_t kind;                         // conv_kind
  int64_t n, h, w, c;                   // x [n x h x w x c]
  int64_t p, q, o;                      // y [n x p x q x o]
  int64_t groups, threads;              // threads: the number of OpenMP threads
  int64_t kernel[2], stride[2], padding[2], dilation[2];
  int64_t dtype[CONV_PARTS];            // -1 for an absent bias
  void   *data[CONV_PARTS];             // BIAS may be NULL, and is NULL for gradients
} conv_call;

/// Returns the part that a call writes.
static inline conv_part conv_result(int64_t kind)
{ return kind == CONV_FORWARD ? CONV_Y : kind == CONV_INPUT ? CONV_X : CONV_W; }

/// Computes the call through oneDNN. *done is false if oneDNN does not support it, or if a size is
/// above 2^24. Must be called from the main thread. Errors: MEMORY, LIBRARY.
eng_status conv_onednn(bool *done, const conv_call *call);
