-- The verdict's fields for single tensors, updates and moments: invalid values are refused in one
-- line; valid ones have the documented effect on a run's weights and moments.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local made = require "spec.policy.made"

local C = M_ffi.C
local TENSORS, GROUPS = { "a.w", "a.b", "b.w" }, { "a", "b" }

local function policy_with(verdict, needs)
  local p = made.load(("return { needs = { %s }, init = function() return { scale = 8 } end, " ..
    "decide = function() return %s end }"):format(needs, verdict))
  p:tensors(TENSORS, { 1, 1, 2 }, GROUPS, true)
  return p
end

describe("a verdict", function()
  for _, case in ipairs {
    { "clips", "3", "clips = 3; expected a table { name = norm }" },
    { "clips", "{ a = 0 }", 'clips["a"] = 0; expected a positive number' },
    { "clips", "{ a = -1 }", 'clips["a"] = -1; expected a positive number' },
    { "clips", "{ a = 0/0 }", "expected a positive number, the limit on the gradient norm" },
    { "clips", "{ a = 'x' }", 'clips["a"] = \'x\'; expected a positive number' },
    { "clips", "{ 1 }", "'clips' with a number as a key; expected names or patterns" },
    { "clips", "{ ['a.ww'] = 1 }", "'clips' for 'a.ww', which matches no group and no tensor; " ..
      "did you mean 'a.w'?" },
    { "clips", "{ ['a['] = 1 }", "malformed pattern" },
    { "clips", "{ [('.-'):rep(60) .. '!'] = 1 }", "'clips' " },
    { "grad_norms", "{ a = 1/0 }", 'grad_norms["a"] = inf; expected a positive finite number' },
    { "grad_norms", "{ a = 0 }", 'grad_norms["a"] = 0; expected a positive finite number' },
    { "caps", "{ a = -1 }", 'caps["a"] = -1; expected a finite magnitude, 0 or more' },
    { "caps", "{ a = 2, ['a.w'] = 3 }", "the caps 2 and 3 for the tensor 'a.w'; expected one" },
    { "caps", "1", "caps = 1; expected a table { name = magnitude }" },
    { "bias_step", "0", "bias_step = 0; expected a whole number, 1 or more" },
    { "bias_step", "1.5", "bias_step = 1.5; expected a whole number, 1 or more" },
    { "lr_muls", "{ a = -1 }", 'lr_muls["a"] = -1; expected a finite factor, 0 or more' },
    { "lr_muls", "{ a = 1/0 }", "expected a finite factor, 0 or more" },
    { "lr_muls", "true", "lr_muls = true; expected a table { name = factor }" },
    { "lr_muls", "{ a = 2, ['a.w'] = 3 }", "the lr_muls 2 and 3 for the tensor 'a.w'" },
    { "lr_muls", "{ ['c.*'] = 3 }", "'lr_muls' for 'c.*', which matches no group and no tensor; " ..
      "one tensor is called 'a.w'" },
    { "reset_moments", "1", "expected true, a name, a pattern, or a list of names and patterns" },
    { "reset_moments", "{ true }",
      "expected true, a name, a pattern, or a list of names and patterns" },
    { "reset_moments", "'c'", "'reset_moments' for 'c', which matches no group and no tensor" },
    { "update_clip", "0", "update_clip = 0; expected a positive number" },
    { "update_clip", "0/0", "expected a positive number" },
    { "update_clip", "'1'", "update_clip = '1'; expected a positive number" },
    { "spike_clip", "-3", "spike_clip = -3; expected a positive number" },
    { "logit_muls", "{ ['attn.1'] = 0.5 }", "'logit_muls' for the unknown head 'attn.1'" },
    { "logit_muls", "{ 1 }", "'logit_muls' with a number as a key; expected names of heads" },
  } do
    it(("refuses %s = %s in one line"):format(case[1], case[2]), function()
      local p = policy_with(("{ scale = 8, %s = %s }"):format(case[1], case[2]),
        '"' .. case[1] .. '"')
      made.fails(p, case[3])
      local v = made.decide(p)
      assert.falsy(v:why():find "\n")
      assert.are.equal(0, v.each)
      assert.are.equal(0, v.update_clip + v.spike_clip)
    end)
  end

  it("refuses a field that needs does not list, and suggests the nearest name", function()
    made.fails(policy_with("{ scale = 8, clips = {} }", ""),
      "'clips', which this policy does not announce: add \"clips\" to its 'needs'")
    made.fails(policy_with("{ scale = 8, update_clp = 1 }", ""), "did you mean 'update_clip'?")
    assert.error_matches(function() policy_with("8", '"update_norms"') end,
      "did you mean 'update_norm'")
    made.fails(policy_with("record.update_norm", ""), "")
  end)

  describe("refuses factors that take the learning rate out of f32's range:", function()
    before_each(function() made.record.lr = 0.001 end)
    after_each(made.reset_record)

    for _, case in ipairs {
      { "lr_mul = 1e300", "lr_mul = 1e+300; expected 0, or 1.4e-42 to 3.4e+41, so that the " ..
        "learning rate, now 0.001, stays in the range of f32" },
      { "lr_mul = 1e-300", "lr_mul = 1e-300; expected 0, or 1.4e-42 to 3.4e+41" },
      { "lr_muls = { b = 1e42 }", 'lr_muls["b.w"] = 1e+42; expected 0, or 1.4e-42 to 3.4e+41' },
      { "lr_muls = { b = 1e30 }, lr_mul = 1e30", 'lr_muls["b.w"] = 1e+30; expected 0, or ' ..
        "1.4e-72 to 3.4e+11, so that the learning rate, now 1e+27," },
    } do
      it(case[1], function()
        made.fails(policy_with("{ scale = 8, " .. case[1] .. " }", '"lr_muls"'), case[2])
      end)
    end

    it("accepts 0, the ends of the range, and any factor if the rate is 0, inf or nan", function()
      local function lasts(lr, factor)
        made.record.lr = lr
        local v = made.decide(policy_with("{ scale = 8, lr_mul = " .. factor .. " }", ""))
        assert.are.equal(0, v.failed, v:why())
      end
      for _, factor in ipairs { "0", "1", "2^-149", "(2 - 2^-23) * 2^127" } do lasts(1, factor) end
      for _, lr in ipairs { 0, 1 / 0, 0 / 0 } do lasts(lr, "1e300") end
    end)
  end)

  it("refuses heads that publish no logit, and names one that does", function()
    local p = policy_with("{ scale = 8, logit_muls = { ['attn.5'] = 0.5 } }", '"logit_muls"')
    p:signal("logit_max.attn.4", 1)
    made.fails(p, "'logit_muls' for the unknown head 'attn.5'; heads are named like 'attn.4'")
    p = policy_with("{ scale = 8, logit_muls = { ['attn.4'] = 0.5 } }", '"logit_muls"')
    p:signal("logit_max.attn.4", 1)
    assert.are.equal(0, made.decide(p).failed)
    assert.are.same({ ["attn.4"] = 0.5 }, p:logit_muls())
  end)

  it("limits groups, tensors and patterns; the strictest limit wins", function()
    local stats = M_ffi.new("eng_tensor_stats[3]")
    for i, norm in ipairs { 3, 4, 12 } do stats[i - 1].sum_squares = (8 * norm) ^ 2 end
    local into = M_ffi.new("double[3]")
    for verdict, want in pairs { ["a = 1"] = { 0.2, 0.2, 1 }, ["['a.w'] = 1.5"] = { 0.5, 1, 1 },
      ["['.*%.w'] = 6"] = { 1, 1, 0.5 }, ["a = 2.5, ['.*'] = 1"] = { 1 / 3, 0.25, 1 / 12 } } do
      local p = policy_with("{ scale = 8, clips = { " .. verdict .. " } }", '"clips"')
      local v = made.decide(p, false, stats)
      assert.are.equal(0, v.failed, v:why())
      assert.truthy(p:each(C.ENG_EACH_CLIP, into, 3))
      for i = 1, 3 do assert.near(want[i], into[i - 1], 1e-15, verdict) end
      assert.is_nil(p:each(C.ENG_EACH_LR, into, 3))
    end
  end)

  it("refuses grad_norms that set a tensor to different norms, whatever the order", function()
    local stats = M_ffi.new("eng_tensor_stats[3]")
    for i, norm in ipairs { 3, 4, 12 } do stats[i - 1].sum_squares = (8 * norm) ^ 2 end
    local into = M_ffi.new("double[3]")
    for entries, want in pairs {
      ["a = 10, ['b.w'] = 6, b = 6"] = { 2, 2, 0.5 },
      ["['a.w'] = 6, ['a%.[wx]'] = 6"] = { 2, 1, 1 },
      ["['a.w'] = 1, ['a.*'] = 2"] = "a.w", ["['.*'] = 2, ['.*w'] = 2, ['a.b'] = 3"] = "a.b",
      ["a = 2, ['a.b'] = 2"] = "a.b", ["b = 1, ['b.w'] = 2, ['b.*'] = 1"] = "b.w",
    } do
      local verdict = ("{ scale = 8, grad_norms = { %s } }"):format(entries)
      local v
      for _ = 1, 8 do      -- every state of Lua has its own order of keys
        local p = policy_with(verdict, '"grad_norms"')
        v = made.decide(p, false, stats)
        assert.are.equal(type(want) == "string" and 1 or 0, v.failed, entries)
        if v.failed == 0 then assert.truthy(p:each(C.ENG_EACH_CLIP, into, 3)) end
        for i = 1, v.failed == 0 and 3 or 0 do assert.near(want[i], into[i - 1], 1e-15, entries) end
      end
      if v.failed == 1 then
        assert.matches(("'grad_norms' with entries that set the tensor '%s' to different norms; " ..
          "expected one entry"):format(want), v:why(), 1, true)
      end
    end
  end)

  it("acts on the last tensor alone if the tensors are in no group", function()
    local into = M_ffi.new("double[3]")
    for verdict, kind in pairs { ["lr_muls = { ['b.w'] = 0 }"] = C.ENG_EACH_LR,
      ["caps = { ['b.w'] = 0 }"] = C.ENG_EACH_CAP, ["reset_moments = 'b.w'"] = C.ENG_EACH_RESET } do
      local p = policy_with("{ scale = 8, " .. verdict .. " }", '"' .. verdict:match "%S+" .. '"')
      p:tensors(TENSORS)
      assert.are.equal(0, made.decide(p).failed)
      assert.truthy(p:each(kind, into, 3))
      assert.are_not.equal(into[2], into[0], verdict)
      assert.are_not.equal(into[2], into[1], verdict)
    end
  end)

  it("takes a pattern as the whole name, also one that ends in %$", function()
    local into = M_ffi.new("double[3]")
    for pattern, want in pairs { ["w%$"] = { 0, 1, 1 }, ["w%$x"] = { 1, 0, 1 },
      ["^w$"] = { 1, 1, 0 }, ["w%$$"] = { 0, 1, 1 }, ["w"] = { 1, 1, 0 }, ["w.*"] = { 0, 0, 0 },
      [".-x?"] = { 0, 0, 0 }, ["(w).?$"] = { 0, 1, 0 } } do
      local p = policy_with("{ scale = 8, lr_muls = { ['" .. pattern .. "'] = 0 } }", '"lr_muls"')
      p:tensors { "w$", "w$x", "w" }
      local v = made.decide(p)
      assert.are.equal(0, v.failed, v:why())
      assert.truthy(p:each(C.ENG_EACH_LR, into, 3))
      assert.are.same(want, { into[0], into[1], into[2] }, pattern)
    end
    made.fails(policy_with("{ scale = 8, lr_muls = { ['(a'] = 0 } }", '"lr_muls"'),
      "unfinished capture")
  end)

  it("matches dozens of patterns over a thousand tensors, but not without a limit", function()
    local names = {}
    for i = 1, 1000 do names[i] = ("blocks.%d.attention.output.weight"):format(i) end
    local function decide(n, pattern)
      local p = made.load(("local patterns = {} for i = 1, %d do " ..
        "patterns['[x' .. i .. ']?' .. %q] = 0 end return { needs = { 'lr_muls' }, " ..
        "init = function() return { scale = 8 } end, " ..
        "decide = function() return { scale = 8, lr_muls = patterns } end }"):format(n, pattern))
      p:tensors(names)
      return made.decide(p)
    end
    local v = decide(60, "blocks%.%d+%..*%.weight")
    assert.are.equal(0, v.failed, v:why())
    local from = os.clock()
    v = decide(5000, "(.-)(.-)attention[%da-z.]*")
    assert.are.equal(1, v.failed)
    assert.matches("exceeded its instruction budget", v:why(), 1, true)
    assert.is_true(os.clock() - from < 2)
  end)

  it("scales groups by patterns of groups and of tensors", function()
    local p = policy_with("{ scale = 8, scales = { ['.*%.b'] = 4 } }", "")
    assert.are.equal(0, made.decide(p).failed)
    assert.are.equal(4, p:group_scale(1))
    assert.are.equal(8, p:group_scale(2))
    made.fails(policy_with("{ scale = 8, scales = { a = 2, ['.*'] = 4 } }", ""),
      " for the group 'a'; expected one")
  end)
end)

-- Trains two layers on a constant batch for `steps` steps. body: the code of the policy's decide.
local function train(kind, needs, body, steps)
  engine.seed(5)
  local model = engine.nn.sequential(engine.nn.linear(3, 4), engine.nn.linear(4, 2))
  local optimizer = engine.optim[kind](model, { lr = 0.1, weight_decay = 0 })
  local x, weights = engine.tensor { { 1, -2, 3 }, { 0.5, 1, -1 } }, {}
  engine.trainer { model = model, optimizer = optimizer, steps = steps or 1, log = "quiet",
    data = { next = function() return { x = x } end },
    loss = function(m, b) return m(b.x):square():mean() end,
    policy = { source = ("return { needs = { %s }, options = { init_scale = 1 }, " ..
      "decide = function(state, record) %s end }"):format(needs, body), file = "p.lua" },
    on_step = function(_, _, verdict) assert.are.equal(0, verdict.failed, verdict:why()) end }:run()
  for _, p in ipairs(model:parameters()) do
    weights[p.name] = p.tensor:detach():view(p.tensor.count):totable()
  end
  return weights, optimizer
end

describe("in a run", function()
  for _, kind in ipairs { "sgd", "adamw", "lamb" } do
    it("lr_muls and clips act on what they name: " .. kind, function()
      local start = train(kind, "", "return { scale = 1, action = 'skip' }")
      local plain = train(kind, "", "return 1")
      local slow = train(kind, '"lr_muls"',
        "return { scale = 1, lr_muls = { ['1'] = 0, ['2.bias'] = 0.5 } }")
      for k, w in ipairs(start["1.weight"]) do assert.are.equal(w, slow["1.weight"][k]) end
      assert.are.same(plain["2.weight"], slow["2.weight"])
      for k, w in ipairs(start["2.bias"]) do
        assert.near(w + (plain["2.bias"][k] - w) / 2, slow["2.bias"][k], 1e-6)
      end
      if kind ~= "sgd" then return end
      local clipped = train(kind, '"clips"', "return { scale = 1, clips = { ['2%..*'] = 1e-3 } }")
      assert.are.same(plain["1.weight"], clipped["1.weight"])
      local squares = 0
      for k, w in ipairs(start["2.weight"]) do
        squares = squares + (clipped["2.weight"][k] - w) ^ 2
      end
      assert.near(1e-4, math.sqrt(squares), 1e-7)            -- lr 0.1 times the limit
    end)
  end

  it("lr_muls holds for one update only", function()
    local once = train("sgd", '"lr_muls"', "return { scale = 1, " ..
      "lr_muls = record.step == 0 and { ['.*'] = 0 } or nil }", 2)
    assert.are.same(train("sgd", "", "return 1", 1), once)
  end)

  it("reset_moments clears the moments of the tensors it names before the update", function()
    local body = "return { scale = 1, reset_moments = record.step == 2 and %s or nil }"
    for _, kind in ipairs { "adamw", "lion", "lamb" } do
      local _, whole = train(kind, '"reset_moments"', body:format "true", 3)
      local _, part = train(kind, '"reset_moments"', body:format "{ '1', '2.bias' }", 3)
      local _, plain = train(kind, "", "return 1", 3)
      local function moments(optimizer, name)
        for key, x in pairs(optimizer:state_tensors()) do
          if key:sub(1, #name + 1) == name .. "." and not key:find "moment2" and not key:find "v$"
          then return x:view(x.count):totable() end
        end
      end
      for _, name in ipairs { "1.weight", "2.bias", "2.weight" } do
        local a, b, c = moments(whole, name), moments(part, name), moments(plain, name)
        assert.are.same(name == "2.weight" and c or a, b, kind)
        assert.are_not.same(c, a, kind)
      end
    end
  end)

  it("gives norms of updates, weights and moments for tensors, groups and the model", function()
    train("adamw", [["tensors", "update_norm", "weight_norm", "m_norm", "v_norm"]], [[
      if record.step == 0 then
        if record.update_norm or record.tensors[1].weight_norm then error("known too early") end
        return 1
      end
      if record.step == 2 then
        if record.update_norm then error("known after a skipped step") end
        return 1
      end
      local sum = 0
      for _, t in pairs(record.tensors) do sum = sum + t.weight_norm^2 end
      local groups = 0
      for _, g in pairs(record.groups) do groups = groups + g.update_norm^2 end
      if math.abs(math.sqrt(sum) - record.weight_norm) > 1e-12 * record.weight_norm
        or math.abs(math.sqrt(groups) - record.update_norm) > 1e-12 * record.update_norm
        or not (record.m_norm > 0 and record.v_norm > 0) then error("norms do not add up") end
      if record.step == 1 then return { scale = 1, action = "skip" } end
      return 1]], 3)
  end)
end)
