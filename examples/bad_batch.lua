-- Trains on poisoned batches: in every 25th batch, features are a thousand times too large and
-- labels are wrong, as after a broken shard or a flipped bit. A scaler that reacts only to overflow
-- halves the scale at each poisoned batch that overflows. It applies the poisoned batches that do
-- not overflow, and these damage the weights. A policy can also read the gradient norm and skip the
-- batch, as SPIKES below does in about twenty lines.
--
--   ./engine examples/bad_batch.lua
--   ./engine examples/bad_batch.lua policy=dynamic
--   ./engine examples/bad_batch.lua seeds=5                  compares the policies
--   ./engine examples/bad_batch.lua seeds=5 policy=./mine.lua       ... and yours
--
-- Measured with seeds=5, 300 steps, 12 of them poisoned. The loss is that of the clean batches in
-- the second half:
--                                 loss                   steps skipped   last scale
--   dynamic                       0.0047 +- 0.0088       10.8            2^5
--   dynamic, trainer's clip=1     0.00092 +- 0.00023     10.8            2^5
--   guarded                       0.00084 +- 0.00009     12              2^12
--   spikes                        0.00084 +- 0.00009     12              2^16
-- dynamic lets one or two poisoned batches reach the weights and halves its scale at each of the
-- other poisoned batches.
local engine = require "engine"
local lab = require "engine.report.lab"
local nn = engine.nn

local cfg = engine.config({ policy = "spikes", seeds = 0, seed = 1, steps = 300, every = 25,
  poison = 1000, batch = 64, hidden = 64, lr = 3e-3, run = "" },
  { policy = "loss-scaling policy; spikes: SPIKES in this file",
    seeds = "compare policies over this many seeds; 0: train once",
    seed = "seed for weights and data",
    steps = "training steps", every = "steps between poisoned batches",
    poison = "factor on the features of a poisoned batch", batch = "rows per step",
    hidden = "hidden features", lr = "learning rate",
    run = "name of the run, stored under runs/; empty: not stored" },
  { count = "steps every batch hidden", natural = "seeds seed", positive = "lr",
    not_negative = "poison", policy = "policy" })

local SPIKES = { file = "spikes", source = [[
return {
  name = "spikes",
  doc  = "A dynamic scale that skips steps whose gradient norm is far above the usual one.",
  needs = { "norm" },
  options = { init_scale = 2^16, times = 8, growth_interval = 200 },
  init = function(options) return { scale = options.init_scale, good = 0, usual = 0 } end,
  decide = function(state, record, options)
    if record.overflow then
      -- An overflow after five or more good steps is blamed on the batch: the scale stays.
      if state.good < 5 then state.scale = state.scale / 2 end
      state.good = 0
      return { scale = state.scale, reason = "overflow" }
    end
    if state.usual > 0 and record.norm > options.times * state.usual then
      return { scale = state.scale, action = "skip",
        reason = ("the norm is %.0f times the usual"):format(record.norm / state.usual) }
    end
    state.usual = state.usual > 0 and 0.95 * state.usual + 0.05 * record.norm or record.norm
    state.good = state.good + 1
    if state.good % options.growth_interval == 0 then state.scale = state.scale * 2 end
    return state.scale
  end,
}]] }

-- Returns a loader of points on two rings in the first two of eight dimensions. Every `every`-th
-- batch is poisoned.
local function rows(seed, every)
  return lab.loader(function(number)
    math.randomseed(seed * 100003 + number)
    local bad = number % every == 0
    local x, y = {}, {}
    for i = 1, cfg.batch do
      local class, angle, row = math.random(0, 1), 2 * math.pi * math.random(), {}
      local radius = 1 + class + 0.3 * (math.random() - 0.5)
      row[1], row[2] = radius * math.cos(angle), radius * math.sin(angle)
      for k = 3, 8 do row[k] = math.random() - 0.5 end
      if bad then
        class = 1 - class
        for k = 1, 8 do row[k] = row[k] * cfg.poison end
      end
      x[i], y[i] = row, class
    end
    return { x = engine.tensor(x, { keep = false }),
      y = engine.tensor(y, { dtype = "i64", keep = false }), bad = bad, tokens = cfg.batch }
  end)
end

local function train(policy, seed, tell)
  engine.seed(seed)
  local net = nn.sequential { nn.linear(8, cfg.hidden), nn.relu(),
    nn.linear(cfg.hidden, cfg.hidden), nn.relu(), nn.linear(cfg.hidden, 2) }
  local clip = policy == "dynamic, clip 1" and 1 or nil
  local bad, sum, count = false, 0, 0
  local late, clean = 0, 0      -- second half of the run: sum of losses, number of clean batches
  local summary = engine.trainer {
    model = net, policy = clip and "dynamic" or policy == "spikes" and SPIKES or policy,
    steps = cfg.steps, clip = clip, log = "quiet",
    run = tell and cfg.run or nil, config = cfg, data = rows(seed, cfg.every),
    evaluate = { data = rows(seed + 500, math.huge), every = cfg.steps },
    optimizer = engine.optim.adam(net, { lr = cfg.lr, precision = "fp16" }),
    loss = function(model, batch)
      bad = batch.bad
      return engine.cross_entropy(model(batch.x), batch.y)
    end,
    on_step = function(t, record)
      if not bad then sum, count = sum + record.loss, count + 1 end
      if not bad and t.steps_done > cfg.steps / 2 then
        late, clean = late + record.loss, clean + 1
      end
      if tell and (t.steps_done % math.ceil(cfg.steps / 12) == 0 or t.steps_done == cfg.steps) then
        print(("step %d  loss %.4f  scale %.6g  skipped %d"):format(t.steps_done,
          sum / math.max(1, count), record.scale, t.skipped))
        sum, count = 0, 0
      end
    end,
  }:run()
  return { loss = clean > 0 and late / clean or 0 / 0, skipped = summary.skipped,
    path = summary.path, log2_scale = math.log(summary.scale) / math.log(2) }
end

if cfg.seeds == 0 then
  local result = train(cfg.policy, cfg.seed, true)
  print(("loss on the clean batches of the second half: %.4f; %d steps skipped"):format(
    result.loss, result.skipped))
  if result.path then print("run: " .. result.path) end
else
  print(engine.contest { policies = { "dynamic", "dynamic, clip 1", "guarded", "spikes" },
    also = cfg.policy, seeds = cfg.seeds, run = train })
end
