-- engine plan: estimates of a job's cost on many ranks.
local helper = require "spec.helper"
local plan = require "engine.dist.plan"

local engine = require "engine"

-- 50 weights of 20,000 elements; a bucket of 1 MB holds 12 of them.
local function a_job(options)
  local list = engine.nn.class("Weights")
  function list:init()
    for i = 1, 50 do self["w" .. i] = engine.nn.linear(200, 100, { bias = false }) end
  end
  local opt = engine.optim.adamw(list(), { lr = 1e-3 })
  options.bucket = options.bucket or 1e6 / 2 ^ 20
  return { optimizer = opt, parameters = 1e6, tensors = 50, weight_bytes = 4e6, moment_bytes = 8e6,
    step = 0.1, zero = options.zero or 0, accumulate = options.accumulate or 1,
    histogram = false, sizes = function(ranks)
      return plan.sizes(opt.params, options, -1, ranks)
    end }
end

describe("a plan", function()
  it("costs nothing on one rank, and less with faster hardware", function()
    local job, cost = a_job {}, { alpha = 1e-6, beta = 1e-9 }
    local one = plan.predict(job, cost, 1)
    assert.equal(0.1, one.step)
    assert.equal(1, one.efficiency)
    local last = one
    for _, ranks in ipairs(plan.counts(100000)) do
      local p = plan.predict(job, cost, ranks)
      assert.is_true(p.step >= last.step and p.record >= last.record)
      last = p
    end
    assert.equal(100000, last.ranks)
    assert.is_true(plan.predict(job, { alpha = 1e-6, beta = 1e-10 },
      64).messages < plan.predict(job, cost, 64).messages)
  end)

  it("counts the messages that the reduction sends", function()
    -- Two ranks, five buckets: each sends half of the gradients and the sums of the other half.
    local p = plan.predict(a_job {}, { alpha = 1e-6, beta = 1e-9 }, 2)
    assert.equal(10, p.sent.messages)
    assert.near(4e6, p.sent.bytes, 1e5)
    assert.near(10e-6 + p.sent.bytes * 1e-9, p.messages, 1e-12)
    assert.near(p.messages / 5, p.exposed, 1e-12)
    assert.near(1e-6 + (50 * 7 + 12) * 8e-9, p.record, 1e-12)
    -- With ZeRO-2 every micro-batch sends gradients, and no sums come back.
    local q = plan.predict(a_job { zero = 2, accumulate = 3 }, { alpha = 1e-6, beta = 1e-9 }, 2)
    assert.equal(15, q.sent.messages)
    assert.near(6e6, q.sent.bytes, 2e5)
  end)

  it("shards moments with ZeRO-1, and gradients with ZeRO-2", function()
    local function memory(zero, ranks)
      return plan.predict(a_job { zero = zero, bucket = 0.2 }, { alpha = 0, beta = 0 },
        ranks).memory
    end
    assert.equal(8e6, memory(0, 4).moments)
    for zero = 1, 2 do assert.near(2e6, memory(zero, 4).moments, 2e5) end
    assert.near(4e6, memory(1, 4).gradients, 1e4)
    assert.near(1e6, memory(2, 4).gradients, 1e5)
    assert.near(4e6 / 16, memory(2, 16).gradients, 1e5)
  end)

  it("divides work among many ranks, each of which gets a share", function()
    local sizes = a_job { bucket = 0.2 }.sizes(100)
    assert.is_true(sizes.own < 3 * 1e6 / 100, tostring(sizes.own))
  end)

  it("includes waiting for the slowest rank and for shared cores", function()
    assert.equal(0, plan.skew({ 1, 1, 1 }, 4))
    -- the maximum of two draws from 1 and 3 is 2.5 on average
    assert.near(0.5, plan.skew({ 1, 3 }, 2), 1e-12)
    local job = a_job {}
    local near, far = plan.predict(job, { alpha = 1e-6, beta = 1e-9, cores = 2, slowed = 1.5 }, 2),
      plan.predict(job, { alpha = 1e-6, beta = 1e-9 }, 2)
    assert.near(0.15, near.compute, 1e-12)
    assert.near(near.messages, near.exposed, 1e-12)
    assert.is_true(near.step > far.step)
    assert.near(0.3, plan.predict(job, { alpha = 0, beta = 0, cores = 2, slowed = 1.5 }, 4).compute,
      1e-12)
  end)

  it("is close to measured jobs on this machine", function()
    local settings = { "alpha=2e-6", "beta=1e-10", "layers=1", "width=32", "context=16", "zero=1" }
    local there = require("spec.dist.start").there
    local result = helper.run { "plan", "examples/gpt.lua", there and "measure=1,2" or "measure=1",
      unpack(settings) }
    assert.equal("", result.err)
    assert.matches("\n1 rank +predicted +measured", result.out)
    local function is_exact(text, what)
      local off = text:match(("  %s +[^\n]- (%%S+)[ %%%%]*\n"):format(what))
      -- The sanitizers put some padding between blocks.
      assert.is_true(off == "exact" or helper.sanitized and math.abs(tonumber(off)) < 1,
        what .. text)
    end
    local one, two = result.out:match("(\n1 rank .-\n)\n(2 ranks .*)")
    for _, what in ipairs { "weights", "gradients", "moments" } do
      is_exact(one or result.out, "memory: " .. what)
    end
    for _, what in ipairs(there and { "messages sent", "bytes sent", "memory: weights",
      "memory: gradients", "memory: messages" } or {}) do
      is_exact(two, what)
    end
  end)

  it("counts the averages of weights", function()
    local predicted, measured = {}, {}
    for i, precision in ipairs { "mxfp4_tetrajet", "mxfp4_tetrajet_q_ema" } do
      local result = helper.run { "plan", "examples/gpt.lua", "measure=1", "ranks=1", "alpha=2e-6",
        "beta=1e-10", "layers=1", "width=32", "context=16", "precision=" .. precision }
      predicted[i], measured[i] = result.out:match("memory: weights +(%S+) KiB +(%S+) KiB")
      assert.is_not_nil(measured[i], result.err)
    end
    local averages = 12 * 32 ^ 2 * 4 / 1024                       -- KiB: one block's four layers
    assert.near(averages, predicted[2] - predicted[1], 0.15)
    if not helper.sanitized then assert.same(measured, predicted) end
    assert.near(averages, measured[2] - measured[1], helper.sanitized and 1 or 0.15)
  end)

  it("is printed for a script without training it", function()
    local result = helper.run { "plan", "examples/gpt.lua", "ranks=64", "alpha=2e-6", "beta=1e-10",
      "step=0.05", "layers=1", "width=32" }
    assert.equal("", result.err)
    assert.matches("a step without messages takes 50.00 ms, a message 2.0 us, at 10.00 GB/s",
      result.out, 1, true)
    assert.matches("\n     64 ", result.out)
    assert.is_nil(result.out:find("step 1", 1, true))
  end)

  it("explains ZeRO's waiting, and suggests a smaller bucket that does save memory", function()
    local function printed(...)
      local result = helper.run { "plan", "examples/gpt.lua", "ranks=8", "alpha=2e-6", "beta=1e-10",
        "step=0.05", ... }
      assert.equal("", result.err)
      return result.out
    end
    local out = printed "zero=2"
    assert.matches("\n'messages' counts only gradients; 'not hidden' also counts the weights",
      out, 1, true)
    local bucket, less, now, one = out:match(
      "\non 8 ranks, bucket=(%S+) would take (%S+ %S+) of memory on each rank instead of " ..
      "(%S+ %S+) %(with zero=1: (%S+ [^)]+)%)")
    assert.matches("\n      8 +" .. now:gsub("%.", "%%."), out)
    assert.matches("\n      8 +" .. less:gsub("%.", "%%."), printed("zero=2", "bucket=" .. bucket))
    assert.matches("\n      8 +" .. one:gsub("%.", "%%."), printed "zero=1")
    assert.is_nil(printed("bucket=0.02"):find("would take", 1, true))
    assert.is_nil(printed("zero=0"):find("'not hidden' also counts", 1, true))
  end)

  it("predicts activation checkpointing, beside the measurement", function()
    local out = helper.run { "plan", "examples/gpt.lua", "checkpoint=block", "layers=4",
      "width=64", "context=64" }.out
    local with = { out:match("with checkpointing +([%d.]+) MiB +([%d.]+) MiB") }
    local without = { out:match("without checkpointing +([%d.]+) MiB +([%d.]+) MiB") }
    assert(with[2] and without[2], out)
    assert.equal(without[1], without[2])
    assert.near(tonumber(with[2]), tonumber(with[1]), 0.25 * with[2])
    assert.is_true(with[2] + 0 < 0.7 * without[2])
    assert.matches("time of a step +[%d.]+ x +[%d.]+ x", out)
  end)

  it("reports invalid arguments", function()
    for _, case in ipairs { { { "nothing.lua" }, "there is no script 'nothing.lua'" },
      { { "examples/gpt.lua", "ranks=0" }, "expected ranks to be a whole number from 1 to 100000" },
      { { "examples/gpt.lua", "measure=two" }, "measure: expected a list of rank counts" },
      { { "examples/gpt.lua", "measure=" },
        "measure: expected a list of rank counts from 1 to 64, such as 1,2,4, got ''" },
        { { "examples/gpt.lua", "zero=4" }, "expected zero to be 0, 1, 2 or 3" },
      { { "examples/gpt.lua", "wire=fp4" }, "expected comm_dtype to be own, fp32" },
      { { "examples/gpt.lua", "alpha=fast" }, "alpha: expected a number" } } do
      local result = helper.run { "plan", unpack(case[1]) }
      assert.equal(1, result.code)
      assert.matches(case[2], result.err, 1, true)
    end
  end)
end)
