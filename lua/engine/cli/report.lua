-- engine report RUN [-o FILE]
local options = require "engine.cli.options"

local help = [==[
usage: engine report RUN [-o FILE.html]

Writes one self-contained HTML page about a run, to open, mail or keep: loss and loss scale with
every overflow and policy change, the scales of the shadows, heat maps of the layers over steps and
over the exponents of the format, where overflows begin, events, settings and policy sources.
Pointing at a curve shows its values; the colours follow the reader's system, light or dark.
A run in progress is reported up to its last step.

  engine report a                 writes runs/a/report.html
  engine report a -o a.html
  engine report a -o - > a.html]==]

return options.run_command {
  name = "report", doc = "one HTML page about a run, with hover values", help = help,
  options = { output = "text" }, short = { o = "output" },
  main = function(given, history, path)
    local text = require("engine.report.report").html(history, path)
    local target = given.output or ((path:match("^(.*)/[^/]*%.db$") or path) .. "/report.html")
    require("engine.base.file").write(target, text)
    if target ~= "-" then print(target) end
    return 0
  end,
}
