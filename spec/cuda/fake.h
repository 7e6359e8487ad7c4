// Shared by the fake card (fake_card.c) and the fake NCCL (fake_nccl.c): streams, and the card's
// name.
#ifndef FAKE_H
#define FAKE_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/// A task of a stream. `run` returns 1 when the task is done (it is then freed), 0 to be called
/// again, -1 on failure.
typedef struct fake_task {
  struct fake_task *next;
  int (*run)(struct fake_task *task);
  const char *what;
} fake_task;

typedef struct fake_lane {
  fake_task *first, *last;
  long asked, done;                              // tasks
  void (*open)(void), (*close)(void);            // the card's memory
  bool (*on_card)(const void *memory);
} fake_lane;

static inline void fake_lane_push(fake_lane *lane, fake_task *task, int (*run)(fake_task *),
                                  const char *what)
{
  task->next = NULL;
  task->run = run;
  task->what = what;
  if (lane->first) lane->last->next = task;
  else lane->first = task;
  lane->last = task;
  lane->asked++;
}

/// Each process has its own card, or the one named by FAKE_CARD.
static inline const char *fake_identity(void)
{
  static char text[64];
  const char *name = getenv("FAKE_CARD");
  if (name) snprintf(text, sizeof text, "fake card %.40s", name);
  else snprintf(text, sizeof text, "fake card of process %d", (int)getpid());
  return text;
}

#endif
