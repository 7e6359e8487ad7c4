// The history's thread: takes messages from the queue and commits them in one transaction per
// round. A failed round is rolled back and retried later; messages leave the queue only when their
// round is committed. Owns the writing connection and the schema. Called by history.c.
#include "base/error.h"
#include "history.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define DECLARED(name, type, ...) #name " " #type ", "
#define NAME(name, ...)      #name
#define NEXT_NAME(name, ...) ", " #name
#define PARAMETER(...)       "?"
#define NEXT_PARAMETER(...)  ",?"
static const char schema[] =
  "CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;"
  "CREATE TABLE config(key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;"
  "CREATE TABLE policies(hash TEXT PRIMARY KEY, name TEXT, source TEXT) WITHOUT ROWID;"
  // id: the index of the parameter, from 0, as in steps.first_bad
  "CREATE TABLE parameters(id INTEGER PRIMARY KEY, name TEXT, shape TEXT, gradient TEXT);"
  "CREATE TABLE steps(" EACH_STEP_COLUMN(DECLARED, DECLARED)
  "PRIMARY KEY(step, attempt)) WITHOUT ROWID;"
  "CREATE INDEX steps_overflow ON steps(step) WHERE overflow;"
  "CREATE TABLE tensor_stats(step INTEGER PRIMARY KEY, stats BLOB);"
  "CREATE TABLE events(id INTEGER PRIMARY KEY, step INTEGER, time REAL, kind TEXT, text TEXT,"
  " data TEXT);"
  "CREATE INDEX events_step ON events(step);";

// Since schema 2: summaries for plotting and counting long runs. Row b of `blocks` summarizes steps
// b * 256 to b * 256 + 255, and is added with the first step of a later block. For each quantity,
// the row has the count, minimum, maximum and sum of the finite values.
#define EACH_SUMMED(X) X(loss, "loss") X(lr, "lr") X(scale, "scale") X(amax, "amax") \
  X(norm, "norm") X(stored, "amax * scale") X(zeros, "1.0 * zeros / count") \
  X(underflow, "1.0 * underflow / count")
#define SUMMED_COLUMNS(name, value) \
  ", " #name "_n INTEGER, " #name "_min REAL, " #name "_max REAL, " #name "_sum REAL"
#define FINITE(value) "nullif(nullif(" value ", 9e999), -9e999)"
#define SUMMED_VALUES(name, value) ", count(" FINITE(value) "), min(" FINITE(value) ")" \
  ", max(" FINITE(value) "), total(" FINITE(value) ")"
_Static_assert(ENG_HISTORY_BLOCK == 256, "the statements below say 256");

// Tables of later versions. They are created if missing, so that a run can continue an older
// history.
static const char later_tables[] =
  "CREATE TABLE IF NOT EXISTS shadows(name TEXT, step INTEGER, scale REAL, action TEXT,"
  " failed INTEGER, reason TEXT, overflow INTEGER, bound INTEGER, PRIMARY KEY(name, step))"
  " WITHOUT ROWID;"
  "CREATE TABLE IF NOT EXISTS fp8(step INTEGER, site TEXT, role TEXT, snr REAL, underflow REAL,"
  " overflow REAL, zeros REAL, amax REAL, least REAL, scale_min REAL, scale_max REAL, count REAL,"
  " peak REAL, power REAL, asked REAL,"
  " PRIMARY KEY(site, role, step)) WITHOUT ROWID;"
  "CREATE TABLE IF NOT EXISTS signals(name TEXT, step INTEGER, value REAL,"
  " PRIMARY KEY(name, step)) WITHOUT ROWID;"
  "CREATE TABLE IF NOT EXISTS blocks(block INTEGER PRIMARY KEY, rows INTEGER, first INTEGER,"
  " last INTEGER, overflows INTEGER, skipped INTEGER, failed INTEGER, tokens REAL, seconds REAL"
  EACH_SUMMED(SUMMED_COLUMNS) ");";

static const char *const sql[HISTORY_STATEMENTS] = {
  [HISTORY_STEP] =
    "INSERT OR REPLACE INTO steps(" EACH_STEP_COLUMN(NAME, NEXT_NAME) ")"
    " VALUES(" EACH_STEP_COLUMN(PARAMETER, NEXT_PARAMETER) ")",
  [HISTORY_TENSORS] = "INSERT OR REPLACE INTO tensor_stats(step, stats) VALUES(?,?)",
  [HISTORY_EVENT] = "INSERT INTO events(step, time, kind, text, data) VALUES(?,?,?,?,?)",
  [HISTORY_META] = "INSERT OR REPLACE INTO meta(key, value) VALUES(?,?)",
  [HISTORY_CONFIG] = "INSERT OR REPLACE INTO config(key, value) VALUES(?,?)",
  [HISTORY_POLICY] = "INSERT OR REPLACE INTO policies(hash, name, source) VALUES(?,?,?)",
  // `gradient` keeps the format of the run's first steps
  [HISTORY_PARAMETER] = "INSERT INTO parameters(id, name, shape, gradient) VALUES(?,?,?,?)"
                        " ON CONFLICT(id) DO UPDATE SET name = excluded.name,"
                        " shape = excluded.shape, gradient = ifnull(gradient, excluded.gradient)",
  [HISTORY_SHADOW] =
    "INSERT OR REPLACE INTO shadows(step, name, scale, action, failed, reason, overflow, bound)"
    " VALUES(?,?,?,?,?,?,?,?)",
  [HISTORY_FP8] =
    "INSERT OR REPLACE INTO fp8(step, site, role, snr, underflow, overflow, zeros, amax, least,"
    " scale_min, scale_max, count, peak, power, asked) VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
  [HISTORY_SIGNAL] = "INSERT OR REPLACE INTO signals(step, name, value) VALUES(?,?,?)",
  [HISTORY_DELETE_BLOCKS] = "DELETE FROM blocks WHERE block >= ? / 256",
  [HISTORY_SUM_UP] =
    "INSERT OR REPLACE INTO blocks SELECT step / 256, count(*), min(step), max(step), "
    "total(overflow), total(action <> 'step'), total(policy_failed), total(tokens), max(elapsed)"
    EACH_SUMMED(SUMMED_VALUES)
    " FROM steps WHERE step >= ? * 256 AND step < ? * 256 GROUP BY step / 256",
};

static eng_status sqlite_error(sqlite3 *db, const char *path, const char *what)
{ return error_set(ENG_ERR_IO, "history %s: cannot %s: %s", path, what, sqlite3_errmsg(db)); }

static bool exec(const eng_history *history, const char *statements)
{ return sqlite3_exec(history->db, statements, NULL, NULL, NULL) == SQLITE_OK; }

// ---- opening

static int64_t block_of(int64_t step) { return step > 0 ? step / ENG_HISTORY_BLOCK : 0; }

static eng_status read_position(eng_history *history)
{
  sqlite3_stmt *query;
  if (sqlite3_prepare_v2(history->db,
                         "SELECT step, attempt, action, (SELECT max(block) + 1 FROM blocks)"
                         " FROM steps ORDER BY step DESC, attempt DESC LIMIT 1",
                         -1, &query, NULL) != SQLITE_OK)
    return sqlite_error(history->db, history->path, "read");
  history->last = (history_position){.step = -1};
  if (sqlite3_step(query) == SQLITE_ROW) {
    const char *action = (const char *)sqlite3_column_text(query, 2);
    history->last = (history_position){
      .step = sqlite3_column_int64(query, 0), .attempt = sqlite3_column_int64(query, 1),
      .retry = action != NULL && strcmp(action, "retry") == 0,
      .next_block = sqlite3_column_int64(query, 3)};
  }
  sqlite3_finalize(query);
  return ENG_OK;
}

static eng_status make_schema(eng_history *history)
{
  char stamp[32], text[512];
  time_t now = time(NULL);
  struct tm parts;
  gmtime_r(&now, &parts);
  strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%SZ", &parts);
  sqlite3_snprintf(sizeof text, text,
                   "PRAGMA application_id = %d; PRAGMA user_version = %d; INSERT INTO meta "
                   "VALUES('schema', '%d'), ('created', %Q), ('engine', %Q); COMMIT;",
                   HISTORY_APPLICATION, HISTORY_SCHEMA, HISTORY_SCHEMA, stamp, eng_version());
  if (!exec(history, "BEGIN IMMEDIATE") || !exec(history, schema) || !exec(history, text))
    return sqlite_error(history->db, history->path, "create the tables");
  return ENG_OK;
}

// Adds the columns that older histories lack. Table `parameters`: the format of each parameter's
// gradient. Table `steps`: columns that a later engine added. Table `shadows`: whether gradients
// overflow at the shadow's scale, and whether the shadow's verdict is a bound. Table `fp8`:
// statistics that replays of FP8 policies read. The columns are NULL in the rows that an older
// engine wrote.
static eng_status add_columns(eng_history *history)
{
  static const char *const added[][3] = {
    { "parameters", "gradient", "ALTER TABLE parameters ADD COLUMN gradient TEXT" },
#define ADDED(name, type, ...) \
    { "steps", #name, "ALTER TABLE steps ADD COLUMN " #name " " #type },
    EACH_STEP_COLUMN(ADDED, ADDED)
    { "shadows", "overflow", "ALTER TABLE shadows ADD COLUMN overflow INTEGER" },
    { "shadows", "bound", "ALTER TABLE shadows ADD COLUMN bound INTEGER" },
    { "fp8", "peak", "ALTER TABLE fp8 ADD COLUMN peak REAL" },
    { "fp8", "power", "ALTER TABLE fp8 ADD COLUMN power REAL" },
    { "fp8", "asked", "ALTER TABLE fp8 ADD COLUMN asked REAL" },
  };
  for (size_t i = 0; i < sizeof added / sizeof *added; i++)
    if (sqlite3_table_column_metadata(history->db, NULL, added[i][0], added[i][1], NULL, NULL, NULL,
                                      NULL, NULL) != SQLITE_OK &&
        !exec(history, added[i][2]))
      return sqlite_error(history->db, history->path, "add a column");
  return ENG_OK;
}

eng_status history_writer_open(eng_history *history)
{
  bool fresh;
  if (sqlite3_open_v2(history->path, &history->db,
                      SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_FULLMUTEX,
                      NULL) != SQLITE_OK)
    return sqlite_error(history->db, history->path, "open");
  sqlite3_busy_timeout(history->db, 2000);
  ENG_TRY(history_check(history->db, history->path, &fresh));
  // With NORMAL a commit reaches the operating system, not the disk. The commit survives a crash of
  // the process, but may be lost in a crash of the machine.
  if (!exec(history, "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL"))
    return sqlite_error(history->db, history->path, "write");
  if (fresh) ENG_TRY(make_schema(history));
  if (!exec(history, later_tables))
    return sqlite_error(history->db, history->path, "create the tables");
  ENG_TRY(add_columns(history));
  // A history of schema 1 is a history of schema 2 without blocks. The next step that is written
  // creates the blocks.
  char version[64];
  snprintf(version, sizeof version, "PRAGMA user_version = %d", HISTORY_SCHEMA);
  if (!exec(history, version)) return sqlite_error(history->db, history->path, "write");
  for (int i = 0; i < HISTORY_STATEMENTS; i++)
    if (sqlite3_prepare_v3(history->db, sql[i], -1, SQLITE_PREPARE_PERSISTENT,
                           &history->statements[i], NULL) != SQLITE_OK)
      return sqlite_error(history->db, history->path, "use its tables");
  return read_position(history);
}

void history_writer_close(eng_history *history)
{
  for (int i = 0; i < HISTORY_STATEMENTS; i++) sqlite3_finalize(history->statements[i]);
  sqlite3_close_v2(history->db);
  history->db = NULL;
}

// ---- one round

static int execute(sqlite3_stmt *statement)
{
  int code = sqlite3_step(statement);
  sqlite3_reset(statement);
  sqlite3_clear_bindings(statement);
  return code == SQLITE_DONE || code == SQLITE_ROW ? SQLITE_OK : code;
}

static int bind(sqlite3_stmt *statement, int parameter, const history_field *field)
{
  const void *value = field + 1;
  switch ((history_type)field->type) {
  case FIELD_INT:    return sqlite3_bind_int64(statement, parameter, *(const int64_t *)value);
  case FIELD_DOUBLE: return sqlite3_bind_double(statement, parameter, *(const double *)value);
  case FIELD_TEXT:
    return sqlite3_bind_text(statement, parameter, value, (int)field->bytes, SQLITE_STATIC);
  case FIELD_BLOB:
    return sqlite3_bind_blob(statement, parameter, value, (int)field->bytes, SQLITE_STATIC);
  case FIELD_NULL:   break;
  }
  return sqlite3_bind_null(statement, parameter);
}

static const history_field *next_field(const history_field *field)
{ return (const history_field *)((const uint8_t *)(field + 1) + (field->bytes + 7) / 8 * 8); }

static const history_field *field_at(const history_message *message, int index)
{
  const history_field *field = (const history_field *)(message + 1);
  while (index-- > 0) field = next_field(field);
  return field;
}

double history_time(void)
{
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int add_event(eng_history *history, int64_t step, const char *kind, const char *text)
{
  sqlite3_stmt *statement = history->statements[HISTORY_EVENT];
  sqlite3_bind_int64(statement, 1, step);
  sqlite3_bind_double(statement, 2, history_time());
  sqlite3_bind_text(statement, 3, kind, -1, SQLITE_STATIC);
  sqlite3_bind_text(statement, 4, text, -1, SQLITE_STATIC);
  return execute(statement);
}

static int resume_at(eng_history *history, int64_t step)
{
  char text[768];
  const long long at = step;
  // Rows of `steps` are deleted last, so that sqlite3_changes returns their number. Kept are events
  // 'resumed', and the events of `step` up to its checkpoint, from which the run continues.
  snprintf(text, sizeof text,
           "DELETE FROM tensor_stats WHERE step >= %lld; DELETE FROM shadows WHERE step >= %lld;"
           "DELETE FROM fp8 WHERE step >= %lld; DELETE FROM signals WHERE step >= %lld;"
           "DELETE FROM events WHERE kind <> 'resumed' AND (step > %lld OR step = %lld AND"
           " id > (SELECT ifnull(max(id), 0) FROM events WHERE step = %lld AND"
           " kind = 'checkpoint')); DELETE FROM parameters WHERE 0 = %lld;"
           "DELETE FROM blocks WHERE block >= %lld / 256; DELETE FROM steps WHERE step >= %lld",
           at, at, at, at, at, at, at, at, at, at);
  int code = sqlite3_exec(history->db, text, NULL, NULL, NULL);
  if (code != SQLITE_OK) return code;
  snprintf(text, sizeof text, "resumed at step %lld, %lld recorded steps dropped", at,
           (long long)sqlite3_changes(history->db));
  code = add_event(history, step, "resumed", text);
  if (code == SQLITE_OK && read_position(history) != ENG_OK) code = SQLITE_ERROR;
  return code;
}

// Writes the missing summaries of the blocks before the block of `step`. If the block of `step`
// already has a summary, deletes it and all later summaries instead.
static int sum_up(eng_history *history, int64_t step)
{
  const int64_t block = block_of(step);
  if (block == history->last.next_block) return SQLITE_OK;
  sqlite3_stmt *statement =
    history->statements[block < history->last.next_block ? HISTORY_DELETE_BLOCKS : HISTORY_SUM_UP];
  if (block < history->last.next_block) {
    sqlite3_bind_int64(statement, 1, step);
  } else {
    sqlite3_bind_int64(statement, 1, history->last.next_block);
    sqlite3_bind_int64(statement, 2, block);
  }
  history->last.next_block = block;
  return execute(statement);
}

static int do_message(eng_history *history, const history_message *message)
{
  const history_field *field = (const history_field *)(message + 1);
  if (message->statement == HISTORY_RESUME)
    return resume_at(history, *(const int64_t *)(field + 1));
  sqlite3_stmt *statement = history->statements[message->statement];
  for (int i = 1; i <= message->fields; i++, field = next_field(field)) {
    int code = bind(statement, i, field);
    if (code != SQLITE_OK) return code;
  }
  if (message->statement != HISTORY_STEP) return execute(statement);
  // The row after a retry is a further attempt, whether or not it has a new step number.
  int64_t step = *(const int64_t *)(field_at(message, STEP_step) + 1);
  const history_field *action = field_at(message, STEP_action);
  history->last.attempt =
    history->last.retry || step == history->last.step ? history->last.attempt + 1 : 1;
  history->last.step = step;
  history->last.retry = action->bytes == 5 && memcmp(action + 1, "retry", 5) == 0;
  sqlite3_bind_int64(statement, 1 + STEP_attempt, history->last.attempt);
  int code = execute(statement);
  return code == SQLITE_OK ? sum_up(history, step) : code;
}

// Commits the messages in [tail, head). Leaves out and reports a row that SQLite refuses because of
// the row's contents. Any other error rolls the round back.
static bool commit_round(eng_history *history, uint64_t tail, uint64_t head, int64_t dropped,
                         char *trouble, size_t room)
{
  const history_position before = history->last;
  int64_t left_out = 0;
  int code = sqlite3_exec(history->db, "BEGIN IMMEDIATE", NULL, NULL, NULL);
  while (code == SQLITE_OK && tail != head) {
    const history_message *message =
      (const history_message *)(history->queue + tail % HISTORY_QUEUE);
    tail += message->bytes;
    if (message->statement == HISTORY_WRAP) continue;
    code = do_message(history, message);
    if (code == SQLITE_CONSTRAINT || code == SQLITE_TOOBIG || code == SQLITE_MISMATCH) {
      snprintf(trouble, room, "a row was skipped: %s", sqlite3_errmsg(history->db));
      code = SQLITE_OK;
      left_out++;
    }
  }
  if (code == SQLITE_OK && dropped > 0) {
    char text[120];
    snprintf(text, sizeof text, "%lld rows were lost while the file could not be written",
             (long long)dropped);
    code = add_event(history, history->last.step, "history", text);
  }
  if (code == SQLITE_OK) code = sqlite3_exec(history->db, "COMMIT", NULL, NULL, NULL);
  if (code == SQLITE_OK) {
    history->lost += left_out + dropped;
    return true;
  }
  snprintf(trouble, room, "%s", sqlite3_errmsg(history->db));
  if (!sqlite3_get_autocommit(history->db)) exec(history, "ROLLBACK");
  history->last = before;
  return false;
}

/// Returns whether the file was removed or replaced. SQLite would write to the removed file without
/// an error.
static bool has_moved(sqlite3 *db)
{
  int moved = 0;
  return sqlite3_file_control(db, "main", SQLITE_FCNTL_HAS_MOVED, &moved) == SQLITE_OK &&
         moved != 0;
}

// ---- the thread

static void wait_for_work(eng_history *history)
{
  struct timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_nsec += HISTORY_PERIOD_MS * 1000000l;
  until.tv_sec += until.tv_nsec / 1000000000l;
  until.tv_nsec %= 1000000000l;
  while (!history->stop && !history->hurry)
    if (pthread_cond_timedwait(&history->wake, &history->lock, &until) == ETIMEDOUT) break;
}

void *history_writer_run(void *argument)
{
  eng_history *history = argument;
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, NULL);    // so that signals reach the main thread
  pthread_mutex_lock(&history->lock);
  for (;;) {
    wait_for_work(history);
    history->hurry = false;
    const bool stopping = history->stop;
    const uint64_t tail = history->tail, head = history->head, appended = history->appended;
    const int64_t dropped = history->dropped;
    bool committed = true;
    char trouble[sizeof history->trouble] = "";
    bool moved = false;
    if (tail != head || dropped > 0) {
      pthread_mutex_unlock(&history->lock);
      committed = commit_round(history, tail, head, dropped, trouble, sizeof trouble);
      moved = has_moved(history->db);
      pthread_mutex_lock(&history->lock);
    }
    if (moved && !history->moved) history->moved = history->news = true;
    if (trouble[0] != 0) {
      memcpy(history->trouble, trouble, sizeof trouble);
      history->news = history->news || !history->failing;
    }
    if (committed) {
      // `tail = head` would be wrong: append may have restarted an empty queue at 0 meanwhile
      history->tail += head - tail;
      history->committed = appended;
      history->dropped -= dropped;
    }
    history->failing = !committed;
    history->rounds++;
    pthread_cond_broadcast(&history->done);
    if (stopping) break;
  }
  pthread_mutex_unlock(&history->lock);
  return NULL;
}
