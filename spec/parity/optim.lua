-- The engine's side of optim.py: optim.lua START.safetensors STEPS OUT.safetensors. START has the
-- weights w.NAME and a gradient g.NAME [STEPS x ..] for each. The loss of step t is sum(w g[t]) +
-- 0.05 sum(w^2). Each optimizer runs twice: as it is, and with its state saved, loaded into a new
-- optimizer and continued at every step, which must give the same bits. OUT gets RUN.NAME.
local engine = require "engine"
local start, steps = engine.load(arg[1]), tonumber(arg[2])

local RUNS = dofile(arg[0]:match("^(.*)/") .. "/optim_runs.lua")

local names = {}
for name in pairs(start) do names[#names + 1] = name:match("^w%.(.*)$") end
table.sort(names)

local folder = arg[3]:match("^(.*)/")
local function train(run, reload)
  local list = {}
  for i, name in ipairs(names) do
    list[i] = { name = name, tensor = start["w." .. name]:keep():requires_grad() }
  end
  local opt = engine.optim[run[1]](list, run[2])
  for t in engine.steps(steps) do
    opt:zero_grad()
    local loss
    for _, p in ipairs(list) do
      local w = p.tensor
      local part = (w * start["g." .. p.name]:select(1, t)):sum() + (w * w):sum() * 0.05
      loss = loss and loss + part or part
    end
    loss:backward()
    opt:step()
    if reload then
      local path = folder .. "/state.safetensors"
      engine.save(path, opt:state_tensors())
      local fresh = engine.optim[run[1]](list, run[2])
      fresh:load_state(engine.load(path), opt.updates)
      opt = fresh
    end
  end
  return list
end

local out = {}
for name, run in pairs(RUNS) do
  local once, again = train(run), train(run, true)
  for i, p in ipairs(once) do
    out[name .. "." .. p.name] = p.tensor
    local a, b = p.tensor:view(-1):totable(), again[i].tensor:view(-1):totable()
    for k = 1, #a do
      assert(a[k] == b[k], ("%s: %s differs after saving and loading"):format(name, p.name))
    end
  end
end
engine.save(arg[3], out)
