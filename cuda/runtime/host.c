// Defines the core's functions that the CUDA device calls. They call the core through the table
// that the core passes when it loads the plug-in (backend_host). Keeps a pointer to that table.
// Called by every folder of cuda/.
#include "runtime.h"

#include "base/error.h"
#include "base/rng.h"

#include <stdarg.h>
#include <stdio.h>

static const backend_host *host;

bool host_accept(const backend_host *given)
{
  if (given->abi != BACKEND_ABI) return false;
  host = given;
  return true;
}

eng_status error_set(eng_status status, const char *format, ...)
{
  char text[2048];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  return host->error(status, text);
}

int arena_space(void) { return SPACE_CUDA; }
void *arena_alloc_in(int space, arena_id id, int64_t bytes)
{ return host->alloc(space, id, bytes); }
void arena_free_in(int space, arena_id id, void *piece, int64_t bytes)
{ host->free(space, id, piece, bytes); }
const char *tensor_text(const tensor *x) { return host->tensor_text(x); }
bool tensor_contiguous(const tensor *x) { return host->tensor_contiguous(x); }
uint64_t rng_seed(void) { return host->rng_seed(); }
int eng_interrupted(void) { return host->interrupted(); }
