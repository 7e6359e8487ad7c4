-- mode = "lagged": the policy decides one step later than the update, and nothing else changes.
local engine = require "engine"
local helper = require "spec.helper"
local progress = require "engine.run.progress"

local TEXT = require("engine.report.lab").text(20000)

--- Trains a small GPT (or continues with the model and the optimizer of the trainer `of`); returns
--- { loss, scale, overflow, updates }, each a table by step; the run's summary; and the trainer.
local function train(options)
  engine.seed(5)
  local of = options.of
  local model = of and of.model or engine.nn.gpt { vocab = 256, context = 16, width = 32, heads = 2,
    layers = 2, dropout = options.dropout or 0 }
  local seen = { loss = {}, scale = {}, overflow = {}, updates = {} }
  local trainer = engine.trainer {
    model = model, data = engine.data.text { text = TEXT, batch = 4, context = 16, seed = 3 },
    steps = options.steps or 24, log = "quiet",
    optimizer = of and of.optimizer
      or engine.optim.adamw(model, { lr = 1e-3, precision = options.precision or "fp16" }),
    clip = 0.5, accumulate = options.accumulate,
    policy = options.policy, policy_options = options.policy_options, mode = options.mode,
    run = options.run, resume = options.resume,
    checkpoint_every = options.checkpoint_every, trap = options.trap,
    on_step = function(_, record)
      local step = tonumber(record.step)
      seen.loss[step], seen.scale[step], seen.overflow[step] = record.loss, record.scale,
        record.overflow
    end,
  }
  local update = progress.update
  progress.update = function(_, row) seen.updates[row.step - 1] = row.updates end
  local summary = trainer:run()
  progress.update = update
  return seen, summary, trainer
end

describe("lagged training", function()
  it("makes the same updates while the scale is constant", function()
    for _, options in ipairs { { policy = "static", policy_options = { loss_scale = 1024 } },
      { policy = "static", accumulate = 3, dropout = 0.1 } } do
      local a = train(options)
      options.mode = "lagged"
      local b, summary = train(options)
      for step = 1, 22 do
        assert.is_true(math.abs(a.loss[step] - b.loss[step]) <= 1e-6 * a.loss[step],
          ("step %d: %.9g and %.9g"):format(step, a.loss[step], b.loss[step]))
      end
      assert.equal(24, summary.updates)
    end
  end)

  it("skips an overflow at once and lowers the scale a step later", function()
    local options = { policy = "dynamic", policy_options = { init_scale = 2 ^ 30,
      growth_interval = 1000 }, mode = "lagged" }
    local seen, summary = train(options)
    assert.equal(1, seen.overflow[0])
    -- the second step was issued before the first record was read
    assert.equal(2 ^ 30, seen.scale[1])
    assert.equal(2 ^ 29, seen.scale[2])
    assert.is_true(summary.skipped > 2 and summary.updates == 24 - summary.skipped)
    local updates = 0                       -- those that the progress line shows
    for step = 0, 22 do
      assert.is_true(seen.loss[step] == seen.loss[step])
      updates = updates + (seen.overflow[step] == 0 and 1 or 0)
      assert.equal(updates, seen.updates[step])
    end
  end)

  --- Returns a function that makes trainers of one model and optimizer, and a table whose first
  --- element is the rate of the next step, which a spec may make invalid.
  local function by_hand()
    engine.seed(5)
    local model, lr = engine.nn.gpt { vocab = 256, context = 16, width = 32, heads = 2,
      layers = 1 }, { 1e-3 }
    local optimizer = engine.optim.adamw(model, { lr = 1e-3, precision = "fp32" })
    local function trainer(mode)
      return engine.trainer { model = model, data = engine.data.text { text = TEXT, batch = 4,
        context = 16, seed = 3 }, steps = 100, log = "quiet",
        mode = mode, optimizer = optimizer, schedule = function() return lr[1] end }
    end
    return trainer, lr
  end

  it("gives each step its own record after a step that failed", function()
    local trainer, lr = by_hand()
    local t, losses = trainer("lagged"), {}
    local computed = {}
    function t:forward(batch)
      local loss = getmetatable(t).__index.forward(self, batch)
      computed[#computed + 1] = loss:item()
      return loss
    end
    for step = 1, 7 do
      lr[1] = step == 4 and -1 or 1e-3
      local good, record = pcall(t.step, t)
      assert.equal(step ~= 4, good)
      if good and record then losses[#losses + 1] = record.loss end
      engine.end_step()
    end
    -- forward passes 1 to 7: the 4th has no record, and the record of the 7th is in flight
    assert.same({ computed[1], computed[2], computed[3], computed[5], computed[6] }, losses)
  end)

  it("starts cleanly where a run was broken off, lagged or not", function()
    for _, mode in ipairs { "lagged", "sync" } do
      local trainer = by_hand()
      local broken = trainer("lagged")
      for _ = 1, 2 do broken:step() end                     -- one record stays in flight
      local t, want = trainer(mode), nil
      function t:forward(batch)
        local loss = getmetatable(t).__index.forward(self, batch)
        want = want or loss:item()
        return loss
      end
      local record = t:step() or t:step()
      assert.equal(want, record.loss)
      engine.end_step()
    end
  end)

  it("gives a policy that is swapped in its statistics from its first step on", function()
    local steps, seen = {}, {}
    local t = helper.job { text = TEXT, layers = 1, data_seed = 3, precision = "fp16", steps = 8,
      mode = "lagged",
      on_step = function(trainer, record)
        local step = tonumber(record.step)
        steps[#steps + 1] = step
        if step == 3 then
          trainer.policy:swap { file = "counts.lua", source = [[return { name = "counts",
            doc = "counts the gradients", needs = { "hist", "zeros" },
            init = function() return { scale = 1 } end,
            decide = function(state, record)
              return { scale = 8, log = { all = record.hist:sum(-160, 159) + record.zeros } }
            end }]] }
        end
        seen[step] = trainer.policy.name == "counts" and trainer.policy:logs().all or nil
        assert.equal(step, tonumber(record.step))
      end }
    t:run()
    assert.same({ 0, 1, 2, 3, 4, 5, 6, 7 }, steps)
    local all = t.model:count()
    assert.same({ [5] = all, [6] = all, [7] = all }, seen)
  end)

  it("keeps its policy when one that does not allow lagging is swapped in", function()
    local folder = helper.folder()
    local n = 0
    local t = helper.job { text = TEXT, layers = 1, data_seed = 3, precision = "fp16", steps = 8,
      mode = "lagged", run = folder .. "/run",
      on_step = function(trainer)
        n = n + 1
        if n == 2 or n == 4 then trainer.policy:swap(n == 2 and "layerwise" or "norm_ratio") end
      end }
    t:run()
    local told = {}
    for _, event in ipairs(engine.history.open(folder .. "/run"):events("swap_refused")) do
      told[#told + 1] = event.text
    end
    assert.equal("dynamic", t.policy.name)
    assert.equal(8, n)
    assert.matches("dynamic stays.*layerwise sets scales per layer.*dynamic stays.*norm_ratio " ..
      "needs reference backward passes", table.concat(told, " "))
    helper.remove(folder)
  end)

  it("resumes from a checkpoint as if it had not stopped", function()
    local folder = helper.folder()
    local options = { mode = "lagged", dropout = 0.1, policy = "dynamic",
      policy_options = { init_scale = 2 ^ 24, growth_interval = 3 }, checkpoint_every = 8 }
    options.run = folder .. "/whole"
    local whole, _, trainer = train(options)
    options.run, options.steps = folder .. "/parts", 16
    local first = train(options)
    options.steps, options.resume = 24, "auto"
    local second = train(options)
    for step = 17, 22 do assert.equal(whole.loss[step], second.loss[step]) end
    -- The same in one process, with an optimizer that has trained past the checkpoint. This job
    -- writes no checkpoint at step 16, where records would be complete.
    options.run, options.resume, options.of = nil, folder .. "/whole/checkpoints/step-00000008",
      trainer
    local third = train(options)
    for step = 9, 15 do assert.equal(whole.loss[step], third.loss[step]) end
    assert.equal(whole.scale[23], second.scale[23])
    assert.equal(whole.loss[14], first.loss[14])
  end)

  it("writes every step into the history", function()
    local folder = helper.folder()
    train { mode = "lagged", run = folder .. "/run", steps = 11 }
    local history = engine.history.open(folder .. "/run")
    local rows = history:query "SELECT step, loss FROM steps ORDER BY step"
    assert.equal(11, #rows)
    for i, row in ipairs(rows) do assert.equal(i - 1, row.step) end
    history:close()
  end)

  it("counts the updates of the step in flight right after an overflow", function()
    local folder = helper.folder()
    local policy = { file = "counts.lua", source = [[return { name = "counts",
      init = function() return { scale = 2^30 } end,
      decide = function(state, record)
        state.scale = record.overflow and state.scale / 2 or state.scale
        return { scale = state.scale, log = { updates = record.updates } }
      end }]] }
    local seen, summary = train { mode = "lagged", policy = policy, run = folder .. "/run" }
    local history, updates = engine.history.open(folder .. "/run"), 0
    local r = engine.replay.run(engine.replay.trace(folder .. "/run"), policy)
    for i, row in ipairs(history:query "SELECT step, updates FROM steps ORDER BY step") do
      assert.same({ updates, updates }, { row.updates, r.logs.updates[i] })
      updates = updates + (seen.overflow[row.step] == 0 and 1 or 0)
    end
    assert.equal(summary.updates, updates)
    history:close()
    helper.remove(folder)
  end)

  it("counts a step as updated whose verdict is stop or rollback", function()
    local folder = helper.folder()
    for _, action in ipairs { "stop", "rollback" } do
      local run = folder .. "/" .. action
      local policy = { file = "ends.lua", source = ([[return { name = "ends",
        init = function() return { scale = 1024, made = 0 } end,
        decide = function(state, record)
          state.made = state.made + 1
          local now = state.made == 6
          return { scale = 1024, action = now and "%s" or nil, reason = now and "enough" or nil }
        end }]]):format(action) }
      local _, summary = train { mode = "lagged", policy = policy, run = run, steps = 12,
        checkpoint_every = 3 }
      local history = engine.history.open(run)
      local row = history:query "SELECT action, reason FROM steps WHERE step = 5"[1]
      assert.same({ action = "step", reason = "enough" }, row)
      assert.equal(0, history:totals().skipped)
      history:close()
      local r = engine.replay.run(engine.replay.trace(run), policy)
      assert.equal(0, r.skipped)
      assert.equal(action == "stop" and 6 or nil, r.stopped_at)
      assert.equal(r.steps, r.certainty.exact)
      if action == "stop" then
        assert.equal("enough", summary.stopped)
        assert.same({ summary.updates, summary.steps, 0 }, { summary.steps,
          require("engine.run.runs").info(run).updates, summary.skipped })
      else
        -- a policy that does not roll back departs at this verdict
        r = engine.replay.run(engine.replay.trace(run), "static", { loss_scale = 1024 })
        assert.equal(6, r.certainty.from)
      end
    end
    helper.remove(folder)
  end)

  it("refuses unknown modes, and options that need the current record", function()
    helper.refuses("mode=lagged: trap runs an overflowed step again",
      train, { mode = "lagged", trap = "overflow" })
    helper.refuses("expected mode to be 'sync' or 'lagged', got 'later'", train, { mode = "later" })
  end)
end)
