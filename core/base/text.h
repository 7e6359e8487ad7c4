// Text: UTF-8 and hexadecimal digits (text.c), exact decimal numbers (number.c), suggestions for
// misspelt names (nearest.c). Included by these files, json.c, tokenizer/ and policy/. What Lua
// calls of these files is declared in engine.h.
#pragma once

#include "engine.h"

/// Returns the length in bytes of the UTF-8 character at `text`, which has `left` > 0 bytes. If the
/// character is malformed (cut off, an overlong form, a surrogate, or above U+10FFFF), returns -n:
/// a repair replaces the first n >= 1 bytes of the character by one U+FFFD.
int utf8_length(const char *text, int64_t left);
/// Returns the length in bytes of the valid UTF-8 at the start of the text.
int64_t utf8_valid(const char *text, int64_t size);
/// Writes a code point as UTF-8; returns the number of bytes, 1 to 4.
int utf8_put(char *out, uint32_t code);
/// Returns the value of a hexadecimal digit, or -1 for any other character.
int hex_digit(char c);

/// Reads text[0..size) as a finite decimal number of up to 63 characters, "inf", "-inf" or "nan",
/// in any locale. Returns false if the text is anything else.
bool number_read(double *out, const char *text, size_t size);

/// Returns "; did you mean 'x'?", where x is the entry of `names` [n] closest to `name`, or "" if
/// no entry is close. The result is in a buffer of this thread; the next call overwrites it.
const char *nearest_hint(const char *name, const char *const *names, int n);
