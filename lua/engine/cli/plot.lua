-- engine plot RUN [--columns loss,scale] [--svg FILE] [--png FILE] [--heatmap exponent|time] [--from N] [--to N] ...
local options = require "engine.cli.options"

local help = [==[
usage: engine plot RUN [--columns NAME,NAME...] [--from STEP] [--to STEP] [--log | --linear]
                   [--svg FILE] [--png FILE] [--heatmap exponent|time] [--width N] [--height N]

Draws a run, in the terminal or into a file; a million steps take no longer than a thousand. RUN is a
name under runs/ or a directory. Each dot's column spans the values of its steps; x marks overflows.

  engine plot a                                   loss and loss scale
  engine plot a --columns amax,stored,underflow   other numbers, named below
  engine plot a --from 5000 --to 6000             part of it
  engine plot a --svg a.svg                       a picture for pages; --png a.png wants gnuplot
  engine plot a --heatmap exponent                layers by exponent: who is near the format's ends
  engine plot a --heatmap time                    the largest gradient of each layer over the steps

columns: loss scale lr amax stored norm underflow zeros next_scale norm_ref inf nan clip lr_mul tokens
elapsed. amax is the largest true gradient, stored the same times the loss scale, as the format holds
it; underflow and zeros are shares of all gradients. signals.NAME is what the script published with
engine.signal("NAME", ...).]==]

local function write(path, text)
  local file, why = io.open(path, "wb")
  if not file then options.fail("cannot write %s", tostring(why)) end
  local good, problem = file:write(text)
  local closed = file:close()
  if not good or not closed then options.fail("cannot write %s: %s", path, tostring(problem or "is the disk full?")) end
end

local function marks_of(c)
  local marks = {}
  for i, n in ipairs(c.overflows) do
    if n > 0 then marks[#marks + 1] = c.x[i] end
  end
  return marks
end

return options.command("plot", "curves of a run, in the terminal, as SVG or PNG", help,
  { columns = "list", svg = true, png = true, heatmap = true, from = "number", to = "number", width = "number", height = "number", log = false,
    linear = false },
  function(given, history, path)
    local curves, views = require "engine.report.curves", require "engine.report.views"
    if given.heatmap then
      if given.svg or given.png then options.fail("--heatmap draws in the terminal; engine report has the heat maps as a page") end
      print(views.heatmap(history, { by = given.heatmap, from = given.from, to = given.to, width = given.width }))
      return 0
    end
    local names = given.columns or { "loss", "scale" }
    for _, name in ipairs(names) do curves.metric(name) end
    local log
    if given.log then log = true elseif given.linear then log = false end
    if not given.svg and not given.png then
      print(views.plot(history, names, { from = given.from, to = given.to, width = given.width, height = given.height, log = log }))
      return 0
    end
    local title = path:gsub("/history%.db$", ""):match("([^/]+)/*$")
    local c = curves.read(history, names, { from = given.from, to = given.to, points = 600 })
    if #c.x == 0 then options.fail("the run has no steps there") end
    if given.svg then
      local chart, panels = require "engine.report.chart", {}
      for i, name in ipairs(names) do
        local metric = curves.metric(name)
        local base = log
        if base == nil then base = metric.log elseif base == true then base = metric.log or 10 end
        panels[i] = { title = metric.title, c = c, series = { { column = name, colour = 1 } }, log = base or nil, marks = marks_of(c),
          height = given.height or 150, hold = name == "scale" }
      end
      write(given.svg, chart.file(title, panels))
      print(given.svg)
    end
    if given.png then
      require("engine.report.gnuplot").png(given.png, title, c, names, { width = given.width, height = given.height, log = log })
      print(given.png)
    end
    return 0
  end)
