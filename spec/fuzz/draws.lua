-- The fuzzers' own generator of random numbers, so that every machine sees the same inputs. Used by
-- the Lua fuzzers of this folder except ops.lua, which has its own (made.lua).
local M = {}

local state = 1

--- Starts a sequence of draws, which is the same for the same seed and round.
function M.start(seed, round) state = (seed * 7919 + (round or 0) * 104729) % 2 ^ 31 end

--- A number from 0 to n - 1.
function M.draw(n)
  state = (state * 1103515245 + 12345) % 2 ^ 31
  return math.floor(state / 2 ^ 8) % n
end

function M.one_of(list) return list[M.draw(#list) + 1] end

return M
