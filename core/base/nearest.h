// Suggestions for misspelt names in error messages. Called by policy/. The search, eng_nearest, is
// declared in engine.h.
#pragma once

#include "engine.h"

/// Returns "; did you mean 'x'?", where x is the entry of `names` [n] closest to `name`, or "" if
/// no entry is close. The result is in a buffer of this thread; the next call overwrites it.
const char *nearest_hint(const char *name, const char *const *names, int n);
