-- Reads and sets the position in the stream of random numbers. Checkpoints store this position. A
-- pass that must not advance the stream, such as a reference backward pass (train/reference.lua),
-- restores the position afterwards. Called by train/, dist/, run/restore.lua and nn/generate.lua.
local M_ffi = require "engine.base.ffi"

local C = M_ffi.C

local random = {}

local seed, counter = M_ffi.new("uint64_t[1]"), M_ffi.new("uint64_t[1]")

--- Returns the position, { seed =, counter = } (uint64_t).
function random.place()
  C.eng_rng_get(seed, counter)
  return { seed = seed[0], counter = counter[0] }
end

--- Continues from a position that place() returned.
function random.go(place) C.eng_rng_set(place.seed, place.counter) end

return random
