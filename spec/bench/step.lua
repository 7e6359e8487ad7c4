-- step.lua PRECISION LAYERS WIDTH HEADS VOCAB CONTEXT BATCH [DEVICE]: training steps on demand, for
-- bench.py. Reads a number of steps from each line of stdin, makes them, and prints the seconds of
-- each step. torch_step.py is its counterpart.
local engine = require "engine"
local machine = require "engine.base.machine"

local precision, layers, width, heads, vocab, context, batch = arg[1], tonumber(arg[2]),
  tonumber(arg[3]), tonumber(arg[4]), tonumber(arg[5]),
  tonumber(arg[6]), tonumber(arg[7])
if arg[8] then engine.device(arg[8]) end
engine.seed(1)
local model = engine.nn.gpt { vocab = vocab, context = context, width = width, heads = heads,
  layers = layers }
local x, y = engine.randint(0, vocab, batch, context, { dtype = "i32", keep = true }),
  engine.randint(0, vocab, batch, context, { dtype = "i32", keep = true })
local data = { next = function() return { x = x, y = y, tokens = batch * context } end }
local trainer = engine.trainer {
  model = model, data = data, steps = 1, clip = 1.0, precision = precision,
  optimizer = engine.optim.adamw(model, { lr = 1e-4, weight_decay = 0.1, decay = "matrices",
    precision = precision }),
}
print(("ready %d"):format(model:count()))
io.stdout:flush()
for line in io.lines() do
  local seconds = {}
  for i = 1, tonumber(line) do
    local from = machine.clock()
    trainer:step()
    engine.synchronize()
    seconds[i] = ("%.6f"):format(machine.clock() - from)
  end
  print(table.concat(seconds, " "))
  io.stdout:flush()
end
