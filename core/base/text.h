// UTF-8 and hexadecimal digits, for text.c, json.c and tokenizer/.
#pragma once

#include <stdint.h>

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
