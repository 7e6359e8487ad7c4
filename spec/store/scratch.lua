-- Helpers for specs that touch files: SQL on a database, a simulated full disk, another process.
local M_ffi = require "engine.base.ffi"

local ffi = M_ffi.ffi

ffi.cdef [[
struct spec_rlimit { uint64_t now, most; };
int setrlimit(int resource, const struct spec_rlimit *limit);
int getrlimit(int resource, struct spec_rlimit *limit);
void *signal(int number, intptr_t handler);
int sqlite3_open(const char *path, void **db);
int sqlite3_exec(void *db, const char *sql, void *callback, void *argument, char **error);
int sqlite3_close(void *db);
long readlink(const char *path, char *target, size_t room);
]]

local M = {}

--- Runs SQL statements on a database file; errors of the statements are ignored.
function M.sqlite(path, sql)
  local sqlite, db = ffi.load "sqlite3.so.0", ffi.new "void *[1]"
  assert(sqlite.sqlite3_open(path, db) == 0)
  sqlite.sqlite3_exec(db[0], sql, nil, nil, nil)
  sqlite.sqlite3_close(db[0])
end

--- Returns the names in a folder, sorted.
M.names = require("engine.base.file").names

local FSIZE, SIGXFSZ, IGNORE = 1, 25, 1

--- Runs f(...) while no file can grow beyond `bytes`, so writes fail as on a full disk.
function M.with_file_limit(bytes, f, ...)
  local limit = ffi.new("struct spec_rlimit")
  assert(ffi.C.getrlimit(FSIZE, limit) == 0)
  local before = limit.now
  local handler = ffi.C.signal(SIGXFSZ, IGNORE)
  limit.now = bytes
  assert(ffi.C.setrlimit(FSIZE, limit) == 0)
  local results = { pcall(f, ...) }
  limit.now = before
  assert(ffi.C.setrlimit(FSIZE, limit) == 0)
  ffi.C.signal(SIGXFSZ, ffi.cast("intptr_t", handler))
  assert(results[1], results[2])
  return unpack(results, 2, table.maxn(results))
end

--- A shell command that runs a Lua script with this engine in another process.
function M.command(script)
  local target = ffi.new("char[4096]")
  local length = ffi.C.readlink("/proc/self/exe", target, 4095)
  return ("exec env ENGINE_LIBRARY_DIR='%s' LUA_PATH='%s' '%s' '%s'"):format(M_ffi.library_dir,
    package.path, ffi.string(target, length), script)
end

return M
