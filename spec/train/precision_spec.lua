-- Precision recipes: which operation yields which dtype, fp16 that overflows and underflows with a
-- single rounding, parameters with real fp16 gradients, and low-precision weights that follow their
-- master weights.
local engine = require "engine"
local helper = require "spec.helper"
local M_ffi = require "engine.base.ffi"

local ffi, nn = M_ffi.ffi, engine.nn
local inf = math.huge

local step = helper.in_step

-- Some operations of each casting class of ops.def. like(sizes ...) makes an input of that shape
-- in the dtype of the test.
local OPERATIONS = {
  activations = {
    matmul = function(like) return like(2, 3):matmul(like(3, 2)) end,
    linear = function(like) return like(2, 3):linear(like(4, 3), like(4)) end,
    attention = function(like)
      return (engine.attention(like(1, 2, 1, 2), like(1, 2, 1, 2), like(1, 2, 1, 2),
        { causal = true }))
    end,
  },
  residual = { embedding = function(like) return like(3,
    2):embedding(engine.tensor({ 0, 2 }, "i64")) end },
  norm = {
    layer_norm = function(like) return like(2, 4):layer_norm(like(4), like(4)) end,
    rms_norm = function(like) return like(2, 4):rms_norm(like(4)) end,
  },
  wide = {
    softmax = function(like)
      return like(2, 3):softmax()
    end, log_softmax = function(like) return like(2, 3):log_softmax() end,
    logsumexp = function(like)
      return like(2, 3):logsumexp()
    end, exp = function(like) return like(2):exp() end,
    log = function(like)
      return like(2):log()
    end, rsqrt = function(like) return like(2):rsqrt() end,
    pow = function(like)
      return like(2):pow(like(2))
    end, pow_scalar = function(like) return like(2) ^ 2 end,
    log_sigmoid = function(like)
      return like(2):log_sigmoid()
    end, softplus = function(like) return like(2):softplus() end,
    sum = function(like) return like(2):sum() end, mean = function(like) return like(2):mean() end,
    cross_entropy = function(like)
      return engine.cross_entropy(like(2, 3), engine.tensor({ 0, 2 }, "i64"))
    end,
    mse = function(like) return engine.mse(like(2), like(2)) end,
  },
  input = {
    add = function(like)
      return like(2) + like(2)
    end, mul = function(like) return like(2) * 3 end, div = function(like) return like(2) / 3 end,
    gelu = function(like)
      return like(2):gelu()
    end, silu = function(like)
      return like(2):silu()
    end, relu = function(like) return like(2):relu() end,
    tanh = function(like)
      return like(2):tanh()
    end, max = function(like)
      return like(2):max()
    end, sqrt = function(like) return like(2):sqrt() end,
    dropout = function(like)
      return like(2):dropout(0.5)
    end, swiglu = function(like) return like(2):swiglu(like(2)) end,
    where = function(like)
      return like(2):gt(0):where(like(2), 0)
    end, concat = function(like) return engine.concat { like(2), like(2) } end,
    rope = function(like)
      return like(1, 2, 1, 2):rope()
    end, view = function(like) return like(2):view(1, 2) end,
    gather = function(like) return like(2):gather(1, engine.tensor({ 1 }, "i64")) end,
  },
}

describe("a precision recipe", function()
  local mine = { name = "mine", base = "fp16", residual = "f32", norm = "bf16" }
  for _, recipe in ipairs { "bf16", "fp16", mine } do
    local full = engine.precision.resolve(recipe)
    it(full.name .. " gives every operation its format", step(function()
      for class, operations in pairs(OPERATIONS) do
        for name, run in pairs(operations) do
          for _, input in ipairs { "f32", "f16", "bf16", "f64" } do
            local function like(...) return engine.ones({ ... }, input) end
            local y = engine.autocast(recipe, run, like)
            local expected = class == "input" and input or full[class]
            if input == "f64" then expected = "f64" end          -- f64 is only ever explicit
            assert.equal(expected, y.dtype, name .. " of " .. input)
          end
        end
      end
    end))
  end

  it("fp32 changes no operation", step(function()
    for _, operations in pairs(OPERATIONS) do
      for name, run in pairs(operations) do
        for _, input in ipairs { "f32", "f16", "bf16", "f64" } do
          local function like(...) return engine.ones({ ... }, input) end
          assert.equal(run(like).dtype, engine.autocast("fp32", run, like).dtype, name .. " of " ..
            input)
        end
      end
    end
  end))

  it("does not touch integers", step(function()
    engine.autocast("fp16", function()
      local x = engine.tensor({ { 1, 2 } }, "i32")
      assert.equal("i32", (x + x).dtype)
      assert.equal("i64", x:sum().dtype)
      assert.equal("i64", x:to("f32"):argmax().dtype)
    end)
  end))

  it("applies inside the function only, nests, and ends after an error", step(function()
    local a = engine.ones(2, 2)
    local function format() return a:matmul(a).dtype end
    local inner, outer, argument
    engine.autocast("bf16", function(x)
      inner = engine.autocast("fp16", format)
      outer = format()
      argument = x
      assert.has_error(function() engine.autocast("fp16", error, "trouble") end)
      assert.equal("bf16", format())
      assert.equal("f32", engine.autocast("fp32", format))
    end, 7)
    assert.same({ "f16", "bf16", "f32", 7 }, { inner, outer, format(), argument })
  end))

  it("runs backward in the formats of the forward pass", step(function()
    local x = engine.tensor({ { 1, 2 } }, { requires_grad = true })
    local w = engine.tensor({ { 3, 4 } }, { dtype = "f16", requires_grad = true })
    engine.autocast("fp16", function() return x:linear(w):sum() end):backward()
    assert.same({ "f32", "f16" }, { x.grad.dtype, w.grad.dtype })
    assert.same({ { { 3, 4 } }, { { 1, 2 } } }, { x.grad:totable(), w.grad:totable() })
  end))

  it("reports mistakes in one line at the script's position", function()
    local unknown = "there is no precision 'fp61'; did you mean 'fp16'?; precisions: bf16 " ..
      "bf16_kahan bf16_stochastic fp16 fp32 fp4_microsoft fp8_block fp8_block_te " ..
      "fp8_current fp8_delayed fp8_rowwise mxfp4 mxfp4_quartet mxfp4_tetrajet " ..
      "mxfp4_tetrajet_q_ema mxfp4_tseng mxfp8 " ..
      "nvfp4 nvfp4_four_over_six nvfp4_quartet2"
    local cases = {
      { "'fp61'", unknown }, { "{ base = 'fp61' }", unknown },
      { "5", "precision: expected a name or a recipe table, got 5" },
      { "{}", "precision: expected a name or a recipe table, got an empty table" },
      { "{ name = 'a\\nb' }", "precision: the name 'a\\x0Ab' has a control character, a " ..
        "character that breaks lines or changes the direction of text, or bytes that are not " ..
        "UTF-8" },
      { "{ name = 'a', weights = 'bf16' }", "precision 'a': expected base to name the recipe " ..
        "that this table changes, got nothing; precisions: " .. unknown:match("precisions: (.*)") },
      { "{ name = 'a', base = 'fp32', weight = 'f16' }",
        "precision 'a': unknown field 'weight'; did you mean 'weights'?; fields: activations " ..
        "base fp8 masters moments name norm norm_gradients residual rounding scaled " ..
        "weight_gradients weights wide" },
      { "{ base = 'fp32', weights = 'f64' }", "precision 'custom': expected weights to be bf16, " ..
        "f16 or f32, got 'f64'" },
      { "{ base = 'fp32', moments = 'f16' }", "precision 'custom': expected moments to be bf16 " ..
        "or f32, got 'f16'; did you mean 'bf16'?" },
      { "{ base = 'fp32', norm = 'f16 bf16' }", "precision 'custom': expected norm to be bf16, " ..
        "f16 or f32, got 'f16 bf16'" },
      { "{ base = 'fp32', activations = 16 }", "precision 'custom': expected activations to be " ..
        "bf16, f16 or f32, got 16; did you mean 'f16'?" },
    }
    for _, case in ipairs(cases) do
      for _, code in ipairs { "engine.autocast(%s, print)", "engine.precision.resolve(%s)",
        "engine.optim.sgd(net, { precision = %s })" } do
        local chunk = assert(loadstring(code:format(case[1]) .. "\nreturn 1", "=script"))
        local good, message = pcall(setfenv(chunk, { engine = engine, net = nn.linear(1, 1),
          print = print }))
        assert.is_false(good)
        assert.equal("script:1: " .. case[2], message)
      end
    end
    assert.error_matches(function() engine.autocast("fp16") end,
      "autocast: expected a function, got nothing; hint: engine.autocast%(")
    assert.error_matches(function() engine.autocast("bf16", 3) end,
      "autocast: expected a function, got 3; hint: engine.autocast%(")
  end)

  it("is compared with another one even if a table in both holds itself", function()
    local function recipe(margin)
      local policy = { decide = print, margin = margin }
      policy.self = policy
      return engine.precision.resolve { base = "fp8_delayed", fp8 = { policy = policy } }
    end
    assert.is_true(engine.precision.same(recipe(1), recipe(1)))
    assert.is_false(engine.precision.same(recipe(1), recipe(2)))
  end)

  it("resolves to itself, and describes itself", function()
    local TRUE = { high = "in high precision", pow2 = "scale 2^n", stochastic = "stochastic" }
    local full = engine.precision.resolve(mine)
    assert.equal(full, engine.precision.resolve(full))
    assert.same({ "f16", "f32", "f16", "f32", true },
      { full.weights, full.residual, full.weight_gradients, full.norm_gradients, full.scaled })
    assert.matches("precision mine, based on fp16\n.*residual +f32.*moments +f32$",
      engine.precision.describe(mine))
    -- Each recipe has a text of its own, with every field of its roles and products.
    local seen = {}
    for name, recipe in pairs(engine.precision.recipes) do
      local text = engine.precision.describe(name)
      local body = text:gsub("^[^\n]*\n", "")
      assert.is_nil(seen[body], name .. " and " .. tostring(seen[body]))
      seen[body] = name
      for _, part in ipairs { "x", "w", "dy", "forward", "dgrad", "wgrad" } do
        local line = text:match("\n  fp8 " .. part .. " [^\n]*") or ""
        for field, value in pairs(recipe.fp8 and recipe.fp8[part] or {}) do
          value = field == "backward" and (value.rule or value)
            or value == true and TRUE[field] or tostring(value)
          local place = field == "backward" and text or line
          assert(place:find(value, 1, true), ("%s: no %s of %s in %s"):format(name, field, part,
            text))
        end
      end
      for line in text:gmatch("[^\n]+") do assert(#line <= 100, line) end
    end
    assert.matches("Quartet, arXiv 2505.14669", engine.precision.describe "mxfp4_quartet", 1, true)
    local own = engine.precision.describe { name = "own", base = "nvfp4", fp8 = { high_first = 2,
      w = { rule = "rceil", block = { 32, 32 } }, forward = { high = true }, policy = "sqrt3" } }
    for _, text in ipairs { "w             e4m3, scale per 32x32 (rule rceil), to nearest",
      "y = x W^T, in high precision", "high_first        2 blocks in high precision",
      "policy            sqrt3" } do
      assert.matches(text, own, 1, true)
    end
    -- A table that names norm_gradients is still completed.
    assert.equal("f16", engine.precision.resolve({ base = "fp16",
      norm_gradients = "f16" }).activations)
  end)
end)

-- ------------------------------------------------------------------ numbers

-- n pseudo-random f16 numbers over all bit patterns except NaN [n x 1]
local function patterns(n, seed)
  local bits = ffi.new("uint16_t[?]", n)
  local x, i = seed, 0
  while i < n do
    x = (x * 1103515245 + 12345) % 2 ^ 31
    local b = math.floor(x / 2 ^ 12) % 2 ^ 16
    if b % 2 ^ 15 <= 0x7C00 then bits[i], i = b, i + 1 end
  end
  return engine.from_memory(bits, "f16", { n, 1 })
end

local function same_bits(expected, got, what)
  local a, n = expected:read()
  local b = got:read()
  for i = 0, n - 1 do
    local nan_a, nan_b = a[i] % 2 ^ 15 > 0x7C00, b[i] % 2 ^ 15 > 0x7C00
    if nan_a ~= nan_b or (not nan_a and a[i] ~= b[i]) then
      error(("%s: at %d expected %04x, got %04x"):format(what, i, a[i], b[i]))
    end
  end
end

describe("fp16", function()
  it("a product is the exact one rounded once: inf above 65504, subnormal or zero when tiny",
    step(function()
    for seed = 1, 3 do
      local a, b = patterns(251, seed), patterns(129, seed + 10)
      local exact = a:to("f64"):matmul(b:to("f64"), false, true)  -- 22 bits of significand: exact
      local rounded = exact:to("f16")
      same_bits(rounded, a:matmul(b, false, true), "matmul")
      same_bits(rounded, a:linear(b), "linear")
      same_bits(rounded, a * b:view(1, 129), "mul")
      local finite, subnormal = rounded:abs():lt(inf),
        rounded:abs():lt(2 ^ -14):to("f32") * rounded:abs():gt(0):to("f32")
      -- the inputs give inf and subnormals
      assert.is_true(finite:to("f32"):mean():item() < 1 and subnormal:sum():item() > 100)
    end
  end))

  it("an inner product is summed in f32 and rounded once", step(function()
    local function dot(a, b)
      return engine.tensor({ a }, "f16"):linear(engine.tensor({ b }, "f16")):item()
    end
    assert.equal(inf, dot({ 65504, 16 }, { 1, 1 }))  -- 65520 is the tie between 65504 and 2^16
    assert.equal(65504, dot({ 65504, 15 }, { 1, 1 }))
    assert.equal(-inf, dot({ -65504, -16 }, { 1, 1 }))
    assert.equal(65504, dot({ 65504, 65504, -65504 }, { 1, 1, 1 }))     -- no overflow in between
    assert.equal(0, dot({ 60000, -60000 }, { 60000, 60000 }))
    assert.equal(2 ^ -24, dot({ 2 ^ -20, 2 ^ -24 }, { 2 ^ -5, 2 ^ -1 }))    -- 2^-25 + 2^-25
    assert.equal(0, dot({ 2 ^ -20 }, { 2 ^ -5 }))  -- 2^-25: the tie rounds to the even 0
    -- 1.5 * 2^-24: the tie rounds to the even 2^-23
    assert.equal(2 ^ -23, dot({ 3 * 2 ^ -20 }, { 2 ^ -5 }))
    local many = {}
    for i = 1, 4096 do many[i] = 1 end
    assert.equal(4096, dot(many, many))  -- an f16 sum would stop growing at 2048
    assert.is_true(dot({ inf, 1 }, { 1, 1 }) == inf)
    local nan = dot({ inf, inf }, { 1, -1 })
    assert.is_true(nan ~= nan)
  end))

  it("a bias is added before the only rounding", step(function()
    local function affine(x, b)
      return engine.tensor({ { x, 1 } }, "f16"):linear(engine.tensor({ { 1, 1 } }, "f16"),
        engine.tensor({ b }, "f16")):item()
    end
    assert.equal(2050, affine(2048, 1))  -- 2049 alone would round to 2048, and 2049 again to 2048
    assert.equal(inf, affine(65504, 15))
    assert.equal(65504, affine(65504, 14))
  end))

  it("sums of fp16 are f32 and do not overflow", step(function()
    assert.equal(40 * 65504, engine.full({ 40 }, 65504, "f16"):sum():item())
    assert.equal(65504, engine.full({ 40 }, 65504, "f16"):mean():item())
    assert.equal(inf, (engine.full({ 1 }, 65504, "f16") + engine.full({ 1 }, 16, "f16")):item())
  end))
end)

-- ------------------------------------------------------------------ parameters

local function line(options)
  local net = nn.linear(1, 1, { bias = false })
  net.weight:fill(options.weight or 1)
  return net, engine.optim.sgd(net, { lr = options.lr or 1, precision = options.precision })
end

local function push(net, recipe, scale, x)
  engine.autocast(recipe, function() return net(engine.full({ 1, 1 }, x or 1)):sum() end):backward {
    scale = scale }
end

describe("the gradient of a parameter", function()
  local formats = { fp32 = { "f32", "f32" }, bf16 = { "f32", "f32" }, fp16 = { "f16", "f32" } }
  for recipe, expected in pairs(formats) do
    it("under " .. recipe .. " is " .. expected[1] .. ", in a norm " .. expected[2], step(function()
      local net = nn.sequential { nn.linear(3, 3), nn.layer_norm(3), nn.embedding(2, 3) }
      local opt = engine.optim.sgd(net, { precision = recipe })
      local loss = engine.autocast(recipe, function()
        return net[2](net[1](engine.ones(2, 3)) + net[3](engine.tensor({ 0, 1 }, "i64"))):sum()
      end)
      loss:backward()
      local seen = {}
      for _, p in ipairs(opt.list) do seen[p.name] = p.tensor.grad.dtype end
      assert.same({ ["1.weight"] = expected[1], ["1.bias"] = expected[1],
        ["2.weight"] = expected[2], ["2.bias"] = expected[2],
        ["3.weight"] = expected[1] }, seen)
    end))
  end

  it("under fp16 overflows above 65504 and underflows below 2^-24", step(function()
    local net, opt = line { precision = "fp16" }
    local function gradient(scale, x)
      opt:zero_grad()
      push(net, "fp16", scale, x)
      return net.weight.grad:item()
    end
    assert.equal(1, gradient(1))
    assert.equal(32768, gradient(32768))
    assert.equal(65504, gradient(65504))
    assert.equal(inf, gradient(32768, 2))
    assert.equal(65504, gradient(32752, 2))
    assert.equal(inf, gradient(65520))
    assert.equal(2 ^ -24, gradient(2 ^ -20, 2 ^ -4))
    assert.equal(0, gradient(2 ^ -20, 2 ^ -5))
    push(net, "fp16", 1, 40000)  -- accumulation also happens in fp16
    push(net, "fp16", 1, 40000)
    assert.equal(inf, net.weight.grad:item())
    opt:zero_grad()
    assert.is_nil(net.weight.grad)
    opt:set_precision("bf16")
    push(net, "bf16", 1e30, 1)
    assert.near(1, net.weight.grad:item() / 1e30, 0.01)
  end))

  it("is unscaled in f32 by the update", step(function()
    local net, opt = line { precision = "fp16", weight = 0, lr = 1 }
    push(net, "fp16", 2 ^ -10, 2 ^ -10)  -- the true gradient 2^-10, stored as 2^-20
    opt:step { gradient_factor = 2 ^ 10 }
    assert.equal(-2 ^ -10, net.weight:item())
  end))
end)

describe("low-precision weights", function()
  local function output(net, recipe)
    return engine.no_grad(engine.autocast, recipe,
      function() return net(engine.ones(1, 1)) end):item()
  end

  for _, recipe in ipairs { "fp16", "bf16" } do
    it("follow their f32 master weights under " .. recipe, step(function()
      local net, opt = line { precision = recipe, weight = 1 }
      assert.equal(1, output(net, recipe))
      net.weight:fill(3)
      assert.equal(3, output(net, recipe))
      net.weight:copy { { 4 } }
      assert.equal(4, output(net, recipe))
      net.weight:select(1, 1):fill(5)                            -- through a view
      assert.equal(5, output(net, recipe))
      net:load_state { weight = engine.full({ 1, 1 }, 6) }
      assert.equal(6, output(net, recipe))
      -- a module that the optimizer does not know
      nn.sequential { net }:load_state { ["1.weight"] = engine.full({ 1, 1 }, 7) }
      assert.equal(7, output(net, recipe))
      net.weight:uniform(8, 8)
      assert.equal(8, output(net, recipe))
      push(net, recipe, 1)
      opt:step()
      assert.equal(7, output(net, recipe))
      assert.equal(7, net.weight:item())
      net.weight:fill(1 + 2 ^ -12)  -- the master weight keeps what the copy cannot hold
      assert.equal(1, output(net, recipe))
      assert.equal(1 + 2 ^ -12, net.weight:item())
    end))

    it("of an embedding follow under " .. recipe, step(function()
      local net = nn.embedding(2, 1)
      local opt = engine.optim.sgd(net, { precision = recipe })
      local function row()
        return engine.autocast(recipe, function() return net(engine.tensor({ 1 },
          "i64")) end):item()
      end
      net.weight:fill(2)
      assert.equal(2, row())
      net.weight:fill(3)
      assert.equal(3, row())
      assert.equal(1, #opt.list)
    end))
  end

  it("change with the recipe", step(function()
    local net, opt = line { precision = "fp16", weight = 1 + 2 ^ -9 }
    assert.equal(1 + 2 ^ -9, output(net, "fp16"))
    opt:set_precision("bf16")
    assert.equal(1, output(net, "bf16"))
    opt:set_precision { base = "fp16", weights = "f32", activations = "f32" }
    assert.equal(1 + 2 ^ -9, output(net, "fp32"))
    assert.error_matches(function() opt:set_precision { base = "fp32", moments = "bf16" } end,
      "precision 'custom' has moments in bf16, but this optimizer was made with moments in f32; " ..
      "hint")
  end))

  it("do not change where set_precision raises", step(function()
    local model = engine.nn.linear(32, 32)
    local opt = engine.optim.muon(model, { precision = "mxfp8" })
    local site, fp8 = rawget(model, "_fp8"), opt.fp8
    for _, recipe in ipairs { "bf16_kahan", { base = "mxfp8", fp8 = { high = { "" } } } } do
      assert.is_false(pcall(opt.set_precision, opt, recipe))
      assert.equal("mxfp8", opt.precision.name)
      assert.is_true(site ~= nil and site == rawget(model, "_fp8") and fp8 == opt.fp8)
    end
  end))
end)

describe("engine.amp", function()
  it("gives a function a precision of its own inside autocast only", function()
    local seen = {}
    local place = {}
    for _, name in ipairs { "float", "half", "promote" } do
      place[name] = function(...)
        seen = {}
        for i = 1, select("#", ...) do
          local x = select(i, ...)
          seen[i] = engine.is_tensor(x) and x.dtype or x
        end
        return engine.ones(2, 2):matmul(engine.ones(2, 2)).dtype, "more"
      end
      engine.amp["register_" .. name .. "_function"](place, name)
    end
    local low, high, ids = engine.ones(2, 2, "f16"), engine.ones(2, 2), engine.zeros(2, "i64")
    local expected = { float = { "f32", "f32", "f32", "i64", 5 },
      half = { "f16", "f16", "f16", "i64", 5 }, promote = { "f16", "f32", "f32", "i64", 5 } }
    for name, want in pairs(expected) do
      assert.equal("f32", (place[name](low, high, ids, 5)))
      assert.same({ "f16", "f32", "i64", 5 }, seen)
      engine.autocast("fp16", function()
        local dtype, more = place[name](low, high, ids, 5)
        assert.same({ want[1], "more" }, { dtype, more })
        assert.same({ unpack(want, 2) }, seen)
        assert.equal("f16", high:matmul(high).dtype)         -- the scope is as before
      end)
    end
    engine.autocast("bf16", place.promote, low, engine.ones(1, "bf16"))
    assert.same({ "f32", "f32" }, seen)
    place.fails = function() error("broken", 0) end
    engine.amp.register_float_function(place, "fails")
    engine.autocast("fp16", function()
      assert.is_false((pcall(place.fails, low)))
      assert.equal("f16", high:matmul(high).dtype)
    end)
    for _, arguments in ipairs { { place, "none" }, { 3, "x" }, {} } do
      helper.refuses("amp.register_half_function: expected a table and the name of a function",
        engine.amp.register_half_function, unpack(arguments, 1, 2))
    end
  end)
end)
