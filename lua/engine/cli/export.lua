-- engine export: writes a recorded run in the formats of other tools (report/export.lua). Called by
-- init.lua.
local options = require "engine.cli.options"

local help = [==[
usage: engine export RUN [--csv FILE] [--jsonl FILE] [--tensorboard FOLDER [--every N]]

Writes a recorded run in the formats of other tools. FILE may be - for standard output.

  engine export a --csv a.csv                 a line for each step, for pandas.read_csv
  engine export a --jsonl - | head            an object for each step; "inf" and "nan" are strings
  engine export a --tensorboard tb/a          event files: numbers; histograms of the layers'
                                              gradients; policies, settings and events as text
  engine export a --tensorboard tb/a --every 10   every tenth step, and all overflows

Columns of --csv and --jsonl: first_bad is the first parameter with inf or nan in the model's order;
clip is the policy's limit, 0 if it set none, though the trainer may clip; amax and norm are true
(unscaled).

Meters of FP8 layers are columns such as fp8.LAYER:ROLE.snr, filled at the steps that measured them.
A script with tensorboard=true writes event files while it runs.]==]

return options.run_command {
  name = "export", doc = "a run as CSV, JSON Lines or TensorBoard event files", help = help,
  options = { csv = "text", jsonl = "text", tensorboard = "text", every = "number" },
  main = function(given, history)
    local export, show = require "engine.report.export", require "engine.base.show"
    options.fail_if(not (given.csv or given.jsonl or given.tensorboard),
      "expected --csv FILE, --jsonl FILE or --tensorboard FOLDER, got none of them")
    options.fail_if(given.every and not given.tensorboard, "--every works with --tensorboard only")
    options.fail_if(given.csv and given.csv == given.jsonl and given.csv ~= "-",
      "--csv and --jsonl: expected two different files, got '%s' twice", given.csv)
    local function done(steps, path)
      if path ~= "-" then print(("%s: %s steps"):format(path, show.grouped(steps))) end
    end
    if given.csv then done(export.csv(history, given.csv), given.csv) end
    if given.jsonl then done(export.jsonl(history, given.jsonl), given.jsonl) end
    if given.tensorboard then
      local every = given.every or 1
      options.fail_if(every % 1 ~= 0 or every < 1,
        "--every: expected a whole number of 1 or more, got %g", every)
      done(export.tensorboard(history, given.tensorboard, { every = every }))
    end
  end,
}
