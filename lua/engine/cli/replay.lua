-- engine replay TRACE --policy FILE [name=value ...] [--policy FILE ...] [--json]
local options = require "engine.cli.options"
local show = require "engine.base.show"

local help = [==[
usage: engine replay TRACE --policy FILE [name=value ...] [--policy FILE ...] [--json]

Shows what these policies would have done. TRACE is a run, by its name or directory, or a string of
verdicts: . is a good step, x an overflow, and a number repeats what follows it, as in "4. x 2. 3x".

  engine replay "4. x 2. 3x" --policy dynamic init_scale=256 growth_interval=2
  engine replay runs/a --policy dynamic --policy deepspeed hysteresis=1 --policy ds_config.json
  engine replay runs/a policies/*.lua

FILE is a policy file, the name of a policy that comes with the engine (engine policies lists them),
or a DeepSpeed JSON. name=value sets an option of the policy before it.

On a run, each step's largest gradient and exponent histogram show whether another scale would have
overflowed or underflowed. A verdict is exact where they determine the outcome, and bound where they
only bound it and the rest is estimated (lua/engine/run/trace.lua explains how). The gradients are
those of the recorded run, also after steps that the replayed policy would have skipped.

  skipped      steps without an update
  underflow    share of the nonzero gradients that lose bits or vanish
  mass lost    share of the gradients' sum of magnitudes that underflow takes
  log2 scale   mean over the steps
  recovers in  mean steps from a backoff until the scale is back
  exact        share of the verdicts that are exact

--json prints {"policies":[{"name","file","options","scales","actions","skipped","stopped_at",
"reason"}]}: scales and actions after each step; stopped_at counts steps from 1, as log=json does.
On a run it adds "verdicts" (exact or bound), "underflow", "mass_lost", "mean_log2_scale" and
"recover".]==]

local function main(given)
  local traces = given.words
  if #traces == 0 then
    options.fail("expected a trace: a run or a string of verdicts; see engine help replay")
  end
  if #traces > 1 then
    options.fail("expected one trace, got '%s' and '%s'", traces[1], traces[2])
  end
  if #given.policies == 0 then options.fail("expected --policy FILE") end
  local replay = require "engine.run.replay"
  local trace = replay.trace(traces[1])
  local results = {}
  for i, p in ipairs(given.policies) do results[i] = replay.run(trace, p.source, p.options) end
  if given.json then
    print(replay.json(results))
    return 0
  end
  print(replay.table(results))
  for _, r in ipairs(results) do
    if not r.marks and r.steps <= 500 then
      show.print(("%s: %s"):format(r.name, replay.runs_of(r.scales)))
    end
    if r.stopped_at then
      show.print(("%s stops at step %d: %s"):format(r.name, r.stopped_at, r.reason))
    end
    if r.failures > 0 then
      show.print(("%s failed in %d of %d steps: %s"):format(r.name, r.failures, r.steps, r.failure))
    end
  end
  return 0
end

return options.command {
  name = "replay", doc = "what policies would have done on a recorded run or a string of verdicts",
  help = help,
  options = { json = "switch" }, policies = true, main = main,
}
