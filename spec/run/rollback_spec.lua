-- Verdicts of `rollback`: what is restored, kept and recorded; resumes and ranks; the policy spike.
local engine = require "engine"
local helper = require "spec.helper"
local start = require "spec.dist.start"

local folder
before_each(function() folder = helper.folder() end)
after_each(function() helper.remove(folder) end)

-- Rolls back once, at step `at`.
local function policy(at, fields)
  return { file = "back.lua", source = ([[return { options = { init_scale = 8 },
    init = function() return { scale = 8, n = 0 } end,
    decide = function(state, record)
      state.n = state.n + 1
      if record.step == %d then return { scale = 8, action = "rollback", %s } end
      return 8
    end }]]):format(at, fields) }
end

-- Batches that depend only on their number. poison(number): a factor on the targets.
local function numbered(poison)
  local at = 0
  return { at = function() return at end, state = function() return at end,
    restore = function(_, state) at = state end,
    next = function()
      at = at + 1
      local rows, targets = {}, {}
      for i = 1, 4 do
        rows[i] = { math.sin(at * 7 + i), math.cos(at * 3 + i * i) }
        targets[i] = { (rows[i][1] - 2 * rows[i][2]) * (poison and poison(at) or 1) }
      end
      return { x = engine.tensor(rows), y = engine.tensor(targets) }
    end }
end

local function job(options)
  engine.seed(5)
  local model = engine.nn.linear(2, 1)
  local o = { model = model, data = numbered(), log = "quiet", steps = 60, precision = "fp16",
    optimizer = engine.optim.adamw(model, { lr = 1e-2, precision = "fp16" }),
    schedule = engine.schedule.cosine { lr = 1e-2, warmup = 5, total = 60 },
    loss = function(m, b) return engine.mse(m(engine.dropout(b.x, 0.2)), b.y) end,
    checkpoint_every = 10, keep = 20 }
  for key, value in pairs(options) do o[key] = value end
  return engine.trainer(o)
end

local function weights(trainer)
  local list = {}
  for _, p in ipairs(trainer.optimizer.list) do
    for _, v in ipairs(p.tensor:view(-1):totable()) do list[#list + 1] = v end
  end
  return list
end

local function events(run, kind) return helper.history(run, "events", kind) end

describe("a rollback", function()
  it("restores weights, moments, random numbers and the data's position, and skips data", function()
    local run = folder .. "/a"
    local trainer = job { run = run, steps = 45, policy = policy(34,
      "back = 10, skip = 3, lr_mul = 0.5, reason = 'try'") }
    trainer:run()
    local event = events(run, "rollback")[1]
    assert.equal(35, event.step)                              -- the step that follows
    assert.matches("back to the weights after 20 steps %(" .. run:gsub("%p", "%%%0") ..
      "/checkpoints/step%-0*20%), 3 steps of data left out, learning rate x0.5: try", event.text)
    assert.same({ 45, 20 + 10, 35 }, { trainer.steps_done, trainer.updates, trainer.policy and 35 })
    assert.matches('n=45', trainer.policy:save():gsub("%s", ""), 1, false)
    -- the same by hand: 20 steps, then 10 with data of 3 steps left out and half the rate
    local by_hand = folder .. "/b"
    job { run = by_hand, steps = 20, policy = policy(-1, "") }:run()
    local other = job { run = by_hand, steps = 30, resume = "auto", policy = policy(-1, ""),
      schedule = function(n)
        return 0.5 * engine.schedule.cosine { lr = 1e-2, warmup = 5, total = 60 }(n)
      end }
    for _ = 1, 3 do other.data:next() end
    other:run()
    assert.same(weights(other), weights(trainer))
    local h = engine.history.open(run)
    local rows = h:steps()
    assert.equal(45, #rows)                                  -- the abandoned steps are kept
    assert.same({ 34, "rollback", 34, 20 }, { rows[35].step, rows[35].action, rows[35].updates,
      rows[36].updates })
    assert.matches("the policy asked for a rollback", h:why(34), 1, true)
    h:close()
  end)

  it("is the same run after an interruption and a resume", function()
    local whole = job { run = folder .. "/a", policy = policy(34, "back = 10, skip = 3") }
    whole:run()
    for _, stop in ipairs { 27, 38, 52 } do      -- before the rollback, just after, later
      local run = folder .. "/b" .. stop
      local clock = 0
      local first = job { run = run, policy = policy(34, "back = 10, skip = 3"),
        on_step = function()
          clock = clock + 1
          if clock == stop then error "power failure" end
        end }
      assert.has_error(function() first:run() end)
      local second = job { run = run, resume = "auto", policy = policy(34, "back = 10, skip = 3") }
      second:run()
      assert.same(weights(whole), weights(second), "stopped after " .. stop)
      assert.equal(whole.updates, second.updates)
      assert.equal(1, #events(run, "rollback"))
    end
  end)

  it("is refused without a checkpoint, without a run, and once `rollbacks` is reached", function()
    local source = [[return { options = { init_scale = 8 },
      decide = function(state, record)
        if record.step % 10 == 5 then return { scale = 8, action = "rollback", back = 2 } end
        return 8
      end }]]
    local trainer = job { policy = { source = source, file = "b.lua" }, steps = 20 }
    trainer:run()
    assert.equal(0, trainer.rollbacks_made)
    local run = folder .. "/a"
    trainer = job { run = run, rollbacks = 2, policy = { source = source, file = "b.lua" } }
    trainer:run()
    assert.equal(2, trainer.rollbacks_made)
    local refused = events(run, "rollback_refused")
    assert.equal(5, refused[1].step)
    assert.equal("there is no intact checkpoint of step 3 or before; hint: checkpoint_every=N",
      refused[1].text)
    assert.matches("the run went back 2 times, the most that", refused[2].text, 1, true)
    run = folder .. "/lagged"
    job { run = run, mode = "lagged", steps = 20, policy = { source = source, file = "b.lua" } }
      :run()
    assert.equal(1, #events(run, "rollback_refused"))
    local replayed = engine.replay.run(engine.replay.trace(run), { source = source,
      file = "b.lua" })
    assert.equal(20, replayed.certainty.exact)       -- the run's own policy
    assert.has_error(function() job { rollbacks = -1 } end,
      "trainer: expected rollbacks to be a whole number of 0 or more, got -1")
  end)

  it("200 times at random leaves a history without gaps", function()
    local run = folder .. "/a"
    local source = [[return { options = { init_scale = 8 },
      init = function() return { scale = 8 } end,
      decide = function(state, record)
        if record.step > 10 and math.random() < 0.3 then
          return { scale = 8, action = "rollback", back = math.random(0, 9),
            skip = math.random(0, 3) }
        end
        return 8
      end }]]
    local trainer = job { run = run, rollbacks = 1000, steps = 800, checkpoint_every = 5,
      keep = 4, policy = { source = source, file = "b.lua" } }
    trainer:run()
    assert.is_true(trainer.rollbacks_made >= 200, trainer.rollbacks_made)
    local h = engine.history.open(run)
    local rows, updates = h:steps(), 0
    assert.equal(800, #rows)
    local to = {}
    for _, event in ipairs(h:events "rollback") do
      to[event.step] = require("engine.base.json").decode(event.data).to
    end
    for i, row in ipairs(rows) do
      if to[row.step] then updates = nil end                 -- rolled back: this row says how many
      assert.equal(i - 1, row.step)
      if updates then assert.equal(updates, row.updates) end
      updates = row.updates + (row.action == "step" and 1 or 0)
    end
    h:close()
    assert.equal(#events(run, "rollback"), trainer.rollbacks_made)
  end)
end)

describe("policy spike", function()
  -- Targets times 1e3 in 30 batches: adamw at this rate takes long to forget them.
  local function poison(at) return at > 120 and at <= 150 and 1e3 or 1 end
  local function loss_after(name, chosen, options)
    local trainer = job { run = folder .. "/" .. name, steps = 450, precision = "fp32",
      data = numbered(poison), policy = chosen, policy_options = options,
      loss = function(m, b) return engine.mse(m(b.x), b.y) end,
      schedule = function() return 0.05 end }
    trainer:run()
    local rows, sum = helper.history(folder .. "/" .. name, "steps"), 0
    for i = #rows - 49, #rows do sum = sum + rows[i].loss / 50 end
    return sum, trainer.rollbacks_made
  end

  it("recovers from bad data, unlike a run without the policy", function()
    local options = { init_scale = 1, warmup = 30, back = 20, leave_out = 40, skips = 2,
      patience = 4 }
    local good, times = loss_after("spike", "spike", options)
    local bad = loss_after("static", "static:loss_scale=1")
    assert.equal(1, times)
    assert.is_true(good < 1 and bad > 10 * good, ("%g %g"):format(good, bad))
  end)
end)

if start.there then
  describe("a rollback of several ranks", function()
    it("agrees on all of them, also after a resume", function()
      local back = helper.write(folder .. "/back.lua", policy(9, "back = 3, skip = 2").source)
      local function losses(name, steps, more)
        local run = folder .. "/" .. name
        local settings = { "steps=" .. steps, "checkpoint_every=3", "policy=" .. back,
          "run=" .. run, unpack(more) }
        local result = helper.shell(start.command(4, "spec/dist/job.lua", settings))
        assert.equal(0, result.code, result.err)
        local list = {}
        for i, row in ipairs(helper.history(run, "steps")) do list[i] = row.loss end
        assert.equal(1, #events(run, "rollback"))
        return list
      end
      for _, zero in ipairs { "zero=0", "zero=1" } do
        local whole = losses("a" .. zero, 16, { zero })
        losses("b" .. zero, 13, { zero })
        assert.same(whole, losses("b" .. zero, 16, { zero, "resume=auto" }))
      end
    end)
  end)
end
