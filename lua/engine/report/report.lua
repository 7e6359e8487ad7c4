-- A run as one self-contained HTML page: curves, heat maps, overflows, shadows, events, settings
-- and policies. Everything is drawn here as SVG, so the page is complete without its script, which
-- only adds values under the pointer (report_page.lua).
--   local html = require("engine.report.report").html(history, "runs/a")
-- Called by `engine report`.
local formats = require "engine.base.formats"
local json = require "engine.base.json"
local nearest = require "engine.base.nearest"
local show = require "engine.base.show"
local chart = require "engine.report.chart"
local curves = require "engine.run.curves"
local layers = require "engine.report.layers"
local page = require "engine.report.report_page"
local report_fp8 = require "engine.report.report_fp8"
local views = require "engine.report.views"

local M = {}

local COLUMNS = 480             -- of the curves
local HEAT_COLUMNS = 160
local escape, number, power, grouped, percent = chart.escape, chart.number, chart.power,
  show.grouped, show.percent
local log2 = function(x) return math.log(x) / math.log(2) end

local function counted(n, what)
  return ("%s %s%s"):format(grouped(n), what, n == 1 and "" or "s")
end

-- ------------------------------------------------------------------ data for the script

-- A value as JSON that is safe inside <script>: numbers to five digits, or to `digits`. A list with
-- nil (null) elements has its length in n.
local function js(value, digits)
  local kind = type(value)
  if kind == "nil" then return "null" end
  if kind == "boolean" then return tostring(value) end
  if kind == "number" then
    if value - value ~= 0 then
      return value ~= value and '"NaN"' or value > 0 and '"∞"' or '"−∞"'
    end
    if value % 1 == 0 and math.abs(value) < 1e15 then return ("%.0f"):format(value) end
    return (("%." .. (digits or 5) .. "g"):format(value):gsub("e%+?(-?)0*", "e%1"))
  end
  if kind == "string" then return (json.encode(value):gsub("<", "\\u003c")) end
  local parts = {}
  if value[1] ~= nil or value.n or next(value) == nil then
    for i = 1, value.n or #value do parts[i] = js(value[i], digits) end
    return "[" .. table.concat(parts, ",") .. "]"
  end
  for i, name in ipairs(nearest.keys(value)) do
    parts[i] = js(name) .. ":" .. js(value[name], digits)
  end
  return "{" .. table.concat(parts, ",") .. "}"
end

local function with_length(list, n)
  list.n = n
  return list
end

-- ------------------------------------------------------------------ heat maps

-- From cold to hot, on light and dark pages alike.
local RAMP = { "#27408b", "#2b57a0", "#2f6fb0", "#3387b5", "#3a9db0", "#4bb0a0", "#68bf8b",
  "#8fca78", "#b8d268", "#dcd25c", "#f0c152", "#f4a649", "#ef8640",
  "#e46338", "#d23f31" }
local BAD = "#b3128f"
local LEVELS = 14               -- of opacity, for shares

local function f(x) return (("%.2f"):format(x):gsub("%.?0+$", "")) end

-- Rectangles of one colour as a path; neighbours in a row are merged.
local function cells_path(list, edges, top, row)
  table.sort(list, function(a, b)
    if a[1] ~= b[1] then return a[1] < b[1] end
    return a[2] < b[2]
  end)
  local d, i = {}, 1
  while i <= #list do
    local k, c = list[i][1], list[i][2]
    local stop = c
    while list[i + 1] and list[i + 1][1] == k and list[i + 1][2] == stop + 1 do
      i, stop = i + 1, stop + 1
    end
    d[#d + 1] = ("M%s %sH%sV%sH%sz"):format(f(edges[c]), f(top + (k - 1) * row), f(edges[stop + 1]),
      f(top + k * row), f(edges[c]))
    i = i + 1
  end
  return table.concat(d)
end

local function shortened(text, most)
  return #text > most and "…" .. text:sub(-(most - 1)) or text
end

local function row_labels(names, top, row)
  local out = {}
  local each = math.max(1, math.ceil(9 / row))
  for k, name in ipairs(names) do
    if (k - 1) % each == 0 then
      out[#out + 1] = ('<text class="label" x="%d" y="%s" ' ..
        'text-anchor="end">%s<title>%s</title></text>'):format(chart.left - 8,
        f(top + (k - 0.5) * row + 4),
        escape(shortened(name, 14)), escape(name))
    end
  end
  return table.concat(out)
end

local function ramp_legend(colours)
  local parts = {}
  for i, colour in ipairs(colours) do
    parts[i] = ('<u style="background:%s"></u>'):format(colour)
  end
  return '<span class="ramp">' .. table.concat(parts) .. "</span>"
end

local function svg(class, data, label, height, body)
  return ('<svg class="%s" %s role="img" aria-label="%s" viewBox="0 0 %d %d">%s</svg>'):format(
    class, data, escape(label), chart.width,
    math.ceil(height), body)
end

-- Layers over the steps, by the largest stored gradient.
local function layers_over_time(l, axis)
  local low, high = views.shade_range(l)
  local n, top = #l.x, 6
  local row = #l.names > 60 and 9 or #l.names > 24 and 14 or 20
  local edges = {}
  for i = 1, n do edges[i] = axis.place(l.x[i]) end
  edges[n + 1] = axis.place(axis.last)
  if edges[n + 1] - edges[n] < 4 then edges[n + 1] = edges[n] + 4 end
  local by_colour, bad, cells, ticks = {}, {}, {}, {}
  for k = 1, #l.names do
    local list, shade = with_length({}, n), nil
    for i = 1, n do
      local cell = l.cells[k][i]
      if cell then
        local e = cell.amax > 0 and log2(cell.amax) or nil
        list[i] = with_length({ cell.step, e and math.floor(e * 10 + 0.5) / 10,
          cell.inf + cell.nan }, 3)
        -- An overflow is one step. A column of one step gets a tick for it and keeps the shade of
        -- the column before.
        if not (l.single and cell.over and shade) then
          shade = e and 1 + math.floor(math.max(0, math.min(0.9999, (e - low) / (high - low))) *
            #RAMP) or 1
        end
        if cell.overflows > 0 and not l.single then bad[#bad + 1] = { k, i }
        else
          by_colour[shade] = by_colour[shade] or {}
          table.insert(by_colour[shade], { k, i })
          if cell.overflows > 0 then
            ticks[#ticks + 1] = ("M%s %sh4v%dh-4z"):format(f(math.min(edges[i], edges[n + 1] - 4)),
              f(top + (k - 1) * row), row)
          end
        end
      end
    end
    cells[k] = list
  end
  local bottom = top + #l.names * row
  local out = { chart.x_axis(axis, bottom, bottom + 4) }
  for shade, list in pairs(by_colour) do
    out[#out + 1] = ('<path fill="%s" d="%s"/>'):format(RAMP[shade],
      cells_path(list, edges, top, row))
  end
  local broken = cells_path(bad, edges, top, row) .. table.concat(ticks)
  if broken ~= "" then out[#out + 1] = ('<path fill="%s" d="%s"/>'):format(BAD, broken) end
  out[#out + 1] = row_labels(l.names, top, row) .. '<rect class="cell"/>'
  local legend = ('<div class="legend"><span>2<sup>%d</sup>%s2<sup>%d</sup></span>%s</div>'):format(
    low, ramp_legend(RAMP), high,
    broken ~= "" and ('<span><i class="box" style="--s:%s"></i>inf or nan</span>'):format(BAD)
    or "")
  return legend .. svg("heat", 'data-heat="layers"', "Largest gradient of each layer by step",
    bottom + 26, table.concat(out)),
    { x = edges, top = top, row = row, rows = #l.names, names = l.names, cells = cells,
      limit = log2(l.format.limit) }
end

local FEWEST = 1e-7

local function level_of(share)
  return math.max(1, math.ceil((1 - math.log10(math.max(share, FEWEST)) / math.log10(FEWEST)) *
    LEVELS))
end

local function levels_path(by_level, edges, top, row)
  local out = {}
  for level, list in pairs(by_level) do
    out[#out + 1] = ('<path fill="var(--c1)" fill-opacity="%.2f" d="%s"/>'):format(0.06 + 0.94 *
      level / LEVELS, cells_path(list, edges, top, row))
  end
  return table.concat(out)
end

local function opacity_legend()
  local parts = {}
  for level = 1, LEVELS do
    parts[level] = ("color-mix(in srgb,var(--c1) %.0f%%,transparent)"):format(6 + 94 *
      level / LEVELS)
  end
  return "<div class=\"legend\"><span>0.00001 %" .. ramp_legend(parts) .. "100 %</span></div>"
end

-- The range of exponents of a picture: those seen, extended to the limits of the format if these
-- are near.
local function exponent_range(format, least, most)
  if most > format.top - 24 then most = math.max(most, format.top) end
  if least < format.normal + 24 then least = math.min(least, format.normal) end
  return math.max(least, formats.first), math.min(most, formats.last)
end

-- Layers by exponent, over the whole record.
local function layers_by_exponent(l)
  local least, most = math.huge, -math.huge
  for k = 1, #l.names do
    for e in pairs(l.hists[k]) do least, most = math.min(least, e), math.max(most, e) end
  end
  if least > most then return nil end
  least, most = exponent_range(l.format, least, most)
  local n, top = most - least + 1, 6
  local row = #l.names > 60 and 9 or #l.names > 24 and 14 or 20
  local span, edges = chart.width - chart.left - chart.right, {}
  for i = 1, n + 1 do edges[i] = chart.left + (i - 1) * span / n end
  local by_level, cells = {}, {}
  for k = 1, #l.names do
    local total, list = 0, with_length({}, n)
    for _, count in pairs(l.hists[k]) do total = total + count end
    for e, count in pairs(l.hists[k]) do
      local i = e - least + 1
      if list[i] == nil and i >= 1 and i <= n then
        list[i] = count / total
        local level = level_of(count / total)
        by_level[level] = by_level[level] or {}
        table.insert(by_level[level], { k, i })
      end
    end
    for i = 1, n do list[i] = list[i] or 0 end
    cells[k] = list
  end
  local bottom = top + #l.names * row
  local out = { levels_path(by_level, edges, top, row) }
  for i = 1, n do
    local e = least + i - 1
    if e % 4 == 0 then
      out[#out + 1] = ('<text class="tick" x="%s" y="%d" text-anchor="middle">%s</text>'):format(
        f((edges[i] + edges[i + 1]) / 2), bottom + 17, power("2", e))
    end
  end
  local function limit(e, text, anchor)
    if e < least or e > most + 1 then return end
    local x = edges[e - least + 1]
    out[#out + 1] = ('<path class="limit" d="M%s %dV%d"/><text class="limit" x="%s" y="%d" ' ..
      'text-anchor="%s">%s</text>'):format(f(x), top, bottom + 32,
      f(x + (anchor == "end" and -5 or 5)), bottom + 33, anchor, text)
  end
  limit(l.format.normal, "← lose bits", "end")
  limit(l.format.top + 1, "inf →", "end")
  out[#out + 1] = row_labels(l.names, top, row) .. '<rect class="cell"/>'
  return opacity_legend() .. svg("heat", 'data-heat="shares"',
    "Gradients of each layer by exponent", bottom + 40, table.concat(out)),
    { x = edges, top = top, row = row, rows = #l.names, names = l.names, cells = cells,
      least = least, normal = l.format.normal }
end

-- All gradients by exponent over the steps: each column shows the histogram of one step.
local function exponents_over_time(h, l, axis)
  local read = {}
  local width = math.max(1, math.ceil((axis.last - axis.first + 1) / HEAT_COLUMNS))
  local least, most = math.huge, -math.huge
  for from = axis.first, axis.last, width do
    local row = h:query("SELECT step FROM steps WHERE step >= ? AND step < ? AND hist IS NOT " ..
      "NULL ORDER BY step LIMIT 1", from, from + width)[1]
    local hist = row and h:hist(row.step)
    if hist then
      local total = 0
      for e, count in pairs(hist) do
        total, least, most = total + count, math.min(least, e), math.max(most, e)
      end
      read[#read + 1] = { from = from, step = row.step, hist = hist, total = total }
    end
  end
  if least > most then return nil end
  least, most = exponent_range(l.format, least, most)
  local n, rows, top = #read, most - least + 1, 6
  local row = math.max(3, math.min(9, math.floor(320 / rows)))
  local edges, steps, by_level, cells = {}, {}, {}, {}
  for i, column in ipairs(read) do
    edges[i], steps[i] = axis.place(column.from), column.step
    local list = with_length({}, rows)
    for k = 1, rows do list[k] = 0 end
    for e, count in pairs(column.hist) do
      if e >= least and e <= most then
        local share = count / column.total
        list[e - least + 1] = share
        local level = level_of(share)
        by_level[level] = by_level[level] or {}
        table.insert(by_level[level], { most - e + 1, i })
      end
    end
    cells[i] = list
  end
  edges[n + 1] = math.max(axis.place(axis.last), edges[n] + 2)
  local bottom = top + rows * row
  local out = { chart.x_axis(axis, bottom, bottom + 4), levels_path(by_level, edges, top, row) }
  for e = least, most do
    if e % 8 == 0 then
      out[#out + 1] = ('<text class="tick" x="%d" y="%s" text-anchor="end">%s</text>'):format(
        chart.left - 8, f(top + (most - e + 0.5) * row + 4),
        power("2", e))
    end
  end
  for _, limit in ipairs { { l.format.top + 1, l.format.name .. " ends" },
    { l.format.normal, "smallest normal number" } } do
    local e = limit[1]
    if e >= least and e <= most + 1 then
      local y = top + (most - e + 1) * row
      out[#out + 1] = ('<path class="limit" d="M%d %sH%d"/><text class="limit" x="%d" y="%s" ' ..
        'text-anchor="end">%s</text>'):format(chart.left, f(y),
        chart.width - chart.right, chart.width - chart.right - 4,
        f(y + (e > l.format.normal and 13 or -5)), escape(limit[2]))
    end
  end
  out[#out + 1] = '<rect class="cell"/>'
  return opacity_legend() .. svg("heat", 'data-heat="time"', "All gradients by exponent and step",
    bottom + 26, table.concat(out)),
    { x = edges, top = top, row = row, rows = rows, cells = cells, steps = steps, least = least,
      most = most }
end

-- FP8 layers over the measured steps, by signal to noise: hot means a large loss.
local function fp8_over_time(m, axis)
  local n, top = #m.steps, 6
  local row = #m.rows > 90 and 6 or #m.rows > 45 and 9 or #m.rows > 24 and 14 or 20
  local edges = {}
  for i = 1, n do edges[i] = axis.place(m.starts[i]) end
  edges[n + 1] = math.max(axis.place(axis.last), edges[n] + 4)
  local by_colour, cells, names = {}, {}, {}
  for k, r in ipairs(m.rows) do
    local list = with_length({}, n)
    for i = 1, n do
      local c = r.cells[i]
      if c then
        local low = c.snr and c.snr - c.snr == 0 and c.snr or m.high
        local shade = 1 + math.floor(math.max(0,
          math.min(0.9999, (m.high - low) / (m.high - m.low))) * #RAMP)
        list[i] = with_length({ c.step, c.snr, c.underflow, c.overflow, c.amax, c.scale_min,
          c.scale_max }, 7)
        by_colour[shade] = by_colour[shade] or {}
        table.insert(by_colour[shade], { k, i })
      end
    end
    cells[k], names[k] = list, r.name
  end
  local bottom = top + #m.rows * row
  local out = { chart.x_axis(axis, bottom, bottom + 4) }
  for shade, list in pairs(by_colour) do
    out[#out + 1] = ('<path fill="%s" d="%s"/>'):format(RAMP[shade],
      cells_path(list, edges, top, row))
  end
  out[#out + 1] = row_labels(names, top, row) .. '<rect class="cell"/>'
  local legend = ('<div class="legend"><span>%g dB%s%g dB</span></div>'):format(m.high,
    ramp_legend(RAMP), m.low)
  return legend .. svg("heat", 'data-heat="fp8"', "Signal to noise of FP8 layers by step",
    bottom + 26, table.concat(out)),
    { x = edges, top = top, row = row, rows = #m.rows, names = names, cells = cells }
end

-- ------------------------------------------------------------------ curves

local MARKED = { swap = true, resumed = true, set = true, pause = true, stuck = true,
  swap_refused = true, undo = true }

local function events_of(h)
  local marked, listed, evaluations = {}, {}, {}
  for event in h:each("SELECT step, kind, text FROM events WHERE kind NOT IN ('overflow', " ..
    "'checkpoint') ORDER BY id") do
    local loss = event.kind == "evaluation"
      and tonumber((event.text or ""):match("loss ([%w.+-]+)"))
    if loss then evaluations[#evaluations + 1] = { event.step, loss }
    else
      listed[#listed + 1] = event
      if MARKED[event.kind] and #marked < 200 then
        marked[#marked + 1] = { event.step, event.kind:gsub("_", " ") .. ": " ..
          (event.text or "") }
      end
    end
  end
  return marked, listed, evaluations
end

local MOST_POINTS = 600          -- of a shadow's curve

-- Verdicts of a shadow: all of them, or the current ones at MOST_POINTS evenly spaced steps.
local function points_of(h, name, axis)
  local points = {}
  local n = h:query("SELECT count(*) AS n FROM (SELECT 1 FROM shadows WHERE name = ? LIMIT ?)",
    name, MOST_POINTS + 1)[1].n
  if n <= MOST_POINTS then
    for _, row in ipairs(h:shadow(name)) do
      if row.scale then points[#points + 1] = { row.step, row.scale, row.action } end
    end
    return points
  end
  for i = 0, MOST_POINTS do
    local step = axis.first + math.floor((axis.last - axis.first) * i / MOST_POINTS)
    local row = h:query("SELECT scale, action FROM shadows WHERE name = ? AND step <= ? ORDER " ..
      "BY step DESC LIMIT 1", name, step)[1]
    if row and row.scale then points[#points + 1] = { step, row.scale, row.action } end
  end
  return points
end

local function shadows_of(h, axis)
  local list = {}
  for i, s in ipairs(h:shadows()) do
    list[i] = { name = s.name, points = points_of(h, s.name, axis), skipped = s.skipped,
      failed = s.failed, scale = s.scale, colour = 2 + (i - 1) % 5 }
  end
  return list
end

local function panel(o)
  local body, height = chart.body(o)
  if not body then return "" end
  return svg("panel", ('data-column="%s"'):format(o.series[1].column or ""), o.title, height,
    body .. ('<line class="cross" y1="10" y2="%d" x1="0" x2="0"/>'):format(height - 24))
end

local function section(title, about, ...)
  local parts = {}
  for i = 1, select("#", ...) do parts[#parts + 1] = (select(i, ...)) end
  local body = table.concat(parts)
  if body == "" then return "" end
  return ("<section><h2>%s</h2>%s%s</section>\n"):format(title, about and "<p>" .. about ..
    "</p>" or "", body)
end

local function html_table(head, rows, right)
  if #rows == 0 then return "" end
  right = right or {}
  local out = { '<div class="scroll"><table><tr>' }
  for c, text in ipairs(head) do
    out[#out + 1] = ("<th%s>%s</th>"):format(right[c] and ' class="n"' or "", text)
  end
  out[#out + 1] = "</tr>"
  for _, row in ipairs(rows) do
    out[#out + 1] = "<tr>"
    for c = 1, #head do
      out[#out + 1] = ("<td%s>%s</td>"):format(right[c] and ' class="n"' or "", row[c] or "")
    end
    out[#out + 1] = "</tr>"
  end
  out[#out + 1] = "</table></div>"
  return table.concat(out)
end

-- ------------------------------------------------------------------ a policy's source

local WORDS = {}
for word in ("and break do else elseif end false for function goto if in local nil not or " ..
  "repeat return then true until while"):gmatch("%a+") do
  WORDS[word] = true
end

--- Lua as HTML with comments, strings, keywords and numbers marked.
local function highlighted(source)
  source = show.shown(source, true)
  local out, at, n = {}, 1, #source
  local function mark(class, stop)
    out[#out + 1] = ('<span class="%s">%s</span>'):format(class,
      chart.entities(source:sub(at, stop)))
    at = stop + 1
  end
  while at <= n do
    local _, stop, equals = source:find("^%-%-%[(=*)%[", at)
    if stop then
      local _, last = source:find("]" .. equals .. "]", stop + 1, true)
      mark("c", last or n)
    elseif source:find("^%-%-", at) then
      mark("c", (source:find("\n", at, true) or n + 1) - 1)
    elseif source:find("^[\"']", at) then
      local quote, i = source:sub(at, at), at + 1
      while i <= n and source:sub(i, i) ~= quote and source:sub(i, i) ~= "\n" do
        i = i + (source:sub(i, i) == "\\" and 2 or 1)
      end
      mark("s", math.min(i, n))
    else
      local _, word_end = source:find("^[%a_][%w_]*", at)
      local _, number_end = source:find("^%d[%w.]*", at)
      if word_end then
        if WORDS[source:sub(at, word_end)] then mark("k", word_end)
        else
          out[#out + 1] = source:sub(at, word_end)
          at = word_end + 1
        end
      elseif number_end then mark("u", number_end)
      else
        out[#out + 1] = chart.entities(source:sub(at, at))
        at = at + 1
      end
    end
  end
  return table.concat(out)
end
M.highlighted = highlighted

-- ------------------------------------------------------------------ words

local function duration(seconds)
  if not seconds then return "–" end
  if seconds < 60 then return (seconds < 1 and "%.2g s" or "%.1f s"):format(seconds) end
  if seconds < 3600 then return ("%d min %d s"):format(seconds / 60, seconds % 60) end
  if seconds < 86400 then return ("%d h %d min"):format(seconds / 3600, seconds / 60 % 60) end
  return ("%d d %d h"):format(seconds / 86400, seconds / 3600 % 24)
end

-- The name of the layer whose gradients came nearest to the top of the format, its distance in
-- bits, and the largest number of columns with inf or nan.
local function nearest_layer(l)
  local name, room, bad
  for k = 1, #l.names do
    local s = views.layer_summary(l, k)
    if s.amax > 0 or s.bad > 0 then
      local here = s.amax > 0 and log2(l.format.limit / s.amax) or 0
      if not room or s.bad > (bad or 0) or (s.bad == 0 and not bad and here < room) then
        name, room = l.names[k], here
      end
      if s.bad > 0 then bad = math.max(bad or 0, s.bad) end
    end
  end
  return name, room, bad
end

local function lead(info, l, c)
  local parts = {}
  local opening = info.how == "running" and "The run is in progress: %s in %s so far"
    or info.how == "finished" and "The run finished after %s in %s" or
    "The run made %s in %s"
  local updates = info.skipped == 0 and ", each with an update."
    or (", %s of them without an update (%s)."):format(grouped(info.skipped),
    percent(info.skipped, info.rows))
  parts[1] = opening:format(counted(info.rows, "step"), duration(info.seconds)) .. updates
  if info.failed > 0 then
    parts[2] = ("The policy failed in %s of %s; its last good verdict was used."):format(
      grouped(info.failed), counted(info.rows, "step"))
  end
  local least
  for i = 1, #c.x do
    local m = c.loss.min[i]
    if m and (not least or m < least) then least = m end
  end
  if least then
    parts[#parts + 1] = ("The loss ended at %s; its lowest was %s."):format(number(info.loss),
      number(least))
  end
  if info.overflows > 0 then
    local name, _, bad = nearest_layer(l)
    parts[#parts + 1] = ("The gradients overflowed in %s%s."):format(counted(info.overflows,
      "step"),
      bad and (", most often in <code>%s</code>"):format(escape(name)) or "")
  elseif l.rows > 0 then
    local name, room = nearest_layer(l)
    if name and room < 40 then
      parts[#parts + 1] = ("No gradient overflowed; <code>%s</code> came nearest to the top of " ..
        "%s, %.1f bits below it."):format(escape(name),
        l.format.name, room)
    end
  end
  return '<p class="lead">' .. table.concat(parts, " ") .. "</p>"
end

local function tiles(h, info, c)
  local speed = info.tokens > 0 and info.seconds > 0 and info.tokens / info.seconds or nil
  local low, high, least = math.huge, 0, math.huge
  for i = 1, #c.x do
    low, high = math.min(low, c.scale.min[i] or low), math.max(high, c.scale.max[i] or high)
    least = math.min(least, c.loss.min[i] or least)
  end
  local last = h:query("SELECT max(step) AS step FROM steps WHERE overflow")[1].step
  local rate = speed or info.rows / math.max(info.seconds, 1e-9)
  local list = {
    { "loss at the end", number(info.loss - info.loss == 0 and tonumber(("%.4f"):format(info.loss))
      or info.loss),
      least < math.huge and "lowest " .. number(least) },
    { "loss scale", chart.scale(info.scale), high > low and ("%s to %s"):format(chart.scale(low),
      chart.scale(high)) or "constant" },
    { "steps", grouped(info.rows), "in " .. duration(info.seconds) },
    { "updates", grouped(info.updates), info.skipped > 0 and grouped(info.skipped) .. " skipped"
      or "none skipped" },
    { "overflows", grouped(info.overflows), last and "the last at step " .. grouped(last)
      or "none" },
    { speed and "tokens a second" or "steps a second",
      number(rate >= 100 and math.floor(rate + 0.5) or tonumber(("%.3g"):format(rate))),
      speed and "of " .. show.count(info.tokens) or "" },
  }
  local out = {}
  for i, tile in ipairs(list) do
    out[i] = ('<div class="tile"><span>%s</span><b>%s</b><span>%s</span></div>'):format(tile[1],
      tile[2], tile[3] or "")
  end
  return '<div class="tiles">' .. table.concat(out) .. "</div>\n"
end

local function overflow_sections(h)
  local rows, most = {}, 0
  local counts = h:query([[SELECT coalesce(p.name, 'parameter ' || s.first_bad) AS name,
      count(*) AS n, max(step) AS last, sum(nan > 0) AS nans
    FROM steps s LEFT JOIN parameters p ON p.id = s.first_bad WHERE overflow GROUP BY s.first_bad
        ORDER BY n DESC, name]])
  for _, row in ipairs(counts) do most = math.max(most, row.n) end
  for i = 1, math.min(12, #counts) do
    local row = counts[i]
    rows[i] = { "<code>" .. escape(row.name) .. "</code>", grouped(row.n),
      ('<div class="bar" style="width:%.0fpx"></div>'):format(90 * row.n / most),
      grouped(row.last) }
  end
  local last = {}
  for _, row in ipairs(h:query([[SELECT s.step, scale, next_scale, inf, nan, coalesce(p.name,
      '') AS name FROM steps s
    LEFT JOIN parameters p ON p.id = s.first_bad WHERE overflow ORDER BY s.step DESC,
        s.attempt DESC LIMIT 12]])) do
    last[#last + 1] = { grouped(row.step), chart.scale(row.scale), chart.scale(row.next_scale),
      grouped(row.inf or 0 / 0), grouped(row.nan or 0 / 0) }
  end
  if #rows == 0 then return "" end
  return '<div class="pair">' .. section("Where overflows begin",
    #counts > 12 and ("The most frequent of %d parameters."):format(#counts) or nil,
    html_table({ "first parameter with inf or nan", "steps", "", "last" }, rows,
        { false, true, false, true })) ..
    section("The last overflows", nil, html_table({ "step", "scale", "then", "inf", "nan" }, last,
      { true, true, true, true, true })) .. "</div>"
end

local MOST_EVENTS = 200

local function events_section(listed)
  local rows = {}
  for i = math.max(1, #listed - MOST_EVENTS + 1), #listed do
    local e = listed[i]
    rows[#rows + 1] = { grouped(e.step), escape((e.kind:gsub("_", " "))),
      (escape(e.text or ""):gsub("\n", "<br>")) }
  end
  return section("Events", #listed > MOST_EVENTS and ("The last %d of %s."):format(MOST_EVENTS,
    grouped(#listed)) or nil,
    html_table({ "step", "", "" }, rows, { true }))
end

local function shadows_section(shadows, info)
  local rows = {}
  for _, s in ipairs(shadows) do
    rows[#rows + 1] = { ('<i class="key" style="--s:var(--c%d)"></i><code>%s</code>'):format(
      s.colour, escape(s.name)),
      ("%s (%s)"):format(grouped(s.skipped), percent(s.skipped, info.rows)), chart.scale(s.scale),
      grouped(s.failed) }
  end
  local about = ("Policies that saw every step and decided nothing. The run's own policy left " ..
    "%s without an update."):format(counted(info.skipped, "step"))
  return section("Shadows", about,
    html_table({ "policy", "would have skipped", "scale at the end", "failed" }, rows,
    { false, true, true, true }))
end

local function fp8_table(m)
  local rows = {}
  for i, r in ipairs(m.worst) do
    local last = r.last
    rows[i] = { "<code>" .. escape(r.site) .. "</code>", escape(r.role),
      r.least and ("%.1f dB"):format(r.least) or "–",
      r.least_at and grouped(r.least_at) or "–",
      last.snr and ("%.1f dB"):format(last.snr) or "–",
      percent(r.underflow or 0, 1), percent(r.overflow or 0, 1),
      number(last.amax or 0 / 0), number(r.scale_min or 0 / 0), number(r.scale_max or 0 / 0) }
  end
  return html_table({ "layer", "role", "lowest SNR", "at step", "last", "underflow up to",
    "overflow up to", "last amax", "least scale", "largest" }, rows,
    { false, false, true, true, true, true, true, true, true, true })
end

local function settings_sections(h, info)
  local run, settings = {}, {}
  local meta = h:meta()
  for _, key in ipairs(nearest.keys(meta)) do
    local value = meta[key]
    local is_default = key == "zero" and value == "0" or (key == "comm_dtype" or key == "wire")
      and value == "own"
    if not is_default then
      run[#run + 1] = { key == "policy" and "policy at the start" or escape(key),
        escape(tonumber(value) and number(tonumber(value)) or value) }
    end
  end
  for _, row in ipairs(h:query("SELECT key, value FROM config ORDER BY key")) do
    if row.value ~= "" then
      settings[#settings + 1] = { escape(row.key), "<code>" .. escape(row.value) .. "</code>" }
    end
  end
  local policies = {}
  for i, p in ipairs(h:policies()) do
    local _, lines = p.source:gsub("\n", "\n")
    policies[i] = ("<details><summary>%s <span>%s · " ..
      "%s</span></summary><pre>%s</pre></details>"):format(escape(p.name),
      escape(p.hash), counted(math.max(1, lines), "line"), highlighted(p.source))
  end
  local two = #settings > 0 and '<div class="pair">%s%s</div>' or "%s%s"
  return two:format(section("The run", nil, html_table({ "", "" }, run)),
    section("Settings", nil, html_table({ "", "" }, settings))) ..
    section(#policies == 1 and "Its policy" or "Its policies", nil, table.concat(policies))
end

-- ------------------------------------------------------------------ the page

local NAMES = { "loss", "scale", "stored", "norm", "underflow", "lr" }
local TITLES = { loss = "loss", scale = "loss scale", stored = "largest, as stored",
  norm = "gradient norm", underflow = "subnormal", lr = "learning rate" }

--- The page as text.
function M.html(h, path)
  local info = require("engine.run.runs").info(path, h)
  if info.problem then error(info.problem, 0) end
  local c = curves.read(h, NAMES, { points = COLUMNS })
  local axis = chart.axis(c)
  local l = layers.read(h, { points = HEAT_COLUMNS })
  local marked, listed, evaluations = events_of(h)
  local shadows = shadows_of(h, axis)
  local marks = curves.marks(c)
  local function curve(name, o)
    o.c, o.axis, o.marks, o.events, o.title = c, axis, marks, marked, TITLES[name]
    o.series = o.series or {}
    table.insert(o.series, 1, { column = name, colour = 1 })
    return panel(o)
  end
  local band = c.width > 1 and ("The line is the mean of %s steps, the band spans from their " ..
    "least to their largest value."):format(grouped(c.width)) or nil
  local legend = {}
  for _, s in ipairs(shadows) do
    legend[#legend + 1] = ('<span><i style="--s:var(--c%d)"></i>%s</span>'):format(s.colour,
      escape(s.name))
  end
  if #legend > 0 then
    table.insert(legend, 1, '<span><i style="--s:var(--c1)"></i>in use</span>')
  end
  if #marks > 0 then
    legend[#legend + 1] = '<span><i class="tall" style="--s:var(--bad)"></i>overflow</span>'
  end
  if #marked > 0 then
    legend[#legend + 1] = '<span><i class="dash" style="--s:var(--event)"></i>policy swapped, ' ..
      'settings changed, run resumed</span>'
  end
  local scale_series = {}
  for i, s in ipairs(shadows) do scale_series[i] = { points = s.points, colour = s.colour } end
  local scaled = info.precision == nil or c.scale.max[1] ~= 1 or c.scale.max[#c.x] ~= 1
    or #marks > 0 or #shadows > 0
  local heat_layers, data_layers, heat_shares, data_shares, heat_time, data_time
  if l.rows > 0 then
    heat_layers, data_layers = layers_over_time(l, axis)
    heat_shares, data_shares = layers_by_exponent(l)
  end
  heat_time, data_time = exponents_over_time(h, l, axis)
  local meters, heat_fp8, data_fp8 = report_fp8.read(h, axis), nil, nil
  if meters then heat_fp8, data_fp8 = fp8_over_time(meters, axis) end
  local top = l.format.top < 64 and { { l.format.limit, l.format.name .. " ends" } } or nil
  local any_underflow = false
  for i = 1, #c.x do any_underflow = any_underflow or (c.underflow.max[i] or 0) > 0 end
  local kind = info.failed == 0 and ({ finished = "good", running = "live" })[info.how] or "bad"
  local sub = {}
  local function say(format, value)
    if value and value ~= "" then sub[#sub + 1] = format:format(value) end
  end
  say("%s", info.created and os.date("%Y-%m-%d %H:%M", info.created))
  say("precision %s", info.precision and escape(info.precision))
  say("policy %s", info.policy and escape(info.policy))
  say("%s parameters", info.parameters and grouped(info.parameters))
  say("on %s", info.device and escape(info.device))
  say("%s", info.ranks > 1 and escape(require("engine.dist.ranks").job_text(info.ranks, info.zero,
    info.comm_dtype)) or nil)

  local body = {
    ('<header><div><h1>%s<span class="badge %s">%s</span></h1><p ' ..
      'class="sub">%s</p></div><button id="theme" type="button">Dark</button></header>\n'):format(
      escape(info.name), kind, escape(shortened(info.how == "broken" and "broken off" or info.how,
        60)) .. (info.failed > 0 and ", the policy failed" or ""), table.concat(sub, " · ")),
    lead(info, l, c), tiles(h, info, c),
    (info.how == "stopped" or info.how == "error")
    and section("How it ended", nil, "<p>" .. escape(info.ended) .. "</p>") or "",
    section("Loss", band, curve("loss",
      { height = 210, series = #evaluations > 0 and { { points = evaluations, colour = 2 } }
      or nil }),
      #evaluations > 0 and '<div class="legend"><span><i ' ..
        'style="--s:var(--c2)"></i>evaluation</span></div>' or ""),
    scaled and section("Loss scale", "The factor on the loss before the backward pass" ..
      (#shadows > 0 and ", and what each shadow would have chosen." or "."),
      #legend > 0 and '<div class="legend">' .. table.concat(legend) .. "</div>" or "",
      curve("scale", { log = 2, height = 190, hold = true, series = scale_series })) or "",
    section("Largest gradient, as stored",
      ("Times the loss scale, as stored in %s."):format(l.format.name),
      curve("stored", { log = 2, height = 150, limits = top })),
    heat_layers and section("Layers over the run",
      ("The largest gradient of each layer, as stored: hot is near the top of %s. From %s of " ..
        "statistics, recorded at intervals and at overflows."):format(
        l.format.name, counted(l.rows, "row")), heat_layers) or "",
    heat_shares and section("Layers by exponent",
      ("The share of each layer's nonzero gradients in each binade of %s."):format(l.format.name),
      heat_shares) or "",
    heat_time and section("All gradients by exponent",
      ("The share of all gradients in each binade of %s, over the steps of the run."):format(
        l.format.name), heat_time) or "",
    meters and section("FP8 layers",
      ("The signal-to-noise ratio of each layer's quantized input x, weight w and output " ..
        "gradient dy: hot where most is lost, blank where a " ..
        "layer was in high precision. From %s; the table lists the layers that lost most."):format(
          counted(meters.looks, "measurement")), heat_fp8, fp8_table(meters)) or "",
    any_underflow and section("Gradients that lose bits",
      "The share below the smallest normal number of their format.",
      curve("underflow", { log = 10, height = 110 })) or "",
    section("Gradient norm", "Of the true gradients, without the loss scale.",
      curve("norm", { log = 10, height = 130 })),
    section("Learning rate", nil, curve("lr", { height = 80 })),
    overflow_sections(h), #shadows > 0 and shadows_section(shadows, info) or "",
    events_section(listed), settings_sections(h, info),
    ("<footer>Written by engine %s from %s, %s.</footer>"):format(
      escape(require("engine.base.ffi").version), escape(h.path), os.date("%Y-%m-%d %H:%M")),
  }

  local columns = {}
  for _, name in ipairs(NAMES) do
    columns[name] = { min = with_length(c[name].min, #c.x), max = with_length(c[name].max, #c.x),
      mean = with_length(c[name].mean, #c.x) }
  end
  local shadow_data = with_length({}, #shadows)
  for i, s in ipairs(shadows) do
    shadow_data[i] = { name = escape(s.name), points = with_length(s.points, #s.points) }
  end
  local event_data = with_length({}, #marked)
  for i, e in ipairs(marked) do event_data[i] = { e[1], escape(shortened(e[2], 160)) } end
  local data = { first = axis.first, last = axis.last, left = chart.left,
    right = chart.width - chart.right, width = c.width, x = c.x,
    step = c.first_step, names = NAMES, titles = TITLES, columns = columns, overflows = c.overflows,
    events = event_data, shadows = shadow_data,
    format = l.format.name, layers = data_layers, shares = data_shares, time = data_time,
    fp8 = data_fp8 }
  local vars = function(t, p) return (t:gsub("\n", "")) .. ";" .. p end
  return ([[<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>%s</title>
<style>:root{%s}
@media(prefers-color-scheme:dark){:root:not([data-theme=light]){%s}}
:root[data-theme=dark]{%s}
%s%s</style></head><body><main>
%s
</main><div id="tip"></div>
<script type="application/json" id="data">%s</script>
<script>%s</script>
</body></html>
]]):format(escape(info.name), vars(chart.light, page.light), vars(chart.dark, page.dark),
    vars(chart.dark, page.dark), chart.style, page.style,
    table.concat(body), js(data), page.script)
end

return M
