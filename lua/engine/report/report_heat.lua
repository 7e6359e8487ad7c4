-- The report's heat maps: layers by step, layers by exponent, exponents by step, FP8 layers by
-- step. In a map by step, a column extends from its first step to its last on the x axis. Cells
-- without a record are left empty, so that the hatched background is visible there. Each function
-- returns HTML and the data for the script (report_page.lua). Used by report.lua.
local chart = require "engine.report.chart"
local html = require "engine.report.report_html"
local json = require "engine.base.json"
local layers = require "engine.report.layers"
local views = require "engine.report.views"

local M = {}

M.columns = 160                 -- the most columns of a map by step
local LEVELS = 14               -- levels of opacity for shares
local TOP, BOTTOM = 6, 40       -- margins above and below a map, in pixels
local escape, power, with_length = chart.escape, chart.power, json.with_length

-- Viridis without its darkest tenth. The brightness rises throughout, so that the map is readable
-- without colour vision.
local RAMP = { "#471d6e", "#45327d", "#3f4687", "#38588b", "#306a8e", "#2a7a8e", "#248a8d",
  "#209a8a", "#29a982", "#37b878", "#59c664", "#7ed24e", "#a8db33", "#d2e229", "#fde725" }
M.ramp = RAMP

local function f(x) return (("%.2f"):format(x):gsub("%.?0+$", "")) end

-- Returns the height of a row in pixels, in a map of n rows.
local function row_height(n) return n > 90 and 6 or n > 60 and 9 or n > 24 and 14 or 20 end

-- Returns the x coordinates { from, to } of the columns. `starts` has the first step of each
-- column; `width` is the number of steps in a column.
local function columns_of(axis, starts, width)
  local list = {}
  for i, start in ipairs(starts) do
    local from = math.min(axis.place(start - 0.5), axis.span - 3)
    list[i] = { from, math.max(axis.place(start + width - 0.5), from + 3) }
  end
  return list
end

-- Returns the cells of `list`, each { row, column }, as an SVG path. columns: from columns_of. row:
-- the height of a row. Adjacent cells of a row are merged.
local function cells_path(list, columns, row)
  table.sort(list, function(a, b)
    if a[1] ~= b[1] then return a[1] < b[1] end
    return a[2] < b[2]
  end)
  local d, i = {}, 1
  while i <= #list do
    local k, c = list[i][1], list[i][2]
    local stop = c
    while list[i + 1] and list[i + 1][1] == k and list[i + 1][2] == stop + 1
      and columns[stop + 1][1] <= columns[stop][2] do
      i, stop = i + 1, stop + 1
    end
    local from = f(columns[c][1])
    d[#d + 1] = ("M%s %sH%sV%sH%sz"):format(from, f((k - 1) * row), f(columns[stop][2]),
      f(k * row), from)
    i = i + 1
  end
  return table.concat(d)
end

local function row_labels(names, row)
  local out = {}
  local each = math.max(1, math.ceil(12 / row))
  for k, name in ipairs(names) do
    if (k - 1) % each == 0 then
      out[#out + 1] = chart.text("label", 0, (k - 0.5) * row, -8, 4, "end",
        escape(#name > 12 and "…" .. name:sub(-11):gsub("^[%._]+", "") or name) .. "<title>" ..
        escape(name) .. "</title>")
    end
  end
  return table.concat(out)
end

local function ramp_html(colours)
  local parts = {}
  for i, colour in ipairs(colours) do
    parts[i] = ('<u style="background:%s"></u>'):format(colour)
  end
  return '<span class="ramp">' .. table.concat(parts) .. "</span>"
end

-- Returns the legend of a map: its ramp with the texts `low` and `high` at the ends, then the
-- entries of `list`.
local function legend(low, colours, high, list)
  table.insert(list, 1, { html = escape(low) .. ramp_html(colours), text = high })
  return html.legend(list)
end

local NONE = { shape = '<rect class="none" width="24" height="12"/>', text = "nothing recorded" }
local BAD = { shape = '<path class="bad" d="M8 0h8v12h-8z"/><path class="bar" d="M8 6h8"/>',
  text = "inf or nan" }

-- Draws a map. o: kind, title, legend; n (the number of rows), row (their height in pixels), names
-- (of the rows), columns (from columns_of), cells (data for the script), paths and texts (lists of
-- SVG), hatched (whether the background is hatched). Adds the cells and sizes of o to `data`, the
-- script's data. Returns the HTML and `data`.
local function map(o, data)
  local height = o.n * o.row
  local behind = o.hatched and ('<rect class="none" width="100%%" height="%s"/>'):format(f(height))
    or ""
  data.x, data.top, data.row, data.rows = o.columns, TOP, o.row, o.n
  data.names, data.cells = o.names, o.cells
  return o.legend .. html.svg("heat", ('data-heat="%s"'):format(o.kind), o.title, TOP, height,
    BOTTOM, chart.area(chart.span, height, table.concat(o.paths), (o.names
      and row_labels(o.names, o.row) or "") .. table.concat(o.texts) .. '<rect class="cell"/>', "",
      behind)), data
end

-- Returns the SVG elements of lists[1..n], each a list of cells or nil. form(key, path) makes the
-- element of lists[key] from the SVG path of its cells.
local function paths_of(lists, n, form, columns, row)
  local out = {}
  for key = 1, n do
    if lists[key] then out[#out + 1] = form(key, cells_path(lists[key], columns, row)) end
  end
  return table.concat(out)
end

local function put(lists, key, cell)
  lists[key] = lists[key] or {}
  table.insert(lists[key], cell)
end

local function shaded(shade, d) return ('<path fill="%s" d="%s"/>'):format(RAMP[shade], d) end

-- Draws the cells { row, column } with inf or nan: in one colour, with a bar through each.
local function bad_path(bad, columns, row)
  if #bad == 0 then return "" end
  local colour, bars = cells_path(bad, columns, row), {}
  for i, cell in ipairs(bad) do
    local column = columns[cell[2]]
    bars[i] = ("M%s %sH%s"):format(f(column[1]), f((cell[1] - 0.5) * row), f(column[2]))
  end
  return ('<path class="bad" d="%s"/><path class="bar" d="%s"/>'):format(colour, table.concat(bars))
end

-- Draws a map of named rows over the steps, in the colours of the ramp. o: kind, title, names (of
-- the rows), starts and width (of the columns, in steps), low and high (the legend's texts for the
-- ends of the ramp), none (the legend's text for gaps), and cell. cell(k, i) returns two values for
-- row k and column i: data for the script (nil: a gap), and the position on the ramp, 0 to 1, or
-- "bad" for inf or nan.
local function over_steps(o, axis, data)
  local n, row = #o.starts, row_height(#o.names)
  local columns = columns_of(axis, o.starts, o.width)
  local by_shade, bad, cells, gaps = {}, {}, {}, false
  for k = 1, #o.names do
    cells[k] = with_length({}, n)
    for i = 1, n do
      local value, place = o.cell(k, i)
      cells[k][i], gaps = value, gaps or value == nil
      if place == "bad" then bad[#bad + 1] = { k, i }
      elseif value then
        put(by_shade, 1 + math.floor(math.max(0, math.min(0.9999, place)) * #RAMP), { k, i })
      end
    end
  end
  local grid, steps = chart.x_axis(axis, #o.names * row)
  local signs = { #bad > 0 and BAD or nil }
  if gaps then signs[#signs + 1] = { shape = NONE.shape, text = o.none } end
  return map({ kind = o.kind, title = o.title, legend = legend(o.low, RAMP, o.high, signs),
    n = #o.names, names = o.names, row = row, columns = columns, cells = cells, hatched = gaps,
    paths = { grid, paths_of(by_shade, #RAMP, shaded, columns, row), bad_path(bad, columns, row) },
    texts = { steps } }, data)
end

--- Draws a row for each layer and a column for each column of l, a result of layers.read. The shade
--- shows the layer's largest stored gradient in the steps of the column.
function M.layers_over_time(l, axis)
  local low, high = views.shade_range(l)
  return over_steps({ kind = "layers", title = "Largest gradient of each layer by step",
    names = l.names, starts = l.x, width = l.width, none = NONE.text, low = power("2", low),
    high = power("2", high),
    cell = function(k, i)
      local cell = l.cells[k][i]
      if not cell then return nil end
      return with_length({ cell.step, cell.amax, cell.inf + cell.nan, cell.room }, 4),
        views.shade(cell, low, high)
    end }, axis, { formats = l.formats })
end

local FEWEST = 1e-7             -- the share that has the lowest level of opacity

local function level_of(share)
  return math.max(1, math.ceil((1 - math.log10(math.max(share, FEWEST)) / math.log10(FEWEST)) *
    LEVELS))
end

local function levelled(level, d)
  return ('<path fill="var(--c1)" fill-opacity="%.2f" d="%s"/>'):format(0.06 + 0.94 *
    level / LEVELS, d)
end

local function levels_legend(list)
  local parts = {}
  for level = 1, LEVELS do
    parts[level] = ("color-mix(in srgb,var(--c1) %.0f%%,transparent)"):format(6 + 94 *
      level / LEVELS)
  end
  return legend("0.00001 %", parts, "100 %", list)
end

-- Calls visit(e, text) for those limits of a format (its smallest normal number, its end) that are
-- within the exponents least..most. The line of a limit belongs between the exponents e - 1 and e.
local function each_limit(format, least, most, visit)
  for _, limit in ipairs { { format.normal, format.name .. "'s smallest normal number" },
    { format.top + 1, format.name .. " ends" } } do
    if limit[1] >= least and limit[1] <= most + 1 then visit(limit[1], limit[2]) end
  end
end

-- Returns a list with the share of a histogram's elements at each exponent from least to most.
local function shares_of(hist, least, most)
  local total, list = 0, {}
  for _, count in pairs(hist) do total = total + count end
  for e = least, most do list[#list + 1] = (hist[e] or 0) / math.max(total, 1) end
  return list
end

--- Draws a row for each layer and a column for each exponent. The shade shows what share of the
--- layer's gradients has the exponent, over all rows of the history that were read. Returns nil if
--- no gradient is nonzero.
function M.layers_by_exponent(l)
  local least, most = layers.exponents(l.hists, l.format)
  if not least then return nil end
  local n, row = most - least + 1, row_height(#l.names)
  local columns = {}
  for i = 1, n do columns[i] = { (i - 1) * chart.span / n, i * chart.span / n } end
  local by_level, cells = {}, {}
  for k = 1, #l.names do
    cells[k] = shares_of(l.hists[k], least, most)
    for i, share in ipairs(cells[k]) do
      if share > 0 then put(by_level, level_of(share), { k, i }) end
    end
  end
  local height = #l.names * row
  local paths, texts = { paths_of(by_level, LEVELS, levelled, columns, row) }, {}
  local every = n > 64 and 16 or n > 28 and 8 or 4
  for e = least + -least % 4, most, 4 do
    texts[#texts + 1] = chart.text(e % every == 0 and "tick" or "tick wide",
      (e - least + 0.5) / n, height, 0, 16, "middle", power("2", e))
  end
  each_limit(l.format, least, most, function(e, text)
    local x, anchor = (e - least) / n, "end"
    if e == l.format.normal then              -- a label left of its line needs room there
      anchor = x > 0.4 and "end" or "start"
      text = x > 0.4 and "loses bits ←" or "← loses bits"
    end
    paths[#paths + 1] = ('<path class="limit" d="M%s 0V%s"/>'):format(f(x * chart.span), f(height))
    texts[#texts + 1] = chart.text("limit", x, height, anchor == "end" and -2 or 2, 33, anchor,
      text)
  end)
  texts[#texts + 1] = chart.text("tick", 0, height, -8, 16, "end", "magnitude")
  return map({ kind = "shares", title = "Gradients of each layer by exponent",
    legend = levels_legend {}, n = #l.names, names = l.names, row = row, columns = columns,
    cells = cells, paths = paths, texts = texts }, { least = least, normal = l.format.normal })
end

--- Draws a row for each exponent and a column for every few steps. A column shows the histogram of
--- all gradients at its first step that has one. Returns nil if there are no histograms.
function M.exponents_over_time(h, l, axis)
  local hists, starts, steps = {}, {}, {}
  local first, last = math.ceil(axis.first), math.floor(axis.last)
  local width = math.max(1, math.ceil((last - first + 1) / M.columns))
  for from = first, last, width do
    local row = h:query("SELECT step FROM steps WHERE step >= ? AND step < ? AND hist IS NOT " ..
      "NULL ORDER BY step LIMIT 1", from, from + width)[1]
    local hist = row and h:hist(row.step)
    if hist then
      local i = #hists + 1
      hists[i], starts[i], steps[i] = hist, from, row.step
    end
  end
  local least, most = layers.exponents(hists, l.format)
  if not least then return nil end
  local rows = most - least + 1
  local row = math.max(3, math.min(9, math.floor(320 / rows)))
  local columns = columns_of(axis, starts, width)
  local by_level, cells, seen = {}, {}, {}
  for i, hist in ipairs(hists) do
    cells[i] = shares_of(hist, least, most)
    for k, share in ipairs(cells[i]) do
      seen[#seen + 1] = { k, i }
      if share > 0 then put(by_level, level_of(share), { rows + 1 - k, i }) end
    end
  end
  local gaps = #hists < math.ceil((last - first + 1) / width)
  local grid, ticks = chart.x_axis(axis, rows * row)
  local paths = { grid, gaps and ('<path class="blank" d="%s"/>'):format(cells_path(seen, columns,
    row)) or "", paths_of(by_level, LEVELS, levelled, columns, row) }
  local texts = { ticks }
  for e = least + -least % 8, most, 8 do
    texts[#texts + 1] = chart.text("tick", 0, (most - e + 0.5) * row, -8, 4, "end", power("2", e))
  end
  each_limit(l.format, least, most, function(e, text)
    local y = (most - e + 1) * row
    paths[#paths + 1] = ('<path class="limit" d="M0 %sH%s"/>'):format(f(y), f(axis.span))
    texts[#texts + 1] = chart.text("limit", 1, y, -4, e > l.format.normal and 13 or -5, "end",
      escape(text))
  end)
  return map({ kind = "time", title = "All gradients by exponent and step",
    legend = levels_legend(gaps and { NONE } or {}), n = rows, row = row, columns = columns,
    cells = cells, paths = paths, texts = texts, hatched = gaps },
    { steps = steps, least = least, most = most })
end

--- Draws a row for each tensor of the FP8 layers and a column for every few steps. The shade shows
--- the SNR. m: from report_fp8.read.
function M.fp8_over_time(m, axis)
  local names = {}
  for k, r in ipairs(m.rows) do names[k] = r.name end
  return over_steps({ kind = "fp8", title = "Signal to noise of FP8 layers by step", names = names,
    starts = m.starts, width = m.width, none = "not measured in FP8",
    low = ("%g dB"):format(m.high), high = ("%g dB"):format(m.low),
    cell = function(k, i)
      local c = m.rows[k].cells[i]
      if not c then return nil end
      return with_length({ c.step, c.snr, c.underflow, c.overflow, c.amax, c.scale_min,
        c.scale_max }, 7), (m.high - (c.snr or m.high)) / (m.high - m.low)
    end }, axis, {})
end

return M
