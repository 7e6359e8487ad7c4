-- Fine-tunes a GPT-2 (or a Llama, a Qwen) from Hugging Face's files, or trains a GPT-2 from
-- scratch, on a file of tokens: .npy from `engine data tokenize`, or .bin from nanoGPT and llm.c.
-- save= writes the model in Hugging Face's format, which transformers can load.
--
--   ./engine examples/gpt2.lua model=gpt2 data=train.bin steps=100 batch=4 context=64 save=tuned
--   ./engine examples/gpt2.lua model=gpt2 data=train.bin precision=bf16 accumulate=8 run=tune
--   ./engine examples/gpt2.lua data=train.bin layers=6 width=384 heads=6 precision=fp16
--   ./engine examples/gpt2.lua model=gpt2 data=train.bin shuffle=false seed=1 log=json
--
-- The last command reads the same windows as llm.c's loader. Weight decay acts on matrices and
-- embeddings only. The output head is the token embedding, as in GPT-2.
local engine = require "engine"

local cfg = engine.config({
  model = "", data = "", layers = 12, width = 768, heads = 12, vocab = 50257, dropout = 0.0,
  steps = 100, batch = 4, context = 64, accumulate = 1, shuffle = true, seed = 1,
  lr = 3e-4, schedule = "constant", warmup = 0, floor = 0.0, beta1 = 0.9, beta2 = 0.999,
  eps = 1e-8, weight_decay = 0.0, clip = 1.0, precision = "fp32", policy = "", threads = 0,
  run = "", resume = "", checkpoint_every = 0, keep = 3, save = "", log = "line",
  tensorboard = false,
}, {
  model = "folder with config.json and model.safetensors; empty: from scratch",
  data = "a file of tokens, .npy or .bin", layers = "from scratch: blocks",
  width = "from scratch: features per token",
  heads = "from scratch: attention heads", vocab = "from scratch: tokens in the vocabulary",
  dropout = "dropout in embeddings, attention and residuals",
  steps = "training steps", batch = "rows of a batch", context = "tokens per row",
  accumulate = "micro-batches per step",
  shuffle = "false: consecutive windows, row b of step i from token (i*batch + b)*context",
  seed = "seed for weights, dropout and the order of the data",
  lr = "peak learning rate", beta1 = "Adam's beta1", beta2 = "Adam's beta2", eps = "Adam's eps",
  schedule = { "learning rate after the warm-up", choices = { "constant", "linear", "cosine" } },
  warmup = "updates until the peak learning rate",
  floor = "last learning rate, for schedule=linear and schedule=cosine",
  weight_decay = "decay of matrices and embeddings",
  clip = "largest norm of the gradient; 0: no limit",
  precision = { "precision recipe", choices = engine.precision.names() },
  policy = "loss-scaling policy, a name or a file; empty: the precision's default",
  threads = "threads to use; 0: all",
  tensorboard = "event files for TensorBoard, in the run's directory",
  run = "name of the run, stored under runs/; empty: not stored",
  resume = "auto, or the path of a run or checkpoint",
  checkpoint_every = "steps between checkpoints; 0: at the end", keep = "checkpoints to keep",
  save = "folder to write the trained model to",
  log = { "what to show", choices = { "line", "json", "quiet" } },
}, {
  count = "layers width heads vocab steps batch context accumulate keep",
  natural = "seed warmup threads checkpoint_every", positive = "lr eps",
  not_negative = "weight_decay clip floor", share = "dropout beta1 beta2", policy = "policy",
  folder = "model save", file = "data",
})
if cfg.data == "" then
  engine.config.fail("data: expected a .npy or .bin file of tokens, got nothing; hint: `engine " ..
    "data tokenize TEXT --tokenizer FOLDER -o FILE.npy` makes one")
end

engine.seed(cfg.seed)
if cfg.threads > 0 then engine.threads(cfg.threads) end

-- ------------------------------------------------------------------ model and data

local model
if cfg.model ~= "" then
  model = engine.load_model(cfg.model, { dropout = cfg.dropout })
else
  model = engine.new_model { model_type = "gpt2", n_layer = cfg.layers, n_embd = cfg.width,
    n_head = cfg.heads, vocab_size = cfg.vocab, n_positions = math.max(1024, cfg.context),
    resid_pdrop = cfg.dropout, embd_pdrop = cfg.dropout, attn_pdrop = cfg.dropout }
end
local data = engine.data.tokens { path = cfg.data, batch = cfg.batch, context = cfg.context,
  shuffle = cfg.shuffle, seed = cfg.seed, vocab = model.config.vocab }

-- ------------------------------------------------------------------ training

local rate = { lr = cfg.lr, warmup = cfg.warmup }
if cfg.schedule ~= "constant" then rate.total, rate.floor = cfg.steps, cfg.floor end

local trainer = engine.trainer {
  model = model, data = data,
  optimizer = engine.optim.adamw(model, { lr = cfg.lr, beta1 = cfg.beta1, beta2 = cfg.beta2,
    eps = cfg.eps, weight_decay = cfg.weight_decay,
    decay = "matrices", precision = cfg.precision }),
  schedule = engine.schedule[cfg.schedule](rate),
  policy = cfg.policy ~= "" and cfg.policy or nil, steps = cfg.steps, clip = cfg.clip,
  accumulate = cfg.accumulate,
  run = cfg.run, resume = cfg.resume, checkpoint_every = cfg.checkpoint_every, keep = cfg.keep,
  log = cfg.log, tensorboard = cfg.tensorboard, config = cfg,
}
if cfg.log == "line" then
  print(("%s(%s), %d parameters, %s, policy %s, %s"):format(model._class, model:extra(),
    model:count(), cfg.precision, trainer.policy.name, trainer:resources()))
  print(data)
end

local summary = trainer:run()

-- ------------------------------------------------------------------ saving

if cfg.save ~= "" then
  model:save(cfg.save)
  if cfg.log == "line" then print("saved: " .. cfg.save) end
end
if cfg.log == "line" and #summary.rows > 1 then print("\n" .. engine.plot.run(summary.rows)) end
return summary
