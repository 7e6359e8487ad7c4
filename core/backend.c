// The registry of devices and the one in force. See backend.h.
#include "backend.h"

#include "error.h"

#include <string.h>

static const backend *current;

const backend *backend_find(const char *name)
{
  if (strcmp(name, "cpu") == 0) return backend_cpu();
  if (strcmp(name, "reference") == 0) return backend_reference();
  return NULL;
}

const backend *backend_current(void)
{
  if (!current) current = backend_cpu();
  return current;
}

void backend_use(const backend *device)
{
  current = device;
}

eng_status eng_device_set(const char *name)
{
  const backend *found = backend_find(strcmp(name, "auto") == 0 ? "cpu" : name);
  if (!found) return error_set(ENG_ERR_DEVICE, "there is no device '%s' here; devices: cpu, reference", name);
  current = found;
  return ENG_OK;
}

const char *eng_device_name(void)
{
  return backend_current()->name;
}
