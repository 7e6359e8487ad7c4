-- The results of a contest (run/contest.lua) as tables, CSV, JSON, LaTeX and figures. Below,
-- `contest` is the contest and `results` what contest:results() returns, a row for each entrant (a
-- policy, or other settings). Called by cli/contest.lua.
local compare = require "engine.run.compare"
local contests = require "engine.run.contest"
local export = require "engine.report.export"
local json = require "engine.base.json"
local show = require "engine.base.show"
local statistics = require "engine.base.statistics"
local views = require "engine.report.views"

local M = {}

-- For each number: its heading in text, its heading in LaTeX if that differs, and the factor that
-- converts it to the displayed unit.
local HEAD = { loss = { "loss" }, held_out = { "held-out loss" }, skipped = { "skipped" },
  overflows = { "overflows" }, underflow = { "underflow %", "underflow \\%", factor = 100 },
  seconds = { "seconds" } }

local function job_text(contest)
  return table.concat({ contest.script, unpack(contest.settings) }, " ")
end

local function cell(row, name)
  local number, factor = row[name], HEAD[name].factor or 1
  if number.n == 0 then return "-" end
  return statistics.text(number.mean * factor, number.spread * factor, number.n)
end

local function runs_text(row) return ("%d of %d"):format(#row.runs - #row.failed, #row.runs) end

-- ------------------------------------------------------------------ in the terminal

-- Returns three texts about d, a paired difference: { mean, interval, words }. factor: as in HEAD.
local function difference(d, factor)
  local mean = d.mean * factor
  if mean == 0 and d.spread == 0 then return { "0", "-", "equal in every pair" } end
  if d.n == 1 then return { ("%+.3g"):format(mean), "-", "one pair: no interval" } end
  local low, high = d.low * factor, d.high * factor
  local form = "%+.4g"
  if high > low then        -- enough decimals for two digits of the half-width
    local places = 1 - math.floor(math.log10((high - low) / 2))
    form = "%+." .. math.max(0, math.min(9, places)) .. "f"
  end
  local words = low <= 0 and high >= 0
    and "no difference beyond noise" or mean < 0 and "lower" or "higher"
  return { form:format(mean), form:format(low) .. " to " .. form:format(high), words }
end

local function differences_table(contest, results)
  local rows = { { contest.head, "number", "difference", "95 % interval", "" } }
  for i = 2, #results do
    local first = true
    for _, name in ipairs(contests.NAMES) do
      local d = results[i].against[name]
      if d then
        local parts = difference(d, HEAD[name].factor or 1)
        rows[#rows + 1] = { first and results[i].label or "", HEAD[name][1], unpack(parts) }
        first = false
      end
    end
  end
  return #rows > 1 and ("differences from %s with the same seed\n\n"):format(results[1].label) ..
    show.table(rows, { true, true, false, false, true }) or nil
end

-- Appends to `lines` a line for each distinct reason why runs of an entrant failed.
local function add_failures(lines, row)
  local seeds, first = {}, #lines + 1
  for _, run in ipairs(row.failed) do
    if not seeds[run.why] then
      seeds[run.why] = {}
      lines[#lines + 1] = run.why
    end
    table.insert(seeds[run.why], run.seed)
  end
  for i = first, #lines do
    local list = seeds[lines[i]]
    lines[i] = ("%s: %d of %d runs failed (seed %s): %s"):format(row.label, #list, #row.runs,
      table.concat(list, ", "), show.cut(lines[i], 300))
  end
end

-- Appends to `lines` a line that says how often an entrant's policy failed.
local function add_policy_failures(lines, row)
  local seeds, failed, steps = {}, 0, 0
  for _, run in ipairs(row.runs) do
    if (run.policy_failed or 0) > 0 then
      seeds[#seeds + 1], failed, steps = run.seed, failed + run.policy_failed, steps + run.steps
    end
  end
  if failed > 0 then
    lines[#lines + 1] = ("%s: the policy failed in %s of %s (seed %s), so its verdicts there " ..
      "were not used"):format(row.label, show.grouped(failed), show.counted(steps, "step"),
      table.concat(seeds, ", "))
  end
end

--- Returns the tables, the reasons why runs failed, and how often policies failed, as text.
function M.text(contest, results)
  local heads = { contest.head, "finished" }
  for _, name in ipairs(contests.NAMES) do heads[#heads + 1] = HEAD[name][1] end
  local rows, failures = { heads }, {}
  for i, row in ipairs(results) do
    rows[i + 1] = { row.label, runs_text(row) }
    for _, name in ipairs(contests.NAMES) do table.insert(rows[i + 1], cell(row, name)) end
    add_failures(failures, row)
    add_policy_failures(failures, row)
  end
  local parts = { ("%s\n%s over the last tenth of the steps\n\n%s"):format(
    job_text(contest), contest.seeds == 1 and "one seed; loss: mean"
    or ("mean +- standard deviation over %d seeds; loss: mean"):format(contest.seeds),
    show.table(rows, { true })) }
  parts[2] = differences_table(contest, results)
  if #failures > 0 then
    failures[#failures + 1] = ("output of the runs: %s/*/output"):format(contest.path)
    parts[#parts + 1] = table.concat(failures, "\n")
  end
  return show.shown(table.concat(parts, "\n\n"), true)
end

-- ------------------------------------------------------------------ for programs and papers

local COLUMNS = { "label", "seed", "run", "exit", "ended", "steps", "policy_failed",
  unpack(contests.NAMES) }

--- Returns CSV with a line for each run. The first column is called "policy" or "settings". The
--- cell of a missing number is empty.
function M.csv(contest)
  local lines = { (table.concat(COLUMNS, ","):gsub("^label", contest.head)) }
  for _, run in ipairs(contest.runs) do
    local cells = {}
    for i, name in ipairs(COLUMNS) do
      local value = run[name == "run" and "path" or name]
      cells[i] = type(value) == "number" and show.exact(value) or export.csv_text(value or "")
    end
    lines[#lines + 1] = table.concat(cells, ",")
  end
  return table.concat(lines, "\n") .. "\n"
end

-- Returns the named fields of a table; a missing field is null.
local function fields_of(from, names)
  local fields = {}
  for _, name in ipairs(names) do fields[name] = from[name] or json.null end
  return fields
end

--- Returns one JSON object: { script, settings, seeds, policies = [{ policy, runs, NAME = { n,
--- mean, spread, difference = { n, mean, spread, low, high } or null } }] }. NAME stands for each
--- number, such as loss. If entrants are not policies, `entrants` and `settings` replace `policies`
--- and `policy`.
function M.json(contest, results)
  local entrants = {}
  for i, row in ipairs(results) do
    local fields = { [contest.head] = row.label, runs = {} }
    for k, run in ipairs(row.runs) do
      local own = fields_of(run, COLUMNS)
      own.run, own[contest.head], own.label = run.path, run.label, nil
      fields.runs[k] = own
    end
    for _, name in ipairs(contests.NAMES) do
      local d = row.against[name]
      fields[name] = fields_of(row[name], { "n", "mean", "spread" })
      fields[name].difference = d and fields_of(d, { "n", "mean", "spread", "low", "high" })
        or json.null
    end
    entrants[i] = fields
  end
  return json.plain { script = contest.script, settings = contest.settings,
    seeds = contest.seeds, [contest.head == "policy" and "policies" or "entrants"] = entrants }
end

local TEX = { ["\\"] = "\\textbackslash{}", ["~"] = "\\textasciitilde{}",
  ["^"] = "\\textasciicircum{}" }
local function tex_number(text)
  text = text:gsub("e([+-])0*(%d+)", function(sign, digits)
    return "\\times 10^{" .. (sign == "-" and sign or "") .. digits .. "}"
  end)
  return "$" .. text:gsub(" %+%- ", " \\pm ") .. "$"
end

local function tex(text)
  return (show.shown(text):gsub("[\\~^#$%%&_{}]", function(c) return TEX[c] or "\\" .. c end))
end

--- Returns a LaTeX table for the package booktabs. It has the numbers of each entrant, and
--- the difference between its loss and that of the first entrant.
function M.latex(contest, results)
  local lines = { ("%% engine contest %s seeds=%d; \\usepackage{booktabs}"):format(
    show.shown(job_text(contest)), contest.seeds),
    "\\begin{tabular}{l" .. ("r"):rep(#contests.NAMES + 2) .. "}", "\\toprule" }
  local heads = { contest.head, "finished" }
  for _, name in ipairs(contests.NAMES) do heads[#heads + 1] = HEAD[name][2] or HEAD[name][1] end
  heads[#heads + 1] = "$\\Delta$ loss, 95\\,\\% interval"
  lines[#lines + 1] = table.concat(heads, " & ") .. " \\\\"
  lines[#lines + 1] = "\\midrule"
  for i, row in ipairs(results) do
    local cells = { tex(row.label), runs_text(row) }
    for _, name in ipairs(contests.NAMES) do
      local text = cell(row, name)
      cells[#cells + 1] = text == "-" and "--" or tex_number(text)
    end
    local d = row.against.loss and difference(row.against.loss, 1)
    local low, high = (d and d[2] or ""):match("^(%S+) to (%S+)$")
    cells[#cells + 1] = i == 1 and "" or not d and "--" or not low and tex_number(d[1])
      or ("$%s$ ($%s$ to $%s$)"):format(d[1], low, high)
    lines[#lines + 1] = table.concat(cells, " & ") .. " \\\\"
  end
  lines[#lines + 1] = "\\bottomrule\n\\end{tabular}\n"
  return table.concat(lines, "\n")
end

-- ------------------------------------------------------------------ figures

local POINTS = 150      -- more would show the noise of single batches
local NAMES, MEANS = { "loss", "scale" }, { "mean and standard deviation", "geometric mean" }

-- Returns panels of loss and loss scale over the steps, with a curve for each entrant, or nil if
-- no run has finished.
local function panels_of(contest)
  local paths, labels = {}, {}
  for _, run in ipairs(contest.runs) do
    if run.done then paths[#paths + 1], labels[#paths + 1] = run.path, run.label end
  end
  if #paths == 0 then return nil end
  local list = compare.open(paths)
  for i, run in ipairs(list) do run.settings.policy = labels[i] end
  local c = compare.read(list, NAMES, { points = POINTS, group = "policy" })
  for _, run in ipairs(list) do run.history:close() end
  for _, curve in ipairs(c.curves) do curve.label = curve.group[1].settings.policy end
  local panels = views.panels(c, NAMES, {})
  for i, means in ipairs(contest.seeds > 1 and MEANS or {}) do
    panels[i].title = ("%s: %s, %d seeds"):format(panels[i].title, means, contest.seeds)
  end
  panels[1].height, panels[2].height = 280, 180
  return panels
end

--- Writes the figure to options.svg and options.png. Raises an error if no run has finished.
function M.draw(contest, options)
  local panels = panels_of(contest)
  if not panels then error("no run has finished, so there is nothing to draw", 0) end
  local one = #contest.entrants == 1 and contest.entrants[1].label .. ", " or ""     -- no legend
  local title = show.cut(contest.path:match("([^/]+)/*$") .. ": " .. one .. job_text(contest), 90)
  views.write(title, panels, options)
end

--- Returns the figure as text for the terminal, or nil if no run has finished.
function M.figure(contest)
  local panels = panels_of(contest)
  local width = math.min(require("engine.base.machine").terminal(1) or 80, 120)
  return panels and views.drawn(panels, width)
end

return M
