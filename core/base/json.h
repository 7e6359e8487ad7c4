// A strict reader for small JSON of known structure, safe on untrusted headers: no recursion, no
// allocation, no numbers except integers from 0 to 2^63-1, no NUL in strings. Each call but
// json_accept states what must come next; anything else is an ENG_ERR_FORMAT with the byte offset.
// Called by safetensors.c.
#pragma once

#include "engine.h"

#include <stdio.h>

typedef struct json_reader {
  char       *start, *now, *end;   // the text; strings are unescaped in place, which changes it
  const char *name;                // name of the input, for messages
} json_reader;

/// Begins to read `text`. It must be valid UTF-8; this call checks all of it.
eng_status json_open(json_reader *reader, const char *name, char *text, int64_t size);
/// Skips white space and consumes the next character, which must be `c`.
eng_status json_expect(json_reader *reader, char c);
/// Skips white space and consumes the next character if it is `c`; returns whether it was.
bool       json_accept(json_reader *reader, char c);
/// Reads a string. *out points into the text and ends with NUL.
eng_status json_string(json_reader *reader, char **out);
/// Reads an integer from 0 to 2^63-1.
eng_status json_whole(json_reader *reader, int64_t *out);
/// Fails unless only white space is left.
eng_status json_close(json_reader *reader);

/// Whether `text` is UTF-8.
bool json_is_text(const char *text);
/// Writes UTF-8 `text` as a JSON string.
void json_put_string(FILE *to, const char *text);

/// Returns `text` for a message: quoted, cut to fewer than 90 bytes, and made safe by
/// eng_text_shown. The result is in one of 4 buffers of this thread, which are used in turn.
const char *json_show(const char *text);
