// See gemm_cache.h. Owns the table. Called by gemm_lt.c.
#include "gemm_cache.h"

#include <ctype.h>
#include <fcntl.h>
#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
  PATH = 4096,
  MOST_BYTES = 8 << 20,   // the most bytes read from a file
};

static struct {
  void *entries;   // a tree of tsearch(3), whose keys are pointers to entries
  char path[PATH];
} cache;

// ---- lines

static char *put_number(char *at, const char *name, int64_t value)
{ return at + sprintf(at, " %s=%lld", name, (long long)value); }

/// Reads " name=number" at `at`. Returns the address after the number, or NULL if `at` is NULL or
/// does not begin with " name=". The caller checks the number's form.
static const char *take_number(const char *at, const char *name, int64_t *value)
{
  size_t length = strlen(name);
  if (!at || *at != ' ' || strncmp(at + 1, name, length) != 0 || at[1 + length] != '=') return NULL;
  char *end;
  *value = strtoll(at + length + 2, &end, 10);
  return end;
}

int gemm_line_write(char line[GEMM_LINE], const gemm_problem *problem, const gemm_choice *choice)
{
  char *at = line + sprintf(line, "choice");
#define GEMM_FIELD(name) at = put_number(at, #name, problem->name);
  GEMM_PROBLEM_FIELDS(GEMM_FIELD)
#undef GEMM_FIELD
  at += sprintf(at, " :");
#define GEMM_FIELD(name) at = put_number(at, #name, choice->name);
  GEMM_CHOICE_FIELDS(GEMM_FIELD)
#undef GEMM_FIELD
  *at++ = '\n';
  *at = 0;
  return (int)(at - line);
}

bool gemm_line_read(const char *line, gemm_problem *problem, gemm_choice *choice)
{
  if (strncmp(line, "choice", 6) != 0) return false;
  const char *at = line + 6;
#define GEMM_FIELD(name) at = take_number(at, #name, &problem->name);
  GEMM_PROBLEM_FIELDS(GEMM_FIELD)
#undef GEMM_FIELD
  if (!at || strncmp(at, " :", 2) != 0) return false;
  at += 2;
#define GEMM_FIELD(name) at = take_number(at, #name, &choice->name);
  GEMM_CHOICE_FIELDS(GEMM_FIELD)
#undef GEMM_FIELD
  if (!at) return false;
  char again[GEMM_LINE];   // differs from `line` if, for example, a number is missing or too large
  gemm_line_write(again, problem, choice);
  return strcmp(line, again) == 0;
}

const char *gemm_problem_text(const gemm_problem *problem)
{
  static char text[GEMM_LINE];
  char *at = text;
#define GEMM_FIELD(name) at = put_number(at, #name, problem->name);
  GEMM_PROBLEM_FIELDS(GEMM_FIELD)
#undef GEMM_FIELD
  return text + 1;
}

bool gemm_same_algorithm(const gemm_choice *a, const gemm_choice *b)
{
  gemm_choice x = *a, y = *b;
  x.rank = y.rank = x.ns = y.ns = 0;
  return memcmp(&x, &y, sizeof x) == 0;   // no padding, because all fields are int64_t
}

// ---- the table

/// Compares the problems of two entries, or a problem and an entry, which begins with its problem.
static int compare(const void *a, const void *b) { return memcmp(a, b, sizeof(gemm_problem)); }

gemm_entry *gemm_cache_entry(const gemm_problem *problem)
{
  gemm_entry **found = tfind(problem, &cache.entries, compare);
  if (found) return *found;
  gemm_entry *entry = calloc(1, sizeof *entry);
  if (!entry) return NULL;
  entry->problem = *problem;
  if (tsearch(entry, &cache.entries, compare)) return entry;
  free(entry);
  return NULL;
}

void gemm_cache_clear(void)
{
  while (cache.entries) {
    gemm_entry *entry = *(gemm_entry **)cache.entries;
    tdelete(entry, &cache.entries, compare);
    free(entry);
  }
  cache.path[0] = 0;
}

// ---- the file

/// Creates the parent folders of `path`. If this fails, opening the file fails later.
static void make_folders(char *path)
{
  for (char *at = path + 1; *at; at++) {
    if (*at != '/') continue;
    *at = 0;
    mkdir(path, 0777);
    *at = '/';
  }
}

/// Converts the name of a card to the form used in file names: "NVIDIA H200" to "nvidia-h200".
static void plain_name(char *name, size_t size, const char *card)
{
  size_t n = 0;
  for (; *card && n + 1 < size; card++) {
    if (isalnum((unsigned char)*card)) name[n++] = (char)tolower((unsigned char)*card);
    else if (n > 0 && name[n - 1] != '-') name[n++] = '-';
  }
  name[n] = 0;
}

static void read_lines(char *text)
{
  for (char *line = text, *end; (end = strchr(line, '\n')); line = end + 1) {
    char after = end[1];
    end[1] = 0;
    gemm_problem problem;
    gemm_choice choice;
    if (gemm_line_read(line, &problem, &choice)) {
      gemm_entry *entry = gemm_cache_entry(&problem);
      if (entry) {
        entry->choice = choice;
        entry->chosen = true;
      }
    }
    end[1] = after;
  }
}

static void read_file(void)
{
  struct stat about;
  int fd = open(cache.path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  // O_NONBLOCK, because without it, opening a pipe would block
  FILE *file =
    fd >= 0 && fstat(fd, &about) == 0 && S_ISREG(about.st_mode) ? fdopen(fd, "rb") : NULL;
  if (!file) {
    if (fd >= 0) close(fd);
    return;
  }
  char *text = malloc(MOST_BYTES + 1);
  if (text) {
    size_t n = fread(text, 1, MOST_BYTES, file);
    for (size_t i = 0; i < n; i++)
      if (!text[i]) text[i] = '?';   // a NUL must not end the text
    text[n] = 0;
    read_lines(text);
    free(text);
  }
  fclose(file);
}

void gemm_cache_open(const char *card, int64_t version)
{
  char name[128];
  plain_name(name, sizeof name, card);
  const char *folder = getenv("ENGINE_CACHE"), *below = "";
  if (!folder || !*folder) {
    folder = getenv("HOME");
    below = "/.cache/engine";
  }
  if (!folder || !*folder) return;
  if (snprintf(cache.path, PATH, "%s%s/cublaslt-%s-%lld.txt", folder, below, name,
               (long long)version) < PATH)
    read_file();
  else cache.path[0] = 0;
}

const char *gemm_cache_path(void) { return cache.path; }

bool gemm_cache_keep(gemm_entry *entry, const gemm_choice *choice)
{
  entry->choice = *choice;
  entry->chosen = true;
  if (!cache.path[0]) return false;
  make_folders(cache.path);
  char line[GEMM_LINE + 1] = "\n";   // the newline ends an earlier, truncated line
  int n = gemm_line_write(line + 1, &entry->problem, choice) + 1;
  int fd = open(cache.path, O_WRONLY | O_APPEND | O_CREAT | O_NONBLOCK | O_CLOEXEC, 0666);
  if (fd < 0) return false;
  bool whole = write(fd, line, (size_t)n) == n;
  return close(fd) == 0 && whole;
}
