// Constant tables for policies: an empty table whose metatable reads from the original table and
// refuses writes. No function in the sandbox makes or reads metatables, so every table with a
// metatable is such a constant. Called by policy_library.c, policy_checks.c and policy_vm.c.
#include "policy_vm.h"

static int constant_assigned(lua_State *L)                 // upvalue: the constant's name
{
  return luaL_error(L, "cannot assign '%s': %s are constant; use 'state' for values that change",
                    lua_type(L, 2) == LUA_TSTRING ? lua_tostring(L, 2) : luaL_typename(L, 2),
                    lua_tostring(L, lua_upvalueindex(1)));
}

void policy_make_constant(lua_State *L, const char *what)
{
  lua_newtable(L);
  lua_createtable(L, 0, 2);
  lua_pushvalue(L, -3);
  lua_setfield(L, -2, "__index");
  lua_pushstring(L, what);
  lua_pushcclosure(L, constant_assigned, 1);
  lua_setfield(L, -2, "__newindex");
  lua_setmetatable(L, -2);
  lua_remove(L, -2);
}

void policy_open_constant(lua_State *L, int index)
{
  if (!lua_istable(L, index) || !lua_getmetatable(L, index)) return;
  lua_getfield(L, -1, "__index");
  lua_replace(L, index);
  lua_pop(L, 1);
}
