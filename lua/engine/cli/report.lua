-- engine report RUN [-o FILE]
local options = require "engine.cli.options"

local help = [==[
usage: engine report RUN [-o FILE.html]

Writes one HTML page about a run that needs nothing else, to be opened, mailed or kept: loss and loss
scale with every overflow and policy change, the shadows' scales, heat maps of the layers over the steps
and over the exponents of the format, where overflows begin, events, settings and policy sources. Values
show under the pointer; light or dark as the reader's system has it. A run that goes on is reported as
it stands.

  engine report a                 writes runs/a/report.html
  engine report a -o a.html
  engine report a -o - > a.html]==]

return options.command("report", "one HTML page about a run, with hover values", help, { output = true }, function(given, history, path)
  local text = require("engine.report.report").html(history, path)
  local target = given.output or ((path:match("^(.*)/[^/]*%.db$") or path) .. "/report.html")
  if target == "-" then
    io.stdout:write(text)
    return 0
  end
  local file, why = io.open(target, "wb")
  if not file then options.fail("cannot write %s", tostring(why)) end
  local good, problem = file:write(text)
  local closed = file:close()
  if not good or not closed then options.fail("cannot write %s: %s", target, tostring(problem or "is the disk full?")) end
  print(target)
  return 0
end)
