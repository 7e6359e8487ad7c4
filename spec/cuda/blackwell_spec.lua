-- Block-scaled products of MXFP8 and NVFP4 on a card from sm_100 on: cuBLASLt computes them, and
-- the results are those of the accumulator `blackwell` on the CPU. Run by spec/cuda/run.lua; needs
-- such a card, or the emulated one with ENGINE_EMULATED_CARD=sm=100, whose cuBLASLt has that
-- accumulator.
local engine = require "engine"
local helper = require "spec.helper"
local machine = require "engine.base.machine"
local M_ffi = require "engine.base.ffi"

local CARD = os.getenv("ENGINE_TEST_DEVICE")
if not CARD then return end
engine.device(CARD)
local CAPABILITY = tonumber(machine.device_text():match("sm_(%d+)"))
engine.device("cpu")
if CAPABILITY < 100 then return end

local C, mx = M_ffi.C, engine.mx
local FP32, BLACKWELL = C.ENG_ACCUMULATE_FP32, C.ENG_ACCUMULATE_BLACKWELL
local EMULATED = (os.getenv("ENGINE_CUDA_PLUGIN") or ""):find("emulated_card", 1, true)

-- Runs f on a device, in a step, and returns its tensors as lists.
local function on(device, f)
  engine.device(device)
  local lists = {}
  helper.in_step(function()
    engine.seed(7)
    for i, x in ipairs { f() } do lists[i] = x:to("f32"):view(x.count):totable() end
  end)()
  engine.device("cpu")
  return lists
end

-- A real card may split sums over K.
local function same(want, got, what)
  assert.equal(#want, #got)
  for i, list in ipairs(want) do
    local size, off = 0, 0
    for k, x in ipairs(list) do
      local y = got[i][k]
      if x == x or y == y then
        size, off = size + x * x, off + (EMULATED and (x == y and 0 or 1) or (x - y) ^ 2)
      end
    end
    assert(off <= (EMULATED and 0 or 1e-10 * size), ("%s: tensor %d differs by %g of %g"):format(
      what, i, off, size))
  end
end

describe("mx.matmul on a Blackwell card", function()
  local function product(a, b, rows, columns, K, change)
    return function()
      local function random(n)
        local numbers = engine.randn(n, K):view(n * K):totable()
        if not change then return engine.tensor(numbers):view(n, K) end
        for i, x in ipairs(numbers) do numbers[i] = change(x, math.floor((i - 1) / 16)) end
        return engine.tensor(numbers):view(n, K)
      end
      return mx.matmul(mx.quantize(random(rows), a), mx.quantize(random(columns), b))
    end
  end
  local MXFP8 = { format = "e4m3", rule = "rceil" }
  local E5M2 = { format = "e5m2", rule = "floor" }
  local NVFP4, FOUR_OVER_SIX = { rule = "nvfp4" }, { rule = "four_over_six" }
  local SQUARE = { rule = "nvfp4", block = "16x16" }

  it("equals the CPU's, in tiles of scales of any number", function()
    for _, size in ipairs { { 16, 16, 64 }, { 128, 128, 128 }, { 144, 272, 192 },
      { 400, 48, 576 } } do
      for _, pair in ipairs { { MXFP8, MXFP8 }, { MXFP8, E5M2 }, { E5M2, MXFP8 },
        { NVFP4, NVFP4 }, { FOUR_OVER_SIX, NVFP4 }, { NVFP4, SQUARE } } do
        local f = product(pair[1], pair[2], unpack(size))
        same(on("cpu", f), on(CARD, f), table.concat(size, " x ") .. (pair[1].rule))
      end
    end
  end)

  it("equals the CPU's for blocks of zeros, tiny and huge numbers, Inf and NaN", function()
    local function rare(x, block) return block % 3 == 0 and 0 or x * 2 ^ (block * 37 % 120 - 60) end
    local function broken(x, block)
      return block == 41 and 1 / 0 or block == 97 and 0 / 0 or x
    end
    for _, change in ipairs { rare, broken } do
      for _, pair in ipairs { { MXFP8, MXFP8 }, { NVFP4, NVFP4 } } do
        local f = product(pair[1], pair[2], 160, 64, 320, change)
        same(on("cpu", f), on(CARD, f), pair[1].rule)
      end
    end
  end)

  it("takes the formula for MXFP4, e5m2 twice and odd sizes", function()
    local E2M1 = { format = "e2m1", rule = "rceil" }
    for _, case in ipairs { { E2M1, E2M1, 32, 32, 128 }, { E5M2, E5M2, 32, 32, 64 },
      { MXFP8, MXFP8, 7, 33, 64 }, { NVFP4, NVFP4, 33, 16, 64 } } do
      local f = product(unpack(case))
      same(on("cpu", f), on(CARD, f), case[1].rule)
    end
  end)
end)

describe("a linear layer on a Blackwell card", function()
  -- y, dx, dW and the accumulator of a layer [columns -> outputs] of a recipe on a device.
  local function layer_on(device, recipe, rows, columns, outputs)
    local accumulator
    local lists = on(device, function()
      local layer = engine.nn.linear(columns, outputs)
      local opt = engine.optim.sgd(layer, { lr = 0, precision = recipe })
      local x = engine.randn(rows, columns):requires_grad(true)
      local dy = engine.randn(rows, outputs)
      local y
      for _ = 1, 2 do                                        -- the second pass adds onto dW
        y = engine.autocast(recipe, function() return layer(x) end)
        ;(y:to("f32") * dy):sum():backward()
      end
      accumulator = C.eng_fp8_accumulator(opt.fp8.list[1].id)
      return y, x.grad, layer.weight.grad
    end)
    return lists, accumulator
  end
  local function with(name, accumulator)
    local fp8 = { sample = 0 }
    for _, product in ipairs { "forward", "dgrad", "wgrad" } do
      local own = engine.precision.resolve(name).fp8[product] or {}
      fp8[product] = { accumulator = accumulator, hadamard = own.hadamard, signs = own.signs,
        high = own.high }
    end
    return { name = "mine", base = name, fp8 = fp8 }
  end

  for _, name in ipairs { "mxfp8", "nvfp4", "nvfp4_four_over_six" } do
    it("under " .. name .. " equals the accumulator blackwell on the CPU", function()
      local want, on_cpu = layer_on("cpu", with(name, "blackwell"), 128, 192, 64)
      local got, on_card = layer_on(CARD, name, 128, 192, 64)
      assert.equal(BLACKWELL, on_cpu)
      assert.equal(BLACKWELL, on_card)
      same(want, got, name)
    end)
  end

  it("multiplies in bf16 on request, for MXFP4, and where a size does not fit", function()
    for _, case in ipairs { { with("nvfp4", "fp32"), 128, 128, 128 }, { "mxfp4", 128, 128, 128 },
      { "mxfp4_tetrajet", 128, 128, 128 }, { "nvfp4", 96, 128, 128 }, { "nvfp4", 128, 160, 64 },
      { "mxfp8", 64, 64, 40 } } do
      local _, accumulator = layer_on(CARD, unpack(case))
      assert.equal(FP32, accumulator)
    end
    for _, case in ipairs { { "mxfp8", 96, 32, 160 }, { "nvfp4", 192, 64, 320 } } do
      local _, accumulator = layer_on(CARD, unpack(case))
      assert.equal(BLACKWELL, accumulator)
    end
  end)

  it("changes between codes and bf16 from call to call", function()
    local lists = {}
    for _, device in ipairs { "cpu", CARD } do
      lists[device] = on(device, function()
        local recipe = with("nvfp4", "blackwell")
        local layer = engine.nn.linear(64, 64)
        engine.optim.sgd(layer, { lr = 0, precision = recipe })
        local results = {}
        for _, rows in ipairs { 64, 40, 128 } do
          local x = engine.randn(rows, 64):requires_grad(true)
          local y = engine.autocast(recipe, function() return layer(x) end)
          y:to("f32"):square():sum():backward()
          if rows ~= 40 then results[#results + 1] = y end
        end
        return unpack(results)
      end)
    end
    same(lists.cpu, lists[CARD], "y")
  end)

  it("is part of the run's record", function()
    local folder = helper.folder()
    engine.device(CARD)
    local model = engine.nn.gpt { vocab = 256, context = 32, width = 64, heads = 2, layers = 1 }
    local t = engine.trainer { model = model, log = "quiet", steps = 2, run = folder .. "/run",
      data = engine.data.text { path = "README.md", batch = 2, context = 32 },
      optimizer = engine.optim.adamw(model, { lr = 1e-3, precision = "nvfp4" }) }
    t:run()
    assert.matches("Blackwell's sums", tostring(t.optimizer.fp8), 1, true)
    engine.device("cpu")
    local h = engine.history.open(folder .. "/run")
    local found
    for _, event in ipairs(h:events()) do
      if event.kind == "products" then found = event.text end
    end
    assert.equal("4 of 4 layers multiply codes and sum the products as Blackwell's tensor cores " ..
      "do; the others multiply bf16 numbers",
      found)
    helper.remove(folder)
  end)
end)
