-- FP8 recipes: what a table on a base means, and invalid recipes. An invalid one is reported in one
-- line, as are layers whose shapes a recipe cannot quantize.
local engine = require "engine"
local helper = require "spec.helper"

local C, nn, with_gradient = require("engine.base.ffi").C, engine.nn, helper.in_step

describe("an FP8 recipe", function()
  local function message(recipe) return helper.failure(engine.precision.resolve, recipe) end
  it("that is invalid is reported in one line", function()
    for text, of in pairs {
      ["unknown field 'y'"] = { base = "fp8_block", fp8 = { y = {} } },
      ["expected format e4m3 or e5m2, got 'e3m4'"] = { base = "fp8_block",
        fp8 = { x = { format = "e3m4" } } },
      ["'1x128' or { rows, columns }, got 'blocks'"] = { base = "fp8_block",
        fp8 = { w = { block = "blocks" } } },
      ["torchao or transformer_engine, got 'mine'"] = { base = "fp8_block",
        fp8 = { w = { rule = "mine" } } },
      ["expected accumulator device, e4m3, exact, fp32 or hopper, got 'fp16'"] = {
        base = "fp8_block",
        fp8 = { forward = { accumulator = "fp16" } } },
      ["precision 'custom' (base fp8_block): fp8: dy: roles with the rule deepgemm have no " ..
        "option 'formt'; did you mean 'format'?; options: block eps format keep margin pow2 " ..
        "rule stochastic"] = { base = "fp8_block",
        fp8 = { dy = { formt = "e5m2" } } },
      ["x: expected eps to be a number, got 'a'"] = { base = "fp8_block",
        fp8 = { x = { eps = "a" } } },
      ["x: expected eps within +-1e30 (negative: the rule's default), got -inf"] = {
        base = "fp8_block", fp8 = { x = { eps = -1 / 0 } } },
      ["x: expected a table, got 'e4m3'"] = { base = "fp8_block", fp8 = { x = "e4m3" } },
      ["{ rows, columns }, got '1x0'"] = { base = "fp8_block", fp8 = { x = { block = "1x0" } } },
      ["w: keep sets how the tape stores x for dW; expected keep only in x"] = { base = "fp8_block",
        fp8 = { w = { keep = "transposed" } } },
      ["match: expected a Lua pattern of module paths, got nothing"] = { base = "fp8_block",
        fp8 = { layers = { { x = {} } } } },
      ["unknown field 1;"] = { base = "fp8_block", fp8 = { "x" } },
      ["expected name to be a string, got a table"] = { name = {}, base = "fp8_block" },
      ["expected base to be a string, got 3"] = { base = 3 },
      ["expected scaled to be true or false (whether it needs a loss scale), got 'no'"] = {
        base = "fp8_block", scaled = "no" },
      ["precision 'custom' (base fp16): fp8: expected x, w or dy, because the base has no FP8 " ..
        "layers; hint: base = \"fp8_current\" or another"] = { base = "fp16",
        fp8 = { sample = 1 } },
    } do assert.is_truthy(message(of):find(text, 1, true), message(of)) end
  end)
  it("with a bad ladder is refused before training", function()
    for text, rung in pairs {
      ["x: expected a table, got 'e5m2'"] = { x = "e5m2" },
      ["x: roles with the rule transformer_engine have no option 'formt'; did"] = {
        x = { formt = 1 } },
      ["forward: expected a table, got true"] = { forward = true },
      ["unknown field 'match'; fields: dgrad dy forward w wgrad x"] = { match = "mlp" },
      ["unknown field 'high'"] = { high = true }, ["unknown field 'base'"] = { base = "mxfp8" },
      ["nvfp4, nvfp4_four_over_six or nvfp4_quartet2, got 'mxfp9'; did you mean 'mxfp"] = "mxfp9",
      ["a table of changes or the name fp4_microsoft, fp8_block"] = "bf16",
      ["nvfp4_quartet2, got 3"] = 3,
      ["forward: only the forward product can be in high precision, and only in microscaling"] = {
        forward = { high = true } },
    } do
      local why = message { name = "mine", base = "fp8_current", fp8 = { ladder = { rung } } }
      assert.matches("precision 'mine' (base fp8_current): fp8: ladder[1]: ", why, 1, true)
      assert.is_truthy(why:find(text, 1, true), why)
    end
  end)
  it("with a map or a list with a gap instead of a list is refused, with an example", function()
    for name, of in pairs { layers = { match = "mlp", x = {} }, high = { a = "b" },
      ladder = { forward = { high = true } }, policy = { name = "fp8_delayed" } } do
      for _, value in ipairs { of, { [2] = of }, 3 } do
        local why = message { base = "fp8_current", fp8 = { [name] = value } }
        assert.is_truthy(why:find("expected " .. name, 1, true), why)
        assert.is_truthy(value == 3 or why:find("to be a list, such as {", 1, true), why)
      end
    end
  end)
  it("on a base: roles and products change single fields, a rule of its own starts anew", function()
    local function on(base, own)
      return engine.precision.resolve({ base = base, fp8 = own }).fp8
    end
    local mine = on("fp8_block", { dy = { format = "e5m2" }, forward = { accumulator = "exact" } })
    assert.same({ format = "e5m2", block = "1x128", rule = "deepgemm" }, mine.dy)
    assert.same({ promotion = 128, accumulator = "exact" }, mine.forward)
    assert.same(engine.precision.resolve("fp8_block").fp8.x, mine.x)
    local w = { format = "e2m3", rule = "even", block = "1x32" }
    mine = on("nvfp4", { w = w, wgrad = { accumulator = "fp32" }, high = { "^2$" },
      forward = { accumulator = "fp32" }, dgrad = { accumulator = "fp32" } })
    assert.same(w, mine.w)
    assert.same({ hadamard = 16, accumulator = "fp32" }, mine.wgrad)
    assert.same({ "^2$" }, mine.high)
    mine = on("fp16", { x = { format = "e5m2" } })
    assert.same({ x = { format = "e5m2" } }, mine)
  end)
  it("on a base of the other kind, FP8 or microscaling, keeps no product and no layer", function()
    for _, case in ipairs { { "fp8_block", "rceil" }, { "fp8_block_te", "nvfp4" },
      { "nvfp4", "deepgemm" }, { "mxfp4_tseng", "torchao" } } do
      local role = { rule = case[2] }
      local mine = engine.precision.resolve({ base = case[1],
        fp8 = { x = role, w = role, dy = role, wgrad = { accumulator = "device" } } }).fp8
      assert.same({ x = role, w = role, dy = role, wgrad = { accumulator = "device" },
        high = { "^head", "^lm_head" } }, mine)
    end
  end)
  it("is a copy: changes reach neither the shipped recipe nor the given one", function()
    local resolve = engine.precision.resolve
    local given = { base = "fp8_current", fp8 = { x = { format = "e5m2" } } }
    for _, recipe in ipairs { "mxfp8", "fp8_current", given } do
      local full = resolve(recipe)
      assert.is_true(engine.precision.same(full, resolve(recipe)))
      full.fp8.dy.format, full.fp8.x.format, full.fp8.high[1] = "e2m1", "e2m1", "all"
      assert.is_false(engine.precision.same(full, resolve(recipe)))
    end
    assert.equal("e4m3", resolve("mxfp8").fp8.dy.format)
    assert.equal("e5m2", resolve("fp8_delayed").fp8.dy.format)
    assert.equal("^head", resolve("fp8_block").fp8.high[1])
    assert.equal("e5m2", given.fp8.x.format)
  end)
  it("is printed in full with the layers that it covers", function()
    local model = nn.sequential { nn.linear(128, 128), nn.linear(128, 128) }
    local opt = engine.optim.sgd(model, { precision = { name = "mine", base = "fp8_block",
      fp8 = { high = { "^2$" }, w = { pow2 = true }, forward = { accumulator = "exact" } } } })
    local text = tostring(opt.fp8)
    for _, line in ipairs { "precision mine, based on fp8_block", "  moments           bf16",
      "  fp8 x             e4m3, scale per 1x128 (rule deepgemm), to nearest",
      "  fp8 w             e4m3, scale 2^n per 128x128 (rule deepgemm), to nearest",
      "  fp8 forward       y = x W^T, quantized, accumulator exact, promotion 128",
      "  fp8 dgrad         dx = dy W, quantized, accumulator device, promotion 128",
      "    device          hopper on a card, else fp32",
      "  high precision    layers that match ^2$",
      "1 linear layer in FP8; linear layers in high precision: 2" } do
      assert.matches(line .. "\n", text, 1, true)
    end
    assert.equal(engine.precision.describe(opt.precision), text:sub(1, text:find("\n1 linear") - 1))
    assert.matches("  DeepSeek-V3, arXiv 2412.19437", tostring(engine.optim.sgd(model,
      { precision = "fp8_block" }).fp8), 1, true)
  end)
  it("stays in the model when a later optimizer is refused", function()
    local model = nn.sequential { nn.linear(128, 128) }
    local opt = engine.optim.sgd(model, { precision = "fp8_current" })
    local site = rawget(model[1], "_fp8")
    helper.refuses("expected moments to be 'f32' or 'bf16', got 'f16'", engine.optim.sgd, model,
      { moments = "f16" })
    assert.equal(tonumber(opt.fp8.list[1].id), site)
    assert.equal(site, rawget(model[1], "_fp8"))
  end)
  it("with blocks that do not nest, or a promotion not divisible by 32, is refused by layer",
    function()
    local model = nn.sequential { nn.linear(256, 256) }
    local function refused(fp8_table, text)
      helper.refuses(text, engine.optim.sgd, model,
        { precision = { base = "fp8_block", fp8 = fp8_table } })
    end
    refused({ x = { block = "1x96" } },
      "fp8: forward: along the summed dimension, blocks of x have 96 elements and blocks of w " ..
        "have 128; one must divide the other")
    refused({ forward = { promotion = 100 } },
      "fp8: forward: expected a promotion interval that is a multiple of 32, or 0, got 100")
    refused({ x = { block = { -1, 3 } } },
      "fp8: x: expected the number of rows in a block to be a whole number of 0 or more, got -1")
    refused({ high = { "." } }, "no linear layer is in FP8")
    -- a typo must not pass unnoticed
    refused({ high = { "^head", "^blcks%.1" } },
      "fp8: high: the pattern '^blcks%.1' matches no linear layer of this model; linear layers: 1")
    refused({ layers = { { match = "^1$", high = true }, { match = "blcks" } } },
      "fp8: layers[2]: the pattern 'blcks' matches no linear layer of this model")
    refused({ high_last = 1 },
      "fp8: high_last counts modules named blocks.1, blocks.2 and so on, and this model has none")
    refused({ high = { "^$" } }, "the pattern '^$' matches no linear layer of this model")
    refused({ policy = "dynamic" },
      "fp8: policy: policy dynamic chooses a loss scale and does not work on FP8 layers; hint: " ..
      "use forward_high_before_decay, fp8_delayed, fp8_fallback, fp8_lm, layer_ladder, sqrt3, " ..
      "or a file")
    refused({ policy = "fp8_delayd" },
      "fp8: policy: there is no FP8 policy 'fp8_delayd'; did you mean 'fp8_delayed'?")
  end)
  it("reports shapes that it cannot quantize", with_gradient(function()
    local layer = nn.linear(12, 8)
    engine.optim.sgd(layer, { precision = { base = "fp8_block",
      fp8 = { x = { format = "e4m3", block = "1x128", keep = "e5m6" } } } })
    helper.refuses("needs a row length that is a multiple of 8",
      engine.autocast, "fp8_block",
      function() return layer(engine.randn(4, 12)) end)
  end))
  it("does not delay the scales of blocks", function()
    local layer = nn.linear(128, 8)
    local opt = engine.optim.sgd(layer, { precision = "fp8_block" })
    for _, bad in ipairs { 1, -1, 0 / 0, 1 / 0 } do
      assert.are_not.equal(0, C.eng_fp8_delay(opt.fp8.list[1].id, 0, bad))
    end
  end)
end)
