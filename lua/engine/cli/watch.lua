-- engine watch: redraws the curves and the progress of a run until it ends. Called by init.lua.
local options = require "engine.cli.options"

local help = [==[
usage: engine watch RUN [--columns NAME,NAME...] [--every SECONDS]

Shows a run while it runs: its curves, its last events, its progress and the time left. The view is
redrawn every 2 seconds, and ends with the run (status 0) or with Ctrl-C (status 130). RUN is a name
under runs/ or a directory. The command waits for a run that does not exist yet, and for its first
step; it changes nothing in the run. In a pipe or a file, each refresh is one line.

  engine watch a
  engine watch a --every 10 --columns loss,norm
  engine watch a | tee progress.txt]==]

local EVENTS = 5              -- how many events the view shows
local WINDOW = 100            -- steps over which the speed is measured
local PATIENCE = 5            -- seconds of errors after which the view of a live run ends

-- Returns the progress line of a run, as the run itself shows it, and the percentage of its steps
-- that are done. The percentage is nil if the number of steps is unknown.
local function progress_of(h, last)
  local since = h:query("SELECT min(step) AS step, min(elapsed) AS elapsed, sum(tokens) AS " ..
    "tokens FROM steps WHERE step > ?", last.step - WINDOW)[1]
  local line = require("engine.run.progress").new { total = tonumber(h:meta().steps),
    columns = false }
  line.started, line.first_step = since.elapsed, since.step + 1
  local seconds = last.elapsed - (since.elapsed or last.elapsed)
  local text = line:line({ step = last.step + 1, loss = last.loss, scale = last.next_scale,
    skipped = h:totals().skipped, overflow = last.overflow,
    tokens_per_s = seconds > 0 and (since.tokens or 0) / seconds or nil }, last.elapsed)
  return text, line.total and math.floor(100 * (last.step + 1) / line.total)
end

-- Returns the view of a run as lines for a terminal of `columns` x `rows` characters.
local function frame(h, names, first_line, columns, rows)
  local height = math.floor((rows - EVENTS - 3) / #names) - 5
  local text = tostring(require("engine.report.views").plot(h, names, {
    width = math.max(1, columns - 1), height = math.max(3, math.min(14, height)) }))
  local lines = { first_line, "" }
  for line in (text .. "\n"):gmatch("(.-)\n") do lines[#lines + 1] = line end
  lines[#lines + 1] = ""
  local events = h:query("SELECT * FROM (SELECT id, step, kind, text FROM events ORDER BY id " ..
    "DESC LIMIT ?) ORDER BY id", EVENTS)
  local when = require("engine.run.history_why").when
  for _, event in ipairs(events) do
    lines[#lines + 1] = ("%s  %s  %s"):format(when(event),
      tostring(event.kind):gsub("_", " "), tostring(event.text or ""):match("^[^\n]*"))
  end
  return lines
end

-- Draws the lines over those of the last refresh or, if this is the `first`, on a cleared screen.
local function draw(lines, columns, rows, first)
  local show, out = require "engine.base.show", { first and "\27[2J\27[H" or "\27[H" }
  for i = 1, math.min(#lines, rows - 1) do
    out[#out + 1] = show.cut(show.shown(lines[i]), columns - 1, "") .. "\27[K\n"
  end
  out[#out + 1] = "\27[J"
  return io.stdout:write(table.concat(out)) and io.stdout:flush()
end

-- Shows a run once. names: the columns to draw. state: what one call remembers for the next, such
-- as the line that it printed. Returns nil if the run is in progress, or a text that says how it
-- ended. Returns false if stdout is closed.
local function refresh(path, names, state)
  local runs, machine = require "engine.run.runs", require "engine.base.machine"
  local h = require("engine.run.history").open(path)
  local last = h:last(1)[1]
  local ended, how = runs.ending(h, path, last and last.step or -1)
  local columns, rows = machine.terminal(1)
  local line = state.name .. ": " .. ended .. ", no steps yet"
  if last then
    local progress, share = progress_of(h, last)
    line = ("%s: %s%s  %s"):format(state.name, ended, how == "running" and share
      and (", %d %%"):format(share) or "", progress)
  end
  local good = true
  if columns and last then
    good = draw(frame(h, names, line, columns, rows), columns, rows, not state.drawn)
    state.drawn = true
  elseif line ~= state.line or last then
    good = io.stdout:write(require("engine.base.show").shown(line), "\n") and io.stdout:flush()
  end
  state.line = line
  h:close()
  if not good then return false end
  return how ~= "running" and ended or nil
end

-- Returns the run's path, or nil while the run does not exist. The first call that finds no run
-- prints a line on stderr.
local function find(word, state)
  local good, path = pcall(require("engine.run.runs").find, word)
  if good then return path end
  if not state.told then
    io.stderr:write("engine watch: ", require("engine.base.show").shown(path),
      "; waiting for the run to begin; Ctrl-C ends the wait\n")
    state.told = true
  end
end

-- Calls refresh(). Ignores its errors for PATIENCE seconds while the run's process is alive,
-- because the history of a run that has just begun has no tables yet.
local function try(path, names, state)
  local good, ended = pcall(refresh, path, names, state)
  if good then
    state.failed_at = nil
    return ended
  end
  local now = require("engine.base.machine").clock()
  state.failed_at = state.failed_at or now
  if now - state.failed_at > PATIENCE or not require("engine.run.runs").holder(path) then
    error(ended, 0)
  end
end

local function main(given)
  local every = given.every or 2
  options.fail_if(not (every >= 0.05 and every <= 86400),
    "--every: expected 0.05 to 86400 seconds, got %g", every)
  local M_ffi, curves = require "engine.base.ffi", require "engine.run.curves"
  local C, names, word = M_ffi.C, given.columns or { "loss", "scale" }, given.words[1]
  options.fail_if(#names == 0, "--columns: expected names such as loss,scale, got none")
  for _, name in ipairs(names) do curves.metric(name) end
  local state = { name = word:gsub("/history%.db$", ""):match("([^/]+)/*$") or word }
  local before = C.eng_interrupt_policy(2)         -- Ctrl-C ends the wait or the query
  local good, ended
  repeat
    good, ended = pcall(function()
      local path = find(word, state)
      return path and try(path, names, state)
    end)
    if good and ended == nil and C.eng_interrupted() == 0 then
      C.eng_sleep(every)               -- a signal ends the wait early
    end
  until not good or ended ~= nil or C.eng_interrupted() > 0
  C.eng_interrupt_policy(before)
  if C.eng_interrupted() > 0 then return 128 + C.eng_interrupt_signal(0) end
  if not good then error(ended, 0) end
end

return options.command {
  name = "watch", doc = "the curves and the progress of a run, while it runs", help = help,
  least = 1, most = 1, expects = "one run", options = { columns = "list", every = "number" },
  main = main,
}
