-- A policy's state: saved as text, restored, rolled back after failures, moved to another policy.
local engine = require "engine"
local made = require "spec.policy.made"

local record = made.record
local load, with, decide = made.load, made.with, made.decide

before_each(made.reset_record)

describe("a saved state", function()
  it("is exact and canonical", function()
    local p = with([[state.v, state.i, state.z, state.tiny, state.third =
      0/0, -math.huge, -0, 5e-324, 1/3
      state["a b\n\"\\"] = "q\"\\\n\0\200" state[1], state[2], state[4], state[-1], state[0.5] =
        "x", true, false, {}, { { {} } } return 1]])
    decide(p)
    local text = p:save()
    assert.are.equal([[{clip=0,failures=0,lr_mul=1,policy="p",scale=1,scales={},]]
      .. [[state={"x",true,[-1]={},[0.5]={{{}}},[4]=false,]]
      .. [=[["a b\n\"\\"]="q\"\\\n\000\200",i=-inf,n=0,scale=8,third=0.3333333333333333,]=]
      .. [[tiny=4.94065645841247e-324,v=nan,z=-0.0},version=1}]], text)
    local q = with("return 1")
    q:restore(text)
    assert.are.equal(text, q:save())
    local checks = with([[return (state.v ~= state.v and state.i == -math.huge
      and 1 / state.z == -math.huge and state.tiny == 2^-1074
      and state.third == 1/3 and state["a b\n\"\\"] == "q\"\\\n\0\200" and state[2] == true
      and state[4] == false) and 2 or 3]])
    checks:restore(text)
    assert.are.equal(2, decide(checks).scale)
  end)

  it("is refused when it is damaged or belongs to another policy", function()
    local p = with("return 1")
    local text = p:save()
    local function refused(bad, message)
      local before = p:save()
      local good, why = pcall(p.restore, p, bad)
      assert.is_false(good)
      assert.truthy(why:find(message, 1, true), why)
      assert.are.equal(before, p:save())
      assert.are.equal(1, decide(p).scale)
    end
    for n = 0, #text - 1 do refused(text:sub(1, n), "damaged") end
    refused(text .. "x", "text after the end")
    refused((text:gsub("version=1", "version=2")),
      "policy p: expected a saved state of version 1, got version 2")
    refused((text:gsub('policy="p"', 'policy="other"')), "saved by policy 'other'")
    refused((text:gsub("^{clip=0,", "{")), "missing or not valid")
    refused((text:gsub("scale=8,scales", "scale=nan,scales")), "missing or not valid")
    refused((text:gsub("scale=8", "scale=os.exit()")), "damaged")
    refused("{version=1,state={" .. ("{"):rep(100) .. ("}"):rep(100) .. "}}",
      "tables nest too deeply")
    refused((text:gsub("n=0", "n=" .. ("{x="):rep(30) .. "1" .. ("}"):rep(30))),
      "tables nest too deeply")
    for _, bad in ipairs { "nan", "-1", "0.5", "1e300", "inf" } do
      refused((text:gsub("failures=0", "failures=" .. bad)), "missing or not valid")
    end
    refused("{[nan]=1}", "a key that is nan")
    refused('{["\\999"]=1}', "an escape above")
    assert.has_error(function() p:restore(5) end)
  end)

  it("nests up to 30 deep", function()
    local function nested(levels)
      return with("local t = state for i = 2, " .. levels .. " do t.x = {} t = t.x end return 4")
    end
    local deep = nested(30)
    assert.are.equal(0, decide(deep).failed)
    local text = deep:save()
    deep:restore(text)
    assert.are.equal(text, deep:save())
    assert.are.equal(1, decide(nested(31)).failed)
  end)

  it("survives random damage", function()
    local p = with("state.n = state.n + 1 state.t = state.t or { 1, { x = 'y' }, true } return 1")
    decide(p)
    local text = p:save()
    math.randomseed(7)
    for _ = 1, 2000 do
      local at = math.random(#text)
      local bad = text:sub(1, at - 1) .. string.char(math.random(0, 255)) ..
        text:sub(at + math.random(0, 2))
      pcall(p.restore, p, bad)
      decide(p)
    end
    p:restore(text)
    assert.are.equal(text, p:save())
  end)

  it("is the only place where a policy can keep data", function()
    for line, text in pairs { ["options.a = options.a + 1"] = "p.lua:1: cannot assign " ..
      "'a': options are constant; use 'state' for values that change",
      ["options.b = 1"] = "cannot assign 'b': options are constant",
      ["math.n = (math.n or 0) + 1"] = "cannot assign 'n': the fields of 'math' are constant",
      ["table.foo = 3"] = "cannot assign 'foo': the fields of 'table' are constant",
      ["math.random = nil"] = "cannot assign 'random': the fields of 'math' are constant",
      ["string.x = 1"] = "cannot assign 'x': the fields of 'string' are constant",
      ["check.x = 1"] = "cannot assign 'x': the fields of 'check' are constant",
      ["table.insert(options, 5)"] = "this table is constant",
      ["table.insert(math, 1, 5)"] = "this table is constant",
      ["table.move({ 7 }, 1, 1, 1, options)"] = "this table is constant",
      ["('x').y = 1"] = "p.lua:1",
      ["return options.growth"] = "the policy has no option 'growth'; it has a",
      ["return options.c"] = "the policy has no option 'c'; did you mean 'a'?" } do
      local p = load(("return { options = { a = 1 }, init = function() return { scale = 1 } " ..
        "end, decide = function(s, r, options) %s end }"):format(line))
      for step = 1, 4 do
        record.step = step
        local v = decide(p)
        assert.are.equal(1, v.failed)
        assert.matches(text, v:why(), 1, true)
      end
    end
    record.step = 0
    local p = load([[return { options = { a = 1, b = 2 },
      init = function() return { scale = 1 } end,
      decide = function(s, r, options)
      local names = {} for k, v in pairs(options) do names[#names + 1] = k .. v end
      table.sort(options) table.remove(options)
      return { scale = 1, reason = table.concat(names, " ") ..
        " " .. next(options) .. type(math.f32) } end }]])
    assert.are.equal("a1 b2 afunction", decide(p):why())
  end)
end)

describe("migration", function()
  it("runs migrate, or starts fresh with the old scale", function()
    local old = load("return { name = 'old', init = function() return { scale = 32, k = { 1, 2 " ..
      "} } end, decide = function(s) return 16 end }")
    decide(old)
    local new = load([[return { name = "new", options = { gain = 3 },
      init = function() return { scale = 1 } end,
      decide = function(s) return s.scale end,
      migrate = function(state, name, options) return { scale = state.k[2] * options.gain,
        from = name } end }]])
    new:take_over(old)
    assert.are.equal(6, new:scale())
    assert.truthy(new:save():find('from="old"', 1, true))
    local plain = load("return { init = function() return { scale = 1, n = 5 } end, decide = " ..
      "function(s) return s.scale + s.n end }")
    plain:take_over(old)
    assert.are.equal(16, plain:scale())
    assert.are.equal(21, decide(plain).scale)
    for body, message in pairs {
      ["return 5"] = "p.lua:1: migrate must return the state as a table, got number",
      ["error('no')"] = "p.lua:1: no",
      ["return {}"] = nil, ["return { scale = -1 }"] =
        "p.lua:1: expected a positive finite initial loss scale, got -1; hint: set state.scale " ..
        "in migrate",
      ["while true do end"] = "p.lua:1: the policy exceeded its instruction budget; a decision " ..
        "usually takes a few hundred instructions" } do
      local bad = load("return { init = function() return { scale = 1 } end, decide = " ..
        "function(s) return 2 end, migrate = function() " .. body .. " end }")
      assert.same({ false, message }, { pcall(bad.take_over, bad, old) })
      assert.are.equal(1, bad:scale())
    end
    assert.are.equal(16, old:scale())
  end)

  it("setting the scale by hand keeps the counters", function()
    local p = engine.policy.load("dynamic", { growth_interval = 3 })
    decide(p)
    p:set_scale(512)
    assert.are.equal(512, p:scale())
    assert.truthy(p:save():find("state={growth_tracker=1,scale=512}", 1, true))
    for _, bad in ipairs { 0, -1, 0 / 0, math.huge } do
      assert.has_error(function() p:set_scale(bad) end)
    end
  end)
end)
