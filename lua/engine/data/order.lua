-- The order in which examples are visited: a permutation of 0..n-1 for each epoch that needs no
-- memory, so that training can resume anywhere in any epoch. A Feistel network over the smallest
-- even number of bits that covers n, applied until the result is below n (Black and Rogaway 2002,
-- "cycle walking").
local band, bxor, rshift, lshift, tobit = bit.band, bit.bxor, bit.rshift, bit.lshift, bit.tobit

local M = {}

-- A 32-bit mixer: the finalizer of MurmurHash3, with multiplications split so that doubles hold
-- them exactly.
local function multiply(a, b)
  local low, high = band(b, 0xFFFF), rshift(b, 16)
  return tobit(a % 2 ^ 32 * low % 2 ^ 32 + lshift(tobit(a % 2 ^ 32 * high % 2 ^ 32), 16) % 2 ^ 32)
end

local function mix(x)
  x = bxor(x, rshift(x, 16))
  x = multiply(x, 0x85EBCA6B)
  x = bxor(x, rshift(x, 13))
  x = multiply(x, 0xC2B2AE35)
  return bxor(x, rshift(x, 16))
end

--- A number in 0..n-1 that depends only on seed and key.
function M.draw(seed, key, n)
  local high = mix(tobit(bxor(mix(tobit(seed)), mix(tobit(key + 0x9E3779B9)))))
  return math.floor(high % 2 ^ 32 / 2 ^ 32 * n)
end

--- The item at position i (from 0) of epoch `epoch` over n items.
function M.permute(i, n, seed, epoch)
  if n <= 1 then return 0 end
  local half = 1
  while 4 ^ half < n do half = half + 1 end
  local mask = lshift(1, half) - 1
  local key = mix(tobit(bxor(mix(tobit(seed)), tobit(epoch * 0x85EB + 1))))
  local x = i
  repeat
    local left, right = math.floor(x / 2 ^ half), x % 2 ^ half
    for round = 1, 4 do
      left, right = right, bxor(left, band(mix(tobit(bxor(key, tobit(right * 8 + round)))), mask))
      right = band(right, mask)
    end
    x = left * 2 ^ half + right
  until x < n
  return x
end

return M
