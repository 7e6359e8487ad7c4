-- The engine's side of scalers.py: reads a file of cases, one JSON object a line (policy, options,
-- trace), and prints for each the scale after every step and whether the policy stopped the run.
local json = require "cjson"
local engine = require "engine"

for line in io.lines(arg[1]) do
  local case, scales = json.decode(line), {}
  local result = engine.replay.run(engine.replay.trace(case.trace), case.policy, case.options)
  assert(result.failures == 0, result.failure)
  for i, scale in ipairs(result.scales) do scales[i] = ("%a"):format(scale) end
  print(table.concat(scales, " ") .. (result.stopped_at and " stop" or ""))
end
