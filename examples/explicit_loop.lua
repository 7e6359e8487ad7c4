-- The training loop written out, for readers who know PyTorch: a scaler like GradScaler, autocast,
-- unscaling before clipping, micro-batches. engine.trainer does the same
-- (lua/engine/train/trainer.lua).
--
--   ./engine examples/explicit_loop.lua
--   ./engine examples/explicit_loop.lua policy=policies/deepspeed.lua accumulate=2
local engine = require "engine"

local cfg = engine.config({ steps = 100, batch = 8, context = 64, width = 64, layers = 2,
  heads = 4, lr = 2e-3, clip = 1.0, accumulate = 1, precision = "fp16", policy = "dynamic",
  seed = 1 },
  { steps = "training steps", batch = "rows of a batch", context = "bytes per row",
    width = "features per byte", layers = "blocks", heads = "attention heads",
    lr = "peak learning rate", seed = "seed for weights and the order of the data",
    clip = "largest norm of the gradient", accumulate = "micro-batches per update",
    precision = { "precision recipe", choices = { "fp32", "bf16", "fp16" } },
    policy = "loss-scaling policy, a name or a file" },
  { count = "steps batch context width layers heads accumulate", natural = "seed",
    positive = "lr clip", policy = "policy" })
engine.seed(cfg.seed)

local root = (arg and arg[0] or ""):match("^(.*)examples/[^/]*$") or ""
local data = engine.data.text { path = root .. "core/engine.h", batch = cfg.batch,
  context = cfg.context, seed = cfg.seed }
local model = engine.nn.gpt { context = cfg.context, width = cfg.width, layers = cfg.layers,
  heads = cfg.heads }
local opt = engine.optim.adamw(model, { lr = cfg.lr, precision = cfg.precision })
local schedule = engine.schedule.cosine { lr = cfg.lr, total = cfg.steps,
  warmup = math.min(10, cfg.steps) }
local scaler = engine.scaler { policy = cfg.policy }

for step in engine.steps(cfg.steps) do
  opt:zero_grad()
  local loss
  for _ = 1, cfg.accumulate do
    local batch = data:next()
    loss = engine.autocast(cfg.precision, function() return model:loss(batch.x, batch.y) end)
    scaler:scale(loss / cfg.accumulate):backward()     -- gradients carry the loss scale
  end
  scaler:unscale(opt)                                  -- true gradients from here to step()
  local norm = opt:clip_grad_norm(cfg.clip)
  opt.lr = schedule(opt.updates)
  local result = scaler:step(opt)                      -- skips if a gradient is inf or nan
  scaler:update()                                      -- the policy moves the scale
  if step % 10 == 0 or result.skipped then
    print(("step %3d  loss %.4f  norm %.3f  scale %g%s"):format(step, loss:item(), norm,
      scaler:get_scale(), result.skipped and "  skipped: " .. result.reason or ""))
  end
end
