-- A residual and its norm in one operation, add_layer_norm or add_rms_norm, equal add followed by
-- the norm, bit for bit: values, gradients and whole trainings. Also: which residuals use it. Runs
-- on the CPU with every instruction set; with ENGINE_TEST_DEVICE=cuda on the card.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local devices = require "spec.devices"
local nn, C, bytes, everywhere, CARD = engine.nn, M_ffi.C, devices.bytes, devices.everywhere,
  devices.card

-- ------------------------------------------------------------------ the operations

local FORMS = {
  layer = { joined = function(x, r, w, b) return x:add_layer_norm(r, w, b) end,
    norm = function(s, w, b) return s:layer_norm(w, b) end, vectors = 2 },
  rms = { joined = function(x, r, w) return x:add_rms_norm(r, w) end,
    norm = function(s, w) return s:rms_norm(w) end, vectors = 1 },
}
-- which results the loss uses: y and the sum; only y; only the sum; y, and the sum twice
local ENDS = {
  function(y, s, g, h) return (y * g):sum() + (s * h):sum() end,
  function(y, _, g) return (y * g):sum() end,
  function(_, s, _, h) return (s * h):sum() end,
  function(y, s, g, h) return (y * g):sum() + (s * s * h):sum() + (s:sigmoid()):sum() end,
}

--- Normal values; if `wild`, with outliers whose sum overflows f16, and with NaN and Inf.
local function rows(shape, dtype, wild)
  local x = engine.randn(shape)
  if wild then
    local odd = engine.rand(shape)
    x = odd:lt(0.01):where(x * 60000, x)
    x = odd:gt(0.999):where(x / 0, x)
  end
  return x:to(dtype)
end

local function compare_on(set, form, dtypes, shape, options)
  local f, n = FORMS[form], shape[#shape]
  local context = ("%s: %s of %s and %s, %s"):format(set, form, dtypes[1], dtypes[2],
    table.concat(shape, " x "))
  for number, finish in ipairs(ENDS) do
    engine.begin_step()
    engine.seed(n + number)
    local x, r = rows(shape, dtypes[1], options.wild):keep(),
      rows(shape, dtypes[2], options.wild):keep()
    if options.turned then x, r = rows({ n, shape[1] }, dtypes[1]):keep():transpose(), r end
    local g, h = engine.randn(shape), engine.randn(shape)
    local vectors = options.bare and {}
      or { engine.randn(n):keep(), f.vectors == 2 and engine.randn(n):keep() or nil }
    local leaves, results = { x, r, unpack(vectors) }, {}
    for way = 1, 2 do
      local own = {}
      for k, leaf in ipairs(leaves) do
        own[k] = (options.turned and k == 1 and leaf:transpose() or leaf):keep():requires_grad(true)
      end
      local a = options.turned and own[1]:transpose() or own[1]
      local y, s
      if way == 1 then y, s = f.joined(a, own[2], own[3], own[4])
      else
        s = a + own[2]
        y = f.norm(s, own[3], own[4])
      end
      results[way] = { y = bytes(y), sum = bytes(s), y_dtype = y.dtype, sum_dtype = s.dtype }
      finish(y, s, g, h):backward()
      for k, leaf in ipairs(own) do
        results[way]["gradient " .. k] = leaf.grad and bytes(leaf.grad) or "none"
      end
    end
    for name, want in pairs(results[2]) do
      assert(want == results[1][name], ("%s: %s differs (end %d)"):format(context, name, number))
    end
    assert(results[1]["gradient 1"] ~= "none" and results[1]["gradient 2"] ~= "none",
      "x and the branch should have gradients")
    engine.end_step()
  end
end

describe("layer norm of rows far from 0", function()
  after_each(function()
    engine.end_step()
    engine.device("cpu")
  end)

  --- layer_norm of rows x, and add_layer_norm of x and a branch of zeros. Returns y and the
  --- gradients of x and of the weight for each.
  local function both(x, eps)
    local out = {}
    for k = 1, 2 do
      local row, weight = x:to(x.dtype):keep():requires_grad(true),
        (engine.zeros(x.shape[2]) + 2):keep():requires_grad(true)
      local bias = engine.zeros(x.shape[2]) + 3
      local y = k == 1 and row:layer_norm(weight, bias, eps)
        or (row:add_layer_norm(engine.zeros(x.shape[1], x.shape[2]):to(x.dtype), weight, bias, eps))
      y:sum():backward()
      out[k] = { y = y, dx = row.grad, dweight = weight.grad }
    end
    return out
  end

  local function extremes(x)
    local wide = x:to("f64")
    return wide:min():item(), wide:max():item()
  end

  it("gives only the bias for a row of equal numbers", function()
    everywhere(function(set)
      for _, dtype in ipairs { "f32", "f16", "bf16" } do
        for _, n in ipairs { 3, 7, 48, 333, 768, 1000, 4100, 8192, 9000 } do
          for _, value in ipairs { 0.1, -0.3, 12345.678, dtype == "f32" and 3e7 + 2 or 1e-3,
            dtype == "f16" and 1 or 1e30 } do
            local context = ("%s: %s, %d times %g"):format(set, dtype, n, value)
            local x = (engine.zeros(3, n) + value):to(dtype)
            for k, got in ipairs(both(x, 1e-5)) do
              local least, most = extremes(got.y)
              assert(least == 3 and most == 3, ("%s: y is %g to %g in form %d"):format(context,
                least, most, k))
              least, most = extremes(got.dweight)
              assert(least == 0 and most == 0,
                ("%s: dweight is %g to %g in form %d"):format(context, least, most, k))
            end
            if n < 1000 then   -- with an eps of 0 the formula is 0 * (1 / 0), which is NaN
              for _, got in ipairs(both(x, 0)) do
                assert(got.y:eq(got.y):to("f32"):sum():item() == 0,
                  context .. ": expected NaN from 0 * (1 / 0), got a number")
              end
            end
            engine.end_step()
          end
        end
      end
    end)
  end)

  it("errs by no more than the rounding of the mean", function()
    everywhere(function(set)
      for _, n in ipairs { 7, 48, 333, 768, 4100, 8192, 9000 } do
        for _, steps in ipairs { 4, 32, 128, 512 } do   -- of 2^-10, neighbours in f32 around 10000
          engine.seed(n + steps)
          local x = (engine.rand(3, n) * steps):to("i32"):to("f32") / 1024 + 10000
          local wide = x:to("f64")
          local want = wide:layer_norm(nil, nil, 1e-9) * 2 + 3
          local mean = wide:mean(-1, true)
          local rstd = 1 / math.sqrt(((wide - mean) * (wide - mean)):mean(-1):min():item())
          for k, got in ipairs(both(x, 1e-9)) do
            local off = (got.y:to("f64") - want):abs():max():item()
            -- The mean's rounding to f32, up to 2^-11 here, times rstd and the weight, plus the f32
            -- errors of the other steps. The sums add no error: rows whose variance is small
            -- compared with their mean are summed in f64.
            local allowed = 2 ^ -11 * rstd * 2 + 1e-5
            assert(off <= allowed, ("%s: %d columns, %d steps of 2^-10, form %d: off by %g, " ..
              "allowed %g"):format(set, n, steps, k, off, allowed))
          end
          engine.end_step()
        end
      end
    end)
  end)
end)

describe("a residual and its norm in one operation", function()
  after_each(function() engine.end_step() end)

  for _, form in ipairs { "layer", "rms" } do
    for _, dtype in ipairs { "f32", "f16", "bf16", "f64" } do
      it("is bit-identical to the two operations, " .. form .. " norm in " .. dtype, function()
        everywhere(function(set)
          for _, n in ipairs { 1, 7, 33, 256, 515, 1024, 1544, 2056, 4104 } do
            compare_on(set, form, { dtype, dtype }, { n < 1000 and 9 or 5, n },
              { wild = n % 3 == 0, bare = n == 7 })
          end
          compare_on(set, form, { dtype, dtype }, { 2, 140, 40 }, {})
          compare_on(set, form, { dtype, dtype }, { 6, 72 }, { turned = true })
        end)
      end)
    end
    it("is bit-identical to the two operations with mixed formats, " .. form .. " norm", function()
      everywhere(function(set)
        for _, pair in ipairs { { "f32", "bf16" }, { "f32", "f16" }, { "bf16", "f32" },
          { "f16", "bf16" }, { "f32", "f64" } } do
          compare_on(set, form, pair, { 9, 136 }, {})
          compare_on(set, form, pair, { 5, 33 }, { wild = true })
        end
      end)
    end)
  end

  it("gives what autocast gives for the two operations", function()
    engine.begin_step()
    local x, r, w = engine.randn(3, 8), engine.randn(3, 8):to("bf16"), engine.randn(8)
    for _, recipe in ipairs { "fp32", "bf16", "fp16" } do
      engine.autocast(recipe, function()
        local y, s = x:add_rms_norm(r, w)
        local s2 = x + r
        local y2 = s2:rms_norm(w)
        assert.equal(y2.dtype, y.dtype)
        assert.equal(s2.dtype, s.dtype)
        assert.equal(bytes(y2), bytes(y))
      end)
    end
    assert.equal("f64", engine.autocast("bf16",
      function() return (x:add_layer_norm(r:to("f64"))) end).dtype)
  end)

  it("computes only the requested gradients", function()
    engine.begin_step()
    local x, r, w = engine.randn(3, 8), engine.randn(3, 8):requires_grad(true), engine.randn(8)
    local y, s = x:add_rms_norm(r, w)
    ;(y + s):sum():backward()
    assert.is_nil(x.grad)
    assert.is_nil(w.grad)
    assert.is_not_nil(r.grad)
    engine.end_step()
    engine.begin_step()
    x, r, w = engine.randn(3, 8), engine.randn(3, 8), engine.randn(8):requires_grad(true)
    y, s = x:add_rms_norm(r, w)
    assert.error_matches(function() (s * s):sum():backward() end,
      "nothing in this loss requires a gradient", 1, true)
    ;(y * y):sum():backward()
    assert.is_not_nil(w.grad)
  end)

  it("keeps the sum for the backward pass, not its terms", function()
    engine.begin_step()
    local x, r = engine.randn(4, 8):requires_grad(true), engine.randn(4, 8):requires_grad(true)
    local a, b, fp8 = x * 2, r * 2, M_ffi.new("int64_t[1]")
    local before = tonumber(C.eng_tape_bytes(fp8))
    local y, s = a:add_layer_norm(b)
    -- the sum, means, 1/std
    assert.equal(before + 4 * (4 * 8 + 2 * 4), tonumber(C.eng_tape_bytes(fp8)))
    s:done()
    a:fill(7)                               -- no longer needed
    ;(y + s):sum():backward()
    assert.is_not_nil(x.grad)
    engine.end_step()
    engine.begin_step()
    x, r = engine.randn(4, 8):requires_grad(true), engine.randn(4, 8)
    y, s = x:add_layer_norm(r)
    s:fill(7)
    assert.error_matches(function() y:sum():backward() end,
      "was modified after an operation read it", 1, true)
  end)

  it("names the shapes that do not fit", function()
    engine.begin_step()
    local x = engine.ones(3, 8)
    assert.error_matches(function() x:add_layer_norm(engine.ones(8)) end,
      "add_layer_norm: expected two tensors of the same shape, got f32 [3 x 8] and f32 [8]", 1,
      true)
    assert.error_matches(function() x:add_rms_norm(x, engine.ones(4)) end,
      "add_rms_norm: expected a weight of shape [8], got f32 [4]", 1, true)
    assert.error_matches(function() x:add_rms_norm() end, "add_rms_norm", 1, true)
    assert.error_matches(function() x:add_rms_norm(x, nil, "a") end,
      "add_rms_norm: expected eps to be a number, got 'a'", 1, true)
  end)
end)

-- ------------------------------------------------------------------ models

--- The model with sums and norms as separate operations, never add_layer_norm or add_rms_norm.
local function apart(model)
  for _, name in ipairs { "layer_norm", "rms_norm" } do
    local class = nn[name]
    model:apply(function(m)
      if m._class == name then
        rawset(m, "forward", function(self, x) return class.forward(self, x) end)
      end
    end)
  end
  return model
end

local MODELS = {
  gpt = function(p)
    return nn.gpt { vocab = 40, context = 16, width = 32, heads = 4, layers = 3, dropout = p }
  end,
  llama = function(p)
    return nn.llama { vocab = 40, context = 16, width = 32, heads = 4, kv_heads = 2, layers = 3,
      hidden = 64, dropout = p }
  end,
  bert = function(p)
    return nn.bert { vocab = 40, context = 16, width = 32, heads = 4, layers = 2, dropout = p }
  end,
}

--- Losses and weights of a few steps, and the operations that ran.
local function train(kind, recipe, change, options)
  engine.seed(5)
  local model = change(MODELS[kind](options.dropout or 0))
  local optimizer = engine.optim.adamw(model, { lr = 1e-2, precision = recipe })
  if options.scaled then rawset(options.scaled(model), "_relative_scale", 4) end
  local ids = engine.randint(0, 40, { 2, 17 }):keep()
  local x, targets = ids:slice(2, 1, 16):contiguous():keep(),
    ids:slice(2, 2, 17):contiguous():keep()
  local result, ran = {}, nil
  for step = 1, 3 do
    ran = tostring(engine.profile(function()
      engine.begin_step()
      local loss = engine.autocast(recipe, function() return model:loss(x, targets) end)
      result["loss " .. step] = bytes(loss)
      loss:backward()
      optimizer:step()
      optimizer:zero_grad()
      engine.end_step()
    end))
  end
  for _, p in ipairs(model:parameters()) do result[p.name] = bytes(p.tensor) end
  return result, ran
end

local function same(kind, recipe, options)
  local together, ran = train(kind, recipe, function(m) return m end, options)
  local alone, ran_alone = train(kind, recipe, apart, options)
  local n = 0
  for name, want in pairs(alone) do
    assert(want == together[name], ("%s in %s: %s differs"):format(kind, recipe, name))
    n = n + 1
  end
  assert(n > 20, n)
  assert.is_not_nil(ran:find("\nadd_%a+_norm "))
  assert.is_nil(ran_alone:find("add_%a+_norm"))
  return ran
end

local function calls(ran, name) return tonumber(ran:match("\n" .. name .. " +(%d+)")) or 0 end

describe("models with residuals and norms in one operation", function()
  after_each(function()
    engine.end_step()
    engine.device("cpu")
  end)

  for kind in pairs(MODELS) do
    for _, recipe in ipairs { "fp32", "bf16", "fp16", "fp8_current" } do
      it(("train as with separate operations: %s in %s"):format(kind, recipe), function()
        if CARD then engine.device(CARD) end
        -- a card without FP8 tensor cores refuses this recipe (cuda/training_spec)
        if recipe == "fp8_current" and C.eng_device_fp8() == 0 then return end
        same(kind, recipe, { dropout = 0.1 })
      end)
    end
  end

  it("use that operation wherever a norm follows a sum", function()
    local ran = same("gpt", "fp32", {})
    -- 3 blocks, 2 sums each; no sum precedes the first norm
    assert.equal(6, calls(ran, "add_layer_norm"))
    assert.equal(6, calls(ran, "add_layer_norm_grad") + calls(ran, "layer_norm_grad") - 1)
    assert.equal(1, calls(ran, "layer_norm"))
    ran = same("llama", "fp32", {})
    assert.equal(6, calls(ran, "add_rms_norm"))
    assert.equal(1, calls(ran, "rms_norm"))
    ran = same("bert", "fp32", {})
    assert.equal(4, calls(ran, "add_layer_norm"))
  end)

  it("train the same with scales per layer", function()
    for _, scaled in ipairs { function(m) return m.blocks[2] end,
      function(m) return m.blocks[2].norm2 end, function(m) return m.norm end,
      function(m) return m.blocks[1].attn end } do
      same("gpt", "fp16", { scaled = scaled })
    end
  end)

  it("accept any module in a block's place", function()
    local Zero, Twice = nn.class("zero"), nn.class("twice")
    function Zero.forward() return 0 end
    function Twice:init(inner) self.inner = inner end
    function Twice:forward(x) return self.inner(x) * 2, "more" end
    local function altered(model)
      model.blocks[1].attn = Zero()
      model.blocks[1].mlp = Zero()
      model.blocks[2] = Twice(model.blocks[2])
      model.blocks[3].norm1 = nn.linear(32, 32)
      return model
    end
    local _, ran = train("gpt", "fp32", altered, {})
    local together, alone = train("gpt", "fp32", altered, {}),
      train("gpt", "fp32", function(m) return apart(altered(m)) end, {})
    for name, want in pairs(alone) do assert(want == together[name], name .. " differs") end
    -- one of block 2, one of block 3, and the last norm
    assert.equal(3, calls(ran, "add_layer_norm"))
  end)
end)
