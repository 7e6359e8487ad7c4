// The run history: rows go into a queue in memory, a thread commits them to SQLite, other connections
// read. history.c is the queue and what a run appends, history_writer.c the thread and the schema,
// history_query.c reading, history_pack.c the blobs. The public functions stand in engine.h.
//
// One message in the queue is one statement and its parameters in order, so the thread needs to know
// nothing of what a row means, but for `attempt` and `resume`.
#ifndef ENG_HISTORY_H
#define ENG_HISTORY_H

#include "engine.h"

#include <pthread.h>
#include <sqlite3.h>
#include <sys/types.h>

enum {
  HISTORY_SCHEMA = 2,               // PRAGMA user_version; a higher one is refused
  HISTORY_BLOCK = 256,              // steps summed up in a row of `blocks`
  HISTORY_APPLICATION = 0x454E4748, // PRAGMA application_id, "ENGH"
  HISTORY_QUEUE = 8 << 20,          // bytes
  HISTORY_PERIOD_MS = 250           // between two commits
};

typedef enum history_statement {
  HISTORY_STEP, HISTORY_TENSORS, HISTORY_EVENT, HISTORY_META, HISTORY_CONFIG, HISTORY_POLICY, HISTORY_PARAMETER, HISTORY_SHADOW, HISTORY_FP8,
  HISTORY_SIGNAL,
  HISTORY_DELETE_STEPS, HISTORY_DELETE_TENSORS, HISTORY_DELETE_SHADOWS, HISTORY_DELETE_FP8, HISTORY_DELETE_SIGNALS, HISTORY_DELETE_EVENTS, HISTORY_DELETE_BLOCKS,
  HISTORY_SUM_UP, HISTORY_STATEMENTS,
  HISTORY_RESUME = HISTORY_STATEMENTS,   // in the queue only: the deletions and an event
  HISTORY_WRAP                           // in the queue only: go on at its beginning
} history_statement;

typedef struct history_message { uint32_t bytes; uint16_t statement, fields; } history_message;   // bytes: all of it, a multiple of 8
typedef enum history_type { FIELD_NULL, FIELD_INT, FIELD_DOUBLE, FIELD_TEXT, FIELD_BLOB } history_type;
typedef struct history_field { uint32_t type, bytes; } history_field;   // the value follows, filled up to 8 bytes

// Places of fields that the thread reads in a HISTORY_STEP message.
enum { STEP_FIELD_STEP = 0, STEP_FIELD_ACTION = 7 };

struct eng_history {
  char *path;
  bool  writing;
  pid_t process;                    // that opened it; a forked child leaves it alone

  pthread_mutex_t lock;             // guards from here ...
  pthread_cond_t  wake, done;       // the thread has work; the thread has finished a round
  uint8_t  *queue;                  // a ring of messages, none of which wraps around
  uint64_t  head, tail;             // bytes ever written and consumed; place = modulo HISTORY_QUEUE
  uint64_t  appended, committed;    // messages
  uint64_t  rounds;                 // commits tried
  bool      stop, hurry;
  bool      failing;                // the last round failed
  bool      news;                   // and nobody was told yet
  bool      moved;                  // the file is no longer where it was opened
  int64_t   dropped;                // rows lost to a full queue, not yet noted in the file
  char      trouble[400];           // ... to here

  pthread_t     thread;             // the rest but `reader` and `next` is the thread's alone
  sqlite3      *db;
  sqlite3_stmt *statements[HISTORY_STATEMENTS];
  int64_t       last_step, last_attempt;
  bool          last_retry;
  int64_t       next_block;         // the first without a row in `blocks`

  sqlite3            *reader;       // opened by the first query
  struct eng_history *next;         // histories open for writing, closed at exit
};

/// Waits until what was appended is committed, or a round failed; tells nobody of that. history.c.
bool       history_wait(eng_history *history);

/// Opens the file for writing, makes or checks the schema, prepares the statements.
eng_status history_writer_open(eng_history *history);
void       history_writer_close(eng_history *history);
/// The thread.
void      *history_writer_run(void *history);

/// Opens a connection that can only read and checks that it is a history this engine knows.
eng_status history_reader_open(sqlite3 **out, const char *path);
/// Checks application and schema version; `fresh` (may be NULL) is set for an empty database.
eng_status history_check(sqlite3 *db, const char *path, bool *fresh);

/// Most bytes that packing statistics of n tensors can take.
int64_t history_pack_bound(int n);
/// Packs statistics; gives the bytes used. `hist` alone: one tensor of zeros with this histogram and amax.
int64_t history_pack(uint8_t *blob, const eng_tensor_stats *stats, int n);
int64_t history_pack_hist(uint8_t *blob, const int64_t *hist, double amax);

#endif
