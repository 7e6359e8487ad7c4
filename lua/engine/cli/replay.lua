-- engine replay: replays policies on a recorded run or a string of outcomes (run/replay.lua).
-- Called by init.lua.
local counterfactual = require "engine.run.counterfactual"
local options = require "engine.cli.options"
local show = require "engine.base.show"

local help = [==[
usage: engine replay TRACE --policy FILE [name=value ...] [--policy FILE ...] [--json]
       engine replay RUN --policy FILE [name=value ...] --verify [--steps N] [--from STEP]
                     [--tolerance X] [--script FILE] [--keep FOLDER] [--json]

Shows what the policies would have done. TRACE is a run, by its name or directory, or a string of
outcomes: . is a good step, x an overflow, and a number repeats the symbol after it: "4. x 2. 3x".

  engine replay "4. x 2. 3x" --policy dynamic init_scale=256 growth_interval=2
  engine replay runs/a --policy dynamic --policy deepspeed hysteresis=1 --policy ds_config.json
  engine replay runs/a policies/*.lua
  engine replay runs/a --policy megatron --verify --steps 200

FILE is a policy file, the name of a policy that comes with the engine (engine policies lists them),
or a DeepSpeed JSON. name=value sets an option of the policy before it. Of several policies, those
that TRACE cannot replay are left out, and stderr says why.

On a run, the replay computes which steps overflow at a policy's own scale, from each step's largest
fp16 gradient and exponent histogram. A verdict is exact if these statistics determine it and all
earlier verdicts, and if all of these verdicts lead to the same updates as in the run. From the
first verdict that is not exact, all are bounds, because a run with the policy might have had other
gradients. "At least 1, about 3" skipped steps means that 1 is certain and 3 is the estimate
(lua/engine/run/counterfactual.lua has the rules).

  skipped      steps without an update, and their share
  underflow    share of the nonzero gradients that lose bits or vanish
  mass lost    share of the gradients' sum of magnitudes lost to underflow
  log2 scale   mean over the steps
  recovers in  mean number of steps from a backoff until the scale is back
  exact        share of the verdicts that are exact

A policy of FP8 layers (engine policies lists them) reads the meters that the run recorded, and has
a table of its own: the number of steps at which it moves layers to other formats, how many of the
layers it ever moves, the mean share of layers that differ from the recipe, and the number of steps
at which its decisions differ from the run's.

--json prints {"policies":[{"name","file","options","scales","actions","skipped","stopped_at",
"reason"}]}: scales and actions after each step; stopped_at counts steps from 1, as log=json does.
On a run it adds "verdicts" (exact or bound), "skipped_at_least", "bound_from" (a step, from 0),
"bound_why", "underflow", "mass_lost", "mean_log2_scale" and "recover". A policy of FP8 layers has
"steps" and "moves" ([{"step","layers","reason"}]) instead of the fields about scales.

--verify runs the script live under the policy, and shows step by step where the replay and the live
run differ. The live run begins at the newest checkpoint before the first verdict that is a bound or
differs from the run's, with the policy's state from the replay; without such a checkpoint, it
begins at the start. It writes to a folder of its own; the recorded run is not touched.

--steps N      how many steps to run (100); never more than were recorded
--from STEP    begin at the newest checkpoint up to this step
--tolerance X  relative difference of loss, amax and norm to ignore (0.01)
--script FILE  the script, if it has moved or the history does not name it
--keep FOLDER  keep the live run, in FOLDER/run

With --verify, the exit status is 0 if the replay and the live run agree, 2 if they differ or the
live run ends early, 130 after Ctrl-C (the steps made so far are still compared), and 1 after an
error.]==]

-- Raises an error unless the options of --verify are valid.
local function check_verify(given)
  for _, name in ipairs { "from", "steps", "tolerance", "script", "keep" } do
    local value = given[name]
    if value and not given.verify then options.fail("--%s works with --verify only", name) end
    local least = name == "steps" and 1 or 0
    options.fail_if(type(value) == "number"
      and not (value >= least and value < math.huge and (name == "tolerance" or value % 1 == 0)),
      "--%s: expected a %s of %d or more, got %g", name,
      name == "tolerance" and "finite number" or "whole number", least, value)
  end
end

-- Replays policies, a list of { source, options }, on a trace. Returns the results, and a note for
-- each reason why policies are left out. Raises an error if no policy can be replayed, or if one
-- cannot be loaded, which is a mistake in the command.
local function replay_all(trace, policies)
  local replay = require "engine.run.replay"
  local results, reasons, names, first = {}, {}, {}, nil
  for _, p in ipairs(policies) do
    local policy, result = replay.load(trace, p.source, p.options)
    local good = false
    if policy then good, result = pcall(replay.run, trace, policy) end
    if good then results[#results + 1] = result
    else
      first = first or result
      local name = policy and policy.name or p.source
      local own = ("policy %s "):format(name)
      local reason = result:sub(1, #own) == own and result:sub(#own + 1) or result
      if not names[reason] then reasons[#reasons + 1], names[reason] = reason, {} end
      table.insert(names[reason], name)
    end
  end
  if #results == 0 then error(first, 0) end
  for i, reason in ipairs(reasons) do
    local list = names[reason]
    reasons[i] = ("left out: %s (%s%s)"):format(table.concat(list, ", "),
      #list > 1 and "each " or "", reason)
  end
  return results, reasons
end

local function main(given)
  options.fail_if(#given.policies == 0, "expected --policy FILE; `engine policies` lists the " ..
    "policies")
  check_verify(given)
  if given.verify then return require("engine.cli.replay_verify").main(given) end
  local replay = require "engine.run.replay"
  local trace = replay.trace(given.words[1])
  local results, notes = replay_all(trace, given.policies)
  options.note("replay", notes)
  if given.json then return print(replay.json(results)) end
  print(replay.table(results))
  for _, r in ipairs(results) do
    if not r.marks and r.steps <= 500 then
      show.print(("%s: %s"):format(r.name, replay.runs_of(r.scales)))
    end
    local bounds = r.certainty and counterfactual.why_text(r.certainty)
    if bounds then show.print(("%s: %s"):format(r.name, bounds)) end
    if r.stopped_at then
      show.print(("%s stops at step %d: %s"):format(r.name, r.stopped_at - 1, r.reason))
    end
    if r.failures > 0 then
      show.print(("%s failed in %d of %d steps: %s"):format(r.name, r.failures, r.steps, r.failure))
    end
  end
end

return options.command {
  name = "replay", doc = "what policies would have done on a recorded run or a string of outcomes",
  help = help, least = 1, most = 1, expects = "one trace (a run or a string of outcomes)",
  options = { json = "switch", verify = "switch", from = "number", steps = "number",
    tolerance = "number", script = "text", keep = "text" }, policies = true, main = main,
}
