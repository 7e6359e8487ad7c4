-- Activation checkpointing: memory and time of a training step of GPT-2 with and without
-- checkpoint=block, to compare with the prediction of `engine plan`. One process, in which the two
-- kinds of step alternate, measures the times; each peak is measured in a separate process.
--   ./engine spec/bench/checkpoint.lua [precision=bf16] [batch=1] [context=1024] [steps=3]
local engine = require "engine"
local helper = require "spec.helper"
local machine = require "engine.base.machine"

local cfg = engine.config { precision = "bf16", batch = 1, context = 1024, layers = 12, width = 768,
  vocab = 50257, steps = 3, only = "" }
engine.seed(1)
local model = engine.nn.gpt { vocab = cfg.vocab, context = cfg.context, width = cfg.width,
  heads = cfg.width / 64, layers = cfg.layers }
local ids = engine.rand { cfg.batch, cfg.context + 1 } * (cfg.vocab - 1)
local x = ids:slice(2, 1, cfg.context):to("i32"):keep()
local y = ids:slice(2, 2, cfg.context + 1):to("i64"):keep()
local losses = {}
local trainer = engine.trainer { model = model, log = "quiet", steps = 1e9, policy = "static",
  optimizer = engine.optim.adamw(model, { lr = 1e-4, precision = cfg.precision }),
  data = { next = function() return { x = x, y = y } end } }

local function step(which)
  model:checkpoint(which)
  local began, busy = machine.clock(), os.clock()
  local record = trainer:step()
  losses[#losses + 1] = ("%.17g"):format(record.loss)
  return machine.clock() - began, os.clock() - busy
end

local function resident()                              -- bytes: the most this process has had
  return 1024 * tonumber(helper.read("/proc/self/status"):match("VmHWM:%s+(%d+)"))
end

if cfg.only ~= "" then
  local before = resident()
  for _ = 1, 2 do step(cfg.only == "block" and "block" or false) end
  print(("peak %d %d %d %s"):format(engine.memory().step.peak, resident(), before, losses[2]))
  return
end

local peaks = {}
for _, only in ipairs { "none", "block" } do
  local words = { arg[0], "only=" .. only }
  for _, word in ipairs(arg) do words[#words + 1] = word end
  local result = helper.run(words)
  local peak, most, before, loss = result.out:match("peak (%d+) (%d+) (%d+) (%S+)")
  assert(peak, result.err)
  peaks[only] = { step = tonumber(peak), most = tonumber(most), before = tonumber(before),
    loss = loss }
end
local none, block = peaks.none, peaks.block
assert(none.loss == block.loss, "the losses differ")
step(false)
step "block"
local plain, again, plain_busy, again_busy = {}, {}, {}, {}
for i = 1, cfg.steps do
  plain[i], plain_busy[i] = step(false)
  again[i], again_busy[i] = step "block"
end
for _, list in ipairs { plain, again, plain_busy, again_busy } do table.sort(list) end
local middle = math.ceil(cfg.steps / 2)
local MIB = 2 ^ 20
local function row(name, a, b)
  print(("%-36s %10.1f %10.1f %8.1f %%"):format(name, a / MIB, b / MIB, 100 * b / a))
end
print(("%s, %s, batch %d"):format(tostring(model):match("^[^\n]*"), cfg.precision, cfg.batch))
print(("%-36s %10s %10s"):format("MiB", "all kept", "block"))
row("activations and their gradients, peak", none.step, block.step)
row("resident set, peak (VmHWM)", none.most, block.most)
row("  rise over the peak before any step", none.most - none.before, block.most - block.before)
local function times(name, a, b)
  print(("%-36s %10.2f %10.2f %8.2f x"):format(name, a[middle], b[middle], b[middle] / a[middle]))
end
times("seconds per step", plain, again)
times("processor seconds per step", plain_busy, again_busy)
