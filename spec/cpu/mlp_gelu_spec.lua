-- A feed-forward block in one operation, mlp_gelu, equals linear, gelu and linear: the same bits in
-- f32; in f16 and bf16 the backward pass has one rounding less. Also: which blocks use it and which
-- do not.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local nn, bytes = engine.nn, require("spec.devices").bytes

--- The block with separate operations, never mlp_gelu.
local function apart(mlp)
  rawset(mlp.up, "forward", function(self, x) return x:linear(self.weight,
    rawget(self, "bias")) end)
  return mlp
end

--- |a - b| / |b| over all elements
local function distance(a, b)
  a, b = a:to("f64"), b:to("f64")
  return (((a - b) ^ 2):sum() / (b ^ 2):sum()):item() ^ 0.5
end

--- Runs two forward and backward passes through a block under a recipe, accumulating gradients;
--- returns y and every gradient, kept.
local function pass(recipe, make, bias)
  engine.seed(11)
  local mlp = make(nn.mlp(48, 176, { bias = bias, std = 0.3 }))
  local optimizer = engine.optim.sgd(mlp, { lr = 0.1, precision = recipe })
  local x, result = engine.randn(2, 37, 48):keep():requires_grad(true), {}
  for turn = 1, 2 do
    engine.begin_step()
    local y = engine.autocast(recipe, mlp, x)
    result["y" .. turn] = y:keep()
    ;(y * y):sum():backward()
    result["dx" .. turn] = x.grad:keep()
    engine.end_step()
  end
  for _, p in ipairs(mlp:parameters()) do result[p.name] = p.tensor.grad:keep() end
  return result, optimizer
end

describe("a feed-forward block", function()
  after_each(function() engine.end_step() end)

  it("in one operation is bit-identical to the separate operations in f32", function()
    for _, bias in ipairs { true, false } do
      local one, parts = pass("fp32", function(m) return m end, bias), pass("fp32", apart, bias)
      local n = 0
      for name, want in pairs(parts) do
        assert(bytes(want) == bytes(one[name]), name .. " differs")
        n = n + 1
      end
      assert.equal(bias and 8 or 6, n)
    end
  end)

  for recipe, unit in pairs { bf16 = 2 ^ -8, fp16 = 2 ^ -11 } do
    it("in one operation differs from the separate operations only by rounding in " .. recipe,
      function()
      local one, parts, truth = pass(recipe, function(m) return m end), pass(recipe, apart),
        pass("fp32", apart)
      assert(bytes(parts.y1) == bytes(one.y1), "expected the same bits of y1")
      for name, want in pairs(parts) do
        assert.equal(want.dtype, one[name].dtype, name)
        assert(distance(one[name], want) < 2 * unit, ("%s: differs by %.3g"):format(name,
          distance(one[name], want)))
        local error_one, error_parts = distance(one[name], truth[name]), distance(want, truth[name])
        assert(error_one < 1.1 * error_parts,
          ("%s: error %.3g, separate operations %.3g"):format(name, error_one, error_parts))
      end
    end)
  end

  it("runs in one operation if it is made of two plain linear layers and the tanh form", function()
    local x = engine.randn(3, 8):keep()
    local function runs_in_one(mlp)
      local text = tostring(engine.profile(function() engine.scope(mlp, x) end))
      return text:find("mlp_gelu", 1, true) ~= nil
    end
    assert.is_true(runs_in_one(nn.mlp(8, 32)))
    assert.is_true(runs_in_one(nn.mlp(8, 32, { bias = false })))
    assert.is_false(runs_in_one(nn.mlp(8, 32, { gelu = "erf" })))
    assert.is_false(runs_in_one(apart(nn.mlp(8, 32))))
    local adapted, Adapter = nn.mlp(8, 32), nn.class("adapter")
    function Adapter:init(inner) self.inner = inner end
    function Adapter:forward(y) return self.inner(y) * 2 end
    adapted.down = Adapter(adapted.down)
    assert.is_false(runs_in_one(adapted))
    local scaled = nn.mlp(8, 32)
    rawset(scaled.up, "_relative_scale", 2)
    assert.is_false(runs_in_one(scaled))
    local quantized = nn.mlp(8, 32)
    assert.is_true(runs_in_one(quantized))
    engine.optim.sgd(quantized, { lr = 0.1, precision = "fp8_current" })
    assert.is_false(runs_in_one(quantized))
  end)

  it("computes only the requested gradients", function()
    local mlp, x = nn.mlp(8, 32), engine.randn(5, 8):keep()
    mlp.up.weight:requires_grad(false)
    mlp.down.bias:requires_grad(false)
    engine.begin_step()
    mlp(x):sum():backward()
    local other = apart(nn.mlp(8, 32))
    other:load_state(mlp:state())
    other(x):sum():backward()
    assert.is_nil(mlp.up.weight.grad)
    assert.is_nil(mlp.down.bias.grad)
    assert.equal(bytes(other.up.bias.grad), bytes(mlp.up.bias.grad))
    assert.equal(bytes(other.down.weight.grad), bytes(mlp.down.weight.grad))
    engine.end_step()
  end)

  it("counts what it keeps for the backward pass, and frees what no rule reads", function()
    engine.begin_step()
    local x, up, down = engine.randn(4, 8), engine.randn(16, 8):requires_grad(true),
      engine.randn(8, 16)
    local results, fp8 = { M_ffi.run("mlp_gelu", { x, up, false, down, false }, {}, {}, 3) },
      M_ffi.new("int64_t[1]")
    local kept = tonumber(M_ffi.C.eng_tape_bytes(fp8))
    assert(kept >= 4 * (4 * 8 + 16 * 8 + 8 * 16 + 2 * 4 * 16), kept)   -- x, both weights, u, h
    for _, y in ipairs { results[2], results[3] } do y:done() end
    assert.equal(kept, tonumber(M_ffi.C.eng_tape_bytes(fp8)))
    results[1]:sum():backward()
    assert.is_true(up.grad:abs():sum():item() > 0)
  end)

  it("returns f64 for f64 inputs, and autocast lowers it like linear", function()
    engine.begin_step()
    local function of(dtype)
      return engine.randn({ 3, 8 }, dtype):mlp_gelu(engine.randn({ 16, 8 }, dtype), nil,
        engine.randn({ 4, 16 }, dtype))
    end
    assert.equal("f64", engine.autocast("bf16", of, "f64").dtype)
    assert.equal("bf16", engine.autocast("bf16", of, "f32").dtype)
    assert.equal("f16", engine.autocast("fp16", of, "f32").dtype)
    assert.equal("f32", of("f32").dtype)
    engine.end_step()
  end)

  it("names the shapes that do not fit", function()
    engine.begin_step()
    local x, up, down = engine.ones(3, 8), engine.ones(16, 8), engine.ones(4, 16)
    assert.error_matches(function() x:mlp_gelu(up, nil, up) end,
      "mlp_gelu: expected x [.. x C] and weights [H x C] and [N x H], got f32 [3 x 8], f32 [16 " ..
      "x 8] and f32 [16 x 8]", 1, true)
    assert.error_matches(function() x:mlp_gelu(up, engine.ones(4), down) end,
      "mlp_gelu: expected a first bias of shape [16], got f32 [4]", 1, true)
    assert.error_matches(function() x:mlp_gelu(up) end, "mlp_gelu", 1, true)
    engine.end_step()
  end)
end)
