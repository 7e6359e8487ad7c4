-- The sandbox that policies run in: nothing escapes from it, and a faulty policy does not harm the
-- run.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local helper = require "spec.helper"
local made = require "spec.policy.made"

local C = M_ffi.C
local record = made.record
local load, with, decide, fails = made.load, made.with, made.decide, made.fails

before_each(made.reset_record)

describe("a policy file", function()
  local function refused(source, text)
    local good, message = pcall(load, source)
    assert.is_false(good)
    assert.are.equal(text, message)
  end

  it("is refused with a message that names file and line", function()
    refused("return {\n decide = functoin() end }",
      "p.lua:2: '}' expected (to close '{' at line 1) near 'end'")
    refused("", "p.lua:1: the file must return one table with the policy's fields, got nothing")
    refused("local x = 1\nreturn 5",
      "p.lua:2: the file must return one table with the policy's fields, got a number")
    refused("return {}, {}", "p.lua:1: the file must return one table with the policy's fields, " ..
      "got several values")
    refused("-- return\nreturn { name = 'x' }",
      "p.lua:2: 'decide' is missing: a policy returns " ..
      "{ decide = function(state, record, options) ... end, ... }")
    refused("return {\n decide = 3 }", "p.lua:2: 'decide' must be a function, got a number")
    refused("return { decide = math.sin }", "p.lua:1: 'decide' must be a function written in Lua")
    refused("return {\n kind = 'fp9', decide = function() end }",
      "p.lua:2: 'kind' must be \"scale\" (a loss scale; the default) " ..
      "or \"fp8\" (scales of FP8 layers), got \"fp9\"")
    refused("return {\n\n decode = function() end }",
      "p.lua:3: unknown field 'decode'; did you mean 'decide'?")
    refused("return { decide = function() end,\n needs = { 'amx' } }",
      "p.lua:2: unknown need 'amx'; did you mean 'amax'?")
    refused("return { colour = 1 }", "p.lua:1: unknown field 'colour'; a policy's fields are " ..
      "name, doc, kind, options, needs, init, decide and migrate")
    refused("return { decide = function() end, needs = { 'colour' } }",
      "p.lua:1: unknown need 'colour'; policies/README.md lists what a policy may need")
    refused("return { decide = function() end,\n needs = { amax = true } }",
      "p.lua:2: 'needs' must be a list of names, such as { \"amax\", \"norm\" }, got a string " ..
      "as a key")
    refused("return { decide = function() end,\n options = { a = {} } }",
      "p.lua:2: option 'a' is a table; a default must be a number, a boolean or a string")
    refused("return { decide = function() end, name = '' }", "p.lua:1: 'name' is empty")
    refused("return { decide = function() end }",
      "p.lua:1: expected a positive finite initial loss scale, got 0; hint: set state.scale in " ..
      "init, or the option init_scale")
    refused("return { kind = 'fp8', decide = function() end, init = function() return {} end }",
      "p.lua:1: expected a positive finite initial scale, got 0; hint: set state.scale in init " ..
      "(1 if the policy uses no scale)")
    refused("return { decide = function() end,\n init = function() return 5 end }",
      "p.lua:2: init must return the state as a table, got number")
    refused("return { decide = function() end, init = function()\n error('no') end }",
      "p.lua:2: no")
    refused("x = 1", "p.lua:1: a policy has no global variables ('x'): write 'local'; " ..
      "values that must last belong in 'state'")
    refused("while true do end", "p.lua:1: the policy exceeded its instruction budget; a " ..
      "decision usually takes a few hundred instructions")
    refused(string.dump(function() return {} end), "p.lua: expected Lua source, got compiled code")
    refused("return { decide = function() end, init = function() return { scale = 1, f = " ..
      "function() end } end }",
      "p.lua:1: init made a state that is not plain data: state.f is a function; " ..
      "only numbers, strings, booleans and tables can be saved")
    refused("return { options = { a = 1 }, decide = function() end, init = function(o) o.a = 2 " ..
      "return { scale = 1 } end }",
      "p.lua:1: cannot assign 'a': options are constant; use 'state' for values that change")
  end)

  it("exposes its needs and its options", function()
    local p = load([[return { name = "n", doc = "d",
      needs = { "amax", "hist", "groups", "norm_ref", "inf" },
      options = { init_scale = 2^10, soft = false, mode = "a" },
      decide = function(state) return state.scale end }]],
      { init_scale = "2^12", soft = "true", mode = "b" })
    assert.are.equal("n", p.name)
    assert.are.equal("d", p.doc)
    assert.are.equal(C.ENG_NEED_AMAX + C.ENG_NEED_HIST + C.ENG_NEED_TENSORS + C.ENG_NEED_NORM_REF,
      p.needs)
    assert.are.same({ init_scale = 4096, soft = true, mode = "b" }, p.options)
    assert.are.same({ init_scale = 1024, soft = false, mode = "a" }, p.defaults)
    assert.are.equal(4096, p:scale())
    assert.are.equal("policy n (p.lua): scale 4096, init_scale=4096 mode=b soft=true", tostring(p))
  end)

  it("may omit init", function()
    local p = load("return { options = { init_scale = 32 }, decide = function(state) " ..
      "state.scale = state.scale / 2 return state.scale end }")
    assert.are.equal(32, p:scale())
    assert.are.equal(16, decide(p).scale)
  end)

  it("accepts options after a colon", function()
    local p = engine.policy.load("dynamic:init_scale=2^4,growth_interval=7",
      { init_scale = 2, growth_factor = 4 })
    assert.are.same({ 16, 7, 4 }, { p.options.init_scale, p.options.growth_interval,
      p.options.growth_factor })
    assert.are.equal(8, engine.policy.load("policies/dynamic.lua:init_scale=8"):scale())
    assert.has_error(function() engine.policy.load "dynamic:init_scale=8,growth" end,
      "policy dynamic: expected name=value after the colon, separated by commas, got 'growth'")
    assert.has_error(function() engine.policy.load "dynamic:growth_factor" end,
      "policy dynamic: expected name=value after the colon, separated by commas, got " ..
      "'growth_factor'")
    assert.has_error(function() engine.policy.load "dynamic:init_scle=8" end,
      "policies/dynamic.lua: policy 'dynamic' has no option 'init_scle'; " ..
      "did you mean 'init_scale'?")
  end)

  it("converts options to the type of their default", function()
    local source = "return { options = {\n init_scale = 1, on = true }, decide = function(s) " ..
      "return s.scale end }"
    assert.has_error(function() load(source, { init_scle = 2 }) end,
      "p.lua: policy 'p' has no option 'init_scle'; did you mean 'init_scale'?")
    assert.has_error(function() load(source, { colour = 2 }) end,
      "p.lua: policy 'p' has no option 'colour'; it has init_scale, on")
    assert.has_error(function() load(source, { init_scale = "much" }) end,
      "p.lua:2: option 'init_scale' must be a number, got 'much'")
    assert.has_error(function() load(source, { on = 1 }) end,
      "p.lua:2: option 'on' must be true or false, got '1'")
    assert.are.equal(0.1, load(source, { init_scale = 0.1 }):scale())
    assert.are.equal(5e-324, load(source, { init_scale = 5e-324 }):scale())
  end)
end)

describe("the sandbox", function()
  it("cannot be escaped", function()
    for _, name in ipairs { "load", "loadstring", "loadfile", "dofile", "require", "collectgarbage",
      "getfenv", "setfenv", "newproxy",
      "rawset", "rawget", "setmetatable", "getmetatable", "xpcall", "coroutine", "io",
      "os", "debug", "package", "ffi", "jit", "module", "_G" } do
      fails(with("local x = " .. name .. " return 1"),
        ("p.lua:2: '%s' is not available in a policy"):format(name))
    end
    fails(with("return string.dump(function() end)"), "attempt to call field 'dump'")
    fails(with("local x = math.randomseed return x.y"), "attempt to index")
    fails(with("return mth.huge"), "'mth' is not defined; did you mean 'math'?")
    fails(with("scale = 4 return 1"), "a policy has no global variables ('scale')")
    for _, name in ipairs { "assert", "math", "print", "ipairs" } do   -- an existing name
      fails(with(name .. " = 4 return 1"),
        ("a policy has no global variables ('%s')"):format(name))
    end
    fails(with("local x = 1LL return x"), "decide returned a cdata")
    fails(with("local x = 1LL return x.new"), "has no member named 'new'")
    fails(with("return ('x'):rep(2):dump()"), "attempt to call method 'dump'")
    fails(with("string.format('%p', 'x') return 1"), "'%p' is not available")
  end)

  it("stops endless loops, also under pcall", function()
    for _, body in ipairs {
      "while true do end", "repeat until false", "for i = 1, 1e18 do end",
      "while true do pcall(function() while true do end end) end",
      "return select(2, pcall(function() while true do end end)) and 16",
      "local function f() return f() end return f()",
      "for _ in ('x'):rep(1e5):gmatch('.') do for _ in ('x'):rep(1e5):gmatch('.') do end end",
      "while true do table.sort({ 3, 1, 2 }, function(a, b) return a < b end) end",
      -- When the stack is nearly full, LuaJIT raises before it counts an instruction. Such a loop
      -- ends because each pcall itself costs budget.
      "local function f() while true do pcall(f) end end f()",
      "local f f = function() pcall(f) pcall(f) return f() end f()",
    } do
      fails(with(body), "the policy exceeded its instruction budget")
    end
    -- The whole call ends, not only the loop: nothing after it runs.
    fails(with("state.n = 1; pcall(function() while true do end end); state.n = 2; return 1"),
      "instruction budget")
  end)

  it("stops expensive single calls", function()
    fails(with("return ('a'):rep(5000):find(('a?'):rep(100) .. ('a'):rep(5000)) and 2 or 1"),
      "budget")
    fails(with("return ('a'):rep(5000):match('.-.-.-.-b') and 2 or 1"),
      "budget")
    fails(with("while true do local x = ('ab'):rep(4e5) end"), "budget")
    fails(with("local t = {} for i = 1, 1e5 do t[i] = 'abc' end while true do local x = " ..
      "table.concat(t) end"), "budget")
    fails(with("local t = {} for i = 1, 1e4 do t[i] = -i end while true do table.sort(t) end"),
      "budget")
    fails(with("table.insert({}, -2^31, 1) return 1"),
      "table.insert: expected a position from 1 to 1, got -2147483648")
    fails(with("local t = {} for i = 1, 1e4 do t[i] = i end while true do table.insert(t, 1, 0) " ..
      "t[#t] = nil end"), "budget")
    local empty = "local t = {} for i = 1, 6e4 do t[i] = '' end "
    for call, before in pairs {
      ["table.concat(t)"] = empty,
      ["pcall(table.concat, t, '', 1, 6e4 + 1)"] = empty,
      ["next(t)"] = empty .. "for i = 1, 6e4 do t[i] = nil end ",
      ["pairs(t)"] = empty .. "for i = 1, 6e4 do t[i] = nil end ",
      ["select('#', unpack({}, 1, 7000))"] = "",
      ["select('#', s:byte(1, -1))"] = "local s = ('x'):rep(7000) ",
      ["s:sub(1, -1)"] = "local s = ('x'):rep(1e5) ",
      ["tonumber(s)"] = "local s = ('1'):rep(1e5) ",
      ["table.sort { s, s .. 1 }"] = "local s = ('x'):rep(1e5) local k = s .. 1 ",
      ["s:format()"] = "local s = ('%%'):rep(5e4) ",
      ["('%d'):format(s)"] = "local s = ('1'):rep(1e5) ",
    } do
      fails(with(before .. "for _ = 1, 2e4 do local _ = " .. call .. " end return 1"),
        "instruction budget")
    end
    assert.are.equal(7, decide(with("local s = table.concat({ 1, 2, 3 }, ',', 2) .. " ..
      "tonumber('11', 2) .. select('#', unpack({ 1, 2 }, 1, 3)) return #s + s:byte(1) - 50 + " ..
      "#('%5s'):format('x') - 2 + (pcall(table.concat, {}, '', 1, 1e9) and 1 or -1)")).scale)
    assert.are.equal(6, decide(with(
      "local t = { 1, 2 } table.insert(t, 1, 3) table.insert(t, 4, 5) " ..
      "table.insert(t, 3) return t[1] + t[5]")).scale)
  end)

  it("names the file, the line and the function of a wrong argument", function()
    for call, text in pairs {
      ["unpack(nil)"] = "p.lua:2: bad argument #1 to 'unpack' (table expected, got nil)",
      ["('x'):rep()"] = "p.lua:2: bad argument #2 to 'rep' (number expected, got no value)",
      ["table.insert(nil, 1)"] = "p.lua:2: bad argument #1 to 'insert' (table expected, got nil)",
      ["table.concat({ {} })"] = "p.lua:2: invalid value (table) at index 1 in table for 'concat'",
    } do
      assert.are.equal(text, decide(with(call .. " return 1")):why())
    end
    fails(with("return #('x'):rep(4e6)"), "p.lua: out of memory")
  end)

  it("charges every comparison of a pattern", function()
    for _, call in ipairs {
      "('a'):rep(3e4):find('%f[' .. ('b'):rep(3e4) .. ']')",
      "('a'):rep(3e4):gsub('[' .. ('b'):rep(3e4) .. ']-', '')",
      "('a'):rep(1e6):find('b.')", "('a'):rep(1e6):find('b', 1, true)",
      "('a'):rep(1e5):find(('a'):rep(5e4) .. 'b', 1, true)",
      "('a'):rep(1e5):gsub('()', ('x'):rep(1e5))",
      "('a'):find(('b'):rep(1e6))", "pcall(string.find, 'a', '[' .. ('b'):rep(1e6))",
    } do
      fails(with("for _ = 1, 20 do local _ = " .. call .. " end return 1"), "instruction budget")
    end
  end)

  it("stops a sort that takes quadratic time", function()
    -- McIlroy's adversary: values are decided while a sort compares them, each as late as possible.
    local n, decided, last = 5000, 0, nil
    local value, order = {}, {}
    for i = 1, n do order[i] = i end
    local function decided_value(i)
      if not value[i] then decided = decided + 1 value[i] = decided end
    end
    table.sort(order, function(a, b)
      if not value[a] and not value[b] then decided_value(a == last and a or b) end
      if not value[a] then last = a elseif not value[b] then last = b end
      return (value[a] or n + 1) < (value[b] or n + 1)
    end)
    for i = 1, n do decided_value(i) end
    fails(with("local t = table.move(list, 1, #list, 1, {}) table.sort(t) return 1",
      "local list = {" .. table.concat(value, ",") .. "}"), "instruction budget")
    assert.are.equal(123, decide(with("local t = { 2, 3, 1 } table.sort(t) " ..
      "return tonumber(table.concat(t))")).scale)
  end)

  it("reads the clock and the interrupt inside a match", function()
    local body = "return ('a'):rep(2e4):match('.-.-.-.-b') and 2 or 1"
    engine.policy.limits { instructions = 1e12, seconds = 0.05 }
    local p = with(body)
    engine.policy.limits { instructions = 1e6, seconds = 2 }
    fails(p, "limit of processor time")
    engine.policy.limits { instructions = 1e12, seconds = 60 }
    p = with(body)
    engine.policy.limits { instructions = 1e6, seconds = 2 }
    C.eng_interrupt(2)
    local v = decide(p)
    C.eng_interrupt(0)
    assert.truthy(v:why():find("interrupted", 1, true), v:why())
  end)

  it("stops recursion before any stack overflows", function()
    fails(with("local function f(n) return 1 + f(n) end return f(1)"), "stack overflow")
    fails(with("local function f() return (string.gsub('x', 'x', f)) end f() return 1"),
      "calls nest too deeply")
    fails(with("local function f() table.sort({ 1, 2 }, function(a, b) f() return a < b end) " ..
      "end f() return 1"), "calls nest too deeply")
    fails(with("return ('('):rep(1e4):find(('('):rep(1e4))"), "")
    fails(with("local s = ('x'):rep(300) return (s:find(('(x'):rep(300)))"), "too many captures")
  end)

  it("caps memory", function()
    fails(with("local t = {} for i = 1, 1e9 do t[i] = { i } end return 1"),
      "out of memory: a policy may use 8388608 bytes")
    fails(with("state.x = 'a' while true do state.x = state.x .. state.x end"), "out of memory")
    fails(with("return #('a'):rep(2^30) + 1"), "out of memory")
    -- The policy keeps working afterwards.
    local p = with("state.n = state.n + 1 if state.n % 2 == 1 then return state.n end local t = " ..
      "{} while true do t[#t + 1] = { 1, 2, 3 } end")
    assert.are.equal(1, decide(p).scale)
    for _ = 1, 5 do assert.are.equal(1, decide(p).failed) end
    assert.are.equal(5, p:failures())
    assert.truthy(p:save():find("state={n=1,scale=8}", 1, true))
  end)

  it("has one code for running out of its memory, in the file's own code and in init", function()
    local out = M_ffi.new("eng_policy *[1]")
    local function status_of(own, init)
      local source = ("%s return { init = function() %s return { scale = 1 } end, " ..
        "decide = function() return 1 end }"):format(own, init)
      local status = C.eng_policy_load(out, source, #source, "p.lua", nil, nil, 0)
      if status == 0 then status = C.eng_policy_init(out[0]) end
      C.eng_policy_free(out[0])
      return status
    end
    local hog = "local t = {} for i = 1, 1e6 do t[i] = { i } end"
    assert.are.equal(0, status_of("", ""))
    assert.are.equal(C.ENG_ERR_POLICY, status_of(hog, ""))
    assert.are.equal(C.ENG_ERR_POLICY, status_of("", hog))
  end)

  it("has adjustable limits", function()
    engine.policy.limits { instructions = 1e5, memory = 2 ^ 20 }
    local p, small = with("for i = 1, 2e5 do end return 4"), with("return #('a'):rep(3e5)")
    engine.policy.limits { instructions = 1e6, memory = 8 * 2 ^ 20 }
    fails(p, "instruction budget")
    fails(small, "out of memory: a policy may use 1048576 bytes")
    assert.are.equal(4, decide(with("for i = 1, 2e5 do end return 4")).scale)
  end)

  it("gives the same answer to the same record", function()
    local source = [[return { init = function() return { scale = math.random() } end,
      decide = function(state, record) return { scale = math.random() +
        math.random(10) + math.random(-3, 3) + 5,
        reason = tostring(math.random(2^40)) } end }]]
    local a, b = load(source), load(source)
    assert.are.equal(a:scale(), b:scale())
    local seen = {}
    for step = 0, 20 do
      record.step = step
      local x, y = decide(a), decide(b)
      assert.are.equal(0, x.failed)
      assert.are.equal(x.scale, y.scale)
      assert.are.equal(x:why(), y:why())
      assert.is_nil(seen[x:why()])
      seen[x:why()] = true
    end
    -- A restored policy draws the same numbers as one that was not interrupted.
    record.step = 20
    local c = load(source)
    c:restore(b:save())
    assert.are.equal(decide(b).scale, decide(c).scale)
  end)

  it("draws random numbers evenly", function()
    local p = with([[local sum, hits = 0, {}
      for i = 1, 10000 do
        sum = sum + math.random()
        local d = math.random(6)
        hits[d] = (hits[d] or 0) + 1
      end
      local least, most = 1e9, 0
      for d = 1, 6 do least, most = math.min(least, hits[d]), math.max(most, hits[d]) end
      return { scale = sum / 10000, clip = least, lr_mul = most }]])
    local v = decide(p)
    assert.are.equal(0, v.failed, v:why())
    assert.is_true(math.abs(v.scale - 0.5) < 0.02)
    assert.is_true(v.clip > 1500 and v.lr_mul < 1850)
  end)

  it("walks tables in a fixed order", function()
    local p = with([[local t, out =
      { zebra = 1, apple = 2, [3] = 3, [1] = 4, [true] = 5, mango = 6 }, {}
      for k in pairs(t) do out[#out + 1] = tostring(k) end
      local k = next(t) while k ~= nil do out[#out + 1] = tostring(k) k = next(t, k) end
      for key in pairs { a = 1, b = 2 } do t[key] = key end
      t.b = nil for key, value in pairs { a = 1, b = 2, c = 3 } do out[#out + 1] = key .. value end
      return { scale = 1, reason = table.concat(out, " ") .. (next({}) and "x" or "") }]])
    assert.are.equal("1 3 apple mango zebra true 1 3 apple mango zebra true a1 b2 c3",
      decide(p):why())
    local removing = with("local t, n = { 1, 2, 3, a = 1, b = 2 }, 0 for k in pairs(t) do t[k] " ..
      "= nil t.b = nil n = n + 1 end return n")
    assert.are.equal(4, decide(removing).scale)
    fails(with("for k in pairs { [{}] = 1 } do end return 1"),
      "a table as a key has no fixed order")
  end)

  it("shows no addresses", function()
    local p = load([[return { needs = { "hist" },
      init = function() return { scale = 1 } end,
      decide = function(s, r)
      local list = { {}, pcall, r, r.hist, false, 1.5, true }
      for i, value in ipairs(list) do list[i] = tostring(value) end
      return { scale = 1, reason = table.concat(list, " ") } end }]])
    assert.are.equal("table function record record.hist false 1.5 true", decide(p):why())
    fails(with("return { scale = 1, reason = string.format('%s', {}) }"),
      "argument 2 is a table and cannot be converted to text")
  end)

  it("rounds to float32", function()
    assert.are.equal(85196.796875, decide(with("return math.f32(85196.8)")).scale)
    assert.are.equal(2 ^ -149, decide(with("return math.f32(2^-149)")).scale)
    fails(with("return math.f32(2^-151)"), "scale = 0")
    fails(with("return math.f32(1e39)"), "scale = inf")
  end)
end)

describe("a verdict", function()
  it("may be a number or a table", function()
    local v = decide(with("return 4"))
    assert.are.same({ 4, "step", 0, 1, "" }, { v.scale, v:what(), v.clip, v.lr_mul, v:why() })
    assert.are.equal("skip", decide(with("return 4"), true):what())
    v = decide(with("return { scale = 4, action = 'retry', clip = 1.5, lr_mul = 0.5, reason = " ..
      "'because' }"))
    assert.are.same({ 4, "retry", 1.5, 0.5, "because" },
      { v.scale, v:what(), v.clip, v.lr_mul, v:why() })
    assert.are.equal("retry, scale 4, clip 1.5, lr x0.5: because", tostring(v))
    assert.are.equal("step", decide(with("return { scale = 4, action = 'step' }"), true):what())
    assert.are.equal(0, decide(with("return { scale = 4, clip = math.huge }")).clip)
    assert.are.equal(0, decide(with("return { scale = 4, lr_mul = 0 }")).lr_mul)
  end)

  it("that is invalid fails, and the last good one still applies", function()
    for body, text in pairs {
      ["return 0 / 0"] = "p.lua:2: decide returned scale = nan; expected a positive finite number",
      ["return 0"] = "scale = 0;", ["return -0"] = "scale = -0.0;", ["return -1"] = "scale = -1;",
      ["return 1e400"] = "scale = inf;",
      ["return '16'"] = "decide returned a string", ["return nil"] = "decide returned a nil",
      ["return"] = "decide returned nothing",
      ["return true"] = "decide returned a boolean", ["return 1, 2"] = "several values",
      ["return {}"] = "a table without 'scale'",
      ["return { 4 }"] = "a table with a number as a key",
      ["return { scal = 4 }"] = "an unknown field 'scal'; did you mean 'scale'?",
      ["return { colour = 4 }"] =
        "an unknown field 'colour'; `engine help verdict` lists the fields of a verdict",
      ["return { scale = '4' }"] = "scale = '4'; expected a positive finite number",
      ["return { scale = 4, action = 'skp' }"] = "action = 'skp'; did you mean 'skip'?",
      ["return { scale = 4, action = 'x' }"] =
        "expected 'step', 'skip', 'retry', 'stop' or 'rollback'",
      ["return { scale = 4, action = 'rollback', back = -1 }"] =
        "back = -1; expected a whole number of steps, 0 or more",
      ["return { scale = 4, action = 'rollback', skip = 1.5 }"] =
        "skip = 1.5; expected a whole number of steps, 0 or more",
      ["return { scale = 4, back = 3 }"] = "'back' or 'skip' without action = 'rollback'",
      ["return { scale = 4, action = 1 }"] = "action = 1;",
      ["return { scale = 4, clip = 0 }"] = "clip = 0;",
      ["return { scale = 4, clip = 0/0 }"] = "clip = nan;",
        ["return { scale = 4, clip = true }"] = "clip = true;",
      ["return { scale = 4, lr_mul = -1 }"] = "lr_mul = -1;",
      ["return { scale = 4, lr_mul = 1/0 }"] = "lr_mul = inf;",
      ["return { scale = 4, reason = {} }"] = "reason = table;",
      ["return { scale = 4, scales = { a = 1 } }"] = "this run has a single scale",
      ["error('boom')"] = "p.lua:2: boom", ["error('boom', 0)"] = "p.lua: boom",
      ["error({})"] = "p.lua: the policy raised an error that is not a string but a table",
      ["error()"] = "p.lua: the policy raised an error without a message",
      ["local x = nil return x.y"] = "p.lua:2: attempt to index local 'x' (a nil value)",
      ["state.f = function() end return 4"] =
        "a state that is not plain data: state.f is a function",
      ["state.a = { b = {} } state.a.b[3] = { x = math.sin } return 4"] =
        "state.a.b[3].x is a function",
      ["state.me = state return 4"] = "state.me: the same table is in two places",
      ["local t = {} state.a, state.b = t, t return 4"] = "the same table is in two places",
      ["state.r = record return 4"] = "state.r: parts of the record cannot be stored",
      ["state[{}] = 1 return 4"] = "the key is not a number, string or boolean",
      ["local t = state for i = 1, 100 do t.x = {} t = t.x end return 4"] =
        "x: tables nest more than 30 deep, the limit of a state",
      ["state.n = 1LL return 4"] = "state.n is a cdata",
    } do
      fails(with(body), text)
    end
  end)

  it("keeps scale, clip and lr_mul of the last good verdict", function()
    local p = with("state.n = state.n + 1 if state.n == 1 then return { scale = 4, clip = 2, " ..
      "lr_mul = 0.5, action = 'retry' } end state.n = 99 error('x')")
    decide(p)
    local v = decide(p)
    assert.are.same({ 1, 4, 2, 0.5, "step" }, { v.failed, v.scale, v.clip, v.lr_mul, v:what() })
    assert.truthy(p:save():find("state={n=1,scale=8}", 1, true))
  end)

  it("undoes exactly what a failed call changed, whatever the state was before", function()
    -- Fields appear, disappear and change type, in flat and nested states; every third call
    -- corrupts the state and fails.
    local p = with([[
      state.calls = (state.calls or 0) + 1
      local turn = state.calls
      if turn % 7 == 0 then state.flag = turn % 2 == 0 end
      if turn % 5 == 0 then state.extra = turn end
      if turn % 11 == 0 then state.extra = "text" end
      if turn % 13 == 0 then state.extra = nil end
      if turn % 17 == 0 then state.list = { turn, { turn } } end
      if turn % 19 == 0 then state.list = nil end
      if record.inf > 0 then
        state.n, state.flag, state.extra, state.list, state.scale, state.more =
          0 / 0, nil, {}, function() end, nil, "junk"
        error("damage")
      end
      state.n = turn
      return turn]])
    local last, good = 8, 0
    for i = 1, 300 do
      record.inf = i % 3 == 0 and 1 or 0
      local before = p:save():match("state=.*")
      local v = decide(p)
      if i % 3 == 0 then
        assert.are.same({ 1, last }, { v.failed, v.scale })
        assert.are.equal(before, p:save():match("state=.*"))
      else
        good = good + 1
        assert.are.same({ 0, good }, { v.failed, v.scale }, v:why())
        last = v.scale
      end
    end
    assert.are.equal(200, last)
  end)

  it("truncates a long reason between characters", function()
    local why = decide(with("return { scale = 1, reason = ('\195\169'):rep(200) }")):why()
    assert.are.equal(("\195\169"):rep(127), why)
  end)

  it("removes terminal control characters", function()
    local why = decide(with([[return { scale = 1,
      reason = "\27[2Ja\r\nb\tc\127\194\155\255\195\169 \226\130\172\237\160\128" }]])):why()
    assert.are.equal("\\x1B[2Ja\\x0D b c\\x7F\\xC2\\x9B\\xFF\195\169 \226\130\172" ..
      "\\xED\\xA0\\x80", why)
    assert.has_error(function() load(
      "return { name = 'a\\27b', options = { init_scale = 1 }, " ..
      "decide = function(s) return s.scale end }") end,
      "p.lua:1: 'name' has a control character, a character that breaks lines or changes the " ..
      "direction of text, or bytes that are not UTF-8")
  end)
end)

describe("helpers shared by scalers", function()
  local function init(line, options)
    return load(("return { options = { scale = 4, least = 1, interval = 10, strict = true }, " ..
      "init = function(options) %s return { scale = 1 } end, "
      .. "decide = function(state) return state.scale end }"):format(line), options)
  end

  it("refuses options outside their range and returns valid ones", function()
    for _, case in ipairs { { "positive", 0, "a positive finite number" },
      { "positive", 1 / 0, "a positive finite number" },
      { "float32", 1e39, "a positive number that float32 can hold" },
      { "float32", 1e-60, "a positive number that float32 can hold" },
      { "not_negative", -1, "0 or a positive finite number" },
      { "factor", 1, "greater than 1 and finite" },
        { "steps", 0, "a positive number of steps" } } do
      assert.has_error(function() init(("check.%s(options, 'scale', 'interval')"):format(case[1]),
        { scale = case[2] }) end,
        ("p.lua: scale must be %s, got %.14g"):format(case[3], case[2]))
    end
    assert.has_error(function() init("check.share(options, 'scale')", { scale = 1 }) end,
      "p.lua: scale must lie strictly between 0 and 1, got 1")
    assert.has_error(function() init("check.positive(options, 'scale')", { scale = 0 / 0 }) end,
      "p.lua: scale must be a positive finite number, got nan")
    init("check.expect(options, true, 'scale > 1')", { scale = 0 })
    assert.has_error(function() init("check.expect(options, false, 'scale > interval > 1')",
      { scale = 0.5, interval = 2 }) end,
      "p.lua: expected scale > interval > 1, got scale = 0.5, interval = 2")
    assert.has_error(function() engine.policy.load "bandit:period=0" end,
      "policies/bandit.lua: expected period >= 1 and discount in (0, 1], got period = 0, " ..
      "discount = 0.95")
    local p = load("return { options = { a = 0.1, b = 7 }, init = function(o) local a, b = " ..
      "check.float32(o, 'a', 'b') return { scale = a * 2^27 + b } end, "
      .. "decide = function(state) return state.scale end }")
    assert.are.equal(13421773 + 7, p:scale())              -- 0.1 as a float32 is 13421773 / 2^27
    for line, text in pairs { ["check.positive(options, 'scal')"] = "has no option 'scal'; " ..
      "did you mean 'scale'?", ["check.positive(options, nil)"] = "string expected",
      ["check.positive(options, 'strict')"] = "expected the name of a numeric option, got 'strict'",
      ["check.positive(1, 'scale')"] = "table expected" } do
      helper.refuses(text, init, line)
    end
  end)

  it("checks the options of rescale and returns the first scale", function()
    local function scale(loss_scale, init_scale, growth_interval, strict)
      return load(("return { options = { loss_scale = %s, init_scale = %s, " ..
        "growth_interval = %s, strict = %s }, init = function(o) return { scale = " ..
        "check.rescale(o) } end, decide = function(state) return state.scale end }"):format(
        loss_scale, init_scale, growth_interval, strict ~= false)):scale()
    end
    assert.are.equal(13421773 / 2^27, scale(0, 0.1, 10))
    assert.are.equal(3, scale(3, -1, 10))
    assert.are.equal(8, scale(0, 8, 2.5, false))
    helper.refuses("growth_interval must be a whole number of 1 or more, got 2.5; " ..
      "strict=false accepts it", scale, 0, 8, 2.5)
    assert.is_nil(select(2, pcall(load, "return { options = { loss_scale = 0, init_scale = 8, " ..
      "growth_interval = 0 }, init = function(o) return { scale = check.rescale(o) } end, " ..
      "decide = function() end }")):find("strict", 1, true))
    helper.refuses("loss_scale must be 0 or a positive finite number, got -1", scale, -1, 8, 10)
    helper.refuses("init_scale must be a positive number that float32 can hold, got 0", scale, 0,
      0, 10)
  end)

  it("refuses probable mistakes unless strict=false", function()
    for line, text in pairs { ["check.count(options, 'scale')"] =
        "scale must be a whole number of 1 or more, got 2.5",
      ["check.count(options, 'scale', 'try 3')"] =
        "scale must be a whole number of 1 or more, got 2.5; try 3",
      ["check.trap(options, options.scale == 2.5, 'no good')"] = "no good",
      ["check.floor(options, 'interval', 'scale')"] =
        "interval = 10 is above scale = 2.5, so an overflow would raise the scale; " ..
        "lower interval" } do
      assert.has_error(function() init(line, { scale = 2.5 }) end, "p.lua: " .. text ..
        "; strict=false accepts it")
      init(line, { scale = 2.5, strict = false })
      if not line:find("'try 3'") then init(line, { scale = 40 }) end
    end
  end)

  it("moves a scale and gives the reason", function()
    local function moves(call, strict)
      local p = load(("return { options = { strict = %s }, init = function() return { scale = 4 " ..
        "} end, decide = function(state, record, options) "
        .. "local v = %s; v.reason = v.reason .. ' / ' .. state.scale; return v end }"):format(
          tostring(strict ~= false), call))
      local v = decide(p)
      return ("%g %s %s"):format(v.scale, v:what(), v:why())
    end
    assert.are.equal("2 step overflow: scale 4 -> 2 / 2", moves("back_off(state, 2)"))
    assert.are.equal("4 step overflow at the smallest scale 4 / 4", moves("back_off(state, 4)"))
    assert.matches("^4 stop the loss scale fell to 4 and gradients still overflow: .* / 4$",
      moves("back_off(state, 0)"))
    assert.are.equal("8 step 3 good: scale 4 -> 8 / 8", moves("grow(state, 8, '3 good')"))
    assert.are.equal("4 step already at the largest scale, 4 / 4",
      moves("grow(state, 4, '3 good')"))
    assert.are.equal("4 step growth would reach infinity: the scale stays unchanged / 4",
      moves("grow(state, math.huge, '3 good', options)"))
    assert.are.equal("4 stop the loss scale would grow to infinity and stay there / 4",
      moves("grow(state, math.huge, '3 good', options)", false))
    fails(with("return back_off(state, 0/0)"), "scale = nan; expected a positive finite number")
    fails(with("return back_off(record, 1)"), "table expected")
    fails(with("return grow(state, 8)"), "string expected")
  end)
end)

describe("policies by name", function()
  it("are the shipped policies", function()
    local names = engine.policy.names()
    for _, name in ipairs { "static", "dynamic", "deepspeed" } do
      assert.truthy((" " .. table.concat(names, " ") .. " "):find(" " .. name .. " ", 1, true))
      assert.are.equal(name, engine.policy.load(name).name)
    end
    assert.has_error(function() engine.policy.load("./nowhere.lua") end)
    helper.refuses("there is no policy 'dynmic'; did you mean 'dynamic'?",
      engine.policy.load, "dynmic")
    assert.matches("policy: expected a table of options, got 5$",
      helper.failure(engine.policy.load, "dynamic", 5))
    helper.refuses("policy fp8_delayed works on FP8 layers and chooses no loss scale; " ..
      "hint: precision = { base",
      engine.policy.load, "fp8_delayed")
  end)

  it("may also be the path of a file", function()
    local folder = helper.folder()
    local path = helper.write(folder .. "/mine.lua",
      "return { init = function() return { scale = 2 } end, " ..
      "decide = function(s) return s.scale * 2 end }")
    local p = engine.policy.load(path)
    assert.are.equal("mine", p.name)
    assert.are.equal(4, decide(p).scale)
    assert.are.equal(p, engine.policy.load(p))
    helper.remove(folder)
  end)
end)
