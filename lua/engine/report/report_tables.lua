-- The report's tables: overflows, events, shadows, FP8 layers, settings and policies. Used by
-- report.lua.
local json = require "engine.base.json"
local nearest = require "engine.base.nearest"
local show = require "engine.base.show"
local chart = require "engine.report.chart"
local html = require "engine.report.report_html"
local when = require("engine.run.history_why").when

local M = {}

local escape, number, grouped, percent = chart.escape, chart.number, show.grouped, show.percent
local section, counted = html.section, show.counted

function M.overflow_sections(h)
  local rows = {}
  local counts = h:query([[SELECT coalesce(p.name, 'parameter ' || s.first_bad) AS name,
      count(*) AS n, max(step) AS last
    FROM steps s LEFT JOIN parameters p ON p.id = s.first_bad WHERE overflow GROUP BY s.first_bad
        ORDER BY n DESC, name]])
  if #counts == 0 then return "" end
  for i = 1, math.min(12, #counts) do
    local row = counts[i]
    rows[i] = { "<code>" .. escape(row.name) .. "</code>", grouped(row.n),
      ('<div class="bar" style="width:%.0fpx"></div>'):format(90 * row.n / counts[1].n),
      grouped(row.last) }
  end
  local last = {}
  for _, row in ipairs(h:query("SELECT step, scale, next_scale, inf, nan FROM steps WHERE " ..
    "overflow ORDER BY step DESC, attempt DESC LIMIT 12")) do
    last[#last + 1] = { grouped(row.step), chart.scale(row.scale), chart.scale(row.next_scale),
      grouped(row.inf or 0 / 0), grouped(row.nan or 0 / 0) }
  end
  return '<div class="pair">' .. section("Where overflows are",
    ("%sThe backward pass runs from the last parameter to the first, so an overflow may have " ..
      "begun in a later parameter; <code>trap=overflow</code> names the operation."):format(
      #counts > 12 and ("The most frequent of %d parameters. "):format(#counts) or ""),
    html.table({ "first parameter with inf or nan", "steps", "", "last at step" }, rows,
        { false, true, false, true })) ..
    section("The last overflows", nil, html.table({ "step", "scale", "next scale", "inf", "nan" },
      last, { true, true, true, true, true })) .. "</div>"
end

local MOST_EVENTS = 200

function M.events_section(listed)
  local rows = {}
  for i = math.max(1, #listed - MOST_EVENTS + 1), #listed do
    local e = listed[i]
    rows[#rows + 1] = { when(e), escape((e.kind:gsub("_", " "))),
      (escape(e.text or ""):gsub("\n", "<br>")) }
  end
  return section("Events", #listed > MOST_EVENTS and ("The last %d of %s."):format(MOST_EVENTS,
    grouped(#listed)) or nil, html.table({ "", "", "" }, rows, { true }))
end

function M.shadows_section(shadows, info)
  local rows = {}
  for _, s in ipairs(shadows) do
    rows[#rows + 1] = { ('<svg class="sign"><path class="line %s" d="M0 6H24"/></svg>' ..
      "<code>%s</code>%s"):format(s.style, escape(s.name),
      s.same and (" (the same scales as <code>%s</code>)"):format(escape(s.same)) or ""),
      grouped(s.steps), ("%s (%s)"):format(grouped(s.skipped), percent(s.skipped, s.steps)),
      s.overflows and grouped(s.overflows) or "–", s.bounds and percent(s.steps - s.bounds,
      s.steps) or "–", s.scale and chart.scale(s.scale) or "–", grouped(s.failed) }
  end
  local about = ("Policies that saw the run's steps at their own loss scale and decided " ..
    "nothing. If some verdicts of a policy are not exact, its numbers are estimates: the " ..
    "gradients that it would have met are not fully known. The run's own policy left %s without " ..
    "an update; %s overflowed.")
    :format(counted(info.skipped, "step"), counted(info.overflows, "step"))
  return section("Shadows", about,
    html.table({ "policy", "steps", "would have skipped", "overflows at its scale",
    "exact verdicts", "scale at the end", "failed steps" }, rows, { false, true, true, true, true,
    true, true }))
end

function M.fp8_table(m)
  local rows = {}
  for i, r in ipairs(m.worst) do
    local last = r.last
    rows[i] = { "<code>" .. escape(r.site) .. "</code>", escape(r.role),
      r.least and ("%.1f dB"):format(r.least) or "–", r.least_at and grouped(r.least_at) or "–",
      last.snr and ("%.1f dB"):format(last.snr) or "–", percent(r.underflow or 0, 1),
      percent(r.overflow or 0, 1), number(last.amax or 0 / 0), number(r.scale_min or 0 / 0),
      number(r.scale_max or 0 / 0) }
  end
  return html.table({ "layer", "role", "lowest SNR", "at step", "last SNR", "most underflow",
    "most overflow", "last amax", "smallest scale", "largest scale" }, rows,
    { false, false, true, true, true, true, true, true, true, true })
end

-- Returns the value of a recipe's field as Lua.
local function lua_text(value, indent)
  if type(value) == "string" then return ("%q"):format(value) end
  if type(value) ~= "table" then return tostring(value) end
  local lines = { "{\n" }
  for _, key in ipairs(json.sorted_keys(value)) do
    lines[#lines + 1] = ("%s  %s%s,\n"):format(indent, type(key) == "string" and key .. " = " or "",
      lua_text(value[key], indent .. "  "))
  end
  return table.concat(lines) .. indent .. "}"
end

-- Returns a Lua source that unfolds, under its name and its checksum.
local function folded(name, hash, source)
  local _, lines = source:gsub("\n", "\n")
  return ("<details><summary>%s <span>%s · %s</span></summary><pre>%s</pre></details>"):format(
    escape(name), escape(hash), counted(math.max(1, lines), "line"), html.highlighted(source))
end

function M.settings_sections(h, info)
  local run, settings = {}, {}
  local meta = h:meta()
  for _, key in ipairs(nearest.keys(meta)) do
    local value = meta[key]
    local is_default = key == "zero" and value == "0" or (key == "comm_dtype" or key == "wire")
      and value == "own" or key == "fp8" or key:find "^recipe%."
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
  local policies, recipes = {}, {}
  for i, p in ipairs(h:policies()) do policies[i] = folded(p.name, p.hash, p.source) end
  for i, r in ipairs(h:recipes()) do
    local good, recipe = pcall(json.decode, r.recipe)
    recipes[i] = good and type(recipe) == "table" and folded(tostring(recipe.name), r.checksum,
      lua_text(recipe, "") .. "\n") or ""
  end
  local two = #settings > 0 and '<div class="pair">%s%s</div>' or "%s%s"
  return two:format(section("The run", nil, html.table({ "", "" }, run)),
    section("Settings", nil, html.table({ "", "" }, settings))) ..
    section(#policies == 1 and "Its policy" or "Its policies", nil, table.concat(policies)) ..
    section(#recipes == 1 and "Its precision recipe" or "Its precision recipes", nil,
      table.concat(recipes))
end

return M
