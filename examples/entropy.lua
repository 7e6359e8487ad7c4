-- A GPT that publishes the entropy of its attention, in fp16. The loss function reads the mean
-- entropy of all attention rows (in nats, computed along with the attention) and passes it to the
-- policy with engine.signal; policy=entropy raises the scale as the model becomes confident. Shows
-- how a script gives a policy information that gradients do not contain.
--
--   ./engine examples/entropy.lua
--   ./engine examples/entropy.lua policy=dynamic
--   ./engine examples/entropy.lua seeds=5                compares the policies
--
-- Measured with seeds=5. The scales of dynamic and entropy start at 2^13 and may grow after 50 good
-- steps.
--
--              steps skipped of 200   gradients that lost bits   loss
--   dynamic    0.4                    0.25 % +- 0.20 %           1.841 +- 0.050
--   entropy    0                      0.45 % +- 0.20 %           1.846 +- 0.046
--   max_value  2.4                    0.096 % +- 0.11 %          1.848 +- 0.059
--
-- policy=entropy does not beat dynamic here: the entropy stays above 2 nats, so the policy's factor
-- stays at its minimum, and the scale stays below what the gradients allow. max_value, which looks
-- at the gradients, loses the fewest bits.
local engine = require "engine"
local lab = require "engine.report.lab"

local cfg = engine.config({ policy = "entropy", seeds = 0, seed = 1, steps = 200, layers = 2,
  width = 48, heads = 4, context = 32, batch = 8, lr = 3e-3, data = "" },
  { policy = "loss-scaling policy", seeds = "compare policies over this many seeds; 0: train once",
    seed = "seed for weights and data", steps = "training steps",
    layers = "blocks", width = "features per byte", heads = "attention heads",
    context = "bytes per row", batch = "rows per step", lr = "peak learning rate",
    data = "a text file; empty: sentences of a small grammar" },
  { count = "steps layers width heads context batch", natural = "seeds seed", positive = "lr",
    policy = "policy", file = "data" })
if cfg.width % cfg.heads ~= 0 then
  engine.config.fail("width: expected a multiple of heads = %d, got %d", cfg.heads, cfg.width)
end

local function train(policy, seed, tell)
  engine.seed(seed)
  local model = engine.nn.gpt { vocab = 256, context = cfg.context, width = cfg.width,
    heads = cfg.heads, layers = cfg.layers }
  for _, block in ipairs(model.blocks) do block.attn.watch_entropy = true end
  local entropy, made, result = 0, 0, { loss = 0, lost = 0, log2_scale = 0 }
  local summary = engine.trainer {
    model = model, policy = policy, steps = cfg.steps, clip = 1, log = "quiet",
    data = engine.data.text { text = lab.corpus(cfg.data, 40000), batch = cfg.batch,
      context = cfg.context, seed = seed },
    optimizer = engine.optim.adamw(model, { lr = cfg.lr, decay = "matrices", precision = "fp16" }),
    schedule = engine.schedule.cosine { lr = cfg.lr, total = cfg.steps,
      warmup = math.min(20, cfg.steps) },
    loss = function(m, batch)
      local loss = m:loss(batch.x, batch.y)
      entropy = 0
      for _, block in ipairs(m.blocks) do
        entropy = entropy + block.attn.entropy:mean():item() / #m.blocks
      end
      engine.signal("attention_entropy", entropy)
      return loss
    end,
    on_step = function(t, record)
      local last = math.ceil(cfg.steps / 10)
      if t.steps_done > cfg.steps - last then result.loss = result.loss + record.loss / last end
      result.log2_scale = result.log2_scale + math.log(record.scale) / math.log(2) / cfg.steps
      if record.overflow == 0 then
        made, result.lost = made + 1,
          result.lost + tonumber(record.underflow) / math.max(1,
            tonumber(record.count - record.zeros))
      end
      if tell and (t.steps_done % math.ceil(cfg.steps / 12) == 0 or t.steps_done == cfg.steps) then
        print(("step %d  loss %.4f  entropy %.3f nats  scale %.6g"):format(t.steps_done,
          record.loss, entropy, record.scale))
      end
    end,
  }:run()
  result.lost, result.skipped = result.lost / math.max(1, made), summary.skipped
  return result
end

if cfg.seeds == 0 then
  local result = train(cfg.policy, cfg.seed, true)
  print(("%d steps skipped; %.2g %% of the gradients lost bits to underflow"):format(
    result.skipped, 100 * result.lost))
else
  -- The scales of dynamic and entropy begin at 2^13 and may grow after 50 good steps, so that the
  -- policies differ only in the use of the entropy.
  print(engine.contest { policies = { "dynamic:init_scale=2^13,growth_interval=50",
    "entropy:init_scale=2^13,growth_interval=50", "max_value" },
    also = cfg.policy, seeds = cfg.seeds, run = train })
end
