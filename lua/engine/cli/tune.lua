-- engine tune: searches the options of a policy on recorded runs (run/tune.lua). Called by
-- init.lua.
local counterfactual = require "engine.run.counterfactual"
local json = require "engine.base.json"
local options = require "engine.cli.options"
local show = require "engine.base.show"

local help = [==[
usage: engine tune RUN... --policy FILE [name=value ...] --over name=from..to [--over ...]
                   [--objective elements|mass|skipped] [--json]

Searches a policy's options on recorded runs: replays the runs with each setting and names the
setting that would have lost the least, as --objective counts it. It tries a grid over the ranges,
then three finer grids around the best point. Positive ranges are spaced logarithmically; those of
loss scales (options named *scal*) by powers of two if both ends and the default are powers of two.
The search is deterministic.

  engine tune runs/a runs/b --policy dynamic --over growth_interval=100..5000
  engine tune runs/a --policy deepspeed --over scale_window=50..2000 hysteresis=1,2,4

--over      one or more ranges: name=from..to or, for single values, name=a,b,c
--objective elements  (default) share of the gradient elements that lose bits or vanish; a step
                      without an update loses all of them
            mass      share of the gradients' sum of magnitudes that is lost in this way
            skipped   steps without an update; the only objective for strings of outcomes

The search uses the gradients of the recorded runs, so its figures are estimates wherever a setting
differs from these runs: a run with the setting might have had other gradients. `exact` is the share
of a setting's verdicts that are certain (engine help replay). To measure a setting, make a new run
with it.

--json prints {"objective","evaluations","best","default","rows"}; a row has "options", "cost",
"skipped", "skipped_at_least", "steps", "exact" (a number of verdicts), "underflow" and
"mass_lost".]==]

local function percent(x) return x == 0 and "0 %" or ("%.3g %%"):format(100 * x) end

local function row_data(row)
  local c = row.certainty or {}
  return { options = next(row.options) and row.options or json.no_fields,
    cost = row.cost ~= math.huge and row.cost or json.null, skipped = row.skipped,
    skipped_at_least = c.least, steps = row.steps, exact = c.exact, underflow = row.underflow,
    mass_lost = row.mass_lost }
end

local SHOWN = 8

local function print_result(result, source)
  local has_default, ties, best = false, 0, result.best
  local unsure = best.certainty and best.certainty.bounds > 0
  print(("objective: %s%s"):format(require("engine.run.tune").objectives[result.objective],
    unsure and "; estimated from the recorded gradients" or ""))
  local shown = { unpack(result.rows, 1, math.min(SHOWN, #result.rows)) }
  for _, row in ipairs(shown) do has_default = has_default or row == result.default end
  if not has_default then shown[#shown + 1] = result.default end
  local lines = {}
  for i, row in ipairs(shown) do
    local c = row.certainty
    lines[i] = { "", row.text == "" and "the policy's own options" or row.text, "refused", "", "" }
    if row.cost < math.huge then
      lines[i][3], lines[i][4] = "lost " .. percent(row.cost), ("skipped %s of %d"):format(
        c and counterfactual.count_text(c, row.skipped) or row.skipped, row.steps)
      lines[i][5] = ("underflow %s%s%s"):format(percent(row.underflow),
        c and "  exact " .. percent(c.exact / row.steps) or "", row.stopped and "  (stops)" or "")
    end
  end
  print(show.table(lines, true))
  print(("%d settings tried%s"):format(result.evaluations, #result.rows > SHOWN
    and (" (shown: the best %d, and the policy's own options)"):format(SHOWN) or ""))
  for _, row in ipairs(result.rows) do ties = ties + (row.cost == best.cost and 1 or 0) end
  if best == result.default then
    print("no setting is better than the policy's own options" ..
      (ties > 1 and ("; %s just as good"):format(ties == 2 and "1 other setting is"
        or ("%d other settings are"):format(ties - 1)) or ""))
  else
    if ties > 1 then
      print(("%d of the %d settings tried cost the same; the best is the first of these"):format(
        ties, #result.rows))
    end
    show.print(("best: policy=%s:%s"):format(source, best.text))
  end
  if unsure then
    print(("%s of the best setting's verdicts are exact, the others are bounds (engine help tune)")
      :format(percent(best.certainty.exact / best.steps)))
  end
end

local function main(given)
  options.fail_if(#given.policies ~= 1, "expected one --policy FILE, got %d; `engine policies` " ..
    "lists the policies", #given.policies)
  options.fail_if(#given.over == 0, "expected --over NAME=FROM..TO, such as --over " ..
    "growth_interval=100..5000; NAME is an option of the policy")
  local policy = given.policies[1]
  local result = require("engine.run.tune") { runs = given.words, policy = policy.source,
    options = policy.options, over = given.over, objective = given.objective }
  if given.json then
    local rows = {}
    for i, row in ipairs(result.rows) do rows[i] = row_data(row) end
    print(json.plain { objective = result.objective, evaluations = result.evaluations,
      best = row_data(result.best), default = row_data(result.default), rows = rows })
  else
    print_result(result, policy.source)
  end
end

return options.command {
  name = "tune", doc = "search the options of a policy on recorded runs",
  help = help, least = 1, expects = "one run or several",
  options = { json = "switch", over = "texts", objective = "text" }, policies = true, main = main,
  -- Takes the words of --over, such as "a=1..2 b=3,4". A word name=from..to always belongs to
  -- --over, a word name=a,b,c only if there is a range before it.
  word = function(word, given)
    local is_range = word:find("^[%a_][%w_]*=.*%.%.") or #given.over > 0
      and word:find("^[%a_][%w_]*=[^=]*,")
    if is_range then given.over[#given.over + 1] = word end
    return is_range
  end,
}
