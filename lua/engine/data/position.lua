-- Checks a saved position before a loader continues from it. Called by restore() of the loaders in
-- init.lua, packed.lua and mix.lua.
local M_ffi = require "engine.base.ffi"
local arguments = require "engine.base.arguments"
local fields = require "engine.base.fields"
local order = require "engine.data.order"
local show = require "engine.base.show"

local raise, raise_if = M_ffi.raise, M_ffi.raise_if

local M = {}

--- Raises an error that shows how to loop. Loaders have this function as their metamethod __call,
--- which `for batch in data do` calls.
function M.no_loop()
  raise("a data loader cannot be called or looped over; hint: for i = 1, n do local batch = " ..
    "data:next() ... end")
end

-- Returns a value as text. Quotes a string if the message compares it with a number.
local function text_of(value, other)
  if type(value) ~= "string" then return M_ffi.value_text(value) end
  local text = show.cut(show.shown(value), 80)
  return type(other) == "number" and "'" .. text .. "'" or text
end

--- Raises an error unless `state` is a position of a loader like `self`. The fields listed in
--- `identity` must be equal in both. rules: rules for further fields (fields.lua), or nil. Returns
--- the number of batches read, and the version of the shuffled order.
function M.check(state, self, identity, rules)
  local problem = fields.record(arguments.merged({ at = fields.count }, rules))(state, "position")
  if problem then raise("data: expected a position from state(): %s", problem) end
  for _, key in ipairs(identity) do
    local saved, own = state[key], self[key]
    raise_if(saved ~= own, "data: this position was saved with %s %s, but the loader has %s; " ..
      "the batches would differ", key, text_of(saved, own), text_of(own, saved))
  end
  local version = state.order or 1     -- positions of version 1 do not give a version
  raise_if(version ~= 1 and version ~= order.newest,
    "data: this position has version %s of the shuffled order, but this engine supports only up " ..
    "to %d; hint: resume with the engine that saved it", text_of(version), order.newest)
  return state.at, version
end

return M
