-- Measures for `engine plan` on this machine: what a message and a byte cost between two processes,
-- and the time of a step of the script's trainer. With measure=, this module also measures whole
-- jobs of 1, 2, 4 ... ranks with one thread each, to compare them with the predictions.
--
-- A job runs this program under mpirun (`engine plan SCRIPT ... role=rank`). Each rank runs the
-- script up to its trainer, makes steps with that trainer and prints a line of measurements. Before
-- the jobs, this module measures how long a step takes, without mpirun: t1 in a single process, and
-- t2 while every core runs a process. The predictions use t1 as the time of a step, and t2 / t1 as
-- the slowdown from shared caches and memory. Called by plan.lua and plan_checkpoint.lua.
local M_ffi = require "engine.base.ffi"
local json = require "engine.base.json"
local process = require "engine.base.process"

local C, check, fail_if, ffi = M_ffi.C, M_ffi.check, M_ffi.fail_if, M_ffi.ffi
local output, quote = process.output, process.quoted

local M = {}

local STEPS, FIRST = 14, 4         -- a job makes 14 steps; timing starts at the fourth

-- ------------------------------------------------------------------ the script's trainer

--- Runs a script up to its trainer, and makes this trainer with the options `zero`, `comm_dtype`,
--- `bucket` and `checkpoint` from `given` in place of the script's. The trainer writes no files.
--- Returns the trainer, its options, and whether the script's trainer would write a run.
function M.trainer(script, settings, given)
  local engine = require "engine"
  local chunk, problem = loadfile(script)
  if not chunk then error(problem, 0) end
  local reached, show, trainer, records, options = {}, print, nil, nil, {}
  local new = require("engine.train.assemble").new
  arg = { [0] = script, unpack(settings) }
  engine.trainer = function(o)
    if type(o) ~= "table" then return new(o) end      -- raises an error about o
    for key, value in pairs(require("engine.train.options").current(o)) do options[key] = value end
    for _, key in ipairs { "zero", "comm_dtype", "bucket" } do
      options[key] = given[key] or options[key]
    end
    if given.checkpoint then
      options.checkpoint = given.checkpoint ~= "none" and given.checkpoint
    end
    options.run, options.resume, options.log, options.steps, options.checkpoint_every,
      options.tensorboard = nil, nil, "quiet", 1e9, nil, nil
    records = (o.run or "") ~= ""
    trainer = new(options)
    error(reached, 0)
  end
  _G.print = function() end
  local good, why = pcall(chunk, unpack(settings))
  _G.print = show
  fail_if(good, "%s ended without calling engine.trainer; expected a script that trains with it",
    script)
  if why ~= reached then error(why, 0) end
  return trainer, options, records
end

local function median(list)
  table.sort(list)
  return list[math.ceil(#list / 2)]
end

-- ------------------------------------------------------------------ processes

local function mpirun(n)
  return ("env -u ENGINE_RANKS -u RANK -u WORLD_SIZE OMP_NUM_THREADS=1 "
    .. "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 " ..
      "OMPI_MCA_mpi_yield_when_idle=1 timeout 600 "
    .. "mpirun --oversubscribe --bind-to none -np %d"):format(n)
end

-- Two processes on this machine run this code. It measures the seconds of two sums over the two
-- processes: `a` for one float, which is one message, and `b` for 2^20 floats. For the second sum,
-- each process sends 2^22 bytes, so a byte takes b / 2^22 seconds.
local MESSAGES = [[local e, f = require("engine"), require("engine.base.ffi")
local C, w, v = f.C, e.ranks.world(), f.new("float[?]", 2^20)
local function time(g, n)
  for _ = 1, 5 do g() end
  local t = C.eng_clock()
  for _ = 1, n do g() end
  return (C.eng_clock() - t) / n
end
local a = time(function() C.eng_comm_all_reduce(w, v, 1, f.dtype.f32, C.ENG_SUM) end, 2000)
local b = time(function() C.eng_comm_all_reduce(w, v, 2^20, f.dtype.f32, C.ENG_SUM) end, 20)
print(("measured %.9g %.9g"):format(a, b / 2^22))]]

--- Returns the seconds that a message takes between two processes on this machine, and the seconds
--- that a byte takes; nil without mpirun.
function M.messages()
  local text = output(("%s %s -e %s 2>/dev/null"):format(mpirun(2),
    quote(require("engine.host").executable), quote(MESSAGES)))
  local alpha, beta = text:match("measured (%S+) (%S+)")
  return tonumber(alpha), tonumber(beta)
end

--- Returns the seconds of one step of the trainer in this process: the fastest of several steps,
--- without the first two. Makes steps for about 3 seconds, but at least 4 and at most 40 steps.
function M.step(trainer)
  local clock, best, until_ = C.eng_clock, math.huge, C.eng_clock() + 3
  for turn = 1, 40 do
    local from = clock()
    trainer:step()
    if turn > 2 then best = math.min(best, clock() - from) end
    if turn > 3 and clock() > until_ then break end
  end
  return best
end

-- ------------------------------------------------------------------ a rank of a job

local ARENAS = { "parameters", "gradients", "optimizer", "messages", "step" }
local FACTS = { "waited", "held", "record", "weights", "messages", "bytes", "weight_messages",
  "weight_bytes", "weights_memory" }

--- Makes steps as one rank of a job, or as a single process, and prints the measurements.
function M.rank(script, settings, given)
  local trainer, options = M.trainer(script, settings, given)
  options.whole = require("engine.dist.reduction").whole(trainer.optimizer, options.zero)
  local ranks, facts, times, seen = require "engine.dist.ranks", ffi.new("eng_parallel_facts"), {},
    {}
  for step = 1, STEPS do
    local from = C.eng_clock()
    trainer:step()
    if step >= FIRST then times[#times + 1] = C.eng_clock() - from end
    if trainer.reducer.many then
      C.eng_parallel_last(facts, trainer.reducer.reduction)
      for _, name in ipairs(FACTS) do
        seen[name] = seen[name] or {}
        if step >= FIRST then table.insert(seen[name], tonumber(facts[name])) end
      end
    end
  end
  local told = { rank = ranks.rank(), of = ranks.size(), step = median(times), times = times }
  for _, name in ipairs(FACTS) do told[name] = seen[name] and median(seen[name]) or 0 end
  local memory = require("engine").memory()
  memory.optimizer.peak = memory.optimizer.peak + trainer.optimizer.state.kept
  local fp8 = trainer.optimizer.fp8
  memory.parameters.peak = memory.parameters.peak + (fp8 and fp8.averages.bytes or 0)
  if trainer.reducer.parted then   -- the arena's peak is from before the weights were divided
    memory.parameters.peak = tonumber(facts.weights_memory)
  end
  for _, name in ipairs(ARENAS) do told["memory_" .. name] = memory[name].peak end
  if not trainer.reducer.many then
    local seconds = ffi.new("double[1]")
    check(C.eng_parallel_rehearse(seconds, trainer.optimizer.params, 2,
      require("engine.dist.reduction").options(options)))
    told.handling = seconds[0]
  end
  io.stdout:write("planned ", json.plain(told), "\n")
end

local function rank_command(script, settings, given)
  local words = { quote(require("engine.host").executable), "plan", quote(script), "role=rank" }
  for _, name in ipairs { "zero", "comm_dtype", "bucket", "checkpoint" } do
    if given[name] then words[#words + 1] = quote(("%s=%s"):format(name, given[name])) end
  end
  for _, setting in ipairs(settings) do words[#words + 1] = quote(setting) end
  return table.concat(words, " ")
end

-- Parses `text`, the output of n processes, each a rank of a job of `size` ranks. Returns their
-- measurements in rank order. Raises an error unless the text has the measurements of all n.
local function read_ranks(text, n, size)
  local list, seen = {}, {}
  for line in text:gmatch("planned (%b{})") do
    local told = json.decode(line)
    if told.of == size and not (size > 1 and seen[told.rank]) then list[#list + 1] = told end
    seen[told.rank] = true
  end
  fail_if(#list ~= n, "a job of %d rank%s did not finish; its output: %s", size,
    size > 1 and "s" or "", text ~= "" and text or "nothing")
  table.sort(list, function(a, b) return a.rank < b.rank end)
  return list
end

--- Runs n processes at the same time, without messages between them. Returns a list of their
--- measurements, in seconds and bytes: { step =, handling =, memory_gradients = ... }.
function M.alone(n, script, settings, given)
  local command = "ENGINE_RANKS=off OMP_NUM_THREADS=1 timeout 600 " ..
    rank_command(script, settings, given)
  local all = {}
  for i = 1, n do all[i] = command .. " 2>&1 &" end
  return read_ranks(output(table.concat(all, " ") .. " wait"), n, 1)
end

--- Runs a job of n ranks. Returns the list of the ranks' measurements.
function M.job(n, script, settings, given)
  return read_ranks(output(("%s %s 2>&1"):format(mpirun(n), rank_command(script, settings, given))),
    n, n)
end

return M
