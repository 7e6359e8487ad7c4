-- FP8 products of the card's tensor cores against Hopper's accumulator as the CPU computes it, and
-- the error of long sums. Run by spec/cuda/run.lua only. On cards without FP8 tensor cores both
-- sides are the formula.
local engine = require "engine"

local CARD = os.getenv("ENGINE_TEST_DEVICE")
if not CARD then return end

--- The product a b^T on a device, as a list of rows x rows numbers; law(rows, k) draws a and b.
-- `options`: block_a and block_b, and accumulator, promotion and dtype as in engine.fp8.matmul.
local function product(device, law, rows, k, options)
  engine.device(device)
  engine.seed(3)
  local list
  engine.scope(function()
    local a = engine.fp8.quantize(law(rows, k), { block = options.block_a })
    local b = engine.fp8.quantize(law(rows, k), { block = options.block_b })
    local y = engine.fp8.matmul(a, b, { transpose_b = true, accumulator = options.accumulator,
      promotion = options.promotion, dtype = options.dtype })
    list = y:view(rows * rows):totable()
  end)
  engine.device("cpu")
  return list
end

local function uniform(m, k) return engine.rand(m, k) end
local function normal(m, k) return engine.randn(m, k) end

describe("FP8 on the card", function()
  local CASES = {
    { "tensor", "tensor", 0 }, { "tensor", "tensor", 128 },
    { "row", "row", 0 }, { "row", "row", 128 },
    { { 1, 128 }, { 128, 128 }, 128 }, { { 1, 128 }, { 1, 128 }, 128 },
  }

  it("has the bits of Hopper's accumulator", function()
    for _, case in ipairs(CASES) do
      for _, k in ipairs { 128, 1040 } do
        local options = { block_a = case[1], block_b = case[2], promotion = case[3],
          accumulator = "hopper" }
        local want = product("cpu", uniform, 64, k, options)
        local got = product(CARD, uniform, 64, k, options)
        for i = 1, #want do
          assert(got[i] == want[i],
            ("k %d, promotion %d: expected %.9g, got %.9g"):format(k, case[3], want[i], got[i]))
        end
      end
    end
  end)

  --- Mean relative error of the accumulator's sums over K against exact sums of the same codes.
  -- With `unit`, the errors are divided by this number instead of the sums (for normal numbers,
  -- sqrt(K) is the typical size of a sum).
  local function lost(law, k, promotion, unit)
    local want = product("cpu", law, 20, k,
      { block_a = "row", block_b = "row", accumulator = "exact", dtype = "f64" })
    local got = product(CARD, law, 20, k,
      { block_a = "row", block_b = "row", accumulator = "hopper", promotion = promotion })
    local sum = 0
    for i = 1, #want do sum = sum + math.abs(got[i] - want[i]) / (unit or math.abs(want[i])) end
    return sum / #want
  end

  it("has the errors of examples/fp8_promotion.lua in long sums, less with promotion", function()
    for k, expected in pairs { [1024] = 0.0152, [4096] = 0.0746, [16384] = 0.251 } do
      local all, some = lost(uniform, k, 0), lost(uniform, k, 128)
      assert(math.abs(all / expected - 1) < 0.05,
        ("K %d, no promotion: expected %.4g, got %.4g"):format(k, expected, all))
      assert(math.abs(some / 0.000555 - 1) < 0.1,
        ("K %d, every 128: expected 0.000555, got %.4g"):format(k, some))
    end
    local all, some = lost(normal, 4096, 0, 64), lost(normal, 4096, 128, 64)
    assert(all > 4e-4 and all < 1.8e-3 and some > 5e-5 and some < 2e-4,
      ("normal: %.3g, %.3g"):format(all, some))
  end)
end)
