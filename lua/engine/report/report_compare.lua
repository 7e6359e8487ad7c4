-- Several runs as one self-contained HTML page: a table of how they differ and how they ended, and
-- their curves in one picture. The page looks and works like that of a single run (report.lua).
--   local html = require("engine.report.report_compare").html(compare.open { "a", "b" }, folder)
-- folder: where the page will be; links in the page are relative to it. Called by `engine report`.
local chart = require "engine.report.chart"
local compare = require "engine.run.compare"
local files = require "engine.base.file"
local marks = require "engine.report.marks"
local parts = require "engine.report.report_html"
local runs = require "engine.run.runs"
local show = require "engine.base.show"
local views = require "engine.report.views"

local M = {}

local POINTS = 480              -- columns of a picture
local NAMES = { "loss", "scale" }
local TITLES, HEIGHTS = { loss = "Loss", scale = "Loss scale" }, { loss = 240, scale = 190 }
local escape, grouped = chart.escape, show.grouped

local function names_of(path)
  local names = {}
  for name in files.absolute(path):gmatch("[^/]+") do
    if name == ".." then names[#names] = nil
    elseif name ~= "." then names[#names + 1] = name end
  end
  return names
end

-- Returns a relative link to `path`, for a page in `folder`.
local function link(path, folder)
  local to, from, same = names_of(path), names_of(folder), 0
  while from[same + 1] and from[same + 1] == to[same + 1] do same = same + 1 end
  local address = (("../"):rep(#from - same) .. table.concat(to, "/", same + 1)):gsub("[^%w._/~-]",
    function(c) return ("%%%02X"):format(c:byte()) end)
  return address
end

local function loss_text(x) return x and (x - x == 0 and ("%.4f"):format(x) or chart.number(x)) end

-- Returns the evaluations of a run, or none if its history is damaged.
local function evaluations_of(run)
  local good, points = pcall(run.history.evaluations, run.history)
  return good and points or {}
end

-- Returns a run's cells in the table, except the cell with its name. info: from runs.info. differ:
-- the settings that have a column. evaluated: whether the table has a column of evaluation losses.
local function cells_of(run, info, differ, evaluated)
  local cells = {}
  local function put(text) cells[#cells + 1] = text or "–" end
  for _, key in ipairs(differ) do
    put('<span class="whole">' .. escape(show.cut(compare.value_of(run, key), 40)) .. "</span>")
  end
  if info.problem then
    put(escape(info.problem))
    return cells
  end
  local steps = info.rows > 0
  put(grouped(info.rows))
  put(steps and loss_text(info.loss))
  if evaluated then
    local points = evaluations_of(run)
    put(#points > 0 and loss_text(points[#points][2]))
  end
  put(steps and ("%s (%s)"):format(grouped(info.skipped), show.percent(info.skipped, info.rows)))
  put(grouped(info.overflows or 0))
  put(steps and chart.scale(info.scale))
  put(escape((steps and "" or "no steps, ") .. info.ended))
  return cells
end

local function runs_table(list, folder)
  local differ, head, right, rows, evaluated = {}, { "run" }, {}, {}, false
  if list[1].settings.policy then differ[1] = "policy" end
  for _, key in ipairs(list.differ) do
    if key ~= "policy" and key ~= "steps" then differ[#differ + 1] = key end
  end
  for _, run in ipairs(list) do evaluated = evaluated or #evaluations_of(run) > 0 end
  for _, key in ipairs(differ) do head[#head + 1] = escape(key) end
  for _, name in ipairs { "steps", "final loss", evaluated and "evaluation loss" or false,
    "skipped", "overflows", "last scale" } do
    if name then head[#head + 1], right[#head + 1] = name, true end
  end
  head[#head + 1] = "how it ended"
  for i, run in ipairs(list) do
    local info, name = runs.info(run.path, run.history), escape(run.name)
    local own = run.folder .. "/report.html"
    if files.exists(own) then name = ('<a href="%s">%s</a>'):format(link(own, folder), name) end
    rows[i] = { ('<span class="whole"><svg class="sign"><path class="line %s" d="M0 6H24"/>' ..
      "</svg>%s</span>"):format(chart.style_of(i), name),
      unpack(cells_of(run, info, differ, evaluated)) }
  end
  return parts.section("Runs", "Settings that are the same in all runs are left out.",
    parts.table(head, rows, right))
end

-- Returns the sections with curves, the data for the script, and the curves (from compare.read).
local function curve_sections(list)
  local c = compare.read(list, NAMES, { points = POINTS })
  if not c.first then return { "<p>No run has steps.</p>" }, {}, c end
  local axis, body = chart.axis(c), {}
  local keys, titles, groups = {}, {}, {}
  for i, panel in ipairs(views.panels(c, NAMES, {})) do
    local name, group = NAMES[i], {}
    for k, series in ipairs(panel.series) do
      local key = series.column
      group[k], keys[#keys + 1], titles[key] = key, key, escape(series.name)
    end
    groups[name] = group
    panel.name, panel.data, panel.axis, panel.height = panel.title, name, axis, HEIGHTS[name]
    if i == #NAMES then panel.marks = marks.of_runs(c, name) end
    body[i] = parts.section(TITLES[name], i == 1 and parts.band_text(c) or nil, parts.panel(panel))
  end
  return body, parts.curve_data(c, axis, keys, { titles = titles, groups = groups, events = {},
    shadows = {} }), c
end

--- Returns the page as text, and a list of notes about values that were left out.
function M.html(list, folder)
  local names, paths = {}, {}
  for i, run in ipairs(list) do names[i], paths[i], run.number = run.name, run.path, i end
  local title = show.cut(table.concat(names, ", "), 120)
  local sections, data, c = curve_sections(list)
  return parts.page(title, table.concat(paths, ", "), {
    parts.header(escape(title), #list .. " runs"), runs_table(list, folder), unpack(sections) },
    data), c.notes
end

return M
