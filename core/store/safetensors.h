// The safetensors format: 8 bytes little-endian header length, a JSON header that names each tensor
// with dtype, shape and byte range, then the bytes of the tensors without holes.
// Files are read with pread, not mapped: one that shrinks meanwhile is an error and no crash.
// Declared for scripts in engine.h. This header is for the fuzzer.
#ifndef ENG_SAFETENSORS_H
#define ENG_SAFETENSORS_H

#include "engine.h"

/// Checks a header of `size` bytes, followed by `data_size` bytes of data, and makes the file's
/// index of it. `header` is malloc'ed, changed and taken over, also on errors.
/// `path` is for messages.
eng_status safetensors_parse(eng_safetensors **out, const char *path, char *header, int64_t size, int64_t data_size);

#endif
