-- nn.moe: routing and gradients against the same sum computed densely; its groups; and
-- engine.contest, which compares policies.
local engine = require "engine"
local nn = engine.nn

describe("nn.moe", function()
  after_each(engine.end_step)

  local function model(options)
    engine.seed(2)
    options = options or {}
    options.width, options.hidden = 6, 8
    return nn.moe(options), engine.randn(2, 5, 6):keep()
  end

  -- Runs every expert on every token; experts that were not chosen have weight zero.
  local function dense(moe, x)
    local chance = moe.gate(x):softmax()
    local weight, chosen = chance:topk(moe.k)
    weight = weight / weight:sum(-1, true)
    local y
    for e = 1, moe.total do
      local share = (weight * chosen:eq(e - 1):to("f32")):sum(-1, true)
      local part = moe.experts[e](x) * share
      y = y and y + part or part
    end
    return y
  end

  it("is the weighted sum of the chosen experts, gradients included", function()
    for k = 1, 3 do
      local moe, x = model { experts = 4, top_k = k }
      local function gradients(f)
        moe:zero_grad()
        f(moe, x):pow(2):sum():backward()
        local list = {}
        for _, p in ipairs(moe:parameters()) do
          list[p.name] = p.tensor.grad and p.tensor.grad:view(-1):totable() or "none"
        end
        return list
      end
      assert.is_true((moe(x) - dense(moe, x)):abs():max():item() < 1e-6)
      local sparse, full = gradients(function(m, t) return m(t) end), gradients(dense)
      for name, values in pairs(full) do
        if sparse[name] ~= "none" then
          for i, v in ipairs(values) do assert.near(v, sparse[name][i], 1e-5) end
        end
      end
      local sum = 0
      for _, n in ipairs(moe.counts) do sum = sum + n end
      assert.are.equal(10 * k, sum)
      assert.is_true(moe.balance:item() > 0)
    end
  end)

  it("makes every expert a separate group, in f16 too", function()
    local moe, x = model { experts = 3, top_k = 2 }
    local _, _, groups = require("engine.policy.groups").of(moe:parameters(), moe)
    assert.are.same({ "gate", "experts.1", "experts.2", "experts.3" }, groups)
    local y = engine.autocast("fp16", moe, x:to("f16"))
    assert.are.equal("f16", y.dtype)
    assert.are.same({ 2, 5, 6 }, y.shape)
  end)

  it("states what it expected in its errors", function()
    assert.error_matches(function() nn.moe { width = 4, experts = 2, top_k = 3 } end,
      "expected top_k to be at most 2, the number of experts, got 3")
    assert.error_matches(function() nn.moe { width = 4.5 } end,
      "nn.moe: expected width to be a whole number of 1 or more, got 4.5")
    assert.error_matches(function() nn.moe { width = 4, expert = 2 } end,
      "expected expert to be a function")
    assert.error_matches(function() nn.moe { width = 4, topk = 2 } end, "did you mean 'top_k'")
  end)
end)

describe("engine.contest", function()
  it("gives mean and spread of each policy over the seeds", function()
    local result = engine.contest { policies = { "dynamic", "pid" }, seeds = 3,
      run = function(policy, seed) return { loss = seed * (policy == "pid" and 2 or 1),
      n = 1 } end }
    assert.are.equal(4, result[2].loss.mean)
    assert.are.equal(2, result[2].loss.spread)
    assert.are.same({ 1, 2, 3 }, result[1].loss.values)
    assert.matches("policy +loss +n\ndynamic +2.0 %+%- 1.0 +1 %+%- 0\npid +4.0 %+%- 2.0",
      tostring(result))
    -- a run may lack a number: one that diverged has no loss
    result = engine.contest { policies = { "static", "dynamic" }, seeds = 3,
      run = function(policy, seed)
        if policy == "static" then return { skipped = seed } end
        return { skipped = 0, loss = seed ~= 2 and seed or nil }
      end }
    assert.same({ "loss", "skipped" }, result.columns)
    assert.same({ {}, { 1, 3 } }, { result[1].loss.values, result[2].loss.values })
    assert.equal(2, result[2].loss.mean)
    assert.matches("static +%- +2.0 %+%- 1.0\ndynamic +2.0 %+%- 1%.4 +0 ", tostring(result))
    assert.has_error(function() engine.contest { policies = {} } end)
    assert.has_error(function() engine.contest { policies = { "pid" }, run = function() end } end)
  end)
end)
