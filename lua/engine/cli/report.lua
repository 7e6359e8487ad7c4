-- engine report: writes an HTML page about one run (report/report.lua) or about several runs
-- (report/report_compare.lua). Called by init.lua.
local options = require "engine.cli.options"

local help = [==[
usage: engine report RUN... [-o FILE.html]

Writes one self-contained HTML page about a run, to open, mail or keep: loss and loss scale with
every overflow and policy change, the scales of the shadows, heat maps of the layers over steps and
over the exponents of the format, where overflows begin, events, settings and policy sources.
Pointing at a curve shows its values; the colours follow the reader's system, light or dark, and
the page fits a phone's screen. For a run in progress, the page shows the steps so far; for a run
without steps, it shows how the run ended and its settings.

For several runs it writes a page that compares them: the settings that differ, steps, losses,
skipped steps, overflows, how each run ended, and the curves of all runs in one plot of the loss and
one of the loss scale. The page links to each run's own page, if that exists.

  engine report a                 writes runs/a/report.html
  engine report a -o a.html
  engine report a -o - > a.html
  engine report a b c             writes comparison.html]==]

local function write(target, text)
  require("engine.base.file").write(target, text)
  if target ~= "-" then print(target) end
end

return options.run_command {
  name = "report", doc = "one HTML page about a run, or comparing several", help = help,
  options = { output = "text" }, short = { o = "output" }, empty = true,
  main = function(given, history, path)
    local text = require("engine.report.report").html(history, path)
    return write(given.output or require("engine.run.runs").folder(path) .. "/report.html", text)
  end,
  several = function(given, list)
    local target = given.output or "comparison.html"
    local text, notes = require("engine.report.report_compare").html(list,
      target:match("^(.*/)[^/]*$") or ".")
    options.note("report", notes)
    return write(target, text)
  end,
}
