// Opening a history's file: a read-only connection, and the check that the file is a history of a
// known schema. Called by history.c, history_writer.c and history_query.c.
#include "base/error.h"
#include "base/scope.h"
#include "history.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LARGEST_VALUE = 2 * HISTORY_QUEUE };     // the most bytes of a string or blob

static int pragma_int(sqlite3 *db, const char *sql, int64_t *value)
{
  sqlite3_stmt *query = NULL;
  int code = sqlite3_prepare_v2(db, sql, -1, &query, NULL);
  if (code == SQLITE_OK) {
    code = sqlite3_step(query);
    if (code == SQLITE_ROW) {
      *value = sqlite3_column_int64(query, 0);
      code = SQLITE_OK;
    }
  }
  sqlite3_finalize(query);
  return code;
}

eng_status history_check(sqlite3 *db, const char *path, bool *fresh)
{
  int64_t tables = 0, application = 0, version = 0, programs = 0;
  int code = pragma_int(db, "SELECT count(*) FROM sqlite_master", &tables);
  if (code == SQLITE_OK)
    code = pragma_int(db, "SELECT count(*) FROM sqlite_master WHERE type IN ('view', 'trigger') OR"
                          " sql LIKE 'create virtual%' OR sql LIKE '% as (%'", &programs);
  if (code == SQLITE_OK) code = pragma_int(db, "PRAGMA application_id", &application);
  if (code == SQLITE_OK) code = pragma_int(db, "PRAGMA user_version", &version);
  FAIL_IF(code == SQLITE_NOTADB || code == SQLITE_CORRUPT, ENG_ERR_FORMAT,
          "history %s is not a history, or is damaged: %s", path, sqlite3_errmsg(db));
  FAIL_IF(code != SQLITE_OK, ENG_ERR_IO, "history %s: cannot read: %s", path, sqlite3_errmsg(db));
  if (fresh != NULL) *fresh = tables == 0 && application == 0;
  if (fresh != NULL && *fresh) return ENG_OK;
  FAIL_IF(tables == 0 && application == 0, ENG_ERR_FORMAT, "history %s is empty: its run has just "
          "begun, or ended before the first row was written", path);
  FAIL_IF(application != HISTORY_APPLICATION, ENG_ERR_FORMAT,
          "history %s: expected a history, found another SQLite database", path);
  FAIL_IF(programs > 0, ENG_ERR_FORMAT, "history %s has views, triggers, virtual tables or "
          "computed columns; a history has plain tables only", path);
  FAIL_IF(version > HISTORY_SCHEMA, ENG_ERR_FORMAT,
          "history %s was written by a newer engine (schema %lld, expected up to %d); hint: "
          "update the engine", path, (long long)version, HISTORY_SCHEMA);
  return ENG_OK;
}

// Returns a URI for a file that no process writes, with special characters escaped. The caller
// frees it.
static char *immutable_uri(const char *path)
{
  static const char tail[] = "?immutable=1";
  char *uri = malloc(5 + 3 * strlen(path) + sizeof tail), *to = uri;
  if (uri == NULL) return NULL;
  to += sprintf(to, "file:");
  for (; *path; path++) {
    if (strchr("?#%", *path) != NULL) to += sprintf(to, "%%%02X", (unsigned char)*path);
    else *to++ = *path;
  }
  memcpy(to, tail, sizeof tail);
  return uri;
}

// SQLite's authorizer: a query may read tables, read pragmas without an argument, and call
// functions other than load_extension, nothing else.
static int allow(void *unused, int action, const char *name, const char *value,
                 const char *database, const char *view)
{
  (void)unused, (void)name, (void)database, (void)view;
  switch (action) {
    case SQLITE_SELECT: case SQLITE_READ: case SQLITE_RECURSIVE: return SQLITE_OK;
    case SQLITE_FUNCTION: return strcmp(value, "load_extension") == 0 ? SQLITE_DENY : SQLITE_OK;
    case SQLITE_PRAGMA: return value == NULL ? SQLITE_OK : SQLITE_DENY;
    default: return SQLITE_DENY;
  }
}

static eng_status open_and_check(sqlite3 **out, const char *name, int flags, const char *path)
{
  eng_status status = ENG_OK;
  if (sqlite3_open_v2(name, out, flags | SQLITE_OPEN_READONLY | SQLITE_OPEN_FULLMUTEX, NULL) !=
      SQLITE_OK)
    status = error_set(ENG_ERR_IO, "history %s: cannot open: %s", path, sqlite3_errmsg(*out));
  if (status == ENG_OK) {
    sqlite3_busy_timeout(*out, 2000);
    sqlite3_limit(*out, SQLITE_LIMIT_LENGTH, LARGEST_VALUE);
    status = history_check(*out, path, NULL);
    sqlite3_set_authorizer(*out, allow, NULL);
  }
  if (status != ENG_OK) {
    sqlite3_close_v2(*out);
    *out = NULL;
  }
  return status;
}

eng_status history_reader_open(sqlite3 **out, const char *path)
{
  *out = NULL;
  int kind = eng_file_kind(path);
  FAIL_IF(kind != ENG_FILE_REGULAR, ENG_ERR_IO, "history %s: %s", path,
          kind == ENG_FILE_NONE ? "no such file" : "expected a file, got a folder or a device");
  eng_status status = open_and_check(out, path, 0, path);
  if (status != ENG_ERR_IO) return status;
  // WAL mode needs a file next to the database. If this file does not exist and cannot be created
  // (an archive, another user's directory), then no process is writing, and the database file alone
  // is complete.
  FREED char *log = malloc(strlen(path) + 5), *uri = immutable_uri(path);
  if (log != NULL && uri != NULL) {
    sprintf(log, "%s-wal", path);
    if (access(log, F_OK) != 0) status = open_and_check(out, uri, SQLITE_OPEN_URI, path);
  }
  return status;
}
