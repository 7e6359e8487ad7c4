-- Short jobs with random disturbances. Each must report its end correctly and, once resumed, end
-- bit-identical to an undisturbed job.
--   ./engine spec/chaos.lua [runs=500] [seed=1] [seconds=1800] [first=1] [only=NUMBER]
-- A run trains spec/dist/job.lua on one to four ranks. The seed and the run's number determine its
-- plan: precision, ZeRO, mode, clipping, checkpoint interval. The run starts the job once or twice,
-- each time with one or two disturbances (chaos/disturbances.lua) at random moments. After each of
-- these jobs, its checkpoints may be damaged. Checks after each disturbed job (chaos/truth.lua):
--   - all its processes have ended in time, and no message is an error of the engine's own code
--   - the exit status is one that docs/runs.md states for these disturbances
--   - the history, the checkpoints and `engine runs` agree with the status
--   - recorded steps equal those of an undisturbed job, bit for bit
-- Then resume=auto continues the run to its end. The weights and all recorded steps must equal
-- those of the undisturbed job. Policies that are swapped in choose only the loss scale, a power of
-- two, in formats with f32's range. So they change no bit of the weights, and the comparison leaves
-- out only the columns that depend on the scale. Prints a table by kind of disturbance and, for a
-- failure, the command that repeats it. The drawn plan is the same each time; the exact moments
-- depend on the machine.
local engine = require "engine"
local C = require("engine.base.ffi").C
local disturbances = require "spec.chaos.disturbances"
local helper = require "spec.helper"
local process = require "spec.chaos.process"
local show = require "engine.base.show"
local start = require "spec.dist.start"
local truth = require "spec.chaos.truth"

local cfg = engine.config { runs = 500, seed = 1, seconds = 1800, first = 1, only = 0 }
local folder = helper.folder()
local disk = folder .. "/disk"
assert(helper.shell("mkdir " .. disk).code == 0)
local can_mount = helper.shell(("mount -t tmpfs -o size=8m tmpfs %s"):format(disk)).code == 0
if not can_mount then print "full disks: left out, because a tmpfs cannot be mounted here" end
if not start.there then print "several ranks: left out, because mpirun or MPI is missing" end

-- Draws from a seed: random() in [0, 1), random(n) in 1 .. n, random(list) an element of it.
local function random(of)
  if type(of) == "table" then return of[math.random(#of)] end
  return of and math.random(of) or math.random()
end

local KINDS = {}
for name, kind in pairs(disturbances) do
  if type(kind) == "table" then KINDS[#KINDS + 1] = name end
end
table.sort(KINDS)
local DAMAGE = "checkpoint damaged"

-- ------------------------------------------------------------------ the plan of a run

local function plan_of(number)
  math.randomseed(cfg.seed * 1000003 + number)
  for _ = 1, 8 do math.random() end
  local first = KINDS[(number - 1) % #KINDS + 1]
  local p = { number = number, can_mount = can_mount, folder = folder .. "/" .. number, disk = disk,
    ranks = start.there and random { 0, 0, 1, 2, 3, 4 } or 0, zero = random(3) - 1,
    precision = random { "fp32", "fp32", "bf16", "fp16" }, clip = random { 0, 0, 1 },
    mode = random { "sync", "sync", "lagged" }, every = random { 0, 3, 10, 25 },
    log = random { "quiet", "line", "json" }, pace = random { 0, 0.004, 0.01 } }
  if disturbances[first].several and start.there then p.ranks = 1 + random(3) end
  if first == "policy swapped" or random(4) == 1 then
    p.policy = p.folder .. "/policy.lua"
    if p.precision == "fp16" then p.precision = "fp32" end
  end
  p.size = math.max(p.ranks, 1)
  if p.size == 1 or p.mode == "lagged" then p.zero = 0 end
  p.attempts = {}
  for i = 1, random { 1, 1, 2 } do
    local list, mpirun = {}, nil
    for k = 1, random { 1, 1, 1, 2 } do
      local name
      repeat
        name = i == 1 and k == 1 and first or random(KINDS)
        local fits = disturbances[name].fits
      until not fits or fits(p) or name == first and not can_mount
      local kind = disturbances[name]
      local drawn = kind.draw(random, p)
      drawn.plan, drawn.name = p, name
      drawn.moment = random(4) == 1 and { share = random() }
        or { step = random(process.STEPS - 1) }
      mpirun = mpirun or kind.mpirun
      p.on_disk = p.on_disk or kind.disk
      list[k] = drawn
    end
    p.attempts[i] = { list = list, mpirun = mpirun, damage = random(3) == 1 and
      { how = random { "truncated", "byte", "missing", "all" }, where = random(),
        file = random() } or nil }
  end
  p.run = (p.on_disk and disk or p.folder) .. "/run"
  return p
end

local function settings_of(p, run, pace)
  local list = { "run=" .. run, "resume=auto", "zero=" .. p.zero, "precision=" .. p.precision,
    "clip=" .. p.clip, "mode=" .. p.mode, "checkpoint_every=" .. p.every, "log=" .. p.log,
    "pace=" .. (pace or p.pace) }
  if p.policy then list[#list + 1] = "policy=" .. p.policy end
  return list
end

local function fresh_folder(path)
  helper.shell(("rm -rf %s; mkdir -p %s"):format(path, path))
  return path
end

local function good_policy(p)
  if p.policy then helper.write(p.policy, disturbances.policy_text("first", "return 8")) end
end

-- Starts the job of plan p in the background; `name` names its folder.
local function job_of(p, run, name, mpirun, pace)
  return process.start { ranks = p.ranks, settings = settings_of(p, run, pace), run = run,
    folder = fresh_folder(p.folder .. "/" .. name), mpirun = mpirun }
end

local undisturbed = {}
local function reference_of(p)
  local key = table.concat({ p.ranks, p.zero, p.precision, p.clip, p.mode, tostring(p.policy ~= nil)
    }, " ")
  if not undisturbed[key] then
    local run = p.folder .. "/whole"
    good_policy(p)
    local job = job_of(p, run, "reference", nil, 0):watch {}
    local rows = truth.steps(run, p.policy)
    local weights = truth.weights(job)[1]
    if job.code ~= 0 or not rows or #rows ~= process.STEPS or not weights then
      error(("run %d: the undisturbed job fails with %d:\n%s"):format(p.number, job.code, job.text),
        0)
    end
    undisturbed[key] = { weights = weights, rows = rows, seconds = job.seconds }
    helper.remove(run)
  end
  return undisturbed[key]
end

-- ------------------------------------------------------------------ damage between two jobs

-- Damages the newest checkpoint, or all. Returns nil if there is none; else a description of the
-- damage, and whether no intact checkpoint is left.
local function damage(p, d)
  local checkpoints = p.run .. "/checkpoints"
  local steps = engine.checkpoint.steps(checkpoints)
  if #steps == 0 then return nil end
  helper.shell(("rm -rf %s/kept; cp -r %s %s/kept"):format(p.folder, checkpoints, p.folder))
  local least = d.how == "all" and 1 or #steps
  local done
  for i = least, #steps do
    local path, names = ("%s/step-%08d"):format(checkpoints, steps[i]), {}
    for name in helper.shell("ls " .. path).out:gmatch("%S+") do names[#names + 1] = name end
    local file = path .. "/" .. names[1 + math.floor(d.file * #names)]
    local bytes = helper.read(file)
    local place = math.floor(d.where * #bytes)
    if d.how == "missing" then os.remove(file)
    elseif d.how == "byte" then
      helper.write(file, bytes:sub(1, place) .. string.char((bytes:byte(place + 1) + 1 +
        math.floor(d.where * 250)) % 256) .. bytes:sub(place + 2))
    else helper.write(file, bytes:sub(1, place)) end
    done = ("%s: %s at %d of %d"):format(file, d.how, place, #bytes)
  end
  return done, least == 1 or #steps == 1
end

-- ------------------------------------------------------------------ a run

local table_of = {}       -- by kind: { runs =, failed =, statuses = { [code] = n } }
local function count(name, job, failed)
  local row = table_of[name] or { runs = 0, failed = 0, statuses = {} }
  table_of[name] = row
  row.runs, row.failed = row.runs + 1, row.failed + (failed and 1 or 0)
  row.statuses[job.code] = (row.statuses[job.code] or 0) + 1
end

-- A job's output without the lines of its steps.
local function messages(text)
  local lines = {}
  for line in text:gmatch("[^\r\n]+") do
    if not line:find '^{"step"' and not line:find "^%d+ [%d.]+ "
      and not line:find "^step %d+ %(" then
      lines[#lines + 1] = "    | " .. line
    end
  end
  return table.concat(lines, "\n")
end

-- Checks that the first job after the damage prints a message about the checkpoint that it skips.
local function mentioned(job, damaged)
  if not job.text:find("is skipped", 1, true) and not job.reader_gone then
    job:wrong("no message says that the damaged checkpoint is skipped (%s)", damaged)
  end
end

local function run_one(p)
  fresh_folder(p.folder)
  local reference = reference_of(p)
  helper.shell(("rm -rf %s/run %s/filler*"):format(disk, disk))
  good_policy(p)
  local told, problems = {}, {}
  local function take(job, what)
    told[#told + 1] = ("  %s: status %d after %.1f s; %s"):format(what, job.code, job.seconds,
      #job.did > 0 and table.concat(job.did, ", ") or "nothing was done")
    for _, problem in ipairs(job.problems) do
      problems[#problems + 1] = what .. ": " .. problem
    end
    if #job.problems > 0 then told[#told + 1] = messages(job.text) end
  end
  local skips
  for i, attempt in ipairs(p.attempts) do
    local acts = {}
    local job = job_of(p, p.run, "job" .. i, attempt.mpirun)
    for k, drawn in ipairs(attempt.list) do
      local moment = drawn.moment
      if moment.share then
        moment.time = moment.share * (reference.seconds + process.STEPS * p.pace)
      end
      acts[k] = function(j) disturbances[drawn.name].act(j, drawn) end
    end
    job:watch(acts)
    job.damaged = skips
    truth.check(job, p, reference)
    if skips and job:step() > 0 then
      skips = mentioned(job, skips)
    end
    for _, drawn in ipairs(attempt.list) do count(drawn.name, job, #job.problems > 0) end
    take(job, "job " .. i)
    good_policy(p)
    local done, none_left
    if attempt.damage then done, none_left = damage(p, attempt.damage) end
    if done then
      told[#told + 1] = "  " .. done
      skips = done
      if none_left then
        local refused = job_of(p, p.run, "refused" .. i):watch {}
        if refused.code ~= 1 or not refused.text:find("no checkpoint can be used", 1, true) then
          refused:wrong("with no intact checkpoint it ended with %d", refused.code)
        end
        count(DAMAGE, refused, #refused.problems > 0)
        take(refused, "no checkpoint left")
        helper.shell(("rm -rf %s/checkpoints && cp -r %s/kept %s/checkpoints"):format(p.run,
          p.folder, p.run))
        skips = nil
      else count(DAMAGE, job, false) end
    end
  end
  local last
  for i = 1, 2 do                                     -- the second job has no steps left
    last = job_of(p, p.run, "end" .. i, nil, 0):watch {}
    truth.check(last, p, reference)
    if i == 1 and skips then mentioned(last, skips) end
    take(last, "undisturbed")
  end
  if #problems > 0 then
    print(("run %d FAILED: %d ranks, zero=%d, %s, %s, clip=%g, checkpoint_every=%d, log=%s, " ..
      "pace=%g%s"):format(p.number, p.ranks, p.zero, p.precision, p.mode, p.clip, p.every, p.log,
      p.pace, p.policy and ", policy file" or ""))
    for _, problem in ipairs(problems) do print("  - " .. problem) end
    print(table.concat(told, "\n"))
    print(("  repeat: ./engine spec/chaos.lua seed=%d only=%d"):format(cfg.seed, p.number))
  end
  helper.remove(p.folder)
  return #problems == 0
end

-- ------------------------------------------------------------------ the campaign

local began, made, failed, shown_at = C.eng_clock(), 0, 0, 0
local good, message = pcall(function()
  for number = cfg.only > 0 and cfg.only or cfg.first, cfg.only > 0 and cfg.only
    or cfg.first + cfg.runs - 1 do
    if C.eng_clock() - began > cfg.seconds then break end
    made = made + 1
    if not run_one(plan_of(number)) then failed = failed + 1 end
    local took = C.eng_clock() - began
    if took - shown_at > 20 then
      shown_at = took
      print(("%d of %d runs, %d failed, %s, ETA %s"):format(made, cfg.runs, failed,
        show.duration(took),
        show.duration(math.min(took / made * (cfg.runs - made), cfg.seconds - took))))
    end
    io.stdout:flush()
  end
end)
if can_mount then helper.shell("umount " .. disk) end
helper.remove(folder)
if not good then print(message) end

local rows = { { "disturbance", "jobs", "failed", "exit statuses" } }
for _, name in ipairs(require("engine.base.nearest").keys(table_of)) do
  local row, parts = table_of[name], {}
  for code, n in pairs(row.statuses) do parts[#parts + 1] = ("%d: %d"):format(code, n) end
  table.sort(parts)
  rows[#rows + 1] = { name, tostring(row.runs), tostring(row.failed), table.concat(parts, ", ") }
end
print(show.table(rows, { true, false, false, true }))
print(("%d runs, %d failed, seed %d, runs %d to %d, %s"):format(made, failed, cfg.seed, cfg.first,
  cfg.first + made - 1, show.duration(C.eng_clock() - began)))
if failed > 0 or made == 0 or not good then os.exit(1) end
