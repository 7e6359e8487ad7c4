// Appending to a run's history: the rows and the queue they pass through. See history.h.
// Owns open histories. Called by Lua.
#include "history.h"

#include "base/error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

// ---- open histories, flushed at exit so that an unclosed one keeps its last rows

static eng_history *open_histories;
static pthread_mutex_t open_lock = PTHREAD_MUTEX_INITIALIZER;

static void close_all(void)
{
  while (open_histories != NULL && open_histories->process == getpid())
    eng_history_close(open_histories);
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
  if (history->queue == NULL)
    return error_set(ENG_ERR_MEMORY, "history %s: out of memory", history->path);
  ENG_TRY(history_writer_open(history));
  pthread_mutex_init(&history->lock, NULL);
  pthread_condattr_init(&clock);
  pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
  pthread_cond_init(&history->wake, &clock);
  pthread_cond_init(&history->done, &clock);
  pthread_condattr_destroy(&clock);
  if (pthread_create(&history->thread, NULL, history_writer_run, history) != 0)
    return error_set(ENG_ERR_LIBRARY, "history %s: cannot start a thread", history->path);
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
    "history %s: removed or replaced while this run wrote to it; the rows since then are lost",
    history->path);
}

eng_status eng_history_close(eng_history *history)
{
  if (history == NULL) return ENG_OK;
  if (history->process != getpid()) return ENG_OK;       // a forked child has no thread to stop
  eng_status status = ENG_OK;
  if (history->writing) {
    delist(history);
    pthread_mutex_lock(&history->lock);
    history->stop = true;
    pthread_cond_signal(&history->wake);
    pthread_mutex_unlock(&history->lock);
    pthread_join(history->thread, NULL);
    const int64_t lost = (int64_t)(history->appended - history->committed) + history->dropped +
                         history->lost;
    if (lost > 0)
      status = error_set(ENG_ERR_IO, "history %s: %lld rows are lost: %s", history->path,
                         (long long)lost, history->trouble);
    else if (history->moved) status = moved_error(history);
    pthread_cond_destroy(&history->wake);
    pthread_cond_destroy(&history->done);
    pthread_mutex_destroy(&history->lock);
  }
  destroy(history);
  return status;
}

// ---- the queue

// A message being built in the queue; `at` is its next byte.
typedef struct draft { history_message *message; uint8_t *at; } draft;

static eng_status trouble_told(eng_history *history)
{
  history->news = false;
  if (history->moved) return moved_error(history);
  return error_set(ENG_ERR_IO,
                   "history %s: %s; hint: is the disk full? rows are kept in memory, and the run "
                   "continues", history->path, history->trouble);
}

// Takes the lock and reserves queue space for a message whose values take at most `bytes`. The
// message is NULL if the row is dropped because the queue is full and cannot be written out.
static eng_status begin(draft *out, eng_history *history, history_statement statement, int fields,
                        int64_t bytes)
{
  *out = (draft){ NULL, NULL };
  if (!history->writing)
    return error_set(ENG_ERR_STATE, "history %s is open for reading only", history->path);
  const uint64_t need = sizeof(history_message) + (uint64_t)fields * (sizeof(history_field) + 8) +
                        ((uint64_t)bytes + 7) / 8 * 8;
  if (need > HISTORY_QUEUE / 2)
    return error_set(ENG_ERR_VALUE, "history %s: a row of %lld bytes is larger than %d",
                     history->path, (long long)need, HISTORY_QUEUE / 2);
  pthread_mutex_lock(&history->lock);
  if (history->head == history->tail) history->head = history->tail = 0;      // touches fewer pages
  for (;;) {
    uint64_t place = history->head % HISTORY_QUEUE,
             skip = HISTORY_QUEUE - place < need ? HISTORY_QUEUE - place : 0;
    if (history->head + skip + need - history->tail <= HISTORY_QUEUE) {
      if (skip > 0) {
        *(history_message *)(history->queue + place) =
          (history_message){(uint32_t)skip, HISTORY_WRAP, 0};
        history->head += skip;
      }
      break;
    }
    if (history->failing) {
      history->dropped++;
      return ENG_OK;
    }
    history->hurry = true;
    pthread_cond_signal(&history->wake);
    pthread_cond_wait(&history->done, &history->lock);
  }
  out->message = (history_message *)(history->queue + history->head % HISTORY_QUEUE);
  *out->message = (history_message){ 0, (uint16_t)statement, (uint16_t)fields };
  out->at = (uint8_t *)(out->message + 1);
  return ENG_OK;
}

static void put(draft *row, history_type type, const void *value, int64_t bytes)
{
  if (row->message == NULL) return;
  *(history_field *)row->at = (history_field){ type, (uint32_t)bytes };
  if (bytes > 0) memcpy(row->at + sizeof(history_field), value, (size_t)bytes);
  row->at += sizeof(history_field) + (size_t)(bytes + 7) / 8 * 8;
}

static void put_int(draft *row, int64_t value)     { put(row, FIELD_INT, &value, 8); }
static void put_double(draft *row, double value)   { put(row, FIELD_DOUBLE, &value, 8); }
static void put_text(draft *row, const char *text)
{ put(row, text ? FIELD_TEXT : FIELD_NULL, text, text ? (int64_t)strlen(text) : 0); }

// Publishes the message and releases the lock.
static eng_status finish(draft *row, eng_history *history)
{
  if (row->message != NULL) {
    row->message->bytes = (uint32_t)(row->at - (uint8_t *)row->message);
    history->head += row->message->bytes;
    history->appended++;
  }
  eng_status status = history->news ? trouble_told(history) : ENG_OK;
  pthread_mutex_unlock(&history->lock);
  return status;
}

static int64_t length(const char *text)
{
  return text ? (int64_t)strlen(text) : 0;
}

// ---- rows

eng_status eng_history_step(eng_history *history, const eng_record *record,
                            const eng_verdict *verdict, double tokens)
{
  draft row;
  int used = 0;
  for (int b = 0; b < ENG_HIST_BINS; b++) used |= record->hist[b] != 0;
  char reason[sizeof verdict->reason + 1];
  memcpy(reason, verdict->reason, sizeof verdict->reason);
  reason[sizeof verdict->reason] = 0;
  ENG_TRY(
    begin(&row, history, HISTORY_STEP, 24, length(reason) + (used ? history_pack_bound(1) : 0)));
  put_int(&row, record->step);
  put_int(&row, record->updates);
  put_double(&row, record->loss);
  put_double(&row, record->lr);
  put_double(&row, record->scale);
  put_double(&row, verdict->scale);
  put_int(&row, record->overflow);
  put_text(&row, eng_action_name(verdict->action));
  put_int(&row, record->inf);
  put_int(&row, record->nan);
  put_int(&row, record->count);
  put_int(&row, record->zeros);
  put_int(&row, record->underflow);
  put_double(&row, record->amax);
  put_double(&row, record->norm);
  put_double(&row, record->norm_ref);
  put_double(&row, verdict->clip);
  put_double(&row, verdict->lr_mul);
  put_int(&row, verdict->failed);
  put_int(&row, record->first_bad);
  put_text(&row, reason[0] ? reason : NULL);
  put_double(&row, record->elapsed);
  put_double(&row, tokens);
  if (used && row.message != NULL) {
    uint8_t *blob = row.at + sizeof(history_field);
    int64_t bytes = history_pack_hist(blob, record->hist, record->amax_f16);
    *(history_field *)row.at = (history_field){ FIELD_BLOB, (uint32_t)bytes };
    row.at = blob + (bytes + 7) / 8 * 8;
  } else {
    put(&row, FIELD_NULL, NULL, 0);
  }
  return finish(&row, history);
}

eng_status eng_history_tensors(eng_history *history, int64_t step, const eng_tensor_stats *stats,
                               int n)
{
  draft row;
  // The upper bound is far larger than the actual size, so the statistics are packed in a buffer
  // first.
  uint8_t *blob = malloc((size_t)history_pack_bound(n));
  if (blob == NULL) return error_set(ENG_ERR_MEMORY, "history %s: out of memory", history->path);
  int64_t bytes = history_pack(blob, stats, n);
  eng_status status = begin(&row, history, HISTORY_TENSORS, 2, bytes);
  if (status == ENG_OK) {
    put_int(&row, step);
    put(&row, FIELD_BLOB, blob, bytes);
    status = finish(&row, history);
  }
  free(blob);
  return status;
}

eng_status eng_history_shadow(eng_history *history, int64_t step, const char *name,
                              const eng_verdict *verdict, bool overflow, bool bound)
{
  draft row;
  char reason[sizeof verdict->reason + 1];
  memcpy(reason, verdict->reason, sizeof verdict->reason);
  reason[sizeof verdict->reason] = 0;
  ENG_TRY(begin(&row, history, HISTORY_SHADOW, 8, length(name) + length(reason) + 8));
  put_int(&row, step);
  put_text(&row, name);
  put_double(&row, verdict->scale);
  put_text(&row, eng_action_name(verdict->action));
  put_int(&row, verdict->failed);
  put_text(&row, reason[0] ? reason : NULL);
  put_int(&row, overflow);
  put_int(&row, bound);
  return finish(&row, history);
}

eng_status eng_history_fp8(eng_history *history, int64_t step, const char *site, const char *role,
                           const double value[9])
{
  draft row;
  ENG_TRY(begin(&row, history, HISTORY_FP8, 12, length(site) + length(role)));
  put_int(&row, step);
  put_text(&row, site);
  put_text(&row, role);
  for (int i = 0; i < 9; i++) put_double(&row, value[i]);
  return finish(&row, history);
}

eng_status eng_history_signal(eng_history *history, int64_t step, const char *name, double value)
{
  draft row;
  ENG_TRY(begin(&row, history, HISTORY_SIGNAL, 3, length(name) + 8));
  put_int(&row, step);
  put_text(&row, name);
  put_double(&row, value);
  return finish(&row, history);
}

eng_status eng_history_event(eng_history *history, int64_t step, const char *kind, const char *text,
                             const char *data)
{
  draft row;
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  ENG_TRY(begin(&row, history, HISTORY_EVENT, 5, length(kind) + length(text) + length(data)));
  put_int(&row, step);
  put_double(&row, (double)now.tv_sec + 1e-9 * (double)now.tv_nsec);
  put_text(&row, kind);
  put_text(&row, text);
  put_text(&row, data);
  return finish(&row, history);
}

eng_status eng_history_text(eng_history *history, const char *table, const char *key,
                            const char *value)
{
  draft row;
  const bool meta = strcmp(table, "meta") == 0;
  if (!meta && strcmp(table, "config") != 0)
    return error_set(ENG_ERR_VALUE,
                     "history %s: expected the table \"meta\" or \"config\", got \"%s\"",
                     history->path, table);
  ENG_TRY(
    begin(&row, history, meta ? HISTORY_META : HISTORY_CONFIG, 2, length(key) + length(value)));
  put_text(&row, key);
  put_text(&row, value);
  return finish(&row, history);
}

eng_status eng_history_policy(eng_history *history, const char *hash, const char *name,
                              const char *source)
{
  draft row;
  ENG_TRY(begin(&row, history, HISTORY_POLICY, 3, length(hash) + length(name) + length(source)));
  put_text(&row, hash);
  put_text(&row, name);
  put_text(&row, source);
  return finish(&row, history);
}

eng_status eng_history_parameter(eng_history *history, int index, const char *name, int ndim,
                                 const int64_t *shape, const char *gradient)
{
  draft row;
  char text[ENG_MAX_DIMS * 22 + 4] = "[";
  size_t used = 1;
  for (int d = 0; d < ndim && d < ENG_MAX_DIMS; d++)
    used += (size_t)snprintf(text + used, sizeof text - used, "%s%lld", d ? "," : "",
                             (long long)shape[d]);
  snprintf(text + used, sizeof text - used, "]");
  ENG_TRY(begin(&row, history, HISTORY_PARAMETER, 4,
                length(name) + length(text) + length(gradient)));
  put_int(&row, index);
  put_text(&row, name);
  put_text(&row, text);
  put_text(&row, gradient);
  return finish(&row, history);
}

eng_status eng_history_resume(eng_history *history, int64_t step)
{
  draft row;
  ENG_TRY(begin(&row, history, HISTORY_RESUME, 1, 0));
  put_int(&row, step);
  ENG_TRY(finish(&row, history));
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
  eng_status status = !all || history->news ? trouble_told(history) : ENG_OK;
  pthread_mutex_unlock(&history->lock);
  return status;
}
