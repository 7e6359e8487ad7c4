-- The parts of a report's page: the frame of the page, JSON for its script, sections, tables,
-- panels with legends, a policy's source with colours. Used by report.lua, report_compare.lua,
-- report_heat.lua and report_tables.lua.
local json = require "engine.base.json"
local show = require "engine.base.show"
local chart = require "engine.report.chart"
local page = require "engine.report.report_page"

local M = {}

local escape = chart.escape

-- Returns a number as text for the script's data. A number with a fraction gets five digits.
local function number_text(x)
  if x - x ~= 0 then return '"' .. chart.number(x) .. '"' end
  if x % 1 == 0 and math.abs(x) < 1e15 then return ("%.0f"):format(x) end
  return (("%.5g"):format(x):gsub("e%+?(-?)0*", "e%1"))
end

--- Adds the curves `names` of c (from curves.read or compare.read) and their axis (chart.axis) to
--- `data`, the data for the page's script. Returns `data`.
function M.curve_data(c, axis, names, data)
  data.first, data.last, data.end_step = axis.first, axis.last, c.last
  data.left, data.right = chart.left, chart.right
  data.width, data.x, data.step, data.overflows = c.width, c.x, c.first_step, c.overflows
  data.columns = {}
  for _, name in ipairs(names) do
    data.columns[name] = {}
    for _, field in ipairs { "min", "max", "mean" } do
      data.columns[name][field] = json.with_length(c[name][field], #c.x)
    end
  end
  return data
end

--- Returns the SVG of a panel or a heat map as wide as the page. `height`: its height in pixels
--- without the upper margin `top` and the lower margin `bottom`. data: further attributes, as text.
--- label: a title for screen readers. content: the SVG inside.
function M.svg(class, data, label, top, height, bottom, content)
  return ('<svg class="%s" %s role="img" aria-label="%s" style="height:%dpx;padding:%dpx %dpx ' ..
    '%dpx %dpx">%s</svg>'):format(class, data, escape(label), top + height + bottom, top,
    chart.right, bottom, chart.left, content)
end

--- Returns the HTML of a legend. list: { { shape = SVG of 24 x 12 pixels, or html =, text = }
--- ... }.
function M.legend(list)
  if #list == 0 then return "" end
  local out = {}
  for i, entry in ipairs(list) do
    out[i] = ("<span>%s%s</span>"):format(entry.html or ('<svg class="sign">%s</svg>'):format(
      entry.shape), escape(entry.text))
  end
  return '<div class="legend">' .. table.concat(out) .. "</div>"
end

--- Returns the panel of chart.body(o) with its legend, or "" if there is nothing to draw. o.data:
--- the panel's name in the script of the page (by default, the column of the first series).
function M.panel(o)
  local body = chart.body(o)
  if not body then return "" end
  return M.legend(chart.legend(o)) .. M.svg("panel", ('data-column="%s"'):format(escape(o.data
    or o.series[1].column)), o.title, body.top, body.height, chart.bottom,
    chart.area(chart.span, body.height, body.paths, body.texts ..
      ('<line class="cross" y1="0" y2="%d"/>'):format(body.height)))
end

--- Returns a text that explains the points and the band of the curves c, or nil if each point is
--- one step.
function M.band_text(c)
  return c.width > 1 and ("Each point is the mean of %s steps; the band spans from the smallest " ..
    "to the largest value in those steps."):format(show.grouped(c.width)) or nil
end

--- Returns the head of the page: `title` and the line `sub` below it, both HTML, and the button for
--- the theme.
function M.header(title, sub)
  return ('<header><div><h1>%s</h1><p class="sub">%s</p></div>' ..
    '<button id="theme" type="button">Dark</button></header>\n'):format(title, sub)
end

--- Returns a section of the page, or "" if it has no content. about: the paragraph below its title,
--- or nil; the other arguments are the content.
function M.section(title, about, ...)
  local body = table.concat { ... }
  if body == "" then return "" end
  return ("<section><h2>%s</h2>%s%s</section>\n"):format(title, about and "<p>" .. about ..
    "</p>" or "", body)
end

--- Returns a table as HTML, or "" if it has no rows. head: the headings; rows: lists of cells;
--- right: { [column] = true } for the columns that are aligned to the right.
function M.table(head, rows, right)
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

--- Returns the whole page. source: the path of the run, or the paths of the runs; body: a list of
--- HTML; data: the script's data.
function M.page(title, source, body, data)
  body[#body + 1] = ("<footer>Written by engine %s from %s, %s.</footer>"):format(
    escape(require("engine.base.ffi").version), escape(source), os.date("%Y-%m-%d %H:%M"))
  local vars = function(t, p) return (t:gsub("\n", "")) .. ";" .. p end
  return ([[<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>%s</title>
<style>:root{%s}
@media(prefers-color-scheme:dark){:root:not([data-theme=light]){%s}}
:root[data-theme=dark]{%s}
%s%s</style></head><body>%s<main>
%s
</main><div id="tip"></div>
<script type="application/json" id="data">%s</script>
<script>%s</script>
</body></html>
]]):format(escape(title), vars(chart.light, page.light), vars(chart.dark, page.dark),
    vars(chart.dark, page.dark), chart.style, page.style, page.hatch, table.concat(body),
    (json.plain(data, number_text):gsub("<", "\\u003c")), page.script)
end

local WORDS = require("engine.base.arguments").set_of("and break do else elseif end false for " ..
  "function goto if in local nil not or repeat return then true until while")

-- The CSS class and the pattern of each kind of Lua token. `true`: the pattern is for a source in
-- which escape sequences (a backslash and a character) are blanked out.
local TOKENS = { { "c", "^%-%-%[(=*)%[.-%]%1%]" }, { "c", "^%-%-[^\n]*" },
  { "s", "^%[(=*)%[.-%]%1%]" }, { "s", "^([\"'])[^\n]-%1", true },
  { "s", "^[\"'][^\n]*", true }, { "k", "^[%a_][%w_]*" }, { "u", "^%d[%w.]*" } }

--- Returns Lua source as HTML, with its comments, strings, keywords and numbers marked.
function M.highlighted(source)
  source = show.shown(source, true)
  local plain, out, at = source:gsub("\\[^\n]", "\1\1"), {}, 1
  while at <= #source do
    local class, stop
    for _, token in ipairs(TOKENS) do
      if not stop then
        class, stop = token[1], select(2, (token[3] and plain or source):find(token[2], at))
      end
    end
    local text = source:sub(at, stop or at)
    at = at + #text
    if not stop or class == "k" and not WORDS[text] then class = nil end
    text = chart.entities(text)
    out[#out + 1] = class and ('<span class="%s">%s</span>'):format(class, text) or text
  end
  return table.concat(out)
end

return M
