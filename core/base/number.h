// Reads numbers from text, exactly. eng_number_text, which writes them, is public: see engine.h.
// Called by policy/.
#pragma once

#include "engine.h"

/// Reads a number that fills text[0..size), in any locale: decimal, "inf", "-inf" or "nan".
bool number_read(double *out, const char *text, size_t size);
