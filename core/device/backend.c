// The registry of devices and the current device. See backend.h. Owns both. Called by cpu.c,
// this folder, params/, autograd/, fp8/, dist/ and Lua.
#include "backend.h"

#include "base/error.h"
#include "plugin.h"
#include "wrapper.h"

#include <string.h>

// Devices built into this library register themselves before main.
static struct { const char *name; const backend *(*get)(void); } built_in[4];
static int n_built_in;

static const backend *current;
static wrapper *outermost;                     // around the current device; NULL: none
static const backend *of_space[SPACE_COUNT];   // the device that owns a space, once loaded

static bool capturing;

void backend_register(const char *name, const backend *(*get)(void))
{
  built_in[n_built_in].name = name;
  built_in[n_built_in++].get = get;
}

const backend *backend_find(const char *name)
{
  for (int i = 0; i < n_built_in; i++)
    if (strcmp(name, built_in[i].name) == 0) return built_in[i].get();
  if (strcmp(name, "cuda") == 0) {
    const backend *cuda = plugin_cuda();
    if (cuda && !of_space[cuda->space]) {   // noted even if the caller never makes it current
      of_space[cuda->space] = cuda;
      arena_register(cuda->space, &cuda->memory);
    }
    return cuda;
  }
  error_set(ENG_ERR_DEVICE, "unknown device '%s'; expected cpu, reference, cuda or auto", name);
  return NULL;
}

const backend *backend_current(void)
{
  if (!current) current = backend_find("cpu");
  return current;
}

const backend *backend_of_space(int space)
{ return space == SPACE_HOST ? backend_find("cpu") : of_space[space]; }

void backend_capturing(bool on) { capturing = on; }

eng_status backend_forbids(const char *what)
{
  if (!capturing) return ENG_OK;
  return error_set(ENG_ERR_STATE,
                   "graph: %s cannot be part of a captured step; hint: graph=false", what);
}

void backend_use(const backend *device)
{
  current = device;
  outermost = NULL;
  arena_use(device->space);
}

bool wrapper_put(wrapper *w)
{
  for (const wrapper *at = outermost; at; at = at->next)
    if (at == w) return false;
  const backend *inner = backend_current();
  *w = (wrapper){.device = *inner, .inner = inner, .next = outermost};
  outermost = w;
  current = &w->device;
  return true;
}

void wrapper_remove(wrapper *w)
{
  if (outermost != w) return;
  outermost = w->next;
  current = w->inner;
}

eng_status eng_device_set(const char *name)
{
  if (strcmp(name, "auto") == 0) {
    char text[256];
    name = eng_gpu_probe(text, sizeof text) > 0 && backend_find("cuda") ? "cuda" : "cpu";
  }
  const backend *found = backend_find(name);
  if (!found) return ENG_ERR_DEVICE;
  backend_use(found);
  return ENG_OK;
}

const char *eng_device_name(void) { return backend_current()->name; }

const char *eng_device_text(void)
{
  const backend *device = backend_current();
  return device->describe ? device->describe() : device->name;
}

int eng_device_fp8(void)
{
  const backend *device = backend_current();
  return device->fp8 ? device->fp8() : 2;
}

eng_status eng_synchronize(void)
{
  const backend *device = backend_current();
  return device->synchronize ? device->synchronize() : ENG_OK;
}
