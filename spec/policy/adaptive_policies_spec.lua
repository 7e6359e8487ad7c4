-- The adaptive policies: how each behaves on synthetic gradients of known size and on the records
-- of a run. policies_spec.lua tests the exact scalers of other systems.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local helper = require "spec.helper"

local ADAPTIVE = { "max_value", "norm_ratio", "max_norm", "log_max", "histogram", "underflow",
  "layerwise", "per_expert", "fast_backoff", "guarded",
  "entropy", "lr_coupled", "learned", "bandit", "pid" }

-- Synthetic gradients: exponents follow a bell curve around `mean`; the largest lies eight octaves
-- above it. Values are counted as fp16 stores them.
local BELL = {}
for d = -12, 8 do BELL[d] = math.floor(1e6 * math.exp(-d * d / 18) + 0.5) end
BELL[8] = 40

local function look(scale, mean, stats)
  local shift = math.log(scale) / math.log(2) + mean
  local s = { hist = {}, inf = 0, zeros = 0, underflow = 0, count = 0, squares = 0,
    true_squares = 0, amax = 0 }
  for d, n in pairs(BELL) do
    local e = math.floor(shift + d)
    s.count, s.true_squares = s.count + n, s.true_squares + n * 4 ^ (mean + d)
    if e > 15 then s.inf = s.inf + n
    elseif e < -24 then s.zeros = s.zeros + n
    else
      s.hist[e] = (s.hist[e] or 0) + n
      s.squares, s.amax = s.squares + n * 4 ^ (shift + d), math.max(s.amax, 2 ^ (shift + d))
      if e < -14 then s.underflow = s.underflow + n end
    end
  end
  if stats then
    stats.count, stats.inf, stats.zeros, stats.underflow, stats.amax, stats.sum_squares = s.count,
      s.inf, s.zeros, s.underflow, s.amax, s.squares
    for b = 0, 319 do stats.hist[b] = s.hist[b - 160] or 0 end
  end
  return s
end

-- Runs a policy for `steps` steps. mean(step, i) is the mean exponent of layer i; `fields` gives
-- the number of layers, ref_every, and a function that edits the record.
local function world(name, options, steps, mean, fields)
  local p = engine.policy.load(name, options)
  local layers = fields and fields.layers or 1
  local names, group_of = {}, {}
  for i = 1, layers do names[i], group_of[i] = ("moe.experts.%d.w"):format(i), i end
  local groups = {}
  for i = 1, layers do groups[i] = ("moe.experts.%d"):format(i) end
  p:tensors(names, group_of, groups, true)
  local stats, r = M_ffi.new("eng_tensor_stats[?]", layers), M_ffi.new("eng_record")
  local result = { scales = {}, skipped = 0, policy = p, lost = 0, last = {} }
  for step = 0, steps - 1 do
    local scale = p:scale()
    r.step, r.updates, r.scale, r.loss, r.lr, r.first_bad, r.norm_ref = step, step - result.skipped,
      scale, 1, 1e-3, -1, 0 / 0
    r.count, r.inf, r.zeros, r.underflow, r.amax = 0, 0, 0, 0, 0
    for b = 0, 319 do r.hist[b] = 0 end
    local squares, true_squares = 0, 0
    for i = 1, layers do
      local own = layers > 1 and p:group_scale(i) or scale
      local s = look(own, mean(step, i), stats[i - 1])
      stats[i - 1].relative_scale = own / scale
      result.last[i] = s
      for _, field in ipairs { "count", "inf", "zeros", "underflow" } do
        r[field] = r[field] + s[field]
      end
      r.amax = math.max(r.amax, s.amax / own)
      squares, true_squares = squares + s.squares / own ^ 2, true_squares + s.true_squares
      for e, n in pairs(s.hist) do r.hist[e + 160] = r.hist[e + 160] + n end
    end
    r.norm, r.overflow = math.sqrt(squares), r.inf > 0 and 1 or 0
    if fields and fields.ref_every and step % fields.ref_every == 0 then
      r.norm_ref = math.sqrt(true_squares)
    end
    if fields and fields.at then fields.at(p, r, step) end
    local verdict = p:decide(r, stats)
    assert(verdict.failed == 0, name .. " at step " .. step .. ": " .. verdict:why())
    assert(verdict.scale > 0 and verdict.scale < math.huge)
    result.scales[step + 1] = verdict.scale
    result.action, result.clip, result.why = verdict:what(), verdict.clip, verdict:why()
    if r.overflow == 1 then result.skipped = result.skipped + 1 end
    result.lost = result.lost + tonumber(r.zeros) / tonumber(r.count) / steps
    if result.action == "stop" then break end
  end
  return result
end

local function log2(x) return math.log(x) / math.log(2) end
local function still(mean) return function() return mean end end
-- The largest gradient, as stored, when exponents have this mean.
local function largest(scale, mean) return scale * 2 ^ (mean + 8) end

describe("every adaptive policy", function()
  it("documents itself", function()
    for _, name in ipairs(ADAPTIVE) do
      local p = engine.policy.load(name)
      assert.are.equal(name, p.name)
      assert.is_true(#p.doc > 20)
      assert.truthy(helper.read("policies/" .. name .. ".lua"):find "Source", name)
      assert.truthy(helper.read("policies/README.md"):find("| `" .. name .. ".lua` |", 1, true),
        name .. " in policies/README.md")
    end
  end)

  it("survives extreme gradients and recovers", function()
    for _, name in ipairs(ADAPTIVE) do
      local chaos = { [100] = 20, [101] = 20, [300] = -300, [301] = -300, [500] = 300, [700] = -60 }
      local r = world(name, {}, 4000, function(step)
        if step >= 900 and step < 930 then return 40 end  -- thirty overflows in a row
        if step >= 1000 and step < 1200 then return -90 end  -- all gradients zero
        return chaos[step] or -16
      end, { at = function(_, record, step)
        if step % 977 == 0 then record.loss, record.lr = 0 / 0, 0 / 0 end
        if step % 501 == 0 then
          record.overflow, record.nan, record.amax, record.norm = 1, record.count, 0, 0
        end
      end, ref_every = 20 })
      assert.is_true(r.skipped < 200, ("%s skipped %d"):format(name, r.skipped))
      local last = largest(r.scales[4000], -16)
      -- Some policies recover only by an occasional doubling; norm_ratio stops raising the scale
      -- once the norm is above an eighth of the true one.
      local slow = { norm_ratio = true, fast_backoff = true, guarded = true, entropy = true,
        lr_coupled = true }
      assert.is_true(last < 65504 * 2 and last > (slow[name] and 2 ^ -30 or 2 ^ -10),
        ("%s ends at %g"):format(name, last))
    end
  end)

  it("reads only the statistics in `needs`, and resumes from a saved state", function()
    for _, name in ipairs(ADAPTIVE) do
      local function mean(step)
        return -16 + 5 * math.sin(step / 9) + (step % 40 == 39 and 9 or 0)
      end
      local whole = world(name, {}, 120, mean, { ref_every = 7, layers = 3 })
      local again = world(name, {}, 120, mean,
        { ref_every = 7, layers = 3, at = function(p) p:restore(p:save()) end })
      assert.are.same(whole.scales, again.scales, name)
      assert.are.equal(whole.policy:save(), again.policy:save())
    end
  end)

  it("takes over from dynamic at its scale", function()
    for _, name in ipairs(ADAPTIVE) do
      local old = engine.policy.load("dynamic", { init_scale = 2 ^ 11 })
      local p = engine.policy.load(name)
      p:take_over(old)
      assert.are.equal(2 ^ 11, p:scale(), name)
    end
  end)

  it("refuses options that must be mistakes", function()
    for name, options in pairs { max_value = { limit = "none" }, norm_ratio = { ref_every = 0.5 },
      max_norm = { bold = 1 }, log_max = { beta1 = 2 },
      histogram = { period = 0 }, underflow = { limit = 0 }, fast_backoff = { backoff_factor = 2 },
      guarded = { clip = 0 }, entropy = { least = 0 },
      lr_coupled = { least = 0 }, learned = { rate = 0 }, bandit = { period = 0 },
      pid = { most = 0 } } do
      assert.has_error(function() engine.policy.load(name, options) end)
    end
  end)

  it("decides on the records of a run without an error", function()
    local folder = helper.folder()
    engine.seed(1)
    local model = engine.nn.gpt { vocab = 16, context = 8, width = 16, heads = 2, layers = 2 }
    local x = engine.tensor({ { 1, 2, 3, 4, 5, 6, 7, 8 } }, { dtype = "i32", keep = true })
    local y = engine.tensor({ { 2, 3, 4, 5, 6, 7, 8, 9 } }, { dtype = "i64", keep = true })
    engine.trainer { model = model, data = { next = function() return { x = x, y = y } end },
      steps = 40, log = "quiet", run = folder .. "/run",
      optimizer = engine.optim.adamw(model, { lr = 1e-2, precision = "fp16" }),
      policy = "dynamic:init_scale=2^22,growth_interval=8", stats_every = 1 }:run()
    local trace = engine.replay.trace(folder .. "/run")
    for _, name in ipairs(ADAPTIVE) do
      if name ~= "layerwise" then  -- layerwise sets scales per layer; a recorded run has one scale
        local r = engine.replay.run(trace, name)
        assert.are.equal(0, r.failures, r.failure)
        assert.are.equal(40, r.steps)
      end
    end
    helper.remove(folder)
  end)
end)

describe("policy max_value", function()
  it("holds the largest gradient at the target while gradients shrink", function()
    for _, limit in ipairs { "after", "before" } do
      local r = world("max_value", { init_scale = 2 ^ 10, limit = limit }, 3000,
        function(step) return -16 - 6 * step / 3000 end)
      assert.are.equal(0, r.skipped)
      assert.near(log2(32768), log2(largest(r.scales[3000], -22)), 1)
    end
  end)
  it("averages target / amax, then limits the change of the scale", function()
    -- amax is 2^-8, then 2^-10: target / amax 2^23, then 2^25
    local r = world("max_value", { init_scale = 2 ^ 20 }, 8,
      function(step) return step < 5 and -16 or -18 end)
    local mean = 0.99 * 2 ^ 23 + (1 - 0.99) * 2 ^ 25
    local second = 0.99 * mean + (1 - 0.99) * 2 ^ 25
    assert.are.same({ 2 ^ 21, 2 ^ 22, 2 ^ 23, 2 ^ 23, 2 ^ 23, mean, second,
      0.99 * second + (1 - 0.99) * 2 ^ 25 }, r.scales)
    r = world("max_value", { init_scale = 2 ^ 22, target = 2 ^ 11 }, 4, still(-16))
    assert.are.same({ 2 ^ 21, 2 ^ 20, 2 ^ 19, 2 ^ 19 }, r.scales)
  end)
  it("with limit=before limits target / amax and averages it into the scale", function()
    local r = world("max_value", { init_scale = 2 ^ 20, limit = "before" }, 3, still(-16))
    local scale = 2 ^ 20
    for step = 1, 3 do
      scale = 0.99 * scale + (1 - 0.99) * (2 * scale)
      assert.are.equal(scale, r.scales[step])
    end
  end)
  it("is more aggressive with target=49152", function()
    local careful, bold = world("max_value", {}, 2000, still(-16)),
      world("max_value", { target = 49152 }, 2000, still(-16))
    assert.near(1.5, bold.scales[2000] / careful.scales[2000], 0.01)
  end)
  it("barely reacts to a large gradient; after a tiny one, grows until an overflow", function()
    local r = world("max_value", {}, 300, function(step) return step == 200 and -15.2 or -16 end)
    assert.near(0.99 + 0.01 * 2 ^ -0.8, r.scales[201] / r.scales[200], 1e-9)
    r = world("max_value", {}, 900, function(step) return step == 200 and -40 or -16 end)
    assert.is_true(r.skipped >= 1 and r.skipped <= 3, r.skipped .. " skipped")
    assert.near(log2(32768), log2(largest(r.scales[900], -16)), 1.01)
    r = world("max_value", { limit = "before", init_scale = 2 ^ 22 }, 1000,
      function(step) return step == 800 and -40 or -16 end)
    assert.is_true(r.scales[801] / r.scales[800] < 1.011)
  end)
  it("lowers its target after an overflow below it", function()
    -- Activation gradients overflow at a quarter of the magnitude that weight gradients allow.
    local function hidden(_, record)
      if record.amax * record.scale > 16000 then record.overflow, record.inf = 1, 1 end
    end
    for _, limit in ipairs { "after", "before" } do
      local blind = world("max_value", { init_scale = 2 ^ 20, limit = limit }, 3000, still(-16),
        { at = hidden })
      local overflows = 0
      for i = 1001, 3000 do
        if blind.scales[i] < 0.6 * blind.scales[i - 1] then overflows = overflows + 1 end
      end
      assert.is_true(overflows <= 8, overflows .. " overflows")
    end
  end)
end)

describe("policy norm_ratio", function()
  it("grows when the f32 norm shows lost gradients, and needs few references", function()
    local r = world("norm_ratio", { init_scale = 2 ^ -10, ref_every = 10 }, 1000, still(-24),
      { ref_every = 10 })
    assert.are.equal(0, r.skipped)
    local last = largest(r.scales[1000], -24)
    assert.is_true(last > 2 ^ -24 and last < 2 ^ -14)
  end)
  it("keeps every gradient when `high` is close to 1", function()
    local r = world("norm_ratio", { init_scale = 1, high = 1.0001 }, 3000, still(-20),
      { ref_every = 10 })
    assert.is_true(largest(r.scales[3000], -20) > 2 ^ -14)
  end)
  it("does nothing in steps without a reference", function()
    local r = world("norm_ratio", { init_scale = 2 ^ 12 }, 300, still(-30))
    assert.are.equal(2 ^ 12, r.scales[300])
  end)
end)

describe("policy max_norm", function()
  it("follows the largest gradient; the norm raises the target where gradients are lost", function()
    local r = world("max_norm", { init_scale = 2 ^ 4 }, 2000, still(-16), { ref_every = 100 })
    assert.are.equal(0, r.skipped)
    assert.near(15, log2(largest(r.scales[2000], -16)), 1)
    local lossy = world("max_norm", { init_scale = 2 ^ 4 }, 2000, still(-16),
      { at = function(_, record, step)
      if step % 100 == 0 then record.norm_ref = 1.2 * record.norm end
    end })
    assert.is_true(lossy.scales[2000] > 1.3 * r.scales[2000])
  end)
  it("recovers gradients that all underflowed", function()
    local r = world("max_norm", { init_scale = 2 ^ -10 }, 3000, still(-24), { ref_every = 100 })
    assert.near(15, log2(largest(r.scales[3000], -24)), 1)
  end)
end)

describe("policy log_max", function()
  it("leaves room for the spread it has seen", function()
    local function noisy(sigma)
      return function(step) return -16 + sigma * math.sin(step * 12.9898) * math.sqrt(2) end
    end
    local calm, wild = world("log_max", {}, 4000, noisy(0.3)), world("log_max", {}, 4000, noisy(2))
    assert.is_true(wild.scales[4000] < calm.scales[4000] / 8)
    assert.is_true(wild.skipped <= 4)
  end)
  it("recovers soon from an overflow that costs the original thousands of steps", function()
    local r = world("log_max", {}, 3000, function(step) return step == 200 and 2 or -16 end)
    assert.is_true(r.scales[201] < r.scales[200])
    assert.is_true(r.scales[1000] > 0.5 * r.scales[200],
      ("%g of %g"):format(r.scales[1000], r.scales[200]))
  end)
  it("learns nothing from gradients that are zero", function()
    local r = world("log_max", {}, 50, still(-99))
    assert.are.equal(2 ^ 14, r.scales[50])
  end)
end)

describe("policy histogram", function()
  it("holds the share of large gradients at the threshold", function()
    local r = world("histogram", { init_scale = 1 }, 1000, still(-16))
    assert.are.equal(0, r.skipped)
    local last = largest(r.scales[1000], -16)
    assert.is_true(last > 2 ^ 11 and last < 2 ^ 15)
  end)
  it("tolerates as many large gradients as the threshold allows", function()
    local r = world("histogram", { init_scale = 1, threshold = 0.001 }, 1000, still(-16))
    local strict = world("histogram", { init_scale = 1 }, 1000, still(-16))
    assert.is_true(r.scales[1000] >= 2 * strict.scales[1000])
  end)
end)

describe("policy underflow", function()
  it("raises the scale until at most the limit is lost, and no further", function()
    local r = world("underflow", { init_scale = 1 }, 2000, still(-20))
    local s = r.last[1]
    assert.is_true((s.hist[-24] or 0) / s.count <= 0.001)
    assert.is_true(s.zeros / s.count < 0.002)
    assert.is_true(largest(r.scales[2000], -20) < 2 ^ 8, "it comes too close to overflow")
    assert.are.equal(0, r.skipped)
  end)
  it("lowers the scale when far more is kept than needed", function()
    local r = world("underflow", { init_scale = 2 ^ 20 }, 8000, still(-16))
    assert.is_true(r.scales[8000] < 2 ^ 10)
    assert.is_true(r.lost < 0.001)
  end)
end)

describe("policy layerwise", function()
  it("fits each layer's scale to its gradients, where a single scale loses most of them", function()
    local function mean(_, i) return -60 + 6 * i end
    local apart, whole = world("layerwise", {}, 200, mean, { layers = 8 }),
      world("max_value", {}, 2000, mean)
    for i = 1, 8 do
      local s = apart.last[i]
      assert.are.equal(0, s.inf)
      assert.is_true(s.zeros / s.count < 0.001, "layer " .. i)
      assert.is_true(s.amax > 2 ^ 8)
      local _, exponent = math.frexp(apart.policy:group_scale(i))
      assert.are.equal(2 ^ (exponent - 1), apart.policy:group_scale(i))           -- powers of two
    end
    local scale = whole.scales[2000]
    assert.is_true(look(scale, -60 + 6).zeros > 0)
  end)
  it("backs off the overflowed layer nearest to the loss, then the next if that fails", function()
    local before, after
    world("layerwise", {}, 60, function(step, i) return step >= 50 and i == 4
      and 20 + 2 * (step - 50) or -30 end, { layers = 8, at = function(p, record, step)
      after = {}
      for i = 1, 8 do after[i] = p:group_scale(i) end
      if step == 50 then before = after
      elseif step == 51 then
        for i = 1, 8 do assert.are.equal(i == 4 and before[4] / 4 or before[i], after[i]) end
      end
      if record.overflow == 1 then record.inf = 1 end
    end })
    assert.are.equal(before[3], after[3])
    assert.is_true(after[5] < before[5])
    assert.are.equal(before[6], after[6])
  end)
end)

describe("policy per_expert", function()
  it("raises rare experts, lowers popular and overflowed ones, keeps idle ones", function()
    local r = world("per_expert", { init_scale = 2 ^ 14 }, 200, function(step, i)
      if i == 3 then return -99 end  -- never routed to: all zero
      if i == 2 and step == 150 then return 10 end
      return i == 1 and -30 or -16
    end, { layers = 4 })
    local p = r.policy
    assert.is_true(p:group_scale(1) > 2 ^ 30)
    assert.are.equal(2 ^ 14, p:group_scale(3))
    assert.is_true(p:group_scale(2) < p:group_scale(4))
    assert.are.equal(2 ^ 14, p:scale())
  end)
  it("is an ordinary dynamic scale if there are no experts", function()
    local r = world("per_expert", { init_scale = 2 ^ 14, growth_interval = 10, experts = "none" },
      20, still(-26))
    assert.are.equal(2 ^ 16, r.scales[20])
  end)
end)

-- Scales after each step of a trace of good steps and overflows, without gradient statistics.
local function bare(name, options, trace)
  local p, r, scales, verdict = engine.policy.load(name, options), M_ffi.new("eng_record"), {}, nil
  for i = 1, #trace do
    r.step, r.scale, r.overflow, r.first_bad, r.norm_ref = i - 1, p:scale(), trace:sub(i, i) == "x"
      and 1 or 0, -1, 0 / 0
    verdict = p:decide(r)
    scales[i] = verdict.scale
  end
  return scales, verdict
end

describe("policy fast_backoff", function()
  it("backs off by a factor of four at once and restarts its count", function()
    assert.are.same({ 64, 64, 16, 16, 16, 28.8 },
      (bare("fast_backoff", { init_scale = 64, growth_interval = 3 }, "..x...")))
  end)
  it("stops at the floor with advice", function()
    local _, verdict = bare("fast_backoff", { init_scale = 4, patience = 3 }, "xxxx")
    assert.are.equal("stop", verdict:what())
    assert.matches("look at the first bad tensor", verdict:why())
  end)
end)

describe("policy guarded", function()
  it("has a floor, pauses growth after repeated overflows, and clips", function()
    local options = { init_scale = 2 ^ 16, growth_interval = 2, pause = 6, floor = 2 ^ 12 }
    local scales, verdict = bare("guarded", options, "xxx")
    assert.are.same({ 2 ^ 16 * 0.3, 2 ^ 16 * 0.3 * 0.3, 2 ^ 12 }, scales)
    assert.are.equal(1, verdict.clip)
    scales = bare("guarded", options, "xxxxx" .. "........")
    assert.are.equal(2 ^ 12, scales[10])
    assert.are.equal(2 ^ 12 * 1.6, scales[11])
  end)
  it("backs off ahead of a growing gradient", function()
    local r = world("guarded", { init_scale = 2 ^ 20 }, 400,
      function(step) return -18 + step / 50 end)
    assert.are.equal(0, r.skipped)
  end)
end)

describe("policy entropy", function()
  local function with(entropy, steps)
    local r = world("entropy", { init_scale = 2 ^ 10, decay = 0 }, steps or 3, still(-26),
      { at = function(p) p:signal("attention_entropy", entropy) end })
    return r.scales[#r.scales] / 2 ^ 10
  end
  it("follows its formula within limits and never turns negative", function()
    assert.near(1, with(1), 1e-12)
    assert.near(1 + 0.9 * 2, with(0.1), 1e-12)
    assert.near(2.8, with(0), 1e-12)
    assert.near(0.25, with(2), 1e-12)
    assert.near(0.25, with(50), 1e-12)
    assert.near(1, with(0 / 0), 1e-12)
  end)
  it("is an ordinary dynamic scale if there is no signal", function()
    assert.are.same({ 512, 512, 256 }, (bare("entropy", { init_scale = 1024 }, "x.x")))
  end)
end)

describe("policy lr_coupled", function()
  it("grows sooner as the rate falls, waits while it rises, backs off when it jumps", function()
    local function steps_to_grow(rate)
      local r = world("lr_coupled", { growth_interval = 1000 }, 1500, still(-60),
        { at = function(_, record, step) record.lr = rate(step) end })
      for i, scale in ipairs(r.scales) do if scale > 2 ^ 16 then return i end end
    end
    assert.are.equal(1000, steps_to_grow(function() return 1e-3 end))
    local function falling(step) return 1e-3 * math.max(0.05, 1 - step / 400) end
    assert.is_true(steps_to_grow(falling) < 400)
    assert.is_nil(steps_to_grow(function(step) return 1e-6 * (step + 1) end))
    local r = world("lr_coupled", {}, 300, still(-60),
      { at = function(_, record, step) record.lr = step < 200 and 1e-4 or 1e-3 end })
    assert.are.equal(2 ^ 15, r.scales[300])
  end)
end)

describe("policy learned", function()
  it("finds a scale that loses little and overflows rarely, from either side", function()
    for _, start in ipairs { 2 ^ -8, 2 ^ 26 } do
      local r = world("learned", { init_scale = start }, 3000, still(-20))
      assert.is_true(r.last[1].underflow / r.last[1].count < 0.05, start)
      assert.is_true(r.skipped < 30, r.skipped .. " skipped")
    end
  end)
end)

describe("policy bandit", function()
  it("settles on the rule that loses the fewest gradients", function()
    local r = world("bandit", { init_scale = 2 ^ 4 }, 3000, still(-26))
    assert.is_true(r.last[1].underflow / r.last[1].count < 0.01)
    -- Spikes that overflow an aggressive scale: one step in ten is 2^6 larger.
    local spiky = world("bandit", {}, 4000, function(step) return step % 10 == 9 and -14 or -20 end)
    local dynamic = world("dynamic", { growth_interval = 20, init_scale = 2 ^ 14 }, 4000,
      function(step) return step % 10 == 9 and -14 or -20 end)
    assert.is_true(spiky.skipped < 400)
    assert.is_true(dynamic.skipped > 0)
  end)
end)

describe("policy pid", function()
  it("holds the largest gradient at the target without ringing, also after a jump", function()
    local r = world("pid", {}, 800, function(step) return step < 400 and -16 or -24 end)
    assert.near(log2(8192), log2(largest(r.scales[390], -16)), 0.8)
    assert.near(log2(8192), log2(largest(r.scales[800], -24)), 0.8)
    for i = 501, 800 do assert.is_true(largest(r.scales[i], -24) < 40000) end
    assert.are.equal(0, r.skipped)
  end)
end)
