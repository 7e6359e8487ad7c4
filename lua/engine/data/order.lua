-- Computes the order in which examples are visited: a permutation of 0..n-1 for each epoch. The
-- permutation needs no memory, so training can resume anywhere in any epoch. Version 2 is a
-- swap-or-not shuffle (Hoang, Morris and Rogaway 2012), which works for any n. Each round has a
-- pseudorandom number K. It pairs x with (K - x) mod n, and a hash of the pair decides whether the
-- two are swapped. Two examples become independent of each other in a round that moves only one of
-- them, which happens with probability 1/2. Owns the latest epoch's constants. Called by the
-- loaders and position.lua.
local band, bxor, rshift, lshift, tobit = bit.band, bit.bxor, bit.rshift, bit.lshift, bit.tobit

local M = { newest = 2 }

-- A 32-bit mixer: the finalizer of MurmurHash3, with multiplications split so that doubles hold
-- them exactly.
local function multiply(a, b)
  return tobit(a * band(b, 0xFFFF) + lshift(tobit(a * rshift(b, 16)), 16))
end

local function mix(x)
  x = bxor(x, rshift(x, 16))
  x = multiply(x, 0x85EBCA6B)
  x = bxor(x, rshift(x, 13))
  x = multiply(x, 0xC2B2AE35)
  return bxor(x, rshift(x, 16))
end

--- Returns a whole number from 0 to n-1 that depends only on seed, key and n.
function M.draw(seed, key, n)
  local high = mix(tobit(bxor(mix(tobit(seed)), mix(tobit(key + 0x9E3779B9)))))
  return math.floor(high % 2 ^ 32 / 2 ^ 32 * n)
end

-- ------------------------------------------------------------------ version 2

-- The constants of each round for the latest n, seed and epoch. `sum` has the K of each round;
-- `first` and `second` have the two keys of the round's hash.
local latest = { sum = {}, first = {}, second = {} }

-- Mixes a whole number of up to 53 bits into a key, in two halves.
local function absorb(key, x)
  return mix(tobit(mix(bxor(key, tobit(x % 2 ^ 32))) + tobit(math.floor(x / 2 ^ 32)) + 0x3C6EF372))
end

local function schedule(n, seed, epoch)
  local r = latest
  if r.n == n and r.seed == seed and r.epoch == epoch then return r end
  local a, b = absorb(absorb(0x243F6A88, seed), epoch), absorb(absorb(0x05A308D3, seed), epoch)
  -- 32 rounds give each of the two orders of n = 2 the probability 1/2 to within 2^-32. A larger n
  -- needs more rounds, so there are two more for each bit of n.
  local bits = select(2, math.frexp(n))
  r.n, r.seed, r.epoch, r.rounds = n, seed, epoch, 32 + 2 * bits
  for round = 1, r.rounds do
    local at = 4 * round
    local high, low = mix(tobit(a + mix(bxor(b, at)))), mix(tobit(b + mix(bxor(a, at + 1))))
    r.sum[round] = math.floor((high % 2 ^ 32 * 2 ^ 21 + rshift(low, 11)) / 2 ^ 53 * n)
    r.first[round] = mix(tobit(a + mix(bxor(b, at + 2))))
    r.second[round] = mix(tobit(b + mix(bxor(a, at + 3))))
  end
  return r
end

local function swap_or_not(x, n, seed, epoch)
  local r = schedule(n, seed, epoch)
  local sum, first, second = r.sum, r.first, r.second
  for round = 1, r.rounds do
    local other = sum[round] - x
    if other < 0 then other = other + n end
    local larger = math.max(x, other)
    local high = math.floor(larger / 2 ^ 32)
    local hash = mix(bxor(tobit(larger - high * 2 ^ 32), first[round]))
    if mix(tobit(hash + high + second[round])) < 0 then x = other end
  end
  return x
end

-- ------------------------------------------------------------------ version 1

-- Runs that were saved before version 2 resume with version 1: four rounds of a Feistel network
-- over the smallest even number of bits that covers n, repeated until the result is below n. This
-- is not quite random: with n = 5, for example, it gives the identity three times too often.
local function feistel(i, n, seed, epoch)
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

--- Returns the item (0 to n-1) at position i (from 0) of epoch `epoch`, in the given version of the
--- shuffled order (by default the newest).
function M.permute(i, n, seed, epoch, version)
  if n <= 1 then return 0 end
  return (version == 1 and feistel or swap_or_not)(i, n, seed, epoch)
end

return M
