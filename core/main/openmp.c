// Settings of OpenMP that must be in the environment before its runtime is loaded, that is, before
// main. Called by main.c.
#define _GNU_SOURCE
#include "openmp.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Converts the text of an OpenMP stack size, such as "4M", to bytes. Returns 0 if the text does not
// begin with a size. A number without a unit is in kilobytes.
static size_t stack_bytes(const char *text)
{
  static const char units[] = "bkmg";
  unsigned long long n;
  char letter = 'k';
  if (sscanf(text, "%llu %c", &n, &letter) < 1) return 0;
  const char *unit = strchr(units, letter | 32);
  if (!unit) return 0;
  int shift = 10 * (int)(unit - units);
  return n <= SIZE_MAX >> shift ? (size_t)n << shift : SIZE_MAX;
}

static void *start_when_free(void *lock)
{
  pthread_mutex_lock(lock);
  pthread_mutex_unlock(lock);
  return NULL;
}

// Whether one thread per core (at most 256) can start with a stack of `bytes` each. Also true if
// pthread_attr_setstacksize refuses the size, because OpenMP itself then reports and ignores it.
static bool threads_fit(size_t bytes)
{
  enum { MOST = 256 };
  pthread_t threads[MOST];
  pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  pthread_attr_t attributes;
  long cores = sysconf(_SC_NPROCESSORS_ONLN);
  int made = 0, wanted = cores < 1 ? 1 : cores < MOST ? (int)cores : MOST;
  pthread_attr_init(&attributes);
  bool fit = true, set = pthread_attr_setstacksize(&attributes, bytes) == 0;
  pthread_mutex_lock(&lock);
  while (set && fit && made < wanted) {
    fit = pthread_create(&threads[made], &attributes, start_when_free, &lock) == 0;
    made += fit;
  }
  pthread_mutex_unlock(&lock);
  for (int i = 0; i < made; i++) pthread_join(threads[i], NULL);
  pthread_attr_destroy(&attributes);
  return fit;
}

// Unsets OMP_STACKSIZE and GOMP_STACKSIZE if threads cannot start with stacks of that size, because
// OpenMP would then end the process. Returns whether it unset one of them.
static bool drop_stack_size(void)
{
  static const char *const names[] = {"OMP_STACKSIZE", "GOMP_STACKSIZE"};
  bool dropped = false;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    const char *text = getenv(names[i]);
    size_t bytes = text ? stack_bytes(text) : 0;
    if (!bytes || threads_fit(bytes)) continue;
    fprintf(stderr, "engine: %s=%.40s: threads cannot start with stacks of this size; using the "
                    "default size\n", names[i], text);
    dropped = unsetenv(names[i]) == 0 || dropped;
  }
  return dropped;
}

void openmp_configure(char **argv)
{
  bool again = drop_stack_size();
  if (!getenv("GOMP_SPINCOUNT") && !getenv("OMP_WAIT_POLICY"))
    again = setenv("GOMP_SPINCOUNT", "1000", 1) == 0 || again;
  if (again) execv("/proc/self/exe", argv);  // if that fails, continue without the settings
}
