-- Statistics of the outputs of watched modules: values, micro-batches, policies, plots, refusals.
local engine = require "engine"
local helper = require "spec.helper"
local made = require "spec.policy.made"
local published = require("engine.policy.signals").values

local READS = [[return { needs = { "activations" }, options = { init_scale = 1 },
  decide = function(state, record)
    local s = record.signals
    return { scale = 1, log = { kurtosis = s["activation_kurtosis.2"] or -1,
      amax = s["activation_amax.2"] or -1 } }
  end }]]

-- Trains two layers on the batches [4 x 3] that `values` gives (or on built-in ones); returns the
-- trainer, the logs of the last step, the weights and the model.
local function train(options, values)
  engine.seed(3)
  local nn, at, logs = engine.nn, 0, nil
  local model = nn.sequential(nn.linear(3, 5), nn.linear(5, 2))
  local o = { model = model, optimizer = engine.optim.sgd(model, { lr = options.lr or 0.1 }),
    steps = 3, log = "quiet",
    data = { next = function()
      at = at + 1
      return { x = values and values(at) or engine.tensor { { 1, 2, at }, { 0, 1, -1 },
        { 3, 1, 2 }, { 1, 1, 9 } } }
    end },
    loss = function(m, batch) return m(batch.x):mean() end,
    on_step = function(t) logs = t.policy:logs() end }
  for key, value in pairs(options) do if key ~= "lr" then o[key] = value end end
  local trainer = engine.trainer(o)
  trainer:run()
  local weights = {}
  for _, p in ipairs(model:parameters()) do
    for _, x in ipairs(p.tensor:detach():view(-1):totable()) do weights[#weights + 1] = x end
  end
  return trainer, logs, weights, model
end

local function moments(x)
  local list, mean, amax, second, fourth = x:view(-1):totable(), 0, 0, 0, 0
  for _, v in ipairs(list) do mean, amax = mean + v / #list, math.max(amax, math.abs(v)) end
  for _, v in ipairs(list) do
    second, fourth = second + (v - mean) ^ 2 / #list, fourth + (v - mean) ^ 4 / #list
  end
  return amax, fourth / second ^ 2
end

describe("activations", function()
  it("are amax and kurtosis of what modules return, and change nothing", function()
    local batch = engine.randn(4, 3):keep()
    local _, logs, weights, model = train({ policy = made.load(READS), lr = 0 },
      function() return batch end)
    local amax, kurtosis = moments(model(batch):detach())
    assert.near(amax, logs.amax, 1e-6 * amax)
    assert.near(kurtosis, logs.kurtosis, 1e-5 * kurtosis)
    local first = moments(model[1](batch):detach())
    assert.near(first, published["activation_amax.1"], 1e-6 * first)
    local _, _, plain = train({ lr = 0 }, function() return batch end)
    assert.are.same(plain, weights)
  end)

  it("are the largest of a step's micro-batches, in every precision", function()
    for _, precision in ipairs { "fp32", "bf16", "fp16" } do
      local sizes = { 1, 1e4, 10, 2, 3, 1 }
      local function values(at) return engine.full({ 4, 3 }, sizes[at]) end
      local _, logs, _, model = train({ policy = made.load(READS), accumulate = 3, steps = 2,
        precision = precision, lr = 0 }, values)
      local amax = moments(model(values(5)):detach())     -- of the last step's three
      assert.near(amax, logs.amax, 0.02 * amax, precision)
    end
  end)

  it("are nan where an output has inf; of a constant output only the kurtosis is nan", function()
    local _, logs = train({ policy = made.load(READS), steps = 1, on_lost = "continue" },
      function() return engine.full({ 4, 3 }, math.huge) end)
    assert.is_true(logs.amax ~= logs.amax and logs.kurtosis ~= logs.kurtosis)
    local whole = engine.nn.sequential(engine.nn.relu())
    local seen = require("engine.train.activations").new(whole)
    seen:during(1, function() whole(engine.full({ 2, 2 }, 3)) end)
    assert.are.equal(3, published["activation_amax.1"])
    assert.is_true(published["activation_kurtosis.1"] ~= published["activation_kurtosis.1"])
  end)

  it("reach the history even if no policy needs them, and stop without the option", function()
    local folder = helper.folder()
    train { activations = "^2$", run = folder .. "/r" }
    assert.is_nil(published["activation_amax.1"])
    local history = engine.history.open(folder .. "/r")
    local list = history:signals()
    assert.are.equal("activation_amax.2 activation_kurtosis.2", list[1].name .. " " .. list[2].name)
    assert.are.equal(3, list[2].changes)
    assert.is_true(list[2].least >= 1 and list[1].least > 0)
    train { policy = "static" }
    assert.is_nil(published["activation_amax.2"])
    helper.remove(folder)
  end)

  it("are refused where nothing matches, without a model, and as a wrong type", function()
    local refused = helper.refuses
    refused("activations: no module of the model matches activations = 'attn'", train,
      { activations = "attn" })
    refused("expected activations to be a Lua pattern of module names, got 3", train,
      { activations = 3 })
    local lone = engine.nn.linear(2, 1)
    refused("needs activations, which this run lacks: the model has no list of modules",
      engine.trainer, { model = lone, optimizer = engine.optim.sgd(lone),
      data = { next = function() end }, steps = 1,
      loss = function() end, policy = made.load(READS) })
    -- a number at the end of a layer's name makes no list
    local Two, nn = engine.nn.class "Two", engine.nn
    function Two:init() self.fc1, self.fc2 = nn.linear(2, 3), nn.linear(3, 1) end
    function Two:forward(x) return self.fc2(self.fc1(x)) end
    lone = Two()
    refused("needs activations, which this run lacks: the model has no list of modules",
      engine.trainer, { model = lone, optimizer = engine.optim.sgd(lone),
      data = { next = function() end }, steps = 1,
      loss = function() end, policy = made.load(READS) })
    refused("which a scaler of an explicit loop does not have", engine.scaler,
      { policy = made.load(READS) })
  end)
end)
