-- The studies examples/fp8_*.lua, fp4_*.lua, scale_rules.lua and rounding_bias.lua: their tables
-- match the published ones within sampling error, and a wrong setting is refused in one line.
local engine = require "engine"
local helper = require "spec.helper"

local function run(name, ...) return helper.run { "examples/" .. name .. ".lua", ... } end

--- The numbers in the table line that begins with `label`.
local function row(result, label, from)
  local at = from and result.out:find(from, 1, true) or 1
  local line = result.out:sub(at):match("\n" .. label:gsub("%p", "%%%0") .. " +([^\n]*)")
  assert(line, "no line " .. label .. " in " .. result.out)
  local list = {}
  for word in line:gmatch("%S+") do list[#list + 1] = tonumber(word) end
  return list
end

describe("the FP8 laboratory", function()
  local folder
  setup(function() folder = helper.folder() end)
  teardown(function() helper.remove(folder) end)

  it("bits: ranges and codes", function()
    local result = run("fp8_bits", "numbers=true", "value=0.1", "svg=" .. folder .. "/a.svg")
    assert.equal(0, result.code, result.err)
    assert.matches("\ne4m3 +1%-4%-3 +7 +448 +2^%-6 +2^%-9", result.out)
    assert.matches("\ne5m2 +1%-5%-2 +15 +57344 +2^%-14 +2^%-16", result.out)
    assert.matches("7e 448", result.out)
    assert.matches("e4m3 0 0011 101  0x1d  0.1015625", result.out)
    assert.matches("^<svg", helper.read(folder .. "/a.svg"))
  end)

  it("promotion: the table of Hopper's accumulator", function()
    local result = run("fp8_promotion", "draws=100", "svg=" .. folder .. "/b.svg")
    assert.equal(0, result.code, result.err)
    local function mean(label)
      local none, some, often = result.out:match("\n" .. label ..
        " +([%d.]+) %% %([%d.]+ %%%) +([%d.]+) %% %([%d.]+ %%%) +([%d.]+) %%")
      return tonumber(none), tonumber(some), tonumber(often)
    end
    local function near(want, got)
      assert.is_true(math.abs(got / want - 1) < 0.05, ("%g, expected %g"):format(got, want))
    end
    for label, want in pairs { ["U%[0,1%) +1024"] = { 1.50, 0.58, 0.055 },
      ["U%[0,1%) +4096"] = { 7.46, 0.58, 0.055 }, ["U%[0,1%) +16384"] = { 25.1, 0.58, 0.055 },
      ["|N%(0,1%)| +4096"] = { 6.64, 0.57, 0.060 } } do
      local got = { mean(label) }
      for i = 1, 3 do near(want[i], got[i]) end
    end
  end)

  it("fp4_train: every recipe learns, and the conclusion follows from the seeds", function()
    local result = run("fp4_train", "steps=20", "layers=3", "width=32", "batch=4", "context=32")
    assert.equal(0, result.code, result.err)
    local bf16 = row(result, "bf16")[1]
    assert.is_true(bf16 < 4.5, result.out)            -- log(256) = 5.5 before training
    for _, name in ipairs { "mxfp8", "mxfp4", "mxfp4_tseng", "mxfp4_quartet", "mxfp4_tetrajet",
      "mxfp4_tetrajet_q_ema", "nvfp4", "nvfp4_four_over_six", "nvfp4_quartet2", "mxfp4, floor",
      "nvfp4, ends bf16" } do
      assert.near(bf16, row(result, name)[1], 0.05 * bf16)
    end
    assert.matches("\nConclusion: seeds of bf16 are [%d.]+ %% apart; ", result.out)
    assert.matches("expected a width that is a multiple of 32, and 3 or more layers, got 33 and 4",
      run("fp4_train", "width=33").err, 1, true)
  end)

  it("outliers: block scales matter above 2^12", function()
    local result = run("fp8_outliers", "rows=64")
    assert.equal(0, result.code, result.err)
    local by_row, by_block = row(result, "row"), row(result, "1x128")
    for i, want in pairs { [1] = 31.6, [3] = 31.5, [5] = 31.5, [6] = 28.8, [7] = 17.9 } do
      assert.near(want, by_row[i], 0.4)
    end
    for i, want in pairs { [1] = 31.8, [5] = 31.8, [6] = 31.6, [7] = 28.4 } do
      assert.near(want, by_block[i], 0.4)
    end
  end)

  it("snr: the study as published, and Hopper's numbers", function()
    local result = run("fp8_snr", "samples=100", "svg=" .. folder .. "/c.svg")
    assert.equal(0, result.code, result.err)
    -- columns: r 0, 0.01, 0.1, 0.2, each with n 128, 1024, 4096; medians of 100 draws vary by about
    -- 1.5 dB
    local first, second = "The study", "Hopper's numbers"
    local function like(from, label, wanted)
      local got = row(result, label, from)
      for column, want in pairs(wanted) do
        assert.near(want, got[column], 3, label .. " " .. column)
      end
    end
    like(first, "factor 1", { 0, 0, 0 })
    like(first, "factor 64", { 11.93, 4.64, 0.63 })
    like(first, "  chunks of 128", { 11.93, 11.91, 11.05, [8] = 20.64, [11] = 28.77 })
    like(first, "block scale, whole", { 28.21, 20.42, 11.22 })
    like(first, "  of 128", { 28.21, 28.17, 27.62, [12] = 40.01 })
    like(second, "tensor scale, no promotion", { [3] = 28.64, [9] = 46.68, [11] = 48.62,
      [12] = 40.90 })
    like(second, "  promoted every 128", { [3] = 28.62, [9] = 48.59, [12] = 54.08 })
    like(second, "1x128, promoted every 128", { [3] = 28.92, [12] = 55.28 })
  end)

  it("train: a GPT and a mixture under several recipes", function()
    for _, model in ipairs { "gpt", "moe" } do
      local result = run("fp8_train", "model=" .. model, "steps=12", "seeds=2", "width=32",
        "layers=1", "batch=4", "context=32", "recipes=bf16,fp16,fp8_block,fp8_delayed",
        "svg=" .. folder .. "/d.svg")
      assert.equal(0, result.code, result.err)
      for _, recipe in ipairs { "bf16", "fp16", "fp8_block", "fp8_delayed" } do
        local loss, apart = result.out:match("\n" .. recipe ..
          " +([%d.]+) %+%- [%d.]+ +([%+%-][%d.]+) %+%-")
        assert.is_true(tonumber(loss) < 5.6, recipe)
        assert.is_true(math.abs(tonumber(apart)) < 1, recipe)
      end
    end
  end)

  it("memory: each role takes what shapes and formats predict, and less under FP8", function()
    for _, settings in ipairs { { "model=llama", "recipe=fp8_block" },
      { "model=gpt", "recipe=fp8_current" } } do
      local result = run("fp8_memory", "width=64", "layers=2", "context=32",
        unpack(settings))
      assert.equal(0, result.code, result.err)
      for _, role in ipairs { "masters", "low%-precision copies", "FP8 copies", "gradients",
        "moments", "kept for backward", "  of which in FP8" } do
        local a, b, c, d = result.out:match("\n" .. role ..
          " +([%d.]+) +([%d.]+) +([%d.]+) +([%d.]+)")
        assert.is_true(math.abs(a - b) <= 0.011 and math.abs(c - d) <= 0.011, result.out)
      end
      assert.is_true(tonumber(result.out:match("kept for backward.- ([%d.]+)\n")) < 0.95,
        result.out)
    end
  end)

  it("fp4_train: a table of recipes beside bf16, and a conclusion", function()
    local result = run("fp4_train", "seeds=1", "steps=3", "layers=3", "width=32", "context=16",
      "batch=2", "recipes=^nvfp4, ends")
    assert.equal(0, result.code, result.err)
    assert.matches("\nbf16 +[%d.]+ .-\nnvfp4, ends bf16 +[%d.]+ .-\nConclusion: .-one seed",
      result.out)
    result = run("fp4_train", "seeds=1", "steps=10", "layers=3", "width=32", "context=16",
      "batch=2", "recipes=late$", "data=README.md", "svg=" .. folder .. "/late.svg")
    assert.matches("\nnvfp4, forward bf16 late +[%d.]+ ", result.out)
    assert.matches("^<svg.*nvfp4, forward bf16 late.*</svg>", helper.read(folder .. "/late.svg"))
    result = run("fp4_train", "layers=2")
    assert.equal(1, result.code)
    assert.matches("expected a width", result.err, 1, true)
  end)

  it("fp4_blame and scale_rules: tables beside bf16, and conclusions from orders", function()
    local small = { "seeds=2", "steps=3", "layers=1", "width=32", "context=32", "batch=2" }
    local result = run("fp4_blame", unpack(small))
    assert.equal(0, result.code, result.err)
    for _, name in ipairs { "forward", "dgrad", "wgrad", "wgrad, random Hadamard", "all" } do
      assert.near(row(result, "bf16")[1], row(result, name)[1], 0.2)
    end
    assert.matches("\nConclusion, from orders that every seed confirms: .-wgrad", result.out)
    assert.matches("multiples of 32, got 33", run("fp4_blame", "width=33").err, 1, true)
    result = run("scale_rules", unpack(small))
    assert.equal(0, result.code, result.err)
    assert.near(41.5, row(result, "floor")[1], 1)               -- derived: 1 - log2(1.5)
    assert.near(0, row(result, "rceil")[1], 1e-9)
    assert.matches("\nConclusion: floor's excess loss is [+-]%d", result.out)
  end)

  it("fp4_oscillation: Q-EMA and Q-Ramping train, and some weights oscillate", function()
    local result = run("fp4_oscillation", "seeds=1", "steps=120", "calibrate=40", "width=32",
      "layers=1", "batch=4", "context=32")
    assert.equal(0, result.code, result.err)
    local bf16 = row(result, "bf16")[1]
    for _, name in ipairs { "TetraJet", "with Q-EMA", "with Q-Ramping" } do
      local loss, _, share = unpack(row(result, name))
      assert.near(bf16, loss, 0.05 * bf16)
      assert(share > 0 and share < 10, result.out)
    end
    assert.matches("expected 31 or more steps", run("fp4_oscillation", "steps=9").err, 1, true)
  end)

  it("fp4_oscillation: Q-Ramping sums gradients over a period and multiplies the rate", function()
    local source = helper.read "examples/fp4_oscillation.lua"
    local register = loadstring(source:match "engine%.optim%.register%b()")
    setfenv(register, { engine = engine, math = math })()
    local lr, decay, beta1, beta2, eps = 0.01, 0.1, 0.9, 0.99, 1e-8
    local model = engine.nn.linear(4, 1, { bias = false })
    local opt = engine.optim.adamw_ramping(model, { lr = lr, weight_decay = decay, beta2 = beta2 })
    local elements, periods = {}, { 0, 2, 3, 6 }               -- 0: not measured yet, as 1
    for i, w in ipairs(model.weight:view(4):totable()) do
      elements[i] = { w = w, sum = 0, n = 0, m = 0, v = 0 }
    end
    math.randomseed(1)
    for t = 1, 20 do
      if t == 11 then periods = { 6, 1, 2, 3 } end           -- a calibration amid the periods
      opt:state_tensors()["weight.period"]:copy(engine.tensor { periods })
      local g = {}
      for i = 1, 4 do g[i] = math.random() - 0.5 end
      helper.step(function()
        opt:zero_grad()
        model(engine.tensor { g }):sum():backward()
        opt:step()
      end)
      for i, e in ipairs(elements) do
        e.w, e.sum, e.n = e.w * (1 - lr * decay), e.sum + g[i], e.n + 1
        if e.n % math.max(1, periods[i]) == 0 then
          local mean = e.sum / e.n
          e.m, e.v = beta1 * e.m + (1 - beta1) * mean, beta2 * e.v + (1 - beta2) * mean ^ 2
          e.w = e.w - lr * e.n * e.m / (1 - beta1 ^ t) / (math.sqrt(e.v / (1 - beta2 ^ t)) + eps)
          e.sum, e.n = 0, 0
        end
        assert.near(e.w, model.weight:view(4):totable()[i], 1e-6, ("step %d, %d"):format(t, i))
      end
    end
  end)

  it("rounding_bias: the biases that the rules imply", function()
    local result = run("rounding_bias", "draws=4000")
    assert.equal(0, result.code, result.err)
    local mslk = row(result, "mslk")
    for k, want in pairs { -0.1, -0.3, -0.2, -0.1, 0 } do assert.near(want, mslk[k], 0.002) end
    for k, bias in ipairs(row(result, "te")) do
      if k <= 10 then assert.is_true(bias <= 0 and bias > -2 / 256) end
    end
    assert.is_true(row(result, "engine, 24 bits")[11] < 0.03)
    assert.matches("more\nthan 1/20 of a step: mslk; floats, byte 2; floats, byte 3%.", result.out)
  end)

  it("gpt.lua and gpt2.lua take every FP8 recipe", function()
    local path = os.tmpname()
    helper.write(path, ("\1\0\2\0\3\0\4\0"):rep(200))
    for _, recipe in ipairs { "fp8_delayed", "fp8_current", "fp8_rowwise", "fp8_block",
      "fp8_block_te", "mxfp8", "mxfp4", "mxfp4_tseng", "mxfp4_quartet", "mxfp4_tetrajet_q_ema",
      "nvfp4", "nvfp4_four_over_six", "nvfp4_quartet2" } do
      for name, more in pairs { gpt = "sample=0", gpt2 = "data=" .. path } do
        local result = run(name, "precision=" .. recipe, "steps=2", "layers=1", "width=16",
          "heads=2", "context=8", "batch=2", more, name == "gpt2" and "vocab=64" or "log=quiet")
        assert.equal(0, result.code, result.err)
      end
    end
    os.remove(path)
  end)

  it("refuses wrong settings in one line", function()
    for name, wrong in pairs { bits = "format=e3m4", promotion = "draw=3", outliers = "rows=many",
      snr = "smaples=2", train = "model=rnn", memory = "model=rnn" } do
      local result = run("fp8_" .. name, wrong)
      assert.not_equal(0, result.code)
      assert.matches("^engine: config: [^\n]*\n$", result.err)
    end
    for name, wrong in pairs { outliers = "share=2", promotion = "draws=0",
      snr = "svg=/nowhere/x.svg", memory = "width=3", bits = "svg=spec", train = "threads=-1" } do
      local result = run("fp8_" .. name, wrong)
      assert.same({ 1, "" }, { result.code, result.out })
      assert.matches("^engine: config: [^\n]*\n$", result.err)
    end
    assert.equal("engine: config: recipes: expected one or more of fp32, bf16, fp16, " ..
      "fp8_delayed, fp8_current, fp8_rowwise, fp8_block, fp8_block_te, got an empty list\n",
      run("fp8_train", "recipes=", "steps=1").err)
    local result = run("fp8_train", "recipes=fp8_blok", "steps=1")
    assert.not_equal(0, result.code)
    assert.matches("^engine: config: recipes: expected one of [^\n]*, got 'fp8_blok'; did you " ..
      "mean 'fp8_block'%?\n$", result.err)
  end)
end)
