-- Searches the options of a policy on recorded runs: replays the runs with each setting and keeps
-- the setting that loses least. First a grid over the ranges, then three times a finer grid around
-- the best. Deterministic; trains nothing.
--   local best = engine.tune { runs = { "runs/a" }, policy = "dynamic",
--     over = { "growth_interval=100..5000" } }
-- The subcommand is cli/tune.lua.
local expression = require "engine.base.expression"
local nearest = require "engine.base.nearest"
local show = require "engine.base.show"
local replay = require "engine.run.replay"

local C = require("engine.base.ffi").C

local M = {}

--- What "lost" means for each objective.
M.objectives = {
  elements = "share of gradient elements lost to underflow; a step without an update loses all",
  mass = "share of gradient mass lost to underflow; a step without an update loses all",
  skipped = "share of steps without an update",
}

local GRID = { 17, 7, 5, 4, 3 }   -- grid points for each range, by the number of ranges
local REFINEMENTS, FINER = 3, 5

-- Reads a range: "growth_interval=100..5000" -> { name, from, to, log, whole } or { name, values }.
local function read_range(text, policy)
  local name, range = text:match("^([%a_][%w_]*)=(.+)$")
  if not name then error(("over '%s': expected name=from..to or name=a,b,c"):format(text), 0) end
  local preset = policy.defaults[name]
  if preset == nil then
    error(("policy '%s' has no option '%s'%s"):format(policy.name, name,
      nearest.hint(name, policy.option_names)), 0)
  end
  local from_text, to_text = range:match("^(.-)%.%.(.+)$")
  if not from_text then
    local values = {}
    for word in range:gmatch("[^,]+") do
      local value = type(preset) == "number" and expression(word) or word
      if type(preset) == "number" and type(value) ~= "number" then
        error(("over '%s': expected numbers, such as %s=100..5000 or %s=1,2,4, got '%s'"):format(
          text, name, name, word), 0)
      end
      values[#values + 1] = value
    end
    if #values == 0 then
      error(("over '%s': expected name=from..to or name=a,b,c"):format(text), 0)
    end
    return { name = name, values = values }
  end
  local from, to = expression(from_text), expression(to_text)
  if type(preset) ~= "number" then
    error(("over '%s': %s is a %s; expected values, such as %s=a,b"):format(text, name,
      type(preset), name), 0)
  end
  if not from or not to or not (from < to) or to == math.huge or from == -math.huge then
    error(("over '%s': expected two numbers, the smaller one first, such as 100..5000"):format(
      text), 0)
  end
  -- A factor such as 0.5 is not a count, even if its range has whole ends.
  local whole = preset % 1 == 0 and from % 1 == 0 and to % 1 == 0
  -- Loss scales are usually powers of two: a range between two powers steps by powers.
  local function is_power(x) return x > 0 and math.frexp(x) == 0.5 end
  local powers = is_power(from) and is_power(to) and preset > 0 and math.frexp(preset) == 0.5
    and name:find("scal")
  return { name = name, from = from, to = to, log = from > 0, whole = whole and not powers,
    powers = powers ~= nil and powers ~= false }
end

-- n points from a to b, spaced as the range asks, without repetitions.
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

-- Calls f with every combination, as { name = value }.
local function each_setting(ranges, lists, f)
  local setting = {}
  local function go(k)
    if k > #ranges then return f(setting) end
    for _, value in ipairs(lists[k]) do
      setting[ranges[k].name] = value
      go(k + 1)
    end
  end
  go(1)
end

local function value_text(value)
  return type(value) == "number" and show.exact(value) or tostring(value)
end

--- Searches. Options:
---   runs        traces, or strings for engine.replay.trace
---   policy      name or path; options: fixed settings
---   over        list of "name=from..to" and "name=a,b,c"
---   objective   "elements" (the default), "mass" or "skipped", as in engine.tune.objectives
--- Returns { best = row, default = row, rows = all, best first, objective =, evaluations = }. A row
--- has `options` (the searched ones), `cost`, `skipped`, `steps`, `underflow`, `stopped`. Among
--- equal costs the first one tried wins.
local function search(o)
  local objective = o.objective or "elements"
  if not M.objectives[objective] then
    error(("there is no objective '%s'%s"):format(tostring(objective),
      nearest.choices(objective, M.objectives, "objectives")), 0)
  end
  local traces = {}
  for i, run in ipairs(o.runs) do
    traces[i] = type(run) == "string" and replay.trace(run) or run
    if not traces[i].names and objective ~= "skipped" then
      error(("'%s' has verdicts and no gradients; its only objective is --objective " ..
        "skipped"):format(traces[i].name), 0)
    end
  end
  if #traces == 0 then error("expected at least one run", 0) end
  local fixed = o.options or {}
  local loaded, policy = pcall(require("engine.policy.policy").load, o.policy, fixed)
  if not loaded then error(policy, 0) end
  local ranges = {}
  for i, text in ipairs(o.over or {}) do ranges[i] = read_range(text, policy) end
  if #ranges == 0 then error("expected a range: over name=from..to", 0) end
  if #ranges > 6 then error("expected up to 6 ranges, got " .. #ranges, 0) end

  local rows, seen, refused = {}, {}, nil
  local function evaluate(setting)
    local options, words = {}, {}
    for name, value in pairs(fixed) do options[name] = value end
    for _, range in ipairs(ranges) do
      local value = setting[range.name]
      if value ~= nil then
        options[range.name] = value
        words[#words + 1] = range.name .. "=" .. value_text(value)
      end
    end
    local key = table.concat(words, ",")
    if seen[key] then return seen[key] end
    local row = { options = {}, text = key, cost = 0, skipped = 0, steps = 0, underflow = 0,
      mass_lost = 0, place = #rows + 1 }
    for name, value in pairs(setting) do row.options[name] = value end
    local total = 0
    for _, trace in ipairs(traces) do
      local good, r = pcall(replay.run, trace, o.policy, options)
      if not good and C.eng_interrupted() ~= 0 then error(r, 0) end
      if good and r.failures == r.steps then
        good, r = false, ("%s failed at every step: %s"):format(r.name, r.failure)
      end
      if not good then
        refused = refused or r
        row.cost = math.huge                               -- the policy refuses this combination
        break
      end
      total = total + trace.n
      row.cost = row.cost + r.costs[objective] * trace.n
      row.skipped, row.steps = row.skipped + r.skipped, row.steps + r.steps
      row.underflow, row.mass_lost = row.underflow + (r.underflow or 0) * trace.n,
        row.mass_lost + (r.mass_lost or 0) * trace.n
      if r.stopped_at then row.stopped = true end
    end
    if row.cost < math.huge then
      row.cost, row.underflow, row.mass_lost = row.cost / total, row.underflow / total,
        row.mass_lost / total
    end
    rows[#rows + 1], seen[key] = row, row
    return row
  end

  local function best()
    local found
    for _, row in ipairs(rows) do
      if not found or row.cost < found.cost then found = row end
    end
    return found
  end

  local default = evaluate {}
  local lists = {}
  for k, range in ipairs(ranges) do
    lists[k] = points(range, range.from, range.to, GRID[math.min(#ranges, #GRID)])
  end
  each_setting(ranges, lists, evaluate)
  for _ = 1, REFINEMENTS do
    local centre = best()
    if centre == default then break end
    local finer = {}
    for k, range in ipairs(ranges) do
      local list, value, at = lists[k], centre.options[range.name], 1
      for i, x in ipairs(list) do
        if x == value then at = i end
      end
      if range.values then finer[k] = { value }
      else
        finer[k] = points(range, list[math.max(1, at - 1)], list[math.min(#list, at + 1)], FINER)
      end
    end
    each_setting(ranges, finer, evaluate)
    lists = finer
  end
  if best().cost == math.huge then error(refused or "the policy refused every setting", 0) end

  table.sort(rows, function(a, b)
    if a.cost ~= b.cost then return a.cost < b.cost end
    return a.place < b.place
  end)
  return { best = rows[1], default = default, rows = rows, objective = objective,
    evaluations = #rows, policy = policy }
end

return setmetatable(M, { __call = function(_, o)
  local good, result = pcall(search, o)
  if not good then error(result, 0) end
  return result
end })
