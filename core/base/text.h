// UTF-8 and hexadecimal digits, for text.c, json.c and tokenizer/.
#pragma once

#include <stdint.h>

/// Bytes of the UTF-8 character at `text`, which has `left` > 0 bytes. Negative if it is malformed
/// (cut off, an overlong form, a surrogate, or above U+10FFFF): minus the number of bytes that
/// could begin a character, at least 1, which one U+FFFD replaces.
int utf8_length(const char *text, int64_t left);
/// The number of bytes, from the start, that are UTF-8.
int64_t utf8_valid(const char *text, int64_t size);
/// Writes a code point as UTF-8; returns the number of bytes, 1 to 4.
int utf8_put(char *out, uint32_t code);
/// The value of a hexadecimal digit; -1 for any other character.
int hex_digit(char c);
