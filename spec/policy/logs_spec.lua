-- What a policy logs (`log` in its verdict) and prints: checks, history, exports, replay.
local json = require "cjson"
local engine = require "engine"
local helper = require "spec.helper"
local made = require "spec.policy.made"

-- Logs at two of every three steps and prints at every step.
local POLICY = [[
return {
  options = { init_scale = 2^8 }, needs = { "amax" },
  init = function(o) return { scale = o.init_scale, n = 0 } end,
  decide = function(state, record, options)
    state.n = state.n + 1
    print("n is", state.n, record, true)
    if state.n % 3 == 0 then return state.scale end
    return { scale = state.scale, log = { twice = record.amax * 2, ["a b"] = state.n } }
  end,
}]]

local folder
setup(function() folder = helper.folder() end)
teardown(function() helper.remove(folder) end)

describe("a policy's log", function()
  before_each(made.reset_record)

  it("reaches the caller, for one decision", function()
    local p = made.with [[
      state.n = state.n + 1
      if state.n == 1 then return { scale = 8, log = { a = 1, b = 0 / 0 } } end
      if state.n == 2 then return { scale = 8, log = { c = -1 / 0 } } end
      if state.n == 4 then error("no") end
      return 8]]
    made.decide(p)
    local logs = p:logs()
    assert.equal(1, logs.a)
    assert.is_true(logs.b ~= logs.b)
    made.decide(p)
    assert.same({ c = -1 / 0 }, p:logs())
    made.decide(p)
    assert.is_nil(p:logs())
    made.decide(p)
    assert.is_nil(p:logs())
  end)

  it("is checked", function()
    made.fails(made.with "return { scale = 8, log = 3 }",
      "log = 3; expected a table { name = number }")
    made.fails(made.with "return { scale = 8, log = { 3 } }", "'log' with a number as a key")
    made.fails(made.with "return { scale = 8, log = { a = 'x' } }",
      "log.a = 'x'; expected a number")
    made.fails(made.with "return { scale = 8, log = { ['a\\27'] = 1 } }",
      "'log' with a name that has a control character")
    made.fails(made.with "return { scale = 8, log = { ['a\\0b'] = 1 } }",
      "'log' with a name that has a control character")
    made.fails(made.with "return { scale = 8, log = { [('x'):rep(101)] = 1 } }",
      "has more than 100 bytes")
    made.fails(made.with [[local t = {} for i = 1, 65 do t["n" .. i] = i end
      return { scale = 8, log = t }]], "a 'log' of more than 64 values")
  end)

  it("of a failed decision is dropped", function()
    local p = made.with "return { scale = 8, log = { a = 1, b = 'x' } }"
    made.decide(p)
    assert.is_nil(p:logs())
  end)
end)

describe("what a policy logs and prints in a run", function()
  local run, shown
  setup(function()
    helper.write(folder .. "/logger.lua", POLICY)
    run = folder .. "/r"
    local result = helper.run { "examples/gpt.lua", "steps=60", "layers=1", "width=32",
      "context=32", "policy=" .. folder .. "/logger.lua", "run=" .. run }
    assert.equal(0, result.code, result.out)
    shown = result.out
  end)

  it("is in the history", function()
    local h = engine.history.open(run)
    assert.equal("log.a b", h:logs()[1].name)
    assert.equal("log.twice", h:logs()[2].name)
    assert.equal(0, #h:signals())
    local at = h:signals_at()
    assert.equal(1, at(0)["log.a b"])
    assert.is_true(at(2)["log.twice"] ~= at(2)["log.twice"])           -- nothing was logged
    assert.equal(4, at(3)["log.a b"])
    assert.matches("The policy logged: log.a b 5, log.twice ", h:why(4), 1, true)
    assert.falsy(tostring(h:why(2)):find("The policy logged", 1, true))
    assert.matches("twice, logged by the policy", tostring(h:plot("log.twice")), 1, true)
    local _, why = pcall(h.plot, h, "twice")
    assert.matches("did you mean 'log.twice'?", why, 1, true)
    _, why = pcall(h.plot, h, "log.twic")
    assert.matches("the run has no log 'log.twic'; did you mean 'log.twice'?", why, 1, true)
    h:close()
  end)

  it("is in exports", function()
    local csv = helper.run { "export", run, "--csv", "-" }.out
    assert.matches(",log.a b,log.twice\n", csv, 1, true)
    assert.matches("\n2,[^\n]*,nan,nan\n", csv)
    local lines = {}
    for line in helper.run { "export", run, "--jsonl", "-" }.out:gmatch("[^\n]+") do
      lines[#lines + 1] = json.decode(line)
    end
    assert.equal(60, #lines)
    assert.equal(2 * lines[4].amax, lines[4].log.twice)
    assert.equal("nan", lines[3].log.twice)
  end)

  it("is in a replay", function()
    local r = engine.replay.run(engine.replay.trace(run), folder .. "/logger.lua")
    assert.equal(1, r.logs["a b"][1])
    assert.is_nil(r.logs["a b"][3])
    local text = json.decode(engine.replay.json { r })
    assert.equal(60, #text.policies[1].log.twice)
    assert.equal(json.null, text.policies[1].log.twice[3])
  end)

  it("ends where another policy continues the run", function()
    local path = folder .. "/cut"
    local function gpt(...)
      return helper.run { "examples/gpt.lua", "layers=1", "width=32", "context=32", "run=" .. path,
        ... }
    end
    assert.equal(0, gpt("steps=5", "checkpoint_every=2", "policy=" .. folder .. "/logger.lua").code)
    local result = gpt("steps=6", "policy=megatron",
      "resume=" .. path .. "/checkpoints/step-00000002")
    assert.equal(0, result.code, result.err)
    assert.matches("the history drops 3 steps recorded after the checkpoint\n", result.out, 1, true)
    local h = engine.history.open(path)
    assert.matches("The policy logged: log.a b 2, log.twice ", h:why(1), 1, true)
    assert.falsy(tostring(h:why(2)):find("The policy logged", 1, true))
    assert.falsy(tostring(h:why(5)):find("The policy logged", 1, true))
    assert.same({}, h:events("layers"))
    h:close()
  end)

  it("has a limited number of printed lines, each with its file and line", function()
    local h = engine.history.open(run)
    local events = h:events("print")
    assert.equal(13, #events)                                -- 8, and one every 10 steps
    assert.equal(folder .. "/logger.lua:6: n is 1 record true", events[1].text)
    assert.matches("n is 11 record true (2 earlier ones not shown)", events[9].text, 1, true)
    assert.matches("n is 21 record true (9 earlier ones not shown)", events[10].text, 1, true)
    assert.matches("step 0: " .. folder .. "/logger.lua:6: n is 1 record true", shown, 1, true)
    h:close()
  end)
end)

it("policies of FP8 layers log and print like others; their name prefixes a log name in use",
  function()
  local function fp8(name, body)
    return { file = name .. ".lua", source = ([[return { name = "%s", kind = "fp8",
      needs = { "tensors" }, options = { init_scale = 1 },
      decide = function(state, record) %s end }]]):format(name, body) }
  end
  local path = folder .. "/fp8"
  helper.job { text = ("a line of text\n"):rep(99), seed = 1, context = 8, width = 16, layers = 1,
    batch = 2, data_seed = 2, steps = 6, run = path, tensorboard = true,
    policy = { file = "own.lua", source = [[return { name = "own", options = { init_scale = 1 },
      decide = function(state, record) return { scale = 1, log = { both = 1 } } end }]] },
    precision = { base = "fp8_current", fp8 = { policy = {
      fp8("first", [[if record.step == 2 then print("here") return 1 end
        return { scale = 1, log = { share = record.step, both = 2 } }]]),
      fp8("second", "return { scale = 1, log = { both = 3 } }") } } } }:run()
  local h = engine.history.open(path)
  local at = h:signals_at()
  local seen = at(1)
  assert.same({ 1, 2, 3, 1 }, { seen["log.both"], seen["log.first.both"], seen["log.second.both"],
    seen["log.share"] })
  assert.is_true(at(2)["log.share"] ~= at(2)["log.share"])
  assert.equal(1, #h:events "print")
  assert.matches("first.lua:%d+: here", h:events("print")[1].text)
  local drawn = tostring(h:plot("log.share", { width = 100 }))
  assert.matches("share, logged by the policy", drawn, 1, true)
  assert.matches("[1 of 6 points not drawn: no finite value]", drawn, 1, true)    -- not: inf, nan
  h:close()
  assert.matches(",log.both,log.first.both,log.second.both,log.share,",
    helper.run { "export", path, "--csv", "-" }.out, 1, true)
end)

it("a policy may log in a run that has no history", function()
  helper.write(folder .. "/logger.lua", POLICY)
  local result = helper.run { "examples/gpt.lua", "steps=3", "layers=1", "width=32", "context=32",
    "policy=" .. folder .. "/logger.lua" }
  assert.equal(0, result.code, result.err)
end)

it("engine.signal refuses the names of policies' logs", function()
  helper.refuses("the name begins with 'log.', which is reserved for policies' logs: 'log.a'",
    engine.signal, "log.a", 1)
end)

it("prints of one decision keep their first bytes, without control characters", function()
  local p = made.with [[for i = 1, 200 do print("line", i, "\27[31m", {}, nil) end return 8]]
  made.decide(p)
  local text = p:printed()
  assert.matches("^p.lua:2: line 1 \\x1B%[31m table nil\n", text)
  assert.is_true(#text < 2048 and #text > 1900)
  assert.is_nil(p:printed())
  made.decide(p)
  assert.matches("^p.lua:2: line 1 ", p:printed())
end)
