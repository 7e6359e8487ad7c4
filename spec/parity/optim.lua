-- The engine's side of optim.py: optim.lua START.safetensors STEPS OUT.safetensors. START has the
-- weights w.NAME and a gradient g.NAME [STEPS x ..] for each. The loss of step t is sum(w g[t]) +
-- 0.05 sum(w^2). Each optimizer runs twice: as it is, and with its state saved, loaded into a new
-- optimizer and continued at every step, which must give the same bits. OUT gets RUN.NAME. A run
-- with a policy goes through a trainer, and again through one trainer for each step, which resumes
-- from the last one's checkpoint.
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

local Weights = engine.nn.class("Weights")
function Weights:init()
  for _, name in ipairs(names) do self:parameter(name, start["w." .. name]:keep()) end
end
local Numbers = {}
Numbers.__index = Numbers
function Numbers:next()
  self.at = self.at + 1
  return { at = self.at }
end
function Numbers:state() return { at = self.at } end
function Numbers:restore(state) self.at = state.at end

local function train_with_policy(run, resume, name)
  local model
  for last = resume and 1 or steps, steps do
    model = Weights()
    engine.trainer { model = model, optimizer = engine.optim[run[1]](model, run[2]), steps = last,
      data = setmetatable({ at = 0 }, Numbers), policy = run[3], log = "quiet", history = false,
      policy_options = run[4], run = resume and folder .. "/" .. name, resume = resume and "auto",
      loss = function(m, batch)
        local loss
        for _, key in ipairs(names) do
          local w = m[key]
          local part = (w * start["g." .. key]:select(1, batch.at)):sum() + (w * w):sum() * 0.05
          loss = loss and loss + part or part
        end
        return loss
      end }:run()
  end
  local list = {}
  for i, key in ipairs(names) do
    list[i] = { name = key, tensor = model[key]:detach():keep() }
  end
  return list
end

local out = {}
for name, run in pairs(RUNS) do
  local run_it = run[3] and train_with_policy or train
  local once, again = run_it(run), run_it(run, true, name)
  for i, p in ipairs(once) do
    out[name .. "." .. p.name] = p.tensor
    local a, b = p.tensor:view(-1):totable(), again[i].tensor:view(-1):totable()
    for k = 1, #a do
      assert(a[k] == b[k], ("%s: %s differs after saving and loading"):format(name, p.name))
    end
  end
end
engine.save(arg[3], out)
