// Reads numbers from text, exactly. Called by policy/. eng_number_text, which writes numbers, is
// declared in engine.h.
#pragma once

#include "engine.h"

/// Reads text[0..size) as a finite decimal number of up to 63 characters, "inf", "-inf" or "nan",
/// in any locale. Returns false if the text is anything else.
bool number_read(double *out, const char *text, size_t size);
