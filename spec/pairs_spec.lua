-- Products of bf16 with bf16, bit for bit beside their sums written out: in pairs, the later step first, where the processor multiplies pairs;
-- in rising order where it is told not to. ENGINE_PAIRS is read once, so each way has a process of its own.
local helper = require "spec.helper"

-- Prints how many of the numbers differ from sums in rising order, how many from pairs, and what subnormals, infinity and NaN give.
local SCRIPT = [[
local engine, M_ffi, ffi = require "engine", require "engine.ffi", require "ffi"
local box = ffi.new("float[1]")
local function rounded(x) box[0] = x return box[0] end     -- sums here stay below 2^53 units of the last place, so one rounding is made
local function product(a, b) return M_ffi.run("matmul", { a, b }, { 0, 0, M_ffi.dtype.f32 + 1 }):totable() end
local rising, pairs_, n = 0, 0, 0
engine.seed(3)
for _, K in ipairs { 128, 129, 200, 500 } do
  local a = engine.rand(35, K):mul(1.5):add(-0.7):to("bf16"):keep()
  for _, turned in ipairs { false, true } do
    local b = engine.rand(turned and 50 or K, turned and K or 50):mul(1.5):add(-0.5):to("bf16"):keep()
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

local function run(pairs_)
  local folder = helper.folder()
  local file = assert(io.open(folder .. "/pairs.lua", "w"))
  file:write(SCRIPT)
  file:close()
  local result = helper.shell(("ENGINE_PAIRS=%s %s %s/pairs.lua 2>&1"):format(pairs_, helper.engine, folder))
  assert.equal(0, result.code, result.out)
  local n, rising, by_pairs, infinite, nan, flushed, sum = result.out:match("(%S+)\t(%S+)\t(%S+)\t(%S+)\t(%S+)\t(%S+)\t(%S+)")
  assert(n, result.out)
  assert.same({ "inf", "true", "128" }, { infinite, nan, sum })
  return tonumber(n), tonumber(rising), tonumber(by_pairs), flushed
end

local cpu = io.open("/proc/cpuinfo")
local text = cpu and cpu:read("*a") or ""
if cpu then cpu:close() end

if text:find("avx512_bf16", 1, true) and text:find("avx512vl", 1, true) and not os.getenv("ENGINE_ISA") and not os.getenv("ENGINE_TEST_DEVICE") then
  describe("products of bf16", function()
    it("add up pairs, the later step first, and take subnormals as zero", function()
      local n, rising, by_pairs, flushed = run("on")
      assert.equal(0, by_pairs)
      assert.is_true(rising > 0 and rising < n)
      assert.equal("true", flushed)
    end)

    it("add up in rising order where they are told to", function()
      local n, rising, by_pairs, flushed = run("off")
      assert.equal(0, rising)
      assert.is_true(by_pairs > 0 and by_pairs < n)
      assert.equal("false", flushed)
    end)
  end)
end
