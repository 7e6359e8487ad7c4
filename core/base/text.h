// The length of UTF-8 characters, for text.c and json.c.
#pragma once

#include <stdint.h>

/// Bytes of the UTF-8 character at `text`, which has `left` > 0 bytes. 0 if it is malformed: an
/// overlong form, a surrogate, or a code above U+10FFFF.
int utf8_length(const char *text, int64_t left);
