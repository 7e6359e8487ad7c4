-- Reads the metrics of a run at the resolution of a picture: the least, largest and mean value in
-- each column of the picture. Reading a long run is fast, because core/store/history_writer.c sums
-- 256 consecutive steps into a block, a row of the table `blocks`. Columns that do not consist of
-- whole blocks, the newest steps, and metrics that blocks lack are read from the table `steps`,
-- with a query for each column.
--   local c = curves.read(history, { "loss", "scale" }, { points = 120, from = 0, to = 9999 })
--   c.first, c.last                          the first and the last step
--   c.x[i], c.first_step[i], c.width         the middle and the first step of column i; how many
--                                            steps a column has
--   c.rows[i], c.overflows[i], c.skipped[i]  rows, overflows, steps without update in column i
--   c.loss.min[i], .max[i], .mean[i]         nil if no value of the column is finite
--   c.loss.at_end                            the value at the last step; nil if it is not finite,
--                                            or if c.width is 1
-- Used by history.lua, compare.lua, contest.lua, the pictures, the reports, the reference and the
-- commands.
local M_ffi = require "engine.base.ffi"
local nearest = require "engine.base.nearest"

local C, raise, fail_if = M_ffi.C, M_ffi.raise, M_ffi.fail_if

local M = {}

local BLOCK = C.ENG_HISTORY_BLOCK   -- how many steps a block has

-- The metrics that can be drawn: name, SQL, whether blocks hold the metric (`summed`), whether only
-- some steps have it (`sparse`), whether its line breaks at steps without it instead of spanning
-- them (`apart`), whether it is always finite (`finite`), the base of its logarithmic axis (`log`),
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
  { "next_scale", finite = true, sql = "next_scale", log = 2, title = "next loss scale" },
  { "norm_ref", sql = "norm_ref", sparse = true, log = 10, title = "gradient norm in f32" },
  { "inf", finite = true, sql = "inf", title = "infinite gradients" },
  { "nan", finite = true, sql = "nan", title = "gradients that are not a number" },
  { "clip", sql = "nullif(clip, 0)", sparse = true, apart = true,               -- 0: no limit
    title = "limit that the policy set on the gradient norm" },
  { "lr_mul", finite = true, sql = "lr_mul", title = "factor on the learning rate" },
  { "tokens", finite = true, sql = "tokens", title = "tokens a step" },
  { "elapsed", finite = true, sql = "elapsed", title = "seconds into the run" },
}
local by_name, names = {}, {}
for i, metric in ipairs(METRICS) do by_name[metric[1]], names[i] = metric, metric[1] end

-- SQL for a signal's value at a step. A row of `signals` holds until the signal's next row.
local SIGNAL = "(SELECT value FROM signals g WHERE g.name = '%s' AND g.step <= steps.step ORDER " ..
  "BY g.step DESC LIMIT 1)"

-- The meters of FP8 layers that can be drawn: SQL for the worst value of all tensors at a step, and
-- what the worst and a single value are, for titles.
local METERS = {
  snr = { "min(snr)", "lowest SNR of the FP8 tensors, in dB", "SNR of %s, in dB" },
  underflow = { "max(underflow)", "largest share of an FP8 tensor that underflows",
    "share of %s that underflows" },
  overflow = { "max(overflow)", "largest share of an FP8 tensor that overflows",
    "share of %s that overflows" },
}

-- Returns the FP8 tensors of a history as a list of "SITE:ROLE".
local function fp8_tensors(h)
  local list = {}
  for row in h:has "fp8" and h:each "SELECT DISTINCT site, role FROM fp8" or function() end do
    list[#list + 1] = ("%s:%s"):format(row.site, row.role)
  end
  return list
end

-- Returns the layers of a history, which are the groups of its parameters.
local function layers_of(h)
  return (select(3, require("engine.policy.groups").of(h:parameters())))
end

--- Returns the names of all metrics of a history, including its signals, logs, layers' scales and
--- FP8 meters. Without a history, returns the names of those that any run may have.
function M.columns(h)
  local known = { unpack(names) }
  for _, published in ipairs(h and h:signals() or {}) do
    known[#known + 1] = "signals." .. published.name
  end
  for _, log in ipairs(h and h:logs() or {}) do known[#known + 1] = log.name end
  for _, layer in ipairs(h and layers_of(h) or {}) do known[#known + 1] = "scales." .. layer end
  local tensors = h and fp8_tensors(h)
  for _, meter in ipairs((not h or #tensors > 0) and nearest.keys(METERS) or {}) do
    known[#known + 1] = "fp8." .. meter
    for _, tensor in ipairs(tensors or {}) do
      known[#known + 1] = ("fp8.%s.%s"):format(tensor, meter)
    end
  end
  return known
end

--- Returns the metric called `name`: { sql, title, log }. An unknown name raises an error that
--- suggests the nearest one. "signals.NAME" is the script's signal NAME, "log.NAME" a number that
--- the policy logged, "scales.LAYER" a layer's own loss scale, "fp8.SITE:ROLE.METER" a meter of an
--- FP8 tensor, "fp8.METER" its worst value of all tensors. h: a history whose signals, logs, layers
--- and FP8 tensors the error also suggests, or nil.
function M.metric(name, h)
  if by_name[name] then return by_name[name] end
  local prefix, rest = tostring(name):match("^(%w+)%.(.+)$")
  if prefix == "scales" then
    return { name, layer = rest, sparse = true, log = 2, title = "loss scale of layer " .. rest }
  elseif prefix == "log" or prefix == "signals" then
    local signal = prefix == "log" and name or rest
    return { name, sql = SIGNAL:format((signal:gsub("'", "''"))), signal = signal,
      title = prefix == "log" and rest .. ", logged by the policy" or "signal " .. rest }
  end
  local site, role, meter = tostring(rest):match("^(.+):(.+)%.(%a+)$")
  if prefix == "fp8" and METERS[meter or rest] then
    local worst, worst_title, title = unpack(METERS[meter or rest])
    if not site then
      return { name, worst = rest, sql = worst, sparse = true, title = worst_title }
    end
    local tensor = site .. ":" .. role
    return { name, tensor = tensor, sparse = true, title = title:format(tensor),
      sql = ("(SELECT %s FROM fp8 f WHERE f.site = '%s' AND f.role = '%s' AND f.step = steps.step)")
        :format(meter, (site:gsub("'", "''")), (role:gsub("'", "''"))) }
  end
  local known, near = M.columns(h), name
  for i = #names + 1, #known do
    if known[i]:match("%.(.*)") == name then near = known[i] end     -- only its prefix is missing
  end
  raise("the history has no column '%s'%s", tostring(name),
    nearest.choices(near, known, "columns", "engine help plot"))
end

--- Returns the base of a metric's logarithmic axis, or nil if the axis is linear. log: a base, true
--- (the metric's own base, else 10), false (linear), or nil (the metric's default).
function M.log_of(metric, log)
  if log == nil then return metric.log end
  if log == true then return metric.log or 10 end
  return log or nil
end

--- Returns the least and the largest value of the curve c[name], or nil if it has no value.
function M.range(c, name)
  local low, high
  for i = 1, #c.x do
    local least, most = c[name].min[i], c[name].max[i]
    if least then low, high = math.min(low or least, least), math.max(high or most, most) end
  end
  return low, high
end

--- Returns the x of each column that has overflows, and the total number of overflows.
function M.marks(c)
  local marks, count = {}, 0
  for i, n in ipairs(c.overflows) do
    if n > 0 then marks[#marks + 1], count = c.x[i], count + n end
  end
  return marks, count
end

-- Raises an error unless the run has the signal or the log `name`.
local function need_signal(h, name)
  local known, logged = {}, name:find("^log%.")
  for i, signal in ipairs(logged and h:logs() or h:signals()) do
    known[i] = signal.name
    if signal.name == name then return end
  end
  raise("the run has no %s '%s'%s", logged and "log" or "signal", name,
    #known > 0 and nearest.choices(name, known, logged and "logs" or "signals")
    or logged and "; a policy's verdict may contain log = { name = number }"
    or "; engine.signal(name, value) publishes one")
end

-- Raises an error unless the run has meters of the FP8 tensor "SITE:ROLE" or, if `tensor` is nil,
-- of any.
local function need_meters(h, tensor)
  local known = fp8_tensors(h)
  for _, name in ipairs(known) do
    if name == (tensor or name) then return end
  end
  raise("the run has no FP8 meters%s%s", tensor and " of '" .. tensor .. "'" or "",
    #known > 0 and nearest.choices(tensor, known, "tensors", "history:fp8()")
    or "; hint: an FP8 recipe such as fp8_block records them every `sample` steps")
end

-- Adds n values of the metric `name`, given by their sum and range, to a picture column's cell.
local function gather(cell, name, n, sum, low, high)
  local v = cell[name] or { n = 0, sum = 0, min = math.huge, max = -math.huge }
  v.n, v.sum, v.min, v.max = v.n + n, v.sum + sum, math.min(v.min, low), math.max(v.max, high)
  cell[name] = v
end

local PER_COLUMN = 2                 -- how many rows of statistics are read for a picture column

-- Fills the cells of picture columns (as in fill) with a layer's own loss scale, which is read from
-- the steps that have statistics per tensor. A layer has the scale of its first tensor.
local function fill_layer(h, cells, metric, start, width, n, last)
  local layer, first = metric.layer, nil
  for _, p in ipairs(h:parameters()) do
    if p.name == layer or p.name:sub(1, #layer + 1) == layer .. "." then first = first or p.id end
  end
  if not first then
    raise("the run has no layer '%s'%s", layer, nearest.choices(layer, layers_of(h), "layers"))
  end
  for at = 0, n - 1 do
    local from = start + at * width
    for _, scale in h:layer_scales(first, from, math.min(from + width - 1, last), PER_COLUMN) do
      cells[at] = cells[at] or {}
      gather(cells[at], metric[1], 1, scale, scale, scale)
    end
  end
end

-- Returns the first step that is not in a block.
local function blocks_end(h)
  if not h:has "blocks" then return 0 end
  local last = h:query("SELECT block FROM blocks ORDER BY block DESC LIMIT 1")[1]
  return ((last and last.block or -1) + 1) * BLOCK
end

-- Returns the row of a query that has one row. Reads the query to its end, because an unfinished
-- query holds its connection.
local function only(following)
  local row = following()
  following()
  return row
end

-- The names of the counts, and the SQL that computes them from rows of `steps` and of `blocks`.
local COUNTS = { "rows", "overflows", "skipped" }
local STEP_COUNTS = "count(*) AS rows, sum(overflow) AS overflows, sum(action <> 'step') AS skipped"
local BLOCK_COUNTS = "sum(rows) AS rows, sum(overflows) AS overflows, sum(skipped) AS skipped"

--- Returns totals of the run: { rows, first, last, overflows, skipped, failed, tokens, seconds }.
--- Without steps, rows is 0.
function M.totals(h)
  local done = blocks_end(h)
  local a = done > 0 and only(h:numbers({}, "SELECT " .. BLOCK_COUNTS .. [[, min(first) AS first,
    max(last) AS last, sum(failed) AS failed, sum(tokens) AS tokens, max(seconds) AS seconds
    FROM blocks]])) or {}
  local b = only(h:numbers({}, "SELECT " .. STEP_COUNTS .. [[, min(step) AS first,
    max(step) AS last, sum(policy_failed) AS failed, sum(tokens) AS tokens,
    max(elapsed) AS seconds FROM steps WHERE step >= ?]], done))
  local sum = { first = a.first or b.first, last = b.last or a.last,
    seconds = math.max(a.seconds or 0, b.seconds or 0) }
  for _, key in ipairs { "rows", "overflows", "skipped", "failed", "tokens" } do
    sum[key] = (a[key] or 0) + (b[key] or 0)
    fail_if(not (sum[key] >= 0 and sum[key] < math.huge),
      "history %s is damaged: expected the column '%s' of its blocks to sum to 0 or more, got %g",
      h.path, key, sum[key])
  end
  return sum
end

-- Returns SQL that gives a metric where it is finite, and NULL elsewhere. A metric marked `finite`
-- needs no test, which is faster.
local function finite(metric)
  return metric.finite and metric.sql or ("nullif(nullif(%s, 9e999), -9e999)"):format(metric.sql)
end

-- Fills the cells of picture columns (as in fill) with the worst value of an FP8 meter at each
-- measured step. A step whose worst value is not finite has none. The column `most` makes
-- h:numbers find text, which sorts after numbers, in a damaged history.
local function fill_worst(h, cells, metric, start, width, n, last)
  local sql = ([[SELECT (step - ?) / ? AS at, count(v) AS n, total(v) AS sum, min(v) AS low,
    max(v) AS high, max(most) AS most FROM (SELECT step, %s AS v, max(%s) AS most FROM fp8
    WHERE step >= ? AND step <= ? GROUP BY step) GROUP BY at]]):format(finite(metric), metric.worst)
  for row in h:numbers({ "at", "n" }, sql, start, width, start, last) do
    if row.at < n and row.n > 0 then
      cells[row.at] = cells[row.at] or {}
      gather(cells[row.at], metric[1], row.n, row.sum, row.low, row.high)
    end
  end
end

-- Returns SQL that sums up the steps of one picture column. Its result columns have the same names
-- as those of blocks_sql. With `counts`, the SQL also counts overflows and skipped steps.
local function direct_sql(wanted, counts)
  local parts = { "SELECT " .. (counts and STEP_COUNTS or "count(*) AS rows") }
  for i, metric in ipairs(wanted) do
    local f = finite(metric)
    parts[#parts + 1] = (", count(%s) AS n%d, min(%s) AS low%d, max(%s) AS high%d, total(%s) AS " ..
      "sum%d"):format(f, i, f, i, f, i, f, i)
  end
  parts[#parts + 1] = " FROM steps WHERE step >= ? AND step < ?"
  return table.concat(parts)
end

-- Returns SQL that sums up many blocks in one query, with a row for each picture column.
local function blocks_sql(wanted)
  local parts = { "SELECT (block - ?) / ? AS at, " .. BLOCK_COUNTS }
  for i, metric in ipairs(wanted) do
    local n = metric[1]
    parts[#parts + 1] = (", sum(%s_n) AS n%d, min(%s_min) AS low%d, max(%s_max) AS high%d, " ..
      "sum(%s_sum) AS sum%d"):format(n, i, n, i, n, i, n, i)
  end
  parts[#parts + 1] = " FROM blocks WHERE block >= ? AND block < ? GROUP BY at"
  return table.concat(parts)
end

local function merge(cell, row, wanted)
  for _, key in ipairs(COUNTS) do cell[key] = (cell[key] or 0) + (row[key] or 0) end
  for i, metric in ipairs(wanted) do
    local n, low, high = row["n" .. i] or 0, row["low" .. i], row["high" .. i]
    if n > 0 and low and high then gather(cell, metric[1], n, row["sum" .. i], low, high) end
  end
end

-- Fills the cells of picture columns 0 .. n - 1, of `width` steps each, with the steps from `start`
-- to `last`. wanted: a list of metrics (M.metric). The table `blocks` has sums of the steps before
-- `done`. counts: as in direct_sql.
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

--- Returns how many steps each column has in a picture that shows the steps first..last in at most
--- `points` columns (240 by default). The option `width` of M.read takes this number.
function M.width(first, last, points)
  local width = math.max(1, math.ceil((last - first + 1) / (points or 240)))
  return width > BLOCK and math.ceil(width / BLOCK) * BLOCK or width
end

--- Reads metrics for the columns of a picture; the top of the file describes the result. options:
--- from, to (steps; default: the whole run), points (the most columns; 240 by default), or width
--- (from M.width; columns begin at multiples of this width, so that the columns of several runs
--- agree). Columns of more than 256 steps, which rows of the table `blocks` sum up, begin at
--- multiples of 256, so the first column may begin before `from`, and there may be one column more.
function M.read(h, wanted_names, options)
  options = options or {}
  local summed, other, apart = {}, {}, {}     -- apart: read from other tables than `steps`
  for _, name in ipairs(wanted_names) do
    local metric = M.metric(name, h)
    if metric.signal then need_signal(h, metric.signal) end
    if metric.tensor or metric.worst then need_meters(h, metric.tensor) end
    table.insert((metric.layer or metric.worst) and apart or metric.summed and summed or other,
      metric)
  end
  local result = { x = {}, first_step = {}, width = 1, rows = {}, overflows = {}, skipped = {} }
  for _, name in ipairs(wanted_names) do result[name] = { min = {}, max = {}, mean = {} } end
  local first, last = h:range(options.from, options.to)
  if not first or first > last then return result end
  local done = blocks_end(h)
  local width = math.max(1, math.ceil((last - first + 1) / (options.points or 240)))
  local start = first
  if options.width then width, start = options.width, first - first % options.width
  elseif width > BLOCK and done > first then
    width, start = M.width(first, last, options.points), first - first % BLOCK
  end
  local n = math.ceil((last + 1 - start) / width)
  local cells, more = {}, {}
  fill(h, cells, summed, start, width, n, last, done, true)
  if #other > 0 then fill(h, more, other, start, width, n, last, 0, false) end
  for _, metric in ipairs(apart) do
    (metric.layer and fill_layer or fill_worst)(h, more, metric, start, width, n, last)
  end
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
      for _, key in ipairs(COUNTS) do result[key][i] = cell[key] end
      for _, name in ipairs(wanted_names) do
        local v, to = cell[name] or (more[at] and more[at][name]), result[name]
        if v then to.min[i], to.max[i], to.mean[i] = v.min, v.max, v.sum / v.n end
      end
    end
  end
  return result
end

return M
