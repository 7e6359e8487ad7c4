-- engine runs [FOLDER] [--json]
local options = require "engine.cli.options"
local arguments = require "engine.cli.policies"

local help = [==[
usage: engine runs [FOLDER] [--json]

The runs under runs/ (or FOLDER), oldest first: steps made, the last loss and loss scale, steps without
an update, the policy, when it began and how it ended.

  engine runs
  engine runs /scratch/me/runs
  engine runs --json          one JSON object a run

Then: engine plot RUN, engine report RUN, engine attach RUN, engine replay RUN --policy FILE]==]

local function loss_text(x)
  if x == nil then return "-" end
  if x ~= x then return "nan" end
  return ("%.4f"):format(x)
end

local function main(given)
  if #given.words > 1 then options.fail("expected one folder, got %d", #given.words) end
  local dir = given.words[1] or "runs"
  if given.words[1] and require("engine.base.ffi").C.eng_file_kind(dir) ~= 2 then options.fail("there is no folder %s", dir) end
  local list = require("engine.run.runs").list(dir)
  if given.json then
    for _, run in ipairs(list) do print(require("engine.base.json").encode(run)) end
    return 0
  end
  if #list == 0 then
    print(("no runs in %s/; a script makes one with run=NAME"):format(dir))
    return 0
  end
  local views, progress = require "engine.report.views", require "engine.run.progress"
  local several = false
  for _, run in ipairs(list) do several = several or (run.ranks or 1) > 1 end
  local rows = { { "run", "steps", "loss", "scale", "skipped", "policy", "precision", "began", "took", "ended" } }
  for _, run in ipairs(list) do
    local began = run.created and os.date("%Y-%m-%d %H:%M", run.created) or "-"
    if run.problem then
      rows[#rows + 1] = { run.name, "-", "-", "-", "-", "-", "-", began, "-", run.problem }
    elseif run.rows == 0 then
      rows[#rows + 1] = { run.name, "0", "-", "-", "-", "-", run.precision or "-", began, "-", "no steps" }
    else
      local ended = run.how == "running" and ("running, %d %% of %s"):format(100 * (run.last + 1) / (run.steps or run.last + 1), views.grouped(run.steps or 0))
        or run.ended
      rows[#rows + 1] = { run.name, views.grouped(run.rows), loss_text(run.loss), progress.scale_text(run.scale),
        ("%s (%s)"):format(views.grouped(run.skipped), views.percent(run.skipped, run.rows)), run.policy or "-", run.precision or "-", began,
        progress.duration_text(run.seconds), #ended > 60 and ended:sub(1, 57) .. "..." or ended }
    end
  end
  for i, run in ipairs(several and list or {}) do                        -- a column before the last, where any run has more ranks than one
    table.insert(rows[i + 1], #rows[i + 1], run.ranks and run.ranks > 1 and require("engine.dist.ranks").job_text(run.ranks, run.zero, run.wire) or "1 rank")
  end
  if several then table.insert(rows[1], #rows[1], "ranks") end
  local left = { true, false, false, false, false, true, true, true, false, true, true }
  local width = {}
  for _, row in ipairs(rows) do
    for c, text in ipairs(row) do width[c] = math.max(width[c] or 0, #text) end
  end
  for _, row in ipairs(rows) do
    local cells = {}
    for c, text in ipairs(row) do
      local gap = (" "):rep(width[c] - #text)
      cells[c] = left[c] and text .. gap or gap .. text
    end
    print((table.concat(cells, "  "):gsub("%s+$", "")))
  end
  return 0
end

return { doc = "the runs under runs/: steps, loss, scale, skipped, policy, how each ended", help = help, main = function(...)
  local words = { ... }
  return arguments.guard("runs", function() return main(options.parse(words, { json = false })) end)
end }
