// What the stand-ins for a card (fake_card.c) and for NCCL (fake_nccl.c) share: lanes, which NCCL takes for streams, and the card's name.
#ifndef FAKE_H
#define FAKE_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/// Something a lane has to do. `run` gives 1 when it is done, after which the task is freed, 0 when it must be asked again, -1 on failure.
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

/// Each process has a card of its own, or the one named by FAKE_CARD.
static inline const char *fake_identity(void)
{
  static char text[64];
  const char *name = getenv("FAKE_CARD");
  if (name) snprintf(text, sizeof text, "fake card %.40s", name);
  else snprintf(text, sizeof text, "fake card of process %d", (int)getpid());
  return text;
}

#endif
