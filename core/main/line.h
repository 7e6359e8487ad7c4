// Line editing for the REPL through libedit: history, completion, and dropping the line on Ctrl-C.
// Owns the terminal while a line is read. Called only by main.c; independent of Lua.
#pragma once

#include <stdbool.h>
#include <stddef.h>

typedef enum line_result { LINE_OK, LINE_END, LINE_INTERRUPTED } line_result;

/// The caller's function for the Tab key. `before` is the line up to the cursor. The function
/// writes the text to insert into `insert` and the candidates, one per line, into `list`; either
/// may stay empty.
typedef void line_completer(void *data, const char *before, char *insert, size_t insert_size,
                            char *list, size_t list_size);

/// Reads a line, without its newline, into *text, which is valid until the next call. Returns
/// LINE_END at the end of the input (Ctrl-D) and LINE_INTERRUPTED after Ctrl-C. An edited line is
/// cut to 65535 bytes. If lines are not edited (line_is_edited) or libedit fails, reads plain
/// stdin. `complete` may be NULL.
line_result line_read(const char **text, const char *prompt, line_completer *complete, void *data);

/// Adds an entry, unless it is empty, to the history and, unless `file` is NULL, saves the history
/// to this file.
void line_history_add(const char *entry, const char *file);
void line_history_load(const char *file);

/// Whether lines are edited: stdin and stdout are both on a terminal that supports editing.
bool line_is_edited(void);

/// Restores the terminal and frees the history.
void line_close(void);
