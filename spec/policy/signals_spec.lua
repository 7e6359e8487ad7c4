-- Numbers that a script publishes with engine.signal: policies read them, the history stores them,
-- and replay gives them to other policies.
local json = require "cjson"
local engine = require "engine"
local helper = require "spec.helper"
local published = require("engine.policy.signals").values

local folder
setup(function() folder = helper.folder() end)
teardown(function()
  helper.remove(folder)
  for name in pairs(published) do published[name] = nil end
end)

-- A small fp16 job. It publishes a falling entropy every third step and, at step 5, a number whose
-- name needs quoting in CSV and JSON. Returns the scales.
local function train(run, options)
  for name in pairs(published) do published[name] = nil end
  engine.seed(3)
  local model = engine.nn.linear(8, 4)
  local data = { next = function() return { x = engine.ones(2, 8), y = engine.ones(2, 4) } end }
  local scales, step = {}, 0
  local o = { model = model, data = data, policy = "entropy",
    policy_options = { decay = 0, growth_interval = 7 }, steps = 20, log = "quiet", run = run,
    restart_data = true,
    optimizer = engine.optim.sgd(model, { lr = 1e-3, precision = "fp16" }), precision = "fp16",
    loss = function(m, b)
      if step % 3 == 0 then engine.signal("attention_entropy", 2 - step / 10) end
      if step == 5 then engine.signal('a"b"c', 7) end
      step = step + 1
      return engine.mse(m(b.x), b.y)
    end,
    on_step = function(_, _, verdict) scales[#scales + 1] = verdict.scale end }
  for key, value in pairs(options or {}) do o[key] = value end
  engine.trainer(o):run()
  return scales
end

describe("signals", function()
  local run, scales
  setup(function()
    run = folder .. "/run"
    scales = train(run)
  end)

  it("are refused if their name has a control character", function()
    assert.matches("the name has a control character, [^\n]*: 'a b'$",
      helper.failure(engine.signal, "a\nb", 1))
  end)

  it("are refused if their name cannot be one of --columns, and take an int64", function()
    assert.matches("has a space or a comma, which separate names in lists: 'a b'$",
      helper.failure(engine.signal, "a b", 1))
    engine.signal("position", 7LL)
    assert.equal(7, published.position)
    published.position = nil
  end)

  it("are stored in the history where they change", function()
    local history = engine.history.open(run)
    local list = history:signals()
    assert.are.same({ 'a"b"c', "attention_entropy" }, { list[1].name, list[2].name })
    assert.are.same({ 1, 7 }, { list[1].changes, list[2].changes })
    local at = history:signals_at()
    assert.are.same({ 2, nil }, { at(0).attention_entropy, at(0)['a"b"c'] })
    assert.are.same({ 1.7, 7 }, { at(5).attention_entropy, at(5)['a"b"c'] })
    assert.are.equal(2 - 1.8, at(19).attention_entropy)
    assert.matches('Signals of the script: a"b"c 7, attention_entropy 1.4%.', history:why(6))
    assert.matches("signal attention_entropy +0.2 to 2",
      tostring(history:plot("signals.attention_entropy")))
    local good, why = pcall(history.plot, history, "signals.attention_entrop")
    assert.is_false(good)
    assert.matches("has no signal 'attention_entrop', did you mean 'attention_entropy'",
      why:gsub(";", ","))
    history:close()
  end)

  it("reach a replayed policy, which then decides as it did live", function()
    local r = engine.replay.run(engine.replay.trace(run), "entropy",
      { decay = 0, growth_interval = 7 })
    assert.are.same(scales, r.scales)
    assert.is_true(#scales == 20 and scales[1] ~= scales[20])
  end)

  it("are exported", function()
    local path = folder .. "/out"
    local history = engine.history.open(run)
    local export = require "engine.report.export"
    export.jsonl(history, path)
    local lines = {}
    for line in io.lines(path) do lines[#lines + 1] = json.decode(line) end
    assert.are.same({ attention_entropy = 2 }, lines[1].signals)
    assert.are.same({ attention_entropy = 2 - 1.8, ['a"b"c'] = 7 }, lines[20].signals)
    -- a signal may be called n
    assert.are.equal('{"n":5}', require("engine.base.json").plain { n = 5 })
    export.csv(history, path)
    lines = {}
    for line in io.lines(path) do lines[#lines + 1] = line end
    assert.matches(',"signals%.a""b""c",signals%.attention_entropy$', lines[1])
    assert.matches(",,2$", lines[2])
    assert.are.equal(2 - 1.8, tonumber(lines[21]:match(",7,([%d.]+)$")))
    history:close()
  end)

  it("are dropped with the steps that a resumed run repeats", function()
    local twice = folder .. "/twice"
    train(twice, { checkpoint_every = 5, steps = 10 })
    train(twice, { checkpoint_every = 5, steps = 15, resume = "auto", loss = function(m, b)
      engine.signal("attention_entropy", 0.5)
      return engine.mse(m(b.x), b.y)
    end })
    local history = engine.history.open(twice)
    local at = history:signals_at()
    assert.are.same({ 2 - 0.9, 0.5 }, { at(9).attention_entropy, at(10).attention_entropy })
    history:close()
  end)

  it("include the last evaluation loss, also after a resume", function()
    local source = [[return { options = { init_scale = 1 }, decide = function(state, record)
      return { scale = 1, reason = "seen " .. tostring(record.signals.evaluation_loss ~= nil),
        log = { seen = record.signals.evaluation_loss or -1 } } end }]]
    local function logged(name, steps, resume)
      local batch = { x = engine.ones(2, 8):keep(), y = engine.ones(2, 4):keep() }
      train(folder .. "/" .. name, { policy = { source = source, file = "e.lua" },
        policy_options = {}, checkpoint_every = 5, steps = steps, resume = resume,
        loss = function(m, b) return engine.mse(m(b.x), b.y) end,
        evaluate = { data = { next = function() return batch end }, every = 3, batches = 1 } })
      local history = engine.history.open(folder .. "/" .. name)
      local at, list = history:signals_at(), {}
      for step = 0, steps - 1 do
        local now = at(step)
        list[step + 1] = now["log.seen"]
        assert.equal(now.evaluation_loss or -1, now["log.seen"])
      end
      history:close()
      return list
    end
    local whole = logged("whole", 12)
    assert.equal(-1, whole[3])
    assert.is_true(whole[4] > 0 and whole[7] > 0 and whole[7] ~= whole[4])
    logged("halves", 5)
    assert.same(whole, logged("halves", 12, "auto"))
  end)

  it("reach the policy of an explicit loop", function()
    local model = engine.nn.linear(4, 2)
    local opt = engine.optim.sgd(model, { lr = 1e-3, precision = "fp16" })
    local source = "return { init = function() return { scale = 1 } end, decide = function(_, " ..
      "record) return record.signals.wished end }"
    local scaler = engine.scaler { policy = engine.policy.load { file = "wish", source = source } }
    engine.signal("wished", 64)
    local loss = engine.autocast("fp16",
      function() return engine.mse(model(engine.ones(2, 4)), engine.ones(2, 2)) end)
    scaler:scale(loss):backward()
    scaler:step(opt)
    assert.are.equal(64, scaler:update().scale)
  end)
end)
