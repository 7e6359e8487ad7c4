// Reads numbers from text, exactly. Called by policy/. eng_number_text, which writes numbers, is
// declared in engine.h.
#pragma once

#include "engine.h"

/// Reads a number that fills text[0..size), in any locale: decimal, "inf", "-inf" or "nan".
bool number_read(double *out, const char *text, size_t size);
