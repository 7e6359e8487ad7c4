-- Runs a contest: the same job under several policies and several seeds, compared by mean and
-- spread. Called by scripts.
--   print(engine.contest { policies = { "dynamic", "layerwise" }, seeds = 5,
--     run = function(policy, seed) ... return { loss = 0.31, skipped = 4 } end })
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local nearest = require "engine.base.nearest"
local show = require "engine.base.show"
local statistics = require "engine.base.statistics"
local tensor = require "engine.tensor.tensor"

local M = {}

local function text_of(result)
  local lines = { { "policy", unpack(result.columns) } }
  for i, row in ipairs(result) do
    lines[i + 1] = { row.policy }
    for c, column in ipairs(result.columns) do
      local n = row[column]
      lines[i + 1][c + 1] = #n.values == 0 and "-" or statistics.text(n.mean, n.spread, #n.values)
    end
  end
  return show.table(lines, { true })
end

-- Returns a copy of the list of policies. Appends the policy `also`, unless the list has it already
-- (with or without options).
local function with(policies, also)
  local list = { unpack(policies) }
  for _, policy in ipairs(policies) do
    if also == nil or policy == also or tostring(policy):match("^[^:]+") == also then
      return list
    end
  end
  list[#list + 1] = also
  return list
end

--- Calls run(policy, seed) for every policy of the list `policies` and the seeds 1 to `seeds` (by
--- default 5). The policy `also` is appended to the list if it is missing there. run returns a
--- table of numbers by name. Returns a list of { policy =, NAME = { mean =, spread = standard
--- deviation, values } ... }, which prints as a table. If a call of run returns no number NAME, the
--- mean of NAME leaves out this call.
function M.new(options)
  options = tensor.read_named(options, "contest", "policies also seeds run")
  M_ffi.raise_if(type(options.policies) ~= "table" or #options.policies == 0
    or type(options.run) ~= "function", "contest: expected { policies = { \"dynamic\", ... }, " ..
    "seeds = 5, run = function(policy, seed) ... end }, got policies = %s and run = %s",
    type(options.policies) == "table" and "a list of " .. #options.policies
      or M_ffi.value_text(options.policies), M_ffi.value_text(options.run))
  local seeds = arguments.want_whole(options.seeds or 5, "contest", "seeds", 1)
  local result, columns = {}, {}
  for p, policy in ipairs(with(options.policies, options.also)) do
    local row = { policy = tostring(policy) }
    for seed = 1, seeds do
      local numbers = options.run(policy, seed)
      M_ffi.expect(type(numbers) == "table", numbers,
        "contest: expected run to return a table of numbers")
      for name, value in pairs(numbers) do
        arguments.want_number(value, "contest", ("'%s' of run's result"):format(tostring(name)))
        row[name], columns[name] = row[name] or { values = {} }, true
        table.insert(row[name].values, value)
      end
    end
    result[p] = row
  end
  result.columns = nearest.keys(columns)
  for _, row in ipairs(result) do
    for _, name in ipairs(result.columns) do
      row[name] = row[name] or { values = {} }
      row[name].mean, row[name].spread = statistics.mean_and_spread(row[name].values)
    end
  end
  return setmetatable(result, { __tostring = text_of })
end

return M
