// Flags that signal handlers set and the engine reads: interrupts and SIGHUP. The functions of this
// file must not lock or allocate, because they are called by the handlers in main/signals.c. They
// are also called by the trainer and by loops that a signal can interrupt. Owns the flags.
#include "engine.h"

#include <signal.h>

// The state of eng_interrupt, eng_interrupt_policy, eng_hangups and eng_interrupt_signal; engine.h
// describes the values.
static volatile sig_atomic_t level, policy, hangups, by_signal;

void eng_interrupt(int new_level) { level = new_level; }

int eng_interrupted(void) { return level; }

int eng_interrupt_signal(int number)
{
  if (number > 0) by_signal = number;
  return by_signal;
}

int eng_interrupt_policy(int new_policy)
{
  int before = policy;
  if (new_policy >= 0) policy = new_policy;
  return before;
}

void eng_hangup(void) { hangups++; }

int eng_hangups(void)
{
  int n = hangups;
  if (n) hangups = 0;
  return n;
}
