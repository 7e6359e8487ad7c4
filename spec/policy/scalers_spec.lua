-- The loss scalers of other systems: the sandbox, `engine replay` and a live run (whose gradients
-- overflow where the trace says) all give the published numbers. Also: which options they refuse,
-- and both ends of the range. Numbers: spec/golden/loss_scalers.json and scaler_unit_cases.json.
local json = require "cjson"
local engine = require "engine"
local helper = require "spec.helper"
local numbers = require("spec.policy.made").numbers

local replay = engine.replay

-- Systems and parameters as the unit cases name them -> policies and options.
local NAMES = {
  deepspeed_fused = { "deepspeed_fused", init = "init_scale", window = "scale_window",
    min = "min_scale" },
  deepspeed_zero = { "deepspeed", init = "init_scale", window = "scale_window", min = "min_scale",
    hysteresis = "hysteresis" },
  tf_dynamic = { "tensorflow", init = "initial_loss_scale", period = "increment_period",
    multiplier = "multiplier" },
  pytorch = { "dynamic", init = "init_scale", growth = "growth_factor", backoff = "backoff_factor",
    interval = "growth_interval" },
  keras3 = { "keras", init = "initial_scale", period = "dynamic_growth_steps" },
  metaseq = { "metaseq", init = "init_scale", window = "scale_window", min = "min_loss_scale" },
}

local cases = {}
for _, case in ipairs(json.decode(helper.read "spec/golden/loss_scalers.json")) do
  cases[#cases + 1] = { name = case.name, policy = case.policy, options = case.options,
    trace = case.trace, scales = numbers(case.scales) }
end
for _, case in ipairs(json.decode(helper.read "spec/golden/scaler_unit_cases.json")) do
  local names, options = NAMES[case.system], {}
  for key, value in pairs(case.params) do options[assert(names[key], key)] = value end
  cases[#cases + 1] = { name = case.source, policy = names[1], options = options,
    trace = case.trace, scales = case.scales }
end

-- A run of real steps whose loss, and therefore every gradient, is infinite where the trace has an
-- x.
local function live(policy, options, trace)
  local steps = replay.trace(trace)
  local scales, at = {}, 0
  local model = engine.nn.linear(2, 1)
  local x = engine.tensor({ { 1, 2 }, { 3, 4 } }, { keep = true })
  local summary = engine.trainer {
    model = model, data = { next = function() at = at + 1 return { x = x } end },
    loss = function(m, batch)
      local loss = m(batch.x):mean() * 1e-30  -- small enough for a scale near the end of f32
      return steps.overflow[at] and loss * (1 / 0) or loss
    end,
    optimizer = engine.optim.sgd(model, { lr = 0.1 }), policy = policy, policy_options = options,
    steps = steps.n, log = "quiet", on_lost = "continue",
    on_step = function(_, record, verdict)
      assert.are.equal(steps.overflow[at] and 1 or 0, record.overflow)
      assert.are.equal(0, verdict.failed, verdict:why())
      scales[#scales + 1] = verdict.scale
    end }:run()
  return scales, summary
end

local function words(case)
  local list = { "--policy", case.policy }
  for name, value in pairs(case.options) do
    list[#list + 1] = name .. "=" .. (type(value) == "number" and ("%.17g"):format(value)
      or tostring(value))
  end
  return list
end

describe("scalers of other systems:", function()
  for _, case in ipairs(cases) do
    it(case.name, function()
      local result = replay.run(replay.trace(case.trace), case.policy, case.options)
      assert.are.same(case.scales, result.scales)
      assert.are.equal(0, result.failures)
      assert.are.same(case.scales, (live(case.policy, case.options, case.trace)))
    end)
  end

  it("the `engine replay` command gives the same numbers", function()
    local by_trace, order = {}, {}
    for _, case in ipairs(cases) do
      if not by_trace[case.trace] then
        by_trace[case.trace] = {}
        order[#order + 1] = case.trace
      end
      table.insert(by_trace[case.trace], case)
    end
    for _, trace in ipairs(order) do
      local arguments = { "replay", trace, "--json" }
      for _, case in ipairs(by_trace[trace]) do
        for _, word in ipairs(words(case)) do arguments[#arguments + 1] = word end
      end
      local result = helper.run(arguments)
      assert.are.equal(0, result.code, result.err)
      local policies = json.decode(result.out).policies
      for i, case in ipairs(by_trace[trace]) do
        assert.are.same(case.scales, policies[i].scales, case.name)
        assert.are.equal(#case.scales, #policies[i].actions)
      end
    end
  end)

  it("test_graph_grad_scaling in real fp16: gradients are 20 inf 10 inf", function()
    local inputs, at, seen = { 5, 20000, 5, 40000 }, 0, {}
    local model = engine.nn.linear(1, 1, { bias = false })
    engine.trainer { model = model, steps = 4, log = "quiet", policy = "dynamic",
      policy_options = { init_scale = 4, growth_interval = 2 },
      data = { next = function() at = at + 1 return { x = engine.tensor { { inputs[at] } } } end },
      loss = function(m, batch)
        return m(batch.x):mean()
      end, optimizer = engine.optim.sgd(model, { lr = 1e-30, precision = "fp16" }),
      on_step = function(_, record, verdict)
        seen[#seen + 1] = { record.overflow ~= 0 and math.huge or record.amax * record.scale,
          verdict.scale }
      end }:run()
    assert.are.same({ { 20, 4 }, { math.huge, 2 }, { 10, 2 }, { math.huge, 1 } }, seen)
  end)

  it("policies/README.md lists each of them", function()
    local readme = helper.read "policies/README.md"
    for _, name in ipairs(engine.policy.names()) do
      assert.truthy(readme:find("`" .. name .. ".lua`", 1, true), name)
    end
  end)
end)

describe("the ends of the range:", function()
  local function run(policy, options, trace)
    return replay.run(replay.trace(trace), policy, options)
  end

  it("defaults that end a run end it where the original raises", function()
    local r = run("deepspeed", {}, "30x")
    assert.are.equal(18, r.stopped_at)
    assert.are.equal("stop", r.actions[18])
    r = run("deepspeed", { hysteresis = 1 }, "30x")
    assert.are.equal(17, r.stopped_at)
    r = run("fairseq", {}, "40x")
    assert.are.equal(29, r.stopped_at)
    assert.are.equal(2 ^ -13, r.scales[29])
    r = run("mindspore", {}, "1100x")
    assert.are.equal(1001, r.stopped_at)
    assert.is_nil(run("mindspore", {}, "1000x . 1000x").stopped_at)
    for _, name in ipairs { "deepspeed_fused", "megatron", "tensorflow", "jmp", "flax", "metaseq",
      "openseq2seq", "bmtrain" } do
      assert.is_nil(run(name, {}, "3000x").stopped_at, name)
    end
    local scales, summary = live("fairseq", {}, "40x")
    assert.are.equal(29, #scales)
    assert.truthy(summary.stopped:find("min_loss_scale", 1, true))
  end)

  it("a scale that would become zero stops the run", function()
    assert.are.equal(166, run("dynamic", {}, "200x").stopped_at)
    assert.are.equal(166, run("nemo", {}, "200x").stopped_at)
    assert.are.equal(1091, run("apex", {}, "1200x").stopped_at)
    assert.are.equal(165, run("keras", {}, "200x").stopped_at)
    assert.are.equal(2 * 165, run("paddle", {}, "400x").stopped_at)
    assert.is_nil(run("paddle", { static_graph = true }, "400x").stopped_at)
    assert.are.equal(167, run("colossalai", {}, "200x").stopped_at)
    assert.are.equal(165, run("jmp", { min_loss_scale = 0 }, "200x").stopped_at)
  end)

  it("a scale that would become infinite stays; with strict=false the run stops", function()
    local function both(policy, options, trace, at)
      local r = run(policy, options, trace)
      assert.is_nil(r.stopped_at, policy)
      local last = r.scales[#r.scales]
      options.strict = false
      r = run(policy, options, trace)
      assert.are.equal(at, r.stopped_at, policy)
      assert.are.equal(last, r.scales[#r.scales])
    end
    both("keras", { initial_scale = 2, dynamic_growth_steps = 2 }, "300.", 254)
    both("megatron", { growth_interval = 1 }, "120.", 96)
    both("colossalai", { growth_interval = 1 }, "120.", 112)
    -- Growth begins at the second step, so step 1009 would reach 2^16 * 2^1008, which is inf.
    both("deepspeed", { scale_window = 1 }, "1100.", 1009)
    both("deepspeed_fused", { scale_window = 1 }, "1100.", 1009)
    both("fairseq", { scale_window = 1 }, "1100.", 1009)
    both("mindspore", { scale_window = 1 }, "1100.", 1000)
    both("paddle", { incr_every_n_steps = 1 }, "120.", 113)
  end)

  it("caps on the scale match the original's", function()
    local largest = (2 - 2 ^ -23) * 2 ^ 127
    assert.are.equal(largest, run("flax", { growth_interval = 0 }, "200.").scales[200])
    assert.are.equal(2 ^ -126, run("flax", {}, "200x").scales[200])
    assert.are.equal(2 ^ 24, run("apex", { scale_window = 1 }, "50.").scales[50])
    assert.are.equal(2 ^ 32, run("colossalai", { growth_interval = 1, max_scale = 2 ^ 32 },
      "50.").scales[50])
    assert.are.equal(1, run("colossalai", { hysteresis = 1, min_scale = 1 }, "50x").scales[50])
    for name, options in pairs { dynamic = { growth_interval = 1 }, nemo = { growth_interval = 1 },
      tensorflow = { increment_period = 1 }, jmp = { period = 1 } } do
      assert.are.equal(2 ^ 127, run(name, options, "200.").scales[200], name)
    end
  end)

  it("an overflow at BMTrain's smallest scale does not reset its count of good steps", function()
    assert.are.same(numbers "1 1 2 2 1", run("bmtrain", { loss_scale = 1, loss_scale_steps = 2 },
      ". x . . x").scales)
    assert.are.same(numbers "1 1 1 2",
      run("tensorflow", { initial_loss_scale = 1, increment_period = 2 }, ". x . .").scales)
  end)

  it("Paddle counts overflows in a row", function()
    local options = { init_loss_scaling = 64, incr_every_n_steps = 100 }
    assert.are.same(numbers "64 64 64 32 32 16", run("paddle", options, "x . x x x x").scales)
    options.use_dynamic_loss_scaling = false
    assert.are.same(numbers "64x4", run("paddle", options, "4x").scales)
  end)

  it("a caller that continues after fairseq's policy stopped the run is stopped again", function()
    local policy = engine.policy.load("fairseq", { init_scale = 2 ^ -13 })
    local record = require("ffi").new("eng_record", { overflow = 1, first_bad = -1 })
    for _ = 1, 3 do
      assert.are.equal("stop", policy:decide(record):what())
      assert.are.equal(2 ^ -13, policy:scale())
    end
  end)
end)

describe("rounding:", function()
  local trace = "5. 2x 3."
  it("float32 where the original's scale is a float32", function()
    local f32 = numbers("85196.796875 110755.8359375 143982.59375 187177.375 243330.59375 " ..
      "170331.421875 119231.9921875 155001.59375 "
      .. "201502.078125 261952.703125")
    local options = { init_scale = 65536, growth_factor = 1.3, backoff_factor = 0.7,
      growth_interval = 1 }
    assert.are.same(f32, replay.run(replay.trace(trace), "nemo", options).scales)
    -- Megatron, ColossalAI, flax and Paddle round the factor first: f32(1.3) is slightly above 1.3,
    -- f32(0.7) slightly below 0.7.
    local megatron = replay.run(replay.trace(trace), "megatron",
      { initial_scale = 65536, growth_factor = 1.3, backoff_factor = 0.7,
      growth_interval = 1, hysteresis = 1 }).scales
    local colossal = replay.run(replay.trace(trace), "colossalai",
      { initial_scale = 65536, growth_factor = 1.3, backoff_factor = 0.7,
      growth_interval = 1, hysteresis = 1 }).scales
    local paddle = replay.run(replay.trace(trace), "paddle",
      { init_loss_scaling = 65536, incr_ratio = 1.3, decr_ratio = 0.7,
      incr_every_n_steps = 1, decr_every_n_nan_or_inf = 1 }).scales
    assert.are.same(megatron, colossal)
    assert.are.same(megatron, paddle)
    local ffi = require "ffi"
    for _, scale in ipairs(megatron) do
      assert.are.equal(scale, tonumber(ffi.cast("float", scale)))
    end
    assert.near(f32[10], megatron[10], f32[10] * 1e-6)
  end)

  it("double where the original's scale is a double", function()
    local r = replay.run(replay.trace "2. x", "fairseq", { init_scale = 65536, scale_factor = 1.3,
      scale_window = 1 })
    assert.are.same({ 65536 * 1.3, 65536 * 1.3 * 1.3, 65536 * 1.3 * 1.3 / 1.3 }, r.scales)
    assert.are.equal(100 * (1 / 3), replay.run(replay.trace "x", "mindspore",
      { init_loss_scale = 100, scale_factor = 3 }).scales[1])
  end)
end)

describe("settings that must be mistakes", function()
  local INF = math.huge
  -- policy -> { suspicious options, which strict=false accepts }, { options that are always refused
  -- }
  local table_of = {
    dynamic = { {}, { { growth_factor = INF }, { growth_factor = 1 }, { init_scale = 0 } } },
    deepspeed = { { { hysteresis = 0 }, { hysteresis = 1.5 }, { init_scale = 1, min_scale = 4 },
      { scale_window = 2.5 } }, { { scale_factor = INF }, { scale_window = 0 } } },
    deepspeed_fused = { { { init_scale = 1, min_scale = 4 }, { scale_window = 2.5 } },
      { { scale_factor = INF }, { scale_window = 0 }, { min_scale = 0 } } },
    megatron = { { { hysteresis = 0 }, { hysteresis = 1.5 }, { initial_scale = 1, min_scale = 4 },
      { growth_interval = 2.5 }, { growth_interval = 0 } },
      { { growth_factor = INF }, { initial_scale = 2 ^ 200 } } },
    colossalai = { { { hysteresis = 0 }, { initial_scale = 1, min_scale = 4 }, { max_scale = 4 },
      { growth_interval = 2.5 } }, { { growth_factor = INF }, { min_scale = -1 } } },
    apex = { { { init_scale = 2 ^ 25 }, { init_scale = 1, min_loss_scale = 4 },
      { scale_window = 2.5 } }, { { init_scale = -1 }, { max_loss_scale = INF } } },
    nemo = { { { hysteresis = 0 }, { growth_interval = 2.5 } },
      { { growth_factor = INF }, { backoff_factor = 1 } } },
    tensorflow = { { { increment_period = 2.5 }, { initial_loss_scale = 0.5 } },
      { { multiplier = INF }, { increment_period = 0 } } },
    keras = { { { dynamic_growth_steps = 2.5 }, { dynamic_growth_steps = 0 } },
      { { initial_scale = 0 } } },
    jmp = { { { period = 2.5 }, { loss_scale = 1, min_loss_scale = 4 } },
      { { factor = INF }, { period = 0 } } },
    flax = { { { growth_interval = 2.5 }, { scale = 1, minimum_scale = 4 } },
      { { growth_factor = INF }, { minimum_scale = 0 } } },
    mindspore = { { { scale_window = 2.5 }, { init_loss_scale = 0.5 }, { scale_factor = 0.5 } },
      { { scale_factor = INF }, { scale_window = 0 } } },
    paddle = { { { incr_every_n_steps = 2.5 }, { decr_every_n_nan_or_inf = 0 } },
      { { incr_ratio = INF }, { decr_ratio = 0 } } },
    fairseq = { { { scale_window = 2.5 }, { tolerance = 2 }, { init_scale = 1, threshold = 2 },
      { init_scale = 1e-4 } }, { { scale_factor = INF }, { tolerance = 0 / 0 } } },
    metaseq = { { { scale_window = 2.5 }, { tolerance = -1 },
      { init_scale = 1, min_loss_scale = 2 } }, { { scale_factor = 1 }, { scale_window = 0 } } },
    openseq2seq = { { { step_window = 2.5 } }, { { step_factor = INF }, { scale_min = 2 ^ 20 } } },
    bmtrain = { { { loss_scale_steps = 2.5 }, { loss_scale = 1, min_loss_scale = 2 } },
      { { loss_scale_factor = INF }, { loss_scale_steps = 0 } } },
    mxnet = { { { scale_seq_len = 2.5 }, { init_scale = 2 ^ 25 } }, { { init_scale = 0 } } },
  }
  for name, kinds in pairs(table_of) do
    it("are refused by " .. name .. "; strict=false accepts the suspicious ones", function()
      local function attempt(options)
        local good, why = pcall(engine.policy.load, name, options)
        return good, tostring(why)
      end
      for _, options in ipairs(kinds[1]) do
        local good, why = attempt(options)
        assert.is_false(good)
        assert.matches("^policies/" .. name .. ".lua: [^\n]+strict=false accepts it$", why)
        options.strict = false
        assert.is_true(attempt(options))
        local r = replay.run(replay.trace "20. 3x 20.", name, options)
        assert.are.equal(0, r.failures, r.failure)
      end
      for _, options in ipairs(kinds[2]) do
        options.strict = false
        local good, why = attempt(options)
        assert.is_false(good)
        assert.matches("^policies/" .. name .. ".lua: [^\n]+, got [%w.+-]+$",
          (why:gsub("finite, got inf", "finite, got inf"):gsub("is above.*", ", got x")))
      end
    end)
  end

  it("behave as in the original where they are accepted", function()
    local function scales(policy, options, trace)
      options.strict = false
      return replay.run(replay.trace(trace), policy, options).scales
    end
    -- never backs off
    assert.are.same(numbers "65536x50", scales("deepspeed", { hysteresis = 0 }, "50x"))
    -- an overflow raises the scale
    assert.are.same({ 4 }, scales("deepspeed", { init_scale = 1, min_scale = 4, hysteresis = 1 },
      "x"))
    -- never grows
    assert.are.same(numbers "16x20",
      scales("megatron", { initial_scale = 16, growth_interval = 2.5 }, "20."))
    assert.are.same({ 4 }, scales("megatron", { initial_scale = 1, min_scale = 4, hysteresis = 0 },
      "x"))
    assert.are.same(numbers "64x5",
      scales("paddle", { init_loss_scaling = 64, decr_every_n_nan_or_inf = 0 }, "5x"))
  end)
end)

describe("hysteresis with random settings as in Apex's kernel test", function()
  local seed = 12345
  local function random(n)  -- integers 1..n, the same on every machine
    seed = (seed * 1103515245 + 12345) % 2 ^ 31
    return math.floor(seed / 65536) % n + 1
  end
  it("holds for any hysteresis, interval and counts", function()
    for _ = 1, 60 do
      local h, interval, n, m = random(6), random(8), random(12), random(20)
      local function last(trace)
        local r = replay.run(replay.trace(trace), "nemo",
          { init_scale = 2 ^ 20, hysteresis = h, growth_interval = interval })
        return r.scales[#r.scales]
      end
      if h > 1 then assert.are.equal(2 ^ 20, last(h - 1 .. "x")) end
      if interval > 1 then assert.are.equal(2 ^ 20, last(interval - 1 .. ".")) end
      assert.are.equal(2 ^ (20 - n - 1), last(h + n .. "x"))
      assert.are.equal(2 ^ (21 + math.floor(m / interval)), last(interval + m .. "."))
    end
  end)
end)

describe("a DeepSpeed configuration", function()
  local folder
  before_each(function() folder = helper.folder() end)
  after_each(function() helper.remove(folder) end)
  local function load(text, options)
    local path = helper.write(folder .. "/ds.json", text)
    local good, result = pcall(engine.policy.load, path, options)
    return good and result or nil, tostring(result):gsub(folder:gsub("%p", "%%%0") .. "/", "")
  end
  local BLOCK = [[{
  "train_batch_size": 8,
  "fp16": {
    "enabled": %s,
    "loss_scale": %s,
    "initial_scale_power": 8,
    "loss_scale_window": 2,
    "hysteresis": 2,
    "min_loss_scale": 1
  }%s
}]]
  local function block(enabled, scale, more) return BLOCK:format(enabled, scale, more or "") end

  it("loads DeepSpeed's policy with the file's numbers", function()
    local p = load(block("true", "0"))
    assert.are.equal("deepspeed", p.name)
    assert.are.equal(256, p.options.init_scale)
    assert.are.equal(2, p.options.scale_window)
    local path = helper.write(folder .. "/ds.json", block('"auto"', "0"))
    local scales = replay.run(replay.trace "4. x . x 5. 2x 6. 3x 3.", path).scales
    assert.are.same(numbers("256 256 512 512 512 512 256 256 256 512 512 1024 1024 512 512 512 " ..
      "1024 1024 2048 2048 2048 1024 512 512 512 1024"), scales)
    assert.are.same(scales, (live(path, nil, "4. x . x 5. 2x 6. 3x 3.")))
    p = load(block("true", "0", ', "zero_optimization": { "stage": 0 }'))
    assert.are.equal("deepspeed_fused", p.name)
    p = load(block("true", "0", ', "zero_optimization": { "stage": 2 }'))
    assert.are.equal("deepspeed", p.name)
  end)

  it("reads comments and trailing commas, and names lines with them", function()
    local text = [[
# a "comment
{ // another {
  "train_batch_size": 8, /* over
  "two" lines, ] */
  "name": "a // # \"b, }", "list": [1, 2 , ],
  "fp16": { "enabled": true, "initial_scale_power": 9, // 512
    %s
  },
}]]
    local p = load(text:format '"hysteresis": 3,')
    assert.same({ "deepspeed", 512, 3 }, { p.name, p:scale(), p.options.hysteresis })
    local _, why = load(text:format '"hysteresi": 3,')
    assert.matches("ds.json:7: fp16 has no key 'hysteresi'; did you mean", why, 1, true)
    _, why = load(text:format '"hysteresis": 3 4')
    assert.matches("ds.json:7: not JSON", why, 1, true)
    _, why = load '{ "fp16": { "enabled": true, /* }'
    assert.matches("ds.json:1: not JSON", why, 1, true)
  end)

  it("is static where loss_scale is not 0, and where fp16 is off", function()
    for text, scale in pairs { ["1"] = 1, ["2.0"] = 2, ['"3"'] = 3, ["1024"] = 1024 } do
      local p = load(block("true", text))
      assert.are.equal("static", p.name)
      assert.are.equal(scale, p:scale())
    end
    assert.are.equal("static", load(block("false", "0")).name)
    assert.are.equal("static", load('{ "bf16": { "enabled": true } }').name)
  end)

  it("accepts every key, in both spellings and as options", function()
    local p = load([[{ "fp16": { "enabled": true, "scale_window": 7,
      "min_scale": 2, "consecutive_hysteresis": true,
      "raise_error_at_min_scale": false,
      "initial_scale_power": 12, "hysteresis": 4, "auto_cast": false,
      "fp16_master_weights_and_grads": false } }]])
    assert.are.same({ init_scale = 4096, scale_factor = 2, scale_window = 7, hysteresis = 4,
      consecutive_hysteresis = true, min_scale = 2,
      raise_error_at_min_scale = false, strict = true }, p.options)
    p = load(block("true", "0"), { loss_scale_window = 50, hysteresis = "3" })
    assert.are.equal(50, p.options.scale_window)
    assert.are.equal(3, p.options.hysteresis)
    p = engine.policy.load("deepspeed", { enabled = true, loss_scale = 0, initial_scale_power = 10,
      loss_scale_window = 5 })
    assert.are.equal(1024, p:scale())
    assert.are.equal(5, p.options.scale_window)
    p = engine.policy.load("deepspeed", { loss_scale = 64 })
    assert.are.equal("static", p.name)
    p = engine.policy.load { fp16 = { enabled = true, initial_scale_power = 4 } }
    assert.are.equal(16, p:scale())
  end)

  it("reports mistakes with file and line", function()
    local function fails(text, pattern)
      local p, why = load(text)
      assert.is_nil(p)
      assert.matches(pattern, why)
      assert.is_nil(why:find("\n"))
    end
    fails(block("true", "0"):gsub("hysteresis", "hysterisis"),
      "^ds.json:8: fp16 has no key 'hysterisis'; did you mean 'hysteresis'%?")
    for text, got in pairs { ["-1"] = "-1", ['"inf"'] = "'inf'", ['"nan"'] = "'nan'",
      ["true"] = "true", ["[1]"] = "a table" } do
      fails(block("true", text), "^ds.json:5: fp16.loss_scale: expected .*, got " ..
        got:gsub("%p", "%%%0") .. "$")
    end
    fails(block("true", "0"):gsub(": 8,", ": 8"), "^ds.json:3: not JSON: ")
    fails(block("1", "0"), "^ds.json:4: fp16.enabled: expected true or false, got 1$")
    fails(block('{ "a": null }', "0"), "expected true or false, got a table$")
    fails(block("true", "0"):gsub('hysteresis": 2', 'hysteresis": 0'),
      "^ds.json: policies/deepspeed.lua: hysteresis must be a whole number of 1 or more, got 0")
    fails(block("true", "0"):gsub('power": 8', 'power": 2000'),
      "^ds.json:6: fp16.initial_scale_power: expected an exponent of 2 from 0 to 1023")
    fails("{}", "^ds.json: expected an fp16 block, such as \"fp16\": {}, found none$")
    fails("[1]", "^ds.json: ")
    fails('{ "fp16": 3 }', "^ds.json:1: fp16: expected an object, got 3$")
    assert.matches("nowhere.json: No such file",
      select(2, pcall(engine.policy.load, "nowhere.json")))
  end)
end)
