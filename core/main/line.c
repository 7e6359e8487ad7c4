// Line editing for the REPL; see line.h. Owns the editor and its history. Called by main.c.
#include "line.h"

#include <errno.h>
#include <histedit.h>   // EditLine, History
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <wchar.h>

enum { HISTORY_SIZE = 2000, COMPLETION_SIZE = 16384 };

static EditLine *editor;
static History *history_list;
static const char *current_prompt = "";
static line_completer *current_completer;
static void *completer_data;
static bool was_interrupted;

static char *plain_line;      // the line from getline, used when lines are not edited
static size_t plain_size;

bool line_is_edited(void)
{
  const char *terminal = getenv("TERM");
  return isatty(STDIN_FILENO) && isatty(STDOUT_FILENO) && terminal && strcmp(terminal, "dumb") != 0;
}

static char *prompt_of(EditLine *el)
{
  (void)el;
  return (char *)(uintptr_t)current_prompt;
}

// libedit retries an interrupted read, but in a REPL Ctrl-C must drop the line.
static int read_character(EditLine *el, wchar_t *out)
{
  (void)el;
  mbstate_t state = {0};
  for (;;) {
    char byte;
    ssize_t got = read(STDIN_FILENO, &byte, 1);
    if (got == 0) return 0;
    if (got < 0) {
      was_interrupted = errno == EINTR;
      return -1;
    }
    size_t used = mbrtowc(out, &byte, 1, &state);
    if (used == (size_t)-2) continue;                   // the character is not complete yet
    if (used == (size_t)-1) { memset(&state, 0, sizeof state); *out = L'?'; }
    return 1;
  }
}

static unsigned char complete(EditLine *el, int key)
{
  (void)key;
  static char before[COMPLETION_SIZE], insert[COMPLETION_SIZE], list[COMPLETION_SIZE];
  const LineInfo *line = el_line(el);
  size_t length = (size_t)(line->cursor - line->buffer);
  if (!current_completer || length >= sizeof before) return CC_ERROR;
  memcpy(before, line->buffer, length);
  before[length] = 0;
  insert[0] = list[0] = 0;
  current_completer(completer_data, before, insert, sizeof insert, list, sizeof list);
  if (list[0]) printf("\n%s\n", list);
  if (insert[0] && el_insertstr(el, insert) != 0) return CC_ERROR;
  if (list[0]) return CC_REDISPLAY;
  return insert[0] ? CC_REFRESH : CC_ERROR;
}

static bool open_history(void)
{
  if (history_list) return true;
  HistEvent event;
  history_list = history_init();
  if (!history_list) return false;
  history(history_list, &event, H_SETSIZE, HISTORY_SIZE);
  history(history_list, &event, H_SETUNIQUE, 1);
  return true;
}

static bool open_editor(void)
{
  if (editor) return true;
  if (!line_is_edited() || !open_history()) return false;
  editor = el_init("engine", stdin, stdout, stderr);
  if (!editor) return false;
  el_set(editor, EL_EDITOR, "emacs");
  el_set(editor, EL_PROMPT, prompt_of);
  el_set(editor, EL_HIST, history, history_list);
  el_set(editor, EL_GETCFN, read_character);
  el_set(editor, EL_ADDFN, "lua-complete", "complete a name", complete);
  el_set(editor, EL_BIND, "^I", "lua-complete", NULL);
  el_set(editor, EL_BIND, "^R", "em-inc-search-prev", NULL);
  el_set(editor, EL_BIND, "\033[1;5C", "em-next-word", NULL);
  el_set(editor, EL_BIND, "\033[1;5D", "ed-prev-word", NULL);
  return true;
}

static line_result read_plainly(const char **text, const char *prompt)
{
  fputs(prompt, stdout);
  fflush(stdout);
  ssize_t length = getline(&plain_line, &plain_size, stdin);
  if (length < 0) {
    bool interrupted = ferror(stdin) && errno == EINTR;
    clearerr(stdin);
    return interrupted ? LINE_INTERRUPTED : LINE_END;
  }
  if (length > 0 && plain_line[length - 1] == '\n') plain_line[length - 1] = 0;
  *text = plain_line;
  return LINE_OK;
}

line_result line_read(const char **text, const char *prompt, line_completer *completer, void *data)
{
  static char edited[65536];
  struct sigaction before, now;
  sigaction(SIGINT, NULL, &before);
  now = before;
  now.sa_flags &= ~SA_RESTART;          // Ctrl-C must interrupt the read
  sigaction(SIGINT, &now, NULL);

  line_result result;
  *text = "";
  if (!open_editor()) {
    result = read_plainly(text, prompt);
  } else {
    int count = 0;
    current_prompt = prompt;
    current_completer = completer;
    completer_data = data;
    was_interrupted = false;
    const char *line = el_gets(editor, &count);
    if (!line || count <= 0) {
      result = was_interrupted ? LINE_INTERRUPTED : LINE_END;
      if (was_interrupted) el_reset(editor);
      putchar('\n');
    } else {
      snprintf(edited, sizeof edited, "%.*s", (int)strcspn(line, "\n"), line);
      *text = edited;
      result = LINE_OK;
    }
  }
  sigaction(SIGINT, &before, NULL);
  return result;
}

void line_history_load(const char *file)
{
  HistEvent event;
  if (open_history()) history(history_list, &event, H_LOAD, file);
}

void line_history_add(const char *entry, const char *file)
{
  HistEvent event;
  if (!entry[0] || !open_history()) return;
  history(history_list, &event, H_ENTER, entry);
  if (file) history(history_list, &event, H_SAVE, file);
}

void line_close(void)
{
  if (editor) el_end(editor);
  HistEvent event;
  if (history_list) { history(history_list, &event, H_CLEAR); history_end(history_list); }
  free(plain_line);
}
