-- A small GPT over bytes, in fp16 with dynamic loss scaling. Without data= it learns this project's
-- own source. The live line shows the loss, the loss scale and the skipped steps. At the end the
-- script prints a generated sample and plots the run.
--
--   ./engine examples/gpt.lua
--   ./engine examples/gpt.lua data=book.txt steps=2000 layers=6 width=384 heads=6 context=256
--   ./engine examples/gpt.lua precision=bf16 run=gpt checkpoint_every=200 resume=auto
--   ./engine examples/gpt.lua policy=policies/deepspeed.lua
--   ./engine contest examples/gpt.lua --policy dynamic --policy max_value evaluate_every=300
local engine = require "engine"

local cfg = engine.config({
  data = "", steps = 300, batch = 16, context = 64, layers = 4, width = 128, heads = 4,
  dropout = 0.0, lr = 2e-3, warmup = 20, floor = 0.1, weight_decay = 0.1, clip = 1.0,
  accumulate = 1, precision = "fp16", policy = "", shadow = "", trap = "", seed = 1, threads = 0,
  run = "", resume = "", checkpoint_every = 0, keep = 3, evaluate_every = 0, log = "line",
  tensorboard = false, mode = "sync", graph = false, sample = 200, temperature = 0.8, top_k = 40,
  zero = 0, comm_dtype = "own", wire = "", bucket = 2, agree_every = 1000,
}, {
  data = "a text file; empty: this project's own source", steps = "training steps",
  batch = "rows of a batch", context = "bytes per row",
  layers = "blocks", width = "features per byte", heads = "attention heads",
  dropout = "dropout in embeddings and residuals",
  lr = "peak learning rate", weight_decay = "decay of matrices",
  seed = "seed for weights, dropout, data order and sampling",
  warmup = "updates until the peak learning rate", floor = "last learning rate as a share of lr",
  clip = "largest norm of the gradient; 0: no limit", accumulate = "micro-batches per step",
  precision = { "precision recipe", choices = engine.precision.names() },
  policy = "loss-scaling policy, a name or a file; empty: the precision's default",
  threads = "threads to use; 0: all",
  mode = { "sync: the policy decides before the update; lagged: one step later, so that a card "
    .. "need not wait for it", choices = { "sync", "lagged" } },
  graph = "on a card: launch the forward and backward pass as one graph",
  shadow = "policies to run as shadows, separated by commas",
  trap = "overflow: name the operation in which an overflow began",
  tensorboard = "event files for TensorBoard, in the run's directory",
  run = "name of the run, stored under runs/; empty: not stored",
  resume = "auto, or the path of a run or checkpoint",
  checkpoint_every = "steps between checkpoints; 0: at the end", keep = "checkpoints to keep",
  evaluate_every = "steps between evaluations on held-out text; 0: no evaluation",
  log = { "what to show", choices = { "line", "json", "quiet" } },
  sample = "bytes of text to generate at the end; 0: none",
  top_k = "sample from the k most likely bytes; 0: from all",
  temperature = "temperature of the sample; 0: always the most likely byte",
  zero = "ZeRO: what the ranks divide; 1: optimizer's state, 2: also gradients, 3: also weights",
  comm_dtype = { "several ranks: the format in which gradients are sent",
    choices = { "own", "fp32", "bf16", "fp16", "fp8" } },
  wire = { "comm_dtype's name in version 0.1", hidden = true,
    choices = { "", "own", "fp32", "bf16", "fp16", "fp8" } },
  bucket = "several ranks: MiB of gradients in one message",
  agree_every = "several ranks: steps between comparisons of their weights; 0: never",
}, {
  count = "steps batch context layers width heads accumulate keep",
  natural = "seed warmup threads checkpoint_every evaluate_every sample top_k zero agree_every",
  positive = "lr bucket",
  not_negative = "weight_decay clip temperature", share = "dropout floor", policy = "policy",
  file = "data",
})

engine.seed(cfg.seed)
if cfg.threads > 0 then engine.threads(cfg.threads) end

-- ------------------------------------------------------------------ text

local text = cfg.data
if text == "" then
  local root = (arg and arg[0] or ""):match("^(.*)examples/[^/]*$") or ""
  text = {}
  for i, name in ipairs { "autograd/op", "autograd/tape", "tensor/tensor", "autograd/infer",
    "autograd/grad_nn", "autograd/grad_shape", "autograd/grad_elementwise", "tensor/arena",
    "autograd/tensor_calls", "autograd/view", "store/safetensors", "params/params" } do
    text[i] = root .. "core/" .. name .. ".c"
  end
end
local data = engine.data.text { path = text, batch = cfg.batch, context = cfg.context,
  seed = cfg.seed, to = 0.95 }
local held_out = engine.data.text { path = text, batch = cfg.batch, context = cfg.context,
  from = 0.95, shuffle = false }

-- ------------------------------------------------------------------ model and training

local model = engine.nn.gpt { vocab = 256, context = cfg.context, width = cfg.width,
  heads = cfg.heads, layers = cfg.layers, dropout = cfg.dropout }
local trainer = engine.trainer {
  model = model, data = data,
  optimizer = engine.optim.adamw(model, { lr = cfg.lr, beta2 = 0.95,
    weight_decay = cfg.weight_decay, decay = "matrices", precision = cfg.precision }),
  schedule = engine.schedule.cosine { lr = cfg.lr, total = cfg.steps,
    warmup = math.min(cfg.warmup, cfg.steps), floor = cfg.lr * cfg.floor },
  policy = cfg.policy ~= "" and cfg.policy or nil, steps = cfg.steps, clip = cfg.clip,
  accumulate = cfg.accumulate,
  run = cfg.run, resume = cfg.resume, checkpoint_every = cfg.checkpoint_every, keep = cfg.keep,
  log = cfg.log, tensorboard = cfg.tensorboard, config = cfg,
  evaluate = cfg.evaluate_every > 0
    and { data = held_out, every = cfg.evaluate_every, batches = 8 } or nil,
  mode = cfg.mode, graph = cfg.graph or nil, zero = cfg.zero, bucket = cfg.bucket,
  comm_dtype = cfg.wire == "" and cfg.comm_dtype or nil, wire = cfg.wire ~= "" and cfg.wire or nil,
  shadow = cfg.shadow, trap = cfg.trap, agree_every = cfg.agree_every,
}
if cfg.log == "line" then
  print(("%s, %d parameters, %s, policy %s, %s"):format(model._class .. "(" .. model:extra()
    .. ")", model:count(), cfg.precision, trainer.policy.name, trainer:resources()))
  print(data)
end

local summary = trainer:run()

-- ------------------------------------------------------------------ results

if cfg.log == "line" then
  print(("loss on held-out text: %.4f"):format(trainer:evaluate_on(held_out, 8)))
  if #summary.rows > 1 then print("\n" .. engine.plot.run(summary.rows)) end
  if cfg.sample > 0 then
    local prompt = "static eng_status "
    local ids = engine.autocast(cfg.precision, model.generate, model, { prompt:byte(1, -1) },
      cfg.sample, { temperature = cfg.temperature, top_k = cfg.top_k > 0 and cfg.top_k or nil })
    for i, id in ipairs(ids) do ids[i] = string.char(id) end
    print("\na sample:\n" .. table.concat(ids):gsub("[^\n\t -~]", "?"))
  end
end
return summary
