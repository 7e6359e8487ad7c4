-- Checks a saved position before a loader continues from it. Called by restore() of the loaders in
-- init.lua, packed.lua and mix.lua.
local M_ffi = require "engine.base.ffi"
local order = require "engine.data.order"

local expect, raise = M_ffi.expect, M_ffi.raise

local M = {}

local function whole(v) return type(v) == "number" and v >= 0 and v % 1 == 0 end

--- Raises an error unless `state` is a position of a loader like `self`. The fields listed in
--- `identity` must be equal in both, and the fields listed in `counts` must be whole numbers.
--- Returns the number of batches read, and the version of the shuffled order.
function M.check(state, self, identity, counts)
  local good = type(state) == "table" and whole(state.at)
  for _, key in ipairs(good and counts or {}) do good = good and whole(state[key]) end
  expect(good, state, "data: expected a position from state()")
  for _, key in ipairs(identity) do
    if state[key] ~= self[key] then
      raise("data: this position was saved with %s %s, but the loader has %s; the batches would "
        .. "differ", key, tostring(state[key]), tostring(self[key]))
    end
  end
  local version = state.order or 1     -- positions saved before version 2 have no version
  if version ~= 1 and version ~= order.newest then
    raise("data: this position has version %s of the shuffled order, but this engine "
      .. "supports only up to %d; hint: resume with the engine that saved it", tostring(version),
      order.newest)
  end
  return state.at, version
end

return M
