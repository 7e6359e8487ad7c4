-- Fine-tunes a Hugging Face model with adapters, on conversations (method=sft) or on preferences
-- (method=dpo). The model and its tokenizer come from a folder, the data from a file of JSON lines.
-- Writes the adapters in PEFT's format, and the model with merged adapters in transformers' format.
-- A second call can continue from the adapters of the first.
--
--   ./engine examples/finetune.lua model=FOLDER data=chats.jsonl out=tuned
--   ./engine examples/finetune.lua model=FOLDER data=pairs.jsonl method=dpo from=tuned out=better
--   ./engine generate better/merged --prompt "..."
--
-- chats.jsonl: {"messages":[{"role":"user","content":".."},{"role":"assistant","content":".."}]}
-- pairs.jsonl: {"prompt":"..","chosen":"..","rejected":".."}
--
-- The folder's chat template turns conversations into text. If there is none, ChatML is used.
-- Prompts and answers of preferences are used unchanged.
local engine = require "engine"
local files = require "engine.base.file"

local cfg = engine.config({ model = "", data = "", method = "sft", from = "", out = "finetuned",
  match = { "attn", "mlp" }, rank = 8, alpha = 16, steps = 200, batch = 8, context = 256, lr = 1e-3,
  beta = 0.1, precision = "bf16", policy = "dynamic", checkpoint = "", seed = 1, run = "",
  log = "line" },
  { model = "folder of a Hugging Face model with its tokenizer", data = "file of JSON lines",
    method = { "learn from conversations (sft) or preferences (dpo)",
      choices = { "sft", "dpo" } },
    from = "adapters to continue: an earlier `out`, or a folder of PEFT; empty: new adapters",
    out = "output folder, which gets the folders `adapter` and `merged`",
    match = "patterns for the names of the layers that get adapters",
    rank = "rank of the adapters", alpha = "adapters are scaled by alpha / rank",
    steps = "training steps", batch = "conversations or pairs per step",
    context = "tokens per row", lr = "learning rate of the adapters",
    beta = "dpo: factor on the margins; larger: stays nearer to the reference",
    precision = "precision recipe",
    policy = "loss-scaling policy", checkpoint = "block: recompute blocks to save memory",
    seed = "seed for adapters and data", run = "name of the run; empty: not stored",
    log = { "what to show", choices = { "line", "json", "quiet" } } },
  { count = "rank steps batch context", positive = "lr beta", natural = "seed",
    not_negative = "alpha", policy = "policy", pattern = "match" })

for _, name in ipairs { "model", "data" } do
  if cfg[name] == "" then engine.config.fail("%s: expected a path, got nothing", name) end
end
engine.seed(cfg.seed)
local model = engine.load_model(cfg.model)   -- first, because its errors explain a bad folder
local tokenizer = engine.tokenizer(cfg.model)
local has_template = pcall(tokenizer.apply_chat_template, tokenizer,
  { { role = "user", content = "?" } })

if cfg.from ~= "" then
  local inner = cfg.from .. "/adapter"
  model = engine.lora.load(model, files.is_folder(inner) and inner or cfg.from)
else
  model = engine.nn.lora(model, { match = cfg.match, rank = cfg.rank, alpha = cfg.alpha })
end

local options = { path = cfg.data, encode = tokenizer, batch = cfg.batch, context = cfg.context,
  seed = cfg.seed, end_token = false }
local data, loss, accuracy
if cfg.method == "sft" then
  options.template, options.pack = has_template and tokenizer or nil, false
  data, loss = engine.data.chat(options), engine.losses.sft
else
  data = engine.data.preferences(options)
  function loss(m, batch)
    local value, rewards = engine.losses.dpo(m, batch, { beta = cfg.beta })
    accuracy = rewards.accuracy:item()
    engine.signal("dpo_accuracy", accuracy)
    return value
  end
end

local summary = engine.trainer { model = model, data = data, loss = loss, steps = cfg.steps,
  optimizer = engine.optim.adamw(model, { lr = cfg.lr, precision = cfg.precision }), clip = 1,
  schedule = engine.schedule.cosine { lr = cfg.lr, total = cfg.steps,
    warmup = math.ceil(cfg.steps / 20) },
  policy = cfg.policy, checkpoint = cfg.checkpoint ~= "" and cfg.checkpoint or nil,
  run = cfg.run, config = cfg, log = cfg.log }:run()

engine.lora.save(model, cfg.out .. "/adapter", { base_model = cfg.model })
engine.lora.merge(model):save(cfg.out .. "/merged")
if cfg.log ~= "json" then
  print(("loss %.4f%s; wrote %s/adapter and %s/merged"):format(summary.loss, accuracy
    and (", %.0f %% of the last pairs ranked as preferred"):format(100 * accuracy) or "", cfg.out,
    cfg.out))
end
