-- Trains the same model on the same data and seeds under fp32, bf16, fp16 and every FP8 recipe. The
-- runs differ only in their number formats. Prints the last losses on held-out text with their
-- spread, and the distance of each loss from bf16's.
--
--   ./engine examples/fp8_train.lua                                  a GPT, a few minutes
--   ./engine examples/fp8_train.lua recipes=bf16,fp8_block,fp8_delayed seeds=5 steps=1200
--   ./engine examples/fp8_train.lua model=moe recipes=bf16,fp8_block seeds=5 threads=1
--   ./engine examples/fp8_train.lua data=book.txt width=256 layers=4 steps=3000 svg=train.svg
--
-- Measured with the second command. Its loss begins at 5.5 and is flat long before the end. The
-- columns are the held-out loss and its distance from bf16's, seed by seed, as mean +- standard
-- deviation. In the columns on the left, products of bf16 ran on pairs of elements (AVX-512 BF16);
-- in the columns on the right, they ran in f32. (`engine doctor` shows which of the two this CPU
-- does.)
--   bf16         0.3918 +- 0.0012                         0.3919 +- 0.0015
--   fp8_block    0.3919 +- 0.0011    +0.029 +- 0.198 %    0.3926 +- 0.0017    +0.185 +- 0.122 %
--   fp8_delayed  0.3925 +- 0.0013    +0.178 +- 0.285 %    0.3926 +- 0.0018    +0.178 +- 0.209 %
-- The means are within 0.25 % of bf16's, which is less than the difference between bf16's own seeds
-- (0.4 %). After 300 steps, where the loss still falls fast, the distances are larger: fp8_block
-- +0.929 +- 1.626 %, fp8_delayed +1.738 +- 1.447 %. Measured with model=moe, seeds=2, steps=300,
-- also while the loss falls; two seeds do not establish an order:
--   fp32         0.5970 +- 0.0066    -1.019 +- 0.427 %
--   bf16         0.6031 +- 0.0041
--   fp16         0.5985 +- 0.0138    -0.769 +- 1.618 %
--   fp8_delayed  0.6009 +- 0.0058    -0.364 +- 0.286 %
--   fp8_current  0.5970 +- 0.0071    -1.006 +- 0.512 %
--   fp8_rowwise  0.6008 +- 0.0008    -0.378 +- 0.806 %
--   fp8_block    0.5951 +- 0.0011    -1.324 +- 0.842 %
local engine = require "engine"
local lab = require "engine.report.lab"

local RECIPES = { "fp32", "bf16", "fp16", "fp8_delayed", "fp8_current", "fp8_rowwise",
  "fp8_block", "fp8_block_te" }

local cfg = engine.config({ model = "gpt", recipes = RECIPES, seeds = 3, steps = 300, data = "",
  batch = 16, context = 64, width = 128, layers = 2, heads = 4, experts = 4, lr = 1e-3,
  threads = 0, svg = "" },
  { model = { "the model", choices = { "gpt", "moe" } },
    recipes = { "precisions, separated by commas", choices = RECIPES },
    seeds = "runs of each recipe, with seeds from 1", steps = "steps of each run",
    data = "a text file; empty: generated sentences (engine.report.lab)",
    batch = "sequences per step", context = "bytes per sequence",
    width = "features per byte", layers = "blocks", heads = "attention heads",
    experts = "experts of a mixture; each byte uses two", lr = "peak learning rate",
    threads = "threads to use; 0: all", svg = "a file for the loss curves" },
  { count = "seeds steps batch context width layers heads experts", natural = "threads",
    positive = "lr", file = "data", output = "svg" })
if cfg.width % cfg.heads ~= 0 then
  engine.config.fail("width: expected a multiple of heads = %d, got %d", cfg.heads, cfg.width)
end

if cfg.threads > 0 then engine.threads(cfg.threads) end

local text = lab.corpus(cfg.data, 160000)

-- Every tenth kilobyte is held out.
local train_text, test_text = {}, {}
for at = 1, #text, 1024 do
  local list = at % 10240 == 1 and test_text or train_text
  list[#list + 1] = text:sub(at, at + 1023)
end
train_text, test_text = table.concat(train_text), table.concat(test_text)

-- With model=moe, makes the feed-forward modules mixtures of experts.
local function add_experts(model)
  for _, block in ipairs(cfg.model == "moe" and model.blocks or {}) do
    block.mlp = engine.nn.moe { width = cfg.width, experts = cfg.experts, top_k = 2, std = 0.02 }
  end
end

-- Returns the held-out loss. Adds this seed's share of the mean training loss to each of the 40
-- points of the result's curve.
local function run(recipe, seed, result)
  local curve = result.values
  return lab.train { sizes = cfg, seed = seed, precision = recipe, text = train_text,
    held_out = test_text, change = add_experts,
    loss = function(m, batch)
      local loss = m:loss(batch.x, batch.y)
      if cfg.model == "moe" then
        for _, block in ipairs(m.blocks) do loss = loss + block.mlp.balance * 0.01 end
      end
      return loss
    end,
    on_step = function(t, record)
      local place = math.ceil(t.steps_done * 40 / cfg.steps)
      curve[place] = (curve[place] or 0) + record.loss / (cfg.steps / 40) / cfg.seeds
    end }
end

local results, base = lab.by_seed(cfg.recipes, cfg.seeds, run)
lab.table({ cfg.model, "held-out loss", "relative to " .. base.name .. ", by seed" },
  lab.loss_rows(results, "%+.3f"))
local places = {}
for i = 1, 40 do places[i] = tostring(math.ceil(i * cfg.steps / 40)) end
lab.svg(cfg.svg, { title = "training loss" .. (cfg.seeds == 1 and "" or ", mean of "
  .. cfg.seeds .. " seeds"), x = places, y = "step", series = results })
return results
