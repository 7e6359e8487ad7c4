-- engine plot: draws curves and heat maps of recorded runs (report/views.lua). Called by init.lua.
local options = require "engine.cli.options"

local help = [==[
usage: engine plot RUN... [--columns NAME,NAME...] [--group SETTING] [--from STEP] [--to STEP]
                   [--log | --linear] [--svg FILE] [--png FILE] [--title TEXT]
                   [--heatmap exponent|time] [--width N] [--height N]

Draws runs in the terminal or into a file; a million steps take no longer than a thousand. RUN is
a name under runs/ or a directory. A column of dots stands for several steps: for one run it spans
their values from the smallest to the largest; for several runs it marks their mean. A legend
explains the marks below a curve. --width counts characters, or pixels with --svg or --png. --title
replaces the names of the runs at the top of a file.

  engine plot a                                   loss and loss scale
  engine plot a --columns amax,stored,underflow   other numbers, named below
  engine plot a --from 5000 --to 6000             only these steps
  engine plot a --svg a.svg                       a picture for pages; --png a.png needs gnuplot
  engine plot a --heatmap exponent                each layer's gradients by exponent
  engine plot a --heatmap time                    the largest gradient of each layer over the steps
  engine plot a b c --columns loss                a curve for each run
  engine plot runs/*-seed? --group policy         the mean and spread of the runs of each policy

Several runs are labelled with the settings that tell them apart, and with their precisions if these
differ. A run that lacks a column is left out of that column's plot, and a line on stderr names it.
--group takes any recorded setting (policy, precision ...; lr, seed and the script's other settings
if it has `config = cfg` in engine.trainer) and draws one line for each of its values: the mean of
the runs with this value, in a band of one standard deviation on either side, at the steps that all
of these runs have. On a logarithmic axis, mean and deviation are those of the logarithms.

columns: loss scale lr amax stored norm underflow zeros next_scale norm_ref inf nan clip lr_mul
tokens elapsed. amax is the largest true gradient; stored is amax times the loss scale, as the
format holds it; underflow and zeros are shares of all gradients; clip is the policy's limit at the
steps where it set one, though the trainer may clip too. signals.NAME is what the script published
with engine.signal("NAME", ...), log.NAME is what the policy logged, and scales.LAYER is a layer's
own loss scale (scales.blocks.1) at the steps with statistics per tensor. FP8 layers have, at the
measured steps, fp8.LAYER:ROLE.snr, .underflow and .overflow (fp8.blocks.1.mlp.up:w.snr); fp8.snr is
the lowest SNR of all their tensors, fp8.underflow and fp8.overflow are the largest shares.]==]

local function sizes_of(given)
  local sizes = { from = given.from, to = given.to, width = given.width, height = given.height,
    svg = given.svg, png = given.png, title = given.title, group = given.group }
  options.fail_if(given.title and not (given.svg or given.png),
    "--title is the title in a file; hint: add --svg FILE or --png FILE")
  options.fail_if(given.log and given.linear, "expected --log or --linear, got both")
  if given.log then sizes.log = true elseif given.linear then sizes.log = false end
  options.fail_if(given.columns and #given.columns == 0,
    "--columns: expected names such as loss,scale, got none")
  return sizes, given.columns or { "loss", "scale" }
end

-- Suggests --columns for a column that is given in the place of a run.
local function check_word(word)
  options.fail_if(pcall(require("engine.run.curves").metric, word)
    and not pcall(require("engine.run.runs").find, word),
    "there is no run '%s'; hint: engine plot RUN --columns %s", word, word)
end

local function say(text)
  text = tostring(text)
  if text ~= "" then print(text) end
end

local function main(given, history)
  local views = require "engine.report.views"
  options.fail_if(given.group, "--group draws several runs; to draw one run, leave out --group")
  if given.heatmap then
    options.fail_if(given.svg or given.png,
      "--heatmap draws only in the terminal; hint: leave out --svg and --png, or run engine " ..
      "report, whose page shows heat maps")
    for _, name in ipairs { "columns", "log", "linear", "height", "title" } do
      options.fail_if(given[name], "--%s does not work with --heatmap; hint: leave out one of them",
        name)
    end
    options.fail_if(given.heatmap ~= "exponent" and given.heatmap ~= "time",
      "--heatmap: expected exponent or time, got '%s'", given.heatmap)
    return say(views.heatmap(history, { by = given.heatmap, from = given.from, to = given.to,
      width = given.width }))
  end
  local sizes, names = sizes_of(given)
  return say(views.plot(history, names, sizes))
end

local function several(given, list)
  if given.heatmap then options.fail("--heatmap draws one run, got %d runs", #list) end
  local sizes, names = sizes_of(given)
  local text, notes = require("engine.report.views").compare(list, names, sizes)
  options.note("plot", notes)
  return say(text)
end

return options.run_command {
  name = "plot", doc = "curves of runs, in the terminal, as SVG or PNG", help = help, main = main,
  several = several, word = check_word,
  options = { columns = "list", group = "text", svg = "text", png = "text", title = "text",
    heatmap = "text", from = "number", to = "number", width = "number", height = "number",
    log = "switch", linear = "switch" },
}
