// The signal handlers of the `engine` binary. They interrupt a script, stop a run or end the
// process. Owns the state of the handlers. Called by main.c.
#define _GNU_SOURCE
#include "signals.h"

#include "engine.h"

#include <errno.h>
#include <lauxlib.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

static lua_State *main_state;
static pthread_t main_thread;
static int rank;
static bool has_run;                                    // whether a trainer has begun a run
static bool (*is_own_place)(const char *place, size_t length);

// Raises the error of an interrupt. The error names a line of the script (unless none is running),
// even if the signal arrived inside one of the engine's Lua files.
static void stop_hook(lua_State *L, lua_Debug *record)
{
  lua_Debug frame;
  (void)record;
  lua_sethook(L, NULL, 0, 0);
  for (int level = 0; lua_getstack(L, level, &frame); level++) {
    lua_getinfo(L, "Sl", &frame);
    if (frame.currentline <= 0 || is_own_place(frame.short_src, strlen(frame.short_src))) continue;
    lua_pushfstring(L, "%s:%d: interrupted!", frame.short_src, frame.currentline);
    lua_error(L);
  }
  luaL_error(L, "interrupted!");
}

// Writes a text to stderr. Keeps errno, which the interrupted code may be about to read.
static void say(const char *text)
{
  int before = errno;
  if (write(STDERR_FILENO, text, strlen(text)) < 0) errno = before;
}

// Handles SIGINT, SIGTERM, SIGUSR1, SIGUSR2 and SIGXCPU. After the first signal the trainer stops
// at the end of its step, a waiting call returns, or the script is stopped. The second SIGINT
// or SIGTERM ends the process at once. Only SIGINT and SIGTERM are counted, because SIGXCPU comes
// every second, and a batch system sends SIGUSR1 before its first SIGTERM.
static void on_signal(int signal_number)
{
  static volatile sig_atomic_t endings;    // number of SIGINTs and SIGTERMs so far
  if (!pthread_equal(pthread_self(), main_thread)) {     // an OpenMP thread must not set Lua's hook
    pthread_kill(main_thread, signal_number);
    return;
  }
  bool ends = signal_number == SIGINT || signal_number == SIGTERM;
  if (eng_interrupted()) {
    if (ends && ++endings > 1) _exit(128 + signal_number);
    return;
  }
  endings = ends;
  eng_interrupt_signal(signal_number);
  int policy = eng_interrupt_policy(-1);
  eng_interrupt(policy == 1 ? 1 : 2);
  if (policy == 1 && rank == 0)
    say("\nstopping after this step; interrupt again to stop at once\n");
  if (policy != 0) return;
  alarm(1);
  if (main_state) lua_sethook(main_state, stop_hook, LUA_MASKCALL | LUA_MASKRET | LUA_MASKCOUNT, 1);
}

// Runs one second after a signal that should stop the script, because compiled Lua loops and long
// operations check no hook. If the script has not stopped by then and no run has begun, a signal
// other than SIGINT ends the process. After Ctrl-C the user decides whether to interrupt again.
static void on_alarm(int signal_number)
{
  (void)signal_number;
  if (!eng_interrupted()) return;
  int number = eng_interrupt_signal(0);
  bool stuck = main_state && lua_gethook(main_state) == stop_hook;
  if (stuck && !has_run && number != SIGINT) _exit(128 + number);
  if (rank == 0) say("\nstill busy; interrupt again to stop at once\n");
}

// SIGBUS: a mapped file was truncated while in use. The missing data cannot be read, so this
// handler prints the reason and exits.
static void on_bus(int signal_number)
{
  say("\nengine: a data or weight file was truncated while in use; hint: resume=auto continues "
      "from the last checkpoint\n");
  _exit(128 + signal_number);
}

static bool hangup_ignored;    // SIGHUP was ignored when the process started, as under nohup

void signals_run_begun(void) { has_run = true; }

// SIGHUP. After `kill -HUP` a run rereads its policy's file. The signal has no effect after a run;
// if no run has begun, the process ends as usual. If the terminal closed (the signal then comes
// from the kernel), a run stops as on Ctrl-C, and a process without one ends. A process that was
// started with nohup neither stops nor ends.
static void on_hangup(int signal_number, siginfo_t *from, void *context)
{
  (void)context;
  bool terminal_gone = from->si_code > 0, running = eng_interrupt_policy(-1) == 1;
  if (!terminal_gone && running) eng_hangup();
  if (hangup_ignored || (!terminal_gone && (running || has_run))) return;
  if (running) { on_signal(signal_number); return; }
  signal(signal_number, SIG_DFL);
  raise(signal_number);
}

// SIGPIPE: the reader of a pipe has closed it. If the pipe is stdout (`| head`, a dead `tee`), the
// process ends as usual, unless it has begun a run. In that case the run and the rest of the script
// continue without the output: the write fails, and progress.lua reports the failure.
static void on_pipe(int signal_number)
{
  struct pollfd out = {.fd = STDOUT_FILENO, .events = POLLOUT};
  int before = errno, ready = has_run ? 0 : poll(&out, 1, 0);
  errno = before;
  if (ready != 1 || !(out.revents & (POLLERR | POLLHUP))) return;
  signal(signal_number, SIG_DFL);
  raise(signal_number);
}

// SIGXFSZ: a write exceeded the limit on a file's size (ulimit -f). Because of this handler the
// write fails with EFBIG, and the process does not end.
static void on_file_limit(int signal_number) { (void)signal_number; }

void signals_catch(lua_State *L, int own_rank, bool (*own_place)(const char *, size_t))
{
  static const struct { int number; void (*handler)(int); } caught[] = {
    {SIGINT, on_signal}, {SIGTERM, on_signal}, {SIGUSR1, on_signal}, {SIGUSR2, on_signal},
    {SIGXCPU, on_signal}, {SIGALRM, on_alarm}, {SIGBUS, on_bus}, {SIGPIPE, on_pipe},
    {SIGXFSZ, on_file_limit}};
  struct sigaction before, action = {.sa_flags = SA_RESTART},
    hangup = {.sa_sigaction = on_hangup, .sa_flags = SA_RESTART | SA_SIGINFO};
  sigemptyset(&action.sa_mask);
  main_thread = pthread_self();
  main_state = L;
  rank = own_rank;
  is_own_place = own_place;
  for (size_t i = 0; i < sizeof caught / sizeof *caught; i++) {
    action.sa_handler = caught[i].handler;
    sigaction(caught[i].number, &action, NULL);
  }
  sigemptyset(&hangup.sa_mask);
  hangup_ignored = sigaction(SIGHUP, NULL, &before) == 0 && before.sa_handler == SIG_IGN;
  sigaction(SIGHUP, &hangup, NULL);
}

void signals_leave(void) { main_state = NULL; }

bool signals_clear(lua_State *L)
{
  bool was = eng_interrupted() != 0;
  alarm(0);
  lua_sethook(L, NULL, 0, 0);
  eng_interrupt(0);
  return was;
}
