-- Means, spreads and confidence intervals of a few repetitions.
local statistics = require "engine.base.statistics"

-- The share of Student's t distribution between -q and q, by Simpson's rule on the density with
-- t = tan(angle). The same integral over the whole line normalizes it.
local function share(q, degrees)
  local function integral(to)
    local n, sum = 2000, 0
    for i = 0, n do
      local angle = to * i / n
      local weight = (i == 0 or i == n) and 1 or i % 2 == 1 and 4 or 2
      local t = math.tan(angle)
      sum = sum + weight * (1 + t * t / degrees) ^ (-(degrees + 1) / 2) * (1 + t * t)
    end
    return sum * to / n / 3
  end
  return integral(math.atan(q)) / integral(math.pi / 2 - 1e-6)
end

describe("statistics", function()
  it("give mean and standard deviation, and as many digits as the deviation justifies", function()
    local mean, spread = statistics.mean_and_spread { 2, 4, 4, 4, 5, 5, 7, 9 }
    assert.equal(5, mean)
    assert.near(math.sqrt(32 / 7), spread, 1e-12)
    assert.same({ 3, 0 }, { statistics.mean_and_spread { 3 } })
    assert.equal("2.3457 +- 0.0012", statistics.text(2.345678, 0.00123, 3))
    assert.equal("346 +- 123", statistics.text(345.678, 123.4, 3))
    assert.equal("2.346", statistics.text(2.345678, 0, 1))
    assert.equal("3 +- 0", statistics.text(3, 0, 2))
    assert.equal("nan", statistics.text(0 / 0, 0 / 0, 2):gsub("-", ""))
  end)

  it("use the 95 % quantiles of Student's t, in the table and beyond its end", function()
    for degrees = 1, 40 do
      assert.near(0.95, share(statistics.t95(degrees), degrees), 2e-5, degrees)
    end
    assert.near(1.98397, statistics.t95(100), 1e-5)
    assert.near(1.95996, statistics.t95(1e6), 1e-5)
  end)

  it("pair numbers, and leave out pairs with a missing or non-finite number", function()
    local d = statistics.paired({ 1, 2, nil, 4, 5 }, { 2, 4, 9, 0 / 0, 8 }, 5)
    assert.equal(3, d.n)
    assert.equal(2, d.mean)
    assert.near(2 - 4.3027 / math.sqrt(3), d.low, 1e-12)
    assert.near(2 + 4.3027 / math.sqrt(3), d.high, 1e-12)
    local one = statistics.paired({ 1 }, { 3 }, 1)
    assert.equal(2, one.mean)
    assert.is_nil(one.low or nil)
    assert.is_nil(statistics.paired({}, { 3 }, 1))
  end)
end)
