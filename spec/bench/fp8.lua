-- FP8 compared with the operations that it replaces, on one thread, as ratios of one run:
--   ./engine spec/bench/fp8.lua [seconds per element in ml_dtypes]
-- Casts and quantizers against copying, by bytes read and written; products against a bf16 product
-- of the same shape; the bit-exact accumulator against its scalar twin; a training step of the
-- bench GPT in FP8, MX and NVFP4 recipes against bf16. Measured alternately; the best of several
-- rounds counts.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local C, run = M_ffi.C, M_ffi.run
local fp8, mx = engine.fp8, engine.mx

local ML_DTYPES = tonumber(arg[1])
local ROUNDS = 7
C.eng_threads(1)

--- Best time in seconds of each function in a list, measured alternately.
local function best(list)
  local least = {}
  for round = 0, ROUNDS do   -- round 0 warms up
    for i, f in ipairs(list) do
      engine.begin_step()
      local began = C.eng_clock()
      f()
      local seconds = C.eng_clock() - began
      if round > 0 then least[i] = math.min(least[i] or math.huge, seconds) end
      engine.end_step()
    end
  end
  return least
end

local function row(name, value, beside)
  print(("  %-46s %10s   %s"):format(name, value, beside or ""))
end

-- ------------------------------------------------------------------ casts and quantizers

local n = 4096
local x = engine.randn { n, n }:keep()
local low = x:to("bf16"):keep()
local amax = engine.tensor({ 6 }, { keep = true })
local NVFP4 = { tonumber(mx.formats.e2m1), tonumber(mx.rules.nvfp4) }
-- a transformed copy reads x twice, because its amax is not known
local work = {
  { "copy f32", 8, function() run("contiguous", { x }) end },
  { "cast f32 to e4m3", 5, function() x:to("e4m3") end },
  { "cast f32 to e5m2", 5, function() x:to("e5m2") end },
  { "cast bf16 to e4m3", 3, function() low:to("e4m3") end },
  { "cast f32 to e4m3, stochastic", 5, function() x:to("e4m3", { stochastic = true }) end },
  { "quantize f32, 1x128", 5, function() fp8.quantize(x, { block = "1x128" }) end },
  { "quantize f32, 1x128, powers of two", 5,
    function() fp8.quantize(x, { block = "1x128", pow2 = true }) end },
  { "quantize bf16, 1x128", 3, function() fp8.quantize(low, { block = "1x128" }) end },
  { "quantize bf16, 1x128, both copies", 4,
    function() fp8.quantize(low, { block = "1x128", transposed = true }) end },
  { "quantize f32, 128x128, both copies", 6,
    function() fp8.quantize(x, { block = "128x128", transposed = true }) end },
  { "quantize f32, per tensor", 9, function() fp8.quantize(x) end },
  { "mxfp8, bf16", 3 + 1 / 32, function() mx.quantize(low, { rule = "rceil" }) end },
  { "mxfp8, bf16, both copies", 4 + 2 / 32,
    function() mx.quantize(low, { rule = "rceil", transposed = true }) end },
  { "mxfp4, bf16", 2.5 + 1 / 32,
    function() mx.quantize(low, { format = "e2m1", rule = "rceil" }) end },
  { "nvfp4, bf16, amax given", 2.5 + 1 / 16,
    function() mx.quantize(low, { rule = "nvfp4", amax = amax }) end },
  { "nvfp4, bf16", 4.5 + 1 / 16, function() mx.quantize(low, { rule = "nvfp4" }) end },
  { "nvfp4, bf16, both copies, amax given", 3 + 2 / 16,
    function() mx.quantize(low, { rule = "nvfp4", amax = amax, transposed = true }) end },
  { "nvfp4, bf16, both copies, amax given, Hadamard", 5 + 2 / 16, function()
    mx.quantize(low, { rule = "nvfp4", amax = amax, transposed = true, hadamard = 16 })
  end },
  { "nvfp4, bf16, transposed copy with Hadamard", 4.5 + 1 / 16, function()   -- flags 8 and 128
    run("mx_quantize", { low, false }, { NVFP4[1], 1, 16, NVFP4[2], 136, 0, 0, 0, 16 }, {}, 8)
  end },
}
local list = {}
for i, w in ipairs(work) do list[i] = w[3] end
local seconds = best(list)
print(("FP8 on one thread, %s; %d x %d elements"):format(M_ffi.string(C.eng_cpu_isa(nil)), n, n))
local copy = work[1][2] * n * n / seconds[1]
row("copy f32", ("%.1f GB/s"):format(copy / 1e9))
for i = 2, #work do
  local rate = work[i][2] * n * n / seconds[i]
  row(work[i][1], ("%.1f GB/s"):format(rate / 1e9), ("%3.0f %% of copy%s"):format(100 * rate / copy,
    i == 2 and ML_DTYPES and (", %.0fx ml_dtypes"):format(ML_DTYPES * n * n / seconds[i]) or ""))
end
x:free()
low:free()

-- ------------------------------------------------------------------ products

local m = 1024
local a, b = engine.randn { m, m }:keep(), engine.randn { m, m }:keep()
local a_low, b_low = a:to("bf16"):keep(), b:to("bf16"):keep()
local function quantized(y, block, pow2)
  return fp8.quantize(y, { block = block, pow2 = pow2 }):keep()
end
local qa, qb = quantized(a, "1x128"), quantized(b, "128x128")
local pa, pb = quantized(a, "1x128", true), quantized(b, "128x128", true)
local function product(l, r, accumulator)
  return function()
    fp8.matmul(l, r, { transpose_b = true, accumulator = accumulator, dtype = "bf16" })
  end
end
local names = { "bf16 product", "block product", "block product, powers of two",
  "hopper, promotion 128", "e4m3" }
seconds = best { function() a_low:linear(b_low) end, product(qa, qb), product(pa, pb),
  product(qa, qb, "hopper"), product(qa, qb, "e4m3") }
print(("products of %d x %d x %d"):format(m, m, m))
for i, name in ipairs(names) do
  row(name, ("%.1f GMAC/s"):format(m ^ 3 / seconds[i] / 1e9),
    i > 1 and ("%.2f of bf16's speed"):format(seconds[1] / seconds[i]) or "")
end
local few = 64
local sa, sb = quantized(a:slice(1, 1, few), "1x128"), quantized(b:slice(1, 1, few), "128x128")
ROUNDS = 2
M_ffi.check(C.eng_device_set("reference"))
local slow = best { product(sa, sb, "hopper") }[1] / (few * few * m)
M_ffi.check(C.eng_device_set("cpu"))
row("hopper, scalar loop", ("%.2f GMAC/s"):format(1e-9 / slow),
  ("the vectors are %.0fx as fast"):format(slow / (seconds[4] / m ^ 3)))

-- ------------------------------------------------------------------ a training step

a:free() b:free() a_low:free() b_low:free()
local LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 6, 384, 6, 256, 8   -- the GPT of bench.py
local function trainer_of(precision)
  engine.seed(1)
  local model = engine.nn.gpt { vocab = 256, context = CONTEXT, width = WIDTH, heads = HEADS,
    layers = LAYERS }
  local tokens = engine.randint(0, 256, BATCH, CONTEXT, { dtype = "i32", keep = true })
  return engine.trainer { model = model,
    data = { next = function() return { x = tokens, y = tokens, tokens = BATCH * CONTEXT } end },
    steps = 1, clip = 1.0,
    precision = precision, optimizer = engine.optim.adamw(model,
      { lr = 1e-4, decay = "matrices", precision = precision }) }
end
local recipes = { "bf16", "fp8_block", "fp8_current", "mxfp8", "mxfp4", "nvfp4" }
local least = {}
local trainers = {}
for i, precision in ipairs(recipes) do trainers[i] = trainer_of(precision) end
for round = 0, 4 do
  for i, trainer in ipairs(trainers) do
    local began = C.eng_clock()
    trainer:step()
    if round > 0 then least[i] = math.min(least[i] or math.huge, C.eng_clock() - began) end
  end
end
print(("a training step of a GPT of %d layers, width %d, context %d, batch %d"):format(LAYERS,
  WIDTH, CONTEXT, BATCH))
for i, precision in ipairs(recipes) do
  row(precision, ("%.3f s"):format(least[i]),
    i > 1 and ("%.2f of bf16's time"):format(least[i] / least[1]) or "")
end
