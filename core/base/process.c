// Child processes, in which `engine contest` and `engine replay` run scripts. Owns nothing: the
// caller keeps the process ids. See the section "the machine" of engine.h. Called by Lua.
#define _GNU_SOURCE   // pipe2
#include "error.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

// Runs in the child process: executes the program. If that fails, writes errno to the pipe `tell`
// and exits.
static void become(const char *const *words, int output, int tell, pid_t parent)
{
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(1);               // the parent ended before prctl
  setpgid(0, 0);
  int input = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (input >= 0 && dup2(input, STDIN_FILENO) >= 0 && dup2(output, STDOUT_FILENO) >= 0 &&
      dup2(output, STDERR_FILENO) >= 0)
    execvp(words[0], (char *const *)(uintptr_t)words);
  int problem = errno;
  if (write(tell, &problem, sizeof problem) < 0) _exit(126);
  _exit(127);
}

eng_status eng_process_start(int *process, const char *const *words, const char *log)
{
  *process = 0;
  int tell[2] = {-1, -1}, problem = 0;
  int output = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  FAIL_IF(output < 0, ENG_ERR_IO, "%s: cannot open this log file: %s", log, strerror(errno));
  pid_t parent = getpid(), child = pipe2(tell, O_CLOEXEC) == 0 ? fork() : -1;
  if (child == 0) become(words, output, tell[1], parent);
  if (child < 0) problem = errno;
  close(output);
  if (tell[1] >= 0) close(tell[1]);
  if (child > 0) {
    // Waits until execvp has closed the pipe. Until then the new process still has this process's
    // signal handlers.
    ssize_t size;
    do size = read(tell[0], &problem, sizeof problem);
    while (size < 0 && errno == EINTR);
    if (problem) waitpid(child, NULL, 0);
  }
  if (tell[0] >= 0) close(tell[0]);
  FAIL_IF(problem, ENG_ERR_IO, "%s: cannot start this program: %s", words[0], strerror(problem));
  *process = child;
  return ENG_OK;
}

int eng_process_status(int process)
{
  int status;
  pid_t ended = waitpid(process, &status, WNOHANG);
  if (ended == 0) return -1;
  if (ended < 0) return 255;                       // not a child, or already waited for
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

void eng_process_signal(int process, int number) { if (process > 0) kill(-process, number); }
