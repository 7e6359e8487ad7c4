// Finds the known name closest to a misspelt one. See text.h and eng_nearest in engine.h. Called by
// policy/ and Lua.
#include "text.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

enum { LONGEST = 64 };   // bytes; a longer name matches nothing

static int lower(char c) { return c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c; }

static int smaller(int a, int b) { return a < b ? a : b; }

// Returns the number of edits from a to b. A swap of neighbours counts as one edit. A swap needs
// the row before the previous one, so the function keeps three rows of the edit-distance table.
static int distance(const char *a, int length_a, const char *b, int length_b)
{
  int rows[3][LONGEST + 1];
  for (int j = 0; j <= length_b; ++j) rows[0][j] = j;
  for (int i = 1; i <= length_a; ++i) {
    int *row = rows[i % 3], *up = rows[(i + 2) % 3], *up2 = rows[(i + 1) % 3];
    row[0] = i;
    for (int j = 1; j <= length_b; ++j) {
      int differs = lower(a[i - 1]) != lower(b[j - 1]);
      row[j] = smaller(up[j - 1] + differs, smaller(up[j], row[j - 1]) + 1);
      if (i > 1 && j > 1 && lower(a[i - 1]) == lower(b[j - 2]) &&
          lower(a[i - 2]) == lower(b[j - 1]))
        row[j] = smaller(row[j], up2[j - 2] + 1);
    }
  }
  return rows[length_a % 3][length_b];
}

int eng_nearest(const char *name, const char *const *names, int n)
{
  int best = -1, best_distance = 0, length = (int)strnlen(name, LONGEST + 1);
  if (length > LONGEST) return -1;
  for (int i = 0; i < n; ++i) {
    int other = (int)strnlen(names[i], LONGEST + 1);
    if (other > LONGEST) continue;
    const char *dot = strrchr(names[i], '.');
    int d =
      dot != NULL && strcasecmp(dot + 1, name) == 0 ? 1 : distance(name, length, names[i], other);
    int longer = length > other ? length : other;
    if (d > (longer / 3 > 1 ? longer / 3 : 1)) continue;
    if (best < 0 || d < best_distance) best = i, best_distance = d;
  }
  return best;
}

const char *nearest_hint(const char *name, const char *const *names, int n)
{
  static _Thread_local char text[96];
  int found = eng_nearest(name, names, n);
  if (found < 0) return "";
  snprintf(text, sizeof text, "; did you mean '%s'?", names[found]);
  return text;
}
