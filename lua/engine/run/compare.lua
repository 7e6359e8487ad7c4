-- Compares several runs: the settings in which they differ, and their curves on one grid of steps.
-- There is a curve for each run, or the mean and spread of each group of runs.
--   local list = compare.open { "runs/a", "runs/b" }     list.notes: runs left out, and why
--   list[i].name, .path, .history, .settings     settings: { [name] = text }
--   list[i].label                                "a: seed=1": the run's name and how it differs
--   list.differ                                  the names of the settings that differ
--   local c = compare.read(list, { "loss", "scale" }, { points = 240, group = "policy" })
--   c.x, c.width, c.first, c.last, c.first_step, c.overflows     as in curves.read, over all runs
--   c.overflows_of.loss                          as c.overflows, over the runs that have a loss
--   c.curves[k].label, .group, .run              group: the group's runs, or nil if the curve is of
--                                                a single run, `run`
--   c.curves[k].column.loss                      the key of the curve's loss in c; nil: no loss
--   c[key].mean[i], .min[i], .max[i]             for a run, as in curves.read; for a group, as
--                                                M.band returns them
--   c.notes                                      lines that say what is left out, and why
-- Used by cli/options.lua, report/views.lua, report/report_compare.lua and report/contest.lua.
local curves = require "engine.run.curves"
local nearest = require "engine.base.nearest"
local show = require "engine.base.show"

local M = {}

-- ------------------------------------------------------------------ settings

-- Settings that name a run or its output. They do not count as differences.
local PLACES = { run = true, resume = true, log = true, tensorboard = true }
-- Facts of a run that count as settings even if the script has no setting of that name.
local FACTS = { "policy", "precision", "optimizer", "device", "ranks" }
-- The first settings in a label; all others follow in alphabetical order.
local FIRST = { "policy", "seed", "lr", "precision" }

local function settings_of(h)
  local settings, meta = h:config(), h:meta()
  for _, fact in ipairs(FACTS) do
    if (settings[fact] or "") == "" then settings[fact] = meta[fact] end
  end
  return settings
end

local function distinct(list, text_of)
  local seen, n = {}, 0
  for _, run in ipairs(list) do
    local text = text_of(run)
    if not seen[text] then seen[text], n = true, n + 1 end
  end
  return n
end

-- Returns a run's value of a setting as text, or "-" if the run has no value.
local function value_of(run, key)
  local value = run.settings[key]
  return value ~= nil and value ~= "" and tostring(value) or "-"
end
M.value_of = value_of

-- Returns the names of all settings of the runs, in the order in which labels show them.
local function keys_of(list)
  local known, rank = {}, {}
  for _, run in ipairs(list) do
    for key in pairs(run.settings) do known[key] = true end
  end
  for i, key in ipairs(FIRST) do rank[key] = i end
  local keys = nearest.keys(known)
  table.sort(keys, function(a, b)
    local first, second = rank[a] or #FIRST + 1, rank[b] or #FIRST + 1
    if first ~= second then return first < second end
    return a < b
  end)
  return keys
end

local MOST = 40            -- the most characters of a value in a label

-- Sets the labels: each run's name, its precision if the runs differ in it, and settings that tell
-- the runs apart. Chooses the setting that separates the most runs, and repeats this until no
-- further setting separates more.
local function add_labels(list)
  list.differ = {}
  for _, key in ipairs(keys_of(list)) do
    local values = distinct(list, function(run) return value_of(run, key) end)
    if not PLACES[key] and values > 1 then list.differ[#list.differ + 1] = key end
  end
  local apart, chosen, most = {}, {}, 1
  for _, run in ipairs(list) do apart[run] = "" end
  repeat
    local best
    for _, key in ipairs(list.differ) do
      local n = distinct(list, function(run) return apart[run] .. "\0" .. value_of(run, key) end)
      if n > most then best, most = key, n end
    end
    if best then
      chosen[best] = true
      for _, run in ipairs(list) do apart[run] = apart[run] .. "\0" .. value_of(run, best) end
    end
  until not best
  chosen.precision = true
  for _, run in ipairs(list) do
    local parts = {}
    for _, key in ipairs(list.differ) do
      if chosen[key] then parts[#parts + 1] = key .. "=" .. show.cut(value_of(run, key), MOST) end
    end
    run.label = run.name .. (#parts > 0 and ": " .. table.concat(parts, " ") or "")
  end
end

local function open_run(path)
  local folder = path:gsub("/history%.db$", "")
  local history = require("engine.run.history").open(path)
  return { path = path, folder = folder, name = folder:match("([^/]+)$") or folder,
    history = history, settings = settings_of(history) }
end

--- Opens runs. words: for each run, its name under runs/, its directory or its history file. A run
--- whose history cannot be read is left out, with a note. Raises an error if a run does not exist
--- or is named twice, or if no history can be read.
function M.open(words)
  local list, names, paths, problem = { notes = {} }, {}, {}, nil
  for _, word in ipairs(words) do
    local path = require("engine.run.runs").find(word):gsub("/+$", "")
    if paths[path] then error(("the run %s is named twice"):format(path), 0) end
    paths[path] = true
    local good, run = pcall(open_run, path)
    if good then list[#list + 1], names[run.name] = run, (names[run.name] or 0) + 1
    else
      problem = problem or run
      list.notes[#list.notes + 1] = ("%s is left out: %s"):format(word, tostring(run))
    end
  end
  if #list == 0 then error(problem, 0) end
  for _, run in ipairs(list) do
    if names[run.name] > 1 then run.name = run.folder end
  end
  add_labels(list)
  return list
end

-- ------------------------------------------------------------------ curves

--- Returns { mean, min, max }, the mean and the band of several curves on one grid of n columns.
--- Each curve is a table { mean = { ... } }. min and max of the result are one standard deviation
--- below and above its mean. With `log`, the mean and the deviation are geometric. A column has a
--- mean only if every curve has a value there (with `log`, a positive value). Thus a run that ends
--- early or diverges ends the mean instead of shifting it. The band of a single curve has no width.
function M.band(list, n, log)
  local put, back = function(x) return x end, function(x) return x end
  if log then
    put, back = function(x) return x and x > 0 and math.log(x) or nil end, math.exp
  end
  local result = { mean = {}, min = {}, max = {} }
  for i = 1, n do
    local sum, squares, count = 0, 0, 0
    for _, curve in ipairs(list) do
      local value = put(curve.mean[i])
      if value then sum, count = sum + value, count + 1 end
    end
    if count == #list then
      local mean = sum / count
      for _, curve in ipairs(list) do squares = squares + (put(curve.mean[i]) - mean) ^ 2 end
      local deviation = math.sqrt(squares / math.max(1, count - 1))
      result.mean[i], result.min[i], result.max[i] = back(mean), back(mean - deviation),
        back(mean + deviation)
    end
  end
  return result
end

-- Returns the groups of runs that have the same value of the setting `key`, in the order of their
-- first runs: { { group = runs, label } ... }. Raises an error if no run has the setting.
local function groups_of(list, key)
  local known, groups, by_value = false, {}, {}
  for _, run in ipairs(list) do known = known or run.settings[key] ~= nil end
  if not known then
    error(("no run has a setting '%s'%s; hint: a script records its settings with `config = cfg`" ..
      " in engine.trainer"):format(key, nearest.choices(key, keys_of(list), "settings")), 0)
  end
  for _, run in ipairs(list) do
    local value = value_of(run, key)
    if not by_value[value] then
      by_value[value] = { group = {} }
      groups[#groups + 1] = by_value[value]
    end
    table.insert(by_value[value].group, run)
  end
  for _, group in ipairs(groups) do
    group.label = ("%s=%s (%s)"):format(key, show.cut(value_of(group.group[1], key), MOST),
      show.counted(#group.group, "run"))
  end
  return groups
end

-- Returns a run's curve of the metric `name` on the grid of n columns from the step `start`. If
-- there is no curve, returns nil and the reason, and also true if reading the metric failed.
local function read_run(run, name, options, start, n)
  local good, c = pcall(curves.read, run.history, { name }, options)
  if not good then return nil, require("engine.base.ffi").without_line(c), true end
  local v, result, any = c[name], { mean = {}, min = {}, max = {}, overflows = {} }, false
  for i, step in ipairs(c.first_step) do
    local at = (step - start) / options.width + 1
    result.overflows[at] = c.overflows[i]
    if at <= n and v.mean[i] then
      result.mean[at], result.min[at], result.max[at], any = v.mean[i], v.min[i], v.max[i], true
    end
  end
  if not any then return nil, "it has no finite value" end
  return result
end

-- Returns the first and the last column in which any curve has a value.
local function extent(list, n)
  local first, last
  for i = 1, n do
    for _, curve in ipairs(list) do
      if curve.mean[i] then first, last = first or i, i end
    end
  end
  return first, last
end

-- Adds the note "BEFORE NAME AFTER", where NAME is a metric. If the same note exists for other
-- metrics, adds the name to it.
local function note(c, before, name, after)
  local key = before .. "\0" .. after
  local known = c.notes[key] or { at = #c.notes + 1, names = {} }
  known.names[#known.names + 1], c.notes[key] = name, known
  c.notes[known.at] = before .. table.concat(known.names, ", ") .. after
end

-- Adds the curves of the metric `name`. Raises an error if the metric cannot be read from any run.
-- options: { from, to, width } of curves.read; start: as in read_run; log: as in M.band.
local function add(c, list, name, options, start, log)
  local found, why, possible, n, overflows = {}, nil, false, #c.x, {}
  for i = 1, n do overflows[i] = 0 end
  for _, run in ipairs(list) do
    local curve, problem, impossible = read_run(run, name, options, start, n)
    found[run], possible = curve, possible or not impossible
    if problem then
      why = why or problem
      note(c, run.name .. " is left out of the plot of ", name, ": " .. problem)
    end
    for i = 1, curve and n or 0 do overflows[i] = overflows[i] + (curve.overflows[i] or 0) end
  end
  c.overflows_of[name] = overflows
  if not possible then error(("no run has %s: %s"):format(name, why), 0) end
  for k, curve in ipairs(c.curves) do
    local own = {}
    for _, run in ipairs(curve.group or { curve.run }) do own[#own + 1] = found[run] end
    if #own > 0 then
      local key = name .. " " .. k
      curve.column[name], c[key] = key, curve.group and M.band(own, n, log) or own[1]
      local first, last = extent({ c[key] }, n)
      local least, most = extent(own, n)
      if not first then note(c, curve.label .. ": its runs have no steps in common (", name, ")")
      elseif least < first or most > last then
        note(c, ("%s: its runs have the steps %s to %s in common ("):format(curve.label,
          show.grouped(c.first_step[first]),
          show.grouped(math.min(c.first_step[last] + c.width - 1, c.last))), name, ")")
      end
    end
  end
end

--- Reads the curves of the metrics `names`; the top of the file describes the result. options:
--- from, to (steps), points (the most columns; 240 by default), group (a setting), log (as in
--- history:plot; with a logarithmic axis, a group's mean is geometric).
function M.read(list, names, options)
  local c = { x = {}, first_step = {}, overflows = {}, overflows_of = {}, width = 1, curves = {},
    notes = { unpack(list.notes) } }
  for _, name in ipairs(names) do curves.metric(name, list[1].history) end
  local with_steps, readable = {}, {}
  local function leave_out(run, why)
    c.notes[#c.notes + 1] = ("%s is left out: %s"):format(run.name, why)
  end
  for _, run in ipairs(list) do
    local good, first, last = pcall(run.history.range, run.history, options.from, options.to)
    if good and first and first <= last then
      with_steps[#with_steps + 1] = run
      c.first, c.last = math.min(c.first or first, first), math.max(c.last or last, last)
    else
      leave_out(run, good and "it has no steps to draw" or first)
    end
  end
  if not c.first then return c end
  c.width = curves.width(c.first, c.last, options.points)
  local start = c.first - c.first % c.width
  for step = start, c.last, c.width do
    local i = #c.x + 1
    c.first_step[i], c.overflows[i] = step, 0
    c.x[i] = (step + math.min(step + c.width - 1, c.last)) / 2
  end
  -- up to c.last, because a live run may have written more steps since
  local part = { from = options.from, to = c.last, width = c.width }
  for _, run in ipairs(with_steps) do
    local good, own = pcall(curves.read, run.history, {}, part)
    if good then readable[#readable + 1] = run else leave_out(run, own) end
    for i, step in ipairs(good and own.first_step or {}) do
      local at = (step - start) / c.width + 1
      c.overflows[at] = c.overflows[at] + own.overflows[i]
    end
  end
  c.curves = options.group and groups_of(readable, options.group) or {}
  for i, run in ipairs(options.group and {} or readable) do
    c.curves[i] = { label = run.label, run = run }
  end
  for _, curve in ipairs(c.curves) do curve.column = {} end
  for _, name in ipairs(names) do
    add(c, readable, name, part, start, curves.log_of(curves.metric(name), options.log))
  end
  return c
end

return M
