-- Pictures of a history: curves, heat maps, one tensor. init.lua makes them methods of histories
-- (h:plot, h:heatmap, h:tensor); each returns text that prints as it is.
local curves = require "engine.run.curves"
local layers = require "engine.report.layers"
local formats = require "engine.base.formats"
local nearest = require "engine.base.nearest"
local read_named = require("engine.base.arguments").read_named
local show = require "engine.base.show"
local plot = require "engine.report.plot"

local M = {}

local log2 = function(x) return math.log(x) / math.log(2) end

local grouped, percent, text_of = show.grouped, show.percent, show.text

local function set_of(names)
  local set = {}
  for name in names:gmatch("%w+") do set[name] = true end
  return set
end
local PLOT = set_of "log from to points width height ascii marks"
local HEATMAP = set_of "by only tensors from to width"
local TENSOR = set_of "points from to width"

--- One curve of curves.read's result. options: log, width, height, ascii, marks (false: no overflow
--- marks).
function M.curve(c, name, options)
  local metric, v = curves.metric(name), c[name]
  local y, low, last = {}, {}, nil
  for i = 1, #c.x do
    y[i], low[i] = v.max[i] or 0 / 0, v.min[i]
    last = v.mean[i] or last
  end
  last = v.at_end or last
  local log = curves.log_of(metric, options.log)
  local least, most = math.huge, -math.huge
  for i = 1, #c.x do
    if v.min[i] then least, most = math.min(least, v.min[i]), math.max(most, v.max[i]) end
  end
  if log and most <= 0 then log = nil end  -- nothing is positive, as underflow in bf16
  local title = metric.title
  local function text(x)
    return metric.log == 2 and x >= 1 and show.scale(x) or plot.number_text(x)
  end
  if last then
    title = ("%s   %s to %s, at the end %s"):format(title, text(least), text(most), text(last))
  end
  local marks, count = curves.marks(c)
  return plot.draw { title = title, x = c.x, x_low = c.first, x_high = c.last, y = y,
    low = low, log = log, width = options.width, height = options.height, ascii = options.ascii,
    marks = options.marks ~= false and #marks > 0 and marks or nil, mark_count = count,
    mark_name = "overflow" }
end

--- history:plot("loss"), history:plot("amax", { log = true }), history:plot { "loss", "scale" }.
--- options: log (true, 2, 10, false), from, to (steps), points, width, height, ascii.
function M.plot(h, names, options)
  options = read_named(options, "plot", PLOT)
  if names == nil then names = { "loss", "scale" } end
  if type(names) ~= "table" then names = { names } end
  local width = options.width or math.min(require("engine.base.machine").terminal(1) or 80, 120)
  local c = curves.read(h, names, { from = options.from, to = options.to, points = options.points
    or 2 * width })
  if #c.x == 0 then
    return text_of((options.from or options.to) and "the history has none of these steps"
      or "the history has no steps")
  end
  local parts = {}
  for i, name in ipairs(names) do
    parts[i] = M.curve(c, name, { log = options.log, width = width, height = options.height
      or (#names > 2 and 7 or 10), ascii = options.ascii,
      marks = options.marks or i == #names })
  end
  if c.width > 1 then
    parts[#parts + 1] = ("each column of dots spans the values of %s steps"):format(
      grouped(c.width))
  end
  return text_of(table.concat(parts, "\n\n"), { curves = c })
end

-- ------------------------------------------------------------------ heat maps

local FEWEST_SHARE = 1e-7        -- share of a layer's elements that is still visible

-- Over all rows of a layer: largest stored magnitude, columns with inf or nan, numbers of zeros and
-- of subnormals.
local function summary(l, k)
  local s = { amax = 0, bad = 0, count = 0, zeros = 0, underflow = 0 }
  for i = 1, #l.x do
    local cell = l.cells[k][i]
    if cell then
      s.amax = math.max(s.amax, cell.amax)
      s.bad = s.bad + cell.overflows
      s.count, s.zeros, s.underflow = s.count + cell.count, s.zeros + cell.zeros,
        s.underflow + cell.underflow
    end
  end
  return s
end
M.layer_summary = summary

-- The note at the end of a layer's row: the distance of its largest gradient from the top, and the
-- loss at the bottom.
local function note(l, k)
  local s = summary(l, k)
  local parts = {}
  local room = s.amax > 0 and log2(l.format.limit / s.amax)
  if room then parts[#parts + 1] = ("2^%.1f"):format(log2(s.amax)) end
  if s.bad > 0 then parts[#parts + 1] = "inf or nan" end
  if room and room < 40 then
    parts[#parts + 1] = room >= 0.05 and ("%.1f bits of room"):format(room) or "at the top"
  end
  if s.underflow > 0 then
    parts[#parts + 1] = ("%s subnormal"):format(percent(s.underflow, s.count))
  end
  return table.concat(parts, ", ")
end

-- A row's note, cut at the width of the terminal.
local function fitted(text, room)
  if #text <= room then return text end
  return room < 8 and "" or text:sub(1, room - 2) .. ".."
end

-- "step 0", "steps 0, 100 and 200", "33 steps, 0 to 3,200".
local function steps_text(list)
  local steps, texts = { unpack(list) }, {}
  table.sort(steps)
  local n = #steps
  if n > 8 then
    return ("%s steps, %s to %s"):format(grouped(n), grouped(steps[1]), grouped(steps[n]))
  end
  for i, step in ipairs(steps) do texts[i] = grouped(step) end
  return (n == 1 and "step " or "steps ") .. table.concat(texts, ", ", 1, math.max(1, n - 1)) ..
    (n > 1 and " and " .. texts[n] or "")
end

local function by_exponent(l, width)
  local least, most = math.huge, -math.huge
  for k = 1, #l.names do
    for e in pairs(l.hists[k]) do least, most = math.min(least, e), math.max(most, e) end
  end
  if least > most then return nil end
  local top = l.format.top
  if most > top - 24 then most = math.max(most, top) end
  if least < l.format.normal + 24 then
    least = math.max(math.min(least, l.format.normal), formats.first)
  end
  local rows, label, notes = {}, 0, 0
  for k, name in ipairs(l.names) do
    local total = 0
    for _, n in pairs(l.hists[k]) do total = total + n end
    local cells = {}
    for e, n in pairs(l.hists[k]) do
      cells[e - least + 1] = math.max(0.05, 1 - math.log10(n / total) / math.log10(FEWEST_SHARE))
    end
    local s = summary(l, k)
    if s.bad > 0 then cells[most - least + 2] = "bad" end
    rows[k] = { label = name, cells = cells, note = note(l, k) }
    label, notes = math.max(label, math.min(40, #name)), math.max(notes, #rows[k].note)
  end
  local columns = most - least + 2
  local axis = {}
  for e = least, most do
    if e == l.format.normal or e == top or e % 8 == 0 and math.abs(e - l.format.normal) > 3
      and math.abs(e - top) > 3 then
      axis[e - least + 1] = tostring(e)
    end
  end
  local wide = math.max(1, math.min(2, math.floor((width - label - notes - 4) / columns)))
  for _, row in ipairs(rows) do row.note = fitted(row.note, width - label - columns * wide - 4) end
  return require("engine.report.heat").draw { rows = rows, columns = columns, wide = wide,
    axis = axis, bad = true, low = "no gradient", high = "all of the layer's",
    title = ("%s gradients as stored, by exponent: below %d they lose bits, past %d they are " ..
      "inf\n" ..
      "statistics of %s; on the right, the largest of each layer"):format(l.format.name,
      l.format.normal, top, steps_text(l.steps)) }
end

--- The exponents that the shades of a heat map over time span: from the smallest seen up to
--- overflow; in wide formats up to the largest seen.
function M.shade_range(l)
  local low, high = math.huge, -math.huge
  for k = 1, #l.names do
    for _, cell in pairs(l.cells[k]) do
      if cell.amax > 0 then
        low, high = math.min(low, math.floor(log2(cell.amax))),
          math.max(high, math.ceil(log2(cell.amax)))
      end
    end
  end
  if low == math.huge then low, high = l.format.zero + 1, l.format.top + 1 end
  if l.format.top < 64 then low, high = math.max(low, l.format.zero + 1), l.format.top + 1 end
  if low >= high then low = high - 1 end
  return low, high
end

local function by_time(l, width)
  local low, high = M.shade_range(l)
  local rows, label = {}, 0
  for k, name in ipairs(l.names) do
    local cells = {}
    for i = 1, #l.x do
      local cell = l.cells[k][i]
      if cell then
        cells[i] = cell.overflows > 0 and "bad" or cell.amax > 0
          and (log2(cell.amax) - low) / (high - low) or 0
      end
    end
    rows[k] = { label = name, cells = cells, note = note(l, k) }
    label = math.max(label, math.min(40, #name))
  end
  for _, row in ipairs(rows) do row.note = fitted(row.note, width - label - #l.x - 4) end
  local axis, n = {}, #l.x
  for _, i in ipairs { 1, math.ceil(n / 4), math.ceil(n / 2), math.ceil(3 * n / 4), n } do
    axis[i] = ("%.0f"):format(l.x[i])
  end
  return require("engine.report.heat").draw { rows = rows, columns = n, wide = 1, axis = axis,
    bad = true, low = "2^" .. low, high = "2^" .. high,
    title = ("largest %s gradient as stored, by step; on the right, over all steps"):format(
      l.format.name) }
end

--- history:heatmap(): layers by exponent, each layer's gradients in the range of the format.
--- history:heatmap { by = "time" }: the largest gradient of each layer over the steps. only: a
--- layer, or part of a name, tensor by tensor; tensors = true: all tensors; from, to, width.
function M.heatmap(h, options)
  options = read_named(options, "heatmap", HEATMAP)
  local by = options.by or "exponent"
  if by ~= "exponent" and by ~= "time" then
    error(("heatmap: expected by to be 'exponent' or 'time', got '%s'"):format(tostring(by)), 0)
  end
  local width = options.width or math.min(require("engine.base.machine").terminal(1) or 100, 160)
  local l = layers.read(h, { points = by == "time" and math.max(20, width - 60) or 60,
    only = options.only, tensors = options.tensors, from = options.from,
    to = options.to, hists = by == "exponent" })
  local drawn = l.rows > 0 and (by == "time" and by_time(l, width) or by_exponent(l, width))
  return text_of(drawn or "no statistics per tensor are recorded for these steps", { layers = l })
end

-- ------------------------------------------------------------------ one tensor

--- The record of a parameter's gradients: { name, shape, steps = { { step, amax, norm, inf, nan,
--- zeros, underflow, hist, scale, relative_scale } ... } }, at most `points` (200) of the recorded
--- steps.
--- Prints as a curve of its largest stored value and its last histogram.
function M.tensor(h, name, options)
  options = read_named(options, "tensor", TENSOR)
  local found
  local all = {}
  for i, p in ipairs(h:parameters()) do
    all[i] = p.name
    if p.name == name then found = p end
  end
  if not found then
    error(#all == 0 and "the history names no parameters"
      or ("no parameter is called '%s'%s; history:parameters() lists all %d"):format(
      tostring(name), nearest.hint(tostring(name), all), #all), 0)
  end
  local points = options.points or 200
  local steps = {}
  local l = layers.read(h, { only = found.name, from = options.from, to = options.to,
    points = points, hists = false })
  for k, row_name in ipairs(l.names) do
    if row_name == found.name then
      for i = 1, #l.x do
        local cell = l.cells[k][i]
        if cell then steps[#steps + 1] = cell.step end
      end
    end
  end
  local rows = {}
  for i, step in ipairs(steps) do
    local t = h:tensors(step)[found.id + 1]
    t.step, t.name = step, nil
    local at = h:query("SELECT scale FROM steps WHERE step = ? ORDER BY attempt DESC LIMIT 1",
      step)[1]
    t.scale = at and at.scale
    rows[i] = t
  end
  local title = ("%s %s"):format(found.name, found.shape)
  if #rows == 0 then
    return text_of(title .. ": no statistics are recorded",
      { name = found.name, shape = found.shape, steps = rows })
  end
  local x, y, marks, bad = {}, {}, {}, 0
  for i, t in ipairs(rows) do
    x[i], y[i] = t.step, t.amax > 0 and t.amax or 0 / 0
    if t.inf + t.nan > 0 then marks[#marks + 1], bad = t.step, bad + 1 end
  end
  local last = rows[#rows]
  local parts = { title, plot.draw { title = ("largest gradient as stored (%s reaches %g)"):format(
    l.format.name, l.format.largest), x = x, y = y, log = 2,
    width = options.width, height = 8, marks = #marks > 0 and marks or nil,
    mark_name = "inf or nan" } }
  parts[#parts + 1] = ("step %s: largest %s, norm %s, %s zero, %s below 2^%d, %d inf, %d nan of " ..
    "%s; %d recorded steps, %d with inf or nan"):format(
    grouped(last.step), plot.number_text(last.amax), plot.number_text(last.norm),
    percent(last.zeros, last.count), percent(last.underflow, last.count),
    l.format.normal, last.inf, last.nan, grouped(last.count), #rows, bad)
  local exponents, total = {}, 0
  for e, n in pairs(last.hist) do
    exponents[#exponents + 1] = e
    total = total + n
  end
  if total > 0 then
    table.sort(exponents)
    local lines = {}
    for e = exponents[#exponents], math.max(exponents[1], exponents[#exponents] - 39), -1 do
      local share = (last.hist[e] or 0) / total
      lines[#lines + 1] = ("%6s %s"):format("2^" .. e, ("█"):rep(math.floor(50 * share + 0.5)) ..
        (share > 0 and " " .. percent(share, 1) or ""))
    end
    parts[#parts + 1] = "its exponents at that step:\n" .. table.concat(lines, "\n")
  end
  return text_of(table.concat(parts, "\n\n"), { name = found.name, shape = found.shape,
    steps = rows })
end

return M
