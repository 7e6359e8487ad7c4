-- Starts ranks on this machine, for ranks_spec.lua and the campaigns beside this file: one thread each, more of them than cores.
local helper = require "spec.helper"

local M = {}

M.there = helper.shell("command -v mpirun").code == 0
  and helper.read(require("engine.ffi").library_dir .. "/libengine_mpi.so") ~= nil

local ENVIRONMENT = "OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1"
local MPIRUN = "mpirun --oversubscribe --bind-to none --mca btl self,vader --mca orte_base_help_aggregate 0"

local function quoted(words, settings)
  for _, setting in ipairs(settings or {}) do words[#words + 1] = helper.quote(setting) end
end

--- The command of n ranks (0: one process, without mpirun) that run a script. options: limit (seconds; 60), mpirun (more of its words).
function M.command(n, script, settings, options)
  local o = options or {}
  local words = { ENVIRONMENT, n == 0 and "ENGINE_RANKS=off" or "", "timeout -k 5", o.limit or 60 }
  if n > 0 then words[#words + 1] = ("%s %s -np %d"):format(MPIRUN, o.mpirun or "", n) end
  words[#words + 1] = helper.quote(helper.engine)
  words[#words + 1] = script
  quoted(words, settings)
  return table.concat(words, " ")
end

--- The command of ranks that are not alike: a list of { engine =, script =, settings =, environment = "A=B", n = 1 }; `script` is that of all
--- that name none, `program` in its place is any other command.
function M.mixed(parts, script, options)
  local words = { ENVIRONMENT, "timeout -k 5", options and options.limit or 60, MPIRUN }
  for i, part in ipairs(parts) do
    if i > 1 then words[#words + 1] = ":" end
    words[#words + 1] = ("-np %d env %s"):format(part.n or 1, part.environment or "")
    words[#words + 1] = part.program or helper.quote(part.engine or helper.engine) .. " " .. (part.script or script)
    quoted(words, part.settings)
  end
  return table.concat(words, " ")
end

--- Runs n ranks. Gives { code, out, err }.
function M.run(n, script, settings, options) return helper.shell(M.command(n, script, settings, options)) end

return M
