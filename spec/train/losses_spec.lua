-- engine.losses: supervised fine-tuning and DPO, compared with their formulas, which are computed
-- here from log_softmax; with masks, references and wrong batches.
local engine = require "engine"
local helper = require "spec.helper"

local losses, lora, nn = engine.losses, engine.lora, engine.nn
local P, T, V = 3, 5, 16

local function gpt(seed)
  engine.seed(seed)
  return nn.gpt { vocab = V, context = T, width = 16, heads = 2, layers = 1 }
end

-- log p of each target, [row][column].
local function log_p(model, batch)
  return engine.scope(function()
    local all, list = model(batch.x):log_softmax():totable(), {}
    for r, row in ipairs(batch.y:totable()) do
      list[r] = {}
      for t, id in ipairs(row) do list[r][t] = id >= 0 and all[r][t][id + 1] or 0 end
    end
    return list
  end)
end

local function batch_of(mask)
  engine.seed(4)
  return { x = engine.randint(0, V, { 2 * P, T }):keep(), mask = mask and engine.tensor(mask),
    y = engine.randint(0, V, { 2 * P, T }):keep() }
end

local MASK = { { 0, 1, 1, 1, 1 }, { 0, 0, 1, 1, 0 }, { 1, 1, 1, 1, 1 }, { 0, 0, 0, 0, 1 },
  { 1, 0, 1, 0, 1 }, { 0, 1, 1, 0, 0 } }

local function value(f, ...)
  local arguments = { ... }
  return engine.scope(function() return (f(unpack(arguments))):item() end)
end

describe("the gradient of cross entropy", function()
  -- The bits of the gradient of w through logits x = w * 2, after x:done() or without it; and
  -- whether the memory of x was taken.
  local function gradient(dtype, done, retain, also)
    engine.seed(4)
    local w = engine.randn({ 6, 700 }, { dtype = dtype }):requires_grad(true)
    local x = w * 2
    local square = also == "reads" and (x * x):mean()
    local targets = engine.tensor({ 1, 0, 699, -100, 5, 7 }, { dtype = "i64" })
    local loss = engine.cross_entropy(x, targets, { soft_cap = 20 })
    if also == "exp" then loss = loss + x:exp():log():mean() end      -- log reads exp's result
    if square then loss = loss + square end
    if done then x:done() end
    loss:backward { retain = retain, scale = 8 }
    if retain then
      w:requires_grad(false)
      w:requires_grad(true)
      loss:backward { scale = 8 }
    end
    return table.concat(w.grad:to("f32"):totable()[1], " ") .. tostring(w.grad:sum():item()),
      not pcall(engine.no_grad, x.sum, x)
  end

  it("takes the memory of logits that are done, unless another rule reads them", function()
    for _, dtype in ipairs { "f32", "bf16", "f16", "f64" } do
      for _, also in ipairs { false, "exp", "reads" } do
        local want = gradient(dtype, false, false, also)
        local got, gone = gradient(dtype, true, false, also)
        assert.equal(want, got)
        assert.equal(dtype ~= "f64" and also ~= "reads", gone, dtype .. " " .. tostring(also))
      end
      local _, gone = gradient(dtype, true, true)
      assert.equal(dtype ~= "f64", gone)
      assert.equal((gradient(dtype, false, true)), (gradient(dtype, true, true)))
    end
  end)
end)

describe("losses.sft", function()
  it("is the mean cross entropy of the tokens that count", function()
    local model, batch = gpt(1), batch_of(MASK)
    local sum, count = 0, 0
    for r, row in ipairs(log_p(model, batch)) do
      for t, p in ipairs(row) do sum, count = sum - p * MASK[r][t], count + MASK[r][t] end
    end
    assert.near(sum / count, value(losses.sft, model, batch), 1e-5)
    batch.mask = batch.mask:eq(1):keep()
    assert.near(sum / count, value(losses.sft, model, batch), 1e-5)
    batch.y, batch.mask = batch.mask:where(batch.y, -100):keep(), nil
    assert.near(sum / count, value(losses.sft, model, batch), 1e-5)
    local whole = batch_of()
    assert.near(value(model.loss, model, whole.x, whole.y), value(losses.sft, model, whole), 1e-6)
    assert.near(value(model.loss, model, whole.x, whole.y, { label_smoothing = 0.1 }),
      value(losses.sft, model, whole, { label_smoothing = 0.1 }), 1e-6)
    whole.mask = engine.zeros(2 * P, T)
    assert.equal(0, value(losses.sft, model, whole))
  end)

  it("trains adapters in a trainer", function()
    local model, batch, seen = nn.lora(gpt(1)), batch_of(MASK), {}
    engine.trainer { model = model, steps = 15, log = "quiet", loss = losses.sft,
      data = { next = function() return batch end },
      optimizer = engine.optim.adamw(model, { lr = 3e-2 }),
      on_step = function(_, record) seen[#seen + 1] = record.loss end }:run()
    assert.is_true(seen[15] < seen[1] - 0.1)
  end)
end)

describe("losses.dpo", function()
  -- By the formula: the sum of the losses of all pairs; each row's log of the ratio of the model's
  -- probability to the reference's; and the share of pairs whose chosen row wins.
  local function expected(model, reference, batch, mask, beta, smoothing)
    local own, fixed, ratio = log_p(model, batch), log_p(reference, batch), {}
    for r = 1, 2 * P do
      ratio[r] = 0
      for t = 1, T do
        ratio[r] = ratio[r] + (own[r][t] - fixed[r][t]) * (mask and mask[r][t] or 1)
      end
    end
    local sum, wins = 0, 0
    for i = 1, P do
      local h = beta * (ratio[i] - ratio[P + i])
      sum = sum + (1 - smoothing) * math.log(1 + math.exp(-h))
        + smoothing * math.log(1 + math.exp(h))
      wins = wins + (h > 0 and 1 or 0)
    end
    return sum, ratio, wins / P
  end

  it("follows its formula, with a reference model", function()
    local model, reference = gpt(1), gpt(2)
    for _, case in ipairs { { 0.1, 0, "mean" }, { 2, 0.2, "sum", MASK }, { 0, 0, "sum" } } do
      local beta, smoothing, reduction, mask = unpack(case, 1, 4)
      local batch = batch_of(mask)
      local sum, ratio, accuracy = expected(model, reference, batch, mask, beta, smoothing)
      engine.scope(function()
        local loss, rewards = losses.dpo(model, batch, { beta = beta, label_smoothing = smoothing,
          reference = reference, reduction = reduction })
        assert.near(reduction == "mean" and sum / P or sum, loss:item(), 1e-5)
        for i, v in ipairs(rewards.log_ratio:totable()) do assert.near(ratio[i], v, 1e-5) end
        for i = 1, P do
          assert.near(beta * ratio[i], rewards.chosen:totable()[i], 1e-5)
          assert.near(beta * ratio[P + i], rewards.rejected:totable()[i], 1e-5)
          assert.near(beta * (ratio[i] - ratio[P + i]), rewards.margin:totable()[i], 1e-5)
        end
        assert.near(accuracy, rewards.accuracy:item(), 1e-6)
      end)
    end
  end)

  it("takes the model without adapters as the reference, in evaluation mode", function()
    engine.seed(1)
    local model = nn.gpt { vocab = V, context = T, width = 16, heads = 2, layers = 1,
      dropout = 0.1 }
    local frozen, batch = gpt(1), batch_of()
    nn.lora(model, { base = "e4m3", dropout = 0.2 })
    lora.disabled(model, function() frozen = log_p(model:eval(), batch) end)
    model:train()
    local opt, first, last, accuracy = engine.optim.adamw(model, { lr = 2e-2 }), nil, nil, nil
    for _ in engine.steps(40) do
      opt:zero_grad()
      local loss, rewards = losses.dpo(model, batch, { beta = 0.5 })
      loss:backward()
      opt:step()
      first, last, accuracy = first or loss:item(), loss:item(), rewards.accuracy:item()
      assert.is_true(model:is_training())
    end
    assert.near(math.log(2), first, 0.1)
    assert.is_true(last < 0.5, last)
    assert.equal(1, accuracy)
    lora.disabled(model, function()
      for r, row in ipairs(log_p(model:eval(), batch)) do
        for t, p in ipairs(row) do assert.equal(frozen[r][t], p) end
      end
    end)
  end)

  it("says in one line what is wrong", function()
    local model = gpt(1)
    local function refused(text, f, ...)
      helper.refuses(text, engine.scope, f, ...)
    end
    local batch, reference = batch_of(), gpt(2)
    refused("losses.sft: expected a batch with tensors x and y, got nothing", losses.sft, model)
    refused("and the fields ids x", losses.dpo, model, { x = batch.x, ids = 1 })
    refused("no adapters; hint: nn.lora adds them, or give losses.dpo a reference", losses.dpo,
      model, batch)
    refused("expected reference to be a frozen copy of the model, got the model itself", losses.dpo,
      model, batch, { reference = model })
    refused("expected reference to be a module, got 3", losses.dpo, model, batch, { reference = 3 })
    refused("expected beta to be a finite number >= 0, got -1", losses.dpo, model, batch,
      { beta = -1, reference = reference })
    refused("expected reduction 'mean' or 'sum', got 'none'", losses.dpo, model, batch,
      { reduction = "none", reference = reference })
    refused("expected label_smoothing in [0, 1), got 1", losses.sft, model, batch,
      { label_smoothing = 1 })
    refused("unknown option 'bta'; did you mean 'beta'?", losses.dpo, model, batch, { bta = 1 })
    batch.mask = engine.zeros(2, 2)
    refused("expected batch.mask to have y's shape [6 x 5], got [2 x 2]", losses.sft, model, batch)
    refused("expected an even number of rows", losses.dpo, model, { x = batch.x:slice(1, 1, 3),
      y = batch.y:slice(1, 1, 3) }, { reference = reference })
  end)
end)
