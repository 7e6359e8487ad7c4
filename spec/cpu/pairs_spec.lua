-- Products of bf16 with bf16, bit for bit against sums written out here: on a processor that
-- multiplies pairs, in pairs along K with the later element first; if pairs are disabled, in rising
-- order of K. Also: attention when a key becomes NaN. ENGINE_PAIRS is read once, so each order runs
-- in a separate process.
local helper = require "spec.helper"

-- Prints how many of the numbers differ from sums in rising order, how many from sums in pairs, and
-- the results for subnormals, infinity and NaN.
local SCRIPT = [[
local engine, M_ffi, ffi = require "engine", require "engine.base.ffi", require "ffi"
local box = ffi.new("float[1]")
-- Sums here stay below 2^53 units of the last place, so there is one rounding.
local function rounded(x) box[0] = x return box[0] end
local function product(a, b)
  return M_ffi.run("matmul", { a, b }, { 0, 0, M_ffi.dtype.f32 + 1 }):totable()
end
local rising, pairs_, n = 0, 0, 0
engine.seed(3)
for _, K in ipairs { 128, 129, 200, 500 } do
  local a = engine.rand(35, K):mul(1.5):add(-0.7):to("bf16"):keep()
  for _, turned in ipairs { false, true } do
    local b = engine.rand(turned and 50 or K,
      turned and K or 50):mul(1.5):add(-0.5):to("bf16"):keep()
    if turned then b = b:transpose(1, 2) end
    local av, bv, c = a:to("f32"):totable(), b:to("f32"):totable(), product(a, b)
    local span = math.min(K, math.ceil(math.ceil(K / math.ceil(K / 384)) / 16) * 16)
    for i = 1, 35, 17 do for j = 1, 50, 7 do
      local one, two
      for k0 = 1, K, span do
        local s, t = 0, 0
        for k = k0, math.min(k0 + span - 1, K), 2 do
          local low, high = av[i][k] * bv[k][j], k < K and av[i][k + 1] * bv[k + 1][j] or 0
          s, t = rounded(rounded(s + low) + high), rounded(rounded(t + high) + low)
        end
        one, two = one and rounded(one + s) or s, two and rounded(two + t) or t
      end
      n = n + 1
      if one ~= c[i][j] then rising = rising + 1 end
      if two ~= c[i][j] then pairs_ = pairs_ + 1 end
    end end
  end
end
local x = {}
for i = 1, 4 do x[i] = {} for k = 1, 128 do x[i][k] = 1 end end
x[1][5], x[2][6], x[3][127] = 1 / 0, 0 / 0, 2 ^ -130
for k = 1, 128 do if k ~= 127 then x[3][k] = 0 end end
local ones = engine.ones(128, 3, { dtype = "bf16" })
local odd = product(engine.tensor(x):to("bf16"), ones)
print(n, rising, pairs_, odd[1][2], odd[2][2] ~= odd[2][2], odd[3][1] == 0, odd[4][3])
]]

-- From the second on, one number of each key and value of the second head becomes NaN in turn.
-- Prints the number of elements of y and dq whose queries do not see this key, how many of them
-- changed, and how many of the others are NaN in both.
local ATTENTION = [[
local engine, M_ffi = require "engine", require "engine.base.ffi"
local T, D = 13, 24
engine.seed(7)
local function random() return engine.randn(1, T, 2, D) end
local q, k, v, dy = random():to("bf16"):keep(), random(), random(), random():to("bf16"):keep()
local function results(k, v)
  local y, lse = M_ffi.run("attention", { q, k, v }, { 1, 0 }, { 0 }, 3)
  local dq = M_ffi.run("attention_grad", { q, k, v, y, lse, dy }, { 1, 0 }, { 0 }, 3)
  return y:to("f32"):totable(), dq:to("f32"):totable()
end
local function changed(key)
  local hole = engine.zeros(1, T, 2, D):totable()
  hole[1][key][2][5] = 0 / 0
  return k:add(engine.tensor(hole)):to("bf16"), v:add(engine.tensor(hole)):to("bf16")
end
local y, dq = results(k:to("bf16"), v:to("bf16"))
local different, n, nans = 0, 0, 0
for key = 2, T do
  local y2, dq2 = results(changed(key))
  for t = 1, T do for h = 1, 2 do for d = 1, D do
    if t < key or h == 1 then
      n = n + 1
      if y[1][t][h][d] ~= y2[1][t][h][d] or dq[1][t][h][d] ~= dq2[1][t][h][d] then
        different = different + 1
      end
    elseif y2[1][t][h][d] ~= y2[1][t][h][d] and dq2[1][t][h][d] ~= dq2[1][t][h][d] then
      nans = nans + 1
    end
  end end end
end
print(n, different, nans)
]]

-- A setting of oneDNN. Without it, a processor with AMX would run most of these products with AMX.
local NO_AMX = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 "

local function output(pairs_, script)
  local folder = helper.folder()
  local file = assert(io.open(folder .. "/pairs.lua", "w"))
  file:write(script)
  file:close()
  local result = helper.shell((NO_AMX .. "ENGINE_PAIRS=%s %s %s/pairs.lua 2>&1"):format(pairs_,
    helper.quote(helper.engine), folder))
  assert.equal(0, result.code, result.out)
  return result
end

local function run(pairs_)
  local result = output(pairs_, SCRIPT)
  local n, rising, by_pairs, infinite, nan, flushed,
    sum = result.out:match("(%S+)\t(%S+)\t(%S+)\t(%S+)\t(%S+)\t(%S+)\t(%S+)")
  assert(n, result.out)
  assert.same({ "inf", "true", "128" }, { infinite, nan, sum })
  return tonumber(n), tonumber(rising), tonumber(by_pairs), flushed
end

local cpu = io.open("/proc/cpuinfo")
local text = cpu and cpu:read("*a") or ""
if cpu then cpu:close() end

if text:find("avx512_bf16", 1, true) and text:find("avx512vl", 1, true)
  and not os.getenv("ENGINE_ISA") and not os.getenv("ENGINE_TEST_DEVICE") then
  describe("products of bf16", function()
    it("add up pairs, the later element first, and flush subnormals to zero", function()
      local n, rising, by_pairs, flushed = run("on")
      assert.equal(0, by_pairs)
      assert.is_true(rising > 0 and rising < n)
      assert.equal("true", flushed)
    end)

    it("add up in rising order with ENGINE_PAIRS=off", function()
      local n, rising, by_pairs, flushed = run("off")
      assert.equal(0, rising)
      assert.is_true(by_pairs > 0 and by_pairs < n)
      assert.equal("false", flushed)
    end)

    it("in attention leave a query unchanged, bit for bit, when a later key becomes NaN", function()
      for _, pairs_ in ipairs { "on", "off" } do
        local result = output(pairs_, ATTENTION)
        local seen = 12 * 13 / 2 * 24
        assert.equal(("%d\t0\t%d"):format(12 * 13 * 2 * 24 - seen, seen),
          (result.out:gsub("%s+$", "")))
      end
    end)
  end)
end
