-- Gradients of several micro-batches in fp16: each is rounded to fp16, where it can overflow, and
-- they are summed in f32, as PyTorch's autocast does.
local engine = require "engine"

-- A run of one step (or options.steps) whose micro-batch i has the weight gradient sum(rows[i]),
-- before scaling. Returns { overflow, amax, norm } of the last record, with amax and norm times the
-- loss scale; the weight's gradient; and the optimizer.
local function step(rows, options)
  options = options or {}
  engine.seed(1)
  local model, at = engine.nn.linear(1, 1, { bias = false }), 0
  local opt = engine.optim.sgd(model, { lr = 1e-30, precision = options.precision or "fp16" })
  local seen
  local trainer = engine.trainer { model = model, optimizer = opt, steps = options.steps or 1,
    log = "quiet", accumulate = #rows, policy = "static", mode = options.mode,
    policy_options = { loss_scale = (options.scale or 1) * #rows },
    data = { next = function()
      at = at % #rows + 1
      local column = {}
      for i, x in ipairs(rows[at]) do column[i] = { x } end
      return { x = engine.tensor(column) }
    end },
    loss = function(m, batch) return m(batch.x):sum() end,
    on_step = function(_, record)
      seen = { overflow = tonumber(record.overflow), amax = record.amax * record.scale,
        norm = record.norm * record.scale }
    end }
  trainer:run()
  return seen, model.weight.grad, opt
end

local function times(n, row)
  local rows = {}
  for i = 1, n do rows[i] = row end
  return rows
end

describe("accumulated gradients in fp16", function()
  before_each(function() engine.end_step() end)

  it("are summed without rounding", function()
    -- 0.1 in fp16 is 0.0999755859375; a sum of 512 of them in fp16 is 3 % off
    local record, gradient = step(times(512, { 0.1 }))
    assert.equal(512 * 0.0999755859375, gradient:item())
    assert.equal(512 * 0.0999755859375, record.norm)
    record = step(times(64, { 0.1 }), { mode = "lagged" })
    assert.equal(64 * 0.0999755859375, record.norm)
  end)

  it("overflow where a micro-batch does, not where their sum passes fp16's range", function()
    for _, mode in ipairs { "sync", "lagged" } do
      local record = step(times(4, { 40000 }), { mode = mode })
      assert.equal(0, record.overflow)
      assert.equal(160000, record.amax)
      assert.equal(1, step({ { 1 }, { 40000, 40000 }, { 1 } }, { mode = mode }).overflow)
    end
  end)

  it("lose what underflows in a micro-batch", function()
    local _, gradient = step(times(1000, { 2 ^ -24, -2 ^ -24, 2 ^ -26 }))
    assert.equal(0, gradient:item())
    _, gradient = step(times(1000, { 2 ^ -24 }))
    assert.equal(1000 * 2 ^ -24, gradient:item())
  end)

  it("take 4 bytes each, as predicted; with one micro-batch they stay fp16", function()
    local _, gradient = step(times(1, { 1 }))
    assert.equal("f16", gradient.dtype)
    local opt = engine.optim.sgd(engine.nn.linear(64, 1, { bias = false }), { precision = "fp16" })
    for on, bytes in pairs { [true] = 256, [false] = 128 } do
      opt:accumulates(on)
      local memory = opt:memory().gradients
      assert.same({ bytes, bytes }, { memory.predicted, memory.measured })
    end
  end)

  it("are available in an explicit loop", function()
    local model = engine.nn.linear(1, 1, { bias = false })
    local opt = engine.optim.sgd(model, { lr = 1e-30, precision = "fp16" })
    opt:accumulates(true)
    for _ = 1, 3 do
      engine.autocast("fp16", function()
        return model(engine.tensor { { 30000 } }):sum()
      end):backward()
    end
    assert.equal(90000, model.weight.grad:item())      -- 30000 is exact in fp16
    opt:accumulates(false)
    assert.is_nil(model.weight.grad)
  end)
end)
