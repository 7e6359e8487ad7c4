-- optimizers.lua START.safetensors STEPS OUT.safetensors: runs every optimizer on one fixed
-- problem, a tanh network on given data. START has x [N x F], y [N x K], w1 [H x F], b1 [H], w2 [K
-- x H]. OUT gets NAME.losses and NAME.w1 ... of each.
local engine = require "engine"
local fused_state = require "engine.train.fused_state"
local start, steps = engine.load(arg[1]), tonumber(arg[2])

-- parity.py has the same names and numbers
local RUNS = {
  sgd = { "sgd", { lr = 0.1, weight_decay = 0.01 } },
  momentum = { "sgd", { lr = 0.05, momentum = 0.9, dampening = 0.1, weight_decay = 0.01 } },
  nesterov = { "sgd", { lr = 0.05, momentum = 0.9, nesterov = true } },
  adam = { "adam", { lr = 0.01, weight_decay = 0.01 } },
  adamw = { "adamw", { lr = 0.01, beta2 = 0.95, weight_decay = 0.1 } },
  lion = { "lion", { lr = 0.003, weight_decay = 0.1 } },
}
for _, row in ipairs(fused_state.kinds) do assert(RUNS[row.name], "no run of " .. row.name) end

local out = {}
for name, run in pairs(RUNS) do
  local p, list = {}, {}
  for _, key in ipairs { "w1", "b1", "w2" } do
    p[key] = start[key]:keep():requires_grad()
    list[#list + 1] = { name = key, tensor = p[key] }
  end
  local opt, losses = engine.optim[run[1]](list, run[2]), {}
  for step in engine.steps(steps) do
    opt:zero_grad()
    local loss = engine.mse(start.x:linear(p.w1, p.b1):tanh():linear(p.w2), start.y)
    losses[step] = loss:item()
    loss:backward()
    opt:step()
  end
  out[name .. ".losses"] = engine.tensor(losses, { dtype = "f64", keep = true })
  for key, x in pairs(p) do out[name .. "." .. key] = x end
end
engine.save(arg[3], out)
