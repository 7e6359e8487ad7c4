// Captured steps. See capture.c.
#pragma once

#include "tensor/tensor.h"

/// During a capture, stores the address of `seed`, the loss's gradient; each launch first writes
/// the gradient's value there. Returns false if no capture is running.
bool capture_takes_seed(const tensor *seed);
