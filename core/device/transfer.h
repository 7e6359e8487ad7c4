// Transfers between host memory and tensors in any memory: reading, writing and clearing values
// outside of operations. Called by autograd/, params/, fp8/, dist/ and store/. See transfer.c.
#pragma once

#include "tensor/tensor.h"

/// transfer_read copies all elements of x into `buffer`: row-major host memory in dtype `format`.
/// transfer_write copies from such a buffer into x. x may have any strides. Both convert as
/// eng_read and eng_write do. A read waits for the device.
eng_status transfer_read(void *buffer, int format, const tensor *x);
eng_status transfer_write(const tensor *x, const void *buffer, int format);

/// transfer_clear fills a contiguous tensor with zeros. transfer_set sets the value of a tensor
/// with one element. Neither waits.
eng_status transfer_clear(const tensor *x);
eng_status transfer_set(const tensor *x, double value);

/// transfer_zero fills bytes with zeros. The other functions copy bytes within a space, from a
/// space to the host, and from the host to a space.
eng_status transfer_zero(int space, void *memory, int64_t bytes);
eng_status transfer_inside(int space, void *to, const void *from, int64_t bytes);
eng_status transfer_to_host(void *to, int space, const void *from, int64_t bytes);
eng_status transfer_from_host(int space, void *to, const void *from, int64_t bytes);

/// Computes a 64-bit checksum of bytes. Waits for the device (checksum.c).
eng_status transfer_checksum(uint64_t *out, int space, const void *data, int64_t bytes);

/// Copies x, which may have any strides, in row-major order into memory of the same space.
eng_status transfer_rows(void *to, const tensor *x);
