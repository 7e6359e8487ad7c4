// Appending to a run's history: the rows, and the queue to the writer thread. See history.h. Owns
// open histories. Called by Lua and by history_query.c.
#include "history.h"

#include "base/error.h"
#include "base/scope.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

// ---- histories open for writing; closed at exit, so that their last rows reach the file

static eng_history *open_histories;
static pthread_mutex_t open_lock = PTHREAD_MUTEX_INITIALIZER;

static void close_all(void)
{
  while (open_histories != NULL && open_histories->process == getpid())
    eng_history_free(open_histories);
}

static void enlist(eng_history *history)
{
  static bool registered;
  pthread_mutex_lock(&open_lock);
  history->next = open_histories;
  open_histories = history;
  if (!registered) registered = atexit(close_all) == 0;
  pthread_mutex_unlock(&open_lock);
}

static void delist(eng_history *history)
{
  pthread_mutex_lock(&open_lock);
  eng_history **link = &open_histories;
  while (*link != NULL && *link != history) link = &(*link)->next;
  if (*link != NULL) *link = history->next;
  pthread_mutex_unlock(&open_lock);
}

// ---- opening and closing

static void destroy(eng_history *history)
{
  if (history->writing) history_writer_close(history);
  sqlite3_close_v2(history->reader);
  free(history->queue);
  free(history->path);
  free(history);
}

static eng_status start(eng_history *history)
{
  pthread_condattr_t clock;
  history->queue = malloc(HISTORY_QUEUE);
  FAIL_IF(history->queue == NULL, ENG_ERR_MEMORY, "history %s: out of memory", history->path);
  ENG_TRY(history_writer_open(history));
  pthread_mutex_init(&history->lock, NULL);
  pthread_condattr_init(&clock);
  pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
  pthread_cond_init(&history->wake, &clock);
  pthread_cond_init(&history->done, &clock);
  pthread_condattr_destroy(&clock);
  int code = pthread_create(&history->thread, NULL, history_writer_run, history);
  FAIL_IF(code != 0, ENG_ERR_LIBRARY, "history %s: cannot start the thread that writes its rows: "
          "%s; hint: ulimit -u limits the number of threads", history->path, strerror(code));
  enlist(history);
  return ENG_OK;
}

eng_status eng_history_open(eng_history **out, const char *path, bool write)
{
  *out = NULL;
  eng_history *history = calloc(1, sizeof *history);
  if (history == NULL || (history->path = strdup(path)) == NULL) {
    free(history);
    return error_set(ENG_ERR_MEMORY, "history %s: out of memory", path);
  }
  history->writing = write;
  history->process = getpid();
  eng_status status = write ? start(history) : history_reader_open(&history->reader, path);
  if (status != ENG_OK) destroy(history);
  else *out = history;
  return status;
}

static eng_status moved_error(const eng_history *history)
{
  return error_set(
    ENG_ERR_IO,
    "history %s: the file was removed or replaced while this run wrote to it; the rows since "
    "then are lost",
    history->path);
}

/// Lets the writer thread commit the queued rows once more, and ends it.
static void stop_writer(eng_history *history)
{
  delist(history);
  pthread_mutex_lock(&history->lock);
  history->stop = true;
  pthread_cond_signal(&history->wake);
  pthread_mutex_unlock(&history->lock);
  pthread_join(history->thread, NULL);
  pthread_cond_destroy(&history->wake);
  pthread_cond_destroy(&history->done);
  pthread_mutex_destroy(&history->lock);
}

/// Returns the result of closing a history: an error if rows never reached the file, or if the file
/// was removed or replaced.
static eng_status outcome(const eng_history *history)
{
  const int64_t lost = (int64_t)(history->appended - history->committed) + history->dropped +
                       history->lost;
  FAIL_IF(lost > 0, ENG_ERR_IO,
          "history %s: %lld rows are lost: %s", history->path, (long long)lost, history->trouble);
  return history->moved ? moved_error(history) : ENG_OK;
}

eng_status eng_history_close(eng_history *history)
{
  if (!history || history->process != getpid()) return ENG_OK;  // a forked child has no writer
  if (history->writing) stop_writer(history);
  eng_status status = history->writing ? outcome(history) : ENG_OK;
  destroy(history);
  return status;
}

void eng_history_free(eng_history *history)
{
  if (!history || history->process != getpid()) return;
  if (history->writing) stop_writer(history);
  destroy(history);
}

// ---- the queue

static eng_status report_trouble(eng_history *history)
{
  history->news = false;
  if (history->moved) return moved_error(history);
  return error_set(ENG_ERR_IO, "history %s: %s; %sthe run continues", history->path,
                   history->trouble,
                   history->failing ? "hint: is the disk full? rows not yet written are kept in "
                                      "memory while there is room, and "
                                    : "");
}

/// A value of a row.
typedef struct cell {
  history_type type;
  int64_t      bytes;
  union { int64_t integer; double number; const void *memory; };
} cell;

static cell of_int(int64_t x)   { return (cell){FIELD_INT, sizeof x, .integer = x}; }
static cell of_number(double x) { return (cell){FIELD_DOUBLE, sizeof x, .number = x}; }
static cell of_blob(const void *x, int64_t bytes) { return (cell){FIELD_BLOB, bytes, .memory = x}; }
static cell of_text(const char *x)
{ return x ? (cell){FIELD_TEXT, (int64_t)strlen(x), .memory = x} : (cell){.type = FIELD_NULL}; }

// Appends a row, which consists of the parameters of an SQL statement. If the queue is full, waits
// for room; but if the last commit failed, drops the row instead. Returns an error of the thread
// that no earlier call has returned, even if this row was appended.
static eng_status append(eng_history *history, history_statement statement, const cell *row, int n)
{
  FAIL_IF(!history->writing, ENG_ERR_STATE, "history %s is open for reading only: it takes "
          "no new rows", history->path);
  uint64_t need = sizeof(history_message);
  for (int i = 0; i < n; i++)
    need += sizeof(history_field) + ((uint64_t)row[i].bytes + 7) / 8 * 8;
  FAIL_IF(need > HISTORY_QUEUE / 2, ENG_ERR_VALUE, "history %s: a row takes %lld bytes; the limit "
          "is %d", history->path, (long long)need, HISTORY_QUEUE / 2);
  pthread_mutex_lock(&history->lock);
  // an empty queue restarts at offset 0, so that it touches fewer pages
  if (history->head == history->tail) history->head = history->tail = 0;
  bool room = false;
  while (!room) {
    uint64_t place = history->head % HISTORY_QUEUE,
             skip = HISTORY_QUEUE - place < need ? HISTORY_QUEUE - place : 0;
    room = history->head + skip + need - history->tail <= HISTORY_QUEUE;
    if (room && skip > 0) {
      *(history_message *)(history->queue + place) =
        (history_message){(uint32_t)skip, HISTORY_WRAP, 0};
      history->head += skip;
    }
    if (room || history->failing) break;
    history->hurry = true;
    pthread_cond_signal(&history->wake);
    pthread_cond_wait(&history->done, &history->lock);
  }
  if (room) {
    uint8_t *at = history->queue + history->head % HISTORY_QUEUE;
    *(history_message *)at = (history_message){(uint32_t)need, (uint16_t)statement, (uint16_t)n};
    at += sizeof(history_message);
    for (const cell *c = row; c < row + n; c++) {
      *(history_field *)at = (history_field){c->type, (uint32_t)c->bytes};
      if (c->type == FIELD_INT || c->type == FIELD_DOUBLE)
        memcpy(at + sizeof(history_field), &c->integer, sizeof c->integer);
      else if (c->bytes > 0) memcpy(at + sizeof(history_field), c->memory, (size_t)c->bytes);
      at += sizeof(history_field) + (size_t)(c->bytes + 7) / 8 * 8;
    }
    history->head += need;
    history->appended++;
  } else history->dropped++;
  eng_status status = history->news ? report_trouble(history) : ENG_OK;
  pthread_mutex_unlock(&history->lock);
  return status;
}
#define APPEND(history, statement, ...) \
  append(history, statement, (const cell[]){__VA_ARGS__}, \
         (int)(sizeof(const cell[]){__VA_ARGS__} / sizeof(cell)))

// ---- rows

/// Copies the verdict's reason to `room` as zero-terminated text. Returns the text, or NULL if it
/// is empty.
static const char *reason_of(char *room, const eng_verdict *verdict)
{
  if (verdict->reason[0] == 0) return NULL;
  memcpy(room, verdict->reason, sizeof verdict->reason);
  room[sizeof verdict->reason] = 0;
  return room;
}

// Returns whether a histogram has a count above 0. If none was computed, all counts are 0; they are
// also 0 if every gradient is 0, inf or nan.
static bool is_counted(const int64_t hist[ENG_HIST_BINS])
{ return hist[0] != 0 || memcmp(hist, hist + 1, (ENG_HIST_BINS - 1) * sizeof hist[0]) != 0; }

eng_status eng_history_step(eng_history *history, const eng_record *record,
                            const eng_verdict *verdict, double tokens)
{
  const eng_record *r = record;
  const bool used = is_counted(r->hist);
  char reason[sizeof verdict->reason + 1];
  FREED uint8_t *blob = used ? malloc((size_t)history_pack_bound(1)) : NULL;
  FAIL_IF(used && !blob, ENG_ERR_MEMORY, "history %s: out of memory", history->path);
  cell hist = {.type = FIELD_NULL};
  if (used) {
    eng_tensor_stats all = {.amax = r->amax_f16};
    memcpy(all.hist, r->hist, sizeof all.hist);
    hist = of_blob(blob, history_pack(blob, &all, 1));
  }
#define VALUE(name, type, value, ...) value,
  const cell row[STEP_COLUMNS] = {EACH_STEP_COLUMN(VALUE, VALUE)};
  return append(history, HISTORY_STEP, row, STEP_COLUMNS);
}

#define COLUMN(name, type, value, null) #name ":" #null " "
const char *eng_history_columns(void) { return EACH_STEP_COLUMN(COLUMN, COLUMN); }

eng_status eng_history_tensors(eng_history *history, int64_t step, const eng_tensor_stats *stats,
                               int n)
{
  FREED uint8_t *blob = malloc((size_t)history_pack_bound(n));
  FAIL_IF(blob == NULL, ENG_ERR_MEMORY, "history %s: out of memory", history->path);
  int64_t bytes = history_pack(blob, stats, n);
  return APPEND(history, HISTORY_TENSORS, of_int(step), of_blob(blob, bytes));
}

eng_status eng_history_shadow(eng_history *history, int64_t step, const char *name,
                              const eng_verdict *verdict, bool overflow, bool bound)
{
  char reason[sizeof verdict->reason + 1];
  return APPEND(history, HISTORY_SHADOW, of_int(step), of_text(name), of_number(verdict->scale),
                of_text(eng_action_name(verdict->action)), of_int(verdict->failed),
                of_text(reason_of(reason, verdict)), of_int(overflow), of_int(bound));
}

eng_status eng_history_fp8(eng_history *history, int64_t step, const char *site, const char *role,
                           const double value[12])
{
  cell row[15] = {of_int(step), of_text(site), of_text(role)};
  for (int i = 0; i < 12; i++) row[3 + i] = of_number(value[i]);
  return append(history, HISTORY_FP8, row, 15);
}

eng_status eng_history_signal(eng_history *history, int64_t step, const char *name, double value)
{ return APPEND(history, HISTORY_SIGNAL, of_int(step), of_text(name), of_number(value)); }

eng_status eng_history_event(eng_history *history, int64_t step, const char *kind, const char *text,
                             const char *data)
{
  return APPEND(history, HISTORY_EVENT, of_int(step), of_number(history_time()), of_text(kind),
                of_text(text), of_text(data));
}

eng_status eng_history_text(eng_history *history, const char *table, const char *key,
                            const char *value)
{
  const bool meta = strcmp(table, "meta") == 0;
  FAIL_IF(!meta && strcmp(table, "config") != 0, ENG_ERR_VALUE, "history %s: expected the table "
          "\"meta\" or \"config\", got \"%s\"", history->path, table);
  return APPEND(history, meta ? HISTORY_META : HISTORY_CONFIG, of_text(key), of_text(value));
}

eng_status eng_history_policy(eng_history *history, const char *hash, const char *name,
                              const char *source)
{ return APPEND(history, HISTORY_POLICY, of_text(hash), of_text(name), of_text(source)); }

eng_status eng_history_parameter(eng_history *history, int index, const char *name, int ndim,
                                 const int64_t *shape, const char *gradient)
{
  char text[ENG_MAX_DIMS * 22 + 4] = "[";
  size_t used = 1;
  for (int d = 0; d < ndim && d < ENG_MAX_DIMS; d++)
    used += (size_t)snprintf(text + used, sizeof text - used, "%s%lld", d ? "," : "",
                             (long long)shape[d]);
  snprintf(text + used, sizeof text - used, "]");
  return APPEND(history, HISTORY_PARAMETER, of_int(index), of_text(name), of_text(text),
                of_text(gradient));
}

eng_status eng_history_resume(eng_history *history, int64_t step)
{
  ENG_TRY(APPEND(history, HISTORY_RESUME, of_int(step)));
  return eng_history_flush(history);
}

bool history_wait(eng_history *history)
{
  pthread_mutex_lock(&history->lock);
  const uint64_t target = history->appended, rounds = history->rounds;
  while (history->committed < target && !(history->failing && history->rounds > rounds)) {
    history->hurry = true;
    pthread_cond_signal(&history->wake);
    pthread_cond_wait(&history->done, &history->lock);
  }
  const bool all = history->committed >= target;
  pthread_mutex_unlock(&history->lock);
  return all;
}

eng_status eng_history_flush(eng_history *history)
{
  if (!history->writing) return ENG_OK;
  const bool all = history_wait(history);
  pthread_mutex_lock(&history->lock);
  eng_status status = !all || history->news ? report_trouble(history) : ENG_OK;
  pthread_mutex_unlock(&history->lock);
  return status;
}
