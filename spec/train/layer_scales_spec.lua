-- Per-layer scales (a verdict's `scales`) and reference backward passes: the mechanisms of the
-- adaptive policies.
local engine = require "engine"
local fused_state = require "engine.train.fused_state"
local M_ffi = require "engine.base.ffi"
local helper = require "spec.helper"
local nn = engine.nn

local function policy(text) return { source = "return { " .. text .. " }", file = "apart.lua" } end

-- Powers of two as scales for some of the model's groups; the global scale is 2^10.
local APART = policy [[ name = "apart", options = { init_scale = 2^10 },
  needs = { "groups", "amax", "norm" },
  decide = function(state)
    return { scale = state.scale, scales = { ["blocks.1"] = 2^15, ["blocks.2"] = 2^4, wte = 2^3,
      norm = 2^13 } }
  end ]]

local function batch()
  return { x = engine.tensor({ { 1, 2, 3, 4, 5, 6, 7, 8 }, { 3, 1, 4, 1, 5, 9, 2, 6 } },
    { dtype = "i32", keep = true }),
    y = engine.tensor({ { 2, 3, 4, 5, 6, 7, 8, 9 }, { 1, 4, 1, 5, 9, 2, 6, 5 } },
      { dtype = "i64", keep = true }) }
end

-- Loss, norm, amax and reference norm of every step of a small GPT (its head shares the embedding's
-- weight); also returns the trainer and the run's summary.
local function train(options)
  engine.seed(3)
  local model = nn.gpt { vocab = 16, context = 8, width = 16, heads = 2, layers = 3,
    dropout = options.dropout or 0 }
  local one, rows = batch(), {}
  local optimizer = engine.optim[options.optimizer or "adamw"](model,
    { lr = 1e-2, precision = options.precision or "fp32" })
  local trainer = engine.trainer { model = model,
    data = options.data or { next = function() return one end }, optimizer = optimizer,
    steps = options.steps or 8, policy = options.policy, clip = 1, log = "quiet",
    accumulate = options.accumulate, run = options.run,
    resume = options.resume, restart_data = true,
    ref_every = options.ref_every, ref_layers = options.ref_layers,
    stats_every = 1,
    on_step = function(t, record, verdict)
      assert.are.equal(0, verdict.failed, verdict:why())
      rows[#rows + 1] = { record.loss, record.norm, record.amax, t.reference and record.norm_ref }
    end }
  local summary = trainer:run()
  return rows, trainer, summary
end

describe("per-layer scales", function()
  it("train in f32 exactly as one scale does, tied weights and clipping included", function()
    for _, kind in ipairs(fused_state.kinds) do
      local whole = train { policy = "static:loss_scale=1024", optimizer = kind.name }
      assert.are.same(whole, (train { policy = APART, optimizer = kind.name }))
      assert.are.same(whole, (train { policy = APART, optimizer = kind.name, accumulate = 1 }))
    end
  end)

  it("equal one scale on the reference device too, and agree with the fast device", function()
    local fast = train { policy = APART, steps = 3, precision = "fp16" }
    engine.device "reference"
    local good, message = pcall(function()
      assert.are.same((train { policy = "static:loss_scale=1024", steps = 3 }),
        (train { policy = APART, steps = 3 }))
      local slow = train { policy = APART, steps = 3, precision = "fp16" }
      for i, row in ipairs(fast) do
        for k = 1, 3 do assert.near(row[k], slow[i][k], 2e-2 * math.abs(row[k])) end
      end
    end)
    engine.device "cpu"
    assert(good, message)
  end)

  it("that are not powers of two differ by rounding only", function()
    local third = policy [[ name = "third", options = { init_scale = 1000 },
      decide = function(state)
      return { scale = state.scale, scales = { ["blocks.1"] = 77777, ["blocks.3"] = 0.3 } } end ]]
    local whole, apart = train { policy = "static:loss_scale=1000" }, (train { policy = third })
    for i, row in ipairs(whole) do
      for k = 1, 3 do assert.near(row[k], apart[i][k], 2e-4 * math.abs(row[k])) end
    end
  end)

  it("keep the gradients of a deep network's early layers, which one scale loses", function()
    -- Twelve sigmoid layers: each makes the gradient four times smaller on the way back.
    local function first_layer(chosen)
      engine.seed(1)
      local layers = {}
      for i = 1, 12 do layers[i] = nn.sequential { nn.linear(32, 32), nn.sigmoid() } end
      local net, x, y, seen = nn.sequential(layers), engine.randn(64, 32):keep(),
        engine.rand(64, 32):keep(), nil
      engine.trainer { model = net, data = { next = function() return { x = x, y = y } end },
        steps = 2, log = "quiet", policy = chosen,
        optimizer = engine.optim.sgd(net, { lr = 0, precision = "fp16" }), loss = function(model, b)
          return engine.mse(model(b.x), b.y)
        end,
        on_step = function(t)
          local s = t.stats[0]
          seen = { lost = tonumber(s.zeros) / tonumber(s.count), inf = tonumber(t.record.inf),
            relative_scale = s.relative_scale }
        end }:run()
      return seen
    end
    assert.is_true(first_layer("static:loss_scale=1024").lost > 0.9)
    local apart = first_layer(policy [[ name = "up", options = { init_scale = 2^10 },
      decide = function(state)
      local scales = {}
      for i = 1, 12 do scales[tostring(i)] = 2^10 * 4^(12 - i) end
      return { scale = state.scale, scales = scales } end ]])
    assert.are.equal(4 ^ 11, apart.relative_scale)
    assert.is_true(apart.lost < 0.05)
    assert.are.equal(0, apart.inf)
  end)

  it("show a policy each group's scale and true magnitudes", function()
    local seen = policy [[ name = "seen", options = { init_scale = 2^10 },
      needs = { "groups", "amax", "norm" }, decide = function(state, record)
      local g = record.groups["blocks.2"]
      if record.step == 1 then
        assert(g.scale == 2^15 and record.groups.wte.scale == 2^10, "scales")
      end
      if record.step == 1 then
        assert(math.abs(g.norm / state.norm - 1) < 1e-3, "norm")
        assert(math.abs(g.amax / state.amax - 1) < 1e-3, "amax")
      end
      state.norm, state.amax = g.norm, g.amax
      return { scale = state.scale, scales = { ["blocks.2"] = 2^15 },
        action = record.step == 0 and "skip" or "step" } end ]]
    train { policy = seen, steps = 3 }
  end)

  it("refuse unknown groups and suggest the nearest", function()
    local p = engine.policy.load(policy [[ name = "typo", options = { init_scale = 1 },
      decide = function() return { scale = 1, scales = { ["block.1"] = 2 } } end ]])
    p:tensors({ "blocks.1.w" }, { 1 }, { "blocks.1" }, true)
    local record = M_ffi.new("eng_record")
    record.scale = 1
    local verdict = p:decide(record)
    assert.are.equal(1, verdict.failed)
    assert.truthy(verdict:why():find("'scales' for 'block.1', which matches no group " ..
      "and no tensor; did you mean 'blocks.1'", 1, true))
  end)

  it("leave nothing behind for the next trainer of the model, nor after an error", function()
    local rows, trainer = train { policy = APART, steps = 2 }
    assert.are.equal(2, #rows)
    local first = trainer.model.blocks[1]
    assert.are.equal(2 ^ 5, rawget(first, "_relative_scale"))
    local broken = pcall(first, "no tensor")
    assert.is_false(broken)
    engine.trainer { model = trainer.model, data = trainer.data, optimizer = trainer.optimizer,
      steps = 1, log = "quiet" }
    assert.is_nil(rawget(first, "_relative_scale"))
    local w = engine.tensor({ 2 }, { keep = true }):requires_grad(true)
    ;(w * w):sum():backward()
    assert.are.equal(4, w.grad:item())
  end)

  it("are recorded in the history and survive a resume, bit for bit", function()
    local folder = helper.folder()
    local whole = train { policy = APART, steps = 8, run = folder .. "/whole" }
    local first = train { policy = APART, steps = 3, run = folder .. "/run" }
    local rest = train { policy = APART, steps = 8, run = folder .. "/run", resume = "auto" }
    for _, row in ipairs(rest) do first[#first + 1] = row end
    assert.are.same(whole, first)
    local h = engine.history.open(folder .. "/run")
    local by_name = {}
    for _, row in ipairs(h:tensors(6)) do by_name[row.name] = row end
    assert.are.equal(2 ^ 5, by_name["blocks.1.attn.qkv.weight"].relative_scale)
    assert.are.equal(2 ^ -6, by_name["blocks.2.attn.qkv.weight"].relative_scale)
    assert.are.equal(1, by_name["blocks.3.attn.qkv.weight"].relative_scale)
    h:close()
    helper.remove(folder)
  end)

  it("work in an explicit loop whose scaler gets the model", function()
    local function loop(chosen, unscale)
      engine.seed(3)
      local model = nn.gpt { vocab = 16, context = 8, width = 16, heads = 2, layers = 3 }
      local opt, one = engine.optim.adamw(model, { lr = 1e-2 }), batch()
      local scaler, losses = engine.scaler { policy = chosen, model = model }, {}
      for _ in engine.steps(6) do
        opt:zero_grad()
        local loss = model:loss(one.x, one.y)
        scaler:scale(loss):backward()
        losses[#losses + 1] = loss:item()
        if unscale then
          scaler:unscale(opt)
          losses[#losses + 1] = opt:clip_grad_norm(1)
        end
        assert.is_false(scaler:step(opt).skipped)
        local verdict = scaler:update()
        assert.are.equal(0, verdict.failed, verdict:why())
      end
      return losses
    end
    for _, unscale in ipairs { false, true } do
      local one_scale = engine.policy.load("static", { loss_scale = 1024 })
      assert.are.same(loop(one_scale, unscale), loop(engine.policy.load(APART), unscale))
    end
  end)
end)

describe("a reference backward", function()
  local WANTS = policy [[ name = "wants", options = { init_scale = 2^10, ref_every = 3 },
    needs = { "norm", "norm_ref", "groups" },
    decide = function(state, record)
      if (record.norm_ref ~= nil) ~= (record.step % 3 == 0) then
        error("norm_ref at step " .. record.step)
      end
      state.part = record.groups["blocks.2"].norm_ref or 0
      state.other = record.groups["blocks.1"].norm_ref or 0
      state.own = record.groups["blocks.2"].norm
      return state.scale
    end ]]

  it("leaves the step unchanged, dropout included, and gives the true norm", function()
    local plain = train { policy = "static:loss_scale=1024", dropout = 0.2 }
    local watched, trainer, summary = train { policy = WANTS, dropout = 0.2 }
    assert.are.equal(3, summary.references)
    assert.is_true(summary.reference_s > 0)
    for i, row in ipairs(plain) do
      for k = 1, 3 do assert.are.equal(row[k], watched[i][k]) end
      if i % 3 == 1 then
        assert.near(row[2], watched[i][4], 1e-12)
      else assert.is_true(watched[i][4] ~= watched[i][4]) end
    end
    assert.matches("3 reference backward passes in %d.*%% of the time",
      trainer:summary_text(summary))
  end)

  it("shows in fp16 what was lost", function()
    local rows = train { policy = "static:loss_scale=0.001", precision = "fp16", steps = 1 }
    local watched = train { policy = policy [[ name = "low", options = { init_scale = 0.001 },
      needs = { "norm_ref" },
      decide = function() return 0.001 end ]], precision = "fp16", steps = 1 }
    assert.are.equal(rows[1][2], watched[1][2])
    local ratio = watched[1][4] / watched[1][2]
    assert.is_true(math.abs(ratio - 1) > 1e-3, "ratio " .. ratio)
  end)

  it("can cover some layers only", function()
    local _, trainer = train { policy = WANTS, steps = 4, ref_layers = "^blocks%.2" }
    local part = tonumber(trainer.policy:save():match("part=([^,}]+)"))
    assert.is_true(part > 0)
    assert.are.equal(part, tonumber(trainer.policy:save():match("own=([^,}]+)")))
    assert.are.equal(0, tonumber(trainer.policy:save():match("other=([^,}]+)")))
    assert.has_error(function() train { policy = WANTS, ref_layers = "^nothing" } end)
  end)

  it("accumulates micro-batches, and sees the batches of the step", function()
    local drawn = 0
    local data = { next = function()
      drawn = drawn + 1
      local one = batch()
      one.x:fill(drawn % 16)
      return one
    end }
    local rows = train { policy = WANTS, data = data, accumulate = 2, steps = 4 }
    assert.are.equal(8, drawn)
    for _, i in ipairs { 1, 4 } do assert.near(rows[i][2], rows[i][4], 1e-6 * rows[i][2]) end
  end)

  it("ends when the model raises, and the parameters keep their gradients' memory", function()
    local calls = 0
    local data = { next = function()
      calls = calls + 1
      return calls == 3 and {} or batch()
    end }
    local policy_of_one = policy [[ name = "one", options = { init_scale = 1, ref_every = 1 },
      needs = { "norm_ref" }, decide = function() return 1 end ]]
    assert.has_error(function() train { policy = policy_of_one, data = data } end)
    train { policy = policy_of_one, steps = 2 }
    assert.error_matches(function() train { policy = policy_of_one,
      data = { next = function() return 3 end } } end, "expected a batch to be a table")
  end)

  it("leaves frozen weights frozen and others trainable, also when it cannot begin", function()
    local model = nn.gpt { vocab = 16, context = 8, width = 16, heads = 2, layers = 3 }
    local optimizer, one, short = engine.optim.adamw(model, { lr = 1e-2 }), batch(), false
    local begin = M_ffi.C.eng_params_reference_begin
    model.blocks[1]:freeze()
    local trainer = engine.trainer { model = model, optimizer = optimizer, policy = WANTS,
      steps = 3, log = "quiet", ref_layers = "^blocks%.2", data = { next = function()
        if short then begin(optimizer.params) end      -- the trainer's call then fails
        return one
      end } }
    local function look()
      for _, p in ipairs(optimizer.list) do
        assert.equal(not p.name:find("^blocks%.1"), engine.optim.requires_grad(p.tensor), p.name)
      end
    end
    trainer:run()
    assert.equal(1, trainer.reference.count)
    look()
    trainer.steps, short = 4, true
    assert.error_matches(function() trainer:run() end,
      "a reference backward pass has already begun")
    look()
    short = false
    trainer:run()
    assert.equal(2, trainer.reference.count)
    look()
  end)
end)
