-- engine replay TRACE --policy FILE [name=value ...] [--policy FILE ...] [--json]
local arguments = require "engine.cli.policies"

local help = [==[
usage: engine replay TRACE --policy FILE [name=value ...] [--policy FILE ...] [--json]

What would these policies have done? TRACE is a run's directory, or a string of verdicts:
. a good step, x an overflow, a number repeats, as in "4. x 2. 3x".

  engine replay "4. x 2. 3x" --policy dynamic init_scale=256 growth_interval=2
  engine replay runs/a --policy dynamic --policy deepspeed hysteresis=1 --policy ds_config.json
  engine replay runs/a policies/*.lua

FILE is a policy file, the name of a policy that comes with the engine, or a DeepSpeed JSON.
name=value are options of the policy before them.

On a run, whether another scale would have overflowed or underflowed is recomputed from the largest
gradient and the exponent histogram of each step. A verdict is exact, or bound: what was recorded
only bounds what would have happened, and the rest is estimated (lua/engine/policy/trace.lua tells how).
Gradients are those of the recorded run, whatever was skipped.

  skipped      steps without an update
  underflow    share of the nonzero gradients that lose bits or vanish
  mass lost    share of the gradients' sum of magnitudes that underflow takes
  log2 scale   mean over the steps
  recovers in  mean steps from a backoff until the scale is back
  exact        share of the verdicts that are exact

--json prints {"policies":[{"name","file","options","scales","actions","skipped","stopped_at",
"reason"}]}: scales and actions after each step; stopped_at counts steps from 1, as log=json does.
On a run it adds "verdicts" (exact or bound), "underflow", "mass_lost", "mean_log2_scale", "recover".]==]

local function main(...)
  local words = { ... }
  local given = arguments.parse(words, { json = false })
  if #given.traces == 0 then arguments.fail("expected a trace: a run's directory or a string of verdicts; engine help replay says more") end
  if #given.traces > 1 then arguments.fail("expected one trace, got '%s' and '%s'", given.traces[1], given.traces[2]) end
  if #given.policies == 0 then arguments.fail("expected --policy FILE") end
  local replay = require "engine.policy.replay"
  local trace = replay.trace(given.traces[1])
  local results = {}
  for i, p in ipairs(given.policies) do results[i] = replay.run(trace, p.source, p.options) end
  if given.json then
    print(replay.json(results))
    return 0
  end
  print(replay.table(results))
  for _, r in ipairs(results) do
    if not r.marks and r.steps <= 500 then print(("%s: %s"):format(r.name, replay.runs_of(r.scales))) end
    if r.stopped_at then print(("%s stops at step %d: %s"):format(r.name, r.stopped_at, r.reason)) end
    if r.failures > 0 then print(("%s failed in %d of %d steps: %s"):format(r.name, r.failures, r.steps, r.failure)) end
  end
  return 0
end

return {
  doc = "what policies would have done on a recorded run or a string of verdicts",
  help = help,
  main = function(...)
    local words = { ... }
    return arguments.guard("replay", function() return main(unpack(words)) end)
  end,
}
