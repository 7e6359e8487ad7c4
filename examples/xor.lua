-- The smallest job: two inputs, one hidden layer, the XOR function, in f32. It shows a module, an
-- optimizer and the plain loop, in which every turn of engine.steps is one step.
--
--   ./engine examples/xor.lua
--   ./engine examples/xor.lua steps=500 lr=0.03 hidden=8
local engine = require "engine"

local cfg = engine.config({ steps = 300, lr = 0.05, hidden = 8, seed = 1 },
  { steps = "updates", lr = "learning rate of Adam", hidden = "hidden features",
    seed = "seed for the initial weights" },
  { count = "steps hidden", natural = "seed", positive = "lr" })

engine.seed(cfg.seed)
local nn = engine.nn
local net = nn.sequential { nn.linear(2, cfg.hidden), nn.tanh(), nn.linear(cfg.hidden, 1) }
local opt = engine.optim.adam(net, { lr = cfg.lr })

local x = engine.tensor { { 0, 0 }, { 0, 1 }, { 1, 0 }, { 1, 1 } }     -- [4 x 2]
local y = engine.tensor { { 0 }, { 1 }, { 1 }, { 0 } }                 -- [4 x 1]

for step in engine.steps(cfg.steps) do
  opt:zero_grad()
  local loss = engine.mse(net(x), y)
  loss:backward()
  opt:step()
  if step % math.ceil(cfg.steps / 6) == 0 or step == cfg.steps then
    print(("step %d  loss %.6f"):format(step, loss:item()))
  end
end

local guesses = engine.scope(function() return net(x):view(-1):totable() end)
for i, row in ipairs(x:totable()) do
  print(("%d xor %d = %.3f"):format(row[1], row[2], guesses[i]))
end
