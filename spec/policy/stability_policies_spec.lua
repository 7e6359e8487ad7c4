-- The policies zclip, skip_step, norm_skip and rerun, which guard updates, and fp8_lm: traces with
-- numbers worked out here, first steps, zeros, NaN and overflow, resuming at any step, live runs.
-- What all guards have in common is also tested with adagc, update_clip, spam, stable_spam and
-- qk_clip, whose own rules update_policies_spec.lua tests. spec/parity/stability.py compares the
-- policies with the originals.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local helper = require "spec.helper"

local nan, inf = 0 / 0, 1 / 0
local GUARDS = { "zclip", "skip_step", "norm_skip", "rerun", "adagc", "update_clip", "spam",
  "stable_spam", "qk_clip" }

-- Decides on steps { loss =, norm =, inf =, nan =, update = } (defaults: 1, 1, 0, 0, nan; a number
-- alone is the norm). `at` is called before each step with the policy and the step's number, from
-- 1. Returns a result for each step.
local function drive(policy, steps, at)
  if type(policy) == "string" then policy = engine.policy.load(policy) end
  local record, results, updates = M_ffi.new("eng_record"), {}, 0
  for i, s in ipairs(steps) do
    if type(s) == "number" then s = { norm = s } end
    if at then at(policy, i) end
    record.step, record.updates, record.scale, record.first_bad, record.norm_ref = i - 1, updates,
      policy:scale(), -1, nan
    record.loss, record.norm, record.count = s.loss or 1, s.norm or 1, 100
    record.inf, record.nan = s.inf or 0, s.nan or 0
    for k = 0, 3 do record.norms[k] = nan end
    record.norms[0] = s.update or nan
    record.overflow = (s.inf or s.nan) and 1 or 0
    local v = policy:decide(record)
    assert.are.equal(0, v.failed, v:why())
    local action = v:what()
    if action == "step" then updates = updates + 1 end
    results[i] = { action = action, clip = v.clip > 0 and v.clip or inf, scale = v.scale,
      why = v:why(), log = policy:logs() or {} }
  end
  return results, policy
end

local function field(results, name)
  local list = {}
  for i, r in ipairs(results) do list[i] = r[name] end
  return list
end

local function times(n, x)
  local list = {}
  for i = 1, n do list[i] = x end
  return list
end

local function join(...)
  local list = {}
  for _, part in ipairs { ... } do
    for _, x in ipairs(part) do list[#list + 1] = x end
  end
  return list
end

local function trace_of(policy, steps, at)
  local lines = {}
  for i, r in ipairs((drive(policy, steps, at))) do
    local logged = {}
    for name, x in pairs(r.log) do logged[#logged + 1] = ("%s=%.17g"):format(name, x) end
    table.sort(logged)
    lines[i] = ("%s %.17g %.17g %s %s"):format(r.action, r.clip, r.scale, r.why,
      table.concat(logged, " "))
  end
  return lines
end

describe("a policy that guards updates", function()
  it("names its source and is in policies/README.md", function()
    for _, name in ipairs { "fp8_lm", unpack(GUARDS) } do
      assert.truthy(helper.read("policies/" .. name .. ".lua"):find "Source", name)
      assert.truthy(helper.read("policies/README.md"):find("| `" .. name .. ".lua` |", 1, true),
        name)
    end
  end)

  it("scales the loss as dynamic does, or not at all", function()
    local steps, trace = {}, "...x....xx..x......."
    for i = 1, #trace do steps[i] = trace:sub(i, i) == "x" and { inf = 1 } or 1 end
    local options = { init_scale = 1000, growth_interval = 3 }
    local want = field(drive(engine.policy.load("dynamic", options), steps), "scale")
    for _, name in ipairs(GUARDS) do
      assert.are.same(want, field(drive(engine.policy.load(name, options), steps), "scale"), name)
      local fixed = drive(engine.policy.load(name, { loss_scale = 4 }), steps)
      assert.are.same(times(20, 4), field(fixed, "scale"), name)
      assert.are.equal("skip", fixed[4].action)
      local p = engine.policy.load(name, { loss_scale = 4 })
      p:take_over(engine.policy.load "dynamic")
      assert.are.equal(4, drive(p, { 1 })[1].scale, name)
    end
  end)

  it("resumes exactly from a state saved at any step", function()
    local steps = {}
    for i = 1, 90 do
      steps[i] = { norm = 1 + 0.2 * math.sin(i), loss = 3 + 0.1 * math.cos(1.7 * i),
        update = i > 1 and 1 + 0.3 * math.sin(i - 1) or nil }
      if i % 17 == 0 then steps[i].norm = 9 end
      if i % 23 == 0 then steps[i].loss = 50 end
      if i % 31 == 0 then steps[i].nan = 2 end
    end
    for name, options in pairs { zclip = { warmup_steps = 5, max_grad_norm = inf },
      skip_step = { rolling_interval_length = 12 }, norm_skip = { grad_norm_skip_threshold = 5 },
      rerun = { samples = 10, on_fault = "step" }, adagc = { warmup_steps = 9 },
      update_clip = { rolling_interval_length = 10 },
      spam = { interval = 13, warmup_epoch = 5, grad_accu_steps = 3 } } do
      options.growth_interval, options.init_scale = 7, 256
      local function new() return engine.policy.load(name, options) end
      local whole = trace_of(new(), steps)
      assert.are.same(whole, trace_of(new(), steps, function(p) p:restore(p:save()) end), name)
      for k = 1, 90, 11 do
        local second = new()
        local lines = trace_of(new(), steps, function(p, i)
          if i == k then second:restore(p:save()) assert.are.equal(p:save(), second:save()) end
        end)
        assert.are.same(whole, lines, name .. " saved before step " .. k)
      end
    end
  end)

  it("refuses options that must be mistakes", function()
    for _, case in ipairs { { "zclip", { clip_option = "zscore" }, "clip_option must be" },
      { "zclip", { max_grad_norm = 0 }, "(inf: no limit), got max_grad_norm = 0" },
      { "zclip", { alpha = 1 }, "alpha must lie strictly between" },
      { "zclip", { warmup_steps = 0 }, "must be a whole number from 1 to 20000, got 0" },
      { "skip_step", { rolling_interval_length = 5 }, "whole number from 6 to 20000, got 5" },
      { "norm_skip", { grad_norm_skip_threshold = 0 }, "0 would skip every step" },
      { "rerun", { on_fault = "go" }, "on_fault must be" }, { "rerun", { factor = 1 }, "factor" },
      { "rerun", { loss_scale = -1 }, "loss_scale" }, { "adagc", { lambda_rel = 0 }, "lambda_rel" },
      { "update_clip", { sigma_factor = -1 }, "sigma_factor" },
      { "stable_spam", { theta = 1 }, "theta" },
      { "spam", { interval = 0 }, "interval must be a whole number of 1 or more, got 0" },
      { "spam", { death_rate = 2 }, "expected death_rate in [0, 1], got death_rate = 2" } } do
      helper.refuses(case[3], engine.policy.load, case[1], case[2])
    end
  end)

  it("decides on the records of a run without an error", function()
    local folder = helper.folder()
    local result = helper.run { "examples/gpt.lua", "steps=40", "layers=1", "width=32",
      "context=32", "run=" .. folder .. "/r" }
    assert.are.equal(0, result.code, result.err)
    local trace = engine.replay.trace(folder .. "/r")
    for _, name in ipairs(GUARDS) do
      local r = engine.replay.run(trace, name)
      assert.are.equal(0, r.failures, r.failure)
      assert.are.equal(40, r.steps)
    end
    helper.remove(folder)
  end)
end)

describe("policy zclip", function()
  -- The norms 1 2 3 2 give the mean 2 and the variance 0.5.
  local function run(options, ...)
    options.warmup_steps, options.max_grad_norm = 4, options.max_grad_norm or inf
    return drive(engine.policy.load("zclip", options), { 1, 2, 3, 2, ... })
  end
  local std = math.sqrt(0.5)

  it("clips an outlier harder the further out it is, and averages the clipped norm", function()
    local r = run({}, 10, 2, 2.5)
    assert.are.same(times(4, inf), { r[1].clip, r[2].clip, r[3].clip, r[4].clip })
    local z = 8 / (std + 1e-6)
    local clip = 2 + 2.5 * std / (z / 2.5)
    assert.are.equal(clip, r[5].clip)
    assert.are.same({ z = z, mean = 2, std = std, threshold = 2 + 2.5 * std }, r[5].log)
    assert.matches("norm 10 is 11.3 deviations from the mean 2: clip at 2.39", r[5].why, 1, true)
    local mean = 0.97 * 2 + (1 - 0.97) * clip
    local var = 0.97 * 0.5 + (1 - 0.97) * (clip - mean) ^ 2
    assert.near(mean, r[6].log.mean, 1e-15)
    assert.near(math.sqrt(var), r[6].log.std, 1e-15)
    assert.are.equal(inf, r[6].clip)                         -- 2 is no outlier
    assert.near(0.97 * mean + (1 - 0.97) * 2, r[7].log.mean, 1e-15)
  end)

  it("has the original's other variants", function()
    assert.are.equal(2, run({ clip_option = "mean" }, 10)[5].clip)
    assert.are.equal(2 + 2.5 * std, run({ clip_option = "percentile" }, 10)[5].clip)
    assert.are.equal(inf, run({ clip_option = "percentile" }, 3.7)[5].clip)
    assert.near(0.5 * run({}, 10)[5].clip, run({ clip_factor = 0.5 }, 10)[5].clip, 1e-15)
    assert.are.equal(2, run({ skip_update_on_spike = true }, 10, 2)[6].log.mean)
  end)

  it("limits every norm, also during warm-up, and ignores the limit in its statistics", function()
    local r = run({ max_grad_norm = 1.5 }, 10, 2)
    assert.are.same(times(6, 1.5), field(r, "clip"))
    assert.are.equal(run({}, 10, 2)[6].log.mean, r[6].log.mean)
    assert.are.equal(1, drive("zclip", { 7 })[1].clip)
  end)

  it("keeps steps that overflow out of its statistics, also during warm-up", function()
    local plain = run({}, 10, 2)
    local bad = drive(engine.policy.load("zclip", { warmup_steps = 4, max_grad_norm = inf }),
      { 1, { norm = 0, nan = 1 }, 2, 3, 2, { norm = 5, inf = 1 }, 10, { nan = 3 }, 2 })
    assert.are.same(plain[5].log, bad[7].log)
    assert.are.same(plain[6].log, bad[9].log)
    assert.are.equal("skip", bad[6].action)
  end)

  it("with keep_nan=true keeps a NaN for good, as the original does", function()
    local r = run({ keep_nan = true }, { norm = 0, inf = 1 }, { norm = 0, nan = 1 }, 2, 1000)
    assert.are.equal(inf, r[5].log.z)                        -- clipped to the mean, 2
    assert.near(math.sqrt(0.97 * 0.5), r[6].log.std, 1e-15)
    assert.is_true(r[8].log.mean ~= r[8].log.mean)
    assert.are.equal(inf, r[8].clip)
  end)

  it("takes norms of 0 and norms without a spread", function()
    local r = drive(engine.policy.load("zclip", { warmup_steps = 3, max_grad_norm = inf }),
      { 0, 0, 0, 5, 5 })
    assert.are.equal(inf, r[4].clip)                         -- a mean of 0 gives no limit
    assert.near(0.15, r[5].log.mean, 1e-15)
    r = drive(engine.policy.load("zclip", { warmup_steps = 3, max_grad_norm = inf }),
      { 2, 2, 2, 2, 0, 2.1 })
    assert.are.same(times(5, inf), { r[1].clip, r[2].clip, r[3].clip, r[4].clip, r[5].clip })
    r = drive(engine.policy.load("zclip", { warmup_steps = 3, max_grad_norm = inf }),
      { 2, 2, 2, 2.1 })
    assert.are.equal(2, r[4].clip)
  end)

  it("bounds the updates of a run", function()
    local model = engine.nn.linear(2, 1, { bias = false })
    local at, before, moved = 0, nil, {}
    engine.trainer { model = model, steps = 8, log = "quiet", policy = "zclip",
      policy_options = { warmup_steps = 5, max_grad_norm = inf, loss_scale = 1 },
      data = { next = function()
        at = at + 1
        return { x = engine.tensor { { at == 7 and 90 or 3 + at % 2, 0 } } }
      end },
      loss = function(m, batch)
        before = (m.weight:detach() * 1):keep()
        return m(batch.x):mean()
      end, optimizer = engine.optim.sgd(model, { lr = 1 }),
      on_step = function(_, record, verdict)
        moved[#moved + 1] = { (model.weight:detach() - before):norm():item(), record.norm,
          verdict.clip }
      end }:run()
    assert.near(90, moved[7][2], 1e-6)
    assert.is_true(moved[7][3] > 3 and moved[7][3] < 4)
    assert.near(moved[7][3], moved[7][1], 1e-5)
    assert.near(moved[8][2], moved[8][1], 1e-5)
  end)
end)

describe("policy skip_step", function()
  -- Losses and norms 1, 3, 1, 3 ...: over an even number n of them the mean is 2 and the deviation
  -- the root of n / (n - 1).
  local function swing(n)
    local list = {}
    for i = 1, n do
      local x = i % 2 == 1 and 1 or 3
      list[i] = { loss = x, norm = x }
    end
    return list
  end

  it("judges a value by the values before it, once they fill half a window", function()
    local function last(n, x) return drive("skip_step", join(swing(n), { x }))[n + 1] end
    assert.are.equal("step", last(62, { loss = 1e9, norm = 1e9 }).action)
    local r = last(64, { loss = 2 + 6 * math.sqrt(64 / 63) + 1e-9, norm = 1 })
    assert.are.equal("skip", r.action)
    assert.near(math.sqrt(64 / 63), r.log.loss_std, 1e-15)
    assert.are.equal(2, r.log.loss_mean)
    assert.near(6, r.log.loss_z, 1e-8)
    assert.matches("loss 8.047 is 6.0 deviations above its mean: skipped", r.why, 1, true)
    r = last(64, { loss = 2 + 6 * math.sqrt(64 / 63) - 1e-9, norm = 1 })
    assert.are.equal("step", r.action)
    r = last(64, { loss = 1, norm = 9 })
    assert.are.equal("skip", r.action)
    assert.matches("norm 9 is", r.why, 1, true)
    assert.are.equal("step", last(64, { loss = -1e9, norm = 0 }).action)   -- below is no outlier
  end)

  it("forgets values older than the window, and keeps skipped values in it", function()
    local p = engine.policy.load("skip_step", { rolling_interval_length = 8 })
    local r = drive(p, join(times(3, { loss = 1e6 }), swing(8), { { loss = 9 } },
      times(12, { loss = 9 })))
    assert.are.equal(2, r[12].log.loss_mean)
    assert.near(math.sqrt(8 / 7), r[12].log.loss_std, 1e-15)
    assert.are.equal("skip", r[12].action)
    -- window 3 1 3 1 3 1 3 9: the new level is accepted
    assert.are.equal(3, r[13].log.loss_mean)
    assert.are.equal("step", r[13].action)
  end)

  it("skips one step for a number that is not finite", function()
    local p = engine.policy.load("skip_step", { rolling_interval_length = 8 })
    local r = drive(p, join({ { loss = nan } }, swing(6), { { loss = nan }, { loss = -inf },
      { loss = 1, nan = 1 }, 1, { loss = 2, norm = 2 } }))
    assert.are.same({ "skip", "step", "step", "step", "step", "step", "step", "skip", "skip",
      "skip", "step", "step" }, field(r, "action"))
    local plain = drive(engine.policy.load("skip_step", { rolling_interval_length = 8 }),
      join(swing(6), { { loss = 1, norm = 1 }, { loss = 1, norm = 1 }, { loss = 2, norm = 2 } }))
    assert.are.equal(plain[9].log.loss_mean, r[12].log.loss_mean)
    assert.are.equal(32768, r[12].scale)                     -- the NaN gradient halved it
  end)

  it("with keep_nan=true a NaN skips a whole window, as in the original", function()
    local p = engine.policy.load("skip_step", { rolling_interval_length = 8, keep_nan = true })
    local r = drive(p, join(swing(8), { { loss = nan } }, swing(10)))
    assert.are.same(join(times(8, "step"), times(9, "skip"), times(2, "step")), field(r, "action"))
  end)

  it("skips anything larger after equal values", function()
    local p = engine.policy.load("skip_step", { rolling_interval_length = 8 })
    local r = drive(p, join(times(7, 0), { 0, 1e-300, 1 }))
    assert.are.same({ "step", "skip" }, { r[8].action, r[9].action })
  end)
end)

describe("policy norm_skip", function()
  it("skips norms above the threshold, and counts them as good steps", function()
    local p = engine.policy.load("norm_skip", { grad_norm_skip_threshold = 4, growth_interval = 3,
      init_scale = 8 })
    local r = drive(p, { 4, 4.1, 0, { norm = 9, inf = 1 }, 5 })
    assert.are.same({ "step", "skip", "step", "skip", "skip" }, field(r, "action"))
    assert.are.same({ 8, 8, 16, 8, 8 }, field(r, "scale"))
    assert.are.same({ threshold = 4, skipped = 2 }, r[5].log)
    assert.are.equal("norm 4.1 is above 4: skipped", r[2].why)
    assert.matches("overflow: scale 16 -> 8", r[4].why, 1, true)
  end)
  it("skips nothing by default", function()
    assert.are.same(times(2, "step"), field(drive("norm_skip", { 1, 1e300 }), "action"))
  end)
end)

describe("policy rerun", function()
  local function losses(...)
    local list = {}
    for i, x in ipairs { ... } do list[i] = { loss = x } end
    return list
  end
  local function run(options, ...)
    options.samples = 3
    return drive(engine.policy.load("rerun", options), losses(...))
  end

  it("takes its limit from the first losses, but not from the very first", function()
    local r = run({}, 99, 2, nan, -4, inf, 3, 39.99, 40, 40, 7)
    assert.are.same({ "step", "step", "step", "step", "step", "step", "step", "retry", "step",
      "step" }, field(r, "action"))
    assert.is_nil(r[6].log.limit)
    assert.are.equal(40, r[7].log.limit)
    assert.are.equal("loss 40, 10 times the largest of the first 3: the policy asks for a retry",
      r[8].why)
    assert.matches("the second loss is the same to the bit", r[9].why, 1, true)
  end)

  it("stops after a transient fault", function()
    local r = run({}, 1, 2, 4, 3, 50, 2.5)
    assert.are.same({ "retry", "stop" }, { r[5].action, r[6].action })
    assert.are.equal("transient fault: the same step gave loss 50, then 2.5", r[6].why)
    assert.are.equal("stop", run({}, 1, 2, 4, 3, 50, nan)[6].action)
    assert.are.equal("stop", run({}, 1, 2, 4, 3, 50, 50 + 2 ^ -47)[6].action)
  end)

  it("with on_fault=step goes on after a fault, unless the second loss is bad as well", function()
    local function second(x) return run({ on_fault = "step" }, 1, 2, 4, 3, 50, x)[6].action end
    assert.are.same({ "step", "skip", "skip" }, { second(2.5), second(60), second(nan) })
  end)

  it("runs again at the same scale, also when gradients overflow", function()
    local r = drive(engine.policy.load("rerun", { samples = 3 }),
      join(losses(1, 2, 4, 3), { { loss = 50, inf = 1 }, { loss = 50, inf = 1 } }))
    assert.are.same({ "retry", "skip" }, { r[5].action, r[6].action })
    assert.are.same({ 65536, 32768 }, { r[5].scale, r[6].scale })
  end)

  it("expects no second result if the weights were updated despite its retry", function()
    local p = engine.policy.load("rerun", { samples = 3 })
    local record = M_ffi.new("eng_record")
    local actions = {}
    for i, loss in ipairs { 1, 2, 4, 3, 50, 2.5 } do
      record.step, record.updates, record.scale, record.loss, record.first_bad = i - 1, i - 1,
        p:scale(), loss, -1
      actions[i] = p:decide(record):what()
    end
    assert.are.equal("step", actions[6])
  end)

  -- Trains with dropout on data that can go back to an earlier batch. The loss of batch 7 is large;
  -- with `broken` only the first time it is computed, as in a transient fault of the machine.
  local function train(broken)
    engine.seed(3)
    local place, tries, rows = 0, 0, {}
    local model = engine.nn.linear(8, 8)
    local summary = engine.trainer { model = model, steps = 11, log = "quiet", policy = "rerun",
      policy_options = { samples = 4, loss_scale = 1 },
      data = { next = function()
        place = place + 1
        return { x = engine.randn(4, 8), place = place }
      end, state = function() return place end, restore = function(_, to) place = to end },
      loss = function(m, batch)
        local loss = engine.nn.dropout(0.5)(m(batch.x)):square():mean()
        if batch.place ~= 7 then return loss end
        tries = tries + 1
        return loss * (broken and tries > 1 and 1 or 1e4)
      end, optimizer = engine.optim.sgd(model, { lr = 1e-12 }),
      on_step = function(_, record, verdict)
        rows[#rows + 1] = verdict:what() .. (verdict:what() == "step" and "" or
          (" %d"):format(record.loss > 100 and 1 or 0))
      end }:run()
    return table.concat(rows, " "), summary
  end
  it("accepts losses of 0 if all samples were 0", function()
    local steps = times(8, { loss = 0 })
    assert.same(times(8, "step"), field(drive(engine.policy.load("rerun", { samples = 3 }), steps),
      "action"))
  end)

  it("in a run, distinguishes a loss spike in the data from a fault of the machine", function()
    local rows, summary = train(false)
    assert.are.equal("step step step step step step retry 1 step step step step", rows)
    assert.is_nil(summary.stopped)
    rows, summary = train(true)
    assert.are.equal("step step step step step step retry 1 stop 0", rows)
    assert.matches("transient fault", summary.stopped, 1, true)
  end)
end)

describe("policy fp8_delayed", function()
  it("scales a tensor whose amax is the value of tensors without a scale", function()
    local p = engine.policy.load("fp8_delayed", nil, "fp8")
    p:tensors({ "a:x" }, { 1 }, { "a:x" }, true)
    local stats, record = M_ffi.new("eng_tensor_stats[1]"), M_ffi.new("eng_record")
    record.scale, record.first_bad = 1, -1
    stats[0].relative_scale, stats[0].amax = 1, 2 ^ -126
    assert.are.equal(0, p:decide(record, stats).failed)
    assert.are.equal(2 ^ -125, p:group_scale(1))
  end)
end)

describe("policy fp8_lm", function()
  local NAMES = { "a:x", "a:w", "a:dy" }

  -- Decides on steps { amax, clipped elements of a million }, which may have measured = false or
  -- overflow = true. Returns for each the amax by which a:dy is scaled next, or "own" if the policy
  -- sets none.
  local function tops(options, steps, save)
    local p = engine.policy.load("fp8_lm", options, "fp8")
    p:tensors(NAMES, { 1, 2, 3 }, NAMES, true)
    local stats, record, list = M_ffi.new("eng_tensor_stats[3]"), M_ffi.new("eng_record"), {}
    for i, s in ipairs(steps) do
      record.step, record.scale, record.first_bad = i - 1, 1, -1
      for r = 0, 2 do
        stats[r].relative_scale, stats[r].amax, stats[r].inf = 1, s.overflow and 0 or s[1],
          s.overflow and 1 or 0
        stats[r].measured, stats[r].clipped = s.measured == false and 0 or 1000000, s[2] or 0
      end
      if save then p:restore(p:save()) end
      local v = p:decide(record, stats)
      assert.are.equal(0, v.failed, v:why())
      for r = 1, 2 do assert.are.equal(p:scale(), p:group_scale(r), "x and w are left alone") end
      local top = p:group_scale(3)
      list[i] = top ~= p:scale() and top or "own"
    end
    return list
  end

  it("starts at the amax, halves mu when too much saturates, else doubles it slowly", function()
    local grown = 2 ^ (1 / 1000)
    assert.are.same({ 8, 8 / grown, 16 / grown, 16 / grown / grown },
      tops({}, { { 8 }, { 8, 10 }, { 8, 11 }, { 8 } }))
    local long = {}
    for i = 1, 1001 do long[i] = { 8 } end
    assert.near(4, tops({}, long)[1001], 1e-9)
  end)
  it("grows for all steps since the last measured one", function()
    assert.are.same({ "own", 8, 8, 8, 8 / 2 ^ (3 / 10) }, tops({ growth_interval = 10 },
      { { 8, measured = false }, { 8 }, { 8, measured = false }, { 8, measured = false }, { 8 } }))
  end)
  it("keeps the scale when gradients are zero, inf or nan", function()
    assert.are.same({ "own", "own", 8, 8, 8 }, tops({}, { { 0 }, { 8, overflow = true }, { 8 },
      { 0 }, { 8, 1000, overflow = true } }))
  end)
  it("resumes from a saved state, and stays in range", function()
    local steps = {}
    for i = 1, 400 do steps[i] = { 2 ^ -20, i % 7 == 0 and 50 or 0 } end
    assert.are.same(tops({}, steps), tops({}, steps, true))
    for i = 1, 400 do steps[i] = { 2 ^ -120 } end
    assert.are.equal(2 ^ -125, tops({ growth_interval = 1 }, steps)[400])
    for i = 1, 400 do steps[i] = { 1, 1000 } end
    assert.are.equal(2 ^ 127, tops({}, steps)[400])
  end)
  it("settles at its share of saturated gradients in a run", function()
    local clipped, seen = 0, 0
    local t = helper.job { text = ("the quick brown fox jumps over the lazy dog "):rep(40),
      seed = 7, data_seed = 3, lr = 2e-3, steps = 60, precision = { name = "lm",
        base = "fp8_current", fp8 = { sample = 1,
        policy = "fp8_lm:growth_interval=4,threshold=0.01" } },
      on_step = function(trainer)
        if trainer.steps_done <= 40 then return end
        for _, site in ipairs(trainer.optimizer.fp8.list) do
          clipped, seen = clipped + site.meters.dy.overflow, seen + 1
        end
      end }
    t:run()
    assert.are.equal(0, t.optimizer.fp8.policies[1]:failures())
    local share = clipped / seen
    assert.is_true(share > 0.001 and share < 0.03, share .. " saturated")
  end)
end)

describe("spike", function()
  it("exempts as many steps as warmup says", function()
    for warmup = 0, 3 do
      local steps = join(times(warmup, { loss = 50 }), times(3, { loss = 1e6 }))
      local actions = field(drive(engine.policy.load("spike", { warmup = warmup }), steps),
        "action")
      assert.equal(warmup > 0 and "step" or "skip", actions[1])
      assert.equal("skip", actions[warmup + 1], warmup)
    end
  end)
end)

describe("fp8_delayed", function()
  it("scales by the largest valid amax of the last steps", function()
    local names, of, ffi = {}, {}, M_ffi.ffi
    for i = 1, 3 do names[i], of[i] = ("l%d:x"):format(i), i end
    local record, stats = M_ffi.new("eng_record"), ffi.new("eng_tensor_stats[?]", 3)
    record.scale = 1
    for _, history in ipairs { 1, 2, 7 } do
      math.randomseed(history)
      local policy = engine.policy.load("fp8_delayed", { history = history }, "fp8")
      policy:tensors(names, of, names, true)
      local seen = { {}, {}, {} }       -- the valid amaxes by step
      for step = 1, 60 do
        local amax = { 0.9 ^ step, math.random(4), math.random() < 0.3 and 0 or math.random() }
        for i = 1, 3 do
          stats[i - 1].relative_scale, stats[i - 1].amax = 1, amax[i]
          stats[i - 1].inf = math.random() < 0.2 and 1 or 0
          if amax[i] > 0 and stats[i - 1].inf == 0 then
            seen[i][step], seen[i].last = amax[i], amax[i]
          end
        end
        policy:decide(record, stats)
        for i = 1, 3 do
          local most
          for k = step - history + 1, step do most = math.max(most or 0, seen[i][k] or 0) end
          if most == 0 then most = seen[i].last end
          if most then assert.equal(most, policy:group_scale(i), step) end
        end
      end
    end
  end)
end)
