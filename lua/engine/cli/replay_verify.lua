-- engine replay RUN --policy P --verify: runs the job live and shows where the replay and the live
-- run differ. run/verify.lua plans and compares; this file starts the process and prints progress
-- and results. Called by replay.lua.
local files = require "engine.base.file"
local history = require "engine.run.history"
local json = require "engine.base.json"
local machine = require "engine.base.machine"
local process = require "engine.base.process"
local show = require "engine.base.show"
local verify = require "engine.run.verify"

local C = require("engine.base.ffi").C

local M = {}

-- Exit statuses.
local AGREE, FAILED, DIFFER, INTERRUPTED = 0, 1, 2, 130

-- POLL and LIVE: the seconds between polls, and between updates of the live line. If a process is
-- still alive PATIENCE seconds after its first SIGTERM, every update sends another SIGTERM.
local POLL, LIVE, PATIENCE = 0.05, 1, 10

-- ------------------------------------------------------------------ the live run

-- Returns the index (from 0) of the last step that the live run has recorded, or nil.
local function last_step(run)
  return (history.with(run, function(h) return (select(2, h:range())) end))
end

-- Returns the text of the live line. last: the last step that the live run has recorded, or nil;
-- took: seconds since its start.
local function live_text(plan, last, took)
  local made, count = math.max(0, (last or -1) + 1 - plan.from), plan.to - plan.from
  return ("live: %d of %d steps%s"):format(made, count, made > 0
    and (", about %s left"):format(show.duration(took / made * (count - made))) or "")
end

-- Runs plan.job. Returns its exit status, and whether Ctrl-C ended it.
local function run_live(plan, folder)
  local job, log = plan.job, folder .. "/output"
  files.write(folder .. "/job.json", json.encode(job))
  local code = ("require('engine.cli.live')(%q)"):format(folder .. "/job.json")
  local words = { "env", "ENGINE_RANKS=off", "sh", "-c", 'cd "$1" && shift && exec "$@"', "sh",
    job.folder, require("engine.host").executable, "-e", code }
  if job.threads then table.insert(words, 3, "OMP_NUM_THREADS=" .. job.threads) end
  local bar, before = require("engine.run.progress").on_stderr(), C.eng_interrupt_policy(2)
  local began, shown, interrupted, status, stopped = machine.clock(), 0, false, nil, nil
  local good, problem = pcall(function()
    local started = process.start(words, log)
    while not status do
      C.eng_sleep(POLL)
      status = process.status(started)
      interrupted = interrupted or C.eng_interrupted() > 0
      local now, last = machine.clock(), nil
      local due = now - shown > LIVE
      if due then
        shown, last = now, last_step(job.run)
        bar:update { step = 0, text = live_text(plan, last, now - began) }
      end
      -- a script that calls trainer:step() itself does not end at step plan.to
      if not stopped and (interrupted or (last or -1) >= plan.to) then
        stopped = now
        process.stop(started)
      elseif stopped and due and now - stopped > PATIENCE then process.stop(started) end
    end
  end)
  bar:finish()
  C.eng_interrupt_policy(before)
  C.eng_interrupt(0)
  if not good then error(problem, 0) end
  return status, interrupted
end

-- ------------------------------------------------------------------ the report

local MOST_LINES = 20

-- Returns the report of c, a result of verify.compare, as a list of lines.
local function lines_of(plan, c, interrupted)
  local lines = {}
  local function say(format, ...) lines[#lines + 1] = format:format(...) end
  for _, note in ipairs(plan.notes) do say("note: %s", note) end
  for _, note in ipairs(c.notes) do say("note: setting %s", note) end
  say("%s%d of %d steps compared, from step %d", interrupted and "interrupted: " or "", c.steps,
    #plan.rows, plan.from)
  local first = c.list[1]
  if not first then
    if c.steps > 0 then say("the replay and the live run agree in all of these steps") end
    return lines
  end
  say("the first difference is at step %d: %s is %s in the replay and %s in the live run; " ..
    "the replay's verdict at this step is %s", first.step, first.column, show.value(first.replay),
    show.value(first.live), first.mark == "exact" and "exact" or "a bound")
  local rows = { { "column", "differs in", "first at", "replay", "live", "largest difference" } }
  for _, column in ipairs(verify.COLUMNS) do
    local sum, at = c.columns[column[1]], nil
    for _, d in ipairs(c.list) do at = at or d.column == column[1] and d or nil end
    rows[#rows + 1] = { column[1], ("%d steps"):format(sum.differ), at and tostring(at.step) or "-",
      at and show.value(at.replay) or "-", at and show.value(at.live) or "-",
      sum.largest and ("%.2g %%"):format(100 * sum.largest) or "-" }
  end
  lines[#lines + 1] = show.table(rows, { true })
  say("step by step, the values in the replay and in the live run:")
  local steps, parts = 0, {}
  for i, d in ipairs(c.list) do
    parts[#parts + 1] = ("%s %s and %s"):format(d.column, show.value(d.replay), show.value(d.live))
    if not c.list[i + 1] or c.list[i + 1].step ~= d.step then
      steps = steps + 1
      if steps <= MOST_LINES then
        say("  step %d (%s): %s", d.step, d.mark, table.concat(parts, ", "))
      end
      parts = {}
    end
  end
  if steps > MOST_LINES then
    say("  and %d more steps; --json lists all of them", steps - MOST_LINES)
  end
  return lines
end

local function or_null(value) return value == nil and json.null or value end

-- Returns c, a result of verify.compare, as an object for --json. why: the reason why the live run
-- made fewer steps than planned, or nil.
local function object_of(plan, c, interrupted, why)
  local list, notes = {}, { unpack(plan.notes) }
  for i, d in ipairs(c.list) do
    list[i] = { step = d.step, column = d.column, replay = or_null(d.replay),
      live = or_null(d.live), verdict = d.mark }
  end
  for _, note in ipairs(c.notes) do notes[#notes + 1] = "setting " .. note end
  return { policy = plan.result.name, checkpoint = plan.checkpoint or json.null, from = plan.from,
    steps = c.steps, wanted = #plan.rows, interrupted = interrupted, error = why or json.null,
    notes = notes, differences = list }
end

-- ------------------------------------------------------------------ one policy

-- Verifies a policy, p = { source, options }, on the run at `path`. The live run writes to
-- `folder`. Returns the exit status, and the object for --json.
local function verify_one(path, p, given, folder)
  local wish = { from = given.from, steps = given.steps, script = given.script }
  local plan = verify.plan(path, p.source, p.options, wish, folder .. "/run")
  local function say(line) if not given.json then print(show.shown(line, true)) end end
  local before = given.from or plan.open
  say(("%s: live run from %s, %s"):format(plan.result.name, plan.checkpoint or "the start" ..
    (before and before > 0 and (" (no checkpoint up to step %d)"):format(before) or ""),
    show.counted(#plan.rows, "step")))
  io.stdout:flush()
  local status, interrupted = run_live(plan, folder)
  local why
  local made = last_step(plan.job.run)
  if not made or made < plan.from then
    why = interrupted and "interrupted before the live run's first step"
      or ("the live run made no step; exit status %d: %s"):format(status,
      process.last_words(folder .. "/output") or "no output")
    if not given.json then error(why, 0) end
    return interrupted and INTERRUPTED or FAILED, object_of(plan, { steps = 0, list = {},
      notes = {} }, interrupted, why)
  end
  local c, problem = history.with(plan.job.run, function(live)
    return verify.compare(plan, live, given.tolerance or 0.01)
  end)
  if not c then error(problem, 0) end
  for _, line in ipairs(lines_of(plan, c, interrupted)) do say(line) end
  local short = c.steps < #plan.rows and not interrupted
  if short then
    why = ("the live run ended after %s with exit status %d: %s"):format(
      show.counted(c.steps, "step"), status,
      process.last_words(folder .. "/output") or "no output")
    say(why)
  end
  return interrupted and INTERRUPTED or (#c.list > 0 or short) and DIFFER or AGREE,
    object_of(plan, c, interrupted, why)
end

-- Makes an empty folder for a live run: at the path that --keep gives, or without --keep at a
-- temporary path. For one of `many` policies, the folder is keep/i. Returns the path.
local function folder_for(keep, i, many)
  local path = keep and files.absolute(many and ("%s/%d"):format(keep, i) or keep) or os.tmpname()
  if not keep then os.remove(path) end             -- tmpname made a file
  local names = files.names(path)
  if files.exists(path) and (not names or #names > 0) then
    error(("--keep: expected a new or an empty folder, but %s holds files or is no folder"):format(
      keep), 0)
  end
  require("engine.base.ffi").check(C.eng_file_mkdir(path))
  return path
end

--- Verifies given.policies on the run given.words[1]; the other fields of `given` are the command's
--- options. Returns the exit status: 0 if the replay and the live runs agree, 1 if a live run made
--- no step, 2 if a live run differs from the replay or ends early, 130 after an interrupt.
function M.main(given)
  local worst, objects = AGREE, {}
  for i, p in ipairs(given.policies) do
    local folder = folder_for(given.keep, i, #given.policies > 1)
    local good, status, object = pcall(verify_one, given.words[1], p, given, folder)
    if not given.keep then files.remove(folder) end
    if not good then error(status, 0) end
    worst, objects[i] = math.max(worst, status), object
    if status == INTERRUPTED then break end
  end
  if given.json then print(json.plain { policies = objects }) end
  return worst
end

return M
