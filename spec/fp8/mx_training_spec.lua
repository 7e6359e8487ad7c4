-- Training under microscaling recipes: a linear layer equals mx.quantize and ordinary products
-- called by hand, to the bit; meters, accumulation, blocks in high precision, resumed runs and
-- invalid recipes.
local engine = require "engine"
local arguments = require "engine.base.arguments"
local helper = require "spec.helper"
local M_ffi = require "engine.base.ffi"

local C = M_ffi.C
local mx, nn, with_gradient = engine.mx, engine.nn, helper.in_step

local function bytes(x)
  local n = x.count
  local values = M_ffi.new("double[?]", n)
  M_ffi.check(M_ffi.C.eng_read(values, M_ffi.dtype.f64, n, x))
  return M_ffi.ffi.string(values, 8 * n)
end

-- code * scale in bf16, without NVFP4's factor of the whole tensor.
local function values(q)
  return (M_ffi.run("mx_dequantize", { q.q, q.scale, false }, { M_ffi.dtype.bf16,
    tonumber(mx.formats[q.format]), q.block[1], q.block[2], tonumber(mx.rules[q.rule]) }))
end

-- NVFP4's factor of the whole tensor: amax / TOP.
local TOP = { nvfp4 = 2688, four_over_six = 1536, four_over_six_mse = 1536,
  ms_eden = M_ffi.new("float[1]", 255.99 * 6 / (17 / 16 * 0.93))[0] }
local function of_tensor(q) return q.amax * (1 / TOP[q.rule]) end

-- dtype: of the factors. On some processors the order of the sums depends on it.
local function product(a, b, turned_a, turned_b, accumulator, dtype)
  if accumulator == "blackwell" then return mx.matmul(a, b) end
  local y = M_ffi.run("matmul", { values(a):to(dtype or "bf16"), values(b):to(dtype or "bf16") },
    { turned_a and 1 or 0, turned_b and 1 or 0, M_ffi.dtype.f32 + 1, 0 })
  local factor = 1 / (a.factor * b.factor)
  for _, q in ipairs { a, b } do
    if mx.nvfp4[q.rule] then factor = of_tensor(q) * factor end
  end
  return factor == 1 and y or y * factor
end

-- What a product reads of a matrix in a role. Codes are always turned so that rows lie along the
-- summed dimension.
local function operand(x, role, turned, transform, accumulator)
  local o = { format = role.format, rule = role.rule, block = role.block, factor = role.factor,
    average = role.average and x }                   -- the average begins as the weight
  if transform and transform.hadamard then
    return mx.quantize(mx.hadamard(x, transform.hadamard, { transposed = turned, dtype = "bf16",
      signs = transform.signs == "none" and "none" or 0 }), o)
  end
  o.transposed = turned and (o.block ~= "16x16" or accumulator == "blackwell")
  local q = mx.quantize(x, o)
  return q.transposed or q
end

-- The same for a backward product. q: what the forward product reads.
local function backward_operand(x, q, role, transform, accumulator)
  if not role.backward then return operand(x, role, true, transform, accumulator) end
  local read = values(q)
  return operand(mx.nvfp4[q.rule] and read * of_tensor(q) or read, role.backward, true, transform)
end

-- The gradient of x or w, from the gradient of the quantized matrix q of the forward product.
local function through(gradient, q, role, transform)
  if not role.backward then return gradient end
  if q.gate then gradient = gradient * q.gate end
  if not (transform and transform.hadamard) then return gradient end
  return mx.hadamard(gradient, transform.hadamard, { signs = "none" })
end

-- A copy of a recipe's role or product with randomness turned off: no stochastic rounding, and
-- fixed signs.
local function fixed(part)
  return arguments.merged(part, part.stochastic and { stochastic = false },
    part.signs and part.signs ~= "none" and { signs = "fixed" },
    part.backward and { backward = fixed(part.backward) })
end

local RECIPES = { "mxfp8", "mxfp4", "mxfp4_tseng", "mxfp4_quartet", "mxfp4_tetrajet",
  "mxfp4_tetrajet_q_ema", "nvfp4", "nvfp4_four_over_six", "nvfp4_quartet2" }

describe("a linear layer under microscaling", function()
  -- name: a recipe. Sizes that are multiples of 64 allow the accumulator blackwell.
  local function by_hand(name, accumulator)
    return with_gradient(function()
      local width, rows, out = 96, 80, 64
      if name == "nvfp4_quartet2" then width, rows, out = 160, 144, 192 end   -- groups of 128
      if accumulator == "blackwell" then width, rows, out = 128, 192, 64 end
      local fp8 = { sample = 0 }                    -- the recipe without random numbers
      for key, part in pairs(engine.precision.resolve(name).fp8) do
        if type(part) == "table" and not part[1] then fp8[key] = fixed(part) end
      end
      for _, key in ipairs { "forward", "dgrad", "wgrad" } do
        fp8[key] = arguments.merged(fp8[key], { accumulator = accumulator })
      end
      local recipe = { base = name, activations = "f32", fp8 = fp8 }
      engine.seed(5)
      local layer = nn.linear(width, out)
      local sites = engine.optim.sgd(layer, { lr = 0.1, precision = recipe }).fp8
      local x = engine.randn(2, rows / 2, width):requires_grad(true)
      local dy = engine.randn(2, rows / 2, out)
      local y = engine.autocast(recipe, function() return layer(x) end)
      ;(y:to("f32") * dy):sum():backward()

      local flat_x, flat_dy, w = x:detach():view(rows, width), dy:view(rows, out),
        layer.weight:detach()
      assert.equal(accumulator == "blackwell" and C.ENG_ACCUMULATE_BLACKWELL
        or C.ENG_ACCUMULATE_FP32, C.eng_fp8_accumulator(sites.list[1].id))
      local xq, wq = operand(flat_x, fp8.x, false, fp8.forward),
        operand(w, fp8.w, false, fp8.forward)
      -- autocast with activations in f32 converts the factors of the forward product
      local forward = product(xq, wq, false, true, accumulator, "f32")
        + layer.bias:detach():to("bf16")
      if fp8.forward and fp8.forward.high then
        forward = engine.autocast({ base = "bf16", activations = "f32" }, function()
          return flat_x:linear(layer.weight:detach(), layer.bias:detach())
        end)
      end
      assert.equal(bytes(forward), bytes(y))
      local wt = backward_operand(w, wq, fp8.w, fp8.dgrad, accumulator)
      local dx = product(operand(flat_dy, fp8.dy, false, fp8.dgrad), wt, false,
        wt.shape[1] == width, accumulator)
      assert.equal(bytes(through(dx, xq, fp8.w, fp8.forward)), bytes(x.grad))
      local dw = product(operand(flat_dy, fp8.dy, true, fp8.wgrad),
        backward_operand(flat_x, xq, fp8.x, fp8.wgrad), false, true, accumulator)
      assert.equal(bytes(through(dw, wq, fp8.x, fp8.forward)), bytes(layer.weight.grad))
    end)
  end

  for _, name in ipairs(RECIPES) do
    it(name .. " is what mx.quantize and matmul give by hand, to the bit", by_hand(name))
    it(name .. " with Blackwell's accumulator is what mx.matmul gives, to the bit",
      by_hand(name, "blackwell"))

  end

  for _, name in ipairs { "fp4_microsoft", unpack(RECIPES) } do
    it(name .. " adds up micro-batches in the parameter's gradient", with_gradient(function()
      engine.seed(3)
      local layer = nn.linear(64, 32, { bias = false })
      local opt = engine.optim.sgd(layer, { lr = 0, precision = name })
      local x, parts = { engine.randn(16, 64), engine.randn(16, 64) }, {}
      local function run(i)
        engine.seed(i)
        engine.autocast(name, function() return layer(x[i]):to("f32"):sum() end):backward()
      end
      for i = 1, 2 do
        opt:zero_grad()
        run(i)
        parts[i] = layer.weight.grad:keep()
      end
      opt:zero_grad()
      run(1)
      run(2)
      local error = (parts[1] + parts[2] - layer.weight.grad):norm():item()
      assert.is_true(error <= 1e-6 * parts[1]:norm():item())
    end))
  end

  it("under fp4_microsoft is what msamp_fp4 and matmul give by hand, to the bit",
    with_gradient(function()
      local BF16 = M_ffi.dtype.bf16
      local function rows_of(x, gate, clamp)
        return M_ffi.run("msamp_fp4", { x }, { gate, 0 }, { clamp }, 4)
      end
      local function matmul(a, b, turned_a, turned_b)
        return M_ffi.run("matmul", { a, b }, { turned_a, turned_b, M_ffi.dtype.f32 + 1, 0 })
      end
      local width, rows, out = 150, 80, 64
      engine.seed(5)
      local layer = nn.linear(width, out)
      local recipe = { base = "fp4_microsoft", activations = "f32" }
      engine.optim.sgd(layer, { lr = 0.1, precision = recipe })
      local x = engine.randn(rows, width):requires_grad(true)
      local dy = engine.randn(rows, out)
      local y = engine.autocast(recipe, function() return layer(x) end)
      ;(y * dy):sum():backward()
      local xq = rows_of(x:detach(), 0, 0.99)
      local w = layer.weight:detach()
      local wq, _, _, gate = rows_of(w, 1, 0)
      -- autocast with activations in f32 converts the factors of the forward product
      local forward = matmul(xq:to("f32"), wq:to("f32"), 0, 1)
      assert.equal(bytes(forward + layer.bias:detach():to("bf16")), bytes(y))
      local codes, scale = M_ffi.run("quantize", { dy, false }, { M_ffi.dtype.e5m2, 0, 0, 4 },
        { -1, 0 }, 5)
      local dyq = M_ffi.run("dequantize", { codes, scale }, { BF16, 0, 0, 0 })
      assert.equal(bytes(matmul(dyq, wq, 0, 0)), bytes(x.grad))
      assert.equal(bytes(matmul(dyq, xq, 1, 0) * gate), bytes(layer.weight.grad))
      -- Clamping changes the values: int(0.01 * 150) = 1 element at each end of a row is cut.
      local kept = rows_of(x:detach(), 0, 0)
      assert.is_true(bytes(kept) ~= bytes(xq))
    end))

  it("rounds weights toward their average over steps (Q-EMA)", with_gradient(function()
    engine.seed(8)
    local layer, decay = nn.linear(64, 32, { bias = false }), 0.5
    local recipe = { name = "mine", base = "mxfp4_tetrajet", activations = "f32",
      fp8 = { w = { format = "e2m1", rule = "rceil", block = "1x32", average = decay,
        backward = { format = "e2m1", rule = "rceil", block = "1x32" } } } }
    local opt = engine.optim.sgd(layer, { lr = 0.5, precision = recipe })
    local x, identity = engine.randn(8, 64), engine.zeros(64, 64)
    for i = 1, 64 do identity:slice(1, i, i):slice(2, i, i):fill(1) end
    local average, differ
    for step = 1, 4 do
      opt.fp8:begin(step)
      local w = layer.weight:detach():keep()
      average = average and (average * decay + w * (1 - decay)):keep() or w
      local want = mx.quantize(w, { format = "e2m1", rule = "rceil",
        average = average }):dequantize()
      -- rows of the identity are exact in MXFP4, so the product is the quantized weight
      local got = engine.no_grad(function()
        return engine.autocast(recipe, function() return layer(identity) end)
      end)
      assert.equal(0, (want:transpose(1, 2) - got:to("f32")):abs():max():item())
      differ = (want - mx.quantize(w, { format = "e2m1", rule = "rceil" })
        :dequantize()):abs():max():item()
      opt:zero_grad()
      engine.autocast(recipe, function() return layer(x):to("f32"):sum() end):backward()
      opt:step()
    end
    assert.is_true(differ > 0)
  end))

  it("takes dy in FP8 beside x and w in microscaling", with_gradient(function()
    engine.seed(6)
    local layer = nn.linear(64, 32, { bias = false })
    local recipe = { name = "mixed", base = "nvfp4", activations = "f32", fp8 = {
      wgrad = { hadamard = 0 },
      dy = { format = "e5m2", rule = "transformer_engine", pow2 = true } } }
    engine.optim.sgd(layer, { lr = 0.1, precision = recipe })
    local x, dy = engine.randn(48, 64):requires_grad(true), engine.randn(48, 32)
    local y = engine.autocast(recipe, function() return layer(x) end)
    ;(y * dy):sum():backward()
    local d = engine.fp8.quantize(dy, { format = "e5m2", pow2 = true }):dequantize("bf16")
    local xt = mx.quantize(x:detach(), { rule = "nvfp4", transposed = true }).transposed
    local dw = M_ffi.run("matmul", { d, values(xt) }, { 1, 1, M_ffi.dtype.f32 + 1, 0 })
    assert.equal(bytes(dw * of_tensor(xt)), bytes(layer.weight.grad))
    local wrong = { wgrad = { hadamard = 0 },
      dy = { format = "e5m2", rule = "transformer_engine" } }
    local _, text = pcall(engine.precision.resolve, { base = "nvfp4", fp8 = wrong })
    assert.matches("dy may be in FP8 with power-of-two scales (the rule msamp, or pow2 = true)",
      text, 1, true)
  end))

  it("measures the SNR, counts saturated elements, and propagates NaN", with_gradient(function()
    engine.seed(3)
    local layer = nn.linear(64, 32, { bias = false })
    local recipe = { name = "mine", base = "mxfp4", fp8 = { sample = 1,
      x = { format = "e2m1", rule = "floor" } } }
    local opt = engine.optim.sgd(layer, { lr = 0, precision = recipe })
    local sites = opt.fp8
    local function run(x)
      sites:begin(1)
      engine.autocast(recipe, function() return layer(x):to("f32"):sum() end):backward()
      return sites:measure(1, 1)
    end
    local x = engine.randn(64, 64)
    local meters = {}
    for _, row in ipairs(run(x)) do meters[row.role] = row end
    local back = mx.quantize(x:to("bf16"), { format = "e2m1", rule = "floor" }):dequantize()
    local error = (back - x:to("bf16"):to("f32")):norm():item() / x:norm():item()
    assert.near(-20 * math.log10(error), meters.x.snr, 0.1)
    assert.is_true(meters.x.overflow > 0 and meters.w.overflow == 0)
    assert.is_true(meters.x.underflow > 0.01 and meters.x.underflow < 0.2)
    assert.matches("x e2m1 1x32 %d+%.%d dB", tostring(sites))
    local y = engine.autocast(recipe, function() return layer(engine.full({ 4, 64 }, 0 / 0)) end)
    assert.is_true(y:to("f32"):sum():item() ~= 0 and not (y:to("f32"):sum():item() < math.huge))
  end))

  it("counts halfway past the largest number as an overflow where it rounds up",
    with_gradient(function()
    -- For quest, a half of 7 and a half of 1 give a scale of 1.
    for _, case in ipairs { { "e2m1", "floor", 7, 16 }, { "e2m3", "floor", 7.75, 16 },
      { "e3m2", "floor", 30, 16 }, { "mxint8", "floor", 127.5 / 64, 16 },
      { "e5m2", "floor", 61440, 16 }, { "e4m3", "floor", 464, 0 }, { "e4m3", "floor", 466, 16 },
      { "e2m1", "quest", 7, 0 }, { "e2m1", "quest", 7.03125, 16 } } do
      local format, rule, past, over = unpack(case)
      local backward = rule == "quest" and { format = "e2m1", rule = "floor" } or nil
      local recipe = { name = "mine", base = "mxfp4", fp8 = { sample = 1,
        x = { format = format, rule = rule, backward = backward },
        w = { format = "e2m1", rule = "floor", backward = backward } } }
      local layer = nn.linear(32, 32, { bias = false })
      local sites = engine.optim.sgd(layer, { lr = 0, precision = recipe }).fp8
      local row = {}
      for k = 1, 32 do row[k] = k % 2 == 0 and past or 1 end
      sites:begin(1)
      engine.no_grad(function()
        engine.autocast(recipe, function() return layer(engine.tensor({ row }, "bf16")) end)
      end)
      assert.are.equal(over / 32, sites:measure(1, 1)[1].overflow, format .. " " .. rule)
    end
  end))

  it("leaves the first and last blocks in high precision on request", function()
    local model = nn.gpt { vocab = 32, context = 8, width = 32, heads = 2, layers = 4 }
    local opt = engine.optim.adamw(model, { lr = 1e-3, precision = { name = "mine", base = "nvfp4",
      fp8 = { high_first = 1, high_last = 2 } } })
    local blocks = {}
    for _, site in ipairs(opt.fp8.list) do blocks[site.path:match("^blocks%.(%d+)")] = true end
    assert.same({ ["2"] = true }, blocks)
  end)

  -- A trainer after `steps` steps; `run`, `mode` and `checkpoint` as in engine.trainer.
  local function trained(base, steps, run, mode, fp8, checkpoint)
    engine.seed(2)
    local model = nn.gpt { vocab = 256, context = 32, width = 64, heads = 4, layers = 2 }
    local t = engine.trainer { model = model, log = "quiet", steps = steps, run = run, mode = mode,
      checkpoint = checkpoint, resume = run and "auto",
      data = engine.data.text { path = "README.md", batch = 2, context = 32 },
      optimizer = engine.optim.adamw(model, { lr = 1e-3, precision = {
        base = base, fp8 = fp8 or { sample = 1, policy = not mode and "fp8_fallback" or nil } } }) }
    t:run()
    return t
  end
  local function weights(t)
    local list = {}
    for i, p in ipairs(t.model:parameters()) do list[i] = bytes(p.tensor) end
    return list
  end

  for _, base in ipairs(RECIPES) do
    it("resumes bit for bit, runs in lagged mode and obeys fp8_fallback: " .. base, function()
      local folder = helper.folder()
      local whole = trained(base, 6)
      trained(base, 3, folder .. "/run")
      assert.same(weights(whole), weights(trained(base, 6, folder .. "/run")))
      helper.remove(folder)
      assert.equal(6, trained(base, 6, nil, "lagged").updates)
      local sites = whole.optimizer.fp8
      assert.equal(0, sites.policies[1]:failures())
      local high = tostring(sites):find("now in high precision", 1, true) ~= nil
      assert.equal(base ~= "mxfp8", high)             -- 4 bits are too noisy for the policy
    end)
  end

  -- A net with tied and frozen layers. A retry (`again`) repeats every second step.
  local function small(precision, steps, run, again)
    engine.seed(4)
    local Net = nn.class("net")
    function Net:init()
      self.first, self.second = nn.linear(32, 32, { bias = false }), nn.linear(32, 32)
      self.tied = nn.linear(32, 32)
      self.tied.weight = self.first.weight
    end
    function Net:forward(x) return self.tied(self.second(self.first(x))) end
    local net, x = Net(), engine.randn(16, 32):keep()
    net.second:freeze()
    local losses, policy = {}, { source = [[return { name = "again",
      init = function() return { scale = 1, n = 0 } end, decide = function(state)
        state.n = state.n + 1
        return { scale = 1, action = state.n % 2 == 1 and "retry" or "step" }
      end }]], file = "again" }
    local t = engine.trainer { model = net, log = "quiet", steps = steps, run = run,
      resume = run and "auto", policy = again and policy or nil,
      data = { next = function() return { x = x } end, state = function() return {} end,
        restore = function() end },
      loss = function(m, b) return (m(b.x):to("f32") - b.x):square():mean() end,
      on_step = function(_, record) losses[#losses + 1] = record.loss end,
      optimizer = engine.optim.adamw(net, { lr = 1e-2, precision = precision }) }
    t:run()
    return losses, t
  end

  it("averages trained weights only, once each, through resumes and retries", function()
    local base = "mxfp4_tetrajet_q_ema"
    local nearest = { name = "mine", base = base, fp8 = { dy = { format = "e2m1", rule = "rceil" },
      x = { format = "e2m1", rule = "rceil", backward = { format = "e2m1", rule = "rceil" } },
      w = { format = "e2m1", rule = "rceil", average = 0.9,
        backward = { format = "e2m1", rule = "rceil" } } } }
    local folder = helper.folder()
    local losses, t = small(nearest, 6)
    local names = require("engine.base.nearest").keys(t.optimizer.fp8.averages:tensors())
    assert.same({ "first.weight.q_ema" }, names)
    local told = tostring(t.optimizer.fp8)
    for _, name in ipairs { "first", "tied" } do
      assert.matches("\n  " .. name .. " [^\n]* w [^,]* rounded toward an average of decay 0.9, dy",
        told)
    end
    assert.is_nil(told:match("second[^\n]*average"))
    small(nearest, 3, folder .. "/run")
    assert.same({ unpack(losses, 4) }, (small(nearest, 6, folder .. "/run")))
    small("bf16", 8, folder .. "/run")                        -- drops the averages
    small(nearest, 9, folder .. "/run")                       -- begins them again
    local twice = small(nearest, 12, nil, true)               -- a retry leaves the average in place
    for i = 1, 12, 2 do assert.equal(twice[i], twice[i + 1]) end
    assert.same(losses, { twice[1], twice[3], twice[5], twice[7], twice[9], twice[11] })
    small(nearest, 3, folder .. "/again", true)               -- ends before a retry
    assert.same({ unpack(twice, 4) }, (small(nearest, 12, folder .. "/again", true)))
    helper.remove(folder)
    local other = { base = base, fp8 = { ladder = { { w = { average = 0.5 } } } } }
    assert.matches("ladder[1]: w: expected average to be 0.9983, as in the rungs below, got",
      select(2, pcall(small, other, 1)), 1, true)
  end)

  it("averages a weight from its value on after an Inf or a NaN", function()
    for _, masters in ipairs { "f32", "bf16" } do
      local _, t = small({ base = "mxfp4_tetrajet_q_ema", masters = masters }, 1)
      local averages = t.optimizer.fp8.averages
      local x, weight = averages.list[1].x, averages.list[1].p.tensor
      local function step(...)
        weight:copy(engine.tensor({ ... }):unsqueeze(2):expand(4, x.count / 4):view(x.shape))
        averages:move()
        return x:view(4, -1):slice(2, 1, 1):view(4):totable()
      end
      with_gradient(function()
        x:fill(1)
        local start = step(1, 1, 1, 1)
        assert.same({ 1, 1, 1, 1 }, start)
        local broken = step(0 / 0, 1 / 0, -1 / 0, 1)
        assert.is_true(broken[1] ~= broken[1])
        assert.same({ 1 / 0, -1 / 0, 1 }, { unpack(broken, 2) })
        assert.same({ 0.5, 0.25, 2, 1 }, step(0.5, 0.25, 2, 1))        -- repaired weights
        x:fill(0 / 0)
        assert.same({ 0.5, 0.25, 2, 1 }, step(0.5, 0.25, 2, 1))
        assert.near(0.5 + 0.5 * (1 - 0.9983), step(1, 0.25, 2, 1)[1], 1e-7)
      end)
    end
  end)

  for _, base in ipairs { "nvfp4", "mxfp4_tetrajet" } do
    it("trains in codes on request, which its record says, and resumes: " .. base, function()
      local folder, fp8, own = helper.folder(), { sample = 2 }, engine.precision.resolve(base).fp8
      for _, name in ipairs { "forward", "dgrad", "wgrad" } do
        fp8[name] = arguments.merged(own[name], { accumulator = "blackwell" })
      end
      local whole = trained(base, 6, nil, nil, fp8)
      trained(base, 3, folder .. "/run", nil, fp8)
      assert.same(weights(whole), weights(trained(base, 6, folder .. "/run", nil, fp8)))
      assert.same(weights(whole), weights(trained(base, 6, nil, nil, fp8, "block")))
      local text = engine.history.open(folder .. "/run"):events("products")[1].text
      assert.equal("8 of 8 layers multiply codes and sum the products as Blackwell's tensor " ..
        "cores do; the others multiply bf16 numbers",
        text)
      assert.matches("w e2m1 [%dx]+ %d+%.%d dB, .*, Blackwell's sums",
        tostring(whole.optimizer.fp8))
      helper.remove(folder)
    end)
  end

  for policy, places in pairs {
    ["layer_ladder:snr=40,snr_high=5,pause=2"] = "rung 1 of the ladder",
    ["forward_high_before_decay:at=2"] = "rung 1 of the ladder",
    ["sqrt3:ratio=1000"] = "now in high precision",
  } do
    it("is moved to a rung or to high precision by a policy, and resumes: " .. policy, function()
      local fp8 = { sample = 1, policy = policy,
        ladder = { policy:find("^forward") and { forward = { high = true } } or "mxfp8" } }
      local folder = helper.folder()
      local whole = trained("nvfp4", 5, nil, nil, fp8)
      assert.matches(places, tostring(whole.optimizer.fp8), 1, true)
      assert.equal(0, whole.optimizer.fp8.policies[1]:failures())
      trained("nvfp4", 3, folder .. "/run", nil, fp8)
      assert.same(weights(whole), weights(trained("nvfp4", 5, folder .. "/run", nil, fp8)))
      if policy:find("^layer") then                  -- down again after 3 steps
        assert.is_nil(tostring(trained("nvfp4", 3, nil, nil, fp8).optimizer.fp8):find("rung 1"))
      end
      helper.remove(folder)
    end)
  end

  it("computes the forward product in high precision on request", with_gradient(function()
    engine.seed(4)
    local layer = nn.linear(64, 48)
    local x = engine.randn(32, 64)
    local recipe = { name = "mine", base = "nvfp4", fp8 = { forward = { high = true } } }
    engine.optim.adamw(layer, { lr = 1, precision = recipe })
    local want = engine.autocast("bf16", function() return layer(x):to("f32") end)
    local got = engine.autocast(recipe, function() return layer(x):to("f32") end)
    assert.equal(bytes(want), bytes(got))
    got:sum():backward()
  end))

  it("transforms both factors of dW with the same signs", with_gradient(function()
    local layer, x = nn.linear(64, 48), engine.randn(128, 64):keep()
    local grads = {}
    for _, o in ipairs { { 0 }, { 16 }, { 32, "none" }, { 64, "layer" }, { 128, "step" } } do
      local mxint8, transform = { format = "mxint8", rule = "rceil" },
        { hadamard = o[1], signs = o[2] }
      local recipe = { name = "mine", base = "mxfp8", fp8 = { x = mxint8, dy = mxint8, w = mxint8,
        forward = transform, dgrad = transform, wgrad = transform } }
      engine.optim.adamw(layer, { lr = 1, precision = recipe })
      layer:zero_grad()
      engine.seed(1)
      engine.autocast(recipe, function() return layer(x) end):square():sum():backward()
      local g = layer.weight.grad:to("f32")
      if not grads[1] then grads[1] = g end
      assert.is_true(((g - grads[1]):norm() / grads[1]:norm()):item() < 0.03)
    end
  end))

  it("reports invalid recipes in one line", function()
    local function message(fp8)
      return helper.failure(engine.precision.resolve, { name = "a", base = "nvfp4", fp8 = fp8 })
    end
    assert.matches("all in microscaling or all in FP8", message { w = { rule = "deepgemm" } }, 1,
      true)
    assert.matches("got 'e2m'; did you mean 'e2m1'",
      message { w = { rule = "rceil", format = "e2m" } }, 1, true)
    assert.matches("precision 'a' (base nvfp4): fp8: forward: products with microscaling have " ..
      "no option 'promotion'; options: accumulator hadamard high signs",
      message { forward = { promotion = 32 } }, 1, true)
    assert.matches("wgrad: products with microscaling have no option 'hadamart'; did you mean " ..
      "'hadamard'?; options: ", message { wgrad = { hadamart = 16 } }, 1, true)
    assert.matches("expected the accumulator to be device, as in wgrad, got fp32",
      message { forward = { accumulator = "fp32" } }, 1, true)
    assert.matches("expected accumulator blackwell, device or fp32, got 'hopper'",
      message { forward = { accumulator = "hopper" } }, 1, true)
    assert.matches("x: roles with the rule floor have no option 'pow2'; options: average " ..
      "backward block factor format keep rule stochastic",
      message { x = { rule = "floor", pow2 = true } }, 1, true)
    assert.matches("number of blocks", message { high_first = -1 }, 1, true)
    assert.matches("expected hadamard to be 0, 16, 32, 64 or 128, and 0 if the product",
      message { wgrad = { hadamard = 8 } }, 1, true)
    assert.matches("signs backward, fixed, layer, none or step, got 'fixd'; did you mean 'fixed'",
      message { wgrad = { signs = "fixd" } }, 1, true)
    assert.matches("dgrad: expected hadamard .* in FP8 or in square blocks; got 16 with dy in " ..
      "blocks of 1 x 16 and w in blocks of 16 x 16", message { dgrad = { hadamard = 16 } })
    assert.matches("forward: expected hadamard .* 0 if the product is in high precision",
      message { forward = { high = true, hadamard = 16 } })
    assert.matches("even number of columns), got 1 x 0 (0 means the whole dimension)",
      message { x = { rule = "floor", block = "row" } }, 1, true)
    local recipe = M_ffi.new("eng_fp8_recipe")       -- only the core can get such signs
    for role = 0, 2 do
      local r = recipe.role[role]
      r.format, r.block_rows, r.block_columns, r.mx = M_ffi.dtype.e4m3, 1, 32, C.ENG_MX_FLOOR + 1
    end
    recipe.role[0].keep = C.ENG_FP8_KEEP_TRANSPOSED
    for p = 0, 2 do recipe.product[p].accumulator = C.ENG_ACCUMULATE_FP32 end
    assert.equal(0, C.eng_fp8_recipe_check(recipe))
    recipe.role[2].factor = 0.25
    assert.are_not.equal(0, C.eng_fp8_recipe_check(recipe))
    assert.matches("dy: .* a factor from 0.5 to 1, or 0 for none .* and the factor 0.25",
      M_ffi.message())
    recipe.role[2].factor = 0
    recipe.product[1].hadamard, recipe.product[1].signs = 16, 9
    assert.are_not.equal(0, C.eng_fp8_recipe_check(recipe))
    assert.equal("dgrad: expected signs to be one of ENG_FP8_SIGNS_*, got number 9",
      M_ffi.message())
    recipe.product[1].hadamard = 0
    for role = 0, 2 do recipe.role[role].mx = 0 end
    assert.equal(0, C.eng_fp8_recipe_check(recipe))
    for role = 0, 1 do recipe.backward[role].mx = C.ENG_FP8_SAME end
    assert.are_not.equal(0, C.eng_fp8_recipe_check(recipe))
    assert.equal("expected `backward` only in microscaling, got it with x and w in FP8",
      M_ffi.message())
    assert.matches("wgrad: products in FP8 have no option 'hadamard'; options: accumulator high " ..
      "promotion", select(2, pcall(
      engine.precision.resolve, { base = "fp8_block", fp8 = { wgrad = { hadamard = 16 } } })), 1,
      true)
    assert.matches("x: expected 0 to 24 bits of stochastic rounding and a factor from 0.5 to 1, " ..
      "or 0 for none (with four_over_six, both must be 0), got 8 bits and the factor 0",
      message { x = { rule = "four_over_six", stochastic = true } }, 1, true)
    local quest, back = { rule = "quest", backward = { rule = "floor" } }, { rule = "rceil" }
    assert.matches("dy: only x and w have the option backward", message { dy = quest }, 1, true)
    for _, wrong in ipairs { { x = { rule = "rceil", backward = 3 } },
      { x = { rule = "rceil", backward = { rule = "deepgemm" } } },
      { x = { rule = "quest", backward = quest } } } do
      assert.matches("expected backward to be \"same\", or a table with a rule of microscaling",
        message(wrong), 1, true)
    end
    for _, wrong in ipairs { { x = { rule = "quest" } },
      { x = { rule = "quest", backward = { rule = "quest" } } },
      { x = arguments.merged(quest, { stochastic = true }), w = quest } } do
      assert.matches("x: the rule quest is only for x and w in the forward product, in blocks " ..
        "of one row; it needs `backward` in the same role and allows no stochastic rounding and " ..
        "no factor", message(wrong), 1, true)
    end
    assert.matches("x: expected blocks that are not square, because this tensor has `backward`; " ..
      "got 32 x 32",
      message { x = { rule = "rceil", block = "32x32", backward = back } }, 1, true)
    assert.matches("in both x and w", message { x = quest, w = { rule = "nvfp4" } }, 1, true)
    local row = { rule = "msamp_fp4", backward = "same" }
    for text, fp8 in pairs {
      ["x: the rule msamp_fp4 is only for x and w in the forward product, in e2m1 with a scale " ..
        "for each row; it needs `backward`"] = { x = { rule = "msamp_fp4" } },
      ["roles with the rule rceil have no option 'clamp'; options:"] = {
        x = { rule = "rceil", clamp = 0.9 } },
      ["clamp to be a quantile from 0.5 to 0.9999, or 0 for none, got 1"] = {
        x = arguments.merged(row, { clamp = 1 }) },
      ["residual to be true or false"] = { x = arguments.merged(row, { residual = 1 }) },
      ["estimator to be 'straight' or, only in w, 'dge', got 'dge'"] = {
        x = arguments.merged(row, { estimator = "dge" }) },
      ["allows no stochastic rounding and no factor"] = {
        x = arguments.merged(row, { factor = 0.75 }) } } do
      assert.matches(text, message(fp8), 1, true)
    end
    local layer = nn.linear(64, 32)
    for text, fp8 in pairs { ["dy: the rule msamp_fp4 is only for x and w"] = {
      dy = { rule = "msamp_fp4" } }, ["in e2m1 with a scale for each row"] = {
      x = arguments.merged(row, { block = "1x32" }), w = row, dy = back } } do
      assert.matches(text, select(2, pcall(engine.optim.sgd, layer, { lr = 1,
        precision = { name = "a", base = "mxfp8", fp8 = fp8 } })), 1, true)
    end
    for text, fp8 in pairs { ["needs signs = \"none\""] = { x = quest, w = quest, dy = back,
      forward = { hadamard = 32 }, wgrad = {} }, ["only in dgrad and wgrad"] = { x = back,
      w = back, dy = back, wgrad = { hadamard = 32, signs = "backward" } },
      ["ms_eden needs hadamard = 128, got 0"] = { dy = { rule = "ms_eden" } },
      ["ms_eden is only for dy and"] = { x = { rule = "ms_eden" } },
      ["in blocks of one row"] = { x = arguments.merged(quest, { block = "2x32" }), w = quest,
        dy = back, wgrad = {} } } do
      assert.matches(text, select(2, pcall(engine.optim.sgd, layer, { lr = 1,
        precision = { name = "a", base = "nvfp4", fp8 = fp8 } })), 1, true)
    end
    local wanted = "expected factor to be a number from 0.5 to 1"
    for _, factor in ipairs { 2, 0.49, 1e-300, 0, 0 / 0 } do
      assert.matches(wanted, message { dy = { rule = "floor", factor = factor } }, 1, true)
      assert.matches(wanted, select(2, pcall(engine.mx.quantize, engine.ones(1, 32),
        { factor = factor })), 1, true)
    end
    for _, role in ipairs { { factor = 0.75 }, { stochastic = 16 } } do
      assert.equal(role.factor or 16, engine.precision.resolve({ base = "nvfp4",
        fp8 = { dy = role } }).fp8.dy[next(role)])
      assert.matches(role.factor and "roles with the rule deepgemm have no option 'factor'; options"
        or "only a rule of microscaling takes a number of random bits, and the rule here is " ..
          "deepgemm",
        helper.failure(engine.precision.resolve, { base = "fp8_block", fp8 = { dy = role } }), 1,
        true)
    end
    assert.matches("true (8 bits) or 1 to 24", message { dy = { rule = "floor", stochastic = 30 } },
      1, true)
    assert.matches("ladder to be a list", message { ladder = "mxfp8" }, 1, true)
  end)
end)
