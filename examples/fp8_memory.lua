-- The memory of a training step by role, under bf16 and under an FP8 recipe: predicted from shapes
-- and formats, and measured. The model is a Llama (SwiGLU) or a GPT; the step has one batch.
--
--   ./engine examples/fp8_memory.lua
--   ./engine examples/fp8_memory.lua model=gpt recipe=fp8_current width=512 layers=8
--
-- Measured with the defaults, MiB; the predictions are equal:
--                            bf16   fp8_block
--   masters                 20.01       20.01
--   low-precision copies    10.00        0.25   of weights that no FP8 product reads
--   FP8 copies               0.00        4.88
--   gradients               20.01       20.01
--   moments                 40.03       20.01
--   kept for backward       58.65       37.32   of which in FP8: 14.67
--   all                    148.70      102.49
-- fp8_block stores each layer's input once, as codes, and quantizes it along the other dimension in
-- the backward pass; gate and up of a SwiGLU share one copy. The output of attention is stored only
-- as e5m6, 12 bits per number. The two inputs of SwiGLU are stored as codes; its output is not
-- stored.
local engine = require "engine"
local lab = require "engine.report.lab"

local RECIPES = { "fp32", "bf16", "fp16", "fp8_delayed", "fp8_current", "fp8_rowwise",
  "fp8_block", "fp8_block_te" }

local cfg = engine.config({ model = "llama", recipe = "fp8_block", beside = "bf16", width = 256,
  layers = 6, heads = 4, context = 256, batch = 4, vocab = 256 },
  { model = { "kind of model", choices = { "llama", "gpt" } },
    recipe = { "precision recipe", choices = RECIPES },
    beside = { "recipe to compare with", choices = RECIPES }, width = "features", layers = "blocks",
    heads = "attention heads", context = "tokens per sequence", batch = "sequences per step",
    vocab = "tokens in the vocabulary" },
  { count = "width layers heads context batch vocab" })
if cfg.width % (2 * cfg.heads) ~= 0 then
  engine.config.fail("width: expected a multiple of 2 * heads = %d, got %d", 2 * cfg.heads,
    cfg.width)
end

cfg.hidden = cfg.model == "llama" and math.ceil(8 * cfg.width / 3 / 128) * 128 or 4 * cfg.width

-- Returns how many bytes of bf16 tensors and f32 statistics are kept for the backward pass. FP8
-- codes are not included. fp8: whether the linear layers are in FP8. e5m6: whether the output of
-- attention is kept as e5m6 codes.
local function rest(fp8, e5m6)
  local rows, C, F = cfg.batch * cfg.context, cfg.width, cfg.hidden
  local llama = cfg.model == "llama"
  -- The input, 1 / std and, for layer norm, the mean.
  local norm = rows * C * 2 + rows * (llama and 4 or 8)
  -- q, k and v; the log-sum-exp; the rotated q and k; the output.
  local attention = rows * 3 * C * 2 + rows * cfg.heads * 4 + (llama and rows * 2 * C * 2
    or 0) + (e5m6 and 0 or rows * C * 2)
  -- Llama: gate, up and their product. GPT: the features before and after GELU.
  local feed_forward = llama and (fp8 and 0 or 3) * rows * F * 2 or (fp8 and 1 or 2) * rows * F * 2
  local block = 2 * norm + (fp8 and 0 or 2 * rows * C * 2) + attention + feed_forward
  -- The head is in bf16. It keeps its input, the logits and the log-sum-exp of the loss.
  return cfg.layers * block + norm + rows * C * 2 + rows * cfg.vocab * 2 + rows * 4
end

local function memory_of(precision)
  engine.seed(1)
  local options = { vocab = cfg.vocab, context = cfg.context, width = cfg.width, heads = cfg.heads,
    layers = cfg.layers, hidden = cfg.hidden }
  if cfg.model == "llama" then options.kv_heads = cfg.heads end
  local model = engine.nn[cfg.model](options)
  local opt = engine.optim.adamw(model, { precision = precision })
  local ids = engine.randint(0, cfg.vocab, { cfg.batch, cfg.context },
    { dtype = "i64", keep = true })
  local all = opt:memory(function() return model:loss(ids, ids) end)
  if precision:find("^fp8") or precision == "bf16" then
    all["kept for backward"].predicted = rest(opt.fp8,
      precision == "fp8_block") + all["of which in FP8"].predicted
  end
  return all
end

local MIB = 2 ^ 20
local function mib(bytes) return bytes and ("%.2f"):format(bytes / MIB) or "" end
local low, high, rows = memory_of(cfg.recipe), memory_of(cfg.beside), {}
local all = { 0, 0 }
for i, row in ipairs(low) do
  local other = high[i]
  rows[i] = { row.role, mib(other.predicted), mib(other.measured), mib(row.predicted),
    mib(row.measured),
    other.measured > 0 and ("%.2f"):format(row.measured / other.measured) or "" }
  if not row.role:find("^ ") then
    all[1], all[2] = all[1] + other.measured, all[2] + row.measured
  end
end
rows[#rows + 1] = { "all", "", mib(all[1]), "", mib(all[2]), ("%.2f"):format(all[2] / all[1]) }
lab.table({ "MiB", cfg.beside .. " predicted", "measured", cfg.recipe .. " predicted", "measured",
  "ratio" }, rows)
