-- trainer.state: what the script keeps in it is in every checkpoint and comes back at a resume and
-- a rollback, bit for bit and in place; values that cannot be written are errors of one line.
local engine = require "engine"
local helper = require "spec.helper"
local user_state = require "engine.run.user_state"

local folder

local function trainer(options)
  engine.seed(3)
  local model = engine.nn.linear(3, 2)
  local o = { model = model, optimizer = engine.optim.sgd(model, { lr = 0.1 }), log = "quiet",
    data = { next = function() return { x = engine.ones(4, 3), y = engine.zeros(4, 2) } end },
    loss = function(m, batch) return engine.mse(m(batch.x), batch.y) end,
    steps = 4, attach = false, restart_data = true }
  for key, value in pairs(options or {}) do o[key] = value end
  return engine.trainer(o)
end

describe("trainer.state", function()
  before_each(function() folder = helper.folder() end)
  after_each(function() helper.remove(folder) end)

  it("is an empty table, and an option sets what it begins with", function()
    assert.same({}, trainer().state)
    local own = { best = 3 }
    assert.equal(own, trainer { state = own }.state)
  end)

  it("comes back from a checkpoint: every kind of value, under any key", function()
    local path = folder .. "/run"
    local first = trainer { run = path, steps = 2 }
    local x = engine.randn(2, 3):keep()
    first.state.numbers = { 0.1, -0.0, math.huge, 0 / 0, 2 ^ 60, 5e-324 }
    first.state.text, first.state.bytes = "é\n", "\255\0"
    first.state.deep = { [1] = true, ["1"] = false, [-0.5] = { a = { b = "c" } }, [true] = 1 }
    first.state.big = 12345678901234567890ULL
    first.state.x, first.state.again = x, { x,
      engine.tensor({ 0, 1, 2, 3, 4 }, { dtype = "i64", keep = true }),
      n = engine.full({}, 7, { dtype = "f16", keep = true }) }
    first.state.deep[1], first.state.deep["1"] = engine.ones(1):keep(), engine.zeros(1):keep()
    first:run()
    local s = trainer { run = path, resume = "auto" }.state
    for i = 1, 6 do
      local was, is = first.state.numbers[i], s.numbers[i]
      assert.is_true(was == is and 1 / was == 1 / is or was ~= was and is ~= is)
    end
    assert.same({ "é\n", "\255\0", "c" }, { s.text, s.bytes, s.deep[-0.5].a.b })
    assert.is_true(s.big == 12345678901234567890ULL and s.deep[true] == 1)
    assert.same(x:totable(), s.x:totable())
    assert.same(x:totable(), s.again[1]:totable())
    assert.same({ 0, 1, 2, 3, 4 }, s.again[2]:totable())
    assert.same({ "f16", 7 }, { s.again.n.dtype, s.again.n:item() })
    assert.same({ { 1 }, { 0 } }, { s.deep[1]:totable(), s.deep["1"]:totable() })
  end)

  it("is restored in place: tables and tensors that the script holds stay valid", function()
    local path = folder .. "/run"
    trainer { run = path, steps = 2, state = { mean = engine.full({ 2 }, 5, { keep = true }),
      inner = { n = 1 }, grows = engine.ones(3):keep(), shrinks = engine.ones(1, 3):keep() } }:run()
    local state = { mean = engine.zeros(2):keep(), inner = { n = 0, extra = 1 }, gone = 1,
      grows = engine.ones(1):keep(), shrinks = engine.zeros(4, 3):keep() }
    local mean, inner = state.mean, state.inner
    local t = trainer { run = path, resume = "auto", state = state }
    assert.equal(state, t.state)
    assert.equal(inner, t.state.inner)
    assert.same({ n = 1 }, inner)
    assert.same({ 5, 5 }, mean:totable())
    assert.is_nil(t.state.gone)
    assert.same({ 3 }, t.state.grows.shape)
    assert.same({ { 1, 1, 1 } }, t.state.shrinks:totable())   -- replaced, not filled with copies
    trainer { run = folder .. "/bare", steps = 2 }:run()
    assert.same({ n = 1 }, trainer { resume = folder .. "/bare", state = { n = 1 } }.state)
  end)

  it("goes back with the weights when the policy rolls the run back", function()
    local seen, trail = engine.zeros(1):keep(), {}
    local t
    t = trainer { run = folder .. "/run", checkpoint_every = 2, steps = 7,
      state = { n = 0, seen = seen },
      policy = { file = "back.lua", source = [[return { options = {},
        init = function() return { scale = 1 } end,
        decide = function(state, record)
          if record.step == 4 then return { scale = 1, action = "rollback", back = 1 } end
          return 1
        end }]] },
      on_step = function(own)
        own.state.n = own.state.n + 1
        seen:fill(own.state.n)
        trail[#trail + 1] = own.state.n
      end }
    t:run()
    assert.equal(1, t.rollbacks_made)
    assert.same({ 1, 2, 3, 4, 5, 3, 4 }, trail)
    assert.same({ 4, 4 }, { t.state.n, seen:item() })
  end)

  it("with a value that cannot be written fails before anything is written", function()
    local loop = {}
    loop.again = loop
    local stale
    engine.begin_step()
    stale = engine.zeros(2)
    engine.end_step()
    local kinds = "expected a number, string, boolean, tensor or table of these, got "
    for expected, value in pairs {
      ["trainer.state.a: " .. kinds .. "a function"] = { a = print },
      ["trainer.state.a.b.1: " .. kinds .. "a thread"] =
        { a = { b = { coroutine.create(print) } } },
      ["trainer.state.m: " .. kinds .. "a module"] = { m = engine.nn.linear(1, 1) },
      ["trainer.state.m: " .. kinds .. "an object with a metatable"] = { m = setmetatable({}, {}) },
      ["trainer.state.again: the table contains itself"] = loop,
      ["trainer.state: expected keys to be numbers, strings or booleans, got a table"] =
        { [{}] = 1 },
      ["trainer.state.x: tensor f32 [2] belonged to "] = { x = stale },
      ["trainer.state: expected a plain table, got nothing"] = "nothing",
      ["trainer.state: expected a plain table, got 5"] = 5,
    } do
      local state = value ~= "nothing" and value or nil
      assert.equal(expected, helper.failure(user_state.pack, state):sub(1, #expected))
      local t = trainer { run = folder .. "/run", steps = 1, resume = "auto" }
      t.state = state
      local warned
      t.warn = function(_, text) warned = text end
      assert.is_not_nil(t:run().lost)
      assert.matches("no checkpoint was written: ", warned, 1, true)
      assert.matches(expected, warned, 1, true)
      assert.same({}, engine.checkpoint.steps(folder .. "/run/checkpoints"))
      if type(state) == "table" then
        assert.error_matches(function() trainer { state = state } end, expected, 1, true)
      end
    end
    assert.error_matches(function() trainer { state = 5 } end,
      "trainer: expected state to be a table, got 5", 1, true)
    assert.error_matches(function() trainer { stat = {} } end,
      "trainer: unknown option 'stat'; did you mean 'state'?", 1, true)
  end)
end)
