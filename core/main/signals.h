// Signals. See signals.c.
#pragma once

#include <lua.h>
#include <stdbool.h>
#include <stddef.h>

/// Installs the handlers. `rank`: only rank 0 prints. `own_place`: whether a position is in the
/// engine's own Lua files; the error of an interrupt names no such position.
void signals_catch(lua_State *L, int rank, bool (*own_place)(const char *place, size_t length));
/// From now on the handlers do not use the Lua state.
void signals_leave(void);
/// A trainer has begun a run: a closed pipe or `kill -HUP` no longer ends the process.
void signals_run_begun(void);
/// Clears a pending interrupt. Returns whether there was one.
bool signals_clear(lua_State *L);
