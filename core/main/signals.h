// Signals. See signals.c. Included by main.c.
#pragma once

#include <lua.h>
#include <stdbool.h>
#include <stddef.h>

/// Installs the handlers. `rank`: only rank 0 prints about interrupts. `own_place` returns whether
/// a position is in the engine's own Lua files. The error of an interrupt names a position outside
/// these files, if there is one.
void signals_catch(lua_State *L, int rank, bool (*own_place)(const char *place, size_t length));
/// Keeps the handlers from using the Lua state from now on.
void signals_leave(void);
/// Notes that a trainer has begun a run. From now on a closed pipe or `kill -HUP` does not end the
/// process.
void signals_run_begun(void);
/// Clears a pending interrupt. Returns whether there was one.
bool signals_clear(lua_State *L);
