// The run history: a run appends rows to a queue in memory, a thread commits them to SQLite, and
// other connections read the file. README.md lists the parts; the public functions are in
// engine_files.h.
//
// A message in the queue is one statement with its parameters in order. So the thread does not
// interpret rows, with two exceptions: for a step (HISTORY_STEP) it numbers the attempts and sums
// up finished blocks, and it runs HISTORY_RESUME itself. Included by history*.c and the fuzzer.
#pragma once

#include "engine.h"

#include <pthread.h>
#include <sqlite3.h>
#include <sys/types.h>

enum {
  HISTORY_SCHEMA = 2,               // PRAGMA user_version; a file with a higher one is refused
  HISTORY_APPLICATION = 0x454E4748, // PRAGMA application_id, "ENGH"
  HISTORY_QUEUE = 8 << 20,          // bytes
  HISTORY_PERIOD_MS = 250           // milliseconds between two commits
};

typedef enum history_statement {
  HISTORY_STEP,
  HISTORY_TENSORS,
  HISTORY_EVENT,
  HISTORY_META,
  HISTORY_CONFIG,
  HISTORY_POLICY,
  HISTORY_PARAMETER,
  HISTORY_SHADOW,
  HISTORY_FP8,
  HISTORY_SIGNAL,
  HISTORY_DELETE_BLOCKS,
  HISTORY_SUM_UP,
  HISTORY_STATEMENTS,
  HISTORY_RESUME = HISTORY_STATEMENTS, // only in the queue: deletes rows and adds an event
  HISTORY_WRAP                         // only in the queue: continue at the queue's beginning
} history_statement;

// bytes: the size of the whole message, a multiple of 8
typedef struct history_message { uint32_t bytes; uint16_t statement, fields; } history_message;
typedef enum history_type {
  FIELD_NULL, FIELD_INT, FIELD_DOUBLE, FIELD_TEXT, FIELD_BLOB
} history_type;
// the value follows, padded to 8 bytes
typedef struct history_field { uint32_t type, bytes; } history_field;

// The columns of the table `steps`, in order: the name; the SQL type; the value, an expression in
// eng_history_step; and what NULL stands for in Lua (eng_history_columns). The first column has its
// own macro, so that a list can have commas between the columns. An older history gets the columns
// that it lacks when it is opened for writing. Replays copy a column to the member of eng_record
// with the same name.
//
// inf, nan, zeros and underflow are counts of elements of the scaled gradients. amax and norm are
// unscaled. NaN is stored as NULL, infinities as themselves. `scale` is the loss scale of the
// step's backward pass, `next_scale` the loss scale that the policy chose for the next step. The
// thread replaces the value of `attempt`.
#define EACH_STEP_COLUMN(FIRST, X) \
  FIRST(step, INTEGER, of_int(r->step), nil) \
  X(attempt, INTEGER, of_int(1), 1) \
  X(updates, INTEGER, of_int(r->updates), 0) \
  X(loss, REAL, of_number(r->loss), nan) \
  X(lr, REAL, of_number(r->lr), nan) \
  X(scale, REAL, of_number(r->scale), nan) \
  X(next_scale, REAL, of_number(verdict->scale), nan) \
  X(action, TEXT, of_text(eng_action_name(verdict->action)), nil) \
  X(overflow, INTEGER, of_int(r->overflow), false) \
  X(inf, INTEGER, of_int(r->inf), 0) \
  X(nan, INTEGER, of_int(r->nan), 0) \
  X(count, INTEGER, of_int(r->count), 0) \
  X(zeros, INTEGER, of_int(r->zeros), 0) \
  X(underflow, INTEGER, of_int(r->underflow), 0) \
  X(amax, REAL, of_number(r->amax), nan) \
  X(norm, REAL, of_number(r->norm), nan) \
  X(norm_ref, REAL, of_number(r->norm_ref), nil) \
  X(clip, REAL, of_number(verdict->clip), nan) \
  X(lr_mul, REAL, of_number(verdict->lr_mul), nan) \
  X(policy_failed, INTEGER, of_int(verdict->failed), false) \
  X(first_bad, INTEGER, of_int(r->first_bad), -1) \
  X(reason, TEXT, of_text(reason_of(reason, verdict)), nil) \
  X(elapsed, REAL, of_number(r->elapsed), nan) \
  X(tokens, REAL, of_number(tokens), nan) \
  X(hist, BLOB, hist, nil)
#define STEP_COLUMN(name, ...) STEP_##name,
enum { EACH_STEP_COLUMN(STEP_COLUMN, STEP_COLUMN) STEP_COLUMNS };

// The last row in `steps`, and the end of `blocks`.
typedef struct history_position {
  int64_t step, attempt;            // step -1: there are no rows
  bool    retry;                    // the row's action is a retry
  int64_t next_block;               // the first block without a row in `blocks`
} history_position;

struct eng_history {
  char *path;
  bool  writing;
  pid_t process;                    // the process that opened the history; a forked child must not
                                    // use it

  pthread_mutex_t lock;             // guards the fields from `wake` to `trouble`
  pthread_cond_t  wake;             // the thread has work
  pthread_cond_t  done;             // the thread has finished a round
  uint8_t  *queue;                  // a ring of messages, none of which wraps around
  uint64_t  head, tail;             // bytes written and consumed. Modulo HISTORY_QUEUE they are
                                    // offsets in `queue`. Both restart at 0 when a row is appended
                                    // to an empty queue.
  uint64_t  appended, committed;    // how many messages were appended and committed
  uint64_t  rounds;                 // rounds of the thread, whether or not the commit succeeded
  bool      stop, hurry;            // hurry: start a round now, not at the end of the period
  bool      failing;                // the last round failed
  bool      news;                   // the last error has not been reported yet
  bool      moved;                  // the file was removed or replaced
  int64_t   dropped;                // rows lost to a full queue, not yet reported in the file
  int64_t   lost;                   // rows that SQLite refused, and dropped rows that were
                                    // reported in the file
  char      trouble[400];           // text of the last error

  pthread_t     thread;  // only the thread uses the following fields, except `reader` and `next`
  sqlite3      *db;
  sqlite3_stmt *statements[HISTORY_STATEMENTS];
  history_position last;

  sqlite3            *reader;       // if `writing`, opened by the first query
  struct eng_history *next;         // in the list of histories open for writing, which are closed
                                    // at exit
};

/// Waits until all appended rows are committed or the thread fails to commit them. Returns whether
/// they are committed. Sets no error.
bool       history_wait(eng_history *history);

/// Opens the file for writing, creates or checks the schema, and prepares the statements.
eng_status history_writer_open(eng_history *history);
void       history_writer_close(eng_history *history);
/// The function that the thread runs.
void      *history_writer_run(void *history);

/// Opens a read-only connection and checks that the file is a history of a known schema.
eng_status history_reader_open(sqlite3 **out, const char *path);
/// Checks the application id and the schema version, and that the database has plain tables only.
/// Sets *fresh to whether the database is empty. If `fresh` is NULL, an empty database is an error.
eng_status history_check(sqlite3 *db, const char *path, bool *fresh);

/// Returns the largest number of bytes that the packed statistics of n tensors can take.
int64_t history_pack_bound(int n);
/// Packs statistics; returns the number of bytes written.
int64_t history_pack(uint8_t *blob, const eng_tensor_stats *stats, int n);
/// Returns the current time as events store it, in seconds since 1970.
double  history_time(void);
