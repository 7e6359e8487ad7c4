-- Replays a policy on a string of outcomes, or on a recorded run.
--   local trace = engine.replay.trace("4. x 2. 3x")             -- or "runs/a"
--   local r = engine.replay.run(trace, "dynamic", { init_scale = 256 })
--   r.scales, r.actions, r.skipped, r.stopped_at ...            -- print(engine.replay.table { r })
-- The subcommand is cli/replay.lua. replay_fp8.lua replays policies of FP8 layers; trace.lua
-- reconstructs the record of a step at another scale. Called by scripts, tune.lua, verify.lua and
-- cli/replay.lua.
local M_ffi = require "engine.base.ffi"
local counterfactual = require "engine.run.counterfactual"
local json = require "engine.base.json"
local replay_fp8 = require "engine.run.replay_fp8"
local show = require "engine.base.show"
local trace_of = require "engine.run.trace"

local C, ffi, fail_if = M_ffi.C, M_ffi.ffi, M_ffi.fail_if

local M = { trace = trace_of.open }

-- Returns two values. The first is the mean number of steps that the scale takes after a backoff to
-- return to its value before that backoff, or nil if it never returns. The second is 1 if such a
-- recovery is unfinished at the end of the trace, else 0. Further backoffs during a recovery start
-- no new one. scales: the scale after each step. initial: the scale before the first step.
local function recovery(scales, initial)
  local sum, times, open, from = 0, 0, nil, nil
  local before = initial
  for i, scale in ipairs(scales) do
    if not open and scale < before then open, from = before, i end
    if open and scale >= open then
      sum, times, open = sum + i - from, times + 1, nil
    end
    before = scale
  end
  return times > 0 and sum / times or nil, open and 1 or 0
end

-- Returns whether the run of a trace trained under a class of its own script with this name: then
-- the history has the policy's name, but no source.
local function is_class_of_script(trace, name)
  return trace.names and require("engine.run.history").with(trace.name, function(h)
    for _, policy in ipairs(h:policies()) do
      if policy.name == name then return false end
    end
    return h:meta().policy == name
  end)
end

--- Loads a policy of either kind to replay it on a trace (source and options as in
--- engine.policy.load). Returns nil and the reason for a class of the script that made the run.
function M.load(trace, source, options)
  local policies = require "engine.policy.policy"
  local loaded, policy = pcall(policies.load, source, options, "any")
  if loaded then return policy end
  local name = type(source) == "string" and source:gsub(":.*", "")
  if name and not policies.classes[name] and is_class_of_script(trace, name) then
    return nil, ("policy %s is a class that the script of %s registered, and a class of a " ..
      "script cannot be replayed here; hint: call engine.replay.run in a script that registers " ..
      "the class, or write the class as a policy file"):format(name, trace.name)
  end
  error(policy, 0)
end

--- Replays a policy (a name, a path, or a policy; options as in engine.policy.load) on a trace.
--- look: nil, or { before = function(i, policy), after = function(i, record, verdict, mark) }, two
--- functions that are called around the decision on step i (from 1); mark is marks[i]. Returns
---   name, file, options    the policy; changed: the options that are not the defaults, as text
---   scales[i], actions[i]  the scale after step i, and "step", "skip", "retry", "stop" or
---                          "rollback"
---   marks[i]               on a run: "exact" or "bound" (explained in counterfactual.lua)
---   logs[name][i]          what the policy logged at step i; logs is nil if it logged nothing
---   skipped                steps without an update; if some verdicts are bounds, an estimate
---   certainty              on a run: { exact, least, from, why } (counterfactual.certainty): the
---                          number of exact verdicts, the least number of steps without an update,
---                          the first step whose verdict is a bound, and the reason
---   stopped_at, reason     the step, counted from 1, at which the policy stopped the run, and why;
---                          or nil
---   steps                  the number of replayed steps
---   mean_log2_scale        the mean of log2 of the loss scales of these steps
---   failures, failure      the number of decisions that failed; why the first of them failed
---   recover, unrecovered   mean steps from a backoff until the scale is back where it was, or nil;
---                          1 if a recovery is unfinished at the end, else 0. Backoffs during a
---                          recovery start no other one
---   underflow, mass_lost   on a run, over the steps with an update: mean share of nonzero elements
---                          below the smallest normal number; mean share of the gradient mass (the
---                          sum of magnitudes) that is lost
---   costs                  { elements, mass, skipped }: mean shares of elements that underflow, of
---                          mass lost, and of steps without an update. A step without an update
---                          counts as 1 in all three
--- For a policy of FP8 layers, on a run only: name, file, options, changed, marks, logs, certainty,
--- steps, failures and failure as above, and
---   fp8                    true
---   moves                  { step, layers = { [path] = rung }, reason, text } for each verdict
---                          that moves layers. Rung 1 is the recipe; the last is high precision
---   layers, of             the number of layers that the policy moves in the run, and the number
---                          of all FP8 layers
---   high                   mean share of the layers that are not on rung 1
---   apart                  number of verdicts after which some layer would compute differently
---                          than in the run
function M.run(trace, source, options, look)
  M_ffi.expect(type(trace) == "table" and trace.at, trace,
    "replay.run: expected a trace, such as engine.replay.trace(\"runs/a\")")
  local policy, why = M.load(trace, source, options)
  if not policy then error(why, 0) end
  if policy.fp8 and not look then return replay_fp8.run(trace, policy) end
  fail_if(policy.fp8, "policy %s works on FP8 layers, and --verify compares loss scales; hint: " ..
    "try it as a shadow of a live run (shadow=%s)", policy.name, policy.name)
  local record = ffi.new("eng_record")
  local scales, actions, marks = {}, {}, {}
  local result = { name = policy.name, file = policy.config or policy.file,
    options = policy.options, changed = policy:changed(), scales = scales, actions = actions,
    skipped = 0, failures = 0 }
  if trace.names then
    result.marks, result.certainty = marks, counterfactual.certainty()
    policy:tensors(require("engine.policy.groups").of(trace.names))
  end
  local needs, updates = policy.needs or 0, trace.rows and trace.rows[0].updates or 0
  local logs, elements, masses, applied = 0, 0, 0, 0
  local initial = policy:scale()
  local before = initial
  for i = 1, trace.n do
    local scale = trace.lagged and trace:early(i) and before or policy:scale()
    before = policy:scale()
    local known, share, mass, stats = trace:at(record, i, scale, needs)
    record.updates = updates
    for name, value in pairs(trace.signals and trace.signals[i] or {}) do
      policy:signal(name, value)
    end
    if look then look.before(i, policy) end
    local verdict = policy:decide(record, stats)
    local asked = trace.lagged and verdict:apply_lag(record.overflow ~= 0) or verdict.action
    local action = verdict:what()
    scales[i], actions[i] = verdict.scale, action
    result.logs = policy:add_logs(result.logs, i)
    if trace.names then
      local step, wanted = tonumber(record.step), asked == C.ENG_ACTION_ROLLBACK
      marks[i] = counterfactual.judge(result.certainty, step, known, verdict, trace.rows[i - 1],
        trace.lagged and wanted ~= (trace.asked[step] or false)) and "exact" or "bound"
    end
    if look then look.after(i, record, verdict, marks[i]) end
    logs = logs + math.log(scale) / math.log(2)
    if verdict.failed ~= 0 then
      result.failures = result.failures + 1
      result.failure = result.failure or verdict:why()
    end
    if action == "step" then
      updates = updates + 1
      if share then elements, masses, applied = elements + share, masses + mass, applied + 1 end
    else
      result.skipped = result.skipped + 1
    end
    if asked == C.ENG_ACTION_STOP then
      result.stopped_at, result.reason = tonumber(record.step) + 1, verdict:why()
      break
    end
  end
  result.steps = #scales
  result.mean_log2_scale = logs / #scales
  result.recover, result.unrecovered = recovery(scales, initial)
  if applied > 0 then result.underflow, result.mass_lost = elements / applied, masses / applied end
  local without = result.skipped + trace.n - #scales       -- a stopped run makes no further steps
  result.costs = { elements = (without + elements) / trace.n, mass = (without + masses) / trace.n,
    skipped = without / trace.n }
  return result
end

-- ------------------------------------------------------------------ as text

--- Returns a list as text, with repeated values counted: "256x3 512" for { 256, 256, 256, 512 }.
function M.runs_of(list)
  local words, i = {}, 1
  while i <= #list do
    local n = 1
    while list[i + n] == list[i] do n = n + 1 end
    words[#words + 1] = show.value(list[i]) .. (n > 1 and "x" .. n or "")
    i = i + n
  end
  return table.concat(words, " ")
end

local function percent(x) return x and (x == 0 and "0 %" or ("%.3g %%"):format(100 * x)) or "-" end

-- The columns of a table: { heading, function from a result to its cell, run = true if only replays
-- of a run have the column }.
local COLUMNS = {
  { "policy", function(r) return r.name end },
  { "options", function(r) return r.changed end },
  { "steps", function(r) return tostring(r.steps) end },
  { "skipped", function(r)
    local c = r.certainty
    return ("%s (%s)"):format(c and counterfactual.count_text(c, r.skipped) or r.skipped,
      percent(r.skipped / r.steps))
  end },
  { "underflow", function(r) return percent(r.underflow) end, run = true },
  { "mass lost", function(r) return percent(r.mass_lost) end, run = true },
  { "log2 scale", function(r) return ("%.2f"):format(r.mean_log2_scale) end },
  { "recovers in", function(r)
    local text = r.recover and ("%.1f steps"):format(r.recover) or "-"
    return r.unrecovered > 0 and (r.recover and text .. ", then not" or "never") or text
  end },
  { "last scale", function(r) return show.scale(r.scales[#r.scales]) end },
  { "exact", function(r) return percent(r.certainty.exact / r.steps) end, run = true },
}

local FP8_COLUMNS = { COLUMNS[1], COLUMNS[2], COLUMNS[3],
  { "moves in", function(r) return ("%d steps"):format(#r.moves) end },
  { "layers", function(r) return ("%d of %d"):format(r.layers, r.of) end },
  { "not as in the recipe", function(r) return percent(r.high) end },
  { "differs in", function(r) return ("%d steps"):format(r.apart) end },
  COLUMNS[#COLUMNS],
}

local function table_of(results, columns)
  local on_run, rows = results[1] and results[1].marks ~= nil, { {} }
  for _, column in ipairs(columns) do
    if on_run or not column.run then
      local c = #rows[1] + 1
      rows[1][c] = column[1]
      for i, r in ipairs(results) do
        rows[i + 1] = rows[i + 1] or {}
        -- a policy that failed at every step has no figures
        rows[i + 1][c] = (r.failures < r.steps or c <= 2) and column[2](r) or c == 4 and "failed"
          or "-"
      end
    end
  end
  return show.table(rows, { true, true })
end

--- Returns results as text: a table of the policies that choose a loss scale and, below it, a table
--- of the policies of FP8 layers, if there are any.
function M.table(results)
  local layers, rest, texts = {}, {}, {}
  for _, r in ipairs(results) do table.insert(r.fp8 and layers or rest, r) end
  if #rest > 0 or #layers == 0 then texts[1] = table_of(rest, COLUMNS) end
  if #layers > 0 then texts[#texts + 1] = table_of(layers, FP8_COLUMNS) end
  return table.concat(texts, "\n\n")
end

-- ------------------------------------------------------------------ as JSON

--- Returns results as JSON, in the form that `engine help replay` describes under --json. A policy
--- that logs also has "log":{name:[a number or null for each step]}. A policy that failed also has
--- "failures", the number of failures, and "failure", the first reason. "bound_why" is null if all
--- verdicts are exact.
function M.json(results)
  local objects = {}
  for i, r in ipairs(results) do
    local fields = {}
    local function put(name, value) fields[#fields + 1] = { name, value } end
    local function put_own(...)
      for _, name in ipairs { ... } do put(name, r[name]) end
    end
    put_own("name", "file")
    put("options", next(r.options or {}) and r.options or json.no_fields)
    if r.fp8 then
      local moves = {}
      for k, move in ipairs(r.moves) do
        moves[k] = { step = move.step, layers = move.layers, reason = move.reason }
      end
      put("steps", r.steps)
      put("moves", moves)
    else
      put_own("scales", "actions", "skipped", "stopped_at", "reason")
    end
    local logs = {}
    for name, values in pairs(r.logs or {}) do logs[name] = json.with_length(values, r.steps) end
    if r.logs then put("log", logs) end
    if r.failures > 0 then put_own("failures", "failure") end
    if r.marks then
      local c, all = r.certainty, r.certainty.bounds == 0
      put("verdicts", r.marks)
      put("bound_from", not all and c.from or nil)
      put("bound_why", not all and c.why or nil)
      if not r.fp8 then
        put("skipped_at_least", c.least)
        put_own("underflow", "mass_lost", "mean_log2_scale", "recover")
      end
    end
    objects[i] = json.ordered(fields)
  end
  return '{"policies":[' .. table.concat(objects, ",") .. "]}"
end

return M
