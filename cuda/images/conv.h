// The CUDA kernels that run before and after the matrix products of a convolution. See conv.c,
// which calls them, and conv_kernels.cu.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif
#include "device/backend.h"

/// Tells which pixels a convolution multiplies. A place is an output pixel: of y or, for the
/// gradient of x (`turned`), of dx. `from` is the input: x or, if turned, dy. For each tap (element
/// of the kernel), a place "meets" the pixel of `from` that it reads. It meets none if the tap is
/// over the padding or, if turned, over a gap that the stride leaves.
typedef struct conv_gather {
  const void *from;                  // [N x high x wide x groups x channels]
  int32_t     dtype;
  bool        turned;
  int64_t     places;                // N x rows x columns, below 2^31
  int64_t     rows, columns;         // of the places of an image
  int64_t     high, wide;
  int64_t     groups, channels;      // channels of one group
  int64_t     kernel[2], stride[2], padding[2], dilation[2];
} conv_gather;

/// Fills `to` [count x groups x taps x channels] with the pixels that `count` places meet, from
/// place `first` on. Elements become zeros where a tap meets no pixel.
eng_status conv_collect(void *to, const conv_gather *g, int64_t first, int64_t count);

/// The weights as matrices, one for each group. Element (tap * channels + c, o) is at offset
/// o * column + (tap * channels + c) * row + group * batch from data, in elements.
typedef struct conv_weights {
  const void *data;
  int32_t     dtype;
  int64_t     count, width;          // number of all elements; o < width
  int64_t     row, column, batch;
} conv_weights;

/// Recomputes the elements of out [places x groups x width] that are NaN, from the pixels that
/// their places meet. (In the product, a tap that meets no pixel contributes a weight times 0,
/// which is NaN if the weight is Inf or NaN.) Does nothing if all weights are finite. `bias` is
/// [groups x width] or NULL.
eng_status conv_repair(const tensor *out, const conv_gather *g, const conv_weights *w,
                       const tensor *bias);

/// Stores sum [O x taps x channels], which is f32 or f64 (`dtype`), in dw [O x channels x taps] or,
/// with `add`, adds it to dw. Rounds once. Elements that are NaN are recomputed, as in conv_repair,
/// from x (g->from) and dy.
eng_status conv_finish_weights(const tensor *dw, const void *sum, int dtype, const conv_gather *g,
                               const tensor *dy, bool add);

#ifdef __cplusplus
}
#endif
