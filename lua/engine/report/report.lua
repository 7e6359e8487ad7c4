-- A run as one self-contained HTML page: curves, heat maps, overflows, shadows, events, settings
-- and policies. All pictures are SVG in the page, so it is complete without its script
-- (report_page.lua), which only shows the values under the pointer.
--   local html = require("engine.report.report").html(history, "runs/a")
-- Below, h is the history, info is the result of runs.info, c of curves.read, l of layers.read.
-- Called by `engine report`.
local show = require "engine.base.show"
local chart = require "engine.report.chart"
local curves = require "engine.run.curves"
local heat = require "engine.report.report_heat"
local layers = require "engine.report.layers"
local marks = require "engine.report.marks"
local parts = require "engine.report.report_html"
local report_fp8 = require "engine.report.report_fp8"
local tables = require "engine.report.report_tables"
local views = require "engine.report.views"

local M = {}

local COLUMNS = 480             -- columns of a curve
local escape, number, grouped, percent = chart.escape, chart.number, show.grouped, show.percent
local counted, section = show.counted, parts.section

-- ------------------------------------------------------------------ curves

-- Returns the events for the table: all except the kinds that other sections show.
local function events_of(h)
  return h:query("SELECT step, kind, text FROM events WHERE kind NOT IN ('overflow', " ..
    "'checkpoint', 'evaluation') ORDER BY id")
end

local MOST_POINTS = 600          -- a shadow with more verdicts is drawn at about this many steps

-- Returns a shadow's verdicts as a list of { step, scale, action }. The scale is false where the
-- run has the shadow no longer, and always for a shadow of FP8 layers. If there are more than
-- MOST_POINTS, returns only the verdicts in force at MOST_POINTS + 1 evenly spaced steps.
local function points_of(h, name, axis)
  local points, n = {}, h:query("SELECT count(*) AS n FROM (SELECT 1 FROM shadows WHERE name = " ..
    "? LIMIT ?)", name, MOST_POINTS + 1)[1].n
  local rows = n <= MOST_POINTS and h:shadow(name) or {}
  for i = 0, n > MOST_POINTS and MOST_POINTS or -1 do
    local step = axis.first + math.floor((axis.last - axis.first) * i / MOST_POINTS)
    rows[#rows + 1] = h:query("SELECT ? AS step, scale, action FROM shadows WHERE name = ? AND " ..
      "step <= ? ORDER BY shadows.step DESC LIMIT 1", step, name, step)[1]
  end
  for i, row in ipairs(rows) do points[i] = { row.step, row.scale or false, row.action } end
  return points
end

local function same_points(a, b)
  if #a ~= #b then return false end
  for i, p in ipairs(a) do
    if p[1] ~= b[i][1] or p[2] ~= b[i][2] then return false end
  end
  return true
end

-- Returns the shadows (h:shadows) with three more fields: `points`, `style`, and `same`, the name
-- of an earlier shadow with the same scale at all points.
local function shadows_of(h, axis)
  local list = h:shadows()
  for i, s in ipairs(list) do
    s.points, s.style = points_of(h, s.name, axis), chart.style_of(i + 1)
    for k = 1, s.scale and i - 1 or 0 do
      if same_points(s.points, list[k].points) then s.same = s.same or list[k].name end
    end
  end
  return list
end

-- ------------------------------------------------------------------ words

local function duration(seconds)
  if not seconds then return "–" end
  if seconds < 60 then return (seconds < 1 and "%.2g s" or "%.1f s"):format(seconds) end
  if seconds < 3600 then return ("%d min %d s"):format(seconds / 60, seconds % 60) end
  if seconds < 86400 then return ("%d h %d min"):format(seconds / 3600, seconds / 60 % 60) end
  return ("%d d %d h"):format(seconds / 86400, seconds / 3600 % 24)
end

-- Finds the layer that has inf or nan at the largest number of recorded steps or, if no layer has
-- any, the layer whose gradients came nearest to the overflow limit of their format. Returns the
-- layer's name, its distance from that limit in bits, how many recorded steps have inf or nan
-- (nil: none), and the name of that format.
local function nearest_layer(l)
  local name, room, bad, format
  for k = 1, #l.names do
    local s = views.layer_summary(l, k)
    if s.amax > 0 or s.bad > 0 then
      local here = s.room or 0
      if not room or s.bad > (bad or 0) or (s.bad == 0 and not bad and here < room) then
        name, room, format = l.names[k], here, s.format
      end
      if s.bad > 0 then bad = math.max(bad or 0, s.bad) end
    end
  end
  return name, room, bad, format
end

-- Returns the paragraph at the top of the page, which sums up the run.
local function lead(info, l, c)
  local said = {}
  local opening = info.how == "running" and "The run is in progress: %s in %s so far"
    or info.how == "finished" and "The run finished after %s in %s" or "The run made %s in %s"
  local updates = info.skipped == 0 and ", each with an update."
    or (", %s of them without an update (%s)."):format(grouped(info.skipped),
    percent(info.skipped, info.rows))
  said[1] = opening:format(counted(info.rows, "step"), duration(info.seconds)) .. updates
  if info.failed > 0 then
    said[2] = ("The policy failed in %s of %s, and its verdicts there were not used."):format(
      grouped(info.failed), counted(info.rows, "step"))
  end
  local least = curves.range(c, "loss")
  if least then
    said[#said + 1] = ("The loss ended at %s; its lowest was %s."):format(number(info.loss),
      number(least))
  end
  local name, room, bad, format = nearest_layer(l)
  if info.overflows > 0 then
    said[#said + 1] = ("The gradients overflowed in %s%s."):format(counted(info.overflows, "step"),
      bad and (", most often in <code>%s</code>"):format(escape(name)) or "")
  elseif name and room < 40 then
    said[#said + 1] = ("No gradient overflowed; <code>%s</code> came nearest to the top of " ..
      "%s, %.1f bits below it."):format(escape(name), format, room)
  end
  return '<p class="lead">' .. table.concat(said, " ") .. "</p>"
end

-- Returns the row of figures below the paragraph of lead().
local function tiles(h, info, c)
  local speed = info.tokens > 0 and info.seconds > 0 and info.tokens / info.seconds or nil
  local low, high = curves.range(c, "scale")
  local least = curves.range(c, "loss")
  local last = h:query("SELECT max(step) AS step FROM steps WHERE overflow")[1].step
  local rate = speed or info.rows / math.max(info.seconds, 1e-9)
  local list = {
    { "loss at the end", number(info.loss - info.loss == 0 and tonumber(("%.4f"):format(info.loss))
      or info.loss), least and "lowest " .. number(least) },
    { "loss scale", chart.scale(info.scale), low ~= high and ("%s to %s"):format(chart.scale(low),
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

-- ------------------------------------------------------------------ the page

local NAMES = { "loss", "scale", "stored", "norm", "underflow", "lr" }
local TITLES = { loss = "loss", scale = "loss scale", stored = "largest, as stored",
  norm = "gradient norm", underflow = "subnormal", lr = "learning rate" }

local function header(info)
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
  local kind = info.failed == 0 and ({ finished = "good", running = "live" })[info.how] or "bad"
  local how = info.how == "broken" and "died" or info.how
  return parts.header(('%s<span class="badge %s">%s%s</span>'):format(escape(info.name), kind, how,
    info.failed > 0 and ", the policy failed" or ""), table.concat(sub, " · "))
end

local function ending(info)
  return (info.how == "stopped" or info.how == "error" or info.how == "drift")
    and section("How it ended", nil, "<p>" .. escape(info.ended) .. "</p>") or ""
end

-- Returns five values: the sections with curves (`first` before the heat maps, `last` after them),
-- the data for the page's script, the curves, their axis, and the shadows.
local function curve_sections(h, info, l)
  local c = curves.read(h, NAMES, { points = COLUMNS })
  local axis, marked = chart.axis(c), marks.read(h, c)
  local evaluations = {}
  for _, point in ipairs(h:evaluations()) do
    if point[2] - point[2] == 0 then evaluations[#evaluations + 1] = point end
  end
  local shadows = shadows_of(h, axis)
  -- Returns a section with one panel. If there is nothing to draw, the section holds o.empty;
  -- without o.empty, the result is "".
  local function curve(title, about, name, o)
    o.c, o.axis, o.marks, o.title = c, axis, marked, TITLES[name]
    o.name = o.name or TITLES[name]
    o.series = o.series or {}
    table.insert(o.series, 1, { column = name, name = o.first or "in use" })
    local panel = parts.panel(o)
    return section(title, about, panel == "" and o.empty or panel)
  end
  local scale_series = {}
  for i, s in ipairs(shadows) do
    scale_series[i] = { points = s.points, name = s.same and ("%s (= %s)"):format(s.name, s.same)
      or s.name }
  end
  local scaled = info.precision == nil or c.scale.max[1] ~= 1 or c.scale.max[#c.x] ~= 1
    or info.overflows > 0 or #shadows > 0
  local list = {
    first = curve("Loss", parts.band_text(c), "loss", { height = 210, first = "training",
      series = #evaluations > 0 and { { points = evaluations, name = "evaluation" } } or nil,
      empty = "<p>No step has a finite loss.</p>" }) ..
      (scaled and curve("Loss scale", "The factor on the loss before the backward pass" ..
      (#shadows > 0 and ", and what each shadow would have chosen." or "."), "scale",
      { log = 2, height = 190, hold = true, series = scale_series }) or "") ..
      curve("Largest gradient, as stored",
      ("Multiplied by the loss scale, as stored in %s."):format(escape(l.formats_text)), "stored",
      { log = 2, height = 150, name = "magnitude", limits = l.format.top < 64
        and { { l.format.limit, l.format.name .. " ends" } } or nil }),
    last = curve("Gradients that lose bits",
      "The share below the smallest normal number of their format. Gaps are steps without such " ..
      "gradients.",
      "underflow", { log = 10, height = 110, name = "share of all gradients" }) ..
      curve("Gradient norm", "Of the true gradients, without the loss scale.", "norm",
      { log = 10, height = 130 }) .. curve("Learning rate", nil, "lr", { height = 80 }),
  }
  local shadow_data, lines = {}, {}
  for i, s in ipairs(shadows) do shadow_data[i] = { name = escape(s.name), points = s.points } end
  for _, m in ipairs(marked) do
    for i, step in ipairs(m.texts and m.at or {}) do
      lines[#lines + 1] = { step, escape(show.cut(m.texts[i], 160)) }
    end
  end
  return list, parts.curve_data(c, axis, NAMES, { names = NAMES, titles = TITLES,
    events = lines, shadows = shadow_data }), c, axis, shadows
end

--- Returns the page as text. The page of a run without steps has only the ending, events, settings,
--- policies and precision recipes.
function M.html(h, path)
  local info = require("engine.run.runs").info(path, h)
  if info.problem then error(info.problem, 0) end
  if not h:range() then
    return parts.page(info.name, h.path, { header(info),
      '<p class="lead">The run has no steps.</p>', ending(info),
      tables.events_section(events_of(h)), tables.settings_sections(h, info) }, {})
  end
  local l = layers.read(h, { points = heat.columns })
  local list, data, c, axis, shadows = curve_sections(h, info, l)
  local maps = {}
  if l.rows > 0 then
    maps.layers, data.layers = heat.layers_over_time(l, axis)
    maps.shares, data.shares = heat.layers_by_exponent(l)
  end
  maps.time, data.time = heat.exponents_over_time(h, l, axis)
  local meters = report_fp8.read(h, axis)
  if meters then maps.fp8, data.fp8 = heat.fp8_over_time(meters, axis) end
  local formats = escape(l.formats_text)
  return parts.page(info.name, h.path, {
    header(info), lead(info, l, c), tiles(h, info, c), ending(info), list.first,
    maps.layers and section("Layers over the run",
      ("The largest gradient of each layer, as stored, in %s: bright is %s. From %s of " ..
        "statistics, recorded at intervals and at overflows; a column covers %s."):format(
        formats, l.format.top < 64 and "near the top of " .. l.format.name or "large",
        counted(l.rows, "row"), counted(l.width, "step")), maps.layers) or "",
    maps.shares and section("Layers by exponent",
      ("The share of each layer's nonzero gradients in each binade, as stored in %s."):format(
        formats), maps.shares) or "",
    maps.time and section("All gradients by exponent",
      ("The share of all nonzero gradients in each binade, as stored in %s, over the steps of " ..
        "the run."):format(formats), maps.time) or "",
    meters and section("FP8 layers",
      ("The signal-to-noise ratio of each layer's quantized input x, weight w and output " ..
        "gradient dy: bright where the ratio is low. From %s; a column covers %s and shows its " ..
        "first measurement. The table lists the layers with the lowest ratios."):format(
          counted(meters.looks, "measurement"), counted(meters.width, "step")), maps.fp8,
          tables.fp8_table(meters)) or "",
    list.last, tables.overflow_sections(h),
    #shadows > 0 and tables.shadows_section(shadows, info) or "",
    tables.events_section(events_of(h)), tables.settings_sections(h, info),
  }, data)
end

return M
