-- Contests: the same job under several policies and several seeds, compared by mean and spread.
--   print(engine.contest { policies = { "dynamic", "layerwise" }, seeds = 5,
--     run = function(policy, seed) ... return { loss = 0.31, skipped = 4 } end })
local M_ffi = require "engine.base.ffi"
local tensor = require "engine.tensor.tensor"

local M = {}

local function mean_and_spread(values)
  local sum, squares = 0, 0
  for _, v in ipairs(values) do sum = sum + v end
  local mean = sum / #values
  for _, v in ipairs(values) do squares = squares + (v - mean) ^ 2 end
  return mean, #values > 1 and math.sqrt(squares / (#values - 1)) or 0
end

-- A single seed has no spread.
local function number_text(n)
  return #n.values > 1 and ("%.4g +- %.2g"):format(n.mean, n.spread) or ("%.4g"):format(n.mean)
end

local function text_of(result)
  local lines, columns = { { "policy" } }, result.columns
  for _, column in ipairs(columns) do table.insert(lines[1], column) end
  for i, row in ipairs(result) do
    lines[i + 1] = { row.policy }
    for _, column in ipairs(columns) do table.insert(lines[i + 1], number_text(row[column])) end
  end
  local width = {}
  for _, line in ipairs(lines) do
    for c, cell in ipairs(line) do width[c] = math.max(width[c] or 0, #cell) end
  end
  for i, line in ipairs(lines) do
    for c, cell in ipairs(line) do
      line[c] = c == 1 and cell .. (" "):rep(width[c] - #cell) or (" "):rep(width[c] - #cell) ..
        cell
    end
    lines[i] = table.concat(line, "  ")
  end
  return table.concat(lines, "\n")
end

local KNOWN = { policies = true, also = true, seeds = true, run = true }

-- The policies, and `also` at the end unless the list has it, with or without options.
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

--- Calls run(policy, seed), which returns a table of numbers, for the seeds 1 to `seeds` (5) under
--- every policy, and under `also` unless the list has it. Returns a list of { policy =, NAME = {
--- mean =, spread = standard deviation, values } ... } which prints as a table.
function M.new(options)
  options = tensor.read_named(options, "contest", KNOWN)
  if type(options.policies) ~= "table" or #options.policies == 0
    or type(options.run) ~= "function" then
    M_ffi.raise("contest: expected { policies = { \"dynamic\", ... }, seeds = 5, run = " ..
      "function(policy, seed) ... end }")
  end
  local result = { columns = {} }
  for p, policy in ipairs(with(options.policies, options.also)) do
    local row = { policy = tostring(policy) }
    for seed = 1, options.seeds or 5 do
      local numbers = options.run(policy, seed)
      if type(numbers) ~= "table" then
        M_ffi.raise("contest: expected run to return a table of numbers, got %s",
          M_ffi.value_text(numbers))
      end
      for name, value in pairs(numbers) do
        if p == 1 and seed == 1 then table.insert(result.columns, name) end
        row[name] = row[name] or { values = {} }
        row[name].values[seed] = value
      end
    end
    if p == 1 then table.sort(result.columns) end
    for _, name in ipairs(result.columns) do
      row[name].mean, row[name].spread = mean_and_spread(row[name].values)
    end
    result[p] = row
  end
  return setmetatable(result, { __tostring = text_of })
end

return M
