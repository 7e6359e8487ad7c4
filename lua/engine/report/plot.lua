-- Curves in the terminal, drawn with braille dots (2 x 4 for each character).
--
--   local plot = require "engine.report.plot"
--   print(plot.draw { title = "loss", y = losses })
--   print(plot.draw { title = "loss scale", x = steps, y = scales, log = 2, marks = overflow_steps,
--     mark_name = "overflow" })
--
--   x, y     lists of numbers of equal length; x is 1, 2, 3 ... by default
--   low      a list: each x gets a stroke from low to y, for values that vary within a column
--   curves   several curves instead of y: { { name =, y =, low =, high =, style = 1 } ... }. low
--            and high are the edges of a curve's band. Curves differ in colour and dashes; where
--            the terminal has no colour, each is drawn with its own letter. Values may be missing.
--            plot.legend names the curves.
--   sparse   true: values of y may be missing, and the title does not say how many
--   log      10 or 2: a logarithmic y axis; values that are not positive are left out
--   marks    x values to mark below the curve; mark_count: the number of marks for the legend, if
--            the list leaves some out
--   marked   further marks, a row for each: { { name =, symbol = "s", at = { x ... }, count = } }
--   x_name   the name of the x axis, such as "step"
--   width, height   in characters; by default, the terminal's width (120 at most; 80 without a
--            terminal) and 12
--   ascii    true: * instead of braille (by default where the terminal shows only ASCII)
-- Inf and NaN do not fit on an axis: they are left out and, except with `curves` or `sparse`,
-- counted in the title. Called by scripts, views.lua, chart.lua and cli/plan.lua.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local machine = require "engine.base.machine"
local show = require "engine.base.show"

local plot = {}

local MOST = 2000          -- the largest width or height, in characters

--- Raises an error unless the sizes in a table of options can be drawn. name: the name of the
--- function, for the message; most: the largest size (2000 by default).
function plot.check_sizes(options, name, most)
  M_ffi.expect(type(options) == "table", options, "%s: expected a table of options", name)
  for _, size in ipairs { "width", "height", "points" } do
    local value = options[size]
    if value ~= nil then arguments.want_whole(value, name, size, 1) end
    M_ffi.expect((value or 1) <= (most or MOST), value, "%s: expected %s to be at most %d", name,
      size, most or MOST)
  end
end

local FIRST_BRAILLE = 0x2800
-- dots[column][row]: the bit of the dot in column 0 or 1 and row 0 to 3 of a braille character.
local dots = { [0] = { [0] = 0x01, 0x02, 0x04, 0x40 }, { [0] = 0x08, 0x10, 0x20, 0x80 } }

local function braille(bits)
  local code = FIRST_BRAILLE + bits
  return string.char(0xE0 + math.floor(code / 4096), 0x80 + math.floor(code / 64) % 64,
    0x80 + code % 64)
end

local function finite(x)
  return type(x) == "number" and x == x and x ~= math.huge and x ~= -math.huge
end

--- Returns a number as text in a few digits, as the axes show it.
local function number_text(x)
  if x == 0 then return "0" end
  local size = math.abs(x)
  if size >= 1e6 or size < 1e-3 then
    return (("%.2e"):format(x):gsub("%.?0*e", "e"):gsub("e([+-])0*(%d)", "e%1%2"):gsub("e%+", "e"))
  end
  if size >= 1e4 or x == math.floor(x) then return ("%.0f"):format(x) end
  return ("%.4g"):format(x)
end

local function label(value, log)
  if not log then return number_text(value) end
  if log == 2 and value == math.floor(value) then return "2^" .. ("%d"):format(value) end
  return number_text(log ^ value)
end

--- Returns a round step (1, 2 or 5 times a power of ten) that divides `span` into about `n` parts.
function plot.round_step(span, n)
  local raw = span / n
  local power = 10 ^ math.floor(math.log10(raw))
  for _, factor in ipairs { 1, 2, 5, 10 } do
    if factor * power >= raw * 0.999 then return factor * power end
  end
  return 10 * power
end

-- Returns the points { x, y } of a curve, in the units of the axes, and the number of values that
-- are left out. With `lows`, a value y[i] has a second point at lows[i].
local function points_of(options, y, lows)
  local points, left_out, up = {}, 0, false
  local log = options.log and math.log(options.log)
  for i = 1, math.max(#y, options.curves and #options.x or 0) do
    local value, x = y[i], options.x and options.x[i] or i
    if finite(value) and finite(x) and (not log or value > 0) then
      local low = lows and lows[i]
      local ends = { value, low and finite(low) and (not log or low > 0) and low ~= value and low
        or nil }
      up = not up
      -- alternate the direction of the strokes between low and y, so that neighbouring ends join
      if up and ends[2] then ends[1], ends[2] = ends[2], ends[1] end
      for k = 1, #ends do
        local v = log and math.log(ends[k]) / log or ends[k]
        -- the clamp keeps the range of the points finite (range_of)
        points[#points + 1] = { x, math.max(-8e307, math.min(8e307, v)) }
      end
    else
      left_out = left_out + 1
    end
  end
  return points, left_out
end

local function range_of(points, field)
  local low, high = math.huge, -math.huge
  for _, point in ipairs(points) do
    low, high = math.min(low, point[field]), math.max(high, point[field])
  end
  return low, high
end

-- The dash styles: the number of dots that are set, then the number that are left out.
local DASHES = { { 1, 0 }, { 6, 3 }, { 2, 2 }, { 10, 3 }, { 4, 4 }, { 1, 2 } }
local EDGE = { 1, 4 }                -- dashes of a band's edges

-- Sets the dots of a curve in a grid of `columns` x `rows` characters: grid[row][column] = bits.
-- range: the ranges of the axes, from ranges_of. dash: an entry of DASHES; nil: a solid line.
local function rasterise(points, columns, rows, range, dash)
  local grid, count = {}, -1
  for row = 1, rows do grid[row] = {} end
  local wide, high = columns * 2 - 1, rows * 4 - 1
  local function set(px, py)
    count = count + 1
    if dash and count % (dash[1] + dash[2]) >= dash[1] then return end
    local row, column = math.floor(py / 4) + 1, math.floor(px / 2) + 1
    local bit_value = dots[px % 2][py % 4]
    local bits = grid[row][column] or 0
    if math.floor(bits / bit_value) % 2 == 0 then grid[row][column] = bits + bit_value end
  end
  local function place(point)
    return math.floor((point[1] - range.x_low) / (range.x_high - range.x_low) * wide + 0.5),
      high - math.floor((point[2] - range.y_low) / (range.y_high - range.y_low) * high + 0.5)
  end
  local last_x, last_y
  for _, point in ipairs(points) do
    local px, py = place(point)
    if last_x then                                     -- a straight line of dots
      local steps = math.max(math.abs(px - last_x), math.abs(py - last_y))
      for i = 1, steps do
        set(math.floor(last_x + (px - last_x) * i / steps + 0.5),
          math.floor(last_y + (py - last_y) * i / steps + 0.5))
      end
    end
    set(px, py)
    last_x, last_y = px, py
  end
  return grid
end

-- Returns a row of the grid as text. A cell is a bit mask of Braille dots, a string, or nil.
local function row_text(row, columns, ascii)
  local parts = {}
  for column = 1, columns do
    local cell = row[column]
    parts[column] = not cell and " " or type(cell) == "string" and cell or ascii and "*"
      or braille(cell)
  end
  return (table.concat(parts):gsub(" +$", ""))
end

-- Colours of the 256-colour palette: near those of chart.lua, readable on light and dark terminals.
local COLOURS = { 32, 172, 36, 169, 136, 245 }

--- Returns the colour and the dashes of curve i, each a number from 1 to 6. There are 36
--- combinations.
function plot.style(i)
  local turn = math.floor((i - 1) / 6)
  return (i - 1) % 6 + 1, (i - 1 + turn) % 6 + 1
end

local function letter(i) return string.char(97 + (i - 1) % 26) end
local function coloured(i, text)
  return ("\27[38;5;%dm%s\27[0m"):format(COLOURS[plot.style(i)], text)
end

-- Merges several curves into one grid of texts. In colour, a cell that several curves share has the
-- dots of all these curves and the colour of the last. Without colour, curves are letters, a shared
-- cell is a *, and the edges of bands are periods.
local function merged(curves, grids, edges, colour)
  local grid = {}
  for row = 1, #grids[1] do
    local cells, bits = {}, {}
    for k, curve in ipairs(curves) do
      for column, b in pairs(edges[k][row]) do
        bits[column] = bit.bor(bits[column] or 0, b)
        cells[column] = colour and coloured(curve.style, braille(bits[column])) or "."
      end
    end
    for k, curve in ipairs(curves) do
      for column, b in pairs(grids[k][row]) do
        bits[column] = bit.bor(bits[column] or 0, b)
        local first = not cells[column] or cells[column] == "."
        cells[column] = colour and coloured(curve.style, braille(bits[column]))
          or first and letter(curve.style) or cells[column] == letter(curve.style)
          and cells[column] or "*"
      end
    end
    grid[row] = cells
  end
  return grid
end

-- Returns whether curves are drawn in colour. Otherwise they are drawn as letters.
local function in_colour() return require("engine.report.heat").style() == "colour" end

--- Returns the legend of `curves`: for each curve a line with a sample and its name.
function plot.legend(curves, width)
  local lines, colour = {}, in_colour()
  for i, curve in ipairs(curves) do
    local sample = letter(curve.style)
    if colour then
      local _, dash = plot.style(curve.style)
      local row = rasterise({ { 0, 0 }, { 1, 0 } }, 5, 1,
        { x_low = 0, x_high = 1, y_low = -0.5, y_high = 0.5 }, DASHES[dash])
      sample = coloured(curve.style, row_text(row[1], 5))
    end
    lines[i] = sample .. " " .. show.cut(show.shown(curve.name), math.max(10, width - 6))
  end
  if not colour and #curves > 1 then lines[#lines + 1] = "* several of them" end
  return table.concat(lines, "\n")
end

-- Returns the labels of the y axis by row, and their width.
local function y_labels(rows, range, log)
  local y_low, y_high, labels, width = range.y_low, range.y_high, {}, 0
  local function put(row, value)
    labels[row] = label(value, log)
    width = math.max(width, #labels[row])
  end
  local step = plot.round_step(y_high - y_low, math.max(2, rows / 2))
  if log then step = math.max(1, math.floor(step + 0.5)) end
  local value = math.ceil(y_low / step - 1e-9) * step
  local count = 0
  while value <= y_high + step * 1e-9 and count < 100 do
    local row = rows - math.floor((value - y_low) / (y_high - y_low) * (rows * 4 - 1) / 4)
    put(math.max(1, math.min(rows, row)), math.abs(value) < step * 1e-9 and 0 or value)
    value, count = value + step, count + 1
  end
  if count < 2 then                  -- one label would not show the range
    put(1, y_high)
    put(rows, y_low)
  end
  return labels, width
end

-- Returns an x as a label. Steps are written in full: 1000000, not 1e6.
local function x_text(x, span)
  if span >= 10 and math.abs(x) < 1e10 then return ("%.0f"):format(x) end
  return number_text(x)
end

-- Returns a row of labels for the first, middle and last x. The middle is left out if there is no
-- room, or if it is between two of fewer than eleven steps. The label of a single x is in the
-- middle.
local function x_axis(columns, range, name)
  local x_low, x_high, span = range.x_low, range.x_high, range.x_high - range.x_low
  local prefix = name and name .. " " or ""
  if range.one then
    local text = prefix .. x_text(range.one, 10)
    return (" "):rep(math.max(0, math.floor((columns - #text) / 2))) .. text
  end
  local left, right = prefix .. x_text(x_low, span), x_text(x_high, span)
  local center = (x_low + x_high) / 2
  local middle = (not name or span >= 10 or center % 1 == 0) and x_text(center, span) or ""
  local gap = columns - #left - #right - #middle
  if gap < 4 or middle == "" then
    return left .. (" "):rep(math.max(1, columns - #left - #right)) .. right
  end
  local before = math.max(1, math.floor(columns / 2 - #middle / 2) - #left)
  return left .. (" "):rep(before) .. middle .. (" "):rep(math.max(1, gap - before)) .. right
end

-- Returns a row with a symbol in every column that holds a marked x, or nil if there is none.
local function mark_row(marks, columns, range, symbol)
  local cells, low, high = {}, range.x_low, range.x_high
  for column = 1, columns do cells[column] = " " end
  for _, x in ipairs(marks) do
    if x >= low and x <= high then
      cells[math.floor((x - low) / (high - low) * (columns - 1) + 0.5) + 1] = symbol
    end
  end
  local text = table.concat(cells):gsub(" +$", "")
  return text ~= "" and text or nil
end

plot.number_text = number_text

-- Collects the points of curves. Returns a list with the strokes of each curve, a list with the
-- outline of each curve's band, one list of all points, and how many values of the last curve are
-- left out because they cannot be drawn.
local function gather(options, curves)
  local strokes, edges, all, left_out = {}, {}, {}, 0
  for k, curve in ipairs(curves) do
    strokes[k], left_out = points_of(options, curve.y, curve.stroke)
    edges[k] = points_of(options, curve.low or {})
    local upper = points_of(options, curve.high or {})
    for i = #upper, 1, -1 do edges[k][#edges[k] + 1] = upper[i] end     -- closes the outline
    for _, list in ipairs { strokes[k], edges[k] } do
      for _, point in ipairs(list) do all[#all + 1] = point end
    end
  end
  return strokes, edges, all, left_out
end

-- Returns the ranges of the axes: { x_low, x_high, y_low, y_high, one = the only x, or nil }.
local function ranges_of(options, points)
  local x_low, x_high = range_of(points, 1)
  x_low, x_high = math.min(options.x_low or x_low, x_low),
    math.max(options.x_high or x_high, x_high)
  -- the axis also spans the points that cannot be drawn
  for _, x in ipairs(options.x or {}) do
    if x - x == 0 then x_low, x_high = math.min(x_low, x), math.max(x_high, x) end
  end
  local y_low, y_high = range_of(points, 2)
  local one = x_low == x_high and x_low or nil
  if one then x_low, x_high = one - 0.5, one + 0.5 end
  if y_low == y_high then
    local margin = options.log and 1 or math.abs(y_low) * 0.1
    if margin < 1e-300 then margin = 1 end
    y_low, y_high = y_low - margin, y_high + margin
  end
  return { x_low = x_low, x_high = x_high, y_low = y_low, y_high = y_high, one = one }
end

-- Returns the text below the axis: rows of marks, the axis's labels, and the legend of the marks.
local function below_axis(options, columns, range, ascii)
  local lines, legend = {}, {}
  local function mark(at, symbol, name, count)
    local row = mark_row(at, columns, range, symbol)
    if not row then return end
    lines[#lines + 1] = row
    legend[#legend + 1] = ("%s %s (%d)"):format(symbol, name, count)
  end
  if options.marks then
    mark(options.marks, ascii and "x" or "×", options.mark_name or "marked",
      options.mark_count or #options.marks)
  end
  for _, m in ipairs(options.marked or {}) do mark(m.at, m.symbol, m.name, m.count) end
  lines[#lines + 1] = x_axis(columns, range, options.x_name)
  if #legend > 0 then lines[#lines + 1] = show.wrap(table.concat(legend, "   "), columns + 1) end
  return table.concat(lines, "\n")
end

--- Returns a plot as text, without a final newline. options: as at the top of the file.
function plot.draw(options)
  plot.check_sizes(options, "plot.draw")
  M_ffi.expect(options.curves or type(options.y) == "table", options.y,
    "plot.draw: expected y to be a list of numbers")
  local ascii = options.ascii
  if ascii == nil then ascii = machine.ascii() end
  local width = options.width or math.min(machine.terminal(1) or 80, 120)
  local several = options.curves ~= nil
  local curves = options.curves or { { y = options.y, stroke = options.low } }
  local strokes, edges, points, left_out = gather(options, curves)
  local title = show.shown(options.title or "")
  if options.log then title = title .. (title == "" and "" or " ") .. "(log)" end
  if left_out > 0 and not options.sparse and not several then
    title = ("%s  [%d of %d points not drawn: no finite%s value]"):format(title, left_out,
      #options.y, options.log and " positive" or "")
  end
  title = show.wrap(title, width)
  if #points == 0 then return title .. "\n  (nothing to draw)" end

  local range, rows = ranges_of(options, points), options.height or 12
  local labels, label_width = y_labels(rows, range, options.log)
  local columns = math.max(10, width - label_width - 3)
  local colour, grids, bands = several and in_colour(), {}, {}
  for k, curve in ipairs(curves) do
    local _, dash = plot.style(curve.style or 1)
    grids[k] = rasterise(strokes[k], columns, rows, range, colour and DASHES[dash])
    bands[k] = rasterise(edges[k], columns, rows, range, EDGE)
  end
  local grid = several and merged(curves, grids, bands, colour) or grids[1]

  local lines = { title }
  local tick, bar = ascii and "+" or "┤", ascii and "|" or "│"
  for row = 1, rows do
    lines[#lines + 1] = ("%" .. label_width .. "s %s%s"):format(labels[row] or "",
      labels[row] and tick or bar, row_text(grid[row], columns, ascii))
  end
  local margin = (" "):rep(label_width + 1)
  lines[#lines + 1] = margin .. (ascii and "+" or "└") .. (ascii and "-" or "─"):rep(columns)
  lines[#lines + 1] = margin .. " " ..
    below_axis(options, columns, range, ascii):gsub("\n", "\n" .. margin .. " ")
  return table.concat(lines, "\n")
end

--- Returns the curves of loss and loss scale of a run as one text; leaves out a scale that is
--- constant and at most 1. rows: a list of { step, loss, scale, overflow }; rows.overflows: the
--- number of overflows, if the rows hold only some of the steps. options: width, height (of the
--- loss) and ascii, as in plot.draw; nil: the defaults.
function plot.run(rows, options)
  M_ffi.raise_if(type(rows) ~= "table",
    "plot.run: expected a list of rows, such as trainer:run().rows, got %s", tostring(rows))
  options = options or {}
  local x, loss, scale, marks, low, high = {}, {}, {}, {}, math.huge, -math.huge
  for i, row in ipairs(rows) do
    x[i], loss[i], scale[i] = row.step, row.loss or 0 / 0, row.scale or 0 / 0
    low, high = math.min(low, scale[i]), math.max(high, scale[i])
    if row.overflow and row.overflow ~= 0 then marks[#marks + 1] = row.step end
  end
  -- the title says where a resumed run begins; some scripts count steps from 1
  local since = x[1] and x[1] > 1 and (", since step %d"):format(x[1]) or ""
  local parts = { plot.draw { title = "loss" .. since, x = x, y = loss, width = options.width,
    height = options.height or 10, ascii = options.ascii, x_name = "step" } }
  if high > 1 or high ~= low then
    parts[2] = high == low and #marks == 0 and "the loss scale stayed at " .. show.scale(high)
      or plot.draw { title = "loss scale" .. since, x = x, y = scale, log = 2, marks = marks,
      mark_count = rows.overflows, mark_name = "overflow", x_name = "step",
      width = options.width, height = 8, ascii = options.ascii }
  end
  return table.concat(parts, "\n\n")
end

return plot
