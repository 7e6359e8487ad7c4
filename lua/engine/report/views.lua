-- Pictures of a history: curves, heat maps, one tensor. init.lua makes them methods of histories
-- (h:plot, h:heatmap, h:tensor); print shows their results. compare() draws several histories.
-- Called by engine/init.lua, this folder and cli/.
local M_ffi = require "engine.base.ffi"
local compare = require "engine.run.compare"
local curves = require "engine.run.curves"
local layers = require "engine.report.layers"
local marks = require "engine.report.marks"
local formats = require "engine.base.formats"
local nearest = require "engine.base.nearest"
local arguments = require "engine.base.arguments"
local show = require "engine.base.show"
local plot = require "engine.report.plot"

local M = {}

local log2 = function(x) return math.log(x) / math.log(2) end

local grouped, percent, text_of = show.grouped, show.percent, show.text

local PLOT = "log from to points width height ascii marks svg png title"
local HEATMAP = "by only tensors from to width"
local TENSOR = "points from to width"

local MOST_PIXELS = 20000

-- Checks the options that all pictures take: sizes, from, to, log and title. Raises an error if one
-- is invalid. Returns the options. name: the method that takes them, for messages.
local function check(options, name)
  plot.check_sizes(options, name, (options.svg or options.png) and MOST_PIXELS)
  for _, bound in ipairs { "from", "to" } do
    if options[bound] ~= nil then arguments.want_number(options[bound], name, bound) end
  end
  local log = options.log
  M_ffi.expect(log == nil or type(log) == "boolean" or type(log) == "number" and log > 1, log,
    "%s: expected log to be true, false or a base above 1", name)
  M_ffi.expect(options.title == nil or type(options.title) == "string" and
    (options.svg or options.png), options.title,
    "%s: expected title to be a text, and the option svg or png beside it", name)
  return options
end

-- Reads and checks the options of the method `name` of histories. known: the options that it takes.
local function read_options(options, name, known)
  return check(arguments.read_named(options, name, known), name)
end

-- Draws the column `name` of c, a result of curves.read, as text. options: log, width, height,
-- ascii, marks (false: no overflow marks), marked (further marks, from marks.read).
local function draw_curve(c, name, options)
  local metric, v = curves.metric(name), c[name]
  local y, low, last = {}, {}, nil
  for i = 1, #c.x do
    y[i], low[i] = v.max[i] or 0 / 0, v.min[i]
    last = v.mean[i] or last
  end
  last = v.at_end or last
  local log = curves.log_of(metric, options.log)
  local least, most = curves.range(c, name)
  if log and (most or 0) <= 0 then log = nil end  -- a log axis cannot show any of the values
  local title = metric.title
  local function text(x)
    return metric.log == 2 and x >= 1 and show.scale(x) or plot.number_text(x)
  end
  if last then
    title = ("%s   %s to %s, at the end %s"):format(title, text(least), text(most), text(last))
  end
  local overflows, count = curves.marks(c)
  return plot.draw { title = title, x = c.x, x_low = c.first, x_high = c.last, y = y,
    low = low, log = log, width = options.width, height = options.height, ascii = options.ascii,
    marks = options.marks ~= false and #overflows > 0 and overflows or nil, mark_count = count,
    mark_name = "overflow", marked = options.marked, x_name = "step", sparse = metric.sparse }
end

local FILE_POINTS = 600          -- columns of a picture in a file

--- Makes a panel for each of the columns `names` of c, a result of curves.read or compare.read.
--- M.write takes the panels of either; M.drawn takes only those of compare.read. options: log,
--- height. marked: the marks on every panel, from marks.lua, or nil. A run's field `number` is the
--- style of its curve.
function M.panels(c, names, options, marked)
  local panels = {}
  for i, name in ipairs(names) do
    local metric, series = curves.metric(name), {}
    for k, curve in ipairs(c.curves or { { column = { [name] = name } } }) do
      if curve.column[name] then
        series[#series + 1] = { column = curve.column[name], name = curve.label,
          style = curve.run and curve.run.number or k, band = curve.group and #curve.group > 1,
          join = metric.sparse and not metric.apart }
      end
    end
    panels[i] = { title = metric.title, c = c, series = series, marks = marked,
      log = curves.log_of(metric, options.log), height = options.height or 150,
      hold = name == "scale", named = c.curves and #c.curves > 1 }
  end
  return panels
end

--- Writes the panels to options.svg and options.png, below options.title or else `title`; returns
--- the files' names as a text.
function M.write(title, panels, options)
  local written = {}
  title = options.title or title
  for _, key in ipairs { "svg", "png" } do
    local file = options[key]
    M_ffi.expect(file == nil or type(file) == "string", file,
      "plot: expected %s to be a file name", key)
  end
  if options.svg then
    require("engine.base.file").write(options.svg, require("engine.report.chart").file(title,
      panels, options.width and math.max(240, options.width)))
    if options.svg ~= "-" then written[1] = options.svg end
  end
  if options.png then
    require("engine.report.gnuplot").png(options.png, title, panels, options)
    written[#written + 1] = options.png
  end
  return text_of(table.concat(written, "\n"), { files = written })
end

-- Returns the marks of a panel as one text, to compare panels.
local function marks_text(panel)
  local mark = panel and panel.marks and panel.marks[1]
  return mark and table.concat(mark.at, " ") .. ":" .. mark.count or ""
end

--- Draws panels of several curves as text for the terminal, with one legend for all panels. Marks
--- are below the last of successive panels that have the same marks.
function M.drawn(panels, width, height)
  local parts, legend, named = {}, {}, {}
  for i, panel in ipairs(panels) do
    local c, list = panel.c, {}
    for k, s in ipairs(panel.series) do
      local v = c[s.column]
      list[k] = { y = v.mean, low = s.band and v.min, high = s.band and v.max, style = s.style }
      if not named[s.style] then legend[#legend + 1], named[s.style] = s, true end
    end
    parts[i] = plot.draw { title = panel.title, x = c.x, x_low = c.first, x_high = c.last,
      curves = list, log = panel.log, width = width, x_name = "step",
      height = height or (#panels > 2 and 9 or 12),
      marked = marks_text(panel) ~= marks_text(panels[i + 1]) and panel.marks or nil }
  end
  table.sort(legend, function(a, b) return a.style < b.style end)
  parts[#parts + 1] = plot.legend(legend, width)
  return table.concat(parts, "\n\n")
end

local function width_of(options)
  return options.width or math.min(require("engine.base.machine").terminal(1) or 80, 120)
end

local function span_note(c, text, width)
  return c.width > 1 and show.wrap(text:format(grouped(c.width)), width) or nil
end

--- Draws curves of a run: history:plot("loss"), history:plot("amax", { log = true }), history:plot
--- { "loss", "scale" }, history:plot("loss", { svg = "loss.svg" }). options: log (true, 2, 10,
--- false), from, to (steps), points, width, height, ascii, marks (true: marks overflows and events
--- below every curve, not only below the last; false: marks nothing); svg, png: names of files to
--- draw into instead; title: the title in the file (default: the run's name). For a file, width
--- and height are in pixels; `height` is the height of the whole PNG, but of one panel of an SVG.
function M.plot(h, names, options)
  options = read_options(options, "plot", PLOT)
  if names == nil then names = { "loss", "scale" } end
  if type(names) ~= "table" then names = { names } end
  local width, to_file = width_of(options), options.svg or options.png
  local c = curves.read(h, names, { from = options.from, to = options.to, points = options.points
    or to_file and FILE_POINTS or 2 * width })
  if #c.x == 0 then
    local first, last = h:range()
    local none = first and ("the history has none of these steps; it has steps %d to %d"):format(
      first, last) or "the history has no steps"
    return to_file and error(none, 0) or text_of(none)
  end
  local found = options.marks == false and {} or marks.read(h, c)
  if to_file then
    local title = h.path:gsub("/history%.db$", ""):match("([^/]+)/*$")
    return M.write(title, M.panels(c, names, options, found), options)
  end
  local parts, marked = {}, {}
  for _, mark in ipairs(found) do
    if mark.kind ~= "overflow" and mark.kind ~= "checkpoint" then marked[#marked + 1] = mark end
  end
  for i, name in ipairs(names) do
    local last = options.marks or options.marks == nil and i == #names
    parts[i] = draw_curve(c, name, { log = options.log, width = width, height = options.height
      or (#names > 2 and 7 or 10), ascii = options.ascii,
      marks = last, marked = last and marked or nil })
  end
  parts[#parts + 1] = span_note(c, "each column of dots spans the values of %s steps", width)
  return text_of(table.concat(parts, "\n\n"), { curves = c })
end

--- Draws several runs (a list from compare.open) in one picture, with a curve for each run or, with
--- options.group, for each value of that setting. The other options are those of history:plot
--- except points, ascii and marks. Returns a text, and the notes of compare.read. Raises an error
--- if no run has steps.
function M.compare(list, names, options)
  check(options, "plot")
  local width, to_file = width_of(options), options.svg or options.png
  local c = compare.read(list, names, { from = options.from, to = options.to,
    group = options.group, log = options.log, points = to_file and FILE_POINTS or 2 * width })
  if not c.first then
    error((options.from or options.to) and ("no run has steps from %s to %s"):format(
      options.from or "the start", options.to or "the end") or "no run has steps to draw", 0)
  end
  local panels = M.panels(c, names, options)
  for i, panel in ipairs(panels) do panel.marks = marks.of_runs(c, names[i]) end
  if to_file then
    local run_names = {}
    for i, run in ipairs(list) do run_names[i] = run.name end
    return M.write(table.concat(run_names, ", "), panels, options), c.notes
  end
  local parts = { M.drawn(panels, width, options.height) }
  parts[2] = options.group and show.wrap("a line is the mean of a group's runs, where all of " ..
    "them have a value; the dots beside it are one standard deviation away", width) or nil
  parts[#parts + 1] = span_note(c, "each column of dots is the mean of %s steps", width)
  return text_of(table.concat(parts, "\n\n"), { curves = c }), c.notes
end

-- ------------------------------------------------------------------ heat maps

-- Below, l is a result of layers.read.

local FEWEST_SHARE = 1e-7        -- the smallest visible share of a layer's elements

-- Returns a summary of layer k over all columns: `amax`, its largest stored magnitude; `room` and
-- `format`, those of its cell with the smallest `room` (layers.lua); `bad`, the number of recorded
-- steps with inf or nan; `count`, `zeros` and `underflow`, its numbers of elements, zeros and
-- subnormals.
local function summary(l, k)
  local s = { amax = 0, bad = 0, count = 0, zeros = 0, underflow = 0 }
  for i = 1, #l.x do
    local cell = l.cells[k][i]
    if cell then
      s.amax = math.max(s.amax, cell.amax)
      if (cell.room or math.huge) < (s.room or math.huge) then
        s.room, s.format = cell.room, cell.format
      end
      s.bad = s.bad + cell.overflows
      s.count, s.zeros, s.underflow = s.count + cell.count, s.zeros + cell.zeros,
        s.underflow + cell.underflow
    end
  end
  return s
end
M.layer_summary = summary

-- Returns the note at the end of a layer's row: its largest gradient, the distance in bits to the
-- overflow limit of its format, and the share of subnormal gradients. s: the layer's summary.
local function note(s)
  local parts = {}
  local room = s.room
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

-- Returns a row's note for `room` characters. A note that is too long is cut or, if `room` is less
-- than 8, left out.
local function fitted(text, room)
  if #text <= room then return text end
  return room < 8 and "" or text:sub(1, room - 2) .. ".."
end

-- Returns a list of steps as text: "step 0", "steps 0, 100 and 200", "33 steps, 0 to 3,200".
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

local function most_label(width) return math.max(8, math.min(40, math.floor(width / 3))) end

-- Returns a layer's name, with its formats if they differ from the format in the caption and there
-- is room.
local function labelled(l, k, width)
  local text = ("%s (%s)"):format(l.names[k], l.formats[k])
  return (l.formats[k] == l.format.name or #text > most_label(width)) and l.names[k] or text
end

-- Merges every `per` columns of exponents into one, which shows the largest of their shares. The
-- last column (inf or nan) is not merged. Returns the new labels of the axis and the new number of
-- columns.
local function grouped_columns(rows, axis, columns, per)
  local n, merged = math.ceil((columns - 1) / per) + 1, {}
  for _, row in ipairs(rows) do
    local cells = { [n] = row.cells[columns] }
    for i = 1, columns - 1 do
      local at = math.ceil(i / per)
      if row.cells[i] then cells[at] = math.max(cells[at] or 0, row.cells[i]) end
    end
    row.cells = cells
  end
  for i, text in pairs(axis) do merged[math.ceil(i / per)] = text end
  return merged, n
end

-- Returns the rows of a heat map, one for each layer, and the widths of their labels and notes.
-- cells_of(k, s) returns the cells of layer k, whose summary is s.
local function layer_rows(l, width, cells_of)
  local rows, label, notes = {}, 0, 0
  for k = 1, #l.names do
    local s = summary(l, k)
    rows[k] = { label = labelled(l, k, width), cells = cells_of(k, s), note = note(s) }
    label, notes = math.max(label, #rows[k].label), math.max(notes, #rows[k].note)
  end
  return rows, math.min(label, most_label(width)), notes
end

local function by_exponent(l, width)
  local least, most = layers.exponents(l.hists, l.format)
  if not least then return nil end
  local top, columns = l.format.top, most - least + 2
  local rows, label, notes = layer_rows(l, width, function(k, s)
    local total, cells = 0, { [columns] = s.bad > 0 and "bad" or nil }
    for _, n in pairs(l.hists[k]) do total = total + n end
    for e, n in pairs(l.hists[k]) do
      cells[e - least + 1] = math.max(0.05, 1 - math.log10(n / total) / math.log10(FEWEST_SHARE))
    end
    return cells
  end)
  local axis = {}
  for e = least, most do
    if e == l.format.normal or e == top or e % 8 == 0 and math.abs(e - l.format.normal) > 3
      and math.abs(e - top) > 3 then
      axis[e - least + 1] = tostring(e)
    end
  end
  -- a narrow terminal shows several exponents in a column
  local per = math.ceil((columns - 1) / math.max(8, width - label - 5))
  if per > 1 then axis, columns = grouped_columns(rows, axis, columns, per) end
  local wide = math.max(1, math.min(2, math.floor((width - label - notes - 4) / columns)))
  for _, row in ipairs(rows) do row.note = fitted(row.note, width - label - columns * wide - 4) end
  return require("engine.report.heat").draw { rows = rows, columns = columns, wide = wide,
    axis = axis, low = "0.00001 %", high = "100 %", none = "no gradient", label = label,
    width = width,
    title = ("%s gradients as stored, by exponent of 2: below %d, %s loses bits; above %d, it " ..
      "overflows\n" ..
      "share of each layer's nonzero gradients in the statistics of %s; on the right, the " ..
      "largest gradient of each layer"):format(l.formats_text,
      l.format.normal, l.format.name, top, steps_text(l.steps)) }
end

--- Returns the exponents of the first and last shade of a heat map over time. The first is the
--- smallest exponent of any cell's amax. The last is the exponent at which the format overflows or,
--- for formats as wide as f32, the largest exponent of any cell's amax. Amaxes that the narrowest
--- format would round to zero do not count.
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

--- Returns the shade of a cell in the range low..high of M.shade_range: 0 to 1, or "bad" if the
--- cell has inf or nan.
function M.shade(cell, low, high)
  return cell.overflows > 0 and "bad"
    or cell.amax > 0 and (log2(cell.amax) - low) / (high - low) or 0
end

local function by_time(l, width)
  local low, high = M.shade_range(l)
  local rows, label = layer_rows(l, width, function(k)
    local cells = {}
    for i, cell in pairs(l.cells[k]) do cells[i] = M.shade(cell, low, high) end
    return cells
  end)
  for _, row in ipairs(rows) do row.note = fitted(row.note, width - label - #l.x - 4) end
  local axis, n = {}, #l.x
  for _, i in ipairs { 1, math.ceil(n / 4), math.ceil(n / 2), math.ceil(3 * n / 4), n } do
    axis[i] = ("%.0f"):format(l.x[i])
  end
  return require("engine.report.heat").draw { rows = rows, columns = n, wide = 1, axis = axis,
    low = ("2^%d"):format(low), high = ("2^%d"):format(high), none = "nothing recorded",
    label = label, width = width,
    title = ("largest gradient as stored, by step, %s; on the right, over all steps\n" ..
      "statistics of %s; each column is %s"):format(l.formats_text, steps_text(l.steps),
      l.width == 1 and "a step" or grouped(l.width) .. " steps") }
end

--- history:heatmap() shows how each layer's gradients are distributed over the exponents of their
--- format. history:heatmap { by = "time" } shows the largest gradient of each layer over the steps.
--- Options: only (a text: shows a row for each tensor whose name contains it); tensors (true: shows
--- a row for each tensor); from, to (steps); width (characters).
function M.heatmap(h, options)
  options = read_options(options, "heatmap", HEATMAP)
  local by = options.by or "exponent"
  M_ffi.raise_if(by ~= "exponent" and by ~= "time",
    "heatmap: expected `by` to be 'exponent' or 'time', got '%s'", tostring(by))
  local width = options.width or math.min(require("engine.base.machine").terminal(1) or 100, 160)
  local l = layers.read(h, { points = by == "time" and math.max(width - 60,
    math.min(40, width - most_label(width) - 4)) or 60,
    only = options.only, tensors = options.tensors, from = options.from,
    to = options.to, hists = by == "exponent" })
  local drawn = l.rows > 0 and (by == "time" and by_time(l, width) or by_exponent(l, width))
  return text_of(drawn or "no statistics per tensor are recorded for these steps", { layers = l })
end

-- ------------------------------------------------------------------ one tensor

-- Returns the parameter called `name`. Raises an error if there is none.
local function parameter_of(h, name)
  M_ffi.expect(type(name) == "string", name, "tensor: expected the name of a parameter")
  local all = {}
  for i, p in ipairs(h:parameters()) do
    if p.name == name then return p end
    all[i] = p.name
  end
  M_ffi.raise("no parameter is called %s%s; history:parameters() lists all %d: %s",
    M_ffi.value_text(name), nearest.hint(name, all), #all, nearest.few(all))
end

-- Returns the recorded steps at which to show a parameter. If there are more than `points`, returns
-- one for each column: the last step with inf or nan, else the step with the largest value.
local function steps_of(h, parameter, points, options)
  local l = layers.read(h, { only = parameter.name, from = options.from, to = options.to,
    points = points, hists = false })
  if #l.steps <= points then return l.steps end
  local steps = {}
  for k, name in ipairs(l.names) do
    for i = 1, name == parameter.name and #l.x or 0 do
      local cell = l.cells[k][i]
      if cell then steps[#steps + 1] = cell.step end
    end
  end
  return steps
end

-- Returns a parameter's statistics at a step (as in h:tensors), with the step and the loss scale.
local function tensor_at(h, parameter, step)
  local t = (h:tensors(step) or {})[parameter.id + 1]
  M_ffi.fail_if(not t, "history %s is damaged: step %d has no statistics of %s", h.path, step,
    parameter.name)
  local at = h:query("SELECT scale FROM steps WHERE step = ? ORDER BY attempt DESC LIMIT 1",
    step)[1]
  t.step, t.name, t.scale = step, nil, at and at.scale
  return t
end

-- Draws a histogram of exponents as bars of at most `most` characters. Returns nil if it has no
-- elements.
local function bars(hist, most)
  local exponents, total, lines = {}, 0, {}
  for e, n in pairs(hist) do exponents[#exponents + 1], total = e, total + n end
  if total == 0 then return nil end
  table.sort(exponents)
  local bar, high = require("engine.base.machine").ascii() and "#" or "█", exponents[#exponents]
  for e = high, math.max(exponents[1], high - 39), -1 do
    local share = (hist[e] or 0) / total
    lines[#lines + 1] = ("%6s %s"):format("2^" .. e, bar:rep(math.floor(most * share + 0.5)) ..
      (share > 0 and " " .. percent(share, 1) or ""))
  end
  return table.concat(lines, "\n")
end

--- Returns the statistics of a parameter's gradients at recorded steps: { name, shape, steps = { {
--- step, count, amax, norm, inf, nan, zeros, underflow, hist, scale, relative_scale } ... } }. amax
--- and norm are as stored, that is, times the loss scale and the layer's relative scale. The list
--- `steps` has at most options.points entries (200 by default). print shows the result as a curve
--- of amax, followed by the last histogram.
function M.tensor(h, name, options)
  options = read_options(options, "tensor", TENSOR)
  local parameter = parameter_of(h, name)
  local title, rows = ("%s %s"):format(parameter.name, parameter.shape), {}
  local data = { name = parameter.name, shape = parameter.shape, steps = rows }
  local x, y, bad_steps = {}, {}, {}
  for i, step in ipairs(steps_of(h, parameter, options.points or 200, options)) do
    local t = tensor_at(h, parameter, step)
    rows[i], x[i], y[i] = t, step, t.amax > 0 and t.amax or 0 / 0
    if t.inf + t.nan > 0 then bad_steps[#bad_steps + 1] = step end
  end
  if #rows == 0 then return text_of(title .. ": no statistics are recorded", data) end
  local last, format = rows[#rows], formats.of(parameter.gradient)
  local parts = { title, plot.draw { title = ("largest gradient as stored (%s reaches %g)"):format(
    format.name, format.largest), x = x, y = y, log = 2,
    width = options.width, height = 8, marks = #bad_steps > 0 and bad_steps or nil,
    mark_name = "inf or nan", x_name = "step" } }
  parts[3] = ("step %s: largest %s, norm %s; of %s elements %s zero, %s below 2^%d, %d inf, " ..
    "%d nan; %d recorded steps, %d with inf or nan"):format(grouped(last.step),
    plot.number_text(last.amax), plot.number_text(last.norm), grouped(last.count),
    percent(last.zeros, last.count), percent(last.underflow, last.count), format.normal, last.inf,
    last.nan, #rows, #bad_steps)
  local exponents = bars(last.hist, math.min(50, (options.width or 80) - 20))
  parts[4] = exponents and "the exponents of its gradients at that step:\n" .. exponents
  return text_of(table.concat(parts, "\n\n"), data)
end

return M
