-- Rules for data from a file. A table of rules describes the whole data, and one call checks them
-- before they are used:
--
--   local RULE = fields.record { steps = fields.count, note = fields.optional(fields.text),
--     rates = fields.map(fields.amount), shape = fields.list(fields.count) }
--   RULE({ rates = {}, shape = {}, steps = -1 }, "state")
--     -> "state.steps: expected a whole number of 0 or more, up to 2^53, got -1"
--
-- A rule is a function of a value, its path in messages and, if the value is a field, the record
-- that holds it. It returns the first problem as text, or nil. Records may have fields without a
-- rule, which another version of the engine wrote. Called by data/, run/, policy/class_scaler.lua
-- and train/options.lua.
local M_ffi = require "engine.base.ffi"
local nearest = require "engine.base.nearest"
local show = require "engine.base.show"

local M = {}

--- Makes a rule. what: the expected value in words. test(value, record): whether the value is
--- valid; never called with nil.
function M.rule(what, test)
  return function(value, path, record)
    if value ~= nil and test(value, record) then return nil end
    return ("%s: expected %s, got %s"):format(path, what, M_ffi.value_text(value))
  end
end

local function finite(x) return type(x) == "number" and x >= 0 and x < math.huge end

--- Returns whether x is a whole number of 0 or more that a double holds exactly.
function M.whole(x) return finite(x) and x % 1 == 0 and x <= 2 ^ 53 end
local whole = M.whole

M.text = M.rule("a string", function(x) return type(x) == "string" end)
M.flag = M.rule("true or false", function(x) return type(x) == "boolean" end)
M.table = M.rule("a table", function(x) return type(x) == "table" end)
M.count = M.rule("a whole number of 0 or more, up to 2^53", whole)
M.amount = M.rule("a finite number of 0 or more", finite)

--- Makes the rule for a whole number from `low` (0 or more) to `high`.
function M.between(low, high)
  return M.rule(("a whole number from %d to %d"):format(low, high), function(x)
    return whole(x) and x >= low and x <= high
  end)
end

--- The rule for any value.
function M.any() end

--- Makes the rule for a field that may be absent; if it is present, `rule` applies.
function M.optional(rule)
  return function(value, ...)
    if value ~= nil then return rule(value, ...) end
  end
end

--- Makes the rule for a table with named fields: rules[name] is the rule for the field `name`.
function M.record(rules)
  local names = nearest.keys(rules)      -- sorted, so that the first problem is always the same
  return function(value, path)
    local problem = M.table(value, path)
    for i = 1, problem and 0 or #names do
      local name = names[i]
      problem = problem or rules[name](value[name], path .. "." .. name, value)
    end
    return problem
  end
end

--- Makes the rule for a table in which every value must follow `rule`. keys: a rule for the keys;
--- by default, any strings.
function M.map(rule, keys)
  keys = keys or M.rule("strings as keys", function(name) return type(name) == "string" end)
  return function(value, path)
    local problem = M.table(value, path)
    for name, item in pairs(problem and {} or value) do
      problem = problem or keys(name, path)
        or rule(item, path .. "." .. show.cut(show.shown(name), 80))
    end
    return problem
  end
end

--- Makes the rule for a list in which every value must follow `rule`.
function M.list(rule)
  return function(value, path)
    local problem, n = M.table(value, path), 0
    for _ in pairs(problem and {} or value) do n = n + 1 end
    for i = 1, n do
      problem = problem or value[i] == nil and ("%s: expected a list, got a table with other keys")
        :format(path) or rule(value[i], ("%s[%d]"):format(path, i))
    end
    return problem
  end
end

return M
