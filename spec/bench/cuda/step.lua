-- step.lua PRECISION LAYERS WIDTH HEADS VOCAB CONTEXT BATCH [MODE] [DEVICE]: times a training step
-- on a card: milliseconds, tokens/s, and the model's own floating-point operations as a share of
-- the card's peak. MODE: sync, lagged or graph. torch_step.py is its counterpart. PROFILE=1 adds a
-- profile.
local engine = require "engine"
local machine = require "engine.base.machine"

local precision, layers, width, heads = arg[1], tonumber(arg[2]), tonumber(arg[3]), tonumber(arg[4])
local vocab, context, batch = tonumber(arg[5]), tonumber(arg[6]), tonumber(arg[7])
local mode, device = arg[8] or "sync", arg[9] or "cuda"
-- dense bf16 of an H200, from its datasheet
local PEAK = tonumber(os.getenv("PEAK_TFLOPS")) or 989

engine.device(device)
engine.seed(1)
local model = engine.nn.gpt { vocab = vocab, context = context, width = width, heads = heads,
  layers = layers }
local function tokens()
  return engine.randint(0, vocab, batch, context, { dtype = "i32", keep = true })
end
local x, y = tokens(), tokens()
local data = { next = function() return { x = x, y = y, tokens = batch * context } end }
local trainer = engine.trainer {
  model = model, data = data, steps = 1, clip = 1.0, precision = precision,
  mode = mode ~= "sync" and mode ~= "graph" and mode or nil, graph = mode == "graph" or nil,
  optimizer = engine.optim.adamw(model,
    { lr = 1e-4, weight_decay = 0.1, decay = "matrices", precision = precision }),
}

local warm, timed = tonumber(os.getenv("WARM")) or 5, tonumber(os.getenv("STEPS")) or 20
local record
for _ = 1, warm do record = trainer:step() end
engine.synchronize()
local seconds = {}
for i = 1, timed do
  local from = machine.clock()
  record = trainer:step()
  engine.synchronize()
  seconds[i] = machine.clock() - from
end
local from = machine.clock()
for _ = 1, timed do record = trainer:step() end
engine.synchronize()
local whole = (machine.clock() - from) / timed
table.sort(seconds)
local best = math.min(seconds[math.floor(timed / 2) + 1], whole)

-- FLOP of a step: 6 per token and per weight that multiplies (the tied head does, the embedding
-- tables do not), and 6 * T * C per layer and token for attention: causal attention needs half of
-- the T * T products, which take 12 * T * C.
local matrices = layers * 12 * width * width + vocab * width
local flops = (6 * matrices + 6 * layers * context * width) * batch * context
local rate = flops / best / 1e12
print(("engine %s %s %s: %.2f ms a step, %.0f tokens/s, %.1f TFLOP/s, model FLOP/s utilisation " ..
  "%.1f %% of %d, loss %.4f, host %.2f ms"):format(device, mode, precision, 1e3 * best,
  batch * context / best, rate, 100 * rate / PEAK, PEAK, record and record.loss or 0 / 0,
  1e3 * whole))
print(("model FLOP a step: (6 P + 6 L T C) x tokens = (6 x %d + 6 x %d x %d x %d) x %d = %.4g; " ..
  "P: weights that multiply, 12 L C^2 + V C; utilisation: model FLOP / seconds / %d TFLOP/s, " ..
  "dense bf16 from the datasheet (PEAK_TFLOPS)")
  :format(matrices, layers, context, width, batch * context, flops, PEAK))
print(tostring(engine.memory()))
if os.getenv("PROFILE") then print(engine.profile(function() trainer:step() end)) end
