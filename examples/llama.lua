-- A Llama-style decoder on text: rotary positions, RMS norm, SwiGLU, grouped queries (8 query heads
-- share 2 key and value heads), untied head, in bf16. The trainer is that of gpt.lua with fewer
-- options and another schedule (wsd).
--
--   ./engine examples/llama.lua
--   ./engine examples/llama.lua data=book.txt steps=1000 width=384 heads=6 kv_heads=2 hidden=1024
local engine = require "engine"

local cfg = engine.config({
  data = "", steps = 200, batch = 8, context = 64, layers = 4, width = 128, heads = 8,
  kv_heads = 2, hidden = 352, rope = 10000,
  lr = 1e-3, warmup = 20, weight_decay = 0.1, clip = 1.0, precision = "bf16", policy = "",
  seed = 1, run = "", resume = "", log = "line", tensorboard = false, sample = 160,
}, {
  data = "a text file; empty: this project's own source",
  kv_heads = "heads of keys and values, shared by the query heads",
  steps = "training steps", batch = "rows of a batch", context = "bytes per row", layers = "blocks",
  width = "features per byte", heads = "attention heads",
  hidden = "hidden features of SwiGLU", lr = "peak learning rate",
  warmup = "updates until the peak learning rate", weight_decay = "decay of matrices",
  clip = "largest norm of the gradient; 0: no limit",
  sample = "bytes of text to generate at the end; 0: none",
  policy = "loss-scaling policy, a name or a file; empty: the precision's default",
  seed = "seed for weights, data order and sampling",
  tensorboard = "event files for TensorBoard, in the run's directory",
  run = "name of the run, stored under runs/; empty: not stored",
  resume = "auto, or the path of a run or checkpoint",
  rope = "base of the rotary angles",
  precision = { "precision recipe", choices = { "fp32", "bf16", "bf16_stochastic", "bf16_kahan",
    "fp16" } },
  log = { "what to show", choices = { "line", "json", "quiet" } },
}, {
  count = "steps batch context layers width heads kv_heads hidden", natural = "seed warmup sample",
  positive = "lr rope", not_negative = "weight_decay clip", policy = "policy", file = "data",
})
engine.seed(cfg.seed)

local text = cfg.data
if text == "" then
  local root = (arg and arg[0] or ""):match("^(.*)examples/[^/]*$") or ""
  text = { root .. "lua/engine/tensor/tensor.lua", root .. "lua/engine/train/trainer.lua",
    root .. "lua/engine/nn/transformer.lua", root .. "lua/engine/data/init.lua",
    root .. "lua/engine/train/optim.lua", root .. "lua/engine/run/run.lua" }
end

local model = engine.nn.llama { vocab = 256, context = cfg.context, width = cfg.width,
  heads = cfg.heads, kv_heads = cfg.kv_heads, layers = cfg.layers,
  hidden = cfg.hidden, rope = cfg.rope }

local trainer = engine.trainer {
  model = model, data = engine.data.text { path = text, batch = cfg.batch, context = cfg.context,
    seed = cfg.seed },
  optimizer = engine.optim.adamw(model, { lr = cfg.lr, beta2 = 0.95,
    weight_decay = cfg.weight_decay, decay = "matrices", precision = cfg.precision }),
  schedule = engine.schedule.wsd { lr = cfg.lr, total = cfg.steps,
    warmup = math.min(cfg.warmup, cfg.steps), decay = math.floor(cfg.steps / 5),
    floor = cfg.lr / 20 },
  policy = cfg.policy ~= "" and cfg.policy or nil, steps = cfg.steps, clip = cfg.clip,
  run = cfg.run, resume = cfg.resume, log = cfg.log, tensorboard = cfg.tensorboard, config = cfg,
}
if cfg.log == "line" then print(model) end
local summary = trainer:run()

if cfg.log == "line" and cfg.sample > 0 then
  local ids = engine.autocast(cfg.precision, model.generate, model,
    { ("local function "):byte(1, -1) }, cfg.sample, { temperature = 0.8, top_k = 40 })
  for i, id in ipairs(ids) do ids[i] = string.char(id) end
  print("\na sample:\n" .. table.concat(ids):gsub("[^\n\t -~]", "?"))
end
return summary
