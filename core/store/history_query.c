// SQL queries on a history, from the run itself or from any other process. engine_files.h has the
// contract. Owns queries. Called by Lua.
#include "base/error.h"
#include "history.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum {
  OPERATIONS = 10000,            // operations of SQLite's virtual machine between two calls of
                                 // the function progress()
  // A query may take LEAST_OPERATIONS, plus OPERATIONS_PER_BYTE for each byte of the file. Without
  // a limit, a damaged file could make a query run forever.
  LEAST_OPERATIONS = 100000000,
  OPERATIONS_PER_BYTE = 1000
};

struct eng_query {
  sqlite3_stmt *statement;
  sqlite3      *own;            // the query's own connection, or NULL
  char         *path;
  int64_t       left;           // operations that remain
};

// Returns whether a statement of this connection is unfinished. A connection reads the state that
// the file had when its oldest unfinished statement started. So an abandoned iterator would hide
// new rows from later queries on the same connection.
static bool busy(sqlite3 *db)
{
  sqlite3_stmt *statement = NULL;
  while ((statement = sqlite3_next_stmt(db, statement)) != NULL)
    if (sqlite3_stmt_busy(statement)) return true;
  return false;
}

// Returns the length of a statement's first line, for one-line messages.
static int first_line(const char *sql) { return (int)strcspn(sql, "\n"); }

static int64_t most_operations(const char *path)
{
  struct stat file;
  return LEAST_OPERATIONS + (stat(path, &file) == 0 ? file.st_size : 0) * OPERATIONS_PER_BYTE;
}

// SQLite's progress handler. A nonzero result ends the query.
static int progress(void *argument)
{
  eng_query *query = argument;
  query->left -= OPERATIONS;
  return query->left < 0 || eng_interrupted() == 2;
}

static eng_status prepare(eng_query *query, sqlite3 *db, const char *sql)
{
  const char *rest = "";
  int code = sqlite3_prepare_v2(db, sql, -1, &query->statement, &rest);
  FAIL_IF(code == SQLITE_AUTH, ENG_ERR_VALUE,
          "history %s: a query can only read, got: %.*s", query->path, first_line(sql), sql);
  FAIL_IF(code != SQLITE_OK, ENG_ERR_VALUE,
          "history %s: %s, in: %.*s", query->path, sqlite3_errmsg(db), first_line(sql), sql);
  FAIL_IF(query->statement == NULL, ENG_ERR_VALUE,
          "history %s: expected an SQL statement, got nothing", query->path);
  FAIL_IF(rest[strspn(rest, " \t\r\n;")] != 0, ENG_ERR_VALUE, "history %s: expected one SQL "
          "statement, got more: %.*s", query->path, first_line(rest), rest);
  FAIL_IF(!sqlite3_stmt_readonly(query->statement), ENG_ERR_VALUE,
          "history %s: a query can only read, got: %.*s", query->path, first_line(sql), sql);
  return ENG_OK;
}

eng_status eng_query_open(eng_query **out, eng_history *history, const char *sql)
{
  *out = NULL;
  // The result is ignored: if the rows cannot be committed, the history is still readable.
  if (history->writing) history_wait(history);
  if (history->reader == NULL) ENG_TRY(history_reader_open(&history->reader, history->path));
  eng_query *query = calloc(1, sizeof *query);
  if (query == NULL || (query->path = strdup(history->path)) == NULL) {
    free(query);
    return error_set(ENG_ERR_MEMORY, "history %s: out of memory", history->path);
  }
  query->left = most_operations(history->path);
  eng_status status = ENG_OK;
  if (busy(history->reader)) status = history_reader_open(&query->own, history->path);
  if (status == ENG_OK) status = prepare(query, query->own ? query->own : history->reader, sql);
  if (status != ENG_OK) eng_query_close(query);
  else *out = query;
  return status;
}

void eng_query_close(eng_query *query)
{
  if (query == NULL) return;
  sqlite3_finalize(query->statement);
  sqlite3_close_v2(query->own);
  free(query->path);
  free(query);
}

static eng_status bound(eng_query *query, int parameter, int code)
{
  if (code == SQLITE_OK) return ENG_OK;
  FAIL_IF(code != SQLITE_RANGE, ENG_ERR_VALUE, "history %s: cannot bind parameter %d: %s",
          query->path, parameter + 1, sqlite3_errstr(code));
  return error_set(ENG_ERR_VALUE,
                   "history %s: the statement has %d parameters, got a value for parameter %d",
                   query->path, sqlite3_bind_parameter_count(query->statement), parameter + 1);
}

int eng_query_parameters(const eng_query *query)
{ return sqlite3_bind_parameter_count(query->statement); }

eng_status eng_query_bind_int(eng_query *query, int parameter, int64_t value)
{ return bound(query, parameter, sqlite3_bind_int64(query->statement, parameter + 1, value)); }

eng_status eng_query_bind_double(eng_query *query, int parameter, double value)
{ return bound(query, parameter, sqlite3_bind_double(query->statement, parameter + 1, value)); }

eng_status eng_query_bind_text(eng_query *query, int parameter, const char *value, int64_t bytes)
{
  return bound(query, parameter,
               sqlite3_bind_text64(query->statement, parameter + 1, value, (sqlite3_uint64)bytes,
                                   SQLITE_TRANSIENT, SQLITE_UTF8));
}

// Describes what is wrong with a value: its type is not its column's declared type (SQLite stores
// any type in any column; an integer in a REAL column is good), it is SQL's NULL in a column that
// needs a value, or it is an integer out of range. Returns NULL for a good value, and for an
// expression, which has no declared type.
static const char *damage(sqlite3_stmt *statement, int column)
{
  const char *declared = sqlite3_column_decltype(statement, column);
  if (declared == NULL) return NULL;
  const int type = sqlite3_column_type(statement, column);
  static const char *const required[] = {"step", "site", "role", "kind", "key", "hash", "source"};
  const char *name = sqlite3_column_name(statement, column);
  const bool step = strcmp(name, "step") == 0, null = type == SQLITE_NULL;
  for (size_t i = 0; null && i < sizeof required / sizeof *required; i++)
    if (strcmp(name, required[i]) == 0) return "NULL";
  if (strcmp(declared, "INTEGER") == 0 || strcmp(declared, "INT") == 0) {
    if (null) return NULL;
    if (type != SQLITE_INTEGER) return "not a whole number";
    const int64_t value = sqlite3_column_int64(statement, column), most = (int64_t)1 << 53;
    return step && value < 0 ? "negative" : value <= -most || value >= most ? "too large" : NULL;
  }
  if (strcmp(declared, "REAL") == 0)
    return null || type == SQLITE_FLOAT || type == SQLITE_INTEGER ? NULL : "not a number";
  if (strcmp(declared, "TEXT") == 0) return null || type == SQLITE_TEXT ? NULL : "not text";
  if (strcmp(declared, "BLOB") == 0) return null || type == SQLITE_BLOB ? NULL : "not a blob";
  return "of a type that a history does not have";
}

eng_status eng_query_next(bool *row, eng_query *query)
{
  sqlite3 *db = sqlite3_db_handle(query->statement);
  *row = false;
  sqlite3_progress_handler(db, OPERATIONS, progress, query);
  int code = sqlite3_step(query->statement);
  sqlite3_progress_handler(db, 0, NULL, NULL);
  FAIL_IF(code == SQLITE_INTERRUPT && eng_interrupted() == 2, ENG_ERR_INTERRUPTED, "interrupted");
  FAIL_IF(code == SQLITE_INTERRUPT, ENG_ERR_FORMAT, "history %s: a query exceeded %lld "
          "operations: %.*s; hint: is the file damaged? the limit grows with the file's size",
          query->path, (long long)most_operations(query->path),
          first_line(sqlite3_sql(query->statement)), sqlite3_sql(query->statement));
  for (int i = 0; code == SQLITE_ROW && i < sqlite3_column_count(query->statement); i++) {
    const char *why = damage(query->statement, i);
    FAIL_IF(why != NULL, ENG_ERR_FORMAT, "history %s is damaged: a value of the column '%s' is %s",
            query->path, sqlite3_column_name(query->statement, i), why);
  }
  *row = code == SQLITE_ROW;
  if (code == SQLITE_ROW || code == SQLITE_DONE) return ENG_OK;
  const char *text = sqlite3_errmsg(db);
  return error_set(code == SQLITE_CORRUPT || code == SQLITE_NOTADB ? ENG_ERR_FORMAT : ENG_ERR_IO,
                   "history %s: %s", query->path, text);
}

int eng_query_columns(const eng_query *query)
{ return sqlite3_column_count(query->statement); }
const char *eng_query_name(const eng_query *query, int column)
{ return sqlite3_column_name(query->statement, column); }
int eng_query_type(const eng_query *query, int column)
{ return sqlite3_column_type(query->statement, column); }
int64_t eng_query_int(const eng_query *query, int column)
{ return sqlite3_column_int64(query->statement, column); }
double eng_query_double(const eng_query *query, int column)
{ return sqlite3_column_double(query->statement, column); }

const void *eng_query_bytes(int64_t *size, const eng_query *query, int column)
{
  const void *bytes = sqlite3_column_blob(query->statement, column);
  *size = sqlite3_column_bytes(query->statement, column);
  return bytes;
}
