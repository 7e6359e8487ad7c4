-- Kills a random rank at a random moment, then resumes the job from its files.
--   ./engine spec/dist/kills.lua [kills=20] [seed=1] [only=NUMBER] [steps=300] [timeout=3]
-- The job: four ranks of spec/dist/job.lua with dropout, checkpoints every few steps, a ZeRO stage
-- from 0 to 3, and f32 or fp16 gradients. The moment lies between the start of the ranks and the
-- end of the job: while MPI starts, in a step, while a checkpoint is written. In every second
-- run, mpirun does not end the other ranks (--enable-recovery), so that they must detect the loss
-- themselves. Checks:
--   - every process ends: within 10 s where mpirun ends the job, else within timeout + 10 s
--   - the messages name the killed rank (before MPI has started, the other ranks only know
--     that a rank is missing)
--   - resume=auto with four ranks repeats the uninterrupted job bit for bit: every step from
--     the checkpoint on, and the weights at the end
--   - a copy of the run, resumed on one rank or on two with two micro-batches each, does the
--     same: bit for bit with two ranks in f32 without clipping, ZeRO-2 and ZeRO-3 (the order of
--     sums is then the same), else losses within 1e-5 (0.1 with fp16 gradients, whose sums are
--     rounded)
--   - the history has every step once
-- Prints a line per kill and a summary; the exit code is 1 when a check fails.
local engine = require "engine"
local C = require("engine.base.ffi").C
local helper = require "spec.helper"
local start = require "spec.dist.start"

local cfg = engine.config { kills = 20, seed = 1, only = 0, steps = 300, timeout = 3 }
if not start.there then
  io.stderr:write("there is no mpirun here, or this build has no MPI\n")
  os.exit(1)
end

local RANKS, SLACK = 4, 10
local JOB = "spec/dist/job.lua"
local folder = helper.folder()

-- ------------------------------------------------------------------ jobs

local function settings_of(kind, n, more)
  local list = { "steps=" .. cfg.steps, "dropout=0.1", "tied=false", "accumulate=" .. RANKS / n,
    "zero=" .. kind.zero, "precision=" .. kind.precision,
    "clip=" .. kind.clip, "checkpoint_every=" .. kind.every, "timeout=" .. cfg.timeout }
  for _, setting in ipairs(more or {}) do list[#list + 1] = setting end
  return list
end

-- Lines of steps by step number, the checksum of each rank's weights, and the first step.
local function printed(out, err)
  local lines, weights, first = {}, {}, nil
  for line in out:gmatch("[^\n]+") do
    local step = tonumber(line:match("^(%d+) %S+ %S+ %a+ %S+$"))
    if step then lines[step], first = line, first or step end
  end
  for rank, sum in err:gmatch("rank (%d+): weights (%w+)") do weights[tonumber(rank) + 1] = sum end
  return lines, weights, first
end

local uninterrupted = {}     -- kind -> the output of an uninterrupted job
local function reference(kind)
  local key = kind.precision .. kind.clip
  if not uninterrupted[key] then
    local began = C.eng_clock()
    local result = start.run(RANKS, JOB,
      settings_of(kind, RANKS, { "run=" .. folder .. "/whole-" .. key }))
    local lines, weights = printed(result.out, result.err)
    if result.code ~= 0 or #weights ~= RANKS or not lines[cfg.steps - 1] then
      error("the uninterrupted job fails:\n" .. result.out .. result.err, 0)
    end
    uninterrupted[key] = { lines = lines, weights = weights[1], seconds = C.eng_clock() - began }
  end
  return uninterrupted[key]
end

-- ------------------------------------------------------------------ a kill

local function command_output(command)
  local pipe = assert(io.popen(command))
  local text = pipe:read("*a")
  pipe:close()
  return text
end

-- The ranks of a job whose `timeout` has this pid: rank -> pid.
local function ranks_below(pid)
  local found = {}
  for _, mpirun in ipairs(helper.children(pid)) do
    for _, child in ipairs(helper.children(mpirun)) do
      local rank = (helper.read(("/proc/%d/environ"):format(child))
        or ""):match("OMPI_COMM_WORLD_RANK=(%d+)")
      if rank then found[tonumber(rank)] = child end
    end
  end
  return found
end

local function alive(pid)
  return (helper.read(("/proc/%d/stat"):format(pid)) or ""):match("%) (%a)")
end
local function nap(seconds) command_output(("sleep %.3f"):format(seconds)) end

-- Starts the job, kills `rank` after `moment` seconds, and counts the processes left after `limit`
-- seconds. Returns { code, out, err, seconds (from the kill to the end of the last process), left
-- }, or nil if the job had already ended.
local function killed(kind, run, rank, moment, limit)
  for _, name in ipairs { "code", "pid" } do os.remove(folder .. "/" .. name) end
  local command = start.command(RANKS, JOB, settings_of(kind, RANKS, { "run=" .. run }),
    { mpirun = kind.alone and "--enable-recovery" or "", limit = 120 })
  os.execute(("{ sh -c 'echo $$ >%s/pid; exec env \"$@\"' sh %s; echo $? >%s/code.new; mv " ..
    "%s/code.new %s/code; } >%s/out 2>%s/err </dev/null &"):format(folder,
    command, folder, folder, folder, folder, folder))
  local function over() return tonumber((helper.read(folder .. "/code") or ""):match("%d+")) end
  local pids
  repeat
    nap(0.005)
    local pid = tonumber((helper.read(folder .. "/pid") or ""):match("%d+"))
    pids = pid and ranks_below(pid) or {}
  until #pids == RANKS - 1 and pids[0] or over()
  nap(moment)
  if over() or not alive(pids[rank]) or alive(pids[rank]) == "Z" then
    while not over() do nap(0.02) end
    return nil
  end
  os.execute(("kill -9 %d"):format(pids[rank]))
  local began = C.eng_clock()
  local function left()                -- mpirun does not wait for processes it kills
    local n = 0
    for _, pid in pairs(pids) do n = n + ((alive(pid) or "Z") ~= "Z" and 1 or 0) end
    return n
  end
  while not over() or (left() > 0 and C.eng_clock() - began < limit) do nap(0.02) end
  return { code = over(), seconds = C.eng_clock() - began, out = helper.read(folder .. "/out"),
    err = helper.read(folder .. "/err"), left = left() }
end

-- ------------------------------------------------------------------ checks

local farthest = 0

local function compare(kind, n, run, expected, problems)
  local result = start.run(n, JOB, settings_of(kind, n, { "run=" .. run, "resume=auto" }))
  local lines, weights, first = printed(result.out, result.err)
  local function wrong(format, ...)
    problems[#problems + 1] = ("%d rank%s: "):format(n, n == 1 and "" or "s") .. format:format(...)
  end
  if result.code ~= 0 then
    return wrong("resuming ended with code %d: %s%s", result.code, result.out, result.err)
  end
  -- the checkpoint is from the end of the job
  if not first and #weights > 0 then first = cfg.steps end
  if not first then return wrong("the resumed job printed no step: %s", result.err) end
  local bits = n == RANKS or n == 2 and kind.precision == "fp32" and kind.clip == 0
    and kind.zero < 2
  local most = kind.precision == "fp32" and 1e-5 or 0.1
  for step = first, cfg.steps - 1 do
    local a, b = expected.lines[step], lines[step]
    if not b then return wrong("step %d is missing", step) end
    if bits and a ~= b then return wrong("step %d: '%s', uninterrupted '%s'", step, b, a) end
    local x, y = tonumber(a:match("^%d+ (%S+)")), tonumber(b:match("^%d+ (%S+)"))
    if kind.precision == "fp32" then farthest = math.max(farthest, math.abs(x - y) / x) end
    if not (math.abs(x - y) <= most * x) then
      return wrong("step %d: loss %.9g, uninterrupted %.9g", step, y, x)
    end
  end
  if #weights ~= n then return wrong("%d ranks reported their weights", #weights) end
  for rank = 1, n do
    if weights[rank] ~= weights[1] or bits and weights[rank] ~= expected.weights then
      wrong("rank %d holds weights %s at the end", rank - 1, weights[rank])
    end
  end
  local history = engine.history.open(run)
  local row = history:query("SELECT count(*) AS n, count(DISTINCT step) AS steps, min(step) AS " ..
    "least, max(step) AS most FROM steps")[1]
  history:close()
  if row.n ~= cfg.steps or row.steps ~= cfg.steps or row.least ~= 0
    or row.most ~= cfg.steps - 1 then
    wrong("the history has %d rows of %d steps, %d to %d", row.n, row.steps, row.least, row.most)
  end
  return first, bits
end

local longest, failures, made, starts, bitwise, near = { [true] = 0, [false] = 0 }, 0, 0, 0, 0, 0

local function one(number)
  math.randomseed(cfg.seed * 1000003 + number)
  for _ = 1, 8 do math.random() end
  local function any(list) return list[math.random(#list)] end
  local kind = { zero = math.random(0, 3), precision = any { "fp32", "fp32", "fp16" },
    clip = any { 0, 0, 1 }, every = any { 3, 10, 40 }, alone = number % 2 == 0 }
  local rank, other = math.random(0, RANKS - 1), any { 1, 2, 2 }
  local expected, run = reference(kind), ("%s/run%d"):format(folder, number)
  local limit = (kind.alone and cfg.timeout or 0) + SLACK
  local result, moment
  repeat
    helper.remove(run)
    moment = math.random() * expected.seconds
    result = killed(kind, run, rank, moment, limit)
  until result
  local problems = {}
  local function wrong(format, ...) problems[#problems + 1] = format:format(...) end
  longest[kind.alone] = math.max(longest[kind.alone], result.seconds)
  if result.seconds > limit then
    wrong("the job ended %.1f s after the kill, expected %g s", result.seconds, limit)
  end
  if result.left > 0 then wrong("%d processes still run", result.left) end
  local said = result.err .. result.out
  local by = said:find(("engine: rank %d did not reach"):format(rank), 1, true) and "the others"
    or said:find(("process rank %d with PID"):format(rank), 1, true) and "mpirun"
    or said:find("at the start of the job", 1, true) and "no rank, MPI was starting"
      or said:find("at the end of the job", 1, true) and "no rank, MPI was ending"
  starts = starts + (by and by:find "^no rank" and 1 or 0)
  if not by then wrong("no message names rank %d: %s", rank, result.err) end
  helper.shell(("cp -r %s %s-other"):format(run, run))
  local first = compare(kind, RANKS, run, expected, problems)
  bitwise = bitwise + 1
  local _, bits = compare(kind, other, run .. "-other", expected, problems)
  if bits then bitwise = bitwise + 1 else near = near + 1 end
  print(("kill %d: rank %d after %.2f s (%s, zero=%d, a checkpoint every %d): ended %.1f " ..
    "s later, named by %s; resumed at step %s; with %d rank%s %s"):format(number,
    rank, moment, kind.precision, kind.zero, kind.every, result.seconds, by or "no message",
    tostring(first), other, other == 1 and "" or "s",
    #problems > 0 and "FAILED" or bits and "the same bits" or "near"))
  for _, problem in ipairs(problems) do print("  " .. problem) end
  if #problems > 0 then
    print(("  repeat: ./engine spec/dist/kills.lua seed=%d steps=%d timeout=%g only=%d"):format(
      cfg.seed, cfg.steps, cfg.timeout, number))
  end
  io.stdout:flush()
  helper.remove(run)
  helper.remove(run .. "-other")
  made, failures = made + 1, failures + (#problems > 0 and 1 or 0)
end

local good, message = pcall(function()
  for number = 1, cfg.kills do
    if cfg.only == 0 or cfg.only == number then one(number) end
  end
end)
helper.remove(folder)
if not good then error(message, 0) end
print(("%d kills, %d failed: the slowest end took %.1f s where mpirun ends the job, " ..
  "%.1f s where the ranks do (timeout %g s); %d resumed runs the same bit for bit, "
  .. "%d near (f32 losses within %.1e); %d kills before or after MPI"):format(made, failures,
    longest[false], longest[true], cfg.timeout, bitwise, near, farthest, starts))
if failures > 0 or made == 0 then os.exit(1) end
