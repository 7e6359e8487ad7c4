-- Training in FP8: a linear layer under a recipe equals quantize and fp8_matmul called by hand, to
-- the bit; its gradients are close to f32's; scales, meters and checkpoints.
local engine = require "engine"
local helper = require "spec.helper"
local M_ffi = require "engine.base.ffi"

local C, nn, fp8 = M_ffi.C, engine.nn, engine.fp8

local function bytes(x)
  local n = x.count
  local values = M_ffi.new("double[?]", n)
  M_ffi.check(C.eng_read(values, M_ffi.dtype.f64, n, x))
  return M_ffi.ffi.string(values, 8 * n)
end

local function relative(got, want)
  local difference = (got:to("f64") - want:to("f64"))
  return math.sqrt((difference * difference):sum():item() / (want:to("f64") *
    want:to("f64")):sum():item())
end

local ROLES = {
  fp8_current = { x = { "e4m3", "tensor" }, w = { "e4m3", "tensor" }, dy = { "e5m2", "tensor" } },
  fp8_block = { x = { "e4m3", "1x128" }, w = { "e4m3", "128x128" }, dy = { "e4m3", "1x128" },
    rule = "deepgemm" },
  fp8_block_te = { x = { "e4m3", "1x128" }, w = { "e4m3", "128x128" }, dy = { "e4m3", "1x128" },
    rule = "transformer_engine", pow2 = true },
  fp8_rowwise = { x = { "e4m3", "row" }, w = { "e4m3", "row" }, dy = { "e4m3", "row" },
    rule = "torchao" },
}

-- Runs a linear layer's forward and backward pass on fixed random data under a recipe; returns { y,
-- x, dy, dx, dw, db, layer, opt } by name.
local function pass(recipe, width, rows, out)
  engine.seed(5)
  local layer = nn.linear(width, out)
  local opt = engine.optim.sgd(layer, { lr = 0.1, precision = recipe })
  local x = engine.randn(2, rows / 2, width):requires_grad(true)
  local dy = engine.randn(2, rows / 2, out)
  local y = engine.autocast(recipe, function() return layer(x) end)
  ;(y:to("f32") * dy):sum():backward()
  return { y = y, x = x, layer = layer, opt = opt, dx = x.grad, dw = layer.weight.grad,
    db = layer.bias.grad, dy = dy }
end

local with_gradient = helper.in_step

describe("a linear layer in FP8", function()
  for name, roles in pairs(ROLES) do
    it(name .. " equals quantize and fp8_matmul by hand, to the bit", with_gradient(function()
      local width, rows, out = 160, 24, 136
      local p = pass({ base = name, activations = "f32", fp8 = { sample = 0 } }, width, rows, out)
      local function q(x, role, more)
        local options = { format = roles[role][1], block = roles[role][2], rule = roles.rule,
          pow2 = roles.pow2 }
        for key, value in pairs(more or {}) do options[key] = value end
        return fp8.quantize(x:detach(), options)
      end
      local promotion = { forward = name == "fp8_current" and 0 or 128, other = 128 }
      local x2, dy2, w = p.x:view(rows, width), p.dy:to("f32"):view(rows, out), p.layer.weight
      local square = name == "fp8_current"
      local x_turned = name == "fp8_rowwise" or name == "fp8_block_te"   -- in the forward pass
      local xq, wq, dyq = q(x2, "x", { transposed = x_turned }),
        q(w, "w", { transposed = name == "fp8_rowwise" }), q(dy2, "dy", { transposed = not square })
      local y = fp8.matmul(xq, wq, { transpose_b = true, promotion = promotion.forward,
        bias = p.layer.bias:detach():to("bf16"), dtype = "f32" })
      assert.are.equal(bytes(y), bytes(p.y))
      local dx = name == "fp8_rowwise" and fp8.matmul(dyq, wq.transposed,
        { transpose_b = true, dtype = "f32" }) or fp8.matmul(dyq, wq, { dtype = "f32" })
      assert.are.equal(bytes(dx), bytes(p.dx))
      local dw
      if square then dw = fp8.matmul(dyq, xq, { transpose_a = true, dtype = "f32" })
      elseif x_turned then
        dw = fp8.matmul(dyq.transposed, xq.transposed, { transpose_b = true, dtype = "f32" })
      else
        dw = fp8.matmul(dyq.transposed, q(xq:dequantize(), "x", { transposed = true }).transposed,
          { transpose_b = true, dtype = "f32" })
      end
      assert.are.equal(bytes(dw), bytes(p.dw))
      assert.is_true(relative(p.db, dy2:sum(1)) < 1e-6)
    end))

    it(name .. " has gradients close to f32's", with_gradient(function()
      local low = pass(name, 256, 64, 128)
      local got = { y = low.y:to("f32"):keep(), dx = low.dx:to("f32"):keep(),
        dw = low.dw:to("f32"):keep(), db = low.db:to("f32"):keep() }
      engine.end_step()
      engine.begin_step()
      local full = pass("fp32", 256, 64, 128)
      -- rounding a factor errs by at most 2^-4, 2.6 % in root mean square (e4m3), or 2^-3 and 5.3 %
      -- (e5m2); the errors of a product's two factors add in quadrature
      assert.is_true(relative(got.y, full.y) < 0.045, "y")
      assert.is_true(relative(got.dx, full.dx) < 0.07, "dx")
      assert.is_true(relative(got.dw, full.dw) < 0.07, "dw")
      assert.is_true(relative(got.db, full.db) < 0.01, "db")
    end))
  end

  it("keeps x in e5m6 on request; gradients are nearer to f32's than with x kept as codes",
    with_gradient(function()
    local errors = {}
    for _, keep in ipairs { "e5m6", "codes" } do
      local p = pass({ base = "fp8_block", activations = "f32",
        fp8 = { x = { format = "e4m3", block = "1x128", keep = keep } } }, 128, 256, 64)
      errors[keep] = relative(p.dw, p.dy:view(-1, 64):permute(2,
        1):matmul(p.x:detach():view(-1, 128)))
      engine.end_step()
      engine.begin_step()
    end
    assert.is_true(errors.e5m6 < errors.codes)
    assert.is_true(errors.codes < 0.06)
  end))

  it("accumulates micro-batches in the parameter's own gradient", with_gradient(function()
    engine.seed(3)
    local layer = nn.linear(128, 128, { bias = false })
    local opt = engine.optim.sgd(layer, { lr = 0, precision = "fp8_block" })
    local parts = {}
    local x = { engine.randn(16, 128), engine.randn(16, 128) }
    for i = 1, 2 do
      opt:zero_grad()
      engine.autocast("fp8_block", function() return layer(x[i]):to("f32"):sum() end):backward()
      parts[i] = layer.weight.grad:keep()
    end
    opt:zero_grad()
    for i = 1, 2 do
      engine.autocast("fp8_block", function() return layer(x[i]):to("f32"):sum() end):backward()
    end
    assert.are.equal(bytes(parts[1] + parts[2]), bytes(layer.weight.grad))
  end))

  it("quantizes a weight again only after a write to it", with_gradient(function()
    engine.seed(3)
    local layer = nn.linear(64, 32, { bias = false })
    local opt = engine.optim.sgd(layer, { lr = 0, precision = "fp8_current" })
    local x, amax = engine.randn(4, 64), M_ffi.new("double[3]")
    local function run()
      return engine.no_grad(function() return engine.autocast("fp8_current",
        function() return layer(x) end) end)
    end
    local id = opt.fp8.list[1].id
    local before = bytes(run())
    M_ffi.check(C.eng_fp8_amax(amax, id))
    assert.is_true(amax[1] > 0)
    assert.are.equal(before, bytes(run()))
    M_ffi.check(C.eng_fp8_amax(amax, id))
    assert.are.equal(-1, amax[1])
    layer.weight:copy(layer.weight:detach() * 2)
    local after = run()
    M_ffi.check(C.eng_fp8_amax(amax, id))
    assert.is_true(amax[1] > 0)
    assert.are.equal(bytes(after), bytes(run()))
    assert.are_not.equal(before, bytes(after))
  end))

  it("refuses a weight written between forward and backward", with_gradient(function()
    local layer = nn.linear(64, 32, { bias = false })
    engine.optim.sgd(layer, { lr = 0, precision = "fp8_current" })
    local x = engine.randn(4, 64):requires_grad(true)
    local loss = engine.autocast("fp8_current", function()
      local first = layer(x):to("f32"):sum()
      layer.weight:copy(layer.weight:detach() * 2)
      return first + layer(x):to("f32"):sum()
    end)
    assert.has_error(function() loss:backward() end)
  end))

  it("accepts infinities, zeros and NaN without a crash", with_gradient(function()
    for _, value in ipairs { 0, 1 / 0, 0 / 0, 3e38, 1e-40 } do
      local layer = nn.linear(128, 64)
      engine.optim.sgd(layer, { lr = 0, precision = "fp8_block" })
      local x = engine.full({ 8, 128 }, value, "f32"):requires_grad(true)
      engine.autocast("fp8_block", function() return layer(x):to("f32"):sum() end):backward()
      assert.are.equal(128 * 64, layer.weight.grad.count)
    end
  end))

  it("runs in high precision outside its recipe, and where the recipe lists it under `high`",
    with_gradient(function()
    engine.seed(1)
    local model = nn.sequential { nn.linear(64, 64), nn.linear(64, 64) }
    local opt = engine.optim.sgd(model,
      { lr = 0, precision = { base = "fp8_current", fp8 = { high = { "^2$" } } } })
    assert.are.equal(1, #opt.fp8.list)
    local x = engine.randn(4, 64)
    local plain = bytes(model(x))
    assert.are_not.equal(plain, bytes(engine.autocast({ base = "fp32", fp8 = { x = {} } },
      function() return model(x) end)))
    assert.are.equal(plain, bytes(engine.autocast("fp32", function() return model(x) end)))
  end))
end)

describe("training in FP8", function()
  local function run(options)
    local t = helper.job({ text = ("the quick brown fox jumps over the lazy dog "):rep(40),
      seed = 7, data_seed = 3, lr = 2e-3, steps = 8 }, options)
    t:run()
    return t, t.model
  end

  it("ends near bf16 with every recipe", function()
    local want = run { precision = "bf16", steps = 30 }.record.loss
    for _, recipe in ipairs { "fp8_block", "fp8_block_te", "fp8_current", "fp8_rowwise",
      "fp8_delayed" } do
      local got = run { precision = recipe, steps = 30 }.record.loss
      assert.is_true(math.abs(got - want) < 0.05 * want, ("%s: %g, expected %g"):format(recipe, got,
        want))
    end
  end)

  it("resumes bit for bit at every step, including histories of amaxes", function()
    local dir = os.tmpname()
    os.remove(dir)
    local recipe = { name = "short", base = "fp8_delayed",
      fp8 = { policy = { "fp8_delayed:history=3", "fp8_fallback:snr=60,pause=2" }, sample = 2 } }
    local _, whole = run { precision = recipe }
    for k = 1, 7 do
      run { precision = recipe, steps = k, run = dir .. k, checkpoint_every = k }
      local t, model = run { precision = recipe, run = dir .. k, resume = "auto" }
      assert.are.equal(8, t.steps_done)
      for i, p in ipairs(model:parameters()) do
        assert.are.equal(bytes(whole:parameters()[i].tensor), bytes(p.tensor), "resumed at " .. k)
      end
      os.execute("rm -rf " .. dir .. k)
    end
  end)

  it("reports and records the failure of an FP8 policy like any policy's", function()
    local dir = os.tmpname()
    os.remove(dir)
    local broken = { source = [[return { name = "broken", kind = "fp8", needs = {}, options = {},
      init = function() return { scale = 1 } end,
      decide = function(state, record)
        if record.step == 2 then error("no decision") end
        return 1
      end }]], file = "broken.lua" }
    local t = run { precision = { base = "fp8_current", fp8 = { policy = { broken } } },
      run = dir, steps = 4 }
    assert.are.equal(1, t.policy_errors)
    local h = engine.history.open(dir)
    assert.are.equal(1, h:totals().failed)
    assert.matches("^FP8 policy broken: broken.lua:4: no decision", h:steps(2, 2)[1].reason)
    h:close()
    os.execute("rm -rf " .. dir)
  end)

  it("writes meters into the history and shows them to policies", function()
    local dir = os.tmpname()
    os.remove(dir)
    local seen = { source = [[return { kind = "fp8", needs = { "tensors" }, options = {},
      init = function() return { scale = 1, seen = 0 } end,
      decide = function(state, record)
        for name, t in pairs(record.tensors) do
          if t.measured then
            state.seen = state.seen + 1
            if not (t.snr > 20 and t.clipped == 0) then
              error("snr " .. name .. " " .. t.snr)
            end
          end
        end
        if record.tensors["blocks.1.mlp.up:dy"].name ~= "blocks.1.mlp.up:dy" then error("name") end
        return 1
      end }]], file = "seen.lua" }
    local t = run { precision = { base = "fp8_block", fp8 = { sample = 3, policy = { seen } } },
      run = dir, steps = 7 }
    assert.are.equal(0, t.optimizer.fp8.policies[1]:failures())
    -- 8 layers, 3 roles, 3 measurements
    assert.is_truthy(t.optimizer.fp8.policies[1]:save():find("seen%W+72"))
    local h = engine.history.open(dir)
    local rows = h:fp8("blocks.2")
    assert.are.equal(4 * 3 * 3, #rows)
    assert.is_true(rows[1].snr > 25 and rows[1].underflow < 0.01
      and rows[1].scale_max >= rows[1].scale_min)
    assert.is_truthy(tostring(rows):find("blocks.2.attn.out"))
    assert.are.equal(3, #h:fp8("blocks.1.mlp.up", 3))
    assert.are.equal(0, #h:fp8("nothing"))
    assert.matches("^no FP8 layer's name begins with 'blocks.9'.*; FP8 layers are blocks.1.",
      tostring(h:fp8("blocks.9")))
    assert.matches("^FP8 layers were not measured at step 999; measured steps: %d",
      tostring(h:fp8("blocks.1", 999)))
    assert.matches("rounded to 0; overflow: past the format's largest number", tostring(rows), 1,
      true)
    h:close()
    os.execute("rm -rf " .. dir)
  end)

  it("composes with a loss scale: delayed scales follow it, and losses do not change by a bit",
    function()
    local function losses(scale)
      local list = {}
      run { precision = { base = "fp8_delayed", fp8 = { sample = 0 } }, policy = "static",
        policy_options = { loss_scale = scale }, steps = 6,
        on_step = function(_, record) list[#list + 1] = ("%.17g"):format(record.loss) end }
      return table.concat(list, " ")
    end
    assert.are.equal(losses(1), losses(1024))
  end)

  it("takes layers out of FP8 when they leave their SNR band, and tries them again", function()
    local on = {}
    run { precision = { base = "fp8_current",
      fp8 = { sample = 1, policy = "fp8_fallback:snr=28,pause=3" } }, steps = 8,
      on_step = function(t) on[#on + 1] = t.optimizer.fp8.list[1].on and 1 or 0 end }
    -- e5m2 gradients have about 25 dB: the first step ends FP8, and the fourth turns it on again
    assert.are.equal("0 0 0 1 0 0 0 0", table.concat(on, " "))
  end)
end)

describe("meters", function()
  it("leave out the scales of blocks of zeros", function()
    engine.seed(5)
    local layer = engine.nn.linear(256, 128, { bias = false })
    local opt = engine.optim.sgd(layer,
      { precision = { base = "fp8_block", fp8 = { sample = 1 } } })
    local x = engine.concat({ engine.zeros(4, 128), engine.ones(4, 128) }, 2)
    opt.fp8:begin(1)
    engine.autocast(opt.precision, function() return layer(x):sum() end):backward()
    opt.fp8:measure(1, 1)
    local m = opt.fp8:meters()[1]
    assert.same({ "x", 0.5 }, { m.role, m.zeros })
    assert.equal(m.scale_max, m.scale_min)
    assert.near(1 / 448, m.scale_max, 1e-6)
  end)
  it("count values that became 0, including negative zeros, and clipped values",
    with_gradient(function()
    local layer = nn.linear(8, 4, { bias = false })
    local opt = engine.optim.sgd(layer,
      { lr = 0, precision = { base = "fp8_current", fp8 = { x = { format = "e4m3" } } } })
    local id = opt.fp8.list[1].id
    local x = engine.tensor({ { 0, -0.0, 1e-4, -1e-4, 1, -2, 4, 448 } }, "f32")
    C.eng_fp8_measure(true)
    engine.no_grad(function() engine.autocast("fp8_current", function() return layer(x) end) end)
    local m = M_ffi.new("eng_fp8_meter[3]")
    M_ffi.check(C.eng_fp8_meters(m, id))
    assert.are.same({ 8, 2, 2, 0 }, { tonumber(m[0].count), tonumber(m[0].zeros),
      tonumber(m[0].underflow), tonumber(m[0].overflow) })
    assert.are.equal(448, m[0].amax)
    assert.is_true(math.abs(m[0].least - 1e-4) < 1e-10)
    M_ffi.check(C.eng_fp8_delay(id, 0, 224))     -- factor 2: 448 becomes 896 and is clipped
    engine.no_grad(function() engine.autocast("fp8_current", function() return layer(x) end) end)
    C.eng_fp8_measure(false)
    M_ffi.check(C.eng_fp8_meters(m, id))
    assert.are.equal(1, tonumber(m[0].overflow))
  end))

  it("count what overflows as an encoding without saturation would", with_gradient(function()
    for format, case in pairs {
      e4m3 = { largest = 448, values = { 448, 463, 464, -464, 464 + 2 ^ -15, -465 }, over = 2 },
      e5m2 = { largest = 57344, values = { 57344, 61440 - 2 ^ -8, 61440, -61440, 65536 },
        over = 3 } } do
      local over = 0
      for _, v in ipairs(case.values) do
        local code = tonumber(C.eng_small_encode(format, v, 0)) % 128
        if code > (format == "e4m3" and 0x7E or 0x7B) then over = over + 1 end
      end
      assert.are.equal(case.over, over, format)
      local recipe = { base = "fp8_current", fp8 = { x = { format = format } } }
      local layer = nn.linear(#case.values, 4, { bias = false })
      local id = engine.optim.sgd(layer, { lr = 0, precision = recipe }).fp8.list[1].id
      M_ffi.check(C.eng_fp8_delay(id, 0, case.largest))     -- factor 1
      C.eng_fp8_measure(true)
      engine.no_grad(function()
        engine.autocast("fp8_current", function()
          return layer(engine.tensor({ case.values }, "f32"))
        end)
      end)
      C.eng_fp8_measure(false)
      local m = M_ffi.new("eng_fp8_meter[3]")
      M_ffi.check(C.eng_fp8_meters(m, id))
      assert.are.equal(over, tonumber(m[0].overflow), format)
    end
  end))
end)

describe("memory", function()
  local function bytes_of(precision)
    engine.seed(1)
    local model = nn.llama { vocab = 64, context = 64, width = 128, heads = 4, kv_heads = 4,
      layers = 2, hidden = 256 }
    local opt = engine.optim.adamw(model, { precision = precision })
    local ids = engine.randint(0, 64, { 4, 64 }, { dtype = "i64", keep = true })
    return opt:memory(function() return model:loss(ids, ids) end)
  end
  it("is less under fp8_block than under bf16, for weights, moments and the tape, and as predicted",
    function()
    local low, high, all = bytes_of "fp8_block", bytes_of "bf16", {}
    local function weights(m)
      return m.masters.measured + m["low-precision copies"].measured + m["FP8 copies"].measured
    end
    assert.is_true(weights(low) < weights(high))
    assert.are.equal(high.moments.measured / 2, low.moments.measured)
    assert.is_true(low["kept for backward"].measured < 0.8 * high["kept for backward"].measured)
    local codes = { accumulator = "blackwell" }
    local in_codes = { base = "nvfp4", fp8 = { forward = codes, dgrad = codes, wgrad = codes } }
    for i, name in ipairs { "mxfp8", "nvfp4", "mxfp4_tseng", "mxfp4_quartet", "nvfp4_quartet2",
      in_codes } do
      all[i] = bytes_of(name)
    end
    for _, m in ipairs { low, high, unpack(all) } do
      for _, row in ipairs(m) do
        if row.predicted then
          assert.is_true(math.abs(row.predicted - row.measured) <= 0.01 * row.measured,
            ("%s: %g, %g"):format(row.role, row.predicted, row.measured))
        end
      end
    end
    assert.is_truthy(tostring(low):find("of which in FP8"))
  end)
  it("of attention's output under fp8_block is 12 bits a number, and the gradients are close to " ..
    "those of the unquantized output", function()
    local plain = { base = "fp8_block",
      fp8 = { layers = { { match = "%.down$", x = { keep = "swiglu" } } } } }
    local packed, codes = bytes_of "fp8_block", bytes_of(plain)
    -- 2 layers, 256 rows of 128 numbers: each number takes 1.5 bytes instead of 3 (1 as a code and
    -- 2 in bf16)
    assert.are.equal(2 * 256 * 128 * 1.5,
      codes["kept for backward"].measured - packed["kept for backward"].measured)
    local function gradients(precision)
      engine.seed(4)
      local attention, got = nn.attention(128, 4, {}), {}
      local model = nn.sequential { attention }
      engine.optim.sgd(model, { lr = 0, precision = precision })
      with_gradient(function()
        local x, dy = engine.randn(2, 32, 128):requires_grad(true), engine.randn(2, 32, 128)
        ;(engine.autocast(precision, function() return model(x) end):to("f32") *
          dy):sum():backward()
        got.x = x.grad:to("f32"):keep()
        for _, p in ipairs(model:parameters()) do got[p.name] = p.tensor.grad:to("f32"):keep() end
      end)()
      return got
    end
    local function recipe(keep)
      return { base = "fp8_block", fp8 = { high = { "qkv" },
        layers = { { match = "out$", x = { keep = keep } } } } }
    end
    local low, full = gradients(recipe "e5m6"), gradients(recipe "codes")
    for name, want in pairs(full) do
      assert.is_true(relative(low[name], want) < (name:find("out") and 0.05 or 0.005),
        name .. " " .. relative(low[name], want))
    end
  end)
  it("of a view is freed after done() on every tensor that uses it", with_gradient(function()
    local x = engine.randn(8, 8):requires_grad(true)
    local y = x + 1
    local flat = y:view(-1)
    local loss = flat:sum()
    flat:done()
    assert.are.equal(64, (y * 1).count)
    y = x + 1
    flat = y:view(-1)
    loss = loss + flat:sum()
    y:done() flat:done()
    assert.has_error(function() return y * 1 end)
    assert.has_error(function() return flat * 1 end)
    y = x + 1
    flat = y:view(-1)
    loss = loss + flat:exp():sum()
    y:done() flat:done()                 -- exp's rule reads its output, not its input
    y = x + 1
    flat = y:view(-1)
    loss = loss + flat:log():sum()
    flat:done() y:done()                 -- log's rule reads its input: nothing happens
    assert.are.equal(64, (y * 1).count)
    loss:backward()
    assert.is_true(relative(x.grad, (x:detach() + 1):exp() + 2 + 1 / (x:detach() + 1)) < 1e-6)
  end))
  it("of a tensor released by done() is freed, and using the tensor raises",
    with_gradient(function()
    local x = engine.randn(8, 8):requires_grad(true)
    local y = x + 1
    local z = y * 2
    local held = z:exp()
    y:done()
    assert.has_error(function() return y + 1 end)
    local loss = held:sum()
    z:done()                             -- exp's rule reads it: nothing happens
    loss:backward()
    assert.is_true(relative(x.grad, ((x:detach() + 1) * 2):exp() * 2) < 1e-6)
  end))
end)

describe("SwiGLU in FP8", function()
  it("keeps one copy of the shared input of gate and up, and reports its amax to both",
    with_gradient(function()
    engine.seed(2)
    local mlp = nn.swiglu(128, 256, {})
    local opt = engine.optim.sgd(mlp, { lr = 0, precision = "fp8_block" })
    local x = engine.randn(32, 128):requires_grad(true)
    local amax, m = M_ffi.new("double[3]"), M_ffi.new("eng_fp8_meter[3]")
    C.eng_fp8_amax(amax, opt.fp8.list[1].id)
    C.eng_fp8_measure(true)
    local y = engine.autocast("fp8_block", function() return mlp(x) end)
    C.eng_fp8_measure(false)
    local fp8_bytes = M_ffi.new("int64_t[1]")
    C.eng_tape_bytes(fp8_bytes)
    -- one copy of x, and down's input: each as codes with an f32 scale for every 128 codes
    assert.are.equal(32 * (128 + 4 + 256 + 8), tonumber(fp8_bytes[0]))
    y:to("f32"):sum():backward()
    local want = x:detach():abs():max():item()
    for _, site in ipairs(opt.fp8.list) do
      M_ffi.check(C.eng_fp8_amax(amax, site.id))
      M_ffi.check(C.eng_fp8_meters(m, site.id))
      if site.path ~= "down" then
        assert.are.equal(want, amax[0], site.path)
        assert.are.same({ 32 * 128, want }, { tonumber(m[0].count), m[0].amax }, site.path)
      end
    end
  end))
  it("does not use another layer's codes if its own quantization differs", with_gradient(function()
    for _, case in ipairs { { "^up$", { rule = "deepseek" } }, { "^up$", { stochastic = true } },
      { "^up$", { keep = "transposed" } } } do
      local mlp = nn.swiglu(128, 128, {})
      engine.optim.sgd(mlp, { lr = 0,
        precision = { base = "fp8_block",
        fp8 = { layers = { { match = case[1], x = case[2] } } } } })
      local x, fp8_bytes = engine.randn(32, 128):requires_grad(true), M_ffi.new("int64_t[1]")
      local y = engine.autocast("fp8_block", function() return mlp(x) end)
      C.eng_tape_bytes(fp8_bytes)
      -- Three copies have 32 scales each; a transposed copy of x has 128.
      assert.are.equal(3 * 32 * (128 + 4) + (case[2].keep and 4 * (128 - 32) or 0),
        tonumber(fp8_bytes[0]))
      y:to("f32"):sum():backward()
    end
  end))
  -- Returns the output of nn.swiglu under a recipe, its gradients, amaxes and tape memory, and
  -- whether h was quantized as it was computed. With `apart`, `down` has its own forward function
  -- (the linear layer's), so that h must be a readable tensor.
  local function whole_pass(recipe, apart, options)
    options = options or {}
    engine.seed(6)
    local mlp, got = nn.swiglu(128, 264, {}), {}
    local opt = engine.optim.sgd(mlp, { lr = 0, precision = recipe })
    local linear = mlp.down.forward
    if apart then rawset(mlp.down, "forward", function(self, x) return linear(self, x) end) end
    if options.delay then
      for _, site in ipairs(opt.fp8.list) do
        if site.path == "down" then M_ffi.check(C.eng_fp8_delay(site.id, 0, options.delay)) end
      end
    end
    local amax, fp8_bytes, y = M_ffi.new("double[3]"), M_ffi.new("int64_t[1]"), nil
    for _, site in ipairs(opt.fp8.list) do C.eng_fp8_amax(amax, site.id) end
    with_gradient(function()
      local x, dy = engine.randn(3, 32, 128) * (options.spread or 1), engine.randn(3, 32, 128)
      if not options.first then x:requires_grad(true) end
      local profile = engine.profile(function() y = engine.autocast(recipe,
        function() return mlp(x) end) end)
      for _, row in ipairs(profile.operations) do
        if row.op == "swiglu" or row.op == "swiglu_quantize" then got[row.op] = row.calls end
      end
      got[#got + 1] = tostring(C.eng_tape_bytes(fp8_bytes)) .. " " .. tostring(fp8_bytes[0])
      ;(y:to("f32") * dy):sum():backward()
      got[#got + 1], got[#got + 2] = bytes(y), x.grad and bytes(x.grad) or "none"
      for _, p in ipairs(mlp:parameters()) do got[#got + 1] = bytes(p.tensor.grad) end
      for _, site in ipairs(opt.fp8.list) do
        M_ffi.check(C.eng_fp8_amax(amax, site.id))
        got[#got + 1] = ("%s %.17g %.17g %.17g"):format(site.path, amax[0], amax[1], amax[2])
      end
      got[#got + 1] = bytes(engine.rand(4))  -- the same random numbers were drawn
    end)()
    return got
  end

  it("quantizes h as it computes h, bit for bit like two steps, forward and backward", function()
    local function down(x)
      return { base = "fp8_block", fp8 = { layers = { { match = "^down$", x = x } } } }
    end
    for name, case in pairs {
      fp8_block = { "fp8_block" }, fp8_current = { "fp8_current" }, fp8_rowwise = { "fp8_rowwise" },
      delayed = { "fp8_current", { delay = 3 } },
      ["inputs as codes"] = { down { keep = "swiglu" } }, codes = { down { keep = "codes" } },
      transposed = { down { keep = "transposed" } },
      ["by chance"] = { down { stochastic = true, keep = "swiglu" } },
      ["powers of two"] = { down { pow2 = true, rule = "deepseek", margin = 1 } },
      ["x without gradient"] = { down { keep = "swiglu" }, { first = true } },
      f32 = { { base = "fp8_block", activations = "f32" } },
      ["what overflows"] = { "fp8_block", { spread = 1e19 } },
    } do
      local at_once, apart = whole_pass(case[1], false, case[2]), whole_pass(case[1], true, case[2])
      assert.are.same({ 1, nil }, { at_once.swiglu_quantize, at_once.swiglu }, name)
      assert.are.same({ nil, 1 }, { apart.swiglu_quantize, apart.swiglu }, name)
      assert.are.equal(#apart, #at_once)
      for i = 1, #apart do assert.is_true(apart[i] == at_once[i], name .. ": number " .. i) end
    end
  end)
  it("writes h if it is kept in e5m6, if meters read it, or if other code may read it",
    with_gradient(function()
    local e5m6 = { base = "fp8_block",
      fp8 = { layers = { { match = "^down$", x = { keep = "e5m6" } } } } }
    local mlp = nn.swiglu(128, 256, {})
    local x = engine.randn(16, 128)
    local function at_once(recipe)
      local operations = engine.profile(engine.no_grad,
        function() return engine.autocast(recipe, mlp.forward, mlp, x) end).operations
      for _, row in ipairs(operations) do if row.op == "swiglu_quantize" then return true end end
      return false
    end
    local function attached(recipe) return engine.optim.sgd(mlp, { lr = 0, precision = recipe }) end
    attached(e5m6)
    assert.is_false(at_once(e5m6))
    attached "fp8_block"
    assert.is_true(at_once "fp8_block")
    assert.is_false(at_once "bf16")  -- the layer is a site, the step is not in FP8
    C.eng_fp8_measure(true)
    assert.is_false(at_once "fp8_block")
    C.eng_fp8_measure(false)
    rawset(mlp.down, "_relative_scale", 4)                         -- gradients with their own scale
    assert.is_false(at_once "fp8_block")
    rawset(mlp.down, "_relative_scale", nil)
    local module = require "engine.nn.module"
    module.watch(function() end, function() end)
    assert.is_false(at_once "fp8_block")
    module.watch(nil)
    assert.is_true(at_once "fp8_block")
    helper.refuses("linear: expected x [.. x K] and a weight [N x K], got bf16 [16 x " ..
      "256] and f32 [256 x 128]",
      engine.autocast, "fp8_block",
      function() return mlp.gate(x):swiglu_linear(mlp.up(x), mlp.gate.weight, nil,
      rawget(mlp.down, "_fp8")) end)
  end))
  it("trains with the same losses whether steps are metered or not, over retries and micro-batches",
    function()
    local function losses(sample)
      engine.seed(7)
      local model, list = nn.llama { vocab = 256, context = 16, width = 64, heads = 2, kv_heads = 2,
        layers = 2, hidden = 136 }, {}
      local retry = { source = [[return { needs = {}, options = {},
        init = function() return { scale = 1, tried = -1 } end,
        decide = function(state, record)
          if record.step % 3 == 1 and state.tried ~= record.updates then
            state.tried = record.updates return { scale = 1, action = "retry",
              reason = "once more" }
          end
          return 1
        end }]], file = "retry.lua" }
      engine.trainer { model = model, steps = 8, log = "quiet", accumulate = 2, policy = retry,
        data = engine.data.text { text = ("the quick brown fox jumps over the lazy dog "):rep(40),
          batch = 2, context = 16, seed = 3 },
        optimizer = engine.optim.adamw(model,
          { lr = 2e-3, precision = { base = "fp8_block", fp8 = { sample = sample } } }),
        on_step = function(_, record) list[#list + 1] = ("%.17g"):format(record.loss) end }:run()
      return table.concat(list, " ")
    end
    local never = losses(0)
    assert.are.equal(losses(1), never)
    assert.are.equal(losses(3), never)
  end)
  it("keeps its inputs as codes and has gradients close to f32's", function()
    local function gradients(precision)
      engine.seed(2)
      local mlp = nn.swiglu(128, 256, {})
      engine.optim.sgd(mlp, { lr = 0, precision = precision })
      local got = {}
      with_gradient(function()
        local x, dy = engine.randn(32, 128):requires_grad(true), engine.randn(32, 128)
        ;(engine.autocast(precision, function() return mlp(x) end):to("f32") * dy):sum():backward()
        got.x = x.grad:to("f32"):keep()
        for _, p in ipairs(mlp:parameters()) do got[p.name] = p.tensor.grad:to("f32"):keep() end
      end)()
      return got
    end
    local low, full = gradients { base = "fp8_block", activations = "f32",
      fp8 = { layers = { { match = "^down$", x = { keep = "swiglu" } } } } }, gradients "fp32"
    for name, want in pairs(full) do
      assert.is_true(relative(low[name], want) < 0.09, name .. " " .. relative(low[name], want))
    end
  end)
end)
