-- engine tune RUN... --policy FILE [name=value ...] --over name=from..to [--over ...] [--objective NAME] [--json]
local arguments = require "engine.cli.policies"
local json = require "engine.base.json"

local help = [==[
usage: engine tune RUN... --policy FILE [name=value ...] --over name=from..to [--over ...]
                   [--objective elements|mass|skipped] [--json]

Searches a policy's options on recorded runs: replays it with each setting and says which one
loses least. First a grid over the ranges (logarithmic for positive ones, powers of two between
two loss scales that are such), then three finer ones around the best. The same call gives the
same answer.

  engine tune runs/a runs/b --policy dynamic --over growth_interval=100..5000
  engine tune runs/a --policy deepspeed --over scale_window=50..2000 hysteresis=1,2,4

--over      name=from..to, or name=a,b,c for values; words after it are ranges, too
--objective elements  gradient elements lost: all of a step without an update, else those that
                      lose bits or vanish (the default)
            mass      the same of the gradients' sum of magnitudes
            skipped   steps without an update; the only one for strings of verdicts

The gradients are those of the recorded runs. What a setting does to the training itself, a
run has to show.]==]

local function percent(x) return x == math.huge and "refused" or x == 0 and "0 %" or ("%.3g %%"):format(100 * x) end

local function row_json(row)
  local parts, names = {}, {}
  for name in pairs(row.options) do names[#names + 1] = name end
  table.sort(names)
  for i, name in ipairs(names) do parts[i] = json.encode(name) .. ":" .. json.encode(row.options[name]) end
  return ('{"options":{%s},"cost":%s,"skipped":%d,"steps":%d,"underflow":%s,"mass_lost":%s}'):format(table.concat(parts, ","),
    row.cost == math.huge and "null" or json.encode(row.cost), row.skipped, row.steps, json.encode(row.underflow), json.encode(row.mass_lost))
end

local SHOWN = 8

local function show(result, source)
  print(("objective: %s"):format(require("engine.policy.tune").objectives[result.objective]))
  local width = #"the policy's own"
  for i = 1, math.min(SHOWN, #result.rows) do width = math.max(width, #result.rows[i].text) end
  local function line(row)
    print((("  %%-%ds  lost %%-9s  skipped %%d of %%d  underflow %%s%%s"):format(width)):format(row.text == "" and "the policy's own" or row.text,
      percent(row.cost), row.skipped, row.steps, percent(row.underflow), row.stopped and "  (stops)" or ""))
  end
  local told = false
  for i = 1, math.min(SHOWN, #result.rows) do
    line(result.rows[i])
    told = told or result.rows[i] == result.default
  end
  if not told then line(result.default) end
  print(("%d settings tried"):format(result.evaluations))
  local best = result.best
  local ties = 0
  for _, row in ipairs(result.rows) do ties = ties + (row.cost == best.cost and 1 or 0) end
  if best == result.default then
    print("none is better than what it has" .. (ties > 1 and ("; %d cost the same"):format(ties - 1) or ""))
  else
    if ties > 1 then print(("%d of the %d settings tried cost the same; the one tried first is named"):format(ties, #result.rows)) end
     print(("best: policy=%s:%s"):format(source, best.text))
  end
end

local function main(...)
  local words = { ... }
  -- "--over a=1..2 b=3..4": a word that is a range belongs to --over wherever it stands.
  local list, over = {}, {}
  for i, word in ipairs(words) do
    if words[i - 1] ~= "--over" and word:find("^[%a_][%w_]*=.*%.%.") then over[#over + 1] = word
    elseif words[i - 1] ~= "--over" and #over + #list > 0 and word:find("^[%a_][%w_]*=[^=]*,") then over[#over + 1] = word
    else list[#list + 1] = word end
  end
  local given = arguments.parse(list, { json = false, over = true, objective = true })
  for _, word in ipairs(over) do given.over[#given.over + 1] = word end
  if #given.traces == 0 then arguments.fail("expected runs; engine help tune says more") end
  if #given.policies ~= 1 then arguments.fail("expected one --policy FILE, got %d", #given.policies) end
  if #given.over == 0 then arguments.fail("expected --over name=from..to") end
  local policy = given.policies[1]
  local result = require("engine.policy.tune") { runs = given.traces, policy = policy.source, options = policy.options, over = given.over,
    objective = given.objective[#given.objective] }
  if given.json then
    local rows = {}
    for i, row in ipairs(result.rows) do rows[i] = row_json(row) end
    print(('{"objective":%s,"evaluations":%d,"best":%s,"default":%s,"rows":[%s]}'):format(json.encode(result.objective), result.evaluations,
      row_json(result.best), row_json(result.default), table.concat(rows, ",")))
  else
    show(result, policy.source)
  end
  return 0
end

return {
  doc = "the options of a policy that would have lost least on recorded runs",
  help = help,
  main = function(...)
    local words = { ... }
    return arguments.guard("tune", function() return main(unpack(words)) end)
  end,
}
