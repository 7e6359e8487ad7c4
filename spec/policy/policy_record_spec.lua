-- The record that a policy reads: fields, groups, tensors, histogram, and refused reads.
local M_ffi = require "engine.base.ffi"
local made = require "spec.policy.made"

local record = made.record
local load, with, decide, fails = made.load, made.with, made.decide, made.fails

before_each(made.reset_record)

describe("the record", function()
  local function reads(needs, expression)
    return load(("return { needs = { %s }, init = function() return { scale = 8 } end, decide = " ..
      "function(state, record) local v = %s\n"
      .. "return { scale = 1, reason = tostring(v) } end }"):format(needs, expression))
  end

  it("has the fields of the contract", function()
    record.step, record.updates, record.loss, record.lr, record.elapsed = 7, 5, 2.5, 1e-3, 12.5
    record.count, record.inf, record.nan, record.zeros, record.underflow, record.amax, record.norm,
      record.norm_ref = 100, 2, 3, 4, 5, 0.5, 1.5, 1.25
    local needs = "'amax', 'norm', 'zeros', 'underflow', 'norm_ref'"
    for field, value in pairs { step = "7", updates = "5", scale = "8", loss = "2.5", lr = "0.001",
      elapsed = "12.5", overflow = "false",
      count = "100", inf = "2", nan = "3", zeros = "4", underflow = "5", amax = "0.5", norm = "1.5",
      norm_ref = "1.25", first_bad = "nil" } do
      assert.are.equal(value, decide(reads(needs, "record." .. field)):why(), field)
    end
    assert.are.equal("true", decide(reads("", "record.overflow"), true):why())
    record.norm_ref = 0 / 0
    assert.are.equal("nil", decide(reads("'norm_ref'", "record.norm_ref")):why())
  end)

  it("has lists that ipairs walks as pairs does", function()
    local p = load [[return { needs = { "tensors", "amax" },
      init = function() return { scale = 8 } end,
      decide = function(state, record)
        local seen = {}
        for i, t in ipairs(record.tensors) do seen[#seen + 1] = i .. " " .. t.name end
        for i, g in ipairs(record.groups) do seen[#seen + 1] = i .. " " .. g.name end
        for i, v in ipairs { 5, 6 } do seen[#seen + 1] = i .. " " .. v end
        return { scale = 1, reason = table.concat(seen, ", ") }
      end }]]
    p:tensors({ "a.w", "a.b", "c.w" }, { 1, 1, 2 }, { "a", "c" })
    local stats = M_ffi.new("eng_tensor_stats[3]")
    for i = 0, 2 do stats[i].count = 1 end
    assert.equal("1 a.w, 2 a.b, 3 c.w, 1 a, 2 c, 1 5, 2 6", decide(p, false, stats):why())
    fails(with "for _ in ipairs(record) do end return 1",
      "ipairs: expected a list, got record; hint: use pairs")
    fails(with "for _ in ipairs(3) do end return 1", "table expected, got number")
  end)

  it("is read-only and names missing fields", function()
    fails(with("record.scale = 5 return 1"), "record is read-only")
    fails(with("record.signals.x = 5 return 1"), "record.signals is read-only")
    fails(with("return record.amx"), "record has no field 'amx'; did you mean 'amax'?")
    fails(with("return record[1]"), "record has no field '1'; `engine help record` lists")
    fails(with("return record[record]"), "record: expected the name of a field, got a userdata")
    fails(with("return record.amax"),
      "record.amax is not computed for this policy: add \"amax\" to its 'needs'")
    local p = with("state.f = nil keep = keep return 1", "local keep")
    assert.are.equal(1, decide(p).scale)
  end)

  it("can be read in decide only", function()
    local p = load([[local kept return { init = function() return { scale = 1 } end,
      decide = function(state, record) kept = record return state.scale end,
      migrate = function() return { scale = kept.scale } end }]])
    decide(p)
    assert.same({ false, "p.lua:3: the record is readable only inside decide" },
      { pcall(p.take_over, p, p) })
  end)

  it("has a histogram over exponents", function()
    record.hist[160 + 3], record.hist[160 - 24], record.hist[0], record.hist[319] = 5, 7, 1, 2
    for expression, value in pairs { ["record.hist[3]"] = "5", ["record.hist[-24]"] = "7",
      ["record.hist[-160]"] = "1", ["record.hist[159]"] = "2",
      ["record.hist[500]"] = "0", ["record.hist:sum()"] = "15", ["record.hist:sum(0)"] = "7",
      ["record.hist:sum(-30, 3)"] = "12",
      ["record.hist.first"] = "-160", ["record.hist.last"] = "159" } do
      assert.are.equal(value, decide(reads("'hist'", expression)):why(), expression)
    end
    assert.are.equal("-160=1 -24=7 3=5 159=2",
      decide(load([[return { needs = { "hist" },
      init = function() return { scale = 1 } end,
      decide = function(s, r) local o = {} for e, n in pairs(r.hist) do
        o[#o + 1] = e .. "=" .. n end
      return { scale = 1, reason = table.concat(o, " ") } end }]])):why())
  end)

  it("has signals", function()
    local p = reads("", "record.signals.entropy")
    assert.are.equal("nil", decide(p):why())
    p:signal("entropy", 1.5)
    p:signal("other", 2)
    assert.are.equal("1.5", decide(p):why())
    p:signal("entropy", -0.25)
    assert.are.equal("-0.25", decide(p):why())
    assert.has_error(function() p:signal("x", "y") end,
      "signal 'x': expected a number, got 'y'")
  end)

  it("has statistics per tensor and per group", function()
    local stats = M_ffi.new("eng_tensor_stats[3]")
    for i = 0, 2 do
      stats[i].count, stats[i].amax, stats[i].sum_squares = 10 * (i + 1), 8 * (i + 1),
        64 * (i + 1) ^ 2
      stats[i].hist[160] = i + 1
    end
    stats[1].inf, stats[1].nan = 2, 1
    local needs = "'tensors', 'amax', 'norm', 'hist'"
    local function value(expression)
      local p = reads(needs, expression)
      p:tensors({ "wte", "h.0", "h.1" }, { 1, 2, 2 }, { "embedding", "blocks" })
      local v = decide(p, false, stats)
      assert.are.equal(0, v.failed, v:why())
      return v:why()
    end
    record.first_bad = 1
    for expression, expected in pairs { ["record.tensors.wte.amax"] = "1",
      ["record.tensors['h.1'].norm"] = "3", ["record.tensors[2].inf"] = "2",
      ["record.tensors[2].name"] = "h.0", ["record.tensors[2].overflow"] = "true",
      ["record.tensors[1].overflow"] = "false", ["#record.tensors"] = "3",
      ["#record.groups"] = "2", ["record.groups.blocks.count"] = "50",
      ["record.groups.blocks.amax"] = "3", ["record.groups.blocks.inf"] = "2",
      ["record.groups.blocks.hist[0]"] = "5", ["record.tensors[3].hist:sum()"] = "3",
      ["record.groups.embedding.name"] = "embedding",
      ["record.tensors.nothing"] = "nil", ["record.first_bad"] = "h.0",
      ["string.format('%.3f', record.groups.blocks.norm)"] = "3.606" } do
      assert.are.equal(expected, value(expression), expression)
    end
    local p = load([[return { needs = { "tensors", "amax" },
      init = function() return { scale = 8 } end,
      decide = function(s, r)
      local o = {} for name, t in pairs(r.tensors) do o[#o + 1] = name .. "=" .. t.amax end
      for name in pairs(r.groups) do o[#o + 1] = name end
      for field in pairs(r.tensors[1]) do o[#o + 1] = field end
      return { scale = 8, reason = table.concat(o, " ") } end }]])
    p:tensors({ "a", "b", "c" }, { 1, 1, 1 }, { "all" })
    assert.are.equal("a=1 b=2 c=3 all name scale overflow inf nan count amax",
      decide(p, false, stats):why())
    assert.are.equal(1, decide(p).failed)  -- a step without statistics: record.tensors is nil
    fails(reads("'tensors'", "record.tensors[1].amax"), "")
  end)

  it("lets a policy scale groups separately where the run supports it", function()
    local p = with("return { scale = 4, scales = { b = 2 } }")
    p:tensors({ "x", "y" }, { 1, 2 }, { "a", "b" }, true)
    local v = decide(p)
    assert.are.equal(0, v.failed, v:why())
    assert.are.equal(4, p:group_scale(1))
    assert.are.equal(2, p:group_scale(2))
    local q = with("return { scale = 4 }")
    q:tensors({ "x", "y" }, { 1, 2 }, { "a", "b" }, true)
    q:restore(p:save())
    assert.are.equal(2, q:group_scale(2))
    decide(q)
    assert.are.equal(4, q:group_scale(2))
    local bad = with("return { scale = 4, scales = { c = 2 } }")
    bad:tensors({ "x" }, { 1 }, { "blocks" }, true)
    fails(bad, "'scales' for 'c', which matches no group and no tensor")
    bad = with("return { scale = 4, scales = { blocks = 0 } }")
    bad:tensors({ "x" }, { 1 }, { "blocks" }, true)
    fails(bad, "scales[\"blocks\"] = 0; expected a positive finite number")
  end)
end)
