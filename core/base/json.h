// A strict pull reader for small JSON of a known form, made for headers from strangers: no
// recursion, no allocation, no number but whole ones from 0 to 2^63-1, no NUL in a string. The
// caller asks for what must come next; anything else is an ENG_ERR_FORMAT that tells the byte.
// Called by safetensors.c.
#ifndef ENG_JSON_H
#define ENG_JSON_H

#include "engine.h"

#include <stdio.h>

typedef struct json_reader {
  char       *start, *now, *end;   // the text; strings are unescaped in place, so it is changed
  const char *name;                // what is read, for messages
} json_reader;

/// The text must be valid UTF-8, checked here once.
eng_status json_open(json_reader *reader, const char *name, char *text, int64_t size);
/// The next character must be `c`, after white space.
eng_status json_expect(json_reader *reader, char c);
/// Whether the next character is `c`, after white space; consumes it then.
bool       json_accept(json_reader *reader, char c);
/// A string; `out` ends with NUL and lives in the text.
eng_status json_string(json_reader *reader, char **out);
/// A whole number from 0 to 2^63-1.
eng_status json_whole(json_reader *reader, int64_t *out);
/// Nothing but white space may be left.
eng_status json_close(json_reader *reader);

/// Whether `text` is UTF-8.
bool json_is_text(const char *text);
/// Writes UTF-8 `text` as a JSON string.
void json_put_string(FILE *to, const char *text);

/// `text` for a message: quoted, cut to a line, control characters as '?', so that a name in a
/// hostile file cannot drive the terminal. A rotating buffer of this thread (4 of them).
const char *json_show(const char *text);

#endif
