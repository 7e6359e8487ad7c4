-- The shuffled order against pure chance: chi-square tests of whole orders, of places and of
-- neighbours. A statistic may be up to five standard deviations from its mean; the seeds are fixed.
local order = require "engine.data.order"

--- How many standard deviations the chi-square statistic of `cells` counts, each with expectation
--- `mean`, lies above its mean (negative: below).
local function deviation(counts, cells, mean)
  local sum, seen = 0, 0
  for _, count in pairs(counts) do
    sum, seen = sum + (count - mean) ^ 2 / mean, seen + 1
  end
  sum = sum + (cells - seen) * mean
  return (sum - (cells - 1)) / math.sqrt(cells * (2 + 1 / mean))
end

local function count(counts, key) counts[key] = (counts[key] or 0) + 1 end

--- The order of an epoch as a list.
local function epoch_of(n, seed, epoch, version)
  local list = {}
  for i = 0, n - 1 do list[i + 1] = order.permute(i, n, seed, epoch, version) end
  return list
end

local function orders(n, each, version)
  local factorial, counts = 1, {}
  for k = 2, n do factorial = factorial * k end
  for k = 1, each * factorial do
    count(counts, table.concat(epoch_of(n, k % 7, math.floor(k / 7), version), " "))
  end
  return counts, factorial
end

--- The deviations for the places of examples and for the distance from an example to its successor,
--- and the counts of these distances.
local function places_and_steps(n, epochs, version)
  local places, steps = {}, {}
  for epoch = 0, epochs - 1 do
    local list = epoch_of(n, 41, epoch, version)
    for i = 1, n do
      count(places, (i - 1) * n + list[i])
      if i < n then count(steps, (list[i + 1] - list[i]) % n) end
    end
  end
  return deviation(places, n * n, epochs / n), deviation(steps, n - 1, epochs), steps
end

local function near_chance(value, what)
  assert(math.abs(value) < 5, ("%s: %.1f standard deviations from chance"):format(what, value))
end

describe("the shuffled order", function()
  it("takes all n! orders equally often", function()
    for n = 2, 5 do
      local counts, factorial = orders(n, 150)
      near_chance(deviation(counts, factorial, 150), n .. " examples")
    end
  end)

  it("brings every example to every place, and after every other, equally often", function()
    for n, epochs in pairs { [2] = 2000, [3] = 2000, [5] = 2000, [16] = 1000, [17] = 1000,
      [100] = 500, [1000] = 150 } do
      local places, steps, counts = places_and_steps(n, epochs)
      near_chance(places, "places of " .. n)
      if n > 2 then
        near_chance(steps, "successors among " .. n)
        near_chance((counts[1] - epochs) / math.sqrt(epochs), "in order, of " .. n)
      end
    end
  end)

  it("is close to chance for a million examples, too", function()
    local n, places, steps, near = 1e6, {}, {}, 0
    local before = order.permute(0, n, 5, 0)
    for i = 1, 50000 do
      local now = order.permute(i, n, 5, 0)
      count(places, math.floor((i - 1) / 500) * 100 + math.floor(now / 10000))
      count(steps, math.floor((now - before) % n / 1000))
      if math.abs(now - before) <= 10 then near = near + 1 end
      before = now
    end
    near_chance(deviation(places, 10000, 5), "places")
    near_chance(deviation(steps, 1000, 50), "successors")
    assert.is_true(near < 8)       -- 1 is expected
  end)

  it("differs between similar seeds and epochs", function()
    for _, other in ipairs { { 8, 0 }, { 7, 1 }, { 0, 7 }, { 7 + 2 ^ 32, 0 }, { 7 + 2 ^ 40, 0 } } do
      local same = 0
      for i = 0, 999 do
        if order.permute(i, 1000, 7, 0) == order.permute(i, 1000, unpack(other)) then
          same = same + 1
        end
      end
      assert.is_true(same < 8)     -- 1 is expected
    end
  end)

  it("visits every example once, for 1 to 70 and for 4,097 examples", function()
    for n = 1, 71 do
      n = n == 71 and 4097 or n
      local seen = {}
      for _, k in ipairs(epoch_of(n, 99, 3)) do
        assert.is_true(k >= 0 and k < n and k % 1 == 0)
        assert.is_nil(seen[k])
        seen[k] = true
      end
    end
    local far = order.permute(2 ^ 49, 2 ^ 50, 1, 0)
    assert.is_true(far >= 0 and far < 2 ^ 50 and far % 1 == 0)
  end)

  -- Version 1 fails the tests above.
  it("in version 1 equals the order of earlier engines, so that their runs can resume", function()
    assert.same({ 3, 0, 4, 1, 2 }, epoch_of(5, 1234, 0, 1))
    assert.same({ 2, 3, 9, 5, 0, 7, 4, 8, 1, 6 }, epoch_of(10, 7, 3, 1))
    local counts, factorial = orders(5, 150, 1)
    assert.is_true(deviation(counts, factorial, 150) > 5)
    assert.is_true(counts["0 1 2 3 4"] > 3 * 150)
  end)
end)
