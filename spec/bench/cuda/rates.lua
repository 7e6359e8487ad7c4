-- rates.lua [DEVICE [SIZE]]: rates of the kernels on random data: products in TFLOP/s, to compare
-- with the datasheet's peak; passes over memory in GB/s and as a share of a plain copy in the same
-- run. SIZE scales the problems; 1 (the default) is for a card, a fraction for a trial on a CPU.
local engine = require "engine"
local machine = require "engine.base.machine"
local raw = require "engine.base.ffi"

local device, size = arg[1] or "cuda", tonumber(arg[2]) or 1
engine.device(device)
engine.seed(1)
print(machine.device_text())

local REPEAT = tonumber(os.getenv("REPEAT")) or device == "cuda" and 20 or 2

--- The mean time of f() in seconds, including the wait for the device: the median of five rounds.
local function seconds_of(f)
  local function once()
    f()
    engine.end_step()
  end
  for _ = 1, 3 do once() end
  engine.synchronize()
  local list = {}
  for i = 1, 5 do
    local from = machine.clock()
    for _ = 1, REPEAT do once() end
    engine.synchronize()
    list[i] = (machine.clock() - from) / REPEAT
  end
  table.sort(list)
  return list[3]
end

local function scaled(n) return math.max(64, math.floor(n * size / 64 + 0.5) * 64) end

-- ------------------------------------------------------------------ a plain copy

local row = scaled(2 ^ 16)
local elements = row * scaled(2 ^ 12)
local function zeros() return engine.zeros(elements / row, row, { dtype = "bf16", keep = true }) end
local a, b = zeros(), zeros()
a:copy(engine.randn(row))
local copy = 4 * elements / seconds_of(function() b:copy(a) end)
print(("copy of %d MiB: %.0f GB/s read and written"):format(2 * elements / 2 ^ 20, copy / 1e9))

local function memory_line(name, bytes, f)
  local rate = bytes / seconds_of(f)
  print(("%-44s %8.0f GB/s  %5.1f %% of the copy"):format(name, rate / 1e9, 100 * rate / copy))
end

--- The mean of ten runs after a second of rest: the card's speed before its power limit lowers its
-- clocks, as in many published figures.
local function burst_of(f)
  engine.synchronize()
  if device == "cuda" and size == 1 then os.execute("sleep 1") end
  for _ = 1, 3 do f() engine.end_step() end
  engine.synchronize()
  local from = machine.clock()
  for _ = 1, 10 do f() engine.end_step() end
  engine.synchronize()
  return (machine.clock() - from) / 10
end

local function product_line(name, flops, f)
  local seconds, burst = seconds_of(f), burst_of(f)
  print(("%-44s %8.1f TFLOP/s  %8.3f ms   ten runs after a rest %8.1f TFLOP/s")
    :format(name, flops / seconds / 1e12, 1e3 * seconds, flops / burst / 1e12))
end

-- ------------------------------------------------------------------ products

for _, dtype in ipairs { "bf16", "f16", "f32" } do
  local n = scaled(dtype == "f32" and 4096 or 8192)
  local x, w = engine.randn(n, n):to(dtype):keep(), engine.randn(n, n):to(dtype):keep()
  product_line(("product %s %d^3"):format(dtype, n), 2 * n ^ 3, function()
    return x:matmul(w, false, true)
  end)
end
-- GPT-2's layers: products alone, and with the operations around them
local function matrix(m, n) return engine.randn(m, n):to("bf16"):keep() end
for _, shape in ipairs { { 768, 768 }, { 2304, 768 }, { 3072, 768 }, { 768, 3072 } } do
  local M, N, K = scaled(32768), scaled(shape[1]), scaled(shape[2])
  local x, w, dy, bias = matrix(M, K), matrix(N, K), matrix(M, N), engine.randn(N):to("bf16"):keep()
  local flops = 2 * M * N * K
  product_line(("product bf16 %d x %d x %d"):format(M, N, K), flops, function()
    return x:matmul(w, false, true)
  end)
  product_line("  dx", flops, function() return dy:matmul(w) end)
  product_line("  dw", flops, function() return dy:matmul(x, true, false) end)
  product_line("  with bias", flops, function() raw.run("linear", { x, w, bias }) end)
  product_line("  dw in f32, and the bias's gradient", flops, function()
    raw.run("linear_grad", { dy, x }, { raw.dtype.f32, raw.dtype.f32, 0, 0 }, {}, 2)
  end)
  for _, each in ipairs { x, w, dy, bias } do each:free() end
end
do
  local M, C, H = scaled(32768), scaled(768), scaled(3072)
  local x, w1, w2, dy, u = matrix(M, C), matrix(H, C), matrix(C, H), matrix(M, C), matrix(M, H)
  local b1, b2 = engine.randn(H):to("bf16"):keep(), engine.randn(C):to("bf16"):keep()
  product_line("mlp_gelu: two products and GELU", 4 * M * C * H, function()
    raw.run("mlp_gelu", { x, w1, b1, w2, b2 }, {}, {}, 3)
  end)
  product_line("matmul_gelu_grad: a product and GELU's slope", 2 * M * C * H, function()
    raw.run("matmul_gelu_grad", { dy, w2, u })
  end)
  for _, each in ipairs { x, w1, w2, dy, u, b1, b2 } do each:free() end
end
do
  -- FP8: one scale per tensor, as fp8_delayed and fp8_current use in forward products (fast) and in
  -- gradients; one scale per row; and the products of fp8_block
  local n, fp8 = math.max(128, scaled(8192)), engine.fp8
  local x, w = engine.randn(n, n):keep(), engine.randn(n, n):keep()
  for _, case in ipairs {
    { "one scale, fast", "tensor", "tensor", 0 }, { "one scale", "tensor", "tensor", 128 },
    { "a scale per row", "row", "row", 128 },
    { "1 x 128 with 128 x 128", { 1, 128 }, { 128, 128 }, 128 },
    { "1 x 128 with 1 x 128, f32", { 1, 128 }, { 1, 128 }, 128, "f32" },
  } do
    local qx = fp8.quantize(x, { block = case[2] }):keep()
    local qw = fp8.quantize(w, { block = case[3] }):keep()
    local how = { transpose_b = true, accumulator = "hopper", promotion = case[4],
      dtype = case[5] or "bf16" }
    product_line(("product e4m3 %d^3, %s"):format(n, case[1]), 2 * n ^ 3, function()
      return fp8.matmul(qx, qw, how)
    end)
    qx:free()
    qw:free()
  end
end
for _, shape in ipairs { { 16, 2048, 16, 64 }, { 16, 2048, 16, 128 }, { 32, 1024, 12, 64 } } do
  local B, T, H, D = shape[1], scaled(shape[2]), shape[3], shape[4]
  local function heads() return engine.randn(B, T, H, D):to("bf16"):keep() end
  local q, k, v, dy = heads(), heads(), heads(), heads()
  local y, lse = raw.run("attention", { q, k, v }, { 1, 0 }, { 0 }, 3)
  y, lse = y:keep(), lse:keep()
  local flops = 4 * B * H * T * T * D / 2
  local name = ("attention bf16, B %d T %d H %d D %d, causal"):format(B, T, H, D)
  product_line(name, flops, function() raw.run("attention", { q, k, v }, { 1, 0 }, { 0 }, 3) end)
  product_line("  with entropies", flops, function()
    raw.run("attention", { q, k, v }, { 1, 1 }, { 0 }, 3)
  end)
  product_line("  its gradient", 2.5 * flops, function()
    raw.run("attention_grad", { q, k, v, y, lse, dy }, { 1 }, { 0 }, 3)
  end)
  for _, x in ipairs { q, k, v, dy, y, lse } do x:free() end
end

-- ------------------------------------------------------------------ memory-bound passes

local function parameters(count, precision)
  local model = engine.nn.linear(scaled(4096), scaled(count / 4096), { bias = false })
  return model, engine.optim.adamw(model, { lr = 1e-3, precision = precision })
end

--- Random gradients, the same for every row.
local function random_gradients(list, format)
  for _, w in ipairs(list) do
    ((w:to(format) * engine.randn(w.shape[#w.shape]):to(format)):sum()):backward()
    engine.end_step()
  end
end

--- The trainer's passes for gradient statistics: only the norm, read back at once; the default
-- statistics, and these with histograms, each read back at once and lagged.
local function statistics_lines(name, opt, bytes)
  local ffi, C, check = raw.ffi, raw.C, raw.check
  local record, loss = ffi.new("eng_record"), ffi.new("double[1]")
  local default = C.ENG_NEED_AMAX + C.ENG_NEED_NORM + C.ENG_NEED_ZEROS + C.ENG_NEED_UNDERFLOW
  memory_line("gradient statistics, " .. name, bytes, function() opt:grad_norm() end)
  for k, text in ipairs { "  amax, norm, zeros, underflow", "  with histograms" } do
    local needs = k == 1 and default or default + C.ENG_NEED_HIST
    memory_line(text, bytes, function()
      check(C.eng_params_stats(record, nil, opt.params, 1, needs))
    end)
    local pending = 0
    memory_line(text .. ", lagged", bytes, function()
      if pending > 2 then check(C.eng_params_stats_fetch(record, nil, loss, opt.params, 1)) end
      check(C.eng_params_stats_start(opt.params, needs, nil, 0, nil))
      pending = math.min(pending + 1, 3)
    end)
    C.eng_params_stats_forget(opt.params)
  end
end

for _, precision in ipairs { "bf16", "fp16" } do
  local model, opt = parameters(2 ^ 28, precision)
  local n = model:count()
  opt:zero_grad()
  random_gradients({ model.weight }, precision == "fp16" and "f16" or "bf16")
  local each = precision == "fp16" and 2 or 4   -- bytes of a gradient: f16, or f32
  statistics_lines(("%s, %d M"):format(each == 2 and "f16" or "f32", n / 1e6), opt, each * n)
  local bytes = (each + 2 + 6 * 4) * n
  memory_line(("AdamW, %s gradients, %s weights, f32 state")
    :format(precision == "fp16" and "f16" or "f32", precision), bytes,
    function() opt:step { gradient_factor = 1e-3 } end)
  local norms = require("engine.base.ffi").new "double[4]"
  memory_line("  with norms", bytes,
    function() opt:step { gradient_factor = 1e-3, norms = norms } end)
end
do   -- the 148 parameters of GPT-2
  local list, n = {}, 0
  local function add(rows, columns)
    local x = columns and engine.randn(rows, columns) or engine.randn(rows)
    list[#list + 1] = x:keep():requires_grad(true)
    n = n + list[#list].count
  end
  local C = scaled(768)
  add(scaled(50304), C)
  add(1024, C)
  for _ = 1, 12 do
    for _ = 1, 4 do add(C) end
    for _, shape in ipairs { { 3 * C, C }, { C, C }, { 4 * C, C }, { C, 4 * C } } do
      add(shape[1], shape[2])
      add(shape[1])
    end
  end
  add(C)
  add(C)
  local opt = engine.optim.adamw(list, { lr = 1e-3, precision = "bf16" })
  opt:zero_grad()
  random_gradients(list, "bf16")
  statistics_lines(("f32, GPT-2: %d tensors, %d M"):format(#list, n / 1e6), opt, 4 * n)
end
local rows, width = scaled(32768), scaled(4096)
local h = engine.randn(rows, width):to("bf16"):keep()
local weight, bias = engine.ones(width, { keep = true }), engine.zeros(width, { keep = true })
memory_line("layer norm, bf16", 4 * h.count, function() return h:layer_norm(weight, bias) end)
memory_line("gelu, bf16", 4 * h.count, function() return h:gelu("tanh") end)
memory_line("transpose, bf16", 4 * h.count, function() return h:transpose(1, 2):contiguous() end)
memory_line("sum of rows, bf16", 2 * h.count, function() return h:sum(1) end)
memory_line("sum of everything, bf16", 2 * h.count, function() return h:sum() end)
do   -- a step of GPT-2 without its products, 64 sequences of 1024
  local tokens, columns, vocab = scaled(65536), scaled(768), scaled(50304)
  local function random(n) return engine.randn(tokens, n):to("bf16"):keep() end
  local x, dy = random(columns), random(columns)
  local gain = engine.ones(columns, { keep = true })
  local shift = engine.zeros(columns, { keep = true })
  local _, mean, rstd = raw.run("layer_norm", { x, gain, shift }, {}, { 1e-5 }, 3)
  mean, rstd = mean:keep(), rstd:keep()
  local f32 = raw.dtype.f32
  local narrow = ("bf16 [%d x %d]"):format(tokens, columns)
  local wide = ("bf16 [%d x %d]"):format(tokens, 4 * columns)
  memory_line("layer norm " .. narrow, 4 * x.count, function()
    return x:layer_norm(gain, shift)
  end)
  memory_line("  its gradient", 6 * x.count, function()
    raw.run("layer_norm_grad", { x, gain, mean, rstd, dy }, { f32, 1 }, {}, 3)
  end)
  memory_line("add " .. narrow, 6 * x.count, function() return x + dy end)
  memory_line("layer norm of a residual " .. narrow, 8 * x.count, function()
    return x:add_layer_norm(dy, gain, shift)
  end)
  memory_line("  its gradient", 8 * x.count, function()
    raw.run("add_layer_norm_grad", { x, gain, mean, rstd, dy, x }, { f32, 1 }, {}, 3)
  end)
  memory_line("bias gradient " .. narrow, 2 * x.count, function()
    raw.run("bias_grad", { dy }, { f32, 0 })
  end)
  local ids = engine.randint(0, vocab, tokens, { dtype = "i32", keep = true })
  memory_line("embedding gradient, bf16 to f32", 2 * x.count + 4 * vocab * columns, function()
    raw.run("embedding_grad", { dy, ids }, { vocab, f32, 0 })
  end)
  local hidden, dh = random(4 * columns), random(4 * columns)
  memory_line("gelu " .. wide, 4 * hidden.count, function() return hidden:gelu("tanh") end)
  memory_line("  its gradient", 6 * hidden.count, function()
    raw.run("unary_grad", { hidden, dh }, { raw.op.gelu_tanh, raw.dtype.bf16 })
  end)
  memory_line("bias gradient " .. wide, 2 * hidden.count, function()
    raw.run("bias_grad", { dh }, { f32, 0 })
  end)
end
do
  local tokens, vocab = scaled(8192), scaled(50240) + 17   -- unaligned rows
  local logits = engine.randn(tokens, vocab):to("bf16"):keep()
  local targets = engine.randint(0, vocab, tokens, { dtype = "i32", keep = true })
  local _, lse = raw.run("cross_entropy", { logits, targets }, { -100, 1 }, { 0 }, 2)
  lse = lse:keep()
  local dloss = engine.full({}, 1024, { keep = true })
  memory_line(("cross entropy, bf16, %d classes"):format(vocab), 2 * logits.count, function()
    raw.run("cross_entropy", { logits, targets }, { -100, 1 }, { 0 }, 2)
  end)
  memory_line("  its gradient", 4 * logits.count, function()
    raw.run("cross_entropy_grad", { logits, targets, lse, dloss }, { -100, 1 }, { 0 })
  end)
  -- rule 1 (deepseek) divides, rule 2 (deepgemm) multiplies
  local function quantize(block_rows, block_columns, flags, rule)
    return function()
      raw.run("quantize", { h, false },
        { raw.dtype.e4m3, block_rows, block_columns, rule or 1, flags }, { -1, 0 }, 5)
    end
  end
  memory_line("bf16 to e4m3, blocks 1 x 128", 3 * h.count, quantize(1, 128, 0))
  memory_line("bf16 to e4m3, blocks 1 x 128, and transposed", 4 * h.count, quantize(1, 128, 8))
  memory_line("  multiplying instead of dividing", 4 * h.count, quantize(1, 128, 8, 2))
  -- bf16 values, also of x transposed, as in the recipes: 24 = QUANTIZE_TRANSPOSED | MX_VALUES
  local mx = require "engine.tensor.mx"
  for _, case in ipairs { { "mxfp8", "e4m3", 32, "rceil", 0 },
    { "nvfp4", "e2m1", 16, "nvfp4", 0 }, { "four over six", "e2m1", 16, "four_over_six", 0 },
    { "nvfp4, stochastic", "e2m1", 16, "nvfp4", 8 } } do
    memory_line("bf16 to values of " .. case[1], 6 * h.count, function()
      raw.run("mx_quantize", { h, false }, { tonumber(mx.formats[case[2]]), 1, case[3],
        tonumber(mx.rules[case[4]]), 24, case[5], 0, 0 }, { 0 }, 7)
    end)
  end
  memory_line("bf16 transposed, Hadamard 16", 4 * h.count, function()
    raw.run("hadamard", { h }, { 16, 0, 1, raw.dtype.bf16 })
  end)
  memory_line("bf16 to e4m3, blocks 128 x 128", 3 * h.count, quantize(128, 128, 0))
  local up = engine.randn(unpack(h.shape)):to("bf16"):keep()
  memory_line("silu(gate) * up to e4m3, blocks 1 x 128", 5 * h.count, function()
    raw.run("swiglu_quantize", { h, up, false }, { raw.dtype.e4m3, 1, 128, 2, 0 }, { -1, 0 }, 5)
  end)
  memory_line("  in two steps", 9 * h.count, function()
    raw.run("quantize", { raw.run("swiglu", { h, up }, {}, {}), false },
      { raw.dtype.e4m3, 1, 128, 2, 0 }, { -1, 0 }, 5)
  end)
  memory_line("bf16 to e4m3, one scale (two reads)", 5 * h.count, quantize(0, 0, 0))
end
