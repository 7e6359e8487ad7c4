// The safetensors format: a header length (8 bytes, little-endian), a JSON header that gives each
// tensor's name, dtype, shape and byte range, then the tensors' bytes without gaps. Files are read
// with pread and not mapped, so that a file that shrinks while it is read is an error and not a
// crash. engine_files.h declares the public functions. Included by safetensors.c and the fuzzer.
#pragma once

#include "engine.h"

/// Checks a header of `size` bytes, followed by `data_size` bytes of data, and builds the file's
/// index. `header` comes from malloc. The function modifies it, and the result owns it; after an
/// error it is freed. `path` is for messages.
eng_status safetensors_parse(eng_safetensors **out, const char *path, char *header, int64_t size,
                             int64_t data_size);
