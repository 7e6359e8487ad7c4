// See json.h. Called by store/safetensors.c.
#include "json.h"

#include "error.h"
#include "text.h"

#include <string.h>

static long long position(const json_reader *reader)
{ return (long long)(reader->now - reader->start); }

// Describes the character at the read position, for messages.
static const char *found(const json_reader *reader)
{
  static _Thread_local char text[32];
  if (reader->now >= reader->end) return "the end of the text";
  unsigned char c = (unsigned char)*reader->now;
  if (c < 0x20 || c >= 0x7F) snprintf(text, sizeof text, "byte 0x%02X", c);
  else snprintf(text, sizeof text, "'%c'", c);
  return text;
}

static void skip_space(json_reader *reader)
{
  while (reader->now < reader->end && (*reader->now == ' ' || *reader->now == '\n' ||
                                       *reader->now == '\r' || *reader->now == '\t'))
    reader->now++;
}

eng_status json_open(json_reader *reader, const char *name, char *text, int64_t size)
{
  *reader = (json_reader){ text, text, text + size, name };
  int64_t valid = utf8_valid(text, size);
  if (valid == size) return ENG_OK;
  return error_set(ENG_ERR_FORMAT, "%s: invalid UTF-8 at byte %lld", name, (long long)valid);
}

bool json_accept(json_reader *reader, char c)
{
  skip_space(reader);
  if (reader->now >= reader->end || *reader->now != c) return false;
  reader->now++;
  return true;
}

eng_status json_expect(json_reader *reader, char c)
{
  if (json_accept(reader, c)) return ENG_OK;
  return error_set(ENG_ERR_FORMAT, "%s: expected '%c' at byte %lld, got %s", reader->name, c,
                   position(reader), found(reader));
}

// Returns the value of four hex digits at p, or -1 if there are fewer.
static int hex4(const char *p, const char *end)
{
  int value = 0;
  if (end - p < 4) return -1;
  for (int i = 0; i < 4; i++) {
    int digit = hex_digit(p[i]);
    if (digit < 0) return -1;
    value = 16 * value + digit;
  }
  return value;
}

// Decodes the escape after a backslash at reader->now. An escape is never shorter than its decoded
// text, so writing in place cannot overtake reading.
static eng_status unescape(json_reader *reader, char **to)
{
  static const char from[] = "\"\\/bfnrt", into[] = "\"\\/\b\f\n\r\t";
  char *p = reader->now, *end = reader->end;
  const char *known = p < end && *p != 0 ? strchr(from, *p) : NULL;
  if (known != NULL) {
    *(*to)++ = into[known - from];
    reader->now = p + 1;
    return ENG_OK;
  }
  FAIL_IF(p >= end || *p != 'u', ENG_ERR_FORMAT,
          "%s: unknown escape in a string at byte %lld: a backslash in front of %s", reader->name,
          position(reader), found(reader));
  int c = hex4(p + 1, end), used = 5;
  if (c >= 0xD800 && c < 0xDC00 && end - p >= 7 && p[5] == '\\' && p[6] == 'u') {
    int low = hex4(p + 7, end);
    if (low >= 0xDC00 && low < 0xE000) {
      c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
      used = 11;
    }
  }
  FAIL_IF(c <= 0 || (c >= 0xD800 && c < 0xE000), ENG_ERR_FORMAT,
          "%s: %s in a string at byte %lld", reader->name,
          c < 0 ? "malformed \\u escape" : c == 0 ? "a NUL character" : "half a surrogate pair",
          position(reader));
  *to += utf8_put(*to, (uint32_t)c);
  reader->now = p + used;
  return ENG_OK;
}

eng_status json_string(json_reader *reader, char **out)
{
  skip_space(reader);
  if (reader->now >= reader->end || *reader->now != '"')
    return error_set(ENG_ERR_FORMAT, "%s: expected a string at byte %lld, got %s", reader->name,
                     position(reader), found(reader));
  char *to = ++reader->now;
  *out = to;
  while (reader->now < reader->end) {
    unsigned char c = (unsigned char)*reader->now;
    if (c == '"') {
      reader->now++;
      *to = 0;                    // never past the closing quote
      return ENG_OK;
    }
    FAIL_IF(c < 0x20, ENG_ERR_FORMAT, "%s: control character 0x%02X in a string at byte %lld",
            reader->name, c, position(reader));
    reader->now++;
    if (c == '\\') ENG_TRY(unescape(reader, &to));
    else *to++ = (char)c;
  }
  return error_set(ENG_ERR_FORMAT, "%s: the string at byte %lld has no closing quote", reader->name,
                   (long long)(*out - reader->start - 1));
}

eng_status json_whole(json_reader *reader, int64_t *out)
{
  skip_space(reader);
  const char *p = reader->now, *end = reader->end;
  FAIL_IF(p >= end || *p < '0' || *p > '9', ENG_ERR_FORMAT, "%s: expected a whole number >= 0 at "
          "byte %lld, got %s", reader->name, position(reader), found(reader));
  uint64_t value = 0;
  const char *first = p;
  for (; p < end && *p >= '0' && *p <= '9'; p++) {
    uint64_t digit = (uint64_t)(*p - '0');
    FAIL_IF(value > ((uint64_t)INT64_MAX - digit) / 10, ENG_ERR_FORMAT,
            "%s: the number at byte %lld is larger than 2^63-1", reader->name, position(reader));
    value = 10 * value + digit;
  }
  FAIL_IF(p - first > 1 && *first == '0', ENG_ERR_FORMAT,
          "%s: the number at byte %lld begins with 0, which JSON forbids", reader->name,
          position(reader));
  FAIL_IF(p < end && (*p == '.' || *p == 'e' || *p == 'E'), ENG_ERR_FORMAT, "%s: expected a whole "
          "number at byte %lld, got a fraction or exponent", reader->name, position(reader));
  reader->now += p - first;
  *out = (int64_t)value;
  return ENG_OK;
}

eng_status json_close(json_reader *reader)
{
  skip_space(reader);
  if (reader->now == reader->end) return ENG_OK;
  return error_set(ENG_ERR_FORMAT, "%s: expected nothing after the closing brace, got %s at "
                   "byte %lld", reader->name, found(reader), position(reader));
}

bool json_is_text(const char *text)
{
  int64_t size = (int64_t)strlen(text);
  return utf8_valid(text, size) == size;
}

void json_put_string(FILE *to, const char *text)
{
  static const char escaped[] = "\"\\\b\f\n\r\t", letter[] = "\"\\bfnrt";
  fputc('"', to);
  for (; *text; text++) {
    const char *known = strchr(escaped, *text);
    if (known != NULL) fprintf(to, "\\%c", letter[known - escaped]);
    else if ((unsigned char)*text < 0x20) fprintf(to, "\\u%04x", *text);
    else fputc(*text, to);
  }
  fputc('"', to);
}

const char *json_show(const char *text)
{
  enum { MOST = 90 };
  static _Thread_local char buffers[4][MOST + 6];
  static _Thread_local unsigned turn;
  char *buffer = buffers[turn++ % 4];
  buffer[0] = '\'';
  bool cut = eng_text_shown(buffer + 1, MOST, text, (int64_t)strlen(text), false) >= MOST;
  strcat(buffer, cut ? "...'" : "'");
  return buffer;
}
