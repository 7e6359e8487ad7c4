// Plain data outside of Lua. A blob is a sequence of bytes that holds a number, a string, a boolean
// or a tree of tables. A blob can be converted to canonical text and back. A policy's state is
// copied into a blob after every decision; checkpoints hold the text. These functions need no Lua
// state. Called by policy_state.c, by policy_vm.c to free blobs and, for the order of keys, by
// policy_library.c.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { DATA_DEPTH = 31 };       // the most levels of tables that data_parse reads

// A value begins with its tag: 'n', then a double; 's', then a uint32 length and the bytes; 't' for
// true; 'f' for false. A table is '{' (key value)* '}'.
typedef struct data_blob {
  char   *bytes;
  size_t  size;
  int64_t capacity;
  bool    failed;               // memory ran out and at least one write was dropped
} data_blob;

void data_free(data_blob *b);
static inline void data_clear(data_blob *b) { b->size = 0; b->failed = false; }
bool data_grow(data_blob *b, size_t room);
void data_append(data_blob *b, const char *bytes, size_t size);

// These functions are inline, because they run at every decision of every policy.
static inline char *data_reserve(data_blob *b, size_t room)
{
  if ((size_t)b->capacity - b->size < room && !data_grow(b, room)) return NULL;
  char *at = b->bytes + b->size;
  b->size += room;
  return at;
}

// Appends one byte: a tag that stands alone ('{', '}', 't', 'f') or, in a text, a character.
static inline void data_tag(data_blob *b, char tag)
{
  char *at = data_reserve(b, 1);
  if (at) *at = tag;
}

static inline void data_number(data_blob *b, double x)
{
  char *at = data_reserve(b, 1 + sizeof x);
  if (!at) return;
  *at = 'n';
  memcpy(at + 1, &x, sizeof x);
}

static inline void data_string(data_blob *b, const char *s, size_t length)
{
  uint32_t n = (uint32_t)length;
  char *at = data_reserve(b, 1 + sizeof n + length);
  if (!at) return;
  *at = 's';
  memcpy(at + 1, &n, sizeof n);
  memcpy(at + 1 + sizeof n, s, length);
}

/// One value read from a blob. The item of a table is its '{'; the contents follow.
typedef struct data_item {
  char tag;
  uint32_t length;
  double number;
  const char *string;
} data_item;
/// Reads the item at `at`; returns the position after it.
const char *data_read(data_item *out, const char *at);
/// Returns the position after the value at `at`. If the value is a table, skips its contents too.
const char *data_skip(const char *at);
/// Returns the position of the value of the string key `key` in the table at `at`, or NULL.
const char *data_find(const char *at, const char *key);

/// Compares two keys for qsort: numbers, then strings by bytes, then booleans.
int data_by_key(const void *left, const void *right);

/// Appends the canonical text of the value at `at`. In a table, the keys 1..n come first, then the
/// other keys in the order of data_by_key. eng_number_text writes the doubles.
void data_text(data_blob *text, const char *at);
/// Parses text in the form that data_text writes; white space is allowed. Returns false, with a
/// message in `error`, if the text does not have this form or memory runs out.
bool data_parse(data_blob *out, const char *text, size_t size, char *error, size_t error_size);
