-- What must hold after a disturbed job of spec/chaos.lua, whatever was done to it: the exit status,
-- the messages, the history, the checkpoints and `engine runs` agree with each other, and every
-- recorded step has the numbers of the undisturbed job, bit for bit.
local engine = require "engine"
local helper = require "spec.helper"
local json = require "engine.base.json"
local process = require "spec.chaos.process"

local M = {}

-- Columns of a step that a disturbance must not change. A swapped policy chooses other scales.
local ALWAYS = "step, updates, loss, lr, action, overflow, inf, nan, amax, norm, clip, lr_mul, " ..
  "tokens"
local BY_POLICY = ", scale, next_scale, zeros, underflow"

--- The recorded steps as texts, in order; nil without a history.
function M.steps(run, own_policy)
  if not helper.read(run .. "/history.db") then return nil end
  local history = engine.history.open(run)
  local columns, rows = ALWAYS .. (own_policy and "" or BY_POLICY), {}
  local names = {}
  for name in columns:gmatch("[%w_]+") do names[#names + 1] = name end
  for i, row in ipairs(history:query("SELECT " .. columns .. " FROM steps ORDER BY step")) do
    local parts = {}
    for k, name in ipairs(names) do
      local value = row[name]
      parts[k] = type(value) == "number" and ("%s=%.17g"):format(name, value)
        or name .. "=" .. tostring(value)
    end
    rows[i] = table.concat(parts, " ")
  end
  local events = history:query "SELECT step, kind, text FROM events ORDER BY id"
  history:close()
  return rows, events
end

--- The checksum of each rank's weights as the job printed them: a list, by rank.
function M.weights(job)
  local list = {}
  for rank, sum in job.err:gmatch("rank (%d+): weights (%w+)") do list[tonumber(rank) + 1] = sum end
  return list
end

-- What `engine runs` says about the run, or nil.
local function listed(run)
  local folder, name = run:match("^(.*)/([^/]*)$")
  local result = helper.run { "runs", folder, "--json" }
  for line in result.out:gmatch("[^\n]+") do
    local info = json.decode(line)
    if info.name == name then return info end
  end
end

-- The step of the newest checkpoint, and the step of the newest intact one.
local function newest(run)
  local steps = engine.checkpoint.steps(run .. "/checkpoints")
  local path = engine.checkpoint.latest(run .. "/checkpoints")
  local intact = path and tonumber(path:match("step%-(%d+)$"))
  return steps[#steps], intact
end

local TRACES = { "lua/engine/[%w_/]+%.lua:%d+:", "attempt to ", "signal 11", "signal 6 ",
  "signal 7 ", "signal 8 ", "Segmentation", "corrupted", "double free", "Sanitizer" }

--- Checks a job that has ended, and adds what is wrong to job.problems. reference: { weights =,
--- rows = } of the undisturbed job. Returns the kind of ending that `engine runs` shows.
function M.check(job, plan, reference)
  local code, text = job.code, job.text
  local function wrong(...) job:wrong(...) end
  local allowed = {}
  for status in pairs(job.codes) do allowed[#allowed + 1] = tostring(status) end
  if not job.ends then allowed[#allowed + 1] = "0" end
  table.sort(allowed)
  -- mpirun's own process may crash when it is interrupted, or when its output has no reader
  if text:find(("%%[%%S+:0*%s%%] Signal"):format(job.mpirun)) then job.unknown = true end
  if job.unknown then code = -1          -- mpirun's own status says nothing about the job
  elseif not job.codes[code] and (job.ends or code ~= 0) then
    wrong("ended with %d, expected %s", code, table.concat(allowed, " or "))
  end
  for line in text:gmatch("[^\n]+") do
    local by_mpirun = line:find(("^%%[%%S+:0*%s%%]"):format(job.mpirun))
      or job.unknown and line == "Segmentation fault"
    for _, trace in ipairs(TRACES) do
      if line:find(trace) and not by_mpirun then wrong("said: %s", line) end
    end
  end

  local good, rows, events = pcall(M.steps, job.run, plan.policy)
  if not good then
    if not rows:find "is empty" then wrong("the history cannot be read: %s", rows) end
    rows = nil
  end
  local info = listed(job.run)
  local newest_step, intact = newest(job.run)
  for i, row in ipairs(rows or {}) do
    if row ~= reference.rows[i] then
      wrong("row %d: %s\n    undisturbed: %s", i, row, tostring(reference.rows[i]))
      break
    end
  end
  -- a job that ended before its first step has not replaced a checkpoint damaged before its start
  local damaged = job.damaged and job:step() == 0
  if newest_step ~= intact and not damaged then
    wrong("the checkpoint of step %d is not intact", newest_step)
  end
  local n, how = rows and #rows or 0, info and info.how
  local last = events and events[#events] and events[#events].kind
  local function summary()
    return ("code %d, %d rows, engine runs: %s, last event %s, checkpoint %s"):format(code, n,
      tostring(info and info.ended), tostring(last), tostring(intact))
  end
  local empty = n == 0 and info and info.problem and info.problem:find "is empty"
  if info and info.problem and not empty then wrong("engine runs: %s", info.problem) end
  if how == "running" then wrong("engine runs: running, but no process is") end
  local whole = how == "finished" and n == process.STEPS and intact == process.STEPS
  if code == 0 and not whole then wrong("status 0, but %s", summary()) end
  if code == 5 then
    if whole and not job.reader_gone then wrong("status 5, but nothing is lost: %s", summary()) end
    if not (text:find "lost" or text:find "continues without this output"
      or text:find "no checkpoint was written") then
      wrong("status 5, but no message about lost output")
    end
  end
  local may_lose = damaged or code == 5 or job.unknown and job.disk_was_full
  if how == "finished" and not whole and not may_lose then wrong("finished, but %s", summary()) end
  if how == "stopped" then
    -- lost output (status 5) takes precedence over a failed policy (3)
    local failed = code == 3 or code == 5 and tostring(info.ended):find "the policy failed in"
    -- if a job ended before its first step, the history still shows how the previous job ended
    local before = job:step() == 0 and (code == 70 or code == 1 and job.disk_was_full)
    if not (job.interrupted or failed or before) then
      wrong("the run stopped without a cause: %s", summary())
    end
    if intact ~= n and not may_lose then wrong("stopped, but %s", summary()) end
  end
  -- Open MPI 4's mpirun can lose the status if two ranks abort at the same time
  if how == "broken" and not (job.killed or job.interrupted or job.disk_was_full
    or code == 70 or text:find "with errorcode 70") then
    wrong("the run was cut short without a cause: %s", summary())
  end
  if (code == 1 or code == 70) and not text:find "engine: " and not job.interrupted then
    wrong("status %d without a message", code)
  end
  local weights = M.weights(job)
  for rank = 1, code == 0 and job.size or 0 do
    if weights[rank] ~= reference.weights then
      wrong("rank %d ended with the weights %s, undisturbed %s", rank - 1, tostring(weights[rank]),
        reference.weights)
    end
  end
  if job.swapped and whole then
    local seen = false
    for _, event in ipairs(events or {}) do seen = seen or event.kind:find "^swap" ~= nil end
    if not seen then wrong("the policy's file was saved (%s): no swap event", job.swapped) end
  end
  return how
end

return M
