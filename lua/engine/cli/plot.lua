-- engine plot RUN [--columns loss,scale] [--svg FILE] [--png FILE] [--heatmap exponent|time]
-- [--from N] [--to N] ...
local options = require "engine.cli.options"

local help = [==[
usage: engine plot RUN [--columns NAME,NAME...] [--from STEP] [--to STEP] [--log | --linear]
                   [--svg FILE] [--png FILE] [--heatmap exponent|time] [--width N] [--height N]

Draws a run in the terminal or into a file; a million steps take no longer than a thousand. RUN is
a name under runs/ or a directory. Each column of dots spans the values of its steps; x marks
overflows.

  engine plot a                                   loss and loss scale
  engine plot a --columns amax,stored,underflow   other numbers, named below
  engine plot a --from 5000 --to 6000             part of it
  engine plot a --svg a.svg                       a picture for pages; --png a.png needs gnuplot
  engine plot a --heatmap exponent                layers by exponent: which are near the ends
  engine plot a --heatmap time                    the largest gradient of each layer over the steps

columns: loss scale lr amax stored norm underflow zeros next_scale norm_ref inf nan clip lr_mul
tokens elapsed. amax is the largest true gradient; stored is amax times the loss scale, as the
format holds it; underflow and zeros are shares of all gradients. signals.NAME is what the script
published with engine.signal("NAME", ...).]==]

local function main(given, history, path)
  local curves, views = require "engine.run.curves", require "engine.report.views"
  local sizes = { from = given.from, to = given.to, width = given.width, height = given.height }
  if given.heatmap then
    if given.svg or given.png then
      options.fail("--heatmap draws in the terminal; engine report draws heat maps into a page")
    end
    print(views.heatmap(history, { by = given.heatmap, from = given.from, to = given.to,
      width = given.width }))
    return 0
  end
  local names = given.columns or { "loss", "scale" }
  for _, name in ipairs(names) do curves.metric(name) end
  if given.log then sizes.log = true elseif given.linear then sizes.log = false end
  if not given.svg and not given.png then
    print(views.plot(history, names, sizes))
    return 0
  end
  local title = path:gsub("/history%.db$", ""):match("([^/]+)/*$")
  local c = curves.read(history, names, { from = given.from, to = given.to, points = 600 })
  if #c.x == 0 then options.fail("the run has none of these steps") end
  if given.svg then
    local chart, panels = require "engine.report.chart", {}
    for i, name in ipairs(names) do
      local metric = curves.metric(name)
      panels[i] = { title = metric.title, c = c, series = { { column = name, colour = 1 } },
        log = curves.log_of(metric, sizes.log),
        marks = curves.marks(c), height = given.height or 150, hold = name == "scale" }
    end
    require("engine.base.file").write(given.svg, chart.file(title, panels))
    print(given.svg)
  end
  if given.png then
    require("engine.report.gnuplot").png(given.png, title, c, names, sizes)
    print(given.png)
  end
  return 0
end

return options.run_command {
  name = "plot", doc = "curves of a run, in the terminal, as SVG or PNG", help = help, main = main,
  options = { columns = "list", svg = "text", png = "text", heatmap = "text", from = "number",
    to = "number",
    width = "number", height = "number", log = "switch", linear = "switch" },
}
