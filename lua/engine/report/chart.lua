-- Curves as SVG: panels below each other on one axis of steps. The same panels are in the report,
-- where a script adds hover values, and in a separate file (`engine plot --svg`).
--   chart.body { title =, c = curves.read(...),
--     series = { { name = "loss", column = "loss", colour = 1 } },
--     log = 2, height = 180, limits = { { 65504, "f16 ends" } }, events = { { step, kind } } }
-- A series is a line of mean values in a band from least to largest. `points` instead of a column:
-- { { step, value } ... }, each holding until the next. Colours are CSS variables --c1 .. --c6.
-- Called by report.lua and cli/plot.lua.
local show = require "engine.base.show"
local plot = require "engine.report.plot"

local M = {}

local WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1000, 92, 14, 10, 24
M.width, M.left, M.right = WIDTH, LEFT, RIGHT

-- Marks of HTML as entities.
function M.entities(text)
  return (text:gsub("[&<>\"']", { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;",
    ['"'] = "&quot;", ["'"] = "&#39;" }))
end

-- Any text for a page.
local function escape(text) return M.entities(show.shown(text, true)) end
M.escape = escape

local SUPERSCRIPT = { ["-"] = "⁻", ["0"] = "⁰", ["1"] = "¹", ["2"] = "²", ["3"] = "³",
  ["4"] = "⁴", ["5"] = "⁵", ["6"] = "⁶", ["7"] = "⁷", ["8"] = "⁸", ["9"] = "⁹" }
local function power(base, exponent)
  return base .. (("%d"):format(exponent):gsub(".", SUPERSCRIPT))
end
M.power = power

--- 1234567 -> "1,234,567"; 0.00012 -> "1.2×10⁻⁴"; 0.25 -> "0.25".
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

-- 65536 -> "65,536"; larger powers of two as 2ⁿ.
function M.scale(x)
  if x and x > 0 and x < math.huge then
    local mantissa, exponent = math.frexp(x)
    if mantissa == 0.5 and (exponent > 14 or exponent < 1) then return power("2", exponent - 1) end
  end
  return M.number(x)
end

-- Ticks { value, text } of an axis from low to high, which are logarithms if `log` is their base.
local function ticks(low, high, log, n)
  local list = {}
  if log and high - low < 1.2 then  -- less than one power: ticks at the numbers themselves
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
    else text = v % 1 == 0 and M.number(v) or ("%." .. math.min(digits, 6) .. "f"):format(v) end
    list[#list + 1] = { v, text }
    value = value + step
  end
  return list
end

local function f(x) return (("%.1f"):format(x):gsub("%.0$", "")) end

--- The axis of steps of a run, as { first, last, place = function(step) -> x }.
function M.axis(c)
  local first, last = c.first or 0, c.last or 1
  if last <= first then last = first + 1 end
  local span = WIDTH - LEFT - RIGHT
  return { first = first, last = last,
    place = function(step) return LEFT + math.max(0, math.min(1, (step - first) / (last - first))) *
    span end }
end

--- Lines and numbers below a panel that ends at y.
function M.x_axis(axis, top, y)
  local out = {}
  for _, t in ipairs(ticks(axis.first, axis.last, nil, 8)) do
    local x = f(axis.place(t[1]))
    if t[1] % 1 == 0 then
      out[#out + 1] = ('<path class="grid" d="M%s %sV%s"/><text class="tick" x="%s" y="%s" ' ..
        'text-anchor="middle">%s</text>'):format(x, f(top), f(y),
        x, f(y + 16), t[2])
    end
  end
  return table.concat(out)
end

-- Low, mean and high of a series by picture column, in the units of the axis; nil for a column
-- without values.
local function values_of(c, series, log)
  local v = c[series.column]
  local function put(x)
    return x and (not log or x > 0) and (log and math.log(x) / math.log(log) or x) or nil
  end
  local list = {}
  for i = 1, #c.x do
    list[i] = { put(v.min[i]) or put(v.mean[i]), put(v.mean[i]), put(v.max[i]) }
  end
  return list
end

local function line_path(c, list, axis, place, hold)
  local line, started = {}, false
  local before
  for i, v in ipairs(list) do
    if v[2] then
      local x, y = f(axis.place(c.x[i])), f(place(v[2]))
      if not started then line[#line + 1] = "M" .. x .. " " .. y
      elseif hold then
        if y ~= before then line[#line + 1] = "H" .. x .. "V" .. y
        elseif not list[i + 1] or not list[i + 1][2] then line[#line + 1] = "H" .. x end
      else line[#line + 1] = "L" .. x .. " " .. y end
      -- a single point: draw a dot
      if not (list[i + 1] and list[i + 1][2]) and not (i > 1 and list[i - 1][2]) then
        line[#line + 1] = "h.01"
      end
      started, before = true, y
    else
      started = false
    end
  end
  return table.concat(line)
end

local function band_path(c, list, axis, place)
  local paths, i = {}, 1
  while i <= #list do
    local up, down = {}, {}
    while list[i] and list[i][2] do
      local x = f(axis.place(c.x[i]))
      up[#up + 1] = x .. " " .. f(place(list[i][3]))
      table.insert(down, 1, x .. " " .. f(place(list[i][1])))
      i = i + 1
    end
    if #up > 1 then
      paths[#paths + 1] = "M" .. table.concat(up, "L") .. "L" .. table.concat(down, "L") .. "Z"
    end
    i = i + 1
  end
  return table.concat(paths)
end

local function points_path(points, axis, place, log)
  local line, y = {}, nil
  for _, p in ipairs(points) do
    local value = log and (p[2] > 0 and math.log(p[2]) / math.log(log) or nil) or p[2]
    if value then
      y = f(place(value))
      line[#line + 1] = (#line == 0 and "M%s %s" or "H%sV%s"):format(f(axis.place(p[1])), y)
    end
  end
  if y then line[#line + 1] = "H" .. f(axis.place(axis.last)) end
  return table.concat(line)
end

local function range_of(o, lists)
  local low, high = math.huge, -math.huge
  for _, list in ipairs(lists) do
    for _, v in ipairs(list) do
      if v[1] then low, high = math.min(low, v[1]), math.max(high, v[3]) end
    end
  end
  for _, s in ipairs(o.series) do
    for _, p in ipairs(s.points or {}) do
      if not o.log or p[2] > 0 then
        local value = o.log and math.log(p[2]) / math.log(o.log) or p[2]
        low, high = math.min(low, value), math.max(high, value)
      end
    end
  end
  if low > high then return nil end
  local had = high
  for _, limit in ipairs(o.limits or {}) do
    local value = o.log and math.log(limit[1]) / math.log(o.log) or limit[1]
    if value > low and value < had + (o.log and 6 or (had - low)) then
      high = math.max(high, value)
    end
  end
  local margin = (high - low) * 0.06
  if margin == 0 then margin = o.log and 1 or math.max(math.abs(low) * 0.1, 1e-9) end
  if not o.log and low >= 0 and low - margin < 0 then return 0, high + margin end
  return low - margin, high + margin
end

--- The content of a panel, its height, and the data that the report's script needs: { low, high,
--- top, bottom, log }. nil when there is nothing to draw.
function M.body(o)
  local c, axis = o.c, o.axis or M.axis(o.c)
  local lists = {}
  for i, s in ipairs(o.series) do lists[i] = s.column and values_of(c, s, o.log) or {} end
  local low, high = range_of(o, lists)
  if not low then return nil end
  local marked = o.marks and #o.marks > 0
  local top, bottom = TOP, TOP + (o.height or 150)
  local function place(v) return bottom - (v - low) / (high - low) * (bottom - top) end
  local out = { M.x_axis(axis, top, bottom) }
  for _, t in ipairs(ticks(low, high, o.log, math.max(2, math.floor((bottom - top) / 34)))) do
    local y = f(place(t[1]))
    out[#out + 1] = ('<path class="grid" d="M%d %sH%d"/><text class="tick" x="%d" y="%s" ' ..
      'text-anchor="end">%s</text>'):format(LEFT, y, WIDTH - RIGHT, LEFT - 8,
      f(place(t[1]) + 4), t[2])
  end
  for _, limit in ipairs(o.limits or {}) do
    local value = o.log and math.log(limit[1]) / math.log(o.log) or limit[1]
    if value >= low and value <= high then
      local y = place(value)
      out[#out + 1] = ('<path class="limit" d="M%d %sH%d"/><text class="limit" x="%d" y="%s" ' ..
        'text-anchor="end">%s</text>'):format(LEFT, f(y),
        WIDTH - RIGHT, WIDTH - RIGHT - 4, f(y - 4), escape(limit[2]))
    end
  end
  for _, e in ipairs(o.events or {}) do
    out[#out + 1] = ('<path class="event" d="M%s %dV%d"><title>%s</title></path>'):format(
      f(axis.place(e[1])), top, bottom, escape(e[2]))
  end
  for i, s in ipairs(o.series) do
    local style = ('style="--s:var(--c%d)"'):format(s.colour or i)
    if s.points then
      out[#out + 1] = ('<path class="line thin" %s d="%s"/>'):format(style,
        points_path(s.points, axis, place, o.log))
    else
      if c.width > 1 then
        out[#out + 1] = ('<path class="band" %s d="%s"/>'):format(style,
          band_path(c, lists[i], axis, place))
      end
      out[#out + 1] = ('<path class="line" %s d="%s"/>'):format(style,
        line_path(c, lists[i], axis, place, o.hold and c.width == 1))
    end
  end
  if marked then
    local d = {}
    for i, x in ipairs(o.marks) do d[i] = ("M%s %dv7"):format(f(axis.place(x)), bottom - 7) end
    out[#out + 1] = ('<path class="mark" d="%s"/>'):format(table.concat(d))
  end
  out[#out + 1] = ('<path class="frame" d="M%d %dV%dH%d"/>'):format(LEFT, top, bottom,
    WIDTH - RIGHT)
  return table.concat(out), bottom + BOTTOM, { low = low, high = high, top = top, bottom = bottom,
    log = o.log }
end

--- CSS for what body() draws; the page defines the variables.
M.style = [[
.grid{stroke:var(--grid);stroke-width:1;fill:none}.frame{stroke:var(--axis);fill:none}
.tick{fill:var(--muted);font:11.5px var(--sans);font-variant-numeric:tabular-nums}
.line{fill:none;stroke:var(--s);stroke-width:1.7;stroke-linejoin:round;stroke-linecap:round;
vector-effect:non-scaling-stroke}
.line.thin{stroke-width:1.2;opacity:.8}
.band{fill:var(--s);opacity:.2}
.mark{stroke:var(--bad);stroke-width:1.6;fill:none}
.event{stroke:var(--event);stroke-width:1.4;stroke-dasharray:4 3;fill:none}
path.limit{stroke:var(--bad);stroke-width:1;stroke-dasharray:2 4;fill:none}
text.limit{fill:var(--bad);font:11px var(--sans);paint-order:stroke;stroke:var(--card,var(--back));
stroke-width:3px;stroke-linejoin:round}]]

M.light = [[--back:#fff;--text:#1d2433;--muted:#667085;--grid:#eceff4;--axis:#c3cad6;--bad:#d92d20;
--event:#7a5af8;
--c1:#1f6feb;--c2:#e8590c;--c3:#0f9960;--c4:#a832a4;--c5:#b58900;--c6:#4b5563]]
M.dark = [[--back:#11151c;--text:#e6e9ef;--muted:#98a2b3;--grid:#232a36;--axis:#475066;
--bad:#ff6b5e;--event:#a594ff;
--c1:#5aa2ff;--c2:#ff9155;--c3:#3ccf91;--c4:#e07be0;--c5:#e5c453;--c6:#a0aabb]]

--- A whole SVG file of several panels, with a title.
function M.file(title, panels)
  local out, y = {}, 44
  for _, o in ipairs(panels) do
    local body, height = M.body(o)
    if body then
      out[#out + 1] = ('<text class="title" x="%d" y="%d">%s</text><g transform="translate(0 ' ..
        '%d)">%s</g>'):format(LEFT, y + 14, escape(o.title), y + 20, body)
      y = y + 20 + height + 12
    end
  end
  return ([[<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d"
 font-family="system-ui,sans-serif">
<style>:root{--sans:system-ui,"Segoe UI",Roboto,sans-serif;%s}
@media(prefers-color-scheme:dark){:root{%s}}
.back{fill:var(--back)}.title{fill:var(--text);font:600 13px var(--sans)}.head{fill:var(--text);
font:600 18px var(--sans)}
%s</style><rect class="back" width="100%%" height="100%%"/>
<text class="head" x="%d" y="28">%s</text>%s</svg>
]]):format(WIDTH, y, WIDTH, y, M.light:gsub("\n", ""), M.dark:gsub("\n", ""), M.style, LEFT,
    escape(title), table.concat(out))
end

return M
