-- Draws curves as SVG: panels, one below the other, with a common axis of steps. In the report the
-- panels are as wide as the page; in a separate file (`engine plot --svg`) their width is fixed.
--   chart.body { title =, c = curves.read(...), span = 1000,
--     series = { { name = "loss", column = "loss" } },
--     log = 2, height = 180, limits = { { 65504, "f16 ends" } }, marks = marks.read(h, c) }
-- A series is a line of means in a band from the smallest to the largest value (for a group of
-- runs: one standard deviation on either side). The band is drawn if each point of the line stands
-- for several steps (c.width > 1) or the series' field `band` is true. Instead of `column`, a
-- series may have `points`: { { step, value } ... }; a value lasts until the next point, and the
-- value false makes a gap; such a series has no band. With `join`, line and band bridge missing
-- values. Series i is drawn in style i (a colour and dashes), or in the style whose number is in
-- its field `style`. `limits` are values that get a dotted line with a text. More fields of a
-- panel: name (the title of its y axis), axis (from M.axis), hold (true: draws single steps as a
-- staircase), named (true: the legend also names a single series). Shapes have x coordinates from 0
-- to `span`, which a page stretches to its width. Texts are placed by percentages instead, so that
-- they keep their size. Used by the report's pages, views.lua, gnuplot.lua and lab.lua;
-- docs/page.lua uses only entities().
local show = require "engine.base.show"
local plot = require "engine.report.plot"

local M = {}

-- Margins of a panel in pixels. Above it, TOP pixels are for the name of the y axis, and WORDS
-- pixels for the labels of marks. The margin below it has the numbers of steps.
M.left, M.right, M.bottom = 92, 14, 40
local TOP, WORDS = 28, 16
M.span = 1000                   -- the default of `span`
local NARROW = 230              -- width of a panel on a phone, pixels
local GLYPH = 6.6               -- width of a character, pixels

-- Replaces the characters that HTML reserves with entities.
function M.entities(text)
  return (text:gsub("[&<>\"']", { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;",
    ['"'] = "&quot;", ["'"] = "&#39;" }))
end

-- Makes text of unknown origin safe for a page.
local function escape(text) return M.entities(show.shown(text, true)) end
M.escape = escape

local SUPERSCRIPT = { ["-"] = "⁻", ["0"] = "⁰", ["1"] = "¹", ["2"] = "²", ["3"] = "³",
  ["4"] = "⁴", ["5"] = "⁵", ["6"] = "⁶", ["7"] = "⁷", ["8"] = "⁸", ["9"] = "⁹" }
local function power(base, exponent)
  return base .. (("%d"):format(exponent):gsub(".", SUPERSCRIPT))
end
M.power = power

--- A number as text: 1234567 -> "1,234,567"; 0.00012 -> "1.2×10⁻⁴"; 0.25 -> "0.25".
function M.number(x)
  if x == nil then return "–" end
  if x ~= x then return "NaN" end
  if x == math.huge or x == -math.huge then return x > 0 and "∞" or "−∞" end
  local size = math.abs(x)
  if x % 1 == 0 and size < 1e12 then return show.grouped(x) end
  if size >= 1e6 or size < 1e-3 then
    local mantissa, exponent = ("%.2e"):format(x):match("^(.-)e([+-]%d+)$")
    return mantissa:gsub("%.?0+$", "") .. "×" .. power("10", tonumber(exponent))
  end
  return size >= 1000 and show.grouped(math.floor(x + 0.5)) or ("%.4g"):format(x)
end

-- A loss scale as text: 8192 -> "8,192"; powers of two above 8192 or below 1 as 2ⁿ.
function M.scale(x)
  if x and x > 0 and x < math.huge then
    local mantissa, exponent = math.frexp(x)
    if mantissa == 0.5 and (exponent > 14 or exponent < 1) then return power("2", exponent - 1) end
  end
  return M.number(x)
end

-- Returns about n ticks { value, text } of an axis from low to high. With `log` (a base), low and
-- high are logarithms.
local function ticks(low, high, log, n)
  local list = {}
  -- If fewer than two powers fit, or the range is hardly wider than one power, ticks are at round
  -- numbers instead of powers.
  if log and (high - low < 1.2 or math.floor(high) <= math.ceil(low)) then
    for _, t in ipairs(ticks(log ^ low, log ^ high, nil, n)) do
      if t[1] > 0 then list[#list + 1] = { math.log(t[1]) / math.log(log), t[2] } end
    end
    return list
  end
  local step = log and math.max(1, math.ceil((high - low) / n)) or plot.round_step(high - low, n)
  local digits = math.max(0, -math.floor(math.log10(step) + 1e-9))
  local value = math.ceil(low / step - 1e-9) * step
  while value <= high + step * 1e-9 and #list < 50 do
    local v = math.abs(value) < step * 1e-9 and 0 or value
    local text
    if log then text = power(tostring(log), v)
    elseif math.max(math.abs(low), math.abs(high)) < 1e-3 or math.abs(v) >= 1e6 then
      text = M.number(tonumber(("%.3g"):format(v)))
    else
      text = (digits == 0 or v == 0) and M.number(v)
        or ("%." .. math.min(digits, 6) .. "f"):format(v)
    end
    list[#list + 1] = { v, text }
    value = value + step
  end
  return #list < 2 and ticks(low, high, log, 2 * n) or list
end

local function f(x) return (("%.1f"):format(x):gsub("%.0$", "")) end

--- Returns the axis of steps of a run, as { first, last, span, place = function(step) -> 0 to
--- span }. A single step is in the middle. c.places: names of the positions, or nil; c.unit: the
--- name of the axis, or nil for "step".
function M.axis(c, span)
  local first, last = c.first or 0, c.last or 1
  span = span or M.span
  local axis = { first = first, last = last, span = span, places = c.places, unit = c.unit }
  if last <= first then axis.first, axis.last = first - 0.5, last + 0.5 end
  function axis.place(step)
    return math.max(0, math.min(1, (step - axis.first) / (axis.last - axis.first))) * span
  end
  return axis
end

--- Returns the SVG of a text at x (0 to 1) and y (pixels) in a panel, moved by dx, dy pixels.
--- class: its CSS classes; anchor: "start", "middle" or "end", the point of the text that is at x.
function M.text(class, x, y, dx, dy, anchor, text)
  return ('<text class="%s" x="%s%%" y="%s" dx="%s" dy="%s" text-anchor="%s">%s</text>'):format(
    class, f(100 * x), f(y), f(dx), f(dy), anchor, text)
end

--- Returns two SVG texts for a panel of `height` pixels: the grid lines of the x axis, and the
--- labels of these lines (steps or names).
function M.x_axis(axis, height)
  local paths, texts, list = {}, {}, {}
  local places = axis.places or {}
  for i = 1, #places, math.max(1, math.ceil(#places / 10)) do
    list[#list + 1] = { i, escape(places[i]) }
  end
  for _, t in ipairs(#places == 0 and ticks(axis.first, axis.last, nil, 8) or {}) do
    if t[1] % 1 == 0 then list[#list + 1] = { t[1], M.number(t[1]) } end
  end
  -- a narrow page shows only some of the labels
  local widest = #list > 0 and #list[#list][2] * GLYPH + 12 or 0
  local every = math.ceil(widest * #list / NARROW)
  for i, t in ipairs(list) do
    local x = axis.place(t[1])
    paths[i] = ('<path class="grid" d="M%s 0V%s"/>'):format(f(x), f(height))
    local anchor = axis.places and x == axis.span and "end" or "middle"    -- a name may be long
    texts[i] = M.text((i - 1) % every == 0 and "tick" or "tick wide", x / axis.span, height, 0, 16,
      anchor, t[2])
  end
  texts[#texts + 1] = M.text("tick", 1, height, 0, 33, "end", escape(axis.unit or "step"))
  return table.concat(paths), table.concat(texts)
end

--- Returns the shapes and texts of a panel as one SVG. `place`: the attributes x, y and width of
--- this SVG in a file, "" in a page. `behind`: SVG to draw behind the shapes, or nil.
function M.area(span, height, paths, texts, place, behind)
  return ('<svg class="area" %s height="%s" overflow="visible">%s<svg class="shapes" ' ..
    'viewBox="0 0 %s %s" width="100%%" height="%s" preserveAspectRatio="none" ' ..
    'overflow="visible">%s</svg>%s</svg>'):format(place or "", f(height), behind or "", f(span),
    f(height), f(height), paths, texts)
end

-- Returns a value in the units of an axis; nil if a logarithmic axis cannot show it. The value is
-- clamped, so that the range of the axis stays finite.
local function scaled(x, log)
  if not x then return nil end
  if log then return x > 0 and math.log(x) / math.log(log) or nil end
  return math.max(-8e307, math.min(8e307, x))
end

-- Returns a list of { low, mean, high, x = step } for a series, in the units of the y axis. Without
-- points, there is an entry for each column of the picture; with points, for each point and each
-- step at which a point's value ends. In a gap, low, mean and high are nil. last: the last step of
-- the axis.
local function values_of(c, series, log, last)
  local v, list, held = c[series.column], {}, nil
  for i, x in ipairs(series.points and {} or c.x) do
    local mean = scaled(v.mean[i], log)
    list[i] = { scaled(v.min[i], log) or mean, mean, scaled(v.max[i], log), x = x }
  end
  local function put(x, value) list[#list + 1] = { value, value, value, x = x } end
  for _, point in ipairs(series.points or {}) do
    local value = scaled(point[2], log)
    if held and not value then put(point[1], held) end
    put(point[1], value)
    held = value
  end
  if held then put(last, held) end
  return list
end

-- Returns the SVG path of the line through the values of a series, the SVG path of dots at values
-- that have no neighbours, and whether the series is a single dot. list: from values_of.
-- place(value): the y coordinate. hold: the line is a staircase. join: the line bridges missing
-- values.
local function line_path(list, axis, place, hold, join)
  local line, dots, started = {}, {}, false
  local before
  for i, v in ipairs(list) do
    if v[2] then
      local x, y = f(axis.place(v.x)), f(place(v[2]))
      if not started then line[#line + 1] = "M" .. x .. " " .. y
      elseif hold then
        if y ~= before then line[#line + 1] = "H" .. x .. "V" .. y
        elseif not list[i + 1] or not list[i + 1][2] then line[#line + 1] = "H" .. x end
      else line[#line + 1] = "L" .. x .. " " .. y end
      if not (list[i + 1] and list[i + 1][2]) and not (i > 1 and list[i - 1][2]) then
        dots[#dots + 1] = ("M%s %sh.01"):format(x, y)
      end
      started, before = true, y
    elseif not join then
      started = false
    end
  end
  return table.concat(line), table.concat(dots), #dots == 1 and #line == 1
end

-- Returns the SVG path of the band from low to high. The arguments are those of line_path.
local function band_path(list, axis, place, join)
  local paths, up, down = {}, {}, {}
  for i = 1, #list + 1 do
    local v = list[i]
    if v and v[2] then
      local x = f(axis.place(v.x))
      up[#up + 1] = x .. " " .. f(place(v[3]))
      table.insert(down, 1, x .. " " .. f(place(v[1])))
    elseif not (v and join) then
      if #up > 1 then
        paths[#paths + 1] = "M" .. table.concat(up, "L") .. "L" .. table.concat(down, "L") .. "Z"
      end
      up, down = {}, {}
    end
  end
  return table.concat(paths)
end

-- Returns the range of a panel's y axis, or nil without values. The range includes each limit that
-- exceeds the values by less than their own range (on a logarithmic axis: by less than 6 powers).
-- lists: from values_of, one for each series.
local function range_of(o, lists)
  local low, high = math.huge, -math.huge
  for _, list in ipairs(lists) do
    for _, v in ipairs(list) do
      if v[1] then low, high = math.min(low, v[1]), math.max(high, v[3]) end
    end
  end
  if low > high then return nil end
  local had = high
  for _, limit in ipairs(o.limits or {}) do
    local value = scaled(limit[1], o.log)
    if value > low and value < had + (o.log and 6 or (had - low)) then
      high = math.max(high, value)
    end
  end
  local margin = (high - low) * 0.06
  if margin == 0 then margin = o.log and 1 or math.max(math.abs(low) * 0.1, 1e-9) end
  if not o.log and low >= 0 and low - margin < 0 then return 0, high + margin end
  return low - margin, high + margin
end

local TICKS = { overflow = "M%s %sv-8", skip = "M%s %sv-5", checkpoint = "M%s 0v6" }

-- Adds the marks of a panel to `paths` and `texts`: ticks at its lower or upper edge, and lines,
-- labelled where there is room. A label that fits only on a wide page has the class "wide". Returns
-- true if there are lines.
local function draw_marks(list, axis, height, paths, texts)
  local lines = {}
  for _, m in ipairs(list or {}) do
    if m.texts then
      for i, step in ipairs(m.at) do
        lines[#lines + 1] = { step, (m.kind:gsub("_", " ")), m.texts[i] }
      end
    else
      local d = {}
      for i, step in ipairs(m.at) do d[i] = TICKS[m.kind]:format(f(axis.place(step)), f(height)) end
      paths[#paths + 1] = ('<path class="mark %s" d="%s"><title>%s</title></path>'):format(m.kind,
        table.concat(d), escape(m.name))
    end
  end
  table.sort(lines, function(a, b) return a[1] < b[1] end)
  local ends = { 0, 0 }                -- where the last label ends, on a narrow and a wide page
  for _, line in ipairs(lines) do
    local x, size = axis.place(line[1]) / axis.span, #line[2] * GLYPH + 8
    paths[#paths + 1] = ('<path class="event" d="M%s 0V%s"><title>%s</title></path>'):format(
      f(x * axis.span), f(height), escape(line[3]))
    local left = x * NARROW + size > NARROW  -- the label is left of its line
    local function fits(i, width)
      local from = x * width - (left and size or 0)
      if from < ends[i] then return false end
      ends[i] = from + size
      return true
    end
    local narrow, wide = fits(1, NARROW), fits(2, 3 * NARROW)
    if narrow or wide then
      texts[#texts + 1] = M.text(narrow and "event" or "event wide", x, 0, left and 2 or -2, -5,
        left and "end" or "start", line[2])
    end
  end
  return #lines > 0
end

--- Draws a panel. Returns { paths, texts, top, height }, or nil if there is nothing to draw. top:
--- the pixels above the panel that the name of its y axis and the labels of marks need.
function M.body(o)
  local c, axis = o.c, o.axis or M.axis(o.c)
  local lists = {}
  for i, s in ipairs(o.series) do lists[i] = values_of(c, s, o.log, axis.last) end
  local low, high = range_of(o, lists)
  if not low then return nil end
  local height = o.height or 150
  local function place(v) return height - (v - low) / (high - low) * height end
  local grid, steps = M.x_axis(axis, height)
  local paths, texts = { grid }, { steps }
  for _, t in ipairs(ticks(low, high, o.log, math.max(2, math.floor(height / 34)))) do
    local y = place(t[1])
    paths[#paths + 1] = ('<path class="grid" d="M0 %sH%s"/>'):format(f(y), f(axis.span))
    texts[#texts + 1] = M.text("tick", 0, y, -8, 4, "end", t[2])
  end
  for _, limit in ipairs(o.limits or {}) do
    local value = scaled(limit[1], o.log)
    if value >= low and value <= high then
      local y = place(value)
      paths[#paths + 1] = ('<path class="limit" d="M0 %sH%s"/>'):format(f(y), f(axis.span))
      texts[#texts + 1] = M.text("limit", 1, y, -4, y < 14 and 13 or -4, "end", escape(limit[2]))
    end
  end
  -- Later series of points are thinner, so that earlier ones remain visible where values are equal.
  for i, s in ipairs(o.series) do
    local style = M.style_of(s.style or i)
    local thin = ('style="stroke-width:%s"'):format(f(#o.series > 2 and i > 1 and s.points
      and 1.6 + 0.8 * (#o.series - i) or 1.8))
    if not s.points and (c.width > 1 or s.band) then
      paths[#paths + 1] = ('<path class="band %s" d="%s"/>'):format(style,
        band_path(lists[i], axis, place, s.join))
    end
    local line, dots, alone = line_path(lists[i], axis, place,
      s.points or o.hold and c.width == 1, s.join)
    paths[#paths + 1] = ('<path class="line %s" %s d="%s"/>'):format(style, thin, line)
    if dots ~= "" then
      paths[#paths + 1] = ('<path class="line dot %s" style="stroke-width:%d" d="%s"/>'):format(
        style, alone and 7 or 3, dots)
    end
  end
  local top = (draw_marks(o.marks, axis, height, paths, texts) and WORDS or 0) + (o.name and TOP
    or 0)
  if o.name then
    texts[#texts + 1] = M.text("tick", 0, 0, 8 - M.left, 14 - top, "start", escape(o.name ..
      (o.log and ", log axis" or "")))
  end
  paths[#paths + 1] = ('<path class="frame" d="M0 0V%sH%s"/>'):format(f(height), f(axis.span))
  return { paths = table.concat(paths), texts = table.concat(texts), top = top, height = height }
end

--- The CSS classes of series i: its colour and dashes.
function M.style_of(i)
  local colour, dash = plot.style(i)
  return "s" .. colour .. (dash ~= colour and " d" .. dash or "")
end

--- Returns the legend of a panel, { { shape =, text = } ... }, where shape is SVG of 24 x 12
--- pixels.
function M.legend(o)
  local list = {}
  for i, s in ipairs((#o.series > 1 or o.named) and o.series or {}) do
    list[#list + 1] = { text = s.name,
      shape = ('<path class="line %s" d="M0 6H24"/>'):format(M.style_of(s.style or i)) }
  end
  for _, m in ipairs(o.marks or {}) do
    list[#list + 1] = { text = ("%s (%s)"):format(m.name, show.grouped(m.count)),
      shape = m.texts and '<path class="event" d="M12 0v12"/>'
        or ('<path class="mark %s" d="%s"/>'):format(m.kind, TICKS[m.kind]:format(12,
          m.kind == "checkpoint" and "" or 10)) }
  end
  return list
end

local DASHES = { "none", "9 5", "3 4", "12 4 3 4", "6 6", "2 6" }

M.series = #DASHES              -- number of line styles

local function lines_style()
  local lines = {}
  for i, dash in ipairs(DASHES) do
    lines[i] = (".line.sN{stroke:var(--cN);stroke-dasharray:%s}.band.sN{fill:var(--cN)}"):format(
      dash):gsub("N", i)
    lines[#DASHES + i] = (".line.d%d{stroke-dasharray:%s}"):format(i, dash)
  end
  return ".line.s1{stroke-linecap:round}" .. table.concat(lines, "\n")
end

--- The CSS for what body() draws. Its variables are the colours of M.light or M.dark.
M.style = [[
.grid{stroke:var(--grid);fill:none}.frame{stroke:var(--axis);fill:none}
.tick,text.limit,text.event,.key{font-size:12px;font-variant-numeric:tabular-nums}
.tick,.key{fill:var(--muted)}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:butt}
.band{opacity:.2}
]] .. lines_style() .. [[
.line.dot{stroke-linecap:round;stroke-dasharray:none}
.mark{stroke-width:2;fill:none}.mark.overflow{stroke:var(--bad)}.mark.skip{stroke:var(--c5)}
.mark.checkpoint{stroke:var(--muted)}
.event{stroke:var(--event);stroke-width:1.4;stroke-dasharray:5 3;fill:none}
path.limit{stroke:var(--bad);stroke-dasharray:2 4;fill:none}
text.limit{fill:var(--bad)}text.event{fill:var(--event)}]]

-- The colours of Okabe and Ito, which remain distinguishable with red-green colour blindness. They
-- are darker on light pages, so that lines have a contrast of 3:1 and texts one of 4.5:1.
M.light = [[--text:#1d2433;--muted:#5c6576;--grid:#eceff4;--axis:#8a93a3;--bad:#c4261a;
--event:#6d4aed;
--c1:#0072b2;--c2:#d55e00;--c3:#008a64;--c4:#b3578c;--c5:#9a6a00;--c6:#3d4654]]
M.dark = [[--text:#e6e9ef;--muted:#98a2b3;--grid:#232a36;--axis:#667085;
--bad:#ff7a6e;--event:#b0a1ff;
--c1:#56b4e9;--c2:#e69f00;--c3:#2bb98d;--c4:#d98fb7;--c5:#f0e442;--c6:#c9ced8]]

-- Returns the colour `name` of M.light as #rrggbb.
local function light_colour(name) return M.light:match("%-%-" .. name .. ":(#%x+)") end

--- Returns the colour of series i on white as #rrggbb, and its dashes as a list of lengths (empty:
--- solid).
function M.plain_style(i)
  local colour, dash = plot.style(i)
  local lengths = {}
  for length in DASHES[dash]:gmatch("%d+") do lengths[#lengths + 1] = length end
  return light_colour("c" .. colour), lengths
end

-- Draws panels below each other, `width` pixels wide. Returns the SVG and its height.
local function layout(title, panels, width)
  local span = width - M.left - M.right
  local out, y = { ('<text class="head" x="12" y="28">%s</text>'):format(escape(show.cut(title,
    math.floor(width / 11), "…"))) }, 40
  for _, o in ipairs(panels) do
    local axis = M.axis(o.c, span)
    local body = M.body(setmetatable({ axis = axis }, { __index = o }))
    out[#out + 1] = ('<text class="title" x="12" y="%d">%s</text>'):format(y + 16,
      escape(o.title .. (body and o.log and ", log axis" or "")))
    y = y + 22
    if body then
      local x = 12
      for _, entry in ipairs(M.legend(o)) do
        local size = 30 + show.width(entry.text) * GLYPH + 16
        if x > 12 and x + size > width then x, y = 12, y + 18 end
        out[#out + 1] = ('<g transform="translate(%s %d)">%s<text class="key" x="30" ' ..
          'y="10">%s</text></g>'):format(f(x), y + 2, entry.shape, escape(entry.text))
        x = x + size
      end
      y = y + (x > 12 and 18 or 0) + 12 + body.top
      local texts = width >= 600 and body.texts           -- as report_page.lua does for a page
        or body.texts:gsub('<text class="%a+ wide".-</text>', "")
      out[#out + 1] = M.area(span, body.height, body.paths, texts,
        ('x="%d" y="%d" width="%d"'):format(M.left, y, span))
      y = y + body.height + M.bottom + 8
    else
      out[#out + 1] = ('<text class="key" x="12" y="%d">nothing to draw: no value is finite%s' ..
        '</text>'):format(y + 14, o.log and " and positive" or "")
      y = y + 34
    end
  end
  return table.concat(out), y
end

-- The style of a file: M.style with literal colours, because few programs other than browsers know
-- CSS variables.
local FILE_STYLE = (".title,.head{fill:var(--text);font-size:13px;font-weight:600}" ..
  ".head{font-size:18px}\n" .. M.style):gsub("var%(%-%-(%w+)%)", light_colour)

--- Returns the text of an SVG file with a title and several panels, `width` pixels wide (1000 by
--- default), on white.
function M.file(title, panels, width)
  width = width or 1000
  local body, height = layout(title, panels, width)
  return ([[<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d"
 font-family="Helvetica,Arial,sans-serif">
<style>%s</style><rect width="100%%" height="100%%" fill="#fff"/>
%s</svg>
]]):format(width, height, width, height, FILE_STYLE, body)
end

return M
