// Accepts the core's table of functions, for host.c. Included by host.c and table.c.
#pragma once
#include "device/backend.h"

/// Keeps the core's table. Returns false if the table's version differs from this plug-in's.
bool host_accept(const backend_host *given);
