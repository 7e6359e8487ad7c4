// Lua patterns (%a, [sets], * + - ?, captures, %b, %f) with bounded work: the matcher for policies,
// because LuaJIT's may backtrack for hours inside one call. Independent of Lua states. Called by
// policy_box.c.
#ifndef ENG_PATTERN_H
#define ENG_PATTERN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { PATTERN_CAPTURES = 32 };

typedef struct pattern_capture {
  size_t    begin;
  ptrdiff_t length;         // PATTERN_POSITION: an empty capture "()" stands for begin + 1
} pattern_capture;

enum { PATTERN_OPEN = -1, PATTERN_POSITION = -2 };

/// The state of one match. The caller sets subject, pattern and work; the rest is filled in.
typedef struct pattern_state {
  const char *subject, *pattern;
  size_t subject_length, pattern_length;
  int64_t work;             // single-character tests left; below zero the match ends with an error
  const char *error;  // NULL, or why the pattern is refused; pattern_exhausted when `work` runs out
  int depth;
  int captures;
  pattern_capture capture[PATTERN_CAPTURES];
} pattern_state;

/// The value of `error` when `work` runs out.
extern const char pattern_exhausted[];

/// Matches the pattern from offset `at` in the pattern and `start` in the subject, anchored there.
/// True with *end (offset after the match) and the captures; false with error NULL: no match.
bool pattern_match(pattern_state *m, size_t start, size_t at, size_t *end);

#endif
