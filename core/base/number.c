// Converts doubles to decimal text and back without loss, in any locale. Called by policy/,
// tokenizer/tokenizer.c and Lua.
#define _GNU_SOURCE
#include "text.h"

#include "numerics.h"

#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static double to_number(const char *text, char **end)
{
  static locale_t plain;     // the C locale: a host program's setlocale must not affect the reading
  if (!plain) plain = newlocale(LC_ALL_MASK, "C", (locale_t)0);
  return plain ? strtod_l(text, end, plain) : strtod(text, end);
}

void eng_number_text(char out[32], double x)
{
  if (f64_is_nan(x)) { strcpy(out, "nan"); return; }
  if (!f64_is_finite(x)) { strcpy(out, x < 0 ? "-inf" : "inf"); return; }
  if (x == 0) { strcpy(out, signbit(x) ? "-0.0" : "0"); return; }   // LuaJIT reads -0 as 0
  if (fabs(x) < 0x1p53 && x == trunc(x)) { snprintf(out, 32, "%.0f", x); return; }
  for (int digits = 15; digits <= 17; ++digits) {
    snprintf(out, 32, "%.*g", digits, x);
    for (char *c = out; *c; ++c)
      if (!strchr("0123456789+-e", *c)) *c = '.';
    if (to_number(out, NULL) == x) return;
  }
}

bool number_read(double *out, const char *text, size_t size)
{
  char copy[64], *end;
  if (size == 0 || size >= sizeof copy) return false;
  memcpy(copy, text, size);
  copy[size] = '\0';
  if (strcmp(copy, "inf") == 0) { *out = INFINITY; return true; }
  if (strcmp(copy, "-inf") == 0) { *out = -INFINITY; return true; }
  if (strcmp(copy, "nan") == 0) { *out = NAN; return true; }
  if (strspn(copy, "0123456789+-.eE") != size) return false;
  *out = to_number(copy, &end);
  return end == copy + size && f64_is_finite(*out);
}
