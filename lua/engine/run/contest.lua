-- A contest: one script with several entrants and seeds, each run in its own process. An entrant is
-- a policy, or other settings of the script.
--   runs/NAME/contest.json         the script, its settings, the policies' sources
--   runs/NAME/ENTRANT-SEED/        a run; its file `output` has what it printed, `exit` its exit
--                                  status
-- This file starts the runs, finds which are done, and reads their results. `engine contest` is the
-- command; report/contest.lua prints the results. Called by cli/contest.lua and report/contest.lua.
local M_ffi = require "engine.base.ffi"
local curves = require "engine.run.curves"
local files = require "engine.base.file"
local history = require "engine.run.history"
local json = require "engine.base.json"
local process = require "engine.base.process"
local runs = require "engine.run.runs"
local statistics = require "engine.base.statistics"

local C, check, fail_if = M_ffi.C, M_ffi.check, M_ffi.fail_if

local M = {}

local Contest = {}
Contest.__index = Contest

-- ------------------------------------------------------------------ the folder

-- Returns the script, its settings and its number of threads as text. They must not change between
-- two starts of a contest.
local function job_text(job)
  local parts = { job.script, unpack(job.settings) }
  return table.concat(parts, " ") .. " threads=" .. job.threads
end

-- Reads the job of an earlier start of the contest from contest.json.
local function read_job(path)
  local good, job = pcall(json.decode, (files.read(path)))
  if good and type(job) == "table" and type(job.script) == "string"
    and type(job.settings) == "table" and type(job.sources) == "table"
    and type(job.threads) == "number" then
    return job
  end
  error(path .. " is damaged; hint: name=ANOTHER starts a new contest", 0)
end

-- Writes contest.json. If the file exists, it must record the same script with the same text, and
-- the same settings, number of threads and policy texts. Otherwise the runs would not be
-- comparable, and an error is raised.
local function agree(self)
  local path, sources = self.path .. "/contest.json", self.sources
  if files.exists(path) then
    local before, hint = read_job(path), "hint: name=ANOTHER starts a new contest"
    self.threads = self.threads or before.threads
    local was, is = job_text(before), job_text(self)
    fail_if(was ~= is, "%s is a contest of '%s'; expected the same script and settings, got " ..
      "'%s'; %s", self.path, was, is, hint)
    local changed = before.source ~= self.source and self.script
    for policy, source in pairs(self.sources) do
      if (before.sources[policy] or source) ~= source then changed = "policy " .. policy end
      before.sources[policy] = source
    end
    fail_if(changed, "%s has changed since the contest %s began; %s", changed, self.path, hint)
    sources = before.sources
  end
  self.threads = self.threads or self.default_threads
  local text = json.encode { script = self.script, settings = self.settings, source = self.source,
    threads = self.threads, sources = sources }
  check(C.eng_file_write(path, text, #text))
end

-- Lists the runs seed by seed, each seed with all entrants, so that comparisons are possible
-- before all runs are done.
local function list_runs(self)
  local list, owner = {}, {}
  fail_if(self.seeds * #self.entrants > 10000,
    "expected at most 10000 runs, got %g seeds of %d entrants", self.seeds, #self.entrants)
  for seed = 1, self.seeds do
    for _, entrant in ipairs(self.entrants) do
      local label = entrant.label
      local name = label:gsub("[^%w_.=+-]", "-"):gsub("^[.-]+", ""):sub(1, 80)
      fail_if((owner[name] or label) ~= label, "'%s' and '%s' would share the folder %s; hint: " ..
        "rename a file, or shorten the settings", owner[name], label, name)
      owner[name] = label
      list[#list + 1] = { label = label, settings = entrant.settings, seed = seed,
        path = ("%s/%s-%d"):format(self.path, name, seed) }
    end
  end
  return list
end

--- Opens a contest's folder; creates it if it is missing. job: { path, script, source (its text),
--- settings = { "name=value" ... } of all runs, entrants = { { label =, settings = } ... }, head =
--- "policy" or, if not all entrants are policies, "settings", sources = { [policy] = its source },
--- seeds, threads (nil: those in contest.json or, without this file, default_threads),
--- default_threads, resumes (whether the script accepts resume=), quiet (whether it accepts log=)
--- }. Raises an error if the folder holds a different contest, or if a contest is running in it.
function M.open(job)
  local self = setmetatable(job, Contest)
  fail_if(files.exists(self.path .. "/history.db"),
    "%s is a run, not a contest; hint: name=ANOTHER starts a new contest", self.path)
  self.runs = list_runs(self)
  check(C.eng_file_mkdir(self.path), true)
  local lock = M_ffi.new("int[1]", -1)
  check(C.eng_file_lock(lock, self.path .. "/lock"), true)
  self.lock = M_ffi.ffi.gc(lock, function(l) C.eng_file_unlock(l[0]) end)
  agree(self)
  for _, run in ipairs(self.runs) do self:look(run) end
  return self
end

-- ------------------------------------------------------------------ a run

-- Exit statuses (docs/runs.md) of runs that ended by themselves. A contest does not start such a
-- run again. It repeats a run with the status RESULTS_LOST from its first step, because a resumed
-- run would still lack the lost rows.
local FINAL, RESULTS_LOST = { [0] = true, [2] = true, [3] = true, [4] = true, [6] = true }, 5

--- Reads the state of a run from its files into `run`: exit (the exit status), done (whether its
--- numbers count), final (whether it must not be started again), why (why it failed), ended (how it
--- ended, in words), and the numbers of M.numbers.
function Contest:look(run)
  local path = run.path
  local text = files.read(path .. "/exit")
  local info = files.exists(path .. "/history.db") and runs.info(path) or {}
  local steps = (info.rows or 0) > 0
  local how = steps and info.how
  run.exit, run.why = text and tonumber(text), "not run"
  if not run.exit and how == "finished" then run.exit = 0 end
  run.done = run.exit == 0 and how == "finished"
  run.final = steps and info.ended ~= "stopped: interrupted" and FINAL[run.exit] or false
  if run.exit and not run.done then
    run.why = run.exit == 0 and not steps and "it left no history in " .. path
      or ("exit status %d: %s"):format(run.exit, (how == "stopped" or how == "drift")
        and info.ended or process.last_words(path .. "/output") or info.problem or "no output")
  end
  run.ended = steps and info.ended or run.why
  if steps then
    local good, problem = history.with(path, function(h)
      M.numbers(run, h)
      return true
    end)
    if not good then run.done, run.why = false, tostring(problem) end
  end
  return run
end

--- The names of the numbers by which a contest compares runs; see M.numbers.
M.NAMES = { "loss", "held_out", "skipped", "overflows", "underflow", "seconds" }

--- Fills in the numbers of a run from its history: steps, policy_failed (the steps at which the
--- policy failed, so that its verdict was not used), and those of M.NAMES:
---   loss       mean loss of the last tenth of the steps (at least one step), without inf and nan
---   held_out   the loss of the last evaluation, or nil
---   skipped    steps without an update
---   overflows  steps with inf or nan in the gradients
---   underflow  share of all gradients below the smallest normal number
---   seconds    training time, without pauses between resumes
function M.numbers(run, h)
  local totals = curves.totals(h)
  local tenth = math.max(1, math.floor((totals.last - totals.first + 1) / 10))
  run.steps, run.policy_failed, run.skipped, run.overflows, run.seconds = totals.rows,
    totals.failed, totals.skipped, totals.overflows, totals.seconds
  run.loss = h:query("SELECT avg(nullif(nullif(loss, 9e999), -9e999)) AS x FROM steps " ..
    "WHERE step > ?", totals.last - tenth)[1].x
  run.underflow = h:query("SELECT total(underflow) / nullif(total(count), 0) AS x FROM steps")[1].x
  local evaluations = h:evaluations()
  run.held_out = #evaluations > 0 and evaluations[#evaluations][2] or nil
end

--- Returns what fraction of a run's steps is done, or 0 if this is not known.
function M.progress(run)
  return history.with(run.path, function(h)
    local _, last = h:range()
    local steps = tonumber(h:meta().steps)
    return last and steps and math.min(1, (last + 1) / steps)
  end) or 0
end

--- Starts or resumes a run, unless it is final (look). Returns false if another process holds the
--- run: when a contest is killed, its runs take a moment to end.
function Contest:start(run)
  if runs.holder(run.path) then return false end
  if self:look(run).final then return true end
  if self.resumes and run.exit ~= RESULTS_LOST then
    check(C.eng_file_remove(run.path .. "/exit"), true)
  else files.remove(run.path) end
  check(C.eng_file_mkdir(run.path), true)
  local words = { "env", "ENGINE_RANKS=off", "OMP_NUM_THREADS=" .. self.threads,
    require("engine.host").executable, self.script, "seed=" .. run.seed, "run=" .. run.path,
    unpack(run.settings) }
  for _, word in ipairs(self.settings) do words[#words + 1] = word end
  if self.resumes then words[#words + 1] = "resume=auto" end
  if self.quiet then words[#words + 1] = "log=quiet" end
  run.process = process.start(words, run.path .. "/output")
  return true
end

--- Returns whether a run started by start() has ended. If so, records its exit status and calls
--- look().
function Contest:ended(run)
  if not run.process then return true end
  local status = process.status(run.process)
  if not status then return false end
  run.process = nil
  local text = status .. "\n"
  check(C.eng_file_write(run.path .. "/exit", text, #text), true)
  self:look(run)
  return true
end

-- ------------------------------------------------------------------ results

--- Returns a list in the order of the entrants: { label, runs, failed = the runs whose numbers do
--- not count, against, and for each name in M.NAMES: NAME = { mean, spread, values = { [seed] =
--- number }, n = how many numbers } }. against[NAME] is the paired difference from the first
--- entrant (statistics.paired); nil for the first entrant itself.
function Contest:results()
  local list, row_of = {}, {}
  for i, entrant in ipairs(self.entrants) do
    list[i] = { label = entrant.label, runs = {}, failed = {}, against = {} }
    row_of[entrant.label] = list[i]
  end
  for _, run in ipairs(self.runs) do
    local row = row_of[run.label]
    table.insert(row.runs, run)
    if not run.done then table.insert(row.failed, run) end
  end
  for _, row in ipairs(list) do
    for _, name in ipairs(M.NAMES) do
      local number, plain = { values = {} }, {}
      for _, run in ipairs(row.runs) do
        number.values[run.seed] = run.done and run[name] or nil
        plain[#plain + 1] = number.values[run.seed]
      end
      number.n = #plain
      if #plain > 0 then number.mean, number.spread = statistics.mean_and_spread(plain) end
      row[name] = number
      row.against[name] = row ~= list[1]
        and statistics.paired(list[1][name].values, number.values, self.seeds) or nil
    end
  end
  return list
end

return M
