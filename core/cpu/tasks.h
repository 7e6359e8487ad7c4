// Shares a kernel's work among threads. Small work runs on the calling thread, outside any parallel
// region, because opening a region takes some 300 ns, half the time of a small operation, even if
// the region's `if` clause is false. Included by kernel files. Owns nothing.
#pragma once

#include <stdbool.h>
#include <stdint.h>

/// Does piece `index` of the work. No two pieces write the same results.
typedef void task_body(const void *context, int64_t index);

/// Runs body(context, k) for k from 0 to tasks - 1. With `together`, all threads share the work,
/// and each takes a consecutive range of k.
static inline void run_tasks(int64_t tasks, bool together, task_body *body, const void *context)
{
  if (!together || tasks < 2) {
    for (int64_t k = 0; k < tasks; k++) body(context, k);
    return;
  }
#pragma omp parallel for schedule(static)
  for (int64_t k = 0; k < tasks; k++) body(context, k);
}
