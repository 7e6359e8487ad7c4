// Wrappers around the current device, which observe its calls. A wrapper may lie inside another
// one. Defined in backend.c. Included by autograd/profile.c and autograd/trap.c.
#pragma once

#include "backend.h"

typedef struct wrapper {
  backend device;               // a copy of *inner, in which the owner replaces functions
  const backend *inner;         // the device, or the device of the wrapper inside this one
  struct wrapper *next;         // the wrapper inside this one, or NULL
} wrapper;

/// Puts a wrapper around the current device and returns true. Returns false and changes nothing if
/// the wrapper is already around it.
bool wrapper_put(wrapper *w);
/// Removes a wrapper, unless it lies inside another one or is not around the current device.
/// Choosing a device removes all wrappers.
void wrapper_remove(wrapper *w);
