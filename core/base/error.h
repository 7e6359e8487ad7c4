// Errors: almost every function of the core that can fail returns an eng_status. On an error it
// leaves a text in a buffer of the thread. The text says what was expected, what was given, where,
// and what to do:
//   "matmul: expected [.. x K] times [K x ..], got [4 x 3] and [5 x 3]; hint: transpose b"
// Used by every folder below main/; depends on none.
#pragma once

#include "engine.h"

/// Stores a printf-style message for this thread and returns `status`.
__attribute__((format(printf, 2, 3)))
eng_status error_set(eng_status status, const char *format, ...);

/// Unless `status` is ENG_OK, puts "context: " before this thread's message ("In blocks.3.attn:
/// ..."). Returns `status`.
__attribute__((format(printf, 2, 3)))
eng_status error_prefix(eng_status status, const char *format, ...);

/// Returns from the enclosing function with an error if `bad`: FAIL_IF(bad, ENG_ERR_SHAPE,
/// "add: ...", ...). Evaluates the arguments of the message only then.
#define FAIL_IF(bad, ...) \
  do { if (bad) return error_set(__VA_ARGS__); } while (0)

/// Returns from the enclosing function with the status of `call`, unless this status is ENG_OK.
#define ENG_TRY(call) \
  do { \
    eng_status try_status_ = (call); \
    if (try_status_ != ENG_OK) return try_status_; \
  } while (0)
