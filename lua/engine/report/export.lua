-- A recorded run in the formats of other tools: CSV and JSON Lines with a line for each row of the
-- history, and TensorBoard's event files. A step has a row for each of its attempts. Called by
-- `engine export`; contest.lua uses its CSV writing.
local files = require "engine.base.file"
local json = require "engine.base.json"
local show = require "engine.base.show"
local history = require "engine.run.history"

local M = {}

local COLUMNS = history.step_columns

-- Calls visit(row, signals) for each row, oldest first. row.first_bad is a parameter's name, its id
-- if the history lacks the name, or nil. signals: the current value of each signal and, as
-- "log.NAME", of each number that the policy has logged. Returns the number of rows.
local function each_step(h, visit)
  local sql = "SELECT " .. h:columns(history.step_names, "s."):gsub("s.first_bad",
    "coalesce(p.name, nullif(s.first_bad, -1)) AS first_bad") ..
    " FROM steps s LEFT JOIN parameters p ON p.id = s.first_bad ORDER BY s.step, s.attempt"
  local n, signals_at = 0, h:signals_at()
  for row in h:each(sql) do
    visit(row, signals_at(row.step))
    n = n + 1
  end
  return n
end

-- The meters of FP8 layers that go into a file: all except `count` and the meters for replays.
local METERS = { unpack(history.meters, 1, 8) }

-- Returns the names "layer:role" of FP8 meters in the model's order, and a function(step) that
-- returns { [name] = row }, or nil for a step without meters.
local function fp8_of(h)
  if not h:has "fp8" then return {}, function() end end
  local names, looked = {}, {}
  for r in h:each([[SELECT site, role, (SELECT id FROM parameters p
      WHERE p.name = site || '.weight') AS place FROM fp8
    GROUP BY site, role ORDER BY place, site, role]]) do
    names[#names + 1] = r.site .. ":" .. r.role
  end
  for r in h:each("SELECT DISTINCT step FROM fp8") do looked[r.step] = true end
  return names, function(step)
    if not looked[step] then return nil end
    local rows = {}
    for _, r in ipairs(h:fp8(nil, step)) do rows[r.site .. ":" .. r.role] = r end
    return rows
  end
end

local function csv_text(text)
  text = show.shown(text, true)
  return text:find('[,"\r\n]') and '"' .. text:gsub('"', '""') .. '"' or text
end
M.csv_text = csv_text

--- Writes CSV (RFC 4180): a header and a line for each row. nan, inf and -inf are spelled as
--- Python and pandas read them; a missing value is empty. A signal has the column signals.NAME, a
--- number that the policy logs the column log.NAME, and a meter of an FP8 layer the column
--- fp8.LAYER:ROLE.NAME, filled at measured steps. Returns the number of rows.
function M.csv(h, path)
  return files.write(path, function(put)
    local names = {}
    for i, column in ipairs(COLUMNS) do names[i] = column[1] end
    local signals = h:signals()
    for _, signal in ipairs(signals) do names[#names + 1] = csv_text("signals." .. signal.name) end
    for _, log in ipairs(h:logs()) do
      signals[#signals + 1], names[#names + 1] = log, csv_text(log.name)
    end
    local sites, meters_at = fp8_of(h)
    for _, site in ipairs(sites) do
      for _, meter in ipairs(METERS) do
        names[#names + 1] = csv_text(("fp8.%s.%s"):format(site, meter))
      end
    end
    put(table.concat(names, ",") .. "\n")
    return each_step(h, function(row, held)
      local cells = {}
      for i, column in ipairs(COLUMNS) do
        local value, none = row[column[1]], column[2]
        if value == nil then cells[i] = none ~= none and "nan" or ""
        elseif type(value) == "number" then cells[i] = show.exact(value)
        else cells[i] = csv_text(tostring(value)) end
      end
      for _, signal in ipairs(signals) do
        cells[#cells + 1] = held[signal.name] and show.exact(held[signal.name]) or ""
      end
      local by_site = meters_at(row.step) or {}
      for _, site in ipairs(sites) do
        local measured = by_site[site] or {}
        for _, meter in ipairs(METERS) do
          cells[#cells + 1] = measured[meter] and show.exact(measured[meter]) or ""
        end
      end
      put(table.concat(cells, ",") .. "\n")
    end)
  end)
end

--- Writes JSON Lines: an object for each row. Infinities and NaN are strings, as in log=json; a
--- missing value is null. "signals" holds the script's current signals, if any; "log" the numbers
--- that the policy has logged; "fp8" the meters of a measured step, by "layer:role". Returns the
--- number of rows.
function M.jsonl(h, path)
  local _, meters_at = fp8_of(h)
  return files.write(path, function(put)
    return each_step(h, function(row, held)
      local fields, signals, logs, fp8 = {}, {}, {}, {}
      for i, column in ipairs(COLUMNS) do
        local value, none = row[column[1]], column[2]
        if value == nil and none ~= none then value = none
        elseif value ~= nil and none == false then value = value ~= 0 end
        fields[i] = { column[1], value }
      end
      for name, value in pairs(held) do
        local log = name:match("^log%.(.*)")
        if log then logs[log] = value else signals[name] = value end
      end
      for site, measured in pairs(meters_at(row.step) or {}) do
        fp8[site] = {}
        for _, meter in ipairs(METERS) do fp8[site][meter] = measured[meter] or json.null end
      end
      for _, part in ipairs { { "signals", signals }, { "log", logs }, { "fp8", fp8 } } do
        if next(part[2]) then fields[#fields + 1] = part end
      end
      put(json.ordered(fields) .. "\n")
    end)
  end)
end

local HISTOGRAMS = 200           -- columns for layers.each, which visits up to four steps of each

--- Writes event files for TensorBoard. They hold the numbers of each step (with options.every = n,
--- of every n-th step and of all overflows), histograms of the layers' stored gradients for some of
--- the steps with statistics, and policies, settings and the first 1000 events (no overflows and
--- checkpoints) as text. Returns the number of steps and the path.
function M.tensorboard(h, dir, options)
  local every = options and options.every or 1
  local tensorboard, layers = require "engine.run.tensorboard", require "engine.report.layers"
  local began = require("engine.run.runs").info(h.path, h).created or 0
  local w = tensorboard.open(dir, began)
  local before, n = nil, 0
  local _, meters_at = fp8_of(h)
  each_step(h, function(row, held)
    local seconds = row.elapsed and before and row.elapsed - before or 0
    before = row.elapsed
    if row.step % every ~= 0 and row.overflow == 0 then return end
    n = n + 1
    row.skipped, row.seconds = row.action ~= "step", seconds
    local values = tensorboard.step_values(row, held)
    for name, measured in pairs(meters_at(row.step) or {}) do
      for _, meter in ipairs { "snr", "underflow", "overflow" } do
        values[#values + 1] = { ("fp8_%s/%s"):format(meter, name:gsub(":", " ")), measured[meter] }
      end
    end
    w:scalars(row.step, values, began + (row.elapsed or 0))
  end)
  local layer_of, names = layers.rows(h, {})
  layers.each(h, HISTOGRAMS, function(step, stats, count)
    w:layers(step, tensorboard.layer_sums(stats, count, layer_of), names, began)
  end)
  for _, policy in ipairs(h:policies()) do
    w:text(0, ("policy/%s %s"):format(policy.name, policy.hash),
      (("\n" .. policy.source):gsub("\n", "\n    ")), began)
  end
  local lines = { "| setting | value |", "| --- | --- |" }
  for _, setting in ipairs(h:query("SELECT key, value FROM config ORDER BY key")) do
    lines[#lines + 1] = ("| %s | %s |"):format(setting.key,
      (tostring(setting.value):gsub("[|\n]", " ")))
  end
  if #lines > 2 then w:text(0, "settings", table.concat(lines, "\n"), began) end
  for _, event in ipairs(h:query(
    [[SELECT step, time, kind, text FROM events
    WHERE kind NOT IN ('overflow', 'checkpoint') ORDER BY id LIMIT 1000]])) do
    w:text(event.step, "events/" .. event.kind, event.text or "", event.time)
  end
  local path = w.path
  w:close()
  if w.trouble then error(w.trouble, 0) end
  return n, path
end

return M
