-- Runs all policies on one task: the same small GPT, text and seed, in fp16. Only the loss scale
-- differs. Shows how many steps each policy skips, which share of the gradients underflows in the
-- applied steps, and the loss. Policies that grow the scale after a number of good steps do so
-- after `window` steps here, so that growth happens within the run.
--
--   ./engine examples/compare.lua
--   ./engine examples/compare.lua policies=dynamic,megatron,./mine.lua seeds=5 steps=600
--
-- Measured with seeds=5:
--               skipped of 300   underflow   loss of the last 15 steps
--   dynamic     4.2              0.023 %     0.955 +- 0.029
--   deepspeed   5.6              0.026 %     0.973 +- 0.045
--   megatron    22.0             0.014 %     1.000 +- 0.048               scale begins at 2^32
--   guarded     2.2              0.026 %     0.965 +- 0.033
--   max_value   3.4              0.025 %     0.967 +- 0.041
--   metaseq     0                2.3 %       0.975 +- 0.061               scale begins at 4
--   static      0                16 %        0.971 +- 0.056               scale 1
-- On a task as small as this one the losses hardly differ, because underflowed gradients still hold
-- some bits. The skipped steps differ.
local engine = require "engine"
local lab = require "engine.report.lab"

local cfg = engine.config({ policies = { "all" }, steps = 300, window = 50, seeds = 1, data = "",
  batch = 8, context = 32, width = 64, layers = 2, heads = 4, lr = 3e-3 },
  { policies = "names and files, separated by commas; all: the policies of the engine",
    steps = "training steps per run",
    window = "good steps until the scale grows, for policies that have such an option",
    seeds = "runs of each policy, with seeds from 1",
    data = "a text file; empty: sentences of a small grammar", batch = "sequences per step",
    context = "bytes per sequence",
    width = "features per byte", layers = "blocks", heads = "attention heads",
    lr = "peak learning rate" },
  { count = "steps window seeds batch context width layers heads", positive = "lr",
    policy = "policies", file = "data" })
if cfg.width % cfg.heads ~= 0 then
  engine.config.fail("width: expected a multiple of heads = %d, got %d", cfg.heads, cfg.width)
end

local text = lab.corpus(cfg.data, 40000)

-- The names of the policies' options for the number of good steps before a growth. (`period` has
-- another meaning in bandit and histogram.)
local WINDOWS = { "growth_interval", "scale_window", "increment_period", "dynamic_growth_steps",
  "period", "incr_every_n_steps", "step_window", "loss_scale_steps", "scale_seq_len" }
local NO_WINDOW = { bandit = true, histogram = true }

local function options_of(name)
  local known = engine.policy.load(name).options
  for _, window in ipairs(NO_WINDOW[name] and {} or WINDOWS) do
    if type(known[window]) == "number" then return { [window] = cfg.window } end
  end
  return {}
end

-- Makes one run under the policy `name` with `options`. Returns a table: the first and last losses,
-- the steps skipped, the share of nonzero gradients below fp16's normal numbers, the mean log2
-- scale, and the reason if the policy stopped the run.
local function run(name, options, seed)
  engine.seed(seed)
  local model = engine.nn.gpt { vocab = 256, context = cfg.context, width = cfg.width,
    heads = cfg.heads, layers = cfg.layers }
  local few, applied = math.max(1, math.floor(cfg.steps / 20)), 0
  local r = { first = 0, last = 0, underflow = 0, log2 = 0 }
  local summary = engine.trainer {
    model = model, data = engine.data.text { text = text, batch = cfg.batch, context = cfg.context,
      seed = seed },
    optimizer = engine.optim.adamw(model, { lr = cfg.lr, decay = "matrices", precision = "fp16" }),
    schedule = engine.schedule.cosine { lr = cfg.lr, warmup = math.ceil(cfg.steps / 20),
      total = cfg.steps },
    policy = name, policy_options = options, steps = cfg.steps, clip = 1.0, log = "quiet",
    on_step = function(trainer, record, verdict)
      if trainer.steps_done <= few then r.first = r.first + record.loss / few end
      if trainer.steps_done > cfg.steps - few then r.last = r.last + record.loss / few end
      r.log2 = r.log2 + math.log(record.scale) / math.log(2) / cfg.steps
      if verdict:what() == "step" then
        applied = applied + 1
        r.underflow = r.underflow + tonumber(record.underflow) / math.max(1,
          tonumber(record.count - record.zeros))
      end
    end }:run()
  r.skipped, r.stopped = summary.skipped, summary.stopped
  r.underflow = r.underflow / math.max(1, applied)
  return r
end

-- Returns the mean and the standard deviation of a field of the runs.
local function mean(runs, field)
  local values = {}
  for i, r in ipairs(runs) do values[i] = r[field] end
  return lab.mean(values)
end

print(("%-16s %9s %11s %11s %17s"):format("policy", "skipped", "underflow", "log2 scale", "loss"))
local results = {}
for _, name in ipairs(cfg.policies[1] == "all" and engine.policy.names() or cfg.policies) do
  local options, rows, stopped = options_of(name), {}, nil
  for seed = 1, cfg.seeds do
    rows[seed] = run(name, options, seed)
    stopped = stopped or rows[seed].stopped
  end
  local first = mean(rows, "first")
  local last, spread = mean(rows, "last")
  print(("%-16s %9.1f %10.3f%% %11.2f %8.4f -> %.4f%s%s"):format(name, mean(rows, "skipped"),
    100 * mean(rows, "underflow"), mean(rows, "log2"), first, last,
    cfg.seeds > 1 and (" +- %.4f"):format(spread) or "",
    stopped and "  stopped: " .. stopped or ""))
  results[#results + 1] = { name = name, loss = last, rows = rows }
end
return results
