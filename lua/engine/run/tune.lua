-- Searches the options of a policy on recorded runs: replays the runs with each setting and keeps
-- the setting with the least cost (M.objectives). Tries a grid over the ranges, and then, up to
-- three times, a finer grid around the best setting; but not around the policy's defaults. The
-- search is deterministic and trains nothing.
--   local best = engine.tune { runs = { "runs/a" }, policy = "dynamic",
--     over = { "growth_interval=100..5000" } }
-- The subcommand is cli/tune.lua. Called by scripts and cli/tune.lua.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local expression = require "engine.base.expression"
local nearest = require "engine.base.nearest"
local show = require "engine.base.show"
local replay = require "engine.run.replay"

local C, fail_if = M_ffi.C, M_ffi.fail_if

local M = {}

--- For each objective, the cost that the search minimizes, in words.
M.objectives = {
  elements = "share of gradient elements lost to underflow; a step without an update loses all",
  mass = "share of gradient mass (the sum of magnitudes) lost to underflow; a step without an " ..
    "update loses all",
  skipped = "share of steps without an update",
}

local GRID = { 17, 7, 5, 4, 3 }   -- grid points for each range, by the number of ranges
local REFINEMENTS, FINER = 3, 5   -- the number of finer grids, and their points for each range

-- Loss scales are usually powers of two. If an option's name contains "scal", and its default and
-- both ends of its range are powers of two, the search tries only powers of two.
local function is_power(x) return x > 0 and math.frexp(x) == 0.5 end

-- Returns the range { name, from, to, log, whole, powers } of a text such as
-- "growth_interval=100..5000". from_text and to_text are expressions. `preset` is the option's
-- default.
local function span_of(text, name, preset, from_text, to_text)
  fail_if(type(preset) ~= "number", "over '%s': the option %s is a %s, which has no range; " ..
    "expected a list of values, such as %s=a,b", text, name, type(preset), name)
  local from, to = expression(from_text), expression(to_text)
  fail_if(not from or not to or not (from < to) or to == math.huge or from == -math.huge,
    "over '%s': expected two numbers, the smaller one first, such as 100..5000", text)
  local powers = is_power(from) and is_power(to) and is_power(preset) and name:find("scal") ~= nil
  -- A factor such as 0.5 is not a count, even if its range has whole ends.
  local whole = preset % 1 == 0 and from % 1 == 0 and to % 1 == 0
  return { name = name, from = from, to = to, log = from > 0, whole = whole, powers = powers }
end

-- Reads the range of a policy's option from `text`. For "name=from..to", returns what span_of
-- returns; for "name=a,b,c", { name, values }.
local function read_range(text, policy)
  local function malformed(bad)
    fail_if(bad, "over '%s': expected name=from..to or name=a,b,c", text)
  end
  local name, range = text:match("^([%a_][%w_]*)=(.+)$")
  malformed(not name)
  local preset = policy.defaults[name]
  fail_if(preset == nil, "policy '%s' has no option '%s'%s", policy.name, name,
    nearest.choices(name, policy.option_names, "options"))
  local from, to = range:match("^(.-)%.%.(.+)$")
  if from then return span_of(text, name, preset, from, to) end
  malformed(range:find("^[%d.]+%-[%d.]+$"))                 -- 5-15 is meant as 5..15, not as -10
  local values, numeric = {}, type(preset) == "number"
  for word in range:gmatch("[^,]+") do
    values[#values + 1] = not numeric and word or expression(word)
      or error(("over '%s': expected numbers, such as %s=100..5000 or %s=1,2,4, got '%s'"):format(
        text, name, name, word), 0)
  end
  malformed(#values == 0)
  return { name = name, values = values }
end

-- Returns up to n points from a to b, without repetitions, in the linear or logarithmic spacing of
-- `range`. If the user listed the values, returns these.
local function points(range, a, b, n)
  if range.values then return range.values end
  local list = {}
  for i = 0, n - 1 do
    local t = n > 1 and i / (n - 1) or 0
    local x = range.log and a * (b / a) ^ t or a + (b - a) * t
    if range.powers then x = 2 ^ math.floor(math.log(x) / math.log(2) + 0.5)
    elseif range.whole then x = math.floor(x + 0.5)
    elseif i > 0 and i < n - 1 then x = tonumber(("%.4g"):format(x)) end
    x = math.max(range.from, math.min(range.to, x))
    if list[#list] ~= x then list[#list + 1] = x end
  end
  return list
end

-- ------------------------------------------------------------------ the search

-- Checks the options of a search. Returns { traces, policy, source (what names the policy), fixed
-- (options that the search does not change), ranges, objective, rows, seen, refused }. evaluate()
-- fills the last three: all rows, the rows by their settings, the first reason for a refusal.
local function read(o)
  M_ffi.expect(type(o) == "table", o, "tune: expected a table of options")
  arguments.want_list(o.runs, "tune", "runs", '{ "runs/a" }')
  arguments.want_list(o.over, "tune", "over", '{ "growth_interval=100..5000" }')
  local s = { traces = {}, ranges = {}, objective = o.objective or "elements", source = o.policy,
    fixed = o.options or {}, rows = {}, seen = {} }
  fail_if(not M.objectives[s.objective], "there is no objective '%s'%s", tostring(s.objective),
    nearest.choices(s.objective, M.objectives, "objectives"))
  for i, run in ipairs(o.runs) do
    s.traces[i] = type(run) == "table" and run or replay.trace(run)
    fail_if(not s.traces[i].names and s.objective ~= "skipped", "'%s' is a string of outcomes " ..
      "without gradients; expected the objective 'skipped', got '%s'", s.traces[i].name,
      s.objective)
  end
  if #s.traces == 0 then error("expected at least one run in `runs`, got none", 0) end
  local loaded, policy = pcall(require("engine.policy.policy").load, s.source, s.fixed)
  if not loaded then error(policy, 0) end
  fail_if(policy.is_class, "policy %s is a class of a script, whose options have no known " ..
    "defaults and types; expected a shipped policy or a policy file; hint: engine.replay.run " ..
    "tries a class with one setting", policy.name)
  s.policy = policy
  for i, text in ipairs(o.over) do s.ranges[i] = read_range(tostring(text), policy) end
  fail_if(#s.ranges == 0, "expected at least one range in `over`, such as name=from..to")
  fail_if(#s.ranges > 6, "expected at most 6 ranges in `over`, got %d", #s.ranges)
  return s
end

-- Replays a run under the policy with `options`. Returns the result, or nil and the reason if the
-- policy refuses these options or fails at every step.
local function replayed(s, trace, options)
  local good, r = pcall(replay.run, trace, s.source, options)
  if not good and C.eng_interrupted() ~= 0 then error(r, 0) end
  if good and r.failures == r.steps then
    return nil, ("%s failed at every step: %s"):format(r.name, r.failure)
  end
  return good and r or nil, r
end

-- Returns the row of a setting { name = value }. Its cost is infinite if the policy refuses the
-- setting. A setting that was tried before is not replayed again.
local function evaluate(s, setting)
  local options, words = arguments.merged(s.fixed, setting), {}
  for _, range in ipairs(s.ranges) do
    local value = setting[range.name]
    if type(value) == "number" then value = show.exact(value) end
    if value ~= nil then words[#words + 1] = range.name .. "=" .. tostring(value) end
  end
  local key, total = table.concat(words, ","), 0
  if s.seen[key] then return s.seen[key] end
  local row = { options = arguments.merged(setting), text = key, place = #s.rows + 1, cost = 0,
    skipped = 0, steps = 0, underflow = 0, mass_lost = 0 }
  s.rows[row.place], s.seen[key] = row, row
  for _, trace in ipairs(s.traces) do
    local r, why = replayed(s, trace, options)
    if not r then
      s.refused, row.cost = s.refused or why, math.huge
      return row
    end
    total = total + trace.n
    row.cost = row.cost + r.costs[s.objective] * trace.n
    row.underflow = row.underflow + (r.underflow or 0) * trace.n
    row.mass_lost = row.mass_lost + (r.mass_lost or 0) * trace.n
    row.skipped, row.steps = row.skipped + r.skipped, row.steps + r.steps
    row.stopped = row.stopped or r.stopped_at and true
    if r.certainty then
      row.certainty = row.certainty or { exact = 0, bounds = 0, least = 0 }
      for name, n in pairs(row.certainty) do row.certainty[name] = n + r.certainty[name] end
    end
  end
  row.cost, row.underflow, row.mass_lost = row.cost / total, row.underflow / total,
    row.mass_lost / total
  return row
end

-- Tries every combination of values. lists[k]: the values of the k-th range.
local function try_all(s, lists)
  local setting = {}
  local function go(k)
    if k > #s.ranges then return evaluate(s, setting) end
    for _, value in ipairs(lists[k]) do
      setting[s.ranges[k].name] = value
      go(k + 1)
    end
  end
  go(1)
end

-- Returns the row with the least cost. Among equal costs, returns the row that was tried first.
local function best_of(rows)
  local best = rows[1]
  for _, row in ipairs(rows) do
    if row.cost < best.cost then best = row end
  end
  return best
end

-- Returns points of a range around `value`: from the value before it in `list` to the value after.
local function around(range, list, value)
  if range.values then return { value } end
  local at = 1
  for i, x in ipairs(list) do
    if x == value then at = i end
  end
  return points(range, list[math.max(1, at - 1)], list[math.min(#list, at + 1)], FINER)
end

--- Searches for the best options of a policy. Options:
---   runs        traces, or strings for engine.replay.trace
---   policy      name or path; options: fixed settings
---   over        list of "name=from..to" and "name=a,b,c"
---   objective   "elements" (the default), "mass" or "skipped", as in engine.tune.objectives
--- Returns { best = row, default = the row of the policy's own defaults for the searched options,
--- rows = all rows, best first, objective =, evaluations = the number of rows, policy = }. A row
--- has `options` (the searched options), `text` (these options as "name=value,..."), `cost`,
--- `skipped`, `steps`, `underflow`, `mass_lost`, `stopped`, and for runs `certainty`: { exact,
--- bounds, least }, the sums over the runs (counterfactual.certainty). The figures of a row are
--- estimates unless `bounds` is 0. Among equal costs, the setting that was tried first wins.
local function search(_, o)
  local s, lists = read(o), {}
  local default = evaluate(s, {})
  for k, range in ipairs(s.ranges) do
    lists[k] = points(range, range.from, range.to, GRID[math.min(#s.ranges, #GRID)])
  end
  try_all(s, lists)
  for _ = 1, REFINEMENTS do
    local centre = best_of(s.rows)
    if centre == default then break end
    for k, range in ipairs(s.ranges) do
      lists[k] = around(range, lists[k], centre.options[range.name])
    end
    try_all(s, lists)
  end
  table.sort(s.rows, function(a, b)
    if a.cost ~= b.cost then return a.cost < b.cost end
    return a.place < b.place
  end)
  local best = s.rows[1]
  if best.cost == math.huge then error(s.refused or "the policy refused every setting", 0) end
  return { best = best, default = default, rows = s.rows, objective = s.objective,
    evaluations = #s.rows, policy = s.policy }
end

return setmetatable(M, { __call = search })
