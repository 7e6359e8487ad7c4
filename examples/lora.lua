-- Trains low-rank adapters on a frozen low-precision base. A small GPT learns one text in f32. Then
-- nn.lora freezes it, stores the matrices of its blocks in bf16, f16 or fp8 (e4m3), and gives each
-- matrix an adapter that learns another text in fp16. Few parameters train, and their gradients are
-- tiny at first. policy=fast_backoff (the QLoRA recipe) backs off strongly at an overflow and
-- recovers slowly.
--
--   ./engine examples/lora.lua
--   ./engine examples/lora.lua base=e4m3 rank=8 dora=true policy=dynamic
--   ./engine examples/lora.lua seeds=5                   compares the policies
--
-- Measured with seeds=5, all from a scale of 2^24. dynamic skips 7.2 of 200 steps (loss 1.74 +-
-- 0.10), fast_backoff 4 (loss 1.754 +- 0.095), max_value 5.8 (loss 1.741 +- 0.096). The losses are
-- equal within their spread; fast_backoff skips the fewest steps.
local engine = require "engine"
local lab = require "engine.report.lab"
local nn = engine.nn

local cfg = engine.config({ policy = "fast_backoff", seeds = 0, seed = 1, steps = 200,
  pretrain = 150, base = "bf16", rank = 4, alpha = 8, dora = false, width = 48,
  layers = 2, context = 32, batch = 8, lr = 5e-3, run = "" },
  { policy = "loss-scaling policy", seeds = "compare policies over this many seeds; 0: train once",
    seed = "seed for weights and data", steps = "fine-tuning steps",
    pretrain = "steps on the first text", rank = "rank of the adapters",
    base = { "format of the frozen matrices", choices = { "bf16", "f16", "f32", "e4m3" } },
    alpha = "adapters are scaled by alpha / rank", dora = "train a magnitude for each output too",
    width = "features per byte", layers = "blocks",
    context = "bytes per row", batch = "rows per step",
    lr = "learning rate of the adapters", run = "name of the run; empty: not stored" },
  { count = "steps pretrain rank width layers context batch", natural = "seeds seed",
    positive = "lr", not_negative = "alpha", policy = "policy" })
if cfg.width % 4 ~= 0 then
  engine.config.fail("width: expected a multiple of the 4 heads, got %d", cfg.width)
end

-- Texts from one grammar: the first is for pretraining. The second and the held-out text, with
-- reversed words, are for the adapters.
local FIRST = lab.text(40000, 1)
local SECOND = lab.text(40000, 2):gsub("%a+", string.reverse)
local HELD_OUT = lab.text(8000, 3):gsub("%a+", string.reverse)
local function text(which, seed)
  return engine.data.text { text = which, batch = cfg.batch, context = cfg.context, seed = seed }
end

-- Returns a GPT trained on the first text, with adapters for its block matrices and all else
-- frozen.
local function adapted(seed)
  engine.seed(seed)
  local model = nn.gpt { vocab = 256, context = cfg.context, width = cfg.width, heads = 4,
    layers = cfg.layers }
  engine.trainer { model = model, data = text(FIRST, seed),
    optimizer = engine.optim.adamw(model, { lr = 3e-3 }), clip = 1,
    steps = cfg.pretrain, log = "quiet" }:run()
  return nn.lora(model, { match = "^blocks", rank = cfg.rank, alpha = cfg.alpha, base = cfg.base,
    dora = cfg.dora })
end

local function train(policy, seed, tell)
  local model, made, result = adapted(seed), 0, { loss = 0, lost = 0, skipped = 0 }
  local sum, shown = 0, 0
  local optimizer, trained = engine.optim.adamw(model, { lr = cfg.lr, precision = "fp16" }), 0
  for _, p in ipairs(optimizer.list) do trained = trained + p.tensor.count end
  if tell then
    print(("%d of %d parameters train; blocks.1.mlp.up: %s"):format(trained, model:count(),
      model.blocks[1].mlp.up:extra()))
  end
  local summary = engine.trainer {
    model = model, policy = policy, steps = cfg.steps, clip = 1, log = "quiet",
    data = text(SECOND, seed), optimizer = optimizer, config = cfg,
    run = cfg.seeds == 0 and cfg.run or nil, loss = engine.losses.sft,
    evaluate = { data = text(HELD_OUT, seed), every = cfg.steps },
    on_step = function(t, record)
      local last = math.ceil(cfg.steps / 10)
      if t.steps_done > cfg.steps - last then result.loss = result.loss + record.loss / last end
      if record.overflow == 0 then
        made, result.lost = made + 1, result.lost + tonumber(record.underflow) / math.max(1,
          tonumber(record.count - record.zeros))
      end
      sum = sum + record.loss
      if tell and (t.steps_done % math.ceil(cfg.steps / 12) == 0 or t.steps_done == cfg.steps) then
        print(("step %d  loss %.4f  norm %.3g  scale %.6g"):format(t.steps_done,
          sum / (t.steps_done - shown), record.norm, record.scale))
        sum, shown = 0, t.steps_done
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
  print(engine.contest { policies = { "dynamic:init_scale=2^24", "fast_backoff:init_scale=2^24",
    "max_value:init_scale=2^24" }, also = cfg.policy, seeds = cfg.seeds, run = train })
end
