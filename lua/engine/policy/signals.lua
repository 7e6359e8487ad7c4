-- Signals: named numbers that a script publishes for policies (engine.signal). The trainer, the
-- reducer and scalers read them at each step. Owns the signals. Called by scripts, train/,
-- dist/reducer.lua and run/restore.lua.
local M_ffi = require "engine.base.ffi"
local show = require "engine.base.show"

local expect, raise, value_text = M_ffi.expect, M_ffi.raise, M_ffi.value_text

local M = {
  values = {},
  rules = {},      -- by name, how ranks combine their values: "max", "sum" or "mean" (nil: "mean")
}

--- Publishes a number that policies read as record.signals[name], for example an attention entropy.
--- `rule`: how ranks combine their numbers, "mean" (the default), "max" or "sum"; nil keeps the
--- rule of an earlier call. A rank that has not published the signal does not count.
function M.publish(name, value, rule)
  if M_ffi.ffi.istype("int64_t", value) then value = tonumber(value) end   -- such as record.step
  if type(name) ~= "string" or type(value) ~= "number" then
    raise("signal: expected a name and a number, got %s and %s", value_text(name),
      value_text(value))
  end
  local problem = M.values[name] == nil and (show.name_problem(name)
    or name:find("[ ,]") and "has a space or a comma, which separate names in lists"
    or name:find("^log%.") and "begins with 'log.', which is reserved for policies' logs")
  if problem then raise("signal: the name %s: '%s'", problem, show.cut(show.shown(name), 100)) end
  expect(rule == nil or rule == "mean" or rule == "max" or rule == "sum", rule,
    "signal '%s': expected the rule 'mean', 'max' or 'sum'", name)
  M.values[name], M.rules[name] = value, rule or M.rules[name]
end

--- Publishes a number with the rule "max", without a check of the name, which must be valid.
function M.publish_largest(name, value) M.values[name], M.rules[name] = value, "max" end

--- Removes the signals whose names match a Lua pattern.
function M.withdraw(pattern)
  for name in pairs(M.values) do
    if name:find(pattern) then M.values[name] = nil end
  end
end

return M
