// Sharing a kernel's work among threads. Below a certain amount the caller does it alone, outside of
// any parallel region: opening one costs some 300 ns even where its `if` clause says no, which is
// half of a small operation. Owns nothing. Included by kernel files.
#ifndef ENG_TASKS_H
#define ENG_TASKS_H

#include <stdbool.h>
#include <stdint.h>

/// One piece of the work; pieces do not touch each other's results.
typedef void task_body(const void *context, int64_t index);

/// Runs body(context, 0 .. tasks - 1), on all threads in consecutive runs when `together`.
static inline __attribute__((unused)) void run_tasks(int64_t tasks, bool together, task_body *body, const void *context)
{
  if (!together || tasks < 2) {
    for (int64_t k = 0; k < tasks; k++) body(context, k);
    return;
  }
#pragma omp parallel for schedule(static)
  for (int64_t k = 0; k < tasks; k++) body(context, k);
}

#endif
