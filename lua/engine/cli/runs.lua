-- engine runs: prints the runs of a folder as a table (run/runs.lua). Called by init.lua and
-- repl.lua.
local options = require "engine.cli.options"
local show = require "engine.base.show"

local help = [==[
usage: engine runs [FOLDER] [--json]

Lists the runs in a folder, oldest first: steps, the last loss and loss scale, steps without an
update, the policy, when the run began, how long it took and how it ended. FOLDER is a path or, for
the runs of a contest, the contest's name; by default runs/.

  engine runs
  engine runs /scratch/me/runs
  engine runs --json          one JSON object for each run; inf and nan are strings

next: engine plot RUN, engine report RUN, engine attach RUN, engine replay RUN --policy FILE]==]

local HEAD = { "run", "steps", "loss", "scale", "skipped", "policy", "precision", "began", "took",
  "ended" }
local LEFT = { true, false, false, false, false, true, true, true, false, true, true }

local function loss_text(x) return x == nil and "-" or x ~= x and "nan" or ("%.4f"):format(x) end

local function ended_text(run)
  local text = show.cut(show.shown((run.ended:gsub(": the policy failed.*", ""))), 60)
  if run.how == "running" then
    text = run.steps and ("running, %d %% of %s steps"):format(100 * (run.last + 1) / run.steps,
      show.grouped(run.steps)) or "running"
  end
  if run.failed_shadows > 0 then
    text = ("%s, %s failed"):format(text, show.counted(run.failed_shadows, "shadow"))
  end
  if run.failed == 0 then return text end
  return ("%s, the policy failed in %s of %s steps"):format(text, show.grouped(run.failed),
    show.grouped(run.rows))
end

local function row_of(run)
  local began = run.created and os.date("%Y-%m-%d %H:%M", run.created) or "-"
  if run.problem then return { run.name, "-", "-", "-", "-", "-", "-", began, "-", run.problem } end
  local precision = run.precision or "-"
  if run.rows == 0 then
    local begun = run.how == "running" or run.how == "broken"
    return { run.name, "0", "-", "-", "-", "-", precision, began, "-",
      begun and "no steps" or ended_text(run) }
  end
  return { run.name, show.grouped(run.rows), loss_text(run.loss), show.scale(run.scale),
    ("%s (%s)"):format(show.grouped(run.skipped), show.percent(run.skipped, run.rows)), run.policy
    or "-", precision, began, show.duration(run.seconds), ended_text(run) }
end

-- Returns a table of the runs in `list`, a result of runs.list, as text. dir: their folder.
local function table_of(list, dir)
  if #list == 0 then
    return show.shown(("no runs in %s/; a script makes one with run=NAME"):format(dir))
  end
  local rows, several = { { unpack(HEAD) } }, false
  for i, run in ipairs(list) do
    rows[i + 1] = row_of(run)
    several = several or (run.ranks or 1) > 1
  end
  if several then  -- adds a column before the last one
    table.insert(rows[1], #HEAD, "ranks")
    for i, run in ipairs(list) do
      local job = run.ranks and run.ranks > 1 and require("engine.dist.ranks").job_text(run.ranks,
        run.zero, run.comm_dtype)
      table.insert(rows[i + 1], #HEAD, job or "1 rank")
    end
  end
  return show.table(rows, LEFT)
end

local function main(given)
  local list, dir = require("engine.run.runs").list(given.words[1])
  if not given.json then return print(table_of(list, dir)) end
  for _, run in ipairs(list) do print(require("engine.base.json").plain(run)) end
end

local command = options.command {
  name = "runs", doc = "the runs under runs/: steps, loss, scale, skipped, policy, how each ended",
  help = help, options = { json = "switch" }, most = 1, expects = "at most one folder", main = main,
}

--- Returns the runs of a folder (default "runs"), newest last, as runs.list returns them. print()
--- shows the list as the table of `engine runs`.
function command.list(folder)
  local list, dir = require("engine.run.runs").list(folder)
  return setmetatable(list, { __tostring = function() return table_of(list, dir) end })
end

return command
