-- The policies that act on the update (adagc, update_clip, spam, stable_spam) in live runs whose
-- gradients are given exactly, against the rules written out here; and qk_clip.
local engine = require "engine"
local M_ffi = require "engine.base.ffi"
local fused_state = require "engine.train.fused_state"
local helper = require "spec.helper"
local published = require("engine.policy.signals").values

local inf = 1 / 0

-- Two parameters, a vector of 6 and a matrix of 2 x 3, whose gradients a batch gives exactly: the
-- loss is the sum of weight * batch.
local LENGTHS = { 6, 6 }
local Given = engine.nn.class("given")
function Given:init()
  self:parameter("a", engine.tensor { 0.5, -0.25, 1, 2, -1, 0.125 })
  self:parameter("b", engine.tensor { { 1, 2, 3 }, { -1, -2, -3 } })
end
function Given:forward(batch)
  return (self.a * batch.a):sum() + (self.b * batch.b):sum()
end

local STEPS = 110

-- The gradients of step t: noise, all of it larger at some steps, with spikes of single elements.
local function gradients_at(t)
  local of = { {}, {} }
  for i, list in ipairs(of) do
    for k = 1, LENGTHS[i] do
      list[k] = tonumber(M_ffi.ffi.cast("float", math.sin(t * 12.9898 + i * 4.1 + k * 78.233)
        * (t % 17 == 0 and 9 or 1) * ((t + k) % 29 == 0 and 40 or 1) / 4))
    end
  end
  return of
end

local Data = {}
Data.__index = Data
function Data:next()
  self.at = self.at + 1
  local of = gradients_at(self.at)
  return { a = engine.tensor(of[1]),
    b = engine.tensor { { unpack(of[2], 1, 3) }, { unpack(of[2], 4, 6) } } }
end
function Data:state() return { at = self.at } end
function Data:restore(state) self.at = state.at end

local function numbers_of(model)
  local list = {}
  for _, p in ipairs(model:parameters()) do
    for _, x in ipairs(p.tensor:detach():view(6):totable()) do list[#list + 1] = x end
  end
  return list
end

-- Trains a Given model; `options` override the trainer options below. Returns the trainer and the
-- weights after each step.
local function train(options)
  local model, seen = Given(), {}
  local optimizer = engine.optim[options.kind or "adamw"](model, { lr = 1e-2,
    eps = options.kind == nil and 1e-12 or nil, weight_decay = 0 })
  local o = { model = model, optimizer = optimizer, data = setmetatable({ at = 0 }, Data),
    log = "quiet", steps = STEPS, loss = function(m, batch) return m(batch) end,
    on_step = function(t, record, verdict)
      assert.are.equal(0, verdict.failed, verdict:why())
      seen[t.steps_done] = numbers_of(model)
    end }
  for key, value in pairs(options) do if key ~= "kind" then o[key] = value end end
  local trainer = engine.trainer(o)
  trainer:run()
  return trainer, seen
end

local function norm_of(list)
  local sum = 0
  for _, x in ipairs(list) do sum = sum + x * x end
  return math.sqrt(sum)
end

-- The rules in double: rule(state, t, gradients) changes the gradients and may return, in this
-- order, a factor on the rate; whether to reset the moments first; the limit on g^2 / v (0: none);
-- a function from the norm of the update to its limit; the number of updates in bias corrections.
local RULES = {}
function RULES.adagc(s, t, of)
  local factor = math.min(1 / (norm_of { norm_of(of[1]), norm_of(of[2]) } + 1e-8), 1)
  for i, g in ipairs(of) do
    local norm, h = norm_of(g), factor
    if t < 20 then s[i] = t == 1 and h * norm or math.min(s[i], h * norm)
    else
      h = math.min(1.05 * s[i] / norm, 1)
      s[i] = 0.98 * s[i] + 0.02 * h * norm
    end
    for k = 1, #g do g[k] = g[k] * h end
  end
end
function RULES.update_clip(s)
  return 1, false, 0, function(norm)
    local mean, var, n, most = 0, 0, #s, inf
    if n >= 8 then
      for _, x in ipairs(s) do mean = mean + x / n end
      for _, x in ipairs(s) do var = var + (x - mean)^2 / n end
      most = mean + math.max(math.sqrt(var), 1e-6)
    end
    s[n + 1] = norm
    if n == 16 then table.remove(s, 1) end
    return most
  end
end
function RULES.spam(s, t)
  if t % 30 == 0 then s.since = 0 end
  local since = s.since or 99
  s.since = since + 1
  return since < 8 and 1 - 0.99 * (1 + math.cos(math.pi * since / 9)) / 2 or 1, t % 30 == 0,
    t >= 5 and t % 30 >= 5 and 20 or 0
end
function RULES.stable_spam(s, t, of)
  local step = (s.step or 0) + 1
  for i, g in ipairs(of) do
    local means, amax = s[i] or { max = 0, norm = 0, square = 0 }, 0
    for _, x in ipairs(g) do amax = math.max(amax, math.abs(x)) end
    means.max = 0.9 * means.max + 0.1 * amax
    local most = means.max / (1 - 0.9 ^ step)
    for k, x in ipairs(g) do g[k] = math.abs(x) > most and x / amax * most or x end
    local norm = norm_of(g)
    means.norm = 0.7 * means.norm + 0.3 * norm
    means.square = 0.9 * means.square + 0.1 * norm ^ 2
    local c = means.norm / (1 - 0.7 ^ step) / (math.sqrt(means.square / (1 - 0.9 ^ step)) + 1e-8)
    for k, x in ipairs(g) do g[k] = x / norm * c end
    s[i] = means
  end
  s.step = t % 30 == 0 and 1 or step
  return 1, t % 30 == 0, 0, nil, s.step
end
local OPTIONS = { stable_spam = { theta = 0.9, interval = 30 }, adagc = { warmup_steps = 20 },
  update_clip = { rolling_interval_length = 16, sigma_factor = 1 },
  spam = { interval = 30, grad_accu_steps = 5, warmup_epoch = 8, threshold = 20 } }

-- The weights after each step of AdamW in double under a rule.
local function expected(rule)
  local w, m, v, state, seen = numbers_of(Given()), {}, {}, {}, {}
  for k = 1, #w do m[k], v[k] = 0, 0 end
  for t = 1, STEPS do
    local of = gradients_at(t)
    local lr, reset, spike, limit, count = rule(state, t, of)
    count = count or t
    local change = {}
    for k = 1, #w do
      local g = k > 6 and of[2][k - 6] or of[1][k]
      if reset then m[k], v[k] = 0, 0 end
      if (spike or 0) > 0 and g * g > spike * v[k] then
        g = (g < 0 and -1 or 1) * math.sqrt(spike * v[k])
      end
      m[k], v[k] = 0.9 * m[k] + 0.1 * g, 0.999 * v[k] + 0.001 * g * g
      change[k] = -1e-2 * (lr or 1) / (1 - 0.9 ^ count) * m[k]
        / (math.sqrt(v[k] / (1 - 0.999 ^ count)) + 1e-12)
    end
    local norm = norm_of(change)
    local most = limit and limit(norm) or inf
    seen[t] = {}
    for k = 1, #w do
      w[k] = w[k] + change[k] * (norm > most and most / norm or 1)
      seen[t][k] = w[k]
    end
  end
  return seen
end

describe("a policy that acts on the update", function()
  for name, rule in pairs(RULES) do
    local function options(more)
      local o = { policy = name, policy_options = { loss_scale = 8 } }
      for key, value in pairs(OPTIONS[name]) do o.policy_options[key] = value end
      for key, value in pairs(more or {}) do o[key] = value end
      return o
    end

    it("moves the weights as its rule says, over " .. STEPS .. " steps: " .. name, function()
      local want, plain = expected(rule), expected(function() end)
      local _, got = train(options())
      local differs = 0
      for t = 1, STEPS do
        for k, x in ipairs(want[t]) do
          assert.is_true(math.abs(got[t][k] - x) <= 1e-6 * math.max(1, math.abs(x)),
            ("%s, step %d, weight %d: expected %.9g, got %.9g"):format(name, t, k, x, got[t][k]))
          differs = math.max(differs, math.abs(x - plain[t][k]))
        end
      end
      assert.is_true(differs > 1e-3, "the rule changed nothing")
    end)

    it("resumes bit for bit from a checkpoint at any step: " .. name, function()
      local folder = helper.folder()
      local _, whole = train(options { run = folder .. "/r", checkpoint_every = 1, keep = 100,
        steps = 40 })
      for k = 1, 39 do
        local _, rest = train(options { steps = 40,
          resume = ("%s/r/checkpoints/step-%08d"):format(folder, k) })
        assert.are.equal(40 - k, table.maxn(rest) - k, "resumed at " .. k)
        assert.are.same(whole[40], rest[40], name .. " resumed after step " .. k)
      end
      helper.remove(folder)
    end)
  end

  it("sees the norms as a shadow, and can be swapped in", function()
    local logged
    local trainer = train { steps = 60, policy = "dynamic", shadow = "update_clip" }
    assert.are.equal(0, trainer.shadows.list[1].policy:failures())
    trainer = train { steps = 40, policy = "dynamic", on_step = function(t, _, verdict)
      assert.are.equal(0, verdict.failed, verdict:why())
      if t.steps_done == 5 then
        assert.truthy(t.policy.name == "dynamic")
        t.swaps:swap("update_clip", { rolling_interval_length = 8 })
      end
      logged = t.policy:logs()
    end }
    assert.are.equal("update_clip", trainer.policy.name)
    assert.is_true(logged.threshold > 0)
  end)

  it("is refused where the run lacks what it needs, in one line", function()
    local function refused(options, ...)
      local message = helper.failure(train, options)
      for _, text in ipairs { ... } do assert.matches(text, message, 1, true) end
    end
    refused({ policy = "update_clip", mode = "lagged" }, "policy update_clip needs update_norm, " ..
      "which this run lacks: with mode=lagged, the update comes before the policy's decision; " ..
      "hint: mode=sync")
    refused({ policy = "adagc", mode = "lagged" }, "policy adagc needs clips, which this run " ..
      "lacks: with mode=lagged")
    refused({ policy = "spam", kind = "sgd" }, "policy spam needs spike_clip, which this run " ..
      "lacks: only the optimizers " .. fused_state.names("and", M_ffi.C.ENG_SPIKE_CLIP) ..
      " have this, and the optimizer is sgd")
    refused({ policy = "update_clip", kind = "lamb" }, "optimizer lamb is written in Lua; hint")
    refused({ policy = "dynamic", shadow = "update_clip", mode = "lagged" },
      "policy update_clip needs update_norm, which this run lacks: with mode=lagged")
    for _, name in ipairs { "adagc", "update_clip", "spam", "qk_clip" } do
      helper.refuses("a scaler of an explicit loop does not have",
        engine.scaler, { policy = name })
    end
  end)
end)

describe("policy qk_clip", function()
  -- Trains one attention layer on one batch; returns the signal logit_max of each head, the weights
  -- before and after, the model and the batch.
  local function attend(options)
    engine.seed(3)
    local model = engine.nn.sequential(engine.nn.attention(16, 4, { kv_heads = options.kv_heads,
      rope = options.rope, dropout = options.dropout, std = 1 }))
    local x = engine.randn(2, 6, 16)
    local before = model[1].qkv.weight:detach():totable()
    local seen
    engine.trainer { model = model, optimizer = engine.optim.sgd(model, { lr = 0 }), log = "quiet",
      data = { next = function() return { x = x } end }, steps = options.steps or 1,
      accumulate = options.accumulate, precision = options.precision,
      policy = "qk_clip", policy_options = { threshold = options.threshold, loss_scale = 1 },
      loss = function(m, b) return m(b.x):to("f32"):mean() end,
      on_step = function(_, _, verdict)
        assert.are.equal(0, verdict.failed, verdict:why())
        seen = {}
        for h = 1, 4 do seen[h] = published["logit_max.1." .. h] end
      end }:run()
    return seen, before, model[1].qkv.weight:detach():totable(), model, x
  end

  -- The largest logit of each head, in double, from the module's own projection.
  local function logits_of(model, x, rope)
    local attn, most = model[1], {}
    local H, G, D = attn.heads, attn.kv_heads, attn.head_width
    local qkv = attn.qkv(x):detach()
    local q, k = qkv:split({ H * D, G * D, G * D }, -1)
    q, k = q:view(2, 6, H, D), k:view(2, 6, G, D)
    if rope then q, k = q:rope { base = rope }, k:rope { base = rope } end
    q, k = q:totable(), k:totable()
    for h = 1, H do
      most[h] = -inf
      for b = 1, 2 do
        for t = 1, 6 do
          for s = 1, t do
            local dot, key = 0, k[b][s][math.floor((h - 1) * G / H) + 1]
            for d = 1, D do dot = dot + q[b][t][h][d] * key[d] end
            most[h] = math.max(most[h], dot / math.sqrt(D))
          end
        end
      end
    end
    return most
  end

  local CASES = { plain = {}, ["shared keys"] = { kv_heads = 2 }, rope = { rope = 10000 },
    accumulated = { accumulate = 2 } }
  for name, case in pairs(CASES) do
    it("measures each head and caps its logits at the threshold: " .. name, function()
      local free, _, _, model, x = attend { threshold = 1e9, kv_heads = case.kv_heads,
        rope = case.rope, accumulate = case.accumulate }
      local want = logits_of(model, x, case.rope)
      for h = 1, 4 do assert.near(want[h], free[h], 1e-4 * math.abs(want[h])) end
      local threshold = (math.min(unpack(want)) + math.max(unpack(want))) / 2
      local _, before, after, clipped = attend { threshold = threshold, kv_heads = case.kv_heads,
        rope = case.rope, accumulate = case.accumulate }
      local now, some = logits_of(clipped, x, case.rope), false
      for h = 1, 4 do
        assert.near(math.min(want[h], threshold), now[h], 1e-4 * threshold)
        some = some or want[h] > threshold
        if not case.kv_heads then                            -- the original's rule
          local root = math.sqrt(math.min(threshold / free[h], 1))
          for row = 4 * h - 3, 4 * h do
            for c = 1, 16 do
              assert.near(before[row][c] * root, after[row][c], 1e-6)
              assert.near(before[16 + row][c] * root, after[16 + row][c], 1e-6)
              assert.are.equal(before[32 + row][c], after[32 + row][c])
            end
          end
        end
      end
      assert.is_true(some)
    end)
  end

  it("works in fp16 and with dropout of the attention weights", function()
    for _, case in ipairs { { precision = "fp16" }, { dropout = 0.1 } } do
      case.threshold, case.steps = 1, 3
      local seen = attend(case)
      for h = 1, 4 do assert.is_true(seen[h] > 0 and seen[h] < 1.2, seen[h]) end
    end
  end)

  it("is refused without attention", function()
    helper.refuses("policy qk_clip needs logit_max, which this run lacks: the model has no " ..
      "nn.attention",
      train, { policy = "qk_clip" })
  end)

  it("is refused where factors on the weights would not scale the logits", function()
    local function refused(model, part)
      helper.refuses("policy qk_clip needs logit_muls, which this run lacks: attention" .. part,
        engine.trainer, { model = model, steps = 1, policy = "qk_clip",
        data = { next = function() end }, optimizer = engine.optim.sgd(model), log = "quiet",
        loss = function() end })
    end
    refused(engine.nn.attention(16, 4, { qk_norm = 1e-6 }),
      " normalizes queries and keys (qk_norm)")
    for _, dora in ipairs { false, true } do
      local model = engine.nn.attention(16, 4)
      engine.nn.lora(model, { rank = 2, dora = dora })
      refused(model, ".qkv has an adapter")
    end
  end)
end)
