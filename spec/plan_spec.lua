-- engine plan: what a job would cost on many ranks.
local helper = require "spec.helper"
local plan = require "engine.plan"

local job = { parameters = 1e6, tensors = 50, gradient_bytes = 4e6, shadow_bytes = 0, moment_bytes = 8e6, bucket = 1e6, step = 0.1, wire = "own", zero = false,
  histogram = false }

describe("a plan", function()
  it("costs nothing on one rank, and less of each thing that is given more of", function()
    local cost = { alpha = 1e-6, beta = 1e-9 }
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
    assert.is_true(plan.predict(job, { alpha = 1e-6, beta = 1e-10 }, 64).messages < plan.predict(job, cost, 64).messages)
  end)

  it("has the messages that the reduction sends", function()
    -- two ranks, four buckets: half of the gradients out and the other half's sums back
    local p = plan.predict(job, { alpha = 1e-6, beta = 1e-9 }, 2)
    assert.near(2 * (4 * 1e-6 + 2e6 * 1e-9), p.messages, 1e-12)
    assert.near(p.messages / 4, p.exposed, 1e-12)
    assert.near(1e-6 + (50 * 7 + 10) * 8e-9, p.record, 1e-12)
  end)

  it("shares moments out with ZeRO-1", function()
    local shared = setmetatable({ zero = true }, { __index = job })
    assert.equal(2e6, plan.predict(shared, { alpha = 0, beta = 0 }, 4).memory.moments)
    assert.equal(8e6, plan.predict(job, { alpha = 0, beta = 0 }, 4).memory.moments)
  end)

  it("is printed for a script, which is not trained", function()
    local result = helper.run { "plan", "examples/gpt.lua", "ranks=64", "alpha=2e-6", "beta=1e-10", "step=0.05", "layers=1", "width=32" }
    assert.equal("", result.err)
    assert.matches("own step 50.00 ms, a message 2.0 us, 10.00 GB/s", result.out, 1, true)
    assert.matches("\n     64 ", result.out)
    assert.is_nil(result.out:find("step 1", 1, true))
  end)

  it("says what is wrong with what it is given", function()
    for _, case in ipairs { { { "nothing.lua" }, "cannot open nothing.lua" }, { { "examples/gpt.lua", "ranks=0" }, "expected ranks from 1 to 100000" },
      { { "examples/gpt.lua", "wire=fp4" }, "expected wire as own, fp32" }, { { "examples/gpt.lua", "alpha=fast" }, "expected alpha as a number" } } do
      local result = helper.run { "plan", unpack(case[1]) }
      assert.equal(1, result.code)
      assert.matches(case[2], result.err, 1, true)
    end
  end)
end)
