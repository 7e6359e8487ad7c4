-- Trains the same small GPT on the same data and seeds under bf16, MXFP8, MXFP4 and NVFP4, and with
-- parts of the FP4 recipes changed: the scale rule, stochastic rounding of gradients, some
-- transformer blocks in high precision. Prints losses on held-out text and their distance from
-- bf16's. The CPU computes the formats bit for bit (docs/microscaling.md).
--
--   ./engine examples/fp4_train.lua                       two seeds, minutes
--   ./engine examples/fp4_train.lua seeds=5 steps=1000 data=lua.txt svg=fp4.svg
--
-- Measured with the second command, as mean +- standard deviation over the seeds; lua.txt is the
-- 1.57 MB of this project's Lua (find lua policies -name '*.lua' | sort | xargs cat > lua.txt):
--   bf16                      2.0697 +- 0.0162
--   mxfp8                     2.0687 +- 0.0127            -0.05 +- 0.89 %
--   mxfp4                     2.1455 +- 0.0131            +3.66 +- 0.69 %
--   mxfp4_tseng               2.0718 +- 0.0105            +0.10 +- 0.61 %
--   nvfp4                     2.1190 +- 0.0106            +2.38 +- 0.56 %
--   nvfp4_four_over_six       2.1159 +- 0.0093            +2.24 +- 0.49 %
--   mxfp4, floor              2.1613 +- 0.0199            +4.42 +- 0.50 %
--   mxfp4, nearest            2.1361 +- 0.0183            +3.21 +- 0.67 %
--   nvfp4, nearest            2.1135 +- 0.0195            +2.11 +- 0.54 %
--   nvfp4, ends bf16          2.0701 +- 0.0225            +0.02 +- 0.93 %
--   nvfp4, forward bf16 late  2.0827 +- 0.0160            +0.63 +- 0.79 %
-- A forward pass in bf16 while the learning rate decays leaves a quarter of nvfp4's gap, and bf16
-- in the first and the last transformer block closes the gap. mxfp4_tseng, whose whole forward pass
-- is in bf16, has no gap. Stochastic rounding of gradients gains nothing here. On generated
-- sentences (no data=, 600 steps, loss 0.45) the gaps are 6.7 % for nvfp4, 0.9 % for nvfp4 with
-- forward bf16 late and 2.1 % for nvfp4 with ends bf16.
--
-- Measured with the first command (generated sentences; bf16 1.6335, its seeds 1.33 % apart):
--   mxfp4 +2.05 +- 2.15 %, mxfp4_tseng +1.72 +- 0.41 %, mxfp4_quartet +3.24 +- 1.88 %,
--   mxfp4_tetrajet +3.63 +- 1.01 %, nvfp4 +2.43 +- 2.62 %, nvfp4_quartet2 +2.91 +- 0.83 %
--   fp4_microsoft +2.52 +- 1.34 %
-- Two seeds do not tell these recipes apart.
local engine = require "engine"
local lab = require "engine.report.lab"

local cfg = engine.config({ seeds = 2, steps = 150, batch = 8, context = 64, width = 64, layers = 4,
  lr = 2e-3, recipes = "", data = "", svg = "" }, {
  seeds = "runs of each recipe, with seeds from 1",
  steps = "steps of each run", batch = "sequences per step", context = "bytes per sequence",
  width = "features per byte, a multiple of 32", layers = "blocks, 3 or more",
  lr = "peak learning rate", recipes = "a Lua pattern of recipes to run beside bf16; empty: all",
  data = "a text file; empty: generated sentences (engine.report.lab)",
  svg = "a file for the curves of training" },
  { count = "seeds steps batch context width layers", positive = "lr", pattern = "recipes",
    file = "data", output = "svg" })
if cfg.width % 32 ~= 0 or cfg.layers < 3 then
  engine.config.fail("expected a width that is a multiple of 32, and 3 or more layers, got %d " ..
    "and %d", cfg.width, cfg.layers)
end

local function fp4(name, base, fp8) return { name = name, base = base, fp8 = fp8 } end
local FLOOR = { format = "e2m1", rule = "floor" }
local RECIPES = { "bf16", "mxfp8", "mxfp4", "mxfp4_tseng", "mxfp4_quartet",
  "mxfp4_tetrajet", "mxfp4_tetrajet_q_ema", "nvfp4", "nvfp4_four_over_six", "nvfp4_quartet2",
  "fp4_microsoft",
  fp4("mxfp4, floor", "mxfp4", { x = FLOOR, w = FLOOR,
    dy = { format = "e2m1", rule = "floor", stochastic = true } }),
  fp4("mxfp4, nearest", "mxfp4", { dy = { format = "e2m1", rule = "rceil" } }),
  fp4("nvfp4, nearest", "nvfp4", { dy = { rule = "nvfp4" } }),
  fp4("nvfp4, ends bf16", "nvfp4", { high_first = 1, high_last = 1 }),
  fp4("nvfp4, forward bf16 late", "nvfp4", { policy = "forward_high_before_decay",
    ladder = { { forward = { high = true } } } }) }

local text = lab.corpus(cfg.data, 120000)
local cut = math.floor(0.9 * #text)
local train_text, test_text = text:sub(1, cut), text:sub(cut + 1)
local PLACES = math.min(20, cfg.steps)

-- Returns the held-out loss. Divides the run into PLACES parts and adds the training losses of part
-- i to result.values[i].
local function run(recipe, seed, result)
  local curve = result.values
  return lab.train { sizes = cfg, seed = seed, precision = recipe, text = train_text,
    held_out = test_text,
    schedule = engine.schedule.wsd { lr = cfg.lr, warmup = math.ceil(cfg.steps / 20),
      decay = math.ceil(cfg.steps / 5), total = cfg.steps },
    on_step = function(trainer, record)
      local place = math.ceil(trainer.steps_done * PLACES / cfg.steps)
      curve[place] = (curve[place] or 0) + record.loss
    end }
end

local chosen = {}
for _, recipe in ipairs(RECIPES) do
  local name = recipe.name or recipe
  if name == "bf16" or name:find(cfg.recipes) then chosen[#chosen + 1] = recipe end
end
local results, base = lab.by_seed(chosen, cfg.seeds, run)
lab.table({ "recipe", "held-out loss", "relative to bf16, by seed" },
  lab.loss_rows(results, "%+.2f"))

-- A recipe counts as worse than bf16 only if, with every seed, it is worse by more than the
-- difference between bf16's own seeds.
local spread = 0
for _, loss in ipairs(base.losses) do
  spread = math.max(spread, 100 * math.abs(loss / base.losses[1] - 1))
end
local worse = {}
for _, r in ipairs(results) do
  local least = math.min(unpack(r.excess))
  if least > spread and cfg.seeds > 1 then worse[#worse + 1] = r.name end
end
print(("Conclusion: seeds of bf16 are %.2f %% apart; %s."):format(spread, cfg.seeds == 1
  and "one seed does not tell recipes apart" or #worse == 0
  and "no recipe is worse than bf16 by more than that with every seed"
  or "worse than bf16 by more than that with every seed: " .. table.concat(worse, "; ")))
if cfg.svg ~= "" then
  local places, bf16 = {}, { unpack(base.values) }
  for i = 1, PLACES do
    places[i] = tostring(math.floor(i * cfg.steps / PLACES))
    for _, r in ipairs(results) do r.values[i] = 100 * (r.values[i] / bf16[i] - 1) end
  end
  lab.svg(cfg.svg, { title = "excess training loss over bf16, %, all seeds", x = places,
    y = "step", series = results })
end
return results
