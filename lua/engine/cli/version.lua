-- engine version: prints the versions of the engine and of LuaJIT. Called by init.lua.
local host = require "engine.host"

return require("engine.cli.options").command {
  name = "version", doc = "the versions of the engine and of LuaJIT",
  most = 0, expects = "no arguments",
  help = "usage: engine version\n\nPrints the versions of the engine and of LuaJIT.",
  main = function() print(("engine %s -- %s"):format(host.version, host.luajit)) end,
}
