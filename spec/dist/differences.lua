-- Ranks that start differently, builds without MPI, and full disks.
--   ./engine spec/dist/differences.lua [only=NAME] [seed=1]
-- Part 1: one random rank of three gets another script (file, text, or a module it requires), other
-- arguments, settings, seed, data, model or policy, other engine code (the library, a Lua file), or
-- another number of ranks. The job must end before the first step with a line that names the
-- differing rank and the difference. Part 2: started without MPI, or with a library that is not the
-- engine's transport, the engine must report what is missing. Part 3: a job on a disk that is too
-- small for its history or a checkpoint must train to its end unchanged and report the full disk.
-- On the smallest disk it may also refuse to start. Once there is room, resume=auto must continue
-- bit for bit. This part needs permission to mount a tmpfs and is skipped, with a message,
-- otherwise. Prints a line per case; the exit code is 1 when a case fails.
local engine = require "engine"
local C = require("engine.base.ffi").C
local helper = require "spec.helper"
local start = require "spec.dist.start"

local cfg = engine.config { only = "", seed = 1 }
if not start.there then
  io.stderr:write("there is no mpirun here, or this build has no MPI\n")
  os.exit(1)
end
math.randomseed(cfg.seed)
for _ = 1, 8 do math.random() end

local RANKS, PROMPT = 3, 20       -- seconds within which a job that cannot run must have ended
local folder = helper.folder()
local JOB = helper.read("spec/dist/job.lua")
local failures, made = 0, 0

local function verdict(name, problem, seconds, said)
  made = made + 1
  if problem then failures = failures + 1 end
  print(("%-28s %4.1f s  %s"):format(name, seconds, problem and "FAILED: " ..
    problem or (said or "as expected"):gsub("^.*\27%[K", ""):gsub("^%s+", ""):sub(1, 220)))
  io.stdout:flush()
end

local function wanted(name) return cfg.only == "" or cfg.only == name end

-- A copy of the engine in its own folder, so that `change` affects no other process.
local function another_engine(name, change)
  local here = folder .. "/" .. name
  local library = helper.quote(require("engine.base.ffi").library_dir)
  local copy = helper.shell(("mkdir -p %s/build && cp %s %s/engine && cp %s/libengine.so " ..
    "%s/libengine_mpi.so %s/cdef.h %s/build/ && cp -r lua policies %s/"):format(here,
    helper.quote(helper.engine), here, library, library, library, here, here))
  assert(copy.code == 0, copy.err)
  change(here)
  return here .. "/engine"
end

local function add_to(path, text)
  local file = assert(io.open(path, "ab"))
  file:write(text)
  file:close()
end

-- ------------------------------------------------------------------ one rank differs

-- Writes a copy of the job in which `to` replaces `from`; returns its path. In the cases below,
-- `make` returns how the odd rank and (optionally) the others are started; `inside` is code for a
-- copy of the job; `says` is the plain text that must follow "rank N differs from rank 0: " (with
-- `plain`: that stderr must contain).
local function job_with(name, from, to)
  local text, n = JOB:gsub(from, to, 1)
  assert(n == 1, name)
  return helper.write(("%s/%s.lua"):format(folder, name), text)
end

local odd = {
  { "another script", says = "script ",
    make = function() return { script = job_with("other", "engine.seed%(5%)",
    "engine.seed(5) ") } end },
  { "a script that reduces first", says = "script ", make = function()
    return { script = job_with("reduces", "engine.seed%(5%)",
      "engine.seed(5) ranks.reduce(1) ranks.barrier()") }
  end },
  { "another argument", says = "arguments ",
    make = function() return { settings = { "width=48" } } end },
  { "one argument more", says = "arguments ",
    make = function() return { settings = { "steps=6", "wire=bf16" } } end },
  { "another module", says = "module ", make = function()
    local texts = { "return 1", "return 2" }
    for i, text in ipairs(texts) do
      assert(helper.shell(("mkdir -p %s/m%d"):format(folder, i)).code == 0)
      helper.write(("%s/m%d/odd_module.lua"):format(folder, i), text)
    end
    local script = job_with("requires", "engine.seed%(5%)",
      "package.path " ..
        "= os.getenv('ODD') .. '/?.lua;' .. package.path require 'odd_module' engine.seed(5)")
    return { script = script, environment = ("ODD=%s/m2"):format(folder) },
      { script = script, environment = ("ODD=%s/m1"):format(folder) }
  end },
  { "another seed", says = "random numbers ",
    inside = "engine.seed(ranks.rank() == ODD and 6 or 5)" },
  { "other data", says = 'data {"',
    inside = "engine.seed(5) local make = engine.data.text engine.data.text = function(o) "
    .. "o.seed = ranks.rank() == ODD and 10 or 9 return make(o) end" },
  { "another model", says = "model gpt",
    inside = "engine.seed(5) if ranks.rank() == ODD then cfg.width = 48 end" },
  { "another precision", says = "precision fp16",
    inside = "engine.seed(5) if ranks.rank() == ODD then cfg.precision = 'fp16' cfg.policy = " ..
    "'static' end" },
  { "another optimizer", says = "optimizer lion",
    inside = "engine.seed(5) if ranks.rank() == ODD then cfg.optimizer = 'lion' end" },
  { "another policy", says = "policy dynamic",
    inside = "engine.seed(5) if ranks.rank() == ODD then cfg.policy = 'dynamic' end" },
  { "other checkpoints", says = "checkpoint_every 2",
    inside = "engine.seed(5) if ranks.rank() == ODD then cfg.checkpoint_every = 2 end" },
  { "another comm dtype", says = "comm_dtype fp8",
    inside = "engine.seed(5) if ranks.rank() == ODD then cfg.wire = 'fp8' end" },
  { "another library", says = "engine ", make = function()
    return { engine = another_engine("library",
      function(here) add_to(here .. "/build/libengine.so", "\n") end) }
  end },
  { "another Lua file", says = "engine's nn/", make = function()
    return { engine = another_engine("lua",
      function(here) add_to(here .. "/lua/engine/nn/init.lua", "\n-- edited\n") end) }
  end },
  { "another number of ranks", plain = true, says = "started 7 processes, but",
    make = function() return { environment = "OMPI_COMM_WORLD_SIZE=7" } end },
  { "a rank that is not the engine", plain = true, says = "at the start of the job",
    make = function() return { environment = "ENGINE_RANKS=off", program = "sleep 30" } end,
    environment = "ENGINE_RANK_TIMEOUT=3" },
}

for _, case in ipairs(odd) do
  local name = case[1]
  if wanted(name) then
    local place = math.random(1, RANKS - 1)
    local other, rest
    if case.make then other, rest = case.make()
    else
      local script = job_with(name:gsub(" ", "_"), "engine.seed%(5%)",
        (case.inside:gsub("ODD", place):gsub("%%", "%%%%")))
      other, rest = { script = script }, { script = script }
    end
    rest = rest or {}
    rest.environment = (rest.environment or "") .. " " .. (case.environment or "")
    local parts = {}
    for rank = 0, RANKS - 1 do parts[rank + 1] = rank == place and other or rest end
    local began = C.eng_clock()
    local result = helper.shell(start.mixed(parts, "spec/dist/job.lua"))
    local seconds = C.eng_clock() - began
    local wants = case.plain and case.says or ("rank %d differs from rank 0: %s"):format(place,
      case.says)
    local line = result.err:match("[^\n]*differs from rank 0[^\n]*")
      or result.err:match("engine: [^\n]*")
    local problem
    if result.code == 0 then problem = "the job ran: " .. result.out .. result.err
    elseif not result.err:find(wants, 1, true) then
      problem = ("expected '%s' in:\n%s"):format(wants, result.err)
    elseif result.out:find("^%d+ ") or result.out:find("\n%d+ ") then
      problem = "the job made a step"
    elseif seconds > PROMPT then problem = "the job took too long to end" end
    verdict(name, problem, seconds, line)
  end
end

-- ------------------------------------------------------------------ no MPI

local without = {
  { "no MPI in this build", "this build has no MPI (missing: ",
    function(here) os.remove(here .. "/build/libengine_mpi.so") end },
  { "an MPI library of garbage", "cannot load",
    function(here) helper.write(here .. "/build/libengine_mpi.so", "nothing") end },
  { "another library under MPI's name", "is no transport of this engine", function(here)
    assert(helper.shell(("rm %s/build/libengine_mpi.so && cp %s/build/libengine.so " ..
      "%s/build/libengine_mpi.so"):format(here, here, here)).code == 0)
  end },
}
for i, case in ipairs(without) do
  if wanted(case[1]) then
    local own = another_engine("without" .. i, case[3])
    local began = C.eng_clock()
    local result = helper.shell(start.mixed({ { engine = own, n = 2 } }, "spec/dist/job.lua"))
    local alone = helper.shell(("ENGINE_RANKS=off %s spec/dist/job.lua steps=1"):format(own))
    local problem
    if result.code == 0 then problem = "the job ran"
    elseif not result.err:find(case[2], 1, true) then problem = "unexpected message: " .. result.err
    elseif alone.code ~= 0 then problem = "one process fails without MPI: " .. alone.err end
    verdict(case[1], problem, C.eng_clock() - began, result.err:match("engine: [^\n]*"))
  end
end

-- ------------------------------------------------------------------ a full disk

local disk = folder .. "/disk"
assert(helper.shell("mkdir " .. disk).code == 0)
local function weights_of(result)
  local sums = {}
  for rank, sum in result.err:gmatch("rank (%d+): weights (%w+)") do
    sums[tonumber(rank) + 1] = sum
  end
  return sums
end

local SETTINGS = { "steps=12", "checkpoint_every=2", "dropout=0.1", "log=line" }
local function job(...)
  local all = { ... }
  for _, setting in ipairs(SETTINGS) do all[#all + 1] = setting end
  return start.run(RANKS, "spec/dist/job.lua", all)
end

-- Whether all results of the job are on the disk.
local function is_whole(run)
  local good, steps = pcall(function()
    local history = engine.history.open(run)
    local n = #history:query "SELECT step FROM steps"
    history:close()
    return n
  end)
  local latest = engine.checkpoint.latest(run .. "/checkpoints") or ""
  return good and steps == 12 and latest:find("step%-0*12$") ~= nil
end

local smallest = "64k"
local mounted = helper.shell(("mount -t tmpfs -o size=64k tmpfs %s"):format(disk)).code == 0
if not mounted then print "a full disk: skipped, a tmpfs cannot be mounted here" end
if mounted and wanted "a full disk" then
  local good, message = pcall(function()
    for zero = 0, 2 do
      local whole = weights_of(job("zero=" .. zero, "run=" .. folder .. "/whole" .. zero))
      for _, size in ipairs { smallest, "192k", "400k", "700k", "1000k", "1300k", "1600k" } do
        local name = ("disk of %s, zero=%d"):format(size, zero)
        helper.shell(("rm -rf %s/run; mount -o remount,size=%s %s"):format(disk, size, disk))
        local began = C.eng_clock()
        local full = job("zero=" .. zero, "run=" .. disk .. "/run")
        local sums, problem = weights_of(full), nil
        local all = full.err .. full.out
        local said = all:match("[^\n]*No space left[^\n]*") or all:match("[^\n]*disk is full[^\n]*")
        -- The disk is too small for any history.
        local refused = full.code ~= 0 and size == smallest and not full.out:find("^%d+ ")
        local status = refused and 1 or is_whole(disk .. "/run") and 0 or 5
        if full.code ~= status then
          problem = ("the job ended with code %d, expected %d: %s"):format(full.code, status,
            full.err)
        end
        for rank = 1, refused and 0 or RANKS do
          if sums[rank] ~= whole[1] then
            problem = problem or ("rank %d ends with other weights"):format(rank - 1)
          end
        end
        if not said then problem = problem or "no message about the full disk: " .. all end
        helper.shell(("mount -o remount,size=64m %s"):format(disk))
        local again = weights_of(job("zero=" .. zero, "run=" .. disk .. "/run", "resume=auto"))
        for rank = 1, RANKS do
          if again[rank] ~= whole[1] then
            problem = problem or ("resumed, rank %d ends with other weights"):format(rank - 1)
          end
        end
        verdict(name, problem, C.eng_clock() - began, said)
      end
    end
  end)
  if not good then failures = failures + 1 print(message) end
end
if mounted then helper.shell("umount " .. disk) end

helper.remove(folder)
print(("%d cases, %d failed"):format(made, failures))
if failures > 0 or made == 0 then os.exit(1) end
