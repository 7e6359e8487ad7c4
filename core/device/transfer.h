// Between host memory and tensors, wherever these live: reading, writing and clearing values outside of operations.
// Called by api.c, tape.c, params.c, rng.c and gradient rules. See transfer.c.
#ifndef ENG_TRANSFER_H
#define ENG_TRANSFER_H

#include "tensor/tensor.h"

/// All elements of x, of any strides, to or from row-major host memory in format `format`, converting as eng_read and
/// eng_write say. A read waits for the device.
eng_status transfer_read(void *buffer, int format, const tensor *x);
eng_status transfer_write(const tensor *x, const void *buffer, int format);

/// Zeros in a contiguous tensor, and one value in a tensor of one element; neither waits.
eng_status transfer_clear(const tensor *x);
eng_status transfer_set(const tensor *x, double value);

/// Zero bytes; bytes within a memory space, out of one to the host, and from the host into one.
eng_status transfer_zero(int space, void *memory, int64_t bytes);
eng_status transfer_inside(int space, void *to, const void *from, int64_t bytes);
eng_status transfer_to_host(void *to, int space, const void *from, int64_t bytes);
eng_status transfer_from_host(int space, void *to, const void *from, int64_t bytes);

/// A row-major copy of x, of any strides, into memory of its space.
eng_status transfer_rows(void *to, const tensor *x);

#endif
