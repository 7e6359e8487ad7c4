-- BERT's masked-token pre-training on text: 15 % of the bytes are chosen. Of these, 80 % become the
-- mask token, 10 % become a random byte, and 10 % stay. The model predicts the chosen bytes from
-- the bytes on both sides. The loss counts only the chosen positions.
--
--   ./engine examples/bert_mlm.lua
--   ./engine examples/bert_mlm.lua data=book.txt steps=2000 width=256 heads=8 precision=fp16
local engine = require "engine"

local cfg = engine.config({
  data = "", steps = 300, batch = 16, context = 64, layers = 2, width = 128, heads = 4,
  dropout = 0.0, mask = 0.15,
  lr = 1e-3, warmup = 30, weight_decay = 0.01, clip = 1.0, precision = "fp16", policy = "",
  seed = 1, run = "", resume = "", log = "line", tensorboard = false,
}, {
  data = "a text file; empty: this project's own source", mask = "share of bytes to predict",
  steps = "training steps", batch = "rows of a batch", context = "bytes per row", layers = "blocks",
  width = "features per byte", heads = "attention heads",
  dropout = "dropout in embeddings and residuals", lr = "peak learning rate",
  warmup = "updates until the peak learning rate", weight_decay = "decay of matrices",
  clip = "largest norm of the gradient; 0: no limit",
  policy = "loss-scaling policy, a name or a file; empty: the precision's default",
  seed = "seed for weights, dropout, masks and the order of the data",
  tensorboard = "event files for TensorBoard, in the run's directory",
  run = "name of the run, stored under runs/; empty: not stored",
  resume = "auto, or the path of a run or checkpoint",
  precision = { "precision recipe", choices = { "fp32", "bf16", "bf16_stochastic", "bf16_kahan",
    "fp16" } },
  log = { "what to show", choices = { "line", "json", "quiet" } },
}, {
  count = "steps batch context layers width heads", natural = "seed warmup", positive = "lr",
  not_negative = "weight_decay clip", share = "dropout",
  part = "mask", policy = "policy", file = "data",
})
engine.seed(cfg.seed)

local text = cfg.data
if text == "" then
  local root = (arg and arg[0] or ""):match("^(.*)examples/[^/]*$") or ""
  text = { root .. "core/engine.h", root .. "core/autograd/infer.c",
    root .. "core/autograd/tape.c", root .. "core/autograd/op.c", root .. "core/tensor/tensor.c" }
end

-- ------------------------------------------------------------------ masking

local MASK, IGNORE = 256, -100      -- bytes are 0..255
local windows = engine.data.text { path = text, batch = cfg.batch, context = cfg.context,
  seed = cfg.seed }

-- The batches of `windows`, masked. The engine's random generator chooses the positions, so a
-- resumed or retried step masks the same positions.
local masked = {}
function masked.next()
  local batch = windows:next()
  local chosen = engine.rand(cfg.batch, cfg.context):lt(cfg.mask)
  local fate = engine.rand(cfg.batch, cfg.context)
  local other = engine.randint(0, 256, cfg.batch, cfg.context, "i32")
  local gap = fate:lt(0.8):where(MASK, fate:lt(0.9):where(other, batch.x):to("i64")):to("i32")
  return { x = chosen:where(gap, batch.x), y = chosen:where(batch.x, IGNORE),
    tokens = batch.tokens }
end
function masked.state() return windows:state() end
function masked.restore(_, state) windows:restore(state) end

-- ------------------------------------------------------------------ model and training

local model = engine.nn.bert { vocab = 257, context = cfg.context, width = cfg.width,
  heads = cfg.heads, layers = cfg.layers, dropout = cfg.dropout }

local trainer = engine.trainer {
  model = model, data = masked,
  optimizer = engine.optim.adamw(model, { lr = cfg.lr, weight_decay = cfg.weight_decay,
    decay = "matrices", precision = cfg.precision }),
  schedule = engine.schedule.linear { lr = cfg.lr, total = cfg.steps,
    warmup = math.min(cfg.warmup, cfg.steps) },
  policy = cfg.policy ~= "" and cfg.policy or nil, steps = cfg.steps, clip = cfg.clip,
  run = cfg.run, resume = cfg.resume, log = cfg.log, tensorboard = cfg.tensorboard, config = cfg,
}
if cfg.log == "line" then print(model) end
return trainer:run()
