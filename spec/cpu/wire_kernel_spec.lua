-- The reduction of several ranks' gradients: in host memory against the formula (core/dist/comm.h,
-- core/device/wire.h), and with ENGINE_TEST_DEVICE a card's kernels against the host's functions,
-- bit for bit.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local C, ffi, check = M_ffi.C, M_ffi.ffi, M_ffi.check

local CARD = os.getenv("ENGINE_TEST_DEVICE")
local WIRES = { "OWN", "F32", "BF16", "F16", "FP8" }
-- number of ranks, gradient elements of each
local SIZES = { { 1, 1 }, { 2, 127 }, { 3, 129 }, { 4, 128 }, { 5, 5003 }, { 8, 4096 } }

--- Numbers of every kind, the same at every call: ordinary, tiny, huge for f16, zeros of both
--- signs; with `bad`, inf and nan in some rows.
local function numbers(ranks, n, bad)
  local rows = {}
  for r = 1, ranks do
    rows[r] = {}
    for i = 1, n do
      local x = math.sin(i * 0.7 + r) * 10 ^ (((i + r) % 13) - 8)
      if i % 29 == 0 then x = i % 2 == 0 and 0 or -0.0 end
      if i % 31 == 0 then x = x * 1e-38 end
      rows[r][i] = x
    end
  end
  if bad then
    rows[1][n] = math.huge
    rows[ranks][1] = 0 / 0
    rows[math.max(1, ranks - 1)][math.ceil(n / 2)] = 3.4e38
  end
  return rows
end

local function reduce(rows, dtype, wire, before)
  local ranks, n = #rows, #rows[1]
  local x, out = engine.tensor(rows):to(dtype), before and engine.tensor(before):to(dtype)
    or engine.zeros({ n }, dtype)
  local bits = ffi.new("int[?]", ranks)
  check(C.eng_comm_dtype_reduce(out, bits, x, C["ENG_COMM_" .. wire], before ~= nil))
  local flags = {}
  for r = 1, ranks do flags[r] = bits[r - 1] end
  return out:to("f32"):totable(), flags, x:to("f32"):totable()
end

local function same(expected, got, what)
  for i, a in ipairs(expected) do
    local b = got[i]
    if not (a == b or (a ~= a and b ~= b)) then
      error(("%s: number %d is %.9g, expected %.9g"):format(what, i, b, a))
    end
  end
end

--- Sums one term per rank in the order of core/dist/comm.h: with p the largest power of two up
--- to the number of terms, adds the terms after the first p to the first terms; then adds
--- neighbours, pairs of neighbours, etc.
local function in_order(terms)
  local p = 1
  while 2 * p <= #terms do p = 2 * p end
  local cell = ffi.new("float[1]")
  local function add(a, b)
    cell[0] = a + b
    return cell[0]
  end
  local level = {}
  for k = 1, p do level[k] = terms[k + p] and add(terms[k], terms[k + p]) or terms[k] end
  while #level > 1 do
    local next_level = {}
    for k = 1, #level, 2 do next_level[#next_level + 1] = add(level[k], level[k + 1]) end
    level = next_level
  end
  return level[1]
end

local function by_formula(rows, wire)
  local ranks, n = #rows, #rows[1]
  local on_wire = {}
  for r = 1, ranks do
    on_wire[r] = ffi.new("float[?]", n, rows[r])
    check(C.eng_comm_dtype_round(on_wire[r], n, C["ENG_COMM_" .. wire]))
    for i = 0, n - 1 do on_wire[r][i] = on_wire[r][i] / ranks end
  end
  local sum = ffi.new("float[?]", n)
  for i = 0, n - 1 do
    local terms = {}
    for r = 1, ranks do terms[r] = on_wire[r][i] end
    sum[i] = in_order(terms)
  end
  check(C.eng_comm_dtype_round(sum, n, C["ENG_COMM_" .. wire]))
  local list = {}
  for i = 1, n do list[i] = sum[i - 1] end
  return list
end

describe("gradients of several ranks", function()
  before_each(function() engine.device("cpu") end)
  after_each(function() engine.device("cpu") end)

  it("are reduced as the formula states", function()
    for _, wire in ipairs { "F32", "BF16", "F16", "FP8" } do
      for _, size in ipairs(SIZES) do
        for _, bad in ipairs { false, true } do
          local sum, _, rows = reduce(numbers(size[1], size[2], bad), "f32", wire)
          same(by_formula(rows, wire), sum, ("%s, %d ranks"):format(wire, size[1]))
        end
      end
    end
  end)

  it("set flags for each rank: inf, nan and overflow in the comm dtype", function()
    local _, flags = reduce({ { 1, math.huge }, { 0 / 0, 1 }, { 1e6, 2 }, { 1e6, math.huge } },
      "f32", "F16")
    assert.same({ 2, 4, 8, 2 }, flags)
    _, flags = reduce({ { 1, math.huge }, { 0 / 0, -math.huge }, { 60000, 2 } }, "f16", "OWN")
    assert.same({ 2, 6, 0 }, flags)
    -- between the largest number of bf16 and that of f32
    _, flags = reduce({ { 1e6, 1 }, { 3.4028234e38, 1 }, { 1, math.huge } }, "f32", "BF16")
    assert.same({ 0, 8, 2 }, flags)
  end)

  it("stay finite in FP8 up to the largest number of f32, in messages and in their sum", function()
    local most, rounded = 0x1.fffffep127, 240 * 2 ^ 120
    local sum, flags = reduce({ { most, -most, 3.3e38, 1 }, { most, -most, 3.3e38, 1 } }, "f32",
      "FP8")
    assert.same({ { rounded, -rounded, rounded, 0 }, { 0, 0 } }, { sum, flags })
  end)

  it("are added to existing values, each rounded", function()
    local sum = reduce({ { 1, 2 ^ -9 }, { 3, 2 ^ -9 } }, "bf16", "OWN", { 256, 1 })
    assert.same({ 258, 1 }, sum)
  end)

  it("must be of one dtype and device", function()
    local none = ffi.new("int[1]")
    assert.are_not.equal(0, C.eng_comm_dtype_reduce(engine.zeros(3), none, engine.zeros(1, 4), 0,
      false))
    assert.matches("expected contiguous x [ranks x n] and out [n] of one dtype and device, got " ..
      "x f32 [1 x 4] in cpu memory and out f32 [3] in cpu memory", M_ffi.message(), 1, true)
    assert.are_not.equal(0, C.eng_comm_dtype_reduce(engine.zeros(3), none, engine.zeros(1, 3), 9,
      false))
    assert.are_not.equal(0, C.eng_comm_dtype_reduce(engine.zeros({ 3 }, "f64"), none,
      engine.zeros({ 1, 3 }, "f64"), 0, false))
    assert.matches("expected x in f32, f16 or bf16", M_ffi.message(), 1, true)
  end)

  if CARD then
    it("are the same on " .. CARD, function()
      for _, wire in ipairs(WIRES) do
        for _, dtype in ipairs { "f32", "f16", "bf16" } do
          for _, size in ipairs(SIZES) do
            local rows, before = numbers(size[1], size[2], size[1] % 2 == 1), numbers(1, size[2])[1]
            for _, add in ipairs { false, true } do
              engine.device("cpu")
              local sum, flags = reduce(rows, dtype, wire, add and before or nil)
              engine.device(CARD)
              local there, flags_there = reduce(rows, dtype, wire, add and before or nil)
              local what = ("%s of %s, %d ranks, %d numbers"):format(wire, dtype, size[1], size[2])
              same(sum, there, what)
              assert.same(flags, flags_there, what)
            end
          end
        end
      end
    end)
  end
end)
