-- The generator: Philox 4x32-10 as published, one stream for any number of threads, replayed from
-- its state; uniform and normal numbers, and dropout's mask.
local engine = require "engine.base.ffi"
local values = require "spec.cpu.kernels.values"
local ffi, C = engine.ffi, engine.C

local function state()
  local seed, counter = ffi.new("uint64_t[1]"), ffi.new("uint64_t[1]")
  C.eng_rng_get(seed, counter)
  return seed[0], counter[0]
end

local function filled(dtype, shape, fill, a, b)
  local x = values.tensor_of(dtype, shape)
  engine.check(C["eng_" .. fill](x, a, b))
  return x
end

describe("random numbers", function()
  before_each(function()
    engine.check(C.eng_step_begin())
    C.eng_seed(42)
  end)
  after_each(function() engine.check(C.eng_step_end()) end)

  it("match the known answers of Philox 4x32-10's authors", function()
    -- random123's kat_vectors: counter 0, key 0 gives 6627e8d5 e169c58d bc57ac4c 9b00dbd8
    C.eng_seed(0)
    local got = values.values_of(filled("f32", { 4 }, "uniform", 0, 1))
    for i, word in ipairs { 0x6627e8, 0xe169c5, 0xbc57ac, 0x9b00db } do
      assert.are.equal(word * 2 ^ -24, got[i - 1])
    end
  end)

  it("use one block for four numbers, and continue with the next", function()
    filled("f32", { 10 }, "uniform", 0, 1)
    local seed, counter = state()
    assert.are.equal(42, tonumber(seed))
    assert.are.equal(3, tonumber(counter))
  end)

  it("repeat from the same state", function()
    filled("f32", { 100 }, "normal", 0, 1)
    local seed, counter = state()
    local first = values.values_of(filled("f32", { 1001 }, "normal", 0, 1))
    C.eng_rng_set(seed, counter)
    local second = values.values_of(filled("f32", { 1001 }, "normal", 0, 1))
    local third = values.values_of(filled("f32", { 1001 }, "normal", 0, 1))
    local repeats = 0
    for i = 0, 1000 do
      assert.are.equal(first[i], second[i])
      if third[i] == first[i] then repeats = repeats + 1 end
    end
    assert.is_true(repeats < 5)
  end)

  it("do not depend on the number of threads or on strides", function()
    local threads = C.eng_threads(0)
    C.eng_threads(1)
    local one = values.values_of(filled("f32", { 300, 170 }, "normal", 0, 1))
    C.eng_threads(4)
    C.eng_seed(42)
    local four = values.values_of(filled("f32", { 300, 170 }, "normal", 0, 1))
    C.eng_threads(threads)
    C.eng_seed(42)
    local turned = engine.run("permute", { values.tensor_of("f32", { 170, 300 }) }, { 1, 0 })
    engine.check(C.eng_normal(turned, 0, 1))
    local view = values.values_of(turned)
    for i = 0, 300 * 170 - 1 do
      assert.are.equal(one[i], four[i])
      assert.are.equal(one[i], view[i])
    end
  end)

  it("have the moments of their distributions", function()
    local n = 200000
    local function moments(x)
      local v = values.values_of(x)
      local mean, square, fourth = 0, 0, 0
      for i = 0, n - 1 do mean = mean + v[i] end
      mean = mean / n
      for i = 0, n - 1 do
        local d = (v[i] - mean) ^ 2
        square, fourth = square + d, fourth + d * d
      end
      return mean, square / n, fourth / n / (square / n) ^ 2
    end
    local mean, variance, kurtosis = moments(filled("f32", { n }, "normal", 3, 2))
    assert.is_near(3, mean, 0.02)
    assert.is_near(4, variance, 0.06)
    assert.is_near(3, kurtosis, 0.06)
    mean, variance, kurtosis = moments(filled("f32", { n }, "uniform", -1, 1))
    assert.is_near(0, mean, 0.006)
    assert.is_near(1 / 3, variance, 0.004)
    assert.is_near(1.8, kurtosis, 0.02)
  end)

  it("stay below the upper bound in every format", function()
    for _, dtype in ipairs { "f32", "f16", "bf16", "f64" } do
      for _, bounds in ipairs { { 0, 1 }, { -1, 1 }, { -2, -1 }, { 1000, 1001 }, { -1, 0 } } do
        local v, n = values.values_of(filled(dtype, { 20000 }, "uniform", bounds[1], bounds[2]))
        for i = 0, n - 1 do assert.is_true(v[i] >= bounds[1] and v[i] < bounds[2]) end
      end
    end
    local v, n = values.values_of(filled("i32", { 1000 }, "uniform", -3, 3))
    for i = 0, n - 1 do assert.is_true(v[i] >= -3 and v[i] <= 2) end
  end)

  it("fill a range wider than the largest number", function()
    local most = 1.7e308
    local v, n = values.values_of(filled("f64", { 1000 }, "uniform", -most, most))
    local sum = 0
    for i = 0, n - 1 do
      assert.is_true(v[i] >= -most and v[i] < most)
      sum = sum + v[i] / most / n
    end
    assert.is_near(0, sum, 0.1)
  end)

  it("refuse invalid bounds", function()
    local x = values.tensor_of("f32", { 3 })
    assert.are_not.equal(0, tonumber(C.eng_uniform(x, 1, 0)))
    assert.are_not.equal(0, tonumber(C.eng_uniform(x, 0, 1 / 0)))
    assert.are_not.equal(0, tonumber(C.eng_normal(x, 0, -1)))
    assert.are_not.equal(0, tonumber(C.eng_normal(x, 0 / 0, 1)))
  end)

  it("make dropout keep the right share, scaled, and drop NaN like any other value", function()
    local x = values.tensor_of("f32", { 100001 })
    engine.check(C.eng_fill(x, 3))
    local v, n = values.values_of(engine.run("dropout", { x }, nil, { 0.25 }))
    local kept = 0
    for i = 0, n - 1 do
      assert.is_true(v[i] == 0 or v[i] == 4)
      if v[i] ~= 0 then kept = kept + 1 end
    end
    assert.is_near(0.75, kept / n, 0.01)
    engine.check(C.eng_fill(x, 0 / 0))
    v = values.values_of(engine.run("dropout", { x }, nil, { 1 }))
    for i = 0, n - 1 do assert.are.equal(0, v[i]) end
  end)
end)
