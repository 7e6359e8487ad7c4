-- Warns that a name of an earlier version has been replaced. The old name still works. Only rank 0
-- warns, once per name. Owns the list of past warnings. Called by nn/init.lua, train/options.lua
-- and cli/plan.lua.
--   renamed("the trainer's option 'wire'", "'comm_dtype'")
local M_ffi = require "engine.base.ffi"

local C = M_ffi.C

local warned = {}

return function(old, new)
  if warned[old] then return end
  warned[old] = true
  local rank, size = M_ffi.new("int[1]"), M_ffi.new("int[1]")
  if C.eng_comm_launched(rank, size) and rank[0] > 0 then return end
  io.stderr:write(("engine: %s is called %s now; the old name still works\n"):format(old, new))
end
