-- Numbers of a run over its steps, at the resolution of a picture: the least, largest and mean
-- value of each column. A run of a million steps costs no more than its blocks:
-- core/store/history_writer.c sums 256 consecutive steps into a row of `blocks`. Only the newest
-- steps, and numbers that blocks lack, are read from `steps`, with a query for each column.
--   local c = curves.read(history, { "loss", "scale" }, { points = 120, from = 0, to = 9999 })
--   c.x[i], c.width                          the middle of column i, and steps in a column
--   c.rows[i], c.overflows[i], c.skipped[i]  rows, overflows, steps without update in column i
--   c.loss.min[i], .max[i], .mean[i]         nil if no value of the column is finite
-- Used by history.lua, the reports and the exports.
local nearest = require "engine.base.nearest"

local M = {}

local BLOCK = 256                    -- steps, as in core/store/history.h

-- What can be drawn: its SQL, whether blocks hold it (`summed`), the base of its logarithmic axis,
-- and its title.
local METRICS = {
  { "loss", sql = "loss", summed = true, title = "loss" },
  { "scale", sql = "scale", summed = true, log = 2, title = "loss scale" },
  { "lr", sql = "lr", summed = true, title = "learning rate" },
  { "amax", sql = "amax", summed = true, log = 10, title = "largest gradient" },
  { "stored", sql = "amax * scale", summed = true, log = 2,
    title = "largest gradient as stored (times the scale)" },
  { "norm", sql = "norm", summed = true, log = 10, title = "gradient norm" },
  { "underflow", sql = "1.0 * underflow / count", summed = true, log = 10,
    title = "share of gradients below the smallest normal number" },
  { "zeros", sql = "1.0 * zeros / count", summed = true, log = 10,
    title = "share of gradients that are zero" },
  { "next_scale", finite = true, sql = "next_scale", log = 2, title = "loss scale decided" },
  { "norm_ref", sql = "norm_ref", log = 10, title = "gradient norm in f32" },
  { "inf", finite = true, sql = "inf", title = "infinite gradients" },
  { "nan", finite = true, sql = "nan", title = "gradients that are not a number" },
  { "clip", sql = "clip", title = "norm to clip at" },
  { "lr_mul", finite = true, sql = "lr_mul", title = "factor on the learning rate" },
  { "tokens", finite = true, sql = "tokens", title = "tokens a step" },
  { "elapsed", finite = true, sql = "elapsed", title = "seconds into the run" },
}
local by_name, names = {}, {}
for i, metric in ipairs(METRICS) do
  by_name[metric[1]], names[i] = metric, metric[1]
end
M.names = names

-- A signal's value at each step: a row of `signals` holds until the next.
local SIGNAL = "(SELECT value FROM signals g WHERE g.name = '%s' AND g.step <= steps.step ORDER " ..
  "BY g.step DESC LIMIT 1)"

--- { sql, title, log } of a number by its name; raises with the nearest name. "signals.NAME" is the
--- signal NAME of the script.
function M.metric(name)
  if by_name[name] then return by_name[name] end
  local signal = type(name) == "string" and name:match("^signals%.(.+)$")
  if signal then
    return { name, sql = SIGNAL:format((signal:gsub("'", "''"))), signal = signal,
      title = "signal " .. signal }
  end
  error(("no number of the history is called '%s'%s"):format(tostring(name),
    nearest.choices(name, names, "numbers")), 0)
end

--- The base of a number's axis, or nil for a linear one. log: true, false, a base, or nil for the
--- number's own.
function M.log_of(metric, log)
  if log == nil then return metric.log end
  if log == true then return metric.log or 10 end
  return log or nil
end

--- The columns of a picture that hold overflows: their x, and the number of overflows.
function M.marks(c)
  local marks, count = {}, 0
  for i, n in ipairs(c.overflows) do
    if n > 0 then marks[#marks + 1], count = c.x[i], count + n end
  end
  return marks, count
end

-- Raises if the run has no such signal.
local function need_signal(h, name)
  local known = {}
  for i, signal in ipairs(h:signals()) do
    known[i] = signal.name
    if signal.name == name then return end
  end
  error(("the run published no signal '%s'%s"):format(name,
    #known == 0 and "; engine.signal(name, value) publishes one"
    or nearest.choices(name, known, "signals")), 0)
end

-- The first step without a block.
local function blocks_end(h)
  if not h:has "blocks" then return 0 end
  local last = h:query("SELECT block FROM blocks ORDER BY block DESC LIMIT 1")[1]
  return ((last and last.block or -1) + 1) * BLOCK
end

-- The row of a query that gives one, read to its end: an unfinished query holds its connection.
local function only(following)
  local row = following()
  following()
  return row
end

local TOTALS = [[sum(overflow) AS overflows, sum(action <> 'step') AS skipped,
    sum(policy_failed) AS failed, sum(tokens) AS tokens,
  max(elapsed) AS seconds FROM steps]]

--- Totals of the run: { rows, first, last, overflows, skipped, failed, tokens, seconds }; rows is 0
--- without steps.
function M.totals(h)
  local done = blocks_end(h)
  local a = done > 0 and only(h:numbers({}, [[SELECT sum(rows) AS rows, min(first) AS first,
      max(last) AS last, sum(overflows) AS overflows,
    sum(skipped) AS skipped, sum(failed) AS failed, sum(tokens) AS tokens, max(seconds) AS seconds
        FROM blocks]])) or {}
  local b = only(h:numbers({}, "SELECT count(*) AS rows, min(step) AS first, max(step) AS last, "
    .. TOTALS .. " WHERE step >= ?", done))
  local sum = { first = a.first or b.first, last = b.last or a.last,
    seconds = math.max(a.seconds or 0, b.seconds or 0) }
  for _, key in ipairs { "rows", "overflows", "skipped", "failed", "tokens" } do
    sum[key] = (a[key] or 0) + (b[key] or 0)
  end
  return sum
end

-- SQL of a number where it is finite; `finite` marks numbers that always are, which is faster.
local function finite(metric)
  return metric.finite and metric.sql or ("nullif(nullif(%s, 9e999), -9e999)"):format(metric.sql)
end

-- SQL that sums a column of steps under the names that a block uses. `counts`: also overflows,
-- skipped steps and so on.
local function direct_sql(wanted, counts)
  local parts = { "SELECT count(*) AS rows" .. (counts and ", " .. TOTALS:gsub(" FROM steps$", "")
    or "") }
  for i, metric in ipairs(wanted) do
    local f = finite(metric)
    parts[#parts + 1] = (", count(%s) AS n%d, min(%s) AS low%d, max(%s) AS high%d, total(%s) AS " ..
      "sum%d"):format(f, i, f, i, f, i, f, i)
  end
  parts[#parts + 1] = " FROM steps WHERE step >= ? AND step < ?"
  return table.concat(parts)
end

-- The same for many blocks, by picture column.
local function blocks_sql(wanted)
  local parts = { [[SELECT (block - ?) / ? AS at, sum(rows) AS rows, sum(overflows) AS overflows,
      sum(skipped) AS skipped, sum(failed) AS failed,
    sum(tokens) AS tokens, max(seconds) AS seconds]] }
  for i, metric in ipairs(wanted) do
    local n = metric[1]
    parts[#parts + 1] = (", sum(%s_n) AS n%d, min(%s_min) AS low%d, max(%s_max) AS high%d, " ..
      "sum(%s_sum) AS sum%d"):format(n, i, n, i, n, i, n, i)
  end
  parts[#parts + 1] = " FROM blocks WHERE block >= ? AND block < ? GROUP BY at"
  return table.concat(parts)
end

local function merge(cell, row, wanted)
  cell.rows = (cell.rows or 0) + row.rows
  for _, key in ipairs { "overflows", "skipped", "failed", "tokens" } do
    cell[key] = (cell[key] or 0) + (row[key] or 0)
  end
  cell.seconds = math.max(cell.seconds or 0, row.seconds or 0)
  for i, metric in ipairs(wanted) do
    if (row["n" .. i] or 0) > 0 and row["low" .. i] and row["high" .. i] then
      local v = cell[metric[1]] or { n = 0, sum = 0, min = math.huge, max = -math.huge }
      v.n, v.sum = v.n + row["n" .. i], v.sum + row["sum" .. i]
      v.min, v.max = math.min(v.min, row["low" .. i]), math.max(v.max, row["high" .. i])
      cell[metric[1]] = v
    end
  end
end

-- Fills the cells of picture columns 0 .. n - 1 of `width` steps from `start`; steps before `done`
-- have blocks.
local function fill(h, cells, wanted, start, width, n, last, done, counts)
  local by_blocks = width % BLOCK == 0 and start % BLOCK == 0 and math.min(done, last + 1) or start
  if by_blocks > start then
    local first = start / BLOCK
    for row in h:numbers({ "at", "rows" }, blocks_sql(wanted), first, width / BLOCK, first,
      math.ceil(by_blocks / BLOCK)) do
      if row.at < n then
        cells[row.at] = cells[row.at] or {}
        merge(cells[row.at], row, wanted)
      end
    end
  end
  local sql = direct_sql(wanted, counts)
  for at = math.floor((by_blocks - start) / width), n - 1 do
    local from = math.max(start + at * width, by_blocks)
    local row = only(h:numbers({}, sql, from, math.min(start + (at + 1) * width, last + 1)))
    if row.rows > 0 then
      cells[at] = cells[at] or {}
      merge(cells[at], row, wanted)
    end
  end
end

--- See the top of the file. options: from, to (steps; default: the whole run), points (240: most
--- columns). If a column is wider than a block, columns begin at multiples of 256 steps, so the
--- first may begin a little before `from`.
function M.read(h, wanted_names, options)
  options = options or {}
  local summed, other = {}, {}
  for _, name in ipairs(wanted_names) do
    local metric = M.metric(name)
    if metric.signal then need_signal(h, metric.signal) end
    table.insert(metric.summed and summed or other, metric)
  end
  local result = { names = wanted_names, x = {}, first_step = {}, width = 1, rows = {},
    overflows = {}, skipped = {}, failed = {}, tokens = {}, seconds = {} }
  for _, name in ipairs(wanted_names) do
    result[name] = { min = {}, max = {}, mean = {}, n = {} }
  end
  local first, last = h:range(options.from, options.to)
  if not first then return result end
  if first > last then return result end
  local done = blocks_end(h)
  local width, start = math.max(1, math.ceil((last - first + 1) / (options.points or 240))), first
  if width > BLOCK and done > first then
    width, start = math.ceil(width / BLOCK) * BLOCK, first - first % BLOCK
  end
  local n = math.ceil((last + 1 - start) / width)
  local cells, more = {}, {}
  fill(h, cells, summed, start, width, n, last, done, true)
  if #other > 0 then fill(h, more, other, start, width, n, last, 0, false) end
  result.width, result.first, result.last = width, first, last
  if width > 1 then
    local tail = M.read(h, wanted_names, { from = last, to = last })
    for _, name in ipairs(wanted_names) do result[name].at_end = tail[name].mean[1] end
  end
  for at = 0, n - 1 do
    local cell = cells[at]
    if cell then
      local i = #result.x + 1
      result.first_step[i] = start + at * width
      result.x[i] = (result.first_step[i] + math.min(result.first_step[i] + width - 1, last)) / 2
      for _, key in ipairs { "rows", "overflows", "skipped", "failed", "tokens", "seconds" } do
        result[key][i] = cell[key]
      end
      for _, name in ipairs(wanted_names) do
        local v, to = cell[name] or (more[at] and more[at][name]), result[name]
        if v then to.min[i], to.max[i], to.mean[i], to.n[i] = v.min, v.max, v.sum / v.n, v.n end
      end
    end
  end
  return result
end

return M
