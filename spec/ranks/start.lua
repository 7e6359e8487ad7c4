-- Starts ranks on this machine, for ranks_spec.lua and the campaigns beside this file: one thread each, more of them than cores.
local helper = require "spec.helper"

local M = {}

M.there = helper.shell("command -v mpirun").code == 0
  and helper.read(require("engine.ffi").library_dir .. "/libengine_mpi.so") ~= nil

local ENVIRONMENT = "OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1"
local MPIRUN = "mpirun --oversubscribe --bind-to none --mca btl self,vader --mca orte_base_help_aggregate 0"

--- The command of n ranks (0: one process, without mpirun) that run a script. options: engine (another binary), limit (seconds; 60),
--- environment (more of it), mpirun (more of its words).
function M.command(n, script, settings, options)
  local o = options or {}
  local words = { ENVIRONMENT, o.environment or "", n == 0 and "ENGINE_RANKS=off" or "", "timeout -k 5", o.limit or 60 }
  if n > 0 then words[#words + 1] = ("%s %s -np %d"):format(MPIRUN, o.mpirun or "", n) end
  words[#words + 1] = helper.quote(o.engine or helper.engine)
  words[#words + 1] = script
  for _, setting in ipairs(settings or {}) do words[#words + 1] = helper.quote(setting) end
  return table.concat(words, " ")
end

--- Runs it. Gives { code, out, err }.
function M.run(n, script, settings, options) return helper.shell(M.command(n, script, settings, options)) end

return M
