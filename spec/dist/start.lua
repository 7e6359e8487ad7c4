-- Starts ranks on this machine, for ranks_spec.lua and the campaigns beside this file. A rank has
-- one thread; there may be more ranks than cores.
local helper = require "spec.helper"

local M = {}

M.there = helper.shell("command -v mpirun").code == 0
  and helper.read(require("engine.base.ffi").library_dir .. "/libengine_mpi.so") ~= nil

--- Returns `there`. If ranks cannot be started, reports the specs of `what` as pending. Called by
--- a spec's file, because busted's functions are globals of that file only.
function M.can(what)
  local busted = getfenv(2)
  if not M.there then
    busted.describe(what, function()
      busted.pending "there is no mpirun here, or this build has no MPI: these are not run"
    end)
  end
  return M.there
end

-- All ranks are on this machine: shared memory carries their messages, Open MPI 4 starts them over
-- the loopback interface, and libfabric, which may look up the host name, is excluded.
local ENVIRONMENT = "OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "
  .. "OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_mtl=^ofi,psm,psm2 OMPI_MCA_oob_tcp_if_include=lo"
local MPIRUN = "mpirun --oversubscribe --bind-to none --mca btl self,vader --mca " ..
  "orte_base_help_aggregate 0"

local LIMIT = helper.sanitized and 300 or 60      -- seconds a job may take, by default

local function quoted(words, settings)
  for _, setting in ipairs(settings or {}) do words[#words + 1] = helper.quote(setting) end
end

--- The command that runs a script on n ranks (0: one process, without mpirun). options: limit
--- (in seconds), mpirun (extra arguments for it), environment: "A=B".
function M.command(n, script, settings, options)
  local o = options or {}
  local words = { ENVIRONMENT, o.environment or "", n == 0 and "ENGINE_RANKS=off" or "",
    "timeout -k 5", o.limit or LIMIT }
  if n > 0 then words[#words + 1] = ("%s %s -np %d"):format(MPIRUN, o.mpirun or "", n) end
  words[#words + 1] = helper.quote(helper.engine)
  words[#words + 1] = script
  quoted(words, settings)
  return table.concat(words, " ")
end

--- The command for ranks that differ. parts, in order of ranks: a list of { n = 1, engine =, script
--- = (the default is `script`), settings =, environment = "A=B" }, or { program = "any other
--- command" }. mpirun starts n shells, each of which becomes its rank's command: mpirun of Open MPI
--- 5.0 with an external PMIx (Debian 13) crashes on commands separated by ":" (open-mpi/ompi issue
--- 13303).
function M.mixed(parts, script, options)
  local cases, n = {}, 0
  for _, part in ipairs(parts) do
    local words = { "exec env", part.environment or "" }
    words[3] = part.program
      or helper.quote(part.engine or helper.engine) .. " " .. (part.script or script)
    quoted(words, part.settings)
    for _ = 1, part.n or 1 do
      cases[n + 1] = ("%d) %s ;;"):format(n, table.concat(words, " "))
      n = n + 1
    end
  end
  local shell = ("case $OMPI_COMM_WORLD_RANK in %s esac"):format(table.concat(cases, " "))
  return ("%s timeout -k 5 %d %s -np %d sh -c %s"):format(ENVIRONMENT,
    options and options.limit or LIMIT, MPIRUN, n, helper.quote(shell))
end

--- The command for n ranks without MPI, started the way torchrun starts them, each with a fake card
--- (spec/cuda/) and the fake NCCL between them. options: limit; folder, for the rendezvous; place =
--- "address:port"; names: a function of the rank that returns its variables instead of torchrun's;
--- environment: "A=B" for all; of = { [rank] = "A=B" }.
function M.nccl_command(n, script, settings, options)
  local o, lines = options or {}, {}
  local address, port = (o.place or "127.0.0.1:29400"):match("^(.*):(%d+)$")
  for rank = 0, n - 1 do
    local names = o.names and o.names(rank)
      or ("RANK=%d WORLD_SIZE=%d LOCAL_RANK=%d MASTER_ADDR=%s MASTER_PORT=%s " ..
        "TORCHELASTIC_RUN_ID=none"):format(rank, n, rank, address, port)
    local words = { "env", names, "OMP_NUM_THREADS=1", M.FAKES, "FAKE_NCCL_FOLDER=" ..
      helper.quote(o.folder), o.environment or "", o.of and o.of[rank] or "",
      "timeout -k 1", tostring(o.limit or LIMIT), helper.quote(helper.engine), script }
    quoted(words, settings)
    lines[#lines + 1] = ("{ %s & echo $! > $F/pid.%d; wait $!; echo $? > $F/code.%d; } &"):format(
      table.concat(words, " "), rank, rank)
  end
  -- Like torchrun: when a rank fails, the others are ended a little later.
  lines[#lines + 1] = "code=0 late=0"
  lines[#lines + 1] = ("while [ $(cat $F/code.* 2>/dev/null | wc -l) -lt %d ]; do"):format(n)
  lines[#lines + 1] = "  sleep 0.05; [ $code -ne 0 ] || code=$(cat $F/code.* 2>/dev/null | grep " ..
    "-v '^0$' | head -n 1); code=${code:-0}"
  lines[#lines + 1] = "  [ $code -eq 0 ] || late=$((late + 1)); [ $late -ne 40 ] || kill $(cat " ..
    "$F/pid.*) 2>/dev/null"
  lines[#lines + 1] = "done"
  lines[#lines + 1] = "[ $code -ne 0 ] || code=$(cat $F/code.* | sort -n | tail -n 1); rm -f " ..
    "$F/code.* $F/pid.*; exit $code"
  return ("F=%s sh -c %s"):format(helper.quote(o.folder), helper.quote(table.concat(lines, "\n")))
end

function M.nccl(n, script, settings, options)
  return helper.shell(M.nccl_command(n, script, settings, options))
end

--- The variables that make a process use the fakes, and whether the fakes were built.
M.FAKES = 'ENGINE_CUDA_PLUGIN="$PWD"/' .. (os.getenv("ENGINE_TEST_PLUGIN") or "build/fake_card.so")
  .. ' ENGINE_NCCL_LIBRARY="$PWD"/build/fake_nccl.so'
M.fakes_there = helper.shell("test -f build/fake_card.so && test -f build/fake_nccl.so").code == 0
  and not helper.sanitized and not os.getenv("ENGINE_TEST_DEVICE")

--- Runs n ranks. Returns { code, out, err }.
function M.run(n, script, settings, options)
  return helper.shell(M.command(n, script, settings, options))
end

--- Returns the lines of a job's output that report a step. They begin with the step's number. also:
--- the first word of other lines to return, or nil.
function M.steps(result, also)
  local lines = {}
  for line in result.out:gmatch("[^\n]+") do
    if line:find("^%d+ ") or also and line:find("^" .. also) then lines[#lines + 1] = line end
  end
  return lines
end

return M
