-- engine version
local host = require "engine.host"

return {
  doc = "the versions of the engine and of LuaJIT",
  main = function()
    print(("engine %s -- %s"):format(host.version, host.luajit))
    return 0
  end,
}
