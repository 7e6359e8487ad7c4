// Makes text of unknown origin (policies, scripts, files, other ranks) safe for terminals, logs and
// HTML pages, and checks names. Called by the core's messages (error.c, json.c, policy/, dist/,
// main/) and, through lua/engine/base/show.lua, by everything that prints.
#include "text.h"

#include <stdio.h>
#include <string.h>

int utf8_length(const char *text, int64_t left)
{
  const unsigned char *at = (const unsigned char *)text;
  if (*at < 0x80) return 1;
  int n = *at >= 0xC2 && *at < 0xE0   ? 2
          : *at >= 0xE0 && *at < 0xF0 ? 3
          : *at >= 0xF0 && *at < 0xF5 ? 4
                                      : 0;
  if (n == 0 || left < 2 || (at[1] & 0xC0) != 0x80 || (*at == 0xE0 && at[1] < 0xA0) ||
      (*at == 0xED && at[1] > 0x9F) || (*at == 0xF0 && at[1] < 0x90) ||
      (*at == 0xF4 && at[1] > 0x8F))
    return -1;
  for (int i = 2; i < n; i++)
    if (i >= left || (at[i] & 0xC0) != 0x80) return -i;
  return n;
}

int64_t utf8_valid(const char *text, int64_t size)
{
  int64_t i = 0;
  while (i < size) {
    uint64_t eight;
    if (size - i >= 8 && (memcpy(&eight, text + i, 8), !(eight & 0x8080808080808080ull))) {
      i += 8;
      continue;
    }
    int n = utf8_length(text + i, size - i);
    if (n < 0) break;
    i += n;
  }
  return i;
}

int utf8_put(char *out, uint32_t c)
{
  static const unsigned char first[] = {0, 0, 0xC0, 0xE0, 0xF0};   // by the number of bytes
  int n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
  for (int i = n - 1; i > 0; i--, c >>= 6) out[i] = (char)(0x80 | (c & 0x3F));
  out[0] = (char)(first[n] | c);
  return n;
}

int hex_digit(char c)
{
  return c >= '0' && c <= '9'   ? c - '0'
         : c >= 'a' && c <= 'f' ? c - 'a' + 10
         : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                : -1;
}

// Whether a terminal executes the character, or shows the characters after it in another order or
// on another line: C0, DEL, C1, U+061C, U+200E, U+200F, U+2028 to U+202E, U+2066 to U+2069.
static bool acts(const unsigned char *at, int n)
{
  if (n == 1) return *at < 0x20 || *at == 0x7F;
  if (n == 2) return (*at == 0xC2 && at[1] < 0xA0) || (*at == 0xD8 && at[1] == 0x9C);
  return n == 3 && *at == 0xE2 &&
         ((at[1] == 0x80 && (at[2] == 0x8E || at[2] == 0x8F || (at[2] >= 0xA8 && at[2] <= 0xAE))) ||
          (at[1] == 0x81 && at[2] >= 0xA6 && at[2] <= 0xA9));
}

int64_t eng_text_shown(char *out, int64_t room, const char *text, int64_t size, bool lines)
{
  const unsigned char *from = (const unsigned char *)text;
  int64_t whole = 0, written = 0, left = size;
  bool fits = room > 0;
  while (left > 0) {
    int n = utf8_length((const char *)from, left), used = n > 0 ? n : 1;
    char piece[20];
    size_t length = 0;
    if (n == 1 && (*from == '\n' || *from == '\t')) {
      piece[length++] = lines ? (char)*from : ' ';
    } else if (n < 0 || acts(from, n)) {
      for (int i = 0; i < used; i++)
        length += (size_t)snprintf(piece + length, sizeof piece - length, "\\x%02X", from[i]);
    } else {
      memcpy(piece, from, (size_t)n);
      length = (size_t)n;
    }
    fits = fits && written + (int64_t)length < room;
    if (fits) {
      memcpy(out + written, piece, length);
      written += (int64_t)length;
    }
    whole += (int64_t)length;
    from += used;
    left -= used;
  }
  if (room > 0) out[written] = 0;
  return whole;
}

const char *eng_name_problem(const char *name, int64_t size)
{
  if (size == 0) return "is empty";
  if (size > ENG_NAME_BYTES) return "has more than 100 bytes";
  bool shown = eng_text_shown(NULL, 0, name, size, false) == size;
  for (int64_t i = 0; i < size; i++) shown = shown && (unsigned char)name[i] >= 0x20;
  return shown ? NULL : "has a control character, a character that breaks lines or changes the "
                        "direction of text, or bytes that are not UTF-8";
}
