-- The rules of dynamic, deepspeed and static in detail, and of every policy: resuming from a state
-- saved at any step. scalers_spec.lua compares scales with those of the systems that the policies
-- reproduce.
local json = require "cjson"
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local helper = require "spec.helper"
local modes = require "engine.train.modes"
local policies = require "engine.policy.policy"
local numbers = require("spec.policy.made").numbers

local record = M_ffi.new("eng_record")
local function decide(policy, step, overflow)
  record.step, record.scale, record.overflow, record.first_bad, record.norm_ref = step,
    policy:scale(), overflow and 1 or 0, -1, 0 / 0
  local verdict = policy:decide(record)
  assert.are.equal(0, verdict.failed, verdict:why())
  return verdict
end

-- Runs steps first to last of a trace (by default all). Returns `scales`, with the scale after each
-- of these steps.
local function run(policy, trace, first, last, scales)
  local steps = engine.replay.trace(trace)
  scales = scales or {}
  for i = first or 1, last or steps.n do
    scales[i] = decide(policy, i - 1, steps.overflow[i]).scale
  end
  return scales
end

local function state_number(policy, name)
  return tonumber(policy:save():match("[{,]" .. name .. "=([^,}]+)"))
end

describe("policy dynamic", function()
  it("counts good steps as PyTorch does", function()
    for _, case in ipairs(json.decode(helper.read("spec/golden/loss_scalers.json"))) do
      if case.growth_tracker then
        local policy, trackers = engine.policy.load(case.policy, case.options), {}
        local expected = numbers(case.growth_tracker)
        for i = 1, #expected do
          run(policy, case.trace, i, i)
          trackers[i] = state_number(policy, "growth_tracker")
        end
        assert.are.same(expected, trackers)
      end
    end
  end)

  it("has PyTorch's defaults", function()
    local p = engine.policy.load("dynamic")
    assert.are.equal(65536, p:scale())
    assert.are.same({ init_scale = 65536, growth_factor = 2, backoff_factor = 0.5,
      growth_interval = 2000, strict = true }, p.options)
    for step = 1, 1999 do assert.are.equal(65536, decide(p, step, false).scale) end
    assert.are.equal(131072, decide(p, 2000, false).scale)
  end)

  it("reaches 2^-149 at overflow 165 and stops where PyTorch's scale becomes zero", function()
    local p = engine.policy.load("dynamic")
    for step = 1, 164 do decide(p, step, true) end
    local verdict = decide(p, 165, true)
    assert.are.equal(2 ^ -149, verdict.scale)
    assert.are.equal("skip", verdict:what())
    verdict = decide(p, 166, true)
    assert.are.equal("stop", verdict:what())
    assert.are.equal(2 ^ -149, verdict.scale)
    assert.truthy(verdict:why():find("a reason other than the scale", 1, true))
    assert.are.equal(2 ^ -149, decide(p, 167, false).scale)
    assert.are.equal(1, state_number(p, "growth_tracker"))
  end)

  it("keeps the scale where growth would reach infinity", function()
    local p = engine.policy.load("dynamic", { init_scale = 2 ^ 127, growth_interval = 1 })
    assert.are.equal(2 ^ 127, decide(p, 0, false).scale)
    assert.are.equal(2 ^ 126, decide(p, 1, true).scale)
  end)

  it("gives a reason exactly when the scale changes", function()
    local p = engine.policy.load("dynamic", { growth_interval = 2 })
    assert.are.equal("", decide(p, 0, false):why())
    assert.are.equal("2 good steps in a row: scale 65536 -> 131072", decide(p, 1, false):why())
    assert.are.equal("overflow: scale 131072 -> 65536", decide(p, 2, true):why())
  end)

  it("refuses settings that must be mistakes", function()
    local function refused(options, text)
      assert.has_error(function() engine.policy.load("dynamic", options) end, text)
    end
    refused({ growth_factor = 1 }, "policies/dynamic.lua: growth_factor must be greater than 1 " ..
      "and finite, got 1")
    refused({ backoff_factor = 1 },
      "policies/dynamic.lua: backoff_factor must lie strictly between 0 and 1, got 1")
    refused({ backoff_factor = 0 },
      "policies/dynamic.lua: backoff_factor must lie strictly between 0 and 1, got 0")
    refused({ init_scale = 0 }, "policies/dynamic.lua: init_scale must be a positive number " ..
      "that float32 can hold, got 0")
    refused({ init_scale = 1e39 }, "policies/dynamic.lua: init_scale must be a positive number " ..
      "that float32 can hold, got 1e+39")
    refused({ init_scale = 0 / 0 },
      "policies/dynamic.lua: init_scale must be a positive number that float32 can hold, got nan")
    assert.has_error(function() engine.policy.load("dynamic", { growth_interval = 2.5 }) end)
    assert.has_error(function() engine.policy.load("dynamic", { growth_interval = 0 }) end)
    -- like PyTorch: never grows
    local p = engine.policy.load("dynamic", { growth_interval = 2.5, strict = false })
    assert.are.same(numbers("65536x10"), run(p, "10."))
  end)
end)

describe("policy deepspeed", function()
  it("has DeepSpeed's defaults and stops at the 18th overflow in a row", function()
    local p = engine.policy.load("deepspeed")
    for step = 1, 17 do assert.are.equal("skip", decide(p, step, true):what()) end
    assert.are.equal(1, p:scale())
    local before = p:save()
    local verdict = decide(p, 18, true)
    assert.are.equal("stop", verdict:what())
    assert.are.equal(1, verdict.scale)
    assert.truthy(verdict:why():find("overflow at the smallest loss scale 1", 1, true))
    assert.truthy(verdict:why():find("raise_error_at_min_scale=false", 1, true))
    assert.are.equal(before, p:save())        -- the original raises before it counts the step
  end)

  it("stops one overflow earlier with hysteresis 1", function()
    local p = engine.policy.load("deepspeed", { hysteresis = 1 })
    for step = 1, 16 do assert.are.equal("skip", decide(p, step, true):what()) end
    assert.are.equal("stop", decide(p, 17, true):what())
  end)

  it("grows first after window + 1 good steps, then every window", function()
    local p = engine.policy.load("deepspeed", { init_scale = 1, scale_window = 3 })
    assert.are.same(numbers("1 1 1 2 2 2 4 4 4 8"), run(p, "10."))
    p = engine.policy.load("deepspeed", { init_scale = 4, scale_window = 3, hysteresis = 3 })
    -- An absorbed overflow restarts the window.
    assert.are.same(numbers("4 4 4 4 4 8"), run(p, ".x4."))
  end)

  it("reports hysteresis in the reason", function()
    local p = engine.policy.load("deepspeed")
    assert.are.equal("overflow: hysteresis 2 -> 1, scale stays 65536", decide(p, 0, true):why())
    assert.are.equal("overflow: scale 65536 -> 32768", decide(p, 1, true):why())
  end)

  it("refuses suspicious options unless strict=false, then behaves as the original", function()
    local function trap(options)
      assert.has_error(function() engine.policy.load("deepspeed", options) end)
      options.strict = false
      return engine.policy.load("deepspeed", options)
    end
    local p = trap { hysteresis = 0 }
    assert.are.same(numbers("65536x50"), run(p, "50x"))
    assert.are.equal(-50, state_number(p, "hysteresis"))
    p = trap { init_scale = 1, min_scale = 4, hysteresis = 1 }
    assert.are.equal(4, decide(p, 0, true).scale)
    trap { scale_window = 2.5 }
    trap { hysteresis = 1.5 }
    for _, options in ipairs { { scale_window = 0 }, { min_scale = 0 }, { min_scale = -1 },
      { init_scale = math.huge }, { scale_factor = 1 } } do
      options.strict = false
      assert.has_error(function() engine.policy.load("deepspeed", options) end)
    end
  end)

  it("keeps the largest finite scale", function()
    local p = engine.policy.load("deepspeed", { init_scale = 2 ^ 1023, scale_window = 1 })
    assert.are.same({ 2 ^ 1023, 2 ^ 1023, 2 ^ 1023 }, run(p, "3."))
  end)
end)

describe("policy static", function()
  it("never changes its scale and skips on overflow", function()
    local p = engine.policy.load("static", { loss_scale = 1024 })
    assert.are.same(numbers("1024x6"), run(p, ".x.2x."))
    assert.are.equal("skip", decide(p, 9, true):what())
  end)

  it("steps despite overflow with skip_on_overflow=false, as DeepSpeed's LossScaler", function()
    local p = engine.policy.load("static", { skip_on_overflow = false })
    assert.are.equal("step", decide(p, 0, true):what())
    assert.are.equal(1, p:scale())
  end)

  it("refuses a scale that is not positive and finite", function()
    for _, scale in ipairs { -1, 0, math.huge, 0 / 0 } do
      assert.has_error(function() engine.policy.load("static", { loss_scale = scale }) end)
    end
  end)
end)

describe("resuming at every step", function()
  -- Windows short enough to grow and back off within the trace.
  local options = {
    static = { loss_scale = 8 }, dynamic = { init_scale = 256, growth_interval = 4 },
    deepspeed = { init_scale = 256, scale_window = 4 },
    deepspeed_fused = { init_scale = 256, scale_window = 4 },
    megatron = { initial_scale = 256, growth_interval = 4 },
    colossalai = { initial_scale = 256, growth_interval = 4 },
    apex = { init_scale = 256, scale_window = 4 },
    nemo = { init_scale = 256, growth_interval = 4, hysteresis = 2 },
    tensorflow = { initial_loss_scale = 256, increment_period = 4 },
    keras = { initial_scale = 256, dynamic_growth_steps = 4 },
    jmp = { loss_scale = 256, period = 4 }, flax = { scale = 256, growth_interval = 3 },
    mindspore = { init_loss_scale = 256, scale_window = 4 },
    paddle = { init_loss_scaling = 256, incr_every_n_steps = 4 },
    fairseq = { init_scale = 256, scale_window = 4, tolerance = 0.25 },
    metaseq = { init_scale = 256, scale_window = 2 },
    openseq2seq = { scale_max = 256, step_window = 4 },
    bmtrain = { loss_scale = 256, loss_scale_steps = 4 },
    mxnet = { init_scale = 256, scale_seq_len = 4 },
  }
  for _, name in ipairs(engine.policy.names()) do
    it("gives the same scales as an uninterrupted run: " .. name, function()
      local trace, all = "4. x . x 5. 2x 6. 3x 3.", options[name]
      local expected = run(engine.policy.load(name, all), trace)
      for k = 0, #expected do
        local first, second = engine.policy.load(name, all), engine.policy.load(name, all)
        local scales = run(first, trace, 1, k)
        second:restore(first:save())
        assert.are.equal(first:save(), second:save())
        assert.are.same(expected, run(second, trace, k + 1, #expected, scales),
          "saved after step " .. k)
      end
    end)
  end
end)

describe("taking over", function()
  it("carries the scale from policy to policy, and the whole state to the same policy", function()
    local old = engine.policy.load("dynamic", { growth_interval = 10 })
    run(old, "2x 3.")
    local new = engine.policy.load("deepspeed")
    new:take_over(old)
    assert.are.equal(16384, new:scale())
    assert.are.equal(16384, decide(new, 0, true).scale)      -- hysteresis starts again
    local edited = engine.policy.load("dynamic", { growth_interval = 4 })
    edited:take_over(old)
    assert.are.equal(32768, decide(edited, 0, false).scale)  -- three good steps were counted before
  end)

  it("does not change a static scale", function()
    local new = engine.policy.load("static", { loss_scale = 64 })
    new:take_over(engine.policy.load("dynamic"))
    assert.are.equal(64, new:scale())
  end)
end)

it("policies/README.md names the policies that ZeRO refuses", function()
  local model = engine.nn.gpt { vocab = 16, context = 8, width = 16, heads = 2, layers = 1 }
  local trainer = engine.trainer { model = model, steps = 1, log = "quiet",
    data = { next = function() end }, optimizer = engine.optim.adamw(model, { lr = 1e-3 }) }
  local refused = {}
  for _, zero in ipairs { false, 1 } do
    trainer.reducer.zero = zero
    for _, name in ipairs(policies.names "scale") do
      local why = modes.policy_refusal(trainer, engine.policy.load(name))
      if why and zero then refused[#refused + 1] = name end
      assert.truthy(zero or not why, why)
    end
  end
  trainer.reducer.zero = false
  assert.are.same({ "qk_clip", "stable_spam", "update_clip" }, refused)
  assert.matches("ZeRO.-refuse `update_clip`, `stable_spam` and `qk_clip`",
    (helper.read("policies/README.md"):gsub("%s+", " ")))
end)
