// Blobs and their text form. See policy_data.h. Called by policy_state.c, policy_vm.c and
// policy_library.c.
#define _GNU_SOURCE
#include "policy_data.h"

#include "base/array.h"
#include "base/numerics.h"
#include "base/scope.h"
#include "base/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ------------------------------------------------------------------ writing and reading blobs

void data_free(data_blob *b)
{
  free(b->bytes);
  *b = (data_blob){0};
}

bool data_grow(data_blob *b, size_t room)
{
  bool grown = ARRAY_GROW(b->bytes, b->capacity, (int64_t)(b->size + room));
  b->failed = b->failed || !grown;
  return grown;
}

void data_append(data_blob *b, const char *bytes, size_t size)
{
  char *at = data_reserve(b, size);
  if (at && size) memcpy(at, bytes, size);
}

const char *data_read(data_item *out, const char *at)
{
  out->tag = *at++;
  if (out->tag == 'n') {
    memcpy(&out->number, at, sizeof out->number);
    at += sizeof out->number;
  } else if (out->tag == 's') {
    memcpy(&out->length, at, sizeof out->length);
    out->string = at + sizeof out->length;
    at = out->string + out->length;
  }
  return at;
}

const char *data_skip(const char *at)
{
  data_item item;
  int open = 0;
  do {
    at = data_read(&item, at);
    open += item.tag == '{' ? 1 : item.tag == '}' ? -1 : 0;
  } while (open > 0);
  return at;
}

const char *data_find(const char *at, const char *key)
{
  data_item item;
  size_t length = strlen(key);
  at = data_read(&item, at);
  if (item.tag != '{') return NULL;
  while (*at != '}') {
    const char *value = data_read(&item, at);
    if (item.tag == 's' && item.length == length && memcmp(item.string, key, length) == 0)
      return value;
    at = data_skip(value);
  }
  return NULL;
}

// ------------------------------------------------------------------ blob to text

static int rank(char tag) { return tag == 'n' ? 0 : tag == 's' ? 1 : tag == 'f' ? 2 : 3; }

int data_by_key(const void *left, const void *right)
{
  const data_item *a = left, *b = right;
  if (a->tag != b->tag) return rank(a->tag) - rank(b->tag);
  if (a->tag == 'n') return (a->number > b->number) - (a->number < b->number);
  if (a->tag != 's') return 0;
  uint32_t common = a->length < b->length ? a->length : b->length;
  int order = memcmp(a->string, b->string, common);
  return order ? order : (a->length > b->length) - (a->length < b->length);
}

static void put(data_blob *text, const char *s) { data_append(text, s, strlen(s)); }

static void put_string(data_blob *text, const char *s, size_t length)
{
  data_tag(text, '"');
  for (size_t i = 0; i < length; ++i) {
    unsigned char c = (unsigned char)s[i];
    char code[8];
    if (c == '\n') put(text, "\\n");
    else if (c == '"' || c == '\\') { data_tag(text, '\\'); data_tag(text, (char)c); }
    else if (c < 32 || c > 126) { snprintf(code, sizeof code, "\\%03d", c); put(text, code); }
    else data_tag(text, (char)c);
  }
  data_tag(text, '"');
}

static bool is_letter(char c)
{ return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

static bool is_identifier(const char *s, size_t length)
{
  for (size_t i = 0; i < length; ++i)
    if (!is_letter(s[i]) && !(i > 0 && is_digit(s[i]))) return false;
  return length > 0;
}

typedef struct entry { data_item key; const char *at, *value; } entry;   // sorted by the key

static void put_table(data_blob *text, const char *at)
{
  int n = 0;
  for (const char *c = at; *c != '}'; c = data_skip(data_skip(c))) ++n;
  FREED entry *entries = malloc((size_t)(n ? n : 1) * sizeof *entries);
  if (!entries) { text->failed = true; return; }
  for (int i = 0; i < n; ++i) {
    entries[i].at = at;
    entries[i].value = data_read(&entries[i].key, at);
    at = data_skip(entries[i].value);
  }
  qsort(entries, (size_t)n, sizeof *entries, data_by_key);
  int first = 0;
  while (first < n && entries[first].key.tag == 'n' && entries[first].key.number < 1) ++first;
  int last = first;                                   // the keys 1, 2 .. are entries [first, last)
  while (last < n && entries[last].key.tag == 'n' && entries[last].key.number == last - first + 1)
    ++last;

  data_tag(text, '{');
  for (int i = first; i < last; ++i) {
    if (i > first) data_tag(text, ',');
    data_text(text, entries[i].value);
  }
  bool comma = last > first;
  for (int i = 0; i < n; ++i) {
    if (i >= first && i < last) continue;
    const data_item *key = &entries[i].key;
    if (comma) data_tag(text, ',');
    comma = true;
    if (key->tag == 's' && is_identifier(key->string, key->length)) {
      data_append(text, key->string, key->length);
    } else {
      data_tag(text, '[');
      data_text(text, entries[i].at);
      data_tag(text, ']');
    }
    data_tag(text, '=');
    data_text(text, entries[i].value);
  }
  data_tag(text, '}');
}

void data_text(data_blob *text, const char *at)
{
  data_item item;
  char number[32];
  at = data_read(&item, at);
  switch (item.tag) {
    case 'n': eng_number_text(number, item.number); put(text, number); break;
    case 's': put_string(text, item.string, item.length); break;
    case '{': put_table(text, at); break;
    default:  put(text, item.tag == 't' ? "true" : "false");
  }
}

// ------------------------------------------------------------------ text to blob

typedef struct reader {
  const char *text;
  size_t size, at;
  data_blob *out;
  const char *error;
} reader;

static bool refuse(reader *r, const char *why)
{
  if (!r->error) r->error = why;
  return false;
}

static char peek(reader *r)
{
  while (r->at < r->size && strchr(" \t\r\n", r->text[r->at]) && r->text[r->at]) ++r->at;
  return r->at < r->size ? r->text[r->at] : '\0';
}

static bool parse_value(reader *r, int depth);

static bool parse_string(reader *r)
{
  size_t start = ++r->at, length = 0;
  FREED char *copy = malloc(r->size - start + 1);
  if (!copy) return refuse(r, "out of memory");
  while (r->at < r->size && r->text[r->at] != '"') {
    char c = r->text[r->at++];
    if (c == '\\') {
      c = r->at < r->size ? r->text[r->at++] : '\0';
      if (c == 'n') c = '\n';
      else if (is_digit(c)) {
        int code = c - '0';
        for (int i = 0; i < 2 && r->at < r->size && is_digit(r->text[r->at]); ++i)
          code = code * 10 + (r->text[r->at++] - '0');
        if (code > 255) return refuse(r, "an escape above \\255");
        c = (char)code;
      } else if (c != '"' && c != '\\') return refuse(r, "an unknown escape in a string");
    }
    copy[length++] = c;
  }
  if (r->at == r->size) return refuse(r, "an unterminated string");
  data_string(r->out, copy, length);
  ++r->at;
  return true;
}

static size_t word_length(const reader *r)
{
  size_t end = r->at;
  for (; end < r->size; ++end) {
    char c = r->text[end];
    if (!is_letter(c) && !is_digit(c) && (c == 0 || !strchr(".-+", c))) break;
  }
  return end - r->at;
}

static bool parse_table(reader *r, int depth)
{
  ++r->at;
  data_tag(r->out, '{');
  double next = 1;
  while (peek(r) != '}') {
    char c = peek(r);
    size_t here = r->at, word = word_length(r);
    if (c == '[') {
      ++r->at;
      peek(r);
      if (peek(r) == '{') return refuse(r, "a key that is a table");
      size_t key = r->out->size;
      if (!parse_value(r, depth)) return false;
      data_item item = {0};
      if (!r->out->failed) data_read(&item, r->out->bytes + key);
      if (item.tag == 'n' && f64_is_nan(item.number)) return refuse(r, "a key that is nan");
      if (peek(r) != ']') return refuse(r, "expected ']' after a key");
      ++r->at;
      if (peek(r) != '=') return refuse(r, "expected '=' after a key");
      ++r->at;
    } else if (is_identifier(r->text + here, word) && (r->at += word, peek(r) == '=')) {
      data_string(r->out, r->text + here, word);
      ++r->at;
    } else {
      r->at = here;
      data_number(r->out, next++);
    }
    if (!parse_value(r, depth)) return false;
    if (peek(r) == ',') ++r->at;
    else if (peek(r) != '}') return refuse(r, "expected ',' or '}'");
  }
  ++r->at;
  data_tag(r->out, '}');
  return true;
}

static bool parse_value(reader *r, int depth)
{
  char c = peek(r);
  if (c == '{')
    return depth == DATA_DEPTH ? refuse(r, "tables nest too deeply") : parse_table(r, depth + 1);
  if (c == '"') return parse_string(r);
  size_t word = word_length(r);
  const char *text = r->text + r->at;
  double number;
  if (word == 4 && memcmp(text, "true", 4) == 0) data_tag(r->out, 't');
  else if (word == 5 && memcmp(text, "false", 5) == 0) data_tag(r->out, 'f');
  else if (number_read(&number, text, word)) data_number(r->out, number);
  else return refuse(r, "expected a number, string, boolean or table");
  r->at += word;
  return true;
}

bool data_parse(data_blob *out, const char *text, size_t size, char *error, size_t error_size)
{
  reader r = { .text = text, .size = size, .out = out };
  bool fine = parse_value(&r, 0) &&
              (peek(&r) == '\0' && r.at == size ? true : refuse(&r, "text after the end"));
  if (fine && out->failed) fine = refuse(&r, "out of memory");
  if (!fine) snprintf(error, error_size, "%s (byte %zu of %zu)", r.error, r.at, size);
  return fine;
}
