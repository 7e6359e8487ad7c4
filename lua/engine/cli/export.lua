-- engine export RUN --csv FILE | --jsonl FILE | --tensorboard FOLDER
local options = require "engine.cli.options"

local help = [==[
usage: engine export RUN [--csv FILE] [--jsonl FILE] [--tensorboard FOLDER [--every N]]

A recorded run for other tools. FILE may be - for standard output.

  engine export a --csv a.csv                 a line a step; pandas.read_csv takes it as it is
  engine export a --jsonl - | head            an object a step; "inf" and "nan" are strings
  engine export a --tensorboard tb/a          event files: numbers, histograms of the layers'
                                              gradients, policies, settings and events as text
  engine export a --tensorboard tb/a --every 10   each tenth step, and all overflows

Meters of FP8 layers stand in the steps that were looked at: fp8.LAYER:ROLE.snr and the like.
A script with tensorboard=true writes event files while it runs.]==]

return options.command("export", "a run as CSV, JSON Lines or TensorBoard event files", help,
  { csv = true, jsonl = true, tensorboard = true, every = "number" },
  function(given, history)
    local export, views = require "engine.run.export", require "engine.report.views"
    if not (given.csv or given.jsonl or given.tensorboard) then options.fail("expected --csv FILE, --jsonl FILE or --tensorboard FOLDER") end
    local function told(n, path)
      if path ~= "-" then print(("%s: %s steps"):format(path, views.grouped(n))) end
    end
    if given.csv then told(export.csv(history, given.csv), given.csv) end
    if given.jsonl then told(export.jsonl(history, given.jsonl), given.jsonl) end
    if given.tensorboard then
      local every = given.every or 1
      if every % 1 ~= 0 or every < 1 then options.fail("--every: expected a whole number of 1 or more, got %g", every) end
      told(export.tensorboard(history, given.tensorboard, { every = every }))
    end
    return 0
  end)
