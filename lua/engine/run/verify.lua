-- Verifies a replay: compares it, step by step, with a live run of the recorded job under the same
-- policy. cli/replay_verify.lua starts the live run (cli/live.lua, in a process of its own) and
-- prints the result. This file decides where the live run starts, and compares.
--
--   local plan = verify.plan("runs/a", "dynamic", { init_scale = 256 }, { steps = 100 })
--   ... a run of plan.job ...
--   verify.compare(plan, history_of_the_live_run)
--
-- A step is open if its replayed verdict is a bound, or if its loss scale or action differs from
-- the recorded run's. The live run begins at the newest checkpoint at or before the first open
-- step, with the policy in the state that the replay has there. Without such a checkpoint the live
-- run begins where the recorded run did. Called by cli/replay_verify.lua.
local M_ffi = require "engine.base.ffi"
local checkpoint = require "engine.run.checkpoint"
local files = require "engine.base.file"
local json = require "engine.base.json"
local replay = require "engine.run.replay"

local C, fail_if = M_ffi.C, M_ffi.fail_if

local M = {}

local STEPS = 100            -- the number of steps to verify, by default

--- The columns that are compared at each step, in this order. Decisions must be equal. Numbers
--- marked `loose` depend on the weights and may differ by the tolerance, because another scale
--- rounds differently.
M.COLUMNS = { { "scale" }, { "overflow" }, { "action" }, { "next_scale" }, { "lr" },
  { "loss", loose = true }, { "amax", loose = true }, { "norm", loose = true } }

-- ------------------------------------------------------------------ planning

-- Returns how the run was started, from its history: { script, folder, arguments, run, crc32c,
-- changed = whether the script's text has changed since }. script: the script that the user named
-- instead, or nil. Raises an error if the job cannot be started again.
local function command_of(path, meta, config, script)
  local known, command = pcall(json.decode, meta.command or "")
  if not known or type(command) ~= "table" or type(command.arguments) ~= "table" then
    command = { arguments = {} }
    for name, value in pairs(config) do
      table.insert(command.arguments, name .. "=" .. tostring(value))
    end
    table.sort(command.arguments)
    fail_if(not script, "the history of %s does not name the script that made the run; hint: " ..
      "--script FILE", path)
  end
  local folder = type(command.folder) == "string" and command.folder or files.absolute(".")
  if script then
    fail_if(not files.is_file(script), "--script: there is no file %s", script)
    script = files.absolute(script)
  else
    script = tostring(command.script)
    if script:sub(1, 1) ~= "/" then script = folder .. "/" .. script end
  end
  fail_if(not files.is_file(script), "the script that made %s no longer exists: %s; hint: " ..
    "--script FILE", path, script)
  fail_if(not files.is_folder(folder), "the folder that %s was started in no longer exists: %s; " ..
    "hint: restore the folder", path, folder)
  local source = files.read(script)
  command.changed = command.crc32c ~= nil and source ~= nil
    and C.eng_crc32c(0, source, #source) ~= command.crc32c
  command.script, command.folder = script, folder
  return command
end

-- The names of the recorded run's arguments that are not passed on to the live run.
local OWN = { run = true, resume = true, tensorboard = true, log = true }

-- Returns the recorded run's arguments without those in OWN. If the recorded arguments include
-- run=NAME, adds a run= argument that names the live run's folder, `run`.
local function arguments_of(command, run)
  local words, named = {}, false
  for _, word in ipairs(command.arguments) do
    local name = tostring(word):match("^([%w_.]+)=")
    named = named or name == "run"
    if not OWN[name] then words[#words + 1] = tostring(word) end
  end
  if named then words[#words + 1] = "run=" .. run end
  return words
end

-- Returns the number of threads of the recorded run, or nil if the history has no valid number.
local function threads_of(meta)
  local n = tonumber(meta.threads)
  return n and n % 1 == 0 and n >= 1 and n <= tonumber(C.ENG_THREADS_MAX) and n or nil
end

-- Replays the policy on the trace. Returns three values: the result of replay.run, a list with
-- { step, scale, overflow ... } for each row, and the policy's state before the row `at` (or nil).
local function replayed(trace, source, options, at)
  local rows, state = {}, nil
  local result = replay.run(trace, source, options, {
    before = function(i, policy) if i == at then state = policy:save() end end,
    after = function(i, record, verdict, mark)
      rows[i] = { step = tonumber(record.step), scale = record.scale, mark = mark,
        overflow = record.overflow ~= 0, action = verdict:what(), next_scale = verdict.scale,
        lr = record.lr, loss = record.loss, amax = record.amax, norm = record.norm }
    end })
  return result, rows, state
end

-- Returns the index of the first open row (see the top of the file), or nil.
local function first_open(trace, rows)
  for i, row in ipairs(rows) do
    local run = trace.rows[i - 1]
    if row.mark ~= "exact" or row.scale ~= run.scale
      or C.eng_action_from_name(row.action) ~= run.action then
      return i
    end
  end
end

-- Returns the index of the last row at or before a step. Raises an error if the replay does not
-- reach the step.
local function row_at(path, rows, step)
  local at
  for i, row in ipairs(rows) do
    if row.step <= step then at = i end
  end
  if at and step <= rows[#rows].step then return at end
  error(("--from: expected a step from %d to %d, the steps of the replay of %s, got %g"):format(
    rows[1].step, rows[#rows].step, path, step), 0)
end

-- Returns the index of the row from which the live run starts, and the path of the checkpoint
-- there: the newest one at or before the row `target`. Without a checkpoint, returns 1 and nil.
local function start_of(path, trace, target)
  local row_of = {}
  for i = trace.n, 1, -1 do row_of[tonumber(trace.rows[i - 1].step)] = i end
  local c = files.is_folder(path .. "/checkpoints")
    and checkpoint.open(path .. "/checkpoints", tonumber(trace.rows[target - 1].step))
  if c then c:close() end
  if c and row_of[c.step] then return row_of[c.step], c.path end
  fail_if(trace.first > 0, "%s begins at step %d, and has no checkpoint from which the " ..
    "live run could start; hint: --from STEP, a step after a checkpoint", path, trace.first)
  return 1, nil
end

-- What an event of the recorded run means for a live run that starts before the event.
local CHANGES = {
  resumed = "the run was resumed; the live run has the arguments of the last start",
  precision = "the recipe changed; the live run has the last one from its first step on",
  set = "an attached client changed a setting, which the live run does not repeat",
}

-- Returns notes about the events after the step `from` for which a live run from `from` to `last`
-- may differ from the recorded run.
local function changes_after(events, from, last)
  local notes = {}
  for _, event in ipairs(events) do
    local what = CHANGES[event.kind]
    if what and event.step > from and (event.kind ~= "set" or event.step <= last) then
      notes[#notes + 1] = ("step %d: %s (%s)"):format(event.step, what, event.text)
    end
  end
  return notes
end

--- Prepares a verification of a policy (source, options: as in replay.run) on the run at `path`.
--- wish: { from, steps, script }; with `from`, a step, the live run starts at the newest checkpoint
--- of that step or before. run: the folder of the live run. Returns { job = the input of
--- cli/live.lua, rows = the replay's steps to compare, from (their first step), to (the step after
--- their last), result (of replay.run), open (the first open step of the replay, or nil),
--- checkpoint (the path of the checkpoint that the live run begins at, or nil), notes (lines for
--- the user), meta and config (of the recorded run) }. Raises an error if the job cannot be run
--- again.
function M.plan(path, source, options, wish, run)
  local trace = replay.trace(path)
  if not trace.rows then error("--verify needs a run, not a string of outcomes", 0) end
  path = require("engine.run.runs").folder(trace.name)
  local history = require("engine.run.history").open(trace.name)
  local meta, config, events = history:meta(), history:config(), history:events()
  history:close()
  fail_if((tonumber(meta.ranks) or 1) > 1, "%s was made by %s ranks; --verify runs one process " ..
    "and expects a run of one rank", path, meta.ranks)
  local command, notes = command_of(path, meta, config, wish.script), {}
  if command.changed then
    notes[1] = ("%s has changed since the run, which may explain differences"):format(
      command.script)
  end
  local _, rows = replayed(trace, source, options)
  local open = first_open(trace, rows)
  local first, from = start_of(path, trace, wish.from and row_at(path, rows, wish.from) or open
    or 1)
  local result, _, state = replayed(trace, source, options, first)
  local count = math.min(wish.steps or STEPS, #rows - first + 1)
  local part = {}
  for i = first, first + count - 1 do part[#part + 1] = rows[i] end
  for _, note in ipairs(changes_after(events, part[1].step, part[#part].step)) do
    notes[#notes + 1] = note
  end
  local policy = require("engine.policy.policy").load(source, options)
  fail_if(not policy.source, "policy %s is a class of a script; expected the name or the file " ..
    "of a policy, which a live run can load", policy.name)
  if open and rows[open].step > part[#part].step then
    local closer = start_of(path, trace, open) > first     -- than the checkpoint for wish.from
    notes[#notes + 1] = ("the replay equals the run before step %d; hint: --steps %d or more%s, " ..
      "to verify later steps"):format(rows[open].step, open - first + 10,
      closer and (", or --from %d"):format(rows[open].step) or "")
  end
  return { rows = part, result = result, from = part[1].step, to = part[#part].step + 1,
    open = open and rows[open].step, checkpoint = from, notes = notes, meta = meta,
    config = config,
    job = { script = command.script, folder = command.folder, crc32c = command.crc32c,
      arguments = arguments_of(command, run), name = command.run, run = run,
      resume = from and files.absolute(from), steps = part[#part].step + 1, state = state,
      threads = threads_of(meta),
      policy = { source = policy.source, file = policy.file, path = policy.path },
      policy_options = policy.given } }
end

-- ------------------------------------------------------------------ comparing

local function close(a, b, tolerance)
  if a == b or a ~= a and b ~= b then return true end
  if type(a) ~= "number" or type(b) ~= "number" then return false end
  local difference = math.abs(a - b)
  return difference <= tolerance * math.max(math.abs(a), math.abs(b)) and difference < math.huge
end

-- Returns the settings in which the live run differs from the recorded run, as lines.
local function changed_settings(plan, live)
  local value = require("engine.base.show").value
  local notes, names = {}, require("engine.base.nearest").keys(plan.config)
  local config, meta = live:config(), live:meta()
  for _, name in ipairs(names) do
    local was, is = tostring(plan.config[name]), tostring(config[name])
    if was ~= is and not OWN[name] then
      notes[#notes + 1] = ("%s was %s, is %s now"):format(name, value(was), value(is))
    end
  end
  for _, name in ipairs { "device", "threads", "precision", "optimizer", "schedule",
    "parameters" } do
    if plan.meta[name] ~= meta[name] then
      notes[#notes + 1] = ("%s was %s, is %s now"):format(name, tostring(plan.meta[name]),
        tostring(meta[name]))
    end
  end
  return notes
end

local EXACT = 1e-12          -- relative tolerance of decisions and learning rates

--- Compares the plan's rows with the history of the live run. Returns { steps = how many steps were
--- compared, notes = settings that differ, columns = { [name] = { differ = number of steps that
--- differ, largest = the largest relative difference, or nil } }, list = { { step, column, replay,
--- live, mark } ... } in the order of steps }. mark: how certain the replay's verdict is
--- (counterfactual.lua). tolerance: the relative tolerance of loss, amax and norm.
function M.compare(plan, live, tolerance)
  local by_step, result = {}, { steps = 0, list = {}, columns = {} }
  for _, row in ipairs(live:steps(plan.from, plan.to - 1)) do
    by_step[row.step] = by_step[row.step] or row
  end
  result.notes = changed_settings(plan, live)
  for _, column in ipairs(M.COLUMNS) do result.columns[column[1]] = { differ = 0 } end
  for _, row in ipairs(plan.rows) do
    local real = by_step[row.step]
    if not real then break end
    result.steps = result.steps + 1
    local overflow = row.overflow or real.overflow
    for _, column in ipairs(M.COLUMNS) do
      local name, sum = column[1], result.columns[column[1]]
      local a, b = row[name], real[name]
      -- at an overflow, amax and norm cover only the finite gradients and are not compared
      if overflow and (name == "amax" or name == "norm") then a, b = 0, 0 end
      if column.loose and a - b == a - b then
        local most = math.max(math.abs(a), math.abs(b))
        sum.largest = math.max(sum.largest or 0, most > 0 and math.abs(a - b) / most or 0)
      end
      if not close(a, b, column.loose and tolerance or EXACT) then
        sum.differ = sum.differ + 1
        result.list[#result.list + 1] = { step = row.step, column = name, replay = a, live = b,
          mark = row.mark }
      end
    end
  end
  return result
end

return M
