-- The card trains like the CPU: same losses, overflows and scales under the same policy. Run by
-- spec/cuda/run.lua only.
local engine = require "engine"
local fused_state = require "engine.train.fused_state"
local M_ffi = require "engine.base.ffi"

local CARD = os.getenv("ENGINE_TEST_DEVICE")
if not CARD then return end

local STEPS = tonumber(os.getenv("ENGINE_TEST_STEPS")) or 40   -- fewer on a slow card
local TEXT = require("engine.report.lab").text(20000)

--- Trains a small GPT; returns the losses, scales, overflows, number of updates and the model.
local function train(device, options)
  engine.device(device)
  engine.seed(7)
  local model = engine.nn.gpt { vocab = 256, context = 32, width = 64, heads = 4, layers = 2,
    dropout = options.dropout or 0 }
  if options.lora then engine.nn.lora(model, options.lora) end
  local losses, scales, overflows = {}, {}, {}
  local trainer = engine.trainer {
    model = model, data = engine.data.text { text = TEXT, batch = 8, context = 32, seed = 3 },
    steps = options.steps or STEPS, log = "quiet", clip = 1,
    optimizer = engine.optim[options.optimizer or "adamw"](model,
      { lr = options.lr or 1e-3, precision = options.precision }),
    policy = options.policy, policy_options = options.policy_options,
    accumulate = options.accumulate,
    on_step = function(self, record, verdict)
      losses[#losses + 1], scales[#scales + 1] = record.loss, record.scale
      overflows[#overflows + 1] = record.overflow
      if options.on_step then options.on_step(self, record, verdict) end
    end,
  }
  trainer:run()
  engine.device("cpu")
  return { losses = losses, scales = scales, overflows = overflows, updates = trainer.updates,
    model = model }
end

local function same_within(a, b, limit)
  assert.equal(#a.losses, #b.losses)
  local worst = 0
  for i = 1, #a.losses do
    worst = math.max(worst, math.abs(a.losses[i] - b.losses[i]) / math.abs(a.losses[i]))
  end
  assert(worst <= limit, ("losses differ by %.3g, expected %.3g at most"):format(worst, limit))
  return worst
end

engine.device(CARD)
local FP8 = M_ffi.C.eng_device_fp8()
engine.device("cpu")
--- Whether the card's tensor cores support a recipe.
local function able(recipe)
  return FP8 >= ((recipe == "fp8_current" or recipe == "fp8_delayed") and 1 or 2)
end

describe("training on the card", function()
  for _, case in ipairs { { "fp32", 2e-4 }, { "bf16", 2e-2 }, { "fp16", 5e-3 } } do
    it("follows the CPU's losses in " .. case[1], function()
      local options = { precision = case[1] }
      same_within(train("cpu", options), train(CARD, options), case[2])
    end)
  end

  -- the card uses Hopper's accumulator, the CPU sums in f32 (`device` in the recipes)
  for _, name in ipairs { "fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block",
    "fp8_block_te" } do
    it("follows the CPU's losses in " .. name, function()
      if not able(name) then   -- an error, instead of running slowly
        local done, message = pcall(train, CARD, { precision = name })
        engine.device("cpu")
        assert(not done and tostring(message):find("no tensor cores for FP8", 1, true), message)
        return
      end
      local card = train(CARD, { precision = name })
      same_within(train("cpu", { precision = name }), card, 3e-2)
      assert.same(card.losses, train(CARD, { precision = name }).losses)
    end)
  end

  -- the quantizers match the CPU's bit for bit, but products are summed in another order
  for _, name in ipairs { "mxfp8", "mxfp4", "mxfp4_tseng", "mxfp4_tetrajet_q_ema", "nvfp4",
    "nvfp4_four_over_six" } do
    it("follows the CPU's losses in " .. name, function()
      local card = train(CARD, { precision = name })
      same_within(train("cpu", { precision = name }), card, STEPS > 6 and 2e-2 or 2e-3)
      assert.same(card.losses, train(CARD, { precision = name }).losses)
    end)
  end

  it("refuses rules of microscaling that have no kernel", function()
    for rule, name in pairs { quest = "mxfp4_quartet", ms_eden = "nvfp4_quartet2" } do
      local done, message = pcall(train, CARD, { precision = name })
      engine.device("cpu")
      assert(not done and tostring(message):find("the rule " .. rule .. " has no CUDA kernel", 1,
        true), message)
    end
  end)

  it("follows the CPU's losses of adapters over NF4", function()
    local options = { precision = "bf16", lora = { rank = 4, base = "nf4" }, lr = 1e-2 }
    local cpu = train("cpu", options)
    same_within(cpu, train(CARD, options), STEPS > 6 and 2e-2 or 3e-3)
    assert.is_true(cpu.losses[#cpu.losses] < cpu.losses[1])
  end)

  it("gives policies the norms of updates and applies the limits in verdicts", function()
    local policy = { file = "limits", source = [[return {
      needs = { "amax", "norm", "update_norm", "weight_norm", "m_norm", "v_norm", "clips",
        "lr_muls", "reset_moments", "update_clip", "spike_clip", "caps" },
      init = function() return { scale = 1 } end,
      decide = function(state, record)
        if not record.capped then return { scale = 1, caps = { [".*"] = record.amax / 4 } } end
        local last = record.update_norm
        return { scale = 1, clips = { ["w[tp]e%.weight"] = 0.5 },
          lr_muls = { [".*%.bias"] = 0.1 }, reset_moments = record.step == 3,
          update_clip = record.step > 1 and last and last * 0.9 or nil,
          spike_clip = record.step > 2 and 50 or nil,
          log = { norm = record.norm, update = last, weight = record.weight_norm,
            m = record.m_norm, v = record.v_norm } }
      end }]] }
    local function run(device)
      local seen = {}
      local function on_step(trainer, record, verdict)
        seen[#seen + 1] = assert(trainer.policy:logs(), verdict:why())
        seen[#seen].loss = record.loss
      end
      train(device, { precision = "bf16", policy = policy, on_step = on_step })
      return seen
    end
    local want, got = run "cpu", run(CARD)
    assert.equal(#want, #got)
    for step, numbers in ipairs(want) do
      local limit, n = STEPS > 6 and 0.05 or 0.01, 0
      for name, a in pairs(numbers) do
        local b = got[step][name]
        n = n + 1
        assert(math.abs(a - b) <= limit * math.abs(a), ("step %d, %s: cpu %.9g, card %.9g")
          :format(step, name, a, b))
      end
      assert.equal(step == 1 and 2 or 6, n)
    end
    assert.same(got, run(CARD))
  end)

  it("overflows at the same steps and keeps the same scales", function()
    local options = { precision = "fp16", policy = "dynamic",
      policy_options = { init_scale = 2 ^ 24, growth_interval = 4 } }
    local a, b = train("cpu", options), train(CARD, options)
    assert.same(a.scales, b.scales)
    assert.same(a.overflows, b.overflows)
    assert.is_true(a.updates < #a.losses)
  end)

  it("draws the same dropout masks, accumulates, and runs each fused optimizer", function()
    for _, kind in ipairs(fused_state.kinds) do
      local options = { precision = "fp32", optimizer = kind.name, dropout = 0.1, accumulate = 2,
        steps = 12, lr = kind.name == "sgd" and 0.1 or 3e-4 }
      same_within(train("cpu", options), train(CARD, options), 1e-3)
    end
  end)

  it("reads its own record after an unfinished lagged run", function()
    engine.device(CARD)
    engine.seed(7)
    local model = engine.nn.gpt { vocab = 256, context = 16, width = 32, heads = 2, layers = 1 }
    local optimizer = engine.optim.adamw(model, { lr = 1e-3, precision = "fp32" })
    local function trainer(mode, loss)
      return engine.trainer { model = model, steps = 9, log = "quiet", optimizer = optimizer,
        data = engine.data.text { text = TEXT, batch = 2, context = 16, seed = 3 },
        mode = mode, loss = loss }
    end
    local broken, want = trainer("lagged"), nil
    for _ = 1, 2 do broken:step() end   -- leaves one record in flight
    local record = trainer("sync", function(m, batch)
      local loss = m:loss(batch.x, batch.y)
      want = loss:item()
      return loss
    end):step()
    engine.end_step()
    engine.device("cpu")
    assert.equal(want, record.loss)
  end)

  it("repeats bit for bit", function()
    local options = { precision = "fp16", dropout = 0.1 }
    local a, b = train(CARD, options), train(CARD, options)
    assert.same(a.losses, b.losses)
  end)
end)

describe("SwiGLU in FP8 on the card", function()
  -- Losses of a small Llama by step. With meters in every step (sample = 1) h is a tensor; without
  -- them its FP8 codes are computed directly.
  local function losses(precision, options)
    engine.device(CARD)
    engine.seed(9)
    local model = engine.nn.llama { vocab = 256, context = 32, width = 64, heads = 2, kv_heads = 2,
      layers = 2, hidden = 272 }
    local seen = {}
    local trainer = engine.trainer {
      model = model, data = engine.data.text { text = TEXT, batch = 3, context = 32, seed = 3 },
      steps = options.steps or math.min(STEPS, 4), clip = 1, log = "quiet",
      mode = options.mode, graph = options.graph, accumulate = options.accumulate,
      optimizer = engine.optim.adamw(model,
        { lr = 1e-3, precision = { base = precision, fp8 = { sample = options.sample } } }),
      on_step = function(_, record) seen[#seen + 1] = record.loss end,
    }
    local good, message = pcall(trainer.run, trainer)
    engine.device("cpu")
    assert(good, message)
    return seen, trainer.captured ~= nil
  end

  for _, name in ipairs { "fp8_block", "fp8_rowwise", "fp8_current", "fp8_delayed" } do
    if able(name) then it("gives the same losses fused and in two steps, with " .. name, function()
      local apart = losses(name, { sample = 1, accumulate = 2 })
      assert.same(apart, (losses(name, { sample = 0, accumulate = 2 })))
    end) end
  end
  if able("fp8_block") then it("works in a captured step", function()
    local plain = losses("fp8_block", { sample = 0, mode = "lagged", steps = 6 })
    local graph, captured = losses("fp8_block",
      { sample = 0, mode = "lagged", graph = true, steps = 6 })
    assert.is_true(captured)
    assert.same(plain, graph)
    assert.same(losses("fp8_block", { sample = 1, mode = "lagged", steps = 6 }), plain)
  end) end
end)

describe("tensors on the card", function()
  after_each(function() engine.device("cpu") end)

  it("are copied there and back", function()
    local x = engine.tensor({ { 1, 2.5, -3 }, { 0, 1e-40, 65504 } }, "f32")
    local there = x:to("cuda")
    assert.equal("cuda", there.device)
    assert.same(x:totable(), there:to("cpu"):totable())
    assert.same(x:totable(), there:totable())
    engine.device("cuda")
    assert.same(x:transpose(1, 2):totable(), there:transpose(1, 2):totable())
    assert.truthy(tostring(there):find("cuda", 1, true))
  end)

  it("do not mix with tensors of another device", function()
    local x = engine.ones(3)
    engine.device("cuda")
    local good, message = pcall(function() return engine.ones(3) + x end)
    assert.is_false(good)
    assert.truthy(tostring(message)
      :find("is not in the memory of the current device, cuda", 1, true))
  end)

  it("report an index out of range at the next wait", function()
    engine.device("cuda")
    local good, message = pcall(function()
      return engine.randn(4, 3):index_select(1, engine.tensor({ 0, 9 }, "i64")):sum():item()
    end)
    assert.is_false(good)
    assert.truthy(tostring(message)
      :find("index_select: expected indices in 0..3, got 9", 1, true))
    assert.equal(3, engine.ones(3):sum():item())
  end)

  it("report it once, even if statistics in flight carry it, too", function()
    engine.device("cuda")
    local C, model = M_ffi.C, engine.nn.linear(4, 4)
    local params = engine.optim.sgd(model, { lr = 1e-3 }).params
    model(engine.ones(2, 4)):sum():backward()
    local queued = pcall(function()
      return engine.randn(4, 3):index_select(1, engine.tensor({ 0, 9 }, "i64"))
    end)
    if not queued then return end          -- a card whose kernels report at once
    M_ffi.check(C.eng_params_stats_start(params, C.ENG_NEED_AMAX, nil, 0, nil))
    assert.is_false((pcall(function() return engine.ones(3):sum():item() end)))
    assert.equal(0, tonumber(C.eng_params_stats_fetch(M_ffi.new("eng_record"),
      M_ffi.new("eng_tensor_stats[?]", 2), M_ffi.new("double[1]"), params, 1)))
  end)

  it("drop out the same elements of equal tensors to the bit, aligned or not", function()
    engine.device("cuda")
    local a = engine.randn(4097):slice(1, 2)
    local function dropped(x)
      engine.seed(3)
      return x:dropout(0.1)
    end
    assert.equal(0, (dropped(a) - dropped(a * 1)):abs():max():item())
  end)

  it("say what to do when memory runs out", function()
    engine.device("cuda")
    local good, message = pcall(engine.zeros, 2 ^ 20, 2 ^ 19)
    assert.is_false(good)
    assert.truthy(tostring(message):find("out of memory: the cuda kept arena needs", 1, true))
    assert.equal(3, engine.ones(3):sum():item())
  end)
end)

describe("a captured step", function()
  --- Losses by step of a small GPT, lagged by default, with or without a graph; or the error.
  local function losses(graph, options)
    engine.device(CARD)
    engine.seed(9)
    local model = engine.nn.gpt { vocab = 256, context = 16, width = 32, heads = 2, layers = 2,
      dropout = options.dropout }
    local seen = {}
    local trainer = engine.trainer {
      model = model,
      data = options.data or engine.data.text { text = TEXT, batch = 4, context = 16, seed = 3 },
      steps = options.steps or 12, log = "quiet", clip = 1, mode = options.mode or "lagged",
      optimizer = engine.optim[options.optimizer or "adamw"](model,
        { lr = options.lr or 1e-3, precision = options.precision or "fp16" }),
      graph = graph, loss = options.loss, policy = options.policy,
      policy_options = not options.policy and { init_scale = 2 ^ 19, growth_interval = 4 } or nil,
      on_step = function(t, record)
        seen[#seen + 1] = { record.loss, record.scale, record.overflow }
        if options.on_step then options.on_step(t, #seen) end
      end,
    }
    local good, message = pcall(trainer.run, trainer)
    local captured = trainer.captured ~= nil
    engine.device("cpu")
    return good and seen or tostring(message), captured
  end

  it("computes what the plain step computes, overflows and scales included", function()
    for _, mode in ipairs { "lagged", "sync" } do
      local plain = losses(false, { mode = mode })
      local graph, captured = losses(true, { mode = mode })
      assert.is_true(captured)
      assert.equal(12, #graph)
      local fell, rose = false, false
      for i = 2, 12 do
        fell = fell or graph[i][2] < graph[i - 1][2]
        rose = rose or graph[i][2] > graph[i - 1][2]
      end
      assert.is_true(fell and rose)
      assert.same(plain, graph)
    end
  end)

  it("sees the weights of an optimizer written in Lua", function()
    for _, optimizer in ipairs { "muon", "adafactor" } do
      local options = { mode = "sync", optimizer = optimizer, steps = 10, lr = 1e-2 }
      local graph, captured = losses(true, options)
      assert.is_true(captured)
      assert.same(losses(false, options), graph)
    end
  end)

  it("reads each batch of a list of tensors, wherever its memory is", function()
    local text = engine.data.text { text = TEXT, batch = 4, context = 16, seed = 3 }
    engine.device(CARD)
    local batches = {}
    for i = 1, 3 do
      local batch = text:next()
      batches[i] = { batch.x:keep(), batch.y:keep() }
    end
    engine.device("cpu")
    local function options(shape)
      local n = 0
      return { steps = 8, loss = function(model, batch)
        local list = batch.list or batch
        return model:loss(list[1], list[2])
      end, data = { next = function()
        n = n % #batches + 1
        return shape(batches[n])
      end } }
    end
    local function plain(batch) return batch end
    local graph, captured = losses(true, options(plain))
    assert.is_true(captured)
    assert.same(losses(false, options(plain)), graph)
    -- batches with parts that each launch would read from the first batch
    for words, shape in pairs {
      ["the field 'list', a table with tensors"] = function(batch)
        return { x = batch[1], list = batch }
      end,
      ["a batch without tensors"] = function() return { tokens = 3 } end,
    } do
      local message = losses(true, options(shape))
      assert(tostring(message):find("got " .. words, 1, true), message)
    end
  end)

  if able("fp8_current") then it("measures FP8 layers in steps without a graph", function()
    local options = { precision = { name = "sampled", base = "fp8_current", fp8 = { sample = 5 } },
      policy = "static", steps = 12 }
    local plain, last = losses(false, options), nil
    options.on_step = function(t) last = t.optimizer.fp8:meters()[1] end
    local graph, captured = losses(true, options)
    assert.is_true(captured)
    assert.same(plain, graph)
    assert.equal(10, last.step)
  end) end

  it("quantizes its weights in every launch", function()
    -- runs a forward pass before the capture (step 2) and between launches (step 4)
    local function look(t, step)
      if step ~= 2 and step ~= 4 then return end
      engine.scope(function() return t:forward(t.data:next()):item() end)
    end
    for _, precision in ipairs { "mxfp8", "fp8_block", "fp8_current" } do
      if precision == "mxfp8" or able "fp8_block" then
        local options = { precision = precision, policy = "static", lr = 1e-2, steps = 7,
          on_step = look }
        local plain = losses(false, options)
        local graph, captured = losses(true, options)
        assert.is_true(captured)
        assert.same(plain, graph)
      end
    end
  end)

  it("refuses microscaling that changes from step to step", function()
    for words, precision in pairs { ["random numbers"] = "nvfp4",
      ["a Hadamard transform with new signs in each step"] = { name = "mine", base = "nvfp4",
        fp8 = { dy = { rule = "nvfp4" }, wgrad = { hadamard = 16, signs = "step" } } } } do
      local message = losses(true, { precision = precision, policy = "static", steps = 7 })
      assert(tostring(message):find(words, 1, true), tostring(message))
    end
  end)

  it("is captured again after the weights have changed their format", function()
    local calls
    local function options()
      calls = 0
      return { mode = "sync", steps = 16, precision = "bf16", policy = "static",
        loss = function(model, batch)
          calls = calls + 1
          return model:loss(batch.x, batch.y)
        end,
        on_step = function(t, step)
          if step == 6 then t.optimizer:set_precision "fp16" end
        end }
    end
    local plain = losses(false, options())
    local graph, captured = losses(true, options())
    assert.is_true(captured)
    assert.same(plain, graph)
    assert.equal(8, calls)   -- three steps before each capture, and two captures
  end)

  -- Makes something large on the card that only `held` refers to. A function of its own, because a
  -- stack slot would keep its old value alive.
  local function garbage(held, what)
    -- nothing refers to its trainer, model and graph afterwards
    if what == "graph" then return losses(true, { steps = 6 }) end
    engine.device(CARD)
    if what == "optimizer" then
      held[1] = engine.optim.adam(engine.nn.linear(1024, 1024), { lr = 1e-3 })
      held[1]:step()
    else
      held[1] = engine.scope(function() return engine.ones(2048, 2048):keep() end)
    end
    engine.device("cpu")
  end

  it("survives the collection of garbage during its capture", function()
    local plain = losses(false, { steps = 8 })
    for _, what in ipairs { "graph", "optimizer", "tensor" } do
      local held = {}
      garbage(held, what)
      local seen = 0
      local graph, captured = losses(true, { steps = 8, loss = function(model, batch)
        seen = seen + 1
        if seen == 4 then   -- the captured step; the tape is still empty
          if what == "tensor" then held[1]:free() end
          held[1] = nil
          collectgarbage()
          collectgarbage()
        end
        return model:loss(batch.x, batch.y)
      end })
      assert(type(graph) == "table", graph)
      assert.is_true(captured)
      assert.same(plain, graph)
    end
  end)

  it("refuses an update or statistics by the script", function()
    engine.device(CARD)
    local own = engine.optim.sgd(engine.nn.linear(3, 3), { lr = 1 })
    engine.device("cpu")
    local passes = {
      ["gradient statistics"] = function() own:grad_norm() end,
      ["an optimizer's update"] = function() own:step() end,
    }
    for words, pass in pairs(passes) do
      local message = losses(true, { loss = function(model, batch)
        pass()
        return model:loss(batch.x, batch.y)
      end })
      local expected = "graph: " .. words .. " cannot be part of a captured step; hint: graph=false"
      assert(tostring(message):find(expected, 1, true), message)
    end
  end)

  it("names graph=false in every error of a capture", function()
    local turn = 0
    local message = losses(true, { loss = function(model, batch)
      turn = turn + 1
      if turn == 4 then error("no capture") end
      return model:loss(batch.x, batch.y)
    end })
    assert.matches("no capture[^\n]*; hint: graph=false", message)
  end)

  it("refuses an operation that draws random numbers", function()
    local expected = "graph: an operation that draws random numbers cannot be part of a " ..
      "captured step; hint: graph=false"
    assert.truthy(losses(true, { dropout = 0.1 }):find(expected, 1, true))
    local again = losses(true, {})
    assert(type(again) == "table", again)
  end)
end)
